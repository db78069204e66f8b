//! What the data of a RAM disk lies on: the RAM of a node, or a directory of an SSD.
//!
//! A device is made for one incarnation and destroyed with it, so nothing of an earlier user can be read in it: a new
//! tmpfs has no pages, and the kernel clears each page that it gives to one (the same memory is what a new process
//! gets); a directory's device is a new image file whose blocks are allocated but not written, and a filesystem
//! returns zeros for such blocks.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use ondeck_core::Bytes;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{EngineError, RuntimeDir, mounts, tmpfs};

/// A device holds one file for every so many bytes: without a limit, empty files would take kernel memory that nobody
/// has promised.
pub const BYTES_PER_FILE: u64 = 16 << 10;

/// Every device holds at least so many files.
pub const FEWEST_FILES: u64 = 4 << 10;

/// Kernel memory that a file takes beside its pages: its inode, its names, an engine's links and extended attributes.
/// Measured with Gluster's: see docs/engines.md, "What an engine needs".
pub const BYTES_OF_FILE: u64 = 2560;

/// The name that asks for RAM.
pub const RAM: &str = "ram";

/// Where data lies.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Device {
    /// A tmpfs of its own for each RAM disk.
    Ram {
        /// Touch every page before the device is handed over.
        preallocate: bool,
    },
    /// An image file in a directory of another filesystem, usually an SSD's.
    Dir { path: PathBuf },
}

/// How many files a device of this size holds.
pub fn files(size: Bytes) -> u64 {
    (size.0 / BYTES_PER_FILE).max(FEWEST_FILES)
}

/// Kernel memory that the files of a device of this size can take, beside its size.
pub fn file_memory(size: Bytes) -> Bytes {
    Bytes(files(size) * BYTES_OF_FILE)
}

impl Device {
    /// RAM that a device of this size takes at most.
    pub fn ram(&self, size: Bytes) -> Bytes {
        match self {
            Device::Ram { .. } => size.saturating_add(file_memory(size)),
            Device::Dir { .. } => Bytes::ZERO,
        }
    }

    /// Makes the device of `size` bytes, with so many inodes, and mounts it in the runtime directory; returns where.
    ///
    /// # Errors
    /// The kernel's, or of the programs that make a filesystem. What was made so far is removed by [`Device::remove`].
    pub fn prepare(
        &self,
        runtime_dir: &RuntimeDir,
        name: &str,
        size: Bytes,
        inodes: u64,
        until: Instant,
    ) -> Result<PathBuf, EngineError> {
        let at = runtime_dir.subdirectory(name)?;
        match self {
            Device::Ram { preallocate } => {
                tmpfs::mount_limited(&format!("ondeck:{}", runtime_dir.id()), &at, size, inodes)
                    .map_err(|error| EngineError::io("mount a tmpfs on", &at, error))?;
                if *preallocate {
                    touch_all(runtime_dir, &at, size, until)?;
                }
            }
            Device::Dir { path } => {
                mount_image(runtime_dir, &at, &image_path(path, runtime_dir, name), size, inodes, until)?;
            }
        }
        Ok(at)
    }

    /// Removes the device: unmounts it, frees its bytes. Fine if there is none.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove(&self, runtime_dir: &RuntimeDir, name: &str) -> Result<(), EngineError> {
        let at = runtime_dir.path(name);
        mounts::detach_all(&at).map_err(|error| EngineError::io("unmount", &at, error))?;
        if let Device::Dir { path } = self {
            let image = image_path(path, runtime_dir, name);
            // Another mount namespace may hold the loop device for longer; the blocks are given back now.
            if let Ok(file) = OpenOptions::new().write(true).open(&image) {
                // Else they are given back with the loop device.
                let _ = file.set_len(0);
            }
            match fs::remove_file(&image) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(EngineError::io("remove", &image, error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The image files of this host in a directory that belong to none of the RAM disks in `known`: left by a crash.
///
/// # Errors
/// The kernel's, if the directory can't be read.
pub fn stray_images(directory: &Path, known: &[ondeck_core::RamDiskId]) -> std::io::Result<Vec<PathBuf>> {
    let prefix = image_prefix();
    let mut strays = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let id = name.to_str().and_then(|name| {
            name.strip_prefix(&prefix)?.strip_suffix(".img")?.rsplit_once('.').map(|(id, _)| id)
        });
        if id.is_some_and(|id| !known.iter().any(|known| known.to_string() == id)) {
            strays.push(entry.path());
        }
    }
    Ok(strays)
}

/// The host's name is in it, because the directory may be one that several hosts share. `+` is in no name.
fn image_prefix() -> String {
    format!("ondeck+{}+", rustix::system::uname().nodename().to_string_lossy())
}

fn image_path(directory: &Path, runtime_dir: &RuntimeDir, name: &str) -> PathBuf {
    directory.join(format!("{}{}.{name}.img", image_prefix(), runtime_dir.id()))
}

/// Part of an image goes to ext4's own structures: inode tables (up to three inodes of 512 bytes for every
/// [`BYTES_PER_FILE`]), bitmaps, and what it keeps for itself.
fn image_size(size: Bytes) -> u64 {
    const OWN: u64 = 24 << 20;
    size.0 + size.0 / 8 + OWN
}

/// Bytes of the directory's filesystem that a device of `size` bytes takes.
pub fn image_bytes(size: Bytes) -> Bytes {
    Bytes(image_size(size))
}

fn mount_image(
    runtime_dir: &RuntimeDir,
    at: &Path,
    image: &Path,
    size: Bytes,
    inodes: u64,
    until: Instant,
) -> Result<(), EngineError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(image)
        .map_err(|error| EngineError::io("make", image, error))?;
    // Allocated, so that the SSD can't be promised twice; not written, so that what was there before can't be read.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, image_size(size))
        .map_err(|error| EngineError::io("reserve the bytes of", image, error))?;
    drop(file);
    let mut mkfs = Command::new("mkfs.ext4");
    // No journal: after a crash the data is gone in any case. Inodes large enough for an engine's attributes.
    mkfs.args(["-q", "-F", "-m", "0", "-I", "512", "-N", &inodes.to_string()]);
    mkfs.args(["-O", "^has_journal,^resize_inode", "-E", "nodiscard,lazy_itable_init=1,root_owner=0:0"]);
    mkfs.arg(image);
    runtime_dir.run("mkfs", mkfs, until)?;
    let mut mount = Command::new("mount");
    mount.args(["-t", "ext4", "-o", "loop,nosuid,nodev,noatime"]).arg(image).arg(at);
    runtime_dir.run("mount", mount, until)?;
    Ok(())
}

/// Faults every page of a new tmpfs in, and gives them back: the first touch of memory can cost far more than the
/// next, above all in a virtual machine whose host must find the page.
fn touch_all(runtime_dir: &RuntimeDir, at: &Path, size: Bytes, until: Instant) -> Result<(), EngineError> {
    let failed = |error: std::io::Error| EngineError::io("fill", at, error);
    let path = at.join(".ondeck-touch");
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
    let file = file.map_err(failed)?;
    fs::remove_file(&path).map_err(failed)?;
    rustix::fs::ftruncate(&file, size.0).map_err(|error| failed(error.into()))?;
    let length = usize::try_from(size.0).map_err(|_| failed(std::io::ErrorKind::FileTooLarge.into()))?;
    let workers = std::thread::available_parallelism().map_or(2, usize::from).min(16);
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), EngineError> {
        loop {
            let offset = next.fetch_add(PART, Ordering::Relaxed);
            if offset >= length {
                return Ok(());
            }
            runtime_dir.must_go_on(until, "touching all pages")?;
            populate(&file, offset, PART.min(length - offset)).map_err(failed)?;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(failed(std::io::Error::other("a thread panicked"))))
        })
    })
}

/// Bytes that are touched at a time: whole huge pages, and a fraction of a second.
const PART: usize = 64 << 20;

fn populate(file: &fs::File, offset: usize, length: usize) -> std::io::Result<()> {
    // SAFETY: a new mapping at an address of the kernel's choice, unmapped below, never read or written by us.
    unsafe {
        let flags = MapFlags::SHARED;
        let map = mmap(
            std::ptr::null_mut(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            flags,
            file,
            offset as u64,
        )?;
        // Unlike a store, which would end in SIGBUS, this reports when there is no memory (Linux 5.14).
        let populated = rustix::mm::madvise(map, length, rustix::mm::Advice::LinuxPopulateWrite);
        munmap(map, length)?;
        Ok(populated?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_limited_and_counted() {
        assert_eq!(files(Bytes(1 << 20)), FEWEST_FILES);
        assert_eq!(files(Bytes(16 << 30)), 1 << 20);
        let ram = Device::Ram { preallocate: false };
        assert_eq!(ram.ram(Bytes(16 << 30)), Bytes((16 << 30) + (2560 << 20)));
        assert_eq!(Device::Dir { path: "/ssd".into() }.ram(Bytes(1 << 30)), Bytes::ZERO);
    }

    #[test]
    fn only_images_of_unknown_ram_disks_are_strays() {
        let dir = tempfile::tempdir().unwrap();
        let prefix = image_prefix();
        let stray = format!("{prefix}job@1.data.img");
        for name in [
            stray.as_str(),
            &format!("{prefix}job@2.data.img"),
            &format!("{prefix}nonsense.img"),
            "ondeck+another-host+job@1.data.img",
            "theirs.img",
        ] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let known = ["job@2".parse().unwrap()];
        assert_eq!(stray_images(dir.path(), &known).unwrap(), [dir.path().join(stray)]);
    }
}
