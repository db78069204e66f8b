//! What jobs' runs have left in their directories: the history of the layouts, of each user by program and directory.
//!
//! It is bounded three times, and the oldest goes first: for a program in a directory no more runs matter, a user can't take the
//! place of the others, and the journal does not grow without end.

use ondeck_core::Incarnation;
use ondeck_layout::history::Run;
use rusqlite::{Row, params};

use super::error::StoreError;
use super::{Reader, Store, row};

/// The most runs of a program in a directory: with half-lives of a few runs, older ones hardly count.
pub(crate) const MOST_OF_PROGRAM: u32 = 32;

/// The most runs of a user.
pub(crate) const MOST_OF_USER: u32 = 500;

/// The most runs of all users.
pub(crate) const MOST_RUNS: u32 = 20_000;

/// The most runs of an answer: a few kilobytes each.
pub(crate) const MOST_TOLD: u32 = 500;

/// How long a run is kept.
const KEPT_MS: u64 = 400 * 24 * 3600 * 1000;

/// A run, and what it is kept under.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeptRun {
    /// Whose it is.
    pub uid: u32,
    /// Which life of which job.
    pub job: Incarnation,
    /// Its program.
    pub program: String,
    /// The directory, with `#` for each of its numbers.
    pub directory: String,
    /// What it has left.
    pub run: Run,
}

/// Which runs are meant; what is not said is anything.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunFilter {
    /// Whose.
    pub uid: Option<u32>,
    /// Of which program.
    pub program: Option<String>,
    /// In which directory, with `#` for each of its numbers.
    pub directory: Option<String>,
}

const MEANT: &str =
    "(?1 IS NULL OR uid = ?1) AND (?2 IS NULL OR program = ?2) AND (?3 IS NULL OR directory = ?3)";

impl Reader {
    /// The runs of one user's program in a directory, for the next one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) fn runs_of(&self, uid: u32, program: &str, directory: &str) -> Result<Vec<Run>, StoreError> {
        let query = "SELECT run FROM layout_runs WHERE uid = ?1 AND program = ?2 AND directory = ?3";
        let sqlite = |source| self.sqlite(source);
        let mut statement = self.connection.prepare_cached(query).map_err(sqlite)?;
        let rows = statement.query_map(params![uid, program, directory], |row| row.get(0)).map_err(sqlite)?;
        let rows = rows.collect::<Result<Vec<String>, _>>().map_err(sqlite)?;
        rows.iter().map(|run| self.run(run)).collect()
    }

    /// The newest runs that are meant, at most [`MOST_TOLD`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) fn runs(&self, filter: &RunFilter) -> Result<Vec<KeptRun>, StoreError> {
        let query = format!(
            "SELECT uid, job, program, directory, run FROM layout_runs WHERE {MEANT} ORDER BY number DESC LIMIT {MOST_TOLD}"
        );
        let sqlite = |source| self.sqlite(source);
        let mut statement = self.connection.prepare_cached(&query).map_err(sqlite)?;
        let words = |row: &Row<'_>| -> rusqlite::Result<(u32, [String; 4])> {
            Ok((row.get(0)?, [row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?]))
        };
        let RunFilter { uid, program, directory } = filter;
        let rows = statement.query_map(params![uid, program, directory], words).map_err(sqlite)?;
        let rows = rows.collect::<Result<Vec<_>, _>>().map_err(sqlite)?;
        let read = rows.into_iter().map(|(uid, [job, program, directory, run])| {
            let of = || format!("the history of job {job}");
            let id = job.parse().map_err(|error| self.malformed(of(), &error))?;
            Ok(KeptRun { uid, job: id, run: self.run(&run)?, program, directory })
        });
        read.collect()
    }

    fn run(&self, text: &str) -> Result<Run, StoreError> {
        serde_json::from_str(text).map_err(|error| self.malformed("a run of the history".into(), &error))
    }
}

impl Store {
    /// Keeps a run, in place of what was kept of the same job in a directory of this name; the oldest make room for it.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing is kept.
    pub(crate) fn keep_run(&mut self, kept: &KeptRun) -> Result<(), StoreError> {
        let KeptRun { uid, job, program, directory, run } = kept;
        let Some(text) = row(&format!("the history of job {job}"), run) else { return Ok(()) };
        let (job, at) = (job.key(), run.ended_ms as i64);
        let path = self.reader.path.clone();
        let done = self.reader.connection.transaction().and_then(|transaction| {
            transaction.execute(
                "INSERT OR REPLACE INTO layout_runs (uid, program, directory, job, at_ms, run)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                params![uid, program, directory, job, at, text],
            )?;
            let oldest = "DELETE FROM layout_runs WHERE number IN (SELECT number FROM layout_runs";
            transaction.execute(
                &format!(
                    "{oldest} WHERE uid = ?1 AND program = ?2 AND directory = ?3
                     ORDER BY number DESC LIMIT -1 OFFSET {MOST_OF_PROGRAM})"
                ),
                params![uid, program, directory],
            )?;
            transaction.execute(
                &format!("{oldest} WHERE uid = ?1 ORDER BY number DESC LIMIT -1 OFFSET {MOST_OF_USER})"),
                [uid],
            )?;
            transaction
                .execute(&format!("{oldest} ORDER BY number DESC LIMIT -1 OFFSET {MOST_RUNS})"), [])?;
            transaction
                .execute("DELETE FROM layout_runs WHERE at_ms < ?1", [at.saturating_sub(KEPT_MS as i64)])?;
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })
    }

    /// Forgets the runs that are meant; how many there were.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing is forgotten.
    pub(crate) fn forget_runs(&mut self, filter: &RunFilter) -> Result<u64, StoreError> {
        let RunFilter { uid, program, directory } = filter;
        let forget = format!("DELETE FROM layout_runs WHERE {MEANT}");
        let forgotten = self.reader.connection.execute(&forget, params![uid, program, directory]);
        forgotten.map(|rows| rows as u64).map_err(|source| self.reader.sqlite(source))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::{Duration, Instant};

    use ondeck_core::Bytes;
    use ondeck_layout::census::Census;
    use ondeck_layout::classify::RunShape;
    use ondeck_layout::history::recall;

    use super::*;

    fn kept(uid: u32, program: &str, job: u32) -> KeptRun {
        let mut census = Census::default();
        for rank in 0..64 {
            for kind in 0..16u8 {
                let name = format!("a-rather-long-name-of-kind-{}/rank-{rank}", char::from(b'a' + kind));
                census.add_written(name.as_bytes(), Bytes(1 << 30), Some(1000));
            }
        }
        let shape = RunShape { nodes: 4, tasks: 64, lasted_ms: 100_000 };
        KeptRun {
            uid,
            job: format!("{job}@7").parse().unwrap(),
            program: program.to_owned(),
            directory: "/scratch/case-#".to_owned(),
            run: Run { ended_ms: 1_700_000_000_000 + u64::from(job), shape, tally: census.tally() },
        }
    }

    fn of(uid: u32) -> RunFilter {
        RunFilter { uid: Some(uid), ..RunFilter::default() }
    }

    #[test]
    fn a_run_is_kept_once_until_it_is_too_old_or_one_too_many_or_forgotten_by_its_user() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(folder.path()).unwrap();
        store.keep_run(&kept(1, "solver", 1)).unwrap();
        store.keep_run(&kept(1, "solver", 1)).unwrap();
        store.keep_run(&kept(2, "solver", 2)).unwrap();
        drop(store);
        let mut store = Store::open(folder.path()).unwrap();
        assert_eq!(store.reader().runs(&of(1)).unwrap(), [kept(1, "solver", 1)]);
        assert_eq!(store.reader().runs(&RunFilter::default()).unwrap().len(), 2);
        assert_eq!(
            store.reader().runs_of(1, "solver", "/scratch/case-#").unwrap(),
            [kept(1, "solver", 1).run]
        );
        for (uid, program, directory) in
            [(1, "other", "/scratch/case-#"), (1, "solver", "/scratch"), (3, "solver", "/scratch/case-#")]
        {
            assert!(store.reader().runs_of(uid, program, directory).unwrap().is_empty());
        }
        for job in 3..3 + MOST_OF_PROGRAM + 5 {
            store.keep_run(&kept(1, "solver", job)).unwrap();
        }
        let runs = store.reader().runs(&of(1)).unwrap();
        assert_eq!(runs.len(), MOST_OF_PROGRAM as usize);
        assert_eq!(runs[0], kept(1, "solver", 2 + MOST_OF_PROGRAM + 5), "the newest comes first");
        let other = RunFilter { program: Some("other".into()), ..of(1) };
        assert_eq!(store.forget_runs(&other).unwrap(), 0);
        assert_eq!(store.forget_runs(&of(1)).unwrap(), u64::from(MOST_OF_PROGRAM));
        assert_eq!(store.reader().runs(&RunFilter::default()).unwrap(), [kept(2, "solver", 2)]);
        let mut later = kept(3, "x", 3);
        later.run.ended_ms += KEPT_MS + 10;
        store.keep_run(&later).unwrap();
        assert_eq!(store.reader().runs(&RunFilter::default()).unwrap(), [later]);
    }

    #[test]
    fn an_answer_takes_at_most_10_ms_with_10000_rows_of_history() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(folder.path()).unwrap();
        // As many as users and programs may have; one transaction, or the disk would be what is measured.
        let transaction = store.reader.connection.transaction().unwrap();
        let text = serde_json::to_string(&kept(0, "", 0).run).unwrap();
        for number in 0..10_000u32 {
            let row = params![number / 500, format!("solver-{}", number / 32 % 16), number.to_string(), text];
            let insert = "INSERT INTO layout_runs (uid, program, directory, job, at_ms, run)
                VALUES (?1, ?2, '/scratch/case-#', ?3, 0, ?4)";
            transaction.execute(insert, row).unwrap();
        }
        transaction.commit().unwrap();
        let answer = |program: &str| {
            let began = Instant::now();
            let runs = store.reader().runs_of(7, program, "/scratch/case-#").unwrap();
            let told = recall(&runs, 1_700_000_100_000).unwrap();
            (began.elapsed(), runs.len(), told)
        };
        let answers: Vec<_> = (0..16).map(|program| answer(&format!("solver-{program}"))).collect();
        assert!(answers.iter().all(|(_, runs, told)| *runs >= 16 && told.used.is_some()), "{answers:?}");
        // Others use this machine; what takes longer each time is too slow.
        let fastest = answers.iter().map(|(took, ..)| *took).min().unwrap();
        let limit = Duration::from_millis(if cfg!(debug_assertions) { 40 } else { 10 });
        assert!(fastest < limit, "{fastest:?}");
    }
}
