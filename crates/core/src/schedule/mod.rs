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
//! - `event`: what can happen; `effects`: what follows from it
//! - [`notice`]: what is said of it; [`told`]: what of that is remembered of a job
//! - `machine`: one event after the other, and how the table is applied
//! - `world`: for tests, what is around the schedule; `model`: every order of events in small worlds; `scenarios`, `turns`:
//!   single histories

mod effects;
mod event;
pub mod identity;
pub mod job;
#[cfg(test)]
mod lost_burst_buffers;
mod machine;
#[cfg(test)]
mod model;
pub mod nodes;
pub mod notice;
pub mod policy;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod scenarios;
pub mod states;
pub mod told;
mod transition;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod turns;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod world;

use serde::{Deserialize, Serialize};

pub use crate::allocation::Purpose;
pub use effects::{Action, Change, Effects, Refused, Unasked, UsageRecord};
pub use event::{BurstBufferCall, Event, Fault, FoundRamDisk, ObservedJob, Outcome};
pub use identity::{Identities, Identity};
pub use job::{Allocation, InventorySummary, Job, Work, WorkOrder, real_path};
pub use machine::{PlacesLost, Schedule};
pub use nodes::{Node, NodeState, Nodes};
pub use notice::Notice;
pub use policy::{Limits, LockIn, Sharing, Site};
pub use states::{BurstBuffer, Hold, JobState, Prolog, QueuePlace, RsaState};
pub use told::Told;

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
