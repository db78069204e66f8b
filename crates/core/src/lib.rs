//! The domain of Ondeck, pure: sizes, requests and the decisions that follow from them.
//!
//! Nothing here does I/O, reads a clock or draws a random number, so every decision can be tested with
//! plain values and driven by the command line, the daemon and the simulator alike.
//!
//! # Layout
//!
//! - [`size`]: [`Bytes`] and [`Rate`], as people write them and as the code counts them
//! - [`duration`]: durations as people write them
//! - [`request`]: what a job asks for, whether it came from `#RSA_` lines or from options
//! - [`fit`]: does it fit into the RAM that is free, and when must a job end so that its results get out
//! - [`allocation`]: what a RAM disk is made of: names, epochs, servers, equal shares
//! - [`queue`]: what a workload manager shows of its queue
//! - [`schedule`]: what the scheduler decides: states, placement, policies, as one pure state machine
//! - [`text`]: texts of others, fit for a terminal and a log
//! - [`exit`]: the exit codes of every command, and what each promises

pub mod allocation;
pub mod duration;
pub mod exit;
pub mod fit;
pub mod queue;
pub mod request;
pub mod schedule;
pub mod size;
pub mod text;

pub use allocation::{Epoch, Layout, NodeName, Owner, RamDiskId, RamDiskName, Server};
pub use queue::{Incarnation, JobId, JobSelector, QueuedJob, Standing};
pub use request::{Contradiction, EngineKind, PackFormat, Request, WaitPolicy};
pub use size::{Bytes, Rate};
