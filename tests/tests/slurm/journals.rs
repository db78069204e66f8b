//! The scheduler's journal is lost, or an older copy of it comes back, while jobs use their RAM disks.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ondeck_testbed::{Signal, available, wait_until};

use crate::aids::{await_file, give, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};
use crate::life::directory;

/// A job of alice's that writes into a RAM disk from its start, and ends when it is told to.
struct Writer {
    job: u32,
    output: PathBuf,
}

impl Writer {
    fn start(cluster: &Cluster, name: &str) -> Writer {
        let [writer] = Writer::start_all(cluster, [name], 2);
        writer
    }

    /// Several at a time, on so many nodes each.
    fn start_all<const N: usize>(cluster: &Cluster, names: [&str; N], nodes: usize) -> [Writer; N] {
        let alice = cluster.user("alice");
        let blocker = cluster.block(4);
        let writers = names.map(|name| {
            let output = directory(alice, name, &[]);
            let body = format!(
                "n=0\nuntil [ -e {gate} ]; do n=$((n + 1)); echo $n >> {out}/log || exit 9; \
                 [ $(tail -n 1 {out}/log) = $n ] || exit 8; [ $n = 3 ] && tell {name}-written; sleep 0.05; done\n\
                 echo end >> {out}/log\n",
                gate = alice.scratch.join(format!("{name}-go")).display(),
                out = output.display(),
            );
            let lines = [format!("DATA_OUT={}", output.display()), "WAIT=hold".into()];
            let job = cluster.submit(&script(alice, &lines, &body), nodes);
            cluster.wait_rsa(job, "READY");
            Writer { job, output }
        });
        cluster.slurm.cancel(blocker);
        for (name, writer) in names.iter().zip(&writers) {
            await_file(alice, &format!("{name}-written"));
            assert_eq!(cluster.covers_of(&writer.output).len(), nodes);
        }
        writers
    }

    fn end(&self, cluster: &Cluster, name: &str) {
        give(cluster.user("alice"), &format!("{name}-go"));
        cluster.slurm.wait_state(self.job, "COMPLETED", DEADLINE);
    }

    /// All compute nodes obey the scheduler, and show RAM disks.
    fn on_all(cluster: &Cluster, name: &str) {
        let [all] = Writer::start_all(cluster, [name], 4);
        all.end(cluster, name);
        cluster.wait_done(all.job);
        all.assert_home();
        cluster.assert_clean();
    }

    /// Nothing that it wrote is missing.
    fn assert_home(&self) {
        let files = tree(&self.output);
        let log = String::from_utf8(files["log"].clone()).unwrap();
        let lines: Vec<&str> = log.lines().collect();
        assert!(lines.len() > 3 && lines[lines.len() - 1] == "end", "{log}");
        for (index, line) in lines[..lines.len() - 1].iter().enumerate() {
            assert_eq!(*line, (index + 1).to_string(), "{log}");
        }
        assert_eq!(files.len(), 1);
    }
}

/// How many RSA nodes lend.
fn up(cluster: &Cluster) -> usize {
    let status = cluster.status();
    status["nodes"].as_array().unwrap().iter().filter(|node| node["state"] == "up").count()
}

fn journal(cluster: &Cluster) -> PathBuf {
    cluster.bed.dir().join("scheduler")
}

/// A copy of the journal's directory, with the files beside the journal.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn put_back(from: &Path, to: &Path) {
    fs::remove_dir_all(to).unwrap();
    copy(from, to);
}

#[test]
fn a_lost_journal_loses_no_results_and_a_job_that_runs_goes_on_with_its_ram_disk() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let writer = Writer::start(&cluster, "lost");
    cluster.kill("scheduler");
    fs::remove_dir_all(journal(&cluster)).unwrap();
    // It does not command what it does not know, and says what to do.
    let refused = cluster.ondeck(&["serve"]);
    refused.assert_code(1).assert_says("--take-over");
    let unconfirmed = cluster.ondeck(&["serve", "--take-over"]);
    unconfirmed.assert_code(1).assert_says(&format!("may hold results: job-{}", writer.job));
    unconfirmed.assert_says("--yes");
    cluster.take_over();
    wait_until(DEADLINE, "its RAM disk is found", || {
        cluster.job(writer.job).is_some_and(|job| job["rsa_state"] == "INUSE_OUT")
    });
    writer.end(&cluster, "lost");
    cluster.wait_done(writer.job);
    writer.assert_home();
    cluster.assert_clean();
}

#[test]
fn results_whose_job_ended_without_a_journal_are_held_until_somebody_decides() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let [kept, given_up] = Writer::start_all(&cluster, ["kept", "given-up"], 1);
    cluster.kill("scheduler");
    fs::remove_dir_all(journal(&cluster)).unwrap();
    kept.end(&cluster, "kept");
    given_up.end(&cluster, "given-up");
    assert!(cluster.covers_of(&kept.output).is_empty(), "the Epilogs take it away");
    cluster.take_over();
    for writer in [&kept, &given_up] {
        cluster.wait_rsa(writer.job, "HELD");
    }
    let waits = cluster.ondeck(&["wait", &kept.job.to_string(), "--timeout", "20s"]);
    waits.assert_code(1).assert_says("ondeck job retry");
    let id = cluster.job(given_up.job).unwrap()["id"].as_str().unwrap().to_owned();
    cluster.ondeck(&["job", "abandon", &id, "--yes"]).assert_success();
    cluster.ondeck(&["job", "retry", &kept.job.to_string()]).assert_success();
    cluster.wait_done(kept.job);
    kept.assert_home();
    wait_until(DEADLINE, "what was given up is gone", || cluster.job(given_up.job).is_none());
    assert!(tree(&given_up.output).is_empty());
    cluster.assert_clean();
}

#[test]
fn an_older_copy_of_the_journal_commands_nobody_before_somebody_says_so() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let (state, older) = (journal(&cluster), cluster.bed.dir().join("older"));
    cluster.kill("scheduler");
    copy(&state, &older);
    cluster.start_scheduler();
    let writer = Writer::start(&cluster, "older");
    cluster.kill("scheduler");
    put_back(&older, &state);
    let refused = cluster.ondeck(&["serve"]);
    refused.assert_code(1).assert_says("older than what the agents of");
    cluster.take_over();
    wait_until(DEADLINE, "its RAM disk is found", || {
        cluster.job(writer.job).is_some_and(|job| job["rsa_state"] == "INUSE_OUT")
    });
    // Once more: the copy that was taken over from is a stranger's now.
    cluster.kill("scheduler");
    put_back(&older, &state);
    cluster.ondeck(&["serve"]).assert_code(1).assert_says("--take-over");
    cluster.take_over();
    wait_until(DEADLINE, "its RAM disk is found again", || {
        cluster.job(writer.job).is_some_and(|job| job["rsa_state"] == "INUSE_OUT")
    });
    writer.end(&cluster, "older");
    cluster.wait_done(writer.job);
    writer.assert_home();
    cluster.assert_clean();
}

#[test]
fn a_copy_from_while_a_job_wrote_holds_its_results_though_it_says_that_there_are_none() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = directory(alice, "ready", &[]);
    let (state, older) = (journal(&cluster), cluster.bed.dir().join("ready-copy"));
    let blocker = cluster.block(4);
    let body = format!("echo result > {}/result\ntell wrote\nawait go\n", output.display());
    let job = cluster.submit(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    cluster.wait_rsa(job, "READY");
    cluster.kill("scheduler");
    // In this state it would be removed when the job has ended.
    copy(&state, &older);
    cluster.start_scheduler();
    cluster.slurm.cancel(blocker);
    await_file(alice, "wrote");
    cluster.kill("scheduler");
    put_back(&older, &state);
    give(alice, "go");
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    assert!(tree(&output).is_empty());
    cluster.take_over();
    cluster.wait_rsa(job, "HELD");
    cluster.ondeck(&["job", "retry", &job.to_string()]).assert_success();
    cluster.wait_done(job);
    assert_eq!(tree(&output), [("result".to_owned(), b"result\n".to_vec())].into());
    cluster.assert_clean();
}

#[test]
fn an_rsa_node_that_was_silent_at_a_take_over_is_claimed_when_it_comes_back_and_its_results_are_held() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let writer = Writer::start(&cluster, "silent");
    let nodes = cluster.job(writer.job).unwrap()["rsa_nodes"].clone();
    let node = nodes[0].as_str().unwrap().to_owned();
    cluster.kill("scheduler");
    cluster.kill(&node);
    fs::remove_dir_all(journal(&cluster)).unwrap();
    let unconfirmed = cluster.ondeck(&["serve", "--take-over"]);
    unconfirmed
        .assert_code(1)
        .assert_says(&format!("not known, and kept if it may hold results: what {node} has"));
    cluster.take_over();
    // Of a job that nobody knows any more nobody says that it has no results.
    let unknown = cluster.ondeck(&["wait", "4711", "--timeout", "5s"]);
    unknown.assert_code(1).assert_says(&node);
    // It gets no other RAM disk while nobody knows what the silent node has.
    wait_until(DEADLINE, "it waits for the node", || {
        cluster.job(writer.job).is_some_and(|job| job["message"].as_str().unwrap().contains(&node))
    });
    cluster.start_agent(&node);
    wait_until(DEADLINE, "its RAM disk is found", || {
        let state = cluster.job(writer.job).map(|job| job["rsa_state"].clone());
        state.is_some_and(|state| state == "INUSE_OUT" || state == "HELD")
    });
    writer.end(&cluster, "silent");
    if cluster.job(writer.job).is_some_and(|job| job["rsa_state"] == "HELD") {
        retry(&cluster, writer.job);
    }
    cluster.wait_done(writer.job);
    writer.assert_home();
    cluster.assert_clean();
}

/// Has results that are HELD brought home, as soon as that is allowed.
fn retry(cluster: &Cluster, job: u32) {
    wait_until(DEADLINE, "its results may be brought home", || {
        cluster.ondeck(&["job", "retry", &job.to_string()]).success()
    });
}

#[test]
fn agents_that_missed_a_take_over_are_claimed_by_the_next_one_and_their_results_come_home() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "proportion = 4".into(), ..Setup::default() });
    let [writer] = Writer::start_all(&cluster, ["missed"], 4);
    let node = cluster.job(writer.job).unwrap()["rsa_nodes"][0].as_str().unwrap().to_owned();
    // It misses both, and so does a compute node; the others have no work between them.
    cluster.kill("scheduler");
    writer.end(&cluster, "missed");
    cluster.kill(&node);
    let absent = "c4";
    cluster.kill(absent);
    for _ in 0..2 {
        fs::remove_dir_all(journal(&cluster)).unwrap();
        cluster.take_over();
        wait_until(DEADLINE, "it commands the others", || up(&cluster) == 3);
        cluster.kill("scheduler");
    }
    cluster.start_agent(&node);
    cluster.start_agent(absent);
    cluster.start_scheduler();
    cluster.wait_rsa(writer.job, "HELD");
    retry(&cluster, writer.job);
    cluster.wait_done(writer.job);
    writer.assert_home();
    Writer::on_all(&cluster, "after");
}

#[test]
fn agents_of_another_journal_beside_ones_own_are_named_and_taken_over_when_somebody_says_so() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "proportion = 4".into(), ..Setup::default() });
    let [writer] = Writer::start_all(&cluster, ["beside"], 4);
    let node = cluster.job(writer.job).unwrap()["rsa_nodes"][0].as_str().unwrap().to_owned();
    cluster.kill("scheduler");
    writer.end(&cluster, "beside");
    for agent in ["r1", "r2", "r3", "r4"] {
        let state = cluster.host(agent).path_from_outside(format!("/run/ondeck/agent-{agent}"));
        cluster.kill(agent);
        // No RSA node that answers knows any more that there was another journal.
        if agent != node {
            fs::remove_dir_all(state).unwrap();
            cluster.start_agent(agent);
        }
    }
    fs::remove_dir_all(journal(&cluster)).unwrap();
    cluster.start_scheduler();
    wait_until(DEADLINE, "it commands the others", || up(&cluster) == 3);
    cluster.start_agent(&node);
    wait_until(DEADLINE, "the node is shown with the reason", || {
        cluster.ondeck(&["node", "list"]).stdout.contains("obeys the scheduler of another journal")
    });
    let doctor = cluster.ondeck(&["doctor", "--slurm"]);
    doctor.assert_code(1);
    assert!(
        doctor.stdout.contains(&format!("5 obey another journal: c1, c2, c3, c4, {node}")),
        "{}",
        doctor.stdout
    );
    cluster.kill("scheduler");
    let unconfirmed = cluster.ondeck(&["serve", "--take-over"]);
    unconfirmed
        .assert_code(1)
        .assert_says(&format!("obey the scheduler of another journal: c1, c2, c3, c4, {node}"));
    cluster.take_over();
    cluster.wait_rsa(writer.job, "HELD");
    retry(&cluster, writer.job);
    cluster.wait_done(writer.job);
    writer.assert_home();
    Writer::on_all(&cluster, "after");
    let doctor = cluster.ondeck(&["doctor", "--slurm"]);
    assert!(!doctor.stdout.contains("another journal"), "{}", doctor.stdout);
    cluster.assert_clean();
}

#[test]
fn a_job_keeps_its_ram_disk_though_its_node_is_given_up() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let (input, output) = (directory(alice, "kept-in", &[("data", "1")]), directory(alice, "kept-out", &[]));
    let lines = [
        format!("DATA_IN={}", input.display()),
        format!("DATA_OUT={}", output.display()),
        "WAIT=hold".into(),
    ];
    let body = format!(
        "cp {0}/data {1}/first\ntell wrote\nawait go\ncp {0}/data {1}/last\n",
        input.display(),
        output.display()
    );
    let job = cluster.start_staged(&script(alice, &lines, &body), 1);
    await_file(alice, "wrote");
    let node = cluster.job(job).unwrap()["rsa_nodes"][0].as_str().unwrap().to_owned();
    cluster.kill("scheduler");
    cluster.kill(&node);
    fs::remove_dir_all(journal(&cluster)).unwrap();
    cluster.take_over();
    let message = || {
        let job = cluster.job(job);
        job.map(|job| job["message"].as_str().unwrap().to_owned()).unwrap_or_default()
    };
    wait_until(DEADLINE, "it waits for the node", || message().contains(&node));
    cluster.ondeck(&["node", "give-up", &node]).assert_success();
    wait_until(DEADLINE, "its own nodes are asked", || message().contains("it gets no other one"));
    assert!(message().contains(&format!("which is on {node}")), "{}", message());
    cluster.start_agent(&node);
    wait_until(DEADLINE, "its RAM disk is found", || {
        cluster.job(job).is_some_and(|job| job["rsa_state"].as_str().unwrap().starts_with("INUSE"))
    });
    give(alice, "go");
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    let of = |name: &str| (name.to_owned(), b"1".to_vec());
    assert_eq!(tree(&output), [of("first"), of("last")].into());
    let log = cluster.ondeck(&["job", "log"]).stdout;
    for untrue in ["reads it from disk", "is not in RAM", "an earlier one than"] {
        assert!(!log.contains(untrue), "{log}");
    }
    cluster.assert_clean();
}

#[test]
fn a_take_over_ends_when_there_is_nothing_to_take_over_or_nobody_can_tell() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let (ondeck, config) = (cluster.ondeck.display(), cluster.bed.dir().join("ondeck.toml"));
    let list = format!("{ondeck} node list --config {} | head -1", config.display());
    let shown = cluster.host("ctl").shell(&list);
    shown.assert_success();
    assert_eq!(shown.stderr, "");
    cluster.kill("scheduler");
    cluster.ondeck(&["serve", "--take-over"]).assert_code(2).assert_says("there is nothing to take over");
    cluster.kill("r1");
    cluster.ondeck(&["serve", "--take-over"]).assert_code(1).assert_says("the agents of r1 do not answer");
    cluster.start_agent("r1");
    cluster.start_scheduler();
    cluster.assert_clean();
}

#[test]
fn of_two_schedulers_with_copies_of_one_journal_the_later_one_commands() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let writer = Writer::start(&cluster, "two");
    let (state, copied) = (journal(&cluster), cluster.bed.dir().join("second"));
    // Somebody starts the standby while the first one hangs.
    cluster.signal("scheduler", Signal::STOP);
    copy(&state, &copied);
    let dir = cluster.bed.dir();
    let text = fs::read_to_string(dir.join("ondeck.toml")).unwrap();
    let other =
        format!("state = \"{}\"\nport = 7399\nsocket = \"/run/ondeck/second.sock\"\n", copied.display());
    let text = text.replace(&format!("state = \"{}\"\n", state.display()), &other);
    let config = dir.join("second.toml");
    fs::write(&config, text).unwrap();
    let mut command = cluster.host("ctl").command(&cluster.ondeck);
    command.arg("serve").arg("--config").arg(&config);
    let mut second = cluster.host("ctl").spawn_daemon(command, &dir.join("log/second.log")).unwrap();
    let ondeck = cluster.ondeck.to_string_lossy().into_owned();
    wait_until(DEADLINE, "the second one commands all nodes", || {
        let config = config.to_string_lossy();
        let ran = cluster.host("ctl").run(&[&ondeck, "status", "--json", "--config", &config]);
        ran.success() && ran.stdout.matches("\"up\"").count() == 4
    });
    cluster.signal("scheduler", Signal::CONT);
    writer.end(&cluster, "two");
    assert_eq!(cluster.wait_ended("scheduler"), Some(4), "{}", cluster.log_text("scheduler"));
    second.kill(Signal::KILL);
    second.wait(DEADLINE).expect("SIGKILL ends it");
    put_back(&copied, &state);
    cluster.start_scheduler();
    cluster.wait_done(writer.job);
    writer.assert_home();
    cluster.assert_clean();
}

#[test]
fn agents_that_lost_what_they_kept_are_claimed_again_and_their_scheduler_goes_on() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let agents = ["c1", "c2", "c3", "c4", "r1", "r2", "r3", "r4"];
    let job = |name: &str| {
        let output = directory(alice, name, &[]);
        let lines = [format!("DATA_OUT={}", output.display()), "WAIT=hold".into()];
        // It runs until it was seen to run: where nothing is to be unmounted it is over in a moment.
        let body = format!("await {name}-end\necho {name} > {}/result\n", output.display());
        let job = cluster.start_staged(&script(alice, &lines, &body), 1);
        give(alice, &format!("{name}-end"));
        (job, output)
    };
    for name in ["first", "second"] {
        let (job, output) = job(name);
        cluster.wait_done(job);
        assert_eq!(tree(&output)["result"], format!("{name}\n").into_bytes());
        cluster.assert_clean();
        for agent in agents {
            cluster.kill(agent);
            let state = cluster.host(agent).path_from_outside(format!("/run/ondeck/agent-{agent}"));
            fs::remove_dir_all(state).unwrap();
            cluster.start_agent(agent);
        }
    }
    let (last, output) = job("last");
    cluster.wait_done(last);
    assert_eq!(tree(&output)["result"], b"last\n");
    assert!(cluster.is_running("scheduler"), "{}", cluster.log_text("scheduler"));
    cluster.assert_clean();
}

/// The scheduler waits until the journal can be written, and whoever asks is told of that, in time.
#[test]
fn a_journal_that_can_not_be_written_is_told_and_nothing_is_lost() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    // Its directory on a small disk of its own.
    let state = cluster.bed.dir().join("scheduler");
    let path = state.display().to_string();
    let ctl = cluster.host("ctl");
    cluster.signal("scheduler", Signal::TERM);
    cluster.wait_ended("scheduler");
    let copy = format!("{path}.kept");
    ctl.run(&["cp", "-a", &path, &copy]).assert_success();
    ctl.run(&["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", &path]).assert_success();
    ctl.run(&["cp", "-a", &format!("{copy}/."), &path]).assert_success();
    cluster.start_scheduler();
    let writer = Writer::start(&cluster, "writer");

    // As much as there is, and a little less for the file that takes it.
    let _ = ctl.run(&["dd", "if=/dev/zero", &format!("of={path}/filler"), "bs=4k"]);
    give(alice, "writer-go");
    cluster.slurm.wait_state(writer.job, "COMPLETED", DEADLINE);
    wait_until(DEADLINE, "the journal can't be written", || {
        cluster.log_text("scheduler").contains("the journal can't be written")
    });
    // Again and again: nobody who asks may keep the next one waiting.
    for _ in 0..10 {
        let began = std::time::Instant::now();
        let ran = cluster.ondeck(&["status"]);
        assert!(
            ran.success() && ran.stdout.contains("! the scheduler's journal can't be written"),
            "{ran:#?}"
        );
        assert!(cluster.ondeck(&["status", "--metrics"]).stdout.contains("ondeck_journal_up 0"));
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    }
    let ran = cluster.ondeck(&["job", "show", &writer.job.to_string()]);
    assert!(
        !ran.success() && ran.stderr.contains(&format!("journal in {path} can't be written")),
        "{ran:#?}"
    );
    let ran = cluster.ondeck(&["doctor", "--slurm"]);
    let line = ran.stdout.lines().find(|line| line.contains("scheduler ")).unwrap_or_default();
    assert!(line.contains("MISSING") && line.contains("can't write its journal"), "{ran:#?}");
    // A job starts meanwhile, on disk, and its hooks don't take their whole time.
    let other = cluster.submit(&script(alice, &[], "tell started"), 1);
    cluster.slurm.wait_state(other, "COMPLETED", DEADLINE);

    ctl.run(&["rm", &format!("{path}/filler")]).assert_success();
    wait_until(DEADLINE, "it can be written again", || {
        cluster.log_text("scheduler").contains("the journal can be written again")
    });
    cluster.wait_done(writer.job);
    writer.assert_home();
    assert!(cluster.ondeck(&["status", "--metrics"]).stdout.contains("ondeck_journal_up 1"));

    // One that is to end does not wait for room. With a journal that has no room of its own left, as after a clean end.
    cluster.signal("scheduler", Signal::TERM);
    assert_eq!(cluster.wait_ended("scheduler"), Some(0));
    cluster.start_scheduler();
    let failures = || cluster.log_text("scheduler").matches("the journal can't be written; nothing").count();
    let before = failures();
    let _ = ctl.run(&["dd", "if=/dev/zero", &format!("of={path}/filler"), "bs=4k"]);
    let output = directory(alice, "last-out", &[]);
    let lines = [format!("DATA_OUT={}", output.display())];
    let last = cluster.submit(&script(alice, &lines, &format!("echo 1 > {}/file", output.display())), 1);
    wait_until(DEADLINE, "the journal can't be written", || failures() > before);
    cluster.signal("scheduler", Signal::TERM);
    assert_eq!(cluster.wait_ended("scheduler"), Some(1));
    assert!(cluster.log_text("scheduler").contains("ends, though the journal can't be written"));
    cluster.ondeck(&["serve"]).assert_code(1).assert_says("make room there");
    ctl.run(&["rm", &format!("{path}/filler")]).assert_success();
    cluster.start_scheduler();
    cluster.slurm.wait_state(last, "COMPLETED", DEADLINE);
    cluster.wait_done(last);
    assert_eq!(tree(&output), [("file".to_owned(), b"1\n".to_vec())].into());

    cluster.assert_no_hook_failed();
    cluster.assert_clean();
    cluster.signal("scheduler", Signal::TERM);
    cluster.wait_ended("scheduler");
    ctl.run(&["umount", &path]).assert_success();
}
