//! What an agent knows of its node and of the RAM disks there.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use ondeck_api::Config;
use ondeck_api::auth::Caller;
use ondeck_api::config::Listen;
use ondeck_api::wire::{
    Allocated, Authority, Claim, Destroyed, Has, LocalReport, MemoryReport, Names, NodeReport, NodeSettings,
    Obeyed, PathView, Refusal, RefusalCode, Release, Step, StepDone, StepRequest, TaskReport, TaskRequest,
    Witness, is_plain,
};
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Bytes, EngineKind, Epoch, JobSelector, Layout, NodeName, RamDiskId, RamDiskName};
use ondeck_ramdisk::device::{RAM, stray_images};
use ondeck_ramdisk::mark::Marks;
use ondeck_ramdisk::{EngineError, Place, Secret, engine, mounts, place};

use crate::authority::{Commander, Order as OrderKind};
use crate::capacity::{Capacity, machine_ram};
use crate::hooks;
use crate::ramdisk::{self, CoverPolicy, NotDestroyed, RamDisk};
use crate::record::{self, Record};
use crate::task::{self, Order, Task};

/// The file with the newest epoch of every name.
const EPOCHS: &str = "epochs.json";

/// How long the epoch of a destroyed RAM disk is remembered. Credentials are refused long before.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

/// The longest that a request may ask for.
const LONGEST: Duration = Duration::from_secs(3600);

/// How long mounting may take for a task.
const MOUNTING: Duration = Duration::from_secs(30);

/// How long a task may take to end once it is killed; what does not end then hangs in the kernel.
const ENDING: Duration = Duration::from_secs(20);

/// An agent's node.
pub struct Node {
    name: NodeName,
    state: PathBuf,
    socket: PathBuf,
    storage_address: IpAddr,
    ports: std::ops::RangeInclusive<u16>,
    commander: Commander,
    /// Exchanged as a whole when the configuration is read again; who works by the former one goes on with it.
    rules: RwLock<Arc<Rules>>,
    /// Held while something is promised, so that two requests can't be promised the same.
    known: Mutex<Known>,
}

/// What the configuration lends and allows; it may change while the agent runs.
struct Rules {
    script_memory: Bytes,
    require_memory_group: bool,
    capacity: Capacity,
    covering: CoverPolicy,
    settings: NodeSettings,
}

impl Rules {
    fn new(config: &Config) -> std::io::Result<Rules> {
        let settings = NodeSettings::new(config);
        let config = &config.agent;
        Ok(Rules {
            settings,
            script_memory: config.script_memory(),
            require_memory_group: config.require_memory_group,
            capacity: Capacity::new(config)?,
            covering: CoverPolicy::new(config),
        })
    }
}

#[derive(Default)]
struct Known {
    ramdisks: BTreeMap<RamDiskName, Arc<RamDisk>>,
    epochs: BTreeMap<RamDiskName, Epoch>,
    /// When each epoch was noted here. An epoch is the time of its making by another machine's clock, which says nothing of
    /// its age.
    noted: BTreeMap<RamDiskName, Instant>,
    next_port: u16,
}

/// Why an agent can't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its directory can't be used.
    #[error("can't use the agent's directory {}: {source}", .path.display())]
    State {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Another agent uses it.
    #[error("another agent is running in {}", .path.display())]
    Running {
        /// Which directory.
        path: PathBuf,
    },
    /// What is kept of a RAM disk is missing, can't be read, or not be understood. Its servers live on.
    #[error(
        "can't understand what is kept of the RAM disk in {}: {source}; it may hold results, so it is left as it is. Put \
         the file back, or start the agent of the version that built it; or, if its data is not needed, restart the node \
         and remove that directory",
        .path.display()
    )]
    Record {
        /// Its place.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A RAM disk is on this node of which nothing is kept. Its servers live on.
    #[error(
        "the RAM disk {id} is on this node ({use_of_it}), but {} is gone, where the agent keeps what it knows of it. It may \
         hold results, so it is left as it is. Put the directory back; or, if its data is not needed, end these processes \
         and unmount these paths, or restart the node",
        .path.display()
    )]
    Unrecorded {
        /// Which one, as `NAME@EPOCH`.
        id: String,
        /// Its processes and mounts.
        use_of_it: String,
        /// Where its place would be.
        path: PathBuf,
    },
    /// Whom the agent obeys can't be told.
    #[error(
        "can't tell whom this agent obeys: {}: {source}; mend that, or, if no scheduler runs that has used this node, remove \
         the file: the next scheduler that claims the agent is obeyed",
        .path.display()
    )]
    Authority {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It can't be told which RAM disks there are. Their servers live on.
    #[error(
        "can't tell which RAM disks are on this node: {}: {source}; put it right and start the agent again, or restart \
         the node if none of them is needed",
        .path.display()
    )]
    Unknown {
        /// What can't be read.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What is kept of the epochs can't be read.
    #[error(
        "can't tell which RAM disks were destroyed on this node: {}: {source}; a late request could build one of them \
         again. Put the file right; or wait a day, and remove it: by then no such request is on its way",
        .path.display()
    )]
    Epochs {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The node's name is none.
    #[error("this machine's host name can't be used: {0}")]
    Name(#[from] ondeck_core::allocation::NameError),
    /// The name of this node has no address.
    #[error("the host name {name} has no address ({why}); set storage_address in the configuration")]
    Address {
        /// The name.
        name: NodeName,
        /// Why not.
        why: String,
    },
    /// A device can't be used.
    #[error("{0}")]
    Device(std::io::Error),
}

fn refusal(code: RefusalCode, message: impl Into<String>) -> Refusal {
    Refusal::new(code, message)
}

fn failed(error: &EngineError) -> Refusal {
    let code = match error {
        EngineError::TooLarge { .. } => RefusalCode::TooLarge,
        EngineError::Refused(_) => RefusalCode::Conflict,
        EngineError::Busy(_) => RefusalCode::Busy,
        _ => RefusalCode::Failed,
    };
    refusal(code, error.to_string())
}

/// Milliseconds since the machine was started: a clock that nobody sets.
pub fn since_boot_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// This machine's name, without its domain: as Slurm has it.
///
/// # Errors
/// If it can't be a name.
pub fn host_name() -> Result<NodeName, ondeck_core::allocation::NameError> {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy().into_owned();
    name.split('.').next().unwrap_or(&name).parse()
}

/// The address that agents of other nodes reach this one by.
///
/// # Errors
/// [`StartError::Address`].
pub fn own_address(name: &NodeName, listen: Option<Listen>) -> Result<IpAddr, StartError> {
    if let Some(Listen::Address(address)) = listen {
        return Ok(address);
    }
    let why = match (name.as_str(), 0).to_socket_addrs() {
        Ok(mut found) => match found.next() {
            Some(address) => return Ok(address.ip()),
            None => "the name service knows it without one".to_owned(),
        },
        Err(error) => error.to_string(),
    };
    match listen {
        // Nobody else will ask.
        None => Ok(IpAddr::from([127, 0, 0, 1])),
        Some(_) => Err(StartError::Address { name: name.clone(), why }),
    }
}

impl Node {
    /// Starts from what the configuration says and from what an earlier agent left: adopts what was complete, removes
    /// what was not, and whatever belongs to nothing.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: &Config) -> Result<Node, StartError> {
        let name = host_name()?;
        let agent = &config.agent;
        let storage_address = match agent.storage_address {
            Some(address) => address,
            None => own_address(&name, agent.listen)?,
        };
        let unusable = |source| StartError::State { path: agent.state.clone(), source };
        ramdisk::private_directory(&agent.state).map_err(unusable)?;
        // Marks and mounts carry the path, so there must be one way to write it.
        let state = agent.state.canonicalize().map_err(unusable)?;
        protect_from_oom_killer();
        // Before anything is adopted or removed: an agent that does not know whom it obeys does nothing.
        let commander = Commander::load(&state)
            .map_err(|source| StartError::Authority { path: Commander::file(&state), source })?;
        let node = Node {
            name,
            socket: agent.socket.clone(),
            storage_address,
            ports: agent.server_ports.first..=agent.server_ports.last,
            commander,
            rules: RwLock::new(Arc::new(Rules::new(config).map_err(StartError::Device)?)),
            known: Mutex::new(Known { next_port: agent.server_ports.first, ..Known::default() }),
            state,
        };
        node.recover()?;
        Ok(node)
    }

    /// The node's name.
    pub fn name(&self) -> &NodeName {
        &self.name
    }

    fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.read().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Lends and allows from now on what this configuration says. What was promised stays promised, also if it is more than
    /// is lent now, and what is shown stays shown.
    ///
    /// # Errors
    /// If a device can't be used; then nothing has changed.
    pub fn take_over(&self, config: &Config) -> std::io::Result<()> {
        let rules = Arc::new(Rules::new(config)?);
        *self.rules.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = rules;
        Ok(())
    }

    /// The RAM disks that have something here.
    pub fn ramdisks(&self) -> Vec<Arc<RamDisk>> {
        self.known().ramdisks.values().cloned().collect()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn recover(&self) -> Result<(), StartError> {
        self.known().epochs = self.load_epochs()?;
        // First of all: what begins later without a proof in its mark is nobody's.
        Marks::open(&self.state)
            .map_err(|source| StartError::Unknown { path: self.state.clone(), source })?;
        // All is read before anything is done: what can't be read, or is gone, may be somebody's results.
        let (mut kept, mut begun) = (Vec::new(), Vec::new());
        for dir in self.places()? {
            let unread = |source| StartError::Record { path: dir.clone(), source };
            match Record::load(&dir) {
                Ok(record) => kept.push((record, record::load_secret(&dir).map_err(unread)?)),
                Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
                    if let Some(use_of_it) = self.use_of(&dir)? {
                        return Err(unread(std::io::Error::other(format!("{source}, but {use_of_it}"))));
                    }
                    begun.push(dir);
                }
                Err(source) => return Err(unread(source)),
            }
        }
        let ids: Vec<RamDiskId> = kept.iter().map(|(record, _)| record.layout.id.clone()).collect();
        self.all_are_recorded(&ids)?;
        for dir in begun {
            self.remove_unknown(&dir);
        }
        for (record, secret) in kept {
            self.recover_one(record, secret)?;
        }
        let ids: Vec<RamDiskId> = self.ramdisks().iter().map(|known| known.id().clone()).collect();
        place::end_stray_tasks(&self.state, &ids).map_err(no_processes)?;
        task::remove_left_over_groups(&self.state);
        for directory in self.rules().capacity.directories() {
            let images = stray_images(directory, &ids).unwrap_or_else(|error| {
                // They take bytes and nothing else; the device shows that it lacks them.
                tracing::error!(directory = %directory.display(), %error, "can't look for images that were left");
                Vec::new()
            });
            for image in images {
                tracing::warn!(image = %image.display(), "removing an image that belongs to no RAM disk");
                if let Err(error) = std::fs::remove_file(&image) {
                    tracing::error!(image = %image.display(), %error, "can't remove it");
                }
            }
        }
        Ok(())
    }

    /// The epochs that an earlier agent kept. It keeps none before the first RAM disk.
    fn load_epochs(&self) -> Result<BTreeMap<RamDiskName, Epoch>, StartError> {
        let path = self.state.join(EPOCHS);
        let read = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            read => read.and_then(|text| Ok(serde_json::from_slice(&text)?)),
        };
        read.map_err(|source| StartError::Epochs { path, source })
    }

    /// The directories of the RAM disks that an earlier agent left. There is none before the first one.
    fn places(&self) -> Result<Vec<PathBuf>, StartError> {
        let path = self.state.join("ramdisks");
        let read = || -> std::io::Result<Vec<PathBuf>> {
            std::fs::read_dir(&path)?.map(|entry| Ok(entry?.path())).collect()
        };
        match read() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read.map_err(|source| StartError::Unknown { path, source }),
        }
    }

    fn recover_one(&self, record: Record, secret: Secret) -> Result<(), StartError> {
        let id = record.layout.id.clone();
        let complete = record.complete;
        let place = Place::open(&self.state, id.clone())
            .map_err(|source| StartError::State { path: self.state.clone(), source })?;
        let found = Arc::new(RamDisk::new(place, record, secret));
        found.adopt().map_err(no_processes)?;
        {
            let mut known = self.known();
            known.ramdisks.insert(id.name.clone(), Arc::clone(&found));
            // Also if what was kept of the epochs was removed meanwhile.
            let newest = known.epochs.entry(id.name.clone()).or_insert(id.epoch);
            *newest = (*newest).max(id.epoch);
        }
        let guarded = found.record().guarded;
        if guarded && !complete {
            tracing::error!(ramdisk = %id, "is not complete, and may hold results all the same; it is kept");
        } else if complete && !found.is_in_doubt() {
            let report = found.report(&self.name);
            let processes = report.processes.len();
            tracing::info!(ramdisk = %id, processes, faults = ?report.faults, "adopted");
        } else {
            // Whoever was building it has been told that the agent is gone, and builds another one. Or was killed: then
            // those that were told that all is done ask here, and remove theirs.
            tracing::warn!(ramdisk = %id, "was not complete when the agent ended; removing it");
            if let Err(error) = self.remove(&found) {
                tracing::error!(ramdisk = %id, error = error.message, "can't remove it");
            }
        }
        Ok(())
    }

    /// What shows that the RAM disk in a place was built, whatever is kept of it. A record is written before anything is
    /// mounted or started.
    fn use_of(&self, dir: &Path) -> Result<Option<String>, StartError> {
        let unknown = |source| StartError::Unknown { path: "/proc/self/mountinfo".into(), source };
        let name = dir.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        // Where it is shown, its own name is the mount's; users can give any name to what they mount by FUSE.
        let source = format!("ondeck:{name}@");
        let is_its = |mount: &mounts::Mount| {
            mount.at.starts_with(dir) || (mount.source.starts_with(&source) && !mount.is_a_users())
        };
        let mounted = mounts::mounted().map_err(unknown)?;
        if let Some(mount) = mounted.iter().find(|mount| is_its(mount)) {
            return Ok(Some(format!("{} is mounted", mount.at.display())));
        }
        let processes = place::marked(&self.state).map_err(no_processes)?;
        let is_its = |found: &&place::Marked| place::name_of(&found.id) == name;
        Ok(processes.iter().find(is_its).map(|found| format!("its process {} is running", found.pid)))
    }

    /// Fails if a RAM disk beside `recorded` has processes or memory here. Its directory was there before them, so it was
    /// removed by somebody else.
    fn all_are_recorded(&self, recorded: &[RamDiskId]) -> Result<(), StartError> {
        let recorded: BTreeSet<String> = recorded.iter().map(ToString::to_string).collect();
        let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let processes = place::marked(&self.state).map_err(no_processes)?;
        for process in processes.into_iter().filter(|process| !process.is_a_task()) {
            found
                .entry(process.id)
                .or_default()
                .push(format!("process {}, its {}", process.pid, process.role));
        }
        let unknown = |source| StartError::Unknown { path: "/proc/self/mountinfo".into(), source };
        for mount in mounts::mounted().map_err(unknown)? {
            // What a client shows is its servers'. Every other filesystem of this name was mounted by root.
            if let Some(id) = mount.source.strip_prefix("ondeck:").filter(|_| mount.kind == "tmpfs") {
                found.entry(id.to_owned()).or_default().push(format!("mounted at {}", mount.at.display()));
            }
        }
        match found.into_iter().find(|(id, _)| !recorded.contains(id)) {
            None => Ok(()),
            Some((id, uses)) => {
                let path = self.state.join("ramdisks").join(place::name_of(&id));
                Err(StartError::Unrecorded { id, use_of_it: uses.join(", "), path })
            }
        }
    }

    /// A directory without a record, of which nothing is mounted or running: the agent ended before it wrote one, or after
    /// it had removed it.
    fn remove_unknown(&self, dir: &Path) {
        tracing::warn!(place = %dir.display(), "removing a place without a record");
        let Some(name) = dir.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok())
        else {
            return tracing::error!(place = %dir.display(), "not the name of a RAM disk; left alone");
        };
        let removed = Place::open(&self.state, RamDiskId { name, epoch: Epoch(0) })
            .map_err(|error| EngineError::io("open", dir, error))
            .and_then(|place| ramdisk::forget(&place));
        if let Err(error) = removed {
            tracing::error!(place = %dir.display(), %error, "can't remove it");
        }
    }

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
    pub fn has(&self, id: &RamDiskId, caller: Caller) -> Result<Has, Refusal> {
        caller.must_be_root_somewhere()?;
        let found = self.known().ramdisks.get(&id.name).map(Arc::clone);
        Ok(match found.filter(|found| found.id() == id) {
            None => Has::Nothing,
            // Its removal may fail, and is tried again.
            Some(found) if found.is_ending() => Has::Nothing,
            Some(found) if found.record().complete => Has::All,
            Some(_) => Has::Unfinished,
        })
    }

    fn find(&self, id: &RamDiskId) -> Result<Arc<RamDisk>, Refusal> {
        let known = self.known();
        match known.ramdisks.get(&id.name) {
            Some(found) if found.id() == id => Ok(Arc::clone(found)),
            Some(found) if found.id().epoch > id.epoch => Err(fenced(id, found.id().epoch)),
            _ => match known.epochs.get(&id.name) {
                Some(newest) if *newest > id.epoch => Err(fenced(id, *newest)),
                _ => Err(not_here(id, &self.name)),
            },
        }
    }

    /// Does one step of building a RAM disk.
    ///
    /// # Errors
    /// [`Refusal`], in words for whoever builds it.
    pub fn step(
        &self,
        id: &RamDiskId,
        request: StepRequest,
        secret: Option<Secret>,
    ) -> Result<StepDone, Refusal> {
        let began = Instant::now();
        let until = began + Duration::from_millis(request.deadline_ms).min(LONGEST);
        if request.layout.id != *id {
            return Err(refusal(RefusalCode::Malformed, "the request's path and body name two RAM disks"));
        }
        let found = match request.step {
            Step::Allocate | Step::Mount => self.find_or_begin(&request, secret)?,
            _ => self.find(id)?,
        };
        let known = found.record().layout.number;
        if known != request.layout.number && known != 0 && request.layout.number != 0 {
            let message =
                format!("there is another RAM disk {id} on {}, which somebody else has built", self.name);
            return Err(refusal(RefusalCode::Conflict, message));
        }
        if matches!(request.step, Step::Mount | Step::Start(_)) {
            // Now the addresses and ports of all servers are known.
            let learned = |record: &mut Record| {
                let known = std::mem::replace(&mut record.layout, request.layout);
                if record.layout.number == 0 {
                    // A scheduler's journal may have kept it in the format of the former version.
                    (record.layout.number, record.layout.job) = (known.number, known.job);
                }
            };
            found.note(learned).map_err(|error| failed(&error))?;
        }
        let rules = self.rules();
        found
            .step(&request.step, &self.name, &rules.capacity, &rules.covering, until)
            .map_err(|error| failed(&error))?;
        if request.step == Step::Unmount && !found.record().server {
            self.leave(&found)?;
        }
        let allocated = matches!(request.step, Step::Allocate)
            .then(|| Allocated { address: self.storage_address, ports: found.record().ports });
        let stopped_ms = matches!(request.step, Step::Thaw)
            .then(|| found.stopped_for().map_or(0, |stopped| stopped.as_millis() as u64));
        Ok(StepDone { seconds: began.elapsed().as_secs_f64(), allocated, stopped_ms })
    }

    /// Forgets a RAM disk of which this node had the client alone, so that it may come back: a later step may mount it
    /// again, which is refused after destroying it.
    fn leave(&self, found: &Arc<RamDisk>) -> Result<(), Refusal> {
        self.remove(found)?;
        let mut known = self.known();
        let id = found.id();
        if known.epochs.get(&id.name) == Some(&id.epoch) {
            // Earlier ones stay refused.
            known.epochs.insert(id.name.clone(), Epoch(id.epoch.0.saturating_sub(1)));
            self.save_epochs(&mut known);
        }
        Ok(())
    }

    /// The files that this node has of some directories of a RAM disk: `slots` are their names there, with commas.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] if it is not here; [`RefusalCode::Conflict`] if its engine has no whole files.
    pub fn names(&self, id: &RamDiskId, slots: &str) -> Result<Names, Refusal> {
        let slots: Vec<&str> = slots.split(',').filter(|slot| !slot.is_empty()).collect();
        if let Some(slot) = slots.iter().find(|slot| !is_plain(slot) || slot.contains('.')) {
            let message = format!("`{slot}` is no name of a directory in a RAM disk");
            return Err(refusal(RefusalCode::Malformed, message));
        }
        self.find(id)?.names(&slots).map_err(|error| failed(&error))
    }

    /// Starts a task of a RAM disk; one of this name that is there already is as good.
    ///
    /// # Errors
    /// [`Refusal`]: the request is malformed, the RAM disk is not here, not complete or another user's, or it can't be
    /// mounted.
    pub fn start_task(&self, id: &RamDiskId, name: &str, request: TaskRequest) -> Result<Arc<Task>, Refusal> {
        if !is_plain(name) {
            let message = format!("`{name}` is no name of a task: use letters, digits and `._-`");
            return Err(refusal(RefusalCode::Malformed, message));
        }
        request.check()?;
        let found = self.find(id)?;
        let layout = found.record().layout;
        if !found.record().complete {
            return Err(refusal(RefusalCode::Conflict, format!("{id} is not complete yet on {}", self.name)));
        }
        if layout.owner.uid != request.uid {
            let message = format!(
                "{id} is of user {}, and the task would run as user {}",
                layout.owner.uid, request.uid
            );
            return Err(refusal(RefusalCode::Forbidden, message));
        }
        let until = Instant::now() + Duration::from_millis(request.deadline_ms).min(MOUNTING);
        let salvage = request.work.is_salvage();
        // A script's pages of a RAM disk that is this machine's memory count as its own.
        let own_pages = if layout.engine == EngineKind::Tmpfs { layout.capacity() } else { Bytes::ZERO };
        let rules = self.rules();
        let order = |data: PathBuf| Order {
            ramdisk: id.clone(),
            node: self.name.clone(),
            request,
            data,
            state: self.state.clone(),
            socket: self.socket.clone(),
            script_memory: rules.script_memory.saturating_add(own_pages),
            require_memory_group: rules.require_memory_group,
            out_of_date: ondeck_ramdisk::engine(layout.engine).out_of_date(),
        };
        if salvage {
            return found.start_salvage(name, order).map_err(|error| failed(&error));
        }
        found.start_task(name, &self.name, &rules.capacity, until, order).map_err(|error| failed(&error))
    }

    /// A task that was started.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] if it is not here.
    pub fn task(&self, id: &RamDiskId, name: &str) -> Result<Arc<Task>, Refusal> {
        self.find(id)?.tasks().find(name).ok_or_else(|| {
            refusal(RefusalCode::NotFound, format!("{id} has no task `{name}` on {}", self.name))
        })
    }

    /// Ends a task and forgets it. Returns once nothing of it is left.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] if it is not here; [`RefusalCode::Failed`] if it does not end.
    pub async fn stop_task(&self, id: &RamDiskId, name: &str) -> Result<TaskReport, Refusal> {
        let task = self.task(id, name)?;
        task.let_go();
        let report = task.wait(ENDING).await;
        if !task.has_ended() {
            let message = format!(
                "the task `{name}` of {id} on {} does not end: a process of it hangs in the kernel, probably in a \
                 filesystem that does not answer",
                self.name
            );
            return Err(refusal(RefusalCode::Failed, message));
        }
        if let Ok(found) = self.find(id) {
            found.tasks().forget(name, &task);
        }
        Ok(report)
    }

    /// Ends all tasks whose names begin so, and forgets them. Returns once nothing of them is left.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] if the RAM disk is not here; [`RefusalCode::Failed`] if one does not end.
    pub async fn stop_tasks(&self, id: &RamDiskId, beginning: &str) -> Result<(), Refusal> {
        for name in self.find(id)?.tasks().beginning_with(beginning) {
            match self.stop_task(id, &name).await {
                Err(error) if error.code != RefusalCode::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
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

    /// Begins a new RAM disk here, or a new part in one that is known, and promises what it needs.
    fn find_or_begin(&self, request: &StepRequest, secret: Option<Secret>) -> Result<Arc<RamDisk>, Refusal> {
        let layout = &request.layout;
        check_layout(layout)?;
        let id = &layout.id;
        let allocate = request.step == Step::Allocate;
        let me = layout.server_on(&self.name);
        if allocate && me.is_none() {
            let message = format!("{} is not among the servers of {id}", self.name);
            return Err(refusal(RefusalCode::Malformed, message));
        }
        // From here on nobody else is promised anything.
        let mut known = self.known();
        if let Some(found) = known.ramdisks.get(&id.name) {
            return match found.id().epoch {
                epoch if epoch == id.epoch => Ok(Arc::clone(found)),
                epoch if epoch > id.epoch => Err(fenced(id, epoch)),
                epoch if found.record().guarded => Err(refusal(
                    RefusalCode::Conflict,
                    format!(
                        "there is a RAM disk {} on {} already (epoch {epoch}), which may hold results; {}",
                        id.name,
                        self.name,
                        way_out(&found.record().layout)
                    ),
                )),
                epoch => Err(refusal(
                    RefusalCode::Conflict,
                    format!(
                        "there is a RAM disk {} on {} already (epoch {epoch}); destroy it first, or take another name",
                        id.name, self.name
                    ),
                )),
            };
        }
        if let Some(newest) = known.epochs.get(&id.name)
            && *newest >= id.epoch
        {
            return Err(fenced(id, *newest));
        }
        let secret = secret.ok_or_else(|| {
            refusal(RefusalCode::Malformed, "the request brings no secret for the RAM disk")
        })?;
        let (mut promised, mut ports) = (BTreeMap::new(), Vec::new());
        if allocate && let Some(me) = me {
            promised = self.promise(&known, layout, me).map_err(|error| failed(&error))?;
            ports = self.reserve_ports(&mut known, engine(layout.engine).ports(layout, me))?;
        }
        let place = Place::open(&self.state, id.clone()).map_err(|error| {
            failed(&EngineError::io("make", &self.state.join("ramdisks").join(id.name.as_str()), error))
        })?;
        let record = Record {
            version: record::VERSION,
            layout: layout.clone(),
            server: allocate,
            promised,
            ports,
            shown: Vec::new(),
            covered: Vec::new(),
            whole: false,
            complete: false,
            settled: false,
            guarded: false,
            first_view: None,
            lease_until_ms: since_boot_ms() + request.lease_ms.min(LONGEST.as_millis() as u64),
        };
        ramdisk::found(&place, &record, &secret).map_err(|error| {
            // Nothing is mounted in it yet.
            let _ = std::fs::remove_dir_all(place.dir());
            failed(&error)
        })?;
        known.epochs.insert(id.name.clone(), id.epoch);
        self.save_epochs(&mut known);
        let begun = Arc::new(RamDisk::new(place, record, secret));
        begun.hold_ports(self.storage_address);
        known.ramdisks.insert(id.name.clone(), Arc::clone(&begun));
        Ok(begun)
    }

    fn promise(
        &self,
        known: &Known,
        layout: &Layout,
        me: usize,
    ) -> Result<BTreeMap<String, Bytes>, EngineError> {
        let share = layout.servers[me].share;
        let rules = self.rules();
        let needs = rules.capacity.needs(layout, me, share)?;
        let promises: Vec<_> = known.ramdisks.values().map(|ramdisk| ramdisk.promise()).collect();
        let devices = rules
            .capacity
            .report(&promises)
            .map_err(|error| EngineError::io("read", Path::new("/proc/meminfo"), error))?;
        for (device, needed) in &needs {
            let free = devices.get(device).map(|report| report.free).unwrap_or_default();
            if *needed > free {
                let device = if device == RAM { "RAM".to_owned() } else { format!("the device `{device}`") };
                return Err(EngineError::TooLarge { device, share, needed: *needed, free });
            }
        }
        Ok(needs)
    }

    /// Ports in a row that nobody listens on. They go round, so that a port that was given back is not given away at
    /// once.
    fn reserve_ports(&self, known: &mut Known, count: usize) -> Result<Vec<u16>, Refusal> {
        let (first, last) = (*self.ports.start(), *self.ports.end());
        let taken: BTreeSet<u16> =
            known.ramdisks.values().flat_map(|ramdisk| ramdisk.record().ports).collect();
        let is_free =
            |port: u16| !taken.contains(&port) && TcpListener::bind((self.storage_address, port)).is_ok();
        let mut row: Vec<u16> = Vec::new();
        // Once round, and so far beyond that a row over the end of the last look is found.
        for _ in 0..self.ports.len() + count {
            if row.len() == count {
                break;
            }
            let port = known.next_port;
            known.next_port = if port == last { first } else { port + 1 };
            if port == first || !is_free(port) {
                row.clear();
            }
            if is_free(port) {
                row.push(port);
            }
        }
        if row.len() < count {
            return Err(refusal(
                // Any user may listen there: that is no failure of the node.
                RefusalCode::Conflict,
                format!(
                    "no {count} free TCP ports in a row on {} between {first} and {last}; see server_ports in the \
                     configuration",
                    self.storage_address
                ),
            ));
        }
        Ok(row)
    }

    fn save_epochs(&self, known: &mut Known) {
        let Known { ramdisks, epochs, noted, .. } = known;
        let now = Instant::now();
        epochs.retain(|name, _| {
            let since = noted.entry(name.clone()).or_insert(now);
            if ramdisks.contains_key(name) {
                *since = now;
            }
            now.duration_since(*since) < REMEMBERED
        });
        noted.retain(|name, _| epochs.contains_key(name));
        let partial = self.state.join(format!("{EPOCHS}.partial"));
        let write = || -> std::io::Result<()> {
            let mut file = std::fs::File::create(&partial)?;
            file.write_all(&serde_json::to_vec(&*epochs)?)?;
            // A torn file would keep the next agent from starting.
            file.sync_all()?;
            std::fs::rename(&partial, self.state.join(EPOCHS))
        };
        if let Err(error) = write() {
            tracing::error!(%error, "can't keep the epochs; after a restart late requests are not refused");
        }
    }

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

    /// A scheduler asks to be obeyed.
    ///
    /// # Errors
    /// As [`Commander::claim`].
    pub fn claim(&self, claim: &Claim) -> Result<Obeyed, Refusal> {
        self.commander.claim(&self.name, claim)
    }

    /// Refuses an order about a RAM disk that is not of the scheduler in charge, and what only that may order. `wanted` is
    /// the layout that the order brings.
    ///
    /// # Errors
    /// As [`Commander::permit`].
    pub fn permit(
        &self,
        id: &RamDiskId,
        authority: Option<&Authority>,
        order: OrderKind,
        wanted: Option<&Layout>,
    ) -> Result<(), Refusal> {
        let known = self.known().ramdisks.get(&id.name).map(Arc::clone);
        let known = known.filter(|known| known.id() == id).map(|known| known.record().layout);
        let layouts: Vec<&Layout> = known.iter().chain(wanted).collect();
        self.commander.permit(&self.name, authority, order, &layouts)
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
                shown.iter().any(|shown| shown.path == mount.at) || found.covers_path(&mount.at)
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

/// What can be done about a RAM disk that may hold results.
fn way_out(layout: &Layout) -> String {
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

fn no_processes(source: std::io::Error) -> StartError {
    StartError::Unknown { path: "/proc".into(), source }
}

/// A RAM disk is over here: one of a later epoch has begun, or it was destroyed itself.
fn fenced(id: &RamDiskId, newest: Epoch) -> Refusal {
    let why = if newest > id.epoch {
        format!("epoch {newest} of {} has begun, or was destroyed, since", id.name)
    } else {
        "it was destroyed here, and is not built again under this epoch".to_owned()
    };
    refusal(RefusalCode::Fenced, format!("{id} is over: {why}"))
}

fn not_here(id: &RamDiskId, node: &NodeName) -> Refusal {
    refusal(RefusalCode::NotFound, format!("there is no RAM disk {id} on {node}"))
}

fn check_layout(layout: &Layout) -> Result<(), Refusal> {
    let malformed = |message: String| Err(refusal(RefusalCode::Malformed, message));
    if layout.servers.is_empty() {
        return malformed(format!("{} has no servers", layout.id));
    }
    let names: BTreeSet<&NodeName> = layout.servers.iter().map(|server| &server.node).collect();
    if names.len() != layout.servers.len() {
        return malformed(format!("{} names a server twice", layout.id));
    }
    if layout.servers.iter().any(|server| server.share == Bytes::ZERO) {
        return malformed(format!("{} has a server without a byte", layout.id));
    }
    engine(layout.engine).accepts(layout).map_err(|error| failed(&error))
}

/// Where a program is found, as `exec` would.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into());
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
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

/// The kernel takes everybody else first: without the agent nobody would clear up.
fn protect_from_oom_killer() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::warn!(%error, "can't protect the agent from the OOM killer");
    }
}
