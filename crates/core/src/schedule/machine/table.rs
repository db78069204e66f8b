//! The table of states, applied: every job moves as far as it can.

use super::assign::wants_nodes;
use super::handling::Handling;
use super::hold::is_held_for_results_alone;
use super::results::changes_on_disk;
use crate::Incarnation;
use crate::schedule::notice::{AtWork, Life, Notice, Waiting};
use crate::schedule::policy::{self, Changed, Line, RsaUsage, Takings};
use crate::schedule::transition::{Transition, next_transition};
use crate::schedule::{Job, JobState, Prolog, Purpose, RsaState, Time, Work};

/// What the last look at everybody has found, so that the next event need not look at everybody.
#[derive(Clone, Debug)]
pub(in crate::schedule) struct Settled {
    takings: Takings,
    /// When everybody is to be looked at again, whatever happens: another job will have waited beyond patience.
    look_again: Option<Time>,
}

/// What has come of it that a job has moved.
#[derive(Clone, Copy, Debug, Default)]
struct Advanced {
    /// Whether others who were asked already are to be asked again.
    again: bool,
    /// Whether others may move who did not have to be asked.
    concerns_others: bool,
    /// Whether it stands where it is because it wants nodes, and none are given now.
    wants_nodes: bool,
    /// Whether it stands where it is because it wants a place among those that are staged, and none is given now.
    wants_place: bool,
}

impl Handling<'_> {
    /// Applies the table until nothing moves. An event costs what it touches: those who were not touched are looked at again
    /// only if something that they may wait for has changed.
    pub(super) fn settle(&mut self) {
        let mut settled = self.schedule.settled.take().unwrap_or_else(|| Settled {
            takings: Takings::of(&self.schedule.nodes, self.schedule.jobs.values()),
            // Nobody has been looked at.
            look_again: Some(Time(0)),
        });
        let mut touched = self.effects.jobs.clone();
        touched.sort_unstable();
        touched.dedup();
        if self.concerns_others(&mut settled, &touched) || self.advance_some(&mut settled, &touched) {
            self.settle_all(&mut settled);
        } else {
            #[cfg(test)]
            self.nobody_moves(&settled);
        }
        #[cfg(test)]
        assert_eq!(
            settled.takings,
            Takings::of(&self.schedule.nodes, self.schedule.jobs.values()),
            "what is in use was not kept up to date"
        );
        self.schedule.settled = Some(settled);
    }

    /// Counts again what the event has touched. Returns whether others may move for that.
    fn concerns_others(&mut self, settled: &mut Settled, touched: &[Incarnation]) -> bool {
        let mut concerns =
            !self.effects.nodes.is_empty() || settled.look_again.is_some_and(|at| at <= self.now);
        for name in &self.effects.nodes {
            if let Some(node) = self.schedule.nodes.get(name) {
                settled.takings.look_at_node(name, node);
            }
        }
        for id in touched {
            let job = self.schedule.jobs.get(id);
            concerns |= self.count(settled, *id);
            // It stands in line, or did; or whoever waits for its nodes or its results waits for somebody's decision.
            concerns |= job.is_none_or(|job| {
                use RsaState::{Held, Ineligible, Initial, Lost};
                matches!(job.rsa_state, Initial | Ineligible | Held | Lost)
            });
        }
        concerns
    }

    /// Counts again what a job takes. Returns whether that is of concern to others.
    fn count(&self, settled: &mut Settled, id: Incarnation) -> bool {
        let (schedule, job) = (&self.schedule, self.schedule.jobs.get(&id));
        match settled.takings.look_at_job(id, job, &schedule.nodes) {
            None => false,
            Some(Changed::Copying) => schedule.site.staging.is_some(),
            Some(Changed::Rest) => true,
        }
    }

    /// Some jobs move as far as they can, but none is given nodes. Returns whether others may move for that, or one of them
    /// wants nodes.
    fn advance_some(&mut self, settled: &mut Settled, ids: &[Incarnation]) -> bool {
        let mut concerns = false;
        for id in ids {
            let advanced = self.advance(*id, settled, None);
            concerns |= advanced.concerns_others || advanced.wants_nodes || advanced.wants_place;
            concerns |= self.answer(*id);
        }
        concerns
    }

    /// Everybody moves as far as possible. What is given back may let another job move, so jobs are asked again.
    ///
    /// All that is given back is known before anything is given: otherwise a job in front that was asked while too little
    /// was free would be overtaken by one that is asked later, when there is more.
    fn settle_all(&mut self, settled: &mut Settled) {
        let site = &self.schedule.site;
        let mut order: Vec<_> = self
            .schedule
            .jobs
            .values()
            .map(|job| {
                let first = policy::turn(site, &self.schedule.served, self.now, job);
                (first.is_none(), first, std::cmp::Reverse(job.priority), job.submitted, job.id)
            })
            .collect();
        order.sort_unstable();
        let mut stale = false;
        loop {
            let mut again = false;
            let (mut want_nodes, mut want_places) = (Vec::new(), Vec::new());
            for (.., id) in &order {
                let advanced = self.advance(*id, settled, None);
                (again, stale) = (again | advanced.again, stale | advanced.concerns_others);
                if advanced.wants_nodes {
                    want_nodes.push(*id);
                } else if advanced.wants_place {
                    want_places.push(*id);
                } else {
                    again |= self.answer(*id);
                }
            }
            let in_turn = want_nodes.iter().filter_map(|id| self.schedule.jobs.get(id));
            let running = in_turn.filter(|job| job.job_state == JobState::Running && wants_nodes(job));
            let mut line = Line::new(&self.schedule.site, settled.takings.usage(), self.now, running);
            for id in want_nodes {
                let advanced = self.advance(id, settled, Some(&mut line));
                (again, stale) = (again | advanced.again, stale | advanced.concerns_others);
                again |= self.answer(id);
            }
            while let Some(id) = self.take_whose_user_has_fewest(&mut want_places, settled.takings.usage()) {
                let advanced = self.advance(id, settled, Some(&mut line));
                (again, stale) = (again | advanced.again, stale | advanced.concerns_others);
                again |= self.answer(id);
            }
            // What READY leads to depends on the Prolog and on where others write; released nodes are for others.
            if !again {
                break;
            }
        }
        let patience = self.schedule.site.patience;
        let turns = self.schedule.jobs.values().filter_map(|job| Some(job.lacking?.plus(patience)));
        settled.look_again = if stale {
            // What those were told who were asked first is not true any more.
            Some(self.now)
        } else {
            turns.filter(|turn| *turn > self.now).min()
        };
    }

    /// Of those who want a place among the jobs that are staged, the first of whose user has fewest: nobody waits for all of another's.
    fn take_whose_user_has_fewest(
        &self,
        want: &mut Vec<Incarnation>,
        usage: &RsaUsage,
    ) -> Option<Incarnation> {
        let has =
            |id: &Incarnation| self.schedule.jobs.get(id).map_or(0, |job| usage.staging_of(job.owner.uid));
        let first = (0..want.len()).min_by_key(|place| has(&want[*place]))?;
        Some(want.remove(first))
    }

    /// A job moves as far as it can; with no line, until it wants nodes, or a place to be staged where these are counted.
    fn advance(&mut self, id: Incarnation, settled: &mut Settled, mut line: Option<&mut Line>) -> Advanced {
        let (mut advanced, mut has_moved) = (Advanced::default(), false);
        while let Some(job) = self.schedule.jobs.get(&id) {
            if is_held_for_results_alone(job) && self.let_go_if_home(id) {
                continue;
            }
            let usage = settled.takings.usage();
            let Some(job) = self.schedule.jobs.get(&id) else { break };
            let next = match next_transition(job) {
                Transition::Wait if changes_on_disk(job, usage) => Transition::StageAgain,
                Transition::Wait => break,
                next => next,
            };
            let had = job.allocation.is_some();
            let moves = match (next, &mut line) {
                (Transition::Assign(purpose), Some(line)) => self.assign(id, purpose, usage, line),
                (Transition::Assign(_), None) => {
                    advanced.wants_nodes = true;
                    false
                }
                (Transition::StageIn(_) | Transition::StageOut, None)
                    if self.schedule.site.staging.is_some() =>
                {
                    advanced.wants_place = true;
                    false
                }
                _ => self.apply(id, next, usage),
            };
            if !moves {
                break;
            }
            has_moved = true;
            advanced.concerns_others |= self.count(settled, id);
            let has = self.schedule.jobs.get(&id).is_some_and(|job| job.allocation.is_some());
            advanced.again |= had && !has || matches!(next, Transition::Forget | Transition::Mount);
        }
        let gives_up = |job: &Job| matches!(job.rsa_state, RsaState::Held | RsaState::Lost);
        advanced.concerns_others |= has_moved && self.schedule.jobs.get(&id).is_none_or(gives_up);
        advanced.concerns_others |= advanced.again;
        advanced
    }

    /// That all would stay as it is if everybody were looked at.
    #[cfg(test)]
    fn nobody_moves(&self, settled: &Settled) {
        let mut schedule = self.schedule.clone();
        let mut handling = Handling { schedule: &mut schedule, now: self.now, effects: Default::default() };
        handling.settle_all(&mut settled.clone());
        assert!(handling.effects.changes.is_empty(), "others move: {:?}", handling.effects.changes);
        assert_eq!(schedule.jobs, self.schedule.jobs);
    }

    /// Whoever waits for a job has an answer once there is one. Returns whether anybody has.
    fn answer(&mut self, id: Incarnation) -> bool {
        // Both: a Prolog may wait beside its burst buffer.
        self.answer_prolog(id) | self.answer_burst_buffer(id)
    }

    /// A Prolog that waits has its answer once the RAM disk is mounted, or will not be in time. Returns whether it has.
    fn answer_prolog(&mut self, id: Incarnation) -> bool {
        let waits = |job: &&mut Job| job.prolog == Prolog::Waiting && job.rsa_state != RsaState::Mounting;
        let Some(job) = self.schedule.jobs.get_mut(&id).filter(waits) else { return false };
        job.prolog = Prolog::Over;
        self.effects.jobs.push(id);
        true
    }

    /// Makes a move; returns whether anything changed.
    fn apply(&mut self, id: Incarnation, next: Transition, usage: &RsaUsage) -> bool {
        match next {
            // Nodes are given in turn; see `advance`.
            Transition::Wait | Transition::Assign(_) => false,
            Transition::GiveUp => {
                self.tell_component(id);
                self.let_go_if_hopeless(id);
                // While it runs, nothing can be undone; when it has ended, it is.
                if self.schedule.jobs[&id].job_state != JobState::Running {
                    self.undo_lock_in(id);
                }
                self.become_state(id, RsaState::Ineligible, Notice::State);
                true
            }
            // It has nodes of a RAM disk that became of no use. Others may need them.
            Transition::Construct(_) if self.must_wait_for_results(id, usage) => {
                self.release(id);
                true
            }
            Transition::Construct(purpose) => {
                let epoch = self.next_epoch();
                let job = self.job(id);
                (job.purpose, job.partially_mounted) = (purpose, false);
                job.lost_on.clear();
                job.inventories.clear();
                if let Some(allocation) = &mut job.allocation {
                    allocation.epoch = epoch;
                }
                self.work(id, Work::Construct, RsaState::Booting)
            }
            Transition::StageIn(purpose) => {
                if self.must_wait_to_stage(id, (Work::StageIn, purpose), usage) {
                    return false;
                }
                self.job(id).purpose = purpose;
                self.work(id, Work::StageIn, RsaState::StagingIn)
            }
            Transition::Stop => self.work(id, Work::StopStageIn, RsaState::StoppingStagingIn),
            Transition::StageAgain => self.stage_again(id, usage),
            Transition::Mount => {
                let job = self.job(id);
                if job.io_nodes.is_empty() {
                    return self.waits(id, Waiting::NoComputeNodes);
                }
                job.results |= job.purpose != Purpose::Input;
                self.work(id, Work::Mount, RsaState::Mounting)
            }
            Transition::NeedUnmount => {
                let job = self.job(id);
                job.unsure = false;
                let why = if job.broken { AtWork::TakenAway } else { AtWork::Switches };
                self.become_state(id, RsaState::UnmountNeeded, why);
                true
            }
            Transition::Unmount { force } => self.work(id, Work::Unmount { force }, RsaState::Unmounting),
            Transition::StageOut => {
                let purpose = self.schedule.jobs[&id].purpose;
                if self.must_wait_to_stage(id, (Work::StageOut, purpose), usage)
                    || self.must_wait_for_stage_out(id)
                {
                    return false;
                }
                let job = self.job(id);
                (job.retry_now, job.not_before) = (false, None);
                self.work(id, Work::StageOut, RsaState::StagingOut)
            }
            Transition::Lose => {
                self.become_state(id, RsaState::Lost, Notice::State);
                let why = self.job(id).broken_why.clone();
                self.tell_of_loss(id, vec![why]);
                true
            }
            Transition::Destroy => {
                if self.job(id).results {
                    // The table does not lead here; if it ever did, the results would come first.
                    return self.waits(id, Waiting::HoldsResults);
                }
                self.hold_without_input(id);
                self.work(id, Work::Destroy, RsaState::Teardown)
            }
            Transition::Release => {
                self.release(id);
                if self.schedule.jobs[&id].job_state == JobState::Finished {
                    self.let_go_of_burst_buffer(id);
                }
                true
            }
            Transition::Forget => {
                self.note(Some(id), Life::Gone(id));
                self.effects.gone.extend(self.schedule.jobs.remove(&id));
                true
            }
        }
    }
}
