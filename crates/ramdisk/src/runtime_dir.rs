//! What a RAM disk has on one node while it exists: its directory, its processes, what they wrote to their logs.
//!
//! Every process that is started here carries a [mark](crate::mark), by which an agent knows it again after a crash.
//! `start` starts them, `known` keeps what became of them, `ending` ends them.

mod ending;
mod known;
mod start;
#[cfg(test)]
mod tests;

pub use crate::mark::{Marked, TASK};
pub use ending::{end_stray_tasks, marked, name_of};
pub use known::{Process, tail};

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_core::RamDiskId;

use crate::EngineError;
use crate::mark::Marks;

/// How long a wait sleeps between two looks, at first; it doubles up to [`LONGEST_NAP`].
const FIRST_NAP: Duration = Duration::from_micros(500);
const LONGEST_NAP: Duration = Duration::from_millis(10);

/// The directory of a RAM disk on this node, with the processes that belong to it.
pub struct RuntimeDir {
    id: RamDiskId,
    /// The agent's directory, the same for all its RAM disks.
    scope: PathBuf,
    dir: PathBuf,
    marks: Marks,
    processes: Arc<Mutex<BTreeMap<i32, Process>>>,
    given_up: AtomicBool,
}

impl RuntimeDir {
    /// The runtime directory of `id` in the agent's directory `scope`; it is made (mode 0700) if it is missing.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(scope: &Path, id: RamDiskId) -> io::Result<RuntimeDir> {
        let dir = scope.join("ramdisks").join(id.name.as_str());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        Ok(RuntimeDir {
            id,
            scope: scope.to_owned(),
            dir,
            marks: Marks::open(scope)?,
            processes: Arc::default(),
            given_up: AtomicBool::new(false),
        })
    }

    /// The RAM disk that it belongs to.
    pub fn id(&self) -> &RamDiskId {
        &self.id
    }

    /// The directory that only root can look into.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The directory `name` in it, made (mode 0700) if it is missing.
    ///
    /// # Errors
    /// The kernel's.
    pub fn subdirectory(&self, name: &str) -> Result<PathBuf, EngineError> {
        let path = self.path(name);
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(EngineError::io("make", &path, error))
            }
            _ => Ok(path),
        }
    }

    /// Writes a file that only root can read.
    ///
    /// # Errors
    /// The kernel's.
    pub fn write_private(&self, name: &str, content: &[u8]) -> Result<PathBuf, EngineError> {
        let path = self.path(name);
        let partial = self.path(&format!("{name}.partial"));
        let write = || -> io::Result<()> {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
            file.write_all(content)?;
            // What is kept of a RAM disk decides whether its data is destroyed: it must outlive a crash of the machine.
            file.sync_all()?;
            fs::rename(&partial, &path)?;
            fs::File::open(&self.dir)?.sync_all()
        };
        write().map_err(|error| EngineError::io("write", &path, error))?;
        Ok(path)
    }

    /// Marks a process that is not started here as one of the RAM disk's: it is ended with it.
    pub fn mark(&self, role: &str, command: &mut Command) {
        self.marks.put(&self.id.to_string(), role, command);
    }

    /// Where the output of `role` goes.
    pub fn log(&self, role: &str) -> PathBuf {
        self.path(&format!("{}.log", role.replace(' ', "-")))
    }

    /// Waits until `look` finds what it looks for, the time is over, or the RAM disk is destroyed.
    ///
    /// # Errors
    /// [`EngineError::Deadline`], [`EngineError::GivenUp`], or what `look` says.
    pub fn wait<T>(
        &self,
        until: Instant,
        what: &str,
        mut look: impl FnMut() -> Result<Option<T>, EngineError>,
    ) -> Result<T, EngineError> {
        let began = Instant::now();
        let mut nap = FIRST_NAP;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if self.given_up.load(Ordering::Relaxed) {
                return Err(EngineError::GivenUp);
            }
            if Instant::now() >= until {
                return Err(EngineError::Deadline { what: what.to_owned(), waited: began.elapsed() });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }

    /// Fails if the RAM disk is being destroyed or the time is over: for work that waits for nothing.
    ///
    /// # Errors
    /// [`EngineError::Deadline`], [`EngineError::GivenUp`].
    pub fn must_go_on(&self, until: Instant, what: &str) -> Result<(), EngineError> {
        if self.is_given_up() {
            return Err(EngineError::GivenUp);
        }
        if Instant::now() >= until {
            return Err(EngineError::Deadline { what: what.to_owned(), waited: Duration::ZERO });
        }
        Ok(())
    }

    /// Ends every wait here from now on: the RAM disk is being destroyed.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Whether the RAM disk is being destroyed.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<i32, Process>> {
        lock(&self.processes)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A table of processes is whole after every single statement that changes it.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
