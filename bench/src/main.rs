//! Benchmarks of Ondeck against the copy tools people use today.
//!
//! A figure here is only worth printing when a reader can take it apart, so every part of a run
//! that could favour one tool is stated once, in the module that decides it, and printed on the
//! page that the run makes.
//!
//! # Layout
//!
//! | module | decides |
//! |---|---|
//! | [`data`] | what is copied: the four cases |
//! | [`tools`] | who copies it: the command line of each tool, peers and `ondeck stage` |
//! | [`scratch`] | where: the work directory on disk, the tmpfs, and their removal |
//! | [`interrupt`], [`timed`] | how one command is run, timed, and stopped on a signal |
//! | [`copies`] | how runs are interleaved, what is kept and dropped, the checksum's cost |
//! | [`warm`] | that memory is there, where the host of a virtual machine may have taken it |
//! | [`memcpy`] | the speed of light that copying into RAM is compared with |
//! | [`metadata`] | what a copy keeps besides the bytes |
//! | [`run_overhead`] | what `ondeck run` adds to a program that does nothing |
//! | [`buffers`], [`fragments`] | another page: which buffer the copy engine has; memory in small pieces |
//! | [`goals`] | the stated goals, met or missed |
//! | [`machine`], [`page`] | what it ran on; the page that is printed |
//! | [`ramdisk`] | another page: what the engines of RAM disks cost |
//! | [`scheduler`] | a third page: what the scheduler costs and saves |
//! | [`cache`] | a fourth page: `ondeck cache` beside other caches |
//! | [`layouts`] | a fifth page: files over one and over two disks of a CephFS |
//! | [`slow_disk`] | the disk that caches and the thesis's jobs are measured with |
//! | [`phases`], [`evict`] | for the demo: reads the report of `ondeck run`; makes files cold |

mod buffers;
mod cache;
mod copies;
mod data;
mod evict;
mod fragments;
mod goals;
mod interrupt;
mod layouts;
mod machine;
mod memcpy;
mod metadata;
mod page;
mod phases;
mod ramdisk;
mod run_overhead;
mod scheduler;
mod scratch;
mod slow_disk;
mod timed;
mod tools;
mod warm;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::copies::Direction;
use crate::data::Case;
use crate::interrupt::Interrupted;
use crate::page::Page;
use crate::scratch::Scratch;
use crate::tools::{Checksum, Programs, Tool};
use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};

/// Benchmarks of Ondeck against other copy tools. setup.sh installs the peers.
#[derive(Parser)]
#[command(name = "ondeck-bench", version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Copy benchmark: `ondeck stage` beside cp, rsync, tar, rclone, fpsync, fcp, cpz, xcp and lms
    ///
    /// The binary under test is the newest release build of the workspace, or what the environment
    /// variable ONDECK names. The full set takes an hour or so, 12 GiB of memory and 7 GB of disk.
    Stage(StageOptions),
    /// Copy benchmark: the copy engine with buffers of 64 KiB to 4 MiB, also where memory is in small pieces
    ///
    /// Takes half an hour and, unless --size says otherwise, up to 6 GB of memory and 5 GB of disk. What else runs on
    /// the machine finds memory in small pieces for a while.
    Buffers(buffers::Options),
    /// RAM disk benchmark: `ondeck ramdisk` with its engines, in a testbed of namespaces; needs root
    ///
    /// The binaries under test, `ondeck` and `ondeck-testbed`, are those beside this one, or what the
    /// environment variables ONDECK and ONDECK_TESTBED name. The full set takes up to 15 minutes and
    /// 16 GiB of memory.
    Ramdisk(ramdisk::Options),
    /// Cache benchmark: `ondeck cache` beside tmpfs, the page cache, overlayfs, mergerfs and rclone; needs root
    ///
    /// The binary under test is the newest release build of the workspace, or what the environment variable ONDECK
    /// names. The full set takes 20 minutes or so, up to 4 GiB of memory and 4 GiB of /var/tmp.
    Cache(cache::Options),
    /// Layout benchmark: a file in one object beside the same over two OSDs of a real CephFS, slow ones and others; needs root
    ///
    /// The binaries under test, `ondeck` and `ondeck-testbed`, are those beside this one, or what the environment variables ONDECK
    /// and ONDECK_TESTBED name. Takes a minute.
    Layouts(layouts::Options),
    /// Scheduler benchmark: a pass over 10,000 jobs and 1,000 RSA nodes, and the daemon beside them
    ///
    /// The daemon is the newest release build of the workspace, or what the environment variable ONDECK
    /// names. Slurm is pretended. Takes three minutes.
    Schedule(scheduler::Options),
    /// Scheduler benchmark: what Prolog and Epilog add, and from on deck to READY, beside a real Slurm; needs root
    ///
    /// The binaries under test, `ondeck` and `ondeck-testbed`, are those beside this one, or what the
    /// environment variables ONDECK and ONDECK_TESTBED name. Takes six minutes.
    Hooks(scheduler::Options),
    /// Scheduler benchmark: what burst buffers add, beside functions that do nothing and the integration from outside; needs root
    ///
    /// The binaries under test, `ondeck` and `ondeck-testbed`, are those beside this one, or what the
    /// environment variables ONDECK and ONDECK_TESTBED name. Takes a quarter of an hour.
    BurstBuffers(scheduler::Options),
    /// Scheduler benchmark: the thesis's tables 5.1 to 5.4, on a disk of 50 MB/s beside a real Slurm; needs root
    ///
    /// The binaries under test, `ondeck` and `ondeck-testbed`, are those beside this one, or what the
    /// environment variables ONDECK and ONDECK_TESTBED name. Takes ten minutes, and 4 GB of /var/tmp.
    Thesis(scheduler::Options),
    /// Scheduler benchmark: how fast `ondeck simulate` is, beside AccaSim
    ///
    /// `ondeck` is the newest release build of the workspace, or what the environment variable ONDECK names. Takes half a minute.
    Simulator(scheduler::Options),
    /// Scheduler benchmark: jobs on a real Slurm, beside what `ondeck simulate` makes of their journal; needs root
    ///
    /// The binaries under test, `ondeck` and `ondeck-testbed`, are those beside this one, or what the
    /// environment variables ONDECK and ONDECK_TESTBED name. Takes seven minutes, and 6 GB of the temporary directory.
    Replay(scheduler::Options),
    /// Scheduler benchmark: what the history of layouts costs a stage-out, and an answer from 10,000 rows of it; needs root
    ///
    /// The binaries under test, `ondeck` and `ondeck-testbed`, are those beside this one, or what the
    /// environment variables ONDECK and ONDECK_TESTBED name. Takes five minutes.
    LayoutHistory(scheduler::Options),
    /// Scheduler benchmark: what watching who writes (`watch_nodes`) costs a program; needs root
    ///
    /// Takes a minute.
    Observer(scheduler::Options),
    /// The program that the thesis's jobs run
    #[command(hide = true)]
    Writer(scheduler::writer::Writer),
    /// The program that is watched
    #[command(hide = true)]
    Opener(scheduler::observer::Opener),
    /// Print the phases of a report of `ondeck run`, one a line: name, seconds, bytes, files
    Phases {
        /// What `ondeck run --report` wrote
        report: PathBuf,
    },
    /// Drop the files of a directory from the page cache, so that the next to read them finds the
    /// disk
    Evict { directory: PathBuf },
    /// Copy with the engine alone, in a process of its own
    #[command(hide = true)]
    BareCopy { source: PathBuf, target: PathBuf },
    /// Measure copying memory, in a process of its own
    #[command(hide = true)]
    Memcpy,
    /// Use so many bytes of memory, and end
    #[command(hide = true)]
    Warm { bytes: u64 },
    /// Use a mounted RAM disk, in a host of the testbed
    #[command(hide = true)]
    Load {
        #[command(subcommand)]
        action: ramdisk::load::LoadCommand,
    },
}

#[derive(clap::Args)]
struct StageOptions {
    /// Directory on the disk that is measured
    #[arg(long, default_value = "/var/tmp")]
    disk: PathBuf,
    /// Measure a directory of --disk, not an ext4 of the bench's own on a loop device
    #[arg(long)]
    plain_disk: bool,
    /// Rounds that count, after one that does not [default: 5, or 3 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: Option<u16>,
    /// Smaller cases and fewer rounds: a first look in a few minutes
    #[arg(long)]
    quick: bool,
    /// Only this case (may be repeated)
    #[arg(long = "case", value_name = "CASE")]
    cases: Vec<Case>,
    /// Only this direction (may be repeated)
    #[arg(long = "direction", value_name = "DIRECTION")]
    directions: Vec<Direction>,
    /// Only tools whose name begins so, as in --tool ondeck --tool rsync (may be repeated)
    #[arg(long = "tool", value_name = "NAME")]
    tools: Vec<String>,
    /// Only this part (may be repeated)
    #[arg(long = "part", value_name = "PART")]
    parts: Vec<Part>,
    /// Also write the page to this file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The copies, with memory and memcpy
    Copies,
    /// What checksums cost
    Checksum,
    /// What each copy keeps
    Metadata,
    /// What `ondeck run` adds
    Run,
}

fn main() -> ExitCode {
    let result = match Options::parse().command {
        Command::Stage(options) => stage(&options),
        Command::Buffers(options) => buffers::run(&options),
        Command::Ramdisk(options) => ramdisk::run(&options),
        Command::Cache(options) => cache::run(&options),
        Command::Layouts(options) => layouts::run(&options),
        Command::Schedule(options) => scheduler::schedule::run(&options),
        Command::Hooks(options) => scheduler::hooks::run(&options),
        Command::BurstBuffers(options) => scheduler::burst_buffers::run(&options),
        Command::Thesis(options) => scheduler::thesis::run(&options),
        Command::Simulator(options) => scheduler::simulator::run(&options),
        Command::Replay(options) => scheduler::replay::run(&options),
        Command::LayoutHistory(options) => scheduler::layout_history::run(&options),
        Command::Observer(options) => scheduler::observer::run(&options),
        Command::Writer(writer) => writer.run(),
        Command::Opener(opener) => opener.run(),
        Command::Phases { report } => phases::print(&report),
        Command::Evict { directory } => evict::evict(&directory),
        Command::BareCopy { source, target } => tools::bare_copy(&source, &target),
        Command::Memcpy => memcpy::print(),
        Command::Warm { bytes } => warm::use_memory(bytes),
        Command::Load { action } => ramdisk::load::print(&action),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ondeck-bench: {error:#}");
            match error.downcast_ref::<Interrupted>() {
                Some(interrupted) => {
                    ExitCode::from(128u8.saturating_add(interrupted.signal.unsigned_abs() as u8))
                }
                None => ExitCode::FAILURE,
            }
        }
    }
}

fn stage(options: &StageOptions) -> Result<()> {
    interrupt::install()?;
    let mut programs = Programs::find()?;
    match programs.ondeck() {
        Some(path) => eprintln!("ondeck: {}", path.display()),
        None => {
            eprintln!("ondeck: not built, its rows are skipped; run cargo build --release, or set ONDECK")
        }
    }
    let page = measure(options, &mut programs)?;
    print!("{page}");
    if let Some(file) = &options.markdown {
        fs::write(file, &page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// Measures with a scratch directory that is gone when this returns.
fn measure(options: &StageOptions, programs: &mut Programs) -> Result<String> {
    let cases = all_or(&options.cases, &Case::ALL);
    let disk_space = cases.iter().map(|case| case.shape(options.quick).space()).max().unwrap_or(0);
    let scratch = Scratch::new(&options.disk, options.plain_disk, disk_space)?;
    programs.copy_ondeck_to(&scratch.base)?;
    let programs = &*programs;
    let wants = |part| options.parts.is_empty() || options.parts.contains(&part);
    let rounds = options.rounds.unwrap_or(if options.quick { 3 } else { 5 });
    let rounds = usize::from(rounds);

    let mut plan = copies::Plan {
        scratch: &scratch,
        programs,
        cases,
        directions: all_or(&options.directions, &Direction::ALL),
        only: &options.tools,
        rounds,
        quick: options.quick,
        copies: wants(Part::Copies),
        checksum_costs: wants(Part::Checksum),
    };
    if !plan.copies {
        plan.directions = &[Direction::In];
    }
    // The short parts first, so that a long run that is bound to fail in them fails early.
    let metadata = if wants(Part::Metadata) {
        metadata::compare(&scratch, programs, &options.tools)?
    } else {
        Vec::new()
    };
    let overheads = if wants(Part::Run) { run_overhead::measure(&scratch, programs)? } else { Vec::new() };
    let results = if plan.copies || plan.checksum_costs { plan.run()? } else { copies::Results::default() };
    let tools = [&Tool::PEERS[..], &[Tool::ondeck(Checksum::Xxh3, true)]].concat();
    let page = Page {
        command: command_line(),
        facts: machine::facts(&scratch.disk_label, &scratch.ram_label),
        versions: tools.iter().filter_map(|t| t.version(programs)).collect(),
        rounds,
        quick: options.quick,
        ondeck_is_built: programs.ondeck().is_some(),
        results,
        metadata,
        overheads,
    };
    Ok(without_paths(page.render(), &scratch.base))
}

/// Complaints of a tool quote paths, and a page that others read should not say whose they are.
fn without_paths(page: String, scratch: &Path) -> String {
    let page = page.replace(&*scratch.to_string_lossy(), "");
    match std::env::home_dir() {
        Some(home) if home.components().count() > 1 => page.replace(&*home.to_string_lossy(), "~"),
        _ => page,
    }
}

fn all_or<'a, T>(chosen: &'a [T], all: &'a [T]) -> &'a [T] {
    if chosen.is_empty() { all } else { chosen }
}

/// The command that made the page, without paths: they say nothing about the figures, but may say
/// who ran it.
fn command_line() -> String {
    let mut words = vec!["ondeck-bench".to_owned()];
    for argument in std::env::args().skip(1) {
        words.push(match argument.split_once('=') {
            Some((name, value)) if value.contains('/') => format!("{name}=PATH"),
            None if argument.contains('/') => "PATH".to_owned(),
            _ => argument,
        });
    }
    words.join(" ")
}
