//! Jobs that wait for the results of others: until these are on disk, a job that depends on them is held, and nothing is
//! copied from where they belong.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::handling::Handling;
use crate::schedule::effects::Action;
use crate::schedule::event::ObservedJob;
use crate::schedule::notice::{HeldBack, Life, Notice, Results, Waiting};
use crate::schedule::policy::{RsaUsage, runs_script};
use crate::schedule::{Hold, Job, JobState, Purpose, RsaState, Time, Work, WorkOrder};
use crate::{Incarnation, JobId, QueuedJob, Request, WaitPolicy};

/// Whether one of two directories is in the other, or both are the same.
fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

/// A path of a job's where another one's results belong.
fn meets<'a>(request: &'a Request, outputs: &[PathBuf]) -> Option<&'a Path> {
    let paths = request.data_in.iter().chain(&request.data_out);
    paths.map(PathBuf::as_path).find(|path| outputs.iter().any(|output| overlap(path, output)))
}

/// Whether something is to be done about a job which must not start without its input, because what was copied of it is about to
/// change: another job writes results there, or did when that was noticed.
pub(super) fn changes_on_disk(job: &Job, usage: &RsaUsage) -> bool {
    if job.outdated {
        return job.hold == Hold::Stands;
    }
    job.job_state == JobState::Ondeck
        && matches!(job.rsa_state, RsaState::StagingIn | RsaState::Ready)
        && job.request.wait_policy() == WaitPolicy::Hold
        && !job.hold.is_released_by_others()
        && usage.results_in_the_way_of(job.id, &job.request.data_in).is_some()
}

impl Handling<'_> {
    /// The output directories of the jobs that others depend on.
    pub(super) fn awaited_outputs(&self, jobs: &[ObservedJob]) -> BTreeMap<JobId, Vec<PathBuf>> {
        let awaited: BTreeSet<JobId> =
            jobs.iter().flat_map(|seen| seen.job.depends_on.iter().copied()).collect();
        let mut outputs: BTreeMap<JobId, Vec<PathBuf>> = BTreeMap::new();
        for seen in jobs.iter().filter(|seen| awaited.contains(&seen.job.id.job)) {
            let known = || self.schedule.jobs.get(&seen.job.id).map(|job| &job.request);
            if let Some(request) = seen.request.as_ref().or_else(known) {
                outputs.entry(seen.job.id.job).or_default().extend(request.data_out.iter().cloned());
            }
        }
        outputs
    }

    /// A job that depends on others could start as soon as they have ended, with their results in RAM still. So it is held
    /// before, by a mark that the workload manager keeps, and is one of those that are held for their input from then on.
    /// Returns when that was ordered, if it is to be held.
    pub(super) fn holds_back(
        &mut self,
        job: &QueuedJob,
        request: &Request,
        outputs: &BTreeMap<JobId, Vec<PathBuf>>,
    ) -> Option<Time> {
        let (other, path) = job.depends_on.iter().find_map(|other| {
            let path = meets(request, outputs.get(other)?)?;
            Some((*other, path.to_owned()))
        })?;
        Some(self.hold_back(job.id, HeldBack::Results { other, path }))
    }

    /// Whether a job that has ended has results, for paths of this one, that will be on disk without anybody's decision.
    pub(super) fn results_are_on_their_way(&self, job: &Job) -> bool {
        let others = self.schedule.jobs.values().filter(|other| other.id != job.id);
        others
            .filter(|other| other.results && other.job_state == JobState::Finished)
            .filter(|other| !matches!(other.rsa_state, RsaState::Held | RsaState::Lost))
            .any(|other| meets(&job.request, &other.request.data_out).is_some())
    }

    pub(super) fn must_wait_to_stage(
        &mut self,
        id: Incarnation,
        (work, purpose): (Work, Purpose),
        usage: &RsaUsage,
    ) -> bool {
        let job = &self.schedule.jobs[&id];
        if let Some(most) = self.schedule.site.staging
            && !usage.has_place(most, job.owner.uid, runs_script(job, work, purpose))
        {
            self.waits(id, Waiting::Staging { jobs: most });
            return true;
        }
        self.must_wait_for_results(id, usage)
    }

    /// A stage-in whose source overlaps results that are not on disk yet waits for them.
    pub(super) fn must_wait_for_results(&mut self, id: Incarnation, usage: &RsaUsage) -> bool {
        let job = &self.schedule.jobs[&id];
        if job.job_state != JobState::Ondeck {
            return false;
        }
        let paths = job.request.data_in.iter().chain(&job.request.data_out);
        let Some((other, path)) = usage.results_in_the_way_of(id, paths) else { return false };
        self.waits(id, Waiting::Results { other, path: path.to_owned() });
        true
    }

    /// Two jobs do not bring results home into the same directory at the same time: each looks what is there before it
    /// puts its own version in place, or beside another's.
    pub(super) fn must_wait_for_stage_out(&mut self, id: Incarnation) -> bool {
        let mine = &self.schedule.jobs[&id].request.data_out;
        let meets = |other: &Job| {
            let mut theirs = other.request.data_out.iter();
            theirs.any(|theirs| mine.iter().any(|mine| mine.starts_with(theirs) || theirs.starts_with(mine)))
        };
        let stages_out = |other: &&Job| {
            other.id != id
                && matches!(other.under_way, Some(WorkOrder { work: Work::StageOut, .. }))
                && meets(other)
        };
        let Some(other) = self.schedule.jobs.values().find(stages_out).map(|other| other.id) else {
            return false;
        };
        self.waits(id, Waiting::SameDirectory(other));
        true
    }

    /// A job that must not start without its input does not start with one that is about to change. One that is READY may be
    /// started at any moment, whatever is ordered: what it was promised stays until the queue shows that it is held.
    pub(super) fn stage_again(&mut self, id: Incarnation, usage: &RsaUsage) -> bool {
        let now = self.now;
        let job = &self.schedule.jobs[&id];
        if job.outdated {
            self.become_state(id, RsaState::Aborted, Notice::State);
            return true;
        }
        let Some((other, path)) = usage.results_in_the_way_of(id, &job.request.data_in) else { return false };
        let why = Life::StagedAgain { other, path: path.to_owned() };
        let stops = job.rsa_state == RsaState::StagingIn;
        if !job.hold.is_held() {
            self.job(id).hold = Hold::Ordered;
            self.order(Action::Hold(id), id);
        }
        self.undo_lock_in(id);
        let job = self.job(id);
        job.again_since.get_or_insert(now);
        job.outdated = !stops;
        self.tell(id, why);
        if stops {
            return self.work(id, Work::StopStageIn, RsaState::StoppingStagingIn);
        }
        true
    }

    /// A job that is held for the results of others alone may start when they are on disk, or were abandoned, or are lost.
    /// Returns whether it may.
    pub(super) fn let_go_if_home(&mut self, id: Incarnation) -> bool {
        let job = &self.schedule.jobs[&id];
        let others = self.schedule.jobs.values().filter(|other| other.id != id && other.results);
        let mut lost = None;
        for other in others {
            let Some(path) = meets(&job.request, &other.request.data_out) else { continue };
            // One that is whole again waits for its turn to stage out.
            if other.rsa_state != RsaState::Lost || !other.broken {
                return false;
            }
            lost = Some((self.schedule.selector(other.id), path.to_owned()));
        }
        let job = self.job(id);
        job.hold = Hold::LetGo;
        if let Some((other, path)) = lost {
            self.tell(id, Results::LostToOther { other, path });
        }
        self.order(Action::LetGo(id), id);
        true
    }
}
