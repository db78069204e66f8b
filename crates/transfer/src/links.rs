//! Hard links: the first name of an inode is copied, the others are linked to it.
//!
//! An inode is forgotten when all of its names have been seen, so the table holds only the inodes whose names are
//! still outstanding. Names outside of the copied tree keep their inode in it to the end: about 100 bytes for each.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::Stat;

use crate::dir::DirNode;

/// Another name of an inode that is being copied.
pub(crate) struct ParkedName {
    pub node: Arc<DirNode>,
    pub name: CString,
}

enum State {
    /// The first name is being copied; these come after it.
    Copying(Vec<ParkedName>),
    /// The first name is in place.
    Done { node: Arc<DirNode>, name: CString },
}

struct Inode {
    state: State,
    /// Names that have not been seen.
    left: u64,
}

#[derive(Default)]
pub(crate) struct Links(Mutex<HashMap<(u64, u64), Inode>>);

/// What a worker does with a name of an inode that has several.
pub(crate) enum Role {
    /// It is the first: copy it, then call [`Links::placed`] or [`Links::failed`].
    First,
    /// Another worker copies the first name and will come back to this one.
    Parked,
    /// Link it to this one.
    LinkTo { node: Arc<DirNode>, name: CString },
}

impl Links {
    fn lock(&self) -> MutexGuard<'_, HashMap<(u64, u64), Inode>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn meet(&self, stat: &Stat, node: &Arc<DirNode>, name: &std::ffi::CStr) -> Role {
        let key = (stat.st_dev, stat.st_ino);
        let mut table = self.lock();
        let Some(inode) = table.get_mut(&key) else {
            let left = stat.st_nlink.saturating_sub(1);
            table.insert(key, Inode { state: State::Copying(Vec::new()), left });
            return Role::First;
        };
        match &mut inode.state {
            State::Copying(waiting) => {
                waiting.push(ParkedName { node: node.clone(), name: name.to_owned() });
                Role::Parked
            }
            State::Done { node, name } => {
                let role = Role::LinkTo { node: node.clone(), name: name.clone() };
                inode.left = inode.left.saturating_sub(1);
                if inode.left == 0 {
                    table.remove(&key);
                }
                role
            }
        }
    }

    /// The first name is in place under `target_name`; the parked names come back to be linked.
    pub fn placed(&self, stat: &Stat, node: &Arc<DirNode>, target_name: &std::ffi::CStr) -> Vec<ParkedName> {
        match self.lock().get_mut(&(stat.st_dev, stat.st_ino)) {
            Some(inode) => {
                let done = State::Done { node: node.clone(), name: target_name.to_owned() };
                match std::mem::replace(&mut inode.state, done) {
                    State::Copying(waiting) => waiting,
                    State::Done { .. } => Vec::new(),
                }
            }
            None => Vec::new(),
        }
    }

    /// The first name could not be copied; the parked names come back, and one of them will be the first.
    pub fn failed(&self, stat: &Stat) -> Vec<ParkedName> {
        match self.lock().remove(&(stat.st_dev, stat.st_ino)) {
            Some(Inode { state: State::Copying(waiting), .. }) => waiting,
            _ => Vec::new(),
        }
    }
}
