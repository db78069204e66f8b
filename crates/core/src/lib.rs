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
//! - [`striping`]: what it asks of the layouts of its directories
//! - [`fit`]: does it fit into the RAM that is free, and when must a job end so that its results get out
//! - [`names`]: the names of nodes and RAM disks, and their epochs
//! - [`job_id`]: which job, and which of its lives
//! - [`allocation`]: what a RAM disk is made of: servers, equal shares
//! - [`queue`]: what a workload manager shows of its queue
//! - [`schedule`]: what the scheduler decides: states, placement, policies, as one pure state machine
//! - [`text`]: texts of others, fit for a terminal and a log
//! - [`timeline`]: who had which nodes, when, and for what
//! - [`exit`]: the exit codes of every command, and what each promises

pub mod allocation;
pub mod duration;
pub mod exit;
pub mod fit;
pub mod job_id;
pub mod names;
pub mod queue;
pub mod request;
pub mod schedule;
pub mod size;
pub mod striping;
pub mod text;
pub mod timeline;

pub use allocation::{Layout, Owner, Server};
pub use job_id::{Incarnation, JobId, JobSelector};
pub use names::{Epoch, NodeName, RamDiskId, RamDiskName};
pub use queue::{QueuedJob, Standing};
pub use request::{Contradiction, EngineKind, IoIntensity, PackFormat, Request, WaitPolicy};
pub use size::{Bytes, Rate};
pub use striping::{StripingChoice, StripingDirectory, StripingRequest};
