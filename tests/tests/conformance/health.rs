//! A lost server is seen.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use ondeck_testbed::{Signal, wait_until};

use crate::site::{self, Case, GLUSTER, OWNER, Setup, Site, View, difference, signal, write_pattern};

/// The promise: a lost server is seen within this.
const SEEN: Duration = Duration::from_secs(5);

crate::for_engines! {
    gluster = GLUSTER: [
        a_killed_server_is_seen_in_five_seconds_and_its_clients_fail,
        a_node_without_power_is_seen_in_five_seconds,
        a_node_without_network_is_seen_in_five_seconds,
        a_killed_client_is_seen_in_five_seconds,
        a_stopped_server_is_seen_in_five_seconds,
    ]
    ceph = CEPH: [
        a_killed_server_is_seen_in_five_seconds_and_its_clients_fail,
        a_node_without_power_is_seen_in_five_seconds,
        a_node_without_network_is_seen_in_five_seconds,
        a_killed_client_is_seen_in_five_seconds,
        a_stopped_server_is_seen_in_five_seconds,
    ]
}

pub fn server_of(case: &Case) -> &'static str {
    if case.engine == "ceph" { "ceph-osd" } else { "glusterfsd" }
}

pub fn client_of(case: &Case) -> &'static str {
    if case.engine == "ceph" { "ceph-fuse" } else { "glusterfs" }
}

/// Whether a look at a RAM disk fails now, as a program on the host sees it; a look that hangs is none that fails.
fn look_fails(view: &View) -> bool {
    let ran = view.host.run(&["timeout", "-s", "KILL", "4", "ls", &view.text()]);
    !ran.success() && ran.signal().is_none() && ran.code() != Some(137)
}

fn with_files(site: &Site, case: &Case, views: usize) -> Vec<View> {
    let views = site.build(case, "ill", "64MiB", views);
    for number in 0..20 {
        fs::write(views[0].outside.join(format!("file-{number}")), "x").unwrap();
    }
    site.status("ill").assert_success();
    views
}

fn a_killed_server_is_seen_in_five_seconds_and_its_clients_fail(case: &Case) {
    let site = Site::new();
    let views = with_files(&site, case, 2);
    let began = Instant::now();
    for server in site.processes("n2", server_of(case)) {
        signal(&server, Signal::KILL);
    }
    // A client may show half of the files until its agent has noticed; how long is worth knowing.
    let mut half = Duration::ZERO;
    while began.elapsed() < SEEN {
        match fs::read_dir(&views[0].outside).and_then(|entries| entries.collect::<Result<Vec<_>, _>>()) {
            Ok(names) if names.len() < 20 => half = began.elapsed(),
            Ok(_) => {}
            Err(_) => break,
        }
    }
    eprintln!("{}: half of the files were shown until {half:?}", case.engine);
    let seen = site.status_tells("ill", "n2", began);
    for view in &views {
        wait_until(SEEN.saturating_sub(began.elapsed()), "the client fails", || look_fails(view));
        for _ in 0..5 {
            assert!(look_fails(view), "it shows files again");
        }
        let written = fs::write(view.outside.join("new"), "x");
        assert!(written.is_err(), "a write succeeded");
    }
    let failed = began.elapsed();
    assert!(seen < SEEN && failed < 2 * SEEN, "seen after {seen:?}, failed after {failed:?}");
    site.status("ill").assert_code(1);
    site.destroy("ill");
    site.assert_nothing_is_left();
}

fn a_node_without_power_is_seen_in_five_seconds(case: &Case) {
    let site = Site::new();
    let views = with_files(&site, case, 2);
    let began = Instant::now();
    site.host("n2").crash();
    let seen = site.status_tells("ill", "n2", began);
    assert!(seen < SEEN, "{seen:?}");
    wait_until(SEEN, "the client fails", || look_fails(&views[0]));
    // The node cannot say that nothing is left, and is named.
    let began = Instant::now();
    let ran = site.ramdisk(&["destroy", "ill"]);
    ran.assert_code(1).assert_says("n2");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // It comes back as after a reboot.
    site.forget_agent("n2");
    site.host("n2").reboot();
    site.mount_ssd("n2");
    site.start_agent("n2");
    site.destroy("ill");
    site.assert_nothing_is_left();
}

fn a_node_without_network_is_seen_in_five_seconds(case: &Case) {
    let site = Site::new();
    let views = with_files(&site, case, 2);
    let began = Instant::now();
    site.host("n2").cut();
    let seen = site.status_tells("ill", "n2", began);
    assert!(seen < SEEN, "{seen:?}");
    let began = Instant::now();
    let ran = site.ramdisk(&["destroy", "ill"]);
    ran.assert_code(1).assert_says("n2");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    for view in &views {
        assert!(!view.host.new_mounts().iter().any(|mount| mount.target == view.path), "{view:?} is left");
    }
    site.host("n2").join();
    wait_until(site::DEADLINE, "the node answers again", || site.ramdisk(&["destroy", "ill"]).success());
    site.assert_nothing_is_left();
}

fn a_killed_client_is_seen_in_five_seconds(case: &Case) {
    let site = Site::new();
    let views = with_files(&site, case, 2);
    let began = Instant::now();
    signal(&site.process("n3", client_of(case)), Signal::KILL);
    let seen = site.status_tells("ill", "n3", began);
    assert!(seen < SEEN, "{seen:?}");
    assert!(look_fails(&views[0]));
    assert!(!look_fails(&views[1]), "the other client goes on");
    site.destroy("ill");
    site.assert_nothing_is_left();
}

fn a_stopped_server_is_seen_in_five_seconds(case: &Case) {
    let site = Site::new();
    with_files(&site, case, 2);
    let began = Instant::now();
    for server in site.processes("n2", server_of(case)) {
        signal(&server, Signal::STOP);
    }
    let seen = site.status_tells("ill", "n2", began);
    assert!(seen < SEEN, "{seen:?}");
    site.destroy("ill");
    site.assert_nothing_is_left();
}

#[test]
fn a_network_that_comes_back_soon_is_forgiven_and_late_is_not() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let views = with_files(&site, &GLUSTER, 2);
    let listed = |view: &View| view.host.run(&["timeout", "-s", "KILL", "4", "ls", &view.text()]);
    site.host("n2").cut();
    site.status_tells("ill", "n2", Instant::now());
    site.host("n2").join();
    wait_until(site::DEADLINE, "it is whole again", || site.status("ill").success());
    for view in &views {
        assert_eq!(listed(view).assert_success().stdout.lines().count(), 20);
    }
    // Longer than Gluster's clients wait for a server. From then on they would show what is on the other one.
    site.host("n2").cut();
    let cut = Instant::now();
    let (mut first_half, mut last_half) = (None, Duration::ZERO);
    wait_until(Duration::from_secs(30), "the clients have given the server up", || {
        let ran = listed(&views[0]);
        if ran.success() && ran.stdout.lines().count() < 20 {
            first_half.get_or_insert(cut.elapsed());
            last_half = cut.elapsed();
        }
        !ran.success() && ran.signal().is_none() && ran.code() != Some(137)
    });
    let half = last_half.saturating_sub(first_half.unwrap_or(last_half));
    eprintln!(
        "gluster: given up {:?} after the cut; half of the files was shown for {half:?}",
        cut.elapsed()
    );
    assert!(half < Duration::from_secs(2), "half of the files was shown for {half:?}");
    site.host("n2").join();
    wait_until(site::DEADLINE, "the node answers again", || site.ramdisk(&["nodes"]).success());
    for view in &views {
        wait_until(SEEN, "its client fails", || look_fails(view));
    }
    // Nor do they come back by themselves.
    site.status("ill").assert_code(1);
    for view in &views {
        assert!(look_fails(view));
    }
    site.destroy("ill");
    site.assert_nothing_is_left();
}

#[test]
fn with_two_copies_a_killed_server_loses_nothing_and_the_status_says_so() {
    if !site::ready(&GLUSTER) {
        return;
    }
    const LENGTH: u64 = 300_000;
    let site = Site::new();
    site.build_with(&GLUSTER, "twice", "64MiB", 2, &["--replicas", "2"]);
    let views = site.views(&GLUSTER, "twice", 2);
    for number in 0..40 {
        write_pattern(&views[0].outside.join(format!("file-{number}")), LENGTH, number);
    }
    site.status("twice").assert_success();
    let began = Instant::now();
    signal(&site.process("n2", "glusterfsd"), Signal::KILL);
    let seen = site.status_tells("twice", "n2", began);
    assert!(seen < SEEN, "{seen:?}");
    for view in &views {
        for number in 0..40 {
            assert_eq!(difference(&view.outside.join(format!("file-{number}")), LENGTH, number), None);
        }
    }
    // As the owner, new files and old ones.
    let owner = views[1].host.as_user(OWNER, OWNER);
    owner
        .shell(&format!("cd {} && echo new > new && mkdir dir && mv new dir/new", views[1].text()))
        .assert_success();
    let old = views[0].outside.join("file-7");
    fs::OpenOptions::new().append(true).open(&old).unwrap().write_all(b"more").unwrap();
    wait_until(Duration::from_secs(2), "the other client sees both", || {
        let new = fs::read_to_string(views[0].outside.join("dir/new")).unwrap_or_default();
        new == "new\n" && fs::metadata(views[1].outside.join("file-7")).unwrap().len() == LENGTH + 4
    });
    site.status("twice").assert_code(1);
    site.destroy("twice");
    site.assert_nothing_is_left();
}

#[test]
fn an_agent_that_starts_again_keeps_the_data() {
    if !site::ready(&GLUSTER) {
        return;
    }
    for case in [&site::TMPFS, &GLUSTER, &site::CEPH] {
        let site = Site::with(Setup::default());
        let views = site.build(case, "lives", "64MiB", 2);
        for number in 0..10 {
            write_pattern(&views[0].outside.join(format!("file-{number}")), 100_000, number);
        }
        let mut hosts = vec![case.servers[0], case.views[0].0];
        hosts.dedup();
        let running = |host: &str| -> Vec<_> {
            let mut all = site.host(host).processes();
            all.retain(|process| process.command_line.get(1).is_none_or(|word| word != "agent"));
            all.into_iter().map(|process| process.pid).collect()
        };
        for host in hosts {
            let before = running(host);
            site.kill_agent(host);
            // It is not needed for reading and writing.
            assert_eq!(difference(&views[1].outside.join("file-1"), 100_000, 1), None);
            site.start_agent(host);
            assert_eq!(running(host), before, "the same processes on {host}");
        }
        site.status("lives").assert_success();
        for view in &views {
            for number in 0..10 {
                assert_eq!(difference(&view.outside.join(format!("file-{number}")), 100_000, number), None);
            }
        }
        fs::write(views[1].outside.join("new"), "x").unwrap();
        site.destroy("lives");
        site.assert_nothing_is_left();
    }
}

#[test]
fn an_agent_that_can_not_read_what_it_kept_does_not_start_and_harms_nothing() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::with(Setup::default());
    let views = site.build(&GLUSTER, "kept", "64MiB", 2);
    write_pattern(&views[0].outside.join("file"), 100_000, 1);
    let host = GLUSTER.servers[0];
    let running = || -> Vec<_> {
        let mut all = site.host(host).processes();
        all.retain(|process| process.command_line.get(1).is_none_or(|word| word != "agent"));
        all.into_iter().map(|process| process.pid).collect()
    };
    let (before, place) = (running(), site.runtime_dir(host, "kept"));
    let places = site.runtime_dirs(host);
    let state = places.parent().unwrap();
    site.kill_agent(host);
    // Root may read everything: what makes reading fail is a directory in place of a file, and a file in place of a
    // directory.
    let aside = state.join("aside");
    for (file, remedy) in [
        (place.join("secret"), "restart the node and remove that directory"),
        (place.join("record.json"), "restart the node and remove that directory"),
        (state.join("epochs.json"), "wait a day, and remove it"),
        (places.clone(), "put it right"),
    ] {
        let was_file = file.is_file();
        for unreadable in [true, false] {
            fs::rename(&file, &aside).unwrap();
            match (was_file, unreadable) {
                (true, true) => fs::create_dir(&file).unwrap(),
                (true, false) => fs::write(&file, "{ torn").unwrap(),
                (false, _) => fs::write(&file, "").unwrap(),
            }
            let said = site.start_agent_in_vain(host);
            assert!(said.contains(remedy) && said.contains(host_path(&file)), "{}: {said}", file.display());
            assert_eq!(running(), before, "the same processes as before, without {}", file.display());
            if was_file && unreadable {
                fs::remove_dir(&file).unwrap()
            } else {
                fs::remove_file(&file).unwrap()
            }
            fs::rename(&aside, &file).unwrap();
            assert_eq!(difference(&views[1].outside.join("file"), 100_000, 1), None);
        }
    }
    // A secret that is gone, beside a record, is no sign that the RAM disk had hardly begun.
    fs::rename(place.join("secret"), &aside).unwrap();
    assert!(site.start_agent_in_vain(host).contains("secret"));
    assert_eq!(running(), before);
    fs::rename(&aside, place.join("secret")).unwrap();
    site.start_agent(host);
    assert_eq!(running(), before);
    assert_eq!(difference(&views[1].outside.join("file"), 100_000, 1), None);
    site.status("kept").assert_success();
    site.destroy("kept");
    site.assert_nothing_is_left();
}

#[test]
fn an_agent_takes_away_no_ram_disk_whose_record_or_secret_is_gone() {
    if !site::ready(&GLUSTER) {
        return;
    }
    for case in [&site::TMPFS, &GLUSTER] {
        let site = Site::with(Setup::default());
        let views = site.build(case, "kept", "64MiB", 2);
        write_pattern(&views[0].outside.join("file"), 100_000, 1);
        let mut hosts = vec![case.servers[0], case.views[0].0];
        hosts.dedup();
        for host in hosts {
            let running = || -> Vec<_> {
                let mut all = site.host(host).processes();
                all.retain(|process| process.command_line.get(1).is_none_or(|word| word != "agent"));
                all.into_iter().map(|process| process.pid).collect()
            };
            let mounted =
                || -> Vec<_> { site.host(host).new_mounts().into_iter().map(|mount| mount.target).collect() };
            let before = (running(), mounted());
            let (place, aside) =
                (site.runtime_dir(host, "kept"), site.runtime_dirs(host).parent().unwrap().join("aside"));
            site.kill_agent(host);
            for missing in ["record.json", "secret"] {
                fs::rename(place.join(missing), &aside).unwrap();
                let said = site.start_agent_in_vain(host);
                assert!(said.contains(missing) && said.contains("Put the file back"), "{said}");
                assert_eq!((running(), mounted()), before, "without {missing} on {host}");
                assert_eq!(difference(&views[1].outside.join("file"), 100_000, 1), None);
                fs::rename(&aside, place.join(missing)).unwrap();
            }
            // What had hardly begun when an agent ended is removed still.
            let begun = site.runtime_dir(host, "begun");
            fs::create_dir(&begun).unwrap();
            fs::write(begun.join("secret"), "x").unwrap();
            site.start_agent(host);
            assert!(!begun.exists());
            assert_eq!((running(), mounted()), before);
        }
        assert_eq!(difference(&views[1].outside.join("file"), 100_000, 1), None);
        site.status("kept").assert_success();
        site.destroy("kept");
        site.assert_nothing_is_left();
    }
}

#[test]
fn an_agent_kills_no_server_of_a_ram_disk_whose_directory_is_gone() {
    if !site::ready(&GLUSTER) {
        return;
    }
    for case in [&site::TMPFS, &GLUSTER] {
        let site = Site::with(Setup::default());
        let views = site.build(case, "kept", "64MiB", 2);
        write_pattern(&views[0].outside.join("file"), 100_000, 1);
        let mut hosts = vec![case.servers[0], case.views[0].0];
        hosts.dedup();
        let running = |host: &str| -> Vec<_> {
            let mut all = site.host(host).processes();
            all.retain(|process| process.command_line.get(1).is_none_or(|word| word != "agent"));
            all
        };
        for host in &hosts {
            let state = || -> (Vec<_>, Vec<_>) {
                let mounts = site.host(host).new_mounts().into_iter();
                let pids = running(host).into_iter().map(|process| process.pid);
                (pids.collect(), mounts.map(|mount| mount.id).collect())
            };
            let before = state();
            let places = site.runtime_dirs(host);
            let aside = places.parent().unwrap().join("aside");
            site.kill_agent(host);
            for missing in [places.clone(), site.runtime_dir(host, "kept")] {
                fs::rename(&missing, &aside).unwrap();
                let said = site.start_agent_in_vain(host);
                assert!(said.contains("kept@") && said.contains("Put the directory back"), "{said}");
                assert_eq!(state(), before, "without {} on {host}", missing.display());
                if missing.exists() {
                    fs::remove_dir(&missing).unwrap();
                }
                fs::rename(&aside, &missing).unwrap();
                // Not before: Gluster's servers go to their files by this path.
                assert_eq!(difference(&views[1].outside.join("file"), 100_000, 1), None);
            }
            site.start_agent(host);
            assert_eq!(state(), before);
        }
        assert_eq!(difference(&views[1].outside.join("file"), 100_000, 1), None);
        site.status("kept").assert_success();
        // An administrator can do without its data.
        let host = hosts[0];
        site.kill_agent(host);
        let aside = site.runtime_dirs(host).parent().unwrap().join("aside");
        fs::rename(site.runtime_dirs(host), &aside).unwrap();
        for process in running(host) {
            signal(&process, Signal::KILL);
        }
        for mount in site.host(host).new_mounts().iter().rev() {
            let at = mount.target.to_string_lossy();
            if mount.source.starts_with("ondeck:") {
                site.host(host).run(&["umount", "--lazy", &at]).assert_success();
            }
        }
        wait_until(site::DEADLINE, "its servers have ended", || running(host).is_empty());
        site.start_agent(host);
        fs::remove_dir_all(&aside).unwrap();
        // Nobody knows any more that they were made for it.
        for view in views.iter().filter(|view| view.host.name() == host) {
            fs::remove_dir(&view.outside).unwrap();
        }
        site.destroy("kept");
        site.assert_nothing_is_left();
    }
}

/// The last part of a path, which has another beginning in the host.
fn host_path(path: &std::path::Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap()
}
