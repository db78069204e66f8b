//! Showing directories of the RAM disk at the paths that a program already uses.
//!
//! All of these act on the mount namespace of the calling process; [`crate::namespace::Namespaces::inside`] brings
//! them to the right one.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};

/// A name for an open directory that the mount system calls take.
fn fd_path(fd: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Shows `source`, a directory of the RAM disk, at `target`.
///
/// # Errors
/// The kernel's.
pub fn bind(source: &Path, target: &Path, read_only: bool) -> io::Result<()> {
    mount_bind(source, target)?;
    if read_only {
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        mount_remount(target, flags, c"")?;
    }
    Ok(())
}

/// The parts of an overlay: `lower` stays as it is, what is written goes to `upper`. `upper` and `work` must be
/// empty directories of the same RAM disk.
pub struct Overlay<'a> {
    /// The directory on disk.
    pub lower: &'a Path,
    /// Where changes go.
    pub upper: &'a Path,
    /// Scratch space of the kernel.
    pub work: &'a Path,
    /// Whether this is root outside of any user namespace: then directories can be renamed, attributes changed
    /// without copying the data, and hard links kept.
    pub root: bool,
}

impl Overlay<'_> {
    /// Mounts it at `target`, which is usually `lower` itself.
    ///
    /// # Errors
    /// The kernel's.
    pub fn mount(&self, target: &Path) -> io::Result<()> {
        let mut options = Vec::new();
        for (key, path) in [("lowerdir=", self.lower), ("upperdir=", self.upper), ("workdir=", self.work)] {
            if !options.is_empty() {
                options.push(b',');
            }
            options.extend_from_slice(key.as_bytes());
            escape(path, &mut options);
        }
        options.extend_from_slice(if self.root {
            b",redirect_dir=on,metacopy=on,index=off"
        } else {
            // The only flavour that an ordinary user may mount.
            b",userxattr"
        });
        let options = CString::new(options)?;
        mount("ondeck", target, "overlay", MountFlags::NOSUID | MountFlags::NODEV, &*options)?;
        Ok(())
    }
}

/// Commas separate mount options and colons separate layers; both can stand in a path.
fn escape(path: &Path, options: &mut Vec<u8>) {
    for byte in path.as_os_str().as_bytes() {
        if matches!(byte, b',' | b':' | b'\\') {
            options.push(b'\\');
        }
        options.push(*byte);
    }
}

/// Takes a mount away; `Ok(false)` while files on it are open.
///
/// # Errors
/// The kernel's, other than "busy". A path that is no mount is fine: it is what was wanted.
pub fn unmount_unless_busy(target: &Path) -> io::Result<bool> {
    match unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Takes a mount away at once; whoever has files open on it keeps them.
///
/// # Errors
/// The kernel's. A path that is no mount is fine.
pub fn detach(target: &Path) -> io::Result<()> {
    match unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether `path` still names the directory that `fd` was opened on. A symlink or another directory that was put in
/// its place since must not be mounted over.
///
/// # Errors
/// The kernel's.
pub fn names(path: &Path, fd: BorrowedFd<'_>) -> io::Result<bool> {
    let by_path = rustix::fs::lstat(path)?;
    let by_fd = rustix::fs::fstat(fd)?;
    Ok((by_path.st_dev, by_path.st_ino) == (by_fd.st_dev, by_fd.st_ino))
}

/// The real path of an open directory.
///
/// # Errors
/// If /proc is not mounted.
pub fn path_of(fd: BorrowedFd<'_>) -> io::Result<PathBuf> {
    std::fs::read_link(fd_path(fd))
}
