//! What an earlier run has left, and what that says of how its processes use files.
//!
//! Files are counted by the *kind* of their path: its runs of digits are taken for a number. `step-0001/rank-17.dat` and
//! `step-0002/rank-4.dat` are of one kind, and the last number tells the ranks apart, the first the steps. Sizes are counted by
//! powers of two, so that a tree of any size takes the same memory; kinds beyond [`MOST_KINDS`] are one more kind.
//!
//! Who wrote a file is not to be seen in it. What [`Census::guess`] takes for granted: files of one kind that are as many as the
//! processes, or several times as many, have one writer each; a large file that has no such brothers is written by all. It is
//! for people who ask, and see what it follows from; [`crate::classify`] judges a [`Tally`] without taking anything for granted.

use std::collections::BTreeMap;
use std::fmt;

use ondeck_core::Bytes;
use serde::{Deserialize, Serialize};

use crate::pattern::Pattern;
use crate::watched::WatchedKind;

/// More kinds of paths are counted as one.
pub const MOST_KINDS: usize = 4096;

/// The most bytes of the texts of all kinds; files of further ones are counted as one more kind.
const MOST_TEXT: usize = 4 << 20;

/// Of a path with more numbers nobody can say which are those of ranks or steps.
const MOST_NUMBERS_OF_A_KIND: usize = 8;

/// More values of numbers, those of all kinds together, are not told apart.
const MOST_NUMBERS: usize = 1 << 20;

/// What is smaller says nothing of how large files are used.
pub(crate) const SMALL: Bytes = Bytes(1 << 20);

/// The most kinds of a [`Tally`]: those with the most bytes.
pub const MOST_TOLD: usize = 16;

/// The longest text of a kind in a [`Tally`], in characters.
const LONGEST_KIND: usize = 200;

/// Of so many large files of a kind it is asked who has written them: a sample of them.
const MOST_SAMPLED: usize = 64;

/// Of all kinds together, while they are counted.
const MOST_SAMPLED_OF_ALL: usize = 1 << 16;

/// The files of a tree, by kinds of their paths.
#[derive(Clone, Debug, Default)]
pub struct Census {
    kinds: BTreeMap<Vec<u8>, Kind>,
    all: Kind,
    /// The bytes of the texts of the kinds.
    text: usize,
    /// How many values of numbers the kinds have noted.
    noted: usize,
    /// How many files the samples of the kinds have.
    sampled: usize,
}

/// A file's identity, by which those that watch files know it, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Those of a kind that have the smallest are its sample: the same wherever it is drawn.
    pub rank: u64,
    /// In words.
    pub text: String,
}

/// The files of one kind.
#[derive(Clone, Debug)]
struct Kind {
    sizes: [u64; 64],
    largest: u64,
    total: u64,
    files: u64,
    /// The values that each number of their paths has, and when the files were written that have it.
    numbers: Vec<BTreeMap<u64, Written>>,
    written: Written,
    /// Those of its large files that have the smallest ranks.
    sample: BTreeMap<u64, String>,
}

/// When the first and the last of some files were written last, in milliseconds since 1970; nothing if no times are known.
#[derive(Clone, Copy, Debug, Default)]
struct Written(Option<(u64, u64)>);

/// What a census comes to, in a few kilobytes: what is kept of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// How many files there are.
    pub files: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// Half of them are not larger, within a factor of two.
    pub median: Bytes,
    /// 95 % of those that are not small are not larger, within a factor of two; 0 if all are small.
    pub large: Bytes,
    /// The kinds of their paths that have the most bytes, at most [`MOST_TOLD`] of them.
    pub kinds: Vec<KindTally>,
}

/// The files of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindTally {
    /// Their path, with `#` for each of its numbers; cut if it is long. Empty for files of more kinds than are told apart.
    pub kind: String,
    /// How many there are.
    pub files: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// The largest.
    pub largest: Bytes,
    /// How many values each number of their paths has.
    pub numbers: Vec<u64>,
    /// The highest of these values; empty in what was kept before this was.
    #[serde(default)]
    pub highest: Vec<u64>,
    /// The greatest number that divides all of them; 0 if the only one is 0.
    #[serde(default)]
    pub divisor: Vec<u64>,
    /// For each number of their paths: of files that have the same value there, the most milliseconds between the first and the
    /// last time that one of them was written last. Empty if no times are known.
    #[serde(default)]
    pub within_ms: Vec<u64>,
    /// Milliseconds between the first and the last time that one of them was written last; nothing if no times are known.
    pub spread_ms: Option<u64>,
    /// What was seen of those that wrote them, if somebody watched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watched: Option<WatchedKind>,
}

/// How the processes of a run used its files, as far as it can be seen afterwards.
#[derive(Clone, Debug, PartialEq)]
pub struct Guess {
    /// How.
    pub pattern: Pattern,
    /// The files that it had at a time, if they were shared.
    pub files: Option<u64>,
    /// 95 % of its large files are not larger, within a factor of two.
    pub size: Option<Bytes>,
    /// Half of all files are not larger, within a factor of two.
    pub median: Option<Bytes>,
    /// What it follows from.
    pub reason: Evidence,
}

/// What a guess follows from.
#[derive(Clone, Debug, PartialEq)]
pub enum Evidence {
    /// There are no files.
    Nothing,
    /// No file is large.
    Small {
        /// How many there are.
        files: u64,
    },
    /// A kind has as many files as there are processes, in each of its steps.
    EachProcess {
        /// Files of a step.
        files: u64,
        /// How many steps.
        steps: u64,
        /// The bytes of all of them, of those of the tree, in percent.
        share: u8,
    },
    /// A kind has fewer files than there are processes.
    Fewer {
        /// Files of a step.
        files: u64,
        /// How many steps.
        steps: u64,
        /// The bytes of all of them, of those of the tree, in percent.
        share: u8,
    },
    /// There is one process.
    OneProcess,
}

impl Default for Kind {
    fn default() -> Self {
        Self {
            sizes: [0; 64],
            largest: 0,
            total: 0,
            files: 0,
            numbers: Vec::new(),
            written: Written(None),
            sample: BTreeMap::new(),
        }
    }
}

impl Written {
    fn add(&mut self, written_ms: Option<u64>) {
        if let Some(at) = written_ms {
            let (first, last) = self.0.unwrap_or((at, at));
            self.0 = Some((first.min(at), last.max(at)));
        }
    }

    fn spread_ms(&self) -> Option<u64> {
        self.0.map(|(first, last)| last - first)
    }
}

impl Kind {
    fn add(&mut self, size: u64, written_ms: Option<u64>, numbers: &[u64], noted: &mut usize) {
        self.files += 1;
        self.written.add(written_ms);
        self.total = self.total.saturating_add(size);
        self.largest = self.largest.max(size);
        self.sizes[size.max(1).ilog2() as usize] += 1;
        if self.numbers.len() < numbers.len() {
            self.numbers.resize(numbers.len(), BTreeMap::new());
        }
        for (values, number) in self.numbers.iter_mut().zip(numbers) {
            let is_known = values.contains_key(number);
            if is_known || *noted < MOST_NUMBERS {
                values.entry(*number).or_default().add(written_ms);
                *noted += usize::from(!is_known);
            }
        }
    }

    /// Takes a file into the sample, where it belongs there.
    fn note(&mut self, identity: Identity, sampled: &mut usize) {
        if self.sample.len() >= MOST_SAMPLED || *sampled >= MOST_SAMPLED_OF_ALL {
            match self.sample.last_entry() {
                Some(last) if *last.key() > identity.rank => last.remove(),
                _ => return,
            };
            *sampled -= 1;
        }
        // Two names of one file are in it once.
        *sampled += usize::from(self.sample.insert(identity.rank, identity.text).is_none());
    }

    fn of_numbers(&self, told: impl Fn(&BTreeMap<u64, Written>) -> u64) -> Vec<u64> {
        self.numbers.iter().map(told).collect()
    }

    /// For each number of the paths, the longest time in which files of one value were written.
    fn within_ms(&self) -> Vec<u64> {
        let longest = |values: &BTreeMap<u64, Written>| values.values().filter_map(Written::spread_ms).max();
        let within: Vec<u64> = self.numbers.iter().filter_map(longest).collect();
        // One of which nothing is known would put the others in its place.
        if within.len() == self.numbers.len() { within } else { Vec::new() }
    }

    /// A size that this part of the files does not pass: of a power of two the upper end, at most the largest.
    fn quantile(&self, part: f64) -> Bytes {
        self.quantile_from(0, part)
    }

    /// The same of the files that have at least so many bytes, as a power of two.
    fn quantile_from(&self, least: usize, part: f64) -> Bytes {
        let all: u64 = self.sizes[least..].iter().sum();
        let wanted = (all as f64 * part).ceil() as u64;
        let mut seen = 0;
        for (power, files) in self.sizes.iter().enumerate().skip(least) {
            seen += files;
            if seen >= wanted && *files > 0 {
                let end = if power == 63 { u64::MAX } else { (2 << power) - 1 };
                return Bytes(end.min(self.largest));
            }
        }
        Bytes(self.largest)
    }
}

impl Census {
    /// Counts a file.
    pub fn add(&mut self, path: &[u8], size: Bytes) {
        self.add_written(path, size, None);
    }

    /// Counts a file, with the time when it was written last, in milliseconds since 1970.
    pub fn add_written(&mut self, path: &[u8], size: Bytes, written_ms: Option<u64>) {
        self.add_identified(path, size, written_ms, || None);
    }

    /// Counts a file, with the time when it was written last; its identity is asked for where who wrote it matters.
    pub fn add_identified(
        &mut self,
        path: &[u8],
        size: Bytes,
        written_ms: Option<u64>,
        identity: impl FnOnce() -> Option<Identity>,
    ) {
        let (kind, mut numbers) = kind_of(path);
        self.all.add(size.0, written_ms, &[], &mut self.noted);
        let is_known = self.kinds.contains_key(&kind);
        let has_room = self.kinds.len() < MOST_KINDS && self.text + kind.len() <= MOST_TEXT;
        let kind = match is_known || has_room && numbers.len() <= MOST_NUMBERS_OF_A_KIND {
            true => kind,
            false => Vec::new(),
        };
        if kind.is_empty() {
            numbers.clear();
        } else if !is_known {
            self.text += kind.len();
        }
        let kind = self.kinds.entry(kind).or_default();
        kind.add(size.0, written_ms, &numbers, &mut self.noted);
        if size >= SMALL
            && let Some(identity) = identity()
        {
            kind.note(identity, &mut self.sampled);
        }
    }

    /// Of each kind that [`Census::tally`] tells, in that order, a sample of its large files.
    pub fn samples(&self) -> Vec<Vec<String>> {
        self.told().map(|(_, kind)| kind.sample.values().cloned().collect()).collect()
    }

    /// The kinds that are told: those with the most bytes.
    fn told(&self) -> impl Iterator<Item = (&Vec<u8>, &Kind)> {
        let mut kinds: Vec<(&Vec<u8>, &Kind)> = self.kinds.iter().collect();
        // Of equals the first by name, so that the same tree has the same tally.
        kinds.sort_by_key(|(name, kind)| (std::cmp::Reverse(kind.total), *name));
        kinds.into_iter().take(MOST_TOLD)
    }

    /// What it comes to.
    pub fn tally(&self) -> Tally {
        let told = self.told().map(|(name, kind)| KindTally {
            kind: String::from_utf8_lossy(name).chars().take(LONGEST_KIND).collect(),
            files: kind.files,
            bytes: Bytes(kind.total),
            largest: Bytes(kind.largest),
            numbers: kind.of_numbers(|values| values.len() as u64),
            highest: kind.of_numbers(|values| values.keys().next_back().copied().unwrap_or(0)),
            divisor: kind.of_numbers(|values| values.keys().copied().fold(0, greatest_divisor)),
            within_ms: kind.within_ms(),
            spread_ms: kind.written.spread_ms(),
            watched: None,
        });
        let has_large = self.all.largest >= SMALL.0;
        let least = SMALL.0.ilog2() as usize;
        Tally {
            files: self.all.files,
            bytes: Bytes(self.all.total),
            median: if self.all.files == 0 { Bytes::ZERO } else { self.all.quantile(0.5) },
            large: if has_large { self.all.quantile_from(least, 0.95) } else { Bytes::ZERO },
            kinds: told.collect(),
        }
    }

    /// How `tasks` processes have used these files.
    pub fn guess(&self, tasks: u32) -> Guess {
        let tasks = u64::from(tasks.max(1));
        let nothing =
            |reason| Guess { pattern: Pattern::Unknown, files: None, size: None, median: None, reason };
        if self.all.files == 0 {
            return nothing(Evidence::Nothing);
        }
        let median = Some(self.all.quantile(0.5));
        // Those that have most of the bytes decide: layouts are for them.
        let Some(kind) = self.kinds.values().max_by_key(|kind| kind.total) else {
            return nothing(Evidence::Nothing);
        };
        if kind.largest < SMALL.0 {
            let reason = Evidence::Small { files: self.all.files };
            return Guess {
                pattern: Pattern::FilePerProcess,
                files: Some(self.all.files),
                median,
                ..nothing(reason)
            };
        }
        let size = Some(kind.quantile(0.95));
        if tasks == 1 {
            return Guess { pattern: Pattern::Single, size, median, ..nothing(Evidence::OneProcess) };
        }
        let share = (u128::from(kind.total) * 100 / u128::from(self.all.total.max(1))) as u8;
        let (files, steps) = kind.at_a_time(tasks);
        if files >= tasks {
            let reason = Evidence::EachProcess { files, steps, share };
            return Guess { pattern: Pattern::FilePerProcess, files: Some(files), size, median, reason };
        }
        let reason = Evidence::Fewer { files, steps, share };
        Guess { pattern: Pattern::Shared, files: Some(files), size, median, reason }
    }
}

impl Kind {
    /// How many of the files belong to one step, and how many steps there are.
    fn at_a_time(&self, tasks: u64) -> (u64, u64) {
        let even = |steps: u64| (self.files.div_ceil(steps.max(1)), steps.max(1));
        // One that is the same everywhere, as in `.h5`, is a part of the name.
        let counts: Vec<u64> =
            self.numbers.iter().map(|values| values.len() as u64).filter(|count| *count > 1).collect();
        match counts[..] {
            [] => even(1),
            // Ranks if there are as many, or some for each; else steps of one file that is written again and again.
            [count] if count.is_multiple_of(tasks) => even(count / tasks),
            [count] => even(count),
            // Ranks in front, as in `rank-17/step-3`, if there are as many; else behind: `step-3/rank-17`.
            [.., last] => {
                let ranks = counts.iter().find(|count| **count == tasks).copied().unwrap_or(last);
                even(self.files.div_ceil(ranks))
            }
        }
    }
}

/// A path with `#` for each of its numbers: directories that differ in numbers alone are of one kind. What is no UTF-8 is
/// replaced, so that a few strange names may be taken for one.
///
/// ```
/// # use ondeck_layout::census::pattern_of;
/// assert_eq!(pattern_of("/scratch/case-12/run.0003".as_ref()), "/scratch/case-#/run.#");
/// ```
pub fn pattern_of(path: &std::path::Path) -> String {
    String::from_utf8_lossy(&kind_of(path.as_os_str().as_encoded_bytes()).0).into_owned()
}

/// Of two numbers, by Euclid.
fn greatest_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The path with `#` for each of its numbers, and the numbers.
fn kind_of(path: &[u8]) -> (Vec<u8>, Vec<u64>) {
    let (mut kind, mut numbers) = (Vec::with_capacity(path.len()), Vec::new());
    for byte in path {
        match (byte.is_ascii_digit(), kind.last(), numbers.last_mut()) {
            (true, Some(b'#'), Some(number)) => {
                *number = u64::wrapping_add(u64::wrapping_mul(*number, 10), u64::from(byte - b'0'));
            }
            (true, ..) => {
                kind.push(b'#');
                numbers.push(u64::from(byte - b'0'));
            }
            // One that stands in a name is none of ours.
            (false, ..) if *byte == b'#' => kind.extend(b"\\#_"),
            (false, ..) => kind.push(*byte),
        }
    }
    (kind, numbers)
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = |steps: u64| if steps == 1 { String::new() } else { format!(", {steps} times") };
        match self {
            Self::Nothing => f.write_str("there are no files"),
            Self::Small { files } => write!(f, "{files} files, none of 1 MiB or more"),
            Self::EachProcess { files, steps: times, share } => {
                write!(
                    f,
                    "{files} files of one kind{}, with {share} % of the bytes: each process has its own",
                    steps(*times)
                )
            }
            Self::Fewer { files: 1, steps: times, share } => {
                write!(f, "one file{}, with {share} % of the bytes: all processes use it", steps(*times))
            }
            Self::Fewer { files, steps: times, share } => {
                write!(
                    f,
                    "{files} files of one kind{}, with {share} % of the bytes: fewer than processes, so several use one",
                    steps(*times)
                )
            }
            Self::OneProcess => f.write_str("there is one process"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn census(files: impl IntoIterator<Item = (String, u64)>) -> Census {
        let mut census = Census::default();
        for (path, size) in files {
            census.add(path.as_bytes(), Bytes(size));
        }
        census
    }

    const GIB: u64 = 1 << 30;

    #[test]
    fn files_of_each_process_are_seen_however_they_are_named() {
        let ranks = |name: fn(u64, u64) -> String| {
            census((0..5).flat_map(|step| (0..64).map(move |rank| (name(step, rank), GIB + rank))))
        };
        for name in [
            (|step, rank| format!("step-{step:04}/rank-{rank}.dat")) as fn(u64, u64) -> String,
            |step, rank| format!("rank{rank:03}/out.{step}"),
            |step, rank| format!("dump.{step}.{rank}"),
            |step, rank| format!("processor{rank}/{step}/U"),
        ] {
            let guess = ranks(name).guess(64);
            assert_eq!(guess.pattern, Pattern::FilePerProcess, "{}: {guess:?}", name(1, 2));
            assert_eq!(
                guess.reason,
                Evidence::EachProcess { files: 64, steps: 5, share: 100 },
                "{}",
                name(1, 2)
            );
        }
        // Two of each.
        let two = census((0..128).map(|number| (format!("part-{number}"), GIB)));
        assert_eq!(two.guess(64).reason, Evidence::EachProcess { files: 64, steps: 2, share: 100 });
    }

    #[test]
    fn a_file_of_all_is_seen_alone_and_as_one_that_is_written_again_and_again() {
        let one = census([("result.h5".to_owned(), 100 * GIB), ("run.log".to_owned(), 5000)]);
        let guess = one.guess(64);
        assert_eq!((guess.pattern, guess.files), (Pattern::Shared, Some(1)));
        assert_eq!(guess.size, Some(Bytes(100 * GIB)));
        let checkpoints = census((0..12).map(|number| (format!("chk_{number:06}.h5"), 10 * GIB)));
        assert_eq!(checkpoints.guess(64).reason, Evidence::Fewer { files: 1, steps: 12, share: 100 });
        let groups =
            census((0..4).flat_map(|step| (0..8).map(move |io| (format!("s{step}/io{io}"), 10 * GIB))));
        assert_eq!(groups.guess(64).reason, Evidence::Fewer { files: 8, steps: 4, share: 100 });
    }

    #[test]
    fn small_files_and_none_are_what_they_are() {
        assert_eq!(Census::default().guess(8).reason, Evidence::Nothing);
        let small = census((0..10_000).map(|number| (format!("frame{number}.png"), 40_000 + number)));
        let guess = small.guess(8);
        assert_eq!(guess.reason, Evidence::Small { files: 10_000 });
        assert_eq!(guess.median, Some(Bytes(49_999)));
        assert_eq!(census([("x".to_owned(), 5 * GIB)]).guess(1).pattern, Pattern::Single);
    }

    #[test]
    fn many_kinds_take_bounded_memory_and_any_size_has_its_place() {
        let mut census = Census::default();
        for number in 0..3 * MOST_KINDS as u64 {
            let letters: String =
                number.to_string().bytes().map(|digit| char::from(b'a' + digit - b'0')).collect();
            census.add(letters.as_bytes(), Bytes(u64::MAX));
        }
        assert!(census.kinds.len() <= MOST_KINDS + 1);
        assert!(census.text <= MOST_TEXT);
        // Deep trees whose directories are full of numbers: neither their texts nor their numbers.
        let deep = "a1".repeat(100_000);
        for number in 0..100 {
            let name: String = format!("{number}").bytes().map(|digit| char::from(digit + 50)).collect();
            census.add(format!("{deep}{name}").as_bytes(), Bytes(1));
            census.add(format!("{}{name}", "b".repeat(100_000)).as_bytes(), Bytes(1));
        }
        assert!(census.text <= MOST_TEXT);
        assert!(census.kinds.values().all(|kind| kind.numbers.len() <= MOST_NUMBERS_OF_A_KIND));
        census.add(b"empty", Bytes(0));
        census.add(b"99999999999999999999999999999999999999", Bytes(1));
        assert_eq!(census.guess(4).size, Some(Bytes(u64::MAX)));
    }
}
