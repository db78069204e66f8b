//! Names that take too much.
//!
//! What is clean and nobody uses can be looked up on the backing directory again, so it is forgotten when names take more than
//! [`Settings::names`](crate::settings::Settings::names), least recently used first, as the hand of a clock finds it. Three
//! things make that safe:
//!
//! - An inode is forgotten with all names that lead to it, and only if the backing directory has it under these names now: nothing of
//!   it is dirty, and no operation of the log is about it. A directory is forgotten after all that is in it.
//! - Its directory is not known as a whole then. What was removed from it, and is still there on the backing directory, is noted to
//!   be [`gone`](super::inode::Directory::gone): the log says what that is.
//! - While names of a directory are being read, nothing of it is forgotten: what was read may be of a time before an operation
//!   that is carried out by now.
//!
//! The client has references of most inodes, because the kernel keeps names. It is asked to give them back
//! ([`Client`](crate::message::Client)), by a thread that nobody waits for, and what it gives back is forgotten.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::PoisonError;
use std::time::Duration;

use super::inode::{Home, Kind, Name, Operation, Use};
use super::inodes::INODE_BYTES;
use super::state::{FIRST_OWN_INO, NUMBER_BYTES, State, name_bytes};
use super::wait::Need;
use super::{Core, LOOK};
use crate::message::{Ino, Named, ROOT};
use crate::store::Store;

/// Places that the hand goes over while it has the lock.
const PLACES: usize = 512;

/// Directories whose removed names are looked for in the log while it has the lock: that may take a millisecond each.
const SEARCHES: usize = 4;

/// Names that are not there, and that are worth a search in the log.
const MANY_GONE: usize = 1024;

/// Numbers that are kept of what was forgotten, however little names may take.
const FEWEST_NUMBERS: u64 = 1000;

/// The longest that nothing is tried when nothing could be forgotten.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Whether something can be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unused {
    /// Now.
    Now,
    /// When the client has given its references back.
    ButReferenced,
    /// Not now.
    No,
}

impl State {
    /// Notes that names of a directory are about to be read from the backing directory.
    pub fn begin_loading(&mut self, need: &Need) {
        if let Need::Name(dir, _) | Need::Listing(dir) = need {
            *self.loading.entry(*dir).or_default() += 1;
        }
    }

    /// Notes that they were read.
    pub fn end_loading(&mut self, need: &Need) {
        if let Need::Name(dir, _) | Need::Listing(dir) = need
            && let Some(count) = self.loading.get_mut(dir)
        {
            *count -= 1;
            if *count == 0 {
                self.loading.remove(dir);
            }
        }
    }

    /// Notes that the backing directory has something in a directory that programs are not to see.
    pub fn now_aside(&mut self, dir: Ino) {
        if let Ok(directory) = self.directory_mut(dir) {
            directory.aside = true;
        }
    }

    /// Bytes of names down to which is forgotten, once they are more than they may be.
    fn fewer_names(&self) -> u64 {
        self.settings.names.0 / 16 * 15
    }

    /// Whether names of a directory can be looked up again.
    fn can_lose_names(&self, dir: Ino) -> bool {
        self.directory(dir).is_ok_and(|directory| !directory.aside) && !self.loading.contains_key(&dir)
    }

    fn unused(&self, ino: Ino) -> Unused {
        let Some(inode) = self.inodes.get(&ino) else { return Unused::No };
        let is_used = ino == ROOT
            || inode.handles > 0
            || inode.pending > 0
            || inode.made_by > 0
            || inode.aside
            || inode.is_orphan()
            || inode.seen.is_none()
            || inode.is_dirty()
            || (inode.homes.is_empty() && (inode.is_dir() || inode.made_by != 0));
        if is_used || self.passes.contains_key(&ino) || self.dirty_by_age.contains_key(&ino) {
            return Unused::No;
        }
        let kind = match &inode.kind {
            Kind::Directory(directory) => directory.entries.is_empty() && self.can_lose_names(ino),
            Kind::File(Some(data)) => {
                data.passthrough == 0
                    && data.error.is_none()
                    && data.orphan.is_none()
                    && data.extents.values().all(super::inode::Extent::can_go)
            }
            Kind::File(None) | Kind::Symlink(_) | Kind::Special(_) => true,
        };
        let leads_here = |home: &Home| {
            self.can_lose_names(home.dir)
                && self.directory(home.dir).is_ok_and(|dir| dir.entries.get(&home.name) == Some(&ino))
        };
        match kind && inode.homes.iter().all(leads_here) {
            false => Unused::No,
            true if inode.references > 0 => Unused::ButReferenced,
            true => Unused::Now,
        }
    }

    /// Forgets an inode and its names, if nobody uses it.
    pub fn forget_if_unused(&mut self, store: &Store, ino: Ino) -> bool {
        if self.unused(ino) != Unused::Now {
            return false;
        }
        self.evict_file(store, ino);
        let Some(inode) = self.inodes.get_mut(&ino) else { return false };
        inode.drop_idle_data();
        if inode.data().is_some() {
            return false;
        }
        // A file that was cut has an empty one there.
        if matches!(inode.kind, Kind::File(_))
            && let Err(error) = store.remove(ino)
        {
            tracing::error!(ino, %error, "can't remove a file of the store");
        }
        let (homes, theirs) = (inode.homes.to_vec(), inode.seen.map(|seen| (inode.dev, seen.identity)));
        let is_found_by_number = inode.is_dir() || inode.nlink > 1;
        for Home { dir, name } in &homes {
            self.no_longer_complete(*dir);
            // Its directory is there, as was seen.
            let _ = self.take_entry(*dir, name, false);
        }
        // Programs compare numbers of directories while they walk, and of files with several names.
        let most = (self.settings.names.0 / 4 / NUMBER_BYTES).max(FEWEST_NUMBERS);
        if let Some(theirs) = theirs
            && ino >= FIRST_OWN_INO
            && (is_found_by_number || (self.numbers.len() as u64) < most)
            && self.numbers.insert(theirs, ino).is_none()
        {
            self.name_bytes += NUMBER_BYTES;
        }
        self.remove(ino);
        self.closing.push(ino);
        self.counters.forgotten += 1;
        true
    }

    /// Has names that a directory lacks be looked up on the backing directory, those excepted that were removed here.
    fn no_longer_complete(&mut self, dir: Ino) {
        if !self.directory(dir).is_ok_and(|directory| directory.complete) {
            return;
        }
        let gone = self.removed_here(dir);
        self.name_bytes += gone.iter().map(|name| name_bytes(name)).sum::<u64>();
        if let Ok(directory) = self.directory_mut(dir) {
            directory.complete = false;
            directory.gone = gone;
        }
    }

    /// Forgets that names are not there, those excepted that were removed here.
    fn forget_gone(&mut self, dir: Ino) {
        let least = match self.inodes.get(&dir) {
            Some(inode) if inode.pending > 0 => MANY_GONE,
            _ => 1,
        };
        let is_worth_it = self.directory(dir).is_ok_and(|dir| !dir.complete && dir.gone.len() >= least);
        if !is_worth_it || !self.can_lose_names(dir) {
            return;
        }
        let gone = self.removed_here(dir);
        self.name_bytes += gone.iter().map(|name| name_bytes(name)).sum::<u64>();
        if let Ok(directory) = self.directory_mut(dir) {
            let former = std::mem::replace(&mut directory.gone, gone);
            self.name_bytes -= former.iter().map(|name| name_bytes(name)).sum::<u64>();
        }
    }

    /// Names that are not in a directory, and that the backing directory may have until the log is carried out.
    fn removed_here(&mut self, dir: Ino) -> BTreeSet<Name> {
        let mut gone = BTreeSet::new();
        if self.inodes.get(&dir).is_some_and(|inode| inode.pending > 0) {
            self.searches += 1;
        }
        let Some(inode) = self.inodes.get(&dir).filter(|inode| inode.pending > 0) else { return gone };
        let Kind::Directory(directory) = &inode.kind else { return gone };
        let mut note = |of: &Ino, name: &OsStr| {
            if *of == dir && !directory.entries.contains_key(name) {
                gone.insert(name.into());
            }
        };
        for pending in self.log.iter().filter(|pending| !pending.cancelled) {
            match &pending.operation {
                Operation::Make { dir, name, .. }
                | Operation::Link { dir, name, .. }
                | Operation::Unlink { dir, name, .. } => note(dir, name),
                Operation::Rename { dir, name, to_dir, to_name, .. }
                | Operation::Exchange { dir, name, to_dir, to_name, .. } => {
                    note(dir, name);
                    note(to_dir, to_name);
                }
            }
        }
        gone
    }

    /// Moves the hand on; returns over how many places, and of what the client is to be asked for its references.
    fn sweep(&mut self, store: &Store) -> (usize, Vec<Named>) {
        let mut wanted = Vec::new();
        let mut places = 0;
        self.searches = 0;
        while places < PLACES && self.searches < SEARCHES {
            places += 1;
            let Some((ino, inode)) = self.inodes.advance() else { continue };
            let used = inode.used;
            if used == Use::Since {
                inode.used = Use::Before;
                continue;
            }
            if inode.is_dir() {
                self.forget_gone(ino);
            }
            match self.unused(ino) {
                Unused::Now => drop(self.forget_if_unused(store, ino)),
                Unused::ButReferenced => {
                    let Some(inode) = self.inodes.get_mut(&ino) else { continue };
                    inode.used = Use::Asked;
                    let is_dir = inode.is_dir();
                    for Home { dir, name } in inode.homes.iter() {
                        wanted.push(Named { ino, parent: *dir, name: name.to_os_string(), is_dir });
                    }
                }
                Unused::No => {}
            }
        }
        (places, wanted)
    }
}

#[cfg(debug_assertions)]
impl State {
    /// Checks that nothing leads to what was forgotten, and that names are counted as they should be; in a cache of few.
    fn assert_consistent(&self) {
        if self.inodes.len() > 1000 {
            return;
        }
        let mut bytes = self.inodes.len() as u64 * INODE_BYTES + self.numbers.len() as u64 * NUMBER_BYTES;
        for ino in self.inodes.keys() {
            let Some(inode) = self.inodes.get(ino) else { continue };
            for home in inode.homes.iter() {
                assert!(self.directory(home.dir).is_ok(), "the home of {ino}: {home:?}");
            }
            let Kind::Directory(directory) = &inode.kind else { continue };
            for (name, of) in &directory.entries {
                assert!(self.inodes.contains_key(of), "{name:?} in {ino}: {of}");
            }
            let is_below = *ino == ROOT || inode.is_orphan() || self.directory(directory.parent).is_ok();
            assert!(is_below, "the parent of {ino}: {}", directory.parent);
            let names = directory.entries.keys().chain(&directory.gone);
            bytes += names.map(|name| name_bytes(name)).sum::<u64>();
        }
        assert_eq!(self.name_bytes, bytes, "the bytes of names");
    }
}

impl Core {
    /// Forgets names when they take too much, until the end.
    pub fn run_forgetter(&self) {
        let mut pause = LOOK;
        let mut state = self.lock();
        loop {
            if state.stopped {
                return;
            }
            let is_idle = state.settings.idle;
            drop(state);
            pause = if is_idle || self.forget_if_many() { LOOK } else { (2 * pause).min(LONGEST_PAUSE) };
            // Others may replace it, with the same number, now that it is not known here.
            let closing = std::mem::take(&mut self.lock().closing);
            for ino in closing {
                self.backing.close(ino);
            }
            self.wake_all();
            state = self.lock();
            if state.stopped {
                return;
            }
            let waited = self.forgetting.wait_timeout(state, pause);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// If names take too much, lets the hand go round until enough is forgotten or asked for, or twice; returns whether they don't any
    /// more.
    pub fn forget_if_many(&self) -> bool {
        let (mut places, enough) = {
            let state = self.lock();
            if state.name_bytes <= state.settings.names.0 {
                return true;
            }
            (2 * state.inodes.round(), state.fewer_names())
        };
        let each = INODE_BYTES + name_bytes(OsStr::new(""));
        let mut asked = 0;
        while places > 0 {
            let (wanted, bytes) = {
                let mut state = self.lock();
                if state.stopped {
                    return true;
                }
                let (passed, wanted) = state.sweep(&self.store);
                places = places.saturating_sub(passed);
                (wanted, state.name_bytes)
            };
            asked += wanted.len() as u64 * each;
            if !wanted.is_empty()
                && let Some(client) = self.client()
            {
                client.give_back(wanted);
            }
            if bytes <= enough + asked {
                return true;
            }
        }
        #[cfg(debug_assertions)]
        self.lock().assert_consistent();
        false
    }
}
