//! What an accelerator would do for a site: a discrete-event simulation of its jobs, without and with RSA nodes.
//!
//! The decisions are those of the daemon, by the same code ([`ondeck_core::schedule`]); what is simulated is the world around
//! it. Nothing here reads a clock, writes a file or draws a number that does not come from a seed.
//!
//! # Layout
//!
//! - [`trace`]: the jobs, as a log has them; [`remedy`]: what a log lacks, made up on request
//! - [`io`]: how much each job reads and writes; [`program`]: the steps in which it does so
//! - [`machine`]: what is simulated, and how long each step takes
//! - [`disk`]: the disk filesystem that all share
//! - [`workload_manager`]: who starts when; [`waiting`]: its queue
//! - [`accelerator`]: the schedule, driven as the daemon drives it
//! - [`simulation`]: one event after the other; [`record`]: what came of it; [`recorder`]: what a picture of it shows
//! - [`random`]: numbers that are the same on every machine

pub mod accelerator;
pub mod disk;
pub mod io;
pub mod machine;
pub mod picture;
pub mod program;
pub mod random;
pub mod record;
pub mod recorder;
pub mod remedy;
pub mod simulation;
pub mod study;
pub mod summary;
pub mod trace;
pub mod waiting;
pub mod workload_manager;
