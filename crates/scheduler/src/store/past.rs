//! What is kept of jobs that are gone, of all that happened, and of who used what; and forgetting it.

use ondeck_api::scheduler::{LogLine, Usage};
use ondeck_core::job_id::JobNameError;
use ondeck_core::schedule::{Job, JobState, RsaState, Time};
use ondeck_core::timeline::Noted;
use ondeck_core::{Incarnation, JobId, NodeName};
use rusqlite::{OptionalExtension, Transaction, params};

use super::error::StoreError;
use super::{Reader, Store};

impl Reader {
    /// A job that is gone, as it was last.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn past_job(&self, id: Incarnation) -> Result<Option<Job>, StoreError> {
        let query = "SELECT job FROM past_jobs WHERE id = ?1";
        let found: Option<String> = self
            .connection
            .query_row(query, [id.key()], |row| row.get(0))
            .optional()
            .map_err(|source| self.sqlite(source))?;
        found.map(|text| serde_json::from_str(&text)).transpose().map_err(|error| StoreError::Malformed {
            path: self.path.clone(),
            what: format!("job {id}"),
            why: error.to_string(),
        })
    }

    /// The lives, of jobs that had a number, of which nothing is to be done any more; the newest last.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn past_lives(&self, job: JobId) -> Result<Vec<Incarnation>, StoreError> {
        let query = "SELECT id FROM past_jobs WHERE id = ?1 OR id GLOB ?1 || '.*' OR id GLOB ?1 || '@*'";
        let sqlite = |source| self.sqlite(source);
        let mut statement = self.connection.prepare_cached(query).map_err(sqlite)?;
        let rows = statement.query_map([job.to_string()], |row| row.get::<_, String>(0)).map_err(sqlite)?;
        let ids = rows.collect::<Result<Vec<String>, _>>().map_err(sqlite)?;
        let parsed = ids.iter().map(|id| {
            id.parse().map_err(|error: JobNameError| self.malformed(format!("the job {id}"), &error))
        });
        let mut lives = parsed.collect::<Result<Vec<Incarnation>, _>>()?;
        lives.sort_unstable();
        Ok(lives)
    }

    /// The log of one job, or of everything; the last `most` lines of it, oldest first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn log(&self, job: Option<Incarnation>, most: u32) -> Result<Vec<LogLine>, StoreError> {
        Ok(self.log_with_thesis(job, most)?.into_iter().map(|(line, _)| line).collect())
    }

    /// The same, each line with the sentence that the log of the thesis has for it, which is empty if it has none; a
    /// former version has noted nothing of that.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn log_with_thesis(
        &self,
        job: Option<Incarnation>,
        most: u32,
    ) -> Result<Vec<(LogLine, Option<String>)>, StoreError> {
        let query = "SELECT at_ms, job, job_state, rsa_state, text, thesis FROM journal
            WHERE ?1 IS NULL OR job = ?1 ORDER BY number DESC LIMIT ?2";
        let read = || -> rusqlite::Result<Vec<(LogLine, Option<String>)>> {
            let mut statement = self.connection.prepare_cached(query)?;
            let rows = statement.query_map(params![job.map(Incarnation::key), most], |row| {
                let text = |index| row.get::<_, Option<String>>(index);
                let job_state = text(2)?.and_then(|word| JobState::from_word(&word));
                let rsa_state = text(3)?.and_then(|word| RsaState::from_word(&word));
                let line = LogLine {
                    at_ms: row.get::<_, i64>(0)? as u64,
                    job: text(1)?.and_then(|text| text.parse().ok()),
                    states: job_state.zip(rsa_state),
                    text: row.get(4)?,
                };
                Ok((line, text(5)?))
            })?;
            let mut lines: Vec<(LogLine, Option<String>)> = rows.collect::<rusqlite::Result<_>>()?;
            lines.reverse();
            Ok(lines)
        };
        read().map_err(|source| self.sqlite(source))
    }

    /// What the log says of jobs since a time, oldest first, and of each job the last of what was before: who had which RSA nodes, and
    /// in which states. Lines of a former version, which did not note the nodes, are left out.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn noted_since(&self, since: Time) -> Result<Vec<Noted>, StoreError> {
        let query = "SELECT at_ms, job, job_state, rsa_state, rsa_nodes FROM journal
            WHERE job IS NOT NULL AND job_state IS NOT NULL AND rsa_nodes IS NOT NULL AND (at_ms >= ?1 OR number IN (
                SELECT max(number) FROM journal WHERE at_ms < ?1 AND job_state IS NOT NULL GROUP BY job))
            ORDER BY number";
        let read = || -> rusqlite::Result<Vec<Noted>> {
            let mut statement = self.connection.prepare_cached(query)?;
            let rows = statement.query_map([since.0 as i64], |row| {
                let text = |index| row.get::<_, String>(index);
                let states = JobState::from_word(&text(2)?).zip(RsaState::from_word(&text(3)?));
                let (job, nodes) = (text(1)?, text(4)?);
                let nodes: Result<Vec<NodeName>, _> =
                    nodes.split(',').filter(|name| !name.is_empty()).map(str::parse).collect();
                let at_ms = row.get::<_, i64>(0)? as u64;
                // A word that this version does not know is a later one's: of its lines nothing can be shown.
                let known =
                    || Some(Noted { at_ms, job: job.parse().ok()?, states: states?, rsa: nodes.ok()? });
                Ok(known())
            })?;
            rows.filter_map(Result::transpose).collect()
        };
        read().map_err(|source| self.sqlite(source))
    }

    /// What each user and account had of the RSA since a day (days since 1970).
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn usage(&self, since_day: u64) -> Result<Vec<Usage>, StoreError> {
        let query = "SELECT uid, account, sum(node_seconds), sum(allocations) FROM used WHERE day >= ?1
            GROUP BY uid, account ORDER BY 3 DESC";
        let read = || -> rusqlite::Result<Vec<Usage>> {
            let mut statement = self.connection.prepare_cached(query)?;
            let rows = statement.query_map([since_day as i64], |row| {
                Ok(Usage {
                    uid: row.get(0)?,
                    account: row.get(1)?,
                    node_seconds: row.get(2)?,
                    allocations: row.get::<_, i64>(3)? as u64,
                })
            })?;
            rows.collect()
        };
        read().map_err(|source| self.sqlite(source))
    }
}

impl Store {
    /// Forgets jobs that ended before a time, with their logs, and what was logged before it of nodes and of jobs that
    /// were never known. Returns the lives that were forgotten.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn forget_before(&mut self, ended: Time) -> Result<Vec<Incarnation>, StoreError> {
        let forget = |transaction: &Transaction<'_>| -> rusqlite::Result<Vec<String>> {
            let old = "SELECT id FROM past_jobs WHERE ended_ms < ?1";
            transaction.execute(&format!("DELETE FROM journal WHERE job IN ({old})"), [ended.0 as i64])?;
            let mut delete = transaction.prepare("DELETE FROM past_jobs WHERE ended_ms < ?1 RETURNING id")?;
            let forgotten =
                delete.query_map([ended.0 as i64], |row| row.get(0))?.collect::<Result<_, _>>()?;
            let known = "SELECT id FROM jobs UNION ALL SELECT id FROM past_jobs";
            for table in ["parts", "moved"] {
                transaction.execute(&format!("DELETE FROM {table} WHERE job NOT IN ({known})"), [])?;
            }
            transaction.execute(
                &format!("DELETE FROM journal WHERE at_ms < ?1 AND (job IS NULL OR job NOT IN ({known}))"),
                [ended.0 as i64],
            )?;
            for table in ["layouts", "delays"] {
                let delete = format!("DELETE FROM {table} WHERE done AND at_ms < ?1");
                transaction.execute(&delete, [ended.0 as i64])?;
            }
            Ok(forgotten)
        };
        let path = self.reader.path.clone();
        let done = self.reader.connection.transaction().and_then(|transaction| {
            let forgotten = forget(&transaction)?;
            transaction.commit()?;
            Ok(forgotten)
        });
        // What is no job's name was nobody's.
        done.map(|ids| ids.iter().filter_map(|id| id.parse().ok()).collect())
            .map_err(|source| StoreError::Sqlite { path, source })
    }
}
