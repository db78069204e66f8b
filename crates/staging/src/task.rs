//! The tasks of an agent: filling a RAM disk, and bringing home what a job has made of it, as the user and in namespaces of
//! their own.
//!
//! Four processes take part. The *agent* starts the *runner*, as root, with the order on its standard input, which it holds
//! open for as long as the task may live. The runner makes a mount and a process-id namespace, and becomes the parent of the
//! *init* of the latter, which is root too and does nothing but watch: the agent's pipe, the deadline, and the *worker*. The
//! worker has become the user and does the work. When the init ends, the kernel ends everything in its namespace, daemons
//! that a script has left behind included; only then does the runner end.
//!
//! # Layout
//!
//! - [`order`]: what the agent tells, and what it is told
//! - `confine`: the namespaces, what can be seen in them, limits
//! - `supervise`: the init: watching, and telling the agent; `pipes`: what it shares with the worker
//! - `work`: the worker's process; `worker`: what the kinds of its work have in common; `fill`, `catch_up` and `bring_home`:
//!   each of them; `share`: by several nodes at once
//! - `script`: running a user's script
//! - `stripe`: layouts of directories on disk; `count`: what a job has left there
//! - `kept`: what a RAM disk keeps from the fill to the end, beside the job's data

mod bring_home;
mod catch_up;
mod confine;
mod count;
mod fill;
mod kept;
pub mod order;
mod pipes;
mod script;
mod share;
mod stripe;
mod supervise;
mod work;
mod worker;

use std::io::Write;

use ondeck_transfer::Gate;
use ondeck_transfer::credentials::User;

use self::order::{Line, TaskOrder};

/// Where a task finds the owner's part of the RAM disk. For others it is an empty directory.
const RAM_DISK: &str = "/run/ondeck/ramdisk";

/// Room in memory for notes that a full RAM disk can't take.
const SCRATCH: &str = "/run/ondeck/scratch";

/// Why a task was not done.
#[derive(Debug)]
pub struct Failure {
    /// What, where, and what to do.
    pub message: String,
    /// Whether the same again may succeed.
    pub retryable: bool,
}

impl Failure {
    /// Something that somebody must mend first.
    pub fn lasting(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), retryable: false }
    }

    /// Something that may be over the next time.
    pub fn passing(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), retryable: true }
    }
}

/// What a task needs of the node that it runs on.
pub trait Host {
    /// Asks this node's agent whether the RAM disk is whole: now, and later whether it was all the time.
    ///
    /// # Errors
    /// If it is not, or nobody can say.
    fn gate(&self) -> Result<Gate, Failure>;

    /// Limits the memory of a process of a user's script; says whether it is limited. Asked of the init, which is root.
    fn limit_memory(&self, pid: i32) -> bool;
}

/// Does what the order says, as this user, and waits until nothing of it is left. The calling process must be root and have
/// one thread; it stays in the task's namespaces.
///
/// # Errors
/// If it could not be begun, or its init was killed. All else is [told](say) to the agent.
pub fn run(order: &TaskOrder, user: &User, host: &dyn Host) -> Result<(), Failure> {
    confine::enter(order).and_then(|()| supervise::start(order, user, host))
}

/// Tells the agent. Whether it still listens is found out from the other pipe.
pub fn say(line: &Line) {
    if let Ok(mut text) = serde_json::to_vec(line) {
        text.push(b'\n');
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(&text).and_then(|()| out.flush());
    }
}
