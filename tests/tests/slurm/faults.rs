//! Hosts that crash: compute nodes while a job runs, RSA nodes in every phase.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use ondeck_testbed::{Signal, available, wait_until};
use rustix::process::kill_process;

use crate::aids::{LONG, SLOW, await_file, change, files, folder, give, noise, own_file, reload, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};

fn slow() -> Setup {
    Setup { scheduler: SLOW.into(), ..Setup::default() }
}

/// A server that does not answer has connections nevertheless: the kernel accepts them.
#[test]
fn a_ram_disk_is_not_shown_before_all_its_servers_have_answered() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body =
        format!("for n in 1 2 3 4 5 6 7 8 9; do echo $n > {}/$n || tell failed; done", output.display());
    let blocker = cluster.block(4);
    let job = cluster.submit(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    cluster.wait_rsa(job, "READY");
    let nodes = cluster.rsa_nodes(job);
    let bricks = cluster.host(&nodes[1]).processes().into_iter();
    let bricks: Vec<_> = bricks.filter(|process| is_called(&process.command_line, "glusterfsd")).collect();
    assert_eq!(bricks.len(), 1, "{bricks:?}");
    let signal = |signal| kill_process(bricks[0].pid, signal).unwrap();
    signal(Signal::STOP);
    cluster.slurm.cancel(blocker);
    cluster.wait_rsa(job, "MOUNTING");
    let clients = || {
        let hosts = cluster.slurm.compute().iter();
        let processes = hosts.flat_map(|host| host.processes());
        processes.filter(|process| is_called(&process.command_line, "glusterfs")).count()
    };
    wait_until(DEADLINE, "both clients mount", || clients() == 2);
    // Many times as long as a mount takes.
    for _ in 0..15 {
        assert_eq!(cluster.job(job).unwrap()["rsa_state"], "MOUNTING");
        std::thread::sleep(Duration::from_millis(100));
    }
    signal(Signal::CONT);
    cluster.wait_done(job);
    assert!(!alice.scratch.join("failed").exists());
    assert_eq!(tree(&output).len(), 9, "{}", cluster.show(job));
    assert!(cluster.states(job).iter().any(|state| state == "INUSE_OUT"), "{}", cluster.show(job));
    cluster.assert_quiet();
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

/// A look at all nodes takes as long as the slowest one takes to answer; what the others said may be old by then.
#[test]
fn a_job_that_ends_while_the_nodes_are_looked_at_is_not_found_anew() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    for number in 0..4 {
        let output = folder(alice, &format!("out-{number}"), &BTreeMap::new());
        let lines = [format!("DATA_OUT={}", output.display()), "WAIT=hold".into()];
        let body = format!("echo 1 > {}/file\ntell wrote-{number}\nawait go-{number}\n", output.display());
        let job = cluster.start_staged(&script(alice, &lines, &body), 1);
        await_file(alice, &format!("wrote-{number}"));
        let lent = cluster.rsa_nodes(job);
        let idle =
            ["r1", "r2", "r3", "r4"].into_iter().find(|node| !lent.iter().any(|lent| lent == node)).unwrap();
        cluster.signal(idle, Signal::STOP);
        give(alice, &format!("go-{number}"));
        cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
        cluster.wait_done(job);
        assert_eq!(tree(&output), [("file".to_owned(), b"1\n".to_vec())].into());
        cluster.signal(idle, Signal::CONT);
    }
    cluster.assert_clean();
    let log = cluster.log_text("scheduler");
    assert!(!log.contains("that the journal does not know"), "{log}");
}

fn is_called(command_line: &[String], name: &str) -> bool {
    command_line.first().and_then(|program| program.rsplit('/').next()) == Some(name)
}

#[test]
fn what_a_job_wrote_is_brought_home_when_its_compute_node_crashes() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    own_file(alice, &alice.scratch.join("source"), &noise(7, 300_000));
    let text = script(
        alice,
        &[format!("DATA_OUT={}", output.display())],
        &format!(
            "srun --ntasks-per-node=1 sh -c 'cat {scratch}/source > {output}/$(hostname)'\n\
             tell written\nawait never",
            scratch = alice.scratch.display(),
            output = output.display()
        ),
    );
    let job = cluster.start_staged(&text, 2);
    await_file(alice, "written");
    assert!(tree(&output).is_empty(), "the job has written to disk");
    // The node of the batch script.
    let list = cluster.slurm.job(job)["NodeList"].clone();
    let names = cluster.slurm.scontrol(&["show", "hostnames", &list]).stdout;
    let names: Vec<String> = names.lines().map(str::to_owned).collect();
    let [first, second] = names.as_slice() else { panic!("{list}") };
    cluster.crash(first);
    let down = ["update", &format!("NodeName={first}"), "State=down", "Reason=crashed"];
    cluster.slurm.scontrol(&down).assert_success();
    cluster.wait_done(job);
    let expected = noise(7, 300_000);
    assert_eq!(
        tree(&output),
        BTreeMap::from([(first.clone(), expected.clone()), (second.clone(), expected)])
    );
    assert!(cluster.log_of(job).contains(&format!("not unmounted on {first}")), "{}", cluster.log_of(job));
    // It comes back as any machine does, and is used again.
    cluster.boot(first);
    cluster.slurm.start_slurmd(first);
    let input = folder(alice, "in", &files(3, 1000));
    let text = script(
        alice,
        &[format!("DATA_IN={}", input.display())],
        &format!("findmnt -n -o SOURCE -T {} > {}/where", input.display(), alice.scratch.display()),
    );
    let next = cluster.start_staged(&text, 4);
    cluster.wait_done(next);
    let place = fs::read_to_string(alice.scratch.join("where")).unwrap();
    assert!(place.contains("ondeck") || place.contains("job-"), "the input was read from {place}");
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn a_job_gets_other_rsa_nodes_when_one_crashes_while_its_input_is_staged_in() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(slow());
    let alice = cluster.user("alice");
    let content = files(8, 2 << 20);
    let input = folder(alice, "in", &content);
    let text = script(
        alice,
        &[format!("DATA_IN={}", input.display())],
        &format!(
            "findmnt -n -o SOURCE -T {input} > {scratch}/where\ncp -r {input} {scratch}/seen\n",
            input = input.display(),
            scratch = alice.scratch.display()
        ),
    );
    let blocker = cluster.block(4);
    let job = cluster.submit(&text, 2);
    cluster.wait_rsa(job, "STAGING_IN");
    let first = cluster.rsa_nodes(job);
    cluster.crash(&first[1]);
    wait_until(LONG, "the job is ready on other nodes", || {
        // Right after it was submitted, Slurm may call it next and others a moment later.
        let Some(line) = cluster.job(job) else { return false };
        assert_ne!(line["rsa_state"], "INELIGIBLE", "{}", cluster.show(job));
        line["rsa_state"] == "READY" && !cluster.rsa_nodes(job).contains(&first[1])
    });
    // The job need not wait for that.
    wait_until(LONG, "the node is taken for lost", || {
        let lost = cluster.node(&first[1]);
        assert_eq!(lost["free"].as_u64(), Some(0), "{lost}");
        lost["state"] == "lost"
    });
    cluster.slurm.cancel(blocker);
    cluster.wait_done(job);
    assert_eq!(tree(&alice.scratch.join("seen")), content);
    let place = fs::read_to_string(alice.scratch.join("where")).unwrap();
    assert!(place.contains("ondeck") || place.contains("job-"), "the input was read from {place}");
    cluster.boot(&first[1]);
    cluster.wait_lends_all(&first[1]);
    cluster.assert_clean();
}

#[test]
fn a_job_reads_its_input_from_disk_again_when_an_rsa_node_crashes() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let content = files(12, 100_000);
    let input = folder(alice, "in", &content);
    let copy = folder(alice, "copy", &content);
    // cmp: 0 is equal, 1 differs, 2 can't be read; timeout: 124.
    let body = format!(
        "cd {scratch}\ntell begun\nwhile ! [ -e stop ]; do\n\
         for f in {copy}/*; do\n\
         timeout 30 cmp -s $f {input}/$(basename $f); echo $? $(basename $f) >> read\n\
         done\necho round >> read\nsleep 0.1\ndone",
        scratch = alice.scratch.display(),
        copy = copy.display(),
        input = input.display()
    );
    let job = cluster.start_staged(&script(alice, &[format!("DATA_IN={}", input.display())], &body), 2);
    await_file(alice, "begun");
    cluster.wait_rsa(job, "INUSE_IN");
    let node = cluster.rsa_nodes(job)[1].clone();
    cluster.crash(&node);
    cluster.wait_rsa(job, "INELIGIBLE");
    let note = cluster.note(job);
    assert!(note.contains(&node) && note.contains("from disk"), "{note}");
    assert!(cluster.covers_of(&input).is_empty(), "{:?}", cluster.covers_of(&input));
    let read = || fs::read_to_string(alice.scratch.join("read")).unwrap();
    let rounds = read().matches("round").count();
    wait_until(DEADLINE, "the job has read everything from disk", || {
        read().matches("round").count() >= rounds + 2
    });
    give(alice, "stop");
    cluster.wait_done(job);
    let read = read();
    let last: Vec<&str> = read.trim_end().lines().rev().skip(1).take(content.len()).collect();
    assert!(last.iter().all(|line| line.starts_with("0 ")), "{last:?}");
    let wrong: Vec<&str> =
        read.lines().filter(|line| line.starts_with("1 ") || line.starts_with("124 ")).collect();
    assert!(wrong.is_empty(), "wrong data, or a read that hung: {wrong:?}");
    cluster.boot(&node);
    cluster.wait_lends_all(&node);
    cluster.assert_clean();
}

#[test]
fn results_on_an_rsa_node_that_crashes_are_reported_as_lost_until_they_are_abandoned() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!(
        "for n in 1 2 3 4 5 6 7 8; do echo result $n > {}/$n; done\ntell written\nawait go",
        output.display()
    );
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    let number = job.to_string();
    await_file(alice, "written");
    let nodes = cluster.rsa_nodes(job);
    let (alive, dead) = (nodes[0].clone(), nodes[1].clone());
    cluster.crash(&dead);
    // While it still runs.
    cluster.wait_note(job, &dead);
    assert!(cluster.note(job).contains(&output.display().to_string()), "{}", cluster.note(job));
    give(alice, "go");
    cluster.wait_rsa(job, "LOST");
    let told = |note: String| {
        assert!(note.contains("may be lost") && note.contains(&dead), "{note}");
        assert!(note.contains(&output.display().to_string()), "{note}");
    };
    told(cluster.note(job));
    let waited = cluster.ondeck(&["wait", &number]);
    waited.assert_code(1).assert_says(&dead);
    assert_eq!(cluster.node(&alive)["jobs"][0], cluster.key(job));
    // Its owner asks for it again, first while the node is away, then when it is back without its memory.
    let user = cluster.host("ctl").log_in(alice);
    cluster.ondeck_on(&user, &["job", "retry", &number]).assert_success();
    cluster.wait_rsa(job, "LOST");
    told(cluster.note(job));
    cluster.boot(&dead);
    wait_until(DEADLINE, "the node is back", || cluster.node(&dead)["state"] == "up");
    assert_eq!(cluster.node(&dead)["free"], 0, "what a job with results has is given away");
    cluster.ondeck_on(&user, &["job", "retry", &number]).assert_success();
    cluster.wait_rsa(job, "LOST");
    told(cluster.note(job));
    let abandoned = cluster.ondeck_on(&user, &["job", "abandon", &number]);
    assert!(!abandoned.success(), "without --yes and without a terminal");
    assert!(abandoned.stderr.contains("say so with --yes"), "{}", abandoned.stderr);
    let unknown = cluster.ondeck_on(&user, &["job", "abandon", "4711"]);
    assert!(unknown.stderr.contains("4711") && !unknown.stderr.contains("--yes"), "{}", unknown.stderr);
    cluster.ondeck_on(&user, &["job", "abandon", &number, "--yes"]).assert_success();
    cluster.wait_lends_all(&alive);
    cluster.wait_lends_all(&dead);
    cluster.ondeck(&["wait", &number]).assert_code(1).assert_says("abandoned");
    cluster.assert_clean();
}

#[test]
fn an_rsa_node_that_was_started_anew_in_a_moment_is_not_taken_for_whole() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("echo result > {}/result\ntell written\nawait go", output.display());
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "written");
    let node = cluster.rsa_nodes(job)[1].clone();
    cluster.crash(&node);
    cluster.boot(&node);
    cluster.wait_note(job, &node);
    give(alice, "go");
    cluster.wait_rsa(job, "LOST");
    cluster.ondeck(&["job", "abandon", &job.to_string(), "--yes"]).assert_success();
    cluster.wait_lends_all(&node);
    cluster.assert_clean();
}

#[test]
fn a_crash_of_an_rsa_node_while_results_are_brought_home_is_told_and_the_node_lends_nothing_until_it_is_clean()
 {
    if !available() {
        return;
    }
    let cluster = Cluster::with(slow());
    let alice = cluster.user("alice");
    let content = files(10, 2 << 20);
    let source = folder(alice, "source", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("cp {}/* {}", source.display(), output.display());
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    cluster.wait_rsa(job, "STAGING_OUT");
    let nodes = cluster.rsa_nodes(job);
    let (alive, dead) = (nodes[0].clone(), nodes[1].clone());
    cluster.crash(&dead);
    cluster.wait_rsa(job, "LOST");
    let note = cluster.note(job);
    assert!(note.contains("may be lost") && note.contains(&dead), "{note}");
    // What is there is right; nothing half-written has a result's name.
    for (name, bytes) in tree(&output).iter().filter(|(name, _)| !name.contains("ondeck")) {
        assert_eq!(content.get(name), Some(bytes), "{name}");
    }
    cluster.ondeck(&["job", "abandon", &job.to_string(), "--yes"]).assert_success();
    cluster.wait_lends_all(&alive);
    wait_until(DEADLINE, "the job is done", || cluster.job(job).is_none());
    let lost = cluster.node(&dead);
    assert_eq!((lost["state"].as_str(), lost["free"].as_u64()), (Some("lost"), Some(0)), "{lost}");
    cluster.boot(&dead);
    cluster.wait_lends_all(&dead);
    cluster.assert_clean();
}

#[test]
fn results_that_could_not_be_reached_come_home_by_themselves_once_the_network_is_mended() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!(
        "for n in 1 2 3 4 5 6 7 8; do echo result $n > {}/$n; done\ntell written\nawait go",
        output.display()
    );
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "written");
    let node = cluster.rsa_nodes(job)[1].clone();
    cluster.host(&node).cut();
    cluster.wait_note(job, &node);
    give(alice, "go");
    cluster.wait_rsa(job, "LOST");
    cluster.host(&node).join();
    wait_until(LONG, "the results are on disk", || cluster.job(job).is_none());
    let found = tree(&output);
    assert_eq!(found.len(), 8, "{found:?}");
    for (name, bytes) in found {
        assert_eq!(bytes, format!("result {name}\n").into_bytes());
    }
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn what_other_nodes_have_is_saved_on_request_and_what_the_crashed_one_had_is_named() {
    if available() {
        loses_and_saves(1);
    }
}

#[test]
fn what_other_nodes_have_is_saved_also_if_the_first_one_crashed_which_brought_the_results_home() {
    if available() {
        loses_and_saves(0);
    }
}

/// A job writes, moves and renames files; then one of its two RSA nodes crashes.
fn loses_and_saves(which: usize) {
    let cluster = Cluster::with(slow());
    let alice = cluster.user("alice");
    let content = files(40, 400_000);
    let source = folder(alice, "source", &content);
    let before = BTreeMap::from([("kept".to_owned(), b"was there".to_vec())]);
    let output = folder(alice, "out", &before);
    // A file that is renamed stays on its node, with a mark on the one that its new name belongs to.
    let body = format!(
        "cp {}/* {output}\nmkdir -p {output}/sub/deep\ncd {output}\n\
         for n in 0 1 2 3 4 5 6 7 8 9; do mv part-$n renamed-$n; mv part-1$n sub/deep; done",
        source.display(),
        output = output.display()
    );
    let written: BTreeMap<String, Vec<u8>> = content
        .into_iter()
        .map(|(name, bytes)| {
            let number = name.strip_prefix("part-").unwrap();
            let now = match number.len() {
                1 => format!("renamed-{number}"),
                _ if number.starts_with('1') => format!("sub/deep/{name}"),
                _ => name,
            };
            (now, bytes)
        })
        .collect();
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    let number = job.to_string();
    cluster.wait_rsa(job, "STAGING_OUT");
    let nodes = cluster.rsa_nodes(job);
    let (alive, dead) = (nodes[1 - which].clone(), nodes[which].clone());
    wait_until(LONG, "it is known what the nodes have", || {
        cluster.story(job)["job"]["parts"].as_object().is_some_and(|parts| parts.len() == 2)
    });
    wait_until(DEADLINE, "something is on disk", || fs::read_dir(&output).unwrap().count() > 3);
    cluster.crash(&dead);
    cluster.wait_rsa(job, "LOST");
    let lost = cluster.story(job)["lost"].clone();
    assert_eq!((lost.as_array().unwrap().len(), lost[0]["node"].as_str()), (1, Some(&*dead)), "{lost}");
    let named: Vec<String> = lost[0]["names"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| {
            name.as_str().unwrap().strip_prefix(&format!("{}/", output.display())).unwrap().to_owned()
        })
        .collect();
    assert_eq!(lost[0]["files"].as_u64(), Some(named.len() as u64), "{lost}");
    let note = cluster.note(job);
    assert!(note.contains(&format!("{dead} had {} files", named.len())), "{note}");
    assert!(note.contains(&output.join(&named[0]).display().to_string()), "{note}");
    let told = cluster.show(job);
    assert!(named.iter().all(|name| told.contains(&output.join(name).display().to_string())), "{told}");
    // What has come home before the crash is safe; the rest of what the other node has is saved on request.
    let home = tree(&output);
    let user = cluster.host("ctl").log_in(alice);
    let refused = cluster.ondeck_on(&user, &["job", "retry", "--salvage", &number]);
    assert!(!refused.success(), "without --yes and without a terminal");
    cluster.ondeck_on(&user, &["job", "retry", "--salvage", "--yes", &number]).assert_success();
    wait_until(LONG, "what is left is saved", || cluster.job(job).is_none());
    let mut expected = before.clone();
    let comes = |name: &String| !named.contains(name) || home.contains_key(name);
    expected.extend(
        written.iter().filter(|(name, _)| comes(name)).map(|(name, bytes)| (name.clone(), bytes.clone())),
    );
    let found = tree(&output);
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert!(found == expected, "the names are right, and the contents are not");
    assert!(found.len() < 41, "nothing was lost");
    // It is named also when all is over, and nobody is told that all went well.
    assert_eq!(cluster.story(job)["lost"], lost);
    let note = cluster.note(job);
    assert!(note.contains("were saved") && note.contains(&dead), "{note}");
    cluster.ondeck(&["wait", &number]).assert_code(1).assert_says("the rest is lost");
    cluster.wait_lends_all(&alive);
    cluster.boot(&dead);
    cluster.wait_lends_all(&dead);
    cluster.assert_clean();
}

#[test]
fn what_a_running_job_has_on_an_rsa_node_that_crashes_is_named_at_once() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!(
        "for n in 1 2 3 4 5 6 7 8; do echo result $n > {}/$n; done\ntell written\nawait go",
        output.display()
    );
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "written");
    let dead = cluster.rsa_nodes(job)[1].clone();
    let parts = || cluster.story(job)["job"]["parts"].clone();
    wait_until(LONG, "the nodes have been asked", || {
        let files = |part: &serde_json::Value| part["files"].as_u64().unwrap();
        parts().as_object().is_some_and(|parts| parts.values().map(files).sum::<u64>() == 8)
    });
    cluster.crash(&dead);
    let files = parts()[&dead]["files"].as_u64().unwrap();
    cluster.wait_note(job, &format!("{dead} had {files} files"));
    assert!(cluster.note(job).contains("I/O error"), "{}", cluster.note(job));
    assert_eq!(cluster.story(job)["lost"][0]["files"].as_u64(), Some(files));
    let early = cluster.ondeck(&["job", "retry", "--salvage", "--yes", &job.to_string()]);
    assert!(!early.success(), "saved while the job runs: {}", early.stdout);
    give(alice, "go");
    cluster.wait_rsa(job, "LOST");
    cluster.ondeck(&["job", "retry", "--salvage", "--yes", &job.to_string()]).assert_success();
    wait_until(LONG, "what is left is saved", || cluster.job(job).is_none());
    assert_eq!(tree(&output).len() as u64, 8 - files);
    assert_eq!(cluster.story(job)["lost"][0]["names"].as_array().unwrap().len() as u64, files);
    cluster.boot(&dead);
    cluster.wait_lends_all(&dead);
    cluster.assert_clean();
}

/// What it showed would give errors to every later job of the node, also of people who never asked for a RAM disk.
#[test]
fn a_client_that_is_killed_leaves_nothing_for_later_jobs_though_no_scheduler_answers() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body =
        format!("echo result > {}/result; sync -f {0}/result; tell written; await go", output.display());
    let job = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 1);
    await_file(alice, "written");
    let node = cluster.slurm.job(job)["NodeList"].clone();
    let clients = cluster.host(&node).processes().into_iter();
    let clients: Vec<_> = clients.filter(|process| is_called(&process.command_line, "glusterfs")).collect();
    assert_eq!(clients.len(), 1, "{clients:?}");
    kill_process(clients[0].pid, Signal::KILL).unwrap();
    wait_until(DEADLINE, "the doctor complains of the dead mount", || {
        let ran = cluster.ondeck(&["doctor", "--slurm"]);
        ran.stdout.contains("dead mounts") && ran.stdout.contains(&format!("{} on {node}", output.display()))
    });
    cluster.kill("scheduler");
    give(alice, "go");
    let shown = || cluster.host(&node).new_mounts().iter().any(|mount| mount.target == output);
    wait_until(LONG, "its Epilog has taken it away", || !shown());
    cluster.slurm.wait_state(job, "COMPLETED", LONG);
    // The next one, which asks for nothing.
    let look =
        script(alice, &[], &format!("ls {} > {}/seen 2>&1", output.display(), alice.scratch.display()));
    let next = cluster.submit(&look, 4);
    cluster.slurm.wait_state(next, "COMPLETED", LONG);
    assert_eq!(fs::read_to_string(alice.scratch.join("seen")).unwrap(), "");
    // What it had written is on the RSA nodes, and comes home.
    cluster.start_scheduler();
    cluster.wait_done(job);
    assert_eq!(tree(&output), BTreeMap::from([("result".into(), b"result\n".to_vec())]));
    assert!(cluster.log_of(job).contains("lost while the job ran"), "{}", cluster.log_of(job));
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

/// What the scheduler says of compute nodes: of each kind the nodes.
fn warnings(cluster: &Cluster) -> BTreeMap<String, Vec<String>> {
    let status = cluster.status();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let of = |warning: &serde_json::Value| {
        (text(&warning["kind"]), warning["nodes"].as_array().unwrap().iter().map(text).collect())
    };
    status["warnings"].as_array().unwrap().iter().map(of).collect()
}

fn has_figure(cluster: &Cluster, line: &str) -> bool {
    cluster.ondeck(&["status", "--metrics"]).stdout.lines().any(|found| found == line)
}

#[test]
fn a_job_whose_prolog_never_asks_is_told_and_so_is_the_administrator() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup {
        rsa_nodes: 1,
        compute_nodes: 1,
        limits: "prolog = \"3s\"".into(),
        slurm: "BatchStartTimeout=40\nPrologEpilogTimeout=60\n".into(),
        ..Setup::default()
    });
    let started = Instant::now();
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 1000));
    let text = |name: &str| {
        let body = format!(
            "findmnt -n -o SOURCE -T {} > {}/{name}\ntell {name}-runs\nawait {name}-go",
            input.display(),
            alice.scratch.display()
        );
        script(alice, &[format!("DATA_IN={}", input.display())], &body)
    };
    let conf = cluster.slurm.conf().to_owned();
    let good = fs::read_to_string(&conf).unwrap();
    let line = good.lines().find(|line| line.starts_with("Prolog=")).unwrap();
    // A site's own that has forgotten ours.
    fs::write(&conf, good.replace(line, "Prolog=/bin/true")).unwrap();
    cluster.slurm.scontrol(&["reconfigure"]).assert_success();
    // A Prolog of a job that starts earlier may have asked before there was a scheduler.
    wait_until(DEADLINE, "the scheduler runs for longer than a Prolog asks", || {
        started.elapsed() > Duration::from_secs(3)
    });
    let job = cluster.start_staged(&text("first"), 1);
    await_file(alice, "first-runs");
    cluster
        .wait_note(job, "its RAM disk was ready, and is not used: no Prolog of it has asked the scheduler");
    // The job is told first.
    let told = BTreeMap::from([("no_prolog".into(), vec!["c1".into()])]);
    wait_until(DEADLINE, "the administrator is told", || warnings(&cluster) == told);
    let shown = cluster.ondeck(&["status"]).stdout;
    assert!(shown.contains("! no Prolog has asked for the last 1 jobs on c1 (job "), "{shown}");
    assert!(has_figure(&cluster, "ondeck_compute_nodes{trouble=\"no_prolog\"} 1"));
    assert!(has_figure(&cluster, "ondeck_jobs_without_prolog_total 1"));
    let doctor = cluster.ondeck(&["doctor", "--slurm"]);
    assert!(doctor.stdout.contains("Prologs that ask") && doctor.code() == Some(1), "{doctor:#?}");
    // Users see nothing of it.
    let status = cluster.ondeck_on(&cluster.host("ctl").log_in(alice), &["status"]);
    assert!(status.success() && !status.stdout.contains("! "), "{status:#?}");
    give(alice, "first-go");
    cluster.wait_done(job);
    assert!(cluster.note(job).contains("no Prolog of it has asked"), "{}", cluster.show(job));

    // It goes away with the next Prolog that asks.
    fs::write(&conf, &good).unwrap();
    cluster.slurm.scontrol(&["reconfigure"]).assert_success();
    // Which may take longer than that limit if the machine is busy.
    change(&cluster, "ondeck.toml", "prolog = \"3s\"", "prolog = \"20s\"");
    reload(&cluster, "scheduler", "scheduler", "taken over: scheduler.limits.prolog\n");
    let next = cluster.start_staged(&text("next"), 1);
    await_file(alice, "next-runs");
    assert_eq!(warnings(&cluster), BTreeMap::new());
    assert!(has_figure(&cluster, "ondeck_compute_nodes{trouble=\"no_prolog\"} 0"));
    give(alice, "next-go");
    cluster.wait_done(next);
    let place = |name: &str| fs::read_to_string(alice.scratch.join(name)).unwrap();
    assert!(!place("first").contains("ondeck") && place("next").contains("ondeck"), "{}", place("next"));
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn a_compute_node_without_its_agent_and_what_is_left_there_are_told_of() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 1, compute_nodes: 1, ..Setup::default() });
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(1, 1000));
    let text = script(alice, &[format!("DATA_IN={}", input.display())], "tell runs\nawait go");
    let job = cluster.start_staged(&text, 1);
    await_file(alice, "runs");
    assert_eq!(warnings(&cluster), BTreeMap::new());
    cluster.kill("c1");
    give(alice, "go");
    let of = |kind: &str| warnings(&cluster).get(kind).cloned().unwrap_or_default();
    wait_until(LONG, "what is left is told of", || of("left_over") == ["c1"]);
    wait_until(LONG, "the silent agent is told of", || of("silent_agent") == ["c1"]);
    assert!(has_figure(&cluster, "ondeck_compute_nodes{trouble=\"silent_agent\"} 1"));
    assert!(has_figure(&cluster, "ondeck_compute_nodes{trouble=\"left_over\"} 1"));
    let shown = cluster.ondeck(&["status"]).stdout;
    assert!(
        shown.contains("! the agent of c1 does not answer (") && shown.contains("is left on c1"),
        "{shown}"
    );
    let doctor = cluster.ondeck(&["doctor", "--slurm"]);
    assert!(doctor.stdout.contains("left-over RAM disks"), "{doctor:#?}");
    cluster.start_agent("c1");
    wait_until(LONG, "all is right again", || warnings(&cluster).is_empty());
    cluster.wait_done(job);
    cluster.assert_clean();
}
