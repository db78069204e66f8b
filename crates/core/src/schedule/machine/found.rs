//! RAM disks that the journal does not know.

use super::handling::Handling;
use crate::schedule::event::{FoundRamDisk, ObservedJob};
use crate::schedule::notice::{AtWork, Notice, Results};
use crate::schedule::{Allocation, Identity, Job, JobState, Prolog, Purpose, RsaState};
use crate::{JobSelector, QueuedJob, Standing};

impl Handling<'_> {
    /// A RAM disk that is not known of. Whoever runs goes on with it, if all says that it is theirs; all else that may hold
    /// results waits for somebody to decide.
    pub(super) fn found(&mut self, found: FoundRamDisk) {
        let (id, now) = (found.job, self.now);
        self.schedule.last_epoch = self.schedule.last_epoch.max(found.ramdisk.epoch);
        let identity = Identity { uid: found.owner.uid, noted: [id.submitted].into(), restarts: id.restarts };
        self.schedule.identities.note(id, &identity);
        let known = self.schedule.jobs.get(&id);
        if known.is_some_and(|job| job.allocation.is_some() || id.ramdisk() != found.ramdisk.name) {
            // It has another one, which is seen to first. The agents keep this one.
            return;
        }
        let agrees = |job: &Job| {
            job.job_state == JobState::Running
                && job.owner.uid == found.owner.uid
                && (&job.request.data_in, &job.request.data_out)
                    == (&found.request.data_in, &found.request.data_out)
        };
        let in_use = found.fault.is_none() && known.is_some_and(agrees);
        if !in_use && !found.guarded {
            // It holds nothing that is not on disk. Whoever looks at the nodes removes it once nobody can use it.
            return;
        }
        if known.is_none() {
            let job = QueuedJob {
                id,
                owner: found.owner,
                account: found.account.clone(),
                standing: Standing::Ended,
                reason: String::new(),
                node_count: 0,
                nodes: Vec::new(),
                start: None,
                submitted: id.submitted,
                priority: 0,
                qos: String::new(),
                held_for_input: false,
                dependent: false,
                depends_on: Vec::new(),
                component_of: None,
                several: false,
                has_burst_buffer: false,
                waits_for_results: false,
                burst_buffer_lost: false,
            };
            let seen =
                ObservedJob { job, request: None, work_dir: found.work_dir.clone(), io_nodes: Vec::new() };
            let job = self.new_job(&seen, found.request.clone());
            self.schedule.jobs.insert(id, job);
        }
        for name in &found.nodes {
            if let Some(node) = self.schedule.nodes.get_mut(name) {
                node.promised.insert(id, found.promise);
                self.effects.nodes.push(name.clone());
            }
        }
        let job = self.job(id);
        let (nodes, promise, epoch) = (found.nodes, found.promise, found.ramdisk.epoch);
        job.allocation = Some(Allocation { nodes, promise, epoch, since: now });
        (job.purpose, job.results, job.prolog) = (found.purpose, found.guarded, Prolog::Over);
        job.not_before = None;
        if in_use {
            let state = match found.purpose {
                Purpose::Input => RsaState::InuseIn,
                Purpose::Both => RsaState::InuseBoth,
                Purpose::Output => RsaState::InuseOut,
            };
            self.become_state(id, state, Notice::State);
            self.tell(id, AtWork::FoundInUse);
            return;
        }
        // The life that it was built for may run, or not be over for the workload manager: nothing is done for it.
        (job.job_state, job.unsure, job.still_runs) = (JobState::Finished, true, found.runs);
        job.hold = job.hold.over();
        self.undo_lock_in(id);
        self.become_state(id, RsaState::Held, Notice::State);
        let outputs = self.job(id).request.data_out.clone();
        // Other jobs of its number may not be known yet.
        let job = JobSelector::from(id);
        self.tell(id, Results::Found { outputs, fault: found.fault, job });
    }
}
