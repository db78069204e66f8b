//! What the files and directories of a run are called: in its own directory, and in the RAM disk beside the
//! [`Slot`](ondeck_staging::Slot)s.

use std::path::{Path, PathBuf};

pub fn work_name(index: usize) -> String {
    format!("work{index}")
}

/// Where an overlaid directory on disk can be reached although it is mounted over, also when a parent of it is.
pub fn anchor_name(index: usize) -> String {
    format!("disk{index}")
}

/// The manifest of the stage-in of a directory that is also an output.
pub fn staged_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("in{index}.manifest"))
}

/// The manifest of an output's stage-out.
pub fn manifest_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("out{index}.manifest"))
}

/// Which caches a run has, for those who find it without a keeper.
pub fn caches_path(dir: &Path) -> PathBuf {
    dir.join("caches.record")
}

pub fn baseline_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("base{index}.baseline"))
}

/// What is known of an output's way home.
pub fn journal_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("out{index}.journal"))
}
