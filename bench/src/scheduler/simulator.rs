//! `ondeck-bench simulator`: how many jobs of a log are simulated in a second, and how many by AccaSim.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ondeck_core::schedule::Site;
use ondeck_core::{Bytes, Rate, WaitPolicy};
use ondeck_sim::io::IoModel;
use ondeck_sim::machine::{Accelerated, Machine, Steps};
use ondeck_sim::random::{self, Purpose};
use ondeck_sim::remedy;
use ondeck_sim::simulation::{Scenario, simulate};
use ondeck_sim::trace::{Trace, TraceJob};
use ondeck_sim::workload_manager::Order;

use crate::copies::median;
use crate::interrupt;
use crate::page::{Table, paragraph};
use crate::scheduler::{Options, Part};
use crate::scratch::Scratch;
use crate::timed;
use crate::tools::{Programs, installed};

/// Compute nodes of the machine.
const NODES: u32 = 128;
const RSA_NODES: u32 = 16;
/// The share of them that jobs ask for.
const LOAD: f64 = 0.8;
/// The goals: jobs a second on one core, and of a million the seconds and bytes.
const WITHOUT_RSA: f64 = 100_000.0;
const WITH_RSA: f64 = 20_000.0;
const MILLION_S: f64 = 60.0;
const MILLION_BYTES: u64 = 1 << 30;

/// What AccaSim is asked to do.
const ACCASIM: &str = include_str!("with_accasim.py");

pub fn run(options: &Options) -> Result<()> {
    interrupt::install()?;
    let (jobs, many, few) =
        if options.quick { (10_000, 100_000, 1_000) } else { (100_000, 1_000_000, 10_000) };
    let rounds = options.rounds(1, 5);
    let mut part = Part::new("simulator", "How fast `ondeck simulate` is");
    part.introduction = format!(
        "Jobs of minutes to hours on a machine of {NODES} nodes, of which they ask for {:.0} %; one thread. The first round of each \
         is dropped.",
        LOAD * 100.0
    );
    let scratch = Scratch::new(Path::new("/var/tmp"), true, 1 << 30)?;
    // First: what this process holds later counts for its children, too.
    let mut programs = Programs::find()?;
    programs.copy_ondeck_to(&scratch.base)?;
    let ondeck = programs.ondeck().context("ondeck is not built")?;
    million(ondeck, many, &scratch, &mut part)?;
    let mut table = Table::new(&["jobs a second", "simulator", "what", "jobs", "median s", "slowest s"]);
    peers(ondeck, few, rounds, &scratch, &mut table)?;
    own(jobs, rounds, &mut table, &mut part)?;
    table.write(&mut part.text);
    paragraph(
        &mut part.text,
        "A published rate of Batsim with I/O is 14 jobs a second; it was not run here.",
    );
    part.publish(options)
}

/// So many jobs, which ask for [`LOAD`].
fn workload(count: u64) -> Trace {
    let mut submitted = 0;
    let jobs = (1..=count).map(|number| {
        let mut random = random::of_job(Purpose::Io, 1, number);
        let mut below = |most: f64| random::unit(&mut random) * most;
        submitted += below(1000.0) as u64;
        let nodes = (1.0 + below(6.0).exp2()) as u32;
        let run = 60 + below(3.0 * 3600.0) as u64;
        let requested = Some(run.div_ceil(1800) * 1800);
        TraceJob { number, submitted, run, nodes, requested, user: Some((number % 20) as u32) }
    });
    let mut trace = Trace { jobs: jobs.collect(), nodes: Some(NODES), ..Trace::default() };
    remedy::rescale(&mut trace, NODES, LOAD);
    trace
}

/// Writes them as lines of a log.
fn write_log(file: &Path, workload: &Trace) -> Result<()> {
    let cannot = || format!("cannot write {}", file.display());
    let mut log = BufWriter::new(File::create(file).with_context(cannot)?);
    writeln!(log, "; MaxNodes: {NODES}").with_context(cannot)?;
    for TraceJob { number, submitted, run, nodes, requested, user } in &workload.jobs {
        let (asked, user) = (requested.unwrap_or(*run), user.unwrap_or(0));
        writeln!(
            log,
            "{number} {submitted} -1 {run} {nodes} -1 -1 {nodes} {asked} -1 1 {user} 1 -1 -1 -1 -1 -1"
        )
        .with_context(cannot)?;
    }
    log.flush().with_context(cannot)
}

/// The whole command, which reads a log.
fn command(ondeck: &Path, log: &Path) -> Command {
    let mut command = Command::new(ondeck);
    command.arg("simulate").arg(log).args(["--rsa-nodes", "0", "--io", "none", "--threads", "1"]);
    command
}

/// Runs something so often; the seconds of each but the first.
fn seconds(rounds: usize, mut act: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let mut seconds = Vec::new();
    for round in 0..=rounds {
        interrupt::check()?;
        let began = Instant::now();
        act()?;
        if round > 0 {
            seconds.push(began.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

/// Adds a line; returns the jobs a second in the median.
fn add(table: &mut Table, simulator: &str, what: &str, jobs: u64, seconds: &[f64]) -> f64 {
    let (median, slowest) = (median(seconds), seconds[seconds.len() - 1]);
    let rate = jobs as f64 / median;
    table.add([
        format!("{rate:.0}"),
        simulator.to_owned(),
        what.to_owned(),
        jobs.to_string(),
        format!("{median:.2}"),
        format!("{slowest:.2}"),
    ]);
    rate
}

fn own(jobs: u64, rounds: usize, table: &mut Table, part: &mut Part) -> Result<()> {
    let trace = workload(jobs);
    let megabytes = |count: u64| Rate(Bytes(count * 1_000_000));
    let machine = Machine { nodes: NODES, link: megabytes(1000), disk: megabytes(340), background: 0.0 };
    let accelerator = || Accelerated {
        nodes: RSA_NODES,
        memory: Bytes(128 << 30),
        link: megabytes(5000),
        site: Site { proportion: 4, ..Site::default() },
        wait: WaitPolicy::Disk,
        depth: 4,
        interval: Duration::from_secs(1),
        steps: Steps::default(),
    };
    let (none, bursts) = (IoModel::None, IoModel::bursts());
    let scenario = |with: bool, io| Scenario {
        trace: &trace,
        machine,
        accelerator: with.then(accelerator),
        io,
        order: Order::Fcfs,
        seed: 1,
        stop: None,
    };
    for (what, scenario, goal) in [
        ("no I/O", scenario(false, &none), Some(WITHOUT_RSA)),
        ("bursts of I/O on disk", scenario(false, &bursts), None),
        (&format!("bursts of I/O, {RSA_NODES} RSA nodes"), scenario(true, &bursts), Some(WITH_RSA)),
    ] {
        eprintln!("ondeck simulate: {what}");
        let seconds = seconds(rounds, || Ok(simulate(&scenario).map(drop)?))?;
        let rate = add(table, "`ondeck simulate`", what, jobs, &seconds);
        if let Some(goal) = goal {
            let goal_text = format!("at least {goal:.0} jobs a second");
            part.goal(&goal_text, what, format!("{rate:.0} in the median"), rate >= goal);
        }
    }
    Ok(())
}

/// How long a million jobs take, and how much memory.
fn million(ondeck: &Path, jobs: u64, scratch: &Scratch, part: &mut Part) -> Result<()> {
    eprintln!("ondeck simulate: {jobs} jobs, the whole command");
    let (log, errors) = (scratch.base.join("log.swf"), scratch.base.join("errors"));
    write_log(&log, &workload(jobs))?;
    let finished = run_once(&mut command(ondeck, &log), &errors)?;
    let (seconds, bytes) = (finished.elapsed.as_secs_f64(), finished.peak_memory);
    part.goal(
        &format!("at most {MILLION_S} s and {}", Bytes(MILLION_BYTES)),
        &format!("{jobs} jobs without I/O, read and simulated"),
        format!("{seconds:.1} s, {}", Bytes(bytes)),
        seconds <= MILLION_S && bytes <= MILLION_BYTES,
    );
    Ok(())
}

/// AccaSim, and the same jobs here, with the reading of the log.
fn peers(ondeck: &Path, jobs: u64, rounds: usize, scratch: &Scratch, table: &mut Table) -> Result<()> {
    let what = "no I/O, EASY, the log read";
    let (log, script, errors) =
        (scratch.base.join("log.swf"), scratch.base.join("with_accasim.py"), scratch.base.join("errors"));
    write_log(&log, &workload(jobs))?;
    fs::write(&script, ACCASIM).with_context(|| format!("cannot write {}", script.display()))?;
    let ours = seconds(rounds, || run_once(&mut command(ondeck, &log), &errors).map(drop))?;
    add(table, "`ondeck simulate`", what, jobs, &ours);
    match accasim() {
        None => {
            table.add([
                "not installed".into(),
                "AccaSim".into(),
                what.into(),
                String::new(),
                String::new(),
                String::new(),
            ]);
        }
        Some(python) => {
            eprintln!("AccaSim: {jobs} jobs");
            let mut command = Command::new(python);
            command.arg(&script).arg(&log).arg(NODES.to_string()).current_dir(&scratch.base);
            let theirs = seconds(rounds, || run_once(&mut command, &errors).map(drop))?;
            add(table, "AccaSim 1.1.3", what, jobs, &theirs);
        }
    }
    Ok(())
}

/// Runs a command, which must succeed.
fn run_once(command: &mut Command, errors: &Path) -> Result<timed::Finished> {
    let finished = timed::run(command, errors)?;
    if !finished.status.success() {
        let name = command.get_program().to_string_lossy().into_owned();
        bail!("{name}: {}", timed::complaint(finished.status, errors));
    }
    Ok(finished)
}

/// The Python that has it.
fn accasim() -> Option<PathBuf> {
    Some(installed()?.join("accasim/bin/python3")).filter(|python| python.exists())
}
