//! What each RSA node has of a job's results: asked for while they are in RAM, so that what is lost with a node can be
//! named, and used to save what the other nodes have.

use std::sync::Arc;
use std::time::Duration;

use ondeck_api::scheduler::LostPart;
use ondeck_api::wire::Names;
use ondeck_core::schedule::{Event, Job, Part, RsaState, real_path};
use ondeck_core::{EngineKind, Incarnation, NodeName, RamDiskId};
use tokio::task::JoinSet;

use crate::clock;
use crate::daemon::{Daemon, now};
use crate::execute;
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
pub(crate) async fn look(daemon: Arc<Daemon>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let ids: Vec<Incarnation> = daemon.brain().schedule.jobs().keys().copied().collect();
        let mut set = JoinSet::new();
        for id in ids {
            let Some(job) = daemon.job(id).filter(may_change) else { continue };
            if set.len() >= AT_ONCE {
                set.join_next().await;
            }
            let daemon = Arc::clone(&daemon);
            set.spawn(async move { count(&daemon, &job).await });
        }
        while set.join_next().await.is_some() {}
    }
}

/// Whether a job's nodes have results that may be others than when they were last asked.
fn may_change(job: &Job) -> bool {
    job.results && !job.broken && !matches!(job.rsa_state, RsaState::Lost | RsaState::Mounting)
}

/// Asks a job's nodes what they have of its results, and keeps it. Who does not answer is as it was.
pub(crate) async fn count(daemon: &Arc<Daemon>, job: &Job) {
    let (Some(allocation), Some(id)) = (&job.allocation, job.ramdisk()) else { return };
    let engine = execute::engine(daemon, job);
    if !matches!(engine, EngineKind::Gluster | EngineKind::Tmpfs)
        || daemon.config().scheduler.simulate.is_some()
    {
        return;
    }
    let directories = job.directories(job.purpose).into_iter().enumerate();
    let slots: Vec<String> =
        directories.filter(|(_, (_, _, output))| *output).map(|(slot, _)| slot.to_string()).collect();
    let mut parts: Vec<(NodeName, Names)> = Vec::new();
    for node in &allocation.nodes {
        match daemon.fleet.names(node, &id, &slots).await {
            Ok(names) => parts.push((node.clone(), names)),
            Err(error) => {
                tracing::debug!(job = %job.id, %node, %error, "can't say what it has of the results")
            }
        }
    }
    if let Err(why) = keep(daemon, job.id, id, parts).await {
        tracing::warn!(job = %job.id, why, "what its RSA nodes have of the results can't be kept");
    }
}

async fn keep(
    daemon: &Arc<Daemon>,
    job: Incarnation,
    ramdisk: RamDiskId,
    parts: Vec<(NodeName, Names)>,
) -> Result<(), String> {
    let seen = now();
    let summary = parts.iter().map(|(node, names)| {
        let first = names.names.iter().take(FIRST).cloned().collect();
        (node.clone(), Part { files: names.files, bytes: names.bytes, seen, first })
    });
    let counted = Event::Counted { ramdisk, parts: summary.collect() };
    let of = Arc::clone(daemon);
    let kept = tokio::task::spawn_blocking(move || of.brain().store.keep_parts(job, seen, &parts));
    kept.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    daemon.event(counted).await.map_err(|error| error.to_string())
}

/// What the nodes that were lost had of a job's results.
pub(crate) fn lost(daemon: &Daemon, job: &Job) -> Result<Vec<LostPart>, StoreError> {
    let directories = job.directories(job.purpose);
    let mut room = MOST_TEXT;
    let mut lost = Vec::new();
    for node in &job.lost_on {
        let Some((seen, found)) = daemon.brain().store.part(job.id, node)? else { continue };
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
    daemon: &Arc<Daemon>,
    job: &Job,
    id: &RamDiskId,
) -> Result<Vec<NodeName>, String> {
    let mut alive = Vec::new();
    for node in job.allocation.iter().flat_map(|found| &found.nodes) {
        match daemon.fleet.ramdisks_of(node).await {
            Ok(found) => {
                let has =
                    found.iter().any(|part| part.layout.id == *id && part.server && part.used.is_some());
                alive.extend(has.then(|| node.clone()));
            }
            Err(error) => {
                let up = daemon.brain().schedule.nodes().get(node).is_some_and(|node| node.up);
                if up {
                    return Err(format!("{node} must say whether it has something of it: {error}"));
                }
            }
        }
    }
    if alive.is_empty() { Err("none of its RSA nodes has anything left of it".into()) } else { Ok(alive) }
}
