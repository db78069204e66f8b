//! Results of a job that are not on disk yet, or lost.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::{list, paths};
use crate::schedule::told::Told;
use crate::{Bytes, JobSelector, NodeName};

/// What comes after a stage-out that failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NotHome {
    /// It is tried again after a pause.
    Again(Duration),
    /// Somebody must decide.
    Kept(JobSelector),
}

/// How a part of a RAM disk was lost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// With its RSA node.
    Node(NodeName),
    /// A server, in the words of its agent.
    Server(String),
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::Node(node) => write!(f, "the RSA node {node} was lost"),
            Loss::Server(why) => f.write_str(why),
        }
    }
}

/// What a node that was lost had of the results.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LostPart {
    /// The RSA node that was lost.
    pub node: NodeName,
    /// Nothing if that was never asked.
    pub inventory: Option<LastInventory>,
}

/// What a node had when it was last asked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LastInventory {
    /// How long before.
    pub ago: Duration,
    /// How many files.
    pub files: u64,
    /// The sum of their sizes.
    pub bytes: Bytes,
    /// The real paths of the first of them.
    pub first: Vec<String>,
}

/// What was lost with nodes, as the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum LostParts {
    /// There were no results, or it is not to be told.
    None,
    /// Every node had parts of every file.
    OfAllFiles,
    /// Each node had files of its own.
    Files {
        /// What each had.
        parts: Vec<LostPart>,
        /// Whether some of them may be on disk already.
        some_are_safe: bool,
    },
}

impl fmt::Display for LostParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (parts, some_are_safe) = match self {
            LostParts::None => return Ok(()),
            LostParts::OfAllFiles => {
                return f.write_str("; each node has parts of all files, so any file may miss some");
            }
            LostParts::Files { parts, some_are_safe } => (parts, *some_are_safe),
        };
        for LostPart { node, inventory } in parts {
            let Some(inventory) = inventory else {
                write!(f, "; it is not known which files {node} had")?;
                continue;
            };
            let LastInventory { ago, files, bytes, first } = inventory;
            write!(f, "; {} s before, {node} had {files} files of {bytes}", ago.as_secs())?;
            if !first.is_empty() {
                let more = if *files > first.len() as u64 { ", ..." } else { "" };
                write!(f, " ({}{more})", first.join(", "))?;
            }
        }
        if some_are_safe {
            f.write_str("; those of them that are on disk already are safe")?;
        }
        Ok(())
    }
}

/// What happens to results of a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Results {
    /// Staging out failed.
    NotHome {
        /// In the words of whoever tried it.
        why: String,
        /// What comes next.
        next: NotHome,
    },
    /// A RAM disk with results was found that the journal did not know.
    Found {
        /// Where they belong.
        outputs: Vec<PathBuf>,
        /// Why it is not whole, if it is not.
        fault: Option<String>,
        /// What to call the job in an order.
        job: JobSelector,
    },
    /// They are on disk, of which was said that they were not.
    Home,
    /// Some may be lost, and somebody must decide.
    MayBeLost {
        /// Why, in words, one after the other.
        why: Vec<String>,
        /// What was lost.
        parts: LostParts,
        /// Where they belong.
        outputs: Vec<PathBuf>,
        /// What to call the job in an order.
        job: JobSelector,
    },
    /// A server was lost while the job writes.
    LostWhileWritten {
        loss: Loss,
        /// Where the job writes.
        outputs: Vec<PathBuf>,
        /// What was lost.
        parts: LostParts,
    },
    /// A server was lost while the job reads.
    LostWhileRead(Loss),
    /// A server was lost, and the job does not see the RAM disk.
    ServerLost(Loss),
    /// The RAM disk was all but full while the job could write to it.
    RanFull {
        /// On which RSA nodes.
        nodes: Vec<NodeName>,
    },
    /// What was lost is there again.
    WholeAgain,
    /// What is left is to be saved, and the rest given up.
    ToBeSalvaged,
    /// What was left is on disk.
    Salvaged {
        /// What that is, in the words of whoever saved it.
        saved: String,
        /// What was given up, if anything was.
        lost: Option<LostParts>,
    },
    /// Somebody has given them up.
    Abandoned { by: String },
    /// A job that waited for the results of another one starts without.
    LostToOther {
        /// Whose they are.
        other: JobSelector,
        /// Where they belong.
        path: PathBuf,
    },
}

impl Results {
    pub(super) fn told(&self) -> Told {
        match self {
            Results::NotHome { .. } | Results::Found { .. } | Results::MayBeLost { .. } => Told::NotOnDisk,
            _ => Told::Other,
        }
    }
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Results::NotHome { why, next } => {
                write!(f, "staging out failed: {why}; ")?;
                match next {
                    NotHome::Again(pause) => write!(f, "it is tried again in {} s", pause.as_secs()),
                    NotHome::Kept(job) => write!(
                        f,
                        "the results are kept in RAM until `ondeck job retry {job}` or `ondeck job abandon {job}`"
                    ),
                }
            }
            Results::Found { outputs, fault, job } => {
                let outputs = paths(outputs);
                let why = fault.as_ref().map(|fault| format!(" ({fault})")).unwrap_or_default();
                write!(
                    f,
                    "staging out failed: a RAM disk with results for {outputs} was found that the journal did not know{why}; \
                     when nothing of the job runs any more, `ondeck job retry {job}` brings them home, and `ondeck job \
                     abandon {job}` gives them up"
                )
            }
            Results::Home => f.write_str("its results are on disk"),
            Results::MayBeLost { why, parts, outputs, job } => write!(
                f,
                "results may be lost: {}{parts}; what the job wrote in {} is kept where it still is: `ondeck job retry {job}` \
                 tries again, `ondeck job retry --salvage {job}` saves what the other nodes have and gives up the rest, \
                 `ondeck job abandon {job}` gives up all of it",
                why.join("; "),
                paths(outputs)
            ),
            Results::LostWhileWritten { loss, outputs, parts } => write!(
                f,
                "{loss}: files that the job has in {} may fail with an I/O error, and results may be lost{parts}",
                paths(outputs)
            ),
            Results::LostWhileRead(loss) => write!(
                f,
                "{loss}: the job's input is read from disk again; files that were open may fail with an I/O error"
            ),
            Results::ServerLost(loss) => loss.fmt(f),
            Results::RanFull { nodes } => write!(
                f,
                "the RAM disk was full (less than 1 % of it was left on {}): the job's programs may have got ENOSPC, and what \
                 they could not write is not among its results; ask for more with #RSA_CAPACITY or #RSA_NODES, or say with \
                 #RSA_OUT_SIZE how large the output is",
                list(nodes)
            ),
            Results::WholeAgain => f.write_str("all servers of its RAM disk are there again"),
            Results::ToBeSalvaged => f.write_str("what is left of its results is to be saved, by hand"),
            Results::Salvaged { saved, lost } => {
                write!(f, "what was left of its results is on disk: {saved}")?;
                lost.as_ref().map_or(Ok(()), |parts| write!(f, "{parts}; the rest is lost"))
            }
            Results::Abandoned { by } => write!(f, "its results were abandoned by {by}"),
            Results::LostToOther { other, path } => write!(
                f,
                "results of job {other} for {} are lost: the job starts with what is on disk; `ondeck job show {other}` says \
                 what is missing",
                path.display()
            ),
        }
    }
}
