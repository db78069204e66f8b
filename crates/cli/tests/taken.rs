//! The directory in which runs keep their state, where somebody else has taken its name.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use scene::{Ran, Scene, UID, Who, is_root, wait_until};

const OTHER: u32 = UID + 7;

const USUAL: &str = "/dev/shm/ondeck-20001";

/// Gives this thread, and the processes that it starts, a /dev/shm of their own.
fn own_shm() {
    // SAFETY: system calls with strings that live until they return. The kernel lets a thread of several leave their mount
    // namespace, and the working directory that it leaves with it is named by nobody here.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0, "{}", io::Error::last_os_error());
        let (none, root, shm) = (std::ptr::null(), c"/".as_ptr(), c"/dev/shm".as_ptr());
        assert_eq!(libc::mount(none, root, none, libc::MS_REC | libc::MS_PRIVATE, none.cast()), 0);
        let (kind, options) = (c"tmpfs".as_ptr(), c"mode=1777".as_ptr());
        assert_eq!(libc::mount(kind, shm, kind, 0, options.cast()), 0, "{}", io::Error::last_os_error());
    }
}

fn as_other(script: &str) {
    let mut command = Command::new("sh");
    command.args(["-c", script]).uid(OTHER).gid(OTHER);
    assert!(command.status().unwrap().success(), "{script}");
}

#[test]
fn whoever_takes_the_name_of_the_state_directory_keeps_nobody_from_running() {
    if !is_root() {
        ondeck_skip::skipped("it needs root");
        return;
    }
    own_shm();
    let elsewhere = "/dev/shm/elsewhere";
    as_other(&format!("umask 0; mkdir {elsewhere}"));
    for taken in [
        format!("umask 0; mkdir {USUAL}"),
        format!("ln -s {elsewhere} {USUAL}"),
        format!("umask 0; : > {USUAL}"),
        // Of the second kind of name as well.
        format!("umask 0; mkdir {USUAL} {USUAL}-0000000000000000; ln -s {elsewhere} {USUAL}-1"),
    ] {
        as_other(&taken);
        let scene = Scene::new(Who::User);
        scene.dir("out");
        let ondeck = |arguments: &[&str]| {
            let mut command = scene.ondeck(arguments);
            command.env_remove("ONDECK_STATE_DIR");
            command
        };
        let script = "echo done > out/result; touch started; while ! test -e go; do sleep 0.02; done";
        let run = ondeck(&["run", "--data-out", "out", "--", "sh", "-c", script]);
        let run = { run }.stderr(std::process::Stdio::piped()).spawn().unwrap();
        wait_until("the program", || scene.path("started").exists());
        let listed = Ran::of(ondeck(&["run", "--list"]).output().unwrap());
        assert_eq!(listed.out.lines().count(), 1, "{listed:#?}");
        assert!(!listed.out.contains("no runs"), "{listed:#?}");
        // Another run of the same user finds the same directory.
        for arguments in [&["run", "--data-out", "out", "--", "true"][..], &["run", "--list"]] {
            // A variable without a value names nothing.
            let second = ondeck(arguments).env("ONDECK_STATE_DIR", "").output().unwrap();
            Ran::of(second).assert_code(0);
        }
        let own = || -> Vec<_> {
            let all = fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap());
            all.filter(|entry| entry.metadata().unwrap().uid() == UID).collect()
        };
        assert_eq!(own().len(), 1, "{:?}", own());
        assert_eq!(own()[0].metadata().unwrap().permissions().mode() & 0o7777, 0o700);
        scene.file("go", "");
        Ran::of(run.wait_with_output().unwrap()).assert_code(0);
        assert_eq!(scene.read("out/result"), "done\n");
        for directory in [elsewhere, USUAL] {
            assert!(fs::read_dir(directory).map_or(0, Iterator::count) == 0, "in {directory}: {taken}");
        }
        // The next one goes on there, and `doctor` says where.
        let said = Ran::of(ondeck(&["doctor"]).output().unwrap());
        let line = said.out.lines().find(|line| line.contains("state of runs")).unwrap().to_owned();
        assert!(line.contains(&format!("{USUAL}-")), "{line}");
        assert!(own().is_empty(), "{:?}", own());
        as_other(&format!("rm -rf {USUAL} {USUAL}-*"));
    }
}
