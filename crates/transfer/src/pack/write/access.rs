//! Who may read a finished archive.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, Mode, Stat};
use rustix::io::Errno;

use crate::acl::{mode_bits, plain_bits, shuts_out_somebody};
use crate::attributes::{ACL_ACCESS, ACL_DEFAULT, acl_of, drop_acl};
use crate::pack::PackOptions;

/// Who may read a finished archive.
pub(super) struct Access {
    mode: u32,
    /// It may keep the ACL that it inherited.
    inherits: bool,
}

/// Who may read the archive `file` of the tree `root`, which is made in `directory`: who may read any new file there, but
/// nobody who can't read the tree.
pub(super) fn access_of(
    file: &Stat,
    directory: BorrowedFd<'_>,
    root: &OwnedFd,
    root_stat: &Stat,
    options: &PackOptions,
) -> Result<Access, Errno> {
    let mut tree = options.modes.get(&root_stat.st_ino).copied().unwrap_or(root_stat.st_mode);
    // With an ACL, the group's bits of the mode are the mask.
    let acl = acl_of(root.as_fd(), ACL_ACCESS)?;
    tree &= acl.as_ref().map_or(0o777, |acl| plain_bits(acl));
    if acl.is_some_and(|acl| shuts_out_somebody(&acl)) {
        // The archive's mode can't say who.
        tree &= 0o700;
    }
    let is_its_group = file.st_gid == options.group.unwrap_or(root_stat.st_gid);
    // Who is of the tree's group has the group's rights alone.
    let others = tree & 0o005 == 0o005 && (is_its_group || tree & 0o050 == 0o050);
    let group = if is_its_group { tree & 0o050 == 0o050 } else { others };
    let mut mode = 0o666 & !options.umask.as_raw_mode();
    mode &= 0o600 | if group { 0o060 } else { 0 } | if others { 0o006 } else { 0 };
    if let Some(acl) = acl_of(directory, ACL_DEFAULT)? {
        // Whom it names has nothing to do with who can read the tree, unless all can.
        mode &= if others { mode_bits(&acl).unwrap_or(0o600) } else { plain_bits(&acl) };
    }
    Ok(Access { mode, inherits: others })
}

pub(super) fn give_access(file: &OwnedFd, access: &Access) -> Result<(), Errno> {
    if !access.inherits {
        drop_acl(file.as_fd());
    }
    if fs::fstat(file)?.st_mode & 0o777 == access.mode {
        return Ok(());
    }
    match fs::fchmod(file, Mode::from_raw_mode(access.mode)) {
        // The filesystem has no modes of its own.
        Err(Errno::PERM | Errno::NOTSUP | Errno::NOSYS) => Ok(()),
        done => done,
    }
}
