//! Whether the backing directory can hold extended attributes, found out before they are accepted: later nobody could be told.
//!
//! How much a filesystem holds differs: ext4 has one block for all attributes of a file, others have 64 KiB for each, and some
//! have no room for certain kinds. So a set of attributes is tried there on a file that nobody sees.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::Core;
use super::state::{State, Stop};
use super::unfinished::unfinished;
use super::wait::Need;
use crate::acl;
use crate::backing;
use crate::message::{Ino, ROOT, Xattrs};

impl State {
    /// Checks that the backing directory can hold these attributes of an inode together.
    ///
    /// # Errors
    /// It has to be tried first, and fails as it does there.
    pub fn check_xattrs(&mut self, ino: Ino, wanted: Xattrs) -> Result<(), Stop> {
        if self.accepted.has(&wanted) {
            return Ok(());
        }
        let dir = self.inode(ino)?.homes.first().map_or(ROOT, |home| home.dir);
        Err(Stop::Wait(Need::Holds(dir, Arc::new(wanted))))
    }
}

impl Core {
    /// Tries a set of attributes, and has who waits for that go on, or fail.
    pub fn try_xattrs(&self, need: &Need, dir: Ino, wanted: &Xattrs) {
        let mut tried = wanted.clone();
        // Only directories have default ACLs. Another attribute takes as much.
        if let Some(value) = tried.remove(OsStr::new(acl::DEFAULT))
            && self.lock().keeps_xattrs
        {
            tried.insert("user.ondeck.default_acl".into(), value);
        }
        let done = match self.backing_directory(dir) {
            Ok(directory) => {
                // No inode has the number 0.
                let name = unfinished(&self.store, 0);
                self.try_on_a_file((dir, directory.as_fd()), &name, &tried)
            }
            // Gone, or not there yet: it can't be known.
            Err(_) => Ok(()),
        };
        let mut state = self.lock();
        match done {
            Ok(()) => {
                state.accepted.add(wanted);
                state.waits.wake(need);
            }
            Err(Errno::OPNOTSUPP | Errno::INVAL) => state.waits.fail(need, Errno::OPNOTSUPP),
            Err(error) => state.waits.fail(need, error),
        }
    }

    /// Tries whether a filesystem holds these extended attributes together, on a file in `directory` that nobody sees, or at most for a
    /// moment under `name`. If none can be made there, that is not known, and is taken for a yes.
    ///
    /// # Errors
    /// Why it does not.
    fn try_on_a_file(
        &self,
        (dir, directory): (Ino, BorrowedFd<'_>),
        name: &OsStr,
        wanted: &Xattrs,
    ) -> Result<(), Errno> {
        let private = Mode::RUSR | Mode::WUSR;
        let make = |path: &OsStr, more: OFlags| {
            self.within(&[(dir, directory)], || {
                rustix::fs::openat(directory, path, OFlags::RDWR | OFlags::CLOEXEC | more, private)
            })
        };
        let remove = || {
            // Whether it is there does not matter.
            let _ =
                self.within(&[(dir, directory)], || rustix::fs::unlinkat(directory, name, AtFlags::empty()));
        };
        let hold = |file: &OwnedFd| match backing::set_xattrs(file.as_fd(), wanted)?.first() {
            Some((_, error)) => Err(*error),
            None => Ok(()),
        };
        if let Ok(file) = make(OsStr::new("."), OFlags::TMPFILE) {
            return hold(&file);
        }
        // Of a process that was killed in between.
        remove();
        match make(name, OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW) {
            Ok(file) => {
                let held = hold(&file);
                remove();
                held
            }
            Err(_) => Ok(()),
        }
    }
}
