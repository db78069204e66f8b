//! Elements of an array share the layout of their directory, on a CephFS that is the cluster's disk.

use std::fs;
use std::path::Path;

use ondeck_testbed::{User, available, wait_until};

use crate::aids::LONG;
use crate::cluster::Cluster;
use crate::jobs::{directives, says, wait_file};
use crate::layouts::{Lake, TWO};

/// Elements of alice's that write into one directory and then wait for a word each.
struct Array<'a> {
    cluster: &'a Cluster,
    user: &'a User,
    name: &'a str,
    /// Its last element has the same number.
    number: u32,
}

impl<'a> Array<'a> {
    #[track_caller]
    fn submit(cluster: &'a Cluster, name: &'a str, directory: &Path, elements: &str) -> Array<'a> {
        let user = cluster.user("alice");
        let scratch = user.scratch.join(name);
        let script = format!(
            "#!/bin/sh\n#RSA_LAYOUT_DIR={directory}:-c 2 -S 1M\nn=$SLURM_ARRAY_TASK_ID\n\
             life=$n.${{SLURM_RESTART_COUNT:-0}}\necho a > {directory}/file-$life || exit 9\n\
             echo $SLURM_JOB_ID > {scratch}-id-$life && mv {scratch}-id-$life {scratch}-$life\n\
             while [ ! -e {scratch}-gate-$life ]; do sleep 0.05; done\n",
            directory = directory.display(),
            scratch = scratch.display(),
        );
        let (elements, name_of_job) = (format!("--array={elements}"), format!("--job-name={name}"));
        let options =
            ["--nodes=1", "--exclusive", "--requeue", "--output=/dev/null", &elements, &name_of_job];
        let number = cluster.slurm.submit(user, &script, &options);
        Array { cluster, user, name, number }
    }

    /// Waits until a life of an element has written, and gives its number.
    #[track_caller]
    fn wait(&self, life: &str) -> u32 {
        let path = self.user.scratch.join(format!("{}-{life}", self.name));
        wait_file(&path);
        says(&path).parse().unwrap()
    }

    /// Has a life of an element end, and waits until it has.
    #[track_caller]
    fn end(&self, life: &str) {
        fs::write(self.user.scratch.join(format!("{}-gate-{life}", self.name)), "").unwrap();
        let (element, _) = life.split_once('.').unwrap();
        let element = format!("{}_{element}", self.number);
        wait_until(LONG, "an element ends well", || {
            let told = self.cluster.slurm.scontrol(&["show", "job", "-o", &element]);
            told.success() && told.stdout.contains(" JobState=COMPLETED ")
        });
    }

    /// Of these elements the one that has set the layout; the others have left it to that one, and nobody was told anything.
    #[track_caller]
    fn first_of(&self, jobs: &[u32], directory: &Path) -> u32 {
        let mut first = Vec::new();
        for job in jobs {
            let layout = self.cluster.layout(*job, directory);
            match layout["state"].as_str() {
                Some("set") => first.push(*job),
                Some("alone") => {
                    let text = layout["text"].as_str().unwrap();
                    assert!(text.contains(", another element of its array, sees to it"), "{text}");
                    assert_eq!(layout["options"], "-c 2 -S 1M");
                }
                _ => panic!("{job}: {layout:#}"),
            }
            let told = self.cluster.slurm.scontrol(&["show", "job", "-o", &job.to_string()]);
            assert!(!told.assert_success().stdout.contains("ondeck: layouts:"), "{}", told.stdout);
        }
        assert_eq!(first.len(), 1, "{first:?} of {jobs:?}");
        first[0]
    }
}

#[test]
fn elements_of_an_array_share_their_directory_s_layout_until_the_last_has_ended_through_kills() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let alice = cluster.user("alice");
    let directory = lake.folder(alice, "array");
    let array = Array::submit(&cluster, "share", &directory, "0-3");
    // There are two compute nodes.
    let [zero, one] = ["0.0", "1.0"].map(|life| array.wait(life));
    assert_eq!(lake.layout(&directory).as_deref(), Some(TWO));
    let first = array.first_of(&[zero, one], &directory);
    let (first_life, other_life, other) =
        if first == zero { ("0.0", "1.0", one) } else { ("1.0", "0.0", zero) };
    // It ends, and another one joins those that are left.
    array.end(first_life);
    array.wait("2.0");
    assert_eq!(lake.layout(&directory).as_deref(), Some(TWO));
    wait_until(LONG, "its end is noticed", || {
        let layout = cluster.layout(first, &directory);
        layout["text"].as_str().unwrap().ends_with("until other elements of its array have ended")
    });

    // Those that come after all of Ondeck was killed join them, too, and so does one that was requeued.
    for name in ["scheduler", "c1", "c2"] {
        cluster.kill(name);
    }
    cluster.start_scheduler();
    for name in ["c1", "c2"] {
        cluster.start_agent(name);
    }
    cluster.slurm.requeue(other);
    array.wait("3.0");
    cluster.slurm.scontrol(&["update", &format!("JobId={other}"), "StartTime=now"]).assert_success();
    array.end("2.0");
    let again = other_life.replace(".0", ".1");
    array.wait(&again);
    array.end("3.0");
    assert_eq!(lake.layout(&directory).as_deref(), Some(TWO));
    assert_eq!(cluster.layout(first, &directory)["state"], "set");
    array.end(&again);
    cluster.wait_layout(first, &directory, "restored");
    assert_eq!(lake.layout(&directory), None);
    for life in [first_life, other_life, "2.0", "3.0", &again] {
        assert_eq!(lake.layout_of_file(&directory.join(format!("file-{life}"))), TWO, "{life}");
    }
    // What all of them have left is one run.
    cluster.wait_history(alice, 1);
    let run = &cluster.history(alice)[0];
    assert_eq!(run["program"], "share");
    let (shape, tally) = (&run["run"]["shape"], &run["run"]["tally"]);
    assert_eq!((&shape["tasks"], &tally["files"]), (&5.into(), &5.into()), "{run:#}");

    // Those that come after the last has ended have it anew.
    let later = Array::submit(&cluster, "later", &directory, "0-1%1");
    for life in ["0.0", "1.0"] {
        later.wait(life);
        assert_eq!(lake.layout(&directory).as_deref(), Some(TWO));
        later.end(life);
        assert_eq!(lake.layout_of_file(&directory.join(format!("file-{life}"))), TWO, "{life}");
    }
    wait_until(LONG, "the directory has what it had before", || lake.layout(&directory).is_none());
    lake.end(&cluster);
}

#[test]
fn results_of_an_array_come_home_in_the_layout_which_is_taken_back_after_the_last_of_them() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let alice = cluster.user("alice");
    let results = lake.folder(alice, "results");
    let script = format!(
        "#!/bin/sh\n#RSA_LAYOUT=-c 2 -S 1M\n#RSA_OUT_SIZE=10MiB\n#RSA_WAIT=hold\n{}\
         findmnt -n -o SOURCE -T {1} > {1}/where-$SLURM_ARRAY_TASK_ID\n",
        directives(&[], &[&results]),
        results.display()
    );
    let options = ["--array=0-3", "--nodes=1", "--exclusive", "--no-requeue", "--output=/dev/null"];
    cluster.slurm.submit(alice, &script, &options);
    let files = [0, 1, 2, 3].map(|element| results.join(format!("where-{element}")));
    for file in &files {
        wait_until(LONG, "the results of an element are at home", || lake.outside(file).exists());
    }
    wait_until(LONG, "all of them are", || cluster.status()["jobs"].as_array().unwrap().is_empty());
    for file in &files {
        let seen = fs::read_to_string(lake.outside(file)).unwrap();
        assert!(seen.contains("ondeck:job-"), "its output was in a RAM disk: {seen}");
        assert_eq!(lake.layout_of_file(file), TWO, "{}", file.display());
    }
    wait_until(LONG, "the directory has what it had before", || lake.layout(&results).is_none());
    lake.end(&cluster);
}
