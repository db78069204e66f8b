//! What the owner knows: names, attributes, extents, and the log of what the backing directory lacks.
//!
//! Everything is behind one lock, which is never held while the backing directory or the data of the store is touched. The
//! *names* are those that programs see. A [`Home`] is where the backing directory has an inode *now*: the two differ by
//! exactly the operations in the log, which are carried out there one after the other.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::time::Instant;

use hashlink::LinkedHashMap;
use rustix::io::Errno;

use super::accepted::Accepted;
use super::blocks::BLOCK;
use super::changes::Changes;
use super::inode::{Directory, DirtySince, Gain, Home, Inode, Kind, Name, Operation, UnderWay};
use super::inodes::{INODE_BYTES, Inodes};
use super::journal::Journal;
use super::wait::{Need, Waits};
use crate::backing::{Project, Stat};
use crate::message::{Attributes, Handle, Ino, ROOT, Space};
use crate::settings::Settings;
use crate::status::Conflict;

/// Own numbers begin here; those of the backing directory's files are theirs, as long as they are smaller.
pub const FIRST_OWN_INO: Ino = 1 << 62;

/// Operations that the backing directory may lack at most, however large the cache is. Who changes more names waits.
const LONGEST_LOG: usize = 1 << 17;

/// The same, however small the cache is.
const LONGEST_LOG_OF_SMALL: usize = 1 << 14;

/// Memory of a pending operation, as it counts against the capacity.
const OPERATION_BYTES: u64 = 256;

/// An operation in the log.
#[derive(Clone, Debug)]
pub struct Pending {
    pub operation: Operation,
    /// Nothing is to be done: what it made was removed before it was there, or it was done before others that were stuck.
    pub cancelled: bool,
    pub since: Instant,
}

/// An open file.
#[derive(Clone, Debug)]
pub struct OpenFile {
    pub ino: Ino,
    pub write: bool,
    pub passthrough: bool,
    /// The kernel writes by it without asking.
    pub unasked: bool,
    /// A writer has waited in vain for it to be released: it is really open.
    pub stays: bool,
}

/// Figures that only grow.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub hit_bytes: u64,
    pub miss_bytes: u64,
    pub fetched_bytes: u64,
    pub written_back_bytes: u64,
    pub evictions: u64,
    pub forgotten: u64,
    pub delayed: u64,
    pub failures: u64,
}

/// Why an answer can't be given now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It is an error.
    Error(Errno),
    /// The request is to be tried again when this is there.
    Wait(Need),
}

impl From<Errno> for Stop {
    fn from(error: Errno) -> Stop {
        Stop::Error(error)
    }
}

/// All that the owner knows.
pub struct State {
    pub settings: Settings,
    pub inodes: Inodes,
    /// Files with several names, by device and identity on the backing directory.
    pub several: HashMap<(u64, u64), Ino>,
    pub next_ino: Ino,
    /// Own numbers of what was forgotten, by device and identity on the backing directory: it gets them again.
    pub numbers: HashMap<(u64, u64), Ino>,
    /// What was forgotten, and may be open on the backing directory.
    pub closing: Vec<Ino>,
    /// How often the log was searched for removed names while names were forgotten.
    pub searches: usize,
    /// Directories of which names are just being read, and how often.
    pub loading: HashMap<Ino, u32>,
    /// What the backing directory lacks, oldest first; the first one has the number `first_pending`.
    pub log: VecDeque<Pending>,
    pub first_pending: u64,
    /// The last operation that has to be carried out soon, whatever its age.
    pub wanted: u64,
    /// Grows with every change.
    pub generation: u64,
    /// Bytes of blocks that are held.
    pub resident: u64,
    /// Bytes of blocks that are dirty or in flight.
    pub dirty_bytes: u64,
    pub pinned: u64,
    /// Memory of all names that are known, or known not to be there.
    pub name_bytes: u64,
    /// Extents that could be evicted, least recently used first. Some may be in use at the moment.
    pub clean: LinkedHashMap<(Ino, u32), ()>,
    /// Inodes that the backing directory lacks something of, by last use.
    pub dirty_by_use: LinkedHashMap<Ino, ()>,
    /// The same by age.
    pub dirty_by_age: LinkedHashMap<Ino, DirtySince>,
    /// Inodes to be written back before all others.
    pub urgent: HashSet<Ino>,
    /// Inodes that are in a pass of write-back.
    pub passes: HashMap<Ino, UnderWay>,
    /// Inodes whose passes the applier waits for: no other begins before it has had them.
    pub applier_awaits: Vec<Ino>,
    pub handles: HashMap<Handle, OpenFile>,
    /// Files that the kernel writes to without asking.
    pub unasked: BTreeSet<Ino>,
    pub next_handle: Handle,
    pub waits: Waits,
    pub journal: Journal,
    pub counters: Counters,
    /// What fails at the moment: the inode, and what the kernel says.
    pub failing: BTreeMap<Ino, (Errno, Instant)>,
    pub conflicts: Vec<Conflict>,
    /// Whether the backing directory keeps xattrs, and ACLs.
    pub keeps_xattrs: bool,
    pub keeps_acls: bool,
    pub keeps_projects: bool,
    /// Projects that were asked for.
    pub projects: HashMap<Ino, Project>,
    /// No name on the backing directory is longer.
    pub longest_name: usize,
    /// Sets of extended attributes that the backing directory holds.
    pub accepted: Accepted,
    /// What loader threads are to read, oldest first.
    pub jobs: VecDeque<Need>,
    /// The space of the backing directory, and when it was asked for.
    pub space: Option<(Space, Instant)>,
    /// The last operation that is just being carried out.
    pub batch_end: u64,
    /// Since when the applier has been at work for something, and for what.
    pub applying: Option<(Ino, Instant)>,
    /// Operations that fail for a reason of their own, by number: why, and when they are tried again.
    pub stuck: BTreeMap<u64, (Errno, Instant)>,
    /// The operation that the journal says may have been done and not noted; 0: none.
    pub doubtful: u64,
    /// Those there that may not be on the disk.
    pub changes: Changes,
    /// The last operation before which all has to be there that was made before it, though it is removed later:
    /// [`note_barrier`](State::note_barrier).
    pub barrier: u64,
    /// The thread that is changing a name on the backing directory: until it has noted that, homes may not be true.
    pub moving: Option<std::thread::ThreadId>,
    /// The journal is being read: no name is there but by what it says.
    pub is_recovering: bool,
    /// Whether write-back goes on until the low watermark.
    pub draining: bool,
    /// What is [open](super::closed) on the backing directory just now, and has its mode back in a moment.
    pub open_there: BTreeSet<Ino>,
    /// Directories with [`WIDE`](super::inode::dirty::WIDE).
    pub wide: BTreeSet<Ino>,
    /// Files that may give rights there that they have lost here.
    pub wide_files: BTreeSet<Ino>,
    /// Directories that may have gained rights which they do not have there.
    pub gains: HashMap<Ino, Gain>,
    /// Those for which what is below them is just being brought there.
    pub opening: BTreeSet<Ino>,
    /// How often something was changed so that somebody has lost rights.
    pub rights_lost: u64,
    pub stopped: bool,
}

impl State {
    /// The number of the newest operation of the log, or of the last before it; operations begin with 1.
    pub fn last_pending(&self) -> u64 {
        self.first_pending + self.log.len() as u64 - 1
    }

    /// An inode that the client or the log knows of.
    ///
    /// # Errors
    /// `ESTALE` if there is none.
    pub fn inode(&self, ino: Ino) -> Result<&Inode, Stop> {
        self.inodes.get(&ino).ok_or(Stop::Error(Errno::STALE))
    }

    /// The same, to be changed.
    ///
    /// # Errors
    /// As [`inode`](State::inode).
    pub fn inode_mut(&mut self, ino: Ino) -> Result<&mut Inode, Stop> {
        self.inodes.get_mut(&ino).ok_or(Stop::Error(Errno::STALE))
    }

    /// The names of a directory.
    ///
    /// # Errors
    /// `ESTALE`, `ENOTDIR`.
    pub fn directory(&self, ino: Ino) -> Result<&Directory, Stop> {
        match &self.inode(ino)?.kind {
            Kind::Directory(directory) => Ok(directory),
            _ => Err(Stop::Error(Errno::NOTDIR)),
        }
    }

    /// The same, to be changed.
    ///
    /// # Errors
    /// As [`directory`](State::directory).
    pub fn directory_mut(&mut self, ino: Ino) -> Result<&mut Directory, Stop> {
        match &mut self.inode_mut(ino)?.kind {
            Kind::Directory(directory) => Ok(directory),
            _ => Err(Stop::Error(Errno::NOTDIR)),
        }
    }

    /// What stat(2) tells of an inode.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes, Stop> {
        let inode = self.inode(ino)?;
        let blocks = match inode.data() {
            // A block that is held has pages. What is not resident has at most as many as the backing directory said.
            Some(data) => {
                let held: u64 =
                    data.extents.values().map(|extent| extent.held.count()).sum::<u64>() * (BLOCK / 512);
                if data.is_all_resident(inode.size) { held } else { held.max(inode.blocks) }
            }
            None => inode.blocks,
        };
        Ok(Attributes {
            ino,
            mode: inode.mode,
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            rdev: inode.rdev(),
            size: inode.size,
            blocks,
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
        })
    }

    /// A number for a new inode: the one that it had before it was forgotten; or that of the backing directory, if nobody has it.
    pub fn new_ino(&mut self, theirs: Option<&Stat>) -> Ino {
        if let Some(found) = theirs
            && let Some(former) = self.numbers.remove(&(found.dev, found.identity))
        {
            self.name_bytes -= NUMBER_BYTES;
            return former;
        }
        if let Some(found) = theirs
            && found.ino > ROOT
            && found.ino < FIRST_OWN_INO
            && !self.inodes.contains_key(&found.ino)
        {
            return found.ino;
        }
        self.next_ino += 1;
        self.next_ino
    }

    /// Adds an inode.
    pub fn insert(&mut self, ino: Ino, inode: Inode) {
        self.name_bytes += INODE_BYTES;
        self.inodes.insert(ino, inode);
    }

    /// Removes an inode that nothing leads to.
    pub fn remove(&mut self, ino: Ino) {
        let Some(inode) = self.inodes.remove(&ino) else { return };
        self.name_bytes -= INODE_BYTES;
        if let Kind::Directory(directory) = &inode.kind {
            let names = directory.entries.keys().chain(&directory.gone);
            self.name_bytes -= names.map(|name| name_bytes(name)).sum::<u64>();
        }
        if let Some(seen) = inode.seen
            && self.several.get(&(inode.dev, seen.identity)) == Some(&ino)
        {
            self.several.remove(&(inode.dev, seen.identity));
        }
        self.settle_rights(ino);
        self.projects.remove(&ino);
        // Its number may be another's soon.
        self.journal_forgotten(ino);
    }

    /// Has a name lead to an inode.
    ///
    /// # Errors
    /// As [`directory`](State::directory).
    pub fn put_entry(&mut self, dir: Ino, name: &Name, ino: Ino) -> Result<(), Stop> {
        let directory = self.directory_mut(dir)?;
        let is_new = directory.entries.insert(Arc::clone(name), ino).is_none();
        match (is_new, directory.gone.remove(name)) {
            (true, false) => self.name_bytes += name_bytes(name),
            (false, true) => self.name_bytes -= name_bytes(name),
            _ => {}
        }
        Ok(())
    }

    /// Has a name lead nowhere; with `gone`, also if the backing directory has it.
    ///
    /// # Errors
    /// As [`directory`](State::directory).
    pub fn take_entry(&mut self, dir: Ino, name: &OsStr, gone: bool) -> Result<(), Stop> {
        let directory = self.directory_mut(dir)?;
        let had = directory.entries.remove_entry(name);
        let is_new = gone && !directory.gone.contains(name);
        if is_new {
            directory.gone.insert(had.as_ref().map_or_else(|| name.into(), |(name, _)| Arc::clone(name)));
        }
        match (had.is_some(), is_new) {
            (true, false) => self.name_bytes -= name_bytes(name),
            (false, true) => self.name_bytes += name_bytes(name),
            _ => {}
        }
        Ok(())
    }

    /// Notes that a directory is known as a whole.
    pub fn now_complete(&mut self, dir: Ino) {
        let Ok(directory) = self.directory_mut(dir) else { return };
        directory.complete = true;
        let gone = std::mem::take(&mut directory.gone);
        self.name_bytes -= gone.iter().map(|name| name_bytes(name)).sum::<u64>();
    }

    /// A name as its directory has it, so that it is in memory once.
    pub fn name(&self, dir: Ino, name: &OsStr) -> Name {
        let known = self.directory(dir).ok().and_then(|dir| dir.entries.get_key_value(name));
        known.map_or_else(|| name.into(), |(known, _)| Arc::clone(known))
    }

    /// Notes that the backing directory lacks something of an inode, from now on.
    pub fn mark_dirty(&mut self, ino: Ino, bits: u8) {
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.dirty |= bits;
        self.generation += 1;
        let entry = DirtySince { since: Instant::now(), generation: self.generation };
        self.dirty_by_age.entry(ino).or_insert(entry);
        // At the end: it is the last that was used.
        self.dirty_by_use.remove(&ino);
        self.dirty_by_use.insert(ino, ());
    }

    /// Takes an inode that the backing directory lacks nothing of any more from the lists.
    pub fn unlist_if_clean(&mut self, ino: Ino) {
        if self.inodes.get(&ino).is_none_or(|inode| !inode.is_dirty()) {
            self.dirty_by_age.remove(&ino);
            self.dirty_by_use.remove(&ino);
            self.urgent.remove(&ino);
            self.failing.remove(&ino);
            if let Some(inode) = self.inodes.get_mut(&ino)
                && !self.passes.contains_key(&ino)
            {
                inode.drop_idle_data();
            }
        }
    }

    /// Adds an operation to the log, and to the journal.
    pub fn push(&mut self, operation: Operation) -> u64 {
        for ino in operation.inodes() {
            if let Some(inode) = self.inodes.get_mut(&ino) {
                inode.pending += 1;
            }
        }
        self.generation += 1;
        self.log.push_back(Pending { operation, cancelled: false, since: Instant::now() });
        self.note_barrier();
        self.last_pending()
    }

    /// Notes whether the last operation of the log is a barrier: what was made before it has to be there first, though it is removed
    /// later. So it is where a name is taken away (by a removal, too) or given to something else, and where a directory or a symlink
    /// gets one: what was made may have taken its place, or be in the directory or behind the symlink that has a name now. What was
    /// merely made makes nothing else wrong.
    pub fn note_barrier(&mut self) {
        let is_symlink =
            |ino: &Ino| self.inodes.get(ino).is_some_and(|inode| matches!(inode.kind, Kind::Symlink(_)));
        let is_dir = |ino: &Ino| self.inodes.get(ino).is_some_and(Inode::is_dir);
        let counts = match self.log.back().map(|pending| &pending.operation) {
            Some(Operation::Make { ino, .. } | Operation::Link { ino, .. }) => is_symlink(ino),
            Some(Operation::Rename { ino, over, .. }) => over.is_some() || is_dir(ino) || is_symlink(ino),
            Some(Operation::Unlink { .. } | Operation::Exchange { .. }) => true,
            None => false,
        };
        if counts {
            self.barrier = self.last_pending();
        }
    }

    /// Operations that the backing directory may lack at most: they and what they made, which can't be forgotten, take an eighth of
    /// the capacity, or about 10 MiB where that is more.
    pub fn longest_log(&self) -> usize {
        let fit = self.settings.capacity.0 / 8 / (OPERATION_BYTES + INODE_BYTES);
        usize::try_from(fit).unwrap_or(usize::MAX).clamp(LONGEST_LOG_OF_SMALL, LONGEST_LOG)
    }

    /// Whether no more names can be changed before some are on the backing directory. What was carried out behind one that is stuck
    /// is in the log still, and counts as little as it takes.
    pub fn is_log_full(&self) -> bool {
        const DONE: usize = 8;
        let most = self.longest_log();
        if self.log.len() < most || self.log.len() >= DONE * most {
            return self.log.len() >= most;
        }
        self.log.iter().filter(|pending| !pending.cancelled).count() >= most
    }

    /// Whether names take clearly more than they may, so that what can't be forgotten because the backing directory lacks something of
    /// it is brought there before its time.
    pub fn has_too_many_names(&self) -> bool {
        let most = self.settings.names.0;
        !self.settings.idle && self.name_bytes > most.saturating_add(most / 4)
    }

    /// Bytes that names and operations take, about.
    pub fn names_and_operations(&self) -> u64 {
        self.name_bytes + self.log.len() as u64 * OPERATION_BYTES
    }

    /// The path of a home below the backing directory, by the names that it has there now; for messages, too.
    ///
    /// # Errors
    /// `ESTALE` if a directory on the way is not there.
    pub fn home_path(&self, home: &Home) -> Result<Vec<OsString>, Errno> {
        let mut names = vec![home.name.to_os_string()];
        let mut dir = home.dir;
        while dir != ROOT {
            let home = self.inodes.get(&dir).and_then(|inode| inode.homes.first()).ok_or(Errno::STALE)?;
            names.push(home.name.to_os_string());
            dir = home.dir;
            if names.len() > MOST_LEVELS {
                return Err(Errno::LOOP);
            }
        }
        names.reverse();
        Ok(names)
    }

    /// A path for people: by the backing directory's names, or the name that it will have there.
    pub fn shown(&self, ino: Ino) -> String {
        if ino == ROOT {
            return ".".to_owned();
        }
        let inode = self.inodes.get(&ino);
        // What is not complete yet has a name there that nobody has given it.
        let home = inode.filter(|inode| inode.made_by == 0).and_then(|inode| inode.homes.first());
        match home.and_then(|home| self.home_path(home).ok()) {
            Some(names) => names.join(OsStr::new("/")).to_string_lossy().into_owned(),
            None => match self.pending_name(ino) {
                Some((dir, name)) if dir == ROOT => name.to_string_lossy().into_owned(),
                Some((dir, name)) => format!("{}/{}", self.shown(dir), name.to_string_lossy()),
                None => format!("inode {ino}"),
            },
        }
    }

    /// Where what is not on the backing directory yet is made: at a directory that was made before it.
    fn pending_name(&self, ino: Ino) -> Option<(Ino, &OsStr)> {
        self.log.iter().find_map(|pending| match &pending.operation {
            Operation::Make { ino: made, dir, name } if *made == ino => Some((*dir, name.as_os_str())),
            _ => None,
        })
    }

    /// Forgets an inode that nothing leads to: no name, no reference, no handle, no operation.
    pub fn remove_if_unused(&mut self, ino: Ino, store: &crate::store::Store) {
        let Some(inode) = self.inodes.get(&ino) else { return };
        let is_used = inode.nlink > 0 || inode.handles > 0 || inode.pending > 0 || ino == ROOT;
        if is_used
            || self.passes.contains_key(&ino)
            || inode.data().is_some_and(|data| data.extents.values().any(|e| e.pins > 0 || e.fetching))
        {
            return;
        }
        self.drop_data(ino, store);
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.dirty = 0;
        let is_referenced = inode.references > 0;
        self.unlist_if_clean(ino);
        self.settle_rights(ino);
        if !is_referenced {
            self.remove(ino);
        }
    }

    /// Gives up all data of a file, dirty or not.
    pub fn drop_data(&mut self, ino: Ino, store: &crate::store::Store) {
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        let Kind::File(data) = &mut inode.kind else { return };
        let Some(data) = data.take() else { return };
        for (number, extent) in &data.extents {
            self.resident -= extent.held.count() * BLOCK;
            self.dirty_bytes -= extent.dirty.with(&extent.flight).count() * BLOCK;
            self.clean.remove(&(ino, *number));
        }
        self.pinned -= data.pinned;
        if self.is_recovering {
            return;
        }
        if let Err(error) = store.remove(ino) {
            tracing::error!(ino, %error, "can't remove a file of the store");
        }
        self.waits.wake(&Need::Space);
    }
}

/// Memory of a name in a directory: its place in a tree whose nodes are a little more than half full, and its letters with two counts
/// in a piece of the allocator's. What has the name shares it.
pub fn name_bytes(name: &OsStr) -> u64 {
    40 + (name.len() as u64 + 24).next_multiple_of(16)
}

/// Memory of a number that is kept for what was forgotten.
pub const NUMBER_BYTES: u64 = 40;

/// Directories within each other at most, as a guard against a circle.
pub const MOST_LEVELS: usize = 1 << 16;
