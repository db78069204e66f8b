//! What an administrator or user chooses of a cache.

use std::time::Duration;

use ondeck_core::Bytes;
use serde::{Deserialize, Serialize};

/// Data is copied, evicted and written back in pieces of so many bytes. Smaller files are one piece.
pub const EXTENT: u64 = 1 << 20;

/// The least capacity that a cache works with: several writers must have room for an extent each, beside those that are
/// written back.
pub const LEAST_CAPACITY: Bytes = Bytes(16 * EXTENT);

/// When a write reaches the backing directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyncWhen {
    /// When the cache is full of it, or it is [`Settings::age`] old.
    #[default]
    Later,
    /// Before close(2) returns, and fsync(2).
    Close,
    /// Before fsync(2) returns.
    Fsync,
}

/// Who carries out the writes of programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Writes {
    /// The server, which finds room for them first.
    #[default]
    Server,
    /// The kernel, which writes to the store without asking.
    Passthrough,
}

/// Parts of the capacity, in percent. Above the high one the work begins, until the low one is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watermarks {
    /// Where it begins.
    pub high: u8,
    /// Where it ends; below `high`.
    pub low: u8,
}

/// Names take no more than this by themselves, however large the cache is: with as much for changes that are not written back, and for
/// what the allocator can't use between them, a server of a million files has less than 256 MiB.
fn most_names() -> Bytes {
    Bytes(96 << 20)
}

/// A journal below this is not made shorter.
fn short_journal() -> Bytes {
    Bytes(8 << 20)
}

/// How a cache works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Bytes of data and names at most.
    pub capacity: Bytes,
    /// Bytes of names at most: beyond that, those are forgotten that nobody uses and the backing directory has.
    #[serde(default = "most_names")]
    pub names: Bytes,
    /// Resident data at which clean extents are evicted.
    pub full: Watermarks,
    /// Dirty data at which it is written back.
    pub dirty: Watermarks,
    /// The longest that a change stays in the cache alone.
    pub age: Duration,
    /// When a write reaches the backing directory at the latest.
    pub sync: SyncWhen,
    /// No file grows beyond this; `EFBIG`.
    pub largest_file: Option<Bytes>,
    /// Read ahead of a program that reads one extent after the other.
    pub read_ahead: Bytes,
    /// Whether the kernel may read resident files by itself, where it can.
    pub passthrough: bool,
    /// Who writes to files, where the kernel may read them by itself.
    #[serde(default)]
    pub writes: Writes,
    /// Threads that read from and write to the backing directory.
    pub threads: usize,
    /// The journal is made anew, with what still counts, when it is longer than this and than four times what it was then; for tests:
    /// zero, after each record.
    #[serde(default = "short_journal")]
    pub journal: Bytes,
    /// Whether changes of the backing directory are left to [`flush`](crate::Owner::flush) and a full cache, and names are forgotten
    /// by [`forget_names`](crate::Owner::forget_names) alone: for tests.
    pub idle: bool,
}

impl Settings {
    /// What is chosen for a cache of this capacity unless somebody says otherwise.
    pub fn new(capacity: Bytes) -> Settings {
        Settings {
            capacity,
            names: Bytes(capacity.0 / 4).min(most_names()),
            full: Watermarks { high: 95, low: 90 },
            dirty: Watermarks { high: 50, low: 40 },
            age: Duration::from_secs(30),
            sync: SyncWhen::Later,
            largest_file: None,
            read_ahead: Bytes(8 * EXTENT),
            passthrough: true,
            writes: Writes::Server,
            threads: 4,
            journal: short_journal(),
            idle: false,
        }
    }
}
