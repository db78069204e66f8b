//! The states of a job, of its Prolog, its hold and its place in the queue.

use serde::{Deserialize, Serialize};

use super::Time;
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

/// Whether the workload manager holds a job until its input is there.
///
/// | | ordered | seen in the queue | input is there, or will not be | released by somebody else | starts, or leaves the queue |
/// |---|---|---|---|---|---|
/// | `No` | `Ordered` | - | - | - | - |
/// | `Ordered` | - | `Stands` | `LetGo` | - | `No` |
/// | `Stands` | - | - | `LetGo` | `ReleasedByHand` | `No` |
/// | `LetGo` | `Ordered` | - | - | - | - |
/// | `ReleasedByHand`, `ReleasedBefore` | - | - | - | - | - |
///
/// A job that was held at its submission begins with `Stands`; one that was held then, and had been released when it came
/// to be known, with `ReleasedBefore`. What was released by hand is not held again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "HoldInJournal", into = "HoldInJournal")]
pub enum Hold {
    /// It is not held, and was not.
    #[default]
    No,
    /// It was ordered, and the queue has not shown it yet.
    Ordered,
    /// The queue has shown it.
    Stands,
    /// It was released, which may have to be ordered again.
    LetGo,
    /// Somebody else has released it, and does not want to wait for its input.
    ReleasedByHand,
    /// The same, before it was known here.
    ReleasedBefore,
}

impl Hold {
    /// Whether it is held, or will be in a moment.
    pub fn is_held(self) -> bool {
        matches!(self, Hold::Ordered | Hold::Stands)
    }

    /// Whether it was held, as far as is known here, and is not any more.
    pub fn was_let_go(self) -> bool {
        matches!(self, Hold::LetGo | Hold::ReleasedByHand)
    }

    /// Whether somebody else released it.
    pub fn is_released_by_others(self) -> bool {
        matches!(self, Hold::ReleasedByHand | Hold::ReleasedBefore)
    }

    /// After the job has started, or has left the queue.
    #[must_use]
    pub fn over(self) -> Hold {
        if self.is_held() { Hold::No } else { self }
    }
}

/// [`Hold`] as the journal has it.
#[derive(Serialize, Deserialize)]
struct HoldInJournal {
    held: bool,
    #[serde(default)]
    hold_seen: bool,
    let_go: bool,
    #[serde(default)]
    released: bool,
}

impl From<HoldInJournal> for Hold {
    fn from(kept: HoldInJournal) -> Hold {
        match kept {
            HoldInJournal { held: true, hold_seen: true, .. } => Hold::Stands,
            HoldInJournal { held: true, .. } => Hold::Ordered,
            HoldInJournal { let_go: true, released: true, .. } => Hold::ReleasedByHand,
            HoldInJournal { let_go: true, .. } => Hold::LetGo,
            HoldInJournal { released: true, .. } => Hold::ReleasedBefore,
            HoldInJournal { .. } => Hold::No,
        }
    }
}

impl From<Hold> for HoldInJournal {
    fn from(hold: Hold) -> HoldInJournal {
        HoldInJournal {
            held: hold.is_held(),
            hold_seen: hold == Hold::Stands,
            let_go: hold.was_let_go(),
            released: hold.is_released_by_others(),
        }
    }
}

/// Whether the workload manager keeps a job in front of its queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "QueuePlaceInJournal", into = "QueuePlaceInJournal")]
pub enum QueuePlace {
    /// The job has the place that others give it.
    #[default]
    Own,
    /// It was told to keep the job in front.
    LockedIn,
    /// It was told to stop doing so, and has not done it yet: until then the job is not forgotten.
    Unlocking,
}

/// [`QueuePlace`] as the journal has it.
#[derive(Serialize, Deserialize)]
struct QueuePlaceInJournal {
    locked_in: bool,
    #[serde(default)]
    unlocking: bool,
}

impl From<QueuePlaceInJournal> for QueuePlace {
    fn from(kept: QueuePlaceInJournal) -> QueuePlace {
        match kept {
            QueuePlaceInJournal { locked_in: true, .. } => QueuePlace::LockedIn,
            QueuePlaceInJournal { unlocking: true, .. } => QueuePlace::Unlocking,
            QueuePlaceInJournal { .. } => QueuePlace::Own,
        }
    }
}

impl From<QueuePlace> for QueuePlaceInJournal {
    fn from(place: QueuePlace) -> QueuePlaceInJournal {
        QueuePlaceInJournal {
            locked_in: place == QueuePlace::LockedIn,
            unlocking: place == QueuePlace::Unlocking,
        }
    }
}

/// What is known of a job's Prolog.
///
/// | | a Prolog asks | the time is over | it has its answer, or waits no longer | the scheduler starts anew | the job ends |
/// |---|---|---|---|---|---|
/// | `Expected` | `Waiting` | `Over`, and the user is told | - | - | `Over` |
/// | `Waiting` | - | - | `Over` | `Expected`: it asks again | `Over` |
/// | `Over` | - | - | - | - | - |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "PrologInJournal", into = "PrologInJournal")]
pub enum Prolog {
    /// It has not been heard of; until when it is waited for, since the job runs.
    Expected(Option<Time>),
    /// It waits for an answer, and the job with it.
    Waiting,
    /// It is over: the job's program runs.
    Over,
}

impl Prolog {
    /// Whether it has not been heard of.
    pub fn is_expected(self) -> bool {
        matches!(self, Prolog::Expected(_))
    }

    /// Until when it is waited for, if it has not been heard of.
    pub fn until(self) -> Option<Time> {
        match self {
            Prolog::Expected(until) => until,
            Prolog::Waiting | Prolog::Over => None,
        }
    }
}

/// [`Prolog`] as the journal has it.
#[derive(Serialize, Deserialize)]
struct PrologInJournal {
    prolog: PrologWord,
    prolog_until: Option<Time>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PrologWord {
    Expected,
    Waiting,
    Over,
}

impl From<PrologInJournal> for Prolog {
    fn from(kept: PrologInJournal) -> Prolog {
        match kept.prolog {
            PrologWord::Expected => Prolog::Expected(kept.prolog_until),
            PrologWord::Waiting => Prolog::Waiting,
            PrologWord::Over => Prolog::Over,
        }
    }
}

impl From<Prolog> for PrologInJournal {
    fn from(prolog: Prolog) -> PrologInJournal {
        let word = match prolog {
            Prolog::Expected(_) => PrologWord::Expected,
            Prolog::Waiting => PrologWord::Waiting,
            Prolog::Over => PrologWord::Over,
        };
        PrologInJournal { prolog: word, prolog_until: prolog.until() }
    }
}

/// How far the workload manager has come with a job that has a burst buffer: it asks for the job's input before the start, and
/// for its results after the end, and keeps the job waiting meanwhile.
///
/// | | setup | data_in | READY, or on disk | pre_run | shown, or on disk | post_run | results are kept | teardown |
/// |---|---|---|---|---|---|---|---|---|
/// | `Unasked` | `SetUp` | `DataIn` | - | `PreRun` | - | `PostRun` | `Kept` | `TornDown` |
/// | `SetUp` | - | `DataIn` | - | `PreRun` | - | `PostRun` | `Kept` | `TornDown` |
/// | `DataIn` | - | - | `Answered` | `PreRun` | - | `PostRun` | `Kept` | `TornDown` |
/// | `Answered` | - | - | - | `PreRun` | - | `PostRun` | `Kept` | `TornDown` |
/// | `PreRun` | - | - | - | - | `Started` | `PostRun` | `Kept` | `TornDown` |
/// | `Started` | - | - | - | - | - | `PostRun` | `Kept` | `TornDown` |
/// | `PostRun` | - | - | - | - | - | - | `Kept` | `TornDown` |
/// | `Kept`, `TornDown` | - | - | - | - | - | - | - | `TornDown` |
///
/// A job that may start without its input is answered at once. The results of one that is `Kept` wait for somebody's decision, and
/// so does the job in the workload manager, until it is told that they are home or given up; it tears down then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BurstBuffer {
    /// It has none, or nothing was asked for it yet.
    #[default]
    Unasked,
    /// The workload manager has made it known.
    SetUp,
    /// It waits for its input.
    DataIn,
    /// It has its input, or will not get it in RAM: it may start.
    Answered,
    /// It has nodes, and waits until its RAM disk is shown on all of them, or on none.
    PreRun,
    /// It was told.
    Started,
    /// Its processes have ended, or are being ended.
    PostRun,
    /// It was told that somebody must decide on its results.
    Kept,
    /// It is gone for the workload manager.
    TornDown,
}

impl BurstBuffer {
    /// Whether the workload manager has asked for it, and has not torn it down.
    pub fn is_live(self) -> bool {
        !matches!(self, BurstBuffer::Unasked | BurstBuffer::TornDown)
    }

    /// Whether it has been told of its start.
    pub fn has_started(self) -> bool {
        self >= BurstBuffer::Started
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_has_prologs_holds_and_places_as_former_versions_wrote_them() {
        for hold in
            [Hold::No, Hold::Ordered, Hold::Stands, Hold::LetGo, Hold::ReleasedByHand, Hold::ReleasedBefore]
        {
            let kept = serde_json::to_value(hold).unwrap();
            assert_eq!(serde_json::from_value::<Hold>(kept).unwrap(), hold);
        }
        for place in [QueuePlace::Own, QueuePlace::LockedIn, QueuePlace::Unlocking] {
            let kept = serde_json::to_value(place).unwrap();
            assert_eq!(serde_json::from_value::<QueuePlace>(kept).unwrap(), place);
        }
        for prolog in [Prolog::Expected(None), Prolog::Expected(Some(Time(7))), Prolog::Waiting, Prolog::Over]
        {
            let kept = serde_json::to_value(prolog).unwrap();
            assert_eq!(serde_json::from_value::<Prolog>(kept).unwrap(), prolog);
        }
        let read = |text: &str| serde_json::from_str::<Hold>(text).unwrap();
        // Before there were `hold_seen` and `released`; and a sighting that was left from an earlier hold.
        assert_eq!(read(r#"{"held":true,"let_go":false}"#), Hold::Ordered);
        assert_eq!(read(r#"{"held":false,"hold_seen":true,"let_go":true,"released":false}"#), Hold::LetGo);
        assert_eq!(
            serde_json::from_str::<QueuePlace>(r#"{"locked_in":true}"#).unwrap(),
            QueuePlace::LockedIn
        );
    }
}
