//! The walk: directories are read block by block, and their entries handed out in batches.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{self, AtFlags, FileType, RawDir};

use super::{At, CopyItem, Engine, Worker};
use crate::dir::{self, DirNode, is_partial_name};
use crate::error::{During, Fault};

/// Bytes of directory entries read at a time: about a thousand names.
const LISTING: usize = 32 << 10;

/// Entries handed out together. A directory of usual size is one worker's, because two that make files in the same
/// directory wait for each other's lock; it is shared when a worker has nothing else to do.
const BATCH: usize = 512;

/// Some entries of one directory, all of one block of it.
pub(super) struct Batch {
    node: Arc<DirNode>,
    /// Names, each with its NUL.
    names: Vec<u8>,
    entries: Vec<(u32, FileType)>,
}

impl Batch {
    fn new(node: &Arc<DirNode>) -> Self {
        Batch { node: node.clone(), names: Vec::new(), entries: Vec::new() }
    }

    pub(super) fn of_one(node: Arc<DirNode>, name: &CStr) -> Self {
        Batch { node, names: name.to_bytes_with_nul().to_vec(), entries: vec![(0, FileType::Unknown)] }
    }

    /// Some of its entries as a batch of their own.
    fn part(&self, entries: &[(u32, FileType)]) -> Self {
        let mut part = Batch::new(&self.node);
        for (offset, file_type) in entries {
            if let Ok(name) = CStr::from_bytes_until_nul(&self.names[*offset as usize..]) {
                part.add(name, *file_type);
            }
        }
        part
    }

    fn add(&mut self, name: &CStr, file_type: FileType) {
        self.entries.push((self.names.len() as u32, file_type));
        self.names.extend_from_slice(name.to_bytes_with_nul());
    }
}

impl Engine<'_> {
    /// Takes a source directory's next block of entries, and puts the rest of it below the work they make.
    pub(super) fn read_block(&self, node: Arc<DirNode>, listing: OwnedFd) {
        if self.monitor.progress.is_cancelled() {
            return self.finished_one(&node);
        }
        let path = if self.options.exclude.is_empty() { Vec::new() } else { node.path() };
        let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING];
        let mut entries = RawDir::new(&listing, &mut buffer);
        let mut directories = Vec::new();
        let mut batches = vec![Batch::new(&node)];
        let mut block: Vec<(u64, u32, FileType)> = Vec::new();
        let mut names: Vec<u8> = Vec::new();
        let mut ended = false;
        loop {
            match entries.next() {
                None => {
                    ended = true;
                    break;
                }
                Some(Err(error)) => {
                    node.incomplete.store(true, Ordering::Relaxed);
                    self.failed(node.path(), Fault::new("listing it", error));
                    ended = true;
                    break;
                }
                Some(Ok(entry)) => {
                    let name = entry.file_name();
                    let bytes = name.to_bytes();
                    let excluded = || self.options.exclude.matches_listed(&path, &listing, &entry);
                    if !matches!(bytes, b"." | b"..") && !excluded() {
                        block.push((entry.ino(), names.len() as u32, entry.file_type()));
                        names.extend_from_slice(name.to_bytes_with_nul());
                    }
                }
            }
            // The kernel's block is used up: what follows would be the next one. A small directory is read to its end,
            // so that its descriptor does not wait on the stack until all below it is done.
            if entries.is_buffer_empty() && block.len() >= BATCH {
                break;
            }
        }
        // In the order of inode numbers, which on most disk filesystems is the order of the data.
        block.sort_unstable_by_key(|(inode, offset, _)| (*inode, *offset));
        for (_, offset, file_type) in block {
            let Ok(name) = CStr::from_bytes_until_nul(&names[offset as usize..]) else { continue };
            if self.options.tag.is_none() && is_partial_name(name.to_bytes()) {
                let path = dir::join(&node.path(), name.to_bytes());
                let why = "the name is that of an incomplete copy of Ondeck; rename it if you need it copied";
                self.failed(path, Fault::message("copying it", why));
            } else if file_type == FileType::Directory {
                directories.push(CopyItem::Enter { parent: node.clone(), name: name.to_owned() });
            } else {
                if batches[batches.len() - 1].entries.len() == BATCH {
                    batches.push(Batch::new(&node));
                }
                let last = batches.len() - 1;
                batches[last].add(name, file_type);
            }
        }
        batches.retain(|batch| !batch.entries.is_empty());
        let found: usize = batches.iter().map(|batch| batch.entries.len()).sum();
        self.monitor.progress.entries_found.fetch_add(found as u64, Ordering::Relaxed);
        node.pending.fetch_add(directories.len() + batches.len(), Ordering::AcqRel);
        // Last in, first out: files first, then subdirectories, then the rest of this directory.
        let rest = (!ended).then(|| CopyItem::Read { node: node.clone(), listing });
        self.stack.push(rest.into_iter().chain(directories).chain(batches.into_iter().map(CopyItem::Copy)));
        if ended {
            self.finished_one(&node);
        }
    }

    /// Enters a directory on both sides.
    pub(super) fn enter(&self, parent: &Arc<DirNode>, name: &CStr) {
        if self.monitor.progress.is_cancelled() {
            return self.finished_one(parent);
        }
        match self.try_enter(parent, name) {
            Ok(Some((node, listing))) => {
                // The parent's count is passed on: the child counts as one until it is complete.
                self.stack.push([CopyItem::Read { node, listing }]);
            }
            Ok(None) => self.finished_one(parent),
            Err(fault) => {
                self.entry_failed(parent, name, fault);
                self.finished_one(parent);
            }
        }
    }

    pub(super) fn copy_batch(&self, batch: &Batch, worker: &mut Worker) {
        let node = &batch.node;
        let fds = match node.fds(&self.budget) {
            Ok(fds) => fds,
            Err(fault) => {
                self.failed(node.path(), fault);
                return self.finished_one(node);
            }
        };
        let parent = node.path();
        let mut entries = &batch.entries[..];
        while let [(offset, file_type), rest @ ..] = entries {
            if self.monitor.progress.is_cancelled() {
                break;
            }
            entries = rest;
            if rest.len() >= 2 && self.stack.is_hungry() {
                let (mine, theirs) = rest.split_at(rest.len() / 2);
                entries = mine;
                node.pending.fetch_add(1, Ordering::AcqRel);
                self.stack.push([CopyItem::Copy(batch.part(theirs))]);
            }
            let Ok(name) = CStr::from_bytes_until_nul(&batch.names[*offset as usize..]) else { continue };
            let at = At { node, fds: &fds, parent: &parent, name };
            if let Err(fault) = self.entry(&at, *file_type, worker) {
                self.entry_failed(node, name, fault);
                if let Err(fault) = self.remove_leftover(&at) {
                    self.failed(at.path(), fault);
                }
            }
        }
        self.finished_one(node);
    }

    /// Copies one entry that is not known to be a directory.
    fn entry(&self, at: &At<'_>, file_type: FileType, worker: &mut Worker) -> Result<(), Fault> {
        match file_type {
            FileType::RegularFile => self.regular_file(at, worker, 0),
            FileType::Unknown => {
                let stat =
                    fs::statat(&at.fds.source, at.name, AtFlags::SYMLINK_NOFOLLOW).during("reading it")?;
                match FileType::from_raw_mode(stat.st_mode) {
                    FileType::RegularFile => self.regular_file(at, worker, 0),
                    FileType::Directory => {
                        at.node.pending.fetch_add(1, Ordering::AcqRel);
                        self.stack
                            .push([CopyItem::Enter { parent: at.node.clone(), name: at.name.to_owned() }]);
                        Ok(())
                    }
                    _ => self.other(at, worker, 0),
                }
            }
            _ => self.other(at, worker, 0),
        }
    }
}
