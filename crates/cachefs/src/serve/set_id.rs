//! Files of which the kernel has to be told when they lose their set-uid and set-gid bits.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::convert;
use crate::message::{Attributes, Ino};

/// Files with set-uid or set-gid bits, as far as the kernel was told of them. They are few.
#[derive(Default)]
pub struct SetIdFiles {
    any: AtomicBool,
    files: Mutex<HashSet<Ino>>,
}

impl SetIdFiles {
    pub fn note(&self, of: &Attributes) {
        let has = of.mode & convert::KIND == libc::S_IFREG && of.mode & (libc::S_ISUID | libc::S_ISGID) != 0;
        if has {
            self.lock().insert(of.ino);
            self.any.store(true, Ordering::Release);
        } else if self.any.load(Ordering::Acquire) {
            self.lock().remove(&of.ino);
        }
    }

    pub fn take(&self, ino: Ino) -> bool {
        self.any.load(Ordering::Acquire) && self.lock().remove(&ino)
    }

    pub fn forget(&self, ino: Ino) {
        if self.any.load(Ordering::Acquire) {
            self.lock().remove(&ino);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashSet<Ino>> {
        // A set is whole after every statement.
        self.files.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
