//! The runner of an agent's task: staging, or a user's script, as the user and in namespaces of its own.
//!
//! Four processes take part. The *agent* starts the *runner*, as root, with the order on its standard input, which it holds
//! open for as long as the task may live. The runner makes a mount and a process-id namespace, and becomes the parent of the
//! *init* of the latter, which is root too and does nothing but watch: the agent's pipe, the deadline, and the *worker*. The
//! worker has become the user and does the work. When the init ends, the kernel ends everything in its namespace, daemons
//! that a script has left behind included; only then does the runner end.
//!
//! # Layout
//!
//! - [`confine`]: the namespaces, what can be seen in them, limits
//! - [`supervise`]: the init: watching, and telling the agent
//! - [`work`]: the worker, and what the kinds of work have in common; [`fill`], [`catch_up`] and [`bring_home`]: each of
//!   them
//! - [`script`]: running a user's script; [`restraint`] (in `agent`): how much of the node's processes and CPU it may have
//! - [`kept`]: what a RAM disk keeps from the fill to the end, beside the job's data

mod bring_home;
mod catch_up;
mod confine;
mod fill;
mod kept;
mod script;
mod share;
mod supervise;
mod work;

use std::io::{Read, Write};
use std::process::ExitCode;

use ondeck_agent::task::{Line, MemoryGroup, Order, restraint};
use ondeck_core::exit;
use ondeck_transfer::credentials::User;

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

/// Runs the task that standard input tells.
pub fn run() -> ExitCode {
    let order = match read_order() {
        Ok(order) => order,
        Err(error) => {
            eprintln!("ondeck task-runner: only an agent starts this: {error}");
            return ExitCode::from(exit::USAGE);
        }
    };
    if let Err(failure) = begin(&order) {
        say(&Line::Done { ok: false, message: Some(failure.message), retryable: failure.retryable });
    }
    ExitCode::from(exit::OK)
}

/// One line, and no byte more: the rest of the input is the agent's leash.
fn read_order() -> std::io::Result<Order> {
    let mut text = Vec::new();
    for byte in std::io::stdin().lock().bytes() {
        match byte? {
            b'\n' => break,
            byte => text.push(byte),
        }
    }
    Ok(serde_json::from_slice(&text)?)
}

/// Tells the agent. Whether it still listens is found out from the other pipe.
pub fn say(line: &Line) {
    if let Ok(mut text) = serde_json::to_vec(line) {
        text.push(b'\n');
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(&text).and_then(|()| out.flush());
    }
}

fn begin(order: &Order) -> Result<(), Failure> {
    let uid = order.request.uid;
    // Before anything is unshared: it asks other programs.
    let mut user = User::look_up(&uid.to_string()).map_err(|error| {
        Failure::passing(format!(
            "{}: {error}; the users of the compute nodes must be known on the RSA nodes, too",
            order.node
        ))
    })?;
    user.gid = order.request.gid;
    let script = order.request.work.script();
    let group = script.and_then(|_| MemoryGroup::make(&order.state, order.script_memory));
    if order.require_memory_group && group.is_none() && script.is_some() {
        return Err(Failure::lasting(format!(
            "{}: scripts are not run here: no memory group can be made for one, which require_memory_group in the agent's \
             configuration asks for; the administrator finds more by `ondeck doctor`, as root there",
            order.node
        )));
    }
    let restraint = script.map(|_| restraint::Restraint::begin());
    let result = confine::enter(order).and_then(|()| supervise::start(order, &user, group.as_ref()));
    if let Some(restraint) = restraint {
        restraint.end();
    }
    if let Some(group) = group {
        group.remove();
    }
    result
}
