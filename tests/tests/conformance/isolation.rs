//! Isolation, which is who gets at what: fencing, nothing of an earlier user.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ondeck_testbed::{Host, wait_until};
use serde_json::{Value, json};

use crate::site::{
    self, CEPH, Case, DEADLINE, GLUSTER, NODES, OWNER, PORT, STRANGER, Setup, Site, View, last_lines,
};

crate::for_engines! {
    tmpfs = TMPFS: [
        only_its_owner_gets_in,
        a_ramdisk_shows_nothing_of_the_one_before,
    ]
    gluster = GLUSTER: [
        only_its_owner_gets_in,
        a_ramdisk_shows_nothing_of_the_one_before,
        the_secret_is_nowhere_to_be_read,
        servers_listen_on_their_storage_address_only,
    ]
    ceph = CEPH: [
        only_its_owner_gets_in,
        a_ramdisk_shows_nothing_of_the_one_before,
        the_secret_is_nowhere_to_be_read,
        servers_listen_on_their_storage_address_only,
    ]
}

fn only_its_owner_gets_in(case: &Case) {
    let site = Site::new();
    let views = site.build(case, "mine", "64MiB", 2);
    let mut leaks = Vec::new();
    for view in &views {
        let meta = fs::metadata(&view.outside).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o700, OWNER, OWNER), "{view:?}");
        let mount = view.host.new_mounts().into_iter().find(|mount| mount.target == view.path).unwrap();
        let options: BTreeSet<&str> = mount.options.split(',').collect();
        assert!(options.contains("nosuid") && options.contains("nodev"), "{mount:?}");
        for mount in view.host.new_mounts().iter().filter(|mount| mount.target != site.ssd()) {
            assert!(mount.options.contains("nosuid") && mount.options.contains("nodev"), "{mount:?}");
        }
        let owner = view.host.as_user(OWNER, OWNER);
        owner
            .shell(&format!("cd {} && mkdir -p dir && echo secret > dir/file", view.text()))
            .assert_success();
        let stranger = view.host.as_user(STRANGER, STRANGER);
        // At once after the owner, whose look the kernel may remember, and again.
        for script in ["ls dir", "stat dir/file", "cat dir/file", "touch x", "ls", "echo x > dir/file"] {
            owner.shell(&format!("cat {}/dir/file", view.text())).assert_success();
            // Without cd: only the names below are looked up.
            let script = script
                .replace("dir", &format!("{}/dir", view.text()))
                .replace(" x", &format!(" {}/x", view.text()));
            let script = if script == "ls" { format!("ls {}", view.text()) } else { script };
            let ran = stranger.shell(&script);
            if ran.success() {
                leaks.push(format!("{}: `{script}` by another user: {:?}", view.host.name(), ran.stdout));
            }
        }
        // Nor beside the owner's directory, where the agent mounts the whole.
        for user in [&owner, &stranger] {
            user.shell(&format!("ls {}-{}", site::STATE, view.host.name())).assert_says("Permission denied");
            let readable = user.shell("find /run/ondeck -type f -readable 2>/dev/null | head -5");
            assert_eq!(readable.stdout, "", "readable for users");
        }
        // Device files and set-uid programs of the owner's are without power there; root may try.
        view.host
            .shell(&format!("mknod {0}/null c 1 3; echo x > {0}/null", view.text()))
            .assert_says("denied");
    }
    assert!(leaks.is_empty(), "{leaks:#?}");
    site.destroy("mine");
    site.assert_nothing_is_left();
}

/// Fills a RAM disk until there is no room, with files of 4 MiB and then smaller ones. Gives the number of bytes.
pub fn fill(view: &View, byte: u8) -> u64 {
    let mut total = 0;
    // Gluster puts a file where its name says: the last server with space is met by every third or fourth one. Once all are
    // nearly full, it puts each where it believes most room to be, and looks for that once a second: until then all may fail.
    const BELIEVED: Duration = Duration::from_secs(3);
    let room = || rustix::fs::statvfs(&view.outside).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    for (size, failures_at_most) in [(4 << 20, 80), (128 << 10, 80)] {
        let mut last_success = Instant::now();
        let content = vec![byte; size];
        let mut failures = 0;
        for number in 0.. {
            let file = fs::File::create(view.outside.join(format!("fill-{size}-{number}")));
            let written = file.map_or(0, |file| {
                let mut written = 0;
                // In pieces: what goes in before the end counts.
                for piece in content.chunks(128 << 10) {
                    match file.write_at(piece, written as u64) {
                        Ok(length) => written += length,
                        Err(_) => break,
                    }
                    if file.sync_data().is_err() {
                        written = written.saturating_sub(128 << 10);
                        break;
                    }
                }
                written
            });
            total += written as u64;
            if written > 0 {
                last_success = Instant::now();
            }
            failures += u32::from(written < size);
            if failures >= failures_at_most && (room() < size as u64 || last_success.elapsed() > BELIEVED) {
                break;
            }
        }
    }
    total
}

/// Fails if a file that is allocated over most of the free bytes holds anything but zeros.
fn assert_only_zeros(view: &View) {
    let stat = rustix::fs::statvfs(&view.outside).unwrap();
    let files = stat.f_bavail * stat.f_frsize * 8 / 10 / (4 << 20);
    let (mut buffer, zeros) = (vec![1; 4 << 20], vec![0; 4 << 20]);
    let mut looked_at = 0;
    for number in 0..files {
        let file = fs::File::create_new(view.outside.join(format!("zeros-{number}"))).unwrap();
        match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 4 << 20) {
            // The server that this name leads to is full before the others are.
            Err(rustix::io::Errno::NOSPC) => continue,
            done => done.unwrap(),
        }
        looked_at += 1;
        let mut file = fs::File::open(view.outside.join(format!("zeros-{number}"))).unwrap();
        file.read_exact(&mut buffer).unwrap();
        assert!(buffer == zeros, "bytes of somebody else in zeros-{number}");
        file = fs::File::options().write(true).open(view.outside.join(format!("zeros-{number}"))).unwrap();
        // A hole between two writes, too.
        file.write_at(b"x", 0).unwrap();
        file.write_at(b"x", (4 << 20) - 1).unwrap();
        drop(file);
        let found = fs::read(view.outside.join(format!("zeros-{number}"))).unwrap();
        assert!(found[1..(4 << 20) - 1] == zeros[2..], "in a hole of zeros-{number}");
    }
    assert!(looked_at > files / 2, "{looked_at} files of {files}");
}

fn a_ramdisk_shows_nothing_of_the_one_before(case: &Case) {
    let site = Site::new();
    let first = site.build(case, "old", "128MiB", 1).remove(0);
    let bytes = fill(&first, 0xA5);
    assert!(bytes > 100 << 20, "{bytes}");
    site.destroy("old");
    // Another user's, of the same name.
    let mut arguments = site.arguments(case, "old", "128MiB", 1);
    for word in arguments.iter_mut().filter(|word| *word == "20001:20001") {
        *word = "20002:20002".to_owned();
    }
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    site.ramdisk(&words).assert_success();
    assert_eq!(fs::read_dir(&first.outside).unwrap().count(), 0);
    assert_only_zeros(&first);
    site.destroy("old");
    site.assert_nothing_is_left();
}

#[test]
fn a_directory_device_shows_nothing_of_the_one_before_and_its_image_is_removed() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let parts = "[agent.device.ssd]\nkind = \"dir\"\npath = \"BED/ssd\"\ncapacity = \"400MiB\"\n";
    let site = Site::with(Setup { parts: parts.into(), ..Setup::default() });
    let images = || -> usize {
        let of = |host| fs::read_dir(site.host(host).path_from_outside(site.ssd())).unwrap().count();
        NODES.into_iter().map(of).sum()
    };
    for round in 0..2 {
        site.build_with(&GLUSTER, "disk", "64MiB", 1, &["--device", "ssd"]);
        assert_eq!(images(), 2);
        let used = site.devices("n1")["ssd"]["promised"].as_u64().unwrap();
        assert!(used >= 32 << 20, "{used} promised");
        let view = &site.views(&GLUSTER, "disk", 1)[0];
        if round == 0 {
            let bytes = fill(view, 0xA5);
            assert!(bytes > 56 << 20, "{bytes} of 64 MiB could be written");
        } else {
            assert_only_zeros(view);
        }
        site.destroy("disk");
        assert_eq!(images(), 0);
        site.assert_nothing_is_left();
    }
}

#[test]
fn a_preallocated_ramdisk_works_and_shows_nothing_either() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::with(Setup { parts: "preallocate = true".into(), ..Setup::default() });
    for case in [&site::TMPFS, &GLUSTER] {
        let view = site.build(case, "touched", "64MiB", 1).remove(0);
        assert_only_zeros(&view);
        site.destroy("touched");
        site.assert_nothing_is_left();
    }
}

/// What must not be readable: the secret of a RAM disk, and all passwords and keys that follow from it.
fn secrets(site: &Site, name: &str) -> BTreeSet<String> {
    let mut secrets = BTreeSet::new();
    for host in NODES {
        let Ok(entries) = fs::read_dir(site.runtime_dir(host, name)) else { continue };
        for entry in entries.flatten().filter(|entry| entry.path().is_file()) {
            let text = String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).into_owned();
            let file = entry.file_name();
            if file == "secret" {
                secrets.insert(text.trim().to_owned());
            }
            for line in text.lines() {
                let words: Vec<&str> = line.split_whitespace().collect();
                match words.as_slice() {
                    ["option", "username" | "password", value] => {
                        secrets.insert((*value).to_owned());
                    }
                    ["key", "=", value] => {
                        secrets.insert((*value).to_owned());
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(secrets.len() >= 3 && secrets.iter().all(|secret| secret.len() >= 32), "{} found", secrets.len());
    secrets
}

fn the_secret_is_nowhere_to_be_read(case: &Case) {
    let site = Site::new();
    let views = site.build(case, "quiet", "64MiB", 3);
    let secrets = secrets(&site, "quiet");
    let tells = |text: &[u8]| {
        let text = String::from_utf8_lossy(text);
        secrets.iter().any(|secret| text.contains(secret.as_str()))
    };
    // Something goes wrong and is logged; a status and a list are asked for.
    site.ramdisk(&["status", "quiet", "--json"]).assert_success();
    let said = site.ramdisk(&["list", "--json"]).stdout + &site.ramdisk(&["nodes", "--json"]).stdout;
    assert!(!tells(said.as_bytes()), "in what ondeck prints");
    for process in site.bed.processes() {
        let line = process.command_line.join(" ");
        assert!(!tells(line.as_bytes()), "in a command line: {line}");
        assert!(!tells(&fs::read(process.proc("environ")).unwrap_or_default()), "in the environment");
    }
    for view in &views {
        let owner = view.host.as_user(OWNER, OWNER);
        // Gluster's view into itself has the volfile with the passwords.
        for hidden in
            [".meta", ".meta/graphs/active/brick-0/options", ".glusterfs", "../.meta", "../client.vol"]
        {
            let ran = owner.shell(&format!("cd {} && find {hidden} | head -3", view.text()));
            assert_eq!(ran.stdout, "", "{hidden}");
        }
        assert!(!view.outside.join(".meta").exists());
        for name in ["glusterfs.volfile", "trusted.glusterfs.volfile", "glusterfs.pathinfo"] {
            let mut value = vec![0; 65536];
            let length = rustix::fs::getxattr(&view.outside, name, &mut value[..]).unwrap_or(0);
            assert!(!tells(&value[..length]), "in the attribute {name}");
        }
    }
    let check_logs = |when: &str| {
        for host in NODES {
            assert!(!tells(&fs::read(site.agent_log(host)).unwrap()), "{when}: in the log of {host}'s agent");
            if let Ok(meta) = fs::metadata(site.runtime_dir(host, "quiet")) {
                assert_eq!((meta.mode() & 0o777, meta.uid()), (0o700, 0), "{when}: on {host}");
            }
            for entry in fs::read_dir(site.runtime_dir(host, "quiet")).into_iter().flatten().flatten() {
                let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
                let meta = fs::symlink_metadata(&path).unwrap();
                if meta.is_file() {
                    assert_eq!(meta.mode() & 0o077, 0, "{when}: {name} has the mode {:o}", meta.mode());
                }
                if name.ends_with(".log") {
                    assert!(!tells(&fs::read(&path).unwrap()), "{when}: in {name} of {host}");
                }
            }
        }
        for log in files_below(Path::new("/var/log/glusterfs"))
            .into_iter()
            .chain(files_below(Path::new("/var/log/ceph")))
        {
            assert!(!tells(&fs::read(&log).unwrap_or_default()), "{when}: in {}", log.display());
        }
    };
    check_logs("while it runs");
    // A lost server makes everybody write what is wrong.
    let servers: Vec<_> = site.processes("n2", if case.engine == "ceph" { "ceph-osd" } else { "glusterfsd" });
    site::signal(&servers[0], ondeck_testbed::Signal::KILL);
    site.status_tells("quiet", "n2", std::time::Instant::now());
    check_logs("after a server has died");
    site.destroy("quiet");
    site.assert_nothing_is_left();
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect()
}

fn servers_listen_on_their_storage_address_only(case: &Case) {
    let site = Site::new();
    site.build(case, "ports", "64MiB", 3);
    for node in NODES {
        let host = site.host(node);
        let listening = host.listening();
        for socket in &listening {
            assert_eq!(socket.ip(), IpAddr::from(host.address()), "{node}: {listening:?}");
        }
        let servers = listening.iter().filter(|socket| socket.port() != PORT).count();
        assert_eq!(servers > 0, case.servers.contains(&node), "{node}: {listening:?}");
    }
    site.destroy("ports");
    site.assert_nothing_is_left();
}

/// Tries to mount with a volfile by hand. What the client logged if it did not get in, `None` if it did.
fn mounts_by_hand(site: &Site, host: &Host, volfile: &str, number: usize) -> Option<String> {
    let dir = site.bed.dir();
    let (file, log) = (dir.join(format!("by-hand-{number}.vol")), dir.join(format!("by-hand-{number}.log")));
    let at = dir.join("mnt").join(format!("by-hand-{number}"));
    fs::write(&file, volfile).unwrap();
    host.ok(&["mkdir", &at.to_string_lossy()]);
    let mut command = host.command("glusterfs");
    command
        .args(["--no-daemon", "--log-level=ERROR", "--log-file=/dev/stderr", "--volfile"])
        .arg(&file)
        .arg(&at);
    let mut client = host.spawn_daemon(command, &log).unwrap();
    // Either the client sees the check file, or it says that it was refused.
    let text = at.display().to_string();
    let got_in = wait_until(DEADLINE, "the client gets in or is refused", || {
        let ran = host.run(&["timeout", "-s", "KILL", "3", "ls", "-A", &text]);
        let in_there = ran.success() && ran.stdout.contains("data");
        let refused = ["AUTH_FAILED", "authentication", "Authentication", "refused", "SETVOLUME"]
            .iter()
            .any(|word| client.log().contains(word));
        match (in_there, refused || !client.is_running()) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        }
    });
    if !got_in {
        // It stays out: neither reads nor writes.
        for script in ["ls -A .", "cat data/kept", "echo x > data/new", "echo x > new"] {
            let line = format!("cd {text} && {script}");
            let ran = host.run(&["timeout", "-s", "KILL", "3", "sh", "-c", &line]);
            let on_mount = client.is_running() && host.new_mounts().iter().any(|mount| mount.target == at);
            assert!(
                !on_mount || !ran.success() || ran.stdout.is_empty() && !line.contains("echo"),
                "{script}: {ran:#?}"
            );
        }
    }
    client.kill(ondeck_testbed::Signal::KILL);
    client.wait(DEADLINE);
    let _ = host.run(&["umount", "-l", &text]);
    host.run(&["rm", "-rf", "--one-file-system", &text]);
    (!got_in).then(|| last_lines(&client.log(), 5))
}

#[test]
fn a_gluster_client_without_the_secret_or_with_an_earlier_one_is_refused() {
    if !site::ready(&GLUSTER) {
        return;
    }
    // One port for each node, so that the second incarnation has the first one's.
    let site = Site::with(Setup { agent: "server_ports = \"24900-24900\"".into(), ..Setup::default() });
    let late = site.host("n4");
    let views = site.build(&GLUSTER, "fence", "64MiB", 1);
    fs::write(views[0].outside.join("kept"), "first").unwrap();
    let volfile = fs::read_to_string(site.runtime_dir("n3", "fence").join("client.vol")).unwrap();
    assert_eq!(mounts_by_hand(&site, late, &volfile, 0), None, "the control: with the secret it gets in");

    let secret_line = |line: &str| line.contains("option username") || line.contains("option password");
    let without: String =
        volfile.lines().filter(|line| !secret_line(line)).map(|line| format!("{line}\n")).collect();
    let changed = |word: &str| -> String {
        let change = |line: &str| match line.trim_start().strip_prefix(&format!("option {word} ")) {
            Some(value) => format!("  option {word} {}\n", value.chars().rev().collect::<String>()),
            None => format!("{line}\n"),
        };
        volfile.lines().map(change).collect()
    };
    for (number, (what, text)) in
        [("none", without), ("wrong password", changed("password")), ("wrong name", changed("username"))]
            .into_iter()
            .enumerate()
    {
        assert!(mounts_by_hand(&site, late, &text, number + 1).is_some(), "{what}: it got in");
    }

    site.destroy("fence");
    site.build(&GLUSTER, "fence", "64MiB", 1);
    fs::write(views[0].outside.join("kept"), "second").unwrap();
    let fresh = fs::read_to_string(site.runtime_dir("n3", "fence").join("client.vol")).unwrap();
    let ports = |text: &str| {
        text.lines().filter(|line| line.contains("remote-port")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(ports(&volfile), ports(&fresh), "the same ports, or this proves nothing");
    assert!(mounts_by_hand(&site, late, &volfile, 4).is_some(), "the late client got in");
    // Even if it has found out how the new volume is called.
    let name = |text: &str| {
        let line =
            text.lines().find_map(|line| line.trim().strip_prefix("option remote-subvolume ")).unwrap();
        line.to_owned()
    };
    let renamed = volfile.replace(&name(&volfile), &name(&fresh));
    assert!(mounts_by_hand(&site, late, &renamed, 5).is_some(), "the late client got in by the new name");
    assert_eq!(fs::read_to_string(views[0].outside.join("kept")).unwrap(), "second");
    assert_eq!(fs::read_dir(&views[0].outside).unwrap().count(), 1);
    site.destroy("fence");
    site.assert_nothing_is_left();
}

/// The status and the body of an answer to `ondeck-probe call`.
pub fn call(site: &Site, from: &Host, to: &str, method: &str, path: &str, more: &[&str]) -> (u16, String) {
    let agent = format!("{}:{PORT}", site.host(to).address());
    let (probe, munge) = (site.probe.display().to_string(), site.munge.display().to_string());
    let mut line = vec![
        probe.as_str(),
        "call",
        "--agent",
        agent.as_str(),
        "--to",
        to,
        "--munge",
        munge.as_str(),
        "--method",
        method,
        "--path",
        path,
    ];
    line.extend(more);
    let said = from.ok(&line);
    let (status, body) = said.split_once('\n').unwrap();
    (status.parse().unwrap(), body.to_owned())
}

fn step(site: &Site, layout: &Value, step: Value) -> String {
    let body = json!({ "step": step, "layout": layout, "deadline_ms": 2000, "lease_ms": 2000 });
    let name = format!("step-{}.json", step.to_string().replace(|c: char| !c.is_ascii_alphanumeric(), ""));
    let file = site.bed.dir().join(name);
    fs::write(&file, body.to_string()).unwrap();
    file.display().to_string()
}

#[test]
fn an_agent_obeys_administrators_with_fresh_credentials_and_nobody_else() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let built = site.build_with(&GLUSTER, "api", "64MiB", 1, &[]);
    let layout = &built["layout"];
    let id = format!("api@{}", layout["id"]["epoch"]);
    let (one, steps) = (format!("/v1/ramdisks/{id}"), format!("/v1/ramdisks/{id}/steps"));
    let commit = step(&site, layout, json!("commit"));
    let ctl = site.host("ctl");

    // The control.
    let (status, body) = call(&site, ctl, "n1", "POST", &steps, &["--body", &commit]);
    assert_eq!(status, 200, "{body}");
    let (status, body) = call(&site, ctl, "n1", "GET", "/v1/ramdisks", &["--credential", "former"]);
    assert_eq!(status, 200, "{body}");
    for kind in ["none", "garbage", "replayed", "foreign", "other-port", "altered", "elsewhere", "other"] {
        for (method, path) in [("POST", steps.as_str()), ("DELETE", one.as_str()), ("GET", "/v1/ramdisks")] {
            if (kind, method) == ("replayed", "DELETE") {
                continue; // The first of the two would be good.
            }
            let (status, body) =
                call(&site, ctl, "n1", method, path, &["--body", &commit, "--credential", kind]);
            assert_eq!(status, 401, "{kind} {method}: {body}");
        }
    }
    // A user anywhere, also the owner; and root on a compute node.
    let owner = |host: &str| site.host(host).as_user(OWNER, OWNER);
    for (who, host) in [
        ("owner on ctl", owner("ctl")),
        ("owner on n3", owner("n3")),
        ("root on n3", site.host("n3").clone()),
    ] {
        for (method, path) in [("POST", steps.as_str()), ("DELETE", one.as_str())] {
            let (status, body) = call(&site, &host, "n1", method, path, &["--body", &commit]);
            assert_eq!(status, 403, "{who} {method}: {body}");
        }
    }
    // Any user of the administrator's host could pass on what root of another host sends.
    let (status, body) =
        call(&site, ctl, "n1", "DELETE", &one, &["--body", &commit, "--credential", "relayed"]);
    assert_eq!(status, 403, "{body}");
    // A user sees what is theirs, and root on a compute node is nobody there.
    let seen = |host: &Host| call(&site, host, "n1", "GET", "/v1/ramdisks", &[]).1.contains("\"api\"");
    assert!(seen(&owner("n3")) && seen(ctl));
    assert!(!seen(&site.host("n3").as_user(STRANGER, STRANGER)) && !seen(site.host("n3")));
    // What can't be understood harms nobody.
    fs::write(site.bed.dir().join("odd"), "{\"step\": 7").unwrap();
    let odd = site.bed.dir().join("odd").display().to_string();
    for (method, path, wanted) in [
        ("POST", steps.as_str(), 400),
        ("POST", "/v1/ramdisks/api@x/steps", 400),
        ("POST", "/v1/ramdisks/..%2f..@1/steps", 400),
        ("GET", "/v1/ramdisks/..@1", 400),
        ("GET", "/v2/node", 404),
        ("PUT", one.as_str(), 404),
        ("GET", "/v1/views?path=%zz", 400),
    ] {
        let (status, body) = call(&site, ctl, "n1", method, path, &["--body", &odd]);
        assert_eq!(status, wanted, "{method} {path}: {body}");
    }
    site.status("api").assert_success();
    site.destroy("api");
    site.assert_nothing_is_left();
}

#[test]
fn a_user_may_ask_the_agent_of_this_machine_and_not_order() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let built = site.build_with(&GLUSTER, "api", "64MiB", 1, &[]);
    let one = format!("/v1/ramdisks/api@{}", built["layout"]["id"]["epoch"]);
    let owner = site.host("n1").as_user(OWNER, OWNER);
    let on_socket = |host: &Host, method: &str, path: &str| {
        let probe = site.probe.display().to_string();
        let munge = site.munge.display().to_string();
        let said = host.ok(&[
            probe.as_str(),
            "call",
            "--agent",
            "/run/ondeck/agent.sock",
            "--to",
            "n1",
            "--munge",
            &munge,
            "--method",
            method,
            "--path",
            path,
            "--credential",
            "none",
        ]);
        said.split_once('\n').unwrap().0.parse::<u16>().unwrap()
    };
    assert_eq!(on_socket(&owner, "GET", &one), 200);
    assert_eq!(on_socket(&owner, "DELETE", &one), 403);
    assert_eq!(on_socket(&site.host("n1").as_user(STRANGER, STRANGER), "GET", &one), 404);
    let ran = site.ramdisk_on(&owner, &["destroy", "api"]);
    assert!(!ran.success() && ran.stderr.contains("may not"), "{ran:#?}");
    site.ramdisk_on(&owner, &["status", "api", "--nodes", "n1"]).assert_success();
    site.destroy("api");
    site.assert_nothing_is_left();
}

#[test]
fn a_late_step_of_an_earlier_incarnation_is_fenced() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let ctl = site.host("ctl");
    let layout = site.build_with(&GLUSTER, "late", "64MiB", 1, &[])["layout"].clone();
    let old = format!("/v1/ramdisks/late@{}", layout["id"]["epoch"]);
    site.destroy("late");
    let all_fenced = |when: &str, next_lives: bool, why: &str| {
        for (name, text) in [
            ("allocate", json!("allocate")),
            ("prepare", json!("prepare")),
            ("start", json!({"start": 0})),
            ("mount", json!("mount")),
            ("commit", json!("commit")),
            ("show", json!({"show": {"path": "/mnt", "read_only": false}})),
        ] {
            let body = step(&site, &layout, text);
            let (status, said) = call(&site, ctl, "n1", "POST", &format!("{old}/steps"), &["--body", &body]);
            let refusal: Value = serde_json::from_str(&said).unwrap();
            let fenced = (status, &refusal["code"]) == (409, &json!("fenced"));
            // What begins nothing is refused as well if there is nothing.
            let nothing = status == 404 && !next_lives && !matches!(name, "allocate" | "mount");
            assert!(fenced || nothing, "{when}: {name}: {status} {said}");
            assert!(nothing || said.contains(why), "{when}: {name}: {said}");
        }
    };
    all_fenced("after its end", false, "it was destroyed here");
    site.assert_nothing_is_left();
    site.build(&GLUSTER, "late", "64MiB", 1);
    let later = "has begun, or was destroyed, since";
    all_fenced("while the next one lives", true, later);
    let (status, said) = call(&site, ctl, "n1", "DELETE", &old, &[]);
    assert!(status == 409 && said.contains("fenced"), "DELETE: {said}");
    // Also by an agent that has started again.
    site.kill_agent("n1");
    site.start_agent("n1");
    all_fenced("after a restart of the agent", true, later);
    site.status("late").assert_success();
    site.destroy("late");
    site.kill_agent("n1");
    site.start_agent("n1");
    all_fenced("after its end and a restart of the agent", false, later);
    site.assert_nothing_is_left();
}

/// Starts ceph-fuse by hand on a host with a configuration and a key; whether it got in.
fn ceph_mounts_by_hand(site: &Site, host: &Host, conf: &str, key: &str, number: usize) -> bool {
    let dir = site.bed.dir();
    let (file, ring) =
        (dir.join(format!("by-hand-{number}.conf")), dir.join(format!("by-hand-{number}.key")));
    let at = dir.join("mnt").join(format!("by-hand-{number}"));
    // Its own key, and no directory of the agent's.
    let own = conf.lines().map(|line| match line.split(" = ").next() {
        Some("keyring") => format!("keyring = {}\n", ring.display()),
        Some(name @ ("run_dir" | "crash_dir")) => format!("{name} = {}\n", dir.display()),
        _ => format!("{line}\n"),
    });
    fs::write(&file, own.collect::<String>()).unwrap();
    fs::write(&ring, key).unwrap();
    host.ok(&["mkdir", &at.to_string_lossy()]);
    let mut command = host.command("ceph-fuse");
    command
        .args(["-f", "-n", "client.job", "--client_fs", "ondeck", "-r", "/ramdisk", "-c"])
        .arg(&file)
        .arg(&at);
    let mut client = host.spawn_daemon(command, &dir.join(format!("by-hand-{number}.log"))).unwrap();
    let mounted = || host.new_mounts().iter().any(|mount| mount.target == at);
    let got_in =
        wait_until(DEADLINE, "the client gets in or is refused", || match (mounted(), client.is_running()) {
            (true, _) => Some(true),
            (false, false) => Some(false),
            (false, true) => None,
        });
    client.kill(ondeck_testbed::Signal::KILL);
    client.wait(DEADLINE);
    let text = at.display().to_string();
    let _ = host.run(&["umount", "-l", &text]);
    host.run(&["rm", "-rf", "--one-file-system", &text]);
    got_in
}

#[test]
fn a_ceph_client_without_the_key_or_with_an_earlier_one_is_refused() {
    if !site::ready(&CEPH) {
        return;
    }
    // So few ports that the second incarnation has the first one's.
    let site = Site::with(Setup { agent: "server_ports = \"24900-24905\"".into(), ..Setup::default() });
    let late = site.host("n4");
    let read = || {
        let place = site.runtime_dir("n3", "key");
        let conf = fs::read_to_string(place.join("ceph.conf")).unwrap();
        (conf, fs::read_to_string(place.join("keys/client.job")).unwrap())
    };
    site.build(&CEPH, "key", "256MiB", 1);
    let (conf, key) = read();
    let said = || last_lines(&fs::read_to_string(site.bed.dir().join("by-hand-0.log")).unwrap(), 5);
    assert!(ceph_mounts_by_hand(&site, late, &conf, &key, 0), "the control does not get in: {}", said());
    let wrong = "[client.job]\n\tkey = AQAAAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAAAA==\n";
    for (number, key) in ["", wrong].iter().enumerate() {
        assert!(!ceph_mounts_by_hand(&site, late, &conf, key, number + 1), "`{key}` got in");
    }
    site.destroy("key");
    site.build(&CEPH, "key", "256MiB", 1);
    let (fresh, _) = read();
    let monitor = |conf: &str| conf.lines().find(|line| line.starts_with("mon_host")).map(str::to_owned);
    assert_eq!(monitor(&conf), monitor(&fresh), "the same port, or this proves nothing");
    assert!(!ceph_mounts_by_hand(&site, late, &conf, &key, 3), "the late client got in");
    assert!(!ceph_mounts_by_hand(&site, late, &fresh, &key, 4), "the late client got in with the new fsid");
    site.destroy("key");
    site.assert_nothing_is_left();
}

#[test]
fn ceph_keeps_data_on_a_directory_and_metadata_in_ram() {
    if !site::ready(&CEPH) {
        return;
    }
    let parts = "[agent.device.ssd]\nkind = \"dir\"\npath = \"BED/ssd\"\ncapacity = \"2GiB\"\n";
    let site = Site::with(Setup { parts: parts.into(), ..Setup::default() });
    for more in [&["--device", "ssd"][..], &["--device", "ssd", "--metadata-device", "ram"]] {
        site.build_with(&CEPH, "tiers", "256MiB", 2, more);
        let views = site.views(&CEPH, "tiers", 2);
        fs::write(views[0].outside.join("file"), vec![7; 20 << 20]).unwrap();
        assert!(fs::read(views[1].outside.join("file")).unwrap() == vec![7; 20 << 20]);
        site.status("tiers").assert_success();
        site.destroy("tiers");
        site.assert_nothing_is_left();
    }
}
