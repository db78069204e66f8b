//! What can happen: events, and how work ended.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Time;
use super::job::InventorySummary;
use crate::allocation::Purpose;
use crate::{Bytes, Incarnation, NodeName, Owner, QueuedJob, RamDiskId, Request};

/// A job as the queue shows it, with what its script asks for if it asks for anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedJob {
    /// The job, by its own incarnation.
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
pub struct FoundRamDisk {
    /// Its name and epoch, as its agents have them.
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

/// What the workload manager asks for a job with a burst buffer, in its own words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BurstBufferCall {
    /// The job's life begins.
    Setup,
    /// It waits for its input.
    DataIn,
    /// It has nodes, and is about to start on them.
    PreRun,
    /// It has ended, or is ending.
    PostRun,
    /// It waits for its results. The schedule hears of that only when it was answered that they are kept.
    DataOut,
    /// Its life is over.
    Teardown,
}

/// What happened outside, which [`Schedule::handle`](super::Schedule::handle) decides on.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Event {
    /// The queue, as it was at a time: all jobs that have asked for something or are known here. Known ones that are
    /// missing have left it.
    Queue {
        /// When the workload manager was asked.
        taken: Time,
        jobs: Vec<ObservedJob>,
    },
    /// A job's Prolog runs on one of its nodes, and waits for an answer.
    Starting(Box<ObservedJob>),
    /// A job's Prologs have given up waiting: its program starts.
    PrologOver(Incarnation),
    /// The workload manager asks something for a job with a burst buffer; again, perhaps, and late.
    BurstBuffer { call: BurstBufferCall, seen: Box<ObservedJob> },
    /// The call in which a job waits for its input must end: it keeps other calls of the workload manager from ending, or its time
    /// is up.
    MustNotWait(Incarnation),
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
        /// The number of its work order.
        number: u64,
        outcome: Outcome,
    },
    /// A job's RAM disk is there that is not known of. Comes before [`Event::NodeUp`] of its nodes, and after the queue was
    /// seen.
    Found(Box<FoundRamDisk>),
    /// An RSA node that does not answer is given up, by name: nothing of a job that was there before the journal is waited
    /// for on it. What it has nevertheless is found when it comes back.
    GiveUp(NodeName),
    /// The agent of an RSA node answers.
    NodeUp {
        node: NodeName,
        /// What it lends in all.
        capacity: Bytes,
    },
    /// An RSA node has not answered for so long that what is on it is taken for lost.
    NodeLost(NodeName),
    /// A server of a RAM disk was lost.
    Broken {
        ramdisk: RamDiskId,
        /// The RSA node.
        node: NodeName,
        /// What is wrong.
        why: String,
    },
    /// A RAM disk that was taken for broken is whole.
    Whole(RamDiskId),
    /// What RSA nodes have of the results in a RAM disk.
    Inventoried {
        ramdisk: RamDiskId,
        /// Each node that has answered.
        inventories: Vec<(NodeName, InventorySummary)>,
    },
    /// What had been left on a node is gone.
    Cleaned { node: NodeName, ramdisk: RamDiskId },
    /// A node has nothing of a job that the schedule does not know, though it is promised to it.
    Vacated { node: NodeName, job: Incarnation },
    /// RSA nodes on which a job's RAM disk was all but full while the job could write to it.
    RanFull { job: Incarnation, nodes: Vec<NodeName> },
    /// Something that a job's user should know.
    Noticed { job: Incarnation, text: String },
    /// Somebody wants a stage-out that is held to be tried again.
    Retry {
        job: Incarnation,
        /// Whether what is lost is given up, to save what is left: for results that are LOST.
        salvage: bool,
    },
    /// Somebody gives results up, by name.
    Abandon { job: Incarnation, by: String },
    /// An RSA node shall lend nothing new.
    Drain { node: NodeName, why: String },
    /// A drained node shall lend again.
    Resume(NodeName),
    /// A job is not kept in front of the queue any longer.
    Unlocked(Incarnation),
    /// The workload manager's daemon was started, at this time by its own clock: another number is another start.
    ControllerStarted(u64),
    /// Time has passed.
    Tick,
}

/// How work ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Outcome {
    /// It is done. The text is for the job's log.
    Done(String),
    /// It was pretended only: nothing was done, as in a simulation nothing is.
    Pretended,
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
        fault: Fault,
    },
    /// The job runs, and its output could not be covered now; it works on disk as before, and nothing was changed. It may
    /// be tried again, but not for ever.
    Later {
        /// In words: what, where, and what to do.
        why: String,
    },
    /// It failed, perhaps half-way: what was done may stand on some nodes.
    Failed {
        /// In words: what, where, and what to do.
        why: String,
        /// The nodes that failed.
        blame: Vec<NodeName>,
        fault: Fault,
    },
}

/// What follows from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// It may work another time, or elsewhere.
    #[serde(rename = "again")]
    Transient,
    /// It will not work until the user changes something.
    #[serde(rename = "user")]
    NeedsUser,
    /// Files are open.
    Busy,
    /// Data was lost.
    Lost,
    /// The job uses another RAM disk, which the journal does not know. Nothing was begun.
    Elsewhere,
}
