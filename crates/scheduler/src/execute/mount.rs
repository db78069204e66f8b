//! Showing a job's RAM disk on its nodes, and taking it away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::RefusalCode;
use ondeck_core::schedule::{Event, Fault, Job, JobState, Outcome, Purpose, Work};
use ondeck_core::{Incarnation, NodeName, QueuedJob, RamDiskId, Standing};
use ondeck_fleet::{NodeFault, NotOvermounted};
use tokio::task::JoinSet;

use super::build::{keep_ramdisk, kept_ramdisk};
use super::directories::overmounts;
use super::late;
use super::outcome::{failed, said, words};
use super::stage_in::catch_up;
use crate::context::Context;

/// How long a job that has started is compared with the disk.
const LATE_LOOK: Duration = Duration::from_secs(600);

/// How long an unmount waits for RSA nodes to say whether the RAM disk was full.
const FULL_LOOK: Duration = Duration::from_secs(2);

/// Another job that runs on one of the job's nodes, and where. The RAM disk would be shown to it, too.
fn neighbour(context: &Context, job: &Job) -> Option<(Incarnation, NodeName)> {
    let snapshot = context.queue.snapshot();
    let here = |other: &&QueuedJob| {
        other.id.job != job.id.job && matches!(other.standing, Standing::Running | Standing::Configuring)
    };
    snapshot.jobs.iter().filter(here).find_map(|other| {
        let shared = other.nodes.iter().find(|node| job.io_nodes.contains(node))?;
        Some((other.id, shared.clone()))
    })
}

pub(super) async fn mount(context: &Arc<Context>, job: &Job, id: &RamDiskId, until: Instant) -> Outcome {
    if let Some((other, node)) = neighbour(context, job).filter(|_| !context.config().scheduler.shared_nodes)
    {
        let why =
            format!("job {other} runs on {node}, too; ask for nodes of your own with #SBATCH --exclusive");
        return Outcome::Refused { why, fault: Fault::NeedsUser };
    }
    let (secret, mut layout) = match kept_ramdisk(context, id).await {
        Ok(found) => found,
        Err(why) => return failed(why, Fault::Transient),
    };
    for node in &job.io_nodes {
        if !layout.clients.contains(node) {
            layout.clients.push(node.clone());
        }
    }
    if let Err(why) = keep_ramdisk(context, job.id, id, &secret, Some(layout.clone())).await {
        return failed(why, Fault::Transient);
    }
    let overmounts = overmounts(job);
    if overmounts.iter().any(|overmount| !overmount.read_only) {
        // From the first byte that the job can write: no journal that is lost or older may have it destroyed.
        let servers: Vec<NodeName> = layout.servers.iter().map(|server| server.node.clone()).collect();
        let faults = context.fleet.guard(id, &servers, until).await;
        if !faults.is_empty() {
            return Outcome::Refused { why: words(&faults), fault: Fault::Transient };
        }
    }
    let now = || context.job(job.id);
    let waits = || now().is_some_and(|now| now.waits_to_start());
    let is_expected = || now().is_some_and(|now| now.prolog.is_expected() && !now.waits_to_start());
    let mut changed = context.watch();
    // It waited for the former scheduler, and asks this one again, unless it has been given up.
    while is_expected() {
        if tokio::time::timeout_at(until.into(), changed.changed()).await.is_err() {
            break;
        }
    }
    if !waits() {
        return late::mount(context, job, id, &layout, &secret, until).await;
    }
    match context.fleet.overmount(&layout, &secret, &overmounts, &job.io_nodes, until, waits).await {
        // Also if its Prologs give up now: a node that shows it, and knows that all do, lets the job keep it.
        Ok(()) => {
            let what = match job.purpose {
                Purpose::Input => "input",
                Purpose::Both => "input and output",
                Purpose::Output => "output",
            };
            let text = format!("{} ({what})", said(job, Work::Mount));
            {
                // The job is to start now; nothing of its own is hidden from it.
                let (context, job, id) = (Arc::clone(context), job.clone(), id.clone());
                tokio::spawn(async move {
                    if let Err(why) = catch_up(&context, &job, &id, Instant::now() + LATE_LOOK, true).await {
                        tracing::debug!(job = %job.id, why, "it was not compared with the disk");
                    }
                });
            }
            Outcome::Done(text)
        }
        Err(NotOvermounted { faults, .. }) if faults.is_empty() => {
            failed("its Prolog gave up waiting while it was mounted", Fault::Transient)
        }
        Err(NotOvermounted { faults, untouched }) => {
            // What the user has to change does not get better by itself.
            let refused = |fault: &NodeFault| {
                matches!(fault.error.code(), Some(RefusalCode::Forbidden | RefusalCode::Conflict))
            };
            let fault = if faults.iter().any(refused) { Fault::NeedsUser } else { Fault::Transient };
            if untouched {
                Outcome::Refused { why: words(&faults), fault }
            } else {
                failed(words(&faults), fault)
            }
        }
    }
}

/// Tells a job's user of nodes where the RAM disk was lost while the job ran: what failed there is in no server's books.
pub(crate) async fn tell_of_cuts(context: &Arc<Context>, job: &Job, id: &RamDiskId, nodes: &[NodeName]) {
    let mut set = JoinSet::new();
    for node in nodes {
        let (context, id, node) = (Arc::clone(context), id.clone(), node.clone());
        set.spawn(async move {
            let reports = context.fleet.ramdisks_of(&node).await.unwrap_or_else(|error| {
                // Taking the RAM disk away asks the same node next, and fails in words if it still says nothing.
                tracing::warn!(ramdisk = %id, %node, %error, "can't tell whether the job lost it there");
                Vec::new()
            });
            let report = reports.into_iter().find(|report| report.layout.id == id)?;
            (!report.faults.is_empty()).then(|| format!("on {node} {}", report.faults.join(", ")))
        });
    }
    let mut found: Vec<String> = Vec::new();
    while let Some(joined) = set.join_next().await {
        match joined {
            Ok(cut) => found.extend(cut),
            Err(error) => tracing::error!(ramdisk = %id, %error, "a look at a node ended by a defect"),
        }
    }
    if found.is_empty() {
        return;
    }
    found.sort_unstable();
    let paths: Vec<String> =
        job.directories(job.purpose).iter().map(|(path, _, _)| path.display().to_string()).collect();
    let text = format!(
        "the RAM disk was lost while the job ran: {}; it may have got I/O errors in {}, and what it could not write there is \
         not among its results",
        found.join("; "),
        paths.join(", ")
    );
    let _ = context.event(Event::Noticed { job: job.id, text }).await;
}

/// Tells a job's user if its RAM disk was all but full: what its programs could not write is not among its results, and not
/// every program looks whether it could. It is asked for once more when the job has ended, as it may have been a short one.
async fn tell_if_full(context: &Arc<Context>, job: &Job, id: &RamDiskId) {
    let nodes = job.allocation.iter().flat_map(|allocation| &allocation.nodes);
    let mut set = JoinSet::new();
    for node in nodes.cloned() {
        let (context, id) = (Arc::clone(context), id.clone());
        set.spawn(async move {
            match tokio::time::timeout(FULL_LOOK, context.fleet.ramdisks_of(&node)).await {
                Ok(Ok(found)) => {
                    found.iter().any(|local| local.layout.id == id && local.ran_full).then_some(node)
                }
                // It is asked again and again as long as the RAM disk is there.
                Ok(Err(error)) => {
                    tracing::warn!(ramdisk = %id, %node, %error, "can't tell whether it was full there");
                    None
                }
                Err(_) => {
                    tracing::warn!(ramdisk = %id, %node, "does not say whether it was full there");
                    None
                }
            }
        });
    }
    let mut nodes: Vec<NodeName> = Vec::new();
    while let Some(joined) = set.join_next().await {
        match joined {
            Ok(full) => nodes.extend(full),
            Err(error) => tracing::error!(ramdisk = %id, %error, "a look at a node ended by a defect"),
        }
    }
    nodes.sort_unstable();
    if !nodes.is_empty() {
        let _ = context.event(Event::RanFull { job: job.id, nodes }).await;
    }
}

pub(super) async fn unmount(
    context: &Arc<Context>,
    job: &Job,
    id: &RamDiskId,
    force: bool,
    until: Instant,
) -> Outcome {
    // Epilogs may be doing it on their own nodes.
    let lock = context.unmounts_of(job.id);
    let _alone = lock.write().await;
    if job.unmounts == 0 && job.results && !job.ran_full {
        tell_if_full(context, job, id).await;
    }
    if job.unmounts == 0 && !job.broken && job.job_state == JobState::Finished {
        tell_of_cuts(context, job, id, &job.io_nodes).await;
    }
    let mut faults = context.fleet.remove_overmounts(id, &job.io_nodes, force, until).await;
    if faults.is_empty() {
        faults = context.fleet.leave(id, &job.io_nodes, until).await;
    }
    if faults.is_empty() {
        return Outcome::Done(said(job, Work::Unmount { force }));
    }
    let busy = faults.iter().any(|fault| fault.error.code() == Some(RefusalCode::Busy));
    let blame = faults.iter().map(|fault| fault.node.clone()).collect();
    let fault = if busy && !force { Fault::Busy } else { Fault::Transient };
    Outcome::Failed { why: words(&faults), blame, fault }
}
