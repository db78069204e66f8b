//! Layouts of a job's directories on disk: looked at, set and taken back by the worker, as the user.
//!
//! The worker's namespace shows no RAM disk of the agent's: where one is shown over a directory, this is about the disk
//! below it.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ondeck_api::wire::{
    DirectoryToRestore, DirectoryToStripe, FormerLayout, StripingOutcome, StripingResult, StripingWork,
};
use ondeck_core::Incarnation;
use ondeck_layout::Layout;
use ondeck_layout::lfs::Setstripe;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::order::Line;
use super::worker::send;
use crate::layout::{Standing, StripedDirectory, StripingError};

/// Why a directory's layout is left alone.
#[derive(Debug, thiserror::Error)]
pub(super) enum StripeError {
    /// The site allows nothing.
    #[error("{}: this node's configuration allows no directory; see mount_prefixes in its part [agent]", .0.display())]
    NothingAllowed(PathBuf),
    /// It lies elsewhere.
    #[error("{}: it is not below {allowed} (mount_prefixes in the nodes' configuration)", path.display())]
    Elsewhere {
        /// The directory.
        path: PathBuf,
        /// Where layouts may be set.
        allowed: String,
    },
    /// It may be exchanged for another one.
    #[error("{}: a symbolic link is on the way there; name the directory where it really is", .0.display())]
    Link(PathBuf),
    /// It can't be opened.
    #[error("{}: {error}", path.display())]
    Open {
        /// The directory, or the prefix above it.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It is not where it was.
    #[error("{0}; if the directory was moved, its new files get {1} where it is now")]
    Gone(String, String),
    /// What was ordered is no layout.
    #[error("`{options}`: {why}")]
    Options {
        /// What was ordered.
        options: String,
        /// Why.
        why: String,
    },
    /// It can't be read or set.
    #[error(transparent)]
    Striping(#[from] StripingError),
}

/// Does it, and tells what became of each directory.
pub fn stripe(prefixes: &[PathBuf], work: &StripingWork, lines: &Mutex<OwnedFd>) {
    let tell = |path: &Path, result| tell(lines, path, result);
    match work {
        StripingWork::Look { directories, rivals } => {
            all_at_once(directories, |wanted| tell(&wanted.path, look(prefixes, wanted, rivals)));
        }
        StripingWork::Set { directories, rivals, job } => {
            all_at_once(directories, |(wanted, former)| {
                let set = set(prefixes, (wanted, former), rivals, *job);
                tell(&wanted.path, set.map(|outcome| (outcome, None)));
            });
        }
        StripingWork::Restore { directories } => {
            all_at_once(directories, |striped| {
                tell(&striped.path, restore(prefixes, striped).map(|outcome| (outcome, None)));
            });
        }
        // It is about what is in them.
        StripingWork::Count { .. } => {}
    }
}

/// So many directories are seen to at once: a tool may take half a second each time, and all have one deadline.
const AT_ONCE: usize = 8;

fn all_at_once<T: Sync>(directories: &[T], see_to: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let go_on = || {
        while let Some(directory) = directories.get(next.fetch_add(1, Ordering::Relaxed)) {
            see_to(directory);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..directories.len().min(AT_ONCE) {
            // Where no thread can be had, the others do it.
            let _ = std::thread::Builder::new().spawn_scoped(scope, go_on);
        }
        go_on();
    });
}

/// Tells what became of a directory.
pub(super) fn tell(lines: &Mutex<OwnedFd>, path: &Path, result: Result<Looked, StripeError>) {
    let (outcome, former) =
        result.unwrap_or_else(|error| (StripingOutcome::Failed { why: error.to_string() }, None));
    let result = StripingResult { path: path.to_owned(), outcome, former };
    send(lines, &Line::Striping(Box::new(result)));
}

fn parse(options: &str) -> Result<Layout, StripeError> {
    let parsed = Setstripe::parse_of_any(options).and_then(|setstripe| setstripe.layout());
    parsed.map_err(|error| StripeError::Options { options: options.to_owned(), why: error.to_string() })
}

pub(super) type Looked = (StripingOutcome, Option<FormerLayout>);

/// Whether a directory has the layout of another job, which may know it by another name.
fn set_for(
    directory: &StripedDirectory,
    rivals: &[Incarnation],
) -> Result<Option<StripingOutcome>, StripeError> {
    let found = directory.set_for()?.filter(|(job, _)| rivals.contains(job));
    let Some((job, path)) = found else { return Ok(None) };
    Ok(Some(StripingOutcome::SetFor { job, path, inode: Some(directory.inode()?) }))
}

fn look(
    prefixes: &[PathBuf],
    wanted: &DirectoryToStripe,
    rivals: &[Incarnation],
) -> Result<Looked, StripeError> {
    let layout = parse(&wanted.options)?;
    let directory = match StripedDirectory::of(open(&wanted.path, prefixes)?, &wanted.path, wanted.tool) {
        Err(error @ StripingError::NotStriped { .. }) => {
            return Ok((StripingOutcome::NotStriped { why: error.to_string() }, None));
        }
        directory => directory?,
    };
    if let Some(rival) = set_for(&directory, rivals)? {
        return Ok((rival, None));
    }
    Ok(match directory.standing(&layout, wanted.targets)? {
        Standing::Has => (StripingOutcome::Has { native: directory.show()?.native }, None),
        Standing::Chosen if !wanted.replace => {
            (StripingOutcome::Chosen { native: directory.show()?.native }, None)
        }
        Standing::Chosen | Standing::Free => (StripingOutcome::Free, Some(directory.former()?)),
    })
}

fn set(
    prefixes: &[PathBuf],
    (wanted, former): (&DirectoryToStripe, &FormerLayout),
    rivals: &[Incarnation],
    job: Incarnation,
) -> Result<StripingOutcome, StripeError> {
    let layout = parse(&wanted.options)?;
    let directory = StripedDirectory::of(open(&wanted.path, prefixes)?, &wanted.path, wanted.tool)?;
    // Since it was looked at.
    if let Some(rival) = set_for(&directory, rivals)? {
        return Ok(rival);
    }
    if directory.has(&layout, wanted.targets)? {
        // By an earlier try.
        return Ok(StripingOutcome::Set { native: directory.show()?.native });
    }
    let is_changed = || Ok::<_, StripeError>(directory.former()?.layout != former.layout);
    if !wanted.replace && is_changed()? && !directory.is_marked()? {
        return Ok(StripingOutcome::Chosen { native: directory.show()?.native });
    }
    let shown = directory.set(&layout, wanted.targets)?;
    // Where a filesystem keeps no such note, a step's `ondeck layout auto` takes it for somebody's choice, and says so.
    let _ = directory.mark();
    if !wanted.keep {
        // And another job that calls it otherwise sets another one.
        let _ = directory.mark_for(job, &wanted.path);
    }
    Ok(StripingOutcome::Set { native: shown.native })
}

fn restore(prefixes: &[PathBuf], striped: &DirectoryToRestore) -> Result<StripingOutcome, StripeError> {
    let layout = parse(&striped.options)?;
    let path = &striped.path;
    let here = open(path, prefixes).and_then(|found| Ok(StripedDirectory::of(found, path, striped.tool)?));
    let Some(inode) = striped.former.inode else { return give_back(&here?, &layout, striped) };
    if let Ok(here) = &here
        && here.inode()? == inode
    {
        return give_back(here, &layout, striped);
    }
    // It is called otherwise by now; what has its name may have its layout, too, as a copy has its attributes.
    let copied = match &here {
        Ok(here) if here.has(&layout, striped.targets)? && here.is_marked()? => {
            Some(give_back(here, &layout, striped)?)
        }
        _ => None,
    };
    let beside = match (find_beside(path, inode, prefixes), &here) {
        // What is above it is gone, too: it is looked at again.
        (Err(_), Err(_)) => None,
        (beside, _) => beside?,
    };
    if let Some((moved, name)) = beside {
        let moved = StripedDirectory::of(moved, &name, striped.tool)?;
        return Ok(match give_back(&moved, &layout, striped)? {
            StripingOutcome::Restored { native } => {
                StripingOutcome::Restored { native: format!("{native}; it is {} now", name.display()) }
            }
            other => other,
        });
    }
    match (copied, here) {
        (Some(copied), _) => Ok(copied),
        (None, Ok(_)) => Ok(StripingOutcome::Gone {
            why: format!(
                "{}: another directory has its name now; where the former one was moved to, its new files get {}",
                path.display(),
                striped.options
            ),
        }),
        (None, Err(error)) => Err(StripeError::Gone(error.to_string(), striped.options.clone())),
    }
}

/// Gives a directory back what it had, unless somebody has changed it since.
fn give_back(
    directory: &StripedDirectory,
    layout: &Layout,
    striped: &DirectoryToRestore,
) -> Result<StripingOutcome, StripeError> {
    if directory.has(layout, striped.targets)? {
        let native = directory.restore(&striped.former, striped.targets)?.native;
        return Ok(StripingOutcome::Restored { native });
    }
    if directory.former()?.layout == striped.former.layout {
        return Ok(StripingOutcome::AsBefore);
    }
    Ok(StripingOutcome::Changed { native: directory.show()?.native })
}

/// So many names are looked at for a directory that was renamed.
const MOST_NAMES: usize = 100_000;

/// A directory by its inode, beside the place where it was, and what it is called there.
fn find_beside(
    path: &Path,
    inode: u64,
    prefixes: &[PathBuf],
) -> Result<Option<(OwnedFd, PathBuf)>, StripeError> {
    let Some(above) = path.parent() else { return Ok(None) };
    let failed = |error: Errno| StripeError::Open { path: above.to_owned(), error: error.into() };
    let directory = open_any(above, prefixes)?;
    let own = rustix::fs::fstat(&directory).map_err(failed)?;
    let mut found = None;
    for entry in rustix::fs::Dir::read_from(&directory).map_err(failed)?.take(MOST_NAMES) {
        let entry = entry.map_err(failed)?;
        if entry.ino() == inode {
            found = Some(entry);
            break;
        }
    }
    let Some(entry) = found else { return Ok(None) };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // What can't be opened now is not taken for gone.
    let moved = match rustix::fs::openat(&directory, entry.file_name(), flags, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        moved => moved.map_err(failed)?,
    };
    let seen = rustix::fs::fstat(&moved).map_err(failed)?;
    let is_it = (seen.st_dev, seen.st_ino) == (own.st_dev, inode);
    let name = OsStr::from_bytes(entry.file_name().to_bytes());
    Ok(is_it.then(|| (moved, above.join(name))))
}

/// Opens a directory below one of the prefixes. Only an administrator's part of the path, the prefix, may have symbolic links
/// in it: what was judged is what is opened.
pub(super) fn open(path: &Path, prefixes: &[PathBuf]) -> Result<OwnedFd, StripeError> {
    open_below(path, prefixes, false)
}

/// The same, also of a prefix itself.
fn open_any(path: &Path, prefixes: &[PathBuf]) -> Result<OwnedFd, StripeError> {
    open_below(path, prefixes, true)
}

fn open_below(path: &Path, prefixes: &[PathBuf], is_prefix: bool) -> Result<OwnedFd, StripeError> {
    if prefixes.is_empty() {
        return Err(StripeError::NothingAllowed(path.to_owned()));
    }
    let below = prefixes.iter().filter(|prefix| *prefix != Path::new("/")).find_map(|prefix| {
        // The administrator's name of it, and where it really is.
        let real = prefix.canonicalize();
        let rest = path.strip_prefix(prefix).ok().or_else(|| path.strip_prefix(real.as_ref().ok()?).ok())?;
        let rest = if is_prefix && rest.as_os_str().is_empty() { Path::new(".") } else { rest };
        (!rest.as_os_str().is_empty()).then(|| (prefix, real, rest.to_owned()))
    });
    let Some((prefix, real, rest)) = below else {
        let allowed: Vec<String> = prefixes.iter().map(|prefix| prefix.display().to_string()).collect();
        return Err(StripeError::Elsewhere { path: path.to_owned(), allowed: allowed.join(" or ") });
    };
    let real = real.map_err(|error| StripeError::Open { path: prefix.clone(), error })?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::open(&real, flags, Mode::empty())
        .map_err(|error| StripeError::Open { path: real.clone(), error: error.into() })?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(&top, &rest, flags, Mode::empty(), inside) {
        Ok(directory) => Ok(directory),
        Err(Errno::LOOP) => Err(StripeError::Link(path.to_owned())),
        Err(error) => Err(StripeError::Open { path: path.to_owned(), error: error.into() }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_directory_is_opened_below_a_prefix_and_through_no_link_of_a_users() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let (scratch, other) = (root.join("lustre/scratch"), root.join("other"));
        for dir in [scratch.join("case/deep"), scratch.join("$(touch x)"), other.join("case")] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(scratch.join("file"), "").unwrap();
        symlink(&scratch, root.join("scratch")).unwrap();
        symlink(scratch.join("case"), scratch.join("link")).unwrap();
        symlink(other.join("case"), scratch.join("out")).unwrap();
        // The administrator may have named it by a link.
        let prefixes = [root.join("scratch")];
        let told = |path: &Path| open(path, &prefixes).map(drop).map_err(|error| error.to_string());
        for path in ["scratch/case", "scratch/case/deep", "lustre/scratch/case", "scratch/$(touch x)"] {
            assert_eq!(told(&root.join(path)), Ok(()), "{path}");
        }
        for (path, part) in [
            ("other/case", "it is not below "),
            ("scratch", "it is not below "),
            ("scratch-2/case", "it is not below "),
            ("scratch/link", "a symbolic link is on the way there"),
            ("scratch/link/deep", "a symbolic link is on the way there"),
            ("scratch/out", "a symbolic link is on the way there"),
            ("scratch/none", "No such file or directory"),
            ("scratch/file", "Not a directory"),
        ] {
            let error = told(&root.join(path)).unwrap_err();
            assert!(error.contains(part) && error.contains(path), "{error}");
        }
        assert!(open(&scratch, &[]).unwrap_err().to_string().contains("allows no directory"));
        // All of the machine is no prefix.
        assert!(open(&scratch, &["/".into()]).is_err());
        // Neither is one that is not there: that is told of it, and not of the directory.
        let gone = open(&root.join("gone/case"), &[root.join("gone")]).unwrap_err().to_string();
        assert!(gone.starts_with(&format!("{}/gone: No such file", root.display())), "{gone}");
    }
}
