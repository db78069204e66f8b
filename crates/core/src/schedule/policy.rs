//! Which RSA nodes a job gets, and when.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::job::{Job, Task, Work};
use super::nodes::{Node, Nodes};
use super::{JobState, Time};
use crate::allocation::{promise_for, share_within};
use crate::request::keyword_enum;
use crate::{Bytes, EngineKind, Incarnation, NodeName, Rate, duration};

keyword_enum! {
    /// How the RSA is shared between jobs that run and jobs that stage.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    Sharing {
        /// At most half of a pool is kept from jobs that have not started, while a job that runs waits for that much.
        Half = "half",
        /// Nothing is kept for anybody.
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
    /// Who has waited for RSA nodes for so long comes before all who have not.
    pub patience: Duration,
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
    /// From the end of a job until its last process and its last Epilog.
    pub ending: Duration,
    /// Being held until there are RSA nodes.
    pub hold: Duration,
    /// Waiting for its start with all its input in RAM, while others wait for its RSA nodes.
    pub ready: Duration,
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
            ending: Duration::from_secs(300),
            hold: Duration::from_secs(24 * 3600),
            ready: Duration::from_secs(3600),
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
            patience: Duration::from_secs(600),
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
    /// Not now: why. It is no matter of free nodes.
    Later(String),
    /// Not now, because nodes are not free, or are for others: why.
    Full(String),
    /// Never: why, and what would.
    Never(String),
}

/// What of a pool is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct PoolUse {
    nodes: u32,
    /// Nodes of which nobody has anything, by what they lend.
    whole: Offers,
    /// Nodes that have something left to promise, by how much.
    partly: Offers,
    /// What the largest node lends in all.
    largest: Bytes,
}

/// Nodes by what each can promise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Offers {
    by_size: BTreeMap<Bytes, BTreeSet<NodeName>>,
    count: u32,
}

impl Offers {
    fn put(&mut self, size: Bytes, node: &NodeName) {
        self.count += u32::from(self.by_size.entry(size).or_default().insert(node.clone()));
    }

    fn take(&mut self, size: Bytes, node: &NodeName) {
        let Some(nodes) = self.by_size.get_mut(&size) else { return };
        self.count -= u32::from(nodes.remove(node));
        if nodes.is_empty() {
            self.by_size.remove(&size);
        }
    }

    /// How many have at least so much.
    fn number_of_at_least(&self, size: Bytes) -> u32 {
        self.by_size.range(size..).map(|(_, nodes)| nodes.len() as u32).sum()
    }

    /// Those with at least so much, the fullest first.
    fn of_at_least(&self, size: Bytes) -> impl Iterator<Item = (Bytes, &NodeName)> {
        self.by_size.range(size..).flat_map(|(size, nodes)| nodes.iter().map(|node| (*size, node)))
    }
}

/// What of the RSA is in use, kept up to date while the table is applied: thousands of jobs may ask in one pass, and
/// none of them is worth a look at every node and every other job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Use {
    pools: BTreeMap<String, PoolUse>,
    users: BTreeMap<u32, u32>,
    accounts: BTreeMap<String, u32>,
    /// Directories with results that are not on disk yet, as [`key`]s, and whose they are.
    results: BTreeMap<Vec<u8>, BTreeSet<Incarnation>>,
    /// Jobs whose data is being copied.
    copying: u32,
    /// What was counted as free of each node: in whole, and in part.
    offered: BTreeMap<NodeName, Offered>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Offered {
    whole: bool,
    free: Bytes,
}

/// What one job takes of the RSA, as [`Use`] counts it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    nodes: Vec<NodeName>,
    copying: bool,
    results: Option<Incarnation>,
    outputs: Vec<PathBuf>,
    uid: u32,
    account: String,
}

impl Taken {
    /// By a job; nothing by most of those that wait.
    pub fn by(job: &Job) -> Taken {
        let mut taken = Taken::default();
        if let Some(allocation) = &job.allocation {
            taken.nodes.clone_from(&allocation.nodes);
            (taken.uid, taken.account) = (job.owner.uid, job.account.clone());
        }
        taken.copying = matches!(job.task, Some(Task { work: Work::StageIn | Work::StageOut, .. }));
        if job.results {
            taken.results = Some(job.id);
            taken.outputs.clone_from(&job.request.data_out);
        }
        taken
    }
}

impl Use {
    /// Counts.
    pub fn of<'a>(nodes: &Nodes, jobs: impl Iterator<Item = &'a Job>) -> Use {
        let mut found = Use::default();
        for (name, node) in nodes {
            let pool = found.pools.entry(node.pool.clone()).or_default();
            pool.nodes += 1;
            pool.largest = pool.largest.max(node.capacity);
            found.look_at(name, node);
        }
        for job in jobs.filter(|job| job.allocation.is_some() || job.results || job.task.is_some()) {
            found.add(&Taken::by(job));
        }
        found
    }

    /// What a job takes has changed.
    pub fn change(&mut self, before: &Taken, after: &Taken, nodes: &Nodes) {
        if before == after {
            return;
        }
        self.remove(before);
        self.add(after);
        for name in before.nodes.iter().chain(&after.nodes) {
            if let Some(node) = nodes.get(name) {
                self.look_at(name, node);
            }
        }
    }

    /// Counts again what a node has left.
    fn look_at(&mut self, name: &NodeName, node: &Node) {
        let now = Offered { whole: node.is_free(), free: node.free() };
        let before = self.offered.get(name).copied().unwrap_or_default();
        if now == before {
            return;
        }
        let Some(pool) = self.pools.get_mut(&node.pool) else { return };
        if before.whole {
            pool.whole.take(before.free, name);
        }
        if before.free > Bytes::ZERO {
            pool.partly.take(before.free, name);
        }
        if now.whole {
            pool.whole.put(now.free, name);
        }
        if now.free > Bytes::ZERO {
            pool.partly.put(now.free, name);
        }
        if now == Offered::default() {
            self.offered.remove(name);
        } else {
            self.offered.insert(name.clone(), now);
        }
    }

    fn add(&mut self, taken: &Taken) {
        let has = taken.nodes.len() as u32;
        if has > 0 {
            *self.users.entry(taken.uid).or_default() += has;
            *self.accounts.entry(taken.account.clone()).or_default() += has;
        }
        self.copying += u32::from(taken.copying);
        if let Some(job) = taken.results {
            for path in &taken.outputs {
                self.results.entry(key(path)).or_default().insert(job);
            }
        }
    }

    fn remove(&mut self, taken: &Taken) {
        let has = taken.nodes.len() as u32;
        if has > 0 {
            give_back(&mut self.users, &taken.uid, has);
            give_back(&mut self.accounts, &taken.account, has);
        }
        self.copying -= u32::from(taken.copying);
        if let Some(job) = taken.results {
            for path in &taken.outputs {
                let key = key(path);
                if let Some(jobs) = self.results.get_mut(&key) {
                    jobs.remove(&job);
                    if jobs.is_empty() {
                        self.results.remove(&key);
                    }
                }
            }
        }
    }

    /// How many jobs are copying.
    pub fn copying(&self) -> u32 {
        self.copying
    }

    /// A job with results that are not on disk yet where `job` reads or writes, and which of its paths that is.
    pub fn results_in_the_way_of<'a>(
        &self,
        job: Incarnation,
        paths: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Option<(Incarnation, &'a Path)> {
        if self.results.is_empty() {
            return None;
        }
        let another = |jobs: &BTreeSet<Incarnation>| jobs.iter().copied().find(|other| *other != job);
        paths.into_iter().find_map(|path| {
            let key = key(path);
            let ends = key.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(end, _)| &key[..=end]);
            for above in ends {
                let mut inside = self.results.range::<[u8], _>((Bound::Included(above), Bound::Unbounded));
                let (first, jobs) = inside.next()?;
                if first == above
                    && let Some(other) = another(jobs)
                {
                    return Some((other, path.as_path()));
                }
                if !first.starts_with(above) {
                    // Nothing is there, and so nothing further down.
                    return None;
                }
            }
            let inside = self.results.range::<[u8], _>((Bound::Excluded(&*key), Bound::Unbounded));
            let mut inside = inside.take_while(|(below, _)| below.starts_with(&key));
            inside.find_map(|(_, jobs)| another(jobs)).map(|other| (other, path.as_path()))
        })
    }
}

/// A path so that those inside a directory begin with it and follow it: each part with a slash behind it.
fn key(path: &Path) -> Vec<u8> {
    let mut key = Vec::with_capacity(path.as_os_str().len() + 2);
    for part in path.components() {
        if part == Component::RootDir {
            key.push(b'/');
        } else {
            key.extend_from_slice(part.as_os_str().as_encoded_bytes());
            key.push(b'/');
        }
    }
    key
}

fn give_back<K: Ord>(counts: &mut BTreeMap<K, u32>, whose: &K, has: u32) {
    if let Some(count) = counts.get_mut(whose) {
        *count -= has;
        if *count == 0 {
            counts.remove(whose);
        }
    }
}

/// What a job is to get.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    nodes: u32,
    /// How many bytes of each; nothing for whole nodes.
    share: Option<Bytes>,
    /// What whole nodes must lend at least.
    least: Bytes,
}

impl Wanted {
    fn whole(nodes: u32) -> Wanted {
        Wanted { nodes, share: None, least: Bytes::ZERO }
    }
}

fn wanted(site: &Site, pool: &PoolUse, job: &Job) -> Result<Wanted, String> {
    let (whole, engine) = (pool.largest, job.request.engine.unwrap_or(site.engine));
    let asked = job.request.nodes.map(|nodes| nodes.max(1));
    if let Some(capacity) = job.request.capacity {
        // What a node lends is not known before an agent has answered.
        if whole == Bytes::ZERO {
            return Ok(Wanted::whole(asked.unwrap_or(1)));
        }
        let most = share_within(engine, whole);
        if most == Bytes::ZERO {
            return Err(format!("{whole} of a node are too little for the engine {engine} (#RSA_ENGINE)"));
        }
        let fewest = capacity.0.div_ceil(most.0).max(1);
        let nodes = match asked {
            Some(nodes) if fewest > u64::from(nodes) => {
                return Err(format!(
                    "it asks for {capacity} (#RSA_CAPACITY) on {nodes} RSA nodes (#RSA_NODES), and needs {fewest} for that"
                ));
            }
            Some(nodes) => nodes,
            None => u32::try_from(fewest).unwrap_or(u32::MAX),
        };
        let least = promise_for(engine, Bytes(capacity.0.div_ceil(u64::from(nodes)))).min(whole);
        let share = (site.fractions && asked.is_none()).then_some(least);
        return Ok(Wanted { nodes, share, least });
    }
    if let Some(nodes) = asked {
        return Ok(Wanted::whole(nodes));
    }
    let proportional = job.compute_nodes / site.proportion.max(1);
    if proportional > 0 {
        return Ok(Wanted::whole(proportional));
    }
    if !site.fractions {
        return Err(format!(
            "job {} too small, marking ineligible: it has {} compute nodes, and {} get one RSA node",
            job.id, job.compute_nodes, site.proportion
        ));
    }
    let part = Bytes(whole.0 / u64::from(site.proportion) * u64::from(job.compute_nodes.max(1)));
    if whole > Bytes::ZERO && share_within(engine, part) == Bytes::ZERO {
        return Err(format!(
            "job {} too small, marking ineligible: its part of an RSA node, {part}, is too little for the engine {engine} \
             (#RSA_CAPACITY)",
            job.id
        ));
    }
    Ok(Wanted { nodes: 1, share: Some(part), least: part })
}

/// Since when a job has waited, if that is for so long that it comes before all who have not.
pub fn first_since(site: &Site, now: Time, job: &Job) -> Option<Time> {
    job.lacking.filter(|since| now.since(*since) >= site.patience)
}

/// When a user was last given nodes of a pool.
pub type Served = BTreeMap<(String, u32), Time>;

/// The turn of a job that has waited for so long that it comes before all who have not, the least first: since when its user
/// has had to wait, then since when it has. Nobody's second job comes before the first of another user who came before it
/// was the second's turn: who has many jobs that wait, and never start, would have the pool for as long as all of them.
pub fn turn(site: &Site, served: &Served, now: Time, job: &Job) -> Option<(Time, Time)> {
    let since = first_since(site, now, job)?;
    let served = served.get(&(pool_of(site, job).to_owned(), job.owner.uid));
    Some((served.map_or(since, |at| since.max(*at)), since))
}

/// The pool that a job takes nodes of.
pub fn pool_of<'a>(site: &'a Site, job: &'a Job) -> &'a str {
    job.request.pool.as_deref().unwrap_or(&site.pool)
}

/// What of the pools is not for everybody while jobs are placed, one in its turn after the other.
#[derive(Debug, Default)]
pub struct Line {
    /// Pools that nobody gets nodes of before these jobs, which have waited for long.
    heads: BTreeMap<String, Incarnation>,
    /// What is kept of pools for these jobs, which run, from those that have not started.
    kept: BTreeMap<String, (Incarnation, Wanted)>,
}

impl Line {
    /// `running`: the jobs that run and want nodes, in their turn.
    pub fn new<'a>(site: &Site, usage: &Use, now: Time, running: impl IntoIterator<Item = &'a Job>) -> Line {
        let mut line = Line::default();
        for job in running {
            let name = pool_of(site, job);
            if site.sharing == Sharing::Any || line.kept.contains_key(name) {
                continue;
            }
            let Some(pool) = usage.pools.get(name) else { continue };
            let Ok(wanted) = wanted(site, pool, job) else { continue };
            let waits_for_long = first_since(site, now, job).is_some();
            if !waits_for_long && wanted.nodes <= pool.nodes / 2 && beyond(site, usage, job, wanted).is_none()
            {
                line.kept.insert(name.to_owned(), (job.id, wanted));
            }
        }
        line
    }

    /// Whether nobody gets nodes of a pool any more but one who waits.
    pub fn is_headed(&self, pool: &str) -> bool {
        self.heads.contains_key(pool)
    }

    /// There are not enough free nodes for a job that has waited for long, and there will be: nobody overtakes it.
    pub fn wait_behind(&mut self, pool: &str, job: Incarnation) {
        self.heads.entry(pool.to_owned()).or_insert(job);
    }

    /// A job has got its nodes.
    pub fn leaves(&mut self, job: Incarnation) {
        self.kept.retain(|_, (waits, _)| *waits != job);
    }

    /// The job that could no longer be placed if these nodes, each with what it can promise, were given to another one:
    /// nothing is kept from a job for which there are too few without them, too.
    fn kept_from(
        &self,
        name: &str,
        pool: &PoolUse,
        nodes: &[(Bytes, &NodeName)],
        part: Option<Bytes>,
    ) -> Option<Incarnation> {
        let (waits, wanted) = self.kept.get(name)?;
        let is_whole = |free: Bytes, node: &NodeName| {
            pool.whole.by_size.get(&free).is_some_and(|nodes| nodes.contains(node))
        };
        let (there, taken) = match wanted.share {
            None => {
                let of_use =
                    |(free, node): &&(Bytes, &NodeName)| *free >= wanted.least && is_whole(*free, node);
                (pool.whole.number_of_at_least(wanted.least), nodes.iter().filter(of_use).count())
            }
            Some(share) => {
                let rest = |free: Bytes| part.map_or(0, |part| free.0.saturating_sub(part.0));
                let of_use = |(free, _): &&(Bytes, &NodeName)| *free >= share && rest(*free) < share.0;
                (pool.partly.number_of_at_least(share), nodes.iter().filter(of_use).count())
            }
        };
        (taken > 0 && there < wanted.nodes.saturating_add(taken as u32)).then_some(*waits)
    }
}

/// Whether a job's user or account has too many nodes for it, now or ever.
fn beyond(site: &Site, usage: &Use, job: &Job, wanted: Wanted) -> Option<Placement> {
    let count = wanted.nodes;
    let of_user = usage.users.get(&job.owner.uid).copied().unwrap_or(0);
    let of_account = usage.accounts.get(&job.account).copied().unwrap_or(0);
    let limits = [(site.user_nodes, of_user, "user"), (site.account_nodes, of_account, "account")];
    limits.into_iter().find_map(|(limit, has, whose)| match limit {
        Some(limit) if count > limit => {
            Some(Placement::Never(format!("it needs {count} RSA nodes, and its {whose} may have {limit}")))
        }
        Some(limit) if has.saturating_add(count) > limit => {
            Some(Placement::Later(format!("its {whose} has {has} of at most {limit} RSA nodes")))
        }
        _ => None,
    })
}

/// Which nodes a job gets now.
pub fn place(site: &Site, usage: &Use, line: &Line, now: Time, job: &Job) -> Placement {
    let name = pool_of(site, job);
    if job.request.engine.unwrap_or(site.engine) == EngineKind::Tmpfs {
        return Placement::Never(
            "the engine tmpfs reaches one machine only; ask for gluster or ceph (#RSA_ENGINE)".into(),
        );
    }
    let Some(pool) = usage.pools.get(name) else {
        let known: Vec<&str> = usage.pools.keys().map(String::as_str).collect();
        return Placement::Never(format!("there is no pool `{name}`, but {} (#RSA_POOL)", known.join(", ")));
    };
    let wanted = match wanted(site, pool, job) {
        Ok(wanted) => wanted,
        Err(why) => return Placement::Never(why),
    };
    let Wanted { nodes: count, share, least } = wanted;
    if count > pool.nodes {
        return Placement::Never(format!(
            "it needs {count} RSA nodes, and the pool `{name}` has {} (#RSA_NODES, #RSA_CAPACITY)",
            pool.nodes
        ));
    }
    if let Some(beyond) = beyond(site, usage, job, wanted) {
        return beyond;
    }
    let patience = duration::limit(site.patience);
    if let Some(head) = line.heads.get(name).filter(|head| **head != job.id) {
        return Placement::Full(format!(
            "job {head} has waited for RSA nodes for more than {patience}, and comes first"
        ));
    }
    let too_few = |free: u32| {
        let why = format!("insufficient free RSA nodes for job {}, have {free} need {count}", job.id);
        Placement::Full(why)
    };
    let offers = match share {
        None if pool.whole.count < count => return too_few(pool.whole.count),
        None => pool.whole.of_at_least(least),
        Some(Bytes(0)) => return too_few(0),
        Some(share) => pool.partly.of_at_least(share),
    };
    // Nodes that failed this job come last; of the others the fullest that still fits, so that whole ones stay whole.
    let mut found: Vec<(Bytes, &NodeName)> = Vec::new();
    let mut avoided: Vec<(Bytes, &NodeName)> = Vec::new();
    for (free, name) in offers {
        if found.len() == count as usize {
            break;
        }
        if job.avoid.contains(name) { &mut avoided } else { &mut found }.push((free, name));
    }
    found.extend(avoided);
    if found.len() < count as usize {
        return too_few(found.len() as u32);
    }
    found.truncate(count as usize);
    if job.job_state == JobState::Ondeck
        && first_since(site, now, job).is_none()
        && let Some(kept) = line.kept_from(name, pool, &found, share)
    {
        return Placement::Full(format!(
            "free RSA nodes are kept for job {kept}, which runs and waits for room for its output, until one of both has \
             waited for {patience}"
        ));
    }
    // All promise the same; of whole nodes as much as the smallest of them has.
    let least = found.iter().map(|(free, _)| *free).min().unwrap_or_default();
    Placement::Nodes(found.into_iter().map(|(_, name)| name.clone()).collect(), share.unwrap_or(least))
}

/// Whether there are enough nodes for a job once all have given theirs back who will: `stays` says who keeps what it has
/// until somebody decides.
pub fn suffices_in_time(
    site: &Site,
    usage: &Use,
    nodes: &Nodes,
    stays: impl Fn(Incarnation) -> bool,
    job: &Job,
) -> bool {
    let name = pool_of(site, job);
    let Some(pool) = usage.pools.get(name) else { return false };
    let Ok(wanted) = wanted(site, pool, job) else { return false };
    let of_use = |node: &&Node| {
        let kept: u64 =
            node.promised.iter().filter(|(of, _)| stays(**of)).map(|(_, promise)| promise.0).sum();
        let least = wanted.share.unwrap_or(wanted.least).max(Bytes(1));
        node.pool == name
            && node.lends()
            && (wanted.share.is_some() || kept == 0)
            && node.capacity.0.saturating_sub(kept) >= least.0
    };
    nodes.values().filter(of_use).take(wanted.nodes as usize).count() == wanted.nodes as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::JobId;

    fn id(number: u32) -> Incarnation {
        Incarnation { job: JobId(number), submitted: 0, restarts: 0 }
    }

    fn path() -> impl Strategy<Value = PathBuf> {
        let part = prop::sample::select(vec!["a", "b", "a-", "ab"]);
        prop::collection::vec(part, 0..4).prop_map(|parts| Path::new("/").join(parts.join("/")))
    }

    proptest! {
        #[test]
        fn results_are_in_the_way_exactly_where_one_directory_is_or_holds_the_other(
            outputs in prop::collection::vec(prop::collection::vec(path(), 1..3), 0..5),
            mine in path(),
        ) {
            let mut usage = Use::default();
            for (number, outputs) in (0..).zip(&outputs) {
                let taken = Taken { results: Some(id(number)), outputs: outputs.clone(), ..Taken::default() };
                usage.change(&Taken::default(), &taken, &Nodes::new());
            }
            let overlap = |theirs: &PathBuf| mine.starts_with(theirs) || theirs.starts_with(&mine);
            let others = outputs.iter().enumerate().filter(|(number, _)| *number != 1);
            let expected: Vec<u32> =
                others.filter(|(_, outputs)| outputs.iter().any(overlap)).map(|(number, _)| number as u32).collect();
            match usage.results_in_the_way_of(id(1), [&mine]) {
                None => prop_assert!(expected.is_empty(), "{expected:?}"),
                Some((other, path)) => {
                    prop_assert!(expected.contains(&other.job.0));
                    prop_assert_eq!(path, mine.as_path());
                }
            }
        }
    }
}
