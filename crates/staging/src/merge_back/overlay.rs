//! An overlay's own marks in the directory on disk and in the layer that it writes to.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{self, FileType, Stat};

use super::xattrs::xattrs_of;

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

/// Whether it is an overlay's mark for an entry that was deleted.
pub fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

pub(super) fn is_opaque(dir: BorrowedFd<'_>) -> bool {
    let name =
        if rustix::process::geteuid().is_root() { c"trusted.overlay.opaque" } else { c"user.overlay.opaque" };
    let mut value = [0_u8; 4];
    fs::fgetxattr(dir, name, &mut value).is_ok_and(|length| length == 1 && value[0] == b'y')
}
