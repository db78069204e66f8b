//! What the phases of a run, and the threads that work beside them, need.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ondeck_staging::merge_back::{Loosened, MergeBack};
use ondeck_staging::{Slot, environment};
use ondeck_transfer::{Event, Options};
use rustix::process::Pid;

use super::findings::Findings;
use super::plan::{Plan, RunDirectory};
use super::program::Surroundings;
use super::slurm;

/// What the phases, and the threads that work beside them, need.
pub struct Shared {
    /// What was decided before the start.
    pub plan: Plan,
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// How all copies of this run go.
    pub options: Options,
    /// When the program must end before its batch job does.
    pub margin: Margin,
    /// What the user's processes must find.
    pub surroundings: Surroundings,
    /// Children that are not the run's. The servers of its caches are to be spared, too: [`Shared::spared`].
    pub spare: Vec<Pid>,
    /// The run's name.
    pub id: String,
    /// The run's directory.
    pub dir: PathBuf,
    /// The output directories that are in RAM, by index into the plan.
    pub outputs: Mutex<Vec<std::sync::Arc<Output>>>,
    /// What was done to names of files that have several, which may be in several output directories.
    pub loosened: Arc<Loosened>,
    /// Events of single entries, for the report.
    pub findings: Mutex<Findings>,
}

/// An output directory in RAM.
pub struct Output {
    /// The index of its directory in the plan.
    pub directory: usize,
    /// Its results: the directory in RAM that the program writes to, or the overlay's upper layer.
    pub ram: OwnedFd,
    /// The name of that directory on the RAM disk.
    pub slot: Slot,
    /// How its results come home.
    pub merge_back: MergeBack,
    /// Whether everything of it is on disk.
    pub home: AtomicBool,
    /// Whether our mount over it was taken away, for the user's script.
    pub detached: AtomicBool,
}

/// When the program must end before its batch job does.
pub enum Margin {
    Off,
    Computed,
    Fixed(Duration),
}

/// A poisoned lock guards plain data, which is still good.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Shared {
    /// What the user's scripts find in their environment, beside the user's own.
    pub fn environment(&self, ram: &Path) -> Vec<(&'static str, OsString)> {
        let input = self.plan.directories.iter().filter(|directory| directory.input);
        let output = self.plan.directories.iter().filter(|directory| directory.output);
        environment::of_script(
            ram,
            input.map(|directory| directory.path.as_path()),
            output.map(|directory| directory.path.as_path()),
            slurm::job_id().unwrap_or_else(|| self.id.clone()).into(),
        )
    }

    /// Children that are neither the program nor left behind by it.
    pub fn spared(&self) -> Vec<Pid> {
        let servers = self.plan.caches.iter().filter_map(|cache| cache.server(&self.id));
        self.spare.iter().copied().chain(servers).collect()
    }

    /// Notes what happened to an entry of a directory.
    pub fn record(&self, directory: &RunDirectory, output: Option<&Output>, event: &Event<'_>) {
        lock(&self.findings).record(directory, output.map(|output| &output.merge_back), event);
    }
}
