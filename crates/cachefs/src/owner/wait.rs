//! Requests that can't be answered yet.
//!
//! A request is tried as a whole. If something is missing (a name that only the backing directory knows, an extent, room), it is
//! put aside under what it needs, and tried again from its beginning when that is there; so nothing is done by halves, and
//! nobody's thread waits. A program that is killed while its request waits gets `EINTR`, which ends it: FUSE's interrupts are
//! not heard ([`Waits::killed`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use crate::message::{Answer, Caller, Ino, Request, Xattrs};

/// What a request waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// A name of a directory is looked up.
    Name(Ino, OsString),
    /// A directory is listed.
    Listing(Ino),
    /// Extended attributes are read.
    Xattrs(Ino),
    /// The target of a symbolic link is read.
    Target(Ino),
    /// An extent is read.
    Extent(Ino, u32),
    /// It is asked which blocks of so many extents are holes. Requests wait for [`Need::Extent`].
    Holes(Ino, u32, u32),
    /// Nobody reads from or writes to a part of the file any more.
    Quiet(Ino),
    /// Handles by which the kernel reads the file by itself are released; for a while only.
    Released(Ino),
    /// Room for data.
    Space,
    /// Room in the log.
    Log,
    /// A file is on the backing directory, synced.
    Synced(Ino),
    /// The space of the backing directory is asked for.
    Statistics,
    /// It is tried whether the backing directory, here this directory of it, holds these extended attributes.
    Holds(Ino, Arc<Xattrs>),
    /// The project that something belongs to is read.
    Project(Ino),
}

impl Need {
    /// A number for its kind.
    pub fn kind(&self) -> usize {
        match self {
            Need::Name(..) => 0,
            Need::Listing(_) => 1,
            Need::Xattrs(_) => 2,
            Need::Target(_) => 3,
            Need::Extent(..) => 4,
            Need::Quiet(_) => 5,
            Need::Space => 6,
            Need::Log => 7,
            Need::Synced(_) => 8,
            Need::Statistics => 9,
            Need::Holds(..) => 10,
            Need::Holes(..) => 11,
            Need::Released(_) => 12,
            Need::Project(_) => 13,
        }
    }

    /// Whether it is read from the backing directory by a loader.
    pub fn is_loaded(&self) -> bool {
        matches!(
            self,
            Need::Name(..)
                | Need::Listing(_)
                | Need::Xattrs(_)
                | Need::Target(_)
                | Need::Statistics
                | Need::Holds(..)
                | Need::Project(_)
        )
    }
}

/// A request that waits.
pub struct Parked {
    pub caller: Caller,
    pub request: Request<'static>,
    pub answer: Answer,
    pub since: Instant,
    /// Of one that syncs: what there was when it came.
    pub target: Option<Target>,
}

/// What a request waits for by [`Need::Synced`]: what there was when it was first tried.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Data that became dirty up to this.
    pub generation: u64,
    /// The last operation of the log; 0: none.
    pub operation: u64,
    /// The last change of the backing directory, once these are done there.
    pub change: Option<u64>,
}

/// All requests that wait.
#[derive(Default)]
pub struct Waits {
    next: u64,
    parked: BTreeMap<u64, (Need, Parked)>,
    by_need: HashMap<Need, Vec<u64>>,
    /// In the order in which they came.
    ready: Vec<Parked>,
    /// Errors for those who are tried again.
    failed: Vec<(Parked, Errno)>,
    /// Reads of the backing directory that are under way.
    begun: HashSet<Need>,
    /// How often anybody was woken, by kind of need: who was about to be parked meanwhile tries again instead.
    wakes: Wakes,
}

/// Counts by kind of need.
pub type Wakes = [u64; 14];

impl Waits {
    /// Puts a request aside.
    pub fn park(&mut self, need: Need, parked: Parked) {
        self.next += 1;
        self.by_need.entry(need.clone()).or_default().push(self.next);
        self.parked.insert(self.next, (need, parked));
    }

    /// Whether a read for this has to be begun: nobody has yet.
    pub fn begin(&mut self, need: &Need) -> bool {
        self.begun.insert(need.clone())
    }

    /// How often anybody was woken, by [`Need::kind`].
    pub fn wakes(&self) -> Wakes {
        self.wakes
    }

    /// Has everybody who waits for this be tried again. Also if it seems that nobody does: somebody may just have found it lacking,
    /// and be about to wait.
    pub fn wake(&mut self, need: &Need) {
        self.wakes[need.kind()] += 1;
        self.begun.remove(need);
        for id in self.by_need.remove(need).unwrap_or_default() {
            if let Some((_, parked)) = self.parked.remove(&id) {
                self.ready.push(parked);
            }
        }
    }

    /// Has everybody be tried again who waits for handles to be released: nobody does so for long.
    pub fn wake_for_releases(&mut self) {
        let is_one = |need: &&Need| matches!(need, Need::Released(_));
        let needs: Vec<Need> = self.by_need.keys().filter(is_one).cloned().collect();
        for need in needs {
            self.wake(&need);
        }
    }

    /// Has everybody be tried again who waits until an operation of the log, or an earlier one, is carried out. It may be about
    /// other files than theirs.
    pub fn carried_out(&mut self, last: u64) {
        let is_it = |target: &Target| (1..=last).contains(&target.operation);
        for parked in self.unpark_syncing(is_it) {
            self.ready.push(parked);
        }
    }

    /// Has everybody be tried again, or fail, who waits until changes of the backing directory up to this one are on its disk.
    pub fn synced(&mut self, last: u64, done: Result<(), Errno>) {
        for parked in self.unpark_syncing(|target| target.change.is_some_and(|change| change <= last)) {
            match done {
                Ok(()) => self.ready.push(parked),
                Err(error) => self.failed.push((parked, error)),
            }
        }
    }

    /// Has everybody fail who waits until an operation of the log is carried out that can't be: those who sync one of these
    /// inodes, or anything at all.
    pub fn not_carried_out(&mut self, number: u64, of: Option<&[Ino]>, error: Errno) {
        let is_it = |ino: Ino, target: &Target| {
            target.operation >= number && of.is_none_or(|inodes| inodes.contains(&ino))
        };
        for parked in self.unpark_syncing_of(is_it) {
            self.failed.push((parked, error));
        }
    }

    fn unpark_syncing(&mut self, is_it: impl Fn(&Target) -> bool) -> Vec<Parked> {
        self.unpark_syncing_of(|_, target| is_it(target))
    }

    fn unpark_syncing_of(&mut self, is_it: impl Fn(Ino, &Target) -> bool) -> Vec<Parked> {
        self.wakes[Need::Synced(0).kind()] += 1;
        let ids: Vec<u64> = (self.parked.iter())
            .filter(|(_, (need, parked))| match (need, &parked.target) {
                (Need::Synced(ino), Some(target)) => is_it(*ino, target),
                _ => false,
            })
            .map(|(id, _)| *id)
            .collect();
        ids.into_iter().filter_map(|id| self.unpark(id)).collect()
    }

    fn unpark(&mut self, id: u64) -> Option<Parked> {
        let (need, parked) = self.parked.remove(&id)?;
        if let Some(waiting) = self.by_need.get_mut(&need) {
            waiting.retain(|other| *other != id);
            if waiting.is_empty() {
                self.by_need.remove(&need);
            }
        }
        Some(parked)
    }

    /// Has everybody who waits for this fail.
    pub fn fail(&mut self, need: &Need, error: Errno) {
        self.wakes[need.kind()] += 1;
        self.begun.remove(need);
        for id in self.by_need.remove(need).unwrap_or_default() {
            if let Some((_, parked)) = self.parked.remove(&id) {
                self.failed.push((parked, error));
            }
        }
    }

    /// Has everybody fail.
    pub fn fail_all(&mut self, error: Errno) {
        self.by_need.clear();
        let parked = std::mem::take(&mut self.parked);
        self.failed.extend(parked.into_values().map(|(_, parked)| (parked, error)));
    }

    /// Whether anybody waits for this.
    pub fn is_waited_for(&self, need: &Need) -> bool {
        self.by_need.contains_key(need)
    }

    /// Those who can be tried again, the longest waiting first, and those who failed.
    pub fn take(&mut self) -> (Vec<Parked>, Vec<(Parked, Errno)>) {
        let mut ready = std::mem::take(&mut self.ready);
        if ready.len() > 1 {
            ready.sort_by_key(|parked| parked.since);
        }
        (ready, std::mem::take(&mut self.failed))
    }

    /// Whether [`take`](Waits::take) has anything.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty() || !self.failed.is_empty()
    }

    /// How many wait for room, and for anything else.
    pub fn count(&self) -> (usize, usize) {
        let room =
            [Need::Space, Need::Log].iter().filter_map(|need| self.by_need.get(need)).map(Vec::len).sum();
        (room, self.parked.len() - room)
    }

    /// The threads that wait.
    pub fn threads(&self) -> Vec<u32> {
        let mut threads: Vec<u32> = self.parked.values().map(|(_, parked)| parked.caller.thread).collect();
        threads.sort_unstable();
        threads.dedup();
        threads
    }

    /// Has the requests of threads that were killed fail with `EINTR`.
    pub fn killed(&mut self, threads: &HashSet<u32>) {
        let ids: Vec<u64> = (self.parked.iter())
            .filter(|(_, (_, parked))| threads.contains(&parked.caller.thread))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            if let Some(parked) = self.unpark(id) {
                self.failed.push((parked, Errno::INTR));
            }
        }
    }
}

/// Which of these threads are about to be killed: a signal that can't be caught is pending for them.
pub fn doomed(threads: &[u32]) -> HashSet<u32> {
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    let is_doomed = |thread: &u32| {
        if *thread == 0 {
            return false;
        }
        // Who can't be read is gone, or not of this namespace: then nobody is kept waiting by it.
        let Ok(status) = std::fs::read_to_string(format!("/proc/{thread}/status")) else { return false };
        status.lines().any(|line| {
            let Some(mask) = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")) else {
                return false;
            };
            u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & KILL != 0)
        })
    };
    threads.iter().copied().filter(|thread| is_doomed(thread)).collect()
}
