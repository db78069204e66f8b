//! The backing directory, reached with the identity of the cache's user.
//!
//! Every thread that calls anything here has assumed that identity ([`Backing::assume`]). Everything is reached by bare names
//! from directories that were opened before, never through a symbolic link.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashlink::LruCache;
use ondeck_transfer::credentials::User;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, StatxFlags, XattrFlags};
use rustix::io::Errno;
use twox_hash::XxHash3_128;

use crate::acl;
use crate::descriptors::share;
use crate::message::{Ino, Space, Time, Xattrs};

/// Directories that are kept open.
const OPEN_DIRECTORIES: usize = 512;

/// Files that are kept open for reading.
const OPEN_FILES: usize = 256;

/// The largest value of an extended attribute that Linux has.
const LARGEST_XATTR: usize = 64 << 10;

/// The longest name that Linux has.
pub const LONGEST_NAME: usize = 255;

/// What tells an identity that is no inode number.
const IDENTITY: u64 = 1 << 63;

/// No filesystem whose names are shorter is a backing directory: the cache's own would not fit.
const LEAST_NAME: usize = 64;

/// What of a file a backing directory keeps.
#[derive(Clone, Copy, Debug)]
pub struct Keeps {
    /// Extended attributes of users.
    pub xattrs: bool,
    /// ACLs.
    pub acls: bool,
    /// Project ids.
    pub projects: bool,
    /// Bytes of a name.
    pub name_length: usize,
}

/// The backing directory of a cache.
pub struct Backing {
    root: OwnedFd,
    user: Option<User>,
    /// Others write to it, too.
    others: bool,
    /// Held by whoever changes the mode of a directory.
    modes: Mutex<()>,
    directories: Mutex<LruCache<Ino, Arc<OwnedFd>>>,
    files: Mutex<LruCache<Ino, Arc<File>>>,
}

/// What the backing directory tells of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "as in statx(2)")]
pub struct Stat {
    pub dev: u64,
    pub ino: u64,
    /// What tells it from all others that its device has, and has had: [`identity`].
    pub identity: u64,
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub size: u64,
    pub blocks: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backing {
    /// The directory that `root` is open on, reached as `user`, or as root; with `others`, for all users.
    pub fn new(root: OwnedFd, user: Option<User>, others: bool) -> Backing {
        let directories = Mutex::new(LruCache::new(share(OPEN_DIRECTORIES)));
        let files = Mutex::new(LruCache::new(share(OPEN_FILES)));
        Backing { root, user, others, modes: Mutex::default(), directories, files }
    }

    /// Makes the calling thread reach files as the cache's user, for the rest of its life.
    ///
    /// # Errors
    /// The kernel's; the thread must then end.
    pub fn assume(&self) -> io::Result<()> {
        match &self.user {
            Some(user) => user.reach_files()?,
            // Whatever root does by itself root does here.
            None if !self.others => return Ok(()),
            None => {}
        }
        // Of all that root may do the change of identity leaves this, by which quotas are ignored, and what a disk keeps for root. So
        // would those of all users be, for whom root writes. Only who has it may say that others' memory depends on this process
        // (`PR_SET_IO_FLUSHER`), which the server has said by now, and threads inherit.
        let mut sets = rustix::thread::capabilities(None)?;
        sets.effective.remove(rustix::thread::CapabilitySet::SYS_RESOURCE);
        Ok(rustix::thread::set_capabilities(None, sets)?)
    }

    /// The user by whose rights files are reached, if not root's.
    pub fn uid(&self) -> u32 {
        self.user.as_ref().map_or(0, |user| user.uid)
    }

    /// Keeps the modes of directories from being changed. Whoever opens one for a moment, because its mode keeps its owner out, gives back
    /// the mode that it has found, and is not to find one that is being changed.
    pub fn hold_modes(&self) -> MutexGuard<'_, ()> {
        lock(&self.modes)
    }

    /// Whether it is reached by the rights of a user, and not of root, whom nothing keeps out.
    pub fn is_of_a_user(&self) -> bool {
        self.user.is_some()
    }

    /// Whether it is reached by root's rights for all users.
    pub fn is_for_others(&self) -> bool {
        self.others && self.user.is_none()
    }

    /// The directory itself.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// A directory that was opened before.
    pub fn known_directory(&self, ino: Ino) -> Option<Arc<OwnedFd>> {
        lock(&self.directories).get(&ino).cloned()
    }

    /// Opens the directory that these names lead to, and keeps it as that of `ino`, if it is the one that is wanted.
    ///
    /// # Errors
    /// The kernel's; `ENOENT` if the names lead to another directory.
    pub fn open_directory(
        &self,
        ino: Ino,
        names: &[OsString],
        is_it: impl FnOnce(&Stat) -> bool,
    ) -> Result<Arc<OwnedFd>, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut at: Option<OwnedFd> = None;
        for name in names {
            let next = rustix::fs::openat(
                at.as_ref().unwrap_or(&self.root),
                name.as_os_str(),
                flags,
                Mode::empty(),
            )?;
            at = Some(next);
        }
        let directory = Arc::new(match at {
            Some(directory) => directory,
            None => rustix::fs::openat(&self.root, ".", flags, Mode::empty())?,
        });
        if !is_it(&stat(directory.as_fd(), OsStr::new(""))?) {
            return Err(Errno::NOENT);
        }
        lock(&self.directories).insert(ino, Arc::clone(&directory));
        Ok(directory)
    }

    /// A file that was opened for reading before.
    pub fn known_file(&self, ino: Ino) -> Option<Arc<File>> {
        lock(&self.files).get(&ino).cloned()
    }

    /// Keeps a file that is open for reading.
    pub fn keep_file(&self, ino: Ino, file: &Arc<File>) {
        lock(&self.files).insert(ino, Arc::clone(file));
    }

    /// Closes what is kept open of an inode.
    pub fn close(&self, ino: Ino) {
        lock(&self.directories).remove(&ino);
        lock(&self.files).remove(&ino);
    }

    /// What statvfs(3) tells.
    ///
    /// # Errors
    /// The kernel's.
    pub fn space(&self) -> Result<Space, Errno> {
        let found = rustix::fs::fstatvfs(&self.root)?;
        Ok(Space {
            block_size: found.f_frsize as u32,
            blocks: found.f_blocks,
            free: found.f_bfree,
            available: found.f_bavail,
            files: found.f_files,
            free_files: found.f_ffree,
            name_length: found.f_namemax as u32,
        })
    }

    /// What of a file the directory keeps.
    ///
    /// # Errors
    /// The kernel's, other than that it does not.
    pub fn keeps(&self) -> Result<Keeps, Errno> {
        let path = by_descriptor(self.root.as_fd());
        let keeps = |name: &str| match rustix::fs::getxattr(path.as_str(), name, &mut [0_u8; 0][..]) {
            Ok(_) | Err(Errno::NODATA | Errno::RANGE) => Ok(true),
            Err(Errno::OPNOTSUPP) => Ok(false),
            Err(error) => Err(error),
        };
        let name_length = match self.space()?.name_length as usize {
            // Some tell nothing.
            length @ LEAST_NAME..=LONGEST_NAME => length,
            _ => LONGEST_NAME,
        };
        let projects = match read_project(reopen_directory(self.root.as_fd())?.as_fd()) {
            Ok(_) => true,
            Err(error) if has_no_projects(error) => false,
            Err(error) => return Err(error),
        };
        Ok(Keeps { xattrs: keeps("user.ondeck")?, acls: keeps(acl::ACCESS)?, projects, name_length })
    }
}

/// Whether a directory is on a filesystem with ACLs of NFSv4. The other side checks them, for whoever asks it; nobody here does.
///
/// # Errors
/// The kernel's, if that can't be seen.
pub fn has_nfs4_acls(directory: BorrowedFd<'_>) -> Result<bool, Errno> {
    match rustix::fs::getxattr(by_descriptor(directory).as_str(), acl::NFS4, &mut [0_u8; 0][..]) {
        Ok(_) | Err(Errno::RANGE) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NODATA) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The project that something belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Project {
    pub id: u32,
    /// A directory that gives the id to what is made in it.
    pub inherits: bool,
}

/// What `FS_IOC_FSGETXATTR` tells, as in `linux/fs.h`.
#[repr(C)]
struct FsXattr {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_on_write_extent_size: u32,
    padding: [u8; 8],
}

/// `FS_XFLAG_PROJINHERIT`: what is made in the directory gets its project.
const INHERITS_PROJECT: u32 = 0x200;

/// Whether a filesystem that refuses so to tell a project has none.
fn has_no_projects(error: Errno) -> bool {
    matches!(error, Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL)
}

fn read_project(open: BorrowedFd<'_>) -> Result<Project, Errno> {
    const GET: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<FsXattr>(b'X', 31);
    // SAFETY: the kernel fills in a `struct fsxattr`, which is `FsXattr`, and nothing else.
    let told = unsafe { rustix::ioctl::ioctl(open, rustix::ioctl::Getter::<GET, FsXattr>::new()) }?;
    Ok(Project { id: told.project, inherits: told.flags & INHERITS_PROJECT != 0 })
}

/// The project that an open file or directory belongs to; none where the filesystem has none.
///
/// # Errors
/// The kernel's.
pub fn project(open: BorrowedFd<'_>) -> Result<Project, Errno> {
    match read_project(open) {
        Err(error) if has_no_projects(error) => Ok(Project::default()),
        other => other,
    }
}

/// Opens a directory that is known already, for reading.
///
/// # Errors
/// The kernel's.
pub fn reopen_directory(known: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(known, ".", flags, Mode::empty())
}

/// The path by which the kernel leads to an open descriptor.
pub fn by_descriptor(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

fn time(time: rustix::fs::StatxTimestamp) -> Time {
    Time { secs: time.tv_sec, nanos: time.tv_nsec }
}

/// Looks at an entry; `name` empty: at the directory itself, or whatever is open.
///
/// # Errors
/// The kernel's.
pub fn stat(directory: BorrowedFd<'_>, name: &OsStr) -> Result<Stat, Errno> {
    let mut flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    if name.is_empty() {
        flags |= AtFlags::EMPTY_PATH;
    }
    let found = rustix::fs::statx(directory, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
    Ok(Stat {
        dev: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
        ino: found.stx_ino,
        identity: identity(&found),
        mode: u32::from(found.stx_mode),
        nlink: found.stx_nlink,
        uid: found.stx_uid,
        gid: found.stx_gid,
        rdev: rustix::fs::makedev(found.stx_rdev_major, found.stx_rdev_minor),
        size: found.stx_size,
        blocks: found.stx_blocks,
        atime: time(found.stx_atime),
        mtime: time(found.stx_mtime),
        ctime: time(found.stx_ctime),
    })
}

/// The inode number, and, where the filesystem keeps it, the time when the inode was made: a number is given again as soon as its inode
/// is removed, maybe to something that is private to somebody else. No number has the highest bit.
fn identity(found: &rustix::fs::Statx) -> u64 {
    let born = found.stx_btime;
    let told = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
    if !told || (born.tv_sec, born.tv_nsec) == (0, 0) {
        return found.stx_ino;
    }
    let mut bytes = [0; 20];
    bytes[..8].copy_from_slice(&found.stx_ino.to_le_bytes());
    bytes[8..16].copy_from_slice(&born.tv_sec.to_le_bytes());
    bytes[16..].copy_from_slice(&born.tv_nsec.to_le_bytes());
    IDENTITY | XxHash3_128::oneshot(&bytes) as u64
}

/// Looks at something that was just made under a name: `AGAIN` if it is not that, because somebody else has put it there. Where the
/// filesystem's clock is this machine's, and it keeps the time when something was made, what is older is not.
///
/// # Errors
/// The kernel's.
pub fn just_made(at: BorrowedFd<'_>, name: &OsStr, kind: FileType, since: Time) -> Result<Stat, Errno> {
    // Of ext4, XFS, Btrfs and tmpfs, by statfs(2).
    const LOCAL: [u64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994];
    // What a filesystem rounds to, at most.
    const GRANULARITY: i64 = 1;
    let made = open_path(at, name)?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    let found = rustix::fs::statx(&made, "", flags, StatxFlags::BTIME)?;
    let told = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
    let is_local = LOCAL.contains(&(rustix::fs::fstatfs(&made)?.f_type as u64));
    let is_older = told && is_local && found.stx_btime.tv_sec < since.secs - GRANULARITY;
    let stat = stat(made.as_fd(), OsStr::new(""))?;
    let is_it = FileType::from_raw_mode(stat.mode) == kind
        && stat.nlink <= if kind == FileType::Directory { 2 } else { 1 };
    if is_older || !is_it { Err(Errno::AGAIN) } else { Ok(stat) }
}

/// All entries of a directory with what is told of them, `.` and `..` excepted.
///
/// # Errors
/// The kernel's; an entry that vanishes meanwhile is none.
pub fn list(directory: BorrowedFd<'_>) -> Result<Vec<(OsString, Stat)>, Errno> {
    let open = reopen_directory(directory)?;
    let mut found = Vec::new();
    for entry in Dir::read_from(&open)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        match stat(open.as_fd(), name) {
            Ok(stat) => found.push((name.to_owned(), stat)),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Whether an attribute is one that a copy of a file has, too: not what the filesystem tells of itself, nor a label of SELinux or Smack.
/// The kernel gives these, lets nobody take them away, and lets few change them. Nor the second name that XFS has for an ACL, by which
/// one that was removed would come back.
pub fn is_kept(name: &[u8]) -> bool {
    let begins = |with: &str| name.starts_with(with.as_bytes());
    if name == b"security.selinux" || begins("security.SMACK64") || begins("trusted.SGI_ACL_") {
        return false;
    }
    begins("user.") || begins("security.") || begins("trusted.") || begins("system.posix_acl_")
}

/// The extended attributes of what is open.
///
/// # Errors
/// The kernel's.
pub fn xattrs(open: BorrowedFd<'_>) -> Result<Xattrs, Errno> {
    let path = by_descriptor(open);
    let mut names = vec![0_u8; LARGEST_XATTR];
    let count = match rustix::fs::listxattr(path.as_str(), names.as_mut_slice()) {
        Ok(count) => count,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error),
    };
    let mut found = Xattrs::new();
    let mut value = vec![0_u8; LARGEST_XATTR];
    for name in names[..count].split(|byte| *byte == 0).filter(|name| is_kept(name)) {
        match rustix::fs::getxattr(path.as_str(), name, value.as_mut_slice()) {
            Ok(count) => {
                found.insert(OsStr::from_bytes(name).to_owned(), value[..count].to_vec());
            }
            // Gone meanwhile, or one that only root may see.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Gives what is open exactly these extended attributes, and returns which of them it does not take: one does not keep the others.
///
/// # Errors
/// The kernel's, if it can't be seen which it has.
pub fn set_xattrs(open: BorrowedFd<'_>, wanted: &Xattrs) -> Result<Vec<(OsString, Errno)>, Errno> {
    let path = by_descriptor(open);
    let there = xattrs(open)?;
    let mut refused = Vec::new();
    for name in there.keys().filter(|name| !wanted.contains_key(*name)) {
        match rustix::fs::removexattr(path.as_str(), name.as_os_str()) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(error) => refused.push((name.clone(), error)),
        }
    }
    let lacks = |(name, value): &(&OsString, &Vec<u8>)| {
        is_kept(name.as_encoded_bytes()) && there.get(*name) != Some(value)
    };
    for (name, value) in wanted.iter().filter(lacks) {
        if let Err(error) = rustix::fs::setxattr(path.as_str(), name.as_os_str(), value, XattrFlags::empty())
        {
            refused.push((name.clone(), error));
        }
    }
    Ok(refused)
}

/// Opens an entry without following it, for nothing but to know it again.
///
/// # Errors
/// The kernel's.
pub fn open_path(directory: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a file that is known already for reading or for both.
///
/// # Errors
/// The kernel's.
pub fn reopen(known: BorrowedFd<'_>, write: bool) -> Result<File, Errno> {
    let path = by_descriptor(known);
    let flags = if write { OFlags::RDWR } else { OFlags::RDONLY }
        | OFlags::CLOEXEC
        | OFlags::NONBLOCK
        | OFlags::NOCTTY;
    let file = match rustix::fs::open(path.as_str(), flags, Mode::empty()) {
        // Somebody has a lease of it, which the kernel has just begun to take back.
        Err(Errno::AGAIN) => {
            let found = stat(known, OsStr::new(""))?;
            let is_file = FileType::from_raw_mode(found.mode) == FileType::RegularFile;
            let flags = if is_file { flags & !OFlags::NONBLOCK } else { flags };
            rustix::fs::open(path.as_str(), flags, Mode::empty())
        }
        other => other,
    }?;
    Ok(File::from(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CapabilitySet, capabilities};

    #[test]
    fn nobody_for_whom_root_writes_can_ignore_quotas_by_that() {
        let ignores = || capabilities(None).unwrap().effective.contains(CapabilitySet::SYS_RESOURCE);
        if !ignores() {
            return with_all_rights("backing::tests::nobody_for_whom_root_writes_can_ignore_quotas_by_that");
        }
        for others in [false, true] {
            let root = File::open("/").unwrap().into();
            let assumes = || {
                Backing::new(root, None, others).assume().unwrap();
                ignores()
            };
            let still = std::thread::scope(|scope| scope.spawn(assumes).join().unwrap());
            assert_eq!(still, !others);
        }
    }

    /// Runs a test of this module where root has every right: in a user namespace of its own. In containers it has not.
    fn with_all_rights(test: &str) {
        const INSIDE: &str = "ONDECK_WITH_ALL_RIGHTS";
        assert!(std::env::var_os(INSIDE).is_none(), "root of a user namespace has not every right");
        let mut command = std::process::Command::new("unshare");
        command.args(["--user", "--map-root-user"]).arg(std::env::current_exe().unwrap());
        let ran = command.args(["--exact", test]).env(INSIDE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout).into_owned();
        if said.is_empty() {
            // Some systems let nobody have one.
            return ondeck_skip::skipped(format!(
                "no user namespace: {}",
                String::from_utf8_lossy(&ran.stderr)
            ));
        }
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
    }
}
