//! The processes of this machine, and what the kernel tells of them in /proc.
//!
//! Who reads of a process what its memory, its files or its namespaces are waits while the process is in `execve`. A user
//! can make that last for ever: with a file, closed by `execve`, whose filesystem they serve and never answer for. So
//! nobody here waits for a single process without a [bound](PATIENCE). What /proc tells at once of each process is its
//! `status`, `cmdline`, `comm` and `mountinfo`.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long the kernel may take to tell what it knows of one process, after it has told of the last other one.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// After how long without a word the next processes are looked at beside the one that is waited for.
const STALL: Duration = Duration::from_millis(5);

/// The processes that somebody still waits for. They are not asked again: each would keep another thread.
static WAITED_FOR: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

/// All processes but this one.
///
/// # Errors
/// If /proc can't be read.
pub fn pids() -> io::Result<Vec<i32>> {
    let own = std::process::id() as i32;
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc")? {
        // What has no number for a name is no process.
        let pid = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        all.extend(pid.filter(|pid| *pid != own));
    }
    Ok(all)
}

/// What `look` finds out about each of these processes, in no order; `None` of one of which the kernel tells nothing within
/// [`PATIENCE`].
///
/// # Errors
/// If there is no thread to look with.
pub fn look_at<T: Send + 'static>(
    pids: impl IntoIterator<Item = i32>,
    look: impl Fn(i32) -> T + Send + Sync + 'static,
) -> io::Result<Vec<(i32, Option<T>)>> {
    let (known, asked): (Vec<i32>, Vec<i32>) = {
        let waited_for = lock(&WAITED_FOR);
        pids.into_iter().partition(|pid| waited_for.contains(pid))
    };
    let mut found: Vec<(i32, Option<T>)> = known.into_iter().map(|pid| (pid, None)).collect();
    let mut missing: BTreeSet<i32> = asked.iter().copied().collect();
    let queue = Arc::new(Mutex::new(VecDeque::from(asked)));
    let look = Arc::new(look);
    let (sender, receiver) = channel();
    let start = || {
        let (queue, look, sender) = (Arc::clone(&queue), Arc::clone(&look), sender.clone());
        std::thread::Builder::new().name("look at processes".to_owned()).spawn(move || {
            loop {
                // The lock is not held while it looks.
                let next = lock(&queue).pop_front();
                let Some(pid) = next else { return };
                let answer = look(pid);
                // Together: who notes that it is waited for must not miss the answer.
                let mut waited_for = lock(&WAITED_FOR);
                waited_for.remove(&pid);
                // Nobody may be listening any more.
                let _ = sender.send((pid, answer));
            }
        })
    };
    let mut heard = Instant::now();
    let mut started = if missing.is_empty() { Ok(()) } else { start().map(drop) };
    while !missing.is_empty() && started.is_ok() {
        match receiver.recv_timeout(STALL) {
            Ok((pid, answer)) => {
                heard = Instant::now();
                missing.remove(&pid);
                found.push((pid, Some(answer)));
            }
            Err(_) if !lock(&queue).is_empty() => started = start().map(drop),
            Err(_) if heard.elapsed() >= PATIENCE => break,
            Err(_) => {}
        }
    }
    // Those that nobody has begun to look at.
    for pid in lock(&queue).drain(..) {
        missing.remove(&pid);
    }
    let mut waited_for = lock(&WAITED_FOR);
    while let Ok((pid, answer)) = receiver.try_recv() {
        missing.remove(&pid);
        found.push((pid, Some(answer)));
    }
    waited_for.extend(&missing);
    drop(waited_for);
    found.extend(missing.into_iter().map(|pid| (pid, None)));
    started.map(|()| found)
}

/// What `look` finds out about one process, as [`look_at`] does.
///
/// # Errors
/// If there is no thread to look with.
pub fn look_at_one<T: Send + 'static>(
    pid: i32,
    look: impl Fn(i32) -> T + Send + Sync + 'static,
) -> io::Result<Option<T>> {
    Ok(look_at([pid], look)?.pop().and_then(|(_, found)| found))
}

/// Why it is not known what a process has.
pub fn no_answer(pid: i32) -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!(
            "the kernel does not tell what process {pid} has: it waits in execve, for a filesystem that does not answer"
        ),
    )
}

/// The real, the effective, the saved user of a process, and that of its first thread for files.
///
/// # Errors
/// The kernel's, also if the process has ended.
pub fn users_of(pid: i32) -> io::Result<[u32; 4]> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    let users: Vec<u32> = users.split_whitespace().map_while(|user| user.parse().ok()).collect();
    users.try_into().map_err(|_| io::Error::other(format!("/proc/{pid}/status tells no users")))
}

/// Whether what /proc said of a process means that there is none any more.
pub(crate) fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Both are whole after every single statement that changes them.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_answer_is_asked_once_and_holds_up_nobody() {
        // No process has these numbers; what is asked about them is not the kernel.
        let pids = || (-40..0).chain([i32::MIN, i32::MIN + 1]);
        let gate = Arc::new((Mutex::new((0, false)), std::sync::Condvar::new()));
        let look = {
            let gate = Arc::clone(&gate);
            move |pid: i32| {
                if pid < -1000 {
                    let (state, opened) = &*gate;
                    let mut state = state.lock().unwrap();
                    state.0 += 1;
                    drop(opened.wait_while(state, |(_, open)| !*open).unwrap());
                }
                pid.wrapping_mul(2)
            }
        };
        let began = Instant::now();
        for _ in 0..3 {
            let mut found = look_at(pids(), look.clone()).unwrap();
            found.sort();
            assert_eq!(found[..2], [(i32::MIN, None), (i32::MIN + 1, None)]);
            let others: Vec<_> = (-40..0).map(|pid| (pid, Some(pid * 2))).collect();
            assert_eq!(found[2..], others);
        }
        let asked = gate.0.lock().unwrap().0;
        assert_eq!(asked, 2);
        assert!(began.elapsed() < PATIENCE * 2, "{:?}", began.elapsed());
        gate.0.lock().unwrap().1 = true;
        gate.1.notify_all();
        // As soon as the old question is answered they are asked again.
        let until = Instant::now() + Duration::from_secs(10);
        while look_at(pids(), look.clone()).unwrap().iter().any(|(_, found)| found.is_none()) {
            assert!(Instant::now() < until);
        }
        assert!(lock(&WAITED_FOR).iter().all(|pid| *pid > 0));
    }

    #[test]
    fn the_users_of_a_process_are_told() {
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(users_of(std::process::id() as i32).unwrap(), [own; 4]);
        assert!(has_ended(&users_of(i32::MAX).unwrap_err()));
    }
}
