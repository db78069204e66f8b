//! The life of a job: input, output, both.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;

use ondeck_testbed::{User, available};

use crate::cluster::{Cluster, tree};

/// A directory of a user's with some files.
pub fn directory(user: &User, name: &str, files: &[(&str, &str)]) -> PathBuf {
    let dir = user.scratch.join(name);
    fs::create_dir_all(&dir).unwrap();
    for (file, text) in files {
        let path = dir.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    }
    own(&dir, user);
    dir
}

fn own(path: &std::path::Path, user: &User) {
    chown(path, Some(user.uid), Some(user.gid)).unwrap();
    if path.is_dir() {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        for entry in fs::read_dir(path).unwrap() {
            own(&entry.unwrap().path(), user);
        }
    }
}

#[test]
fn input_is_in_ram_when_the_job_starts_and_results_come_home_after_it_has_left_its_nodes() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let input = directory(alice, "in", &[("a", "alpha"), ("deep/b", "beta")]);
    let output = directory(alice, "out", &[]);
    let blocker = cluster.block(4);
    let script = format!(
        "#!/bin/sh\n#RSA_DATA_IN={input}\n#RSA_DATA_OUT={output}\n#RSA_OUT_SIZE=1MiB\n\
         findmnt -n -o SOURCE -T {input} > {scratch}/where\n\
         cat {input}/a {input}/deep/b > {output}/result\nhostname > {output}/host\n\
         truncate -s 1G {output}/hollow\n",
        input = input.display(),
        output = output.display(),
        scratch = alice.scratch.display(),
    );
    let said = alice.scratch.join("said");
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2", &format!("--output={}", said.display())]);
    cluster.wait_rsa(job, "READY");
    cluster.slurm.cancel(blocker);
    cluster.wait_done(job);
    // What was written is told, not what a hole could hold.
    let hollow = output.join("hollow");
    assert_eq!(fs::metadata(&hollow).unwrap().len(), 1 << 30);
    let story = cluster.show(job);
    assert!(story.contains(" B in 3 files") && !story.contains("GiB in"), "{story}");
    fs::remove_file(&hollow).unwrap();
    let found = tree(&output);
    assert_eq!(found["result"], b"alphabeta");
    let place = fs::read_to_string(alice.scratch.join("where")).unwrap();
    assert!(place.contains("ondeck") || place.contains("job-"), "the input was read from {place}");
    let said = fs::read_to_string(said).unwrap();
    assert!(said.contains("ondeck: its data is in a RAM disk"), "{said}");
    let states = cluster.states(job);
    let wanted = [
        "INITIAL",
        "ASSIGNED",
        "BOOTING",
        "BOOTED",
        "STAGING_IN",
        "READY",
        "MOUNTING",
        "INUSE_BOTH",
        "UNMOUNTING",
        "UNMOUNTED",
        "STAGING_OUT",
        "DONE_STAGING_OUT",
        "TEARDOWN",
        "DESTROYED",
        "INITIAL",
    ];
    assert_eq!(states, wanted);
    // Each phase was timed once; nobody else's job was there.
    let figures = cluster.ondeck(&["status", "--metrics"]).stdout;
    for phase in ["construct", "stage_in", "mount", "unmount", "stage_out", "destroy"] {
        let line = format!("ondeck_phase_seconds_count{{phase=\"{phase}\",outcome=\"done\"}} 1");
        assert!(figures.lines().any(|found| found == line), "no `{line}` in\n{figures}");
    }
    for some in [
        "ondeck_hook_seconds_count{hook=\"prolog\",answer=\"mounted\"}",
        "ondeck_hook_seconds_count{hook=\"epilog\"",
        "ondeck_command_seconds_count{command=\"squeue\",outcome=\"done\"}",
        "ondeck_journal_write_seconds_count{outcome=\"done\"}",
        "ondeck_call_seconds_count{call=\"POST steps\",outcome=\"done\"}",
    ] {
        assert!(figures.contains(some), "no `{some}` in\n{figures}");
    }
    // Agents name the job as the scheduler does: those of its two RSA nodes, and of its two compute nodes, which Slurm chooses.
    let agents =
        ["r", "c"].into_iter().flat_map(|kind| (1..=4).map(move |number| format!("agent-{kind}{number}")));
    let lines: usize = std::iter::once("scheduler".to_owned())
        .chain(agents)
        .map(|log| cluster.log_text(&log))
        .filter(|log| log.contains(&format!("job={job} ")) || log.contains(&format!("job={job}}}")))
        .count();
    assert!(lines >= 5, "the job is named in {lines} logs");
    cluster.assert_clean();
}
