//! Events, and how the table is applied.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::identity::{Identities, Identity};
use super::job::{Allocation, Job, Part, Prolog, Purpose, Task, Work, has_a_directory_for_both};
use super::nodes::Nodes;
use super::policy::{self, Line, LockIn, Placement, Served, Site, Taken, Use};
use super::states::{Move, decide};
use super::{JobState, RsaState, Time};
use crate::{
    Bytes, EngineKind, Epoch, Incarnation, JobId, JobSelector, NodeName, Owner, QueuedJob, RamDiskId,
    Request, Standing, WaitPolicy, duration,
};

/// How the message begins while results wait in RAM.
const NOT_HOME: &str = "staging out failed: ";

/// How the message begins when a server with results is lost.
const LOST: &str = "results may be lost: ";

/// A job as the queue shows it, with what its script asks for if it asks for anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The job.
    pub job: QueuedJob,
    /// What it asks for, with absolute paths. Without it, it is noted in the log alone.
    pub request: Option<Request>,
    /// The directory it was submitted from.
    pub work_dir: PathBuf,
    /// Where its RAM disk would be shown: its compute nodes, or what the site's mapping makes of them.
    pub io_nodes: Vec<NodeName>,
}

/// A job's RAM disk on RSA nodes that no allocation here knows of: the journal was lost, or an older copy of it came back.
/// What it is for stands in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which.
    pub ramdisk: RamDiskId,
    /// The life of the job that it was built for.
    pub job: Incarnation,
    /// Whose it is.
    pub owner: Owner,
    /// The account that the job is charged to.
    pub account: String,
    /// What the job asked for.
    pub request: Request,
    /// The directory that the job was submitted from.
    pub work_dir: PathBuf,
    /// What it was built for.
    pub purpose: Purpose,
    /// Its RSA nodes.
    pub nodes: Vec<NodeName>,
    /// What each of them has promised.
    pub promise: Bytes,
    /// Whether it may hold results.
    pub guarded: bool,
    /// Whether the queue shows that something of the job may run.
    pub runs: bool,
    /// Why it is not whole; nothing if all of its nodes have answered, and have the same one.
    pub fault: Option<String>,
}

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The queue, as it was at a time: all jobs that have asked for something or are known here. Known ones that are
    /// missing have left it.
    Queue {
        /// When the workload manager was asked.
        taken: Time,
        /// The jobs.
        jobs: Vec<Seen>,
    },
    /// A job's Prolog runs on one of its nodes, and waits for an answer.
    Starting(Box<Seen>),
    /// A job's Prologs have given up waiting: its program starts.
    PrologOver(Incarnation),
    /// A job's Epilog runs on one of its nodes.
    Ending {
        /// Which life of which job.
        job: Incarnation,
        /// Where nothing of it runs any more.
        node: NodeName,
    },
    /// Work has ended.
    Ended {
        /// The job that it was done for.
        job: Incarnation,
        /// The number of its task.
        number: u64,
        /// How.
        outcome: Outcome,
    },
    /// A job's RAM disk is there that is not known of. Comes before [`Event::NodeUp`] of its nodes, and after the queue was
    /// seen.
    Found(Box<Found>),
    /// An RSA node that does not answer is given up, by name: nothing of a job that was there before the journal is waited
    /// for on it. What it has nevertheless is found when it comes back.
    GiveUp(NodeName),
    /// The agent of an RSA node answers.
    NodeUp {
        /// Which.
        node: NodeName,
        /// What it lends in all.
        capacity: Bytes,
    },
    /// An RSA node has not answered for so long that what is on it is taken for lost.
    NodeLost(NodeName),
    /// A server of a RAM disk was lost.
    Broken {
        /// Which.
        ramdisk: RamDiskId,
        /// The RSA node.
        node: NodeName,
        /// What is wrong.
        why: String,
    },
    /// A RAM disk that was taken for broken is whole.
    Whole(RamDiskId),
    /// What RSA nodes have of the results in a RAM disk.
    Counted {
        /// Which.
        ramdisk: RamDiskId,
        /// Each node that has answered.
        parts: Vec<(NodeName, Part)>,
    },
    /// What had been left on a node is gone.
    Cleaned {
        /// The node.
        node: NodeName,
        /// What.
        ramdisk: RamDiskId,
    },
    /// A node has nothing of a job that the schedule does not know, though it is promised to it.
    Vacated {
        /// The node.
        node: NodeName,
        /// The job.
        job: Incarnation,
    },
    /// Something that a job's user should know.
    Noticed {
        /// The job.
        job: Incarnation,
        /// What.
        text: String,
    },
    /// Somebody wants a stage-out that is held to be tried again.
    Retry {
        /// Whose.
        job: Incarnation,
        /// Whether what is lost is given up, to save what is left: for results that are LOST.
        salvage: bool,
    },
    /// Somebody gives results up, by name.
    Abandon {
        /// Whose.
        job: Incarnation,
        /// By whom.
        by: String,
    },
    /// An RSA node shall lend nothing new.
    Drain {
        /// Which.
        node: NodeName,
        /// Why.
        why: String,
    },
    /// A drained node shall lend again.
    Resume(NodeName),
    /// A job is not kept in front of the queue any longer.
    Unlocked(Incarnation),
    /// Time has passed.
    Tick,
}

/// How work ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It is done. The text is for the job's log.
    Done(String),
    /// It is filled, but what the job is going to write does not fit beside its input. The text is for the user.
    Tight(String),
    /// What was left of the results is on disk.
    Salvaged {
        /// For the user.
        text: String,
        /// The nodes that had something left.
        from: Vec<NodeName>,
    },
    /// It was refused before anything was changed.
    Refused {
        /// In words: what, where, and what to do.
        why: String,
        /// What follows.
        fault: Fault,
    },
    /// The job runs, and its output could not be covered now; it works on disk as before, and nothing was changed. It may
    /// be tried again, but not for ever.
    Later {
        /// In words: what, where, and what to do.
        why: String,
    },
    /// It failed.
    Failed {
        /// In words: what, where, and what to do.
        why: String,
        /// The nodes that failed.
        blame: Vec<NodeName>,
        /// What follows.
        fault: Fault,
    },
}

/// What follows from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// It may work another time, or elsewhere.
    Again,
    /// It will not work until the user changes something.
    User,
    /// Files are open.
    Busy,
    /// Data was lost.
    Lost,
    /// The job uses another RAM disk, which the journal does not know. Nothing was begun.
    Elsewhere,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Begin work for a job, and report its end.
    Begin(Incarnation, Task),
    /// Keep a job in front of the queue.
    LockIn(Incarnation),
    /// Stop doing so.
    UndoLockIn(Incarnation),
    /// Hold a job.
    Hold(Incarnation),
    /// Hold a job of which nothing else is known here, with the mark of the hold, and tell its user.
    HoldBack(Incarnation, String),
    /// Let a held job start, and take back the mark of the hold.
    LetGo(Incarnation),
    /// Take back the mark of a hold that is over.
    Unmark(Incarnation),
    /// Tell a job's user.
    Tell(Incarnation, String),
    /// Remove what was left on a node.
    CleanUp(NodeName, RamDiskId),
}

/// A line of a job's log, or of the scheduler's if there is no job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The job.
    pub job: Option<Incarnation>,
    /// Its states afterwards.
    pub states: Option<(JobState, RsaState)>,
    /// What happened, for people.
    pub text: String,
}

/// What follows from an event.
#[derive(Clone, Debug, Default)]
pub struct Effects {
    /// To be done, after everything here has been kept.
    pub actions: Vec<Action>,
    /// To be noted.
    pub changes: Vec<Change>,
    /// The jobs that were touched: changed, or gone.
    pub jobs: Vec<Incarnation>,
    /// The last of what was known of jobs that are gone.
    pub gone: Vec<Job>,
    /// The nodes that were touched.
    pub nodes: Vec<NodeName>,
    /// What was given back, to be accounted for.
    pub used: Vec<Used>,
    /// Jobs that have started without any Prolog that asked.
    pub unasked: Vec<Unasked>,
}

/// A job that has started without any Prolog that asked: its RAM disk could not be shown in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unasked {
    /// Which.
    pub job: Incarnation,
    /// Where it runs, or ran.
    pub nodes: Vec<NodeName>,
    /// Since when it is known to run.
    pub started: Time,
}

/// What a user had of the RSA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Used {
    /// Who.
    pub uid: u32,
    /// The account that the job was charged to.
    pub account: String,
    /// RSA nodes, or parts of them, times the seconds for which they were promised.
    pub node_seconds: f64,
}

/// Why an order was not obeyed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No such job.
    #[error("job {0} is not known here: it has asked for nothing, or all of it is done")]
    NoJob(Incarnation),
    /// No such node.
    #[error("there is no RSA node {0}")]
    NoNode(NodeName),
    /// It makes no sense now.
    #[error("{0}")]
    NotNow(String),
}

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
    strays: BTreeMap<NodeName, BTreeSet<RamDiskId>>,
    /// When the workload manager was last ordered to hold a job or to let it go, so that what it has not yet done is
    /// ordered again, but not in each look.
    ordered: BTreeMap<Incarnation, Time>,
    /// Jobs that are not known here and must not start yet; and when they were ordered to be held.
    held_back: BTreeMap<Incarnation, Time>,
    /// When users were last given nodes; what ended before a restart is not known any more.
    pub(super) served: Served,
    last_task: u64,
    last_epoch: Epoch,
    /// When the journal began.
    began: Time,
}

impl Schedule {
    /// Begins with what was kept: jobs, nodes, and the greatest task number and epoch that were ever given.
    pub fn new(site: Site, jobs: Vec<Job>, nodes: Nodes, last_task: u64, last_epoch: Epoch) -> Schedule {
        let mut jobs: BTreeMap<Incarnation, Job> = jobs.into_iter().map(|job| (job.id, job)).collect();
        let mut identities = Identities::default();
        for job in jobs.values() {
            identities.note(job.id, &Identity::of(job));
        }
        for job in jobs.values_mut().filter(|job| job.prolog == Prolog::Waiting) {
            // It waited for an answer of the former scheduler, and asks again; what is mounted meanwhile, it may keep.
            let until = job.started.unwrap_or_default().plus(site.prolog);
            (job.prolog, job.prolog_until) = (Prolog::Expected, Some(until));
            if let Some(task) = job.task.as_mut().filter(|task| task.work == Work::Mount) {
                task.until = task.until.max(until.plus(site.limits.mount));
            }
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
            strays: BTreeMap::new(),
            ordered: BTreeMap::new(),
            held_back: BTreeMap::new(),
            last_task,
            last_epoch,
            began: Time(0),
        }
    }

    /// What the site decides.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Decides by other rules from the next event on. A tick has those who wait judged by them.
    pub fn set_site(&mut self, site: Site) {
        self.site = site;
    }

    /// The same with the time when the journal began: of what was there before, it may not know.
    #[must_use]
    pub fn with_beginning(mut self, began: Time) -> Schedule {
        self.began = began;
        self
    }

    /// No epoch that is given from now on is as small as this one, which somebody else may have given.
    #[must_use]
    pub fn after_epoch(mut self, epoch: Epoch) -> Schedule {
        self.last_epoch = self.last_epoch.max(epoch);
        self
    }

    /// The same with what was left on nodes that lend nothing.
    #[must_use]
    pub fn with_strays(mut self, strays: BTreeMap<NodeName, BTreeSet<RamDiskId>>) -> Schedule {
        self.strays = strays;
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
    pub fn strays(&self) -> &BTreeMap<NodeName, BTreeSet<RamDiskId>> {
        &self.strays
    }

    /// All jobs.
    pub fn jobs(&self) -> &BTreeMap<Incarnation, Job> {
        &self.jobs
    }

    /// All nodes.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// The greatest task number and epoch that were given.
    pub fn counters(&self) -> (u64, Epoch) {
        (self.last_task, self.last_epoch)
    }

    /// What to do again after a crash: all that had not ended, and what the workload manager may not have been told.
    pub fn resume(&self) -> Vec<Action> {
        let tasks = self.jobs.values().filter_map(|job| Some(Action::Begin(job.id, job.task?)));
        let residue = self
            .nodes
            .iter()
            .flat_map(|(name, node)| node.residue.iter().map(|id| Action::CleanUp(name.clone(), id.clone())));
        let places = self.jobs.values().filter_map(|job| match (job.locked_in, job.unlocking) {
            (true, _) => Some(Action::LockIn(job.id)),
            (_, true) => Some(Action::UndoLockIn(job.id)),
            _ => None,
        });
        tasks.chain(residue).chain(places).collect()
    }

    /// When the next [`Event::Tick`] is due, if nothing else happens.
    pub fn next_tick(&self) -> Option<Time> {
        let of_jobs = self.jobs.values().flat_map(|job| {
            let task = job.task.map(|task| task.until);
            let switch = if job.delay_over { None } else { job.switch_at };
            let hold = hold_until(&self.site, job);
            [task, job.not_before, job.prolog_until, switch, job.ending, hold].into_iter().flatten()
        });
        of_jobs.min()
    }

    /// Whether a job of the queue could get something if it asked for it: only then is its script of interest.
    pub fn is_candidate(&self, now: Time, job: &QueuedJob) -> bool {
        self.jobs.contains_key(&job.id) || is_next(&self.site, now, job) || job.standing == Standing::Running
    }

    /// Lets something happen.
    ///
    /// # Errors
    /// [`Refused`] for orders of people; nothing is changed then.
    pub fn handle(&mut self, now: Time, event: Event) -> Result<Effects, Refused> {
        let mut step = Step { schedule: self, now, effects: Effects::default() };
        step.take(event)?;
        step.settle();
        let mut effects = step.effects;
        effects.jobs.sort_unstable();
        effects.jobs.dedup();
        effects.nodes.sort_unstable();
        effects.nodes.dedup();
        Ok(effects)
    }
}

/// How many times as long it may take to cover the output of a job that runs.
const LATE_MOUNTS: u32 = 3;

/// After which times covering the output of a job that runs is tried again.
const LATE_PAUSES: [Duration; 3] =
    [Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(300)];

/// What its user is told of a job that may start.
/// A job that has ended so soon after its start may have been cancelled before its Prolog could ask.
const PROLOG_GRACE: Duration = Duration::from_secs(5);

const IS_READY: &str = "its RAM disk is ready";

/// A job that was next counts as next for so long without a judgement. Slurm's scheduler looks at the whole queue once
/// a minute (`sched_interval`), and mostly at once.
const UNJUDGED: Duration = Duration::from_secs(120);

/// Whether a job is next to start.
fn is_next(site: &Site, now: Time, job: &QueuedJob) -> bool {
    match job.standing {
        Standing::Next | Standing::Configuring => true,
        Standing::Waiting | Standing::Unjudged => job
            .start
            .is_some_and(|start| !site.horizon.is_zero() && Time(start * 1000) <= now.plus(site.horizon)),
        Standing::Held => is_held_by_us(job) && !job.dependent && !begins_later(site, now, job),
        Standing::Running | Standing::Ending | Standing::Ended => false,
    }
}

/// Whether a job is held for its input, and not by its user or an administrator.
fn is_held_by_us(job: &QueuedJob) -> bool {
    job.held_for_input && job.standing == Standing::Held
}

/// Whether a job was told to begin at a later time.
fn begins_later(site: &Site, now: Time, job: &QueuedJob) -> bool {
    job.start.is_some_and(|start| Time(start * 1000) > now.plus(site.horizon))
}

/// When a job that is held and has no RSA nodes is not held any longer.
fn hold_until(site: &Site, job: &Job) -> Option<Time> {
    let waits = job.held && !job.hopeless && job.rsa_state == RsaState::Initial;
    let from = job.again_since.map_or(job.since, |first| first.min(job.since));
    waits.then(|| from.plus(site.limits.hold))
}

/// What happens to a job that could start before its input is there.
fn wait_policy(request: &Request) -> WaitPolicy {
    let default = if request.stage_in.is_some() { WaitPolicy::Hold } else { WaitPolicy::Disk };
    request.wait.unwrap_or(default)
}

/// Whether a job that may start without its RAM disk is held nevertheless: until the results of others, which it depends
/// on, are on disk.
fn is_held_for_results_alone(job: &Job) -> bool {
    job.held && job.job_state == JobState::Ondeck && wait_policy(&job.request) != WaitPolicy::Hold
}

/// Whether one of two directories is in the other, or both are the same.
fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

/// A path of a job's where another one's results belong.
fn meets<'a>(request: &'a Request, outputs: &[PathBuf]) -> Option<&'a Path> {
    let paths = request.data_in.iter().chain(&request.data_out);
    paths.map(PathBuf::as_path).find(|path| outputs.iter().any(|output| overlap(path, output)))
}

/// Whether a job stands in line for RSA nodes.
pub(super) fn wants_nodes(job: &Job) -> bool {
    matches!(decide(job), Move::Assign(_)) && !job.backing_off()
}

/// Whether a job keeps its RSA nodes until somebody decides; also if it is not known.
fn stays(jobs: &BTreeMap<Incarnation, Job>, id: Incarnation) -> bool {
    jobs.get(&id).is_none_or(|job| matches!(job.rsa_state, RsaState::Held | RsaState::Lost))
}

/// Whether the input that was copied for a job which must not start without it is about to change: another job writes
/// results there.
fn changes_on_disk(job: &Job, usage: &Use) -> bool {
    job.job_state == JobState::Ondeck
        && matches!(job.rsa_state, RsaState::StagingIn | RsaState::Ready)
        && wait_policy(&job.request) == WaitPolicy::Hold
        && !job.released
        && usage.results_in_the_way_of(job.id, &job.request.data_in).is_some()
}

/// One event being handled.
struct Step<'a> {
    schedule: &'a mut Schedule,
    now: Time,
    effects: Effects,
}

impl Step<'_> {
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
                    self.note(Some(id), "its Prolog has not waited any longer".into());
                }
            }
            Event::Ending { job: id, node } => self.ending(id, node),
            Event::Ended { job, number, outcome } => self.ended(job, number, outcome),
            Event::NodeUp { node, capacity } => {
                let Some(known) = self.schedule.nodes.get_mut(&node) else { return Ok(()) };
                if !known.up || known.capacity != capacity || !known.heard {
                    (known.up, known.capacity, known.heard, known.given_up) = (true, capacity, true, false);
                    self.effects.nodes.push(node.clone());
                    self.note(None, format!("RSA node {node} lends {capacity}"));
                }
            }
            Event::Found(found) => self.found(*found),
            Event::GiveUp(node) => {
                let known = self.schedule.nodes.get_mut(&node).ok_or(Refused::NoNode(node.clone()))?;
                if known.heard {
                    let why = if known.given_up {
                        "was given up already"
                    } else {
                        "has answered since the journal began"
                    };
                    return Err(Refused::NotNow(format!("RSA node {node} {why}: nothing waits for it")));
                }
                (known.heard, known.given_up) = (true, true);
                self.effects.nodes.push(node.clone());
                self.note(None, format!("RSA node {node} is given up"));
            }
            Event::NodeLost(node) => self.node_lost(&node),
            Event::Broken { ramdisk, node, why } => self.broken(&ramdisk, &node, &why),
            Event::Counted { ramdisk, parts } => {
                let ids: Vec<Incarnation> = self.with_ramdisk(&ramdisk).collect();
                for id in ids {
                    self.job(id).parts.extend(parts.iter().cloned());
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
                        let text = "all servers of its RAM disk are there again".to_owned();
                        // Whoever was told of the loss is told of its end.
                        if job.results { self.tell(id, text) } else { self.note(Some(id), text) }
                    }
                }
            }
            Event::Vacated { node, job } => {
                if !self.schedule.jobs.contains_key(&job)
                    && let Some(known) = self.schedule.nodes.get_mut(&node)
                    && known.promised.remove(&job).is_some()
                {
                    self.effects.nodes.push(node.clone());
                    self.note(None, format!("RSA node {node} has nothing of job {job} any more"));
                }
            }
            Event::Cleaned { node, ramdisk } => {
                if let Some(left) = self.schedule.strays.get_mut(&node)
                    && left.remove(&ramdisk)
                {
                    if left.is_empty() {
                        self.schedule.strays.remove(&node);
                    }
                    self.effects.nodes.push(node.clone());
                    self.note(None, format!("what was left of {ramdisk} on {node} is gone"));
                }
                if let Some(known) = self.schedule.nodes.get_mut(&node)
                    && known.residue.remove(&ramdisk)
                {
                    self.effects.nodes.push(node.clone());
                    self.note(None, format!("what was left of {ramdisk} on {node} is gone"));
                }
            }
            Event::Noticed { job: id, text } => {
                if self.schedule.jobs.contains_key(&id) {
                    self.tell(id, text);
                }
            }
            Event::Retry { job: id, salvage: true } => {
                self.must_not_run(id)?;
                self.salvage(id)?;
            }
            Event::Retry { job: id, salvage: false } => {
                self.must_not_run(id)?;
                let job = self.known(id)?;
                job.salvage = false;
                match (job.rsa_state, job.job_state) {
                    (RsaState::Held | RsaState::Lost, _) => {
                        (job.retry_now, job.stage_outs, job.not_before) = (true, 0, None);
                    }
                    (RsaState::Ineligible, _) if job.component_of.is_some() => {
                        return Err(Refused::NotNow(format!(
                            "job {id} is a component of a heterogeneous job, which can't have a RAM disk: there is nothing to \
                             try again"
                        )));
                    }
                    // What kept it from getting a RAM disk may have been mended, and it has not started.
                    (RsaState::Ineligible, JobState::Ondeck) => {
                        (job.hopeless, job.failures, job.not_before) = (false, 0, None);
                        self.become_state(id, RsaState::Initial, "");
                    }
                    (state, _) => {
                        return Err(Refused::NotNow(format!(
                            "job {id} is {state}: nothing of it is held, so there is nothing to try again"
                        )));
                    }
                }
                self.note(Some(id), "tried again by hand".into());
            }
            Event::Abandon { job: id, by } => self.abandon(id, &by)?,
            Event::Drain { node, why } => {
                let known = self.schedule.nodes.get_mut(&node).ok_or(Refused::NoNode(node.clone()))?;
                known.drained.clone_from(&why);
                self.effects.nodes.push(node.clone());
                self.note(None, format!("RSA node {node} is drained: {why}"));
            }
            Event::Resume(node) => {
                let known = self.schedule.nodes.get_mut(&node).ok_or(Refused::NoNode(node.clone()))?;
                (known.drained, known.failures) = (String::new(), 0);
                self.effects.nodes.push(node.clone());
                self.note(None, format!("RSA node {node} lends again"));
            }
            Event::Unlocked(id) => {
                if self.schedule.jobs.get(&id).is_some_and(|job| job.unlocking) {
                    self.job(id).unlocking = false;
                }
            }
            Event::Tick => {}
        }
        self.pass_time();
        Ok(())
    }

    /// Refuses what would take a RAM disk from processes that use it, as far as the queue shows them.
    fn must_not_run(&self, id: Incarnation) -> Result<(), Refused> {
        match self.schedule.jobs.get(&id) {
            Some(job) if job.unsure && job.still_runs => Err(Refused::NotNow(format!(
                "job {id} still runs, and may write to its RAM disk; wait for its end, or cancel it first"
            ))),
            _ => Ok(()),
        }
    }

    fn known(&mut self, id: Incarnation) -> Result<&mut Job, Refused> {
        self.effects.jobs.push(id);
        self.schedule.jobs.get_mut(&id).ok_or(Refused::NoJob(id))
    }

    /// A job that is known, to be changed.
    fn job(&mut self, id: Incarnation) -> &mut Job {
        self.effects.jobs.push(id);
        #[allow(clippy::expect_used)]
        self.schedule.jobs.get_mut(&id).expect("callers have just found it")
    }

    fn note(&mut self, job: Option<Incarnation>, text: String) {
        let states = job.and_then(|id| self.schedule.jobs.get(&id)).map(|job| (job.job_state, job.rsa_state));
        if let Some(id) = job {
            self.effects.jobs.push(id);
        }
        self.effects.changes.push(Change { job, states, text });
    }

    /// Something that the user should know.
    fn tell(&mut self, id: Incarnation, text: String) {
        let job = self.job(id);
        if job.message != text {
            job.message.clone_from(&text);
            self.effects.actions.push(Action::Tell(id, text.clone()));
            self.note(Some(id), text);
        }
    }

    // ---- what the workload manager shows

    fn queue(&mut self, taken: Time, jobs: Vec<Seen>) {
        let mut missing: BTreeSet<Incarnation> = self.schedule.jobs.keys().copied().collect();
        let mut candidates = BTreeMap::new();
        let mut bystanders = BTreeMap::new();
        let mut held_back = BTreeMap::new();
        let outputs = self.awaited_outputs(&jobs);
        for mut seen in jobs {
            let id = self.schedule.identify(&seen.job);
            seen.job.id = id;
            missing.remove(&id);
            if self.schedule.jobs.contains_key(&id) {
                self.stands(taken, &seen);
            } else if let Some(request) = seen.request.take() {
                match seen.job.standing {
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
                    Standing::Running => self.begin(&seen, request, JobState::Running),
                    standing
                        if standing.waits()
                            && seen.job.component_of.is_none()
                            && !seen.job.held_for_input
                            && id.restarts > 0
                            && wait_policy(&request) == WaitPolicy::Hold
                            && !is_next(&self.schedule.site, self.now, &seen.job) =>
                    {
                        // What was started anew, and released if somebody else held it, is held as it was when it was
                        // submitted: it would start at once when its time has come.
                        let why = "held until its input is in RAM".to_owned();
                        held_back.insert(id, self.hold_back(id, why));
                    }
                    _ if is_next(&self.schedule.site, self.now, &seen.job) => {
                        let since = *self.schedule.candidates.get(&id).unwrap_or(&self.now);
                        // Right after it was submitted, a job may be called next and be behind others a moment later.
                        if self.now.since(since) >= self.schedule.site.debounce {
                            self.begin(&seen, request, JobState::Ondeck);
                        } else {
                            candidates.insert(id, since);
                        }
                    }
                    _ => {}
                }
            } else {
                self.stands_by(&seen.job, &mut candidates, &mut bystanders);
            }
        }
        (self.schedule.candidates, self.schedule.bystanders) = (candidates, bystanders);
        self.schedule.held_back = held_back;
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
            // Slurm shows a job that has ended for minutes: slurmctld was started clean.
            self.forgotten(id, "left the queue");
        }
    }

    /// The output directories of the jobs that others depend on.
    fn awaited_outputs(&self, jobs: &[Seen]) -> BTreeMap<JobId, Vec<PathBuf>> {
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
    fn holds_back(
        &mut self,
        job: &QueuedJob,
        request: &Request,
        outputs: &BTreeMap<JobId, Vec<PathBuf>>,
    ) -> Option<Time> {
        let (other, path) = job.depends_on.iter().find_map(|other| {
            let path = meets(request, outputs.get(other)?)?;
            Some((*other, path.display()))
        })?;
        let why = format!("held until the results of job {other} for {path} are on disk");
        Some(self.hold_back(job.id, why))
    }

    /// Has a job held that is not known here; returns when that was ordered.
    fn hold_back(&mut self, id: Incarnation, why: String) -> Time {
        /// It may have been refused.
        const PAUSE: Duration = Duration::from_secs(60);
        let ordered = self.schedule.held_back.get(&id).copied();
        if let Some(at) = ordered.filter(|at| self.now.since(*at) < PAUSE) {
            return at;
        }
        self.effects.actions.push(Action::HoldBack(id, why.clone()));
        if ordered.is_none() {
            self.effects.changes.push(Change { job: Some(id), states: None, text: why });
        }
        self.now
    }

    /// The workload manager does not know any longer that a job has started. What of it still runs is ended by its nodes,
    /// whose Epilogs say so; until then it keeps its RAM disk.
    fn forgotten(&mut self, id: Incarnation, why: &str) {
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
            self.note(Some(id), format!("{why}; its Epilogs are waited for"));
        }
    }

    /// Whether what the queue shows of a job that runs is of a later run of the same life: the workload manager has
    /// forgotten the earlier one. The job was seen to wait in between, or runs on other nodes, and started later.
    fn is_later_run(&self, seen: &QueuedJob) -> bool {
        let Some(job) = self.schedule.jobs.get(&seen.id) else { return false };
        let has_started = match seen.standing {
            Standing::Running | Standing::Configuring => true,
            // It may have been cancelled before it started.
            Standing::Ending | Standing::Ended => job.forgotten,
            Standing::Next | Standing::Waiting | Standing::Unjudged | Standing::Held => false,
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

    /// A job that has asked for nothing. `candidates` and `bystanders` are those of the next look.
    fn stands_by(
        &mut self,
        job: &QueuedJob,
        candidates: &mut BTreeMap<Incarnation, Time>,
        bystanders: &mut BTreeMap<Incarnation, Option<Time>>,
    ) {
        let (id, now, debounce) = (job.id, self.now, self.schedule.site.debounce);
        let mut log = |state: JobState, text: String| {
            let states = Some((state, RsaState::Ineligible));
            self.effects.changes.push(Change { job: Some(id), states, text });
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
                    log(
                        JobState::Ondeck,
                        format!("job {id} does not have RSA variables set, marking ineligible"),
                    );
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
                log(JobState::Demoted, format!("job {id} has been demoted"));
                log(JobState::Demoted, format!("removing state of job {id}"));
            }
        }
    }

    /// A known job, as the queue shows it. Most of them are as they were, and are not touched.
    fn stands(&mut self, taken: Time, seen: &Seen) {
        let (id, now, debounce) = (seen.job.id, self.now, self.schedule.site.debounce);
        let next = is_next(&self.schedule.site, now, &seen.job);
        let Some(job) = self.schedule.jobs.get(&id) else { return };
        if job.priority != seen.job.priority {
            self.job(id).priority = seen.job.priority;
        }
        if self.schedule.jobs[&id].component_of != seen.job.component_of {
            // A former version kept it without, and may have it held until somebody mends its stage-in script.
            self.job(id).component_of = seen.job.component_of;
            if self.schedule.jobs[&id].rsa_state == RsaState::Ineligible && self.schedule.jobs[&id].held {
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
        let job = &self.schedule.jobs[&id];
        let stale = job.started.is_some_and(|started| started >= taken);
        match (job.job_state, seen.job.standing) {
            (JobState::Demoted | JobState::Finished, _) => {}
            _ if self.is_later_run(&seen.job) => self.forgotten(id, "was started anew"),
            (_, Standing::Ended) => self.set_job_state(id, JobState::Finished, "ended"),
            // Its processes may still write what they must before they are killed.
            (JobState::Running, Standing::Ending) if job.rsa_state.is_shown() => {
                if job.ending.is_none() {
                    let until = now.plus(self.schedule.site.limits.ending);
                    self.job(id).ending = Some(until);
                    self.note(Some(id), "is ending".into());
                }
                self.believe(id);
            }
            (_, Standing::Ending) => self.set_job_state(id, JobState::Finished, "is ending"),
            (JobState::Ondeck, Standing::Running) => self.runs(seen, Prolog::Expected),
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
                    self.note(Some(id), "is known to run again".into());
                }
                self.believe(id);
            }
            (JobState::Ondeck, _) if self.yields(id) => {
                let limit = duration::limit(self.schedule.site.limits.ready);
                let why = format!("has not started for {limit}, and others wait for its RSA nodes");
                self.set_job_state(id, JobState::Demoted, &why);
            }
            (JobState::Ondeck, _) if next || self.keeps_its_place(&seen.job) => {
                if job.compute_nodes != seen.job.node_count {
                    self.job(id).compute_nodes = seen.job.node_count;
                }
                self.believe(id);
                self.order_again(taken, &seen.job);
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
                        JobState::Running => self.forgotten(id, "is back in the queue"),
                        _ => self.set_job_state(id, JobState::Demoted, "has been demoted"),
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
            Standing::Held => known.held || is_held_by_us(job),
            // The hold is under way.
            Standing::Waiting | Standing::Unjudged if known.held => true,
            Standing::Waiting | Standing::Unjudged => {
                let waited = known.let_go && wait_policy(&known.request) == WaitPolicy::Hold;
                (waited || known.locked_in)
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
            Standing::Held if known.let_go && is_held_by_us(seen) => Action::LetGo(id),
            Standing::Held if known.held && !known.hold_seen => {
                self.job(id).hold_seen = true;
                return;
            }
            standing if standing.waits() && known.held && known.hold_seen => {
                // Somebody does not want to wait for its input.
                let job = self.job(id);
                (job.held, job.let_go, job.released) = (false, true, true);
                return self.note(Some(id), "was released by hand".into());
            }
            standing if standing.waits() && known.held => Action::Hold(id),
            standing if standing.waits() && known.let_go && seen.held_for_input => Action::Unmark(id),
            _ => return,
        };
        if self.schedule.ordered.get(&id).is_none_or(|last| now.since(*last) >= PAUSE) {
            self.order(action, id);
        }
    }

    fn order(&mut self, action: Action, id: Incarnation) {
        self.schedule.ordered.insert(id, self.now);
        self.effects.actions.push(action);
    }

    /// The queue says what the state here says.
    fn believe(&mut self, id: Incarnation) {
        if self.schedule.jobs[&id].doubted.is_some() {
            self.job(id).doubted = None;
        }
    }

    /// A job of which nothing was done yet.
    fn new_job(&self, seen: &Seen, request: Request) -> Job {
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
            torn: false,
            task: None,
            failures: 0,
            failed_here: false,
            hopeless: false,
            avoid: Vec::new(),
            broken: false,
            broken_why: String::new(),
            lost_on: BTreeSet::new(),
            parts: BTreeMap::new(),
            salvage: false,
            mount_failed: false,
            unmounts: 0,
            late: 0,
            stage_outs: 0,
            not_before: None,
            retry_now: false,
            prolog: Prolog::Expected,
            prolog_until: None,
            started: None,
            switch_at: None,
            delay_over: false,
            doubted: None,
            locked_in: false,
            unlocking: false,
            held: is_held_by_us(&seen.job),
            hold_seen: is_held_by_us(&seen.job),
            let_go: false,
            released: false,
            older: false,
            unsure: false,
            still_runs: false,
            again_since: None,
            lacking: None,
            message: String::new(),
            waits_for: String::new(),
        }
    }

    /// A job that was not known.
    fn begin(&mut self, seen: &Seen, request: Request, state: JobState) {
        let id = seen.job.id;
        let mut job = self.new_job(seen, request);
        let is_older = |start: u64| Time(start.saturating_mul(1000)) < self.schedule.began;
        job.older = state == JobState::Running && seen.job.start.is_some_and(is_older);
        let hold = wait_policy(&job.request) == WaitPolicy::Hold && job.component_of.is_none();
        // It was held before it was known here, and somebody does not want to wait for its input.
        job.released = seen.job.held_for_input && seen.job.standing.waits();
        let hold_now = hold && !job.released && seen.job.standing.waits() && state == JobState::Ondeck;
        self.schedule.identities.note(id, &Identity::of(&job));
        self.schedule.jobs.insert(id, job);
        self.note(Some(id), "on deck".into());
        if hold_now {
            // Nobody held it at submission; it must not start before what it needs is there.
            self.job(id).held = true;
            self.order(Action::Hold(id), id);
        }
        // Before it runs: it did not start too early for anything.
        self.tell_component(id);
        if state == JobState::Running {
            self.runs(seen, Prolog::Expected);
        }
    }

    /// A RAM disk that is not known of. Whoever runs goes on with it, if all says that it is theirs; all else that may hold
    /// results waits for somebody to decide.
    fn found(&mut self, found: Found) {
        let (id, now) = (found.job, self.now);
        self.schedule.last_epoch = self.schedule.last_epoch.max(found.ramdisk.epoch);
        let identity = Identity { uid: found.owner.uid, noted: [id.submitted].into(), restarts: id.restarts };
        self.schedule.identities.note(id, &identity);
        let known = self.schedule.jobs.get(&id);
        if known.is_some_and(|job| job.allocation.is_some() || id.ramdisk() != found.ramdisk.name) {
            // It has another one, which is seen to first. The agents keep this one.
            return;
        }
        let agrees = |job: &Job| {
            job.job_state == JobState::Running
                && job.owner.uid == found.owner.uid
                && (&job.request.data_in, &job.request.data_out)
                    == (&found.request.data_in, &found.request.data_out)
        };
        let in_use = found.fault.is_none() && known.is_some_and(agrees);
        if !in_use && !found.guarded {
            // It holds nothing that is not on disk. Whoever looks at the nodes removes it once nobody can use it.
            return;
        }
        if known.is_none() {
            let job = QueuedJob {
                id,
                owner: found.owner,
                account: found.account.clone(),
                standing: Standing::Ended,
                reason: String::new(),
                node_count: 0,
                nodes: Vec::new(),
                start: None,
                submitted: id.submitted,
                priority: 0,
                qos: String::new(),
                held_for_input: false,
                dependent: false,
                depends_on: Vec::new(),
                component_of: None,
            };
            let seen = Seen { job, request: None, work_dir: found.work_dir.clone(), io_nodes: Vec::new() };
            let job = self.new_job(&seen, found.request.clone());
            self.schedule.jobs.insert(id, job);
        }
        for name in &found.nodes {
            if let Some(node) = self.schedule.nodes.get_mut(name) {
                node.promised.insert(id, found.promise);
                self.effects.nodes.push(name.clone());
            }
        }
        let job = self.job(id);
        let (nodes, promise, epoch) = (found.nodes, found.promise, found.ramdisk.epoch);
        job.allocation = Some(Allocation { nodes, promise, epoch, since: now });
        (job.purpose, job.results, job.prolog) = (found.purpose, found.guarded, Prolog::Over);
        (job.prolog_until, job.not_before) = (None, None);
        if in_use {
            let state = match found.purpose {
                Purpose::Input => RsaState::InuseIn,
                Purpose::Both => RsaState::InuseBoth,
                Purpose::Output => RsaState::InuseOut,
            };
            self.become_state(id, state, "");
            self.tell(id, "its RAM disk was found though the journal did not know it; it goes on".into());
            return;
        }
        // The life that it was built for may run, or not be over for the workload manager: nothing is done for it.
        (job.job_state, job.held, job.unsure, job.still_runs) = (JobState::Finished, false, true, found.runs);
        self.undo_lock_in(id);
        self.become_state(id, RsaState::Held, "");
        let job = self.job(id);
        let outputs = job.outputs();
        // Other jobs of its number may not be known yet.
        let name = JobSelector::from(id);
        let why = found.fault.map(|fault| format!(" ({fault})")).unwrap_or_default();
        self.tell(
            id,
            format!(
                "{NOT_HOME}a RAM disk with results for {outputs} was found that the journal did not know{why}; when nothing of \
                 the job runs any more, `ondeck job retry {name}` brings them home, and `ondeck job abandon {name}` gives them up"
            ),
        );
    }

    /// The quality of service that a job was submitted with, also if a former life of it is still locked in.
    fn own_qos(&self, job: &QueuedJob) -> String {
        let first = *job.id.lives().start();
        let former = self.schedule.jobs.range(first..job.id).next_back();
        former.map_or(&job.qos, |(_, known)| &known.qos).clone()
    }

    /// An Epilog runs. A job has ended when all of its nodes' Epilogs have: on others its processes may still run.
    fn ending(&mut self, id: Incarnation, node: NodeName) {
        let running = |job: &&Job| job.job_state == JobState::Running;
        let Some(job) = self.schedule.jobs.get(&id).filter(running) else { return };
        if job.nodes.iter().all(|of_job| *of_job == node || job.ended_on.contains(of_job)) {
            return self.set_job_state(id, JobState::Finished, "ended on its nodes");
        }
        if job.nodes.contains(&node) && !job.ended_on.contains(&node) {
            self.note(Some(id), format!("ended on {node}"));
            self.job(id).ended_on.insert(node);
        }
    }

    /// A job starts.
    fn runs(&mut self, seen: &Seen, prolog: Prolog) {
        let (id, now) = (seen.job.id, self.now);
        let (patience, delay) = (self.schedule.site.prolog, self.schedule.site.delay);
        let job = self.job(id);
        job.io_nodes.clone_from(&seen.io_nodes);
        job.nodes.clone_from(&seen.job.nodes);
        job.prolog = prolog;
        job.prolog_until = (prolog == Prolog::Expected).then(|| now.plus(patience));
        job.started = Some(now);
        job.switch_at = Some(now.plus(job.request.delay.unwrap_or(delay)));
        let held = std::mem::take(&mut job.held);
        job.not_before = job.not_before.filter(|_| job.rsa_state != RsaState::Initial);
        let too_early = !job.request.data_in.is_empty() && job.rsa_state != RsaState::Ready;
        self.set_job_state(id, JobState::Running, "runs");
        if held {
            // It was faster than its hold, whose mark would be taken for one.
            self.effects.actions.push(Action::Unmark(id));
        }
        let job = &self.schedule.jobs[&id];
        // What a job did that started before the journal began, nobody knows: its RAM disk may be found.
        if too_early && !job.older && (job.message.is_empty() || job.message == IS_READY) {
            let why = Some(job.waits_for.as_str()).filter(|why| !why.is_empty());
            let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
            self.tell(id, format!("it started before its input was in RAM{why}, and reads it from disk"));
        }
    }

    /// A job runs, or has run, and none of its Prologs has asked. It goes on without what was made ready for it.
    fn no_prolog_asked(&mut self, id: Incarnation) {
        const NO_PROLOG: &str = "no Prolog of it has asked the scheduler";
        let job = &self.schedule.jobs[&id];
        let (Some(started), nodes) = (job.started, job.nodes.clone()) else { return };
        let is_ready = job.rsa_state == RsaState::Ready;
        self.effects.unasked.push(Unasked { job: id, nodes, started });
        if is_ready && job.purpose == Purpose::Output {
            self.tell(id, format!("its output was not in RAM from its start: {NO_PROLOG}"));
        } else if is_ready {
            self.tell(id, format!("its RAM disk was ready, and is not used: {NO_PROLOG}; it works on disk"));
        } else {
            self.note(Some(id), NO_PROLOG.into());
        }
    }

    fn starting(&mut self, seen: &Seen) {
        let id = seen.job.id;
        if !self.schedule.jobs.contains_key(&id) {
            let Some(request) = &seen.request else { return };
            self.begin(seen, request.clone(), JobState::Ondeck);
        }
        let job = &self.schedule.jobs[&id];
        match (job.job_state, job.prolog) {
            (JobState::Ondeck, _) => self.runs(seen, Prolog::Waiting),
            _ if self.is_later_run(&seen.job) => self.forgotten(id, "was started anew"),
            (JobState::Running, Prolog::Expected) => {
                let job = self.job(id);
                (job.prolog, job.prolog_until) = (Prolog::Waiting, None);
                if job.io_nodes.is_empty() {
                    job.io_nodes.clone_from(&seen.io_nodes);
                }
            }
            // The Prolog of another of its nodes, or one that came too late.
            _ => {}
        }
    }

    fn set_job_state(&mut self, id: Incarnation, state: JobState, why: &str) {
        let known = self.schedule.jobs.get(&id).map(|job| job.job_state);
        if known.is_none_or(|known| known == state || known == JobState::Finished) {
            return;
        }
        let job = &self.schedule.jobs[&id];
        let has_run = job.started.is_some_and(|started| self.now.since(started) >= PROLOG_GRACE);
        if state == JobState::Finished && job.prolog == Prolog::Expected && has_run && !job.forgotten {
            self.no_prolog_asked(id);
        }
        let job = self.job(id);
        job.job_state = state;
        job.doubted = None;
        if matches!(state, JobState::Demoted | JobState::Finished) {
            (job.prolog, job.prolog_until, job.switch_at, job.ending) = (Prolog::Over, None, None, None);
            job.held = false;
            self.undo_lock_in(id);
        }
        self.note(Some(id), format!("job {id} {why}"));
    }

    /// A job that has ended may begin anew under the same number, and must not be in front for ever.
    fn undo_lock_in(&mut self, id: Incarnation) {
        let job = self.job(id);
        if std::mem::take(&mut job.locked_in) {
            job.unlocking = true;
            self.effects.actions.push(Action::UndoLockIn(id));
        }
    }

    // ---- what the agents show

    fn node_lost(&mut self, node: &NodeName) {
        let Some(known) = self.schedule.nodes.get_mut(node) else { return };
        if !known.up {
            return;
        }
        known.up = false;
        self.effects.nodes.push(node.clone());
        self.note(None, format!("RSA node {node} is lost"));
        let on_it: Vec<Incarnation> = self
            .schedule
            .jobs
            .values()
            .filter(|job| job.allocation.as_ref().is_some_and(|found| found.nodes.contains(node)))
            .map(|job| job.id)
            .collect();
        for id in on_it {
            self.mark_broken(id, node, &format!("the RSA node {node} was lost"));
        }
    }

    fn with_ramdisk(&self, ramdisk: &RamDiskId) -> impl Iterator<Item = Incarnation> {
        let of = |job: &&Job| job.ramdisk().as_ref() == Some(ramdisk);
        self.schedule.jobs.values().filter(of).map(|job| job.id)
    }

    fn broken(&mut self, ramdisk: &RamDiskId, node: &NodeName, why: &str) {
        let ids: Vec<Incarnation> = self.with_ramdisk(ramdisk).collect();
        for id in ids {
            self.mark_broken(id, node, why);
        }
    }

    fn mark_broken(&mut self, id: Incarnation, node: &NodeName, why: &str) {
        use RsaState as S;
        let job = self.job(id);
        let matters = !matches!(
            job.rsa_state,
            S::Initial | S::Ineligible | S::Assigned | S::Teardown | S::Destroyed | S::DoneStagingOut
        );
        if !matters {
            return;
        }
        let is_news = job.lost_on.insert(node.clone());
        if job.broken {
            if is_news {
                self.note(Some(id), why.to_owned());
            }
            return;
        }
        job.broken = true;
        why.clone_into(&mut job.broken_why);
        let had = self.lost_words(id);
        let job = self.job(id);
        let text = match job.rsa_state {
            state if state.is_shown() && job.results => format!(
                "{why}: files that the job has in {} may fail with an I/O error, and results may be lost{had}",
                job.outputs()
            ),
            state if state.is_shown() => {
                format!(
                    "{why}: the job's input is read from disk again; files that were open may fail with an I/O error"
                )
            }
            _ => return self.note(Some(id), why.to_owned()),
        };
        self.tell(id, text);
    }

    // ---- orders

    fn abandon(&mut self, id: Incarnation, by: &str) -> Result<(), Refused> {
        self.must_not_run(id)?;
        let job = self.known(id)?;
        match job.rsa_state {
            RsaState::Held | RsaState::Lost => {}
            RsaState::StagingOut => {
                // Destroying the RAM disk ends the copy.
                (job.rsa_state, job.task) = (RsaState::Held, None);
            }
            state => {
                return Err(Refused::NotNow(format!(
                    "job {id} is {state}: only results that are being staged out, held or lost can be abandoned{}",
                    if job.job_state == JobState::Running { "; cancel the job first" } else { "" }
                )));
            }
        }
        (job.results, job.abandoned, job.salvage) = (false, true, false);
        self.tell(id, format!("its results were abandoned by {by}"));
        Ok(())
    }

    // ---- work

    fn ended(&mut self, id: Incarnation, number: u64, outcome: Outcome) {
        let Some(job) = self.schedule.jobs.get_mut(&id) else { return };
        let Some(task) = job.task.filter(|task| task.number == number) else { return };
        job.task = None;
        self.complete(id, task.work, outcome);
    }

    fn complete(&mut self, id: Incarnation, work: Work, outcome: Outcome) {
        use RsaState as S;
        let attempts = self.schedule.site.attempts;
        let (now, backoff) = (self.now, self.schedule.site.backoff);
        let outcome = match outcome {
            Outcome::Later { why } if work == Work::Mount => return self.not_covered(id, &why),
            Outcome::Later { why } => Outcome::Failed { why, blame: Vec::new(), fault: Fault::Again },
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
                self.become_state(id, S::Ready, "");
                let then = if both { "" } else { "; the output follows by the switch after the delay" };
                self.tell(id, format!("{text}{then}"));
                self.ready(id);
            }
            (Work::Construct, Outcome::Done(text)) => {
                let nodes = self.job(id).allocation.iter().flat_map(|found| found.nodes.clone());
                for node in nodes.collect::<Vec<_>>() {
                    self.works(&node);
                }
                self.become_state(id, S::Booted, &text);
            }
            (Work::StageIn, Outcome::Done(text)) => {
                self.become_state(id, S::Ready, &text);
                if !self.schedule.jobs[&id].message.is_empty() {
                    self.tell(id, IS_READY.into());
                }
                self.ready(id);
            }
            (Work::Construct, Outcome::Failed { why, fault: Fault::Elsewhere, .. }) => {
                let job = self.job(id);
                // It gets no other one, and nothing is to be taken down. That one is found when its servers answer.
                (job.hopeless, job.failed_here) = (true, true);
                self.tell(id, why);
                self.become_state(id, S::Destroyed, "");
            }
            (Work::Construct | Work::StageIn, Outcome::Failed { why, blame, fault }) => {
                self.failed(id, &format!("{}: {why}", work.word()), &blame, fault);
                self.become_state(id, S::Aborted, "");
            }
            (Work::StopStageIn, outcome) => {
                let text = match outcome {
                    Outcome::Failed { why, .. } => why,
                    Outcome::Done(text) => text,
                    _ => String::new(),
                };
                self.become_state(id, S::Aborted, &text);
            }
            (Work::Mount, Outcome::Done(text)) => {
                let state = match self.job(id).purpose {
                    Purpose::Input => S::InuseIn,
                    Purpose::Both => S::InuseBoth,
                    Purpose::Output => S::InuseOut,
                };
                self.become_state(id, state, &text);
            }
            (Work::Mount, Outcome::Failed { why, fault, .. }) => {
                // Compute nodes are not the RSA's to drain.
                self.failed(id, &format!("mount: {why}"), &[], fault);
                let job = self.job(id);
                (job.mount_failed, job.torn) = (true, job.results);
                self.become_state(id, S::UnmountNeeded, "what is mounted of it is taken away");
            }
            (Work::Unmount { .. }, Outcome::Done(text)) => {
                let job = self.job(id);
                (job.mount_failed, job.unmounts) = (false, 0);
                self.become_state(id, S::Unmounted, &text);
            }
            (Work::Unmount { force }, Outcome::Failed { why, blame, fault }) => {
                let job = self.job(id);
                job.unmounts += u32::from(fault != Fault::Busy);
                if force && job.unmounts >= attempts {
                    // A node that does not answer can't hold up the results; destroying the RAM disk cuts it off.
                    (job.mount_failed, job.unmounts) = (false, 0);
                    let names: Vec<&str> = blame.iter().map(NodeName::as_str).collect();
                    self.note(Some(id), format!("not unmounted on {}: {why}", names.join(", ")));
                    self.become_state(id, S::Unmounted, "");
                } else {
                    job.not_before = Some(now.plus(backoff));
                    self.become_state(id, S::UnmountNeeded, &why);
                }
            }
            (Work::StageOut, Outcome::Done(text)) if self.schedule.jobs[&id].salvage => {
                self.salvaged(id, &text, &[]);
            }
            (Work::StageOut, Outcome::Salvaged { text, from }) => self.salvaged(id, &text, &from),
            (Work::StageOut, Outcome::Done(text)) => {
                let job = self.job(id);
                (job.results, job.torn, job.stage_outs, job.retry_now) = (false, false, 0, false);
                self.become_state(id, S::DoneStagingOut, &text);
                // Another message, as why it worked on disk, still holds.
                let told = &self.schedule.jobs[&id].message;
                if told.starts_with(NOT_HOME) || told.starts_with(LOST) {
                    self.tell(id, "its results are on disk".into());
                }
            }
            (Work::StageOut, Outcome::Failed { why, fault, .. }) => {
                self.stage_out_failed(id, &why, fault);
            }
            (Work::Destroy, Outcome::Done(text)) => self.destroyed(id, &[], &text),
            (Work::Destroy, Outcome::Failed { why, blame, .. }) => {
                let all = self.job(id).allocation.as_ref().map(|found| found.nodes.clone());
                let left = if blame.is_empty() { all.unwrap_or_default() } else { blame };
                self.destroyed(id, &left, &why);
            }
            // All others were made one of these above.
            (
                _,
                Outcome::Tight(_)
                | Outcome::Salvaged { .. }
                | Outcome::Refused { .. }
                | Outcome::Later { .. },
            ) => {}
        }
    }

    /// The output of a job that runs was not covered: it is tried again a few times, and then the RSA nodes are for others.
    fn not_covered(&mut self, id: Incarnation, why: &str) {
        let now = self.now;
        let job = self.job(id);
        // It has worked on disk all the time.
        job.results = false;
        let pause = LATE_PAUSES.get(job.late as usize).copied();
        job.late += 1;
        job.not_before = pause.map(|pause| now.plus(pause));
        job.hopeless |= pause.is_none();
        let then = match pause {
            Some(pause) => format!("it is tried again in {} s", pause.as_secs()),
            None => "the job works on disk; with #RSA_WAIT=hold it starts with its RAM disk".to_owned(),
        };
        self.become_state(id, RsaState::Ready, "");
        self.tell(id, format!("its output is not in RAM: {why}; {then}"));
    }

    fn stage_out_failed(&mut self, id: Incarnation, why: &str, fault: Fault) {
        let (now, site) = (self.now, &self.schedule.site);
        let (most, backoff) = (site.stage_outs, site.backoff);
        let job = self.job(id);
        job.stage_outs += 1;
        (job.retry_now, job.salvage) = (false, false);
        if fault == Fault::Lost || job.broken {
            job.broken = true;
            let why =
                if job.broken_why.is_empty() { why.to_owned() } else { format!("{}; {why}", job.broken_why) };
            self.become_state(id, RsaState::Lost, "");
            self.tell_of_loss(id, &why);
            return;
        }
        let again = job.stage_outs < most && fault == Fault::Again;
        let pause = backoff.saturating_mul(1 << (job.stage_outs - 1).min(10));
        job.not_before = again.then(|| now.plus(pause));
        self.become_state(id, RsaState::Held, "");
        let name = self.schedule.selector(id);
        let what_next = if again {
            format!("it is tried again in {} s", pause.as_secs())
        } else {
            format!(
                "the results are kept in RAM until `ondeck job retry {name}` or `ondeck job abandon {name}`"
            )
        };
        self.tell(id, format!("{NOT_HOME}{why}; {what_next}"));
    }

    fn tell_of_loss(&mut self, id: Incarnation, why: &str) {
        let (outputs, had) = (self.job(id).outputs(), self.lost_words(id));
        let name = self.schedule.selector(id);
        self.tell(
            id,
            format!(
                "{LOST}{why}{had}; what the job wrote in {outputs} is kept where it still is: `ondeck job retry {name}` \
                 tries again, `ondeck job retry --salvage {name}` saves what the other nodes have and gives up the rest, \
                 `ondeck job abandon {name}` gives up all of it"
            ),
        );
    }

    /// What was on the nodes that were lost, as the end of a sentence; nothing if that is not known.
    fn lost_words(&self, id: Incarnation) -> String {
        let job = &self.schedule.jobs[&id];
        if !job.results {
            return String::new();
        }
        if !self.is_whole_files(job) {
            return "; each node has parts of all files, so any file may miss some".to_owned();
        }
        let mut words = String::new();
        for node in &job.lost_on {
            let Some(part) = job.parts.get(node) else {
                words += &format!("; it is not known which files {node} had");
                continue;
            };
            let ago = self.now.since(part.seen).as_secs();
            words += &format!("; {ago} s before, {node} had {} files of {}", part.files, part.bytes);
            let first = job.real_paths(&part.first);
            if !first.is_empty() {
                let more = if part.files > first.len() as u64 { ", ..." } else { "" };
                words += &format!(" ({}{more})", first.join(", "));
            }
        }
        if !job.lost_on.is_empty() && job.stage_outs > 0 {
            words += "; those of them that are on disk already are safe";
        }
        words
    }

    /// Whether every file of a job's RAM disk is whole on one of its nodes.
    fn is_whole_files(&self, job: &Job) -> bool {
        job.request.engine.unwrap_or(self.schedule.site.engine) != EngineKind::Ceph
    }

    /// Somebody gives up what is lost, to save what is left.
    fn salvage(&mut self, id: Incarnation) -> Result<(), Refused> {
        let job = self.known(id)?.clone();
        if job.rsa_state != RsaState::Lost {
            return Err(Refused::NotNow(format!(
                "job {id} is {}: nothing of it is lost, so there is nothing to salvage",
                job.rsa_state
            )));
        }
        if !job.broken {
            return Err(Refused::NotNow(format!(
                "job {id}: all of its RAM disk is there again; it is staged out by itself"
            )));
        }
        if !self.is_whole_files(&job) {
            return Err(Refused::NotNow(format!(
                "job {id}: each node of its RAM disk has parts of all files, so nothing can be saved without all of them"
            )));
        }
        let job = self.job(id);
        (job.salvage, job.retry_now, job.stage_outs, job.not_before) = (true, true, 0, None);
        self.note(Some(id), "what is left of its results is to be saved, by hand".into());
        Ok(())
    }

    /// What was left of the results is on disk.
    fn salvaged(&mut self, id: Incarnation, text: &str, from: &[NodeName]) {
        let job = self.job(id);
        (job.salvage, job.retry_now) = (false, false);
        if !job.broken {
            // What was given up is there again.
            return self.become_state(id, RsaState::Lost, "all servers of its RAM disk are there again");
        }
        if !from.is_empty() {
            let nodes = job.allocation.iter().flat_map(|found| &found.nodes);
            job.lost_on = nodes.filter(|node| !from.contains(node)).cloned().collect();
        }
        let had = self.lost_words(id);
        let job = self.job(id);
        // If servers had ended, and what they had was still there, nothing is lost.
        let loses = from.is_empty() || !job.lost_on.is_empty();
        job.abandoned = loses;
        (job.results, job.torn, job.stage_outs) = (false, false, 0);
        self.become_state(id, RsaState::DoneStagingOut, text);
        let rest = if loses { format!("{had}; the rest is lost") } else { String::new() };
        self.tell(id, format!("what was left of its results is on disk: {text}{rest}"));
    }

    /// The RAM disk is gone, except for what could not be removed from these nodes.
    fn destroyed(&mut self, id: Incarnation, left: &[NodeName], text: &str) {
        let job = self.job(id);
        let ramdisk = job.ramdisk();
        job.failed_here |= job.broken;
        (job.broken, job.broken_why) = (false, String::new());
        for node in left {
            let Some(ramdisk) = &ramdisk else { break };
            match self.schedule.nodes.get_mut(node) {
                Some(known) => {
                    known.residue.insert(ramdisk.clone());
                    self.job(id).failed_here = true;
                }
                None => {
                    self.schedule.strays.entry(node.clone()).or_default().insert(ramdisk.clone());
                }
            }
            self.effects.nodes.push(node.clone());
            self.effects.actions.push(Action::CleanUp(node.clone(), ramdisk.clone()));
        }
        self.become_state(id, RsaState::Destroyed, text);
    }

    /// An attempt to get the RAM disk under the job failed.
    fn failed(&mut self, id: Incarnation, why: &str, blame: &[NodeName], fault: Fault) {
        let (now, backoff) = (self.now, self.schedule.site.backoff);
        let attempts = self.schedule.site.attempts;
        let job = self.job(id);
        job.failures += 1;
        job.failed_here = true;
        job.hopeless |= fault == Fault::User || job.failures >= attempts;
        job.not_before = Some(now.plus(backoff));
        for node in blame {
            if !job.avoid.contains(node) {
                job.avoid.push(node.clone());
            }
        }
        // It runs, and its input alone is of no use any more.
        let too_late = job.job_state == JobState::Running && !job.wants_out();
        let needs_script = job.request.stage_in.is_some() && !is_held_for_results_alone(job);
        let ends = match (job.hopeless || too_late, job.held && needs_script) {
            (false, _) => "; it is tried again",
            (true, false) => "; the job works on disk",
            // It stays held, which is said when it is given up.
            (true, true) => "",
        };
        self.tell(id, format!("{why}{ends}"));
        for node in blame {
            self.fails(node);
        }
    }

    fn works(&mut self, node: &NodeName) {
        if let Some(known) = self.schedule.nodes.get_mut(node)
            && known.failures > 0
        {
            known.failures = 0;
            self.effects.nodes.push(node.clone());
        }
    }

    fn fails(&mut self, node: &NodeName) {
        let most = self.schedule.site.node_failures;
        let Some(known) = self.schedule.nodes.get_mut(node) else { return };
        known.failures += 1;
        self.effects.nodes.push(node.clone());
        if known.failures >= most && known.drained.is_empty() {
            known.drained = format!("it failed {most} times in a row");
            self.note(None, format!("RSA node {node} is drained: it failed {most} times in a row"));
        }
    }

    fn become_state(&mut self, id: Incarnation, state: RsaState, text: &str) {
        let now = self.now;
        let job = self.job(id);
        job.rsa_state = state;
        job.since = now;
        job.waits_for.clear();
        self.note(Some(id), text.to_owned());
    }

    // ---- time

    fn pass_time(&mut self) {
        let now = self.now;
        let due = |at: Option<Time>| at.is_some_and(|at| at <= now);
        let ids: Vec<Incarnation> = self
            .schedule
            .jobs
            .values()
            .filter(|job| {
                due(job.task.map(|task| task.until))
                    || due(job.ending)
                    || due(hold_until(&self.schedule.site, job))
                    || due(job.not_before)
                    || due(job.prolog_until)
                    || (!job.delay_over && due(job.switch_at))
            })
            .map(|job| job.id)
            .collect();
        for id in ids {
            if due(hold_until(&self.schedule.site, &self.schedule.jobs[&id])) {
                let limit = duration::limit(self.schedule.site.limits.hold);
                let job = self.job(id);
                job.hopeless = true;
                let for_results = is_held_for_results_alone(job);
                let script = job.request.stage_in.is_some() && !for_results;
                let then = if script { "" } else { "; the job works on disk" };
                let why = match job.again_since {
                    _ if for_results => "the results of the job that it depends on were not on disk within",
                    Some(_) => "other jobs have written where its input is for",
                    None => "there were no RSA nodes for it within",
                };
                self.tell(id, format!("no RAM disk: {why} {limit}{then}"));
            }
            if due(self.job(id).ending) {
                // Whatever is left of it there can't be waited for.
                self.set_job_state(id, JobState::Finished, "has not ended on all of its nodes in time");
            }
            if due(self.job(id).prolog_until) {
                let job = self.job(id);
                job.prolog_until = None;
                if job.prolog == Prolog::Expected {
                    job.prolog = Prolog::Over;
                    self.no_prolog_asked(id);
                }
            }
            let job = self.job(id);
            if due(job.switch_at) {
                job.delay_over = true;
            }
            if due(job.not_before) {
                job.not_before = None;
                job.retry_now |= job.rsa_state == RsaState::Held;
            }
            if let Some(task) = job.task.filter(|task| task.until <= now) {
                job.task = None;
                let why = format!("it took longer than {} s", self.limit(task.work).as_secs());
                self.complete(id, task.work, Outcome::Failed { why, blame: Vec::new(), fault: Fault::Again });
            }
        }
    }

    fn limit(&self, work: Work) -> Duration {
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

    // ---- the table, applied

    /// Applies the table until nothing moves. What is given back may let another job move, so jobs are asked again.
    fn settle(&mut self) {
        let mut order: Vec<_> = self
            .schedule
            .jobs
            .values()
            .map(|job| {
                let first = policy::turn(&self.schedule.site, &self.schedule.served, self.now, job);
                (first.is_none(), first, std::cmp::Reverse(job.priority), job.submitted, job.id)
            })
            .collect();
        order.sort_unstable();
        let mut usage = self.usage();
        loop {
            let mut again = false;
            let mut line = {
                let in_turn = order.iter().filter_map(|(.., id)| self.schedule.jobs.get(id));
                let running = in_turn.filter(|job| job.job_state == JobState::Running && wants_nodes(job));
                Line::new(&self.schedule.site, &usage, self.now, running)
            };
            for (.., id) in &order {
                while let Some(job) = self.schedule.jobs.get(id) {
                    if is_held_for_results_alone(job) && self.let_go_if_home(*id) {
                        continue;
                    }
                    let Some(job) = self.schedule.jobs.get(id) else { break };
                    let next = match decide(job) {
                        Move::Wait if changes_on_disk(job, &usage) => Move::StageAgain,
                        Move::Wait => break,
                        next => next,
                    };
                    let (before, had) = (Taken::by(job), job.allocation.is_some());
                    if !self.apply(*id, next, &usage, &mut line) {
                        break;
                    }
                    let after = self.schedule.jobs.get(id).map(Taken::by).unwrap_or_default();
                    usage.change(&before, &after, &self.schedule.nodes);
                    let has = self.schedule.jobs.get(id).is_some_and(|job| job.allocation.is_some());
                    again |= had && !has || matches!(next, Move::Forget | Move::Mount);
                }
                if let Some(job) = self.schedule.jobs.get_mut(id)
                    && job.prolog == Prolog::Waiting
                    && job.rsa_state != RsaState::Mounting
                {
                    // It is mounted, or will not be in time.
                    job.prolog = Prolog::Over;
                    self.effects.jobs.push(*id);
                    again = true;
                }
            }
            // What READY leads to depends on the Prolog and on where others write; released nodes are for others.
            if !again {
                break;
            }
        }
        #[cfg(test)]
        assert_eq!(usage, self.usage(), "what is in use was not kept up to date");
    }

    fn usage(&self) -> Use {
        Use::of(&self.schedule.nodes, self.schedule.jobs.values())
    }

    /// Makes a move; returns whether anything changed.
    fn apply(&mut self, id: Incarnation, next: Move, usage: &Use, line: &mut Line) -> bool {
        match next {
            Move::Wait => false,
            Move::Assign(purpose) => self.assign(id, purpose, usage, line),
            Move::GiveUp => {
                self.tell_component(id);
                self.let_go_if_hopeless(id);
                // While it runs, nothing can be undone; when it has ended, it is.
                if self.schedule.jobs[&id].job_state != JobState::Running {
                    self.undo_lock_in(id);
                }
                self.become_state(id, RsaState::Ineligible, "");
                true
            }
            // It has nodes of a RAM disk that became of no use. Others may need them.
            Move::Construct(_) if self.must_wait_for_results(id, usage) => {
                self.release(id);
                true
            }
            Move::Construct(purpose) => {
                let epoch = self.next_epoch();
                let job = self.job(id);
                (job.purpose, job.torn) = (purpose, false);
                job.lost_on.clear();
                job.parts.clear();
                if let Some(allocation) = &mut job.allocation {
                    allocation.epoch = epoch;
                }
                self.work(id, Work::Construct, RsaState::Booting)
            }
            Move::StageIn(purpose) => {
                if self.must_wait_to_stage(id, usage) {
                    return false;
                }
                self.job(id).purpose = purpose;
                self.work(id, Work::StageIn, RsaState::StagingIn)
            }
            Move::Stop => self.work(id, Work::StopStageIn, RsaState::StoppingStagingIn),
            Move::StageAgain => self.stage_again(id, usage),
            Move::Mount => {
                let job = self.job(id);
                if job.io_nodes.is_empty() {
                    return self.waits(
                        id,
                        "its compute nodes are not known yet; if the site's io_nodes command has failed, the \
                         scheduler's log says why",
                    );
                }
                job.results |= job.purpose != Purpose::Input;
                self.work(id, Work::Mount, RsaState::Mounting)
            }
            Move::NeedUnmount => {
                let text =
                    if self.job(id).broken { "it is taken away, because a server of it is lost" } else { "" };
                self.job(id).unsure = false;
                self.become_state(id, RsaState::UnmountNeeded, text);
                true
            }
            Move::Unmount { force } => self.work(id, Work::Unmount { force }, RsaState::Unmounting),
            Move::StageOut => {
                if self.must_wait_to_stage(id, usage) || self.must_wait_for_stage_out(id) {
                    return false;
                }
                let job = self.job(id);
                (job.retry_now, job.not_before) = (false, None);
                self.work(id, Work::StageOut, RsaState::StagingOut)
            }
            Move::Lose => {
                self.become_state(id, RsaState::Lost, "");
                let why = self.job(id).broken_why.clone();
                self.tell_of_loss(id, &why);
                true
            }
            Move::Destroy => {
                if self.job(id).results {
                    // The table does not lead here; if it ever did, the results would come first.
                    return self.waits(id, "it holds results");
                }
                self.work(id, Work::Destroy, RsaState::Teardown)
            }
            Move::Release => {
                self.release(id);
                true
            }
            Move::Forget => {
                self.note(Some(id), format!("removing state of job {id}"));
                self.effects.gone.extend(self.schedule.jobs.remove(&id));
                true
            }
        }
    }

    fn waits(&mut self, id: Incarnation, why: &str) -> bool {
        if self.schedule.jobs[&id].waits_for != why {
            self.job(id).waits_for = why.to_owned();
            self.note(Some(id), format!("waits: {why}"));
        }
        false
    }

    fn must_wait_to_stage(&mut self, id: Incarnation, usage: &Use) -> bool {
        if let Some(most) = self.schedule.site.staging
            && usage.copying() >= most
        {
            self.waits(id, &format!("{most} jobs are staging already"));
            return true;
        }
        self.must_wait_for_results(id, usage)
    }

    /// Two jobs do not bring results home into the same directory at the same time: each looks what is there before it
    /// puts its own version in place, or beside another's.
    fn must_wait_for_stage_out(&mut self, id: Incarnation) -> bool {
        let mine = &self.schedule.jobs[&id].request.data_out;
        let meets = |other: &Job| {
            let mut theirs = other.request.data_out.iter();
            theirs.any(|theirs| mine.iter().any(|mine| mine.starts_with(theirs) || theirs.starts_with(mine)))
        };
        let stages_out = |other: &&Job| {
            other.id != id && matches!(other.task, Some(Task { work: Work::StageOut, .. })) && meets(other)
        };
        let Some(other) = self.schedule.jobs.values().find(stages_out).map(|other| other.id) else {
            return false;
        };
        self.waits(id, &format!("job {other} is bringing results home into the same directory"));
        true
    }

    /// A stage-in whose source overlaps results that are not on disk yet waits for them.
    fn must_wait_for_results(&mut self, id: Incarnation, usage: &Use) -> bool {
        let job = &self.schedule.jobs[&id];
        if job.job_state != JobState::Ondeck {
            return false;
        }
        let paths = job.request.data_in.iter().chain(&job.request.data_out);
        let Some((other, path)) = usage.results_in_the_way_of(id, paths) else { return false };
        let why = format!("results of job {other} for {} are not on disk yet", path.display());
        self.waits(id, &why);
        true
    }

    /// A job that must not start without its input does not start with one that is about to change.
    fn stage_again(&mut self, id: Incarnation, usage: &Use) -> bool {
        let now = self.now;
        let job = &self.schedule.jobs[&id];
        let Some((other, path)) = usage.results_in_the_way_of(id, &job.request.data_in) else { return false };
        let why =
            format!("job {other} writes to {}: it is staged again when that is on disk", path.display());
        if !self.schedule.jobs[&id].held {
            let job = self.job(id);
            (job.held, job.hold_seen, job.let_go) = (true, false, false);
            self.order(Action::Hold(id), id);
        }
        self.undo_lock_in(id);
        let job = self.job(id);
        job.again_since.get_or_insert(now);
        let stops = job.rsa_state == RsaState::StagingIn;
        self.tell(id, why);
        if stops {
            return self.work(id, Work::StopStageIn, RsaState::StoppingStagingIn);
        }
        self.become_state(id, RsaState::Aborted, "");
        true
    }

    /// A job that is held for the results of others alone may start when they are on disk, or were abandoned, or are lost.
    /// Returns whether it may.
    fn let_go_if_home(&mut self, id: Incarnation) -> bool {
        let job = &self.schedule.jobs[&id];
        let others = self.schedule.jobs.values().filter(|other| other.id != id && other.results);
        let mut lost = None;
        for other in others {
            let Some(path) = meets(&job.request, &other.request.data_out) else { continue };
            if other.rsa_state != RsaState::Lost {
                return false;
            }
            lost = Some((self.schedule.selector(other.id), path.display().to_string()));
        }
        let job = self.job(id);
        (job.held, job.let_go) = (false, true);
        if let Some((other, path)) = lost {
            self.tell(
                id,
                format!(
                    "results of job {other} for {path} are lost: the job starts with what is on disk; `ondeck job show \
                     {other}` says what is missing"
                ),
            );
        }
        self.order(Action::LetGo(id), id);
        true
    }

    fn assign(&mut self, id: Incarnation, purpose: Purpose, usage: &Use, line: &mut Line) -> bool {
        if self.schedule.jobs[&id].backing_off() || self.must_wait_for_results(id, usage) {
            return false;
        }
        let job = &self.schedule.jobs[&id];
        if job.older {
            let silent: Vec<&str> = self
                .schedule
                .nodes
                .iter()
                .filter_map(|(name, node)| (!node.heard).then_some(name.as_str()))
                .collect();
            if !silent.is_empty() {
                let why = format!(
                    "it had started before the scheduler's journal began, and its RAM disk may be on {}, whose agents have not \
                     answered since; an administrator gives a node up with `ondeck node give-up NODE`",
                    silent.join(", ")
                );
                return self.waits(id, &why);
            }
        }
        match policy::place(&self.schedule.site, usage, line, self.now, job) {
            Placement::Later(why) => self.waits(id, &why),
            Placement::Full(why) => self.lacks(id, &why, usage, line),
            Placement::Never(why) => {
                let job = self.job(id);
                (job.hopeless, job.lacking) = (true, None);
                self.tell(id, format!("no RAM disk: {why}; the job works on disk"));
                true
            }
            Placement::Nodes(nodes, promise) => {
                let whose = (policy::pool_of(&self.schedule.site, job).to_owned(), job.owner.uid);
                let (epoch, now) = (self.next_epoch(), self.now);
                for name in &nodes {
                    if let Some(node) = self.schedule.nodes.get_mut(name) {
                        node.promised.insert(id, promise);
                    }
                    self.effects.nodes.push(name.clone());
                }
                let text = format!("assigning {} rsa-nodes to job {id}", nodes.len());
                line.leaves(id);
                self.schedule.served.insert(whose, now);
                let job = self.job(id);
                (job.purpose, job.lacking) = (purpose, None);
                job.allocation = Some(Allocation { nodes, promise, epoch, since: now });
                self.become_state(id, RsaState::Assigned, &text);
                true
            }
        }
    }

    /// Nodes are not free for it. Whoever has waited for long is not overtaken, if there will ever be enough for it.
    fn lacks(&mut self, id: Incarnation, why: &str, usage: &Use, line: &mut Line) -> bool {
        if self.schedule.jobs[&id].lacking.is_none() {
            self.job(id).lacking = Some(self.now);
        }
        let (schedule, job) = (&*self.schedule, &self.schedule.jobs[&id]);
        let pool = policy::pool_of(&schedule.site, job);
        if policy::first_since(&schedule.site, self.now, job).is_some()
            && !line.is_headed(pool)
            && policy::suffices_in_time(
                &schedule.site,
                usage,
                &schedule.nodes,
                |of| stays(&schedule.jobs, of),
                job,
            )
        {
            line.wait_behind(pool, id);
        }
        let on_disk = if job.held {
            format!("; `scontrol release {}` starts it on disk", id.job)
        } else {
            String::new()
        };
        self.waits(id, &format!("{why}{on_disk}"))
    }

    fn release(&mut self, id: Incarnation) {
        let now = self.now;
        let job = self.job(id);
        job.failed_here = false;
        let Some(Allocation { nodes, since, promise, .. }) = job.allocation.take() else { return };
        let (uid, account) = (job.owner.uid, job.account.clone());
        // Of a node that others may have a part of, it had its part.
        let part = |name: &NodeName| match self.schedule.nodes.get(name) {
            Some(node) if self.schedule.site.fractions && node.capacity > promise => {
                promise.0 as f64 / node.capacity.0 as f64
            }
            _ => 1.0,
        };
        let node_seconds = now.since(since).as_secs_f64() * nodes.iter().map(part).sum::<f64>();
        self.effects.used.push(Used { uid, account, node_seconds });
        for name in &nodes {
            if let Some(node) = self.schedule.nodes.get_mut(name) {
                node.promised.remove(&id);
            }
            self.effects.nodes.push(name.clone());
        }
        let names: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
        self.become_state(id, RsaState::Initial, &format!("released {}", names.join(", ")));
    }

    fn next_epoch(&mut self) -> Epoch {
        let last = &mut self.schedule.last_epoch;
        *last = Epoch((self.now.0 * 1000).max(last.0 + 1));
        *last
    }

    fn work(&mut self, id: Incarnation, work: Work, state: RsaState) -> bool {
        self.schedule.last_task += 1;
        let number = self.schedule.last_task;
        let mut limit = self.limit(work);
        let job = &self.schedule.jobs[&id];
        if work == Work::Mount && job.prolog == Prolog::Over {
            // What the job has written meanwhile is copied first.
            limit *= LATE_MOUNTS;
        }
        let task = Task { number, work, until: self.now.plus(limit) };
        let job = self.job(id);
        job.task = Some(task);
        let prepares = work == Work::StageIn && job.purpose == Purpose::Output;
        self.become_state(id, state, if prepares { "preparing its output directories" } else { "" });
        self.effects.actions.push(Action::Begin(id, task));
        true
    }

    /// Tells the user of a component of a heterogeneous job why it has no RAM disk. Ranks on all components run as one
    /// program: in RAM disks of their own they would not see each other's files, and a file that they share would come
    /// home as one component's part of it.
    fn tell_component(&mut self, id: Incarnation) {
        let job = &self.schedule.jobs[&id];
        let Some(whole) = job.component_of else { return };
        let script = if job.request.stage_in.is_some() { ", and its stage-in script is not run" } else { "" };
        self.tell(
            id,
            format!(
                "no RAM disk: it is a component of the heterogeneous job {whole}, whose components can't share one yet; all \
                 of them work on disk{script}. To have one, submit it as one job, without `:` and `#SBATCH hetjob`"
            ),
        );
    }

    /// A job that was held for its input and will not get it: it may start on disk, unless it needs what its own script
    /// would have made.
    fn let_go_if_hopeless(&mut self, id: Incarnation) {
        let job = self.job(id);
        if !job.held {
            return;
        }
        // Nobody else would release a component, and without a release it would be held for ever.
        let may_start = wait_policy(&job.request) != WaitPolicy::Hold || job.component_of.is_some();
        if job.request.stage_in.is_none() || may_start {
            (job.held, job.let_go) = (false, true);
            self.order(Action::LetGo(id), id);
        } else {
            let why = std::mem::take(&mut job.message);
            let why = why.replace("; the job works on disk", "");
            self.tell(
                id,
                format!("{why}; the job stays held, because it may need what its stage-in script makes"),
            );
        }
    }
}

impl Step<'_> {
    /// What READY brings about besides waiting.
    fn ready(&mut self, id: Incarnation) {
        let lock_in = self.schedule.site.lock_in != LockIn::Off;
        let job = self.job(id);
        if job.job_state != JobState::Ondeck {
            return;
        }
        if job.held {
            (job.held, job.let_go) = (false, true);
            self.order(Action::LetGo(id), id);
        } else if lock_in && !job.locked_in {
            (job.locked_in, job.unlocking) = (true, false);
            self.effects.actions.push(Action::LockIn(id));
        }
    }
}
