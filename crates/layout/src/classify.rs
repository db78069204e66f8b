//! How a run has used its files, judged by what is left of it: names, sizes, and when each was written last.
//!
//! Who wrote a file can't be seen in it, so much stays open; what has two explanations is *not known*, and says which
//! ([`Unclear`]). Where nodes have watched who writes ([`crate::watched`]), that is taken first. What tells without it:
//!
//! - **Counts.** Files of one kind ([`crate::census`]) that are as many as the processes, in each of some steps, have a process each;
//!   as many as the nodes, a node each.
//! - **Times.** Twelve files may be of twelve processes, or be one file that was written twelve times. The former are written
//!   together, the latter one after the other, over all of the run. A few files may also be the last ones of many that were written one
//!   after the other and removed, as of checkpoints: then they are further apart than files of processes are, and their numbers may
//!   be higher than those of processes. Where there are several numbers, that of the steps is the one of which all files with one
//!   value were written together.
//! - **Sizes.** A file of which each process has at least a stripe was hardly written by one of them; of a smaller one that is open, and
//!   matters to nobody.
//! - **Names.** Logs and tables of text, databases of one host, and archives have one writer, however many processes there are.
//!
//! What a run reads can't be seen in what it leaves.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::census::{KindTally, SMALL, Tally};
use crate::watched::WatchedKind;

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
    /// There are several, and one of them writes: a log, a database or an archive, or so it was seen.
    OneWriter,
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
    /// By the name of a file it may be a log, or data of all processes.
    Name,
}

/// So many small files are many.
const MANY: u64 = 16;

/// A use must have this part of the bytes of large files.
const MOST: (u64, u64) = (6, 10);

/// So many of the processes are taken for all of them: one or two of many may have nothing to write.
const NEARLY: (u64, u64) = (3, 4);

/// Files that are written within this part of a run (one in so many) are written together.
const TOGETHER: u64 = 4;

/// Those that are spread over this part of it are written one after the other.
const APART: u64 = 2;

/// So few files may be the last of many that were written one after the other: more checkpoints are hardly kept.
const FEW: u64 = 8;

/// So few are written one after the other also if they are spread over this part of a run: the first of two steps is written when
/// half of them is over.
const FEW_APART: u64 = 3;

/// Nobody writes steps that are closer together, in milliseconds; and hardly ever more than [`MOST_STEPS`] of them.
const STEP_MS: u64 = 1000;

/// See [`STEP_MS`].
const MOST_STEPS: u64 = 1000;

/// Numbers that have a divisor of at least that are those of steps.
const ROUND: u64 = 5;

/// How the names of files end that one process writes: text that is appended to, databases whose locks are one host's, and archives.
const OF_ONE_WRITER: [&str; 14] = [
    ".log", ".txt", ".csv", ".tsv", ".jsonl", ".db", ".db3", ".sqlite", ".sqlite3", ".tar", ".gz", ".tgz",
    ".zst", ".zip",
];

/// Logs of single programs whose names have no such end: those of VASP, in small letters.
const LOGS: [&str; 3] = ["outcar", "oszicar", "xdatcar"];

/// How names end that logs have as well as data of all processes.
const OF_ANY: &str = ".out";

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
    // A job of one task may have started several processes itself.
    let at_once = tally.kinds.iter().filter_map(|kind| Some(kind.watched?.at_once)).max().unwrap_or(0);
    let shape = if shape.tasks <= 1 { RunShape { tasks: at_once, ..shape } } else { shape };
    if shape.tasks <= 1 {
        return FileUse::OneProcess;
    }
    // Layouts are for bytes: the kinds that have most of them decide.
    let large = tally.kinds.iter().filter(|kind| kind.largest >= SMALL);
    let mut uses: Vec<(FileUse, u64)> = Vec::new();
    let mut writers_of_one = 0_u32;
    for kind in large {
        let by_names = use_of(kind, shape);
        let found = kind.watched.map_or(by_names, |watched| as_seen(&watched, by_names, shape));
        writers_of_one += u32::from(found == FileUse::OneWriter && by_names != FileUse::OneWriter);
        match uses.iter_mut().find(|(known, _)| *known == found) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(kind.bytes.0),
            None => uses.push((found, kind.bytes.0)),
        }
    }
    let (part, of) = MOST;
    // What is in kinds that are not told counts against all of them.
    let enough = u128::from(tally.bytes.0) * u128::from(part) / u128::from(of);
    match uses.iter().max_by_key(|(_, bytes)| *bytes) {
        // It was seen of each kind by itself: each may have a process of its own.
        Some((FileUse::OneWriter, _)) if writers_of_one > 1 => FileUse::NotKnown(Unclear::Order),
        Some((found, bytes)) if u128::from(*bytes) >= enough => *found,
        _ => FileUse::NotKnown(Unclear::Mixed),
    }
}

/// How the files of a kind were used, by what was seen of those who wrote them; `found` is what their names, number and times
/// say, and counts where nothing else was seen.
fn as_seen(watched: &WatchedKind, found: FileUse, shape: RunShape) -> FileUse {
    let nodes = u64::from(shape.nodes.max(1));
    let watching = u64::from(watched.nodes).min(nodes);
    // Those that run on the nodes that watched.
    let processes = (u64::from(shape.tasks) * watching / nodes).max(1);
    let (one, several) = (u64::from(watched.one), u64::from(watched.several));
    let seen = one + several;
    let is_most = |part: u64, of: u64| part * MOST.1 >= of * MOST.0;
    // Where all nodes watch, what none of them has seen was written in a way that can't be seen.
    let (files, unclear) = (u64::from(watched.files), u64::from(watched.unclear));
    let is_enough = watching < nodes || is_most(seen, files.saturating_sub(unclear));
    if watching == 0 || seen == 0 || !is_enough {
        return found;
    }
    let nearly_all = |count: u64| count * NEARLY.1 >= processes * NEARLY.0;
    let (writers, at_once) = (u64::from(watched.writers), u64::from(watched.at_once));
    if is_most(several, seen) {
        return match found {
            // One node does not see whether others write the same file.
            FileUse::FilePerNode if watching == 1 || !nearly_all(writers) => found,
            _ if nearly_all(writers) => FileUse::OneFile,
            FileUse::OneFile | FileUse::Groups { .. } => found,
            _ if watched.is_exact && processes.is_multiple_of(writers) => {
                FileUse::Groups { files: processes / writers }
            }
            _ => FileUse::NotKnown(Unclear::Count),
        };
    }
    if !is_most(one, seen) {
        return FileUse::NotKnown(Unclear::Mixed);
    }
    // Those of which it can't be told may be of several.
    if unclear > seen {
        return found;
    }
    match found {
        // Written together, and by one at a time: short lives on a busy node look so, and so does a loop.
        FileUse::FilePerProcess | FileUse::FilePerNode
            if at_once <= 1 && processes > 1 && is_most(seen, files) =>
        {
            FileUse::NotKnown(Unclear::Order)
        }
        _ if at_once <= 1 && processes > 1 && is_most(seen, files) => FileUse::OneWriter,
        // Others may have others, on nodes that did not watch.
        _ if at_once <= 1 => found,
        // Some have a file each, as those that write for a group of them.
        FileUse::FilePerProcess | FileUse::FilePerNode | FileUse::Groups { .. } => found,
        _ if nearly_all(at_once) => FileUse::FilePerProcess,
        _ if at_once == watching && nodes > 1 => FileUse::FilePerNode,
        _ => FileUse::NotKnown(Unclear::Count),
    }
}

/// How the files of one kind were used by several processes.
fn use_of(kind: &KindTally, shape: RunShape) -> FileUse {
    let unclear = FileUse::NotKnown;
    if kind.kind.is_empty() {
        return unclear(Unclear::Mixed);
    }
    // A number that is the same everywhere, as in `.h5`, is a part of the name.
    let telling: Vec<usize> = (0..kind.numbers.len()).filter(|place| kind.numbers[*place] > 1).collect();
    match telling[..] {
        [] if kind.files == 1 => one_file(kind, shape),
        [] => unclear(Unclear::Count),
        [place] if kind.numbers[place] != kind.files => unclear(Unclear::Count),
        [place] => match timing(kind, kind.files, shape) {
            Some(Timing::Together) => at_a_time(kind.files, shape),
            Some(Timing::Apart) => one_file(kind, shape),
            None if is_no_rank(kind, place, shape) => one_file(kind, shape),
            None => unclear(Unclear::Order),
        },
        _ => of_several_numbers(kind, &telling, shape),
    }
}

/// How files of a kind were used whose names have several numbers: steps and ranks, in any order, of which every step has a file
/// of every rank.
fn of_several_numbers(kind: &KindTally, telling: &[usize], shape: RunShape) -> FileUse {
    let unclear = FileUse::NotKnown;
    let (tasks, nodes) = (u64::from(shape.tasks), u64::from(shape.nodes));
    let counts = |places: &[usize]| -> Vec<u64> { places.iter().map(|place| kind.numbers[*place]).collect() };
    let product = |counts: &[u64]| counts.iter().try_fold(1u64, |all, count| all.checked_mul(*count));
    let Some(spread) = kind.spread_ms.filter(|_| kind.within_ms.len() == kind.numbers.len()) else {
        return unclear(Unclear::Order);
    };
    let of_a_step = |place: &usize| kind.within_ms[*place].saturating_mul(2) <= spread;
    let (steps, others): (Vec<usize>, Vec<usize>) =
        telling.iter().copied().partition(|place| of_a_step(place));
    // Some names have the step twice.
    let count = counts(&steps).into_iter().max().unwrap_or(1);
    if count == 1 || !are_steps(spread, count, shape) {
        // All of one step: each process or node may have several files.
        let all = counts(telling);
        let is_whole = product(&all) == Some(kind.files);
        return match is_whole {
            true if all.contains(&tasks) => FileUse::FilePerProcess,
            true if nodes > 1 && all.contains(&nodes) => FileUse::FilePerNode,
            _ => unclear(Unclear::Count),
        };
    }
    let Some(files) = product(&counts(&others)).filter(|files| files.checked_mul(count) == Some(kind.files))
    else {
        return unclear(Unclear::Count);
    };
    match files {
        1 => one_file(kind, shape),
        // The processes may have written one after the other, but hardly over all of the run.
        files if count == tasks && files < tasks && spread.saturating_mul(APART) < shape.lasted_ms => {
            unclear(Unclear::Order)
        }
        files => at_a_time(files, shape),
    }
}

/// Who uses files that are written at a time.
fn at_a_time(files: u64, shape: RunShape) -> FileUse {
    let (tasks, nodes) = (u64::from(shape.tasks), u64::from(shape.nodes));
    match files {
        files if files.is_multiple_of(tasks) => FileUse::FilePerProcess,
        files if files == nodes => FileUse::FilePerNode,
        files if files < tasks && tasks.is_multiple_of(files) => FileUse::Groups { files },
        _ => FileUse::NotKnown(Unclear::Count),
    }
}

/// One file at a time, whoever writes it.
fn one_file(kind: &KindTally, shape: RunShape) -> FileUse {
    let name = kind.kind.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    let is_log = name.starts_with("log.") || LOGS.contains(&name.as_str());
    if is_log || OF_ONE_WRITER.iter().any(|end| name.ends_with(end)) {
        return FileUse::OneWriter;
    }
    let is_of_all = kind.largest.0 / u64::from(shape.tasks) >= SMALL.0;
    match is_of_all {
        true if name.ends_with(OF_ANY) => FileUse::NotKnown(Unclear::Name),
        true => FileUse::OneFile,
        false => FileUse::NotKnown(Unclear::Small),
    }
}

/// When files of a kind were written.
enum Timing {
    Together,
    Apart,
}

/// Nothing if it can't be told.
fn timing(kind: &KindTally, files: u64, shape: RunShape) -> Option<Timing> {
    let spread = kind.spread_ms?;
    if spread.saturating_mul(TOGETHER) <= shape.lasted_ms {
        let may_be_the_last = files <= FEW && is_a_step(spread, files, shape);
        return (!may_be_the_last).then_some(Timing::Together);
    }
    (spread.saturating_mul(if files <= FEW { FEW_APART } else { APART }) >= shape.lasted_ms)
        .then_some(Timing::Apart)
}

/// Whether what is spread so far may be so many steps.
fn are_steps(spread_ms: u64, count: u64, shape: RunShape) -> bool {
    spread_ms.saturating_mul(FEW_APART) >= shape.lasted_ms || is_a_step(spread_ms, count, shape)
}

/// Whether there may be a step of the program between one file and the next.
fn is_a_step(spread_ms: u64, files: u64, shape: RunShape) -> bool {
    let least = STEP_MS.max(shape.lasted_ms / MOST_STEPS);
    spread_ms / files.saturating_sub(1).max(1) >= least
}

/// Whether a number counts neither processes nor nodes, of a few files that were not written together: then it counts steps.
fn is_no_rank(kind: &KindTally, place: usize, shape: RunShape) -> bool {
    let (tasks, nodes) = (u64::from(shape.tasks), u64::from(shape.nodes));
    let is_step = kind.spread_ms.is_some_and(|spread| is_a_step(spread, kind.files, shape));
    let is_above = kind.highest.get(place).is_some_and(|highest| *highest > tasks);
    // Names of hosts and numbers of processes are high, too, and as many as the nodes or tasks; but hardly ever round.
    let is_round = kind.divisor.get(place).is_some_and(|divisor| *divisor >= ROUND);
    let may_be_each = kind.files == nodes || kind.files.is_multiple_of(tasks);
    kind.files <= FEW && is_step && is_above && (is_round || !may_be_each)
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
            Self::OneWriter => f.write_str("one process writes at a time"),
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
            Self::Name => "by its name the file may be a log, or data of all processes",
        })
    }
}
