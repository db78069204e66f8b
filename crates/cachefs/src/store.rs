//! The RAM that a cache's data lies in: a directory of a tmpfs with a file for each file that has resident data, and the
//! journal.
//!
//! It outlives the process that serves the cache, and whoever serves it next recovers from it. A file of the store is sparse:
//! it has pages only where data is resident, so a hole in it is either a hole of the file or not resident; the owner knows which.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashlink::LruCache;
use rustix::fs::{AtFlags, FallocateFlags, Gid, Mode, OFlags, SeekFrom, Uid};
use rustix::io::Errno;

use crate::message::Ino;

/// Files of the store that are kept open, so that a read need not open one.
const OPEN_FILES: usize = 2048;

/// Directories that the files are spread over.
const DIRECTORIES: u64 = 256;

/// Letters of a store's name.
const ID_LETTERS: usize = 8;

/// A store.
pub struct Store {
    root: OwnedFd,
    /// Whose the files are, whoever makes one: threads with that user's identity open them, too. Nobody else gets here.
    user: Option<(Uid, Gid)>,
    id: String,
    directories: Vec<OwnedFd>,
    open: Mutex<LruCache<Ino, Arc<File>>>,
    is_discarded: AtomicBool,
}

/// A part of a file with or without pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The first byte.
    pub begin: u64,
    /// The first byte behind it.
    pub end: u64,
    /// Whether it has pages.
    pub data: bool,
}

impl Store {
    /// Opens the store below `root`, and makes what is missing of it; `user` are the ids of a user whose cache it is, if not root's.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(root: &Path, user: Option<(u32, u32)>) -> io::Result<Store> {
        let user = user.map(|(uid, gid)| (Uid::from_raw(uid), Gid::from_raw(gid)));
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty())?;
        let id = id(&root)?;
        let mut directories = Vec::new();
        for number in 0..DIRECTORIES {
            let name = format!("{number:02x}");
            match rustix::fs::mkdirat(&root, &name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            if let Some((uid, gid)) = user {
                rustix::fs::chownat(&root, &name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
            }
            directories.push(rustix::fs::openat(&root, &name, flags | OFlags::PATH, Mode::empty())?);
        }
        Ok(Store {
            root,
            user,
            id,
            directories,
            open: Mutex::new(LruCache::new(crate::descriptors::share(OPEN_FILES))),
            is_discarded: AtomicBool::new(false),
        })
    }

    fn cache(&self) -> MutexGuard<'_, LruCache<Ino, Arc<File>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, ino: Ino) -> (&OwnedFd, CString) {
        // A hexadecimal number has no zero byte.
        let name = CString::new(format!("{ino:x}")).unwrap_or_default();
        (&self.directories[(ino % DIRECTORIES) as usize], name)
    }

    /// The file for the data of `ino`, made if there is none.
    ///
    /// # Errors
    /// The kernel's.
    pub fn file(&self, ino: Ino) -> io::Result<Arc<File>> {
        // One at a time: nobody may open a file that is not the user's yet.
        let mut open = self.cache();
        if let Some(file) = open.get(&ino) {
            return Ok(Arc::clone(file));
        }
        let (directory, name) = self.place(ino);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::LARGEFILE;
        let file =
            Arc::new(File::from(rustix::fs::openat(directory, &name, flags, Mode::RUSR | Mode::WUSR)?));
        if let Some((uid, gid)) = self.user
            && file.metadata()?.uid() != uid.as_raw()
        {
            rustix::fs::fchown(&*file, Some(uid), Some(gid))?;
        }
        open.insert(ino, Arc::clone(&file));
        Ok(file)
    }

    /// Removes the data of `ino`. Who has the file open keeps it.
    ///
    /// # Errors
    /// The kernel's; none if there is no such file.
    pub fn remove(&self, ino: Ino) -> io::Result<()> {
        self.cache().remove(&ino);
        let (directory, name) = self.place(ino);
        match rustix::fs::unlinkat(directory, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives all memory of data back, also of files that are open somewhere.
    ///
    /// # Errors
    /// The kernel's; as much as can be is given back.
    pub fn discard(&self) -> io::Result<()> {
        // First: who reads zeros must know that they are none of the file's.
        self.is_discarded.store(true, Ordering::SeqCst);
        let mut done = Ok(());
        for ino in self.files()? {
            let cut = self.file(ino).and_then(|file| file.set_len(0));
            done = done.and(cut.and_then(|()| self.remove(ino)));
        }
        done
    }

    /// Fails if what was read before from a file of the store may not be what the file had.
    ///
    /// # Errors
    /// `EIO`.
    pub fn check(&self) -> Result<(), Errno> {
        if self.is_discarded.load(Ordering::SeqCst) { Err(Errno::IO) } else { Ok(()) }
    }

    /// The files that there are.
    ///
    /// # Errors
    /// The kernel's.
    pub fn files(&self) -> io::Result<Vec<Ino>> {
        let mut found = Vec::new();
        for directory in &self.directories {
            let directory =
                rustix::fs::openat(directory, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            for entry in rustix::fs::Dir::read_from(&directory)? {
                let entry = entry?;
                if let Some(ino) =
                    entry.file_name().to_str().ok().and_then(|name| Ino::from_str_radix(name, 16).ok())
                {
                    found.push(ino);
                }
            }
        }
        Ok(found)
    }

    /// What tells this store from all others: names that the cache itself makes have it, so that two caches, or the same one of
    /// another day, never take each other's.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The directory of the store.
    pub fn root(&self) -> std::os::fd::BorrowedFd<'_> {
        self.root.as_fd()
    }
}

/// The name of a store: random, and kept in it.
fn id(root: &OwnedFd) -> io::Result<String> {
    const NAME: &str = "id";
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(root, NAME, flags, Mode::empty()) {
        Ok(file) => {
            let id = io::read_to_string(File::from(file))?;
            if id.len() == ID_LETTERS && id.bytes().all(|letter| letter.is_ascii_hexdigit()) {
                return Ok(id);
            }
            // A process that was killed had just begun to write it: nothing was named by it.
        }
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let mut random = [0; ID_LETTERS / 2];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let id: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(root, NAME, flags, Mode::RUSR | Mode::WUSR)?);
    file.write_all_at(id.as_bytes(), 0)?;
    Ok(id)
}

/// Reads `into` from `offset`; what lies behind the end of the file is zeros.
///
/// # Errors
/// The kernel's.
pub fn read(file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], offset + done as u64) {
            Ok(0) => {
                into[done..].fill(0);
                break;
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Takes the pages of a part of a file away; it reads as zeros then. The size stays.
///
/// # Errors
/// The kernel's.
pub fn punch(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    loop {
        match rustix::fs::fallocate(file, flags, offset, length) {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

/// The parts of `begin..end` with and without data, in order, without gaps.
///
/// # Errors
/// The kernel's.
pub fn segments(file: impl AsFd, begin: u64, end: u64) -> io::Result<Vec<Segment>> {
    let mut found = Vec::new();
    let mut at = begin;
    while at < end {
        let data = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            Err(Errno::NXIO) => end,
            Err(error) => return Err(error.into()),
        };
        if data > at {
            found.push(Segment { begin: at, end: data, data: false });
            at = data;
            continue;
        }
        let hole = match rustix::fs::seek(&file, SeekFrom::Hole(at)) {
            Ok(hole) => hole.min(end),
            // It was cut meanwhile.
            Err(Errno::NXIO) => end,
            Err(error) => return Err(error.into()),
        };
        // A filesystem that contradicts itself must not hold us here.
        let hole = if hole > at { hole } else { end };
        found.push(Segment { begin: at, end: hole, data: true });
        at = hole;
    }
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_found_again_and_files_that_were_removed_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), None).unwrap();
        for ino in [1, 255, 256, 1 << 62] {
            store.file(ino).unwrap().write_all_at(b"data", 3).unwrap();
        }
        store.remove(256).unwrap();
        store.remove(4711).unwrap();
        let store = Store::open(dir.path(), None).unwrap();
        let mut files = store.files().unwrap();
        files.sort_unstable();
        assert_eq!(files, [1, 255, 1 << 62]);
        let mut data = [1; 9];
        read(&store.file(255).unwrap(), 0, &mut data).unwrap();
        assert_eq!(&data, b"\0\0\0data\0\0");
    }

    #[test]
    fn segments_follow_each_other_without_gaps() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.write_all_at(&[1; 4096], 4096).unwrap();
        file.write_all_at(&[1; 4096], 5 * 4096).unwrap();
        let found = segments(&file, 0, 8 * 4096).unwrap();
        let found: Vec<_> =
            found.iter().map(|part| (part.begin / 4096, part.end / 4096, part.data)).collect();
        assert_eq!(found, [(0, 1, false), (1, 2, true), (2, 5, false), (5, 6, true), (6, 8, false)]);
        assert_eq!(segments(&file, 8 * 4096, 8 * 4096).unwrap(), []);
    }
}
