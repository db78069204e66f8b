//! One RAM disk on this node: the steps up, the way down, its report.
//!
//! Every step can be taken twice. The way down asks for no state: it looks at what is there.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use ondeck_api::wire::{Destroyed, LocalReport, ProcessReport, Step};
use ondeck_core::{Bytes, Layout, NodeName, Owner, RamDiskId};
use ondeck_ramdisk::device::{self, RAM};
use ondeck_ramdisk::engine::{CLIENT, DATA, DATA_DEVICE, METADATA_DEVICE};
use ondeck_ramdisk::mounts::TakenAway;
use ondeck_ramdisk::{Build, Device, EngineError, Place, Secret, engine, mounts};

use crate::capacity::{Capacity, Promise, device_sizes};
use crate::record::{self, Record, Shown};
use crate::task::{Order, Task, Tasks};

mod covers;
mod late;
mod own;

pub use covers::CoverPolicy;

/// Beside the owner's directory, where only root looks: what the check wrote.
const CHECK: &str = ".ondeck-check";

/// A second mount of the filesystem, read-only.
const READ_ONLY: &str = "client-read-only";

/// How long one look at a mounted filesystem may take before it is said to hang. A lost node must be seen within five
/// seconds in all.
const LOOK: Duration = Duration::from_secs(1);

/// How long an orderly unmount may take before it is forced.
const ORDERLY: Duration = Duration::from_millis(1500);

/// How long a step that is under way may take to see that the RAM disk is being destroyed.
const GIVING_UP: Duration = Duration::from_secs(5);

/// How long killing may take; what does not end then waits for the kernel.
const KILLING: Duration = Duration::from_secs(10);

/// How long a device may be busy after its users have ended.
const RELEASING: Duration = Duration::from_secs(10);

/// A RAM disk on this node.
pub struct RamDisk {
    place: Place,
    record: Mutex<Record>,
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
    /// The directories that will be covered, opened.
    aimed: Mutex<Option<Vec<covers::Aimed>>>,
    /// The directories above the covers, opened.
    held_covers: Mutex<Vec<covers::Held>>,
    /// The job whose processes are stopped.
    frozen: Mutex<Option<late::Frozen>>,
    /// Why this node's client was cut off.
    cut: Mutex<Option<String>>,
    /// What is done here for its owner.
    tasks: Tasks,
    /// Since when this agent knows it.
    began: Instant,
    /// When it was last taken away from a directory here.
    uncovered: Mutex<Option<Instant>>,
    /// How long the job was stopped here when it was last.
    stopped_for: Mutex<Option<Duration>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these protect is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl RamDisk {
    /// A new one, or one that was found.
    pub fn new(place: Place, record: Record, secret: Secret) -> RamDisk {
        RamDisk {
            place,
            record: Mutex::new(record),
            secret,
            work: Mutex::new(()),
            gone: AtomicBool::new(false),
            looking: Arc::default(),
            held_ports: Mutex::default(),
            missed: AtomicU32::new(0),
            aimed: Mutex::new(None),
            frozen: Mutex::new(None),
            cut: Mutex::new(None),
            tasks: Tasks::default(),
            began: Instant::now(),
            uncovered: Mutex::default(),
            held_covers: Mutex::default(),
            stopped_for: Mutex::default(),
        }
    }

    /// Which one it is.
    pub fn id(&self) -> &RamDiskId {
        self.place.id()
    }

    /// What is kept of it.
    pub fn record(&self) -> Record {
        lock(&self.record).clone()
    }

    /// Whether it was destroyed meanwhile.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Whether it is being destroyed, or was.
    pub fn is_ending(&self) -> bool {
        self.place.is_given_up()
    }

    /// Keeps its ports from others until its servers start.
    pub fn hold_ports(&self, address: std::net::IpAddr) {
        let mut held = lock(&self.held_ports);
        for port in self.record().ports {
            // One that somebody has taken in this moment is missed by the server.
            held.extend(hold_port(address, port).ok().map(|socket| (port, socket)));
        }
    }

    /// Changes what is kept.
    ///
    /// # Errors
    /// The kernel's; then nothing is changed.
    pub fn note(&self, change: impl FnOnce(&mut Record)) -> Result<(), EngineError> {
        let mut record = lock(&self.record);
        let mut changed = record.clone();
        change(&mut changed);
        changed.save(&self.place)?;
        *record = changed;
        Ok(())
    }

    /// Finds what an earlier agent left running.
    ///
    /// # Errors
    /// If it can't be told what that is.
    pub fn adopt(&self) -> std::io::Result<()> {
        self.place.adopt()?;
        self.hold_covers();
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
        policy: &CoverPolicy,
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
        let build = Build { layout, secret: &self.secret, place: &self.place, me, until };
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
                self.place.wait(until, &what, || Ok(engine.serves(*phase, &build)?.then_some(())))
            }
            Step::Mount => self.mount(&build),
            Step::Check => self.check(&build),
            Step::Show { path, read_only } => self.show(&build, path, *read_only),
            Step::Hide { path } => self.hide(path),
            Step::Aim { covers } => self.aim(&build, covers, policy),
            Step::Cover => {
                policy.allows_job(layout)?;
                self.cover(&build)
            }
            Step::CouldFreeze { job } => self.could_freeze(&build, *job),
            Step::Freeze { job } => self.freeze(&build, *job),
            Step::CoverFrozen => self.cover_frozen(&build),
            Step::Keep => self.keep(),
            Step::Thaw => self.thaw().map(|stopped| *lock(&self.stopped_for) = Some(stopped)),
            Step::Busy => self.must_not_be_busy(),
            Step::Uncover { force } => self.uncover(&build, *force, policy),
            Step::Unmount if self.tasks.is_any_running() => Err(EngineError::Refused(format!(
                "a task of {} runs here; it must end before its client is unmounted",
                self.id()
            ))),
            Step::Unmount => self.unmount(),
            Step::Commit => {
                let again = record.complete;
                let covers = !record.covered.is_empty();
                if covers && !record.whole {
                    policy.allows_job(layout)?;
                }
                self.note(|record| {
                    (record.complete, record.settled) = (true, again);
                    record.whole = covers;
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

    /// Its tasks.
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// Starts a task, with the client mounted here if it is not yet. One of this name that is there already is as good.
    ///
    /// # Errors
    /// If it can't be mounted, or the task can't be started.
    pub fn start_task(
        &self,
        name: &str,
        node: &NodeName,
        capacity: &Capacity,
        until: Instant,
        order: impl FnOnce(PathBuf) -> Order,
    ) -> Result<Arc<Task>, EngineError> {
        if let Some(found) = self.tasks.find(name) {
            return Ok(found);
        }
        let mount = || self.step(&Step::Mount, node, capacity, &CoverPolicy::default(), until);
        // Mounting the client covers nothing.
        if let Some(reason) = self.take_lost_client_away(node, until)? {
            if let Err(error) = mount() {
                // That is no fault of this node's: more than its client was lost.
                *lock(&self.cut) = Some(reason.clone());
                let message = format!("{node}: {reason}, and can't be mounted anew: {error}");
                let fail = || Ok(Task::failed(name, &message));
                return self.tasks.find_or_start(name, &self.place, fail);
            }
            tracing::warn!(ramdisk = %self.id(), reason, "the client was mounted anew");
        } else if !self.is_mounted()? {
            mount()?;
        }
        let has_filesystem = needs_mount(&self.record().layout);
        let quiet = self.quiet_for();
        self.tasks.find_or_start(name, &self.place, || {
            if has_filesystem {
                let mut order = order(self.place.path(CLIENT).join(DATA));
                let unchanged = Duration::from_millis(order.request.unchanged_ms);
                order.out_of_date = order.out_of_date.saturating_sub(quiet.max(unchanged));
                Task::start(name, &self.place, &order)
            } else {
                Ok(Task::pretended(name))
            }
        })
    }

    /// For how long nobody has looked at the data through this node's client, so that it remembers nothing of it.
    fn quiet_for(&self) -> Duration {
        let record = self.record();
        if !record.covered.is_empty() || !record.shown.is_empty() || self.tasks.is_any_running() {
            return Duration::ZERO;
        }
        let last = self.tasks.quiet_since().max(Some(self.began)).max(*lock(&self.uncovered));
        last.map_or(Duration::ZERO, |last| last.elapsed())
    }

    /// Takes this node's client away if it has died, was cut off, or no longer has the connections that it began with:
    /// nothing can be copied from such a one any more, and the data may be intact. Gives the reason if it did. A client
    /// that anybody looks at stays: they must not see other files than before, and be told nothing.
    fn take_lost_client_away(&self, node: &NodeName, until: Instant) -> Result<Option<String>, EngineError> {
        let _work = self.lock_work(until)?;
        let record = self.record();
        let in_use = !record.covered.is_empty() || !record.shown.is_empty() || self.tasks.is_any_running();
        if in_use || !needs_mount(&record.layout) || self.is_ending() {
            return Ok(None);
        }
        let cut = lock(&self.cut).clone();
        let reason = match (cut, self.is_mounted()?) {
            (Some(reason), _) => reason,
            (None, false) => return Ok(None),
            (None, true) if needs_processes(&record.layout) && self.place.running("client").is_none() => {
                "its client's process ended".to_owned()
            }
            (None, true) => {
                let me = if record.server { record.layout.server_on(node) } else { None };
                let now = engine(record.layout.engine).view(&self.build(&record.layout, me))?;
                if record.first_view.is_none_or(|first| first.connections == now.connections) {
                    return Ok(None);
                }
                "its client lost a connection to a server for a while".to_owned()
            }
        };
        take_client_away(&self.place)?;
        self.note(|record| record.first_view = None)?;
        Ok(Some(reason))
    }

    fn prepare(&self, build: &Build, capacity: &Capacity) -> Result<(), EngineError> {
        let (_, server) = build.server()?;
        let sizes = device_sizes(engine(build.layout.engine), build.layout, server.share);
        for (index, (device, size)) in sizes.into_iter().enumerate() {
            let name = [DATA_DEVICE, METADATA_DEVICE][index];
            if self.mounts_at(&self.place.path(name))?.is_empty() {
                let inodes = engine(build.layout.engine).inodes(device::files(size));
                capacity.device(device)?.prepare(&self.place, name, size, inodes, build.until)?;
            }
        }
        Ok(())
    }

    fn mounts_at(&self, path: &Path) -> Result<Vec<mounts::Mount>, EngineError> {
        let below = mounts::mounted_below(path)
            .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
        Ok(below.into_iter().filter(|mount| mount.at == path).collect())
    }

    fn mount(&self, build: &Build) -> Result<(), EngineError> {
        let at = self.place.subdirectory(CLIENT)?;
        if !self.mounts_at(&at)?.is_empty() {
            return Ok(());
        }
        let engine = engine(build.layout.engine);
        // The end of an earlier client is no fault of the next one.
        self.place.forget_ended("client");
        engine.mount(build, &at)?;
        // Without it nobody could tell later whether the client has lost a connection.
        let view = match engine.view(build) {
            Ok(view) => view,
            Err(error) => {
                take_client_away(&self.place)?;
                return Err(error);
            }
        };
        self.note(|record| record.first_view = Some(view))?;
        // What befell an earlier client is nothing to this one.
        self.missed.store(0, Ordering::Relaxed);
        *lock(&self.cut) = None;
        Ok(())
    }

    fn is_mounted(&self) -> Result<bool, EngineError> {
        Ok(!self.mounts_at(&self.place.path(CLIENT))?.is_empty())
    }

    fn check(&self, build: &Build) -> Result<(), EngineError> {
        let engine = engine(build.layout.engine);
        let root = self.place.path(CLIENT);
        let data = root.join(DATA);
        if !self.is_mounted()? {
            return engine.adorn(build, &data);
        }
        let check = root.join(CHECK);
        let wanted = check_content(build);
        let (owner, made) = (build.layout.owner, data.clone());
        within(build.until, "the first write and read", move || {
            match fs::DirBuilder::new().mode(0o700).create(&made) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(EngineError::io("make", &made, error));
                }
                _ => {}
            }
            let write = || -> std::io::Result<()> {
                let mut file =
                    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&check)?;
                file.write_all(&wanted)?;
                file.sync_all()
            };
            write().map_err(|error| EngineError::io("write", &check, error))?;
            read_check(&check, &wanted)
        })?;
        engine.adorn(build, &data)?;
        let owned = data.clone();
        within(build.until, "the owner's directory", move || {
            std::os::unix::fs::chown(&owned, Some(owner.uid), Some(owner.gid))
                .map_err(|error| EngineError::io("change the owner of", &owned, error))
        })
    }

    fn show(&self, build: &Build, path: &Path, read_only: bool) -> Result<(), EngineError> {
        check_path(path)?;
        if self.record().shown.iter().any(|shown| shown.path == path) {
            return Ok(());
        }
        if !self.is_mounted()? {
            // The simulated engine shows nothing.
            return self.note(|record| record.shown.push(Shown { path: path.to_owned(), made: false }));
        }
        let root = self.place.path(CLIENT);
        self.is_whole(build)?;
        if all_mounts()?
            .iter()
            .any(|mount| mount.at == path && mount.source.starts_with("ondeck") && !mount.is_a_users())
        {
            let text = format!("another RAM disk is shown at {} already", path.display());
            return Err(EngineError::Refused(text));
        }
        // The path may lie on a filesystem that hangs.
        let wanted = path.to_owned();
        let (target, made) = within(build.until, "the directory to mount on", move || open_target(&wanted))?;
        // Noted before the mount: who comes after a crash must know what to take away.
        self.note(|record| record.shown.push(Shown { path: path.to_owned(), made }))?;
        let source = if read_only { self.read_only_view(&root)? } else { root };
        let at = path.to_owned();
        let bound = within(build.until, "mounting", move || {
            mounts::bind(&source.join(DATA), &target).map_err(|error| EngineError::io("mount on", &at, error))
        });
        bound.inspect_err(|_| {
            if made {
                // It is empty, or somebody else's now.
                let _ = fs::remove_dir(path);
            }
            let _ = self.note(|record| record.shown.retain(|shown| shown.path != path));
        })
    }

    /// Refuses to show a filesystem of which a part is missing.
    fn is_whole(&self, build: &Build) -> Result<(), EngineError> {
        let (check, wanted) = (self.place.path(CLIENT).join(CHECK), check_content(build));
        within(build.until, "reading what the first client wrote", move || read_check(&check, &wanted))?;
        if let Some((size, _)) = self.filesystem()? {
            let promised = build.layout.capacity();
            // A client that sees a part of the servers is given a part of the size.
            if size < Bytes(promised.0 / 100 * 99) {
                return Err(EngineError::Check(format!(
                    "the filesystem has {size} where {promised} were built: a server is missing"
                )));
            }
        }
        Ok(())
    }

    fn read_only_view(&self, root: &Path) -> Result<PathBuf, EngineError> {
        let view = self.place.subdirectory(READ_ONLY)?;
        if self.mounts_at(&view)?.is_empty() {
            let mount = || -> std::io::Result<()> {
                mounts::bind(root, &mounts::Target::open(&view, None)?)?;
                mounts::remount_read_only(&view)
            };
            mount().map_err(|error| EngineError::io("mount on", &view, error))?;
        }
        Ok(view)
    }

    fn hide(&self, path: &Path) -> Result<(), EngineError> {
        let Some(shown) = self.record().shown.into_iter().find(|shown| shown.path == path) else {
            return Ok(());
        };
        for mount in own_mounts(&self.place)?.iter().filter(|mount| mount.at == path) {
            take_away(mount, self.record().layout.owner)?;
        }
        if shown.made {
            // Not empty: then it is somebody else's now.
            let _ = fs::remove_dir(path);
        }
        *lock(&self.uncovered) = Some(Instant::now());
        self.note(|record| record.shown.retain(|shown| shown.path != path))
    }

    fn unmount(&self) -> Result<(), EngineError> {
        self.must_cover_nothing()?;
        *lock(&self.aimed) = None;
        for shown in self.record().shown {
            self.hide(&shown.path)?;
        }
        if self.place.running("client").is_some() {
            // An orderly end: what is in its buffers reaches the servers, and it ends by itself.
            let views = [READ_ONLY, CLIENT].map(|name| self.place.path(name));
            let until = Instant::now() + ORDERLY;
            let unmounted = within(until, "unmounting", move || {
                for view in &views {
                    match mounts::unmount_unless_busy(view) {
                        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                            return Err(EngineError::io("unmount", view, error));
                        }
                        _ => {}
                    }
                }
                Ok(())
            });
            let ended = unmounted.and_then(|()| {
                self.place.wait(until, "the client to end", || {
                    Ok(self.place.running("client").is_none().then_some(()))
                })
            });
            if let Err(error) = ended {
                tracing::warn!(ramdisk = %self.id(), %error, "the client is busy; it is cut off");
            }
        }
        take_client_away(&self.place)?;
        self.note(|record| record.first_view = None)
    }

    /// The way down. It does not fail half-way: what can't be done is said at the end, and everything else is done.
    ///
    /// # Errors
    /// [`NotDestroyed`]. The RAM disk stays known then, and this can be tried again.
    pub fn destroy(&self, capacity: &Capacity) -> Result<Destroyed, NotDestroyed> {
        // Whatever is being done for it ends now, also what hangs in its client.
        self.give_up()?;
        *lock(&self.aimed) = None;
        self.tasks.let_go();
        let left = |error| NotDestroyed::Left(vec![error]);
        cut_off(&self.place).map_err(left)?;
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
        self.place.give_up();
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
            let guarded = Record { guarded: true, ..record.clone() };
            guarded.save(&self.place)?;
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

    /// Takes it away from every directory where it is shown here. The client stays, and so does what it holds.
    ///
    /// # Errors
    /// What could not be taken away.
    pub fn hide_everywhere(&self) -> Result<(), EngineError> {
        let _work = self.lock_work(Instant::now() + GIVING_UP)?;
        if self.is_gone() { Ok(()) } else { self.hide_all() }
    }

    /// The job begins here, and nobody has told it whether it has this RAM disk: it has what all of its nodes show, and
    /// nothing else. Tells whether that is so.
    ///
    /// # Errors
    /// What could not be taken away.
    pub fn begins(&self) -> Result<bool, EngineError> {
        let _work = self.lock_work(Instant::now() + GIVING_UP)?;
        let record = self.record();
        if self.is_gone() || lock(&self.frozen).is_some() {
            // What a job that is stopped sees is decided before it goes on.
            return Ok(false);
        }
        if record.covered.is_empty() {
            *lock(&self.aimed) = None;
            return Ok(false);
        }
        if record.whole && self.must_cover_all().is_ok() {
            return Ok(true);
        }
        self.hide_all()?;
        Ok(false)
    }

    fn hide_all(&self) -> Result<(), EngineError> {
        *lock(&self.aimed) = None;
        self.detach_held(self.record().layout.owner);
        take_all_away(&self.place, &self.record())?;
        *lock(&self.uncovered) = Some(Instant::now());
        self.note(|record| {
            record.shown.clear();
            record.covered.clear();
        })
    }

    /// Where it is still shown though its client here has ended, or was cut off, for good. By the kernel's own table: an
    /// access to such a path fails, and may hang.
    fn dead_mounts(&self, record: &Record) -> Result<Vec<PathBuf>, EngineError> {
        let lives = self.place.running("client").is_some() && lock(&self.cut).is_none();
        if lives || !record.complete || !needs_processes(&record.layout) {
            return Ok(Vec::new());
        }
        Ok(own_mounts(&self.place)?.into_iter().map(|mount| mount.at).collect())
    }

    /// The same if it is not complete, which is decided while no step is under way. Nothing is done while one is.
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
        condition: impl Fn(&Record) -> bool,
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
        let errors = tear_down(&self.place, &self.record(), capacity, &mut done);
        if errors.is_empty() {
            self.gone.store(true, Ordering::Release);
            tracing::info!(ramdisk = %self.id(), "destroyed");
            Ok(done)
        } else {
            Err(errors)
        }
    }

    /// What it was promised and what of that is in use.
    pub fn promise(&self) -> Promise {
        let record = self.record();
        // What can't be told counts as not used yet: then all of the promise is still kept for it.
        let device = self.mounts_at(&self.place.path(DATA_DEVICE)).is_ok_and(|mounts| !mounts.is_empty());
        let mut ram_used = Bytes::ZERO;
        if record.layout.device == RAM && device {
            ram_used = device_use(&self.place.path(DATA_DEVICE)).ok().flatten().unwrap_or_default();
        }
        if record.server {
            let processes = self.place.processes();
            // A client was promised nothing.
            for process in
                processes.iter().filter(|process| process.ended.is_none() && process.role != "client")
            {
                ram_used = ram_used.saturating_add(resident(process.pid));
            }
        }
        // What is beyond the promise is no use of it.
        let promised_ram = record.promised.get(RAM).copied().unwrap_or_default();
        Promise { promised: record.promised, ram_used: ram_used.min(promised_ram), devices_made: device }
    }

    /// How it is here. It looks at processes and at the mounted filesystem, and takes at most [`LOOK`] for that.
    pub fn report(&self, node: &NodeName) -> LocalReport {
        let record = self.record();
        let mut faults = Vec::new();
        let processes: Vec<ProcessReport> = self
            .place
            .processes()
            .into_iter()
            .map(|process| ProcessReport {
                running: process.ended.is_none(),
                memory: resident(process.pid),
                role: process.role,
                pid: process.pid,
            })
            .collect();
        for process in &processes {
            if !process.running {
                faults.push(format!("its {} (process {}) has ended", process.role, process.pid));
            } else if is_stopped(process.pid) {
                faults.push(format!("its {} (process {}) is stopped", process.role, process.pid));
            }
        }
        if record.complete && record.server && processes.is_empty() && needs_processes(&record.layout) {
            faults.push("its server is not running".into());
        }
        let me = if record.server { record.layout.server_on(node) } else { None };
        let build = self.build(&record.layout, me);
        if record.complete
            && me.is_some()
            && faults.is_empty()
            && let Some(fault) = engine(record.layout.engine).server_fault(&build)
        {
            faults.push(fault);
        }
        let (mut view, mut filesystem) = (None, None);
        let is_mounted = self.is_mounted();
        if let Err(error) = &is_mounted {
            faults.push(error.to_string());
        } else if matches!(is_mounted, Ok(true)) {
            match engine(record.layout.engine).view(&build) {
                Ok(seen) => {
                    let lost = seen.lost.iter();
                    faults.extend(lost.map(|lost| format!("its client can't reach the server on {lost}")));
                    let degraded = seen.degraded.iter();
                    faults.extend(degraded.map(|lost| format!("its client has lost the copy on {lost}")));
                    view = Some(seen);
                }
                Err(error) => faults.push(error.to_string()),
            }
            match self.filesystem() {
                Ok(found) => filesystem = found,
                Err(error) => faults.push(error.to_string()),
            }
        } else if record.complete
            && !(record.shown.is_empty() && record.covered.is_empty())
            && needs_mount(&record.layout)
        {
            faults.push("its client is not mounted any more".into());
        }
        if record.complete && needs_mount(&record.layout) {
            faults.extend(self.cover_faults());
        }
        if let Some(cut) = lock(&self.cut).clone() {
            faults.push(cut);
        }
        let used = device_use(&self.place.path(DATA_DEVICE)).unwrap_or_else(|error| {
            // Results may be there: whoever looks for them must not go on without this node.
            faults.push(error.to_string());
            Some(Bytes::ZERO)
        });
        let used = used.filter(|_| record.server);
        let dead_mounts = self.dead_mounts(&record).unwrap_or_else(|error| {
            faults.push(format!("where it is still shown is not known: {error}"));
            Vec::new()
        });
        LocalReport {
            node: node.clone(),
            layout: record.layout,
            complete: record.complete,
            server: record.server,
            guarded: record.guarded,
            shown: record.shown.into_iter().map(|shown| shown.path).collect(),
            covers: record.covered.into_iter().map(|covered| covered.cover).collect(),
            processes,
            faults,
            used,
            view,
            filesystem,
            dead_mounts,
        }
    }

    fn build<'a>(&'a self, layout: &'a Layout, me: Option<usize>) -> Build<'a> {
        Build { layout, secret: &self.secret, place: &self.place, me, until: Instant::now() + LOOK }
    }

    /// Size and free bytes of the mounted filesystem; nothing for an engine that mounts none.
    fn filesystem(&self) -> Result<Option<(Bytes, Bytes)>, EngineError> {
        if !self.is_mounted()? {
            return Ok(None);
        }
        let data = self.place.path(CLIENT).join(DATA);
        let root = self.place.path(CLIENT);
        // One thread that hangs is enough; one that only looks right now is waited for.
        let until = Instant::now() + LOOK;
        while self.looking.swap(true, Ordering::AcqRel) {
            if Instant::now() >= until {
                let what = "the filesystem to answer".to_owned();
                return Err(EngineError::Deadline { what, waited: LOOK });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let looking = Arc::clone(&self.looking);
        let look = within(Instant::now() + LOOK, "the filesystem to answer", move || {
            let _done = Finally(|| looking.store(false, Ordering::Release));
            // Of the owner's directory if there is one already: an engine may keep a quota there.
            let stat = rustix::fs::statvfs(&data)
                .or_else(|_| rustix::fs::statvfs(&root))
                .map_err(|error| EngineError::io("look at", &root, error))?;
            Ok((Bytes(stat.f_blocks * stat.f_frsize), Bytes(stat.f_bavail * stat.f_frsize)))
        });
        look.map(Some)
    }

    /// Cuts this node's client off if it no longer sees all servers, or did not for a while: from then on it would show
    /// a part of the files and say nothing.
    pub fn guard(&self, node: &NodeName) {
        let record = self.record();
        if !record.complete || self.is_ending() || lock(&self.cut).is_some() {
            return;
        }
        match self.is_mounted() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return tracing::error!(ramdisk = %self.id(), %error, "can't look after the client"),
        }
        let me = if record.server { record.layout.server_on(node) } else { None };
        let engine = engine(record.layout.engine);
        let reason = if needs_processes(&record.layout) && self.place.running("client").is_none() {
            // Its mount gives errors by itself.
            "its client's process ended".to_owned()
        } else {
            let now = match engine.view(&self.build(&record.layout, me)) {
                Ok(now) => now,
                // Cutting off can't be undone: it takes a lost server, and not a look that failed.
                Err(error) => {
                    return tracing::error!(ramdisk = %self.id(), %error, "can't look after the client");
                }
            };
            if now.lost.is_empty() {
                self.missed.store(0, Ordering::Relaxed);
                if record.first_view.is_none_or(|first| first.connections == now.connections) {
                    return;
                }
                "its client was cut off: a connection to a server was lost for a while, in which it hid files"
                    .to_owned()
            } else {
                // Cutting off can't be undone: a server that was only slow to answer is asked again.
                if self.missed.fetch_add(1, Ordering::Relaxed) + 1 < engine.looks_before_lost() {
                    return;
                }
                let lost: Vec<&str> = now.lost.iter().map(NodeName::as_str).collect();
                format!(
                    "its client was cut off: the server on {} was lost, and with it files",
                    lost.join(", ")
                )
            }
        };
        tracing::error!(ramdisk = %self.id(), reason, "RAM disk lost on this node");
        *lock(&self.cut) = Some(reason);
        if let Err(error) = cut_off(&self.place) {
            tracing::error!(ramdisk = %self.id(), %error, "can't cut the client off");
        }
    }

    /// Keeps what is left of ended servers out of harm's way: nobody else may listen on their ports, where clients that
    /// have not given up would tell them the password; and logs do not grow for ever.
    pub fn tidy(&self, node: &NodeName) {
        const LONGEST_LOG: u64 = 1 << 20;
        let record = self.record();
        let processes = self.place.processes();
        for process in &processes {
            let log = self.place.log(&process.role);
            if fs::metadata(&log).is_ok_and(|meta| meta.len() > LONGEST_LOG) {
                // Processes append to it, so they go on at its new end.
                let _ = OpenOptions::new().write(true).open(&log).and_then(|file| file.set_len(0));
            }
        }
        let lost_one = processes.iter().any(|process| process.role != "client" && process.ended.is_some());
        if !lost_one || !record.server || self.is_ending() {
            return;
        }
        let Some(me) = record.layout.server_on(node) else { return };
        let address = record.layout.servers[me].address;
        let mut held = lock(&self.held_ports);
        for port in &record.ports {
            // It fails for those on which another server of the RAM disk still listens.
            if !held.contains_key(port)
                && let Ok(socket) = hold_port(address, *port)
            {
                held.insert(*port, socket);
            }
        }
    }

    /// Words for whoever is about to copy from here: what is wrong, and a witness of the connections so far. A lost copy
    /// is no fault while the other one is there.
    pub fn witness(&self, node: &NodeName) -> (Vec<String>, String) {
        let record = self.record();
        let report = self.report(node);
        let connections = report.view.as_ref().map(|view| view.connections.clone()).unwrap_or_default();
        let mut faults = report.faults;
        if record.layout.replicas > 1 && lock(&self.cut).is_none() {
            faults = match &report.view {
                None if faults.is_empty() => vec!["its client is not mounted any more".into()],
                // Whether it is can't be told.
                None => faults,
                Some(view) => view
                    .lost
                    .iter()
                    .map(|lost| format!("its client can't reach {lost} nor its copy"))
                    .collect(),
            };
        }
        if record.first_view.is_some_and(|first| first.connections != connections) {
            faults.push("its client lost a connection to a server for a while, in which it hid files".into());
        }
        (faults, format!("{} {connections}", self.id()))
    }
}

/// Takes a port without listening on it: whoever connects is refused, and nobody else can listen there.
fn hold_port(address: std::net::IpAddr, port: u16) -> std::io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Connections of the ended server linger on the port.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &std::net::SocketAddr::new(address, port))?;
    sockopt::set_socket_reuseaddr(&socket, false)?;
    Ok(socket)
}

/// Does something at the end of a scope, however it ends.
struct Finally<F: FnMut()>(F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn needs_processes(layout: &Layout) -> bool {
    !engine(layout.engine).phases().is_empty() && needs_mount(layout)
}

fn needs_mount(layout: &Layout) -> bool {
    layout.engine != ondeck_core::EngineKind::Simulated
}

/// Why a RAM disk was not destroyed.
#[derive(Debug)]
pub enum NotDestroyed {
    /// It may hold results. Nothing was done.
    HoldsResults,
    /// What could not be removed.
    Left(Vec<EngineError>),
}

/// The way down, for a RAM disk that is known or that was found. Each step is timed and does what it can.
pub fn tear_down(
    place: &Place,
    record: &Record,
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
    step("hide", &mut || take_all_away(place, record));
    step("unmount client", &mut || take_client_away(place));
    step("end processes", &mut || {
        place.kill_all(Instant::now() + KILLING)?;
        // A client that was just mounting when it was told to end may have done so after all.
        take_client_away(place)?;
        end_users(place, record)
    });
    step("free devices", &mut || {
        // While it is shown somewhere it is not ours to free; this can be tried again.
        if own_mounts(place)?.is_empty() { free_devices(place, record, capacity) } else { Ok(()) }
    });
    if errors.is_empty() {
        let began = Instant::now();
        if let Err(error) = forget(place) {
            errors.push(error);
        }
        done.steps.push(("forget".to_owned(), began.elapsed().as_secs_f64()));
    }
    errors
}

fn all_mounts() -> Result<Vec<mounts::Mount>, EngineError> {
    mounts::mounted().map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))
}

/// Where a RAM disk is shown, by the kernel's own table and not by what was noted, the latest first: directories above
/// may have been renamed since, and others may have mounted something at the same path.
fn own_mounts(place: &Place) -> Result<Vec<mounts::Mount>, EngineError> {
    let all = all_mounts()?;
    let devices: Vec<(u32, u32)> =
        all.iter().filter(|mount| mount.at.starts_with(place.dir())).map(|mount| mount.device).collect();
    let name = format!("ondeck:{}", place.id());
    // Users can give any name to what they mount by FUSE.
    let is_own = |mount: &mounts::Mount| {
        (mount.source == name && !mount.is_a_users()) || devices.contains(&mount.device)
    };
    let mut shown: Vec<_> =
        all.into_iter().filter(|mount| is_own(mount) && !mount.at.starts_with(place.dir())).collect();
    shown.reverse();
    Ok(shown)
}

/// Unmounts it wherever it is shown, and removes the directories that were made for it.
fn take_all_away(place: &Place, record: &Record) -> Result<(), EngineError> {
    let mut result = Ok(());
    for mount in own_mounts(place)? {
        if let Err(error) = take_away(&mount, record.layout.owner) {
            result = Err(error);
        }
    }
    for shown in record.shown.iter().filter(|shown| shown.made) {
        let path = shown.path.clone();
        // Not empty, or gone: then it is somebody else's now.
        let _ =
            within(Instant::now() + ORDERLY, "removing a directory", move || Ok(fs::remove_dir(path).ok()));
    }
    // One inside another can't be reached once the client is cut off, and went with the outer one.
    if own_mounts(place)?.is_empty() { Ok(()) } else { result }
}

/// How often a mount is looked for again if its path led elsewhere: somebody may be renaming directories above it.
const LOOKS: usize = 50;

/// Unmounts one mount: in order if it can be, else lazily, whoever still uses it.
pub(crate) fn take_away(mount: &mounts::Mount, owner: Owner) -> Result<(), EngineError> {
    let is_it = |other: &&mounts::Mount| other.id == mount.id && other.device == mount.device;
    let mut orderly = true;
    for _ in 0..LOOKS {
        let all = all_mounts()?;
        let Some(now) = all.iter().find(is_it) else { return Ok(()) };
        // Nobody walks into what a user has mounted on the way: whoever serves it may never answer.
        if let Some(above) = mounts::seen_at(&all, &now.at).filter(|above| above.id != now.id) {
            return Err(EngineError::Refused(format!(
                "something else is mounted over {}, at {}; unmount that first",
                now.at.display(),
                above.at.display()
            )));
        }
        if orderly {
            let one = now.clone();
            let unmounted = within(Instant::now() + ORDERLY, "unmounting", move || {
                as_root_or_owner(owner, || mounts::take_away(&one, false))
                    .map_err(|error| EngineError::io("unmount", &one.at, error))
            });
            match unmounted {
                Ok(TakenAway::Yes) => return Ok(()),
                // By then it is busy no more, or it is taken away all the same.
                Ok(TakenAway::Busy) | Err(_) => orderly = false,
                Ok(TakenAway::Elsewhere) => {}
            }
        } else {
            let one = now.clone();
            let taken = within(Instant::now() + ORDERLY, "unmounting", move || {
                as_root_or_owner(owner, || mounts::take_away(&one, true))
                    .map_err(|error| EngineError::io("unmount", &one.at, error))
            });
            if taken? == TakenAway::Yes {
                return Ok(());
            }
        }
    }
    Err(EngineError::Refused(format!(
        "{} is still mounted: its path changes all the time",
        mount.at.display()
    )))
}

/// Does something with a path that root may not be able to reach: root-squashed filesystems take it for nobody.
fn as_root_or_owner<T: Send>(
    owner: Owner,
    work: impl Fn() -> std::io::Result<T> + Sync,
) -> std::io::Result<T> {
    match work() {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            covers::user_of(owner).on_a_thread(&work).map_err(std::io::Error::other)?
        }
        done => done,
    }
}

/// Ends the connection of the client's FUSE filesystem, so that whoever hangs in it gets an error, and kills the client.
fn cut_off(place: &Place) -> Result<(), EngineError> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    place.kill_role("client");
    let client = place.path(CLIENT);
    let mounts = mounts::mounted_below(&client)
        .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
    for mount in mounts.iter().filter(|mount| mount.kind.starts_with("fuse")) {
        // A name of its own: several may cut off at the same time.
        let scratch = place.path(&format!("fuse-control-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        if let Err(error) = mounts::abort_fuse(mount.device, &scratch) {
            // The client is dead, which does it too in all but rare cases.
            tracing::warn!(ramdisk = %place.id(), %error, "can't abort its FUSE connection");
        }
    }
    Ok(())
}

fn take_client_away(place: &Place) -> Result<(), EngineError> {
    cut_off(place)?;
    // A machine that is out of breath takes a while to end it; the next client is mounted before that.
    place.end_role("client");
    for name in [READ_ONLY, CLIENT] {
        let path = place.path(name);
        mounts::detach_all(&path).map_err(|error| EngineError::io("unmount", &path, error))?;
    }
    Ok(())
}

/// Kills whoever still has files open in the RAM itself. Only tmpfs is used directly by programs; they would keep its
/// pages for as long as they live.
fn end_users(place: &Place, record: &Record) -> Result<(), EngineError> {
    if record.layout.engine != ondeck_core::EngineKind::Tmpfs {
        return Ok(());
    }
    let device = place.path(DATA_DEVICE);
    let mounted = mounts::mounted_below(&device)
        .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
    if mounted.is_empty() {
        return Ok(());
    }
    let number =
        fs::symlink_metadata(&device).map_err(|error| EngineError::io("look at", &device, error))?.dev();
    place.end_users_of(number, Instant::now() + KILLING)
}

fn free_devices(place: &Place, record: &Record, capacity: &Capacity) -> Result<(), EngineError> {
    for (name, device) in [
        (DATA_DEVICE, Some(&record.layout.device)),
        (METADATA_DEVICE, record.layout.metadata_device.as_ref()),
    ] {
        let at = place.path(name);
        empty(&at);
        // The processes are gone, but the kernel closes a dead process's files a moment after its memory is freed. Once
        // this unmount succeeds, the bytes are free.
        let until = Instant::now() + RELEASING;
        let mut nap = Duration::from_micros(500);
        loop {
            match mounts::unmount_unless_busy(&at) {
                Ok(true) => break,
                Ok(false) if Instant::now() < until => {
                    std::thread::sleep(nap);
                    nap = (nap * 2).min(Duration::from_millis(20));
                }
                Ok(false) => {
                    return Err(EngineError::Deadline {
                        what: format!("the device {} to be given back", at.display()),
                        waited: RELEASING,
                    });
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
                Err(error) => return Err(EngineError::io("unmount", &at, error)),
            }
        }
        let fallback = Device::Ram { preallocate: false };
        // A device that the configuration no longer has leaves an image, which the next start of the agent names.
        let device = device.and_then(|name| capacity.device(name).ok()).unwrap_or(&fallback);
        device.remove(place, name)?;
    }
    Ok(())
}

/// Removes what is on a device. Another mount namespace may have a copy of its mount, which would keep the bytes for as
/// long as it lives.
fn empty(device: &Path) {
    if !mounts::mounted_below(device).is_ok_and(|mounts| mounts.iter().any(|mount| mount.at == device)) {
        return;
    }
    for entry in fs::read_dir(device).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        // What can't be removed goes with the unmount.
        let _ = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
}

/// Removes the place, unless something is still mounted in it: its content would be removed too.
pub(crate) fn forget(place: &Place) -> Result<(), EngineError> {
    let left = mounts::mounted_below(place.dir())
        .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
    if let Some(mount) = left.first() {
        return Err(EngineError::Refused(format!("{} is still mounted", mount.at.display())));
    }
    match fs::remove_dir_all(place.dir()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(EngineError::io("remove", place.dir(), error))
        }
        _ => Ok(()),
    }
}

/// A path where something can be shown: absolute and plain.
///
/// # Errors
/// [`EngineError::Refused`].
pub fn check_path(path: &Path) -> Result<(), EngineError> {
    let plain = path.is_absolute()
        && path.components().count() > 1
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !plain {
        return Err(EngineError::Refused(format!(
            "{} is no place for a RAM disk: name an absolute path without `..`",
            path.display()
        )));
    }
    Ok(())
}

/// The directory to show it at. No component of the path may be a symlink: whoever can change a directory above could
/// otherwise choose what is mounted over.
fn open_target(path: &Path) -> Result<(mounts::Target, bool), EngineError> {
    mounts::Target::open_or_make(path).map_err(|error| {
        if error.kind() == std::io::ErrorKind::NotADirectory {
            return EngineError::Refused(format!("{} is not a directory", path.display()));
        }
        if error.raw_os_error() != Some(rustix::io::Errno::LOOP.raw_os_error()) {
            return EngineError::io("mount on", path, error);
        }
        let real = path.parent().and_then(|parent| parent.canonicalize().ok());
        let hint = real
            .zip(path.file_name())
            .map(|(parent, name)| format!("; its real path may be {}", parent.join(name).display()));
        let hint = hint.unwrap_or_default();
        EngineError::Refused(format!("there is a symlink in {}{hint}", path.display()))
    })
}

/// What the check writes: 4 KiB that follow from the secret, so that every client knows them.
fn check_content(build: &Build) -> Vec<u8> {
    build.client_secret().derive("check").repeat(128)
}

fn read_check(path: &Path, wanted: &[u8]) -> Result<(), EngineError> {
    let mut found = Vec::new();
    fs::File::open(path)
        .and_then(|mut file| file.read_to_end(&mut found))
        .map_err(|error| EngineError::io("read", path, error))?;
    if found != wanted {
        return Err(EngineError::Check(format!("{} has other bytes than were written", path.display())));
    }
    Ok(())
}

/// Does work that may hang in the kernel on a thread of its own, and waits no longer than `until`. If it is not done by
/// then the thread is left to itself: it ends when the mount that it hangs in is cut off.
fn within<T: Send + 'static>(
    until: Instant,
    what: &str,
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let began = Instant::now();
    let (sender, receiver) = sync_channel(1);
    let thread = std::thread::Builder::new().spawn(move || {
        // Nobody may be waiting any more.
        let _ = sender.send(work());
    });
    if let Err(error) = thread {
        return Err(EngineError::Check(format!("{what}: no thread for it: {error}")));
    }
    match receiver.recv_timeout(until.saturating_duration_since(began)) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => {
            Err(EngineError::Deadline { what: what.to_owned(), waited: began.elapsed() })
        }
        Err(RecvTimeoutError::Disconnected) => {
            Err(EngineError::Check(format!("{what}: the thread that did it panicked")))
        }
    }
}

/// What is stored on a device; nothing if it is not mounted.
fn device_use(device: &Path) -> Result<Option<Bytes>, EngineError> {
    let mounts = mounts::mounted_below(device)
        .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
    if mounts.is_empty() {
        return Ok(None);
    }
    // Devices are served by this kernel and never hang.
    match rustix::fs::statvfs(device) {
        Ok(stat) => Ok(Some(Bytes((stat.f_blocks - stat.f_bfree) * stat.f_frsize))),
        // It was removed meanwhile.
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(error) => Err(EngineError::io("look at", device, error)),
    }
}

/// The resident memory of a process.
fn resident(pid: i32) -> Bytes {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: u64 = text.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    Bytes(pages * rustix::param::page_size() as u64)
}

/// Whether a process is stopped by a signal or a debugger.
fn is_stopped(pid: i32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold anything.
    let state = text.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}

/// Makes the agent's own directory, for root alone.
///
/// # Errors
/// The kernel's, or if it is not root's alone.
pub fn private_directory(path: &Path) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        // The socket lies there, too, and users must reach it.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let meta = fs::symlink_metadata(path)?;
    if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(std::io::Error::other("it is not a directory of root's"));
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
}

/// Keeps what a new RAM disk is known by.
///
/// # Errors
/// The kernel's.
pub fn found(place: &Place, record: &Record, secret: &Secret) -> Result<(), EngineError> {
    record::save_secret(place, secret)?;
    record.save(place)
}

fn is_in_doubt(record: &Record) -> bool {
    record.complete && !record.settled && !record.guarded && record.covered.is_empty()
}
