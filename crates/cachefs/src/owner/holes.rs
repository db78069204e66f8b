//! Holes of files: making them, and finding them.

use std::collections::BTreeMap;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::Core;
use super::blocks::{BLOCK, BLOCKS, Blocks};
use super::data::{extents, part, store_error, touched};
use super::inode::dirty;
use super::state::{State, Stop};
use super::wait::Need;
use crate::message::{Caller, Ino, Reply, Time};
use crate::settings::EXTENT;
use crate::store::{self, Store};

/// Extents that are asked about at once, when somebody looks for holes.
const LOOK_AHEAD: usize = 256;

impl State {
    /// Sees to it that it is known which blocks of an extent are holes.
    fn need_holes(&mut self, ino: Ino, number: u32, last: u32) -> Result<(), Stop> {
        let data = self.inode_mut(ino)?.data_or_new().ok_or(Errno::ISDIR)?;
        let wait = Err(Stop::Wait(Need::Extent(ino, number)));
        match data.extents.get(&number) {
            Some(extent) if extent.fetching => return wait,
            Some(extent) if extent.looked => return Ok(()),
            _ if data.is_missing(number).is_empty() => return Ok(()),
            _ => {}
        }
        // Those that come next are asked about, too: a file may be mostly holes.
        let is_free = |number: &u32| data.extents.get(number).is_none_or(|extent| !extent.fetching);
        let count = (number..=last).take(LOOK_AHEAD).take_while(is_free).count() as u32;
        for number in number..number + count {
            data.extents.entry(number).or_default().fetching = true;
        }
        for number in number..number + count {
            self.clean.remove(&(ino, number));
            self.waits.begin(&Need::Extent(ino, number));
        }
        self.jobs.push_back(Need::Holes(ino, number, count));
        wait
    }

    /// Notes which blocks of extents are holes on the backing directory.
    pub fn holes_found(
        &mut self,
        store: &Store,
        ino: Ino,
        numbers: std::ops::Range<u32>,
        found: Result<Vec<(u32, Blocks)>, Errno>,
    ) {
        let error = found.as_ref().err().copied();
        let mut holes: BTreeMap<u32, Blocks> = found.unwrap_or_default().into_iter().collect();
        for number in numbers {
            let data = self.inodes.get_mut(&ino).and_then(|inode| inode.data_mut());
            if let Some(extent) = data.and_then(|data| data.extents.get_mut(&number)) {
                extent.fetching = false;
                if let Some(holes) = holes.remove(&number) {
                    extent.valid.add(&holes);
                    extent.looked = true;
                }
            }
            self.touch(ino, number);
            match error {
                None => self.waits.wake(&Need::Extent(ino, number)),
                Some(error) => self.waits.fail(&Need::Extent(ino, number), error),
            }
        }
        self.waits.wake(&Need::Quiet(ino));
        self.remove_if_unused(ino, store);
    }

    /// Whether the block of a byte is a hole.
    fn is_hole(&mut self, store: &Store, ino: Ino, at: u64) -> Result<bool, Stop> {
        let (number, block) = ((at / EXTENT) as u32, touched(at, at + 1));
        self.need_blocks(store, ino, number, &block)?;
        let data = self.inode(ino)?.data();
        if data.is_some_and(|data| data.passthrough > 0) {
            // The kernel may have written there, and nobody was told.
            let begin = at / BLOCK * BLOCK;
            let file = store.file(ino).map_err(|error| store_error(ino, &error))?;
            let parts =
                store::segments(&*file, begin, begin + BLOCK).map_err(|error| store_error(ino, &error))?;
            return Ok(parts.iter().all(|part| !part.data));
        }
        let extent = data.and_then(|data| data.extents.get(&number));
        Ok(extent.is_none_or(|extent| extent.held.within(&block).is_empty()))
    }

    /// Frees a part of a file, so that it reads as zeros; the size stays. Both ends lie on blocks, or at the end of the file.
    pub fn punch(&mut self, store: &Store, ino: Ino, begin: u64, end: u64) -> Result<(), Stop> {
        let file = || store.file(ino).map_err(|error| store_error(ino, &error));
        if !self.is_recovering {
            let file = file()?;
            // The last page of a file goes as a whole, or it would take memory, and be written as zeros.
            let length = end.next_multiple_of(BLOCK) - begin;
            store::punch(&file, begin, length).map_err(|error| store_error(ino, &error))?;
        }
        let is_mapped = self.inode(ino)?.data().is_some_and(|data| data.shared_writers > 0);
        for number in extents(begin, end) {
            let (from, until) = part(number, begin, end);
            let blocks = touched(from, until);
            self.now_dirty(ino, number, &blocks);
            if is_mapped {
                // Maps will write there again, without asking.
                continue;
            }
            if let Some(extent) =
                self.inode_mut(ino)?.data_mut().and_then(|data| data.extents.get_mut(&number))
            {
                let freed = extent.held.within(&blocks).count() * BLOCK;
                extent.held.take(&blocks);
                self.resident -= freed;
            }
        }
        if is_mapped {
            rustix::fs::fallocate(file()?, FallocateFlags::KEEP_SIZE, begin, end - begin)?;
        }
        self.waits.wake(&Need::Space);
        Ok(())
    }
}

impl Core {
    /// fallocate(2). Room is not set aside: who writes later waits for it, if need be.
    pub fn allocate(
        &self,
        caller: Caller,
        ino: Ino,
        offset: u64,
        length: u64,
        mode: i32,
    ) -> Result<Reply, Stop> {
        let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        if length == 0 {
            return Err(Errno::INVAL.into());
        }
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => {}
            libc::FALLOC_FL_PUNCH_HOLE if keep_size => self.zero(caller, ino, offset, end)?,
            libc::FALLOC_FL_ZERO_RANGE => self.zero(caller, ino, offset, end)?,
            _ => return Err(Errno::OPNOTSUPP.into()),
        }
        let mut state = self.lock();
        state.look(&self.store, ino);
        if !keep_size && state.inode(ino)?.size < end {
            state.truncate(&self.store, caller, ino, end)?;
        }
        let mode = state.inode(ino)?.mode;
        if caller.mode_after_change(mode) != mode {
            state.inode_mut(ino)?.mode = caller.mode_after_change(mode);
            state.mark_dirty(ino, dirty::MODE);
            state.journal_inode(ino);
        }
        Ok(Reply::Done)
    }

    /// Has a part of a file read as zeros; the size stays.
    fn zero(&self, caller: Caller, ino: Ino, begin: u64, end: u64) -> Result<(), Stop> {
        let size = {
            let mut state = self.lock();
            state.look(&self.store, ino);
            state.inode(ino)?.size
        };
        let end = end.min(size);
        if begin >= end {
            return Ok(());
        }
        // Blocks are freed as a whole; of those at both ends a part is overwritten, which would make a block of a hole.
        let (first, last) =
            (begin.next_multiple_of(BLOCK), if end == size { end } else { end / BLOCK * BLOCK });
        // Before anything is written: that alone would be taken for a part that nobody uses any more.
        if first < last && self.lock().is_busy(ino, first, last) {
            return Err(Stop::Wait(Need::Quiet(ino)));
        }
        let overwrite = |from: u64, until: u64| -> Result<(), Stop> {
            if from >= until || self.lock().is_hole(&self.store, ino, from)? {
                return Ok(());
            }
            self.write(caller, ino, from, &vec![0; (until - from) as usize]).map(drop)
        };
        overwrite(begin, first.min(end))?;
        overwrite(last.max(first), end)?;
        let mut state = self.lock();
        if first < last && state.is_busy(ino, first, last) {
            return Err(Stop::Wait(Need::Quiet(ino)));
        }
        let at = Time::now();
        state.inode_mut(ino)?.data_or_new();
        // Also if no block is freed: it has a new time.
        state.announce_zero(ino, first, last.max(first), at);
        if first < last {
            state.punch(&self.store, ino, first, last)?;
        }
        let inode = state.inode_mut(ino)?;
        (inode.mtime, inode.ctime) = (at, at);
        state.mark_dirty(ino, dirty::TIMES);
        state.shorten_journal();
        Ok(())
    }

    /// lseek(2) with `SEEK_DATA` or `SEEK_HOLE`. The store knows of what is resident, and the backing directory of the rest.
    pub fn seek(&self, ino: Ino, offset: u64, hole: bool) -> Result<Reply, Stop> {
        let mut state = self.lock();
        state.look(&self.store, ino);
        let size = state.inode(ino)?.size;
        if offset >= size {
            return Err(Errno::NXIO.into());
        }
        let file = self.store.file(ino).map_err(|error| store_error(ino, &error))?;
        let numbers = extents(offset, size);
        let last = numbers.end - 1;
        for number in numbers {
            state.need_holes(ino, number, last)?;
            let mut data = state.inode(ino)?.data().map(|data| data.is_missing(number)).unwrap_or_default();
            let (begin, end) = part(number, offset, size);
            let parts = store::segments(&file, begin, end).map_err(|error| store_error(ino, &error))?;
            for part in parts.iter().filter(|part| part.data) {
                data.add(&touched(part.begin, part.end));
            }
            let wanted = if hole { Blocks::First(BLOCKS).without(&data) } else { data };
            if let Some((first, _)) = wanted.within(&touched(begin, end)).runs().first() {
                let found = u64::from(number) * EXTENT + u64::from(*first) * BLOCK;
                return Ok(Reply::Offset(found.max(offset)));
            }
        }
        if hole { Ok(Reply::Offset(size)) } else { Err(Errno::NXIO.into()) }
    }
}
