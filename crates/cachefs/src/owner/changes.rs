//! Changes of the backing directory that may not be on its disk yet.

use rustix::io::Errno;

/// They are counted; it is known which of them were synced, and whether somebody waits for more.
#[derive(Debug)]
pub struct Changes {
    made: u64,
    synced: u64,
    wanted: u64,
}

impl Default for Changes {
    fn default() -> Changes {
        // What an earlier process has changed is the first.
        Changes { made: 1, synced: 0, wanted: 0 }
    }
}

impl Changes {
    /// Notes one that was not synced.
    pub fn add(&mut self) {
        self.made += 1;
    }

    /// The number of the last one.
    pub fn made(&self) -> u64 {
        self.made
    }

    /// Whether all up to this one are on the disk. If not, somebody waits for that now.
    pub fn want(&mut self, change: u64) -> bool {
        if self.synced < change {
            self.wanted = self.wanted.max(change);
        }
        self.synced >= change
    }

    /// Whether somebody waits for a sync.
    pub fn are_wanted(&self) -> bool {
        self.wanted > self.synced
    }

    /// Notes that all up to one were synced, or that this failed: whoever waited is told then.
    pub fn tried(&mut self, synced: Result<u64, Errno>) {
        match synced {
            Ok(made) => self.synced = made,
            Err(_) => self.wanted = self.synced,
        }
    }
}
