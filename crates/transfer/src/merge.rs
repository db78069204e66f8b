//! How a caller steers a copy into a directory that others may change meanwhile.
//!
//! A plain copy makes the target's entries those of the source. Bringing a job's results home is more delicate: the
//! source may be the upper layer of an overlay, with marks for deletions, and the target must not lose what someone
//! else wrote there while the job ran. A [`MergePolicy`] is asked about every entry before it is touched, and told of
//! every one that is in place.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{Stat, Timespec};

/// An entry of the source, and what the target has under its name.
pub struct EntryContext<'a> {
    /// The path of its directory relative to the root; empty for the root.
    pub parent: &'a [u8],
    /// Its name in that directory.
    pub name: &'a CStr,
    /// Its directory in the source.
    pub source_dir: BorrowedFd<'a>,
    /// Its attributes in the source.
    pub source: &'a Stat,
    /// The attributes of what the target has under this name, if anything.
    pub target: Option<&'a Stat>,
}

impl EntryContext<'_> {
    /// The path relative to the root.
    pub fn path(&self) -> Vec<u8> {
        crate::dir::join(self.parent, self.name.to_bytes())
    }
}

/// What to do with an entry that is not a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryAction {
    /// Copy it, over what is there.
    Copy,
    /// Leave the target as it is.
    Skip,
    /// Copy it under this name and keep what is there, unless both hold the same bytes.
    Beside(CString),
    /// Remove what the target has under this name.
    Delete,
}

/// What to do with a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryAction {
    /// Make it under this name, or merge it into what an earlier copy made there, and keep what has its own name. The policy
    /// is asked once more, by the path that it gets.
    Beside(CString),
    /// Don't copy it, and report that as a failure, with this reason.
    Refuse(&'static str),
    /// Leave the directory and all it holds out of the copy.
    Skip,
    /// Merge it with the target's, entry by entry.
    Merge {
        /// Whether entries that only the target has may be removed ([`MergePolicy::may_delete`] decides on each).
        delete: bool,
        /// Whether an existing target directory gets the source's attributes.
        attributes: bool,
    },
}

/// A directory that the target had before, once all that it holds is in place.
pub struct Merged<'a> {
    /// The path relative to the root; empty for the root.
    pub path: &'a [u8],
    /// The directory in the source.
    pub source_dir: BorrowedFd<'a>,
    /// Its attributes in the source when it was entered.
    pub source: &'a Stat,
    /// The directory in the target.
    pub target_dir: BorrowedFd<'a>,
    /// Its attributes in the target when it was entered.
    pub entered: &'a Stat,
    /// Its attributes in the target now: what was put into it has changed its times.
    pub target: &'a Stat,
}

/// What changes of a directory that the target had before. What is `None` stays.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// The owner's uid.
    pub owner: Option<u32>,
    /// The group's gid.
    pub group: Option<u32>,
    /// The mode, without the type.
    pub mode: Option<u32>,
    /// When it was read last.
    pub accessed: Option<Timespec>,
    /// When it was written last.
    pub modified: Option<Timespec>,
    /// Extended attributes and ACLs by their names: a value to be set, or `None` to be removed.
    pub xattrs: Vec<(CString, Option<Vec<u8>>)>,
}

impl Changes {
    /// Whether all stays as it is.
    pub fn is_empty(&self) -> bool {
        let Changes { owner, group, mode, accessed, modified, xattrs } = self;
        (owner, group, mode) == (&None, &None, &None)
            && accessed.is_none()
            && modified.is_none()
            && xattrs.is_empty()
    }
}

/// A caller's say in a copy. Called from several workers at once.
pub trait MergePolicy: Sync {
    /// What to do with an entry that is not a directory.
    fn entry(&self, entry: &EntryContext<'_>) -> EntryAction;

    /// What to do with a directory, given by its open source and what the target has.
    fn directory(&self, path: &[u8], source: BorrowedFd<'_>, target: Option<&Stat>) -> DirectoryAction;

    /// A directory that only the target has is about to be emptied, as far as [`MergePolicy::may_delete`] allows.
    fn emptying(&self, path: &[u8], target: &Stat) {
        let _ = (path, target);
    }

    /// Whether an entry that only the target has may be removed. Of a directory this is asked after all that it holds.
    fn may_delete(&self, path: &[u8], target: &Stat) -> bool;

    /// Whether a directory's default ACL in the target was shown to whoever made the source's entries, who may have taken it
    /// away. If it was not, it is not given to them either, but nobody whom it keeps out gets in by their modes.
    fn showed_default_acl(&self, path: &[u8]) -> bool {
        let _ = path;
        true
    }

    /// The name under which an extended attribute is carried over, if it is.
    fn xattr_name(&self, name: &CStr) -> Option<CString>;

    /// What changes of a directory that the target had before, unless it gets all of the source's attributes
    /// ([`DirectoryAction::Merge`]).
    ///
    /// # Errors
    /// If the attributes can't be read; this counts as a failure of the directory.
    fn changes(&self, _merged: &Merged<'_>) -> io::Result<Changes> {
        Ok(Changes::default())
    }

    /// An entry is in place; `target` is what the target has now.
    fn placed(&self, path: &[u8], target: &Stat);

    /// Whether entries of the source that shut out even their owner may be made accessible while they are copied. If not,
    /// they are passed over.
    fn may_open_up(&self) -> bool {
        true
    }

    /// Such an entry is about to be made accessible, which is told here, so that it can get back its mode from
    /// somebody else if this process dies before it gives it back.
    fn opening_up(&self, side: Side, path: &[u8], stat: &Stat) {
        let _ = (side, path, stat);
    }
}

/// The two ends of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Where entries come from.
    Source,
    /// Where they go.
    Target,
}
