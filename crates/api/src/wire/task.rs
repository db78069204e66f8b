//! Staging and users' scripts, and how they are getting on.

use std::path::PathBuf;

use ondeck_core::{Bytes, PackFormat, Rate};
use serde::{Deserialize, Serialize};

use super::refusal::{Refusal, RefusalCode};
use super::striping::{StripingResult, StripingWork};

/// Work on a RAM disk, done on one of its nodes as its owner. Asked for again under the same name, nothing new is
/// started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRequest {
    /// What is to be done.
    pub work: TaskWork,
    /// The RAM disk's owner, who does it, with all groups that the node knows of.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
    /// The job, as the workload manager calls it: letters, digits and `._-`.
    pub job: String,
    /// What tells the job's files from those of other jobs, also of one that had its number: letters, digits and `._-`.
    /// Files that are put beside others are called `NAME.ondeck-LABEL`. The job's number if it is empty, as in an order
    /// of a former version.
    #[serde(default)]
    pub label: String,
    /// Where a script runs, if the user can enter it.
    pub work_dir: PathBuf,
    /// How long it may take.
    pub deadline_ms: u64,
    /// The most that is copied in a second.
    pub bandwidth: Option<Rate>,
    /// What of the directories is this task's, where several nodes work on them.
    #[serde(default)]
    pub share: Option<Share>,
    /// For at least so long nobody has changed what is in the RAM disk. What a node has seen of it since is true.
    #[serde(default)]
    pub unchanged_ms: u64,
}

/// What of a job's directories is one task's. Entries of their top levels are shared out, each with all that it holds, so
/// that no two tasks meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Tells the shares of one job apart.
    pub index: u32,
    /// The entries: the name of the directory in the RAM disk, and the entry's own name.
    pub entries: Vec<(String, String)>,
    /// Whether the task is to do everything but these. It comes last, when all others are done: what belongs to a
    /// directory as a whole is its own.
    pub all_but: bool,
}

/// An entry of the top level of a job's directory, with all that it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// The name of the directory in the RAM disk.
    pub directory: String,
    /// The entry's name.
    pub entry: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// How many files.
    pub files: u64,
}

/// What a task does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum TaskWork {
    /// Looks at what there is to copy, so that it can be shared out: [`TaskReport::units`]. There are none if files have
    /// several names, which must stay together.
    Survey {
        directories: Vec<JobDirectory>,
        /// Whether results are looked at, in the RAM disk; otherwise the input, on disk.
        home: bool,
    },
    /// Puts into the RAM disk what the job shall see: of every directory what is in it on disk. What an interrupted one
    /// has copied already is not copied again.
    Fill {
        directories: Vec<JobDirectory>,
        /// The user's script that fills the first input directory instead: `SCRIPT RAM_DISK_DIRECTORY DISK_DIRECTORY`.
        script: Option<PathBuf>,
        /// The job runs and goes on to change them: what can't be copied now is left to the next time.
        #[serde(default)]
        moving: bool,
    },
    /// Puts into the RAM disk what a job that runs already has written to its output directories on disk since the fill,
    /// and what the RAM disk hides since it was mounted over them. Only what the RAM disk does not have is copied, nothing
    /// is replaced, and what the job has deleted stays away. Bringing home knows afterwards that these entries are the
    /// job's own.
    CatchUp {
        /// Which directories; those of the fill.
        directories: Vec<JobDirectory>,
    },
    /// Merges what the job made of the output directories into those on disk, flushed. It may be done again, from any
    /// node; what is on disk already is not copied again.
    BringHome {
        /// Which directories; those of the fill.
        directories: Vec<JobDirectory>,
        /// The user's script that saves the first output directory instead: `SCRIPT RAM_DISK_DIRECTORY DISK_DIRECTORY`.
        script: Option<PathBuf>,
        /// Makes one archive of each output directory instead: `results-JOB.FORMAT` in the directory on disk.
        pack: Option<PackFormat>,
        /// Takes what this node's own server has, whatever became of the others: nothing on disk is replaced or deleted.
        /// For engines that have each file whole on one server.
        #[serde(default)]
        salvage: bool,
    },
    /// Looks at the layouts of directories on disk, or sets them: [`TaskReport::striping`]. It is about no RAM disk, and is
    /// begun by an order for layouts alone.
    Stripe {
        /// The directories below which layouts may be set.
        prefixes: Vec<PathBuf>,
        work: StripingWork,
    },
}

/// The files that one node has of a RAM disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// How many there are; `names` has the first of them.
    pub files: u64,
    /// The sum of their sizes.
    pub bytes: Bytes,
    /// The first of them: `DIRECTORY/PATH`, with the name of the directory in the RAM disk.
    pub names: Vec<String>,
}

/// A directory of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobDirectory {
    /// Its path on disk: absolute.
    pub path: PathBuf,
    /// Its directory in the owner's part of the RAM disk: letters, digits, `-` and `_`.
    pub name: String,
    /// Whether the job reads it.
    pub input: bool,
    /// Whether the job writes it.
    pub output: bool,
}

/// How a task is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// The name under which the task was asked for.
    pub name: String,
    /// Whether it has ended, and how.
    pub state: TaskState,
    /// Entries found so far that are no directories.
    pub entries_found: u64,
    /// Those of them that are done.
    pub entries_done: u64,
    /// Bytes of the files found so far.
    pub bytes_found: u64,
    /// Those of them that are done, copied or there already; holes count.
    pub bytes_done: u64,
    /// Bytes of data that it has written itself; holes are none. Nothing is said by agents of a former version.
    #[serde(default)]
    pub bytes_written: Option<u64>,
    /// The first entries that failed, with the reason.
    pub errors: Vec<String>,
    /// The first files that were put beside others, because those had changed on disk.
    pub beside: Vec<String>,
    /// What a survey has found: the largest entries.
    #[serde(default)]
    pub units: Vec<Unit>,
    /// What became of directories whose layouts were to be looked at or set.
    #[serde(default)]
    pub striping: Vec<StripingResult>,
    /// How long it has run.
    pub seconds: f64,
    /// The end of what a script has printed.
    pub log: String,
    /// Whether the same again may succeed without a change to the job: there was no room, or it was interrupted.
    pub retryable: bool,
}

/// Whether a task has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// It has not ended.
    Running,
    /// It has, and nothing of it is left.
    Done {
        /// Whether all of it was done.
        ok: bool,
        /// What the user should know: if it was not, what, where and what to do.
        message: Option<String>,
    },
}

impl TaskReport {
    /// Bytes of data that it has written, as far as its agent can tell.
    pub fn written(&self) -> u64 {
        self.bytes_written.unwrap_or(self.bytes_done)
    }

    /// A task that begins.
    pub fn new(name: &str) -> TaskReport {
        TaskReport {
            name: name.to_owned(),
            state: TaskState::Running,
            entries_found: 0,
            entries_done: 0,
            bytes_found: 0,
            bytes_done: 0,
            bytes_written: None,
            errors: Vec::new(),
            beside: Vec::new(),
            units: Vec::new(),
            striping: Vec::new(),
            seconds: 0.0,
            log: String::new(),
            retryable: false,
        }
    }
}

impl TaskWork {
    /// The job's directories that it is about.
    pub fn directories(&self) -> &[JobDirectory] {
        match self {
            TaskWork::Survey { directories, .. }
            | TaskWork::Fill { directories, .. }
            | TaskWork::CatchUp { directories }
            | TaskWork::BringHome { directories, .. } => directories,
            TaskWork::Stripe { .. } => &[],
        }
    }

    /// Whether it takes what this node's own server has.
    pub fn is_salvage(&self) -> bool {
        matches!(self, TaskWork::BringHome { salvage: true, .. })
    }

    /// The user's script.
    pub fn script(&self) -> Option<&std::path::Path> {
        match self {
            TaskWork::Survey { .. } | TaskWork::CatchUp { .. } | TaskWork::Stripe { .. } => None,
            TaskWork::Fill { script, .. } | TaskWork::BringHome { script, .. } => script.as_deref(),
        }
    }
}

/// Whether a text is the name of a directory's entry.
fn is_entry(text: &str) -> bool {
    !text.is_empty() && text != "." && text != ".." && !text.contains(['/', '\0'])
}

impl TaskRequest {
    /// What tells the job's files from those of other jobs.
    pub fn label(&self) -> &str {
        if self.label.is_empty() { &self.job } else { &self.label }
    }

    /// What orders of people call the job, so that no other one is meant.
    pub fn name(&self) -> String {
        self.label().replacen('-', "@", 1)
    }

    /// Refuses what makes no sense, or would become a file name that leads elsewhere.
    ///
    /// # Errors
    /// [`RefusalCode::Malformed`].
    pub fn check(&self) -> Result<(), Refusal> {
        let malformed = |message: String| Err(Refusal::new(RefusalCode::Malformed, message));
        if !is_plain(self.label()) {
            return malformed(format!(
                "`{}` is no label of a job: use letters, digits and `._-`",
                self.label
            ));
        }
        if !is_plain(&self.job) {
            return malformed(format!("`{}` is no name of a job: use letters, digits and `._-`", self.job));
        }
        if matches!(self.work, TaskWork::Stripe { .. }) {
            return malformed("layouts are no work for a RAM disk".into());
        }
        let directories = self.work.directories();
        for (index, directory) in directories.iter().enumerate() {
            if !is_plain(&directory.name) || directory.name.contains('.') {
                return malformed(format!("`{}` is no name of a directory in a RAM disk", directory.name));
            }
            let path = directory.path.display();
            if !directory.path.is_absolute() {
                return malformed(format!("the directory {path} is not absolute"));
            }
            let before = &directories[..index];
            if before.iter().any(|other| other.name == directory.name || other.path == directory.path) {
                return malformed(format!("the directory {path} (`{}`) is there twice", directory.name));
            }
        }
        if let Some(share) = &self.share {
            if matches!(self.work, TaskWork::CatchUp { .. }) {
                return malformed("catching up can't be shared out".into());
            }
            if let Some((_, entry)) = share.entries.iter().find(|(_, entry)| !is_entry(entry)) {
                return malformed(format!("`{entry}` is no entry of a directory"));
            }
            if let Some(script) = self.work.script() {
                return malformed(format!("the work of the script {} can't be shared out", script.display()));
            }
        }
        if let (TaskWork::Fill { script: Some(script), .. }, false) =
            (&self.work, directories.iter().any(|directory| directory.input))
        {
            return malformed(format!("the script {} has no input directory to fill", script.display()));
        }
        if matches!(&self.work, TaskWork::BringHome { salvage: true, script, pack, .. } if script.is_some() || pack.is_some())
        {
            return malformed(
                "what is salvaged is a part of the results, which is neither packed nor left to a script"
                    .into(),
            );
        }
        if let TaskWork::BringHome { script: Some(script), pack, .. } = &self.work {
            if pack.is_some() {
                return malformed("a script and packing exclude each other; let the script pack".into());
            }
            if !directories.iter().any(|directory| directory.output) {
                return malformed(format!("the script {} has no output directory to save", script.display()));
            }
        }
        Ok(())
    }
}

/// Whether a text can be a part of a file name: 1 to 64 letters, digits and `._-`, none of the two signs in front.
pub fn is_plain(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c))
        && !text.starts_with(['.', '-'])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn of_a_former_agent_what_is_done_is_taken_for_written() {
        let mut report = TaskReport::new("out");
        (report.bytes_done, report.bytes_written) = (100, Some(1));
        let mut said = serde_json::to_value(&report).unwrap();
        assert_eq!(serde_json::from_value::<TaskReport>(said.clone()).unwrap().written(), 1);
        said.as_object_mut().unwrap().remove("bytes_written");
        assert_eq!(serde_json::from_value::<TaskReport>(said).unwrap().written(), 100);
    }
}
