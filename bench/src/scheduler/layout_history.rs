//! `ondeck-bench layout-history`: what the history of layouts costs: an answer from 10,000 rows, and counting what a job has left.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::scheduler::cluster::{Cluster, Integration, Setup, wait};
use crate::scheduler::hooks::directory;
use crate::scheduler::{Options, Part, word};
use crate::{interrupt, machine};

/// Of an answer.
const ANSWER_MS: f64 = 10.0;
/// Of a stage-out, in percent.
const STAGE_OUT: f64 = 2.0;
/// Rows of the history, of so many users.
const ROWS: u32 = 10_000;
const USERS: u32 = 20;
/// What a job has left whose results are staged out.
const MIB: usize = 256;
const FILES: usize = 64;
/// Files of the tree that is counted, in so many directories.
const TREE: usize = 100_000;
const DIRECTORIES: usize = 100;

pub fn run(options: &Options) -> Result<()> {
    if !machine::is_root() {
        bail!("the cluster is a testbed of namespaces and mounts: run it as root");
    }
    interrupt::install()?;
    let mut part = Part::new("layout-history", "The history of layouts");
    part.introduction = "A real Slurm of four compute nodes and four RSA nodes, all of them namespaces of one machine; one job at a \
                         time. What is compared alternates, and the first round is dropped."
        .into();
    let cluster = Cluster::new(&Setup {
        lends: "512MiB",
        disk: None,
        scheduler: "",
        integration: Integration::Outside,
        slurm: "",
    })?;
    stage_outs(options, &cluster, &mut part)?;
    trees(options, &cluster, &mut part)?;
    answers(options, &cluster, &mut part)?;
    drop(cluster);
    part.publish(options)
}

/// The runs of a program that are known.
fn known(cluster: &Cluster, program: &str) -> Result<Vec<Value>> {
    let runs = cluster.ondeck(&["layout", "history", "--program", program])?;
    runs.as_array().cloned().context("the history is no list")
}

fn wait_known(cluster: &Cluster, program: &str, count: usize) -> Result<Vec<Value>> {
    wait("what the job has left is counted", || {
        let runs = known(cluster, program)?;
        Ok((runs.len() >= count).then_some(runs))
    })
}

fn stage_outs(options: &Options, cluster: &Cluster, part: &mut Part) -> Result<()> {
    let rounds = options.rounds(3, 20);
    let mut seconds: [Samples; 2] = Default::default();
    for round in 0..=rounds {
        eprintln!("stage-out: round {round} of {rounds}");
        for way in (0..2).map(|turn| (turn + round) % 2) {
            let (name, line) = [("none", "none"), ("counted", "auto")][way];
            let output = directory(cluster, &format!("{name}-{round}"))?;
            let script = format!(
                "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_NODES=1\n#RSA_OUT_SIZE={}MiB\n#RSA_DATA_OUT={1}\n#RSA_LAYOUT={line}\n\
                 for file in $(seq {FILES}); do head -c {2} /dev/zero > {1}/part-$file; done\n",
                MIB + 64,
                output.display(),
                (MIB << 20) / FILES
            );
            let program = format!("--job-name={name}");
            let job =
                cluster.submit(&script, &["--nodes=1", "--exclusive", "--output=/dev/null", &program])?;
            cluster.wait_completed(job)?;
            cluster.wait_idle()?;
            let story = cluster.story(job)?;
            ensure!(story.was("DONE_STAGING_OUT"), "job {job} had no RAM disk: {}", story.message());
            if way == 1 {
                wait_known(cluster, name, (round + 1).min(32))?;
            }
            std::fs::remove_dir_all(&output)?;
            if round > 0 {
                seconds[way].add(story.seconds("STAGING_OUT"));
            }
        }
    }
    ensure!(known(cluster, "none")?.is_empty(), "what is not to be counted was counted");
    let [none, counted] = &seconds;
    let more = (counted.median() / none.median() - 1.0) * 100.0;
    part.goal(
        &format!("a stage-out with history takes at most {STAGE_OUT} % more"),
        &format!("{MIB} MiB in {FILES} files, until they are at home and verified"),
        format!("{more:+.1} %"),
        more <= STAGE_OUT,
    );
    paragraph(
        &mut part.text,
        &format!(
            "**Stage-out**: a job leaves {MIB} MiB in {FILES} files on a RAM disk. With `#RSA_LAYOUT=auto` they are counted when \
             they are at home, with `none` they are not. Seconds of staging out, by `ondeck job show`. {rounds} rounds."
        ),
    );
    let mut table = Table::new(&["/ not counted", "results", "median s", "min", "max"]);
    for (what, samples) in [("not counted", none), ("counted", counted)] {
        let [median, min, max] = samples.cells(3);
        table.add([number(samples.median() / none.median(), 2), what.to_owned(), median, min, max]);
    }
    table.write(&mut part.text);
    Ok(())
}

fn trees(options: &Options, cluster: &Cluster, part: &mut Part) -> Result<()> {
    let rounds = options.rounds(2, 10);
    let directories = if options.quick { DIRECTORIES / 10 } else { DIRECTORIES };
    let each = TREE / DIRECTORIES;
    let (mut counted, mut find): ([Samples; 2], Samples) = Default::default();
    for round in 0..=rounds {
        eprintln!("a tree: round {round} of {rounds}");
        for (way, (name, directories)) in [("one", 0), ("tree", directories)].into_iter().enumerate() {
            let tree = directory(cluster, &format!("{name}-{round}"))?;
            let script = format!(
                "#!/bin/sh\n#RSA_LAYOUT=auto\n#RSA_LAYOUT_DIR={0}\ncd {0} || exit 9\necho a > a\n\
                 for name in $(seq {directories}); do mkdir d$name && (cd d$name && seq -f f%g {each} | xargs -r touch) || exit 9; done\n",
                tree.display()
            );
            let program = format!("--job-name={name}");
            let job =
                cluster.submit(&script, &["--nodes=1", "--exclusive", "--output=/dev/null", &program])?;
            cluster.wait_completed(job)?;
            let runs = wait_known(cluster, name, round + 1)?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
            let newest = &runs[0]["run"];
            let files = newest["tally"]["files"].as_u64();
            ensure!(files == Some((directories * each + 1) as u64), "{files:?} files were counted");
            let ended = newest["ended_ms"].as_u64().context("a run has no end")?;
            if round > 0 {
                counted[way].add((now - Duration::from_millis(ended)).as_secs_f64());
                if way == 1 {
                    find.add(walk(&tree)?);
                }
            }
            std::fs::remove_dir_all(&tree)?;
        }
    }
    let files = directories * each;
    paragraph(
        &mut part.text,
        &format!(
            "**Counting**: from the end of a job on disk until `ondeck layout history` has what it has left; nobody waits for that. \
             `find` looks at the size and time of the same files, which are in the kernel's caches by then. {rounds} rounds."
        ),
    );
    let mut table = Table::new(&["/ one file", "what", "files", "median s", "min", "max"]);
    let rows = [
        ("counted", 1, &counted[0]),
        ("counted", files, &counted[1]),
        ("find -type f -printf '%s %T@ %U'", files, &find),
    ];
    for (what, files, samples) in rows {
        let [median, min, max] = samples.cells(3);
        let ratio = number(samples.median() / counted[0].median(), 2);
        table.add([ratio, what.to_owned(), files.to_string(), median, min, max]);
    }
    table.write(&mut part.text);
    Ok(())
}

/// How long `find` takes, in seconds.
fn walk(tree: &Path) -> Result<f64> {
    let began = Instant::now();
    let ran = std::process::Command::new("find")
        .arg(tree)
        .args(["-type", "f", "-printf", "%s %T@ %U\n"])
        .stdout(std::process::Stdio::null())
        .status()?;
    ensure!(ran.success(), "find has failed");
    Ok(began.elapsed().as_secs_f64())
}

/// A run as large as one may be: all kinds that are kept, with long names.
fn a_run() -> Value {
    let kind = |letter: u8| {
        json!({
            "kind": format!("a-rather-long-name-of-kind-{}/rank-#", char::from(b'a' + letter)),
            "files": 64, "bytes": 64u64 << 30, "largest": 1u64 << 30, "numbers": [64], "highest": [63], "divisor": [1],
            "within_ms": [0], "spread_ms": 100
        })
    };
    json!({
        "ended_ms": 1_790_000_000_000u64,
        "shape": { "nodes": 4, "tasks": 64, "lasted_ms": 100_000 },
        "tally": {
            "files": 1024, "bytes": 1024u64 << 30, "median": 1u64 << 30, "large": 1u64 << 30,
            "kinds": (0..16).map(kind).collect::<Vec<Value>>()
        }
    })
}

fn answers(options: &Options, cluster: &Cluster, part: &mut Part) -> Result<()> {
    let rounds = options.rounds(10, 100);
    let journal = word(&cluster.dir().join("scheduler/journal.sqlite"));
    // Of each user 16 programs at most, of each of which 32 runs are kept.
    let insert = format!(
        "DELETE FROM layout_runs; \
         INSERT INTO layout_runs (uid, program, directory, job, at_ms, run) \
         WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {ROWS}) \
         SELECT i / {}, 'solver-' || char(97 + i % {} / 32), '/scratch/case-#', (i + 1) || '@7', 0, '{}' FROM n",
        ROWS / USERS,
        ROWS / USERS,
        a_run()
    );
    let host = cluster.host("ctl");
    let ran = host.run(&["sqlite3", &journal, &insert]);
    ensure!(ran.success(), "sqlite3: {}", ran.stderr.trim());
    let site = cluster.dir().join("site.toml");
    let figures = "[nodes]\nlink = \"12GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"lustre\"\ntargets = 120\nservers = 30\n\
                   target = \"4GB/s\"\n";
    std::fs::write(&site, figures)?;
    let (ondeck, config, site) =
        (word(&cluster.dir().join("ondeck")), word(&cluster.dir().join("ondeck.toml")), word(&site));
    let advise = ["layout", "advise", "--nodes", "4", "--tasks", "64", "--site", &site];
    let of = ["--program", "solver-c", "--directory", "/scratch/case-7", "--config", &config];
    let shown = ["layout", "history", "--config", &config];
    let commands: [(&str, Vec<&str>); 4] = [
        ("ondeck layout advise, which asks for no history", advise.to_vec()),
        ("ondeck layout advise, by the history", [&advise[..], &of].concat()),
        (
            "ondeck layout history of a program",
            vec!["layout", "history", "/scratch/case-7", "--program", "solver-c", "--config", &config],
        ),
        ("ondeck layout history of all", shown.to_vec()),
    ];
    let mut ms: [Samples; 4] = Default::default();
    for round in 0..=rounds {
        interrupt::check()?;
        for way in (0..commands.len()).map(|turn| (turn + round) % commands.len()) {
            let line: Vec<&str> =
                std::iter::once(ondeck.as_str()).chain(commands[way].1.iter().copied()).collect();
            let began = Instant::now();
            let ran = host.run(&line);
            let took = began.elapsed().as_secs_f64() * 1e3;
            ensure!(ran.success(), "{}: {}", commands[way].0, ran.stderr.trim());
            let knows = ran.stdout.contains("32 runs");
            ensure!(knows == (way > 0), "{}: {}", commands[way].0, ran.stdout);
            if round > 0 {
                ms[way].add(took);
            }
        }
    }
    let answer = ms[1].median() - ms[0].median();
    part.goal(
        &format!("an answer takes at most {ANSWER_MS} ms with {ROWS} rows of history"),
        "`ondeck layout advise` asks the daemon for 32 runs, and judges them",
        format!("{answer:.1} ms"),
        answer <= ANSWER_MS,
    );
    paragraph(
        &mut part.text,
        &format!(
            "**An answer**: the journal has {ROWS} runs of {USERS} users, each as large as it may be. Milliseconds of whole commands, with the \
             start of a process in a host of the testbed; `ondeck serve` itself, when a job starts, spares the way to a command and \
             back. {rounds} rounds."
        ),
    );
    let mut table = Table::new(&["/ the first", "command", "median ms", "min", "max"]);
    for ((name, _), samples) in commands.iter().zip(&ms) {
        let [median, min, max] = samples.cells(1);
        let ratio = number(samples.median() / ms[0].median(), 2);
        table.add([ratio, (*name).to_owned(), median, min, max]);
    }
    table.write(&mut part.text);
    Ok(())
}
