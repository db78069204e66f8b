//! The story that appendix T of the thesis tells, and the log in its form.

use std::collections::BTreeMap;

use ondeck_testbed::{available, wait_until};

use crate::aids::{LONG, files, folder, give, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};

/// What the log says of a job, without the times and its number.
fn sentences(cluster: &Cluster, job: u32) -> Vec<String> {
    let ran = cluster.ondeck(&["job", "log"]);
    ran.assert_success();
    let mut found = Vec::new();
    let mut last = 0;
    for line in ran.stdout.lines() {
        let (time, sentence) = line.split_once(' ').unwrap();
        let time: u64 = time.parse().unwrap();
        assert!(time >= last, "{}", ran.stdout);
        last = time;
        let words: Vec<&str> = sentence.split([' ', ',']).collect();
        if words.windows(2).any(|pair| pair == ["job", &job.to_string()]) {
            found.push(sentence.replace(&format!("job {job}"), "job N"));
        }
    }
    found
}

const INELIGIBLE: &str = "job N does not have RSA variables set, marking ineligible";
const DEMOTED: [&str; 2] =
    ["job N has been demoted", "removing state files for job N due to demotion/destruction"];

/// The whole of an output job's life, as in lines 2 to 8 and 29 to 35.
fn life(rsa_nodes: u32) -> Vec<String> {
    let lines = [
        &format!("assigning {rsa_nodes} rsa-nodes to job N"),
        "constructing RSA block for job N",
        "done constructing RSA block for job N",
        "staging data out for job N",
        "finished staging data out for job N",
        "destroying RSA block for job N",
        "finished destroying RSA block for job N",
    ];
    lines.map(str::to_owned).to_vec()
}

#[test]
fn the_log_tells_the_story_of_the_thesis_in_its_sentences_and_their_order() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup {
        rsa_nodes: 8,
        lends: "128MiB",
        scheduler: "proportion = 2".into(),
        ..Setup::default()
    });
    let alice = cluster.user("alice");
    let content = files(3, 10_000);
    let input = folder(alice, "in", &content);
    let output = |name: &str| folder(alice, name, &BTreeMap::new());
    let says = |job: u32, text: &str| {
        wait_until(LONG, &format!("the log says of job {job}: {text}"), || {
            sentences(&cluster, job).iter().any(|sentence| sentence == text)
        });
    };
    let before_all = |job: u32| {
        let priority = ["update", &format!("JobId={job}"), "Priority=4294967290"];
        cluster.slurm.scontrol(&priority).assert_success();
    };
    let mut told: Vec<(u32, Vec<String>)> = Vec::new();
    let words = |sentences: &[&str]| sentences.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();

    // 1679: no RSA variables.
    let blocker = cluster.block(4);
    let job = cluster.submit("#!/bin/sh\ntrue\n", 4);
    says(job, INELIGIBLE);
    cluster.slurm.cancel(blocker);
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    told.push((job, words(&[INELIGIBLE])));

    // 1716 to 1718: one RSA node each; the next one's is built while the former runs, on two of the nodes.
    let (others, blocker) = (cluster.block(2), cluster.block(2));
    let mut homes = Vec::new();
    for number in 0..3 {
        let home = output(&format!("one-{number}"));
        let body = format!("cp {}/* {}\nawait go-{number}", input.display(), home.display());
        let job = cluster.submit(&script(alice, &[format!("DATA_OUT={}", home.display())], &body), 2);
        cluster.wait_rsa(job, "READY");
        match number {
            0 => cluster.slurm.cancel(blocker),
            _ => give(alice, &format!("go-{}", number - 1)),
        }
        cluster.slurm.wait_state(job, "RUNNING", DEADLINE);
        told.push((job, life(1)));
        homes.push((job, home));
    }
    give(alice, "go-2");
    for (job, home) in &homes {
        cluster.wait_done(*job);
        assert_eq!(tree(home), content);
    }
    cluster.slurm.cancel(others);

    // 1719 and 1722: no RSA variables, and demoted.
    for _ in 0..2 {
        let blocker = cluster.block(4);
        let plain = cluster.submit("#!/bin/sh\ntrue\n", 4);
        says(plain, INELIGIBLE);
        let first = cluster.submit("#!/bin/sh\ntrue\n", 4);
        before_all(first);
        says(plain, DEMOTED[1]);
        told.push((plain, words(&[INELIGIBLE, DEMOTED[0], DEMOTED[1]])));
        // When it is next again, it would be said again.
        cluster.slurm.cancel(plain);
        cluster.slurm.cancel(blocker);
        cluster.slurm.wait_state(first, "COMPLETED", DEADLINE);
    }

    // An eligible one that is demoted with its input staged.
    let blocker = cluster.block(4);
    let demoted = cluster.submit(&script(alice, &[format!("DATA_IN={}", input.display())], "await go"), 4);
    cluster.wait_rsa(demoted, "READY");
    let first = cluster.submit("#!/bin/sh\ntrue\n", 4);
    before_all(first);
    says(demoted, DEMOTED[1]);
    cluster.slurm.cancel(demoted);
    cluster.slurm.cancel(blocker);
    cluster.slurm.wait_state(first, "COMPLETED", DEADLINE);
    give(alice, "go");
    let staged = [
        "assigning 2 rsa-nodes to job N",
        "constructing RSA block for job N",
        "done constructing RSA block for job N",
        "staging data for job N",
        "finished staging data in for job N",
        DEMOTED[0],
        "destroying RSA block for job N",
        "finished destroying RSA block for job N",
        DEMOTED[1],
    ];
    told.push((demoted, words(&staged)));

    // One that is too small.
    let blocker = cluster.block(4);
    let small = cluster.submit(&script(alice, &[format!("DATA_IN={}", input.display())], "true"), 1);
    cluster.wait_rsa(small, "INELIGIBLE");
    cluster.slurm.cancel(blocker);
    cluster.wait_done(small);
    told.push((small, words(&["job N too small, marking ineligible"])));

    // 1725 to 1727: all RSA nodes.
    for number in 0..3 {
        let home = output(&format!("all-{number}"));
        let directives = [format!("DATA_OUT={}", home.display()), "NODES=8".into()];
        let body = format!("cp {}/* {}", input.display(), home.display());
        let job = cluster.start_staged(&script(alice, &directives, &body), 4);
        cluster.wait_done(job);
        assert_eq!(tree(&home), content);
        told.push((job, life(8)));
    }

    for (job, expected) in told {
        assert_eq!(
            sentences(&cluster, job),
            expected,
            "job {job} in\n{}",
            cluster.ondeck(&["job", "log"]).stdout
        );
    }
    cluster.assert_clean();
}
