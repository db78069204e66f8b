//! `ondeck stage` and `ondeck doctor` as their users call them.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use scene::{Ran, Scene, UID, Who, is_root, wait_until};

#[test]
fn a_copy_says_what_it_did_and_keeps_its_manifest_in_the_home_directory() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    scene.dir("out");
    scene.file("a/x", "content");
    let ran = scene.run(&["stage", "a/", "b"]);
    ran.assert_code(0);
    assert!(ran.out.starts_with("1 file (7 B) copied in ") && ran.out.contains("synced in"), "{ran:?}");
    assert_eq!(scene.list(".local/state/ondeck/manifests").len(), 1);
    // The same command again, from elsewhere and by another name of the same target: nothing to do.
    let mut again = scene.ondeck(&["stage", "--json", "../a", "../b/"]);
    again.current_dir(scene.path("a"));
    let ran = Ran::of(again.output().unwrap());
    let json: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(
        (&json["files"], &json["unchanged"], &json["synced"]),
        (&0.into(), &1.into(), &true.into()),
        "{ran:?}"
    );
    assert_eq!(scene.run(&["stage", "-q", "a", "c"]).out, "");
    // What was written is told, not what a hole could hold.
    fs::OpenOptions::new().write(true).open(scene.path("a/x")).unwrap().set_len(10 << 30).unwrap();
    let ran = scene.run(&["stage", "a", "holes"]);
    assert!(ran.out.starts_with("1 file (") && ran.out.contains(" KiB) copied in "), "{ran:?}");
    let ran = scene.run_shell(&["--data-out", "out"], "truncate -s 10G out/holes; echo x >> out/small");
    ran.assert_code(0).assert_says("staged out 2 B (2 files)");
    assert_eq!(fs::metadata(scene.path("out/holes")).unwrap().len(), 10 << 30);
    let ran = scene.run(&["stage", "--dry-run", "a", "d"]);
    assert!(ran.out.contains("would copy x") && !scene.path("d").exists(), "{ran:?}");
}

#[test]
fn exit_codes_tell_a_wrong_call_from_a_failed_entry_and_a_failed_copy() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    scene.file("a/x", "x");
    scene.run(&["stage", "a"]).assert_code(2).assert_says("<DST>");
    scene
        .run(&["stage", "--bandwidth", "fast", "a", "b"])
        .assert_code(2)
        .assert_says("write it like 500MB/s");
    scene
        .run(&["stage", "missing", "b"])
        .assert_code(3)
        .assert_says("can't read the source missing: No such file");
    scene.run(&["stage", "a", "no/parent"]).assert_code(3).assert_says("make its parent directory first");
    scene.run(&["stage", "a", "a/inside"]).assert_code(3).assert_says("copied into itself");
    scene.run(&["stage", "--manifest", "a/x", "a", "b"]).assert_code(3).assert_says("not an Ondeck manifest");
    scene
        .run(&["stage", "--as-user", "no-such-user", "a", "b"])
        .assert_code(3)
        .assert_says("there is no user");
    if is_root() {
        fs::set_permissions(scene.path("a/x"), fs::Permissions::from_mode(0o0)).unwrap();
        scene.file("a/y", "y");
        let ran = scene.run(&["stage", "a", "b"]);
        ran.assert_code(1).assert_says("x: opening it: Permission denied").assert_says("1 entry failed");
        assert_eq!(scene.list("b"), ["y"]);
    }
}

#[test]
fn as_user_copies_with_the_users_rights_only() {
    if !is_root() {
        return ondeck_skip::skipped("becoming another user needs root");
    }
    let scene = Scene::new(Who::Me);
    let dir = scene.dir("a");
    scene.file("a/open", "x");
    scene.file("a/secret", "x");
    fs::set_permissions(dir.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let target = scene.dir("theirs");
    std::os::unix::fs::chown(&target, Some(UID), Some(UID)).unwrap();
    // A user that exists on every Debian, with a number of the machine's own.
    let of_nobody = Command::new("id").args(["-u", "nobody"]).output().unwrap();
    let of_nobody: u32 = String::from_utf8(of_nobody.stdout).unwrap().trim().parse().unwrap();
    let nobody = scene.run(&["stage", "--as-user", "nobody", "--no-manifest", "a", "theirs/copy"]);
    nobody.assert_code(3).assert_says("Permission denied");
    std::os::unix::fs::chown(&target, Some(of_nobody), Some(of_nobody)).unwrap();
    let nobody = scene.run(&["stage", "--as-user", "nobody", "--no-manifest", "a", "theirs/copy"]);
    nobody.assert_code(1).assert_says("secret: opening it: Permission denied");
    assert_eq!(fs::metadata(target.join("copy/open")).unwrap().uid(), of_nobody);
}

#[test]
fn an_interrupted_copy_says_how_to_go_on() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    scene.file("a/x", vec![1; 4_000_000]);
    let child = scene.start(&["stage", "--bandwidth", "1MiB/s", "a", "b"]);
    wait_until("the copy", || scene.path(".b.ondeck-partial").exists());
    // SAFETY: a signal to our own child.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    Ran::of(child.wait_with_output().unwrap()).assert_code(3).assert_says("run the same command again");
    scene.run(&["stage", "a", "b"]).assert_code(0);
    assert_eq!(scene.list("b"), ["x"]);
}

#[test]
fn a_tree_becomes_one_archive_and_a_file_can_be_taken_out_of_it() {
    for format in ["tar", "tar.zst"] {
        let scene = Scene::new(Who::User);
        scene.dir("a");
        scene.dir("a/sub");
        for number in 0..300 {
            scene.file(&format!("a/sub/f{number}"), format!("content {number}"));
        }
        let archive = format!("a.{format}");
        scene.run(&["stage", "--pack", format, "a", &archive]).assert_code(0);
        let list = scene.run(&["stage", "--list", &archive]);
        assert!(list.out.lines().count() == 302 && list.out.contains(" sub/f299\n"), "{list:?}");
        let ran = scene.run(&["stage", "--unpack", &archive, "b"]);
        ran.assert_code(0);
        assert!(ran.out.contains("300 files") && ran.out.contains("300 checksums verified"), "{ran:?}");
        assert_eq!(scene.read("b/sub/f7"), "content 7");
        // What was read and written is told, not what a hole could hold.
        scene.dir("holes");
        scene.file("holes/x", "content");
        scene.file("holes/y", "content");
        for (name, size) in [("x", 10 << 30), ("y", 1 << 20)] {
            let file = fs::OpenOptions::new().write(true).open(scene.path(&format!("holes/{name}"))).unwrap();
            file.set_len(size).unwrap();
        }
        let sparse = format!("holes.{format}");
        let ran = scene.run(&["stage", "--pack", format, "holes", &sparse]);
        assert!(ran.out.starts_with("2 files (") && ran.out.contains(" KiB) packed into "), "{ran:?}");
        let ran = scene.run(&["stage", "--unpack", &sparse, "unpacked"]);
        assert!(ran.out.starts_with("2 files (") && ran.out.contains(" KiB) unpacked in "), "{ran:?}");
        assert_eq!(fs::metadata(scene.path("unpacked/x")).unwrap().len(), 10 << 30);
        let json = |args: &[&str]| -> serde_json::Value {
            serde_json::from_str(&scene.run(&[&["stage", "--json"], args].concat()).out).unwrap()
        };
        let packed = json(&["--pack", format, "a", "plain"]);
        assert_eq!(packed["bytes_read"], packed["bytes"], "{packed}");
        let unpacked = json(&["--unpack", "plain", "again"]);
        assert_eq!(unpacked["bytes_written"], packed["bytes"], "{unpacked}");
        scene.run(&["stage", "--unpack", "--only", "sub/f8", &archive, "c"]).assert_code(0);
        assert_eq!(scene.list("c/sub"), ["f8"]);
        scene
            .run(&["stage", "--unpack", "--only", "nothing", &archive, "d"])
            .assert_code(1)
            .assert_says("no such path");
        scene
            .run(&["stage", "--unpack", "a/sub/f1", "e"])
            .assert_code(3)
            .assert_says("neither a tar archive");
        scene
            .run(&["stage", "--pack", "zip", "a", "x"])
            .assert_code(2)
            .assert_says("write one of tar, tar.zst");
    }
}

#[test]
fn archives_and_directories_follow_the_callers_umask() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    scene.dir("a/sub");
    scene.file("a/sub/x", "x");
    fs::set_permissions(scene.path("a/sub/x"), fs::Permissions::from_mode(0o6755)).unwrap();
    for (umask, archive, directory) in [(0o022, "644", "755"), (0o027, "640", "750"), (0o077, "600", "700")] {
        let name = |what: &str| format!("{what}-{umask:o}");
        scene.run_with_umask(umask, &["stage", "--pack", "tar", "a", &name("tar")]).assert_code(0);
        assert_eq!(scene.mode(&name("tar")), archive, "{umask:o}");
        let only = ["stage", "--unpack", "--only", "sub/x", &name("tar"), &name("one")];
        scene.run_with_umask(umask, &only).assert_code(0);
        assert_eq!(scene.mode(&name("one")), directory, "{umask:o}");
        assert_eq!(scene.mode(&format!("{}/sub", name("one"))), directory, "{umask:o}");
        // What the archive lists as well: it may be a stranger's.
        scene.run_with_umask(umask, &["stage", "--unpack", &name("tar"), &name("all")]).assert_code(0);
        assert_eq!(scene.mode(&name("all")), directory);
        assert_eq!(scene.mode(&format!("{}/sub/x", name("all"))), format!("{:o}", 0o755 & !umask));
        // And as it was packed, if it is trusted.
        let trusted = ["stage", "--unpack", "-p", &name("tar"), &name("same")];
        scene.run_with_umask(umask, &trusted).assert_code(0);
        assert_eq!(scene.mode(&name("same")), scene.mode("a"));
        assert_eq!(scene.mode(&format!("{}/sub/x", name("same"))), scene.mode("a/sub/x"));
        // A directory that was there stays as it is, trusted or not.
        let there = name("there");
        scene.dir(&there);
        fs::set_permissions(scene.path(&there), fs::Permissions::from_mode(0o700)).unwrap();
        for how in ["-p", "--no-sync"] {
            scene.run_with_umask(umask, &["stage", "--unpack", how, &name("tar"), &there]).assert_code(0);
            assert_eq!(scene.mode(&there), "700", "{how}");
        }
    }
    fs::set_permissions(scene.path("a"), fs::Permissions::from_mode(0o700)).unwrap();
    scene.run_with_umask(0, &["stage", "--pack", "tar.zst", "a", "closed"]).assert_code(0);
    assert_eq!(scene.mode("closed"), "600");
    // Copies keep the source's modes, whatever the umask is.
    fs::set_permissions(scene.path("a/sub"), fs::Permissions::from_mode(0o777)).unwrap();
    scene.run_with_umask(0o077, &["stage", "a", "copy"]).assert_code(0);
    assert_eq!((scene.mode("copy"), scene.mode("copy/sub")), ("700".to_owned(), "777".to_owned()));
}

#[test]
fn verify_names_every_attribute_that_differs() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    scene.file("a/x", "x");
    scene.file("a/y", "y");
    scene.run(&["stage", "--verify", "a", "b"]).assert_code(0);
    fs::set_permissions(scene.path("b/x"), fs::Permissions::from_mode(0o666)).unwrap();
    scene
        .run(&["stage", "--verify", "a", "b"])
        .assert_code(1)
        .assert_says("x: comparing it with its source: its mode is 0666, the source's 0644")
        .assert_says("1 entry failed");
    let ran = scene.run(&["stage", "--verify", "--json", "a", "b"]);
    let json: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&json["files"], &json["verify_failures"]), (&1.into(), &0.into()), "{ran:?}");
    assert_eq!((&json["compared_entries"], &json["changed_meanwhile"]), (&3.into(), &0.into()), "{ran:?}");
}

#[test]
fn files_that_are_removed_meanwhile_have_an_exit_code_of_their_own() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    for number in 0..100 {
        scene.file(&format!("a/f{number}"), vec![1; 20_000]);
    }
    let arguments = ["stage", "--threads", "1", "--bandwidth", "2MiB/s", "a", "b"];
    let copy = scene.start(&arguments);
    // In whatever order the filesystem lists them.
    let has_come = |number: &i32| scene.path(&format!(".b.ondeck-partial/f{number}")).exists();
    wait_until("the first file", || (0..100).any(|number| has_come(&number)));
    let to_come: Vec<i32> = (0..100).filter(|number| !has_come(number)).collect();
    for number in &to_come {
        fs::remove_file(scene.path(&format!("a/f{number}"))).unwrap();
    }
    let ran = Ran::of(copy.wait_with_output().unwrap());
    ran.assert_code(24).assert_says("opening it: No such file").assert_says("removed from a");
    // One may have been open by then, and all others are where they were.
    let there = scene.list("b").len();
    assert!((100 - to_come.len()..100).contains(&there), "{there} of {to_come:?}");
    scene.run(&["stage", "a", "b"]).assert_code(0);
}

#[test]
fn files_that_are_removed_while_they_are_packed_have_that_code_too() {
    const FILES: usize = 300;
    let scene = Scene::new(Who::User);
    scene.dir("a");
    // So much that can't be compressed that it takes longer than to see that it has begun.
    let mut state = 1_u64;
    for number in 0..FILES {
        let mut noise = Vec::with_capacity(1 << 20);
        while noise.len() < 1 << 20 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            noise.extend_from_slice(&state.to_ne_bytes());
        }
        scene.file(&format!("a/f{number}"), noise);
    }
    let pack = scene.start(&["stage", "--threads", "1", "--pack", "tar.zst", "a", "a.tar.zst"]);
    let pid = rustix::process::Pid::from_child(&pack);
    let signal = |signal| rustix::process::kill_process(pid, signal).unwrap();
    // What is in the archive has been listed: without its entries, the directory would only be empty.
    let has_begun = |name: &String| {
        name.starts_with(".a.tar.zst")
            && fs::metadata(scene.path(name)).is_ok_and(|partial| partial.len() > 1 << 20)
    };
    wait_until("it has begun", || scene.list(".").iter().any(has_begun));
    signal(rustix::process::Signal::STOP);
    for number in 0..FILES {
        fs::remove_file(scene.path(&format!("a/f{number}"))).unwrap();
    }
    signal(rustix::process::Signal::CONT);
    let ran = Ran::of(pack.wait_with_output().unwrap());
    ran.assert_code(24).assert_says("No such file").assert_says("removed from a while it was packed");
}

#[test]
fn patterns_that_match_nothing_are_refused_before_anything_is_copied() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    for name in ["a/x.dat", "a/y.txt"] {
        scene.file(name, "content");
    }
    for pattern in ["[", "./b", "", "a//b", "{x"] {
        let ran = scene.run(&["stage", "--exclude", "*.tmp", "--exclude", pattern, "a", "b"]);
        ran.assert_code(2).assert_says(&format!("the pattern `{pattern}` can't match anything"));
        assert!(!scene.path("b").exists());
    }
    scene.run(&["stage", "--exclude", "!*.dat", "a", "b"]).assert_code(0);
    assert_eq!(scene.list("b"), ["x.dat"]);
}

#[test]
fn an_archive_that_is_refused_leaves_no_directory() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    scene.file("a/x", "content");
    scene.file("broken.tar", [b'?'; 3000]);
    scene.run(&["stage", "--pack", "tar", "a", "a.tar"]).assert_code(0);
    for arguments in [&["broken.tar", "b"][..], &["--only", "nosuch", "a.tar", "b"]] {
        let ran = scene.run(&[&["stage", "--unpack"], arguments].concat());
        assert!(ran.code != Some(0) && !scene.path("b").exists(), "{ran:?}");
    }
    // What was not done is not counted.
    scene.dir("shut");
    std::os::unix::net::UnixListener::bind(scene.path("shut/socket")).unwrap();
    let ran = scene.run(&["stage", "--pack", "tar", "shut", "shut.tar"]);
    ran.assert_code(1).assert_says("socket");
    assert_eq!(ran.out, "");
    // One that was there before stays.
    scene.dir("b");
    assert_ne!(scene.run(&["stage", "--unpack", "broken.tar", "b"]).code, Some(0));
    assert!(scene.path("b").exists());
}

#[test]
fn help_is_readable_as_it_is() {
    let scene = Scene::new(Who::User);
    for command in [&["run"][..], &["stage"], &["ramdisk", "create"], &["ramdisk", "nodes"]] {
        let help = scene.run(&[command, &["--help"]].concat()).out;
        let codes = help.split("Exit codes").nth(1).unwrap_or_default();
        assert!(codes.lines().all(|line| line.len() < 80), "{codes}");
        assert!(!help.contains("\\\""), "{help}");
    }
    assert!(!scene.run(&["ramdisk", "nodes", "--help"]).out.contains("List RAM disks"));
}

#[test]
fn doctor_finds_this_machine_fit() {
    for who in scene::everyone() {
        let scene = Scene::new(who);
        let ran = scene.run(&["doctor"]);
        ran.assert_code(0);
        assert!(ran.out.contains("ok       RAM disk"), "{ran:?}");
        let json: serde_json::Value = serde_json::from_str(&scene.run(&["doctor", "--json"]).out).unwrap();
        assert!(json.as_array().unwrap().iter().any(|finding| finding["what"] == "overlay"));
        // Root alone can mount a cache.
        let cache = json.as_array().unwrap().iter().find(|finding| finding["what"] == "cache");
        let is_root = who == Who::Me && scene::is_root();
        assert_eq!(cache.is_some(), is_root);
        if is_root && std::path::Path::new("/dev/fuse").exists() {
            assert!(cache.unwrap()["detail"].as_str().unwrap().starts_with("by FUSE"), "{cache:?}");
        }
    }
}

#[test]
fn names_in_an_archive_neither_move_the_cursor_nor_forge_lines() {
    let scene = Scene::new(Who::User);
    let hostile = "x\u{1b}]0;PWN\u{7}\u{1b}[31m\nf 0644 fake\u{202e}";
    scene.dir("a");
    let file = scene.file(&format!("a/{hostile}"), "x");
    let tar = |options: &[&str], what: &str| {
        let mut command = std::process::Command::new("tar");
        assert!(command.args(options).arg(what).current_dir(scene.path("a")).status().unwrap().success());
    };
    let archive = scene.path("a.tar");
    tar(&["-cf", archive.to_str().unwrap()], hostile);
    let is_plain =
        |text: &str| text.lines().all(|line| line.chars().all(|c| !c.is_control() && c != '\u{202e}'));
    let list = scene.run(&["stage", "--list", "a.tar"]);
    list.assert_code(0);
    assert!(list.out.lines().count() == 1 && is_plain(&list.out), "{list:?}");
    let json: serde_json::Value =
        serde_json::from_str(&scene.run(&["stage", "--list", "--json", "a.tar"]).out).unwrap();
    assert_eq!(json["path"], hostile, "a program is told the name itself");
    // What is refused is told, on one line.
    tar(&["-Pcf", archive.to_str().unwrap()], file.to_str().unwrap());
    let ran = scene.run(&["stage", "--unpack", "a.tar", "b"]);
    ran.assert_code(1).assert_says("its path is absolute");
    assert!(ran.err.lines().count() == 2 && is_plain(&ran.err), "{ran:?}");
    // Of a copy as well.
    let ran = scene.run(&["stage", "--dry-run", "a", "c"]);
    assert!(ran.out.contains("fake") && is_plain(&ran.out), "{ran:?}");
}

#[test]
fn a_list_ends_at_a_signal() {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    for number in 0..1000 {
        scene.file(&format!("a/{}{number}", "x".repeat(200)), "");
    }
    scene.run(&["stage", "--pack", "tar", "a", "a.tar"]).assert_code(0);
    // Nobody reads what it prints, so it never comes to its end.
    let mut child = scene.start(&["stage", "--list", "a.tar"]);
    let list = child.stdout.take().unwrap();
    wait_until("the list", || rustix::io::ioctl_fionread(&list).unwrap() > 0);
    // SAFETY: a signal to our own child.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let mut ended = None;
    wait_until("its end", || {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended.unwrap()), Some(libc::SIGTERM));
}
