//! Opening files and closing them, and whether the kernel uses the store's file by itself meanwhile.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::blocks::BLOCK;
use super::data::{extents, store_error};
use super::inode::{Kind, blocks_before, dirty};
use super::state::{OpenFile, State, Stop};
use super::wait::Need;
use crate::message::{Caller, Handle, Ino, OpenMode, Opened};
use crate::store::Store;

/// How long a writer waits for handles by which the kernel reads a file. They are released within milliseconds of close(2), on a
/// busy machine later.
const RELEASES: Duration = Duration::from_millis(500);

impl State {
    /// Opens a file.
    pub fn open(&mut self, store: &Store, caller: Caller, ino: Ino, mode: OpenMode) -> Result<Opened, Stop> {
        let kind = &self.inode(ino)?.kind;
        if !matches!(kind, Kind::File(_)) {
            return Err(if matches!(kind, Kind::Directory(_)) { Errno::ISDIR } else { Errno::NXIO }.into());
        }
        let inode = self.inode(ino)?;
        if inode.is_orphan() && inode.handles == 0 && inode.pending == 0 {
            // It was removed while its name was looked up: its data is gone. The kernel looks once more, and finds no such name.
            return Err(Errno::STALE.into());
        }
        if mode.write {
            self.await_releases(ino)?;
        }
        if mode.truncate {
            self.truncate(store, caller, ino, 0)?;
        }
        let unasked = mode.write && mode.unasked && self.can_be_unasked(store, ino)?;
        let passthrough = match unasked {
            true => Some(self.begin_unasked(store, ino)?),
            false => self.passthrough(store, ino, mode.write)?,
        };
        let inode = self.inode_mut(ino)?;
        inode.handles += 1;
        if let Some(data) = inode.data_or_new() {
            match &passthrough {
                Some(_) => {
                    data.passthrough += 1;
                    data.unasked += u32::from(unasked);
                    data.shared_writers += u32::from(mode.write && !unasked);
                }
                None => data.direct += 1,
            }
        }
        self.next_handle += 1;
        let handle = self.next_handle;
        let open =
            OpenFile { ino, write: mode.write, passthrough: passthrough.is_some(), unasked, stays: false };
        self.handles.insert(handle, open);
        Ok(Opened { handle, passthrough, unasked, writable: mode.write })
    }

    /// Waits, before a file is opened for writing, for the handles of those who have read it and closed it: the kernel releases a
    /// handle some time after close(2). As long as it reads a file by itself, the file is pinned, and could not become longer than
    /// there is room for. Who really has it open is waited for once.
    fn await_releases(&mut self, ino: Ino) -> Result<(), Stop> {
        let Some(data) = self.inode_mut(ino)?.data_mut() else { return Ok(()) };
        let has_writers = data.shared_writers > 0 || data.unasked > 0;
        if has_writers || data.passthrough == data.staying {
            return Ok(());
        }
        let now = Instant::now();
        if now < *data.await_releases_until.get_or_insert(now + RELEASES) {
            return Err(Stop::Wait(Need::Released(ino)));
        }
        data.await_releases_until = None;
        data.staying = data.passthrough;
        for open in self.handles.values_mut().filter(|open| open.ino == ino && open.passthrough) {
            open.stays = true;
        }
        Ok(())
    }

    /// The store's file, if the kernel may, or has to, use it by itself.
    fn passthrough(&mut self, store: &Store, ino: Ino, write: bool) -> Result<Option<Arc<File>>, Stop> {
        if !self.settings.passthrough {
            return Ok(None);
        }
        self.look(store, ino);
        let half = self.settings.capacity.0 / 2;
        let inode = self.inode(ino)?;
        let size = inode.size;
        let Some(data) = inode.data() else { return Ok(None) };
        let is_unasked = data.unasked > 0;
        if data.passthrough == 0 {
            let pins = size.next_multiple_of(BLOCK);
            let can = !write
                && size > 0
                && data.direct == 0
                && data.is_all_resident(size)
                && self.pinned + pins <= half;
            if !can {
                return Ok(None);
            }
            self.pinned += pins;
            if let Some(data) = self.inode_mut(ino)?.data_mut() {
                data.pinned = pins;
            }
        } else if write && data.shared_writers == 0 {
            // Its maps will write to the store unseen: everything must have its memory before.
            for number in extents(0, size) {
                self.hold(store, ino, number, &blocks_before(number, size))?;
            }
            if size > 0 {
                let file = store.file(ino).map_err(|error| store_error(ino, &error))?;
                rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, size)?;
            }
        }
        let file = store.file(ino).map_err(|error| store_error(ino, &error))?;
        // Programs that write to it without asking make it longer meanwhile.
        if !is_unasked && file.metadata().map_err(|error| store_error(ino, &error))?.len() != size {
            file.set_len(size).map_err(|error| store_error(ino, &error))?;
        }
        Ok(Some(file))
    }

    /// The last use of a handle is over.
    pub fn release(&mut self, store: &Store, handle: Handle) {
        let Some(OpenFile { ino, write, passthrough, unasked, stays }) = self.handles.remove(&handle) else {
            return;
        };
        if unasked {
            self.end_unasked(store, ino);
        }
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.handles -= 1;
        let size = inode.size;
        let mut mapped = false;
        let mut touched = Vec::new();
        if let Some(data) = inode.data_mut() {
            if passthrough {
                data.passthrough -= 1;
                data.staying -= u32::from(stays);
                if write && !unasked {
                    data.shared_writers -= 1;
                    mapped = true;
                }
                if data.passthrough == 0 {
                    data.await_releases_until = None;
                    self.pinned -= std::mem::take(&mut data.pinned);
                    touched = data.extents.keys().copied().collect();
                    self.waits.wake(&Need::Space);
                }
            } else {
                data.direct -= 1;
            }
        }
        for number in touched {
            self.touch(ino, number);
        }
        self.waits.wake(&Need::Released(ino));
        if mapped && size > 0 {
            // Nobody knows what its maps have changed.
            for number in extents(0, size) {
                self.now_dirty(ino, number, &blocks_before(number, size));
            }
            self.mark_dirty(ino, dirty::TIMES);
            self.journal_write(ino, 0, size, dirty::TIMES);
        }
        self.remove_if_unused(ino, store);
    }
}
