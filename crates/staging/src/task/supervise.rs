//! The init of a task's process-id namespace: it watches, tells the agent, and takes everything with it when it ends.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ondeck_api::wire::TaskWork;
use ondeck_core::duration;
use ondeck_transfer::credentials::User;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};

use super::order::{Line, Room, TaskOrder};
use super::pipes::{Pipes, Shared};
use super::{Failure, Host, confine, say, work};

/// How often the agent is told of progress.
const TICK: Duration = Duration::from_millis(100);

/// How much of a script's output is kept.
const LOG: usize = 4 << 10;

/// The longest line of the worker's that is believed.
const LONGEST_LINE: usize = 1 << 20;

/// Starts the init and waits until nothing of the namespace is left.
pub fn start(order: &TaskOrder, user: &User, host: &dyn Host) -> Result<(), Failure> {
    let began = Instant::now();
    let failed =
        |error: io::Error| Failure::passing(format!("{}: can't start the task: {error}", order.node));
    // Closed by the kernel when this process ends, however.
    let (alive, held) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
    // SAFETY: this process has one thread, so the child's copy is complete and consistent.
    match unsafe { libc::fork() } {
        -1 => Err(failed(io::Error::last_os_error())),
        0 => {
            drop(held);
            let result = supervise(order, user, host, alive, began);
            if let Err(error) = result {
                let message = format!("{}: the task can't be watched: {error}", order.node);
                say(&Line::Done { ok: false, message: Some(message), retryable: true });
            }
            // SAFETY: ends the init at once, and with it all that is in its namespace.
            unsafe { libc::_exit(0) }
        }
        init => {
            drop(alive);
            let mut status = 0;
            // SAFETY: waits for our child.
            while unsafe { libc::waitpid(init, &mut status, 0) } < 0
                && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
            {}
            if let Some(signal) = ExitStatus::from_raw(status).signal() {
                // Such as the kernel's, for want of memory.
                return Err(Failure::passing(format!("{}: signal {signal} ended the task", order.node)));
            }
            Ok(())
        }
    }
}

fn supervise(
    order: &TaskOrder,
    user: &User,
    host: &dyn Host,
    alive: OwnedFd,
    began: Instant,
) -> io::Result<()> {
    let has_own_proc = confine::mount_own_proc();
    let shared = share()?;
    let (lines, said) = pipe_with(PipeFlags::CLOEXEC)?;
    let (log, printed) = pipe_with(PipeFlags::CLOEXEC)?;
    let (asked, limits) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    for end in [&lines, &log, &asked] {
        rustix::io::ioctl_fionbio(end, true)?;
    }
    // SAFETY: this process has one thread, so the child's copy is complete and consistent.
    let worker = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        0 => {
            // A process that becomes the user has nothing that root has opened but what it works with.
            drop((lines, log, asked, alive));
            let pipes = Pipes { lines: said, log: printed, limits };
            let code = work::work(order, user, host, shared, pipes);
            // SAFETY: ends the worker without running its parents' exit handlers.
            unsafe { libc::_exit(code) }
        }
        worker => worker,
    };
    drop((said, printed, limits));
    let mut watch = Watch {
        shared,
        lines,
        log,
        text: Vec::new(),
        tail: Vec::new(),
        told: [0; 5],
        done: None,
        room: Room::default(),
    };
    let deadline = began + Duration::from_millis(order.request.deadline_ms);
    let handle = rustix::process::Pid::from_raw(worker)
        .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok());
    // SAFETY: the standard input is open for as long as this process lives.
    let leash = unsafe { BorrowedFd::borrow_raw(0) };
    let status = loop {
        if let Some(status) = reap(worker) {
            break Some(status);
        }
        if Instant::now() >= deadline {
            break None;
        }
        let wait = deadline.saturating_duration_since(Instant::now()).min(TICK);
        let time = Timespec { tv_sec: 0, tv_nsec: wait.as_nanos().max(1_000_000) as i64 % 1_000_000_000 };
        let hang_up = PollFlags::HUP | PollFlags::ERR;
        let mut polled = vec![
            PollFd::from_borrowed_fd(leash, PollFlags::empty()),
            PollFd::new(&alive, PollFlags::empty()),
            PollFd::new(&watch.log, PollFlags::IN),
            PollFd::new(&watch.lines, PollFlags::IN),
            PollFd::new(&asked, PollFlags::IN),
        ];
        polled.extend(handle.as_ref().map(|handle| PollFd::new(handle, PollFlags::IN)));
        match poll(&mut polled, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if polled[..2].iter().any(|end| end.revents().intersects(hang_up)) {
            // The agent or the runner is gone, or has let go: nobody is told.
            return Ok(());
        }
        drop(polled);
        limit(&asked, host, has_own_proc);
        watch.read();
        watch.tell();
    };
    // What is left in pipes that somebody has made as large as users may.
    for _ in 0..16 {
        watch.read();
    }
    watch.tell();
    let end = match (status, watch.done.take()) {
        (Some(_), Some(done)) => done,
        (Some(status), None) => Line::Done {
            ok: false,
            message: Some(format!("{}: the task's worker ended before it was done ({status})", order.node)),
            retryable: true,
        },
        (None, _) => {
            let message = late(order, shared);
            Line::Done { ok: false, message: Some(message), retryable: true }
        }
    };
    if !watch.tail.is_empty() {
        say(&Line::Log(String::from_utf8_lossy(&watch.tail).into_owned()));
    }
    say(&end);
    Ok(())
}

/// When memory runs out the kernel takes a script before it takes others.
const OOM_SCORE: &str = "500";

/// Limits the script that has asked for it, if one has. The worker can't: it is the user, and a descriptor that root has
/// opened would be the user's, too.
fn limit(asked: &OwnedFd, host: &dyn Host, has_own_proc: bool) {
    let mut pid = [0; 4];
    let Ok((4, _)) = recv(asked, &mut pid, RecvFlags::empty()) else { return };
    // A number of this namespace: whoever has it by now is of this task.
    let pid = i32::from_ne_bytes(pid);
    if has_own_proc {
        // Not allowed in some containers; then the kernel's own choice stands.
        let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), OOM_SCORE);
    }
    let is_grouped = host.limit_memory(pid);
    // It has one question at a time, so there is room for the answer.
    let _ = send(asked, &[u8::from(is_grouped)], SendFlags::NOSIGNAL);
}

/// Words for a task that took too long.
fn late(order: &TaskOrder, shared: &Shared) -> String {
    let work = match order.request.work {
        TaskWork::Survey { .. } => "look at what is to be copied",
        TaskWork::Fill { .. } => "stage-in",
        TaskWork::CatchUp { .. } => "catching up with the disk",
        TaskWork::BringHome { .. } => "stage-out",
        TaskWork::Stripe { .. } => "work on layouts",
    };
    let time = duration::display(Duration::from_millis(order.request.deadline_ms));
    if matches!(order.request.work, TaskWork::Stripe { .. }) {
        return format!("{}: the filesystem did not answer within {time}", order.node);
    }
    match order.request.work.script() {
        Some(script) if shared.in_script.load(Relaxed) => {
            format!("the {work} script {} did not end within {time} and was killed", script.display())
        }
        _ => format!("the {work} was not done within {time} and was stopped; what was copied is kept"),
    }
}

/// Memory that the worker shares.
fn share() -> io::Result<&'static Shared> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let (length, access) = (size_of::<Shared>(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping at a place of the kernel's choice, which is never unmapped. Zeros are a valid `Shared`: it
    // consists of atomics.
    unsafe {
        let memory = mmap_anonymous(std::ptr::null_mut(), length, access, MapFlags::SHARED)?;
        Ok(&*memory.cast::<Shared>())
    }
}

/// Takes the ended: the worker, and orphans of a script. Gives the worker's status. A script that leaves orphans faster than
/// they are taken must not keep us from watching.
fn reap(worker: i32) -> Option<ExitStatus> {
    const AT_ONCE: usize = 1000;
    for _ in 0..AT_ONCE {
        let mut status = 0;
        // SAFETY: collects a child, if one has ended.
        match unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) } {
            pid if pid == worker => return Some(ExitStatus::from_raw(status)),
            pid if pid > 0 => {}
            _ => return None,
        }
    }
    None
}

struct Watch {
    shared: &'static Shared,
    lines: OwnedFd,
    log: OwnedFd,
    /// The beginning of a line.
    text: Vec<u8>,
    /// The end of a script's output.
    tail: Vec<u8>,
    told: [u64; 5],
    done: Option<Line>,
    /// What may still be named.
    room: Room,
}

impl Watch {
    /// Takes what the worker and the script have said so far.
    fn read(&mut self) {
        let mut buffer = vec![0; 64 << 10];
        // As much as fits into a pipe: who says more without end must not keep us from watching.
        if let Ok(length) = rustix::io::read(&self.log, &mut buffer) {
            self.tail.extend_from_slice(&buffer[..length]);
            self.tail.drain(..self.tail.len().saturating_sub(LOG));
        }
        if let Ok(length @ 1..) = rustix::io::read(&self.lines, &mut buffer) {
            self.text.extend_from_slice(&buffer[..length]);
            while let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.text.drain(..=end).collect();
                self.take(&line);
            }
            if self.text.len() > LONGEST_LINE {
                self.text.clear();
            }
        }
    }

    fn take(&mut self, line: &[u8]) {
        match serde_json::from_slice(line) {
            Ok(done @ Line::Done { .. }) => self.done = Some(done),
            Ok(line @ (Line::Error(_) | Line::Beside(_) | Line::Units(_) | Line::Striping(_)))
                if self.room.take(&line) =>
            {
                say(&line)
            }
            // Nothing else is the worker's to say.
            _ => {}
        }
    }

    /// Tells the agent how far it is.
    fn tell(&mut self) {
        let progress = &self.shared.progress;
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        let found = of(&progress.bytes_found);
        let now = [
            of(&progress.entries_found),
            of(&progress.entries_done),
            found,
            progress.bytes_so_far().min(found).max(of(&progress.bytes_done)),
            of(&progress.bytes_written),
        ];
        if now != self.told {
            self.told = now;
            let [entries_found, entries_done, bytes_found, bytes_done, written] = now;
            let bytes_written = Some(written);
            say(&Line::Progress { entries_found, entries_done, bytes_found, bytes_done, bytes_written });
        }
    }
}
