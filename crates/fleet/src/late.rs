//! Laying a RAM disk over the output of a job that runs: the parts of it that all nodes do at once.

use std::time::Instant;

use ondeck_api::CallError;
use ondeck_api::wire::{NOT_MOUNTED, RefusalCode, Step, StepDone};
use ondeck_core::{Layout, NodeName, RamDiskId};
use ondeck_ramdisk::Secret;

use crate::{Answers, DESTROY, Fleet, NodeFault, faults_of, has_nothing, on_all};

/// On which nodes of a job its RAM disk is mounted over its directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OvermountExtent {
    /// Nothing on any of them.
    Nowhere,
    /// All of it on all of them.
    Everywhere,
    /// Something on some of them.
    Partly,
}

impl Fleet {
    /// Mounts the client on nodes, for good, so that they can be covered at once.
    pub async fn mount_clients(
        &self,
        layout: &Layout,
        secret: &Secret,
        nodes: &[NodeName],
        deadline: Instant,
    ) -> Vec<NodeFault> {
        let asked = nodes.iter().map(|node| {
            let guest = layout.server_on(node).is_none();
            // Servers are complete already.
            let steps = if guest { vec![Step::Mount, Step::Commit, Step::Commit] } else { vec![Step::Mount] };
            (node.clone(), layout.clone(), steps)
        });
        faults_of(self.ask(asked.collect(), Some(secret), deadline).await)
    }

    /// Has all nodes take one step, and waits for no answer longer than until the deadline.
    pub async fn each(
        &self,
        layout: &Layout,
        nodes: &[NodeName],
        step: &Step,
        deadline: Instant,
    ) -> Answers<StepDone> {
        on_all(nodes.iter().map(|node| (node.clone(), node.clone())), |node| {
            let (fleet, layout, step) = (self.clone(), layout.clone(), step.clone());
            async move {
                let began = Instant::now();
                let taken = tokio::time::timeout_at(
                    deadline.into(),
                    fleet.step(&node, step, &layout, None, deadline),
                );
                taken.await.unwrap_or_else(|_| {
                    Err(CallError::Silent { endpoint: fleet.endpoint(&node), waited: began.elapsed() })
                })
            }
        })
        .await
    }

    /// The same, if only the faults matter.
    pub async fn each_must(
        &self,
        layout: &Layout,
        nodes: &[NodeName],
        step: &Step,
        deadline: Instant,
    ) -> Vec<NodeFault> {
        faults_of(self.each(layout, nodes, step, deadline).await)
    }

    /// On which of these nodes a RAM disk is mounted over the directories of its job.
    ///
    /// # Errors
    /// Nodes that do not say.
    pub async fn overmounted(
        &self,
        id: &RamDiskId,
        nodes: &[NodeName],
        deadline: Instant,
    ) -> Result<OvermountExtent, Vec<NodeFault>> {
        let (reports, faults) = self.reports_of(id, nodes, deadline).await;
        if !faults.is_empty() {
            return Err(faults);
        }
        let of = |node: &NodeName| reports.get(node).filter(|report| !report.overmounts.is_empty());
        let whole = |node: &NodeName| {
            of(node).is_some_and(|report| !report.faults.iter().any(|fault| fault.starts_with(NOT_MOUNTED)))
        };
        let nowhere = |node: &NodeName| {
            of(node).is_none_or(|report| {
                // What is noted, and was taken away before the job went on.
                let gone = report.faults.iter().filter(|fault| fault.starts_with(NOT_MOUNTED)).count();
                gone == report.overmounts.len()
            })
        };
        Ok(if nodes.iter().all(nowhere) {
            OvermountExtent::Nowhere
        } else if nodes.iter().all(whole) {
            OvermountExtent::Everywhere
        } else {
            OvermountExtent::Partly
        })
    }

    /// Removes the overmounts, while nothing of the job runs or nothing of it is left; nodes that have nothing of it
    /// are fine.
    pub async fn take_away(&self, layout: &Layout, nodes: &[NodeName], deadline: Instant) -> Vec<NodeFault> {
        let deadline = deadline.min(Instant::now() + DESTROY);
        let mut faults =
            self.each_must(layout, nodes, &Step::RemoveOvermounts { force: true }, deadline).await;
        faults.retain(|fault| !has_nothing(&fault.error));
        faults
    }
}

/// Whether it is known that a node did not do what it was asked: it has said so.
pub fn has_refused(error: &CallError) -> bool {
    error.code().is_some()
}

/// Whether a node has refused because the job holds something, which does not change in a moment.
pub fn is_held(error: &CallError) -> bool {
    matches!(error.code(), Some(RefusalCode::Busy | RefusalCode::Forbidden | RefusalCode::Conflict))
}
