//! The ways to the overmounts, held open so that nobody can put anything between.

use std::sync::Arc;
use std::time::Instant;

use ondeck_core::Owner;
use ondeck_ramdisk::EngineError;
use ondeck_ramdisk::mounts::{self, Above, Mount, TakenAway};

use crate::hang::{as_root_or_owner, within};
use crate::ramdisk::{RamDisk, lock};
use crate::unmount::{ORDERLY, all_mounts};

/// The way to an overmount, opened when nothing was on it yet: its user can mount something there, and serve that without
/// ever answering.
pub(in crate::ramdisk) struct HeldOvermount {
    /// Its number and device, by which the kernel's table tells it.
    mount: (u64, (u32, u32)),
    above: Arc<Above>,
}

impl HeldOvermount {
    pub(super) fn is(&self, mount: &Mount) -> bool {
        self.mount == (mount.id, mount.device)
    }

    /// Of a mount that its path leads to.
    pub(super) fn open(mount: &Mount, owner: Owner) -> Result<Option<HeldOvermount>, EngineError> {
        if mounts::seen_at(&all_mounts()?, &mount.at).is_none_or(|seen| seen.id != mount.id) {
            return Ok(None);
        }
        let one = mount.clone();
        let above = within(Instant::now() + ORDERLY, "opening the way to a cover", move || {
            let open = || -> std::io::Result<Option<Above>> {
                let above = Above::of(&one)?;
                Ok(above.leads_to(&one)?.then_some(above))
            };
            as_root_or_owner(owner, open).map_err(|error| EngineError::io("look at", &one.at, error))
        })?;
        Ok(above.map(|above| HeldOvermount { mount: (mount.id, mount.device), above: Arc::new(above) }))
    }

    /// Takes the overmount away, which the kernel's table has as `mount`.
    pub(super) fn take_away(
        &self,
        mount: &Mount,
        owner: Owner,
        lazily: bool,
        until: Instant,
    ) -> Result<TakenAway, EngineError> {
        let (above, mount) = (Arc::clone(&self.above), mount.clone());
        within(until, "unmounting", move || {
            as_root_or_owner(owner, || above.take_away(&mount, lazily))
                .map_err(|error| EngineError::io("unmount", &mount.at, error))
        })
    }
}

impl RamDisk {
    /// Opens the way to each overmount that can be reached. Without it an overmount is looked for by its path.
    pub(in crate::ramdisk) fn hold_overmounts(&self) {
        let owner = self.record().layout.owner;
        let overmounts = self.overmounts().unwrap_or_else(|error| {
            tracing::warn!(ramdisk = %self.id(), %error, "can't tell what it covers");
            Vec::new()
        });
        for mount in &overmounts {
            if lock(&self.held_overmounts).iter().any(|held| held.is(mount)) {
                continue;
            }
            match HeldOvermount::open(mount, owner) {
                Ok(held) => lock(&self.held_overmounts).extend(held),
                Err(error) => {
                    // The others lie on the same filesystem, mostly.
                    return tracing::warn!(ramdisk = %self.id(), %error, "can't open the way to a cover");
                }
            }
        }
    }

    /// Takes away at once what can be reached by an open way, whatever is mounted over it by now. The rest is looked for by
    /// its path.
    pub(in crate::ramdisk) fn detach_held(&self, owner: Owner) {
        let overmounts = match self.overmounts() {
            Ok(overmounts) => overmounts,
            // Whoever looks by path reads the same table, and says what is wrong. The open ways are for the next try.
            Err(error) => return tracing::warn!(ramdisk = %self.id(), %error, "can't tell what it covers"),
        };
        let held = std::mem::take(&mut *lock(&self.held_overmounts));
        for mount in &overmounts {
            let Some(held) = held.iter().find(|held| held.is(mount)) else { continue };
            if let Err(error) = held.take_away(mount, owner, true, Instant::now() + ORDERLY) {
                tracing::warn!(ramdisk = %self.id(), %error, "looks for it by its path");
            }
        }
    }
}
