//! The write-ahead log belongs to the journal beside it.
//!
//! SQLite applies whatever log it finds: an older copy of the journal beside a newer log, or the other way round, becomes a
//! mixture of both whose pages may all be well formed ([decision 0021]). So each log begins with an odd number, and ends
//! with the even one after it before it is brought into the journal: the journal alone then has the even number before its
//! log's, or, while the log is brought into it and afterwards, the one at its log's end.
//!
//! [decision 0021]: https://github.com/ondeck-hpc/ondeck/blob/main/docs/decisions/0021-a-log-belongs-to-its-journal.md

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension, params};

use super::Store;

/// The name of the counter of logs.
const GENERATION: &str = "log";

/// A log of this size is brought into the journal, and a new one begins.
const LARGE: u64 = 4 << 20;

/// The number of the log that a connection sees; zero if there is none, as in a journal of a former version.
fn generation(connection: &Connection) -> rusqlite::Result<i64> {
    let tables = "SELECT count(*) FROM sqlite_schema WHERE name = 'counters'";
    if connection.query_row(tables, [], |row| row.get::<_, i64>(0))? == 0 {
        return Ok(0);
    }
    let query = "SELECT value FROM counters WHERE name = ?1";
    let found = connection.query_row(query, [GENERATION], |row| row.get(0)).optional()?;
    Ok(found.unwrap_or(0))
}

/// A journal as it is without its log.
pub(super) fn open_alone(path: &Path) -> rusqlite::Result<Connection> {
    let mut name = String::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                name.push(char::from(*byte))
            }
            byte => name += &format!("%{byte:02x}"),
        }
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
    Connection::open_with_flags(format!("file:{name}?immutable=1"), flags)
}

/// Whether the log is the journal's own. A connection that is closed leaves both as they are from here on.
pub(super) fn belongs(connection: &Connection, path: &Path) -> rusqlite::Result<bool> {
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    // A crash may have torn the journal's own pages while the log was brought into it; the log has them whole.
    let Ok(alone) = open_alone(path).and_then(|connection| generation(&connection)) else { return Ok(true) };
    let with_log = generation(connection)?;
    let (is_in, is_open, is_closed) = (alone == with_log, alone + 1 == with_log, alone + 2 == with_log);
    Ok(is_in || is_open || (is_closed && alone % 2 == 0))
}

fn number(connection: &Connection, value: i64) -> rusqlite::Result<()> {
    let statement = "INSERT OR REPLACE INTO counters (name, value) VALUES (?1, ?2)";
    connection.execute(statement, params![GENERATION, value]).map(drop)
}

/// Brings all of the log into the journal. Somebody who reads the journal meanwhile may keep the log from being emptied:
/// then it is false.
pub(super) fn bring_in(connection: &Connection) -> rusqlite::Result<bool> {
    let now = generation(connection)?;
    if now % 2 == 1 {
        number(connection, now + 1)?;
    }
    let busy: bool = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))?;
    Ok(!busy)
}

/// Brings all of the log into the journal, and begins another one.
pub(super) fn begin_anew(connection: &Connection) -> rusqlite::Result<()> {
    if bring_in(connection)? {
        number(connection, generation(connection)? + 1)?;
    }
    Ok(())
}

impl Store {
    /// Keeps the log small.
    pub(super) fn tend_log(&self) {
        let log = self.reader.path.with_extension("sqlite-wal");
        if !std::fs::metadata(log).is_ok_and(|log| log.len() > LARGE) {
            return;
        }
        if let Err(error) = begin_anew(&self.reader.connection) {
            // What was kept is kept.
            tracing::warn!(%error, "can't bring the journal's log into the journal; it grows");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;

    const FILES: [&str; 2] = ["journal.sqlite", "journal.sqlite-wal"];

    fn commit(store: &Store, text: &str) {
        let statement = "INSERT INTO journal (at_ms, text) VALUES (0, ?1)";
        store.reader.connection.execute(statement, [text]).unwrap();
    }

    fn copy(from: &Path, to: &Path, files: &[&str]) {
        for file in files {
            fs::copy(from.join(file), to.join(file)).unwrap();
        }
    }

    fn opened(directory: &Path, files: [(&Path, &str); 2]) -> Result<usize, String> {
        let _ = fs::remove_dir_all(directory);
        fs::create_dir(directory).unwrap();
        for (from, file) in files {
            copy(from, directory, &[file]);
        }
        let before: Vec<Vec<u8>> = FILES.iter().map(|file| fs::read(directory.join(file)).unwrap()).collect();
        match Store::open(directory) {
            Ok(store) => {
                let query = "SELECT count(*) FROM journal";
                Ok(store.reader.connection.query_row(query, [], |row| row.get::<_, i64>(0)).unwrap() as usize)
            }
            Err(error) => {
                let after: Vec<Vec<u8>> =
                    FILES.iter().map(|file| fs::read(directory.join(file)).unwrap()).collect();
                assert!(before == after, "what is refused is changed");
                Err(error.to_string())
            }
        }
    }

    #[test]
    fn a_journal_beside_the_log_of_another_state_is_refused_and_nothing_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let store = Store::open(&at("live")).unwrap();
        // Copies from while it was written to, as after a crash.
        for name in ["first", "second", "third"] {
            commit(&store, name);
            commit(&store, name);
            fs::create_dir(at(name)).unwrap();
            copy(&at("live"), &at(name), &FILES);
            commit(&store, "later");
            begin_anew(&store.reader.connection).unwrap();
        }
        let (first, second, third) = (at("first"), at("second"), at("third"));
        let [journal, log] = FILES;
        let tried = at("tried");
        let both = |of_journal: &Path, of_log: &Path| opened(&tried, [(of_journal, journal), (of_log, log)]);
        // Each with its own log is what it was.
        assert_eq!(both(&first, &first), Ok(2));
        assert_eq!(both(&second, &second), Ok(5));
        assert_eq!(both(&third, &third), Ok(8));
        for (of_journal, of_log) in [(&first, &third), (&third, &first), (&second, &first), (&first, &second)]
        {
            let told = both(of_journal, of_log).unwrap_err();
            assert!(told.contains("do not belong together") && told.contains("--take-over"), "{told}");
        }
    }

    #[test]
    fn a_log_does_not_grow_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        let text = "x".repeat(100_000);
        for _ in 0..100 {
            commit(&store, &text);
            store.tend_log();
        }
        let length = |file: &str| fs::metadata(dir.path().join(file)).unwrap().len();
        assert!(length(FILES[1]) < 2 * LARGE, "{}", length(FILES[1]));
        assert!(length(FILES[0]) > LARGE);
        store.close().unwrap();
        assert!(!dir.path().join(FILES[1]).exists());
        let commits = "SELECT count(*) FROM journal";
        let alone = open_alone(&dir.path().join(FILES[0])).unwrap();
        assert_eq!(alone.query_row(commits, [], |row| row.get::<_, i64>(0)).unwrap(), 100);
    }
}
