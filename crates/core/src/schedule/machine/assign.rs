//! RSA nodes are given to a job, and given back.

use std::collections::BTreeMap;

use super::handling::Handling;
use crate::schedule::effects::UsageRecord;
use crate::schedule::notice::{Lack, NoRamDisk, Placed, Waiting};
use crate::schedule::policy::{self, Line, Placement, RsaUsage};
use crate::schedule::transition::{Transition, next_transition};
use crate::schedule::{Allocation, Job, Purpose, RsaState};
use crate::{Epoch, Incarnation, NodeName};

/// Whether a job stands in line for RSA nodes.
pub(in crate::schedule) fn wants_nodes(job: &Job) -> bool {
    matches!(next_transition(job), Transition::Assign(_)) && !job.backing_off()
}

/// Whether a job keeps its RSA nodes until somebody decides; also if it is not known.
pub(super) fn stays(jobs: &BTreeMap<Incarnation, Job>, id: Incarnation) -> bool {
    jobs.get(&id).is_none_or(|job| matches!(job.rsa_state, RsaState::Held | RsaState::Lost))
}

impl Handling<'_> {
    pub(super) fn assign(
        &mut self,
        id: Incarnation,
        purpose: Purpose,
        usage: &RsaUsage,
        line: &mut Line,
    ) -> bool {
        if self.schedule.jobs[&id].backing_off() || self.must_wait_for_results(id, usage) {
            return false;
        }
        let job = &self.schedule.jobs[&id];
        if job.older {
            let nodes = self.schedule.nodes.iter();
            let silent: Vec<NodeName> =
                nodes.filter(|(_, node)| !node.heard).map(|(name, _)| name.clone()).collect();
            if !silent.is_empty() {
                return self.waits(id, Waiting::Silent(silent));
            }
        }
        match policy::place(&self.schedule.site, usage, line, self.now, job) {
            Placement::Later(why) => self.waits(id, why),
            Placement::Full(why) => self.lacks(id, why, usage, line),
            Placement::Never(why) => {
                let job = self.job(id);
                (job.hopeless, job.lacking) = (true, None);
                self.tell(id, NoRamDisk::Unfit(why));
                true
            }
            Placement::Nodes(nodes, promise) => {
                let whose = (policy::pool_of(&self.schedule.site, job).to_owned(), job.owner.uid);
                let (epoch, now) = (self.next_epoch(), self.now);
                for name in &nodes {
                    if let Some(node) = self.schedule.nodes.get_mut(name) {
                        node.promised.insert(id, promise);
                    }
                    self.effects.nodes.push(name.clone());
                }
                let assigned = Placed::Assigned { nodes: nodes.len(), job: id };
                line.leaves(id);
                self.schedule.served.insert(whose, now);
                let job = self.job(id);
                (job.purpose, job.lacking) = (purpose, None);
                job.allocation = Some(Allocation { nodes, promise, epoch, since: now });
                self.become_state(id, RsaState::Assigned, assigned);
                true
            }
        }
    }

    /// Nodes are not free for it. Whoever has waited for long is not overtaken, if there will ever be enough for it.
    fn lacks(&mut self, id: Incarnation, why: Lack, usage: &RsaUsage, line: &mut Line) -> bool {
        if self.schedule.jobs[&id].lacking.is_none() {
            self.job(id).lacking = Some(self.now);
        }
        let (schedule, job) = (&*self.schedule, &self.schedule.jobs[&id]);
        let pool = policy::pool_of(&schedule.site, job);
        if policy::first_since(&schedule.site, self.now, job).is_some()
            && !line.is_headed(pool)
            && policy::suffices_in_time(
                &schedule.site,
                usage,
                &schedule.nodes,
                |of| stays(&schedule.jobs, of),
                job,
            )
        {
            line.wait_behind(pool, id);
        }
        let held = job.hold.is_held().then_some(id.job);
        self.waits(id, Waiting::Lacks { why, held })
    }

    pub(super) fn release(&mut self, id: Incarnation) {
        let now = self.now;
        let job = self.job(id);
        job.failed_here = false;
        let Some(Allocation { nodes, since, promise, .. }) = job.allocation.take() else { return };
        let (uid, account) = (job.owner.uid, job.account.clone());
        // Of a node that others may have a part of, it had its part.
        let part = |name: &NodeName| match self.schedule.nodes.get(name) {
            Some(node) if self.schedule.site.fractions && node.capacity > promise => {
                promise.0 as f64 / node.capacity.0 as f64
            }
            _ => 1.0,
        };
        let node_seconds = now.since(since).as_secs_f64() * nodes.iter().map(part).sum::<f64>();
        self.effects.used.push(UsageRecord { uid, account, node_seconds });
        for name in &nodes {
            if let Some(node) = self.schedule.nodes.get_mut(name) {
                node.promised.remove(&id);
            }
            self.effects.nodes.push(name.clone());
        }
        self.become_state(id, RsaState::Initial, Placed::Released(nodes));
    }

    pub(super) fn next_epoch(&mut self) -> Epoch {
        let last = &mut self.schedule.last_epoch;
        *last = Epoch((self.now.0 * 1000).max(last.0 + 1));
        *last
    }
}
