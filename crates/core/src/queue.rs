//! What a workload manager shows of its queue, in words that no workload manager owns.

use serde::{Deserialize, Serialize};

use crate::{Incarnation, JobId, NodeName, Owner};

/// Where a job stands in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It starts as soon as nodes are free: it is next in line, or has been given an expected start.
    Next,
    /// It waits behind others, for a dependency, a limit or a time.
    Waiting,
    /// It waits, and the workload manager has not judged it since it was submitted or changed.
    Unjudged,
    /// The workload manager has asked for its input, and waits for it: it would start the job as soon as it is there and nodes
    /// are free.
    StagingIn,
    /// It is held, by its user or by an administrator, until it is released.
    Held,
    /// Its nodes are being made ready.
    Configuring,
    /// It runs, or is suspended.
    Running,
    /// It is ending: its processes may have been asked to, and may still run; its Epilogs run.
    Ending,
    /// It has ended.
    Ended,
}

impl Standing {
    /// Whether it is pending, and nobody holds it.
    pub fn waits(self) -> bool {
        matches!(self, Standing::Next | Standing::Waiting | Standing::Unjudged | Standing::StagingIn)
    }
}

/// A job of the queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedJob {
    /// Which life of which job. As it comes from the workload manager, the time of submission in it is that of the record.
    pub id: Incarnation,
    /// Whose it is.
    pub owner: Owner,
    /// The account it is charged to; empty if there is none.
    pub account: String,
    /// Where it stands.
    pub standing: Standing,
    /// Why it stands there, in the workload manager's own word.
    pub reason: String,
    /// How many compute nodes it asked for, or has.
    pub node_count: u32,
    /// Its compute nodes: those it has, or those it is expected to get.
    pub nodes: Vec<NodeName>,
    /// When it started or is expected to, in seconds since 1970.
    pub start: Option<u64>,
    /// When it was submitted, in seconds since 1970, as the workload manager says now: a requeue changes it.
    pub submitted: u64,
    /// Its priority: greater ones go first.
    pub priority: u64,
    /// Its quality of service; empty if there is none.
    pub qos: String,
    /// Whether it was held at submission until its input is there, and not by its user or an administrator. The mark
    /// outlives the hold: `standing` says whether it is still held.
    #[serde(default)]
    pub held_for_input: bool,
    /// Whether it waits for other jobs, as `--dependency` has it: what it reads may not have been written yet.
    #[serde(default)]
    pub dependent: bool,
    /// The numbers of those other jobs; of an array, that of one element.
    #[serde(default)]
    pub depends_on: Vec<JobId>,
    /// The heterogeneous job that it is a component of, by the number of that job's first component. Its components start
    /// together and run as one job.
    #[serde(default)]
    pub component_of: Option<JobId>,
    /// Whether it stands for several elements of an array, which share one record until each gets a number of its own. Nothing
    /// can be done for it but to hold it.
    #[serde(default)]
    pub several: bool,
    /// Whether the workload manager takes it for a job with a burst buffer, and asks for its input and its results itself.
    #[serde(default)]
    pub has_burst_buffer: bool,
    /// Whether it has such a burst buffer, has ended, and the workload manager keeps it until its results are on disk.
    #[serde(default)]
    pub waits_for_results: bool,
    /// Whether it waits for its input, and the workload manager has lost that burst buffer: it asks nobody, and never starts the job.
    #[serde(default)]
    pub burst_buffer_lost: bool,
}
