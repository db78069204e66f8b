//! What the agents show of RSA nodes: servers that are lost, nodes that fail or work.

use super::handling::Handling;
use crate::schedule::RsaState;
use crate::schedule::notice::{Loss, NodeFailure, NodeNotice, Results};
use crate::{Incarnation, NodeName, RamDiskId};

impl Handling<'_> {
    pub(super) fn node_lost(&mut self, node: &NodeName) {
        let Some(known) = self.schedule.nodes.get_mut(node) else { return };
        if !known.up {
            return;
        }
        known.up = false;
        self.effects.nodes.push(node.clone());
        self.note(None, NodeNotice::Lost(node.clone()));
        let on_it: Vec<Incarnation> = self
            .schedule
            .jobs
            .values()
            .filter(|job| job.allocation.as_ref().is_some_and(|found| found.nodes.contains(node)))
            .map(|job| job.id)
            .collect();
        for id in on_it {
            self.mark_broken(id, node, Loss::Node(node.clone()));
        }
    }

    pub(super) fn broken(&mut self, ramdisk: &RamDiskId, node: &NodeName, why: &str) {
        let ids: Vec<Incarnation> = self.with_ramdisk(ramdisk).collect();
        for id in ids {
            self.mark_broken(id, node, Loss::Server(why.to_owned()));
        }
    }

    fn mark_broken(&mut self, id: Incarnation, node: &NodeName, loss: Loss) {
        use RsaState as S;
        let job = self.job(id);
        let matters = !matches!(
            job.rsa_state,
            S::Initial | S::Ineligible | S::Assigned | S::Teardown | S::Destroyed | S::DoneStagingOut
        );
        if !matters {
            return;
        }
        let is_news = job.lost_on.insert(node.clone());
        if job.broken {
            if is_news {
                self.note(Some(id), Results::ServerLost(loss));
            }
            return;
        }
        job.broken = true;
        job.broken_why = loss.to_string();
        let parts = self.lost_parts(id);
        let job = self.job(id);
        match job.rsa_state {
            state if state.is_shown() && job.results => {
                let outputs = job.request.data_out.clone();
                self.tell(id, Results::LostWhileWritten { loss, outputs, parts });
            }
            state if state.is_shown() => self.tell(id, Results::LostWhileRead(loss)),
            _ => self.note(Some(id), Results::ServerLost(loss)),
        }
    }

    pub(super) fn works(&mut self, node: &NodeName) {
        if let Some(known) = self.schedule.nodes.get_mut(node)
            && known.failures > 0
        {
            known.failures = 0;
            self.effects.nodes.push(node.clone());
        }
    }

    pub(super) fn fails(&mut self, node: &NodeName) {
        let most = self.schedule.site.node_failures;
        let Some(known) = self.schedule.nodes.get_mut(node) else { return };
        known.failures += 1;
        self.effects.nodes.push(node.clone());
        if known.failures >= most && known.drained.is_empty() {
            let why = NodeFailure { times: most }.to_string();
            known.drained.clone_from(&why);
            self.note(None, NodeNotice::Drained { node: node.clone(), why });
        }
    }
}
