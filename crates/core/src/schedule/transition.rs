//! The one table that says what each pair of states leads to.

use super::job::Job;
use super::states::{BurstBuffer, JobState, Prolog, QueuePlace, RsaState};
use crate::allocation::Purpose;

/// What comes next for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
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
    /// What was copied, or is being copied, is about to change on disk: held, and ABORTED once the hold stands, or once the copying
    /// has been stopped.
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
/// A job with a burst buffer is known before it is next. As long as it is put off it stands in the column DEMOTED, and waits where
/// others are forgotten. One whose results are kept, as its workload manager was told, is not forgotten before that has been told
/// that they are gone. READY and RUNNING, it is mounted while the workload manager waits for that, before its Prologs.
///
/// A component of a heterogeneous job gets nothing: what a former version has built for it is not mounted.
///
/// A job is forgotten only when it is no longer locked in. A job that must not start without its input (`RSA_WAIT=hold`)
/// and is STAGING_IN or READY is staged again, and held again, if another job begins to write results where its input is
/// ([`Transition::StageAgain`]): no job's own state says that. READY, it is so until the queue shows the hold; one that starts before
/// uses its RAM disk as it is. Nor does it say when one that may start without its RAM disk, and is
/// held for the results of another one that it depended on, is let go: when these are home, abandoned or lost.
///
/// A RAM disk that is `broken` (a server of it is lost) is stopped, unmounted, destroyed; if it held results, LOST. From
/// there STAGING_OUT with `salvage` saves what the other servers have: DONE_STAGING_OUT then although it is broken, LOST
/// again if it fails, or if the server has come back meanwhile, so that there is more to save.
pub fn next_transition(job: &Job) -> Transition {
    use JobState::{Demoted, Finished, Ondeck, Running};
    use RsaState as S;
    // A RAM disk for input is of no use once the job has started without it.
    let output_again = job.wants_out() && job.may_try();
    match (job.rsa_state, job.standing()) {
        (S::Initial | S::Ineligible, Demoted) if job.put_off && job.job_state == Ondeck => Transition::Wait,
        // Whoever waits for it to be gone is told so first.
        (S::Initial | S::Ineligible, Finished) if job.burst_buffer == BurstBuffer::Kept => Transition::Wait,
        (S::Initial, Ondeck) if !job.may_try() => Transition::GiveUp,
        (S::Initial, Ondeck) => Transition::Assign(job.best_purpose()),
        (S::Initial, Running) if output_again => Transition::Assign(Purpose::Output),
        (S::Initial, Running) => Transition::GiveUp,
        (S::Initial | S::Ineligible, Demoted | Finished) if job.place == QueuePlace::Unlocking => {
            Transition::Wait
        }
        (S::Initial | S::Ineligible, Demoted | Finished) => Transition::Forget,
        (S::Ineligible, Ondeck | Running) => Transition::Wait,

        (S::Assigned, Ondeck) => Transition::Construct(job.purpose),
        (S::Assigned, Running) if output_again => Transition::Construct(Purpose::Output),
        (S::Assigned, Running | Demoted | Finished) => Transition::Release,

        (S::Booted | S::Ready, _) if job.broken => Transition::Destroy,
        (S::Booted, Ondeck) => Transition::StageIn(job.purpose),
        (S::Booted, Running) if output_again => Transition::StageIn(Purpose::Output),
        (S::Booted, Running | Demoted | Finished) => Transition::Destroy,

        (S::StagingIn, _) if job.broken => Transition::Stop,
        (S::StagingIn, Ondeck) => Transition::Wait,
        (S::StagingIn, Running) if job.purpose == Purpose::Output => Transition::Wait,
        (S::StagingIn, Running | Demoted | Finished) => Transition::Stop,

        (S::Aborted, _) => Transition::Destroy,

        (S::Ready, Ondeck) => Transition::Wait,
        // Its nodes are made ready, and nothing of it runs yet.
        (S::Ready, Running) if job.burst_buffer == BurstBuffer::PreRun && job.may_try() => Transition::Mount,
        // A former version has built it.
        (S::Ready, Running) if job.component_of.is_some() => Transition::Destroy,
        (S::Ready, Running) if job.purpose == Purpose::Output && !job.may_try() => Transition::Destroy,
        (S::Ready, Running) if job.purpose == Purpose::Output => match job.prolog {
            Prolog::Waiting => Transition::Mount,
            // Its program starts in a moment, or has started: until that is known, nothing is laid over anything.
            Prolog::Expected(_) => Transition::Wait,
            Prolog::Over if job.backing_off() => Transition::Wait,
            Prolog::Over => Transition::Mount,
        },
        (S::Ready, Running) => match job.prolog {
            Prolog::Waiting => Transition::Mount,
            Prolog::Expected(_) => Transition::Wait,
            Prolog::Over => Transition::Destroy,
        },
        (S::Ready, Demoted | Finished) => Transition::Destroy,

        (S::InuseIn, Running) if job.broken => Transition::NeedUnmount,
        (S::InuseIn, Running) if job.delay_over && output_again && job.ending.is_none() => {
            Transition::NeedUnmount
        }
        (S::InuseIn | S::InuseBoth | S::InuseOut, Running) => Transition::Wait,
        (S::InuseIn | S::InuseBoth | S::InuseOut, Finished) => Transition::Unmount { force: true },
        (S::UnmountNeeded, _) if job.backing_off() => Transition::Wait,
        (S::UnmountNeeded, Running) => Transition::Unmount { force: job.broken || job.mount_failed },
        (S::UnmountNeeded, Finished) => Transition::Unmount { force: true },

        (S::Unmounted, _) if !job.results => Transition::Destroy,
        (S::Unmounted, _) if job.broken => Transition::Lose,
        (S::Unmounted, _) => Transition::StageOut,
        // Somebody has decided, though it is not known who may still see it.
        (S::Held | S::Lost, _) if job.unsure && (!job.results || job.retry_now) => Transition::NeedUnmount,
        (S::Held | S::Lost, _) if !job.results => Transition::Destroy,
        (S::Held, _) if job.broken => Transition::Lose,
        (S::Held, _) if job.retry_now => Transition::StageOut,
        (S::Lost, _) if job.retry_now || !job.broken => Transition::StageOut,
        (S::Held | S::Lost, _) => Transition::Wait,
        (S::DoneStagingOut, _) => Transition::Destroy,

        (S::Destroyed, Ondeck) if job.may_try() && !job.failed_here => {
            Transition::Construct(job.best_purpose())
        }
        (S::Destroyed, Running) if output_again && !job.failed_here => Transition::Construct(Purpose::Output),
        (S::Destroyed, _) => Transition::Release,

        (
            S::Booting | S::StoppingStagingIn | S::Mounting | S::Unmounting | S::StagingOut | S::Teardown,
            _,
        ) => Transition::Wait,
        // Not reached, which the model check proves: a job that was mounted is running or has ended.
        (S::InuseIn | S::InuseBoth | S::InuseOut | S::UnmountNeeded, Ondeck | Demoted) => Transition::Wait,
    }
}
