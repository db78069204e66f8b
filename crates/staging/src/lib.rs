//! A job's data: how it comes into a RAM disk, and how its results come back to the directories on disk.
//!
//! `ondeck run` and the tasks of an agent are two callers of it. What both have in common is here: what they promise about
//! a job's files is promised once.
//!
//! # Layout
//!
//! - [`merge_back`]: the merge of results into the directories on disk, without losing what others wrote there
//! - [`task`]: the tasks of an agent: filling, catching up and bringing home as the user, in processes of their own
//! - [`layout`]: how the files of a directory are striped
//! - [`Slot`]: where one of the directories is in the RAM disk
//! - [`environment`]: what users' scripts find in theirs
//! - `mount_point`: places in a copy for the mounts of others

pub mod environment;
pub mod layout;
pub mod merge_back;
mod mount_point;
mod slot;
pub mod task;

pub use mount_point::make_mount_point;
pub use slot::Slot;
