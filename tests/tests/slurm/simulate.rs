//! A site that watches its own queue before it lends a byte.

use std::path::Path;

use ondeck_testbed::{SlurmSetup, Testbed, available, wait_until};
use serde_json::Value;

use crate::binary::ondeck_binary;
use crate::cluster::DEADLINE;

#[test]
fn a_simulating_scheduler_needs_no_agents_and_no_hooks_and_lends_nothing() {
    if !available() {
        return;
    }
    let bed = Testbed::builder()
        .host("ctl")
        .hosts("c", 2)
        .binary(env!("CARGO_BIN_EXE_ondeck-testbed"))
        .build()
        .unwrap();
    let dir = bed.dir().display().to_string();
    let ondeck = bed.dir().join("ondeck");
    std::fs::copy(ondeck_binary(), &ondeck).unwrap();
    let config = format!("{dir}/ondeck.toml");
    let text = format!(
        "[scheduler]\nsimulate = \"200ms\"\nstate = \"{dir}/scheduler\"\ndebounce = \"200ms\"\nengine = \"gluster\"\n\
         delay = \"1s\"\n[scheduler.pool.default]\nnodes = [\"r1\", \"r2\", \"r3\"]\n[slurm]\ninterval = \"300ms\"\n"
    );
    std::fs::write(&config, text).unwrap();
    let slurm = bed.slurm(SlurmSetup::new("ctl", ["c1", "c2"])).unwrap();
    let ctl = bed.host("ctl");
    let mut command = ctl.command(&ondeck);
    command.args(["serve", "--config", &config]);
    let daemon = ctl.spawn_daemon(command, Path::new(&format!("{dir}/scheduler.log"))).unwrap();
    let ask = |words: &[&str]| {
        let ondeck = ondeck.to_string_lossy();
        let mut line = vec![&*ondeck];
        line.extend(words);
        line.extend(["--config", &config]);
        ctl.run(&line)
    };
    wait_until(DEADLINE, "the scheduler answers", || {
        assert!(daemon.is_running(), "{}", daemon.log());
        ask(&["status"]).success()
    });
    let alice = bed.user("alice");
    let endless = "#!/bin/sh\nwhile :; do sleep 0.1; done\n";
    let blocker = slurm.submit(alice, endless, &["--nodes=2", "--exclusive", "--output=/dev/null"]);
    slurm.wait_state(blocker, "RUNNING", DEADLINE);
    let script = "#!/bin/sh\n#RSA_DATA_IN=/nowhere/in\n#RSA_DATA_OUT=/nowhere/out\n#RSA_DELAY=1\nsleep 4\n";
    let job = slurm.submit(alice, script, &["--nodes=2", "--output=/dev/null"]);
    let state = || {
        let status: Value = serde_json::from_str(&ask(&["status", "--json"]).stdout).unwrap();
        assert_eq!(status["simulated"], true);
        status["jobs"][0]["rsa_state"].as_str().unwrap_or_default().to_owned()
    };
    wait_until(DEADLINE, "it is ready", || state() == "READY");
    slurm.cancel(blocker);
    wait_until(DEADLINE, "its output is used", || state() == "INUSE_OUT");
    let waited = ask(&["wait", &job.to_string(), "--timeout", "60s"]);
    assert!(waited.success(), "{}", waited.stderr);
    let log = ask(&["job", "log"]).stdout;
    for sentence in [
        "assigning 2 rsa-nodes to job",
        "constructing RSA block for job",
        "done constructing RSA block for job",
        "staging data for job",
        "finished staging data in for job",
        "switching from staging in to out for job",
        "staging data out for job",
        "finished staging data out for job",
        "destroying RSA block for job",
        "finished destroying RSA block for job",
    ] {
        assert!(log.contains(&format!("{sentence} {job}")), "{sentence}: {log}");
    }
}
