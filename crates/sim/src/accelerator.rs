//! The accelerator: [`ondeck_core::schedule`], driven as the daemon drives it.
//!
//! Nothing is decided here. What the workload manager shows and what its hooks say becomes an event; what the schedule orders
//! becomes a [`Todo`] for the simulation. All nodes of a job are one to the schedule, because all of its hooks run at the same
//! time here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use ondeck_core::schedule::notice::{Life, NoRamDisk, Notice, Unfit};
use ondeck_core::schedule::{
    Action, Effects, Event, Job, JobState, Node, ObservedJob, Outcome, Prolog, Purpose, RsaState, Schedule,
    Time, Work,
};
use ondeck_core::{
    Bytes, Epoch, Incarnation, JobId, NodeName, Owner, QueuedJob, Request, Standing, WaitPolicy, allocation,
};

use crate::io::JobIo;
use crate::machine::Accelerated;
use crate::record::Served;
use crate::workload_manager::WorkloadManager;

/// What the schedule wants to be done, or has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Todo {
    /// Begin work for a job, and report its end under this number.
    Begin {
        /// The job.
        job: u32,
        /// The number of the order.
        number: u64,
        /// What is to be done.
        work: Work,
    },
    /// Hold a job, or release it.
    Hold(u32, bool),
    /// Put a job before all others, or not any more.
    InFront(u32, bool),
    /// Something of a job has changed: who waits for it may go on.
    Changed(u32),
}

/// Of so many jobs the workload manager says when it expects them to start, as Slurm does (`bf_max_job_test`).
const PLANNED: usize = 100;
/// So often, if anything has changed (Slurm's `bf_interval`).
const PLANS_MS: u64 = 30_000;

/// What the workload manager has said of expected starts.
#[derive(Debug, Default)]
struct Expected {
    starts: BTreeMap<u32, Time>,
    /// When it planned, and what it knew then.
    at: Option<(Time, u64)>,
    /// When it plans anew.
    again: Option<Time>,
    /// When the next of them begins within the horizon.
    nearer: Option<Time>,
}

/// A job, as far as the accelerator is concerned.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Its compute nodes.
    pub nodes: u32,
    /// Whose it is.
    pub user: u32,
    /// When it was submitted.
    pub submitted: Time,
    /// What it does.
    pub io: JobIo,
}

/// The schedule, and what is told to it.
pub struct Accelerator {
    schedule: Schedule,
    config: Accelerated,
    /// The name by which all nodes of a job go.
    node: NodeName,
    /// Held jobs that the schedule does not know yet.
    held: BTreeSet<u32>,
    next_tick: Option<Time>,
    /// The place of each job in the order of starts.
    places: Vec<u32>,
    /// The jobs that were next when the queue changed last.
    was_next: Vec<u32>,
    expected: Expected,
    /// When the queue is looked at next, and how often after that without any change.
    look: Option<Time>,
    again: u32,
    /// When somebody has waited for so long, or was ready for so long, that it makes a difference: the queue is looked at then.
    due: Option<Time>,
    /// Jobs that were told that there will never be a RAM disk for them.
    unfit: BTreeMap<u32, Served>,
    /// RSA nodes times milliseconds that were given back.
    node_ms: f64,
    demotions: u64,
}

impl Accelerator {
    /// RSA nodes that all lend, and no jobs; the place of each that will come.
    pub fn new(config: Accelerated, places: Vec<u32>) -> Accelerator {
        let name = |index: u32| -> NodeName {
            #[allow(clippy::expect_used)]
            format!("r{index}").parse().expect("a letter and digits are a name")
        };
        // They lend from the start, so that nobody has to be told of each.
        let node = || Node { up: true, heard: true, capacity: config.memory, ..Node::new(&config.site.pool) };
        let nodes = (0..config.nodes).map(|index| (name(index), node())).collect();
        let schedule = Schedule::new(config.site.clone(), Vec::new(), nodes, 0, Epoch(0));
        #[allow(clippy::expect_used)]
        let node = "c0".parse().expect("a letter and a digit are a name");
        Accelerator {
            schedule,
            config,
            node,
            held: BTreeSet::new(),
            next_tick: None,
            places,
            was_next: Vec::new(),
            expected: Expected::default(),
            look: None,
            again: 0,
            due: None,
            unfit: BTreeMap::new(),
            node_ms: 0.0,
            demotions: 0,
        }
    }

    /// How it is set up.
    pub fn config(&self) -> &Accelerated {
        &self.config
    }

    /// RSA nodes times milliseconds that were given back, and how many jobs were demoted.
    pub fn totals(&self) -> (f64, u64) {
        (self.node_ms, self.demotions)
    }

    /// Whether a job asks for anything.
    pub fn serves(&self, subject: &Subject) -> bool {
        subject.io.input.0 > 0 || subject.io.written().0 > 0
    }

    /// Whether a job is held until its input is in RAM.
    pub fn holds(&self, subject: &Subject) -> bool {
        self.config.wait == WaitPolicy::Hold && self.serves(subject)
    }

    /// When it has to be called, if nothing happens before.
    pub fn next(&self) -> Option<Time> {
        let Expected { again, nearer, .. } = self.expected;
        [self.next_tick, self.look, self.due, again, nearer].into_iter().flatten().min()
    }

    /// The queue has changed.
    pub fn queue_has_changed(&mut self, now: Time) {
        let interval = self.interval_ms();
        // A job is next when it was so for a while, so there is more than one look.
        let debounce = self.config.site.debounce.as_millis() as u64;
        self.again = u32::try_from(debounce.div_ceil(interval)).unwrap_or(u32::MAX).saturating_add(2);
        self.look.get_or_insert(Time((now.0 / interval + 1) * interval));
    }

    /// A held job was submitted.
    pub fn submitted_held(&mut self, now: Time, job: u32) {
        self.held.insert(job);
        self.queue_has_changed(now);
    }

    fn interval_ms(&self) -> u64 {
        (self.config.interval.as_millis() as u64).max(1)
    }

    /// A look at the queue, if it is time, and a tick.
    pub fn pass_time(
        &mut self,
        now: Time,
        subjects: &[Subject],
        queue: &WorkloadManager,
        runs_since: impl Fn(u32) -> Option<Time>,
    ) -> Vec<Todo> {
        let mut todo = Vec::new();
        // Starts and ends are told by hooks. A look finds who is next, and who is held.
        let mut next = queue.first(self.config.depth);
        let near = self.expect(now, queue);
        next.extend(near.into_iter().filter(|job| !next.contains(job)).collect::<Vec<u32>>());
        if next != self.was_next {
            self.was_next = next;
            self.queue_has_changed(now);
        }
        let is_time = |at: Option<Time>| at.is_some_and(|at| at <= now);
        if is_time(self.look) || is_time(self.due) {
            let jobs = self.observe(subjects, queue, runs_since);
            if is_time(self.look) {
                self.again = self.again.saturating_sub(1);
                self.look = (self.again > 0).then(|| Time(now.0 + self.interval_ms()));
            }
            todo.extend(self.handle(now, Event::Queue { taken: now, jobs }));
        }
        if self.next_tick.is_some_and(|tick| tick <= now) {
            todo.extend(self.handle(now, Event::Tick));
        }
        todo
    }

    /// The jobs that the workload manager expects to start within the horizon, in the order of their numbers.
    fn expect(&mut self, now: Time, queue: &WorkloadManager) -> Vec<u32> {
        let horizon = self.config.site.horizon;
        if horizon.is_zero() {
            return Vec::new();
        }
        let expected = &mut self.expected;
        let changes = queue.changes();
        if expected.at.is_none_or(|(_, knew)| knew != changes) {
            let may = expected.at.map_or(now, |(at, _)| Time(at.0 + PLANS_MS));
            if may <= now {
                expected.starts = queue.expected(now, PLANNED).into_iter().collect();
                (expected.at, expected.again) = (Some((now, changes)), None);
            } else {
                expected.again = Some(may);
            }
        }
        let until = now.plus(horizon);
        let waits = |(job, _): &(&u32, &Time)| queue.is_waiting(**job);
        let later = expected.starts.iter().filter(waits).filter(|(_, start)| **start > until);
        let nearer = later.map(|(_, start)| *start).min();
        expected.nearer = nearer.map(|start| Time(start.0 - (until.0 - now.0)));
        let near = expected.starts.iter().filter(waits).filter(|(_, start)| **start <= until);
        near.map(|(job, _)| *job).collect()
    }

    /// What the workload manager shows: what is known here, and what is next.
    fn observe(
        &mut self,
        subjects: &[Subject],
        queue: &WorkloadManager,
        runs_since: impl Fn(u32) -> Option<Time>,
    ) -> Vec<ObservedJob> {
        let known = |job: &u32| self.schedule.jobs().contains_key(&id_of(*job, &subjects[*job as usize]));
        self.held.retain(|job| !known(job) && queue.is_held(*job));
        let next = &self.was_next;
        let mut seen: Vec<(u32, Standing, Option<Time>)> = Vec::new();
        for id in self.schedule.jobs().keys() {
            let job = index_of(*id);
            if next.contains(&job) {
                continue;
            }
            let since = runs_since(job);
            if queue.is_held(job) {
                seen.push((job, Standing::Held, None));
            } else if queue.is_waiting(job) {
                seen.push((job, Standing::Waiting, self.expected.starts.get(&job).copied()));
            } else if since.is_some() {
                seen.push((job, Standing::Running, since));
            }
        }
        // The first of them wait for nodes; of those after them it is known when they are expected to start.
        seen.extend(next.iter().take(self.config.depth).map(|job| (*job, Standing::Next, None)));
        let start = |job: &u32| self.expected.starts.get(job).copied();
        seen.extend(next.iter().skip(self.config.depth).map(|job| (*job, Standing::Waiting, start(job))));
        seen.extend(self.held.iter().map(|job| (*job, Standing::Held, None)));
        let asks = |(job, ..): &(u32, Standing, Option<Time>)| self.serves(&subjects[*job as usize]);
        seen.into_iter()
            .filter(asks)
            .map(|(job, standing, start)| {
                let subject = &subjects[job as usize];
                self.observed(job, subject, standing, start)
            })
            .collect()
    }

    /// A job as the workload manager shows it; `start`: when it started, or is expected to.
    fn observed(&self, job: u32, subject: &Subject, standing: Standing, start: Option<Time>) -> ObservedJob {
        let id = id_of(job, subject);
        let runs = standing == Standing::Running;
        let nodes = if runs { vec![self.node.clone()] } else { Vec::new() };
        let is_known = self.schedule.jobs().contains_key(&id);
        let seen = QueuedJob {
            id,
            owner: Owner { uid: subject.user, gid: subject.user },
            account: String::new(),
            standing,
            reason: String::new(),
            node_count: subject.nodes,
            nodes: nodes.clone(),
            start: start.map(|start| start.0 / 1000),
            submitted: id.submitted,
            priority: u64::from(u32::MAX - self.places[job as usize]),
            qos: String::new(),
            held_for_input: standing == Standing::Held,
            dependent: false,
            depends_on: Vec::new(),
            component_of: None,
            several: false,
            has_burst_buffer: false,
            waits_for_results: false,
            burst_buffer_lost: false,
        };
        // What is known of it is not read again.
        let request = (!is_known).then(|| self.request(job, subject));
        ObservedJob { job: seen, request, work_dir: PathBuf::from("/"), io_nodes: nodes }
    }

    /// What a job's script asks for: users know what their data needs, and ask for it where their share of the RSA is too little.
    fn request(&self, job: u32, subject: &Subject) -> Request {
        let io = &subject.io;
        let results = io.results_in_ram();
        let capacity = Bytes(io.input.0.saturating_add(results.0));
        let of_node = allocation::share_within(self.config.site.engine, self.config.memory);
        let needed = u32::try_from(capacity.0.div_ceil(of_node.0.max(1))).unwrap_or(u32::MAX);
        let proportional = subject.nodes / self.config.site.proportion.max(1);
        let path = |of: &str| PathBuf::from(format!("/{of}/{job}"));
        Request {
            data_in: (io.input.0 > 0).then(|| path("in")).into_iter().collect(),
            data_out: (io.written().0 > 0).then(|| path("out")).into_iter().collect(),
            out_size: Some(results).filter(|_| io.input.0 > 0 && io.written().0 > 0),
            // One that is too small for an RSA node is so for the site, however much it asks for.
            nodes: (proportional > 0).then(|| proportional.max(needed)),
            wait: Some(self.config.wait),
            ..Request::default()
        }
    }

    /// A job has got its nodes, and its Prolog waits for an answer.
    pub fn starting(&mut self, now: Time, job: u32, subject: &Subject) -> Vec<Todo> {
        let seen = self.observed(job, subject, Standing::Running, Some(now));
        self.handle(now, Event::Starting(Box::new(seen)))
    }

    /// A job's program has ended, and its Epilogs run.
    pub fn ending(&mut self, now: Time, job: u32, subject: &Subject) -> Vec<Todo> {
        let node = self.node.clone();
        self.handle(now, Event::Ending { job: id_of(job, subject), node })
    }

    /// Work has ended.
    pub fn ended(
        &mut self,
        now: Time,
        job: u32,
        subject: &Subject,
        number: u64,
        outcome: Outcome,
    ) -> Vec<Todo> {
        self.handle(now, Event::Ended { job: id_of(job, subject), number, outcome })
    }

    /// A job is not before all others any more, as was ordered.
    pub fn unlocked(&mut self, now: Time, job: u32, subject: &Subject) -> Vec<Todo> {
        self.handle(now, Event::Unlocked(id_of(job, subject)))
    }

    fn handle(&mut self, now: Time, event: Event) -> Vec<Todo> {
        // Only orders of people are refused, and there are none.
        let Ok(effects) = self.schedule.handle(now, event) else { return Vec::new() };
        let Effects { actions, changes, jobs, gone, nodes: _, used, unasked: _ } = effects;
        let mut todo = Vec::new();
        for action in actions {
            match action {
                Action::Begin(id, order) => {
                    todo.push(Todo::Begin { job: index_of(id), number: order.number, work: order.work });
                }
                Action::LockIn(id) => todo.push(Todo::InFront(index_of(id), true)),
                Action::UndoLockIn(id) => todo.push(Todo::InFront(index_of(id), false)),
                Action::Hold(id) | Action::HoldBack(id, _) => todo.push(Todo::Hold(index_of(id), true)),
                Action::LetGo(id) => todo.push(Todo::Hold(index_of(id), false)),
                Action::Tell(id, Notice::NoRamDisk(NoRamDisk::Unfit(why))) => {
                    let served = match why {
                        Unfit::TooSmall { .. } | Unfit::PartTooSmall { .. } => Served::TooSmall,
                        _ => Served::TooLarge,
                    };
                    self.unfit.insert(index_of(id), served);
                }
                // The marks of holds, words for users, and what is left on nodes that have failed: there are none.
                Action::EndStageOut(_) | Action::Unmark(_) | Action::Tell(..) | Action::CleanUp(..) => {}
            }
        }
        todo.extend(jobs.into_iter().map(|id| Todo::Changed(index_of(id))));
        for record in used {
            self.node_ms += record.node_seconds * 1000.0;
        }
        for change in changes {
            let becomes = matches!(change.notice, Notice::Life(Life::Becomes(..)));
            let had_nodes = |state| !matches!(state, RsaState::Initial | RsaState::Ineligible);
            self.demotions += u64::from(
                becomes && matches!(change.states, Some((JobState::Demoted, state)) if had_nodes(state)),
            );
        }
        for job in gone {
            self.unfit.remove(&index_of(job.id));
            self.schedule.forget(job.id);
        }
        self.due = self.schedule.jobs().values().filter_map(|job| self.due_of(now, job)).min();
        self.next_tick = self.schedule.next_tick();
        todo
    }

    /// When it makes a difference for how long a job has waited for RSA nodes, or for its start with them.
    fn due_of(&self, now: Time, job: &Job) -> Option<Time> {
        let site = self.schedule.site();
        let patience = job.lacking.map(|since| since.plus(site.patience));
        let waits =
            job.job_state == JobState::Ondeck && matches!(job.rsa_state, RsaState::Booted | RsaState::Ready);
        let ready = waits.then(|| job.since.plus(site.limits.ready));
        [patience, ready].into_iter().flatten().filter(|at| *at > now).min()
    }

    /// Whether a job that has started may begin with its program.
    pub fn prolog_is_over(&self, job: u32, subject: &Subject) -> bool {
        let known = self.schedule.jobs().get(&id_of(job, subject));
        known.is_none_or(|known| known.prolog == Prolog::Over)
    }

    /// Whether some of a job's nodes may show a RAM disk.
    pub fn is_shown(&self, job: u32, subject: &Subject) -> bool {
        self.schedule.jobs().get(&id_of(job, subject)).is_some_and(|known| known.rsa_state.is_shown())
    }

    /// What a job sees in RAM: its input, its output.
    pub fn in_use(&self, job: u32, subject: &Subject) -> (bool, bool) {
        match self.schedule.jobs().get(&id_of(job, subject)).map(|known| known.rsa_state) {
            Some(RsaState::InuseIn) => (true, false),
            Some(RsaState::InuseBoth) => (true, true),
            Some(RsaState::InuseOut) => (false, true),
            _ => (false, false),
        }
    }

    /// What a job's RAM disk is for, on how many RSA nodes it is, and the state it is in.
    pub fn allocation(&self, job: u32, subject: &Subject) -> Option<(Purpose, u32, RsaState)> {
        let known = self.schedule.jobs().get(&id_of(job, subject))?;
        let nodes = known.allocation.as_ref()?.nodes.len() as u32;
        Some((known.purpose, nodes, known.rsa_state))
    }

    /// Where the data of a job would be that is about to start.
    pub fn served_before(&self, job: u32, subject: &Subject) -> Served {
        let Some(known) = self.schedule.jobs().get(&id_of(job, subject)) else {
            return Served::StartedAtOnce;
        };
        match known.rsa_state {
            RsaState::Initial | RsaState::Ineligible => Served::NoNodesFree,
            _ => Served::NotReady,
        }
    }

    /// Where the data of a job is that begins with its program now; `before`: as it was before its start.
    pub fn served(&self, job: u32, subject: &Subject, before: Served) -> Served {
        match self.in_use(job, subject) {
            _ if !self.serves(subject) => Served::NoNeed,
            (false, false) => self.unfit.get(&job).copied().unwrap_or(before),
            _ => Served::InRam,
        }
    }

    /// Of how many jobs the schedule knows.
    pub fn known(&self) -> usize {
        self.schedule.jobs().len()
    }
}

/// A job's name for the schedule. Its place in the log is its number: logs may have a number twice.
fn id_of(job: u32, subject: &Subject) -> Incarnation {
    Incarnation { job: JobId(job + 1), submitted: subject.submitted.0 / 1000, restarts: 0 }
}

fn index_of(id: Incarnation) -> u32 {
    id.job.0 - 1
}
