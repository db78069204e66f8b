//! Bringing to the backing directory what a pass has: data, holes, size and attributes. The times come last, because everything else
//! changes them.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use super::Core;
use super::blocks::{BLOCK, Blocks};
use super::inode::{Home, Homes, Seen, dirty};
use super::narrow::narrow;
use super::pass::{Pass, is_file};
use super::turns::may_be_missing;
use super::unfinished::unfinished;
use crate::backing::{self, Stat};
use crate::message::{Ino, ROOT, Time, Xattrs};
use crate::settings::EXTENT;
use crate::status::{Conflict, ConflictKind};
use crate::store;

impl Core {
    /// Writes what a pass has; it is not synced.
    pub fn carry(&self, pass: &mut Pass) -> Result<(), Errno> {
        match self.carry_there(pass) {
            Err(error) if may_be_missing(error) && !pass.orphan => self.carry_missing(pass, error),
            other => other,
        }
    }

    fn carry_there(&self, pass: &mut Pass) -> Result<(), Errno> {
        if pass.orphan {
            return self.carry_orphan(pass);
        }
        let entry = match self.entry_for_pass(pass.ino) {
            Ok(entry) => entry,
            Err(Errno::STALE) if is_file(pass.mode) => return self.set_aside(pass),
            Err(error) => return Err(error),
        };
        let mut found = backing::stat(entry.as_fd(), OsStr::new(""))?;
        if is_file(pass.mode) && pass.seen.is_some_and(|seen| !seen.is_as_left(&found)) {
            return self.set_aside(pass);
        }
        let writes_data = !pass.extents.is_empty() || pass.cut || found.size != pass.size;
        if is_file(pass.mode) && writes_data {
            let wide = self.lock().wide_above_file(pass.ino);
            self.narrow_directories(&wide).map_err(|(_, error)| error)?;
            let file = Arc::new(self.reopen(pass.ino, &entry, true)?);
            let is_made = {
                let mut state = self.lock();
                state.begin_changes(pass);
                state.inodes.get(&pass.ino).is_some_and(|inode| inode.made_by != 0)
            };
            let is_its = (found.uid, found.gid) == (pass.uid, pass.gid);
            if is_made && found.size == 0 && pass.bits & dirty::OWNER != 0 && !is_its {
                self.give_to_owner(pass, file.as_fd());
                found = backing::stat(entry.as_fd(), OsStr::new(""))?;
            }
            narrow(pass, entry.as_fd(), &found)?;
            self.carry_data(pass, &file)?;
            pass.file = Some(file);
        }
        self.lock().begin_changes(pass);
        let is_dir = FileType::from_raw_mode(pass.mode) == FileType::Directory;
        let _held = (is_dir && self.backing.is_of_a_user()).then(|| self.backing.hold_modes());
        carry_attributes(pass, &entry, self.backing.uid())
    }

    /// Gives a file that was just made, has no data and is its owner's alone to the one who is to have it: so a disk counts what is
    /// written as that owner's, and refuses what there is no quota for. Not all do when a file is given away that has data already. If
    /// it is refused, that is told when its attributes are brought.
    fn give_to_owner(&self, pass: &Pass, file: BorrowedFd<'_>) {
        let (uid, gid) = (Uid::from_raw(pass.uid), Gid::from_raw(pass.gid));
        // A user's own are that user's.
        if self.backing.uid() == 0
            && let Err(error) = rustix::fs::fchown(file, Some(uid), Some(gid))
        {
            tracing::debug!(pass.ino, %error, "can't give a new file to its owner");
        }
    }

    /// What is to be written to. A file that has lost all names that are known here has others.
    pub fn entry_for_pass(&self, ino: Ino) -> Result<OwnedFd, Errno> {
        let open = {
            let state = self.lock();
            let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
            let is_nowhere = inode.homes.is_empty() && !inode.is_dir();
            is_nowhere.then(|| inode.data().and_then(|data| data.orphan.clone()))
        };
        match open {
            None => {}
            Some(Some(open)) => {
                return open
                    .as_fd()
                    .try_clone_to_owned()
                    .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE));
            }
            Some(None) => self.find_home(ino)?,
        }
        self.backing_entry(ino)
    }

    fn carry_data(&self, pass: &mut Pass, to: &File) -> Result<(), Errno> {
        // The pass itself is changed as this goes.
        let extents = std::mem::take(&mut pass.extents);
        let done = self.carry_extents(pass, &extents, to);
        pass.extents = extents;
        done
    }

    fn carry_extents(&self, pass: &mut Pass, extents: &[(u32, Blocks)], to: &File) -> Result<(), Errno> {
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        if pass.cut {
            // What was cut off here must not come back when the file grows there.
            rustix::fs::ftruncate(to, pass.backing_len.min(pass.size))?;
        }
        let from = if extents.is_empty() { None } else { Some(self.store.file(pass.ino).map_err(errno)?) };
        let mut length = to.metadata().map_err(errno)?.len();
        let mut buffer = Vec::new();
        for (number, blocks) in extents {
            let first = u64::from(*number) * EXTENT;
            for (begin, end) in blocks.runs() {
                let (begin, end) =
                    (first + u64::from(begin) * BLOCK, (first + u64::from(end) * BLOCK).min(pass.size));
                let Some(from) = &from else { continue };
                let parts = store::segments(&**from, begin, end).map_err(errno)?;
                self.store.check()?;
                for part in parts {
                    let size = part.end - part.begin;
                    if part.data {
                        buffer.resize(size as usize, 0);
                        store::read(from, part.begin, &mut buffer).map_err(errno)?;
                        self.store.check()?;
                    }
                    let (is_cut, has_lost_rights) = {
                        let state = self.lock();
                        (state.was_cut_during(pass), state.has_lost_rights_during(pass))
                    };
                    if is_cut {
                        // What was found may be the zeros of a file that is cut, which has never had them. All of it comes again.
                        return Ok(());
                    }
                    if has_lost_rights {
                        // What was found may have been written since, and is not for whom had them.
                        self.narrow_again(pass, to)?;
                    }
                    if part.data {
                        to.write_all_at(&buffer, part.begin).map_err(errno)?;
                        pass.has_data = true;
                        length = length.max(part.end);
                    } else if part.begin < length {
                        // The last block of a file goes as a whole.
                        let part_end =
                            if part.end < length { part.end } else { length.next_multiple_of(BLOCK) };
                        punch_or_fill(to, part.begin, part_end)?;
                    }
                    pass.written += size;
                }
            }
        }
        if to.metadata().map_err(errno)?.len() != pass.size && !self.lock().was_cut_during(pass) {
            rustix::fs::ftruncate(to, pass.size)?;
        }
        Ok(())
    }

    /// A file that nobody can reach by a name, and that takes more room than there is.
    fn carry_orphan(&self, pass: &mut Pass) -> Result<(), Errno> {
        let file = match pass.file.take() {
            Some(file) => file,
            None => {
                let has_home = self.lock().inodes.get(&pass.ino).is_some_and(|inode| !inode.homes.is_empty());
                if has_home {
                    // Its removal there is still to come, and then it stays open.
                    let entry = self.backing_entry(pass.ino)?;
                    Arc::new(self.reopen(pass.ino, &entry, true)?)
                } else {
                    let flags =
                        OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    let directory = self.backing_directory(ROOT)?;
                    let name = unfinished(&self.store, pass.ino);
                    let file = self.within(&[(ROOT, directory.as_fd())], || {
                        rustix::fs::openat(&directory, name.as_os_str(), flags, Mode::RUSR | Mode::WUSR)
                    })?;
                    rustix::fs::unlinkat(&directory, name.as_os_str(), AtFlags::empty())?;
                    self.give_to_owner(pass, file.as_fd());
                    Arc::new(File::from(file))
                }
            }
        };
        self.carry_data(pass, &file)?;
        pass.file = Some(file);
        Ok(())
    }

    /// Somebody else has changed a file that is dirty here: theirs stays, ours gets a name beside it.
    ///
    /// What of ours is not resident was never changed here, and is as theirs is.
    fn set_aside(&self, pass: &mut Pass) -> Result<(), Errno> {
        let (is_orphan, is_open) = (self.lock().inodes.get(&pass.ino))
            .map_or((true, false), |inode| (inode.is_orphan(), inode.handles > 0));
        if is_orphan && !is_open {
            // It is to be removed, and nobody has it any more: theirs stays as it is, and ours is not missed.
            pass.orphan = true;
            return Ok(());
        }
        let home = self
            .lock()
            .inodes
            .get(&pass.ino)
            .and_then(|inode| inode.homes.first().cloned())
            .ok_or(Errno::STALE)?;
        let directory = self.backing_directory(home.dir)?;
        let only_attributes = pass.brings_attributes_alone();
        let theirs = match backing::open_path(directory.as_fd(), &home.name) {
            Ok(theirs) => Some(theirs),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(error),
        };
        if only_attributes {
            // Nothing of theirs is ours; and what they have removed is not made again without its data.
            let found = match &theirs {
                Some(theirs) => {
                    let found = backing::stat(theirs.as_fd(), OsStr::new(""))?;
                    Some(Seen::now(&found))
                }
                None => pass.seen,
            };
            let mut state = self.lock();
            let path = state.shown(pass.ino);
            tracing::warn!(
                path,
                "somebody else has changed this meanwhile; attributes that were changed here are not taken over"
            );
            if let Some(inode) = state.inodes.get_mut(&pass.ino) {
                inode.seen = found;
            }
            state.add_conflict(Conflict { path, ours: None, kind: ConflictKind::Attributes });
            pass.seen = found;
            // Of what is not there, nothing is to be seen.
            pass.orphan = theirs.is_none();
            return Ok(());
        }
        // What is not resident: theirs, or what they have removed, if it is still open.
        let rest = match &theirs {
            _ if pass.backing_len == 0 => None,
            Some(theirs) => {
                let found = backing::stat(theirs.as_fd(), OsStr::new(""))?;
                // Another file may be one that the owner of ours must not read.
                let may_be_read =
                    !self.backing.is_for_others() || pass.seen.is_some_and(|seen| seen.is(&found));
                match is_file(found.mode) && may_be_read {
                    true => Some(Arc::new(self.reopen(pass.ino, theirs, false)?)),
                    false => self.backing.known_file(pass.ino),
                }
            }
            None => self.backing.known_file(pass.ino),
        };
        let xattrs = self.xattrs_aside(pass, theirs.as_ref(), rest.as_deref())?;
        let is_whole = rest.is_some() || self.lock().is_resident_before(pass.ino, pass.backing_len);
        let takes_its_name = theirs.is_none() && is_whole;
        let mut name =
            if takes_its_name { home.name.to_os_string() } else { self.beside(&home.name, pass.ino) };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if !takes_its_name {
            // What has this name is of a process that was killed before it could note that, unless somebody else has guessed it.
            let is_anothers = |found: Stat| self.backing.is_for_others() && found.uid != pass.uid;
            while self.look((home.dir, directory.as_fd()), &name)?.is_some_and(is_anothers) {
                let next = self.beside(&name, pass.ino);
                if next == name {
                    // It can't become longer.
                    return Err(Errno::EXIST);
                }
                name = next;
            }
            match self.within(&[(home.dir, directory.as_fd())], || {
                rustix::fs::unlinkat(&directory, name.as_os_str(), AtFlags::empty())
            }) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        let ours = self.within(&[(home.dir, directory.as_fd())], || {
            rustix::fs::openat(&directory, name.as_os_str(), flags, Mode::RUSR | Mode::WUSR)
        })?;
        self.give_to_owner(pass, ours.as_fd());
        let mut ours = File::from(ours);
        if let Some(rest) = rest {
            let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
            copy_beginning(&rest, pass.backing_len, &mut ours).map_err(errno)?;
        }
        let made = backing::stat(ours.as_fd(), OsStr::new(""))?;
        let mut state = self.lock();
        let path = state.shown(pass.ino);
        let seen = Seen::now(&made);
        let ours_path =
            state.home_path(&Home { dir: home.dir, name: name.as_os_str().into() })?.join(OsStr::new("/"));
        let ours_path = ours_path.to_string_lossy().into_owned();
        tracing::warn!(path, ours = ours_path, "somebody else has changed this meanwhile; both are kept");
        if theirs.is_none() && !is_whole {
            tracing::warn!(
                ours = ours_path,
                "what was not in the cache is gone with theirs, and is zeros in ours"
            );
        }
        let kind = if theirs.is_some() { ConflictKind::Both } else { ConflictKind::Removed };
        state.add_conflict(Conflict { path, ours: Some(ours_path), kind });
        let mut valid = Vec::new();
        state.now_aside(home.dir);
        if let Some(inode) = state.inodes.get_mut(&pass.ino) {
            inode.homes = Homes::One(Home { dir: home.dir, name: name.into() });
            inode.aside = true;
            inode.seen = Some(seen);
            inode.dirty |= dirty::ALL | dirty::SIZE;
            // Also if it has none: what is made inherits the directory's default ACL.
            inode.xattrs.get_or_insert_with(|| xattrs.into());
            if let Some(data) = inode.data_mut() {
                valid = data.extents.iter().map(|(number, extent)| (*number, extent.valid.clone())).collect();
            }
        }
        for (number, blocks) in valid {
            state.now_dirty(pass.ino, number, &blocks);
            state.journal_dirty(pass.ino, number, &blocks);
        }
        state.journal_inode(pass.ino);
        drop(state);
        self.backing.close(pass.ino);
        // The next pass finds the new place, and brings all of it.
        Err(Errno::AGAIN)
    }

    /// The extended attributes of a file that is put beside others' work, of which nobody has asked here for any: those that the file
    /// has there, if it is still found.
    fn xattrs_aside(
        &self,
        pass: &Pass,
        theirs: Option<&OwnedFd>,
        rest: Option<&File>,
    ) -> Result<Xattrs, Errno> {
        if self.lock().inodes.get(&pass.ino).is_some_and(|inode| inode.xattrs.is_some()) {
            return Ok(Xattrs::new());
        }
        for open in [theirs.map(OwnedFd::as_fd), rest.map(File::as_fd)].into_iter().flatten() {
            let found = backing::stat(open, OsStr::new(""))?;
            if pass.seen.is_some_and(|seen| seen.is(&found)) {
                return backing::xattrs(open);
            }
        }
        Ok(Xattrs::new())
    }
}

/// Copies the first bytes of a file that others may be reading, as many as there are.
fn copy_beginning(from: &File, length: u64, to: &mut File) -> std::io::Result<()> {
    let mut buffer = vec![0; EXTENT as usize];
    let mut at = 0;
    while at < length {
        let wanted = (length - at).min(EXTENT) as usize;
        let read = from.read_at(&mut buffer[..wanted], at)?;
        if read == 0 {
            break;
        }
        to.write_all_at(&buffer[..read], at)?;
        at += read as u64;
    }
    Ok(())
}

fn punch_or_fill(file: &File, begin: u64, end: u64) -> Result<(), Errno> {
    match rustix::fs::fallocate(
        file,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        begin,
        end - begin,
    ) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            // The size stays, too.
            let length =
                file.metadata().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?.len();
            let end = end.min(length);
            if begin >= end {
                return Ok(());
            }
            let zeros = vec![0; (end - begin).min(EXTENT) as usize];
            let mut at = begin;
            while at < end {
                let count = zeros.len().min((end - at) as usize);
                file.write_all_at(&zeros[..count], at)
                    .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
                at += count as u64;
            }
            Ok(())
        }
        other => other,
    }
}

/// Gives an entry the attributes that it lacks. One that is refused does not keep the others.
fn carry_attributes(pass: &mut Pass, entry: &OwnedFd, user: u32) -> Result<(), Errno> {
    let path = backing::by_descriptor(entry.as_fd());
    let found = backing::stat(entry.as_fd(), OsStr::new(""))?;
    let is_symlink = FileType::from_raw_mode(pass.mode) == FileType::Symlink;
    // Not the right users could use a mode that others were meant to have.
    let mut is_private = false;
    if pass.bits & dirty::OWNER != 0 && (found.uid, found.gid) != (pass.uid, pass.gid) {
        let uid = (found.uid != pass.uid).then(|| Uid::from_raw(pass.uid));
        let gid = (found.gid != pass.gid).then(|| Gid::from_raw(pass.gid));
        if let Err(error) = rustix::fs::chownat(entry, "", uid, gid, AtFlags::EMPTY_PATH) {
            pass.refuse(dirty::OWNER, error);
            is_private = true;
        }
    }
    if let Some(xattrs) = &pass.xattrs {
        for (name, error) in backing::set_xattrs(entry.as_fd(), xattrs)? {
            pass.refuse(dirty::XATTRS, error);
            is_private |= name == crate::acl::ACCESS;
        }
    }
    // Every other change may have taken set-id bits away, or the group's bits for an ACL's.
    let changes_mode = pass.bits & (dirty::MODE | dirty::OWNER | dirty::XATTRS) != 0;
    if !is_symlink && changes_mode {
        // A directory that could still give rights has not lost them yet: that is done before anything new appears below it.
        let lacks = dirty::MODE | pass.bits & dirty::WIDE;
        if is_private {
            pass.refused = pass.refused.map(|(bits, error)| (bits | lacks, error));
        } else if let Err(error) = rustix::fs::chmod(path.as_str(), Mode::from_raw_mode(pass.mode & 0o7777)) {
            pass.refuse(lacks, error);
        }
    }
    let timespec = |time: Time| Timespec { tv_sec: time.secs, tv_nsec: time.nanos.into() };
    let times = Timestamps { last_access: timespec(pass.atime), last_modification: timespec(pass.mtime) };
    match rustix::fs::utimensat(rustix::fs::CWD, path.as_str(), &times, AtFlags::empty()) {
        Ok(()) => {}
        // Who may write to something, and does not own it, can't set its times. They are those of the write there.
        Err(Errno::PERM | Errno::ACCESS) if user != 0 && found.uid != user => {}
        Err(error) => pass.refuse(dirty::TIMES, error),
    }
    Ok(())
}
