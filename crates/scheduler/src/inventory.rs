//! The inventory of each RSA node, which is what it has of a job's results: asked for while they are in RAM, so that what
//! is lost with a node can be named, and used to save what the other nodes have.

use std::sync::Arc;
use std::time::Duration;

use ondeck_api::scheduler::LostPart;
use ondeck_api::wire::Inventory;
use ondeck_core::schedule::{Event, InventorySummary, Job, RsaState, real_path};
use ondeck_core::{EngineKind, Incarnation, NodeName, RamDiskId};
use tokio::task::JoinSet;

use crate::clock::{self, now};
use crate::context::Context;
use crate::store::StoreError;

/// How often all nodes are asked.
const INTERVAL: Duration = Duration::from_secs(60);

/// Jobs whose nodes are asked at the same time: an answer may have half a megabyte, and an agent looks at every file.
const AT_ONCE: usize = 4;

/// Names that a message gives; `ondeck job show` has all.
const FIRST: usize = 3;

/// Names that a story gives of all lost nodes together: an answer has a limit.
const MOST_TEXT: usize = 2 << 20;

/// Asks for as long as the daemon lives.
pub(crate) async fn look(context: Arc<Context>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let ids: Vec<Incarnation> = context.view().jobs().keys().copied().collect();
        let mut set = JoinSet::new();
        for id in ids {
            let Some(job) = context.job(id).filter(may_change) else { continue };
            if set.len() >= AT_ONCE {
                set.join_next().await;
            }
            let context = Arc::clone(&context);
            set.spawn(async move { take(&context, &job).await });
        }
        while set.join_next().await.is_some() {}
    }
}

/// Whether a job's nodes have results that may be others than when they were last asked.
fn may_change(job: &Job) -> bool {
    job.results && !job.broken && !matches!(job.rsa_state, RsaState::Lost | RsaState::Mounting)
}

/// Asks a job's nodes what they have of its results, and keeps it. Who does not answer is as it was.
pub(crate) async fn take(context: &Arc<Context>, job: &Job) {
    let (Some(allocation), Some(id)) = (&job.allocation, job.ramdisk()) else { return };
    let engine = context.engine(job);
    if !matches!(engine, EngineKind::Gluster | EngineKind::Tmpfs)
        || context.config().scheduler.simulate.is_some()
    {
        return;
    }
    let directories = job.directories(job.purpose).into_iter().enumerate();
    let slots: Vec<String> =
        directories.filter(|(_, (_, _, output))| *output).map(|(slot, _)| slot.to_string()).collect();
    let mut inventories: Vec<(NodeName, Inventory)> = Vec::new();
    for node in &allocation.nodes {
        match context.fleet.inventory(node, &id, &slots).await {
            Ok(inventory) => inventories.push((node.clone(), inventory)),
            Err(error) => {
                tracing::debug!(job = %job.id, %node, %error, "can't say what it has of the results")
            }
        }
    }
    if let Err(why) = keep(context, job.id, id, inventories).await {
        tracing::warn!(job = %job.id, why, "what its RSA nodes have of the results can't be kept");
    }
}

async fn keep(
    context: &Arc<Context>,
    job: Incarnation,
    ramdisk: RamDiskId,
    inventories: Vec<(NodeName, Inventory)>,
) -> Result<(), String> {
    let seen = now();
    let summaries = inventories.iter().map(|(node, found)| {
        let first = found.names.iter().take(FIRST).cloned().collect();
        (node.clone(), InventorySummary { files: found.files, bytes: found.bytes, seen, first })
    });
    let inventoried = Event::Inventoried { ramdisk, inventories: summaries.collect() };
    let of = Arc::clone(context);
    let keep = move || of.journal.write(|store| store.keep_inventories(job, seen, &inventories));
    let kept = tokio::task::spawn_blocking(keep);
    kept.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    context.event(inventoried).await.map_err(|error| error.to_string())
}

/// What the nodes that were lost had of a job's results.
pub(crate) fn lost(context: &Context, job: &Job) -> Result<Vec<LostPart>, StoreError> {
    let directories = job.directories(job.purpose);
    let mut room = MOST_TEXT;
    let mut lost = Vec::new();
    for node in &job.lost_on {
        let last = context.journal.read(|reader| reader.inventory(job.id, node))?;
        let Some((seen, found)) = last else { continue };
        let names = found.names.iter().filter_map(|name| real_path(&directories, name));
        let names = names.take_while(|name| {
            let fits = name.len() <= room;
            room = room.saturating_sub(name.len());
            fits
        });
        let names = names.collect();
        lost.push(LostPart {
            node: node.clone(),
            seen_ms: clock::shown(seen),
            files: found.files,
            bytes: found.bytes,
            names,
        });
    }
    Ok(lost)
}

/// The nodes that have something of a RAM disk, whether its servers live or not.
///
/// # Errors
/// In words. A node that the schedule has not taken for lost must answer: what it has is not given up for a pause.
pub(crate) async fn survivors(
    context: &Arc<Context>,
    job: &Job,
    id: &RamDiskId,
) -> Result<Vec<NodeName>, String> {
    let mut alive = Vec::new();
    for node in job.allocation.iter().flat_map(|found| &found.nodes) {
        match context.fleet.ramdisks_of(node).await {
            Ok(found) => {
                let has =
                    found.iter().any(|part| part.layout.id == *id && part.server && part.used.is_some());
                alive.extend(has.then(|| node.clone()));
            }
            Err(error) => {
                let up = context.view().nodes().get(node).is_some_and(|node| node.up);
                if up {
                    return Err(format!("{node} must say whether it has something of it: {error}"));
                }
            }
        }
    }
    if alive.is_empty() { Err("none of its RSA nodes has anything left of it".into()) } else { Ok(alive) }
}
