//! Whether the backing directory can hold extended attributes, found out before they are accepted: later nobody could be told.
//!
//! How much a filesystem holds differs: ext4 has one block for all attributes of a file, others have 64 KiB for each, and some
//! have no room for certain kinds. So a set of attributes is tried there on a file that nobody sees. What matters is names and
//! lengths, so no set is tried twice, and small ones are not tried at all once their kinds were.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::sync::Arc;

use hashlink::LruCache;
use rustix::io::Errno;

use super::Core;
use super::apply::unfinished;
use super::state::{State, Stop};
use super::wait::Need;
use crate::acl;
use crate::backing::{self, Keeps};
use crate::message::{Ino, ROOT, Xattrs};

/// Sets of attributes that are remembered as accepted.
const SHAPES: usize = 256;

/// Any filesystem that has attributes holds so many bytes of them: an ext4 of the smallest blocks has 1024 for all.
const SMALL: usize = 512;

/// What a filesystem needs beside the name and the value of an attribute, at most.
const OVERHEAD: usize = 24;

/// The names of attributes, and their values' lengths.
type Shape = Vec<(OsString, usize)>;

/// What the backing directory has accepted.
pub struct Accepted {
    kinds: HashSet<OsString>,
    shapes: LruCache<Shape, ()>,
}

impl Accepted {
    /// What is known without a try.
    pub fn new(keeps: Keeps) -> Accepted {
        let kinds = [(keeps.xattrs, "user"), (keeps.acls, acl::ACCESS), (keeps.acls, acl::DEFAULT)];
        let kinds = kinds.into_iter().filter(|(keeps, _)| *keeps).map(|(_, kind)| kind.into()).collect();
        Accepted { kinds, shapes: LruCache::new(SHAPES) }
    }
}

fn shape(wanted: &Xattrs) -> Shape {
    wanted.iter().map(|(name, value)| (name.clone(), value.len())).collect()
}

/// `user`, `trusted` and so on; an ACL is a kind of its own.
fn kind(name: &OsStr) -> &OsStr {
    let bytes = crate::message::bytes(name);
    match bytes.iter().position(|byte| *byte == b'.') {
        Some(end) if !bytes.starts_with(b"system.") => {
            std::os::unix::ffi::OsStrExt::from_bytes(&bytes[..end])
        }
        _ => name,
    }
}

impl Accepted {
    fn has(&mut self, wanted: &Xattrs) -> bool {
        let bytes: usize = wanted.iter().map(|(name, value)| name.len() + value.len() + OVERHEAD).sum();
        let is_small = bytes <= SMALL && wanted.keys().all(|name| self.kinds.contains(kind(name)));
        is_small || self.shapes.get(&shape(wanted)).is_some()
    }

    fn add(&mut self, wanted: &Xattrs) {
        self.kinds.extend(wanted.keys().map(|name| kind(name).to_owned()));
        self.shapes.insert(shape(wanted), ());
    }
}

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
                backing::try_xattrs(self.backing.uid(), directory.as_fd(), &name, &tried)
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
}
