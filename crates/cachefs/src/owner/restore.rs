//! Directories that others have removed, or put something else in the place of, while what is in them here is not written back.
//!
//! What was changed here has a place all the same: the directory is made again where it was, or beside what is there now, and only what
//! was changed here comes into it. That is found out where something can't be carried out, and looked after there.

use std::ffi::OsStr;
use std::os::fd::AsFd;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::Core;
use super::apply::{Done, make};
use super::inode::{Home, Homes, Inode, Operation, Seen, dirty};
use super::pass::{Pass, is_file};
use super::state::State;
use crate::backing::Stat;
use crate::message::{Ino, ROOT};
use crate::status::{Conflict, ConflictKind};

/// What there is where the backing directory had a directory.
enum Found {
    It,
    Nothing,
    Another,
}

impl State {
    /// A directory and those above it that are on the backing directory, the uppermost first.
    fn way_to(&self, dir: Ino) -> Vec<Ino> {
        let is_there = |ino: &Ino| self.inodes.get(ino).is_some_and(|inode| !inode.homes.is_empty());
        let mut way: Vec<Ino> = self.above(dir).filter(|ino| *ino != ROOT && is_there(ino)).collect();
        way.reverse();
        way
    }

    /// The directories that have to be there for an operation to be carried out.
    fn needed_by(&self, operation: &Operation) -> Vec<Ino> {
        let is_dir = |ino: &Ino| self.inodes.get(ino).is_some_and(Inode::is_dir);
        let mut needed = operation.directories();
        if operation.moves() {
            needed.extend(operation.subjects().into_iter().filter(is_dir));
        }
        needed
    }

    /// Has what was made under the name of what is unfinished be made again, since others have removed it. `false` if not all of it is
    /// here.
    fn unprepare(&mut self, ino: Ino) -> bool {
        let Some(inode) = self.inodes.get(&ino) else { return false };
        let end = inode.data().map_or(0, |data| data.backing_len);
        if !self.is_resident_before(ino, end) {
            return false;
        }
        self.all_is_dirty(ino);
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.homes = Homes::None;
            inode.seen = None;
        }
        self.journal_inode(ino);
        true
    }

    /// Notes that the backing directory has nothing of what is resident of a file, nor its attributes.
    pub fn all_is_dirty(&mut self, ino: Ino) {
        let mut valid = Vec::new();
        if let Some(data) = self.inodes.get(&ino).and_then(|inode| inode.data()) {
            valid.extend(data.extents.iter().map(|(number, extent)| (*number, extent.valid.clone())));
        }
        for (number, blocks) in valid {
            self.now_dirty(ino, number, &blocks);
            self.journal_dirty(ino, number, &blocks);
        }
        self.mark_dirty(ino, dirty::ALL | dirty::SIZE);
    }
}

impl Core {
    /// Carries out an operation that was refused because something was not there, if that was a directory that others have removed.
    ///
    /// # Errors
    /// The one that it was refused with, or another.
    pub(super) fn apply_again(
        &self,
        number: u64,
        operation: &Operation,
        refused: Errno,
    ) -> Result<(), Errno> {
        if let Operation::Unlink { dir, .. } = operation
            && self.is_missing(*dir)?
        {
            self.end(number, operation, &Done::default());
            return Ok(());
        }
        let needed = self.lock().needed_by(operation);
        let mut is_restored = false;
        for dir in needed {
            is_restored |= self.restore(dir)?;
        }
        if let Operation::Make { ino, dir, .. } = operation {
            is_restored |= self.is_unprepared(*ino)?;
            if is_restored {
                self.prepare(*ino, *dir)?;
            }
        }
        if !is_restored {
            return Err(refused);
        }
        let shown: Vec<Ino> = self.lock().shown_by(operation).collect();
        match self.write_back_all(&shown).first() {
            Some((_, error)) => Err(*error),
            None => self.apply_one(number, operation),
        }
    }

    /// Whether others have removed what was made under the name of what is unfinished, so that it is made again.
    fn is_unprepared(&self, ino: Ino) -> Result<bool, Errno> {
        let home = self.lock().inodes.get(&ino).and_then(|inode| inode.homes.first().cloned());
        let Some(home) = home else { return Ok(true) };
        if !matches!(self.found_at(ino, &home)?, Found::Nothing) {
            return Ok(false);
        }
        self.hold_one_still(ino)?;
        let done = self.lock().unprepare(ino);
        self.let_go(&[ino]);
        Ok(done)
    }

    /// Whether others have removed or replaced a directory, or one above it.
    fn is_missing(&self, dir: Ino) -> Result<bool, Errno> {
        let way = self.lock().way_to(dir);
        // One that was removed may still be open.
        way.iter().for_each(|ino| self.backing.close(*ino));
        for ino in way {
            let home = self.lock().inodes.get(&ino).and_then(|inode| inode.homes.first().cloned());
            if let Some(home) = home
                && !matches!(self.found_at(ino, &home)?, Found::It)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a directory again, and those above it, if others have removed them or put something else in their place. Whether there was
    /// any such.
    ///
    /// # Errors
    /// The backing directory's.
    pub(super) fn restore(&self, dir: Ino) -> Result<bool, Errno> {
        let way = self.lock().way_to(dir);
        // One that was removed may still be open.
        way.iter().for_each(|ino| self.backing.close(*ino));
        let mut any = false;
        for ino in way {
            self.hold_one_still(ino)?;
            let done = self.restore_held(ino);
            self.let_go(&[ino]);
            any |= done?;
        }
        Ok(any)
    }

    fn restore_held(&self, ino: Ino) -> Result<bool, Errno> {
        let home = self.lock().inodes.get(&ino).and_then(|inode| inode.homes.first().cloned());
        let Some(home) = home else { return Ok(false) };
        let is_replaced = match self.found_at(ino, &home)? {
            Found::It => return Ok(false),
            Found::Nothing => false,
            Found::Another => true,
        };
        let directory = self.backing_directory(home.dir)?;
        // What has the first of these names may be of a process that was killed before it could note that.
        let name = match is_replaced {
            true => self.place_beside(&home.name, ino, (home.dir, directory.as_fd()), |_| false)?.name(),
            false => home.name.to_os_string(),
        };
        let made = self.within(&[(home.dir, directory.as_fd())], || {
            make(directory.as_fd(), &name, FileType::Directory.as_raw_mode(), 0, None)
        })?;
        self.now_restored(ino, &home, &name, &made, is_replaced);
        Ok(true)
    }

    fn now_restored(&self, ino: Ino, home: &Home, name: &OsStr, made: &Stat, is_replaced: bool) {
        let mut state = self.lock();
        let path = state.shown(ino);
        let ours = Home { dir: home.dir, name: name.into() };
        let ours_path =
            state.home_path(&ours).map(|names| names.join(OsStr::new("/")).to_string_lossy().into_owned());
        let ours_path = ours_path.unwrap_or_default();
        tracing::warn!(
            path,
            ours = ours_path,
            "somebody else has removed or replaced this directory; it is made again for what was changed in it here"
        );
        let kind = if is_replaced { ConflictKind::Both } else { ConflictKind::Removed };
        state.add_conflict(Conflict { path, ours: Some(ours_path), kind });
        if is_replaced {
            state.now_aside(home.dir);
        }
        let knows_acls = state.keeps_acls;
        // To whom it belongs is not a user's to say.
        let owner = if self.backing.is_of_a_user() { 0 } else { dirty::OWNER };
        if let Some(inode) = state.inodes.get_mut(&ino) {
            inode.homes = Homes::One(ours);
            inode.aside |= is_replaced;
            inode.seen = Some(Seen::now(made));
            if inode.xattrs.is_none() && knows_acls {
                // Its list is gone with it, and may have been what the rights of its group came from.
                inode.mode &= !(libc::S_IRWXG | libc::S_IRWXO);
            }
            // Also if it has none: what is made inherits a default ACL.
            inode.xattrs.get_or_insert_with(|| crate::message::Xattrs::new().into());
        }
        state.note_gains(ino);
        state.mark_dirty(ino, dirty::MODE | dirty::XATTRS | dirty::TIMES | owner);
        state.journal_inode(ino);
    }

    fn found_at(&self, ino: Ino, home: &Home) -> Result<Found, Errno> {
        let directory = self.backing_directory(home.dir)?;
        let seen = self.lock().seen(ino);
        Ok(match self.look((home.dir, directory.as_fd()), &home.name)? {
            None => Found::Nothing,
            Some(found) if seen.is_none_or(|seen| seen.is(&found)) => Found::It,
            Some(_) => Found::Another,
        })
    }

    /// What becomes of a pass whose directory may not be there any more: that is made again for the data of a file. Where nothing but
    /// attributes was changed here, what others have done counts.
    ///
    /// # Errors
    /// As of a pass.
    pub(super) fn carry_missing(&self, pass: &mut Pass, refused: Errno) -> Result<(), Errno> {
        let home = self.lock().inodes.get(&pass.ino).and_then(|inode| inode.homes.first().cloned());
        let Some(home) = home else { return Err(refused) };
        let brings_data = is_file(pass.mode) && !pass.brings_attributes_alone();
        if brings_data {
            return if self.restore(home.dir)? { self.carry(pass) } else { Err(refused) };
        }
        if self.is_missing(home.dir)? || !matches!(self.found_at(pass.ino, &home)?, Found::It) {
            self.attributes_are_lost(pass);
            return Ok(());
        }
        Err(refused)
    }

    fn attributes_are_lost(&self, pass: &mut Pass) {
        // Of what is not there, nothing is to be seen.
        pass.orphan = true;
        if pass.bits & !dirty::TIMES == 0 {
            return;
        }
        let mut state = self.lock();
        let path = state.shown(pass.ino);
        tracing::warn!(
            path,
            "somebody else has removed this meanwhile; attributes that were changed here are lost"
        );
        state.add_conflict(Conflict { path, ours: None, kind: ConflictKind::Attributes });
    }
}
