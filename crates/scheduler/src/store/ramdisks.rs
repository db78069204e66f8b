//! What is kept of RAM disks: secrets, layouts, and what each node had of the results.

use ondeck_api::wire::Inventory;
use ondeck_core::schedule::Time;
use ondeck_core::{Incarnation, Layout, NodeName, RamDiskId};
use ondeck_ramdisk::Secret;
use rusqlite::{OptionalExtension, params};

use super::error::StoreError;
use super::{Reader, Store, job_of, json, row};

impl Reader {
    /// The secret of a RAM disk, and its layout if it was built.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn ramdisk(&self, id: &RamDiskId) -> Result<Option<(Secret, Option<Layout>)>, StoreError> {
        let query = "SELECT secret, layout FROM ramdisks WHERE id = ?1";
        let found: Option<(String, Option<String>)> = self
            .connection
            .query_row(query, [id.to_string()], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()
            .map_err(|source| self.sqlite(source))?;
        let Some((secret, layout)) = found else { return Ok(None) };
        let malformed = |why: &dyn std::fmt::Display| StoreError::Malformed {
            path: self.path.clone(),
            what: id.to_string(),
            why: why.to_string(),
        };
        let secret = secret.parse().map_err(|_| malformed(&"the secret"))?;
        let layout =
            layout.map(|text| serde_json::from_str(&text)).transpose().map_err(|error| malformed(&error))?;
        Ok(Some((secret, layout)))
    }

    /// Whether a RAM disk of this name and epoch, or a later one, was ordered by this daemon.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn knows(&self, id: &RamDiskId) -> Result<bool, StoreError> {
        let query =
            "SELECT count(*) FROM jobs WHERE id = ?1 UNION ALL SELECT count(*) FROM past_jobs WHERE id = ?1";
        let read = || -> rusqlite::Result<i64> {
            let mut statement = self.connection.prepare_cached(query)?;
            let job = job_of(id).map(Incarnation::key).unwrap_or_default();
            statement.query_map([job], |row| row.get::<_, i64>(0))?.sum()
        };
        read().map(|found| found > 0).map_err(|source| self.sqlite(source))
    }

    /// What an RSA node had of a job's results, and when that was.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn inventory(
        &self,
        job: Incarnation,
        node: &NodeName,
    ) -> Result<Option<(Time, Inventory)>, StoreError> {
        let query = "SELECT at_ms, names FROM parts WHERE job = ?1 AND node = ?2";
        let found: Option<(i64, String)> = self
            .connection
            .query_row(query, [job.key(), node.to_string()], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()
            .map_err(|source| self.sqlite(source))?;
        let Some((at, row)) = found else { return Ok(None) };
        let inventory = serde_json::from_str(&row).map_err(|error| StoreError::Malformed {
            path: self.path.clone(),
            what: format!("the files of job {job} on {node}"),
            why: error.to_string(),
        })?;
        Ok(Some((Time(at as u64), inventory)))
    }
}

impl Store {
    /// Keeps the secret of a RAM disk before anybody is told, and its layout once it is built.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn keep_ramdisk(
        &mut self,
        job: Incarnation,
        id: &RamDiskId,
        secret: &Secret,
        layout: Option<&Layout>,
    ) -> Result<(), StoreError> {
        let statement = "INSERT OR REPLACE INTO ramdisks (id, job, secret, layout) VALUES (?1, ?2, ?3, ?4)";
        let layout = layout.map(json).transpose().map_err(|error| StoreError::Malformed {
            path: self.reader.path.clone(),
            what: id.to_string(),
            why: error.to_string(),
        })?;
        if layout.is_none() {
            // What nodes had of an earlier one.
            let statement = "DELETE FROM parts WHERE job = ?1";
            self.reader
                .connection
                .execute(statement, [job.key()])
                .map_err(|source| self.reader.sqlite(source))?;
        }
        let row = params![id.to_string(), job.key(), secret.reveal(), layout];
        self.reader
            .connection
            .execute(statement, row)
            .map_err(|source| self.reader.sqlite(source))
            .map(|_| ())
    }

    /// Keeps what RSA nodes have of a job's results, instead of what they had before.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn keep_inventories(
        &mut self,
        job: Incarnation,
        now: Time,
        inventories: &[(NodeName, Inventory)],
    ) -> Result<(), StoreError> {
        let path = self.reader.path.clone();
        let done = self.reader.connection.transaction().and_then(|transaction| {
            for (node, inventory) in inventories {
                let Some(row) = row(&format!("what {node} has of job {job}"), inventory) else { continue };
                let statement =
                    "INSERT OR REPLACE INTO parts (job, node, at_ms, names) VALUES (?1, ?2, ?3, ?4)";
                transaction.execute(statement, params![job.key(), node.as_str(), now.0 as i64, row])?;
            }
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })
    }
}
