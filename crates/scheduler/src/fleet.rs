//! Looking at the RSA nodes: what they lend, whether they answer, what is on them that should not be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::{LocalReport, NodeReport};
use ondeck_core::schedule::Event;
use ondeck_core::{Bytes, NodeName, RamDiskId};
use tokio::task::JoinSet;

use crate::daemon::Daemon;
use crate::store::job_of;

/// How often the nodes are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// What one look at a node brought.
struct Look {
    node: NodeName,
    found: Option<(NodeReport, Vec<LocalReport>)>,
}

/// Looks at the nodes for as long as the daemon lives.
pub(crate) async fn look(daemon: Arc<Daemon>) {
    let began = Instant::now();
    let mut heard: BTreeMap<NodeName, Instant> = BTreeMap::new();
    let mut strangers: BTreeSet<RamDiskId> = BTreeSet::new();
    let pools = daemon.config.scheduler.pools(&daemon.config.nodes);
    let devices: BTreeMap<&NodeName, &str> =
        pools.values().flat_map(|pool| pool.nodes.iter().map(|node| (node, &*pool.device))).collect();
    loop {
        let next = Instant::now() + INTERVAL;
        let names: Vec<NodeName> = daemon.brain().schedule.nodes().keys().cloned().collect();
        let mut set = JoinSet::new();
        for node in names {
            let daemon = Arc::clone(&daemon);
            set.spawn(async move {
                let found = match daemon.fleet.node(Some(&node)).await {
                    Ok(report) => daemon.fleet.ramdisks_of(&node).await.ok().map(|found| (report, found)),
                    Err(_) => None,
                };
                Look { node, found }
            });
        }
        while let Some(Ok(look)) = set.join_next().await {
            match look.found {
                Some((report, ramdisks)) => {
                    heard.insert(look.node.clone(), Instant::now());
                    let device = devices.get(&look.node).and_then(|device| report.devices.get(*device));
                    // What can be lent in all does not shrink because something is lent.
                    let capacity = device.map_or(Bytes::ZERO, |device| device.capacity);
                    node_answers(&daemon, &look.node, capacity, &ramdisks, &mut strangers).await;
                }
                None => {
                    let since = heard.get(&look.node).unwrap_or(&began);
                    let up = daemon.brain().schedule.nodes().get(&look.node).is_some_and(|node| node.up);
                    if up && since.elapsed() > daemon.config.scheduler.node_timeout {
                        let _ = daemon.event(Event::NodeLost(look.node)).await;
                    }
                }
            }
        }
        tokio::time::sleep(next.saturating_duration_since(Instant::now())).await;
    }
}

async fn node_answers(
    daemon: &Arc<Daemon>,
    node: &NodeName,
    capacity: Bytes,
    ramdisks: &[LocalReport],
    strangers: &mut BTreeSet<RamDiskId>,
) {
    let (news, residue, broken, whole) = {
        let brain = daemon.brain();
        let schedule = &brain.schedule;
        let known = schedule.nodes().get(node);
        let news = known.is_none_or(|known| !known.up || known.capacity != capacity);
        let residue: Vec<RamDiskId> =
            known.map(|known| known.residue.iter().cloned().collect()).unwrap_or_default();
        let (mut broken, mut whole) = (Vec::new(), Vec::new());
        // What is on the node is little; all jobs may be many.
        for local in ramdisks {
            let id = local.layout.id.clone();
            let Some(job) = job_of(&id).and_then(|job| schedule.jobs().get(&job)) else { continue };
            if job.ramdisk().as_ref() != Some(&id) {
                continue;
            }
            let ended = local.processes.iter().find(|process| process.role != "client" && !process.running);
            match (ended, job.broken) {
                (Some(ended), false) => {
                    broken.push((id, format!("its {} on the RSA node {node} has ended", ended.role)));
                }
                (None, true) if all_answer(schedule, job) => whole.push(id),
                _ => {}
            }
        }
        (news, residue, broken, whole)
    };
    if news {
        let _ = daemon.event(Event::NodeUp { node: node.clone(), capacity }).await;
    }
    for (ramdisk, why) in broken {
        let _ = daemon.event(Event::Broken { ramdisk, why }).await;
    }
    for ramdisk in whole {
        let _ = daemon.event(Event::Whole(ramdisk)).await;
    }
    for ramdisk in residue {
        if !ramdisks.iter().any(|local| local.layout.id == ramdisk)
            || daemon.fleet.demolish(&ramdisk, std::slice::from_ref(node)).await.is_empty()
        {
            let _ = daemon.event(Event::Cleaned { node: node.clone(), ramdisk }).await;
        }
    }
    for local in ramdisks {
        orphan(daemon, node, local, strangers).await;
    }
}

/// Whether all nodes of a job's RAM disk answer.
fn all_answer(schedule: &ondeck_core::schedule::Schedule, job: &ondeck_core::schedule::Job) -> bool {
    let up = |node: &NodeName| schedule.nodes().get(node).is_some_and(|node| node.up);
    job.allocation.as_ref().is_some_and(|found| found.nodes.iter().all(up))
}

/// Removes a job's RAM disk that this daemon has given up. One that it never ordered may hold somebody's results: it is
/// named, and left alone.
async fn orphan(
    daemon: &Arc<Daemon>,
    node: &NodeName,
    local: &LocalReport,
    strangers: &mut BTreeSet<RamDiskId>,
) {
    let id = &local.layout.id;
    let Some(job) = job_of(id) else { return };
    let known = {
        let brain = daemon.brain();
        match brain.schedule.jobs().get(&job) {
            // Its own, or one that is being built or removed.
            Some(known) => match known.ramdisk() {
                Some(current) if current.epoch <= id.epoch => return,
                _ => Ok(true),
            },
            None => brain.store.knows(id),
        }
    };
    match known {
        Ok(true) => {
            tracing::warn!(ramdisk = %id, %node, "removing what an ended job has left");
            for fault in daemon.fleet.demolish(id, std::slice::from_ref(node)).await {
                tracing::warn!(ramdisk = %id, %fault, "it can't be removed");
            }
        }
        Ok(false) if strangers.insert(id.clone()) => {
            tracing::warn!(
                ramdisk = %id, %node,
                "a job's RAM disk that is not in this scheduler's journal; it is left alone: `ondeck ramdisk destroy {}`",
                id.name
            );
        }
        Ok(false) => {}
        Err(error) => tracing::error!(%error, "can't tell whose {id} is"),
    }
}
