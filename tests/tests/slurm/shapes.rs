//! What a job can ask for: input alone, output alone, both in one directory or one in the other, an archive; on deck
//! before it starts, or not.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use ondeck_testbed::available;

use crate::cluster::{Cluster, DEADLINE, tree};
use crate::jobs::{Blocker, Gate, assert_passed, directives, note_source, says, wait_file, was_ram};
use crate::life::directory;

#[test]
fn output_alone() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    on_deck_before_the_start(&cluster);
    under_a_job_that_started_at_once(&cluster);
    as_one_archive(&cluster);
    with_modes_that_shut_out_their_owner(&cluster);
    cluster.assert_quiet();
    cluster.assert_clean();
}

fn on_deck_before_the_start(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let output = directory(alice, "deck", &[("old", "was there")]);
    let place = alice.scratch.join("deck-where");
    let blocker = Blocker::new(cluster, 4);
    let script = format!(
        "#!/bin/sh\n{}{}seq 1 20000 > {out}/numbers\nmkdir {out}/deep\ncat {out}/old > {out}/deep/copy\n",
        directives(&[], &[&output]),
        note_source(&output, &place),
        out = output.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.wait_rsa(job, "READY");
    blocker.release();
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    let found = tree(&output);
    let numbers: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
    assert!(found["numbers"] == numbers.as_bytes());
    assert_eq!(found["deep/copy"], b"was there");
    assert_eq!(found["old"], b"was there");
    assert_eq!(found.len(), 3, "{:?}", found.keys());
    let wanted = ["READY", "MOUNTING", "INUSE_OUT", "UNMOUNTING", "UNMOUNTED", "STAGING_OUT", "TEARDOWN"];
    assert_passed(&cluster.states(job), &wanted);
}

/// What the job has written by then stays visible to it, and what it does with it counts.
fn under_a_job_that_started_at_once(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let files = [("old", "was there"), ("gone", "superfluous"), ("log", "zero\n"), ("deep/kept", "kept")];
    let output = directory(alice, "once", &files);
    let (place, seen, started) = (
        alice.scratch.join("once-where"),
        alice.scratch.join("once-seen"),
        alice.scratch.join("once-started"),
    );
    let gate = Gate::of(alice, "once");
    let script = format!(
        "#!/bin/sh\n{}\
         echo early > {out}/early\necho one >> {out}/log\n{early}touch {started}\n\
         {wait}{late}\
         cat {out}/early {out}/old {out}/log {out}/deep/kept > {seen}\n\
         echo two >> {out}/log\necho more >> {out}/early\nrm {out}/gone\necho late > {out}/late\n",
        directives(&[], &[&output]),
        early = note_source(&output, &started.with_extension("where")),
        late = note_source(&output, &place),
        wait = gate.line(),
        out = output.display(),
        started = started.display(),
        seen = seen.display(),
    );
    // The RAM disk could be shown before the script has begun.
    cluster.lend(false);
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    wait_file(&started);
    cluster.lend(true);
    assert!(!was_ram(&started.with_extension("where")));
    cluster.wait_rsa(job, "INUSE_OUT");
    assert_eq!(cluster.slurm.state(job), "RUNNING");
    gate.open();
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    assert_eq!(fs::read(&seen).unwrap(), b"early\nwas therezero\none\nkept");
    let found = tree(&output);
    let wanted = [
        ("deep/kept", "kept"),
        ("early", "early\nmore\n"),
        ("late", "late\n"),
        ("log", "zero\none\ntwo\n"),
        ("old", "was there"),
    ];
    let wanted = wanted.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into();
    assert_eq!(found, wanted, "{}", cluster.ondeck(&["job", "show", &job.to_string()]).stdout);
    let states = cluster.states(job);
    assert!(!states.iter().any(|state| state == "INUSE_IN" || state == "INUSE_BOTH"), "{states:?}");
    assert_passed(&states, &["BOOTING", "STAGING_IN", "READY", "MOUNTING", "INUSE_OUT", "STAGING_OUT"]);
}

/// Many results, which come home as one archive.
pub fn as_one_archive(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let output = directory(alice, "packed", &[]);
    let gate = Gate::of(alice, "packed");
    let script = format!(
        "#!/bin/sh\n{}#RSA_PACK=tar\n{}\
         for n in $(seq 1 200); do mkdir -p {out}/d$((n % 7)); echo result $n > {out}/d$((n % 7))/f$n; done\n",
        directives(&[], &[&output]),
        gate.line(),
        out = output.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &[]);
    cluster.wait_rsa(job, "INUSE_OUT");
    gate.open();
    cluster.wait_done(job);
    let names: Vec<String> = tree(&output).into_keys().collect();
    assert_eq!(names, [format!("results-{}.tar", cluster.label(job))]);
    let unpacked = directory(alice, "from-archive", &[]);
    let mut tar = Command::new("tar");
    let tar = tar.arg("-xf").arg(output.join(&names[0])).arg("-C").arg(&unpacked).output().unwrap();
    assert!(tar.status.success(), "{tar:?}");
    let found = tree(&unpacked);
    assert_eq!(found.len(), 200);
    for number in 1..=200 {
        let name = format!("d{}/f{number}", number % 7);
        assert_eq!(found[&name], format!("result {number}\n").as_bytes());
    }
}

fn with_modes_that_shut_out_their_owner(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let output = directory(alice, "shut", &[]);
    let place = alice.scratch.join("shut-where");
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}{}\
         echo s > {out}/secret\nsetfattr -n user.tag -v kept {out}/secret\nchmod 000 {out}/secret\n\
         mkdir {out}/dark\necho deep > {out}/dark/file\nchmod 000 {out}/dark/file {out}/dark\n\
         umask 0777\necho masked > {out}/masked\nmkdir {out}/closed\n",
        directives(&[], &[&output]),
        note_source(&output, &place),
        out = output.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    // The test is root, who may look.
    for (name, text) in [("secret", "s\n"), ("dark/file", "deep\n"), ("masked", "masked\n")] {
        assert_eq!(fs::read_to_string(output.join(name)).unwrap(), text, "{name}");
    }
    for name in ["secret", "dark", "dark/file", "masked", "closed"] {
        let found = fs::symlink_metadata(output.join(name)).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid()), (0, alice.uid), "{name}");
    }
    assert_eq!(tree(&output).len(), 3);
    let mut tag = Command::new("getfattr");
    let tag = tag.args(["--only-values", "-n", "user.tag"]).arg(output.join("secret")).output().unwrap();
    assert_eq!(tag.stdout, b"kept", "{tag:?}");
    assert_passed(&cluster.states(job), &["INUSE_OUT", "STAGING_OUT", "TEARDOWN"]);
}

#[test]
fn input_alone_and_with_output() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    input_is_read_only(&cluster);
    one_directory_for_both(&cluster);
    output_inside_of_input(&cluster);
    relative_paths(&cluster);
    cluster.assert_quiet();
    cluster.assert_clean();
}

fn input_is_read_only(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = directory(alice, "input", &[("a", "alpha"), ("deep/b", "beta")]);
    let before = tree(&input);
    let (place, got, errors) =
        (alice.scratch.join("input-where"), alice.scratch.join("got"), alice.scratch.join("errors"));
    let blocker = Blocker::new(cluster, 4);
    let script = format!(
        "#!/bin/sh\n{}{}cat {i}/a {i}/deep/b > {got}\n\
         (echo x > {i}/new; echo y >> {i}/a; rm {i}/a; mkdir {i}/d; chmod 600 {i}/a) 2> {errors}\ntrue\n",
        directives(&[&input], &[]),
        note_source(&input, &place),
        i = input.display(),
        got = got.display(),
        errors = errors.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.wait_rsa(job, "READY");
    blocker.release();
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    assert_eq!(says(&got), "alphabeta");
    let refused = says(&errors);
    assert_eq!(refused.matches("Read-only file system").count(), 5, "{refused}");
    assert_eq!(tree(&input), before);
    let states = cluster.states(job);
    assert!(!states.iter().any(|state| state == "STAGING_OUT"), "{states:?}");
    assert_passed(&states, &["STAGING_IN", "READY", "MOUNTING", "INUSE_IN", "UNMOUNTED", "TEARDOWN"]);
    assert_eq!(cluster.slurm.state(job), "COMPLETED");
}

fn one_directory_for_both(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let files = [("state", "one\n"), ("same", "untouched"), ("gone", "old"), ("deep/x", "x")];
    let both = directory(alice, "both", &files);
    let place = alice.scratch.join("both-where");
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n{}{}\
         echo two >> {d}/state\nrm {d}/gone\nmv {d}/deep/x {d}/deep/y\ncat {d}/state > {d}/copy\n",
        directives(&[&both], &[&both]),
        note_source(&both, &place),
        d = both.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    let wanted = [("copy", "one\ntwo\n"), ("deep/y", "x"), ("same", "untouched"), ("state", "one\ntwo\n")];
    let wanted = wanted.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into();
    assert_eq!(tree(&both), wanted);
    assert_passed(&cluster.states(job), &["READY", "INUSE_BOTH", "STAGING_OUT", "TEARDOWN"]);
}

/// The inner one is not there when the job is submitted.
fn output_inside_of_input(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = directory(alice, "project", &[("data/a", "alpha"), ("b", "beta")]);
    let output = input.join("results");
    let (place, errors) = (alice.scratch.join("project-where"), alice.scratch.join("project-errors"));
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_OUT_SIZE=1MiB\n{}{}{}\
         cat {i}/data/a {i}/b > {o}/r\n(echo x > {i}/new) 2> {errors}\ntrue\n",
        directives(&[&input], &[&output]),
        note_source(&input, &place),
        note_source(&output, &place.with_extension("out")),
        i = input.display(),
        o = output.display(),
        errors = errors.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2"]);
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(was_ram(&place) && was_ram(&place.with_extension("out")), "{}", says(&place));
    assert!(says(&errors).contains("Read-only file system"), "{}", says(&errors));
    let found = tree(&input);
    assert_eq!(found["results/r"], b"alphabeta");
    assert_eq!(found.len(), 3, "{:?}", found.keys());
}

fn relative_paths(cluster: &Cluster) {
    let alice = cluster.user("alice");
    directory(alice, "run/in", &[("a", "alpha")]);
    let output = directory(alice, "run/out", &[]);
    let run = alice.scratch.join("run");
    std::os::unix::fs::chown(&run, Some(alice.uid), Some(alice.gid)).unwrap();
    let place = alice.scratch.join("run-where");
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_OUT_SIZE=1MiB\n#RSA_DATA_IN=in\n#RSA_DATA_OUT=./out\n{}cat in/a > out/r\n",
        note_source(&run.join("in"), &place),
    );
    let chdir = format!("--chdir={}", run.display());
    let job = cluster.slurm.submit(alice, &script, &[&chdir]);
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    assert_eq!(fs::read(output.join("r")).unwrap(), b"alpha");
    assert_passed(&cluster.states(job), &["READY", "INUSE_BOTH", "STAGING_OUT"]);
}
