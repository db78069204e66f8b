//! The worker's process: it becomes the user, and does the work.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use ondeck_api::wire::{StripingWork, TaskWork};
use ondeck_transfer::Gate;
use ondeck_transfer::credentials::User;
use rustix::fs::Mode;

use super::order::{Line, TaskOrder};
use super::pipes::{Pipes, Shared};
use super::worker::{Findings, Worker, lock, send};
use super::{Failure, Host, confine, count, kept, stripe};

/// Becomes the user and does the work; gives the process's exit code.
pub fn work(order: &TaskOrder, user: &User, host: &dyn Host, shared: &'static Shared, pipes: Pipes) -> i32 {
    let Pipes { lines, log, limits } = pipes;
    let lines = Mutex::new(lines);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let log = become_user(order, user, log)?;
        if let TaskWork::Stripe { prefixes, work } = &order.request.work {
            match work {
                StripingWork::Count { directories, from_ms, until_ms, samples } => {
                    count::count_all(prefixes, directories, (*from_ms, *until_ms), *samples, &lines);
                }
                work => stripe::stripe(prefixes, work, &lines),
            }
            return Ok(None);
        }
        let ram = kept::open().map_err(|error| {
            Failure::passing(format!("{}: can't open the RAM disk {}: {error}", order.node, order.ramdisk))
        })?;
        let worker = Worker {
            order,
            user,
            shared,
            log,
            limits,
            ram,
            // What is salvaged is a part, which needs no witness.
            gate: if order.request.work.is_salvage() { Gate::new(|| Ok(())) } else { host.gate()? },
            lines: Mutex::new(rustix::io::fcntl_dupfd_cloexec(&*lock(&lines), 0).map_err(starting(order))?),
            findings: Findings::default(),
            loosened: Arc::default(),
        };
        match &order.request.work {
            TaskWork::Survey { directories, home } => worker.survey(directories, *home),
            TaskWork::Fill { directories, script, .. } => worker.fill(directories, script.as_deref()),
            TaskWork::CatchUp { directories } => worker.catch_up(directories),
            TaskWork::BringHome { directories, salvage: true, .. } => worker.salvage(directories),
            TaskWork::Stripe { .. } => Ok(None),
            TaskWork::BringHome { directories, script, pack, salvage: false } => {
                worker.bring_home(directories, script.as_deref(), *pack)
            }
        }
    }));
    let result = result.unwrap_or_else(|_| Err(Failure::lasting("the task has a defect; its log has more")));
    let done = match result {
        Ok(message) => Line::Done { ok: true, message, retryable: false },
        Err(Failure { message, retryable }) => Line::Done { ok: false, message: Some(message), retryable },
    };
    send(&lines, &done);
    0
}

fn starting(order: &TaskOrder) -> impl Fn(rustix::io::Errno) -> Failure {
    |error| Failure::passing(format!("{}: can't start the task: {error}", order.node))
}

fn become_user(order: &TaskOrder, user: &User, log: OwnedFd) -> Result<OwnedFd, Failure> {
    let_go_of_streams(log.as_fd())
        .map_err(|error| Failure::passing(format!("{}: can't start the task: {error}", order.node)))?;
    user.become_for_good().map_err(|error| Failure::passing(format!("{}: {error}", order.node)))?;
    confine::limit();
    // Modes come from the source; what has none gets one of its own, and a script a mask.
    rustix::process::umask(Mode::empty());
    if std::env::set_current_dir(&order.request.work_dir).is_err() {
        std::env::set_current_dir("/").map_err(|error| Failure::passing(error.to_string()))?;
    }
    Ok(log)
}

/// Points the standard streams of the worker away from the agent's pipes.
fn let_go_of_streams(log: BorrowedFd<'_>) -> io::Result<()> {
    let null = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
    let mut streams: Vec<OwnedFd> = (0..3)
        // SAFETY: the three numbers are open and nobody else's in this process; they are given back below.
        .map(|number| unsafe { OwnedFd::from_raw_fd(number) })
        .collect();
    let pointed = [null.as_fd(), log, log]
        .into_iter()
        .zip(&mut streams)
        .try_for_each(|(to, stream)| rustix::io::dup2(to, stream));
    streams.into_iter().for_each(std::mem::forget);
    Ok(pointed?)
}
