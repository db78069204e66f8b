//! The sets of extended attributes that a backing directory is known to hold.
//!
//! What matters is names and lengths, so no set is tried twice, and small ones are not tried at all once their kinds were.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};

use hashlink::LruCache;

use crate::acl;
use crate::backing::Keeps;
use crate::message::Xattrs;

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

    /// Whether these are known to be held together.
    pub fn has(&mut self, wanted: &Xattrs) -> bool {
        let bytes: usize = wanted.iter().map(|(name, value)| name.len() + value.len() + OVERHEAD).sum();
        let is_small = bytes <= SMALL && wanted.keys().all(|name| self.kinds.contains(kind(name)));
        is_small || self.shapes.get(&shape(wanted)).is_some()
    }

    /// Notes that they are.
    pub fn add(&mut self, wanted: &Xattrs) {
        self.kinds.extend(wanted.keys().map(|name| kind(name).to_owned()));
        self.shapes.insert(shape(wanted), ());
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
