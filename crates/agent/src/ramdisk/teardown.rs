//! The way down: it asks for no state, looks at what is there, and does not fail half-way.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ondeck_api::wire::Destroyed;
use ondeck_ramdisk::engine::DATA_DEVICE;
use ondeck_ramdisk::{EngineError, RuntimeDir, mounts};

use super::client::{cut_off, take_client_away};
use super::devices::free_devices;
use super::show::{own_mounts, take_all_away};
use super::{GIVING_UP, RamDisk, lock};
use crate::capacity::Capacity;
use crate::record::RamDiskRecord;

/// How long killing may take; what does not end then waits for the kernel.
const KILLING: Duration = Duration::from_secs(10);

/// Why a RAM disk was not destroyed.
#[derive(Debug)]
pub enum NotDestroyed {
    /// It may hold results. Nothing was done.
    HoldsResults,
    /// What could not be removed.
    Left(Vec<EngineError>),
}

impl RamDisk {
    /// The way down. It does not fail half-way: what can't be done is said at the end, and everything else is done.
    ///
    /// # Errors
    /// [`NotDestroyed`]. The RAM disk stays known then, and this can be tried again.
    pub fn destroy(&self, capacity: &Capacity) -> Result<Destroyed, NotDestroyed> {
        // Whatever is being done for it ends now, also what hangs in its client.
        self.give_up()?;
        *lock(&self.targets) = None;
        self.tasks.let_go();
        let left = |error| NotDestroyed::Left(vec![error]);
        cut_off(&self.runtime_dir).map_err(left)?;
        let work = self.lock_work(Instant::now() + GIVING_UP).map_err(left)?;
        self.destroy_now(capacity, &work).map_err(NotDestroyed::Left)
    }

    /// The point of no return: from here on it is destroyed, unless it may hold results.
    fn give_up(&self) -> Result<(), NotDestroyed> {
        // Under the lock that a new guard takes, too: one of the two comes first.
        let record = lock(&self.record);
        if record.guarded {
            return Err(NotDestroyed::HoldsResults);
        }
        self.runtime_dir.give_up();
        Ok(())
    }

    /// From now on it may hold results, and is not destroyed before these are released.
    ///
    /// # Errors
    /// If it stores nothing here, is not complete or being destroyed, or if it can't be kept on disk.
    pub fn guard_results(&self) -> Result<(), EngineError> {
        let mut record = lock(&self.record);
        if !record.server {
            let text =
                format!("nothing of {} is stored on this node, so nothing is to be guarded", self.id());
            return Err(EngineError::Refused(text));
        }
        if !record.complete || self.is_ending() {
            let what = if record.complete { "is being destroyed" } else { "is not complete yet" };
            return Err(EngineError::Refused(format!("{} {what} on this node", self.id())));
        }
        if !record.guarded {
            let guarded = RamDiskRecord { guarded: true, ..record.clone() };
            guarded.save(&self.runtime_dir)?;
            *record = guarded;
            tracing::info!(ramdisk = %self.id(), "may hold results from now on");
        }
        Ok(())
    }

    /// The results that it may hold are on disk, or given up. Says whether it was guarded.
    ///
    /// # Errors
    /// If it can't be kept on disk.
    pub fn release_results(&self) -> Result<bool, EngineError> {
        let guarded = self.record().guarded;
        if guarded {
            self.note(|record| record.guarded = false)?;
        }
        Ok(guarded)
    }

    /// Destroys it if it is not complete, which is decided while no step is under way. Nothing is done while one is.
    ///
    /// # Errors
    /// What could not be removed.
    pub fn expire(&self, capacity: &Capacity) -> Result<Destroyed, Vec<EngineError>> {
        self.remove_if(capacity, |record| !record.complete)
    }

    /// The same of one that was completed here and not on all of its nodes, so that nobody was told of it.
    ///
    /// # Errors
    /// What could not be removed.
    pub fn remove_part(&self, capacity: &Capacity) -> Result<Destroyed, Vec<EngineError>> {
        self.remove_if(capacity, is_in_doubt)
    }

    /// Whether it was completed here, it is not known whether it was elsewhere, and nothing can have been done with it.
    pub fn is_in_doubt(&self) -> bool {
        is_in_doubt(&self.record()) && !self.is_ending()
    }

    fn remove_if(
        &self,
        capacity: &Capacity,
        condition: impl Fn(&RamDiskRecord) -> bool,
    ) -> Result<Destroyed, Vec<EngineError>> {
        let Ok(work) = self.lock_work(Instant::now()) else { return Ok(Destroyed::default()) };
        if !condition(&self.record()) {
            return Ok(Destroyed::default());
        }
        match self.give_up() {
            Ok(()) => {}
            // It is not for its builder any more to say how long it lives.
            Err(NotDestroyed::HoldsResults) => return Ok(Destroyed::default()),
            Err(NotDestroyed::Left(errors)) => return Err(errors),
        }
        self.tasks.let_go();
        self.destroy_now(capacity, &work)
    }

    fn destroy_now(
        &self,
        capacity: &Capacity,
        _work: &MutexGuard<'_, ()>,
    ) -> Result<Destroyed, Vec<EngineError>> {
        let mut done = Destroyed::default();
        if self.is_gone() {
            return Ok(done);
        }
        self.detach_held(self.record().layout.owner);
        let errors = tear_down(&self.runtime_dir, &self.record(), capacity, &mut done);
        if errors.is_empty() {
            self.gone.store(true, Ordering::Release);
            tracing::info!(ramdisk = %self.id(), "destroyed");
            Ok(done)
        } else {
            Err(errors)
        }
    }
}

/// The way down, for a RAM disk that is known or that was found. Each step is timed and does what it can.
pub fn tear_down(
    runtime_dir: &RuntimeDir,
    record: &RamDiskRecord,
    capacity: &Capacity,
    done: &mut Destroyed,
) -> Vec<EngineError> {
    let mut errors = Vec::new();
    let mut step = |name: &str, work: &mut dyn FnMut() -> Result<(), EngineError>| {
        let began = Instant::now();
        if let Err(error) = work() {
            errors.push(error);
        }
        done.steps.push((name.to_owned(), began.elapsed().as_secs_f64()));
    };
    step("hide", &mut || take_all_away(runtime_dir, record));
    step("unmount client", &mut || take_client_away(runtime_dir));
    step("end processes", &mut || {
        runtime_dir.kill_all(Instant::now() + KILLING)?;
        // A client that was just mounting when it was told to end may have done so after all.
        take_client_away(runtime_dir)?;
        end_users(runtime_dir, record)
    });
    step("free devices", &mut || {
        // While it is shown somewhere it is not ours to free; this can be tried again.
        if own_mounts(runtime_dir)?.is_empty() { free_devices(runtime_dir, record, capacity) } else { Ok(()) }
    });
    if errors.is_empty() {
        let began = Instant::now();
        if let Err(error) = forget(runtime_dir) {
            errors.push(error);
        }
        done.steps.push(("forget".to_owned(), began.elapsed().as_secs_f64()));
    }
    errors
}

/// Kills whoever still has files open in the RAM itself. Only tmpfs is used directly by programs; they would keep its
/// pages for as long as they live.
fn end_users(runtime_dir: &RuntimeDir, record: &RamDiskRecord) -> Result<(), EngineError> {
    if record.layout.engine != ondeck_core::EngineKind::Tmpfs {
        return Ok(());
    }
    let device = runtime_dir.path(DATA_DEVICE);
    let mounted = mounts::mounted_below(&device)
        .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
    if mounted.is_empty() {
        return Ok(());
    }
    let number =
        fs::symlink_metadata(&device).map_err(|error| EngineError::io("look at", &device, error))?.dev();
    runtime_dir.end_users_of(number, Instant::now() + KILLING)
}

/// Removes the runtime directory, unless something is still mounted in it: its content would be removed too.
pub(crate) fn forget(runtime_dir: &RuntimeDir) -> Result<(), EngineError> {
    let left = mounts::mounted_below(runtime_dir.dir())
        .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
    if let Some(mount) = left.first() {
        return Err(EngineError::Refused(format!("{} is still mounted", mount.at.display())));
    }
    match fs::remove_dir_all(runtime_dir.dir()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(EngineError::io("remove", runtime_dir.dir(), error))
        }
        _ => Ok(()),
    }
}

fn is_in_doubt(record: &RamDiskRecord) -> bool {
    record.complete && !record.settled && !record.guarded && record.overmounts.is_empty()
}
