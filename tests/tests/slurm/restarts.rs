//! Daemons that are killed and started again: the scheduler, agents, slurmctld. Nothing that they did may be lost, and
//! nothing may be taken for what it is not.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ondeck_testbed::{Signal, available, wait_until};

use crate::aids::{LONG, SLOW, await_file, files, folder, give, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};

fn slow() -> Setup {
    Setup { scheduler: SLOW.into(), ..Setup::default() }
}

#[test]
fn a_scheduler_that_is_killed_while_a_job_is_staged_in_and_out_goes_on_where_it_was() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(slow());
    let alice = cluster.user("alice");
    let content = files(6, 2 << 20);
    let input = folder(alice, "in", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let text = script(
        alice,
        &[
            format!("DATA_IN={}", input.display()),
            format!("DATA_OUT={}", output.display()),
            "OUT_SIZE=16MiB".into(),
        ],
        &format!(
            "findmnt -n -o SOURCE -T {input} > {scratch}/where\ncp {input}/* {output}",
            input = input.display(),
            output = output.display(),
            scratch = alice.scratch.display()
        ),
    );
    let blocker = cluster.block(4);
    let job = cluster.submit(&text, 2);
    cluster.wait_rsa(job, "STAGING_IN");
    // Another one may not begin beside it.
    let second = cluster.ondeck(&["serve"]);
    second.assert_code(1).assert_says("another scheduler is running");
    cluster.kill("scheduler");
    cluster.start_scheduler();
    cluster.wait_rsa(job, "READY");
    cluster.slurm.cancel(blocker);
    cluster.wait_rsa(job, "STAGING_OUT");
    cluster.kill("scheduler");
    cluster.start_scheduler();
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    let place = fs::read_to_string(alice.scratch.join("where")).unwrap();
    assert!(place.contains("ondeck") || place.contains("job-"), "the input was read from {place}");
    // Each of them was done once.
    let states = cluster.states(job);
    for state in ["BOOTING", "STAGING_IN", "STAGING_OUT"] {
        assert_eq!(states.iter().filter(|found| *found == state).count(), 1, "{states:?}");
    }
    cluster.assert_clean();
}

#[test]
fn a_scheduler_that_is_killed_while_a_ram_disk_is_built_builds_it_anew() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let content = files(3, 1000);
    let input = folder(alice, "in", &content);
    let text = script(
        alice,
        &[format!("DATA_IN={}", input.display())],
        &format!("cp -r {} {}/seen", input.display(), alice.scratch.display()),
    );
    let blocker = cluster.block(4);
    let job = cluster.submit(&text, 2);
    wait_until(DEADLINE, "the RAM disk is being built", || {
        cluster.job(job).is_some_and(|job| job["rsa_state"] == "BOOTING")
    });
    cluster.kill("scheduler");
    cluster.start_scheduler();
    cluster.wait_rsa(job, "READY");
    cluster.slurm.cancel(blocker);
    cluster.wait_done(job);
    assert_eq!(tree(&alice.scratch.join("seen")), content);
    cluster.assert_clean();
}

#[test]
fn a_job_that_ends_while_the_scheduler_is_down_is_unmounted_by_its_epilog_and_brought_home_later() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let content = files(4, 200_000);
    let source = folder(alice, "source", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("cp {}/* {}\ntell written\nawait go\n", source.display(), output.display());
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "written");
    assert_eq!(cluster.covers_of(&output).len(), 2);
    cluster.kill("scheduler");
    give(alice, "go");
    let began = Instant::now();
    // COMPLETING until the Epilogs have ended.
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    assert!(began.elapsed() < Duration::from_secs(22), "the Epilog took {:?}", began.elapsed());
    assert!(cluster.covers_of(&output).is_empty(), "{:?}", cluster.covers_of(&output));
    assert!(tree(&output).is_empty(), "the results are in RAM");
    // Meanwhile a job that asks for something works on disk.
    let text = script(
        alice,
        &[format!("DATA_IN={}", source.display())],
        &format!("cp -r {} {}/seen", source.display(), alice.scratch.display()),
    );
    let other = cluster.submit(&text, 1);
    cluster.slurm.wait_state(other, "COMPLETED", DEADLINE);
    assert_eq!(tree(&alice.scratch.join("seen")), content);
    cluster.assert_no_hook_failed();
    cluster.start_scheduler();
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.assert_clean();
}

#[test]
fn an_agent_that_is_killed_while_it_stages_in_and_out_does_so_again() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(slow());
    let alice = cluster.user("alice");
    let content = files(6, 2 << 20);
    let input = folder(alice, "in", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let text = script(
        alice,
        &[
            format!("DATA_IN={}", input.display()),
            format!("DATA_OUT={}", output.display()),
            "OUT_SIZE=16MiB".into(),
        ],
        &format!("cp {}/* {}", input.display(), output.display()),
    );
    let blocker = cluster.block(4);
    let job = cluster.submit(&text, 2);
    cluster.wait_rsa(job, "STAGING_IN");
    // All of them: one does the work.
    let nodes = cluster.rsa_nodes(job);
    for node in &nodes {
        cluster.kill(node);
        cluster.start_agent(node);
    }
    cluster.wait_rsa(job, "READY");
    assert_eq!(cluster.rsa_nodes(job), nodes);
    cluster.slurm.cancel(blocker);
    cluster.wait_rsa(job, "STAGING_OUT");
    for node in &nodes {
        cluster.kill(node);
        cluster.start_agent(node);
    }
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.assert_clean();
}

#[test]
fn a_job_goes_on_when_the_agents_of_its_nodes_and_of_the_rsa_are_killed_and_started_again() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let content = files(4, 100_000);
    let source = folder(alice, "source", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!(
        "cp {source}/part-0 {source}/part-1 {output}\ntell written\nawait go\n\
         cmp {source}/part-0 {output}/part-0 && cp {source}/part-2 {source}/part-3 {output}",
        source = source.display(),
        output = output.display()
    );
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "written");
    let shown_on = cluster.story(job)["job"]["io_nodes"].clone();
    let shown_on: Vec<&str> =
        shown_on.as_array().unwrap().iter().map(|node| node.as_str().unwrap()).collect();
    for node in shown_on.iter().copied().chain(cluster.rsa_nodes(job).iter().map(String::as_str)) {
        cluster.kill(node);
        cluster.start_agent(node);
    }
    // The scheduler hears of all of them again.
    let address = |name: &str| std::net::SocketAddr::new(cluster.host(name).address().into(), 7272);
    for node in shown_on {
        wait_until(DEADLINE, "the agent listens", || cluster.host(node).listening().contains(&address(node)));
    }
    assert_eq!(cluster.covers_of(&output).len(), 2);
    give(alice, "go");
    cluster.wait_done(job);
    assert_eq!(tree(&output), content);
    cluster.assert_clean();
}

#[test]
fn a_slurmctld_that_does_not_answer_is_never_taken_for_an_empty_queue() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let content = files(4, 100_000);
    let input = folder(alice, "in", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("cp {}/* {}\ntell written\nawait go", input.display(), output.display());
    let runs = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "written");
    let blocker = cluster.block(2);
    let text = script(
        alice,
        &[format!("DATA_IN={}", input.display())],
        &format!(
            "findmnt -n -o SOURCE -T {input} > {scratch}/where\ncp -r {input} {scratch}/seen",
            input = input.display(),
            scratch = alice.scratch.display()
        ),
    );
    let waits = cluster.submit(&text, 1);
    cluster.wait_rsa(waits, "READY");
    for job in [runs, blocker, waits] {
        cluster.slurm.wait_saved(job);
    }
    let assert_kept = || {
        let line = |job| cluster.job(job).unwrap_or_else(|| panic!("job {job} was given up"));
        let (first, second) = (line(runs), line(waits));
        assert_eq!((&first["job_state"], &first["rsa_state"]), (&"RUNNING".into(), &"INUSE_OUT".into()));
        assert_eq!((&second["job_state"], &second["rsa_state"]), (&"ONDECK".into(), &"READY".into()));
    };
    cluster.slurm.kill_controller();
    wait_until(LONG, "the status says that Slurm does not answer", || {
        assert_kept();
        !cluster.status()["workload_manager"].is_null()
    });
    let said = cluster.ondeck(&["status"]);
    assert!(said.stdout.contains("! "), "{}", said.stdout);
    // A scheduler that starts meanwhile knows no better.
    cluster.kill("scheduler");
    cluster.start_scheduler();
    wait_until(LONG, "the new scheduler says so, too", || {
        assert_kept();
        !cluster.status()["workload_manager"].is_null()
    });
    cluster.slurm.start_controller();
    wait_until(LONG, "the status says that Slurm answers", || {
        assert_kept();
        cluster.status()["workload_manager"].is_null()
    });
    assert_kept();
    cluster.slurm.cancel(blocker);
    cluster.wait_done(waits);
    assert_eq!(tree(&alice.scratch.join("seen")), content);
    let place = fs::read_to_string(alice.scratch.join("where")).unwrap();
    assert!(place.contains("ondeck") || place.contains("job-"), "the input was read from {place}");
    give(alice, "go");
    cluster.wait_done(runs);
    assert_eq!(tree(&output), content);
    cluster.assert_clean();
}

#[test]
fn a_job_that_slurmctld_forgets_to_have_started_loses_nothing() {
    if !available() {
        return;
    }
    // A node on which no step of it ran runs no Epilog for it; then the limit ends it.
    let cluster = Cluster::with(Setup { limits: "ending = \"15s\"\n".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let content = files(4, 100_000);
    let input = folder(alice, "in", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let scratch = alice.scratch.display();
    let text = script(
        alice,
        &[
            format!("DATA_IN={}", input.display()),
            format!("DATA_OUT={}", output.display()),
            "OUT_SIZE=1MiB".into(),
        ],
        &format!(
            "n=$(ls {scratch}/started-* 2>/dev/null | wc -l)\n: > {scratch}/started-$n\n\
             echo ${{SLURM_RESTART_COUNT:-0}} > {scratch}/life-$n\n\
             cp {i}/* {o}\necho $n >> {o}/runs\ntell written-$n\nawait go",
            i = input.display(),
            o = output.display()
        ),
    );
    let blocker = cluster.block(4);
    let job = cluster.slurm.submit(alice, &text, &["--nodes=2", "--exclusive", "--output=/dev/null"]);
    cluster.wait_rsa(job, "READY");
    cluster.slurm.wait_saved(job);
    cluster.slurm.cancel(blocker);
    await_file(alice, "written-0");
    // What its nodes had yet to say of the blocker's end would be said to the next slurmctld, which would think them free.
    cluster.slurm.wait_state(blocker, "CANCELLED", DEADLINE);
    cluster.slurm.kill_controller();
    assert_eq!(cluster.covers_of(&output).len(), 2);
    cluster.slurm.start_controller();
    // It has forgotten, too, that the nodes are free.
    let seen = cluster.slurm.job(job);
    assert_eq!((&*seen["JobState"], &*seen["Restarts"]), ("PENDING", "0"), "{seen:?}");
    let killed = format!("Registered PENDING JobId={job} ");
    wait_until(LONG, "what runs is found, and killed", || cluster.slurm.controller_log().contains(&killed));
    wait_until(LONG, "its results are home", || {
        cluster.covers_of(&output).is_empty() && tree(&output).get("runs").is_some_and(|runs| runs == b"0\n")
    });
    // Then the same life of it begins once more, and is staged as any other.
    cluster.wait_rsa(job, "READY");
    // It does so on other nodes only: where it was killed, slurmd refuses it for two minutes, and Slurm lets it fail.
    let set = |state: &str| {
        let ran =
            cluster.slurm.scontrol(&["update", "NodeName=c1,c2", &format!("State={state}"), "Reason=test"]);
        ran.assert_success();
    };
    set("drain");
    cluster.slurm.cancel(blocker);
    await_file(alice, "written-1");
    cluster.wait_rsa(job, "INUSE_BOTH");
    give(alice, "go");
    cluster.slurm.wait_state(job, "COMPLETED", LONG);
    cluster.wait_done(job);
    let mut wanted = content;
    wanted.insert("runs".into(), b"0\n1\n".to_vec());
    assert_eq!(tree(&output), wanted, "{}", cluster.show(job));
    for life in ["life-0", "life-1"] {
        assert_eq!(fs::read_to_string(alice.scratch.join(life)).unwrap(), "0\n");
    }
    set("resume");
    cluster.assert_quiet();
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn a_job_that_is_back_in_the_queue_keeps_its_ram_disk_while_it_is_killed() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { limits: "ending = \"30s\"\n".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    // It does not end before it must.
    let text = script(
        alice,
        &[format!("DATA_OUT={}", output.display())],
        &format!(
            "trap '' TERM\nn=0\nwhile :; do\n  n=$((n + 1))\n  echo $n >> {}/log\n  tell writes\n  sleep 0.05\ndone",
            output.display()
        ),
    );
    let blocker = cluster.block(4);
    let job = cluster.slurm.submit(alice, &text, &["--nodes=2", "--exclusive", "--output=/dev/null"]);
    cluster.wait_rsa(job, "READY");
    cluster.slurm.wait_saved(job);
    cluster.slurm.cancel(blocker);
    await_file(alice, "writes");
    cluster.slurm.wait_state(blocker, "CANCELLED", DEADLINE);
    cluster.slurm.kill_controller();
    cluster.slurm.start_controller();
    assert_eq!(cluster.slurm.job(job)["JobState"], "PENDING");
    wait_until(LONG, "its results are home", || {
        !tree(&output).is_empty() && cluster.covers_of(&output).is_empty()
    });
    assert!(
        cluster.show(job).contains("is back in the queue; its Epilogs are waited for"),
        "{}",
        cluster.show(job)
    );
    cluster.slurm.cancel(job);
    cluster.slurm.cancel(blocker);
    cluster.wait_done(job);
    let files = tree(&output);
    assert_eq!(files.keys().collect::<Vec<_>>(), ["log"], "it was split: {}", cluster.show(job));
    let log = String::from_utf8(files["log"].clone()).unwrap();
    for (index, line) in log.lines().enumerate() {
        assert_eq!(line, (index + 1).to_string(), "{log}");
    }
    cluster.assert_clean();
}

#[test]
fn a_ram_disk_that_one_of_the_nodes_can_not_show_is_shown_on_none() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let content = files(3, 10_000);
    let input = folder(alice, "in", &content);
    let body = format!(
        "srun --ntasks-per-node=1 sh -c 'findmnt -n -o SOURCE -T {i} > {s}/where-$SLURM_NODEID; cp -r {i} {s}/seen-$SLURM_NODEID'\n",
        i = input.display(),
        s = alice.scratch.display()
    );
    let blocker = cluster.block(4);
    let text = script(alice, &[format!("DATA_IN={}", input.display())], &body);
    let job = cluster.slurm.submit(
        alice,
        &text,
        &["--nodelist=c[1-2]", "--exclusive", "--no-requeue", "--output=/dev/null"],
    );
    cluster.wait_rsa(job, "READY");
    cluster.kill("c2");
    cluster.slurm.cancel(blocker);
    cluster.slurm.wait_state(job, "COMPLETED", LONG);
    for node in ["0", "1"] {
        let place = fs::read_to_string(alice.scratch.join(format!("where-{node}"))).unwrap();
        assert!(!place.contains("ondeck"), "{node}: {place}");
        assert_eq!(tree(&alice.scratch.join(format!("seen-{node}"))), content);
    }
    let told = cluster.log_of(job);
    assert!(told.contains("mount: c2") && told.contains("works on disk"), "{told}");
    cluster.start_agent("c2");
    wait_until(LONG, "nothing of it is left", || cluster.job(job).is_none());
    // The Epilog of c2 may say that it has not reached the agent; it does not fail.
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

/// A job that looks all the time at a file in its output directory, and was told where it works. The scheduler is
/// killed, and the agent of its node stopped, while its Prolog waits and the RAM disk is being shown.
struct Watcher<'a> {
    cluster: &'a Cluster,
    job: u32,
    output: PathBuf,
}

impl Watcher<'_> {
    fn caught_while_it_is_mounted(cluster: &Cluster) -> Watcher<'_> {
        const ATTEMPTS: u32 = 8;
        let alice = cluster.user("alice");
        let input = folder(alice, "in", &files(2, 1000));
        for attempt in 0..ATTEMPTS {
            let output = folder(alice, &format!("out-{attempt}"), &BTreeMap::new());
            let directives = [
                format!("DATA_IN={}", input.display()),
                format!("DATA_OUT={}", output.display()),
                "OUT_SIZE=1MiB".into(),
            ];
            let body = format!(
                "place() {{ findmnt -n -o SOURCE -T {out} > {scratch}/$1; }}\n\
                 place first; echo one > {out}/one; tell began\n\
                 until [ -e {scratch}/go-{attempt} ]; do grep -q one {out}/one || tell lost; sleep 0.02; done\n\
                 place last; echo two > {out}/two",
                out = output.display(),
                scratch = alice.scratch.display()
            );
            let blocker = cluster.block(cluster.slurm.compute().len());
            let told = format!("--output={}/told", alice.scratch.display());
            let options = ["--nodelist=c1", "--exclusive", "--no-requeue", &told];
            let job = cluster.slurm.submit(alice, &script(alice, &directives, &body), &options);
            cluster.wait_rsa(job, "READY");
            cluster.slurm.cancel(blocker);
            let node = cluster.host("c1");
            let covered = || node.new_mounts().iter().any(|mount| mount.target == output);
            let began = Instant::now();
            while !covered() {
                assert!(began.elapsed() < LONG, "nothing is mounted: {}", cluster.show(job));
            }
            cluster.signal("c1", Signal::STOP);
            if cluster.job(job).is_some_and(|job| job["rsa_state"] == "MOUNTING") {
                cluster.kill("scheduler");
                cluster.signal("c1", Signal::CONT);
                return Watcher { cluster, job, output };
            }
            // The agent was stopped too late.
            cluster.signal("c1", Signal::CONT);
            give(alice, &format!("go-{attempt}"));
            cluster.wait_done(job);
            for name in ["first", "last", "began", "told"] {
                fs::remove_file(alice.scratch.join(name)).unwrap();
            }
        }
        panic!("in {ATTEMPTS} attempts no agent could be stopped between the mount and its last answer")
    }

    /// Lets it end; what it saw was the same from its first to its last instruction, and is what it was told. Tells
    /// whether that was the RAM disk.
    #[track_caller]
    fn saw_what_it_was_told(&self) -> bool {
        let (cluster, alice) = (self.cluster, self.cluster.user("alice"));
        let name = self.output.file_name().unwrap().to_str().unwrap();
        give(alice, &name.replace("out", "go"));
        cluster.slurm.wait_state(self.job, "COMPLETED", LONG);
        let read = |name: &str| fs::read_to_string(alice.scratch.join(name)).unwrap();
        let (first, last, told) = (read("first"), read("last"), read("told"));
        let what = format!("it was told `{told}`; first {first}, at last {last}{}", cluster.log_of(self.job));
        assert_eq!(first, last, "{what}");
        assert!(!alice.scratch.join("lost").exists(), "it lost its own file: {what}");
        let in_ram = first.contains("job-");
        assert_eq!(told.contains("its data is in a RAM disk"), in_ram, "{what}");
        assert_eq!(told.contains("works on disk"), !in_ram, "{what}");
        cluster.wait_done(self.job);
        let text = |text: &str| format!("{text}\n").into_bytes();
        let expected = [("one".to_owned(), text("one")), ("two".to_owned(), text("two"))];
        assert_eq!(tree(&self.output), expected.into(), "{what}");
        in_ram
    }
}

#[test]
fn a_scheduler_that_is_killed_while_a_prolog_waits_is_asked_again() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let job = Watcher::caught_while_it_is_mounted(&cluster);
    cluster.start_scheduler();
    await_file(cluster.user("alice"), "began");
    cluster.wait_rsa(job.job, "INUSE_BOTH");
    assert!(job.saw_what_it_was_told(), "it worked on disk: {}", cluster.log_of(job.job));
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn a_prolog_that_no_scheduler_answers_any_more_settles_with_its_node_what_the_job_sees() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { limits: "prolog = \"8s\"".into(), ..Setup::default() });
    let job = Watcher::caught_while_it_is_mounted(&cluster);
    await_file(cluster.user("alice"), "began");
    cluster.start_scheduler();
    wait_until(LONG, "the scheduler knows what became of the mount", || {
        cluster.job(job.job).is_none_or(|job| job["rsa_state"] != "MOUNTING")
    });
    job.saw_what_it_was_told();
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}
