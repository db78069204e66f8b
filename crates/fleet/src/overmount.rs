//! Showing a RAM disk over the directories of a job, on all of its nodes or on none.

use std::collections::BTreeMap;
use std::time::Instant;

use ondeck_api::CallError;
use ondeck_api::wire::{LocalReport, Overmount, Step, VERSION};
use ondeck_core::{Layout, NodeName, RamDiskId};
use ondeck_ramdisk::Secret;

use crate::{Answers, DESTROY, Fleet, LOOK, NodeFault, faults_of, has_nothing, on_all};

/// A RAM disk is shown nowhere.
#[derive(Debug)]
pub struct NotOvermounted {
    /// What each node did not do.
    pub faults: Vec<NodeFault>,
    /// Whether it was refused before it was shown anywhere, so that nobody can have written to it.
    pub untouched: bool,
}

/// Showing a RAM disk over the directories of a job, on all of its nodes or on none. These run to their end; whoever
/// drops one of them half-way must call [`Fleet::remove_overmounts`].
impl Fleet {
    /// Shows a RAM disk over directories of all `nodes`, which become its clients. The directories are opened and judged
    /// on all nodes first; only when all agree is anything mounted over them. The last round tells all that all have done
    /// so: `goes_on` is asked before it, as a job that begins without having been told keeps what was.
    ///
    /// # Errors
    /// What each node did not do. Then nothing is mounted over on any node, unless a fault says so, and nodes that are no
    /// servers have nothing of the RAM disk.
    pub async fn overmount(
        &self,
        layout: &Layout,
        secret: &Secret,
        overmounts: &[Overmount],
        nodes: &[NodeName],
        deadline: Instant,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), NotOvermounted> {
        let mut layout = layout.clone();
        for node in nodes {
            if !layout.clients.contains(node) {
                layout.clients.push(node.clone());
            }
        }
        let open = Step::OpenTargets { overmounts: overmounts.to_vec() };
        let rounds: [(&[NodeName], Vec<Step>); 3] = [
            (nodes, vec![Step::Mount, open]),
            (nodes, vec![Step::Overmount]),
            // Servers are complete already, but all must know that all have it.
            (nodes, vec![Step::Commit, Step::Commit]),
        ];
        let last = rounds.len() - 1;
        for (round, (on, steps)) in rounds.into_iter().enumerate() {
            let given_up = round == last && !goes_on();
            let mut faults = Vec::new();
            if !given_up {
                let asked = on.iter().map(|node| (node.clone(), layout.clone(), steps.clone())).collect();
                faults = faults_of(self.ask(asked, Some(secret), deadline).await);
            }
            if given_up || !faults.is_empty() {
                let back = vec![Step::RemoveOvermounts { force: true }, Step::Unmount];
                let asked = nodes.iter().map(|node| (node.clone(), layout.clone(), back.clone())).collect();
                let undone = faults_of(self.ask(asked, None, Instant::now() + DESTROY).await);
                let dead: Vec<NodeName> = faults
                    .iter()
                    .filter(|fault| matches!(fault.error, CallError::Unreachable { .. }))
                    .map(|fault| fault.node.clone())
                    .collect();
                // Once is enough.
                let more = undone.into_iter().filter(|fault| !dead.contains(&fault.node));
                faults.extend(more.filter(|fault| !has_nothing(&fault.error)));
                return Err(NotOvermounted { faults, untouched: round == 0 });
            }
        }
        Ok(())
    }

    /// Takes a RAM disk away from all directories that it is mounted over on these nodes. Without `force` it is taken
    /// away from all of them or from none: if files are open on one node, that one's fault is [`RefusalCode::Busy`], and
    /// if a node can't be asked, nothing is done either. A node that has nothing of it is fine.
    ///
    /// The client stays mounted; see [`Fleet::leave`].
    pub async fn remove_overmounts(
        &self,
        id: &RamDiskId,
        nodes: &[NodeName],
        force: bool,
        deadline: Instant,
    ) -> Vec<NodeFault> {
        let (reports, faults) = self.reports_of(id, nodes, deadline).await;
        if !faults.is_empty() && !force {
            return faults;
        }
        let of = |steps: &[Step]| -> Vec<(NodeName, Layout, Vec<Step>)> {
            let one = |(node, report): (&NodeName, &LocalReport)| {
                (node.clone(), report.layout.clone(), steps.to_vec())
            };
            reports.iter().map(one).collect()
        };
        if force {
            let said = self.ask(of(&[Step::RemoveOvermounts { force }]), None, deadline).await;
            let left = faults_of(said).into_iter().filter(|fault| !has_nothing(&fault.error));
            return faults.into_iter().chain(left).collect();
        }
        for steps in [[Step::Busy], [Step::RemoveOvermounts { force }]] {
            let said = self.ask(of(&steps), None, deadline).await;
            let removed: Vec<NodeName> = said
                .iter()
                .filter(|(_, said)| said.is_ok() && steps != [Step::Busy])
                .map(|(node, _)| node.clone())
                .collect();
            let mut faults = faults_of(said);
            faults.retain(|fault| !has_nothing(&fault.error));
            if faults.is_empty() {
                continue;
            }
            // Somebody opened a file in between: nodes of one job never see different trees.
            let again = reports
                .iter()
                .filter(|(node, report)| removed.contains(node) && !report.overmounts.is_empty())
                .map(|(node, report)| {
                    let open = Step::OpenTargets { overmounts: report.overmounts.clone() };
                    (node.clone(), report.layout.clone(), vec![open, Step::Overmount])
                })
                .collect();
            faults.extend(faults_of(self.ask(again, None, Instant::now() + DESTROY).await));
            return faults;
        }
        Vec::new()
    }

    /// Unmounts a RAM disk that is mounted over nothing any more from these nodes. Those that are no servers have nothing
    /// of it afterwards, and may get it again. A node that has nothing of it is fine.
    pub async fn leave(&self, id: &RamDiskId, nodes: &[NodeName], deadline: Instant) -> Vec<NodeFault> {
        let (reports, mut faults) = self.reports_of(id, nodes, deadline).await;
        let asked =
            reports.into_iter().map(|(node, report)| (node, report.layout, vec![Step::Unmount])).collect();
        let said = self.ask(asked, None, deadline).await;
        faults.extend(faults_of(said).into_iter().filter(|fault| !has_nothing(&fault.error)));
        faults
    }

    /// What nodes know of one RAM disk; those that have nothing of it are left out.
    pub(crate) async fn reports_of(
        &self,
        id: &RamDiskId,
        nodes: &[NodeName],
        deadline: Instant,
    ) -> (BTreeMap<NodeName, LocalReport>, Vec<NodeFault>) {
        let left = deadline.saturating_duration_since(Instant::now()).min(LOOK);
        let said =
            on_all(nodes.iter().map(|node| (node.clone(), node.clone())), |node| {
                let (fleet, path) = (self.clone(), format!("/{VERSION}/ramdisks/{id}"));
                async move {
                    fleet.client.call(&fleet.endpoint(&node), "GET", &path, None::<&()>, None, left).await
                }
            })
            .await;
        let (mut reports, mut faults) = (BTreeMap::new(), Vec::new());
        for (node, said) in said {
            match said {
                Ok(report) => drop(reports.insert(node, report)),
                Err(error) if has_nothing(&error) => {}
                Err(error) => faults.push(NodeFault { node, error }),
            }
        }
        (reports, faults)
    }

    /// Has every node take its steps, all nodes at once.
    pub(crate) async fn ask(
        &self,
        asked: Vec<(NodeName, Layout, Vec<Step>)>,
        secret: Option<&Secret>,
        until: Instant,
    ) -> Answers<()> {
        let asked = asked.into_iter().map(|(node, layout, steps)| (node.clone(), (node, layout, steps)));
        on_all(asked, |(node, layout, steps)| {
            // Servers know everything; clients what they need to mount.
            let secret = secret.map(|secret| {
                if layout.server_on(&node).is_some() { secret.clone() } else { secret.for_clients() }
            });
            let fleet = self.clone();
            async move {
                for step in steps {
                    fleet.step(&node, step, &layout, secret.as_ref(), until).await?;
                }
                Ok(())
            }
        })
        .await
    }
}
