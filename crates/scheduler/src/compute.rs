//! What is wrong on compute nodes: Prologs that do not ask, agents that do not answer, RAM disks of which something is left.
//!
//! Nothing is decided by it. It is kept in memory only: what is wrong still is so for the next scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ondeck_api::scheduler::{Warning, WarningKind};
use ondeck_core::schedule::{Time, Unasked};
use ondeck_core::{Incarnation, NodeName, RamDiskId};
use ondeck_fleet::Fleet;
use ondeck_wlm::WorkloadManager;
use tokio::task::JoinSet;

/// How often the agents of compute nodes are asked.
const INTERVAL: Duration = Duration::from_secs(20);

/// So many are asked at the same time.
const AT_ONCE: usize = 32;

/// An agent that has not answered so many times in a row is told of: one that is started again is not.
const MISSED: u32 = 2;

/// So many nodes are named in a warning.
const NAMED: usize = 5;

/// What is known of compute nodes.
pub(crate) struct ComputeNodes {
    /// Jobs that were first seen running before this time may have started while no scheduler ran.
    since: Time,
    known: Mutex<Observations>,
}

#[derive(Default)]
struct Observations {
    /// Of each node the jobs in a row that started there without a Prolog that asked, and the last of them.
    unasked: BTreeMap<NodeName, (u64, Incarnation)>,
    jobs_without_prolog: u64,
    /// How many times in a row each agent has not answered, and why.
    silent: BTreeMap<NodeName, (u32, String)>,
}

impl ComputeNodes {
    /// Knows nothing yet.
    pub fn new(since: Time) -> ComputeNodes {
        ComputeNodes { since, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Observations> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A Prolog has asked on a node.
    pub fn prolog_asked(&self, node: &NodeName) {
        if self.known().unasked.remove(node).is_some() {
            tracing::info!(%node, "its Prolog asks again");
        }
    }

    /// A job has started without any Prolog that asked.
    pub fn unasked(&self, unasked: &Unasked) {
        if unasked.started < self.since {
            return;
        }
        let mut known = self.known();
        known.jobs_without_prolog += 1;
        for node in &unasked.nodes {
            let (jobs, last) = known.unasked.entry(node.clone()).or_insert((0, unasked.job));
            (*jobs, *last) = (*jobs + 1, unasked.job);
        }
    }

    /// How many jobs have started without any Prolog that asked, since this daemon began.
    pub fn jobs_without_prolog(&self) -> u64 {
        self.known().jobs_without_prolog
    }

    /// What is wrong now, with what could not be removed.
    pub fn warnings(&self, left: &BTreeMap<NodeName, BTreeSet<RamDiskId>>) -> Vec<Warning> {
        let known = self.known();
        let mut warnings = Vec::new();
        let mut warn = |kind, nodes: Vec<NodeName>, text: &dyn Fn(&str) -> String| {
            if !nodes.is_empty() {
                let text = text(&list(&nodes));
                warnings.push(Warning { kind, nodes, text });
            }
        };
        let last = known.unasked.values().map(|(_, job)| *job).max();
        let jobs = known.unasked.values().map(|(jobs, _)| *jobs).max().unwrap_or(0);
        warn(WarningKind::NoProlog, known.unasked.keys().cloned().collect(), &|nodes| {
            let last = last.map(|job| job.to_string()).unwrap_or_default();
            format!(
                "no Prolog has asked for the last {jobs} jobs on {nodes} (job {last} was the last one): RAM disks are not \
                 shown there in time; see that Slurm runs `ondeck prolog` there, and that it reaches the scheduler"
            )
        });
        let silent = || known.silent.iter().filter(|(_, (missed, _))| *missed >= MISSED);
        let why = silent().next().map(|(_, (_, why))| why.clone()).unwrap_or_default();
        warn(WarningKind::SilentAgent, silent().map(|(node, _)| node.clone()).collect(), &|nodes| {
            format!(
                "the agent of {nodes} does not answer ({why}): no RAM disk can be shown there; start `ondeck agent`"
            )
        });
        let ramdisks: Vec<String> = left.values().flatten().take(NAMED).map(ToString::to_string).collect();
        warn(WarningKind::LeftOver, left.keys().cloned().collect(), &|nodes| {
            format!(
                "something of {} is left on {nodes}; it is removed when the agent there can do so",
                ramdisks.join(", ")
            )
        });
        warnings
    }
}

fn list(nodes: &[NodeName]) -> String {
    let names: Vec<&str> = nodes.iter().take(NAMED).map(NodeName::as_str).collect();
    let more = nodes.len().saturating_sub(NAMED);
    if more > 0 { format!("{} and {more} more", names.join(", ")) } else { names.join(", ") }
}

/// Asks the agents of all compute nodes now and then, for as long as the daemon lives.
pub(crate) async fn look(manager: Arc<dyn WorkloadManager>, fleet: Fleet, compute: Arc<ComputeNodes>) {
    loop {
        match manager.nodes().await {
            Ok(nodes) => ask(&fleet, &compute, nodes).await,
            Err(error) => {
                tracing::warn!(%error, "can't tell the compute nodes, so their agents are not asked")
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

async fn ask(fleet: &Fleet, compute: &ComputeNodes, nodes: Vec<NodeName>) {
    let mut answers = BTreeMap::new();
    let mut set = JoinSet::new();
    for node in nodes {
        if set.len() >= AT_ONCE {
            answers.extend(set.join_next().await.and_then(Result::ok));
        }
        let fleet = fleet.clone();
        set.spawn(async move {
            let answer = fleet.node(Some(&node)).await;
            (node, answer.err().map(|error| error.to_string()))
        });
    }
    answers.extend(set.join_all().await);
    let mut known = compute.known();
    // Those that the workload manager no longer has, or takes for gone itself, are not told of.
    known.silent.retain(|node, _| answers.contains_key(node));
    for (node, fault) in answers {
        match fault {
            None => drop(known.silent.remove(&node)),
            Some(why) => {
                let (missed, last) = known.silent.entry(node).or_default();
                (*missed, *last) = (missed.saturating_add(1), why);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_told_of_until_its_prolog_asks_and_not_for_jobs_that_started_without_a_scheduler() {
        let compute = ComputeNodes::new(Time(1000));
        let nodes: Vec<NodeName> = vec!["c1".parse().unwrap(), "c2".parse().unwrap()];
        let job = |number| Incarnation { job: ondeck_core::JobId(number), submitted: 0, restarts: 0 };
        let none = BTreeMap::new();
        compute.unasked(&Unasked { job: job(1), nodes: nodes.clone(), started: Time(999) });
        assert_eq!(compute.warnings(&none), []);
        for number in [2, 3] {
            compute.unasked(&Unasked { job: job(number), nodes: nodes.clone(), started: Time(1000) });
        }
        compute.prolog_asked(&nodes[0]);
        let warnings = compute.warnings(&none);
        assert_eq!(warnings.len(), 1);
        assert_eq!((warnings[0].kind, &warnings[0].nodes[..]), (WarningKind::NoProlog, &nodes[1..]));
        assert!(warnings[0].text.contains("the last 2 jobs on c2 (job 3 "), "{}", warnings[0].text);
        assert_eq!(compute.jobs_without_prolog(), 2);
    }
}
