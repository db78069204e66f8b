//! Workload managers: what the scheduler asks of one, and Slurm.
//!
//! The scheduler never talks to Slurm itself. It asks a [`WorkloadManager`] for the whole queue at once, in the words
//! of [`ondeck_core::queue`], and for the script of a job that it has not seen before; now and then it holds or
//! releases a job, or says something to its user. Another workload manager is one more implementation of the trait.
//!
//! A workload manager that does not answer is not one without jobs: every call says so with
//! [`WlmError::Unavailable`], and the caller goes on with what it knew.
//!
//! # Layout
//!
//! - [`WorkloadManager`], [`JobDetails`], [`WlmError`]: what is asked, and what may go wrong
//! - [`Slurm`]: Slurm by its commands `squeue` and `scontrol`; `slurm/command` runs them, `slurm/queue` and
//!   `slurm/details` understand them, `slurm/burst_buffers` finds jobs that it will never start
//! - [`hostlist`]: `c[1-3]` to names

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use ondeck_core::{JobId, NodeName, QueuedJob};

mod error;
pub mod hostlist;
mod slurm;

pub use error::WlmError;
pub use slurm::{HELD_FOR_INPUT, Slurm, SlurmSettings, jobs_with_burst_buffers, mark};

/// What is known of a job beyond its place in the queue: enough to find its files and to tell its user something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobDetails {
    /// The directory it starts in; relative paths of its script begin here. Its user chose it.
    pub work_dir: PathBuf,
    /// Where the output of its script goes; of a job without a script, where it would. Its user chose it.
    pub std_out: Option<PathBuf>,
    /// Where the errors of its script go.
    pub std_err: Option<PathBuf>,
    /// Its user's comment; empty if there is none.
    pub comment: String,
    /// The comment that only administrators write, and everybody reads; empty if there is none.
    pub admin_comment: String,
    /// Its exit code; nothing while it has not ended. 128 and the signal's number if a signal ended it, as in a shell.
    pub exit_code: Option<u32>,
    /// Its state, in the workload manager's own word.
    pub state: String,
    /// How many tasks it has or wants, if that is said.
    pub tasks: Option<u32>,
    /// What its user calls it; that of its script's file if nothing was said.
    pub name: String,
    /// The number of the array that it is an element of; the last one that got a number of its own has the same.
    pub array: Option<JobId>,
}

/// The queue at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Queue {
    /// Every job whose number is known for good.
    pub jobs: Vec<QueuedJob>,
    /// Which of them are elements of an array.
    pub elements: BTreeMap<JobId, Element>,
    /// Elements of arrays that wait for other jobs and share one record as yet: one for all of them, with the array's number.
    pub dependent_rests: Vec<QueuedJob>,
    /// Elements of arrays that are held until their input is there, and share one record as yet.
    pub held_arrays: Vec<HeldArray>,
    /// Jobs whose input the workload manager says to have asked for, and to wait for.
    pub staging_in: BTreeSet<JobId>,
    /// Arrays that wait and of which no element has a record of its own: one job for all of them, with the array's number, by which
    /// an order reaches exactly these.
    pub whole_arrays: Vec<QueuedJob>,
    /// Before which time each pending job and whole array does not start, whoever has said so, in seconds since 1970; nothing of
    /// those of which nobody has said anything, or that the workload manager has not looked at.
    pub begin_times: BTreeMap<JobId, u64>,
}

/// An element of an array of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    /// The number by which all elements of the array are reached.
    pub array: JobId,
    /// Its number there.
    pub task: u32,
}

/// The rest of an array of jobs, held until its input is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldArray {
    /// The number by which all elements of the array are reached.
    pub array: JobId,
    /// The first of its elements that has no record of its own.
    pub next: u32,
}

/// The daemon of a workload manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// The user that it runs as.
    pub uid: u32,
    /// The hosts that it may run on, as their administrator has named them.
    pub hosts: Vec<String>,
    /// When it was started, by its own clock, as a number that is another after the next start: its digits. 0: it does not say, or
    /// that is of no matter, because it loses no places for jobs that wait.
    pub started: u64,
}

/// A workload manager.
///
/// Every method fails with [`WlmError::Unavailable`] if the workload manager does not answer in time, and with
/// [`WlmError::Malformed`] if its answer is not understood. Those that name a job fail with [`WlmError::NoSuchJob`] if
/// it is not known, and those that change it with [`WlmError::Refused`] if that can't be done, for instance because
/// the job has ended.
#[async_trait]
pub trait WorkloadManager: Send + Sync {
    /// The nodes that jobs can run on, but those that the workload manager itself takes for down or switched off.
    async fn nodes(&self) -> Result<Vec<NodeName>, WlmError>;

    /// Every job of every user: pending, running, ending, and those that ended a short while ago.
    ///
    /// Elements of an array that share one record are not among its jobs.
    async fn queue(&self) -> Result<Queue, WlmError>;

    /// Gives the next element of a held array a record, and so a number, of its own. It stays held.
    async fn split(&self, held: HeldArray) -> Result<(), WlmError>;

    /// The batch script of a job, byte by byte.
    ///
    /// # Errors
    /// [`WlmError::NoScript`] if it has none and never will.
    async fn script(&self, job: JobId) -> Result<Vec<u8>, WlmError>;

    /// The directory that a job starts in.
    async fn work_dir(&self, job: JobId) -> Result<PathBuf, WlmError>;

    /// What is known of a job beyond its place in the queue.
    async fn details(&self, job: JobId) -> Result<JobDetails, WlmError>;

    /// Writes a line where the job's user sees it, in place of the last one. Control characters become blanks, and
    /// what is longer than 500 characters is cut. The mark [`HELD_FOR_INPUT`] stands in the same place: a line for a job
    /// that is to keep it begins with it.
    ///
    /// # Errors
    /// [`WlmError::Refused`] if the job has ended and is in no accounts.
    async fn set_comment(&self, job: JobId, text: &str) -> Result<(), WlmError>;

    /// Keeps a pending job from starting until it is released; its user can't release it. Does nothing to a job that
    /// runs.
    async fn hold(&self, job: JobId) -> Result<(), WlmError>;

    /// The same, and writes a line where the job's user sees it, as [`WorkloadManager::set_comment`] does, both or none: a
    /// mark in the line tells whose hold it is, also if nobody lives to remember it.
    async fn hold_saying(&self, job: JobId, text: &str) -> Result<(), WlmError>;

    /// Ends any hold: this one's, its user's and an administrator's. The priority is computed anew.
    async fn release(&self, job: JobId) -> Result<(), WlmError>;

    /// Gives a job a priority that stays as it is until [`WorkloadManager::reset_priority`]. Greater is sooner.
    ///
    /// # Errors
    /// [`WlmError::Refused`] for zero, which would be a hold.
    async fn set_priority(&self, job: JobId, priority: u32) -> Result<(), WlmError>;

    /// Has the priority of a job computed anew, and from now on again and again. It ends a hold, so it is for jobs that
    /// are not held.
    async fn reset_priority(&self, job: JobId) -> Result<(), WlmError>;

    /// Gives a job another quality of service.
    async fn set_qos(&self, job: JobId, qos: &str) -> Result<(), WlmError>;

    /// Keeps a pending job from starting for so long from now, or lets it start if that is nothing, and writes a line where its user sees
    /// it, as [`WorkloadManager::set_comment`] does, both or none. Where no time is left, its place in the queue is as before.
    async fn begin_after(&self, job: JobId, time: Duration, text: &str) -> Result<(), WlmError>;

    /// No longer keeps an ended job that waits for its results. Does nothing to one that does not.
    async fn end_stage_out(&self, job: JobId) -> Result<(), WlmError>;

    /// What the cluster is called whose jobs it has.
    async fn cluster(&self) -> Result<String, WlmError>;

    /// Who it runs as, and where.
    async fn controller(&self) -> Result<Controller, WlmError>;

    /// Whether it answers.
    ///
    /// # Errors
    /// [`WlmError::Unavailable`] if it does not.
    async fn ping(&self) -> Result<(), WlmError>;
}
