//! The two directories at the top of a copy.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{self, Mode, Stat};
use rustix::io::Errno;

use super::directories::{Entered, open_listing};
use super::{CopyItem, Engine, READING_SOURCE};
use crate::dir::{DirNode, Kind, OPEN_DIRECTORY};
use crate::error::{During, Fault};
use crate::merge::{DirectoryAction, Side};
use crate::progress::Event;

impl Engine<'_> {
    /// The root when the target directory exists.
    pub(super) fn open_root(&self, source: OwnedFd, target: OwnedFd) -> Result<Arc<DirNode>, Fault> {
        let source_stat = fs::fstat(&source).during(READING_SOURCE)?;
        self.lock_root(&target)?;
        let target_stat = fs::fstat(&target).during("reading the target")?;
        let action = match (&self.single, self.policy) {
            (Some(_), _) => DirectoryAction::Merge { delete: false, attributes: false },
            (None, Some(policy)) => policy.directory(b"", source.as_fd(), Some(&target_stat)),
            (None, None) => self.default_directory_action(),
        };
        // Afterwards, because the policy looks at its mode.
        let restore_source = self.open_up_root(Side::Source, &source, &source_stat)?;
        let restore_mode = self.open_up_root(Side::Target, &target, &target_stat)?;
        let entered = Entered {
            target: Some(target),
            kind: Kind::Existing,
            partial: None,
            restore_mode,
            restore_source,
        };
        self.node(None, Default::default(), source, source_stat, entered, action)
    }

    /// Makes a root that shuts out its owner accessible. Returns the mode that it is to get back.
    fn open_up_root(&self, side: Side, root: &OwnedFd, stat: &Stat) -> Result<Option<u32>, Fault> {
        let single = self.single.is_some() || self.options.dry_run;
        let is_ours = side == Side::Target || self.policy.is_some_and(|policy| policy.may_open_up());
        if single || !is_ours || !self.is_closed_own(stat) {
            return Ok(None);
        }
        if let Some(policy) = self.policy {
            policy.opening_up(side, b"", stat);
        }
        fs::fchmod(root, Mode::from_raw_mode(stat.st_mode & 0o7777 | 0o700)).during("opening it")?;
        Ok(Some(stat.st_mode & 0o7777))
    }

    /// The root when the target directory is new.
    pub(super) fn make_root(
        &mut self,
        source: OwnedFd,
        parent: OwnedFd,
        name: CString,
    ) -> Result<Arc<DirNode>, Fault> {
        let source_stat = fs::fstat(&source).during(READING_SOURCE)?;
        let entered = if self.options.dry_run {
            (self.monitor.event)(Event::Would("make directory", b""));
            Entered::imagined()
        } else {
            self.make_directory(parent.as_fd(), &name, true)?
        };
        if let Some(target) = &entered.target {
            self.lock_root(target)?;
        }
        self.root_parent = Some(parent);
        let action = match self.policy {
            Some(policy) => policy.directory(b"", source.as_fd(), None),
            None => self.default_directory_action(),
        };
        self.node(None, (name.clone(), name), source, source_stat, entered, action)
    }

    /// Keeps a second copy out of the same target. Filesystems without locks are used without.
    fn lock_root(&self, target: &OwnedFd) -> Result<(), Fault> {
        if self.options.dry_run || self.single.is_some() || self.options.tag.is_some() {
            return Ok(());
        }
        match fs::flock(target, fs::FlockOperation::NonBlockingLockExclusive) {
            Err(error @ Errno::WOULDBLOCK) => Err(Fault::new("locking the target", error)),
            _ => Ok(()),
        }
    }

    pub(super) fn begin(&self, root: &Arc<DirNode>) {
        match self.listing(root) {
            Ok(listing) => self.stack.push([CopyItem::Read { node: root.clone(), listing }]),
            Err(fault) => {
                self.failed(Vec::new(), fault);
                self.finished_one(root);
            }
        }
    }

    /// A descriptor to read the root's entries from: with an offset of its own, because the caller's descriptor may
    /// have been read from before.
    fn listing(&self, root: &Arc<DirNode>) -> Result<OwnedFd, Fault> {
        let fds = root.fds(&self.budget)?;
        match fs::openat(&fds.source, c".", OPEN_DIRECTORY, Mode::empty()) {
            // A directory of a mode that shuts out its owner; it is open already.
            Err(Errno::ACCESS) => {
                let listing = open_listing(&fds.source)?;
                fs::seek(&listing, fs::SeekFrom::Start(0)).during("listing it")?;
                Ok(listing)
            }
            other => other.during("listing it"),
        }
    }
}
