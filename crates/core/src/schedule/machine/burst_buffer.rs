//! What the workload manager asks for a job with a burst buffer: it waits for the job's input before the start, and for its
//! results after the end. Calls may be lost, come twice or late; each says all that is known of the job.

use std::time::Duration;

use super::handling::Handling;
use super::queue::is_next;
use crate::schedule::effects::Action;
use crate::schedule::event::{BurstBufferCall, ObservedJob};
use crate::schedule::notice::{HeldBack, Life, Turn};
use crate::schedule::{BurstBuffer, Hold, Job, JobState, Prolog, RsaState, Time};
use crate::{Incarnation, QueuedJob, Standing};

/// Places for jobs that wait for their input which the workload manager has lost: Slurm up to 23.11 counts that of a job which is
/// cancelled then as taken until its daemon is started anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlacesLost {
    /// The start of its daemon since which they are counted, by its own clock. 0: it loses none, or does not say when it was started.
    pub since: u64,
    /// How many.
    pub places: u32,
}

impl Job {
    /// Whether the workload manager was told that its input is in RAM: it stays there until the job has started, or is seen to be held.
    pub fn is_promised(&self) -> bool {
        let may_start = !self.hold.is_held() || self.outdated && self.hold == Hold::Ordered;
        self.burst_buffer == BurstBuffer::Answered && !self.may_start_on_disk() && may_start
    }

    /// Whether the workload manager is told that its input can't be made, once that is clear: what its script would have made is
    /// nowhere, and it must not start without that.
    pub fn fails_without_its_input(&self) -> bool {
        self.request.stage_in.is_some() && !self.may_start_on_disk() && self.component_of.is_none()
    }

    /// Whether the workload manager was told so.
    pub fn is_told_to_fail(&self) -> bool {
        self.burst_buffer == BurstBuffer::Answered && self.hold == Hold::No && self.fails_without_its_input()
    }

    /// Whether the workload manager keeps it waiting until its input is there.
    pub(super) fn is_kept_waiting(&self) -> bool {
        self.burst_buffer == BurstBuffer::DataIn && !self.may_start_on_disk()
    }
}

impl Handling<'_> {
    pub(super) fn burst_buffer(&mut self, call: BurstBufferCall, seen: &ObservedJob) {
        use BurstBufferCall as Call;
        let id = seen.job.id;
        if !self.schedule.jobs.contains_key(&id) {
            // Nothing of one that has ended is left, or the journal was lost: what is left then is found.
            let (Call::Setup | Call::DataIn | Call::PreRun, Some(request)) = (call, &seen.request) else {
                return;
            };
            self.admit(seen, request.clone(), JobState::Ondeck);
            self.job(id).put_off = !self.is_wanted(&seen.job);
        }
        match call {
            Call::Setup => {
                self.is_set_up_again(id);
                self.reaches(id, BurstBuffer::SetUp)
            }
            Call::DataIn => {
                // Its setup may have been lost.
                self.is_set_up_again(id);
                let is_first = self.reaches(id, BurstBuffer::DataIn);
                if self.schedule.jobs[&id].burst_buffer == BurstBuffer::DataIn {
                    self.job(id).is_asked_for = true;
                }
                if is_first && !self.schedule.jobs[&id].may_start_on_disk() {
                    self.put_off(id, !self.is_near(&seen.job));
                    self.hold_who_are_too_many();
                }
                true
            }
            Call::PreRun => self.pre_run(seen),
            Call::PostRun => {
                self.reaches(id, BurstBuffer::PostRun);
                self.post_run(id)
            }
            Call::DataOut => {
                let kept = self.reaches(id, BurstBuffer::Kept);
                if self.schedule.jobs[&id].allocation.is_none() {
                    self.let_go_of_burst_buffer(id);
                }
                kept
            }
            Call::Teardown => self.torn_down(id),
        };
    }

    /// Has those be held, the furthest first, that are too many for the workload manager to keep waiting: it has places for so many,
    /// and others who need theirs for a moment would not get them.
    fn hold_who_are_too_many(&mut self) {
        let waits = |job: &&Job| {
            // Otherwise it is answered at once.
            let is_decided = matches!(job.rsa_state, RsaState::Ready | RsaState::Ineligible) || job.hopeless;
            job.job_state == JobState::Ondeck && job.is_kept_waiting() && job.hold == Hold::No && !is_decided
        };
        let mut waiting: Vec<_> = (self.schedule.jobs.values().filter(waits))
            .map(|job| (!job.put_off, job.priority, std::cmp::Reverse(job.submitted), job.id))
            .collect();
        let most = self.schedule.site.kept_waiting.saturating_sub(self.schedule.places_lost.places) as usize;
        waiting.sort_unstable();
        for (.., id) in &waiting[..waiting.len().saturating_sub(most)] {
            self.hold_instead(*id, HeldBack::Places);
        }
    }

    /// A job is held from now on, and not kept waiting in a call.
    pub(super) fn hold_instead(&mut self, id: Incarnation, why: HeldBack) {
        self.job(id).hold = Hold::Ordered;
        self.order(Action::Hold(id), id);
        self.tell(id, why);
    }

    /// The call in which a job waits for its input must end: it is held instead.
    pub(super) fn must_not_wait(&mut self, id: Incarnation) {
        // Also one that waits for the results of others, and one that was released before and is asked for anew.
        let waits = |job: &Job| {
            let is_asked = job.burst_buffer == BurstBuffer::DataIn;
            job.job_state == JobState::Ondeck && is_asked && !job.hold.is_held()
        };
        if self.schedule.jobs.get(&id).is_some_and(waits) {
            self.hold_instead(id, HeldBack::MustNotWait);
        }
    }

    /// A job has ended, or is gone, before it has started. If the workload manager asked for its input then, it has ended who asked,
    /// and has lost the place.
    pub(super) fn note_place(&mut self, id: Incarnation) {
        let loses = self.schedule.places_lost.since != 0;
        if std::mem::take(&mut self.job(id).is_asked_for) && loses {
            self.schedule.places_lost.places += 1;
        }
    }

    /// The workload manager asks anew for a job whose burst buffer it has torn down.
    fn is_set_up_again(&mut self, id: Incarnation) {
        let job = &self.schedule.jobs[&id];
        if job.burst_buffer == BurstBuffer::TornDown && job.job_state == JobState::Ondeck {
            self.job(id).burst_buffer = BurstBuffer::Unasked;
        }
    }

    /// A job's burst buffer comes so far; returns whether it had not yet.
    fn reaches(&mut self, id: Incarnation, stage: BurstBuffer) -> bool {
        let has = self.schedule.jobs[&id].burst_buffer;
        if has >= stage {
            return false;
        }
        self.job(id).burst_buffer = stage;
        self.note(Some(id), Life::BurstBuffer(stage));
        true
    }

    /// A job that has not started was cancelled, which the queue shows, or the workload manager was started anew and asks for
    /// it again: what is made for it is kept for a while.
    fn torn_down(&mut self, id: Incarnation) -> bool {
        let job = &self.schedule.jobs[&id];
        let may_come_again = job.job_state == JobState::Ondeck && job.burst_buffer < BurstBuffer::TornDown;
        let is_made = matches!(
            job.rsa_state,
            RsaState::Booting | RsaState::Booted | RsaState::StagingIn | RsaState::Ready
        );
        if job.job_state == JobState::Ondeck && job.hold.is_held() {
            // It is set up anew once it is released. If it was cancelled, the queue says so.
            self.note(Some(id), Life::BurstBuffer(BurstBuffer::TornDown));
            self.job(id).burst_buffer = BurstBuffer::Unasked;
            return true;
        }
        self.reaches(id, BurstBuffer::TornDown);
        if may_come_again && is_made {
            let now = self.now;
            self.job(id).doubted = Some(now);
        } else if self.schedule.jobs[&id].job_state == JobState::Ondeck {
            self.note_place(id);
            self.set_job_state(id, JobState::Demoted, Turn::TornDown);
        }
        true
    }

    /// The workload manager has lost a job's burst buffer and will ask nothing for it again. What is made for the job is kept for a
    /// while, as after a teardown: if it is set up again all the same, it has it.
    pub(super) fn burst_buffer_is_lost(&mut self, id: Incarnation) {
        let job = &self.schedule.jobs[&id];
        // Of one that is held nothing is asked; one that has been told of already stands. That it was ever asked for here does not
        // matter: it may have been made known while nobody answered.
        let is_told = job.burst_buffer == BurstBuffer::TornDown;
        if job.job_state != JobState::Ondeck || job.hold.is_held() || is_told {
            return;
        }
        self.tell(id, Life::BurstBufferLost);
        // Who asked has ended with the daemon, which has all of its places again.
        self.job(id).is_asked_for = false;
        self.torn_down(id);
    }

    fn pre_run(&mut self, seen: &ObservedJob) -> bool {
        let id = seen.job.id;
        match self.schedule.jobs[&id].job_state {
            JobState::Ondeck => self.started(seen, Prolog::Expected(None)),
            JobState::Running if self.is_later_run(&seen.job) => {
                self.forgotten(id, Turn::StartedAnew);
                return false;
            }
            JobState::Running => {
                let job = self.job(id);
                if job.io_nodes.is_empty() {
                    job.io_nodes.clone_from(&seen.io_nodes);
                }
            }
            // An earlier run of it is not over.
            JobState::Demoted | JobState::Finished => return false,
        }
        self.reaches(id, BurstBuffer::PreRun)
    }

    /// Its Epilogs unmount: its processes may still write what they must.
    fn post_run(&mut self, id: Incarnation) -> bool {
        let job = &self.schedule.jobs[&id];
        if job.job_state != JobState::Running {
            return false;
        }
        if job.rsa_state.is_shown() {
            self.is_ending(id);
        } else {
            self.set_job_state(id, JobState::Finished, Turn::Ending);
        }
        true
    }

    /// A job's processes are being ended; they are waited for.
    pub(super) fn is_ending(&mut self, id: Incarnation) {
        if self.schedule.jobs[&id].ending.is_none() {
            let until = self.now.plus(self.schedule.site.limits.ending);
            self.job(id).ending = Some(until);
            self.note(Some(id), Life::Ending);
        }
    }

    /// Whether RSA nodes are for a job with a burst buffer now, by what the queue shows of it.
    fn is_wanted(&self, seen: &QueuedJob) -> bool {
        is_next(&self.schedule.site, self.now, seen)
    }

    /// Whether the workload manager may start a job soon, as far as it says when.
    fn is_near(&self, seen: &QueuedJob) -> bool {
        let horizon = self.schedule.site.horizon;
        let at = |start: u64| Time(start.saturating_mul(1000));
        horizon.is_zero() || seen.start.is_none_or(|start| at(start) <= self.now.plus(horizon))
    }

    /// RSA nodes are not for a job now, or are again. It stays known.
    pub(super) fn put_off(&mut self, id: Incarnation, off: bool) {
        let now = self.now;
        let job = &self.schedule.jobs[&id];
        if job.put_off == off {
            return;
        }
        let job = self.job(id);
        (job.put_off, job.lacking, job.doubted) = (off, None, None);
        if job.rsa_state == RsaState::Initial {
            job.since = now;
            job.waits_for.clear();
        }
        self.note(Some(id), if off { Life::PutOff } else { Life::Wanted });
    }

    /// Answers whoever waits for a job with a burst buffer. Returns whether anybody did.
    pub(super) fn answer_burst_buffer(&mut self, id: Incarnation) -> bool {
        let Some(job) = self.schedule.jobs.get(&id) else { return false };
        // That it will not get its input is said once its hold stands: before, the workload manager might start it.
        let is_refused = job.rsa_state == RsaState::Ineligible && job.hold != Hold::Ordered;
        let is_ready = job.rsa_state == RsaState::Ready && !job.outdated;
        let is_decided = is_ready || is_refused;
        // Shown on some nodes only, it is taken away first.
        let is_in_between =
            matches!(job.rsa_state, RsaState::Mounting | RsaState::UnmountNeeded | RsaState::Unmounting);
        let answered = match job.burst_buffer {
            BurstBuffer::DataIn if is_decided || job.hold == Hold::Stands => BurstBuffer::Answered,
            // The disk has not all that it may read: what it depended on has just ended.
            BurstBuffer::DataIn if job.may_start_on_disk() && !self.results_are_on_their_way(job) => {
                BurstBuffer::Answered
            }
            BurstBuffer::PreRun if !is_in_between => BurstBuffer::Started,
            _ => return false,
        };
        self.job(id).is_asked_for = false;
        self.reaches(id, answered)
    }

    /// The workload manager keeps a job whose results are home, or given up, because it was told that they are not.
    pub(super) fn let_go_of_burst_buffer(&mut self, id: Incarnation) {
        /// It may not have heard it.
        const PAUSE: Duration = Duration::from_secs(5);
        /// After that it will not: its daemon was killed, and has begun anew without that burst buffer. Nothing is left here for
        /// which the job would have to stay known; if the queue shows it still, that is said there again, ever more seldom.
        const LONGEST: Duration = Duration::from_secs(30);
        let job = &self.schedule.jobs[&id];
        if job.burst_buffer != BurstBuffer::Kept {
            return;
        }
        let last = self.schedule.ordered.get(&id);
        if last.is_some() && self.now.since(job.since) >= LONGEST {
            self.reaches(id, BurstBuffer::TornDown);
        } else if last.is_none_or(|last| self.now.since(*last) >= PAUSE) {
            self.order(Action::EndStageOut(id), id);
        }
    }

    /// What a look at the queue says of a job with a burst buffer that has not started: whether RSA nodes are for it.
    pub(super) fn look_at_burst_buffer(&mut self, seen: &QueuedJob, patience: Duration) {
        let (id, now) = (seen.id, self.now);
        let job = &self.schedule.jobs[&id];
        if job.is_promised() || seen.standing == Standing::Configuring {
            return self.believe(id);
        }
        // The workload manager has taken it for its turn, whatever reason it shows.
        let is_wanted = if job.is_kept_waiting() { self.is_near(seen) } else { self.is_wanted(seen) };
        if is_wanted {
            self.put_off(id, false);
            return self.believe(id);
        }
        if job.put_off {
            return;
        }
        let since = job.doubted.unwrap_or(now);
        if job.doubted.is_none() {
            self.job(id).doubted = Some(now);
        }
        if now.since(since) >= patience {
            self.put_off(id, true);
        }
    }
}
