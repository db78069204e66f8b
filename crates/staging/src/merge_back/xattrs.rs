//! Extended attributes and ACLs of directories.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{self, Mode};

pub(super) type Xattrs = Vec<(CString, Vec<u8>)>;

/// The extended attributes of a directory given by its name. Of one that its owner may not read none are known: what it
/// has at the end is compared with what is on disk.
pub(super) fn xattrs_if_readable(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<Xattrs> {
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
pub(super) fn xattrs_of(directory: BorrowedFd<'_>) -> io::Result<Xattrs> {
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

/// Whether an ACL, as the kernel gives it (acl(5), linux/posix_acl_xattr.h), names another user or group than the caller's.
pub(super) fn names_others(acl: &[u8]) -> bool {
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
}
