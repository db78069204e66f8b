//! The jobs that have begun on this node without their RAM disk, or are about to: nothing is shown to them any more.
//!
//! Their Prolog notes it, whether or not the agent answers; an agent that was slow sees it before it shows anything. The
//! notes are beside the agent's socket, as both know that place, and are gone when the node has been started again.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ondeck_api::config::AgentConfig;
use ondeck_core::{Incarnation, JobId, Layout};

/// Where they are noted.
pub fn directory(config: &AgentConfig) -> PathBuf {
    config.socket.with_file_name("started")
}

fn path(directory: &Path, job: JobId) -> PathBuf {
    directory.join(job.to_string())
}

/// Notes that a job begins without its RAM disk.
///
/// # Errors
/// The kernel's.
pub fn note(directory: &Path, job: JobId) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    std::fs::write(path(directory, job), b"")
}

/// Whether that is noted. What can't be looked at counts as noted.
pub fn is_noted(directory: &Path, job: JobId) -> bool {
    path(directory, job).try_exists().unwrap_or(true)
}

/// Forgets it: the job has ended here, begins anew, or has its RAM disk after all.
///
/// # Errors
/// The kernel's.
pub fn forget(directory: &Path, job: JobId) -> std::io::Result<()> {
    match std::fs::remove_file(path(directory, job)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The number of the job that a RAM disk is of; nothing for one that was built by hand.
pub fn job_of(layout: &Layout) -> Option<JobId> {
    match &layout.job {
        Some(tag) => Some(tag.job.job),
        // The former version wrote it into the name only.
        None => Incarnation::of_ramdisk(&layout.id.name).map(|life| life.job),
    }
}
