//! Destroying works in whatever state things are; cycles leave nothing.

use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use ondeck_testbed::{Signal, wait_until};

use crate::health::{client_of, server_of};
use crate::site::{Case, DEADLINE, NODES, OWNER, Site, View, signal};

/// The promise: destroying takes no longer, whatever hangs.
const DESTROYED: Duration = Duration::from_secs(10);

crate::for_engines! {
    tmpfs = TMPFS: [
        destroying_twice_is_fine,
        a_user_in_it_does_not_keep_it,
        a_dead_agent_is_named_and_its_successor_destroys,
        cycles_leave_nothing,
        data_is_back_at_once_after_destroy,
    ]
    gluster = GLUSTER: [
        destroying_twice_is_fine,
        a_user_in_it_does_not_keep_it,
        a_dead_agent_is_named_and_its_successor_destroys,
        what_was_killed_is_destroyed,
        what_was_stopped_is_destroyed_in_ten_seconds,
        a_user_that_hangs_in_it_is_freed,
        cycles_leave_nothing,
        data_is_back_at_once_after_destroy,
    ]
    ceph = CEPH: [
        destroying_twice_is_fine,
        a_user_in_it_does_not_keep_it,
        a_dead_agent_is_named_and_its_successor_destroys,
        what_was_killed_is_destroyed,
        what_was_stopped_is_destroyed_in_ten_seconds,
        a_user_that_hangs_in_it_is_freed,
        cycles_leave_nothing,
        data_is_back_at_once_after_destroy,
    ]
}

/// Destroys it and checks that it took no longer than promised and left nothing.
#[track_caller]
fn destroy_in_time(site: &Site, name: &str, what: &str) {
    let began = Instant::now();
    let ran = site.ramdisk(&["destroy", name, "--verbose"]);
    assert!(ran.success(), "{what}: {ran:#?}");
    assert!(began.elapsed() < DESTROYED, "{what}: {:?}: {ran:#?}", began.elapsed());
    eprintln!("destroyed in {:.2} s: {what}", began.elapsed().as_secs_f64());
    site.assert_nothing_is_left();
}

fn destroying_twice_is_fine(case: &Case) {
    let site = Site::new();
    let said = site.destroy("never").stdout;
    assert!(said.contains("there was none"), "{said}");
    site.build(case, "twice", "64MiB", 2);
    let said = site.destroy("twice").stdout;
    assert!(said.contains("destroyed on"), "{said}");
    let said = site.destroy("twice").stdout;
    assert!(said.contains("there was none"), "{said}");
    site.assert_nothing_is_left();
    // Two at the same time, while it is used.
    let views = site.build(case, "twice", "64MiB", 2);
    fs::write(views[0].outside.join("file"), vec![1; 1 << 20]).unwrap();
    let mut both = [site.begin_ramdisk(&["destroy", "twice"]), site.begin_ramdisk(&["destroy", "twice"])];
    for child in &mut both {
        assert!(child.wait().unwrap().success());
    }
    site.assert_nothing_is_left();
}

/// A program of the owner's that works in a RAM disk.
fn user_in(view: &View, script: &str) -> Child {
    let mut command = view.host.as_user(OWNER, OWNER).command("sh");
    let script = format!("cd {} && {script}", view.text());
    command.args(["-c", &script]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn a_user_in_it_does_not_keep_it(case: &Case) {
    let site = Site::new();
    let views = site.build(case, "busy", "64MiB", 2);
    let mut users: Vec<Child> = views
        .iter()
        .flat_map(|view| {
            [
                user_in(view, "touch cwd; exec sleep 1000"),
                user_in(view, "exec 3>open && echo x >&3 && cd / && exec sleep 1000"),
                user_in(view, "cp /bin/sleep run && ./run 0; touch ran; exec ./run 1000"),
                user_in(view, "while :; do echo x >> written; done"),
            ]
        })
        .collect();
    for view in &views {
        wait_until(DEADLINE, "the users are at work", || {
            ["cwd", "open", "ran", "written"].iter().all(|name| view.outside.join(name).exists())
        });
    }
    let began = Instant::now();
    let ran = site.destroy("busy");
    assert!(began.elapsed() < DESTROYED, "{ran:#?}");
    for view in &views {
        assert!(!view.host.new_mounts().iter().any(|mount| mount.target == view.path));
    }
    // Those that live on see errors, and what they hold is no longer there.
    for user in &mut users {
        user.kill().unwrap();
        user.wait().unwrap();
    }
    // The program between was killed, and with it the user's own; a child of a shell may be left to init.
    for process in site.bed.processes() {
        if process.command_line.first().is_some_and(|word| word == "sleep" || word == "./run" || word == "sh")
        {
            signal(&process, Signal::KILL);
        }
    }
    site.assert_nothing_is_left();
}

fn a_dead_agent_is_named_and_its_successor_destroys(case: &Case) {
    let site = Site::new();
    let node = case.servers[case.servers.len() - 1];
    site.build(case, "alone", "64MiB", 2);
    // An agent that starts again finds it whole.
    site.kill_agent(node);
    site.start_agent(node);
    site.status("alone").assert_success();
    destroy_in_time(&site, "alone", "an agent was started again");

    site.build(case, "alone", "64MiB", 2);
    site.kill_agent(node);
    site.ramdisk(&["destroy", "alone"]).assert_code(1).assert_says(node);
    // What the others can do is done.
    if case.servers.len() > 1 {
        assert!(!site.runtime_dir(case.servers[0], "alone").exists());
    }
    site.start_agent(node);
    destroy_in_time(&site, "alone", "an agent was dead");
}

fn what_was_killed_is_destroyed(case: &Case) {
    let site = Site::new();
    for (host, program, what) in [
        ("n2", server_of(case), "a server was killed"),
        ("n3", client_of(case), "a client was killed"),
        ("n1", server_of(case), "the first server was killed"),
    ] {
        let views = site.build(case, "killed", "64MiB", 2);
        fs::write(views[0].outside.join("file"), vec![1; 1 << 20]).unwrap();
        for process in site.processes(host, program) {
            signal(&process, Signal::KILL);
        }
        destroy_in_time(&site, "killed", what);
    }
    // Everything at once, and an agent too.
    let views = site.build(case, "killed", "64MiB", 2);
    fs::write(views[0].outside.join("file"), vec![1; 1 << 20]).unwrap();
    site.kill_agent("n2");
    for host in NODES {
        for program in [server_of(case), client_of(case)] {
            for process in site.processes(host, program) {
                signal(&process, Signal::KILL);
            }
        }
    }
    site.start_agent("n2");
    site.status("killed").assert_code(1);
    destroy_in_time(&site, "killed", "all servers, all clients and an agent were killed");
}

fn what_was_stopped_is_destroyed_in_ten_seconds(case: &Case) {
    let site = Site::new();
    for (host, program, what) in
        [("n2", server_of(case), "a server was stopped"), ("n3", client_of(case), "a client was stopped")]
    {
        let views = site.build(case, "stopped", "64MiB", 2);
        for number in 0..10 {
            fs::write(views[0].outside.join(format!("file-{number}")), "x").unwrap();
        }
        for process in site.processes(host, program) {
            signal(&process, Signal::STOP);
        }
        destroy_in_time(&site, "stopped", what);
    }
    // And by an agent that has never seen it work.
    site.build(case, "stopped", "64MiB", 2);
    signal(&site.process("n3", client_of(case)), Signal::STOP);
    site.kill_agent("n3");
    site.start_agent("n3");
    destroy_in_time(&site, "stopped", "a client was stopped and its agent started again");
}

fn a_user_that_hangs_in_it_is_freed(case: &Case) {
    let site = Site::new();
    for (host, program) in [("n3", client_of(case)), ("n2", server_of(case))] {
        let views = site.build(case, "hung", "64MiB", 2);
        let mut user =
            user_in(&views[0], "while ls > /dev/null && echo x > file-$((n+=1)); do :; done; exit 9");
        wait_until(DEADLINE, "the user is at work", || views[1].outside.join("file-20").exists());
        for process in site.processes(host, program) {
            signal(&process, Signal::STOP);
        }
        destroy_in_time(&site, "hung", &format!("a user hung because of {program}"));
        wait_until(DEADLINE, "the user got an error and ended", || user.try_wait().unwrap().is_some());
        site.assert_nothing_is_left();
    }
}

fn data_is_back_at_once_after_destroy(case: &Case) {
    let site = Site::new();
    let node = case.servers[0];
    let free = || site.devices(node)["ram"]["free"].as_u64().unwrap();
    let before = free();
    let views = site.build(case, "given", "256MiB", 1);
    for number in 0..20 {
        fs::write(views[0].outside.join(format!("file-{number}")), vec![7; 4 << 20]).unwrap();
    }
    let during = free();
    assert!(before - during > 64 << 20, "{before} then {during}");
    site.destroy("given");
    // What is lent is bounded by the configuration here, so that it is the same to the byte.
    assert_eq!(free(), before);
    site.assert_nothing_is_left();
}

/// Open descriptors, threads and resident KiB of the agents, summed.
fn weight(site: &Site) -> (usize, usize, usize) {
    let mut sum = (0, 0, 0);
    for host in NODES {
        let pid = site.agent_pid(host);
        sum.0 += fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        sum.1 += fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        sum.2 += line.split_whitespace().next().unwrap().parse::<usize>().unwrap();
    }
    sum
}

fn cycles_leave_nothing(case: &Case) {
    let cycles = if case.engine == "ceph" { 10 } else { 50 };
    let site = Site::new();
    let (mut early, began) = ((0, 0, 0), Instant::now());
    for cycle in 1..=cycles {
        let view = &site.build(case, "cycle", "64MiB", 2)[0];
        fs::write(view.outside.join("file"), "x").unwrap();
        site.destroy("cycle");
        let left = site.leftovers();
        assert!(left.is_empty(), "after cycle {cycle}: {left:#?}");
        if cycle == cycles / 5 {
            early = weight(&site);
        }
    }
    let late = weight(&site);
    eprintln!(
        "{}: {cycles} cycles in {:?}; descriptors, threads, KiB of the agents: {early:?} early, {late:?} at the end",
        case.engine,
        began.elapsed()
    );
    // A few descriptors and threads come and go; 4 MiB for all four agents is what their allocators may keep.
    assert!(late.0 <= early.0 + 8, "descriptors: {} then {}", early.0, late.0);
    assert!(late.1 <= early.1 + 16, "threads: {} then {}", early.1, late.1);
    assert!(late.2 <= early.2 + (4 << 10), "KiB: {} then {}", early.2, late.2);
    site.assert_nothing_is_left();
}
