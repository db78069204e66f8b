//! The daemon beside the workload manager: `ondeck serve`.
//!
//! It decides nothing itself: [`ondeck_core::schedule`] does. It brings events there (from the queue, from hooks, from
//! agents, from people), keeps what follows in the journal, and only then has it done.
//!
//! # Layout
//!
//! - `daemon`: wires the parts, and runs them
//! - `context`: what the parts share, and how they let something happen; they depend on it, and it on none of them
//! - `dispatch`: the middle: one event after the other, kept before anything is done about it
//! - `view`: jobs and nodes as they were last kept, for all who look
//! - [`store`]: the journal's file; `journal`: who writes and reads it; `clock`: the time that the schedule goes by; `upkeep`: what is done as time passes
//! - `reload`: a changed configuration
//! - `queue_snapshot`: the queue as it was last seen; `queue`: looking at the queue, reading scripts; `node_monitor`:
//!   looking at the RSA nodes
//! - `compute`: what is wrong on compute nodes
//! - [`charge`]: whom the agents obey; `adopt`: RAM disks that the journal does not know
//! - `execute`: doing what was decided, by the agents; `orders`: what the workload manager is told
//! - `loads`: how busy the filesystems are that files are striped over; `load_monitor`: reading that
//! - `delays`: what is known of jobs that wait because their filesystem is busy, and what is next; `heavy_jobs`: delaying them
//! - `striping`: what is known of the layouts of jobs' directories on disk; `layouts`: choosing, setting, taking them
//!   back; `layout_history`: what jobs have left there, for the next ones
//! - `inventory`: what each RSA node has of the results, in case that it is lost; saving what the others have
//! - `serve`: the API, and [`openapi`], its description, made of it
//! - [`thesis`]: the log in the form of the thesis; `metrics`: figures for Prometheus

mod adopt;
pub mod charge;
mod clock;
mod compute;
mod context;
mod daemon;
mod delays;
mod dispatch;
mod execute;
#[cfg(test)]
mod fake;
mod heavy_jobs;
mod inventory;
mod journal;
mod layout_history;
mod layouts;
mod load_monitor;
mod loads;
mod metrics;
mod node_monitor;
mod orders;
mod queue;
mod queue_snapshot;
mod reload;
#[cfg(test)]
mod samples;
mod serve;
mod site_file;
pub mod store;
mod striping;
pub mod thesis;
mod upkeep;
mod view;
#[cfg(test)]
mod whole;

pub use daemon::{ServeError, serve};
pub use serve::openapi;
