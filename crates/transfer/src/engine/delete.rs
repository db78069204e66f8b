//! Removing what only the target has.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{self, AtFlags, Mode, RawDir, Stat};
use rustix::io::Errno;

use super::Engine;
use crate::attributes::{self, is_directory};
use crate::dir::{OPEN_DIRECTORY, join};
use crate::error::{During, Fault};
use crate::merge::Side;
use crate::progress::Event;

/// Bytes of directory entries that are read at a time.
const LISTING: usize = 32 << 10;
/// The same inside a directory that is being removed, where every level of the tree holds such a buffer.
const LISTING_BELOW: usize = 4 << 10;
/// Names that are removed after one question to the gate.
const AT_ONCE: usize = 256;

impl Engine<'_> {
    /// Removes every entry of `target` whose name `source` does not have. In a directory of `ours`, which nobody else has
    /// seen yet, the policy is not asked.
    pub(super) fn delete_extraneous(
        &self,
        path: &[u8],
        source: BorrowedFd<'_>,
        target: BorrowedFd<'_>,
        ours: bool,
    ) -> Result<(), Fault> {
        // Its own open file, so that the offset belongs to this loop alone.
        let listing = fs::openat(target, c".", OPEN_DIRECTORY, Mode::empty()).during("listing the target")?;
        let mut buffer = [MaybeUninit::uninit(); LISTING];
        let mut entries = RawDir::new(&listing, &mut buffer);
        let mut extraneous = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry.during("listing the target")?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..")
                || self.options.exclude.matches_listed(path, target, &entry)
            {
                continue;
            }
            match fs::statat(source, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => {}
                Err(Errno::NOENT) => extraneous.push(name.to_owned()),
                Err(error) => return Err(Fault::new("comparing with the source", error)),
            }
            if extraneous.len() == AT_ONCE {
                self.remove_all(path, target, &mut extraneous, ours)?;
            }
        }
        self.remove_all(path, target, &mut extraneous, ours)
    }

    /// Removes what the source did not have, if the source was whole when it was asked.
    fn remove_all(
        &self,
        path: &[u8],
        target: BorrowedFd<'_>,
        names: &mut Vec<CString>,
        ours: bool,
    ) -> Result<(), Fault> {
        if let (Some(gate), false) = (&self.options.gate, names.is_empty()) {
            // A lost server's files look as if they had been removed.
            gate.check().map_err(|why| Fault::message("deleting what the source does not have", &why))?;
        }
        for name in names.drain(..) {
            if let Err(fault) = self.remove(path, target, &name, ours) {
                self.failed(join(path, name.to_bytes()), fault);
            }
        }
        Ok(())
    }

    /// Removes one entry of the target with all it holds, as far as the policy allows, or all of it if it is `ours`.
    /// `Ok(false)`: something stays.
    ///
    /// The depth of this recursion is the depth of the target's own tree; beyond `DEEPEST` it refuses, which is
    /// kinder than a stack overflow.
    pub(super) fn remove(
        &self,
        parent: &[u8],
        dir: BorrowedFd<'_>,
        name: &CStr,
        ours: bool,
    ) -> Result<bool, Fault> {
        self.remove_at_depth(parent, dir, name, ours, 0)
    }

    fn remove_at_depth(
        &self,
        parent: &[u8],
        dir: BorrowedFd<'_>,
        name: &CStr,
        ours: bool,
        depth: usize,
    ) -> Result<bool, Fault> {
        const ACTION: &str = "deleting it";
        let path = join(parent, name.to_bytes());
        let stat = match fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(true),
            Err(error) => return Err(Fault::new(ACTION, error)),
        };
        if self.options.dry_run {
            (self.monitor.event)(Event::Would("delete", &path));
            return Ok(true);
        }
        if !self.is_closed_own(&stat) {
            return self.remove_open(dir, name, &path, &stat, ours, depth);
        }
        if let Some(policy) = self.policy {
            policy.opening_up(Side::Target, &path, &stat);
        }
        attributes::chmod_at(dir, name, &stat, stat.st_mode & 0o7777 | 0o700).during(ACTION)?;
        let removed = self.remove_open(dir, name, &path, &stat, ours, depth);
        if !matches!(removed, Ok(true)) {
            // It stays, as it was.
            match attributes::chmod_at(dir, name, &stat, stat.st_mode & 0o7777) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return removed.and(Err(Fault::new("giving it its mode back", error))),
            }
        }
        removed
    }

    /// The same of an entry that is accessible.
    fn remove_open(
        &self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        path: &[u8],
        stat: &Stat,
        ours: bool,
        depth: usize,
    ) -> Result<bool, Fault> {
        const ACTION: &str = "deleting it";
        /// A level needs a descriptor, 4 KiB of heap and about 1 KiB of a worker's stack.
        const DEEPEST: usize = 4096;
        let mut emptied = true;
        if is_directory(stat) {
            if depth == DEEPEST {
                return Err(Fault::message(ACTION, "the tree is nested too deeply; remove it with rm -r"));
            }
            let inner = fs::openat(dir, name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
            if let (Some(policy), false) = (self.policy, ours) {
                policy.emptying(path, &fs::fstat(&inner).during(ACTION)?);
            }
            let mut buffer = Box::new_uninit_slice(LISTING_BELOW);
            let mut entries = RawDir::new(&inner, &mut buffer);
            while let Some(entry) = entries.next() {
                let entry = entry.during(ACTION)?;
                let inner_name = entry.file_name();
                if matches!(inner_name.to_bytes(), b"." | b"..") {
                    continue;
                }
                if self.options.exclude.matches_listed(path, &inner, &entry) {
                    emptied = false;
                    continue;
                }
                emptied &= self.remove_at_depth(path, inner.as_fd(), inner_name, ours, depth + 1)?;
            }
        }
        let allowed = ours || self.policy.is_none_or(|policy| policy.may_delete(path, stat));
        if !allowed || !emptied {
            // A directory stays because of what it holds, and that was told already.
            if !allowed && !is_directory(stat) {
                (self.monitor.event)(Event::Kept(path));
            }
            return Ok(false);
        }
        let flags = if is_directory(stat) { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match fs::unlinkat(dir, name, flags) {
            Ok(()) | Err(Errno::NOENT) => {
                (self.monitor.event)(Event::Deleted(path));
                self.counts.deleted();
                Ok(true)
            }
            // Someone put a file into it meanwhile.
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Err(error) => Err(Fault::new(ACTION, error)),
        }
    }
}
