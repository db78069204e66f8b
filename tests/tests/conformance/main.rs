//! What every engine promises, each promise a test on a small cluster of namespaces: real agents, real servers, real
//! mounts. As root; without it the tests say that they were skipped.
//!
//! - [`site`]: the cluster, and the list of engines
//! - [`data`]: what programs see: POSIX, bytes, other clients' changes
//! - [`isolation`]: who gets at what: fencing, nothing of an earlier user
//! - [`capacity`]: what is promised can be filled, and nothing else is promised
//! - [`undo`]: building that fails or is interrupted leaves nothing
//! - [`covers`]: a RAM disk over the directories of a job
//! - [`doors`]: what users and other nodes try with a TCP port
//! - [`destroy`]: destroying works in whatever state things are; cycles leave nothing
//! - [`results`]: what may hold results is destroyed by nothing; one scheduler is obeyed
//! - [`health`]: a lost server is seen
//! - [`guard`]: copies from what is not whole; what others do
//! - [`layouts`]: how files are striped
//! - [`tasks`]: staging and users' scripts, as the user
//! - [`orders`]: what can't be built is refused, what was ordered is what is built

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../shared/binary.rs"]
mod binary;
mod capacity;
mod covers;
mod data;
mod destroy;
mod doors;
mod guard;
mod health;
mod isolation;
mod layouts;
mod orders;
mod results;
mod site;
mod tasks;
mod undo;
