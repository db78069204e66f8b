//! Who had which nodes, as `ondeck status --timeline` shows it.

use std::fs;

use ondeck_core::Bytes;
use ondeck_testbed::available;
use serde_json::Value;

use crate::aids::{files, folder, script};
use crate::cluster::{Cluster, tree};

#[test]
fn what_happened_is_shown_as_a_picture_and_to_users_their_own_alone() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let content = files(3, 10_000);
    let (input, output) = (folder(alice, "in", &content), folder(alice, "out", &[].into()));
    let lines = [
        format!("DATA_IN={}", input.display()),
        format!("DATA_OUT={}", output.display()),
        "OUT_SIZE=1MiB".into(),
    ];
    let blocker = cluster.block(4);
    let job = cluster
        .submit(&script(alice, &lines, &format!("cp {0}/* {1}", input.display(), output.display())), 2);
    cluster.wait_rsa(job, "READY");
    cluster.slurm.cancel(blocker);
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);

    let shown = |ran: ondeck_testbed::Ran| -> Value {
        ran.assert_success();
        serde_json::from_str(&ran.stdout).unwrap()
    };
    let all = shown(cluster.ondeck(&["status", "--timeline", "-"]));
    let phases = |kind: &str| -> Vec<(String, usize)> {
        let of_job = all[kind].as_array().unwrap().iter().filter(|span| span["job"] == job);
        let nodes = |span: &Value| -> usize {
            let ranges = span["nodes"].as_array().unwrap().iter();
            ranges.map(|range| (range[1].as_u64().unwrap() - range[0].as_u64().unwrap() + 1) as usize).sum()
        };
        of_job.map(|span| (span["phase"].as_str().unwrap().to_owned(), nodes(span))).collect()
    };
    let rsa = phases("rsa");
    let mut order = vec!["constructing", "staging_in", "ready", "in_use", "staging_out", "removing"];
    // What takes no millisecond is not seen.
    order.retain(|phase| {
        ["staging_in", "ready", "in_use", "staging_out"].contains(phase)
            || rsa.iter().any(|(found, _)| found == phase)
    });
    assert_eq!(rsa.iter().map(|(phase, _)| &**phase).collect::<Vec<_>>(), order, "{all:#}");
    assert!(rsa.iter().all(|(_, nodes)| *nodes == rsa[0].1 && *nodes > 0));
    assert_eq!(phases("compute"), [("running".to_owned(), 2)]);
    assert_eq!(all["compute_names"].as_array().unwrap().len(), 2);
    assert_eq!(
        all["rsa_names"].as_array().unwrap().len(),
        cluster.status()["nodes"].as_array().unwrap().len()
    );
    let spans = all["rsa"].as_array().unwrap().iter().chain(all["compute"].as_array().unwrap());
    assert!(spans.clone().all(|span| span["to_ms"].as_u64() <= all["end_ms"].as_u64()));

    let on_login = |user| cluster.host("ctl").log_in(user);
    let hers = shown(cluster.ondeck_on(&on_login(alice), &["status", "--timeline", "-"]));
    // Each is of the time until it was asked for.
    let moments = |timeline: &Value| -> Vec<(String, u64)> {
        let begin = timeline["begin_ms"].as_u64().unwrap();
        let spans = ["rsa", "compute"].iter().flat_map(|kind| timeline[kind].as_array().unwrap());
        let of = |span: &Value| {
            (span["phase"].as_str().unwrap().to_owned(), begin + span["from_ms"].as_u64().unwrap())
        };
        spans.map(of).collect()
    };
    assert_eq!(moments(&hers), moments(&all));
    let his = shown(cluster.ondeck_on(&on_login(bob), &["status", "--timeline", "-", "--hours", "1"]));
    assert_eq!(moments(&his), [], "{his:#}");
    assert_eq!(his["compute_nodes"], 0, "nor where hers was");

    let picture = alice.home.join("day.svg");
    cluster.ondeck(&["status", "--timeline", picture.to_str().unwrap()]).assert_success();
    let picture = fs::read_to_string(picture).unwrap();
    for phase in ["staging in", "ready", "in use", "staging out", "running"] {
        assert!(picture.contains(&format!("job {job}: {phase}, ")), "{phase}: {picture}");
    }
    // The same as a log: the job that ran, not the one that was cancelled without any data.
    let journal = cluster.bed.dir().join("scheduler");
    let simulated =
        cluster.ondeck(&["simulate", "--from", "journal", journal.to_str().unwrap(), "--rsa-nodes", "1"]);
    simulated.assert_success();
    let bytes = Bytes(content.values().map(|data| data.len() as u64).sum());
    for part in [
        "1 job in ",
        "on 2 nodes",
        &format!("measured, of 1 job: {bytes} read, {bytes} written; 1 of them had a RAM disk then"),
    ] {
        assert!(simulated.stdout.contains(part), "{part}: {}", simulated.stdout);
    }
    // A restart of the scheduler takes nothing from it.
    cluster.kill("scheduler");
    cluster.start_scheduler();
    assert_eq!(
        shown(cluster.ondeck(&["status", "--timeline", "-"]))["rsa"].as_array().unwrap().len(),
        rsa.len()
    );
    cluster.assert_clean();
}
