//! How a directory looked when the program was shown it.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::Stat;

use super::stat::{Moment, accessed_at, changed_at, key, modified_at};
use super::xattrs::xattrs_if_readable;

/// A directory's attributes when the program was shown it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appearance {
    pub(super) changed: Moment,
    pub(super) accessed: Moment,
    pub(super) modified: Moment,
    pub(super) mode: u32,
    pub(super) owner: (u32, u32),
    /// Hashes of the names and of the values of its extended attributes and ACLs.
    pub(super) xattrs: Vec<(u128, u128)>,
}

impl Appearance {
    pub(super) fn of<'a>(stat: &Stat, xattrs: impl IntoIterator<Item = (&'a CStr, &'a [u8])>) -> Appearance {
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
    pub(super) fn in_ram(directory: BorrowedFd<'_>, name: &CStr, stat: &Stat) -> io::Result<Appearance> {
        let xattrs = xattrs_if_readable(directory, name)?;
        Ok(Appearance::of(stat, xattrs.iter().map(|(name, value)| (&**name, &**value))))
    }

    pub(super) fn value(&self, name: &CStr) -> Option<u128> {
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

/// Reads what [`Display`](fmt::Display) has written, after the hash of its path.
pub(super) fn parse_directory(line: &str) -> Option<(u128, Appearance)> {
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
