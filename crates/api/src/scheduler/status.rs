//! What is going on: the jobs, the nodes, and what is wrong.

use std::collections::BTreeSet;
use std::path::PathBuf;

use ondeck_core::schedule::{JobState, NodeState, RsaState};
use ondeck_core::{Bytes, Incarnation, NodeName, Owner};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;

/// What is done for the jobs, and the nodes.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "jobs": [
        {
            "id": "42",
            "owner": {
                "uid": 20001,
                "gid": 20001
            },
            "job_state": "RUNNING",
            "rsa_state": "INUSE_BOTH",
            "seconds": 12.5,
            "rsa_nodes": [
                "r1"
            ],
            "transfer": null,
            "message": ""
        }
    ],
    "nodes": [
        {
            "node": "r1",
            "pool": "default",
            "state": "up",
            "why": "",
            "capacity": 68719476736u64,
            "free": 0,
            "jobs": [
                "42"
            ]
        }
    ],
    "workload_manager": null,
    "simulated": false,
    "journal": null,
    "journal_name": "3f6c1b9a-52d0-4e0e-9d0a-6a7c0c1f2b11",
    "replaced_journals": [],
    "warnings": [],
    "places_lost": 0,
    "site_file": null,
    "filesystems": []
})))]
pub struct Status {
    /// Jobs that have asked for something and are not done.
    pub jobs: Vec<JobStatus>,
    /// The RSA nodes.
    pub nodes: Vec<NodeStatus>,
    /// What is wrong with the workload manager, if anything.
    #[schema(required = true)]
    pub workload_manager: Option<String>,
    /// Whether RAM disks are only pretended.
    pub simulated: bool,
    /// The random name of the journal that agents obey; empty from a scheduler that does not say it.
    #[serde(default)]
    #[schema(required = true)]
    pub journal_name: String,
    /// The journals that it has replaced: it claims their agents.
    #[serde(default)]
    #[schema(required = true)]
    pub replaced_journals: BTreeSet<String>,
    /// Why the journal can't be written, while it can't. Nothing is decided then, and nothing else is told.
    #[serde(default)]
    #[schema(required = true)]
    pub journal: Option<String>,
    /// What is wrong on compute nodes, for administrators.
    #[serde(default)]
    #[schema(required = true)]
    pub warnings: Vec<Warning>,
    /// How many of its 128 places for jobs whose burst buffers are being filled Slurm has lost since slurmctld was started, for
    /// administrators: up to version 23.11 one for each job that was cancelled while it waited for its input.
    #[serde(default)]
    #[schema(required = true)]
    pub places_lost: u32,
    /// What is wrong with the site's file, if anything, for administrators. What it said before counts.
    #[serde(default)]
    #[schema(required = true)]
    pub site_file: Option<String>,
    /// The filesystems whose load is read, as the site's file has it.
    #[serde(default)]
    #[schema(required = true)]
    pub filesystems: Vec<FilesystemStatus>,
}

/// How busy a filesystem is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "path": "/scratch",
    "load": 0.87,
    "staging_slow": true,
    "jobs_wait": true,
    "fault": ""
})))]
pub struct FilesystemStatus {
    /// Where it is mounted.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Its load as it was read last, of one; nothing if that was too long ago, or never.
    #[schema(required = true)]
    pub load: Option<f64>,
    /// Whether staging goes slower there.
    pub staging_slow: bool,
    /// Whether jobs that are I/O-heavy wait for it.
    pub jobs_wait: bool,
    /// Why its load can't be read, for administrators; empty if it can.
    pub fault: String,
}

/// Something on compute nodes that somebody should look at. It goes away by itself once it is right again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "kind": "silent_agent",
    "nodes": [
        "c1"
    ],
    "text": "the agent of c1 does not answer"
})))]
pub struct Warning {
    /// What it is about: jobs start without a Prolog that asks, the agent does not answer, or something of a RAM disk is left.
    pub kind: WarningKind,
    /// Which nodes.
    #[schema(value_type = Vec<String>)]
    pub nodes: Vec<NodeName>,
    /// In a sentence.
    pub text: String,
}

/// What is wrong with compute nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WarningKind {
    /// Jobs have started there without any Prolog that asked the scheduler.
    NoProlog,
    /// The agent does not answer.
    SilentAgent,
    /// Something of a RAM disk is left that could not be removed.
    LeftOver,
}

/// A job in a line.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "id": "42",
    "owner": {
        "uid": 20001,
        "gid": 20001
    },
    "job_state": "RUNNING",
    "rsa_state": "INUSE_BOTH",
    "seconds": 12.5,
    "rsa_nodes": [
        "r1"
    ],
    "transfer": null,
    "message": ""
})))]
pub struct JobStatus {
    /// The job's life.
    #[schema(value_type = String)]
    pub id: Incarnation,
    /// Whose it is.
    #[schema(value_type = schema::Owner)]
    pub owner: Owner,
    /// What the workload manager does with it.
    #[schema(value_type = schema::JobState)]
    pub job_state: JobState,
    /// What Ondeck does for it.
    #[schema(value_type = schema::RsaState)]
    pub rsa_state: RsaState,
    /// For how many seconds it has been in that state.
    pub seconds: f64,
    /// Its RSA nodes.
    #[schema(value_type = Vec<String>)]
    pub rsa_nodes: Vec<NodeName>,
    /// The transfer under way.
    #[schema(required = true)]
    pub transfer: Option<Transfer>,
    /// What its user should know, or what it waits for; empty if nothing.
    pub message: String,
}

/// A transfer under way.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "bytes": 1048576,
    "bytes_done": 524288,
    "entries": 10,
    "entries_done": 5,
    "rate": 1000000.0,
    "seconds_left": 0.5
})))]
pub struct Transfer {
    /// Bytes found so far.
    pub bytes: u64,
    /// Bytes done.
    pub bytes_done: u64,
    /// Entries found so far.
    pub entries: u64,
    /// Entries done.
    pub entries_done: u64,
    /// Bytes written in a second, so far; holes of sparse files are none.
    pub rate: f64,
    /// Seconds that are left, if what has been found is all.
    #[schema(required = true)]
    pub seconds_left: Option<f64>,
}

/// An RSA node.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({
    "node": "r1",
    "pool": "default",
    "state": "up",
    "why": "",
    "capacity": 68719476736u64,
    "free": 0,
    "jobs": [
        "42"
    ]
})))]
pub struct NodeStatus {
    /// Its name.
    #[schema(value_type = String)]
    pub node: NodeName,
    /// Its pool.
    pub pool: String,
    /// Whether it lends.
    #[schema(value_type = schema::NodeState)]
    pub state: NodeState,
    /// Why it does not lend; empty if it does.
    pub why: String,
    /// Bytes that it lends in all.
    #[schema(value_type = u64)]
    pub capacity: Bytes,
    /// Bytes of it that nobody has.
    #[schema(value_type = u64)]
    pub free: Bytes,
    /// The jobs that have something of it, as far as the caller may see them.
    #[schema(value_type = Vec<String>)]
    pub jobs: Vec<Incarnation>,
}
