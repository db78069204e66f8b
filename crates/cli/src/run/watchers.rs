//! Those who watch a run and give it orders.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ondeck_transfer::Progress;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::message::{Line, Message, RunOrder};
use super::program::{open_pid, reap};

/// How often a watcher hears of progress, and how often the keeper looks at the RAM disk's use and its timers.
pub const TICK: Duration = Duration::from_millis(100);

/// Those who watch the run: the front that started it, and later ones that attach through the control socket.
pub struct Watchers {
    /// Those who watch; the first is the command that started the run, while it lives.
    pub fronts: Vec<Line>,
    /// Where a later front attaches.
    pub listener: Option<UnixListener>,
    /// The run's directory.
    pub dir: PathBuf,
    /// The phase, to tell it to one who attaches.
    pub last: Option<Message>,
}

impl Watchers {
    /// Tells whoever is in front.
    pub fn send(&mut self, message: &Message) {
        self.fronts.retain_mut(|front| front.send(message).is_ok());
    }

    /// A phase begins.
    pub fn phase(&mut self, name: &str, total_bytes: Option<u64>) {
        let message = Message::Phase { name: name.to_owned(), total_bytes };
        self.send(&message);
        self.last = Some(message);
    }

    /// Something worth knowing.
    pub fn note(&mut self, text: &str) {
        self.send(&Message::Note { text: text.to_owned() });
    }

    /// Something that went wrong.
    pub fn warning(&mut self, text: &str) {
        self.send(&Message::Warning { text: text.to_owned() });
    }

    /// What `ondeck run --list` shows.
    pub fn state(&self, text: &str) {
        let _ = fs::write(self.dir.join("state"), text);
    }

    /// Waits for `other` to become readable, for at most `timeout`; hands orders to `on_order` meanwhile. Returns
    /// whether `other` is readable.
    pub fn wait(
        &mut self,
        other: Option<BorrowedFd<'_>>,
        timeout: Duration,
        on_order: &mut dyn FnMut(RunOrder),
    ) -> bool {
        let mut fds = Vec::with_capacity(3);
        let mut add = |fd: BorrowedFd<'_>| {
            // SAFETY: the descriptors live in `self` and `other`, which outlive the poll below; only the borrow
            // checker can't see it through the Vec.
            fds.push(PollFd::from_borrowed_fd(
                unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) },
                PollFlags::IN,
            ));
            fds.len() - 1
        };
        let other = other.map(&mut add);
        let fronts: Vec<usize> = self.fronts.iter().map(|line| add(line.stream().as_fd())).collect();
        let listener = self.listener.as_ref().map(|listener| add(listener.as_fd()));
        let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() };
        if poll(&mut fds, Some(&timeout)).is_err() {
            return false; // interrupted by a signal: the caller's loop comes back
        }
        let ready = |slot: Option<usize>| slot.is_some_and(|slot| !fds[slot].revents().is_empty());
        let (other, listener) = (ready(other), ready(listener));
        let mut speaking = fronts.into_iter().map(|slot| ready(Some(slot))).collect::<Vec<_>>().into_iter();
        self.fronts.retain_mut(|front| {
            if !speaking.next().unwrap_or(false) {
                return true;
            }
            let orders = front.receive::<RunOrder>();
            let alive = orders.is_some();
            orders.into_iter().flatten().for_each(&mut *on_order);
            alive
        });
        if listener
            && let Some(Ok((stream, _))) = self.listener.as_ref().map(UnixListener::accept)
            && let Ok(line) = Line::new(stream)
        {
            self.attach(line);
        }
        other
    }

    fn attach(&mut self, line: Line) {
        // `--list` connects only to see whether we are alive, and says nothing.
        let mut fds = [PollFd::new(line.stream(), PollFlags::IN)];
        let patience = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        let speaks = poll(&mut fds, Some(&patience)).is_ok_and(|ready| ready > 0)
            && rustix::net::recv(line.stream(), &mut [0_u8; 1][..], rustix::net::RecvFlags::PEEK)
                .is_ok_and(|(read, _)| read > 0);
        if speaks {
            let mut line = line;
            let greeted = self.last.as_ref().is_none_or(|message| line.send(message).is_ok());
            if greeted {
                self.fronts.push(line);
            }
        }
    }

    /// Runs `work` in a thread and reports its progress until it is done.
    pub fn watch<T: Send>(
        &mut self,
        progress: &Progress,
        mut on_order: impl FnMut(RunOrder),
        work: impl FnOnce() -> T + Send,
    ) -> T {
        let done = event_descriptor();
        std::thread::scope(|scope| {
            let done = done.as_ref();
            let worker = scope.spawn(move || {
                let result = work();
                if let Some(done) = done {
                    let _ = rustix::io::write(done, &1_u64.to_ne_bytes());
                }
                result
            });
            while !worker.is_finished() {
                if self.wait(done.map(|fd| fd.as_fd()), TICK, &mut on_order) {
                    break;
                }
                self.send(&Message::Progress {
                    files: progress.entries_done.load(Relaxed),
                    files_found: progress.entries_found.load(Relaxed),
                    bytes: progress.bytes_so_far(),
                    bytes_found: progress.bytes_found.load(Relaxed),
                });
            }
            match worker.join() {
                Ok(result) => result,
                // A bug in a worker must not pass for success.
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Waits for a child process to end.
    pub fn wait_for(&mut self, pid: u32, mut on_order: impl FnMut(RunOrder)) -> std::process::ExitStatus {
        let handle = open_pid(pid);
        loop {
            if (self.wait(handle.as_ref().map(|fd| fd.as_fd()), TICK, &mut on_order) || handle.is_none())
                && let Some(status) = reap(pid, handle.is_some())
            {
                return status;
            }
        }
    }
}

fn event_descriptor() -> Option<OwnedFd> {
    // SAFETY: a new descriptor, owned by nobody else.
    match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) } {
        -1 => None,
        // SAFETY: it was just made.
        fd => Some(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}
