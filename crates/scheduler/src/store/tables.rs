//! The tables of the journal, and how those of former versions become these.

use rusqlite::Connection;
use rusqlite_migration::{M, Migrations};

/// The version of the tables: how many of the [`MIGRATIONS`] have made them. A later daemon migrates an older one's; an older
/// daemon refuses a later one's.
pub(super) const VERSION: i64 = 3;

/// How the tables became what they are. Nothing here is ever changed, because journals have been made by it; what is new is
/// one more.
const MIGRATIONS: [M<'static>; VERSION as usize] = [
    M::up(
        "CREATE TABLE jobs (id TEXT PRIMARY KEY, job TEXT NOT NULL);
        CREATE TABLE past_jobs (id TEXT PRIMARY KEY, job TEXT NOT NULL, ended_ms INTEGER NOT NULL);
        CREATE TABLE nodes (name TEXT PRIMARY KEY, node TEXT NOT NULL);
        CREATE TABLE ramdisks (id TEXT PRIMARY KEY, job TEXT NOT NULL, secret TEXT NOT NULL, layout TEXT);
        CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
        CREATE TABLE journal (
            number INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL,
            job TEXT, job_state TEXT, rsa_state TEXT, text TEXT NOT NULL);
        CREATE TABLE used (uid INTEGER NOT NULL, account TEXT NOT NULL, day INTEGER NOT NULL,
            node_seconds REAL NOT NULL, allocations INTEGER NOT NULL, PRIMARY KEY (uid, account, day));
        CREATE INDEX journal_of_job ON journal (job, number);
        CREATE TRIGGER journal_is_kept BEFORE UPDATE ON journal
            BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;",
    ),
    M::up("CREATE TABLE strays (node TEXT PRIMARY KEY, ramdisks TEXT NOT NULL);"),
    // Which journal it is, and what it has replaced.
    M::up(
        "CREATE TABLE identity (name TEXT PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE replaced (journal TEXT PRIMARY KEY);",
    ),
];

/// Makes the tables, or makes those of a former version these.
///
/// # Errors
/// Then nothing has changed.
pub(super) fn migrate(connection: &mut Connection) -> Result<(), rusqlite_migration::Error> {
    Migrations::from_slice(&MIGRATIONS).to_latest(connection)?;
    // A former daemon that does not know of these leaves them alone, so they need no version.
    connection.execute_batch(SET_ASIDE)?;
    connection.execute_batch(PARTS)?;
    connection.execute_batch(MOVED)?;
    connection.execute_batch(LAYOUTS)?;
    connection.execute_batch(LAYOUT_RUNS)?;
    connection.execute_batch(DELAYS)?;
    for (column, statement) in [("thesis", THESIS), ("rsa_nodes", RSA_NODES)] {
        let has: bool = connection.query_row(HAS_COLUMN, [column], |row| row.get(0))?;
        if !has {
            connection.execute_batch(statement)?;
        }
    }
    Ok(())
}

/// Rows that were not understood, as they were. A later version of the daemon, or a person, may understand them: nothing
/// removes them but a person. Daemons that don't know this table leave it alone.
const SET_ASIDE: &str = "CREATE TABLE IF NOT EXISTS set_aside
    (kind TEXT NOT NULL, id TEXT NOT NULL, row TEXT NOT NULL, why TEXT NOT NULL, at_ms INTEGER NOT NULL)";

/// The sentence that the log of the thesis has for a line; empty if it has none. Daemons that don't know this column leave
/// it NULL, and nothing else in it is: so the tables keep their version.
const THESIS: &str = "ALTER TABLE journal ADD COLUMN thesis TEXT";

/// The RSA nodes that the job of a line had after it, by commas; empty if it had none. As [`THESIS`], of a line that a daemon has
/// written that does not know this column, it is NULL.
const RSA_NODES: &str = "ALTER TABLE journal ADD COLUMN rsa_nodes TEXT";

/// Whether the journal has a column.
const HAS_COLUMN: &str = "SELECT count(*) > 0 FROM pragma_table_info('journal') WHERE name = ?1";

/// What RSA nodes had of the results of jobs when they were last asked, as JSON. Daemons that don't know this table leave
/// it alone.
const PARTS: &str = "CREATE TABLE IF NOT EXISTS parts
    (job TEXT NOT NULL, node TEXT NOT NULL, at_ms INTEGER NOT NULL, names TEXT NOT NULL, PRIMARY KEY (job, node))";

/// What was copied for jobs, each time that it was done: `work` is a word of [`Work`](ondeck_core::schedule::Work). Daemons that don't
/// know this table leave it alone.
const MOVED: &str = "CREATE TABLE IF NOT EXISTS moved
    (job TEXT NOT NULL, work TEXT NOT NULL, at_ms INTEGER NOT NULL, bytes INTEGER NOT NULL, files INTEGER NOT NULL)";

/// The layouts of jobs' directories on disk, as JSON, and whether nothing is to be done about them any more. Daemons that don't
/// know this table leave it alone, and the layouts as they are.
const LAYOUTS: &str = "CREATE TABLE IF NOT EXISTS layouts
    (id TEXT PRIMARY KEY, record TEXT NOT NULL, done INTEGER NOT NULL, at_ms INTEGER NOT NULL)";

/// What jobs have left in their directories, as JSON: the history of the layouts. `directory` has `#` for each of its numbers.
/// Daemons that don't know this table leave it alone, and the runs of their time are missing in it.
const LAYOUT_RUNS: &str = "CREATE TABLE IF NOT EXISTS layout_runs
    (number INTEGER PRIMARY KEY AUTOINCREMENT, uid INTEGER NOT NULL, program TEXT NOT NULL, directory TEXT NOT NULL,
    job TEXT NOT NULL, at_ms INTEGER NOT NULL, run TEXT NOT NULL, UNIQUE (uid, program, directory, job));
    CREATE INDEX IF NOT EXISTS layout_runs_by_age ON layout_runs (at_ms)";

/// Jobs that were delayed because their filesystem was busy, as JSON, and whether they have left the queue. Daemons that don't know
/// this table leave it alone, and the jobs start within a minute.
const DELAYS: &str = "CREATE TABLE IF NOT EXISTS delays
    (id TEXT PRIMARY KEY, record TEXT NOT NULL, done INTEGER NOT NULL, at_ms INTEGER NOT NULL)";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_core::schedule::{Action, RsaState, Schedule, Site, Work};
    use ondeck_core::{Bytes, Incarnation};

    use super::*;
    use crate::store::{Entry, Store};

    /// Journals as former versions have left them: a job whose output is in RAM, and one that waits for its RSA node.
    const FORMER: [(i64, &str); 2] =
        [(2, include_str!("former/journal-2.sql")), (3, include_str!("former/journal-3.sql"))];

    #[test]
    fn every_former_journal_is_understood_and_goes_on() {
        for (version, sql) in FORMER {
            let directory = tempfile::tempdir().unwrap();
            let former = Connection::open(directory.path().join("journal.sqlite")).unwrap();
            former.execute_batch(sql).unwrap();
            drop(former);
            let mut store = Store::open(directory.path()).unwrap();
            let kept = store.load().unwrap();
            let [uses, waits]: [Incarnation; 2] =
                ["1@1000000000".parse().unwrap(), "2@1000000000".parse().unwrap()];
            let (_, node) = &kept.nodes[0];
            assert_eq!(node.promised.get(&uses), Some(&Bytes(1 << 30)), "{version}");
            assert!(node.heard && node.up);
            let mut nodes = kept.nodes.into_iter().collect();
            let schedule = Schedule::new(
                Site::default(),
                kept.jobs,
                std::mem::take(&mut nodes),
                kept.last_order,
                kept.last_epoch,
            );
            let (uses, waits) = (&schedule.jobs()[&uses], &schedule.jobs()[&waits]);
            assert!(uses.rsa_state == RsaState::InuseOut && uses.results && uses.under_way.is_none());
            assert!(waits.rsa_state == RsaState::Initial && waits.waits_for.contains("have 0 need 1"));
            let again = schedule.resume();
            assert!(
                !again
                    .iter()
                    .any(|action| matches!(action, Action::Begin(_, order) if order.work != Work::Mount))
            );
            let ramdisk = uses.ramdisk().unwrap();
            assert!(
                store.reader().ramdisk(&ramdisk).unwrap().is_some()
                    && store.reader().knows(&ramdisk).unwrap()
            );
            let log = store.reader().log(Some(uses.id), 100).unwrap();
            assert_eq!(log.last().unwrap().states.unwrap().1, RsaState::InuseOut);
            store.keep(&Entry::of(ondeck_core::schedule::Time(1), &schedule, &Default::default())).unwrap();
            let now: i64 =
                store.reader.connection.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
            assert_eq!(now, VERSION);
            // A journal of before there were names has known all that there was.
            assert_eq!(store.identity().unwrap().began.0 == 0, version < 3);
        }
    }

    #[test]
    fn a_new_journal_has_the_tables_of_a_migrated_one() {
        let tables = |sql: &str| {
            let mut connection = Connection::open_in_memory().unwrap();
            connection.execute_batch(sql).unwrap();
            migrate(&mut connection).unwrap();
            let query = "SELECT type || ' ' || name FROM sqlite_schema ORDER BY 1";
            let mut statement = connection.prepare(query).unwrap();
            let names = statement.query_map([], |row| row.get(0)).unwrap();
            names.collect::<Result<Vec<String>, _>>().unwrap()
        };
        for (version, sql) in FORMER {
            let migrated = tables(sql);
            assert_eq!(migrated, tables(""), "{version}");
            assert!(migrated.contains(&"table layout_runs".to_owned()), "{migrated:?}");
        }
    }
}
