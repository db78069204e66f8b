//! Making the mount, and showing it somewhere.
//!
//! It is mounted in two steps: first it is connected and belongs to no directory, so that the owner can recover what an
//! earlier process left, and passthrough can be tried, while nobody waits for it; then it is shown at its place, by
//! descriptor, so that no symlink can lead it elsewhere.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use ondeck_ramdisk::mounts;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};

use super::number;

/// The type of the mount in the table of mounts is `fuse.` and this.
pub const SUBTYPE: &str = "ondeck-cache";

/// What a mount is like.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// What it is mounted from, for the table of mounts.
    pub source: String,
    /// The user that it belongs to.
    pub uid: u32,
    /// That user's primary group.
    pub gid: u32,
    /// Whether others may use it.
    pub others: bool,
    /// As the backing directory is mounted: `ST_RDONLY`, `ST_NOSUID`, `ST_NOEXEC`, `ST_NOATIME`.
    pub like: rustix::fs::StatVfsMountFlags,
}

/// Returns the connection and the mount.
pub fn make(options: &MountOptions) -> io::Result<(OwnedFd, OwnedFd)> {
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let set = |key: &str, value: &str| fsconfig_set_string(&context, key, value);
    set("source", &options.source)?;
    set("subtype", SUBTYPE)?;
    set("fd", &number(&device))?;
    set("rootmode", "40000")?;
    set("user_id", &options.uid.to_string())?;
    set("group_id", &options.gid.to_string())?;
    fsconfig_set_flag(&context, "default_permissions")?;
    if options.others {
        fsconfig_set_flag(&context, "allow_other")?;
    }
    fsconfig_create(&context)?;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes(options))?;
    Ok((device, mount))
}

fn attributes(options: &MountOptions) -> MountAttrFlags {
    use rustix::fs::StatVfsMountFlags as Like;
    // Devices of the backing directory are not the cache's business.
    let mut flags = MountAttrFlags::MOUNT_ATTR_NODEV;
    for (like, flag) in [
        (Like::RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
        (Like::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
        (Like::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        (Like::NOATIME, MountAttrFlags::MOUNT_ATTR_NOATIME),
    ] {
        flags.set(flag, options.like.contains(like));
    }
    flags
}

/// Shows the mount at an open directory. Returns its number.
pub fn attach(mount: BorrowedFd<'_>, at: BorrowedFd<'_>) -> io::Result<u64> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, c"", at, c"", flags)?;
    mounts::mount_of(mount)
}
