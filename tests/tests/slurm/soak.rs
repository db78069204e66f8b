//! Many jobs, one after the other and beside each other: nothing is left over.

use std::collections::BTreeMap;
use std::path::Path;

use ondeck_testbed::{available, wait_until};

use crate::aids::{LONG, files, folder, script};
use crate::cluster::{Cluster, tree};

/// How many jobs; `ONDECK_SOAK=50` asks for more.
const JOBS: usize = 20;

/// The files in a host's /run/ondeck.
fn left_in_run(cluster: &Cluster, host: &str) -> Vec<String> {
    let dir = cluster.host(host).path_from_outside("/run/ondeck");
    if !dir.is_dir() {
        return Vec::new();
    }
    let names = tree_of(&dir);
    // What an agent has while nothing is lent, and what the hooks are.
    let own = [
        "agent.sock",
        "scheduler.sock",
        "lock",
        "epochs.json",
        "authority.json",
        "marks.json",
        "hooks/prolog.json",
        "hooks/epilog.json",
    ];
    names.into_iter().filter(|name| !own.iter().any(|own| name.ends_with(own))).collect()
}

/// Names of everything that is no directory.
fn tree_of(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if entry.file_type().unwrap().is_dir() {
            found.extend(tree_of(&path));
        } else {
            found.push(path.display().to_string());
        }
    }
    found
}

fn memory_of(cluster: &Cluster) -> Vec<serde_json::Value> {
    cluster.status()["nodes"].as_array().unwrap().iter().map(|node| node["free"].clone()).collect()
}

#[test]
fn nothing_is_left_over_after_many_jobs() {
    if !available() {
        return;
    }
    let jobs = std::env::var("ONDECK_SOAK").map_or(JOBS, |text| text.parse().unwrap());
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let before = memory_of(&cluster);
    let processes = cluster.bed.processes().len();
    let content = files(4, 20_000);
    let input = folder(alice, "in", &content);
    let submitted: Vec<_> = (0..jobs)
        .map(|number| {
            let output = folder(alice, &format!("out-{number}"), &BTreeMap::new());
            let text = script(
                alice,
                &[
                    format!("DATA_IN={}", input.display()),
                    format!("DATA_OUT={}", output.display()),
                    "OUT_SIZE=1MiB".into(),
                    // So that each goes all the way.
                    "WAIT=hold".into(),
                ],
                &format!("cp {}/* {}\nexit {}", input.display(), output.display(), number % 3),
            );
            (cluster.submit(&text, 1 + number % 2), output)
        })
        .collect();
    for (job, output) in &submitted {
        cluster.wait_done(*job);
        assert_eq!(tree(output), content, "{}", cluster.show(*job));
        let states = cluster.states(*job);
        assert!(states.contains(&"INUSE_BOTH".to_owned()), "job {job} worked on disk: {states:?}");
    }
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
    assert_eq!(memory_of(&cluster), before);
    for host in cluster.bed.hosts() {
        assert_eq!(left_in_run(&cluster, host.name()), Vec::<String>::new(), "{}", host.name());
    }
    wait_until(LONG, "no process is left over", || cluster.bed.processes().len() <= processes);
    // Nothing is in the journal's table of jobs: a new scheduler finds none.
    cluster.kill("scheduler");
    cluster.start_scheduler();
    let log = std::fs::read_to_string(cluster.bed.dir().join("log/scheduler.log")).unwrap();
    let read = log.lines().rfind(|line| line.contains("the journal was read")).unwrap();
    assert!(read.contains("jobs=0") && read.contains("with_results=0"), "{read}");
}
