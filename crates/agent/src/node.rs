//! What an agent knows of its node and of the RAM disks there.
//!
//! # Layout
//!
//! - `recovery`: start-up after a crash; `epochs`: what was destroyed and must not come back
//! - `steps`: building; `tasks`: staging and scripts; `layouts`: those of jobs' directories on disk; `ending`: destroying, and what keeps from it
//! - `reports`: what the node tells

mod ending;
mod epochs;
mod layouts;
mod recovery;
mod reports;
mod steps;
mod tasks;

pub use recovery::StartError;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use ondeck_api::Config;
use ondeck_api::host::{HostError, host_name, own_address, private_directory};
use ondeck_api::wire::{Authority, Claim, NodeSettings, Obeyed, Refusal, RefusalCode};
use ondeck_core::{Bytes, Epoch, Incarnation, Layout, NodeName, RamDiskId, RamDiskName};
use ondeck_ramdisk::EngineError;

use crate::authority::{Commander, OrderKind};
use crate::capacity::Capacity;
use crate::observer::Observer;
use crate::ramdisk::{OvermountPolicy, RamDisk};

/// The longest that a request may ask for.
const LONGEST: Duration = Duration::from_secs(3600);

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
    /// Who works on the layouts of a job's directories.
    layouts: Mutex<BTreeMap<Incarnation, Arc<Mutex<()>>>>,
    observer: Arc<Observer>,
    unended: layouts::Unended,
    /// Held while something is promised, so that two requests can't be promised the same.
    known: Mutex<RamDiskTable>,
}

/// What the configuration lends and allows; it may change while the agent runs.
struct Rules {
    script_memory: Bytes,
    require_memory_group: bool,
    capacity: Capacity,
    overmounts: OvermountPolicy,
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
            overmounts: OvermountPolicy::new(config),
        })
    }
}

#[derive(Default)]
struct RamDiskTable {
    ramdisks: BTreeMap<RamDiskName, Arc<RamDisk>>,
    epochs: BTreeMap<RamDiskName, Epoch>,
    /// When each epoch was noted here. An epoch is the time of its making by another machine's clock, which says nothing of
    /// its age.
    noted: BTreeMap<RamDiskName, Instant>,
    next_port: u16,
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

impl Node {
    /// Starts from what the configuration says and from what an earlier agent left: adopts what was complete, removes
    /// what was not, and whatever belongs to nothing.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: &Config) -> Result<Node, StartError> {
        protect_from_oom_killer();
        let node = Node::begin(config)?;
        node.recover()?;
        Ok(node)
    }

    /// What the configuration says, and whom the agent obeys; of what an earlier agent left nothing is touched.
    pub(crate) fn begin(config: &Config) -> Result<Node, StartError> {
        let name = host_name().map_err(HostError::from)?;
        let agent = &config.agent;
        let storage_address = match agent.storage_address {
            Some(address) => address,
            None => own_address(&name, agent.listen)?,
        };
        let unusable = |source| StartError::State { path: agent.state.clone(), source };
        private_directory(&agent.state).map_err(unusable)?;
        // Marks and mounts carry the path, so there must be one way to write it.
        let state = agent.state.canonicalize().map_err(unusable)?;
        // Before anything is adopted or removed: an agent that does not know whom it obeys does nothing.
        let commander = Commander::load(&state)
            .map_err(|source| StartError::Authority { path: Commander::file(&state), source })?;
        Ok(Node {
            name,
            socket: agent.socket.clone(),
            storage_address,
            ports: agent.server_ports.first..=agent.server_ports.last,
            commander,
            layouts: Mutex::default(),
            observer: Arc::default(),
            unended: layouts::Unended::default(),
            rules: RwLock::new(Arc::new(Rules::new(config).map_err(StartError::Device)?)),
            known: Mutex::new(RamDiskTable {
                next_port: agent.server_ports.first,
                ..RamDiskTable::default()
            }),
            state,
        })
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

    fn known(&self) -> MutexGuard<'_, RamDiskTable> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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

    /// Refuses an order about directories on disk that is not of the scheduler in charge.
    ///
    /// # Errors
    /// As [`Commander::permit`].
    pub fn permit_on_disk(&self, authority: Option<&Authority>) -> Result<(), Refusal> {
        self.commander.permit(&self.name, authority, OrderKind::Other, &[])
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

/// Where a program is found, as `exec` would.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into());
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// The kernel takes everybody else first: without the agent nobody would clear up.
fn protect_from_oom_killer() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::warn!(%error, "can't protect the agent from the OOM killer");
    }
}
