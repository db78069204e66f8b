//! Jobs with several lives and jobs of several tasks.

use std::fs;

use ondeck_testbed::{available, wait_until};

use crate::aids::LONG;
use crate::cluster::{Cluster, DEADLINE, Setup, life, tree};
use crate::jobs::{Blocker, Gate, assert_passed, directives, note_source, wait_file, was_ram};
use crate::life::directory;

#[test]
fn a_requeued_job_brings_home_what_it_has_and_starts_anew() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let input = directory(alice, "lives-in", &[("a", "alpha")]);
    let output = directory(alice, "lives", &[]);
    let (place, written) = (alice.scratch.join("lives-where"), alice.scratch.join("lives-written"));
    let gate = Gate::of(alice, "lives");
    let script = format!(
        "#!/bin/sh\n#RSA_OUT_SIZE=1MiB\n{}life=${{SLURM_RESTART_COUNT:-0}}\n{}{}\
         cat {i}/a > {o}/life-$life\necho $life >> {o}/lives\ntouch {written}-$life\n\
         [ $life = 0 ] || exit 0\n{}",
        directives(&[&input], &[&output]),
        note_source(&input, &place).trim_end().to_owned() + "-in-$life\n",
        note_source(&output, &place).trim_end().to_owned() + "-out-$life\n",
        gate.line(),
        i = input.display(),
        o = output.display(),
        written = written.display(),
    );
    let file =
        |base: &std::path::Path, end: &str| std::path::PathBuf::from(format!("{}-{end}", base.display()));
    let blocker = Blocker::new(&cluster, 4);
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2", "--requeue"]);
    cluster.wait_rsa(job, "READY");
    blocker.release();
    wait_file(&file(&written, "0"));
    cluster.slurm.requeue(job);
    let first = format!("{job}.0");
    cluster.ondeck(&["wait", &first, "--timeout", "60s"]).assert_success();
    // The number alone is all of its lives, and there is one to come.
    let waits = cluster.ondeck(&["wait", &job.to_string(), "--timeout", "1s"]);
    waits.assert_code(1).assert_says("the time is over");
    let wanted = [("life-0", "alpha"), ("lives", "0\n")];
    assert_eq!(tree(&output), wanted.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into());
    assert_passed(&cluster.states(job), &["INUSE_BOTH", "UNMOUNTED", "STAGING_OUT", "TEARDOWN", "DESTROYED"]);

    fs::write(input.join("a"), "another alpha").unwrap();
    // A node that has run a job's Prolog does not run it again within two minutes, for which Slurm waits by itself.
    let nodes = cluster.slurm.compute().iter().map(ondeck_testbed::Host::name);
    let former = cluster.story(job)["job"]["io_nodes"].clone();
    let is_former = |node: &&str| former.as_array().unwrap().iter().any(|known| known == node);
    let (former, others): (Vec<&str>, Vec<&str>) = nodes.partition(is_former);
    let (kept, blocker) =
        (Blocker::on(&cluster, &former.join(",")), Blocker::on(&cluster, &others.join(",")));
    cluster.slurm.scontrol(&["update", &format!("JobId={job}"), "StartTime=now"]).assert_success();
    let second = format!("{job}.1");
    wait_until(DEADLINE, "its second life is on deck", || {
        let status = cluster.status();
        let jobs = status["jobs"].as_array().unwrap();
        jobs.iter().any(|job| life(job) == second && job["rsa_state"] == "READY")
    });
    blocker.release();
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    kept.release();
    cluster.wait_done(job);
    let wanted = [("life-0", "alpha"), ("life-1", "another alpha"), ("lives", "0\n1\n")];
    assert_eq!(tree(&output), wanted.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into());
    for end in ["in-0", "in-1", "out-0", "out-1"] {
        assert!(was_ram(&file(&place, end)), "{end}: {}", cluster.ondeck(&["job", "show", &second]).stdout);
    }
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn tasks_of_an_array_have_ram_disks_of_their_own() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "sharing = \"any\"\n".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let output = directory(alice, "array", &[("old", "old")]);
    let gate = Gate::of(alice, "array");
    let script = format!(
        "#!/bin/sh\n{}{}n=$SLURM_ARRAY_TASK_ID\n{}\n\
         echo task $n > {o}/task-$n\necho $n >> {o}/all\n",
        directives(&[], &[&output]),
        gate.line(),
        note_source(&output, &alice.scratch.join("array-where")).trim_end().to_owned() + "-$n",
        o = output.display(),
    );
    let array = cluster.slurm.submit(alice, &script, &["--array=0-2", "--nodes=1", "--exclusive"]);
    // They are covered while they run, which is tried again after 10 s and a minute if the machine is busy.
    let ids = wait_until(LONG, "each task has a RAM disk over its directory", || {
        let status = cluster.status();
        let jobs = status["jobs"].as_array().unwrap();
        let shown = jobs.iter().filter(|job| job["rsa_state"] == "INUSE_OUT");
        let ids: Vec<u32> = shown.map(|job| life(job).parse().unwrap()).collect();
        (ids.len() == 3).then_some(ids)
    });
    assert!(ids.contains(&array));
    let nodes: Vec<String> =
        ids.iter().map(|id| cluster.job(*id).unwrap()["rsa_nodes"].to_string()).collect();
    assert!(nodes[0] != nodes[1] && nodes[1] != nodes[2] && nodes[0] != nodes[2], "{nodes:?}");
    gate.open();
    for id in &ids {
        cluster.wait_done(*id);
    }
    let mut found = tree(&output);
    for n in 0..3 {
        assert!(was_ram(&alice.scratch.join(format!("array-where-{n}"))));
        assert_eq!(found.remove(&format!("task-{n}")).unwrap(), format!("task {n}\n").as_bytes());
    }
    assert_eq!(found.remove("old").unwrap(), b"old");
    // All of them wrote this one: the first to come home has it, and the others' versions are beside it.
    let mut all: Vec<String> = found
        .into_iter()
        .filter(|(name, _)| name.starts_with("all"))
        .map(|(_, text)| String::from_utf8(text).unwrap())
        .collect();
    all.sort();
    assert_eq!(all, ["0\n", "1\n", "2\n"]);
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn tasks_of_an_array_that_wait_for_their_input_start_by_themselves() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "sharing = \"any\"\n".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let input = directory(alice, "array-in", &[("a", "alpha")]);
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}{}",
        directives(&[&input], &[]),
        note_source(&input, &alice.scratch.join("held-array")).trim_end().to_owned()
            + "-$SLURM_ARRAY_TASK_ID\n",
    );
    cluster.slurm.submit(alice, &script, &["--array=0-2", "--nodes=1", "--exclusive"]);
    for n in 0..3 {
        let note = alice.scratch.join(format!("held-array-{n}"));
        wait_until(DEADLINE, "a task has run", || {
            std::fs::read_to_string(&note).is_ok_and(|text| text.ends_with('\n'))
        });
        assert!(was_ram(&note));
    }
    cluster.assert_quiet();
    cluster.assert_clean();
}
