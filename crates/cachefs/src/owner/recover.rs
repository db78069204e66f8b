//! A cache's state from its store, as a process that was killed has left it.
//!
//! What the journal says is done again, in memory alone: the data in the store is that of the last record already, but for what the
//! last record itself announces.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::time::Instant;

use hashlink::LinkedHashMap;

use super::OpenError;
use super::accepted::Accepted;
use super::blocks::{BLOCK, BLOCKS, Blocks};
use super::changes::Changes;
use super::data::{extents, part, touched};
use super::inode::{FileData, Home, Homes, Inode, Kind, KnownXattrs, Operation, Seen, blocks_before, dirty};
use super::inodes::Inodes;
use super::journal::{Image, Journal, RUNWAY, Record};
use super::state::{Counters, FIRST_OWN_INO, Pending, State, Stop};
use super::wait::Waits;
use crate::backing::{Keeps, Stat};
use crate::message::{Ino, ROOT, Time};
use crate::settings::{EXTENT, Settings, Writes};
use crate::store::{self, Store};

/// The state of a cache whose store has this journal.
///
/// # Errors
/// The journal does not fit together; the store's.
pub fn state(
    store: &Store,
    root: &Stat,
    keeps: Keeps,
    settings: Settings,
    records: Vec<Record>,
) -> Result<State, OpenError> {
    // Only now the former journal may go.
    let runway = if settings.writes == Writes::Passthrough { RUNWAY } else { 0 };
    if settings.writes == Writes::Passthrough {
        Time::follow_the_kernel().map_err(|error| OpenError::Store(error.into()))?;
    }
    let mut state = empty(store, settings, keeps)?;
    state.journal.runway = runway;
    state.is_recovering = true;
    let mut inode = Inode::new(root.mode, root.dev);
    inode.take_over(root);
    state.insert(ROOT, inode);
    let there: HashSet<Ino> = store.files().map_err(OpenError::Store)?.into_iter().collect();
    let mut missing = Vec::new();
    let mut unclear = HashSet::new();
    for (index, record) in records.iter().enumerate() {
        if let Record::Unasked(ino, _) = record {
            unclear.insert(*ino);
        }
        if index + 1 == records.len() {
            // What the last record makes dirty may not have a file yet.
            missing = state.dirty_without(&there);
        }
        if let Err(stop) = state.replay(store, record) {
            tracing::error!(index, ?record, ?stop, "a record of the cache's journal does not fit");
            return Err(OpenError::Contradiction(index, format!("{record:.500?} ({stop:?})")));
        }
    }
    state.is_recovering = false;
    // And what the last record makes clean may have none any more.
    let still = state.dirty_without(&there);
    // Of a file that the kernel wrote to, and that is closed, the journal does not tell holes from data, and holes take no file.
    let is_certain =
        |ino: &Ino| still.contains(ino) && (!unclear.contains(ino) || state.unasked.contains(ino));
    if let Some(ino) = missing.into_iter().find(is_certain) {
        return Err(OpenError::Missing { path: state.path_of(ino).display().to_string(), ino });
    }
    // What the last record announces may not have been done.
    if let Some(last) = records.last() {
        state.finish(store, last).map_err(OpenError::Store)?;
    }
    state.settle_after_recovery(store, root).map_err(OpenError::Store)?;
    state.checkpoint();
    match state.journal.failed.take() {
        None => Ok(state),
        Some(error) => Err(OpenError::Store(std::io::Error::other(error))),
    }
}

fn empty(store: &Store, settings: Settings, keeps: Keeps) -> Result<State, OpenError> {
    Ok(State {
        settings,
        inodes: Inodes::default(),
        several: HashMap::new(),
        numbers: HashMap::new(),
        loading: HashMap::new(),
        closing: Vec::new(),
        searches: 0,
        next_ino: FIRST_OWN_INO,
        log: VecDeque::new(),
        first_pending: 1,
        wanted: 0,
        generation: 0,
        resident: 0,
        dirty_bytes: 0,
        pinned: 0,
        name_bytes: 0,
        clean: LinkedHashMap::new(),
        dirty_by_use: LinkedHashMap::new(),
        dirty_by_age: LinkedHashMap::new(),
        urgent: HashSet::new(),
        passes: HashMap::new(),
        applier_awaits: Vec::new(),
        handles: HashMap::new(),
        unasked: BTreeSet::new(),
        next_handle: 0,
        waits: Waits::default(),
        journal: Journal::unwritten(store).map_err(OpenError::Store)?,
        counters: Counters::default(),
        failing: BTreeMap::new(),
        conflicts: Vec::new(),
        keeps_xattrs: keeps.xattrs,
        keeps_acls: keeps.acls,
        keeps_projects: keeps.projects,
        projects: HashMap::new(),
        longest_name: keeps.name_length,
        accepted: Accepted::new(keeps),
        jobs: VecDeque::new(),
        space: None,
        batch_end: 0,
        applying: None,
        stuck: BTreeMap::new(),
        doubtful: 0,
        changes: Changes::default(),
        barrier: 0,
        moving: None,
        is_recovering: false,
        draining: false,
        open_there: BTreeSet::new(),
        wide: BTreeSet::new(),
        wide_files: BTreeSet::new(),
        gains: HashMap::new(),
        opening: BTreeSet::new(),
        rights_lost: 0,
        stopped: false,
    })
}

/// The file that a record about data or attributes is about.
fn about(record: &Record) -> Option<Ino> {
    match record {
        Record::Dirty(ino, ..)
        | Record::Prepared { ino, .. }
        | Record::Write { ino, .. }
        | Record::Size { ino, .. }
        | Record::Zero { ino, .. }
        | Record::Clean { ino, .. }
        | Record::Writing(ino)
        | Record::Unasked(ino, _)
        | Record::Seen(ino, _) => Some(*ino),
        Record::Inode(..)
        | Record::Entry(..)
        | Record::Gone(..)
        | Record::Begins(_)
        | Record::Operation { .. }
        | Record::Cancelled { .. }
        | Record::Applied { .. }
        | Record::Begun(_)
        | Record::Forgotten(_) => None,
    }
}

impl State {
    fn replay(&mut self, store: &Store, record: &Record) -> Result<(), Stop> {
        // A file that has lost its last name was still open then: nobody has it now.
        if let Some(ino) = about(record)
            && !self.inodes.contains_key(&ino)
        {
            return Ok(());
        }
        match record {
            Record::Inode(ino, image) => self.put(*ino, image),
            Record::Entry(dir, name, ino) => {
                self.put_entry(*dir, &name.as_os_str().into(), *ino)?;
            }
            Record::Gone(dir, name) => {
                self.take_entry(*dir, name, true)?;
            }
            Record::Dirty(ino, number, blocks) => {
                self.hold_recovered(*ino, *number, blocks);
                self.now_dirty(*ino, *number, blocks);
            }
            Record::Begins(number) => self.first_pending = *number,
            Record::Operation { operation, at, change_names, cancelled, number } => {
                if *change_names {
                    if let Operation::Make { ino, .. } = operation
                        && let Ok(inode) = self.inode_mut(*ino)
                    {
                        inode.made_by = *number;
                    }
                    self.perform(operation, *at)?;
                    for dir in operation.directories() {
                        self.inode_mut(dir)?.dirty |= dirty::TIMES;
                    }
                }
                if !cancelled {
                    for ino in operation.inodes() {
                        self.inode_mut(ino)?.pending += 1;
                    }
                }
                let operation = operation.clone();
                self.log.push_back(Pending { operation, cancelled: *cancelled, since: Instant::now() });
                self.note_barrier();
            }
            Record::Cancelled { number, unlink, at } => {
                self.perform(unlink, *at)?;
                for dir in unlink.directories() {
                    self.inode_mut(dir)?.dirty |= dirty::TIMES;
                }
                let index = number.checked_sub(self.first_pending).map(|index| index as usize);
                if let Some(pending) = index.and_then(|index| self.log.get_mut(index)) {
                    pending.cancelled = true;
                    for ino in pending.operation.inodes() {
                        if let Some(inode) = self.inodes.get_mut(&ino) {
                            inode.pending = inode.pending.saturating_sub(1);
                        }
                    }
                }
                self.remove_if_unused(unlink.inodes()[0], store);
            }
            Record::Applied { number, beside } => self.applied(store, *number, beside.as_deref()),
            Record::Begun(number) => self.doubtful = *number,
            Record::Unasked(ino, true) => drop(self.unasked.insert(*ino)),
            Record::Unasked(ino, false) => drop(self.unasked.remove(ino)),
            Record::Prepared { ino, home, seen } => {
                let inode = self.inode_mut(*ino)?;
                inode.homes = Homes::One(home.clone());
                inode.seen = Some(*seen);
                if let Some(data) = inode.data_or_new() {
                    data.backing_len = 0;
                }
            }
            Record::Write { ino, begin, end, mode, size, mtime, bits } => {
                for number in extents(*begin, *end) {
                    let (begin, end) = part(number, *begin, *end);
                    let blocks = touched(begin, end);
                    self.hold_recovered(*ino, number, &blocks);
                    self.now_dirty(*ino, number, &blocks);
                }
                let inode = self.inode_mut(*ino)?;
                // The first write may have been to something that had no data.
                inode.data_or_new();
                (inode.mode, inode.size, inode.mtime, inode.ctime) = (*mode, *size, *mtime, *mtime);
                inode.dirty |= bits;
            }
            Record::Size { ino, size, mode, mtime, bits } => {
                self.set_size(store, *ino, *size)?;
                let inode = self.inode_mut(*ino)?;
                (inode.mode, inode.mtime, inode.ctime) = (*mode, *mtime, *mtime);
                inode.dirty |= bits;
            }
            Record::Zero { ino, begin, end, mtime } => {
                self.inode_mut(*ino)?.data_or_new();
                self.punch(store, *ino, *begin, *end)?;
                let inode = self.inode_mut(*ino)?;
                (inode.mtime, inode.ctime) = (*mtime, *mtime);
                inode.dirty |= dirty::TIMES;
            }
            Record::Clean { ino, extents, bits, seen, data } => {
                let inode = self.inode_mut(*ino)?;
                inode.dirty &= !bits;
                inode.seen = *seen;
                if let (Some((backing_len, cut)), Some(now)) = (data, inode.data_or_new()) {
                    (now.backing_len, now.cut) = (*backing_len, *cut);
                }
                let mut cleaned = 0;
                for (number, blocks) in extents {
                    if let Some(extent) = inode.data_mut().and_then(|data| data.extents.get_mut(number)) {
                        cleaned += extent.dirty.within(blocks).count();
                        extent.dirty.take(blocks);
                    }
                }
                self.dirty_bytes -= cleaned * BLOCK;
            }
            Record::Seen(ino, seen) => self.inode_mut(*ino)?.seen = Some(*seen),
            Record::Writing(ino) => {
                if let Some(seen) = &mut self.inode_mut(*ino)?.seen {
                    seen.ctime = Seen::UNKNOWN;
                }
            }
            Record::Forgotten(ino) => self.forget_recovered(store, *ino),
        }
        Ok(())
    }

    /// Files with data that the backing directory lacks, but for those that are in the store.
    fn dirty_without(&self, there: &HashSet<Ino>) -> Vec<Ino> {
        let mut found: Vec<Ino> = Vec::new();
        for (ino, inode) in self.inodes.iter() {
            let is_dirty = self.unasked.contains(&ino)
                || inode
                    .data()
                    .is_some_and(|data| data.extents.values().any(|extent| !extent.dirty.is_empty()));
            if is_dirty && !inode.is_orphan() && !there.contains(&ino) {
                found.push(ino);
            }
        }
        found.sort_unstable();
        found
    }

    /// One of the paths of an inode, from the root of the cache.
    fn path_of(&self, ino: Ino) -> PathBuf {
        let mut names = Vec::new();
        let mut at = ino;
        let home = |at| {
            self.inodes.iter().find_map(|(dir, inode)| match &inode.kind {
                Kind::Directory(directory) => {
                    let (name, _) = directory.entries.iter().find(|(_, ino)| **ino == at)?;
                    Some((dir, name.to_os_string()))
                }
                _ => None,
            })
        };
        while at != ROOT
            && let Some((dir, name)) = home(at)
        {
            at = dir;
            names.push(name);
        }
        names.iter().rev().collect()
    }

    fn forget_recovered(&mut self, store: &Store, ino: Ino) {
        self.remove_if_unused(ino, store);
        let Some(inode) = self.inodes.get(&ino) else { return };
        let homes = inode.homes.to_vec();
        // It was clean then, and its names with it.
        for Home { dir, name } in homes {
            if self.directory(dir).is_ok_and(|dir| dir.entries.get(&name) == Some(&ino)) {
                let _ = self.take_entry(dir, &name, false);
            }
        }
        self.drop_data(ino, store);
        self.remove(ino);
        self.unasked.remove(&ino);
    }

    /// Counts memory that blocks have already.
    pub fn hold_recovered(&mut self, ino: Ino, number: u32, blocks: &Blocks) {
        let Some(data) = self.inodes.get_mut(&ino).and_then(|inode| inode.data_or_new()) else { return };
        let extent = data.extents.entry(number).or_default();
        let more = blocks.without(&extent.held);
        extent.held.add(&more);
        self.resident += more.count() * BLOCK;
    }

    fn put(&mut self, ino: Ino, image: &Image) {
        if !self.inodes.contains_key(&ino) {
            self.insert(ino, Inode::new(image.mode, image.dev));
        }
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.mode = image.mode;
        inode.nlink = image.nlink;
        inode.uid = image.uid;
        inode.gid = image.gid;
        inode.set_rdev(image.rdev);
        inode.size = image.size;
        inode.blocks = image.blocks;
        (inode.atime, inode.mtime, inode.ctime) = (image.atime, image.mtime, image.ctime);
        inode.dev = image.dev;
        inode.homes = image.homes.clone().into();
        inode.seen = image.seen;
        inode.dirty = image.dirty;
        inode.made_by = image.made_by;
        inode.xattrs = image.xattrs.clone().map(KnownXattrs::from);
        match &mut inode.kind {
            Kind::Symlink(target) => *target = image.target.clone().map(Box::new),
            Kind::Directory(directory) => directory.parent = image.parent,
            Kind::File(data) => {
                if let Some((backing_len, cut)) = image.data {
                    let data = data.get_or_insert_with(Box::<FileData>::default);
                    (data.backing_len, data.cut) = (backing_len, cut);
                }
            }
            Kind::Special(_) => {}
        }
    }

    /// Does to the store what the last record announces.
    fn finish(&mut self, store: &Store, last: &Record) -> std::io::Result<()> {
        match last {
            Record::Size { ino, size, .. } => store.file(*ino)?.set_len(*size),
            Record::Zero { ino, begin, end, .. } if begin < end => {
                store::punch(&*store.file(*ino)?, *begin, end.next_multiple_of(BLOCK) - begin)
            }
            _ => Ok(()),
        }
    }

    fn settle_after_recovery(&mut self, store: &Store, root: &Stat) -> std::io::Result<()> {
        // One operation may have been done, and not noted.
        for ino in self.doubtful().map(|(_, pending)| pending.operation.inodes()).unwrap_or_default() {
            if let Some(seen) = self.inodes.get_mut(&ino).and_then(|inode| inode.seen.as_mut()) {
                seen.ctime = Seen::UNKNOWN;
            }
        }
        for ino in self.unasked.clone() {
            self.absorb(store, ino);
            self.mark_dirty(ino, dirty::TIMES);
            self.unasked.remove(&ino);
        }
        let all: Vec<Ino> = self.inodes.keys().copied().collect();
        for ino in &all {
            if self.inodes.get(ino).is_some_and(Inode::is_orphan) {
                self.remove_if_unused(*ino, store);
            } else if *ino != ROOT && self.inodes.get(ino).is_some_and(Inode::is_not_to_be) {
                self.drop_data(*ino, store);
                self.remove(*ino);
            }
        }
        self.clean.clear();
        self.dirty_by_age.clear();
        self.dirty_by_use.clear();
        self.urgent.clear();
        (self.resident, self.dirty_bytes) = (0, 0);
        let mut keep = HashSet::new();
        let (mut dirty, mut complete) = (Vec::new(), Vec::new());
        for (ino, inode) in self.inodes.iter_mut() {
            if ino >= FIRST_OWN_INO {
                self.next_ino = self.next_ino.max(ino);
            }
            let (size, has_home) = (inode.size, !inode.homes.is_empty());
            // What was written back since is not in the journal. A file of no blocks would be taken for one hole.
            if size > 0 && matches!(inode.kind, Kind::File(_)) {
                inode.blocks = inode.blocks.max(1);
            }
            // It may have had several names before one was removed.
            if let (false, Some(seen)) = (inode.is_dir(), inode.seen) {
                self.several.insert((inode.dev, seen.identity), ino);
            }
            match &mut inode.kind {
                Kind::Directory(directory) => {
                    directory.complete = !has_home && ino != ROOT;
                    if directory.complete {
                        complete.push(ino);
                    }
                }
                Kind::File(kind @ Some(_)) => {
                    let Some(data) = kind else { continue };
                    data.extents.retain(|_, extent| !extent.dirty.is_empty());
                    for extent in data.extents.values_mut() {
                        extent.valid = extent.dirty.clone();
                        extent.held = extent.dirty.clone();
                        self.resident += extent.held.count() * BLOCK;
                        self.dirty_bytes += extent.dirty.count() * BLOCK;
                    }
                    if data.extents.is_empty() && !data.cut && data.backing_len == size && has_home {
                        *kind = None;
                    } else if !data.extents.is_empty() {
                        keep.insert(ino);
                    }
                }
                _ => {}
            }
            if inode.is_dirty() && !inode.is_orphan() {
                dirty.push(ino);
            }
        }
        self.recover_rights();
        for ino in complete {
            self.now_complete(ino);
        }
        for ino in dirty {
            self.mark_dirty(ino, 0);
        }
        if let Some(inode) = self.inodes.get_mut(&ROOT)
            && !inode.is_dirty()
            && inode.pending == 0
        {
            inode.take_over(root);
        }
        for ino in store.files()? {
            if !keep.contains(&ino) {
                store.remove(ino)?;
                continue;
            }
            // What is not dirty is read from the backing directory again, and must not take memory twice.
            let Some(data) = self.inodes.get(&ino).and_then(|inode| inode.data()) else { continue };
            let file = store.file(ino)?;
            // What was being written behind the end when the process was killed would come back when the file grows.
            let size = self.inodes.get(&ino).map_or(u64::MAX, |inode| inode.size);
            let mut length = file.metadata()?.len();
            if length > size {
                file.set_len(size)?;
                length = size;
            }
            for number in 0..length.div_ceil(EXTENT) {
                let number = number as u32;
                let valid = data.extents.get(&number).map(|extent| extent.valid.clone()).unwrap_or_default();
                let unused = Blocks::First(BLOCKS).without(&valid).within(&blocks_before(number, length));
                for (begin, end) in unused.runs() {
                    let first = u64::from(number) * EXTENT + u64::from(begin) * BLOCK;
                    store::punch(&file, first, u64::from(end - begin) * BLOCK)?;
                }
            }
        }
        Ok(())
    }
}
