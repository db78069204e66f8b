//! How the copies are run and compared.
//!
//! Rounds are interleaved: each runs every tool once, in an order that is rotated from round to
//! round, so that a machine that gets slower or faster favours nobody. The first round warms up
//! the page cache, is used to check that each copy is whole, and is dropped. Before each run the
//! last target is removed and the disk is left to settle, outside the time.
//!
//! *In* is from disk, with the page cache warm, to the tmpfs: what a stage-in costs once the disk
//! has been read. *Out* is from the tmpfs to disk, and has two times: until the command returned,
//! and until syncfs(2) on the target returned after it, because results that are only in the page
//! cache are not staged out.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::data::{Case, Census, ONE_FILE, Shape};
use crate::fragments::Fragments;
use crate::interrupt::Interrupted;
use crate::memcpy;
use crate::scratch::{Scratch, remove, sync_filesystem};
use crate::timed;
use crate::tools::{Checksum, Copy, Programs, Tool};
use crate::warm;

/// A tool that took this many times as long as the fastest in the warm-up is not run again: more
/// runs would tell nothing new and take most of the benchmark's time.
const POINTLESS: f64 = 20.0;

/// Pairs of runs from which the checksum's cost is taken.
pub const CHECKSUM_PAIRS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Direction {
    /// Disk to RAM
    In,
    /// RAM to disk
    Out,
}

impl Direction {
    pub const ALL: [Self; 2] = [Self::In, Self::Out];

    /// Peers first: their order is the page's order of tools.
    fn tools(self) -> Vec<Tool> {
        let ondeck: &[Tool] = match self {
            Self::In => &[
                Tool::ondeck(Checksum::None, true),
                Tool::ondeck(Checksum::Xxh3, true),
                Tool::ondeck(Checksum::Blake3, true),
                Tool::Bare,
            ],
            // Without the sync it does what the peers do, and with it what they do plus syncfs.
            Self::Out => &[
                Tool::ondeck(Checksum::None, false),
                Tool::ondeck(Checksum::Xxh3, false),
                Tool::ondeck(Checksum::Blake3, false),
                Tool::ondeck(Checksum::None, true),
                Tool::ondeck(Checksum::Xxh3, true),
                Tool::Bare,
            ],
        };
        [&Tool::PEERS, ondeck].concat()
    }
}

/// Which of an *out* run's two times is meant. An *in* run has only the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    Returned,
    OnDisk,
}

#[derive(Clone, Copy, Debug)]
pub struct Sample {
    returned_s: f64,
    on_disk_s: f64,
    pub peak_memory: u64,
}

impl Sample {
    fn seconds(&self, until: Until) -> f64 {
        match until {
            Until::Returned => self.returned_s,
            Until::OnDisk => self.on_disk_s,
        }
    }
}

#[derive(Clone, Debug)]
pub enum Outcome {
    Measured(Vec<Sample>),
    /// Dropped after the warm-up, as [`POINTLESS`].
    WarmUpOnly(Sample),
    /// Not installed, not for this case, or failed: why.
    Absent(String),
}

#[derive(Clone, Debug)]
pub struct Row {
    pub tool: Tool,
    pub outcome: Outcome,
    /// What the copy lacks.
    pub missing: Option<String>,
    /// Whether files or bytes are among it: such a copy is no peer to compare with.
    pub broken: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Summary {
    pub median_s: f64,
    pub min_s: f64,
    pub max_s: f64,
    /// (max - min) / median
    pub spread: f64,
}

impl Summary {
    fn of(mut seconds: Vec<f64>) -> Option<Self> {
        seconds.sort_by(f64::total_cmp);
        let (&min_s, &max_s) = (seconds.first()?, seconds.last()?);
        let median_s = median(&seconds);
        Some(Self { median_s, min_s, max_s, spread: (max_s - min_s) / median_s })
    }
}

/// Of numbers in order.
pub fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) && middle > 0 {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted.get(middle).copied().unwrap_or(f64::NAN)
    }
}

impl Row {
    pub fn summary(&self, until: Until) -> Option<Summary> {
        match &self.outcome {
            Outcome::Measured(samples) => Summary::of(samples.iter().map(|s| s.seconds(until)).collect()),
            Outcome::WarmUpOnly(sample) => Summary::of(vec![sample.seconds(until)]),
            Outcome::Absent(_) => None,
        }
    }

    pub fn peak_memory(&self) -> Option<u64> {
        match &self.outcome {
            Outcome::Measured(samples) => samples.iter().map(|s| s.peak_memory).max(),
            Outcome::WarmUpOnly(sample) => Some(sample.peak_memory),
            Outcome::Absent(_) => None,
        }
    }
}

/// Rounds where memory is in small pieces: whether a copy is steady takes more runs to tell than its median.
pub const FEWEST_IN_PIECES: usize = 9;

/// Who is also compared where memory is in small pieces: those that were fastest, and the command of every day.
const IN_PIECES: [Tool; 5] =
    [Tool::Cp, Tool::Fcp, Tool::Cpz, Tool::ondeck(Checksum::None, true), Tool::ondeck(Checksum::Xxh3, true)];

/// One case in one direction.
#[derive(Clone, Debug)]
pub struct Comparison {
    pub case: Case,
    pub shape: Shape,
    pub direction: Direction,
    /// Free memory was broken up before each run.
    pub in_pieces: bool,
    pub census: Census,
    pub rows: Vec<Row>,
}

impl Comparison {
    pub fn row(&self, tool: Tool) -> Option<&Row> {
        self.rows.iter().find(|row| row.tool == tool)
    }

    pub fn summary(&self, tool: Tool, until: Until) -> Option<Summary> {
        self.row(tool)?.summary(until)
    }

    /// The fastest peer by its median, among those that copied every file.
    pub fn fastest_peer(&self, until: Until) -> Option<(Tool, f64)> {
        self.rows
            .iter()
            .filter(|row| !row.tool.is_ondeck() && !row.broken)
            .filter(|row| matches!(row.outcome, Outcome::Measured(_)))
            .filter_map(|row| Some((row.tool, row.summary(until)?.median_s)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Times as long as the fastest peer.
    pub fn ratio(&self, tool: Tool, until: Until) -> Option<f64> {
        let (_, fastest_s) = self.fastest_peer(until)?;
        Some(self.summary(tool, until)?.median_s / fastest_s)
    }
}

/// What checksums cost a case: the fastest of [`CHECKSUM_PAIRS`] interleaved runs with and without.
#[derive(Clone, Copy, Debug)]
pub struct ChecksumCost {
    pub shape: Shape,
    pub none_s: f64,
    pub xxh3_s: f64,
}

impl ChecksumCost {
    pub fn ratio(&self) -> f64 {
        self.xxh3_s / self.none_s
    }
}

#[derive(Debug, Default)]
pub struct Results {
    pub comparisons: Vec<Comparison>,
    pub checksum_costs: Vec<ChecksumCost>,
    pub memcpy: memcpy::Rates,
}

impl Results {
    pub fn comparison(&self, case: Case, direction: Direction) -> Option<&Comparison> {
        self.comparisons.iter().find(|c| c.case == case && c.direction == direction && !c.in_pieces)
    }
}

pub struct Plan<'a> {
    pub scratch: &'a Scratch,
    pub programs: &'a Programs,
    pub cases: &'a [Case],
    pub directions: &'a [Direction],
    /// Names of the tools to run, by how they begin; all when empty.
    pub only: &'a [String],
    pub rounds: usize,
    pub quick: bool,
    pub copies: bool,
    pub checksum_costs: bool,
}

impl Plan<'_> {
    pub fn run(&self) -> Result<Results> {
        let mut results = Results::default();
        for &case in self.cases {
            let shape = case.shape(self.quick);
            self.scratch.check_space(&shape.title(), shape.space())?;
            for &direction in self.directions {
                self.run_direction(case, shape, direction, &mut results)?;
            }
        }
        // Last: memory stays in pieces for a while, which is nobody else's case.
        for &case in self.cases.iter().filter(|case| matches!(case, Case::Medium | Case::Large)) {
            if self.copies && self.directions.contains(&Direction::In) {
                results.comparisons.push(self.run_in_pieces(case)?);
            }
        }
        Ok(results)
    }

    fn run_in_pieces(&self, case: Case) -> Result<Comparison> {
        let (shape, direction) = (case.shape(self.quick), Direction::In);
        let run = CaseRun {
            plan: self,
            shape,
            direction,
            source: &self.scratch.disk.join("source"),
            target: &self.scratch.ram.join("target"),
            fragments: RefCell::new(None),
        };
        eprintln!("{}: making the data, for memory in small pieces", shape.title());
        run.make()?;
        run.fragments.replace(Some(Fragments::new(&self.scratch.ram)?));
        let rows = run.rounds(&mut || Ok(()))?;
        run.fragments.take().map(Fragments::end).transpose()?;
        let census = Census::take(run.source)?;
        remove(run.source)?;
        remove(run.target)?;
        Ok(Comparison { case, shape, direction, in_pieces: true, census, rows })
    }

    fn run_direction(
        &self,
        case: Case,
        shape: Shape,
        direction: Direction,
        results: &mut Results,
    ) -> Result<()> {
        let (from, to) = match direction {
            Direction::In => (&self.scratch.disk, &self.scratch.ram),
            Direction::Out => (&self.scratch.ram, &self.scratch.disk),
        };
        let run = CaseRun {
            plan: self,
            shape,
            direction,
            source: &from.join("source"),
            target: &to.join("target"),
            fragments: RefCell::new(None),
        };
        eprintln!("{}, {direction:?}: making the data", shape.title());
        run.make()?;
        if self.copies {
            let with_memcpy = matches!((case, direction), (Case::Large, Direction::In));
            let rows = run.rounds(&mut || {
                if with_memcpy {
                    results.memcpy.add(memcpy::measure_in_child()?);
                }
                Ok(())
            })?;
            let census = Census::take(run.source)?;
            results.comparisons.push(Comparison { case, shape, direction, in_pieces: false, census, rows });
        }
        if self.checksum_costs && direction == Direction::In {
            results.checksum_costs.extend(run.checksum_cost()?);
        }
        remove(run.source)?;
        remove(run.target)
    }

    fn wants(&self, tool: Tool) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| tool.name().starts_with(name))
    }
}

/// One case in one direction, with its data in place.
struct CaseRun<'a> {
    plan: &'a Plan<'a>,
    shape: Shape,
    direction: Direction,
    source: &'a Path,
    target: &'a Path,
    /// What breaks up memory before each run, if it does.
    fragments: RefCell<Option<Fragments>>,
}

impl CaseRun<'_> {
    /// Makes the data, and where a single file goes.
    fn make(&self) -> Result<()> {
        self.shape.create(self.source)?;
        if matches!(self.shape, Shape::OneFile(_)) {
            fs::create_dir(self.target).with_context(|| format!("cannot make {}", self.target.display()))?;
        }
        Ok(())
    }

    fn rounds(&self, beside_round: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Row>> {
        let in_pieces = self.fragments.borrow().is_some();
        let all = if in_pieces { IN_PIECES.to_vec() } else { self.direction.tools() };
        let tools: Vec<Tool> = all.into_iter().filter(|tool| self.plan.wants(*tool)).collect();
        let mut rows = Vec::new();
        for tool in &tools {
            rows.push(self.warm_up(*tool)?);
        }
        drop_pointless(&mut rows);

        let count = if in_pieces { self.plan.rounds.max(FEWEST_IN_PIECES) } else { self.plan.rounds };
        for round in 0..count {
            beside_round()?;
            for position in 0..rows.len() {
                // Backwards every other time: nobody always runs after the same one.
                let place = if round % 2 == 0 { position } else { rows.len() - 1 - position };
                let row = &mut rows[(place + round) % tools.len()];
                let Outcome::Measured(samples) = &mut row.outcome else {
                    continue;
                };
                match self.run_once(row.tool)? {
                    Ok(sample) => samples.push(sample),
                    Err(why) => row.outcome = Outcome::Absent(why),
                }
            }
            eprintln!("{}, {:?}: round {} of {} done", self.shape.title(), self.direction, round + 1, count);
        }
        Ok(rows)
    }

    /// The first run of a tool, and the check that it copies everything.
    fn warm_up(&self, tool: Tool) -> Result<Row> {
        let mut row = Row { tool, outcome: Outcome::Measured(Vec::new()), missing: None, broken: false };
        row.outcome = if tool.needs_directory() && matches!(self.shape, Shape::OneFile(_)) {
            Outcome::Absent("copies directories only".into())
        } else {
            match self.run_once(tool)? {
                Ok(sample) => Outcome::WarmUpOnly(sample),
                Err(why) => Outcome::Absent(why),
            }
        };
        match &row.outcome {
            Outcome::WarmUpOnly(sample) => eprintln!(
                "{}, {:?}: warm-up: {} took {:.2} s",
                self.shape.title(),
                self.direction,
                tool.name(),
                sample.returned_s
            ),
            Outcome::Absent(why) => {
                eprintln!("{}: {}: {why}", self.shape.title(), tool.name());
                return Ok(row);
            }
            Outcome::Measured(_) => {}
        }
        let whole = Census::take(self.source)?;
        let copy = Census::take(self.target)?;
        row.missing = whole.missing_from(&copy);
        row.broken = copy.files < whole.files || copy.bytes < whole.bytes;
        Ok(row)
    }

    /// One timed run, or why there is none. Only what ends the whole benchmark is an `Err`.
    fn run_once(&self, tool: Tool) -> Result<Result<Sample, String>> {
        let notes = self.plan.scratch.disk.join("notes");
        let (source, target) = match self.shape {
            Shape::OneFile(_) => (self.source.join(ONE_FILE), self.target.join(ONE_FILE)),
            _ => (self.source.to_owned(), self.target.to_owned()),
        };
        let copy = Copy {
            source: &source,
            target: &target,
            is_directory: !matches!(self.shape, Shape::OneFile(_)),
            notes: &notes,
        };
        let Some(mut command) = tool.command(self.plan.programs, copy) else {
            let absent = if tool.is_ondeck() { "not built" } else { "not installed" };
            return Ok(Err(absent.into()));
        };
        tool.forget_last_run(copy)?;
        if let Some(fragments) = &mut *self.fragments.borrow_mut() {
            fragments.renew()?;
        }
        self.plan.scratch.settle()?;
        if self.fragments.borrow().is_none() {
            // In small pieces it is there: they were made a moment ago, and too small to be reported.
            warm::warm(self.shape.space() + self.shape.space() / 4)?;
        }

        let errors = self.plan.scratch.disk.join("errors.txt");
        let start = Instant::now();
        let finished = match timed::run(&mut command, &errors) {
            Ok(finished) => finished,
            Err(error) if error.is::<Interrupted>() => return Err(error),
            Err(error) => return Ok(Err(format!("{error:#}"))),
        };
        if self.direction == Direction::Out {
            sync_filesystem(self.target.parent().unwrap_or(self.target))?;
        }
        let on_disk_s = start.elapsed().as_secs_f64();
        if !finished.status.success() {
            let complaint = timed::complaint(finished.status, &errors);
            return Ok(Err(format!("failed, {complaint}")));
        }
        Ok(Ok(Sample {
            returned_s: finished.elapsed.as_secs_f64(),
            on_disk_s,
            peak_memory: finished.peak_memory,
        }))
    }

    /// Pairs of runs back to back, because the checksum's cost is smaller than what a machine
    /// drifts over a whole round.
    fn checksum_cost(&self) -> Result<Option<ChecksumCost>> {
        let tools = [Checksum::None, Checksum::Xxh3].map(|c| Tool::ondeck(c, true));
        if self.plan.programs.ondeck().is_none() || !tools.iter().all(|t| self.plan.wants(*t)) {
            return Ok(None);
        }
        eprintln!("{}: the checksum's cost", self.shape.title());
        let mut fastest = [f64::INFINITY; 2];
        for pair in 0..CHECKSUM_PAIRS {
            for position in 0..2 {
                let which = (pair + position) % 2;
                match self.run_once(tools[which])? {
                    Ok(sample) => fastest[which] = fastest[which].min(sample.returned_s),
                    Err(why) => {
                        eprintln!("{}: {why}", tools[which].name());
                        return Ok(None);
                    }
                }
            }
        }
        Ok(Some(ChecksumCost { shape: self.shape, none_s: fastest[0], xxh3_s: fastest[1] }))
    }
}

/// Turns the warm-up's rows into rows to measure, but for those that are pointless to repeat.
fn drop_pointless(rows: &mut [Row]) {
    let returned: HashMap<usize, f64> = (rows.iter().enumerate())
        .filter(|(_, row)| !row.broken)
        .filter_map(|(at, row)| Some((at, row.summary(Until::Returned)?.median_s)))
        .collect();
    let fastest = returned.values().copied().fold(f64::INFINITY, f64::min);
    for row in rows {
        if let Outcome::WarmUpOnly(sample) = row.outcome
            && sample.returned_s <= POINTLESS * fastest
        {
            row.outcome = Outcome::Measured(Vec::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tool: Tool, seconds: &[f64]) -> Row {
        let sample = |&returned_s: &f64| Sample { returned_s, on_disk_s: returned_s * 2.0, peak_memory: 1 };
        Row {
            tool,
            outcome: Outcome::Measured(seconds.iter().map(sample).collect()),
            missing: None,
            broken: false,
        }
    }

    fn comparison(rows: Vec<Row>) -> Comparison {
        Comparison {
            case: Case::Small,
            shape: Case::Small.shape(true),
            direction: Direction::Out,
            in_pieces: false,
            census: Census::default(),
            rows,
        }
    }

    #[test]
    fn the_median_of_an_even_count_lies_between() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
    }

    #[test]
    fn the_spread_is_taken_over_the_median() {
        let summary = Summary::of(vec![3.0, 2.0, 1.0]).unwrap();
        assert_eq!((summary.min_s, summary.median_s, summary.spread), (1.0, 2.0, 1.0));
    }

    #[test]
    fn ratios_are_to_the_fastest_whole_peer() {
        let ondeck = Tool::ondeck(Checksum::None, false);
        let mut broken = row(Tool::Lms, &[0.1]);
        broken.broken = true;
        let comparison =
            comparison(vec![row(Tool::Cp, &[2.0]), row(Tool::Xcp, &[4.0]), broken, row(ondeck, &[1.0])]);
        assert_eq!(comparison.ratio(ondeck, Until::Returned), Some(0.5));
        assert_eq!(comparison.ratio(Tool::Xcp, Until::OnDisk), Some(2.0));
        assert_eq!(comparison.fastest_peer(Until::Returned), Some((Tool::Cp, 2.0)));
    }

    #[test]
    fn a_tool_far_behind_keeps_its_warm_up_only() {
        let mut rows = vec![row(Tool::Cp, &[1.0]), row(Tool::Rclone, &[25.0])];
        for row in &mut rows {
            let Outcome::Measured(samples) = &row.outcome else {
                unreachable!("made above");
            };
            row.outcome = Outcome::WarmUpOnly(samples[0]);
        }
        drop_pointless(&mut rows);
        assert!(matches!(rows[0].outcome, Outcome::Measured(_)));
        assert!(matches!(rows[1].outcome, Outcome::WarmUpOnly(_)));
    }
}
