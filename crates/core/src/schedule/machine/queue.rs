//! What the workload manager shows: a look at the queue, and what it means for each job.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::assign::wants_nodes;
use super::handling::Handling;
use super::hold::is_held_by_us;
use crate::schedule::effects::{Action, Change};
use crate::schedule::event::ObservedJob;
use crate::schedule::notice::{HeldBack, Life, Turn};
use crate::schedule::policy::{self, Site};
use crate::schedule::{BurstBuffer, Hold, Identity, Job, JobState, Prolog, QueuePlace, RsaState, Time};
use crate::{Incarnation, QueuedJob, Standing, WaitPolicy};

/// A job that was next counts as next for so long without a judgement. Slurm's scheduler looks at the whole queue once
/// a minute (`sched_interval`), and mostly at once.
const UNJUDGED: Duration = Duration::from_secs(120);

/// A job of which nothing is left here, and for whose results the workload manager waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::schedule) struct Forsaken {
    /// When that came to be known, or when it was told last.
    since: Time,
    /// How often it was told, up to [`Forsaken::MOST_TOLD`].
    told: u32,
}

impl Forsaken {
    /// From the second time on it is told after twice the time each time, up to about 10 min.
    const MOST_TOLD: u32 = 6;
}

/// Whether a job is next to start.
pub(super) fn is_next(site: &Site, now: Time, job: &QueuedJob) -> bool {
    match job.standing {
        Standing::Next | Standing::Configuring => true,
        Standing::StagingIn => {
            site.horizon.is_zero()
                || job.start.is_none_or(|start| Time(start * 1000) <= now.plus(site.horizon))
        }
        Standing::Waiting | Standing::Unjudged => job
            .start
            .is_some_and(|start| !site.horizon.is_zero() && Time(start * 1000) <= now.plus(site.horizon)),
        Standing::Held => is_held_by_us(job) && !job.dependent && !begins_later(site, now, job),
        Standing::Running | Standing::Ending | Standing::Ended => false,
    }
}

/// Whether a known job is next as it was, and nothing follows from that: in a long queue nearly all of them are.
fn is_as_it_was(site: &Site, now: Time, job: &Job, seen: &QueuedJob) -> bool {
    job.job_state == JobState::Ondeck
        && job.doubted.is_none()
        && !seen.burst_buffer_lost
        && is_held_as_it_was(job, seen)
        && !job.unsure
        && !job.put_off
        && job.burst_buffer != BurstBuffer::TornDown
        // It may have to yield its nodes.
        && !matches!(job.rsa_state, RsaState::Booted | RsaState::Ready)
        && job.priority == seen.priority
        && job.compute_nodes == seen.node_count
        && job.component_of == seen.component_of
        && job.noted.contains(&seen.submitted)
        && is_next(site, now, seen)
}

/// Whether a known job is not held, or is held as it was ordered.
fn is_held_as_it_was(job: &Job, seen: &QueuedJob) -> bool {
    match job.hold {
        Hold::No => true,
        Hold::Stands => is_held_by_us(seen),
        _ => false,
    }
}

/// Whether a job was told to begin at a later time.
fn begins_later(site: &Site, now: Time, job: &QueuedJob) -> bool {
    job.start.is_some_and(|start| Time(start * 1000) > now.plus(site.horizon))
}

impl Handling<'_> {
    pub(super) fn queue(&mut self, taken: Time, jobs: Vec<ObservedJob>) {
        let mut missing: BTreeSet<Incarnation> = self.schedule.jobs.keys().copied().collect();
        let mut candidates = BTreeMap::new();
        let mut bystanders = BTreeMap::new();
        let (mut held_back, mut forsaken) = (BTreeMap::new(), BTreeMap::new());
        let outputs = self.awaited_outputs(&jobs);
        for mut seen in jobs {
            let id = self.schedule.identify(&seen.job);
            seen.job.id = id;
            if seen.job.several {
                // Its elements get numbers of their own one by one, once they are held.
                if let Some(request) = &seen.request
                    && let Some(ordered) = self.holds_back(&seen.job, request, &outputs)
                {
                    held_back.insert(id, ordered);
                }
                continue;
            }
            missing.remove(&id);
            if let Some(job) = self.schedule.jobs.get(&id) {
                if !is_as_it_was(&self.schedule.site, self.now, job, &seen.job) {
                    self.reconcile(taken, &seen);
                } else {
                    #[cfg(test)]
                    self.stays_as_it_is(taken, &seen);
                }
            } else if seen.job.waits_for_results {
                forsaken.insert(id, self.forsaken(&seen.job));
            } else if let Some(request) = seen.request.take() {
                match seen.job.standing {
                    // It never starts.
                    _ if seen.job.burst_buffer_lost => {}
                    // With the mark, but not held, it was released by hand.
                    standing
                        if standing.waits()
                            && seen.job.component_of.is_none()
                            && !seen.job.held_for_input
                            && !seen.job.depends_on.is_empty() =>
                    {
                        if let Some(ordered) = self.holds_back(&seen.job, &request, &outputs) {
                            held_back.insert(id, ordered);
                        }
                    }
                    Standing::Ending | Standing::Ended => {}
                    Standing::Running => self.admit(&seen, request, JobState::Running),
                    // The workload manager asks for it, before it is next. If it could ask nobody, it is staged as others are.
                    Standing::Waiting | Standing::Unjudged | Standing::StagingIn | Standing::Configuring
                        if seen.job.has_burst_buffer => {}
                    standing
                        if standing.waits()
                            && seen.job.component_of.is_none()
                            && !seen.job.held_for_input
                            && id.restarts > 0
                            && request.wait_policy() == WaitPolicy::Hold
                            && !is_next(&self.schedule.site, self.now, &seen.job) =>
                    {
                        // What was started anew, and released if somebody else held it, is held as it was when it was
                        // submitted: it would start at once when its time has come.
                        held_back.insert(id, self.hold_back(id, HeldBack::Input));
                    }
                    _ if is_next(&self.schedule.site, self.now, &seen.job) => {
                        let since = *self.schedule.candidates.get(&id).unwrap_or(&self.now);
                        // Right after it was submitted, a job may be called next and be behind others a moment later.
                        if self.now.since(since) >= self.schedule.site.debounce {
                            self.admit(&seen, request, JobState::Ondeck);
                        } else {
                            candidates.insert(id, since);
                        }
                    }
                    _ => {}
                }
            } else {
                self.note_bystander(&seen.job, &mut candidates, &mut bystanders);
            }
        }
        (self.schedule.candidates, self.schedule.bystanders) = (candidates, bystanders);
        (self.schedule.held_back, self.schedule.forsaken) = (held_back, forsaken);
        let known = &self.schedule.jobs;
        self.schedule.ordered.retain(|id, _| known.contains_key(id));
        for id in missing {
            if self.schedule.jobs[&id].still_runs {
                self.job(id).still_runs = false;
            }
            let job = &self.schedule.jobs[&id];
            // One that came after the queue was asked is no part of the answer.
            if job.since >= taken || job.started.is_some_and(|started| started >= taken) {
                continue;
            }
            if job.burst_buffer == BurstBuffer::Kept {
                self.job(id).burst_buffer = BurstBuffer::TornDown;
            }
            // Slurm shows a job that has ended for minutes: slurmctld was started clean.
            self.forgotten(id, Turn::LeftQueue);
        }
    }

    /// A job that has ended, of which nothing is left here, and that the workload manager keeps until its results are on disk: what it
    /// has asked, or was answered, was lost. Where its daemon has lost the burst buffer, it hears nothing, and keeps the job until it
    /// forgets all that have ended.
    fn forsaken(&mut self, job: &QueuedJob) -> Forsaken {
        /// It may be about to ask, or to hear the answer.
        const PAUSE: Duration = Duration::from_secs(20);
        let known = self.schedule.forsaken.get(&job.id).copied();
        let known = known.unwrap_or(Forsaken { since: self.now, told: 0 });
        // After a lost journal, its results may be on nodes that have not answered.
        let began = self.schedule.began;
        let is_older = job.start.is_none_or(|start| Time(start.saturating_mul(1000)) < began);
        let may_be_found = is_older && self.schedule.nodes.values().any(|node| !node.heard);
        if may_be_found || self.now.since(known.since) < PAUSE * 2_u32.pow(known.told.saturating_sub(1)) {
            return known;
        }
        if known.told == 0 {
            self.note(None, Life::Forsaken(job.id));
        }
        self.effects.actions.push(Action::EndStageOut(job.id));
        Forsaken { since: self.now, told: (known.told + 1).min(Forsaken::MOST_TOLD) }
    }

    /// A job that has asked for nothing. `candidates` and `bystanders` are those of the next look.
    fn note_bystander(
        &mut self,
        job: &QueuedJob,
        candidates: &mut BTreeMap<Incarnation, Time>,
        bystanders: &mut BTreeMap<Incarnation, Option<Time>>,
    ) {
        let (id, now, debounce) = (job.id, self.now, self.schedule.site.debounce);
        let mut log = |state: JobState, notice: Life| {
            let states = Some((state, RsaState::Ineligible));
            self.effects.changes.push(Change { job: Some(id), states, notice: notice.into() });
        };
        let known = self.schedule.bystanders.get(&id).copied();
        match (job.standing, known) {
            (Standing::Running | Standing::Ending | Standing::Ended | Standing::Configuring, _) => {}
            (_, known) if is_next(&self.schedule.site, now, job) => {
                let since = *self.schedule.candidates.get(&id).unwrap_or(&now);
                if known.is_none() && now.since(since) < debounce {
                    candidates.insert(id, since);
                    return;
                }
                if known.is_none() {
                    log(JobState::Ondeck, Life::NoVariables(id));
                }
                bystanders.insert(id, None);
            }
            (_, None) => {}
            (_, Some(doubted)) => {
                let since = doubted.unwrap_or(now);
                if now.since(since) < debounce {
                    bystanders.insert(id, Some(since));
                    return;
                }
                log(JobState::Demoted, Life::Becomes(id, Turn::Demoted));
                log(JobState::Demoted, Life::Gone(id));
            }
        }
    }

    /// That a job which is passed over would not be changed.
    #[cfg(test)]
    fn stays_as_it_is(&mut self, taken: Time, seen: &ObservedJob) {
        let said = |handling: &Self| (handling.effects.actions.len(), handling.effects.changes.len());
        let before = (self.schedule.jobs[&seen.job.id].clone(), said(self), self.effects.jobs.len());
        self.reconcile(taken, seen);
        assert_eq!((self.schedule.jobs[&seen.job.id].clone(), said(self), self.effects.jobs.len()), before);
    }

    /// A known job, as the queue shows it. Most of them are as they were, and are not touched.
    fn reconcile(&mut self, taken: Time, seen: &ObservedJob) {
        let (id, now, debounce) = (seen.job.id, self.now, self.schedule.site.debounce);
        let next = is_next(&self.schedule.site, now, &seen.job);
        let Some(job) = self.schedule.jobs.get(&id) else { return };
        if job.priority != seen.job.priority {
            self.job(id).priority = seen.job.priority;
        }
        if self.schedule.jobs[&id].component_of != seen.job.component_of {
            // A former version kept it without, and may have it held until somebody mends its stage-in script.
            self.job(id).component_of = seen.job.component_of;
            if self.schedule.jobs[&id].rsa_state == RsaState::Ineligible
                && self.schedule.jobs[&id].hold.is_held()
            {
                self.tell_component(id);
                self.let_go_if_hopeless(id);
            }
        }
        if !self.schedule.jobs[&id].noted.contains(&seen.job.submitted) {
            self.job(id).noted.insert(seen.job.submitted);
            let identity = Identity::of(&self.schedule.jobs[&id]);
            self.schedule.identities.note(id, &identity);
        }
        let runs = matches!(seen.job.standing, Standing::Running | Standing::Ending | Standing::Configuring);
        if self.schedule.jobs[&id].unsure && self.schedule.jobs[&id].still_runs != runs {
            self.job(id).still_runs = runs;
        }
        if seen.job.burst_buffer_lost {
            self.burst_buffer_is_lost(id);
        }
        let Some(job) = self.schedule.jobs.get(&id) else { return };
        let stale = job.started.is_some_and(|started| started >= taken);
        match (job.job_state, seen.job.standing) {
            (JobState::Finished, _) if job.burst_buffer == BurstBuffer::Kept => {
                let is_stale = self.schedule.ordered.get(&id).is_some_and(|last| *last >= taken);
                if job.allocation.is_none() && !is_stale {
                    self.let_go_of_burst_buffer(id);
                }
            }
            (JobState::Demoted | JobState::Finished, _) => {}
            _ if self.is_later_run(&seen.job) => self.forgotten(id, Turn::StartedAnew),
            (_, Standing::Ended) => self.set_job_state(id, JobState::Finished, Turn::Ended),
            // Its processes may still write what they must before they are killed.
            (JobState::Running, Standing::Ending) if job.rsa_state.is_shown() => {
                self.is_ending(id);
                self.believe(id);
            }
            (_, Standing::Ending) => self.set_job_state(id, JobState::Finished, Turn::Ending),
            (JobState::Ondeck, Standing::Running) => self.started(seen, Prolog::Expected(None)),
            (JobState::Running, Standing::Running | Standing::Configuring) => {
                if job.io_nodes.is_empty() && !seen.io_nodes.is_empty() {
                    self.job(id).io_nodes.clone_from(&seen.io_nodes);
                }
                if self.schedule.jobs[&id].nodes.is_empty() && !seen.job.nodes.is_empty() {
                    self.job(id).nodes.clone_from(&seen.job.nodes);
                }
                if self.schedule.jobs[&id].forgotten {
                    let job = self.job(id);
                    (job.forgotten, job.ending) = (false, None);
                    self.note(Some(id), Life::KnownToRun);
                }
                self.believe(id);
            }
            (JobState::Ondeck, _) if self.yields(id) => {
                if job.burst_buffer.is_live() {
                    return self.put_off(id, true);
                }
                let limit = self.schedule.site.limits.ready;
                self.set_job_state(id, JobState::Demoted, Turn::NotStarted(limit));
            }
            (JobState::Ondeck, standing)
                if job.burst_buffer == BurstBuffer::TornDown && standing != Standing::Running =>
            {
                let patience = self.schedule.site.limits.again;
                if now.since(job.doubted.unwrap_or(job.since)) >= patience {
                    self.set_job_state(id, JobState::Demoted, Turn::TornDown);
                }
            }
            (JobState::Ondeck, _) if next || self.keeps_its_place(&seen.job) => {
                if job.compute_nodes != seen.job.node_count {
                    self.job(id).compute_nodes = seen.job.node_count;
                }
                if self.schedule.jobs[&id].burst_buffer.is_live() {
                    self.look_at_burst_buffer(&seen.job, debounce);
                } else {
                    self.believe(id);
                }
                self.order_again(taken, &seen.job);
            }
            (JobState::Ondeck, standing) if job.burst_buffer.is_live() => {
                let unjudged = standing == Standing::Unjudged;
                self.look_at_burst_buffer(
                    &seen.job,
                    if unjudged { debounce.max(UNJUDGED) } else { debounce },
                );
            }
            // It was called running by its Prolog after the queue was asked.
            (JobState::Running, _) if stale => {}
            (state, _) => {
                let since = job.doubted.unwrap_or(now);
                if job.doubted.is_none() {
                    self.job(id).doubted = Some(now);
                }
                // What is told to its user changes it, too.
                let unjudged = (state, seen.job.standing) == (JobState::Ondeck, Standing::Unjudged);
                let patience = if unjudged { debounce.max(UNJUDGED) } else { debounce };
                if now.since(since) >= patience {
                    match state {
                        JobState::Running => self.forgotten(id, Turn::BackInQueue),
                        _ => self.set_job_state(id, JobState::Demoted, Turn::Demoted),
                    }
                }
            }
        }
    }

    /// Whether a job that has had its RSA nodes for long, and could not begin to use them, gives them to whoever has waited
    /// for long.
    fn yields(&self, id: Incarnation) -> bool {
        let (site, now, jobs) = (&self.schedule.site, self.now, &self.schedule.jobs);
        let Some(job) = jobs.get(&id) else { return false };
        let pool = policy::pool_of(site, job);
        matches!(job.rsa_state, RsaState::Booted | RsaState::Ready)
            && !job.is_promised()
            && now.since(job.since) >= site.limits.ready
            && jobs.values().any(|other| {
                policy::pool_of(site, other) == pool
                    && wants_nodes(other)
                    && policy::first_since(site, now, other).is_some()
            })
    }

    /// Whether a job that is not next keeps what was prepared for it: because it is held for its input, or was let go or
    /// locked in, and has not started within a time.
    fn keeps_its_place(&self, job: &QueuedJob) -> bool {
        let (site, now) = (&self.schedule.site, self.now);
        let Some(known) = self.schedule.jobs.get(&job.id) else { return false };
        if job.dependent || begins_later(site, now, job) && job.standing == Standing::Held {
            return false;
        }
        match job.standing {
            // Nobody else held it.
            Standing::Held => known.hold.is_held() || is_held_by_us(job),
            // The hold is under way.
            Standing::Waiting | Standing::Unjudged if known.hold.is_held() => true,
            Standing::Waiting | Standing::Unjudged => {
                let waited = known.hold.was_let_go() && known.request.wait_policy() == WaitPolicy::Hold;
                (waited || known.place == QueuePlace::LockedIn)
                    && (known.rsa_state != RsaState::Ready || now.since(known.since) < site.limits.ready)
            }
            _ => false,
        }
    }

    /// An order to the workload manager that has not been carried out is given again: a daemon may have ended in between.
    fn order_again(&mut self, taken: Time, seen: &QueuedJob) {
        const PAUSE: Duration = Duration::from_secs(5);
        let (id, now) = (seen.id, self.now);
        let known = &self.schedule.jobs[&id];
        if self.schedule.ordered.get(&id).is_some_and(|last| *last >= taken) {
            // The queue was asked before.
            return;
        }
        let action = match seen.standing {
            Standing::Held if known.hold.was_let_go() && is_held_by_us(seen) => Action::LetGo(id),
            Standing::Held if known.hold == Hold::Ordered => {
                self.job(id).hold = Hold::Stands;
                return;
            }
            // Whoever releases it leaves the mark: the workload manager has come back with a state from before the hold.
            standing if standing.waits() && known.hold == Hold::Stands && !seen.held_for_input => {
                self.job(id).hold = Hold::Ordered;
                return self.order(Action::Hold(id), id);
            }
            standing if standing.waits() && known.hold == Hold::Stands => {
                // Somebody does not want to wait for its input.
                self.job(id).hold = Hold::ReleasedByHand;
                return self.note(Some(id), Life::Released);
            }
            standing if standing.waits() && known.hold.is_held() => Action::Hold(id),
            standing if standing.waits() && known.hold.was_let_go() && seen.held_for_input => {
                Action::Unmark(id)
            }
            _ => return,
        };
        if self.schedule.ordered.get(&id).is_none_or(|last| now.since(*last) >= PAUSE) {
            self.order(action, id);
        }
    }

    /// The queue says what the state here says.
    pub(super) fn believe(&mut self, id: Incarnation) {
        if self.schedule.jobs[&id].doubted.is_some() {
            self.job(id).doubted = None;
        }
    }
}
