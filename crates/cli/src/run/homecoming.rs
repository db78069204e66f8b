//! Bringing results home: how the directory on disk becomes what the program saw, without losing what others wrote.
//!
//! The rule for conflicts needs no list of the directory's former state. At the start the clock of the target's own
//! filesystem is read; whatever on disk has changed since (its ctime is later) and was not put there by this run was
//! changed by someone else. It is kept: the program's version of such a file goes beside it as `NAME.ondeck-ID`,
//! and a file that the program deleted stays.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use ondeck_transfer::merge::{Action, DirectoryAction, MergePolicy, Place};
use ondeck_transfer::survey::{Descend, survey};
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use twox_hash::XxHash3_128;

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

type Moment = (i64, i64);

fn changed_at(stat: &Stat) -> Moment {
    (stat.st_ctime, stat.st_ctime_nsec as i64)
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

/// The state of a mirrored directory right after it was copied into RAM: 40 bytes for each entry.
#[derive(Default)]
pub struct Baseline(HashMap<u128, (u64, Moment, u32)>);

impl Baseline {
    /// Remembers every entry below `ram`.
    pub fn of(ram: BorrowedFd<'_>) -> Result<Baseline, (Vec<u8>, io::Error)> {
        let mut entries = HashMap::new();
        survey(ram, &mut |visit| {
            entries.insert(key(visit.path), (visit.stat.st_ino, changed_at(visit.stat), visit.stat.st_mode));
            Ok(Descend::Yes)
        })?;
        Ok(Baseline(entries))
    }
}

fn key(path: &[u8]) -> u128 {
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
    /// What this run itself put on disk: inode and ctime by the hash of the path.
    pub ours: Mutex<HashMap<u128, (u64, Moment)>>,
    /// Old names of files that the program renamed and that this run gave their new names: by hash of the path.
    pub moved: Mutex<HashSet<u128>>,
}

impl Homecoming {
    /// Whether someone else changed what stands at `path` on disk since the program was shown the directory.
    fn is_foreign(&self, path: &[u8], target: &Stat) -> bool {
        if changed_at(target) <= self.since {
            return false;
        }
        // Both names are the same inode, and what is done to it under its new name shows under the old one.
        if self.moved.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains(&key(path)) {
            return false;
        }
        let ours = self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        ours.get(&key(path)) != Some(&(target.st_ino, changed_at(target)))
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

    /// Whether a name is that of a version which was put beside someone else's.
    fn is_beside(&self, path: &[u8]) -> bool {
        path.ends_with(format!(".ondeck-{}", self.id).as_bytes())
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

impl Homecoming {
    /// Does on disk what the overlay recorded as renames of existing directories (and of files whose data it did not
    /// copy): the upper layer says where their content was, not what it is.
    ///
    /// Everything that moves goes to a temporary name first, deepest first, because one move's origin may lie in
    /// another's. It can be repeated after a failure: what has moved already is found at its temporary or final place.
    pub fn apply_redirects(
        &self,
        upper: BorrowedFd<'_>,
        disk: BorrowedFd<'_>,
    ) -> Result<(), (Vec<u8>, io::Error)> {
        const REDIRECT: &CStr = c"trusted.overlay.redirect";
        let mut moves: Vec<(Vec<u8>, Vec<u8>, bool)> = Vec::new();
        let mut origins: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        survey(upper, &mut |visit| {
            let parent_length = visit.path.len() - visit.name.to_bytes().len();
            let parent = &visit.path[..parent_length.saturating_sub(1)];
            let parent_origin = origins.get(parent).cloned().unwrap_or_else(|| parent.to_vec());
            let directory = FileType::from_raw_mode(visit.stat.st_mode) == FileType::Directory;
            let origin = match mark_at(visit.dir, visit.name, REDIRECT) {
                Some(value) if value.starts_with(b"/") => value[1..].to_vec(),
                Some(value) => join(&parent_origin, &value),
                None => join(&parent_origin, visit.name.to_bytes()),
            };
            // A file's redirect counts only while its data are still below; otherwise it is a leftover.
            let counts = directory || has_mark_at(visit.dir, visit.name, c"trusted.overlay.metacopy");
            if counts && mark_at(visit.dir, visit.name, REDIRECT).is_some() && origin != visit.path {
                moves.push((origin.clone(), visit.path.to_vec(), directory));
            }
            if directory && origin != visit.path {
                origins.insert(visit.path.to_vec(), origin);
            }
            Ok(Descend::Yes)
        })?;
        let depth = |path: &[u8]| path.iter().filter(|b| **b == b'/').count();
        let temporary =
            |origin: &[u8]| format!(".ondeck-{}.moved-{:032x}", self.id, key(origin)).into_bytes();
        moves.sort_by_key(|(origin, _, _)| std::cmp::Reverse(depth(origin)));
        for (origin, new, directory) in &moves {
            let failed = |error: Errno| (new.clone(), io::Error::from(error));
            let from = open_parent(disk, origin, false).map_err(failed)?;
            let to = CString::new(temporary(origin)).map_err(|error| (new.clone(), error.into()))?;
            if let Some((dir, name)) = from {
                let moved = if *directory {
                    fs::renameat_with(&dir, &*name, disk, &*to, RenameFlags::NOREPLACE)
                } else {
                    self.link_aside(origin, &dir, &name, disk, &to)
                };
                match moved {
                    Ok(()) | Err(Errno::NOENT | Errno::EXIST) => {}
                    Err(error) => return Err(failed(error)),
                }
            }
        }
        moves.sort_by_key(|(_, new, _)| depth(new));
        for (origin, new, _) in &moves {
            let failed = |error: Errno| (new.clone(), io::Error::from(error));
            let from = CString::new(temporary(origin)).map_err(|error| (new.clone(), error.into()))?;
            let Some((dir, name)) = open_parent(disk, new, true).map_err(failed)? else { continue };
            match fs::renameat_with(disk, &*from, &dir, &*name, RenameFlags::NOREPLACE) {
                Ok(()) => {
                    if let Ok(stat) = fs::statat(&dir, &*name, AtFlags::SYMLINK_NOFOLLOW) {
                        self.placed(new, &stat);
                        if self.is_ours(origin) {
                            // The rename changed the ctime that a linked file's old name shares.
                            self.placed(origin, &stat);
                        }
                    }
                }
                // Moved by an earlier attempt, or the origin is gone from disk.
                Err(Errno::NOENT) => {}
                Err(Errno::EXIST) => {
                    // What the program had replaced. If someone else has written into it, its removal fails and the
                    // message names it.
                    let flags = AtFlags::REMOVEDIR;
                    let old = CString::new(temporary(new)).map_err(|error| (new.clone(), error.into()))?;
                    fs::renameat(&dir, &*name, disk, &*old).map_err(failed)?;
                    fs::renameat(disk, &*from, &dir, &*name).map_err(failed)?;
                    if fs::unlinkat(disk, &*old, AtFlags::empty()).is_err()
                        && fs::unlinkat(disk, &*old, flags).is_err()
                    {
                        let path = format!("/proc/self/fd/{}/{}", disk.as_raw_fd(), old.to_string_lossy());
                        std::fs::remove_dir_all(Path::new(&path)).map_err(|error| (new.clone(), error))?;
                    }
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }

    /// Gives a file whose data the overlay did not copy a second name, and remembers that its old one may go.
    fn link_aside(
        &self,
        origin: &[u8],
        dir: &OwnedFd,
        name: &CStr,
        disk: BorrowedFd<'_>,
        to: &CStr,
    ) -> Result<(), Errno> {
        let before = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let foreign = self.is_foreign(origin, &before);
        fs::linkat(dir, name, disk, to, AtFlags::empty())?;
        if !foreign {
            self.moved.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(key(origin));
        }
        Ok(())
    }
}

impl MergePolicy for Homecoming {
    fn entry(&self, place: &Place<'_>) -> Action {
        let path = place.path();
        if self.nested.contains(&path) {
            return Action::Skip;
        }
        let whiteout = self.mechanism == Mechanism::Overlay && is_whiteout(place.source);
        if self.interim.load(Relaxed) && (whiteout || is_open_for_writing(place)) {
            return Action::Skip;
        }
        if whiteout {
            return Action::Delete;
        }
        if self.mechanism == Mechanism::Mirror
            && let Some((inode, changed, _)) = self.baseline.0.get(&key(&path))
            && (*inode, *changed) == (place.source.st_ino, changed_at(place.source))
        {
            return Action::Skip;
        }
        if self.mechanism == Mechanism::Overlay
            && FileType::from_raw_mode(place.source.st_mode) == FileType::RegularFile
            && has_mark_at(place.source_dir, place.name, c"trusted.overlay.metacopy")
        {
            return Action::AttributesOnly;
        }
        match place.target {
            Some(target) if self.is_foreign(&path, target) => self.beside(place.name),
            _ => Action::Copy,
        }
    }

    fn directory(&self, path: &[u8], source: BorrowedFd<'_>, target: Option<&Stat>) -> DirectoryAction {
        if self.nested.iter().any(|nested| nested == path) {
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
        let delete = !self.interim.load(Relaxed)
            && match self.mechanism {
                Mechanism::Mirror => true,
                // Files that were copied out earlier and deleted by the program since.
                Mechanism::Bind => true,
                Mechanism::Overlay => is_opaque(source),
                Mechanism::Disk => false,
            };
        // The mode that the program gave a directory counts, if the directory is ours to change. Its times follow
        // from what is put into it.
        let own = rustix::process::geteuid();
        let attributes = match (fs::fstat(source), target) {
            (Ok(source), Some(target)) => {
                let mode_changed = match self.mechanism {
                    Mechanism::Mirror => {
                        self.baseline.0.get(&key(path)).is_some_and(|(_, _, mode)| *mode != source.st_mode)
                    }
                    Mechanism::Overlay => source.st_mode != target.st_mode,
                    _ => false,
                };
                mode_changed && !path.is_empty() && (own.is_root() || own.as_raw() == target.st_uid)
            }
            _ => false,
        };
        DirectoryAction::Merge { delete, attributes }
    }

    fn may_delete(&self, path: &[u8], target: &Stat) -> bool {
        let directory = FileType::from_raw_mode(target.st_mode) == FileType::Directory;
        match self.mechanism {
            // An overlay's mark says that the program deleted this very entry; a directory only goes if it is empty
            // by then.
            Mechanism::Overlay => directory || !self.is_foreign(path, target),
            Mechanism::Mirror | Mechanism::Bind => {
                let known =
                    !self.is_beside(path) && (self.baseline.0.contains_key(&key(path)) || self.is_ours(path));
                known && (directory || !self.is_foreign(path, target))
            }
            Mechanism::Disk => false,
        }
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

    fn placed(&self, path: &[u8], target: &Stat) {
        let mut ours = self.ours.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        ours.insert(key(path), (target.st_ino, changed_at(target)));
    }
}

fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

fn is_opaque(dir: BorrowedFd<'_>) -> bool {
    [c"trusted.overlay.opaque", c"user.overlay.opaque"].into_iter().any(|name| {
        let mut value = [0_u8; 4];
        fs::fgetxattr(dir, name, &mut value).is_ok_and(|length| length == 1 && value[0] == b'y')
    })
}

fn has_mark_at(dir: BorrowedFd<'_>, name: &CStr, mark: &CStr) -> bool {
    mark_at(dir, name, mark).is_some()
}

fn mark_at(dir: BorrowedFd<'_>, name: &CStr, mark: &CStr) -> Option<Vec<u8>> {
    let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
    path.extend_from_slice(name.to_bytes());
    let path = CString::new(path).ok()?;
    let mut value = vec![0; 4096];
    let length = fs::lgetxattr(&*path, mark, &mut value).ok()?;
    value.truncate(length);
    Some(value)
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

fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    if parent.is_empty() { name.to_vec() } else { [parent, b"/", name].concat() }
}

/// Opens the directory that holds `path`, making missing ones if asked; `None` if one is missing.
fn open_parent(root: BorrowedFd<'_>, path: &[u8], make: bool) -> Result<Option<(OwnedFd, CString)>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut dir = fs::openat(root, c".", flags, Mode::empty())?;
    let mut names: Vec<&[u8]> = path.split(|b| *b == b'/').collect();
    let last = CString::new(names.pop().unwrap_or_default()).map_err(|_| Errno::INVAL)?;
    for name in names {
        let name = CString::new(name).map_err(|_| Errno::INVAL)?;
        if make {
            match fs::mkdirat(&dir, &*name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error),
            }
        }
        dir = match fs::openat(dir.as_fd(), &*name, flags, Mode::empty()) {
            Ok(next) => next,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
    }
    Ok(Some((dir, last)))
}
