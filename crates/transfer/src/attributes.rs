//! Owner, mode, times, extended attributes and ACLs.
//!
//! The order matters. The owner goes first, because a change of owner clears set-id bits and capabilities. An ACL
//! goes before the mode: while the mode is still narrow, setting the ACL widens exactly to what the ACL says,
//! whereas a wide mode first would let the owning group read what the ACL denies it. Times go last, because
//! everything else changes them.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::fs::{self, AtFlags, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use crate::acl;
use crate::dir::OPEN_DIRECTORY;
use crate::error::{During, Fault};
use crate::merge::{Changes, MergePolicy};

/// Whose the copies are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ownership {
    /// The source's owner and group, as far as the caller may give files away.
    #[default]
    Preserve,
    /// What the target directory gives to new files: a set-gid directory hands down its group. A file that replaces another
    /// keeps that one's group where possible. What is thereby somebody else's, or of another group, is not set-uid, or
    /// set-gid: else whoever runs the copy would be the one who copied it. ACLs are the source's, also none: what a default
    /// ACL of the target hands down, the program may have taken away.
    Inherit,
}

pub(crate) const ACL_ACCESS: &CStr = c"system.posix_acl_access";
pub(crate) const ACL_DEFAULT: &CStr = c"system.posix_acl_default";

/// An extended attribute, ACLs included.
pub(crate) struct Xattr {
    pub name: CString,
    pub value: Vec<u8>,
}

impl Xattr {
    pub fn is_acl(&self) -> bool {
        *self.name == *ACL_ACCESS || *self.name == *ACL_DEFAULT
    }

    /// What may stay of a mode if this could not be set: the group's bits of a file with an ACL are those of its mask, which
    /// the group itself need not have.
    fn mode_without(&self) -> u32 {
        if *self.name == *ACL_ACCESS { acl::plain_bits(&self.value) | 0o7700 } else { 0o7777 }
    }

    /// Whether whoever runs a file with it gets rights by it, as by a set-id bit: only as long as the file is its owner's.
    fn lends_rights(&self) -> bool {
        *self.name == *c"security.capability"
    }

    /// Attributes that only a privileged process or a security module may set; `cp -a` leaves them out silently
    /// where it isn't allowed to, and so do we.
    pub fn is_privileged(&self) -> bool {
        self.name.to_bytes().starts_with(b"security.") || self.name.to_bytes().starts_with(b"trusted.")
    }
}

/// What the caller may do, and what could not be kept because of that.
pub(crate) struct Privilege {
    /// Whether files can be given to other users.
    pub root: bool,
    /// Entries that kept the caller's ownership because only root can give files away.
    pub ownership_kept: AtomicU64,
}

impl Privilege {
    pub fn of_this_process() -> Self {
        Privilege { root: rustix::process::geteuid().is_root(), ownership_kept: AtomicU64::new(0) }
    }
}

/// Reads all extended attributes of an open file; usually there are none, which costs one system call.
pub(crate) fn read_xattrs(fd: BorrowedFd<'_>, policy: Option<&dyn MergePolicy>) -> Result<Vec<Xattr>, Fault> {
    let list = |buffer: &mut [u8]| fs::flistxattr(fd, buffer);
    let get = |name: &CStr, buffer: &mut [u8]| fs::fgetxattr(fd, name, buffer);
    collect(list, get, policy)
}

/// The same for an entry that can't be opened for reading: a symlink, FIFO, socket or device.
pub(crate) fn read_xattrs_at(
    dir: BorrowedFd<'_>,
    name: &CStr,
    policy: Option<&dyn MergePolicy>,
) -> Result<Vec<Xattr>, Fault> {
    let path = proc_path(dir, name);
    let list = |buffer: &mut [u8]| fs::llistxattr(&*path, buffer);
    let get = |name: &CStr, buffer: &mut [u8]| fs::lgetxattr(&*path, name, buffer);
    collect(list, get, policy)
}

/// A path of bounded length for the calls that have no `*at` form.
fn proc_path(dir: BorrowedFd<'_>, name: &CStr) -> CString {
    let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
    path.extend_from_slice(name.to_bytes());
    CString::new(path).unwrap_or_default() // neither half holds a NUL
}

fn collect(
    list: impl Fn(&mut [u8]) -> Result<usize, Errno>,
    get: impl Fn(&CStr, &mut [u8]) -> Result<usize, Errno>,
    policy: Option<&dyn MergePolicy>,
) -> Result<Vec<Xattr>, Fault> {
    const ACTION: &str = "reading its extended attributes";
    let mut small = [0_u8; 256];
    let mut large = Vec::new();
    let names: &[u8] = match list(&mut small) {
        Ok(0) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOENT) => return Ok(Vec::new()),
        Ok(length) => &small[..length],
        Err(Errno::RANGE) => {
            // 64 KiB is the kernel's own limit (XATTR_LIST_MAX).
            large.resize(64 << 10, 0);
            let length = list(&mut large).during(ACTION)?;
            &large[..length]
        }
        Err(error) => return Err(Fault::new(ACTION, error)),
    };
    let mut xattrs = Vec::new();
    for name in names.split_inclusive(|b| *b == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        let carried = match policy {
            Some(policy) => match policy.xattr_name(name) {
                Some(carried) => carried,
                None => continue,
            },
            None => name.to_owned(),
        };
        let mut value = vec![0_u8; 256];
        let length = match get(name, &mut value) {
            Err(Errno::RANGE) => {
                value.resize(64 << 10, 0); // XATTR_SIZE_MAX
                get(name, &mut value)
            }
            other => other,
        };
        match length {
            Ok(length) => value.truncate(length),
            Err(Errno::NODATA) => continue,
            Err(error) => return Err(Fault::new(ACTION, error)),
        }
        xattrs.push(Xattr { name: carried, value });
    }
    Ok(xattrs)
}

pub(crate) fn times_of(stat: &Stat) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: stat.st_atime as _, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: Timespec { tv_sec: stat.st_mtime as _, tv_nsec: stat.st_mtime_nsec as _ },
    }
}

/// The source's attributes, cut by the permission bits that new entries get at most where they are. An entry's own ACL says
/// by itself whom it lets in.
pub(crate) fn cut(source: &Stat, xattrs: &[Xattr], most: u32) -> Stat {
    let mut wanted = *source;
    if !xattrs.iter().any(|xattr| *xattr.name == *ACL_ACCESS) {
        wanted.st_mode &= most | !0o777;
    }
    wanted
}

/// Gives an open file or directory of the target, whose state is `have`, the attributes of the source.
///
/// An extended attribute that can't be kept is the error, after everything else has been applied.
pub(crate) fn apply(
    fd: BorrowedFd<'_>,
    have: &Stat,
    want: &Stat,
    xattrs: &[Xattr],
    ownership: Ownership,
    privilege: &Privilege,
) -> Result<(), Fault> {
    let mut mode = want.st_mode & 0o7777;
    let mut must_chmod = false;
    let mut is_theirs = have.st_uid == want.st_uid;
    match ownership {
        Ownership::Preserve => {
            if (have.st_uid, have.st_gid) != (want.st_uid, want.st_gid) {
                let kept = chown(want, have, privilege, |uid, gid| fs::fchown(fd, uid, gid))?;
                mode &= !kept.unsafe_bits();
                must_chmod = true;
                is_theirs = kept.user;
            }
        }
        // A directory made inside a set-gid directory is set-gid itself, whatever it was in RAM.
        Ownership::Inherit if is_directory(want) => mode |= have.st_mode & 0o2000,
        Ownership::Inherit => {}
    }
    if mode & SET_ID != 0 && !is_directory(want) {
        // Its group may have been changed since it was made.
        let now = fs::fstat(fd).during("reading its attributes")?;
        mode &= !KeptOwnership::between(want, &now).unsafe_bits();
    }
    must_chmod |= have.st_mode & 0o7777 != mode;
    let mut lost = None;
    for xattr in xattrs.iter().filter(|xattr| is_theirs || !xattr.lends_rights()) {
        must_chmod |= xattr.is_acl();
        if let Err(error) = fs::fsetxattr(fd, &*xattr.name, &xattr.value, XattrFlags::empty()) {
            note_lost(xattr, error, privilege, &mut lost);
            mode &= xattr.mode_without();
        }
    }
    if must_chmod {
        fs::fchmod(fd, Mode::from_raw_mode(mode)).during("setting its mode")?;
    }
    fs::futimens(fd, &times_of(want)).during("setting its times")?;
    lost.map_or(Ok(()), Err)
}

/// The same for an entry of the target that is reached by name: a symlink, FIFO, socket or device.
pub(crate) fn apply_at(
    dir: BorrowedFd<'_>,
    name: &CStr,
    want: &Stat,
    xattrs: &[Xattr],
    ownership: Ownership,
    privilege: &Privilege,
) -> Result<(), Fault> {
    let have = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).during("reading its attributes")?;
    let mut mode = want.st_mode & 0o7777;
    let mut kept = KeptOwnership::between(want, &have);
    if ownership == Ownership::Preserve && !(kept.user && kept.group) {
        let set = |uid, gid| fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW);
        kept = chown(want, &have, privilege, set)?;
    }
    mode &= !kept.unsafe_bits();
    let mut lost = None;
    for xattr in xattrs.iter().filter(|xattr| kept.user || !xattr.lends_rights()) {
        let path = proc_path(dir, name);
        if let Err(error) = fs::lsetxattr(&*path, &*xattr.name, &xattr.value, XattrFlags::empty()) {
            note_lost(xattr, error, privilege, &mut lost);
            mode &= xattr.mode_without();
        }
    }
    if !is_symlink(want) {
        chmod_at(dir, name, &have, mode).during("setting its mode")?;
    }
    fs::utimensat(dir, name, &times_of(want), AtFlags::SYMLINK_NOFOLLOW).during("setting its times")?;
    lost.map_or(Ok(()), Err)
}

/// Gives an open file of the target, whose state is `have`, the permission bits of the source, and nothing else.
pub(crate) fn apply_permissions(fd: BorrowedFd<'_>, have: &Stat, want: &Stat) -> Result<(), Fault> {
    let mode = want.st_mode & 0o777;
    if have.st_mode & 0o7777 != mode {
        fs::fchmod(fd, Mode::from_raw_mode(mode)).during("setting its mode")?;
    }
    Ok(())
}

/// Changes some attributes of an open directory of the target, whose state is `have`, in the order of [`apply`].
///
/// An owner or an extended attribute that can't be changed is the error, after everything else has been applied.
pub(crate) fn change(
    fd: BorrowedFd<'_>,
    have: &Stat,
    changes: &Changes,
    privilege: &Privilege,
) -> Result<(), Fault> {
    let mut mode = changes.mode;
    let mut lost = None;
    if changes.owner.is_some() || changes.group.is_some() {
        let mut want = *have;
        want.st_uid = changes.owner.unwrap_or(have.st_uid);
        want.st_gid = changes.group.unwrap_or(have.st_gid);
        if (want.st_uid, want.st_gid) != (have.st_uid, have.st_gid) {
            let kept = chown(&want, have, privilege, |uid, gid| fs::fchown(fd, uid, gid));
            let kept = kept.unwrap_or_else(|fault| {
                lost = Some(fault);
                KeptOwnership { user: false, group: false }
            });
            mode = mode.map(|mode| mode & !kept.unsafe_bits());
        }
    }
    for (name, value) in &changes.xattrs {
        let changed = match value {
            Some(value) => fs::fsetxattr(fd, &**name, value, XattrFlags::empty()),
            None => fs::fremovexattr(fd, &**name),
        };
        match changed {
            Ok(()) => {}
            Err(Errno::NODATA) if value.is_none() => {}
            Err(error) => {
                let xattr = Xattr { name: name.clone(), value: Vec::new() };
                note_lost(&xattr, error, privilege, &mut lost);
            }
        }
    }
    if let Some(mode) = mode {
        fs::fchmod(fd, Mode::from_raw_mode(mode & 0o7777)).during("setting its mode")?;
    }
    if changes.accessed.is_some() || changes.modified.is_some() {
        let omitted = Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT };
        let times = Timestamps {
            last_access: changes.accessed.unwrap_or(omitted),
            last_modification: changes.modified.unwrap_or(omitted),
        };
        fs::futimens(fd, &times).during("setting its times")?;
    }
    lost.map_or(Ok(()), Err)
}

/// Removes from a directory that was there before what the source's does not have. What security modules and
/// privileged programs put there is theirs.
pub(crate) fn remove_others(fd: BorrowedFd<'_>, keep: &[Xattr]) -> Result<(), Fault> {
    for xattr in read_xattrs(fd, None)? {
        if !xattr.is_privileged() && !keep.iter().any(|kept| kept.name == xattr.name) {
            fs::fremovexattr(fd, &*xattr.name)
                .during("removing an extended attribute that its source has not")?;
        }
    }
    Ok(())
}

/// An ACL of an open file or directory in the kernel's form; `None` if it has none.
pub(crate) fn acl_of(fd: BorrowedFd<'_>, name: &CStr) -> Result<Option<Vec<u8>>, Errno> {
    let mut value = vec![0; 256];
    loop {
        match fs::fgetxattr(fd, name, &mut value[..]) {
            Ok(length) => {
                value.truncate(length);
                return Ok(Some(value));
            }
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(None),
            Err(Errno::RANGE) if value.len() < 64 << 10 => value.resize(64 << 10, 0), // XATTR_SIZE_MAX
            Err(error) => return Err(error),
        }
    }
}

/// What a directory's default ACL leaves to a new entry; `None` if it has none. One that can't be read leaves it to nobody
/// but its owner.
pub(crate) fn default_bits(dir: BorrowedFd<'_>) -> Option<u32> {
    match acl_of(dir, ACL_DEFAULT) {
        Ok(acl) => acl.map(|acl| acl::bits_without(&acl)),
        Err(_) => Some(0o700),
    }
}

/// Removes an ACL that an entry inherited from its directory's default; what is not there need not be removed.
pub(crate) fn drop_acl(fd: BorrowedFd<'_>) {
    let _ = fs::fremovexattr(fd, ACL_ACCESS);
}

/// The same by name.
pub(crate) fn drop_acl_at(dir: BorrowedFd<'_>, name: &CStr) {
    let _ = fs::lremovexattr(&*proc_path(dir, name), ACL_ACCESS);
}

/// Sets the mode of an entry that is still the one that `expected` describes, never through a symlink.
///
/// fchmodat2(2), which could do this by itself, is newer than the kernels that we serve.
pub(crate) fn chmod_at(dir: BorrowedFd<'_>, name: &CStr, expected: &Stat, mode: u32) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let entry = fs::openat(dir, name, flags, Mode::empty())?;
    let found = fs::fstat(&entry)?;
    if is_symlink(&found) || (found.st_dev, found.st_ino) != (expected.st_dev, expected.st_ino) {
        return Err(Errno::STALE);
    }
    let path = format!("/proc/self/fd/{}", entry.as_raw_fd());
    fs::chmodat(fs::CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())
}

fn note_lost(xattr: &Xattr, error: Errno, privilege: &Privilege, lost: &mut Option<Fault>) {
    if xattr.is_privileged() && (!privilege.root || matches!(error, Errno::OPNOTSUPP | Errno::PERM)) {
        return;
    }
    let action = if xattr.is_acl() {
        "it was copied, but not its access control list"
    } else {
        "it was copied, but not all of its extended attributes"
    };
    let name = xattr.name.to_string_lossy();
    *lost = Some(Fault {
        action,
        source: std::io::Error::new(
            std::io::Error::from(error).kind(),
            format!("{name}: {}", std::io::Error::from(error)),
        ),
    });
}

/// The bits of a mode by which whoever runs a file becomes its owner, or of its group.
const SET_ID: u32 = 0o6000;

/// What of the ownership could be given to the copy.
pub(crate) struct KeptOwnership {
    pub user: bool,
    pub group: bool,
}

impl KeptOwnership {
    /// What a copy has of its source's.
    pub fn between(source: &Stat, copy: &Stat) -> KeptOwnership {
        KeptOwnership { user: source.st_uid == copy.st_uid, group: source.st_gid == copy.st_gid }
    }

    /// A set-id bit must not lend the copier's identity to whoever runs the copy.
    pub fn unsafe_bits(&self) -> u32 {
        (if self.user { 0 } else { 0o4000 }) | (if self.group { 0 } else { 0o2000 })
    }
}

fn chown(
    want: &Stat,
    have: &Stat,
    privilege: &Privilege,
    set: impl Fn(Option<Uid>, Option<Gid>) -> Result<(), Errno>,
) -> Result<KeptOwnership, Fault> {
    let (uid, gid) = (Uid::from_raw(want.st_uid), Gid::from_raw(want.st_gid));
    if privilege.root {
        return match set(Some(uid), Some(gid)) {
            Ok(()) => Ok(KeptOwnership { user: true, group: true }),
            Err(error) => Err(Fault::new("setting its owner", error)),
        };
    }
    // An ordinary user can only pass a file to another of their own groups. EINVAL: the group has no name in this
    // user namespace.
    let group = have.st_gid == want.st_gid
        || match set(None, Some(gid)) {
            Ok(()) => true,
            Err(Errno::PERM | Errno::INVAL) => false,
            Err(error) => return Err(Fault::new("setting its group", error)),
        };
    let kept = KeptOwnership { user: have.st_uid == want.st_uid, group };
    if !(kept.user && kept.group) {
        privilege.ownership_kept.fetch_add(1, Relaxed);
    }
    Ok(kept)
}

pub(crate) fn is_directory(stat: &Stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFDIR
}

pub(crate) fn is_symlink(stat: &Stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFLNK
}

pub(crate) fn is_regular(stat: &Stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// Who owns an entry that the caller can't read and that is not their own; `None` if it is, or can be read. Of an entry that
/// can't even be looked at, this is who owns its directory. If that can't be told either it is nobody's, and stays an error.
pub fn closed_by_another(dir: BorrowedFd<'_>, name: &CStr) -> Option<u32> {
    let us = rustix::process::geteuid().as_raw();
    let (owner, flags) = match fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if is_directory(&stat) => (stat.st_uid, OPEN_DIRECTORY),
        Ok(stat) if is_regular(&stat) => {
            (stat.st_uid, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC)
        }
        Err(Errno::ACCESS) => return Some(fs::fstat(dir).ok()?.st_uid).filter(|owner| *owner != us),
        _ => return None,
    };
    let closed = match fs::openat(dir, name, flags, Mode::empty()) {
        Ok(opened) => flags == OPEN_DIRECTORY && !is_searchable(opened.as_fd()),
        Err(error) => error == Errno::ACCESS,
    };
    (closed && owner != us).then_some(owner)
}

/// Whether the caller can reach what is in a directory, and not only read the names.
pub(crate) fn is_searchable(dir: BorrowedFd<'_>) -> bool {
    !matches!(fs::statat(dir, c".", AtFlags::empty()), Err(Errno::ACCESS))
}

/// Whether nothing that we copy has changed between two looks at the same file. The access time doesn't count:
/// reading the file changes it.
pub(crate) fn same_state(before: &Stat, after: &Stat) -> bool {
    let key = |s: &Stat| {
        (s.st_dev, s.st_ino, s.st_size, s.st_mtime, s.st_mtime_nsec, s.st_ctime, s.st_ctime_nsec, s.st_mode)
    };
    key(before) == key(after)
}

/// All extended attributes of an open directory, ACLs included, by name and value.
///
/// # Errors
/// The kernel's. A filesystem without any has none.
pub fn xattrs_of(directory: BorrowedFd<'_>) -> std::io::Result<Vec<(CString, Vec<u8>)>> {
    named(read_xattrs(directory, None))
}

/// The same for an entry of a directory, which need not be readable itself.
///
/// # Errors
/// The kernel's: those that the user may set need the right to read the entry.
pub fn xattrs_at(directory: BorrowedFd<'_>, name: &CStr) -> std::io::Result<Vec<(CString, Vec<u8>)>> {
    named(read_xattrs_at(directory, name, None))
}

fn named(read: Result<Vec<Xattr>, Fault>) -> std::io::Result<Vec<(CString, Vec<u8>)>> {
    let xattrs = read.map_err(|fault| fault.source)?;
    Ok(xattrs.into_iter().map(|xattr| (xattr.name, xattr.value)).collect())
}

/// Gives an open directory the owner, mode, times, xattrs and ACLs of another, as far as the caller may.
///
/// # Errors
/// If an attribute that the target could hold can't be set.
pub fn copy_directory_attributes(source: BorrowedFd<'_>, target: BorrowedFd<'_>) -> std::io::Result<()> {
    let want = fs::fstat(source)?;
    let have = fs::fstat(target)?;
    let privilege = Privilege::of_this_process();
    let done = read_xattrs(source, None)
        .and_then(|xattrs| apply(target, &have, &want, &xattrs, Ownership::Preserve, &privilege));
    done.map_err(|fault| {
        std::io::Error::new(fault.source.kind(), format!("{}: {}", fault.action, fault.source))
    })
}
