//! What others have done with the same files meanwhile: it is seen before a name is changed there, kept, and told.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use rustix::io::Errno;

use super::Core;
use super::inode::{Home, Inode, Operation};
use super::state::State;
use crate::backing::Stat;
use crate::message::Ino;
use crate::status::{Conflict, ConflictKind};

/// Conflicts that are remembered for people.
const CONFLICTS: usize = 1000;

impl State {
    pub(super) fn note_conflict(
        &mut self,
        (dir, name): (Ino, &OsStr),
        ours: Option<&OsStr>,
        kind: ConflictKind,
    ) {
        let path = |name: &OsStr| {
            let home = Home { dir, name: name.into() };
            self.home_path(&home)
                .map(|names| names.join(OsStr::new("/")).to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        let conflict = Conflict { path: path(name), ours: ours.map(path), kind };
        match &conflict.ours {
            Some(ours) => tracing::warn!(
                path = conflict.path,
                ours,
                "somebody else has changed this meanwhile; both are kept"
            ),
            None => tracing::warn!(
                path = conflict.path,
                ?kind,
                "it was to be removed, and is not: somebody else has changed it, or left something in it"
            ),
        }
        self.add_conflict(conflict);
    }

    /// Others have taken away the file that was to be moved to this name: all of it that the cache has is written there, if that is
    /// all of it.
    pub(super) fn was_gone(&mut self, ino: Ino, (dir, name): (Ino, &OsStr)) {
        if self.inodes.get(&ino).is_none_or(Inode::is_orphan) {
            return;
        }
        let end = self.inodes.get(&ino).map(|inode| inode.data().map_or(inode.size, |data| data.backing_len));
        let end = end.unwrap_or(0);
        if !self.is_resident_before(ino, end) {
            return self.note_conflict((dir, name), None, ConflictKind::Gone);
        }
        // Whoever writes it finds that it is not there, and tells that.
        self.all_is_dirty(ino);
        if let Some(entry) = self.dirty_by_age.get_mut(&ino) {
            // Whoever waits for what was changed before waits for this: it was.
            entry.generation = 0;
        }
        self.journal_inode(ino);
    }

    /// Keeps a conflict to be shown, unless there are too many.
    pub(super) fn add_conflict(&mut self, conflict: Conflict) {
        if self.conflicts.len() < CONFLICTS {
            self.conflicts.push(conflict);
        }
    }
}

/// The name for ours beside somebody else's.
pub(super) enum Beside {
    Free(OsString),
    /// It has that already.
    Ours(OsString),
}

impl Beside {
    pub(super) fn name(self) -> OsString {
        match self {
            Beside::Free(name) | Beside::Ours(name) => name,
        }
    }
}

impl Core {
    /// The first name for ours beside somebody else's that is free, or that ours has. Another may be of a file whose number is used
    /// again.
    ///
    /// # Errors
    /// The backing directory's; `EEXIST` if the name can't become longer.
    pub(super) fn place_beside(
        &self,
        name: &OsStr,
        ino: Ino,
        (dir, directory): (Ino, BorrowedFd<'_>),
        is_ours: impl Fn(Stat) -> bool,
    ) -> Result<Beside, Errno> {
        let mut name = name.to_owned();
        loop {
            let next = self.beside(&name, ino);
            if next == name {
                return Err(Errno::EXIST);
            }
            name = next;
            match self.look((dir, directory), &name)? {
                None => return Ok(Beside::Free(name)),
                Some(found) if is_ours(found) => return Ok(Beside::Ours(name)),
                Some(_) => {}
            }
        }
    }

    /// The name for ours where somebody else has taken the one it should have.
    pub fn beside(&self, name: &OsStr, ino: Ino) -> OsString {
        let suffix = format!(".ondeck-{}-{ino:x}", self.store.id());
        let mut bytes = name.as_bytes().to_vec();
        bytes.truncate(self.lock().longest_name - suffix.len());
        bytes.extend(suffix.bytes());
        OsString::from_vec(bytes)
    }

    /// The files that an operation moves, or links, and that others have changed since they were seen.
    pub(super) fn changed_by_others(&self, operation: &Operation) -> Vec<Ino> {
        let is_changed = |ino: Ino, dir: Ino, name: &OsStr| {
            let (seen, is_dir) = match self.lock().inodes.get(&ino) {
                Some(inode) => (inode.seen, inode.is_dir()),
                None => return false,
            };
            let (Some(seen), false) = (seen, is_dir) else { return false };
            let found =
                self.backing_directory(dir).and_then(|directory| self.look((dir, directory.as_fd()), name));
            // Where that can't be seen, nothing can be carried out either.
            found.is_ok_and(|found| found.is_some_and(|found| seen.is(&found) && !seen.is_as_left(&found)))
        };
        let mut changed = Vec::new();
        let mut look = |ino: Ino, dir: Ino, name: &OsStr| {
            if is_changed(ino, dir, name) {
                changed.push(ino);
            }
        };
        match operation {
            Operation::Rename { ino, dir, name, .. } => look(*ino, *dir, name),
            Operation::Exchange { ino, dir, name, other, to_dir, to_name } => {
                look(*ino, *dir, name);
                look(*other, *to_dir, to_name);
            }
            Operation::Link { ino, .. } => {
                let home = self.lock().inodes.get(ino).and_then(|inode| inode.homes.first().cloned());
                if let Some(home) = home {
                    look(*ino, home.dir, &home.name);
                }
            }
            Operation::Make { .. } | Operation::Unlink { .. } => {}
        }
        changed
    }
}
