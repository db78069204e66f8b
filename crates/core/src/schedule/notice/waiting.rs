//! Why a job waits, or is held.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::{Whose, list};
use crate::{Incarnation, JobId, NodeName, duration};

/// Why RSA nodes are not free for a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Lack {
    /// There are too few.
    TooFew {
        job: Incarnation,
        /// How many are free.
        free: u32,
        /// How many it needs.
        needs: u32,
    },
    /// Another job has waited for longer than others may overtake it.
    Behind {
        head: Incarnation,
        /// How long that is.
        patience: Duration,
    },
    /// They are kept for a job that runs.
    Kept {
        runs: Incarnation,
        /// For how long at most.
        patience: Duration,
    },
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lack::TooFew { job, free, needs } => {
                write!(f, "insufficient free RSA nodes for job {job}, have {free} need {needs}")
            }
            Lack::Behind { head, patience } => write!(
                f,
                "job {head} has waited for RSA nodes for more than {}, and comes first",
                duration::limit(*patience)
            ),
            Lack::Kept { runs, patience } => write!(
                f,
                "free RSA nodes are kept for job {runs}, which runs and waits for room for its output, until one of both has \
                 waited for {}",
                duration::limit(*patience)
            ),
        }
    }
}

/// Why a job waits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Waiting {
    /// RSA nodes are not free for it.
    Lacks {
        why: Lack,
        /// Its number, if it is held: then it starts without them if somebody releases it.
        held: Option<JobId>,
    },
    /// Its user or account has too many nodes for it.
    AtLimit {
        whose: Whose,
        /// How many they have.
        has: u32,
        /// Of how many.
        limit: u32,
    },
    /// It may have a RAM disk already, on nodes that have not answered since the journal began.
    Silent(Vec<NodeName>),
    /// Enough others are staging.
    Staging { jobs: u32 },
    /// Results of another job are not on disk.
    Results {
        other: Incarnation,
        /// Where they belong.
        path: PathBuf,
    },
    /// Another job is bringing results home to where its own belong.
    SameDirectory(Incarnation),
    /// It is not known where to mount its RAM disk.
    NoComputeNodes,
    /// Its RAM disk may not be destroyed.
    HoldsResults,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Waiting::Lacks { why, held } => {
                why.fmt(f)?;
                held.map_or(Ok(()), |job| write!(f, "; `scontrol release {job}` starts it on disk"))
            }
            Waiting::AtLimit { whose, has, limit } => {
                write!(f, "its {whose} has {has} of at most {limit} RSA nodes")
            }
            Waiting::Silent(nodes) => write!(
                f,
                "it had started before the scheduler's journal began, and its RAM disk may be on {}, whose agents have not \
                 answered since; an administrator gives a node up with `ondeck node give-up NODE`",
                list(nodes)
            ),
            Waiting::Staging { jobs } => write!(f, "{jobs} jobs are staging already"),
            Waiting::Results { other, path } => {
                write!(f, "results of job {other} for {} are not on disk yet", path.display())
            }
            Waiting::SameDirectory(other) => {
                write!(f, "job {other} is bringing results home into the same directory")
            }
            Waiting::NoComputeNodes => f.write_str(
                "its compute nodes are not known yet; if the site's io_nodes command has failed, the scheduler's log says why",
            ),
            Waiting::HoldsResults => f.write_str("it holds results"),
        }
    }
}

/// Why a job is held of which nothing else is known here.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum HeldBack {
    /// It must not start without its input.
    Input,
    /// The same, and the workload manager keeps as many waiting as it has places for.
    Places,
    /// The same, and the call in which it waited had to end.
    MustNotWait,
    /// The RAM disk with its input is lost, after the workload manager was told that it may start.
    InputLost,
    /// It depends on another job, whose results are not on disk.
    Results {
        other: JobId,
        /// A directory that both name.
        path: PathBuf,
    },
}

impl fmt::Display for HeldBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeldBack::Input => f.write_str("held until its input is in RAM"),
            HeldBack::Places => f.write_str(
                "held until its input is in RAM: so many jobs wait for theirs that Slurm has no place for one more",
            ),
            HeldBack::MustNotWait => f.write_str(
                "held until its input, or what it reads of other jobs, is there: the call in which Slurm waited had to end",
            ),
            HeldBack::InputLost => {
                f.write_str("held until its input is in RAM again: a server of the RAM disk that had it is lost")
            }
            HeldBack::Results { other, path } => {
                write!(f, "held until the results of job {other} for {} are on disk", path.display())
            }
        }
    }
}
