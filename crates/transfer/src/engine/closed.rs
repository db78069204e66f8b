//! Files and directories whose mode shuts out their own owner: opened for as long as it takes.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::{At, Engine, RESTORING};
use crate::attributes::{self, is_directory};
use crate::dir::OPEN_DIRECTORY;
use crate::error::{During, Fault};
use crate::merge::Side;

impl Engine<'_> {
    /// Whether this is a directory of ours that we have shut ourselves out of; root never is.
    pub(super) fn is_closed_own(&self, stat: &Stat) -> bool {
        is_directory(stat)
            && stat.st_mode & 0o700 != 0o700
            && !self.privilege.root
            && rustix::process::geteuid().as_raw() == stat.st_uid
    }

    /// Opens a file of the source. In a run the source is a RAM disk whose entries are the caller's own: one whose mode
    /// shuts out even its owner is opened for a moment, in which its extended attributes are read too, and gets its mode
    /// back.
    pub(super) fn open_in_source(
        &self,
        at: &At<'_>,
        flags: OFlags,
    ) -> Result<(OwnedFd, Option<Vec<attributes::Xattr>>), Fault> {
        const ACTION: &str = "opening it";
        let (dir, name) = (at.fds.source.as_fd(), at.name);
        let policy = match (fs::openat(dir, name, flags, Mode::empty()), self.policy) {
            (Err(Errno::ACCESS), Some(policy)) if !self.privilege.root => policy,
            (opened, _) => return Ok((opened.during(ACTION)?, None)),
        };
        let stat = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).during(ACTION)?;
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(Fault::new(ACTION, Errno::ACCESS));
        }
        policy.opening_up(Side::Source, &at.path(), &stat);
        attributes::chmod_at(dir, name, &stat, stat.st_mode & 0o7777 | 0o700).during(ACTION)?;
        let opened = fs::openat(dir, name, flags, Mode::empty()).during(ACTION).and_then(|file| {
            let xattrs = attributes::read_xattrs(file.as_fd(), self.policy)?;
            Ok((file, Some(xattrs)))
        });
        attributes::chmod_at(dir, name, &stat, stat.st_mode & 0o7777).during(RESTORING)?;
        opened
    }

    /// Whether a file of the source shuts out its owner, and may not be opened now.
    pub(super) fn is_shut(&self, at: &At<'_>) -> Result<bool, Fault> {
        if self.privilege.root || self.policy.is_none_or(|policy| policy.may_open_up()) {
            return Ok(false);
        }
        let stat = fs::statat(&at.fds.source, at.name, AtFlags::SYMLINK_NOFOLLOW)
            .during("reading its attributes")?;
        Ok(stat.st_mode & 0o400 == 0 && rustix::process::geteuid().as_raw() == stat.st_uid)
    }

    /// The same for a directory, which stays open to us until it is complete. `None` if it may not be opened now.
    pub(super) fn open_source_directory(
        &self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        path: &dyn Fn() -> Vec<u8>,
    ) -> Result<Option<(OwnedFd, Stat, Option<u32>)>, Fault> {
        const ACTION: &str = "opening it";
        let mut closed = None;
        if let Some(policy) = self.policy
            && !self.privilege.root
        {
            let stat = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).during(ACTION)?;
            if self.is_closed_own(&stat) {
                if !policy.may_open_up() {
                    return Ok(None);
                }
                policy.opening_up(Side::Source, &path(), &stat);
                attributes::chmod_at(dir, name, &stat, stat.st_mode & 0o7777 | 0o700).during(ACTION)?;
                closed = Some(stat.st_mode);
            }
        }
        let source = fs::openat(dir, name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
        if self.options.leave_others && !attributes::is_searchable(source.as_fd()) {
            // Names alone are no results.
            return Err(Fault::new(ACTION, Errno::ACCESS));
        }
        let mut stat = fs::fstat(&source).during(ACTION)?;
        if let Some(mode) = closed {
            stat.st_mode = mode;
        }
        Ok(Some((source, stat, closed.map(|mode| mode & 0o7777))))
    }
}
