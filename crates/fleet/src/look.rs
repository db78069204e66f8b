//! What the agents know of RAM disks, and destroying them.

use std::collections::BTreeMap;
use std::time::Instant;

use ondeck_api::wire::{Destroyed, LocalReport, Release, VERSION};
use ondeck_api::{CallError, Endpoint};
use ondeck_core::{NodeName, RamDiskId, RamDiskName};
use tokio::task::JoinSet;

use crate::{DESTROY, Fleet, LOOK, NodeFault, has_nothing};

/// The RAM disks of the nodes that were asked, by what their agents answered.
#[derive(Default)]
pub struct FleetSnapshot {
    /// What the agents say.
    pub reports: Vec<LocalReport>,
    /// Who did not answer; `None` is this machine.
    pub unreachable: Vec<(Option<NodeName>, CallError)>,
}

/// What destroying did.
#[derive(Default)]
pub struct Demolition {
    /// Whether anybody knew of it.
    pub found: bool,
    /// What each node did.
    pub nodes: BTreeMap<NodeName, Destroyed>,
    /// Who could not.
    pub faults: Vec<NodeFault>,
    /// All of it.
    pub seconds: f64,
}

impl Fleet {
    /// The RAM disks that a node has something of.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn ramdisks_of(&self, node: &NodeName) -> Result<Vec<LocalReport>, CallError> {
        let path = format!("/{VERSION}/ramdisks");
        self.client.call(&self.endpoint(node), "GET", &path, None::<&()>, None, LOOK).await
    }

    /// What the agents of these nodes know; no nodes means this machine.
    pub async fn look(&self, nodes: &[NodeName]) -> FleetSnapshot {
        let mut snapshot = FleetSnapshot::default();
        let mut asked: Vec<NodeName> = Vec::new();
        let mut wanted: Vec<Option<NodeName>> =
            if nodes.is_empty() { vec![None] } else { nodes.iter().cloned().map(Some).collect() };
        // What is found names further nodes.
        while !wanted.is_empty() {
            let mut set = JoinSet::new();
            for node in wanted.drain(..) {
                asked.extend(node.clone());
                let fleet = self.clone();
                set.spawn(async move {
                    let endpoint = node
                        .as_ref()
                        .map_or_else(|| Endpoint::Socket(fleet.socket.clone()), |node| fleet.endpoint(node));
                    let path = format!("/{VERSION}/ramdisks");
                    let call = fleet.client.call(&endpoint, "GET", &path, None::<&()>, None, LOOK);
                    (node, call.await)
                });
            }
            while let Some(joined) = set.join_next().await {
                let (node, found) = match joined {
                    Ok(looked) => looked,
                    // A node of which nothing is known must not pass for one that has nothing.
                    Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                    Err(_) => continue,
                };
                match found {
                    Ok(found) => {
                        let found: Vec<LocalReport> = found;
                        asked.extend(node.or_else(|| self.own_name.clone()));
                        snapshot.reports.extend(found);
                    }
                    Err(error) => snapshot.unreachable.push((node, error)),
                }
            }
            for report in &snapshot.reports {
                asked.push(report.node.clone());
                let servers = report.layout.servers.iter().map(|server| &server.node);
                for node in servers.chain(&report.layout.clients) {
                    if !asked.contains(node) && !wanted.contains(&Some(node.clone())) {
                        wanted.push(Some(node.clone()));
                    }
                }
            }
            wanted.retain(|node| node.as_ref().is_none_or(|node| !asked.contains(node)));
        }
        snapshot
    }

    /// Removes one incarnation of a RAM disk from these nodes; returns what could not be. A node that has nothing of it
    /// is fine, and so is one that has a later incarnation.
    pub async fn demolish(&self, id: &RamDiskId, nodes: &[NodeName]) -> Vec<NodeFault> {
        let (_, faults) = self.destroy_on(id, nodes).await;
        faults.into_iter().filter(|fault| !has_nothing(&fault.error)).collect()
    }

    /// Destroys every incarnation of a RAM disk that the agents of these nodes know of. Nothing to destroy is fine. One that
    /// may hold results is left as it is on all nodes, unless `release` says what became of them.
    pub async fn destroy(
        &self,
        name: &RamDiskName,
        nodes: &[NodeName],
        release: Option<&Release>,
    ) -> Demolition {
        let began = Instant::now();
        let snapshot = self.look(nodes).await;
        let mut on: BTreeMap<RamDiskId, Vec<NodeName>> = BTreeMap::new();
        for report in snapshot.reports.iter().filter(|report| report.layout.id.name == *name) {
            let on = on.entry(report.layout.id.clone()).or_default();
            let servers = report.layout.servers.iter().map(|server| &server.node);
            for node in servers.chain(&report.layout.clients).chain([&report.node]) {
                if !on.contains(node) {
                    on.push(node.clone());
                }
            }
        }
        let mut demolition = Demolition { found: !on.is_empty(), ..Demolition::default() };
        for (id, nodes) in on {
            let holds = |node: &NodeName| {
                let mut reports = snapshot.reports.iter();
                reports.any(|report| report.guarded && report.layout.id == id && report.node == *node)
            };
            let guarded: Vec<NodeName> = nodes.iter().filter(|node| holds(node)).cloned().collect();
            let nodes = match release {
                Some(release) => {
                    demolition.faults.extend(self.release(&id, &guarded, release).await);
                    nodes
                }
                // Whoever uses it on another node goes on: those who keep it say why.
                None if !guarded.is_empty() => guarded,
                None => nodes,
            };
            let (destroyed, faults) = self.destroy_on(&id, &nodes).await;
            demolition.nodes.extend(destroyed);
            demolition.faults.extend(faults);
        }
        for (node, error) in snapshot.unreachable {
            // Named once, with the reason why it could not be destroyed there if it was tried.
            let known = node.as_ref().is_some_and(|node| demolition.faults.iter().any(|f| f.node == *node));
            if let (Some(node), false) = (node.clone().or_else(|| self.own_name.clone()), known) {
                demolition.faults.push(NodeFault { node, error });
            }
        }
        demolition.seconds = began.elapsed().as_secs_f64();
        demolition
    }

    pub(crate) async fn destroy_on(
        &self,
        id: &RamDiskId,
        nodes: &[NodeName],
    ) -> (BTreeMap<NodeName, Destroyed>, Vec<NodeFault>) {
        let mut set = JoinSet::new();
        for node in nodes {
            let (fleet, node, path) = (self.clone(), node.clone(), format!("/{VERSION}/ramdisks/{id}"));
            set.spawn(async move {
                let endpoint = fleet.endpoint(&node);
                let done = fleet.client.call(&endpoint, "DELETE", &path, None::<&()>, None, DESTROY).await;
                (node, done)
            });
        }
        let (mut destroyed, mut faults) = (BTreeMap::new(), Vec::new());
        while let Some(joined) = set.join_next().await {
            match joined {
                Ok((node, Ok(done))) => {
                    destroyed.insert(node, done);
                }
                Ok((node, Err(error))) => faults.push(NodeFault { node, error }),
                // A node of which nothing is known must not pass for one where all is removed.
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(error) => tracing::error!(%error, "a task was cancelled"),
            }
        }
        (destroyed, faults)
    }
}
