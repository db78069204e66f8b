//! The journal: what the backing directory lacks, in the store, so that a cache can go on after its process was killed.
//!
//! It is a file of records, in the order in which things happened. Whoever recovers starts with nothing and does the same again;
//! what is not in the journal is as the backing directory has it. Data is in the store *before* the record that makes it valid,
//! and taken from the store only *after* the record that says so. A record is there as soon as it is written: the store is RAM,
//! which a killed process leaves as it is. When the file has become long, its content is replaced by one that begins with
//! everything that still counts.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use super::blocks::Blocks;
use super::inode::{Home, Inode, Kind, Operation, Seen};
use crate::message::Xattrs;
use crate::message::{Ino, Time};
use crate::store::Store;

const NAME: &str = "journal";
const NEW_NAME: &str = "journal.new";

/// What a journal begins with: its kind and version.
pub(super) const HEADER: &[u8; 24] = b"ondeck cache journal 1\n\0";

/// So much room is set aside for what is to come, where programs can fill the store by themselves.
pub(super) const RUNWAY: u64 = 16 << 20;

/// No record is longer: an extended attribute has 64 KiB at most, a name 255 bytes.
const LONGEST_RECORD: usize = 64 << 20;

/// An inode as it is in the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Image {
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub size: u64,
    pub blocks: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub dev: u64,
    pub homes: Vec<Home>,
    pub seen: Option<Seen>,
    pub dirty: u8,
    pub made_by: u64,
    pub xattrs: Option<Xattrs>,
    pub target: Option<OsString>,
    /// The directory that a directory is in.
    pub parent: Ino,
    /// Of a file with resident data: [`FileData::backing_len`](super::state::FileData::backing_len) and `cut`.
    pub data: Option<(u64, bool)>,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// An inode is so, now.
    Inode(Ino, Box<Image>),
    /// A name leads to an inode, now.
    Entry(Ino, OsString, Ino),
    /// A name leads nowhere, now.
    Gone(Ino, OsString),
    /// Blocks are dirty, now.
    Dirty(Ino, u32, Blocks),
    /// The log begins with the operation of this number; all before it are done.
    Begins(u64),
    /// An operation was added to the log; names are changed.
    Operation { number: u64, operation: Operation, at: Time, change_names: bool, cancelled: bool },
    /// What an operation made was removed, before it was on the backing directory.
    Cancelled { number: u64, unlink: Operation, at: Time },
    /// An operation of the log is done; if under another name than it says, under which.
    Applied { number: u64, beside: Option<OsString> },
    /// Something was made under the name of what is not complete yet.
    Prepared { ino: Ino, home: Home, seen: Seen },
    /// Bytes were written.
    Write { ino: Ino, begin: u64, end: u64, mode: u32, size: u64, mtime: Time, bits: u8 },
    /// The size is about to be changed.
    Size { ino: Ino, size: u64, mode: u32, mtime: Time, bits: u8 },
    /// A part is about to become zeros.
    Zero { ino: Ino, begin: u64, end: u64, mtime: Time },
    /// The backing directory has these blocks and attributes.
    Clean { ino: Ino, extents: Vec<(u32, Blocks)>, bits: u8, seen: Option<Seen>, data: Option<(u64, bool)> },
    /// It was seen so on the backing directory, after we had changed it there.
    Seen(Ino, Seen),
    /// Nothing leads to an inode any more; its number is free.
    Forgotten(Ino),
    /// It is about to be changed on the backing directory.
    Writing(Ino),
    /// The operation of this number is about to be carried out, before others that are stuck.
    Begun(u64),
    /// The kernel writes to a file without asking, from now on or no longer: all of it is dirty, and its size is the store's.
    Unasked(Ino, bool),
}

/// The journal of a cache.
pub struct Journal {
    pub(super) root: OwnedFd,
    pub(super) file: File,
    pub(super) length: u64,
    pub(super) length_at_first: u64,
    /// Room that is set aside behind its end; 0: none.
    pub(super) runway: u64,
    pub(super) set_aside: u64,
    /// Inodes of which the journal says what they are.
    pub(super) known: HashSet<Ino>,
    /// Written together at the end of a request.
    pub(super) buffer: Vec<u8>,
    /// Why nothing more can be written.
    pub failed: Option<String>,
}

/// Why a journal can't be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The kernel's.
    #[error("can't read the cache's journal: {0}")]
    Io(#[from] io::Error),
    /// It is none, or of another version.
    #[error("the cache's journal is not one of this version; use the `ondeck` that wrote it")]
    Version,
    /// Something in the middle is not what was written.
    #[error("the cache's journal is damaged {0} bytes after its beginning")]
    Damaged(u64),
}

fn frame(into: &mut Vec<u8>, record: &Record) -> Result<(), postcard::Error> {
    let begin = into.len();
    into.extend([0; 8]);
    let mut filled = postcard::to_extend(record, std::mem::take(into))?;
    let length = (filled.len() - begin - 8) as u32;
    let hash = XxHash3_128::oneshot(&filled[begin + 8..]) as u32;
    filled[begin..begin + 4].copy_from_slice(&length.to_le_bytes());
    filled[begin + 4..begin + 8].copy_from_slice(&hash.to_le_bytes());
    *into = filled;
    Ok(())
}

impl Journal {
    /// A journal that nothing is written to: for the time in which the former one is read.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unwritten(store: &Store) -> io::Result<Journal> {
        let root = store.root().try_clone_to_owned()?;
        let file = File::options().write(true).open("/dev/null")?;
        Ok(Journal {
            root,
            file,
            length: 0,
            length_at_first: u64::MAX / 8,
            runway: 0,
            set_aside: 0,
            known: HashSet::new(),
            buffer: Vec::new(),
            failed: None,
        })
    }

    /// The records of the journal that is there; `None` if there is none. What a killed process has begun to write at the end is
    /// left out: nobody was answered for it.
    ///
    /// # Errors
    /// It can't be read, or is damaged.
    pub fn read(store: &Store) -> Result<Option<Vec<Record>>, JournalError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = match rustix::fs::openat(store.root(), NAME, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(JournalError::Io(error.into())),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let Some(mut rest) = bytes.strip_prefix(HEADER) else {
            let is_cut = HEADER.starts_with(&bytes);
            return Err(if is_cut {
                JournalError::Damaged(bytes.len() as u64)
            } else {
                JournalError::Version
            });
        };
        let mut records = Vec::new();
        while let Some((head, body)) = rest.split_first_chunk::<8>() {
            let [a, b, c, d, e, f, g, h] = *head;
            let (length, hash) =
                (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]));
            let damaged = JournalError::Damaged((bytes.len() - rest.len()) as u64);
            let Some((record, behind)) = body.split_at_checked(length) else {
                if length > LONGEST_RECORD {
                    return Err(damaged);
                }
                break;
            };
            if XxHash3_128::oneshot(record) as u32 != hash {
                if behind.is_empty() {
                    break;
                }
                return Err(damaged);
            }
            records.push(postcard::from_bytes(record).map_err(|_| damaged)?);
            rest = behind;
        }
        Ok(Some(records))
    }

    pub(super) fn add(&mut self, record: &Record) {
        if let Err(error) = frame(&mut self.buffer, record) {
            self.failed.get_or_insert_with(|| error.to_string());
        }
    }

    /// Writes what was added. What can't be written is told by [`failed`](Journal::failed), and not tried again: who can't be
    /// recovered must not be told that it is safe.
    pub(super) fn write(&mut self) {
        if self.failed.is_none() {
            match self.file.write_all(&self.buffer) {
                Ok(()) => {
                    self.length += self.buffer.len() as u64;
                    self.set_room_aside();
                }
                Err(error) => {
                    tracing::error!(%error, "can't write the cache's journal; changes are refused from now on");
                    self.failed = Some(error.to_string());
                }
            }
        }
        self.buffer.clear();
    }

    /// Sees to it that there is room for what is to come, if that is wanted.
    pub(super) fn set_room_aside(&mut self) {
        if self.length + self.runway / 2 < self.set_aside || self.runway == 0 {
            return;
        }
        let end = self.length + self.runway;
        // If there is none now, there is half of it left, and it is tried again.
        if rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, end).is_ok() {
            self.set_aside = end;
        }
    }
}

pub(super) fn new_file(root: &OwnedFd, content: &[u8]) -> io::Result<File> {
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::APPEND;
    let mut file = File::from(rustix::fs::openat(root, NEW_NAME, flags, Mode::RUSR | Mode::WUSR)?);
    let done = file
        .write_all(HEADER)
        .and_then(|()| file.write_all(content))
        .and_then(|()| Ok(rustix::fs::renameat(root, NEW_NAME, root, NAME)?));
    if done.is_err() {
        // It takes room that there is none of, maybe.
        let _ = rustix::fs::unlinkat(root, NEW_NAME, AtFlags::empty());
    }
    done.map(|()| file)
}

impl Image {
    /// An inode as it is now.
    pub fn of(inode: &Inode) -> Image {
        Image {
            mode: inode.mode,
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            rdev: inode.rdev(),
            size: inode.size,
            blocks: inode.blocks,
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            dev: inode.dev,
            homes: inode.homes.to_vec(),
            seen: inode.seen,
            dirty: inode.dirty | inode.writing,
            made_by: inode.made_by,
            xattrs: inode.xattrs.as_deref().cloned(),
            target: match &inode.kind {
                Kind::Symlink(target) => target.as_deref().cloned(),
                _ => None,
            },
            parent: match &inode.kind {
                Kind::Directory(directory) => directory.parent,
                _ => 0,
            },
            data: inode.data().map(|data| (data.backing_len, data.cut)),
        }
    }
}
