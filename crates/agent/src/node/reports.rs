//! What the node tells: of itself, of a RAM disk, of a path.

use std::path::Path;
use std::sync::Arc;

use ondeck_api::auth::Caller;
use ondeck_api::wire::{
    Inventory, LocalReport, MemoryReport, NodeReport, PathView, Presence, Refusal, RefusalCode, Witness,
    is_plain,
};
use ondeck_core::{EngineKind, RamDiskId};
use ondeck_ramdisk::{engine, mounts};

use super::{Node, failed, find_program, not_here, refusal};
use crate::capacity::machine_ram;
use crate::hooks;

impl Node {
    /// What this node has.
    ///
    /// # Errors
    /// If the free RAM is not known.
    pub fn report(&self) -> Result<NodeReport, Refusal> {
        let ramdisks = self.ramdisks();
        let promises: Vec<_> = ramdisks.iter().map(|ramdisk| ramdisk.promise()).collect();
        let unknown = |error: std::io::Error| refusal(RefusalCode::Failed, format!("free RAM: {error}"));
        let devices = self.rules().capacity.report(&promises).map_err(unknown)?;
        let missing = EngineKind::ALL
            .iter()
            .filter_map(|kind| {
                let missing: Vec<String> = engine(*kind)
                    .programs()
                    .iter()
                    .filter(|(program, _)| find_program(program).is_none())
                    .map(|(program, package)| format!("{program} (Debian: {package})"))
                    .collect();
                (!missing.is_empty()).then_some((*kind, missing))
            })
            .collect();
        let newest = self.known().epochs.values().max().map_or(0, |epoch| epoch.0);
        Ok(NodeReport {
            node: self.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            storage_address: self.storage_address,
            devices,
            memory: memory_report().map_err(unknown)?,
            missing,
            ramdisks: ramdisks.len(),
            newest_epoch: newest,
            authority: self.commander.obeyed(),
            settings: Some(self.rules().settings.clone()),
            hooks: Some(hooks::seen(Path::new(hooks::NOTED))),
        })
    }

    /// The RAM disks here that a caller may see.
    pub fn reports(&self, caller: Caller) -> Vec<LocalReport> {
        let seen = self.ramdisks().into_iter().filter(|found| caller.may_see(found.record().layout.owner));
        seen.map(|found| found.report(&self.name)).collect()
    }

    /// One of them.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`], also for whoever may not see it.
    pub fn report_of(&self, id: &RamDiskId, caller: Caller) -> Result<LocalReport, Refusal> {
        let found = self.find(id)?;
        if !caller.may_see(found.record().layout.owner) {
            return Err(not_here(id, &self.name));
        }
        Ok(found.report(&self.name))
    }

    /// What is here of one of them: for the agents of its other nodes.
    ///
    /// # Errors
    /// [`RefusalCode::Forbidden`] for whoever is not root of a host.
    pub fn has(&self, id: &RamDiskId, caller: Caller) -> Result<Presence, Refusal> {
        caller.must_be_root_somewhere()?;
        let found = self.known().ramdisks.get(&id.name).map(Arc::clone);
        Ok(match found.filter(|found| found.id() == id) {
            None => Presence::Nothing,
            // Its removal may fail, and is tried again.
            Some(found) if found.is_ending() => Presence::Nothing,
            Some(found) if found.record().complete => Presence::All,
            Some(_) => Presence::Unfinished,
        })
    }

    /// The files that this node has of some directories of a RAM disk: `slots` are their names there, with commas.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] if it is not here; [`RefusalCode::Conflict`] if its engine has no whole files.
    pub fn inventory(&self, id: &RamDiskId, slots: &str) -> Result<Inventory, Refusal> {
        let slots: Vec<&str> = slots.split(',').filter(|slot| !slot.is_empty()).collect();
        if let Some(slot) = slots.iter().find(|slot| !is_plain(slot) || slot.contains('.')) {
            let message = format!("`{slot}` is no name of a directory in a RAM disk");
            return Err(refusal(RefusalCode::Malformed, message));
        }
        self.find(id)?.inventory(&slots).map_err(|error| failed(&error))
    }

    /// Whether a RAM disk is whole here.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`], also for whoever may not see it.
    pub fn witness(&self, id: &RamDiskId, caller: Caller) -> Result<Witness, Refusal> {
        let found = self.find(id)?;
        if !caller.may_see(found.record().layout.owner) {
            return Err(not_here(id, &self.name));
        }
        let (faults, witness) = found.witness(&self.name);
        Ok(Witness { faults, witness })
    }

    /// The RAM disk that is shown at a path.
    ///
    /// # Errors
    /// [`RefusalCode::Forbidden`] if it is another user's.
    pub fn view(&self, path: &Path, caller: Caller) -> Result<PathView, Refusal> {
        // Names only: the filesystem there may hang.
        let over = mounts::mounted()
            .map_err(|error| refusal(RefusalCode::Failed, format!("mountinfo: {error}")))?
            .into_iter()
            .filter(|mount| path.starts_with(&mount.at))
            .max_by_key(|mount| mount.at.components().count());
        let found = over.and_then(|mount| {
            self.ramdisks().into_iter().find(|found| {
                let shown = found.record().shown;
                shown.iter().any(|shown| shown.path == mount.at) || found.is_overmounted(&mount.at)
            })
        });
        let Some(found) = found else {
            return Ok(PathView { ramdisk: None, faults: Vec::new(), witness: String::new() });
        };
        if !caller.may_see(found.record().layout.owner) {
            return Err(refusal(
                RefusalCode::Forbidden,
                format!("{} is on a RAM disk of another user", path.display()),
            ));
        }
        let (faults, witness) = found.witness(&self.name);
        Ok(PathView { ramdisk: Some(found.id().clone()), faults, witness })
    }
}

fn memory_report() -> std::io::Result<MemoryReport> {
    let pressure = std::fs::read_to_string("/proc/pressure/memory").ok();
    let pressure = pressure.as_deref().and_then(|text| {
        let some = text.lines().find(|line| line.starts_with("some "))?;
        some.split_whitespace().find_map(|field| field.strip_prefix("avg10=")?.parse().ok())
    });
    Ok(MemoryReport {
        total: machine_ram()?,
        available: ondeck_ramdisk::memory::free_ram()?.usable(),
        pressure,
    })
}
