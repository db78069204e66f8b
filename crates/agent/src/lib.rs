//! The agent of a node.
//!
//! An agent does what it is told for one RAM disk at a time: a [`step`](ondeck_api::wire::Step) of building it, or taking
//! all of it down. It decides nothing, except to protect what it lends: it promises no byte twice, refuses whoever
//! speaks of an earlier incarnation, obeys one scheduler only, destroys nothing that may hold results before these are
//! released, removes what was never completed, and cuts off a client that no longer sees all of the files. The servers it starts outlive it; an agent that starts again finds them.
//!
//! # Layout
//!
//! - [`server`]: the agent as a whole; `routes`: what it answers, behind the two sockets of [`ondeck_api::server`]
//! - [`authority`]: whom the agent obeys
//! - [`node`]: what the agent knows of its node and its RAM disks; start-up after a crash
//! - [`ramdisk`]: one RAM disk on this node: the steps up, the way down, its report
//!   - `ramdisk::overmount`: showing it over the directories of a job, and taking it away
//! - `unmount` and `hang`: mounts and paths that may hang, be in use or be out of root's reach
//! - [`capacity`]: what can be promised
//! - [`record`]: what is kept of a RAM disk on disk
//! - [`task`]: staging and users' scripts, in processes of their own
//! - `striping`: what is kept of the layouts of jobs' directories
//! - [`observer`]: who writes the files of jobs, where that is watched
//! - [`hooks`]: what Slurm's hooks on this node have noted of themselves; `slurm_conf`: what they have read of Slurm's
//! - [`freeze`]: stopping a job's processes for the moment in which its output is covered
//! - [`started`]: the jobs that have begun on this node without their RAM disk
//! - [`watch`]: what the agent does unasked
//! - `story`: what ties the lines of the log together

pub mod authority;
pub mod capacity;
mod doubt;
pub mod freeze;
mod hang;
pub mod hooks;
pub mod node;
pub mod observer;
pub mod ramdisk;
pub mod record;
mod routes;
pub mod server;
mod slurm_conf;
pub mod started;
mod story;
mod striping;
pub mod task;
mod unmount;
pub mod watch;
