//! Requests about the data of files, and the memory that it takes.
//!
//! A block is *valid* if its content is in the store. What is not valid has to be fetched if the backing directory has it
//! ([`FileData::backing_len`]), and is zeros otherwise. A block of memory is *held* before anything is written to the store, so
//! that the store never is full unexpectedly; if there is none to hold, the request waits until something was evicted.

use std::io;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;

use super::Core;
use super::blocks::{BLOCK, BLOCKS, Blocks};
use super::inode::{Extent, FileData, Kind, blocks_before, dirty};
use super::state::{State, Stop};
use super::wait::Need;
use crate::message::{Caller, Ino, Reply, Time};
use crate::settings::EXTENT;
use crate::store::{self, Store};

/// The largest file, so that extents can be numbered by 32 bits.
pub const LARGEST_FILE: u64 = EXTENT << 31;

/// The part of a file that an extent has of `begin..end`, as `begin..end` in the file.
pub fn part(number: u32, begin: u64, end: u64) -> (u64, u64) {
    let first = u64::from(number) * EXTENT;
    (begin.max(first), end.min(first + EXTENT))
}

/// The extents that `begin..end` touches.
pub fn extents(begin: u64, end: u64) -> std::ops::Range<u32> {
    if begin >= end { 0..0 } else { (begin / EXTENT) as u32..((end - 1) / EXTENT + 1) as u32 }
}

/// The blocks of an extent that `begin..end` (within it) touches.
pub fn touched(begin: u64, end: u64) -> Blocks {
    let first = begin / EXTENT * EXTENT;
    Blocks::range(((begin - first) / BLOCK) as u16, (end - first).div_ceil(BLOCK) as u16)
}

impl State {
    /// No file grows beyond this.
    fn largest_file(&self) -> u64 {
        self.settings.largest_file.map_or(LARGEST_FILE, |largest| largest.0.min(LARGEST_FILE))
    }

    /// Bytes that data may take beside the names.
    pub fn room(&self) -> u64 {
        let capacity = self.settings.capacity.0;
        // Names never take so much that no data could pass.
        capacity.saturating_sub(self.names_and_operations()).max(capacity / 2)
    }

    /// Makes room for so many bytes by evicting clean extents; `false` if that is not enough, and then write-back begins.
    pub fn make_room(&mut self, store: &Store, bytes: u64) -> bool {
        let room = self.room();
        if self.resident + bytes <= room {
            return true;
        }
        self.evict_to(store, room.saturating_sub(bytes));
        // What programs have taken without asking must not keep all others waiting until they close it.
        let asked = self.resident - self.unasked_bytes().min(self.resident);
        let fits = self.resident + bytes <= room || asked + bytes <= self.settings.capacity.0 / 16;
        if !fits {
            self.draining = true;
        }
        fits
    }

    /// Evicts clean extents, least recently used first, until no more than `bytes` are resident.
    pub fn evict_to(&mut self, store: &Store, bytes: u64) {
        let mut looked_at = self.clean.len();
        while self.resident > bytes && looked_at > 0 {
            looked_at -= 1;
            let Some(((ino, number), ())) = self.clean.pop_front() else { break };
            match self.evict(store, ino, number) {
                Evicted::Gone => {}
                // In use: its turn comes again.
                Evicted::InUse => {
                    self.clean.insert((ino, number), ());
                }
            }
        }
    }

    /// Whether there is anything that can be evicted, or could be as soon as a request has ended.
    pub fn has_clean(&self) -> bool {
        self.clean.keys().any(|(ino, _)| self.inodes.get(ino).is_some_and(|inode| !inode.keeps_data()))
    }

    fn evict(&mut self, store: &Store, ino: Ino, number: u32) -> Evicted {
        let Some(inode) = self.inodes.get_mut(&ino) else { return Evicted::Gone };
        let keeps = inode.keeps_data();
        let Some(data) = inode.data_mut() else { return Evicted::Gone };
        let Some(extent) = data.extents.get(&number) else { return Evicted::Gone };
        if keeps || !extent.can_go() {
            return Evicted::InUse;
        }
        // A block behind `backing_len` is not on the backing directory: valid zeros would be lost with it, and are zeros still.
        let held = extent.held.count() * BLOCK;
        data.extents.remove(&number);
        let done = if data.extents.is_empty() {
            inode.drop_idle_data();
            store.remove(ino)
        } else {
            store.file(ino).and_then(|file| store::punch(&file, u64::from(number) * EXTENT, EXTENT))
        };
        if let Err(error) = done {
            tracing::error!(ino, number, %error, "can't free an extent of the store");
        }
        self.resident -= held;
        self.counters.evictions += 1;
        self.waits.wake(&Need::Space);
        Evicted::Gone
    }

    /// Evicts what can be of one file.
    pub fn evict_file(&mut self, store: &Store, ino: Ino) {
        let numbers: Vec<u32> = match self.inodes.get(&ino).and_then(|inode| inode.data()) {
            Some(data) => data.extents.keys().copied().collect(),
            None => return,
        };
        for number in numbers {
            if matches!(self.evict(store, ino, number), Evicted::Gone) {
                self.clean.remove(&(ino, number));
            }
        }
    }

    /// Holds the blocks of an extent that are not held.
    pub fn hold(&mut self, store: &Store, ino: Ino, number: u32, blocks: &Blocks) -> Result<(), Stop> {
        let held = self
            .inode(ino)?
            .data()
            .and_then(|data| data.extents.get(&number))
            .map(|extent| extent.held.clone());
        let more = blocks.without(&held.unwrap_or_default());
        let bytes = more.count() * BLOCK;
        if bytes > 0 && !self.make_room(store, bytes) {
            return Err(Stop::Wait(Need::Space));
        }
        let data = self.inode_mut(ino)?.data_or_new().ok_or(Errno::ISDIR)?;
        data.extents.entry(number).or_default().held.add(&more);
        self.resident += bytes;
        Ok(())
    }

    /// Has the missing blocks of an extent be read from the backing directory.
    ///
    /// # Errors
    /// There is no room for them now.
    pub fn begin_fetch(&mut self, store: &Store, ino: Ino, number: u32) -> Result<(), Stop> {
        let data = self.inode_mut(ino)?.data_or_new().ok_or(Errno::ISDIR)?;
        let missing = data.is_missing(number);
        if missing.is_empty() || data.extents.get(&number).is_some_and(|extent| extent.fetching) {
            return Ok(());
        }
        self.await_writers(ino, number, &missing)?;
        self.hold(store, ino, number, &missing)?;
        if let Some(extent) = self.inode_mut(ino)?.data_mut().and_then(|data| data.extents.get_mut(&number)) {
            extent.fetching = true;
        }
        self.clean.remove(&(ino, number));
        self.waits.begin(&Need::Extent(ino, number));
        self.jobs.push_back(Need::Extent(ino, number));
        Ok(())
    }

    /// Waits for those who are writing to an extent of which these blocks are needed, if any of them is missing: fetching it would
    /// bring what they overwrite after what they write.
    fn await_writers(&self, ino: Ino, number: u32, blocks: &Blocks) -> Result<(), Stop> {
        let Some(data) = self.inodes.get(&ino).and_then(|inode| inode.data()) else { return Ok(()) };
        let is_written_to = data.extents.get(&number).is_some_and(|extent| extent.writers > 0);
        if is_written_to && !data.is_missing(number).within(blocks).is_empty() {
            return Err(Stop::Wait(Need::Quiet(ino)));
        }
        Ok(())
    }

    /// Counts, or no longer, one who is writing to a part of a file.
    fn set_writing(&mut self, ino: Ino, begin: u64, end: u64, writes: bool) {
        let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_mut()) else { return };
        for number in extents(begin, end) {
            if let Some(extent) = data.extents.get_mut(&number) {
                extent.writers = if writes { extent.writers + 1 } else { extent.writers.saturating_sub(1) };
            }
        }
    }

    /// Sees to it that these blocks of an extent can be read from the store, or are zeros.
    pub fn need_blocks(&mut self, store: &Store, ino: Ino, number: u32, blocks: &Blocks) -> Result<(), Stop> {
        let data = self.inode_mut(ino)?.data_or_new().ok_or(Errno::ISDIR)?;
        if data.extents.get(&number).is_some_and(|extent| extent.fetching) {
            return Err(Stop::Wait(Need::Extent(ino, number)));
        }
        if data.is_missing(number).within(blocks).is_empty() {
            return Ok(());
        }
        self.begin_fetch(store, ino, number)?;
        Err(Stop::Wait(Need::Extent(ino, number)))
    }

    /// An extent was used: it is the last to be evicted.
    pub fn touch(&mut self, ino: Ino, number: u32) {
        if let Some(extent) =
            self.inodes.get(&ino).and_then(|inode| inode.data()).and_then(|data| data.extents.get(&number))
            && extent.dirty.is_empty()
            && extent.flight.is_empty()
            && !extent.fetching
        {
            self.clean.remove(&(ino, number));
            self.clean.insert((ino, number), ());
        }
    }

    fn pin(&mut self, ino: Ino, begin: u64, end: u64) {
        let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_or_new()) else { return };
        for number in extents(begin, end) {
            data.extents.entry(number).or_default().pins += 1;
        }
    }

    fn unpin(&mut self, store: &Store, ino: Ino, begin: u64, end: u64) {
        let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_mut()) else { return };
        let mut empty = false;
        let mut freed = 0;
        let is_mapped = data.passthrough > 0;
        for number in extents(begin, end) {
            if let Some(extent) = data.extents.get_mut(&number) {
                extent.pins = extent.pins.saturating_sub(1);
                if extent.pins == 0 && !extent.fetching && !is_mapped {
                    // Memory that was set aside for a write that did not come.
                    let unused = extent.held.without(&extent.valid);
                    freed += unused.count();
                    extent.held.take(&unused);
                }
                if extent.can_go() && extent.valid.is_empty() && extent.held.is_empty() {
                    data.extents.remove(&number);
                    empty = true;
                }
            }
        }
        // Nobody is woken: who was just refused more would try again at once, for ever.
        self.resident -= freed * BLOCK;
        if !empty {
            for number in extents(begin, end) {
                self.touch(ino, number);
            }
        }
        self.waits.wake(&Need::Quiet(ino));
        self.remove_if_unused(ino, store);
    }

    /// Notes that somebody reads an extent, and reads ahead of who reads one after the other.
    fn read_ahead(&mut self, store: &Store, ino: Ino, number: u32) {
        let ahead = (self.settings.read_ahead.0 / EXTENT) as u32;
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        let size = inode.size;
        let Some(data) = inode.data_mut() else { return };
        let is_sequence = number == data.last_read + 1 || (number == 0 && data.last_read == 0);
        data.last_read = number;
        if !is_sequence {
            return;
        }
        let last = (size.min(data.backing_len).div_ceil(EXTENT)) as u32;
        // Who is to cut the file waits until nothing of it is fetched.
        if self.waits.is_waited_for(&Need::Quiet(ino)) {
            return;
        }
        for next in number + 1..last.min(number.saturating_add(ahead + 1)) {
            // What is read ahead of anybody's need must not push others to wait.
            let room = self.room();
            if self.resident + EXTENT > room && self.clean.is_empty() {
                return;
            }
            if self.begin_fetch(store, ino, next).is_err() {
                return;
            }
        }
    }

    /// Checks that a read can be answered from the store, and pins what it reads; returns its end.
    fn begin_read(&mut self, store: &Store, ino: Ino, offset: u64, size: u64) -> Result<u64, Stop> {
        self.look(store, ino);
        let inode = self.inode(ino)?;
        if !matches!(inode.kind, Kind::File(_)) {
            return Err(Errno::ISDIR.into());
        }
        let end = offset.saturating_add(size).min(inode.size);
        if offset >= end {
            return Ok(offset);
        }
        // Before anything is pinned: to let go of that would be taken for their end.
        for number in extents(offset, end) {
            let (begin, until) = part(number, offset, end);
            self.await_writers(ino, number, &touched(begin, until))?;
        }
        // First: what makes room for one part must not evict another.
        self.pin(ino, offset, end);
        let mut missing = Ok(());
        for number in extents(offset, end) {
            let (begin, until) = part(number, offset, end);
            // All that is missing is begun at once.
            let needed = self.need_blocks(store, ino, number, &touched(begin, until));
            missing = missing.and(needed);
        }
        if let Some(last) = extents(offset, end).last() {
            self.read_ahead(store, ino, last);
        }
        if let Err(stop) = missing {
            self.unpin(store, ino, offset, end);
            return Err(stop);
        }
        Ok(end)
    }

    fn end_read(&mut self, store: &Store, ino: Ino, offset: u64, end: u64) {
        self.counters.read_bytes += end - offset;
        self.unpin(store, ino, offset, end);
    }

    /// Checks that a write has room and all that it needs of the former content, and pins what it writes to; returns its end.
    /// What fits a largest file is written, and the rest is refused when it comes again.
    fn begin_write(&mut self, store: &Store, ino: Ino, offset: u64, end: u64) -> Result<u64, Stop> {
        let largest = self.largest_file();
        if offset >= largest {
            return Err(Errno::FBIG.into());
        }
        let end = end.min(largest);
        if !matches!(self.inode(ino)?.kind, Kind::File(_)) {
            return Err(Errno::ISDIR.into());
        }
        self.look(store, ino);
        for number in extents(offset, end) {
            let needed = self.needed_by_write(ino, number, offset, end)?;
            self.await_writers(ino, number, &needed)?;
        }
        self.pin_growth(ino, end)?;
        // First: what makes room for one part must not evict another.
        self.pin(ino, offset, end);
        let ready = self.prepare_write(store, ino, offset, end);
        if ready.is_err() {
            self.unpin(store, ino, offset, end);
        } else {
            self.set_writing(ino, offset, end, true);
        }
        ready.map(|()| end)
    }

    /// Counts what a write makes a file longer that the kernel reads by itself: none of it can be evicted until that is over.
    ///
    /// # Errors
    /// `ENOSPC` if too little were left to all others, who could only wait for ever.
    fn pin_growth(&mut self, ino: Ino, end: u64) -> Result<(), Stop> {
        // What the kernel writes to is counted as soon as it is seen.
        if self.unasked.contains(&ino) {
            return Ok(());
        }
        let most = self.settings.capacity.0 / 4 * 3;
        let pinned = self.pinned;
        let Some(data) = self.inode_mut(ino)?.data_mut().filter(|data| data.passthrough > 0) else {
            return Ok(());
        };
        let more = end.next_multiple_of(BLOCK).saturating_sub(data.pinned);
        if more > 0 && pinned + more > most {
            return Err(Errno::NOSPC.into());
        }
        data.pinned += more;
        self.pinned += more;
        Ok(())
    }

    /// The blocks of an extent that a write does not overwrite as a whole, and of which it needs what they had.
    fn needed_by_write(&mut self, ino: Ino, number: u32, offset: u64, end: u64) -> Result<Blocks, Stop> {
        let (begin, until) = part(number, offset, end);
        let backing_len = self.inode_mut(ino)?.data_or_new().map_or(0, |data| data.backing_len);
        let mut needed = Blocks::default();
        if begin % BLOCK != 0 {
            needed.add(&touched(begin, begin + 1));
        }
        if until % BLOCK != 0 && until < backing_len {
            needed.add(&touched(until - 1, until));
        }
        Ok(needed)
    }

    fn prepare_write(&mut self, store: &Store, ino: Ino, offset: u64, end: u64) -> Result<(), Stop> {
        for number in extents(offset, end) {
            let needed = self.needed_by_write(ino, number, offset, end)?;
            self.need_blocks(store, ino, number, &needed)?;
        }
        for number in extents(offset, end) {
            let (begin, until) = part(number, offset, end);
            self.hold(store, ino, number, &touched(begin, until))?;
        }
        Ok(())
    }

    /// Notes that blocks have other content than the backing directory.
    pub fn now_dirty(&mut self, ino: Ino, number: u32, blocks: &Blocks) {
        let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_or_new()) else { return };
        let extent = data.extents.entry(number).or_default();
        let before = extent.dirty.with(&extent.flight).count();
        extent.valid.add(blocks);
        extent.dirty.add(blocks);
        let after = extent.dirty.with(&extent.flight).count();
        self.dirty_bytes += (after - before) * BLOCK;
        self.clean.remove(&(ino, number));
    }

    fn end_write(&mut self, store: &Store, caller: Caller, ino: Ino, offset: u64, end: u64) {
        let at = Time::now();
        for number in extents(offset, end) {
            let (begin, until) = part(number, offset, end);
            self.now_dirty(ino, number, &touched(begin, until));
        }
        let mut bits = dirty::TIMES;
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.size = inode.size.max(end);
            (inode.mtime, inode.ctime) = (at, at);
            if caller.mode_after_change(inode.mode) != inode.mode {
                inode.mode = caller.mode_after_change(inode.mode);
                bits |= dirty::MODE;
            }
            let capability = std::ffi::OsStr::new(CAPABILITY);
            if let Some(xattrs) = inode.xattrs.as_mut().filter(|xattrs| xattrs.contains_key(capability)) {
                xattrs.remove(capability);
                bits |= dirty::XATTRS;
            }
        }
        self.counters.written_bytes += end - offset;
        self.mark_dirty(ino, bits);
        self.journal_write(ino, offset, end, bits);
        self.set_writing(ino, offset, end, false);
        self.unpin(store, ino, offset, end);
        let high = self.settings.capacity.0 / 100 * u64::from(self.settings.dirty.high);
        if self.dirty_bytes > high {
            self.draining = true;
        }
    }

    /// Whether somebody reads or writes a part of a file from `offset` on, so that it can't be cut now.
    pub fn is_busy(&self, ino: Ino, begin: u64, end: u64) -> bool {
        let Some(data) = self.inodes.get(&ino).and_then(|inode| inode.data()) else { return false };
        let first = (begin / EXTENT) as u32;
        let last = (end.div_ceil(EXTENT)).min(u64::from(u32::MAX)) as u32;
        data.extents.range(first..last.max(first + 1)).any(|(_, extent)| extent.pins > 0 || extent.fetching)
    }

    /// Whether a file was cut during so many passes that the one which is under way has to come to its end first: who waits for that would
    /// wait for ever.
    fn lets_a_pass_end(&self, ino: Ino) -> bool {
        const PATIENCE: u32 = 8;
        let data = self.inodes.get(&ino).and_then(|inode| inode.data());
        data.is_some_and(|data| data.cut_short >= PATIENCE) && self.passes.contains_key(&ino)
    }

    /// Whether nothing of the first bytes has to be read from the backing directory.
    pub fn is_resident_before(&self, ino: Ino, end: u64) -> bool {
        let Some(data) = self.inodes.get(&ino).and_then(|inode| inode.data()) else { return end == 0 };
        extents(0, end).all(|number| data.is_missing(number).within(&blocks_before(number, end)).is_empty())
    }

    /// Changes the size of a file.
    pub fn truncate(&mut self, store: &Store, caller: Caller, ino: Ino, size: u64) -> Result<(), Stop> {
        self.look(store, ino);
        let largest = self.largest_file();
        let inode = self.inode(ino)?;
        if !matches!(inode.kind, Kind::File(_)) {
            return Err(if inode.is_dir() { Errno::ISDIR } else { Errno::INVAL }.into());
        }
        if size > largest && size > inode.size {
            return Err(Errno::FBIG.into());
        }
        let old = inode.size;
        if size < old && (self.is_busy(ino, size, u64::MAX) || self.lets_a_pass_end(ino)) {
            return Err(Stop::Wait(Need::Quiet(ino)));
        }
        let at = Time::now();
        let mut bits = dirty::TIMES | dirty::SIZE;
        let mut mode = inode.mode;
        if caller.mode_after_change(mode) != mode {
            mode = caller.mode_after_change(mode);
            bits |= dirty::MODE;
        }
        // First: what is cut off can't be brought back.
        self.announce_size(ino, size, mode, at, bits);
        self.set_size(store, ino, size)?;
        let inode = self.inode_mut(ino)?;
        (inode.mode, inode.mtime, inode.ctime) = (mode, at, at);
        self.tell_time(store, ino);
        self.mark_dirty(ino, bits);
        self.shorten_journal();
        Ok(())
    }

    /// What a change of the size does to the data; recovery does it again.
    pub fn set_size(&mut self, store: &Store, ino: Ino, size: u64) -> Result<(), Stop> {
        let inode = self.inode_mut(ino)?;
        let old = inode.size;
        let data = inode.data_or_new().ok_or(Errno::ISDIR)?;
        data.cuts += u64::from(size < old);
        let is_mapped = data.passthrough > 0;
        let has_pages = !data.extents.is_empty();
        if size < old {
            data.backing_len = data.backing_len.min(size);
            data.cut = true;
            let (mut freed, mut clean) = (0, 0);
            let first = (size / EXTENT) as u32;
            let mut gone = Vec::new();
            for (number, extent) in data.extents.range_mut(first..) {
                let keep = blocks_before(*number, size);
                let beyond = Blocks::First(BLOCKS).without(&keep);
                freed += extent.held.within(&beyond).count();
                clean += extent.dirty.with(&extent.flight).within(&beyond).count();
                for blocks in [&mut extent.valid, &mut extent.dirty, &mut extent.flight, &mut extent.held] {
                    blocks.take(&beyond);
                }
                if extent.valid.is_empty() && extent.held.is_empty() && extent.pins == 0 && !extent.fetching {
                    gone.push(*number);
                }
            }
            for number in &gone {
                data.extents.remove(number);
            }
            for number in gone {
                self.clean.remove(&(ino, number));
            }
            self.resident -= freed * BLOCK;
            self.dirty_bytes -= clean * BLOCK;
            if freed > 0 {
                self.waits.wake(&Need::Space);
            }
        }
        self.inode_mut(ino)?.size = size;
        if ((size < old && has_pages) || is_mapped) && !self.is_recovering {
            // The store's file is cut in any case, so that what lay behind its new end never comes back.
            store.file(ino).and_then(|file| file.set_len(size)).map_err(|error| store_error(ino, &error))?;
        }
        Ok(())
    }

    /// Notes what a fetch has brought: all that was missing is valid, and what turned out to be holes needs no memory.
    pub fn fetched(
        &mut self,
        store: &Store,
        ino: Ino,
        number: u32,
        missing: &Blocks,
        holes: &Blocks,
        result: Result<u64, Errno>,
    ) {
        let need = Need::Extent(ino, number);
        let mut freed = 0;
        if let Some(extent) = self
            .inodes
            .get_mut(&ino)
            .and_then(|inode| inode.data_mut())
            .and_then(|data| data.extents.get_mut(&number))
        {
            extent.fetching = false;
            match result {
                Ok(_) => {
                    extent.valid.add(missing);
                    let unused = holes.within(&extent.held);
                    extent.held.take(&unused);
                    freed = unused.count();
                }
                Err(_) => {
                    let unused = missing.within(&extent.held).without(&extent.valid);
                    extent.held.take(&unused);
                    freed = unused.count();
                }
            }
        }
        self.resident -= freed * BLOCK;
        match result {
            Ok(bytes) => {
                self.counters.fetched_bytes += bytes;
                self.touch(ino, number);
                self.waits.wake(&need);
            }
            Err(error) => self.waits.fail(&need, error),
        }
        self.waits.wake(&Need::Quiet(ino));
        self.waits.wake(&Need::Space);
        self.remove_if_unused(ino, store);
    }
}

enum Evicted {
    Gone,
    InUse,
}

/// The attribute with a program's capabilities, which a change of the program takes from it.
const CAPABILITY: &str = "security.capability";

pub fn store_error(ino: Ino, error: &io::Error) -> Stop {
    tracing::error!(ino, %error, "the store fails");
    Stop::Error(Errno::IO)
}

impl Core {
    /// read(2).
    pub fn read(&self, ino: Ino, offset: u64, size: u32, again: bool) -> Result<Reply, Stop> {
        let end = {
            let mut state = self.lock();
            let end = state.begin_read(&self.store, ino, offset, u64::from(size))?;
            if again {
                state.counters.miss_bytes += end - offset;
            } else {
                state.counters.hit_bytes += end - offset;
            }
            end
        };
        let mut data = vec![0; (end - offset) as usize];
        self.read_store(ino, offset, &mut data)?;
        Ok(Reply::Data(data))
    }

    fn read_store(&self, ino: Ino, offset: u64, into: &mut [u8]) -> Result<(), Stop> {
        if into.is_empty() {
            return Ok(());
        }
        let done = self.store.file(ino).and_then(|file| store::read(&file, offset, into));
        self.lock().end_read(&self.store, ino, offset, offset + into.len() as u64);
        done.map_err(|error| store_error(ino, &error))
    }

    /// Reads what is resident; `None` if not all of it is.
    pub fn read_resident(&self, ino: Ino, offset: u64, into: &mut [u8]) -> Option<usize> {
        let end = {
            let mut state = self.lock();
            let end = state.begin_read(&self.store, ino, offset, into.len() as u64).ok()?;
            state.counters.hit_bytes += end - offset;
            end
        };
        let count = (end - offset) as usize;
        self.read_store(ino, offset, &mut into[..count]).ok()?;
        Some(count)
    }

    /// write(2).
    pub fn write(&self, caller: Caller, ino: Ino, offset: u64, data: &[u8]) -> Result<Reply, Stop> {
        let end = offset.checked_add(data.len() as u64).ok_or(Errno::FBIG)?;
        if data.is_empty() {
            return Ok(Reply::Written(0));
        }
        let end = self.lock().begin_write(&self.store, ino, offset, end)?;
        let data = &data[..(end - offset) as usize];
        // The lock is not held: the blocks are pinned and held.
        let done = self.store.file(ino).and_then(|file| file.write_all_at(data, offset));
        let mut state = self.lock();
        if let Err(error) = done {
            state.set_writing(ino, offset, end, false);
            state.unpin(&self.store, ino, offset, end);
            if error.raw_os_error() == Some(libc::ENOSPC) && !state.unasked.is_empty() {
                // Programs have filled the store without asking.
                state.draining = true;
                return Err(Stop::Wait(Need::Space));
            }
            return Err(store_error(ino, &error));
        }
        state.end_write(&self.store, caller, ino, offset, end);
        state.tell_time(&self.store, ino);
        Ok(Reply::Written(data.len() as u32))
    }
}

impl FileData {
    /// Bytes that the backing directory lacks.
    pub fn dirty_bytes(&self) -> u64 {
        let of = |extent: &Extent| extent.dirty.with(&extent.flight).count() * BLOCK;
        self.extents.values().map(of).sum()
    }
}
