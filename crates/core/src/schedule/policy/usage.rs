//! What of the RSA is in use.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::path::{Component, Path, PathBuf};

use crate::allocation::Purpose;
use crate::schedule::job::{Job, Work, WorkOrder};
use crate::schedule::nodes::{Node, Nodes};
use crate::{Bytes, Incarnation, NodeName};

/// What of a pool is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolUsage {
    pub nodes: u32,
    /// Nodes of which nobody has anything, by what they lend.
    pub whole: Offers,
    /// Nodes that have something left to promise, by how much.
    pub partly: Offers,
    /// What the largest node lends in all.
    pub largest: Bytes,
}

/// Nodes by what each can promise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Offers {
    pub by_size: BTreeMap<Bytes, BTreeSet<NodeName>>,
    pub count: u32,
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
    pub fn number_of_at_least(&self, size: Bytes) -> u32 {
        self.by_size.range(size..).map(|(_, nodes)| nodes.len() as u32).sum()
    }

    /// Those with at least so much, the fullest first.
    pub fn of_at_least(&self, size: Bytes) -> impl Iterator<Item = (Bytes, &NodeName)> {
        self.by_size.range(size..).flat_map(|(size, nodes)| nodes.iter().map(|node| (*size, node)))
    }
}

/// What of the RSA is in use, kept up to date while the table is applied: thousands of jobs may ask in one pass, and
/// none of them is worth a look at every node and every other job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RsaUsage {
    pub(super) pools: BTreeMap<String, PoolUsage>,
    pub(super) users: BTreeMap<u32, u32>,
    pub(super) accounts: BTreeMap<String, u32>,
    /// Directories with results that are not on disk yet, as [`key`]s, and whose they are.
    results: BTreeMap<Vec<u8>, BTreeSet<Incarnation>>,
    /// Jobs whose data is being copied, by Ondeck alone.
    copies: Stagings,
    /// Jobs for which a script of their own is run, for as long as it likes.
    scripts: Stagings,
    /// What was counted as free of each node: in whole, and in part.
    offered: BTreeMap<NodeName, Offered>,
}

/// How many jobs are staging, and how many of each user's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Stagings {
    all: u32,
    by_user: BTreeMap<u32, u32>,
}

impl Stagings {
    fn begin(&mut self, uid: u32) {
        self.all += 1;
        *self.by_user.entry(uid).or_default() += 1;
    }

    fn end(&mut self, uid: u32) {
        self.all -= 1;
        give_back(&mut self.by_user, &uid, 1);
    }

    fn of(&self, uid: u32) -> u32 {
        self.by_user.get(&uid).copied().unwrap_or(0)
    }
}

/// What is under way for a job between RAM and disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Staging {
    #[default]
    None,
    /// Ondeck copies, which ends.
    Copy,
    /// A script of its user's is run, too.
    Script,
}

impl Staging {
    fn of(job: &Job) -> Staging {
        match job.under_way {
            Some(WorkOrder { work: work @ (Work::StageIn | Work::StageOut), .. })
                if runs_script(job, work, job.purpose) =>
            {
                Staging::Script
            }
            Some(WorkOrder { work: Work::StageIn | Work::StageOut, .. }) => Staging::Copy,
            _ => Staging::None,
        }
    }
}

/// Whether a script of a job's own is run for this work on a RAM disk for this purpose.
pub fn runs_script(job: &Job, work: Work, purpose: Purpose) -> bool {
    match work {
        Work::StageIn => job.request.stage_in.is_some() && purpose != Purpose::Output,
        Work::StageOut => job.request.stage_out.is_some(),
        _ => false,
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Offered {
    whole: bool,
    free: Bytes,
}

/// What one job takes of the RSA, as [`RsaUsage`] counts it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobUsage {
    nodes: Vec<NodeName>,
    staging: Staging,
    results: Option<Incarnation>,
    outputs: Vec<PathBuf>,
    uid: u32,
    account: String,
}

impl JobUsage {
    /// By a job; nothing by most of those that wait.
    pub fn by(job: &Job) -> JobUsage {
        let mut taken = JobUsage::default();
        if let Some(allocation) = &job.allocation {
            taken.nodes.clone_from(&allocation.nodes);
            (taken.uid, taken.account) = (job.owner.uid, job.account.clone());
        }
        taken.staging = Staging::of(job);
        if job.results {
            taken.results = Some(job.id);
            taken.outputs.clone_from(&job.request.data_out);
        }
        taken
    }

    /// Whether it is what a job takes, as [`JobUsage::by`] would say. It is asked after every event, of which most change nothing of it.
    fn is_by(&self, job: &Job) -> bool {
        let nodes = job.allocation.as_ref().map_or(&[][..], |allocation| &allocation.nodes);
        let (uid, account, outputs) = (
            if job.allocation.is_some() { job.owner.uid } else { 0 },
            if job.allocation.is_some() { job.account.as_str() } else { "" },
            if job.results { job.request.data_out.as_slice() } else { &[] },
        );
        self.staging == Staging::of(job)
            && self.results == job.results.then_some(job.id)
            && self.uid == uid
            && self.account == account
            && self.nodes == nodes
            && self.outputs == outputs
    }

    /// Whether both are the same but for what is copied.
    fn is_but_for_copying(&self, other: &JobUsage) -> bool {
        let JobUsage { nodes, staging: _, results, outputs, uid, account } = self;
        (results, uid, account, nodes, outputs)
            == (&other.results, &other.uid, &other.account, &other.nodes, &other.outputs)
    }
}

/// [`RsaUsage`] and what each job takes of it, kept up to date from event to event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Takings {
    usage: RsaUsage,
    /// Only of those that take something.
    by_job: BTreeMap<Incarnation, JobUsage>,
}

impl Takings {
    /// Counts what all jobs have of all nodes.
    pub fn of<'a>(nodes: &Nodes, jobs: impl Iterator<Item = &'a Job>) -> Takings {
        let mut takings = Takings { usage: RsaUsage::of_nodes(nodes), by_job: BTreeMap::new() };
        for job in jobs {
            takings.look_at_job(job.id, Some(job), nodes);
        }
        takings
    }

    /// What is in use.
    pub fn usage(&self) -> &RsaUsage {
        &self.usage
    }

    /// Counts again what a node has left; not for a change of what it lends in all.
    pub fn look_at_node(&mut self, name: &NodeName, node: &Node) {
        self.usage.look_at(name, node);
    }

    /// Counts again what a job takes, nothing if it is gone. Returns what has changed, if anything.
    pub fn look_at_job(&mut self, id: Incarnation, job: Option<&Job>, nodes: &Nodes) -> Option<Changed> {
        let nothing = JobUsage::default();
        let known = self.by_job.get(&id);
        if job.map_or(known.is_none(), |job| known.unwrap_or(&nothing).is_by(job)) {
            return None;
        }
        let before = self.by_job.remove(&id).unwrap_or_default();
        let after = job.map(JobUsage::by).unwrap_or_default();
        self.usage.change(&before, &after, nodes);
        let only_copies = before.is_but_for_copying(&after);
        if after != nothing {
            self.by_job.insert(id, after);
        }
        // Who brings results home keeps others from the same place.
        Some(if only_copies && before.results.is_none() { Changed::Copying } else { Changed::Rest })
    }
}

/// What of a job's part of the RSA has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// Whether input is copied for it, and nothing else.
    Copying,
    /// Anything else, which always concerns other jobs.
    Rest,
}

impl RsaUsage {
    /// Counts nodes, of which nobody has anything yet but what they have promised.
    fn of_nodes(nodes: &Nodes) -> RsaUsage {
        let mut found = RsaUsage::default();
        for (name, node) in nodes {
            let pool = found.pools.entry(node.pool.clone()).or_default();
            pool.nodes += 1;
            pool.largest = pool.largest.max(node.capacity);
            found.look_at(name, node);
        }
        found
    }

    /// What a job takes has changed.
    fn change(&mut self, before: &JobUsage, after: &JobUsage, nodes: &Nodes) {
        if before.is_but_for_copying(after) {
            self.ends(before);
            self.begins(after);
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

    fn add(&mut self, taken: &JobUsage) {
        let has = taken.nodes.len() as u32;
        if has > 0 {
            *self.users.entry(taken.uid).or_default() += has;
            *self.accounts.entry(taken.account.clone()).or_default() += has;
        }
        self.begins(taken);
        if let Some(job) = taken.results {
            for path in &taken.outputs {
                self.results.entry(key(path)).or_default().insert(job);
            }
        }
    }

    fn remove(&mut self, taken: &JobUsage) {
        let has = taken.nodes.len() as u32;
        if has > 0 {
            give_back(&mut self.users, &taken.uid, has);
            give_back(&mut self.accounts, &taken.account, has);
        }
        self.ends(taken);
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

    fn begins(&mut self, taken: &JobUsage) {
        match taken.staging {
            Staging::None => {}
            Staging::Copy => self.copies.begin(taken.uid),
            Staging::Script => self.scripts.begin(taken.uid),
        }
    }

    fn ends(&mut self, taken: &JobUsage) {
        match taken.staging {
            Staging::None => {}
            Staging::Copy => self.copies.end(taken.uid),
            Staging::Script => self.scripts.end(taken.uid),
        }
    }

    /// How many jobs of a user's are staging.
    pub fn staging_of(&self, uid: u32) -> u32 {
        self.copies.of(uid) + self.scripts.of(uid)
    }

    /// Whether one more job may stage, of so many at the same time. A copy ends; a script of a user's may run for ever. So scripts have
    /// as many places of their own, and one for each user whatever others have.
    pub fn has_place(&self, most: u32, uid: u32, runs_script: bool) -> bool {
        if runs_script {
            self.scripts.all < most || self.scripts.of(uid) == 0
        } else {
            self.copies.all < most
        }
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
            let mut usage = RsaUsage::default();
            for (number, outputs) in (0..).zip(&outputs) {
                let taken = JobUsage { results: Some(id(number)), outputs: outputs.clone(), ..JobUsage::default() };
                usage.change(&JobUsage::default(), &taken, &Nodes::new());
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
