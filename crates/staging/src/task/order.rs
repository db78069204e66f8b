//! What an agent tells the runner of a task, and what that tells the agent.

use std::path::PathBuf;
use std::time::Duration;

use ondeck_api::wire::{StripingResult, TaskRequest, Unit};
use ondeck_core::{Bytes, NodeName, RamDiskId};
use serde::{Deserialize, Serialize};

/// What a runner is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TaskOrder {
    /// The RAM disk; for work without one, what the job's would be called.
    pub ramdisk: RamDiskId,
    /// The node, for messages.
    pub node: NodeName,
    /// What to do.
    pub request: TaskRequest,
    /// The owner's directory of the RAM disk, where only root can reach it; nothing for work on disk alone.
    pub data: Option<PathBuf>,
    /// The agent's directory.
    pub state: PathBuf,
    /// The agent's socket.
    pub socket: PathBuf,
    /// The most memory that a script may take.
    pub script_memory: Bytes,
    /// Whether a script must have a memory group, or is not run.
    pub require_memory_group: bool,
    /// How long this node may believe what it saw of the RAM disk before, though the job has changed it since.
    pub out_of_date: Duration,
}

/// What a runner says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Line {
    /// How far it is.
    Progress {
        entries_found: u64,
        entries_done: u64,
        bytes_found: u64,
        bytes_done: u64,
        /// Bytes of data that were written, without holes. A runner of a former version does not say it.
        #[serde(default)]
        bytes_written: Option<u64>,
    },
    /// An entry failed.
    Error(String),
    /// A file was put beside another.
    Beside(String),
    /// What a survey has found.
    Units(Vec<Unit>),
    /// What became of a directory's layout.
    Striping(Box<StripingResult>),
    /// The end of a script's output.
    Log(String),
    /// The runner's last line.
    Done {
        /// Whether all was done.
        ok: bool,
        /// What the user should know.
        message: Option<String>,
        /// Whether the same again may succeed.
        retryable: bool,
    },
}

/// Names of each kind in a report.
pub const MOST_NAMED: usize = 20;

/// The most entries that a survey tells of. What is not told of is left to the task that comes last.
pub const MOST_UNITS: usize = 2000;

/// The most directories whose layouts are told of.
pub const MOST_STRIPED: usize = 64;

/// The longest text in a report: some long paths and what is wrong with them.
const LONGEST_TEXT: usize = 64 << 10;

/// What a report has room for. Whoever passes a worker's lines on asks it: a report must not grow without end, whatever
/// the worker has become.
#[derive(Debug, Default)]
pub struct Room {
    errors: usize,
    beside: usize,
    units: usize,
    striped: usize,
}

impl Room {
    /// Whether there is room for a line, which is taken then.
    pub fn take(&mut self, line: &Line) -> bool {
        let named = |count: &mut usize, text: &str| {
            *count += 1;
            *count <= MOST_NAMED && text.len() <= LONGEST_TEXT
        };
        match line {
            Line::Error(text) => named(&mut self.errors, text),
            Line::Beside(text) => named(&mut self.beside, text),
            Line::Units(units) => {
                self.units = self.units.saturating_add(units.len());
                // A directory's name is a plain one, and the kernel allows no longer entries.
                let fits = |unit: &Unit| unit.directory.len() <= 64 && unit.entry.len() <= 255;
                self.units <= MOST_UNITS && units.iter().all(fits)
            }
            Line::Striping(result) => {
                self.striped += 1;
                let length = serde_json::to_string(result).map_or(usize::MAX, |text| text.len());
                self.striped <= MOST_STRIPED && length <= LONGEST_TEXT
            }
            Line::Log(text) | Line::Done { message: Some(text), .. } => text.len() <= LONGEST_TEXT,
            Line::Progress { .. } | Line::Done { message: None, .. } => true,
        }
    }
}
