//! Who comes first: slow staging, jobs that start too early, that lose their place, that need what others make.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ondeck_testbed::{User, available, wait_until};

use crate::cluster::{Cluster, DEADLINE, Setup, tree};
use crate::jobs::{Blocker, Gate, assert_passed, directives, note_source, says, wait_file, was_ram};
use crate::life::directory;

const MIB: usize = 1 << 20;

/// Staging at so many MiB a second, all together.
fn slow(rate: usize, jobs: usize) -> Setup {
    let scheduler = format!("sharing = \"any\"\nbandwidth = \"{}MiB/s\"\nstaging = {jobs}\n", rate * jobs);
    Setup { scheduler, ..Setup::default() }
}

/// So much that looks like nothing else.
fn content(length: usize) -> Vec<u8> {
    let mut state: u64 = 88_172_645_463_325_252;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..length).map(next).collect()
}

/// A directory with one large file that takes seconds to stage.
fn large(user: &User, name: &str, length: usize) -> std::path::PathBuf {
    let dir = directory(user, name, &[]);
    fs::write(dir.join("data"), content(length)).unwrap();
    std::os::unix::fs::chown(dir.join("data"), Some(user.uid), Some(user.gid)).unwrap();
    dir
}

fn same(a: &Path, b: &Path) {
    assert!(fs::read(a).unwrap() == fs::read(b).unwrap(), "{} is not {}", a.display(), b.display());
}

#[test]
fn a_job_that_starts_before_its_input_is_there() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(slow(2, 2));
    works_on_disk(&cluster);
    or_is_held_until_it_is_there(&cluster);
    cluster.assert_quiet();
    cluster.assert_clean();
}

fn works_on_disk(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = large(alice, "early-in", 16 * MIB);
    let output = directory(alice, "early-out", &[]);
    let (first, second) = (alice.scratch.join("early"), alice.scratch.join("early-later"));
    let gate = Gate::of(alice, "early");
    let script = format!(
        "#!/bin/sh\n{}{}cp {i}/data {o}/early\n{}{}{}cp {i}/data {o}/late\n",
        directives(&[&input], &[&output]),
        note_source(&input, &first),
        gate.line(),
        note_source(&input, &second),
        note_source(&output, &second.with_extension("out")),
        i = input.display(),
        o = output.display(),
    );
    let blocker = Blocker::new(cluster, 4);
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.wait_rsa(job, "STAGING_IN");
    blocker.release();
    wait_file(&output.join("early"));
    cluster.wait_rsa(job, "INUSE_OUT");
    gate.open();
    cluster.wait_done(job);
    assert!(!was_ram(&first) && !was_ram(&second) && was_ram(&second.with_extension("out")));
    same(&output.join("early"), &input.join("data"));
    same(&output.join("late"), &input.join("data"));
    let wanted = [
        "STAGING_IN",
        "STOPPING_STAGING_IN",
        "ABORTED",
        "TEARDOWN",
        "DESTROYED",
        "BOOTING",
        "STAGING_IN",
        "READY",
        "MOUNTING",
        "INUSE_OUT",
        "STAGING_OUT",
    ];
    let states = cluster.states(job);
    assert_passed(&states, &wanted);
    assert!(!states.iter().any(|state| state == "INUSE_IN"), "{states:?}");
}

fn or_is_held_until_it_is_there(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = large(alice, "held-in", 3 * MIB);
    let (place, copy) = (alice.scratch.join("held"), alice.scratch.join("held-copy"));
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}{}cp {i}/data {copy}\n",
        directives(&[&input], &[]),
        note_source(&input, &place),
        i = input.display(),
        copy = copy.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.wait_rsa(job, "STAGING_IN");
    let seen = cluster.slurm.job(job);
    assert_eq!((&*seen["JobState"], &*seen["Priority"]), ("PENDING", "0"), "{seen:#?}");
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    same(&copy, &input.join("data"));
    assert_passed(&cluster.states(job), &["STAGING_IN", "READY", "MOUNTING", "INUSE_IN", "UNMOUNTED"]);
}

#[test]
fn cancelled_jobs_leave_nothing_but_their_results() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(slow(2, 2));
    cancelled_on_deck(&cluster);
    cancelled_while_staging_in(&cluster);
    cancelled_while_it_runs(&cluster);
    cancelled_while_staging_out(&cluster);
    cluster.assert_quiet();
    cluster.assert_clean();
}

fn cancelled_on_deck(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = directory(alice, "cancel1", &[("a", "alpha")]);
    let output = directory(alice, "cancel1-out", &[("old", "old")]);
    let blocker = Blocker::new(cluster, 4);
    let script = format!("#!/bin/sh\n#RSA_OUT_SIZE=1MiB\n{}", directives(&[&input], &[&output]));
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.wait_rsa(job, "READY");
    cluster.slurm.cancel(job);
    cluster.wait_done(job);
    blocker.release();
    assert_eq!(tree(&input), [("a".to_owned(), b"alpha".to_vec())].into());
    assert_eq!(tree(&output), [("old".to_owned(), b"old".to_vec())].into());
    let states = cluster.states(job);
    assert_passed(&states, &["READY", "TEARDOWN", "DESTROYED"]);
    assert!(!states.iter().any(|state| state == "MOUNTING" || state == "STAGING_OUT"), "{states:?}");
}

fn cancelled_while_staging_in(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = large(alice, "cancel2", 16 * MIB);
    let script = format!("#!/bin/sh\n#RSA_WAIT=hold\n{}", directives(&[&input], &[]));
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.wait_rsa(job, "STAGING_IN");
    cluster.slurm.cancel(job);
    cluster.wait_done(job);
    assert_passed(
        &cluster.states(job),
        &["STAGING_IN", "STOPPING_STAGING_IN", "ABORTED", "TEARDOWN", "DESTROYED"],
    );
}

fn cancelled_while_it_runs(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let output = directory(alice, "cancel3", &[]);
    let written = alice.scratch.join("written");
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}seq 1 5000 > {o}/so-far\nexec 3> {o}/open\necho half >&3\ntouch {written}\n\
         while :; do sleep 0.1; done\n",
        directives(&[], &[&output]),
        o = output.display(),
        written = written.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    wait_file(&written);
    assert!(tree(&output).is_empty(), "the results are in RAM: {:?}", tree(&output).keys());
    cluster.slurm.cancel(job);
    cluster.wait_done(job);
    let numbers: String = (1..=5000).map(|number| format!("{number}\n")).collect();
    let wanted = [("open", "half\n"), ("so-far", &numbers)];
    assert_eq!(tree(&output), wanted.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into());
    assert_eq!(cluster.slurm.state(job), "CANCELLED");
}

fn cancelled_while_staging_out(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let source = large(alice, "cancel4-source", 6 * MIB);
    let output = directory(alice, "cancel4", &[]);
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}cp {}/data {}/data\n",
        directives(&[], &[&output]),
        source.display(),
        output.display()
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.wait_rsa(job, "STAGING_OUT");
    // It has ended: Slurm has nothing to cancel.
    cluster.slurm.client(&["scancel", &job.to_string()]);
    assert_eq!(cluster.job(job).unwrap()["rsa_state"], "STAGING_OUT");
    cluster.wait_done(job);
    same(&output.join("data"), &source.join("data"));
}

#[test]
fn results_on_their_way_hold_up_nobody_but_those_who_need_them() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(slow(2, 2));
    let alice = cluster.user("alice");
    let source = large(alice, "source", 8 * MIB);
    let (output, copy) = (directory(alice, "chain", &[]), alice.scratch.join("chain-copy"));
    let place = alice.scratch.join("chain-where");
    let first = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}cp {}/data {}/data\n",
        directives(&[], &[&output]),
        source.display(),
        output.display()
    );
    let second = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}{}cp {}/data {}\n",
        directives(&[&output], &[]),
        note_source(&output, &place),
        output.display(),
        copy.display()
    );
    let first = cluster.slurm.submit(alice, &first, &["--nodes=4", "--exclusive"]);
    cluster.slurm.wait_state(first, "RUNNING", DEADLINE);
    let second = cluster.slurm.submit(alice, &second, &["--nodes=1"]);
    cluster.wait_rsa(first, "STAGING_OUT");
    // Whoever waits for the first job finds all of it on disk.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let ran = cluster.ondeck_on(&cluster.host("ctl").log_in(alice), &["wait", &first.to_string()]);
            same(&output.join("data"), &source.join("data"));
            ran
        });
        wait_until(DEADLINE, "the second job waits for the first", || {
            cluster.job(second).is_some_and(|job| {
                let says = format!("results of job {first} for {} are not on disk yet", output.display());
                job["message"].as_str().is_some_and(|text| text.contains(&says))
            })
        });
        // Meanwhile the compute nodes are another job's.
        let other =
            cluster.slurm.submit(cluster.user("bob"), "#!/bin/sh\nhostname\n", &["--nodes=4", "--exclusive"]);
        let other = cluster.slurm.wait_state(other, "COMPLETED", DEADLINE);
        assert_eq!(cluster.job(first).unwrap()["rsa_state"], "STAGING_OUT");
        let ended = cluster.slurm.job(first);
        assert_eq!((&*ended["JobState"], &ended["NodeList"]), ("COMPLETED", &other["NodeList"]));
        assert!(other["StartTime"] >= ended["EndTime"], "{ended:#?} {other:#?}");
        waits.join().unwrap().assert_success();
    });
    cluster.slurm.wait_state(second, "COMPLETED", DEADLINE);
    cluster.wait_done(second);
    assert!(was_ram(&place), "{}", says(&place));
    same(&copy, &source.join("data"));
    cluster.assert_quiet();
    cluster.assert_clean();
}

/// Both are ready, and the one that writes starts first: the other one would have started with what was there before.
#[test]
fn a_job_that_must_have_its_input_does_not_start_with_what_another_has_replaced() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(slow(2, 2));
    let alice = cluster.user("alice");
    let source = large(alice, "new", 6 * MIB);
    let shared = directory(alice, "shared", &[("data", "old")]);
    let (copy, place) = (alice.scratch.join("shared-copy"), alice.scratch.join("shared-where"));
    let gate = Gate::of(alice, "writes");
    let blocker = Blocker::new(&cluster, 4);
    let writer = format!(
        "#!/bin/sh\n#RSA_NODES=1\n{}{}cp {}/data {}/data\n",
        directives(&[], &[&shared]),
        gate.line(),
        source.display(),
        shared.display()
    );
    let writer = cluster.slurm.submit(alice, &writer, &["--nodes=4", "--exclusive"]);
    cluster.wait_rsa(writer, "READY");
    let reader = format!(
        "#!/bin/sh\n#RSA_NODES=1\n#RSA_WAIT=hold\n{}{}cp {}/data {}\n",
        directives(&[&shared], &[]),
        note_source(&shared, &place),
        shared.display(),
        copy.display()
    );
    let reader = cluster.slurm.submit(alice, &reader, &["--nodes=4", "--exclusive"]);
    cluster.wait_rsa(reader, "READY");
    blocker.release();
    cluster.wait_rsa(writer, "INUSE_OUT");
    // It gives its RSA nodes back, and is held again.
    cluster.slurm.wait_job(reader, "is held", DEADLINE, |job| job["Priority"] == "0");
    wait_until(DEADLINE, "it waits for the results", || {
        let job = cluster.job(reader).unwrap();
        let waits = format!("results of job {writer} for {} are not on disk yet", shared.display());
        job["rsa_nodes"].as_array().unwrap().is_empty() && job["message"].as_str().unwrap().contains(&waits)
    });
    gate.open();
    cluster.wait_done(writer);
    cluster.slurm.wait_state(reader, "COMPLETED", DEADLINE);
    cluster.wait_done(reader);
    assert!(was_ram(&place), "{}", says(&place));
    same(&copy, &source.join("data"));
    let log = cluster.show(reader);
    assert!(log.contains(&format!("job {writer} writes to {}", shared.display())), "{log}");
    assert_passed(
        &cluster.states(reader),
        &["READY", "ABORTED", "DESTROYED", "INITIAL", "STAGING_IN", "INUSE_IN"],
    );
    cluster.assert_quiet();
    cluster.assert_clean();
}

/// Gives a job a place before all others.
fn prefer(cluster: &Cluster, job: u32, priority: u32) {
    let (job, priority) = (format!("JobId={job}"), format!("Priority={priority}"));
    cluster.slurm.scontrol(&["update", &job, &priority]).assert_success();
}

/// A job with input that notes where it read it, and its note.
fn reader(cluster: &Cluster, name: &str) -> (u32, std::path::PathBuf) {
    let alice = cluster.user("alice");
    let input = directory(alice, name, &[("a", "alpha")]);
    let place = alice.scratch.join(format!("{name}-where"));
    let script = format!("#!/bin/sh\n{}{}", directives(&[&input], &[]), note_source(&input, &place));
    (cluster.slurm.submit(alice, &script, &["--nodes=3"]), place)
}

#[test]
fn a_job_that_loses_its_place_gives_its_nodes_back_and_gets_others_later() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let bob = cluster.user("bob");
    let blocker = Blocker::new(&cluster, 4);
    let (job, place) = reader(&cluster, "demoted");
    cluster.wait_rsa(job, "READY");
    let gate = Gate::of(bob, "preferred");
    let preferred =
        cluster.slurm.submit(bob, &format!("#!/bin/sh\n{}", gate.line()), &["--nodes=4", "--exclusive"]);
    prefer(&cluster, preferred, 4_294_967_000);
    wait_until(DEADLINE, "its RSA nodes are free", || {
        cluster.job(job).is_none_or(|job| job["rsa_nodes"].as_array().unwrap().is_empty())
    });
    cluster.assert_nothing_lent();
    assert_passed(&cluster.states(job), &["READY", "TEARDOWN", "DESTROYED", "INITIAL"]);
    blocker.release();
    cluster.slurm.wait_state(preferred, "RUNNING", DEADLINE);
    cluster.wait_rsa(job, "READY");
    gate.open();
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    cluster.assert_quiet();
    cluster.assert_clean();
}

/// Any change of a job, such as what the scheduler tells its user, has Slurm forget why it waits, until it is judged anew.
#[test]
fn a_job_that_is_next_keeps_its_ram_disk_however_often_it_is_changed() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let blocker = Blocker::new(&cluster, 4);
    let (job, place) = reader(&cluster, "changed");
    cluster.wait_rsa(job, "READY");
    let (began, mut unjudged) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(4) {
        let comment = format!("Comment={unjudged}");
        cluster.slurm.scontrol(&["update", &format!("JobId={job}"), &comment]).assert_success();
        unjudged += u32::from(cluster.slurm.job(job)["Reason"] == "None");
    }
    assert!(unjudged > 10, "{unjudged}");
    blocker.release();
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    let story = cluster.show(job);
    assert!(!story.contains("demoted"), "{story}");
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_job_that_is_locked_in_keeps_its_place() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "lock_in = \"priority\"\n".into(), ..Setup::default() });
    let bob = cluster.user("bob");
    let blocker = Blocker::new(&cluster, 4);
    let (job, place) = reader(&cluster, "locked");
    cluster.wait_rsa(job, "READY");
    let own = |id| cluster.slurm.job(id)["Priority"].parse::<u32>().unwrap();
    let before = own(blocker.job);
    cluster.slurm.wait_job(job, "is before all others", DEADLINE, |job| {
        job["Priority"].parse::<u32>().unwrap() > before
    });
    let rival = cluster.slurm.submit(bob, "#!/bin/sh\n", &["--nodes=4", "--exclusive"]);
    cluster.slurm.wait_job(rival, "waits", DEADLINE, |job| job["Reason"] == "Priority");
    blocker.release();
    cluster.slurm.wait_state(rival, "COMPLETED", DEADLINE);
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    assert!(!cluster.states(job).iter().any(|state| state == "STOPPING_STAGING_IN"));

    // One that is cancelled is in nobody's way.
    let blocker = Blocker::new(&cluster, 4);
    let (job, _) = reader(&cluster, "unlocked");
    cluster.wait_rsa(job, "READY");
    let usual = cluster.slurm.submit(bob, "#!/bin/sh\n", &["--nodes=4", "--exclusive"]);
    let priority = own(usual);
    cluster.slurm.cancel(job);
    cluster.wait_done(job);
    cluster.assert_nothing_lent();
    assert_eq!(own(usual), priority);
    blocker.release();
    cluster.slurm.wait_state(usual, "COMPLETED", DEADLINE);
    cluster.assert_quiet();
    cluster.assert_clean();
}
