//! The runner of an agent's task: staging, or a user's script, as the user and in namespaces of its own.
//!
//! What it does, and in which processes, stands in [`ondeck_staging::task`]. Here is what that needs of this node: the order
//! on standard input, the memory group and the [`restraint`] of a script, and the agent, which knows whether the RAM disk is
//! whole.

use std::io::Read;
use std::process::ExitCode;

use ondeck_agent::task::{MemoryGroup, restraint};
use ondeck_api::Config;
use ondeck_core::exit;
use ondeck_fleet::Fleet;
use ondeck_staging::task::order::{Line, TaskOrder};
use ondeck_staging::task::{self, Failure, Host};
use ondeck_transfer::Gate;
use ondeck_transfer::credentials::User;

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
        task::say(&Line::Done { ok: false, message: Some(failure.message), retryable: failure.retryable });
    }
    ExitCode::from(exit::OK)
}

/// One line, and no byte more: the rest of the input is the agent's leash.
fn read_order() -> std::io::Result<TaskOrder> {
    let mut text = Vec::new();
    for byte in std::io::stdin().lock().bytes() {
        match byte? {
            b'\n' => break,
            byte => text.push(byte),
        }
    }
    Ok(serde_json::from_slice(&text)?)
}

fn begin(order: &TaskOrder) -> Result<(), Failure> {
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
    let here = TaskHost { order, group };
    let result = task::run(order, &user, &here);
    if let Some(restraint) = restraint {
        restraint.end();
    }
    if let Some(group) = here.group {
        group.remove();
    }
    result
}

/// This node, for its task.
struct TaskHost<'a> {
    order: &'a TaskOrder,
    group: Option<MemoryGroup>,
}

impl Host for TaskHost<'_> {
    fn gate(&self) -> Result<Gate, Failure> {
        gate(self.order)
    }

    fn limit_memory(&self, pid: i32) -> bool {
        self.group.as_ref().is_some_and(|group| group.admit(pid).is_ok())
    }
}

/// Asks this node's agent whether the RAM disk is whole: now, and later whether it was all the time.
fn gate(order: &TaskOrder) -> Result<Gate, Failure> {
    let mut config = Config::default();
    config.agent.socket.clone_from(&order.socket);
    let (fleet, id) = (Fleet::new(&config), order.ramdisk.clone());
    let ask = move || -> Result<String, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| format!("can't ask the agent: {error}"))?;
        let seen = runtime
            .block_on(fleet.witness(&id))
            .map_err(|error| format!("nobody can say whether the RAM disk {id} is whole: {error}"))?;
        if seen.faults.is_empty() {
            Ok(seen.witness)
        } else {
            Err(format!("the RAM disk {id} is not whole: {}", seen.faults.join("; ")))
        }
    };
    let first = ask().map_err(Failure::passing)?;
    Ok(Gate::new(move || {
        if ask()? == first {
            Ok(())
        } else {
            Err("the RAM disk lost a connection to one of its nodes while it was copied".to_owned())
        }
    }))
}
