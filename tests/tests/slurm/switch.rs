//! The switch from input to output after a delay.

use std::fs;

use ondeck_testbed::{available, wait_until};
use serde_json::Value;

use crate::aids::program;
use crate::cluster::{Cluster, DEADLINE, Setup};
use crate::jobs::{Gate, assert_passed, directives, note_source, says, wait_file, was_ram};
use crate::life::directory;

#[test]
fn the_output_takes_the_place_of_the_input_once_that_is_closed() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "sharing = \"any\"\n".into(), ..Setup::default() });
    // All of them at once, each on a node of its own.
    std::thread::scope(|scope| {
        scope.spawn(|| after_the_delay(&cluster));
        scope.spawn(|| when_the_last_file_is_closed(&cluster));
        scope.spawn(|| never_if_a_file_stays_open(&cluster));
    });
    cluster.assert_quiet();
    cluster.assert_clean();
}

fn after_the_delay(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = directory(alice, "in1", &[("a", "alpha")]);
    let output = directory(alice, "out1", &[("old", "old")]);
    let (first, second) = (alice.scratch.join("first"), alice.scratch.join("second"));
    let gate = Gate::of(alice, "switched");
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_DELAY=2\n{}{}{}cat {i}/a > {o}/early\n{}{}{}\
         cat {i}/a {o}/early {o}/old > {o}/late\n",
        directives(&[&input], &[&output]),
        note_source(&input, &first),
        note_source(&output, &first.with_extension("out")),
        gate.line(),
        note_source(&input, &second),
        note_source(&output, &second.with_extension("out")),
        i = input.display(),
        o = output.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=1", "--exclusive"]);
    cluster.wait_rsa(job, "INUSE_OUT");
    gate.open();
    cluster.wait_done(job);
    assert!(was_ram(&first) && !was_ram(&first.with_extension("out")));
    assert!(!was_ram(&second) && was_ram(&second.with_extension("out")));
    assert_eq!(says(&output.join("early")), "alpha");
    assert_eq!(says(&output.join("late")), "alphaalphaold");
    let wanted = [
        "INUSE_IN",
        "UNMOUNT_NEEDED",
        "UNMOUNTING",
        "UNMOUNTED",
        "TEARDOWN",
        "DESTROYED",
        "BOOTING",
        "STAGING_IN",
        "READY",
        "INUSE_OUT",
        "UNMOUNTING",
        "STAGING_OUT",
        "TEARDOWN",
    ];
    assert_passed(&cluster.states(job), &wanted);
    // The delay counts from the start of the job, and so does the time that mounting takes.
    let story = cluster.story(job);
    let log = story["log"].as_array().unwrap();
    let first = |is: &dyn Fn(&Value) -> bool| {
        log.iter().find(|line| is(line)).and_then(|line| line["at_ms"].as_u64()).unwrap()
    };
    let runs = first(&|line| line["text"] == format!("job {job} runs"));
    let switches = first(&|line| line["states"][1] == "UNMOUNT_NEEDED");
    assert!(switches - runs >= 2000, "{} ms", switches - runs);
}

fn when_the_last_file_is_closed(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = directory(alice, "in2", &[("a", "alpha")]);
    let output = directory(alice, "out2", &[]);
    let place = alice.scratch.join("closed");
    let (read_on, gate) = (Gate::of(alice, "read-on"), Gate::of(alice, "closed"));
    // On the second of its nodes.
    let reads = program(
        alice,
        "reads",
        &format!(
            "#!/bin/sh\nexec 3< {}/a\n{}cat <&3 > {}/read\n",
            input.display(),
            read_on.line(),
            output.display()
        ),
    );
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_DELAY=5\n{}srun --nodes=1 --ntasks=1 --relative=1 {}\n{}{}\
         echo done > {o}/done\n",
        directives(&[&input], &[&output]),
        reads.display(),
        gate.line(),
        note_source(&output, &place),
        o = output.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=2", "--exclusive"]);
    wait_until_refused_twice(cluster, job);
    assert!(!output.join("read").exists());
    // Neither has the node been switched where nothing is open.
    let shows = cluster.covers_of(&input);
    assert_eq!(shows.len(), 2, "{shows:?}");
    read_on.open();
    cluster.wait_rsa(job, "INUSE_OUT");
    gate.open();
    cluster.wait_done(job);
    assert!(was_ram(&place), "{}", says(&place));
    assert_eq!(says(&output.join("read")), "alpha");
    assert_eq!(says(&output.join("done")), "done");
    assert_passed(&cluster.states(job), &["INUSE_IN", "UNMOUNT_NEEDED", "INUSE_OUT", "STAGING_OUT"]);
}

fn never_if_a_file_stays_open(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let input = directory(alice, "in3", &[("a", "alpha")]);
    let output = directory(alice, "out3", &[]);
    let (place, closing) = (alice.scratch.join("open"), alice.scratch.join("closing"));
    let gate = Gate::of(alice, "open");
    let script = format!(
        "#!/bin/sh\n#RSA_WAIT=hold\n#RSA_DELAY=5\n{}exec 3< {i}/a\n{}cat <&3 > {o}/read\n{}touch {closing}\n",
        directives(&[&input], &[&output]),
        gate.line(),
        note_source(&output, &place),
        i = input.display(),
        o = output.display(),
        closing = closing.display(),
    );
    let job = cluster.slurm.submit(alice, &script, &["--nodes=1", "--exclusive"]);
    wait_until_refused_twice(cluster, job);
    gate.open();
    wait_file(&closing);
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    cluster.wait_done(job);
    assert!(!was_ram(&place), "{}", says(&place));
    assert_eq!(fs::read(output.join("read")).unwrap(), b"alpha");
    let states = cluster.states(job);
    assert!(!states.iter().any(|state| state == "STAGING_OUT"), "{states:?}");
}

/// Until the switch was tried twice and files were open both times.
#[track_caller]
fn wait_until_refused_twice(cluster: &Cluster, job: u32) {
    cluster.wait_rsa(job, "UNMOUNT_NEEDED");
    wait_until(DEADLINE, "the switch is refused twice", || {
        let story = cluster.story(job);
        let log = story["log"].as_array().unwrap();
        let in_use = |text: &str| text.contains("in use") && text.contains("/a");
        log.iter().filter(|line| in_use(line["text"].as_str().unwrap_or_default())).count() >= 2
    });
}
