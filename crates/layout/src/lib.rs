//! File layouts: over how many disks a file of a parallel filesystem is spread, and which layout a job's files should have.
//!
//! A parallel filesystem cuts a file into *stripes* and deals them out to its *storage targets* (Lustre's OSTs, Ceph's OSDs,
//! BeeGFS's targets), one after the other. One stripe at a time is served by one target; so the *stripe count* decides how
//! many of them work for a file. A layout belongs to a directory, and each new file takes it from there; it can't be changed
//! later without writing the file again. Lustre's *progressive* layouts (PFL) have several components, each for a range of
//! the file, so that a small file stays on one target and a large one gets many.
//!
//! Nothing here touches a filesystem: this crate decides, renders and reads texts.
//!
//! # Layout
//!
//! - [`model`]: [`Layout`] and its components, and what every layout must keep
//! - [`lfs`]: Lustre: the options of `lfs setstripe`, and what `lfs getstripe` shows
//! - [`ceph`]: CephFS: the extended attribute `ceph.dir.layout`
//! - [`beegfs`]: BeeGFS: the options and the output of `beegfs-ctl` (7) and `beegfs entry` (8)
//! - [`site`]: what a site's filesystems and nodes can do
//! - [`rules`]: how a layout follows from a job, as data
//! - [`census`]: what the files of an earlier run say
//! - [`watched`]: who wrote these files, where nodes have watched
//! - [`load`]: how busy the targets are
//! - [`pattern`]: how a job's processes use files, in the words of the rules
//! - [`classify`]: how a run has used its files, or that it can't be told
//! - [`history`]: what earlier runs of a program say of the next one
//! - [`heavy`]: whether a job uses a filesystem so much that it is better delayed while that is busy
//! - [`programs`]: what a job's script runs, and how programs of some names use files
//! - [`advice`]: the layout for a job, why, and the bandwidth to expect
//! - [`job`]: the layout of one of a job's directories: from its line, its history, its program's name, or by the rules

pub mod advice;
pub mod beegfs;
pub mod census;
pub mod ceph;
pub mod classify;
pub mod heavy;
pub mod history;
pub mod job;
pub mod lfs;
pub mod load;
pub mod model;
pub mod pattern;
pub mod programs;
pub mod rules;
mod shell;
pub mod site;
pub mod watched;

pub use advice::{Advice, Pattern, Place, Workload};
pub use load::Load;
pub use model::{Component, Layout, LayoutError, Placement, PoolName, StripeCount};
pub use programs::Programs;
pub use rules::Rules;
pub use site::{Filesystem, Nodes, Site, Tool};
