//! Bringing results home, all of them or what is left of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::TaskWork;
use ondeck_core::schedule::{Fault, Job, Outcome, WorkOrder};
use ondeck_core::{NodeName, RamDiskId};

use super::directories::directories;
use super::outcome::{failed, words};
use super::stage_in::CATCH_UP;
use super::staging::{Staging, stage};
use crate::context::Context;
use crate::{inventory, layouts};

/// How long a stage-out waits for the names of what it brings home: they are of use only if a node is lost meanwhile.
const INVENTORY: Duration = Duration::from_secs(10);

/// How the names of tasks begin that bring results home.
const HOME: &str = "home-";

/// Brings all of a job's results home.
pub(super) async fn bring_home(
    context: &Arc<Context>,
    job: &Job,
    order: WorkOrder,
    id: &RamDiskId,
    servers: &[NodeName],
    until: Instant,
) -> Outcome {
    layouts::set_for_results(context, job.id).await;
    let (asks, of) = (Arc::clone(context), job.clone());
    let inventoried = tokio::spawn(async move { inventory::take(&asks, &of).await });
    // An attempt that was given up because nothing was heard of it may go on, and would write to the same files.
    let ended = end_earlier(context, servers, id);
    let (ended, _) = tokio::join!(ended, tokio::time::timeout(INVENTORY, inventoried));
    if let Err(why) = ended {
        return failed(why, Fault::Transient);
    }
    // What was shown for a moment only is no more than a part of the job's output.
    let script = job.request.stage_out.clone().filter(|_| !job.partially_mounted);
    let pack = job.request.pack.filter(|_| !job.partially_mounted && script.is_none());
    let work = TaskWork::BringHome { directories: directories(job), script, pack, salvage: false };
    // Each attempt is a task of its own, on the next of its nodes.
    let name = format!("{HOME}{}", order.number);
    let mut nodes = servers.to_vec();
    let next = job.stage_outs as usize % nodes.len();
    nodes.rotate_left(next);
    stage(context, job, nodes, id, &name, work, until).await
}

/// Saves what is left of a job's results, from one node after the other: each has whole files of its own.
pub(super) async fn salvage(
    context: &Arc<Context>,
    job: &Job,
    order: WorkOrder,
    id: &RamDiskId,
    until: Instant,
) -> Outcome {
    let nodes = match inventory::survivors(context, job, id).await {
        Ok(nodes) => nodes,
        Err(why) => return failed(why, Fault::Transient),
    };
    if let Err(why) = end_earlier(context, &nodes, id).await {
        return failed(why, Fault::Transient);
    }
    let staging = Staging::new(context, job, id, nodes, until);
    let mut saved: Vec<String> = Vec::new();
    let mut last = None;
    for (index, node) in staging.nodes.iter().enumerate() {
        let work =
            TaskWork::BringHome { directories: directories(job), script: None, pack: None, salvage: true };
        match staging.task(node, &format!("{HOME}{}-{index}", order.number), work, None).await {
            Ok(report) => {
                saved.push(format!("{} files of {node}", report.entries_done));
                last = Some(report);
            }
            Err(outcome) => return outcome,
        }
    }
    let Some(last) = last else { return failed("nothing is left of it", Fault::Transient) };
    staging.tell_of_conflicts().await;
    staging.note_moved().await;
    match staging.done(&last) {
        Outcome::Done(text) => Outcome::Salvaged {
            text: format!("{} were saved; {text}", saved.join(", ")),
            from: staging.nodes.clone(),
        },
        other => other,
    }
}

/// Ends what earlier attempts to bring results home have left running.
async fn end_earlier(context: &Arc<Context>, nodes: &[NodeName], id: &RamDiskId) -> Result<(), String> {
    for name in [CATCH_UP, HOME] {
        let faults = context.fleet.stop_tasks(nodes, id, name).await;
        if !faults.is_empty() {
            return Err(format!("an earlier task may still run: {}", words(&faults)));
        }
    }
    Ok(())
}
