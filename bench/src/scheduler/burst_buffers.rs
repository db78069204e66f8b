//! `ondeck-bench burst-buffers`: what it costs that Slurm itself keeps jobs waiting for their RAM disks.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use ondeck_sim::random::{self, Purpose};

use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::scheduler::cluster::{Cluster, Integration, Setup, USUAL_PACE, wait};
use crate::scheduler::hooks::directory;
use crate::scheduler::{Options, Part};
use crate::{interrupt, machine};

/// From submission to the start, beside functions that do nothing.
const START_RATIO: f64 = 1.2;
/// Of a function that slurmctld waits for.
const FUNCTION_MS: f64 = 20.0;
/// Those functions.
const FUNCTIONS: [&str; 3] = ["slurm_bb_job_process", "slurm_bb_pools", "slurm_bb_paths"];
/// How much input a job has, and how much output, in so many files.
const MIB: usize = 64;
const FILES: usize = 16;

pub fn run(options: &Options) -> Result<()> {
    if !machine::is_root() {
        bail!("the clusters are testbeds of namespaces and mounts: run it as root");
    }
    interrupt::install()?;
    let mut part = Part::new("burst-buffers", "Slurm's burst buffers");
    part.introduction = "Clusters of a real Slurm each, with four compute nodes and four RSA nodes, of which only Slurm's way to \
                         RAM disks differs: its burst buffers with our functions, its burst buffers with functions that do \
                         nothing and without anything of ours, and the integration from outside. The defaults of `ondeck \
                         serve` and of Slurm's SchedulerParameters. All nodes are namespaces of one machine; one job at a \
                         time, the ways in rotated order. The first round is dropped."
        .into();
    let cluster = |integration| {
        Cluster::new(&Setup { lends: "512MiB", disk: None, scheduler: "", integration, slurm: USUAL_PACE })
    };
    let inside = cluster(Integration::Inside)?;
    {
        let none = cluster(Integration::None)?;
        let outside = cluster(Integration::Outside)?;
        starts(options, [&inside, &none, &outside], &mut part)?;
        phases(options, [&inside, &outside], &mut part)?;
    }
    functions(options, &inside, &mut part)?;
    drop(inside);
    part.publish(options)
}

/// A job with an empty input directory: how long from before its submission until its first command, in seconds.
fn start(cluster: &Cluster, input: &Path, name: &str, is_ours: bool) -> Result<f64> {
    let began = cluster.user().scratch.join(format!("began-{name}"));
    let seen = cluster.user().scratch.join(format!("seen-{name}"));
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_NODES=1\n#RSA_DATA_IN={input}\ndate +%s%N > {began}.new && mv {began}.new {began}\n\
         findmnt -n -o SOURCE -T {input} > {seen}\n",
        input = input.display(),
        began = began.display(),
        seen = seen.display(),
    );
    // slurmctld looks once a second whether there is anything to schedule: nobody submits in step with that.
    let mut random = random::of_job(Purpose::Io, 3, name.parse()?);
    std::thread::sleep(Duration::from_secs_f64(random::unit(&mut random)));
    let submitted = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let job = cluster.submit(&script, &["--nodes=1", "--exclusive", "--output=/dev/null"])?;
    cluster.wait_completed(job)?;
    let at: u128 = fs::read_to_string(&began)?.trim().parse().context("the job noted no time")?;
    let source = fs::read_to_string(&seen)?;
    ensure!(source.contains("ondeck:job-") == is_ours, "job {job} saw `{}` at its input", source.trim());
    idle(cluster, is_ours)?;
    Ok((at.saturating_sub(submitted)) as f64 / 1e9)
}

fn idle(cluster: &Cluster, is_ours: bool) -> Result<()> {
    if is_ours {
        cluster.wait_idle()?;
    }
    wait("Slurm has no burst buffer", || {
        let shown = cluster.slurm.scontrol(&["show", "burstbuffer"]).stdout;
        let queue = cluster.slurm.client(&["squeue", "--noheader"]).stdout;
        Ok((!shown.contains("JobID=") && queue.trim().is_empty()).then_some(()))
    })
}

fn starts(options: &Options, clusters: [&Cluster; 3], part: &mut Part) -> Result<()> {
    let rounds = options.rounds(3, 20);
    let inputs: Vec<PathBuf> =
        clusters.iter().map(|cluster| directory(cluster, "empty")).collect::<Result<_>>()?;
    let mut seconds: [Samples; 3] = Default::default();
    for round in 0..=rounds {
        eprintln!("submission to start: round {round} of {rounds}");
        for way in (0..3).map(|turn| (turn + round) % 3) {
            let took = start(clusters[way], &inputs[way], &round.to_string(), way != 1)?;
            if round > 0 {
                seconds[way].add(took);
            }
        }
    }
    let [inside, none, outside] = &seconds;
    let ratio = inside.median() / none.median();
    part.goal(
        &format!("submission to start at most {START_RATIO} times that with functions that do nothing"),
        "an empty input, 1 RSA node, shown when the job starts",
        format!("{ratio:.2}"),
        ratio <= START_RATIO,
    );
    paragraph(
        &mut part.text,
        &format!(
            "**Submission to start**: from before `sbatch` is called until the first command of the job, which must have its input \
             (`#RSA_WAIT=hold`), an empty directory, and sees it in RAM. All nodes are free. {rounds} rounds."
        ),
    );
    let mut table = Table::new(&["/ nothing", "way", "median s", "min", "max"]);
    let ways = [
        ("burst buffers, functions that do nothing", none),
        ("burst buffers, ours", inside),
        ("from outside", outside),
    ];
    for (way, samples) in ways {
        let [median, min, max] = samples.cells(2);
        table.add([format!("{:.2}", samples.median() / none.median()), way.to_owned(), median, min, max]);
    }
    table.write(&mut part.text);
    Ok(())
}

/// The states of a job that has input and output, and what they are called here.
const PHASES: [(&str, &[&str]); 6] = [
    ("constructing", &["ASSIGNED", "BOOTING", "BOOTED"]),
    ("staging in", &["STAGING_IN"]),
    ("mounting", &["MOUNTING"]),
    ("unmounting", &["UNMOUNTING"]),
    ("staging out", &["STAGING_OUT"]),
    ("teardown", &["TEARDOWN"]),
];

fn phases(options: &Options, clusters: [&Cluster; 2], part: &mut Part) -> Result<()> {
    let rounds = options.rounds(2, 10);
    let mut seconds: [[Samples; PHASES.len() + 1]; 2] = Default::default();
    let mut inputs = Vec::new();
    for cluster in clusters {
        let input = directory(cluster, "input")?;
        for number in 0..FILES {
            let path = input.join(format!("part-{number}"));
            fs::write(&path, vec![number as u8; (MIB << 20) / FILES])?;
            chown(&path, Some(cluster.user().uid), Some(cluster.user().gid))?;
        }
        inputs.push(input);
    }
    for round in 0..=rounds {
        eprintln!("phases: round {round} of {rounds}");
        for way in (0..2).map(|turn| (turn + round) % 2) {
            let (cluster, input) = (clusters[way], &inputs[way]);
            let output = directory(cluster, &format!("output-{round}"))?;
            let script = format!(
                "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_NODES=1\n#RSA_CAPACITY=256MiB\n#RSA_OUT_SIZE={MIB}MiB\n\
                 #RSA_DATA_IN={input}\n#RSA_DATA_OUT={output}\n\
                 cp {input}/part-* {output}\n",
                input = input.display(),
                output = output.display(),
            );
            let submitted = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64;
            let job = cluster.submit(&script, &["--nodes=1", "--exclusive", "--output=/dev/null"])?;
            cluster.wait_completed(job)?;
            idle(cluster, true)?;
            let ended = fs::read_dir(&output)?.count();
            ensure!(ended == FILES, "job {job} brought {ended} of {FILES} files home");
            fs::remove_dir_all(&output)?;
            let story = cluster.story(job)?;
            ensure!(story.was("INUSE_BOTH"), "job {job} did not get its RAM disk: {}", story.message());
            if round == 0 {
                continue;
            }
            for (samples, (_, states)) in seconds[way].iter_mut().zip(PHASES) {
                samples.add(states.iter().map(|state| story.seconds(state)).sum());
            }
            let home = story.first_ms("DONE_STAGING_OUT").context("its results never were on disk")?;
            seconds[way][PHASES.len()].add(home.saturating_sub(submitted) as f64 / 1e3);
        }
    }
    paragraph(
        &mut part.text,
        &format!(
            "**Phases**: a job with {MIB} MiB of input in {FILES} files that it copies to its output, on 1 RSA node; seconds in the \
             states that `ondeck job show --json` tells, and from before `sbatch` until the results are on disk. {rounds} rounds."
        ),
    );
    let mut table =
        Table::new(&["inside / outside", "phase", "inside: median s", "min", "max", "outside", "min", "max"]);
    let names = PHASES.iter().map(|(name, _)| *name).chain(["submission to results on disk"]);
    for (at, name) in names.enumerate() {
        let [inside, outside] = [&seconds[0][at], &seconds[1][at]];
        let ratio = inside.median() / outside.median();
        let ([a, b, c], [d, e, f]) = (inside.cells(2), outside.cells(2));
        table.add([number(ratio, 2), name.to_owned(), a, b, c, d, e, f]);
    }
    table.write(&mut part.text);
    Ok(())
}

fn functions(options: &Options, cluster: &Cluster, part: &mut Part) -> Result<()> {
    let jobs = if options.quick { 100 } else { 1000 };
    let more = if options.quick { 10 } else { 50 };
    let input = directory(cluster, "empty")?;
    cluster.block()?;
    let script = format!("#!/bin/sh\n#RSA_WAIT=hold\n#RSA_NODES=1\n#RSA_DATA_IN={}\ntrue\n", input.display());
    let submit = |count: usize| -> Result<()> {
        (0..count).try_for_each(|_| {
            cluster.submit(&script, &["--nodes=1", "--exclusive", "--output=/dev/null"]).map(drop)
        })
    };
    eprintln!("functions: {jobs} jobs");
    submit(jobs)?;
    let mut table = Table::new(&["of the goal", "function", "the scheduler", "calls", "median ms", "max"]);
    for stops in [false, true] {
        let after = cluster.slurm.controller_log().len();
        cluster.stop_scheduler(stops);
        let measured = (|| {
            submit(more)?;
            // Slurm asks for it every half a minute.
            wait("Slurm has asked for the pools", || {
                Ok((!cluster.function_ms("slurm_bb_pools", after).is_empty()).then_some(()))
            })
        })();
        cluster.stop_scheduler(false);
        measured?;
        let scheduler = if stops { "is stopped" } else { "runs" };
        for function in FUNCTIONS {
            // A job is asked for its paths when it starts: none does here, so all that have started before count.
            let since = if function == "slurm_bb_paths" { 0 } else { after };
            let calls = cluster.function_ms(function, since);
            if function == "slurm_bb_paths" && stops {
                continue;
            }
            ensure!(!calls.is_empty(), "slurmctld logged no call of {function}");
            let count = calls.len();
            let samples: Samples = calls.into_iter().collect();
            let worst = samples.max();
            part.goal(
                &format!("a function that slurmctld waits for takes less than {FUNCTION_MS} ms"),
                &format!("{function}, {jobs} jobs, the scheduler {scheduler}"),
                format!("{worst:.1} ms at most"),
                worst < FUNCTION_MS,
            );
            table.add([
                format!("{:.2}", worst / FUNCTION_MS),
                format!("`{function}`"),
                scheduler.to_owned(),
                count.to_string(),
                number(samples.median(), 2),
                number(worst, 2),
            ]);
        }
    }
    paragraph(
        &mut part.text,
        &format!(
            "**Functions that slurmctld waits for**, with {jobs} jobs that wait, while {more} more are submitted: by slurmctld's own log. \
             `slurm_bb_paths` is called when a job starts: those of the rounds above. The others run beside slurmctld."
        ),
    );
    table.write(&mut part.text);
    let user = cluster.user().name.clone();
    let ran = cluster.slurm.client(&["scancel", "--user", &user]);
    ensure!(ran.success(), "scancel: {}", ran.stderr.trim());
    Ok(())
}
