//! Looking at the RSA nodes: what they lend, whether they answer, what is on them that should not be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::{LocalReport, NodeReport, Release};
use ondeck_core::schedule::{Event, RsaState, Time};
use ondeck_core::{Bytes, Incarnation, NodeName, RamDiskId};
use tokio::task::{JoinHandle, JoinSet};

use crate::daemon::{Daemon, now};
use crate::store::job_of;

/// How often the nodes are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often it is tried to remove what is left on compute nodes.
const SWEEP: Duration = Duration::from_secs(5);

/// What one look at a node brought.
struct Look {
    node: NodeName,
    found: Option<(NodeReport, Vec<LocalReport>)>,
}

/// What the nodes that answered have of RAM disks.
type Sights = BTreeMap<NodeName, Vec<LocalReport>>;

/// Looks at the nodes for as long as the daemon lives.
pub(crate) async fn look(daemon: Arc<Daemon>) {
    let began = Instant::now();
    let mut heard: BTreeMap<NodeName, Instant> = BTreeMap::new();
    let mut strangers: BTreeSet<RamDiskId> = BTreeSet::new();
    let mut sweep = None;
    let pools = daemon.config.scheduler.pools(&daemon.config.nodes);
    let devices: BTreeMap<&NodeName, &str> =
        pools.values().flat_map(|pool| pool.nodes.iter().map(|node| (node, &*pool.device))).collect();
    loop {
        let (next, taken) = (Instant::now() + INTERVAL, now());
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
        let mut sights = Sights::new();
        while let Some(Ok(look)) = set.join_next().await {
            match look.found {
                Some((report, ramdisks)) => {
                    heard.insert(look.node.clone(), Instant::now());
                    let device = devices.get(&look.node).and_then(|device| report.devices.get(*device));
                    // What can be lent in all does not shrink because something is lent.
                    let capacity = device.map_or(Bytes::ZERO, |device| device.capacity);
                    node_answers(&daemon, &look.node, capacity, &ramdisks, &mut strangers).await;
                    sights.insert(look.node, ramdisks);
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
        for event in judge(&daemon, taken, &sights) {
            let _ = daemon.event(event).await;
        }
        // One at a time: a node that is out of reach takes long to say nothing.
        if sweep.as_ref().is_none_or(|sweep: &JoinHandle<()>| sweep.is_finished()) {
            let daemon = Arc::clone(&daemon);
            sweep = Some(tokio::spawn(async move {
                tokio::time::sleep(SWEEP).await;
                self::sweep(daemon).await;
            }));
        }
        tokio::time::sleep(next.saturating_duration_since(Instant::now())).await;
    }
}

/// Removes what could not be removed from compute nodes when their jobs had ended.
async fn sweep(daemon: Arc<Daemon>) {
    let strays = daemon.brain().schedule.strays().clone();
    for (node, left) in strays {
        for ramdisk in left {
            if daemon.fleet.demolish(&ramdisk, std::slice::from_ref(&node)).await.is_empty() {
                let _ = daemon.event(Event::Cleaned { node: node.clone(), ramdisk }).await;
            }
        }
    }
}

/// Which RAM disks have lost a server, or have all of them again. A node that was started anew answers, and has nothing.
fn judge(daemon: &Daemon, taken: Time, sights: &Sights) -> Vec<Event> {
    let brain = daemon.brain();
    let mut events = Vec::new();
    for job in brain.schedule.jobs().values() {
        let (Some(ramdisk), Some(allocation)) = (job.ramdisk(), &job.allocation) else { continue };
        // What was seen before it came to this state says nothing.
        if !is_built(job.rsa_state) || job.since >= taken {
            continue;
        }
        let parts = allocation.nodes.iter().map(|node| (node, sights.get(node)));
        let faults: Vec<(&NodeName, Option<String>)> = parts
            .map(|(node, sight)| match sight {
                // It may only be slow; in time it is taken for lost.
                None => (node, Some(String::new())),
                Some(found) => (node, fault_of(node, found.iter().find(|local| local.layout.id == ramdisk))),
            })
            .collect();
        if job.broken && faults.iter().all(|(_, fault)| fault.is_none()) {
            events.push(Event::Whole(ramdisk));
            continue;
        }
        for (node, fault) in faults {
            let Some(why) = fault.filter(|why| !why.is_empty()) else { continue };
            if !job.broken || !job.lost_on.contains(node) {
                events.push(Event::Broken { ramdisk: ramdisk.clone(), node: node.clone(), why });
            }
        }
    }
    events
}

/// What is wrong with a server's part of a RAM disk.
fn fault_of(node: &NodeName, part: Option<&LocalReport>) -> Option<String> {
    let Some(part) = part else {
        return Some(format!("the RSA node {node} has lost its part of the RAM disk (was it started anew?)"));
    };
    let ended = part.processes.iter().find(|process| process.role != "client" && !process.running);
    ended.map(|ended| format!("its {} on the RSA node {node} has ended", ended.role))
}

/// Whether all servers of a job's RAM disk must be there in this state.
fn is_built(state: RsaState) -> bool {
    use RsaState as S;
    !matches!(
        state,
        S::Initial
            | S::Ineligible
            | S::Assigned
            | S::Booting
            | S::Aborted
            | S::DoneStagingOut
            | S::Teardown
            | S::Destroyed
    )
}

async fn node_answers(
    daemon: &Arc<Daemon>,
    node: &NodeName,
    capacity: Bytes,
    ramdisks: &[LocalReport],
    strangers: &mut BTreeSet<RamDiskId>,
) {
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
        // It was to be destroyed when the node did not answer, which is ordered only once its results are home, or given up.
        let release = Release::StagedOut { task: 0 };
        for fault in daemon.fleet.release(&ramdisk, std::slice::from_ref(node), &release).await {
            tracing::warn!(%ramdisk, %fault, "its results can't be released");
        }
        if !ramdisks.iter().any(|local| local.layout.id == ramdisk)
            || daemon.fleet.demolish(&ramdisk, std::slice::from_ref(node)).await.is_empty()
        {
            let _ = daemon.event(Event::Cleaned { node: node.clone(), ramdisk }).await;
        }
    }
    for job in vacated(daemon, node, ramdisks) {
        let _ = daemon.event(Event::Vacated { node: node.clone(), job }).await;
    }
    for local in ramdisks {
        orphan(daemon, node, local, strangers).await;
    }
}

/// The jobs that are not known, because what the journal has of them was set aside, and of which a node has nothing.
fn vacated(daemon: &Daemon, node: &NodeName, ramdisks: &[LocalReport]) -> Vec<Incarnation> {
    let brain = daemon.brain();
    let Some(known) = brain.schedule.nodes().get(node) else { return Vec::new() };
    let is_there = |job| ramdisks.iter().any(|local| job_of(&local.layout.id) == Some(job));
    let unknown = known.promised.keys().filter(|job| !brain.schedule.jobs().contains_key(job));
    unknown.copied().filter(|job| !is_there(*job)).collect()
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
