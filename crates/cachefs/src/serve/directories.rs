//! Directories that are being read.
//!
//! Each open directory keeps the list of entries that it had when its reading began, and is read from that: whatever changes
//! meanwhile, no entry comes twice, and none that was there all the time is left out. Reading from the beginning again, as
//! after rewinddir(3), lists anew. Opening alone lists nothing: many programs open directories only to reach what is in them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use fuser::{FileType, INodeNo, ReplyDirectory};

use super::convert;
use crate::message::{Ino, Listed, ROOT};

/// The number of a directory's parent, which nobody has asked for: as libfuse tells it.
const UNKNOWN: Ino = 0xffff_ffff;

/// A directory that is being read.
#[derive(Default)]
pub struct Directory {
    listed: Mutex<Option<Arc<Vec<Listed>>>>,
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

/// Answers with the entries from `offset` on, as many as fit.
pub fn fill(mut reply: ReplyDirectory, ino: Ino, listed: &[Listed], offset: u64) {
    let parent = if ino == ROOT { ROOT } else { UNKNOWN };
    let dots = [(ino, "."), (parent, "..")];
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each is whole after every single statement that changes it.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
