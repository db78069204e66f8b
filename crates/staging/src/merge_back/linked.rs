//! Files that have several names: giving one of them to another file, or removing it, changes the ctime for the others.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;

use rustix::fs::Stat;

use super::stat::{Moment, is_directory, modified_at};

/// What changes when something is written to a file, or when its mode or owner is changed; but not when one of its names
/// is made or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    size: i64,
    modified: Moment,
    mode: u32,
    owner: (u32, u32),
}

impl Content {
    fn of(stat: &Stat) -> Content {
        Content {
            size: stat.st_size,
            modified: modified_at(stat),
            mode: stat.st_mode,
            owner: (stat.st_uid, stat.st_gid),
        }
    }

    /// From the fields of a line, the last of which are its own.
    pub fn parse<'a>(mut fields: impl Iterator<Item = &'a str>) -> Option<Content> {
        let size = fields.next()?.parse().ok()?;
        let modified = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let mode = u32::from_str_radix(fields.next()?, 8).ok()?;
        let owner = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        fields.next().is_none().then_some(Content { size, modified, mode, owner })
    }

    #[cfg(test)]
    pub(super) fn example() -> Content {
        Content { size: 7, modified: (-1, 999_999_999), mode: 0o100_600, owner: (5, 6) }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Content { size, modified, mode, owner } = self;
        write!(f, "{size} {} {} {mode:o} {} {}", modified.0, modified.1, owner.0, owner.1)
    }
}

/// A file on disk that had several names when the program was shown one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linked {
    pub(super) inode: u64,
    pub(super) names: u64,
    pub(super) content: Content,
}

impl Linked {
    /// If it has several names.
    pub fn of(stat: &Stat) -> Option<Linked> {
        (stat.st_nlink > 1 && !is_directory(stat)).then(|| Linked {
            inode: stat.st_ino,
            names: stat.st_nlink,
            content: Content::of(stat),
        })
    }

    /// Whether it is still this file, and nothing but the number of its names has changed.
    pub(super) fn has_only_other_names(&self, now: &Stat) -> bool {
        self.inode == now.st_ino && self.names != now.st_nlink && self.content == Content::of(now)
    }
}

/// The device and the inode of a file.
pub type FileId = (u64, u64);

/// Inodes on disk with several names, one of which this run has given to something else, removed or made: that changes
/// their ctime for the other names, too. With the content that they had. All output directories of a run share it.
#[derive(Debug, Default)]
pub struct Loosened(Mutex<HashMap<FileId, Content>>);

impl Loosened {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<FileId, Content>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn has(&self, stat: &Stat) -> bool {
        self.lock().get(&(stat.st_dev, stat.st_ino)) == Some(&Content::of(stat))
    }

    /// If it has several names. Returns what is new then.
    pub(super) fn add(&self, stat: &Stat) -> Option<(FileId, Content)> {
        if stat.st_nlink < 2 || is_directory(stat) {
            return None;
        }
        let added = ((stat.st_dev, stat.st_ino), Content::of(stat));
        let known = self.lock().insert(added.0, added.1);
        (known != Some(added.1)).then_some(added)
    }

    /// What a keeper that was killed had added.
    pub fn recall(&self, added: impl IntoIterator<Item = (FileId, Content)>) {
        self.lock().extend(added);
    }
}

/// Reads a line of a baseline.
pub(super) fn parse_linked(line: &str) -> Option<(u128, Linked)> {
    let mut fields = line.split(' ');
    let path = u128::from_str_radix(fields.next()?, 16).ok()?;
    let (inode, names) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((path, Linked { inode, names, content: Content::parse(fields)? }))
}
