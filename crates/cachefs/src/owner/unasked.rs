//! Files that the kernel writes to by itself ([`Writes::Passthrough`]): it writes to the store's file, and asks nobody.
//!
//! As long as such a file is open for writing, its size and its time are those of the store's file, and all of it is dirty, because
//! nobody tells what is changed. So all of it is resident from the beginning, stays so, and is written back only for those who
//! need it on the backing directory now. With the last writable close it is a file as all others. The journal says that a
//! file is open so: whoever recovers takes the size from the store, too.
//!
//! The store may become larger by that than anybody wanted. It is counted as soon as it is seen, and others wait.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use rustix::fs::{Timespec, Timestamps, UTIME_OMIT};

use super::blocks::{BLOCK, BLOCKS, Blocks};
use super::data::{extents, part, store_error, touched};
use super::inode::{blocks_before, dirty};
use super::state::{State, Stop};
use crate::message::{Ino, Time, without_set_ids};
use crate::settings::Writes;
use crate::store::{self, Segment, Store};

impl State {
    /// Whether the kernel may write to a file that is about to be opened without asking.
    ///
    /// # Errors
    /// What is not resident is read first.
    pub fn can_be_unasked(&mut self, store: &Store, ino: Ino) -> Result<bool, Stop> {
        let settings = &self.settings;
        if settings.writes != Writes::Passthrough || !settings.passthrough || settings.largest_file.is_some()
        {
            return Ok(false);
        }
        let (half, pinned) = (settings.capacity.0 / 2, self.pinned);
        let inode = self.inode_mut(ino)?;
        let size = inode.size;
        // Nobody would tell that a write has to take them away.
        if without_set_ids(inode.mode) != inode.mode {
            return Ok(false);
        }
        let Some(data) = inode.data_or_new() else { return Ok(false) };
        if data.passthrough > 0 {
            return Ok(true);
        }
        if data.direct > 0 || pinned + size > half {
            return Ok(false);
        }
        let end = size.min(data.backing_len);
        let mut missing = Ok(());
        for number in extents(0, end) {
            // All that is missing is begun at once.
            let needed = self.need_blocks(store, ino, number, &Blocks::First(BLOCKS));
            missing = missing.and(needed);
        }
        missing.map(|()| true)
    }

    /// Gives the kernel the store's file to write to.
    ///
    /// # Errors
    /// The store's.
    pub fn begin_unasked(&mut self, store: &Store, ino: Ino) -> Result<Arc<File>, Stop> {
        let of_store = |error: std::io::Error| store_error(ino, &error);
        let file = store.file(ino).map_err(of_store)?;
        let inode = self.inode(ino)?;
        let size = inode.size;
        let (is_open, is_unasked) =
            inode.data().map_or((false, false), |data| (data.passthrough > 0, data.unasked > 0));
        if is_unasked {
            return Ok(file);
        }
        if !is_open {
            if file.metadata().map_err(of_store)?.len() != size {
                file.set_len(size).map_err(of_store)?;
            }
            let pins = size.next_multiple_of(BLOCK);
            self.pinned += pins;
            if let Some(data) = self.inode_mut(ino)?.data_mut() {
                data.pinned = pins;
            }
        }
        self.unasked.insert(ino);
        self.tell_time(store, ino);
        for number in extents(0, size) {
            self.now_dirty(ino, number, &blocks_before(number, size));
        }
        self.mark_dirty(ino, dirty::TIMES);
        self.journal_write(ino, 0, size, dirty::TIMES);
        self.journal_unasked(ino, true);
        Ok(file)
    }

    /// One of the handles by which the kernel writes without asking is closed.
    pub fn end_unasked(&mut self, store: &Store, ino: Ino) {
        let Some(data) = self.inodes.get(&ino).and_then(|inode| inode.data()) else { return };
        let is_last = data.unasked == 1;
        if is_last {
            self.absorb(store, ino);
        }
        if let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_mut()) {
            data.unasked -= 1;
        }
        if is_last {
            self.mark_dirty(ino, dirty::TIMES);
            let Some(inode) = self.inodes.get(&ino) else { return };
            let (size, bits) = (inode.size, inode.dirty & (dirty::MODE | dirty::TIMES));
            self.journal_write(ino, 0, size, bits);
            self.unasked.remove(&ino);
            self.journal_unasked(ino, false);
            let is_empty = (self.inodes.get(&ino).and_then(|inode| inode.data()))
                .is_some_and(|data| data.extents.is_empty() && data.passthrough == 1);
            if is_empty && let Err(error) = store.remove(ino) {
                tracing::error!(ino, %error, "can't remove a file of the store");
            }
        }
    }

    /// Bytes of files that the kernel writes to without asking.
    pub fn unasked_bytes(&self) -> u64 {
        let pinned = |ino| self.inodes.get(ino).and_then(|inode| inode.data()).map_or(0, |data| data.pinned);
        self.unasked.iter().map(pinned).sum()
    }

    /// Has the store's file the time that the file has, so that a later one tells that it was written to.
    pub fn tell_time(&mut self, store: &Store, ino: Ino) {
        if !self.unasked.contains(&ino) {
            return;
        }
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        if without_set_ids(inode.mode) != inode.mode {
            // No clock has this time: also a write in the same tick is seen, and takes the set-id bits away.
            inode.mtime.nanos = inode.mtime.nanos.saturating_sub(1);
        }
        let time = Timespec { tv_sec: inode.mtime.secs, tv_nsec: inode.mtime.nanos.into() };
        let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let times = Timestamps { last_access: omit, last_modification: time };
        if let Err(error) = store.file(ino).and_then(|file| Ok(rustix::fs::futimens(&*file, &times)?)) {
            tracing::error!(ino, %error, "the store fails");
        }
    }

    /// Looks what programs have made of a file that the kernel writes to without asking: its size and its time.
    pub fn look(&mut self, store: &Store, ino: Ino) {
        if self.unasked.is_empty() || !self.unasked.contains(&ino) {
            return;
        }
        let found = store.file(ino).and_then(|file| Ok(rustix::fs::fstat(&*file)?));
        let found = match found {
            Ok(found) => found,
            Err(error) => return tracing::error!(ino, %error, "the store fails"),
        };
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        let mtime = Time { secs: found.st_mtime, nanos: found.st_mtime_nsec as u32 };
        if mtime != inode.mtime {
            inode.mtime = mtime;
            inode.ctime = inode.ctime.max(mtime);
            if without_set_ids(inode.mode) != inode.mode {
                inode.mode = without_set_ids(inode.mode);
                inode.dirty |= dirty::MODE;
            }
        }
        let (before, size) = (inode.size, found.st_size as u64);
        inode.size = size;
        if size > before {
            self.grown(store, ino, before, size);
        }
    }

    /// Counts what a file has become longer by.
    fn grown(&mut self, store: &Store, ino: Ino, before: u64, size: u64) {
        for piece in written(store, ino, before, size) {
            for number in extents(piece.begin, piece.end) {
                let (begin, end) = part(number, piece.begin, piece.end);
                self.hold_recovered(ino, number, &touched(begin, end));
                self.now_dirty(ino, number, &touched(begin, end));
            }
        }
        if let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_mut()) {
            let pins = size.next_multiple_of(BLOCK).saturating_sub(data.pinned);
            data.pinned += pins;
            self.pinned += pins;
        }
        self.crowded(store);
    }

    /// Makes room for what was taken without asking, as far as it can be made at once.
    fn crowded(&mut self, store: &Store) {
        let room = self.room();
        if self.resident > room {
            self.evict_to(store, room);
        }
        let high = self.settings.capacity.0 / 100 * u64::from(self.settings.dirty.high);
        if self.dirty_bytes > high || self.resident > room {
            self.draining = true;
        }
    }

    /// Takes over all that programs have made of a file that the kernel writes to without asking: all of it is dirty, and takes the
    /// memory that the store says.
    pub fn absorb(&mut self, store: &Store, ino: Ino) {
        self.look(store, ino);
        let Some(size) = self.inodes.get(&ino).map(|inode| inode.size) else { return };
        // What never had pages and is not known of is a hole here and there.
        let data = self.inodes.get(&ino).and_then(|inode| inode.data());
        let mut pages: BTreeMap<u32, Blocks> = (data.into_iter().flat_map(|data| data.extents.keys()))
            .map(|number| (*number, Blocks::default()))
            .collect();
        for piece in written(store, ino, 0, size) {
            for number in extents(piece.begin, piece.end) {
                let (begin, end) = part(number, piece.begin, piece.end);
                pages.entry(number).or_default().add(&touched(begin, end));
            }
        }
        for (number, pages) in pages {
            self.now_dirty(ino, number, &blocks_before(number, size));
            let data = self.inodes.get_mut(&ino).and_then(|inode| inode.data_mut());
            let Some(extent) = data.and_then(|data| data.extents.get_mut(&number)) else { continue };
            let before = extent.held.count();
            // Who is writing here has memory set aside.
            extent.held = if extent.pins > 0 { extent.held.with(&pages) } else { pages };
            self.resident = self.resident + extent.held.count() * BLOCK - before * BLOCK;
        }
        self.crowded(store);
    }
}

/// The parts of `begin..end` that somebody may have written to: all of it, if the store can't say.
fn written(store: &Store, ino: Ino, begin: u64, end: u64) -> Vec<Segment> {
    match store.file(ino).and_then(|file| store::segments(&*file, begin, end)) {
        Ok(parts) => parts.into_iter().filter(|part| part.data).collect(),
        Err(error) => {
            tracing::error!(ino, %error, "the store fails");
            vec![Segment { begin, end, data: true }]
        }
    }
}
