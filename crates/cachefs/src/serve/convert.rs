//! The kernel's words for ours.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, Generation, INodeNo, TimeOrNow};
use rustix::io::Errno;

use crate::message::{Attributes, Ino, SetTime, Time};

/// The file kind in a mode.
pub const KIND: u32 = libc::S_IFMT;

/// Programs read and write in pieces of this size if they go by `st_blksize`, as C's standard streams do. From here on a
/// piece costs little more than its bytes.
const BLOCK: u32 = 128 << 10;

/// Inode numbers are not given twice while the kernel knows them.
pub const ONLY: Generation = Generation(0);

pub fn error(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
}

pub fn kind(mode: u32) -> FileType {
    match mode & KIND {
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

pub fn attributes(of: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(of.ino),
        size: of.size,
        blocks: of.blocks,
        atime: system_time(of.atime),
        mtime: system_time(of.mtime),
        ctime: system_time(of.ctime),
        crtime: UNIX_EPOCH,
        kind: kind(of.mode),
        perm: (of.mode & 0o7777) as u16,
        nlink: of.nlink,
        uid: of.uid,
        gid: of.gid,
        // The kernel's numbers have 32 bits; the C library's are the same in those.
        rdev: of.rdev as u32,
        blksize: BLOCK,
        flags: 0,
    }
}

/// Attributes of no file, which tell the kernel that a name is not there.
pub fn absent() -> FileAttr {
    nothing(0, libc::S_IFREG)
}

/// A directory of which nothing is told but that it is one.
pub fn directory(ino: Ino) -> FileAttr {
    nothing(ino, libc::S_IFDIR)
}

fn nothing(ino: Ino, mode: u32) -> FileAttr {
    attributes(&Attributes {
        ino,
        mode,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        size: 0,
        blocks: 0,
        atime: Time::default(),
        mtime: Time::default(),
        ctime: Time::default(),
    })
}

fn system_time(time: Time) -> SystemTime {
    let nanos = Duration::from_nanos(u64::from(time.nanos));
    let whole = Duration::from_secs(time.secs.unsigned_abs());
    let seconds = if time.secs < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    seconds.and_then(|seconds| seconds.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
}

pub fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::To(match time.duration_since(UNIX_EPOCH) {
            Ok(after) => {
                Time { secs: i64::try_from(after.as_secs()).unwrap_or(i64::MAX), nanos: after.subsec_nanos() }
            }
            Err(before) => given_before_1970(before.duration()),
        }),
    }
}

/// fuser 0.18 takes the nanoseconds of a time before 1970, which count forward, for part of the distance from 1970: -1.2 s,
/// which the kernel gives as -2 s and 0.8 s, comes as -2.8 s. So the parts of that distance are the kernel's numbers.
fn given_before_1970(distance: Duration) -> Time {
    let secs = 0_i64.checked_sub_unsigned(distance.as_secs()).unwrap_or(i64::MIN);
    Time { secs, nanos: distance.subsec_nanos() }
}

/// The groups of who asks, beside its own; none if that can't be known: then a set-group-id bit goes
/// that could have stayed, and never the other way round.
pub fn groups_of(from: &fuser::Request) -> Vec<u32> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", from.pid())).unwrap_or_default();
    let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    groups.split_whitespace().filter_map(|group| group.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_before_1970_keeps_its_fraction() {
        let kernel = Time { secs: -2, nanos: 800_000_000 };
        // As fuser makes it.
        let given = UNIX_EPOCH - Duration::new(2, 800_000_000);
        assert_eq!(set_time(TimeOrNow::SpecificTime(given)), SetTime::To(kernel));
        assert_eq!(system_time(kernel), UNIX_EPOCH - Duration::from_millis(1200));
    }
}
