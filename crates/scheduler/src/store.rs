//! What outlives the daemon: SQLite, with an append-only journal beside the current state.
//!
//! Everything that one event changed is one transaction, and is on disk before anything is done about it. So after a
//! crash the daemon knows at least what it has begun.
//!
//! # Layout
//!
//! - `open`: opening it; `tables`: its tables; `error`: why it can't be used
//! - `entry`: what events change; `load`: what an earlier daemon kept
//! - `ramdisks`: secrets, layouts and parts of RAM disks; `past`: jobs that are gone, the log, and who used what
//! - `layouts`: those of jobs' directories on disk; `history`: what runs have left there
//! - `workload`: the jobs that there were, as a log that is simulated with other sizes
//! - `identity`: which journal it is; `log`: its write-ahead log

mod delays;
mod entry;
mod error;
mod history;
mod identity;
mod layouts;
mod load;
mod log;
mod open;
mod past;
mod ramdisks;
mod tables;
mod workload;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ondeck_core::schedule::Time;
use ondeck_core::{Incarnation, RamDiskId};
use rusqlite::{Connection, OptionalExtension, params};

pub use self::entry::Entry;
pub use self::error::StoreError;
pub(crate) use self::history::{KeptRun, RunFilter};
pub use self::identity::Identity as JournalIdentity;
pub use self::load::LoadedJournal;
pub use self::workload::{PastJob, Workload};
use crate::clock::KeptClock;

/// The store of one daemon, to be written.
pub struct Store {
    reader: Reader,
    /// How many times it was written.
    commits: Arc<AtomicU64>,
    _only: std::fs::File,
}

/// What was kept, to be read. One of its own does not wait for whoever writes.
pub struct Reader {
    path: PathBuf,
    connection: Connection,
}

impl Reader {
    fn rows(&self, query: &str) -> Result<Vec<(String, String)>, StoreError> {
        let read = || -> rusqlite::Result<Vec<(String, String)>> {
            let mut statement = self.connection.prepare(query)?;
            statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        };
        read().map_err(|source| self.sqlite(source))
    }

    fn sqlite(&self, source: rusqlite::Error) -> StoreError {
        StoreError::Sqlite { path: self.path.clone(), source }
    }

    fn malformed(&self, what: String, why: &dyn std::fmt::Display) -> StoreError {
        StoreError::Malformed { path: self.path.clone(), what, why: why.to_string() }
    }
}

impl Store {
    /// What was kept, to be read by whoever writes.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// What was kept of the clock, if anything was, and the last time that was noted.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn clock(&self) -> Result<(Option<KeptClock>, Time), StoreError> {
        let read = || -> rusqlite::Result<(Option<KeptClock>, Time)> {
            let counter = |name: &str| -> rusqlite::Result<Option<i64>> {
                let query = "SELECT value FROM counters WHERE name = ?1";
                self.reader.connection.query_row(query, [name], |row| row.get(0)).optional()
            };
            let kept = match (counter("clock shift")?, counter("clock ahead")?) {
                (Some(shift_ms), Some(ahead_ms)) => {
                    Some(KeptClock { boot: counter("clock boot")?, shift_ms, ahead_ms })
                }
                _ => None,
            };
            // A former version may have gone on with it since.
            let query = "SELECT at_ms FROM journal ORDER BY number DESC LIMIT 1";
            let noted: Option<i64> =
                self.reader.connection.query_row(query, [], |row| row.get(0)).optional()?;
            let last = counter("clock last")?.max(noted).unwrap_or(0);
            Ok((kept, Time(last as u64)))
        };
        read().map_err(|source| self.reader.sqlite(source))
    }

    /// Keeps what the next daemon needs to know of the clock.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn keep_clock(&mut self, clock: KeptClock) -> Result<(), StoreError> {
        let path = self.reader.path.clone();
        let boot = clock.boot.map(|boot| ("clock boot", boot));
        let done = self.reader.connection.transaction().and_then(|transaction| {
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

    /// Keeps what events have changed.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing of it is kept, and nothing may be done.
    pub fn keep(&mut self, entry: &Entry) -> Result<(), StoreError> {
        let path = self.reader.path.clone();
        let commits = self.commits.load(Ordering::SeqCst) + 1;
        let done = self.reader.connection.transaction().and_then(|transaction| {
            entry.write(&transaction)?;
            identity::count(&transaction, commits)?;
            transaction.commit()
        });
        done.map_err(|source| StoreError::Sqlite { path, source })?;
        self.commits.store(commits, Ordering::SeqCst);
        self.tend_log();
        Ok(())
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::samples::queued;
    use ondeck_core::schedule::{Event, Node, Nodes, ObservedJob, Outcome, Schedule, Site, Told, Work};
    use ondeck_core::{Bytes, Epoch, JobId, QueuedJob, Request};
    use std::collections::BTreeMap;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    const NOW: Time = Time(1_000_000_000_000);

    fn waiting(number: u32, path: &[u8]) -> ObservedJob {
        let job = QueuedJob { reason: "Resources".into(), submitted: NOW.0 / 1000, ..queued(id(number)) };
        let data_in = vec![PathBuf::from(OsStr::from_bytes(path))];
        let request = Some(Request { data_in, ..Request::default() });
        ObservedJob { job, request, work_dir: "/".into(), io_nodes: Vec::new() }
    }

    /// A store with the jobs and one node that lends to them.
    fn kept(directory: &Path, seen: Vec<ObservedJob>) -> (Store, Schedule) {
        let mut store = Store::open(directory).unwrap();
        let nodes: Nodes = [("r1".parse().unwrap(), Node::new("default"))].into();
        let site = Site { debounce: std::time::Duration::ZERO, ..Site::default() };
        let mut schedule = Schedule::new(site, Vec::new(), nodes, 0, Epoch(0));
        let up = Event::NodeUp { node: "r1".parse().unwrap(), capacity: Bytes(1 << 30) };
        for event in [up, Event::Queue { taken: NOW, jobs: seen }] {
            let effects = schedule.handle(NOW, event).unwrap();
            store.keep(&Entry::of(NOW, &schedule, &effects)).unwrap();
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
            assert_eq!(store.reader.connection.execute(statement, []).unwrap(), 1);
        }
        drop(store);
        for _ in 0..2 {
            let mut store = Store::open(dir.path()).unwrap();
            let loaded = store.load().unwrap();
            assert_eq!(loaded.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [id(2)]);
            // Its RAM disk may hold results: it is a stranger's.
            let ramdisk = RamDiskId { name: id(1).ramdisk(), epoch: Epoch(1) };
            assert!(!store.reader().knows(&ramdisk).unwrap() && store.reader().is_set_aside(id(1)).unwrap());
            assert!(!store.reader().is_set_aside(id(2)).unwrap());
            let aside =
                store.reader().rows("SELECT kind || ' ' || id, row FROM set_aside ORDER BY 1").unwrap();
            let first = format!("job {}", id(1).key());
            let expected = [(&*first, ""), ("node r1", "torn {")];
            assert_eq!(aside, expected.map(|(what, row)| (what.to_owned(), row.to_owned())));
        }
    }

    #[test]
    fn the_jobs_that_there_were_are_read_with_what_was_copied_for_them_also_from_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let (mut store, schedule) = kept(&state, [1, 2, 3].map(|number| waiting(number, b"/a")).into());
        for number in [1, 2] {
            let job = serde_json::to_string(&schedule.jobs()[&id(number)]).unwrap();
            let connection = &store.reader.connection;
            let ended = "INSERT INTO past_jobs (id, job, ended_ms) VALUES (?1, ?2, ?3)";
            connection.execute(ended, params![id(number).key(), job, i64::from(number)]).unwrap();
            connection.execute("DELETE FROM jobs WHERE id = ?1", [id(number).key()]).unwrap();
        }
        for (at, job_state, rsa_state) in [
            (1000, "RUNNING", "READY"),
            (2000, "RUNNING", "INUSE_BOTH"),
            (61_000, "FINISHED", "UNMOUNT_NEEDED"),
            (70_000, "FINISHED", "STAGING_OUT"),
        ] {
            let line =
                "INSERT INTO journal (at_ms, job, job_state, rsa_state, text) VALUES (?1, ?2, ?3, ?4, '')";
            let row = params![at, id(1).key(), job_state, rsa_state];
            store.reader.connection.execute(line, row).unwrap();
        }
        for (work, bytes) in [(Work::StageIn, 100), (Work::StageOut, 30), (Work::StageOut, 20)] {
            store.note_moved(id(1), work, NOW, (Bytes(bytes), 1)).unwrap();
        }
        let ran = PastJob {
            id: id(1),
            uid: schedule.jobs()[&id(1)].owner.uid,
            nodes: schedule.jobs()[&id(1)].compute_nodes,
            ran: Some((Time(1000), Time(61_000))),
            in_ram: true,
            staged_in: Some(Bytes(100)),
            staged_out: Some(Bytes(50)),
        };
        let never =
            PastJob { id: id(2), ran: None, in_ram: false, staged_in: None, staged_out: None, ..ran.clone() };
        let expected = Workload { jobs: vec![ran, never], unfinished: 1 };
        let read = |directory: &Path| Reader::open(directory).unwrap().workload().unwrap();
        assert_eq!(read(&state), expected, "while it is written");
        let copy = |to: &Path| {
            std::fs::create_dir(to).unwrap();
            for file in std::fs::read_dir(&state).unwrap().map(Result::unwrap) {
                std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
            }
        };
        let (running, ended) = (dir.path().join("running"), dir.path().join("ended"));
        copy(&running);
        assert_eq!(read(&running), expected);
        store.close().unwrap();
        drop(store);
        copy(&ended);
        assert_eq!(read(&ended), expected);

        // As a former version has left it.
        Connection::open(ended.join("journal.sqlite")).unwrap().execute("DROP TABLE moved", []).unwrap();
        let nothing = read(&ended).jobs.into_iter().map(|job| (job.staged_in, job.staged_out));
        assert!(nothing.into_iter().all(|moved| moved == (None, None)));
        let missing = Reader::open(&dir.path().join("missing")).err().unwrap().to_string();
        assert!(missing.contains("missing/journal.sqlite"), "{missing}");
        let later = Connection::open(running.join("journal.sqlite")).unwrap();
        later.execute_batch("PRAGMA user_version = 99").unwrap();
        drop(later);
        assert!(matches!(Reader::open(&running), Err(StoreError::Later { found: 99, .. })));
    }

    #[test]
    fn the_log_says_which_rsa_nodes_a_job_had_also_before_a_time_and_not_what_was_not_noted() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = kept(dir.path(), vec![waiting(1, b"/a"), waiting(2, b"/b")]);
        let noted = |since: u64| -> Vec<(u32, Vec<String>)> {
            let lines = store.reader().noted_since(Time(since)).unwrap();
            let names =
                |line: &ondeck_core::timeline::Noted| line.rsa.iter().map(ToString::to_string).collect();
            lines.iter().map(|line| (line.job.job.0, names(line))).collect()
        };
        let all = noted(0);
        assert!(all.iter().any(|(_, nodes)| nodes == &["r1"]), "{all:?}");
        // Of each the last one.
        let last = noted(NOW.0 + 1);
        for job in [1, 2] {
            let of_job = |lines: &[(u32, Vec<String>)]| lines.iter().rfind(|line| line.0 == job).cloned();
            assert_eq!((of_job(&last), last.iter().filter(|line| line.0 == job).count()), (of_job(&all), 1));
        }
        // As a daemon leaves it that does not know of this.
        let line = "INSERT INTO journal (at_ms, job, job_state, rsa_state, text) SELECT at_ms, job, job_state, rsa_state, text
            FROM journal WHERE job IS NOT NULL";
        assert!(store.reader.connection.execute(line, []).unwrap() >= all.len());
        assert_eq!(noted(0), all);
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
        store.reader.connection.execute("DELETE FROM counters WHERE name LIKE 'clock%'", []).unwrap();
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
        store.reader.connection.execute("UPDATE jobs SET id = '7', job = ?1", [job.to_string()]).unwrap();
        store.reader.connection.execute("UPDATE nodes SET node = ?1", [node.to_string()]).unwrap();
        let row = params![past.to_string(), NOW.0 as i64];
        store.reader.connection.execute("INSERT INTO past_jobs VALUES ('5.1', ?1, ?2)", row).unwrap();
        let former = "DROP TABLE identity; DROP TABLE replaced; PRAGMA user_version = 2;";
        store.reader.connection.execute_batch(former).unwrap();
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
        assert_eq!(store.reader().past_lives(JobId(5)).unwrap().len(), 1);
    }

    #[test]
    fn the_log_of_a_former_version_is_told_as_the_log_of_this_one() {
        let dir = tempfile::tempdir().unwrap();
        let told = |store: &Store| {
            let lines = store.reader().log_with_thesis(None, 100).unwrap();
            let noted = lines.iter().filter(|(_, noted)| noted.is_some()).count();
            let thesis = lines.iter().filter_map(|(line, noted)| crate::thesis::line(line, noted.as_deref()));
            (lines.len(), noted, thesis.collect::<String>())
        };
        let (store, mut schedule) = kept(dir.path(), vec![waiting(7, b"/a")]);
        let (lines, noted, thesis) = told(&store);
        let assigned =
            "1000000000 assigning 1 rsa-nodes to job 7\n1000000000 constructing RSA block for job 7\n";
        assert_eq!((noted, &*thesis), (lines, assigned));
        // As version 3 of the tables has been from its beginning.
        store.reader.connection.execute("ALTER TABLE journal DROP COLUMN thesis", []).unwrap();
        drop(store);
        let mut store = Store::open(dir.path()).unwrap();
        assert_eq!(told(&store), (lines, 0, thesis.clone()));
        let number = schedule.jobs()[&id(7)].under_way.unwrap().number;
        let done = Outcome::Done("done constructing RSA block for job 7: 1 GiB on 1 RSA nodes".into());
        let ended = Event::Ended { job: id(7), number, outcome: done };
        let effects = schedule.handle(NOW, ended).unwrap();
        store.keep(&Entry::of(NOW, &schedule, &effects)).unwrap();
        let next = "1000000000 done constructing RSA block for job 7\n1000000000 staging data for job 7\n";
        let (of_both, noted, story) = told(&store);
        assert_eq!((of_both, story), (lines + noted, thesis + next));
        // The former version goes on with it, and this one again.
        let statement =
            "INSERT INTO journal (at_ms, job, job_state, rsa_state, text) VALUES (?1, ?2, ?3, ?4, ?5)";
        let line = params![NOW.0 as i64, id(7).key(), "ONDECK", "READY", "was released by hand"];
        store.reader.connection.execute(statement, line).unwrap();
        drop(store);
        assert!(told(&Store::open(dir.path()).unwrap()).2.ends_with("1000000000 was released by hand\n"));
    }

    #[test]
    fn what_a_former_version_has_told_of_a_job_is_known_from_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let (store, schedule) = kept(dir.path(), vec![waiting(7, b"/a")]);
        let mut job: serde_json::Value = serde_json::to_value(&schedule.jobs()[&id(7)]).unwrap();
        assert_eq!(job["told"], "nothing");
        let fields = job.as_object_mut().unwrap();
        fields.remove("told").unwrap();
        fields.insert("message".into(), "staging out failed: no room; it is tried again in 60 s".into());
        store.reader.connection.execute("UPDATE jobs SET job = ?1", [job.to_string()]).unwrap();
        drop(store);
        let loaded = Store::open(dir.path()).unwrap().load().unwrap();
        let schedule = Schedule::new(Site::default(), loaded.jobs, Nodes::new(), 0, Epoch(0));
        assert_eq!(schedule.jobs()[&id(7)].told, Told::NotOnDisk);
        // Known once, it is kept.
        let kept = serde_json::to_value(&schedule.jobs()[&id(7)]).unwrap();
        assert_eq!(kept["told"], "not_on_disk");
    }

    #[test]
    fn the_journal_calls_things_as_former_versions_did() {
        let dir = tempfile::tempdir().unwrap();
        let (_, schedule) = kept(dir.path(), vec![waiting(7, b"/a")]);
        let job = serde_json::to_value(&schedule.jobs()[&id(7)]).unwrap();
        assert_eq!(job["task"]["work"], "construct");
        for key in ["parts", "torn"] {
            assert!(job.get(key).is_some(), "{key} is missing in {job}");
        }
        let node = serde_json::to_value(schedule.nodes().values().next().unwrap()).unwrap();
        assert!(node.get("residue").is_some(), "residue is missing in {node}");
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
        store.reader.connection.execute("UPDATE jobs SET job = ?1", [json(&job).unwrap()]).unwrap();
        store.reader.connection.execute("UPDATE nodes SET node = ''", []).unwrap();
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
