//! What a job has left in a directory on disk: its user's own files that were written while it ran, counted by the worker as the
//! user. Nothing is opened but directories, and nothing is changed.
//!
//! It ends with the task's deadline: what was not counted by then is not told, as a part would be taken for all.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ondeck_api::wire::StripingOutcome;
use ondeck_core::Bytes;
use ondeck_layout::census::{Census, Identity};
use ondeck_transfer::identity::FileHandle;
use ondeck_transfer::survey::{Descend, survey};
use rustix::fs::{FileType, Stat};

use super::stripe::{StripeError, open, tell};

/// Counts what a job has left in each of its directories, and tells it.
pub fn count_all(
    prefixes: &[PathBuf],
    directories: &[PathBuf],
    (from_ms, until_ms): (u64, u64),
    samples: bool,
    lines: &Mutex<OwnedFd>,
) {
    for path in directories {
        let counted = count(prefixes, path, (from_ms, until_ms), samples);
        let outcome = |census: Census| StripingOutcome::Counted {
            tally: Box::new(census.tally()),
            samples: if samples { census.samples() } else { Vec::new() },
        };
        tell(lines, path, counted.map(|census| (outcome(census), None)));
    }
}

/// Counts the files below a directory that this user owns, and that were written last between two moments, in milliseconds
/// since 1970.
fn count(
    prefixes: &[PathBuf],
    path: &Path,
    (from_ms, until_ms): (u64, u64),
    samples: bool,
) -> Result<Census, StripeError> {
    let directory = open(path, prefixes)?;
    let user = rustix::process::geteuid().as_raw();
    let mut census = Census::default();
    survey(directory.as_fd(), &mut |visit| {
        let (stat, written) = (visit.stat, written_ms(visit.stat));
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_uid == user
            && (from_ms..=until_ms).contains(&written)
        {
            let size = Bytes(u64::try_from(stat.st_size).unwrap_or(0));
            // Of a filesystem without handles nobody can have watched anything.
            let identity = || match samples {
                true => FileHandle::of(visit.dir, visit.name).ok().map(identity_of),
                false => None,
            };
            census.add_identified(visit.path, size, Some(written), identity);
        }
        Ok(Descend::Yes)
    })
    .map_err(|(within, error)| StripeError::Open { path: path.join(OsStr::from_bytes(&within)), error })?;
    Ok(census)
}

fn identity_of(handle: FileHandle) -> Identity {
    Identity { rank: handle.rank(), text: handle.to_string() }
}

/// When a file was written last.
fn written_ms(stat: &Stat) -> u64 {
    // What was written before 1970 was not written by a job.
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    seconds.saturating_mul(1000).saturating_add(stat.st_mtime_nsec / 1_000_000)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;
    use std::time::{Duration, UNIX_EPOCH};

    use ondeck_layout::census::Tally;

    use super::*;

    #[test]
    fn what_was_written_while_a_job_ran_is_counted_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let out = root.join("case/out");
        fs::create_dir_all(out.join("step-1")).unwrap();
        let make = |path: &Path, size: u64, at_ms: u64| {
            let file = File::create(path).unwrap();
            file.set_len(size).unwrap();
            file.set_modified(UNIX_EPOCH + Duration::from_millis(at_ms)).unwrap();
        };
        make(&out.join("before"), 5 << 20, 999);
        make(&out.join("step-1/rank-0"), 2 << 20, 1000);
        make(&out.join("step-1/rank-1"), 2 << 20, 1900);
        make(&out.join("after"), 5 << 20, 2001);
        // What a link leads to is elsewhere.
        make(&root.join("elsewhere"), 7 << 20, 1500);
        symlink(root.join("elsewhere"), out.join("link")).unwrap();
        let census = count(std::slice::from_ref(&root), &out, (1000, 2000), true).unwrap();
        let tally = census.tally();
        assert_eq!(census.samples().iter().map(Vec::len).collect::<Vec<_>>(), [2]);
        assert_eq!((tally.files, tally.bytes), (2, Bytes(4 << 20)));
        let kind = &tally.kinds[0];
        assert_eq!(
            (kind.kind.as_str(), &kind.numbers[..], kind.spread_ms),
            ("step-#/rank-#", &[1, 2][..], Some(900))
        );
        // What can't be looked at is not empty.
        assert!(count(&[], &out, (0, u64::MAX), false).is_err());
        assert!(count(std::slice::from_ref(&root), &root.join("case/none"), (0, u64::MAX), false).is_err());
        let nothing = count(&[root], &out, (5000, 6000), true).unwrap();
        assert_eq!((nothing.tally(), nothing.samples().len()), (Tally::default(), 0));
    }
}
