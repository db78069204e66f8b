//! Events, and how the table is applied to one of them.
//!
//! # Layout
//!
//! - [`Schedule`]: all jobs and nodes, and what happens to them, one event after the other
//! - [`handling`]: one event being handled
//! - [`queue`]: what the workload manager shows; [`servers`]: what the agents show; [`found`]: RAM disks that are not known
//! - [`life`]: a job comes to be known, starts, runs, and ends
//! - [`burst_buffer`]: what the workload manager asks for a job with a burst buffer
//! - [`hold`]: what the workload manager is ordered to do with a job
//! - [`results`]: waiting for the results of others; [`loss`]: results that are lost
//! - [`work`]: what is done for a job, and what follows from its end; [`time`]: limits that are over
//! - [`table`]: the table of states, applied; [`assign`]: RSA nodes are given, and given back

mod assign;
mod burst_buffer;
mod found;
mod handling;
mod hold;
mod life;
mod loss;
mod queue;
mod results;
mod servers;
mod table;
mod time;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub use self::burst_buffer::PlacesLost;
use self::handling::Handling;
use self::queue::Forsaken;
use self::table::Settled;
use super::effects::{Action, Effects, Refused};
use super::event::Event;
use super::identity::{Identities, Identity};
use super::job::{Job, Work};
use super::nodes::Nodes;
use super::notice::{Life, NodeNotice, NotNow, Notice, Results};
use super::policy::{self, Served, Site};
use super::{BurstBuffer, JobState, Prolog, QueuePlace, RsaState, Time};
use crate::{Epoch, Incarnation, JobSelector, NodeName, QueuedJob, RamDiskId, Standing};

#[cfg(test)]
pub(super) use self::assign::wants_nodes;

/// All jobs that have asked for something, and all RSA nodes.
#[derive(Clone, Debug)]
pub struct Schedule {
    site: Site,
    pub(super) jobs: BTreeMap<Incarnation, Job>,
    nodes: Nodes,
    /// Who the jobs are, those that are gone included.
    pub(super) identities: Identities,
    /// Jobs that are next since then, but not yet for long enough to be believed.
    candidates: BTreeMap<Incarnation, Time>,
    /// Jobs that are next and have asked for nothing, as the thesis's log has them; and since when they are no longer
    /// next. Nothing is done for them, so nothing of them is kept.
    bystanders: BTreeMap<Incarnation, Option<Time>>,
    /// RAM disks that could not be removed from nodes that lend nothing: the compute nodes of jobs.
    leftover_on_compute: BTreeMap<NodeName, BTreeSet<RamDiskId>>,
    /// When the workload manager was last ordered to hold a job or to let it go, so that what it has not yet done is
    /// ordered again, but not in each look.
    ordered: BTreeMap<Incarnation, Time>,
    /// Jobs that are not known here and must not start yet; and when they were ordered to be held.
    held_back: BTreeMap<Incarnation, Time>,
    /// Jobs of which nothing is left here, and for whose results the workload manager waits.
    forsaken: BTreeMap<Incarnation, Forsaken>,
    /// When users were last given nodes; what ended before a restart is not known any more.
    pub(super) served: Served,
    /// Nothing if everybody is to be looked at.
    pub(super) settled: Option<Settled>,
    last_order: u64,
    last_epoch: Epoch,
    /// Which start of the workload manager's daemon it was, and how many places it has lost since.
    places_lost: PlacesLost,
    /// When the journal began.
    began: Time,
}

/// For so long after its start, a job with a burst buffer may be shown a RAM disk whose mount a former scheduler had begun.
const LONGEST_PRE_RUN: Duration = Duration::from_secs(300);

impl Schedule {
    /// Begins with what was kept: jobs, nodes, and the greatest number of a work order and epoch that were ever given.
    pub fn new(site: Site, jobs: Vec<Job>, nodes: Nodes, last_order: u64, last_epoch: Epoch) -> Schedule {
        let mut jobs: BTreeMap<Incarnation, Job> = jobs.into_iter().map(|job| (job.id, job)).collect();
        let mut identities = Identities::default();
        for job in jobs.values() {
            identities.note(job.id, &Identity::of(job));
        }
        for job in jobs.values_mut().filter(|job| job.prolog == Prolog::Waiting) {
            // It waited for an answer of the former scheduler, and asks again; what is mounted meanwhile, it may keep.
            let until = job.started.unwrap_or_default().plus(site.prolog);
            job.prolog = Prolog::Expected(Some(until));
            if let Some(order) = job.under_way.as_mut().filter(|order| order.work == Work::Mount) {
                order.until = order.until.max(until.plus(site.limits.mount));
            }
        }
        for job in jobs.values_mut().filter(|job| job.burst_buffer == BurstBuffer::PreRun) {
            // Before its start the workload manager was told, or told itself, that it works on disk: what is mounted, it may keep.
            let until = job.started.unwrap_or_default().plus(LONGEST_PRE_RUN);
            if let Some(order) = job.under_way.as_mut().filter(|order| order.work == Work::Mount) {
                order.until = order.until.max(until.plus(site.limits.mount));
            }
        }
        for job in jobs.values_mut() {
            job.told = std::mem::take(&mut job.told).read(job.id, &job.message);
        }
        let mut served = Served::new();
        for job in jobs.values() {
            if let Some(allocation) = &job.allocation {
                let whose = (policy::pool_of(&site, job).to_owned(), job.owner.uid);
                let last = served.entry(whose).or_default();
                *last = allocation.since.max(*last);
            }
        }
        Schedule {
            served,
            site,
            jobs,
            nodes,
            identities,
            candidates: BTreeMap::new(),
            bystanders: BTreeMap::new(),
            leftover_on_compute: BTreeMap::new(),
            ordered: BTreeMap::new(),
            held_back: BTreeMap::new(),
            forsaken: BTreeMap::new(),
            settled: None,
            last_order,
            last_epoch,
            places_lost: PlacesLost::default(),
            began: Time(0),
        }
    }

    /// What the site decides.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Decides by other rules from the next event on. A tick has those who wait judged by them.
    pub fn set_site(&mut self, site: Site) {
        (self.site, self.settled) = (site, None);
    }

    /// The same with the time when the journal began: of what was there before, it may not know.
    #[must_use]
    pub fn with_beginning(mut self, began: Time) -> Schedule {
        self.began = began;
        self
    }

    /// The same with the places for jobs that wait which the workload manager has lost.
    #[must_use]
    pub fn with_places_lost(mut self, lost: PlacesLost) -> Schedule {
        self.places_lost = lost;
        self
    }

    /// The places for jobs that wait which the workload manager has lost.
    pub fn places_lost(&self) -> PlacesLost {
        self.places_lost
    }

    /// No epoch that is given from now on is as small as this one, which somebody else may have given.
    #[must_use]
    pub fn after_epoch(mut self, epoch: Epoch) -> Schedule {
        self.last_epoch = self.last_epoch.max(epoch);
        self
    }

    /// The same with what was left on nodes that lend nothing.
    #[must_use]
    pub fn with_leftover_on_compute(mut self, left: BTreeMap<NodeName, BTreeSet<RamDiskId>>) -> Schedule {
        self.leftover_on_compute = left;
        self
    }

    /// The same with jobs that are gone: their numbers may be used again, and they may be started anew.
    #[must_use]
    pub fn with_former(mut self, former: impl IntoIterator<Item = (Incarnation, Identity)>) -> Schedule {
        for (id, identity) in former {
            self.identities.note(id, &identity);
        }
        self
    }

    /// Forgets who a job was of which nothing is kept any more.
    pub fn forget(&mut self, id: Incarnation) {
        if self.jobs.range(id.lives()).next().is_none() {
            self.identities.forget(id);
        }
    }

    /// Which life of which job a record of the queue is; see [`Identities::identify`].
    pub fn identify(&self, seen: &QueuedJob) -> Incarnation {
        self.identities.identify(seen)
    }

    /// What to call a life of a job in an order, so that it means no other one: its number alone, if that is enough.
    pub fn selector(&self, id: Incarnation) -> JobSelector {
        let lives = self.jobs.range(id.lives()).map(|(other, _)| *other);
        let is_one_of_several = id.restarts > 0 || lives.into_iter().any(|other| other != id);
        JobSelector {
            job: id.job,
            submitted: self.identities.are_several(id.job).then_some(id.submitted),
            restarts: is_one_of_several.then_some(id.restarts),
        }
    }

    /// When the journal began: of what was there before, it may not know.
    pub fn began(&self) -> Time {
        self.began
    }

    /// What is left on nodes that lend nothing.
    pub fn leftover_on_compute(&self) -> &BTreeMap<NodeName, BTreeSet<RamDiskId>> {
        &self.leftover_on_compute
    }

    /// The jobs of which something is to be done.
    pub fn jobs(&self) -> &BTreeMap<Incarnation, Job> {
        &self.jobs
    }

    /// The RSA nodes, and what is promised of each.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// The greatest number of a work order, and the greatest epoch, that were given.
    pub fn counters(&self) -> (u64, Epoch) {
        (self.last_order, self.last_epoch)
    }

    /// What to do again after a crash: all that had not ended, and what the workload manager may not have been told.
    pub fn resume(&self) -> Vec<Action> {
        let orders = self.jobs.values().filter_map(|job| Some(Action::Begin(job.id, job.under_way?)));
        let leftover_on_rsa = self.nodes.iter().flat_map(|(name, node)| {
            node.leftover_on_rsa.iter().map(|id| Action::CleanUp(name.clone(), id.clone()))
        });
        let places = self.jobs.values().filter_map(|job| match job.place {
            QueuePlace::LockedIn => Some(Action::LockIn(job.id)),
            QueuePlace::Unlocking => Some(Action::UndoLockIn(job.id)),
            QueuePlace::Own => None,
        });
        orders.chain(leftover_on_rsa).chain(places).collect()
    }

    /// When the next [`Event::Tick`] is due, if nothing else happens.
    pub fn next_tick(&self) -> Option<Time> {
        let of_jobs = self.jobs.values().flat_map(|job| {
            let order = job.under_way.map(|order| order.until);
            let switch = if job.delay_over { None } else { job.switch_at };
            let hold = hold::hold_until(&self.site, job);
            [order, job.not_before, job.prolog.until(), switch, job.ending, hold].into_iter().flatten()
        });
        of_jobs.min()
    }

    /// Whether a job of the queue could get something if it asked for it: only then is its script of interest.
    pub fn is_candidate(&self, now: Time, job: &QueuedJob) -> bool {
        self.jobs.contains_key(&job.id)
            || queue::is_next(&self.site, now, job)
            || job.standing == Standing::Running
    }

    /// Lets something happen.
    ///
    /// # Errors
    /// [`Refused`] for orders of people; nothing is changed then.
    pub fn handle(&mut self, now: Time, event: Event) -> Result<Effects, Refused> {
        let mut handling = Handling { schedule: self, now, effects: Effects::default() };
        handling.take(event)?;
        handling.settle();
        let mut effects = handling.effects;
        effects.jobs.sort_unstable();
        effects.jobs.dedup();
        effects.nodes.sort_unstable();
        effects.nodes.dedup();
        Ok(effects)
    }
}

impl Handling<'_> {
    fn take(&mut self, event: Event) -> Result<(), Refused> {
        match event {
            Event::Queue { taken, jobs } => self.queue(taken, jobs),
            Event::Starting(mut seen) => {
                seen.job.id = self.schedule.identify(&seen.job);
                self.starting(&seen);
            }
            Event::PrologOver(id) => {
                if self.schedule.jobs.get(&id).is_some_and(|job| job.prolog == Prolog::Waiting) {
                    self.job(id).prolog = Prolog::Over;
                    self.note(Some(id), Life::PrologOver);
                }
            }
            Event::BurstBuffer { call, mut seen } => {
                seen.job.id = self.schedule.identify(&seen.job);
                self.burst_buffer(call, &seen);
            }
            Event::MustNotWait(id) => self.must_not_wait(id),
            Event::Ending { job: id, node } => self.ending(id, node),
            Event::Ended { job, number, outcome } => self.ended(job, number, outcome),
            Event::NodeUp { node, capacity } => {
                let Some(known) = self.schedule.nodes.get_mut(&node) else { return Ok(()) };
                if !known.up || known.capacity != capacity || !known.heard {
                    (known.up, known.capacity, known.heard, known.given_up) = (true, capacity, true, false);
                    self.schedule.settled = None;
                    self.effects.nodes.push(node.clone());
                    self.note(None, NodeNotice::Lends { node, capacity });
                }
            }
            Event::Found(found) => self.found(*found),
            Event::GiveUp(node) => {
                let known = self.schedule.nodes.get_mut(&node).ok_or(Refused::NoNode(node.clone()))?;
                if known.heard {
                    let why = if known.given_up { NotNow::GivenUp(node) } else { NotNow::HasAnswered(node) };
                    return Err(Refused::NotNow(why));
                }
                (known.heard, known.given_up) = (true, true);
                self.effects.nodes.push(node.clone());
                self.note(None, NodeNotice::GivenUp(node));
            }
            Event::NodeLost(node) => self.node_lost(&node),
            Event::Broken { ramdisk, node, why } => self.broken(&ramdisk, &node, &why),
            Event::Inventoried { ramdisk, inventories } => {
                let ids: Vec<Incarnation> = self.with_ramdisk(&ramdisk).collect();
                for id in ids {
                    self.job(id).inventories.extend(inventories.iter().cloned());
                }
            }
            Event::Whole(ramdisk) => {
                let ids: Vec<Incarnation> = self.with_ramdisk(&ramdisk).collect();
                for id in ids {
                    if self.job(id).broken {
                        let job = self.job(id);
                        (job.broken, job.broken_why) = (false, String::new());
                        job.lost_on.clear();
                        if job.rsa_state != RsaState::StagingOut {
                            // Nothing has to be given up any more.
                            job.salvage = false;
                        }
                        // Whoever was told of the loss is told of its end.
                        if job.results {
                            self.tell(id, Results::WholeAgain);
                        } else {
                            self.note(Some(id), Results::WholeAgain);
                        }
                    }
                }
            }
            Event::Vacated { node, job } => {
                if !self.schedule.jobs.contains_key(&job)
                    && let Some(known) = self.schedule.nodes.get_mut(&node)
                    && known.promised.remove(&job).is_some()
                {
                    self.effects.nodes.push(node.clone());
                    self.note(None, NodeNotice::Vacated { node, job });
                }
            }
            Event::Cleaned { node, ramdisk } => {
                if let Some(left) = self.schedule.leftover_on_compute.get_mut(&node)
                    && left.remove(&ramdisk)
                {
                    if left.is_empty() {
                        self.schedule.leftover_on_compute.remove(&node);
                    }
                    self.effects.nodes.push(node.clone());
                    self.note(None, NodeNotice::Cleaned { node: node.clone(), ramdisk: ramdisk.clone() });
                }
                if let Some(known) = self.schedule.nodes.get_mut(&node)
                    && known.leftover_on_rsa.remove(&ramdisk)
                {
                    self.effects.nodes.push(node.clone());
                    self.note(None, NodeNotice::Cleaned { node, ramdisk });
                }
            }
            Event::RanFull { job: id, nodes } => {
                // Once: it stays so, and whoever looks at the nodes sees it again each time.
                if self.schedule.jobs.get(&id).is_some_and(|job| !job.ran_full && job.results) {
                    self.job(id).ran_full = true;
                    self.tell(id, Results::RanFull { nodes });
                }
            }
            Event::Noticed { job: id, text } => {
                if self.schedule.jobs.contains_key(&id) {
                    self.tell(id, Notice::Words(text));
                }
            }
            Event::Retry { job: id, salvage: true } => {
                self.must_not_run(id)?;
                self.salvage(id)?;
            }
            Event::Retry { job: id, salvage: false } => {
                self.must_not_run(id)?;
                let job = self.known(id)?;
                match (job.rsa_state, job.job_state) {
                    (RsaState::Held | RsaState::Lost, _) => {
                        (job.retry_now, job.stage_outs, job.not_before) = (true, 0, None);
                        job.salvage = false;
                    }
                    (RsaState::Ineligible, _) if job.component_of.is_some() => {
                        return Err(Refused::NotNow(NotNow::Component(id)));
                    }
                    (RsaState::Ineligible, JobState::Ondeck) if job.is_told_to_fail() => {
                        return Err(Refused::NotNow(NotNow::ToldItFails(id)));
                    }
                    // What kept it from getting a RAM disk may have been mended, and it has not started.
                    (RsaState::Ineligible, JobState::Ondeck) => {
                        (job.hopeless, job.failures, job.not_before) = (false, 0, None);
                        self.become_state(id, RsaState::Initial, Notice::State);
                    }
                    (state, _) => {
                        return Err(Refused::NotNow(NotNow::NothingHeld(id, state)));
                    }
                }
                self.note(Some(id), Life::Retried);
            }
            Event::Abandon { job: id, by } => self.abandon(id, &by)?,
            Event::Drain { node, why } => {
                let known = self.schedule.nodes.get_mut(&node).ok_or(Refused::NoNode(node.clone()))?;
                known.drained.clone_from(&why);
                self.effects.nodes.push(node.clone());
                self.note(None, NodeNotice::Drained { node, why });
            }
            Event::Resume(node) => {
                let known = self.schedule.nodes.get_mut(&node).ok_or(Refused::NoNode(node.clone()))?;
                (known.drained, known.failures) = (String::new(), 0);
                self.effects.nodes.push(node.clone());
                self.note(None, NodeNotice::LendsAgain(node));
            }
            Event::Unlocked(id) => {
                if self.schedule.jobs.get(&id).is_some_and(|job| job.place == QueuePlace::Unlocking) {
                    self.job(id).place = QueuePlace::Own;
                }
            }
            Event::ControllerStarted(start) => {
                let lost = &mut self.schedule.places_lost;
                if lost.since != start {
                    *lost = PlacesLost { since: start, places: 0 };
                    self.note(None, Life::ControllerStarted);
                    // Whoever has asked is gone with the one before.
                    let asked: Vec<Incarnation> = self
                        .schedule
                        .jobs
                        .values()
                        .filter(|job| job.is_asked_for)
                        .map(|job| job.id)
                        .collect();
                    for id in asked {
                        self.job(id).is_asked_for = false;
                    }
                }
            }
            Event::Tick => {}
        }
        self.pass_time();
        Ok(())
    }
}
