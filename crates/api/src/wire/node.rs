//! What a node tells of itself.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use ondeck_core::{Bytes, EngineKind, NodeName};
use serde::{Deserialize, Serialize};

use super::authority::Obeyed;
use crate::Config;

/// What a node has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeReport {
    /// The host name by which it calls itself.
    pub node: NodeName,
    /// The version of its agent.
    pub version: String,
    /// Where its servers listen.
    pub storage_address: IpAddr,
    /// What it lends.
    pub devices: BTreeMap<String, DeviceReport>,
    /// The machine's memory.
    pub memory: MemoryReport,
    /// Programs that are missing for each engine that can't work here.
    pub missing: BTreeMap<EngineKind, Vec<String>>,
    /// How many RAM disks have something here.
    pub ramdisks: usize,
    /// The greatest epoch that this node has seen.
    pub newest_epoch: u64,
    /// The journal whose scheduler this node's agent obeys; nothing if none has claimed it.
    #[serde(default)]
    pub authority: Option<Obeyed>,
    /// What its configuration says that must be the same everywhere; nothing from an agent of a former version.
    #[serde(default)]
    pub settings: Option<NodeSettings>,
    /// What the hooks of Slurm have noted of themselves here since the node started; nothing from an agent of a former
    /// version.
    #[serde(default)]
    pub hooks: Option<BTreeMap<HookKind, HookSeen>>,
}

/// Which hook of Slurm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookKind {
    /// `ondeck prolog`.
    Prolog,
    /// `ondeck epilog`.
    Epilog,
}

impl HookKind {
    /// All of them.
    pub const ALL: [HookKind; 2] = [HookKind::Prolog, HookKind::Epilog];

    /// As Slurm's setting is called.
    pub fn setting(self) -> &'static str {
        match self {
            HookKind::Prolog => "Prolog",
            HookKind::Epilog => "Epilog",
        }
    }
}

/// What an agent knows of a hook of its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookSeen {
    /// What it was when Slurm ran it for the last time.
    Noted(Box<HookNote>),
    /// Its note can't be read, and why.
    Unreadable(String),
}

/// What a hook has noted of itself when Slurm ran it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookNote {
    /// The version of `ondeck`.
    pub version: String,
    /// The file that ran.
    pub program: PathBuf,
    /// The configuration that it reads.
    pub config: PathBuf,
    /// The script that called it, where that is known: a script that replaces itself by `ondeck` is not.
    #[serde(default)]
    pub script: Option<PathBuf>,
    /// Where it looks for the scheduler, or why it can't read its configuration.
    pub scheduler: Result<HookScheduler, String>,
    /// What Slurm's configuration there says, or why it can't be read; nothing if Slurm names no file, and from a former version.
    #[serde(default)]
    pub slurm: Option<Result<HookSlurm, String>>,
}

/// What slurm.conf on a node says of jobs' processes and of its hooks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookSlurm {
    /// The file.
    pub conf: PathBuf,
    /// `ProctrackType`; nothing if it is not set.
    pub proctrack_type: Option<String>,
    /// `JobContainerType`; nothing if it is not set.
    pub job_container_type: Option<String>,
    /// `Prolog`, all of them in order; nothing from a former version, which did not look.
    #[serde(default)]
    pub prolog: Option<Vec<String>>,
    /// `Epilog`; the same.
    #[serde(default)]
    pub epilog: Option<Vec<String>>,
}

/// Where a hook looks for the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookScheduler {
    /// Its host; the node itself if the configuration names none.
    pub host: Option<NodeName>,
    /// Its TCP port.
    pub port: u16,
}

/// What of a node's configuration must be the same on all nodes, as its agent has read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSettings {
    /// The directories below which a RAM disk may be shown.
    pub mount_prefixes: Vec<PathBuf>,
    /// Where its hooks look for the scheduler: on the node itself without a host.
    pub scheduler: Option<NodeName>,
    /// The scheduler's TCP port.
    pub scheduler_port: u16,
}

impl NodeSettings {
    /// As a configuration says.
    pub fn new(config: &Config) -> NodeSettings {
        NodeSettings {
            mount_prefixes: config.agent.mount_prefixes.clone(),
            scheduler: config.scheduler.host.clone(),
            scheduler_port: config.scheduler.port,
        }
    }
}

/// A device of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceReport {
    /// `ram` or `dir`.
    pub kind: String,
    /// What may be promised in all.
    pub capacity: Bytes,
    /// What has been promised, the engines' own needs included.
    pub promised: Bytes,
    /// What can be promised now.
    pub free: Bytes,
}

/// The memory of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryReport {
    /// The machine's RAM.
    pub total: Bytes,
    /// What the kernel could give, memory cgroups counted.
    pub available: Bytes,
    /// The share of the last ten seconds in which some process waited for memory, in percent (Linux PSI); nothing where
    /// the kernel does not count it.
    pub pressure: Option<f64>,
}
