//! What can be seen of a cache.

use serde::{Deserialize, Serialize};

/// Figures of a cache at one moment. Bytes and counts; those that only grow say so.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Bytes that the cache may hold.
    pub capacity: u64,
    /// Bytes of the store that hold data, or are promised to somebody who is just writing.
    pub resident: u64,
    /// Bytes that the backing directory lacks.
    pub dirty: u64,
    /// Milliseconds since the oldest change was made that the backing directory lacks; 0 if it lacks none.
    pub dirty_age_ms: u64,
    /// Changes of names that the backing directory lacks.
    pub pending_operations: u64,
    /// Files and directories whose attributes the backing directory lacks.
    pub dirty_attributes: u64,
    /// Bytes of files that the kernel reads by itself, so that they can't be evicted.
    pub pinned: u64,
    /// Files and directories that are known.
    pub names: u64,
    /// Bytes of memory for them, about.
    pub name_bytes: u64,
    /// Bytes beyond which names that nobody uses are forgotten.
    pub most_name_bytes: u64,
    /// Files and directories that were forgotten; grows.
    pub forgotten: u64,
    /// Open files.
    pub open_files: u64,
    /// Requests that wait for room.
    pub delayed: u64,
    /// Requests that wait for the backing directory.
    pub waiting: u64,
    /// Bytes that were read from the store; grows.
    pub read_bytes: u64,
    /// Bytes that were written to the store; grows.
    pub written_bytes: u64,
    /// Bytes of reads that were resident; grows. Those that the kernel reads by itself are not counted.
    pub hit_bytes: u64,
    /// Bytes of reads that had to be copied from the backing directory; grows.
    pub miss_bytes: u64,
    /// Bytes that were copied from the backing directory, read-ahead included; grows.
    pub fetched_bytes: u64,
    /// Bytes that were written back; grows.
    pub written_back_bytes: u64,
    /// Extents that were evicted; grows.
    pub evictions: u64,
    /// Requests that had to wait for room; grows.
    pub delayed_total: u64,
    /// Operations on the backing directory that failed and are tried again; grows.
    pub failures: u64,
    /// What failed last, and is not mended: the path in the backing directory and why.
    pub failing: Vec<Failing>,
    /// How many those are, of which `failing` has at most [`MOST_FAILING`].
    #[serde(default)]
    pub failing_count: u64,
    /// How long the oldest write-back of one file that is under way has lasted, in milliseconds: long if the backing directory hangs.
    #[serde(default)]
    pub under_way_ms: u64,
    /// Which one that is; empty if none is.
    #[serde(default)]
    pub under_way: String,
    /// What others had changed, so that both are kept.
    pub conflicts: Vec<Conflict>,
}

impl Status {
    /// How many files can't be written back now; a server of a former version names them all, and does not count them.
    pub fn all_failing(&self) -> u64 {
        self.failing_count.max(self.failing.len() as u64)
    }
}

/// How the names begin of what is not complete yet on the backing directory. Programs don't see them, and can't make them.
pub const UNFINISHED: &str = ".ondeck-cache-";

/// So many of those that can't be written back are named.
pub const MOST_FAILING: usize = 10;

/// Something that can't be written back, and is tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failing {
    /// Its path below the backing directory.
    pub path: String,
    /// The kernel's error.
    pub error: String,
}

/// A name that others changed while it was dirty here: theirs stays, ours is beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    /// Its path below the backing directory.
    pub path: String,
    /// Where ours is; `None` if ours was a change that was not carried out.
    pub ours: Option<String>,
    /// What happened.
    #[serde(default)]
    pub kind: ConflictKind,
}

/// What others and this cache have done to the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConflictKind {
    /// Both have made or changed it: both are there.
    #[default]
    Both,
    /// Others have removed what was changed here: ours is there.
    Removed,
    /// Others have changed what was removed here: theirs stays.
    NotRemoved,
    /// A directory was removed here, and holds hidden files there that the server of a cache has left which was killed, or whose machine
    /// was lost: it stays.
    Unfinished,
    /// Others have removed or replaced a file that was moved here, and what it had was not in the cache.
    Gone,
    /// Others have changed a file of which attributes alone were changed here: theirs stays, with its attributes.
    Attributes,
}
