//! What the engines of RAM disks cost: building and destroying them, moving data through them, the
//! processors and the memory that they take.
//!
//! All of it runs in one testbed of namespaces, which ends with this process. What is compared runs
//! side by side, in rounds of rotated order, of which the first is dropped: besides the usual
//! reasons, because the first touch of a virtual machine's memory can be ten times as slow as the
//! next.
//!
//! # Layout
//!
//! | module | measures |
//! |---|---|
//! | [`testbed`] | nothing: the hosts, their agents, the commands that build and destroy |
//! | [`load`] | nothing: what a host does with a mounted RAM disk |
//! | [`samples`] | nothing: repeated measurements of one thing |
//! | [`lifetime`] | creating and destroying, with their steps |
//! | [`by_hand`], [`throughput`] | one client's rate, beside the same stack without Ondeck |
//! | [`cpu`] | processor time per gigabyte |
//! | [`memory`] | processes, and the kernel's memory per file, beside what is budgeted |
//! | [`preallocate`] | what touching all pages first costs and gains |
//! | [`staging`] | `ondeck stage` through the mount, by its threads |
//! | [`metadata_device`] | ceph's metadata on RAM while its data is on a disk |

mod by_hand;
mod cpu;
mod lifetime;
pub mod load;
mod memory;
mod metadata_device;
mod preallocate;
pub mod samples;
mod staging;
pub mod testbed;
mod throughput;

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::goals::Judged;
use crate::machine;
use crate::page::{Table, heading, paragraph};
use crate::ramdisk::samples::Samples;
use crate::ramdisk::testbed::AgentTestbed;
use crate::{command_line, interrupt};

#[derive(clap::Args)]
pub struct Options {
    /// Rounds that count, after one that does not [default: each part's own, 1 to 15]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: Option<u16>,
    /// Less data and fewer rounds: a first look in three minutes
    #[arg(long)]
    quick: bool,
    /// Only this part (may be repeated)
    #[arg(long = "part", value_name = "PART")]
    parts: Vec<Part>,
    /// Also write the page to this file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Creating and destroying, with their steps
    Lifetime,
    /// One client's rate, beside the same stack by hand
    Throughput,
    /// Processor time per gigabyte
    Cpu,
    /// Memory of processes and kernel
    Memory,
    /// Touching all pages first
    Preallocate,
    /// `ondeck stage` through the mount
    Staging,
    /// Metadata on RAM, data on a disk
    MetadataDevice,
}

impl Part {
    fn measure(self, testbed: &AgentTestbed, effort: Effort) -> Result<Section> {
        match self {
            Self::Lifetime => lifetime::measure(testbed, effort),
            Self::Throughput => throughput::measure(testbed, effort),
            Self::Cpu => cpu::measure(testbed, effort),
            Self::Memory => memory::measure(testbed, effort),
            Self::Preallocate => preallocate::measure(testbed, effort),
            Self::Staging => staging::measure(testbed, effort),
            Self::MetadataDevice => metadata_device::measure(testbed, effort),
        }
    }
}

/// How much is done.
#[derive(Clone, Copy, Debug)]
struct Effort {
    quick: bool,
    rounds: Option<u16>,
}

impl Effort {
    /// The rounds that count: what was asked for, else what suits a part.
    fn rounds(self, quick: usize, full: usize) -> usize {
        self.rounds.map_or(if self.quick { quick } else { full }, usize::from)
    }
}

/// What one part found out.
struct Section {
    title: String,
    goals: Vec<Judged>,
    /// In Markdown.
    text: String,
}

impl Section {
    fn new(title: &str) -> Self {
        Self { title: title.to_owned(), goals: Vec::new(), text: String::new() }
    }
}

/// A row of the goals.
fn judged(goal: &str, case: &str, samples: &Samples, figure: &str, met: bool) -> Judged {
    let (figure, verdict) = match (samples.is_empty(), met) {
        (true, _) => ("", "not measured"),
        (false, true) => (figure, "met"),
        (false, false) => (figure, "**missed**"),
    };
    Judged { goal: goal.into(), case: case.into(), figure: figure.into(), verdict: verdict.into() }
}

/// Tells below a table what is missing in it.
fn write_absent<'a>(page: &mut String, absent: impl Iterator<Item = (String, &'a Option<String>)>) {
    for (title, why) in absent {
        if let Some(why) = why {
            paragraph(page, &format!("Not measured: {title}: {why}."));
        }
    }
}

pub fn run(options: &Options) -> Result<()> {
    if !machine::is_root() {
        bail!("RAM disks are built in a testbed of namespaces and mounts: run it as root");
    }
    interrupt::install()?;
    let began = Instant::now();
    let effort = Effort { quick: options.quick, rounds: options.rounds };
    let testbed = AgentTestbed::new()?;
    let mut sections = Vec::new();
    for part in Part::value_variants() {
        if !options.parts.is_empty() && !options.parts.contains(part) {
            continue;
        }
        let part_began = Instant::now();
        eprintln!("{part:?}: begins");
        let section = part.measure(&testbed, effort).or_else(|error| {
            // One part that fails is no reason to lose the others.
            interrupt::check()?;
            eprintln!("{part:?}: {error:#}");
            testbed.reset()?;
            let mut section = Section::new(&format!("{part:?}"));
            paragraph(&mut section.text, &format!("**Not measured**: {error:#}."));
            anyhow::Ok(section)
        })?;
        sections.push(section);
        eprintln!("{part:?}: {:.0} s", part_began.elapsed().as_secs_f64());
    }
    let page = render(&testbed, effort, &sections);
    let page = crate::without_paths(page, testbed.dir());
    drop(testbed);
    print!("{page}");
    eprintln!("took {:.0} s", began.elapsed().as_secs_f64());
    if let Some(file) = &options.markdown {
        fs::write(file, &page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn render(testbed: &AgentTestbed, effort: Effort, sections: &[Section]) -> String {
    let mut page = String::from("# Benchmarks of RAM disks\n\n");
    paragraph(
        &mut page,
        &format!(
            "The engines of `ondeck ramdisk`, made by `{}`. All nodes are namespaces of one \
             machine, joined by a virtual bridge: more of them add work and no hardware. What is \
             compared takes turns in rounds of rotated order; the first round is dropped. GB are \
             10^9 bytes.",
            command_line()
        ),
    );
    if effort.quick {
        paragraph(
            &mut page,
            "**Quick set**: less data and fewer rounds. The verdicts are a first look only.",
        );
    }
    let mut goals = Table::new(&["goal", "case", "measured", "verdict"]);
    for judged in sections.iter().flat_map(|section| &section.goals) {
        let Judged { goal, case, figure, verdict } = judged;
        goals.add([goal, case, figure, verdict].map(Clone::clone));
    }
    if !goals.is_empty() {
        heading(&mut page, "Goals");
        goals.write(&mut page);
    }
    for section in sections {
        heading(&mut page, &section.title);
        page += &section.text;
    }
    heading(&mut page, "The machine");
    let mut table = Table::new(&["", ""]);
    for (name, value) in machine::facts(&testbed.disk_label(), "tmpfs, one for each node") {
        table.add([name.to_owned(), value]);
    }
    let versions = [
        machine::first_line(testbed.ondeck(), &["--version"]),
        machine::first_line("glusterfs", &["--version"]),
        machine::first_line("ceph", &["--version"]),
    ];
    table.add(["versions".to_owned(), versions.join("; ")]);
    table.write(&mut page);
    page
}
