//! Many small files as one archive, and back.
//!
//! A parallel filesystem pays for every file it makes, far more than for the bytes in it. [`pack`] puts a tree into
//! one file that any `tar` can read; [`unpack()`] makes the tree again with many threads, checks every file, and finds
//! a single one without reading the rest, because there is an index behind the stream.
//!
//! # The archive
//!
//! **The stream** is a POSIX tar archive in the pax format (see `header`). Entries keep type, mode, numeric owner,
//! modification time with nanoseconds, extended attributes, ACLs (as `SCHILY.acl.*`, where GNU tar, bsdtar and star
//! look for them), hard links and holes of 64 KiB and more (GNU's sparse format 1.0). Sockets can't be packed and are reported. The root is the
//! first member, `./`; the paths of all others are relative to it, directories stand before what they hold and hard
//! links after the name they refer to. Two blocks of zeros end the stream.
//!
//! A `.tar` is the stream as it is. A `.tar.zst` is the stream cut into pieces of about 4 MiB, at the borders of
//! members where these are small and every 4 MiB of a larger file's data, each compressed as a Zstandard frame of its
//! own with a checksum. Decompressors take them for one stream.
//!
//! **The index** follows the stream: in a `.tar` after zeros that make the file a multiple of 10,240 bytes, where
//! programs have stopped reading; in a `.tar.zst` inside a skippable frame (magic `0x184D2A50`), which they pass
//! over. It has two parts:
//!
//! 1. The members in the order of the stream, as one Zstandard frame. *Numbers* have seven bits in each byte, the
//!    lowest first, the top bit set in all but the last byte. A member is
//!    - a byte: its type (`f` 0, `h` 1, `d` 2, `l` 3, `p` 4, `c` 5, `b` 6, see [`Member::kind`]), plus 0x80 if it is
//!      a file with holes, plus 0x40 if the file could not be read to its end and has no checksum;
//!    - its path: how many bytes it shares with the path before it, how many follow, and these;
//!    - in blocks of 512 bytes, how far its header begins behind the end of the member before it (0), and how long
//!      the header is;
//!    - its permission bits;
//!    - of a file: its size; the bytes it takes in the stream, if it has holes; its XXH3-128 in 16 bytes, big end
//!      first, in the form that [`crate::checksum`] describes;
//!    - of a symlink or hard link: the length of its target's path, and this.
//! 2. The frames of a `.tar.zst`: for each its length in the stream and in the file.
//!
//! **The footer** is the last 64 bytes, little end first: `ONDKPACK`; in 4 bytes each the version (1) and flags (bit
//! 0: compressed); in 8 bytes each the length of the members, of the frames, and of the stream; the XXH3-128 of the
//! index and of the footer up to here, 16 bytes, big end first; `KCAPKDNO`.
//!
//! The index is for speed and certainty only. An archive that has none, because another program made it or because
//! it was cut off, is unpacked from its beginning to its end by one thread.
//!
//! # How it is written
//!
//! One thread walks the tree and hands out units: about 4 MiB of small files, or a part of a large one. Workers read,
//! hash and compress them; each unit is given its place when those before it are finished, and is written by the
//! worker that is at hand: the number of threads makes no difference to the archive. A file that changes while it is
//! read is read again, three times in all; then it is cut or filled to the length its header promised, and reported.
//! The archive is built under a temporary name, readable to its maker alone, and gets its own when it is complete and on
//! stable storage. Its mode is what the umask leaves of 0666, and lets in nobody who can't read the tree's root.
//!
//! Memory: each worker has a unit before and one after compression (8 to 10 MiB together), and as many finished units
//! as there are workers may wait to be written (4 MiB each). Each directory that is not entered yet takes some tens of
//! bytes, each inode with names still to be found about a hundred. The index waits in a file without a name when it
//! has more than 4 MiB.
//!
//! # How it is read
//!
//! Nothing is written outside of the target: absolute paths and paths with `..` are refused, every directory is opened
//! relative to the target and never through a symlink, whether the archive has it or the target had it before. A file
//! whose checksum differs is removed and reported. Unpacking takes about half a kilobyte of memory for each directory
//! and the paths of all hard links, and for each worker one frame or 4 MiB of the stream.
//!
//! # Layout
//!
//! - `header`, `sparse`: one member; `index`: where the members are
//! - `write`, `output`: the packer; `trust`: how far an archive is believed by the unpacker
//! - `stream`: reading at any place; `directories`: those of the target; `restore`: one entry; `unpack`, `sequential`:
//!   with the index, and without

mod directories;
mod header;
mod index;
mod output;
mod restore;
mod sequential;
mod sparse;
mod stream;
mod trust;
mod unpack;
mod write;

pub use self::index::Member;

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ondeck_core::PackFormat;
use rustix::fs::{self, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use self::directories::TargetDirectories;
use self::index::IndexLookup;
use self::restore::Restorer;
use self::stream::{Source, Stream};
use self::trust::Trust;
use self::unpack::{Selection, Unpacker};
use crate::Options;
use crate::attributes::Xattr;
use crate::dir::OPEN_DIRECTORY;
use crate::error::Fault;
use crate::progress::Monitor;

/// How to pack.
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// How many threads read and compress; 0 means as many as there are processors, at most 16.
    pub threads: usize,
    /// The level of Zstandard, from 1 (fast) to 22 (small), or below 0 (faster still).
    pub level: i32,
    /// Flush the archive to stable storage before it gets its name.
    pub sync: bool,
    /// Do not call it a failure if the caller can't read what belongs to another user, nor if an archive can't hold it:
    /// leave that behind, and tell of it ([`crate::Event::LeftBehind`]).
    pub leave_others: bool,
    /// By inode, the modes of entries that have others for the time of the packing, so that they can be read.
    pub modes: HashMap<u64, u32>,
    /// The name under which an extended attribute is packed, if it is; all of them under their own names without this.
    pub xattr_name: Option<fn(&CStr) -> Option<CString>>,
    /// What the archive's mode lacks of 0666, beside what the tree's own lacks. The process's umask does not count: a
    /// process that makes files of any mode has none.
    pub umask: Mode,
    /// The group that the tree is of, if it could not be given to the tree itself.
    pub group: Option<u32>,
}

/// Nobody's but the user's, where nobody says more.
const PRIVATE: Mode = Mode::RWXG.union(Mode::RWXO);

impl Default for PackOptions {
    fn default() -> Self {
        PackOptions {
            threads: 0,
            level: 3,
            sync: true,
            leave_others: false,
            modes: HashMap::new(),
            xattr_name: None,
            umask: PRIVATE,
            group: None,
        }
    }
}

impl PackOptions {
    /// The extended attributes that are packed, by their names in the archive.
    fn packed(&self, mut xattrs: Vec<Xattr>) -> Vec<Xattr> {
        if let Some(packed) = self.xattr_name {
            xattrs.retain_mut(|xattr| packed(&xattr.name).map(|name| xattr.name = name).is_some());
        }
        xattrs
    }

    fn worker_count(&self) -> usize {
        workers(self.threads)
    }
}

/// How to unpack.
#[derive(Clone, Debug)]
pub struct UnpackOptions {
    /// How many threads make files; 0 means as many as there are processors, at most 16.
    pub threads: usize,
    /// Paths in the archive that are unpacked, each with what it holds; `None` means all.
    pub only: Option<Vec<PathBuf>>,
    /// Flush the target filesystem before success is claimed.
    pub sync: bool,
    /// What the modes lack of 0777: those of directories that the archive says nothing of, and without `same_permissions`
    /// all. The process's umask does not count.
    pub umask: Mode,
    /// Whether entries get the owners, modes with set-id bits, ACLs and privileged attributes that the archive says, and
    /// its devices are made. Without it they are the caller's, and get the permissions that the umask leaves.
    pub same_permissions: bool,
}

impl Default for UnpackOptions {
    fn default() -> Self {
        UnpackOptions { threads: 0, only: None, sync: true, umask: PRIVATE, same_permissions: false }
    }
}

fn workers(threads: usize) -> usize {
    Options { threads, ..Options::default() }.worker_count()
}

/// What was packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackSummary {
    /// Regular files, without the further names of hard links.
    pub files: u64,
    /// Directories, the root included.
    pub directories: u64,
    /// Symlinks, FIFOs and devices.
    pub others: u64,
    /// Further names of files.
    pub hard_links: u64,
    /// Bytes of the files' content, holes included.
    pub bytes: u64,
    /// Bytes that were read of it: holes are not.
    pub bytes_read: u64,
    /// Bytes of the tar stream.
    pub stream_bytes: u64,
    /// Bytes of the archive.
    pub archive_bytes: u64,
    /// Entries that failed or changed meanwhile; each was reported as an event.
    pub errors: u64,
    /// Those of them that were removed before they could be packed.
    pub vanished: u64,
    /// Time spent packing.
    pub packing: Duration,
    /// Time the filesystem took to confirm that it holds the archive.
    pub syncing: Duration,
}

/// Whether an archive's index was of use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexState {
    /// There is one, and it was used.
    Used,
    /// There is none: another program made the archive, or its end is missing. Files were not checked.
    #[default]
    None,
    /// There is one, but it is damaged. Files were not checked.
    Damaged,
}

/// What was unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnpackSummary {
    /// Regular files made.
    pub files: u64,
    /// Directories made or merged that the archive lists.
    pub directories: u64,
    /// Symlinks, FIFOs and devices made.
    pub others: u64,
    /// Further names of files linked.
    pub hard_links: u64,
    /// Bytes of the files' content, holes included.
    pub bytes: u64,
    /// Files whose checksum was compared and is right.
    pub verified: u64,
    /// Entries that failed; each was reported as an event.
    pub errors: u64,
    /// Entries that kept the caller's owner or group, because only root can give files away.
    pub ownership_kept: u64,
    /// Bytes read from the archive.
    pub bytes_read: u64,
    /// Whether the archive's index was used.
    pub index: IndexState,
    /// Time spent unpacking.
    pub unpacking: Duration,
    /// Time the target filesystem took to confirm that it holds the files.
    pub syncing: Duration,
}

/// Packing or unpacking as a whole could not begin or could not go on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum PackError {
    /// The tree to be packed can't be opened.
    #[error("can't read the source {}: {source}", .path.display())]
    Source { path: PathBuf, source: io::Error },
    /// The archive can't be written. Nothing is left of it.
    #[error("can't write the archive {}: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    /// Another process is writing the same archive, or into the same target.
    #[error("another process is writing {}; wait for it or end it", .path.display())]
    Busy {
        /// The archive or the target.
        path: PathBuf,
    },
    /// The archive can't be opened or read.
    #[error("can't read the archive {}: {source}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The file is something else.
    #[error("{} is neither a tar archive nor one compressed with Zstandard", .path.display())]
    NotAnArchive { path: PathBuf },
    /// The archive's end is missing. What came before was unpacked.
    #[error("the archive {} ends too early, at byte {at} of its tar stream; what follows is lost", .path.display())]
    Truncated {
        path: PathBuf,
        /// How far its stream could be read.
        at: u64,
    },
    /// The archive holds something that can't be. What came before was unpacked.
    #[error("the archive {} is damaged near byte {at} of its tar stream: {why}; what follows is lost", .path.display())]
    Damaged {
        path: PathBuf,
        /// How far its stream could be read.
        at: u64,
        /// What is wrong.
        why: String,
    },
    /// A path to be unpacked can't be one of an archive.
    #[error("{}: {why}", .path.display())]
    Selection { path: PathBuf, why: String },
    /// The target can't be opened or made.
    #[error("can't write to the target {}: {source}", .path.display())]
    Target {
        /// The target as the caller named it.
        path: PathBuf,
        source: io::Error,
    },
    /// The filesystem did not confirm that it holds the data.
    #[error("{} failed to sync: {source}; it is not safe on disk, do it again", .path.display())]
    Sync {
        /// The archive or the target.
        path: PathBuf,
        source: io::Error,
    },
    /// It was told to stop.
    #[error("interrupted; run the same command again")]
    Interrupted,
}

/// Packs the directory `source` into the file `name` in `directory`, which replaces one that is there.
///
/// Entries that fail are events and are counted, the rest goes on. An archive that lies in the tree itself is left
/// out.
///
/// # Errors
/// [`PackError`] if there is no archive; nothing is left of the attempt.
pub fn pack(
    source: BorrowedFd<'_>,
    directory: BorrowedFd<'_>,
    name: &CStr,
    format: PackFormat,
    options: &PackOptions,
    monitor: &Monitor<'_>,
) -> Result<PackSummary, PackError> {
    write::pack(source, directory, name, format == PackFormat::TarZst, options, monitor)
}

/// The same by paths.
///
/// # Errors
/// As [`pack`].
pub fn pack_path(
    source: &Path,
    archive: &Path,
    format: PackFormat,
    options: &PackOptions,
    monitor: &Monitor<'_>,
) -> Result<PackSummary, PackError> {
    let write_error = |error: io::Error| PackError::Write { path: archive.to_owned(), source: error };
    let from = open_directory(source)
        .map_err(|error| PackError::Source { path: source.to_owned(), source: error.into() })?;
    let name = archive.file_name().ok_or_else(|| write_error(Errno::ISDIR.into()))?;
    let name = CString::new(name.as_bytes()).map_err(|error| write_error(error.into()))?;
    let parent = archive.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = open_directory(parent).map_err(|error| write_error(error.into()))?;
    pack(from.as_fd(), directory.as_fd(), &name, format, options, monitor)
}

/// The members of an archive, with or without an index.
///
/// # Errors
/// [`PackError::Read`] or [`PackError::NotAnArchive`]; members may be errors, after which none follows.
pub fn list(archive: BorrowedFd<'_>) -> Result<Listing, PackError> {
    let path = name_of(archive);
    let opened = open_archive(archive, &path)?;
    let read_error = |source: io::Error| PackError::Read { path: path.clone(), source };
    let members = match &opened.found {
        IndexLookup::Index(index) => Members::Indexed(index.members(&opened.source).map_err(read_error)?),
        _ => {
            let reader = sequential::Reader::new(&opened.source, path.clone(), None)?;
            Members::Sequential(sequential::Members::new(reader)?)
        }
    };
    Ok(Listing { state: opened.state(), members, path })
}

/// The same by path.
///
/// # Errors
/// As [`list`].
pub fn list_path(archive: &Path) -> Result<Listing, PackError> {
    list(open_file(archive)?.as_fd())
}

/// The members of an archive, one after another.
pub struct Listing {
    state: IndexState,
    members: Members,
    path: PathBuf,
}

enum Members {
    Indexed(index::Members),
    Sequential(sequential::Members),
}

impl Listing {
    /// Whether this comes from the archive's index.
    pub fn index(&self) -> IndexState {
        self.state
    }
}

impl Iterator for Listing {
    type Item = Result<Member, PackError>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.members {
            Members::Indexed(members) => {
                let read_error = |source| PackError::Read { path: self.path.clone(), source };
                members.next().map(|member| member.map_err(read_error))
            }
            Members::Sequential(members) => members.next(),
        }
    }
}

/// Unpacks an archive into the directory `target`, which may hold something: directories are merged, everything else
/// is replaced. What is made gets the permissions that the umask leaves, unless the caller trusts the archive
/// ([`UnpackOptions::same_permissions`]); of directories that were there, the target too, only the time is set.
///
/// Entries that fail are events and are counted, the rest goes on.
///
/// # Errors
/// [`PackError`] if the archive can't be read to its end, or if all that was unpacked may not be safe on disk. Told to
/// stop, it removes the directories it has not completed; files in directories that were there before stay.
pub fn unpack(
    archive: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    options: &UnpackOptions,
    monitor: &Monitor<'_>,
) -> Result<UnpackSummary, PackError> {
    unpack_into(archive, target, None, options, monitor)
}

/// The same; `made` is the mode of a target that was just made, closed, if the archive says nothing of it.
fn unpack_into(
    archive: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    made: Option<Mode>,
    options: &UnpackOptions,
    monitor: &Monitor<'_>,
) -> Result<UnpackSummary, PackError> {
    let began = Instant::now();
    let path = name_of(archive);
    let read_error = |source: io::Error| PackError::Read { path: path.clone(), source };
    let mut selection = Selection::new(options.only.as_deref()).map_err(|(path, fault)| {
        PackError::Selection { path: display(&path), why: fault.source.to_string() }
    })?;
    let opened = open_archive(archive, &path)?;
    let state = opened.state();
    let _lock = Lock::on(target)?;
    let trust = if options.same_permissions { Trust::Full } else { Trust::Umask(options.umask) };
    let restorer = Restorer::new(target, state != IndexState::Used, trust, monitor);
    let mut directories = TargetDirectories::new(target, made, options.umask, trust);
    let read = match opened.found {
        IndexLookup::Index(mut index) => {
            let stream = Stream { source: opened.source.clone(), frames: index.frames.take() };
            let unpacker = Unpacker { restorer: &restorer, stream, threads: workers(options.threads) };
            unpacker.run(&index, &opened.source, &mut selection, &mut directories, &read_error)
        }
        _ => sequential::Reader::new(&opened.source, path.clone(), Some(monitor.progress))
            .and_then(|reader| sequential::unpack(reader, &restorer, &mut selection, &mut directories)),
    };
    if monitor.progress.is_cancelled() {
        directories.abandon();
        return Err(PackError::Interrupted);
    }
    let directories =
        directories.complete(&restorer.privilege, &mut |path, fault| restorer.report(path, fault));
    read?;
    for path in selection.missed() {
        restorer.report(&path, Fault::message("unpacking it", "the archive has no such path"));
    }
    let unpacking = began.elapsed();
    if options.sync {
        fs::syncfs(target)
            .map_err(|error| PackError::Sync { path: name_of(target), source: error.into() })?;
    }
    let counts = &restorer.counts;
    Ok(UnpackSummary {
        files: counts.files.load(Relaxed),
        directories,
        others: counts.others.load(Relaxed),
        hard_links: counts.hard_links.load(Relaxed),
        bytes: counts.bytes.load(Relaxed),
        verified: counts.verified.load(Relaxed),
        errors: counts.errors.load(Relaxed),
        ownership_kept: restorer.privilege.ownership_kept.load(Relaxed),
        bytes_read: opened.source.bytes_read(),
        index: state,
        unpacking,
        syncing: began.elapsed() - unpacking,
    })
}

/// The same by paths. A target that is not there is made; its parent must exist.
///
/// # Errors
/// As [`unpack()`].
pub fn unpack_path(
    archive: &Path,
    target: &Path,
    options: &UnpackOptions,
    monitor: &Monitor<'_>,
) -> Result<UnpackSummary, PackError> {
    let archive = open_file(archive)?;
    let target_error = |error: Errno| PackError::Target { path: target.to_owned(), source: error.into() };
    // Closed until it is complete: what comes into it may be readable to all, and it itself not.
    let is_new = match fs::mkdir(target, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(target_error(error)),
    };
    let opened = open_directory(target).map_err(target_error)?;
    let made = is_new
        .then(|| directories::plain_mode(opened.as_fd(), options.umask))
        .transpose()
        .map_err(target_error)?;
    let unpacked = unpack_into(archive.as_fd(), opened.as_fd(), made, options, monitor);
    let failed = unpacked.as_ref().map_or(true, |summary| summary.errors > 0);
    if is_new && failed {
        // A directory that nothing came into is not left behind: the next run makes it, and gives it its attributes.
        let _ = fs::rmdir(target);
    }
    unpacked
}

/// An archive and what is known of its index.
struct OpenArchive {
    source: Arc<Source>,
    found: IndexLookup,
}

impl OpenArchive {
    fn state(&self) -> IndexState {
        match self.found {
            IndexLookup::Index(_) => IndexState::Used,
            IndexLookup::Nothing => IndexState::None,
            IndexLookup::Damaged => IndexState::Damaged,
        }
    }
}

fn open_archive(archive: BorrowedFd<'_>, path: &Path) -> Result<OpenArchive, PackError> {
    let read_error = |source: io::Error| PackError::Read { path: path.to_owned(), source };
    let source = Source::new(archive).map_err(read_error)?;
    let found = match index::find(&source).map_err(read_error)? {
        // The index speaks of another archive than the one it is behind.
        IndexLookup::Index(index) if index.frames.is_some() != source.compressed => IndexLookup::Damaged,
        found => found,
    };
    Ok(OpenArchive { source, found })
}

/// Keeps a second unpacker out of the same target. Filesystems without locks are used without.
struct Lock(OwnedFd);

impl Lock {
    fn on(target: BorrowedFd<'_>) -> Result<Self, PackError> {
        let target_error = |error: Errno| PackError::Target { path: name_of(target), source: error.into() };
        let own = fs::openat(target, c".", OPEN_DIRECTORY, Mode::empty()).map_err(target_error)?;
        match fs::flock(&own, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(PackError::Busy { path: name_of(target) }),
            _ => Ok(Lock(own)),
        }
    }
}

impl Drop for Lock {
    /// Not by closing alone: a child that another thread is just starting still has the descriptor.
    fn drop(&mut self) {
        let _ = fs::flock(&self.0, FlockOperation::Unlock);
    }
}

fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    // A symlink that the caller names is followed; within the trees none is.
    fs::open(path, OPEN_DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty())
}

fn open_file(path: &Path) -> Result<OwnedFd, PackError> {
    fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| PackError::Read { path: path.to_owned(), source: error.into() })
}

/// How messages call what is open.
fn name_of(file: BorrowedFd<'_>) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_else(|_| PathBuf::from("."))
}

fn display(path: &[u8]) -> PathBuf {
    PathBuf::from(std::ffi::OsStr::from_bytes(path))
}
