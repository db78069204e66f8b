//! Users' own staging scripts, after appendix U of the thesis: ones that work, fail, hang, and misbehave.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use ondeck_testbed::{available, wait_until};

use crate::aids::{LONG, await_file, files, folder, give, program, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};
use crate::jobs::{assert_passed, note_source, says, was_ram};

fn tar(arguments: &[&str]) {
    let output = Command::new("tar").args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn scripts_unpack_the_input_and_pack_the_results_as_in_the_thesis() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    unpack_and_pack(&cluster);
    cluster.assert_clean();
}

/// A job whose scripts unpack its input and pack its results.
pub fn unpack_and_pack(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let content = files(5, 50_000);
    let loose = folder(alice, "loose", &content);
    let input = folder(alice, "in", &BTreeMap::new());
    let output = folder(alice, "out", &BTreeMap::new());
    tar(&["cf", &format!("{}/input.tar", input.display()), "-C", loose.to_str().unwrap(), "."]);
    let stage_in = program(alice, "stage-in.sh", "#!/bin/bash\ntar xf \"$2/input.tar\" -C \"$1\"\n");
    let stage_out = program(
        alice,
        "stage-out.sh",
        "#!/bin/bash\ntar cf \"$2/result.tar\" -C \"$1\" .\n\
         echo \"$RSA_JOB_ID $RSA_RAMDISK $RSA_DATA_IN $RSA_DATA_OUT $(id -un)\" > \"$2/told\"\n",
    );
    let text = script(
        alice,
        &[
            format!("DATA_IN={}", input.display()),
            format!("STAGE_IN={}", stage_in.display()),
            format!("DATA_OUT={}", output.display()),
            format!("STAGE_OUT={}", stage_out.display()),
            "OUT_SIZE=1MiB".into(),
        ],
        &format!(
            "ls {input} > {scratch}/listed\nfor f in {input}/part-*; do tac $f > {output}/$(basename $f); done",
            input = input.display(),
            output = output.display(),
            scratch = alice.scratch.display()
        ),
    );
    // It is held until its input is there, though all nodes are free.
    let job = cluster.submit(&text, 2);
    cluster.wait_done(job);
    let listed = fs::read_to_string(alice.scratch.join("listed")).unwrap();
    assert_eq!(listed, "part-0\npart-1\npart-2\npart-3\npart-4\n");
    let names: Vec<String> = tree(&output).into_keys().collect();
    assert_eq!(names, ["result.tar", "told"]);
    let told = fs::read_to_string(output.join("told")).unwrap();
    let words: Vec<&str> = told.split_whitespace().collect();
    assert_eq!((words[0], words[4]), (&*job.to_string(), "alice"), "{told}");
    assert_eq!((words[2], words[3]), (input.to_str().unwrap(), output.to_str().unwrap()), "{told}");
    let unpacked = folder(alice, "unpacked", &BTreeMap::new());
    tar(&["xf", output.join("result.tar").to_str().unwrap(), "-C", unpacked.to_str().unwrap()]);
    for (name, bytes) in &content {
        let turned = Command::new("tac").arg(loose.join(name)).output().unwrap().stdout;
        assert_eq!(fs::read(unpacked.join(name)).unwrap(), turned, "{name}");
        assert_eq!(turned.len(), bytes.len());
    }
}

#[test]
fn a_job_stays_held_when_its_stage_in_script_fails_and_is_told_why() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 10));
    let stage_in =
        program(alice, "stage-in.sh", "#!/bin/sh\nprintf 'no \\033[2Jlicence\\007\\n' >&2\nexit 3\n");
    let text = script(
        alice,
        &[format!("DATA_IN={}", input.display()), format!("STAGE_IN={}", stage_in.display())],
        &format!("touch {}/ran", alice.scratch.display()),
    );
    let job = cluster.submit(&text, 1);
    cluster.wait_rsa(job, "INELIGIBLE");
    cluster.wait_note(job, "stays held");
    let note = cluster.note(job);
    assert!(note.contains(stage_in.to_str().unwrap()) && note.contains("exit code 3"), "{note}");
    assert!(!note.contains("works on disk"), "{note}");
    // Its words go to others' terminals.
    assert!(note.contains("no ?[2Jlicence") && !note.chars().any(char::is_control), "{note:?}");
    let held = cluster.slurm.wait_job(job, "has a comment", DEADLINE, |job| {
        job.get("AdminComment").is_some_and(|comment| comment.contains("exit code 3"))
    });
    assert_eq!((&*held["JobState"], &*held["Priority"]), ("PENDING", "0"), "{held:?}");
    // It is not begun for ever, and nobody else has to wait for what it had.
    for node in cluster.status()["nodes"].as_array().unwrap() {
        assert_eq!((&node["free"], &node["state"]), (&node["capacity"], &"up".into()), "{node}");
    }
    cluster.slurm.cancel(job);
    wait_until(DEADLINE, "it is forgotten", || cluster.job(job).is_none());
    assert!(!alice.scratch.join("ran").exists());
    cluster.assert_clean();
}

#[test]
fn a_job_that_was_held_for_what_it_can_not_have_is_released_and_told_why() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    folder(alice, "in", &files(1, 10));
    // sbatch and its plugin can't know that: nothing is wrong with the lines.
    let odd = folder(alice, "odd\u{1}", &BTreeMap::new());
    let text = script(
        alice,
        &["DATA_IN=in".into(), "WAIT=hold".into()],
        &format!("touch {}/ran", alice.scratch.display()),
    );
    let chdir = format!("--chdir={}", odd.display());
    let job = cluster.slurm.submit(alice, &text, &[&chdir, "--output=/dev/null"]);
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    assert!(alice.scratch.join("ran").exists());
    let told = cluster.slurm.wait_job(job, "has a comment", DEADLINE, |job| {
        job.get("AdminComment").is_some_and(|comment| comment.contains("control characters"))
    });
    assert!(told["AdminComment"].contains("the job works on disk"), "{told:?}");
    cluster.assert_clean();
}

#[test]
fn a_job_that_starts_before_its_stage_in_script_is_done_gets_a_ram_disk_for_its_output_only() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let content = files(3, 1000);
    let input = folder(alice, "in", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let (asked, place) = (alice.scratch.join("asked"), alice.scratch.join("where"));
    let stage_in =
        program(alice, "stage-in.sh", &format!("#!/bin/sh\necho once >> {}\nsleep 4741\n", asked.display()));
    let text = script(
        alice,
        &[
            format!("DATA_IN={}", input.display()),
            format!("STAGE_IN={}", stage_in.display()),
            format!("DATA_OUT={}", output.display()),
            "WAIT=disk".into(),
        ],
        &format!("await go\n{}cp {}/* {}", note_source(&output, &place), input.display(), output.display()),
    );
    let blocker = cluster.block(4);
    let job = cluster.submit(&text, 2);
    cluster.wait_rsa(job, "STAGING_IN");
    await_file(alice, "asked");
    cluster.slurm.cancel(blocker);
    cluster.slurm.wait_state(job, "RUNNING", DEADLINE);
    cluster.wait_rsa(job, "INUSE_OUT");
    assert!(cluster.covers_of(&input).is_empty());
    assert_eq!(cluster.processes("sleep 4741"), Vec::<String>::new());
    give(alice, "go");
    cluster.wait_done(job);
    assert_eq!(tree(&output), content, "{}", cluster.show(job));
    assert!(was_ram(&place), "{}", says(&place));
    assert_eq!(fs::read_to_string(asked).unwrap(), "once\n", "{}", cluster.show(job));
    let wanted =
        ["STAGING_IN", "STOPPING_STAGING_IN", "DESTROYED", "BOOTING", "READY", "INUSE_OUT", "STAGING_OUT"];
    assert_passed(&cluster.states(job), &wanted);
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn results_are_held_while_a_stage_out_script_fails_or_hangs_until_it_is_mended() {
    if !available() {
        return;
    }
    let (scheduler, limits) = ("stage_out_attempts = 1".into(), "stage_out = \"4s\"".into());
    let cluster = Cluster::with(Setup { scheduler, limits, ..Setup::default() });
    let alice = cluster.user("alice");
    let user = cluster.host("ctl").log_in(alice);
    let broken =
        [("exit 5\n", "exit code 5"), ("sleep 4711\n", "took longer"), ("exec sleep 4712\n", "took longer")];
    for (round, (body, why)) in broken.into_iter().enumerate() {
        let output = folder(alice, &format!("out-{round}"), &BTreeMap::new());
        let name = format!("stage-out-{round}.sh");
        let path = program(alice, &name, &format!("#!/bin/sh\ncp -r \"$1/.\" \"$2/early\"\n{body}"));
        let text = script(
            alice,
            &[format!("DATA_OUT={}", output.display()), format!("STAGE_OUT={}", path.display())],
            &format!("echo result > {}/result", output.display()),
        );
        let job = cluster.start_staged(&text, 1);
        let number = job.to_string();
        cluster.wait_rsa(job, "HELD");
        let note = cluster.note(job);
        assert!(note.contains(why) && note.contains("ondeck job retry"), "{note}");
        cluster.ondeck(&["wait", &number]).assert_code(1).assert_says(why);
        wait_until(DEADLINE, "nothing of the script is left", || cluster.processes("sleep 471").is_empty());
        // Its owner mends it.
        program(alice, &name, "#!/bin/sh\ncp -r \"$1/.\" \"$2\"\n");
        cluster.ondeck_on(&user, &["job", "retry", &number]).assert_success();
        cluster.wait_done(job);
        assert_eq!(tree(&output)["result"], b"result\n");
    }
    cluster.assert_clean();
}

#[test]
fn a_stage_in_script_that_hangs_is_ended_with_all_that_it_has_started() {
    if !available() {
        return;
    }
    let (scheduler, limits) = ("attempts = 1".into(), "stage_in = \"3s\"".into());
    let cluster = Cluster::with(Setup { scheduler, limits, ..Setup::default() });
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 10));
    let stage_in = program(
        alice,
        "stage-in.sh",
        "#!/bin/sh\nsetsid sleep 4721 &\n(trap '' TERM; sleep 4722) &\ntrap '' TERM\nsleep 4723\n",
    );
    let text = script(
        alice,
        &[format!("DATA_IN={}", input.display()), format!("STAGE_IN={}", stage_in.display())],
        "true",
    );
    let job = cluster.submit(&text, 1);
    cluster.wait_rsa(job, "STAGING_IN");
    wait_until(DEADLINE, "the script runs", || cluster.processes("sleep 472").len() >= 3);
    cluster.wait_rsa(job, "INELIGIBLE");
    cluster.wait_note(job, "stays held");
    assert!(cluster.note(job).contains("took longer than"), "{}", cluster.note(job));
    wait_until(DEADLINE, "nothing of the script is left", || cluster.processes("sleep 472").is_empty());
    cluster.slurm.cancel(job);
    cluster.assert_clean();
}

#[test]
fn scripts_leave_no_daemon_and_take_no_more_memory_than_they_may() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { agent: "script_memory = \"96MiB\"".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let content = files(2, 1000);
    let input = folder(alice, "in", &content);
    // It has done its work, and leaves something behind that would go on for ever.
    let daemons = program(
        alice,
        "daemons.sh",
        "#!/bin/sh\ncp \"$2\"/* \"$1\"\nsetsid nohup sleep 4731 > /dev/null 2>&1 &\n(sleep 4732 &)\nexit 0\n",
    );
    let directives = |path: &std::path::Path| {
        [format!("DATA_IN={}", input.display()), format!("STAGE_IN={}", path.display())]
    };
    let body = format!("cp -r {} {}/seen", input.display(), alice.scratch.display());
    let job = cluster.submit(&script(alice, &directives(&daemons), &body), 1);
    cluster.wait_done(job);
    assert_eq!(tree(&alice.scratch.join("seen")), content);
    assert_eq!(cluster.processes("sleep 473"), Vec::<String>::new());

    let hungry = program(
        alice,
        "hungry.sh",
        "#!/bin/sh\n# One line of three gigabytes.\nhead -c 3G /dev/zero | tail -n 1 > /dev/null\n",
    );
    let agents = || cluster.processes("ondeck agent").len();
    let before = agents();
    let job = cluster.submit(&script(alice, &directives(&hungry), "true"), 1);
    wait_until(LONG, "the script has failed", || {
        cluster.job(job).is_some_and(|job| job["rsa_state"] == "INELIGIBLE")
    });
    cluster.wait_note(job, "stays held");
    assert!(cluster.note(job).contains(hungry.to_str().unwrap()), "{}", cluster.note(job));
    assert_eq!(agents(), before);
    cluster.slurm.cancel(job);
    wait_until(DEADLINE, "it is forgotten", || cluster.job(job).is_none());
    // Others go on.
    let job = cluster.submit(&script(alice, &directives(&daemons), "true"), 1);
    cluster.wait_done(job);
    cluster.assert_clean();
}
