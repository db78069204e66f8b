//! A Slurm with accounting: places in the queue by quality of service, and what is known of jobs that have ended.

use std::collections::BTreeMap;

use ondeck_testbed::{Slurm, available, wait_until};

use crate::aids::{LONG, await_file, files, folder, program, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};
use crate::jobs::{Blocker, note_source, says, was_ram};

fn by_qos() -> Setup {
    let scheduler = "lock_in = \"qos\"\nlock_in_qos = \"ondeck\"\n".into();
    Setup { scheduler, accounting: true, ..Setup::default() }
}

fn number(slurm: &Slurm, job: u32, field: &str) -> u64 {
    slurm.job(job)[field].parse().unwrap()
}

#[test]
fn a_job_is_before_others_by_its_quality_of_service_as_long_as_it_is_next() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(by_qos());
    let slurm = &cluster.slurm;
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let input = folder(alice, "in", &files(2, 1000));
    let place = alice.scratch.join("where");
    let body = format!("{}tell runs\nawait go", note_source(&input, &place));
    let text = script(alice, &[format!("DATA_IN={}", input.display())], &body);
    // Its users may not take that one themselves.
    let options = ["--nodes=4", "--exclusive", "--requeue", "--output=/dev/null", "--qos=patient"];
    let taken = slurm.try_submit(alice, &text, &[&options[..4], &["--qos=ondeck"]].concat());
    taken.assert_code(1).assert_says("Invalid qos");

    let blocker = Blocker::new(&cluster, 4);
    let job = slurm.submit(alice, &text, &options);
    let own = slurm.job(job);
    assert_eq!(own["QOS"], "patient");
    let locked = slurm.wait_job(job, "is locked in", DEADLINE, |job| job["QOS"] == "ondeck");
    // At submission its place was behind that of any usual job.
    let rival_of = |name: &str| {
        slurm.submit(
            bob,
            &script(bob, &[], &format!("tell {name}")),
            &["--nodes=4", "--exclusive", "--output=/dev/null"],
        )
    };
    let rival = rival_of("rival");
    let places = || (number(slurm, job, "Priority"), number(slurm, rival, "Priority"));
    assert!(own["Priority"].parse::<u64>().unwrap() < places().1, "{own:?} {:?}", places());
    wait_until(LONG, "it is before the rival", || places().0 > places().1);
    assert_eq!(locked["JobState"], "PENDING");

    // Its user holds it: it is no longer next, and has what it had, also if the scheduler was killed before it said so.
    slurm.client_as(alice, &["scontrol", "hold", &job.to_string()]).assert_success();
    wait_until(DEADLINE, "it is demoted", || cluster.log_of(job).contains("has been demoted"));
    cluster.kill("scheduler");
    cluster.start_scheduler();
    let held = slurm.wait_job(job, "has its own quality of service", LONG, |job| job["QOS"] != "ondeck");
    assert_eq!(held["QOS"], "patient");
    assert_eq!((&*held["JobState"], &*held["Priority"]), ("PENDING", "0"), "{held:?}");
    wait_until(DEADLINE, "its RSA nodes are free", || {
        cluster.job(job).is_none_or(|job| job["rsa_nodes"].as_array().unwrap().is_empty())
    });
    slurm.cancel(rival);
    slurm.client_as(alice, &["scontrol", "release", &job.to_string()]).assert_success();

    // It is next again, and starts before one that would have come first.
    slurm.wait_job(job, "is locked in again", LONG, |job| job["QOS"] == "ondeck");
    let rival = rival_of("second-rival");
    blocker.release();
    await_file(alice, "runs");
    assert!(!bob.scratch.join("second-rival").exists());
    assert!(was_ram(&place), "{}", says(&place));

    // Its next life is not before others.
    slurm.requeue(job);
    let requeued = slurm.wait_job(job, "is as it was submitted", LONG, |job| {
        job["JobState"] == "PENDING" && job["QOS"] != "ondeck"
    });
    assert_eq!(requeued["QOS"], "patient");
    assert_eq!(requeued["Restarts"], "1", "{requeued:?}");
    slurm.wait_state(rival, "COMPLETED", LONG);
    slurm.cancel(job);
    cluster.wait_done(job);
    cluster.assert_quiet();
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn a_job_that_has_ended_says_why_its_results_are_held() {
    if !available() {
        return;
    }
    let scheduler = "stage_out_attempts = 1\n".into();
    let cluster = Cluster::with(Setup { scheduler, accounting: true, ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let stage_out = program(alice, "stage-out.sh", "#!/bin/sh\nexit 5\n");
    let text = script(
        alice,
        &[format!("DATA_OUT={}", output.display()), format!("STAGE_OUT={}", stage_out.display())],
        &format!("echo result > {}/result", output.display()),
    );
    let job = cluster.start_staged(&text, 1);
    cluster.wait_rsa(job, "HELD");
    // Slurm itself changes nothing of a job that has ended: sacctmgr does, in lower case.
    let number = job.to_string();
    let line = ["sacct", "-X", "--noheader", "--parsable2", "--jobs", &number, "--format=State,AdminComment"];
    wait_until(LONG, "its user reads it", || {
        let kept = cluster.slurm.client_as(alice, &line).stdout;
        kept.starts_with("COMPLETED|ondeck: staging out failed: the stage-out script")
            && kept.contains(&format!(
                "with exit code 5; the results are kept in ram until `ondeck job retry {job}`"
            ))
    });
    program(alice, "stage-out.sh", "#!/bin/sh\ncp -r \"$1/.\" \"$2\"\n");
    cluster.ondeck(&["job", "retry", &number]).assert_success();
    cluster.wait_done(job);
    assert_eq!(tree(&output)["result"], b"result\n");
    wait_until(LONG, "its user reads the end of it", || {
        !cluster.slurm.client_as(alice, &line).stdout.contains("kept in ram")
    });
    cluster.assert_quiet();
    cluster.assert_clean();
}
