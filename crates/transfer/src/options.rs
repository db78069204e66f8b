//! What a copy is told.

use std::fmt;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use ondeck_core::Rate;

use crate::attributes::Ownership;
use crate::{Checksum, Exclude};

/// How to copy. [`Options::default`] keeps everything, checks with XXH3 and syncs.
#[derive(Clone, Debug)]
pub struct Options {
    /// The checksum taken of every file as its data passes.
    pub checksum: Checksum,
    /// How many threads copy; 0 means as many as there are processors, at most 16.
    pub threads: usize,
    /// How many bytes of a file a thread reads and writes at a time.
    pub buffer: usize,
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
    /// Read the target back and compare checksums once it is synced. Without a policy, compare attributes with the
    /// source's, too.
    pub verify: bool,
    /// Whose the copies are.
    pub ownership: Ownership,
    /// Do not call it a failure if the target can't hold an attribute (an ACL of a user that a user namespace has no
    /// name for); count it.
    pub attributes_best_effort: bool,
    /// Do not call it a failure if the caller can't read what belongs to another user: leave that behind, and tell of it
    /// ([`crate::Event::LeftBehind`]).
    pub leave_others: bool,
    /// Of a regular file keep the permission bits alone: no owner, times, extended attributes or ACLs. For comparisons with
    /// tools that keep no more: such a copy can't be resumed, and the mask of an ACL becomes what the group may do.
    pub modes_only: bool,
    /// Decide by checksums, not by times, what was copied before: what a program writes to RAM through a mapping need
    /// not change a file's times.
    pub recheck: bool,
    /// Copy again what was changed then or later (seconds and nanoseconds), also if it looks as it did: within one tick of
    /// the clock a file can change twice, and its times only once. With it, a file is also copied again if it is not the
    /// inode that was copied to its path: renaming a directory changes no time of what is in it.
    pub again_from: Option<(i64, i64)>,
    /// Marks temporary names as those of one run, which then needs no lock against others. Without it they follow from
    /// the final name alone, so that the same copy finds them again, and the target is locked.
    pub tag: Option<String>,
    /// Nobody looks into the target before the copy is done: new directories need not be built under temporary names.
    pub unseen: bool,
    /// Where the manifest is written, and read from when a copy is resumed. `None` keeps none.
    pub manifest: Option<PathBuf>,
    /// Asked before anything is deleted and before success is claimed.
    pub gate: Option<Gate>,
}

/// Says whether the source and the target are whole.
///
/// A network filesystem that has lost a server can show a part of its files and report no error: a copy from it would
/// look complete, and `delete` would take the hidden ones for removed. Who knows of such a filesystem answers here,
/// with words for the user if it is not whole or was not all the time.
#[derive(Clone)]
pub struct Gate(Arc<dyn Fn() -> Result<(), String> + Send + Sync>);

impl Gate {
    /// A gate that asks `check`, from any of the copy's threads.
    pub fn new(check: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Gate {
        Gate(Arc::new(check))
    }

    /// Asks.
    ///
    /// # Errors
    /// What is not whole, in words.
    pub fn check(&self) -> Result<(), String> {
        (self.0)()
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gate")
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            checksum: Checksum::Xxh3,
            threads: 0,
            buffer: BUFFER,
            bandwidth: None,
            dry_run: false,
            delete: false,
            update: false,
            exclude: Exclude::default(),
            sync: true,
            verify: false,
            ownership: Ownership::Preserve,
            attributes_best_effort: false,
            leave_others: false,
            modes_only: false,
            recheck: false,
            again_from: None,
            tag: None,
            unseen: false,
            manifest: None,
            gate: None,
        }
    }
}

impl Options {
    /// The number of worker threads for a copy on this machine's own filesystems.
    ///
    /// Sixteen are enough to keep one node's memory or network busy; more only fight over the same directory locks.
    pub fn worker_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(2, usize::from).min(MOST_WORKERS),
            n => n,
        }
    }

    /// The number of worker threads for a copy between these two. On a network filesystem a thread waits for an answer
    /// most of the time, so there are at least eight (`ondeck-bench ramdisk` compares).
    pub(crate) fn worker_count_for(&self, source: impl AsFd, target: impl AsFd) -> usize {
        const FEWEST_ON_A_NETWORK: usize = 8;
        let own = self.worker_count();
        if self.threads == 0 && (is_remote(source) || is_remote(target)) {
            own.max(FEWEST_ON_A_NETWORK)
        } else {
            own
        }
    }
}

const MOST_WORKERS: usize = 16;

/// The buffer of a thread, and so the size of a write. A filesystem asks for as much memory in one piece as a write fills,
/// and where free memory is in small pieces waits for it (docs/decisions/0030; `ondeck-bench buffers` compares).
const BUFFER: usize = 1 << 20;

/// Whether a filesystem is served by another process or machine: FUSE, NFS, SMB and the parallel ones, by the numbers of
/// statfs(2).
fn is_remote(directory: impl AsFd) -> bool {
    const FUSE: u32 = 0x6573_5546;
    const NFS: u32 = 0x6969;
    const SMB2: u32 = 0xfe53_4d42;
    const CIFS: u32 = 0xff53_4d42;
    const CEPH: u32 = 0x00c3_6400;
    const LUSTRE: u32 = 0x0bd0_0bd0;
    const GPFS: u32 = 0x4750_4653;
    const BEEGFS: u32 = 0x1983_0326;
    const AFS: u32 = 0x6b41_4653;
    let kind = rustix::fs::fstatfs(directory).map_or(0, |stat| stat.f_type as u32);
    [FUSE, NFS, SMB2, CIFS, CEPH, LUSTRE, GPFS, BEEGFS, AFS].contains(&kind)
}
