//! What a user can't do: have a RAM disk mounted where it does not belong, or give orders about what is another's.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use ondeck_testbed::{available, wait_until};

use crate::aids::{LONG, await_file, files, folder, give, make, script};
use crate::cluster::{Cluster, DEADLINE, tree};

/// Whatever of a RAM disk is mounted on the hosts, beside what the agents keep for themselves.
fn covers(cluster: &Cluster) -> Vec<PathBuf> {
    let mounts = cluster.bed.hosts().iter().flat_map(|host| host.new_mounts());
    let shown = mounts.filter(|mount| mount.kind.contains("gluster") && !mount.target.starts_with("/run"));
    shown.map(|mount| mount.target).collect()
}

#[track_caller]
fn assert_nobody_is_blamed(cluster: &Cluster) {
    for node in cluster.status()["nodes"].as_array().unwrap() {
        assert_eq!((&node["state"], &node["why"]), (&"up".into(), &"".into()), "{node}");
    }
    cluster.assert_no_hook_failed();
}

/// A job that reads and maybe writes a directory and is refused there: it must have worked on disk.
#[track_caller]
fn assert_works_on_disk(
    cluster: &Cluster,
    directives: &[String],
    swap: impl FnOnce(),
    path: &Path,
    why: &str,
) {
    let alice = cluster.user("alice");
    let body = format!("cat {0}/part-0 > {1}/read\nawait go", path.display(), alice.scratch.display());
    let blocker = cluster.block(4);
    let job = cluster.submit(&script(alice, directives, &body), 2);
    wait_until(LONG, "the RAM disk is ready, or will not be", || {
        let state = cluster.job(job).map(|job| job["rsa_state"].clone()).unwrap_or_default();
        state == "READY" || state == "INELIGIBLE"
    });
    swap();
    cluster.slurm.cancel(blocker);
    cluster.slurm.wait_state(job, "RUNNING", DEADLINE);
    await_file(alice, "read");
    cluster.wait_rsa(job, "INELIGIBLE");
    let note = cluster.note(job);
    assert!(note.contains(&path.display().to_string()) && note.contains(why), "{note}");
    assert!(note.contains("works on disk"), "{note}");
    assert_eq!(covers(cluster), Vec::<PathBuf>::new());
    give(alice, "go");
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    assert_nobody_is_blamed(cluster);
    for file in ["go", "read"] {
        fs::remove_file(alice.scratch.join(file)).unwrap();
    }
}

#[test]
fn directories_that_may_not_be_covered_are_not_and_the_job_works_on_disk() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let content = files(2, 1000);

    // Not below a prefix that the administrator allows.
    let elsewhere = alice.home.join("data");
    make(alice, &elsewhere, &content);
    let line = format!("DATA_IN={}", elsewhere.display());
    assert_works_on_disk(&cluster, &[line], || {}, &elsewhere, "mount_prefixes");

    // Somebody else's, who lets alice read it, and one that lets nobody.
    let others = folder(bob, "public", &content);
    fs::set_permissions(&bob.scratch, fs::Permissions::from_mode(0o755)).unwrap();
    let line = format!("DATA_IN={}", others.display());
    assert_works_on_disk(&cluster, &[line], || {}, &others, "belongs to user");

    // A symlink to there that is put in its place when all was looked at.
    let input = folder(alice, "in", &content);
    let line = format!("DATA_IN={}", input.display());
    let swap = || {
        fs::rename(&input, alice.scratch.join("old")).unwrap();
        symlink(&others, &input).unwrap();
    };
    assert_works_on_disk(&cluster, &[line], swap, &input, "belongs to user");

    // And one to a place of alice's own that is not allowed.
    let output = folder(alice, "out", &content);
    let line = format!("DATA_OUT={}", output.display());
    let swap = || {
        fs::rename(&output, alice.scratch.join("old-out")).unwrap();
        symlink(&elsewhere, &output).unwrap();
    };
    assert_works_on_disk(&cluster, &[line], swap, &output, "mount_prefixes");
    assert_eq!(tree(&elsewhere), content);
    assert_eq!(tree(&others), content);
    cluster.assert_clean();
}

#[test]
fn a_directory_that_is_exchanged_for_a_symlink_again_and_again_leads_no_mount_elsewhere() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let content = files(2, 1000);
    let input = folder(alice, "in", &content);
    let target = folder(bob, "public", &BTreeMap::new());
    let link = alice.scratch.join("link");
    symlink(&target, &link).unwrap();
    for round in 0..3 {
        let body = format!("tell begun-{round}\nawait go-{round}");
        let blocker = cluster.block(4);
        let job = cluster.submit(&script(alice, &[format!("DATA_IN={}", input.display())], &body), 2);
        cluster.wait_rsa(job, "READY");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let exchange = rustix::fs::RenameFlags::EXCHANGE;
                    rustix::fs::renameat_with(rustix::fs::CWD, &input, rustix::fs::CWD, &link, exchange)
                        .unwrap();
                }
                if fs::symlink_metadata(&input).unwrap().is_symlink() {
                    let exchange = rustix::fs::RenameFlags::EXCHANGE;
                    rustix::fs::renameat_with(rustix::fs::CWD, &input, rustix::fs::CWD, &link, exchange)
                        .unwrap();
                }
            });
            cluster.slurm.cancel(blocker);
            let path = alice.scratch.join(format!("begun-{round}"));
            let begun = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                wait_until(LONG, "the job begins", || path.exists());
            }));
            stop.store(true, Ordering::Relaxed);
            begun.unwrap();
        });
        let covered = covers(&cluster);
        let own = |path: &PathBuf| *path == input || *path == link;
        assert!(covered.iter().all(own), "{covered:?}");
        assert!(covered.is_empty() || covered.len() == 2, "on all nodes of the job or on none: {covered:?}");
        give(alice, &format!("go-{round}"));
        cluster.wait_done(job);
        assert_nobody_is_blamed(&cluster);
    }
    assert!(tree(&target).is_empty());
    assert_eq!(tree(&input), content);
    cluster.assert_clean();
}

#[test]
fn orders_are_obeyed_from_those_alone_whose_they_are() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("echo result > {}/result\ntell written\nawait go", output.display());
    let script_text = script(alice, &[format!("DATA_OUT={}", output.display())], &body);
    let job = cluster.start_staged(&script_text, 1);
    let number = job.to_string();
    await_file(alice, "written");
    cluster.wait_rsa(job, "INUSE_OUT");
    let runs = || {
        let line = cluster.job(job).unwrap();
        assert_eq!((&line["job_state"], &line["rsa_state"]), (&"RUNNING".into(), &"INUSE_OUT".into()));
        assert_eq!(cluster.covers_of(&output).len(), 1);
    };

    let own = cluster.host("ctl").log_in(alice);
    assert!(cluster.ondeck_on(&own, &["job", "show", &number]).stdout.contains(output.to_str().unwrap()));
    let others = cluster.host("ctl").log_in(bob);
    for order in
        [&["job", "show", &number][..], &["job", "retry", &number], &["job", "abandon", &number, "--yes"]]
    {
        cluster.ondeck_on(&others, order).assert_code(2).assert_says("is not known here");
    }
    cluster.ondeck_on(&others, &["wait", &number]).assert_code(2);
    let seen = cluster.ondeck_on(&others, &["status"]);
    seen.assert_success();
    assert!(
        !seen.stdout.contains(&format!(" {number} ")) && seen.stdout.contains("no jobs"),
        "{}",
        seen.stdout
    );
    // Nor does whoever is root somewhere else.
    cluster.ondeck_on(cluster.host("c4"), &["job", "abandon", &number, "--yes"]).assert_code(2);
    for stranger in [&own, &others, cluster.host("c1")] {
        cluster.ondeck_on(stranger, &["node", "drain", "r1"]).assert_code(2);
        cluster.ondeck_on(stranger, &["node", "resume", "r1"]).assert_code(2);
        cluster.ondeck_on(stranger, &["job", "log"]).assert_code(2);
    }
    assert_nobody_is_blamed(&cluster);

    // Hooks: from a user on the job's node, from root of another node, and from one that takes the node's name.
    let ondeck = cluster.ondeck.display().to_string();
    let config = cluster.bed.dir().join("ondeck.toml").display().to_string();
    let node = cluster.slurm.job(job)["NodeList"].clone();
    assert_ne!(node, "c4");
    let other = cluster.host("c4");
    for hook in ["prolog", "epilog"] {
        let line =
            format!("SLURM_JOB_ID={job} SLURM_JOB_UID={} exec {ondeck} {hook} --config {config}", alice.uid);
        let as_user = cluster.host(&node).log_in(alice).shell(&line);
        as_user.assert_code(0).assert_says("only root of");
        runs();
        other.shell(&line).assert_code(0);
        runs();
        let lie = format!("hostname {node} && {line}");
        other.run(&["unshare", "--uts", "sh", "-c", &lie]).assert_code(0).assert_says("only root of");
        runs();
    }
    give(alice, "go");
    cluster.wait_done(job);
    assert_eq!(tree(&output)["result"], b"result\n");
    // Also when nothing of it is left.
    cluster.ondeck_on(&others, &["job", "show", &number]).assert_code(2);
    cluster.ondeck_on(&own, &["job", "show", &number]).assert_success();
    cluster.assert_clean();
}
