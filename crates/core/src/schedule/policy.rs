//! Which RSA nodes a job gets, and when.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::job::Job;
use super::nodes::{Node, Nodes};
use super::{JobState, RsaState};
use crate::allocation::SHARE_UNIT;
use crate::request::keyword_enum;
use crate::{Bytes, EngineKind, Incarnation, NodeName, Rate};

keyword_enum! {
    /// How the RSA is shared between jobs that run and jobs that stage.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    Sharing {
        /// About half of a pool serves running jobs while the other half stages in or out, as the thesis has it: a job
        /// that has not started is given nodes only while those that stage have less than half.
        Half = "half",
        /// Whoever comes first.
        Any = "any",
    }
}

keyword_enum! {
    /// How a staged job is kept in front of the queue.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    LockIn {
        /// Not at all.
        Off = "off",
        /// By its priority.
        Priority = "priority",
        /// By a quality of service (needs the accounting database).
        Qos = "qos",
    }
}

/// What the site decides.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// So many compute nodes get one RSA node.
    pub proportion: u32,
    /// When the RAM disk is switched from input to output, unless the job says.
    pub delay: Duration,
    /// Whether a job that is too small for a whole RSA node gets a part of one.
    pub fractions: bool,
    /// The engine of jobs that name none.
    pub engine: EngineKind,
    /// The pool of jobs that name none.
    pub pool: String,
    /// How the RSA is shared.
    pub sharing: Sharing,
    /// How a staged job is kept in front.
    pub lock_in: LockIn,
    /// How long the queue must say otherwise before a job is taken for next, or for demoted.
    pub debounce: Duration,
    /// A job that waits behind others but is expected to start within this time is next, too.
    pub horizon: Duration,
    /// How often building, filling and mounting is tried for a job.
    pub attempts: u32,
    /// How often staging out is tried before it waits for somebody to look.
    pub stage_outs: u32,
    /// How long is waited before something is tried again; doubled each time for staging out.
    pub backoff: Duration,
    /// A node that failed so many times in a row is drained.
    pub node_failures: u32,
    /// How long a Prolog that was not heard of is waited for.
    pub prolog: Duration,
    /// The longest that each kind of work may take.
    pub limits: Limits,
    /// The most RSA nodes that one user's jobs may have.
    pub user_nodes: Option<u32>,
    /// The most RSA nodes that one account's jobs may have.
    pub account_nodes: Option<u32>,
    /// What all staging together may take from the disk filesystem.
    pub bandwidth: Option<Rate>,
    /// How many jobs may stage at the same time.
    pub staging: Option<u32>,
}

/// The longest that each kind of work may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Building a RAM disk.
    pub construct: Duration,
    /// Filling it.
    pub stage_in: Duration,
    /// Stopping that.
    pub stop: Duration,
    /// Mounting it.
    pub mount: Duration,
    /// Unmounting it.
    pub unmount: Duration,
    /// Bringing results home.
    pub stage_out: Duration,
    /// Removing it.
    pub destroy: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            construct: Duration::from_secs(60),
            stage_in: Duration::from_secs(4 * 3600),
            stop: Duration::from_secs(30),
            mount: Duration::from_secs(10),
            unmount: Duration::from_secs(20),
            stage_out: Duration::from_secs(24 * 3600),
            destroy: Duration::from_secs(60),
        }
    }
}

impl Default for Site {
    fn default() -> Site {
        Site {
            proportion: 1,
            delay: Duration::from_secs(300),
            fractions: false,
            engine: EngineKind::Gluster,
            pool: "default".into(),
            sharing: Sharing::Half,
            lock_in: LockIn::Off,
            debounce: Duration::from_secs(1),
            horizon: Duration::ZERO,
            attempts: 3,
            stage_outs: 5,
            backoff: Duration::from_secs(5),
            node_failures: 3,
            prolog: Duration::from_secs(60),
            limits: Limits::default(),
            user_nodes: None,
            account_nodes: None,
            bandwidth: None,
            staging: None,
        }
    }
}

/// What placement comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// These nodes, each with this promise.
    Nodes(Vec<NodeName>, Bytes),
    /// Not now: why.
    Later(String),
    /// Never: why, and what would.
    Never(String),
}

/// What of a pool is in use.
#[derive(Clone, Debug, Default)]
struct PoolUse {
    nodes: u32,
    /// Nodes of which nobody has anything.
    free: u32,
    /// Nodes of jobs that stage or wait for their start.
    staging: u32,
    /// What the largest node lends in all.
    largest: Bytes,
}

/// What of the RSA is in use, so that most jobs that have to wait are told so without a look at every node.
#[derive(Clone, Debug, Default)]
pub struct Use {
    pools: BTreeMap<String, PoolUse>,
    users: BTreeMap<u32, u32>,
    accounts: BTreeMap<String, u32>,
    /// Jobs whose results are not on disk yet.
    results: Vec<Incarnation>,
}

impl Use {
    /// Counts.
    pub fn of<'a>(nodes: &Nodes, jobs: impl Iterator<Item = &'a Job>) -> Use {
        let mut found = Use::default();
        for node in nodes.values() {
            let pool = found.pools.entry(node.pool.clone()).or_default();
            pool.nodes += 1;
            pool.free += u32::from(node.is_free());
            pool.largest = pool.largest.max(node.capacity);
        }
        for job in jobs {
            if job.results {
                found.results.push(job.id);
            }
            let Some(allocation) = &job.allocation else { continue };
            let has = allocation.nodes.len() as u32;
            *found.users.entry(job.owner.uid).or_default() += has;
            *found.accounts.entry(job.account.clone()).or_default() += has;
            if is_staging(job) {
                let pool = allocation.nodes.first().and_then(|name| nodes.get(name)).map(|node| &node.pool);
                if let Some(pool) = pool.and_then(|name| found.pools.get_mut(name)) {
                    pool.staging += has;
                }
            }
        }
        found
    }

    /// Jobs whose results are not on disk yet.
    pub fn with_results(&self) -> impl Iterator<Item = &Incarnation> {
        self.results.iter()
    }
}

/// How many nodes a job gets and how many bytes of each (`None`: whole nodes).
fn wanted(site: &Site, pool: &PoolUse, job: &Job) -> Result<(u32, Option<Bytes>), String> {
    if let Some(count) = job.request.nodes {
        return Ok((count.max(1), None));
    }
    let whole = pool.largest;
    if let Some(capacity) = job.request.capacity {
        if whole == Bytes::ZERO {
            // Not known before an agent has answered.
            return Ok((1, None));
        }
        // An engine needs some of what is promised for itself.
        let raw = capacity.0.saturating_add(capacity.0 / 4);
        let count = u32::try_from(raw.div_ceil(whole.0)).unwrap_or(u32::MAX).max(1);
        let share = Bytes(raw.div_ceil(u64::from(count))).round_up_to(SHARE_UNIT).min(whole);
        return Ok((count, site.fractions.then_some(share)));
    }
    let proportional = job.compute_nodes / site.proportion.max(1);
    if proportional > 0 {
        return Ok((proportional, None));
    }
    if !site.fractions {
        return Err(format!(
            "job {} too small, marking ineligible: it has {} compute nodes, and {} get one RSA node",
            job.id, job.compute_nodes, site.proportion
        ));
    }
    Ok((1, Some(Bytes(whole.0 / u64::from(site.proportion) * u64::from(job.compute_nodes.max(1))))))
}

/// Which nodes a job gets now.
pub fn place(site: &Site, nodes: &Nodes, usage: &Use, job: &Job) -> Placement {
    let name = job.request.pool.as_deref().unwrap_or(&site.pool);
    if job.request.engine.unwrap_or(site.engine) == EngineKind::Tmpfs {
        return Placement::Never(
            "the engine tmpfs reaches one machine only; ask for gluster or ceph (#RSA_ENGINE)".into(),
        );
    }
    let Some(pool) = usage.pools.get(name) else {
        let known: Vec<&str> = usage.pools.keys().map(String::as_str).collect();
        return Placement::Never(format!("there is no pool `{name}`, but {} (#RSA_POOL)", known.join(", ")));
    };
    let (count, share) = match wanted(site, pool, job) {
        Ok(wanted) => wanted,
        Err(why) => return Placement::Never(why),
    };
    if count > pool.nodes {
        return Placement::Never(format!(
            "it needs {count} RSA nodes, and the pool `{name}` has {} (#RSA_NODES, #RSA_CAPACITY)",
            pool.nodes
        ));
    }
    let of_user = usage.users.get(&job.owner.uid).copied().unwrap_or(0);
    let of_account = usage.accounts.get(&job.account).copied().unwrap_or(0);
    for (limit, has, whose) in
        [(site.user_nodes, of_user, "user"), (site.account_nodes, of_account, "account")]
    {
        match limit {
            Some(limit) if count > limit => {
                let why = format!("it needs {count} RSA nodes, and its {whose} may have {limit}");
                return Placement::Never(why);
            }
            Some(limit) if has + count > limit => {
                return Placement::Later(format!("its {whose} has {has} of at most {limit} RSA nodes"));
            }
            _ => {}
        }
    }
    if !site.sharing.allows(job, pool.nodes, pool.staging, count) {
        return Placement::Later(format!(
            "{} of {} RSA nodes stage for other jobs, and half of them are for jobs that run",
            pool.staging, pool.nodes
        ));
    }
    let too_few = |free: u32| {
        let why = format!("insufficient free RSA nodes for job {}, have {free} need {count}", job.id);
        Placement::Later(why)
    };
    if share.is_none() && pool.free < count {
        return too_few(pool.free);
    }
    let fits = |node: &Node| match share {
        None => node.is_free(),
        Some(share) => node.free() >= share && share > Bytes::ZERO,
    };
    let members = nodes.iter().filter(|(_, node)| node.pool == name && fits(node));
    let mut free: Vec<(&NodeName, Bytes)> = members.map(|(name, node)| (name, node.free())).collect();
    if free.len() < count as usize {
        return too_few(free.len() as u32);
    }
    // Nodes that failed this job come last; of the others the fullest that still fits, so that whole ones stay whole.
    free.sort_by_key(|(name, free)| (job.avoid.contains(name), *free, *name));
    free.truncate(count as usize);
    // All promise the same; of whole nodes as much as the smallest of them has.
    let least = free.iter().map(|(_, free)| *free).min().unwrap_or_default();
    Placement::Nodes(free.into_iter().map(|(name, _)| name.clone()).collect(), share.unwrap_or(least))
}

impl Sharing {
    /// Whether a job may have `count` of a pool's `total` nodes while `staging` of them stage. One job may always stage,
    /// and output for a job that runs is no staging.
    fn allows(self, job: &Job, total: u32, staging: u32, count: u32) -> bool {
        match self {
            Sharing::Any => true,
            Sharing::Half => {
                job.job_state != JobState::Ondeck || staging == 0 || (staging + count) * 2 <= total
            }
        }
    }
}

/// Whether a job's RSA nodes stage, or wait for a start, rather than serve a job that runs.
fn is_staging(job: &Job) -> bool {
    match job.job_state {
        JobState::Ondeck | JobState::Demoted | JobState::Finished => {
            !matches!(job.rsa_state, RsaState::Initial | RsaState::Ineligible)
        }
        JobState::Running => false,
    }
}
