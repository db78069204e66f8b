//! Opening the journal, which may be of a former version, damaged, or not there.

use std::path::Path;
use std::sync::Arc;

use ondeck_core::schedule::Time;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::error::StoreError;
use super::tables::{VERSION, migrate};
use super::{Reader, Store, identity, log};

impl Store {
    /// Opens the store in a directory, or makes it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(directory: &Path) -> Result<Store, StoreError> {
        let unusable = |source| StoreError::File { path: directory.to_owned(), source };
        ondeck_api::host::private_directory(directory).map_err(unusable)?;
        let running = || StoreError::Running { path: directory.to_owned() };
        let only = ondeck_api::host::claim_directory(directory).map_err(unusable)?.ok_or_else(running)?;
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
        if found > VERSION {
            return Err(StoreError::Later { path, found });
        }
        migrate(&mut connection).map_err(|error| match error {
            rusqlite_migration::Error::RusqliteError { err, .. } => sqlite(err),
            other => StoreError::Damaged { path: path.clone(), why: other.to_string() },
        })?;
        let check: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(sqlite)?;
        if check != "ok" {
            return Err(StoreError::Damaged { path, why: check });
        }
        log::begin_anew(&connection).map_err(sqlite)?;
        let mut store = Store { reader: Reader { path, connection }, commits: Arc::default(), _only: only };
        // A journal of a former version knows all that there was before it had a name.
        let began = if found == 0 { crate::clock::wall_clock() } else { Time(0) };
        let name = store.new_name()?;
        identity::begin(&mut store.reader.connection, began, &name)
            .map_err(|source| store.reader.sqlite(source))?;
        Ok(store)
    }

    /// The journal once more, to be read while it is written.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn another_reader(&self) -> Result<Reader, StoreError> {
        let path = self.reader.path.clone();
        match open_to_read(&path) {
            Ok(connection) => Ok(Reader { path, connection }),
            Err(source) => Err(self.reader.sqlite(source)),
        }
    }
}

impl Reader {
    /// Opens the journal of a directory to read it, whether or not a daemon writes it.
    ///
    /// # Errors
    /// [`StoreError`]: it is not there, can't be read, is of a later version, or not whole.
    pub fn open(directory: &Path) -> Result<Reader, StoreError> {
        let path = directory.join("journal.sqlite");
        let file = |path: &Path, source| StoreError::File { path: path.to_owned(), source };
        // SQLite says of a file that is not there no more than that it can't open it.
        std::fs::File::open(&path).map_err(|source| file(&path, source))?;
        let log = path.with_extension("sqlite-wal");
        // A daemon that runs has a log, if an empty one. Without any the journal may lie where nothing can be written.
        let opened = match log.try_exists().map_err(|source| file(&log, source))? {
            true => open_to_read(&path),
            false => log::open_alone(&path),
        };
        let reader = match opened {
            Ok(connection) => Reader { path: path.clone(), connection },
            Err(source) => return Err(StoreError::Sqlite { path, source }),
        };
        let version: rusqlite::Result<i64> =
            reader.connection.query_row("PRAGMA user_version", [], |row| row.get(0));
        let found = version.map_err(|source| reader.sqlite(source))?;
        if found > VERSION {
            return Err(StoreError::Later { path, found });
        }
        if !log::belongs(&reader.connection, &path).map_err(|source| reader.sqlite(source))? {
            return Err(StoreError::Mixed { path });
        }
        Ok(reader)
    }
}

/// A journal with its log, which may be written meanwhile.
fn open_to_read(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    // What is closed leaves the log as it is.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    Ok(connection)
}

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

/// A write-ahead log holds what is not yet in the journal itself. SQLite removes one that has no journal.
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
