//! Directories in a copy, on which others of the job's are mounted.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, Timespec};

/// Makes an empty directory in a staged copy, for another of the job's directories to be mounted on.
pub fn make_mount_point(copy: &OwnedFd, path: &[u8]) -> io::Result<()> {
    let mut dir = rustix::io::fcntl_dupfd_cloexec(copy, 0)?;
    for name in path.split(|b| *b == b'/') {
        let name = CString::new(name)?;
        let before = rustix::fs::fstat(&dir)?;
        let mode = before.st_mode & 0o7777;
        let made = match rustix::fs::mkdirat(&dir, &*name, Mode::RWXU) {
            // A copy of a directory that its owner may not write to.
            Err(rustix::io::Errno::ACCESS) => {
                rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode | 0o700))?;
                let made = rustix::fs::mkdirat(&dir, &*name, Mode::RWXU);
                rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode))?;
                made
            }
            other => other,
        };
        match made {
            Ok(()) => keep_times(&dir, &before)?,
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        dir = rustix::fs::openat(&dir, &*name, flags, Mode::empty())?;
    }
    Ok(())
}

/// Nothing was written to a directory as far as the program is concerned.
fn keep_times(dir: &OwnedFd, stat: &rustix::fs::Stat) -> io::Result<()> {
    let times = rustix::fs::Timestamps {
        last_access: Timespec { tv_sec: stat.st_atime as _, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: Timespec { tv_sec: stat.st_mtime as _, tv_nsec: stat.st_mtime_nsec as _ },
    };
    Ok(rustix::fs::futimens(dir, &times)?)
}
