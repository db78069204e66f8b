//! What the workload manager is ordered to do with a job: to hold it, to let it go, to keep it in front of the queue.

use std::time::Duration;

use super::handling::Handling;
use crate::schedule::effects::{Action, Change};
use crate::schedule::notice::{HeldBack, NoRamDisk};
use crate::schedule::policy::{LockIn, Site};
use crate::schedule::{BurstBuffer, Hold, Job, JobState, QueuePlace, RsaState, Time, Told};
use crate::{Incarnation, QueuedJob, Standing, WaitPolicy};

/// Whether a job is held for its input, and not by its user or an administrator.
pub(super) fn is_held_by_us(job: &QueuedJob) -> bool {
    job.held_for_input && job.standing == Standing::Held
}

/// When a job that is held, or kept waiting for its input, and has no RSA nodes is not held any longer.
pub(super) fn hold_until(site: &Site, job: &Job) -> Option<Time> {
    let is_kept_waiting = job.is_kept_waiting() && !job.put_off;
    let waits =
        (job.hold.is_held() || is_kept_waiting) && !job.hopeless && job.rsa_state == RsaState::Initial;
    let from = job.again_since.map_or(job.since, |first| first.min(job.since));
    waits.then(|| from.plus(site.limits.hold))
}

/// Whether a job that may start without its RAM disk is held nevertheless: until the results of others, which it depends
/// on, are on disk.
pub(super) fn is_held_for_results_alone(job: &Job) -> bool {
    job.hold.is_held() && job.job_state == JobState::Ondeck && job.may_start_on_disk()
}

impl Handling<'_> {
    pub(super) fn order(&mut self, action: Action, id: Incarnation) {
        self.schedule.ordered.insert(id, self.now);
        self.effects.actions.push(action);
    }

    /// Has a job held that is not known here; returns when that was ordered.
    pub(super) fn hold_back(&mut self, id: Incarnation, why: HeldBack) -> Time {
        /// It may have been refused.
        const PAUSE: Duration = Duration::from_secs(60);
        let ordered = self.schedule.held_back.get(&id).copied();
        if let Some(at) = ordered.filter(|at| self.now.since(*at) < PAUSE) {
            return at;
        }
        self.effects.actions.push(Action::HoldBack(id, why.clone()));
        if ordered.is_none() {
            self.effects.changes.push(Change { job: Some(id), states: None, notice: why.into() });
        }
        self.now
    }

    /// A job that must not start without its input, and that the workload manager may start at any moment, is held again once
    /// that input is lost.
    pub(super) fn hold_without_input(&mut self, id: Incarnation) {
        let job = &self.schedule.jobs[&id];
        let is_lost = job.job_state == JobState::Ondeck && job.rsa_state == RsaState::Ready && job.broken;
        let may_be_started =
            job.hold == Hold::LetGo || job.is_promised() && !job.hold.is_released_by_others();
        // Once it is torn down, it is asked for again before it can start.
        let is_torn_down = job.burst_buffer == BurstBuffer::TornDown;
        if !is_lost
            || !may_be_started
            || is_torn_down
            || job.may_start_on_disk()
            || job.component_of.is_some()
        {
            return;
        }
        self.hold_instead(id, HeldBack::InputLost);
        self.undo_lock_in(id);
    }

    /// What READY brings about besides waiting.
    pub(super) fn on_ready(&mut self, id: Incarnation) {
        let lock_in = self.schedule.site.lock_in != LockIn::Off;
        let job = self.job(id);
        if job.job_state != JobState::Ondeck {
            return;
        }
        if job.hold.is_held() {
            job.hold = Hold::LetGo;
            self.order(Action::LetGo(id), id);
        } else if lock_in && job.place != QueuePlace::LockedIn {
            job.place = QueuePlace::LockedIn;
            self.effects.actions.push(Action::LockIn(id));
        }
    }

    /// A job that has ended may begin anew under the same number, and must not be in front for ever.
    pub(super) fn undo_lock_in(&mut self, id: Incarnation) {
        let job = self.job(id);
        if job.place == QueuePlace::LockedIn {
            job.place = QueuePlace::Unlocking;
            self.effects.actions.push(Action::UndoLockIn(id));
        }
    }

    /// Tells the user of a component of a heterogeneous job why it has no RAM disk. Ranks on all components run as one
    /// program: in RAM disks of their own they would not see each other's files, and a file that they share would come
    /// home as one component's part of it.
    pub(super) fn tell_component(&mut self, id: Incarnation) {
        let job = &self.schedule.jobs[&id];
        let Some(whole) = job.component_of else { return };
        let has_script = job.request.stage_in.is_some();
        self.tell(id, NoRamDisk::Component { whole, has_script });
    }

    /// A job that was held for its input and will not get it: it may start on disk, unless it needs what its own script
    /// would have made.
    pub(super) fn let_go_if_hopeless(&mut self, id: Incarnation) {
        let job = self.job(id);
        let is_held = job.hold.is_held();
        if !is_held && !job.is_kept_waiting() {
            return;
        }
        // Nobody else would release a component, and without a release it would be held for ever.
        let may_start = job.request.wait_policy() != WaitPolicy::Hold || job.component_of.is_some();
        if job.request.stage_in.is_none() || may_start {
            // Whoever keeps it waiting without a hold is answered.
            if is_held {
                job.hold = Hold::LetGo;
                self.order(Action::LetGo(id), id);
            }
        } else {
            let (why, too_small) = match &job.told {
                Told::WorksOnDisk(why) => (why.clone(), false),
                Told::TooSmall(why) => (why.clone(), true),
                _ => (job.message.clone(), false),
            };
            self.tell(id, NoRamDisk::StaysHeld { why, too_small });
        }
    }
}
