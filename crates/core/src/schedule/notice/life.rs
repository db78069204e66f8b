//! What happens to a job in the hands of the workload manager and of people.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::schedule::{BurstBuffer, JobState};
use crate::{Incarnation, NodeName, duration};

/// Why a job has another state in the workload manager.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Turn {
    /// The workload manager has started it.
    Runs,
    /// It has ended.
    Ended,
    /// The Epilogs of all of its nodes have run.
    EndedOnItsNodes,
    /// Not all of them did within the time for it.
    NotEndedInTime,
    /// Its processes are being ended.
    Ending,
    /// The queue does not show it any more.
    LeftQueue,
    /// It waits, though it had started.
    BackInQueue,
    /// Another run of the same life has begun.
    StartedAnew,
    /// Others were put before it.
    Demoted,
    /// It has had its RSA nodes for so long without starting.
    NotStarted(Duration),
    /// The workload manager has torn its burst buffer down.
    TornDown,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Turn::Runs => f.write_str("runs"),
            Turn::Ended => f.write_str("ended"),
            Turn::EndedOnItsNodes => f.write_str("ended on its nodes"),
            Turn::NotEndedInTime => f.write_str("has not ended on all of its nodes in time"),
            Turn::Ending => f.write_str("is ending"),
            Turn::LeftQueue => f.write_str("left the queue"),
            Turn::BackInQueue => f.write_str("is back in the queue"),
            Turn::StartedAnew => f.write_str("was started anew"),
            Turn::Demoted => f.write_str("has been demoted"),
            Turn::TornDown => f.write_str("has no burst buffer any more"),
            Turn::NotStarted(limit) => {
                let limit = duration::limit(*limit);
                write!(f, "has not started for {limit}, and others wait for its RSA nodes")
            }
        }
    }
}

/// What of a RAM disk a job has not seen that no Prolog has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unshown {
    /// It was not ready.
    Nothing,
    /// It was for its output, and may still be mounted.
    Output,
    /// It had its input.
    Input,
}

/// What happens to a job in the hands of the workload manager and of people.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Life {
    /// It came to be known.
    OnDeck,
    /// It came to be known, and has asked for nothing.
    NoVariables(Incarnation),
    /// Its state in the workload manager is another one.
    Becomes(Incarnation, Turn),
    /// It is ending, and sees its RAM disk until it has.
    Ending,
    /// Its Epilog has run on one of several nodes.
    EndedOn(NodeName),
    /// The workload manager has forgotten that it runs.
    Forgotten(Turn),
    /// The workload manager knows that again.
    KnownToRun,
    /// Its Prolog has given up.
    PrologOver,
    /// No Prolog of it has asked.
    NoProlog(Unshown),
    /// It started before its input was there; what it waited for then, in words.
    TooEarly {
        /// Nothing if it did not wait.
        waited_for: String,
    },
    /// The workload manager has come so far with its burst buffer, or was answered.
    BurstBuffer(BurstBuffer),
    /// The workload manager has lost its burst buffer before the start, and never starts it.
    BurstBufferLost,
    /// It has a burst buffer, and is not next any more: its RSA nodes are for others.
    PutOff,
    /// It has a burst buffer, and RSA nodes are for it.
    Wanted,
    /// The workload manager's daemon was started anew: of no job.
    ControllerStarted,
    /// The workload manager waits for results of a job of which nothing is left.
    Forsaken(Incarnation),
    /// Somebody else has released it.
    Released,
    /// Somebody has ordered another attempt.
    Retried,
    /// Another job writes where its input is.
    StagedAgain { other: Incarnation, path: PathBuf },
    /// It has started before it could be held for that.
    NotHeldInTime,
    /// Nothing of it is left to be done.
    Gone(Incarnation),
}

impl Life {
    /// See [`Notice::thesis`](super::Notice::thesis); `words` are ours.
    pub(super) fn thesis(
        &self,
        job: Incarnation,
        state: JobState,
        words: &dyn Fn() -> Option<String>,
    ) -> Option<String> {
        match self {
            Life::OnDeck | Life::BurstBuffer(_) | Life::PutOff | Life::Wanted | Life::ControllerStarted => {
                None
            }
            Life::Becomes(
                _,
                Turn::Runs | Turn::Ended | Turn::EndedOnItsNodes | Turn::LeftQueue | Turn::BackInQueue,
            ) => None,
            Life::Gone(_) => (state == JobState::Demoted)
                .then(|| format!("removing state files for job {job} due to demotion/destruction")),
            _ => words(),
        }
    }
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NO_PROLOG: &str = "no Prolog of it has asked the scheduler";
        match self {
            Life::OnDeck => f.write_str("on deck"),
            Life::NoVariables(job) => {
                write!(f, "job {job} does not have RSA variables set, marking ineligible")
            }
            Life::Becomes(job, turn) => write!(f, "job {job} {turn}"),
            Life::Ending => Turn::Ending.fmt(f),
            Life::EndedOn(node) => write!(f, "ended on {node}"),
            Life::Forgotten(turn) => write!(f, "{turn}; its Epilogs are waited for"),
            Life::KnownToRun => f.write_str("is known to run again"),
            Life::PrologOver => f.write_str("its Prolog has not waited any longer"),
            Life::NoProlog(Unshown::Nothing) => f.write_str(NO_PROLOG),
            Life::NoProlog(Unshown::Output) => {
                write!(f, "its output was not in RAM from its start: {NO_PROLOG}")
            }
            Life::NoProlog(Unshown::Input) => {
                write!(f, "its RAM disk was ready, and is not used: {NO_PROLOG}; it works on disk")
            }
            Life::TooEarly { waited_for } => {
                f.write_str("it started before its input was in RAM")?;
                if !waited_for.is_empty() {
                    write!(f, " ({waited_for})")?;
                }
                f.write_str(", and reads it from disk")
            }
            Life::BurstBuffer(stage) => f.write_str(match stage {
                BurstBuffer::Unasked | BurstBuffer::SetUp => "its burst buffer is set up",
                BurstBuffer::DataIn => "the workload manager waits for its input",
                BurstBuffer::Answered => "the workload manager may start it",
                BurstBuffer::PreRun => {
                    "has nodes; the workload manager waits for its RAM disk to be shown there"
                }
                BurstBuffer::Started => "the workload manager may start it on its nodes",
                BurstBuffer::PostRun => "has ended; the workload manager waits for its results",
                BurstBuffer::Kept => "the workload manager was told that its results are kept",
                BurstBuffer::TornDown => "its burst buffer is torn down",
            }),
            Life::BurstBufferLost => f.write_str(
                "Slurm has lost its burst buffer, as slurmctld was killed before it had saved that, and will never start it: cancel it, and \
                 submit it anew",
            ),
            Life::PutOff => f.write_str("is not next any more: its RSA nodes are for others"),
            Life::Wanted => f.write_str("is next"),
            Life::ControllerStarted => f.write_str("the workload manager's daemon was started"),
            Life::Forsaken(job) => {
                write!(
                    f,
                    "nothing is left of job {job}, whose results the workload manager waits for: it is told"
                )
            }
            Life::Released => f.write_str("was released by hand"),
            Life::Retried => f.write_str("tried again by hand"),
            Life::StagedAgain { other, path } => {
                write!(f, "job {other} writes to {}: it is staged again when that is on disk", path.display())
            }
            Life::NotHeldInTime => f.write_str(
                "it started before it could be held: its input is as it was when it was copied, without what the other job writes",
            ),
            Life::Gone(job) => write!(f, "removing state of job {job}"),
        }
    }
}
