//! What a job has left is remembered for the next one of its user, on a CephFS that is the cluster's disk.

use std::path::Path;

use ondeck_testbed::{User, available, wait_until};
use serde_json::Value;

use crate::aids::LONG;
use crate::cluster::Cluster;
use crate::jobs::directives;
use crate::layouts::Lake;

impl Cluster {
    /// What a user sees of the history of layouts.
    #[track_caller]
    pub fn history(&self, user: &User) -> Vec<Value> {
        let log_in = self.host("ctl").log_in(user);
        let ran = self.ondeck_on(&log_in, &["layout", "history", "--json"]);
        ran.assert_success();
        serde_json::from_str(&ran.stdout).unwrap()
    }

    /// Runs a job of two processes to its end, which asks for a layout by what is known; gives what its layout was chosen from.
    #[track_caller]
    fn run_with_history(&self, user: &User, directory: &Path, name: &str, lines: &str) -> (u32, String) {
        let script = format!(
            "#!/bin/sh\n#RSA_LAYOUT=auto\n#RSA_LAYOUT_DIR={0}\ncd {0} || exit 9\n{lines}",
            directory.display()
        );
        let name = format!("--job-name={name}");
        let options = [
            "--nodes=1",
            "--ntasks=2",
            "--overcommit",
            "--exclusive",
            "--no-requeue",
            "--output=/dev/null",
            &name,
        ];
        let job = self.slurm.submit(user, &script, &options);
        self.wait_completed(job);
        let layout = self.wait_layout(job, directory, "restored");
        (job, layout["from"].as_str().unwrap().to_owned())
    }

    /// Waits until so many runs of a user are known.
    #[track_caller]
    pub fn wait_history(&self, user: &User, runs: usize) {
        wait_until(LONG, "what the jobs have left is counted", || self.history(user).len() == runs);
    }
}

/// A file of each of two processes, written together at the end.
const EACH: &str =
    "for rank in 0 1; do head -c 2M /dev/zero > rank-$rank || exit 9; done\ntouch rank-0 rank-1\n";

#[test]
fn what_a_job_has_left_chooses_the_layout_of_the_next_and_nobody_else_sees_it() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let default = "the site's default, as nothing is known of the job's files";
    let directory = lake.folder(alice, "case-1");
    let (first, from) = cluster.run_with_history(alice, &directory, "sim-1", EACH);
    assert_eq!(from, default);
    cluster.wait_history(alice, 1);
    let [run] = &cluster.history(alice)[..] else { panic!("one run") };
    assert!(run["job"].as_str().unwrap().starts_with(&format!("{first}@")), "{run:#}");
    assert!(run["directory"].as_str().unwrap().ends_with("/lake/case-#"), "{run:#}");
    assert_eq!(
        (&run["program"], &run["used"]),
        (&"sim-#".into(), &"each process has files of its own".into())
    );
    let (shape, tally) = (&run["run"]["shape"], &run["run"]["tally"]);
    assert_eq!(
        (&shape["tasks"], &tally["files"], &tally["bytes"]),
        (&2.into(), &2.into(), &(4 << 20).into())
    );

    // The next one, in another directory of the kind, gets its layout from that.
    let next = lake.folder(alice, "case-2");
    let (second, from) = cluster.run_with_history(alice, &next, "sim-2", EACH);
    assert!(from.starts_with("the history, 1 run: each process has files of its own; "), "{from}");
    assert_eq!(lake.layout_of_file(&next.join("rank-1")), "1 x 1048576");
    let shown = cluster.show(second);
    assert!(shown.contains("from the history, 1 run: each process has files of its own"), "{shown}");
    cluster.wait_history(alice, 2);
    let log_in = cluster.host("ctl").log_in(alice);
    let site = cluster.bed.dir().join("site.toml").display().to_string();
    let advise = [
        "layout",
        "advise",
        "--nodes",
        "1",
        "--tasks",
        "2",
        "--site",
        &site,
        "--program",
        "sim-9",
        "--directory",
    ];
    let in_directory = next.display().to_string();
    let advised = cluster.ondeck_on(&log_in, &[&advise[..], &[&in_directory]].concat());
    advised.assert_success();
    assert!(
        advised.stdout.contains("from the history, 2 runs: each process has files of its own"),
        "{}",
        advised.stdout
    );

    // Another user learns nothing from it, and sees nothing.
    let of_bob = lake.folder(bob, "case-3");
    let (_, from) = cluster.run_with_history(bob, &of_bob, "sim-1", "head -c 1M /dev/zero > one\n");
    assert_eq!(from, default);
    cluster.wait_history(bob, 1);
    assert_eq!(cluster.history(bob)[0]["uid"], bob.uid);
    let as_bob = cluster.host("ctl").log_in(bob);
    let uid = alice.uid.to_string();
    for words in
        [["layout", "history", "--user", &uid, "--json"], ["layout", "forget", "--all", "--user", &uid]]
    {
        let refused = cluster.ondeck_on(&as_bob, &words);
        assert!(!refused.success() && refused.stderr.contains("another user"), "{refused:?}");
    }
    let all = cluster.ondeck(&["layout", "history"]);
    all.assert_success();
    for user in [alice, bob] {
        assert!(all.stdout.contains(&format!(", user {}", user.uid)), "{}", all.stdout);
    }

    // Names come after the history, which a user may have forgotten.
    let (_, from) =
        cluster.run_with_history(alice, &directory, "x", "false && srun -n 2 ./simpleFoam\ntrue\n");
    assert_eq!(from, "the name of its program (`*foam`: file-per-process)");
    cluster.ondeck_on(&log_in, &["layout", "forget", "--program", "sim-1"]).assert_success();
    let (_, from) = cluster.run_with_history(alice, &next, "sim-3", "true\n");
    assert_eq!(from, default);

    // What a RAM disk had is counted where it has come home.
    let results = lake.folder(alice, "results");
    let script = format!(
        "#!/bin/sh\n#SBATCH --job-name=home\n#RSA_LAYOUT=auto\n#RSA_OUT_SIZE=20MiB\n#RSA_WAIT=hold\n{}\
         head -c 8M /dev/zero > {}/one\n",
        directives(&[], &[&results]),
        results.display()
    );
    let job = cluster.submit(&script, 1);
    cluster.wait_done(job);
    wait_until(LONG, "the results are counted", || {
        let home = cluster.history(alice).into_iter().find(|run| run["program"] == "home");
        home.is_some_and(|run| {
            run["run"]["tally"]["bytes"] == 8 << 20 && run["used"] == "there is one process"
        })
    });
    lake.end(&cluster);
}
