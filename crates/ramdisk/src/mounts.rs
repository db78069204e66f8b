//! Showing directories of the RAM disk at the paths that a program already uses.
//!
//! All of these act on the mount namespace of the calling process; [`crate::namespace::Namespaces::inside`] brings
//! them to the right one.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_bind,
    mount_change, mount_remount, move_mount, open_tree, unmount,
};

use crate::EngineError;

/// A path where something can be shown: absolute and plain.
///
/// # Errors
/// [`EngineError::Refused`].
pub fn check_path(path: &Path) -> Result<(), EngineError> {
    let plain = path.is_absolute()
        && path.components().count() > 1
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !plain {
        return Err(EngineError::Refused(format!(
            "{} is no place for a RAM disk: name an absolute path without `..`",
            path.display()
        )));
    }
    Ok(())
}

/// A directory that will be mounted over: opened, and known to be the one that is meant.
///
/// Mounting goes through the descriptor, so that no symlink or other directory can be put in its place in between.
pub struct Target(OwnedFd);

impl Target {
    /// Opens the directory at `path`, which must be the one that `expected` was opened on (if given).
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if it is another directory.
    pub fn open(path: &Path, expected: Option<BorrowedFd<'_>>) -> io::Result<Target> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        Target::checked(fd, expected)
    }

    /// Opens the directory at an absolute path none of whose components is a symlink; nothing if it is missing.
    ///
    /// # Errors
    /// The kernel's; `ELOOP` if there is a symlink.
    pub fn open_plain(path: &Path) -> io::Result<Option<Target>> {
        match open_without_symlinks(path) {
            Ok(fd) => Ok(Some(Target(fd))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The same. It is made (mode 0755) if only its last component is missing; returns whether it was.
    ///
    /// # Errors
    /// The kernel's; `ELOOP` if there is a symlink.
    pub fn open_or_make(path: &Path) -> io::Result<(Target, bool)> {
        if let Some(target) = Target::open_plain(path)? {
            return Ok((target, false));
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Errno::INVAL.into());
        };
        let parent = open_without_symlinks(parent)?;
        let made = match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => true,
            // Somebody else was quicker; so it is theirs.
            Err(Errno::EXIST) => false,
            Err(error) => return Err(error.into()),
        };
        let fd = rustix::fs::openat(&parent, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
        Ok((Target(fd), made))
    }

    fn checked(fd: OwnedFd, expected: Option<BorrowedFd<'_>>) -> io::Result<Target> {
        if let Some(expected) = expected {
            let (found, expected) = (rustix::fs::fstat(&fd)?, rustix::fs::fstat(expected)?);
            if (found.st_dev, found.st_ino) != (expected.st_dev, expected.st_ino) {
                return Err(Errno::STALE.into());
            }
        }
        Ok(Target(fd))
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

/// How directories are opened to mount on them.
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn open_without_symlinks(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(rustix::fs::CWD, path, DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

/// Shows the directory `source` at `target`. A source that [`make_read_only`] was called on stays read-only there.
///
/// # Errors
/// The kernel's.
pub fn bind(source: &Path, target: &Target) -> io::Result<()> {
    Ok(mount_bind(source, target.path())?)
}

/// Mounts a directory over itself, read-only.
///
/// # Errors
/// The kernel's.
pub fn make_read_only(directory: &Path) -> io::Result<()> {
    mount_bind(directory, directory)?;
    remount_read_only(directory)
}

/// Makes a bind mount read-only (and nosuid, nodev).
///
/// # Errors
/// The kernel's.
pub fn remount_read_only(directory: &Path) -> io::Result<()> {
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    Ok(mount_remount(directory, flags, c"")?)
}

/// Keeps mounts inside a mount from appearing in its copies, and the other way round.
///
/// # Errors
/// The kernel's.
pub fn make_private(at: &Path) -> io::Result<()> {
    Ok(mount_change(at, MountPropagationFlags::PRIVATE)?)
}

/// The flags of a descriptor that only names a directory.
const NAME_ONLY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Opens a directory by a path that may have symlinks, but none of the kernel's own as in `/proc/self/fd`.
///
/// # Errors
/// The kernel's.
pub fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(rustix::fs::CWD, path, NAME_ONLY, Mode::empty(), resolve)?)
}

/// Opens a directory by a path without any symlink.
///
/// # Errors
/// The kernel's; `ELOOP` if there is one.
pub fn open_plainly(path: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS;
    Ok(rustix::fs::openat2(rustix::fs::CWD, path, NAME_ONLY, Mode::empty(), resolve)?)
}

/// Opens a directory below another one, on the same mount and without any symlink.
///
/// # Errors
/// The kernel's; `ELOOP` if there is a symlink, `EXDEV` if something is mounted on the way.
pub fn open_beneath(directory: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    Ok(rustix::fs::openat2(directory, path, NAME_ONLY, Mode::empty(), resolve)?)
}

/// The path that leads to an open directory now. That of a removed one ends in ` (deleted)`.
///
/// # Errors
/// The kernel's.
pub fn path_of(fd: BorrowedFd<'_>) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// The number of the mount that a descriptor was opened on, as in mountinfo.
///
/// # Errors
/// The kernel's.
pub fn mount_of(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("/proc/self/fdinfo tells no mnt_id"))
}

/// A directory of a filesystem, ready to be shown somewhere: a mount that is nowhere yet (open_tree(2)).
pub struct Tree(OwnedFd);

impl Tree {
    /// From an open directory. It has the flags of the mount that the directory was opened on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(directory: BorrowedFd<'_>) -> io::Result<Tree> {
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        Ok(Tree(open_tree(directory, c"", flags)?))
    }

    /// The same of a file or a directory, with what is mounted below it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of_all(entry: BorrowedFd<'_>) -> io::Result<Tree> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH
            | OpenTreeFlags::AT_RECURSIVE;
        Ok(Tree(open_tree(entry, c"", flags)?))
    }

    /// Mounts it over an open directory.
    ///
    /// # Errors
    /// The kernel's.
    pub fn attach(&self, target: BorrowedFd<'_>) -> io::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        Ok(move_mount(&self.0, c"", target, c"", flags)?)
    }

    /// Its number in mountinfo once it is mounted.
    ///
    /// # Errors
    /// The kernel's.
    pub fn id(&self) -> io::Result<u64> {
        mount_of(self.0.as_fd())
    }

    /// Takes it away again, wherever it is by now.
    ///
    /// # Errors
    /// The kernel's. One that is mounted nowhere is fine.
    pub fn detach(&self) -> io::Result<()> {
        match unmount(format!("/proc/self/fd/{}", self.0.as_raw_fd()), UnmountFlags::DETACH) {
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// How taking away one mount ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenAway {
    /// It is gone.
    Yes,
    /// Files on it are open, or something is mounted in it.
    Busy,
    /// Another directory or mount is at its path now.
    Elsewhere,
}

/// Takes away this very mount. Whoever can rename directories above it, or put symlinks there, can't have another one
/// taken away.
///
/// # Errors
/// The kernel's.
pub fn take_away(mount: &Mount, lazily: bool) -> io::Result<TakenAway> {
    match Above::of(mount) {
        Ok(above) => above.take_away(mount, lazily),
        Err(error) => elsewhere(error),
    }
}

fn elsewhere(error: io::Error) -> io::Result<TakenAway> {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(TakenAway::Elsewhere),
        _ if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => Ok(TakenAway::Elsewhere),
        _ => Err(error),
    }
}

/// The directory above a mount, open. A descriptor of the mount itself would keep it busy; and whatever is mounted later on
/// the way to it, it is reached from here.
pub struct Above(OwnedFd);

impl Above {
    /// The one that the path of a mount leads to now, without symlinks.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(mount: &Mount) -> io::Result<Above> {
        let parent = mount.at.parent().ok_or(Errno::INVAL)?;
        Ok(Above(open_plainly(parent)?))
    }

    /// The root of the mount, by the name that it has in the table, and that name.
    fn root<'a>(&self, mount: &'a Mount) -> io::Result<Option<(OwnedFd, &'a OsStr)>> {
        let name = mount.at.file_name().ok_or(Errno::INVAL)?;
        let root = rustix::fs::openat(&self.0, name, NAME_ONLY | OFlags::NOFOLLOW, Mode::empty())?;
        Ok((mount_of(root.as_fd())? == mount.id).then_some((root, name)))
    }

    /// Whether the mount is reached from here.
    ///
    /// # Errors
    /// The kernel's.
    pub fn leads_to(&self, mount: &Mount) -> io::Result<bool> {
        Ok(self.root(mount)?.is_some())
    }

    /// Takes the mount away.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take_away(&self, mount: &Mount, lazily: bool) -> io::Result<TakenAway> {
        let (root, name) = match self.root(mount) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(TakenAway::Elsewhere),
            Err(error) => return elsewhere(error),
        };
        let unmounted = if lazily {
            unmount(format!("/proc/self/fd/{}", root.as_raw_fd()), UnmountFlags::DETACH)
        } else {
            // It would keep it busy. In its directory, the kernel lets nobody rename what something is mounted on.
            drop(root);
            let directory = PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()));
            unmount(directory.join(name), UnmountFlags::NOFOLLOW)
        };
        match unmounted {
            Ok(()) => Ok(TakenAway::Yes),
            Err(Errno::BUSY) => Ok(TakenAway::Busy),
            Err(Errno::INVAL | Errno::NOENT) => Ok(TakenAway::Elsewhere),
            Err(error) => Err(error.into()),
        }
    }
}

/// The parts of an overlay: `lower` stays as it is, what is written goes to `upper`. `upper` and `work` must be
/// empty directories of the same RAM disk.
pub struct Overlay<'a> {
    /// The directory on disk.
    pub lower: &'a Path,
    /// Where changes go.
    pub upper: &'a Path,
    /// Scratch space of the kernel.
    pub work: &'a Path,
    /// Whether this is root outside of any user namespace: then other users and groups can be represented.
    pub root: bool,
}

impl Overlay<'_> {
    /// Mounts it at `target`, which is usually `lower` itself.
    ///
    /// # Errors
    /// The kernel's.
    pub fn mount(&self, target: &Target) -> io::Result<()> {
        let mut options = Vec::new();
        for (key, path) in [("lowerdir=", self.lower), ("upperdir=", self.upper), ("workdir=", self.work)] {
            if !options.is_empty() {
                options.push(b',');
            }
            options.extend_from_slice(key.as_bytes());
            escape(path, &mut options);
        }
        options.extend_from_slice(if self.root {
            // Nothing that refers to the directory on disk by name: what is written there meanwhile could change it.
            b",redirect_dir=off,metacopy=off,index=off"
        } else {
            // The only flavour that an ordinary user may mount.
            b",userxattr"
        });
        let options = CString::new(options)?;
        mount("ondeck", target.path(), "overlay", MountFlags::NOSUID | MountFlags::NODEV, &*options)?;
        Ok(())
    }
}

/// Commas separate mount options and colons separate layers; both can stand in a path.
fn escape(path: &Path, options: &mut Vec<u8>) {
    for byte in path.as_os_str().as_bytes() {
        if matches!(byte, b',' | b':' | b'\\') {
            options.push(b'\\');
        }
        options.push(*byte);
    }
}

/// Takes a mount away; `Ok(false)` while files on it are open.
///
/// # Errors
/// The kernel's, other than "busy". A path that is no mount is fine: it is what was wanted.
pub fn unmount_unless_busy(target: &Path) -> io::Result<bool> {
    match unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Takes a mount away at once; whoever has files open on it keeps them.
///
/// # Errors
/// The kernel's. A path that is no mount is fine.
pub fn detach(target: &Path) -> io::Result<()> {
    match unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Takes away everything that is mounted at a path, one above the other, at once.
///
/// # Errors
/// The kernel's. A path that is no mount, or is not there, is fine.
pub fn detach_all(target: &Path) -> io::Result<()> {
    // Each detach takes one mount; nobody stacks this many on purpose.
    for _ in 0..64 {
        match unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::BUSY.into())
}

/// One line of /proc/self/mountinfo (proc(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Its number, which may be given to another mount once it is gone.
    pub id: u64,
    /// The number of the mount that it is in.
    pub parent: u64,
    /// The number of the device, which is also the number of a FUSE connection.
    pub device: (u32, u32),
    /// The directory of the filesystem that is shown.
    pub root: PathBuf,
    /// Where it is shown.
    pub at: PathBuf,
    /// The filesystem's type.
    pub kind: String,
    /// What it was mounted from. Who mounts it can say what they like here.
    pub source: String,
    /// Who mounted it, where the kernel tells: of FUSE, which any user may mount.
    pub user: Option<u32>,
}

impl Mount {
    /// Whether an ordinary user has mounted it.
    pub fn is_a_users(&self) -> bool {
        self.user.is_some_and(|uid| uid != 0)
    }
}

/// What is mounted, in the order in which it was.
///
/// # Errors
/// If /proc/self/mountinfo can't be read.
pub fn mounted() -> io::Result<Vec<Mount>> {
    read_table(Path::new("/proc/self/mountinfo"))
}

/// What a process sees mounted.
///
/// # Errors
/// If its mountinfo can't be read.
pub fn mounted_of(pid: i32) -> io::Result<Vec<Mount>> {
    read_table(&PathBuf::from(format!("/proc/{pid}/mountinfo")))
}

/// The mount that a path leads to which has no symlinks: from the root down, through what is mounted on each directory, and
/// on that. By the table alone: no filesystem on the way is asked.
pub fn seen_at<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let on = |parent: u64, at: &Path| mounts.iter().find(|mount| mount.parent == parent && mount.at == at);
    let is_known = |id: u64| mounts.iter().any(|mount| mount.id == id);
    let mut seen = mounts.iter().find(|mount| mount.at == Path::new("/") && !is_known(mount.parent))?;
    let mut prefixes: Vec<&Path> = path.ancestors().collect();
    prefixes.reverse();
    for prefix in prefixes {
        while let Some(above) = on(seen.id, prefix).filter(|above| above.id != seen.id) {
            seen = above;
        }
    }
    Some(seen)
}

fn read_table(path: &Path) -> io::Result<Vec<Mount>> {
    let text = std::fs::read(path)?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse_mount).collect())
}

fn parse_mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let device = std::str::from_utf8(fields.next()?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let (root, at) = (unescape(fields.next()?), unescape(fields.next()?));
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let (kind, source) = (String::from_utf8_lossy(rest.next()?).into_owned(), unescape(rest.next()?));
    let mut options = rest.next().unwrap_or_default().split(|byte| *byte == b',');
    let user = options.find_map(|option| option.strip_prefix(b"user_id="));
    Some(Mount {
        id,
        parent,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: PathBuf::from(root),
        at: PathBuf::from(at),
        kind,
        source: source.to_string_lossy().into_owned(),
        // A user that is not understood is not root.
        user: user.map(|uid| str::from_utf8(uid).ok().and_then(|uid| uid.parse().ok()).unwrap_or(u32::MAX)),
    })
}

/// Blanks, tabs, newlines and backslashes stand as three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        if *first == b'\\'
            && let Some(code) = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok())
            && let Ok(byte) = u8::from_str_radix(code, 8)
        {
            plain.push(byte);
            rest = &tail[3..];
        } else {
            plain.push(*first);
            rest = tail;
        }
    }
    OsString::from_vec(plain)
}

/// The mounts at or below a directory, the innermost and latest first.
///
/// # Errors
/// If /proc/self/mountinfo can't be read.
pub fn mounted_below(directory: &Path) -> io::Result<Vec<Mount>> {
    let mut found: Vec<Mount> =
        mounted()?.into_iter().filter(|mount| mount.at.starts_with(directory)).collect();
    found.reverse();
    Ok(found)
}

/// Makes every access to a FUSE filesystem fail at once, also those that hang. It can't be undone.
///
/// Killing the filesystem's process does not do the same: a child of it may have the connection open, and hang in it.
/// Where the control filesystem of FUSE is not mounted, it is for a moment, in the new directory `scratch`.
///
/// # Errors
/// The kernel's; a connection that is gone is fine.
pub fn abort_fuse(device: (u32, u32), scratch: &Path) -> io::Result<()> {
    const CONTROL: &str = "/sys/fs/fuse/connections";
    let abort = |control: &Path| match std::fs::write(control.join(format!("{}/abort", device.1)), "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    if mounted()?.iter().any(|mount| mount.at == Path::new(CONTROL) && mount.kind == "fusectl") {
        return abort(Path::new(CONTROL));
    }
    std::fs::DirBuilder::new().mode(0o700).create(scratch)?;
    let aborted = mount("ondeck", scratch, "fusectl", MountFlags::NOSUID | MountFlags::NODEV, None)
        .map_err(io::Error::from)
        .and_then(|()| abort(scratch));
    detach_all(scratch)?;
    std::fs::remove_dir(scratch)?;
    aborted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_understood() {
        let line = b"36 35 0:33 /data /mnt\\040two rw,noatime shared:1 master:2 - fuse.glusterfs /a\\134b rw,user_id=0";
        let mount = parse_mount(line).unwrap();
        assert_eq!((mount.id, mount.parent, mount.device), (36, 35, (0, 33)));
        assert_eq!((mount.root.to_str().unwrap(), mount.at.to_str().unwrap()), ("/data", "/mnt two"));
        assert_eq!((mount.kind.as_str(), mount.source.as_str()), ("fuse.glusterfs", "/a\\b"));
        assert!(!mount.is_a_users() && mount.user == Some(0));
        // Its name is the user's choice.
        let line = b"36 35 0:33 / /mnt rw - fuse.sshfs ondeck:job@1 rw,user_id=1000,group_id=0";
        assert!(parse_mount(line).unwrap().is_a_users());
        assert!(!parse_mount(b"36 35 0:33 / /mnt rw - tmpfs ondeck:job@1 rw,size=4k").unwrap().is_a_users());
        assert!(mounted().unwrap().iter().any(|mount| mount.at == Path::new("/proc")));
    }
}
