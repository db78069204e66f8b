//! The walk that cuts a tree into units.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::SyncSender;

use rustix::fs::{self, AtFlags, FileType, Mode, RawDir, Stat};
use rustix::io::Errno;

use super::large::LargeFile;
use super::{Entry, EntryKind, LARGE, PackBatch, Packer, UNIT, Units, Worker};
use crate::attributes::{is_directory, is_regular, is_searchable};
use crate::dir::{DirFds, DirNode, Kind, NewDir, OPEN_DIRECTORY, join};
use crate::error::{During, Fault};
use crate::links::Role;
use crate::pack::header::{BLOCK, padded};
use crate::pack::index::MOST_PATH;
use crate::progress::Event;

/// The most entries in a unit: all of them may have attributes of 64 KiB each, which nobody knows before they are read.
const MOST_ENTRIES: usize = 1024;

/// Bytes of directory entries read at a time.
const LISTING: usize = 32 << 10;

/// The walk: directories depth first, each before what it holds, its entries in the order of the filesystem.
pub(super) struct Walk<'a, 'b> {
    pub(super) packer: &'a Packer<'b>,
    pub(super) send: SyncSender<(u64, PackBatch)>,
    /// No thread could be started: the walk does the work as well.
    pub(super) alone: Option<Arc<Units>>,
    /// The next unit's.
    pub(super) number: u64,
    /// What is being gathered, and about how many bytes it will be.
    pub(super) entries: Vec<Entry>,
    pub(super) bytes: u64,
}

impl Walk<'_, '_> {
    pub(super) fn tree(&mut self, root: OwnedFd, stat: Stat) {
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

    pub(super) fn node(
        &self,
        parent: Option<Arc<DirNode>>,
        name: CString,
        source: OwnedFd,
        stat: Stat,
    ) -> Arc<DirNode> {
        let new = NewDir {
            parent,
            source_name: name.clone(),
            name,
            kind: Kind::Imagined,
            partial: None,
            restore_mode: None,
            restore_source: None,
            attributes: false,
            delete: false,
            hands_down_acl: false,
            most: 0o777,
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
        self.gather(Entry { node: node.clone(), name: CString::default(), what: EntryKind::Directory }, 0);
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
                    self.gather(entry(EntryKind::Link(first)), 0);
                    return Ok(());
                }
                // Only between meeting a first name and placing it, and nobody else is here.
                Role::Parked => return Err(Fault::message("packing it", "its first name is not placed")),
            }
        }
        if !is_regular(stat) {
            self.gather(entry(EntryKind::Other), 0);
            return Ok(());
        }
        let size = stat.st_size as u64;
        progress.bytes_found.fetch_add(size, Relaxed);
        if size <= LARGE {
            self.gather(entry(EntryKind::File(size)), size);
            return Ok(());
        }
        let file = Arc::new(LargeFile::begin(self.packer, node, name)?);
        self.flush();
        for part in 0..file.parts() {
            if self.packer.output.is_stopped() {
                break;
            }
            self.send(PackBatch::Part { file: file.clone(), part });
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
            self.send(PackBatch::Entries(entries));
        }
    }

    fn send(&mut self, work: PackBatch) {
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
