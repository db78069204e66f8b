//! Results that are lost, in part or as a whole: what their user is told, and saving or giving up what is left.

use super::handling::Handling;
use crate::schedule::effects::Refused;
use crate::schedule::notice::{LastInventory, LostPart, LostParts, NotNow, Results};
use crate::schedule::{Job, JobState, Notice, RsaState};
use crate::{EngineKind, Incarnation, NodeName};

impl Handling<'_> {
    /// Tells a job's user that results may be lost; `why` in words, one after the other.
    pub(super) fn tell_of_loss(&mut self, id: Incarnation, why: Vec<String>) {
        let (outputs, parts) = (self.job(id).request.data_out.clone(), self.lost_parts(id));
        let job = self.schedule.selector(id);
        self.tell(id, Results::MayBeLost { why, parts, outputs, job });
    }

    /// What was on the nodes that were lost.
    pub(super) fn lost_parts(&self, id: Incarnation) -> LostParts {
        let job = &self.schedule.jobs[&id];
        if !job.results {
            return LostParts::None;
        }
        if !self.is_whole_files(job) {
            return LostParts::OfAllFiles;
        }
        let last = |node| {
            let found = job.inventories.get(node)?;
            let (ago, first) = (self.now.since(found.seen), job.real_paths(&found.first));
            Some(LastInventory { ago, files: found.files, bytes: found.bytes, first })
        };
        let parts = job.lost_on.iter().map(|node| LostPart { node: node.clone(), inventory: last(node) });
        let some_are_safe = !job.lost_on.is_empty() && job.stage_outs > 0;
        LostParts::Files { parts: parts.collect(), some_are_safe }
    }

    /// Whether every file of a job's RAM disk is whole on one of its nodes.
    fn is_whole_files(&self, job: &Job) -> bool {
        job.request.engine.unwrap_or(self.schedule.site.engine) != EngineKind::Ceph
    }

    /// Somebody gives up what is lost, to save what is left.
    pub(super) fn salvage(&mut self, id: Incarnation) -> Result<(), Refused> {
        let job = self.known(id)?.clone();
        if job.rsa_state != RsaState::Lost {
            return Err(Refused::NotNow(NotNow::NothingLost(id, job.rsa_state)));
        }
        if !job.broken {
            return Err(Refused::NotNow(NotNow::AllThere(id)));
        }
        if !self.is_whole_files(&job) {
            return Err(Refused::NotNow(NotNow::PartsOfAll(id)));
        }
        let job = self.job(id);
        (job.salvage, job.retry_now, job.stage_outs, job.not_before) = (true, true, 0, None);
        self.note(Some(id), Results::ToBeSalvaged);
        Ok(())
    }

    /// What was left of the results is on disk.
    pub(super) fn salvaged(&mut self, id: Incarnation, saved: String, from: &[NodeName]) {
        let job = self.job(id);
        (job.salvage, job.retry_now) = (false, false);
        if !job.broken {
            // What was given up is there again.
            return self.become_state(id, RsaState::Lost, Results::WholeAgain);
        }
        if !from.is_empty() {
            let nodes = job.allocation.iter().flat_map(|found| &found.nodes);
            job.lost_on = nodes.filter(|node| !from.contains(node)).cloned().collect();
        }
        let parts = self.lost_parts(id);
        let job = self.job(id);
        // If servers had ended, and what they had was still there, nothing is lost.
        let loses = from.is_empty() || !job.lost_on.is_empty();
        job.abandoned = loses;
        (job.results, job.partially_mounted, job.stage_outs) = (false, false, 0);
        self.become_state(id, RsaState::DoneStagingOut, Notice::Words(saved.clone()));
        self.tell(id, Results::Salvaged { saved, lost: loses.then_some(parts) });
    }

    pub(super) fn abandon(&mut self, id: Incarnation, by: &str) -> Result<(), Refused> {
        self.must_not_run(id)?;
        let job = self.known(id)?;
        match job.rsa_state {
            RsaState::Held | RsaState::Lost => {}
            RsaState::StagingOut => {
                // Destroying the RAM disk ends the copy.
                (job.rsa_state, job.under_way) = (RsaState::Held, None);
            }
            state => {
                let runs = job.job_state == JobState::Running;
                return Err(Refused::NotNow(NotNow::NothingToAbandon { job: id, state, runs }));
            }
        }
        (job.results, job.abandoned, job.salvage) = (false, true, false);
        self.tell(id, Results::Abandoned { by: by.to_owned() });
        Ok(())
    }
}
