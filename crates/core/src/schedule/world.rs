//! A world for the schedule to decide in: a simulated workload manager, and nodes with RAM disks.
//!
//! It is modelled by what matters: what the workload manager does with each job, whether it has been heard of, and what is
//! physically true of each RAM disk (built, mounted, holding unsaved results). Time stands still; that a deadline passes is
//! an event like any other. What may happen next, and what the schedule is told of it, stands in [`happening`]; nothing
//! here checks anything.

mod happening;

use std::path::PathBuf;
use std::time::Duration;

pub(super) use self::happening::Happening;
use super::*;
use crate::{Bytes, EngineKind, Epoch, Incarnation, JobId, NodeName, Owner, QueuedJob, Request, Standing};

pub(super) const NOW: Time = Time(1_000_000);

/// What a RAM disk is found to have promised; less than a node.
pub(super) const SHARE: Bytes = Bytes(50 << 30);

/// How long a job waits before it comes before those who have not waited so long.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// What each RSA node lends.
pub(super) const CAPACITY: Bytes = Bytes(100 << 30);

/// What the workload manager really does with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Slurm {
    Waiting,
    Next,
    Running {
        prolog_ran: bool,
        /// Compute nodes where something of it runs.
        nodes: u8,
    },
    /// Its processes were told to end; on so many nodes they have not.
    Ending {
        nodes: u8,
    },
    Gone,
    /// It has not been submitted yet.
    Absent,
}

/// How far the workload manager has come with the burst buffer of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Buffer {
    /// It was not made known yet.
    No,
    SetUp,
    /// It waits for the job's input.
    StagingIn,
    StagedIn,
    /// The job has nodes, and it waits for them to show the RAM disk.
    PreRun,
    Running,
    /// It waits for the job's results.
    StagingOut,
    /// It was told that somebody must decide; and whether it was told since that this is over.
    Kept {
        told: bool,
    },
    TornDown,
}

/// A compute node of a run of a job; a later run has other ones.
fn compute_node(run: usize, index: u8) -> NodeName {
    format!("c{run}-{index}").parse().unwrap()
}

/// By which of its runs the schedule knows a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KnownRun {
    /// By the one that the workload manager knows, or by none.
    This,
    /// By the one before, of which processes may be left.
    Last,
    /// By one before that.
    Earlier,
}

/// What is physically true of a job's RAM disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Physical {
    pub(super) built: bool,
    /// What it was built for.
    pub(super) purpose: Option<Purpose>,
    /// Whether some node may show it.
    pub(super) mounted: bool,
    /// Whether unmounting was given up on a node.
    pub(super) given_up: bool,
    /// Whether it may hold what is nowhere else.
    pub(super) unsaved: bool,
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) schedule: Schedule,
    pub(super) slurm: Vec<Slurm>,
    pub(super) physical: Vec<Physical>,
    /// How many failures may still happen.
    pub(super) faults: u8,
    /// Nodes may be lost once.
    pub(super) losses: u8,
    /// The queue changes its mind about who is next a limited number of times.
    pub(super) swaps: u8,
    /// Every job has so many compute nodes. With none, jobs are gone as soon as they end.
    pub(super) compute_nodes: u8,
    /// Whether administrators drain nodes.
    pub(super) drains: bool,
    /// Whether all jobs have one number: each is submitted after the workload manager was started clean, and it may come back
    /// with an older state once.
    pub(super) one_number: bool,
    /// How often the workload manager may still come back with an older state, in which a job that runs has not started.
    pub(super) older_states: u8,
    /// How often each job was started without that the workload manager remembers it; and on how many nodes processes of
    /// the last such run are left.
    pub(super) runs: Vec<usize>,
    pub(super) left: Vec<u8>,
    /// How often the journal may still be lost.
    pub(super) journals: u8,
    /// Whether the queue has been seen since the journal was lost; and whose RAM disks have been found since.
    pub(super) queue_seen: bool,
    pub(super) journal_lost: bool,
    pub(super) found: Vec<bool>,
    /// Whether the first job depends on the second one.
    pub(super) depends: bool,
    /// Whether the workload manager holds each, as it was ordered; and whether that was ever ordered of the first one before the
    /// second one had ended.
    pub(super) held: Vec<bool>,
    /// Whether somebody has released it, which leaves the mark of the hold.
    pub(super) released: Vec<bool>,
    pub(super) held_in_time: bool,
    /// Of jobs with burst buffers: how far each has come. Empty if the workload manager knows none.
    pub(super) buffers: Vec<Buffer>,
    /// How many of them the workload manager may still lose before their jobs start, by a kill before it has saved them; and whose it
    /// has lost: it asks nothing more for them, and keeps the jobs in its queue.
    pub(super) buffer_losses: u8,
    pub(super) lost: Vec<bool>,
}

pub(super) fn id(index: usize) -> Incarnation {
    Incarnation { job: JobId(index as u32 + 1), submitted: index as u64 + 1, restarts: 0 }
}

/// The time of submission tells jobs of one number apart.
pub(super) fn index_of(id: Incarnation) -> usize {
    id.submitted as usize - 1
}

pub(super) fn node(index: usize) -> NodeName {
    format!("r{}", index + 1).parse().unwrap()
}

pub(super) fn site() -> Site {
    Site {
        debounce: Duration::ZERO,
        attempts: 2,
        stage_outs: 2,
        node_failures: 100,
        lock_in: LockIn::Priority,
        engine: EngineKind::Gluster,
        patience: PATIENCE,
        limits: Limits { ready: Duration::ZERO, ..Limits::default() },
        ..Site::default()
    }
}

pub(super) fn request(data_in: Option<&str>, data_out: Option<&str>, out_size: bool) -> Request {
    Request {
        data_in: data_in.map(PathBuf::from).into_iter().collect(),
        data_out: data_out.map(PathBuf::from).into_iter().collect(),
        out_size: out_size.then_some(Bytes(1)),
        ..Request::default()
    }
}

impl World {
    pub(super) fn new(jobs: usize, compute_nodes: u8, nodes: usize, site: Site, faults: u8) -> World {
        let names = (0..nodes).map(|index| (node(index), Node::new("default"))).collect();
        let mut schedule = Schedule::new(site, Vec::new(), names, 0, Epoch(0));
        for index in 0..nodes {
            schedule.handle(NOW, Event::NodeUp { node: node(index), capacity: CAPACITY }).unwrap();
        }
        World {
            schedule,
            slurm: vec![Slurm::Waiting; jobs],
            physical: vec![Physical::default(); jobs],
            faults,
            losses: 0,
            swaps: 0,
            compute_nodes,
            drains: false,
            one_number: false,
            older_states: 0,
            runs: vec![0; jobs],
            left: vec![0; jobs],
            journals: 0,
            queue_seen: true,
            journal_lost: false,
            found: vec![false; jobs],
            depends: false,
            held: vec![false; jobs],
            released: vec![false; jobs],
            held_in_time: false,
            buffers: Vec::new(),
            buffer_losses: 0,
            lost: vec![false; jobs],
        }
    }

    /// The same with jobs that have burst buffers.
    pub(super) fn with_burst_buffers(self) -> World {
        World { buffers: vec![Buffer::No; self.slurm.len()], ..self }
    }

    /// Whether the queue shows a job.
    pub(super) fn is_in_queue(&self, index: usize) -> bool {
        let waits_for_results =
            matches!(self.buffers.get(index), Some(Buffer::StagingOut | Buffer::Kept { .. }));
        match self.slurm[index] {
            Slurm::Absent => false,
            Slurm::Gone => waits_for_results,
            _ => true,
        }
    }

    /// Whether a job waits for one that has not ended.
    pub(super) fn is_dependent(&self, index: usize) -> bool {
        self.depends && index == 0 && self.slurm[1] != Slurm::Gone
    }

    pub(super) fn id(&self, index: usize) -> Incarnation {
        if self.one_number { Incarnation { job: JobId(1), ..id(index) } } else { id(index) }
    }

    pub(super) fn seen(&self, index: usize, requests: &[Request]) -> ObservedJob {
        let standing = match self.slurm[index] {
            Slurm::Waiting | Slurm::Next if self.held[index] => Standing::Held,
            Slurm::Waiting | Slurm::Next
                if self.buffers.get(index).is_some_and(|it| *it < Buffer::StagingIn) =>
            {
                Standing::Waiting
            }
            // Others are before it: then the queue gives that as the reason.
            Slurm::Waiting if self.buffers.get(index) == Some(&Buffer::StagingIn) => Standing::Waiting,
            Slurm::Next if self.buffers.get(index) == Some(&Buffer::StagingIn) => Standing::StagingIn,
            Slurm::Next if self.buffers.get(index) == Some(&Buffer::PreRun) => Standing::Configuring,
            Slurm::Waiting => Standing::Waiting,
            Slurm::Next => Standing::Next,
            Slurm::Running { .. } => Standing::Running,
            Slurm::Ending { .. } => Standing::Ending,
            Slurm::Gone | Slurm::Absent => Standing::Ended,
        };
        let job = QueuedJob {
            id: self.id(index),
            owner: Owner { uid: 1000, gid: 1000 },
            account: String::new(),
            standing,
            reason: String::new(),
            node_count: index as u32 % 3 + 1,
            nodes: self.nodes_of(index),
            start: matches!(self.slurm[index], Slurm::Running { .. } | Slurm::Ending { .. })
                .then_some(2 * NOW.0 / 1000 * self.runs[index] as u64),
            submitted: index as u64 + 1,
            priority: 100 - index as u64,
            qos: String::new(),
            held_for_input: self.held[index] || self.released[index],
            dependent: self.is_dependent(index),
            depends_on: self.is_dependent(index).then(|| self.id(1).job).into_iter().collect(),
            component_of: None,
            several: false,
            has_burst_buffer: !self.buffers.is_empty(),
            waits_for_results: self.slurm[index] == Slurm::Gone,
            burst_buffer_lost: self.lost[index],
        };
        let request = Some(requests[index].clone());
        ObservedJob { job, request, work_dir: "/".into(), io_nodes: self.nodes_of(index) }
    }

    /// The compute nodes of a job's last run.
    pub(super) fn nodes_of(&self, index: usize) -> Vec<NodeName> {
        (0..self.compute_nodes).map(|node| compute_node(self.runs[index], node)).collect()
    }

    /// By which run the schedule knows a job.
    pub(super) fn known_run(&self, index: usize) -> KnownRun {
        let known = self.schedule.jobs().get(&self.id(index)).and_then(|job| job.nodes.first());
        match known {
            Some(node)
                if self.runs[index].checked_sub(1).is_some_and(|run| *node == compute_node(run, 0)) =>
            {
                KnownRun::Last
            }
            Some(node) if *node != compute_node(self.runs[index], 0) => KnownRun::Earlier,
            _ => KnownRun::This,
        }
    }

    /// Whether there are processes on the nodes that the schedule knows a job to run on.
    pub(super) fn has_processes(&self, index: usize) -> bool {
        match self.known_run(index) {
            KnownRun::This => {
                matches!(self.slurm[index], Slurm::Running { nodes: 1.., .. } | Slurm::Ending { nodes: 1.. })
            }
            KnownRun::Last => self.left[index] > 0,
            // The next older state comes only when nothing is left of the run before.
            KnownRun::Earlier => false,
        }
    }

    /// Whether a job has a RAM disk that the schedule does not know of.
    pub(super) fn is_unknown(&self, index: usize) -> bool {
        let known = self.schedule.jobs().get(&self.id(index)).is_some_and(|job| job.allocation.is_some());
        self.physical[index].built && !known
    }

    /// The next daemon knows nothing; the RAM disks, and what guards results on their nodes, are there.
    fn lose_the_journal(&mut self) {
        self.journals -= 1;
        self.journal_lost = true;
        (self.queue_seen, self.losses) = (false, 1);
        self.found.fill(false);
        let old = &self.schedule;
        let nodes = old.nodes().keys().map(|name| (name.clone(), Node::new("default"))).collect();
        self.schedule = Schedule::new(old.site().clone(), Vec::new(), nodes, 0, Epoch(0)).with_beginning(NOW);
        for physical in &mut self.physical {
            // What was being built for the former daemon is removed by its lease.
            physical.built &= physical.purpose.is_some();
            physical.given_up = false;
        }
    }

    /// All that is kept is what the next daemon begins with; what was ordered and may not have been done is done again.
    pub(in crate::schedule) fn restart(&mut self) {
        let old = &self.schedule;
        let (order, epoch) = old.counters();
        let jobs = old.jobs().values().cloned().collect();
        let new = Schedule::new(old.site().clone(), jobs, old.nodes().clone(), order, epoch);
        self.schedule = new.with_leftover_on_compute(old.leftover_on_compute().clone());
    }

    /// What work that ended has done, or may have done.
    fn really_ends(&mut self, index: usize, work: Work, outcome: &Outcome) {
        // A part that has come back while the others were saved is not on disk.
        let misses_some =
            self.schedule.jobs()[&self.id(index)].salvage && !self.schedule.jobs()[&self.id(index)].broken;
        let physical = &mut self.physical[index];
        let done = matches!(outcome, Outcome::Done(_));
        if matches!((work, outcome), (Work::Mount, Outcome::Refused { .. } | Outcome::Later { .. })) {
            (physical.mounted, physical.unsaved) = (false, false);
        }
        match work {
            Work::Construct => physical.built = true,
            Work::Unmount { .. } if done => physical.mounted = false,
            Work::StageOut if done => physical.unsaved = misses_some,
            // What could not be removed keeps its node from being promised.
            Work::Destroy => *physical = Physical { unsaved: physical.unsaved, ..Physical::default() },
            _ => {}
        }
    }
    /// Notes what of the unmounting was given up, though some node may show it, now that an event was handled.
    pub(super) fn note_given_up(&mut self, before: &Schedule) {
        for (of, job) in before.jobs() {
            let force = matches!(job.under_way, Some(WorkOrder { work: Work::Unmount { force: true }, .. }));
            let after = self.schedule.jobs().get(of).map(|job| job.rsa_state);
            let physical = &mut self.physical[index_of(*of)];
            let over = !matches!(after, Some(RsaState::Unmounting | RsaState::UnmountNeeded));
            physical.given_up |= force && over && physical.mounted;
        }
    }

    /// What the workload manager and the nodes do with what was decided.
    pub(super) fn carry_out(&mut self, action: &Action) {
        match action {
            Action::HoldBack(..) => {
                self.held[0] = matches!(self.slurm[0], Slurm::Waiting);
                self.held_in_time |= self.held[0];
            }
            Action::Hold(_) if self.depends => self.held[0] = self.slurm[0] == Slurm::Next,
            Action::Hold(of) if !self.buffers.is_empty() => {
                let index = index_of(*of);
                self.held[index] = matches!(self.slurm[index], Slurm::Waiting | Slurm::Next);
                self.released[index] = false;
            }
            Action::Unmark(of) => self.released[index_of(*of)] = false,
            Action::LetGo(of) if self.depends || !self.buffers.is_empty() => self.held[index_of(*of)] = false,
            Action::EndStageOut(of) => {
                let buffer = &mut self.buffers[index_of(*of)];
                assert!(matches!(buffer, Buffer::Kept { .. }), "it does not wait: {buffer:?}");
                *buffer = Buffer::Kept { told: true };
            }
            Action::Begin(of, order) => {
                let job = &self.schedule.jobs()[of];
                let physical = &mut self.physical[index_of(*of)];
                match order.work {
                    // What it is for may have been decided anew.
                    Work::Construct | Work::StageIn => physical.purpose = Some(job.purpose),
                    Work::Mount => {
                        physical.mounted = true;
                        physical.unsaved |= job.purpose != Purpose::Input;
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }

    /// A job that is gone has left nothing.
    pub(super) fn leave(&mut self, job: &Job) {
        let physical = &mut self.physical[index_of(job.id)];
        // After the journal was lost, what is built is found later, and nothing was done about it.
        if !(self.journal_lost && physical.built) {
            *physical = Physical::default();
        }
    }
}
