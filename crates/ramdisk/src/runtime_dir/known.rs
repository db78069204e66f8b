//! The processes of a RAM disk that are known, and what became of them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::ending::{ends, kill_if_marked, marked};
use super::{RuntimeDir, lock};
use crate::EngineError;

/// How long [`RuntimeDir::adopt`] waits for the end of an earlier agent's tasks.
const ENDING: Duration = Duration::from_secs(5);

/// A process of a RAM disk.
#[derive(Clone, Debug)]
pub struct Process {
    /// What it is: `brick`, `client`, `monitor`.
    pub role: String,
    /// Its process id.
    pub pid: i32,
    /// How it ended, once it has: the status if it was our child, else nothing is known.
    pub ended: Option<Option<ExitStatus>>,
}

impl RuntimeDir {
    /// The processes that were started or found here, the ended ones too.
    pub fn processes(&self) -> Vec<Process> {
        self.table().values().cloned().collect()
    }

    /// Forgets the processes of a role that have ended, as they were meant to.
    pub fn forget_ended(&self, role: &str) {
        self.table().retain(|_, process| process.role != role || process.ended.is_none());
    }

    /// The running process of a role.
    pub fn running(&self, role: &str) -> Option<i32> {
        self.table().values().find(|process| process.role == role && process.ended.is_none()).map(|p| p.pid)
    }

    /// Fails with the end of its log if the process of this role has ended (or never began).
    ///
    /// # Errors
    /// [`EngineError::Exited`].
    pub fn must_run(&self, role: &str) -> Result<i32, EngineError> {
        let table = self.table();
        let of_role = || table.values().filter(|process| process.role == role);
        if let Some(process) = of_role().find(|process| process.ended.is_none()) {
            return Ok(process.pid);
        }
        let how = of_role().next_back().map_or_else(
            || "it is not running".to_owned(),
            |process| describe(process.ended.as_ref().and_then(|status| *status)),
        );
        Err(EngineError::Exited { role: role.to_owned(), how, log: tail(&self.log(role), 0) })
    }

    /// Finds the processes that an earlier agent started for this incarnation, and watches them. Its tasks are ended:
    /// nobody waits for them any more.
    ///
    /// # Errors
    /// If it can't be told which they are.
    pub fn adopt(&self) -> io::Result<()> {
        let mut tasks = Vec::new();
        for found in marked(&self.scope)? {
            if found.id != self.id.to_string() || self.table().contains_key(&found.pid) {
                continue;
            }
            if found.is_a_task() {
                tasks.extend(kill_if_marked(found.pid, &self.scope, self.id.name.as_str()));
            } else {
                watch_adopted(&self.processes, found.role, found.pid)?;
            }
        }
        let until = Instant::now() + ENDING;
        for (pid, handle) in tasks {
            if !ends(&handle, until) {
                tracing::error!(ramdisk = %self.id, pid, "a task of an earlier agent does not end");
            }
        }
        Ok(())
    }
}

pub(super) fn note_end(table: &Mutex<BTreeMap<i32, Process>>, pid: i32, status: Option<ExitStatus>) {
    if let Some(process) = lock(table).get_mut(&pid) {
        process.ended = Some(status);
    }
}

fn watch_adopted(table: &Arc<Mutex<BTreeMap<i32, Process>>>, role: String, pid: i32) -> io::Result<()> {
    let Some(number) = Pid::from_raw(pid) else { return Ok(()) };
    let handle = match pidfd_open(number, PidfdFlags::empty()) {
        Ok(handle) => handle,
        // It has ended meanwhile.
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    lock(table).insert(pid, Process { role, pid, ended: None });
    let table = Arc::clone(table);
    std::thread::spawn(move || {
        while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(&handle, PollFlags::IN)], None) {}
        note_end(&table, pid, None);
    });
    Ok(())
}

pub(super) fn describe(status: Option<ExitStatus>) -> String {
    match status {
        None => "it ended".into(),
        Some(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("it exited with code {code}"),
            (None, Some(signal)) => format!("signal {signal} ended it"),
            (None, None) => "it ended".into(),
        },
    }
}

/// The last lines of a log from `start` on, for a message.
pub fn tail(log: &Path, start: u64) -> String {
    const MOST: u64 = 2000;
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(start.max(length.saturating_sub(MOST))))?;
        let mut text = Vec::new();
        file.take(MOST).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(4)..].join("\n")
}
