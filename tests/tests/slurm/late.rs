//! Output that is covered while its job runs: while all of its processes are stopped, or not at all.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ondeck_testbed::{User, available, wait_until};

use crate::aids::LONG;
use crate::cluster::{Cluster, DEADLINE, Setup, tree};
use crate::jobs::{Gate, directives, note_source, says, wait_file, was_ram};
use crate::life::directory;

/// A job with one writer on each of its nodes, each in a directory of its own in the job's output.
struct Writers {
    job: u32,
    output: PathBuf,
    gate: PathBuf,
    reports: Vec<PathBuf>,
}

impl Writers {
    fn submit(cluster: &Cluster, name: &str, nodes: usize, options: &[&str]) -> Writers {
        let alice = cluster.user("alice");
        let directories: Vec<String> = (0..nodes).map(|rank| format!("{rank}/log")).collect();
        let files: Vec<(&str, &str)> = directories.iter().map(|file| (file.as_str(), "")).collect();
        let output = directory(alice, name, &files);
        for rank in 0..nodes {
            fs::remove_file(output.join(format!("{rank}/log"))).unwrap();
        }
        let gate = alice.scratch.join(format!("{name}.stop"));
        let report = |rank: usize| alice.scratch.join(format!("{name}.report-{rank}"));
        let script = format!(
            "#!/bin/sh\n{}exec srun --nodes={nodes} --ntasks={nodes} sh -c 'exec {} {}/$SLURM_PROCID {} {}-$SLURM_PROCID'\n",
            directives(&[], &[&output]),
            env!("CARGO_BIN_EXE_ondeck-writer"),
            output.display(),
            gate.display(),
            alice.scratch.join(format!("{name}.report")).display(),
        );
        let wanted = format!("--nodes={nodes}");
        let mut all = vec![wanted.as_str(), "--exclusive", "--output=/dev/null"];
        all.extend(options);
        // On a machine that is out of breath the RAM disk could be shown before they have begun.
        cluster.lend(false);
        let job = cluster.slurm.submit(alice, &script, &all);
        for rank in 0..nodes {
            wait_file(&output.join(format!("{rank}/log")));
        }
        cluster.lend(true);
        Writers { job, output, gate, reports: (0..nodes).map(report).collect() }
    }

    fn stop(&self) {
        fs::write(&self.gate, "").unwrap();
    }

    /// The writers saw what they had written, and that is what is on disk.
    #[track_caller]
    fn assert_unmixed(&self, story: &str) {
        for (rank, report) in self.reports.iter().enumerate() {
            wait_file(report);
            let said = says(report);
            let rounds = said.strip_prefix("ok ").unwrap_or_else(|| panic!("rank {rank}: {said}\n{story}"));
            assert_holds(&self.output.join(rank.to_string()), rounds.parse().unwrap(), story);
        }
        let ranks = fs::read_dir(&self.output).unwrap().count();
        assert_eq!(ranks, self.reports.len(), "{:?}\n{story}", tree(&self.output).keys());
    }
}

/// What a writer leaves after so many rounds, and nothing else.
#[track_caller]
fn assert_holds(directory: &Path, rounds: u64, story: &str) {
    let mut wanted = BTreeMap::new();
    if rounds > 0 {
        wanted.insert("checkpoint".to_owned(), rounds.to_string().into_bytes());
        let log: String = (1..=rounds).map(|number| format!("{number}\n")).collect();
        wanted.insert("log".to_owned(), log.into_bytes());
    }
    for number in rounds.saturating_sub(2).max(1)..=rounds {
        wanted.insert(format!("part-{number}"), number.to_string().into_bytes());
    }
    let found = tree(directory);
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{story}");
    assert!(found == wanted, "{} is not as it was left\n{story}", directory.display());
}

fn text(cluster: &Cluster, job: u32) -> String {
    cluster.ondeck(&["job", "show", &job.to_string()]).stdout
}

/// How many lines of a job's story have a text; none while nothing is known of it.
fn lines(cluster: &Cluster, job: u32, has: &str) -> usize {
    text(cluster, job).lines().filter(|line| line.contains(has)).count()
}

const COVERED: &str = "while its processes were stopped";
const NOT_COVERED: &str = "its output is not in RAM";

/// ONDECK_LATE_ATTEMPTS says how many jobs there are; every second one loses agents while it is covered.
#[test]
fn a_job_that_writes_all_the_time_sees_the_disk_and_then_its_ram_disk_and_never_both() {
    if !available() {
        return;
    }
    let proof = std::env::var("ONDECK_LATE_ATTEMPTS").ok().map(|number| number.parse::<u64>().unwrap());
    let attempts = proof.unwrap_or(4);
    let cluster = Cluster::with(Setup { rsa_nodes: 2, compute_nodes: 2, ..Setup::default() });
    let (mut covered, mut killed) = (0, 0);
    for attempt in 0..attempts {
        let writers = Writers::submit(&cluster, &format!("writes-{attempt}"), 2, &[]);
        let job = writers.job;
        if attempt % 2 == 1 {
            cluster.slurm.wait_state(job, "RUNNING", DEADLINE);
            // Any moment of what follows, which takes about two seconds: another one each time.
            std::thread::sleep(Duration::from_millis(attempt * 373 % 2000));
            let agent = ["c1", "c2", "r1"][attempt as usize / 2 % 3];
            cluster.kill(agent);
            cluster.start_agent(agent);
            killed += 1;
        }
        let begin = Instant::now();
        wait_until(DEADLINE, "it is covered, or told why not", || {
            // Not so often that the looking is what takes the time.
            std::thread::sleep(Duration::from_millis(400));
            lines(&cluster, job, COVERED) + lines(&cluster, job, NOT_COVERED) > 0
                || begin.elapsed() > Duration::from_secs(10)
        });
        covered += u32::from(lines(&cluster, job, COVERED) > 0);
        // It goes on to write.
        std::thread::sleep(Duration::from_millis(200));
        writers.stop();
        let ended =
            |job: &BTreeMap<String, String>| ["COMPLETED", "FAILED"].contains(&job["JobState"].as_str());
        cluster.slurm.wait_job(job, "has ended", DEADLINE, ended);
        cluster.wait_done(job);
        writers.assert_unmixed(&text(&cluster, job));
    }
    let mut stopped: Vec<u64> = cluster
        .log_text("scheduler")
        .lines()
        .filter_map(|line| line.split("stopped_ms=").nth(1)?.split_whitespace().next()?.parse().ok())
        .collect();
    stopped.sort_unstable();
    let percent =
        |part: usize| stopped.get((stopped.len() * part / 100).min(stopped.len().saturating_sub(1)));
    println!(
        "{covered} of {attempts} covered ({killed} with an agent killed), none mixed; stopped for {:?} ms at the median, \
         {:?} ms at p99, {:?} ms at most",
        percent(50),
        percent(99),
        stopped.last(),
    );
    assert!(stopped.last().is_none_or(|longest| *longest <= 1000), "{stopped:?}");
    if proof.is_some() {
        assert!(u64::from(covered) * 4 >= attempts * 3, "{covered} of {attempts}");
    }
    cluster.assert_clean();
}

/// A job that holds something of its output from before the RAM disk until its end.
fn holds(
    cluster: &Cluster,
    user: &User,
    name: &str,
    line: &str,
    options: &[&str],
) -> (u32, PathBuf, PathBuf) {
    let output = directory(user, name, &[("old", "old\n")]);
    let (place, gate) = (user.scratch.join(format!("{name}.place")), Gate::of(user, name));
    let began = user.scratch.join(format!("{name}.began"));
    let script = format!(
        "#!/bin/sh\n{}{}: > {}\n{}{}echo late >> {o}/log\necho more > {o}/more\nrm {o}/old\n",
        directives(&[], &[&output]),
        line.replace("OUT", &output.display().to_string()),
        began.display(),
        gate.line(),
        note_source(&output, &place),
        o = output.display(),
    );
    let mut all = vec!["--nodes=1", "--exclusive"];
    let log = format!("--output={}", options.first().map_or("/dev/null", |name| name))
        .replace("OUT", &output.display().to_string());
    all.push(&log);
    // With nodes that lend, its RAM disk could be ready before its Prolog asks, and be mounted in time.
    cluster.lend(false);
    let job = cluster.slurm.submit(user, &script, &all);
    wait_file(&began);
    cluster.lend(true);
    // On a machine that is out of breath there may be another reason first.
    wait_until(LONG, "its user is told", || {
        let note = told(cluster, job);
        [NOT_COVERED, output.to_str().unwrap(), "RSA_WAIT=hold"].iter().all(|part| note.contains(part))
    });
    gate.open();
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(!was_ram(&place), "{}", says(&place));
    (job, output, place)
}

#[test]
fn a_job_that_holds_something_of_its_output_is_not_covered_and_loses_nothing() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let more = |log: &str| -> BTreeMap<String, Vec<u8>> {
        let files = [("log", log), ("more", "more\n")];
        files.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into()
    };
    // An open file, the working directory, and the standard output that Slurm has opened.
    let (_, output, _) = holds(&cluster, alice, "open", "exec 3>> OUT/log\necho early >&3\n", &[]);
    assert_eq!(tree(&output), more("early\nlate\n"));
    let (_, output, _) = holds(&cluster, alice, "inside", "cd OUT\n", &[]);
    assert_eq!(tree(&output), more("late\n"));
    let (job, output, _) = holds(&cluster, alice, "stdout", "echo early\n", &["OUT/log"]);
    let mut found = tree(&output);
    // What the job was told before it started stands in its output, too.
    if let Some(log) = found.get_mut("log") {
        let lines = log.split_inclusive(|byte| *byte == b'\n').filter(|line| !line.starts_with(b"ondeck: "));
        *log = lines.collect::<Vec<_>>().concat();
    }
    assert_eq!(found, more("early\nlate\n"));
    // That was told before anything was built.
    let story = text(&cluster, job);
    let told = story.find("its standard output").unwrap_or_else(|| panic!("{story}"));
    assert!(told < story.find("done constructing").unwrap_or_else(|| panic!("{story}")), "{story}");
    cluster.assert_clean();
}

/// What a job's user is told last; nothing while nobody knows the job.
fn told(cluster: &Cluster, job: u32) -> String {
    let known = cluster.job(job);
    known.map_or_else(String::new, |job| job["message"].as_str().unwrap_or_default().to_owned())
}

/// The state of the freezer of a job's batch step, or another one, as the machine knows it.
fn freezer(cluster: &Cluster, host: &str, uid: u32, job: u32) -> PathBuf {
    let bed = cluster.bed.dir().file_name().unwrap();
    Path::new("/sys/fs/cgroup/freezer")
        .join(bed)
        .join(host)
        .join(format!("slurm_{host}/uid_{uid}/job_{job}/step_batch/freezer.state"))
}

/// Waits, as closely as it can, until a job is stopped.
#[track_caller]
fn wait_stopped(state: &Path) {
    let begin = Instant::now();
    // One that is not there yet may be made in the next moment.
    while !fs::read_to_string(state).is_ok_and(|state| state.trim() == "FROZEN") {
        assert!(begin.elapsed() < LONG, "it is never stopped");
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn a_job_that_slurm_ends_or_suspends_while_it_is_stopped_does_as_slurm_says() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 2, compute_nodes: 2, ..Setup::default() });
    let uid = cluster.user("alice").uid;
    // Cancelled.
    let writers = Writers::submit(&cluster, "cancelled", 2, &[]);
    wait_stopped(&freezer(&cluster, "c1", uid, writers.job));
    cluster.slurm.cancel(writers.job);
    cluster.slurm.wait_state(writers.job, "CANCELLED", DEADLINE);
    cluster.wait_done(writers.job);
    // Killed by its time limit; Slurm looks at limits every now and then, so it is shortened while the job is stopped.
    let writers = Writers::submit(&cluster, "too-long", 2, &[]);
    wait_stopped(&freezer(&cluster, "c1", uid, writers.job));
    let limit = ["update", &format!("JobId={}", writers.job), "TimeLimit=0:01"];
    cluster.slurm.scontrol(&limit).assert_success();
    cluster
        .slurm
        .wait_job(writers.job, "is over", Duration::from_secs(150), |job| job["JobState"] == "TIMEOUT");
    cluster.wait_done(writers.job);
    // Suspended: it stays so until it is resumed, and sees all that it wrote.
    let writers = Writers::submit(&cluster, "suspended", 2, &[]);
    let state = freezer(&cluster, "c1", uid, writers.job);
    wait_stopped(&state);
    let job = writers.job.to_string();
    cluster.slurm.scontrol(&["suspend", &job]).assert_success();
    cluster.slurm.wait_state(writers.job, "SUSPENDED", DEADLINE);
    // First it was Ondeck that had stopped it, for a second at most.
    let mut since = None;
    wait_until(DEADLINE, "Slurm has stopped it, and it stays so", || {
        let stopped = fs::read_to_string(&state).is_ok_and(|state| state.trim() == "FROZEN");
        since = since.filter(|_| stopped).or_else(|| stopped.then(Instant::now));
        since.is_some_and(|since| since.elapsed() > Duration::from_secs(3))
    });
    cluster.slurm.scontrol(&["resume", &job]).assert_success();
    std::thread::sleep(Duration::from_millis(300));
    writers.stop();
    cluster.slurm.wait_state(writers.job, "COMPLETED", DEADLINE);
    cluster.wait_done(writers.job);
    writers.assert_unmixed(&text(&cluster, writers.job));
    cluster.assert_clean();
}

#[test]
fn without_control_groups_nothing_is_covered_late_and_a_job_may_wait_for_its_ram_disk() {
    if !available() {
        return;
    }
    let slurm = "ProctrackType=proctrack/linuxproc\n".to_owned();
    let cluster = Cluster::with(Setup { rsa_nodes: 2, compute_nodes: 2, slurm, ..Setup::default() });
    let writers = Writers::submit(&cluster, "untracked", 2, &[]);
    wait_until(LONG, "its user is told", || told(&cluster, writers.job).contains("proctrack/cgroup"));
    assert!(lines(&cluster, writers.job, NOT_COVERED) > 0);
    let doctor = cluster.ondeck(&["doctor", "--slurm"]).stdout;
    assert!(
        doctor.lines().any(|line| line.contains("late covering") && line.contains("linuxproc")),
        "{doctor}"
    );
    writers.stop();
    cluster.slurm.wait_state(writers.job, "COMPLETED", DEADLINE);
    cluster.wait_done(writers.job);
    writers.assert_unmixed(&text(&cluster, writers.job));
    assert_eq!(lines(&cluster, writers.job, COVERED), 0);
    cluster.assert_clean();
}

#[test]
fn where_jobs_have_mounts_of_their_own_nothing_is_covered_late() {
    if !available() {
        return;
    }
    // As job_container/tmpfs does: a namespace whose mounts are private before the Prolog runs. The job makes it itself, so
    // that this does not depend on where Slurm's own plugin can work.
    let cluster = Cluster::with(Setup { rsa_nodes: 2, compute_nodes: 2, ..Setup::default() });
    let alice = cluster.user("alice");
    let output = directory(alice, "private", &[("old", "old\n")]);
    let gate = Gate::of(alice, "private");
    let begun = alice.scratch.join("private-begun");
    let script = format!(
        "#!/bin/sh\n{}unshare --map-root-user --mount --propagation private sh -c 'touch {}; {}echo late > {}/late'\n",
        directives(&[], &[&output]),
        begun.display(),
        gate.line().trim_end().replace('\n', "; ") + "; ",
        output.display()
    );
    cluster.lend(false);
    let job = cluster.slurm.submit(alice, &script, &["--nodes=1", "--exclusive", "--output=/dev/null"]);
    wait_file(&begun);
    cluster.lend(true);
    wait_until(LONG, "its user is told", || told(&cluster, job).contains("mounts of its own"));
    assert!(lines(&cluster, job, NOT_COVERED) > 0);
    gate.open();
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    let wanted = [("late", "late\n"), ("old", "old\n")];
    let wanted: BTreeMap<_, _> =
        wanted.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into();
    assert_eq!(tree(&output), wanted);
    cluster.assert_clean();
}
