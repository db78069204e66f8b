//! What the scheduler costs, and what it saves: the page docs/scheduler-benchmarks.md, in eight parts
//! that are made by a command each.
//!
//! # Layout
//!
//! | module | measures |
//! |---|---|
//! | [`schedule`] | one part: a pass of the pure core ([`pass`]), and the daemon beside a large queue ([`daemon`]) |
//! | [`hooks`] | one part: what Prolog and Epilog add to a job, and from on deck to READY |
//! | [`burst_buffers`] | one part: Slurm's burst buffers beside functions that do nothing, and beside the integration from outside |
//! | [`thesis`] | one part: tables 5.1 to 5.4 of the thesis, on a slow disk |
//! | [`simulator`] | one part: how fast `ondeck simulate` is, beside AccaSim |
//! | [`replay`] | one part: jobs on a real Slurm, and what `ondeck simulate` makes of their journal |
//! | [`layout_history`] | one part: what the history of layouts costs a stage-out, and an answer from it |
//! | [`observer`] | one part: what watching who writes costs a program |
//! | [`writer`] | nothing: the program that the thesis's jobs run |
//! | [`cluster`] | nothing: a real Slurm with agents and scheduler, in a testbed of namespaces |

pub mod burst_buffers;
mod cluster;
mod daemon;
pub mod hooks;
pub mod layout_history;
pub mod observer;
mod pass;
pub mod replay;
pub mod schedule;
pub mod simulator;
pub mod thesis;
pub mod writer;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::goals::Judged;
use crate::page::{Table, heading, paragraph};
use crate::{command_line, machine};

/// What all eight commands take.
#[derive(clap::Args)]
pub struct Options {
    /// Rounds that count, after one that does not [default: each measurement's own]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    rounds: Option<u16>,
    /// Less of everything: a first look within a minute
    #[arg(long)]
    quick: bool,
    /// Also write this part to this file; what other commands wrote there is kept
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

impl Options {
    /// The rounds that count: what was asked for, else what suits a measurement.
    fn rounds(&self, quick: usize, full: usize) -> usize {
        self.rounds.map_or(if self.quick { quick } else { full }, usize::from)
    }
}

/// The first lines of the page.
const TITLE: &str = "# Benchmarks of the scheduler\n\n";

/// The commands, in the order of their parts on the page.
const PARTS: [&str; 8] =
    ["schedule", "hooks", "burst-buffers", "thesis", "simulator", "replay", "layout-history", "observer"];

/// What one command found out.
struct Part {
    name: &'static str,
    title: &'static str,
    introduction: String,
    goals: Vec<Judged>,
    /// In Markdown.
    text: String,
}

impl Part {
    fn new(name: &'static str, title: &'static str) -> Self {
        Self { name, title, introduction: String::new(), goals: Vec::new(), text: String::new() }
    }

    /// Adds a goal that is met below (or at) a limit.
    fn goal(&mut self, goal: &str, case: &str, figure: String, met: bool) {
        let verdict = if met { "met" } else { "**missed**" };
        self.goals.push(Judged { goal: goal.into(), case: case.into(), figure, verdict: verdict.into() });
    }

    fn render(&self, options: &Options) -> String {
        let mut page = String::new();
        heading(&mut page, self.title);
        paragraph(&mut page, &format!("Made by `{}`. {}", command_line(), self.introduction));
        if options.quick {
            paragraph(&mut page, "**Quick set**: the verdicts are a first look only.");
        }
        let mut goals = Table::new(&["goal", "case", "measured", "verdict"]);
        for Judged { goal, case, figure, verdict } in &self.goals {
            goals.add([goal, case, figure, verdict].map(Clone::clone));
        }
        goals.write(&mut page);
        page += &self.text;
        paragraph(&mut page, &format!("Measured on: {}.", machine::summary()));
        page
    }

    /// Prints it, and puts it into its place of the page.
    fn publish(&self, options: &Options) -> Result<()> {
        let text = self.render(options);
        print!("{text}");
        let Some(file) = &options.markdown else { return Ok(()) };
        let before = match fs::read_to_string(file) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
            read => read,
        };
        let unusable = || format!("cannot use {}", file.display());
        let page = replace(&before.with_context(unusable)?, self.name, &text);
        fs::write(file, page).with_context(unusable)
    }
}

fn marks(name: &str) -> (String, String) {
    (format!("<!-- begin: ondeck-bench {name} -->\n"), format!("<!-- end: ondeck-bench {name} -->\n"))
}

/// The page with one part of it anew.
fn replace(page: &str, name: &str, text: &str) -> String {
    let mut out = TITLE.to_owned();
    for part in PARTS {
        let (begin, end) = marks(part);
        let old = page.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end)).map(|(old, _)| old);
        if let Some(text) = if part == name { Some(text) } else { old } {
            out += &format!("{begin}{}\n{end}\n", text.trim_end_matches('\n'));
        }
    }
    out.truncate(out.trim_end().len());
    out + "\n"
}

/// A file's path in a command line.
fn word(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_replaces_itself_alone_and_parts_keep_their_order() {
        let page = replace("", "thesis", "## T\n\n");
        let page = replace(&page, "schedule", "## S\n\n");
        let page = replace(&page, "thesis", "## T2\n\n");
        assert!(page.starts_with(TITLE));
        let found: Vec<_> = page.lines().filter(|line| line.starts_with("## ")).collect();
        assert_eq!(found, ["## S", "## T2"]);
        assert_eq!(replace(&page, "thesis", "## T2\n\n"), page);
    }
}
