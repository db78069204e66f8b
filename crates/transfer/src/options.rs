//! What a copy is told.

use std::path::PathBuf;

use ondeck_core::Rate;

use crate::{Checksum, Exclude};

/// Whose the copies are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ownership {
    /// The source's owner and group, as far as the caller may give files away.
    #[default]
    Preserve,
    /// What the target directory gives to new files: a set-gid directory hands down its group, a default ACL its
    /// entries. A file that replaces another keeps that one's group where possible.
    Inherit,
}

/// How to copy. [`Options::default`] keeps everything, checks with XXH3 and syncs.
#[derive(Clone, Debug)]
pub struct Options {
    /// The checksum taken of every file as its data passes.
    pub checksum: Checksum,
    /// How many threads copy; 0 means as many as there are processors, at most 16.
    pub threads: usize,
    /// The most bytes that all threads together copy in a second.
    pub bandwidth: Option<Rate>,
    /// Only say what would be done.
    pub dry_run: bool,
    /// Remove what the target has and the source has not.
    pub delete: bool,
    /// Leave a target file alone that is as new as the source's or newer.
    pub update: bool,
    /// What is left out, and left alone in the target.
    pub exclude: Exclude,
    /// Flush the target filesystem before success is claimed.
    pub sync: bool,
    /// Read the target back and compare checksums once it is synced.
    pub verify: bool,
    /// Whose the copies are.
    pub ownership: Ownership,
    /// Do not call it a failure if the target can't hold an attribute (an ACL of a user that a user namespace has no
    /// name for); count it.
    pub attributes_best_effort: bool,
    /// Decide by checksums, not by times, what was copied before: what a program writes to RAM through a mapping need
    /// not change a file's times.
    pub recheck: bool,
    /// Marks temporary names as those of one run, which then needs no lock against others. Without it they follow from
    /// the final name alone, so that the same copy finds them again, and the target is locked.
    pub tag: Option<String>,
    /// Where the manifest is written, and read from when a copy is resumed. `None` keeps none.
    pub manifest: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            checksum: Checksum::Xxh3,
            threads: 0,
            bandwidth: None,
            dry_run: false,
            delete: false,
            update: false,
            exclude: Exclude::default(),
            sync: true,
            verify: false,
            ownership: Ownership::Preserve,
            attributes_best_effort: false,
            recheck: false,
            tag: None,
            manifest: None,
        }
    }
}

impl Options {
    /// The number of worker threads.
    ///
    /// Sixteen are enough to keep one node's memory or network busy; more only fight over the same directory locks.
    pub fn worker_count(&self) -> usize {
        const MOST: usize = 16;
        match self.threads {
            0 => std::thread::available_parallelism().map_or(2, usize::from).min(MOST),
            n => n,
        }
    }
}
