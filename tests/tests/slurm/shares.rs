//! Staging by several RSA nodes at once.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};

use ondeck_testbed::available;

use crate::aids::{LONG, files, folder, script};
use crate::cluster::{Cluster, Setup, tree};
use crate::life::directory;

#[test]
fn all_nodes_of_a_job_stage_and_everything_arrives() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let files: Vec<(String, String)> = (0..60)
        .map(|n| match n {
            0..10 => (format!("top-{n}"), format!("at the top {n}")),
            _ => (format!("part-{}/deep/{n}", n % 7), format!("file {n}")),
        })
        .collect();
    let listed: Vec<(&str, &str)> = files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let input = directory(alice, "in", &listed);
    let output =
        directory(alice, "out", &[("part-1/deep/old", "from before"), ("kept", "kept"), ("gone", "gone")]);
    fs::create_dir(input.join("empty")).unwrap();
    symlink("part-1/deep", input.join("link")).unwrap();
    // Enough to be worth sharing, and quick to copy: it has no data.
    for name in ["part-2/large", "part-5/large"] {
        let file = fs::File::create(input.join(name)).unwrap();
        file.set_len(150 << 20).unwrap();
        chown(input.join(name), Some(alice.uid), Some(alice.gid)).unwrap();
    }
    let blocker = cluster.block(4);
    // The copies of the job are a file of several names, too, in the second round.
    let script = |links: &str| {
        format!(
            "#!/bin/sh\n#RSA_DATA_IN={input}\n#RSA_DATA_OUT={output}\n#RSA_OUT_SIZE=1MiB\n#RSA_NODES=2\n\
             set -e\ncp -a --sparse=always {input}/. {output}/\nrm {output}/gone\n{links}\n",
            input = input.display(),
            output = output.display(),
        )
    };
    let job = cluster.slurm.submit(alice, &script(""), &["--output=/dev/null"]);
    cluster.wait_rsa(job, "READY");
    cluster.slurm.cancel(blocker);
    cluster.wait_done(job);
    let log = cluster.ondeck(&["job", "show", &job.to_string()]).stdout;
    let shared = |what: &str| log.lines().any(|line| line.contains(what) && line.contains("by 2 RSA nodes"));
    assert!(shared("finished staging data in") && shared("finished staging data out"), "{log}");
    let mut wanted = tree(&input);
    wanted.insert("part-1/deep/old".into(), b"from before".to_vec());
    wanted.insert("kept".into(), b"kept".to_vec());
    wanted.insert("link/old".into(), b"from before".to_vec());
    let found = tree(&output);
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    assert!(found == wanted, "some files have other content");
    assert!(output.join("empty").is_dir());
    assert_eq!(fs::read_link(output.join("link")).unwrap().to_str(), Some("part-1/deep"));
    assert_eq!(fs::metadata(output.join("part-3/deep")).unwrap().uid(), alice.uid);

    // Names of one file stay names of one file.
    let blocker = cluster.block(4);
    let script = script(&format!("ln {out}/top-0 {out}/part-2/same", out = output.display()));
    let job = cluster.slurm.submit(alice, &script, &["--output=/dev/null"]);
    fs::write(output.join("gone"), "again").unwrap();
    cluster.wait_rsa(job, "READY");
    cluster.slurm.cancel(blocker);
    cluster.wait_done(job);
    let inode = |name: &str| fs::metadata(output.join(name)).unwrap().ino();
    assert_eq!(inode("top-0"), inode("part-2/same"));
    cluster.assert_clean();
}

#[test]
fn copying_for_all_jobs_together_stays_below_the_sites_limit() {
    if !available() {
        return;
    }
    const MIB: usize = 1 << 20;
    let scheduler = "sharing = \"any\"\nbandwidth = \"4MiB/s\"\nstaging = 2\n".into();
    let cluster = Cluster::with(Setup { scheduler, ..Setup::default() });
    let alice = cluster.user("alice");
    let jobs = ["one", "other"].map(|name| {
        let input = folder(alice, name, &files(2, 4 * MIB));
        let text = script(alice, &[format!("DATA_IN={}", input.display()), "WAIT=hold".into()], "true");
        cluster.submit(&text, 1)
    });
    let times = jobs.map(|job| {
        cluster.slurm.wait_state(job, "COMPLETED", LONG);
        cluster.wait_done(job);
        let story = cluster.story(job);
        let of = |state: &str| {
            let log = story["log"].as_array().unwrap();
            log.iter()
                .find(|line| line["states"][1] == state)
                .and_then(|line| line["at_ms"].as_u64())
                .unwrap()
        };
        (of("STAGING_IN"), of("READY"))
    });
    let [one, other] = times;
    let (begin, end) = (one.0.min(other.0), one.1.max(other.1));
    assert!(one.0.max(other.0) < one.1.min(other.1), "they were not staged at the same time: {times:?}");
    // 16 MiB at 4 MiB/s; the first moment is for free.
    assert!(end - begin >= 3_000, "{times:?}");
    cluster.assert_quiet();
    cluster.assert_clean();
}
