//! How a RAM disk is on a node.

use std::path::PathBuf;

use ondeck_core::{Bytes, Layout, NodeName, RamDiskId};
use ondeck_ramdisk::View;
use serde::{Deserialize, Serialize};

use super::step::Overmount;

/// What a node has of a RAM disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Presence {
    /// Nothing: it was never there, or was removed.
    Nothing,
    /// Something that is removed when its lease is over.
    Unfinished,
    /// All that it shall have.
    All,
}

/// How a RAM disk is on one node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LocalReport {
    /// The node that answers.
    pub node: NodeName,
    /// The RAM disk.
    pub layout: Layout,
    /// Whether all steps of its creation were done.
    pub complete: bool,
    /// Whether this node is one of its servers.
    pub server: bool,
    /// Whether it may hold results: then it is destroyed only once these are released.
    #[serde(default)]
    pub guarded: bool,
    /// Where it is shown here.
    pub shown: Vec<PathBuf>,
    /// The directories that it is mounted over here.
    #[serde(default, rename = "covers")]
    pub overmounts: Vec<Overmount>,
    /// Its processes here.
    pub processes: Vec<ProcessReport>,
    /// What is wrong here, in words; empty if nothing is.
    pub faults: Vec<String>,
    /// Bytes of data on this server's device.
    pub used: Option<Bytes>,
    /// What the client here sees, if there is one.
    pub view: Option<View>,
    /// The filesystem as the client here sees it: size and free bytes.
    pub filesystem: Option<(Bytes, Bytes)>,
    /// Where it is still shown though its client here has ended for good: every access to these paths fails.
    #[serde(default)]
    pub dead_mounts: Vec<PathBuf>,
    /// Whether less than a hundredth of it, or of this server's part, was left at some moment: programs may have got ENOSPC.
    #[serde(default)]
    pub ran_full: bool,
}

/// A process of a RAM disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessReport {
    /// What it is.
    pub role: String,
    /// Its process id.
    pub pid: i32,
    /// Whether it runs.
    pub running: bool,
    /// Its resident memory.
    pub memory: Bytes,
}

/// The RAM disk at a path, for whoever is about to copy from there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PathView {
    /// The RAM disk; nothing if the path is on none.
    pub ramdisk: Option<RamDiskId>,
    /// What is wrong with it, in words; empty if it is whole.
    pub faults: Vec<String>,
    /// Two equal ones mean that it was whole all the time in between.
    pub witness: String,
}

/// Whether a RAM disk is whole on one node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Witness {
    /// What is wrong with it, in words; empty if it is whole.
    pub faults: Vec<String>,
    /// Two equal ones mean that it was whole all the time in between.
    pub witness: String,
}

/// How a fault of [`LocalReport`] begins that tells of a directory that is not covered any more.
pub const NOT_MOUNTED: &str = "it is not mounted over ";
