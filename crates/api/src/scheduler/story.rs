//! All that is known of one job.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use ondeck_core::allocation::Purpose;
use ondeck_core::schedule::{JobState, RsaState};
use ondeck_core::{Bytes, Incarnation, JobId, NodeName, Owner, Rate, Request};
use ondeck_layout::history::Run;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Transfer;
use crate::schema;

/// All that is known of a job.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct JobStory {
    /// What is known of it; as it was last if it is gone.
    pub job: JobView,
    /// Whether nothing of it is to be done any more.
    pub done: bool,
    /// The transfer under way.
    #[schema(required = true)]
    pub transfer: Option<Transfer>,
    /// What happened.
    pub log: Vec<LogLine>,
    /// Seconds that it spent in each state, in the order of the first entry.
    #[schema(value_type = Vec<(schema::RsaState, f64)>)]
    pub phases: Vec<(RsaState, f64)>,
    /// The layouts of its directories on disk, as its `#RSA_LAYOUT` lines ask for them.
    #[serde(default)]
    #[schema(required = true)]
    pub layouts: Vec<LayoutView>,
    /// How it was delayed because a filesystem was busy, if it was.
    #[serde(default)]
    #[schema(required = true)]
    pub delay: Option<DelayView>,
    /// What the RSA nodes had of its results that are lost.
    #[serde(default)]
    #[schema(required = true)]
    pub lost: Vec<LostPart>,
    /// Other lives of the job, and other jobs that had its number, as far as the caller may see them.
    #[serde(default)]
    #[schema(required = true)]
    pub others: Vec<OtherLife>,
}

/// What readers are told of a job: what it asks for, what it has, and where it stands. The journal keeps more, in a form of
/// its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "id": "42@1795381275",
    "owner": {
        "uid": 20001,
        "gid": 20001
    },
    "account": "physics",
    "request": {
        "data_in": [
            "/scratch/case/in"
        ],
        "data_out": [
            "/scratch/case/out"
        ],
        "stage_in": null,
        "stage_out": null,
        "delay": null,
        "capacity": null,
        "nodes": null,
        "pool": null,
        "engine": null,
        "pack": null,
        "wait": null,
        "out_size": null,
        "copy_out_interval": null
    },
    "work_dir": "/scratch/case",
    "component_of": null,
    "compute_nodes": 2,
    "nodes": [
        "c1",
        "c2"
    ],
    "priority": 4294901758u64,
    "submitted": 1795381275u64,
    "started_ms": 1795381290000u64,
    "job_state": "RUNNING",
    "rsa_state": "INUSE_BOTH",
    "since_ms": 1795381290400u64,
    "purpose": "both",
    "allocation": {
        "nodes": [
            "r1"
        ],
        "promise": 144703488
    },
    "io_nodes": [
        "c1",
        "c2"
    ],
    "results": true,
    "abandoned": false,
    "held": false,
    "failures": 0,
    "parts": {
        "r1": {
            "files": 2,
            "bytes": 4096,
            "seen_ms": 1795381350000u64
        }
    },
    "lost_on": [],
    "message": "",
    "waits_for": ""
})))]
pub struct JobView {
    /// Which life of which job.
    #[schema(value_type = String)]
    pub id: Incarnation,
    /// Whose it is.
    #[schema(value_type = schema::Owner)]
    pub owner: Owner,
    /// The account it is charged to.
    pub account: String,
    /// What its `#RSA_` lines ask for; paths are absolute.
    #[schema(value_type = Object)]
    pub request: Request,
    /// The directory it was submitted from.
    #[schema(value_type = String)]
    pub work_dir: PathBuf,
    /// The heterogeneous job that it is a component of: it gets nothing.
    #[schema(required = true, value_type = Option<u32>)]
    pub component_of: Option<JobId>,
    /// How many compute nodes it has or wants.
    pub compute_nodes: u32,
    /// Its compute nodes, since it runs.
    #[schema(value_type = Vec<String>)]
    pub nodes: Vec<NodeName>,
    /// Its priority in the queue.
    pub priority: u64,
    /// When it was submitted, in seconds since 1970.
    pub submitted: u64,
    /// When it was first seen running, in milliseconds since 1970.
    #[schema(required = true)]
    pub started_ms: Option<u64>,
    /// What the workload manager does with it.
    #[schema(value_type = schema::JobState)]
    pub job_state: JobState,
    /// What Ondeck does for it.
    #[schema(value_type = schema::RsaState)]
    pub rsa_state: RsaState,
    /// Since when it is in that state, in milliseconds since 1970.
    pub since_ms: u64,
    /// What its RAM disk is for, or will be.
    #[schema(value_type = schema::Purpose)]
    pub purpose: Purpose,
    /// What is promised to it.
    #[schema(required = true)]
    pub allocation: Option<AllocationView>,
    /// Where it is shown: the job's nodes, or what the site's mapping makes of them.
    #[schema(value_type = Vec<String>)]
    pub io_nodes: Vec<NodeName>,
    /// Whether there may be results in it that are not on disk.
    pub results: bool,
    /// Whether somebody abandoned results of it.
    pub abandoned: bool,
    /// Whether it is held in the queue until its input is there.
    pub held: bool,
    /// How often building, filling or mounting failed.
    pub failures: u32,
    /// What its RSA nodes had of its results, when they were last asked.
    #[schema(value_type = BTreeMap<String, PartView>)]
    pub parts: BTreeMap<NodeName, PartView>,
    /// The RSA nodes whose part of it was lost.
    #[schema(value_type = BTreeSet<String>)]
    pub lost_on: BTreeSet<NodeName>,
    /// The latest that its user should know; empty if nothing.
    pub message: String,
    /// Why it waits, if it does; not a fault.
    pub waits_for: String,
}

/// The RSA nodes of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "nodes": [
        "r1"
    ],
    "promise": 144703488
})))]
pub struct AllocationView {
    /// Which nodes.
    #[schema(value_type = Vec<String>)]
    pub nodes: Vec<NodeName>,
    /// Bytes that each promises, the engine's own needs included.
    #[schema(value_type = u64)]
    pub promise: Bytes,
}

/// What an RSA node had of a job's results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "files": 2,
    "bytes": 4096,
    "seen_ms": 1795381290000u64
})))]
pub struct PartView {
    /// How many files.
    pub files: u64,
    /// Their bytes.
    #[schema(value_type = u64)]
    pub bytes: Bytes,
    /// When it was asked, in milliseconds since 1970.
    pub seen_ms: u64,
}

/// The layout of one of a job's directories on disk: over how many disks its new files are spread.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "directory": "/scratch/case/out",
    "state": "set",
    "text": "set (ceph.dir.layout=stripe_unit=1048576 stripe_count=4 object_size=4194304 pool=data), until the job has ended",
    "keep": false,
    "options": "-c 4 -S 1M",
    "from": "the job's line",
    "bandwidth": null,
    "reasons": []
})))]
pub struct LayoutView {
    /// Which directory.
    #[schema(value_type = String)]
    pub directory: PathBuf,
    /// What came of it.
    pub state: LayoutState,
    /// The same in words.
    pub text: String,
    /// Whether it keeps the layout when the job has ended.
    pub keep: bool,
    /// What was chosen, as options of `lfs setstripe`; nothing if nothing was.
    #[schema(required = true)]
    pub options: Option<String>,
    /// What it was chosen from; empty if nothing was.
    pub from: String,
    /// Bytes that all processes together read or write in a second, at most, where that can be said.
    #[schema(required = true, value_type = Option<u64>)]
    pub bandwidth: Option<Rate>,
    /// What led to it, in the order of the decisions.
    pub reasons: Vec<String>,
}

/// What came of the layout of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayoutState {
    /// An agent is told to set it.
    Ordered,
    /// It is set.
    Set,
    /// The directory is left as it was.
    Alone,
    /// It could not be set.
    Failed,
    /// It was set, and stays after the job's end.
    Kept,
    /// It was set, and the directory has what it had before again.
    Restored,
    /// It was set, and somebody has set something else since, which stays.
    Changed,
    /// It was set, and what was there before could not be set again.
    NotRestored,
}

/// How a job was delayed: it uses the disk much, and its filesystem was busy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "filesystem": "/scratch",
    "reason": "its load is 87 %, and its line #RSA_IO says that it is I/O-heavy",
    "since_ms": 1795381290000u64,
    "until_ms": 1795383090000u64,
    "ended_ms": null,
    "text": "it starts up to 30 min 0 s later, and sooner if /scratch is less busy: its load is 87 %, and its line #RSA_IO says that it is I/O-heavy"
})))]
pub struct DelayView {
    /// Where the filesystem is mounted.
    #[schema(value_type = String)]
    pub filesystem: PathBuf,
    /// Why it waits, or did.
    pub reason: String,
    /// Since when, in milliseconds since 1970.
    pub since_ms: u64,
    /// It does not wait longer, in milliseconds since 1970.
    pub until_ms: u64,
    /// When it was over, in milliseconds since 1970; nothing while it waits.
    #[schema(required = true)]
    pub ended_ms: Option<u64>,
    /// What came of it, in words.
    pub text: String,
}

/// What a run of a job has left in a directory: a row of its user's history of layouts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "uid": 1000,
    "job": "42@1750000000",
    "program": "solver",
    "directory": "/scratch/case-#/out",
    "used": "all processes use one file",
    "run": {
        "ended_ms": 1750000100000u64,
        "shape": { "nodes": 4, "tasks": 64, "lasted_ms": 100000 },
        "tally": {
            "files": 1, "bytes": 4294967296u64, "median": 4294967296u64, "large": 4294967296u64,
            "kinds": [{
                "kind": "result.h5", "files": 1, "bytes": 4294967296u64, "largest": 4294967296u64, "numbers": [1],
                "highest": [5], "divisor": [5], "within_ms": [0], "spread_ms": 0
            }]
        }
    }
})))]
pub struct LayoutRun {
    /// Whose it is.
    pub uid: u32,
    /// Which life of which job.
    #[schema(value_type = String)]
    pub job: Incarnation,
    /// Its program.
    pub program: String,
    /// The directory, with `#` for each of its numbers.
    pub directory: String,
    /// How it has used its files, in words.
    pub used: String,
    /// When it ended, its nodes and tasks, and its files: sizes in bytes, times in milliseconds.
    #[schema(value_type = Object)]
    pub run: Run,
}

/// How much of a history was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({ "runs": 3 })))]
pub struct Forgotten {
    /// How many runs.
    pub runs: u64,
}

/// A life of a job beside the one that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "id": "42@1750000000.1",
    "job_state": "FINISHED",
    "rsa_state": "HELD",
    "done": false
})))]
pub struct OtherLife {
    /// Its whole name: the number, when it was submitted in seconds since 1970, how often it was started anew.
    #[schema(value_type = String)]
    pub id: Incarnation,
    /// What the workload manager does with it, or did last.
    #[schema(value_type = schema::JobState)]
    pub job_state: JobState,
    /// What Ondeck does for it, or did last.
    #[schema(value_type = schema::RsaState)]
    pub rsa_state: RsaState,
    /// Whether nothing of it is to be done any more.
    pub done: bool,
}

/// What an RSA node that was lost had of a job's results, when it was last asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "node": "rsa2",
    "seen_ms": 1750000000000u64,
    "files": 2,
    "bytes": 4096,
    "names": [
        "/data/out/a",
        "/data/out/b"
    ]
})))]
pub struct LostPart {
    /// Which node.
    #[schema(value_type = String)]
    pub node: NodeName,
    /// When it was asked, in milliseconds since 1970.
    pub seen_ms: u64,
    /// How many files it had.
    pub files: u64,
    /// Their bytes.
    #[schema(value_type = u64)]
    pub bytes: Bytes,
    /// Their paths on disk; the first of them if there are very many.
    pub names: Vec<String>,
}

/// A line of a log.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "at_ms": 1700000000000u64,
    "job": "42",
    "states": [
        "ONDECK",
        "ASSIGNED"
    ],
    "text": "assigning 2 rsa-nodes to job 42"
})))]
pub struct LogLine {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// The job, if it is about one.
    #[schema(required = true, value_type = Option<String>)]
    pub job: Option<Incarnation>,
    /// The states of the job afterwards.
    #[schema(required = true, value_type = Option<(schema::JobState, schema::RsaState)>)]
    pub states: Option<(JobState, RsaState)>,
    /// What happened.
    pub text: String,
}
