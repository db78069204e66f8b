//! The entry point: two paths become two open ends of a copy, and the paths are looked at again at the end.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;

use super::run::{Roots, Summary, TargetRoot, run};
use crate::Options;
use crate::attributes::is_directory;
use crate::dir::OPEN_DIRECTORY;
use crate::error::StageError;
use crate::merge::MergePolicy;
use crate::progress::Monitor;
use crate::whereabouts::{Whereabouts, whereabouts};

/// Makes `target` a copy of `source`, a directory or a file. A target directory that exists is merged into.
///
/// Symlinks among the two arguments are followed; within the tree none is. Entries that fail are events and are
/// counted, the rest goes on.
///
/// # Errors
/// [`StageError`] if the copy as a whole could not begin or go on. It can be run again and then resumes.
pub fn stage(
    source: &Path,
    target: &Path,
    options: &Options,
    monitor: &Monitor<'_>,
) -> Result<Summary, StageError> {
    let source_error = |error: Errno| StageError::Source { path: source.to_owned(), source: error.into() };
    let target_error = |error: Errno| StageError::Target { path: target.to_owned(), source: error.into() };
    let opened = fs::open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(source_error)?;
    let stat = fs::fstat(&opened).map_err(source_error)?;
    let existing = match fs::open(target, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(fd) => Some((fs::fstat(&fd).map_err(target_error)?, fd)),
        Err(Errno::NOENT) if fs::lstat(&*trim_slashes(target)).is_ok() => {
            return Err(StageError::Mismatch(format!(
                "{} is a symlink to nothing; remove it",
                target.display()
            )));
        }
        Err(Errno::NOENT) => None,
        Err(error) => return Err(target_error(error)),
    };
    // The absolute paths name the pair in the manifest, whatever directory the next run is started from.
    let source_path = source.canonicalize().unwrap_or_else(|_| source.to_owned());
    let open_parent = |path: &Path| -> Result<(OwnedFd, CString), Errno> {
        let trimmed = trim_slashes(path);
        let name = trimmed.file_name().ok_or(Errno::ISDIR)?;
        let parent =
            trimmed.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let fd = fs::open(parent, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok((fd, CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)?))
    };
    let absolute =
        |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or(path.into());
    let target_path = absolute(&trim_slashes(target));
    if is_directory(&stat) {
        let source = fs::openat(&opened, c".", OPEN_DIRECTORY, Mode::empty()).map_err(source_error)?;
        let target = match existing {
            Some((stat, fd)) if is_directory(&stat) => TargetRoot::Existing(
                fs::openat(&fd, c".", OPEN_DIRECTORY, Mode::empty()).map_err(target_error)?,
            ),
            Some(_) => {
                let why = format!("{} is a directory but {} is not", source_path.display(), target.display());
                return Err(StageError::Mismatch(why));
            }
            None => {
                let (parent, name) = open_parent(target).map_err(target_error)?;
                TargetRoot::New(parent, name)
            }
        };
        if let TargetRoot::Existing(target) = &target {
            let target = fs::fstat(target).map_err(target_error)?;
            if (target.st_dev, target.st_ino) == (stat.st_dev, stat.st_ino) {
                refuse_nesting(&source_path, &source_path)?;
            }
        }
        refuse_nesting(&source_path, &target_path)?;
        let place = match &target {
            TargetRoot::Existing(target) => InPlace::of(target, &target_path),
            TargetRoot::New(parent, _) => InPlace::of_parent(parent, &target_path),
        };
        let place = place.map_err(target_error)?;
        let summary =
            stage_roots(Roots { source, target, source_path, target_path }, options, None, monitor)?;
        return place.confirm().map(|()| summary);
    }
    if existing.as_ref().is_some_and(|(stat, _)| is_directory(stat)) {
        return Err(StageError::Mismatch(format!(
            "{} is a directory but {} is not; name the file to be made in it",
            target.display(),
            source.display()
        )));
    }
    // A single file: a walk over its parent directory that has this one entry. A symlink on the command line is
    // followed, on either side.
    let (source_dir, name) = open_parent(&source_path).map_err(source_error)?;
    let (target_dir, target_name) =
        open_parent(if existing.is_some() { &target_path } else { target }).map_err(target_error)?;
    let place = InPlace::of_parent(&target_dir, &target_path).map_err(target_error)?;
    let roots =
        Roots { source: source_dir, target: TargetRoot::Existing(target_dir), source_path, target_path };
    let summary = run(roots, Some((name, target_name)), options, None, monitor)?;
    place.confirm().map(|()| summary)
}

/// The same between open directories, steered by a policy.
///
/// # Errors
/// As [`stage`].
pub fn stage_roots(
    roots: Roots,
    options: &Options,
    policy: Option<&dyn MergePolicy>,
    monitor: &Monitor<'_>,
) -> Result<Summary, StageError> {
    run(roots, None, options, policy, monitor)
}

/// A directory that is written to, and the path that must lead to it when success is claimed.
struct InPlace {
    directory: OwnedFd,
    path: PathBuf,
}

impl InPlace {
    fn of(directory: &OwnedFd, path: &Path) -> Result<InPlace, Errno> {
        Ok(InPlace { directory: rustix::io::fcntl_dupfd_cloexec(directory, 0)?, path: path.to_owned() })
    }

    /// The same of the directory that a new target is made in.
    fn of_parent(parent: &OwnedFd, path: &Path) -> Result<InPlace, Errno> {
        InPlace::of(parent, path.parent().unwrap_or(Path::new("/")))
    }

    fn confirm(self) -> Result<(), StageError> {
        match whereabouts(&self.path, self.directory.as_fd()) {
            Ok(Whereabouts::InPlace) => Ok(()),
            Ok(now) => Err(StageError::Moved { path: self.path, now }),
            Err(source) => Err(StageError::Target { path: self.path, source }),
        }
    }
}

fn trim_slashes(path: &Path) -> PathBuf {
    // `components` drops trailing slashes and single dots, and keeps everything that has a meaning.
    path.components().collect()
}

fn refuse_nesting(source: &Path, target: &Path) -> Result<(), StageError> {
    let why = if source == target {
        "source and target are the same directory"
    } else if target.starts_with(source) {
        "the target lies inside the source and would be copied into itself"
    } else if source.starts_with(target) {
        "the source lies inside the target"
    } else {
        return Ok(());
    };
    Err(StageError::Mismatch(format!("{} and {}: {why}", source.display(), target.display())))
}
