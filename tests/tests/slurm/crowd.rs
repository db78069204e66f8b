//! Many jobs at a time inside Slurm: more than it has places for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use ondeck_testbed::{available, wait_until};

use crate::aids::{LONG, files, folder, script};
use crate::cluster::{Cluster, Setup, tree};
use crate::inside::inside;
use crate::jobs::{note_source, was_ram};
use crate::room::SmallDisk;

/// Slurm forgets no job while a scenario of hundreds of them runs.
const REMEMBERS: &str = "MinJobAge=3600";

/// A larger number, if one was asked for.
fn asked(variable: &str) -> Option<u32> {
    std::env::var(variable).ok().map(|number| number.parse().unwrap())
}

/// Of which jobs Slurm, the scheduler and the agents of the RSA nodes have something.
#[derive(Debug, PartialEq, Eq)]
struct Books {
    slurm: BTreeSet<u32>,
    scheduler: BTreeSet<u32>,
    agents: BTreeSet<u32>,
}

impl Books {
    fn of(cluster: &Cluster) -> Books {
        let shown = cluster.slurm.scontrol(&["show", "burstbuffer"]);
        let shown = shown.assert_success().stdout.split_whitespace();
        let status = cluster.status();
        let jobs = status["jobs"].as_array().unwrap().iter();
        let nodes = status["nodes"].as_array().unwrap().iter().map(|node| node["node"].as_str().unwrap());
        Books {
            slurm: shown.filter_map(|word| word.strip_prefix("JobID=")?.parse().ok()).collect(),
            scheduler: jobs
                .filter(|job| !job["rsa_nodes"].as_array().unwrap().is_empty())
                .map(|job| number_of(job["id"].as_str().unwrap()))
                .collect(),
            agents: nodes
                .flat_map(|node| {
                    let dir = format!("/run/ondeck/agent-{node}/ramdisks");
                    // It is made with the first one.
                    let dir = cluster.host(node).path_from_outside(&dir);
                    let found = if dir.exists() { fs::read_dir(dir).unwrap().collect() } else { Vec::new() };
                    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
                    found.into_iter().map(move |entry| number_of(&name(entry).into_string().unwrap()))
                })
                .collect(),
        }
    }

    fn all(jobs: &[u32]) -> Books {
        let jobs: BTreeSet<u32> = jobs.iter().copied().collect();
        Books { slurm: jobs.clone(), scheduler: jobs.clone(), agents: jobs }
    }
}

/// How many jobs squeue shows with a reason.
fn shown(cluster: &Cluster, reason: &str) -> u32 {
    let lines = cluster.slurm.client(&["squeue", "--noheader", "--format=%r"]).stdout;
    lines.lines().filter(|line| line.trim() == reason).count() as u32
}

/// The number of a job, from its name or from that of its RAM disk.
fn number_of(name: &str) -> u32 {
    let name = name.strip_prefix("job-").unwrap_or(name);
    name.split(|char: char| !char.is_ascii_digit()).next().unwrap().parse().unwrap()
}

/// `ONDECK_AT_ONCE=200` asks for so many.
#[test]
fn many_jobs_that_are_submitted_at_once_share_three_rsa_nodes_and_leave_nothing() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { rsa_nodes: 3, slurm: REMEMBERS.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let content = files(2, 100_000);
    let input = folder(alice, "in", &content);
    let jobs: Vec<(u32, PathBuf)> = (0..asked("ONDECK_AT_ONCE").unwrap_or(40))
        .map(|number| {
            let output = folder(alice, &format!("out-{number}"), &BTreeMap::new());
            let wait = if number % 3 == 0 { "disk" } else { "hold" };
            let lines = [
                format!("WAIT={wait}"),
                "CAPACITY=64MiB".to_owned(),
                "OUT_SIZE=1MiB".to_owned(),
                format!("DATA_IN={}", input.display()),
                format!("DATA_OUT={}", output.display()),
            ];
            let body = format!("cp {}/* {}", input.display(), output.display());
            (cluster.submit(&script(alice, &lines, &body), 1), output)
        })
        .collect();
    for (job, output) in &jobs {
        cluster.wait_shown(*job, "COMPLETED");
        assert_eq!(tree(output), content, "job {job}");
    }
    assert_eq!(cluster.status()["places_lost"], 0);
    cluster.assert_clean_inside();
}

#[test]
fn more_jobs_than_slurm_has_places_for_are_held_and_lost_places_are_counted() {
    if !available() {
        return;
    }
    let scheduler = "kept_waiting = 2".to_owned();
    let cluster = inside(Setup { rsa_nodes: 1, scheduler, ..Setup::default() });
    let alice = cluster.user("alice");
    cluster.ondeck(&["node", "drain", "r1", "--reason", "a test"]).assert_success();
    let content = files(1, 1000);
    let input = folder(alice, "in", &content);
    let jobs: Vec<u32> = (0..5)
        .map(|number| {
            let seen = alice.scratch.join(format!("seen-{number}"));
            let body = format!("{}test -e {}/*", note_source(&input, &seen), input.display());
            let lines = ["WAIT=hold".to_owned(), format!("DATA_IN={}", input.display())];
            let text = script(alice, &lines, &body);
            let job = cluster.slurm.submit(alice, &text, &["--nodes=1", "--exclusive"]);
            // Of calls in the same moment one may be in the way of another, and is held for that.
            wait_until(LONG, "Slurm asks for its input", || {
                let asked = "the workload manager waits for its input";
                cluster.job(job).is_some() && cluster.log_of(job).contains(asked)
            });
            job
        })
        .collect();
    for job in &jobs[..2] {
        cluster.wait_shown(*job, "PENDING BurstBufferStageIn");
    }
    for job in &jobs[2..] {
        cluster.wait_shown(*job, "PENDING JobHeldAdmin");
        wait_until(LONG, "its user is told", || cluster.note(*job).contains("no place for one more"));
    }
    // One of each is cancelled. Slurm loses a place for the one whose data_in it ends.
    for job in [jobs[1], jobs[2]] {
        cluster.slurm.client_as(alice, &["scancel", &job.to_string()]).assert_success();
        cluster.wait_shown(job, "CANCELLED");
    }
    wait_until(LONG, "one place is lost", || cluster.status()["places_lost"] == 1);
    let doctor = cluster.ondeck(&["doctor", "--slurm"]);
    assert!(doctor.stdout.contains("has lost 1 of its 128 places"), "{doctor:?}");
    cluster.kill("scheduler");
    cluster.start_scheduler();
    cluster.ondeck(&["node", "resume", "r1"]).assert_success();
    for number in [0, 3, 4] {
        cluster.wait_shown(jobs[number], "COMPLETED");
        assert!(was_ram(&alice.scratch.join(format!("seen-{number}"))), "job {}", jobs[number]);
    }
    assert_eq!(cluster.status()["places_lost"], 1);
    cluster.assert_clean_after_cancel();
}

/// Slurm 22.05 makes the pipes of its calls for all of its threads: a call whose process has inherited those of others keeps them from
/// ending, and would wait for RSA nodes that one of them has.
#[test]
fn a_call_that_others_can_not_end_before_does_not_wait() {
    does_not_wait(true);
}

/// Slurm would hold a job for good whose call ends without an answer.
#[test]
fn a_job_that_waits_for_longer_than_its_call_may_last_is_held() {
    does_not_wait(false);
}

fn does_not_wait(in_the_way: bool) {
    if !available() {
        return;
    }
    let cluster = inside(Setup { rsa_nodes: 1, ..Setup::default() });
    let alice = cluster.user("alice");
    cluster.lend(false);
    let (input, output) = (folder(alice, "in", &files(1, 1000)), folder(alice, "out", &BTreeMap::new()));
    let seen = alice.scratch.join("seen");
    let lines = [
        "WAIT=hold".to_owned(),
        format!("DATA_IN={}", input.display()),
        format!("DATA_OUT={}", output.display()),
    ];
    let body = format!("{}cp {}/* {}", note_source(&input, &seen), input.display(), output.display());
    let job = cluster.submit(&script(alice, &lines, &body), 1);
    cluster.wait_shown(job, "PENDING BurstBufferStageIn");
    // Of a pipe that is its own it has only one end.
    let slurm = cluster.slurm.client(&["id", "-u", "slurm"]).stdout.trim().parse::<u32>().unwrap();
    let controller = cluster.host("ctl").as_user(slurm, slurm);
    let (ondeck, number) = (cluster.ondeck.to_string_lossy(), job.to_string());
    let config = cluster.bed.dir().join("ondeck.toml");
    let asks = |limit: &str, before: &[&str], closes: &str| {
        let perl = format!("$^F = 100; pipe(R, W); {closes} exec @ARGV");
        let script = cluster.bed.dir().join("in-the-way.sh");
        fs::write(&script, "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_DATA_IN=/in\n").unwrap();
        let [script, config] = [&script, &config].map(|path| path.to_str().unwrap());
        let line =
            ["burst-buffer", "data_in", &number, "--script", script, "--limit", limit, "--config", config];
        controller.run(&[before, &["perl", "-e", &perl, &*ondeck], &line].concat()).stdout
    };
    assert_eq!(asks("1000", &["timeout", "3"], "close(R);"), "", "one that is in nobody's way waits");
    assert!(cluster.shown(job).starts_with("PENDING BurstBufferStageIn"));
    let (limit, closes) = if in_the_way { ("1000", "") } else { ("20", "close(R);") };
    let held = asks(limit, &[], closes);
    assert!(held.starts_with("ondeck: done: "), "{held}");
    cluster.wait_shown(job, "PENDING JobHeldAdmin");
    wait_until(LONG, "its user is told", || cluster.note(job).contains("had to end"));
    cluster.lend(true);
    cluster.wait_shown(job, "COMPLETED");
    assert!(was_ram(&seen), "{}", cluster.note(job));
    cluster.assert_clean_inside();
}

/// `ONDECK_WAITING=300` asks for so many jobs that wait, with as many places as sites have.
#[test]
fn whoever_comes_first_has_a_place_though_more_jobs_wait_than_there_are() {
    if !available() {
        return;
    }
    let (others, places, scheduler) = match asked("ONDECK_WAITING") {
        Some(others) => (others, 64, String::new()),
        None => (8, 3, "kept_waiting = 3".to_owned()),
    };
    let cluster = inside(Setup { scheduler, slurm: REMEMBERS.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    cluster.lend(false);
    let input = folder(alice, "in", &files(1, 1000));
    let submit = |name: &str, nice: u32| {
        let body = note_source(&input, &alice.scratch.join(format!("seen-{name}")));
        let text = script(alice, &["WAIT=hold".to_owned(), format!("DATA_IN={}", input.display())], &body);
        let nice = format!("--nice={nice}");
        let options = ["--nodes=1", "--exclusive", "--no-requeue", "--time=5", "--output=/dev/null", &nice];
        cluster.slurm.submit(alice, &text, &options)
    };
    let jobs: Vec<u32> = (0..others).map(|number| submit(&number.to_string(), 1000)).collect();
    // Slurm may ask for one so that it must not be kept waiting: it is held, and leaves its place to another one.
    let all_wait = |kept: u32, held: u32| {
        let (waiting, not) = (shown(&cluster, "BurstBufferStageIn"), shown(&cluster, "JobHeldAdmin"));
        waiting <= kept && not >= held && waiting + not == kept + held
    };
    wait_until(LONG, "there is no place for more", || all_wait(places, others - places));
    let first = submit("first", 0);
    cluster.wait_shown(first, "PENDING BurstBufferStageIn");
    wait_until(LONG, "one more of the others is held", || all_wait(places, others - places + 1));
    cluster.lend(true);
    cluster.wait_shown(first, "COMPLETED");
    assert!(was_ram(&alice.scratch.join("seen-first")));
    for (number, job) in jobs.iter().enumerate() {
        cluster.wait_shown(*job, "COMPLETED");
        assert!(was_ram(&alice.scratch.join(format!("seen-{number}"))), "job {job}: {}", cluster.note(*job));
    }
    assert_eq!(cluster.status()["places_lost"], 0);
    cluster.assert_clean_inside();
}

/// Slurm tears down what it has of jobs that wait when it is started anew, and sets nothing up of those that are held before they are
/// released.
#[test]
fn jobs_that_are_held_for_a_place_outlive_a_restart_of_the_controller() {
    if !available() {
        return;
    }
    let scheduler = "kept_waiting = 0".to_owned();
    let cluster = inside(Setup { rsa_nodes: 1, scheduler, ..Setup::default() });
    let alice = cluster.user("alice");
    cluster.lend(false);
    let input = folder(alice, "in", &files(1, 1000));
    let seen = alice.scratch.join("seen");
    let lines = ["WAIT=hold".to_owned(), format!("DATA_IN={}", input.display())];
    let job = cluster.submit(&script(alice, &lines, &note_source(&input, &seen)), 1);
    cluster.wait_shown(job, "PENDING JobHeldAdmin");
    wait_until(LONG, "Slurm may start it, once it is released", || {
        cluster.log_of(job).contains("the workload manager may start it")
    });
    // As it had saved its state a while ago, it may come back without the hold.
    cluster.slurm.kill_controller();
    cluster.slurm.start_controller();
    cluster.wait_shown(job, "PENDING JobHeldAdmin");
    cluster.lend(true);
    cluster.wait_shown(job, "COMPLETED");
    assert!(was_ram(&seen), "{}", cluster.note(job));
    assert_eq!(cluster.status()["places_lost"], 0);
    cluster.assert_clean_inside();
}

/// `ONDECK_CANCELLED=140` asks for so many, with as many places as sites have.
#[test]
fn jobs_that_are_cancelled_while_they_wait_leave_places_for_the_next() {
    if !available() {
        return;
    }
    let (waiting, places, scheduler) = match asked("ONDECK_CANCELLED") {
        Some(waiting) => (waiting, 64, String::new()),
        None => (4, 2, "kept_waiting = 2".to_owned()),
    };
    let cluster = inside(Setup { scheduler, slurm: REMEMBERS.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    cluster.lend(false);
    let input = folder(alice, "in", &files(1, 1000));
    let submit = |name: &str| {
        let body = note_source(&input, &alice.scratch.join(name));
        let lines = ["WAIT=hold".to_owned(), format!("DATA_IN={}", input.display())];
        cluster.submit(&script(alice, &lines, &body), 1)
    };
    let mut lost = 0;
    // Of the second time nobody is kept waiting in Slurm: so many places are left for what lasts for a moment.
    for _ in 0..2 {
        let kept = places - lost;
        let jobs: Vec<u32> = (0..waiting).map(|_| submit("cancelled")).collect();
        // One that Slurm asks for so that it must not be kept waiting is held as well.
        wait_until(LONG, "they wait, in their places or held", || {
            let (stage_in, held) = (shown(&cluster, "BurstBufferStageIn"), shown(&cluster, "JobHeldAdmin"));
            stage_in <= kept && stage_in + held == waiting
        });
        lost += shown(&cluster, "BurstBufferStageIn");
        for job in jobs.iter().filter(|job| cluster.shown(**job) == "PENDING JobHeldAdmin") {
            wait_until(LONG, &format!("who asks for job {job} is answered"), || {
                cluster.log_of(*job).contains("the workload manager may start it")
            });
        }
        let mut cancel = vec!["scancel".to_owned()];
        cancel.extend(jobs.iter().map(u32::to_string));
        let cancel: Vec<&str> = cancel.iter().map(String::as_str).collect();
        cluster.slurm.client_as(alice, &cancel).assert_success();
        wait_until(LONG, "nothing of them is left", || cluster.status()["jobs"] == serde_json::json!([]));
        assert_eq!(cluster.status()["places_lost"], lost);
    }
    cluster.lend(true);
    let job = submit("seen");
    cluster.wait_shown(job, "COMPLETED");
    assert!(was_ram(&alice.scratch.join("seen")), "{}", cluster.note(job));
    cluster.assert_clean_after_cancel();
}

/// `ONDECK_HELD=130` asks for so many results: more than Slurm has places for those that are on their way.
#[test]
fn results_that_find_no_room_keep_no_other_job_out() {
    if !available() {
        return;
    }
    let count = asked("ONDECK_HELD").unwrap_or(4);
    let cluster = inside(Setup {
        // Each has a part of a node.
        scheduler: "stage_out_attempts = 1\nproportion = 40\nfractions = true\nsharing = \"any\"".into(),
        lends: "8GiB",
        // Hundreds of servers that begin at once take the machine's breath away.
        node_timeout: "60s",
        slurm: REMEMBERS.into(),
        ..Setup::default()
    });
    let alice = cluster.user("alice");
    let content = files(2, 1 << 20);
    // Room for directories, and for no results.
    let small = SmallDisk::new(&cluster, alice, 24 + 3 * count, 900);
    let source = folder(alice, "source", &content);
    let user = cluster.host("ctl").log_in(alice);
    let outputs: Vec<PathBuf> = (0..count).map(|number| small.at.join(format!("out-{number}"))).collect();
    // All of them before the first job's results take what room there is.
    for output in &outputs {
        user.ok(&["mkdir", output.to_str().unwrap()]);
    }
    let jobs: Vec<u32> = outputs
        .iter()
        .map(|output| {
            let lines = ["WAIT=hold".to_owned(), format!("DATA_OUT={}", output.display())];
            let body = format!("cp {}/* {}", source.display(), output.display());
            cluster.submit(&script(alice, &lines, &body), 1)
        })
        .collect();
    let mut waited_for = jobs.clone();
    // Who is held for a moment goes behind all others in Slurm's order of priority, so the first may be the last.
    while !waited_for.is_empty() {
        let before = waited_for.len();
        wait_until(
            LONG,
            &format!("the results of one more of jobs {waited_for:?} are kept, and Slurm is told so"),
            || {
                waited_for.retain(|job| {
                    !cluster.job(*job).is_some_and(|known| known["rsa_state"] == "HELD")
                        || !cluster.log_of(*job).contains("was told that its results are kept")
                });
                waited_for.len() < before
            },
        );
    }
    assert_eq!(Books::of(&cluster), Books::all(&jobs));
    // All others come and go.
    let input = folder(alice, "in", &content);
    let others: Vec<(u32, PathBuf)> = (0..6)
        .map(|number| {
            let output = folder(alice, &format!("other-{number}"), &BTreeMap::new());
            let lines = [
                "WAIT=hold".to_owned(),
                "OUT_SIZE=8MiB".to_owned(),
                format!("DATA_IN={}", input.display()),
                format!("DATA_OUT={}", output.display()),
            ];
            let body = format!("cp {}/* {}", input.display(), output.display());
            (cluster.submit(&script(alice, &lines, &body), 1), output)
        })
        .collect();
    for (job, output) in &others {
        cluster.wait_shown(*job, "COMPLETED");
        assert_eq!(tree(output), content, "job {job}");
    }
    for job in &jobs {
        assert!(cluster.shown(*job).starts_with("STAGE_OUT"), "job {job}: {}", cluster.shown(*job));
    }
    wait_until(LONG, "there is nothing of the others", || Books::of(&cluster) == Books::all(&jobs));
    small.free(&cluster);
    for job in &jobs {
        cluster.ondeck(&["job", "retry", &job.to_string()]).assert_success();
    }
    for (job, output) in jobs.iter().zip(&outputs) {
        cluster.wait_shown(*job, "COMPLETED");
        let name = output.file_name().unwrap().to_str().unwrap();
        assert_eq!(small.tree(&cluster, name), content, "job {job}");
    }
    cluster.assert_clean_inside();
    assert_eq!(Books::of(&cluster), Books::all(&[]));
}
