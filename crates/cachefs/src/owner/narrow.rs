//! Rights that are taken away here are gone on the backing directory before what only others may reach comes there: whoever reaches
//! that directory itself would reach it by the rights of before.
//!
//! A file loses them with the pass that brings its data ([`narrow`]), also those that are taken away during that pass. A directory is
//! passed when its names have been changed, and that may be much later than names and data appear in it; so it loses them apart from
//! that, and before. So does all that is below a directory before that is moved to where others may look. When it gets what it has
//! gained is told in [`super::gains`].

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::Mode;
use rustix::io::Errno;

use super::Core;
use super::inode::{Inode, dirty};
use super::pass::Pass;
use super::state::{MOST_LEVELS, State};
use super::turns::{Turn, is_its_own};
use crate::backing;
use crate::message::{Ino, ROOT, Xattrs};

/// Read, write and execute for everybody: what is not a set-id or sticky bit.
const RIGHTS: u32 = libc::S_IRWXU | libc::S_IRWXG | libc::S_IRWXO;

/// Whom something is for.
struct Wanted {
    mode: u32,
    uid: u32,
    /// Bits of [`dirty`]: what of it is not there yet.
    bits: u8,
    has_acl: bool,
}

impl Wanted {
    /// The rights of what is there that it may keep until it has all that it is to have.
    fn keeps(&self, entry: BorrowedFd<'_>, found: &backing::Stat) -> Result<u32, Errno> {
        let mut keeps = self.mode & RIGHTS;
        let changes_acl =
            self.bits & dirty::XATTRS != 0 && (self.has_acl || has_acl(&backing::xattrs(entry)?));
        if self.bits & dirty::OWNER != 0 || changes_acl {
            // Its group, and whom an ACL names, may be others.
            keeps &= libc::S_IRWXU;
        }
        if self.bits & dirty::OWNER != 0 && found.uid != self.uid {
            keeps = 0;
        }
        Ok(keeps)
    }
}

/// What has to lose rights before names are changed.
#[derive(Default)]
pub struct Wide {
    pub directories: BTreeSet<Ino>,
    /// Passes take their rights, and bring their data.
    pub files: Vec<Ino>,
}

fn has_acl(xattrs: &Xattrs) -> bool {
    xattrs.contains_key(OsStr::new(crate::acl::ACCESS))
}

/// Takes rights from a file there that it is to lose, before its data comes. It gets all of its rights when it has that.
pub fn narrow(pass: &Pass, entry: BorrowedFd<'_>, found: &backing::Stat) -> Result<(), Errno> {
    if pass.bits & (dirty::MODE | dirty::OWNER | dirty::XATTRS) == 0 {
        return Ok(());
    }
    let has_acl = pass.xattrs.as_ref().is_some_and(has_acl);
    let wanted = Wanted { mode: pass.mode, uid: pass.uid, bits: pass.bits, has_acl };
    let left = found.mode & RIGHTS & wanted.keeps(entry, found)?;
    if left == found.mode & RIGHTS {
        return Ok(());
    }
    rustix::fs::chmod(backing::by_descriptor(entry).as_str(), Mode::from_raw_mode(left))
}

impl State {
    /// Notes whether a change of mode, owner or ACL has taken rights from a file or directory that the backing directory may still
    /// give.
    pub fn note_narrowed(&mut self, ino: Ino, is_narrower: bool) {
        if !is_narrower {
            return;
        }
        self.rights_lost += 1;
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        // What is not there yet is made for its owner alone.
        if inode.is_dir() && (ino == ROOT || !inode.homes.is_empty()) {
            inode.dirty |= dirty::WIDE;
            self.wide.insert(ino);
        } else if !inode.is_dir() && !inode.homes.is_empty() {
            self.wide_files.insert(ino);
        }
    }

    /// Notes whether something has lost all the rights there by now that it was to lose.
    pub fn settle_rights(&mut self, ino: Ino) {
        let bits = self.inodes.get(&ino).map_or(0, |inode| inode.dirty | inode.writing);
        if bits & dirty::RIGHTS == 0 {
            self.gains.remove(&ino);
        }
        if bits & dirty::WIDE == 0 {
            self.wide.remove(&ino);
        }
        if bits & (dirty::MODE | dirty::OWNER | dirty::XATTRS) == 0 {
            self.wide_files.remove(&ino);
        }
    }

    /// The same of all that was recovered. A directory may have lost more there than it was to lose, and gets the rest back soon.
    pub fn recover_rights(&mut self) {
        let has_gained = |inode: &Inode| inode.is_dir() && inode.dirty & dirty::RIGHTS != 0;
        let gained: Vec<Ino> =
            self.inodes.iter().filter(|(_, inode)| has_gained(inode)).map(|(ino, _)| ino).collect();
        for ino in gained {
            self.note_gains(ino);
        }
        for (ino, inode) in self.inodes.iter() {
            if inode.dirty & dirty::WIDE != 0 {
                self.wide.insert(ino);
                self.urgent.insert(ino);
            } else if !inode.is_dir()
                && !inode.homes.is_empty()
                && inode.dirty & (dirty::MODE | dirty::OWNER | dirty::XATTRS) != 0
            {
                self.wide_files.insert(ino);
            }
        }
    }

    /// Has a pass bring the rights that its file has now, if any were lost since it began or since this was asked last: what it reads
    /// next may have been written after that. Returns the directories above that have to lose rights first.
    fn renew_rights(&mut self, pass: &mut Pass) -> Option<BTreeSet<Ino>> {
        if !self.has_lost_rights_during(pass) {
            return None;
        }
        pass.rights_lost = self.rights_lost;
        if let Some(inode) = self.inodes.get_mut(&pass.ino) {
            let bits = inode.dirty & (dirty::MODE | dirty::OWNER | dirty::XATTRS);
            inode.dirty &= !bits;
            inode.writing |= bits;
            pass.bits |= bits;
            (pass.mode, pass.uid, pass.gid) = (inode.mode, inode.uid, inode.gid);
            if bits & dirty::XATTRS != 0 {
                pass.xattrs = inode.xattrs.as_deref().cloned();
            }
        }
        Some(self.wide_above_file(pass.ino))
    }

    /// Whether anybody has lost rights since a pass began, or took over what its file had.
    pub fn has_lost_rights_during(&self, pass: &Pass) -> bool {
        self.rights_lost != pass.rights_lost && !pass.orphan
    }

    /// Of a directory and those above it, where they are on the backing directory: those that have to lose rights there.
    fn wide_above(&self, dir: Ino, wide: &mut BTreeSet<Ino>) {
        wide.extend(self.above(dir).filter(|ino| self.wide.contains(ino)));
    }

    /// A directory and those above it, where they are on the backing directory.
    pub fn above(&self, dir: Ino) -> impl Iterator<Item = Ino> {
        let next = |at: &Ino| {
            let inode = self.inodes.get(at).filter(|_| *at != ROOT)?;
            // What is not there yet is made further up.
            Some(match inode.homes.first() {
                Some(home) => home.dir,
                None => self.directory(*at).map_or(ROOT, |directory| directory.parent),
            })
        };
        std::iter::successors(Some(dir), next).take(MOST_LEVELS)
    }

    /// What has to lose rights before a round gives names to it, or in it, or below it, or moves a directory that it is in.
    pub fn wide_for(&self, round: &[(u64, Turn)]) -> Wide {
        let mut found = Wide::default();
        let (mut dirs, mut moved) = (BTreeSet::new(), HashSet::new());
        let is_dir = |ino: &Ino| self.inodes.get(ino).is_some_and(Inode::is_dir);
        for operation in round.iter().filter_map(|(_, turn)| turn.operation()) {
            if operation.gives_a_name() {
                dirs.extend(operation.directories());
            }
            if operation.moves() {
                moved.extend(operation.subjects().into_iter().filter(is_dir));
            }
        }
        if !self.wide.is_empty() {
            dirs.into_iter().for_each(|dir| self.wide_above(dir, &mut found.directories));
        }
        if !moved.is_empty() {
            // Whoever may not enter a private directory may enter the one where these come to.
            let goes = |dir: Ino| self.above(dir).any(|ino| moved.contains(&ino));
            found.directories.extend(self.wide.iter().copied().filter(|ino| goes(*ino)));
            found.files = self.dirty_below(&moved);
        }
        found
    }

    /// The directories that have to lose rights before data of a file comes to where it is there.
    pub fn wide_above_file(&self, ino: Ino) -> BTreeSet<Ino> {
        let mut wide = BTreeSet::new();
        if !self.wide.is_empty() {
            let homes = self.inodes.get(&ino).into_iter().flat_map(|inode| inode.homes.iter());
            homes.for_each(|home| self.wide_above(home.dir, &mut wide));
        }
        wide
    }
}

impl Core {
    /// Takes rights from a file of a pass, and from the directories above it, that they have lost since the pass began.
    ///
    /// # Errors
    /// As of a pass.
    pub fn narrow_again(&self, pass: &mut Pass, file: &File) -> Result<(), Errno> {
        let wide = self.lock().renew_rights(pass);
        let Some(wide) = wide else { return Ok(()) };
        self.narrow_directories(&wide).map_err(|(_, error)| error)?;
        narrow(pass, file.as_fd(), &backing::stat(file.as_fd(), OsStr::new(""))?)
    }

    /// Takes the rights from directories there that they are to lose. What is refused is refused to their passes, too, which tell it.
    ///
    /// # Errors
    /// The backing directory can't be reached or written to.
    pub fn narrow_directories(&self, wide: &BTreeSet<Ino>) -> Result<(), (Ino, Errno)> {
        for ino in wide {
            match self.narrow_directory(*ino) {
                Err(error) if !is_its_own(error) => return Err((*ino, error)),
                Err(error) => tracing::debug!(ino, %error, "can't take rights from a directory"),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn narrow_directory(&self, ino: Ino) -> Result<(), Errno> {
        // A pass gives it what it was to have when that began.
        self.hold_one_still(ino)?;
        let done = self.take_rights_held(ino);
        self.let_go(&[ino]);
        done
    }

    fn take_rights_held(&self, ino: Ino) -> Result<(), Errno> {
        let wanted = {
            let mut state = self.lock();
            let Some(inode) = state.inodes.get_mut(&ino).filter(|inode| inode.dirty & dirty::WIDE != 0)
            else {
                return Ok(());
            };
            let has_acl = inode.xattrs.as_deref().is_some_and(has_acl);
            let wanted = Wanted { mode: inode.mode, uid: inode.uid, bits: inode.dirty, has_acl };
            inode.dirty &= !dirty::WIDE;
            inode.writing |= dirty::WIDE;
            wanted
        };
        let done = self.take_rights(ino, &wanted);
        let mut state = self.lock();
        if let Some(inode) = state.inodes.get_mut(&ino) {
            inode.writing &= !dirty::WIDE;
            if done.is_err() {
                inode.dirty |= dirty::WIDE;
            }
        }
        state.settle_rights(ino);
        if done == Ok(true) {
            // Those who are to have the others back need not wait for long.
            state.urgent.insert(ino);
        }
        done.map(drop)
    }

    /// Takes rights from a directory there. Whether it is to get some of them again.
    fn take_rights(&self, ino: Ino, wanted: &Wanted) -> Result<bool, Errno> {
        let entry = self.backing_entry(ino)?;
        let _held = self.backing.is_of_a_user().then(|| self.backing.hold_modes());
        let found = backing::stat(entry.as_fd(), OsStr::new(""))?;
        let mut keeps = wanted.keeps(entry.as_fd(), &found)?;
        if found.uid == wanted.uid {
            // Names in it are changed by the rights of its owner, who had them when that was begun.
            keeps |= libc::S_IRWXU;
        }
        let left = found.mode & RIGHTS & keeps;
        let mode = found.mode & 0o7000 | wanted.mode & libc::S_ISVTX | left;
        if mode != found.mode & 0o7777 {
            rustix::fs::chmod(backing::by_descriptor(entry.as_fd()).as_str(), Mode::from_raw_mode(mode))?;
        }
        Ok(found.mode & RIGHTS & wanted.mode & !left != 0)
    }
}
