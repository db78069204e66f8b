//! Where an entry goes: whether it is copied, under which name, what that name may replace, and what is noted of it.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{self, AtFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::{At, Engine, Worker, stat_if_there};
use crate::attributes::{self, is_directory};
use crate::checksum::Digest;
use crate::dir::{self, DirNode, Kind, tagged_name};
use crate::error::{During, Fault};
use crate::manifest::ManifestEntry;
use crate::merge::{EntryAction, EntryContext};
use crate::progress::Event;

/// Under which name an entry appears.
#[derive(Clone)]
pub(super) struct Placement {
    pub name: CString,
    /// Not its own name, because the target's own entry is kept.
    pub beside: bool,
    /// What it may replace.
    pub over: Over,
}

/// What an entry that is given its name may replace. Copying takes time, in which others may write to the target.
#[derive(Clone, Copy, Debug)]
pub(super) enum Over {
    /// Whatever is there.
    Anything,
    /// What was there when the policy was asked.
    This(Version),
    /// There was nothing.
    Nothing,
}

/// By what a changed entry is told from the one that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    inode: u64,
    size: i64,
    written: (i64, u64),
    /// Not for what has several names: giving one of them away changes it for all.
    changed: Option<(i64, u64)>,
}

impl Version {
    fn of(stat: &Stat) -> Version {
        Version {
            inode: stat.st_ino,
            size: stat.st_size,
            written: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_nlink == 1).then_some((stat.st_ctime, stat.st_ctime_nsec)),
        }
    }
}

impl Engine<'_> {
    /// What the target has under an entry's name; nothing can be there in a directory that we just made.
    pub(super) fn found_in_target(&self, at: &At<'_>) -> Result<Option<Stat>, Fault> {
        match (&at.fds.target, at.node.kind) {
            (Some(target), Kind::Existing | Kind::Resumed) => {
                stat_if_there(target.as_fd(), self.target_name(at.name))
            }
            _ => Ok(None),
        }
    }

    pub(super) fn target_name<'n>(&'n self, name: &'n CStr) -> &'n CStr {
        self.single.as_deref().unwrap_or(name)
    }

    /// The temporary name of an entry.
    pub(super) fn partial_name(&self, name: &CStr) -> CString {
        tagged_name(name, self.options.tag.as_deref())
    }

    /// The name under which an entry is made: a temporary one where others could see it unfinished.
    pub(super) fn working_name(&self, node: &DirNode, placement: &Placement) -> CString {
        if node.kind == Kind::Existing { self.partial_name(&placement.name) } else { placement.name.clone() }
    }

    /// Decides whether and under which name an entry is copied; `None`: it is done with.
    pub(super) fn placement(
        &self,
        at: &At<'_>,
        stat: &Stat,
        found: Option<&Stat>,
    ) -> Result<Option<Placement>, Fault> {
        let name = self.target_name(at.name).to_owned();
        let action = match self.policy {
            None => EntryAction::Copy,
            Some(policy) => policy.entry(&EntryContext {
                parent: at.parent,
                name: at.name,
                source_dir: at.fds.source.as_fd(),
                source: stat,
                // Nobody else knows of a directory that an interrupted copy left under its temporary name.
                target: found.filter(|_| at.node.kind != Kind::Resumed),
            }),
        };
        if found.is_some_and(is_directory) && action == EntryAction::Copy {
            if self.options.exclude.matches(at.parent, name.to_bytes(), true) {
                let why = "the target has a directory of that name, which is excluded and stays";
                return Err(Fault::message("copying it", why));
            }
            // In a directory of ours that an interrupted copy left, anything may be removed.
            if !(self.options.delete || at.node.kind == Kind::Resumed) {
                let why =
                    "the target has a directory of that name; --delete would remove it with all it holds";
                return Err(Fault::message("copying it", why));
            }
            if !self.remove(at.parent, at.fds.target()?, &name, at.node.kind == Kind::Resumed)? {
                let why = "the target has a directory of that name, and something in it must be kept";
                return Err(Fault::message("copying it", why));
            }
        }
        let over = match found.filter(|found| !is_directory(found)) {
            _ if self.policy.is_none() => Over::Anything,
            Some(found) => Over::This(Version::of(found)),
            None => Over::Nothing,
        };
        if self.options.dry_run {
            (self.monitor.event)(Event::Would("copy", &at.path()));
            self.count_done(stat);
            return Ok(None);
        }
        match action {
            EntryAction::Copy => Ok(Some(Placement { name, beside: false, over })),
            EntryAction::Beside(name) => Ok(Some(Placement { name, beside: true, over: Over::Anything })),
            EntryAction::Skip => {
                self.remove_leftover(at)?;
                self.counts.unchanged.fetch_add(1, Ordering::Relaxed);
                self.count_done(stat);
                Ok(None)
            }
            EntryAction::Delete => {
                self.remove(at.parent, at.fds.target()?, &name, at.node.kind == Kind::Resumed)?;
                self.count_done(stat);
                Ok(None)
            }
        }
    }

    /// In a directory that an interrupted copy left under its temporary name, entries have their own names before they
    /// are complete. One that is not copied this time must not be shown with the directory.
    pub(super) fn remove_leftover(&self, at: &At<'_>) -> Result<(), Fault> {
        if at.node.kind == Kind::Resumed && !self.options.dry_run {
            self.remove(at.parent, at.fds.target()?, self.target_name(at.name), true)?;
        }
        Ok(())
    }

    /// Makes an entry; whatever an interrupted copy left under its temporary name goes first.
    pub(super) fn replacing_leftover<T>(
        &self,
        target: BorrowedFd<'_>,
        name: &CStr,
        make: impl Fn() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match make() {
            Err(Errno::EXIST) => {
                fs::unlinkat(target, name, AtFlags::empty())?;
                make()
            }
            other => other,
        }
    }

    /// Gives an entry that is complete its name, and says whether it could: not if somebody has put something else
    /// there since the policy was asked.
    pub(super) fn give_name(
        &self,
        target: BorrowedFd<'_>,
        working: &CStr,
        placement: &Placement,
    ) -> Result<bool, Fault> {
        const ACTION: &str = "giving it its name";
        let name = &*placement.name;
        if *working == *name {
            return Ok(true);
        }
        let is_free = match placement.over {
            Over::Anything => false,
            Over::Nothing => true,
            Over::This(seen) => match stat_if_there(target, name)? {
                Some(now) if Version::of(&now) != seen => return Ok(false),
                now => now.is_none(),
            },
        };
        if is_free {
            match fs::renameat_with(target, working, target, name, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(true),
                Err(Errno::EXIST) => return Ok(false),
                // Some filesystems can't promise not to replace. But a second name is never given over another entry.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    match fs::linkat(target, working, target, name, AtFlags::empty()) {
                        Ok(()) => {
                            fs::unlinkat(target, working, AtFlags::empty()).during(ACTION)?;
                            return Ok(true);
                        }
                        Err(Errno::EXIST) => return Ok(false),
                        // Directories have one name, and some filesystems give no second ones.
                        Err(_) if stat_if_there(target, name)?.is_some() => return Ok(false),
                        Err(_) => {}
                    }
                }
                Err(error) => return Err(Fault::new(ACTION, error)),
            }
        }
        fs::renameat(target, working, target, name).during(ACTION)?;
        Ok(true)
    }

    /// An entry is in place: count it, record it, tell the policy.
    // One flat list of what a manifest entry needs; a struct would be made and taken apart at the same places.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn placed(
        &self,
        at: &At<'_>,
        placement: &Placement,
        kind: u8,
        digest: Digest,
        source: &Stat,
        recorded: bool,
        worker: &mut Worker,
    ) -> Result<(), Fault> {
        self.count_done(source);
        if kind == b'f' {
            self.counts.files.fetch_add(1, Ordering::Relaxed);
            self.counts.bytes.fetch_add(source.st_size as u64, Ordering::Relaxed);
        }
        if self.manifest.is_none() && self.policy.is_none() {
            return Ok(());
        }
        let path = dir::join(at.parent, placement.name.to_bytes());
        if placement.beside {
            (self.monitor.event)(Event::PutBeside { path: &at.path(), name: placement.name.to_bytes() });
        }
        if let Some(policy) = self.policy {
            let stat = fs::statat(at.fds.target()?, &*placement.name, AtFlags::SYMLINK_NOFOLLOW)
                .during("reading its attributes")?;
            policy.placed(&path, &stat);
        }
        // What lost an attribute is not on record, so that a second run tries, and tells, again.
        if self.manifest.is_some() && recorded {
            let entry = ManifestEntry::new(kind, self.options.checksum, digest, source, path);
            worker.lines.push(self.manifest.as_ref(), &entry);
        }
        Ok(())
    }

    pub(super) fn count_done(&self, stat: &Stat) {
        let progress = self.monitor.progress;
        progress.entries_done.fetch_add(1, Ordering::Relaxed);
        if attributes::is_regular(stat) {
            progress.bytes_done.fetch_add(stat.st_size as u64, Ordering::Relaxed);
        }
    }
}
