//! `ondeck-bench replay`: jobs on a real Slurm, and what `ondeck simulate` makes of their journal.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use ondeck_core::timeline::{Phase, Timeline};
use ondeck_sim::random::{self, Purpose};
use serde_json::Value;

use crate::interrupt;
use crate::machine;
use crate::page::{Table, paragraph};
use crate::ramdisk::samples::number;
use crate::scheduler::cluster::{Cluster, Integration, NODES, Setup};
use crate::scheduler::hooks::directory;
use crate::scheduler::{Options, Part, word};

/// How far a phase may be off, and the makespan.
const PHASE: f64 = 0.1;
const MAKESPAN: f64 = 0.05;
/// What all copying together may take, so what the disk filesystem has; how many jobs share that; and what a node's link has.
const DISK: &str = "25MB/s";
const STAGING: u32 = 2;
const LINK: &str = "1GB/s";
/// What each RSA node lends.
const LENDS: &str = "512MiB";
/// The mean time from one submission to the next, in seconds.
const BETWEEN: f64 = 8.0;
const FILES: u64 = 8;

/// What a job does.
struct Plan {
    /// When it is submitted, after the first.
    after: Duration,
    input: u64,
    output: u64,
    seconds: u64,
}

/// The same jobs in every run.
fn plans(count: u64) -> Vec<Plan> {
    let mut after = 0.0;
    let plans = (1..=count).map(|number| {
        let mut random = random::of_job(Purpose::Io, 2, number);
        let mut between = |least: f64, most: f64| least + random::unit(&mut random) * (most - least);
        let plan = Plan {
            after: Duration::from_secs_f64(after),
            input: between(10e6, 100e6) as u64,
            output: between(10e6, 100e6) as u64,
            seconds: between(5.0, 20.0) as u64,
        };
        after += between(0.0, 2.0 * BETWEEN);
        plan
    });
    plans.collect()
}

pub fn run(options: &Options) -> Result<()> {
    if !machine::is_root() {
        bail!("the cluster is a testbed of namespaces and mounts: run it as root");
    }
    interrupt::install()?;
    let jobs = if options.quick { 8 } else { 50 };
    let mut part = Part::new("replay", "What `ondeck simulate` makes of jobs that have run");
    part.introduction = format!(
        "{jobs} jobs with 10 to 100 MB of input and as much output, 5 to 20 s of computing, on one compute node and one RSA node each, \
         are submitted to a real Slurm with {NODES} compute nodes and {NODES} RSA nodes in {BETWEEN:.0} s each in the mean, held until \
         their input is in RAM. All copying together has {DISK}, {STAGING} jobs at a time (`bandwidth` and `staging` in the \
         configuration). The journal is simulated then: \
         the same submissions, run times and bytes on the same machine."
    );
    let settings = format!("proportion = 1\nbandwidth = \"{DISK}\"\nstaging = {STAGING}");
    let cluster = Cluster::new(&Setup {
        lends: LENDS,
        disk: None,
        scheduler: &settings,
        integration: Integration::Outside,
        slurm: "",
    })?;
    let began = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64;
    submit_all(&cluster, &plans(jobs))?;
    cluster.wait_idle()?;
    let real: Timeline =
        serde_json::from_str(&cluster.printed(&["status", "--timeline", "-", "--hours", "1"])?)
            .context("ondeck status --timeline")?;
    let simulated = simulate(&cluster)?;
    compare(jobs, began, &real, &simulated, &mut part);
    drop(cluster);
    part.publish(options)
}

/// Submits each in its time, and waits until the last one was.
fn submit_all(cluster: &Cluster, plans: &[Plan]) -> Result<()> {
    let user = cluster.user();
    let mut scripts = Vec::new();
    for (number, plan) in plans.iter().enumerate() {
        let (input, output) =
            (directory(cluster, &format!("in-{number}"))?, directory(cluster, &format!("out-{number}"))?);
        for file in 0..FILES {
            let path = input.join(format!("part-{file}"));
            fs::write(&path, vec![file as u8; (plan.input / FILES) as usize])?;
            chown(&path, Some(user.uid), Some(user.gid))?;
        }
        scripts.push(script(&input, &output, plan));
    }
    let start = Instant::now();
    for (number, (plan, script)) in plans.iter().zip(&scripts).enumerate() {
        while start.elapsed() < plan.after {
            interrupt::check()?;
            std::thread::sleep(Duration::from_millis(20).min(plan.after.saturating_sub(start.elapsed())));
        }
        eprintln!("replay: job {} of {}", number + 1, plans.len());
        cluster.submit(script, &["--nodes=1", "--exclusive", "--time=10", "--output=/dev/null"])?;
    }
    // They all get there, in more time than a single one.
    let patience = Duration::from_secs(600);
    loop {
        let jobs = cluster.status()?["jobs"].as_array().map(Vec::len);
        if jobs == Some(0) {
            return Ok(());
        }
        ensure!(
            start.elapsed() < plans.last().map_or(patience, |plan| plan.after + patience),
            "the jobs do not end"
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn script(input: &Path, output: &Path, plan: &Plan) -> String {
    let of_file = plan.output / FILES;
    format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_DATA_IN={input}\n#RSA_DATA_OUT={output}\n#RSA_OUT_SIZE={}\n\
         cat {input}/part-* > /dev/null\nsleep {}\n\
         for file in $(seq {FILES}); do head -c {of_file} /dev/zero > {output}/result-$file; done\n",
        plan.output * 2,
        plan.seconds,
        input = input.display(),
        output = output.display(),
    )
}

/// What the journal says happened, once more.
fn simulate(cluster: &Cluster) -> Result<Timeline> {
    let journal = cluster.dir().join("scheduler");
    let file: PathBuf = cluster.dir().join("simulated.json");
    let (journal, nodes, to) = (word(&journal), NODES.to_string(), word(&file));
    let report: Value = cluster.ondeck(&[
        "simulate",
        "--from",
        "journal",
        &journal,
        "--nodes",
        &nodes,
        "--rsa-nodes",
        &nodes,
        "--rsa-memory",
        LENDS,
        "--rsa-bandwidth",
        LINK,
        "--node-bandwidth",
        LINK,
        "--disk-bandwidth",
        DISK,
        "--wait",
        "hold",
        "--estimates",
        "exact",
        "--gantt",
        &to,
    ])?;
    ensure!(report["complete"] == true, "ondeck simulate did not come to its end");
    serde_json::from_str(&fs::read_to_string(&file)?).context("ondeck simulate --gantt")
}

/// The phases of compute nodes that are one of what really happened: what a program does is not seen.
fn seen(phase: Phase) -> Phase {
    match phase {
        Phase::Prolog
        | Phase::Reading
        | Phase::Computing
        | Phase::Checkpoint
        | Phase::Writing
        | Phase::Running
        | Phase::Epilog => Phase::Running,
        other => other,
    }
}

/// The seconds of all jobs in each phase.
fn seconds(timeline: &Timeline) -> BTreeMap<Phase, f64> {
    let mut sums = BTreeMap::new();
    for span in timeline.compute.iter().chain(&timeline.rsa) {
        *sums.entry(seen(span.phase)).or_default() += (span.to_ms - span.from_ms) as f64 / 1e3;
    }
    sums
}

fn compare(jobs: u64, began: u64, real: &Timeline, simulated: &Timeline, part: &mut Part) {
    let names = [
        (Phase::Constructing, "constructing", false),
        (Phase::StagingIn, "staging in", true),
        (Phase::Ready, "ready, before the start", false),
        (Phase::Running, "running, with Prologs and Epilogs", true),
        (Phase::StagingOut, "staging out", true),
        (Phase::Removing, "removing", false),
    ];
    let (of_real, of_simulated) = (seconds(real), seconds(simulated));
    let mut table = Table::new(&["simulated / real", "phase", "real: s a job", "simulated"]);
    for (phase, name, is_long) in names {
        let [real, simulated] =
            [&of_real, &of_simulated].map(|sums| sums.get(&phase).copied().unwrap_or(0.0) / jobs as f64);
        let ratio = simulated / real;
        if is_long {
            part.goal(
                &format!("a phase within {:.0} %", PHASE * 100.0),
                name,
                format!("{:+.1} %", (ratio - 1.0) * 100.0),
                (ratio - 1.0).abs() <= PHASE,
            );
        }
        table.add([number(ratio, 2), name.to_owned(), number(real, 2), number(simulated, 2)]);
    }
    let last = |spans: &[ondeck_core::timeline::Span]| spans.iter().map(|span| span.to_ms).max().unwrap_or(0);
    let really = (real.begin_ms + last(&real.compute)).saturating_sub(began) as f64 / 1e3;
    let ours = last(&simulated.compute) as f64 / 1e3;
    let ratio = ours / really;
    part.goal(
        &format!("the makespan within {:.0} %", MAKESPAN * 100.0),
        "from the first submission until the last job has ended",
        format!("{:+.1} %", (ratio - 1.0) * 100.0),
        (ratio - 1.0).abs() <= MAKESPAN,
    );
    table.add([number(ratio, 2), "makespan of all".to_owned(), number(really, 1), number(ours, 1)]);
    table.write(&mut part.text);
    paragraph(
        &mut part.text,
        "What is below a second is no goal: building and removing a RAM disk take constants that were measured elsewhere, and how long \
         one is ready before its job starts is the time that Slurm takes to release and to start it, of which the simulator has none.",
    );
}
