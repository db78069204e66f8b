//! The simulation: one event after the other, in the order of time.
//!
//! All that happens in one moment is taken in a fixed order: what ends on the disk filesystem, what was to happen by itself, who
//! starts, and what the accelerator sees of it. So a simulation with the same input gives the same record, always.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, Ordering};

use ondeck_core::Bytes;
use ondeck_core::schedule::{Fault, Outcome, Purpose, RsaState, Time, Work};
use ondeck_core::timeline::{Phase, Timeline};

use crate::accelerator::{Accelerator, Subject, Todo};
use crate::disk::{Disk, Transfer};
use crate::io::{IoModel, JobIo};
use crate::machine::{Accelerated, Machine};
use crate::program::{self, Step};
use crate::record::{JobRecord, Record, Served};
use crate::recorder::TimelineRecorder;
use crate::trace::Trace;
use crate::workload_manager::{Order, WorkloadManager};

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Scenario<'a> {
    /// The jobs, all of which say how long they might run.
    pub trace: &'a Trace,
    /// The machine.
    pub machine: Machine,
    /// The accelerator, if there is one.
    pub accelerator: Option<Accelerated>,
    /// What jobs read and write.
    pub io: &'a IoModel,
    /// In which order they start.
    pub order: Order,
    /// What the random numbers of the model come from.
    pub seed: u64,
    /// When it is set, the simulation ends at once.
    pub stop: Option<&'a AtomicBool>,
}

/// Why a simulation can't be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    /// A job needs more nodes than there are.
    #[error("job {job} has {needs} nodes, and the machine has {has}; use --nodes {needs} or more")]
    MachineTooSmall {
        /// Its number in the log.
        job: u64,
        /// Its nodes.
        needs: u32,
        /// Those of the machine.
        has: u32,
    },
    /// Jobs wait, and nothing happens that they could wait for: a defect of the simulator.
    #[error("{jobs} jobs wait for ever; this is a defect of the simulator: please report it with the log")]
    Stuck {
        /// How many.
        jobs: usize,
    },
    /// It was to end at once.
    #[error("the simulation was stopped")]
    Stopped,
    /// More jobs than can be numbered.
    #[error("more than {most} jobs can't be simulated at once")]
    TooManyJobs {
        /// The most.
        most: u32,
    },
}

/// Simulated time begins here, so that no time is zero, which stands for "not known" elsewhere.
const BEGIN: u64 = 86_400_000;

/// The most jobs.
const MOST_JOBS: u32 = 1 << 30;

/// What happens by itself at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// The next job is submitted.
    Submission,
    /// A step of a job's program that needs no disk is over.
    StepOver(u32),
    /// Work for a job is over, all but its bytes on the disk filesystem.
    WorkOver { job: u32, number: u64, busy: bool },
    /// The same, and its output could not be covered, because it was being written.
    NotCovered { job: u32, number: u64 },
}

/// What is read from or written to the disk filesystem.
#[derive(Clone, Copy, Debug)]
enum DiskUse {
    /// A step of a job's program.
    Step(u32),
    /// Work for a job, and how long it takes beside that, in milliseconds.
    Work { job: u32, number: u64, rest_ms: u64 },
    /// Results that come home.
    Results { job: u32, number: u64 },
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It has no nodes yet.
    Waits,
    /// Its Prologs wait.
    Prolog,
    /// A step of its program, by its number; and whether its data is in RAM.
    Program { step: u32, in_ram: bool },
    /// Its Epilogs wait.
    Epilog,
    /// Its nodes are free.
    Ended,
}

/// A job while it is simulated.
#[derive(Clone, Copy, Debug)]
struct State {
    stage: Stage,
    started: Time,
    /// What was staged in, and has not been read.
    staged: Bytes,
    /// The checkpoint that is in RAM, the one that is on disk, and the output in RAM.
    checkpoint_in_ram: Bytes,
    checkpoint_on_disk: Bytes,
    output_in_ram: Bytes,
    /// What fills its RAM disk, or brings results home.
    copying: Option<Transfer>,
}

struct Simulation<'a> {
    machine: Machine,
    subjects: Vec<Subject>,
    states: Vec<State>,
    queue: WorkloadManager,
    disk: Disk<DiskUse>,
    accelerator: Option<Accelerator>,
    happenings: BinaryHeap<Reverse<(Time, u64, Happening)>>,
    sequence: u64,
    submitted: usize,
    /// How many jobs have not ended.
    left: usize,
    record: Record,
    timeline: Option<TimelineRecorder>,
    trace: &'a Trace,
}

/// Simulates all jobs, to the last result.
///
/// # Errors
/// [`Impossible`], before anything is simulated.
pub fn simulate(scenario: &Scenario<'_>) -> Result<Record, Impossible> {
    Ok(run(scenario, None)?.0)
}

/// The same, with what a picture shows: who had which nodes, when, and for what.
///
/// # Errors
/// [`Impossible`], before anything is simulated.
pub fn simulate_with_timeline(scenario: &Scenario<'_>) -> Result<(Record, Timeline), Impossible> {
    let rsa_nodes = scenario.accelerator.as_ref().map_or(0, |accelerator| accelerator.nodes);
    let recorder = TimelineRecorder::new(scenario.machine.nodes, rsa_nodes);
    let (record, timeline) = run(scenario, Some(recorder))?;
    Ok((record, timeline.unwrap_or_default()))
}

fn run(
    scenario: &Scenario<'_>,
    timeline: Option<TimelineRecorder>,
) -> Result<(Record, Option<Timeline>), Impossible> {
    let Scenario { trace, machine, accelerator, io, order, seed, stop } = scenario;
    if trace.jobs.len() > MOST_JOBS as usize {
        return Err(Impossible::TooManyJobs { most: MOST_JOBS });
    }
    if let Some(job) = trace.jobs.iter().find(|job| job.nodes > machine.nodes) {
        let (job, needs, has) = (job.number, job.nodes, machine.nodes);
        return Err(Impossible::MachineTooSmall { job, needs, has });
    }
    let subjects: Vec<Subject> = trace
        .jobs
        .iter()
        .map(|job| Subject {
            nodes: job.nodes,
            user: job.user.unwrap_or(0),
            submitted: Time(BEGIN + job.submitted * 1000),
            io: io.of_job(job, machine.alone(job.nodes), *seed),
        })
        .collect();
    let asked = trace.jobs.iter().map(|job| {
        let requested = job.requested.unwrap_or(job.run);
        (job.submitted * 1000, job.nodes, requested * 1000)
    });
    let idle = State {
        stage: Stage::Waits,
        started: Time(0),
        staged: Bytes::ZERO,
        checkpoint_in_ram: Bytes::ZERO,
        checkpoint_on_disk: Bytes::ZERO,
        output_in_ram: Bytes::ZERO,
        copying: None,
    };
    let jobs = trace.jobs.iter().map(|job| JobRecord {
        submitted_ms: job.submitted * 1000,
        nodes: job.nodes,
        ..JobRecord::default()
    });
    let queue = WorkloadManager::new(machine.nodes, *order, asked);
    let mut simulation = Simulation {
        machine: *machine,
        disk: Disk::new(machine.bandwidth()),
        accelerator: accelerator
            .clone()
            .filter(|it| it.nodes > 0)
            .map(|it| Accelerator::new(it, queue.places())),
        queue,
        happenings: BinaryHeap::new(),
        sequence: 0,
        submitted: 0,
        left: subjects.len(),
        record: Record { jobs: jobs.collect(), ..Record::default() },
        states: vec![idle; subjects.len()],
        subjects,
        timeline,
        trace,
    };
    simulation.live(|| stop.is_some_and(|stop| stop.load(Ordering::Relaxed)));
    if stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
        return Err(Impossible::Stopped);
    }
    if simulation.left > 0 {
        return Err(Impossible::Stuck { jobs: simulation.left });
    }
    Ok((simulation.record, simulation.timeline.map(TimelineRecorder::finish)))
}

impl Simulation<'_> {
    fn live(&mut self, stopped: impl Fn() -> bool) {
        self.submission_follows();
        while let Some(now) = self.next()
            && !stopped()
        {
            for (_, of) in self.disk.take_ended(now) {
                self.disk_is_done(now, of);
            }
            while let Some(Reverse((at, _, happening))) = self.happenings.peek().copied()
                && at <= now
            {
                self.happenings.pop();
                self.happens(now, happening);
            }
            for job in self.queue.pass(now) {
                self.starts(now, job);
            }
            if let Some(mut accelerator) = self.accelerator.take() {
                let states = &self.states;
                let runs_since = |job: u32| {
                    let state = states[job as usize];
                    matches!(state.stage, Stage::Prolog | Stage::Program { .. }).then_some(state.started)
                };
                let todo = accelerator.pass_time(now, &self.subjects, &self.queue, runs_since);
                self.accelerator = Some(accelerator);
                self.carry_out(now, todo);
            }
        }
        let (bytes, busy_ms) = self.disk.use_so_far();
        (self.record.totals.disk_bytes, self.record.totals.disk_busy_ms) = (bytes, busy_ms);
        // Copies of what was given up may go on for longer than anything else.
        let home = &mut self.record.totals.home_ms;
        *home = (*home).max(self.disk.last_used().0.saturating_sub(BEGIN));
        if let Some(accelerator) = &self.accelerator {
            let (node_ms, demotions) = accelerator.totals();
            (self.record.totals.rsa_node_ms, self.record.totals.demotions) = (node_ms, demotions);
        }
    }

    /// When something happens next.
    fn next(&self) -> Option<Time> {
        let happening = self.happenings.peek().map(|Reverse((at, ..))| *at);
        let accelerator = self.accelerator.as_ref().and_then(Accelerator::next);
        let disk = self.disk.next_end();
        // When all jobs have ended and all results are on disk, nobody looks at the queue any more.
        let all_is_done = self.left == 0
            && happening.is_none()
            && disk.is_none()
            && self.accelerator.as_ref().is_none_or(|accelerator| accelerator.known() == 0);
        if all_is_done {
            return None;
        }
        [happening, accelerator, disk].into_iter().flatten().min()
    }

    fn at(&mut self, at: Time, happening: Happening) {
        self.sequence += 1;
        self.happenings.push(Reverse((at, self.sequence, happening)));
    }

    fn submission_follows(&mut self) {
        if let Some(subject) = self.subjects.get(self.submitted) {
            self.at(subject.submitted, Happening::Submission);
        }
    }

    fn happens(&mut self, now: Time, happening: Happening) {
        match happening {
            Happening::Submission => {
                let job = self.submitted as u32;
                self.submitted += 1;
                let subject = &self.subjects[job as usize];
                let held = self.accelerator.as_ref().is_some_and(|accelerator| accelerator.holds(subject));
                self.queue.submit(job, held);
                if let Some(accelerator) = self.accelerator.as_mut().filter(|_| held) {
                    accelerator.submitted_held(now, job);
                }
                self.submission_follows();
            }
            Happening::StepOver(job) => self.step_is_over(now, job),
            Happening::WorkOver { job, number, busy } => {
                let outcome = if busy {
                    let why = "files are open".to_owned();
                    Outcome::Failed { why, blame: Vec::new(), fault: Fault::Busy }
                } else {
                    Outcome::Done(String::new())
                };
                self.work_is_over(now, job, number, outcome);
            }
            Happening::NotCovered { job, number } => {
                let why = "the output is being written".to_owned();
                self.work_is_over(now, job, number, Outcome::Later { why });
            }
        }
    }

    fn disk_is_done(&mut self, now: Time, of: DiskUse) {
        match of {
            DiskUse::Step(job) => self.step_is_over(now, job),
            DiskUse::Work { job, number, rest_ms } => {
                self.states[job as usize].copying = None;
                self.at(Time(now.0 + rest_ms), Happening::WorkOver { job, number, busy: false });
            }
            DiskUse::Results { job, number } => {
                let state = &mut self.states[job as usize];
                state.copying = None;
                let bytes = state.checkpoint_in_ram.0 + state.output_in_ram.0;
                (state.checkpoint_in_ram, state.output_in_ram) = (Bytes::ZERO, Bytes::ZERO);
                self.record.totals.staged_out.0 += bytes;
                self.at(now, Happening::WorkOver { job, number, busy: false });
            }
        }
    }

    /// A job has got its nodes.
    fn starts(&mut self, now: Time, job: u32) {
        let state = &mut self.states[job as usize];
        (state.stage, state.started) = (Stage::Prolog, now);
        self.record.jobs[job as usize].started_ms = now.0 - BEGIN;
        self.show(now, job, Some(Phase::Prolog));
        let subject = &self.subjects[job as usize];
        if let Some(accelerator) = self.accelerator.as_mut().filter(|it| it.serves(subject)) {
            self.record.jobs[job as usize].served = accelerator.served_before(job, subject);
            let todo = accelerator.starting(now, job, subject);
            self.carry_out(now, todo);
        }
        self.may_begin(now, job);
    }

    /// The program of a job begins when its Prologs are over.
    fn may_begin(&mut self, now: Time, job: u32) {
        if self.states[job as usize].stage != Stage::Prolog {
            return;
        }
        let subject = &self.subjects[job as usize];
        if let Some(accelerator) = &self.accelerator {
            if !accelerator.prolog_is_over(job, subject) {
                return;
            }
            let before = self.record.jobs[job as usize].served;
            self.record.jobs[job as usize].served = accelerator.served(job, subject, before);
        }
        self.begin_step(now, job, 0);
    }

    fn begin_step(&mut self, now: Time, job: u32, number: u32) {
        let subject = &self.subjects[job as usize];
        let io: JobIo = subject.io;
        let Some(step) = program::step(&io, number) else { return self.program_has_ended(now, job) };
        let (reads, writes) = self.accelerator.as_ref().map_or((false, false), |it| it.in_use(job, subject));
        let (bytes, in_ram, phase) = match step {
            Step::Compute(ms) => {
                self.states[job as usize].stage = Stage::Program { step: number, in_ram: false };
                self.record.jobs[job as usize].compute_ms += ms;
                self.show(now, job, Some(Phase::Computing));
                return self.at(Time(now.0 + ms), Happening::StepOver(job));
            }
            Step::Read(bytes) => (bytes, reads, Phase::Reading),
            Step::Checkpoint(bytes) => (bytes, writes, Phase::Checkpoint),
            Step::Output(bytes) => (bytes, writes, Phase::Writing),
        };
        self.states[job as usize].stage = Stage::Program { step: number, in_ram };
        if bytes == Bytes::ZERO {
            return self.at(now, Happening::StepOver(job));
        }
        self.show(now, job, Some(phase));
        let subject = &self.subjects[job as usize];
        if !in_ram {
            let link = self.machine.link.0.0 as f64;
            self.disk.begin(now, DiskUse::Step(job), bytes, subject.nodes, link);
            return;
        }
        self.record.jobs[job as usize].served = Served::InRam;
        let rsa = self.accelerator.as_ref().map_or(0.0, |accelerator| {
            let nodes = accelerator.allocation(job, subject).map_or(0, |(_, nodes, _)| nodes);
            f64::from(nodes) * accelerator.config().link.0.0 as f64
        });
        let rate = (f64::from(subject.nodes) * self.machine.link.0.0 as f64).min(rsa).max(1.0);
        let ms = (bytes.0 as f64 / rate * 1000.0).ceil() as u64;
        self.at(Time(now.0 + ms), Happening::StepOver(job));
    }

    fn step_is_over(&mut self, now: Time, job: u32) {
        let Stage::Program { step, in_ram } = self.states[job as usize].stage else { return };
        if in_ram {
            let (state, totals) = (&mut self.states[job as usize], &mut self.record.totals);
            match program::step(&self.subjects[job as usize].io, step) {
                Some(Step::Read(_)) => totals.read_from_ram.0 += std::mem::take(&mut state.staged).0,
                Some(Step::Checkpoint(bytes)) => {
                    totals.written_to_ram.0 += bytes.0;
                    totals.overwritten.0 += state.checkpoint_in_ram.0;
                    state.checkpoint_in_ram = bytes;
                }
                Some(Step::Output(bytes)) => {
                    totals.written_to_ram.0 += bytes.0;
                    state.output_in_ram.0 += bytes.0;
                }
                Some(Step::Compute(_)) | None => {}
            }
        } else if let Some(Step::Checkpoint(bytes)) = program::step(&self.subjects[job as usize].io, step) {
            self.states[job as usize].checkpoint_on_disk = bytes;
        }
        self.begin_step(now, job, step + 1);
    }

    fn program_has_ended(&mut self, now: Time, job: u32) {
        self.states[job as usize].stage = Stage::Epilog;
        self.show(now, job, Some(Phase::Epilog));
        let subject = &self.subjects[job as usize];
        if let Some(accelerator) = self.accelerator.as_mut().filter(|it| it.serves(subject)) {
            let todo = accelerator.ending(now, job, subject);
            self.carry_out(now, todo);
        }
        self.may_leave(now, job);
    }

    /// A job's nodes are free when none of them shows its RAM disk.
    fn may_leave(&mut self, now: Time, job: u32) {
        let subject = &self.subjects[job as usize];
        let shown = self.accelerator.as_ref().is_some_and(|accelerator| accelerator.is_shown(job, subject));
        if self.states[job as usize].stage != Stage::Epilog || shown {
            return;
        }
        self.states[job as usize].stage = Stage::Ended;
        self.left -= 1;
        self.record.jobs[job as usize].ended_ms = now.0 - BEGIN;
        let totals = &mut self.record.totals;
        totals.makespan_ms = totals.makespan_ms.max(now.0 - BEGIN);
        totals.home_ms = totals.home_ms.max(now.0 - BEGIN);
        self.show(now, job, None);
        self.queue.ended(job);
    }

    fn carry_out(&mut self, now: Time, todo: Vec<Todo>) {
        for todo in todo {
            match todo {
                Todo::Begin { job, number, work } => self.begin_work(now, job, number, work),
                Todo::Hold(job, held) => {
                    self.queue.set_held(job, held);
                    if let Some(accelerator) = &mut self.accelerator {
                        accelerator.queue_has_changed(now);
                    }
                }
                Todo::InFront(job, in_front) => {
                    self.queue.set_in_front(job, in_front);
                    let subject = &self.subjects[job as usize];
                    if let Some(accelerator) = self.accelerator.as_mut().filter(|_| !in_front) {
                        let more = accelerator.unlocked(now, job, subject);
                        self.carry_out(now, more);
                    }
                }
                Todo::Changed(job) => {
                    self.show_ram_disk(now, job);
                    self.may_begin(now, job);
                    self.may_leave(now, job);
                }
            }
        }
    }

    fn work_is_over(&mut self, now: Time, job: u32, number: u64, outcome: Outcome) {
        let subject = &self.subjects[job as usize];
        if let Some(accelerator) = &mut self.accelerator {
            let todo = accelerator.ended(now, job, subject, number, outcome);
            self.carry_out(now, todo);
        }
    }

    fn begin_work(&mut self, now: Time, job: u32, number: u64, work: Work) {
        let Some(accelerator) = &self.accelerator else { return };
        let subject = &self.subjects[job as usize];
        let config = accelerator.config();
        let steps = config.steps;
        let (purpose, nodes, _) =
            accelerator.allocation(job, subject).unwrap_or((Purpose::Input, 1, RsaState::Initial));
        let link = config.staging(nodes);
        let ms = |time: std::time::Duration| time.as_millis() as u64;
        let io = subject.io;
        // What took too long and was given up, or is to be stopped, is not copied any further.
        self.stop_copying(now, job);
        let state = &mut self.states[job as usize];
        let over = Happening::WorkOver { job, number, busy: false };
        let of = DiskUse::Work { job, number, rest_ms: ms(steps.prepare) };
        match work {
            Work::Construct => self.at(Time(now.0 + ms(steps.construct)), over),
            Work::StageIn if purpose != Purpose::Output && io.input > Bytes::ZERO => {
                state.staged = io.input;
                self.record.totals.staged_in.0 += io.input.0;
                state.copying = Some(self.disk.begin(now, of, io.input, nodes, link));
            }
            // What the output directory has already is copied before it is covered.
            Work::StageIn if state.checkpoint_on_disk > Bytes::ZERO => {
                state.copying = Some(self.disk.begin(now, of, state.checkpoint_on_disk, nodes, link));
            }
            Work::StageIn => self.at(Time(now.0 + ms(steps.prepare)), over),
            Work::StopStageIn => self.at(Time(now.0 + ms(steps.stop)), over),
            Work::Mount if state.stage == Stage::Prolog => self.at(Time(now.0 + ms(steps.mount)), over),
            // The program runs, and must not be writing.
            Work::Mount => {
                let writes = matches!(state.stage, Stage::Program { step, .. } if step > 0 && step % 2 == 0);
                let late = if writes { Happening::NotCovered { job, number } } else { over };
                self.at(Time(now.0 + ms(steps.late_mount)), late);
            }
            Work::Unmount { force } => {
                let uses = matches!(state.stage, Stage::Program { in_ram: true, .. });
                let busy = uses && !force;
                self.at(Time(now.0 + ms(steps.unmount)), Happening::WorkOver { job, number, busy });
            }
            Work::StageOut => {
                let bytes = Bytes(state.checkpoint_in_ram.0 + state.output_in_ram.0);
                let of = DiskUse::Results { job, number };
                state.copying = Some(self.disk.begin(now, of, bytes, nodes, link));
            }
            Work::Destroy => {
                // What was staged for a program that never read it.
                self.record.totals.wasted.0 += std::mem::take(&mut state.staged).0;
                self.at(Time(now.0 + ms(steps.destroy)), over);
            }
        }
    }

    /// Nothing is copied for a job any more. What was not copied of its input was not staged in.
    fn stop_copying(&mut self, now: Time, job: u32) {
        let state = &mut self.states[job as usize];
        let Some(transfer) = state.copying.take() else { return };
        let left = self.disk.stop(now, transfer).unwrap_or_default();
        let not_staged = left.0.min(state.staged.0);
        state.staged.0 -= not_staged;
        self.record.totals.staged_in.0 -= not_staged;
    }

    fn show(&mut self, now: Time, job: u32, phase: Option<Phase>) {
        if let Some(timeline) = &mut self.timeline {
            let (number, nodes) = (self.trace.jobs[job as usize].number, self.subjects[job as usize].nodes);
            timeline.compute(now.0 - BEGIN, job, number, nodes, phase);
        }
    }

    fn show_ram_disk(&mut self, now: Time, job: u32) {
        let Some(accelerator) = &self.accelerator else { return };
        let subject = &self.subjects[job as usize];
        let allocation = accelerator.allocation(job, subject);
        if allocation.is_none() {
            let totals = &mut self.record.totals;
            totals.home_ms = totals.home_ms.max(now.0 - BEGIN);
        }
        if let Some(timeline) = &mut self.timeline {
            let number = self.trace.jobs[job as usize].number;
            timeline.ram_disk(now.0 - BEGIN, job, number, allocation.map(|(_, nodes, state)| (nodes, state)));
        }
    }
}
