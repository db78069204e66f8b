//! What happens to results that somebody else wrote meanwhile, too.

use std::fs;
use std::os::unix::fs::chown;
use std::time::Duration;

use ondeck_testbed::{available, wait_until};

use crate::cluster::{Cluster, tree};
use crate::jobs::{Blocker, Gate, directives, wait_file};
use crate::life::directory;

#[test]
fn what_others_changed_on_disk_is_kept_and_the_job_is_told() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let files = [("shared", "before\n"), ("mine", "before\n"), ("theirs", "before\n"), ("gone", "before\n")];
    let output = directory(alice, "merge", &files);
    let gate = Gate::of(alice, "merge");
    let script = format!(
        "#!/bin/sh\n{}{}echo job >> {o}/shared\necho job >> {o}/mine\necho job > {o}/new\nrm {o}/gone\n",
        directives(&[], &[&output]),
        gate.line(),
        o = output.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.wait_rsa(job, "INUSE_OUT");
    // The test is a host where nothing is mounted over the directory.
    for (name, text) in [
        ("shared", "other\n"),
        ("theirs", "other\n"),
        ("new", "other\n"),
        ("gone", "other\n"),
        ("more", "other\n"),
    ] {
        fs::write(output.join(name), text).unwrap();
        chown(output.join(name), Some(alice.uid), Some(alice.gid)).unwrap();
    }
    gate.open();
    cluster.wait_done(job);
    let label = cluster.label(job);
    let wanted = [
        ("gone".to_owned(), "other\n"),
        ("mine".to_owned(), "before\njob\n"),
        ("more".to_owned(), "other\n"),
        ("new".to_owned(), "other\n"),
        (format!("new.ondeck-{label}"), "job\n"),
        ("shared".to_owned(), "other\n"),
        (format!("shared.ondeck-{label}"), "before\njob\n"),
        ("theirs".to_owned(), "other\n"),
    ];
    let wanted = wanted.map(|(name, text)| (name, text.as_bytes().to_vec())).into();
    assert_eq!(tree(&output), wanted);
    let shown = cluster.ondeck_on(&cluster.host("ctl").log_in(alice), &["job", "show", &job.to_string()]);
    shown.assert_success();
    for name in ["shared", "new"] {
        let beside = output.join(format!("{name}.ondeck-{label}"));
        assert!(shown.stdout.contains(beside.to_str().unwrap()), "{}", shown.stdout);
    }
    // It is the last word, which Slurm's accounting has, too.
    let note = shown.stdout.lines().find(|line| line.contains("the job's own are")).unwrap_or_default();
    assert!(note.contains(&format!("shared.ondeck-{label}")), "{}", shown.stdout);
    assert!(cluster.note(job).contains("the job's own are"), "{}", cluster.note(job));
    assert!(shown.stdout.contains("deleted"), "what the job had deleted and is kept: {}", shown.stdout);
    cluster.assert_quiet();
    cluster.assert_clean();
}

/// How many files a job writes, one after the other, again and again.
const FILES: usize = 100;

#[test]
fn a_job_that_runs_already_goes_on_to_see_all_that_it_wrote_when_the_ram_disk_comes() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = directory(alice, "late", &[]);
    let seen = alice.scratch.join("late-seen");
    // It writes until the RAM disk is there, and looks at once for what it wrote. A directory that grew for as long as this
    // takes would only be harder to copy with every attempt.
    let script = format!(
        "#!/bin/sh\n{}i=0\n\
         until findmnt {o} > /dev/null; do i=$((i+1)); n=$((i % {FILES})); echo $i > {o}/part-$n; sleep 0.02; done\n\
         echo $i $(cat {o}/part-*) > {seen}\necho more >> {o}/part-$n\n",
        directives(&[], &[&output]),
        o = output.display(),
        seen = seen.display(),
    );
    cluster.lend(false);
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2", "--output=/dev/null"]);
    wait_file(&output.join("part-1"));
    cluster.lend(true);
    // That is tried again after 10 s, a minute and five if the machine is busy.
    wait_until(Duration::from_secs(450), "its RAM disk has come", || seen.exists());
    cluster.wait_done(job);
    let text = fs::read_to_string(&seen).unwrap();
    let mut numbers = text.split_whitespace().map(|number| number.parse::<usize>().unwrap());
    let wrote = numbers.next().unwrap();
    let mut saw: Vec<usize> = numbers.collect();
    saw.sort_unstable();
    let all = (wrote.saturating_sub(FILES) + 1..=wrote).collect::<Vec<_>>();
    assert_eq!(saw, all, "{}", cluster.ondeck(&["job", "show", &job.to_string()]).stdout);
    let found = tree(&output);
    assert_eq!(found.len(), all.len(), "nothing was put beside anything");
    for number in all {
        let more = if number == wrote { "more\n" } else { "" };
        assert_eq!(found[&format!("part-{}", number % FILES)], format!("{number}\n{more}").into_bytes());
    }
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn input_that_was_changed_on_disk_after_it_was_copied_is_told_of() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let input = directory(alice, "changing", &[("same", "before\n"), ("changed", "before\n")]);
    let (gate, seen) = (Gate::of(alice, "changing"), alice.scratch.join("changing-seen"));
    let script = format!(
        "#!/bin/sh\n{}cat {}/changed > {}\n{}",
        directives(&[&input], &[]),
        input.display(),
        seen.display(),
        gate.line(),
    );
    let blocker = Blocker::new(&cluster, 4);
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2", "--output=/dev/null"]);
    cluster.wait_rsa(job, "READY");
    fs::write(input.join("changed"), "after\n").unwrap();
    blocker.release();
    cluster.wait_note(job, "1 entry changed on disk since");
    assert!(cluster.note(job).contains(input.join("changed").to_str().unwrap()), "{}", cluster.note(job));
    gate.open();
    cluster.wait_done(job);
    assert_eq!(fs::read(&seen).unwrap(), b"before\n");
    cluster.assert_quiet();
    cluster.assert_clean();
}
