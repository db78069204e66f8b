//! How a RAM disk ends here: guarded, released, hidden, destroyed, forgotten.

use std::sync::Arc;

use ondeck_api::auth::Caller;
use ondeck_api::wire::{Destroyed, Refusal, RefusalCode, Release};
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{JobSelector, Layout, NodeName, RamDiskId};
use ondeck_ramdisk::EngineError;

use super::{Node, failed, fenced, refusal};
use crate::ramdisk::{NotDestroyed, RamDisk};

impl Node {
    /// Destroys what this node has of a RAM disk. Nothing to destroy is fine.
    ///
    /// # Errors
    /// [`RefusalCode::HoldsResults`] if it may hold results; [`RefusalCode::Fenced`] if a later incarnation is here;
    /// [`RefusalCode::Failed`] with what could not be removed.
    pub fn destroy(&self, id: &RamDiskId) -> Result<Destroyed, Refusal> {
        let found = {
            let mut known = self.known();
            match known.ramdisks.get(&id.name) {
                Some(found) if found.id() == id => Arc::clone(found),
                Some(found) if found.id().epoch > id.epoch => return Err(fenced(id, found.id().epoch)),
                Some(found) => {
                    let message = format!("{} is here, an earlier one than {id}", found.id());
                    return Err(refusal(RefusalCode::Conflict, message));
                }
                None => {
                    // A step of it that is still on its way must not begin it again.
                    let newest = known.epochs.entry(id.name.clone()).or_insert(id.epoch);
                    *newest = (*newest).max(id.epoch);
                    self.save_epochs(&mut known);
                    return Ok(Destroyed::default());
                }
            }
        };
        self.remove(&found)
    }

    /// Takes a RAM disk down and forgets it.
    ///
    /// # Errors
    /// As [`Node::destroy`].
    pub fn remove(&self, found: &Arc<RamDisk>) -> Result<Destroyed, Refusal> {
        match found.destroy(&self.rules().capacity) {
            Ok(done) => self.forget(found, Ok(done)),
            Err(NotDestroyed::Left(errors)) => self.forget(found, Err(errors)),
            Err(NotDestroyed::HoldsResults) => Err(refusal(
                RefusalCode::HoldsResults,
                format!(
                    "{} may hold results that are nowhere else, and {} keeps it; {}",
                    found.id(),
                    self.name,
                    way_out(&found.record().layout)
                ),
            )),
        }
    }

    /// From now on a RAM disk may hold results: nothing destroys it here before they are released.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] or [`RefusalCode::Fenced`] if it is not here, [`RefusalCode::Conflict`] if nothing of it
    /// is stored here, it is not complete, or is being destroyed.
    pub fn guard(&self, id: &RamDiskId) -> Result<(), Refusal> {
        self.find(id)?.guard_results().map_err(|error| failed(&error))
    }

    /// The results that a RAM disk may hold are on disk, or given up.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] or [`RefusalCode::Fenced`] if it is not here.
    pub fn release(&self, id: &RamDiskId, release: &Release, caller: Caller) -> Result<(), Refusal> {
        if self.find(id)?.release_results().map_err(|error| failed(&error))? {
            let from =
                caller.address.map_or_else(|| "this machine".to_owned(), |address| address.to_string());
            match release {
                Release::StagedOut { task } => tracing::info!(ramdisk = %id, task, "its results are on disk"),
                Release::Abandoned { by } => {
                    let by = plain(by, MESSAGE);
                    tracing::warn!(ramdisk = %id, by, uid = caller.uid, from, "its results were given up");
                }
            }
        }
        Ok(())
    }

    /// Takes a RAM disk away from every directory of this node. What it holds stays; a client that nothing is shown by any
    /// more goes.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] or [`RefusalCode::Fenced`] if it is not here; what could not be taken away.
    pub fn hide_everywhere(&self, id: &RamDiskId) -> Result<(), Refusal> {
        let found = self.find(id)?;
        // That its job lost it here, the scheduler tells the job's user: until it has asked, that must be known.
        let was_lost = !found.report(&self.name).faults.is_empty();
        found.hide_everywhere().map_err(|error| failed(&error))?;
        if found.record().server || was_lost { Ok(()) } else { self.leave(&found) }
    }

    /// The job of a RAM disk begins on this node without having been told what it sees. Either all of its nodes show it,
    /// and it keeps it, or it is taken away here; then it can't be shown later, as the job is noted in
    /// [`started`](crate::started). Tells whether the job keeps it.
    ///
    /// # Errors
    /// What could not be taken away.
    pub fn begins(&self, id: &RamDiskId) -> Result<bool, Refusal> {
        // Gone, or never here.
        let Ok(found) = self.find(id) else { return Ok(false) };
        found.begins().map_err(|error| failed(&error))
    }

    /// Removes a RAM disk whose lease is over, unless it was completed in the last moment.
    pub fn expire(&self, found: &Arc<RamDisk>) {
        match self.forget(found, found.expire(&self.rules().capacity)) {
            Ok(done) if done.steps.is_empty() => {}
            Ok(_) => tracing::warn!(ramdisk = %found.id(), "was not completed in time; removed"),
            Err(error) => tracing::error!(ramdisk = %found.id(), error = error.message, "can't remove it"),
        }
    }

    /// Removes what is here of a RAM disk that was never complete on another node.
    pub fn remove_part(&self, found: &Arc<RamDisk>, other: &NodeName) {
        match self.forget(found, found.remove_part(&self.rules().capacity)) {
            Ok(done) if done.steps.is_empty() => {}
            Ok(_) => tracing::warn!(ramdisk = %found.id(), "was not completed on {other}; removed"),
            Err(error) => tracing::error!(ramdisk = %found.id(), error = error.message, "can't remove it"),
        }
    }

    fn forget(
        &self,
        found: &Arc<RamDisk>,
        done: Result<Destroyed, Vec<EngineError>>,
    ) -> Result<Destroyed, Refusal> {
        let done = done.map_err(|errors| {
            let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
            refusal(
                RefusalCode::Failed,
                format!(
                    "{} is not wholly removed from {}: {}; try again",
                    found.id(),
                    self.name,
                    texts.join("; ")
                ),
            )
        })?;
        let mut known = self.known();
        let is_current =
            known.ramdisks.get(&found.id().name).is_some_and(|current| Arc::ptr_eq(current, found));
        if found.is_gone() && is_current {
            known.ramdisks.remove(&found.id().name);
        }
        Ok(done)
    }
}

/// What can be done about a RAM disk that may hold results.
pub(super) fn way_out(layout: &Layout) -> String {
    let name = &layout.id.name;
    let by_hand = format!(
        "whoever gives the results up without the scheduler does so with `ondeck ramdisk destroy {name} --abandon-results`"
    );
    match &layout.job {
        Some(tag) => format!(
            "they are brought home by `ondeck job retry {0}` and given up by `ondeck job abandon {0}`; {by_hand}",
            JobSelector::from(tag.job)
        ),
        None => by_hand,
    }
}
