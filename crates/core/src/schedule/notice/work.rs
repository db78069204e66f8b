//! Work for a job: that it begins, and what came of it.

use std::fmt;
use std::time::Duration;

use super::list;
use super::placing::ON_DISK;
use crate::allocation::Purpose;
use crate::schedule::job::{Job, Work};
use crate::schedule::told::Told;
use crate::{Incarnation, NodeName};

/// What follows for the job from an attempt that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Then {
    /// It is tried again.
    Again,
    /// The job works on disk.
    OnDisk,
    /// That is said when it is known.
    Unsaid,
}

/// Why work is taken for failed that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TooLong(pub Duration);

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it took longer than {} s", self.0.as_secs())
    }
}

/// Work for a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum AtWork {
    /// It begins. Mostly the state says it.
    Begins {
        work: Work,
        /// What its RAM disk is for.
        purpose: Purpose,
    },
    /// It is done.
    Done {
        work: Work,
        /// What its RAM disk is for.
        purpose: Purpose,
        /// Whether it was pretended only.
        pretended: bool,
        /// What was done, in the words of whoever has done it.
        report: String,
    },
    /// Building, filling or mounting failed.
    Failed {
        work: Work,
        /// In the words of whoever tried it.
        why: String,
        /// What follows for the job.
        then: Then,
    },
    /// The RAM disk is ready, after the user was told otherwise.
    Ready,
    /// The RAM disk is ready, and too small for what the job is going to write.
    Tight {
        /// In the words of whoever has filled it.
        why: String,
        /// Whether the output follows when the input is taken away.
        output_follows: bool,
    },
    /// The input is given up for the output.
    Switches,
    /// A server is lost, so the RAM disk is unmounted.
    TakenAway,
    /// Mounting failed, so it is unmounted where it is mounted.
    PartTakenAway,
    /// Unmounting was given up.
    NotUnmounted {
        nodes: Vec<NodeName>,
        /// In the words of whoever tried it.
        why: String,
    },
    /// The output of a job that runs could not be covered.
    NotOvermounted {
        /// In the words of whoever tried it.
        why: String,
        /// When it is tried again, if it is.
        again: Option<Duration>,
    },
    /// A RAM disk that the journal did not know is the one that the job works with.
    FoundInUse,
}

/// What the thesis says of work that is done, where it says something.
fn thesis_done(work: Work, purpose: Purpose, job: Incarnation) -> Option<String> {
    match work {
        Work::Construct => Some(format!("done constructing RSA block for job {job}")),
        Work::StageIn if purpose != Purpose::Output => {
            Some(format!("finished staging data in for job {job}"))
        }
        Work::StageOut => Some(format!("finished staging data out for job {job}")),
        Work::Destroy => Some(format!("finished destroying RSA block for job {job}")),
        Work::StageIn | Work::StopStageIn | Work::Mount | Work::Unmount { .. } => None,
    }
}

/// What the log says when work for a job is done, in the words of the thesis where it has some.
pub fn done(job: &Job, work: Work) -> String {
    let id = job.id;
    thesis_done(work, job.purpose, id).unwrap_or_else(|| match work {
        Work::StopStageIn => format!("stopped data staging process for job {id}"),
        Work::Mount => format!("mounted the RAMDISK on {} I/O nodes for job {id}", job.io_nodes.len()),
        Work::Unmount { .. } => format!("unmounted the RAMDISK from the I/O nodes of job {id}"),
        _ => format!("prepared the output directories of job {id}"),
    })
}

/// What the log says when that was pretended only.
pub(in crate::schedule) fn pretended(job: &Job, work: Work) -> String {
    format!("{}{PRETENDED}", done(job, work))
}

const PRETENDED: &str = " (simulated)";

impl AtWork {
    /// See [`Notice::thesis`](super::Notice::thesis); `words` are ours.
    pub(super) fn thesis(&self, job: Incarnation, words: &dyn Fn() -> Option<String>) -> Option<String> {
        match self {
            AtWork::Begins { work, purpose } => match work {
                Work::Construct => Some(format!("constructing RSA block for job {job}")),
                Work::StageIn if *purpose != Purpose::Output => Some(format!("staging data for job {job}")),
                Work::StopStageIn => Some(format!("stop the data staging process for job {job}")),
                Work::StageOut => Some(format!("staging data out for job {job}")),
                Work::Destroy => Some(format!("destroying RSA block for job {job}")),
                Work::StageIn | Work::Mount | Work::Unmount { .. } => None,
            },
            AtWork::Done { work: Work::StopStageIn, .. } => words(),
            AtWork::Done { work, purpose, pretended, .. } => {
                let ending = if *pretended { PRETENDED } else { "" };
                thesis_done(*work, *purpose, job).map(|sentence| format!("{sentence}{ending}"))
            }
            AtWork::Switches => Some(format!("switching from staging in to out for job {job}")),
            _ => words(),
        }
    }

    pub(super) fn told(&self) -> Told {
        match self {
            AtWork::Ready => Told::Ready,
            AtWork::Failed { work, why, then: Then::OnDisk } => {
                Told::WorksOnDisk(format!("{}: {why}", work.word()))
            }
            _ => Told::Other,
        }
    }
}

impl fmt::Display for AtWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AtWork::Begins { work: Work::StageIn, purpose: Purpose::Output } => {
                f.write_str("preparing its output directories")
            }
            AtWork::Begins { .. } | AtWork::Switches => Ok(()),
            AtWork::Done { report, .. } => f.write_str(report),
            AtWork::Failed { work, why, then } => {
                write!(f, "{}: {why}", work.word())?;
                f.write_str(match then {
                    Then::Again => "; it is tried again",
                    Then::OnDisk => ON_DISK,
                    Then::Unsaid => "",
                })
            }
            AtWork::Ready => f.write_str("its RAM disk is ready"),
            AtWork::Tight { why, output_follows } => {
                f.write_str(why)?;
                f.write_str(if *output_follows {
                    "; the output follows by the switch after the delay"
                } else {
                    ""
                })
            }
            AtWork::TakenAway => f.write_str("it is taken away, because a server of it is lost"),
            AtWork::PartTakenAway => f.write_str("what is mounted of it is taken away"),
            AtWork::NotUnmounted { nodes, why } => write!(f, "not unmounted on {}: {why}", list(nodes)),
            AtWork::NotOvermounted { why, again } => {
                write!(f, "its output is not in RAM: {why}; ")?;
                match again {
                    Some(pause) => write!(f, "it is tried again in {} s", pause.as_secs()),
                    None => {
                        f.write_str("the job works on disk; with #RSA_WAIT=hold it starts with its RAM disk")
                    }
                }
            }
            AtWork::FoundInUse => {
                f.write_str("its RAM disk was found though the journal did not know it; it goes on")
            }
        }
    }
}
