//! Showing directories of the RAM disk at the paths that a program already uses.
//!
//! All of these act on the mount namespace of the calling process; [`crate::namespace::Namespaces::inside`] brings
//! them to the right one.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};

/// A directory that will be mounted over: opened, and known to be the one that is meant.
///
/// Mounting goes through the descriptor, so that no symlink or other directory can be put in its place in between.
pub struct Target(OwnedFd);

impl Target {
    /// Opens the directory at `path`, which must be the one that `expected` was opened on (if given).
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if it is another directory.
    pub fn open(path: &Path, expected: Option<BorrowedFd<'_>>) -> io::Result<Target> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        if let Some(expected) = expected {
            let (found, expected) = (rustix::fs::fstat(&fd)?, rustix::fs::fstat(expected)?);
            if (found.st_dev, found.st_ino) != (expected.st_dev, expected.st_ino) {
                return Err(Errno::STALE.into());
            }
        }
        Ok(Target(fd))
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

/// Shows the directory `source` at `target`. A source that [`make_read_only`] was called on stays read-only there.
///
/// # Errors
/// The kernel's.
pub fn bind(source: &Path, target: &Target) -> io::Result<()> {
    Ok(mount_bind(source, target.path())?)
}

/// Mounts a directory over itself, read-only.
///
/// # Errors
/// The kernel's.
pub fn make_read_only(directory: &Path) -> io::Result<()> {
    mount_bind(directory, directory)?;
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    Ok(mount_remount(directory, flags, c"")?)
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
    /// Whether this is root outside of any user namespace: then other users and groups can be represented.
    pub root: bool,
}

impl Overlay<'_> {
    /// Mounts it at `target`, which is usually `lower` itself.
    ///
    /// # Errors
    /// The kernel's.
    pub fn mount(&self, target: &Target) -> io::Result<()> {
        let mut options = Vec::new();
        for (key, path) in [("lowerdir=", self.lower), ("upperdir=", self.upper), ("workdir=", self.work)] {
            if !options.is_empty() {
                options.push(b',');
            }
            options.extend_from_slice(key.as_bytes());
            escape(path, &mut options);
        }
        options.extend_from_slice(if self.root {
            // Nothing that refers to the directory on disk by name: what is written there meanwhile could change it.
            b",redirect_dir=off,metacopy=off,index=off"
        } else {
            // The only flavour that an ordinary user may mount.
            b",userxattr"
        });
        let options = CString::new(options)?;
        mount("ondeck", target.path(), "overlay", MountFlags::NOSUID | MountFlags::NODEV, &*options)?;
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
