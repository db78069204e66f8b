//! What can go wrong with a RAM disk on one node.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ondeck_core::Bytes;

/// What went wrong. The message names the path, program or process, and says what to do where that is known.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum EngineError {
    /// A program can't be started.
    #[error("can't start `{program}`: {source}{}", install_hint(source))]
    Program { program: String, source: io::Error },
    /// A process of the RAM disk ended although it should not have, or failed.
    #[error("`{role}` failed: {how}{}{log}", if .log.is_empty() { "" } else { "; its log ends with:\n" })]
    Exited {
        /// What it is to the RAM disk.
        role: String,
        /// How it ended.
        how: String,
        /// The last lines of its log.
        log: String,
    },
    /// Something did not happen in time.
    #[error("waited {:.1} s in vain for {what}", .waited.as_secs_f64())]
    Deadline {
        /// What did not happen.
        what: String,
        /// How long was waited.
        waited: Duration,
    },
    /// The RAM disk is being destroyed.
    #[error("given up: the RAM disk is being destroyed")]
    GivenUp,
    /// A system call failed.
    #[error("can't {what} {}: {source}", .path.display())]
    Io {
        /// What was to be done.
        what: &'static str,
        /// To which path.
        path: PathBuf,
        source: io::Error,
    },
    /// Processes that even SIGKILL does not end: they wait for the kernel.
    #[error(
        "processes {pids:?} don't end although they were killed; they wait for the kernel (see /proc/PID/stack)"
    )]
    Immortal {
        /// Their process ids.
        pids: Vec<i32>,
    },
    /// More was asked for than there is.
    #[error("{device} has {free} free here, and {needed} would be needed ({share} of data and {} for the engine)", .needed.saturating_sub(*.share))]
    TooLarge {
        /// `RAM`, or the name of a device.
        device: String,
        share: Bytes,
        /// The data and what the engine needs beside it.
        needed: Bytes,
        /// What is free.
        free: Bytes,
    },
    /// What was written was not what was read.
    #[error("the check failed: {0}")]
    Check(String),
    /// Files are open; the text says whose.
    #[error("{0}")]
    Busy(String),
    /// This engine or node can't do what was asked.
    #[error("{0}")]
    Refused(String),
}

impl EngineError {
    /// A system call failed on `path`.
    pub fn io(what: &'static str, path: &Path, source: impl Into<io::Error>) -> EngineError {
        EngineError::Io { what, path: path.to_owned(), source: source.into() }
    }
}

fn install_hint(source: &io::Error) -> &'static str {
    if source.kind() == io::ErrorKind::NotFound { "; `ondeck doctor` says which package has it" } else { "" }
}
