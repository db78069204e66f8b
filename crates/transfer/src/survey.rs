//! Walking a tree without copying it: to learn its size, or to remember its state.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, AtFlags, Mode, OFlags, RawDir, Stat};

use crate::attributes::is_directory;
use crate::dir::{OPEN_DIRECTORY, join};

/// Whether to go into a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descend {
    /// Visit what it holds.
    Yes,
    /// Leave it out.
    No,
}

/// An entry as it is visited.
pub struct Visit<'a> {
    /// The path relative to the root.
    pub path: &'a [u8],
    /// Its directory, open.
    pub dir: BorrowedFd<'a>,
    /// Its name in that directory.
    pub name: &'a std::ffi::CStr,
    /// Its attributes, of a symlink itself.
    pub stat: &'a Stat,
}

/// Visits every entry below `root`, directories before what they hold, never through a symlink. The root itself is
/// not visited. One descriptor is open for each level.
///
/// # Errors
/// The first directory that can't be read, with its path.
pub fn survey(
    root: BorrowedFd<'_>,
    visit: &mut dyn FnMut(&Visit<'_>) -> io::Result<Descend>,
) -> Result<(), (Vec<u8>, io::Error)> {
    struct Level {
        fd: OwnedFd,
        path: Vec<u8>,
        /// Subdirectories that have not been entered.
        left: Vec<CString>,
    }
    // Looking should not change when a directory was read last; only its owner (or root) may ask for that.
    let open = |dir: BorrowedFd<'_>, name: &std::ffi::CStr| match fs::openat(
        dir,
        name,
        OPEN_DIRECTORY | OFlags::NOATIME,
        Mode::empty(),
    ) {
        Err(rustix::io::Errno::PERM) => fs::openat(dir, name, OPEN_DIRECTORY, Mode::empty()),
        other => other,
    };
    let mut read = |fd: OwnedFd, path: Vec<u8>| -> Result<Level, (Vec<u8>, io::Error)> {
        let mut left = Vec::new();
        let mut buffer = [MaybeUninit::<u8>::uninit(); 16 << 10];
        let mut entries = RawDir::new(&fd, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(|error| (path.clone(), error.into()))?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let stat = match fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                // It was removed meanwhile.
                Err(rustix::io::Errno::NOENT) => continue,
                Err(error) => return Err((join(&path, name.to_bytes()), error.into())),
            };
            let inner = join(&path, name.to_bytes());
            let visit_result = visit(&Visit { path: &inner, dir: fd.as_fd(), name, stat: &stat });
            if visit_result.map_err(|error| (inner, error))? == Descend::Yes && is_directory(&stat) {
                left.push(name.to_owned());
            }
        }
        Ok(Level { fd, path, left })
    };
    let fd = open(root, c".").map_err(|error| (Vec::new(), error.into()))?;
    let mut levels = vec![read(fd, Vec::new())?];
    while let Some(level) = levels.last_mut() {
        match level.left.pop() {
            Some(name) => {
                let path = join(&level.path, name.to_bytes());
                let fd = open(level.fd.as_fd(), &name).map_err(|error| (path.clone(), error.into()))?;
                levels.push(read(fd, path)?);
            }
            None => {
                levels.pop();
            }
        }
    }
    Ok(())
}
