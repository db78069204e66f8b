//! The life of a job: it comes to be known, starts, runs, and ends.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::handling::Handling;
use super::hold::is_held_by_us;
use crate::schedule::effects::{Action, Unasked};
use crate::schedule::event::ObservedJob;
use crate::schedule::notice::{Life, Turn, Unshown};
use crate::schedule::{
    BurstBuffer, Hold, Identity, Job, JobState, Prolog, Purpose, QueuePlace, RsaState, Time, Told,
};
use crate::{Incarnation, NodeName, QueuedJob, Request, Standing, WaitPolicy};

/// A job that has ended so soon after its start may have been cancelled before its Prolog could ask.
const PROLOG_GRACE: Duration = Duration::from_secs(5);

impl Handling<'_> {
    /// A job of which nothing was done yet.
    pub(super) fn new_job(&self, seen: &ObservedJob, request: Request) -> Job {
        let (id, now) = (seen.job.id, self.now);
        Job {
            id,
            owner: seen.job.owner,
            account: seen.job.account.clone(),
            request,
            work_dir: seen.work_dir.clone(),
            component_of: seen.job.component_of,
            compute_nodes: seen.job.node_count,
            nodes: Vec::new(),
            ended_on: BTreeSet::new(),
            ending: None,
            forgotten: false,
            qos: self.own_qos(&seen.job),
            priority: seen.job.priority,
            submitted: seen.job.submitted,
            noted: [seen.job.submitted].into(),
            job_state: JobState::Ondeck,
            rsa_state: RsaState::Initial,
            since: now,
            purpose: Purpose::Input,
            allocation: None,
            io_nodes: Vec::new(),
            results: false,
            abandoned: false,
            partially_mounted: false,
            ran_full: false,
            under_way: None,
            failures: 0,
            failed_here: false,
            hopeless: false,
            avoid: Vec::new(),
            broken: false,
            broken_why: String::new(),
            lost_on: BTreeSet::new(),
            inventories: BTreeMap::new(),
            salvage: false,
            mount_failed: false,
            unmounts: 0,
            late: 0,
            stage_outs: 0,
            not_before: None,
            retry_now: false,
            prolog: Prolog::Expected(None),
            started: None,
            switch_at: None,
            delay_over: false,
            doubted: None,
            place: QueuePlace::Own,
            hold: if is_held_by_us(&seen.job) { Hold::Stands } else { Hold::No },
            burst_buffer: BurstBuffer::Unasked,
            is_asked_for: false,
            put_off: false,
            older: false,
            unsure: false,
            still_runs: false,
            again_since: None,
            outdated: false,
            lacking: None,
            message: String::new(),
            told: Told::Nothing,
            waits_for: String::new(),
        }
    }

    /// A job that was not known.
    pub(super) fn admit(&mut self, seen: &ObservedJob, request: Request, state: JobState) {
        let id = seen.job.id;
        let mut job = self.new_job(seen, request);
        let is_older = |start: u64| Time(start.saturating_mul(1000)) < self.schedule.began;
        job.older = state == JobState::Running && seen.job.start.is_some_and(is_older);
        // One with a burst buffer is kept waiting by the workload manager itself.
        let hold = job.request.wait_policy() == WaitPolicy::Hold
            && job.component_of.is_none()
            && !seen.job.has_burst_buffer;
        // It was held before it was known here, and somebody does not want to wait for its input.
        if seen.job.held_for_input && seen.job.standing.waits() {
            job.hold = Hold::ReleasedBefore;
        }
        let hold_now = hold
            && !job.hold.is_released_by_others()
            && seen.job.standing.waits()
            && state == JobState::Ondeck;
        self.schedule.identities.note(id, &Identity::of(&job));
        self.schedule.jobs.insert(id, job);
        self.note(Some(id), Life::OnDeck);
        if hold_now {
            // Nobody held it at submission; it must not start before what it needs is there.
            self.job(id).hold = Hold::Ordered;
            self.order(Action::Hold(id), id);
        }
        // Before it runs: it did not start too early for anything.
        self.tell_component(id);
        if state == JobState::Running {
            self.started(seen, Prolog::Expected(None));
        }
    }

    /// The quality of service that a job was submitted with, also if a former life of it is still locked in.
    fn own_qos(&self, job: &QueuedJob) -> String {
        let first = *job.id.lives().start();
        let former = self.schedule.jobs.range(first..job.id).next_back();
        former.map_or(&job.qos, |(_, known)| &known.qos).clone()
    }

    pub(super) fn starting(&mut self, seen: &ObservedJob) {
        let id = seen.job.id;
        if !self.schedule.jobs.contains_key(&id) {
            let Some(request) = &seen.request else { return };
            self.admit(seen, request.clone(), JobState::Ondeck);
        }
        let job = &self.schedule.jobs[&id];
        match (job.job_state, job.prolog) {
            (JobState::Ondeck, _) => self.started(seen, Prolog::Waiting),
            _ if self.is_later_run(&seen.job) => self.forgotten(id, Turn::StartedAnew),
            (JobState::Running, Prolog::Expected(_)) => {
                let job = self.job(id);
                job.prolog = Prolog::Waiting;
                if job.io_nodes.is_empty() {
                    job.io_nodes.clone_from(&seen.io_nodes);
                }
            }
            // The Prolog of another of its nodes, or one that came too late.
            _ => {}
        }
    }

    /// A job starts.
    pub(super) fn started(&mut self, seen: &ObservedJob, prolog: Prolog) {
        let (id, now) = (seen.job.id, self.now);
        let (patience, delay) = (self.schedule.site.prolog, self.schedule.site.delay);
        let job = self.job(id);
        job.put_off = false;
        job.io_nodes.clone_from(&seen.io_nodes);
        job.nodes.clone_from(&seen.job.nodes);
        job.prolog = if prolog.is_expected() { Prolog::Expected(Some(now.plus(patience))) } else { prolog };
        job.started = Some(now);
        job.switch_at = Some(now.plus(job.request.delay.unwrap_or(delay)));
        let held = job.hold.is_held();
        job.hold = job.hold.over();
        let is_outdated = std::mem::take(&mut job.outdated);
        // What was ordered of one that waited is no reason to wait with what one is to be told that has ended.
        self.schedule.ordered.remove(&id);
        let job = self.job(id);
        job.not_before = job.not_before.filter(|_| job.rsa_state != RsaState::Initial);
        let too_early = !job.request.data_in.is_empty() && job.rsa_state != RsaState::Ready;
        self.set_job_state(id, JobState::Running, Turn::Runs);
        if held {
            // It was faster than its hold, whose mark would be taken for one.
            self.effects.actions.push(Action::Unmark(id));
        }
        if is_outdated {
            self.tell(id, Life::NotHeldInTime);
        }
        let job = &self.schedule.jobs[&id];
        // What a job did that started before the journal began, nobody knows: its RAM disk may be found.
        if too_early && !job.older && matches!(job.told, Told::Nothing | Told::Ready) {
            let waited_for = job.waits_for.clone();
            self.tell(id, Life::TooEarly { waited_for });
        }
    }

    /// A job runs, or has run, and none of its Prologs has asked. It goes on without what was made ready for it.
    pub(super) fn no_prolog_asked(&mut self, id: Incarnation) {
        let job = &self.schedule.jobs[&id];
        if job.burst_buffer.has_started() {
            // It was shown on all nodes before, or could not be, and its user was told.
            return;
        }
        let (Some(started), nodes) = (job.started, job.nodes.clone()) else { return };
        let is_ready = job.rsa_state == RsaState::Ready;
        self.effects.unasked.push(Unasked { job: id, nodes, started });
        if is_ready && job.purpose == Purpose::Output {
            self.tell(id, Life::NoProlog(Unshown::Output));
        } else if is_ready {
            self.tell(id, Life::NoProlog(Unshown::Input));
        } else {
            self.note(Some(id), Life::NoProlog(Unshown::Nothing));
        }
    }

    /// Whether what the queue shows of a job that runs is of a later run of the same life: the workload manager has
    /// forgotten the earlier one. The job was seen to wait in between, or runs on other nodes, and started later.
    pub(super) fn is_later_run(&self, seen: &QueuedJob) -> bool {
        let Some(job) = self.schedule.jobs.get(&seen.id) else { return false };
        let has_started = match seen.standing {
            Standing::Running | Standing::Configuring => true,
            // It may have been cancelled before it started.
            Standing::Ending | Standing::Ended => job.forgotten,
            Standing::Next
            | Standing::Waiting
            | Standing::Unjudged
            | Standing::StagingIn
            | Standing::Held => false,
        };
        let is_elsewhere =
            !job.nodes.is_empty() && seen.nodes.iter().any(|of_seen| !job.nodes.contains(of_seen));
        let was_pending = job.forgotten || job.doubted.is_some();
        let is_later =
            |started: Time| seen.start.is_none_or(|start| Time(start.saturating_mul(1000)) > started);
        job.job_state == JobState::Running
            && has_started
            && (was_pending || is_elsewhere)
            && job.started.is_some_and(is_later)
    }

    /// The workload manager does not know any longer that a job has started. What of it still runs is ended by its nodes,
    /// whose Epilogs say so; until then it keeps its RAM disk.
    pub(super) fn forgotten(&mut self, id: Incarnation, why: Turn) {
        let job = &self.schedule.jobs[&id];
        let may_run = job.job_state == JobState::Running && job.rsa_state.is_shown() && !job.nodes.is_empty();
        if !may_run {
            return self.set_job_state(id, JobState::Finished, why);
        }
        if !job.forgotten {
            let until = self.now.plus(self.schedule.site.limits.ending);
            let job = self.job(id);
            job.forgotten = true;
            job.ending.get_or_insert(until);
            self.note(Some(id), Life::Forgotten(why));
        }
    }

    /// An Epilog runs. A job has ended when all of its nodes' Epilogs have: on others its processes may still run.
    pub(super) fn ending(&mut self, id: Incarnation, node: NodeName) {
        let running = |job: &&Job| job.job_state == JobState::Running;
        let Some(job) = self.schedule.jobs.get(&id).filter(running) else { return };
        if job.nodes.iter().all(|of_job| *of_job == node || job.ended_on.contains(of_job)) {
            return self.set_job_state(id, JobState::Finished, Turn::EndedOnItsNodes);
        }
        if job.nodes.contains(&node) && !job.ended_on.contains(&node) {
            self.note(Some(id), Life::EndedOn(node.clone()));
            self.job(id).ended_on.insert(node);
        }
    }

    pub(super) fn set_job_state(&mut self, id: Incarnation, state: JobState, why: Turn) {
        let known = self.schedule.jobs.get(&id).map(|job| job.job_state);
        if known.is_none_or(|known| known == state || known == JobState::Finished) {
            return;
        }
        let job = &self.schedule.jobs[&id];
        let has_run = job.started.is_some_and(|started| self.now.since(started) >= PROLOG_GRACE);
        if state == JobState::Finished && job.prolog.is_expected() && has_run && !job.forgotten {
            self.no_prolog_asked(id);
        }
        if state == JobState::Finished && known == Some(JobState::Ondeck) {
            self.note_place(id);
        }
        let job = self.job(id);
        job.job_state = state;
        job.doubted = None;
        if matches!(state, JobState::Demoted | JobState::Finished) {
            (job.prolog, job.switch_at, job.ending) = (Prolog::Over, None, None);
            job.hold = job.hold.over();
            self.undo_lock_in(id);
        }
        self.note(Some(id), Life::Becomes(id, why));
    }
}
