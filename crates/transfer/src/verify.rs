//! Reading a copy back and comparing it with its manifest.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::fs::{self, Advice, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::checksum::{CHUNK, CHUNKED_ABOVE, Checksum, Digest};
use crate::dir::OPEN_DIRECTORY;
use crate::error::{During, EntryError, Fault};
use crate::manifest::{self, ManifestEntry};
use crate::progress::{Event, Monitor};

/// What reading back found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Files whose size and checksum are those of the manifest.
    pub matching: u64,
    /// Entries that differ, in content or attributes, are missing or can't be read; each was reported as an event.
    pub failed: u64,
    /// Bytes that were read and hashed.
    pub bytes: u64,
    /// Entries of all kinds whose attributes are the source's.
    pub compared: u64,
    /// Entries whose attributes could not be compared, because the source's have changed since the copy began.
    pub changed: u64,
}

/// Reads every file that `manifest` lists below `target` and compares size and checksum.
///
/// The pages of a file are dropped from the cache before it is read where the kernel allows that, so that the
/// storage is asked and not the memory that was just written. `threads` must be at least 1.
///
/// # Errors
/// If the manifest can't be read. Files that fail are events, and counted.
pub fn verify(
    target: BorrowedFd<'_>,
    manifest: &Path,
    threads: usize,
    monitor: &Monitor<'_>,
) -> io::Result<Verified> {
    let entries = Mutex::new(manifest::read(manifest)?);
    let (matching, failed, bytes) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let broken: Mutex<Option<io::Error>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut buffer = vec![0; 1 << 20];
                loop {
                    let next = entries.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).next();
                    let entry = match next {
                        None => break,
                        Some(Ok(entry)) => entry,
                        Some(Err(error)) => {
                            *broken.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
                            break;
                        }
                    };
                    if !matches!(entry.kind, b'f' | b'h') || monitor.progress.is_cancelled() {
                        continue;
                    }
                    match check(target, &entry, &mut buffer) {
                        Ok(()) => {
                            matching.fetch_add(1, Relaxed);
                            bytes.fetch_add(entry.size, Relaxed);
                        }
                        Err(fault) => {
                            failed.fetch_add(1, Relaxed);
                            monitor.progress.errors.fetch_add(1, Relaxed);
                            let error =
                                EntryError { path: entry.path, action: fault.action, source: fault.source };
                            (monitor.event)(Event::Failed(&error));
                        }
                    }
                }
            });
        }
    });
    match broken.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some(error) => Err(error),
        None => Ok(Verified {
            matching: matching.into_inner(),
            failed: failed.into_inner(),
            bytes: bytes.into_inner(),
            ..Verified::default()
        }),
    }
}

fn check(target: BorrowedFd<'_>, entry: &ManifestEntry, buffer: &mut [u8]) -> Result<(), Fault> {
    const ACTION: &str = "reading it back";
    let file = open_beneath(target, &entry.path).during(ACTION)?;
    let size = fs::fstat(&file).during(ACTION)?.st_size as u64;
    if entry.kind == b'h' {
        return Ok(()); // its data was compared under its first name
    }
    if size != entry.size {
        let why = format!("it has {size} bytes, the manifest says {}", entry.size);
        return Err(Fault::message("comparing with the manifest", &why));
    }
    let Some((checksum, expected)) = entry.checksum else { return Ok(()) };
    // Only clean pages are dropped, which after a sync is all of them.
    let _ = fs::fadvise(&file, 0, None, Advice::DontNeed);
    let digest = digest_of(file.as_fd(), size, checksum, buffer).during(ACTION)?;
    if digest != expected {
        let why = format!("its checksum is {digest}, the manifest says {expected}");
        return Err(Fault::message("comparing with the manifest", &why));
    }
    Ok(())
}

/// The checksum of an open file, in the form that its size calls for.
///
/// # Errors
/// If it can't be read to `size`.
pub fn digest_of(
    file: BorrowedFd<'_>,
    size: u64,
    checksum: Checksum,
    buffer: &mut [u8],
) -> io::Result<Digest> {
    let range = |start: u64, end: u64, buffer: &mut [u8]| -> io::Result<Digest> {
        let mut hasher = checksum.hasher();
        let mut offset = start;
        while offset < end {
            let piece = buffer.len().min((end - offset) as usize);
            match rustix::io::pread(file, &mut buffer[..piece], offset) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter")),
                Ok(read) => {
                    hasher.update(&buffer[..read]);
                    offset += read as u64;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(hasher.finish())
    };
    if size <= CHUNKED_ABOVE {
        return range(0, size, buffer);
    }
    let chunks = (0..size.div_ceil(CHUNK))
        .map(|chunk| range(chunk * CHUNK, ((chunk + 1) * CHUNK).min(size), buffer))
        .collect::<io::Result<Vec<_>>>()?;
    Ok(checksum.of_chunks(&chunks))
}

/// Opens a file below a directory, never through a symlink, whatever the length of its path.
fn open_beneath(root: BorrowedFd<'_>, path: &[u8]) -> io::Result<OwnedFd> {
    const FLAGS: OFlags =
        OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
    let whole = CString::new(path)?;
    match fs::openat2(root, &*whole, FLAGS, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
    {
        Ok(file) => return Ok(file),
        // NAMETOOLONG: longer than PATH_MAX. NOSYS, PERM: openat2 is unknown or filtered by a container's seccomp.
        Err(Errno::NAMETOOLONG | Errno::NOSYS | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    let mut dir: Option<OwnedFd> = None;
    let mut names = path.split(|b| *b == b'/').peekable();
    while let Some(name) = names.next() {
        let name = CString::new(name)?;
        let at = dir.as_ref().map_or(root, |fd| fd.as_fd());
        let last = names.peek().is_none();
        let next = fs::openat(at, &*name, if last { FLAGS } else { OPEN_DIRECTORY }, Mode::empty())?;
        if last {
            return Ok(next);
        }
        dir = Some(next);
    }
    Err(Errno::NOENT.into())
}
