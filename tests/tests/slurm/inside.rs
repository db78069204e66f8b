//! Slurm itself keeps jobs waiting, as jobs with burst buffers: for their input before the start, for their results after the
//! end.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::Duration;

use ondeck_testbed::{Process, Signal, available, wait_until};
use rustix::process::kill_process;

use crate::aids::{LONG, SLOW, await_file, files, folder, give, program, script};
use crate::cluster::{Cluster, Setup, tree};
use crate::jobs::{Blocker, Gate, assert_passed, directives, note_source, says, wait_file, was_ram};
use crate::life::directory;
use crate::{scripts, shapes};

pub fn inside(setup: Setup) -> Cluster {
    Cluster::with(Setup { burst_buffers: true, ..setup })
}

impl Cluster {
    /// What squeue shows of a job: its state and the reason. Nothing once it has forgotten it.
    pub fn shown(&self, job: u32) -> String {
        let line = ["squeue", "--noheader", "--states=all", "--format=%T %r", "-j", &job.to_string()];
        self.slurm.client(&line).stdout.trim().to_owned()
    }

    #[track_caller]
    pub fn wait_shown(&self, job: u32, wanted: &str) {
        wait_until(LONG, &format!("squeue shows job {job} as {wanted}"), || {
            self.shown(job).starts_with(wanted)
        });
    }

    /// Slurm has no burst buffer any more.
    #[track_caller]
    pub fn assert_no_burst_buffer(&self) {
        wait_until(LONG, "Slurm has no burst buffer", || {
            !self.slurm.scontrol(&["show", "burstbuffer"]).stdout.contains("JobID=")
        });
    }

    /// Neither Slurm nor the scheduler has anything left.
    #[track_caller]
    pub fn assert_clean_inside(&self) {
        self.assert_clean();
        self.assert_no_burst_buffer();
        self.assert_no_hook_failed();
    }

    /// The same after a job was cancelled before it started. Of such a job Slurm 22.05 now and then ends its own teardown, which it
    /// logs, and keeps the burst buffer's entry until slurmctld is started anew (docs/admin.md); it has no other one.
    #[track_caller]
    pub fn assert_clean_after_cancel(&self) {
        self.assert_clean();
        wait_until(LONG, "Slurm has no burst buffer but of teardowns that it has ended itself", || {
            let shown = self.slurm.scontrol(&["show", "burstbuffer"]);
            let log = self.slurm.controller_log();
            let mut left = shown
                .assert_success()
                .stdout
                .split_whitespace()
                .filter_map(|word| word.strip_prefix("JobID="));
            left.all(|job| log.contains(&format!("teardown for JobId={job} terminated by slurmctld")))
        });
        self.assert_no_hook_failed();
    }
}

#[test]
fn a_job_waits_for_its_input_in_slurm_and_for_its_results_without_nodes() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let input = directory(alice, "in", &[("a", "alpha")]);
    let output = directory(alice, "out", &[("old", "old")]);
    let seen = alice.scratch.join("seen");
    let gate = Gate::of(alice, "run");
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_OUT_SIZE=1MiB\n{}{}{}cat {i}/a {o}/old > {o}/result\ntouch {}\n{}",
        directives(&[&input], &[&output]),
        note_source(&input, &seen),
        note_source(&output, &seen.with_extension("out")),
        seen.with_extension("done").display(),
        gate.line(),
        i = input.display(),
        o = output.display(),
    );
    let blocker = Blocker::new(&cluster, 4);
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2", "--exclusive"]);
    cluster.wait_rsa(job, "READY");
    // Nobody holds it.
    let state = cluster.shown(job);
    assert!(state.starts_with("PENDING") && !state.contains("Held"), "{state}");
    blocker.release();
    wait_file(&seen.with_extension("done"));
    assert!(!output.join("result").exists(), "it is in RAM");
    assert!(was_ram(&seen) && was_ram(&seen.with_extension("out")));
    gate.open();
    cluster.wait_done(job);
    assert_eq!(says(&output.join("result")), "alphaold");
    cluster.wait_shown(job, "COMPLETED");
    let wanted = [
        "ASSIGNED",
        "BOOTING",
        "STAGING_IN",
        "READY",
        "MOUNTING",
        "INUSE_BOTH",
        "UNMOUNTING",
        "STAGING_OUT",
        "TEARDOWN",
    ];
    assert_passed(&cluster.states(job), &wanted);
    assert_eq!(fs::read_dir(&output).unwrap().count(), 2);
    cluster.assert_quiet();
    cluster.assert_clean_inside();
}

#[test]
fn a_job_that_may_start_without_its_input_is_not_kept_waiting() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    for node in ["r1", "r2", "r3", "r4"] {
        cluster.ondeck(&["node", "drain", node, "--reason", "a test"]).assert_success();
    }
    let (content, output) = (files(2, 1000), folder(alice, "out", &BTreeMap::new()));
    let input = folder(alice, "in", &content);
    let lines = [format!("DATA_IN={}", input.display()), format!("DATA_OUT={}", output.display())];
    let body = format!("cp {}/* {}", input.display(), output.display());
    let job = cluster.submit(&script(alice, &lines, &body), 1);
    cluster.wait_shown(job, "COMPLETED");
    assert_eq!(tree(&output), content);
    for node in ["r1", "r2", "r3", "r4"] {
        cluster.ondeck(&["node", "resume", node]).assert_success();
    }
    cluster.assert_clean_inside();
}

#[test]
fn results_that_somebody_must_decide_on_keep_the_job_and_its_dependants_in_slurm() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let fails = program(alice, "stage-out", "#!/bin/sh\ntest -e $HOME/mended\n");
    let lines = [
        "NODES=1".to_owned(),
        format!("DATA_OUT={}", output.display()),
        format!("STAGE_OUT={}", fails.display()),
    ];
    let job =
        cluster.start_staged(&script(alice, &lines, &format!("echo result > {}/a", output.display())), 1);
    let after = [&format!("--dependency=afterburstbuffer:{job}"), "--nodes=1", "--output=/dev/null"];
    let dependant = cluster.slurm.submit(alice, "#!/bin/sh\ntrue\n", &after);
    cluster.wait_rsa(job, "HELD");
    cluster.wait_shown(job, "STAGE_OUT");
    // Its nodes are free for others.
    Blocker::new(&cluster, 4).release();
    wait_until(LONG, "the scheduler has told Slurm that they are kept", || {
        cluster.log_of(job).contains("was told that its results are kept")
    });
    assert!(cluster.shown(job).starts_with("STAGE_OUT") && cluster.shown(dependant).starts_with("PENDING"));
    // What is told once is remembered.
    cluster.kill("scheduler");
    cluster.start_scheduler();
    fs::write(alice.home.join("mended"), "").unwrap();
    cluster.ondeck(&["job", "retry", &job.to_string()]).assert_success();
    cluster.wait_done(job);
    cluster.wait_shown(job, "COMPLETED");
    cluster.wait_shown(dependant, "COMPLETED");
    cluster.assert_clean_inside();
}

#[test]
fn a_job_that_is_cancelled_in_any_phase_leaves_nothing_and_loses_nothing() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: SLOW.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(4, 2 << 20));
    let wait = ["WAIT=hold".to_owned(), format!("DATA_IN={}", input.display())];
    let blocker = Blocker::new(&cluster, 4);
    for state in ["STAGING_IN", "READY"] {
        let job = cluster.submit(&script(alice, &wait, "true"), 1);
        cluster.wait_rsa(job, state);
        cluster.slurm.cancel(job);
        cluster.wait_done(job);
        cluster.assert_clean_after_cancel();
    }
    blocker.release();
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("echo result > {}/a; tell wrote; await never", output.display());
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "wrote");
    cluster.slurm.cancel(job);
    cluster.wait_done(job);
    assert_eq!(says(&output.join("a")), "result");
    cluster.wait_shown(job, "CANCELLED");
    cluster.assert_clean();
    cluster.assert_no_hook_failed();
}

/// A job whose results are on their way to disk, which takes a while: what they are, and where they go.
fn one_that_is_staged_out(scheduler: &str) -> (Cluster, u32, BTreeMap<String, Vec<u8>>, PathBuf) {
    let cluster = inside(Setup { scheduler: format!("{SLOW}\n{scheduler}"), ..Setup::default() });
    let alice = cluster.user("alice");
    let (content, output) = (files(4, 2 << 20), folder(alice, "out", &BTreeMap::new()));
    let source = folder(alice, "source", &content);
    let body = format!("cp {}/* {}", source.display(), output.display());
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    cluster.wait_rsa(job, "STAGING_OUT");
    (cluster, job, content, output)
}

#[test]
fn ended_in_a_hurry_results_are_still_brought_home() {
    if !available() {
        return;
    }
    let (cluster, job, content, output) = one_that_is_staged_out("");
    cluster.wait_shown(job, "STAGE_OUT");
    cluster
        .slurm
        .client_as(cluster.user("alice"), &["scancel", "--hurry", &job.to_string()])
        .assert_success();
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.assert_clean_inside();
}

#[test]
fn a_job_whose_question_for_its_results_is_killed_leaves_slurm_when_they_are_home() {
    if !available() {
        return;
    }
    let (cluster, job, content, output) = one_that_is_staged_out("");
    let asks = |process: &Process| {
        let line = &process.command_line;
        line.iter().any(|word| word == "burst-buffer") && line.iter().any(|word| word == "data_out")
    };
    let controller = cluster.host("ctl");
    wait_until(LONG, "Slurm asks for its results", || controller.processes().iter().any(asks));
    for process in controller.processes().iter().filter(|process| asks(process)) {
        // It may have ended by itself.
        let _ = kill_process(process.pid, Signal::KILL);
    }
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.wait_shown(job, "COMPLETED");
    cluster.assert_clean_inside();
}

#[test]
fn where_the_site_says_so_results_of_a_job_that_is_ended_in_a_hurry_are_given_up() {
    if !available() {
        return;
    }
    let (cluster, job, content, output) = one_that_is_staged_out("hurry = \"abandon\"");
    cluster.wait_shown(job, "STAGE_OUT");
    cluster
        .slurm
        .client_as(cluster.user("alice"), &["scancel", "--hurry", &job.to_string()])
        .assert_success();
    wait_until(LONG, "nothing is left of it", || cluster.job(job).is_none());
    cluster.ondeck(&["wait", &job.to_string()]).assert_code(1).assert_says("abandoned");
    assert!(cluster.note(job).contains("scancel --hurry"), "{}", cluster.note(job));
    assert_ne!(tree(&output), content);
    cluster.assert_clean_inside();
}

#[test]
fn a_requeued_job_has_two_lives_whose_results_both_come_home() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!(
        "echo life > {o}/life-${{SLURM_RESTART_COUNT:-0}}; tell wrote-${{SLURM_RESTART_COUNT:-0}}; \
         [ -n \"$SLURM_RESTART_COUNT\" ] || await never",
        o = output.display()
    );
    let text = script(alice, &[format!("DATA_OUT={}", output.display())], &body);
    let job =
        cluster.slurm.submit(alice, &text, &["--nodes=1", "--exclusive", "--requeue", "--output=/dev/null"]);
    await_file(alice, "wrote-0");
    cluster.slurm.requeue(job);
    wait_until(LONG, "the first life's results are home", || output.join("life-0").exists());
    // Slurm lets it wait for two minutes.
    cluster.wait_shown(job, "PENDING");
    cluster.slurm.scontrol(&["update", &format!("JobId={job}"), "StartTime=now"]).assert_success();
    await_file(alice, "wrote-1");
    cluster.wait_shown(job, "COMPLETED");
    wait_until(LONG, "the second life's results are home", || output.join("life-1").exists());
    cluster.assert_clean_inside();
}

/// Slurm would never start a job again of whose former life a stage-out has failed; and what ends that would cancel the job.
#[test]
fn a_requeued_job_whose_former_results_must_be_decided_on_waits_for_that_and_is_not_cancelled() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: "stage_out_attempts = 1".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let fails = program(alice, "stage-out", "#!/bin/sh\ntest -e $HOME/mended && cp \"$1\"/* \"$2\"\n");
    let lines = [
        "WAIT=hold".to_owned(),
        "NODES=1".to_owned(),
        format!("DATA_OUT={}", output.display()),
        format!("STAGE_OUT={}", fails.display()),
    ];
    let body = format!(
        "life=${{SLURM_RESTART_COUNT:-0}}; echo life > {o}/life-$life; tell wrote-$life; \
         [ -n \"$SLURM_RESTART_COUNT\" ] || await never",
        o = output.display()
    );
    let options = ["--nodes=1", "--exclusive", "--requeue", "--output=/dev/null"];
    let job = cluster.slurm.submit(alice, &script(alice, &lines, &body), &options);
    await_file(alice, "wrote-0");
    cluster.slurm.requeue(job);
    let held = || {
        let status = cluster.status();
        let mut jobs = status["jobs"].as_array().unwrap().iter();
        jobs.any(|job| job["rsa_state"] == "HELD")
    };
    wait_until(LONG, "its former results are kept", held);
    // A look at the queue later, it is there still.
    cluster.wait_shown(job, "PENDING");
    fs::write(alice.home.join("mended"), "").unwrap();
    let retried = || cluster.ondeck(&["job", "retry", &format!("{job}.0")]).success();
    wait_until(LONG, "they may be brought home", retried);
    wait_until(LONG, "they are home", || output.join("life-0").exists());
    cluster.wait_shown(job, "PENDING");
    cluster.slurm.scontrol(&["update", &format!("JobId={job}"), "StartTime=now"]).assert_success();
    await_file(alice, "wrote-1");
    cluster.wait_shown(job, "COMPLETED");
    wait_until(LONG, "the second life's results are home", || output.join("life-1").exists());
    cluster.assert_clean_inside();
}

#[test]
fn a_job_that_is_cancelled_before_it_starts_again_gives_up_nothing_of_its_former_life() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: format!("{SLOW}\nhurry = \"abandon\""), ..Setup::default() });
    let alice = cluster.user("alice");
    let (content, output) = (files(4, 2 << 20), folder(alice, "out", &BTreeMap::new()));
    let source = folder(alice, "source", &content);
    let body = format!("cp {}/* {}; tell wrote; await never", source.display(), output.display());
    let lines = ["WAIT=hold".to_owned(), format!("DATA_OUT={}", output.display())];
    let options = ["--nodes=1", "--exclusive", "--requeue", "--output=/dev/null"];
    let job = cluster.slurm.submit(alice, &script(alice, &lines, &body), &options);
    await_file(alice, "wrote");
    cluster.slurm.requeue(job);
    cluster.wait_rsa(job, "STAGING_OUT");
    cluster.wait_shown(job, "PENDING");
    cluster.slurm.client_as(alice, &["scancel", &job.to_string()]).assert_success();
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.assert_clean_after_cancel();
}

#[test]
fn a_stage_in_script_that_fails_keeps_its_job_from_starting_with_the_reason() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: "attempts = 1\n".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 100));
    let fails = program(alice, "stage-in", "#!/bin/sh\necho no such case >&2\nexit 3\n");
    let lines = [format!("DATA_IN={}", input.display()), format!("STAGE_IN={}", fails.display())];
    let job = cluster.submit(&script(alice, &lines, "tell started"), 1);
    wait_until(LONG, "Slurm holds it", || cluster.slurm.job(job)["Priority"] == "0");
    let why = cluster.slurm.client(&["squeue", "--noheader", "--format=%R", "-j", &job.to_string()]).stdout;
    assert!(why.contains("failed with exit code 3") && !why.contains("works on disk"), "{why}");
    assert!(!alice.scratch.join("started").exists());
    assert!(cluster.show(job).contains("stage-in"), "{}", cluster.show(job));
    cluster.ondeck(&["wait", &job.to_string()]).assert_code(1).assert_says("failed with exit code 3");
    // Slurm would never use what is made for it.
    let again = cluster.ondeck(&["job", "retry", &job.to_string()]);
    again.assert_code(2);
    assert!(again.stderr.contains("cancel the job, and submit it anew"), "{again:?}");
    cluster.slurm.cancel(job);
    cluster.wait_done(job);
    cluster.assert_clean_after_cancel();
}

#[test]
fn the_reason_of_a_failing_script_stays_though_slurm_is_told_of_it_slowly() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: "attempts = 1\n".into(), ..Setup::default() });
    // Every change of a job takes a second, and takes the reason away for which it waits.
    let slow = cluster.bed.dir().join("slow");
    fs::create_dir(&slow).unwrap();
    for name in ["squeue", "scancel", "sacctmgr", "sacct", "sinfo"] {
        symlink(format!("/usr/bin/{name}"), slow.join(name)).unwrap();
    }
    let wrapper = "#!/bin/sh\n[ \"$1\" != update ] || sleep 1\nexec /usr/bin/scontrol \"$@\"\n";
    fs::write(slow.join("scontrol"), wrapper).unwrap();
    fs::set_permissions(slow.join("scontrol"), fs::Permissions::from_mode(0o755)).unwrap();
    let config = cluster.bed.dir().join("ondeck.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{text}bin_dir = \"{}\"\n", slow.display())).unwrap();
    cluster.kill("scheduler");
    cluster.start_scheduler();
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 100));
    let fails = program(alice, "stage-in", "#!/bin/sh\necho no such case >&2\nexit 3\n");
    let lines = [format!("DATA_IN={}", input.display()), format!("STAGE_IN={}", fails.display())];
    let job = cluster.submit(&script(alice, &lines, "true"), 1);
    wait_until(LONG, "Slurm holds it, and its user was told", || {
        let job = cluster.slurm.job(job);
        job["Priority"] == "0" && job.get("AdminComment").is_some_and(|comment| comment.contains("exit"))
    });
    let why = cluster.slurm.client(&["squeue", "--noheader", "--format=%R", "-j", &job.to_string()]).stdout;
    assert!(why.contains("failed with exit code 3"), "{why}");
    cluster.slurm.cancel(job);
    // Until the scheduler has seen that, the job waits for somebody to decide, and `ondeck wait` says so.
    wait_until(LONG, "the scheduler has seen its end", || cluster.show(job).contains(", all done"));
    cluster.wait_done(job);
    cluster.assert_clean_after_cancel();
}

#[test]
fn daemons_that_are_killed_in_any_phase_lose_no_job_and_no_result() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: SLOW.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let content = files(4, 2 << 20);
    let (input, output) = (folder(alice, "in", &content), folder(alice, "out", &BTreeMap::new()));
    let lines = [
        "WAIT=hold".to_owned(),
        "OUT_SIZE=16MiB".to_owned(),
        format!("DATA_IN={}", input.display()),
        format!("DATA_OUT={}", output.display()),
    ];
    let body = format!("cp {}/* {}; tell copied; await end", input.display(), output.display());
    let blocker = Blocker::new(&cluster, 4);
    let job = cluster.submit(&script(alice, &lines, &body), 2);
    let scheduler = || {
        cluster.kill("scheduler");
        cluster.start_scheduler();
    };
    cluster.wait_rsa(job, "STAGING_IN");
    scheduler();
    cluster.wait_rsa(job, "READY");
    scheduler();
    blocker.release();
    await_file(alice, "copied");
    scheduler();
    give(alice, "end");
    cluster.wait_rsa(job, "STAGING_OUT");
    scheduler();
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.wait_shown(job, "COMPLETED");
    cluster.assert_clean_inside();
}

#[test]
fn a_controller_that_is_killed_asks_again_and_is_answered_the_same() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: SLOW.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let (content, output) = (files(4, 2 << 20), folder(alice, "out", &BTreeMap::new()));
    let source = folder(alice, "source", &content);
    let body = format!("cp {}/* {}; tell copied; await end", source.display(), output.display());
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "copied");
    cluster.slurm.wait_saved(job);
    cluster.slurm.kill_controller();
    cluster.slurm.start_controller();
    // The state of a job that has ended is saved with those of others.
    let held = cluster.slurm.submit(alice, "#!/bin/sh\ntrue\n", &["--hold", "--output=/dev/null"]);
    give(alice, "end");
    cluster.wait_rsa(job, "STAGING_OUT");
    cluster.slurm.wait_saved(held);
    cluster.slurm.kill_controller();
    cluster.slurm.start_controller();
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    wait_until(LONG, "Slurm has ended it", || !cluster.shown(job).contains("STAGE_OUT"));
    cluster.slurm.cancel(held);
    cluster.assert_clean_inside();
}

#[test]
fn a_lost_journal_does_not_make_results_count_as_home() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("echo result > {}/a; tell wrote; await end", output.display());
    let lines = ["NODES=1".to_owned(), format!("DATA_OUT={}", output.display())];
    let job = cluster.start_staged(&script(alice, &lines, &body), 1);
    await_file(alice, "wrote");
    let node = cluster.rsa_nodes(job).remove(0);
    cluster.kill("scheduler");
    cluster.kill(&node);
    fs::remove_dir_all(cluster.bed.dir().join("scheduler")).unwrap();
    cluster.take_over();
    give(alice, "end");
    cluster.wait_shown(job, "STAGE_OUT");
    let slurm = cluster.slurm.client(&["id", "-u", "slurm"]).stdout.trim().parse::<u32>().unwrap();
    let number = job.to_string();
    let asked = || {
        let controller = cluster.host("ctl").as_user(slurm, slurm);
        cluster.ondeck_on(&controller, &["burst-buffer", "data_out", &number, "--limit", "3"]).stdout
    };
    assert!(asked().contains("ondeck: later: "), "{}", asked());
    assert!(cluster.shown(job).starts_with("STAGE_OUT"));
    // Its results are found, and are Slurm's to wait for until somebody has decided.
    cluster.start_agent(&node);
    cluster.wait_rsa(job, "HELD");
    wait_until(LONG, "they may be brought home", || cluster.ondeck(&["job", "retry", &number]).success());
    cluster.wait_done(job);
    assert_eq!(says(&output.join("a")), "result");
    cluster.wait_shown(job, "COMPLETED");
    cluster.assert_clean_inside();
}

/// A job of alice's that notes `where` its input is, and copies it, with that in RAM, while all compute nodes are taken; with the input
/// and the directory that it is copied to.
fn one_that_is_ready(cluster: &Cluster) -> (Blocker, u32, BTreeMap<String, Vec<u8>>, PathBuf) {
    let alice = cluster.user("alice");
    let (content, output) = (files(2, 1000), folder(alice, "copied", &BTreeMap::new()));
    let input = folder(alice, "in", &content);
    let lines = ["WAIT=hold".to_owned(), format!("DATA_IN={}", input.display())];
    let body = format!(
        "findmnt -n -o SOURCE -T {i} > {s}/where; cp {i}/* {o}",
        i = input.display(),
        s = alice.scratch.display(),
        o = output.display()
    );
    let blocker = Blocker::new(cluster, 4);
    let job = cluster.submit(&script(alice, &lines, &body), 1);
    cluster.wait_rsa(job, "READY");
    (blocker, job, content, output)
}

#[test]
fn what_is_staged_outlives_a_restart_of_the_controller() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let (blocker, job, content, output) = one_that_is_ready(&cluster);
    cluster.slurm.wait_saved(job);
    cluster.slurm.kill_controller();
    cluster.slurm.start_controller();
    blocker.release();
    // A minute later it is set up again.
    wait_until(LONG, "the job has run", || cluster.shown(job).starts_with("COMPLETED"));
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    assert!(was_ram(&alice.scratch.join("where")));
    assert_eq!(
        cluster.states(job).iter().filter(|state| *state == "BOOTING").count(),
        1,
        "{:?}",
        cluster.states(job)
    );
    cluster.assert_clean_inside();
}

#[test]
fn a_job_whose_input_is_lost_before_it_has_started_waits_until_it_is_there_again() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let (blocker, job, content, output) = one_that_is_ready(&cluster);
    let node = cluster.rsa_nodes(job)[0].clone();
    cluster.crash(&node);
    let says = || cluster.log_of(job).contains("held until its input is in RAM again");
    wait_until(LONG, "it is held", says);
    blocker.release();
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    assert!(was_ram(&alice.scratch.join("where")));
    assert_eq!(
        cluster.states(job).iter().filter(|state| *state == "READY").count(),
        2,
        "{:?}",
        cluster.states(job)
    );
    cluster.wait_shown(job, "COMPLETED");
    cluster.boot(&node);
    cluster.wait_lends_all(&node);
    cluster.assert_clean_inside();
}

#[test]
fn while_ondeck_can_not_be_run_a_job_waits_for_its_input_or_starts_on_disk() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let env = cluster.slurm.conf().with_file_name("ondeck.env");
    let mended = fs::read_to_string(&env).unwrap();
    let submit = |wait: &str| {
        let output = folder(alice, &format!("copied-{wait}"), &BTreeMap::new());
        let input = folder(alice, &format!("in-{wait}"), &files(2, 1000));
        let where_ = alice.scratch.join(format!("where-{wait}"));
        let lines = [format!("WAIT={wait}"), format!("DATA_IN={}", input.display())];
        let (i, o) = (input.display(), output.display());
        let body = format!("findmnt -n -o SOURCE -T {i} > {}; cp {i}/* {o}", where_.display());
        (cluster.submit(&script(alice, &lines, &body), 1), where_, output)
    };
    fs::write(&env, mended.replace("ONDECK=/", "ONDECK=/nowhere/")).unwrap();
    let ((waits, its_input, copied), (starts, on_disk, from_disk)) = (submit("hold"), submit("disk"));
    wait_until(LONG, "one starts on disk", || tree(&from_disk) == files(2, 1000));
    assert!(!was_ram(&on_disk), "{}", says(&on_disk));
    let shown = cluster.shown(waits);
    assert!(shown.starts_with("PENDING") && !its_input.exists(), "{shown}");
    fs::write(&env, mended).unwrap();
    cluster.wait_done(waits);
    assert!(was_ram(&its_input), "{}", says(&its_input));
    assert_eq!(tree(&copied), files(2, 1000));
    for job in [waits, starts] {
        cluster.wait_shown(job, "COMPLETED");
    }
    cluster.assert_clean();
    cluster.assert_no_burst_buffer();
}

#[test]
fn a_job_whose_input_nobody_can_show_is_back_in_the_queue_and_has_it_when_it_is_released() {
    /// For so long Slurm starts no job again that it has put back into its queue.
    const BEGINS_AGAIN: Duration = Duration::from_secs(120);
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let (content, output) = (files(2, 1000), folder(alice, "copied", &BTreeMap::new()));
    let input = folder(alice, "in", &content);
    let its_input = alice.scratch.join("where");
    let makes = program(alice, "stage-in", "#!/bin/sh -e\ncp -R $2/. $1/\n");
    let lines = [format!("DATA_IN={}", input.display()), format!("STAGE_IN={}", makes.display())];
    let (i, o) = (input.display(), output.display());
    let body = format!("findmnt -n -o SOURCE -T {i} > {}; cp {i}/* {o}", its_input.display());
    let blocker = Blocker::new(&cluster, 4);
    let job = cluster.submit(&script(alice, &lines, &body), 1);
    cluster.wait_rsa(job, "READY");
    cluster.kill("scheduler");
    blocker.release();
    wait_until(LONG, "it is back in the queue", || {
        let shown = cluster.slurm.scontrol(&["show", "job", &job.to_string()]).stdout;
        shown.contains("JobState=PENDING") && shown.contains("must not start without its input")
    });
    assert!(!its_input.exists(), "{}", says(&its_input));
    cluster.start_scheduler();
    cluster.slurm.scontrol(&["release", &job.to_string()]).assert_success();
    wait_until(LONG + BEGINS_AGAIN, "it has run", || cluster.shown(job).starts_with("COMPLETED"));
    assert!(was_ram(&its_input), "{}", says(&its_input));
    assert_eq!(tree(&output), content);
    cluster.assert_clean();
    cluster.assert_no_burst_buffer();
}

#[test]
fn agents_that_are_killed_in_any_phase_lose_no_job_and_no_result() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: SLOW.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let content = files(4, 2 << 20);
    let (input, output) = (folder(alice, "in", &content), folder(alice, "out", &BTreeMap::new()));
    let lines = [
        "WAIT=hold".to_owned(),
        "OUT_SIZE=16MiB".to_owned(),
        format!("DATA_IN={}", input.display()),
        format!("DATA_OUT={}", output.display()),
    ];
    let body = format!("cp {}/* {}; tell copied; await end", input.display(), output.display());
    let blocker = Blocker::new(&cluster, 4);
    let job = cluster.submit(&script(alice, &lines, &body), 2);
    let kill_agents = || {
        let compute = cluster.slurm.compute().iter().map(|node| node.name().to_owned());
        for node in cluster.rsa_nodes(job).into_iter().chain(compute) {
            cluster.kill(&node);
            cluster.start_agent(&node);
        }
    };
    cluster.wait_rsa(job, "STAGING_IN");
    kill_agents();
    cluster.wait_rsa(job, "READY");
    kill_agents();
    blocker.release();
    await_file(alice, "copied");
    kill_agents();
    give(alice, "end");
    cluster.wait_rsa(job, "STAGING_OUT");
    kill_agents();
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.wait_shown(job, "COMPLETED");
    cluster.assert_clean_inside();
}

#[test]
fn a_job_that_makes_room_for_another_and_one_whose_time_is_over_bring_their_results_home() {
    if !available() {
        return;
    }
    let slurm = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n\
                 PartitionName=urgent Nodes=c[1-4] PriorityTier=10 MaxTime=INFINITE State=UP\n";
    let cluster = inside(Setup { slurm: slurm.into(), ..Setup::default() });
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!(
        "life=${{SLURM_RESTART_COUNT:-0}}; echo life > {o}/life-$life; tell wrote-$life; await never",
        o = output.display()
    );
    let text = script(alice, &["WAIT=hold".to_owned(), format!("DATA_OUT={}", output.display())], &body);
    let options = ["--nodes=1", "--exclusive", "--requeue", "--output=/dev/null"];
    let job = cluster.slurm.submit(alice, &text, &options);
    await_file(alice, "wrote-0");
    assert!(!output.join("life-0").exists(), "it is in RAM");
    let gate = Gate::of(bob, "urgent");
    let urgent = format!("#!/bin/sh\n{}", gate.line());
    let options = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null"];
    let urgent = cluster.slurm.submit(bob, &urgent, &options);
    cluster.wait_shown(urgent, "RUNNING");
    wait_until(LONG, "the first life's results are home", || output.join("life-0").exists());
    gate.open();
    cluster.wait_shown(job, "PENDING");
    // Slurm lets it wait for two minutes.
    cluster.slurm.scontrol(&["update", &format!("JobId={job}"), "StartTime=now"]).assert_success();
    await_file(alice, "wrote-1");
    assert!(!output.join("life-1").exists(), "it is in RAM");
    // Limits are whole minutes; slurmctld looks at them every half a minute.
    cluster.slurm.scontrol(&["update", &format!("JobId={job}"), "TimeLimit=0:01"]).assert_success();
    wait_until(Duration::from_secs(150), "its time is over", || cluster.shown(job).starts_with("TIMEOUT"));
    assert_eq!(says(&output.join("life-1")), "life");
    cluster.assert_clean_inside();
}

#[test]
fn scripts_unpack_and_results_are_packed_as_from_outside() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    scripts::unpack_and_pack(&cluster);
    shapes::as_one_archive(&cluster);
    cluster.assert_clean_inside();
}

#[test]
fn each_element_of_an_array_is_staged_by_itself() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let (content, output) = (files(1, 1000), folder(alice, "out", &BTreeMap::new()));
    let input = folder(alice, "in", &content);
    let lines = ["WAIT=hold".to_owned(), "NODES=1".to_owned(), format!("DATA_IN={}", input.display())];
    let body = format!(
        "findmnt -n -o SOURCE -T {i} > {o}/where-$SLURM_ARRAY_TASK_ID; cp {i}/part-0 {o}/copy-$SLURM_ARRAY_TASK_ID",
        i = input.display(),
        o = output.display()
    );
    let options = ["--nodes=1", "--exclusive", "--array=1-4", "--output=/dev/null"];
    let job = cluster.slurm.submit(alice, &script(alice, &lines, &body), &options);
    wait_until(LONG, "all elements have run", || {
        let shown = cluster.shown(job);
        shown.lines().count() == 4 && shown.lines().all(|line| line.starts_with("COMPLETED"))
    });
    for element in 1..=4 {
        assert_eq!(fs::read(output.join(format!("copy-{element}"))).unwrap(), content["part-0"]);
        assert!(was_ram(&output.join(format!("where-{element}"))), "element {element}");
    }
    cluster.assert_clean_inside();
}

#[test]
fn only_the_user_of_slurmctld_on_its_host_may_ask() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 100));
    let lines = ["WAIT=hold".to_owned(), format!("DATA_IN={}", input.display())];
    let blocker = Blocker::new(&cluster, 4);
    let job = cluster.submit(&script(alice, &lines, "true"), 1).to_string();
    cluster.wait_rsa(job.parse().unwrap(), "READY");
    let slurm = cluster.slurm.client(&["id", "-u", "slurm"]).stdout.trim().parse::<u32>().unwrap();
    let ctl = cluster.host("ctl");
    for (host, who) in [
        (ctl.log_in(alice), "alice on the controller"),
        (cluster.host("c1").as_user(slurm, slurm), "slurm elsewhere"),
        (cluster.host("c1").log_in(alice), "alice elsewhere"),
    ] {
        let ran = cluster.ondeck_on(&host, &["burst-buffer", "teardown", &job]);
        assert!(ran.stdout.contains("ondeck: later: ") && ran.stdout.contains("may not"), "{who}: {ran:?}");
    }
    assert_eq!(cluster.job(job.parse().unwrap()).unwrap()["rsa_state"], "READY");
    // Nor may that user do anything else.
    let controller = ctl.as_user(slurm, slurm);
    cluster.ondeck_on(&controller, &["job", "abandon", &job, "--yes"]).assert_code(2);
    cluster.ondeck_on(&controller, &["node", "drain", "r1", "--reason", "a test"]).assert_code(2);
    assert!(
        cluster.ondeck_on(&controller, &["burst-buffer", "data_in", &job]).stdout.contains("ondeck: done: ")
    );
    blocker.release();
    cluster.wait_done(job.parse().unwrap());
    cluster.wait_shown(job.parse().unwrap(), "COMPLETED");
    cluster.assert_clean_inside();
}

/// From 24.05 on it calls functions again and again which say whether it is over.
#[test]
fn slurm_polls_for_input_and_results() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { rsa_nodes: 1, ..Setup::default() });
    let conf = cluster.slurm.client(&["sh", "-c", "dirname $SLURM_CONF"]).stdout;
    let path = PathBuf::from(conf.trim()).join("burst_buffer.lua");
    let text = fs::read_to_string(&path).unwrap();
    // Each poll is noted.
    let polls = cluster.bed.dir().join("polls");
    let poll = format!(
        "\nslurm.SLURM_BB_BUSY = 'BUSY'\n\
         for _, name in ipairs({{ 'data_in', 'data_out' }}) do\n\
             local begins, test = _G['slurm_bb_' .. name], _G['slurm_bb_test_' .. name]\n\
             _G['slurm_bb_' .. name] = function(...)\n\
                 local status, message = begins(...)\n\
                 while status == slurm.SUCCESS do\n\
                     status, message = test(...)\n\
                     local file = io.open('{}', 'a')\n\
                     file:write(name, ' ', message, '\\n')\n\
                     file:close()\n\
                     if message ~= slurm.SLURM_BB_BUSY then break end\n\
                 end\n\
                 return status, message\n\
             end\n\
         end\n",
        polls.display()
    );
    fs::write(&polls, "").unwrap();
    fs::set_permissions(&polls, fs::Permissions::from_mode(0o666)).unwrap();
    fs::write(&path, text + &poll).unwrap();
    let alice = cluster.user("alice");
    cluster.lend(false);
    let content = files(2, 100_000);
    let (input, output) = (folder(alice, "in", &content), folder(alice, "out", &BTreeMap::new()));
    let lines = [
        "WAIT=hold".to_owned(),
        "OUT_SIZE=1MiB".to_owned(),
        format!("DATA_IN={}", input.display()),
        format!("DATA_OUT={}", output.display()),
    ];
    let seen = alice.scratch.join("seen");
    let body = format!("{}cp {}/* {}", note_source(&input, &seen), input.display(), output.display());
    let job = cluster.submit(&script(alice, &lines, &body), 1);
    wait_until(LONG, "it is polled for its input", || {
        fs::read_to_string(&polls).unwrap().matches("data_in BUSY").count() > 1
    });
    cluster.wait_shown(job, "PENDING BurstBufferStageIn");
    cluster.lend(true);
    cluster.wait_shown(job, "COMPLETED");
    assert!(was_ram(&seen));
    assert_eq!(tree(&output), content);
    let polled = fs::read_to_string(&polls).unwrap();
    assert!(polled.lines().any(|line| line.starts_with("data_out") && !line.contains("BUSY")), "{polled}");
    cluster.assert_clean_inside();
}

/// Slurm looks at its queue once an hour here, unless something has changed.
#[test]
fn slurm_looks_at_its_queue_once_the_input_is_there() {
    if !available() {
        return;
    }
    let pace = "SchedulerParameters=sched_interval=3600,bf_interval=3600,batch_sched_delay=1,bf_continue";
    let cluster = inside(Setup { slurm: pace.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 1000));
    for wait in ["hold", "disk"] {
        let lines = [format!("WAIT={wait}"), format!("DATA_IN={}", input.display())];
        let job = cluster.submit(&script(alice, &lines, "true"), 1);
        cluster.wait_shown(job, "COMPLETED");
    }
    cluster.assert_clean_inside();
}

#[test]
fn a_job_that_reads_results_starts_when_they_are_on_disk() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: SLOW.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let (content, output) = (files(4, 2 << 20), folder(alice, "out", &BTreeMap::new()));
    let source = folder(alice, "source", &content);
    let body = format!("await go; cp {}/* {}", source.display(), output.display());
    let lines = ["NODES=1".to_owned(), format!("DATA_OUT={}", output.display())];
    let producer = cluster.start_staged(&script(alice, &lines, &body), 1);
    for (wait, name) in [("disk", "first"), ("hold", "second")] {
        let copied = folder(alice, name, &BTreeMap::new());
        let lines = [format!("WAIT={wait}"), "NODES=1".to_owned(), format!("DATA_IN={}", output.display())];
        let body = format!("cp {}/* {}; tell {name}-done", output.display(), copied.display());
        let after =
            [&format!("--dependency=afterok:{producer}"), "--nodes=1", "--exclusive", "--output=/dev/null"];
        cluster.slurm.submit(alice, &script(alice, &lines, &body), &after);
    }
    give(alice, "go");
    for name in ["first", "second"] {
        await_file(alice, &format!("{name}-done"));
        assert_eq!(tree(&alice.scratch.join(name)), content, "{name}");
    }
    cluster.wait_done(producer);
    cluster.assert_clean_inside();
}

#[test]
fn a_job_is_not_kept_waiting_for_its_input_for_longer_than_the_limit() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { limits: "hold = \"3s\"".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    for node in ["r1", "r2", "r3", "r4"] {
        cluster.ondeck(&["node", "drain", node, "--reason", "a test"]).assert_success();
    }
    let (content, output) = (files(1, 1000), folder(alice, "copied", &BTreeMap::new()));
    let input = folder(alice, "in", &content);
    let lines = ["WAIT=hold".to_owned(), format!("DATA_IN={}", input.display())];
    let body = format!("cp {}/* {}", input.display(), output.display());
    let job = cluster.submit(&script(alice, &lines, &body), 1);
    cluster.wait_shown(job, "PENDING BurstBufferStageIn");
    cluster.wait_shown(job, "COMPLETED");
    assert_eq!(tree(&output), content);
    assert!(cluster.note(job).contains("no RSA nodes for it within 3 s"), "{}", cluster.note(job));
    for node in ["r1", "r2", "r3", "r4"] {
        cluster.ondeck(&["node", "resume", node]).assert_success();
    }
    cluster.assert_clean_inside();
}

#[test]
fn doctor_has_no_complaint_of_burst_buffers_that_are_set_up_and_one_of_each_that_is_not() {
    if !available() {
        return;
    }
    let slurm = "BatchStartTimeout=40\nPrologEpilogTimeout=60\n".to_owned();
    let cluster = inside(Setup { rsa_nodes: 2, compute_nodes: 2, slurm, ..Setup::default() });
    let complaints = || -> Vec<String> {
        let ran = cluster.ondeck(&["doctor", "--slurm", "--json"]);
        let found: Vec<serde_json::Value> = serde_json::from_str(&ran.stdout).unwrap();
        let wrong = found.iter().filter(|finding| finding["state"] != "ok");
        wrong.map(|finding| finding["what"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(complaints(), [""; 0]);
    let conf = cluster.slurm.conf().parent().unwrap().join("burst_buffer.conf");
    fs::write(&conf, "Directive=BB\nFlags=TeardownFailure\nStageInTimeout=60\n").unwrap();
    cluster.slurm.kill_controller();
    cluster.slurm.start_controller();
    assert_eq!(complaints(), ["burst_buffer.conf", "TeardownFailure", "StageInTimeout", "StageOutTimeout"]);
}

#[test]
fn a_path_that_slurm_would_take_for_a_capacity_is_refused_at_submission() {
    if !available() {
        return;
    }
    let cluster = inside(Setup::default());
    let alice = cluster.user("alice");
    let input = folder(alice, "capacity=5", &BTreeMap::new());
    let text = script(alice, &[format!("DATA_IN={}", input.display())], "true");
    let ran = cluster.slurm.try_submit(alice, &text, &["--nodes=1"]);
    assert!(!ran.success() && ran.stderr.contains("use a path without it"), "{ran:?}");
    cluster.assert_clean_inside();
}
