//! Which operations of the log are carried out next, and which have to wait for others that can't be.

use std::collections::HashMap;
use std::ffi::OsString;
use std::time::Instant;

use rustix::io::Errno;

use super::inode::Operation;
use super::state::State;
use crate::message::Ino;

/// Operations that are prepared together at most.
const BATCH: u64 = 256;

/// When so many operations are stuck or depend on such, the rest waits in its order: each is looked at every second.
const MOST_HELD: u64 = 1024;

/// No round has more operations.
pub const LONGEST_ROUND: usize = (BATCH + MOST_HELD) as usize;

/// What becomes of an operation in a round.
pub enum Turn {
    Try(Operation),
    /// It is stuck, or depends on one that is.
    Hold(Operation, Errno),
    /// Nothing is to be done.
    Pass(Operation),
}

impl Turn {
    /// The operation, if it is to be carried out.
    pub fn operation(&self) -> Option<&Operation> {
        match self {
            Turn::Try(operation) => Some(operation),
            Turn::Hold(..) | Turn::Pass(_) => None,
        }
    }
}

/// What operations that can't be carried out now are about. Later ones about something else go on: they change neither the same
/// files nor the same names, and no directory that the others make, move or remove.
#[derive(Default)]
pub struct Held {
    inodes: HashMap<Ino, Errno>,
    names: HashMap<(Ino, OsString), Errno>,
    directories: HashMap<Ino, Errno>,
}

impl Held {
    pub fn add(&mut self, operation: &Operation, error: Errno) {
        self.inodes.extend(operation.subjects().into_iter().map(|ino| (ino, error)));
        self.names.extend(operation.names().into_iter().map(|(dir, name)| ((dir, name.clone()), error)));
        self.directories.extend(operation.directories().into_iter().map(|dir| (dir, error)));
    }

    /// Why an operation has to wait for others, if it has to.
    pub fn holds(&self, operation: &Operation) -> Option<Errno> {
        if self.inodes.is_empty() {
            return None;
        }
        let subjects = operation.subjects();
        let of_inodes =
            subjects.iter().find_map(|ino| self.inodes.get(ino).or_else(|| self.directories.get(ino)));
        let directories = operation.directories();
        let of_directories = || directories.iter().find_map(|dir| self.inodes.get(dir));
        let of_names = || {
            let mut names = operation.names().into_iter();
            names.find_map(|(dir, name)| self.names.get(&(dir, name.clone())))
        };
        of_inodes.or_else(of_directories).or_else(of_names).copied()
    }
}

/// Whether an error is about the file or the name; otherwise the backing directory itself can't be reached or written to, and
/// everything waits in its order.
pub fn is_its_own(error: Errno) -> bool {
    !matches!(
        error,
        Errno::AGAIN
            | Errno::INTR
            | Errno::IO
            | Errno::NOMEM
            | Errno::NODEV
            | Errno::NXIO
            | Errno::ROFS
            | Errno::NOTCONN
            | Errno::SHUTDOWN
            | Errno::TIMEDOUT
            | Errno::HOSTDOWN
            | Errno::HOSTUNREACH
            | Errno::NETDOWN
            | Errno::NETUNREACH
            | Errno::CONNREFUSED
    )
}

/// Whether an error may come of a directory that is not there any more.
pub fn may_be_missing(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::STALE | Errno::NOTDIR)
}

impl State {
    /// The operations that are looked at next, by number: those to be carried out, and those before them that can't be now.
    pub fn next_round(&mut self) -> Vec<(u64, Turn)> {
        let until = self.due();
        let now = Instant::now();
        let (mut round, mut held) = (Vec::new(), Held::default());
        let (mut tried, mut waiting) = (0, 0);
        let mut told = Vec::new();
        for (number, pending) in (self.first_pending..=until).zip(&self.log) {
            let operation = &pending.operation;
            let is_stuck = self.stuck.get(&number).filter(|(_, until)| *until > now);
            let turn = if pending.cancelled {
                Turn::Pass(operation.clone())
            } else if let Some((error, _)) = is_stuck {
                Turn::Hold(operation.clone(), *error)
            } else if let Some(error) = held.holds(operation) {
                told.push((number, operation.inodes(), error));
                Turn::Hold(operation.clone(), error)
            } else {
                Turn::Try(operation.clone())
            };
            match &turn {
                Turn::Hold(operation, error) => {
                    held.add(operation, *error);
                    waiting += 1;
                }
                // It goes from the log when what is stuck before it does.
                Turn::Pass(_) if waiting > 0 => continue,
                Turn::Try(_) | Turn::Pass(_) => tried += 1,
            }
            round.push((number, turn));
            if tried == BATCH || waiting == MOST_HELD {
                break;
            }
        }
        for (number, inodes, error) in told {
            self.waits.not_carried_out(number, Some(&inodes), error);
        }
        if tried == 0 {
            round.clear();
        }
        round
    }
}
