//! Large files: cut into chunks that all workers share.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs;

use super::data::{is_sparse, next_data};
use super::{Copying, Progressed, TRIES, kept_changing};
use crate::checksum::{CHUNK, Checksum, Digest, Hasher};
use crate::dir::DirNode;
use crate::engine::{At, CopyItem, Engine, Worker};
use crate::error::{During, Fault};

/// A file whose chunks are being copied by several workers.
pub(in crate::engine) struct LargeFile {
    node: Arc<DirNode>,
    name: CString,
    copy: Copying,
    attempt: u32,
    chunks: u64,
    /// The next chunk that nobody has taken.
    next: AtomicU64,
    /// Chunks that are not finished; whoever finishes the last one completes the file.
    left: AtomicU64,
    digests: Mutex<Vec<Digest>>,
    fault: OnceLock<Fault>,
}

impl Engine<'_> {
    pub(super) fn begin_large(&self, at: &At<'_>, copy: Copying, attempt: u32) -> Result<Progressed, Fault> {
        let size = copy.stat.st_size as u64;
        if let Err(fault) = fs::ftruncate(&copy.target, size).during("setting its size") {
            self.discard(at.fds.target()?, &copy);
            return Err(fault);
        }
        let chunks = size.div_ceil(CHUNK);
        at.node.pending.fetch_add(1, Ordering::AcqRel);
        let file = Arc::new(LargeFile {
            node: at.node.clone(),
            name: at.name.to_owned(),
            copy,
            attempt,
            chunks,
            next: AtomicU64::new(0),
            left: AtomicU64::new(chunks),
            digests: Mutex::new(vec![Digest::default(); chunks as usize]),
            fault: OnceLock::new(),
        });
        self.stack.push([CopyItem::Chunks(file)]);
        Ok(Progressed::Begun)
    }

    /// Copies one chunk of a large file, and leaves the others on the stack for whoever is free.
    pub(in crate::engine) fn copy_chunk(&self, file: Arc<LargeFile>, worker: &mut Worker) {
        let chunk = file.next.fetch_add(1, Ordering::Relaxed);
        if chunk >= file.chunks {
            return;
        }
        if chunk + 1 < file.chunks {
            self.stack.push([CopyItem::Chunks(file.clone())]);
        }
        if file.fault.get().is_none() {
            match self.chunk_digest(&file, chunk, worker) {
                Ok(digest) => {
                    file.digests.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[chunk as usize] =
                        digest;
                }
                Err(fault) => {
                    let _ = file.fault.set(fault);
                }
            }
        }
        if file.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let node = file.node.clone();
            self.finish_large(file, worker);
            self.finished_one(&node);
        }
    }

    fn chunk_digest(&self, file: &LargeFile, chunk: u64, worker: &mut Worker) -> Result<Digest, Fault> {
        let (start, end) = (chunk * CHUNK, ((chunk + 1) * CHUNK).min(file.copy.stat.st_size as u64));
        if end - start == CHUNK
            && is_sparse(&file.copy.stat)
            && next_data(file.copy.source.as_fd(), start, end)? == end
        {
            return Ok(hole_digest(self.options.checksum));
        }
        let mut hasher = None;
        self.copy_range(&file.copy, start, end, &mut hasher, worker)?;
        Ok(hasher.map_or_else(Digest::default, Hasher::finish))
    }

    fn finish_large(&self, file: Arc<LargeFile>, worker: &mut Worker) {
        let path = || crate::dir::join(&file.node.path(), file.name.to_bytes());
        let fds = match file.node.fds(&self.budget) {
            Ok(fds) => fds,
            Err(fault) => return self.failed(path(), fault),
        };
        let parent = file.node.path();
        let at = At { node: &file.node, fds: &fds, parent: &parent, name: &file.name };
        let outcome = match file.fault.get() {
            Some(fault) => {
                if let Ok(target) = fds.target() {
                    self.discard(target, &file.copy);
                }
                let source = std::io::Error::new(fault.source.kind(), fault.source.to_string());
                Err(Fault { action: fault.action, source })
            }
            None => {
                let digests = file.digests.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                self.finish(&at, &file.copy, self.options.checksum.of_chunks(&digests), worker)
            }
        };
        let outcome = match outcome {
            Ok(Progressed::Changed) if file.attempt + 1 < TRIES => {
                self.counts.retried.fetch_add(1, Ordering::Relaxed);
                self.regular_file(&at, worker, file.attempt + 1)
            }
            Ok(Progressed::Changed) => Err(kept_changing()),
            other => other.map(|_| ()),
        };
        if let Err(fault) = outcome {
            if self.monitor.progress.is_cancelled() {
                return;
            }
            if file.copy.stat.st_nlink > 1 {
                self.settle_links(&at, &file.copy.stat, None);
            }
            self.entry_failed(&file.node, &file.name, fault);
        }
    }
}

/// The checksum of a chunk that is all hole; a sparse file can have millions.
fn hole_digest(checksum: Checksum) -> Digest {
    static XXH3: OnceLock<Digest> = OnceLock::new();
    static BLAKE3: OnceLock<Digest> = OnceLock::new();
    let compute = || {
        let mut hasher = checksum.hasher();
        hasher.update_zeros(CHUNK);
        hasher.finish()
    };
    match checksum {
        Checksum::Xxh3 => *XXH3.get_or_init(compute),
        Checksum::Blake3 => *BLAKE3.get_or_init(compute),
        Checksum::None => Digest::default(),
    }
}
