//! One RAM disk on this node: the steps up, the way down, its report.
//!
//! Every step can be taken twice. The way down asks for no state: it looks at what is there.
//!
//! # Layout
//!
//! - `client`: the mounted filesystem of this node; `check`: what every client of it must read
//! - `devices`: what the server stores on; `ports`: what is kept of servers that ended
//! - `show`: at a directory of an administrator; `overmount`: over the directories of a job, as `overmount_policy`
//!   allows; `late`: while that job is stopped
//! - `health`: the report, and cutting off a client that does not see all files; `brick_access`: what the server itself
//!   has
//! - `teardown`: the way down, and what keeps it from being taken

mod brick_access;
mod check;
mod client;
mod devices;
mod health;
mod late;
mod overmount;
mod overmount_policy;
mod ports;
mod show;
mod teardown;

pub use overmount_policy::OvermountPolicy;
pub(crate) use teardown::forget;
pub use teardown::{NotDestroyed, tear_down};

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use ondeck_api::wire::Step;
use ondeck_core::{Layout, NodeName, RamDiskId};
use ondeck_ramdisk::engine::{CLIENT, DATA};
use ondeck_ramdisk::{Build, EngineError, RuntimeDir, Secret, engine, mounts};

use crate::capacity::Capacity;
use crate::record::{self, RamDiskRecord};
use crate::task::Tasks;

/// How long one look at a mounted filesystem may take before it is said to hang. A lost node must be seen within five
/// seconds in all.
const LOOK: Duration = Duration::from_secs(1);

/// How long a step that is under way may take to see that the RAM disk is being destroyed.
const GIVING_UP: Duration = Duration::from_secs(5);

/// A RAM disk on this node.
pub struct RamDisk {
    runtime_dir: RuntimeDir,
    record: Mutex<RamDiskRecord>,
    secret: Secret,
    /// Held during a step, and on the way down.
    work: Mutex<()>,
    gone: AtomicBool,
    /// Whether somebody looks at the mounted filesystem.
    looking: Arc<AtomicBool>,
    /// Ports of servers that did not start yet, or that ended, kept from others.
    held_ports: Mutex<BTreeMap<u16, OwnedFd>>,
    /// How many times in a row its client did not reach a server.
    missed: AtomicU32,
    /// The directories that will be mounted over, opened.
    targets: Mutex<Option<Vec<overmount::OpenTarget>>>,
    /// The directories above the overmounts, opened.
    held_overmounts: Mutex<Vec<overmount::HeldOvermount>>,
    /// The job whose processes are stopped.
    frozen: Mutex<Option<late::Frozen>>,
    /// Why this node's client was cut off.
    cut: Mutex<Option<String>>,
    /// What is done here for its owner.
    tasks: Tasks,
    /// Since when this agent knows it.
    began: Instant,
    /// When it was last taken away from a directory here.
    overmounts_removed: Mutex<Option<Instant>>,
    /// How long the job was stopped here when it was last.
    stopped_for: Mutex<Option<Duration>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these protect is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl RamDisk {
    /// A new one, or one that was found.
    pub fn new(runtime_dir: RuntimeDir, record: RamDiskRecord, secret: Secret) -> RamDisk {
        RamDisk {
            runtime_dir,
            record: Mutex::new(record),
            secret,
            work: Mutex::new(()),
            gone: AtomicBool::new(false),
            looking: Arc::default(),
            held_ports: Mutex::default(),
            missed: AtomicU32::new(0),
            targets: Mutex::new(None),
            frozen: Mutex::new(None),
            cut: Mutex::new(None),
            tasks: Tasks::default(),
            began: Instant::now(),
            overmounts_removed: Mutex::default(),
            held_overmounts: Mutex::default(),
            stopped_for: Mutex::default(),
        }
    }

    /// Which one it is.
    pub fn id(&self) -> &RamDiskId {
        self.runtime_dir.id()
    }

    /// What is kept of it.
    pub fn record(&self) -> RamDiskRecord {
        lock(&self.record).clone()
    }

    /// Whether it was destroyed meanwhile.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Whether it is being destroyed, or was.
    pub fn is_ending(&self) -> bool {
        self.runtime_dir.is_given_up()
    }

    /// Changes what is kept.
    ///
    /// # Errors
    /// The kernel's; then nothing is changed.
    pub fn note(&self, change: impl FnOnce(&mut RamDiskRecord)) -> Result<(), EngineError> {
        let mut record = lock(&self.record);
        let mut changed = record.clone();
        change(&mut changed);
        changed.save(&self.runtime_dir)?;
        *record = changed;
        Ok(())
    }

    /// Finds what an earlier agent left running.
    ///
    /// # Errors
    /// If it can't be told what that is.
    pub fn adopt(&self) -> std::io::Result<()> {
        self.runtime_dir.adopt()?;
        self.hold_overmounts();
        Ok(())
    }

    /// Does one step.
    ///
    /// # Errors
    /// What went wrong; what the step did so far stays for the way down.
    pub fn step(
        &self,
        step: &Step,
        node: &NodeName,
        capacity: &Capacity,
        policy: &OvermountPolicy,
        until: Instant,
    ) -> Result<(), EngineError> {
        let _work = self.lock_work(until)?;
        if self.is_gone() {
            return Err(EngineError::GivenUp);
        }
        let record = self.record();
        let layout = &record.layout;
        let engine = engine(layout.engine);
        let me = if record.server { layout.server_on(node) } else { None };
        let build = Build { layout, secret: &self.secret, runtime_dir: &self.runtime_dir, me, until };
        match step {
            // Reserved when it was made known to the agent.
            Step::Allocate => Ok(()),
            Step::Prepare => self.prepare(&build, capacity),
            Step::Start(phase) => {
                // Until this moment nobody else could listen there.
                lock(&self.held_ports).clear();
                engine.start(*phase, &build)
            }
            Step::Serve(phase) => {
                let name = engine.phases().get(*phase).map_or("servers", |phase| phase.name);
                let what = format!("the {name} to serve");
                self.runtime_dir.wait(until, &what, || Ok(engine.serves(*phase, &build)?.then_some(())))
            }
            Step::Mount => self.mount(&build),
            Step::Check => self.check(&build),
            Step::Show { path, read_only } => self.show(&build, path, *read_only),
            Step::Hide { path } => self.hide(path),
            Step::OpenTargets { overmounts } => self.open_targets(&build, overmounts, policy),
            Step::Overmount => {
                policy.allows_job(layout)?;
                self.overmount(&build)
            }
            Step::CouldFreeze { job } => self.could_freeze(&build, *job),
            Step::Freeze { job } => self.freeze(&build, *job),
            Step::OvermountFrozen => self.overmount_frozen(&build),
            Step::Keep => self.keep(),
            Step::Thaw => self.thaw().map(|stopped| *lock(&self.stopped_for) = Some(stopped)),
            Step::Busy => self.must_not_be_busy(),
            Step::RemoveOvermounts { force } => self.remove_overmounts(&build, *force, policy),
            Step::Unmount if self.tasks.is_any_running() => Err(EngineError::Refused(format!(
                "a task of {} runs here; it must end before its client is unmounted",
                self.id()
            ))),
            Step::Unmount => self.unmount(),
            Step::Commit => {
                let again = record.complete;
                let overmounts = !record.overmounts.is_empty();
                if overmounts && !record.whole {
                    policy.allows_job(layout)?;
                }
                self.note(|record| {
                    (record.complete, record.settled) = (true, again);
                    record.whole = overmounts;
                })?;
                if !again {
                    tracing::info!(ramdisk = %self.id(), "complete");
                }
                Ok(())
            }
        }
    }

    /// How long the job was stopped here when it was last.
    pub fn stopped_for(&self) -> Option<Duration> {
        *lock(&self.stopped_for)
    }

    /// The tasks that were started for it on this node, as far as they are still known.
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn mounts_at(&self, path: &Path) -> Result<Vec<mounts::Mount>, EngineError> {
        let below = mounts::mounted_below(path)
            .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
        Ok(below.into_iter().filter(|mount| mount.at == path).collect())
    }

    /// Waits until no step is under way. One that hangs in the kernel, on a path of another filesystem, is not waited for
    /// for ever.
    fn lock_work(&self, until: Instant) -> Result<MutexGuard<'_, ()>, EngineError> {
        let began = Instant::now();
        loop {
            match self.work.try_lock() {
                Ok(work) => return Ok(work),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(TryLockError::WouldBlock) => {
                    let what = "a step of it that hangs".to_owned();
                    return Err(EngineError::Deadline { what, waited: began.elapsed() });
                }
            }
        }
    }

    /// Whether a step is under way.
    fn is_at_work(&self) -> bool {
        matches!(self.work.try_lock(), Err(TryLockError::WouldBlock))
    }

    fn build<'a>(&'a self, layout: &'a Layout, me: Option<usize>) -> Build<'a> {
        Build {
            layout,
            secret: &self.secret,
            runtime_dir: &self.runtime_dir,
            me,
            until: Instant::now() + LOOK,
        }
    }
}

fn needs_processes(layout: &Layout) -> bool {
    !engine(layout.engine).phases().is_empty() && needs_mount(layout)
}

fn needs_mount(layout: &Layout) -> bool {
    layout.engine != ondeck_core::EngineKind::Simulated
}

/// Keeps what a new RAM disk is known by.
///
/// # Errors
/// The kernel's.
pub fn found(runtime_dir: &RuntimeDir, record: &RamDiskRecord, secret: &Secret) -> Result<(), EngineError> {
    record::save_secret(runtime_dir, secret)?;
    record.save(runtime_dir)
}
