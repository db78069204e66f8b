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

    /// Notes that all up to one were synced, or that this failed: whoever waited for these is told then. Those who wait for later
    /// ones still do.
    pub fn tried(&mut self, made: u64, synced: Result<(), Errno>) {
        match synced {
            Ok(()) => self.synced = made,
            Err(_) if self.wanted <= made => self.wanted = self.synced,
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_while_a_sync_fails_is_still_waited_for() {
        let mut changes = Changes::default();
        changes.add();
        let made = changes.made();
        assert!(!changes.want(made));
        // While the filesystem is synced.
        changes.add();
        let later = changes.made();
        assert!(!changes.want(later));
        changes.tried(made, Err(Errno::IO));
        assert!(changes.are_wanted());
        changes.tried(later, Err(Errno::IO));
        assert!(!changes.are_wanted(), "all were told");
        assert!(!changes.want(later));
        changes.tried(later, Ok(()));
        assert!(!changes.are_wanted() && changes.want(later));
    }
}
