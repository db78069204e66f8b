//! `ondeck run`: the whole life of a job on this one machine.
//!
//! Three processes take part. The *front* is the command that the user started: it shows progress, passes signals on
//! and exits with the program's code. The *keeper* is a child of it that does everything: it builds the RAM disk,
//! stages in, starts the program, and stages out; it outlives the front, so that killing the command loses nothing.
//! The *program* is a child of the keeper, in the private namespaces where the RAM disk is mounted, but in the
//! process group and session of the front, so that the terminal treats it as if the shell had started it.
//!
//! # Layout
//!
//! - `plan`: from options and directives to directories, mechanisms and sizes, before anything is changed
//! - `keeper`: the life of the job; `program`: starting processes inside, ending what they leave behind
//! - `shared`: what the phases of that life need; `outputs`: the directories in RAM that the program writes to; `mounting`:
//!   showing them; `copy_out`: their results to disk, by [`ondeck_staging::merge_back`]; `findings`: single entries;
//!   `places`: what files are called
//! - `caches`: directories that the program sees through a cache of `ondeck cache`
//! - `target`: if the directory of results is not where it was; `switch`: from input to output after a delay
//! - `heir`: who takes the place of a keeper that is killed; what it must know is in
//!   [`ondeck_staging::merge_back::journal`]
//! - `launch`: starting one; `front`: what the user sees and sends; `watchers` and `message`: how the keeper and its fronts
//!   talk
//! - `slurm` and `deadline`: what changes inside a batch job; `report`: the record of a run
//! - `held`: listing runs, giving up what one holds; `claim`: whether a run lives; `left`: what is left of one that does not

mod caches;
mod claim;
mod copy_out;
mod deadline;
mod findings;
mod front;
mod heir;
mod held;
mod keeper;
mod launch;
mod left;
mod message;
mod mounting;
mod outputs;
mod places;
mod plan;
mod program;
mod report;
mod shared;
mod slurm;
mod switch;
mod target;
mod watchers;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use ondeck_core::{Bytes, PackFormat, Rate, duration, exit};

use crate::stage::{ChecksumArg, parse_pack};

/// Run a program with its data in RAM
///
/// Builds a RAM disk, stages the input in, shows it at the very paths the program already uses, runs the program
/// with its arguments, environment, terminal and signals untouched, stages the results out, verifies them, and exits
/// with the program's own exit code. Nobody else sees the RAM disk, and nothing is left of it. No daemon and no root
/// are needed.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// A batch script with #RSA_ lines, and its arguments
    #[arg(value_name = "JOB.sh")]
    script: Vec<OsString>,

    /// The program and its arguments
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,

    /// Stage this directory in and show it, read-only, at its own path (may be repeated)
    #[arg(long, value_name = "DIR")]
    data_in: Vec<PathBuf>,

    /// Let the program write to this directory in RAM and stage it out afterwards (may be repeated; may also be a
    /// --data-in). What it holds stays visible and is not destroyed
    #[arg(long, value_name = "DIR")]
    data_out: Vec<PathBuf>,

    /// Show this directory through a write-back cache of the program's own; nothing is staged before (root; may be repeated)
    #[arg(long, value_name = "DIR")]
    cache: Vec<PathBuf>,

    /// RAM for the data and names of each cache, like 8GiB [default: half of what the RAM disk leaves free, in equal parts,
    /// at most 64GiB]
    #[arg(long, value_name = "SIZE")]
    cache_size: Option<Bytes>,

    /// The size of the RAM disk, like 4GiB [default: half of the free RAM]
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,

    /// What the output needs beside the input; checked before the start
    #[arg(long, value_name = "SIZE")]
    out_size: Option<Bytes>,

    /// How an output directory that holds something is shown
    #[arg(long, value_enum, default_value = "auto", value_name = "HOW")]
    existing: Existing,

    /// What to do when the run does not fit here: refuse, or run on disk [default: refuse; disk in a Slurm job script]
    #[arg(long, value_enum, value_name = "WHAT")]
    fallback: Option<Fallback>,

    /// After this time give the input up and use the RAM disk for the output (the switch of #RSA_DELAY), like 5m
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    delay: Option<Duration>,

    /// While the program runs, copy closed output files to disk this often, like 5m
    #[arg(long, value_name = "TIME", value_parser = parse_minutes)]
    copy_out_interval: Option<Duration>,

    /// A script that fills the RAM disk: called with the RAM disk and the data directory
    #[arg(long, value_name = "SCRIPT")]
    stage_in: Option<PathBuf>,

    /// A script that saves the results: called with the RAM disk and the data directory
    #[arg(long, value_name = "SCRIPT")]
    stage_out: Option<PathBuf>,

    /// Stage out one archive instead of files
    #[arg(long, value_name = "FORMAT", value_parser = parse_pack)]
    pack: Option<PackFormat>,

    /// The checksum taken of every file that is staged
    #[arg(long, value_enum, default_value = "xxh3", value_name = "KIND")]
    checksum: ChecksumArg,

    /// Read the results back from disk and compare their checksums
    #[arg(long)]
    verify: bool,

    /// Stage at most this much in a second, like 500MB/s
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<Rate>,

    /// How many threads stage [default: one for each processor, at most 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// In a Slurm job: end the program this long before the job's time limit, to stage out; `off` lets it run
    /// [default: computed from the bytes to write and the rate measured]
    #[arg(long, value_name = "TIME|off")]
    end_margin: Option<String>,

    /// Write a record of the run, with the seconds, bytes and rates of every phase, as JSON
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// Print events as JSON lines on standard error
    #[arg(long)]
    json: bool,

    /// Print warnings and errors only
    #[arg(short, long)]
    quiet: bool,

    /// Go on with a run whose results are still held in RAM: stage them out
    #[arg(long, value_name = "ID", conflicts_with_all = ["script", "command", "abandon", "list"])]
    resume: Option<String>,

    /// Give up the held results of a run
    #[arg(long, value_name = "ID", conflicts_with_all = ["script", "command", "list"])]
    abandon: Option<String>,

    /// With --abandon: do not ask
    #[arg(long, requires = "abandon")]
    yes: bool,

    /// List your runs on this machine
    #[arg(long, conflicts_with_all = ["script", "command"])]
    list: bool,
}

impl RunArgs {
    /// Whether it runs nothing, and ends when it has told what it was asked for.
    pub fn only_lists(&self) -> bool {
        self.list
    }
}

const EXAMPLES: &str = "Examples:
  ondeck run --data-in ~/case/input --data-out ~/case/results --size 4GiB -- ./solver --steps 100
  ondeck run job.sh                          a batch script with #RSA_ lines
  ondeck run --data-out results --copy-out-interval 5m --report run.json -- ./solver
  ondeck run --cache /shared/project -- make  a directory through a cache (root)
  ondeck run --list                          runs of yours on this machine
  ondeck run --resume ID                     stage out what a run still holds in RAM

Exit codes: the program's own (128+n if signal n ended it), or
  121  the results are on disk, but their directory was renamed while the
       program ran; the message says where it is
  122  the results are not all on disk: they are held in RAM, and the
       message says how to finish
  123  the results were abandoned
  125  refused or failed before the program started; nothing was changed
  126  the program can't be executed
  127  the program was not found";

/// How an output directory that already holds something is shown to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Existing {
    /// Whichever of the two works without surprises here
    Auto,
    /// Let the directory on disk show through; changes are kept in RAM
    Overlay,
    /// Copy what it holds into RAM first
    Copy,
}

/// What to do when a run does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fallback {
    /// Refuse, with the figures and the remedy
    Error,
    /// Run the program on disk and say so
    Disk,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    duration::parse(text, 1).map_err(|error| error.to_string())
}

fn parse_minutes(text: &str) -> Result<Duration, String> {
    match duration::parse(text, 60).map_err(|error| error.to_string())? {
        Duration::ZERO => Err("an interval of zero would copy without end; write it like 5m".into()),
        interval => Ok(interval),
    }
}

/// Runs the command.
pub fn run(args: RunArgs) -> ExitCode {
    let code = if args.list {
        held::list()
    } else if let Some(id) = &args.resume {
        front::attach(id, message::RunOrder::Resume, args.json, args.quiet)
    } else if let Some(id) = &args.abandon {
        held::abandon(id, args.yes, args.json, args.quiet)
    } else {
        start(&args)
    };
    ExitCode::from(code.unwrap_or_else(|error| {
        eprintln!("ondeck run: {error:#}");
        exit::NOT_STARTED
    }))
}

/// A reason for not using RAM, without the advice to run on disk: that is what is done.
fn without_disk(why: &str) -> String {
    let mut text = why.to_owned();
    for (advice, rest) in [
        (", or run with --fallback disk", ""),
        (" or run with --fallback disk", ""),
        (", or with --fallback disk", ""),
        ("; --fallback disk would run without one", ""),
        ("; run with --fallback disk, or write", "; write"),
        ("run with --fallback disk, or ", ""),
    ] {
        text = text.replace(advice, rest);
    }
    text
}

fn start(args: &RunArgs) -> anyhow::Result<u8> {
    let job = plan::Job::from_args(args)?;
    for warning in &job.warnings {
        eprintln!("ondeck: {warning}");
    }
    let fallback = args.fallback.unwrap_or(if job.is_script && slurm::job_id().is_some() {
        Fallback::Disk
    } else {
        Fallback::Error
    });
    if let Some(path) = &args.report
        && let Err(error) = report::Report::check(path)
    {
        if fallback == Fallback::Error {
            return Err(error);
        }
        eprintln!("ondeck: {error:#}");
    }
    match plan::Plan::make(args, &job) {
        Ok(plan) => launch::start(plan, job, args, fallback),
        Err(error) if fallback == Fallback::Disk => {
            let why = without_disk(&format!("{error:#}"));
            eprintln!("ondeck: running on disk: {why}");
            Ok(program::run_on_disk(&job.command, args.report.as_deref(), &why))
        }
        Err(error) => Err(error),
    }
}
