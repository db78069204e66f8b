//! What one event changes, or several in a row: one transaction.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ondeck_core::schedule::{Change, Effects, Job, Node, PlacesLost, Schedule, Time, UsageRecord};
use ondeck_core::{Incarnation, NodeName, RamDiskId};
use rusqlite::{Transaction, params};

use super::row;

/// What events have changed, as it is after the last of them.
#[derive(Debug, Default)]
pub struct Entry {
    /// Jobs that were touched; nothing if one is gone.
    pub jobs: BTreeMap<Incarnation, Option<Arc<Job>>>,
    /// Nodes that were touched.
    pub nodes: BTreeMap<NodeName, NodeEntry>,
    /// The lines of the log, each with the RSA nodes that its job has after it.
    lines: Vec<(Time, Change, String)>,
    /// The last of what was known of jobs that are gone.
    gone: Vec<(Time, Job)>,
    used: Vec<(Time, UsageRecord)>,
    /// The greatest number of a work order, and the greatest epoch, that were given.
    counters: (u64, u64),
    /// The places for jobs that wait which the workload manager has lost.
    pub places_lost: PlacesLost,
    at: Time,
}

/// What is kept of a node.
#[derive(Debug)]
pub struct NodeEntry {
    /// An RSA node.
    pub node: Option<Node>,
    /// What is left on one that lends nothing.
    pub leftover_on_compute: Option<BTreeSet<RamDiskId>>,
}

impl Entry {
    /// What one event has changed.
    pub fn of(at: Time, schedule: &Schedule, effects: &Effects) -> Entry {
        let mut entry = Entry::default();
        entry.add(at, schedule, effects);
        entry
    }

    /// Adds what the next event has changed, after which the schedule is as it is.
    pub fn add(&mut self, at: Time, schedule: &Schedule, effects: &Effects) {
        for id in &effects.jobs {
            self.jobs.insert(*id, schedule.jobs().get(id).cloned().map(Arc::new));
        }
        for name in &effects.nodes {
            let (node, leftover_on_compute) =
                (schedule.nodes().get(name).cloned(), schedule.leftover_on_compute().get(name).cloned());
            self.nodes.insert(name.clone(), NodeEntry { node, leftover_on_compute });
        }
        let rsa_nodes = |change: &Change| {
            let job = change.job.and_then(|id| schedule.jobs().get(&id));
            let nodes = job.and_then(|job| job.allocation.as_ref()).map(|found| found.nodes.as_slice());
            nodes.unwrap_or_default().iter().map(NodeName::as_str).collect::<Vec<_>>().join(",")
        };
        self.lines.extend(effects.changes.iter().map(|change| (at, change.clone(), rsa_nodes(change))));
        self.gone.extend(effects.gone.iter().map(|job| (at, job.clone())));
        self.used.extend(effects.used.iter().map(|used| (at, used.clone())));
        let (number, epoch) = schedule.counters();
        (self.counters, self.places_lost, self.at) = ((number, epoch.0), schedule.places_lost(), at);
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.nodes.is_empty() && self.lines.is_empty()
    }

    pub(super) fn write(&self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        for (id, job) in &self.jobs {
            match job {
                Some(job) => {
                    let Some(row) = row(&format!("job {id}"), job.as_ref()) else { continue };
                    let statement = "INSERT OR REPLACE INTO jobs (id, job) VALUES (?1, ?2)";
                    transaction.prepare_cached(statement)?.execute(params![id.key(), row])?;
                }
                None => {
                    transaction.execute("DELETE FROM jobs WHERE id = ?1", [id.key()])?;
                }
            }
        }
        for (at, job) in &self.gone {
            let Some(row) = row(&format!("job {}", job.id), job) else { continue };
            let statement = "INSERT OR REPLACE INTO past_jobs (id, job, ended_ms) VALUES (?1, ?2, ?3)";
            transaction.execute(statement, params![job.id.key(), row, at.0 as i64])?;
            transaction.execute("DELETE FROM ramdisks WHERE job = ?1", [job.id.key()])?;
            if job.lost_on.is_empty() {
                transaction.execute("DELETE FROM parts WHERE job = ?1", [job.id.key()])?;
            }
        }
        for (at, used) in &self.used {
            let statement = "INSERT INTO used (uid, account, day, node_seconds, allocations)
                VALUES (?1, ?2, ?3, ?4, 1) ON CONFLICT DO UPDATE
                SET node_seconds = node_seconds + excluded.node_seconds, allocations = allocations + 1";
            let day = (at.0 / 86_400_000) as i64;
            transaction.execute(statement, params![used.uid, used.account, day, used.node_seconds])?;
        }
        for (name, entry) in &self.nodes {
            if let Some(row) = entry.node.as_ref().and_then(|node| row(name.as_str(), node)) {
                let statement = "INSERT OR REPLACE INTO nodes (name, node) VALUES (?1, ?2)";
                transaction.execute(statement, params![name.as_str(), row])?;
            }
            match &entry.leftover_on_compute {
                Some(left) => {
                    let statement = "INSERT OR REPLACE INTO strays (node, ramdisks) VALUES (?1, ?2)";
                    if let Some(row) = row(name.as_str(), left) {
                        transaction.execute(statement, params![name.as_str(), row])?;
                    }
                }
                None => {
                    transaction.execute("DELETE FROM strays WHERE node = ?1", [name.as_str()])?;
                }
            }
        }
        for (at, change, rsa_nodes) in &self.lines {
            let statement = "INSERT INTO journal (at_ms, job, job_state, rsa_state, text, thesis, rsa_nodes)
                VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
            transaction.prepare_cached(statement)?.execute(params![
                at.0 as i64,
                change.job.map(Incarnation::key),
                change.states.map(|(job, _)| job.word()),
                change.states.map(|(_, rsa)| rsa.word()),
                change.notice.to_string(),
                // Nothing at all is a former version's.
                change.thesis().unwrap_or_default(),
                rsa_nodes
            ])?;
        }
        let (number, epoch) = self.counters;
        let lost = self.places_lost;
        for (name, value) in [
            ("task", number),
            ("epoch", epoch),
            ("clock last", self.at.0),
            ("controller started", lost.since),
            ("places lost", lost.places.into()),
        ] {
            let statement = "INSERT OR REPLACE INTO counters (name, value) VALUES (?1, ?2)";
            transaction.prepare_cached(statement)?.execute(params![name, value as i64])?;
        }
        Ok(())
    }
}
