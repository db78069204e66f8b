//! Heterogeneous jobs: Slurm gives each component a number, nodes, a Prolog and an Epilog of its own, and runs all of them
//! as one program. They work on disk, all of them, and are told so.

use std::collections::BTreeMap;
use std::fs;

use ondeck_testbed::{available, wait_until};

use crate::aids::{LONG, files, folder, give, program, script};
use crate::cluster::{Cluster, DEADLINE, tree};
use crate::jobs::{Blocker, Gate};

const TOLD: &str = "a component of the heterogeneous job";

impl Cluster {
    /// The states of a job's components, by their numbers.
    fn components(&self, job: u32) -> BTreeMap<u32, String> {
        let job = job.to_string();
        let ran = self.slurm.client(&["squeue", "-h", "-a", "-t", "all", "-O", "JobID:|,HetJobID:|,State:|"]);
        let records = ran.stdout.lines().map(|line| line.split('|').collect::<Vec<_>>());
        let of_job = records.filter(|record| record[1] == job);
        of_job.map(|record| (record[0].parse().unwrap(), record[2].to_owned())).collect()
    }

    #[track_caller]
    fn wait_components(&self, job: u32, state: &str) {
        let are_so = || self.components(job).values().all(|found| found == state);
        wait_until(LONG, &format!("all components of job {job} are {state}"), are_so);
    }

    #[track_caller]
    fn wait_told(&self, job: u32) {
        for component in self.components(job).into_keys() {
            let told = || self.show(component).contains(&format!("{TOLD} {job}"));
            wait_until(LONG, &format!("component {component} is told why"), told);
        }
    }

    /// All components of a job that has ended worked on disk, and all of them say why.
    #[track_caller]
    fn assert_on_disk(&self, job: u32, components: usize) {
        let found = self.components(job);
        assert_eq!(found.len(), components, "{found:?}");
        for component in found.into_keys() {
            self.wait_done(component);
            assert_eq!(self.states(component), ["INITIAL", "INELIGIBLE"], "{}", self.show(component));
            let shown = self.show(component);
            assert!(shown.contains(&format!("{TOLD} {job}")) && shown.contains("#SBATCH hetjob"), "{shown}");
        }
    }

    /// What stands in AdminComment of a component.
    fn comment(&self, component: u32) -> String {
        let id = component.to_string();
        let ran = self.slurm.client(&[
            "squeue",
            "-h",
            "-a",
            "-t",
            "all",
            "-j",
            &id,
            "-O",
            "JobID:|,admin_comment:|",
        ]);
        let record = ran.stdout.lines().map(|line| line.split('|')).find_map(|mut record| {
            (record.next() == Some(&*id)).then(|| record.next().unwrap_or_default().to_owned())
        });
        record.unwrap_or_default()
    }
}

#[test]
fn components_of_a_heterogeneous_job_share_their_output_on_disk_and_are_told_why() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &files(1, 1000));
    // Each waits for what the other writes, and writes its half of one file.
    let rank = program(
        alice,
        "rank.sh",
        &format!(
            "#!/bin/sh\nhostname > {output}/rank-$(hostname)\n\
             [ $(hostname) = c1 ] && half=0 || half=1\n\
             tr '\\0' $half < /dev/zero | head -c 4096 |\n\
             dd of={output}/both bs=4096 iflag=fullblock seek=$half conv=notrunc 2> /dev/null\n\
             until [ -e {output}/rank-c1 ] && [ -e {output}/rank-c2 ]; do sleep 0.05; done\n\
             until [ -e {scratch}/go ]; do sleep 0.05; done\n",
            output = output.display(),
            scratch = alice.scratch.display()
        ),
    );
    // The second component has a line of its own, and the third none.
    let out = format!("#RSA_DATA_OUT={}\n", output.display());
    let text = format!(
        "#!/bin/sh\n#SBATCH --nodelist=c1 --exclusive\n{out}#SBATCH hetjob\n#SBATCH --nodelist=c2 --exclusive\n{out}\
         #SBATCH hetjob\n#SBATCH --nodelist=c3 --exclusive\nsrun --het-group=0,1 {}\n",
        rank.display()
    );
    let log = alice.scratch.join("log");
    let submitted = cluster.slurm.try_submit(alice, &text, &[&format!("--output={}", log.display())]);
    submitted.assert_success();
    assert!(submitted.stderr.contains("this job is heterogeneous"), "{}", submitted.stderr);
    let job: u32 = submitted.stdout.trim().parse().unwrap();
    wait_until(LONG, "both have come so far", || {
        ["rank-c1", "rank-c2"].iter().all(|name| output.join(name).exists())
    });
    cluster.wait_told(job);
    for component in cluster.components(job).into_keys() {
        wait_until(DEADLINE, "it has a comment", || cluster.comment(component).contains(TOLD));
    }
    assert_eq!(cluster.covers_of(&output), Vec::<String>::new());
    cluster.assert_nothing_lent();
    give(alice, "go");
    cluster.wait_components(job, "COMPLETED");
    cluster.assert_on_disk(job, 3);
    let mut expected = files(1, 1000);
    expected.insert("rank-c1".into(), b"c1\n".to_vec());
    expected.insert("rank-c2".into(), b"c2\n".to_vec());
    expected.insert("both".into(), [[b'0'; 4096], [b'1'; 4096]].concat());
    assert_eq!(tree(&output), expected);
    let said = fs::read_to_string(&log).unwrap();
    assert!(said.starts_with("ondeck: no RAM disk: it is a component"), "{said}");
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn a_heterogeneous_job_is_not_held_for_an_input_that_never_comes() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 10));
    let asked = alice.scratch.join("asked");
    let stage_in = program(alice, "stage-in.sh", &format!("#!/bin/sh\ntouch {}\n", asked.display()));
    let options = ["--exclusive", "--output=/dev/null", ":", "--nodes=1", "--exclusive"];
    for more in ["WAIT=hold".to_owned(), format!("STAGE_IN={}", stage_in.display())] {
        let directives = [format!("DATA_IN={}", input.display()), more];
        let job = cluster.slurm.submit(alice, &script(alice, &directives, ""), &options);
        cluster.wait_components(job, "COMPLETED");
        cluster.assert_on_disk(job, 2);
        // The check at submission of a former version knew no components: it held and marked the first one.
        for all_are_held in [false, true] {
            let gate = Gate::of(alice, &format!("{job}-{all_are_held}"));
            let text = script(alice, &directives, &gate.line());
            let job = cluster.slurm.submit(alice, &text, &[&["--hold"], &options[..]].concat());
            if !all_are_held {
                cluster.slurm.scontrol(&["release", &(job + 1).to_string()]).assert_success();
            }
            // What is said to the first component is said to all.
            let first = format!("JobId={job}");
            cluster.slurm.scontrol(&["update", &first, "AdminComment=ondeck:hold"]).assert_success();
            cluster.wait_components(job, "RUNNING");
            for component in cluster.components(job).into_keys() {
                wait_until(DEADLINE, "it has another comment", || {
                    let comment = cluster.comment(component);
                    comment.contains(TOLD) && !comment.contains("ondeck:hold")
                });
            }
            gate.open();
            cluster.wait_components(job, "COMPLETED");
            cluster.assert_on_disk(job, 2);
        }
    }
    assert!(!asked.exists());
    cluster.assert_clean();
}

#[test]
fn a_heterogeneous_job_that_is_requeued_or_cancelled_works_on_disk_in_each_life() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let gate = Gate::of(alice, "ends");
    let text = script(
        alice,
        &[format!("DATA_OUT={}", output.display())],
        &format!("echo $SLURM_RESTART_COUNT >> {}/lives\n{}", output.display(), gate.line()),
    );
    let options = ["--requeue", "--exclusive", "--output=/dev/null", ":", "--nodes=1", "--exclusive"];
    let job = cluster.slurm.submit(alice, &text, &options);
    cluster.wait_told(job);
    wait_until(LONG, "it has begun", || tree(&output).contains_key("lives"));
    cluster.slurm.requeue(job);
    for component in [job, job + 1] {
        cluster.ondeck(&["wait", &format!("{component}.0"), "--timeout", "60s"]).assert_success();
    }
    // Nodes that have run its Prologs don't run them again within two minutes.
    let former = Blocker::on(&cluster, "c1,c2");
    cluster.slurm.scontrol(&["update", &format!("JobId={job}"), "StartTime=now"]).assert_success();
    wait_until(LONG, "it has begun again", || tree(&output)["lives"] == b"\n1\n");
    cluster.wait_told(job);
    for component in [job, job + 1] {
        assert!(cluster.key(component).ends_with(".1"), "{}", cluster.key(component));
    }
    assert_eq!(cluster.covers_of(&output), Vec::<String>::new());
    cluster.slurm.cancel(job);
    cluster.wait_components(job, "CANCELLED");
    former.release();
    cluster.assert_on_disk(job, 2);
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}
