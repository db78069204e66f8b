//! Files and directories as the owner has them, and the operations that change their names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::blocks::{BLOCK, Blocks};
use crate::backing::Stat;
use crate::message::{Ino, Time, Xattrs};
use crate::settings::EXTENT;

/// A name in a directory. The directory and what has the name share it.
pub type Name = Arc<OsStr>;

/// Attributes that the backing directory lacks.
pub mod dirty {
    /// Permissions.
    pub const MODE: u8 = 1;
    /// Owner and group.
    pub const OWNER: u8 = 2;
    /// Times of access and modification. Written last, because everything else changes them.
    pub const TIMES: u8 = 4;
    /// Extended attributes, ACLs among them.
    pub const XATTRS: u8 = 8;
    /// The size, beyond what the data says.
    pub const SIZE: u8 = 16;
    /// A directory there may give rights that it is to lose: they are taken from it before anything new appears below it.
    pub const WIDE: u8 = 32;
    /// Who may do what with it.
    pub const RIGHTS: u8 = MODE | OWNER | XATTRS;
    /// All that something new lacks.
    pub const ALL: u8 = MODE | OWNER | TIMES | XATTRS;
}

/// Where the backing directory has something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// The directory.
    pub dir: Ino,
    /// The name in it.
    #[serde(with = "name")]
    pub name: Name,
}

/// Names as they are in the journal.
mod name {
    use std::ffi::{OsStr, OsString};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Name;

    pub fn serialize<S: Serializer>(name: &Name, to: S) -> Result<S::Ok, S::Error> {
        let name: &OsStr = name;
        name.serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
        Ok(OsString::deserialize(from)?.into())
    }
}

/// Where the backing directory has something, as far as it is known: few things have several names, so one takes no list.
#[derive(Clone, Debug, Default)]
pub enum Homes {
    /// Nowhere.
    #[default]
    None,
    /// At one place.
    One(Home),
    /// At several.
    #[allow(clippy::box_collection, reason = "a list here would make all inodes larger")]
    Several(Box<Vec<Home>>),
}

impl Homes {
    /// Adds a place.
    pub fn push(&mut self, home: Home) {
        *self = match std::mem::take(self) {
            Homes::None => Homes::One(home),
            Homes::One(first) => Homes::Several(Box::new(vec![first, home])),
            Homes::Several(mut all) => {
                all.push(home);
                Homes::Several(all)
            }
        };
    }

    /// Removes places.
    pub fn retain(&mut self, keep: impl FnMut(&Home) -> bool) {
        let mut all = match std::mem::take(self) {
            Homes::None => Vec::new(),
            Homes::One(home) => vec![home],
            Homes::Several(all) => *all,
        };
        all.retain(keep);
        *self = all.into();
    }
}

impl From<Vec<Home>> for Homes {
    fn from(mut all: Vec<Home>) -> Homes {
        match (all.pop(), all.is_empty()) {
            (None, _) => Homes::None,
            (Some(home), true) => Homes::One(home),
            (Some(home), false) => {
                all.push(home);
                Homes::Several(Box::new(all))
            }
        }
    }
}

impl Deref for Homes {
    type Target = [Home];

    fn deref(&self) -> &[Home] {
        match self {
            Homes::None => &[],
            Homes::One(home) => std::slice::from_ref(home),
            Homes::Several(all) => all,
        }
    }
}

impl DerefMut for Homes {
    fn deref_mut(&mut self) -> &mut [Home] {
        match self {
            Homes::None => &mut [],
            Homes::One(home) => std::slice::from_mut(home),
            Homes::Several(all) => all,
        }
    }
}

/// Extended attributes that were read. Most files have none, and those share one that is empty.
#[derive(Clone, Debug)]
pub struct KnownXattrs(Arc<Xattrs>);

impl From<Xattrs> for KnownXattrs {
    fn from(xattrs: Xattrs) -> KnownXattrs {
        static NONE: LazyLock<Arc<Xattrs>> = LazyLock::new(Arc::default);
        KnownXattrs(if xattrs.is_empty() { Arc::clone(&NONE) } else { Arc::new(xattrs) })
    }
}

impl Deref for KnownXattrs {
    type Target = Xattrs;

    fn deref(&self) -> &Xattrs {
        &self.0
    }
}

impl DerefMut for KnownXattrs {
    fn deref_mut(&mut self) -> &mut Xattrs {
        Arc::make_mut(&mut self.0)
    }
}

/// When a name was used, for the hand of the clock that looks for names to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Since the hand came by.
    Since,
    /// Not since then.
    Before,
    /// Not since then, and the client was asked for its references.
    Asked,
}

/// The file of the backing directory as it was last seen: another one, or another time of change, is somebody else's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// [`Stat::identity`]; in journals of the first releases its inode number.
    pub identity: u64,
    /// When it was changed last, or [what stands for that](Seen::stamp); [`Seen::UNKNOWN`] if we have just changed it ourselves.
    pub ctime: Time,
}

/// No time has so many nanoseconds.
const WITH_SIZE: u32 = 1 << 31;

impl Seen {
    /// No time that a file has: whatever it has now, we have changed it, and were interrupted before we looked.
    pub const UNKNOWN: Time = Time { secs: i64::MIN, nanos: 0 };

    /// No time that a file has either: whatever it has now, others have changed it.
    pub const OTHERS: Time = Time { secs: i64::MIN, nanos: 1 };

    /// As it is now.
    pub fn now(found: &Stat) -> Seen {
        Seen { identity: found.identity, ctime: Seen::stamp(found) }
    }

    /// The time of change. Where the filesystem keeps whole seconds, the size is folded into it: what others do within the second in
    /// which we have changed a file is mostly seen by that.
    fn stamp(found: &Stat) -> Time {
        if found.ctime.nanos != 0 {
            return found.ctime;
        }
        let size = found.size.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 34;
        Time { nanos: WITH_SIZE | size as u32, ..found.ctime }
    }

    /// Whether this is the file.
    pub fn is(&self, found: &Stat) -> bool {
        self.identity == found.identity || self.identity == found.ino
    }

    /// Whether this is the file, and nobody else has changed it.
    pub fn is_as_left(&self, found: &Stat) -> bool {
        // Journals of the first releases have the bare time.
        let times = [Seen::stamp(found), found.ctime, Seen::UNKNOWN];
        self.is(found) && times.contains(&self.ctime)
    }
}

/// A file or directory.
#[derive(Clone, Debug)]
pub struct Inode {
    /// Kind and permissions.
    pub mode: u32,
    /// Names that it has, those that are not known here included.
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    /// Units of 512 bytes on the backing directory, as long as nothing was changed here.
    pub blocks: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    /// The device of the backing directory that it is on: a name can't be moved to another.
    pub dev: u64,
    /// References of the client.
    pub references: u64,
    /// Open handles.
    pub handles: u32,
    /// Where the backing directory has it, as far as it is known; none for what is not made there yet.
    pub homes: Homes,
    /// As it was last seen there.
    pub seen: Option<Seen>,
    /// Bits of [`dirty`].
    pub dirty: u8,
    /// Those that are just being written back.
    pub writing: u8,
    /// When it was used.
    pub used: Use,
    /// The backing directory has it, or what others have put in its place, under another name than programs see: it is never
    /// forgotten.
    pub aside: bool,
    /// It was made and has lost its one name again before that was on the backing directory, without a
    /// [barrier](super::state::State::note_barrier) in between: nobody has to find it there.
    pub needless: bool,
    /// Operations in the log that it takes part in.
    pub pending: u32,
    /// The operation in the log that makes it; 0 if none.
    pub made_by: u64,
    /// `None` before they were read.
    pub xattrs: Option<KnownXattrs>,
    /// What it is.
    pub kind: Kind,
}

/// What an inode is.
#[derive(Clone, Debug)]
pub enum Kind {
    /// A regular file; `None`: nothing of it is resident, and its data is what the backing directory has.
    File(Option<Box<FileData>>),
    /// A directory.
    Directory(Box<Directory>),
    /// A symbolic link; `None` before it was read.
    Symlink(Option<Box<OsString>>),
    /// A device, a named pipe or a socket; the number of the device.
    Special(u64),
}

/// The names in a directory.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    /// The names that are known.
    pub entries: BTreeMap<Name, Ino>,
    /// Names that the backing directory may have and programs don't see. None if `complete`.
    pub gone: BTreeSet<Name>,
    /// Whether what is not in `entries` is not there.
    pub complete: bool,
    /// The backing directory has something here that programs are not to see: none of its names is forgotten.
    pub aside: bool,
    /// The directory that it is in.
    pub parent: Ino,
}

/// The resident data of a file.
#[derive(Clone, Debug, Default)]
pub struct FileData {
    /// By number: extent `n` begins at `n * EXTENT`.
    pub extents: BTreeMap<u32, Extent>,
    /// What is not valid in an extent, and before this byte, is to be read from the backing directory. Behind it there are
    /// zeros.
    pub backing_len: u64,
    /// The file there may be longer than `backing_len`: it has to be cut before more is written to it.
    pub cut: bool,
    /// It has data there that may not have reached the disk.
    pub unsynced: bool,
    /// How often it was cut.
    pub cuts: u64,
    /// How many passes in a row were of no use because it was cut meanwhile.
    pub cut_short: u32,
    /// What writing back could not do, for the next fsync or close.
    pub error: Option<i32>,
    /// Handles by which the kernel reads the file of the store itself.
    pub passthrough: u32,
    /// Those of them that a writer has waited for in vain.
    pub staying: u32,
    /// How long writers wait for the others.
    pub await_releases_until: Option<Instant>,
    /// Those of them that are writable: maps of theirs change the store unseen.
    pub shared_writers: u32,
    /// Handles by which the kernel also writes to it, without asking.
    pub unasked: u32,
    /// Handles whose reads and writes all come here.
    pub direct: u32,
    /// Bytes that count as pinned.
    pub pinned: u64,
    /// Where write-back goes on that takes a file in parts.
    pub sweep: Option<Sweep>,
    /// The extent that was read last, for read-ahead.
    pub last_read: u32,
    /// The file there, for one that has no name any more.
    pub orphan: Option<Arc<File>>,
}

/// Rights that a directory has gained, and does not have on the backing directory yet.
#[derive(Clone, Copy, Debug)]
pub struct Gain {
    /// The last operation of the log before that.
    pub after: u64,
    /// The clock of changes then: what was dirty before is brought first.
    pub generation: u64,
}

/// An inode with something that the backing directory lacks.
#[derive(Clone, Copy, Debug)]
pub struct DirtySince {
    pub since: Instant,
    /// The clock of changes when it became dirty, or when it was last begun to be written back.
    pub generation: u64,
}

/// A pass of write-back as others see it while it lasts.
#[derive(Clone, Copy, Debug)]
pub struct UnderWay {
    pub began: Instant,
    /// The generation since which its inode was dirty; `None`: it brings nothing, but keeps others from beginning.
    pub dirty_since: Option<u64>,
    /// It changes what the backing directory has: the time of change there is ours, and not known before its end.
    pub changes: bool,
}

/// Write-back that takes a file in parts, from its beginning to its end: whoever writes to the beginning all the while does not keep it
/// from the end.
#[derive(Clone, Copy, Debug)]
pub struct Sweep {
    /// The next extent.
    pub next: u32,
    /// When it was at the file's beginning.
    pub began: DirtySince,
}

/// A piece of a file.
#[derive(Clone, Debug, Default)]
pub struct Extent {
    /// Blocks whose content is in the store.
    pub valid: Blocks,
    /// Those of them that the backing directory lacks.
    pub dirty: Blocks,
    /// Those that are being written there.
    pub flight: Blocks,
    /// Blocks that memory is set aside for.
    pub held: Blocks,
    /// A thread is reading the blocks that are not valid, or asks which of them are holes.
    pub fetching: bool,
    /// Those that are not valid are no holes on the backing directory.
    pub looked: bool,
    /// Requests that are reading from or writing to it.
    pub pins: u32,
    /// Those of them that are just writing to blocks which may not be valid yet: nobody fetches these meanwhile.
    pub writers: u32,
}

impl Extent {
    /// Whether its memory can be given up.
    pub fn can_go(&self) -> bool {
        self.pins == 0 && !self.fetching && self.dirty.is_empty() && self.flight.is_empty()
    }
}

/// A change of names that the backing directory lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// The first name of something new.
    Make { ino: Ino, dir: Ino, name: OsString },
    /// A further name of a file.
    Link { ino: Ino, dir: Ino, name: OsString },
    /// A name is removed, a directory's too.
    Unlink { ino: Ino, dir: Ino, name: OsString },
    /// A name is changed, and what had the new one is replaced.
    Rename { ino: Ino, dir: Ino, name: OsString, to_dir: Ino, to_name: OsString, over: Option<Ino> },
    /// Two names are exchanged.
    Exchange { ino: Ino, dir: Ino, name: OsString, other: Ino, to_dir: Ino, to_name: OsString },
}

impl Operation {
    /// The inodes that it is about, and those whose entries it changes.
    pub fn inodes(&self) -> Vec<Ino> {
        match self {
            Operation::Make { ino, dir, .. }
            | Operation::Link { ino, dir, .. }
            | Operation::Unlink { ino, dir, .. } => vec![*ino, *dir],
            Operation::Rename { ino, dir, to_dir, over, .. } => {
                let mut all = vec![*ino, *dir, *to_dir];
                all.extend(over);
                all
            }
            Operation::Exchange { ino, dir, other, to_dir, .. } => vec![*ino, *dir, *other, *to_dir],
        }
    }

    /// The inodes that it is about.
    pub fn subjects(&self) -> Vec<Ino> {
        match self {
            Operation::Make { ino, .. } | Operation::Link { ino, .. } | Operation::Unlink { ino, .. } => {
                vec![*ino]
            }
            Operation::Rename { ino, over, .. } => std::iter::once(*ino).chain(*over).collect(),
            Operation::Exchange { ino, other, .. } => vec![*ino, *other],
        }
    }

    /// The names that it changes, with their directories.
    pub fn names(&self) -> Vec<(Ino, &OsString)> {
        match self {
            Operation::Make { dir, name, .. }
            | Operation::Link { dir, name, .. }
            | Operation::Unlink { dir, name, .. } => vec![(*dir, name)],
            Operation::Rename { dir, name, to_dir, to_name, .. }
            | Operation::Exchange { dir, name, to_dir, to_name, .. } => {
                vec![(*dir, name), (*to_dir, to_name)]
            }
        }
    }

    /// The directory that something has a new name in.
    pub fn shown_in(&self) -> Ino {
        match self {
            Operation::Make { dir, .. } | Operation::Link { dir, .. } | Operation::Unlink { dir, .. } => *dir,
            Operation::Rename { to_dir, .. } | Operation::Exchange { to_dir, .. } => *to_dir,
        }
    }

    /// Whether it gives anything a name.
    pub fn gives_a_name(&self) -> bool {
        !matches!(self, Operation::Unlink { .. })
    }

    /// Whether it moves something to another name.
    pub fn moves(&self) -> bool {
        matches!(self, Operation::Rename { .. } | Operation::Exchange { .. })
    }

    /// Whether it gives this inode a name, or takes one from it.
    pub fn shows(&self, ino: Ino) -> bool {
        self.subjects().contains(&ino)
    }

    /// The directories whose entries it changes, each once.
    pub fn directories(&self) -> Vec<Ino> {
        match self {
            Operation::Make { dir, .. } | Operation::Link { dir, .. } | Operation::Unlink { dir, .. } => {
                vec![*dir]
            }
            Operation::Rename { dir, to_dir, .. } | Operation::Exchange { dir, to_dir, .. }
                if dir == to_dir =>
            {
                vec![*dir]
            }
            Operation::Rename { dir, to_dir, .. } | Operation::Exchange { dir, to_dir, .. } => {
                vec![*dir, *to_dir]
            }
        }
    }
}

impl Inode {
    /// An inode without anything; its kind is what `mode` says.
    pub fn new(mode: u32, dev: u64) -> Inode {
        let kind = match FileType::from_raw_mode(mode) {
            FileType::RegularFile => Kind::File(None),
            FileType::Directory => Kind::Directory(Box::default()),
            FileType::Symlink => Kind::Symlink(None),
            _ => Kind::Special(0),
        };
        Inode {
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            size: 0,
            blocks: 0,
            atime: Time::default(),
            mtime: Time::default(),
            ctime: Time::default(),
            dev,
            references: 0,
            handles: 0,
            homes: Homes::None,
            seen: None,
            dirty: 0,
            writing: 0,
            used: Use::Since,
            aside: false,
            needless: false,
            pending: 0,
            made_by: 0,
            xattrs: None,
            kind,
        }
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        matches!(self.kind, Kind::Directory(_))
    }

    /// The number of a device.
    pub fn rdev(&self) -> u64 {
        match self.kind {
            Kind::Special(rdev) => rdev,
            _ => 0,
        }
    }

    /// Notes the number of a device.
    pub fn set_rdev(&mut self, rdev: u64) {
        if let Kind::Special(of) = &mut self.kind {
            *of = rdev;
        }
    }

    /// Its resident data, if there is any.
    pub fn data(&self) -> Option<&FileData> {
        match &self.kind {
            Kind::File(data) => data.as_deref(),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub fn data_mut(&mut self) -> Option<&mut FileData> {
        match &mut self.kind {
            Kind::File(data) => data.as_deref_mut(),
            _ => None,
        }
    }

    /// Its data, made if nothing was resident; `None` if it is no regular file.
    pub fn data_or_new(&mut self) -> Option<&mut FileData> {
        let backing_len = if self.homes.is_empty() { 0 } else { self.size };
        match &mut self.kind {
            Kind::File(data) => {
                Some(data.get_or_insert_with(|| Box::new(FileData { backing_len, ..FileData::default() })))
            }
            _ => None,
        }
    }

    /// Whether the backing directory lacks something of it (its names aside).
    pub fn is_dirty(&self) -> bool {
        let is_dirty = |extent: &Extent| !extent.dirty.is_empty() || !extent.flight.is_empty();
        self.dirty | self.writing != 0
            || self.data().is_some_and(|data| data.cut || data.extents.values().any(is_dirty))
    }

    /// Whether nothing of its data can be evicted now: the kernel reads it by itself, or nobody else has it.
    pub fn keeps_data(&self) -> bool {
        self.data().is_some_and(|data| {
            let is_alone = self.is_orphan() && data.orphan.is_none() && data.backing_len == 0;
            data.passthrough > 0 || is_alone
        })
    }

    /// Takes the record of its data away if that says nothing but that all of it is on the backing directory.
    pub fn drop_idle_data(&mut self) {
        let (size, can_be) = (self.size, self.handles == 0 && !self.homes.is_empty() && !self.is_dirty());
        if let Kind::File(kind) = &mut self.kind
            && kind.as_ref().is_some_and(|data| can_be && data.is_idle(size))
        {
            *kind = None;
        }
    }

    /// Whether it was noted, and the operation that was to make it was not: nobody was told that it is there.
    pub fn is_not_to_be(&self) -> bool {
        self.seen.is_none() && self.homes.is_empty() && self.made_by == 0 && self.pending == 0
    }

    /// Whether no name leads to it.
    pub fn is_orphan(&self) -> bool {
        self.nlink == 0
    }
}

impl FileData {
    /// Whether nothing of a file of `size` bytes is resident, and the backing directory has all of it.
    pub fn is_idle(&self, size: u64) -> bool {
        self.extents.is_empty()
            && self.backing_len == size
            && !self.cut
            && !self.unsynced
            && self.error.is_none()
            && self.orphan.is_none()
    }

    /// Whether all of a file of `size` bytes is in the store, or is zeros.
    pub fn is_all_resident(&self, size: u64) -> bool {
        let end = size.min(self.backing_len);
        (0..end.div_ceil(EXTENT)).all(|number| {
            let wanted = blocks_before(number as u32, end);
            self.extents
                .get(&(number as u32))
                .is_some_and(|extent| !extent.fetching && extent.valid.covers(&wanted))
        })
    }

    /// Whether a block's content has to be read from the backing directory before it is known.
    pub fn is_missing(&self, number: u32) -> Blocks {
        let wanted = blocks_before(number, self.backing_len);
        match self.extents.get(&number) {
            Some(extent) => wanted.without(&extent.valid),
            None => wanted,
        }
    }
}

/// The blocks of an extent that begin before byte `end` of the file.
pub fn blocks_before(number: u32, end: u64) -> Blocks {
    let begin = u64::from(number) * EXTENT;
    Blocks::range(0, (end.saturating_sub(begin).min(EXTENT).div_ceil(BLOCK)) as u16)
}
