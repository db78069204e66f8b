//! What fsync(2) and close(2) wait for, if they have to wait until the backing directory has something on its disk.
//!
//! Data is synced file by file, as it is written back. Names, and attributes that were changed alone, are changed there first; they
//! are *on the disk* once its filesystem was synced after that, which is done when somebody waits for it, once for all who do.

use rustix::io::Errno;

use super::Core;
use super::state::{State, Stop};
use super::wait::{Need, Target};
use crate::message::Ino;

impl State {
    /// Has what is stuck be tried again at once: somebody wants to know.
    pub fn try_stuck(&mut self) {
        let now = std::time::Instant::now();
        self.stuck.values_mut().for_each(|(_, until)| *until = now);
    }

    /// Tells once what could not be written back of a file.
    pub fn error_of(&mut self, ino: Ino) -> Result<(), Stop> {
        match self.inode_mut(ino)?.data_mut().and_then(|data| data.error.take()) {
            Some(error) => Err(Errno::from_raw_os_error(error).into()),
            None => Ok(()),
        }
    }

    /// Whether an operation about an inode is in the log, up to this one. As long as nothing is stuck, the one behind it ends last.
    fn is_pending(&self, ino: Ino, until: u64) -> bool {
        let mut log = (self.first_pending..=until).zip(&self.log);
        self.stuck.is_empty()
            || log.any(|(_, pending)| !pending.cancelled && pending.operation.inodes().contains(&ino))
    }

    /// Whether something that an inode had at this generation is still to be brought.
    fn is_dirty_since(&self, ino: Ino, generation: u64) -> bool {
        self.dirty_by_age.get(&ino).is_some_and(|dirty| dirty.generation <= generation)
    }

    /// Whether a pass is under way that has something which an inode had at this generation. Which pass that is does not matter: the
    /// one that was seen first may have failed, and another begun, before anybody looked.
    fn is_brought_since(&self, ino: Ino, generation: u64) -> bool {
        self.passes.get(&ino).is_some_and(|pass| pass.dirty_since.is_some_and(|since| since <= generation))
    }

    /// Whether all that there was of an inode when this was first asked is on the disk of the backing directory.
    pub fn synced(&mut self, ino: Ino, target: &mut Option<Target>) -> Result<(), Stop> {
        let inode = self.inode(ino)?;
        if inode.is_orphan() {
            return Ok(());
        }
        let (is_dir, pending) = (inode.is_dir(), inode.pending);
        if target.is_none() && pending > 0 {
            self.try_stuck();
        }
        let target = target.get_or_insert_with(|| {
            let operation = if pending > 0 { self.first_pending + self.log.len() as u64 - 1 } else { 0 };
            Target { generation: self.generation, operation, change: None }
        });
        if pending > 0 && self.first_pending <= target.operation && self.is_pending(ino, target.operation) {
            self.wanted = self.wanted.max(target.operation);
            return Err(Stop::Wait(Need::Synced(ino)));
        }
        // A directory's own times are no data.
        if !is_dir && self.is_dirty_since(ino, target.generation) {
            self.urgent.insert(ino);
            return Err(Stop::Wait(Need::Synced(ino)));
        }
        if !is_dir && self.is_brought_since(ino, target.generation) {
            return Err(Stop::Wait(Need::Synced(ino)));
        }
        // Those that come later are not waited for.
        let change = *target.change.get_or_insert(self.changes.made());
        if self.changes.want(change) { Ok(()) } else { Err(Stop::Wait(Need::Synced(ino))) }
    }
}

impl Core {
    /// Has what was changed on the backing directory be on its disk, if somebody waits for that. If it can't be, they are told.
    pub fn sync_changes(&self) {
        let made = {
            let state = self.lock();
            if !state.changes.are_wanted() {
                return;
            }
            state.changes.made()
        };
        let synced = self.sync_all();
        let mut state = self.lock();
        state.changes.tried(made, synced);
        if let Err(error) = synced {
            tracing::warn!(%error, "can't sync the backing directory");
        }
        state.waits.synced(made, synced);
        drop(state);
        self.wake_all();
    }
}
