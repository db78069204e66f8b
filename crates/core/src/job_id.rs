//! Which job, and which of its lives.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::RamDiskName;

/// The number of a job, as its workload manager gives it. An element of an array has one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub u32);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One life of one job: a requeued job is a new one, and what the former left is still being brought home then.
///
/// A number alone names no job: a workload manager that was started clean gives it again. So the time of its submission
/// belongs to a job's name. It is the one that the job had when it was first seen, because a requeue changes it: which job
/// a record of the queue is, says [`crate::schedule::Schedule::identify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Incarnation {
    /// The number that the workload manager gave; it may have given it to others before.
    pub job: JobId,
    /// When it was submitted, in seconds since 1970. Zero in what a former version kept, which did not tell jobs apart by it.
    pub submitted: u64,
    /// How many times it was started anew.
    pub restarts: u32,
}

impl Incarnation {
    /// The name of its RAM disk. Different jobs and lives have different ones, because several may be there at once.
    ///
    /// # Panics
    /// Never: digits and letters are a name.
    pub fn ramdisk(self) -> RamDiskName {
        let name = match self.submitted {
            0 => format!("job-{}-{}", self.job, self.restarts),
            submitted => format!("job-{}-{submitted}-{}", self.job, self.restarts),
        };
        #[allow(clippy::expect_used)]
        name.parse().expect("digits and letters are a name")
    }

    /// The life whose RAM disk has this name; none if it is no job's.
    pub fn of_ramdisk(name: &RamDiskName) -> Option<Incarnation> {
        let parts: Vec<&str> = name.as_str().strip_prefix("job-")?.split('-').collect();
        let (job, submitted, restarts) = match parts.as_slice() {
            [job, restarts] => (*job, "0", *restarts),
            [job, submitted, restarts] => (*job, *submitted, *restarts),
            _ => return None,
        };
        let found = Incarnation {
            job: JobId(job.parse().ok()?),
            submitted: submitted.parse().ok()?,
            restarts: restarts.parse().ok()?,
        };
        // `job-07-0` is nobody's.
        (found.ramdisk() == *name).then_some(found)
    }

    /// Its whole name, `42@1795381275` or `42@1795381275.1`: what is kept and asked for by it is of no other job.
    pub fn key(self) -> String {
        let submitted = match self.submitted {
            0 => String::new(),
            submitted => format!("@{submitted}"),
        };
        match self.restarts {
            0 => format!("{}{submitted}", self.job),
            restarts => format!("{}{submitted}.{restarts}", self.job),
        }
    }

    /// The same as a part of a file's name, `42-1795381275` or `42-1795381275.1`.
    pub fn label(self) -> String {
        self.key().replace('@', "-")
    }

    /// Whether both are lives of one job.
    pub fn is_same_job(self, other: Incarnation) -> bool {
        (self.job, self.submitted) == (other.job, other.submitted)
    }

    /// All lives of the same job, as a range of keys.
    pub fn lives(self) -> std::ops::RangeInclusive<Incarnation> {
        Incarnation { restarts: 0, ..self }..=Incarnation { restarts: u32::MAX, ..self }
    }

    /// All lives of all jobs that had a number, as a range of keys; the newest job comes last.
    pub fn of_number(job: JobId) -> std::ops::RangeInclusive<Incarnation> {
        Incarnation { job, submitted: 0, restarts: 0 }..=Incarnation {
            job,
            submitted: u64::MAX,
            restarts: u32::MAX,
        }
    }
}

impl fmt::Display for Incarnation {
    /// For people, as the workload manager calls it: `42`, or `42.1` after it was requeued once. See
    /// [`Incarnation::key`] for what tells jobs of one number apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.restarts {
            0 => f.pad(&self.job.to_string()),
            restarts => f.pad(&format!("{}.{restarts}", self.job)),
        }
    }
}

/// Why a text names no job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` names no job; write its number, NUMBER.RESTARTS for one life of a requeued job, NUMBER@SUBMITTED for one of \
     several jobs that had the number, or NUMBER@SUBMITTED.RESTARTS for one life of that"
)]
pub struct JobNameError(String);

/// A job as somebody names it: its number, with what else they say to tell it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JobSelector {
    /// The number, which several jobs may have had.
    pub job: JobId,
    /// When it was submitted, in seconds since 1970; the newest of this number if that is not said.
    pub submitted: Option<u64>,
    /// Which of its lives; all of them if that is not said.
    pub restarts: Option<u32>,
}

impl JobSelector {
    /// Whether a life is among those that are named.
    pub fn takes(self, id: Incarnation) -> bool {
        self.job == id.job
            && self.submitted.is_none_or(|submitted| submitted == id.submitted)
            && self.restarts.is_none_or(|restarts| restarts == id.restarts)
    }
}

impl From<Incarnation> for JobSelector {
    fn from(id: Incarnation) -> JobSelector {
        JobSelector { job: id.job, submitted: Some(id.submitted), restarts: Some(id.restarts) }
    }
}

impl fmt::Display for JobSelector {
    /// As it was written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.job)?;
        self.submitted.map_or(Ok(()), |submitted| write!(f, "@{submitted}"))?;
        self.restarts.map_or(Ok(()), |restarts| write!(f, ".{restarts}"))
    }
}

impl FromStr for JobSelector {
    type Err = JobNameError;

    fn from_str(text: &str) -> Result<Self, JobNameError> {
        fn number<T: FromStr>(text: &str) -> Option<T> {
            let plain = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
            plain.then(|| text.parse().ok()).flatten()
        }
        let read = || {
            let (rest, restarts) = match text.split_once('.') {
                Some((rest, restarts)) => (rest, Some(number(restarts)?)),
                None => (text, None),
            };
            let (job, submitted) = match rest.split_once('@') {
                Some((job, submitted)) => (job, Some(number(submitted)?)),
                None => (rest, None),
            };
            Some(JobSelector { job: JobId(number(job)?), submitted, restarts })
        };
        read().ok_or_else(|| JobNameError(text.to_owned()))
    }
}

impl FromStr for Incarnation {
    type Err = JobNameError;

    /// Reads [`Incarnation::key`].
    fn from_str(text: &str) -> Result<Self, JobNameError> {
        let JobSelector { job, submitted, restarts } = text.parse()?;
        Ok(Incarnation { job, submitted: submitted.unwrap_or(0), restarts: restarts.unwrap_or(0) })
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
        incarnation.key()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_of_a_job_is_written_and_read() {
        for (text, submitted, restarts, shown) in
            [("42", 0, 0, "42"), ("42.1", 0, 1, "42.1"), ("42@17", 17, 0, "42"), ("42@17.2", 17, 2, "42.2")]
        {
            let id = Incarnation { job: JobId(42), submitted, restarts };
            assert_eq!(text.parse(), Ok(id));
            assert_eq!((id.key(), id.to_string()), (text.to_owned(), shown.to_owned()));
            assert_eq!(Incarnation::of_ramdisk(&id.ramdisk()), Some(id));
            assert!(Incarnation::of_number(JobId(42)).contains(&id) && id.lives().contains(&id));
        }
        for wrong in
            ["", "x", "4.x", "4.", ".4", "-1", "+1", "99999999999", "4@", "@4", "4@x", "4.1@5", "4@5@6"]
        {
            assert!(wrong.parse::<Incarnation>().is_err(), "{wrong}");
        }
        for nobodys in ["job-1", "job-07-0", "job-1-2-3-4", "job-1-0-0", "job-x-0", "fast"] {
            assert_eq!(Incarnation::of_ramdisk(&nobodys.parse().unwrap()), None, "{nobodys}");
        }
    }

    #[test]
    fn who_names_less_means_more() {
        let id = |submitted, restarts| Incarnation { job: JobId(42), submitted, restarts };
        let all = [id(17, 0), id(17, 1), id(30, 0)];
        for (text, taken) in [("42", 3), ("42.0", 2), ("42@17", 2), ("42@17.1", 1), ("43", 0), ("42@18", 0)] {
            let selector: JobSelector = text.parse().unwrap();
            assert_eq!(all.iter().filter(|id| selector.takes(**id)).count(), taken, "{text}");
            assert_eq!(selector.to_string(), text);
        }
    }
}
