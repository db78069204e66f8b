//! Comparing a copy with its source: whether every entry is there, with the attributes it should have.
//!
//! The manifest holds checksums, sizes and times; modes, owners, extended attributes and ACLs are looked up on both
//! sides. What has changed in the source since the copy began is passed over, and counted: the copy is of what was there
//! before. Access times are not compared, because reading changes them.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{self, AtFlags, FileType, Mode, RawDir, Stat};
use rustix::io::Errno;

use crate::acl;
use crate::attributes::{
    ACL_ACCESS, ACL_DEFAULT, KeptOwnership, Privilege, Xattr, is_directory, is_regular, is_symlink,
    read_xattrs, read_xattrs_at,
};
use crate::dir::{self, DirFds, DirNode, FdBudget, Kind, NewDir, OPEN_DIRECTORY, is_partial_name};
use crate::error::{During, EntryError, Fault};
use crate::progress::{Event, Monitor};
use crate::work_stack::{Done, WorkStack};
use crate::{Options, manifest};

const ACTION: &str = "comparing it with its source";
/// Bytes of directory entries read at a time.
const LISTING: usize = 32 << 10;

/// What comparing found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Compared {
    /// Entries that are there with the attributes of the source's.
    pub matching: u64,
    /// Entries that are not; each was reported as an event.
    pub differing: u64,
    /// Entries that have changed in the source since the copy began.
    pub changed: u64,
}

/// A comparison of two trees.
pub(crate) struct Comparison<'a> {
    options: &'a Options,
    monitor: &'a Monitor<'a>,
    /// When the copy began.
    since: (i64, i64),
    /// Entries that could not be copied were told already, and need not be told again as missing or unreadable.
    missing_is_told: bool,
    root: bool,
    user: u32,
    groups: Vec<u32>,
    budget: FdBudget,
    stack: WorkStack<CompareItem>,
    matching: AtomicU64,
    differing: AtomicU64,
    changed: AtomicU64,
}

/// A directory that is to be entered, or the root.
enum CompareItem {
    List(Arc<DirNode>),
    Enter { parent: Arc<DirNode>, name: CString },
}

/// An entry on both sides.
struct Pair<'a> {
    source: BorrowedFd<'a>,
    target: BorrowedFd<'a>,
    name: &'a CStr,
    target_name: &'a CStr,
}

impl<'a> Comparison<'a> {
    pub fn new(
        options: &'a Options,
        monitor: &'a Monitor<'a>,
        began: SystemTime,
        missing_is_told: bool,
    ) -> Self {
        let began = began.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut groups: Vec<u32> = rustix::process::getgroups()
            .unwrap_or_default()
            .into_iter()
            .map(|group| group.as_raw())
            .collect();
        groups.push(rustix::process::getegid().as_raw());
        Comparison {
            options,
            monitor,
            since: (began.as_secs() as i64, began.subsec_nanos().into()),
            missing_is_told,
            root: Privilege::of_this_process().root,
            user: rustix::process::geteuid().as_raw(),
            groups,
            budget: FdBudget::of_this_process(),
            stack: WorkStack::new(),
            matching: AtomicU64::new(0),
            differing: AtomicU64::new(0),
            changed: AtomicU64::new(0),
        }
    }

    /// Compares the directories of a copy, and all they hold, with so many threads.
    pub fn trees(self, source: BorrowedFd<'_>, target: BorrowedFd<'_>, threads: usize) -> Compared {
        match self.roots(source, target) {
            Ok(root) => self.stack.push([CompareItem::List(root)]),
            Err(fault) => self.differs(Vec::new(), fault),
        }
        std::thread::scope(|scope| {
            let mut started = 0;
            for number in 0..threads {
                let thread = std::thread::Builder::new().name(format!("compare-{number}"));
                started += usize::from(thread.spawn_scoped(scope, || self.work()).is_ok());
            }
            if started == 0 {
                self.work();
            }
        });
        self.found()
    }

    fn roots(&self, source: BorrowedFd<'_>, target: BorrowedFd<'_>) -> Result<Arc<DirNode>, Fault> {
        let open = |directory| fs::openat(directory, c".", OPEN_DIRECTORY, Mode::empty()).during(ACTION);
        let fds = DirFds { source: open(source)?, target: Some(open(target)?) };
        let (ours, theirs) = (fs::fstat(&fds.source).during(ACTION)?, fs::fstat(target).during(ACTION)?);
        let xattrs = read_xattrs(source, None).and_then(|ours| Ok((ours, read_xattrs(target, None)?)));
        let differences = xattrs.map(|xattrs| self.differences(&ours, &theirs, &xattrs.0, &xattrs.1));
        self.note(Vec::new(), &ours, differences);
        Ok(self.node(None, CString::default(), fds, (ours, theirs)))
    }

    /// Compares a single entry.
    pub fn single(
        self,
        source: BorrowedFd<'_>,
        name: &CStr,
        target: BorrowedFd<'_>,
        target_name: &CStr,
    ) -> Compared {
        self.pair(target_name.to_bytes().to_vec(), &Pair { source, target, name, target_name });
        self.found()
    }

    fn found(&self) -> Compared {
        Compared {
            matching: self.matching.load(Relaxed),
            differing: self.differing.load(Relaxed),
            changed: self.changed.load(Relaxed),
        }
    }

    fn node(
        &self,
        parent: Option<Arc<DirNode>>,
        name: CString,
        fds: DirFds,
        (source, target): (Stat, Stat),
    ) -> Arc<DirNode> {
        let new = NewDir {
            parent,
            source_name: name.clone(),
            name,
            kind: Kind::Existing,
            partial: None,
            restore_mode: None,
            restore_source: None,
            attributes: false,
            delete: false,
            hands_down_acl: false,
            most: 0o777,
            source,
            target: Some(target),
            fds,
        };
        DirNode::new(new, &self.budget)
    }

    fn work(&self) {
        while let Some(item) = self.stack.pop() {
            let _done = Done(&self.stack);
            if self.monitor.progress.is_cancelled() {
                continue;
            }
            let listed = match item {
                CompareItem::List(node) => self.list(&node).map_err(|fault| (node.path(), fault)),
                CompareItem::Enter { parent, name } => self
                    .enter(&parent, &name)
                    .and_then(|node| self.list(&node))
                    .map_err(|fault| (dir::join(&parent.path(), name.to_bytes()), fault)),
            };
            if let Err((path, fault)) = listed {
                self.unreadable(path, fault);
            }
        }
    }

    fn enter(&self, parent: &Arc<DirNode>, name: &CStr) -> Result<Arc<DirNode>, Fault> {
        let above = parent.fds(&self.budget)?;
        let open = |directory| fs::openat(directory, name, OPEN_DIRECTORY, Mode::empty()).during(ACTION);
        let (source, target) = (open(above.source.as_fd())?, open(above.target()?)?);
        let stats = (fs::fstat(&source).during(ACTION)?, fs::fstat(&target).during(ACTION)?);
        let fds = DirFds { source, target: Some(target) };
        Ok(self.node(Some(parent.clone()), name.to_owned(), fds, stats))
    }

    /// Compares the entries of a directory, and leaves its directories to whoever is free.
    fn list(&self, node: &Arc<DirNode>) -> Result<(), Fault> {
        let fds = node.fds(&self.budget)?;
        let (source, target) = (fds.source.as_fd(), fds.target()?);
        // With an offset of its own.
        let listing = fs::openat(source, c".", OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
        let path = node.path();
        let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING];
        let mut entries = RawDir::new(&listing, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry.during(ACTION)?;
            let name = entry.file_name();
            let bytes = name.to_bytes();
            if matches!(bytes, b"." | b"..")
                || self.options.exclude.matches_listed(&path, source, &entry)
                // It was not copied, and was told.
                || is_partial_name(bytes)
            {
                continue;
            }
            if self.monitor.progress.is_cancelled() {
                break;
            }
            if self.pair(dir::join(&path, bytes), &Pair { source, target, name, target_name: name }) {
                self.stack.push([CompareItem::Enter { parent: node.clone(), name: name.to_owned() }]);
            }
        }
        Ok(())
    }

    /// Compares an entry. Returns whether it is a directory on both sides.
    fn pair(&self, path: Vec<u8>, pair: &Pair<'_>) -> bool {
        let ours = match fs::statat(pair.source, pair.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // It was removed meanwhile.
            Err(Errno::NOENT) => {
                self.changed.fetch_add(1, Relaxed);
                return false;
            }
            Err(error) => {
                self.unreadable(path, Fault::new(ACTION, error));
                return false;
            }
        };
        let theirs = match fs::statat(pair.target, pair.target_name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => {
                if !self.missing_is_told {
                    self.note(path, &ours, Ok(vec!["it is not there".to_owned()]));
                }
                return false;
            }
            Err(error) => {
                self.unreadable(path, Fault::new(ACTION, error));
                return false;
            }
        };
        // Left alone, as it was asked for.
        if self.options.update && is_regular(&ours) && is_regular(&theirs) && !newer(&ours, &theirs) {
            return false;
        }
        let same_type = ours.st_mode & libc::S_IFMT == theirs.st_mode & libc::S_IFMT;
        let differences = if same_type {
            let xattrs = read_xattrs_at(pair.source, pair.name, None)
                .and_then(|source| Ok((source, read_xattrs_at(pair.target, pair.target_name, None)?)));
            xattrs.and_then(|(source, target)| {
                let mut differences = self.differences(&ours, &theirs, &source, &target);
                if is_symlink(&ours) {
                    differences.extend(link_difference(pair)?);
                }
                Ok(differences)
            })
        } else {
            let kind = |stat: &Stat| kind_name(FileType::from_raw_mode(stat.st_mode));
            Ok(vec![format!("it is a {}, the source's is a {}", kind(&theirs), kind(&ours))])
        };
        self.note(path, &ours, differences);
        same_type && is_directory(&ours)
    }

    /// Counts an entry by what differs of it, and tells what does.
    fn note(&self, path: Vec<u8>, source: &Stat, differences: Result<Vec<String>, Fault>) {
        match differences {
            Ok(differences) if differences.is_empty() => {
                self.matching.fetch_add(1, Relaxed);
            }
            _ if ({ source.st_ctime }, source.st_ctime_nsec as i64) >= self.since => {
                self.changed.fetch_add(1, Relaxed);
            }
            Ok(differences) => self.differs(path, Fault::message(ACTION, &differences.join("; "))),
            Err(fault) => self.unreadable(path, fault),
        }
    }

    fn unreadable(&self, path: Vec<u8>, fault: Fault) {
        // What may not be read was not copied either.
        if !(self.missing_is_told && fault.source.kind() == std::io::ErrorKind::PermissionDenied) {
            self.differs(path, fault);
        }
    }

    fn differs(&self, path: Vec<u8>, fault: Fault) {
        self.differing.fetch_add(1, Relaxed);
        self.monitor.progress.errors.fetch_add(1, Relaxed);
        let error = EntryError { path, action: fault.action, source: fault.source };
        (self.monitor.event)(Event::Failed(&error));
    }

    /// What of the target's entry is not as it should be, a sentence each.
    fn differences(&self, source: &Stat, target: &Stat, ours: &[Xattr], theirs: &[Xattr]) -> Vec<String> {
        let mut differences = Vec::new();
        let mut differ = |what: &str, is: String, wanted: String| {
            differences.push(format!("its {what} is {is}, the source's {wanted}"));
        };
        if is_regular(source) && source.st_size != target.st_size {
            differ("size", target.st_size.to_string(), source.st_size.to_string());
        }
        if matches!(
            FileType::from_raw_mode(source.st_mode),
            FileType::CharacterDevice | FileType::BlockDevice
        ) && source.st_rdev != target.st_rdev
        {
            let number = |stat: &Stat| format!("{}:{}", fs::major(stat.st_rdev), fs::minor(stat.st_rdev));
            differ("device number", number(target), number(source));
        }
        let kept = KeptOwnership::between(source, target);
        // Only root can give files away, and others only to their own groups.
        if !kept.user && (self.root || source.st_uid == self.user) {
            differ("owner", target.st_uid.to_string(), source.st_uid.to_string());
        }
        if !kept.group && (self.root || self.groups.contains(&source.st_gid)) {
            differ("group", target.st_gid.to_string(), source.st_gid.to_string());
        }
        let wanted = source.st_mode & 0o7777 & !kept.unsafe_bits();
        let mode = target.st_mode & 0o7777;
        if !is_symlink(source) && mode != wanted {
            differ("mode", format!("{mode:04o}"), format!("{wanted:04o}"));
        }
        let (found, wanted) = (manifest::mtime(target), manifest::mtime(source));
        if !is_as_exact_as_can_be(found, wanted) {
            let text = |time: (i64, u32)| format!("{}.{:09}", time.0, time.1);
            differ("modification time", text(found), text(wanted));
        }
        if !self.options.attributes_best_effort {
            xattr_differences(ours, theirs, self.root, &mut differences);
        }
        differences
    }
}

/// What of extended attributes and ACLs is not as it should be.
fn xattr_differences(ours: &[Xattr], theirs: &[Xattr], root: bool, differences: &mut Vec<String>) {
    let find = |xattrs: &[Xattr], name: &CStr| {
        xattrs.iter().find(|xattr| *xattr.name == *name).map(|xattr| xattr.value.clone())
    };
    for (name, what) in [(ACL_ACCESS, "access control list"), (ACL_DEFAULT, "default access control list")] {
        let (wanted, found) = (find(ours, name), find(theirs, name));
        if wanted != found {
            let text = |acl: Option<Vec<u8>>| match acl {
                None => "none".to_owned(),
                Some(acl) => acl::to_text(&acl).unwrap_or_else(|| "unreadable".to_owned()),
            };
            differences.push(format!("its {what} is {}, the source's {}", text(found), text(wanted)));
        }
    }
    for xattr in ours.iter().filter(|xattr| !xattr.is_acl()) {
        let name = xattr.name.to_string_lossy();
        match find(theirs, &xattr.name) {
            Some(value) if value == xattr.value => {}
            // Theirs of security modules, and left out where they may not be set.
            _ if xattr.is_privileged() && !root => {}
            None if xattr.is_privileged() => {}
            Some(_) => differences.push(format!("its extended attribute {name} has another value")),
            None => differences.push(format!("it lacks the extended attribute {name}")),
        }
    }
    // Filesystems have attributes of their own, which no copy sets.
    for xattr in theirs.iter().filter(|xattr| xattr.name.to_bytes().starts_with(b"user.")) {
        if find(ours, &xattr.name).is_none() {
            let name = xattr.name.to_string_lossy();
            differences.push(format!("it has the extended attribute {name}, which its source has not"));
        }
    }
}

fn link_difference(pair: &Pair<'_>) -> Result<Option<String>, Fault> {
    let ours = fs::readlinkat(pair.source, pair.name, Vec::new()).during(ACTION)?;
    let theirs = fs::readlinkat(pair.target, pair.target_name, Vec::new()).during(ACTION)?;
    Ok((ours != theirs).then(|| {
        format!("it points to {}, the source's to {}", theirs.to_string_lossy(), ours.to_string_lossy())
    }))
}

pub(crate) fn newer(source: &Stat, target: &Stat) -> bool {
    crate::manifest::mtime(source) > crate::manifest::mtime(target)
        || (crate::manifest::mtime(source) == crate::manifest::mtime(target)
            && source.st_size != target.st_size)
}

/// Whether a time is the wanted one, as far as a filesystem keeps fractions of seconds.
fn is_as_exact_as_can_be(found: (i64, u32), wanted: (i64, u32)) -> bool {
    found.0 == wanted.0
        && [1, 100, 1_000, 1_000_000, 1_000_000_000].iter().any(|unit| found.1 == wanted.1 - wanted.1 % unit)
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::Fifo => "FIFO",
        FileType::Socket => "socket",
        _ => "device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_may_lack_what_its_filesystem_does_not_keep() {
        for (found, same) in [
            ((5, 123_456_789), true),
            ((5, 123_456_700), true),
            ((5, 123_456_000), true),
            ((5, 0), true),
            ((5, 123_456_788), false),
            ((5, 500_000_000), false),
            ((4, 123_456_789), false),
        ] {
            assert_eq!(is_as_exact_as_can_be(found, (5, 123_456_789)), same, "{found:?}");
        }
    }
}
