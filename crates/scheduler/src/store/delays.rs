//! What is kept of jobs that were delayed because their filesystem was busy, also of jobs of which the schedule knows nothing.

use ondeck_core::JobId;
use rusqlite::params;

use super::error::StoreError;
use super::{Reader, Store, row};
use crate::clock::now;
use crate::delays::JobDelay;

impl Reader {
    /// What is kept of all lives of all jobs that had a number, each with whether it has left the queue.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) fn delays_of(&self, job: JobId) -> Result<Vec<(JobDelay, bool)>, StoreError> {
        let query =
            "SELECT record, done FROM delays WHERE id = ?1 OR id GLOB ?1 || '.*' OR id GLOB ?1 || '@*'";
        let sqlite = |source| self.sqlite(source);
        let mut statement = self.connection.prepare_cached(query).map_err(sqlite)?;
        let rows =
            statement.query_map([job.to_string()], |row| Ok((row.get(0)?, row.get(1)?))).map_err(sqlite)?;
        let rows = rows.collect::<Result<Vec<(String, bool)>, _>>().map_err(sqlite)?;
        let read = rows.iter().map(|(record, done)| {
            let record = serde_json::from_str(record);
            let record = record.map_err(|error| self.malformed(format!("the delay of job {job}"), &error))?;
            Ok((record, *done))
        });
        read.collect()
    }
}

impl Store {
    /// What is kept of jobs that have not left the queue. What is not understood keeps its row, and is told.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) fn open_delays(&self) -> Result<Vec<JobDelay>, StoreError> {
        let rows = self.reader.rows("SELECT id, record FROM delays WHERE NOT done")?;
        let read = rows.iter().filter_map(|(id, record)| {
            serde_json::from_str(record)
                .inspect_err(|error| {
                    tracing::error!(job = id, %error, "what is kept of its delay is not understood; it starts within a minute");
                })
                .ok()
        });
        Ok(read.collect())
    }

    /// Keeps what is known of a job's delay, and what the log says of it.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing is kept.
    pub(crate) fn keep_delay(
        &mut self,
        record: &JobDelay,
        done: bool,
        line: Option<&str>,
    ) -> Result<(), StoreError> {
        let (id, at) = (record.id.key(), now().0 as i64);
        let Some(row) = row(&format!("the delay of job {}", record.id), record) else { return Ok(()) };
        let path = self.reader.path.clone();
        let kept = self.reader.connection.transaction().and_then(|transaction| {
            let statement = "INSERT OR REPLACE INTO delays (id, record, done, at_ms) VALUES (?1, ?2, ?3, ?4)";
            transaction.execute(statement, params![id, row, done, at])?;
            if let Some(line) = line {
                // The log of the thesis has no sentence for it.
                let statement =
                    "INSERT INTO journal (at_ms, job, text, thesis, rsa_nodes) VALUES (?1, ?2, ?3, '', '')";
                transaction.execute(statement, params![at, id, line])?;
            }
            transaction.commit()
        });
        kept.map_err(|source| StoreError::Sqlite { path, source })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_core::schedule::Time;
    use ondeck_core::{Owner, Request};

    use super::*;

    #[test]
    fn delays_are_kept_until_the_job_has_left_the_queue_and_shown_after_that() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = Store::open(directory.path()).unwrap();
        let record = |id: &str| JobDelay {
            id: id.parse().unwrap(),
            owner: Owner { uid: 1000, gid: 1000 },
            account: String::new(),
            work_dir: "/".into(),
            submitted: 7,
            compute_nodes: 1,
            request: Request::default(),
            filesystem: "/scratch".into(),
            reason: "so".into(),
            since: Time(1),
            until: Time(2),
            begin: Some(3),
            ended: None,
        };
        for id in ["4@7", "42@7", "42@7.1"] {
            store.keep_delay(&record(id), false, Some("delayed")).unwrap();
        }
        store.keep_delay(&record("42@7"), true, None).unwrap();
        drop(store);
        let mut store = Store::open(directory.path()).unwrap();
        let open: Vec<String> = store.open_delays().unwrap().iter().map(|delay| delay.id.key()).collect();
        assert_eq!(open, ["4@7", "42@7.1"]);
        let of = |store: &Store| {
            let mut delays = store.reader().delays_of(JobId(42)).unwrap();
            delays.sort_by_key(|(delay, _)| delay.id);
            delays
        };
        assert_eq!(of(&store), [(record("42@7"), true), (record("42@7.1"), false)]);
        let log = store.reader().log(Some("42@7".parse().unwrap()), 10).unwrap();
        assert_eq!(log.iter().map(|line| line.text.as_str()).collect::<Vec<_>>(), ["delayed"]);
        store.forget_before(Time(now().0 + 10_000)).unwrap();
        assert_eq!(of(&store), [(record("42@7.1"), false)]);
    }
}
