//! The workers: how directories are walked and entries are brought over.
//!
//! # Layout
//!
//! - `stage`: the entry point, from paths to open directories; `run`: one copy from there to its summary
//! - `root`: the two directories at the top; `walk`: reading directories, handing out their entries
//! - `directories`: entering a pair of directories; `completion`: what is done when all below one is in place
//! - `placement`: whether, where and over what an entry is put; `unchanged`: what need not be copied again
//! - `file`: the data of one file; `others`: symlinks, FIFOs, sockets and devices; `hard_links`: further names
//! - `closed`: entries whose mode shuts out their owner; `delete`: what is in the target only

mod closed;
mod completion;
mod delete;
mod directories;
mod file;
mod hard_links;
mod others;
mod placement;
mod root;
mod run;
mod stage;
mod unchanged;
mod walk;

pub use run::{Roots, Summary, TargetRoot};
pub use stage::{stage, stage_roots};

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{self, AtFlags, Stat};
use rustix::io::Errno;

use crate::Options;
use crate::attributes::{self, Privilege};
use crate::dir::{self, DirFds, DirNode, FdBudget};
use crate::error::{EntryError, Fault};
use crate::links::Links;
use crate::manifest::{Lines, Manifest};
use crate::merge::MergePolicy;
use crate::progress::{Event, Monitor};
use crate::throttle::Throttle;
use crate::work_stack::{Done, WorkStack};
use file::LargeFile;
use walk::Batch;

/// Counters of the workers; those that a watcher needs live are in [`crate::Progress`].
#[derive(Default)]
struct Counts {
    files: AtomicU64,
    directories: AtomicU64,
    made_directories: AtomicU64,
    others: AtomicU64,
    hard_links: AtomicU64,
    bytes: AtomicU64,
    bytes_written: AtomicU64,
    unchanged: AtomicU64,
    deleted: AtomicU64,
    retried: AtomicU64,
    attributes_lost: AtomicU64,
    vanished: AtomicU64,
}

impl Counts {
    /// Whether the target has nothing of this copy's or of an earlier one's.
    fn idle(&self) -> bool {
        [&self.files, &self.made_directories, &self.others, &self.hard_links, &self.deleted, &self.unchanged]
            .iter()
            .all(|counter| counter.load(Ordering::Relaxed) == 0)
    }

    /// Bytes were written into a file of the target.
    fn written(&self, monitor: &Monitor<'_>, bytes: u64) {
        self.bytes_written.fetch_add(bytes, Ordering::Relaxed);
        monitor.progress.bytes_written.fetch_add(bytes, Ordering::Relaxed);
    }

    fn deleted(&self) {
        self.deleted.fetch_add(1, Ordering::Relaxed);
    }
}

enum CopyItem {
    /// Enter a directory found in its parent.
    Enter { parent: Arc<DirNode>, name: CString },
    /// Read the next block of a directory.
    Read { node: Arc<DirNode>, listing: OwnedFd },
    /// Copy some entries.
    Copy(Batch),
    /// Help with the chunks of a large file.
    Chunks(Arc<LargeFile>),
}

/// What all workers share.
struct Engine<'a> {
    options: &'a Options,
    policy: Option<&'a dyn MergePolicy>,
    monitor: &'a Monitor<'a>,
    counts: Counts,
    stack: WorkStack<CopyItem>,
    links: Links,
    budget: FdBudget,
    privilege: Privilege,
    manifest: Option<Manifest>,
    throttle: Option<Throttle>,
    /// The name the root's single file gets in the target, when the source is a file.
    single: Option<CString>,
    /// The directory in which a new root is renamed when it is complete.
    root_parent: Option<OwnedFd>,
}

/// A worker's own state.
struct Worker {
    /// The data buffer.
    buffer: Vec<u8>,
    lines: Lines,
}

const READING_SOURCE: &str = "reading the source";
const RESTORING: &str = "giving it its mode back";

impl Engine<'_> {
    /// One worker's life: take an item, do it, until none is left.
    fn work(&self) {
        let mut worker = Worker { buffer: vec![0; self.options.buffer.max(1)], lines: Lines::new() };
        while let Some(item) = self.stack.pop() {
            // Also if it panics: the others must not wait for this one for ever.
            let _done = Done(&self.stack);
            match item {
                CopyItem::Enter { parent, name } => self.enter(&parent, &name),
                CopyItem::Read { node, listing } => self.read_block(node, listing),
                CopyItem::Copy(batch) => self.copy_batch(&batch, &mut worker),
                CopyItem::Chunks(file) => self.copy_chunk(file, &mut worker),
            }
            worker.lines.flush_if_old(self.manifest.as_ref());
        }
        if let Some(manifest) = &self.manifest {
            worker.lines.flush(manifest);
        }
    }

    /// What setting an entry's attributes came to, as far as it is a failure.
    fn judge(&self, applied: Result<(), Fault>) -> Result<(), Fault> {
        if applied.is_err() && self.options.attributes_best_effort {
            self.counts.attributes_lost.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        applied
    }

    /// Tells of an entry that failed, or is left behind.
    fn entry_failed(&self, node: &Arc<DirNode>, name: &CStr, fault: Fault) {
        let path = dir::join(&node.path(), name.to_bytes());
        if let Ok(fds) = node.fds(&self.budget) {
            if self.options.leave_others
                && fault.source.kind() == std::io::ErrorKind::PermissionDenied
                && let Some(owner) = attributes::closed_by_another(fds.source.as_fd(), name)
            {
                (self.monitor.event)(Event::LeftBehind { path: &path, owner });
                let at = At { node, fds: &fds, parent: &node.path(), name };
                return self.remove_leftover(&at).unwrap_or_else(|fault| self.failed(path, fault));
            }
            self.note_vanished(fds.source.as_fd(), name, &fault);
        }
        self.failed(path, fault);
    }

    /// Reports an entry that could not be handled; the others go on.
    fn failed(&self, path: Vec<u8>, fault: Fault) {
        self.monitor.progress.errors.fetch_add(1, Ordering::Relaxed);
        let error = EntryError { path, action: fault.action, source: fault.source };
        (self.monitor.event)(Event::Failed(&error));
    }

    /// Counts an entry that failed because it is not in the source any more.
    fn note_vanished(&self, source: BorrowedFd<'_>, name: &CStr, fault: &Fault) {
        if fault.source.kind() == std::io::ErrorKind::NotFound
            && matches!(fs::statat(source, name, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT))
        {
            self.counts.vanished.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// An entry: its directory, opened, and its name.
struct At<'a> {
    node: &'a Arc<DirNode>,
    fds: &'a DirFds,
    /// The directory's path.
    parent: &'a [u8],
    name: &'a CStr,
}

impl At<'_> {
    fn path(&self) -> Vec<u8> {
        dir::join(self.parent, self.name.to_bytes())
    }
}

fn stat_if_there(dir: BorrowedFd<'_>, name: &CStr) -> Result<Option<Stat>, Fault> {
    match fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(Fault::new("looking for it in the target", error)),
    }
}
