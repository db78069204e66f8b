//! What outlives the daemon: SQLite, with an append-only journal beside the current state.
//!
//! Everything that one event changed is one transaction, and is on disk before anything is done about it. So after a
//! crash the daemon knows at least what it has begun.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ondeck_api::scheduler::{LogLine, Usage};
use ondeck_api::wire::Names;
use ondeck_core::queue::JobNameError;
use ondeck_core::schedule::{Effects, Identity, Job, JobState, Node, RsaState, Schedule, Time};
use ondeck_core::{Epoch, Incarnation, JobId, Layout, NodeName, RamDiskId};
use ondeck_ramdisk::Secret;
use rusqlite::{Connection, ErrorCode, OptionalExtension, Transaction, params};

use crate::clock::KeptClock;

mod identity;
mod log;

pub use identity::Identity as JournalIdentity;

/// The version of the tables. A later daemon migrates an older one's; an older daemon refuses a later one's.
const VERSION: i64 = 3;

const TABLES: &str = "
    CREATE TABLE jobs (id TEXT PRIMARY KEY, job TEXT NOT NULL);
    CREATE TABLE past_jobs (id TEXT PRIMARY KEY, job TEXT NOT NULL, ended_ms INTEGER NOT NULL);
    CREATE TABLE nodes (name TEXT PRIMARY KEY, node TEXT NOT NULL);
    CREATE TABLE ramdisks (id TEXT PRIMARY KEY, job TEXT NOT NULL, secret TEXT NOT NULL, layout TEXT);
    CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
    CREATE TABLE journal (
        number INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL,
        job TEXT, job_state TEXT, rsa_state TEXT, text TEXT NOT NULL);
    CREATE TABLE used (uid INTEGER NOT NULL, account TEXT NOT NULL, day INTEGER NOT NULL,
        node_seconds REAL NOT NULL, allocations INTEGER NOT NULL, PRIMARY KEY (uid, account, day));
    CREATE TABLE strays (node TEXT PRIMARY KEY, ramdisks TEXT NOT NULL);
    CREATE INDEX journal_of_job ON journal (job, number);
    CREATE TRIGGER journal_is_kept BEFORE UPDATE ON journal BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
";

/// From version 1 to 2.
const STRAYS: &str = "CREATE TABLE strays (node TEXT PRIMARY KEY, ramdisks TEXT NOT NULL);";

/// Rows that were not understood, as they were. A later version of the daemon, or a person, may understand them: nothing
/// removes them but a person. Daemons that don't know this table leave it alone.
const SET_ASIDE: &str = "CREATE TABLE IF NOT EXISTS set_aside
    (kind TEXT NOT NULL, id TEXT NOT NULL, row TEXT NOT NULL, why TEXT NOT NULL, at_ms INTEGER NOT NULL)";

/// What RSA nodes had of the results of jobs when they were last asked, as JSON. Daemons that don't know this table leave
/// it alone.
const PARTS: &str = "CREATE TABLE IF NOT EXISTS parts
    (job TEXT NOT NULL, node TEXT NOT NULL, at_ms INTEGER NOT NULL, names TEXT NOT NULL, PRIMARY KEY (job, node))";

/// Why the store can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file or its directory.
    #[error("can't use {}: {source}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// SQLite.
    #[error("the journal {}: {source}", .path.display())]
    Sqlite {
        /// Which.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// It is damaged, or no journal.
    #[error(
        "the journal {} can't be read: {why}; put back the newest copy that you have, with the files beside it. If there is \
         none, move it away and start `ondeck serve --take-over`: the RAM disks that the agents have are found, and no \
         results are lost",
        .path.display()
    )]
    Damaged {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// It is gone, but what SQLite keeps beside it is there. Opening it would remove that.
    #[error(
        "the journal {} is {how}, but {} is there, which belongs to it and has its newest state; nothing was changed. Copy \
         the directory away before anything else, then put the journal back, beside the same -wal file. If there is no \
         copy of it, move both away and start `ondeck serve --take-over`: the RAM disks that the agents have are found, \
         and no results are lost",
        .path.display(), .log.display()
    )]
    Gone {
        /// Which.
        path: PathBuf,
        /// Missing or empty.
        how: &'static str,
        /// What is there.
        log: PathBuf,
    },
    /// The journal or its log is a copy of another state.
    #[error(
        "the journal {} and the -wal file beside it do not belong together: one of them is a copy of another state; nothing \
         was changed. Copy the directory away before anything else, then put back both as they were at the same time. If \
         there is no such copy, move both away and start `ondeck serve --take-over`: the RAM disks that the agents have are \
         found, and no results are lost",
        .path.display()
    )]
    Mixed {
        /// Which.
        path: PathBuf,
    },
    /// It was written by a later version.
    #[error(
        "the journal {} was written by a later version (its tables are of version {found}, this daemon knows {VERSION}); \
         start that version again",
        .path.display()
    )]
    Later {
        /// Which.
        path: PathBuf,
        /// The version of its tables.
        found: i64,
    },
    /// What stands in it is not understood.
    #[error("the journal {}: can't understand what is kept of {what}: {why}", .path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// Of what.
        what: String,
        /// Why.
        why: String,
    },
    /// Another daemon has it.
    #[error("another scheduler is running in {}", .path.display())]
    Running {
        /// The directory.
        path: PathBuf,
    },
}

impl StoreError {
    /// What helps against an error of the disk, as the end of a sentence.
    pub(crate) fn remedy(&self) -> &'static str {
        let StoreError::Sqlite { source, .. } = self else { return "" };
        match source.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DiskFull) => "; make room there. Nothing is lost meanwhile",
            Some(rusqlite::ErrorCode::ReadOnly) => "; make it writable. Nothing is lost meanwhile",
            Some(rusqlite::ErrorCode::SystemIoFailure) => "; mend that disk. Nothing is lost meanwhile",
            _ => "",
        }
    }
}

/// The store of one daemon.
pub struct Store {
    path: PathBuf,
    connection: Connection,
    /// How many times it was written.
    commits: Arc<AtomicU64>,
    _only: std::fs::File,
}

/// What was kept.
pub struct Kept {
    /// The jobs.
    pub jobs: Vec<Job>,
    /// Who the jobs were of which nothing is to be done any more.
    pub former: Vec<(Incarnation, Identity)>,
    /// The nodes.
    pub nodes: Vec<(NodeName, Node)>,
    /// What is left on nodes that lend nothing.
    pub strays: BTreeMap<NodeName, BTreeSet<RamDiskId>>,
    /// The greatest task number.
    pub last_task: u64,
    /// The greatest epoch.
    pub last_epoch: Epoch,
}

impl Store {
    /// Opens the store in a directory, or makes it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(directory: &Path) -> Result<Store, StoreError> {
        let unusable = |source| StoreError::File { path: directory.to_owned(), source };
        ondeck_agent::ramdisk::private_directory(directory).map_err(unusable)?;
        let lock = directory.join("lock");
        let only = std::fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(lock)
            .map_err(unusable)?;
        match rustix::fs::flock(&only, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(StoreError::Running { path: directory.to_owned() });
            }
            Err(error) => return Err(unusable(error.into())),
        }
        let path = directory.join("journal.sqlite");
        let sqlite = |source: rusqlite::Error| match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
                StoreError::Damaged { path: path.clone(), why: source.to_string() }
            }
            _ => StoreError::Sqlite { path: path.clone(), source },
        };
        refuse_if_gone(directory, &path)?;
        keep_private(directory).map_err(unusable)?;
        let mut connection = Connection::open(&path).map_err(sqlite)?;
        if !log::belongs(&connection, &path).map_err(sqlite)? {
            return Err(StoreError::Mixed { path });
        }
        // A transaction is on disk when it is said to be; readers do not wait for writers.
        let pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;
            PRAGMA wal_autocheckpoint=0;";
        connection.execute_batch(pragmas).map_err(sqlite)?;
        let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(sqlite)?;
        match found {
            0 => {
                let transaction = connection.transaction().map_err(sqlite)?;
                transaction.execute_batch(TABLES).map_err(sqlite)?;
                transaction.pragma_update(None, "user_version", VERSION).map_err(sqlite)?;
                transaction.commit().map_err(sqlite)?;
            }
            2 => connection.pragma_update(None, "user_version", VERSION).map_err(sqlite)?,
            1 => {
                let transaction = connection.transaction().map_err(sqlite)?;
                transaction.execute_batch(STRAYS).map_err(sqlite)?;
                transaction.pragma_update(None, "user_version", VERSION).map_err(sqlite)?;
                transaction.commit().map_err(sqlite)?;
            }
            VERSION => {}
            found => return Err(StoreError::Later { path, found }),
        }
        connection.execute_batch(SET_ASIDE).map_err(sqlite)?;
        connection.execute_batch(PARTS).map_err(sqlite)?;
        let check: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(sqlite)?;
        if check != "ok" {
            return Err(StoreError::Damaged { path, why: check });
        }
        log::begin_anew(&connection).map_err(sqlite)?;
        let mut store = Store { path, connection, commits: Arc::default(), _only: only };
        // A journal of a former version knows all that there was before it had a name.
        let began = if found == 0 { crate::clock::wall_clock() } else { Time(0) };
        let name = store.new_name()?;
        identity::begin(&mut store.connection, began, &name).map_err(|source| store.sqlite(source))?;
        Ok(store)
    }

    fn rows(&self, query: &str) -> Result<Vec<(String, String)>, StoreError> {
        let read = || -> rusqlite::Result<Vec<(String, String)>> {
            let mut statement = self.connection.prepare(query)?;
            statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        };
        read().map_err(|source| self.sqlite(source))
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
            self.path.display()
        );
        let from = match kind {
            "job" => "DELETE FROM jobs WHERE id = ?1",
            "node" => "DELETE FROM nodes WHERE name = ?1",
            _ => "DELETE FROM strays WHERE node = ?1",
        };
        let path = self.path.clone();
        let done = self.connection.transaction().and_then(|transaction| {
            let into = "INSERT INTO set_aside (kind, id, row, why, at_ms) VALUES (?1, ?2, ?3, ?4, ?5)";
            transaction.execute(into, params![kind, id, row, why, crate::daemon::now().0 as i64])?;
            transaction.execute(from, [id])?;
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })
    }

    fn sqlite(&self, source: rusqlite::Error) -> StoreError {
        StoreError::Sqlite { path: self.path.clone(), source }
    }

    /// What an earlier daemon kept. One row that is not understood must not keep the others from being seen to: it is
    /// set aside, and told.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn load(&mut self) -> Result<Kept, StoreError> {
        let mut jobs: Vec<Job> = Vec::new();
        for (id, row) in self.rows("SELECT id, job FROM jobs")? {
            match serde_json::from_str::<Job>(&row) {
                Ok(job) => jobs.push(job),
                Err(error) => self.set_aside("job", &id, &row, &error)?,
            }
        }
        let mut nodes: Vec<(NodeName, Node)> = Vec::new();
        for (name, row) in self.rows("SELECT name, node FROM nodes")? {
            match (name.parse::<NodeName>(), serde_json::from_str(&row)) {
                (Ok(name), Ok(node)) => nodes.push((name, node)),
                (Err(error), _) => self.set_aside("node", &name, &row, &error)?,
                (Ok(parsed), Err(error)) => {
                    self.set_aside("node", &name, &row, &error)?;
                    let node = promised_by(&jobs, &parsed);
                    if let Some(row) = self::row(&name, &node) {
                        let statement = "INSERT INTO nodes (name, node) VALUES (?1, ?2)";
                        self.connection
                            .execute(statement, [&name, &row])
                            .map_err(|source| self.sqlite(source))?;
                    }
                    nodes.push((parsed, node));
                }
            }
        }
        let mut strays = BTreeMap::new();
        for (name, row) in self.rows("SELECT node, ramdisks FROM strays")? {
            match (name.parse::<NodeName>(), serde_json::from_str(&row)) {
                (Ok(name), Ok(left)) => drop(strays.insert(name, left)),
                (Err(error), _) => self.set_aside("stray", &name, &row, &error)?,
                (_, Err(error)) => self.set_aside("stray", &name, &row, &error)?,
            }
        }
        let counter = |name: &str| -> Result<u64, StoreError> {
            let query = "SELECT value FROM counters WHERE name = ?1";
            let found: Option<i64> = self
                .connection
                .query_row(query, [name], |row| row.get(0))
                .optional()
                .map_err(|source| self.sqlite(source))?;
            Ok(found.map_or(0, |value| value as u64))
        };
        let former = self.former()?;
        Ok(Kept {
            jobs,
            former,
            nodes,
            strays,
            last_task: counter("task")?,
            last_epoch: Epoch(counter("epoch")?),
        })
    }

    fn malformed(&self, what: String, why: &dyn std::fmt::Display) -> StoreError {
        StoreError::Malformed { path: self.path.clone(), what, why: why.to_string() }
    }

    /// Who the jobs were of which nothing is to be done any more. One that is not understood is left out, and told:
    /// nothing of it is waited for, and it keeps its row.
    fn former(&self) -> Result<Vec<(Incarnation, Identity)>, StoreError> {
        // There may be many, and a row is long.
        let query = "SELECT id, json_extract(job, '$.owner.uid'), json_extract(job, '$.submitted'),
                coalesce(json_extract(job, '$.noted'), '[]')
            FROM past_jobs WHERE json_valid(job)";
        let read = || -> rusqlite::Result<Vec<(String, i64, i64, String)>> {
            let mut statement = self.connection.prepare(query)?;
            let columns = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
            statement.query_map([], columns)?.collect()
        };
        let rows = read().map_err(|source| self.sqlite(source))?;
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

    /// What was kept of the clock, if anything was, and the last time that was noted.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn clock(&self) -> Result<(Option<KeptClock>, Time), StoreError> {
        let read = || -> rusqlite::Result<(Option<KeptClock>, Time)> {
            let counter = |name: &str| -> rusqlite::Result<Option<i64>> {
                let query = "SELECT value FROM counters WHERE name = ?1";
                self.connection.query_row(query, [name], |row| row.get(0)).optional()
            };
            let kept = match (counter("clock shift")?, counter("clock ahead")?) {
                (Some(shift_ms), Some(ahead_ms)) => {
                    Some(KeptClock { boot: counter("clock boot")?, shift_ms, ahead_ms })
                }
                _ => None,
            };
            // A former version may have gone on with it since.
            let query = "SELECT at_ms FROM journal ORDER BY number DESC LIMIT 1";
            let noted: Option<i64> = self.connection.query_row(query, [], |row| row.get(0)).optional()?;
            let last = counter("clock last")?.max(noted).unwrap_or(0);
            Ok((kept, Time(last as u64)))
        };
        read().map_err(|source| self.sqlite(source))
    }

    /// Keeps what the next daemon needs to know of the clock.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn keep_clock(&mut self, clock: KeptClock) -> Result<(), StoreError> {
        let path = self.path.clone();
        let boot = clock.boot.map(|boot| ("clock boot", boot));
        let done = self.connection.transaction().and_then(|transaction| {
            transaction.execute("DELETE FROM counters WHERE name = 'clock boot'", [])?;
            let values = [("clock shift", clock.shift_ms), ("clock ahead", clock.ahead_ms)];
            for (name, value) in values.into_iter().chain(boot) {
                let statement = "INSERT OR REPLACE INTO counters (name, value) VALUES (?1, ?2)";
                transaction.execute(statement, params![name, value])?;
            }
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })
    }

    /// Keeps what an event changed.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing of it is kept, and nothing may be done.
    pub fn keep(&mut self, now: Time, schedule: &Schedule, effects: &Effects) -> Result<(), StoreError> {
        let path = self.path.clone();
        let commits = self.commits.load(Ordering::SeqCst) + 1;
        let keep = |transaction: &Transaction<'_>| -> rusqlite::Result<()> {
            for id in &effects.jobs {
                match schedule.jobs().get(id) {
                    Some(job) => {
                        let Some(row) = row(&format!("job {id}"), job) else { continue };
                        let statement = "INSERT OR REPLACE INTO jobs (id, job) VALUES (?1, ?2)";
                        transaction.prepare_cached(statement)?.execute(params![id.key(), row])?;
                    }
                    None => {
                        transaction.execute("DELETE FROM jobs WHERE id = ?1", [id.key()])?;
                    }
                }
            }
            for job in &effects.gone {
                let Some(row) = row(&format!("job {}", job.id), job) else { continue };
                let statement = "INSERT OR REPLACE INTO past_jobs (id, job, ended_ms) VALUES (?1, ?2, ?3)";
                transaction.execute(statement, params![job.id.key(), row, now.0 as i64])?;
                transaction.execute("DELETE FROM ramdisks WHERE job = ?1", [job.id.key()])?;
                if job.lost_on.is_empty() {
                    transaction.execute("DELETE FROM parts WHERE job = ?1", [job.id.key()])?;
                }
            }
            for used in &effects.used {
                let statement = "INSERT INTO used (uid, account, day, node_seconds, allocations)
                    VALUES (?1, ?2, ?3, ?4, 1) ON CONFLICT DO UPDATE
                    SET node_seconds = node_seconds + excluded.node_seconds, allocations = allocations + 1";
                let day = (now.0 / 86_400_000) as i64;
                transaction.execute(statement, params![used.uid, used.account, day, used.node_seconds])?;
            }
            for name in &effects.nodes {
                if let Some(row) = schedule.nodes().get(name).and_then(|node| row(name.as_str(), node)) {
                    let statement = "INSERT OR REPLACE INTO nodes (name, node) VALUES (?1, ?2)";
                    transaction.execute(statement, params![name.as_str(), row])?;
                }
                match schedule.strays().get(name) {
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
            for change in &effects.changes {
                let statement = "INSERT INTO journal (at_ms, job, job_state, rsa_state, text) VALUES (?1, ?2, ?3, ?4, ?5)";
                transaction.prepare_cached(statement)?.execute(params![
                    now.0 as i64,
                    change.job.map(Incarnation::key),
                    change.states.map(|(job, _)| job.word()),
                    change.states.map(|(_, rsa)| rsa.word()),
                    change.text
                ])?;
            }
            let (task, epoch) = schedule.counters();
            for (name, value) in [("task", task), ("epoch", epoch.0), ("clock last", now.0)] {
                let statement = "INSERT OR REPLACE INTO counters (name, value) VALUES (?1, ?2)";
                transaction.prepare_cached(statement)?.execute(params![name, value as i64])?;
            }
            identity::count(transaction, commits)
        };
        let done = self.connection.transaction().and_then(|transaction| {
            keep(&transaction)?;
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })?;
        self.commits.store(commits, Ordering::SeqCst);
        self.tend_log();
        Ok(())
    }

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
            path: self.path.clone(),
            what: id.to_string(),
            why: error.to_string(),
        })?;
        if layout.is_none() {
            // What nodes had of an earlier one.
            let statement = "DELETE FROM parts WHERE job = ?1";
            self.connection.execute(statement, [job.key()]).map_err(|source| self.sqlite(source))?;
        }
        let row = params![id.to_string(), job.key(), secret.reveal(), layout];
        self.connection.execute(statement, row).map_err(|source| self.sqlite(source)).map(|_| ())
    }

    /// Keeps what RSA nodes have of a job's results, instead of what they had before.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn keep_parts(
        &mut self,
        job: Incarnation,
        now: Time,
        parts: &[(NodeName, Names)],
    ) -> Result<(), StoreError> {
        let path = self.path.clone();
        let done = self.connection.transaction().and_then(|transaction| {
            for (node, names) in parts {
                let Some(row) = row(&format!("what {node} has of job {job}"), names) else { continue };
                let statement =
                    "INSERT OR REPLACE INTO parts (job, node, at_ms, names) VALUES (?1, ?2, ?3, ?4)";
                transaction.execute(statement, params![job.key(), node.as_str(), now.0 as i64, row])?;
            }
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })
    }

    /// What an RSA node had of a job's results, and when that was.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn part(&self, job: Incarnation, node: &NodeName) -> Result<Option<(Time, Names)>, StoreError> {
        let query = "SELECT at_ms, names FROM parts WHERE job = ?1 AND node = ?2";
        let found: Option<(i64, String)> = self
            .connection
            .query_row(query, [job.key(), node.to_string()], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()
            .map_err(|source| self.sqlite(source))?;
        let Some((at, row)) = found else { return Ok(None) };
        let names = serde_json::from_str(&row).map_err(|error| StoreError::Malformed {
            path: self.path.clone(),
            what: format!("the files of job {job} on {node}"),
            why: error.to_string(),
        })?;
        Ok(Some((Time(at as u64), names)))
    }

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
        let query = "SELECT at_ms, job, job_state, rsa_state, text FROM journal
            WHERE ?1 IS NULL OR job = ?1 ORDER BY number DESC LIMIT ?2";
        let read = || -> rusqlite::Result<Vec<LogLine>> {
            let mut statement = self.connection.prepare_cached(query)?;
            let rows = statement.query_map(params![job.map(Incarnation::key), most], |row| {
                let text = |index| row.get::<_, Option<String>>(index);
                let job_state = text(2)?.and_then(|word| JobState::from_word(&word));
                let rsa_state = text(3)?.and_then(|word| RsaState::from_word(&word));
                Ok(LogLine {
                    at_ms: row.get::<_, i64>(0)? as u64,
                    job: text(1)?.and_then(|text| text.parse().ok()),
                    states: job_state.zip(rsa_state),
                    text: row.get(4)?,
                })
            })?;
            let mut lines: Vec<LogLine> = rows.collect::<rusqlite::Result<_>>()?;
            lines.reverse();
            Ok(lines)
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
            transaction.execute(&format!("DELETE FROM parts WHERE job NOT IN ({known})"), [])?;
            transaction.execute(
                &format!("DELETE FROM journal WHERE at_ms < ?1 AND (job IS NULL OR job NOT IN ({known}))"),
                [ended.0 as i64],
            )?;
            Ok(forgotten)
        };
        let path = self.path.clone();
        let done = self.connection.transaction().and_then(|transaction| {
            let forgotten = forget(&transaction)?;
            transaction.commit()?;
            Ok(forgotten)
        });
        // What is no job's name was nobody's.
        done.map(|ids| ids.iter().filter_map(|id| id.parse().ok()).collect())
            .map_err(|source| StoreError::Sqlite { path, source })
    }
}

/// A write-ahead log holds what is not yet in the journal itself. SQLite removes one that has no journal.
/// The journal has secrets, and it says who did what: it is root's alone, and what SQLite makes beside it is as it is.
fn keep_private(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    const MODE: u32 = 0o600;
    let mut options = std::fs::OpenOptions::new();
    let journal = options.create(true).truncate(false).write(true).mode(MODE);
    journal.open(directory.join("journal.sqlite"))?.set_permissions(PermissionsExt::from_mode(MODE))?;
    for beside in ["journal.sqlite-wal", "journal.sqlite-shm", "lock"] {
        match std::fs::set_permissions(directory.join(beside), PermissionsExt::from_mode(MODE)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn refuse_if_gone(directory: &Path, path: &Path) -> Result<(), StoreError> {
    let length = |path: &Path| match std::fs::metadata(path) {
        Ok(found) => Ok(Some(found.len())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StoreError::File { path: path.to_owned(), source }),
    };
    let how = match length(path)? {
        None => "missing",
        Some(0) => "empty",
        Some(_) => return Ok(()),
    };
    let log = directory.join("journal.sqlite-wal");
    match length(&log)? {
        None | Some(0) => Ok(()),
        Some(_) => Err(StoreError::Gone { path: path.to_owned(), how, log }),
    }
}

/// The job that a RAM disk belongs to, by its name.
pub fn job_of(id: &RamDiskId) -> Option<Incarnation> {
    Incarnation::of_ramdisk(&id.name)
}

/// A value as it is kept. Without it what was kept before stands: one value that can't be kept must not keep all the others
/// from being kept, and trying again would not help.
fn row(what: &str, value: &impl serde::Serialize) -> Option<String> {
    json(value).inspect_err(|error| tracing::error!(what, %error, "a defect: it can't be kept")).ok()
}

/// JSON knows text only: a path that is not UTF-8 is an error.
fn json(value: &impl serde::Serialize) -> Result<String, serde_json::Error> {
    serde_json::to_string(value)
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ondeck_core::schedule::{Event, Nodes, Seen, Site};
    use ondeck_core::{Bytes, JobId, Owner, QueuedJob, Request, Standing};
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;

    const NOW: Time = Time(1_000_000_000_000);

    fn waiting(number: u32, path: &[u8]) -> Seen {
        let job = QueuedJob {
            id: id(number),
            owner: Owner { uid: 1000, gid: 1000 },
            account: String::new(),
            standing: Standing::Next,
            reason: "Resources".into(),
            node_count: 1,
            nodes: Vec::new(),
            start: None,
            submitted: NOW.0 / 1000,
            priority: 1,
            qos: String::new(),
            held_for_input: false,
            dependent: false,
            depends_on: Vec::new(),
            component_of: None,
        };
        let data_in = vec![PathBuf::from(OsStr::from_bytes(path))];
        let request = Some(Request { data_in, ..Request::default() });
        Seen { job, request, work_dir: "/".into(), io_nodes: Vec::new() }
    }

    /// A store with the jobs and one node that lends to them.
    fn kept(directory: &Path, seen: Vec<Seen>) -> (Store, Schedule) {
        let mut store = Store::open(directory).unwrap();
        let nodes: Nodes = [("r1".parse().unwrap(), Node::new("default"))].into();
        let site = Site { debounce: std::time::Duration::ZERO, ..Site::default() };
        let mut schedule = Schedule::new(site, Vec::new(), nodes, 0, Epoch(0));
        let up = Event::NodeUp { node: "r1".parse().unwrap(), capacity: Bytes(1 << 30) };
        for event in [up, Event::Queue { taken: NOW, jobs: seen }] {
            let effects = schedule.handle(NOW, event).unwrap();
            store.keep(NOW, &schedule, &effects).unwrap();
        }
        (store, schedule)
    }

    fn id(number: u32) -> Incarnation {
        Incarnation { job: JobId(number), submitted: NOW.0 / 1000, restarts: 0 }
    }

    #[test]
    fn the_journal_is_for_root_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            let path = dir.path().join("state").join(name);
            path.metadata().unwrap().permissions().mode() & 0o7777
        };
        let (store, _) = kept(&dir.path().join("state"), vec![waiting(1, b"/a")]);
        for name in ["journal.sqlite", "journal.sqlite-wal"] {
            assert_eq!(mode(name), 0o600, "{name}");
        }
        assert_eq!(mode("."), 0o700);
        drop(store);
        // One that a former version has made.
        let readable = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(dir.path().join("state/journal.sqlite"), readable).unwrap();
        drop(Store::open(&dir.path().join("state")).unwrap());
        assert_eq!(mode("journal.sqlite"), 0o600);
    }

    #[test]
    fn one_row_that_is_not_understood_is_set_aside_and_the_others_are_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = kept(dir.path(), vec![waiting(1, b"/a"), waiting(2, b"/b")]);
        for statement in ["UPDATE jobs SET job = '' WHERE id GLOB '1@*'", "UPDATE nodes SET node = 'torn {'"]
        {
            assert_eq!(store.connection.execute(statement, []).unwrap(), 1);
        }
        drop(store);
        for _ in 0..2 {
            let mut store = Store::open(dir.path()).unwrap();
            let loaded = store.load().unwrap();
            assert_eq!(loaded.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [id(2)]);
            // Its RAM disk may hold results: it is a stranger's.
            let ramdisk = RamDiskId { name: id(1).ramdisk(), epoch: Epoch(1) };
            assert!(!store.knows(&ramdisk).unwrap() && store.is_set_aside(id(1)).unwrap());
            assert!(!store.is_set_aside(id(2)).unwrap());
            let aside = store.rows("SELECT kind || ' ' || id, row FROM set_aside ORDER BY 1").unwrap();
            let first = format!("job {}", id(1).key());
            let expected = [(&*first, ""), ("node r1", "torn {")];
            assert_eq!(aside, expected.map(|(what, row)| (what.to_owned(), row.to_owned())));
        }
    }

    #[test]
    fn a_journal_that_is_gone_leaves_its_newest_state_beside_it_untouched() {
        let (dir, kept_away) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (store, _) = kept(dir.path(), vec![waiting(1, b"/a")]);
        let [journal, log] = ["journal.sqlite", "journal.sqlite-wal"].map(|name| kept_away.path().join(name));
        // As they are when the daemon is killed.
        std::fs::copy(dir.path().join("journal.sqlite"), &journal).unwrap();
        std::fs::copy(dir.path().join("journal.sqlite-wal"), &log).unwrap();
        drop(store);
        let (saved, newest) = (std::fs::read(&journal).unwrap(), std::fs::read(&log).unwrap());
        assert!(!saved.is_empty() && !newest.is_empty());
        for left in [None, Some("")] {
            std::fs::remove_file(&journal).unwrap();
            if let Some(left) = left {
                std::fs::write(&journal, left).unwrap();
            }
            let told = Store::open(kept_away.path()).err().unwrap().to_string();
            assert!(told.contains("journal.sqlite-wal") && told.contains("Copy the directory"), "{told}");
            assert_eq!(std::fs::read(&log).unwrap(), newest);
            assert_eq!(std::fs::read(&journal).ok(), left.map(|left| left.as_bytes().to_vec()));
            std::fs::write(&journal, &saved).unwrap();
        }
        // Put back, it is whole. An empty one alone is a new one, as ever.
        let loaded = Store::open(kept_away.path()).unwrap().load().unwrap();
        assert_eq!(loaded.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [id(1)]);
        let empty = tempfile::tempdir().unwrap();
        std::fs::write(empty.path().join("journal.sqlite"), "").unwrap();
        std::fs::write(empty.path().join("journal.sqlite-wal"), "").unwrap();
        assert!(Store::open(empty.path()).unwrap().load().unwrap().jobs.is_empty());
    }

    #[test]
    fn the_journal_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let modes = || -> BTreeMap<String, u32> {
            let entries = std::fs::read_dir(dir.path()).unwrap().map(Result::unwrap);
            let mode = |entry: std::fs::DirEntry| {
                let name = entry.file_name().into_string().unwrap();
                (name, entry.metadata().unwrap().permissions().mode() & 0o7777)
            };
            entries.map(mode).collect()
        };
        let private = ["journal.sqlite", "journal.sqlite-shm", "journal.sqlite-wal", "lock"];
        let private: BTreeMap<String, u32> = private.map(|name| (name.to_owned(), 0o600)).into();
        let (store, _) = kept(dir.path(), vec![waiting(1, b"/a")]);
        assert_eq!(modes(), private);
        drop(store);
        // As a former version, or somebody who put a copy back, has left them.
        for name in private.keys() {
            let path = dir.path().join(name);
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap();
        }
        let _store = Store::open(dir.path()).unwrap();
        assert_eq!(modes(), private);
    }

    #[test]
    fn the_clock_goes_on_from_the_last_time_that_was_noted() {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = kept(dir.path(), vec![waiting(1, b"/a")]);
        // As a former version leaves it.
        store.connection.execute("DELETE FROM counters WHERE name LIKE 'clock%'", []).unwrap();
        assert_eq!(store.clock().unwrap(), (None, NOW));
        for boot in [Some(7), None] {
            let clock = KeptClock { boot, shift_ms: -5, ahead_ms: 3 };
            store.keep_clock(clock).unwrap();
            assert_eq!(store.clock().unwrap(), (Some(clock), NOW));
        }
    }

    #[test]
    fn a_journal_of_the_former_version_is_read_and_its_jobs_keep_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let (store, schedule) = kept(dir.path(), vec![waiting(7, b"/a")]);
        let mut job: serde_json::Value = serde_json::to_value(&schedule.jobs()[&id(7)]).unwrap();
        job["id"] = "7".into();
        let fields = job.as_object_mut().unwrap();
        for new in ["noted", "older", "unsure", "still_runs"] {
            fields.remove(new).unwrap();
        }
        let mut past = job.clone();
        past["id"] = "5.1".into();
        let node = serde_json::json!({
            "pool": "default", "capacity": 1, "up": true, "drained": "", "promised": { "7": 5 }, "residue": [], "failures": 0
        });
        store.connection.execute("UPDATE jobs SET id = '7', job = ?1", [job.to_string()]).unwrap();
        store.connection.execute("UPDATE nodes SET node = ?1", [node.to_string()]).unwrap();
        let row = params![past.to_string(), NOW.0 as i64];
        store.connection.execute("INSERT INTO past_jobs VALUES ('5.1', ?1, ?2)", row).unwrap();
        let former = "DROP TABLE identity; DROP TABLE replaced; PRAGMA user_version = 2;";
        store.connection.execute_batch(former).unwrap();
        drop(store);
        let mut store = Store::open(dir.path()).unwrap();
        let loaded = store.load().unwrap();
        let old = Incarnation { job: JobId(7), submitted: 0, restarts: 0 };
        assert_eq!(loaded.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [old]);
        assert_eq!(old.ramdisk().as_str(), "job-7-0");
        assert_eq!((&loaded.nodes[0].1.promised, loaded.nodes[0].1.heard), (&[(old, Bytes(5))].into(), true));
        // It has known of all that there was.
        assert_eq!(store.identity().unwrap().began, Time(0));
        let schedule = Schedule::new(Site::default(), loaded.jobs, Nodes::new(), 0, Epoch(0));
        let schedule = schedule.with_former(loaded.former);
        assert_eq!(schedule.identify(&waiting(7, b"/a").job), old);
        let mut again = waiting(5, b"/a").job;
        again.id.restarts = 2;
        again.submitted += 100;
        assert_eq!(schedule.identify(&again).key(), "5.2");
        assert_eq!(store.past_lives(JobId(5)).unwrap().len(), 1);
    }

    #[test]
    fn what_jobs_were_promised_is_known_though_their_node_is_not_understood() {
        let dir = tempfile::tempdir().unwrap();
        let (store, schedule) = kept(dir.path(), vec![waiting(1, b"/a")]);
        let mut job = schedule.jobs()[&id(1)].clone();
        let allocation = ondeck_core::schedule::Allocation {
            nodes: vec!["r1".parse().unwrap()],
            promise: Bytes(77),
            epoch: Epoch(1),
            since: NOW,
        };
        job.allocation = Some(allocation);
        store.connection.execute("UPDATE jobs SET job = ?1", [json(&job).unwrap()]).unwrap();
        store.connection.execute("UPDATE nodes SET node = ''", []).unwrap();
        drop(store);
        let loaded = Store::open(dir.path()).unwrap().load().unwrap();
        let (name, node) = &loaded.nodes[0];
        assert_eq!((name.as_str(), &node.promised), ("r1", &[(id(1), Bytes(77))].into()));
    }

    #[test]
    fn a_job_that_can_not_be_kept_keeps_nobody_else_from_being_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (store, schedule) = kept(dir.path(), vec![waiting(1, b"/a\xff"), waiting(2, b"/b")]);
        assert_eq!(schedule.jobs().len(), 2);
        drop(store);
        let loaded = Store::open(dir.path()).unwrap().load().unwrap();
        assert_eq!(loaded.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [id(2)]);
    }
}
