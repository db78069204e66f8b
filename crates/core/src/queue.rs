//! What a workload manager shows of its queue, in words that no workload manager owns.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{NodeName, Owner, RamDiskName};

/// The number of a job, as its workload manager gives it. An element of an array has one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub u32);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One life of a job: a requeued job is a new one, and what the former left is still being brought home then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Incarnation {
    /// The job.
    pub job: JobId,
    /// How many times it was started anew.
    pub restarts: u32,
}

impl Incarnation {
    /// The name of its RAM disk. Different lives have different ones, because both may be there at once.
    ///
    /// # Panics
    /// Never: digits and letters are a name.
    pub fn ramdisk(self) -> RamDiskName {
        let name = format!("job-{}-{}", self.job, self.restarts);
        #[allow(clippy::expect_used)]
        name.parse().expect("digits and letters are a name")
    }
}

impl fmt::Display for Incarnation {
    /// `42`, or `42.1` after it was requeued once.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.restarts {
            0 => f.pad(&self.job.to_string()),
            restarts => f.pad(&format!("{}.{restarts}", self.job)),
        }
    }
}

/// Why a text names no job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` names no job; write its number, or NUMBER.RESTARTS for an earlier life of a requeued one")]
pub struct JobNameError(String);

impl FromStr for Incarnation {
    type Err = JobNameError;

    fn from_str(text: &str) -> Result<Self, JobNameError> {
        let wrong = || JobNameError(text.to_owned());
        let (job, restarts) = text.split_once('.').unwrap_or((text, "0"));
        let number = |text: &str| {
            let plain = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
            plain.then(|| text.parse().ok()).flatten().ok_or_else(wrong)
        };
        Ok(Incarnation { job: JobId(number(job)?), restarts: number(restarts)? })
    }
}

impl TryFrom<String> for Incarnation {
    type Error = JobNameError;

    fn try_from(text: String) -> Result<Self, JobNameError> {
        text.parse()
    }
}

impl From<Incarnation> for String {
    fn from(incarnation: Incarnation) -> String {
        incarnation.to_string()
    }
}

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
        matches!(self, Standing::Next | Standing::Waiting | Standing::Unjudged)
    }
}

/// A job of the queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedJob {
    /// Which life of which job.
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
    /// When it was submitted, in seconds since 1970.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_of_a_job_is_written_and_read() {
        for (text, job, restarts) in [("42", 42, 0), ("42.1", 42, 1)] {
            let id = Incarnation { job: JobId(job), restarts };
            assert_eq!(text.parse(), Ok(id));
            assert_eq!(id.to_string(), text);
        }
        for wrong in ["", "x", "4.x", "4.", ".4", "-1", "+1", "99999999999"] {
            assert!(wrong.parse::<Incarnation>().is_err(), "{wrong}");
        }
    }
}
