//! What is read from the backing directory, by threads of their own.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::Core;
use super::blocks::{BLOCK, Blocks};
use super::data::touched;
use super::inode::{Home, Inode, Kind, Name, Seen};
use super::state::State;
use super::unfinished::UNFINISHED;
use super::wait::Need;
use crate::backing::{self, Stat};
use crate::message::{Ino, ROOT};
use crate::settings::EXTENT;
use crate::store;

/// How often a file that was renamed while it was opened is looked for again.
const TRIES: u32 = 16;

/// Names from the root of the backing directory, and what they lead to.
type Found = Vec<(OsString, Stat)>;

impl State {
    /// Takes over what the backing directory has under a name that nobody has said anything about here.
    pub fn add_found(&mut self, dir: Ino, name: &OsStr, found: &Stat) {
        let Ok(directory) = self.directory(dir) else { return };
        let is_known =
            directory.complete || directory.entries.contains_key(name) || directory.gone.contains(name);
        if is_known || name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
            return;
        }
        let name: Name = name.into();
        let home = Home { dir, name: Arc::clone(&name) };
        let is_dir = FileType::from_raw_mode(found.mode) == FileType::Directory;
        let several = found.nlink > 1 && !is_dir;
        let known = if is_dir { None } else { self.several.get(&(found.dev, found.identity)).copied() };
        // One of which all names are known has no other: its number is another file's now. The journal may have known this name.
        let can_be_it = |ino: &Ino| {
            self.inodes.get(ino).is_some_and(|inode| {
                let is_its = inode.homes.contains(&home);
                !inode.is_orphan() && (is_its || (inode.homes.len() as u64) < u64::from(found.nlink))
            })
        };
        let ino = match known.filter(can_be_it) {
            Some(ino) => {
                if let Some(inode) = self.inodes.get_mut(&ino)
                    && !inode.homes.contains(&home)
                {
                    inode.homes.push(home);
                }
                ino
            }
            None => {
                let ino = self.new_ino(Some(found));
                let mut inode = Inode::new(found.mode, found.dev);
                inode.take_over(found);
                inode.homes.push(home);
                if let Kind::Directory(directory) = &mut inode.kind {
                    directory.parent = dir;
                }
                self.insert(ino, inode);
                if several {
                    self.several.insert((found.dev, found.identity), ino);
                }
                ino
            }
        };
        // It was there a moment ago.
        let _ = self.put_entry(dir, &name, ino);
        self.journal_found(ino, dir, &name);
    }
}

impl State {
    /// Takes over a path of the backing directory. Whether it leads to this file then; names may have been changed here.
    fn add_path(&mut self, ino: Ino, names: &[(OsString, Stat)]) -> bool {
        let mut at = ROOT;
        for (name, found) in names {
            self.add_found(at, name, found);
            match self.directory(at).ok().and_then(|dir| dir.entries.get(name.as_os_str())) {
                Some(next) => at = *next,
                None => return false,
            }
        }
        at == ino
    }
}

impl Inode {
    /// Takes over what the backing directory tells.
    pub fn take_over(&mut self, found: &Stat) {
        self.mode = found.mode;
        self.nlink = found.nlink;
        // Some filesystems do not count a directory's subdirectories; 0 means "no name" here.
        if self.is_dir() {
            self.nlink = self.nlink.max(2);
        }
        self.uid = found.uid;
        self.gid = found.gid;
        self.set_rdev(found.rdev);
        self.size = found.size;
        self.blocks = found.blocks;
        self.atime = found.atime;
        self.mtime = found.mtime;
        self.ctime = found.ctime;
        self.dev = found.dev;
        self.seen = Some(Seen::now(found));
    }
}

impl Core {
    /// The directory `ino` of the backing directory.
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if it is not there.
    pub fn backing_directory(&self, ino: Ino) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(known) = self.backing.known_directory(ino) {
            return Ok(known);
        }
        for _ in 0..TRIES {
            let (names, seen) = {
                let state = self.lock();
                if ino == ROOT {
                    (Vec::new(), None)
                } else {
                    let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
                    let names = state.home_path(inode.homes.first().ok_or(Errno::STALE)?)?;
                    (names, inode.seen)
                }
            };
            match self.backing.open_directory(ino, &names, |found| seen.is_none_or(|seen| seen.is(found))) {
                // Renamed meanwhile.
                Err(Errno::NOENT | Errno::NOTDIR) if self.homes_have_settled() => {}
                other => return other,
            }
        }
        Err(Errno::STALE)
    }

    /// Waits for a change of a name on the backing directory that is under way, because homes may not be true until its end. `false`
    /// if it is the caller's own.
    fn homes_have_settled(&self) -> bool {
        let mut state = self.lock();
        while let Some(thread) = state.moving {
            if thread == std::thread::current().id() {
                return false;
            }
            if state.stopped {
                return true;
            }
            state = self.wait(state);
        }
        true
    }

    /// What the backing directory has of `ino`, whatever its name is.
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if it is not there, or somebody has put something else there.
    pub fn backing_entry(&self, ino: Ino) -> Result<OwnedFd, Errno> {
        if ino == ROOT {
            return backing::open_path(self.backing.root(), OsStr::new("."));
        }
        let mut failed_before = None;
        for _ in 0..TRIES {
            let (home, seen) = {
                let state = self.lock();
                let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
                (inode.homes.first().ok_or(Errno::STALE)?.clone(), inode.seen)
            };
            let directory = self.backing_directory(home.dir)?;
            let open = self.within(&[(home.dir, directory.as_fd())], || {
                backing::open_path(directory.as_fd(), &home.name)
            });
            match open {
                Ok(open) => {
                    let found = backing::stat(open.as_fd(), OsStr::new(""))?;
                    if seen.is_none_or(|seen| seen.is(&found)) {
                        return Ok(open);
                    }
                }
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
            // It was renamed between the two, or is not ours any more.
            let has_settled = self.homes_have_settled();
            let state = self.lock();
            let is_unchanged = state.inodes.get(&ino).and_then(|inode| inode.homes.first()) == Some(&home);
            if is_unchanged && (!has_settled || failed_before.as_ref() == Some(&home)) {
                break;
            }
            failed_before = Some(home);
        }
        Err(Errno::STALE)
    }

    /// Looks through the backing directory for a name of a file of which none is known here. It has one: a name that nobody has
    /// asked for.
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if it has none that could be found.
    pub fn find_home(&self, ino: Ino) -> Result<(), Errno> {
        let (dev, seen) = {
            let state = self.lock();
            let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
            (inode.dev, inode.seen.ok_or(Errno::STALE)?)
        };
        let open = |at: BorrowedFd<'_>, name: &OsStr| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat(at, name, flags, Mode::empty())
        };
        let root = Arc::new(open(self.backing.root().as_fd(), OsStr::new("."))?);
        // Directories that are to be looked through, by the one above and their names from the root.
        let mut stack: Vec<(Arc<OwnedFd>, Found)> = vec![(root, Vec::new())];
        // It may be somewhere else than where nobody may look.
        let mut unread = None;
        while let Some((above, path)) = stack.pop() {
            let directory = match path.last() {
                None => Ok(above),
                Some((name, _)) => open(above.as_fd(), name).map(Arc::new),
            };
            let listed = directory
                .and_then(|directory| backing::list(directory.as_fd()).map(|listed| (directory, listed)));
            let (directory, listed) = match listed {
                Ok(listed) => listed,
                // Removed meanwhile.
                Err(Errno::NOENT | Errno::NOTDIR) => continue,
                Err(error) => {
                    unread.get_or_insert(error);
                    continue;
                }
            };
            for (name, found) in listed {
                let is_dir = FileType::from_raw_mode(found.mode) == FileType::Directory;
                let is_it = found.dev == dev && seen.is(&found);
                if found.dev != dev
                    || !(is_dir || is_it)
                    || name.as_bytes().starts_with(UNFINISHED.as_bytes())
                {
                    continue;
                }
                let names: Found = path.iter().cloned().chain([(name, found)]).collect();
                if !is_it {
                    stack.push((Arc::clone(&directory), names));
                } else if self.lock().add_path(ino, &names) {
                    return Ok(());
                }
            }
        }
        Err(unread.unwrap_or(Errno::STALE))
    }

    pub(super) fn backing_file(&self, ino: Ino) -> Result<Arc<File>, Errno> {
        let orphan =
            self.lock().inodes.get(&ino).and_then(|inode| inode.data()).and_then(|data| data.orphan.clone());
        if let Some(orphan) = orphan {
            return Ok(orphan);
        }
        if let Some(known) = self.backing.known_file(ino) {
            return Ok(known);
        }
        let entry = self.backing_entry(ino)?;
        let file = match backing::reopen(entry.as_fd(), false) {
            Err(Errno::ACCESS) => {
                self.hold_one_still(ino)?;
                let file = self.reopen(ino, &entry, false);
                self.let_go(&[ino]);
                file?
            }
            other => other?,
        };
        let file = Arc::new(file);
        self.backing.keep_file(ino, &file);
        Ok(file)
    }

    /// Reads what a request needs, and has it tried again.
    pub fn load(&self, need: &Need) {
        match need {
            Need::Name(dir, name) => {
                let found =
                    self.backing_directory(*dir).and_then(|directory| backing::stat(directory.as_fd(), name));
                let mut state = self.lock();
                match found {
                    Ok(found) => {
                        state.add_found(*dir, name, &found);
                        state.waits.wake(need);
                    }
                    Err(Errno::NOENT) => {
                        if let Ok(directory) = state.directory(*dir)
                            && !directory.complete
                            && !directory.entries.contains_key(name.as_os_str())
                        {
                            // It was there a moment ago.
                            let _ = state.take_entry(*dir, name, true);
                        }
                        state.waits.wake(need);
                    }
                    Err(error) => state.waits.fail(need, error),
                }
            }
            Need::Listing(dir) => {
                let found =
                    self.backing_directory(*dir).and_then(|directory| backing::list(directory.as_fd()));
                let mut state = self.lock();
                match found {
                    Ok(found) => {
                        for (name, stat) in &found {
                            state.add_found(*dir, name, stat);
                        }
                        state.now_complete(*dir);
                        state.waits.wake(need);
                    }
                    Err(error) => state.waits.fail(need, error),
                }
            }
            Need::Xattrs(ino) => {
                let found = self.backing_entry(*ino).and_then(|entry| backing::xattrs(entry.as_fd()));
                let mut state = self.lock();
                match found {
                    Ok(found) => {
                        if let Some(inode) = state.inodes.get_mut(ino) {
                            inode.xattrs.get_or_insert_with(|| found.into());
                        }
                        state.waits.wake(need);
                    }
                    Err(error) => state.waits.fail(need, error),
                }
            }
            Need::Target(ino) => {
                let found = (self.backing_entry(*ino))
                    .and_then(|entry| rustix::fs::readlinkat(&entry, "", Vec::new()));
                let mut state = self.lock();
                match found {
                    Ok(found) => {
                        if let Some(Kind::Symlink(target)) =
                            state.inodes.get_mut(ino).map(|inode| &mut inode.kind)
                        {
                            *target = Some(Box::new(OsStr::from_bytes(found.as_bytes()).to_owned()));
                        }
                        state.waits.wake(need);
                    }
                    Err(error) => state.waits.fail(need, error),
                }
            }
            Need::Extent(ino, number) => self.fetch(*ino, *number),
            Need::Holes(ino, number, count) => self.find_holes(*ino, *number, *count),
            Need::Statistics => {
                let found = self.backing.space();
                let mut state = self.lock();
                match found {
                    Ok(found) => {
                        state.space = Some((found, std::time::Instant::now()));
                        state.waits.wake(need);
                    }
                    Err(error) => state.waits.fail(need, error),
                }
            }
            Need::Holds(dir, wanted) => self.try_xattrs(need, *dir, wanted),
            Need::Project(ino) => self.read_project(need, *ino),
            Need::Quiet(_) | Need::Released(_) | Need::Space | Need::Log | Need::Synced(_) => {}
        }
    }

    fn fetch(&self, ino: Ino, number: u32) {
        let (missing, end) = {
            let state = self.lock();
            let data = state.inodes.get(&ino).and_then(|inode| inode.data());
            match data {
                Some(data) => (data.is_missing(number), data.backing_len),
                None => return,
            }
        };
        let copied = self.copy_up(ino, number, &missing, end);
        let mut state = self.lock();
        match copied {
            Ok((bytes, holes)) => state.fetched(&self.store, ino, number, &missing, &holes, Ok(bytes)),
            Err(error) => state.fetched(&self.store, ino, number, &missing, &Blocks::default(), Err(error)),
        }
    }

    /// Asks the backing directory which blocks of extents are holes; those are zeros, and need not be read.
    fn find_holes(&self, ino: Ino, number: u32, count: u32) {
        let (missing, end): (Vec<(u32, Blocks)>, u64) = {
            let state = self.lock();
            let Some(data) = state.inodes.get(&ino).and_then(|inode| inode.data()) else { return };
            let missing = (number..number + count).map(|number| (number, data.is_missing(number)));
            (missing.collect(), data.backing_len)
        };
        let found: Result<Vec<(u32, Blocks)>, Errno> = self.backing_file(ino).and_then(|file| {
            let holes =
                |(number, missing): &(u32, Blocks)| Ok((*number, holes_of(&file, *number, missing, end)?));
            missing.iter().map(holes).collect()
        });
        self.lock().holes_found(&self.store, ino, number..number + count, found);
    }

    /// Copies blocks of an extent from the backing directory to the store; returns how many bytes, and which blocks are holes.
    fn copy_up(&self, ino: Ino, number: u32, missing: &Blocks, end: u64) -> Result<(u64, Blocks), Errno> {
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let from = self.backing_file(ino)?;
        let into = self.store.file(ino).map_err(errno)?;
        let first = u64::from(number) * EXTENT;
        let (mut bytes, mut data) = (0, Blocks::default());
        let mut buffer = Vec::new();
        for (begin, until) in missing.runs() {
            let (begin, until) =
                (first + u64::from(begin) * BLOCK, (first + u64::from(until) * BLOCK).min(end));
            for part in store::segments(&*from, begin, until).map_err(errno)?.iter().filter(|part| part.data)
            {
                buffer.resize((part.end - part.begin) as usize, 0);
                let mut done = 0;
                while done < buffer.len() {
                    match from.read_at(&mut buffer[done..], part.begin + done as u64) {
                        // Shorter than it was: somebody has cut it. What is behind its end is zeros.
                        Ok(0) => break,
                        Ok(count) => done += count,
                        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(errno(error)),
                    }
                }
                into.write_all_at(&buffer[..done], part.begin).map_err(errno)?;
                bytes += done as u64;
                let (begin, end) = (part.begin - first, part.end - first);
                data.add(&Blocks::range((begin / BLOCK) as u16, end.div_ceil(BLOCK) as u16));
            }
        }
        Ok((bytes, missing.without(&data)))
    }
}

/// Which of these blocks of an extent are holes of a file.
fn holes_of(file: &File, number: u32, blocks: &Blocks, end: u64) -> Result<Blocks, Errno> {
    let first = u64::from(number) * EXTENT;
    let mut holes = blocks.clone();
    for (begin, until) in blocks.runs() {
        let (begin, until) = (first + u64::from(begin) * BLOCK, (first + u64::from(until) * BLOCK).min(end));
        let parts = store::segments(file, begin, until);
        let parts = parts.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        for data in parts.iter().filter(|part| part.data) {
            holes.take(&touched(data.begin, data.end));
        }
    }
    Ok(holes)
}
