//! Bringing results home: how the directory on disk becomes what the program saw, without losing what others wrote.
//!
//! The rule for conflicts needs no list of the directory's former state. At the start the clock of the target's own
//! filesystem is read; whatever on disk has changed since (its ctime is later) and was not put there by this run was
//! changed by someone else. It is kept: the program's version of such a file goes beside it as `NAME.ondeck-ID`,
//! and a file that the program deleted stays.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::io::{self, BufRead, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use ondeck_transfer::checksum::{Checksum, Digest};
use ondeck_transfer::manifest;
use ondeck_transfer::merge::{Action, DirectoryAction, MergePolicy, Place, Side};
use ondeck_transfer::survey::{Descend, survey};
use ondeck_transfer::verify::digest_of;
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat};
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

/// What changes when something is written to a file.
fn written(stat: &Stat) -> (i64, Moment) {
    (stat.st_size, (stat.st_mtime, stat.st_mtime_nsec as i64))
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

/// What an output directory held in RAM before the program saw it: about 100 bytes for each entry.
#[derive(Default)]
pub struct Baseline(HashMap<u128, Staged>);

impl Baseline {
    /// Remembers `ram` itself, and with the manifest of its stage-in every entry below it.
    pub fn of(ram: BorrowedFd<'_>, staged: Option<&Path>) -> io::Result<Baseline> {
        let mut entries = HashMap::new();
        entries.insert(key(b""), Staged::of(&fs::fstat(ram)?));
        if let Some(manifest) = staged {
            survey(ram, &mut |visit| {
                entries.insert(key(visit.path), Staged::of(visit.stat));
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
        Ok(Baseline(entries))
    }
}

/// The first line of a baseline that is kept in a file.
const BASELINE: &str = "# ondeck baseline 1";

/// More bytes than a line of one has.
const LONGEST_LINE: u64 = 1024;

impl Baseline {
    /// Keeps it in a file, for whoever brings the results home.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let partial = path.with_extension("partial");
        let mut file = io::BufWriter::new(std::fs::File::create(&partial)?);
        writeln!(file, "{BASELINE}")?;
        for (path, entry) in &self.0 {
            let Staged { inode, changed, mode, owner, digest } = entry;
            let digest = digest.map_or("-".to_owned(), |(kind, digest)| format!("{}:{digest}", kind.name()));
            writeln!(
                file,
                "{path:032x} {inode} {} {} {mode:o} {} {} {digest}",
                changed.0, changed.1, owner.0, owner.1
            )?;
        }
        file.into_inner().map_err(io::IntoInnerError::into_error)?;
        std::fs::rename(&partial, path)
    }

    /// Reads one that was kept.
    pub fn read(path: &Path) -> io::Result<Baseline> {
        let mut entries = HashMap::new();
        read_lines(path, BASELINE, &mut |line| {
            let (path, entry) = parse_entry(line)?;
            entries.insert(path, entry);
            Some(())
        })?;
        Ok(Baseline(entries))
    }

    /// Whether it has an entry.
    pub fn contains(&self, path: &[u8]) -> bool {
        self.0.contains_key(&key(path))
    }

    /// Adds an entry as it was copied into RAM, with the checksum of a regular file's content.
    pub fn add(&mut self, path: &[u8], stat: &Stat, digest: Option<(Checksum, Digest)>) {
        self.0.insert(key(path), Staged { digest, ..Staged::of(stat) });
    }
}

/// Reads a file of lines that somebody could have replaced. `take` says whether it understands a line.
fn read_lines(path: &Path, first: &str, take: &mut dyn FnMut(&str) -> Option<()>) -> io::Result<()> {
    let malformed = || io::Error::other(format!("{} is damaged, or no file of ours", path.display()));
    let mut file = io::BufReader::new(std::fs::File::open(path)?);
    let mut line = String::new();
    let mut number = 0_u64;
    // No line without end is read.
    while file.by_ref().take(LONGEST_LINE).read_line(&mut line)? > 0 {
        let text = line.strip_suffix('\n').unwrap_or(&line);
        if number == 0 && text != first || number > 0 && take(text).is_none() {
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
    let read = read_lines(path, OURS, &mut |line| {
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

/// The hash of a path.
pub fn key(path: &[u8]) -> u128 {
    XxHash3_128::oneshot(path)
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
    /// Inodes on disk with several names, one of which this run has given to something else or removed: that changes their
    /// ctime for the other names, too. With the size and the time of the last writing that they had.
    pub loosened: Mutex<HashMap<u64, (i64, Moment)>>,
    /// Where all this is written down, for one who has to go on with it.
    pub journal: Option<Journal>,
}

impl Homecoming {
    /// Whether someone else changed what stands at `path` on disk since the program was shown the directory.
    fn is_foreign(&self, path: &[u8], target: &Stat) -> bool {
        if changed_at(target) <= self.since {
            return false;
        }
        let ours = self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if ours.get(&key(path)) == Some(&(target.st_ino, changed_at(target))) {
            return false;
        }
        let loosened = self.loosened.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        loosened.get(&target.st_ino) != Some(&written(target))
    }

    /// An entry that nobody else has changed is about to lose this name.
    fn loosen(&self, target: &Stat) {
        if target.st_nlink > 1 && FileType::from_raw_mode(target.st_mode) != FileType::Directory {
            let mut loosened = self.loosened.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let (size, time) = written(target);
            if let Some(journal) = &self.journal {
                journal.loosened(target.st_ino, size, time);
            }
            loosened.insert(target.st_ino, (size, time));
        }
    }

    fn is_ours(&self, path: &[u8]) -> bool {
        self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains_key(&key(path))
    }

    /// Whether an entry was on disk when the program was shown the directory, or was put there by this run.
    pub fn was_there(&self, path: &[u8]) -> bool {
        !self.is_beside(path)
            && (self.mechanism == Mechanism::Overlay
                || self.baseline.0.contains_key(&key(path))
                || self.is_ours(path))
    }

    fn is_made(&self, path: &[u8]) -> bool {
        self.made.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains(&key(path))
    }

    /// Whether the program changed an existing directory's mode or owner, and the directory is ours to change. Its
    /// times follow from what is put into it.
    fn attributes_changed(&self, path: &[u8], source: BorrowedFd<'_>, target: &Stat) -> bool {
        let user = rustix::process::geteuid();
        let Ok(now) = fs::fstat(source) else { return false };
        if !user.is_root() && user.as_raw() != target.st_uid {
            return false;
        }
        let before = match self.baseline.0.get(&key(path)) {
            Some(staged) => (staged.mode, staged.owner),
            // Of an overlay only the root was looked at; an ordinary user's is never of another owner.
            None => (target.st_mode, (target.st_uid, target.st_gid)),
        };
        before != (now.st_mode, (now.st_uid, now.st_gid))
    }

    /// Whether a name is that of a version which was put beside someone else's.
    fn is_beside(&self, path: &[u8]) -> bool {
        path.ends_with(format!(".ondeck-{}", self.id).as_bytes())
    }

    /// Whether the program left an entry as it was staged in. Times don't tell: what is written to a file in RAM through
    /// a mapping need not change them, so the content is compared with the checksum that was taken then.
    fn is_as_staged(&self, path: &[u8], place: &Place<'_>) -> bool {
        let Some(staged) = self.baseline.0.get(&key(path)) else { return false };
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
                Mechanism::Overlay => is_opaque(source) || self.is_made(path),
                Mechanism::Disk => false,
            };
        let attributes = target.is_some_and(|target| self.attributes_changed(path, source, target));
        DirectoryAction::Merge { delete, attributes }
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
                let known =
                    !self.is_beside(path) && (self.baseline.0.contains_key(&key(path)) || self.is_ours(path));
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
        let bytes = name.to_bytes();
        for prefix in [&b"trusted.overlay."[..], b"user.overlay."] {
            if let Some(rest) = bytes.strip_prefix(prefix) {
                // An overlay escapes the marks of an overlay inside it; everything else is its own bookkeeping.
                let inner = rest.strip_prefix(b"overlay.")?;
                return CString::new([prefix, inner].concat()).ok();
            }
        }
        Some(name.to_owned())
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
    }
}

fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Gluster's mark that a file is on another server.
fn is_link_to(stat: &Stat) -> bool {
    let file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    file && stat.st_size == 0 && stat.st_mode & 0o7777 == 0o1000
}

fn is_opaque(dir: BorrowedFd<'_>) -> bool {
    [c"trusted.overlay.opaque", c"user.overlay.opaque"].into_iter().any(|name| {
        let mut value = [0_u8; 4];
        fs::fgetxattr(dir, name, &mut value).is_ok_and(|length| length == 1 && value[0] == b'y')
    })
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
        Baseline(entries).write(&path).unwrap();
        let found = Baseline::read(&path).unwrap().0;
        assert_eq!(found.len(), 2);
        let entry = &found[&key(b"a\nb")];
        assert_eq!(
            (entry.inode, entry.changed, entry.mode),
            (u64::MAX, (1_700_000_000, 999_999_999), 0o100_644)
        );
        assert_eq!((entry.owner, entry.digest), ((20_001, 7), digest));
        for text in ["# ondeck baseline 1\n12 34", "", &"x".repeat(1 << 20)] {
            std::fs::write(&path, text).unwrap();
            assert!(Baseline::read(&path).is_err());
        }
        let ours = Ours::from([(key(b"a\nb"), (u64::MAX, (1_700_000_000, 999_999_999))), (1, (2, (-3, 4)))]);
        write_ours(&path, &ours).unwrap();
        assert_eq!(read_ours(&path).unwrap(), ours);
        assert!(read_ours(&dir.path().join("none")).unwrap().is_empty());
    }
}
