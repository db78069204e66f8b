//! Whom the agents obey, and what they must keep until it is released.

use std::time::{Duration, Instant};

use ondeck_api::CallError;
use ondeck_api::wire::{Claim, Obeyed, Presence, Release, VERSION};
use ondeck_core::{NodeName, RamDiskId};
use serde::Serialize;

use crate::{Fleet, LOOK, NodeFault, faults_of, has_nothing, on_all};

impl Fleet {
    /// Asks the agent of a node to obey a scheduler.
    ///
    /// # Errors
    /// [`CallError`]; [`RefusalCode::ForeignJournal`] if it obeys the scheduler of another journal, and
    /// [`RefusalCode::OlderJournal`] if it has seen a later state of this one.
    pub async fn claim(&self, node: &NodeName, claim: &Claim) -> Result<Obeyed, CallError> {
        let path = format!("/{VERSION}/authority");
        self.client.call(&self.endpoint(node), "POST", &path, Some(claim), None, LOOK).await
    }

    /// From now on a RAM disk may hold results: its RSA nodes do not destroy it before they are released. May be ordered
    /// again. A node that does not have the RAM disk is a fault.
    pub async fn guard(&self, id: &RamDiskId, nodes: &[NodeName], until: Instant) -> Vec<NodeFault> {
        let left = until.saturating_duration_since(Instant::now());
        self.order_all(nodes, format!("/{VERSION}/ramdisks/{id}/guard"), &(), left).await
    }

    /// The results that a RAM disk may hold are on disk, or given up: its RSA nodes destroy it when they are told to. May
    /// be ordered again. A node that has nothing of it is fine.
    pub async fn release(&self, id: &RamDiskId, nodes: &[NodeName], release: &Release) -> Vec<NodeFault> {
        let path = format!("/{VERSION}/ramdisks/{id}/release");
        let mut faults = self.order_all(nodes, path, release, LOOK).await;
        faults.retain(|fault| !has_nothing(&fault.error));
        faults
    }

    /// Posts the same to all nodes at once.
    async fn order_all<B: Serialize + Clone + Send + Sync + 'static>(
        &self,
        nodes: &[NodeName],
        path: String,
        body: &B,
        limit: Duration,
    ) -> Vec<NodeFault> {
        let said = on_all(nodes.iter().map(|node| (node.clone(), node.clone())), |node| {
            let (fleet, path, body) = (self.clone(), path.clone(), body.clone());
            async move {
                let endpoint = fleet.endpoint(&node);
                fleet.client.call::<()>(&endpoint, "POST", &path, Some(&body), None, limit).await
            }
        });
        faults_of(said.await)
    }

    /// What a node has of a RAM disk.
    ///
    /// # Errors
    /// [`CallError`]
    pub async fn has(&self, id: &RamDiskId, node: &NodeName) -> Result<Presence, CallError> {
        let path = format!("/{VERSION}/ramdisks/{id}/has");
        self.client.call(&self.endpoint(node), "GET", &path, None::<&()>, None, LOOK).await
    }
}
