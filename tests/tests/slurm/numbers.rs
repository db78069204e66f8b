//! A slurmctld that was started clean gives numbers again, while results of an earlier job of that number wait in RAM.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use ondeck_testbed::{available, wait_until};

use crate::aids::LONG;
use crate::cluster::{Cluster, DEADLINE, Setup, life, tree};
use crate::jobs::{Blocker, Gate, directives, says, wait_file, was_ram};
use crate::life::directory;

/// Nobody can write there but root, who brings nothing home.
fn shut(directory: &Path, mode: u32, owner: (u32, u32)) {
    chown(directory, Some(owner.0), Some(owner.1)).unwrap();
    fs::set_permissions(directory, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_number_that_is_used_again_is_another_job_whose_results_and_messages_are_its_own() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "sharing = \"any\"\n".into(), ..Setup::default() });
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let writes = |output: &Path, text: &str, gate: &Gate| {
        format!(
            "#!/bin/sh\n#RSA_WAIT=hold\n{}{}echo {text} > {}/result\n",
            directives(&[], &[output]),
            gate.line(),
            output.display()
        )
    };
    let (mine, hers) = (directory(alice, "first", &[]), directory(alice, "second", &[]));
    // A slurmd does not run a Prolog twice within two minutes for one number: the new jobs run elsewhere.
    let blockers = || (Blocker::on(&cluster, "c[1-2]"), Blocker::on(&cluster, "c[3-4]"));
    let (blocker, others) = blockers();
    let gate = Gate::of(alice, "first");
    let held: Vec<u32> = [(&mine, "one"), (&hers, "two")]
        .map(|(output, text)| {
            let job = cluster.slurm.submit(alice, &writes(output, text, &gate), &["--output=/dev/null"]);
            cluster.wait_rsa(job, "READY");
            job
        })
        .into();
    blocker.release();
    for (job, output) in held.iter().zip([&mine, &hers]) {
        cluster.wait_rsa(*job, "INUSE_OUT");
        shut(output, 0o555, (0, 0));
    }
    gate.open();
    for job in &held {
        cluster.wait_rsa(*job, "HELD");
    }
    let old: Vec<String> =
        held.iter().map(|job| cluster.job(*job).unwrap()["id"].as_str().unwrap().to_owned()).collect();

    let last = others.job;
    others.release();
    cluster.slurm.wait_state(last, "COMPLETED", DEADLINE);
    cluster.slurm.kill_controller();
    cluster.slurm.start_controller_clean();
    // The same numbers: the same user's job, which is held for its input, and another user's.
    let (kept, blocker) = blockers();
    let input = directory(alice, "in", &[("a", "alpha")]);
    let (next, others) = (directory(alice, "next", &[]), directory(bob, "others", &[]));
    let (seen, gate) = (alice.scratch.join("next-seen"), Gate::of(alice, "next"));
    let bobs_gate = Gate::of(bob, "next");
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_OUT_SIZE=1MiB\n{}{}{}cat {i}/a > {o}/result\n",
        directives(&[&input], &[&next]),
        crate::jobs::note_source(&input, &seen),
        gate.line(),
        i = input.display(),
        o = next.display(),
    );
    let again = cluster.slurm.submit(alice, &script, &["--output=/dev/null"]);
    let bobs = cluster.slurm.submit(bob, &writes(&others, "bob", &bobs_gate), &["--output=/dev/null"]);
    assert_eq!(vec![again, bobs], held, "slurmctld counts from the beginning");
    let newest = |number: u32| {
        let status = cluster.status();
        let jobs = status["jobs"].as_array().unwrap().iter();
        jobs.filter(|job| life(job) == number.to_string())
            .find(|job| !old.iter().any(|old| job["id"] == **old))
            .cloned()
    };
    for job in [again, bobs] {
        wait_until(DEADLINE, "the new job's RAM disk is ready", || {
            newest(job).is_some_and(|job| job["rsa_state"] == "READY")
        });
    }
    // What is written for the old ones does not reach the new ones.
    for old in &old {
        cluster.ondeck(&["job", "retry", old]).assert_success();
    }
    wait_until(DEADLINE, "the old results are held again", || {
        let status = cluster.status();
        let jobs = status["jobs"].as_array().unwrap();
        old.iter().all(|old| jobs.iter().any(|job| job["id"] == **old && job["rsa_state"] == "HELD"))
    });
    for job in [again, bobs] {
        let comment = cluster.slurm.job(job).remove("AdminComment").unwrap_or_default();
        assert!(!comment.contains("staging out failed"), "{comment}");
    }
    // Two may be meant. Whose is whose nobody else is told.
    let shown = cluster.ondeck_on(&cluster.host("ctl").log_in(alice), &["job", "show", &again.to_string()]);
    shown.assert_success();
    assert!(shown.stdout.contains(&old[0]) && shown.stdout.contains("next"), "{}", shown.stdout);
    let shown = cluster.ondeck_on(&cluster.host("ctl").log_in(bob), &["job", "show", &bobs.to_string()]);
    shown.assert_success();
    assert!(!shown.stdout.contains(&old[1]) && shown.stdout.contains("others"), "{}", shown.stdout);

    blocker.release();
    wait_file(&seen);
    gate.open();
    bobs_gate.open();
    for (job, user) in [(again, alice), (bobs, bob)] {
        let host = cluster.host("ctl").log_in(user);
        let waited = cluster.ondeck_on(&host, &["wait", &job.to_string(), "--timeout", "60s"]);
        waited.assert_success();
    }
    kept.release();
    assert!(was_ram(&seen), "{}", says(&seen));
    assert_eq!(tree(&next), [("result".to_owned(), b"alpha".to_vec())].into());
    assert_eq!(tree(&others), [("result".to_owned(), b"bob\n".to_vec())].into());
    // The old ones still wait, and the number alone means them now.
    for (job, output) in held.iter().zip([&mine, &hers]) {
        assert!(tree(output).is_empty());
        shut(output, 0o755, (alice.uid, alice.gid));
        let host = cluster.host("ctl").log_in(alice);
        cluster.ondeck_on(&host, &["job", "retry", &job.to_string()]).assert_success();
    }
    for old in &old {
        cluster.ondeck(&["wait", old, "--timeout", "60s"]).assert_success();
    }
    assert_eq!(tree(&mine), [("result".to_owned(), b"one\n".to_vec())].into());
    assert_eq!(tree(&hers), [("result".to_owned(), b"two\n".to_vec())].into());
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_slurmctld_that_forgets_a_job_takes_nothing_from_what_of_it_still_runs() {
    if !available() {
        return;
    }
    // A node on which no step of it ran runs no Epilog for it; then the limit ends it.
    let cluster = Cluster::with(Setup { limits: "ending = \"15s\"\n".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let output = directory(alice, "forgotten", &[]);
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}n=0\nwhile :; do n=$((n + 1)); echo $n >> {o}/log; sleep 0.05; done\n",
        directives(&[], &[&output]),
        o = output.display()
    );
    let job = cluster.slurm.submit(alice, &script, &["--output=/dev/null", "--nodes=2"]);
    cluster.wait_rsa(job, "INUSE_OUT");
    wait_until(DEADLINE, "it writes", || {
        cluster.ondeck(&["status"]).success() && {
            let node = cluster.slurm.job(job)["BatchHost"].clone();
            cluster.host(&node).shell(&format!("[ -s {}/log ]", output.display())).success()
        }
    });
    cluster.slurm.kill_controller();
    cluster.slurm.start_controller_clean();
    // Its nodes end what slurmctld does not know, and their Epilogs run.
    wait_until(LONG, "its results are home", || !tree(&output).is_empty() && cluster.job(job).is_none());
    let files = tree(&output);
    assert_eq!(files.keys().collect::<Vec<_>>(), ["log"], "it was split: {}", cluster.show(job));
    let log = String::from_utf8(files["log"].clone()).unwrap();
    for (index, line) in log.lines().enumerate() {
        assert_eq!(line, (index + 1).to_string(), "{log}");
    }
    cluster.assert_clean();
}
