//! What is known of names once an operation of the log was carried out.

use std::ffi::OsStr;

use super::inode::{Home, Homes, Operation, dirty};
use super::state::State;
use super::wait::Need;
use crate::message::Ino;
use crate::store::Store;

impl State {
    /// Changes the homes as an operation of the log says, which is done. Recovery does the same again.
    pub fn applied(&mut self, store: &Store, number: u64, other_name: Option<&OsStr>) {
        let index = number.checked_sub(self.first_pending).map(|index| index as usize);
        let Some(pending) = index.and_then(|index| self.log.get_mut(index)) else { return };
        let was_cancelled = std::mem::replace(&mut pending.cancelled, true);
        let operation = pending.operation.clone();
        self.changes.add();
        self.doubtful = 0;
        self.stuck.remove(&number);
        while self.log.front().is_some_and(|pending| pending.cancelled) {
            self.log.pop_front();
            self.stuck.remove(&self.first_pending);
            self.first_pending += 1;
        }
        self.waits.carried_out(self.first_pending - 1);
        self.waits.wake(&Need::Log);
        if was_cancelled {
            return;
        }
        let named = |state: &State, dir: Ino, name: &OsStr| Home {
            dir,
            name: state.name(dir, other_name.unwrap_or(name)),
        };
        let lose = |state: &mut State, ino: Ino, dir: Ino, name: &OsStr| {
            if let Some(inode) = state.inodes.get_mut(&ino) {
                inode.homes.retain(|home| home.dir != dir || *home.name != *name);
            }
        };
        match &operation {
            Operation::Make { ino, dir, name } => {
                let home = named(self, *dir, name);
                if let Some(inode) = self.inodes.get_mut(ino) {
                    inode.made_by = 0;
                    if !inode.homes.is_empty() {
                        inode.homes = Homes::One(home);
                    }
                }
            }
            Operation::Link { ino, dir, name } => {
                let home = named(self, *dir, name);
                if let Some(inode) = self.inodes.get_mut(ino)
                    && !inode.homes.is_empty()
                {
                    inode.homes.push(home);
                }
            }
            Operation::Unlink { ino, dir, name } => lose(self, *ino, *dir, name),
            Operation::Rename { ino, dir, name, to_dir, to_name, over } => {
                if let Some(over) = over {
                    lose(self, *over, *to_dir, to_name);
                }
                let new = named(self, *to_dir, to_name);
                if let Some(home) = self.home_mut(*ino, *dir, name) {
                    *home = new;
                }
            }
            Operation::Exchange { ino, dir, name, other, to_dir, to_name } => {
                let (first, second) = (
                    self.home_mut(*ino, *dir, name).is_some(),
                    self.home_mut(*other, *to_dir, to_name).is_some(),
                );
                let (to, from) = (named(self, *to_dir, to_name), named(self, *dir, name));
                if first && let Some(home) = self.home_mut(*ino, *dir, name) {
                    *home = to;
                }
                if second
                    && let Some(home) = self.inodes.get_mut(other).and_then(|inode| {
                        inode.homes.iter_mut().find(|home| home.dir == *to_dir && *home.name == **to_name)
                    })
                {
                    *home = from;
                }
            }
        }
        for ino in operation.inodes() {
            if let Some(inode) = self.inodes.get_mut(&ino) {
                inode.pending = inode.pending.saturating_sub(1);
            }
            self.waits.wake(&Need::Synced(ino));
        }
        if other_name.is_some() {
            let (dir, ino) = (operation.shown_in(), operation.inodes()[0]);
            self.now_aside(dir);
            if let Some(inode) = self.inodes.get_mut(&ino) {
                inode.aside = true;
            }
        }
        // It has changed their times there.
        for dir in operation.directories() {
            self.mark_dirty(dir, dirty::TIMES);
        }
        for ino in operation.inodes() {
            self.remove_if_unused(ino, store);
        }
        if self.names_and_operations() > 0 {
            self.waits.wake(&Need::Space);
        }
    }

    fn home_mut(&mut self, ino: Ino, dir: Ino, name: &OsStr) -> Option<&mut Home> {
        self.inodes.get_mut(&ino)?.homes.iter_mut().find(|home| home.dir == dir && *home.name == *name)
    }
}
