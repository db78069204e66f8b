//! Which journal it is: its random name, how many times it was written, and what it has replaced.
//!
//! Agents obey one journal, and no older copy of it ([decision 0016]). So a journal has a name that no other one has, and a
//! number that grows with each commit; both go with every order. A take-over gives it a new name, because what the agents
//! know of the old one's later states may be lost for good.
//!
//! [decision 0016]: https://github.com/ondeck-hpc/ondeck/blob/main/docs/decisions/0016-agents-guard-results-and-obey-one-scheduler.md

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ondeck_core::NodeName;
use ondeck_core::schedule::{Job, Node, Time};
use ondeck_ramdisk::Secret;
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::{Store, StoreError, row};

/// The name of the counter of commits.
const COMMITS: &str = "commits";

/// Which journal it is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Its random name.
    pub journal: String,
    /// When it began; zero if a former version began it, which had no name for it.
    pub began: Time,
    /// The journals whose agents it may claim: a person has confirmed that it replaces them.
    pub replaced: BTreeSet<String>,
    /// How many times it was written.
    pub commits: Arc<AtomicU64>,
}

fn new_name() -> std::io::Result<String> {
    Ok(Secret::new()?.password("journal")[..32].to_owned())
}

/// Gives a journal its name if it has none.
pub(super) fn begin(connection: &mut Connection, began: Time, name: &str) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    for (key, value) in [("journal", name), ("began", &began.0.to_string())] {
        transaction.execute("INSERT OR IGNORE INTO identity (name, value) VALUES (?1, ?2)", [key, value])?;
    }
    transaction.commit()
}

/// Counts a commit, in the transaction that it is.
pub(super) fn count(transaction: &Transaction<'_>, commits: u64) -> rusqlite::Result<()> {
    let statement = "INSERT OR REPLACE INTO counters (name, value) VALUES (?1, ?2)";
    transaction.prepare_cached(statement)?.execute(params![COMMITS, commits as i64]).map(drop)
}

impl Store {
    /// A name for a journal that has none yet.
    ///
    /// # Errors
    /// [`StoreError::File`] if the kernel gives no random numbers.
    pub(super) fn new_name(&self) -> Result<String, StoreError> {
        new_name().map_err(|source| StoreError::File { path: self.reader.path.clone(), source })
    }

    /// Which journal this is.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn identity(&self) -> Result<Identity, StoreError> {
        let value = |name: &str| -> Result<String, StoreError> {
            let query = "SELECT value FROM identity WHERE name = ?1";
            let found: Option<String> = self
                .reader
                .connection
                .query_row(query, [name], |row| row.get(0))
                .optional()
                .map_err(|source| self.reader.sqlite(source))?;
            found.ok_or_else(|| self.reader.malformed("itself".into(), &format!("its {name} is missing")))
        };
        let began = value("began")?;
        let began = began.parse().map_err(|error| self.reader.malformed("its beginning".into(), &error))?;
        let replaced =
            self.reader.rows("SELECT journal, '' FROM replaced")?.into_iter().map(|(name, _)| name);
        let query = "SELECT value FROM counters WHERE name = ?1";
        let commits: Option<i64> = self
            .reader
            .connection
            .query_row(query, [COMMITS], |row| row.get(0))
            .optional()
            .map_err(|source| self.reader.sqlite(source))?;
        self.commits.store(commits.unwrap_or(0) as u64, Ordering::SeqCst);
        Ok(Identity {
            journal: value("journal")?,
            began: Time(began),
            replaced: replaced.collect(),
            commits: Arc::clone(&self.commits),
        })
    }

    /// Replaces other journals, and what this one said of RAM disks: it gets a new name, and the jobs that are `dropped` are
    /// set aside. `kept` and `nodes` are as they are from now on. If what it said stands, it did not begin anew.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing has changed.
    pub fn take_over(
        &mut self,
        replaced: &BTreeSet<String>,
        began: Option<Time>,
        dropped: &[Job],
        kept: &[Job],
        nodes: &[(NodeName, Node)],
    ) -> Result<(), StoreError> {
        let (name, path, now) = (self.new_name()?, self.reader.path.clone(), crate::clock::now());
        let commits = self.commits.load(Ordering::SeqCst) + 1;
        let done = self.reader.connection.transaction().and_then(|transaction| {
            let own = "INSERT OR IGNORE INTO replaced SELECT value FROM identity WHERE name = 'journal'";
            transaction.execute(own, [])?;
            for journal in replaced {
                transaction.execute("INSERT OR IGNORE INTO replaced (journal) VALUES (?1)", [journal])?;
            }
            let began = began.map(|began| ("began", began.0.to_string()));
            for (key, value) in [("journal", name)].into_iter().chain(began) {
                transaction.execute("UPDATE identity SET value = ?2 WHERE name = ?1", [key, &value])?;
            }
            for job in dropped {
                let aside = "INSERT INTO set_aside (kind, id, row, why, at_ms)
                    SELECT 'job before a take-over', id, job, 'what the agents have counts', ?2 FROM jobs WHERE id = ?1";
                transaction.execute(aside, params![job.id.key(), now.0 as i64])?;
                transaction.execute("DELETE FROM jobs WHERE id = ?1", [job.id.key()])?;
            }
            for job in kept {
                if let Some(row) = row(&format!("job {}", job.id), job) {
                    let statement = "INSERT OR REPLACE INTO jobs (id, job) VALUES (?1, ?2)";
                    transaction.execute(statement, params![job.id.key(), row])?;
                }
            }
            for (name, node) in nodes {
                if let Some(row) = row(name.as_str(), node) {
                    let statement = "INSERT OR REPLACE INTO nodes (name, node) VALUES (?1, ?2)";
                    transaction.execute(statement, params![name.as_str(), row])?;
                }
            }
            count(&transaction, commits)?;
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })?;
        self.commits.store(commits, Ordering::SeqCst);
        Ok(())
    }

    /// Leaves one file, which can be copied: nothing is written after this.
    ///
    /// # Errors
    /// [`StoreError`]; what was kept is kept, and the files beside the journal belong to it.
    pub fn close(&mut self) -> Result<(), StoreError> {
        let end = || {
            super::log::bring_in(&self.reader.connection)?;
            self.reader.connection.execute_batch("PRAGMA journal_mode=DELETE")
        };
        end().map_err(|source| self.reader.sqlite(source))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_has_a_name_of_its_own_and_counts_its_commits() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = Store::open(one.path()).unwrap().identity().unwrap();
        let again = Store::open(one.path()).unwrap().identity().unwrap();
        let others = Store::open(other.path()).unwrap().identity().unwrap();
        assert_eq!((&first.journal, first.began), (&again.journal, again.began));
        assert!(first.journal != others.journal && first.began > Time(0));
        let mut store = Store::open(one.path()).unwrap();
        store.identity().unwrap();
        let replaced = [others.journal.clone()].into();
        store.take_over(&replaced, Some(Time(1)), &[], &[], &[]).unwrap();
        let after = store.identity().unwrap();
        assert!(after.journal != first.journal);
        assert_eq!(after.replaced, [first.journal, others.journal].into());
        assert_eq!((after.commits.load(Ordering::SeqCst), after.began), (1, Time(1)));
        store.take_over(&BTreeSet::new(), None, &[], &[], &[]).unwrap();
        let beside = store.identity().unwrap();
        assert!(beside.journal != after.journal && beside.replaced.contains(&after.journal));
        assert_eq!(beside.began, Time(1));
    }

    #[test]
    fn a_clean_end_leaves_one_file_that_can_be_copied() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut store = Store::open(one.path()).unwrap();
        let name = store.identity().unwrap().journal;
        store.close().unwrap();
        // Also while somebody still holds it.
        let files: BTreeSet<String> = std::fs::read_dir(one.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(files, ["journal.sqlite".to_owned(), "lock".to_owned()].into());
        std::fs::copy(one.path().join("journal.sqlite"), other.path().join("journal.sqlite")).unwrap();
        assert_eq!(Store::open(other.path()).unwrap().identity().unwrap().journal, name);
    }

    #[test]
    fn a_journal_that_can_not_be_read_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        Store::open(dir.path()).unwrap().close().unwrap();
        let path = dir.path().join("journal.sqlite");
        let mut bytes = std::fs::read(&path).unwrap();
        for damaged in [vec![0x5a; 4096], {
            bytes[100..3000].fill(0xa5);
            bytes
        }] {
            std::fs::write(&path, damaged).unwrap();
            let told = Store::open(dir.path()).err().unwrap().to_string();
            assert!(told.contains("--take-over") && told.contains("journal.sqlite"), "{told}");
        }
    }
}
