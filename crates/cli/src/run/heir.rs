//! Who takes the place of a keeper that is killed: the command that started the run.
//!
//! It has what the keeper had when it was forked, the directories on disk above all. The keeper sends it descriptors of the
//! namespaces and of the RAM disk, and writes the rest into [journals](ondeck_staging::merge_back::journal). The command is
//! also the nearest subreaper above the keeper, so the program becomes its child when the keeper dies. It waits for the
//! program in the keeper's stead, and then forks a new keeper, which brings the results home or holds them, as any other.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ondeck_core::exit;
use ondeck_ramdisk::namespace::Namespaces;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;

use super::front::{Front, Outcome, Stage};
use super::keeper::Keeper;
use super::message::{Line, RunOrder};
use super::program;

/// How long a keeper that does not speak any more may take to be dead.
const DYING: Duration = Duration::from_secs(2);

/// What the keeper has, for the time when it has not.
pub struct Heir {
    keeper: Keeper,
    /// The process that is the keeper now.
    child: u32,
    /// Where the first keeper has put its descriptors.
    handover: OwnedFd,
    /// They, once they were needed.
    namespaces: Option<Namespaces>,
}

/// What has become of the keeper.
enum Keeping {
    Alive,
    /// It ended by itself, with this exit code.
    Ended(u8),
    Killed,
}

impl Heir {
    /// Of a keeper that was just forked.
    pub fn new(keeper: Keeper, child: u32, handover: OwnedFd) -> Heir {
        Heir { keeper, child, handover, namespaces: None }
    }

    /// The program and its arguments.
    pub fn command(&self) -> &[std::ffi::OsString] {
        &self.keeper.shared.command
    }

    /// The keeper's end of the line is closed. Returns how the run ended, or nothing if it goes on, with a new keeper.
    pub fn line_lost(&mut self, front: &mut Front) -> Result<Option<Outcome>> {
        match self.what_became()? {
            Keeping::Alive => return self.speak_again(front).map(|()| None),
            Keeping::Ended(code) if !self.keeper.shared.dir.exists() => {
                return Ok(Some(Outcome::Finished(code)));
            }
            Keeping::Ended(_) | Keeping::Killed => {}
        }
        if let Some((code, summary)) = front.ended.take() {
            // It had nothing left to do.
            self.keeper.clean_up();
            return Ok(Some(if front.stage == Stage::Before {
                Outcome::NotStarted(code, summary)
            } else {
                front.say(&summary);
                Outcome::Finished(code)
            }));
        }
        let spare = self.keeper.shared.spared();
        let running = match (front.code, front.stage) {
            (Some(_), _) => None,
            (None, Stage::Before) => return Ok(Some(self.not_started())),
            (None, _) => match front.program.or_else(|| program::oldest_child(&spare)) {
                Some(pid) => Some(pid),
                None => return Ok(Some(self.not_started())),
            },
        };
        front.warn("the keeper process was killed; this command takes its place");
        let namespaces = match self.namespaces.take() {
            Some(namespaces) => namespaces,
            None => Namespaces::received(&self.handover).with_context(|| {
                format!("the keeper process was killed, and what it held can't be taken over; the program runs as {running:?}")
            })?,
        };
        self.keeper.inherit(&namespaces);
        let code = match (front.code, running) {
            (None, Some(pid)) => self.stand_in(front, &namespaces, pid)?,
            (code, _) => {
                // Also a script of the user's that the keeper had started.
                program::end_left_behind(program::GRACE, &spare);
                code.unwrap_or(exit::NOT_STARTED)
            }
        };
        front.code = Some(code);
        self.fork_keeper(front, &namespaces, code)?;
        self.namespaces = Some(namespaces);
        Ok(None)
    }

    fn not_started(&mut self) -> Outcome {
        program::end_left_behind(program::GRACE, &self.keeper.shared.spared());
        self.keeper.discard_caches();
        self.keeper.clean_up();
        Outcome::NotStarted(
            exit::NOT_STARTED,
            "the keeper process was killed before the program was started; nothing was changed".to_owned(),
        )
    }

    fn what_became(&self) -> Result<Keeping> {
        use std::os::unix::process::ExitStatusExt;
        if let Some(handle) = program::open_pid(self.child) {
            let timeout = Timespec { tv_sec: DYING.as_secs() as _, tv_nsec: 0 };
            let until = Instant::now() + DYING;
            while poll(&mut [PollFd::new(&handle.as_fd(), PollFlags::IN)], Some(&timeout)).is_err()
                && Instant::now() < until
            {}
        } else {
            // Linux before 5.3: a process that closes its files is all but dead.
            std::thread::sleep(DYING);
        }
        Ok(match program::reap(self.child, false) {
            None => Keeping::Alive,
            Some(status) => status.code().map_or(Keeping::Killed, |code| {
                // Somebody else has reaped it, so nothing is known.
                if status.into_raw() == program::UNKNOWN {
                    Keeping::Killed
                } else {
                    Keeping::Ended(code as u8)
                }
            }),
        })
    }

    /// The keeper gives up a command that does not read, as one that was stopped with Ctrl-Z.
    fn speak_again(&self, front: &mut Front) -> Result<()> {
        let control = self.keeper.shared.dir.join("control");
        // If it can't be reached it is about to end: then the line is lost at once, and it is asked after again.
        if let Ok(stream) = UnixStream::connect(&control) {
            let mut line = Line::new(stream)?;
            let _ = line.send(&RunOrder::Resume);
            front.line = line;
        }
        Ok(())
    }

    /// Waits for the program, with everything that goes on beside it.
    fn stand_in(&mut self, front: &mut Front, namespaces: &Namespaces, pid: u32) -> Result<u8> {
        let (ours, theirs) = UnixStream::pair().context("can't take the keeper's place")?;
        front.line = Line::new(ours)?;
        let own = theirs.as_raw_fd();
        self.keeper.watchers.fronts.push(Line::new(theirs)?);
        let keeper = &mut self.keeper;
        std::thread::scope(|scope| {
            let attending = scope.spawn(move || {
                let code = keeper.stand_in(namespaces, pid);
                // The end of its own line tells this process. Those of others who watch go on with the new keeper, without
                // a word: one who reads late might attach anew to a run that is over.
                keeper.watchers.fronts.retain(|front| front.stream().as_raw_fd() != own);
                code
            });
            let watched = front.watch();
            let code = attending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            watched.map(|_| code)
        })
    }

    fn fork_keeper(&mut self, front: &mut Front, namespaces: &Namespaces, code: u8) -> Result<()> {
        const PAUSE: Duration = Duration::from_secs(1);
        let (ours, theirs) = UnixStream::pair().context("can't talk to a new keeper")?;
        let mut told = false;
        loop {
            // SAFETY: this process has one thread again, so the child is a complete copy of it.
            match unsafe { libc::fork() } {
                -1 => {
                    // The results are in RAM as long as this process lives, so it does not give up.
                    if !std::mem::replace(&mut told, true) {
                        let error = std::io::Error::last_os_error();
                        front.warn(&format!("can't start a new keeper: {error}; trying again every second"));
                    }
                    std::thread::sleep(PAUSE);
                }
                0 => {
                    drop(ours);
                    let code = self.keeper.go_on(namespaces, code, theirs);
                    // SAFETY: a copy of its parent, which must not run its exit handlers.
                    unsafe { libc::_exit(i32::from(code)) }
                }
                child => {
                    self.child = child as u32;
                    self.keeper.watchers.fronts.clear();
                    self.keeper.watchers.listener = None;
                    front.line = Line::new(ours)?;
                    return Ok(());
                }
            }
        }
    }
}

/// The children that this process has now: it was started by an exec in a shell that had some.
pub fn children_before() -> Vec<Pid> {
    program::children()
}
