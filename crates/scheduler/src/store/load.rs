//! What an earlier daemon kept. One row that is not understood keeps no other from being loaded.

use std::collections::{BTreeMap, BTreeSet};

use ondeck_core::schedule::{Identity, Job, Node, PlacesLost};
use ondeck_core::{Epoch, Incarnation, NodeName, RamDiskId};
use rusqlite::{OptionalExtension, params};

use super::error::StoreError;
use super::{Reader, Store};

/// What was kept.
pub struct LoadedJournal {
    /// The jobs of which something is still to be done.
    pub jobs: Vec<Job>,
    /// Who the jobs were of which nothing is to be done any more.
    pub former: Vec<(Incarnation, Identity)>,
    /// The RSA nodes, and what is promised of each.
    pub nodes: Vec<(NodeName, Node)>,
    /// What is left on nodes that lend nothing.
    pub leftover_on_compute: BTreeMap<NodeName, BTreeSet<RamDiskId>>,
    /// The greatest number of a work order.
    pub last_order: u64,
    /// The greatest epoch.
    pub last_epoch: Epoch,
    /// The places for jobs that wait which the workload manager has lost.
    pub places_lost: PlacesLost,
}

impl Reader {
    /// Whether what was kept of a job is set aside: nobody knows then whether its RAM disk holds results.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn is_set_aside(&self, job: Incarnation) -> Result<bool, StoreError> {
        // A former version's names had no time of submission; any job of that number may be the one then.
        let query = "SELECT count(*) FROM set_aside WHERE kind = 'job' AND id IN (?1, ?2)";
        let found: rusqlite::Result<i64> =
            self.connection.query_row(query, [job.key(), job.to_string()], |row| row.get(0));
        found.map(|found| found > 0).map_err(|source| self.sqlite(source))
    }
}

impl Store {
    /// What an earlier daemon kept. One row that is not understood must not keep the others from being seen to: it is
    /// set aside, and told.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn load(&mut self) -> Result<LoadedJournal, StoreError> {
        let mut jobs: Vec<Job> = Vec::new();
        for (id, row) in self.reader.rows("SELECT id, job FROM jobs")? {
            match serde_json::from_str::<Job>(&row) {
                Ok(job) => jobs.push(job),
                Err(error) => self.set_aside("job", &id, &row, &error)?,
            }
        }
        let mut nodes: Vec<(NodeName, Node)> = Vec::new();
        for (name, row) in self.reader.rows("SELECT name, node FROM nodes")? {
            match (name.parse::<NodeName>(), serde_json::from_str(&row)) {
                (Ok(name), Ok(node)) => nodes.push((name, node)),
                (Err(error), _) => self.set_aside("node", &name, &row, &error)?,
                (Ok(parsed), Err(error)) => {
                    self.set_aside("node", &name, &row, &error)?;
                    let node = promised_by(&jobs, &parsed);
                    if let Some(row) = super::row(&name, &node) {
                        let statement = "INSERT INTO nodes (name, node) VALUES (?1, ?2)";
                        self.reader
                            .connection
                            .execute(statement, [&name, &row])
                            .map_err(|source| self.reader.sqlite(source))?;
                    }
                    nodes.push((parsed, node));
                }
            }
        }
        let mut leftover_on_compute = BTreeMap::new();
        for (name, row) in self.reader.rows("SELECT node, ramdisks FROM strays")? {
            match (name.parse::<NodeName>(), serde_json::from_str(&row)) {
                (Ok(name), Ok(left)) => drop(leftover_on_compute.insert(name, left)),
                (Err(error), _) => self.set_aside("stray", &name, &row, &error)?,
                (_, Err(error)) => self.set_aside("stray", &name, &row, &error)?,
            }
        }
        let counter = |name: &str| -> Result<u64, StoreError> {
            let query = "SELECT value FROM counters WHERE name = ?1";
            let found: Option<i64> = self
                .reader
                .connection
                .query_row(query, [name], |row| row.get(0))
                .optional()
                .map_err(|source| self.reader.sqlite(source))?;
            Ok(found.map_or(0, |value| value as u64))
        };
        let former = self.former()?;
        Ok(LoadedJournal {
            jobs,
            former,
            nodes,
            leftover_on_compute,
            last_order: counter("task")?,
            last_epoch: Epoch(counter("epoch")?),
            places_lost: PlacesLost {
                since: counter("controller started")?,
                places: u32::try_from(counter("places lost")?).unwrap_or(u32::MAX),
            },
        })
    }

    /// Moves a row that is not understood to where nothing looks at it.
    fn set_aside(
        &mut self,
        kind: &str,
        id: &str,
        row: &str,
        why: &dyn std::fmt::Display,
    ) -> Result<(), StoreError> {
        let why = why.to_string();
        tracing::error!(
            kind,
            id,
            why,
            "what is kept of it is not understood; it is set aside in the table set_aside of {}, and nothing is done \
             about it: its RAM disk, and the RSA nodes that are promised to it, are left alone",
            self.reader.path.display()
        );
        let from = match kind {
            "job" => "DELETE FROM jobs WHERE id = ?1",
            "node" => "DELETE FROM nodes WHERE name = ?1",
            _ => "DELETE FROM strays WHERE node = ?1",
        };
        let path = self.reader.path.clone();
        let done = self.reader.connection.transaction().and_then(|transaction| {
            let into = "INSERT INTO set_aside (kind, id, row, why, at_ms) VALUES (?1, ?2, ?3, ?4, ?5)";
            transaction.execute(into, params![kind, id, row, why, crate::clock::now().0 as i64])?;
            transaction.execute(from, [id])?;
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })
    }

    /// Who the jobs were of which nothing is to be done any more. One that is not understood is left out, and told:
    /// nothing of it is waited for, and it keeps its row.
    fn former(&self) -> Result<Vec<(Incarnation, Identity)>, StoreError> {
        // There may be many, and a row is long.
        let query = "SELECT id, json_extract(job, '$.owner.uid'), json_extract(job, '$.submitted'),
                coalesce(json_extract(job, '$.noted'), '[]')
            FROM past_jobs WHERE json_valid(job)";
        let read = || -> rusqlite::Result<Vec<(String, i64, i64, String)>> {
            let mut statement = self.reader.connection.prepare(query)?;
            let columns = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
            statement.query_map([], columns)?.collect()
        };
        let rows = read().map_err(|source| self.reader.sqlite(source))?;
        let understood = rows.into_iter().filter_map(|(id, uid, submitted, noted)| {
            let parsed = id
                .parse::<Incarnation>()
                .ok()
                .zip(u32::try_from(uid).ok())
                .zip(serde_json::from_str(&noted).ok());
            let Some(((of, uid), mut noted)) = parsed else {
                tracing::error!(
                    id,
                    "who this former job was is not understood; a job of its number may be taken for another"
                );
                return None;
            };
            let noted_here: &mut BTreeSet<u64> = &mut noted;
            noted_here.insert(submitted as u64);
            Some((of, Identity { uid, noted, restarts: of.restarts }))
        });
        Ok(understood.collect())
    }
}

/// A node of which nothing is known but what jobs were promised there.
fn promised_by(jobs: &[Job], name: &NodeName) -> Node {
    let mut node = Node::new("");
    for job in jobs {
        if let Some(allocation) = job.allocation.as_ref().filter(|found| found.nodes.contains(name)) {
            node.promised.insert(job.id, allocation.promise);
        }
    }
    node
}
