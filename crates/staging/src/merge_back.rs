//! Bringing results home: how the directory on disk becomes what the program saw, without losing what others wrote.
//!
//! The rule for conflicts needs no list of the directory's former state. At the start the clock of the target's own
//! filesystem is read; whatever on disk has changed since (its ctime is later) and was not put there by this run was
//! changed by someone else. It is kept: the program's version of such a file goes beside it as `NAME.ondeck-ID`,
//! and a file that the program deleted stays.
//!
//! Renaming a directory changes no ctime below it. The inodes of the directories are therefore remembered: what stands in
//! another directory than the one that was there at the start is someone else's, whatever its ctime.
//!
//! Giving one name of a file to another, or removing it, changes the ctime for its other names, too, wherever they are:
//! in another output directory, or outside of all. Of the files that had several names at the start their state is
//! therefore remembered, and one of which nothing but the number of names has changed counts as it was.
//!
//! A directory is never replaced, so its attributes are merged one by one: what the program changed of those that it
//! was shown comes home, and everything else stays as it is on disk.
//!
//! # Layout
//!
//! - this file: the policy of one output directory, which the staging engine asks about every entry
//! - `attributes`: what of a directory's own attributes comes home
//! - `before`: what is remembered of the disk; `baseline`: of what was copied into RAM; `ours`: of what a run has put
//!   on disk itself
//! - `linked`: files of several names; `appearance`: directories; `stat` and `xattrs`: what both are read from; `overlay`:
//!   an overlay's own marks
//! - [`journal`]: what a keeper writes down for the one that takes its place; `lines`: the files in which the rest is kept

mod appearance;
mod attributes;
mod baseline;
mod before;
pub mod journal;
mod lines;
mod linked;
mod ours;
mod overlay;
mod stat;
mod xattrs;

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use ondeck_transfer::merge::{
    Changes, DirectoryAction, EntryAction, EntryContext, MergePolicy, Merged, Side,
};
use ondeck_transfer::verify::digest_of;
use rustix::fs::{self, FileType, Mode, OFlags, Stat};

use self::journal::Journal;
use self::overlay::is_opaque;
use self::stat::{is_directory, modified_at};

pub use self::baseline::Baseline;
pub use self::before::Before;
pub use self::linked::{Content, FileId, Loosened};
pub use self::ours::Ours;
pub use self::overlay::{is_whiteout, remove_marks, seen_through_overlay};
pub use self::stat::{Moment, clock_of};

pub(crate) use self::linked::Linked;
pub(crate) use self::ours::{read_ours, write_ours};
pub(crate) use self::stat::{changed_at, key, parent_of};

/// How an output directory is shown to the program, which decides how its results come home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// The directory on disk was empty: the program writes to an empty directory in RAM.
    Bind,
    /// What was on disk was copied into RAM; unchanged files are not copied back, missing ones are deleted.
    Mirror,
    /// The directory on disk shows through; what the program writes, and marks for what it deletes, are in RAM.
    Overlay,
    /// The program works on disk.
    Disk,
}

impl Mechanism {
    /// The word in reports and messages.
    pub fn word(self) -> &'static str {
        match self {
            Mechanism::Bind => "bind",
            Mechanism::Mirror => "mirror",
            Mechanism::Overlay => "overlay",
            Mechanism::Disk => "disk",
        }
    }
}

/// The policy of one output directory.
pub struct MergeBack {
    /// How the program saw it.
    pub mechanism: Mechanism,
    /// When it was shown to the program, by its own filesystem's clock.
    pub since: Moment,
    /// What was copied into RAM beforehand.
    pub baseline: Baseline,
    /// The run's name, for files that are put beside others.
    pub id: String,
    /// Entries that belong to another of the run's directories, mounted inside this one.
    pub nested: Vec<Vec<u8>>,
    /// Whether the program still runs: then only closed files are copied and nothing is deleted.
    pub interim: AtomicBool,
    /// What this run itself put on disk.
    pub ours: Mutex<Ours>,
    /// Directories that this run itself made on disk, by hash of the path: what is in them is the program's, or came
    /// later.
    pub made: Mutex<HashSet<u128>>,
    /// Whether the source is what one of a RAM disk's servers has: what it lacks was not deleted by the program.
    pub salvage: bool,
    /// What this run itself has done to names of files that have several.
    pub loosened: Arc<Loosened>,
    /// Directories on disk, by hash of the path, that a keeper had entered and not completed when it was killed: their
    /// inodes, and when they were written last before it put anything into them.
    pub entered: Mutex<HashMap<u128, (u64, Moment)>>,
    /// Directories on disk, by hash of the path, that are not those that the program was shown there.
    others: Mutex<HashSet<u128>>,
    /// Where all this is written down, for one who has to go on with it.
    pub journal: Option<Journal>,
}

impl MergeBack {
    /// The policy of a directory that the program was shown at this moment, of which nothing is on disk yet.
    pub fn new(
        mechanism: Mechanism,
        since: Moment,
        baseline: Baseline,
        id: String,
        nested: Vec<Vec<u8>>,
    ) -> MergeBack {
        MergeBack {
            mechanism,
            since,
            baseline,
            id,
            nested,
            interim: AtomicBool::new(false),
            ours: Mutex::default(),
            made: Mutex::default(),
            salvage: false,
            loosened: Arc::default(),
            entered: Mutex::default(),
            others: Mutex::default(),
            journal: None,
        }
    }

    /// Whether someone else changed what stands at `path` on disk since the program was shown the directory.
    fn is_foreign(&self, path: &[u8], target: &Stat) -> bool {
        if changed_at(target) <= self.since && !self.is_in_another(path) {
            return false;
        }
        let ours = self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if ours.get(&key(path)) == Some(&(target.st_ino, changed_at(target))) {
            return false;
        }
        drop(ours);
        if self.loosened.has(target) {
            return false;
        }
        let linked = self.baseline.before.linked.get(&key(path));
        !linked.is_some_and(|linked| linked.has_only_other_names(target))
    }

    /// Whether a directory on disk is another user's, and was put there while the program had its own: that user reads and
    /// replaces what comes into it, whatever the modes.
    fn is_anothers(&self, path: &[u8], source: BorrowedFd<'_>, target: &Stat) -> bool {
        let user = rustix::process::geteuid();
        // One that can't be looked at is nobody's.
        let source = fs::fstat(source).ok();
        let ours = if user.is_root() { source.map(|source| source.st_uid) } else { Some(user.as_raw()) };
        if path.is_empty() || ours == Some(target.st_uid) {
            return false;
        }
        // Which directories were there is not known of a part of the results.
        if self.salvage {
            return true;
        }
        if !self.baseline.before.is_another(path, target) {
            return false;
        }
        // What was copied into RAM later was on disk then, though its inode is not known.
        let later = !self.baseline.before.knows(path)
            && self
                .baseline
                .entries
                .get(&key(path))
                .is_some_and(|staged| source.is_some_and(|source| source.st_ino == staged.inode));
        !later
    }

    /// A directory on disk is about to be merged into, or emptied.
    fn note_if_another(&self, path: &[u8], target: &Stat) {
        if self.baseline.before.is_another(path, target) {
            self.others.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(key(path));
        }
    }

    /// Whether an entry stands in another directory than the one that the program was shown.
    fn is_in_another(&self, path: &[u8]) -> bool {
        self.others.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains(&key(parent_of(path)))
    }

    /// An entry that nobody else has changed is about to lose this name, or has got another one.
    fn loosen(&self, target: &Stat) {
        if let (Some((file, content)), Some(journal)) = (self.loosened.add(target), &self.journal) {
            journal.loosened(file, &content);
        }
    }

    /// When a directory on disk was written last, before this run put anything into it.
    fn entered_at(&self, path: &[u8], target: &Stat) -> Moment {
        let entered = self.entered.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match entered.get(&key(path)) {
            Some((inode, modified)) if *inode == target.st_ino => *modified,
            _ => modified_at(target),
        }
    }

    /// Whether nothing was done to the top of an output directory since the program was shown it.
    pub fn is_top_as_shown(&self, ram: BorrowedFd<'_>) -> io::Result<bool> {
        self.baseline.is_top_as_shown(ram)
    }

    fn is_ours(&self, path: &[u8]) -> bool {
        self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains_key(&key(path))
    }

    /// Whether an entry was on disk when the program was shown the directory, or was put there by this run.
    pub fn was_there(&self, path: &[u8]) -> bool {
        !self.is_beside(path)
            && (self.mechanism == Mechanism::Overlay
                || self.baseline.entries.contains_key(&key(path))
                || self.is_ours(path))
    }

    fn is_made(&self, path: &[u8]) -> bool {
        self.made.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains(&key(path))
    }

    /// Whether a path is that of a version which was put beside someone else's, or of what is in one.
    fn is_beside(&self, path: &[u8]) -> bool {
        let suffix = format!(".ondeck-{}", self.id);
        path.split(|byte| *byte == b'/').any(|name| name.ends_with(suffix.as_bytes()))
    }

    /// Whether the program left an entry as it was staged in. Times don't tell: what is written to a file in RAM through
    /// a mapping need not change them, so the content is compared with the checksum that was taken then.
    fn is_as_staged(&self, path: &[u8], entry: &EntryContext<'_>) -> bool {
        let Some(staged) = self.baseline.entries.get(&key(path)) else { return false };
        if (staged.inode, staged.changed) != (entry.source.st_ino, changed_at(entry.source)) {
            return false;
        }
        if FileType::from_raw_mode(entry.source.st_mode) != FileType::RegularFile {
            return true;
        }
        let Some((checksum, digest)) = staged.digest else { return false };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        fs::openat(entry.source_dir, entry.name, flags, Mode::empty()).is_ok_and(|file| {
            let size = entry.source.st_size as u64;
            let mut buffer = vec![0; (size as usize).clamp(1, 1 << 20)];
            digest_of(file.as_fd(), size, checksum, &mut buffer).is_ok_and(|found| found == digest)
        })
    }

    /// Whether a name is a temporary one of a copy into RAM for this run that was interrupted.
    fn is_partial(&self, name: &[u8]) -> bool {
        name.starts_with(b".") && name.ends_with(format!(".ondeck-partial-{}", self.id).as_bytes())
    }

    fn beside(&self, name: &CStr) -> EntryAction {
        let suffix = format!(".ondeck-{}", self.id);
        let mut beside = name.to_bytes().to_vec();
        // A name of full length is cut rather than refused: the message names both.
        beside.truncate(255 - suffix.len());
        beside.extend_from_slice(suffix.as_bytes());
        CString::new(beside).map_or(EntryAction::Skip, EntryAction::Beside)
    }
}

impl MergePolicy for MergeBack {
    fn entry(&self, entry: &EntryContext<'_>) -> EntryAction {
        let path = entry.path();
        if self.salvage && is_link_to(entry.source) {
            return EntryAction::Skip;
        }
        if self.nested.contains(&path) || self.is_partial(entry.name.to_bytes()) {
            return EntryAction::Skip;
        }
        let whiteout = self.mechanism == Mechanism::Overlay && is_whiteout(entry.source);
        if self.interim.load(Relaxed) && (whiteout || is_open_for_writing(entry)) {
            return EntryAction::Skip;
        }
        if whiteout {
            return EntryAction::Delete;
        }
        // Also into what was empty at first something may have been copied later.
        let staged = matches!(self.mechanism, Mechanism::Mirror | Mechanism::Bind);
        if staged && self.is_as_staged(&path, entry) {
            return EntryAction::Skip;
        }
        match entry.target {
            Some(target) if self.is_foreign(&path, target) => self.beside(entry.name),
            Some(target) => {
                self.loosen(target);
                EntryAction::Copy
            }
            None => EntryAction::Copy,
        }
    }

    fn directory(&self, path: &[u8], source: BorrowedFd<'_>, target: Option<&Stat>) -> DirectoryAction {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if self.nested.iter().any(|nested| nested == path) || self.is_partial(name) {
            return DirectoryAction::Skip;
        }
        if let Some(target) = target
            && match is_directory(target) {
                true => self.is_anothers(path, source, target),
                false => self.is_foreign(path, target),
            }
        {
            return match CString::new(name).map(|name| self.beside(&name)) {
                Ok(EntryAction::Beside(name)) => DirectoryAction::Beside(name),
                _ => DirectoryAction::Skip,
            };
        }
        if let Some(target) = target.filter(|target| is_directory(target)) {
            self.note_if_another(path, target);
        }
        if let (Some(journal), Some(target)) = (&self.journal, target) {
            journal.entered(key(path), target.st_ino, self.entered_at(path, target));
        }
        if target.is_none() {
            if let Some(journal) = &self.journal {
                journal.made(key(path));
            }
            self.made.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(key(path));
        }
        let delete = !self.interim.load(Relaxed)
            && match self.mechanism {
                // Bind: files that were copied out earlier and deleted by the program since.
                Mechanism::Mirror | Mechanism::Bind => true,
                // The top shows what is on disk, whatever it is marked with.
                Mechanism::Overlay => !path.is_empty() && is_opaque(source) || self.is_made(path),
                Mechanism::Disk => false,
            };
        DirectoryAction::Merge { delete, attributes: false }
    }

    fn emptying(&self, path: &[u8], target: &Stat) {
        self.note_if_another(path, target);
    }

    fn may_delete(&self, path: &[u8], target: &Stat) -> bool {
        if self.salvage {
            // Nothing but what an earlier attempt has left half-written.
            let file = FileType::from_raw_mode(target.st_mode) == FileType::RegularFile;
            return file
                && path.rsplit(|byte| *byte == b'/').next().is_some_and(|name| self.is_partial(name));
        }
        let directory = FileType::from_raw_mode(target.st_mode) == FileType::Directory;
        let may = match self.mechanism {
            // An overlay's mark says that the program deleted this very entry; a directory only goes if it is empty
            // by then.
            Mechanism::Overlay => !self.is_beside(path) && (directory || !self.is_foreign(path, target)),
            Mechanism::Mirror | Mechanism::Bind => {
                let known = !self.is_beside(path)
                    && (self.baseline.entries.contains_key(&key(path)) || self.is_ours(path));
                known && (directory || !self.is_foreign(path, target))
            }
            Mechanism::Disk => false,
        };
        if may {
            self.loosen(target);
        }
        may
    }

    fn showed_default_acl(&self, path: &[u8]) -> bool {
        // A RAM disk may not know the users whom an ACL names, or no ACLs at all.
        self.is_made(path) || self.was_shown_default_acl(path)
    }

    fn xattr_name(&self, name: &CStr) -> Option<CString> {
        match self.mechanism {
            Mechanism::Overlay => seen_through_overlay(name),
            // A server's own notes.
            _ if self.salvage && name.to_bytes().starts_with(b"trusted.") => None,
            _ => Some(name.to_owned()),
        }
    }

    fn changes(&self, merged: &Merged<'_>) -> io::Result<Changes> {
        self.changes_of(merged)
    }

    fn may_open_up(&self) -> bool {
        // The program would see it, and may change the mode itself meanwhile.
        !self.interim.load(Relaxed)
    }

    fn opening_up(&self, side: Side, path: &[u8], stat: &Stat) {
        if let Some(journal) = &self.journal {
            journal.opening_up(side, path, stat.st_ino, stat.st_mode & 0o7777);
        }
    }

    fn placed(&self, path: &[u8], target: &Stat) {
        if let Some(journal) = &self.journal {
            journal.placed(key(path), target.st_ino, changed_at(target));
        }
        let mut ours = self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        ours.insert(key(path), (target.st_ino, changed_at(target)));
        drop(ours);
        self.entered.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&key(path));
        // A further name has changed the ctime for those that were placed before.
        self.loosen(target);
    }
}

/// Gluster's mark that a file is on another server.
fn is_link_to(stat: &Stat) -> bool {
    let file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    file && stat.st_size == 0 && stat.st_mode & 0o7777 == 0o1000
}

/// Whether any process has the file open for writing or mapped for writing.
///
/// The kernel grants a read lease only if none has; it is given back at once.
fn is_open_for_writing(entry: &EntryContext<'_>) -> bool {
    if FileType::from_raw_mode(entry.source.st_mode) != FileType::RegularFile {
        return false;
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let Ok(file) = fs::openat(entry.source_dir, entry.name, flags, Mode::empty()) else { return true };
    // SAFETY: fcntl on a descriptor that lives until the end of this function, with integer arguments only.
    unsafe {
        let leased = libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) == 0;
        if leased {
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK);
        }
        !leased
    }
}
