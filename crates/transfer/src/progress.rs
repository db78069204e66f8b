//! Watching a copy: counters that any thread (or process, through shared memory) may read, and events.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::EntryError;

/// Counters of one copy. They only grow, and may be read at any time.
///
/// The layout is fixed so that a parent process can watch through shared memory.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Progress {
    /// Non-directory entries found in the source so far.
    pub entries_found: AtomicU64,
    /// Bytes of the regular files found so far.
    pub bytes_found: AtomicU64,
    /// Non-directory entries done: copied, linked, or found to be there already.
    pub entries_done: AtomicU64,
    /// Bytes of data done, copied or there already; holes count.
    pub bytes_done: AtomicU64,
    /// Bytes of data actually written by this run.
    pub bytes_written: AtomicU64,
    /// Entries that failed.
    pub errors: AtomicU64,
    /// Set by anyone to stop the copy soon; it can be resumed.
    pub cancel: AtomicBool,
}

impl Progress {
    /// Counters that have counted nothing.
    pub const fn new() -> Self {
        Progress {
            entries_found: AtomicU64::new(0),
            bytes_found: AtomicU64::new(0),
            entries_done: AtomicU64::new(0),
            bytes_done: AtomicU64::new(0),
            bytes_written: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            cancel: AtomicBool::new(false),
        }
    }

    /// Back to zero, for the next copy.
    pub fn reset(&self) {
        for counter in [
            &self.entries_found,
            &self.bytes_found,
            &self.entries_done,
            &self.bytes_done,
            &self.bytes_written,
            &self.errors,
        ] {
            counter.store(0, Relaxed);
        }
        self.cancel.store(false, Relaxed);
    }

    /// Bytes of data done so far, for whoever watches: [`Progress::bytes_done`] counts a file when it is done, which of a large
    /// one is long after its first bytes. More than was found if a file was copied again because it had changed.
    pub fn bytes_so_far(&self) -> u64 {
        self.bytes_done.load(Relaxed).max(self.bytes_written.load(Relaxed))
    }

    /// Whether someone asked the copy to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.load(Relaxed)
    }
}

/// Something that happened to one entry.
#[derive(Debug)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Event<'a> {
    /// An entry could not be copied.
    Failed(&'a EntryError),
    /// With a dry run: what would be done.
    Would(&'static str, &'a [u8]),
    /// An entry of the target was removed because the source has none of that name.
    Deleted(&'a [u8]),
    /// A caller's [`crate::merge::MergePolicy`] put the copy under another name because the target had changed.
    PutBeside {
        /// The path that was to be written.
        path: &'a [u8],
        /// The name it was given instead.
        name: &'a [u8],
    },
    /// A caller's policy kept an entry of the target that was to be deleted, because it had changed.
    Kept(&'a [u8]),
    /// An entry of the source was left behind: another user owns it, and the caller can't read it
    /// ([`crate::Options::leave_others`]).
    LeftBehind {
        path: &'a [u8],
        /// The uid of its owner.
        owner: u32,
    },
}

/// How a copy is watched.
pub struct Monitor<'a> {
    /// Counts as the copy goes on, and can cancel it.
    pub progress: &'a Progress,
    /// Called for every event, from any worker.
    pub event: &'a (dyn Fn(Event<'_>) + Sync),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_under_way_counts_with_what_it_has() {
        let progress = Progress::new();
        progress.bytes_written.store(5, Relaxed);
        assert_eq!(progress.bytes_so_far(), 5);
        progress.bytes_done.store(9, Relaxed);
        assert_eq!(progress.bytes_so_far(), 9, "what was there already is not written");
    }
}
