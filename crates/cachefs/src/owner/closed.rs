//! What the modes of the user's own files and directories keep even the user out of: who had it open before the mode was changed, or
//! changed it through the cache, has the right to it. It is opened for a moment, and has its mode back then.
//!
//! The journal says so meanwhile, so that it gets its mode also after a kill in between.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::Mode;
use rustix::io::Errno;

use super::Core;
use super::inode::Seen;
use crate::backing::{self, Stat};
use crate::message::Ino;

/// What a mode can keep an owner out of.
fn opened(mode: Mode, is_dir: bool) -> Mode {
    mode | if is_dir { Mode::RWXU } else { Mode::RUSR | Mode::WUSR }
}

impl Core {
    /// Does something in directories, also if they are the user's own and their modes keep even their owner out.
    ///
    /// # Errors
    /// What `act` says.
    pub fn within<T>(
        &self,
        directories: &[(Ino, BorrowedFd<'_>)],
        mut act: impl FnMut() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match act() {
            Err(Errno::ACCESS) => {}
            other => return other,
        }
        let _held = self.backing.hold_modes();
        // Another thread may have opened them or given their modes back meanwhile, or a pass has given them others.
        match act() {
            Err(Errno::ACCESS) => {}
            other => return other,
        }
        let mut closed = Vec::new();
        for (ino, directory) in directories {
            let found = backing::stat(*directory, OsStr::new(""))?;
            if self.keeps_its_owner_out(&found, true) {
                closed.push((*ino, *directory, found));
            }
        }
        self.while_open(&closed, true, act)
    }

    /// Opens the file of an inode there, also if its mode keeps its owner out. That changes its time of change, and is nobody else's
    /// work: nothing else may look at it meanwhile, so the caller has a pass of it, or holds it still.
    pub fn reopen(&self, ino: Ino, entry: &OwnedFd, write: bool) -> Result<File, Errno> {
        match backing::reopen(entry.as_fd(), write) {
            Err(Errno::ACCESS) => {}
            other => return other,
        }
        let found = backing::stat(entry.as_fd(), OsStr::new(""))?;
        let open = || backing::reopen(entry.as_fd(), write);
        if !self.keeps_its_owner_out(&found, false) {
            return Err(Errno::ACCESS);
        }
        let closed = [(ino, entry.as_fd(), found)];
        let is_ours = {
            let mut state = self.lock();
            let seen = state.inodes.get(&ino).and_then(|inode| inode.seen);
            let is_ours = seen.is_some_and(|seen| seen.is_as_left(&found));
            if is_ours {
                state.journal_changes(ino);
            }
            is_ours
        };
        if !is_ours {
            return Core::open_and_close(&closed, false, open);
        }
        let file = self.while_open(&closed, false, open);
        let now = backing::stat(entry.as_fd(), OsStr::new(""));
        let mut state = self.lock();
        if let Some(seen) = state.inodes.get_mut(&ino).and_then(|inode| inode.seen.as_mut()) {
            seen.ctime = now.map_or(Seen::UNKNOWN, |now| Seen::now(&now).ctime);
        }
        if let Some(pass) = state.passes.get_mut(&ino) {
            pass.changes = false;
        }
        state.journal_seen(ino);
        file
    }

    fn keeps_its_owner_out(&self, found: &Stat, is_dir: bool) -> bool {
        let mode = Mode::from_raw_mode(found.mode & 0o7777);
        found.uid == self.backing.uid() && opened(mode, is_dir) != mode
    }

    /// Does something while these are open to their owner, and has the journal say what modes they are to have.
    fn while_open<T>(
        &self,
        closed: &[(Ino, BorrowedFd<'_>, Stat)],
        is_dir: bool,
        act: impl FnMut() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let note = |is_open| {
            let mut state = self.lock();
            closed.iter().for_each(|(ino, ..)| state.journal_open(*ino, is_open));
        };
        note(true);
        let done = Core::open_and_close(closed, is_dir, act);
        note(false);
        done
    }

    fn open_and_close<T>(
        closed: &[(Ino, BorrowedFd<'_>, Stat)],
        is_dir: bool,
        mut act: impl FnMut() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        if closed.is_empty() {
            return Err(Errno::ACCESS);
        }
        let set =
            |entry: BorrowedFd<'_>, mode| rustix::fs::chmod(backing::by_descriptor(entry).as_str(), mode);
        let mut is_open = Ok(());
        let mut changed = Vec::new();
        for (_, entry, found) in closed {
            let mode = Mode::from_raw_mode(found.mode & 0o7777);
            is_open = is_open.and_then(|()| set(*entry, opened(mode, is_dir)));
            if is_open.is_ok() {
                changed.push((*entry, mode));
            }
        }
        let done = is_open.and_then(|()| act());
        let mut is_closed = Ok(());
        for (entry, mode) in changed {
            is_closed = is_closed.and(set(entry, mode));
        }
        is_closed.and(done)
    }
}
