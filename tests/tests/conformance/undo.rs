//! Building that fails or is interrupted leaves nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Child;
use std::time::{Duration, Instant};

use ondeck_testbed::{Ran, Signal, wait_until};
use serde_json::json;

use crate::site::{self, Case, DEADLINE, GLUSTER, Setup, Site};

crate::for_engines! {
    tmpfs = TMPFS: [
        a_path_that_is_a_file_fails_and_is_undone,
        an_interrupted_create_leaves_nothing,
        a_killed_create_is_cleared_away,
    ]
    gluster = GLUSTER: [
        a_path_that_is_a_file_fails_and_is_undone,
        an_interrupted_create_leaves_nothing,
        a_killed_create_is_cleared_away,
        a_killed_agent_during_create_leaves_nothing,
        a_server_or_client_that_fails_is_undone,
    ]
    ceph = CEPH: [
        a_path_that_is_a_file_fails_and_is_undone,
        an_interrupted_create_leaves_nothing,
        a_killed_create_is_cleared_away,
        a_killed_agent_during_create_leaves_nothing,
        a_server_or_client_that_fails_is_undone,
    ]
}

fn create(site: &Site, case: &Case, name: &str, views: usize, more: &[&str]) -> Ran {
    let arguments = site.arguments(case, name, "64MiB", views);
    let mut words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    words.extend(more);
    site.ramdisk(&words)
}

fn begin(site: &Site, case: &Case, name: &str, more: &[&str]) -> Child {
    let arguments = site.arguments(case, name, "64MiB", 2);
    let mut words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    words.extend(more);
    site.begin_ramdisk(&words)
}

#[test]
fn every_simulated_step_that_fails_or_hangs_is_undone() {
    if !ondeck_testbed::available() {
        return;
    }
    let site = Site::new();
    let simulated = |name: &str, simulation: &serde_json::Value, more: &[&str]| {
        let simulation = simulation.to_string();
        let mut words =
            vec!["create", name, "--engine", "simulated", "--size", "64MiB", "--nodes", "n1,n2,n3"];
        words.extend(["--mount", "n1,n2,n3:/mnt/simulated", "--simulate", &simulation]);
        words.extend(more);
        site.ramdisk(&words)
    };
    simulated("whole", &json!({ "delay_ms": 1 }), &[]).assert_success();
    site.status("whole").assert_success();
    site.destroy("whole");
    site.assert_nothing_is_left();
    for (step, shown) in [
        ("start", "start servers"),
        ("serve", "wait for servers"),
        ("mount", "mount"),
        ("check", "check by write and read"),
    ] {
        for node in ["n1", "n2", "n3"] {
            // Only the first client checks.
            if step == "check" && node != "n1" {
                continue;
            }
            for how in ["fail", "hang"] {
                let simulation = json!({ "faults": [{ "step": step, "node": node, "how": how }] });
                let began = Instant::now();
                let ran = simulated("broken", &simulation, &["--deadline", "1s"]);
                let what = format!("{how} in {step} on {node}: {ran:#?}");
                assert_eq!(ran.code(), Some(3), "{what}");
                assert!(ran.stderr.contains(&format!("`{shown}`")) && ran.stderr.contains(node), "{what}");
                assert!(ran.stderr.contains("everything was undone"), "{what}");
                assert!(began.elapsed() < Duration::from_secs(5), "{what}");
                let left = site.leftovers();
                assert!(left.is_empty(), "{what}: {left:#?}");
            }
        }
        // On all nodes at once.
        let ran = simulated("broken", &json!({ "faults": [{ "step": step, "how": "fail" }] }), &[]);
        assert_eq!(ran.code(), Some(3), "{ran:#?}");
    }
    // And again under the same name.
    simulated("broken", &json!({}), &[]).assert_success();
    site.destroy("broken");
    site.assert_nothing_is_left();
}

#[test]
fn a_node_that_stops_answering_during_create_is_named_and_clears_up_itself() {
    if !ondeck_testbed::available() {
        return;
    }
    let site = Site::new();
    let simulation = json!({ "faults": [{ "step": "start", "node": "n2", "how": "hang" }] }).to_string();
    let words = ["create", "lost", "--engine", "simulated", "--size", "1MiB", "--nodes", "n1,n2"];
    let mut child =
        site.begin_ramdisk(&[&words[..], &["--simulate", &simulation, "--deadline", "2s"]].concat());
    wait_until(DEADLINE, "the step hangs", || site.runtime_dir("n2", "lost").join("record.json").exists());
    site.host("n2").cut();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    assert!(fs::read_dir(site.runtime_dirs("n1")).unwrap().next().is_none());
    wait_until(DEADLINE, "the node has cleared up", || !site.runtime_dir("n2", "lost").exists());
    site.host("n2").join();
    wait_until(DEADLINE, "the node answers again", || site.ramdisk(&["nodes"]).success());
    site.assert_nothing_is_left();
}

#[test]
fn a_create_that_is_killed_while_it_says_that_all_is_done_leaves_no_part() {
    if !ondeck_testbed::available() {
        return;
    }
    let site = Site::new();
    let complete = |node: &str| {
        let record = fs::read(site.runtime_dir(node, "part").join("record.json")).unwrap_or_default();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap_or_default();
        record["complete"] == true
    };
    let simulation = json!({ "delay_ms": 500 }).to_string();
    let words = ["create", "part", "--engine", "simulated", "--size", "1MiB", "--nodes", "n1,n2,n3"];
    let more = ["--mount", "n1:/mnt/part", "--simulate", &simulation, "--deadline", "5s"];
    let mut child = site.begin_ramdisk(&[&words[..], &more].concat());
    // From here on there is nothing to do on the second node but to be told that all is done.
    let mounted = site.runtime_dir("n1", "part").join("client");
    wait_until(DEADLINE, "the first node mounts it", || mounted.exists());
    site.host("n2").cut();
    wait_until(DEADLINE, "two nodes are told", || complete("n1") && complete("n3"));
    send(&child, Signal::KILL);
    child.wait().unwrap();
    wait_until(DEADLINE, "the third one has removed its part", || !site.runtime_dir("n2", "part").exists());
    assert!(complete("n1") && complete("n3"), "who can not be asked has not said that there is nothing");
    site.host("n2").join();
    wait_until(DEADLINE, "the others have removed theirs", || {
        ["n1", "n3"].iter().all(|node| !site.runtime_dir(node, "part").exists())
    });
    site.assert_nothing_is_left();
}

fn a_path_that_is_a_file_fails_and_is_undone(case: &Case) {
    let site = Site::new();
    let views = site.views(case, "file", 2);
    fs::write(&views[1].outside, "mine").unwrap();
    create(&site, case, "file", 2, &[])
        .assert_code(3)
        .assert_says("is not a directory")
        .assert_says("undone");
    assert_eq!(fs::read_to_string(&views[1].outside).unwrap(), "mine");
    fs::remove_file(&views[1].outside).unwrap();
    site.assert_nothing_is_left();
    // A directory that was there stays there, with what is in it; a symbolic link is not followed.
    fs::create_dir(&views[0].outside).unwrap();
    fs::write(views[0].outside.join("before"), "mine").unwrap();
    std::os::unix::fs::symlink("/etc", &views[1].outside).unwrap();
    let ran = create(&site, case, "file", 2, &[]);
    ran.assert_code(3);
    fs::remove_file(&views[1].outside).unwrap();
    create(&site, case, "file", 2, &[]).assert_success();
    assert!(!views[0].outside.join("before").exists());
    // Where one is already shown, another is not.
    let over = ["--mount", &format!("{}:{}", views[0].host.name(), views[0].text())];
    let words = ["create", "over", "--engine", "tmpfs", "--size", "1MiB", "--nodes", views[0].host.name()];
    let ran = site.ramdisk(&[&words[..], &over[..]].concat());
    if ran.success() {
        site.destroy("over");
    }
    site.status("file").assert_success();
    site.destroy("file");
    assert_eq!(fs::read_to_string(views[0].outside.join("before")).unwrap(), "mine");
    fs::remove_dir_all(&views[0].outside).unwrap();
    site.assert_nothing_is_left();
}

/// How long a create takes here.
fn usual_time(site: &Site, case: &Case) -> Duration {
    let began = Instant::now();
    assert!(begin(site, case, "usual", &[]).wait().unwrap().success());
    let took = began.elapsed();
    site.destroy("usual");
    took
}

/// Moments that are spread over a create, a little beyond its end.
fn moments(usual: Duration, count: u32) -> impl Iterator<Item = Duration> {
    (0..count).map(move |number| usual * (2 * number + 1) * 11 / (20 * count))
}

fn send(child: &Child, signal: Signal) {
    if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
        // It has not been waited for, so the id is its own.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

fn an_interrupted_create_leaves_nothing(case: &Case) {
    let site = Site::new();
    let usual = usual_time(&site, case);
    let (mut interrupted, mut built) = (0, 0);
    for (number, moment) in moments(usual, 12).enumerate() {
        let mut child = begin(&site, case, "stopped", &[]);
        std::thread::sleep(moment);
        let signal = if number % 2 == 0 { Signal::INT } else { Signal::TERM };
        send(&child, signal);
        let status = child.wait().unwrap();
        match status.code() {
            Some(0) => {
                built += 1;
                site.status("stopped").assert_success();
                site.destroy("stopped");
            }
            // Before it could be told, nothing was begun.
            Some(3) | None => interrupted += 1,
            code => panic!("exit code {code:?} after {moment:?}"),
        }
        // The kernel may still be closing what a killed process had open.
        let began = Instant::now();
        while !site.leftovers().is_empty() && began.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = site.leftovers();
        assert!(left.is_empty(), "interrupted after {moment:?} ({status}): {left:#?}");
    }
    assert!(interrupted > 0);
    eprintln!("{}: {interrupted} interrupted, {built} built; a create takes {usual:?}", case.engine);
    site.assert_nothing_is_left();
}

fn a_killed_create_is_cleared_away(case: &Case) {
    let site = Site::new();
    let usual = usual_time(&site, case);
    // Some are destroyed at once.
    for moment in moments(usual, 6) {
        let mut child = begin(&site, case, "at-once", &[]);
        std::thread::sleep(moment);
        send(&child, Signal::KILL);
        child.wait().unwrap();
        site.destroy("at-once");
        site.assert_nothing_is_left();
    }
    // The others are cleared away by the nodes when the time is over; those that were complete by then live.
    let names: Vec<String> = (0..6).map(|number| format!("killed-{number}")).collect();
    for (name, moment) in names.iter().zip(moments(usual, 6)) {
        let mut child = begin(&site, case, name, &["--deadline", "2s"]);
        std::thread::sleep(moment);
        send(&child, Signal::KILL);
        child.wait().unwrap();
    }
    let mut lives = Vec::new();
    wait_until(DEADLINE, "each one is either whole or gone", || {
        let ran = site.ramdisk(&["list", "--json"]);
        let found: serde_json::Value = serde_json::from_str(&ran.assert_success().stdout).unwrap();
        let complete = |disk: &serde_json::Value| {
            disk["nodes"].as_array().unwrap().iter().all(|node| node["complete"] == true)
        };
        let all = found.as_array().unwrap();
        lives = all.iter().map(|disk| disk["name"].as_str().unwrap().to_owned()).collect();
        all.iter().all(|disk| disk["whole"] == true && complete(disk))
    });
    eprintln!("{}: {} of 6 were complete when they were killed", case.engine, lives.len());
    for name in lives {
        site.destroy(&name);
    }
    site.assert_nothing_is_left();
}

fn a_killed_agent_during_create_leaves_nothing(case: &Case) {
    let site = Site::new();
    let usual = usual_time(&site, case);
    for (number, moment) in moments(usual, 8).enumerate() {
        // A server's, and a client's.
        let host = ["n2", "n3"][number % 2];
        let mut child = begin(&site, case, "orphan", &["--deadline", "5s"]);
        std::thread::sleep(moment);
        site.kill_agent(host);
        let code = child.wait().unwrap().code();
        // 0: it was complete before.
        assert!(matches!(code, Some(0 | 3)), "{code:?} after {moment:?}");
        site.start_agent(host);
        if code == Some(0) {
            site.status("orphan").assert_success();
            site.destroy("orphan");
        }
        let began = Instant::now();
        while !site.leftovers().is_empty() && began.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let left = site.leftovers();
        assert!(left.is_empty(), "{host}'s agent killed after {moment:?} (exit code {code:?}): {left:#?}");
    }
    site.assert_nothing_is_left();
}

fn a_server_or_client_that_fails_is_undone(case: &Case) {
    let setup = Setup { fake_path: &["n2", "n4"], ..Setup::default() };
    let site = Site::with(setup);
    let [server, client] =
        if case.engine == "ceph" { ["ceph-osd", "ceph-fuse"] } else { ["glusterfsd", "glusterfs"] };
    let fake = |host: &str, program: &str, script: &str| {
        let path = site.fake(host).join(program);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    for (host, program) in [("n2", server), ("n4", client)] {
        for (script, says, deadline) in [
            ("echo broken on purpose >&2; exit 7", Some("broken on purpose"), "20s"),
            // It never serves.
            ("exec sleep 1000", None, "2s"),
            // It leaves a child behind and ends.
            ("sleep 1000 & exit 0", None, "3s"),
        ] {
            fake(host, program, script);
            let ran = create(&site, case, "fails", 2, &["--deadline", deadline]);
            ran.assert_code(3).assert_says(host).assert_says("everything was undone");
            if let Some(says) = says {
                ran.assert_says(says).assert_says("code 7");
            }
            site.assert_nothing_is_left();
        }
        fs::remove_file(site.fake(host).join(program)).unwrap();
    }
    create(&site, case, "fails", 2, &[]).assert_success();
    site.destroy("fails");
    site.assert_nothing_is_left();
}

#[test]
fn a_port_that_is_taken_is_passed_over_and_none_left_is_said() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::with(Setup { agent: "server_ports = \"24900-24901\"".into(), ..Setup::default() });
    let n2 = site.host("n2");
    let taken = n2.in_network(|| std::net::TcpListener::bind((n2.address(), 24_900))).unwrap();
    create(&site, &GLUSTER, "port", 1, &[]).assert_success();
    site.destroy("port");
    let all = n2.in_network(|| std::net::TcpListener::bind((n2.address(), 24_901))).unwrap();
    create(&site, &GLUSTER, "port", 1, &[])
        .assert_code(3)
        .assert_says("server_ports")
        .assert_says("n2")
        .assert_says("refused");
    drop((taken, all));
    site.assert_nothing_is_left();
}
