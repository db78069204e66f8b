//! Files of which the kernel has to be told when they lose their set-uid and set-gid bits.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::message::{Attributes, Ino};

/// What has set-uid or set-gid bits, as far as the kernel was told of it, with its group.
#[derive(Default)]
pub struct SetIdFiles {
    any: AtomicBool,
    files: Mutex<HashMap<Ino, u32>>,
}

impl SetIdFiles {
    pub fn note(&self, of: &Attributes) {
        if of.mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
            self.lock().insert(of.ino, of.gid);
            self.any.store(true, Ordering::Release);
        } else if self.any.load(Ordering::Acquire) {
            self.lock().remove(&of.ino);
        }
    }

    pub fn take(&self, ino: Ino) -> bool {
        self.any.load(Ordering::Acquire) && self.lock().remove(&ino).is_some()
    }

    /// The group of what has such bits.
    pub fn group(&self, ino: Ino) -> Option<u32> {
        if self.any.load(Ordering::Acquire) { self.lock().get(&ino).copied() } else { None }
    }

    pub fn forget(&self, ino: Ino) {
        if self.any.load(Ordering::Acquire) {
            self.lock().remove(&ino);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Ino, u32>> {
        // A set is whole after every statement.
        self.files.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
