//! What a killed process may have done without having noted it: it is recognized, and what it left half made is removed.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;

use rustix::io::Errno;

use super::Core;
use super::apply::{Done, remove};
use super::inode::Operation;
use super::state::{Pending, State};
use super::turns::LONGEST_ROUND;
use super::unfinished::unfinished;
use crate::message::Ino;

impl State {
    /// The operation that may have been done and not noted.
    pub fn doubtful(&self) -> Option<(u64, Pending)> {
        let number = Some(self.doubtful).filter(|number| *number != 0)?;
        let index = number.checked_sub(self.first_pending)? as usize;
        self.log.get(index).map(|pending| (number, pending.clone()))
    }
}

impl Core {
    /// Looks whether the operation of a recovered log that was carried out last is done already, and notes it then. Until that is
    /// known, nothing else may look at its files: they may not be where the journal says.
    ///
    /// # Errors
    /// The kernel's, if that can't be seen.
    pub fn settle_doubt(&self) -> Result<(), Errno> {
        let doubtful = self.lock().doubtful();
        match doubtful {
            Some((number, pending)) if !pending.cancelled => {
                if let Some(done) = self.is_done(&pending.operation)? {
                    self.end(number, &pending.operation, &done);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Removes what was made by a process that was killed before it could note that. It may be made again under the same name,
    /// or never.
    pub fn remove_half_made(&self) {
        let half_made: Vec<(Ino, Ino)> = {
            let state = self.lock();
            let tried = state.log.iter().filter(|pending| !pending.cancelled).take(LONGEST_ROUND);
            let makes = tried.filter_map(|pending| match &pending.operation {
                Operation::Make { ino, dir, .. } => Some((*ino, *dir)),
                _ => None,
            });
            let is_unnoted = |ino: &Ino| state.inodes.get(ino).is_none_or(|inode| inode.homes.is_empty());
            makes.filter(|(ino, _)| is_unnoted(ino)).map(|(ino, dir)| (ino, state.place_for(dir))).collect()
        };
        for (ino, within) in half_made {
            let name = unfinished(&self.store, ino);
            let removed = self.backing_directory(within).and_then(|directory| {
                let at = directory.as_fd();
                self.within(&[(within, at)], || remove(at, &name))
            });
            match removed {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => tracing::warn!(?name, %error, "can't remove what a killed server has left"),
            }
        }
    }

    fn is_done(&self, operation: &Operation) -> Result<Option<Done>, Errno> {
        let is_at = |ino: Ino, dir: Ino, name: &OsStr| -> Result<bool, Errno> {
            let seen = self.lock().seen(ino);
            let found = match self.backing_directory(dir) {
                Ok(directory) => self.look((dir, directory.as_fd()), name)?,
                // A directory that is not made there yet.
                Err(Errno::STALE) => None,
                Err(error) => return Err(error),
            };
            Ok(found.is_some_and(|found| seen.is_some_and(|seen| seen.is(&found))))
        };
        let done = |at: bool, beside: Option<OsString>| {
            (at || beside.is_some()).then_some(Done { beside, ..Done::default() })
        };
        let appeared = |ino: Ino, dir: Ino, name: &OsStr| -> Result<Option<Done>, Errno> {
            if is_at(ino, dir, name)? {
                return Ok(done(true, None));
            }
            let other = self.beside(name, ino);
            Ok(if is_at(ino, dir, &other)? { done(false, Some(other)) } else { None })
        };
        let vanished = |ino: Ino, dir: Ino, name: &OsStr| -> Result<Option<Done>, Errno> {
            let had = self.lock().has_home(ino, dir, name);
            Ok(if had && !is_at(ino, dir, name)? { done(true, None) } else { None })
        };
        match operation {
            Operation::Make { ino, dir, name } => {
                let home = self.lock().inodes.get(ino).and_then(|inode| inode.homes.first().cloned());
                match home {
                    Some(home) if !is_at(*ino, home.dir, &home.name)? => appeared(*ino, *dir, name),
                    _ => Ok(None),
                }
            }
            Operation::Link { ino, dir, name } => appeared(*ino, *dir, name),
            Operation::Unlink { ino, dir, name } => vanished(*ino, *dir, name),
            Operation::Rename { ino, dir, name, to_dir, to_name, over } => {
                let is_there = self.lock().has_home(*ino, *dir, name);
                match over {
                    _ if is_there && !is_at(*ino, *dir, name)? => appeared(*ino, *to_dir, to_name),
                    Some(over) if !is_there => vanished(*over, *to_dir, to_name),
                    _ => Ok(None),
                }
            }
            Operation::Exchange { other, dir, name, .. } => Ok(done(is_at(*other, *dir, name)?, None)),
        }
    }
}
