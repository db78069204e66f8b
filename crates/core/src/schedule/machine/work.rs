//! Work for a job: how it begins, how long it may take, and what follows from its end.

use std::time::Duration;

use super::handling::Handling;
use super::hold::is_held_for_results_alone;
use crate::schedule::effects::Action;
use crate::schedule::event::{Fault, Outcome};
use crate::schedule::job::has_a_directory_for_both;
use crate::schedule::notice::work::pretended;
use crate::schedule::notice::{AtWork, NotHome, Notice, Results, Then};
use crate::schedule::{JobState, Prolog, Purpose, RsaState, Told, Work, WorkOrder};
use crate::{Incarnation, NodeName};

/// How many times as long it may take to cover the output of a job that runs.
const LATE_MOUNTS: u32 = 3;

/// After which times covering the output of a job that runs is tried again.
const LATE_PAUSES: [Duration; 3] =
    [Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(300)];

impl Handling<'_> {
    pub(super) fn work(&mut self, id: Incarnation, work: Work, state: RsaState) -> bool {
        self.schedule.last_order += 1;
        let number = self.schedule.last_order;
        let mut limit = self.limit(work);
        let job = &self.schedule.jobs[&id];
        if work == Work::Mount && job.prolog == Prolog::Over {
            // What the job has written meanwhile is copied first.
            limit *= LATE_MOUNTS;
        }
        let order = WorkOrder { number, work, until: self.now.plus(limit) };
        let job = self.job(id);
        job.under_way = Some(order);
        let begins = AtWork::Begins { work, purpose: job.purpose };
        self.become_state(id, state, begins);
        self.effects.actions.push(Action::Begin(id, order));
        true
    }

    pub(super) fn limit(&self, work: Work) -> Duration {
        let limits = &self.schedule.site.limits;
        match work {
            Work::Construct => limits.construct,
            Work::StageIn => limits.stage_in,
            Work::StopStageIn => limits.stop,
            Work::Mount => limits.mount,
            Work::Unmount { .. } => limits.unmount,
            Work::StageOut => limits.stage_out,
            Work::Destroy => limits.destroy,
        }
    }

    pub(super) fn ended(&mut self, id: Incarnation, number: u64, outcome: Outcome) {
        let Some(job) = self.schedule.jobs.get_mut(&id) else { return };
        let Some(order) = job.under_way.filter(|order| order.number == number) else { return };
        job.under_way = None;
        self.complete(id, order.work, outcome);
    }

    pub(super) fn complete(&mut self, id: Incarnation, work: Work, outcome: Outcome) {
        use RsaState as S;
        let attempts = self.schedule.site.attempts;
        let (now, backoff) = (self.now, self.schedule.site.backoff);
        let is_pretended = outcome == Outcome::Pretended;
        let purpose = self.job(id).purpose;
        let done = |report| AtWork::Done { work, purpose, pretended: is_pretended, report };
        let outcome = match outcome {
            Outcome::Pretended => Outcome::Done(pretended(self.job(id), work)),
            Outcome::Later { why } if work == Work::Mount => return self.not_overmounted(id, why),
            Outcome::Later { why } => Outcome::Failed { why, blame: Vec::new(), fault: Fault::Transient },
            Outcome::Refused { why, fault } if work == Work::Mount => {
                // The job has worked on disk all the time.
                self.job(id).results = false;
                Outcome::Failed { why, blame: Vec::new(), fault }
            }
            Outcome::Refused { why, fault } => Outcome::Failed { why, blame: Vec::new(), fault },
            Outcome::Tight(text) if work != Work::StageIn => Outcome::Done(text),
            Outcome::Salvaged { text, .. } if !self.job(id).salvage => Outcome::Done(text),
            other => other,
        };
        match (work, outcome) {
            (Work::StageIn, Outcome::Tight(text)) => {
                let job = self.job(id);
                let both = has_a_directory_for_both(&job.request);
                if !both {
                    job.purpose = Purpose::Input;
                }
                self.become_state(id, S::Ready, Notice::State);
                self.tell(id, AtWork::Tight { why: text, output_follows: !both });
                self.on_ready(id);
            }
            (Work::Construct, Outcome::Done(text)) => {
                let nodes = self.job(id).allocation.iter().flat_map(|found| found.nodes.clone());
                for node in nodes.collect::<Vec<_>>() {
                    self.works(&node);
                }
                self.become_state(id, S::Booted, done(text));
            }
            (Work::StageIn, Outcome::Done(text)) => {
                self.become_state(id, S::Ready, done(text));
                if self.schedule.jobs[&id].told != Told::Nothing {
                    self.tell(id, AtWork::Ready);
                }
                self.on_ready(id);
            }
            (Work::Construct, Outcome::Failed { why, fault: Fault::Elsewhere, .. }) => {
                let job = self.job(id);
                // It gets no other one, and nothing is to be taken down. That one is found when its servers answer.
                (job.hopeless, job.failed_here) = (true, true);
                self.tell(id, Notice::Words(why));
                self.become_state(id, S::Destroyed, Notice::State);
            }
            (Work::Construct | Work::StageIn, Outcome::Failed { why, blame, fault }) => {
                self.failed(id, work, why, &blame, fault);
                self.become_state(id, S::Aborted, Notice::State);
            }
            (Work::StopStageIn, outcome) => {
                let notice = match outcome {
                    Outcome::Failed { why, .. } => Notice::Words(why),
                    Outcome::Done(text) => done(text).into(),
                    _ => Notice::State,
                };
                self.become_state(id, S::Aborted, notice);
            }
            (Work::Mount, Outcome::Done(text)) => {
                let state = match self.job(id).purpose {
                    Purpose::Input => S::InuseIn,
                    Purpose::Both => S::InuseBoth,
                    Purpose::Output => S::InuseOut,
                };
                self.become_state(id, state, done(text));
            }
            (Work::Mount, Outcome::Failed { why, fault, .. }) => {
                // Compute nodes are not the RSA's to drain.
                self.failed(id, work, why, &[], fault);
                let job = self.job(id);
                (job.mount_failed, job.partially_mounted) = (true, job.results);
                self.become_state(id, S::UnmountNeeded, AtWork::PartTakenAway);
            }
            (Work::Unmount { .. }, Outcome::Done(text)) => {
                let job = self.job(id);
                (job.mount_failed, job.unmounts) = (false, 0);
                self.become_state(id, S::Unmounted, done(text));
            }
            (Work::Unmount { force }, Outcome::Failed { why, blame, fault }) => {
                let job = self.job(id);
                job.unmounts += u32::from(fault != Fault::Busy);
                if force && job.unmounts >= attempts {
                    // A node that does not answer can't hold up the results; destroying the RAM disk cuts it off.
                    (job.mount_failed, job.unmounts) = (false, 0);
                    self.note(Some(id), AtWork::NotUnmounted { nodes: blame, why });
                    self.become_state(id, S::Unmounted, Notice::State);
                } else {
                    job.not_before = Some(now.plus(backoff));
                    self.become_state(id, S::UnmountNeeded, Notice::Words(why));
                }
            }
            (Work::StageOut, Outcome::Done(text)) if self.schedule.jobs[&id].salvage => {
                self.salvaged(id, text, &[]);
            }
            (Work::StageOut, Outcome::Salvaged { text, from }) => self.salvaged(id, text, &from),
            (Work::StageOut, Outcome::Done(text)) => {
                let job = self.job(id);
                (job.results, job.partially_mounted, job.stage_outs, job.retry_now) =
                    (false, false, 0, false);
                self.become_state(id, S::DoneStagingOut, done(text));
                // Another message, as why it worked on disk, still holds.
                if self.schedule.jobs[&id].told == Told::NotOnDisk {
                    self.tell(id, Results::Home);
                }
            }
            (Work::StageOut, Outcome::Failed { why, fault, .. }) => {
                self.stage_out_failed(id, why, fault);
            }
            (Work::Destroy, Outcome::Done(text)) => self.destroyed(id, &[], done(text).into()),
            (Work::Destroy, Outcome::Failed { why, blame, .. }) => {
                let all = self.job(id).allocation.as_ref().map(|found| found.nodes.clone());
                let left = if blame.is_empty() { all.unwrap_or_default() } else { blame };
                self.destroyed(id, &left, Notice::Words(why));
            }
            // All others were made one of these above.
            (
                _,
                Outcome::Pretended
                | Outcome::Tight(_)
                | Outcome::Salvaged { .. }
                | Outcome::Refused { .. }
                | Outcome::Later { .. },
            ) => {}
        }
    }

    /// The output of a job that runs was not covered: it is tried again a few times, and then the RSA nodes are for others.
    fn not_overmounted(&mut self, id: Incarnation, why: String) {
        let now = self.now;
        let job = self.job(id);
        // It has worked on disk all the time.
        job.results = false;
        let pause = LATE_PAUSES.get(job.late as usize).copied();
        job.late += 1;
        job.not_before = pause.map(|pause| now.plus(pause));
        job.hopeless |= pause.is_none();
        self.become_state(id, RsaState::Ready, Notice::State);
        self.tell(id, AtWork::NotOvermounted { why, again: pause });
    }

    fn stage_out_failed(&mut self, id: Incarnation, why: String, fault: Fault) {
        let (now, site) = (self.now, &self.schedule.site);
        let (most, backoff) = (site.stage_outs, site.backoff);
        let job = self.job(id);
        job.stage_outs += 1;
        (job.retry_now, job.salvage) = (false, false);
        if fault == Fault::Lost || job.broken {
            job.broken = true;
            let before = Some(job.broken_why.clone()).filter(|before| !before.is_empty());
            self.become_state(id, RsaState::Lost, Notice::State);
            self.tell_of_loss(id, before.into_iter().chain([why]).collect());
            return;
        }
        let again = job.stage_outs < most && fault == Fault::Transient;
        let pause = backoff.saturating_mul(1 << (job.stage_outs - 1).min(10));
        job.not_before = again.then(|| now.plus(pause));
        self.become_state(id, RsaState::Held, Notice::State);
        let next = if again { NotHome::Again(pause) } else { NotHome::Kept(self.schedule.selector(id)) };
        self.tell(id, Results::NotHome { why, next });
    }

    /// The RAM disk is gone, except for what could not be removed from these nodes.
    fn destroyed(&mut self, id: Incarnation, left: &[NodeName], notice: Notice) {
        let job = self.job(id);
        let ramdisk = job.ramdisk();
        job.failed_here |= job.broken;
        (job.broken, job.broken_why) = (false, String::new());
        for node in left {
            let Some(ramdisk) = &ramdisk else { break };
            match self.schedule.nodes.get_mut(node) {
                Some(known) => {
                    known.leftover_on_rsa.insert(ramdisk.clone());
                    self.job(id).failed_here = true;
                }
                None => {
                    self.schedule
                        .leftover_on_compute
                        .entry(node.clone())
                        .or_default()
                        .insert(ramdisk.clone());
                }
            }
            self.effects.nodes.push(node.clone());
            self.effects.actions.push(Action::CleanUp(node.clone(), ramdisk.clone()));
        }
        self.become_state(id, RsaState::Destroyed, notice);
    }

    /// An attempt to get the RAM disk under the job failed.
    fn failed(&mut self, id: Incarnation, work: Work, why: String, blame: &[NodeName], fault: Fault) {
        let (now, backoff) = (self.now, self.schedule.site.backoff);
        let attempts = self.schedule.site.attempts;
        let job = self.job(id);
        job.failures += 1;
        job.failed_here = true;
        job.hopeless |= fault == Fault::NeedsUser || job.failures >= attempts;
        job.not_before = Some(now.plus(backoff));
        for node in blame {
            if !job.avoid.contains(node) {
                job.avoid.push(node.clone());
            }
        }
        // It runs, and its input alone is of no use any more.
        let too_late = job.job_state == JobState::Running && !job.wants_out();
        let needs_script = job.request.stage_in.is_some() && !is_held_for_results_alone(job);
        let is_held = job.hold.is_held() || job.is_kept_waiting();
        let then = match (job.hopeless || too_late, is_held && needs_script) {
            (false, _) => Then::Again,
            (true, false) => Then::OnDisk,
            // It stays held, which is said when it is given up.
            (true, true) => Then::Unsaid,
        };
        self.tell(id, AtWork::Failed { work, why, then });
        for node in blame {
            self.fails(node);
        }
    }
}
