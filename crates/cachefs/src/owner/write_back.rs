//! Writing data and attributes back.
//!
//! A *pass* brings all of one inode that is dirty when it begins: blocks go from dirty to *in flight*, are written, synced, and are
//! clean then, unless they were written to meanwhile. The times come last, because everything else changes them. If anything
//! fails, all of it is dirty again: nothing is dropped, and it is tried again later.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use super::Core;
use super::blocks::{BLOCK, Blocks};
use super::inode::{Home, Homes, Inode, Seen, dirty};
use super::state::{DirtySince, State};
use super::unfinished::unfinished;
use super::wait::Need;
use crate::backing;
use crate::message::Xattrs;
use crate::message::{Ino, ROOT, Time};
use crate::settings::{EXTENT, SyncWhen};
use crate::status::{Conflict, ConflictKind};
use crate::store;

/// What could not be written back is tried again after so long.
const RETRY: Duration = Duration::from_secs(1);

/// More files than these are synced together with all of their filesystem.
const SYNC_ONE_BY_ONE: usize = 3;

/// Extents of a pass that makes room: so much can't be evicted until its end.
const EXTENTS_OF_PASS: usize = 16;

/// Whether something is written back now.
enum Turn {
    Now,
    NotNow,
    /// When this operation is done.
    After(u64),
}

/// What a pass writes back.
pub struct Pass {
    pub ino: Ino,
    extents: Vec<(u32, Blocks)>,
    bits: u8,
    mode: u32,
    uid: u32,
    gid: u32,
    size: u64,
    atime: Time,
    mtime: Time,
    xattrs: Option<Xattrs>,
    backing_len: u64,
    cut: bool,
    cuts: u64,
    orphan: bool,
    /// Set as it goes.
    file: Option<Arc<File>>,
    seen: Option<Seen>,
    /// What it takes there, in units of 512 bytes, once it is written.
    blocks: Option<u64>,
    /// Something else than holes was written.
    has_data: bool,
    written: u64,
    /// All of it is on the disk.
    synced: bool,
    /// Since when it was dirty.
    since: Option<DirtySince>,
    /// Attributes that the backing directory does not take now, and why.
    refused: Option<(u8, Errno)>,
}

impl State {
    /// The number of the last operation that has to be carried out now.
    pub fn due(&self) -> u64 {
        let mut until = self.wanted;
        if !self.settings.idle {
            let old =
                self.log.iter().take_while(|pending| pending.since.elapsed() >= self.settings.age).count()
                    as u64;
            until = until.max(self.first_pending + old - 1);
        }
        if self.log.len() >= super::state::LONGEST_LOG / 2 {
            until = until.max(self.first_pending + self.log.len() as u64 / 2);
        }
        until.min(self.last_pending())
    }

    /// The next inode that has to be written back now.
    pub fn next_pass(&mut self) -> Option<Ino> {
        if self.draining {
            let low = self.settings.capacity.0 / 100 * u64::from(self.settings.dirty.low);
            self.draining = self.dirty_bytes > low || self.waits.is_waited_for(&Need::Space);
        }
        let now = Instant::now();
        let mut wanted = self.wanted;
        let mut is_ready = |ino: &Ino, for_room: bool| match self.can_pass(*ino, now, for_room) {
            Turn::Now => true,
            Turn::NotNow => false,
            Turn::After(number) => {
                wanted = wanted.max(number);
                false
            }
        };
        let mut found = self.urgent.iter().find(|ino| is_ready(ino, false)).copied();
        // What the kernel writes to without asking would be dirty again.
        let is_quiet = |ino: &Ino| !self.unasked.contains(ino);
        if found.is_none() && !self.settings.idle {
            found = self.failing.keys().find(|ino| is_quiet(ino) && is_ready(ino, false)).copied();
        }
        if found.is_none() && !self.settings.idle {
            let age = self.settings.age;
            let mut old = self.dirty_by_age.iter().take_while(|(_, dirty)| dirty.since.elapsed() >= age);
            found = old.find(|(ino, _)| is_quiet(ino) && is_ready(ino, false)).map(|(ino, _)| *ino);
        }
        if found.is_none() && self.draining {
            let mut all = self.dirty_by_use.keys();
            found = all.find(|ino| is_quiet(ino) && is_ready(ino, true)).copied();
        }
        self.wanted = wanted;
        found
    }

    /// Whether an inode can be written back now.
    fn can_pass(&self, ino: Ino, now: Instant, for_room: bool) -> Turn {
        if self.passes.contains(&ino) || self.failing.get(&ino).is_some_and(|(_, until)| *until > now) {
            return Turn::NotNow;
        }
        let Some(inode) = self.inodes.get(&ino) else { return Turn::NotNow };
        let turn = |ready| if ready { Turn::Now } else { Turn::NotNow };
        if !inode.is_dirty() || (for_room && inode.data().is_none_or(|data| data.dirty_bytes() == 0)) {
            return Turn::NotNow;
        }
        // One that is still to be made, and found for a while, is brought to where it is found.
        let is_never_found = inode.needless || inode.pending == 0 || !inode.homes.is_empty();
        if inode.is_orphan() && is_never_found {
            return turn(for_room && inode.data().is_some());
        }
        if inode.homes.is_empty() && inode.made_by != 0 {
            return Turn::After(inode.made_by);
        }
        // Every operation in a directory changes its times there.
        turn(!inode.is_dir() || inode.pending == 0)
    }

    /// Whether an inode can't be written back now: it fails, or an operation has to be done before.
    pub fn is_held_up(&self, ino: Ino) -> bool {
        self.failing.contains_key(&ino) || !matches!(self.can_pass(ino, Instant::now(), false), Turn::Now)
    }

    /// Begins a pass of `most` extents; `None` if there is nothing to write, or another one is under way.
    pub fn begin_pass(&mut self, ino: Ino, mut most: usize, store: &store::Store) -> Option<Pass> {
        if self.passes.contains(&ino) {
            return None;
        }
        if self.unasked.contains(&ino) {
            self.absorb(store, ino);
            // All of it is dirty again afterwards: parts would never come to an end.
            most = usize::MAX;
        }
        self.generation += 1;
        let generation = self.generation;
        let inode = self.inodes.get_mut(&ino)?;
        if !inode.is_dirty() {
            return None;
        }
        let bits = std::mem::take(&mut inode.dirty) | taken_by_writes(inode);
        inode.writing = bits;
        let mut extents = Vec::new();
        let size = inode.size;
        let (mut backing_len, mut cut, mut cuts, mut orphan) = (size, false, 0, None);
        if let Some(data) = inode.data_mut() {
            for (number, extent) in &mut data.extents {
                if !extent.dirty.is_empty() && extents.len() < most {
                    extent.flight = std::mem::take(&mut extent.dirty);
                    extents.push((*number, extent.flight.clone()));
                }
            }
            (backing_len, cut, cuts) = (data.backing_len, data.cut, data.cuts);
            orphan = data.orphan.clone();
        }
        let pass = Pass {
            ino,
            extents,
            bits,
            mode: inode.mode,
            uid: inode.uid,
            gid: inode.gid,
            size,
            atime: inode.atime,
            mtime: inode.mtime,
            xattrs: if bits & dirty::XATTRS != 0 { inode.xattrs.as_deref().cloned() } else { None },
            backing_len,
            cut,
            cuts,
            // One whose removal there is still to come is as any other: it may be shown before, and is known by how we left it.
            orphan: inode.is_orphan() && inode.homes.is_empty(),
            file: orphan,
            seen: inode.seen,
            blocks: None,
            has_data: false,
            written: 0,
            synced: false,
            since: self.dirty_by_age.get(&ino).copied(),
            refused: None,
        };
        let takes_all = !self.inodes.get(&ino).is_some_and(|inode| {
            inode.data().is_some_and(|data| data.extents.values().any(|extent| !extent.dirty.is_empty()))
        });
        if takes_all && let Some(entry) = self.dirty_by_age.get_mut(&ino) {
            *entry = DirtySince { since: Instant::now(), generation };
        }
        self.passes.insert(ino);
        if !pass.orphan {
            // Whoever has to go on after us must not take what we change for somebody else's work.
            self.journal_writing(ino);
        }
        Some(pass)
    }

    /// Ends a pass that has brought everything to the disk, or all but attributes that were refused.
    fn commit_pass(&mut self, pass: &Pass, store: &store::Store) {
        let ino = pass.ino;
        if self.inodes.get(&ino).and_then(|inode| inode.data()).is_some_and(|data| data.cuts != pass.cuts) {
            // The file was cut meanwhile, and has to be cut there before anything of it counts: all of it comes again.
            if let (Some(inode), false) = (self.inodes.get_mut(&ino), pass.orphan) {
                inode.seen = pass.seen;
            }
            return self.fail_pass(pass, Errno::AGAIN, store);
        }
        self.passes.remove(&ino);
        let refused = pass.refused.map_or(0, |(bits, _)| bits);
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.writing = 0;
            inode.dirty |= refused;
            if !pass.orphan {
                inode.seen = pass.seen;
            }
            if let Some(blocks) = pass.blocks {
                // Some filesystems count later; programs take a file of no blocks for one hole, and do not read it.
                inode.blocks = blocks.max(u64::from(pass.has_data));
            }
            let size = inode.size;
            if let Some(data) = inode.data_mut() {
                if pass.orphan && data.orphan.is_none() {
                    data.orphan.clone_from(&pass.file);
                }
                if data.backing_len != pass.size.min(size) {
                    data.extents.values_mut().for_each(|extent| extent.looked = false);
                }
                data.backing_len = pass.size.min(size);
                data.cut = false;
                data.error = None;
            }
        }
        let is_unasked = self.unasked.contains(&ino);
        if is_unasked && let Some(inode) = self.inodes.get_mut(&ino) {
            inode.dirty |= dirty::TIMES;
        }
        self.settle(pass, |extent, blocks| {
            if is_unasked {
                // Nobody has told whether it was written to meanwhile.
                extent.dirty.add(&extent.flight.within(blocks));
            }
            extent.flight.take(blocks);
        });
        self.counters.written_back_bytes += pass.written;
        if !pass.synced && !pass.orphan && (is_file(pass.mode) || pass.bits & !dirty::TIMES != 0) {
            self.changes.add();
        }
        self.failing.remove(&ino);
        if pass.cut || !pass.extents.is_empty() || pass.bits & !refused != 0 {
            self.progress = Instant::now();
        }
        if let Some((_, error)) = pass.refused {
            // The names that wait for its data need not wait for this.
            if let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_or_new()) {
                data.error = Some(error.raw_os_error());
            }
            self.refused(ino, error);
            self.dirty_as_before(pass);
        }
        // What was written to meanwhile is dirty again, and the journal has said so before this.
        let (mut clean, mut bits) = (pass.extents.clone(), pass.bits);
        if let Some(inode) = self.inodes.get(&ino) {
            bits &= !inode.dirty;
            for (number, blocks) in &mut clean {
                if let Some(extent) = inode.data().and_then(|data| data.extents.get(number)) {
                    blocks.take(&extent.dirty);
                }
            }
        }
        self.journal_clean(ino, clean, bits);
        self.end_pass(ino, store);
    }

    /// Ends a pass that failed: everything is dirty as before.
    fn fail_pass(&mut self, pass: &Pass, error: Errno, store: &store::Store) {
        self.passes.remove(&pass.ino);
        let ino = pass.ino;
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.dirty |= inode.writing;
            inode.writing = 0;
            // Some of it may have been written.
            if error != Errno::AGAIN
                && let Some(seen) = &mut inode.seen
            {
                seen.ctime = Seen::UNKNOWN;
            }
            if error != Errno::AGAIN
                && let Some(data) = inode.data_mut()
            {
                data.error = Some(error.raw_os_error());
            }
        }
        self.settle(pass, |extent, blocks| {
            // What was cut off meanwhile is not in flight any more.
            let back = extent.flight.within(blocks);
            extent.flight.take(&back);
            extent.dirty.add(&back);
        });
        self.dirty_as_before(pass);
        if error != Errno::AGAIN {
            self.failed_alone(ino, error);
        }
        self.end_pass(ino, store);
    }

    /// Notes that something can't be brought to the backing directory now, and neither what comes after it.
    pub fn failed(&mut self, ino: Ino, error: Errno) {
        self.refused(ino, error);
        // Nobody waits for room that does not come.
        if self.draining && self.clean.is_empty() {
            self.waits.fail(&Need::Space, error);
        }
        if self.log.len() >= super::state::LONGEST_LOG {
            self.waits.fail(&Need::Log, error);
        }
    }

    /// The same of one file or name, for a reason of its own: others may make room.
    pub fn failed_alone(&mut self, ino: Ino, error: Errno) {
        self.refused(ino, error);
        let makes_room = |ino: &Ino| {
            !self.failing.contains_key(ino)
                && !self.unasked.contains(ino)
                && self.inodes.get(ino).is_some_and(|inode| {
                    let is_reachable = !inode.homes.is_empty() || inode.is_orphan() || self.stuck.is_empty();
                    is_reachable && inode.data().is_some_and(|data| data.dirty_bytes() > 0)
                })
        };
        if self.draining && self.clean.is_empty() && !self.dirty_by_use.keys().any(makes_room) {
            self.waits.fail(&Need::Space, error);
        }
        if self.log.len() >= super::state::LONGEST_LOG {
            self.waits.fail(&Need::Log, error);
        }
    }

    /// Notes that something is not taken by the backing directory now.
    fn refused(&mut self, ino: Ino, error: Errno) {
        self.counters.failures += 1;
        if self.failing.get(&ino).is_none_or(|(former, _)| *former != error) {
            tracing::warn!(path = self.shown(ino), %error, "can't write to the backing directory; it is tried again, and nothing is lost");
        }
        self.failing.insert(ino, (error, Instant::now() + RETRY));
        self.waits.fail(&Need::Synced(ino), error);
    }

    /// Whoever waits for what a pass should have brought still waits, though it was begun.
    fn dirty_as_before(&mut self, pass: &Pass) {
        if let (Some(entry), Some(before)) = (self.dirty_by_age.get_mut(&pass.ino), pass.since) {
            *entry = before;
        }
    }

    fn settle(&mut self, pass: &Pass, change: impl Fn(&mut super::inode::Extent, &Blocks)) {
        let ino = pass.ino;
        for (number, blocks) in &pass.extents {
            let Some(extent) = self
                .inodes
                .get_mut(&ino)
                .and_then(|inode| inode.data_mut())
                .and_then(|data| data.extents.get_mut(number))
            else {
                continue;
            };
            let before = extent.dirty.with(&extent.flight).count();
            change(extent, blocks);
            let after = extent.dirty.with(&extent.flight).count();
            self.dirty_bytes -= (before - after) * BLOCK;
            if after == 0 && !extent.fetching {
                self.clean.insert((ino, *number), ());
            }
        }
    }

    fn end_pass(&mut self, ino: Ino, store: &store::Store) {
        self.unlist_if_clean(ino);
        self.waits.wake(&Need::Synced(ino));
        self.waits.wake(&Need::Space);
        self.remove_if_unused(ino, store);
    }
}

impl Core {
    /// Writes one inode back, if nobody else does.
    ///
    /// # Errors
    /// The kernel's; it is noted, and dirty as before.
    pub fn write_back(&self, ino: Ino) -> Result<(), Errno> {
        let Some(mut pass) = self.lock().begin_pass(ino, EXTENTS_OF_PASS, &self.store) else { return Ok(()) };
        let done = self.carry(&mut pass).and_then(|()| self.sync(&mut pass));
        self.end_of(pass, done)
    }

    fn end_of(&self, mut pass: Pass, done: Result<(), Errno>) -> Result<(), Errno> {
        let done = done.and_then(|()| self.seen_after(&mut pass));
        match done {
            Ok(()) => self.lock().commit_pass(&pass, &self.store),
            Err(error) => self.lock().fail_pass(&pass, error, &self.store),
        }
        self.wake_all();
        done
    }

    /// Writes files back, so that all that they had when the call began is on the disk; returns what failed.
    pub fn write_back_all(&self, inos: &[Ino]) -> Vec<(Ino, Errno)> {
        // Before anything is written: syncfs(2) tells what could not be written since its file was opened, and nothing earlier.
        let filesystem = (inos.len() > SYNC_ONE_BY_ONE).then(|| self.open_filesystem());
        let next = AtomicUsize::new(0);
        let work = || -> Vec<Result<Pass, (Ino, Errno)>> {
            let mut done = Vec::new();
            while let Some(ino) = inos.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(mut pass) = self.begin_when_free(*ino) else { continue };
                match self.carry(&mut pass) {
                    Ok(()) => done.push(Ok(pass)),
                    Err(error) => {
                        let _told = self.end_of(pass, Err(error));
                        done.push(Err((*ino, error)));
                    }
                }
            }
            done
        };
        let others = self.lock().settings.threads.min(inos.len() / 4);
        let done: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..others)
                .map(|_| {
                    scope.spawn(|| {
                        // Whoever can't become the user does nothing; the calling thread does it all then.
                        if self.backing.assume().is_ok() { work() } else { Vec::new() }
                    })
                })
                .collect();
            let mut done = work();
            for thread in threads {
                match thread.join() {
                    Ok(more) => done.extend(more),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            done
        });
        let (passes, failed): (Vec<_>, Vec<_>) = done.into_iter().partition(Result::is_ok);
        let passes: Vec<Pass> = passes.into_iter().flatten().collect();
        let mut failed: Vec<(Ino, Errno)> = failed.into_iter().filter_map(Result::err).collect();
        let with_data = passes.iter().filter(|pass| pass.written > 0).count();
        let together = filesystem
            .filter(|_| with_data > SYNC_ONE_BY_ONE)
            .map(|filesystem| filesystem.and_then(|filesystem| rustix::fs::syncfs(&filesystem)));
        for mut pass in passes {
            let ino = pass.ino;
            let synced = match together {
                Some(result) if pass.written > 0 => {
                    pass.synced = result.is_ok();
                    result
                }
                _ => self.sync(&mut pass),
            };
            if let Err(error) = self.end_of(pass, synced) {
                failed.push((ino, error));
            }
        }
        failed
    }

    fn begin_when_free(&self, ino: Ino) -> Option<Pass> {
        let mut state = self.lock();
        while state.passes.contains(&ino) && !state.stopped {
            state = self.wait(state);
        }
        state.begin_pass(ino, usize::MAX, &self.store)
    }

    /// Has everything of the backing directory's filesystem reach the disk.
    ///
    /// # Errors
    /// The kernel's.
    pub fn sync_all(&self) -> Result<(), Errno> {
        rustix::fs::syncfs(&self.open_filesystem()?)
    }

    fn open_filesystem(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(self.backing.root(), ".", flags, Mode::empty())
    }

    /// Has what a pass has written be on the disk. If somebody may wait for all of it there, its size and attributes, too.
    fn sync(&self, pass: &mut Pass) -> Result<(), Errno> {
        let Some(file) = pass.file.as_ref().filter(|_| !pass.orphan) else { return Ok(()) };
        if self.lock().settings.sync != SyncWhen::Later {
            rustix::fs::fsync(file)?;
            pass.synced = true;
        } else if pass.written > 0 {
            rustix::fs::fdatasync(file)?;
        }
        Ok(())
    }

    /// How it looks after it was written.
    fn seen_after(&self, pass: &mut Pass) -> Result<(), Errno> {
        if pass.orphan {
            return Ok(());
        }
        let found = match &pass.file {
            Some(file) => backing::stat(file.as_fd(), OsStr::new(""))?,
            None => backing::stat(self.entry_for_pass(pass.ino)?.as_fd(), OsStr::new(""))?,
        };
        pass.seen = Some(Seen { ino: found.ino, ctime: found.ctime });
        pass.blocks = Some(found.blocks);
        Ok(())
    }

    /// Writes what a pass has; it is not synced.
    fn carry(&self, pass: &mut Pass) -> Result<(), Errno> {
        if pass.orphan {
            return self.carry_orphan(pass);
        }
        let entry = match self.entry_for_pass(pass.ino) {
            Ok(entry) => entry,
            Err(Errno::STALE) if is_file(pass.mode) => return self.set_aside(pass),
            Err(error) => return Err(error),
        };
        let found = backing::stat(entry.as_fd(), OsStr::new(""))?;
        if is_file(pass.mode) && pass.seen.is_some_and(|seen| !seen.is_as_left(found.ino, found.ctime)) {
            return self.set_aside(pass);
        }
        let writes_data = !pass.extents.is_empty() || pass.cut || found.size != pass.size;
        if is_file(pass.mode) && writes_data {
            let file = Arc::new(backing::reopen(self.backing.uid(), entry.as_fd(), true)?);
            self.carry_data(pass, &file)?;
            pass.file = Some(file);
        }
        carry_attributes(pass, &entry, self.backing.uid())
    }

    /// What is to be written to. A file that has lost all names that are known here has others.
    fn entry_for_pass(&self, ino: Ino) -> Result<OwnedFd, Errno> {
        let open = {
            let state = self.lock();
            let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
            let is_nowhere = inode.homes.is_empty() && !inode.is_dir();
            is_nowhere.then(|| inode.data().and_then(|data| data.orphan.clone()))
        };
        match open {
            None => {}
            Some(Some(open)) => {
                return open
                    .as_fd()
                    .try_clone_to_owned()
                    .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE));
            }
            Some(None) => self.find_home(ino)?,
        }
        self.backing_entry(ino)
    }

    fn carry_data(&self, pass: &mut Pass, to: &File) -> Result<(), Errno> {
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        if pass.cut {
            // What was cut off here must not come back when the file grows there.
            rustix::fs::ftruncate(to, pass.backing_len.min(pass.size))?;
        }
        let from =
            if pass.extents.is_empty() { None } else { Some(self.store.file(pass.ino).map_err(errno)?) };
        let mut length = to.metadata().map_err(errno)?.len();
        let mut buffer = Vec::new();
        for (number, blocks) in &pass.extents {
            let first = u64::from(*number) * EXTENT;
            for (begin, end) in blocks.runs() {
                let (begin, end) =
                    (first + u64::from(begin) * BLOCK, (first + u64::from(end) * BLOCK).min(pass.size));
                let Some(from) = &from else { continue };
                for part in store::segments(&**from, begin, end).map_err(errno)? {
                    let size = part.end - part.begin;
                    if part.data {
                        buffer.resize(size as usize, 0);
                        store::read(from, part.begin, &mut buffer).map_err(errno)?;
                        to.write_all_at(&buffer, part.begin).map_err(errno)?;
                        pass.has_data = true;
                        length = length.max(part.end);
                    } else if part.begin < length {
                        // The last block of a file goes as a whole.
                        let part_end =
                            if part.end < length { part.end } else { length.next_multiple_of(BLOCK) };
                        punch_or_fill(to, part.begin, part_end)?;
                    }
                    pass.written += size;
                }
            }
        }
        if to.metadata().map_err(errno)?.len() != pass.size {
            rustix::fs::ftruncate(to, pass.size)?;
        }
        Ok(())
    }

    /// A file that nobody can reach by a name, and that takes more room than there is.
    fn carry_orphan(&self, pass: &mut Pass) -> Result<(), Errno> {
        let file = match pass.file.take() {
            Some(file) => file,
            None => {
                let has_home = self.lock().inodes.get(&pass.ino).is_some_and(|inode| !inode.homes.is_empty());
                if has_home {
                    // Its removal there is still to come, and then it stays open.
                    let entry = self.backing_entry(pass.ino)?;
                    Arc::new(backing::reopen(self.backing.uid(), entry.as_fd(), true)?)
                } else {
                    let flags =
                        OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    let directory = self.backing_directory(ROOT)?;
                    let name = unfinished(&self.store, pass.ino);
                    let file = backing::within(self.backing.uid(), directory.as_fd(), || {
                        rustix::fs::openat(&directory, name.as_os_str(), flags, Mode::RUSR | Mode::WUSR)
                    })?;
                    rustix::fs::unlinkat(&directory, name.as_os_str(), AtFlags::empty())?;
                    Arc::new(File::from(file))
                }
            }
        };
        self.carry_data(pass, &file)?;
        pass.file = Some(file);
        Ok(())
    }

    /// Somebody else has changed a file that is dirty here: theirs stays, ours gets a name beside it.
    ///
    /// What of ours is not resident was never changed here, and is as theirs is.
    fn set_aside(&self, pass: &mut Pass) -> Result<(), Errno> {
        let (is_orphan, is_open) = (self.lock().inodes.get(&pass.ino))
            .map_or((true, false), |inode| (inode.is_orphan(), inode.handles > 0));
        if is_orphan && !is_open {
            // It is to be removed, and nobody has it any more: theirs stays as it is, and ours is not missed.
            pass.orphan = true;
            return Ok(());
        }
        let home = self
            .lock()
            .inodes
            .get(&pass.ino)
            .and_then(|inode| inode.homes.first().cloned())
            .ok_or(Errno::STALE)?;
        let directory = self.backing_directory(home.dir)?;
        let only_attributes = pass.extents.is_empty() && !pass.cut && pass.bits & dirty::SIZE == 0;
        let theirs = match backing::open_path(directory.as_fd(), &home.name) {
            Ok(theirs) => Some(theirs),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(error),
        };
        if only_attributes && let Some(theirs) = &theirs {
            // Nothing of theirs is ours.
            let found = backing::stat(theirs.as_fd(), OsStr::new(""))?;
            let mut state = self.lock();
            let path = state.shown(pass.ino);
            tracing::warn!(
                path,
                "somebody else has changed this meanwhile; attributes that were changed here are not taken over"
            );
            if let Some(inode) = state.inodes.get_mut(&pass.ino) {
                inode.seen = Some(Seen { ino: found.ino, ctime: found.ctime });
            }
            state.conflicts.push(Conflict { path, ours: None, kind: ConflictKind::Attributes });
            pass.seen = Some(Seen { ino: found.ino, ctime: found.ctime });
            return Ok(());
        }
        let name = match &theirs {
            Some(_) => self.beside(&home.name, pass.ino),
            None => home.name.to_os_string(),
        };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if theirs.is_some() {
            // Of a process that was killed before it could note that; nobody else has this name.
            match backing::within(self.backing.uid(), directory.as_fd(), || {
                rustix::fs::unlinkat(&directory, name.as_os_str(), AtFlags::empty())
            }) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        let ours = backing::within(self.backing.uid(), directory.as_fd(), || {
            rustix::fs::openat(&directory, name.as_os_str(), flags, Mode::RUSR | Mode::WUSR)
        })?;
        let mut ours = File::from(ours);
        if let Some(theirs) = &theirs
            && let Ok(file) = backing::reopen(self.backing.uid(), theirs.as_fd(), false)
            && file.metadata().is_ok_and(|found| found.is_file())
        {
            let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
            std::io::copy(&mut std::io::Read::take(&file, pass.backing_len), &mut ours).map_err(errno)?;
        }
        let made = backing::stat(ours.as_fd(), OsStr::new(""))?;
        let mut state = self.lock();
        let path = state.shown(pass.ino);
        let seen = Seen { ino: made.ino, ctime: made.ctime };
        let ours_path =
            state.home_path(&Home { dir: home.dir, name: name.as_os_str().into() })?.join(OsStr::new("/"));
        let ours_path = ours_path.to_string_lossy().into_owned();
        tracing::warn!(path, ours = ours_path, "somebody else has changed this meanwhile; both are kept");
        let kind = if theirs.is_some() { ConflictKind::Both } else { ConflictKind::Removed };
        state.conflicts.push(Conflict { path, ours: Some(ours_path), kind });
        let mut valid = Vec::new();
        state.now_aside(home.dir);
        if let Some(inode) = state.inodes.get_mut(&pass.ino) {
            inode.homes = Homes::One(Home { dir: home.dir, name: name.into() });
            inode.aside = true;
            inode.seen = Some(seen);
            inode.dirty |= dirty::ALL | dirty::SIZE;
            if inode.xattrs.is_none() {
                inode.dirty &= !dirty::XATTRS;
            }
            if let Some(data) = inode.data_mut() {
                valid = data.extents.iter().map(|(number, extent)| (*number, extent.valid.clone())).collect();
            }
        }
        for (number, blocks) in valid {
            state.now_dirty(pass.ino, number, &blocks);
            state.journal_dirty(pass.ino, number, &blocks);
        }
        state.journal_inode(pass.ino);
        drop(state);
        self.backing.close(pass.ino);
        // The next pass finds the new place, and brings all of it.
        Err(Errno::AGAIN)
    }
}

/// What a write there takes away from a file, whatever it had, and is to be given to it again.
fn taken_by_writes(inode: &Inode) -> u8 {
    const CAPABILITIES: &str = "security.capability";
    if !is_file(inode.mode) {
        return 0;
    }
    let has_ids = inode.mode & (libc::S_ISUID | libc::S_ISGID) != 0;
    let has_capabilities =
        inode.xattrs.as_deref().is_some_and(|xattrs| xattrs.contains_key(OsStr::new(CAPABILITIES)));
    (u8::from(has_ids) * dirty::MODE) | (u8::from(has_capabilities) * dirty::XATTRS)
}

fn is_file(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::RegularFile
}

fn punch_or_fill(file: &File, begin: u64, end: u64) -> Result<(), Errno> {
    match rustix::fs::fallocate(
        file,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        begin,
        end - begin,
    ) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            // The size stays, too.
            let length =
                file.metadata().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?.len();
            let end = end.min(length);
            if begin >= end {
                return Ok(());
            }
            let zeros = vec![0; (end - begin).min(EXTENT) as usize];
            let mut at = begin;
            while at < end {
                let count = zeros.len().min((end - at) as usize);
                file.write_all_at(&zeros[..count], at)
                    .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
                at += count as u64;
            }
            Ok(())
        }
        other => other,
    }
}

/// Gives an entry the attributes that it lacks. One that is refused does not keep the others.
fn carry_attributes(pass: &mut Pass, entry: &OwnedFd, user: u32) -> Result<(), Errno> {
    let path = backing::by_descriptor(entry.as_fd());
    let found = backing::stat(entry.as_fd(), OsStr::new(""))?;
    let is_symlink = FileType::from_raw_mode(pass.mode) == FileType::Symlink;
    // Not the right users could use a mode that others were meant to have.
    let mut is_private = false;
    if pass.bits & dirty::OWNER != 0 && (found.uid, found.gid) != (pass.uid, pass.gid) {
        let uid = (found.uid != pass.uid).then(|| Uid::from_raw(pass.uid));
        let gid = (found.gid != pass.gid).then(|| Gid::from_raw(pass.gid));
        if let Err(error) = rustix::fs::chownat(entry, "", uid, gid, AtFlags::EMPTY_PATH) {
            pass.refuse(dirty::OWNER, error);
            is_private = true;
        }
    }
    if let Some(xattrs) = &pass.xattrs {
        for (name, error) in backing::set_xattrs(entry.as_fd(), xattrs)? {
            pass.refuse(dirty::XATTRS, error);
            is_private |= name == crate::acl::ACCESS;
        }
    }
    // Every other change may have taken set-id bits away, or the group's bits for an ACL's.
    let changes_mode = pass.bits & (dirty::MODE | dirty::OWNER | dirty::XATTRS) != 0;
    if !is_symlink && changes_mode {
        if is_private {
            pass.refused = pass.refused.map(|(bits, error)| (bits | dirty::MODE, error));
        } else if let Err(error) = rustix::fs::chmod(path.as_str(), Mode::from_raw_mode(pass.mode & 0o7777)) {
            pass.refuse(dirty::MODE, error);
        }
    }
    let timespec = |time: Time| Timespec { tv_sec: time.secs, tv_nsec: time.nanos.into() };
    let times = Timestamps { last_access: timespec(pass.atime), last_modification: timespec(pass.mtime) };
    match rustix::fs::utimensat(rustix::fs::CWD, path.as_str(), &times, AtFlags::empty()) {
        Ok(()) => {}
        // Who may write to something, and does not own it, can't set its times. They are those of the write there.
        Err(Errno::PERM | Errno::ACCESS) if user != 0 && found.uid != user => {}
        Err(error) => pass.refuse(dirty::TIMES, error),
    }
    Ok(())
}

impl Pass {
    fn refuse(&mut self, bits: u8, error: Errno) {
        let (before, first) = self.refused.unwrap_or((0, error));
        self.refused = Some((before | bits, first));
    }
}
