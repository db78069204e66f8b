//! Showing the RAM disk over the directories that a job uses, and taking it away again.
//!
//! Root mounts here over a path that a user names, in directories that the user can change at any moment. So:
//!
//! - The path is opened as the user, who must be able to reach it, also where root can't (root-squashed filesystems).
//!   Symlinks are followed as the job would follow them.
//! - What was opened is judged, by where it really is: below a prefix of the administrator's, of the user's own, and not
//!   above or on anybody's mount. The path is never looked up again.
//! - What was opened is mounted over, by its descriptor. The user can rename the directory, but can't have another one
//!   mounted over. Where the new mount is in the kernel's table is compared with what was judged; if that is another
//!   place, it is taken away at once.
//! - What is shown is opened below the root of the RAM disk without following any symlink: that the user may write there
//!   is the point of it.
//!
//! The mount is there for all users of the node. It lets in whom the directory below it lets in, and nobody else.
//!
//! `open_targets` opens and judges, `held` keeps the ways to the overmounts open, `remove` takes them away; the mounting
//! is here. Users and messages say *cover* for it.

mod held;
mod open_targets;
mod remove;

pub(super) use held::HeldOvermount;
pub(super) use open_targets::OpenTarget;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use ondeck_api::wire::{NOT_MOUNTED, Overmount};
use ondeck_core::RamDiskId;
use ondeck_ramdisk::mounts::{self, Mount, Tree};
use ondeck_ramdisk::{Build, EngineError};
use ondeck_transfer::credentials::User;
use rustix::io::Errno;

use super::show::own_mounts;
use super::{CLIENT, DATA, RamDisk, lock, needs_mount};
use crate::hang::{as_root_or_owner, user_of, within};
use crate::record::RecordedOvermount;
use crate::unmount::all_mounts;
use open_targets::{check_table, moved};

fn as_user<T: Send>(
    user: &User,
    work: impl FnOnce() -> Result<T, EngineError> + Send,
) -> Result<T, EngineError> {
    user.on_a_thread(work).map_err(|error| EngineError::Refused(error.to_string()))?
}

/// Takes permissions of the group and of others from a directory of the RAM disk that the directory that it is shown
/// over does not give them. Between there and the staged copy the path protects nothing any more.
fn keep_out(shown: &OwnedFd, over: &OwnedFd) -> std::io::Result<()> {
    let (shown_now, over) = (rustix::fs::fstat(shown)?, rustix::fs::fstat(over)?);
    let others = over.st_mode & 0o007;
    // Another group is others.
    let group = if shown_now.st_gid == over.st_gid { over.st_mode & 0o070 } else { others << 3 };
    let mode = shown_now.st_mode & 0o7777;
    let less = mode & (0o7700 | group | others);
    if less == mode {
        return Ok(());
    }
    // A descriptor that only names a file can't be used for fchmod(2).
    let path = format!("/proc/self/fd/{}", shown.as_raw_fd());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(less))
}

impl RamDisk {
    /// Mounts the RAM disk over all targets, or over none.
    pub(super) fn overmount(&self, build: &Build) -> Result<(), EngineError> {
        self.overmount_with(build, &mut |_| Ok(()))?;
        self.hold_overmounts();
        Ok(())
    }

    /// The same; `before` is told the number of each mount that is about to be there, and may refuse it.
    pub(super) fn overmount_with(
        &self,
        build: &Build,
        before: &mut dyn FnMut(u64) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let targets = lock(&self.targets).take();
        let record = self.record();
        if !record.overmounts.is_empty() {
            return self.must_overmount_all();
        }
        let targets = targets.ok_or_else(|| {
            EngineError::Refused(format!(
                "nothing is aimed at for {} on this node (its agent may have been started again since); aim again",
                self.id()
            ))
        })?;
        let targets: Vec<Arc<OpenTarget>> = targets.into_iter().map(Arc::new).collect();
        let recorded: Vec<RecordedOvermount> = targets
            .iter()
            .map(|target| RecordedOvermount {
                overmount: target.overmount.clone(),
                real: target.real.clone(),
            })
            .collect();
        if !self.is_mounted()? {
            if needs_mount(build.layout) {
                let text = format!("the client of {} is not mounted on this node; mount it first", self.id());
                return Err(EngineError::Refused(text));
            }
            // The simulated engine shows nothing.
            return self.note(|record| (record.overmounts, record.whole) = (recorded, false));
        }
        self.is_whole(build)?;
        for one in &targets {
            check_table(&one.overmount, &one.real, one.mount, &[], false)?;
        }
        let (owner, looked_at) = (build.layout.owner, targets.clone());
        within(build.until, "the directories to cover", move || {
            as_user(&user_of(owner), || looked_at.iter().try_for_each(|target| target.is_in_place()))
        })?;
        let mut trees: Vec<(Arc<OpenTarget>, Tree)> = Vec::new();
        for one in &targets {
            trees.push((Arc::clone(one), self.tree(build, &one.overmount, Some(&one.directory))?));
        }
        // Noted before the mounts: who comes after a crash must know what to take away.
        self.note(|record| (record.overmounts, record.whole) = (recorded, false))?;
        let mut own = Vec::new();
        for (index, (one, tree)) in trees.iter().enumerate() {
            let number = tree.id().map_err(|error| EngineError::io("mount on", &one.real, error));
            let told = number.and_then(&mut *before);
            let mounted = told.and_then(|()| self.attach(build, one, tree, &own));
            match mounted {
                Ok(id) => own.push(id),
                Err(error) => {
                    for (one, tree) in trees[..=index].iter().rev() {
                        if let Err(failed) = tree.detach() {
                            let left = one.real.display();
                            let text = format!("{error}; and {left} can't be uncovered: {failed}");
                            return Err(EngineError::Refused(text));
                        }
                    }
                    self.note(|record| record.overmounts.clear())?;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The directory of the RAM disk that is to be shown, as a mount that is nowhere yet. It lets nobody in whom the
    /// directory that it will be shown over keeps out.
    fn tree(
        &self,
        build: &Build,
        overmount: &Overmount,
        over: Option<&Arc<OwnedFd>>,
    ) -> Result<Tree, EngineError> {
        let writable = self.runtime_dir.path(CLIENT);
        let over = over.cloned();
        let mut root = self.runtime_dir.path(CLIENT);
        // Otherwise what is mounted in an overmount would appear in the whole filesystem, too.
        mounts::make_private(&root).map_err(|error| EngineError::io("make private", &root, error))?;
        if overmount.read_only {
            root = self.read_only_view(&root)?;
            mounts::make_private(&root).map_err(|error| EngineError::io("make private", &root, error))?;
        }
        let below = Path::new(DATA).join(&overmount.from);
        within(build.until, "the RAM disk's directory", move || {
            let io = |error: std::io::Error| {
                let text = match Errno::from_io_error(&error) {
                    Some(Errno::NOENT) => "it does not exist",
                    Some(Errno::LOOP | Errno::NOTDIR) => "it is a symlink or no directory",
                    _ => return EngineError::io("open", &root.join(&below), error),
                };
                EngineError::Refused(format!("{} of the RAM disk can't be shown: {text}", below.display()))
            };
            let whole = mounts::open_plainly(&root).map_err(io)?;
            let shown = mounts::open_beneath(whole.as_fd(), &below).map_err(io)?;
            if let Some(over) = over {
                let whole = mounts::open_plainly(&writable).map_err(io)?;
                let shown = mounts::open_beneath(whole.as_fd(), &below).map_err(io)?;
                keep_out(&shown, &over)
                    .map_err(|error| EngineError::io("change the mode of", &writable.join(&below), error))?;
            }
            Tree::of(shown.as_fd()).map_err(io)
        })
    }

    /// Mounts one tree where it belongs, and makes sure that it is there. On failure it may still be mounted.
    fn attach(
        &self,
        build: &Build,
        target: &OpenTarget,
        tree: &Tree,
        own: &[u64],
    ) -> Result<u64, EngineError> {
        let io = |error: std::io::Error| EngineError::io("mount on", &target.real, error);
        let all = all_mounts()?;
        let outer = all
            .into_iter()
            .filter(|mount| own.contains(&mount.id))
            .filter(|mount| target.real != mount.at && target.real.starts_with(&mount.at))
            .max_by_key(|mount| mount.at.components().count());
        let (parent, directory) = match outer {
            None => (target.mount, Arc::clone(&target.directory)),
            Some(outer) => (outer.id, Arc::new(self.mount_point_in(build, &outer, target)?)),
        };
        tree.attach(directory.as_fd()).map_err(io)?;
        let id = tree.id().map_err(io)?;
        let all = all_mounts()?;
        let mount = all.iter().find(|mount| mount.id == id);
        if mount.is_none_or(|mount| mount.at != target.real || mount.parent != parent) {
            return Err(moved(&target.overmount, &target.real));
        }
        let mut all_own = own.to_vec();
        all_own.push(id);
        check_table(&target.overmount, &target.real, parent, &all_own, parent != target.mount)?;
        Ok(id)
    }

    /// The directory that an inner overmount is mounted on: one of the RAM disk itself, seen through the outer one.
    fn mount_point_in(
        &self,
        build: &Build,
        outer: &Mount,
        target: &OpenTarget,
    ) -> Result<OwnedFd, EngineError> {
        let (outer, real, owner) = (outer.clone(), target.real.clone(), build.layout.owner);
        within(build.until, "the directory to mount on", move || {
            let open = || -> std::io::Result<OwnedFd> {
                let root = mounts::open_plainly(&outer.at)?;
                if mounts::mount_of(root.as_fd())? != outer.id {
                    return Err(Errno::STALE.into());
                }
                let below = real.strip_prefix(&outer.at).map_err(std::io::Error::other)?;
                let found = mounts::open_beneath(root.as_fd(), below)?;
                if rustix::fs::fstat(&found)?.st_uid == owner.uid {
                    Ok(found)
                } else {
                    Err(Errno::ACCESS.into())
                }
            };
            as_root_or_owner(owner, open).map_err(|error| {
                EngineError::Refused(format!(
                    "{} lies in {}, which is covered too, and the RAM disk has no such directory of its user's there \
                     ({error}); stage it in with the outer one",
                    real.display(),
                    outer.at.display()
                ))
            })
        })
    }

    /// The mounts over directories of the job, the innermost first.
    pub(super) fn overmounts(&self) -> Result<Vec<Mount>, EngineError> {
        let shown = self.record().shown;
        let mut own = own_mounts(&self.runtime_dir)?;
        own.retain(|mount| !shown.iter().any(|shown| shown.path == mount.at));
        Ok(own)
    }

    /// What is wrong with the overmounts: somebody took one away.
    pub(super) fn overmount_faults(&self) -> Vec<String> {
        let recorded = self.record().overmounts;
        if recorded.is_empty() {
            return Vec::new();
        }
        let own = match self.overmounts() {
            Ok(own) => own,
            Err(error) => return vec![format!("it can't be told whether its covers are mounted: {error}")],
        };
        let gone = recorded.iter().filter(|recorded| !own.iter().any(|mount| mount.at == recorded.real));
        gone.map(|recorded| format!("{NOT_MOUNTED}{} any more", recorded.real.display())).collect()
    }

    /// Refuses if an overmount that was noted is not there: the agent was killed while it mounted them, or somebody took
    /// one away.
    pub(super) fn must_overmount_all(&self) -> Result<(), EngineError> {
        match self.overmount_faults().first() {
            Some(fault) if needs_mount(&self.record().layout) => {
                Err(EngineError::Refused(format!("{}: {fault}; uncover it first", self.id())))
            }
            _ => Ok(()),
        }
    }

    /// Whether it is mounted over the directory at a path.
    pub(crate) fn is_overmounted(&self, at: &Path) -> bool {
        self.record().overmounts.iter().any(|recorded| recorded.real == at)
    }

    /// Refuses while it is mounted over something.
    pub(super) fn must_overmount_nothing(&self) -> Result<(), EngineError> {
        match self.record().overmounts.first() {
            None => Ok(()),
            Some(recorded) => {
                let id: &RamDiskId = self.id();
                let at = recorded.real.display();
                Err(EngineError::Refused(format!("{id} covers {at} on this node; uncover it first")))
            }
        }
    }
}
