//! Taking the RAM disk away from what it is mounted over: all of it, or nothing.

use std::path::Path;
use std::time::Instant;

use ondeck_api::wire::Overmount;
use ondeck_core::Owner;
use ondeck_ramdisk::mounts::{Mount, TakenAway};
use ondeck_ramdisk::{Build, EngineError, holders::holders};

use super::held::HeldOvermount;
use super::open_targets::moved;
use crate::ramdisk::overmount_policy::OvermountPolicy;
use crate::ramdisk::{RamDisk, lock};
use crate::unmount::{ORDERLY, all_mounts, take_away};

/// How many of those who hold files are named.
const NAMED_HOLDERS: usize = 10;

impl RamDisk {
    /// Refuses if files are open in an overmount.
    pub(in crate::ramdisk) fn must_not_be_busy(&self) -> Result<(), EngineError> {
        if self.record().overmounts.is_empty() {
            return Ok(());
        }
        let own = self.overmounts()?;
        let Some(device) = own.first().map(|mount| mount.device) else { return Ok(()) };
        // Processes in other mount namespaces have it at paths of their own; what root does with the whole, and what is
        // shown elsewhere, stays.
        let shown = self.record().shown;
        let counts = |path: &Path| {
            !path.starts_with(self.runtime_dir.dir())
                && !shown.iter().any(|shown| path.starts_with(&shown.path))
        };
        let owner = self.record().layout.owner.uid;
        let held = holders(device, owner, NAMED_HOLDERS, counts)
            .map_err(|error| EngineError::io("read", Path::new("/proc"), error))?;
        let mut named: Vec<String> = held.iter().map(ToString::to_string).collect();
        let ids: Vec<u64> = own.iter().map(|mount| mount.id).collect();
        let inner = all_mounts()?.into_iter().filter(|mount| ids.contains(&mount.parent));
        named.extend(
            inner
                .filter(|mount| !ids.contains(&mount.id))
                .map(|mount| format!("something is mounted at {}", mount.at.display())),
        );
        if named.is_empty() { Ok(()) } else { Err(self.busy(&named.join(", "))) }
    }

    fn busy(&self, why: &str) -> EngineError {
        EngineError::Busy(format!("what {} covers is in use: {why}", self.id()))
    }

    /// Takes the RAM disk away from all that it is mounted over; without `force` only if nothing of it is in use.
    pub(in crate::ramdisk) fn remove_overmounts(
        &self,
        build: &Build,
        force: bool,
        policy: &OvermountPolicy,
    ) -> Result<(), EngineError> {
        *lock(&self.targets) = None;
        if self.record().overmounts.is_empty() {
            return Ok(());
        }
        if force {
            self.detach_overmounts(build.layout.owner)?;
        } else {
            self.must_not_be_busy()?;
            self.unmount_overmounts(build, policy)?;
        }
        // Somebody else may have unmounted one.
        lock(&self.held_overmounts).clear();
        *lock(&self.overmounts_removed) = Some(Instant::now());
        self.note(|record| record.overmounts.clear())
    }

    fn detach_overmounts(&self, owner: Owner) -> Result<(), EngineError> {
        self.detach_held(owner);
        let mut result = Ok(());
        for mount in self.overmounts()? {
            if let Err(error) = take_away(&mount, owner) {
                result = Err(error);
            }
        }
        // An inner one that could not be reached went with its outer one.
        if self.overmounts()?.is_empty() { Ok(()) } else { result }
    }

    /// Unmounts all overmounts. If one is busy, those that were unmounted are mounted again.
    fn unmount_overmounts(&self, build: &Build, policy: &OvermountPolicy) -> Result<(), EngineError> {
        let (mut taken, overmounts) = (Vec::new(), self.overmounts()?);
        // The way to an inner one, which somebody else has unmounted, would keep the outer one busy.
        lock(&self.held_overmounts).retain(|held| overmounts.iter().any(|mount| held.is(mount)));
        for mount in overmounts {
            let reason = match self.unmount_overmount(build, &mount) {
                Ok(TakenAway::Yes) => {
                    taken.push(mount);
                    continue;
                }
                // A copy of a mount goes with it where mounts are shared between namespaces.
                Ok(TakenAway::Elsewhere) if !all_mounts()?.iter().any(|other| other.id == mount.id) => continue,
                Ok(TakenAway::Elsewhere) => EngineError::Refused(format!(
                    "{} can't be taken away: a directory above it was moved, or something is mounted over it",
                    mount.at.display()
                )),
                Ok(TakenAway::Busy) => match self.must_not_be_busy() {
                    Err(busy) => busy,
                    Ok(()) => self.busy(&format!(
                        "the kernel holds {} (a loop device, swap space, an exported directory, or a process that has \
                         ended since)",
                        mount.at.display()
                    )),
                },
                Err(error) => error,
            };
            let back = self.put_back(build, &taken, policy);
            self.hold_overmounts();
            back.map_err(|failed| {
                EngineError::Busy(format!(
                    "{reason}; and what had been taken away can't be mounted again: {failed}"
                ))
            })?;
            return Err(reason);
        }
        Ok(())
    }

    /// Unmounts one overmount if it is not in use.
    fn unmount_overmount(&self, build: &Build, mount: &Mount) -> Result<TakenAway, EngineError> {
        let (until, owner) = (build.until.min(Instant::now() + ORDERLY), build.layout.owner);
        let held = {
            let mut held = lock(&self.held_overmounts);
            held.iter().position(|held| held.is(mount)).map(|at| held.swap_remove(at))
        };
        if let Some(held) = held {
            let done = held.take_away(mount, owner, false, until);
            if !matches!(done, Ok(TakenAway::Elsewhere)) {
                return done;
            }
        }
        // Its directory was moved from another namespace, where nothing is mounted on it.
        match HeldOvermount::open(mount, owner)? {
            Some(held) => held.take_away(mount, owner, false, until),
            None => Ok(TakenAway::Elsewhere),
        }
    }

    /// Mounts again what was unmounted a moment ago, as carefully as the first time.
    fn put_back(&self, build: &Build, taken: &[Mount], policy: &OvermountPolicy) -> Result<(), EngineError> {
        let record = self.record();
        let mut own: Vec<u64> = self.overmounts()?.iter().map(|mount| mount.id).collect();
        // The outer ones first, as they are noted.
        for recorded in &record.overmounts {
            if !taken.iter().any(|mount| mount.at == recorded.real) {
                continue;
            }
            let tree = self.tree(build, &recorded.overmount, None)?;
            let in_another = self.overmounts()?.iter().any(|mount| recorded.real.starts_with(&mount.at));
            let target = if in_another {
                self.inner_target(recorded)?
            } else {
                let overmount = Overmount { path: recorded.real.clone(), ..recorded.overmount.clone() };
                let mut targets = self.open_all(build, &[overmount], policy)?;
                targets.pop().ok_or_else(|| moved(&recorded.overmount, &recorded.real))?
            };
            match self.attach(build, &target, &tree, &own) {
                Ok(id) => own.push(id),
                Err(error) => {
                    tree.detach().map_err(|undo| EngineError::io("unmount", &recorded.real, undo))?;
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}
