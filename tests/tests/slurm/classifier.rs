//! The classifier of the history on real jobs: of seven kinds, each run of a job says how the next one uses its files.
//!
//! The programs are a shell, dd, fio, sqlite3, and one that writes with MPI-IO and parallel HDF5; ranks, nodes, steps, sizes and names
//! come from seeds. Seeds from 2001 on were never looked at while the classifier was made; those below are for that.
//!
//! Some files have two explanations, and their jobs say so: two places by turns with names of ranks, consecutive numbers, and a
//! log that is called like data. Of these no answer is the best one, and a wrong one is known to happen; of all others it is a fault.

mod kinds;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use ondeck_testbed::{User, available, wait_until};
use serde_json::Value;

use self::kinds::{Job, Kind, Random, Truth, job};
use crate::aids::{LONG, change, make, noise, program, reload};
use crate::cluster::{Cluster, Setup};
use crate::room::own_disk;

/// How many jobs of each kind, each of which runs three times, without watching and with it; `ONDECK_CLASSIFIER=20` asks for more.
const JOBS: [u64; 2] = [2, 1];

/// The first seed of each kind; `ONDECK_CLASSIFIER_SEED=1` asks for another.
const FIRST_SEED: u64 = 2001;

/// How often each job runs.
const RUNS: u64 = 3;

/// No job has more on a node.
const MOST_RANKS: u32 = 12;

/// The MiB of the disk that the jobs write to. It is one of its own, as agents are told what all of this machine do on a filesystem.
const DISK_MIB: u32 = 6 << 10;

/// So many answers must be right, of a hundred: of jobs whose files have one explanation, and of all; after one run, and after three.
const GOALS: [(usize, usize); 2] = [(95, 90); 2];

/// The same where nodes watch.
const SEEN_GOALS: [(usize, usize); 2] = [(95, 95), (100, 100)];

fn asked(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |number| number.parse().unwrap())
}

/// A job that runs several times.
struct Case {
    kind: Kind,
    seed: u64,
    /// Without numbers: those are one in the history.
    name: String,
    dir: PathBuf,
    /// The same as it is seen by this test.
    outside: PathBuf,
}

/// A run of it.
struct Ran {
    id: u32,
    done: PathBuf,
    output: PathBuf,
    job: Job,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Right,
    NotKnown,
    Wrong,
}

/// What a cluster needs to choose layouts; that they can't be set on this disk costs the jobs nothing. So many nodes of a job watch who
/// writes.
fn cluster(watch_nodes: u32) -> Cluster {
    // Where ranks have no processor, who writes is gone before an agent sees that: there, fewer jobs run at a time.
    let cpus = if watch_nodes == 0 { 32 } else { MOST_RANKS };
    let nodes: String =
        (1..=4).map(|node| format!("NodeName=c{node} CPUs={cpus} RealMemory=4000 State=UNKNOWN\n")).collect();
    let cluster = Cluster::with(Setup { rsa_nodes: 1, slurm: nodes, ..Setup::default() });
    let (dir, scratch) = (cluster.bed.dir().to_owned(), cluster.bed.dir().join("scratch"));
    let site = format!(
        "[nodes]\nlink = \"4GB/s\"\n[[filesystem]]\npath = \"{}\"\nkind = \"lustre\"\ntargets = 8\nservers = 2\ntarget = \"1GB/s\"\n",
        scratch.display()
    );
    fs::write(dir.join("site.toml"), site).unwrap();
    let site_file = dir.join("site.toml");
    let lines = format!("site_file = \"{}\"\nwatch_nodes = {watch_nodes}\n", site_file.display());
    let line = format!("{lines}[scheduler.limits]");
    change(&cluster, "ondeck.toml", "[scheduler.limits]", &line);
    reload(&cluster, "scheduler", "scheduler", "taken over: scheduler.site_file");
    cluster
}

/// What all jobs find.
struct Aids {
    parallel: PathBuf,
    input: PathBuf,
    database: PathBuf,
}

impl Aids {
    fn new(cluster: &Cluster, user: &User) -> Aids {
        let parallel = program(user, "parallel.py", include_str!("classifier/parallel.py"));
        let input = user.scratch.join("input");
        make(user, &input, &BTreeMap::from([("field.bin".to_owned(), noise(1, 8 << 20))]));
        let database = input.join("samples.db");
        let rows = "create table samples (value); with recursive n(i) as (select 1 union all select i + 1 from n where i < 2000) \
                    insert into samples select randomblob(4000) from n";
        cluster.host("ctl").log_in(user).ok(&["sqlite3", &database.to_string_lossy(), rows]);
        Aids { parallel, input: input.join("field.bin"), database }
    }
}

impl Case {
    fn new(cluster: &Cluster, disk: &Path, user: &User, (kind, seed, number): (Kind, u64, u64)) -> Case {
        let letter = |value: u64| char::from(b'a' + (value % 26) as u8);
        let of_kind = kind.to_string().replace(' ', "-");
        let name = format!("{of_kind}-{}{}", letter(number / 26), letter(number));
        let dir = disk.join(&name);
        let outside = cluster.host("ctl").path_from_outside(&dir);
        make(user, &outside, &BTreeMap::new());
        Case { kind, seed, name, dir, outside }
    }

    fn job(&self, run: u64) -> Job {
        let kind = self.kind as u64;
        job(self.kind, &mut Random::new(self.seed, kind, 0), &mut Random::new(self.seed, kind, 1 + run))
    }

    #[track_caller]
    fn submit(&self, cluster: &Cluster, user: &User, aids: &Aids, run: u64) -> Ran {
        let job = self.job(run);
        let dir = self.dir.join(format!("run-{run}"));
        make(user, &self.outside.join(format!("run-{run}")), &BTreeMap::new());
        let of_run = |what: &str| user.home.join(format!("{}-{run}.{what}", self.name));
        let (done, output) = (of_run("done"), of_run("out"));
        let rank = format!("#!/bin/sh\nset -e\nrank=$SLURM_PROCID\n{}\n", job.rank);
        let rank = program(user, &format!("{}-{run}.rank", self.name), &rank);
        let script = format!(
            "#!/bin/sh\n#RSA_LAYOUT=auto\n#RSA_LAYOUT_DIR={}\nset -e\ncd {}\n\
             export INPUT={} DATABASE={} PARALLEL={} RANK={}\n{}\n: > {}\n",
            dir.display(),
            dir.display(),
            aids.input.display(),
            aids.database.display(),
            aids.parallel.display(),
            rank.display(),
            job.script,
            done.display()
        );
        let options = [
            format!("--nodes={}", job.nodes),
            format!("--ntasks={}", job.ranks),
            format!("--job-name={}", self.name),
            format!("--output={}", output.display()),
            "--no-requeue".to_owned(),
        ];
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let id = cluster.slurm.submit(user, &script, &options);
        Ran { id, done, output, job }
    }
}

/// What the history says of each directory by now, without its numbers.
fn by_now(cluster: &Cluster) -> BTreeMap<String, String> {
    let shown = cluster.ondeck(&["layout", "history"]);
    shown.assert_success();
    let mut found = BTreeMap::new();
    let mut directory = String::new();
    for line in shown.stdout.lines() {
        if let Some(told) = line.strip_prefix("  by now: ") {
            found.insert(std::mem::take(&mut directory), told.to_owned());
        } else if let Some((_, rest)) = line.split_once(" in ").filter(|_| !line.starts_with(' ')) {
            directory = rest.split(", user ").next().unwrap().to_owned();
        }
    }
    found
}

/// The use that it tells, if it tells one.
fn use_in(told: &str) -> Option<&str> {
    // `1 run: USE; large files have ...`, or `1 run, of which it can't be told ...; ...`.
    let (_, used) = told.split("; ").next()?.split_once(": ")?;
    let agreed = used.rsplit_once(", by ").filter(|(_, share)| share.ends_with(" of their weight"));
    Some(agreed.map_or(used, |(used, _)| used))
}

fn judge(job: &Job, told: &str) -> Verdict {
    let used = use_in(told);
    let is_right = match (job.truth, used) {
        // Nothing is said of large files: there are none.
        (Truth::Little, None) => {
            return if told.contains("large files") { Verdict::Wrong } else { Verdict::Right };
        }
        (Truth::Little, Some(used)) | (Truth::SmallFiles, Some(used)) => {
            used.ends_with("none of 1 MiB or more")
        }
        (_, None) => return Verdict::NotKnown,
        (Truth::EachProcess, Some(used)) => used == "each process has files of its own",
        (Truth::OneFile, Some(used)) => used == "all processes use one file",
        (Truth::OneWriter, Some(used)) => used.starts_with("one process writes"),
        (Truth::Files(files), Some(used)) => {
            used == format!("{files} files at a time, each of several processes")
                || (files == job.nodes && used == "each node has a file")
        }
    };
    if is_right { Verdict::Right } else { Verdict::Wrong }
}

/// Waits until all of them have ended well, and what they have left is counted.
#[track_caller]
fn wait_counted(cluster: &Cluster, ran: &[Ran], counted: usize) {
    let patience = LONG * (1 + ran.len() as u32 / 3);
    wait_until(patience, "all jobs have ended", || {
        cluster.slurm.client(&["squeue", "--noheader"]).stdout.trim().is_empty()
    });
    for Ran { id, done, output, job, .. } in ran {
        let said = || fs::read_to_string(output).unwrap_or_default();
        assert!(done.exists(), "job {id} ({}) has failed:\n{}\n{}", job.what, job.script, said());
    }
    wait_until(patience, "what they have left is counted", || {
        let shown = cluster.ondeck(&["layout", "history"]).stdout;
        shown.lines().filter(|line| line.starts_with("  job ")).count() == counted
    });
}

/// What the layout of a job's directory was chosen from.
fn chosen_from(cluster: &Cluster, job: u32) -> String {
    let story: Value = cluster.story(job);
    story["layouts"][0]["from"].as_str().unwrap().to_owned()
}

/// An answer, and whether the files that it goes by have one explanation.
struct Answer {
    kind: Kind,
    runs: u64,
    verdict: Verdict,
    tells: bool,
}

#[derive(Default)]
struct Score(Vec<Answer>);

impl Score {
    fn count(&self, runs: u64, is_meant: impl Fn(&Answer) -> bool) -> usize {
        self.0.iter().filter(|answer| answer.runs == runs && is_meant(answer)).count()
    }

    fn table(&self) -> String {
        let mut text =
            "| kind | after one run: right | not known | wrong | after three: right | not known | wrong |\n\
                        |---|---|---|---|---|---|---|\n"
                .to_owned();
        let mut row = |name: &str, is_meant: &dyn Fn(&Answer) -> bool| {
            let _ = write!(text, "| {name} |");
            for runs in [1, RUNS] {
                for verdict in [Verdict::Right, Verdict::NotKnown, Verdict::Wrong] {
                    let found = self.count(runs, |answer| answer.verdict == verdict && is_meant(answer));
                    let _ = write!(text, " {found} |");
                }
            }
            text.push('\n');
        };
        for kind in Kind::ALL {
            row(&kind.to_string(), &|answer| answer.kind == kind);
        }
        row("all", &|_| true);
        row("of these, files with one explanation", &|answer| answer.tells);
        text
    }
}

#[test]
fn what_jobs_of_seven_kinds_have_left_says_how_they_use_their_files() {
    classify(0, GOALS);
}

#[test]
fn where_nodes_watch_who_writes_all_jobs_of_seven_kinds_are_told_rightly() {
    classify(4, SEEN_GOALS);
}

/// Runs the jobs, of which so many nodes watch; so many answers must be right, of a hundred: of jobs whose files have one explanation, and
/// of all, after the first run and after the last.
fn classify(watch_nodes: u32, goals: [(usize, usize); 2]) {
    if !available() {
        return;
    }
    let usual = JOBS[usize::from(watch_nodes > 0)];
    let (count, first) = (asked("ONDECK_CLASSIFIER", usual), asked("ONDECK_CLASSIFIER_SEED", FIRST_SEED));
    let cluster = cluster(watch_nodes);
    let alice = cluster.user("alice");
    let (aids, disk) = (Aids::new(&cluster, alice), own_disk(&cluster, alice, DISK_MIB));
    let cases: Vec<Case> = (0..count)
        .flat_map(|number| {
            Kind::ALL.map(|kind| Case::new(&cluster, &disk, alice, (kind, first + number, number)))
        })
        .collect();
    let (mut score, mut told_wrongly) = (Score::default(), Vec::new());
    let mut known = BTreeMap::new();
    for run in 0..RUNS {
        let ran: Vec<Ran> = cases.iter().map(|case| case.submit(&cluster, alice, &aids, run)).collect();
        wait_counted(&cluster, &ran, cases.len() * (run as usize + 1));
        if run == 1 {
            // What is shown is what the next run's layout was chosen by.
            for (case, ran) in cases.iter().zip(&ran) {
                let told: &String = &known[&pattern(&case.dir)];
                let from = chosen_from(&cluster, ran.id);
                let says = use_in(told).is_some() || told.contains("large files");
                assert_eq!(says, from == format!("the history, {told}"), "{told}\n{from}");
            }
        }
        known = by_now(&cluster);
        for (case, Ran { id, job, .. }) in cases.iter().zip(&ran) {
            let told: &String =
                known.get(&pattern(&case.dir)).unwrap_or_else(|| panic!("nothing of {}", case.name));
            let verdict = judge(job, told);
            println!(
                "{} after {}: {verdict:?}: seed {}, job {id} ({} nodes, {} ranks, {}): {:?}: {told}",
                case.kind,
                run + 1,
                case.seed,
                job.nodes,
                job.ranks,
                job.what,
                job.truth
            );
            if verdict != Verdict::Right {
                let runs = cluster.ondeck(&["layout", "history", "--json"]).stdout;
                let runs: Vec<Value> = serde_json::from_str(&runs).unwrap();
                let of_job = |run: &&Value| run["job"].to_string().contains(&format!("\"{id}"));
                println!("{:?}", runs.iter().find(of_job).map(|run| run["run"].to_string()));
            }
            score.0.push(Answer { kind: case.kind, runs: run + 1, verdict, tells: job.tells });
            if verdict == Verdict::Wrong && job.tells {
                told_wrongly.push(format!("seed {}, {} ({}): {told}", case.seed, case.kind, job.what));
            }
            fs::remove_dir_all(case.outside.join(format!("run-{run}"))).unwrap();
        }
    }
    println!("{}", score.table());
    assert!(told_wrongly.is_empty(), "{told_wrongly:#?}\n{}", score.table());
    // Of a few jobs one that can't be told is a tenth.
    let few = if count < 20 { 25 } else { 0 };
    for (runs, goals) in [1, RUNS].into_iter().zip(goals) {
        let share = |is_meant: &dyn Fn(&Answer) -> bool| {
            let right = score.count(runs, |answer| answer.verdict == Verdict::Right && is_meant(answer));
            right * 100 / score.count(runs, is_meant).max(1)
        };
        assert!(share(&|answer| answer.tells) + few >= goals.0, "after {runs}:\n{}", score.table());
        assert!(share(&|_| true) + few >= goals.1, "after {runs}:\n{}", score.table());
    }
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

/// How the history calls the directories of a case.
fn pattern(dir: &Path) -> String {
    let dir = dir.join("run-#").display().to_string();
    let mut found = String::new();
    for letter in dir.chars() {
        match letter {
            '0'..='9' if found.ends_with('#') => {}
            '0'..='9' => found.push('#'),
            _ => found.push(letter),
        }
    }
    found
}
