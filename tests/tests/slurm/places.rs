//! How many jobs are staged at the same time, and whose.

use std::collections::BTreeMap;
use std::fs;

use ondeck_testbed::{User, available};

use crate::aids::{files, folder, program, script};
use crate::cluster::{Cluster, Setup, tree};
use crate::jobs::Blocker;

/// A job that must have its input: by a script of its user's, or by a copy.
fn submit(cluster: &Cluster, user: &User, name: &str, makes: Option<&str>) -> u32 {
    let input = folder(user, name, &files(1, 1000));
    let output = folder(user, &format!("{name}-out"), &BTreeMap::new());
    let mut lines =
        vec!["WAIT=hold".to_owned(), "NODES=1".to_owned(), format!("DATA_IN={}", input.display())];
    lines.extend(
        makes.map(|text| format!("STAGE_IN={}", program(user, &format!("{name}-makes"), text).display())),
    );
    let body = format!("cp {}/* {}", input.display(), output.display());
    let options = ["--nodes=1", "--exclusive", "--no-requeue", "--output=/dev/null"];
    cluster.slurm.submit(user, &script(user, &lines, &body), &options)
}

#[test]
fn a_script_that_does_not_end_keeps_nobody_else_from_being_staged() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "staging = 1".into(), ..Setup::default() });
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let blocker = Blocker::new(&cluster, 4);
    let endless = "#!/bin/sh -e\nuntil [ -e $HOME/go ]; do sleep 0.1; done\ncp -R $2/. $1/\n";
    let first = submit(&cluster, alice, "first", Some(endless));
    cluster.wait_rsa(first, "STAGING_IN");
    let second = submit(&cluster, alice, "second", Some(endless));
    cluster.wait_rsa(second, "BOOTED");
    // Of another user one that is copied, and one that has a script.
    let copied = submit(&cluster, bob, "copied", None);
    cluster.wait_rsa(copied, "READY");
    let made = submit(&cluster, bob, "made", Some("#!/bin/sh -e\ncp -R $2/. $1/\n"));
    cluster.wait_rsa(made, "READY");
    let states = [first, second].map(|job| cluster.job(job).unwrap()["rsa_state"].clone());
    assert_eq!(states, ["STAGING_IN", "BOOTED"]);
    fs::write(alice.home.join("go"), "").unwrap();
    blocker.release();
    for (job, user, name) in
        [(first, alice, "first"), (second, alice, "second"), (copied, bob, "copied"), (made, bob, "made")]
    {
        cluster.wait_done(job);
        assert_eq!(tree(&user.scratch.join(format!("{name}-out"))), files(1, 1000), "{name}");
    }
    cluster.assert_clean();
}
