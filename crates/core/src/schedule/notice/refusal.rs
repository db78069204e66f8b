//! Why an order makes no sense now.

use crate::schedule::RsaState;
use crate::{Incarnation, NodeName};

/// Why an order makes no sense now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum NotNow {
    /// A node was given up before.
    #[error("RSA node {0} was given up already: nothing waits for it")]
    GivenUp(NodeName),
    /// A node that is to be given up has answered.
    #[error("RSA node {0} has answered since the journal began: nothing waits for it")]
    HasAnswered(NodeName),
    /// Another attempt would come to the same.
    #[error(
        "job {0} is a component of a heterogeneous job, which can't have a RAM disk: there is nothing to try again"
    )]
    Component(Incarnation),
    /// Slurm was told that it fails, and would never start it.
    #[error(
        "Slurm was told that the input of job {0} can't be made, and does not ask again: cancel the job, and submit it anew"
    )]
    ToldItFails(Incarnation),
    /// There is nothing to try again.
    #[error("job {0} is {1}: nothing of it is held, so there is nothing to try again")]
    NothingHeld(Incarnation, RsaState),
    /// Its processes may write to its RAM disk.
    #[error("job {0} still runs, and may write to its RAM disk; wait for its end, or cancel it first")]
    StillRuns(Incarnation),
    /// There is nothing to salvage.
    #[error("job {0} is {1}: nothing of it is lost, so there is nothing to salvage")]
    NothingLost(Incarnation, RsaState),
    /// Nothing has to be given up.
    #[error("job {0}: all of its RAM disk is there again; it is staged out by itself")]
    AllThere(Incarnation),
    /// Nothing can be salvaged.
    #[error(
        "job {0}: each node of its RAM disk has parts of all files, so nothing can be saved without all of them"
    )]
    PartsOfAll(Incarnation),
    /// There are no results to abandon.
    #[error(
        "job {job} is {state}: only results that are being staged out, held or lost can be abandoned{}",
        if *.runs { "; cancel the job first" } else { "" }
    )]
    NothingToAbandon {
        job: Incarnation,
        state: RsaState,
        /// Whether it runs.
        runs: bool,
    },
}
