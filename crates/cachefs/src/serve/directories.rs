//! Directories that are being read.
//!
//! Each open directory keeps the list of entries that it had when its reading began, and is read from that: whatever changes
//! meanwhile, no entry comes twice, and none that was there all the time is left out. Reading from the beginning again, as
//! after rewinddir(3), lists anew. Opening alone lists nothing: many programs open directories only to reach what is in them.
//!
//! Whoever asks for the attributes of all entries, as `ls -l` and `find` do, has the kernel ask for entries with attributes: one
//! request does for a hundred. Those are as they are in that moment, and a name that is gone by then is left out. The kernel
//! changes no name of a directory while it waits for this.

use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use fuser::{FileAttr, FileType, INodeNo, ReplyDirectory, ReplyDirectoryPlus};

use super::KEPT;
use super::convert::{self, ONLY};
use crate::message::{Attributes, Ino, Listed, ROOT};

/// The number of a directory's parent, which nobody has asked for: as libfuse tells it.
const UNKNOWN: Ino = 0xffff_ffff;

/// Entries with attributes that are asked for together, before it is known how many the kernel has room for.
const AT_FIRST: usize = 32;

/// A directory that is being read.
#[derive(Default)]
pub struct Directory {
    listed: Mutex<Option<Arc<Vec<Listed>>>>,
    /// Entries with attributes that the kernel had room for last.
    room: AtomicUsize,
}

impl Directory {
    /// Keeps what was listed now.
    pub fn keep(&self, listed: Arc<Vec<Listed>>) {
        *lock(&self.listed) = Some(listed);
    }

    /// What was listed last.
    pub fn kept(&self) -> Option<Arc<Vec<Listed>>> {
        lock(&self.listed).clone()
    }

    /// How many entries are to be asked for together, for one reply.
    pub fn room(&self) -> usize {
        match self.room.load(Ordering::Relaxed) {
            0 => AT_FIRST,
            room => room + 1,
        }
    }
}

/// All directories that are being read.
#[derive(Default)]
pub struct Directories {
    next: AtomicU64,
    open: Mutex<HashMap<u64, Arc<Directory>>>,
}

impl Directories {
    pub fn open(&self) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.open).insert(handle, Arc::default());
        handle
    }

    pub fn get(&self, handle: u64) -> Option<Arc<Directory>> {
        lock(&self.open).get(&handle).cloned()
    }

    pub fn release(&self, handle: u64) {
        // Freed without the lock: it may be long.
        let closed = lock(&self.open).remove(&handle);
        drop(closed);
    }
}

/// The entries before those that are listed: `.` and `..`.
const DOTS: usize = 2;

fn dots(ino: Ino) -> [(Ino, &'static str); DOTS] {
    [(ino, "."), (if ino == ROOT { ROOT } else { UNKNOWN }, "..")]
}

/// Answers with the entries from `offset` on, as many as fit.
pub fn fill(mut reply: ReplyDirectory, ino: Ino, listed: &[Listed], offset: u64) {
    let dots = dots(ino);
    let mut at = usize::try_from(offset).unwrap_or(usize::MAX);
    while let Some((number, name)) = dots.get(at) {
        at += 1;
        if reply.add(INodeNo(*number), at as u64, FileType::Directory, name) {
            return reply.ok();
        }
    }
    for entry in listed.iter().skip(at - dots.len()) {
        at += 1;
        if reply.add(INodeNo(entry.ino), at as u64, convert::kind(entry.kind), &entry.name) {
            break;
        }
    }
    reply.ok();
}

/// So many names of entries from `offset` on.
pub fn names(listed: &[Listed], offset: u64, count: usize) -> Vec<OsString> {
    let first = usize::try_from(offset).unwrap_or(usize::MAX).saturating_sub(DOTS);
    listed.iter().skip(first).take(count).map(|entry| entry.name.clone()).collect()
}

/// Whether there is nothing to answer with although the end is not reached: the kernel would take that for the end.
pub fn says_nothing(found: &[Option<Attributes>], offset: u64) -> bool {
    offset >= DOTS as u64 && !found.is_empty() && found.iter().all(Option::is_none)
}

/// Answers with entries and their attributes, as many as fit; `attributes` makes them the kernel's, and says how long it may keep
/// them. Returns the references that the kernel did not get.
pub fn fill_with_attributes(
    mut reply: ReplyDirectoryPlus,
    attributes: impl Fn(&Attributes) -> (FileAttr, Duration),
    (directory, ino): (&Directory, Ino),
    (names, found): (&[OsString], &[Option<Attributes>]),
    offset: u64,
) -> Vec<(Ino, u64)> {
    let mut at = usize::try_from(offset).unwrap_or(usize::MAX);
    let mut is_full = false;
    for (number, name) in dots(ino).into_iter().skip(at) {
        at += 1;
        // The kernel takes nothing of these but number and name.
        is_full |= reply.add(INodeNo(number), at as u64, name, &KEPT, &convert::directory(number), ONLY);
    }
    let mut given = 0;
    for (name, entry) in names.iter().zip(found) {
        at += 1;
        if let Some(entry) = entry {
            // There is one time for attributes and name: a name that the kernel keeps for no time is asked for again.
            let (attributes, kept) = attributes(entry);
            is_full = is_full || reply.add(INodeNo(entry.ino), at as u64, name, &kept, &attributes, ONLY);
        }
        if is_full {
            break;
        }
        given += 1;
    }
    directory.room.store(given, Ordering::Relaxed);
    reply.ok();
    found.iter().skip(given).flatten().map(|entry| (entry.ino, 1)).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each is whole after every single statement that changes it.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
