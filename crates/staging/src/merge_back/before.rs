//! What is remembered of a directory on disk, as it was when the program was shown it.

use std::collections::HashMap;
use std::ffi::CString;
use std::io;
use std::os::fd::BorrowedFd;

use ondeck_transfer::survey::{Descend, Visit, survey};
use rustix::fs::{self, Stat};

use super::appearance::Appearance;
use super::linked::Linked;
use super::overlay::{is_whiteout, seen_through_overlay};
use super::stat::{is_directory, key};
use super::xattrs::{Xattrs, names_others, xattrs_if_readable};

/// What is remembered of a directory on disk as the program is shown it: about 100 bytes for each name of a file that has
/// several, 40 for each directory, and about 150 more if it is shown through an overlay.
#[derive(Clone, Debug, Default)]
pub struct Before {
    /// The inodes of the directories, the top included; none if nothing is known of them.
    pub(super) inodes: Option<HashMap<u128, u64>>,
    pub(super) linked: HashMap<u128, Linked>,
    pub(super) directories: HashMap<u128, Appearance>,
    /// Whether an overlay would take something in it for its own.
    pub has_marks: bool,
    /// The first directory with an ACL that names users or groups other than the caller's own.
    pub acl_of_others: Option<Vec<u8>>,
}

impl Before {
    /// Notes an entry.
    pub fn note(&mut self, visit: &Visit<'_>) -> io::Result<()> {
        if let Some(linked) = Linked::of(visit.stat) {
            self.linked.insert(key(visit.path), linked);
        }
        self.has_marks |= is_whiteout(visit.stat);
        if is_directory(visit.stat) {
            self.note_inode(visit.path, visit.stat);
            let xattrs = xattrs_if_readable(visit.dir, visit.name)?;
            self.note_acls(visit.path, &xattrs);
            let mut seen = Vec::new();
            for (name, value) in &xattrs {
                match seen_through_overlay(name) {
                    Some(name) => seen.push((name, &**value)),
                    None => self.has_marks = true,
                }
            }
            let seen = seen.iter().map(|(name, value)| (&**name, *value));
            self.directories.insert(key(visit.path), Appearance::of(visit.stat, seen));
        }
        Ok(())
    }

    fn note_inode(&mut self, path: &[u8], directory: &Stat) {
        self.inodes.get_or_insert_default().insert(key(path), directory.st_ino);
    }

    /// Whether a directory was at this path.
    pub fn knows(&self, path: &[u8]) -> bool {
        self.inodes.as_ref().is_some_and(|inodes| inodes.contains_key(&key(path)))
    }

    /// Of which only the inode of the directory itself is known.
    pub fn of_top(inode: u64) -> Before {
        Before { inodes: Some(HashMap::from([(key(b""), inode)])), ..Before::default() }
    }

    /// The inode of the directory itself, if it is known.
    pub fn top(&self) -> Option<u64> {
        self.inodes.as_ref()?.get(&key(b"")).copied()
    }

    /// Whether another directory was at this path, or none.
    pub fn is_another(&self, path: &[u8], directory: &Stat) -> bool {
        self.inodes.as_ref().is_some_and(|inodes| inodes.get(&key(path)) != Some(&directory.st_ino))
    }

    fn note_acls(&mut self, path: &[u8], xattrs: &Xattrs) {
        let others = |(name, value): &(CString, Vec<u8>)| {
            name.to_bytes().starts_with(b"system.posix_acl_") && names_others(value)
        };
        if self.acl_of_others.is_none() && xattrs.iter().any(others) {
            self.acl_of_others = Some(path.to_vec());
        }
    }

    /// Forgets how the directories looked, which is known from RAM where all of them are copied there.
    pub fn without_directories(mut self) -> Before {
        self.directories = HashMap::new();
        self
    }

    /// Notes which one the directory itself is.
    pub fn note_top(&mut self, directory: BorrowedFd<'_>) -> io::Result<()> {
        self.note_inode(b"", &fs::fstat(directory)?);
        Ok(())
    }

    /// Notes the ACLs of the directory itself.
    pub fn note_acls_of_top(&mut self, directory: BorrowedFd<'_>) -> io::Result<()> {
        self.note_acls(b"", &ondeck_transfer::xattrs_of(directory)?);
        Ok(())
    }

    /// What is to be remembered of all that a directory holds, without what is `nested`.
    pub fn of(directory: BorrowedFd<'_>, nested: &[Vec<u8>]) -> Result<Before, (Vec<u8>, io::Error)> {
        let mut before = Before::default();
        before.note_top(directory).map_err(|error| (Vec::new(), error))?;
        survey(directory, &mut |visit| {
            if nested.iter().any(|nested| nested == visit.path) {
                return Ok(Descend::No);
            }
            before.note(visit).map(|()| Descend::Yes)
        })?;
        Ok(before)
    }

    /// The files with several names and the inodes of the directories below one, as far as it can be read. Without what is
    /// `nested`.
    pub fn in_short(directory: BorrowedFd<'_>, nested: &[Vec<u8>]) -> Result<Before, (Vec<u8>, io::Error)> {
        let mut before = Before::default();
        before.note_top(directory).map_err(|error| (Vec::new(), error))?;
        survey(directory, &mut |visit| {
            if nested.iter().any(|nested| nested == visit.path) {
                return Ok(Descend::No);
            }
            if let Some(linked) = Linked::of(visit.stat) {
                before.linked.insert(key(visit.path), linked);
            }
            if is_directory(visit.stat) {
                before.note_inode(visit.path, visit.stat);
            }
            Ok(Descend::Yes)
        })?;
        Ok(before)
    }
}
