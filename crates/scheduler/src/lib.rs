//! The daemon beside the workload manager: `ondeck serve`.
//!
//! It decides nothing itself: [`ondeck_core::schedule`] does. It brings events there (from the queue, from hooks, from
//! agents, from people), keeps what follows in the journal, and only then has it done.
//!
//! # Layout
//!
//! - [`daemon`]: the middle: one event after the other, kept before anything is done about it
//! - [`store`]: the journal; `clock`: the time that the schedule goes by
//! - `queue`: looking at the queue, reading scripts; `fleet`: looking at the RSA nodes
//! - `compute`: what is wrong on compute nodes
//! - [`charge`]: whom the agents obey; `adopt`: RAM disks that the journal does not know
//! - `execute`: doing what was decided
//! - `late`: laying a RAM disk over the output of a job that runs
//! - `parts`: what each RSA node has of the results, in case that it is lost; saving what the others have
//! - `serve`: the API, and [`openapi`], its description
//! - [`thesis`]: the log in the form of the thesis; `metrics`: figures for Prometheus

mod adopt;
pub mod charge;
mod clock;
mod compute;
pub mod daemon;
mod execute;
mod fleet;
mod late;
mod metrics;
pub mod openapi;
mod parts;
mod queue;
mod serve;
pub mod store;
pub mod thesis;

pub use daemon::{ServeError, serve};
