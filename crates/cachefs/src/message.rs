//! What a client of a cache asks of its owner, and what the owner answers.
//!
//! A client serves a mount: here it is the FUSE server of this process. The owner has the names, the data, the journal and the
//! write-back. Nothing else passes between the two, so that they may be apart one day: requests and replies are plain values;
//! only [`Opened::passthrough`] is for a client on the owner's machine.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};

use rustix::fs::{MemfdFlags, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// The number of a file or directory in a cache, as programs see it (`st_ino`). The root is [`ROOT`].
pub type Ino = u64;

/// The number of the root directory.
pub const ROOT: Ino = 1;

/// The number of an open file.
pub type Handle = u64;

/// A point in time, as files have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Time {
    /// Seconds since 1970; negative before.
    pub secs: i64,
    /// Nanoseconds beyond `secs`, below 1,000,000,000.
    pub nanos: u32,
}

/// A file in the kernel's RAM that is given the time to read it, once [`Time::follow_the_kernel`] was called.
static CLOCK: OnceLock<OwnedFd> = OnceLock::new();

impl Time {
    /// The time now, as the kernel takes it for files.
    pub fn now() -> Time {
        CLOCK.get().and_then(|clock| Time::given_to(clock).ok()).unwrap_or_else(Time::of_the_last_tick)
    }

    /// The time of the last tick, which no file that is made after this call is older than.
    pub fn of_the_last_tick() -> Time {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        Time { secs: now.tv_sec, nanos: now.tv_nsec as u32 }
    }

    /// Has all times of this process be in one order with those that the kernel gives to files in RAM by itself: since Linux 6.13 these
    /// may be ahead of the last tick.
    ///
    /// # Errors
    /// The kernel's.
    pub fn follow_the_kernel() -> Result<(), Errno> {
        let clock = rustix::fs::memfd_create("ondeck-clock", MemfdFlags::CLOEXEC)?;
        Time::given_to(&clock)?;
        // Another cache of this process has made one already, if any.
        let _ = CLOCK.set(clock);
        Ok(())
    }

    fn given_to(clock: &OwnedFd) -> Result<Time, Errno> {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        rustix::fs::futimens(clock, &Timestamps { last_access: now, last_modification: now })?;
        let found = rustix::fs::fstat(clock)?;
        Ok(Time { secs: found.st_mtime, nanos: found.st_mtime_nsec as u32 })
    }
}

/// Extended attributes by name.
pub type Xattrs = BTreeMap<OsString, Vec<u8>>;

/// What stat(2) tells of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in stat(2)")]
pub struct Attributes {
    pub ino: Ino,
    /// Kind and permissions.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub size: u64,
    /// Units of 512 bytes.
    pub blocks: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The user by whose rights files are reached.
    pub uid: u32,
    /// The group that new files get.
    pub gid: u32,
    /// The thread that waits for the answer; 0 if nobody does, as for read-ahead.
    pub thread: u32,
    /// Whether the caller is not in the group of what it asks to change; looked up only where that has set-id bits.
    pub outsider: bool,
}

impl Caller {
    /// The mode of a file after this caller has changed its data: set-id bits go, unless the caller is root.
    pub fn mode_after_change(&self, mode: u32) -> u32 {
        if self.uid == 0 { mode } else { self.mode_after_chown(mode) }
    }

    /// The same after chown(2): set-id bits go in any case.
    pub fn mode_after_chown(&self, mode: u32) -> u32 {
        let mode = without_set_ids(mode);
        if self.outsider { mode & !libc::S_ISGID } else { mode }
    }
}

/// A mode without what a change by somebody else takes from it: set-user-id, and set-group-id where it is not a lock's mark.
pub fn without_set_ids(mode: u32) -> u32 {
    let mode = mode & !libc::S_ISUID;
    if mode & libc::S_IXGRP != 0 { mode & !libc::S_ISGID } else { mode }
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// That of the change.
    Now,
    /// A given one.
    To(Time),
}

/// Attributes to change; `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in stat(2)")]
pub struct Change {
    /// Permissions without the kind.
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
}

/// What a request for a new entry makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum New {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link to this.
    Symlink(OsString),
    /// A device, a named pipe or a socket: kind (`S_IFMT` bits) and device number.
    Special(u32, u64),
}

/// What renameat2(2) is told beside the names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Replace {
    /// What has the new name is replaced.
    #[default]
    Yes,
    /// `RENAME_NOREPLACE`.
    No,
    /// `RENAME_EXCHANGE`.
    Exchange,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in the system calls of their names")]
pub enum Request<'a> {
    /// Answered by [`Reply::Entry`], which counts as one reference until [`Service::forget`].
    Lookup {
        parent: Ino,
        name: OsString,
    },
    Attributes {
        ino: Ino,
    },
    Change {
        ino: Ino,
        change: Change,
    },
    ReadLink {
        ino: Ino,
    },
    /// Answered by [`Reply::Entry`], a reference; with `open` (files only) by [`Reply::Created`].
    Make {
        parent: Ino,
        name: OsString,
        new: New,
        mode: u32,
        umask: u32,
        open: Option<OpenMode>,
    },
    Link {
        ino: Ino,
        parent: Ino,
        name: OsString,
    },
    Unlink {
        parent: Ino,
        name: OsString,
    },
    RemoveDirectory {
        parent: Ino,
        name: OsString,
    },
    Rename {
        parent: Ino,
        name: OsString,
        to_parent: Ino,
        to_name: OsString,
        replace: Replace,
    },
    Open {
        ino: Ino,
        mode: OpenMode,
    },
    /// A file is closed by all that had it: the last use of `handle`.
    Release {
        ino: Ino,
        handle: Handle,
    },
    /// close(2) by one of those who have it: reports what writing back could not do.
    Close {
        ino: Ino,
        handle: Handle,
    },
    Sync {
        ino: Ino,
        data_only: bool,
    },
    Read {
        ino: Ino,
        handle: Handle,
        offset: u64,
        size: u32,
    },
    Write {
        ino: Ino,
        handle: Handle,
        offset: u64,
        data: Cow<'a, [u8]>,
        kill_privileges: bool,
    },
    Allocate {
        ino: Ino,
        handle: Handle,
        offset: u64,
        length: u64,
        mode: i32,
    },
    /// `SEEK_DATA` or `SEEK_HOLE`.
    Seek {
        ino: Ino,
        handle: Handle,
        offset: u64,
        hole: bool,
    },
    /// Copies from one place to another, at most an extent; answered by [`Reply::Written`].
    CopyRange {
        from: Ino,
        from_offset: u64,
        to: Ino,
        to_handle: Handle,
        to_offset: u64,
        length: u64,
    },
    /// All entries of a directory, as they are at one moment.
    List {
        ino: Ino,
    },
    /// What these names of a directory lead to: as many [lookups](Request::Lookup), answered by [`Reply::Entries`].
    Entries {
        ino: Ino,
        names: Vec<OsString>,
    },
    GetXattr {
        ino: Ino,
        name: OsString,
    },
    ListXattrs {
        ino: Ino,
    },
    /// `flags` as of setxattr(2).
    SetXattr {
        ino: Ino,
        name: OsString,
        value: Vec<u8>,
        flags: i32,
    },
    RemoveXattr {
        ino: Ino,
        name: OsString,
    },
    Space,
}

impl Request<'_> {
    /// The same, with data of its own.
    pub fn into_owned(self) -> Request<'static> {
        match self {
            Request::Write { ino, handle, offset, data, kill_privileges } => {
                Request::Write { ino, handle, offset, data: Cow::Owned(data.into_owned()), kill_privileges }
            }
            Request::Lookup { parent, name } => Request::Lookup { parent, name },
            Request::Attributes { ino } => Request::Attributes { ino },
            Request::Change { ino, change } => Request::Change { ino, change },
            Request::ReadLink { ino } => Request::ReadLink { ino },
            Request::Make { parent, name, new, mode, umask, open } => {
                Request::Make { parent, name, new, mode, umask, open }
            }
            Request::Link { ino, parent, name } => Request::Link { ino, parent, name },
            Request::Unlink { parent, name } => Request::Unlink { parent, name },
            Request::RemoveDirectory { parent, name } => Request::RemoveDirectory { parent, name },
            Request::Rename { parent, name, to_parent, to_name, replace } => {
                Request::Rename { parent, name, to_parent, to_name, replace }
            }
            Request::Open { ino, mode } => Request::Open { ino, mode },
            Request::Release { ino, handle } => Request::Release { ino, handle },
            Request::Close { ino, handle } => Request::Close { ino, handle },
            Request::Sync { ino, data_only } => Request::Sync { ino, data_only },
            Request::Read { ino, handle, offset, size } => Request::Read { ino, handle, offset, size },
            Request::Allocate { ino, handle, offset, length, mode } => {
                Request::Allocate { ino, handle, offset, length, mode }
            }
            Request::Seek { ino, handle, offset, hole } => Request::Seek { ino, handle, offset, hole },
            Request::CopyRange { from, from_offset, to, to_handle, to_offset, length } => {
                Request::CopyRange { from, from_offset, to, to_handle, to_offset, length }
            }
            Request::List { ino } => Request::List { ino },
            Request::Entries { ino, names } => Request::Entries { ino, names },
            Request::GetXattr { ino, name } => Request::GetXattr { ino, name },
            Request::ListXattrs { ino } => Request::ListXattrs { ino },
            Request::SetXattr { ino, name, value, flags } => Request::SetXattr { ino, name, value, flags },
            Request::RemoveXattr { ino, name } => Request::RemoveXattr { ino, name },
            Request::Space => Request::Space,
        }
    }
}

/// What open(2) is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in open(2)")]
pub struct OpenMode {
    pub write: bool,
    pub truncate: bool,
    /// Whether writes need not be asked for, each of them: not with `O_SYNC`.
    pub unasked: bool,
}

/// An open file.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Its number until [`Request::Release`].
    pub handle: Handle,
    /// The file of the store that holds all of the data and will as long as the handle is there. A client on this machine lets
    /// the kernel read, and map, that one.
    ///
    /// If there is one, the client has to take it: the kernel refuses opens of one file that differ in this. With
    /// [`writable`](Opened::writable), reads and writes go to the owner all the same, and only maps go to the store, unless
    /// [`unasked`](Opened::unasked) says otherwise.
    pub passthrough: Option<Arc<File>>,
    /// Reads and writes go to the file of the store, too.
    pub unasked: bool,
    /// Whether writes are to be expected.
    pub writable: bool,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its name.
    pub name: OsString,
    /// Its number: with `attributes`, the one to ask for it by; else only for readdir(3), and not 0.
    pub ino: Ino,
    /// Kind (`S_IFMT` bits).
    pub kind: u32,
}

/// An answer to a request that was carried out.
#[derive(Debug)]
#[allow(missing_docs, reason = "as in the requests that they answer")]
pub enum Reply {
    Done,
    Entry(Attributes),
    Attributes(Attributes),
    Created(Attributes, Opened),
    Opened(Opened),
    /// Contents, the target of a link, the value of an attribute, or names that each end with a zero.
    Data(Vec<u8>),
    Written(u32),
    Offset(u64),
    Listed(Arc<Vec<Listed>>),
    /// In the order of the names, each a reference; `None` for a name that is not there.
    Entries(Vec<Option<Attributes>>),
    Space(Space),
}

/// What statvfs(3) tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in statvfs(3)")]
pub struct Space {
    pub block_size: u32,
    pub blocks: u64,
    pub free: u64,
    pub available: u64,
    pub files: u64,
    pub free_files: u64,
    pub name_length: u32,
}

/// Takes the answer to a request, on any thread, once.
pub type Answer = Box<dyn FnOnce(Result<Reply, Errno>) + Send>;

/// A name that a client has a reference of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// The number of what has the name.
    pub ino: Ino,
    /// The directory that the name is in.
    pub parent: Ino,
    /// The name.
    pub name: OsString,
    /// Whether it is a directory's.
    pub is_dir: bool,
}

/// A client of a cache, as its owner sees it.
pub trait Client: Send + Sync {
    /// Asks for references back, as far as nobody uses what they are of. The client gives them back by [`Service::forget`], when
    /// it can; it does not say of what it keeps them. The call never waits.
    fn give_back(&self, names: Vec<Named>);
}

/// The owner of a cache, as its clients see it.
pub trait Service: Send + Sync {
    /// Tells who the client is. Before that, and when it is gone, nobody is asked for references.
    fn attach(&self, client: Weak<dyn Client>);

    /// Has a request carried out. It is answered before the call returns, or later, on another thread; the call itself never
    /// waits for the backing directory or for room.
    fn ask(&self, caller: Caller, request: Request<'_>, answer: Answer);

    /// Gives references back that [`Reply::Entry`], [`Reply::Entries`] and [`Reply::Created`] had counted.
    fn forget(&self, references: &[(Ino, u64)]);

    /// Reads into the caller's buffer what is all resident and returns how much it was; `None` if the request has to be
    /// [asked](Service::ask). Saves a copy.
    fn read_resident(&self, ino: Ino, offset: u64, into: &mut [u8]) -> Option<usize>;
}

/// The bytes of a name.
pub fn bytes(name: &OsStr) -> &[u8] {
    std::os::unix::ffi::OsStrExt::as_bytes(name)
}
