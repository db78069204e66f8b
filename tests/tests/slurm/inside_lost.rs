//! slurmctld is killed before it has saved a burst buffer, and begins anew without it.

use std::collections::BTreeMap;
use std::fs;

use ondeck_testbed::{available, wait_until};

use crate::aids::{LONG, files, folder, program, script};
use crate::cluster::{Setup, tree};
use crate::inside::inside;
use crate::jobs::was_ram;

#[test]
fn a_job_whose_burst_buffer_slurm_has_lost_gives_its_node_back_and_its_user_is_told() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { limits: "again = \"2s\"".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let (content, output) = (files(2, 1000), folder(alice, "copied", &BTreeMap::new()));
    let input = folder(alice, "in", &content);
    let wait = "#!/bin/sh -e\nuntil [ -e $HOME/go ]; do sleep 0.1; done\ncp -R $2/. $1/\n";
    let makes = program(alice, "stage-in", wait);
    let lines = [format!("DATA_IN={}", input.display()), format!("STAGE_IN={}", makes.display())];
    let (i, o) = (input.display(), output.display());
    let body = format!("findmnt -n -o SOURCE -T {i} > {}/where; cp {i}/* {o}", alice.scratch.display());
    let options = ["--nodes=1", "--exclusive", "--requeue", "--output=/dev/null"];
    let job = cluster.slurm.submit(alice, &script(alice, &lines, &body), &options);
    cluster.wait_rsa(job, "STAGING_IN");
    cluster.slurm.wait_saved(job);
    cluster.slurm.lose_burst_buffers();
    wait_until(LONG, "its user is told", || {
        cluster.slurm.job(job).get("AdminComment").is_some_and(|comment| comment.contains("submit it anew"))
    });
    wait_until(LONG, "nothing is done for it", || cluster.job(job).is_none());
    cluster.ondeck(&["wait", &job.to_string()]).assert_code(1).assert_says("submit it anew");
    cluster.assert_nothing_lent();
    let doctor = cluster.ondeck(&["doctor", "--slurm"]).stdout;
    assert!(doctor.contains(&format!("never starts these: {job}")), "{doctor}");
    assert!(cluster.shown(job).starts_with("PENDING"), "{}", cluster.shown(job));
    // What its user is told to do, and what an administrator may do, bring it on.
    fs::write(alice.home.join("go"), "").unwrap();
    cluster.slurm.cancel(job);
    cluster.wait_shown(job, "CANCELLED");
    cluster.slurm.requeue(job);
    // Slurm lets it wait for two minutes.
    cluster.wait_shown(job, "PENDING");
    cluster.slurm.scontrol(&["update", &format!("JobId={job}"), "StartTime=now"]).assert_success();
    cluster.wait_shown(job, "COMPLETED");
    assert!(was_ram(&alice.scratch.join("where")));
    assert_eq!(tree(&output), content);
    cluster.assert_clean_inside();
}

#[test]
fn a_job_whose_stage_out_slurm_has_lost_is_done_when_its_results_are_home() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { scheduler: "stage_out_attempts = 1".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let go = "until [ -e $HOME/go ]; do sleep 0.1; done\n";
    let waits = program(alice, "stage-out", &format!("#!/bin/sh -e\n{go}cp -R $1/. $2/\n"));
    let fails = program(alice, "fails", "#!/bin/sh -e\ntest -e $HOME/go\ncp -R $1/. $2/\n");
    // One whose results are on their way, and one of which Slurm was told that somebody must decide on them.
    let jobs =
        [("waits", &waits, "STAGING_OUT"), ("kept", &fails, "HELD")].map(|(name, stage_out, state)| {
            let output = folder(alice, name, &BTreeMap::new());
            let lines = [
                "NODES=1".to_owned(),
                format!("DATA_OUT={}", output.display()),
                format!("STAGE_OUT={}", stage_out.display()),
            ];
            let body = format!("echo result > {}/a", output.display());
            let job = cluster.start_staged(&script(alice, &lines, &body), 1);
            cluster.wait_rsa(job, state);
            cluster.wait_shown(job, "STAGE_OUT");
            (name, job, output)
        });
    wait_until(LONG, "the scheduler has told Slurm that they are kept", || {
        cluster.log_of(jobs[1].1).contains("was told that its results are kept")
    });
    // The state of a job that has ended is saved with those of others.
    let held = cluster.slurm.submit(alice, "#!/bin/sh\ntrue\n", &["--hold", "--output=/dev/null"]);
    cluster.slurm.wait_saved(held);
    cluster.slurm.lose_burst_buffers();
    cluster.slurm.cancel(held);
    fs::write(alice.home.join("go"), "").unwrap();
    cluster.ondeck(&["job", "retry", &jobs[1].1.to_string()]).assert_success();
    for (name, job, output) in &jobs {
        cluster.ondeck(&["wait", "--timeout", "1m", &job.to_string()]).assert_success();
        assert!(output.join("a").exists(), "{name}");
    }
    cluster.assert_clean();
    cluster.assert_no_hook_failed();
}
