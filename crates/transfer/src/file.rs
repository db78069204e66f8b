//! The data of one regular file.
//!
//! A file is read into a worker's buffer, hashed there, and written from there: the checksum is that of the bytes
//! that were written, whatever happens to the source meanwhile. Files of up to [`CHUNKED_ABOVE`] bytes are one
//! worker's; larger ones are cut into chunks that all workers share.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::{self, AtFlags, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use crate::attributes::{self, ACL_ACCESS, Xattr, is_regular, same_state};
use crate::checksum::{CHUNK, CHUNKED_ABOVE, Checksum, Digest, Hasher};
use crate::dir::DirNode;
use crate::engine::{At, Engine, Over, Placement, Task, Worker};
use crate::error::{During, Fault};
use crate::verify::digest_of;

/// How often a file that changes under the copy is copied again before it is reported.
pub(crate) const TRIES: u32 = 3;

const READ_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    // A FIFO swapped in for the file must not block a worker.
    .union(OFlags::NONBLOCK);

/// A file whose chunks are being copied by several workers.
pub(crate) struct LargeFile {
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

/// A file that is being copied: both sides open, and what it is to become.
struct Copying {
    source: OwnedFd,
    target: OwnedFd,
    stat: Stat,
    xattrs: Vec<Xattr>,
    placement: Placement,
    working_name: CString,
}

impl Engine<'_> {
    /// Copies a regular file, or begins to if it is large.
    pub(crate) fn regular_file(&self, at: &At<'_>, worker: &mut Worker, attempt: u32) -> Result<(), Fault> {
        let mut attempt = attempt;
        if self.is_shut(at)? {
            return Ok(());
        }
        loop {
            let (source, xattrs) = self.open_source(at)?;
            let stat = fs::fstat(&source).during("reading its attributes")?;
            if !is_regular(&stat) {
                return Err(Fault::message(
                    "copying it",
                    "it was replaced by another kind of entry meanwhile",
                ));
            }
            let found = self.found_in_target(at)?;
            if attempt == 0 {
                self.monitor.progress.bytes_found.fetch_add(stat.st_size as u64, Ordering::Relaxed);
                // A dry run has no names to link to.
                if stat.st_nlink > 1 && self.policy.is_none() && !self.options.dry_run {
                    let to = Placement {
                        name: self.target_name(at.name).to_owned(),
                        beside: false,
                        over: Over::Anything,
                    };
                    if self.join_links(at, &stat, &to, worker)? {
                        return Ok(());
                    }
                }
                if let Some(found) = &found {
                    if self.already_there(at, source.as_fd(), &stat, found, worker).is_some() {
                        if stat.st_nlink > 1 && self.policy.is_some() {
                            self.meet_unchanged(at, &stat);
                        }
                        self.unchanged(at, &stat, true);
                        return Ok(());
                    }
                    if self.options.update && is_regular(found) && !newer(&stat, found) {
                        self.unchanged(at, &stat, false);
                        return Ok(());
                    }
                }
            }
            let linked = stat.st_nlink > 1;
            let placement = match self.placement(at, &stat, found.as_ref()) {
                Ok(Some(placement)) => placement,
                Ok(None) => return Ok(()),
                Err(fault) => {
                    if linked {
                        self.settle_links(at, &stat, None);
                    }
                    return Err(fault);
                }
            };
            if placement.beside
                && attempt == 0
                && let Some(found) = &found
                && self.holds_the_same(at, source.as_fd(), &stat, found, worker)
            {
                if linked {
                    self.meet_unchanged(at, &stat);
                }
                self.unchanged(at, &stat, false);
                return Ok(());
            }
            if linked
                && self.policy.is_some()
                && attempt == 0
                && self.join_links(at, &stat, &placement, worker)?
            {
                return Ok(());
            }
            let copied = self.copy_regular(at, (source, xattrs), stat, placement, worker, attempt);
            match copied {
                Ok(Progressed::Done | Progressed::Begun) => return Ok(()),
                Ok(Progressed::Changed) if attempt + 1 < TRIES => {
                    attempt += 1;
                    self.counts.retried.fetch_add(1, Ordering::Relaxed);
                }
                Ok(Progressed::Changed) => {
                    if linked {
                        self.settle_links(at, &stat, None);
                    }
                    return Err(kept_changing());
                }
                Err(fault) => {
                    if linked {
                        self.settle_links(at, &stat, None);
                    }
                    return Err(fault);
                }
            }
        }
    }

    /// With its extended attributes, if they could not be read later.
    fn open_source(&self, at: &At<'_>) -> Result<(OwnedFd, Option<Vec<Xattr>>), Fault> {
        // Reading a source should not change its access time; only its owner (or root) may ask for that.
        if self.privilege.root {
            match fs::openat(&at.fds.source, at.name, READ_FLAGS | OFlags::NOATIME, Mode::empty()) {
                Err(Errno::PERM) => {}
                other => return Ok((other.during("opening it")?, None)),
            }
        }
        self.open_in_source(at, READ_FLAGS)
    }

    fn copy_regular(
        &self,
        at: &At<'_>,
        (source, xattrs): (OwnedFd, Option<Vec<Xattr>>),
        stat: Stat,
        placement: Placement,
        worker: &mut Worker,
        attempt: u32,
    ) -> Result<Progressed, Fault> {
        let xattrs = match xattrs {
            _ if self.options.modes_only => Vec::new(),
            Some(xattrs) => xattrs,
            None => attributes::read_xattrs(source.as_fd(), self.policy)?,
        };
        let working_name = self.working_name(at.node, &placement);
        let directory = at.fds.target()?;
        // Until its owner and ACL are right, a file is its maker's alone.
        let plain = at.node.created_as.get() == Some(&(stat.st_uid, stat.st_gid))
            && !at.node.hands_down_acl
            && !xattrs.iter().any(|xattr| *xattr.name == *ACL_ACCESS);
        // Extended attributes can only be given to a file that one may write to.
        let writable = if xattrs.is_empty() { 0 } else { 0o600 };
        let mode = Mode::from_raw_mode(stat.st_mode & if plain { 0o777 } else { 0o700 } | writable);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let create = || fs::openat(directory, &*working_name, flags, mode);
        let target = self.replacing_leftover(directory, &working_name, create).during("creating it")?;
        if at.node.hands_down_acl {
            attributes::drop_acl(target.as_fd());
        }
        let copy = Copying { source, target, stat, xattrs, placement, working_name };
        if stat.st_size as u64 > CHUNKED_ABOVE {
            return self.begin_large(at, copy, attempt);
        }
        let digest = match self.copy_whole(&copy, worker) {
            Ok(digest) => digest,
            Err(fault) => {
                self.discard(directory, &copy);
                return Err(fault);
            }
        };
        self.finish(at, &copy, digest, worker)
    }

    /// Copies the data of a file that one worker does alone.
    fn copy_whole(&self, copy: &Copying, worker: &mut Worker) -> Result<Digest, Fault> {
        let size = copy.stat.st_size as u64;
        if size == 0 {
            return Ok(self.options.checksum.of(b""));
        }
        let mut hasher = None;
        if !is_sparse(&copy.stat) && size <= worker.buffer.len() as u64 && self.throttle.is_none() {
            // The common case, in the fewest system calls: all of the file at once.
            if self.options.checksum == Checksum::None && send_whole(copy, size)? {
                self.counts.written(self.monitor, size);
                return Ok(Digest::default());
            }
            let data = &mut worker.buffer[..size as usize];
            read_exactly(copy.source.as_fd(), data, 0)?;
            let digest = self.options.checksum.of(data);
            write_all(copy.target.as_fd(), data, 0)?;
            self.counts.written(self.monitor, size);
            return Ok(digest);
        }
        if is_sparse(&copy.stat) || size > 1 << 20 {
            fs::ftruncate(&copy.target, size).during("setting its size")?;
        }
        self.copy_range(copy, 0, size, &mut hasher, worker)?;
        Ok(hasher.map_or_else(|| self.options.checksum.of(b""), Hasher::finish))
    }

    /// Copies a range, keeping its holes.
    fn copy_range(
        &self,
        copy: &Copying,
        start: u64,
        end: u64,
        hasher: &mut Option<Hasher>,
        worker: &mut Worker,
    ) -> Result<(), Fault> {
        let hasher = hasher.get_or_insert_with(|| self.options.checksum.hasher());
        let piece = self.throttle.as_ref().map_or(usize::MAX, |throttle| throttle.piece());
        let sparse = is_sparse(&copy.stat);
        let mut offset = start;
        while offset < end {
            let data_end = if sparse {
                let data = next_data(copy.source.as_fd(), offset, end)?;
                hasher.update_zeros(data - offset);
                offset = data;
                if offset == end { end } else { next_hole(copy.source.as_fd(), offset, end)? }
            } else {
                end
            };
            while offset < data_end {
                if self.monitor.progress.is_cancelled() {
                    return Err(Fault::new("copying it", Errno::CANCELED));
                }
                let length = worker.buffer.len().min(piece).min((data_end - offset) as usize);
                if let Some(throttle) = &self.throttle {
                    throttle.take(length);
                }
                let data = &mut worker.buffer[..length];
                read_exactly(copy.source.as_fd(), data, offset)?;
                hasher.update(data);
                write_all(copy.target.as_fd(), data, offset)?;
                offset += length as u64;
                self.counts.written(self.monitor, length as u64);
            }
        }
        Ok(())
    }

    fn begin_large(&self, at: &At<'_>, copy: Copying, attempt: u32) -> Result<Progressed, Fault> {
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
        self.queue.push([Task::Chunks(file)]);
        Ok(Progressed::Begun)
    }

    /// Copies one chunk of a large file, and leaves the others on the queue for whoever is free.
    pub(crate) fn copy_chunk(&self, file: Arc<LargeFile>, worker: &mut Worker) {
        let chunk = file.next.fetch_add(1, Ordering::Relaxed);
        if chunk >= file.chunks {
            return;
        }
        if chunk + 1 < file.chunks {
            self.queue.push([Task::Chunks(file.clone())]);
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

    /// The data is there: attributes, a last look at the source, and the name.
    fn finish(
        &self,
        at: &At<'_>,
        copy: &Copying,
        digest: Digest,
        worker: &mut Worker,
    ) -> Result<Progressed, Fault> {
        let directory = at.fds.target()?;
        let after = fs::fstat(&copy.source).during("reading its attributes")?;
        if !same_state(&copy.stat, &after) {
            self.discard(directory, copy);
            return Ok(Progressed::Changed);
        }
        let written = fs::fstat(&copy.target).during("checking its size")?;
        if written.st_size != copy.stat.st_size {
            self.discard(directory, copy);
            let why = format!("the target has {} bytes, the source {}", written.st_size, copy.stat.st_size);
            return Err(Fault::message("checking its size", &why));
        }
        let _ = at.node.created_as.set((written.st_uid, written.st_gid));
        let inherited = self.options.ownership == crate::Ownership::Inherit;
        if inherited && let Ok(old) = fs::statat(directory, &*copy.placement.name, AtFlags::SYMLINK_NOFOLLOW)
        {
            // The new version of a file stays with the group that shares it.
            if old.st_gid != written.st_gid {
                let _ = fs::fchown(&copy.target, None, Some(fs::Gid::from_raw(old.st_gid)));
            }
        }
        let applied = if self.options.modes_only {
            attributes::apply_permissions(copy.target.as_fd(), &written, &copy.stat)
        } else {
            self.judge(attributes::apply(
                copy.target.as_fd(),
                &written,
                &copy.stat,
                &copy.xattrs,
                self.options.ownership,
                &self.privilege,
            ))
        };
        if copy.placement.beside && self.same_content(at, copy, digest, worker)? {
            self.discard(directory, copy);
            self.unchanged(at, &copy.stat, false);
            return Ok(Progressed::Done);
        }
        if !self.give_name(directory, &copy.working_name, &copy.placement)? {
            self.discard(directory, copy);
            return Ok(Progressed::Changed);
        }
        self.placed(at, &copy.placement, b'f', digest, &copy.stat, applied.is_ok(), worker)?;
        if copy.stat.st_nlink > 1 {
            self.settle_links(at, &copy.stat, Some(&copy.placement.name));
        }
        // Attributes that the target can't hold are reported, but the file is there with its data.
        applied.map(|()| Progressed::Done)
    }

    /// Whether the target's own version holds the same bytes: an earlier copy's, perhaps, which left no record. Asked
    /// before anything is written, as there may be no room for it.
    fn holds_the_same(
        &self,
        at: &At<'_>,
        source: BorrowedFd<'_>,
        stat: &Stat,
        found: &Stat,
        worker: &mut Worker,
    ) -> bool {
        if self.options.checksum == Checksum::None || !is_regular(found) || found.st_size != stat.st_size {
            return false;
        }
        let mut digest = |file: BorrowedFd<'_>| {
            digest_of(file, stat.st_size as u64, self.options.checksum, &mut worker.buffer).ok()
        };
        let theirs =
            at.fds.target().ok().and_then(|dir| fs::openat(dir, at.name, READ_FLAGS, Mode::empty()).ok());
        // What can't be read is not the same, and will be told by the copy.
        theirs.is_some_and(|theirs| {
            let theirs = digest(theirs.as_fd());
            theirs.is_some() && theirs == digest(source)
        })
    }

    /// Whether the target's own version, beside which a copy would be put, holds the same bytes.
    fn same_content(
        &self,
        at: &At<'_>,
        copy: &Copying,
        digest: Digest,
        worker: &mut Worker,
    ) -> Result<bool, Fault> {
        const ACTION: &str = "comparing it with the version on disk";
        let Ok(theirs) = fs::openat(at.fds.target()?, at.name, READ_FLAGS, Mode::empty()) else {
            return Ok(false);
        };
        let stat = fs::fstat(&theirs).during(ACTION)?;
        if self.options.checksum == Checksum::None || !is_regular(&stat) || stat.st_size != copy.stat.st_size
        {
            return Ok(false);
        }
        let found = digest_of(theirs.as_fd(), stat.st_size as u64, self.options.checksum, &mut worker.buffer);
        Ok(found.during(ACTION)? == digest)
    }

    fn discard(&self, directory: BorrowedFd<'_>, copy: &Copying) {
        let _ = fs::unlinkat(directory, &*copy.working_name, AtFlags::empty());
    }
}

/// How far one attempt came.
enum Progressed {
    Done,
    /// A large file whose chunks are on the queue.
    Begun,
    /// The source changed while it was copied; nothing is left of the attempt.
    Changed,
}

pub(crate) fn kept_changing() -> Fault {
    Fault::message(
        "copying it",
        "it kept changing while it was copied (3 tries); copy it when its writer has closed it",
    )
}

pub(crate) fn newer(source: &Stat, target: &Stat) -> bool {
    crate::manifest::mtime(source) > crate::manifest::mtime(target)
        || (crate::manifest::mtime(source) == crate::manifest::mtime(target)
            && source.st_size != target.st_size)
}

fn is_sparse(stat: &Stat) -> bool {
    (stat.st_blocks as u64).saturating_mul(512) < stat.st_size as u64
}

/// The start of the next data at or after `offset`, at most `end`.
fn next_data(file: BorrowedFd<'_>, offset: u64, end: u64) -> Result<u64, Fault> {
    match fs::seek(file, SeekFrom::Data(offset)) {
        Ok(data) => Ok(data.min(end)),
        // Only a hole follows.
        Err(Errno::NXIO) => Ok(end),
        // No such notion here: all of it is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(offset),
        Err(error) => Err(Fault::new("looking for its holes", error)),
    }
}

/// The end of the data that begins at `offset`, at most `end`.
fn next_hole(file: BorrowedFd<'_>, offset: u64, end: u64) -> Result<u64, Fault> {
    match fs::seek(file, SeekFrom::Hole(offset)) {
        Ok(hole) => Ok(hole.min(end)),
        Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => Ok(end),
        Err(error) => Err(Fault::new("looking for its holes", error)),
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

/// Has the kernel copy a small file, which then passes through no memory of ours; `false` if it can't between these two.
fn send_whole(copy: &Copying, size: u64) -> Result<bool, Fault> {
    let mut sent = 0;
    while sent < size {
        let left = (size - sent) as usize;
        match fs::sendfile(&copy.target, &copy.source, Some(&mut sent), left) {
            // It became shorter, which the last look at the source will see.
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if sent == 0 => return Ok(false),
            Err(error) => return Err(Fault::new("copying its data", error)),
        }
    }
    Ok(true)
}

fn read_exactly(file: BorrowedFd<'_>, buffer: &mut [u8], offset: u64) -> Result<(), Fault> {
    let mut filled = 0;
    while filled < buffer.len() {
        match rustix::io::pread(file, &mut buffer[filled..], offset + filled as u64) {
            Ok(0) => {
                // It became shorter. The rest is zeros for this attempt, which the last look at the source discards.
                buffer[filled..].fill(0);
                return Ok(());
            }
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Fault::new("reading it", error)),
        }
    }
    Ok(())
}

fn write_all(file: BorrowedFd<'_>, data: &[u8], offset: u64) -> Result<(), Fault> {
    let mut written = 0;
    while written < data.len() {
        match rustix::io::pwrite(file, &data[written..], offset + written as u64) {
            Ok(0) => return Err(Fault::new("writing it", Errno::NOSPC)),
            Ok(count) => written += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Fault::new("writing it", error)),
        }
    }
    Ok(())
}
