//! What a study has found, in all forms.

use std::fmt::Write;

use anyhow::Result;
use ondeck_core::schedule::LockIn;
use ondeck_core::timeline::Timeline;
use ondeck_core::{Bytes, WaitPolicy, duration};
use ondeck_sim::io::{IoModel, Overrun};
use ondeck_sim::picture::page::{Part, Table, page};
use ondeck_sim::picture::{sizing_curve, time as time_of_picture};
use ondeck_sim::record::Served;
use ondeck_sim::remedy::Estimates;
use ondeck_sim::simulation::simulate_with_timeline;
use ondeck_sim::study::{Interval, Knee, Point, PointResult, Saved, Study, knee};
use ondeck_sim::summary::Summary;
use ondeck_sim::trace::Lacks;
use serde_json::{Value, json};

use crate::display::count;

/// What stands beside an answer that is not whole.
const INTERRUPTED: &str = "Interrupted: this is what was simulated until then, and other sizes may pay.";

/// What a study has found.
pub struct Report<'a> {
    study: &'a Study<'a>,
    lacks: Lacks,
    before: Before,
    is_whole: bool,
    results: Vec<PointResult>,
}

/// How busy the machine is by the log, before anything of that is changed.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    /// The share of it that jobs ask for.
    pub load: f64,
    /// From the first submission to the last, in seconds.
    pub span: u64,
    /// The share that they are made to ask for.
    pub rescaled: Option<f64>,
}

/// The columns of the table: their names, what they are called in CSV and JSON, and a number of a summary.
type Column = (&'static str, &'static str, usize, fn(&Summary) -> f64);

const COLUMNS: [Column; 10] = [
    ("I/O node-hours", "io_node_hours", 0, |summary| summary.io_node_hours),
    ("useful %", "useful_utilisation_percent", 1, |summary| summary.useful_utilisation * 100.0),
    ("wait s", "wait_seconds_mean", 0, |summary| summary.wait.mean),
    ("p50", "wait_seconds_p50", 0, |summary| summary.wait.p50),
    ("p95", "wait_seconds_p95", 0, |summary| summary.wait.p95),
    ("p99", "wait_seconds_p99", 0, |summary| summary.wait.p99),
    ("slowdown", "slowdown_mean", 2, |summary| summary.slowdown.mean),
    ("makespan h", "makespan_hours", 1, |summary| summary.makespan_hours),
    ("RSA busy %", "rsa_occupancy_percent", 1, |summary| summary.rsa_occupancy * 100.0),
    ("disk busy %", "disk_occupancy_percent", 1, |summary| summary.disk_occupancy * 100.0),
];

/// A number of what is saved.
type OfSaved = fn(&Saved) -> Interval;

impl<'a> Report<'a> {
    /// The results of a study, or what of them is there.
    pub fn new(
        study: &'a Study<'a>,
        lacks: Lacks,
        before: Before,
        is_whole: bool,
        results: Vec<PointResult>,
    ) -> Report<'a> {
        Report { study, lacks, before, is_whole, results }
    }

    /// Of how many machines there are results.
    pub fn done(&self) -> usize {
        self.results.len()
    }

    fn alone(&self) -> Option<&PointResult> {
        self.results.iter().find(|result| result.point == Point::Alone)
    }

    /// What RSA nodes save. Further compute nodes save no I/O; what they do is seen by waits and slowdowns.
    fn saved(&self, result: &PointResult) -> Option<Saved> {
        matches!(result.point, Point::Accelerated { .. }).then_some(())?;
        Some(Saved::of(self.alone()?, result))
    }

    /// Of each size, with the depth and proportion by which it saves most.
    fn best(&self) -> Vec<(&PointResult, Saved)> {
        let mut best: Vec<(&PointResult, Saved)> = Vec::new();
        for result in &self.results {
            let Some(saved) = self.saved(result) else { continue };
            match best.last_mut() {
                Some(last) if last.0.point.added() == result.point.added() => {
                    if saved.net.mean > last.1.net.mean {
                        *last = (result, saved);
                    }
                }
                _ => best.push((result, saved)),
            }
        }
        best
    }

    fn sizes(&self) -> Vec<(u32, Saved)> {
        self.best().into_iter().map(|(result, saved)| (result.point.added(), saved)).collect()
    }

    fn knee(&self) -> Option<Knee> {
        let sizes = self.sizes();
        (!sizes.is_empty()).then(|| knee(&sizes))
    }

    /// The size that pays most, by the depth and proportion of which that is true; the smallest if none pays.
    fn advised(&self) -> Option<&PointResult> {
        let (knee, best) = (self.knee()?.nodes, self.best());
        let of_knee = best.iter().find(|(result, _)| result.point.added() == knee);
        of_knee.or(best.first()).map(|(result, _)| *result)
    }

    /// What was simulated, a line each.
    fn facts(&self) -> Vec<String> {
        let (study, trace) = (self.study, self.study.trace);
        let mut facts = Vec::new();
        let left_out = trace.left_out;
        let load = if self.before.load.is_finite() {
            format!("they ask for {:.0} % of the machine in that time", self.before.load * 100.0)
        } else {
            "all are submitted at once".to_owned()
        };
        facts.push(format!(
            "{} in {} on {} nodes, {load}; left out: {} that never ran, {} parts of others, {} that had not ended, {} repeated lines",
            count(trace.jobs.len() as u64, "job"),
            time_of_picture(self.before.span * 1000),
            study.machine.nodes,
            left_out.never_ran,
            left_out.parts,
            left_out.unfinished,
            left_out.repeated
        ));
        if let Some(load) = self.before.rescaled {
            facts.push(format!("submissions moved so that they ask for {:.0} %", load * 100.0));
        }
        if self.lacks.requested_times {
            facts.push(format!(
                "the log does not say how long jobs might have run: {} estimates (--estimates)",
                study.estimates.word()
            ));
        }
        if self.lacks.jobs_without_time > 0 {
            facts.push(format!(
                "{} of them do not say how long they might have run: {} estimates (--estimates)",
                self.lacks.jobs_without_time,
                study.estimates.word()
            ));
        }
        if self.lacks.waits && self.before.rescaled.is_none() {
            facts.push(
                "all jobs fit on the machine when they are submitted: these are probably the times of their starts, and \
                 nobody waited; --rescale 0.9 makes a busy machine of it"
                    .to_owned(),
            );
        }
        facts.push(format!("I/O: {}", model(&study.io)));
        if let IoModel::Measured { jobs, .. } = &study.io {
            let found = trace.jobs.iter().filter(|job| jobs.contains_key(&job.number)).count();
            facts.push(format!(
                "{found} of the {} jobs of the log are in it; the others do no I/O",
                trace.jobs.len()
            ));
        }
        let overrun = Overrun::of(trace, &study.machine, &study.io, study.seed);
        if overrun.jobs > 0 {
            let share = overrun.jobs as f64 / trace.jobs.len().max(1) as f64 * 100.0;
            let load = if overrun.load.is_finite() {
                format!("; with their I/O, jobs ask for {:.0} % of the machine", overrun.load * 100.0)
            } else {
                String::new()
            };
            facts.push(format!(
                "the I/O of {} jobs ({share:.0} %) does not fit into their run time, even alone on the disk filesystem: they run for \
                 longer than in the log{load}",
                overrun.jobs
            ));
        }
        let machine = study.machine;
        facts.push(format!(
            "disk filesystem {}{}, a compute node {}; an RSA node lends {} and has {}",
            machine.disk,
            if machine.background > 0.0 {
                format!(", {:.0} % of it for others", machine.background * 100.0)
            } else {
                String::new()
            },
            machine.link,
            study.accelerator.memory,
            study.accelerator.link
        ));
        let wait = match study.accelerator.wait {
            WaitPolicy::Hold => "jobs are held until their input is in RAM (RSA_WAIT=hold)",
            _ => "jobs that could start do (RSA_WAIT=disk)",
        };
        let list = |values: Vec<String>| values.join(", ");
        facts.push(format!(
            "one RSA node for {} compute nodes (--proportion); the first {} of the queue are next (--depth)",
            list(study.proportions.iter().map(u32::to_string).collect()),
            list(study.depths.iter().map(usize::to_string).collect())
        ));
        let horizon = study.accelerator.site.horizon;
        let expected = match horizon.is_zero() {
            true => String::new(),
            false => {
                format!("; jobs are next that are expected to start within {}", duration::limit(horizon))
            }
        };
        facts.push(format!(
            "order {}, EASY backfill; {wait}{expected}; seeds {} to {}",
            study.order.word(),
            study.seed,
            study.seed.wrapping_add(study.seeds - 1)
        ));
        let all_exact = !self.lacks.requested_times || study.estimates == Estimates::Exact;
        if study.seeds > 1 && all_exact && !study.io.is_random() {
            facts.push("nothing in it is random, so all seeds give the same".to_owned());
        }
        facts
    }

    fn machine_name(&self, point: Point) -> String {
        match point {
            Point::Alone => "alone".to_owned(),
            Point::MoreComputeNodes { nodes } => format!("{nodes} more compute"),
            Point::Accelerated { nodes, depth, proportion } => {
                let mut name = format!("{nodes} RSA");
                if self.study.depths.len() > 1 {
                    let _ = write!(name, ", depth {depth}");
                }
                if self.study.proportions.len() > 1 {
                    let _ = write!(name, ", 1 of {proportion}");
                }
                name
            }
        }
    }

    fn table(&self) -> Table {
        let mut head = vec!["machine".to_owned(), "saved".to_owned(), "net".to_owned()];
        head.extend(COLUMNS.iter().map(|(name, ..)| (*name).to_owned()));
        let rows = self.results.iter().map(|result| {
            let saved = self.saved(result);
            let number =
                |of: fn(&Saved) -> Interval| saved.map_or(String::new(), |saved| interval(of(&saved), 0));
            let mut row =
                vec![self.machine_name(result.point), number(|saved| saved.gross), number(|saved| saved.net)];
            row.extend(COLUMNS.iter().map(|(_, _, digits, of)| interval(result.over_seeds(of), *digits)));
            row
        });
        Table {
            caption:
                "Node-hours that compute nodes wait for I/O, what is saved of them, and what jobs see of it"
                    .to_owned(),
            head,
            rows: rows.collect(),
        }
    }

    /// Where the data of the jobs was, by machine.
    fn served(&self) -> Table {
        let mut head = vec!["machine".to_owned()];
        let accelerated =
            || self.results.iter().filter(|result| matches!(result.point, Point::Accelerated { .. }));
        let shown: Vec<Served> = Served::ALL
            .into_iter()
            .filter(|served| {
                accelerated().any(|of| of.summaries.iter().any(|summary| summary.count(*served) > 0))
            })
            .collect();
        head.extend(shown.iter().map(|served| served.words().to_owned()));
        head.extend(["staged in, used %", "demoted", "staged in and wasted"].map(str::to_owned));
        let locks_in = self.study.accelerator.site.lock_in != LockIn::Off;
        if locks_in {
            head.extend(["overtaken", "later by s"].map(str::to_owned));
        }
        let rows = accelerated().map(|result| {
            let mut row = vec![self.machine_name(result.point)];
            row.extend(
                shown.iter().map(|served| interval(result.over_seeds(|of| of.count(*served) as f64), 0)),
            );
            row.push(interval(result.over_seeds(|of| of.stage_in_used * 100.0), 1));
            row.push(interval(result.over_seeds(|of| of.totals.demotions as f64), 0));
            let wasted = result.over_seeds(|of| of.totals.wasted.0 as f64).mean;
            row.push(ondeck_core::Bytes(wasted as u64).to_string());
            if locks_in {
                row.push(interval(result.over_seeds(|of| of.overtaken.jobs as f64), 0));
                row.push(interval(result.over_seeds(|of| of.overtaken.delay_s), 0));
            }
            row
        });
        Table {
            caption: "Where the data of the jobs was: numbers of jobs".to_owned(),
            head,
            rows: rows.collect(),
        }
    }

    /// How many RSA nodes pay, and why.
    fn advice(&self) -> Option<String> {
        let found = self.knee()?;
        let gain = |gain: Option<f64>| {
            gain.map_or("no more hours than before, and save more".to_owned(), |gain| {
                format!("an hour each and save {gain:.2} node-hours in it")
            })
        };
        let advised = self.advised()?;
        let mut words = if found.nodes == 0 {
            let each = |(_, saved): &(u32, Saved)| saved.gross.mean / saved.cost.mean.max(f64::MIN_POSITIVE);
            let best = self.sizes().into_iter().max_by(|one, other| each(one).total_cmp(&each(other)))?;
            format!(
                "No size pays: none saves more node-hours than its own nodes take. Of them {} RSA nodes come nearest: an hour of them \
                 saves {:.2} node-hours.",
                best.0,
                each(&best)
            )
        } else {
            format!(
                "{} pays most: the last nodes that were added take {}.",
                self.machine_name(advised.point),
                gain(found.last_gain)
            )
        };
        if found.nodes > 0 {
            match found.next {
                Some(next) => {
                    let _ = write!(words, " Up to {next}, further ones take {}.", gain(found.next_gain));
                }
                None if self.is_whole => words.push_str(" It is the largest that was tried: try more."),
                None => {}
            }
        }
        let more = self.results.iter().find(|of| of.point == Point::MoreComputeNodes { nodes: found.nodes });
        if let Some(more) = more {
            let wait = |of: &PointResult| of.over_seeds(|summary| summary.slowdown.mean).mean;
            let _ = write!(
                words,
                " As further compute nodes they give a mean slowdown of {:.2}, as RSA nodes {:.2}.",
                wait(more),
                wait(advised)
            );
        }
        Some(words)
    }

    /// For a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if !self.is_whole {
            let _ = writeln!(text, "{INTERRUPTED}");
        }
        for fact in self.facts() {
            let _ = writeln!(text, "{fact}");
        }
        for table in [self.table(), self.served()] {
            if !table.rows.is_empty() {
                let _ = write!(text, "\n{}\n{}", table.caption, columns(&table));
            }
        }
        if let Some(advice) = self.advice() {
            let _ = writeln!(text, "\n{advice}");
        }
        if !self.is_whole {
            let _ = writeln!(text, "{INTERRUPTED}");
        }
        text
    }

    /// The table, with the ends of intervals in columns of their own.
    pub fn csv(&self) -> String {
        let mut csv = "machine,added_nodes,depth,proportion,seeds".to_owned();
        let saved: [(&str, OfSaved); 2] = [("saved", |saved| saved.gross), ("net", |saved| saved.net)];
        let names = saved.iter().map(|(name, _)| format!("{name}_node_hours"));
        for name in names.chain(COLUMNS.iter().map(|(_, name, ..)| (*name).to_owned())) {
            let _ = write!(csv, ",{name},{name}_half_interval");
        }
        csv.push('\n');
        for result in &self.results {
            let (word, depth, proportion) = match result.point {
                Point::Alone => ("alone", String::new(), String::new()),
                Point::MoreComputeNodes { .. } => ("more_compute_nodes", String::new(), String::new()),
                Point::Accelerated { depth, proportion, .. } => {
                    ("accelerated", depth.to_string(), proportion.to_string())
                }
            };
            let _ = write!(
                csv,
                "{word},{},{depth},{proportion},{}",
                result.point.added(),
                result.summaries.len()
            );
            let of_result = self.saved(result);
            let saved =
                saved.iter().map(|(_, of)| of_result.map_or_else(Interval::default, |saved| of(&saved)));
            for number in saved.chain(COLUMNS.iter().map(|(.., of)| result.over_seeds(of))) {
                let _ = write!(csv, ",{:.6},", number.mean);
                if let Some(half) = number.half {
                    let _ = write!(csv, "{half:.6}");
                }
            }
            csv.push('\n');
        }
        csv
    }

    /// All numbers of all seeds.
    pub fn json(&self) -> Result<String> {
        let study = self.study;
        let results: Vec<Value> = self
            .results
            .iter()
            .map(|result| json!({ "point": result.point, "saved": self.saved(result), "seeds": result.summaries }))
            .collect();
        Ok(serde_json::to_string_pretty(&json!({
            "version": 1,
            "complete": self.is_whole,
            "jobs": study.trace.jobs.len(),
            "left_out": study.trace.left_out,
            "lacks": self.lacks,
            "load": self.before.load,
            "rescaled": self.before.rescaled,
            "machine": study.machine,
            "steps": study.accelerator.steps,
            "rsa_node": { "memory": study.accelerator.memory, "link": study.accelerator.link },
            "io": study.io,
            "order": study.order,
            "estimates": study.estimates,
            "wait": study.accelerator.wait,
            "first_seed": study.seed,
            "served": Served::ALL,
            "results": results,
            "knee": self.knee(),
        }))?)
    }

    /// Who had which nodes, with the size that pays most, and the picture's title; nothing without RSA nodes.
    pub fn timeline(&self) -> Result<Option<(String, Timeline)>> {
        let Some(point) = self.advised().map(|result| result.point) else { return Ok(None) };
        let mut trace = self.study.trace.clone();
        self.study.estimates.fill_in(&mut trace, self.study.seed);
        let (_, timeline) = simulate_with_timeline(&self.study.scenario(point, &trace, self.study.seed))?;
        let title = format!("{} compute nodes and {}", self.study.machine.nodes, self.machine_name(point));
        Ok(Some((title, timeline)))
    }

    /// One page with everything.
    pub fn html(&self, gantt: Option<&str>) -> String {
        let mut parts: Vec<Part> = Vec::new();
        if !self.is_whole {
            parts.push(Part::Paragraph(INTERRUPTED.to_owned()));
        }
        parts.extend(self.advice().map(Part::Paragraph));
        let sizes = self.sizes();
        if !sizes.is_empty() {
            parts.push(Part::Picture(sizing_curve("What each number of RSA nodes saves", &sizes)));
        }
        parts.push(Part::Table(self.table()));
        parts.push(Part::Table(self.served()));
        if let Some(gantt) = gantt {
            parts.push(Part::Heading("Who had which nodes".to_owned()));
            parts.push(Part::Picture(gantt.to_owned()));
        }
        parts.push(Part::Heading("What was simulated".to_owned()));
        parts.extend(self.facts().into_iter().map(Part::Paragraph));
        page("What an accelerator would do", &parts)
    }
}

/// A number over all seeds, with how far it may be off.
fn interval(number: Interval, digits: usize) -> String {
    // There is no -0 of anything.
    let mean = if number.mean.abs() < 0.5 * 10f64.powi(-(digits as i32)) { 0.0 } else { number.mean };
    match number.half {
        Some(half) => format!("{mean:.digits$} ±{half:.digits$}"),
        None => format!("{mean:.digits$}"),
    }
}

/// A model with all its constants.
fn model(model: &IoModel) -> String {
    let time = ondeck_core::duration::limit;
    match model {
        IoModel::None => "none".to_owned(),
        IoModel::Bursts { memory, share, interval } => format!(
            "bursts: {:.0} % of {memory} a node as input, as output, and as a checkpoint after each {} of computing",
            share * 100.0,
            time(*interval)
        ),
        IoModel::Slides { input, checkpoint, interval, output } => format!(
            "slides: alone on the disk filesystem {} of input, {} of a checkpoint after each {} of computing, {} of output",
            time(*input),
            time(*checkpoint),
            time(*interval),
            time(*output)
        ),
        IoModel::Kopanski { sigma, scale, less, least, phases, processors } => format!(
            "kopanski: lognormal bytes a processor (sigma {sigma}, scale {scale}, loc -{less}, at least {least}), {processors} \
             a node; all of it as input and output, half as a checkpoint between 1 to {phases} phases"
        ),
        IoModel::Daly { memory, share, mtbf } => format!(
            "daly: {:.0} % of {memory} a node as input, as output, and as a checkpoint after each sqrt(2 C M), with C its time \
             alone on the disk filesystem and M {} between two failures of a node",
            share * 100.0,
            time(*mtbf)
        ),
        IoModel::Measured { jobs, .. } => {
            let in_ram = jobs.values().filter(|measured| measured.in_ram).count();
            let (read, written) = jobs.values().fold((Bytes(0), Bytes(0)), |(read, written), job| {
                (Bytes(read.0.saturating_add(job.read.0)), Bytes(written.0.saturating_add(job.written.0)))
            });
            format!(
                "measured, of {}: {read} read, {written} written; {in_ram} of them had a RAM disk then",
                count(jobs.len() as u64, "job")
            )
        }
    }
}

/// A table for a terminal: numbers under each other.
fn columns(table: &Table) -> String {
    let all: Vec<&Vec<String>> = std::iter::once(&table.head).chain(&table.rows).collect();
    let count = table.head.len();
    // A long name of a column is broken into lines, so that numbers stand near each other.
    let widths: Vec<usize> = (0..count)
        .map(|column| {
            let of_rows = table.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
            let words = table.head[column].split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
            of_rows.max(words)
        })
        .collect();
    let heads: Vec<Vec<String>> =
        table.head.iter().zip(&widths).map(|(name, width)| broken(name, (*width).max(10))).collect();
    let widths: Vec<usize> = heads
        .iter()
        .zip(&widths)
        .map(|(lines, width)| lines.iter().map(|line| line.chars().count()).max().unwrap_or(0).max(*width))
        .collect();
    let mut text = String::new();
    let mut line = |cells: &[String]| {
        for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 => write!(text, "{cell:width$}"),
                _ => write!(text, "  {cell:>width$}"),
            };
        }
        while text.ends_with(' ') {
            text.pop();
        }
        text.push('\n');
    };
    let high = heads.iter().map(Vec::len).max().unwrap_or(0);
    for row in 0..high {
        // The last lines of all names stand above the numbers.
        let cells: Vec<String> = heads
            .iter()
            .map(|lines| {
                (row + lines.len())
                    .checked_sub(high)
                    .and_then(|index| lines.get(index).cloned())
                    .unwrap_or_default()
            })
            .collect();
        line(&cells);
    }
    all.iter().skip(1).for_each(|row| line(row));
    text
}

/// Words in lines of at most so many characters, where that is possible.
fn broken(words: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words.split(' ') {
        match lines.last_mut() {
            Some(last) if last.chars().count() + 1 + word.chars().count() <= width => {
                last.push(' ');
                last.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
