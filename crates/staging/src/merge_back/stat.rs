//! What is read from an entry's metadata, and by what a path is known.

use std::ffi::CString;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat, Timespec};
use rustix::io::Errno;
use twox_hash::XxHash3_128;

/// Seconds since 1970 and nanoseconds.
pub type Moment = (i64, i64);

/// When an entry was changed last.
pub fn changed_at(stat: &Stat) -> Moment {
    (stat.st_ctime, stat.st_ctime_nsec as i64)
}

/// When an entry was written last.
pub(super) fn modified_at(stat: &Stat) -> Moment {
    (stat.st_mtime, stat.st_mtime_nsec as i64)
}

/// When an entry was read last.
pub(super) fn accessed_at(stat: &Stat) -> Moment {
    (stat.st_atime, stat.st_atime_nsec as i64)
}

pub(super) fn time_of(moment: Moment) -> Timespec {
    Timespec { tv_sec: moment.0, tv_nsec: moment.1 as _ }
}

pub(super) fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// The time by the clock of a directory's filesystem, and whether new files can be made in it at all.
///
/// An unnamed file is made and dropped; where the filesystem has none (NFS), a named one.
pub fn clock_of(dir: BorrowedFd<'_>) -> io::Result<Moment> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    match fs::openat(dir, c".", flags | OFlags::TMPFILE, mode) {
        Ok(file) => return Ok(changed_at(&fs::fstat(file)?)),
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::ISDIR) => {}
        Err(error) => return Err(error.into()),
    }
    let name = CString::new(format!(".ondeck-{}.probe", std::process::id()))?;
    let file = fs::openat(dir, &*name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    let stat = fs::fstat(file);
    fs::unlinkat(dir, &*name, AtFlags::empty())?;
    Ok(changed_at(&stat?))
}

/// The hash of a path.
pub fn key(path: &[u8]) -> u128 {
    XxHash3_128::oneshot(path)
}

/// The path of an entry's directory.
pub fn parent_of(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(b"", |end| &path[..end])
}
