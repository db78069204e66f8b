//! The model check: every order of every event and failure, for two jobs and three nodes.
//!
//! The world around the schedule is modelled by what matters: what the workload manager does with each job, whether it
//! has been heard of, and what is physically true of each RAM disk (built, mounted, holding unsaved results). Time stands
//! still; that a deadline passes is an event like any other. After every event the invariants are asserted; and from
//! every state everything can come to an end: jobs leave, and the nodes are free.

use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::path::PathBuf;
use std::time::Duration;

use super::job::Work;
use super::turns::nobody_overtakes;
use super::*;
use crate::{
    Bytes, EngineKind, Epoch, Incarnation, JobId, NodeName, Owner, QueuedJob, RamDiskId, Request, Standing,
    WaitPolicy,
};

const NOW: Time = Time(1_000_000);

/// What a RAM disk is found to have promised; less than a node.
const SHARE: Bytes = Bytes(50 << 30);

/// How long a job waits before it comes before those who have not waited so long.
const PATIENCE: Duration = Duration::from_secs(600);

/// What each RSA node lends.
const CAPACITY: Bytes = Bytes(100 << 30);

/// What the workload manager really does with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Slurm {
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

/// A compute node of a run of a job; a later run has other ones.
fn compute_node(run: usize, index: u8) -> NodeName {
    format!("c{run}-{index}").parse().unwrap()
}

/// What is physically true of a job's RAM disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct Physical {
    built: bool,
    /// What it was built for.
    purpose: Option<Purpose>,
    /// Whether some node may show it.
    mounted: bool,
    /// Whether unmounting was given up on a node.
    given_up: bool,
    /// Whether it may hold what is nowhere else.
    unsaved: bool,
}

#[derive(Clone)]
struct World {
    schedule: Schedule,
    slurm: Vec<Slurm>,
    physical: Vec<Physical>,
    /// How many failures may still happen.
    faults: u8,
    /// Nodes may be lost once.
    losses: u8,
    /// The queue changes its mind about who is next a limited number of times.
    swaps: u8,
    /// Every job has so many compute nodes. With none, jobs are gone as soon as they end.
    compute_nodes: u8,
    /// Whether administrators drain nodes.
    drains: bool,
    /// Whether all jobs have one number: each is submitted after the workload manager was started clean, and it may come back
    /// with an older state once.
    one_number: bool,
    /// How often the workload manager may still come back with an older state, in which a job that runs has not started.
    older_states: u8,
    /// How often each job was started without that the workload manager remembers it; and on how many nodes processes of
    /// the last such run are left.
    runs: Vec<usize>,
    left: Vec<u8>,
    /// How often the journal may still be lost.
    journals: u8,
    /// Whether the queue has been seen since the journal was lost; and whose RAM disks have been found since.
    queue_seen: bool,
    journal_lost: bool,
    found: Vec<bool>,
    /// Whether the first job depends on the second one.
    depends: bool,
    /// Whether the workload manager holds the first one, as it was ordered; and whether it was ever ordered before the
    /// second one had ended.
    held: bool,
    held_in_time: bool,
}

#[derive(Clone, Debug)]
enum Happening {
    Becomes(usize, Slurm),
    Queue,
    Prolog(usize),
    Epilog(usize),
    /// The workload manager comes back with an older state, in which a job that runs has not started.
    OlderState(usize),
    /// A node ends what it has of the run that the workload manager has forgotten.
    LateEpilog(usize),
    Ends(usize, Outcome),
    TaskTimesOut(usize),
    EndingTimesOut(usize),
    PauseEnds(usize),
    PrologGivenUp(usize),
    DelayEnds(usize),
    /// It has waited for RSA nodes beyond patience.
    HasWaited(usize),
    Lost(usize),
    Back(usize),
    Broken(usize),
    Whole(usize),
    Cleaned(usize),
    /// A job has been held for as long as it may be.
    HeldTooLong(usize),
    /// What keeps a job in front of the queue is undone.
    Unlocked(usize),
    /// The daemon is killed, and another one reads the journal.
    Restart,
    /// The journal is lost, and a daemon with an empty one takes over.
    JournalLost,
    /// The RAM disk that was built for a job is found.
    Found(usize),
    /// A node that has not answered since is given up.
    GiveUp(usize),
    /// The workload manager is started clean, and gives the number of the one job to the other.
    UsedAgain(usize, usize),
    Drain(usize),
    Resume(usize),
    Retry(usize),
    Salvage(usize),
    Abandon(usize),
}

impl Happening {
    fn is_fault(&self) -> bool {
        match self {
            Happening::Ends(_, outcome) => !matches!(outcome, Outcome::Done(_) | Outcome::Tight(_)),
            Happening::TaskTimesOut(_)
            | Happening::EndingTimesOut(_)
            | Happening::Lost(_)
            | Happening::Broken(_) => true,
            _ => false,
        }
    }
}

fn id(index: usize) -> Incarnation {
    Incarnation { job: JobId(index as u32 + 1), submitted: index as u64 + 1, restarts: 0 }
}

/// The time of submission tells jobs of one number apart.
fn index_of(id: Incarnation) -> usize {
    id.submitted as usize - 1
}

fn node(index: usize) -> NodeName {
    format!("r{}", index + 1).parse().unwrap()
}

fn site() -> Site {
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

impl World {
    fn new(jobs: usize, compute_nodes: u8, nodes: usize, site: Site, faults: u8) -> World {
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
            held: false,
            held_in_time: false,
        }
    }

    /// Whether a job waits for one that has not ended.
    fn is_dependent(&self, index: usize) -> bool {
        self.depends && index == 0 && self.slurm[1] != Slurm::Gone
    }

    fn id(&self, index: usize) -> Incarnation {
        if self.one_number { Incarnation { job: JobId(1), ..id(index) } } else { id(index) }
    }

    fn seen(&self, index: usize, requests: &[Request]) -> Seen {
        let standing = match self.slurm[index] {
            Slurm::Waiting | Slurm::Next if self.held && index == 0 => Standing::Held,
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
            held_for_input: self.held && index == 0,
            dependent: self.is_dependent(index),
            depends_on: self.is_dependent(index).then(|| self.id(1).job).into_iter().collect(),
            component_of: None,
        };
        let request = Some(requests[index].clone());
        Seen { job, request, work_dir: "/".into(), io_nodes: self.nodes_of(index) }
    }

    /// The compute nodes of a job's last run.
    fn nodes_of(&self, index: usize) -> Vec<NodeName> {
        (0..self.compute_nodes).map(|node| compute_node(self.runs[index], node)).collect()
    }

    /// Whether the schedule knows a job by a run that the workload manager has forgotten.
    fn knows_an_earlier_run(&self, index: usize) -> bool {
        let known = self.schedule.jobs().get(&self.id(index)).and_then(|job| job.nodes.first());
        known.is_some_and(|node| *node != compute_node(self.runs[index], 0))
    }

    /// Whether there are processes on the nodes that the schedule knows a job to run on.
    fn has_processes(&self, index: usize) -> bool {
        if self.knows_an_earlier_run(index) {
            return self.left[index] > 0;
        }
        matches!(self.slurm[index], Slurm::Running { nodes: 1.., .. } | Slurm::Ending { nodes: 1.. })
    }

    /// What can happen next.
    fn happenings(&self) -> Vec<Happening> {
        let mut all = self.all_happenings();
        all.retain(|happening| self.faults > 0 || !happening.is_fault());
        all
    }

    fn all_happenings(&self) -> Vec<Happening> {
        let mut all = vec![Happening::Queue];
        if self.one_number && self.swaps < 2 {
            for (old, state) in self.slurm.iter().enumerate() {
                let next = self.slurm.iter().position(|state| matches!(state, Slurm::Absent | Slurm::Gone));
                let next = next.filter(|next| *next != old);
                if let Some(next) = next.filter(|_| !matches!(state, Slurm::Absent)) {
                    all.push(Happening::UsedAgain(old, next));
                }
            }
        }
        if self.journals > 0 {
            all.push(Happening::JournalLost);
        }
        for index in 0..self.slurm.len() {
            if self.queue_seen && self.is_unknown(index) && !self.found[index] {
                all.push(Happening::Found(index));
            }
        }
        for index in 0..self.slurm.len() {
            match self.slurm[index] {
                Slurm::Waiting => {
                    if self.swaps < 2 && !self.is_dependent(index) && !(self.held && index == 0) {
                        all.push(Happening::Becomes(index, Slurm::Next));
                    }
                    all.push(Happening::Becomes(index, Slurm::Gone));
                }
                Slurm::Next => {
                    if self.swaps < 2 {
                        all.push(Happening::Becomes(index, Slurm::Waiting));
                    }
                    let running = Slurm::Running { prolog_ran: false, nodes: self.compute_nodes };
                    if !(self.held && index == 0) {
                        all.push(Happening::Becomes(index, running));
                    }
                    all.push(Happening::Becomes(index, Slurm::Gone));
                }
                Slurm::Running { prolog_ran, nodes } => {
                    if self.older_states > 0 && self.left[index] == 0 {
                        all.push(Happening::OlderState(index));
                    }
                    // One that had waited for the former scheduler asks again.
                    let asks_again = |job: &Job| job.prolog == Prolog::Expected;
                    if !prolog_ran || self.schedule.jobs().get(&self.id(index)).is_some_and(asks_again) {
                        all.push(Happening::Prolog(index));
                    }
                    all.push(Happening::Epilog(index));
                    let end = if nodes == 0 { Slurm::Gone } else { Slurm::Ending { nodes } };
                    all.push(Happening::Becomes(index, end));
                }
                Slurm::Ending { .. } => all.push(Happening::Epilog(index)),
                Slurm::Gone | Slurm::Absent => {}
            }
            if self.left[index] > 0 {
                all.push(Happening::LateEpilog(index));
            }
            let Some(job) = self.schedule.jobs().get(&self.id(index)) else { continue };
            if let Some(task) = job.task {
                all.push(Happening::Ends(index, Outcome::Done(String::new())));
                all.push(Happening::TaskTimesOut(index));
                let mut faults = vec![Fault::Again];
                match task.work {
                    Work::Construct if job.older => faults.push(Fault::Elsewhere),
                    Work::StageIn => faults.push(Fault::User),
                    Work::StageOut => faults.extend([Fault::User, Fault::Lost]),
                    Work::Unmount { force: false } => faults.push(Fault::Busy),
                    _ => {}
                }
                match task.work {
                    Work::StageIn => all.push(Happening::Ends(index, Outcome::Tight(String::new()))),
                    Work::Mount => {
                        let refused = Outcome::Refused { why: String::new(), fault: Fault::User };
                        all.push(Happening::Ends(index, refused));
                        if job.prolog == Prolog::Over {
                            all.push(Happening::Ends(index, Outcome::Later { why: String::new() }));
                        }
                    }
                    _ => {}
                }
                for fault in faults {
                    let blame = match (task.work, &job.allocation) {
                        (Work::Construct | Work::Destroy, Some(allocation)) => {
                            vec![allocation.nodes[0].clone()]
                        }
                        _ => Vec::new(),
                    };
                    let outcome = Outcome::Failed { why: String::new(), blame, fault };
                    all.push(Happening::Ends(index, outcome));
                }
            }
            if job.unlocking {
                all.push(Happening::Unlocked(index));
            }
            if self.depends && job.held && job.rsa_state == RsaState::Initial {
                all.push(Happening::HeldTooLong(index));
            }
            if job.prolog == Prolog::Waiting {
                // Of all else, the next daemon knows the same.
                all.push(Happening::Restart);
            }
            if job.not_before.is_some() {
                all.push(Happening::PauseEnds(index));
            }
            if job.ending.is_some() {
                all.push(Happening::EndingTimesOut(index));
            }
            if job.prolog_until.is_some() {
                all.push(Happening::PrologGivenUp(index));
            }
            if job.switch_at.is_some() && !job.delay_over {
                all.push(Happening::DelayEnds(index));
            }
            // What is refused changes nothing.
            let refused = job.unsure && job.still_runs;
            if matches!(job.rsa_state, RsaState::Held | RsaState::Lost) && !refused {
                all.push(Happening::Retry(index));
            }
            if job.rsa_state == RsaState::Lost && !refused {
                all.push(Happening::Salvage(index));
            }
            if matches!(job.rsa_state, RsaState::Held | RsaState::Lost | RsaState::StagingOut) && !refused {
                all.push(Happening::Abandon(index));
            }
            if job.allocation.is_some() && self.losses == 0 {
                all.push(Happening::Broken(index));
            }
            if job.broken {
                all.push(Happening::Whole(index));
            }
            if job.lacking == Some(NOW) {
                all.push(Happening::HasWaited(index));
            }
        }
        for (index, found) in self.schedule.nodes().values().enumerate() {
            if found.up && self.losses == 0 {
                all.push(Happening::Lost(index));
            }
            // What the node has is told of before the node.
            let all_found = (0..self.slurm.len()).all(|index| self.found[index] || !self.is_unknown(index));
            if (!found.up || !found.heard) && self.queue_seen && all_found {
                all.push(Happening::Back(index));
            }
            if !found.heard && all_found {
                all.push(Happening::GiveUp(index));
            }
            if !found.residue.is_empty() {
                all.push(Happening::Cleaned(index));
            }
            if self.drains {
                let drained = !found.drained.is_empty();
                all.push(if drained { Happening::Resume(index) } else { Happening::Drain(index) });
            }
        }
        if self.drains {
            all.push(Happening::Restart);
        }
        all
    }

    /// Whether a job has a RAM disk that the schedule does not know of.
    fn is_unknown(&self, index: usize) -> bool {
        let known = self.schedule.jobs().get(&self.id(index)).is_some_and(|job| job.allocation.is_some());
        self.physical[index].built && !known
    }

    /// Lets a time that a job waits for come.
    fn due(&mut self, index: usize, which: impl Fn(&mut Job)) -> Event {
        which(self.schedule.jobs.get_mut(&self.id(index)).unwrap());
        Event::Tick
    }

    fn happen(&mut self, happening: &Happening, requests: &[Request]) {
        self.faults -= u8::from(happening.is_fault());
        let event = match happening {
            Happening::Becomes(index, to) => {
                if matches!(
                    (self.slurm[*index], to),
                    (Slurm::Waiting, Slurm::Next) | (Slurm::Next, Slurm::Waiting)
                ) {
                    self.swaps += 1;
                }
                self.slurm[*index] = *to;
                return;
            }
            Happening::JournalLost => return self.lose_the_journal(),
            Happening::UsedAgain(old, next) => {
                // What ran goes on where nobody looks, and has ended soon.
                (self.slurm[*old], self.slurm[*next]) = (Slurm::Gone, Slurm::Waiting);
                self.swaps += 1;
                return;
            }
            Happening::Found(index) => {
                self.found[*index] = true;
                let physical = self.physical[*index];
                let Seen { job, work_dir, .. } = self.seen(*index, requests);
                Event::Found(Box::new(Found {
                    ramdisk: RamDiskId { name: job.id.ramdisk(), epoch: Epoch(NOW.0 * 2000) },
                    job: job.id,
                    owner: job.owner,
                    account: job.account,
                    request: requests[*index].clone(),
                    work_dir,
                    purpose: physical.purpose.unwrap(),
                    nodes: vec![node(0)],
                    promise: SHARE,
                    guarded: physical.unsaved,
                    runs: self.has_processes(*index),
                    fault: None,
                }))
            }
            Happening::GiveUp(index) => Event::GiveUp(node(*index)),
            Happening::Queue => Event::Queue {
                taken: Time(NOW.0 + 1),
                jobs: (0..self.slurm.len())
                    .filter(|index| !matches!(self.slurm[*index], Slurm::Gone | Slurm::Absent))
                    .map(|index| self.seen(index, requests))
                    .collect(),
            },
            Happening::Prolog(index) => {
                let Slurm::Running { nodes, .. } = self.slurm[*index] else { unreachable!() };
                self.slurm[*index] = Slurm::Running { prolog_ran: true, nodes };
                Event::Starting(Box::new(self.seen(*index, requests)))
            }
            Happening::Epilog(index) => {
                // Also of a job that goes on: a node may have failed it.
                let (Slurm::Running { nodes, .. } | Slurm::Ending { nodes }) = &mut self.slurm[*index] else {
                    unreachable!()
                };
                *nodes = nodes.saturating_sub(1);
                let left = *nodes;
                if left == 0 {
                    self.slurm[*index] = Slurm::Gone;
                }
                Event::Ending { job: self.id(*index), node: compute_node(self.runs[*index], left) }
            }
            Happening::OlderState(index) => {
                let Slurm::Running { nodes, .. } = self.slurm[*index] else { unreachable!() };
                (self.slurm[*index], self.left[*index]) = (Slurm::Next, nodes);
                self.runs[*index] += 1;
                self.older_states -= 1;
                return;
            }
            Happening::LateEpilog(index) => {
                self.left[*index] -= 1;
                let node = compute_node(self.runs[*index] - 1, self.left[*index]);
                Event::Ending { job: self.id(*index), node }
            }
            Happening::Ends(index, outcome) => {
                let task = self.schedule.jobs()[&self.id(*index)].task.unwrap();
                self.really_ends(*index, task.work, outcome);
                Event::Ended { job: self.id(*index), number: task.number, outcome: outcome.clone() }
            }
            Happening::TaskTimesOut(index) => {
                let work = self.schedule.jobs()[&self.id(*index)].task.unwrap().work;
                let late = Outcome::Failed { why: String::new(), blame: Vec::new(), fault: Fault::Again };
                self.really_ends(*index, work, &late);
                self.due(*index, |job| job.task.as_mut().unwrap().until = NOW)
            }
            Happening::EndingTimesOut(index) => {
                // Whatever runs there is out of reach.
                if self.knows_an_earlier_run(*index) {
                    self.left[*index] = 0;
                } else {
                    self.slurm[*index] = Slurm::Gone;
                }
                self.due(*index, |job| job.ending = Some(NOW))
            }
            Happening::PauseEnds(index) => self.due(*index, |job| job.not_before = Some(NOW)),
            Happening::PrologGivenUp(index) => self.due(*index, |job| job.prolog_until = Some(NOW)),
            Happening::HasWaited(index) => {
                self.due(*index, |job| job.lacking = Some(Time(NOW.0 - PATIENCE.as_millis() as u64)))
            }
            Happening::HeldTooLong(index) => {
                let since = Time(NOW.0 - self.schedule.site().limits.hold.as_millis() as u64);
                self.due(*index, |job| job.since = since)
            }
            Happening::DelayEnds(index) => self.due(*index, |job| job.switch_at = Some(NOW)),
            Happening::Lost(index) => {
                self.losses += 1;
                Event::NodeLost(node(*index))
            }
            Happening::Back(index) => Event::NodeUp { node: node(*index), capacity: CAPACITY },
            Happening::Broken(index) => {
                self.losses += 1;
                let ramdisk = self.schedule.jobs()[&self.id(*index)].ramdisk().unwrap();
                let node =
                    self.schedule.jobs()[&self.id(*index)].allocation.as_ref().unwrap().nodes[0].clone();
                Event::Broken { ramdisk, node, why: String::new() }
            }
            Happening::Whole(index) => match self.schedule.jobs()[&self.id(*index)].ramdisk() {
                Some(ramdisk) => Event::Whole(ramdisk),
                None => return,
            },
            Happening::Cleaned(index) => {
                let ramdisk = self.schedule.nodes()[&node(*index)].residue.first().unwrap().clone();
                Event::Cleaned { node: node(*index), ramdisk }
            }
            Happening::Unlocked(index) => Event::Unlocked(self.id(*index)),
            Happening::Restart => return self.restart(),
            Happening::Drain(index) => Event::Drain { node: node(*index), why: "somebody".into() },
            Happening::Resume(index) => Event::Resume(node(*index)),
            Happening::Retry(index) => Event::Retry { job: self.id(*index), salvage: false },
            Happening::Salvage(index) => Event::Retry { job: self.id(*index), salvage: true },
            Happening::Abandon(index) => {
                self.physical[*index].unsaved = false;
                Event::Abandon { job: self.id(*index), by: "somebody".into() }
            }
        };
        self.queue_seen |= matches!(event, Event::Queue { .. });
        let before = self.schedule.clone();
        let effects = self.schedule.handle(NOW, event).unwrap();
        nobody_overtakes(&before, &self.schedule, NOW);
        self.check_step(&before, &effects);
        if let Happening::Found(index) = happening
            && self.is_unknown(*index)
        {
            // It holds nothing, and nobody goes on with it: whoever looks at the nodes removes it.
            assert!(!self.physical[*index].unsaved, "results are left where nobody sees to them");
            self.physical[*index] = Physical::default();
        }
        self.check();
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
    fn restart(&mut self) {
        let old = &self.schedule;
        let (task, epoch) = old.counters();
        let jobs = old.jobs().values().cloned().collect();
        let new = Schedule::new(old.site().clone(), jobs, old.nodes().clone(), task, epoch);
        self.schedule = new.with_strays(old.strays().clone());
        let again = self.schedule.resume();
        for job in self.schedule.jobs().values() {
            assert_eq!(again.contains(&Action::LockIn(job.id)), job.locked_in);
            assert_eq!(again.contains(&Action::UndoLockIn(job.id)), job.unlocking);
            assert!(job.task.is_none_or(|task| again.contains(&Action::Begin(job.id, task))));
        }
        self.check();
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

    /// What must hold of every step.
    fn check_step(&mut self, before: &Schedule, effects: &Effects) {
        for (of, job) in before.jobs() {
            let force = matches!(job.task, Some(Task { work: Work::Unmount { force: true }, .. }));
            let after = self.schedule.jobs().get(of).map(|job| job.rsa_state);
            let physical = &mut self.physical[index_of(*of)];
            let over = !matches!(after, Some(RsaState::Unmounting | RsaState::UnmountNeeded));
            // Unmounting was given up, though some node may show it.
            physical.given_up |= force && over && physical.mounted;
        }
        let with_processes: Vec<bool> =
            (0..self.slurm.len()).map(|index| self.has_processes(index)).collect();
        for action in &effects.actions {
            self.check_hold(action);
            let Action::Begin(of, task) = action else { continue };
            let index = index_of(*of);
            let job = &self.schedule.jobs()[of];
            let physical = &mut self.physical[index];
            match task.work {
                Work::Construct => {
                    assert!(!physical.built, "built twice");
                    physical.purpose = Some(job.purpose);
                }
                Work::Mount => {
                    physical.mounted = true;
                    physical.unsaved |= job.purpose != Purpose::Input;
                    assert!(job.job_state == JobState::Running);
                }
                Work::StageOut => {
                    assert!(!job.salvage || job.broken, "what is whole is given up");
                    assert!(!physical.mounted || physical.given_up, "staged out while a node may write");
                }
                Work::Destroy => {
                    assert!(!physical.unsaved, "results destroyed");
                    assert!(!physical.mounted || physical.given_up, "destroyed while mounted");
                }
                Work::Unmount { force: true } => {
                    let runs = with_processes[index];
                    assert!(!runs || job.broken || job.mount_failed, "taken away from processes that run");
                }
                // What it is for may have been decided anew.
                Work::StageIn => physical.purpose = Some(job.purpose),
                Work::StopStageIn | Work::Unmount { .. } => {}
            }
        }
        for job in &effects.gone {
            let physical = &mut self.physical[index_of(job.id)];
            assert!(job.allocation.is_none() && job.task.is_none() && !job.results, "{job:?}");
            if self.journal_lost && physical.built {
                // It is found later, and nothing was done about it.
                continue;
            }
            assert!(!physical.unsaved);
            assert!(!job.locked_in && !job.unlocking);
            *physical = Physical::default();
        }
    }

    /// A hold for the results of another job ends when these are home, or nobody can wait for them.
    fn check_hold(&mut self, action: &Action) {
        match action {
            Action::HoldBack(of, _) => {
                assert!(index_of(*of) == 0 && self.is_dependent(0), "held, and depends on nobody");
                self.held = matches!(self.slurm[0], Slurm::Waiting);
                self.held_in_time |= self.held;
            }
            Action::Hold(_) if self.depends => self.held = self.slurm[0] == Slurm::Next,
            Action::LetGo(of) if self.depends => {
                let jobs = self.schedule.jobs();
                let lost = jobs.get(&self.id(1)).is_some_and(|job| job.rsa_state == RsaState::Lost);
                let hopeless = jobs.get(of).is_some_and(|job| job.hopeless);
                let in_ram = self.physical[1].unsaved;
                assert!(!self.held_in_time || !in_ram || lost || hopeless, "let go before results are home");
                self.held = false;
            }
            _ => {}
        }
    }

    fn is_at_work(&self, index: usize) -> bool {
        let job = self.schedule.jobs().get(&self.id(index));
        job.is_some_and(|job| job.task.is_some() || job.not_before.is_some())
    }

    /// Nobody is held for the results of a job of which nothing is left.
    fn lets_go(&self, requests: &[Request]) {
        let mut world = self.clone();
        world.slurm[1] = Slurm::Gone;
        while world.progress(1, requests) {
            world.happen(&Happening::Queue, requests);
        }
        world.happen(&Happening::Queue, requests);
        // One that must have its input has to get it first.
        while world.held && requests[0].wait == Some(WaitPolicy::Hold) && world.is_at_work(0) {
            world.progress(0, requests);
        }
        assert!(!world.held, "held for ever: {:?}", world.schedule.jobs());
    }

    /// What must hold in every state.
    fn check(&self) {
        for (name, node) in self.schedule.nodes() {
            let promised: u64 = node.promised.values().map(|bytes| bytes.0).sum();
            assert!(!node.up || promised <= node.capacity.0, "{name} promised twice");
            for id in node.promised.keys() {
                let job = &self.schedule.jobs()[id];
                assert!(job.allocation.as_ref().is_some_and(|found| found.nodes.contains(name)));
            }
        }
        let home: Vec<&Job> = self
            .schedule
            .jobs()
            .values()
            .filter(|job| matches!(job.task, Some(Task { work: Work::StageOut, .. })))
            .collect();
        for (index, one) in home.iter().enumerate() {
            for other in &home[..index] {
                let meet = one.request.data_out.iter().any(|mine| {
                    let mut theirs = other.request.data_out.iter();
                    theirs.any(|theirs| mine.starts_with(theirs) || theirs.starts_with(mine))
                });
                assert!(!meet, "{} and {} bring results home to the same place", one.id, other.id);
            }
        }
        for job in self.schedule.jobs().values() {
            for name in job.allocation.iter().flat_map(|found| &found.nodes) {
                assert!(self.schedule.nodes()[name].promised.contains_key(&job.id));
            }
            assert_eq!(job.task.is_some(), job.rsa_state.is_work(), "{job:?}");
            // The cells with a dash.
            if job.rsa_state.is_shown() {
                assert!(matches!(job.job_state, JobState::Running | JobState::Finished), "{job:?}");
            }
            if self.physical[index_of(job.id)].unsaved && !self.is_unknown(index_of(job.id)) {
                assert!(job.results, "unsaved results are not known of: {job:?}");
            }
            assert!(!job.locked_in || !job.unlocking, "{job:?}");
            // What it must have before it starts is not what another job is about to replace.
            let staged = matches!(job.rsa_state, RsaState::StagingIn | RsaState::Ready);
            if job.job_state == JobState::Ondeck && staged && job.request.wait == Some(WaitPolicy::Hold) {
                let writes = |other: &&Job| {
                    let mut theirs = other.request.data_out.iter();
                    other.id != job.id
                        && other.results
                        && theirs.any(|theirs| {
                            let mut mine = job.request.data_in.iter();
                            mine.any(|mine| mine.starts_with(theirs) || theirs.starts_with(mine))
                        })
                };
                assert!(self.schedule.jobs().values().find(writes).is_none(), "{job:?}");
            }
            let has_nodes = !matches!(job.rsa_state, RsaState::Initial | RsaState::Ineligible);
            assert_eq!(has_nodes, job.allocation.is_some(), "{job:?}");
            // Nothing waits for ever: work, a pause, the workload manager, other jobs, or somebody who was told.
            let waits =
                job.task.is_some() || job.not_before.is_some() || job.prolog_until.is_some() || job.unlocking;
            let for_people =
                matches!(job.rsa_state, RsaState::Held | RsaState::Lost) && !job.message.is_empty();
            let for_the_queue = job.job_state != JobState::Finished && job.job_state != JobState::Demoted;
            assert!(waits || for_people || for_the_queue || !job.waits_for.is_empty(), "{job:?}");
        }
    }

    /// From here everything comes to an end if nothing else goes wrong.
    fn ends(&self, requests: &[Request]) {
        let mut world = self.clone();
        for _ in 0..200 {
            world.slurm.fill(Slurm::Gone);
            world.happen(&Happening::Queue, requests);
            for index in 0..self.slurm.len() {
                if world.is_unknown(index) && !world.found[index] {
                    world.happen(&Happening::Found(index), requests);
                }
            }
            if world.schedule.jobs().is_empty() {
                for index in 0..world.schedule.nodes().len() {
                    world.happen(&Happening::Resume(index), requests);
                    let known = &world.schedule.nodes()[&node(index)];
                    if !known.up || !known.heard {
                        world.happen(&Happening::Back(index), requests);
                    }
                    while !world.schedule.nodes()[&node(index)].residue.is_empty() {
                        world.happen(&Happening::Cleaned(index), requests);
                    }
                }
                assert!(world.schedule.nodes().values().all(Node::is_free));
                return;
            }
            for index in 0..self.slurm.len() {
                world.progress(index, requests);
            }
        }
        panic!("does not come to an end: {:?}", self.schedule.jobs());
    }

    /// What comes next for a job that has ended, if nothing else goes wrong; returns whether it is known.
    fn progress(&mut self, index: usize, requests: &[Request]) -> bool {
        let Some(job) = self.schedule.jobs().get(&self.id(index)).cloned() else { return false };
        if job.task.is_some() {
            self.happen(&Happening::Ends(index, Outcome::Done(String::new())), requests);
        } else if job.ending.is_some() {
            // That its Epilogs never come is no further fault.
            self.faults = self.faults.saturating_add(1);
            self.happen(&Happening::EndingTimesOut(index), requests);
        } else if job.not_before.is_some() {
            self.happen(&Happening::PauseEnds(index), requests);
        } else if matches!(job.rsa_state, RsaState::Held | RsaState::Lost) {
            self.happen(&Happening::Retry(index), requests);
        } else if job.unlocking {
            self.happen(&Happening::Unlocked(index), requests);
        }
        true
    }

    /// A number for everything that matters to what comes next. Nodes are alike, so their names don't matter.
    fn key(&self) -> u128 {
        let part = |salt: u8| {
            let mut hasher = std::collections::hash_map::DefaultHasher::new();
            salt.hash(&mut hasher);
            (&self.slurm, &self.physical, self.faults, self.losses, self.swaps).hash(&mut hasher);
            (self.older_states, &self.runs, &self.left).hash(&mut hasher);
            (self.depends, self.held, self.held_in_time).hash(&mut hasher);
            (self.journals, self.queue_seen, &self.found, &self.schedule.identities).hash(&mut hasher);
            for job in self.schedule.jobs().values() {
                let mut job = job.clone();
                job.message.clear();
                job.waits_for.clear();
                job.avoid.clear();
                job.lost_on.clear();
                job.since = NOW;
                if let Some(task) = &mut job.task {
                    task.number = 0;
                }
                if let Some(allocation) = &mut job.allocation {
                    (allocation.epoch, allocation.nodes, allocation.since) = (Epoch(0), Vec::new(), NOW);
                }
                job.hash(&mut hasher);
            }
            let nodes = self.schedule.nodes().values();
            let mut nodes: Vec<_> = nodes
                .map(|node| {
                    (node.up, node.heard, node.promised.keys().collect::<Vec<_>>(), node.residue.len())
                })
                .collect();
            nodes.sort();
            nodes.hash(&mut hasher);
            hasher.finish()
        };
        u128::from(part(0)) << 64 | u128::from(part(1))
    }
}

/// Visits every state that can be reached; returns how many there are, and which pairs of states.
fn explore(requests: &[Request], compute_nodes: u8, faults: u8) -> (usize, HashSet<(JobState, RsaState)>) {
    explore_from(World::new(requests.len(), compute_nodes, 3, site(), faults), requests)
}

fn explore_from(start: World, requests: &[Request]) -> (usize, HashSet<(JobState, RsaState)>) {
    let mut known = HashSet::from([start.key()]);
    let mut pairs = HashSet::new();
    let mut waiting = vec![start];
    while let Some(world) = waiting.pop() {
        for happening in world.happenings() {
            let mut next = world.clone();
            let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                next.happen(&happening, requests);
                if known.insert(next.key()) {
                    next.ends(requests);
                    if next.held && matches!(next.slurm[0], Slurm::Waiting | Slurm::Next) {
                        next.lets_go(requests);
                    }
                    pairs.extend(next.schedule.jobs().values().map(|job| (job.job_state, job.rsa_state)));
                    waiting.push(next.clone());
                }
            }));
            if let Err(panic) = tried {
                eprintln!(
                    "before: {:#?}\n{:?} {:?}\nthen: {happening:?}",
                    world.schedule.jobs(),
                    world.slurm,
                    world.physical
                );
                std::panic::resume_unwind(panic);
            }
        }
    }
    (known.len(), pairs)
}

fn request(data_in: Option<&str>, data_out: Option<&str>, out_size: bool) -> Request {
    Request {
        data_in: data_in.map(PathBuf::from).into_iter().collect(),
        data_out: data_out.map(PathBuf::from).into_iter().collect(),
        out_size: out_size.then_some(Bytes(1)),
        ..Request::default()
    }
}

#[test]
fn one_job_keeps_the_invariants_in_every_order_of_events_and_failures() {
    let requests = [
        request(Some("/a"), Some("/b"), false),
        request(Some("/a"), Some("/b"), true),
        request(Some("/a"), None, false),
        request(None, Some("/b"), false),
    ];
    let mut all = HashSet::new();
    for first in requests {
        let began = std::time::Instant::now();
        // A job on several nodes ends on one after the other.
        for (compute_nodes, faults) in [(0, 4), (1, 3), (2, 2)] {
            let (states, pairs) = explore(std::slice::from_ref(&first), compute_nodes, faults);
            println!("one job: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
            all.extend(pairs);
        }
    }
    // Every state is reached. These last no longer than the event that leads to them.
    use RsaState as S;
    let reached: HashSet<S> = all.iter().map(|(_, state)| *state).collect();
    let passing: Vec<S> = S::ALL.iter().filter(|state| !reached.contains(state)).copied().collect();
    let expected = [S::Assigned, S::Booted, S::Aborted, S::Unmounted, S::DoneStagingOut, S::Destroyed];
    assert_eq!(passing, expected);
}

#[test]
fn a_lost_journal_loses_no_results_in_any_order_of_events() {
    let began = std::time::Instant::now();
    let requests = [
        request(Some("/a"), Some("/b"), false),
        request(Some("/a"), Some("/b"), true),
        request(None, Some("/b"), false),
    ];
    for first in requests {
        for (compute_nodes, faults) in [(0, 1), (1, 1)] {
            let requests = std::slice::from_ref(&first);
            let world = World { journals: 1, ..World::new(1, compute_nodes, 2, site(), faults) };
            let (states, pairs) = explore_from(world, requests);
            println!("a lost journal: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
        }
    }
}

#[test]
fn a_run_that_the_workload_manager_has_forgotten_keeps_its_ram_disk_in_any_order_of_events() {
    let began = std::time::Instant::now();
    let requests = [
        request(Some("/a"), Some("/b"), false),
        request(Some("/a"), Some("/b"), true),
        request(None, Some("/b"), false),
    ];
    for first in requests {
        for (compute_nodes, faults) in [(1, 1), (2, 0)] {
            let requests = std::slice::from_ref(&first);
            let world = World { older_states: 1, ..World::new(1, compute_nodes, 2, site(), faults) };
            let (states, pairs) = explore_from(world, requests);
            println!("an older state: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
        }
    }
}

/// A job of two nodes that writes, and that the workload manager shows as if it had not started.
fn one_that_is_back_in_the_queue(requests: &[Request]) -> World {
    let mut world = World { older_states: 1, ..World::new(1, 2, 2, site(), 0) };
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, requests);
    for _ in [Work::Construct, Work::StageIn] {
        world.happen(&Happening::Ends(0, Outcome::Done(String::new())), requests);
    }
    world.happen(&Happening::Becomes(0, Slurm::Running { prolog_ran: false, nodes: 2 }), requests);
    world.happen(&Happening::Prolog(0), requests);
    world.happen(&Happening::Ends(0, Outcome::Done(String::new())), requests);
    world.happen(&Happening::OlderState(0), requests);
    world.happen(&Happening::Queue, requests);
    world
}

#[test]
fn a_job_that_is_back_in_the_queue_keeps_its_ram_disk_until_its_nodes_have_ended_what_ran() {
    let requests = [request(None, Some("/a"), false)];
    let states = |world: &World| {
        let job = &world.schedule.jobs()[&id(0)];
        (job.job_state, job.rsa_state)
    };
    let shown = (JobState::Running, RsaState::InuseOut);
    let taken = (JobState::Finished, RsaState::Unmounting);
    let mut world = one_that_is_back_in_the_queue(&requests);
    assert_eq!(states(&world), shown);
    // It is started anew elsewhere, which is no business of the RAM disk's; and that run ends.
    world.happen(&Happening::Becomes(0, Slurm::Running { prolog_ran: false, nodes: 2 }), &requests);
    world.happen(&Happening::Prolog(0), &requests);
    world.happen(&Happening::Queue, &requests);
    assert_eq!(states(&world), shown);
    for state in [Slurm::Ending { nodes: 2 }, Slurm::Gone] {
        world.happen(&Happening::Becomes(0, state), &requests);
        world.happen(&Happening::Queue, &requests);
        assert_eq!(states(&world), shown);
    }
    world.happen(&Happening::LateEpilog(0), &requests);
    assert_eq!(states(&world), shown);
    world.happen(&Happening::LateEpilog(0), &requests);
    assert_eq!(states(&world), taken);

    // A node may never say so.
    let mut world = one_that_is_back_in_the_queue(&requests);
    let limit = NOW.plus(site().limits.ending);
    assert_eq!(world.schedule.next_tick(), Some(limit));
    world.schedule.handle(limit, Event::Tick).unwrap();
    assert_eq!(states(&world), taken);

    // The newest state comes back, and the job has run all the time.
    let mut world = one_that_is_back_in_the_queue(&requests);
    (world.slurm[0], world.runs[0]) = (Slurm::Running { prolog_ran: true, nodes: 2 }, 0);
    world.happen(&Happening::Queue, &requests);
    world.schedule.handle(limit, Event::Tick).unwrap();
    assert_eq!(states(&world), shown);
}

#[test]
fn an_order_names_a_job_by_as_much_as_tells_it_from_others() {
    let requests = [request(None, Some("/a"), false)];
    let mut world = World::new(1, 0, 1, site(), 0);
    let first = world.seen(0, &requests);
    let mut queue = |seen: &Seen, submitted: u64, restarts: u32| {
        let mut seen = seen.clone();
        (seen.job.standing, seen.job.submitted) = (Standing::Next, submitted);
        (seen.job.id.submitted, seen.job.id.restarts) = (submitted, restarts);
        let id = world.schedule.identify(&seen.job);
        world.schedule.handle(NOW, Event::Queue { taken: Time(0), jobs: vec![seen] }).unwrap();
        let lives: Vec<Incarnation> = world.schedule.jobs().keys().copied().collect();
        assert!(lives.contains(&id));
        lives.iter().map(|id| world.schedule.selector(*id).to_string()).collect::<Vec<_>>()
    };
    assert_eq!(queue(&first, 5, 0), ["1"]);
    assert_eq!(queue(&first, 6, 1), ["1.0", "1.1"]);
    assert_eq!(queue(&first, 9, 0), ["1@5.0", "1@5.1", "1@9"]);
}

/// Whatever a former version did for it: one of several on the same directories must not be mounted, and a hold must end.
#[test]
fn a_component_of_a_heterogeneous_job_gets_nothing_and_is_let_go() {
    let stage_in = Some(PathBuf::from("/script"));
    for (held_for_input, standing) in
        [(true, Standing::Held), (false, Standing::Next), (false, Standing::Running)]
    {
        for stage_in in [None, stage_in.clone()] {
            let both = request(Some("/a"), Some("/b"), false);
            let requests = [Request { stage_in, wait: Some(WaitPolicy::Hold), ..both }];
            let mut world = World::new(1, 1, 2, site(), 0);
            let mut seen = world.seen(0, &requests);
            (seen.job.standing, seen.job.held_for_input) = (standing, held_for_input);
            (seen.job.component_of, seen.job.nodes) = (Some(JobId(7)), vec![node(9)]);
            let id = world.schedule.identify(&seen.job);
            let effects =
                world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen.clone()] }).unwrap();
            let told = |action: &&Action| matches!(action, Action::Tell(_, text) if text.contains("heterogeneous job 7"));
            let let_go = |action: &&Action| matches!(action, Action::LetGo(_));
            assert_eq!(effects.actions.iter().filter(told).count(), 1, "{:?}", effects.actions);
            assert_eq!(effects.actions.iter().any(|action| let_go(&action)), held_for_input);
            assert_eq!(effects.actions.len(), 1 + usize::from(held_for_input), "{:?}", effects.actions);
            let job = &world.schedule.jobs()[&id];
            assert_eq!((job.rsa_state, job.held), (RsaState::Ineligible, false));
            let retry = Event::Retry { job: id, salvage: false };
            let refused = world.schedule.handle(NOW, retry).unwrap_err().to_string();
            assert!(refused.contains("heterogeneous"), "{refused}");
        }
    }
    // A former version has it held, because its script has failed.
    let requests = [Request { stage_in, ..request(Some("/a"), None, false) }];
    let mut world = World::new(1, 1, 2, site(), 0);
    let mut seen = world.seen(0, &requests);
    (seen.job.standing, seen.job.held_for_input) = (Standing::Held, true);
    let id = world.schedule.identify(&seen.job);
    world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen.clone()] }).unwrap();
    while let Some(number) = world.schedule.jobs()[&id].task.map(|task| task.number) {
        let fills = world.schedule.jobs()[&id].rsa_state == RsaState::StagingIn;
        let failed = Outcome::Failed { why: "exit code 3".into(), blame: Vec::new(), fault: Fault::User };
        let outcome = if fills { failed } else { Outcome::Done(String::new()) };
        world.schedule.handle(NOW, Event::Ended { job: id, number, outcome }).unwrap();
    }
    let job = &world.schedule.jobs()[&id];
    assert_eq!((job.rsa_state, job.held), (RsaState::Ineligible, true), "{}", job.message);
    seen.job.component_of = Some(JobId(7));
    let effects = world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen] }).unwrap();
    assert!(effects.actions.contains(&Action::LetGo(id)), "{:?}", effects.actions);
    assert!(world.schedule.jobs()[&id].message.contains("heterogeneous job 7"));
    // A former version has prepared one for it.
    let requests = [request(Some("/a"), Some("/b"), true)];
    let mut world = World::new(1, 1, 2, site(), 0);
    let mut seen = world.seen(0, &requests);
    (seen.job.standing, seen.job.nodes) = (Standing::Next, vec![node(9)]);
    let id = world.schedule.identify(&seen.job);
    world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen.clone()] }).unwrap();
    let done = |schedule: &mut Schedule| {
        while let Some(number) = schedule.jobs().get(&id).and_then(|job| Some(job.task?.number)) {
            let outcome = Outcome::Done(String::new());
            schedule.handle(NOW, Event::Ended { job: id, number, outcome }).unwrap();
        }
    };
    done(&mut world.schedule);
    assert_eq!(world.schedule.jobs()[&id].rsa_state, RsaState::Ready);
    (seen.job.standing, seen.job.component_of) = (Standing::Running, Some(JobId(7)));
    world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen.clone()] }).unwrap();
    world.schedule.handle(NOW, Event::Starting(Box::new(seen))).unwrap();
    done(&mut world.schedule);
    let job = &world.schedule.jobs()[&id];
    assert!(job.message.contains("heterogeneous job 7"), "{}", job.message);
    assert_eq!((job.rsa_state, job.allocation.is_none()), (RsaState::Ineligible, true));
}

#[test]
fn a_node_is_given_up_once_and_told_why_not_again() {
    let names = [0, 1].map(|index| (node(index), Node::new("default"))).into();
    let mut schedule = Schedule::new(site(), Vec::new(), names, 0, Epoch(0));
    schedule.handle(NOW, Event::NodeUp { node: node(0), capacity: CAPACITY }).unwrap();
    let refused = |schedule: &mut Schedule, index| {
        schedule.handle(NOW, Event::GiveUp(node(index))).unwrap_err().to_string()
    };
    assert!(refused(&mut schedule, 0).contains("has answered since"));
    schedule.handle(NOW, Event::GiveUp(node(1))).unwrap();
    assert!(refused(&mut schedule, 1).contains("was given up already"));
    schedule.handle(NOW, Event::NodeUp { node: node(1), capacity: CAPACITY }).unwrap();
    assert!(refused(&mut schedule, 1).contains("has answered since"));
}

#[test]
fn jobs_that_have_one_number_are_kept_apart_in_any_order_of_events() {
    let began = std::time::Instant::now();
    let requests = [request(Some("/a"), Some("/b"), false), request(None, Some("/c"), false)];
    let mut world = World { one_number: true, ..World::new(2, 0, 3, site(), 1) };
    world.slurm[1] = Slurm::Absent;
    let (states, pairs) = explore_from(world, &requests);
    println!("one number: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
}

#[test]
fn two_jobs_keep_the_invariants_in_every_order_of_events() {
    let began = std::time::Instant::now();
    let both = request(Some("/a"), Some("/b"), false);
    let (states, pairs) = explore(&[both, request(None, Some("/c"), false)], 0, 1);
    println!("two jobs: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
    // One reads what the other writes, and must not start without it.
    let reads = Request { wait: Some(WaitPolicy::Hold), ..request(Some("/c/d"), None, false) };
    let (states, pairs) = explore(&[reads, request(None, Some("/c"), false)], 0, 1);
    println!(
        "one that reads what the other writes: {states} states, {} pairs, {:?}",
        pairs.len(),
        began.elapsed()
    );
}

#[test]
fn a_job_that_depends_on_results_is_held_until_they_are_home_in_any_order_of_events() {
    let began = std::time::Instant::now();
    let writes = request(None, Some("/c"), false);
    let hold = Request { wait: Some(WaitPolicy::Hold), ..request(Some("/c/d"), None, false) };
    for (depends, compute_nodes, faults) in [
        (request(Some("/c/d"), None, false), 0, 1),
        (request(Some("/c/d"), None, false), 1, 0),
        (request(None, Some("/c"), false), 0, 1),
        (hold, 0, 0),
    ] {
        let requests = [depends, writes.clone()];
        let limits = Limits { hold: Duration::from_secs(100), ..site().limits };
        let site = Site { limits, ..site() };
        let world = World { depends: true, ..World::new(2, compute_nodes, 3, site, faults) };
        let (states, pairs) = explore_from(world, &requests);
        println!("one that depends: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
    }
}

/// A daemon that does not understand what its journal has of a job leaves the job's RSA nodes alone.
#[test]
fn what_is_promised_to_a_job_that_nobody_knows_is_free_once_its_ram_disk_is_gone() {
    let mut promised = Node::new("default");
    promised.promised.insert(id(0), CAPACITY);
    let nodes = [(node(0), promised)].into();
    let mut schedule = Schedule::new(site(), Vec::new(), nodes, 0, Epoch(0));
    schedule.handle(NOW, Event::NodeUp { node: node(0), capacity: CAPACITY }).unwrap();
    assert_eq!(schedule.nodes()[&node(0)].free(), Bytes::ZERO);
    let effects = schedule.handle(NOW, Event::Vacated { node: node(0), job: id(0) }).unwrap();
    assert!(schedule.nodes()[&node(0)].is_free() && effects.nodes == [node(0)]);
}

#[test]
fn a_job_that_was_next_keeps_its_ram_disk_until_it_is_judged_anew() {
    let requests = [request(Some("/a"), None, false)];
    let site = Site { debounce: Duration::from_secs(1), ..site() };
    let queue = |world: &mut World, standing, seconds| {
        let mut seen = world.seen(0, &requests);
        seen.job.standing = standing;
        let at = NOW.plus(Duration::from_secs(seconds));
        world.schedule.handle(at, Event::Queue { taken: at, jobs: vec![seen] }).unwrap();
        world.schedule.jobs().get(&id(0)).map(|job| job.job_state)
    };
    let ready = || {
        let mut world = World::new(1, 0, 1, site.clone(), 0);
        assert_eq!(queue(&mut world, Standing::Unjudged, 0), None);
        queue(&mut world, Standing::Next, 1);
        assert_eq!(queue(&mut world, Standing::Next, 2), Some(JobState::Ondeck));
        for _ in [Work::Construct, Work::StageIn] {
            world.happen(&Happening::Ends(0, Outcome::Done(String::new())), &requests);
        }
        assert_eq!(world.schedule.jobs()[&id(0)].rsa_state, RsaState::Ready);
        world
    };
    let mut world = ready();
    for second in [3, 10, 100] {
        assert_eq!(queue(&mut world, Standing::Unjudged, second), Some(JobState::Ondeck));
    }
    queue(&mut world, Standing::Next, 110);
    assert_eq!(queue(&mut world, Standing::Unjudged, 150), Some(JobState::Ondeck));
    assert_eq!(queue(&mut world, Standing::Unjudged, 271), Some(JobState::Demoted));
    // Behind others it is by Slurm's own word.
    let mut world = ready();
    queue(&mut world, Standing::Unjudged, 3);
    assert_eq!(queue(&mut world, Standing::Waiting, 5), Some(JobState::Demoted));
}

/// Two jobs of which the first wants two of four nodes and the second one; both are next.
fn two_that_want_three_of_four(site: Site) -> (World, [Request; 2]) {
    let requests = [("/a", "/b", 2), ("/c", "/d", 1)]
        .map(|(from, to, nodes)| Request { nodes: Some(nodes), ..request(Some(from), Some(to), true) });
    let mut world = World::new(2, 1, 4, site, 0);
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, &requests);
    (world, requests)
}

fn waits_for(world: &World, index: usize) -> &str {
    let job = &world.schedule.jobs()[&id(index)];
    assert_eq!(job.allocation.is_some(), job.waits_for.is_empty(), "{job:?}");
    &job.waits_for
}

#[test]
fn users_and_accounts_have_no_more_nodes_than_they_may() {
    let any = Site { sharing: Sharing::Any, ..site() };
    let limits = [
        (Site { user_nodes: Some(2), ..any.clone() }, "its user has 2 of at most 2 RSA nodes"),
        (Site { account_nodes: Some(2), ..any.clone() }, "its account has 2 of at most 2 RSA nodes"),
    ];
    for (site, why) in limits {
        let (mut world, requests) = two_that_want_three_of_four(site);
        assert_eq!((waits_for(&world, 0), waits_for(&world, 1)), ("", why));
        world.happen(&Happening::Becomes(0, Slurm::Gone), &requests);
        world.happen(&Happening::Queue, &requests);
        while world.schedule.jobs().get(&id(0)).is_some_and(|job| job.task.is_some()) {
            world.happen(&Happening::Ends(0, Outcome::Done(String::new())), &requests);
        }
        assert_eq!(waits_for(&world, 1), "");
    }
    let (world, _) = two_that_want_three_of_four(Site { account_nodes: Some(1), ..any });
    let told = &world.schedule.jobs()[&id(0)].message;
    assert!(told.contains("it needs 2 RSA nodes, and its account may have 1"), "{told}");
}

/// One that reads what the other writes, and must not start without it: it is ready, and held again when the other runs.
fn one_that_is_staged_again() -> (World, [Request; 2]) {
    let reads =
        Request { nodes: Some(1), wait: Some(WaitPolicy::Hold), ..request(Some("/c/d"), None, false) };
    let writes = Request { nodes: Some(1), ..request(None, Some("/c"), false) };
    let requests = [reads, writes];
    let mut world = World::new(2, 1, 2, Site { sharing: Sharing::Any, ..site() }, 0);
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, &requests);
    for index in [0, 1] {
        for _ in [Work::Construct, Work::StageIn] {
            world.happen(&Happening::Ends(index, Outcome::Done(String::new())), &requests);
        }
    }
    (world, requests)
}

#[test]
fn a_job_whose_input_another_one_writes_is_held_again_for_no_longer_than_the_limit() {
    let (mut world, requests) = one_that_is_staged_again();
    let reader = |world: &World| world.schedule.jobs()[&id(0)].clone();
    assert!(reader(&world).let_go && reader(&world).rsa_state == RsaState::Ready);
    world.slurm[1] = Slurm::Running { prolog_ran: false, nodes: 1 };
    let effects = world.schedule.handle(NOW, Event::Starting(Box::new(world.seen(1, &requests)))).unwrap();
    assert!(effects.actions.contains(&Action::Hold(id(0))), "{:?}", effects.actions);
    assert!(reader(&world).held && reader(&world).message.contains("job 2 writes to /c/d"));
    let task = reader(&world).task.unwrap();
    assert_eq!(task.work, Work::Destroy);
    let done = Event::Ended { job: id(0), number: task.number, outcome: Outcome::Done(String::new()) };
    world.schedule.handle(NOW, done).unwrap();
    assert!(reader(&world).allocation.is_none() && reader(&world).waits_for.contains("results of job 2"));
    // Others may go on writing there.
    let limit = NOW.plus(site().limits.hold);
    assert!(world.schedule.next_tick().is_some_and(|next| next <= limit));
    let effects = world.schedule.handle(limit, Event::Tick).unwrap();
    assert!(effects.actions.contains(&Action::LetGo(id(0))), "{:?}", effects.actions);
    assert!(reader(&world).message.contains("other jobs have written where its input is for 24 h"));
}

#[test]
fn a_job_that_was_released_by_hand_is_not_held_again() {
    let (mut world, requests) = one_that_is_staged_again();
    world.schedule.jobs.get_mut(&id(0)).unwrap().released = true;
    world.happen(&Happening::Becomes(1, Slurm::Running { prolog_ran: false, nodes: 1 }), &requests);
    world.schedule.handle(NOW, Event::Starting(Box::new(world.seen(1, &requests)))).unwrap();
    let job = &world.schedule.jobs()[&id(0)];
    assert_eq!((job.held, job.rsa_state), (false, RsaState::Ready));
}

#[test]
fn output_that_can_not_be_covered_while_its_job_runs_is_tried_a_few_times_and_then_the_nodes_are_for_others()
{
    let requests = [request(None, Some("/a"), false)];
    let mut world = World::new(1, 1, 2, site(), u8::MAX);
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, &requests);
    let job = |world: &World| world.schedule.jobs()[&id(0)].clone();
    world.happen(&Happening::Becomes(0, Slurm::Running { prolog_ran: false, nodes: 1 }), &requests);
    for _ in [Work::Construct, Work::StageIn] {
        world.happen(&Happening::Queue, &requests);
        world.happen(&Happening::Ends(0, Outcome::Done(String::new())), &requests);
    }
    // Its Prolog may still come: nothing is laid over anything before that is known.
    assert_eq!((job(&world).rsa_state, job(&world).prolog), (RsaState::Ready, Prolog::Expected));
    world.happen(&Happening::PrologGivenUp(0), &requests);
    let mut now = NOW;
    for seconds in [10, 60, 300] {
        let task = job(&world).task.unwrap();
        assert_eq!((task.work, job(&world).results), (Work::Mount, true));
        let later = Outcome::Later { why: "a file is open".into() };
        let ended = Event::Ended { job: id(0), number: task.number, outcome: later };
        world.schedule.handle(now, ended).unwrap();
        assert_eq!(
            (job(&world).rsa_state, job(&world).results, job(&world).task),
            (RsaState::Ready, false, None)
        );
        assert!(job(&world).message.contains(&format!("a file is open; it is tried again in {seconds} s")));
        let again = now.plus(Duration::from_secs(seconds));
        assert_eq!(job(&world).not_before, Some(again));
        now = again;
        world.schedule.handle(now, Event::Tick).unwrap();
    }
    let number = job(&world).task.unwrap().number;
    let later = Outcome::Later { why: "a file is open".into() };
    world.schedule.handle(now, Event::Ended { job: id(0), number, outcome: later }).unwrap();
    assert!(job(&world).message.contains("RSA_WAIT=hold"), "{}", job(&world).message);
    let task = job(&world).task.unwrap();
    assert_eq!(task.work, Work::Destroy);
    let done = Event::Ended { job: id(0), number: task.number, outcome: Outcome::Done(String::new()) };
    world.schedule.handle(now, done).unwrap();
    assert_eq!((job(&world).rsa_state, job(&world).allocation), (RsaState::Ineligible, None));
}

#[test]
fn a_capacity_takes_nodes_that_have_it() {
    let nodes = [(node(0), 10), (node(1), 100), (node(2), 10)];
    let placed = |request: Request| {
        let all = nodes.iter().map(|(name, _)| (name.clone(), Node::new("default"))).collect();
        let mut schedule = Schedule::new(site(), Vec::new(), all, 0, Epoch(0));
        for (name, gib) in &nodes {
            schedule.handle(NOW, Event::NodeUp { node: name.clone(), capacity: Bytes(gib << 30) }).unwrap();
        }
        let mut seen = World::new(1, 0, 0, site(), 0).seen(0, std::slice::from_ref(&request));
        seen.job.standing = Standing::Next;
        schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen] }).unwrap();
        let job = &schedule.jobs()[&id(0)];
        let nodes = job.allocation.as_ref().map(|found| found.nodes.clone()).unwrap_or_default();
        (nodes, format!("{}{}", job.message, job.waits_for))
    };
    let asks = |gib: u64, nodes| Request {
        capacity: Some(Bytes(gib << 30)),
        nodes,
        ..request(Some("/a"), None, false)
    };
    assert_eq!(placed(asks(5, None)).0, [node(0)]);
    assert_eq!(placed(asks(60, None)).0, [node(1)]);
    assert_eq!(placed(asks(12, Some(2))).0, [node(0), node(2)]);
    let (none, why) = placed(asks(100, Some(1)));
    assert!(none.is_empty() && why.contains("needs 2 for that"), "{why}");
    let (none, why) = placed(asks(60, Some(2)));
    assert!(none.is_empty() && why.contains("have 1 need 2"), "{why}");
}

#[test]
fn a_job_that_is_expected_to_start_soon_is_next_as_far_as_the_site_looks_ahead() {
    let requests = [request(Some("/a"), None, false)];
    let after = |start: Option<u64>, horizon: u64| {
        let site = Site { horizon: Duration::from_secs(horizon), ..site() };
        let mut world = World::new(1, 0, 1, site, 0);
        let mut seen = world.seen(0, &requests);
        seen.job.start = start.map(|seconds| NOW.0 / 1000 + seconds);
        world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen] }).unwrap();
        !world.schedule.jobs().is_empty()
    };
    assert!(after(Some(60), 60) && !after(Some(61), 60));
    assert!(!after(None, 60) && !after(Some(0), 0), "Slurm's word counts, and only where the site wants it");
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(512))]

    /// Long histories of many jobs and nodes: who wins the nodes, whose results others wait for, who is demoted.
    #[test]
    fn long_random_histories_keep_the_invariants(
        choices in proptest::collection::vec(proptest::num::u32::ANY, 1..600),
        policies in 0_u8..16,
    ) {
        let paths = ["/a", "/a/b", "/c", "/d"];
        let requests: Vec<Request> = (0..7)
            .map(|index| {
                let (one, other) = (paths[index % 4], paths[(index / 2 + 1) % 4]);
                let wait = (index % 2 == 1).then_some(WaitPolicy::Hold);
                let request =
                    request((index % 3 != 0).then_some(one), (index % 3 != 1).then_some(other), index % 2 == 0);
                Request { wait, ..request }
            })
            .collect();
        let site = Site {
            sharing: if policies & 1 == 0 { Sharing::Half } else { Sharing::Any },
            fractions: policies & 2 == 0,
            proportion: if policies & 2 == 0 { 4 } else { 1 },
            staging: (policies & 4 == 0).then_some(1),
            user_nodes: (policies & 8 == 0).then_some(4),
            ..site()
        };
        let mut world = World::new(requests.len(), 2, 5, site, u8::MAX);
        world.drains = true;
        for choice in choices {
            (world.losses, world.swaps, world.older_states) = (0, 0, 1);
            let all = world.happenings();
            let chosen = all[choice as usize % all.len()].clone();
            world.faults = u8::MAX;
            world.happen(&chosen, &requests);
        }
        world.faults = u8::MAX;
        world.ends(&requests);
    }
}
