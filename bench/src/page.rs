//! The page: the same Markdown on standard output and in the file, its tables padded so that they
//! read well either way.

use std::fmt::Write;

use crate::copies::{CHECKSUM_PAIRS, Comparison, Direction, Outcome, Results, Row, Until};
use crate::data::Case;
use crate::goals;
use crate::machine;
use crate::metadata::{self, KeptMetadata};
use crate::run_overhead::{Overhead, RUNS};
use crate::tools::Tool;
use crate::warm;
use ondeck_bench::size::show;

/// Everything that one run of the benchmark found out.
pub struct Page {
    pub command: String,
    pub facts: Vec<(&'static str, String)>,
    pub versions: Vec<String>,
    pub rounds: usize,
    pub quick: bool,
    pub ondeck_is_built: bool,
    pub results: Results,
    pub metadata: Vec<KeptMetadata>,
    pub overheads: Vec<Overhead>,
}

impl Page {
    pub fn render(&self) -> String {
        let mut page = String::from("# Benchmarks\n\n");
        self.introduction(&mut page);
        self.goals(&mut page);
        for comparison in &self.results.comparisons {
            copies(&mut page, comparison);
        }
        self.memcpy(&mut page);
        self.checksum_costs(&mut page);
        self.memory(&mut page);
        self.kept(&mut page);
        self.run_overhead(&mut page);
        self.machine(&mut page);
        page
    }

    fn introduction(&self, page: &mut String) {
        paragraph(
            page,
            &format!(
                "`ondeck stage` beside other copy tools on one machine, made by `{}`. Interleaved \
                 rounds in rotated order, every other one backwards: one to warm up, which is dropped, then {}. Ratios are of \
                 medians, to the fastest peer that copied everything: below 1 is faster. The \
                 spread is (slowest - fastest) / median. The page cache is warm; before each run \
                 the last target is removed and the disk left to settle. The row \"ondeck's engine, \
                 modes only\" copies of the metadata only modes, as most peers do; all other rows of \
                 ondeck's copy all of it.",
                self.command, self.rounds
            ),
        );
        if warm::is_reported() {
            paragraph(
                page,
                "This virtual machine reports to its host what memory is free, and gets it again slowly. So before each run (but where \
                 memory is in small pieces) as much memory as it takes was used and freed.",
            );
        }
        if self.quick {
            paragraph(
                page,
                "**Quick set**: smaller cases than those the goals are stated for. The verdicts \
                 are a first look only.",
            );
        }
        if !self.ondeck_is_built {
            paragraph(
                page,
                "**ondeck is not built**: its rows are skipped. Build it with `cargo build \
                 --release`, or name it in the environment variable `ONDECK`.",
            );
        }
    }

    fn goals(&self, page: &mut String) {
        heading(page, "Goals");
        let mut table = Table::new(&["goal", "case", "measured", "verdict"]);
        for judged in goals::judge_all(&self.results, &self.overheads) {
            table.add([judged.goal, judged.case, judged.figure, judged.verdict]);
        }
        table.write(page);
    }

    fn memcpy(&self, page: &mut String) {
        let Some(best) = self.results.memcpy.best() else {
            return;
        };
        heading(page, "Copying memory");
        paragraph(
            page,
            "One thread copying memory that was faulted in, measured between the rounds of the \
             large file. Buffers that the last cache can hold do not count.",
        );
        let mut table = Table::new(&["buffer", "pages", "GB/s", "counts"]);
        for (size, huge, rate, counts) in self.results.memcpy.rows() {
            table.add([
                show(size),
                (if huge { "huge" } else { "small" }).into(),
                format!("{:.2}", rate / 1e9),
                (if counts { "yes" } else { "no" }).into(),
            ]);
        }
        table.write(page);

        let Some(comparison) = self.results.comparison(Case::Large, Direction::In) else {
            return;
        };
        let mut table = Table::new(&["of memcpy", "tool", "best GB/s", "median GB/s"]);
        let mut rows: Vec<_> = comparison
            .rows
            .iter()
            .filter_map(|row| Some((row.tool, row.summary(Until::Returned)?)))
            .collect();
        rows.sort_by(|a, b| a.1.min_s.total_cmp(&b.1.min_s));
        for (tool, summary) in rows {
            let rate = |seconds: f64| comparison.census.bytes as f64 / seconds;
            table.add([
                format!("{:.0} %", rate(summary.min_s) / best * 100.0),
                code(tool),
                format!("{:.2}", rate(summary.min_s) / 1e9),
                format!("{:.2}", rate(summary.median_s) / 1e9),
            ]);
        }
        table.write(page);
    }

    fn checksum_costs(&self, page: &mut String) {
        if self.results.checksum_costs.is_empty() {
            return;
        }
        heading(page, "What the checksum costs");
        paragraph(
            page,
            &format!(
                "`ondeck stage` with its default checksum (xxh3) over the same with `--checksum \
                 none`: the fastest of {CHECKSUM_PAIRS} interleaved runs of each, into RAM."
            ),
        );
        let mut table = Table::new(&["xxh3 / none", "case", "none s", "xxh3 s"]);
        for cost in &self.results.checksum_costs {
            table.add([
                format!("{:.2}", cost.ratio()),
                cost.shape.title(),
                seconds(cost.none_s),
                seconds(cost.xxh3_s),
            ]);
        }
        table.write(page);
    }

    fn memory(&self, page: &mut String) {
        let trees: Vec<&Comparison> =
            (self.results.comparisons.iter()).filter(|c| c.case == Case::Tree).collect();
        let Some(first) = trees.first() else {
            return;
        };
        heading(page, "Memory");
        paragraph(
            page,
            &format!(
                "Largest resident set of any one process of the command, as wait4(2) tells it, \
                 for {} ({}). A pipe or a set of workers uses more in all, and nothing below the \
                 {} of the bench itself, which starts them, can be told.",
                first.shape.title(),
                first.census,
                show(machine::own_peak_memory())
            ),
        );
        let mut peaks: Vec<(Tool, u64)> = Vec::new();
        for row in trees.iter().flat_map(|c| &c.rows) {
            let Some(peak) = row.peak_memory() else {
                continue;
            };
            match peaks.iter_mut().find(|(tool, _)| *tool == row.tool) {
                Some((_, highest)) => *highest = peak.max(*highest),
                None => peaks.push((row.tool, peak)),
            }
        }
        peaks.sort_by_key(|(_, peak)| *peak);
        let mut table = Table::new(&["peak memory", "tool"]);
        for (tool, peak) in peaks {
            table.add([show(peak), code(tool)]);
        }
        table.write(page);
    }

    fn kept(&self, page: &mut String) {
        if self.metadata.is_empty() {
            return;
        }
        heading(page, "What a copy keeps");
        paragraph(page, "Each tool as in the tables above, on a small tree from disk to RAM.");
        let mut table = Table::new(&[&["tool"], metadata::COLUMNS.as_slice()].concat());
        let mut not_run = Vec::new();
        for kept in &self.metadata {
            match &kept.answers {
                Ok(answers) => {
                    let answers = answers.map(|answer| match answer {
                        Some(true) => "yes",
                        Some(false) => "**no**",
                        None => "not tested",
                    });
                    let mut row = vec![code(kept.tool)];
                    row.extend(answers.map(String::from));
                    table.add(row);
                }
                Err(why) => not_run.push(format!("{}: {why}.", code(kept.tool))),
            }
        }
        table.write(page);
        if !not_run.is_empty() {
            paragraph(page, &not_run.join(" "));
        }
    }

    fn run_overhead(&self, page: &mut String) {
        if self.overheads.is_empty() {
            return;
        }
        heading(page, "What `ondeck run` adds");
        paragraph(
            page,
            &format!(
                "`ondeck run --data-in EMPTY --data-out EMPTY -- true` and bare `true`, {RUNS} \
                 interleaved runs of each; medians in milliseconds."
            ),
        );
        let mut table = Table::new(&["added ms", "user", "true ms", "ondeck run ms"]);
        for overhead in &self.overheads {
            let user = overhead.user.to_owned();
            table.add(match &overhead.medians_ms {
                Ok((bare, run)) => {
                    [format!("{:.2}", run - bare), user, format!("{bare:.2}"), format!("{run:.2}")]
                }
                Err(why) => [why.clone(), user, String::new(), String::new()],
            });
        }
        table.write(page);
    }

    fn machine(&self, page: &mut String) {
        heading(page, "The machine");
        let mut table = Table::new(&["", ""]);
        for (name, value) in &self.facts {
            table.add([(*name).to_owned(), value.clone()]);
        }
        table.add(["versions".to_owned(), self.versions.join("; ")]);
        table.write(page);
    }
}

fn copies(page: &mut String, comparison: &Comparison) {
    let direction = match comparison.direction {
        Direction::In => "disk to RAM",
        Direction::Out => "RAM to disk",
    };
    let pieces = if comparison.in_pieces { ", memory in small pieces" } else { "" };
    heading(page, &format!("{}, {direction}{pieces}", capitalised(&comparison.shape.title())));
    paragraph(page, &format!("{}.", comparison.census));
    if comparison.in_pieces {
        paragraph(
            page,
            "Before each run free memory was broken up, as on a machine that has run for a while: at most 2 % of it lay \
             in blocks of 32 KiB or more. There are at least 9 rounds.",
        );
    }
    match comparison.direction {
        Direction::In => copies_in(page, comparison),
        Direction::Out => copies_out(page, comparison),
    }
}

fn copies_in(page: &mut String, comparison: &Comparison) {
    let mut table = Table::new(&["x fastest", "tool", "median s", "min s", "spread", "note"]);
    for row in by_time(comparison, Until::Returned) {
        let [median, min, spread] = times(row, Until::Returned);
        let ratio = ratio(comparison, row.tool, Until::Returned);
        table.add([ratio, code(row.tool), median, min, spread, note(row)]);
    }
    table.write(page);
}

fn copies_out(page: &mut String, comparison: &Comparison) {
    paragraph(
        page,
        "*Returned*: until the command returned. *On disk*: until syncfs of the target returned \
         after it. `ondeck stage` without `--no-sync` returns when the target is synced, so only \
         its second time compares.",
    );
    let mut table = Table::new(&[
        "on disk: x fastest",
        "returned: x fastest",
        "tool",
        "on disk: median s",
        "min s",
        "spread",
        "returned: median s",
        "min s",
        "spread",
        "note",
    ]);
    for row in by_time(comparison, Until::OnDisk) {
        let syncs = matches!(row.tool, Tool::Ondeck(stage) if stage.sync);
        let returned_ratio = if syncs { String::new() } else { ratio(comparison, row.tool, Until::Returned) };
        let mut cells = vec![ratio(comparison, row.tool, Until::OnDisk), returned_ratio, code(row.tool)];
        cells.extend(times(row, Until::OnDisk));
        cells.extend(times(row, Until::Returned));
        cells.push(note(row));
        table.add(cells);
    }
    table.write(page);
}

/// Fastest first; rows without a time last.
fn by_time(comparison: &Comparison, until: Until) -> Vec<&Row> {
    let mut rows: Vec<&Row> = comparison.rows.iter().collect();
    let time = |row: &Row| row.summary(until).map_or(f64::INFINITY, |s| s.median_s);
    rows.sort_by(|a, b| time(a).total_cmp(&time(b)));
    rows
}

fn ratio(comparison: &Comparison, tool: Tool, until: Until) -> String {
    comparison.ratio(tool, until).map_or(String::new(), |ratio| format!("{ratio:.2}"))
}

fn times(row: &Row, until: Until) -> [String; 3] {
    let Some(summary) = row.summary(until) else {
        return Default::default();
    };
    let spread = match row.outcome {
        Outcome::Measured(_) => format!("{:.0} %", summary.spread * 100.0),
        _ => String::new(),
    };
    [seconds(summary.median_s), seconds(summary.min_s), spread]
}

fn note(row: &Row) -> String {
    let outcome = match &row.outcome {
        Outcome::Measured(_) => None,
        Outcome::WarmUpOnly(_) => Some("warm-up only".to_owned()),
        Outcome::Absent(why) => Some(why.clone()),
    };
    let notes: Vec<String> = outcome.into_iter().chain(row.missing.clone()).collect();
    notes.join("; ")
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.3}")
}

fn code(tool: Tool) -> String {
    format!("`{}`", tool.name())
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

pub fn heading(page: &mut String, text: &str) {
    *page += &format!("## {text}\n\n");
}

pub fn paragraph(page: &mut String, text: &str) {
    *page += text;
    *page += "\n\n";
}

/// A Markdown table whose columns are padded to one width.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(columns: &[&str]) -> Self {
        let header = columns.iter().map(|&name| name.to_owned()).collect();
        Self { rows: vec![header] }
    }

    pub fn add(&mut self, cells: impl Into<Vec<String>>) {
        // A bar in a tool's complaint would end the cell.
        let cells = cells.into().into_iter();
        self.rows.push(cells.map(|cell| cell.replace('|', "/")).collect());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    pub fn write(&self, page: &mut String) {
        if self.is_empty() {
            return;
        }
        let widths: Vec<usize> = (0..self.rows[0].len())
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
            })
            .collect();
        for (number, row) in self.rows.iter().enumerate() {
            for (cell, &width) in row.iter().zip(&widths) {
                // Writing to a String cannot fail.
                let _ = write!(page, "| {cell:width$} ");
            }
            *page += "|\n";
            if number == 0 {
                for &width in &widths {
                    *page += &format!("|{}", "-".repeat(width + 2));
                }
                *page += "|\n";
            }
        }
        page.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_padded_and_keeps_bars_out_of_its_cells() {
        let mut table = Table::new(&["x", "tool"]);
        table.add(["1.00".to_owned(), "a|b".to_owned()]);
        let mut page = String::new();
        table.write(&mut page);
        assert_eq!(page, "| x    | tool |\n|------|------|\n| 1.00 | a/b  |\n\n");
    }

    #[test]
    fn an_empty_table_is_left_out() {
        let mut page = String::new();
        Table::new(&["x"]).write(&mut page);
        assert!(page.is_empty());
    }
}
