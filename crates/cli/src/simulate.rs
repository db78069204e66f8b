//! `ondeck simulate`: what an accelerator would do for a site, by its own log of jobs.

mod journal;
mod report;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ondeck_api::config::Config;
use ondeck_core::schedule::Site;
use ondeck_core::text::plain;
use ondeck_core::{Bytes, EngineKind, Rate, WaitPolicy, duration, exit};
use ondeck_scheduler::store::Workload;
use ondeck_sim::io::{IoModel, Measured};
use ondeck_sim::machine::{Accelerated, Machine, Steps};
use ondeck_sim::picture;
use ondeck_sim::remedy::{self, Estimates};
use ondeck_sim::study::{Progress, Study};
use ondeck_sim::trace::{Trace, plain_or_gzip, sacct, swf};
use ondeck_sim::workload_manager::Order;

use self::report::{Before, Report};

/// Say what an accelerator would do for a site, by its own log of jobs
///
/// The jobs of the log are run once more on a machine of so many nodes, with an I/O model that says how much they read and write:
/// without RSA nodes, with each number of them, and with as many further compute nodes. Decisions are those of `ondeck serve`, by
/// the same code. Nothing is run, and nothing is changed. docs/simulate.md explains it.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct SimulateArgs {
    /// The log, plain or compressed by gzip; `-` for standard input; with `--from journal`, the directory of the journal
    #[arg(value_name = "LOG")]
    log: PathBuf,

    /// How the log is written [default: by its first line; a directory is a journal]
    #[arg(long, value_name = "FORM")]
    from: Option<Form>,

    /// How many processors of a log in SWF are a node
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    processors_per_node: u32,

    /// The compute nodes of the machine [default: those of the log, or of its largest job]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    nodes: Option<u32>,

    /// The numbers of RSA nodes that are tried
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0,4,8,16,32",
        value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    rsa_nodes: Vec<u32>,

    /// What an RSA node lends
    #[arg(long, value_name = "SIZE", default_value = "128GiB")]
    rsa_memory: Bytes,

    /// What an RSA node can send or receive
    #[arg(long, value_name = "RATE", default_value = "5GB/s")]
    rsa_bandwidth: Rate,

    /// What a compute node can read or write
    #[arg(long, value_name = "RATE", default_value = "1GB/s")]
    node_bandwidth: Rate,

    /// What the disk filesystem can read and write together [default: a tenth of the memory of all nodes in ten minutes]
    #[arg(long, value_name = "RATE")]
    disk_bandwidth: Option<Rate>,

    /// The share of that which others take all the time
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    background: f64,

    /// How much jobs read and write: none, bursts, slides, kopanski, daly, a file with lines of `job,read,written` (bytes), or the
    /// directory of a journal [default: what a journal as log has, if it has any; else bursts]
    #[arg(long, value_name = "MODEL")]
    io: Option<String>,

    /// The memory of a compute node, for the models of checkpoints
    #[arg(long, value_name = "SIZE", default_value = "16GB")]
    memory: Bytes,

    /// The share of it that a checkpoint writes
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = share_or_all)]
    checkpoint: f64,

    /// What happens to a job that could start before its input is in RAM
    #[arg(long, value_name = "POLICY", default_value = "disk", value_parser = ["disk", "hold"])]
    wait: String,

    /// So many jobs of the queue are next, and have their input staged in [default: 4, or 1 with a horizon]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    depth: Vec<u32>,

    /// So are those that the workload manager expects to start within this [default: of --config, or 0s: none]
    #[arg(long, value_name = "DURATION", value_parser = horizon)]
    horizon: Option<Duration>,

    /// So many compute nodes get one RSA node [default: of --config, where it is 1 unless it says otherwise, or 4]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    proportion: Vec<u32>,

    /// In which order jobs start, with backfill
    #[arg(long, value_name = "ORDER", default_value = "fcfs")]
    order: OrderArg,

    /// What jobs are taken to have requested that do not say how long they might run
    #[arg(long, value_name = "HOW", default_value = "modal")]
    estimates: EstimatesArg,

    /// Move the submissions so that jobs ask for this share of the machine
    #[arg(long, value_name = "LOAD", value_parser = load)]
    rescale: Option<f64>,

    /// The configuration of `ondeck serve`, for what the site decides
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// How many seeds there are; several give intervals
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,

    /// The first seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// So many simulations at a time [default: as many as there are processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Also write the table as comma-separated values
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Also write one page with tables and pictures, which opens without a network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Also draw who had which nodes, as SVG, with the size that pays most, or the smallest; a name that ends with `.json` gets
    /// all of it as JSON, as `ondeck status --timeline` gives what really happened
    #[arg(long, value_name = "FILE")]
    gantt: Option<PathBuf>,

    /// What of the time is drawn: from when, and how long
    #[arg(long, value_name = "START,LENGTH", default_value = "0s,24h", value_parser = gantt_time)]
    gantt_time: (u64, u64),
}

const EXAMPLES: &str = "Examples:
  ondeck simulate trace.swf --nodes 128 --rsa-nodes 0,4,8,16,32 --io bursts --html report.html
  sacct --allusers --allocations --parsable2 --starttime 2026-10-01 \\
      --format=JobIDRaw,Submit,Start,End,NNodes,Timelimit,UID | ondeck simulate --from sacct -
  ondeck simulate trace.swf.gz --rescale 0.9 --seeds 10     a busier machine, with intervals
  ondeck simulate trace.swf --rsa-nodes 8 --depth 1,2,4,8   how far ahead input should be staged
  ondeck simulate trace.swf --rsa-nodes 8 --horizon 30m     with the expected starts that Slurm's backfill tells
  ondeck simulate trace.swf --rsa-nodes 16 --gantt day.svg --gantt-time 48h,24h
  ondeck simulate --from journal /var/lib/ondeck --nodes 128 --rsa-nodes 8,16   what was, with other sizes

Exit codes:
  0    done
  1    a file could not be read or written, or a line of the log can't be understood (it is named)
  2    wrong usage
  130  ended by Ctrl-C: what was finished is printed";

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// The Standard Workload Format of the Parallel Workloads Archive
    Swf,
    /// What `sacct --parsable2` prints
    Sacct,
    /// The journal of `ondeck serve`: jobs with #RSA_ lines that have ended
    Journal,
}

#[derive(Clone, Copy, ValueEnum)]
enum OrderArg {
    /// First come, first served
    Fcfs,
    /// By age and size
    Size,
}

#[derive(Clone, Copy, ValueEnum)]
enum EstimatesArg {
    /// As long as they ran
    Exact,
    /// Round times, most often far too long
    Modal,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to less than 1, such as 0.1".to_owned()),
    }
}

fn share_or_all(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1, such as 0.1".to_owned()),
    }
}

fn horizon(text: &str) -> Result<Duration, String> {
    duration::parse(text, 1).map_err(|error| error.to_string())
}

fn load(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(load) if (0.01..=10.0).contains(&load) => Ok(load),
        _ => Err("a load is a number from 0.01 to 10, such as 0.9".to_owned()),
    }
}

/// Set by a signal: no further simulation is begun.
static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_signal: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

/// The first Ctrl-C ends the study in an orderly way, the next one as usual.
fn stop_on_interrupt() {
    // SAFETY: the handler only stores to an atomic, which is async-signal-safe; the struct is valid when zeroed.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = stop as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESETHAND | libc::SA_RESTART;
        libc::sigaction(libc::SIGINT, &action, std::ptr::null_mut());
    }
}

/// Runs the command.
pub fn simulate(args: &SimulateArgs) -> ExitCode {
    if args.gantt.is_some() && args.rsa_nodes.iter().all(|nodes| *nodes == 0) {
        eprintln!("ondeck simulate: --gantt draws RSA nodes, and --rsa-nodes names none");
        return ExitCode::from(exit::USAGE);
    }
    match try_simulate(args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("ondeck simulate: {error:#}");
            ExitCode::from(exit::FAILED)
        }
    }
}

/// A bar of simulations, if somebody sees it.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Bar {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("simulating [{bar:30}] {pos}/{len}  {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        Bar(bar)
    }
}

impl Progress for Bar {
    fn done(&self, done: usize, all: usize) {
        self.0.set_length(all as u64);
        self.0.set_position(done as u64);
    }
}

fn try_simulate(args: &SimulateArgs) -> Result<u8> {
    // Read once, so that the jobs are those whose bytes are known.
    let is_journal = args.from.map_or_else(|| args.log.is_dir(), |form| form == Form::Journal);
    let workload = if is_journal { Some(journal::read(&args.log)?) } else { None };
    let mut trace = match &workload {
        Some(workload) => journal::trace(workload),
        None => read_log(args)?,
    };
    if trace.jobs.is_empty() && is_journal {
        bail!("{}: no job of this journal has run and ended", args.log.display());
    }
    // A log that is wrong leaves no empty files behind.
    try_files(args)?;
    let nodes = args.nodes.unwrap_or_else(|| trace.machine());
    let lacks = trace.lacks();
    let before = Before { load: trace.load(nodes), span: trace.span(), rescaled: args.rescale };
    if let Some(load) = args.rescale {
        if trace.span() == 0 {
            bail!("--rescale: all jobs are submitted at once, so nothing can be moved");
        }
        remedy::rescale(&mut trace, nodes, load);
    }
    let usual_disk = Bytes((f64::from(nodes) * args.memory.0 as f64 / 6000.0).max(1.0) as u64);
    let machine = Machine {
        nodes,
        link: args.node_bandwidth,
        disk: args.disk_bandwidth.unwrap_or(Rate(usual_disk)),
        background: args.background,
    };
    let (mut site, interval) = site(args)?;
    site.horizon = args.horizon.unwrap_or(site.horizon);
    let depth = if site.horizon.is_zero() { 4 } else { 1 };
    let study = Study {
        trace: &trace,
        estimates: match args.estimates {
            EstimatesArg::Exact => Estimates::Exact,
            EstimatesArg::Modal => Estimates::Modal,
        },
        machine,
        accelerator: Accelerated {
            nodes: 0,
            memory: args.rsa_memory,
            link: args.rsa_bandwidth,
            wait: if args.wait == "hold" { WaitPolicy::Hold } else { WaitPolicy::Disk },
            depth: 1,
            interval,
            steps: Steps::default(),
            site: site.clone(),
        },
        sizes: sorted(&args.rsa_nodes),
        depths: match &args.depth[..] {
            [] => vec![depth],
            depths => sorted(depths).into_iter().map(|depth| depth as usize).collect(),
        },
        proportions: if args.proportion.is_empty() {
            vec![site.proportion]
        } else {
            sorted(&args.proportion)
        },
        io: io_model(args, workload.as_ref())?,
        order: match args.order {
            OrderArg::Fcfs => Order::Fcfs,
            OrderArg::Size => Order::Size,
        },
        seeds: args.seeds,
        seed: args.seed,
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    stop_on_interrupt();
    let bar = Bar::new();
    let results = study.run(args.threads.map_or(processors, usize::from), &STOP, &bar);
    bar.0.finish_and_clear();
    let results = results?;
    let is_whole = results.len() == study.points().len();
    let report = Report::new(&study, lacks, before, is_whole, results);
    // What can't be drawn or written costs nobody the table.
    let mut failed = None;
    let timeline = match (&args.gantt, &args.html) {
        (None, None) => None,
        _ if !is_whole => None,
        _ => report.timeline()?,
    };
    let is_json = |file: &Path| file.extension().is_some_and(|end| end == "json");
    let wants_picture = args.html.is_some() || args.gantt.as_deref().is_some_and(|file| !is_json(file));
    let drawn = timeline.as_ref().filter(|_| wants_picture).and_then(|(title, timeline)| {
        let (from_ms, to_ms) = args.gantt_time;
        let drawn = picture::gantt(title, timeline, from_ms, to_ms);
        drawn.map_err(|error| failed = Some(anyhow::Error::from(error).context("--gantt-time"))).ok()
    });
    let chart = match (&args.gantt, &timeline) {
        (Some(file), Some((_, timeline))) if is_json(file) => {
            Some(serde_json::to_string_pretty(timeline)? + "\n")
        }
        _ => drawn.clone(),
    };
    if args.json {
        println!("{}", report.json()?);
    } else {
        print!("{}", report.text());
    }
    for (file, text) in [
        (&args.csv, args.csv.as_ref().map(|_| report.csv())),
        (&args.html, args.html.as_ref().map(|_| report.html(drawn.as_deref()))),
        (&args.gantt, chart.clone()),
    ] {
        if let (Some(file), Some(text)) = (file, text)
            && let Err(error) =
                replace(file, &text).with_context(|| format!("cannot write {}", file.display()))
        {
            failed.get_or_insert(error);
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    if is_whole {
        return Ok(exit::OK);
    }
    let (done, all) = (report.done(), study.points().len());
    eprintln!(
        "ondeck simulate: interrupted; {done} of {all} machines were simulated to the end, and are printed"
    );
    Ok(exit::SIGNAL_BASE + libc::SIGINT as u8)
}

/// Each once, the smallest first.
fn sorted<T: Copy + Ord>(values: &[T]) -> Vec<T> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    sorted
}

fn read_log(args: &SimulateArgs) -> Result<Trace> {
    let is_stdin = args.log == Path::new("-");
    let name = if is_stdin { "standard input".to_owned() } else { args.log.display().to_string() };
    let source: Box<dyn Read> = if is_stdin {
        Box::new(std::io::stdin())
    } else {
        Box::new(fs::File::open(&args.log).with_context(|| format!("cannot open {name}"))?)
    };
    let mut lines = plain_or_gzip(source).with_context(|| format!("cannot read {name}"))?;
    let is_swf = match args.from {
        Some(form) => form == Form::Swf,
        None => {
            let begin = lines.fill_buf().with_context(|| format!("cannot read {name}"))?;
            let first = begin.split(|byte| *byte == b'\n').next().unwrap_or_default();
            !first.contains(&b'|')
        }
    };
    let (word, trace) = match is_swf {
        true => ("swf", swf::read(lines, args.processors_per_node)),
        false => ("sacct", sacct::read(lines)),
    };
    trace.with_context(|| format!("{name}, as --from {word}"))
}

/// What the site decides, and how often the queue is looked at.
fn site(args: &SimulateArgs) -> Result<(Site, Duration)> {
    let Some(file) = &args.config else {
        return Ok((Site { proportion: 4, ..Site::default() }, Duration::from_secs(1)));
    };
    let config = Config::load(Some(file))?;
    let site = config.scheduler.site(&config.nodes).map_err(anyhow::Error::msg);
    let mut site = site.with_context(|| file.display().to_string())?;
    if site.engine == EngineKind::Simulated {
        site.engine = EngineKind::Gluster;
    }
    Ok((site, config.slurm.interval))
}

fn io_model(args: &SimulateArgs, workload: Option<&Workload>) -> Result<IoModel> {
    let word = match (args.io.as_deref(), workload) {
        (None, Some(workload)) if journal::has_io(workload) => {
            return Ok(journal::io(workload, args.node_bandwidth));
        }
        (word, _) => word.unwrap_or("bursts"),
    };
    let mut model = match word {
        "none" => IoModel::None,
        "bursts" => IoModel::bursts(),
        "slides" => IoModel::slides(),
        "kopanski" => IoModel::kopanski(),
        "daly" => IoModel::daly(),
        directory if Path::new(directory).is_dir() => {
            journal::io(&journal::read(Path::new(directory))?, args.node_bandwidth)
        }
        file => measured(Path::new(file), args.node_bandwidth)?,
    };
    match &mut model {
        IoModel::Bursts { memory, share, .. } | IoModel::Daly { memory, share, .. } => {
            (*memory, *share) = (args.memory, args.checkpoint);
        }
        IoModel::Kopanski { processors, .. } => *processors = args.processors_per_node,
        IoModel::None | IoModel::Slides { .. } | IoModel::Measured { .. } => {}
    }
    Ok(model)
}

/// Lines of a job's number, what it read and what it wrote, in bytes or with a unit.
fn measured(file: &Path, link: Rate) -> Result<IoModel> {
    let what = || {
        format!(
            "--io {}: no model of this name (none, bursts, slides, kopanski, daly), and as a file",
            file.display()
        )
    };
    let lines = BufReader::new(fs::File::open(file).with_context(what)?);
    let mut jobs = BTreeMap::new();
    for (index, line) in lines.lines().enumerate() {
        let place = || format!("{}, line {}", file.display(), index + 1);
        let line = line.with_context(place)?;
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') || index == 0 && line == "job,read,written" {
            continue;
        }
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let [job, read, written] = fields[..] else {
            bail!("{}: it has {} fields, and must have job,read,written", place(), fields.len());
        };
        let Ok(job) = job.parse::<u64>() else {
            bail!("{}, job: '{}' is no number of a job", place(), plain(job, 40))
        };
        let bytes = |name: &str, text: &str| -> Result<Bytes> {
            text.parse::<Bytes>().map_err(anyhow::Error::from).with_context(|| format!("{}, {name}", place()))
        };
        let measured =
            Measured { read: bytes("read", read)?, written: bytes("written", written)?, in_ram: false };
        if jobs.insert(job, measured).is_some() {
            bail!("{}: job {job} stands there twice", place());
        }
    }
    Ok(IoModel::Measured { jobs, link })
}

/// From when, and until when, in milliseconds.
fn gantt_time(text: &str) -> Result<(u64, u64), String> {
    let ms = |text: &str| {
        let time = duration::parse(text.trim(), 1).ok()?;
        u64::try_from(time.as_millis()).ok()
    };
    let parts = text.split_once(',').and_then(|(start, length)| Some((ms(start)?, ms(length)?)));
    match parts {
        Some((start, length)) if length > 0 => Ok((start, start.saturating_add(length))),
        _ => Err("write from when, and how long, such as 48h,24h".to_owned()),
    }
}

/// Writes a file. What was there before stays if that fails.
fn replace(file: &Path, text: &str) -> std::io::Result<()> {
    let is_plain = fs::symlink_metadata(file).is_ok_and(|found| found.is_file() && found.nlink() == 1);
    let Some(name) = file.file_name().filter(|_| is_plain) else {
        // A device, a pipe, or one that is known by other names, too.
        return fs::write(file, text);
    };
    let mut new = name.to_owned();
    new.push(".new");
    let new = file.with_file_name(new);
    let mode = fs::metadata(file)?.permissions();
    let mut opened = match fs::OpenOptions::new().write(true).create_new(true).open(&new) {
        // No new file can be made there.
        Err(error) if error.kind() != std::io::ErrorKind::StorageFull => return fs::write(file, text),
        opened => opened?,
    };
    let written = opened
        .write_all(text.as_bytes())
        .and_then(|()| opened.set_permissions(mode))
        .and_then(|()| fs::rename(&new, file));
    if written.is_err() {
        // What is there is incomplete.
        let _ = fs::remove_file(&new);
    }
    written
}

/// That nothing is written over what is read, or over each other, and that all can be written: a simulation may take long.
fn try_files(args: &SimulateArgs) -> Result<()> {
    let identity = |found: &fs::Metadata| (found.dev(), found.ino());
    let log = if args.log == Path::new("-") { Path::new("/dev/stdin") } else { &args.log };
    let of_log = fs::metadata(log).with_context(|| format!("cannot look at {}", log.display()))?;
    let mut taken: Vec<((u64, u64), &Path)> = vec![(identity(&of_log), log)];
    // --io may be the name of a model.
    for file in args.config.as_deref().into_iter().chain(args.io.as_deref().map(Path::new)) {
        taken.extend(fs::metadata(file).ok().map(|found| (identity(&found), file)));
    }
    for file in [&args.csv, &args.html, &args.gantt].into_iter().flatten() {
        if file == Path::new("-") {
            bail!("`-` is no file to write; /dev/stdout is standard output");
        }
        let tried = fs::OpenOptions::new().create(true).append(true).open(file);
        let found = tried.and_then(|opened| opened.metadata());
        let found = found.with_context(|| format!("cannot write {}", file.display()))?;
        let same = taken.iter().find(|(of, _)| *of == identity(&found) && found.is_file());
        if let Some((_, other)) = same {
            bail!("{} would be written over {}; name another file", file.display(), other.display());
        }
        taken.push((identity(&found), file));
    }
    Ok(())
}
