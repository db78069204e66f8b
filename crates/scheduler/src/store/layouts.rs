//! What is kept of the layouts of jobs' directories, also of jobs of which the schedule knows nothing.

use ondeck_core::JobId;
use rusqlite::params;

use super::error::StoreError;
use super::{Reader, Store, row};
use crate::clock::now;
use crate::striping::JobLayouts;

impl Reader {
    /// What is kept of all lives of all jobs that had a number, each with whether nothing is to be done any more.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) fn layouts_of(&self, job: JobId) -> Result<Vec<(JobLayouts, bool)>, StoreError> {
        let query =
            "SELECT record, done FROM layouts WHERE id = ?1 OR id GLOB ?1 || '.*' OR id GLOB ?1 || '@*'";
        let sqlite = |source| self.sqlite(source);
        let mut statement = self.connection.prepare_cached(query).map_err(sqlite)?;
        let rows =
            statement.query_map([job.to_string()], |row| Ok((row.get(0)?, row.get(1)?))).map_err(sqlite)?;
        let rows = rows.collect::<Result<Vec<(String, bool)>, _>>().map_err(sqlite)?;
        let read = rows.iter().map(|(record, done)| {
            let record = serde_json::from_str(record);
            let record: JobLayouts =
                record.map_err(|error| self.malformed(format!("the layouts of job {job}"), &error))?;
            let done = *done || record.is_all_over();
            Ok((record, done))
        });
        read.collect()
    }
}

impl Store {
    /// What is kept of jobs of which something is still to be done. What is not understood keeps its row, and is told.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) fn open_layouts(&self) -> Result<Vec<JobLayouts>, StoreError> {
        let rows = self.reader.rows("SELECT id, record FROM layouts WHERE NOT done")?;
        let read = rows.iter().filter_map(|(id, record)| {
            serde_json::from_str(record)
                .inspect_err(|error| {
                    tracing::error!(job = id, %error, "what is kept of its layouts is not understood; they stay as they are");
                })
                .ok()
        });
        Ok(read.collect())
    }

    /// Keeps what is known of a job's layouts, and what the log says of it.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing is kept.
    pub(crate) fn keep_layouts(
        &mut self,
        record: &JobLayouts,
        done: bool,
        lines: &[String],
    ) -> Result<(), StoreError> {
        let (id, at) = (record.id.key(), now().0 as i64);
        let Some(row) = row(&format!("the layouts of job {}", record.id), record) else { return Ok(()) };
        let path = self.reader.path.clone();
        let kept = self.reader.connection.transaction().and_then(|transaction| {
            let statement =
                "INSERT OR REPLACE INTO layouts (id, record, done, at_ms) VALUES (?1, ?2, ?3, ?4)";
            transaction.execute(statement, params![id, row, done, at])?;
            for line in lines {
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
    use ondeck_core::{Incarnation, Owner, StripingRequest};

    use super::*;

    fn key(id: &str) -> Incarnation {
        id.parse().unwrap()
    }

    #[test]
    fn layouts_are_kept_until_nothing_is_to_be_done_and_shown_after_that() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = Store::open(directory.path()).unwrap();
        let record = |id: &str| JobLayouts {
            id: key(id),
            owner: Owner { uid: 1000, gid: 1000 },
            account: String::new(),
            work_dir: "/".into(),
            submitted: 7,
            nodes: vec!["c1".parse().unwrap()],
            tasks: None,
            array: None,
            program: String::new(),
            since: Time(1),
            ended: None,
            request: StripingRequest::default(),
            directories: Vec::new(),
            watched_on: Vec::new(),
            notes: vec!["so".into()],
            not_taken_back: None,
        };
        for id in ["4@7", "42@7", "42@7.1"] {
            store.keep_layouts(&record(id), false, &["set".to_owned()]).unwrap();
        }
        store.keep_layouts(&record("42@7"), true, &["taken back".to_owned()]).unwrap();
        drop(store);
        let mut store = Store::open(directory.path()).unwrap();
        let open: Vec<_> = store.open_layouts().unwrap().iter().map(|record| record.id.key()).collect();
        assert_eq!(open, ["4@7", "42@7.1"]);
        let all = store.reader().layouts_of(JobId(42)).unwrap();
        let all: Vec<_> = all.iter().map(|(record, done)| (record.id.key(), *done)).collect();
        assert!(all.len() == 2 && all.contains(&("42@7".to_owned(), true)), "{all:?}");
        let log = store.reader().log(Some(key("42@7")), 10).unwrap();
        assert_eq!(log.iter().map(|line| line.text.as_str()).collect::<Vec<_>>(), ["set", "taken back"]);
        // What is still to be done is not forgotten.
        store.forget_before(Time(u64::MAX / 2)).unwrap();
        assert_eq!(store.reader().layouts_of(JobId(42)).unwrap().len(), 1);
        assert!(store.reader().log(Some(key("42@7")), 10).unwrap().is_empty());
    }
}
