//! Requests about names and attributes. All are answered from RAM, once what the backing directory knows of them has been read.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::inode::{Inode, Kind, Operation, Use, dirty};
use super::state::{State, Stop};
use super::unfinished::UNFINISHED;
use super::wait::Need;
use crate::acl::{self, Acl};
use crate::message::Xattrs;
use crate::message::{Attributes, Caller, Change, Ino, Listed, New, Replace, SetTime, Time};
use crate::store::Store;

/// The size that programs see of a directory that is not on the backing directory yet: as most filesystems have it.
const DIRECTORY_SIZE: u64 = 4096;

/// Permission bits, with the set-id and sticky ones.
const PERMISSIONS: u32 = 0o7777;

const XATTR_CREATE: i32 = libc::XATTR_CREATE;
const XATTR_REPLACE: i32 = libc::XATTR_REPLACE;

impl State {
    /// What a name in a directory leads to.
    ///
    /// # Errors
    /// The name has to be looked up on the backing directory first; what [`directory`](State::directory) says.
    pub fn entry(&self, dir: Ino, name: &OsStr) -> Result<Option<Ino>, Stop> {
        if name.len() > self.longest_name {
            return Err(Errno::NAMETOOLONG.into());
        }
        let directory = self.directory(dir)?;
        match directory.entries.get(name) {
            Some(ino) => Ok(Some(*ino)),
            None if directory.complete || directory.gone.contains(name) => Ok(None),
            // Of these nothing is taken over from the backing directory.
            None if name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) => Ok(None),
            None => Err(Stop::Wait(Need::Name(dir, name.to_owned()))),
        }
    }

    fn existing(&self, dir: Ino, name: &OsStr) -> Result<Ino, Stop> {
        self.entry(dir, name)?.ok_or(Stop::Error(Errno::NOENT))
    }

    /// A directory in which names can be made.
    fn alive(&self, dir: Ino) -> Result<(), Stop> {
        self.directory(dir)?;
        if self.inode(dir)?.is_orphan() { Err(Errno::NOENT.into()) } else { Ok(()) }
    }

    fn room_in_log(&self) -> Result<(), Stop> {
        if self.is_log_full() { Err(Stop::Wait(Need::Log)) } else { Ok(()) }
    }

    fn is_empty(&self, dir: Ino) -> Result<bool, Stop> {
        let directory = self.directory(dir)?;
        if !directory.entries.is_empty() {
            return Ok(false);
        }
        if directory.complete { Ok(true) } else { Err(Stop::Wait(Need::Listing(dir))) }
    }

    /// Looks a name up, and counts a reference.
    pub fn lookup(&mut self, parent: Ino, name: &OsStr) -> Result<Ino, Stop> {
        let ino = self.existing(parent, name)?;
        let inode = self.inode_mut(ino)?;
        inode.references += 1;
        inode.used = Use::Since;
        Ok(ino)
    }

    /// Looks names up, and counts a reference for each that is there; for none if there is an error.
    pub fn lookups(&mut self, parent: Ino, names: &[OsString]) -> Result<Vec<Option<Attributes>>, Stop> {
        let found = names.iter().map(|name| self.entry(parent, name)).collect::<Result<Vec<_>, _>>()?;
        let attributes = |ino: &Option<Ino>| ino.map(|ino| self.attributes(ino)).transpose();
        let all = found.iter().map(attributes).collect::<Result<Vec<_>, _>>()?;
        for ino in found.into_iter().flatten() {
            self.inode_mut(ino)?.references += 1;
        }
        Ok(all)
    }

    /// All entries of a directory.
    pub fn list(&mut self, dir: Ino) -> Result<Vec<Listed>, Stop> {
        let directory = self.directory(dir)?;
        if !directory.complete {
            return Err(Stop::Wait(Need::Listing(dir)));
        }
        let kind = |ino: &Ino| self.inodes.get(ino).map_or(0, |inode| inode.mode & libc::S_IFMT);
        let listed = |(name, ino): (&Arc<OsStr>, &Ino)| Listed {
            name: name.to_os_string(),
            ino: *ino,
            kind: kind(ino),
        };
        Ok(directory.entries.iter().map(listed).collect())
    }

    /// The extended attributes of an inode.
    pub fn xattrs(&self, ino: Ino) -> Result<&Xattrs, Stop> {
        self.inode(ino)?.xattrs.as_deref().ok_or(Stop::Wait(Need::Xattrs(ino)))
    }

    /// A default ACL that new entries of a directory inherit.
    fn default_acl(&self, dir: Ino) -> Result<Option<Acl>, Stop> {
        if !self.keeps_acls {
            return Ok(None);
        }
        Ok(self.xattrs(dir)?.get(OsStr::new(acl::DEFAULT)).and_then(|acl| Acl::parse(acl)))
    }

    /// Makes something new; returns its number. Without a reference.
    #[allow(clippy::too_many_arguments, reason = "as mknod(2) has")]
    pub fn make(
        &mut self,
        caller: Caller,
        parent: Ino,
        name: &OsStr,
        new: &New,
        mode: u32,
        umask: u32,
    ) -> Result<Ino, Stop> {
        self.alive(parent)?;
        if self.entry(parent, name)?.is_some() {
            return Err(Errno::EXIST.into());
        }
        if name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
            return Err(Errno::INVAL.into());
        }
        let inherits = self.default_acl(parent)?;
        self.room_in_log()?;
        let (kind, rdev) = match new {
            New::File => (libc::S_IFREG, 0),
            New::Directory => (libc::S_IFDIR, 0),
            New::Symlink(_) => (libc::S_IFLNK, 0),
            New::Special(kind, rdev) => (kind & libc::S_IFMT, *rdev),
        };
        if !matches!(
            FileType::from_raw_mode(kind),
            FileType::RegularFile
                | FileType::Directory
                | FileType::Symlink
                | FileType::Fifo
                | FileType::Socket
                | FileType::BlockDevice
                | FileType::CharacterDevice
        ) {
            return Err(Errno::INVAL.into());
        }
        let at = Time::now();
        let above = self.inode(parent)?;
        let (dev, above_mode, above_gid) = (above.dev, above.mode, above.gid);
        let mut xattrs = Xattrs::new();
        let mut permissions = mode & PERMISSIONS;
        match &inherits {
            _ if kind == libc::S_IFLNK => permissions = 0o777,
            None => permissions &= !umask,
            Some(default) => {
                let access = default.inherited(permissions);
                permissions = permissions & !0o777 | access.mode();
                if !access.is_a_mode() {
                    xattrs.insert(acl::ACCESS.into(), access.to_bytes());
                }
                if kind == libc::S_IFDIR {
                    xattrs.insert(acl::DEFAULT.into(), default.to_bytes());
                }
            }
        }
        let mut inode = Inode::new(kind | permissions, dev);
        inode.uid = caller.uid;
        inode.gid = caller.gid;
        if above_mode & libc::S_ISGID != 0 {
            inode.gid = above_gid;
            if kind == libc::S_IFDIR {
                inode.mode |= libc::S_ISGID;
            }
        }
        inode.set_rdev(rdev);
        (inode.atime, inode.mtime, inode.ctime) = (at, at, at);
        match (&mut inode.kind, new) {
            (Kind::Directory(directory), _) => {
                directory.complete = true;
                directory.parent = parent;
                inode.nlink = 2;
                inode.size = DIRECTORY_SIZE;
            }
            (Kind::Symlink(target), New::Symlink(to)) => {
                inode.size = to.len() as u64;
                *target = Some(Box::new(to.clone()));
            }
            _ => {}
        }
        let bits = dirty::ALL & if xattrs.is_empty() { !dirty::XATTRS } else { !0 };
        inode.xattrs = Some(xattrs.into());
        let ino = self.new_ino(None);
        self.insert(ino, inode);
        let operation = Operation::Make { ino, dir: parent, name: name.to_owned() };
        self.mark_dirty(ino, bits);
        self.journal_before(&operation);
        self.perform(&operation, at)?;
        let number = self.push(operation);
        self.inode_mut(ino)?.made_by = number;
        self.mark_dirty(parent, dirty::TIMES);
        self.journal_operation(number);
        Ok(ino)
    }

    /// Gives a file a further name.
    pub fn link(&mut self, ino: Ino, parent: Ino, name: &OsStr) -> Result<(), Stop> {
        self.alive(parent)?;
        if self.entry(parent, name)?.is_some() {
            return Err(Errno::EXIST.into());
        }
        self.room_in_log()?;
        let inode = self.inode(ino)?;
        if inode.is_dir() {
            return Err(Errno::PERM.into());
        }
        if name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
            return Err(Errno::INVAL.into());
        }
        if inode.is_orphan() {
            return Err(Errno::NOENT.into());
        }
        if inode.dev != self.inode(parent)?.dev {
            return Err(Errno::XDEV.into());
        }
        self.check_project(ino, parent)?;
        self.carry_out(Operation::Link { ino, dir: parent, name: name.to_owned() })
    }

    /// Removes a name; of a directory only if `directory`.
    pub fn unlink(&mut self, store: &Store, parent: Ino, name: &OsStr, directory: bool) -> Result<(), Stop> {
        let ino = self.existing(parent, name)?;
        match (self.inode(ino)?.is_dir(), directory) {
            (true, false) => return Err(Errno::ISDIR.into()),
            (false, true) => return Err(Errno::NOTDIR.into()),
            _ => {}
        }
        if directory && !self.is_empty(ino)? {
            return Err(Errno::NOTEMPTY.into());
        }
        let inode = self.inode(ino)?;
        // Nothing but its making is in the log, and nothing of it is there yet under another name: neither has to be done.
        let made_by = inode.made_by;
        let last_name = inode.nlink == if directory { 2 } else { 1 };
        let operation = Operation::Unlink { ino, dir: parent, name: name.to_owned() };
        let is_only_made = made_by > self.batch_end
            && made_by >= self.barrier
            && inode.pending == 1
            && last_name
            && inode.homes.is_empty();
        let unneeded = if is_only_made { Some(made_by) } else { self.stuck_link(ino, parent, name) };
        if let Some(number) = unneeded {
            let at = Time::now();
            self.perform(&operation, at)?;
            let index = (number - self.first_pending) as usize;
            if let Some(pending) = self.log.get_mut(index) {
                pending.cancelled = true;
            }
            let inode = self.inode_mut(ino)?;
            inode.pending -= 1;
            if is_only_made {
                inode.made_by = 0;
            }
            if let Ok(parent) = self.inode_mut(parent) {
                parent.pending -= 1;
            }
            self.mark_dirty(parent, dirty::TIMES);
            self.failing.remove(&ino);
            self.waits.wake(&Need::Synced(parent));
            self.journal_cancelled(number, operation, at);
        } else {
            self.room_in_log()?;
            self.carry_out(operation)?;
        }
        self.remove_if_unused(ino, store);
        Ok(())
    }

    /// A further name that can't be made on the backing directory, as the operation that is to make it.
    fn stuck_link(&self, ino: Ino, dir: Ino, name: &OsStr) -> Option<u64> {
        let is_it = |number: &u64| {
            let pending =
                number.checked_sub(self.first_pending).and_then(|index| self.log.get(index as usize));
            pending.is_some_and(|pending| {
                let link = Operation::Link { ino, dir, name: name.to_owned() };
                !pending.cancelled && pending.operation == link
            })
        };
        self.stuck.keys().copied().filter(|number| *number > self.batch_end).find(is_it)
    }

    /// Renames.
    pub fn rename(
        &mut self,
        store: &Store,
        (dir, name): (Ino, &OsStr),
        (to_dir, to_name): (Ino, &OsStr),
        replace: Replace,
    ) -> Result<(), Stop> {
        self.alive(to_dir)?;
        let ino = self.existing(dir, name)?;
        let over = self.entry(to_dir, to_name)?;
        if to_name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
            return Err(Errno::INVAL.into());
        }
        self.room_in_log()?;
        if self.inode(ino)?.dev != self.inode(to_dir)?.dev || self.inode(dir)?.dev != self.inode(to_dir)?.dev
        {
            return Err(Errno::XDEV.into());
        }
        let (name, to_name) = (name.to_owned(), to_name.to_owned());
        match (over, replace) {
            (Some(_), Replace::No) => return Err(Errno::EXIST.into()),
            (None, Replace::Exchange) => return Err(Errno::NOENT.into()),
            (Some(other), _) if other == ino => return Ok(()),
            (Some(other), Replace::Exchange) => {
                if self.inode(other)?.dev != self.inode(dir)?.dev {
                    return Err(Errno::XDEV.into());
                }
                self.check_project(ino, to_dir)?;
                self.check_project(other, dir)?;
                return self.carry_out(Operation::Exchange { ino, dir, name, other, to_dir, to_name });
            }
            (Some(other), Replace::Yes) => {
                match (self.inode(ino)?.is_dir(), self.inode(other)?.is_dir()) {
                    (true, false) => return Err(Errno::NOTDIR.into()),
                    (false, true) => return Err(Errno::ISDIR.into()),
                    (true, true) if !self.is_empty(other)? => return Err(Errno::NOTEMPTY.into()),
                    _ => {}
                }
                self.check_project(ino, to_dir)?;
                self.carry_out(Operation::Rename { ino, dir, name, to_dir, to_name, over })?;
                self.remove_if_unused(other, store);
            }
            (None, _) => {
                self.check_project(ino, to_dir)?;
                self.carry_out(Operation::Rename { ino, dir, name, to_dir, to_name, over })?;
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, operation: Operation) -> Result<(), Stop> {
        self.journal_before(&operation);
        self.perform(&operation, Time::now())?;
        for dir in operation.directories() {
            self.mark_dirty(dir, dirty::TIMES);
        }
        let number = self.push(operation);
        self.journal_operation(number);
        Ok(())
    }

    /// Changes the names as an operation says; what it needs was checked. Recovery does the same again.
    ///
    /// # Errors
    /// `ESTALE` if an inode is not there: a defect, or a journal that does not fit.
    pub fn perform(&mut self, operation: &Operation, at: Time) -> Result<(), Stop> {
        match operation {
            Operation::Make { ino, dir, name } => {
                self.put_name(*dir, name, *ino)?;
                if self.inode(*ino)?.is_dir() {
                    self.inode_mut(*dir)?.nlink += 1;
                }
            }
            Operation::Link { ino, dir, name } => {
                self.put_name(*dir, name, *ino)?;
                let inode = self.inode_mut(*ino)?;
                inode.nlink += 1;
                inode.ctime = at;
            }
            Operation::Unlink { ino, dir, name } => {
                self.take_name(*dir, name)?;
                self.lose_name(*ino, *dir, at)?;
            }
            Operation::Rename { ino, dir, name, to_dir, to_name, over } => {
                self.take_name(*dir, name)?;
                if let Some(over) = over {
                    self.lose_name(*over, *to_dir, at)?;
                }
                self.put_name(*to_dir, to_name, *ino)?;
                self.moved(*ino, *dir, *to_dir, at)?;
            }
            Operation::Exchange { ino, dir, name, other, to_dir, to_name } => {
                self.put_name(*dir, name, *other)?;
                self.put_name(*to_dir, to_name, *ino)?;
                self.moved(*ino, *dir, *to_dir, at)?;
                self.moved(*other, *to_dir, *dir, at)?;
            }
        }
        for dir in operation.directories() {
            let directory = self.inode_mut(dir)?;
            (directory.mtime, directory.ctime) = (at, at);
        }
        Ok(())
    }

    fn put_name(&mut self, dir: Ino, name: &OsStr, ino: Ino) -> Result<(), Stop> {
        self.put_entry(dir, &name.into(), ino)
    }

    fn take_name(&mut self, dir: Ino, name: &OsStr) -> Result<(), Stop> {
        let is_gone = self.is_recovering || !self.directory(dir)?.complete;
        self.take_entry(dir, name, is_gone)
    }

    fn lose_name(&mut self, ino: Ino, dir: Ino, at: Time) -> Result<(), Stop> {
        let barrier = self.barrier;
        let inode = self.inode_mut(ino)?;
        inode.ctime = at;
        // The only operation about it so far is the one that makes it.
        inode.needless = inode.nlink == 1 && inode.pending == 1 && inode.made_by >= barrier;
        if inode.is_dir() {
            inode.nlink = 0;
            let above = self.inode_mut(dir)?;
            above.nlink = above.nlink.saturating_sub(1);
        } else {
            inode.nlink = inode.nlink.saturating_sub(1);
        }
        // Nothing of what has no name any more has to be on a disk.
        self.waits.wake(&Need::Synced(ino));
        Ok(())
    }

    fn moved(&mut self, ino: Ino, from: Ino, to: Ino, at: Time) -> Result<(), Stop> {
        let inode = self.inode_mut(ino)?;
        inode.ctime = at;
        if let Kind::Directory(directory) = &mut inode.kind {
            directory.parent = to;
            if from != to {
                self.inode_mut(from)?.nlink -= 1;
                self.inode_mut(to)?.nlink += 1;
            }
        }
        Ok(())
    }

    /// Changes attributes, the size excepted.
    pub fn change(&mut self, caller: Caller, ino: Ino, change: &Change) -> Result<(), Stop> {
        let now = Time::now();
        // The ACL says what the mode says, so both change.
        let acl = match change.mode {
            Some(mode) if self.keeps_acls && !matches!(self.inode(ino)?.kind, Kind::Symlink(_)) => {
                let acl = self.xattrs(ino)?.get(OsStr::new(acl::ACCESS)).and_then(|acl| Acl::parse(acl));
                acl.map(|acl| acl.with_mode(mode).to_bytes())
            }
            _ => None,
        };
        let inode = self.inode_mut(ino)?;
        // chown(2) to nobody else takes set-id bits away like any other. The kernel asks for no change at all then, and has not looked
        // whose the file is; nor if it asks before it changes data, which takes them away by itself.
        let is_empty_chown = *change == Change::default();
        if is_empty_chown && caller.uid != 0 && caller.uid != inode.uid {
            return Ok(());
        }
        let mut bits = 0;
        let before = (inode.mode, inode.uid, inode.gid);
        if let Some(mode) = change.mode {
            inode.mode = inode.mode & libc::S_IFMT | mode & PERMISSIONS;
            bits |= dirty::MODE;
        }
        if change.uid.is_some() || change.gid.is_some() || is_empty_chown {
            inode.uid = change.uid.unwrap_or(inode.uid);
            inode.gid = change.gid.unwrap_or(inode.gid);
            bits |= dirty::OWNER;
            if !inode.is_dir() && change.mode.is_none() {
                inode.mode = caller.mode_after_chown(inode.mode);
            }
            // chown(2) on the backing directory takes set-id bits away, too.
            bits |= dirty::MODE;
        }
        let time = |time| match time {
            SetTime::Now => now,
            SetTime::To(time) => time,
        };
        if change.atime.is_some() || change.mtime.is_some() {
            inode.atime = change.atime.map_or(inode.atime, time);
            inode.mtime = change.mtime.map_or(inode.mtime, time);
            bits |= dirty::TIMES;
        }
        inode.ctime = now;
        let changes_acl = acl.is_some();
        if let Some(acl) = acl
            && let Some(xattrs) = &mut inode.xattrs
        {
            xattrs.insert(acl::ACCESS.into(), acl);
            bits |= dirty::XATTRS;
        }
        let (mode, uid, gid) = before;
        // Where a directory has become sticky, others can't remove or replace what is not theirs any more.
        let is_sticky = !mode & inode.mode & libc::S_ISVTX != 0;
        let is_narrower =
            mode & !inode.mode & 0o777 != 0 || (uid, gid) != (inode.uid, inode.gid) || is_sticky;
        let is_wider = changes_acl
            || !mode & inode.mode & 0o777 != 0
            || (uid, gid) != (inode.uid, inode.gid)
            || mode & !inode.mode & libc::S_ISVTX != 0;
        self.note_narrowed(ino, is_narrower);
        if is_wider {
            self.note_gains(ino);
        }
        self.mark_dirty(ino, bits);
        self.journal_inode(ino);
        Ok(())
    }

    /// Sets an extended attribute.
    pub fn set_xattr(
        &mut self,
        caller: Caller,
        ino: Ino,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<(), Stop> {
        let is_acl = name == acl::ACCESS || name == acl::DEFAULT;
        // The backing directory would refuse it later, when nobody can be told.
        if !crate::backing::is_kept(name.as_encoded_bytes()) {
            return Err(Errno::OPNOTSUPP.into());
        }
        if (is_acl && !self.keeps_acls) || (!is_acl && !self.keeps_xattrs) {
            return Err(Errno::OPNOTSUPP.into());
        }
        let has = self.xattrs(ino)?.contains_key(name);
        if has && flags & XATTR_CREATE != 0 {
            return Err(Errno::EXIST.into());
        }
        if !has && flags & XATTR_REPLACE != 0 {
            return Err(Errno::NODATA.into());
        }
        let mut mode = None;
        let mut keeps = true;
        if is_acl {
            let acl = Acl::parse(value).ok_or(Errno::INVAL)?;
            if name == acl::ACCESS {
                mode = Some(acl.mode());
                keeps = !acl.is_a_mode();
            }
        }
        if keeps {
            let mut wanted = self.xattrs(ino)?.clone();
            wanted.insert(name.to_owned(), value.to_owned());
            self.check_xattrs(ino, wanted)?;
        }
        let inode = self.inode_mut(ino)?;
        inode.ctime = Time::now();
        if let Some(mode) = mode {
            inode.mode = inode.mode & !0o777 | mode;
            // As by chmod(2), which the kernel looks after itself.
            if caller.outsider {
                inode.mode &= !libc::S_ISGID;
            }
        }
        if let Some(xattrs) = &mut inode.xattrs {
            if keeps {
                xattrs.insert(name.to_owned(), value.to_owned());
            } else {
                xattrs.remove(name);
            }
        }
        self.note_narrowed(ino, name == acl::ACCESS);
        if is_acl {
            self.note_gains(ino);
        }
        self.mark_dirty(ino, dirty::XATTRS | if mode.is_some() { dirty::MODE } else { 0 });
        self.journal_inode(ino);
        Ok(())
    }

    /// Removes an extended attribute.
    pub fn remove_xattr(&mut self, ino: Ino, name: &OsStr) -> Result<(), Stop> {
        self.xattrs(ino)?;
        let inode = self.inode_mut(ino)?;
        if inode.xattrs.as_mut().and_then(|xattrs| xattrs.remove(name)).is_none() {
            // Whoever has no list of access has none afterwards.
            let is_acl = name == acl::ACCESS || name == acl::DEFAULT;
            return if is_acl { Ok(()) } else { Err(Errno::NODATA.into()) };
        }
        inode.ctime = Time::now();
        self.note_narrowed(ino, name == acl::ACCESS);
        if name == acl::ACCESS || name == acl::DEFAULT {
            self.note_gains(ino);
        }
        self.mark_dirty(ino, dirty::XATTRS);
        self.journal_inode(ino);
        Ok(())
    }

    /// The names of all extended attributes that somebody may know of, each ended by a zero.
    pub fn list_xattrs(&self, caller: Caller, ino: Ino) -> Result<Vec<u8>, Stop> {
        let mut names = Vec::new();
        // Others get no values of these, and programs that copy all that is listed would fail.
        let is_shown = |name: &OsStr| caller.uid == 0 || !name.as_encoded_bytes().starts_with(b"trusted.");
        for name in self.xattrs(ino)?.keys().filter(|name| is_shown(name.as_os_str())) {
            names.extend(name.as_encoded_bytes());
            names.push(0);
        }
        Ok(names)
    }

    /// The target of a symbolic link.
    pub fn read_link(&self, ino: Ino) -> Result<OsString, Stop> {
        match &self.inode(ino)?.kind {
            Kind::Symlink(target) => target.as_deref().cloned().ok_or(Stop::Wait(Need::Target(ino))),
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// Gives references back.
    pub fn forget(&mut self, store: &Store, references: &[(Ino, u64)]) {
        for (ino, count) in references {
            if let Some(inode) = self.inodes.get_mut(ino) {
                inode.references = inode.references.saturating_sub(*count);
                if inode.references == 0 {
                    match inode.used {
                        _ if inode.is_orphan() => self.remove_if_unused(*ino, store),
                        Use::Asked => drop(self.forget_if_unused(store, *ino)),
                        Use::Since | Use::Before => {}
                    }
                }
            }
        }
    }
}
