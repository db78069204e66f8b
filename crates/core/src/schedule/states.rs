//! The states, and the one table that says what each leads to.

use serde::{Deserialize, Serialize};

use super::job::{Job, Prolog, Purpose};
use crate::request::keyword_enum;

keyword_enum! {
    /// What the workload manager does with a job.
    #[derive(Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "UPPERCASE")]
    JobState {
        /// It is next to start, or its nodes are being made ready.
        Ondeck = "ONDECK",
        /// It was next, and others were put before it. It stays demoted until everything of it is gone.
        Demoted = "DEMOTED",
        /// It runs.
        Running = "RUNNING",
        /// It has ended, however.
        Finished = "FINISHED",
    }
}

keyword_enum! {
    /// What Ondeck does for a job. The first twenty are those of the thesis and its scripts.
    #[derive(Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "SCREAMING_SNAKE_CASE")]
    RsaState {
        /// Nothing has been done yet.
        Initial = "INITIAL",
        /// Nothing will be done; the job works on disk.
        Ineligible = "INELIGIBLE",
        /// RSA nodes are promised to it.
        Assigned = "ASSIGNED",
        /// The RAM disk is being built.
        Booting = "BOOTING",
        /// The RAM disk is there, and empty.
        Booted = "BOOTED",
        /// Its input is being copied, or its output directories are being prepared.
        StagingIn = "STAGING_IN",
        /// That is being stopped.
        StoppingStagingIn = "STOPPING_STAGING_IN",
        /// The RAM disk has a part of its input and is of no use.
        Aborted = "ABORTED",
        /// All is there; the job may start.
        Ready = "READY",
        /// It is being mounted on the I/O nodes.
        Mounting = "MOUNTING",
        /// The job reads from it.
        InuseIn = "INUSE_IN",
        /// The job reads from it and writes to it.
        InuseBoth = "INUSE_BOTH",
        /// The job writes to it.
        InuseOut = "INUSE_OUT",
        /// It shall be unmounted.
        UnmountNeeded = "UNMOUNT_NEEDED",
        /// It is being unmounted.
        Unmounting = "UNMOUNTING",
        /// No node of the job has it any more.
        Unmounted = "UNMOUNTED",
        /// Results are being copied to disk.
        StagingOut = "STAGING_OUT",
        /// Results are on disk, and verified.
        DoneStagingOut = "DONE_STAGING_OUT",
        /// The RAM disk is being removed.
        Teardown = "TEARDOWN",
        /// It is gone.
        Destroyed = "DESTROYED",
        /// Staging out failed; the results are kept in RAM until it is tried again or they are abandoned.
        Held = "HELD",
        /// A node with results was lost; what is left is kept until it is tried again or abandoned.
        Lost = "LOST",
    }
}

impl RsaState {
    /// Whether something is being done, so that its end is waited for.
    pub fn is_work(self) -> bool {
        use RsaState::{Booting, Mounting, StagingIn, StagingOut, StoppingStagingIn, Teardown, Unmounting};
        matches!(
            self,
            Booting | StagingIn | StoppingStagingIn | Mounting | Unmounting | StagingOut | Teardown
        )
    }

    /// Whether the job sees the RAM disk, or some of its nodes may.
    pub fn is_shown(self) -> bool {
        use RsaState::{InuseBoth, InuseIn, InuseOut, Mounting, UnmountNeeded, Unmounting};
        matches!(self, Mounting | InuseIn | InuseBoth | InuseOut | UnmountNeeded | Unmounting)
    }
}

/// What comes next for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Nothing until something happens.
    Wait,
    /// Take RSA nodes if they are free, for this purpose: ASSIGNED; or wait; or INELIGIBLE.
    Assign(Purpose),
    /// It works on disk.
    GiveUp,
    /// Build the RAM disk for this purpose: BOOTING.
    Construct(Purpose),
    /// Copy the input, prepare the output directories: STAGING_IN.
    StageIn(Purpose),
    /// Stop that: STOPPING_STAGING_IN.
    Stop,
    /// What was copied, or is being copied, is about to change on disk: ABORTED, at last.
    StageAgain,
    /// Mount it on all I/O nodes: MOUNTING.
    Mount,
    /// It shall be unmounted: UNMOUNT_NEEDED.
    NeedUnmount,
    /// Unmount it: UNMOUNTING. By force once the job has ended or can't use it.
    Unmount {
        /// Also if files are open.
        force: bool,
    },
    /// Copy the results to disk: STAGING_OUT.
    StageOut,
    /// Say that results are lost: LOST.
    Lose,
    /// Remove the RAM disk: TEARDOWN.
    Destroy,
    /// Give the RSA nodes back: INITIAL, or INELIGIBLE for a job that runs.
    Release,
    /// There is nothing left of it: its log is archived.
    Forget,
}

/// What comes next. Every pair of states stands here; where nothing is said about RUNNING's purpose, see [`Purpose`].
///
/// | RSA state | ONDECK | DEMOTED | RUNNING | FINISHED |
/// |---|---|---|---|---|
/// | INITIAL | assign | forget | assign for output, else give up | forget |
/// | INELIGIBLE | wait | forget | wait | forget |
/// | ASSIGNED | construct | release | construct for output, else release | release |
/// | BOOTED | stage in | destroy | stage in for output, else destroy | destroy |
/// | STAGING_IN | wait | stop | input: stop | stop |
/// | ABORTED | destroy | destroy | destroy | destroy |
/// | READY | wait | destroy | the Prolog waits: mount; over and output: mount while it is frozen, a few times; else destroy | destroy |
/// | INUSE_IN | - | - | after the delay, if there is output and it is not ending: unmount | unmount |
/// | INUSE_BOTH, INUSE_OUT | - | - | wait | unmount |
/// | UNMOUNT_NEEDED | - | - | unmount unless files are open | unmount by force |
/// | UNMOUNTED | - | - | results: stage out; else destroy | the same |
/// | DONE_STAGING_OUT | - | - | destroy | destroy |
/// | HELD | - | - | broken: LOST; else wait for time, `retry` (found without a journal: unmount first) or `abandon` | the same |
/// | LOST | - | - | whole again: stage out; else wait for `retry`, `retry --salvage` or `abandon` | the same |
/// | DESTROYED | construct again, or release after a failure | release | for output again, else release | release |
/// | all others | wait | wait | wait | wait |
///
/// A component of a heterogeneous job gets nothing: what a former version has built for it is not mounted.
///
/// A job is forgotten only when it is no longer locked in. A job that must not start without its input (`RSA_WAIT=hold`)
/// and is STAGING_IN or READY is staged again, and held again, if another job begins to write results where its input is
/// ([`Move::StageAgain`]): no job's own state says that. Nor does it say when one that may start without its RAM disk, and is
/// held for the results of another one that it depended on, is let go: when these are home, abandoned or lost.
///
/// A RAM disk that is `broken` (a server of it is lost) is stopped, unmounted, destroyed; if it held results, LOST. From
/// there STAGING_OUT with `salvage` saves what the other servers have: DONE_STAGING_OUT then although it is broken, LOST
/// again if it fails, or if the server has come back meanwhile, so that there is more to save.
pub fn decide(job: &Job) -> Move {
    use JobState::{Demoted, Finished, Ondeck, Running};
    use RsaState as S;
    // A RAM disk for input is of no use once the job has started without it.
    let output_again = job.wants_out() && job.may_try();
    match (job.rsa_state, job.job_state) {
        (S::Initial, Ondeck) if !job.may_try() => Move::GiveUp,
        (S::Initial, Ondeck) => Move::Assign(job.best_purpose()),
        (S::Initial, Running) if output_again => Move::Assign(Purpose::Output),
        (S::Initial, Running) => Move::GiveUp,
        (S::Initial | S::Ineligible, Demoted | Finished) if job.unlocking => Move::Wait,
        (S::Initial | S::Ineligible, Demoted | Finished) => Move::Forget,
        (S::Ineligible, Ondeck | Running) => Move::Wait,

        (S::Assigned, Ondeck) => Move::Construct(job.purpose),
        (S::Assigned, Running) if output_again => Move::Construct(Purpose::Output),
        (S::Assigned, Running | Demoted | Finished) => Move::Release,

        (S::Booted | S::Ready, _) if job.broken => Move::Destroy,
        (S::Booted, Ondeck) => Move::StageIn(job.purpose),
        (S::Booted, Running) if output_again => Move::StageIn(Purpose::Output),
        (S::Booted, Running | Demoted | Finished) => Move::Destroy,

        (S::StagingIn, _) if job.broken => Move::Stop,
        (S::StagingIn, Ondeck) => Move::Wait,
        (S::StagingIn, Running) if job.purpose == Purpose::Output => Move::Wait,
        (S::StagingIn, Running | Demoted | Finished) => Move::Stop,

        (S::Aborted, _) => Move::Destroy,

        (S::Ready, Ondeck) => Move::Wait,
        // A former version has built it.
        (S::Ready, Running) if job.component_of.is_some() => Move::Destroy,
        (S::Ready, Running) if job.purpose == Purpose::Output && !job.may_try() => Move::Destroy,
        (S::Ready, Running) if job.purpose == Purpose::Output => match job.prolog {
            Prolog::Waiting => Move::Mount,
            // Its program starts in a moment, or has started: until that is known, nothing is laid over anything.
            Prolog::Expected => Move::Wait,
            Prolog::Over if job.backing_off() => Move::Wait,
            Prolog::Over => Move::Mount,
        },
        (S::Ready, Running) => match job.prolog {
            Prolog::Waiting => Move::Mount,
            Prolog::Expected => Move::Wait,
            Prolog::Over => Move::Destroy,
        },
        (S::Ready, Demoted | Finished) => Move::Destroy,

        (S::InuseIn, Running) if job.broken => Move::NeedUnmount,
        (S::InuseIn, Running) if job.delay_over && output_again && job.ending.is_none() => Move::NeedUnmount,
        (S::InuseIn | S::InuseBoth | S::InuseOut, Running) => Move::Wait,
        (S::InuseIn | S::InuseBoth | S::InuseOut, Finished) => Move::Unmount { force: true },
        (S::UnmountNeeded, _) if job.backing_off() => Move::Wait,
        (S::UnmountNeeded, Running) => Move::Unmount { force: job.broken || job.mount_failed },
        (S::UnmountNeeded, Finished) => Move::Unmount { force: true },

        (S::Unmounted, _) if !job.results => Move::Destroy,
        (S::Unmounted, _) if job.broken => Move::Lose,
        (S::Unmounted, _) => Move::StageOut,
        // Somebody has decided, though it is not known who may still see it.
        (S::Held | S::Lost, _) if job.unsure && (!job.results || job.retry_now) => Move::NeedUnmount,
        (S::Held | S::Lost, _) if !job.results => Move::Destroy,
        (S::Held, _) if job.broken => Move::Lose,
        (S::Held, _) if job.retry_now => Move::StageOut,
        (S::Lost, _) if job.retry_now || !job.broken => Move::StageOut,
        (S::Held | S::Lost, _) => Move::Wait,
        (S::DoneStagingOut, _) => Move::Destroy,

        (S::Destroyed, Ondeck) if job.may_try() && !job.failed_here => Move::Construct(job.best_purpose()),
        (S::Destroyed, Running) if output_again && !job.failed_here => Move::Construct(Purpose::Output),
        (S::Destroyed, _) => Move::Release,

        (
            S::Booting | S::StoppingStagingIn | S::Mounting | S::Unmounting | S::StagingOut | S::Teardown,
            _,
        ) => Move::Wait,
        // Not reached, which the model check proves: a job that was mounted is running or has ended.
        (S::InuseIn | S::InuseBoth | S::InuseOut | S::UnmountNeeded, Ondeck | Demoted) => Move::Wait,
    }
}
