//! Which RSA nodes a job gets, and when.
//!
//! # Layout
//!
//! - [`site`]: what a site decides; [`usage`]: what of the RSA is in use
//! - here: whose turn it is, and placement

mod site;
mod usage;

use std::collections::BTreeMap;

use super::job::Job;
use super::nodes::{Node, Nodes};
use super::notice::{Lack, Unfit, Waiting, Whose};
use super::{JobState, Time};
use crate::allocation::{promise_for, share_within};
use crate::{Bytes, EngineKind, Incarnation, NodeName};

pub use self::site::{Limits, LockIn, Sharing, Site};
use self::usage::PoolUsage;
pub use self::usage::{Changed, RsaUsage, Takings, runs_script};

/// What placement comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// These nodes, each with this promise.
    Nodes(Vec<NodeName>, Bytes),
    /// Not now: why. It is no matter of free nodes.
    Later(Waiting),
    /// Not now, because nodes are not free, or are for others: why.
    Full(Lack),
    /// Never: why, and what would.
    Never(Unfit),
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

fn wanted(site: &Site, pool: &PoolUsage, job: &Job) -> Result<Wanted, Unfit> {
    let (whole, engine) = (pool.largest, job.request.engine.unwrap_or(site.engine));
    let asked = job.request.nodes.map(|nodes| nodes.max(1));
    if let Some(capacity) = job.request.capacity {
        // What a node lends is not known before an agent has answered.
        if whole == Bytes::ZERO {
            return Ok(Wanted::whole(asked.unwrap_or(1)));
        }
        let most = share_within(engine, whole);
        if most == Bytes::ZERO {
            return Err(Unfit::NodeTooSmall { whole, engine });
        }
        let fewest = capacity.0.div_ceil(most.0).max(1);
        let nodes = match asked {
            Some(nodes) if fewest > u64::from(nodes) => {
                return Err(Unfit::TooMuchForItsNodes { capacity, nodes, needed: fewest });
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
        let (compute_nodes, proportion) = (job.compute_nodes, site.proportion);
        return Err(Unfit::TooSmall { job: job.id, compute_nodes, proportion });
    }
    let part = Bytes(whole.0 / u64::from(site.proportion) * u64::from(job.compute_nodes.max(1)));
    if whole > Bytes::ZERO && share_within(engine, part) == Bytes::ZERO {
        return Err(Unfit::PartTooSmall { job: job.id, part, engine });
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
    pub fn new<'a>(
        site: &Site,
        usage: &RsaUsage,
        now: Time,
        running: impl IntoIterator<Item = &'a Job>,
    ) -> Line {
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
        pool: &PoolUsage,
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
fn beyond(site: &Site, usage: &RsaUsage, job: &Job, wanted: Wanted) -> Option<Placement> {
    let count = wanted.nodes;
    let of_user = usage.users.get(&job.owner.uid).copied().unwrap_or(0);
    let of_account = usage.accounts.get(&job.account).copied().unwrap_or(0);
    let limits = [(site.user_nodes, of_user, Whose::User), (site.account_nodes, of_account, Whose::Account)];
    limits.into_iter().find_map(|(limit, has, whose)| match limit {
        Some(limit) if count > limit => {
            Some(Placement::Never(Unfit::BeyondLimit { nodes: count, whose, limit }))
        }
        Some(limit) if has.saturating_add(count) > limit => {
            Some(Placement::Later(Waiting::AtLimit { whose, has, limit }))
        }
        _ => None,
    })
}

/// Which nodes a job gets now.
pub fn place(site: &Site, usage: &RsaUsage, line: &Line, now: Time, job: &Job) -> Placement {
    let name = pool_of(site, job);
    if job.request.engine.unwrap_or(site.engine) == EngineKind::Tmpfs {
        return Placement::Never(Unfit::OneMachineOnly);
    }
    let Some(pool) = usage.pools.get(name) else {
        let known = usage.pools.keys().cloned().collect();
        return Placement::Never(Unfit::NoPool { pool: name.to_owned(), known });
    };
    let wanted = match wanted(site, pool, job) {
        Ok(wanted) => wanted,
        Err(why) => return Placement::Never(why),
    };
    let Wanted { nodes: count, share, least } = wanted;
    if count > pool.nodes {
        let (pool, has) = (name.to_owned(), pool.nodes);
        return Placement::Never(Unfit::PoolTooSmall { nodes: count, pool, has });
    }
    if let Some(beyond) = beyond(site, usage, job, wanted) {
        return beyond;
    }
    let patience = site.patience;
    if let Some(head) = line.heads.get(name).filter(|head| **head != job.id) {
        return Placement::Full(Lack::Behind { head: *head, patience });
    }
    let too_few = |free: u32| Placement::Full(Lack::TooFew { job: job.id, free, needs: count });
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
        return Placement::Full(Lack::Kept { runs: kept, patience });
    }
    // All promise the same; of whole nodes as much as the smallest of them has.
    let least = found.iter().map(|(free, _)| *free).min().unwrap_or_default();
    Placement::Nodes(found.into_iter().map(|(_, name)| name.clone()).collect(), share.unwrap_or(least))
}

/// Whether there are enough nodes for a job once all have given theirs back who will: `stays` says who keeps what it has
/// until somebody decides.
pub fn suffices_in_time(
    site: &Site,
    usage: &RsaUsage,
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
