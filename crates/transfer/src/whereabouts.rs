//! Whether a path still leads to the directory that was opened under it.
//!
//! A copy writes through descriptors, which stay with a directory when somebody renames or removes it. That keeps it from
//! writing where it was not sent, but a person looks under the path: so the two are compared before success is claimed.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, Stat};
use rustix::io::Errno;

/// Where an open directory is now.
#[derive(Debug)]
pub enum Whereabouts {
    /// Its path leads to it.
    InPlace,
    /// It was renamed, or a directory above it was: it is at this path now.
    Moved(PathBuf),
    /// It was removed: what is written to it is lost.
    Removed,
    /// It exists, but no path that we may use leads to it: its filesystem was unmounted, or something was mounted over it.
    Hidden,
    /// Its filesystem does not answer for it any more.
    Lost(io::Error),
}

impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Whereabouts::InPlace => write!(f, "it is in its place"),
            Whereabouts::Moved(now) => write!(f, "it was renamed meanwhile and is {} now", now.display()),
            Whereabouts::Removed => write!(f, "it was removed meanwhile"),
            Whereabouts::Hidden => write!(
                f,
                "no path leads to it any more: its filesystem was unmounted, or something was mounted over it, or it was \
                 moved to where you may not look"
            ),
            Whereabouts::Lost(error) => write!(f, "its filesystem lost it: {error}"),
        }
    }
}

/// Looks where a directory that was opened under `path` is now. Symlinks are followed: a path leads to where it leads.
///
/// # Errors
/// If it can't be said what the path leads to.
pub fn whereabouts(path: &Path, directory: BorrowedFd<'_>) -> io::Result<Whereabouts> {
    let opened = match fs::fstat(directory) {
        Ok(stat) => stat,
        Err(error) => return Ok(Whereabouts::Lost(error.into())),
    };
    match fs::stat(path) {
        Ok(found) if is_same(&found, &opened) => return Ok(Whereabouts::InPlace),
        Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
        Err(error) => return Err(error.into()),
    }
    let now = std::fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd()))?;
    // A name may really end like that, so what is found under it is asked first.
    if fs::stat(&now).is_ok_and(|found| is_same(&found, &opened)) {
        return Ok(Whereabouts::Moved(now));
    }
    if opened.st_nlink == 0 || now.as_os_str().as_bytes().ends_with(b" (deleted)") {
        return Ok(Whereabouts::Removed);
    }
    Ok(Whereabouts::Hidden)
}

fn is_same(one: &Stat, other: &Stat) -> bool {
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_directory_is_found_again_wherever_it_was_put() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("parent/out")).unwrap();
        let fd = std::fs::File::open(at("parent/out")).unwrap();
        let now = || whereabouts(&at("parent/out"), fd.as_fd()).unwrap();
        assert!(matches!(now(), Whereabouts::InPlace));
        std::fs::rename(at("parent"), at("other")).unwrap();
        assert!(matches!(now(), Whereabouts::Moved(path) if path == at("other/out")));
        std::os::unix::fs::symlink(at("other"), at("parent")).unwrap();
        assert!(matches!(now(), Whereabouts::InPlace), "a path leads to where its symlinks lead");
        std::fs::rename(at("other/out"), at("other/out (deleted)")).unwrap();
        std::fs::create_dir(at("other/out")).unwrap();
        assert!(matches!(now(), Whereabouts::Moved(path) if path == at("other/out (deleted)")));
        std::fs::remove_dir(at("other/out (deleted)")).unwrap();
        assert!(matches!(now(), Whereabouts::Removed));
        std::fs::remove_dir(at("other/out")).unwrap();
        assert!(matches!(now(), Whereabouts::Removed));
    }
}
