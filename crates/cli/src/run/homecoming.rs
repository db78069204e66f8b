//! Bringing results home: how the directory on disk becomes what the program saw, without losing what others wrote.
//!
//! The rule for conflicts needs no list of the directory's former state. At the start the clock of the target's own
//! filesystem is read; whatever on disk has changed since (its ctime is later) and was not put there by this run was
//! changed by someone else. It is kept: the program's version of such a file goes beside it as `NAME.ondeck-ID`,
//! and a file that the program deleted stays.
//!
//! Renaming a directory changes no ctime below it. The inodes of the directories are therefore remembered: what stands in
//! another directory than the one that was there at the start is someone else's, whatever its ctime.
//!
//! Giving one name of a file to another, or removing it, changes the ctime for its other names, too, wherever they are:
//! in another output directory, or outside of all. Of the files that had several names at the start their state is
//! therefore remembered, and one of which nothing but the number of names has changed counts as it was.
//!
//! A directory is never replaced, so its attributes are merged one by one: what the program changed of those that it
//! was shown comes home, and everything else stays as it is on disk.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::fmt;
use std::io::{self, BufRead, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use ondeck_transfer::checksum::{Checksum, Digest};
use ondeck_transfer::manifest;
use ondeck_transfer::merge::{Action, Changes, DirectoryAction, MergePolicy, Merged, Place, Side};
use ondeck_transfer::survey::{Descend, Visit, survey};
use ondeck_transfer::verify::digest_of;
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat, Timespec};
use rustix::io::Errno;
use twox_hash::XxHash3_128;

use super::journal::Journal;

/// How an output directory is shown to the program, which decides how its results come home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// The directory on disk was empty: the program writes to an empty directory in RAM.
    Bind,
    /// What was on disk was copied into RAM; unchanged files are not copied back, missing ones are deleted.
    Mirror,
    /// The directory on disk shows through; what the program writes, and marks for what it deletes, are in RAM.
    Overlay,
    /// The program works on disk.
    Disk,
}

impl Mechanism {
    /// The word in reports and messages.
    pub fn word(self) -> &'static str {
        match self {
            Mechanism::Bind => "bind",
            Mechanism::Mirror => "mirror",
            Mechanism::Overlay => "overlay",
            Mechanism::Disk => "disk",
        }
    }
}

/// Seconds since 1970 and nanoseconds.
pub type Moment = (i64, i64);

/// What this run itself has, or has put, on disk: inode and ctime by the hash of the path.
pub type Ours = HashMap<u128, (u64, Moment)>;

/// When an entry was changed last.
pub fn changed_at(stat: &Stat) -> Moment {
    (stat.st_ctime, stat.st_ctime_nsec as i64)
}

/// When an entry was written last.
fn modified_at(stat: &Stat) -> Moment {
    (stat.st_mtime, stat.st_mtime_nsec as i64)
}

/// When an entry was read last.
fn accessed_at(stat: &Stat) -> Moment {
    (stat.st_atime, stat.st_atime_nsec as i64)
}

fn time_of(moment: Moment) -> Timespec {
    Timespec { tv_sec: moment.0, tv_nsec: moment.1 as _ }
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// What changes when something is written to a file, or when its mode or owner is changed; but not when one of its names
/// is made or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    size: i64,
    modified: Moment,
    mode: u32,
    owner: (u32, u32),
}

impl Content {
    fn of(stat: &Stat) -> Content {
        Content {
            size: stat.st_size,
            modified: modified_at(stat),
            mode: stat.st_mode,
            owner: (stat.st_uid, stat.st_gid),
        }
    }

    /// From the fields of a line, the last of which are its own.
    pub fn parse<'a>(mut fields: impl Iterator<Item = &'a str>) -> Option<Content> {
        let size = fields.next()?.parse().ok()?;
        let modified = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let mode = u32::from_str_radix(fields.next()?, 8).ok()?;
        let owner = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        fields.next().is_none().then_some(Content { size, modified, mode, owner })
    }

    #[cfg(test)]
    pub fn example() -> Content {
        Content { size: 7, modified: (-1, 999_999_999), mode: 0o100_600, owner: (5, 6) }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Content { size, modified, mode, owner } = self;
        write!(f, "{size} {} {} {mode:o} {} {}", modified.0, modified.1, owner.0, owner.1)
    }
}

/// A file on disk that had several names when the program was shown one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linked {
    inode: u64,
    names: u64,
    content: Content,
}

impl Linked {
    /// If it has several names.
    pub fn of(stat: &Stat) -> Option<Linked> {
        (stat.st_nlink > 1 && !is_directory(stat)).then(|| Linked {
            inode: stat.st_ino,
            names: stat.st_nlink,
            content: Content::of(stat),
        })
    }

    /// Whether it is still this file, and nothing but the number of its names has changed.
    fn has_only_other_names(&self, now: &Stat) -> bool {
        self.inode == now.st_ino && self.names != now.st_nlink && self.content == Content::of(now)
    }
}

/// A directory's attributes when the program was shown it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Appearance {
    changed: Moment,
    accessed: Moment,
    modified: Moment,
    mode: u32,
    owner: (u32, u32),
    /// Hashes of the names and of the values of its extended attributes and ACLs.
    xattrs: Vec<(u128, u128)>,
}

impl Appearance {
    fn of<'a>(stat: &Stat, xattrs: impl IntoIterator<Item = (&'a CStr, &'a [u8])>) -> Appearance {
        let xattrs = xattrs.into_iter().map(|(name, value)| (key(name.to_bytes()), key(value)));
        Appearance {
            changed: changed_at(stat),
            accessed: accessed_at(stat),
            modified: modified_at(stat),
            mode: stat.st_mode,
            owner: (stat.st_uid, stat.st_gid),
            xattrs: xattrs.collect(),
        }
    }

    /// Of an entry of a directory in RAM.
    fn in_ram(directory: BorrowedFd<'_>, name: &CStr, stat: &Stat) -> io::Result<Appearance> {
        let xattrs = xattrs_if_readable(directory, name)?;
        Ok(Appearance::of(stat, xattrs.iter().map(|(name, value)| (&**name, &**value))))
    }

    fn value(&self, name: &CStr) -> Option<u128> {
        let name = key(name.to_bytes());
        self.xattrs.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }
}

impl fmt::Display for Appearance {
    /// The rest of a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Appearance { changed, accessed, modified, mode, owner, xattrs } = self;
        for moment in [changed, accessed, modified] {
            write!(f, " {} {}", moment.0, moment.1)?;
        }
        write!(f, " {mode:o} {} {}", owner.0, owner.1)?;
        for (name, value) in xattrs {
            write!(f, " {name:032x}={value:032x}")?;
        }
        Ok(())
    }
}

type Xattrs = Vec<(CString, Vec<u8>)>;

/// The extended attributes of a directory given by its name. Of one that its owner may not read none are known: what it
/// has at the end is compared with what is on disk.
fn xattrs_if_readable(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<Xattrs> {
    match ondeck_transfer::xattrs_at(directory, name) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Xattrs::new()),
        // It was removed meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Xattrs::new()),
        // Some filesystems list what they don't give.
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(Xattrs::new()),
        other => other,
    }
}

/// The extended attributes of an open directory, which is opened up for a moment if its owner may not read it.
fn xattrs_of(directory: BorrowedFd<'_>) -> io::Result<Xattrs> {
    match ondeck_transfer::xattrs_of(directory) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let stat = fs::fstat(directory)?;
            let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
            if stat.st_uid != rustix::process::geteuid().as_raw() || mode.contains(Mode::RUSR) {
                return Err(error);
            }
            fs::fchmod(directory, mode | Mode::RUSR)?;
            let read = ondeck_transfer::xattrs_of(directory);
            fs::fchmod(directory, mode)?;
            read
        }
        other => other,
    }
}

/// How the names of an overlay's own extended attributes begin: those in the layer of an ordinary user are others than
/// in root's.
fn overlay_prefix() -> &'static [u8] {
    if rustix::process::geteuid().is_root() { b"trusted.overlay." } else { b"user.overlay." }
}

/// The name that an extended attribute in an overlay's layer has for the program; none if it is the overlay's own.
///
/// What a program calls like that is escaped by the kernel (Linux 6.7; before, it is refused with EOPNOTSUPP).
pub fn seen_through_overlay(name: &CStr) -> Option<CString> {
    let prefix = overlay_prefix();
    match name.to_bytes().strip_prefix(prefix) {
        None => Some(name.to_owned()),
        Some(rest) => CString::new([prefix, rest.strip_prefix(b"overlay.")?].concat()).ok(),
    }
}

/// Removes from an overlay's upper directory what was copied to it from the directory on disk and would be taken for a
/// mark of the overlay.
pub fn remove_marks(upper: BorrowedFd<'_>) -> io::Result<()> {
    for (name, _) in xattrs_of(upper)? {
        if name.to_bytes().starts_with(overlay_prefix()) {
            fs::fremovexattr(upper, &*name)?;
        }
    }
    Ok(())
}

/// What is remembered of a directory on disk as the program is shown it: about 100 bytes for each name of a file that has
/// several, 40 for each directory, and about 150 more if it is shown through an overlay.
#[derive(Clone, Debug, Default)]
pub struct Before {
    /// The inodes of the directories, the top included; none if nothing is known of them.
    inodes: Option<HashMap<u128, u64>>,
    linked: HashMap<u128, Linked>,
    directories: HashMap<u128, Appearance>,
    /// Whether an overlay would take something in it for its own.
    pub has_marks: bool,
    /// The first directory with an ACL that names users or groups other than the caller's own.
    pub acl_of_others: Option<Vec<u8>>,
}

/// Whether an ACL, as the kernel gives it (acl(5), linux/posix_acl_xattr.h), names another user or group than the caller's.
fn names_others(acl: &[u8]) -> bool {
    const USER: u16 = 0x02;
    const GROUP: u16 = 0x08;
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    acl.get(4..).unwrap_or_default().as_chunks::<8>().0.iter().any(|[tag, more, _, _, id @ ..]| {
        let id = u32::from_le_bytes(*id);
        match u16::from_le_bytes([*tag, *more]) {
            USER => id != uid,
            GROUP => id != gid,
            _ => false,
        }
    })
}

impl Before {
    /// Notes an entry.
    pub fn note(&mut self, visit: &Visit<'_>) -> io::Result<()> {
        if let Some(linked) = Linked::of(visit.stat) {
            self.linked.insert(key(visit.path), linked);
        }
        self.has_marks |= is_whiteout(visit.stat);
        if is_directory(visit.stat) {
            self.note_inode(visit.path, visit.stat);
            let xattrs = xattrs_if_readable(visit.dir, visit.name)?;
            self.note_acls(visit.path, &xattrs);
            let mut seen = Vec::new();
            for (name, value) in &xattrs {
                match seen_through_overlay(name) {
                    Some(name) => seen.push((name, &**value)),
                    None => self.has_marks = true,
                }
            }
            let seen = seen.iter().map(|(name, value)| (&**name, *value));
            self.directories.insert(key(visit.path), Appearance::of(visit.stat, seen));
        }
        Ok(())
    }

    fn note_inode(&mut self, path: &[u8], directory: &Stat) {
        self.inodes.get_or_insert_default().insert(key(path), directory.st_ino);
    }

    /// Whether another directory was at this path, or none.
    pub fn is_another(&self, path: &[u8], directory: &Stat) -> bool {
        self.inodes.as_ref().is_some_and(|inodes| inodes.get(&key(path)) != Some(&directory.st_ino))
    }

    fn note_acls(&mut self, path: &[u8], xattrs: &Xattrs) {
        let others = |(name, value): &(CString, Vec<u8>)| {
            name.to_bytes().starts_with(b"system.posix_acl_") && names_others(value)
        };
        if self.acl_of_others.is_none() && xattrs.iter().any(others) {
            self.acl_of_others = Some(path.to_vec());
        }
    }

    /// Forgets how the directories looked, which is known from RAM where all of them are copied there.
    pub fn without_directories(mut self) -> Before {
        self.directories = HashMap::new();
        self
    }

    /// Notes which one the directory itself is.
    pub fn note_top(&mut self, directory: BorrowedFd<'_>) -> io::Result<()> {
        self.note_inode(b"", &fs::fstat(directory)?);
        Ok(())
    }

    /// Notes the ACLs of the directory itself.
    pub fn note_acls_of_top(&mut self, directory: BorrowedFd<'_>) -> io::Result<()> {
        self.note_acls(b"", &ondeck_transfer::xattrs_of(directory)?);
        Ok(())
    }

    /// What is to be remembered of all that a directory holds, without what is `nested`.
    pub fn of(directory: BorrowedFd<'_>, nested: &[Vec<u8>]) -> Result<Before, (Vec<u8>, io::Error)> {
        let mut before = Before::default();
        before.note_top(directory).map_err(|error| (Vec::new(), error))?;
        survey(directory, &mut |visit| {
            if nested.iter().any(|nested| nested == visit.path) {
                return Ok(Descend::No);
            }
            before.note(visit).map(|()| Descend::Yes)
        })?;
        Ok(before)
    }

    /// The files with several names and the inodes of the directories below one, as far as it can be read. Without what is
    /// `nested`.
    pub fn in_short(directory: BorrowedFd<'_>, nested: &[Vec<u8>]) -> Result<Before, (Vec<u8>, io::Error)> {
        let mut before = Before::default();
        before.note_top(directory).map_err(|error| (Vec::new(), error))?;
        survey(directory, &mut |visit| {
            if nested.iter().any(|nested| nested == visit.path) {
                return Ok(Descend::No);
            }
            if let Some(linked) = Linked::of(visit.stat) {
                before.linked.insert(key(visit.path), linked);
            }
            if is_directory(visit.stat) {
                before.note_inode(visit.path, visit.stat);
            }
            Ok(Descend::Yes)
        })?;
        Ok(before)
    }
}

/// The device and the inode of a file.
pub type FileId = (u64, u64);

/// Inodes on disk with several names, one of which this run has given to something else, removed or made: that changes
/// their ctime for the other names, too. With the content that they had. All output directories of a run share it.
#[derive(Debug, Default)]
pub struct Loosened(Mutex<HashMap<FileId, Content>>);

impl Loosened {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<FileId, Content>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn has(&self, stat: &Stat) -> bool {
        self.lock().get(&(stat.st_dev, stat.st_ino)) == Some(&Content::of(stat))
    }

    /// If it has several names. Returns what is new then.
    fn add(&self, stat: &Stat) -> Option<(FileId, Content)> {
        if stat.st_nlink < 2 || is_directory(stat) {
            return None;
        }
        let added = ((stat.st_dev, stat.st_ino), Content::of(stat));
        let known = self.lock().insert(added.0, added.1);
        (known != Some(added.1)).then_some(added)
    }

    /// What a keeper that was killed had added.
    pub fn recall(&self, added: impl IntoIterator<Item = (FileId, Content)>) {
        self.lock().extend(added);
    }
}

/// The time by the clock of a directory's filesystem, and whether new files can be made in it at all.
///
/// An unnamed file is made and dropped; where the filesystem has none (NFS), a named one.
pub fn clock_of(dir: BorrowedFd<'_>) -> io::Result<Moment> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    match fs::openat(dir, c".", flags | OFlags::TMPFILE, mode) {
        Ok(file) => return Ok(changed_at(&fs::fstat(file)?)),
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::ISDIR) => {}
        Err(error) => return Err(error.into()),
    }
    let name = CString::new(format!(".ondeck-{}.probe", std::process::id()))?;
    let file = fs::openat(dir, &*name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    let stat = fs::fstat(file);
    fs::unlinkat(dir, &*name, AtFlags::empty())?;
    Ok(changed_at(&stat?))
}

/// The state of an entry right after it was copied into RAM.
struct Staged {
    inode: u64,
    changed: Moment,
    mode: u32,
    owner: (u32, u32),
    /// The checksum of a regular file's content.
    digest: Option<(Checksum, Digest)>,
}

impl Staged {
    fn of(stat: &Stat) -> Staged {
        Staged {
            inode: stat.st_ino,
            changed: changed_at(stat),
            mode: stat.st_mode,
            owner: (stat.st_uid, stat.st_gid),
            digest: None,
        }
    }
}

/// What an output directory held before the program saw it: about 100 bytes for each entry in RAM, and what is
/// remembered of the disk.
#[derive(Default)]
pub struct Baseline {
    /// What was in RAM.
    entries: HashMap<u128, Staged>,
    /// The directories in RAM, which are among the entries, too.
    directories: HashMap<u128, Appearance>,
    /// What is remembered of the disk.
    before: Arc<Before>,
    /// Of what kinds extended attributes can be in RAM: the beginnings of their names.
    held: Vec<&'static [u8]>,
}

/// How the names of those extended attributes begin that RAM can hold.
const KINDS: [&[u8]; 3] = [b"trusted.", b"user.", b"system.posix_acl_"];

/// Of what kinds the extended attributes of a directory in RAM can be: tmpfs has no `user.*` before Linux 6.6.
fn held_in(ram: BorrowedFd<'_>) -> Vec<&'static [u8]> {
    let [trusted, user, acls] = KINDS;
    let mut held = vec![trusted];
    let probe = c"user.ondeck-probe";
    if fs::fsetxattr(ram, probe, b"", fs::XattrFlags::empty()).is_ok() && fs::fremovexattr(ram, probe).is_ok()
    {
        held.push(user);
    }
    if fs::fgetxattr(ram, c"system.posix_acl_access", &mut [0_u8; 0]) != Err(Errno::OPNOTSUPP) {
        held.push(acls);
    }
    held
}

impl Baseline {
    /// Remembers `ram` itself, and with the manifest of its stage-in every entry below it.
    pub fn of(ram: BorrowedFd<'_>, staged: Option<&Path>, before: Arc<Before>) -> io::Result<Baseline> {
        let (mut entries, mut directories) = (HashMap::new(), HashMap::new());
        // First, because it changes when the directory was changed last.
        let held = held_in(ram);
        let root = fs::fstat(ram)?;
        entries.insert(key(b""), Staged::of(&root));
        let xattrs = xattrs_of(ram)?;
        let xattrs = xattrs.iter().map(|(name, value)| (&**name, &**value));
        directories.insert(key(b""), Appearance::of(&root, xattrs));
        if let Some(manifest) = staged {
            survey(ram, &mut |visit| {
                entries.insert(key(visit.path), Staged::of(visit.stat));
                if is_directory(visit.stat) {
                    let appearance = Appearance::in_ram(visit.dir, visit.name, visit.stat)?;
                    directories.insert(key(visit.path), appearance);
                }
                Ok(Descend::Yes)
            })
            .map_err(|(_, error)| error)?;
            for record in manifest::read(manifest)? {
                let record = record?;
                if let Some(entry) = entries.get_mut(&key(&record.path)) {
                    entry.digest = record.checksum;
                }
            }
            // Further names of a file have no checksum of their own.
            let by_inode: HashMap<u64, _> =
                entries.values().filter_map(|entry| Some((entry.inode, entry.digest?))).collect();
            for entry in entries.values_mut() {
                entry.digest = entry.digest.or_else(|| by_inode.get(&entry.inode).copied());
            }
        }
        Ok(Baseline { entries, directories, before, held })
    }

    /// If nothing is known but what was on disk.
    pub fn of_disk(before: Arc<Before>) -> Baseline {
        Baseline { before, ..Baseline::default() }
    }
}

/// The first line of a baseline that is kept in a file.
const BASELINE: &str = "# ondeck baseline 3";
/// The first line in the version before, which knew no inodes of directories on disk.
const BASELINE_2: &str = "# ondeck baseline 2";
/// The first line in the version before that, which knew neither directories' attributes nor files with several names.
const BASELINE_1: &str = "# ondeck baseline 1";

/// More bytes than a line of one has: the extended attributes of a directory are 67 bytes each, and the kernel lists at
/// most 64 KiB of names.
const LONGEST_LINE: u64 = 1 << 20;

impl Baseline {
    /// Keeps it in a file, for whoever brings the results home.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let partial = path.with_extension("partial");
        let mut file = io::BufWriter::new(std::fs::File::create(&partial)?);
        writeln!(file, "{BASELINE}")?;
        for (path, entry) in &self.entries {
            let Staged { inode, changed, mode, owner, digest } = entry;
            let digest = digest.map_or("-".to_owned(), |(kind, digest)| format!("{}:{digest}", kind.name()));
            writeln!(
                file,
                "{path:032x} {inode} {} {} {mode:o} {} {} {digest}",
                changed.0, changed.1, owner.0, owner.1
            )?;
        }
        for (path, directory) in &self.directories {
            writeln!(file, "directory {path:032x}{directory}")?;
        }
        for (path, Linked { inode, names, content }) in &self.before.linked {
            writeln!(file, "linked {path:032x} {inode} {names} {content}")?;
        }
        for (path, inode) in self.before.inodes.iter().flatten() {
            writeln!(file, "inode {path:032x} {inode}")?;
        }
        // Only of an overlay.
        for (path, directory) in &self.before.directories {
            writeln!(file, "shown {path:032x}{directory}")?;
        }
        for kind in &self.held {
            writeln!(file, "held {}", String::from_utf8_lossy(kind))?;
        }
        file.into_inner().map_err(io::IntoInnerError::into_error)?;
        std::fs::rename(&partial, path)
    }

    /// Reads one that was kept, also by the versions before.
    pub fn read(path: &Path) -> io::Result<Baseline> {
        let (mut entries, mut directories, mut before) = (HashMap::new(), HashMap::new(), Before::default());
        let mut held = Vec::new();
        read_lines(path, &[BASELINE, BASELINE_2, BASELINE_1], &mut |line| {
            if let Some(line) = line.strip_prefix("directory ") {
                directories.extend([parse_directory(line)?]);
            } else if let Some(line) = line.strip_prefix("linked ") {
                before.linked.extend([parse_linked(line)?]);
            } else if let Some(line) = line.strip_prefix("inode ") {
                let (path, inode) = line.split_once(' ')?;
                let path = u128::from_str_radix(path, 16).ok()?;
                before.inodes.get_or_insert_default().insert(path, inode.parse().ok()?);
            } else if let Some(line) = line.strip_prefix("shown ") {
                before.directories.extend([parse_directory(line)?]);
            } else if let Some(kind) = line.strip_prefix("held ") {
                held.push(*KINDS.iter().find(|known| **known == kind.as_bytes())?);
            } else {
                entries.extend([parse_entry(line)?]);
            }
            Some(())
        })?;
        Ok(Baseline { entries, directories, before: Arc::new(before), held })
    }

    /// Whether nothing was done to the top since, or it is not known.
    pub fn is_top_as_shown(&self, ram: BorrowedFd<'_>) -> io::Result<bool> {
        let Some(shown) = self.entries.get(&key(b"")) else { return Ok(true) };
        Ok(shown.changed == changed_at(&fs::fstat(ram)?))
    }

    /// Whether it has an entry.
    pub fn contains(&self, path: &[u8]) -> bool {
        self.entries.contains_key(&key(path))
    }

    /// Adds an entry as it was copied into RAM, with the checksum of a regular file's content.
    pub fn add(&mut self, path: &[u8], stat: &Stat, digest: Option<(Checksum, Digest)>) {
        self.entries.insert(key(path), Staged { digest, ..Staged::of(stat) });
    }

    /// Adds a directory as it was copied into RAM.
    pub fn add_directory(&mut self, path: &[u8], ram: BorrowedFd<'_>, stat: &Stat) -> io::Result<()> {
        self.add(path, stat, None);
        match Appearance::in_ram(ram, &CString::new(path)?, stat) {
            Ok(appearance) => {
                self.directories.insert(key(path), appearance);
            }
            // Deeper than a path can tell: its mode and owner are known.
            Err(error) if error.raw_os_error() == Some(libc::ENAMETOOLONG) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// What is remembered of the disk.
    pub fn before(&self) -> &Before {
        &self.before
    }

    /// Adds a file on disk that has several names.
    pub fn add_linked(&mut self, path: &[u8], linked: Linked) {
        Arc::make_mut(&mut self.before).linked.insert(key(path), linked);
    }
}

/// Reads a file of lines that somebody could have replaced. `take` says whether it understands a line.
fn read_lines(path: &Path, first: &[&str], take: &mut dyn FnMut(&str) -> Option<()>) -> io::Result<()> {
    let malformed = || io::Error::other(format!("{} is damaged, or no file of ours", path.display()));
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = std::fs::File::from(fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(malformed());
    }
    let mut file = io::BufReader::new(file);
    let mut line = String::new();
    let mut number = 0_u64;
    // No line without end is read.
    while file.by_ref().take(LONGEST_LINE).read_line(&mut line)? > 0 {
        let text = line.strip_suffix('\n').unwrap_or(&line);
        if number == 0 && !first.contains(&text) || number > 0 && take(text).is_none() {
            return Err(malformed());
        }
        number += 1;
        line.clear();
    }
    if number > 0 { Ok(()) } else { Err(malformed()) }
}

/// The first line of a file with [`Ours`].
const OURS: &str = "# ondeck ours 1";

/// Keeps what is this run's own in a file.
pub fn write_ours(path: &Path, ours: &Ours) -> io::Result<()> {
    let partial = path.with_extension("partial");
    let mut file = io::BufWriter::new(std::fs::File::create(&partial)?);
    writeln!(file, "{OURS}")?;
    for (path, (inode, changed)) in ours {
        writeln!(file, "{path:032x} {inode} {} {}", changed.0, changed.1)?;
    }
    file.into_inner().map_err(io::IntoInnerError::into_error)?;
    std::fs::rename(&partial, path)
}

/// Reads what was kept; nothing if nothing was.
pub fn read_ours(path: &Path) -> io::Result<Ours> {
    let mut ours = Ours::new();
    let read = read_lines(path, &[OURS], &mut |line| {
        let mut fields = line.split(' ');
        let path = u128::from_str_radix(fields.next()?, 16).ok()?;
        let inode = fields.next()?.parse().ok()?;
        ours.insert(path, (inode, (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?)));
        fields.next().is_none().then_some(())
    });
    match read {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(ours),
    }
}

fn parse_entry(line: &str) -> Option<(u128, Staged)> {
    let mut fields = line.split(' ');
    let path = u128::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.next()?.parse().ok()?;
    let changed = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let mode = u32::from_str_radix(fields.next()?, 8).ok()?;
    let owner = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let digest = match fields.next()? {
        "-" => None,
        text => {
            let (kind, digest) = text.split_once(':')?;
            let kinds = [Checksum::Xxh3, Checksum::Blake3, Checksum::None];
            let kind = kinds.into_iter().find(|known| known.name() == kind)?;
            Some((kind, Digest::from_hex(digest)?))
        }
    };
    fields.next().is_none().then_some((path, Staged { inode, changed, mode, owner, digest }))
}

fn parse_directory(line: &str) -> Option<(u128, Appearance)> {
    let mut fields = line.split(' ');
    let path = u128::from_str_radix(fields.next()?, 16).ok()?;
    let mut moment = || Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?));
    let (changed, accessed, modified) = (moment()?, moment()?, moment()?);
    let mode = u32::from_str_radix(fields.next()?, 8).ok()?;
    let owner = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let xattrs = fields.map(|field| {
        let (name, value) = field.split_once('=')?;
        Some((u128::from_str_radix(name, 16).ok()?, u128::from_str_radix(value, 16).ok()?))
    });
    let xattrs = xattrs.collect::<Option<_>>()?;
    Some((path, Appearance { changed, accessed, modified, mode, owner, xattrs }))
}

fn parse_linked(line: &str) -> Option<(u128, Linked)> {
    let mut fields = line.split(' ');
    let path = u128::from_str_radix(fields.next()?, 16).ok()?;
    let (inode, names) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((path, Linked { inode, names, content: Content::parse(fields)? }))
}

/// The hash of a path.
pub fn key(path: &[u8]) -> u128 {
    XxHash3_128::oneshot(path)
}

/// The path of an entry's directory.
pub fn parent_of(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(b"", |end| &path[..end])
}

/// The policy of one output directory.
pub struct Homecoming {
    /// How the program saw it.
    pub mechanism: Mechanism,
    /// When it was shown to the program, by its own filesystem's clock.
    pub since: Moment,
    /// What was copied into RAM beforehand.
    pub baseline: Baseline,
    /// The run's name, for files that are put beside others.
    pub id: String,
    /// Entries that belong to another of the run's directories, mounted inside this one.
    pub nested: Vec<Vec<u8>>,
    /// Whether the program still runs: then only closed files are copied and nothing is deleted.
    pub interim: AtomicBool,
    /// What this run itself put on disk.
    pub ours: Mutex<Ours>,
    /// Directories that this run itself made on disk, by hash of the path: what is in them is the program's, or came
    /// later.
    pub made: Mutex<HashSet<u128>>,
    /// Whether the source is what one of a RAM disk's servers has: what it lacks was not deleted by the program.
    pub salvage: bool,
    /// What this run itself has done to names of files that have several.
    pub loosened: Arc<Loosened>,
    /// Directories on disk, by hash of the path, that a keeper had entered and not completed when it was killed: their
    /// inodes, and when they were written last before it put anything into them.
    pub entered: Mutex<HashMap<u128, (u64, Moment)>>,
    /// Directories on disk, by hash of the path, that are not those that the program was shown there.
    pub others: Mutex<HashSet<u128>>,
    /// Where all this is written down, for one who has to go on with it.
    pub journal: Option<Journal>,
}

impl Homecoming {
    /// Whether someone else changed what stands at `path` on disk since the program was shown the directory.
    fn is_foreign(&self, path: &[u8], target: &Stat) -> bool {
        if changed_at(target) <= self.since && !self.is_in_another(path) {
            return false;
        }
        let ours = self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if ours.get(&key(path)) == Some(&(target.st_ino, changed_at(target))) {
            return false;
        }
        drop(ours);
        if self.loosened.has(target) {
            return false;
        }
        let linked = self.baseline.before.linked.get(&key(path));
        !linked.is_some_and(|linked| linked.has_only_other_names(target))
    }

    /// A directory on disk is about to be merged into, or emptied.
    fn note_if_another(&self, path: &[u8], target: &Stat) {
        if self.baseline.before.is_another(path, target) {
            self.others.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(key(path));
        }
    }

    /// Whether an entry stands in another directory than the one that the program was shown.
    fn is_in_another(&self, path: &[u8]) -> bool {
        self.others.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains(&key(parent_of(path)))
    }

    /// An entry that nobody else has changed is about to lose this name, or has got another one.
    fn loosen(&self, target: &Stat) {
        if let (Some((file, content)), Some(journal)) = (self.loosened.add(target), &self.journal) {
            journal.loosened(file, &content);
        }
    }

    /// When a directory on disk was written last, before this run put anything into it.
    fn entered_at(&self, path: &[u8], target: &Stat) -> Moment {
        let entered = self.entered.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match entered.get(&key(path)) {
            Some((inode, modified)) if *inode == target.st_ino => *modified,
            _ => modified_at(target),
        }
    }

    /// Whether nothing was done to the top of an output directory since the program was shown it.
    pub fn is_top_as_shown(&self, ram: BorrowedFd<'_>) -> io::Result<bool> {
        self.baseline.is_top_as_shown(ram)
    }

    fn is_ours(&self, path: &[u8]) -> bool {
        self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains_key(&key(path))
    }

    /// Whether an entry was on disk when the program was shown the directory, or was put there by this run.
    pub fn was_there(&self, path: &[u8]) -> bool {
        !self.is_beside(path)
            && (self.mechanism == Mechanism::Overlay
                || self.baseline.entries.contains_key(&key(path))
                || self.is_ours(path))
    }

    fn is_made(&self, path: &[u8]) -> bool {
        self.made.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains(&key(path))
    }

    /// A directory as the program was shown it.
    fn shown(&self, path: &[u8]) -> Option<&Appearance> {
        match self.mechanism {
            Mechanism::Overlay if !path.is_empty() => self.baseline.before.directories.get(&key(path)),
            _ => self.baseline.directories.get(&key(path)),
        }
    }

    /// The mode and the owner of a directory that the program was shown, or of what is on disk now.
    fn shown_rights(&self, path: &[u8], target: &Stat) -> (u32, (u32, u32)) {
        if let Some(shown) = self.shown(path) {
            return (shown.mode, shown.owner);
        }
        match self.baseline.entries.get(&key(path)) {
            Some(staged) => (staged.mode, staged.owner),
            None => (target.st_mode, (target.st_uid, target.st_gid)),
        }
    }

    /// When the program was shown a directory, by the clock of the RAM disk: what is later can have come about by itself.
    fn shown_at(&self, path: &[u8]) -> Option<Moment> {
        let path = if self.mechanism == Mechanism::Overlay { b"" } else { path };
        self.baseline.directories.get(&key(path)).map(|shown| shown.changed)
    }

    /// The time of the last writing that a directory gets, if not the one that it has by now.
    fn modified(&self, merged: &Merged<'_>) -> Option<Moment> {
        let left = modified_at(merged.source);
        let entered = self.entered_at(merged.path, merged.entered);
        let now = modified_at(merged.target);
        let wanted = match self.shown(merged.path) {
            // Bringing a file that was changed where it stands is no writing to its directory.
            Some(shown) if shown.modified == left => Some(entered),
            _ if left == entered => Some(entered),
            _ if self.interim.load(Relaxed) => None,
            // It came about by itself. Somebody else may have written to the directory later.
            Some(_) if self.came_by_itself(merged, left) => (left >= entered).then_some(left),
            Some(_) => Some(left),
            None => self.is_made(merged.path).then_some(left),
        };
        wanted.filter(|wanted| *wanted != now)
    }

    fn came_by_itself(&self, merged: &Merged<'_>, time: Moment) -> bool {
        self.shown_at(merged.path).is_some_and(|shown| shown <= time) && time <= changed_at(merged.source)
    }

    /// The time of the last reading, if the program has set it: one that can have come about by itself is left.
    fn accessed(&self, merged: &Merged<'_>) -> Option<Moment> {
        let left = accessed_at(merged.source);
        let shown = self.shown(merged.path)?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
        let set = left < self.shown_at(merged.path)? || left.0 > now.as_secs() as i64;
        (set && left != shown.accessed && left != accessed_at(merged.target)).then_some(left)
    }

    /// Whether an extended attribute that a directory in RAM does not have any more was removed by the program. An overlay
    /// leaves out what RAM can't hold when it copies a directory there, such as a filesystem's own.
    fn can_be_removed(&self, name: &CStr) -> bool {
        let name = name.to_bytes();
        let held = self.mechanism != Mechanism::Overlay
            || self.baseline.held.iter().any(|kind| name.starts_with(kind));
        held && !name.starts_with(b"security.")
    }

    /// What the program changed of a directory's extended attributes.
    fn changed_xattrs(&self, merged: &Merged<'_>) -> io::Result<Vec<(CString, Option<Vec<u8>>)>> {
        let shown = self.shown(merged.path);
        // What was kept by the version before does not tell.
        if shown.is_none() && self.baseline.contains(merged.path) {
            return Ok(Vec::new());
        }
        let left: Vec<(CString, Vec<u8>)> = xattrs_of(merged.source_dir)?
            .into_iter()
            .filter_map(|(name, value)| Some((self.xattr_name(&name)?, value)))
            .collect();
        let before = |name: &CStr| shown.and_then(|shown| shown.value(name));
        let was_any = shown.is_some_and(|shown| !shown.xattrs.is_empty());
        if left.is_empty() && !was_any {
            return Ok(Vec::new());
        }
        let theirs = xattrs_of(merged.target_dir)?;
        let removed = theirs.iter().filter(|(name, _)| {
            before(name).is_some() && self.can_be_removed(name) && !left.iter().any(|(kept, _)| kept == name)
        });
        let mut changes: Vec<_> = removed.map(|(name, _)| (name.clone(), None)).collect();
        for (name, value) in left {
            let same = theirs.iter().any(|(theirs, found)| *theirs == name && *found == value);
            if before(&name) != Some(key(&value)) && !same {
                changes.push((name, Some(value)));
            }
        }
        Ok(changes)
    }

    /// Whether a name is that of a version which was put beside someone else's.
    fn is_beside(&self, path: &[u8]) -> bool {
        path.ends_with(format!(".ondeck-{}", self.id).as_bytes())
    }

    /// Whether the program left an entry as it was staged in. Times don't tell: what is written to a file in RAM through
    /// a mapping need not change them, so the content is compared with the checksum that was taken then.
    fn is_as_staged(&self, path: &[u8], place: &Place<'_>) -> bool {
        let Some(staged) = self.baseline.entries.get(&key(path)) else { return false };
        if (staged.inode, staged.changed) != (place.source.st_ino, changed_at(place.source)) {
            return false;
        }
        if FileType::from_raw_mode(place.source.st_mode) != FileType::RegularFile {
            return true;
        }
        let Some((checksum, digest)) = staged.digest else { return false };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        fs::openat(place.source_dir, place.name, flags, Mode::empty()).is_ok_and(|file| {
            let size = place.source.st_size as u64;
            let mut buffer = vec![0; (size as usize).clamp(1, 1 << 20)];
            digest_of(file.as_fd(), size, checksum, &mut buffer).is_ok_and(|found| found == digest)
        })
    }

    /// Whether a name is a temporary one of a copy into RAM for this run that was interrupted.
    fn is_partial(&self, name: &[u8]) -> bool {
        name.starts_with(b".") && name.ends_with(format!(".ondeck-partial-{}", self.id).as_bytes())
    }

    fn beside(&self, name: &CStr) -> Action {
        let suffix = format!(".ondeck-{}", self.id);
        let mut beside = name.to_bytes().to_vec();
        // A name of full length is cut rather than refused: the message names both.
        beside.truncate(255 - suffix.len());
        beside.extend_from_slice(suffix.as_bytes());
        CString::new(beside).map_or(Action::Skip, Action::Beside)
    }
}

impl MergePolicy for Homecoming {
    fn entry(&self, place: &Place<'_>) -> Action {
        let path = place.path();
        if self.salvage && is_link_to(place.source) {
            return Action::Skip;
        }
        if self.nested.contains(&path) || self.is_partial(place.name.to_bytes()) {
            return Action::Skip;
        }
        let whiteout = self.mechanism == Mechanism::Overlay && is_whiteout(place.source);
        if self.interim.load(Relaxed) && (whiteout || is_open_for_writing(place)) {
            return Action::Skip;
        }
        if whiteout {
            return Action::Delete;
        }
        // Also into what was empty at first something may have been copied later.
        let staged = matches!(self.mechanism, Mechanism::Mirror | Mechanism::Bind);
        if staged && self.is_as_staged(&path, place) {
            return Action::Skip;
        }
        match place.target {
            Some(target) if self.is_foreign(&path, target) => self.beside(place.name),
            Some(target) => {
                self.loosen(target);
                Action::Copy
            }
            None => Action::Copy,
        }
    }

    fn directory(&self, path: &[u8], source: BorrowedFd<'_>, target: Option<&Stat>) -> DirectoryAction {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if self.nested.iter().any(|nested| nested == path) || self.is_partial(name) {
            return DirectoryAction::Skip;
        }
        if let Some(target) = target
            && FileType::from_raw_mode(target.st_mode) != FileType::Directory
            && self.is_foreign(path, target)
        {
            return DirectoryAction::Refuse(
                "someone else put another kind of entry there while the program ran; rename theirs and try again",
            );
        }
        if let Some(target) = target.filter(|target| is_directory(target)) {
            self.note_if_another(path, target);
        }
        if let (Some(journal), Some(target)) = (&self.journal, target) {
            journal.entered(key(path), target.st_ino, self.entered_at(path, target));
        }
        if target.is_none() {
            if let Some(journal) = &self.journal {
                journal.made(key(path));
            }
            self.made.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(key(path));
        }
        let delete = !self.interim.load(Relaxed)
            && match self.mechanism {
                // Bind: files that were copied out earlier and deleted by the program since.
                Mechanism::Mirror | Mechanism::Bind => true,
                // The top shows what is on disk, whatever it is marked with.
                Mechanism::Overlay => !path.is_empty() && is_opaque(source) || self.is_made(path),
                Mechanism::Disk => false,
            };
        DirectoryAction::Merge { delete, attributes: false }
    }

    fn emptying(&self, path: &[u8], target: &Stat) {
        self.note_if_another(path, target);
    }

    fn may_delete(&self, path: &[u8], target: &Stat) -> bool {
        if self.salvage {
            // Nothing but what an earlier attempt has left half-written.
            let file = FileType::from_raw_mode(target.st_mode) == FileType::RegularFile;
            return file
                && path.rsplit(|byte| *byte == b'/').next().is_some_and(|name| self.is_partial(name));
        }
        let directory = FileType::from_raw_mode(target.st_mode) == FileType::Directory;
        let may = match self.mechanism {
            // An overlay's mark says that the program deleted this very entry; a directory only goes if it is empty
            // by then.
            Mechanism::Overlay => !self.is_beside(path) && (directory || !self.is_foreign(path, target)),
            Mechanism::Mirror | Mechanism::Bind => {
                let known = !self.is_beside(path)
                    && (self.baseline.entries.contains_key(&key(path)) || self.is_ours(path));
                known && (directory || !self.is_foreign(path, target))
            }
            Mechanism::Disk => false,
        };
        if may {
            self.loosen(target);
        }
        may
    }

    fn xattr_name(&self, name: &CStr) -> Option<CString> {
        match self.mechanism {
            Mechanism::Overlay => seen_through_overlay(name),
            // A server's own notes.
            _ if self.salvage && name.to_bytes().starts_with(b"trusted.") => None,
            _ => Some(name.to_owned()),
        }
    }

    fn changes(&self, merged: &Merged<'_>) -> io::Result<Changes> {
        let user = rustix::process::geteuid();
        let is_owner = user.is_root() || user.as_raw() == merged.entered.st_uid;
        let mut changes = Changes::default();
        if is_owner && !self.salvage {
            changes.modified = self.modified(merged).map(time_of);
        }
        if self.interim.load(Relaxed) {
            return Ok(changes);
        }
        if is_owner {
            let (mode, owner) = self.shown_rights(merged.path, merged.entered);
            let (uid, gid) = (merged.source.st_uid, merged.source.st_gid);
            changes.owner = (user.is_root() && owner.0 != uid).then_some(uid);
            changes.group = (owner.1 != gid).then_some(gid);
            if mode != merged.source.st_mode {
                // The group of a directory that is shared stays that of what is made in it, unless the program says so.
                let told = if user.is_root()
                    || self.baseline.contains(merged.path)
                    || self.shown(merged.path).is_some()
                {
                    (mode ^ merged.source.st_mode) & 0o2000
                } else {
                    0
                };
                let shared = merged.source.st_mode & told | merged.entered.st_mode & !told & 0o2000;
                changes.mode = Some(merged.source.st_mode & 0o5777 | shared);
            }
        }
        if self.salvage {
            return Ok(changes);
        }
        changes.xattrs = self.changed_xattrs(merged)?;
        if is_owner {
            changes.accessed = self.accessed(merged).map(time_of);
        } else {
            // Whoever may write to a directory may set these; all else is for its owner.
            changes.xattrs.retain(|(name, _)| name.to_bytes().starts_with(b"user."));
        }
        Ok(changes)
    }

    fn may_open_up(&self) -> bool {
        // The program would see it, and may change the mode itself meanwhile.
        !self.interim.load(Relaxed)
    }

    fn opening_up(&self, side: Side, path: &[u8], stat: &Stat) {
        if let Some(journal) = &self.journal {
            journal.opening_up(side, path, stat.st_ino, stat.st_mode & 0o7777);
        }
    }

    fn placed(&self, path: &[u8], target: &Stat) {
        if let Some(journal) = &self.journal {
            journal.placed(key(path), target.st_ino, changed_at(target));
        }
        let mut ours = self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        ours.insert(key(path), (target.st_ino, changed_at(target)));
        drop(ours);
        self.entered.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&key(path));
        // A further name has changed the ctime for those that were placed before.
        self.loosen(target);
    }
}

/// Whether it is an overlay's mark for an entry that was deleted.
pub fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Gluster's mark that a file is on another server.
fn is_link_to(stat: &Stat) -> bool {
    let file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    file && stat.st_size == 0 && stat.st_mode & 0o7777 == 0o1000
}

fn is_opaque(dir: BorrowedFd<'_>) -> bool {
    let name =
        if rustix::process::geteuid().is_root() { c"trusted.overlay.opaque" } else { c"user.overlay.opaque" };
    let mut value = [0_u8; 4];
    fs::fgetxattr(dir, name, &mut value).is_ok_and(|length| length == 1 && value[0] == b'y')
}

/// Whether any process has the file open for writing or mapped for writing.
///
/// The kernel grants a read lease only if none has; it is given back at once.
fn is_open_for_writing(place: &Place<'_>) -> bool {
    if FileType::from_raw_mode(place.source.st_mode) != FileType::RegularFile {
        return false;
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let Ok(file) = fs::openat(place.source_dir, place.name, flags, Mode::empty()) else { return true };
    // SAFETY: fcntl on a descriptor that lives until the end of this function, with integer arguments only.
    unsafe {
        let leased = libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) == 0;
        if leased {
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK);
        }
        !leased
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acl_names_others_if_it_has_an_entry_of_a_user_or_group_that_is_not_the_callers() {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let acl = |entries: &[(u16, u32)]| {
            let mut value = 2_u32.to_le_bytes().to_vec();
            for (tag, id) in entries {
                value.extend([tag.to_le_bytes(), 7_u16.to_le_bytes()].concat());
                value.extend(id.to_le_bytes());
            }
            value
        };
        let none = u32::MAX;
        assert!(!names_others(&acl(&[(1, none), (2, uid), (4, none), (8, gid), (16, none), (32, none)])));
        assert!(names_others(&acl(&[(1, none), (2, uid + 1), (4, none)])));
        assert!(names_others(&acl(&[(1, none), (8, gid + 1)])));
        assert!(!names_others(b""));
    }

    #[test]
    fn a_baseline_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let staged = |inode, digest| Staged {
            inode,
            changed: (1_700_000_000, 999_999_999),
            mode: 0o100_644,
            owner: (20_001, 7),
            digest,
        };
        let digest = Some((Checksum::Xxh3, Checksum::Xxh3.of(b"content")));
        let entries = HashMap::from([(key(b""), staged(1, None)), (key(b"a\nb"), staged(u64::MAX, digest))]);
        let path = dir.path().join("0.baseline");
        let appearance = |xattrs| Appearance {
            changed: (3, 4),
            accessed: (-5, 6),
            modified: (7, 8),
            mode: 0o42_755,
            owner: (1, 2),
            xattrs,
        };
        let directories = HashMap::from([
            (key(b""), appearance(vec![])),
            (key(b"d"), appearance(vec![(1, u128::MAX), (u128::MAX, 0)])),
        ]);
        let linked = Linked { inode: u64::MAX, names: 3, content: Content::example() };
        let linked = HashMap::from([(key(b"l"), linked)]);
        let shown = HashMap::from([(key(b"s"), appearance(vec![(3, 4)]))]);
        let inodes = Some(HashMap::from([(key(b""), 2), (key(b"s"), u64::MAX)]));
        let before = Before {
            linked: linked.clone(),
            directories: shown.clone(),
            inodes: inodes.clone(),
            ..Before::default()
        };
        let held = vec![KINDS[0], KINDS[2]];
        Baseline { entries, directories: directories.clone(), before: Arc::new(before), held: held.clone() }
            .write(&path)
            .unwrap();
        let found = Baseline::read(&path).unwrap();
        assert_eq!((&found.directories, &found.before.linked), (&directories, &linked));
        assert_eq!((&found.before.directories, &found.held), (&shown, &held));
        assert_eq!(found.before.inodes, inodes);
        let found = found.entries;
        assert_eq!(found.len(), 2);
        let entry = &found[&key(b"a\nb")];
        assert_eq!(
            (entry.inode, entry.changed, entry.mode),
            (u64::MAX, (1_700_000_000, 999_999_999), 0o100_644)
        );
        assert_eq!((entry.owner, entry.digest), ((20_001, 7), digest));
        // What the version before has kept.
        let text = std::fs::read_to_string(&path).unwrap().replacen("baseline 3", "baseline 1", 1);
        let old = |line: &&str| {
            !["directory ", "linked ", "inode ", "shown ", "held "].iter().any(|new| line.starts_with(new))
        };
        std::fs::write(&path, text.lines().filter(old).map(|line| format!("{line}\n")).collect::<String>())
            .unwrap();
        let found = Baseline::read(&path).unwrap();
        assert!(found.contains(b"a\nb") && found.directories.is_empty() && found.before.linked.is_empty());
        assert!(found.before.inodes.is_none());
        let damaged = [
            "# ondeck baseline 1\n12 34",
            "# ondeck baseline 2\ndirectory 1 2",
            "# ondeck baseline 2\nheld x",
            "# ondeck baseline 3\ninode 12",
            "",
            &"x".repeat(2 << 20),
        ];
        for text in damaged {
            std::fs::write(&path, text).unwrap();
            assert!(Baseline::read(&path).is_err());
        }
        let ours = Ours::from([(key(b"a\nb"), (u64::MAX, (1_700_000_000, 999_999_999))), (1, (2, (-3, 4)))]);
        write_ours(&path, &ours).unwrap();
        assert_eq!(read_ours(&path).unwrap(), ours);
        assert!(read_ours(&dir.path().join("none")).unwrap().is_empty());
    }
}
