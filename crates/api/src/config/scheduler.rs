//! The parts `[scheduler]` and `[slurm]` of the configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use ondeck_core::schedule::{Limits, LockIn, Sharing, Site};
use ondeck_core::{EngineKind, NodeName, Rate, duration};
use serde::{Deserialize, Deserializer, Serialize};

use super::{Administrator, Listen};

/// The TCP port of the scheduler.
const DEFAULT_PORT: u16 = 7273;

/// The part `[scheduler]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// The host where `ondeck serve` runs: hooks and `ondeck status` ask there. Without it they ask this machine.
    pub host: Option<NodeName>,
    /// Its TCP port.
    pub port: u16,
    /// The address it listens on: an address, or `auto` for what its host name means.
    pub listen: Option<Listen>,
    /// Its Unix socket.
    pub socket: PathBuf,
    /// Where it keeps its journal: on a disk that outlives a reboot.
    pub state: PathBuf,
    /// Who sees all jobs and gives orders over TCP, as `user@host`. Root on its machine always may.
    pub administrators: Vec<Administrator>,
    /// The pools of RSA nodes. Without one all `nodes` are the pool `default`.
    pub pool: BTreeMap<String, PoolConfig>,
    /// The pool of jobs that name none; the only one if there is one.
    pub default_pool: Option<String>,
    /// So many compute nodes get one RSA node.
    pub proportion: u32,
    /// Whether a job that is too small for a whole RSA node gets a part of one.
    pub fractions: bool,
    /// When the RAM disk is switched from input to output, unless the job says: the thesis's script has 300 s.
    #[serde(deserialize_with = "time")]
    pub delay: Duration,
    /// The engine of jobs that name none.
    pub engine: EngineKind,
    /// How the RSA is shared between jobs that run and jobs that stage: `half` or `any`.
    pub sharing: Sharing,
    /// Who has waited for RSA nodes for so long comes before all who have not, and is not overtaken.
    #[serde(deserialize_with = "time")]
    pub patience: Duration,
    /// How a staged job is kept in front of the queue: `off`, `priority` or `qos`.
    pub lock_in: LockIn,
    /// The quality of service of `lock_in = "qos"`.
    pub lock_in_qos: Option<String>,
    /// How long the queue must say otherwise before a job is taken for next, or for demoted.
    #[serde(deserialize_with = "time")]
    pub debounce: Duration,
    /// A job that waits behind others but is expected to start within this time is next, too.
    #[serde(deserialize_with = "time")]
    pub horizon: Duration,
    /// How often building, filling and mounting is tried for a job.
    pub attempts: u32,
    /// How often staging out is tried before it waits for somebody to look.
    pub stage_out_attempts: u32,
    /// How long is waited before something is tried again; doubled each time for staging out.
    #[serde(deserialize_with = "time")]
    pub backoff: Duration,
    /// A node that failed so many times in a row is drained.
    pub node_failures: u32,
    /// A node that has not answered for this long is taken for lost.
    #[serde(deserialize_with = "time")]
    pub node_timeout: Duration,
    /// The most RSA nodes that one user's jobs may have.
    pub user_nodes: Option<u32>,
    /// The most RSA nodes that one account's jobs may have.
    pub account_nodes: Option<u32>,
    /// What all staging together may take from the disk filesystem; needs `staging`.
    #[serde(deserialize_with = "optional_rate")]
    pub bandwidth: Option<Rate>,
    /// How many jobs may stage at the same time; each gets its part of `bandwidth`. Those with scripts of their own have as many places
    /// beside these, and one for each user.
    pub staging: Option<u32>,
    /// How many jobs Slurm may keep waiting for their input by itself, with burst buffers; more are held.
    pub kept_waiting: u32,
    /// What `scancel --hurry` means for results that are not home, of jobs with burst buffers.
    pub hurry: Hurry,
    /// The longest that each kind of work may take.
    pub limits: LimitsConfig,
    /// A command that is given a job's number and node list and prints the nodes where its RAM disk is to be shown, one a
    /// line. Without it these are the job's own nodes.
    pub io_nodes: Vec<String>,
    /// Whether a RAM disk is shown on nodes where other jobs run, too. It is shown to the whole node, so another job of
    /// the same user would work in it, and lose it when the first one ends. Without this, such a job works on disk.
    pub shared_nodes: bool,
    /// The file that says what the site's filesystems and nodes can do, for jobs that ask for layouts (#RSA_LAYOUT).
    pub site_file: PathBuf,
    /// On how many of a job's nodes it is watched who writes its files, of jobs that ask for layouts. 0: on none.
    pub watch_nodes: u32,
    /// How long the log of a job is kept after it has ended.
    #[serde(deserialize_with = "time")]
    pub keep: Duration,
    /// Watch the queue and decide, but lend nothing: RAM disks are pretended, each step takes this long.
    #[serde(deserialize_with = "optional_time")]
    pub simulate: Option<Duration>,
}

/// A pool: RSA nodes of one kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// The RSA nodes of the pool; each is in one pool only.
    pub nodes: Vec<NodeName>,
    /// What of them is lent: `ram`, or a directory's device.
    #[serde(default = "ram")]
    pub device: String,
}

fn ram() -> String {
    ondeck_ramdisk::device::RAM.to_owned()
}

/// The part `[scheduler.limits]`: the longest that each kind of work may take.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// Building a RAM disk.
    #[serde(deserialize_with = "time")]
    pub construct: Duration,
    /// Copying the input into the RAM disk.
    #[serde(deserialize_with = "time")]
    pub stage_in: Duration,
    /// Mounting it on a job's nodes.
    #[serde(deserialize_with = "time")]
    pub mount: Duration,
    /// Unmounting it from a job's nodes.
    #[serde(deserialize_with = "time")]
    pub unmount: Duration,
    /// Bringing results home, once.
    #[serde(deserialize_with = "time")]
    pub stage_out: Duration,
    /// Removing it from its RSA nodes.
    #[serde(deserialize_with = "time")]
    pub destroy: Duration,
    /// From the end of a job until its last process and its last Epilog: longer than Slurm's KillWait.
    #[serde(deserialize_with = "time")]
    pub ending: Duration,
    /// Being held until there are RSA nodes: then the job works on disk.
    #[serde(deserialize_with = "time")]
    pub hold: Duration,
    /// Waiting, after slurmctld was started anew, until it asks for a burst buffer again that it has torn down.
    #[serde(deserialize_with = "time")]
    pub again: Duration,
    /// Waiting for its start behind others, with all its input in RAM: then its RSA nodes are for others.
    #[serde(deserialize_with = "time")]
    pub ready: Duration,
    /// The whole of a Prolog: then the job starts on disk.
    #[serde(deserialize_with = "time")]
    pub prolog: Duration,
    /// The whole of an Epilog.
    #[serde(deserialize_with = "time")]
    pub epilog: Duration,
}

/// The part `[slurm]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SlurmConfig {
    /// The directory of Slurm's commands; they are looked for in PATH without it.
    pub bin_dir: Option<PathBuf>,
    /// Its slurm.conf; what Slurm itself uses without it.
    pub conf: Option<PathBuf>,
    /// How often the queue is looked at.
    #[serde(deserialize_with = "time")]
    pub interval: Duration,
    /// How long a Slurm command may take.
    #[serde(deserialize_with = "time")]
    pub timeout: Duration,
}

/// What becomes of results for whose job somebody says `scancel --hurry`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hurry {
    /// They are brought home all the same, or wait for a decision; Slurm does not wait for it any more.
    #[default]
    Keep,
    /// They are given up, as by `ondeck job abandon`.
    Abandon,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        let site = Site::default();
        SchedulerConfig {
            host: None,
            port: DEFAULT_PORT,
            listen: None,
            socket: "/run/ondeck/scheduler.sock".into(),
            state: "/var/lib/ondeck".into(),
            administrators: Vec::new(),
            pool: BTreeMap::new(),
            default_pool: None,
            proportion: site.proportion,
            fractions: site.fractions,
            delay: site.delay,
            engine: site.engine,
            sharing: site.sharing,
            patience: site.patience,
            lock_in: site.lock_in,
            lock_in_qos: None,
            debounce: site.debounce,
            horizon: site.horizon,
            attempts: site.attempts,
            stage_out_attempts: site.stage_outs,
            backoff: site.backoff,
            node_failures: site.node_failures,
            node_timeout: Duration::from_secs(15),
            user_nodes: None,
            account_nodes: None,
            bandwidth: None,
            staging: None,
            kept_waiting: site.kept_waiting,
            hurry: Hurry::Keep,
            limits: LimitsConfig::default(),
            io_nodes: Vec::new(),
            shared_nodes: false,
            site_file: "/etc/ondeck/site.toml".into(),
            watch_nodes: 0,
            keep: Duration::from_secs(30 * 86_400),
            simulate: None,
        }
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        let limits = Limits::default();
        LimitsConfig {
            construct: limits.construct,
            stage_in: limits.stage_in,
            mount: limits.mount,
            unmount: limits.unmount,
            stage_out: limits.stage_out,
            destroy: limits.destroy,
            ending: limits.ending,
            hold: limits.hold,
            again: limits.again,
            ready: limits.ready,
            prolog: Duration::from_secs(20),
            epilog: Duration::from_secs(20),
        }
    }
}

impl Default for SlurmConfig {
    fn default() -> Self {
        SlurmConfig {
            bin_dir: None,
            conf: None,
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(10),
        }
    }
}

fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    // A bare number is seconds.
    match text.strip_suffix("ms").and_then(|number| number.trim().parse().ok()) {
        Some(milliseconds) => Ok(Duration::from_millis(milliseconds)),
        None => duration::parse(&text, 1).map_err(serde::de::Error::custom),
    }
}

fn optional_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    time(deserializer).map(Some)
}

fn optional_rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Rate>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

impl SchedulerConfig {
    /// The pools, with the one of all `nodes` if none is named.
    pub fn pools(&self, nodes: &[NodeName]) -> BTreeMap<String, PoolConfig> {
        if !self.pool.is_empty() {
            return self.pool.clone();
        }
        BTreeMap::from([("default".to_owned(), PoolConfig { nodes: nodes.to_vec(), device: ram() })])
    }

    /// What the site decides, for the schedule.
    ///
    /// # Errors
    /// What can't be, in words.
    pub fn site(&self, nodes: &[NodeName]) -> Result<Site, String> {
        let pools = self.pools(nodes);
        let mut known: BTreeMap<&NodeName, &str> = BTreeMap::new();
        for (name, pool) in &pools {
            if pool.nodes.is_empty() {
                return Err(format!("the pool `{name}` has no nodes"));
            }
            for node in &pool.nodes {
                if let Some(other) = known.insert(node, name) {
                    return Err(format!("the node {node} is in two pools, `{other}` and `{name}`"));
                }
            }
        }
        let pool = match (&self.default_pool, pools.len()) {
            (Some(pool), _) if pools.contains_key(pool) => pool.clone(),
            (Some(pool), _) => return Err(format!("default_pool = \"{pool}\" is no pool")),
            (None, 1) => pools.keys().next().cloned().unwrap_or_default(),
            (None, _) => return Err("there are several pools; say which is the default_pool".into()),
        };
        if self.proportion == 0 {
            return Err("proportion must be at least 1: so many compute nodes get one RSA node".into());
        }
        if self.engine == EngineKind::Tmpfs {
            return Err("engine = \"tmpfs\" reaches one machine only; use gluster or ceph".into());
        }
        if self.lock_in == LockIn::Qos && self.lock_in_qos.is_none() {
            return Err("lock_in = \"qos\" needs lock_in_qos".into());
        }
        if self.bandwidth.is_some() && self.staging.is_none() {
            return Err("bandwidth is shared by `staging` jobs at a time; say how many".into());
        }
        Ok(Site {
            proportion: self.proportion,
            delay: self.delay,
            fractions: self.fractions,
            engine: if self.simulate.is_some() { EngineKind::Simulated } else { self.engine },
            pool,
            sharing: self.sharing,
            patience: self.patience,
            lock_in: self.lock_in,
            debounce: self.debounce,
            horizon: self.horizon,
            attempts: self.attempts.max(1),
            stage_outs: self.stage_out_attempts.max(1),
            backoff: self.backoff,
            node_failures: self.node_failures.max(1),
            prolog: self.limits.prolog + self.limits.prolog,
            limits: Limits {
                construct: self.limits.construct,
                stage_in: self.limits.stage_in,
                mount: self.limits.mount,
                unmount: self.limits.unmount,
                stage_out: self.limits.stage_out,
                destroy: self.limits.destroy,
                ending: self.limits.ending,
                hold: self.limits.hold,
                again: self.limits.again,
                ready: self.limits.ready,
                ..Limits::default()
            },
            user_nodes: self.user_nodes,
            account_nodes: self.account_nodes,
            bandwidth: self.bandwidth,
            staging: self.staging,
            kept_waiting: self.kept_waiting,
        })
    }
}
