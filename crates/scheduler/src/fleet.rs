//! Looking at the RSA nodes: what they lend, whether they answer, what is on them that should not be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::{LocalReport, NodeReport};
use ondeck_core::schedule::{Event, Job, RsaState, Schedule};
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
    loop {
        let next = Instant::now() + INTERVAL;
        let (names, expected) = {
            let brain = daemon.brain();
            let names: Vec<NodeName> = brain.schedule.nodes().keys().cloned().collect();
            (names, expected(&brain.schedule))
        };
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
        let mut seen: BTreeMap<NodeName, Vec<LocalReport>> = BTreeMap::new();
        while let Some(Ok(look)) = set.join_next().await {
            match look.found {
                Some((report, ramdisks)) => {
                    heard.insert(look.node.clone(), Instant::now());
                    node_answers(&daemon, &look.node, &report, &ramdisks, &mut strangers).await;
                    seen.insert(look.node, ramdisks);
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
        for (ramdisk, nodes, broken) in expected {
            let event = match (fault(&ramdisk, &nodes, &seen), broken) {
                (Some(why), false) => Event::Broken { ramdisk, why },
                (None, true) if nodes.iter().all(|node| seen.contains_key(node)) => Event::Whole(ramdisk),
                _ => continue,
            };
            let _ = daemon.event(event).await;
        }
        tokio::time::sleep(next.saturating_duration_since(Instant::now())).await;
    }
}

/// The RAM disks that must be there, with their nodes, and whether they are taken for broken.
fn expected(schedule: &Schedule) -> Vec<(RamDiskId, Vec<NodeName>, bool)> {
    use RsaState as S;
    let there = |job: &&Job| {
        !matches!(
            job.rsa_state,
            S::Initial | S::Ineligible | S::Assigned | S::Booting | S::Aborted | S::Teardown | S::Destroyed
        )
    };
    let of = |job: &Job| Some((job.ramdisk()?, job.allocation.as_ref()?.nodes.clone(), job.broken));
    schedule.jobs().values().filter(there).filter_map(of).collect()
}

/// What is wrong with a RAM disk on the nodes that answered. A node that does not answer may be there again soon.
fn fault(
    ramdisk: &RamDiskId,
    nodes: &[NodeName],
    seen: &BTreeMap<NodeName, Vec<LocalReport>>,
) -> Option<String> {
    nodes.iter().find_map(|node| {
        let reports = seen.get(node)?;
        let Some(local) = reports.iter().find(|local| local.layout.id == *ramdisk) else {
            return Some(format!("the RSA node {node} has nothing of its RAM disk any more"));
        };
        let ended = local.processes.iter().find(|process| process.role != "client" && !process.running)?;
        Some(format!("its {} on the RSA node {node} has ended", ended.role))
    })
}

async fn node_answers(
    daemon: &Arc<Daemon>,
    node: &NodeName,
    report: &NodeReport,
    ramdisks: &[LocalReport],
    strangers: &mut BTreeSet<RamDiskId>,
) {
    let device = daemon
        .config
        .scheduler
        .pools(&daemon.config.nodes)
        .values()
        .find(|pool| pool.nodes.contains(node))
        .and_then(|pool| report.devices.get(&pool.device).map(|device| device.capacity));
    // What can be lent in all does not shrink because something is lent.
    let capacity = device.unwrap_or(Bytes::ZERO);
    let (news, residue) = {
        let brain = daemon.brain();
        let known = brain.schedule.nodes().get(node);
        let news = known.is_none_or(|known| !known.up || known.capacity != capacity);
        let residue: Vec<RamDiskId> =
            known.map(|known| known.residue.iter().cloned().collect()).unwrap_or_default();
        (news, residue)
    };
    if news {
        let _ = daemon.event(Event::NodeUp { node: node.clone(), capacity }).await;
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
