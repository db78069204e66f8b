//! The data of one regular file.
//!
//! A file is read into a worker's buffer, hashed there, and written from there: the checksum is that of the bytes
//! that were written, whatever happens to the source meanwhile. Without a checksum the kernel copies what fits into one
//! buffer (docs/decisions/0032). Files of up to [`CHUNKED_ABOVE`] bytes are one
//! worker's; larger ones are cut into chunks that all workers share.

mod chunks;
mod data;

pub(super) use chunks::LargeFile;

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{self, AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::attributes::{self, ACL_ACCESS, Xattr, is_regular, same_state};
use crate::checksum::{CHUNKED_ABOVE, Checksum, Digest};
use crate::compare::newer;
use crate::engine::placement::{Over, Placement};
use crate::engine::{At, Engine, Worker};
use crate::error::{During, Fault};
use crate::verify::digest_of;

/// How often a file that changes under the copy is copied again before it is reported.
pub(super) const TRIES: u32 = 3;

const READ_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    // A FIFO swapped in for the file must not block a worker.
    .union(OFlags::NONBLOCK);

/// A file that is being copied: both sides open, and what it is to become.
struct Copying {
    source: OwnedFd,
    target: OwnedFd,
    stat: Stat,
    xattrs: Vec<Xattr>,
    placement: Placement,
    working_name: CString,
}

impl Engine<'_> {
    /// Copies a regular file, or begins to if it is large.
    pub(super) fn regular_file(&self, at: &At<'_>, worker: &mut Worker, attempt: u32) -> Result<(), Fault> {
        let mut attempt = attempt;
        if self.is_shut(at)? {
            return Ok(());
        }
        loop {
            let (source, xattrs) = self.open_source(at)?;
            let stat = fs::fstat(&source).during("reading its attributes")?;
            if !is_regular(&stat) {
                return Err(Fault::message(
                    "copying it",
                    "it was replaced by another kind of entry meanwhile",
                ));
            }
            let found = self.found_in_target(at)?;
            if attempt == 0 {
                self.monitor.progress.bytes_found.fetch_add(stat.st_size as u64, Ordering::Relaxed);
                // A dry run has no names to link to.
                if stat.st_nlink > 1 && self.policy.is_none() && !self.options.dry_run {
                    let to = Placement {
                        name: self.target_name(at.name).to_owned(),
                        beside: false,
                        over: Over::Anything,
                    };
                    if self.join_links(at, &stat, &to, worker)? {
                        return Ok(());
                    }
                }
                if let Some(found) = &found {
                    if self.already_there(at, source.as_fd(), &stat, found, worker).is_some() {
                        if stat.st_nlink > 1 && self.policy.is_some() {
                            self.meet_unchanged(at, &stat);
                        }
                        self.unchanged(at, &stat, true);
                        return Ok(());
                    }
                    if self.options.update && is_regular(found) && !newer(&stat, found) {
                        self.unchanged(at, &stat, false);
                        return Ok(());
                    }
                }
            }
            let linked = stat.st_nlink > 1;
            let placement = match self.placement(at, &stat, found.as_ref()) {
                Ok(Some(placement)) => placement,
                Ok(None) => return Ok(()),
                Err(fault) => {
                    if linked {
                        self.settle_links(at, &stat, None);
                    }
                    return Err(fault);
                }
            };
            if placement.beside
                && attempt == 0
                && let Some(found) = &found
                && self.holds_the_same(at, source.as_fd(), &stat, found, worker)
            {
                if linked {
                    self.meet_unchanged(at, &stat);
                }
                self.unchanged(at, &stat, false);
                return Ok(());
            }
            if linked
                && self.policy.is_some()
                && attempt == 0
                && self.join_links(at, &stat, &placement, worker)?
            {
                return Ok(());
            }
            let copied = self.copy_regular(at, (source, xattrs), stat, placement, worker, attempt);
            match copied {
                Ok(Progressed::Done | Progressed::Begun) => return Ok(()),
                Ok(Progressed::Changed) if attempt + 1 < TRIES => {
                    attempt += 1;
                    self.counts.retried.fetch_add(1, Ordering::Relaxed);
                }
                Ok(Progressed::Changed) => {
                    if linked {
                        self.settle_links(at, &stat, None);
                    }
                    return Err(kept_changing());
                }
                Err(fault) => {
                    if linked {
                        self.settle_links(at, &stat, None);
                    }
                    return Err(fault);
                }
            }
        }
    }

    /// With its extended attributes, if they could not be read later.
    fn open_source(&self, at: &At<'_>) -> Result<(OwnedFd, Option<Vec<Xattr>>), Fault> {
        // Reading a source should not change its access time; only its owner (or root) may ask for that.
        if self.privilege.root {
            match fs::openat(&at.fds.source, at.name, READ_FLAGS | OFlags::NOATIME, Mode::empty()) {
                Err(Errno::PERM) => {}
                other => return Ok((other.during("opening it")?, None)),
            }
        }
        self.open_in_source(at, READ_FLAGS)
    }

    fn copy_regular(
        &self,
        at: &At<'_>,
        (source, xattrs): (OwnedFd, Option<Vec<Xattr>>),
        stat: Stat,
        placement: Placement,
        worker: &mut Worker,
        attempt: u32,
    ) -> Result<Progressed, Fault> {
        let xattrs = match xattrs {
            _ if self.options.modes_only => Vec::new(),
            Some(xattrs) => xattrs,
            None => attributes::read_xattrs(source.as_fd(), self.policy)?,
        };
        let working_name = self.working_name(at.node, &placement);
        let directory = at.fds.target()?;
        // Until its owner and ACL are right, a file is its maker's alone.
        let plain = at.node.created_as.get() == Some(&(stat.st_uid, stat.st_gid))
            && !at.node.hands_down_acl
            && !xattrs.iter().any(|xattr| *xattr.name == *ACL_ACCESS);
        // Extended attributes can only be given to a file that one may write to.
        let writable = if xattrs.is_empty() { 0 } else { 0o600 };
        let most = if plain { at.node.most } else { 0o700 };
        let mode = Mode::from_raw_mode(stat.st_mode & most | writable);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let create = || fs::openat(directory, &*working_name, flags, mode);
        let target = self.replacing_leftover(directory, &working_name, create).during("creating it")?;
        if at.node.hands_down_acl {
            attributes::drop_acl(target.as_fd());
        }
        let copy = Copying { source, target, stat, xattrs, placement, working_name };
        if stat.st_size as u64 > CHUNKED_ABOVE {
            return self.begin_large(at, copy, attempt);
        }
        let digest = match self.copy_whole(&copy, worker) {
            Ok(digest) => digest,
            Err(fault) => {
                self.discard(directory, &copy);
                return Err(fault);
            }
        };
        self.finish(at, &copy, digest, worker)
    }

    /// The data is there: attributes, a last look at the source, and the name.
    fn finish(
        &self,
        at: &At<'_>,
        copy: &Copying,
        digest: Digest,
        worker: &mut Worker,
    ) -> Result<Progressed, Fault> {
        let directory = at.fds.target()?;
        let after = fs::fstat(&copy.source).during("reading its attributes")?;
        if !same_state(&copy.stat, &after) {
            self.discard(directory, copy);
            return Ok(Progressed::Changed);
        }
        let written = fs::fstat(&copy.target).during("checking its size")?;
        if written.st_size != copy.stat.st_size {
            self.discard(directory, copy);
            let why = format!("the target has {} bytes, the source {}", written.st_size, copy.stat.st_size);
            return Err(Fault::message("checking its size", &why));
        }
        let _ = at.node.created_as.set((written.st_uid, written.st_gid));
        let inherited = self.options.ownership == crate::Ownership::Inherit;
        if inherited && let Ok(old) = fs::statat(directory, &*copy.placement.name, AtFlags::SYMLINK_NOFOLLOW)
        {
            // The new version of a file stays with the group that shares it.
            if old.st_gid != written.st_gid {
                let _ = fs::fchown(&copy.target, None, Some(fs::Gid::from_raw(old.st_gid)));
            }
        }
        let applied = if self.options.modes_only {
            attributes::apply_permissions(copy.target.as_fd(), &written, &copy.stat)
        } else {
            self.judge(attributes::apply(
                copy.target.as_fd(),
                &written,
                &attributes::cut(&copy.stat, &copy.xattrs, at.node.most),
                &copy.xattrs,
                self.options.ownership,
                &self.privilege,
            ))
        };
        if copy.placement.beside && self.same_content(at, copy, digest, worker)? {
            self.discard(directory, copy);
            self.unchanged(at, &copy.stat, false);
            return Ok(Progressed::Done);
        }
        if !self.give_name(directory, &copy.working_name, &copy.placement)? {
            self.discard(directory, copy);
            return Ok(Progressed::Changed);
        }
        self.placed(at, &copy.placement, b'f', digest, &copy.stat, applied.is_ok(), worker)?;
        if copy.stat.st_nlink > 1 {
            self.settle_links(at, &copy.stat, Some(&copy.placement.name));
        }
        // Attributes that the target can't hold are reported, but the file is there with its data.
        applied.map(|()| Progressed::Done)
    }

    /// Whether the target's own version holds the same bytes: an earlier copy's, perhaps, which left no record. Asked
    /// before anything is written, as there may be no room for it.
    fn holds_the_same(
        &self,
        at: &At<'_>,
        source: BorrowedFd<'_>,
        stat: &Stat,
        found: &Stat,
        worker: &mut Worker,
    ) -> bool {
        if self.options.checksum == Checksum::None || !is_regular(found) || found.st_size != stat.st_size {
            return false;
        }
        let mut digest = |file: BorrowedFd<'_>| {
            digest_of(file, stat.st_size as u64, self.options.checksum, &mut worker.buffer).ok()
        };
        let theirs =
            at.fds.target().ok().and_then(|dir| fs::openat(dir, at.name, READ_FLAGS, Mode::empty()).ok());
        // What can't be read is not the same, and will be told by the copy.
        theirs.is_some_and(|theirs| {
            let theirs = digest(theirs.as_fd());
            theirs.is_some() && theirs == digest(source)
        })
    }

    /// Whether the target's own version, beside which a copy would be put, holds the same bytes.
    fn same_content(
        &self,
        at: &At<'_>,
        copy: &Copying,
        digest: Digest,
        worker: &mut Worker,
    ) -> Result<bool, Fault> {
        const ACTION: &str = "comparing it with the version on disk";
        let Ok(theirs) = fs::openat(at.fds.target()?, at.name, READ_FLAGS, Mode::empty()) else {
            return Ok(false);
        };
        let stat = fs::fstat(&theirs).during(ACTION)?;
        if self.options.checksum == Checksum::None || !is_regular(&stat) || stat.st_size != copy.stat.st_size
        {
            return Ok(false);
        }
        let found = digest_of(theirs.as_fd(), stat.st_size as u64, self.options.checksum, &mut worker.buffer);
        Ok(found.during(ACTION)? == digest)
    }

    fn discard(&self, directory: BorrowedFd<'_>, copy: &Copying) {
        let _ = fs::unlinkat(directory, &*copy.working_name, AtFlags::empty());
    }
}

/// How far one attempt came.
enum Progressed {
    Done,
    /// A large file whose chunks are on the stack.
    Begun,
    /// The source changed while it was copied; nothing is left of the attempt.
    Changed,
}

pub(super) fn kept_changing() -> Fault {
    Fault::message(
        "copying it",
        "it kept changing while it was copied (3 tries); copy it when its writer has closed it",
    )
}
