//! The mounts that the machine keeps of a cache, and how its server works through them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use ondeck_ramdisk::mounts;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

/// Mounts a directory once more, read-only, where only root can reach it, and nothing that is mounted elsewhere appears.
pub fn show(directory: BorrowedFd<'_>, at: &Path) -> io::Result<()> {
    super::make_private(at)?;
    let place = mounts::open_plainly(at)?;
    let tree = copy(directory)?;
    set_read_only(tree.as_fd(), true)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&tree, c"", &place, c"", flags)?;
    mounts::make_private(at)
}

/// A copy of a mount, mounted nowhere, whose files can be changed unless `read_only`. The kept one is read-only from then on.
pub fn work_through(at: &Path, read_only: bool) -> io::Result<OwnedFd> {
    let kept = mounts::open_plainly(at)?;
    set_read_only(kept.as_fd(), true)?;
    let tree = copy(kept.as_fd())?;
    set_read_only(tree.as_fd(), read_only)?;
    Ok(tree)
}

/// Makes the calling process the only one that serves a store, even if the lock in the cache's directory was removed. `None` if
/// another one does.
pub fn lock(store: &Path) -> io::Result<Option<File>> {
    let store = File::open(store)?;
    match rustix::fs::flock(&store, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(store)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A path that leads to an open directory itself, as long as it is open.
pub fn path_through(directory: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/.", directory.as_raw_fd()))
}

fn copy(directory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(directory, c"", flags)?)
}

/// Changes this mount alone: the filesystem, and its other mounts, stay as they are.
fn set_read_only(mount: BorrowedFd<'_>, read_only: bool) -> io::Result<()> {
    let (set, clear) = if read_only { (libc::MOUNT_ATTR_RDONLY, 0) } else { (0, libc::MOUNT_ATTR_RDONLY) };
    let attributes = libc::mount_attr { attr_set: set, attr_clr: clear, propagation: 0, userns_fd: 0 };
    // SAFETY: the structure is read during the call only, and its size is told.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
