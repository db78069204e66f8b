//! Filesystems that are busy: their load is told by a command of the site's, whose answer the test writes.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ondeck_testbed::{User, available, wait_until};
use serde_json::Value;

use crate::aids::{LONG, change};
use crate::cluster::{Cluster, DEADLINE, Setup};
use crate::jobs::{Blocker, Gate, directives, says, wait_file};
use crate::layouts::Lake;

/// What tells the load of the cluster's disk, or of a part of it.
struct Load(PathBuf);

impl Load {
    /// Has the scheduler of a cluster read the load of what is at `path`, every second; `lines` are more of the site's file.
    fn of(cluster: &Cluster, path: &Path, lines: &str) -> Load {
        let dir = cluster.bed.dir();
        let load = Load(dir.join("load"));
        load.is(0);
        let site = format!(
            "[nodes]\nlink = \"2GB/s\"\n[[filesystem]]\npath = \"{}\"\nkind = \"cephfs\"\nload = [\"cat\", \"{}\"]\n\
             load_interval = \"1s\"\n{lines}",
            path.display(),
            load.0.display()
        );
        fs::write(dir.join("site.toml"), site).unwrap();
        let config = fs::read_to_string(dir.join("ondeck.toml")).unwrap();
        if !config.contains("site_file") {
            let line = format!("site_file = \"{}\"\n[scheduler.limits]", dir.join("site.toml").display());
            change(cluster, "ondeck.toml", "[scheduler.limits]", &line);
        }
        // So that it is read at once.
        cluster.kill("scheduler");
        cluster.start_scheduler();
        load
    }

    /// The load is so many percent from the next reading on.
    fn is(&self, percent: u32) {
        fs::write(&self.0, format!("all {percent}%\n")).unwrap();
    }

    /// The same, and waits until the scheduler has noticed that this is beyond a threshold.
    #[track_caller]
    fn becomes(&self, cluster: &Cluster, percent: u32, says: &str) {
        let before = cluster.log_text("scheduler").len();
        self.is(percent);
        wait_for_threshold(cluster, before, says);
    }

    /// Kills the scheduler, starts another one, and waits until that has noticed that the load is beyond a threshold.
    #[track_caller]
    fn after_restart(&self, cluster: &Cluster, says: &str) {
        cluster.kill("scheduler");
        let before = cluster.log_text("scheduler").len();
        cluster.start_scheduler();
        wait_for_threshold(cluster, before, says);
    }
}

/// Waits until the scheduler has logged, from this place of its log on, that a load has passed a threshold.
#[track_caller]
fn wait_for_threshold(cluster: &Cluster, from: usize, says: &str) {
    wait_until(DEADLINE, &format!("the load has passed a threshold: {says}"), || {
        let log = cluster.log_text("scheduler");
        log[from..].lines().any(|line| line.contains("has passed a threshold") && line.contains(says))
    });
}

/// A disk of 1 MB/s: a twentieth of it is 3 MB in a minute.
const SMALL: &str = "targets = 1\nservers = 1\ntarget = \"1MB/s\"\nheavy_above = \"80%\"\n";

impl Cluster {
    /// What is shown of the delay of a job; null as long as there is none.
    fn delay(&self, job: u32) -> Value {
        let ran = self.ondeck(&["job", "show", &job.to_string(), "--json"]);
        let story: Value = serde_json::from_str(&ran.stdout).unwrap_or_default();
        story["delay"].clone()
    }

    /// Submits a job that works on disk, in its user's part of that.
    #[track_caller]
    fn submit_there(&self, user: &User, script: &str, options: &[&str]) -> u32 {
        let there = format!("--chdir={}", user.scratch.display());
        let usual = ["--nodes=1", "--exclusive", "--no-requeue", "--output=/dev/null", &there];
        self.slurm.submit(user, script, &[&usual[..], options].concat())
    }

    /// Waits until the scheduler's log, `ondeck status` and `ondeck doctor --slurm` say what is wrong with the site's file.
    #[track_caller]
    fn wait_site_fault(&self, what: &str) {
        let is_there = |text: &str| text.lines().any(|line| line.contains("site") && line.contains(what));
        wait_until(DEADLINE, "it is told what is wrong with the site's file", || {
            is_there(&self.log_text("scheduler")) && is_there(&self.ondeck(&["status"]).stdout)
        });
        assert!(is_there(&self.ondeck(&["doctor", "--slurm"]).stdout), "{what}");
    }

    /// Waits until a job is delayed, as `squeue` and AdminComment say.
    #[track_caller]
    fn wait_delayed(&self, job: u32, why: &str) {
        self.slurm.wait_job(job, "waits for its begin time", LONG, |seen| {
            seen["JobState"] == "PENDING"
                && seen["Reason"] == "BeginTime"
                && seen
                    .get("AdminComment")
                    .is_some_and(|text| text.starts_with("ondeck: ") && text.contains(why))
        });
    }
}

const HEAVY: &str = "#!/bin/sh\n#RSA_IO=heavy\n";

#[test]
fn io_heavy_jobs_wait_while_their_filesystem_is_busy_and_nobody_else_does() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 1, compute_nodes: 2, ..Setup::default() });
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let load = Load::of(&cluster, &cluster.bed.dir().join("scratch"), SMALL);

    // While it is calm, all start; and what they leave is remembered.
    let idle = cluster.submit_there(alice, HEAVY, &[]);
    cluster.wait_completed(idle);
    assert!(cluster.delay(idle).is_null());
    let case = alice.scratch.join("case-1");
    fs::create_dir(&case).unwrap();
    chown(&case, Some(alice.uid), Some(alice.gid)).unwrap();
    let writes = |lines: &str| {
        format!(
            "#!/bin/sh\n{lines}#RSA_LAYOUT_DIR={0}:unknown\nhead -c 8M /dev/zero > {0}/data || exit 9\n",
            case.display()
        )
    };
    let named = ["--job-name=writer-1"];
    let first = cluster.submit_there(alice, &writes(""), &named);
    cluster.wait_completed(first);
    let log_in = cluster.host("ctl").log_in(alice);
    wait_until(LONG, "what the job has left is counted", || {
        let ran = cluster.ondeck_on(&log_in, &["layout", "history", "--json"]);
        serde_json::from_str::<Vec<Value>>(&ran.stdout).is_ok_and(|runs| runs.len() == 1)
    });

    // A job that is next when the load has risen is delayed, by its history.
    load.becomes(&cluster, 90, "jobs_wait=true");
    let blocker = Blocker::new(&cluster, 2);
    let by_history = cluster.submit_there(alice, &writes(""), &named);
    cluster.wait_delayed(by_history, "by its history it is I/O-heavy: its last run wrote");
    blocker.release();
    // Whoever says otherwise starts, and so do others.
    for script in [writes("#RSA_IO=normal\n").as_str(), "#!/bin/sh\n#RSA_IO=normal\n", "#!/bin/sh\ntrue\n"] {
        let job = cluster.submit_there(alice, script, &named);
        cluster.wait_completed(job);
        assert!(
            !cluster.slurm.job(job).get("AdminComment").is_some_and(|text| text.contains("I/O")),
            "{script}"
        );
    }
    let elsewhere = cluster.submit(HEAVY, 1);
    cluster.wait_completed(elsewhere);

    // By its line, on idle nodes; in `squeue`, and in `ondeck job show`.
    let heavy = cluster.submit_there(bob, HEAVY, &[]);
    cluster.wait_delayed(heavy, "its load is 90 %, and its line #RSA_IO says that it is I/O-heavy");
    let queue = cluster.slurm.client(&["squeue", "--noheader", "--format=%i %T %r"]).stdout;
    assert!(queue.contains(&format!("{heavy} PENDING BeginTime")), "{queue}");
    let shown = cluster.show(heavy);
    assert!(
        shown.contains(": ONDECK, INITIAL") && shown.contains("\n  delay   it starts up to 30 min 0 s later"),
        "{shown}"
    );
    // Others see nothing of it.
    cluster.ondeck_on(&log_in, &["job", "show", &heavy.to_string()]).assert_code(2);
    // Who wants it later, or holds it, is left alone.
    let later = cluster.submit_there(bob, HEAVY, &["--begin=now+1hour"]);
    let begin = cluster.slurm.job(later)["EligibleTime"].clone();
    let held = cluster.submit_there(bob, HEAVY, &["--hold"]);

    // A scheduler that is killed goes on from where it was.
    let since = cluster.delay(heavy)["since_ms"].clone();
    assert!(since.is_u64());
    load.after_restart(&cluster, "jobs_wait=true");
    // A load that has fallen a little changes nothing.
    load.is(70);
    let eligible = |job: u32| cluster.slurm.job(job)["EligibleTime"].clone();
    let before = eligible(heavy);
    wait_until(LONG, "its begin time is put off once more", || eligible(heavy) != before);
    assert_eq!(cluster.slurm.state(heavy), "PENDING");
    assert_eq!(cluster.delay(heavy)["since_ms"], since);

    // When it has fallen clearly they start, one after the other.
    load.becomes(&cluster, 30, "jobs_wait=false");
    for job in [by_history, heavy] {
        cluster.wait_completed(job);
        let delay = cluster.delay(job);
        let told = delay["text"].as_str().unwrap();
        assert!(told.contains("it has waited ") && told.contains("was less busy"), "{delay:#}");
    }
    let told = cluster.slurm.job(heavy)["AdminComment"].clone();
    assert!(told.starts_with("ondeck: it has waited "), "{told}");
    let ended = |job: u32| cluster.delay(job)["ended_ms"].as_u64().unwrap();
    assert!(ended(by_history) < ended(heavy), "who was delayed first is let go first");
    wait_until(LONG, "its end is noticed", || {
        let shown = cluster.show(heavy);
        shown.contains(": FINISHED, INITIAL") && shown.contains("delay   it has waited ")
    });
    for (job, reason) in [(later, "BeginTime"), (held, "JobHeldUser")] {
        let seen = cluster.slurm.job(job);
        assert_eq!((seen["JobState"].as_str(), seen["Reason"].as_str()), ("PENDING", reason));
        assert!(!seen.contains_key("AdminComment") && cluster.delay(job).is_null(), "{seen:?}");
        cluster.slurm.cancel(job);
    }
    assert_eq!(cluster.slurm.job(later)["EligibleTime"], begin);
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn under_lasting_load_an_io_heavy_job_waits_for_its_bound_and_not_longer() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 1, compute_nodes: 2, ..Setup::default() });
    let alice = cluster.user("alice");
    let lines = format!("{SMALL}heavy_wait = \"20s\"\n");
    let load = Load::of(&cluster, &cluster.bed.dir().join("scratch"), &lines);
    load.becomes(&cluster, 95, "jobs_wait=true");
    let one = cluster.submit_there(alice, HEAVY, &[]);
    cluster.wait_delayed(one, "it starts up to 20.0 s later");
    let since = cluster.delay(one)["since_ms"].as_u64().unwrap();
    cluster.kill("scheduler");
    cluster.start_scheduler();
    cluster.wait_completed(one);
    // Slurm itself may have started it a moment before it was let go.
    let ended = |job: u32| wait_until(LONG, "its delay is over", || cluster.delay(job)["ended_ms"].as_u64());
    let waited = Duration::from_millis(ended(one) - since);
    assert_eq!(cluster.delay(one)["since_ms"].as_u64(), Some(since));
    assert!((Duration::from_secs(18)..Duration::from_secs(60)).contains(&waited), "{waited:?}");

    // What is written to a RAM disk does not load the filesystem; its results come home more slowly.
    let results = alice.scratch.join("results");
    fs::create_dir(&results).unwrap();
    chown(&results, Some(alice.uid), Some(alice.gid)).unwrap();
    let script = format!(
        "{HEAVY}#RSA_OUT_SIZE=10MiB\n#RSA_WAIT=hold\n{}echo a > {}/file\n",
        directives(&[], &[&results]),
        results.display()
    );
    let in_ram = cluster.submit(&script, 1);
    cluster.wait_done(in_ram);
    assert_eq!(says(&results.join("file")), "a");
    assert!(cluster.delay(in_ram).is_null(), "{}", cluster.show(in_ram));
    let slow = |line: &str| line.contains("it goes slower") && line.contains("rate=97.");
    assert!(cluster.log_text("scheduler").lines().any(slow), "{}", cluster.log_text("scheduler"));

    // An array is one job until it has begun, and nobody waits twice.
    let array = cluster.submit_there(alice, HEAVY, &["--array=0-2"]);
    cluster.slurm.wait_job(array, "is delayed as a whole", LONG, |seen| {
        seen["Reason"] == "BeginTime"
            && seen.get("AdminComment").is_some_and(|text| text.contains("I/O-heavy"))
    });
    let elements = cluster.slurm.client(&["squeue", "--noheader", "--array-unique", "--format=%i"]).stdout;
    assert_eq!(elements.trim(), format!("{array}_[0-2]"), "it has one record as yet");
    wait_until(LONG, "all elements have run", || {
        let queue = cluster.slurm.client(&["squeue", "--noheader", "--array", "--format=%i"]).stdout;
        queue.trim().is_empty()
    });
    // A job that is requeued is not delayed again.
    let gate = Gate::of(alice, "again");
    let made = alice.scratch.join("made");
    let script = format!("{HEAVY}: > {}\n{}", made.display(), gate.line());
    let again = cluster.submit_there(alice, &script, &["--requeue"]);
    wait_file(&made);
    ended(again);
    let first = cluster.delay(again);
    fs::remove_file(&made).unwrap();
    cluster.slurm.requeue(again);
    gate.open();
    // Slurm itself starts it no sooner than after two minutes, unless somebody says so; a job that begins so soon would be delayed if
    // it were another one.
    cluster.slurm.wait_job(again, "waits anew", LONG, |seen| seen["JobState"] == "PENDING");
    cluster.slurm.scontrol(&["update", &format!("JobId={again}"), "StartTime=now+10"]).assert_success();
    cluster.wait_completed(again);
    assert_eq!(cluster.delay(again), first, "it is not delayed in its next life");
    assert!(
        !cluster.slurm.job(again).get("AdminComment").is_some_and(|text| text.contains("it starts up to"))
    );
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn where_slurm_takes_it_for_a_job_with_a_burst_buffer_an_io_heavy_job_waits_too() {
    if !available() {
        return;
    }
    let setup = Setup { rsa_nodes: 1, compute_nodes: 2, burst_buffers: true, ..Setup::default() };
    let cluster = Cluster::with(setup);
    let load = Load::of(&cluster, &cluster.bed.dir().join("scratch"), SMALL);
    load.becomes(&cluster, 90, "jobs_wait=true");
    let job = cluster.submit_there(cluster.user("alice"), HEAVY, &[]);
    cluster.wait_delayed(job, "says that it is I/O-heavy");
    // Everybody who asks sees what is going on.
    let status = cluster.ondeck(&["status"]);
    let status = &status.assert_success().stdout;
    let filesystem = cluster.bed.dir().join("scratch");
    let busy = format!("{}: load 90 %, staging goes slower, I/O-heavy jobs wait", filesystem.display());
    assert!(status.contains(&busy) && status.contains("it starts up to"), "{status}");

    // A site's file that is gone for a moment lets nobody go, and neither does one that is broken.
    let site = cluster.bed.dir().join("site.toml");
    let text = fs::read_to_string(&site).unwrap();
    let read_again = |count: usize| {
        fs::write(&site, &text).unwrap();
        wait_until(DEADLINE, "the site's file can be read again", || {
            cluster.log_text("scheduler").matches("the site's file can be read again").count() == count
        });
    };
    fs::remove_file(&site).unwrap();
    cluster.wait_site_fault("is not there any more");
    read_again(1);
    fs::write(&site, "this is [[not toml").unwrap();
    cluster.wait_site_fault("TOML parse error");
    read_again(2);
    assert!(!cluster.ondeck(&["status"]).stdout.contains("site's file"));
    assert!(cluster.delay(job)["ended_ms"].is_null(), "{}", cluster.delay(job));

    load.becomes(&cluster, 30, "jobs_wait=false");
    cluster.wait_completed(job);
    cluster.assert_clean();
}

#[test]
fn on_a_busy_filesystem_a_job_s_files_get_more_stripes() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let alice = cluster.user("alice");
    let load = Load::of(&cluster, &lake.at, "targets = 2\nservers = 2\ntarget = \"2GB/s\"\n");
    let stripes = |name: &str| {
        let directory = lake.folder(alice, name);
        let job = cluster.submit_there(
            alice,
            &format!("#!/bin/sh\n#RSA_LAYOUT_DIR={0}:single\necho a > {0}/file\n", directory.display()),
            &[],
        );
        cluster.wait_completed(job);
        let layout = cluster.wait_layout(job, &directory, "restored");
        (lake.layout_of_file(&directory.join("file")), layout)
    };
    assert_eq!(stripes("idle").0, "1 x 1048576");
    // Half of a target is left: it takes two to fill the node.
    load.is(50);
    let mut reasons = String::new();
    for number in 0.. {
        assert!(number < 20, "the load does not count: {reasons}");
        let (busy, layout) = stripes(&format!("busy-{number}"));
        reasons = layout["reasons"].to_string();
        if busy == "2 x 1048576" {
            break;
        }
    }
    assert!(reasons.contains("50 %"), "{reasons}");
    lake.end(&cluster);
}
