//! Layouts of a job's directories on disk: set as its user when it starts, and taken back when it has ended. What the job has left
//! there is counted then, for its user's history.

use std::path::{Path, PathBuf};

use ondeck_core::Incarnation;
use ondeck_layout::Tool;
use ondeck_layout::census::Tally;
use ondeck_layout::watched::KindSeen;
use serde::{Deserialize, Serialize};

use super::refusal::{Refusal, RefusalCode};

/// The most directories of one order.
const MOST_DIRECTORIES: usize = 64;

/// Gives new files of a job's directories layouts. Ordered again, it does what is not done yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripingOrder {
    /// The job's user, who does it, with all groups that the node knows of.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
    /// How long it may take.
    pub deadline_ms: u64,
    /// The directories.
    pub directories: Vec<DirectoryToStripe>,
    /// Other jobs for which layouts are set: a directory that has one of theirs is left alone, whatever it is called here.
    #[serde(default)]
    pub rivals: Vec<Incarnation>,
}

/// A directory, and the layout that its new files shall have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryToStripe {
    /// Its path on disk: absolute.
    pub path: PathBuf,
    /// The layout, as options of `lfs setstripe`.
    pub options: String,
    /// How many targets its filesystem has, where that is known.
    pub targets: Option<u32>,
    /// How its filesystem is told layouts; if nothing is said, the filesystem itself says it.
    pub tool: Option<Tool>,
    /// Whether it is set also in the place of a layout that somebody has chosen for the directory.
    pub replace: bool,
    /// Whether it stays when the job has ended: then it is not noted what was there before.
    #[serde(default)]
    pub keep: bool,
}

/// Gives directories of a job back the layouts that they had before, unless somebody has changed them since. What the node
/// has noted itself counts for more than the directories of the order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreOrder {
    /// The job's user.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
    /// How long it may take.
    pub deadline_ms: u64,
    /// The directories, as far as it is known what they had.
    pub directories: Vec<DirectoryToRestore>,
}

/// Counts what a job has left in directories on disk, as its user. Nothing is changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountOrder {
    /// The job's user.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
    /// How long it may take; what is not counted by then is not told.
    pub deadline_ms: u64,
    /// Files count that were written last from then on, in milliseconds since 1970 by the clock of their filesystem...
    pub from_ms: u64,
    /// ... and not later than this.
    pub until_ms: u64,
    /// The directories.
    pub directories: Vec<PathBuf>,
    /// Whether it is told by which handles some of the large files are known.
    #[serde(default)]
    pub samples: bool,
}

/// Watches who writes files on the filesystems of a job's directories, until [`KindsToTell`] ends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchOrder {
    /// The job's user: what others write there is not the job's, whatever they say. A former scheduler does not say it.
    #[serde(default)]
    pub uid: Option<u32>,
    /// How long beginning may take; a job's start waits for it.
    pub deadline_ms: u64,
    /// How long it is watched at most.
    pub longest_ms: u64,
    /// The directories.
    pub directories: Vec<PathBuf>,
}

/// Ends watching a job, and asks what was seen of files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindsToTell {
    /// The kinds of files, in some order.
    pub kinds: Vec<KindToTell>,
}

/// A sample of the files of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindToTell {
    /// The directory of the job in which they are, as it was ordered.
    pub directory: PathBuf,
    /// Their file handles, as [`StripingOutcome::Counted`] has them.
    pub files: Vec<String>,
}

/// What was seen, kind by kind, in the order in which it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindsSeen {
    /// As many as were asked for.
    pub kinds: Vec<KindSeen>,
}

/// A directory that was given a layout, or nearly so, and what it had before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryToRestore {
    /// Its path on disk: absolute.
    pub path: PathBuf,
    /// What it was given, as in [`DirectoryToStripe`]: as long as it has that, nobody has changed it.
    pub options: String,
    /// As in [`DirectoryToStripe`].
    pub targets: Option<u32>,
    /// As in [`DirectoryToStripe`].
    pub tool: Option<Tool>,
    /// What it had before.
    pub former: FormerLayout,
}

/// What a directory had before its layout was set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerLayout {
    /// The layout.
    pub layout: FormerValue,
    /// The note of `ondeck layout auto` that it had set it, if there was one.
    pub mark: Option<String>,
    /// The directory's inode: it may be called otherwise when the job has ended, and another one may have its name.
    #[serde(default)]
    pub inode: Option<u64>,
}

/// A layout in the words in which it can be set again exactly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FormerValue {
    /// Nothing of its own: what the directory above has.
    Inherited,
    /// The value of CephFS's attribute.
    Cephfs(String),
    /// Options of `lfs setstripe`, for filesystems where every directory has a layout.
    Options(String),
}

/// What became of each directory of an order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripingReport {
    /// In any order.
    pub directories: Vec<StripingResult>,
}

/// What became of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripingResult {
    /// As it was ordered.
    pub path: PathBuf,
    /// What came of it.
    pub outcome: StripingOutcome,
    /// What it had before, if something else was tried to be set.
    pub former: Option<FormerLayout>,
}

/// What came of an order for a directory. Layouts are in the words of the filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StripingOutcome {
    /// It was looked at: nothing keeps its layout from being set.
    Free,
    /// New files have the layout from now on.
    Set {
        /// What it has.
        native: String,
    },
    /// It has that layout already.
    Has {
        /// What it has.
        native: String,
    },
    /// It has a layout that was set for another job, one of the order's rivals.
    SetFor {
        /// Which job.
        job: Incarnation,
        /// What the directory is called there.
        path: PathBuf,
        /// The inode of the directory that says so.
        #[serde(default)]
        inode: Option<u64>,
    },
    /// Its filesystem stripes no files, and will not the next time either.
    NotStriped {
        /// In words.
        why: String,
    },
    /// It keeps what somebody has chosen for it.
    Chosen {
        /// What it has.
        native: String,
    },
    /// It has again what it had before.
    Restored {
        /// What it has.
        native: String,
    },
    /// What was to be taken back had not been set.
    AsBefore,
    /// It keeps what somebody has set since.
    Changed {
        /// What it has.
        native: String,
    },
    /// It was begun to set it, and is not known whether that was done.
    Unknown {
        /// Why.
        why: String,
    },
    /// What was set can't be taken back any more, and there is no use in trying again.
    Gone {
        /// Why.
        why: String,
    },
    /// Files were counted.
    Counted {
        /// What is there.
        tally: Box<Tally>,
        /// Of each kind of the tally, the handles of a sample of its large files, if that was ordered.
        #[serde(default)]
        samples: Vec<Vec<String>>,
    },
    /// It could not be looked at, or not be set.
    Failed {
        /// In words: what, where, and what to do.
        why: String,
    },
}

/// A part of such an order, which a task does as the user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum StripingWork {
    /// Looks at what directories have, and whether that may be replaced.
    Look { directories: Vec<DirectoryToStripe>, rivals: Vec<Incarnation> },
    /// Sets layouts of directories that had this when they were looked at.
    Set { directories: Vec<(DirectoryToStripe, FormerLayout)>, rivals: Vec<Incarnation>, job: Incarnation },
    /// Takes them back.
    Restore { directories: Vec<DirectoryToRestore> },
    /// Counts files that were written last within a time.
    Count { directories: Vec<PathBuf>, from_ms: u64, until_ms: u64, samples: bool },
}

impl StripingWork {
    /// The directories that it is about.
    pub fn paths(&self) -> Vec<&Path> {
        match self {
            StripingWork::Look { directories, .. } => {
                directories.iter().map(|directory| directory.path.as_path()).collect()
            }
            StripingWork::Set { directories, .. } => {
                directories.iter().map(|(directory, _)| directory.path.as_path()).collect()
            }
            StripingWork::Restore { directories } => {
                directories.iter().map(|directory| directory.path.as_path()).collect()
            }
            StripingWork::Count { directories, .. } => directories.iter().map(PathBuf::as_path).collect(),
        }
    }
}

impl StripingOrder {
    /// Refuses what makes no sense.
    ///
    /// # Errors
    /// [`RefusalCode::Malformed`].
    pub fn check(&self) -> Result<(), Refusal> {
        check(self.directories.iter().map(|directory| directory.path.as_path()))
    }
}

impl RestoreOrder {
    /// Refuses what makes no sense.
    ///
    /// # Errors
    /// [`RefusalCode::Malformed`].
    pub fn check(&self) -> Result<(), Refusal> {
        check(self.directories.iter().map(|directory| directory.path.as_path()))
    }
}

impl CountOrder {
    /// Refuses what makes no sense.
    ///
    /// # Errors
    /// [`RefusalCode::Malformed`].
    pub fn check(&self) -> Result<(), Refusal> {
        check(self.directories.iter().map(PathBuf::as_path))
    }
}

impl WatchOrder {
    /// Refuses what makes no sense.
    ///
    /// # Errors
    /// [`RefusalCode::Malformed`].
    pub fn check(&self) -> Result<(), Refusal> {
        check(self.directories.iter().map(PathBuf::as_path))
    }
}

fn check<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<(), Refusal> {
    let malformed = |message: String| Err(Refusal::new(RefusalCode::Malformed, message));
    let paths: Vec<&Path> = paths.collect();
    if paths.len() > MOST_DIRECTORIES {
        return malformed(format!("an order is about at most {MOST_DIRECTORIES} directories"));
    }
    for (index, path) in paths.iter().enumerate() {
        if !path.is_absolute() {
            return malformed(format!("the directory {} is not absolute", path.display()));
        }
        if paths[..index].contains(path) {
            return malformed(format!("the directory {} is there twice", path.display()));
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_order_names_each_directory_once_and_from_the_root() {
        let order = |paths: &[&str]| {
            let directory = |path: &&str| DirectoryToStripe {
                path: path.into(),
                options: "-c 1".into(),
                targets: None,
                tool: Some(Tool::Cephfs),
                replace: false,
                keep: false,
            };
            let directories = paths.iter().map(directory).collect();
            StripingOrder { uid: 1, gid: 1, deadline_ms: 1, directories, rivals: Vec::new() }
                .check()
                .map_err(|error| error.message)
        };
        assert!(order(&["/a", "/b"]).is_ok());
        assert!(order(&["a"]).unwrap_err().contains("not absolute"));
        assert!(order(&["/a", "/b", "/a"]).unwrap_err().contains("there twice"));
        let many: Vec<String> = (0..=MOST_DIRECTORIES).map(|number| format!("/{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(order(&many[1..]).is_ok() && order(&many).unwrap_err().contains("at most 64"));
    }
}
