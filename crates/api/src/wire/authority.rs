//! Whom an agent obeys, and what only that scheduler may order.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// In whose name a scheduler gives an order. It comes with the order, where the credential covers it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// The random name of the scheduler's journal.
    pub journal: String,
    /// A random number of each start of the scheduler, so that two that have copies of one journal are told apart.
    pub session: u64,
    /// How many times the journal was written: an older copy of it has a smaller one.
    pub counter: u64,
}

/// A scheduler asks an agent to obey it. The agent does if it obeys nobody yet, if it obeys this journal already and has
/// seen no greater counter of it, or if this is a take-over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The random name of the scheduler's journal.
    pub journal: String,
    /// A random number of this start of the scheduler. Orders of the session before are refused from now on.
    pub session: u64,
    /// How many times the journal was written.
    pub counter: u64,
    /// Whether a person has confirmed that it replaces whomever the agent obeys.
    #[serde(default)]
    pub take_over: bool,
    /// The journals that this one has replaced. The agent keeps them, so that a later take-over, whose journal knows of
    /// none, can claim agents that have missed this one.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub replaced: BTreeSet<String>,
}

/// Whom an agent obeys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obeyed {
    /// The random name of the scheduler's journal.
    pub journal: String,
    /// The greatest counter of it that the agent has seen.
    pub counter: u64,
    /// Which start of its scheduler; zero from an agent that does not say it.
    #[serde(default)]
    pub session: u64,
    /// The journals that this one has replaced, as far as the agent knows.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub replaced: BTreeSet<String>,
}

/// Why the results that a RAM disk may hold need no guard any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Release {
    /// All of them are on disk, verified, or there were none.
    StagedOut {
        /// The number of the scheduler's task that brought them home, or that removes a RAM disk without any.
        task: u64,
    },
    /// Somebody has given them up.
    Abandoned { by: String },
}
