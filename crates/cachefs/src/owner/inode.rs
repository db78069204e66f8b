//! Files and directories as the owner has them, and the operations that change their names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::sync::Arc;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::blocks::{BLOCK, Blocks};
use crate::message::{Ino, Time, Xattrs};
use crate::settings::EXTENT;

/// A name in a directory.
pub type Name = Arc<OsStr>;

/// Attributes that the backing directory lacks.
pub mod dirty {
    /// Permissions.
    pub const MODE: u8 = 1;
    /// Owner and group.
    pub const OWNER: u8 = 2;
    /// Times of access and modification. Written last, because everything else changes them.
    pub const TIMES: u8 = 4;
    /// Extended attributes, ACLs among them.
    pub const XATTRS: u8 = 8;
    /// The size, beyond what the data says.
    pub const SIZE: u8 = 16;
    /// All of them.
    pub const ALL: u8 = MODE | OWNER | TIMES | XATTRS;
}

/// Where the backing directory has something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// The directory.
    pub dir: Ino,
    /// The name in it.
    pub name: OsString,
}

/// The file of the backing directory as it was last seen: another one, or another time of change, is somebody else's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Its inode number there.
    pub ino: u64,
    /// When it was changed last; [`Seen::UNKNOWN`] if we have just changed it ourselves.
    pub ctime: Time,
}

impl Seen {
    /// No time that a file has: whatever it has now, we have changed it, and were interrupted before we looked.
    pub const UNKNOWN: Time = Time { secs: i64::MIN, nanos: 0 };

    /// Whether this is the file, and nobody else has changed it.
    pub fn is_as_left(&self, ino: u64, ctime: Time) -> bool {
        self.ino == ino && (self.ctime == ctime || self.ctime == Seen::UNKNOWN)
    }
}

/// A file or directory.
#[derive(Clone, Debug)]
pub struct Inode {
    /// Kind and permissions.
    pub mode: u32,
    /// Names that it has, those that are not known here included.
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub size: u64,
    /// Units of 512 bytes on the backing directory, as long as nothing was changed here.
    pub blocks: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    /// The device of the backing directory that it is on: a name can't be moved to another.
    pub dev: u64,
    /// References of the client.
    pub references: u64,
    /// Open handles.
    pub handles: u32,
    /// Where the backing directory has it, as far as it is known; none for what is not made there yet.
    pub homes: Vec<Home>,
    /// As it was last seen there.
    pub seen: Option<Seen>,
    /// Bits of [`dirty`].
    pub dirty: u8,
    /// Those that are just being written back.
    pub writing: u8,
    /// Operations in the log that it takes part in.
    pub pending: u32,
    /// The operation in the log that makes it; 0 if none.
    pub made_by: u64,
    /// `None` before they were read.
    pub xattrs: Option<Box<Xattrs>>,
    /// What it is.
    pub kind: Kind,
}

/// What an inode is.
#[derive(Clone, Debug)]
pub enum Kind {
    /// A regular file; `None`: nothing of it is resident, and its data is what the backing directory has.
    File(Option<Box<FileData>>),
    /// A directory.
    Directory(Box<Directory>),
    /// A symbolic link; `None` before it was read.
    Symlink(Option<OsString>),
    /// A device, a named pipe or a socket.
    Special,
}

/// The names in a directory.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    /// The names that are known.
    pub entries: BTreeMap<Name, Ino>,
    /// Names that the backing directory may have and programs don't see. None if `complete`.
    pub gone: BTreeSet<Name>,
    /// Whether what is not in `entries` is not there.
    pub complete: bool,
    /// The directory that it is in.
    pub parent: Ino,
}

/// The resident data of a file.
#[derive(Clone, Debug, Default)]
pub struct FileData {
    /// By number: extent `n` begins at `n * EXTENT`.
    pub extents: BTreeMap<u32, Extent>,
    /// What is not valid in an extent, and before this byte, is to be read from the backing directory. Behind it there are
    /// zeros.
    pub backing_len: u64,
    /// The file there may be longer than `backing_len`: it has to be cut before more is written to it.
    pub cut: bool,
    /// It has data there that may not have reached the disk.
    pub unsynced: bool,
    /// How often it was cut.
    pub cuts: u64,
    /// What writing back could not do, for the next fsync or close.
    pub error: Option<i32>,
    /// Handles by which the kernel reads the file of the store itself.
    pub passthrough: u32,
    /// Those of them that are writable: maps of theirs change the store unseen.
    pub shared_writers: u32,
    /// Handles whose reads and writes all come here.
    pub direct: u32,
    /// Bytes that count as pinned.
    pub pinned: u64,
    /// The extent that was read last, for read-ahead.
    pub last_read: u32,
    /// The file there, for one that has no name any more.
    pub orphan: Option<Arc<File>>,
}

/// A piece of a file.
#[derive(Clone, Debug, Default)]
pub struct Extent {
    /// Blocks whose content is in the store.
    pub valid: Blocks,
    /// Those of them that the backing directory lacks.
    pub dirty: Blocks,
    /// Those that are being written there.
    pub flight: Blocks,
    /// Blocks that memory is set aside for.
    pub held: Blocks,
    /// A thread is reading the blocks that are not valid.
    pub fetching: bool,
    /// Requests that are reading from or writing to it.
    pub pins: u32,
}

impl Extent {
    /// Whether its memory can be given up.
    pub fn can_go(&self) -> bool {
        self.pins == 0 && !self.fetching && self.dirty.is_empty() && self.flight.is_empty()
    }
}

/// A change of names that the backing directory lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// The first name of something new.
    Make { ino: Ino, dir: Ino, name: OsString },
    /// A further name of a file.
    Link { ino: Ino, dir: Ino, name: OsString },
    /// A name is removed, a directory's too.
    Unlink { ino: Ino, dir: Ino, name: OsString },
    /// A name is changed, and what had the new one is replaced.
    Rename { ino: Ino, dir: Ino, name: OsString, to_dir: Ino, to_name: OsString, over: Option<Ino> },
    /// Two names are exchanged.
    Exchange { ino: Ino, dir: Ino, name: OsString, other: Ino, to_dir: Ino, to_name: OsString },
}

impl Operation {
    /// The inodes that it is about, and those whose entries it changes.
    pub fn inodes(&self) -> Vec<Ino> {
        match self {
            Operation::Make { ino, dir, .. }
            | Operation::Link { ino, dir, .. }
            | Operation::Unlink { ino, dir, .. } => vec![*ino, *dir],
            Operation::Rename { ino, dir, to_dir, over, .. } => {
                let mut all = vec![*ino, *dir, *to_dir];
                all.extend(over);
                all
            }
            Operation::Exchange { ino, dir, other, to_dir, .. } => vec![*ino, *dir, *other, *to_dir],
        }
    }

    /// Whether it gives this inode a name, or takes one from it.
    pub fn shows(&self, ino: Ino) -> bool {
        self.inodes()[0] == ino || matches!(self, Operation::Exchange { other, .. } if *other == ino)
    }

    /// The directories whose entries it changes, each once.
    pub fn directories(&self) -> Vec<Ino> {
        match self {
            Operation::Make { dir, .. } | Operation::Link { dir, .. } | Operation::Unlink { dir, .. } => {
                vec![*dir]
            }
            Operation::Rename { dir, to_dir, .. } | Operation::Exchange { dir, to_dir, .. }
                if dir == to_dir =>
            {
                vec![*dir]
            }
            Operation::Rename { dir, to_dir, .. } | Operation::Exchange { dir, to_dir, .. } => {
                vec![*dir, *to_dir]
            }
        }
    }
}

impl Inode {
    /// An inode without anything; its kind is what `mode` says.
    pub fn new(mode: u32, dev: u64) -> Inode {
        let kind = match FileType::from_raw_mode(mode) {
            FileType::RegularFile => Kind::File(None),
            FileType::Directory => Kind::Directory(Box::default()),
            FileType::Symlink => Kind::Symlink(None),
            _ => Kind::Special,
        };
        Inode {
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: 0,
            blocks: 0,
            atime: Time::default(),
            mtime: Time::default(),
            ctime: Time::default(),
            dev,
            references: 0,
            handles: 0,
            homes: Vec::new(),
            seen: None,
            dirty: 0,
            writing: 0,
            pending: 0,
            made_by: 0,
            xattrs: None,
            kind,
        }
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        matches!(self.kind, Kind::Directory(_))
    }

    /// Its resident data, if there is any.
    pub fn data(&self) -> Option<&FileData> {
        match &self.kind {
            Kind::File(data) => data.as_deref(),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub fn data_mut(&mut self) -> Option<&mut FileData> {
        match &mut self.kind {
            Kind::File(data) => data.as_deref_mut(),
            _ => None,
        }
    }

    /// Its data, made if nothing was resident; `None` if it is no regular file.
    pub fn data_or_new(&mut self) -> Option<&mut FileData> {
        let backing_len = if self.homes.is_empty() { 0 } else { self.size };
        match &mut self.kind {
            Kind::File(data) => {
                Some(data.get_or_insert_with(|| Box::new(FileData { backing_len, ..FileData::default() })))
            }
            _ => None,
        }
    }

    /// Whether the backing directory lacks something of it (its names aside).
    pub fn is_dirty(&self) -> bool {
        let is_dirty = |extent: &Extent| !extent.dirty.is_empty() || !extent.flight.is_empty();
        self.dirty | self.writing != 0
            || self.data().is_some_and(|data| data.cut || data.extents.values().any(is_dirty))
    }

    /// Whether no name leads to it.
    pub fn is_orphan(&self) -> bool {
        self.nlink == 0
    }
}

impl FileData {
    /// Whether all of a file of `size` bytes is in the store, or is zeros.
    pub fn is_all_resident(&self, size: u64) -> bool {
        let end = size.min(self.backing_len);
        (0..end.div_ceil(EXTENT)).all(|number| {
            let wanted = blocks_before(number as u32, end);
            self.extents
                .get(&(number as u32))
                .is_some_and(|extent| !extent.fetching && extent.valid.covers(&wanted))
        })
    }

    /// Whether a block's content has to be read from the backing directory before it is known.
    pub fn is_missing(&self, number: u32) -> Blocks {
        let wanted = blocks_before(number, self.backing_len);
        match self.extents.get(&number) {
            Some(extent) => wanted.without(&extent.valid),
            None => wanted,
        }
    }
}

/// The blocks of an extent that begin before byte `end` of the file.
pub fn blocks_before(number: u32, end: u64) -> Blocks {
    let begin = u64::from(number) * EXTENT;
    Blocks::range(0, (end.saturating_sub(begin).min(EXTENT).div_ceil(BLOCK)) as u16)
}
