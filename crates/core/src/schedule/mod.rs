//! What the scheduler decides: one state machine, without I/O, clock or randomness.
//!
//! [`Schedule`] holds every job that has asked for something and every RSA node. Whatever happens comes in as an
//! [`Event`] with the time; out come [`Effects`]: what is to be done, and what is to be noted. Whoever drives it (the
//! daemon, a simulator, the model check) does the one after having kept the other. Work that was begun is reported when
//! it ends, and [`Schedule::resume`] says what to begin again after a crash: all of it may be done twice.
//!
//! - [`states`]: the states, and the table that says what comes next
//! - [`job`], [`nodes`]: what is known of each
//! - [`identity`]: which job a record of the queue is
//! - [`policy`]: what a site decides, and who gets which nodes
//! - [`machine`]: events, and how the table is applied

pub mod identity;
pub mod job;
mod machine;
#[cfg(test)]
mod model;
pub mod nodes;
pub mod policy;
pub mod states;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod turns;

use serde::{Deserialize, Serialize};

pub use identity::{Identities, Identity};
pub use job::{Allocation, Job, Part, Prolog, Purpose, Task, Work, real_path};
pub use machine::{
    Action, Change, Effects, Event, Fault, Found, Outcome, Refused, Schedule, Seen, Unasked, Used,
};
pub use nodes::{Node, NodeState, Nodes};
pub use policy::{Limits, LockIn, Sharing, Site};
pub use states::{JobState, RsaState};

/// A point in time: milliseconds since 1970, as whoever drives the schedule says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// Later by this.
    #[must_use]
    pub fn plus(self, duration: std::time::Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// The time since an earlier point.
    pub fn since(self, earlier: Time) -> std::time::Duration {
        std::time::Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}
