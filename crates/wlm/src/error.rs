use ondeck_core::JobId;

/// Why a workload manager gave no answer, or not the one that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WlmError {
    /// It is down, restarting, too busy to answer in time, or its commands can't be run. Nothing is known about any
    /// job then: ask again later, and never take it for an empty queue. A change may or may not have been made.
    #[error("the workload manager does not answer: {message}; is its controller up?")]
    Unavailable {
        /// What it, or the system, said.
        message: String,
    },
    /// It knows no job of this number, or no longer: an ended job is forgotten after a while.
    #[error("the workload manager knows no job {0}")]
    NoSuchJob(JobId),
    /// The job was not made from a script (in Slurm: salloc and srun).
    #[error("job {0} has no script")]
    NoScript(JobId),
    /// It understood the request and did not obey.
    #[error("the workload manager refused: {message}")]
    Refused {
        /// Its own words.
        message: String,
    },
    /// It answered something that this version of Ondeck does not understand.
    #[error("can't understand what the workload manager answers: {what}")]
    Malformed {
        /// What was wrong about the answer.
        what: String,
    },
}
