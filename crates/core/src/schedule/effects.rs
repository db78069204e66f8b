//! What follows from an event: what is to be done, and what is to be noted.

use serde::{Deserialize, Serialize};

use super::job::{Job, WorkOrder};
use super::notice::{HeldBack, NotNow, Notice};
use super::{JobState, RsaState, Time};
use crate::{Incarnation, NodeName, RamDiskId};

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Begin work for a job, and report its end.
    Begin(Incarnation, WorkOrder),
    /// Keep a job in front of the queue.
    LockIn(Incarnation),
    /// Stop doing so.
    UndoLockIn(Incarnation),
    /// Hold a job.
    Hold(Incarnation),
    /// Hold a job of which nothing else is known here, with the mark of the hold, and tell its user.
    HoldBack(Incarnation, HeldBack),
    /// Let a held job start, and take back the mark of the hold.
    LetGo(Incarnation),
    /// Tell the workload manager, which keeps a job because its results were not home, not to wait for them any longer.
    EndStageOut(Incarnation),
    /// Take back the mark of a hold that is over.
    Unmark(Incarnation),
    /// Tell a job's user.
    Tell(Incarnation, Notice),
    /// Remove what was left on a node.
    CleanUp(NodeName, RamDiskId),
}

/// A line of a job's log, or of the scheduler's if there is no job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The job that it is about; nothing for the scheduler itself.
    pub job: Option<Incarnation>,
    /// Its states afterwards.
    pub states: Option<(JobState, RsaState)>,
    /// What happened, as data; its words are made where it is shown.
    pub notice: Notice,
}

impl Change {
    /// Its sentence in the log of the thesis; nothing for what the thesis did not log.
    pub fn thesis(&self) -> Option<String> {
        let (job, (state, _)) = self.job.zip(self.states)?;
        self.notice.thesis(job, state)
    }
}

/// What follows from an event.
#[derive(Clone, Debug, Default)]
pub struct Effects {
    /// To be done, after everything here has been kept.
    pub actions: Vec<Action>,
    /// To be noted.
    pub changes: Vec<Change>,
    /// The jobs that were touched: changed, or gone.
    pub jobs: Vec<Incarnation>,
    /// The last of what was known of jobs that are gone.
    pub gone: Vec<Job>,
    /// The nodes that were touched.
    pub nodes: Vec<NodeName>,
    /// What was given back, to be accounted for.
    pub used: Vec<UsageRecord>,
    /// Jobs that have started without any Prolog that asked.
    pub unasked: Vec<Unasked>,
}

/// A job that has started without any Prolog that asked: its RAM disk could not be shown in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unasked {
    /// The life that has started.
    pub job: Incarnation,
    /// Where it runs, or ran.
    pub nodes: Vec<NodeName>,
    /// Since when it is known to run.
    pub started: Time,
}

/// What a user had of the RSA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UsageRecord {
    /// The user id of the job's owner.
    pub uid: u32,
    /// The account that the job was charged to.
    pub account: String,
    /// RSA nodes, or parts of them, times the seconds for which they were promised.
    pub node_seconds: f64,
}

/// Why an order was not obeyed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No such job.
    #[error("job {0} is not known here: it has asked for nothing, or all of it is done")]
    NoJob(Incarnation),
    /// No such node.
    #[error("there is no RSA node {0}")]
    NoNode(NodeName),
    /// It makes no sense now.
    #[error("{0}")]
    NotNow(NotNow),
}
