//! The packer: one thread walks the tree and cuts it into units, workers read and compress them.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::fs::{self, AtFlags, FileType, FlockOperation, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;
use zstd::bulk::Compressor;
use zstd::zstd_safe::{CParameter, compress_bound};

use super::header::{Attributes, BLOCK, Header, Holes, pad, padded};
use super::index::{self, MOST_PATH, Member};
use super::large::LargeFile;
use super::output::{Output, PartOf, Sizes, Unit};
use super::sparse::ContentHasher;
use super::{PackError, PackOptions, PackSummary, name_of};
use crate::acl::{mode_bits, plain_bits, shuts_out_somebody};
use crate::attributes::{
    ACL_ACCESS, ACL_DEFAULT, Privilege, Xattr, acl_of, closed_by_another, drop_acl, is_directory, is_regular,
    is_searchable, is_symlink, read_xattrs, read_xattrs_at, same_state,
};
use crate::checksum::Checksum;
use crate::dir::{DirFds, DirNode, FdBudget, Kind, NewDir, OPEN_DIRECTORY, join, partial_name};
use crate::error::{During, EntryError, Fault};
use crate::links::{Links, Role};
use crate::progress::{Event, Monitor};

/// Bytes of the stream that small files are gathered into: one unit of work, and one frame of a compressed archive.
/// Large enough that compression loses nothing at its edges and that a write is cheap, small enough that a single
/// file is found quickly and that a few dozen of them fit in memory.
const UNIT: u64 = 4 << 20;
/// The most entries in a unit: all of them may have attributes of 64 KiB each, which nobody knows before they are read.
const MOST_ENTRIES: usize = 1024;
/// Files larger than this are packed in parts.
const LARGE: u64 = UNIT;
/// The most bytes of a frame. A unit is larger only if its files have very large attributes.
const FRAME: usize = 8 << 20;
/// How often a file that changes under the packer is read again before it is reported.
const TRIES: u32 = 3;
/// Bytes of directory entries read at a time.
const LISTING: usize = 32 << 10;

const READ_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    // A FIFO swapped in for the file must not block a worker.
    .union(OFlags::NONBLOCK);

/// What all threads share.
pub(super) struct Packer<'a> {
    pub(super) options: &'a PackOptions,
    compressed: bool,
    monitor: &'a Monitor<'a>,
    pub output: Output<'a>,
    pub budget: FdBudget,
    root: bool,
    no_atime: AtomicBool,
    links: Links,
    /// Device and inode of the archive itself and of the one it replaces, which may lie in the tree.
    archive: Vec<(u64, u64)>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    files: AtomicU64,
    directories: AtomicU64,
    others: AtomicU64,
    hard_links: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    vanished: AtomicU64,
}

/// An entry that the walk found.
struct Entry {
    /// Its directory; of a directory, itself.
    node: Arc<DirNode>,
    name: CString,
    what: What,
}

enum What {
    Directory,
    /// A file and its size when it was found.
    File(u64),
    /// A symlink, FIFO or device.
    Other,
    /// A further name of the entry that has this path.
    Link(Vec<u8>),
}

/// What a worker does in one go.
enum Work {
    Entries(Vec<Entry>),
    Part { file: Arc<LargeFile>, part: u64 },
}

/// The units that wait, each with its number in the stream.
type Units = Mutex<Receiver<(u64, Work)>>;

/// A worker's own buffers.
struct Worker {
    compressor: Option<Compressor<'static>>,
    /// What is to be compressed.
    plain: Vec<u8>,
}

/// Packs a tree into a new file in `directory` that gets its name when it is complete.
pub(super) fn pack(
    source: BorrowedFd<'_>,
    directory: BorrowedFd<'_>,
    name: &CStr,
    compressed: bool,
    options: &PackOptions,
    monitor: &Monitor<'_>,
) -> Result<PackSummary, PackError> {
    let source_error = |error: Errno| PackError::Source { path: name_of(source), source: error.into() };
    let path = name_of(directory).join(OsStr::from_bytes(name.to_bytes()));
    let write_error = |source: io::Error| PackError::Write { path: path.clone(), source };
    let began = Instant::now();
    let root = fs::openat(source, c".", OPEN_DIRECTORY, Mode::empty()).map_err(source_error)?;
    let root_stat = fs::fstat(&root).map_err(source_error)?;
    let old = match fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(old) => Some(old),
        Err(Errno::NOENT) => None,
        Err(error) => return Err(write_error(error.into())),
    };
    if old.as_ref().is_some_and(is_directory) {
        return Err(write_error(Errno::ISDIR.into()));
    }
    let temporary = partial_name(name);
    let (file, stat) = create(directory, &temporary).map_err(|error| match error {
        Errno::WOULDBLOCK => PackError::Busy { path: path.clone() },
        error => write_error(error.into()),
    })?;
    let access = access_of(&stat, directory, &root, &root_stat, options);
    let mut archive = vec![(stat.st_dev, stat.st_ino)];
    if let Some(old) = old {
        archive.push((old.st_dev, old.st_ino));
    }
    let packed = (|| {
        let index = index::Writer::new(directory).map_err(write_error)?;
        let workers = options.worker_count();
        let packer = Packer {
            options,
            compressed,
            monitor,
            output: Output::new(file.as_fd(), compressed, workers, index, monitor),
            budget: FdBudget::of_this_process(),
            root: Privilege::of_this_process().root,
            no_atime: AtomicBool::new(true),
            links: Links::default(),
            archive,
            counts: Counts::default(),
        };
        packer.run(workers, root, root_stat);
        if monitor.progress.is_cancelled() {
            return Err(PackError::Interrupted);
        }
        let Packer { output, counts, .. } = packer;
        let sizes = output
            .complete(&mut |end| {
                let mut worker = Worker::new(compressed, options.level)?;
                let mut frame = Vec::new();
                worker.compress(end, &mut frame)?;
                Ok(frame)
            })
            .map_err(write_error)?;
        let packing = began.elapsed();
        access.and_then(|access| give_access(&file, &access)).map_err(|error| write_error(error.into()))?;
        if options.sync {
            fs::fsync(&file).map_err(|error| PackError::Sync { path: path.clone(), source: error.into() })?;
        }
        fs::renameat(directory, &*temporary, directory, name).map_err(|error| write_error(error.into()))?;
        if options.sync {
            sync_name(directory)
                .map_err(|error| PackError::Sync { path: path.clone(), source: error.into() })?;
        }
        Ok(summary(&counts, &sizes, packing, began.elapsed() - packing))
    })();
    if packed.is_err() {
        // The error that made it useless is the one to tell of; the next packer removes what is left.
        let _ = fs::unlinkat(directory, &*temporary, AtFlags::empty());
    }
    packed
}

/// Brings the names in a directory to disk.
fn sync_name(directory: BorrowedFd<'_>) -> Result<(), Errno> {
    let opened = match fs::openat(directory, c".", OPEN_DIRECTORY, Mode::empty()) {
        // One that may be written to and not be read can't be synced by itself.
        Err(Errno::ACCESS) => return fs::syncfs(directory),
        opened => opened?,
    };
    match fs::fsync(opened) {
        // Not every filesystem can sync a directory; those that can't need no telling.
        Err(Errno::INVAL | Errno::NOTSUP | Errno::NOSYS) => Ok(()),
        done => done,
    }
}

fn summary(
    counts: &Counts,
    sizes: &Sizes,
    packing: std::time::Duration,
    syncing: std::time::Duration,
) -> PackSummary {
    PackSummary {
        files: counts.files.load(Relaxed),
        directories: counts.directories.load(Relaxed),
        others: counts.others.load(Relaxed),
        hard_links: counts.hard_links.load(Relaxed),
        bytes: counts.bytes.load(Relaxed),
        stream_bytes: sizes.stream,
        archive_bytes: sizes.archive,
        errors: counts.errors.load(Relaxed),
        vanished: counts.vanished.load(Relaxed),
        packing,
        syncing,
    }
}

/// Makes the file that is to become the archive; what an interrupted packer left goes first.
fn create(directory: BorrowedFd<'_>, name: &CStr) -> Result<(OwnedFd, Stat), Errno> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = |file: &OwnedFd| match fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(Errno::WOULDBLOCK),
        // Filesystems without locks are used without.
        _ => Ok(()),
    };
    // What can't be opened nobody packs into: then its removal says what is wrong.
    if let Ok(old) = fs::openat(directory, name, flags | OFlags::NONBLOCK, Mode::empty()) {
        lock(&old)?;
    }
    match fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error),
    }
    // Its maker's alone until it is complete.
    let file = fs::openat(directory, name, flags | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR)?;
    lock(&file)?;
    let stat = fs::fstat(&file)?;
    Ok((file, stat))
}

/// Who may read a finished archive.
struct Access {
    mode: u32,
    /// It may keep the ACL that it inherited.
    inherits: bool,
}

/// Who may read the archive `file` of the tree `root`, which is made in `directory`: who may read any new file there, but
/// nobody who can't read the tree.
fn access_of(
    file: &Stat,
    directory: BorrowedFd<'_>,
    root: &OwnedFd,
    root_stat: &Stat,
    options: &PackOptions,
) -> Result<Access, Errno> {
    let mut tree = options.modes.get(&root_stat.st_ino).copied().unwrap_or(root_stat.st_mode);
    // With an ACL, the group's bits of the mode are the mask.
    let acl = acl_of(root.as_fd(), ACL_ACCESS)?;
    tree &= acl.as_ref().map_or(0o777, |acl| plain_bits(acl));
    if acl.is_some_and(|acl| shuts_out_somebody(&acl)) {
        // The archive's mode can't say who.
        tree &= 0o700;
    }
    let is_its_group = file.st_gid == options.group.unwrap_or(root_stat.st_gid);
    // Who is of the tree's group has the group's rights alone.
    let others = tree & 0o005 == 0o005 && (is_its_group || tree & 0o050 == 0o050);
    let group = if is_its_group { tree & 0o050 == 0o050 } else { others };
    let mut mode = 0o666 & !options.umask.as_raw_mode();
    mode &= 0o600 | if group { 0o060 } else { 0 } | if others { 0o006 } else { 0 };
    if let Some(acl) = acl_of(directory, ACL_DEFAULT)? {
        // Whom it names has nothing to do with who can read the tree, unless all can.
        mode &= if others { mode_bits(&acl).unwrap_or(0o600) } else { plain_bits(&acl) };
    }
    Ok(Access { mode, inherits: others })
}

fn give_access(file: &OwnedFd, access: &Access) -> Result<(), Errno> {
    if !access.inherits {
        drop_acl(file.as_fd());
    }
    if fs::fstat(file)?.st_mode & 0o777 == access.mode {
        return Ok(());
    }
    match fs::fchmod(file, Mode::from_raw_mode(access.mode)) {
        // The filesystem has no modes of its own.
        Err(Errno::PERM | Errno::NOTSUP | Errno::NOSYS) => Ok(()),
        done => done,
    }
}

/// Lets the others end when a worker panics.
struct StopOnPanic<'a, 'b>(&'a Packer<'b>);

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.output.stop();
        }
    }
}

impl Packer<'_> {
    fn run(&self, workers: usize, root: OwnedFd, stat: Stat) {
        // One unit for each worker waits, so that none has to wait for the walk. A unit that waits holds names, not
        // data.
        let (send, receive) = sync_channel(workers);
        let receive = Arc::new(Mutex::new(receive));
        std::thread::scope(|scope| {
            let mut started = 0;
            for number in 0..workers {
                let receive = receive.clone();
                let thread = std::thread::Builder::new().name(format!("pack-{number}"));
                started += usize::from(thread.spawn_scoped(scope, move || self.work(&receive)).is_ok());
            }
            let mut walk = Walk {
                packer: self,
                send,
                // Otherwise the channel belongs to the workers alone, so that it ends with them.
                alone: (started == 0).then_some(receive),
                number: 0,
                entries: Vec::new(),
                bytes: 0,
            };
            walk.tree(root, stat);
        });
    }

    fn work(&self, units: &Units) {
        let _guard = StopOnPanic(self);
        let mut worker = match Worker::new(self.compressed, self.options.level) {
            Ok(worker) => worker,
            Err(_) => Worker { compressor: None, plain: Vec::new() },
        };
        loop {
            let next = units.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
            let Ok((number, work)) = next else { break };
            self.unit(number, work, &mut worker);
        }
    }

    fn unit(&self, number: u64, work: Work, worker: &mut Worker) {
        let mut plain =
            if self.compressed { std::mem::take(&mut worker.plain) } else { self.output.buffer() };
        let mut unit = Unit::default();
        match work {
            Work::Entries(entries) => {
                plain.clear();
                plain.reserve((UNIT + UNIT / 8) as usize);
                unit.members = self.entries(&entries, &mut plain);
            }
            Work::Part { file, part } => {
                if let Some((member, outcome)) = file.part(self, part, &mut plain)
                    && !self.output.is_stopped()
                {
                    match outcome {
                        Ok(()) => self.done(&self.counts.files, member.size),
                        Err(fault) => self.failed(&member.path, fault),
                    }
                    unit.members.push(member);
                }
                unit.part_of = Some(PartOf { first: part == 0, header_offset: file.header_offset.clone() });
            }
        }
        if self.output.is_stopped() {
            return self.output.finish(number, Unit::default());
        }
        unit.plain_length = plain.len() as u64;
        if self.compressed {
            let mut bytes = self.output.buffer();
            bytes.clear();
            for piece in plain.chunks(FRAME) {
                match worker.compress(piece, &mut bytes) {
                    Ok(length) => unit.frames.push((piece.len(), length)),
                    Err(error) => self.output.fail(error),
                }
            }
            unit.bytes = bytes;
            worker.plain = plain;
        } else {
            unit.bytes = plain;
        }
        self.output.finish(number, unit);
    }

    fn done(&self, count: &AtomicU64, bytes: u64) {
        count.fetch_add(1, Relaxed);
        self.counts.bytes.fetch_add(bytes, Relaxed);
        self.monitor.progress.bytes_done.fetch_add(bytes, Relaxed);
        self.monitor.progress.entries_done.fetch_add(1, Relaxed);
    }

    /// Reports an entry that could not be packed; the others go on.
    fn failed(&self, path: &[u8], fault: Fault) {
        self.counts.errors.fetch_add(1, Relaxed);
        // Nothing but the source is looked for by name.
        let is_gone = fault.source.kind() == io::ErrorKind::NotFound;
        self.counts.vanished.fetch_add(u64::from(is_gone), Relaxed);
        self.monitor.progress.errors.fetch_add(1, Relaxed);
        let error = EntryError { path: path.to_vec(), action: fault.action, source: fault.source };
        (self.monitor.event)(Event::Failed(&error));
    }

    /// Tells of an entry that could not be packed, or is left behind.
    fn entry_failed(&self, node: &Arc<DirNode>, name: &CStr, path: &[u8], fault: Fault) {
        if self.options.leave_others
            && fault.source.kind() == io::ErrorKind::PermissionDenied
            && let Ok(fds) = node.fds(&self.budget)
            && let Some(owner) = closed_by_another(fds.source.as_fd(), name)
        {
            return (self.monitor.event)(Event::LeftBehind { path, owner });
        }
        self.failed(path, fault);
    }

    /// Appends entries to a buffer.
    fn entries(&self, entries: &[Entry], buffer: &mut Vec<u8>) -> Vec<Member> {
        let mut members = Vec::with_capacity(entries.len());
        let mut parent: Option<(&Arc<DirNode>, Vec<u8>)> = None;
        for entry in entries {
            if self.output.is_stopped() {
                break;
            }
            let directory = match parent.take() {
                Some((node, path)) if Arc::ptr_eq(node, &entry.node) => path,
                _ => entry.node.path(),
            };
            let path = match entry.what {
                What::Directory => directory.clone(),
                _ => join(&directory, entry.name.to_bytes()),
            };
            parent = Some((&entry.node, directory));
            let start = buffer.len();
            match self.entry(entry, &path, buffer) {
                Ok((member, outcome)) => {
                    let (count, bytes) = match member.kind {
                        b'f' => (&self.counts.files, member.size),
                        b'h' => (&self.counts.hard_links, 0),
                        _ => (&self.counts.others, 0),
                    };
                    match outcome {
                        Err(fault) => self.failed(&path, fault),
                        Ok(()) if member.kind == b'd' => {
                            self.counts.directories.fetch_add(1, Relaxed);
                        }
                        Ok(()) => self.done(count, bytes),
                    }
                    members.push(member);
                }
                Err(fault) => {
                    buffer.truncate(start);
                    self.entry_failed(&entry.node, &entry.name, &path, fault);
                }
            }
        }
        members
    }

    /// Appends one entry. It may be in the archive and yet have something to report.
    fn entry(
        &self,
        entry: &Entry,
        path: &[u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(Member, Result<(), Fault>), Fault> {
        let fds = entry.node.fds(&self.budget)?;
        let dir = fds.source.as_fd();
        let mut header = match &entry.what {
            What::File(found) => return self.file(&fds, entry, *found, path, buffer),
            What::Directory => header_of(
                b'd',
                path,
                attributes_of(self, &entry.node.source, self.options.packed(read_xattrs(dir, None)?)),
            ),
            What::Link(first) => {
                let stat = fs::statat(dir, &*entry.name, AtFlags::SYMLINK_NOFOLLOW)
                    .during("reading its attributes")?;
                if is_regular(&stat) {
                    // Whether this name can be read is whether the first one could: a link to what is not in the
                    // archive would be of no use.
                    open_source(self, &fds, &entry.name)?;
                }
                let mut header = header_of(b'h', path, attributes_of(self, &stat, Vec::new()));
                header.link.clone_from(first);
                header
            }
            What::Other => {
                let stat = fs::statat(dir, &*entry.name, AtFlags::SYMLINK_NOFOLLOW)
                    .during("reading its attributes")?;
                let kind = match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Symlink => b'l',
                    FileType::Fifo => b'p',
                    FileType::CharacterDevice => b'c',
                    FileType::BlockDevice => b'b',
                    _ => {
                        return Err(Fault::message(
                            "packing it",
                            "it was replaced by another kind of entry meanwhile",
                        ));
                    }
                };
                let xattrs = self.options.packed(read_xattrs_at(dir, &entry.name, None)?);
                let mut header = header_of(kind, path, attributes_of(self, &stat, xattrs));
                if is_symlink(&stat) {
                    header.link = fs::readlinkat(dir, &*entry.name, Vec::new())
                        .during("reading where it points")?
                        .into_bytes();
                }
                header.device = (fs::major(stat.st_rdev), fs::minor(stat.st_rdev));
                header
            }
        };
        let start = buffer.len();
        header.write(buffer)?;
        let member = Member {
            path: path.to_vec(),
            kind: header.kind,
            mode: header.attributes.mode,
            size: 0,
            link: std::mem::take(&mut header.link),
            checksum: None,
            sparse: false,
            header_offset: start as u64,
            data_offset: buffer.len() as u64,
            stored: 0,
        };
        Ok((member, Ok(())))
    }

    /// Appends a small file.
    fn file(
        &self,
        fds: &DirFds,
        entry: &Entry,
        found: u64,
        path: &[u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(Member, Result<(), Fault>), Fault> {
        let start = buffer.len();
        let mut attempt = 1;
        loop {
            let (file, stat) = open_source(self, fds, &entry.name)?;
            let xattrs = self.options.packed(read_xattrs(file.as_fd(), None)?);
            let whole = stat.st_size as u64;
            // It was small when its place in this unit was given to it.
            let size = if whole > LARGE { found } else { whole };
            let segments = if size == whole { super::sparse::segments(file.as_fd(), &stat)? } else { None };
            let mut map = Vec::new();
            let mut header = header_of(b'f', path, attributes_of(self, &stat, xattrs));
            header.size = size;
            header.stored = size;
            if let Some(segments) = &segments {
                super::header::write_map(segments, size, &mut map);
                header.stored = map.len() as u64 + segments.iter().map(|segment| segment.length).sum::<u64>();
                header.holes = Holes::InData;
            }
            header.write(buffer)?;
            let data_offset = buffer.len();
            let checksum = match &segments {
                None => {
                    read_into(file.as_fd(), 0, size as usize, buffer)?;
                    Checksum::Xxh3.of(&buffer[data_offset..])
                }
                Some(segments) => {
                    buffer.extend_from_slice(&map);
                    let mut hasher = ContentHasher::new(size);
                    for segment in segments {
                        let from = buffer.len();
                        read_into(file.as_fd(), segment.offset, segment.length as usize, buffer)?;
                        hasher.zeros_to(segment.offset);
                        hasher.update(&buffer[from..]);
                    }
                    hasher.finish()
                }
            };
            pad(buffer, header.stored);
            let after = fs::fstat(&file).during("reading its attributes")?;
            let same = same_state(&stat, &after) && size == whole;
            if !same && attempt < TRIES {
                attempt += 1;
                buffer.truncate(start);
                continue;
            }
            let member = Member {
                path: path.to_vec(),
                kind: b'f',
                mode: header.attributes.mode,
                size,
                link: Vec::new(),
                checksum: Some(checksum),
                sparse: segments.is_some(),
                header_offset: start as u64,
                data_offset: data_offset as u64,
                stored: header.stored,
            };
            return Ok((member, if same { Ok(()) } else { Err(changed()) }));
        }
    }
}

/// What an archive holds of a file whose writer was not done.
pub(super) fn changed() -> Fault {
    Fault::message(
        "packing it",
        "it changed while it was packed, and is in the archive as it was read; pack it when its writer has closed it",
    )
}

impl Worker {
    fn new(compressed: bool, level: i32) -> io::Result<Self> {
        let compressor = if compressed {
            let levels = zstd::compression_level_range();
            let mut compressor = Compressor::new(level.clamp(*levels.start(), *levels.end()))?;
            // So that zstd(1) and tar(1), which don't know the index, find damage too.
            compressor.set_parameter(CParameter::ChecksumFlag(true))?;
            Some(compressor)
        } else {
            None
        };
        Ok(Worker { compressor, plain: Vec::new() })
    }

    /// Appends a frame, and returns its length.
    fn compress(&mut self, plain: &[u8], bytes: &mut Vec<u8>) -> io::Result<usize> {
        let compressor = self.compressor.as_mut().ok_or(io::ErrorKind::OutOfMemory)?;
        let start = bytes.len();
        bytes.reserve(compress_bound(plain.len()));
        let mut end = io::Cursor::new(std::mem::take(bytes));
        end.set_position(start as u64);
        let length = compressor.compress_to_buffer(plain, &mut end);
        *bytes = end.into_inner();
        length
    }
}

/// The walk: directories depth first, each before what it holds, its entries in the order of the filesystem.
struct Walk<'a, 'b> {
    packer: &'a Packer<'b>,
    send: SyncSender<(u64, Work)>,
    /// No thread could be started: the walk does the work as well.
    alone: Option<Arc<Units>>,
    /// The next unit's.
    number: u64,
    /// What is being gathered, and about how many bytes it will be.
    entries: Vec<Entry>,
    bytes: u64,
}

impl Walk<'_, '_> {
    fn tree(&mut self, root: OwnedFd, stat: Stat) {
        // Directories that were found and not entered. A path is not recursion: a tree can be deeper than a stack.
        let mut waiting: Vec<(Arc<DirNode>, CString)> = Vec::new();
        let node = self.node(None, CString::default(), root, stat);
        self.directory(node, &mut waiting);
        while let Some((parent, name)) = waiting.pop() {
            if self.packer.output.is_stopped() {
                break;
            }
            match self.enter(&parent, &name) {
                Ok(node) => self.directory(node, &mut waiting),
                Err(fault) => {
                    self.packer.entry_failed(&parent, &name, &join(&parent.path(), name.to_bytes()), fault);
                }
            }
        }
        self.flush();
    }

    fn node(&self, parent: Option<Arc<DirNode>>, name: CString, source: OwnedFd, stat: Stat) -> Arc<DirNode> {
        let new = NewDir {
            parent,
            name,
            kind: Kind::Imagined,
            partial: None,
            restore_mode: None,
            restore_source: None,
            attributes: false,
            delete: false,
            hands_down_acl: false,
            source: stat,
            target: None,
            fds: DirFds { source, target: None },
        };
        DirNode::new(new, &self.packer.budget)
    }

    fn enter(&self, parent: &Arc<DirNode>, name: &CStr) -> Result<Arc<DirNode>, Fault> {
        let fds = parent.fds(&self.packer.budget)?;
        let source = fs::openat(&fds.source, name, OPEN_DIRECTORY, Mode::empty()).during("opening it")?;
        if self.packer.options.leave_others && !is_searchable(source.as_fd()) {
            // Names alone are no results.
            return Err(Fault::new("opening it", Errno::ACCESS));
        }
        let stat = fs::fstat(&source).during("reading its attributes")?;
        Ok(self.node(Some(parent.clone()), name.to_owned(), source, stat))
    }

    /// Gathers a directory and its entries; subdirectories go to `waiting`.
    fn directory(&mut self, node: Arc<DirNode>, waiting: &mut Vec<(Arc<DirNode>, CString)>) {
        self.gather(Entry { node: node.clone(), name: CString::default(), what: What::Directory }, 0);
        let path = node.path();
        if let Err(fault) = self.list(&node, &path, waiting) {
            self.packer.failed(&path, fault);
        }
    }

    fn list(
        &mut self,
        node: &Arc<DirNode>,
        path: &[u8],
        waiting: &mut Vec<(Arc<DirNode>, CString)>,
    ) -> Result<(), Fault> {
        let fds = node.fds(&self.packer.budget)?;
        let mut buffer = [MaybeUninit::uninit(); LISTING];
        let mut entries = RawDir::new(&fds.source, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry.during("listing it")?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if self.packer.output.is_stopped() {
                break;
            }
            if entry.file_type() == FileType::Directory {
                waiting.push((node.clone(), name.to_owned()));
                continue;
            }
            match fs::statat(&fds.source, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if is_directory(&stat) => waiting.push((node.clone(), name.to_owned())),
                Ok(stat) => {
                    if let Err(fault) = self.found(node, name, path, &stat) {
                        self.packer.entry_failed(node, name, &join(path, name.to_bytes()), fault);
                    }
                }
                // Removed since the directory was read.
                Err(Errno::NOENT) => {}
                Err(error) => {
                    let fault = Fault::new("reading its attributes", error);
                    self.packer.entry_failed(node, name, &join(path, name.to_bytes()), fault);
                }
            }
        }
        Ok(())
    }

    fn found(&mut self, node: &Arc<DirNode>, name: &CStr, path: &[u8], stat: &Stat) -> Result<(), Fault> {
        if self.packer.archive.contains(&(stat.st_dev, stat.st_ino)) {
            return Ok(());
        }
        let progress = self.packer.monitor.progress;
        progress.entries_found.fetch_add(1, Relaxed);
        if path.len() + name.to_bytes().len() >= MOST_PATH {
            return Err(Fault::message("packing it", "its path is longer than 16 KiB"));
        }
        let entry = |what| Entry { node: node.clone(), name: name.to_owned(), what };
        if FileType::from_raw_mode(stat.st_mode) == FileType::Socket {
            if self.packer.options.leave_others && stat.st_uid != rustix::process::geteuid().as_raw() {
                let path = join(path, name.to_bytes());
                (self.packer.monitor.event)(Event::LeftBehind { path: &path, owner: stat.st_uid });
                return Ok(());
            }
            return Err(Fault::message("packing it", "an archive can't hold a socket"));
        }
        if stat.st_nlink > 1 {
            match self.packer.links.meet(stat, node, name) {
                Role::First => {
                    self.packer.links.placed(stat, node, name);
                }
                Role::LinkTo { node: first, name: first_name } => {
                    let first = join(&first.path(), first_name.to_bytes());
                    self.gather(entry(What::Link(first)), 0);
                    return Ok(());
                }
                // Only between meeting a first name and placing it, and nobody else is here.
                Role::Parked => return Err(Fault::message("packing it", "its first name is not placed")),
            }
        }
        if !is_regular(stat) {
            self.gather(entry(What::Other), 0);
            return Ok(());
        }
        let size = stat.st_size as u64;
        progress.bytes_found.fetch_add(size, Relaxed);
        if size <= LARGE {
            self.gather(entry(What::File(size)), size);
            return Ok(());
        }
        let file = Arc::new(LargeFile::begin(self.packer, node, name)?);
        self.flush();
        for part in 0..file.parts() {
            if self.packer.output.is_stopped() {
                break;
            }
            self.send(Work::Part { file: file.clone(), part });
        }
        Ok(())
    }

    fn gather(&mut self, entry: Entry, size: u64) {
        // A member with nanoseconds in its time has a header of three blocks.
        let bytes = padded(size) + 3 * BLOCK;
        if (self.bytes + bytes > UNIT && self.bytes > 0) || self.entries.len() == MOST_ENTRIES {
            self.flush();
        }
        self.entries.push(entry);
        self.bytes += bytes;
    }

    fn flush(&mut self) {
        if !self.entries.is_empty() {
            self.bytes = 0;
            let entries = std::mem::take(&mut self.entries);
            self.send(Work::Entries(entries));
        }
    }

    fn send(&mut self, work: Work) {
        // It fails only when every worker has panicked.
        if self.send.send((self.number, work)).is_err() {
            self.packer.output.stop();
        }
        self.number += 1;
        if let Some(receive) = &self.alone
            && let Ok((number, work)) = receive.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv()
        {
            let mut worker = Worker::new(self.packer.compressed, self.packer.options.level)
                .unwrap_or(Worker { compressor: None, plain: Vec::new() });
            self.packer.unit(number, work, &mut worker);
        }
    }
}

/// Opens a file of the source.
pub(super) fn open_source(packer: &Packer<'_>, fds: &DirFds, name: &CStr) -> Result<(OwnedFd, Stat), Fault> {
    // Reading a source should not change its access time; only its owner (or root) may ask for that.
    let mut opened = Err(Errno::PERM);
    if packer.root || packer.no_atime.load(Relaxed) {
        opened = fs::openat(&fds.source, name, READ_FLAGS | OFlags::NOATIME, Mode::empty());
        if matches!(opened, Err(Errno::PERM)) {
            packer.no_atime.store(false, Relaxed);
        }
    }
    if matches!(opened, Err(Errno::PERM)) {
        opened = fs::openat(&fds.source, name, READ_FLAGS, Mode::empty());
    }
    let file = opened.during("opening it")?;
    let stat = fs::fstat(&file).during("reading its attributes")?;
    if !is_regular(&stat) {
        return Err(Fault::message("packing it", "it was replaced by another kind of entry meanwhile"));
    }
    Ok((file, stat))
}

/// Appends `length` bytes of a file; what it does not have is zeros.
pub(super) fn read_into(
    file: BorrowedFd<'_>,
    mut offset: u64,
    length: usize,
    buffer: &mut Vec<u8>,
) -> Result<(), Fault> {
    let end = buffer.len() + length;
    buffer.reserve(length);
    while buffer.len() < end {
        // It may read more than asked for, which is cut off below: cheaper than to clear the buffer beforehand.
        match rustix::io::pread(file, spare_capacity(buffer), offset) {
            Ok(0) => break,
            Ok(count) => offset += count as u64,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Fault::new("reading it", error)),
        }
    }
    buffer.resize(end, 0);
    Ok(())
}

pub(super) fn attributes_of(packer: &Packer<'_>, stat: &Stat, xattrs: Vec<Xattr>) -> Attributes {
    Attributes {
        mode: packer.options.modes.get(&stat.st_ino).copied().unwrap_or(stat.st_mode & 0o7777),
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: crate::manifest::mtime(stat),
        xattrs,
    }
}

/// The header of an entry without content.
pub(super) fn header_of(kind: u8, path: &[u8], attributes: Attributes) -> Header {
    Header {
        kind,
        path: path.to_vec(),
        link: Vec::new(),
        attributes,
        size: 0,
        stored: 0,
        device: (0, 0),
        holes: Holes::None,
        lost: None,
    }
}
