//! Sites where the data of jobs is reached by other nodes than the jobs' own: a command of the site names them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use ondeck_testbed::{available, wait_until};

use crate::aids::{await_file, files, folder, give, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};

/// A command that notes what it was asked, does this, and can be replaced.
struct Command(tempfile::TempDir);

impl Command {
    fn new(body: &str) -> Command {
        let command = Command(tempfile::tempdir().unwrap());
        command.replace(body);
        command
    }

    fn replace(&self, body: &str) {
        let path = self.0.path().join("map");
        fs::write(&path, format!("#!/bin/sh\necho \"$@\" >> {}/asked\n{body}\n", self.0.path().display()))
            .unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn setup(&self) -> Setup {
        let scheduler = format!("io_nodes = [\"{}/map\", \"--nodes-of\"]\n", self.0.path().display());
        Setup { scheduler, ..Setup::default() }
    }

    fn asked(&self) -> Vec<String> {
        let text = fs::read_to_string(self.0.path().join("asked")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

#[test]
fn a_ram_disk_is_shown_where_the_sites_command_says() {
    if !available() {
        return;
    }
    let command = Command::new("echo \"$3\" | tr , '\\n'");
    let cluster = Cluster::with(command.setup());
    let alice = cluster.user("alice");
    let content = files(3, 1000);
    let input = folder(alice, "in", &content);
    let text = |name: &str, body: &str| {
        let output = folder(alice, name, &BTreeMap::new());
        let directives = [
            format!("DATA_IN={}", input.display()),
            format!("DATA_OUT={}", output.display()),
            "OUT_SIZE=1MiB".into(),
        ];
        let body = format!("{body}\ntell {name}-runs\nawait {name}-go");
        (script(alice, &directives, &body), output)
    };
    // The job's own nodes.
    let (own, output) = text("own", &format!("cp {}/* {}/own", input.display(), alice.scratch.display()));
    let job = cluster.start_staged(&own, 2);
    await_file(alice, "own-runs");
    let mut nodes: Vec<String> = cluster.slurm.compute().iter().map(|host| host.name().to_owned()).collect();
    let covers = cluster.covers_of(&output);
    nodes.retain(|node| covers.iter().any(|cover| cover.starts_with(&format!("{node}: ondeck:job-"))));
    assert_eq!((nodes.len(), covers.len()), (2, 2), "{covers:?}");
    let wanted = format!("--nodes-of {job} {}", nodes.join(","));
    let asked = command.asked();
    assert!(!asked.is_empty() && asked.iter().all(|line| *line == wanted), "{asked:?}");
    give(alice, "own-go");
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);

    // Another node than the job's: what is written there is the job's output.
    command.replace("echo c4");
    let (other, output) = text("other", ":");
    let blocker = cluster.block(4);
    let options = ["--nodelist=c1,c2", "--exclusive", "--no-requeue", "--output=/dev/null"];
    let job = cluster.slurm.submit(alice, &other, &options);
    cluster.wait_rsa(job, "READY");
    cluster.slurm.cancel(blocker);
    await_file(alice, "other-runs");
    let covers = cluster.covers_of(&output);
    assert!(covers.len() == 1 && covers[0].starts_with("c4: ondeck:job-"), "{covers:?}");
    let forwards = cluster.host("c4").log_in(alice);
    forwards.shell(&format!("cp {}/* {}", input.display(), output.display())).assert_success();
    assert!(tree(&output).is_empty(), "the results are in RAM");
    give(alice, "other-go");
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    assert!(cluster.covers_of(&output).is_empty());
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_job_works_on_disk_as_long_as_the_sites_command_fails() {
    if !available() {
        return;
    }
    let command = Command::new("echo 'no map today' >&2\nexit 3");
    let cluster = Cluster::with(command.setup());
    let alice = cluster.user("alice");
    let content = files(3, 1000);
    let input = folder(alice, "in", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let text = script(
        alice,
        &[
            format!("DATA_IN={}", input.display()),
            format!("DATA_OUT={}", output.display()),
            "OUT_SIZE=1MiB".into(),
        ],
        &format!(
            "cp {i}/part-0 {o}\ntell written\nawait go\ncp {i}/part-1 {i}/part-2 {o}",
            i = input.display(),
            o = output.display()
        ),
    );
    let job = cluster.start_staged(&text, 1);
    await_file(alice, "written");
    let on_disk = || BTreeMap::from([("part-0".to_owned(), content["part-0"].clone())]);
    assert_eq!(tree(&output), on_disk());
    // What it would have a RAM disk for now is its output.
    wait_until(DEADLINE, "it is said what is waited for", || {
        cluster.job(job).is_some_and(|job| {
            let says =
                job["message"].as_str().is_some_and(|text| text.contains("its compute nodes are not known"));
            says && job["rsa_state"] == "READY"
        })
    });
    let log = cluster.log_text("scheduler");
    assert_eq!(log.matches("map: exit status: 3: no map today").count(), 1, "it is said once: {log}");
    command.replace("echo \"$3\" | tr , '\\n'");
    cluster.wait_rsa(job, "INUSE_OUT");
    give(alice, "go");
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.assert_quiet();
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}
