//! The packer: one thread walks the tree and cuts it into units, workers read and compress them.
//!
//! # Layout
//!
//! - `archive`: the file that becomes the archive; `access`: who may read it
//! - `walk`: cutting the tree into units; `entries`: packing one; `large`: files that are units of their own

mod access;
mod archive;
mod entries;
mod large;
mod walk;

pub(super) use archive::pack;

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};

use rustix::fs::Stat;
use zstd::bulk::Compressor;
use zstd::zstd_safe::{CParameter, compress_bound};

use super::PackOptions;
use super::output::{Output, PartOf, Unit};
use crate::attributes::closed_by_another;
use crate::dir::{DirNode, FdBudget};
use crate::error::{EntryError, Fault};
use crate::links::Links;
use crate::progress::{Event, Monitor};
use large::LargeFile;
use walk::Walk;

/// Bytes of the stream that small files are gathered into: one unit of work, and one frame of a compressed archive.
/// Large enough that compression loses nothing at its edges and that a write is cheap, small enough that a single
/// file is found quickly and that a few dozen of them fit in memory.
const UNIT: u64 = 4 << 20;

/// Files larger than this are packed in parts.
const LARGE: u64 = UNIT;
/// The most bytes of a frame. A unit is larger only if its files have very large attributes.
const FRAME: usize = 8 << 20;

/// What all threads share.
struct Packer<'a> {
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
    bytes_read: AtomicU64,
    errors: AtomicU64,
    vanished: AtomicU64,
}

/// An entry that the walk found.
struct Entry {
    /// Its directory; of a directory, itself.
    node: Arc<DirNode>,
    name: CString,
    what: EntryKind,
}

enum EntryKind {
    Directory,
    /// A file and its size when it was found.
    File(u64),
    /// A symlink, FIFO or device.
    Other,
    /// A further name of the entry that has this path.
    Link(Vec<u8>),
}

/// What a worker does in one go.
enum PackBatch {
    Entries(Vec<Entry>),
    Part { file: Arc<LargeFile>, part: u64 },
}

/// The units that wait, each with its number in the stream.
type Units = Mutex<Receiver<(u64, PackBatch)>>;

/// A worker's own buffers.
struct Worker {
    compressor: Option<Compressor<'static>>,
    /// What is to be compressed.
    plain: Vec<u8>,
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

    fn unit(&self, number: u64, work: PackBatch, worker: &mut Worker) {
        let mut plain =
            if self.compressed { std::mem::take(&mut worker.plain) } else { self.output.buffer() };
        let mut unit = Unit::default();
        match work {
            PackBatch::Entries(entries) => {
                plain.clear();
                plain.reserve((UNIT + UNIT / 8) as usize);
                unit.members = self.entries(&entries, &mut plain);
            }
            PackBatch::Part { file, part } => {
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
