//! How jobs end, and how they are held: nothing is taken from what still runs, and no hold or place in the queue outlives
//! its reason.

use std::collections::BTreeMap;
use std::fs;

use ondeck_testbed::{available, wait_until};

use crate::aids::{LONG, SLOW, await_file, files, folder, give, program, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};
use crate::jobs::{Blocker, assert_passed, note_source, says, was_ram};

#[test]
fn what_a_job_saves_when_it_is_told_to_end_is_brought_home() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { slurm: "KillWait=30".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    // On one node the job ends at once. On the other it takes its time, in which that one's Epilog runs. Slurm ends the
    // children before the shell, which must not take that for its own end.
    let step = program(
        alice,
        "step",
        &format!(
            "#!/bin/sh\n\
             trap '[ $SLURM_NODEID = 0 ] || sleep 4; echo saved > {output}/$SLURM_NODEID; \
                   echo $? > {scratch}/code-$SLURM_NODEID; exit 0' TERM\n\
             : > {scratch}/runs-$SLURM_NODEID\nwhile :; do sleep 0.1; done\n",
            output = output.display(),
            scratch = alice.scratch.display()
        ),
    );
    let body = format!("srun --ntasks-per-node=1 {}", step.display());
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "runs-0");
    await_file(alice, "runs-1");
    cluster.slurm.cancel(job);
    cluster.wait_done(job);
    for node in ["0", "1"] {
        let code = fs::read_to_string(alice.scratch.join(format!("code-{node}")));
        assert_eq!(code.unwrap(), "0\n", "what the task {node} got for saving");
        assert_eq!(tree(&output).get(node), Some(&b"saved\n".to_vec()), "{}", cluster.show(job));
    }
    assert_passed(&cluster.states(job), &["INUSE_OUT", "UNMOUNTING", "STAGING_OUT", "DESTROYED"]);
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_ram_disk_that_was_never_shown_brings_nothing_home() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { shared_nodes: false, ..Setup::default() });
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let output = folder(alice, "out", &BTreeMap::from([("old".into(), b"old".to_vec())]));
    let saves = program(alice, "saves", "#!/bin/sh -e\n: > \"$2/script-ran\"\ncp -R \"$1/.\" \"$2/\"\n");
    let text = script(
        alice,
        &[format!("DATA_OUT={}", output.display()), format!("STAGE_OUT={}", saves.display())],
        &format!("echo new > {}/old\ntell written\nawait go", output.display()),
    );
    // Somebody else is on the node, who would see it.
    let other = cluster.slurm.submit(
        bob,
        "#!/bin/sh\nwhile :; do sleep 0.1; done\n",
        &["--nodelist=c1", "--ntasks=1", "--output=/dev/null"],
    );
    cluster.slurm.wait_state(other, "RUNNING", DEADLINE);
    let blocker = Blocker::on(&cluster, "c2,c3,c4");
    let job = cluster.slurm.submit(
        alice,
        &text,
        &["--nodelist=c1", "--ntasks=1", "--begin=now", "--output=/dev/null"],
    );
    cluster.slurm.wait_state(job, "RUNNING", DEADLINE);
    await_file(alice, "written");
    cluster.wait_note(job, "ask for nodes of your own");
    wait_until(DEADLINE, "its RSA nodes are free", || {
        cluster.job(job).is_none_or(|job| job["rsa_nodes"].as_array().unwrap().is_empty())
    });
    assert!(!cluster.states(job).iter().any(|state| state == "STAGING_OUT"), "{}", cluster.show(job));
    give(alice, "go");
    cluster.wait_done(job);
    assert_eq!(tree(&output), BTreeMap::from([("old".into(), b"new\n".to_vec())]));
    cluster.slurm.cancel(other);
    blocker.release();
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_job_that_depends_on_another_is_staged_after_it_has_ended() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let data = folder(alice, "data", &BTreeMap::from([("value".into(), b"of last week".to_vec())]));
    let other = folder(alice, "other", &files(1, 1000));
    let hold = |dir: &std::path::Path| [format!("DATA_IN={}", dir.display()), "WAIT=hold".to_owned()];
    let producer = cluster.slurm.submit(
        alice,
        &script(alice, &[], &format!("await go\necho of today > {}/value", data.display())),
        &["--nodes=1", "--output=/dev/null"],
    );
    cluster.slurm.wait_state(producer, "RUNNING", DEADLINE);
    let (place, seen) = (alice.scratch.join("where"), alice.scratch.join("seen"));
    let consumer = cluster.slurm.submit(
        alice,
        &script(
            alice,
            &hold(&data),
            &format!("{}cp {}/value {}", note_source(&data, &place), data.display(), seen.display()),
        ),
        &[&format!("--dependency=afterok:{producer}"), "--nodes=1", "--output=/dev/null"],
    );
    // One that was submitted later and depends on nothing is staged and runs meanwhile.
    let quick = cluster.slurm.submit(
        alice,
        &script(alice, &hold(&other), "true"),
        &["--nodes=1", "--output=/dev/null"],
    );
    cluster.wait_done(quick);
    assert!(cluster.job(consumer).is_none(), "{}", cluster.show(consumer));
    give(alice, "go");
    cluster.slurm.wait_state(consumer, "COMPLETED", LONG);
    cluster.wait_done(consumer);
    assert_eq!(fs::read(&seen).unwrap(), b"of today\n");
    assert!(was_ram(&place), "{}", says(&place));
    cluster.assert_quiet();
    cluster.assert_clean();
}

/// A job of alice's on one node that depends on another one.
#[track_caller]
fn dependant(cluster: &Cluster, kind: &str, on: u32, script: &str) -> u32 {
    let dependency = format!("--dependency={kind}:{on}");
    cluster.slurm.submit(cluster.user("alice"), script, &[&dependency, "--nodes=1", "--output=/dev/null"])
}

/// Waits until a job is held until the results of another one are on disk.
#[track_caller]
fn wait_held_for(cluster: &Cluster, job: u32, other: u32) {
    let says = format!("results of job {other}");
    cluster.slurm.wait_job(job, "is held for results", DEADLINE, |job| {
        job["Priority"] == "0" && job.get("AdminComment").is_some_and(|text| text.contains(&says))
    });
}

#[test]
fn a_job_that_depends_on_one_with_results_starts_when_they_are_on_disk() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: SLOW.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let (output, other) = (folder(alice, "out", &BTreeMap::new()), folder(alice, "other", &files(1, 1000)));
    let (from, to) = (format!("DATA_IN={}", output.display()), format!("DATA_OUT={}", output.display()));
    let value = output.join("value");
    let write = format!("await go\nhead -c 16777216 /dev/urandom > {}", value.display());
    let producer = cluster.start_staged(&script(alice, &["NODES=1".into(), to.clone()], &write), 1);

    let copy = |name: &str| {
        let to = alice.scratch.join(name);
        (format!("cp {} {}", value.display(), to.display()), to)
    };
    let ((reads, read), (writes, written)) = (copy("read"), copy("written"));
    let reader = dependant(&cluster, "afterok", producer, &script(alice, &[from], &reads));
    let writer =
        dependant(&cluster, "afterany", producer, &script(alice, &[to, "WAIT=disk".into()], &writes));
    // What needs nothing of it is left alone.
    let elsewhere = [format!("DATA_IN={}", other.display())];
    let elsewhere = dependant(&cluster, "afterok", producer, &script(alice, &elsewhere, "true"));
    let plain = dependant(&cluster, "afterok", producer, "#!/bin/sh\n");
    for job in [reader, writer] {
        wait_held_for(&cluster, job, producer);
    }
    for job in [elsewhere, plain] {
        assert_ne!(cluster.slurm.job(job)["Priority"], "0");
    }
    wait_until(DEADLINE, "whoever asks is told that it is held", || {
        let shown = cluster.ondeck(&["job", "show", &reader.to_string()]);
        shown.code() == Some(2) && shown.stderr.contains("is held, and nothing is done for it yet")
    });
    give(alice, "go");
    cluster.wait_rsa(producer, "STAGING_OUT");
    for job in [elsewhere, plain] {
        cluster.slurm.wait_state(job, "COMPLETED", LONG);
    }
    for job in [reader, writer] {
        cluster.slurm.wait_state(job, "COMPLETED", LONG);
        cluster.wait_done(job);
    }
    let result = fs::read(&value).unwrap();
    assert_eq!(result.len(), 16 << 20);
    for copy in [read, written] {
        assert!(fs::read(&copy).unwrap() == result, "{}", copy.display());
    }
    for job in [elsewhere, plain] {
        let log = cluster.log_text("scheduler");
        assert!(
            !log.lines().any(|line| line.contains(&format!("job={job} ")) && line.contains("held until")),
            "{log}"
        );
    }
    cluster.wait_done(producer);
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn an_array_that_depends_on_a_job_with_results_starts_when_they_are_on_disk() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: SLOW.into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let (from, to) = (format!("DATA_IN={}", output.display()), format!("DATA_OUT={}", output.display()));
    let value = output.join("value");
    let write = format!("await go\nhead -c 16777216 /dev/urandom > {}", value.display());
    let producer = cluster.start_staged(&script(alice, &["NODES=1".into(), to], &write), 1);

    let copies: Vec<_> = (0..3).map(|task| alice.scratch.join(format!("read-{task}"))).collect();
    let read = format!("cp {} {}/read-$SLURM_ARRAY_TASK_ID", value.display(), alice.scratch.display());
    let dependency = format!("--dependency=afterok:{producer}");
    let options = [&*dependency, "--array=0-2", "--nodes=1", "--output=/dev/null"];
    let array = cluster.slurm.submit(alice, &script(alice, &[from, "WAIT=disk".into()], &read), &options);
    wait_held_for(&cluster, array, producer);
    // Of one that needs nothing of it, the elements that share a record are left alone.
    let plain = cluster.slurm.submit(alice, "#!/bin/sh\n", &options);
    cluster.slurm.wait_job(plain, "is pending", DEADLINE, |job| job["JobState"] == "PENDING");
    give(alice, "go");
    cluster.wait_rsa(producer, "STAGING_OUT");
    for copy in &copies {
        wait_until(LONG, "each element has read", || copy.exists());
    }
    wait_until(LONG, "all jobs are done", || cluster.status()["jobs"].as_array().unwrap().is_empty());
    let result = fs::read(&value).unwrap();
    assert_eq!(result.len(), 16 << 20);
    for copy in copies {
        assert!(fs::read(&copy).unwrap() == result, "{}", copy.display());
    }
    let log = cluster.log_text("scheduler");
    assert!(
        !log.lines().any(|line| line.contains(&format!("job={plain} ")) && line.contains("held until")),
        "{log}"
    );
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_job_that_depends_on_results_starts_without_them_when_they_are_lost_or_abandoned() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let (from, to) = (format!("DATA_IN={}", output.display()), format!("DATA_OUT={}", output.display()));
    let write =
        |gate: &str| format!("echo result > {}/file\ntell {gate}-written\nawait {gate}", output.display());
    let producer = cluster.start_staged(&script(alice, &["NODES=1".into(), to.clone()], &write("one")), 1);
    await_file(alice, "one-written");
    let reader =
        dependant(&cluster, "afterany", producer, &script(alice, std::slice::from_ref(&from), "true"));
    wait_held_for(&cluster, reader, producer);
    let node = cluster.rsa_nodes(producer).remove(0);
    cluster.crash(&node);
    give(alice, "one");
    cluster.wait_rsa(producer, "LOST");
    cluster.slurm.wait_state(reader, "COMPLETED", LONG);
    cluster.wait_done(reader);
    let told = format!("results of job {producer} for {} are lost", output.display());
    assert!(cluster.note(reader).contains(&told), "{}", cluster.show(reader));
    cluster.ondeck(&["job", "abandon", &producer.to_string(), "--yes"]).assert_success();
    wait_until(LONG, "nothing is left of it", || cluster.job(producer).is_none());
    cluster.boot(&node);

    let fails = program(alice, "fails", "#!/bin/sh\nexit 1\n");
    let lines = ["NODES=1".to_owned(), to, format!("STAGE_OUT={}", fails.display())];
    let producer = cluster.start_staged(&script(alice, &lines, &write("two")), 1);
    let reader = dependant(&cluster, "afterok", producer, &script(alice, &[from], "true"));
    wait_held_for(&cluster, reader, producer);
    give(alice, "two");
    cluster.wait_rsa(producer, "HELD");
    cluster.wait_rsa(reader, "INITIAL");
    assert_eq!(cluster.slurm.job(reader)["Priority"], "0", "{}", cluster.show(reader));
    cluster.ondeck(&["job", "abandon", &producer.to_string(), "--yes"]).assert_success();
    cluster.slurm.wait_state(reader, "COMPLETED", LONG);
    cluster.wait_done(reader);
    cluster.assert_clean();
}

#[test]
fn a_job_that_depends_on_results_is_not_held_for_longer_than_the_limit() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { limits: "hold = \"3s\"".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let (from, to) = (format!("DATA_IN={}", output.display()), format!("DATA_OUT={}", output.display()));
    let fails = program(alice, "fails", "#!/bin/sh\nexit 1\n");
    let lines = ["NODES=1".to_owned(), to, format!("STAGE_OUT={}", fails.display())];
    let producer =
        cluster.start_staged(&script(alice, &lines, &format!("await go\n: > {}/a", output.display())), 1);
    let reader = dependant(&cluster, "afterok", producer, &script(alice, &[from], "true"));
    wait_held_for(&cluster, reader, producer);
    cluster.wait_rsa(producer, "INUSE_OUT");
    // The mark outlives the daemon, which asks for it no second time.
    cluster.kill("scheduler");
    cluster.start_scheduler();
    give(alice, "go");
    cluster.wait_rsa(producer, "HELD");
    cluster.slurm.wait_state(reader, "COMPLETED", LONG);
    cluster.wait_done(reader);
    assert!(cluster.note(reader).contains("were not on disk within 3 s"), "{}", cluster.show(reader));
    cluster.ondeck(&["job", "abandon", &producer.to_string(), "--yes"]).assert_success();
    wait_until(LONG, "nothing is left of it", || cluster.job(producer).is_none());
    cluster.assert_clean();
}

#[test]
fn a_job_is_released_also_if_the_daemon_is_killed_before_it_has_said_so() {
    if !available() {
        return;
    }
    let scheduler = "bandwidth = \"1MiB/s\"\nstaging = 1".into();
    let cluster = Cluster::with(Setup { scheduler, ..Setup::default() });
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 15 << 20));
    let job = cluster.slurm.submit(
        alice,
        &script(alice, &[format!("DATA_IN={}", input.display()), "WAIT=hold".into()], "true"),
        &["--nodes=1", "--output=/dev/null"],
    );
    cluster.wait_rsa(job, "STAGING_IN");
    // What is decided now can't be carried out.
    cluster.slurm.wait_saved(job);
    cluster.slurm.kill_controller();
    cluster.wait_rsa(job, "READY");
    cluster.kill("scheduler");
    cluster.slurm.start_controller();
    assert_eq!(cluster.slurm.job(job)["Priority"], "0");
    cluster.start_scheduler();
    cluster.slurm.wait_state(job, "COMPLETED", LONG);
    cluster.wait_done(job);
    cluster.assert_clean();
}

#[test]
fn a_job_whose_launch_failed_is_staged_again_when_its_user_releases_it() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(2, 1000));
    let place = alice.scratch.join("where");
    // A Prolog of the site fails once, after ours has shown the RAM disk.
    let prolog = cluster.bed.dir().join("slurm-prolog");
    let ours = fs::read_to_string(&prolog).unwrap().replace("exec ", "");
    let fail = cluster.bed.dir().join("fail");
    fs::write(&fail, "").unwrap();
    fs::write(&prolog, format!("{ours}! rm {} 2> /dev/null\n", fail.display())).unwrap();
    let job = cluster.slurm.submit(
        alice,
        &script(
            alice,
            &[format!("DATA_IN={}", input.display()), "WAIT=hold".into()],
            &note_source(&input, &place),
        ),
        &["--nodes=1", "--requeue", "--output=/dev/null"],
    );
    let held = cluster.slurm.wait_job(job, "is requeued and held", LONG, |job| {
        job["Reason"] == "launch_failed_requeued_held" && job["JobState"] == "PENDING"
    });
    assert!(!held["AdminComment"].contains("ondeck:hold"), "somebody else holds it: {held:#?}");
    wait_until(LONG, "its former life is over", || cluster.job(job).is_none());
    let drained =
        cluster.slurm.client(&["sinfo", "--noheader", "--Node", "--states=drain", "--format=%N"]).stdout;
    for node in drained.lines() {
        let node = format!("NodeName={}", node.trim());
        cluster.slurm.scontrol(&["update", &node, "State=RESUME"]).assert_success();
    }
    cluster.slurm.client_as(alice, &["scontrol", "release", &job.to_string()]).assert_success();
    // Slurm starts nothing anew for two minutes; on a cluster with nodes to spare it would do it then at once.
    cluster.slurm.wait_job(job, "is held for its input", LONG, |job| {
        job["Priority"] == "0" && job["AdminComment"].contains("ondeck:hold:1")
    });
    cluster.slurm.scontrol(&["update", &format!("JobId={job}"), "StartTime=now"]).assert_success();
    let ended = cluster.slurm.wait_state(job, "COMPLETED", LONG);
    cluster.wait_done(job);
    assert!(!ended["AdminComment"].contains("ondeck:hold"), "{ended:#?}");
    assert!(was_ram(&place), "{}", says(&place));
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_hold_that_is_not_for_the_input_stands_and_costs_no_rsa_nodes() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(2, 1000));
    let text = script(alice, &[format!("DATA_IN={}", input.display()), "WAIT=hold".into()], "await go");
    // Nothing is free for the first of them: it is released by hand, and starts on disk.
    for node in ["r1", "r2", "r3", "r4"] {
        cluster.ondeck(&["node", "drain", node, "--reason", "test"]).assert_success();
    }
    let job = cluster.slurm.submit(alice, &text, &["--nodes=1", "--output=/dev/null"]);
    cluster.wait_rsa(job, "INITIAL");
    cluster.slurm.scontrol(&["release", &job.to_string()]).assert_success();
    cluster.slurm.wait_state(job, "RUNNING", DEADLINE);
    // Slurm says so before its Prolog asks: what is free by then it would get.
    cluster.wait_rsa(job, "INELIGIBLE");
    for node in ["r1", "r2", "r3", "r4"] {
        cluster.ondeck(&["node", "resume", node]).assert_success();
    }
    // The second is ready and may start, when its user holds it.
    let blocker = Blocker::new(&cluster, 3);
    let held = cluster.slurm.submit(alice, &text, &["--nodes=4", "--output=/dev/null"]);
    cluster.wait_rsa(held, "READY");
    cluster.slurm.wait_job(held, "is let go, and unmarked", LONG, |job| {
        job["Priority"] != "0" && !job.get("AdminComment").is_some_and(|text| text.contains("ondeck:hold"))
    });
    cluster.slurm.client_as(alice, &["scontrol", "hold", &held.to_string()]).assert_success();
    wait_until(LONG, "its RSA nodes are free", || {
        cluster.job(held).is_none_or(|job| job["rsa_nodes"].as_array().unwrap().is_empty())
    });
    blocker.release();
    give(alice, "go");
    cluster.wait_done(job);
    assert_eq!(cluster.slurm.job(held)["Priority"], "0", "it is still held");
    cluster.slurm.scontrol(&["release", &held.to_string()]).assert_success();
    cluster.slurm.wait_state(held, "COMPLETED", LONG);
    cluster.wait_done(held);
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_job_is_not_held_for_ever_when_there_are_no_rsa_nodes() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { limits: "hold = \"3s\"".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    for node in ["r1", "r2", "r3", "r4"] {
        cluster.ondeck(&["node", "drain", node, "--reason", "test"]).assert_success();
    }
    let input = folder(alice, "in", &files(2, 1000));
    let job = cluster.slurm.submit(
        alice,
        &script(alice, &[format!("DATA_IN={}", input.display()), "WAIT=hold".into()], "true"),
        &["--nodes=1", "--output=/dev/null"],
    );
    cluster.slurm.wait_state(job, "COMPLETED", LONG);
    cluster.wait_done(job);
    assert!(cluster.note(job).contains("there were no RSA nodes for it"), "{}", cluster.note(job));
    for node in ["r1", "r2", "r3", "r4"] {
        cluster.ondeck(&["node", "resume", node]).assert_success();
    }
    cluster.assert_clean();
}

#[test]
fn a_job_that_is_requeued_is_no_longer_locked_in() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "lock_in = \"priority\"\n".into(), ..Setup::default() });
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let input = folder(alice, "in", &files(2, 1000));
    let blocker = Blocker::new(&cluster, 4);
    let text = script(alice, &[format!("DATA_IN={}", input.display())], "tell runs\nawait go");
    let job = cluster.slurm.submit(alice, &text, &["--nodes=4", "--requeue", "--output=/dev/null"]);
    cluster.wait_rsa(job, "READY");
    let priority = |id: u32| cluster.slurm.job(id)["Priority"].parse::<u32>().unwrap();
    let others = priority(blocker.job);
    cluster.slurm.wait_job(job, "is before all others", DEADLINE, |job| {
        job["Priority"].parse::<u32>().unwrap() > others
    });
    blocker.release();
    await_file(alice, "runs");
    cluster.slurm.scontrol(&["requeuehold", &job.to_string()]).assert_success();
    // It is held by an administrator, and stays so; when it is released, it stands where others stand.
    let state = || cluster.slurm.job(job)["JobState"].clone();
    wait_until(LONG, "its former life is over", || {
        assert_ne!(state(), "COMPLETED", "{}", cluster.log_text("scheduler"));
        state() == "PENDING" && cluster.job(job).is_none()
    });
    assert_eq!(priority(job), 0, "{}", cluster.log_text("scheduler"));
    let rival = cluster.slurm.submit(bob, "#!/bin/sh\nsleep 1000\n", &["--nodes=4", "--output=/dev/null"]);
    cluster.slurm.wait_state(rival, "RUNNING", LONG);
    cluster.slurm.scontrol(&["release", &job.to_string()]).assert_success();
    assert!(priority(job) <= others, "{} of {others}", priority(job));
    cluster.slurm.cancel(rival);
    cluster.slurm.cancel(job);
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn what_is_left_on_a_compute_node_is_removed_when_its_agent_is_back() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let text = script(
        alice,
        &[format!("DATA_OUT={}", output.display())],
        &format!("echo result > {}/file\ntell written\nawait go", output.display()),
    );
    let job = cluster.start_staged(&text, 1);
    await_file(alice, "written");
    let node = cluster.slurm.job(job)["NodeList"].clone();
    cluster.kill(&node);
    give(alice, "go");
    cluster.wait_done(job);
    assert_eq!(tree(&output)["file"], b"result\n");
    let mounted = || cluster.covers_of(&output);
    assert!(!mounted().is_empty(), "the agent of {node} is away, and nobody else unmounts there");
    cluster.kill("scheduler");
    cluster.start_scheduler();
    cluster.start_agent(&node);
    wait_until(LONG, "nothing is mounted any more", || mounted().is_empty());
    cluster.assert_clean();
}

#[test]
fn an_attempt_to_bring_results_home_begins_when_the_earlier_one_has_ended() {
    if !available() {
        return;
    }
    // It is tried again when the node is reached again, not only before.
    let cluster = Cluster::with(Setup { node_timeout: "120s", backoff: "5s", ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    // The first attempt does not end by itself, and holds the lock until all of it has ended.
    let stage_out = program(
        alice,
        "stage-out",
        &format!(
            "#!/bin/sh -e\nexec 9> {s}/lock\nflock --nonblock 9 || : > {s}/two-at-a-time\n\
             [ -e {s}/first ] || {{ : > {s}/first; sleep 473; }}\ncp -R \"$1/.\" \"$2/\"\n",
            s = alice.scratch.display()
        ),
    );
    let text = script(
        alice,
        &[format!("DATA_OUT={}", output.display()), format!("STAGE_OUT={}", stage_out.display())],
        &format!("echo result > {}/file", output.display()),
    );
    let job = cluster.start_staged(&text, 1);
    await_file(alice, "first");
    let server = cluster.rsa_nodes(job).remove(0);
    let at_it = || cluster.processes("sleep 473");
    wait_until(DEADLINE, "results are being brought home", || !at_it().is_empty());
    // Nobody hears of it, but what it has begun goes on.
    cluster.host(&server).cut();
    cluster.wait_note(job, "staging out failed");
    assert!(!at_it().is_empty(), "{}", cluster.show(job));
    cluster.host(&server).join();
    wait_until(LONG, "it is done", || cluster.job(job).is_none());
    assert!(!alice.scratch.join("two-at-a-time").exists(), "{}", cluster.show(job));
    assert!(at_it().is_empty());
    assert_eq!(tree(&output), BTreeMap::from([("file".into(), b"result\n".to_vec())]));
    cluster.assert_clean();
}

#[test]
fn input_and_output_share_the_ram_disk_only_if_both_fit() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "delay = \"1s\"\n".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let (input, output) = (folder(alice, "in", &files(1, 1000)), folder(alice, "out", &BTreeMap::new()));
    let text = script(
        alice,
        &[
            format!("DATA_IN={}", input.display()),
            format!("DATA_OUT={}", output.display()),
            "OUT_SIZE=1GiB".into(),
        ],
        &format!(
            "until findmnt {o} > /dev/null; do sleep 0.1; done\necho result > {o}/file",
            o = output.display()
        ),
    );
    let job = cluster.start_staged(&text, 1);
    cluster.wait_note(job, "RSA_OUT_SIZE asks for 1 GiB");
    cluster.wait_done(job);
    assert_passed(&cluster.states(job), &["READY", "INUSE_IN", "DESTROYED", "INUSE_OUT", "STAGING_OUT"]);
    assert_eq!(tree(&output)["file"], b"result\n");
    cluster.assert_quiet();
    cluster.assert_clean();
}
