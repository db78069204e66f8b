//! Who copies from a RAM disk is told if it is not whole; and nobody else's doing is taken for its own.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::{Duration, Instant};

use ondeck_testbed::{Ran, Signal, wait_until};

use crate::health::server_of;
use crate::site::{self, Case, GLUSTER, STRANGER, Site, View, signal};

crate::for_engines! {
    gluster = GLUSTER: [
        a_copy_of_a_part_never_succeeds_nor_deletes,
    ]
    ceph = CEPH: [
        a_copy_of_a_part_never_succeeds_nor_deletes,
    ]
}

/// `ondeck ARGUMENTS` on the host of a view, with its agent's configuration.
fn ondeck(site: &Site, view: &View, arguments: &[&str]) -> Ran {
    let config =
        format!("ONDECK_CONFIG={}", site.bed.dir().join(format!("{}.toml", view.host.name())).display());
    let state = format!("XDG_STATE_HOME={}", site.bed.dir().join("state").display());
    let ondeck = site.ondeck.display().to_string();
    let mut line = vec!["timeout", "-s", "KILL", "60", "env", &config, &state, &ondeck];
    line.extend(arguments);
    view.host.run(&line)
}

fn count(directory: &std::path::Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

fn a_copy_of_a_part_never_succeeds_nor_deletes(case: &Case) {
    const FILES: usize = 40;
    let site = Site::new();
    let view = &site.build(case, "part", "64MiB", 1)[0];
    for number in 0..FILES {
        fs::write(view.outside.join(format!("file-{number}")), "x").unwrap();
    }
    // The RAM disk itself, and a tree that it is mounted in.
    let (copy, tree) = (site.bed.dir().join("copy"), site.bed.dir().join("copy-of-tree"));
    let parent = view.path.parent().unwrap().display().to_string();
    let copy_of_tree = tree.join(view.path.file_name().unwrap());
    let jobs = [(view.text(), &copy), (parent, &tree)];
    for (from, to) in &jobs {
        ondeck(&site, view, &["stage", "--delete", from, &to.display().to_string()]).assert_success();
    }
    assert_eq!((count(&copy), count(&copy_of_tree)), (FILES, FILES));

    for server in site.processes("n2", server_of(case)) {
        signal(&server, Signal::KILL);
    }
    // At once, while its client still shows a part and reports nothing, and later when it has been cut off.
    for _ in 0..2 {
        for (from, to) in &jobs {
            ondeck(&site, view, &["stage", "--delete", from, &to.display().to_string()]).assert_code(3);
        }
        assert_eq!((count(&copy), count(&copy_of_tree)), (FILES, FILES));
        ondeck(&site, view, &["run", "--data-in", &view.text(), "--size", "16MiB", "--", "true"])
            .assert_code(125);
        wait_until(std::time::Duration::from_secs(8), "the client to be cut off", || {
            fs::read_dir(&view.outside).is_err()
        });
    }
    site.destroy("part");
    site.assert_nothing_is_left();
}

#[test]
fn a_second_copy_is_good_enough_to_stage_from() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    site.build_with(&GLUSTER, "pair", "64MiB", 1, &["--replicas", "2"]);
    let view = &site.views(&GLUSTER, "pair", 1)[0];
    for number in 0..20 {
        fs::write(view.outside.join(format!("file-{number}")), "x").unwrap();
    }
    site.processes("n2", "glusterfsd").iter().for_each(|server| signal(server, Signal::KILL));
    site.status_tells("pair", "n2", std::time::Instant::now());
    let copy = site.bed.dir().join("copy");
    ondeck(&site, view, &["stage", &view.text(), &copy.display().to_string()]).assert_success();
    assert_eq!(count(&copy), 20);
    site.destroy("pair");
    site.assert_nothing_is_left();
}

#[test]
fn it_is_unmounted_wherever_its_directory_has_gone_and_never_through_a_symlink() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let mnt = site.bed.dir().join("mnt");
    let outside = site.host("n3").path_from_outside(&mnt);
    fs::create_dir(outside.join("before")).unwrap();
    std::os::unix::fs::symlink("before", outside.join("link")).unwrap();
    let create = |name: &str, path: &str| {
        let mount = format!("n3:{}/{path}", mnt.display());
        site.ramdisk(&["create", name, "--nodes", "n1,n2", "--size", "64MiB", "--mount", &mount])
    };
    create("moved", "link/here").assert_code(3).assert_says("symlink").assert_says("before/here");
    assert_eq!(count(&outside.join("before")), 0);
    create("moved", "before/here").assert_success();
    create("second", "before/here").assert_code(3).assert_says("another RAM disk");
    site.status("moved").assert_success();
    fs::rename(outside.join("before"), outside.join("after")).unwrap();
    fs::create_dir_all(outside.join("before/here")).unwrap();
    fs::write(outside.join("before/here/mine"), "kept").unwrap();
    site.destroy("moved");
    assert_eq!(fs::read_to_string(outside.join("before/here/mine")).unwrap(), "kept");
    site.host("n3").shell(&format!("rm -r {0}/before {0}/after {0}/link", mnt.display())).assert_success();
    site.assert_nothing_is_left();
}

#[test]
fn what_others_do_is_not_taken_for_its_own() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let built = site.build_with(&GLUSTER, "own", "64MiB", 1, &[]);
    let view = &site.views(&GLUSTER, "own", 1)[0];
    fs::write(view.outside.join("file"), "kept").unwrap();

    // A process of a user with the marks of an agent's, and one with many connections to the servers.
    let epoch = &built["layout"]["id"]["epoch"];
    let sleeper = site.bed.dir().join("sleeper");
    let user = view.host.as_user(STRANGER, STRANGER);
    let mut marked = user.command("sleep");
    marked.arg("300").env("ONDECK_RAMDISK", format!("own@{epoch}")).env("ONDECK_ROLE", "client");
    marked.env("ONDECK_SCOPE", format!("n3:{}-n3", site::STATE));
    let marked = user.spawn_daemon(marked, &sleeper).unwrap();
    let server = &built["layout"]["servers"][0];
    let (address, port) = (server["address"].as_str().unwrap(), &server["ports"][0]);
    let script =
        format!("for i in {{10..60}}; do eval \"exec $i<>/dev/tcp/{address}/{port}\"; done; sleep 300");
    let mut connected = user.command("bash");
    connected.args(["-c", &script]);
    let connected = user.spawn_daemon(connected, &sleeper).unwrap();

    // An agent that starts again looks for its own, and looks after it for some time.
    site.kill_agent("n3");
    site.start_agent("n3");
    let until = std::time::Instant::now() + std::time::Duration::from_secs(3);
    while std::time::Instant::now() < until {
        site.status("own").assert_success();
    }
    assert_eq!(fs::read_to_string(view.outside.join("file")).unwrap(), "kept");
    site.destroy("own");
    assert!(marked.is_running() && connected.is_running());
    drop((marked, connected));
    site.assert_nothing_is_left();
}

#[test]
fn a_users_set_uid_programs_are_not_taken_for_a_ram_disks() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let built = site.build_with(&GLUSTER, "own", "64MiB", 1, &[]);
    let view = &site.views(&GLUSTER, "own", 1)[0];
    fs::write(view.outside.join("file"), "kept").unwrap();
    let marks = |host: &str, role: &str, id: &str| {
        let scope = format!("{host}:{}-{host}", site::STATE);
        [("ONDECK_RAMDISK", id.to_owned()), ("ONDECK_SCOPE", scope), ("ONDECK_ROLE", role.to_owned())]
    };
    let own = format!("own@{}", built["layout"]["id"]["epoch"]);
    // `su` would do, which waits for a password.
    let program = site.bed.dir().join("set-uid");
    fs::copy(site.host("n1").ok(&["sh", "-c", "command -v sleep"]).trim(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let log = site.bed.dir().join("forged");
    let user = site.host("n1").as_user(STRANGER, STRANGER);

    // One that is taken for a server, one for what nobody knows, and one that has become root for good as `sudo` does.
    let forged =
        [(&user, "brick", &*own), (&user, "brick", "other@1"), (&site.host("n1").as_root(), "client", &*own)]
            .map(|(who, role, id)| {
                let mut command = who.command(&program);
                command.arg("300").envs(marks("n1", role, id));
                let forged = who.spawn_daemon(command, &log).unwrap();
                let owner =
                    fs::metadata(format!("/proc/{}/stat", forged.pid().as_raw_nonzero())).unwrap().uid();
                assert_eq!(owner, 0, "it is not set-uid here");
                forged
            });
    site.kill_agent("n1");
    site.start_agent("n1");
    site.status("own").assert_success();
    assert!(forged.iter().all(|forged| forged.is_running()));
    drop(forged);
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        site.status("own").assert_success();
    }
    assert_eq!(fs::read_to_string(view.outside.join("file")).unwrap(), "kept");

    // Again and again, faster than they could be waited for.
    let mut busy = user.command("sh");
    let line = format!("while :; do for i in 1 2 3 4; do {} 0.2 & done; wait; done", program.display());
    busy.args(["-c", &line]).envs(marks("n1", "brick", &own));
    let busy = user.spawn_daemon(busy, &log).unwrap();
    site.destroy("own");
    assert!(busy.is_running());
    drop(busy);
    wait_until(site::DEADLINE, "the last of them to end", || site.processes("n1", "set-uid").is_empty());
    site.assert_nothing_is_left();
}
