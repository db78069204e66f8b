//! What the schedule says, as data: what happened, why a job waits, what its user should know, why an order is refused.
//!
//! Decisions are made by data, and never by words. Each sentence stands in one place here, and is made where somebody reads
//! it: by whoever drives the schedule, or for what is kept of a job. What others say (work, nodes, people) is quoted as it
//! came.
//!
//! # Layout
//!
//! - [`Notice`]: all that is said, and how the log of the thesis has it
//! - [`life`]: a job and the workload manager; [`waiting`]: why a job waits, or is held
//! - [`placing`]: who gets RSA nodes, and why somebody gets none
//! - [`work`]: work for a job; [`results`]: results that are not on disk yet, or lost
//! - [`nodes`]: RSA nodes; [`refusal`]: orders that make no sense now

pub mod life;
pub mod nodes;
pub mod placing;
pub mod refusal;
pub mod results;
pub mod waiting;
pub mod work;

use std::fmt;
use std::path::PathBuf;

pub use self::life::{Life, Turn, Unshown};
pub use self::nodes::{NodeFailure, NodeNotice};
pub use self::placing::{NoRamDisk, Overdue, Placed, Unfit, Whose};
pub use self::refusal::NotNow;
pub use self::results::{LastInventory, Loss, LostPart, LostParts, NotHome, Results};
pub use self::waiting::{HeldBack, Lack, Waiting};
pub use self::work::{AtWork, Then, TooLong, done};
use super::JobState;
use super::told::Told;
use crate::Incarnation;

/// Something that is said. [`Display`](fmt::Display) is the sentence.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Notice {
    /// The new state says it: no words.
    State,
    /// A job and the workload manager.
    Life(Life),
    /// A job waits.
    Waits(Waiting),
    /// A job of which nothing else is known here is held.
    HeldBack(HeldBack),
    /// RSA nodes are given, or given back.
    Placed(Placed),
    /// A job gets no RAM disk.
    NoRamDisk(NoRamDisk),
    /// Work for a job.
    Work(AtWork),
    /// Results of a job.
    Results(Results),
    /// What happens to an RSA node.
    Node(NodeNotice),
    /// Words from outside, as they came: of work that has ended, of the daemon's own looks.
    Words(String),
}

impl Notice {
    /// How the log of the thesis (its appendix T) has it, of a job that is in a state; nothing for what it did not log.
    /// Failures, which it did not know, are there in our words.
    pub fn thesis(&self, job: Incarnation, state: JobState) -> Option<String> {
        match self {
            Notice::State | Notice::Placed(Placed::Released(_)) | Notice::Results(Results::Home) => None,
            Notice::Life(life) => life.thesis(job, state, &|| self.first_line()),
            Notice::Waits(waiting) => Some(waiting.to_string()),
            Notice::NoRamDisk(none) if none.is_too_small() => Some(placing::too_small(job)),
            Notice::Work(work) => work.thesis(job, &|| self.first_line()),
            Notice::HeldBack(_)
            | Notice::Placed(_)
            | Notice::NoRamDisk(_)
            | Notice::Results(_)
            | Notice::Node(_)
            | Notice::Words(_) => self.first_line(),
        }
    }

    /// A line of a log is one line.
    fn first_line(&self) -> Option<String> {
        let text = self.to_string();
        text.lines().next().filter(|line| !line.is_empty()).map(str::to_owned)
    }

    /// What a job's user has been told with it, as far as something depends on it.
    pub(super) fn told(&self) -> Told {
        match self {
            Notice::NoRamDisk(none) => none.told(),
            Notice::Work(work) => work.told(),
            Notice::Results(results) => results.told(),
            Notice::HeldBack(HeldBack::Places | HeldBack::MustNotWait | HeldBack::InputLost) => Told::Ready,
            Notice::Words(text) if text.is_empty() => Told::Nothing,
            _ => Told::Other,
        }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::State => Ok(()),
            Notice::Life(life) => life.fmt(f),
            Notice::Waits(waiting) => write!(f, "waits: {waiting}"),
            Notice::HeldBack(why) => why.fmt(f),
            Notice::Placed(placed) => placed.fmt(f),
            Notice::NoRamDisk(none) => none.fmt(f),
            Notice::Work(work) => work.fmt(f),
            Notice::Results(results) => results.fmt(f),
            Notice::Node(node) => node.fmt(f),
            Notice::Words(text) => f.write_str(text),
        }
    }
}

macro_rules! notices {
    ($($variant:ident($of:ty)),+ $(,)?) => {$(
        impl From<$of> for Notice {
            fn from(said: $of) -> Notice {
                Notice::$variant(said)
            }
        }
    )+};
}

notices! {
    Life(Life),
    Waits(Waiting),
    HeldBack(HeldBack),
    Placed(Placed),
    NoRamDisk(NoRamDisk),
    Work(AtWork),
    Results(Results),
    Node(NodeNotice),
}

/// The names or paths of a list, for a sentence.
fn list<T: fmt::Display>(all: impl IntoIterator<Item = T>) -> String {
    let all: Vec<String> = all.into_iter().map(|one| one.to_string()).collect();
    all.join(", ")
}

fn paths(all: &[PathBuf]) -> String {
    list(all.iter().map(|path| path.display()))
}
