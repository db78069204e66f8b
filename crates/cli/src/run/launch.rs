//! Starting a run: the command forks the keeper, watches it, and takes its place if it is killed.

use std::io;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result};
use ondeck_core::exit;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::front::{Front, Outcome, Signals};
use super::heir::{Heir, children_before};
use super::keeper::Keeper;
use super::message::Line;
use super::plan::{Job, Plan};
use super::program::{Surroundings, adopt_orphans, run_on_disk};
use super::{Fallback, RunArgs, without_disk};
use crate::state;

/// Starts the keeper and watches it.
pub fn start(plan: Plan, job: Job, args: &RunArgs, fallback: Fallback) -> Result<u8> {
    let surroundings = Surroundings::of_this_process();
    let base = state::runs()?;
    let (ours, theirs) = UnixStream::pair().context("can't talk to the keeper")?;
    let (handover, handed) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .context("can't talk to the keeper")?;
    let signals = Signals::block().context("can't receive signals")?;
    let keeper = Keeper::new(plan, job, args, base, surroundings, children_before());
    // What is orphaned by the death of the keeper, the program above all, becomes a child of this process.
    adopt_orphans(true);
    // SAFETY: this process has one thread, so the child is a complete copy of it.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()).context("can't start the keeper"),
        0 => {
            drop((ours, handover));
            drop(signals);
            let code = keeper.keep(theirs, &handed);
            // SAFETY: the keeper is a copy of its parent and must not run its exit handlers.
            unsafe { libc::_exit(i32::from(code)) }
        }
        child => {
            drop((theirs, handed));
            let mut heir = Heir::new(keeper, child as u32, handover);
            let mut front = Front::new(Line::new(ours)?, signals, args.json, args.quiet);
            loop {
                let outcome = match front.watch()? {
                    Outcome::KeeperLost => heir.line_lost(&mut front)?,
                    other => Some(other),
                };
                match outcome {
                    None | Some(Outcome::KeeperLost) => {}
                    Some(Outcome::Finished(code)) => return Ok(code),
                    Some(Outcome::NotStarted(code, text))
                        if code == exit::NOT_STARTED && fallback == Fallback::Disk =>
                    {
                        let text = without_disk(&text);
                        eprintln!("ondeck: running on disk: {text}");
                        front.signals.unblock();
                        adopt_orphans(false);
                        return Ok(run_on_disk(heir.command(), args.report.as_deref(), &text));
                    }
                    Some(Outcome::NotStarted(code, text)) => {
                        eprintln!("ondeck run: {text}");
                        return Ok(code);
                    }
                }
            }
        }
    }
}
