//! The file that becomes the archive, from its temporary name to its own.

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use rustix::fs::{self, AtFlags, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::access::{access_of, give_access};
use super::{Counts, Packer, Worker};
use crate::attributes::{Privilege, is_directory};
use crate::dir::{FdBudget, OPEN_DIRECTORY, partial_name};
use crate::links::Links;
use crate::pack::output::{Output, Sizes};
use crate::pack::{PackError, PackOptions, PackSummary, index, name_of};
use crate::progress::Monitor;

/// Packs a tree into a new file in `directory` that gets its name when it is complete.
pub(in crate::pack) fn pack(
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
        bytes_read: counts.bytes_read.load(Relaxed),
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
