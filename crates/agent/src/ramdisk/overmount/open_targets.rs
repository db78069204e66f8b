//! Opening and judging the directories that will be mounted over.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use ondeck_api::wire::Overmount;
use ondeck_ramdisk::mounts::{self, Mount, check_path};
use ondeck_ramdisk::{Build, EngineError};
use ondeck_transfer::credentials::User;

use super::as_user;
use crate::hang::{user_of, within};
use crate::ramdisk::overmount_policy::{OvermountPolicy, name_of};
use crate::ramdisk::{RamDisk, lock};
use crate::record::RecordedOvermount;
use crate::unmount::all_mounts;

/// The most overmounts that a job may have on a node. Each takes part in every look at the table of mounts.
const MOST_OVERMOUNTS: usize = 64;

/// A directory that was opened to be mounted over.
pub(in crate::ramdisk) struct OpenTarget {
    pub(super) overmount: Overmount,
    pub real: PathBuf,
    pub directory: Arc<OwnedFd>,
    /// The mount that it is on.
    pub mount: u64,
}

impl OpenTarget {
    /// Refuses a directory that is no longer where it was judged. Called with the user's identity.
    pub(super) fn is_in_place(&self) -> Result<(), EngineError> {
        let same = || -> std::io::Result<bool> {
            if mounts::path_of(self.directory.as_fd())? != self.real {
                return Ok(false);
            }
            let there = mounts::open_plainly(&self.real)?;
            let (found, held) = (rustix::fs::fstat(&there)?, rustix::fs::fstat(&self.directory)?);
            let same = (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino);
            Ok(same && mounts::mount_of(there.as_fd())? == self.mount)
        };
        match same() {
            Ok(true) => Ok(()),
            Ok(false) => Err(moved(&self.overmount, &self.real)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(moved(&self.overmount, &self.real))
            }
            Err(error) => Err(EngineError::io("look again at", &self.real, error)),
        }
    }
}

/// Opens and judges one directory. Called with the user's identity.
fn open_one(overmount: Overmount, policy: &OvermountPolicy, user: &User) -> Result<OpenTarget, EngineError> {
    let path = &overmount.path;
    let io = |what, source: std::io::Error| EngineError::io(what, path, source);
    let directory = mounts::open_directory(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotADirectory => {
            EngineError::Refused(format!("{} is not a directory", path.display()))
        }
        _ => io("open, as its user,", error),
    })?;
    let real = mounts::path_of(directory.as_fd()).map_err(|error| io("tell the real path of", error))?;
    let mount = mounts::mount_of(directory.as_fd()).map_err(|error| io("tell the mount of", error))?;
    let target = OpenTarget { real, directory: Arc::new(directory), mount, overmount };
    policy.allows_place(&target.overmount, &target.real)?;
    policy.allows_directory(&target.overmount, &target.real, &target.directory, user)?;
    target.is_in_place()?;
    Ok(target)
}

pub(super) fn moved(overmount: &Overmount, real: &Path) -> EngineError {
    EngineError::Refused(format!(
        "{} was moved, removed or mounted over meanwhile; nothing was mounted",
        name_of(overmount, real)
    ))
}

/// Whose RAM disk a mount is of, if of any.
fn ramdisk_of(mount: &Mount) -> Option<&str> {
    let name = mount.source.strip_prefix("ondeck").filter(|_| !mount.is_a_users())?;
    Some(name.strip_prefix(':').unwrap_or("of `ondeck run`"))
}

/// Refuses a directory where a mount would hide or be hidden by another one. `own` are overmounts of this very RAM
/// disk; `inside` says whether the directory is meant to be in one of them.
pub(super) fn check_table(
    overmount: &Overmount,
    real: &Path,
    mount: u64,
    own: &[u64],
    inside: bool,
) -> Result<(), EngineError> {
    let refused = |why: String| {
        let name = name_of(overmount, real);
        Err(EngineError::Refused(format!("{name} can't be covered: {why}")))
    };
    let all = all_mounts()?;
    if let Some(id) = all.iter().find(|found| found.id == mount && !inside).and_then(ramdisk_of) {
        return refused(format!("it is on the RAM disk {id} already"));
    }
    for other in all.iter().filter(|found| found.id != mount && !own.contains(&found.id)) {
        if !other.at.starts_with(real) {
            continue;
        }
        return match (ramdisk_of(other), other.at == real) {
            (Some(id), true) => refused(format!("the RAM disk {id} covers it already")),
            (Some(id), false) => {
                refused(format!("the RAM disk {id} is shown in it, at {}", other.at.display()))
            }
            (None, true) => refused("something is mounted over it".into()),
            (None, false) => refused(format!("something is mounted in it, at {}", other.at.display())),
        };
    }
    Ok(())
}

fn check_overmounts(overmounts: &[Overmount]) -> Result<(), EngineError> {
    if overmounts.is_empty() {
        return Err(EngineError::Refused("there is nothing to cover; name at least one directory".into()));
    }
    if overmounts.len() > MOST_OVERMOUNTS {
        return Err(EngineError::Refused(format!(
            "{} directories are more than the {MOST_OVERMOUNTS} that can be covered on a node",
            overmounts.len()
        )));
    }
    for overmount in overmounts {
        check_path(&overmount.path)?;
        let mut parts = Path::new(&overmount.from).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == overmount.from.as_str());
        if !plain {
            return Err(EngineError::Refused(format!(
                "`{}` is no plain name of a directory of the RAM disk",
                overmount.from
            )));
        }
    }
    Ok(())
}

impl RamDisk {
    /// Opens and holds the directories that [`RamDisk::overmount`] will mount over.
    pub(in crate::ramdisk) fn open_targets(
        &self,
        build: &Build,
        overmounts: &[Overmount],
        policy: &OvermountPolicy,
    ) -> Result<(), EngineError> {
        check_overmounts(overmounts)?;
        let record = self.record();
        if !record.overmounts.is_empty() {
            let mut now: Vec<&Overmount> =
                record.overmounts.iter().map(|recorded| &recorded.overmount).collect();
            let mut wanted: Vec<&Overmount> = overmounts.iter().collect();
            now.sort_by_key(|overmount| &overmount.path);
            wanted.sort_by_key(|overmount| &overmount.path);
            if now == wanted {
                return self.must_overmount_all();
            }
            return Err(EngineError::Refused(format!(
                "{} covers other directories on this node already; uncover them first",
                self.id()
            )));
        }
        *lock(&self.targets) = None;
        let mut targets = self.open_all(build, overmounts, policy)?;
        targets.sort_by_key(|target| target.real.components().count());
        for (index, one) in targets.iter().enumerate() {
            if let Some(other) = targets[..index].iter().find(|other| other.real == one.real) {
                return Err(EngineError::Refused(format!(
                    "{} and {} are the same directory",
                    other.overmount.path.display(),
                    one.overmount.path.display()
                )));
            }
            check_table(&one.overmount, &one.real, one.mount, &[], false)?;
        }
        *lock(&self.targets) = Some(targets);
        Ok(())
    }

    pub(super) fn open_all(
        &self,
        build: &Build,
        overmounts: &[Overmount],
        policy: &OvermountPolicy,
    ) -> Result<Vec<OpenTarget>, EngineError> {
        let (owner, overmounts, policy) = (build.layout.owner, overmounts.to_vec(), policy.clone());
        within(build.until, "the directories to cover", move || {
            let user = user_of(owner);
            as_user(&user, || {
                overmounts.into_iter().map(|overmount| open_one(overmount, &policy, &user)).collect()
            })
        })
    }

    /// What [`RamDisk::attach`] needs of a directory that is seen through an outer overmount only; the descriptor is not
    /// mounted on.
    pub(super) fn inner_target(&self, recorded: &RecordedOvermount) -> Result<OpenTarget, EngineError> {
        let directory = mounts::open_plainly(self.runtime_dir.dir())
            .map_err(|error| EngineError::io("open", self.runtime_dir.dir(), error))?;
        Ok(OpenTarget {
            overmount: recorded.overmount.clone(),
            real: recorded.real.clone(),
            directory: Arc::new(directory),
            // No mount has this number.
            mount: u64::MAX,
        })
    }
}
