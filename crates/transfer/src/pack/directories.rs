//! Where members go: the directories of the target, always reached from its root and never through a symlink.
//!
//! A directory that the target has not is built under a temporary name until the archive is unpacked, and everything
//! in it gets its own name at once, because nobody looks into it yet. In a directory that was there before, every
//! entry is made under a temporary name of its own.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags};
use rustix::io::Errno;
use twox_hash::XxHash3_128;

use super::header::Attributes;
use super::trust::Trust;
use crate::Ownership;
use crate::acl::bits_without;
use crate::attributes::{self, ACL_ACCESS, ACL_DEFAULT, is_directory};
use crate::dir::{OPEN_DIRECTORY, join, partial_name};
use crate::error::{During, Fault};

/// The longest name that Linux has.
const MOST_NAME: usize = 255;
/// Paths longer than the first are rare; of all such that are kept, more bytes than the second are an attack on our memory.
const LONG: usize = 1 << 10;
const MOST_LONG: usize = 64 << 20;

/// A directory of the target.
pub(super) struct TargetDirectory {
    /// Its path below the target's root as it is on disk now.
    disk: Vec<u8>,
    /// We made it, under a temporary name or in one that has such: nobody looks into it yet.
    pub fresh: bool,
    /// Whether new entries inherit an ACL that they should not have.
    pub hands_down_acl: bool,
    /// The permissions that this ACL leaves to what a stranger puts here; all without one.
    pub most: u32,
    /// The permissions that are left to the directory itself, when it is a stranger's, by the ACL above it.
    limit: u32,
    /// It was there before us: its owner, mode, ACLs and extended attributes are nothing that an archive decides on.
    existed: bool,
    /// What the archive says of it, once that was read.
    pub attributes: OnceLock<(Attributes, Option<String>)>,
    /// The mode it gets when the archive says nothing, or had before.
    plain_mode: Option<Mode>,
}

/// The directories that were met, by their path in the archive. They take about half a kilobyte each.
pub(super) struct TargetDirectories<'a> {
    root: BorrowedFd<'a>,
    known: HashMap<Vec<u8>, Arc<TargetDirectory>>,
    /// Where the archive has a symlink: the hashes of the paths, which may be long and many.
    symlinks: HashSet<u128>,
    /// Bytes of long paths.
    long: usize,
    /// In the order in which they were made: a directory after the one that holds it.
    met: Vec<VisitedDirectory>,
    opened: LastOpened,
    umask: Mode,
    trust: Trust,
}

struct VisitedDirectory {
    directory: Arc<TargetDirectory>,
    path: Vec<u8>,
    partial: bool,
}

/// The directory that was opened last: members of one directory stand together.
#[derive(Default)]
pub(super) struct LastOpened(Option<(Vec<u8>, OwnedFd)>);

impl LastOpened {
    /// Opens a directory of the target.
    pub fn open<'a>(
        &'a mut self,
        root: BorrowedFd<'a>,
        directory: &TargetDirectory,
    ) -> Result<BorrowedFd<'a>, Fault> {
        self.open_path(root, &directory.disk)
    }

    fn open_path<'a>(&'a mut self, root: BorrowedFd<'a>, disk: &[u8]) -> Result<BorrowedFd<'a>, Fault> {
        if disk.is_empty() {
            return Ok(root);
        }
        if self.0.as_ref().is_none_or(|(path, _)| path != disk) {
            let fd = open_beneath(root, disk).during("opening its directory")?;
            self.0 = Some((disk.to_vec(), fd));
        }
        match &self.0 {
            Some((_, fd)) => Ok(fd.as_fd()),
            None => Ok(root),
        }
    }
}

impl<'a> TargetDirectories<'a> {
    /// `made`: the root was just made, closed, and gets this mode if the archive says nothing of it.
    pub fn new(root: BorrowedFd<'a>, made: Option<Mode>, umask: Mode, trust: Trust) -> Self {
        let inherited = attributes::default_bits(root);
        let directory = Arc::new(TargetDirectory {
            disk: Vec::new(),
            fresh: false,
            hands_down_acl: inherited.is_some(),
            most: inherited.unwrap_or(0o777),
            limit: made.map_or(0o777, |mode| mode.as_raw_mode()),
            existed: made.is_none(),
            attributes: OnceLock::new(),
            plain_mode: made,
        });
        let mut known = HashMap::new();
        known.insert(Vec::new(), directory.clone());
        let met = vec![VisitedDirectory { directory, path: Vec::new(), partial: false }];
        TargetDirectories {
            root,
            known,
            symlinks: HashSet::new(),
            long: 0,
            met,
            opened: LastOpened::default(),
            umask,
            trust,
        }
    }

    /// The directory of this path, made if the target has none, with all above it. `listed` says that the archive
    /// has it as a member.
    pub fn at(&mut self, path: &[u8], listed: bool) -> Result<Arc<TargetDirectory>, Fault> {
        // From the longest part that is known downwards; not recursive, because a path can have half a million parts.
        let mut from = path.len();
        let mut directory = loop {
            match self.known.get(&path[..from]) {
                Some(directory) => break directory.clone(),
                None if self.symlinks.contains(&hash(&path[..from])) => return Err(through_symlink()),
                None => from = path[..from].iter().rposition(|b| *b == b'/').unwrap_or(0),
            }
        };
        while from < path.len() {
            let start = if from == 0 { 0 } else { from + 1 };
            let end =
                path[start..].iter().position(|b| *b == b'/').map_or(path.len(), |length| start + length);
            directory =
                self.make(&directory, &path[..end], &path[start..end], listed && end == path.len())?;
            from = end;
        }
        Ok(directory)
    }

    fn make(
        &mut self,
        parent: &TargetDirectory,
        path: &[u8],
        name: &[u8],
        listed: bool,
    ) -> Result<Arc<TargetDirectory>, Fault> {
        const ACTION: &str = "making the directory";
        self.keep(path)?;
        let dir = self.opened.open(self.root, parent)?;
        let name = CString::new(name).during(ACTION)?;
        let existing = match fs::statat(dir, &*name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(Fault::new(ACTION, error)),
        };
        let (mut partial, mut plain_mode, mut inherited, mut limit) = (false, None, None, 0o777);
        let mut on_disk = name.clone();
        match existing {
            Some(stat) if is_directory(&stat) => {
                let fd = fs::openat(dir, &*name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
                inherited = attributes::default_bits(fd.as_fd());
                // One of ours that we may not write to (a finished copy of a read-only directory) is made writable
                // until it is completed.
                let user = rustix::process::geteuid();
                if stat.st_mode & 0o700 != 0o700 && user.as_raw() == stat.st_uid && !user.is_root() {
                    let mode = stat.st_mode & 0o7777;
                    fs::fchmod(&fd, Mode::from_raw_mode(mode | 0o700)).during(ACTION)?;
                    plain_mode = Some(Mode::from_raw_mode(mode));
                }
            }
            Some(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => {
                return Err(through_symlink());
            }
            Some(_) => return Err(Fault::new(ACTION, Errno::NOTDIR)),
            None => {
                partial = !parent.fresh;
                if partial {
                    on_disk = partial_name(&name);
                    // What an interrupted run left may be anything.
                    remove_tree(dir, &on_disk, 0).during("removing what an earlier run left")?;
                }
                // Closed while it is built.
                fs::mkdirat(dir, &*on_disk, Mode::RWXU).during(ACTION)?;
                if partial || !listed {
                    let fd = fs::openat(dir, &*on_disk, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
                    let plain = self::plain_mode(fd.as_fd(), self.umask).during(ACTION)?;
                    plain_mode = (!listed).then_some(plain);
                    limit = plain.as_raw_mode();
                }
            }
        }
        let directory = Arc::new(TargetDirectory {
            disk: join(&parent.disk, on_disk.to_bytes()),
            fresh: parent.fresh || partial,
            hands_down_acl: inherited.is_some(),
            most: inherited.unwrap_or(0o777),
            limit,
            existed: existing.is_some(),
            attributes: OnceLock::new(),
            plain_mode,
        });
        self.known.insert(path.to_vec(), directory.clone());
        self.met.push(VisitedDirectory { directory: directory.clone(), path: path.to_vec(), partial });
        Ok(directory)
    }

    /// Whether one more path is kept in memory until the end.
    pub fn keep(&mut self, path: &[u8]) -> Result<(), Fault> {
        if path.len() > LONG {
            if self.long + path.len() > MOST_LONG {
                let why = "too many paths of the archive are longer than 1 KiB, to be kept in memory";
                return Err(Fault::message("unpacking it", why));
            }
            self.long += path.len();
        }
        Ok(())
    }

    /// Whether a member that is no directory may have this path. A symlink closes it for what comes later.
    pub fn claim(&mut self, path: &[u8], symlink: bool) -> Result<(), Fault> {
        if self.known.contains_key(path) {
            return Err(Fault::message("unpacking it", "the archive has a directory of this name, too"));
        }
        if symlink {
            self.symlinks.insert(hash(path));
        }
        Ok(())
    }

    /// Gives all directories their attributes and names, the deepest first. Returns how many the archive listed.
    pub fn complete(
        mut self,
        privilege: &attributes::Privilege,
        failed: &mut dyn FnMut(&[u8], Fault),
    ) -> u64 {
        let mut listed = 0;
        for VisitedDirectory { directory, path, partial } in std::mem::take(&mut self.met).into_iter().rev() {
            let done = self.finish(&directory, privilege);
            listed += u64::from(directory.attributes.get().is_some());
            let named = if partial { self.give_name(&path, &directory) } else { Ok(()) };
            if let Err(fault) = done.and(named) {
                failed(&path, fault);
            }
        }
        listed
    }

    fn finish(
        &mut self,
        directory: &TargetDirectory,
        privilege: &attributes::Privilege,
    ) -> Result<(), Fault> {
        if directory.attributes.get().is_none() && directory.plain_mode.is_none() {
            return Ok(());
        }
        // Not through `opened`: every directory comes once here, and its parent is asked for right after.
        let fd;
        let dir = if directory.disk.is_empty() {
            self.root
        } else {
            fd = open_beneath(self.root, &directory.disk).during("opening its directory")?;
            fd.as_fd()
        };
        if let Some((wanted, lost)) = directory.attributes.get() {
            let have = fs::fstat(dir).during("reading its attributes")?;
            let mut want = wanted.of(&have);
            let (mut ownership, mut xattrs) = (self.trust.ownership(), &wanted.xattrs[..]);
            if directory.existed {
                let mode = directory.plain_mode.map_or(have.st_mode & 0o7777, |mode| mode.as_raw_mode());
                want.st_mode = have.st_mode & libc::S_IFMT | mode;
                (ownership, xattrs) = (Ownership::Inherit, &[]);
            } else if let Trust::Umask(_) = self.trust {
                want.st_mode &= libc::S_IFMT | directory.limit;
            }
            attributes::apply(dir, &have, &want, xattrs, ownership, privilege)?;
            if let Some(why) = lost
                && !directory.existed
            {
                return Err(lost_acl(why));
            }
        } else if let Some(mode) = directory.plain_mode {
            fs::fchmod(dir, mode).during("setting its mode")?;
        }
        Ok(())
    }

    fn give_name(&mut self, path: &[u8], directory: &TargetDirectory) -> Result<(), Fault> {
        let (parent, temporary) = split(&directory.disk);
        let name = CString::new(split(path).1).during("giving it its name")?;
        let temporary = CString::new(temporary).during("giving it its name")?;
        let dir = self.opened.open_path(self.root, parent)?;
        fs::renameat(dir, &*temporary, dir, &*name).during("giving it its name")
    }

    /// Removes the directories that have no name yet.
    pub fn abandon(mut self) {
        for VisitedDirectory { directory, partial, .. } in std::mem::take(&mut self.met) {
            if directory.existed
                && let Some(mode) = directory.plain_mode
                && let Ok(dir) = self.opened.open_path(self.root, &directory.disk)
            {
                let _ = fs::fchmod(dir, mode);
            }
            let (parent, temporary) = split(&directory.disk);
            if partial
                && let Ok(dir) = self.opened.open_path(self.root, parent)
                && let Ok(temporary) = CString::new(temporary)
            {
                // What can't be removed now is removed by the next run.
                let _ = remove_tree(dir, &temporary, 0);
            }
        }
    }
}

impl Attributes {
    /// As the attributes of an entry that has just been made.
    pub fn of(&self, made: &fs::Stat) -> fs::Stat {
        let mut stat = *made;
        stat.st_mode = made.st_mode & libc::S_IFMT | self.mode;
        stat.st_uid = self.uid;
        stat.st_gid = self.gid;
        stat.st_mtime = self.mtime.0 as _;
        stat.st_mtime_nsec = self.mtime.1 as _;
        stat
    }
}

pub(super) fn lost_acl(why: &str) -> Fault {
    Fault::message("it was unpacked, but not all of its access control list", why)
}

fn through_symlink() -> Fault {
    Fault::message("unpacking it", "its path leads through a symbolic link")
}

/// A path of an archive without its harmless oddities: dots and double slashes.
///
/// # Errors
/// Why nothing may be unpacked there.
pub(super) fn checked(path: &[u8]) -> Result<Vec<u8>, Fault> {
    let refused = |why| Err(Fault::message("unpacking it", why));
    if path.starts_with(b"/") {
        return refused("its path is absolute");
    }
    let mut clean: Vec<u8> = Vec::with_capacity(path.len());
    for name in path.split(|b| *b == b'/') {
        match name {
            b"" | b"." => continue,
            b".." => return refused("its path leads upwards (`..`)"),
            _ if name.len() > MOST_NAME => return refused("a name in its path is longer than 255 bytes"),
            _ if name.contains(&0) => return refused("its path holds a zero byte"),
            _ => {}
        }
        if !clean.is_empty() {
            clean.push(b'/');
        }
        clean.extend_from_slice(name);
    }
    if clean.len() > super::index::MOST_PATH {
        return refused("its path is longer than 16 KiB");
    }
    Ok(clean)
}

/// Stands for a path among many. Two that have the same by an attacker's work refuse one of their own entries.
pub(super) fn hash(path: &[u8]) -> u128 {
    XxHash3_128::oneshot(path)
}

/// A path's directory and name.
pub(super) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

/// The mode that a directory gets which was just made, closed, and of which the archive says nothing. What it inherited is
/// not the archive's, and is dropped before it is handed down; but it opens the directory to nobody whom a default ACL
/// would keep out.
pub(super) fn plain_mode(made: BorrowedFd<'_>, umask: Mode) -> Result<Mode, Errno> {
    let inherited = attributes::acl_of(made, ACL_DEFAULT)?.map_or(0o777, |acl| bits_without(&acl));
    let _ = fs::fremovexattr(made, ACL_DEFAULT);
    let _ = fs::fremovexattr(made, ACL_ACCESS);
    let group = fs::fstat(made)?.st_mode & 0o2000;
    Ok(Mode::from_raw_mode(group | 0o777 & inherited & !umask.as_raw_mode()))
}

/// Opens a directory below another, never through a symlink, whatever the length of its path.
fn open_beneath(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    match fs::openat2(
        root,
        path,
        OPEN_DIRECTORY,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
    ) {
        // NAMETOOLONG: longer than PATH_MAX. NOSYS, PERM: openat2 is unknown or filtered by a container's seccomp.
        // AGAIN: something was renamed meanwhile.
        Err(Errno::NAMETOOLONG | Errno::NOSYS | Errno::PERM | Errno::AGAIN) => {}
        other => return other,
    }
    let mut dir: Option<OwnedFd> = None;
    for name in path.split(|b| *b == b'/') {
        let at = dir.as_ref().map_or(root, |fd| fd.as_fd());
        dir = Some(fs::openat(at, name, OPEN_DIRECTORY, Mode::empty())?);
    }
    dir.ok_or(Errno::NOENT)
}

/// Removes an entry with all it holds; what is not there need not be removed.
fn remove_tree(dir: BorrowedFd<'_>, name: &CStr, depth: usize) -> Result<(), Errno> {
    /// A level needs a descriptor, 4 KiB of heap and some stack.
    const DEEPEST: usize = 4096;
    match fs::unlinkat(dir, name, AtFlags::empty()) {
        // PERM is what POSIX says for a directory.
        Err(Errno::ISDIR | Errno::PERM) if depth < DEEPEST => {}
        Err(Errno::NOENT) => return Ok(()),
        other => return other,
    }
    let inner = fs::openat(dir, name, OPEN_DIRECTORY, Mode::empty())?;
    let mut buffer = Box::new_uninit_slice(4 << 10);
    let mut entries = RawDir::new(&inner, &mut buffer as &mut [MaybeUninit<u8>]);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            match remove_tree(inner.as_fd(), entry.file_name(), depth + 1) {
                // It had its final mode already when its run was interrupted.
                Err(Errno::ACCESS) => {
                    fs::fchmod(&inner, Mode::RWXU)?;
                    remove_tree(inner.as_fd(), entry.file_name(), depth + 1)?;
                }
                other => other?,
            }
        }
    }
    fs::unlinkat(dir, name, AtFlags::REMOVEDIR)
}

/// How a file is made: never what is there, never through a symlink.
pub(super) const CREATE: OFlags =
    OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_that_stay_inside_are_taken() {
        for (path, clean) in
            [(&b"./"[..], &b""[..]), (b"a/b", b"a/b"), (b"./a//b/./c/", b"a/b/c"), (b"..a", b"..a")]
        {
            assert_eq!(checked(path).unwrap(), clean);
        }
        for path in [&b"/etc/passwd"[..], b"..", b"a/../b", b"../x", b"a/..", b"a\0b"] {
            assert!(checked(path).is_err(), "{path:?}");
        }
    }
}
