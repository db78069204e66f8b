//! Looking at the RSA nodes: what they lend, whether they answer, what is on them that should not be.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::{LocalReport, NodeReport, Release};
use ondeck_core::schedule::{Event, Job, Node, RsaState, Time};
use ondeck_core::{Bytes, Incarnation, NodeName, RamDiskId};
use tokio::task::{self, JoinHandle, JoinSet};

use crate::adopt::{Adoption, LocalReports};
use crate::clock::now;
use crate::context::Context;
use crate::store::job_of;

/// How often the nodes are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often it is tried to remove what is left on compute nodes.
const SWEEP: Duration = Duration::from_secs(5);

/// What a node said, if it answered.
type Answer = Option<(NodeReport, Vec<LocalReport>)>;

/// Looks at nodes that are under way. Each node is looked at by itself: one that hangs keeps none of the others waiting.
struct Looks<T> {
    set: JoinSet<T>,
    of: BTreeMap<task::Id, (NodeName, Time)>,
}

impl<T: Send + 'static> Looks<T> {
    fn new() -> Looks<T> {
        Looks { set: JoinSet::new(), of: BTreeMap::new() }
    }

    /// Begins a look at each node that is not being looked at.
    fn begin<F: Future<Output = T> + Send + 'static>(
        &mut self,
        nodes: impl IntoIterator<Item = NodeName>,
        asked: Time,
        look: impl Fn(NodeName) -> F,
    ) {
        for node in nodes {
            if !self.of.values().any(|(known, _)| *known == node) {
                let id = self.set.spawn(look(node.clone())).id();
                self.of.insert(id, (node, asked));
            }
        }
    }

    /// The next node that was looked at, when it was asked, and what that brought: nothing if the look panicked. No node if
    /// the time is over, or no look is under way.
    async fn next(&mut self, until: Instant) -> Option<(NodeName, Time, Option<T>)> {
        let joined = tokio::time::timeout_at(until.into(), self.set.join_next_with_id()).await.ok()??;
        let (id, found) = match joined {
            Ok((id, found)) => (id, Some(found)),
            Err(error) => (error.id(), None),
        };
        self.of.remove(&id).map(|(node, asked)| (node, asked, found))
    }
}

/// Removals that are under way on RSA nodes, which take as long as they take: nobody waits for them.
#[derive(Default)]
struct Removals(BTreeMap<(NodeName, RamDiskId), JoinHandle<()>>);

impl Removals {
    /// Begins one, unless the same is under way. Returns whether it did.
    fn begin(
        &mut self,
        node: &NodeName,
        ramdisk: &RamDiskId,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> bool {
        self.0.retain(|_, removal| !removal.is_finished());
        let key = (node.clone(), ramdisk.clone());
        let is_new = !self.0.contains_key(&key);
        if is_new {
            self.0.insert(key, tokio::spawn(work));
        }
        is_new
    }
}

/// Looks at the nodes for as long as the daemon lives.
pub(crate) async fn look(context: Arc<Context>) {
    let began = Instant::now();
    let mut heard: BTreeMap<NodeName, Instant> = BTreeMap::new();
    let (mut latest, mut adoption) = (LocalReports::new(), Adoption::default());
    let mut removals = Removals::default();
    let mut looks: Looks<Answer> = Looks::new();
    let mut sweep = None;
    let pools = context.config().scheduler.pools(&context.config().nodes);
    let devices: BTreeMap<&NodeName, &str> =
        pools.values().flat_map(|pool| pool.nodes.iter().map(|node| (node, &*pool.device))).collect();
    loop {
        let (next, taken) = (Instant::now() + INTERVAL, now());
        let names: Vec<NodeName> = context.view().nodes().keys().cloned().collect();
        adoption.before(&context, &latest, taken);
        looks.begin(names, taken, |node| {
            let context = Arc::clone(&context);
            // No answer is no sign of anything until it has lasted for the node's timeout.
            async move {
                let report = context.fleet.node(Some(&node)).await.ok()?;
                let ramdisks = context.fleet.ramdisks_of(&node).await.ok()?;
                Some((report, ramdisks))
            }
        });
        let (mut reports, mut answered) = (LocalReports::new(), Vec::new());
        while let Some((node, asked, answer)) = looks.next(next).await {
            match answer.flatten() {
                Some((report, ramdisks)) => {
                    heard.insert(node.clone(), Instant::now());
                    context.charge.note(&node, report.authority.as_ref());
                    let device = devices.get(&node).and_then(|device| report.devices.get(*device));
                    // What can be lent in all does not shrink because something is lent.
                    let capacity = device.map_or(Bytes::ZERO, |device| device.capacity);
                    latest.insert(node.clone(), (asked, ramdisks.clone()));
                    answered.push((node.clone(), capacity));
                    reports.insert(node, (asked, ramdisks));
                }
                None => {
                    let since = heard.get(&node).unwrap_or(&began);
                    let up = context.view().nodes().get(&node).is_some_and(|node| node.up);
                    if up && since.elapsed() > context.config().scheduler.node_timeout {
                        let _ = context.event(Event::NodeLost(node)).await;
                    }
                }
            }
        }
        let (left, untold) = adoption.look(&context, &latest, began).await;
        for (node, capacity) in answered {
            if let Some(why) = context.take_charge([&node]).await.remove(&node) {
                // It lends nothing, and is shown with the reason.
                context.refusing().insert(node, why);
                continue;
            }
            context.refusing().remove(&node);
            let is_told = !untold.contains(&node);
            node_answers(&context, &node, capacity, is_told, &reports[&node].1, &mut removals).await;
        }
        for (id, on) in left {
            for node in on.into_iter().filter(|node| reports.contains_key(node)) {
                remove(&context, &mut removals, &node, &id);
            }
        }
        for event in judge(&context, taken, &reports) {
            let _ = context.event(event).await;
        }
        // One at a time: a node that is out of reach takes long to say nothing.
        if sweep.as_ref().is_none_or(|sweep: &JoinHandle<()>| sweep.is_finished()) {
            let context = Arc::clone(&context);
            sweep = Some(tokio::spawn(async move {
                tokio::time::sleep(SWEEP).await;
                self::sweep(context).await;
            }));
        }
        tokio::time::sleep(next.saturating_duration_since(Instant::now())).await;
    }
}

/// Removes what could not be removed from compute nodes when their jobs had ended.
async fn sweep(context: Arc<Context>) {
    let all = context.view().leftover_on_compute().clone();
    let mut set = JoinSet::new();
    for (node, left) in all {
        let context = Arc::clone(&context);
        set.spawn(async move {
            context.take_charge([&node]).await;
            for ramdisk in left {
                if context.fleet.demolish(&ramdisk, std::slice::from_ref(&node)).await.is_empty() {
                    let _ = context.event(Event::Cleaned { node: node.clone(), ramdisk }).await;
                }
            }
        });
    }
    set.join_all().await;
}

/// Which RAM disks have lost a server, or have all of them again. A node that was started anew answers, and has nothing.
fn judge(context: &Context, taken: Time, reports: &LocalReports) -> Vec<Event> {
    let view = context.view();
    let mut events = Vec::new();
    for job in view.jobs().values() {
        let (Some(ramdisk), Some(allocation)) = (job.ramdisk(), &job.allocation) else { continue };
        // What was seen before it came to this state says nothing.
        if !is_built(job.rsa_state) || job.since >= taken {
            continue;
        }
        let answers = allocation.nodes.iter().map(|node| (node, reports.get(node)));
        let faults: Vec<(&NodeName, Option<String>)> = answers
            .map(|(node, answer)| match answer {
                // It may only be slow; in time it is taken for lost.
                Some((asked, found)) if job.since < *asked => {
                    (node, fault_of(node, found.iter().find(|local| local.layout.id == ramdisk)))
                }
                _ => (node, Some(String::new())),
            })
            .collect();
        events.extend(ran_full(job, &ramdisk, allocation.nodes.iter().map(|node| (node, reports.get(node)))));
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

/// What is to be told if a job's RAM disk was all but full.
fn ran_full<'a>(
    job: &Job,
    ramdisk: &RamDiskId,
    answers: impl Iterator<Item = (&'a NodeName, Option<&'a (Time, Vec<LocalReport>)>)>,
) -> Option<Event> {
    if job.ran_full || !job.results {
        return None;
    }
    let is_full = |answer: Option<&(Time, Vec<LocalReport>)>| {
        answer
            .is_some_and(|(_, found)| found.iter().any(|local| local.layout.id == *ramdisk && local.ran_full))
    };
    let nodes: Vec<NodeName> =
        answers.filter(|(_, answer)| is_full(*answer)).map(|(node, _)| node.clone()).collect();
    (!nodes.is_empty()).then_some(Event::RanFull { job: job.id, nodes })
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

/// A node has answered. It counts as heard of once all that it has was told of: `is_told`.
async fn node_answers(
    context: &Arc<Context>,
    node: &NodeName,
    capacity: Bytes,
    is_told: bool,
    ramdisks: &[LocalReport],
    removals: &mut Removals,
) {
    let (news, leftover) = {
        let view = context.view();
        let known = view.nodes().get(node);
        let is_as_known = |known: &Node| known.up && known.capacity == capacity && known.heard;
        let news = !known.is_some_and(is_as_known);
        let may_be_heard = is_told || known.is_some_and(|known| known.heard);
        let leftover: Vec<RamDiskId> =
            known.map(|known| known.leftover_on_rsa.iter().cloned().collect()).unwrap_or_default();
        (news && may_be_heard, leftover)
    };
    if news {
        let _ = context.event(Event::NodeUp { node: node.clone(), capacity }).await;
    }
    for ramdisk in leftover {
        if !ramdisks.iter().any(|local| local.layout.id == ramdisk) {
            let _ = context.event(Event::Cleaned { node: node.clone(), ramdisk }).await;
            continue;
        }
        let (context, of, id) = (Arc::clone(context), node.clone(), ramdisk.clone());
        removals.begin(node, &ramdisk, async move {
            // It was to be destroyed when the node did not answer, which is ordered only once its results are home, or given up.
            let release = Release::StagedOut { task: 0 };
            for fault in context.fleet.release(&id, std::slice::from_ref(&of), &release).await {
                tracing::warn!(ramdisk = %id, %fault, "its results can't be released");
            }
            if context.fleet.demolish(&id, std::slice::from_ref(&of)).await.is_empty() {
                let _ = context.event(Event::Cleaned { node: of, ramdisk: id }).await;
            }
        });
    }
    for job in vacated(context, node, ramdisks) {
        let _ = context.event(Event::Vacated { node: node.clone(), job }).await;
    }
}

/// The jobs that are not known, because what the journal has of them was set aside, and of which a node has nothing.
fn vacated(context: &Context, node: &NodeName, ramdisks: &[LocalReport]) -> Vec<Incarnation> {
    let view = context.view();
    let Some(known) = view.nodes().get(node) else { return Vec::new() };
    let is_there = |job| ramdisks.iter().any(|local| job_of(&local.layout.id) == Some(job));
    let unknown = known.promised.keys().filter(|job| !view.jobs().contains_key(job));
    unknown.copied().filter(|job| !is_there(*job)).collect()
}

/// Removes a RAM disk of a job that holds nothing and that nobody uses. If it does, the node's agent refuses.
fn remove(context: &Arc<Context>, removals: &mut Removals, node: &NodeName, id: &RamDiskId) {
    let (of, left, on) = (Arc::clone(context), id.clone(), node.clone());
    let begun = removals.begin(node, id, async move {
        for fault in of.fleet.demolish(&left, std::slice::from_ref(&on)).await {
            tracing::warn!(ramdisk = %left, %fault, "it can't be removed");
        }
    });
    if begun {
        tracing::warn!(ramdisk = %id, %node, "removing what an ended job has left");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn nodes() -> Vec<NodeName> {
        ["hangs", "panics", "r1", "r2"].map(|name| name.parse().unwrap()).to_vec()
    }

    #[tokio::test]
    async fn a_node_that_hangs_keeps_no_other_from_being_looked_at() {
        let mut looks: Looks<&str> = Looks::new();
        for _ in 0..3 {
            looks.begin(nodes(), now(), |node| async move {
                match node.as_str() {
                    "hangs" => std::future::pending().await,
                    "panics" => panic!("a look that has a defect"),
                    _ => "here",
                }
            });
            let until = Instant::now() + Duration::from_millis(200);
            let mut seen = BTreeMap::new();
            while let Some((node, _, found)) = looks.next(until).await {
                seen.insert(node.to_string(), found);
            }
            let expected = [("panics", None), ("r1", Some("here")), ("r2", Some("here"))];
            assert_eq!(seen, expected.map(|(name, found)| (name.to_owned(), found)).into());
            assert_eq!(looks.of.len(), 1, "the one that hangs is looked at once");
        }
    }

    #[tokio::test]
    async fn a_removal_that_hangs_keeps_no_other_from_being_begun() {
        let mut removals = Removals::default();
        let (node, ids) =
            (&nodes()[2], ["job-1-0@1", "job-2-0@2"].map(|id| id.parse::<RamDiskId>().unwrap()));
        let (ended, mut end) = tokio::sync::mpsc::channel(1);
        assert!(removals.begin(node, &ids[0], std::future::pending()));
        assert!(removals.begin(node, &ids[1], async move { ended.send(()).await.unwrap() }));
        assert!(!removals.begin(node, &ids[0], async {}));
        end.recv().await.unwrap();
        while removals.0.values().filter(|removal| removal.is_finished()).count() == 0 {
            tokio::task::yield_now().await;
        }
        assert!(removals.begin(node, &ids[1], async {}));
    }
}
