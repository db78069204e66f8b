//! How a run has used its files, judged by what is left of it: names, sizes, and when each was written last.
//!
//! Who wrote a file can't be seen in it, so much stays open; what has two explanations is *not known*, and says which
//! ([`Unclear`]). What tells:
//!
//! - **Counts.** Files of one kind ([`crate::census`]) that are as many as the processes, in each of some steps, have a process each;
//!   as many as the nodes, a node each.
//! - **Times.** Twelve files may be of twelve processes, or be one file that was written twelve times. The former are written
//!   together, the latter one after the other, over all of the run.
//! - **Sizes.** A file of which each process has at least a stripe was hardly written by one of them; of a smaller one that is open, and
//!   matters to nobody.
//!
//! What a run reads can't be seen in what it leaves.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::census::{KindTally, SMALL, Tally};

/// The run that has left the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunShape {
    /// Its nodes.
    pub nodes: u32,
    /// Its processes, on all of them.
    pub tasks: u32,
    /// How long it ran.
    pub lasted_ms: u64,
}

/// How a run's processes have used files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileUse {
    /// All use one file at a time.
    OneFile,
    /// Each has its own.
    FilePerProcess,
    /// Those of a node share one.
    FilePerNode,
    /// Groups of them share one each.
    Groups {
        /// How many files at a time.
        files: u64,
    },
    /// All files are small.
    SmallFiles {
        /// How many.
        files: u64,
    },
    /// There is one process.
    OneProcess,
    /// It can't be told.
    NotKnown(Unclear),
}

/// Why it can't be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unclear {
    /// The run has left nothing.
    NoFiles,
    /// A handful of small files.
    FewBytes,
    /// No use has most of the bytes.
    Mixed,
    /// The files may be of several processes each, or of one after the other.
    Order,
    /// Their number fits neither the processes nor the nodes.
    Count,
    /// A file is so small that one process may have written it.
    Small,
}

/// So many small files are many.
const MANY: u64 = 16;

/// A use must have this part of the bytes of large files.
const MOST: (u64, u64) = (6, 10);

/// Files that are written within this part of a run (one in so many) are written together.
const TOGETHER: u64 = 4;

/// Those that are spread over this part of it are written one after the other.
const APART: u64 = 2;

/// Judges what a run has left.
///
/// ```
/// use ondeck_core::Bytes;
/// use ondeck_layout::census::Census;
/// use ondeck_layout::classify::{FileUse, RunShape, classify};
/// let mut census = Census::default();
/// for rank in 0..64 {
///     census.add_written(format!("rank-{rank}.dat").as_bytes(), Bytes(1 << 30), Some(60_000 + rank));
/// }
/// let shape = RunShape { nodes: 4, tasks: 64, lasted_ms: 70_000 };
/// assert_eq!(classify(&census.tally(), shape), FileUse::FilePerProcess);
/// ```
pub fn classify(tally: &Tally, shape: RunShape) -> FileUse {
    if tally.files == 0 {
        return FileUse::NotKnown(Unclear::NoFiles);
    }
    if tally.large < SMALL {
        return match tally.files {
            files if files >= MANY => FileUse::SmallFiles { files },
            _ => FileUse::NotKnown(Unclear::FewBytes),
        };
    }
    if shape.tasks <= 1 {
        return FileUse::OneProcess;
    }
    // Layouts are for bytes: the kinds that have most of them decide.
    let large = tally.kinds.iter().filter(|kind| kind.largest >= SMALL);
    let mut uses: Vec<(FileUse, u64)> = Vec::new();
    for kind in large {
        let found = use_of(kind, shape);
        match uses.iter_mut().find(|(known, _)| *known == found) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(kind.bytes.0),
            None => uses.push((found, kind.bytes.0)),
        }
    }
    let (part, of) = MOST;
    // What is in kinds that are not told counts against all of them.
    let enough = u128::from(tally.bytes.0) * u128::from(part) / u128::from(of);
    match uses.iter().max_by_key(|(_, bytes)| *bytes) {
        Some((found, bytes)) if u128::from(*bytes) >= enough => *found,
        _ => FileUse::NotKnown(Unclear::Mixed),
    }
}

/// How the files of one kind were used by several processes.
fn use_of(kind: &KindTally, shape: RunShape) -> FileUse {
    let unclear = FileUse::NotKnown;
    if kind.kind.is_empty() {
        return unclear(Unclear::Mixed);
    }
    // A number that is the same everywhere, as in `.h5`, is a part of the name.
    let counts: Vec<u64> = kind.numbers.iter().copied().filter(|count| *count > 1).collect();
    let (tasks, nodes) = (u64::from(shape.tasks), u64::from(shape.nodes));
    match counts[..] {
        [] if kind.files == 1 => one_file(kind, tasks),
        [] => unclear(Unclear::Count),
        [count] if count != kind.files => unclear(Unclear::Count),
        [count] => match timing(kind, shape) {
            Some(Timing::Together) if count.is_multiple_of(tasks) => FileUse::FilePerProcess,
            Some(Timing::Together) if count == nodes => FileUse::FilePerNode,
            Some(Timing::Together) if count < tasks && tasks.is_multiple_of(count) => {
                FileUse::Groups { files: count }
            }
            Some(Timing::Together) => unclear(Unclear::Count),
            Some(Timing::Apart) => one_file(kind, tasks),
            None => unclear(Unclear::Order),
        },
        // Steps and ranks, in any order: every step has a file of every rank.
        _ => {
            let all = counts.iter().try_fold(1u64, |product, count| product.checked_mul(*count));
            if all != Some(kind.files) {
                return unclear(Unclear::Count);
            }
            let is = |number: u64| counts.iter().filter(|count| **count == number).count();
            match (is(tasks), nodes > 1 && is(nodes) > 0) {
                // Two of them: one is the steps.
                (1.., _) => FileUse::FilePerProcess,
                (0, true) => FileUse::FilePerNode,
                _ => unclear(Unclear::Count),
            }
        }
    }
}

/// One file at a time, whoever writes it.
fn one_file(kind: &KindTally, tasks: u64) -> FileUse {
    if kind.largest.0 / tasks >= SMALL.0 { FileUse::OneFile } else { FileUse::NotKnown(Unclear::Small) }
}

/// When files of a kind were written.
enum Timing {
    Together,
    Apart,
}

/// Nothing if it can't be told.
fn timing(kind: &KindTally, shape: RunShape) -> Option<Timing> {
    let spread = kind.spread_ms?;
    if spread.saturating_mul(TOGETHER) <= shape.lasted_ms {
        return Some(Timing::Together);
    }
    (spread.saturating_mul(APART) >= shape.lasted_ms).then_some(Timing::Apart)
}

impl FileUse {
    /// Whether two uses are of one kind, however many files there are.
    pub fn is_like(self, other: FileUse) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }

    /// Whether it could be told.
    pub fn is_known(self) -> bool {
        !matches!(self, FileUse::NotKnown(_))
    }
}

impl fmt::Display for FileUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OneFile => f.write_str("all processes use one file"),
            Self::FilePerProcess => f.write_str("each process has files of its own"),
            Self::FilePerNode => f.write_str("each node has a file"),
            Self::Groups { files } => write!(f, "{files} files at a time, each of several processes"),
            Self::SmallFiles { files } => write!(f, "{files} files, none of 1 MiB or more"),
            Self::OneProcess => f.write_str("there is one process"),
            Self::NotKnown(why) => write!(f, "not known: {why}"),
        }
    }
}

impl fmt::Display for Unclear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoFiles => "there are no files",
            Self::FewBytes => "there are a few small files",
            Self::Mixed => "no use has most of the bytes",
            Self::Order => "it can't be seen whether the files were written together or one after the other",
            Self::Count => "the number of files fits neither the processes nor the nodes",
            Self::Small => "the file is so small that one process may have written it",
        })
    }
}
