//! What earlier runs of a program say of the next one.
//!
//! A run is kept with what it has left in one directory ([`crate::census::Tally`]). [`recall`] judges each by itself
//! ([`crate::classify`]) and lets them vote. The newest counts most: [`HALF_LIFE_DAYS`] later, or [`HALF_LIFE_RUNS`] runs later,
//! a run counts half. A use must have [`AGREEMENT`] of all votes; those of which it could not be told vote against every use.
//!
//! **A changed program.** If the two newest runs are alike, and two in a row before them are not like them, the program has
//! changed, and what is older is left out. A single run that differs, as one that was cancelled early, changes nothing.
//!
//! It is pure: the same runs and the same time give the same answer, in whatever order they come.

use std::fmt;

use ondeck_core::{Bytes, Rate};
use serde::{Deserialize, Serialize};

use crate::advice::Pattern;
use crate::census::Tally;
use crate::classify::{FileUse, RunShape, classify};

/// After so many days a run counts half.
pub const HALF_LIFE_DAYS: f64 = 60.0;

/// After so many newer runs a run counts half.
pub const HALF_LIFE_RUNS: f64 = 8.0;

/// A use needs this part of the votes.
pub const AGREEMENT: f64 = 0.6;

/// Sizes that are further apart than this factor are not alike. A census has them within a factor of two.
const ALIKE: u64 = 8;

/// The part of runs whose large files are not larger than what is told.
const PART: f64 = 0.95;

/// A run that was shorter counts as one of a minute: what it writes in a few seconds is nothing to a filesystem.
const SHORTEST_MS: u64 = 60_000;

/// What a run has left in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// When it ended, in milliseconds since 1970.
    pub ended_ms: u64,
    /// The run.
    pub shape: RunShape,
    /// Its files.
    pub tally: Tally,
}

/// What earlier runs say.
#[derive(Clone, Debug, PartialEq)]
pub struct Recollection {
    /// How they have used their files; not known if they do not agree, or it could be told of too few.
    pub used: Option<FileUse>,
    /// The votes for that use, in percent; 0 without one.
    pub agreement: u8,
    /// In 95 % of the runs nearly all large files were not larger; nothing if all were small.
    pub size: Option<Bytes>,
    /// The median file of the median run.
    pub median: Option<Bytes>,
    /// What the median run has left, divided by the time that it took; of one that was shorter than a minute, by a minute.
    pub writes: Rate,
    /// How many runs have a say.
    pub runs: usize,
    /// How many older ones have none, because the program has changed since.
    pub before_change: usize,
}

/// What earlier runs of a program in a directory say; nothing if there are none.
///
/// ```
/// use ondeck_layout::history::recall;
/// assert_eq!(recall(&[], 0), None);
/// ```
pub fn recall(runs: &[Run], now_ms: u64) -> Option<Recollection> {
    let mut judged: Vec<Judged<'_>> = runs.iter().map(Judged::of).collect();
    judged.sort_by(|a, b| {
        (b.run.ended_ms, b.size(), &b.run.tally.kinds.len()).cmp(&(
            a.run.ended_ms,
            a.size(),
            &a.run.tally.kinds.len(),
        ))
    });
    let kept = since_change(&judged);
    let before_change = judged.len() - kept;
    judged.truncate(kept);
    if judged.is_empty() {
        return None;
    }
    for (index, run) in judged.iter_mut().enumerate() {
        let days = now_ms.saturating_sub(run.run.ended_ms) as f64 / 86_400_000.0;
        run.weight = (-(days / HALF_LIFE_DAYS + index as f64 / HALF_LIFE_RUNS)).exp2();
    }
    let all: f64 = judged.iter().map(|run| run.weight).sum();
    let votes = |used: FileUse| -> f64 {
        // As many files as nodes may be as many as the program has in each run.
        let is_for = |run: &&Judged<'_>| {
            run.used.is_like(used)
                || matches!(used, FileUse::Groups { files } if run.files_at_a_time() == Some(files))
        };
        judged.iter().filter(is_for).map(|run| run.weight).sum()
    };
    let candidates = judged.iter().map(|run| run.used).filter(|used| used.is_known());
    let best = candidates.map(|used| (used, votes(used))).max_by(|a, b| a.1.total_cmp(&b.1));
    // All may be so old that nothing is left of their weights.
    let best = best.filter(|(_, votes)| all > 0.0 && *votes / all >= AGREEMENT);
    let of_use = |used: FileUse| judged.iter().filter(move |run| run.used.is_like(used));
    let used = best.map(|(used, _)| match used {
        FileUse::Groups { .. } => {
            FileUse::Groups { files: quantile(of_use(used).filter_map(Judged::files), 0.5).unwrap_or(1) }
        }
        FileUse::SmallFiles { .. } => {
            FileUse::SmallFiles { files: quantile(of_use(used).filter_map(Judged::files), 0.5).unwrap_or(1) }
        }
        used => used,
    });
    let has_files = || judged.iter().filter(|run| run.run.tally.files > 0);
    let sizes = has_files().filter(|run| run.size() > 0).map(|run| (run.size(), run.weight));
    Some(Recollection {
        used,
        agreement: best.map_or(0, |(_, votes)| (votes / all * 100.0).round() as u8),
        size: quantile(sizes, PART).map(Bytes),
        median: quantile(has_files().map(|run| (run.run.tally.median.0, run.weight)), 0.5).map(Bytes),
        writes: Rate(Bytes(quantile(judged.iter().map(|run| (run.rate(), run.weight)), 0.5).unwrap_or(0))),
        runs: judged.len(),
        before_change,
    })
}

/// A run and what is to be seen of it.
struct Judged<'a> {
    run: &'a Run,
    used: FileUse,
    weight: f64,
}

impl<'a> Judged<'a> {
    fn of(run: &'a Run) -> Judged<'a> {
        Judged { run, used: classify(&run.tally, run.shape), weight: 0.0 }
    }

    fn size(&self) -> u64 {
        self.run.tally.large.0
    }

    /// The bytes that it has left of each second.
    fn rate(&self) -> u64 {
        let ms = self.run.shape.lasted_ms.max(SHORTEST_MS);
        u64::try_from(u128::from(self.run.tally.bytes.0) * 1000 / u128::from(ms)).unwrap_or(u64::MAX)
    }

    /// The files at a time, of uses that have a number of them, with the weight.
    fn files(&self) -> Option<(u64, f64)> {
        match self.used {
            FileUse::Groups { files } | FileUse::SmallFiles { files } => Some((files, self.weight)),
            _ => None,
        }
    }

    /// The files at a time, of which each is of several processes.
    fn files_at_a_time(&self) -> Option<u64> {
        match self.used {
            FileUse::FilePerNode => Some(self.run.shape.nodes.into()),
            FileUse::Groups { files } => Some(files),
            _ => None,
        }
    }

    /// Whether it may be of the same program. What could not be told of may be anything.
    fn is_alike(&self, other: &Judged<'_>) -> bool {
        let is_count = self.files_at_a_time().is_some_and(|files| other.files_at_a_time() == Some(files));
        let is_like = self.used.is_like(other.used) || is_count;
        let is_use = !self.used.is_known() || !other.used.is_known() || is_like;
        let (small, large) = (self.size().min(other.size()), self.size().max(other.size()));
        is_use && (small == 0 || large / small < ALIKE)
    }
}

/// How many of the runs, the newest first, are of the program as it is now.
fn since_change(runs: &[Judged<'_>]) -> usize {
    let [newest, second, ..] = runs else { return runs.len() };
    if !newest.is_alike(second) {
        return runs.len();
    }
    let differs = |run: &Judged<'_>| !run.is_alike(newest) && !run.is_alike(second);
    let change = runs.windows(2).skip(2).position(|pair| pair.iter().all(differs));
    change.map_or(runs.len(), |place| place + 2)
}

/// The value that this part of the weight does not pass.
fn quantile(values: impl Iterator<Item = (u64, f64)>, part: f64) -> Option<u64> {
    let mut values: Vec<(u64, f64)> = values.collect();
    values.sort_unstable_by_key(|(value, _)| *value);
    let wanted = values.iter().map(|(_, weight)| weight).sum::<f64>() * part;
    let mut seen = 0.0;
    for (value, weight) in &values {
        seen += weight;
        if seen >= wanted {
            return Some(*value);
        }
    }
    values.last().map(|(value, _)| *value)
}

impl Recollection {
    /// How the next run will use its files, in the words of the rules; with the number of files at a time, where that does not
    /// follow from the job.
    pub fn pattern(&self, nodes: u32) -> Option<(Pattern, Option<u64>)> {
        match self.used? {
            FileUse::OneFile => Some((Pattern::Shared, None)),
            FileUse::FilePerProcess => Some((Pattern::FilePerProcess, None)),
            FileUse::FilePerNode => Some((Pattern::Shared, Some(nodes.into()))),
            FileUse::Groups { files } => Some((Pattern::Shared, Some(files))),
            FileUse::SmallFiles { files } => Some((Pattern::FilePerProcess, Some(files))),
            FileUse::OneProcess | FileUse::OneWriter => Some((Pattern::Single, None)),
            FileUse::NotKnown(_) => None,
        }
    }
}

impl fmt::Display for Recollection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = if self.runs == 1 { "1 run".to_owned() } else { format!("{} runs", self.runs) };
        match self.used {
            Some(used) if self.runs == 1 => write!(f, "{runs}: {used}")?,
            Some(used) => write!(f, "{runs}: {used}, by {} % of their weight", self.agreement)?,
            None => write!(f, "{runs}, of which it can't be told how they use files")?,
        }
        if let Some(size) = self.size {
            write!(f, "; large files have up to {size}")?;
        }
        if let Some(median) = self.median {
            write!(f, "; the median file has {median}")?;
        }
        match self.before_change {
            0 => Ok(()),
            1 => f.write_str("; 1 older run was of another kind, and does not count"),
            runs => write!(f, "; {runs} older runs were of another kind, and do not count"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::census::Census;

    const GIB: u64 = 1 << 30;
    const DAY: u64 = 86_400_000;
    const SHAPE: RunShape = RunShape { nodes: 4, tasks: 64, lasted_ms: 100_000 };

    fn run(day: u64, files: impl IntoIterator<Item = (String, u64)>) -> Run {
        let mut census = Census::default();
        for (path, size) in files {
            census.add_written(path.as_bytes(), Bytes(size), Some(day * DAY));
        }
        Run { ended_ms: day * DAY, shape: SHAPE, tally: census.tally() }
    }

    fn one_file(day: u64, gib: u64) -> Run {
        run(day, [("result.h5".to_owned(), gib * GIB)])
    }

    fn each(day: u64) -> Run {
        run(day, (0..64).map(|rank| (format!("rank-{rank}"), GIB)))
    }

    #[test]
    fn one_run_says_what_it_was_and_many_say_how_large() {
        let once = recall(&[one_file(1, 100)], DAY).unwrap();
        assert_eq!((once.used, once.runs, once.agreement), (Some(FileUse::OneFile), 1, 100));
        assert_eq!(once.pattern(9), Some((Pattern::Shared, None)));
        // One in forty is larger: that is not what is to be expected.
        let mut runs: Vec<Run> = (0..40).map(|number| one_file(100 + number, 10)).collect();
        runs[3] = one_file(103, 70);
        let many = recall(&runs, 140 * DAY).unwrap();
        assert_eq!((many.size, many.median), (Some(Bytes(10 * GIB)), Some(Bytes(10 * GIB))));
        assert_eq!((many.runs, many.before_change), (40, 0));
        // 10 GiB in 100 s each, whatever one of them did; and what takes a moment takes a minute.
        assert_eq!(many.writes, Rate(Bytes(10 * GIB / 100)));
        let mut short = one_file(1, 6);
        short.shape.lasted_ms = 10;
        assert_eq!(recall(&[short], DAY).unwrap().writes, Rate(Bytes(6 * GIB / 60)));
    }

    #[test]
    fn old_runs_count_less_and_runs_that_do_not_agree_say_nothing_of_the_use() {
        // Three of a year ago against two of yesterday.
        let runs = [each(1), one_file(366, 1), each(2), each(3), one_file(367, 1)];
        let now = recall(&runs, 368 * DAY).unwrap();
        assert_eq!(now.used, Some(FileUse::OneFile));
        // On one day, by turns.
        let mixed: Vec<Run> =
            (0..6).map(|number| if number % 2 == 0 { each(9) } else { one_file(9, 1) }).collect();
        let told = recall(&mixed, 9 * DAY).unwrap();
        assert_eq!((told.used, told.agreement, told.pattern(4)), (None, 0, None));
        assert!(told.size.is_some());
    }

    #[test]
    fn as_many_files_as_nodes_are_a_number_of_files_once_a_run_says_so() {
        let files = |day: u64, nodes: u32| {
            let ran = run(day, (0..4).map(|group| (format!("group-{group}"), GIB)));
            Run { shape: RunShape { nodes, ..SHAPE }, ..ran }
        };
        let mut runs = vec![files(1, 4), files(2, 4)];
        assert_eq!(recall(&runs, 2 * DAY).unwrap().used, Some(FileUse::FilePerNode));
        runs.push(files(3, 2));
        let told = recall(&runs, 3 * DAY).unwrap();
        assert_eq!((told.used, told.agreement), (Some(FileUse::Groups { files: 4 }), 100));
        // Nor is that another program.
        runs.extend([files(4, 4), files(5, 4), files(6, 2), files(7, 2)]);
        assert_eq!(recall(&runs, 7 * DAY).unwrap().before_change, 0);
    }

    #[test]
    fn a_program_that_has_changed_is_noticed_and_a_run_that_failed_is_not_taken_for_that() {
        let mut runs: Vec<Run> = (1..=10).map(each).collect();
        runs.push(one_file(11, 50));
        // One alone may be an accident.
        let first = recall(&runs, 11 * DAY).unwrap();
        assert_eq!((first.used, first.before_change), (Some(FileUse::FilePerProcess), 0));
        runs.push(one_file(12, 60));
        let second = recall(&runs, 12 * DAY).unwrap();
        assert_eq!((second.used, second.runs, second.before_change), (Some(FileUse::OneFile), 2, 10));
        assert!(second.to_string().ends_with("10 older runs were of another kind, and do not count"));
        // The same use with files a hundred times as large is another program, too.
        let mut grown: Vec<Run> = (1..=5).map(|day| one_file(day, 1)).collect();
        grown.extend([one_file(6, 100), one_file(7, 100)]);
        assert_eq!(recall(&grown, 7 * DAY).unwrap().before_change, 5);
        let mut failed: Vec<Run> = (1..=10).map(each).collect();
        failed.insert(8, run(9, [("rank-1".to_owned(), GIB)]));
        let still = recall(&failed, 11 * DAY).unwrap();
        assert_eq!((still.used, still.before_change), (Some(FileUse::FilePerProcess), 0));
    }

    #[test]
    fn runs_that_left_nothing_know_nothing() {
        let told = recall(&[run(1, [])], DAY).unwrap();
        assert_eq!((told.used, told.size, told.median), (None, None, None));
        // However long ago.
        assert_eq!(recall(&[one_file(1, 1)], u64::MAX).unwrap().used, None);
    }
}
