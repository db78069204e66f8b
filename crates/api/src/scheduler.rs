//! What the scheduler is asked and answers. Its routes stand with their handlers in `ondeck-scheduler`; the description that
//! is made of both, `GET /v1/openapi.json`, has all of it.
//!
//! # Layout
//!
//! - `status`: what is going on
//! - `story`: all that is known of one job
//! - here: hooks, waiting, orders and usage

mod status;
mod story;

use ondeck_core::{Incarnation, JobId, NodeName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use status::{FilesystemStatus, JobStatus, NodeStatus, Status, Transfer, Warning, WarningKind};
pub use story::{
    AllocationView, DelayView, Forgotten, JobStory, JobView, LayoutRun, LayoutState, LayoutView, LogLine,
    LostPart, OtherLife, PartView,
};

/// What a Prolog or Epilog says.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "job": "42.1",
    "node": "c1",
    "nodes": "",
    "patience_ms": 18000
})))]
pub struct Hook {
    /// The job's life: 42, or 42.1 after its first requeue.
    #[schema(value_type = String)]
    pub job: Incarnation,
    /// The node where it runs.
    #[schema(value_type = String)]
    pub node: NodeName,
    /// The job's nodes, in the workload manager's notation; empty if not known.
    pub nodes: String,
    /// How long the hook waits, in milliseconds.
    pub patience_ms: u64,
}

/// What a hook is told.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "mounted": true,
    "message": "",
    "undecided": false
})))]
pub struct HookAnswer {
    /// Whether the RAM disk is shown on the job's nodes.
    pub mounted: bool,
    /// What the user should know; empty if nothing.
    pub message: String,
    /// Whether the nodes may show it all the same: what all of them show when the job begins, it keeps.
    #[serde(default)]
    #[schema(required = true)]
    pub undecided: bool,
}

/// What Slurm's burst-buffer plugin asks for a job.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "job": 42,
    "patience_ms": 30000,
    "last": false,
    "hurry": false,
    "in_the_way": false
})))]
pub struct BurstBufferQuestion {
    /// The job's number.
    #[schema(value_type = u32)]
    pub job: JobId,
    /// How long the caller waits, in milliseconds.
    pub patience_ms: u64,
    /// Whether nobody will ask again: then a stage-out that is not over counts as kept, and Slurm is told of its end; a job that waits
    /// for its input is held.
    #[serde(default)]
    #[schema(required = true)]
    pub last: bool,
    /// Whether a teardown is one that does not wait for results: somebody has said `scancel --hurry`, or the job has not started.
    #[serde(default)]
    #[schema(required = true)]
    pub hurry: bool,
    /// Whether other calls of Slurm's can't end before this one, as its process has inherited their pipes: it must not last.
    #[serde(default)]
    #[schema(required = true)]
    pub in_the_way: bool,
}

/// What Slurm's burst-buffer plugin is told.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "verdict": "done",
    "message": "its RAM disk is ready"
})))]
pub struct BurstBufferAnswer {
    /// What came of it.
    pub verdict: BurstBufferVerdict,
    /// What the user should know; empty if nothing.
    pub message: String,
}

/// What came of a question of Slurm's burst-buffer plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BurstBufferVerdict {
    /// What was asked for is done, or nothing is to be done.
    Done,
    /// The job works on disk.
    OnDisk,
    /// It is under way: ask again.
    Later,
    /// Results are kept in RAM until somebody decides.
    Kept,
    /// What the job needs could not be made, and it must not start.
    Failed,
}

/// Why a node shall lend nothing new.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "why": "memory is replaced on Monday"
})))]
pub struct Drain {
    /// In words.
    pub why: String,
}

/// What a user had of the RSA, in one account.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "uid": 20001,
    "account": "physics",
    "node_seconds": 7200.0,
    "allocations": 4
})))]
pub struct Usage {
    /// Who, as a user id.
    pub uid: u32,
    /// The account; empty if jobs have none.
    pub account: String,
    /// RSA nodes times the seconds for which they were promised.
    pub node_seconds: f64,
    /// How many times nodes were promised.
    pub allocations: u64,
}

/// What whoever waits for a job's results is told.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "done": false,
    "abandoned": false,
    "stuck": false,
    "state": "RUNNING, INUSE_BOTH",
    "message": "",
    "ran_full": false
})))]
pub struct Waited {
    /// Whether nothing is to be waited for any more: all results are on disk, or there are none.
    pub done: bool,
    /// Whether its results were given up.
    pub abandoned: bool,
    /// Whether somebody must decide: results are held or lost, and nothing is tried by itself.
    pub stuck: bool,
    /// Where it stands, in a word or two.
    pub state: String,
    /// What its user should know.
    pub message: String,
    /// Whether its RAM disk was all but full, so that its programs may not have written all that they should.
    #[serde(default)]
    #[schema(required = true)]
    pub ran_full: bool,
}
