//! One *pass* of writing back: what it takes, and what is known when it has ended.
//!
//! It brings all of one inode that is dirty when it begins: blocks go from dirty to *in flight*, are written, synced, and are
//! clean then, unless they were written to meanwhile. If anything fails, all of it is dirty again: nothing is dropped, and it is
//! tried again later.

use std::ffi::OsStr;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::RETRY;
use super::blocks::{BLOCK, Blocks};
use super::inode::{DirtySince, Extent, Inode, Seen, Sweep, UnderWay, dirty};
use super::state::State;
use super::wait::Need;
use crate::message::{Ino, Time, Xattrs};
use crate::store;

/// What a pass writes back.
pub struct Pass {
    pub ino: Ino,
    pub extents: Vec<(u32, Blocks)>,
    pub bits: u8,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub atime: Time,
    pub mtime: Time,
    pub xattrs: Option<Xattrs>,
    pub backing_len: u64,
    pub cut: bool,
    pub cuts: u64,
    pub orphan: bool,
    /// [`State::rights_lost`] when it began, or took over the rights that its file had.
    pub rights_lost: u64,
    /// Something of it may be there: the time of change there is ours then, and not known before its end.
    pub begun: bool,
    /// Set as it goes.
    pub file: Option<Arc<File>>,
    pub seen: Option<Seen>,
    /// What it takes there, in units of 512 bytes, once it is written.
    pub blocks: Option<u64>,
    /// Something else than holes was written.
    pub has_data: bool,
    pub written: u64,
    /// All of it is on the disk.
    pub synced: bool,
    /// Since when it was dirty.
    pub since: Option<DirtySince>,
    /// Attributes that the backing directory does not take now, and why.
    pub refused: Option<(u8, Errno)>,
}

impl Pass {
    /// Nothing of its data was changed here.
    pub fn brings_attributes_alone(&self) -> bool {
        self.extents.is_empty() && !self.cut && self.bits & dirty::SIZE == 0
    }

    pub fn refuse(&mut self, bits: u8, error: Errno) {
        let (before, first) = self.refused.unwrap_or((0, error));
        self.refused = Some((before | bits, first));
    }
}

impl State {
    /// Begins a pass of `most` extents; `None` if there is nothing to write, or another one is under way.
    pub fn begin_pass(&mut self, ino: Ino, mut most: usize, store: &store::Store) -> Option<Pass> {
        if self.passes.contains_key(&ino) || self.applier_awaits.contains(&ino) {
            return None;
        }
        if self.unasked.contains(&ino) {
            self.absorb(store, ino);
            // All of it is dirty again afterwards: parts would never come to an end.
            most = usize::MAX;
        }
        self.generation += 1;
        let begins = DirtySince { since: Instant::now(), generation: self.generation };
        let inode = self.inodes.get_mut(&ino)?;
        if !inode.is_dirty() {
            return None;
        }
        let bits = std::mem::take(&mut inode.dirty) | taken_by_writes(inode);
        inode.writing = bits;
        let mut extents = Vec::new();
        let size = inode.size;
        let (mut backing_len, mut cut, mut cuts, mut orphan) = (size, false, 0, None);
        // Since when nothing was left behind, if this comes to the end.
        let mut ends = Some(begins);
        if let Some(data) = inode.data_mut() {
            let is_dirty = |(_, extent): &(&u32, &Extent)| !extent.dirty.is_empty();
            let sweep = data.sweep.take().filter(|sweep| {
                most < usize::MAX && data.extents.range(sweep.next..).any(|extent| is_dirty(&extent))
            });
            let Sweep { next, began } = sweep.unwrap_or(Sweep { next: 0, began: begins });
            let mut left = data.extents.range_mut(next..).filter(|(_, extent)| !extent.dirty.is_empty());
            for (number, extent) in left.by_ref().take(most) {
                extent.flight = std::mem::take(&mut extent.dirty);
                extents.push((*number, extent.flight.clone()));
            }
            data.sweep = left.next().map(|(number, _)| Sweep { next: *number, began });
            ends = data.sweep.is_none().then_some(began);
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
            rights_lost: self.rights_lost,
            begun: false,
            file: orphan,
            seen: inode.seen,
            blocks: None,
            has_data: false,
            written: 0,
            synced: false,
            since: self.dirty_by_age.get(&ino).copied(),
            refused: None,
        };
        if let Some(began) = ends {
            // Whoever needs more says so again.
            self.urgent.remove(&ino);
            if let Some(entry) = self.dirty_by_age.get_mut(&ino)
                && entry.generation < began.generation
            {
                *entry = began;
            }
        }
        let dirty_since = pass.since.map(|since| since.generation);
        self.passes.insert(ino, UnderWay { began: begins.since, dirty_since, changes: false });
        Some(pass)
    }

    /// Notes that a pass changes what the backing directory has from now on, and not before: until then the journal says how it was
    /// left, by which others' work is known.
    pub fn begin_changes(&mut self, pass: &mut Pass) {
        if !pass.begun {
            pass.begun = true;
            self.journal_changes(pass.ino);
        }
    }

    /// Whether a file was cut since the pass of it began.
    pub fn was_cut_during(&self, pass: &Pass) -> bool {
        let data = self.inodes.get(&pass.ino).and_then(|inode| inode.data());
        data.is_some_and(|data| data.cuts != pass.cuts)
    }

    /// Ends a pass that has brought everything to the disk, or all but attributes that were refused.
    ///
    /// # Errors
    /// `EAGAIN` if the file was cut meanwhile: it is not there as it was at any moment.
    pub fn commit_pass(&mut self, pass: &Pass, store: &store::Store) -> Result<(), Errno> {
        let ino = pass.ino;
        if self.was_cut_during(pass) {
            // The file was cut meanwhile, and has to be cut there before anything of it counts: all of it comes again.
            if let (Some(inode), false) = (self.inodes.get_mut(&ino), pass.orphan) {
                inode.seen = pass.seen;
            }
            if let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_mut()) {
                data.cut_short += 1;
            }
            self.fail_pass(pass, Errno::AGAIN, store);
            return Err(Errno::AGAIN);
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
                data.cut_short = 0;
                data.error = None;
            }
        }
        self.settle_rights(ino);
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
        Ok(())
    }

    /// Ends a pass that failed: everything is dirty as before.
    pub fn fail_pass(&mut self, pass: &Pass, error: Errno, store: &store::Store) {
        self.passes.remove(&pass.ino);
        let ino = pass.ino;
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.dirty |= inode.writing;
            inode.writing = 0;
            // Where nothing was changed, it is still as it was seen: or else what others have done would be ours at the next trial.
            if error != Errno::AGAIN
                && pass.begun
                && let Some(seen) = &mut inode.seen
            {
                seen.ctime = Seen::UNKNOWN;
            }
            if error != Errno::AGAIN
                && let Some(data) = inode.data_or_new()
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
        if let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_mut()) {
            data.sweep = None;
        }
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
        if self.draining && !self.has_clean() {
            self.waits.fail(&Need::Space, error);
        }
        if self.is_log_full() {
            self.waits.fail(&Need::Log, error);
        }
        // Everything waits in its order.
        self.waits.not_carried_out(self.first_pending, None, error);
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
        if self.draining && !self.has_clean() && !self.dirty_by_use.keys().any(makes_room) {
            self.waits.fail(&Need::Space, error);
        }
        if self.is_log_full() {
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

    fn settle(&mut self, pass: &Pass, change: impl Fn(&mut Extent, &Blocks)) {
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
        self.waits.wake(&Need::Quiet(ino));
        self.waits.wake(&Need::Space);
        self.remove_if_unused(ino, store);
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

pub fn is_file(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::RegularFile
}
