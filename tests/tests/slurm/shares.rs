//! Staging by several RSA nodes at once.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};

use ondeck_testbed::available;

use crate::cluster::{Cluster, tree};
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
