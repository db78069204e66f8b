//! The jobs that there were, with what was copied for them.

use ondeck_core::schedule::{Job, RsaState, Time, Work};
use ondeck_core::{Bytes, Incarnation};
use rusqlite::params;

use super::error::StoreError;
use super::{Reader, Store};

/// A job of which nothing is to be done any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastJob {
    /// Which one; its submission is part of that.
    pub id: Incarnation,
    /// Its user.
    pub uid: u32,
    /// The compute nodes that it had.
    pub nodes: u32,
    /// When it was seen to run first, and when it had ended; nothing if it never ran.
    pub ran: Option<(Time, Time)>,
    /// Whether it saw a RAM disk.
    pub in_ram: bool,
    /// What was staged in for it, if anything was noted.
    pub staged_in: Option<Bytes>,
    /// What was staged out.
    pub staged_out: Option<Bytes>,
}

/// The jobs that a journal has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// Those that have ended.
    pub jobs: Vec<PastJob>,
    /// How many have not.
    pub unfinished: u64,
}

impl Store {
    /// Notes what was copied for a job.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn note_moved(
        &mut self,
        job: Incarnation,
        work: Work,
        now: Time,
        (bytes, files): (Bytes, u64),
    ) -> Result<(), StoreError> {
        let statement = "INSERT INTO moved (job, work, at_ms, bytes, files) VALUES (?1, ?2, ?3, ?4, ?5)";
        let row = params![job.key(), work.word(), now.0 as i64, bytes.0 as i64, files as i64];
        let connection = &self.reader.connection;
        connection.execute(statement, row).map(drop).map_err(|source| self.reader.sqlite(source))
    }
}

impl Reader {
    /// The jobs that there were.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn workload(&self) -> Result<Workload, StoreError> {
        let one =
            |query: &str| -> rusqlite::Result<i64> { self.connection.query_row(query, [], |row| row.get(0)) };
        // A former version has noted nothing of it.
        let has_moved = one("SELECT count(*) FROM sqlite_schema WHERE name = 'moved'");
        let has_moved = has_moved.map_err(|source| self.sqlite(source))? > 0;
        let moved = |work: Work| match has_moved {
            true => {
                format!("(SELECT sum(bytes) FROM moved WHERE job = past.id AND work = '{}')", work.word())
            }
            false => "NULL".to_owned(),
        };
        let in_use = [RsaState::InuseIn, RsaState::InuseBoth, RsaState::InuseOut];
        let in_use = in_use.map(|state| format!("'{}'", state.word())).join(", ");
        let query = format!(
            "SELECT id, job,
                (SELECT min(at_ms) FROM journal WHERE job = past.id AND job_state = 'RUNNING'),
                (SELECT min(at_ms) FROM journal WHERE job = past.id AND job_state = 'FINISHED'),
                EXISTS (SELECT 1 FROM journal WHERE job = past.id AND rsa_state IN ({in_use})),
                {}, {}
            FROM past_jobs AS past ORDER BY ended_ms",
            moved(Work::StageIn),
            moved(Work::StageOut)
        );
        let read = || -> rusqlite::Result<Vec<Result<PastJob, (String, serde_json::Error)>>> {
            let mut statement = self.connection.prepare(&query)?;
            let rows = statement.query_map([], |row| {
                let number =
                    |index| row.get::<_, Option<i64>>(index).map(|found| found.map(|found| found as u64));
                let (id, job): (String, String) = (row.get(0)?, row.get(1)?);
                let (began, ended, in_ram) = (number(2)?.map(Time), number(3)?.map(Time), row.get(4)?);
                let (staged_in, staged_out) = (number(5)?.map(Bytes), number(6)?.map(Bytes));
                let job = serde_json::from_str::<Job>(&job).map_err(|error| (id, error));
                Ok(job.map(|job| PastJob {
                    id: job.id,
                    uid: job.owner.uid,
                    nodes: job.compute_nodes,
                    ran: began.zip(ended),
                    in_ram,
                    staged_in,
                    staged_out,
                }))
            })?;
            rows.collect()
        };
        let jobs = read().map_err(|source| self.sqlite(source))?;
        let jobs = jobs.into_iter().collect::<Result<_, _>>();
        let jobs = jobs.map_err(|(id, error)| self.malformed(format!("the former job {id}"), &error))?;
        let unfinished = one("SELECT count(*) FROM jobs").map_err(|source| self.sqlite(source))? as u64;
        Ok(Workload { jobs, unfinished })
    }
}
