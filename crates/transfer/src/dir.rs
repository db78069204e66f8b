//! A directory of the source and its counterpart in the target, opened once and reached by descriptor from then on.
//!
//! Every node keeps its two descriptors open until its last entry is done, unless the process runs low on
//! descriptors: then the oldest nodes (those nearest the root, which a depth-first walk needs last) are closed, and
//! opened again from their nearest open ancestor when they are needed. Both ways a directory is only entered if it is
//! still the one that was seen first, by device and inode number.

use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use rustix::fs::{self, Mode, OFlags, Stat};

use crate::error::{During, Fault};

/// How a directory is opened on either side: never through a symlink.
pub(crate) const OPEN_DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// How the target's directory came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It was there before: others may look into it, so every entry is made under a temporary name.
    Existing,
    /// We made it and nobody looks into it yet: entries get their names at once.
    Fresh,
    /// An interrupted copy made it: as `Fresh`, but it may hold anything.
    Resumed,
    /// A dry run that would make it.
    Imagined,
}

/// Open descriptors of the pair.
pub(crate) struct DirFds {
    pub source: OwnedFd,
    /// `None` in a dry run that would make the directory.
    pub target: Option<OwnedFd>,
}

impl DirFds {
    /// The target's descriptor; a dry run never asks for it.
    pub fn target(&self) -> Result<BorrowedFd<'_>, Fault> {
        self.target
            .as_ref()
            .map(|fd| fd.as_fd())
            .ok_or_else(|| Fault::message("writing it", "this is a dry run"))
    }
}

/// A pair of directories.
pub(crate) struct DirNode {
    pub parent: Option<Arc<DirNode>>,
    /// The name that it gets in the target once it is complete.
    pub name: CString,
    /// The name in the source: another one if it is put beside what has its name.
    pub source_name: CString,
    pub kind: Kind,
    /// The temporary name under which the target is built, if it is renamed when complete.
    pub partial: Option<CString>,
    /// The mode that the target directory had before it was made writable for us.
    pub restore_mode: Option<u32>,
    /// The same for the source, which is a RAM disk's.
    pub restore_source: Option<u32>,
    /// Whether the finished target gets the source's attributes.
    pub attributes: bool,
    /// Whether entries that only the target has are removed.
    pub delete: bool,
    /// Whether the target directory hands a default ACL down to new entries.
    pub hands_down_acl: bool,
    /// The permission bits that new entries without an ACL get at most.
    pub most: u32,
    /// The source's attributes when it was entered.
    pub source: Stat,
    /// The target's attributes when it was entered; `None` in a dry run that would make it.
    pub entered: Option<Stat>,
    renamed: AtomicBool,
    /// The name under which it was shown, if somebody else has taken its own meanwhile.
    shown_as: OnceLock<CString>,
    fds: Mutex<Option<Arc<DirFds>>>,
    /// Items below this directory that are not done; whoever ends the last one completes the directory.
    pub pending: AtomicUsize,
    /// The source could not be read to its end, so nothing may be taken for missing.
    pub incomplete: AtomicBool,
    /// Owner and group that the target's filesystem gives to files created here.
    pub created_as: OnceLock<(u32, u32)>,
}

/// What is known of a pair when its node is made.
pub(crate) struct NewDir {
    pub parent: Option<Arc<DirNode>>,
    pub name: CString,
    pub source_name: CString,
    pub kind: Kind,
    pub partial: Option<CString>,
    pub restore_mode: Option<u32>,
    pub restore_source: Option<u32>,
    pub attributes: bool,
    pub delete: bool,
    pub hands_down_acl: bool,
    pub most: u32,
    pub source: Stat,
    pub target: Option<Stat>,
    pub fds: DirFds,
}

impl DirNode {
    /// A node whose own reading counts as one pending item.
    pub fn new(new: NewDir, budget: &FdBudget) -> Arc<DirNode> {
        let node = Arc::new(DirNode {
            parent: new.parent,
            name: new.name,
            source_name: new.source_name,
            kind: new.kind,
            partial: new.partial,
            restore_mode: new.restore_mode,
            restore_source: new.restore_source,
            attributes: new.attributes,
            delete: new.delete,
            hands_down_acl: new.hands_down_acl,
            most: new.most,
            source: new.source,
            entered: new.target,
            renamed: AtomicBool::new(false),
            shown_as: OnceLock::new(),
            fds: Mutex::new(Some(Arc::new(new.fds))),
            pending: AtomicUsize::new(1),
            incomplete: AtomicBool::new(false),
            created_as: OnceLock::new(),
        });
        budget.opened(&node);
        node
    }

    /// A poisoned lock still holds valid descriptors.
    fn slot(&self) -> MutexGuard<'_, Option<Arc<DirFds>>> {
        self.fds.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The name under which the target is found now.
    pub fn target_name(&self) -> CString {
        match &self.partial {
            Some(partial) if !self.renamed.load(Ordering::Acquire) => partial.clone(),
            _ => self.shown_as.get().unwrap_or(&self.name).clone(),
        }
    }

    /// It has got a name, which is another than its own if somebody else has taken that.
    pub fn mark_renamed(&self, beside: Option<CString>) {
        if let Some(name) = beside {
            let _ = self.shown_as.set(name);
        }
        self.renamed.store(true, Ordering::Release);
    }

    /// The descriptors, opened again if they had been closed.
    pub fn fds(self: &Arc<Self>, budget: &FdBudget) -> Result<Arc<DirFds>, Fault> {
        if let Some(fds) = &*self.slot() {
            return Ok(fds.clone());
        }
        // Not recursive: a chain of directories can be deeper than a thread's stack.
        let mut closed = vec![self.clone()];
        let mut open = loop {
            let last = &closed[closed.len() - 1];
            let Some(parent) = last.parent.clone() else {
                return Err(Fault::message("opening its directory again", "the root of the copy was closed"));
            };
            let held = parent.slot().clone();
            match held {
                Some(fds) => break fds,
                None => closed.push(parent),
            }
        };
        while let Some(node) = closed.pop() {
            open = Arc::new(node.reopen(&open)?);
            *node.slot() = Some(open.clone());
            budget.opened(&node);
        }
        Ok(open)
    }

    fn reopen(&self, parent: &DirFds) -> Result<DirFds, Fault> {
        const ACTION: &str = "opening its directory again";
        let moved = || Fault::message(ACTION, "it was replaced by another while it was being copied");
        let source =
            fs::openat(&parent.source, &*self.source_name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
        let stat = fs::fstat(&source).during(ACTION)?;
        if (stat.st_dev, stat.st_ino) != (self.source.st_dev, self.source.st_ino) {
            return Err(moved());
        }
        let Some(entered) = &self.entered else { return Ok(DirFds { source, target: None }) };
        let target = fs::openat(parent.target()?, &*self.target_name(), OPEN_DIRECTORY, Mode::empty())
            .during(ACTION)?;
        let stat = fs::fstat(&target).during(ACTION)?;
        if (stat.st_dev, stat.st_ino) != (entered.st_dev, entered.st_ino) {
            return Err(moved());
        }
        Ok(DirFds { source, target: Some(target) })
    }

    /// Gives the descriptors back. The root's stay: everything else is opened from them.
    pub fn close(&self) {
        if self.parent.is_some() {
            self.slot().take();
        }
    }

    fn is_open(&self) -> bool {
        self.slot().is_some()
    }

    /// The path in the target, relative to the root of the copy; empty for the root.
    pub fn path(&self) -> Vec<u8> {
        let mut names = Vec::new();
        let mut node = self;
        while let Some(parent) = &node.parent {
            names.push(node.name.to_bytes());
            node = parent;
        }
        names.reverse();
        names.join(&b'/')
    }
}

impl Drop for DirNode {
    /// Unlinks long chains of parents one by one: dropping them recursively would need a stack as deep as the tree.
    fn drop(&mut self) {
        let mut parent = self.parent.take();
        while let Some(node) = parent {
            match Arc::into_inner(node) {
                Some(mut last) => parent = last.parent.take(),
                None => break,
            }
        }
    }
}

/// Bounds the number of directories that are open at a time.
pub(crate) struct FdBudget {
    most: usize,
    /// Open nodes, oldest first; may hold nodes that were closed since.
    order: Mutex<VecDeque<Weak<DirNode>>>,
}

impl FdBudget {
    /// Half of what the process may open, two descriptors for each node; the other half is for files and the caller.
    pub fn of_this_process() -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
        // Beyond some thousand nodes nothing is gained by keeping more.
        FdBudget { most: (limit / 4).clamp(16, 4096) as usize, order: Mutex::new(VecDeque::new()) }
    }

    fn opened(&self, node: &Arc<DirNode>) {
        if node.parent.is_none() {
            return;
        }
        let mut order = self.order.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        order.push_back(Arc::downgrade(node));
        if order.len() <= self.most {
            return;
        }
        // Most nodes have been closed in the meantime because they are complete; only if that isn't enough are the
        // oldest ones closed while still in use. A quarter goes at once, so that this isn't done for every node.
        order.retain(|weak| weak.upgrade().is_some_and(|node| node.is_open()));
        if order.len() > self.most * 3 / 4 {
            let excess = order.len() - self.most / 2;
            for weak in order.drain(..excess) {
                if let Some(old) = weak.upgrade().filter(|old| !Arc::ptr_eq(old, node)) {
                    old.close();
                }
            }
        }
    }
}

/// `parent/name`, or `name` at the root.
pub(crate) fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    if parent.is_empty() { name.to_vec() } else { [parent, b"/", name].concat() }
}

const PARTIAL_SUFFIX: &[u8] = b".ondeck-partial";

/// The temporary name of an entry that is not complete yet: `.NAME.ondeck-partial`.
///
/// It follows from the name alone, so that a copy that is run again finds and continues or replaces what an
/// interrupted one left. A name too long for the suffix is cut and made unique by a hash.
pub(crate) fn partial_name(name: &CStr) -> CString {
    tagged_name(name, None)
}

/// The same with the tag of a run: `.NAME.ondeck-partial-TAG`.
pub(crate) fn tagged_name(name: &CStr, tag: Option<&str>) -> CString {
    const NAME_MAX: usize = 255;
    let name = name.to_bytes();
    let mut suffix = PARTIAL_SUFFIX.to_vec();
    if let Some(tag) = tag {
        suffix.push(b'-');
        suffix.extend_from_slice(tag.as_bytes());
    }
    let mut partial = vec![b'.'];
    if name.len() + 1 + suffix.len() <= NAME_MAX {
        partial.extend_from_slice(name);
    } else {
        partial.extend_from_slice(&name[..NAME_MAX - 1 - suffix.len() - 17]);
        let hash = twox_hash::XxHash3_128::oneshot(name) as u64;
        partial.extend_from_slice(format!("~{hash:016x}").as_bytes());
    }
    partial.extend_from_slice(&suffix);
    CString::new(partial).unwrap_or_default() // made of a C string and text
}

/// Whether a name is one that [`partial_name`] makes.
pub(crate) fn is_partial_name(name: &[u8]) -> bool {
    name.starts_with(b".") && name.ends_with(PARTIAL_SUFFIX) && name.len() > 1 + PARTIAL_SUFFIX.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_name_is_never_longer_than_a_name_may_be_and_differs_for_different_names() {
        let long = |last: u8| CString::new([vec![b'x'; 254], vec![last]].concat()).unwrap();
        let (a, b) = (partial_name(&long(b'a')), partial_name(&long(b'b')));
        assert!(a.to_bytes().len() <= 255 && a != b);
        assert!(is_partial_name(a.to_bytes()) && is_partial_name(partial_name(c"x").to_bytes()));
        assert!(!is_partial_name(b"x.ondeck-partial") && !is_partial_name(b".ondeck-partial"));
    }
}
