//! Why the journal can't be used, and what to do about it.

use std::path::PathBuf;

use super::tables::VERSION;

/// Why the store can't be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum StoreError {
    /// The file or its directory.
    #[error("can't use {}: {source}", .path.display())]
    File { path: PathBuf, source: std::io::Error },
    /// SQLite has refused a statement, or can't write.
    #[error("the journal {}: {source}", .path.display())]
    Sqlite { path: PathBuf, source: rusqlite::Error },
    /// It is damaged, or no journal.
    #[error(
        "the journal {} can't be read: {why}; put back the newest copy that you have, with the files beside it. If there is \
         none, move it away and start `ondeck serve --take-over`: the RAM disks that the agents have are found, and no \
         results are lost",
        .path.display()
    )]
    Damaged { path: PathBuf, why: String },
    /// It is gone, but what SQLite keeps beside it is there. Opening it would remove that.
    #[error(
        "the journal {} is {how}, but {} is there, which belongs to it and has its newest state; nothing was changed. Copy \
         the directory away before anything else, then put the journal back, beside the same -wal file. If there is no \
         copy of it, move both away and start `ondeck serve --take-over`: the RAM disks that the agents have are found, \
         and no results are lost",
        .path.display(), .log.display()
    )]
    Gone {
        path: PathBuf,
        /// Missing or empty.
        how: &'static str,
        /// What is there.
        log: PathBuf,
    },
    /// The journal or its log is a copy of another state.
    #[error(
        "the journal {} and the -wal file beside it do not belong together: one of them is a copy of another state; nothing \
         was changed. Copy the directory away before anything else, then put back both as they were at the same time. If \
         there is no such copy, move both away and start `ondeck serve --take-over`: the RAM disks that the agents have are \
         found, and no results are lost",
        .path.display()
    )]
    Mixed { path: PathBuf },
    /// It was written by a later version.
    #[error(
        "the journal {} was written by a later version (its tables are of version {found}, this daemon knows {VERSION}); \
         start that version again",
        .path.display()
    )]
    Later {
        path: PathBuf,
        /// The version of its tables.
        found: i64,
    },
    /// What stands in it is not understood.
    #[error("the journal {}: can't understand what is kept of {what}: {why}", .path.display())]
    Malformed { path: PathBuf, what: String, why: String },
    /// Another daemon has it.
    #[error("another scheduler is running in {}", .path.display())]
    Running { path: PathBuf },
}

impl StoreError {
    /// What helps against an error of the disk, as the end of a sentence.
    pub(crate) fn remedy(&self) -> &'static str {
        let StoreError::Sqlite { source, .. } = self else { return "" };
        match source.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DiskFull) => "; make room there. Nothing is lost meanwhile",
            Some(rusqlite::ErrorCode::ReadOnly) => "; make it writable. Nothing is lost meanwhile",
            Some(rusqlite::ErrorCode::SystemIoFailure) => "; mend that disk. Nothing is lost meanwhile",
            _ => "",
        }
    }
}
