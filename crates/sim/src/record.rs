//! What came of the simulation: of each job, and of the accelerator.

use ondeck_core::Bytes;
use serde::Serialize;

/// Where a job's data was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Served {
    /// It had input or output in RAM.
    InRam,
    /// There is no accelerator, or it does no I/O.
    #[default]
    NoNeed,
    /// It has too few compute nodes for an RSA node.
    TooSmall,
    /// It needs more than there is.
    TooLarge,
    /// It started before it was known to be next.
    StartedAtOnce,
    /// No RSA nodes were free for it before it started.
    NoNodesFree,
    /// Its RAM disk was not ready when it started.
    NotReady,
}

impl Served {
    /// Every value, in the order of reports.
    pub const ALL: [Served; 7] = [
        Served::InRam,
        Served::NoNeed,
        Served::TooSmall,
        Served::TooLarge,
        Served::StartedAtOnce,
        Served::NoNodesFree,
        Served::NotReady,
    ];

    /// In words, for a report.
    pub fn words(self) -> &'static str {
        match self {
            Served::InRam => "data in RAM",
            Served::NoNeed => "no I/O, or no RSA",
            Served::TooSmall => "on disk: fewer compute nodes than PROPORTION",
            Served::TooLarge => "on disk: more than the RSA has or limits allow",
            Served::StartedAtOnce => "on disk: started before it was next",
            Served::NoNodesFree => "on disk: no RSA nodes free before its start",
            Served::NotReady => "on disk: RAM disk not ready at its start",
        }
    }
}

/// What came of one job. Times are milliseconds since the first submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct JobRecord {
    /// When it was submitted.
    pub submitted_ms: u64,
    /// When it got its nodes.
    pub started_ms: u64,
    /// When its nodes were free again.
    pub ended_ms: u64,
    /// For how long its nodes computed.
    pub compute_ms: u64,
    /// How many nodes it had.
    pub nodes: u32,
    /// Where its data was.
    pub served: Served,
}

impl JobRecord {
    /// From its submission until it got its nodes.
    pub fn wait_ms(&self) -> u64 {
        self.started_ms - self.submitted_ms
    }

    /// For how long it had its nodes and did not compute: it read, wrote, or waited for Prologs and Epilogs.
    pub fn io_ms(&self) -> u64 {
        (self.ended_ms - self.started_ms).saturating_sub(self.compute_ms)
    }
}

/// What came of the accelerator and the disk filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    /// Copied from disk to RAM before jobs started, or began to use it.
    pub staged_in: Bytes,
    /// What of that jobs have read.
    pub read_from_ram: Bytes,
    /// What of that nobody has read.
    pub wasted: Bytes,
    /// Written to RAM by jobs.
    pub written_to_ram: Bytes,
    /// What of that was overwritten by later checkpoints.
    pub overwritten: Bytes,
    /// Copied from RAM to disk.
    pub staged_out: Bytes,
    /// How often a job that had RSA nodes lost them before its start, because others came before it.
    pub demotions: u64,
    /// RSA nodes, times the milliseconds for which they were promised.
    pub rsa_node_ms: f64,
    /// What the disk filesystem has moved.
    pub disk_bytes: f64,
    /// For how long it moved anything.
    pub disk_busy_ms: u64,
    /// When the last job's nodes were free, in milliseconds since the first submission.
    pub makespan_ms: u64,
    /// When the last result was on disk.
    pub home_ms: u64,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Each job, in the order of submission.
    pub jobs: Vec<JobRecord>,
    /// All together.
    pub totals: Totals,
}
