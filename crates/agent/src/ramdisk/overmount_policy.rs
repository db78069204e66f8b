//! Which directories a site lets a RAM disk be mounted over.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use ondeck_api::config::AgentConfig;
use ondeck_api::wire::Overmount;
use ondeck_core::Layout;
use ondeck_ramdisk::EngineError;
use ondeck_transfer::credentials::{self, User};
use rustix::fs::Access;

use crate::started;

/// Which directories a site lets a RAM disk be mounted over.
#[derive(Clone, Debug, Default)]
pub struct OvermountPolicy {
    prefixes: Vec<PathBuf>,
    writable: bool,
    readable: bool,
    /// Where it is noted which jobs have begun on disk.
    started: PathBuf,
}

impl OvermountPolicy {
    /// As the configuration says.
    pub fn new(config: &AgentConfig) -> OvermountPolicy {
        OvermountPolicy {
            prefixes: config.mount_prefixes.clone(),
            writable: config.cover_writable,
            readable: config.cover_readable,
            started: started::directory(config),
        }
    }

    /// The directories below which a job's data may lie.
    pub fn prefixes(&self) -> &[PathBuf] {
        &self.prefixes
    }

    /// Refuses to cover anything for a job that has begun on disk on this node.
    pub(super) fn allows_job(&self, layout: &Layout) -> Result<(), EngineError> {
        match started::job_of(layout) {
            Some(job) if started::is_noted(&self.started, job) => Err(EngineError::Refused(format!(
                "job {job} has begun on this node without its RAM disk, and must not see it come"
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses a directory that is not below a prefix.
    pub(super) fn allows_place(&self, overmount: &Overmount, real: &Path) -> Result<(), EngineError> {
        if self.prefixes.is_empty() {
            return Err(EngineError::Refused(format!(
                "{} can't be covered: this node's configuration allows nothing to be; see mount_prefixes in its part \
                 [agent]",
                overmount.path.display()
            )));
        }
        let below = |prefix: &PathBuf| {
            // The administrator may write a prefix with a symlink in it.
            let prefix = prefix.canonicalize().unwrap_or_else(|_| prefix.clone());
            real != prefix && real.starts_with(&prefix) && prefix != Path::new("/")
        };
        if self.prefixes.iter().any(below) {
            return Ok(());
        }
        let allowed: Vec<String> = self.prefixes.iter().map(|prefix| prefix.display().to_string()).collect();
        Err(EngineError::Refused(format!(
            "{} can't be covered: it is not below {} (mount_prefixes in this node's configuration)",
            name_of(overmount, real),
            allowed.join(" or ")
        )))
    }

    /// Refuses a directory that is not the user's, unless the site allows it. Called with the user's identity.
    pub(super) fn allows_directory(
        &self,
        overmount: &Overmount,
        real: &Path,
        directory: &OwnedFd,
        user: &User,
    ) -> Result<(), EngineError> {
        let io = |source: std::io::Error| EngineError::io("look at", real, source);
        let owner = rustix::fs::fstat(directory).map_err(|error| io(error.into()))?.st_uid;
        if owner == user.uid {
            return Ok(());
        }
        let may = |access| credentials::may(directory.as_fd(), access).map_err(io);
        let search = Access::EXEC_OK;
        if self.writable && may(Access::WRITE_OK | search)? {
            return Ok(());
        }
        if self.readable && overmount.read_only && may(Access::READ_OK | search)? {
            return Ok(());
        }
        Err(EngineError::Refused(format!(
            "{} can't be covered: it belongs to user {owner} and not to user {} (cover_writable and cover_readable in \
             this node's configuration can allow more)",
            name_of(overmount, real),
            user.uid
        )))
    }
}

/// A directory as the job knows it, and where it really is if that is elsewhere.
pub(super) fn name_of(overmount: &Overmount, real: &Path) -> String {
    if overmount.path == real {
        real.display().to_string()
    } else {
        format!("{} (which is {})", overmount.path.display(), real.display())
    }
}
