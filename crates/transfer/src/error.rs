//! What can go wrong, with the path it went wrong at.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use ondeck_core::text::{MESSAGE, plain};

use crate::whereabouts::Whereabouts;

/// The copy as a whole could not begin or could not go on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum StageError {
    /// The source can't be opened.
    #[error("can't read the source {}: {source}", .path.display())]
    Source {
        /// The source as the caller named it.
        path: PathBuf,
        source: io::Error,
    },
    /// The target can't be opened or made.
    #[error("can't write to the target {}: {source}{}", .path.display(), remedy(.source))]
    Target {
        /// The target as the caller named it.
        path: PathBuf,
        source: io::Error,
    },
    /// Source and target don't fit together.
    #[error("{0}")]
    Mismatch(String),
    /// Another process is copying into the same target.
    #[error("another copy into {} is running; wait for it or end it", .path.display())]
    Busy { path: PathBuf },
    /// The manifest can't be read or written.
    #[error("can't use the manifest {}: {source}; name another with --manifest", .path.display())]
    Manifest { path: PathBuf, source: io::Error },
    /// The target filesystem did not confirm that it holds the data.
    #[error("the target filesystem of {} failed to sync: {source}; the copy is not safe on disk, run it again", .path.display())]
    Sync { path: PathBuf, source: io::Error },
    /// The target was renamed, removed or hidden while it was copied to.
    #[error("the target {} is not where it was: {now}; nothing says that the copy can be found. Put it back, or run the same \
             command again", .path.display())]
    Moved {
        path: PathBuf,
        /// What became of it.
        now: Whereabouts,
    },
    /// The source or the target is not whole, or was not all the time.
    #[error("{0}; nothing says that this copy is complete, and nothing more was deleted")]
    Gate(String),
    /// The copy was interrupted; running it again resumes it.
    #[error("interrupted; run the same command again to go on where it stopped")]
    Interrupted,
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; make its parent directory first",
        _ => "",
    }
}

/// One entry could not be copied; the others go on.
#[derive(Debug, thiserror::Error)]
#[error("{}: {action}: {}", display_path(.path), plain(&.source.to_string(), MESSAGE))]
pub struct EntryError {
    /// The path relative to the root of the copy; empty for the root itself. Bytes, because names need not be UTF-8.
    pub path: Vec<u8>,
    /// What was tried.
    pub action: &'static str,
    /// Why it failed.
    pub source: io::Error,
}

/// A path as a part of a line: names are somebody else's, and may be made to look like more lines.
pub(crate) fn display_path(path: &[u8]) -> String {
    if path.is_empty() { ".".into() } else { plain(&OsStr::from_bytes(path).to_string_lossy(), MESSAGE) }
}

/// An error before its path is known to whom it happened.
#[derive(Debug)]
pub(crate) struct Fault {
    pub action: &'static str,
    pub source: io::Error,
}

impl Fault {
    pub fn new(action: &'static str, source: impl Into<io::Error>) -> Self {
        Fault { action, source: source.into() }
    }

    pub fn message(action: &'static str, why: &str) -> Self {
        Fault { action, source: io::Error::other(why.to_owned()) }
    }
}

/// Names the action that a system call's error belongs to.
pub(crate) trait During<T> {
    fn during(self, action: &'static str) -> Result<T, Fault>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, action: &'static str) -> Result<T, Fault> {
        self.map_err(|error| Fault::new(action, error))
    }
}
