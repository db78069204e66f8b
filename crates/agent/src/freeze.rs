//! Stopping all processes of a job on this node for a moment, so that a RAM disk can be laid over its output.
//!
//! While they are stopped nothing of the job can write, open or rename anything: what it sees afterwards is what it saw
//! before. They are stopped by the kernel's freezer, through the control groups that Slurm keeps a job's steps in: nobody
//! sees it, no call is interrupted. Signals to stop would be seen by parents, and blocked calls would fail with EINTR.
//!
//! - [`groups`]: the control groups of a job's steps
//! - [`holder`]: the process that stops them, and lets them go on whatever becomes of the agent
//! - [`look`]: what a stopped process holds that would be torn from what it sees

pub mod groups;
pub mod holder;
pub mod look;
