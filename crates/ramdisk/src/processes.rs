//! The processes of this machine, and what the kernel tells of them in /proc.
//!
//! Who reads of a process what its memory, its files or its namespaces are waits while the process is in `execve`. A user
//! can make that last for ever: with a file, closed by `execve`, whose filesystem they serve and never answer for. So
//! nobody here waits for a single process without a [bound](PATIENCE), nor for more than a few of one user's. What /proc
//! tells at once of each process is its `status`, `cmdline`, `comm` and `mountinfo`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long the kernel may take to tell what it knows of one process, after it has told of the last other one.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// After how long without a word the next processes are looked at beside the one that is waited for.
const STALL: Duration = Duration::from_millis(5);

/// How long nothing at all may be told in all, while processes are looked at: some may answer slowly again and again.
const MOST_PATIENCE: Duration = Duration::from_secs(5);

/// When so many processes of a user are waited for, no more of that user's are asked. Root's are.
const MOST_OF_A_USER: usize = 8;

/// When so many threads wait, nobody starts more than one.
const MOST_THREADS: usize = 256;

/// Enough for what such a thread does.
const STACK: usize = 256 << 10;

/// The processes that somebody still waits for, and whose they are. They are not asked again: each would keep another
/// thread.
static WAITED_FOR: Mutex<BTreeMap<i32, Option<u32>>> = Mutex::new(BTreeMap::new());

/// The threads that look or wait.
static THREADS: AtomicUsize = AtomicUsize::new(0);

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
/// [`PATIENCE`], and of one that is not asked because too many of its user's don't answer.
///
/// # Errors
/// If there is no thread to look with.
pub fn look_at<T: Send + 'static>(
    pids: impl IntoIterator<Item = i32>,
    look: impl Fn(i32) -> T + Send + Sync + 'static,
) -> io::Result<Vec<(i32, Option<T>)>> {
    // Who has started a set-uid program is its real user. One that has ended has none, and is looked at: that tells it.
    look_at_those_of(pids, |pid| users_of(pid).ok().map(|[user, ..]| user), look)
}

/// What is left to do of one look at processes.
struct PendingLook {
    queue: VecDeque<i32>,
    /// Those that are being looked at, and whose they are.
    asked: BTreeMap<i32, Option<u32>>,
    /// Those of users of whom as many as may be are being looked at.
    deferred: BTreeMap<u32, Vec<i32>>,
}

/// What a thread does next.
enum Next {
    Look(i32),
    PassOver(i32),
    Done,
}

impl PendingLook {
    /// Takes the next process. `user` must answer at once.
    fn next(&mut self, user: impl Fn(i32) -> Option<u32>) -> Next {
        while let Some(pid) = self.queue.pop_front() {
            let user = user(pid);
            if let Some(bounded) = user.filter(|user| *user != 0) {
                let of_user =
                    |all: &BTreeMap<i32, Option<u32>>| all.values().filter(|of| **of == user).count();
                let given_up = of_user(&lock(&WAITED_FOR));
                if given_up >= MOST_OF_A_USER {
                    return Next::PassOver(pid);
                }
                if given_up + of_user(&self.asked) >= MOST_OF_A_USER {
                    self.deferred.entry(bounded).or_default().push(pid);
                    continue;
                }
            }
            self.asked.insert(pid, user);
            return Next::Look(pid);
        }
        Next::Done
    }

    /// Notes that a process was looked at: another one of its user's may be.
    fn has_answered(&mut self, pid: i32) {
        if let Some(Some(user)) = self.asked.remove(&pid)
            && let Some(next) = self.deferred.get_mut(&user).and_then(Vec::pop)
        {
            self.queue.push_front(next);
        }
    }
}

/// One of the [`THREADS`].
struct ThreadSlot;

impl ThreadSlot {
    fn new() -> ThreadSlot {
        THREADS.fetch_add(1, Ordering::Relaxed);
        ThreadSlot
    }
}

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::Relaxed);
    }
}

fn look_at_those_of<T: Send + 'static>(
    pids: impl IntoIterator<Item = i32>,
    user: impl Fn(i32) -> Option<u32> + Send + Sync + 'static,
    look: impl Fn(i32) -> T + Send + Sync + 'static,
) -> io::Result<Vec<(i32, Option<T>)>> {
    let (known, queue): (Vec<i32>, Vec<i32>) = {
        let waited_for = lock(&WAITED_FOR);
        pids.into_iter().partition(|pid| waited_for.contains_key(pid))
    };
    let mut found: Vec<(i32, Option<T>)> = known.into_iter().map(|pid| (pid, None)).collect();
    let mut missing: BTreeSet<i32> = queue.iter().copied().collect();
    let left = Arc::new(Mutex::new(PendingLook {
        queue: queue.into(),
        asked: BTreeMap::new(),
        deferred: BTreeMap::new(),
    }));
    let (user, look) = (Arc::new(user), Arc::new(look));
    let (sender, receiver) = channel();
    let start = || {
        let (left, user, look, sender) =
            (Arc::clone(&left), Arc::clone(&user), Arc::clone(&look), sender.clone());
        let slot = ThreadSlot::new();
        std::thread::Builder::new().name("look at processes".to_owned()).stack_size(STACK).spawn(move || {
            let _slot = slot;
            loop {
                // The lock is not held while it looks.
                let next = lock(&left).next(&*user);
                let (pid, answer) = match next {
                    Next::Look(pid) => (pid, Some(look(pid))),
                    Next::PassOver(pid) => (pid, None),
                    Next::Done => return,
                };
                // Together: who notes that it is waited for must not miss the answer.
                let mut left = lock(&left);
                let mut waited_for = lock(&WAITED_FOR);
                waited_for.remove(&pid);
                left.has_answered(pid);
                // Nobody may be listening any more.
                let _ = sender.send((pid, answer));
            }
        })
    };
    let mut heard = Instant::now();
    let mut waited = Duration::ZERO;
    let mut started = if missing.is_empty() { Ok(()) } else { start().map(drop) };
    while !missing.is_empty() && started.is_ok() && waited < MOST_PATIENCE {
        let began = Instant::now();
        match receiver.recv_timeout(STALL) {
            Ok((pid, answer)) => {
                heard = Instant::now();
                missing.remove(&pid);
                found.push((pid, answer));
                continue;
            }
            Err(_) if THREADS.load(Ordering::Relaxed) < MOST_THREADS && !lock(&left).queue.is_empty() => {
                started = start().map(drop);
            }
            Err(_) if heard.elapsed() >= PATIENCE => break,
            Err(_) => {}
        }
        waited += began.elapsed();
    }
    let mut left = lock(&left);
    let mut waited_for = lock(&WAITED_FOR);
    while let Ok((pid, answer)) = receiver.try_recv() {
        missing.remove(&pid);
        found.push((pid, answer));
    }
    // Nobody looks at the others any more.
    left.queue.clear();
    left.deferred.clear();
    waited_for.extend(left.asked.iter().map(|(pid, user)| (*pid, *user)));
    drop((waited_for, left));
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
            "the kernel does not tell what process {pid} has: it, or others of its user's, wait in execve for a \
             filesystem that does not answer"
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

/// The environment of a process; empty if it has none.
///
/// In the middle of `execve` a process has its new memory, but the kernel does not yet know where the environment in it is, and
/// gives nothing. That is waited for. Call it from [`look_at`], or where somebody else bounds the time.
///
/// # Errors
/// The kernel's, also if the process has ended or is a thread of the kernel's, which some kernels call empty; `TimedOut` if it
/// is still in `execve` after half of [`PATIENCE`].
pub fn environment_of(pid: i32) -> io::Result<Vec<u8>> {
    let until = Instant::now() + PATIENCE / 2;
    loop {
        let environment = fs::read(format!("/proc/{pid}/environ"))?;
        if !environment.is_empty() {
            return Ok(environment);
        }
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        match where_its_environment_is(&stat) {
            Some(Environment::Nowhere) => return Ok(environment),
            // It was in execve a moment ago.
            Some(Environment::Somewhere) => {}
            // The kernel tells nobody when it knows it, which takes microseconds.
            Some(Environment::NotYetKnown) => std::thread::sleep(Duration::from_millis(1)),
            None => return Err(io::Error::other(format!("/proc/{pid}/stat can't be understood"))),
        }
        if Instant::now() > until {
            return Err(no_answer(pid));
        }
    }
}

/// Where in the memory of a process its environment is.
#[derive(Debug, PartialEq, Eq)]
enum Environment {
    /// It has no memory of its own, or an environment without a variable.
    Nowhere,
    Somewhere,
    /// It is in `execve`.
    NotYetKnown,
}

/// What the `stat` of a process says, as proc_pid_stat(5) counts its fields. Where its program begins the kernel says last: until
/// then the environment has no end, or ends where it begins.
fn where_its_environment_is(stat: &str) -> Option<Environment> {
    // The name, in parentheses, is the second field and can be anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let (memory, program, begin, end) = (field(23)?, field(26)?, field(50)?, field(51)?);
    Some(match (memory, program) {
        (0, _) => Environment::Nowhere,
        (_, 0) => Environment::NotYetKnown,
        _ if begin == end => Environment::Nowhere,
        _ => Environment::Somewhere,
    })
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
        assert!(pids().all(|pid| !lock(&WAITED_FOR).contains_key(&pid)));
    }

    #[test]
    fn however_many_do_not_answer_a_few_are_asked() {
        const STUCK: std::ops::Range<i32> = -5000..-3000;
        const SLOW: std::ops::Range<i32> = -6000..-5900;
        let user = |pid: i32| {
            Some(if STUCK.contains(&pid) {
                20_001
            } else if SLOW.contains(&pid) {
                20_003
            } else {
                20_002
            })
        };
        let gate = Arc::new((Mutex::new((0, false)), std::sync::Condvar::new()));
        let look = {
            let gate = Arc::clone(&gate);
            move |pid: i32| {
                if STUCK.contains(&pid) {
                    let (state, opened) = &*gate;
                    let mut state = state.lock().unwrap();
                    state.0 += 1;
                    drop(opened.wait_while(state, |(_, open)| !*open).unwrap());
                } else if SLOW.contains(&pid) {
                    std::thread::sleep(PATIENCE / 2);
                }
            }
        };
        let others = -2000..-1000;
        for _ in 0..3 {
            let began = Instant::now();
            let found = look_at_those_of(STUCK.chain(others.clone()), user, look.clone()).unwrap();
            assert!(began.elapsed() < PATIENCE * 3, "{:?}", began.elapsed());
            assert_eq!(found.len(), 3000);
            assert!(found.iter().all(|(pid, found)| found.is_none() == STUCK.contains(pid)));
            assert_eq!(gate.0.lock().unwrap().0, MOST_OF_A_USER);
        }
        // Each of them tells something in time.
        let began = Instant::now();
        let found = look_at_those_of(SLOW.chain(others), user, look.clone()).unwrap();
        assert!(began.elapsed() < MOST_PATIENCE + PATIENCE * 2, "{:?}", began.elapsed());
        assert_eq!(found.len(), 1100);
        assert!(found.iter().all(|(pid, found)| found.is_some() || SLOW.contains(pid)));
        gate.0.lock().unwrap().1 = true;
        gate.1.notify_all();
        let until = Instant::now() + Duration::from_secs(10);
        while look_at_those_of(STUCK, user, look.clone()).unwrap().iter().any(|(_, found)| found.is_none()) {
            assert!(Instant::now() < until);
        }
    }

    #[test]
    fn a_process_that_is_just_starting_has_its_environment() {
        let has_none = |found: io::Result<Vec<u8>>| match found {
            Ok(environment) => environment.is_empty(),
            Err(error) => has_ended(&error),
        };
        for round in 0..500 {
            let variable = format!("ONDECK_ROUND={round}");
            let (name, value) = variable.split_once('=').unwrap();
            let mut child = std::process::Command::new("sleep").arg("60").env(name, value).spawn().unwrap();
            let found = environment_of(child.id() as i32);
            child.kill().unwrap();
            // Until it is reaped it has ended, and has no memory. Newer kernels say so.
            let id = child.id() as i32;
            rustix::process::waitid(
                rustix::process::WaitId::Pid(rustix::process::Pid::from_child(&child)),
                rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT,
            )
            .unwrap();
            assert!(has_none(environment_of(id)));
            child.wait().unwrap();
            assert!(found.unwrap().split(|byte| *byte == 0).any(|text| text == variable.as_bytes()));
            assert!(has_ended(&environment_of(id).unwrap_err()));
        }
        let mut without = std::process::Command::new("sleep").arg("60").env_clear().spawn().unwrap();
        let found = environment_of(without.id() as i32);
        without.kill().unwrap();
        without.wait().unwrap();
        assert!(found.unwrap().is_empty());
        // A thread of the kernel's.
        if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
            assert!(rustix::process::geteuid().as_raw() != 0 || has_none(environment_of(2)));
        }
    }

    #[test]
    fn what_stat_says_of_an_environment_is_understood() {
        let stat = |memory: u64, program: u64, begin: u64, end: u64| {
            let mut fields = vec!["1".to_owned(); 50];
            for (number, value) in [(23, memory), (26, program), (50, begin), (51, end)] {
                fields[number - 3] = value.to_string();
            }
            where_its_environment_is(&format!("7 (a) b) c) {}", fields.join(" ")))
        };
        assert_eq!(stat(0, 0, 0, 0), Some(Environment::Nowhere));
        assert_eq!(stat(4096, 0, 0, 0), Some(Environment::NotYetKnown));
        assert_eq!(stat(4096, 0, 70, 70), Some(Environment::NotYetKnown));
        assert_eq!(stat(4096, 50, 70, 70), Some(Environment::Nowhere));
        assert_eq!(stat(4096, 50, 70, 90), Some(Environment::Somewhere));
        assert_eq!(where_its_environment_is("7 (a) S 1 2"), None);
    }

    #[test]
    fn the_users_of_a_process_are_told() {
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(users_of(std::process::id() as i32).unwrap(), [own; 4]);
        assert!(has_ended(&users_of(i32::MAX).unwrap_err()));
    }
}
