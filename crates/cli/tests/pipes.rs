//! Commands whose reader has gone.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use scene::{Scene, Who};

/// Runs a command that prints into a pipe of which nobody has the other end.
fn unread(mut command: Command) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stdout(writer).output().unwrap()
}

fn scene() -> Scene {
    let scene = Scene::new(Who::User);
    scene.dir("a");
    scene.file("a/x", "content");
    scene
}

#[test]
fn a_command_that_shows_something_ends_with_its_reader_and_without_a_word() {
    let scene = scene();
    let config = scene.file("ondeck.toml", "nodes = [\"127.0.0.1\"]\n");
    let config = config.to_str().unwrap();
    for arguments in [
        &["doctor"][..],
        &["run", "--list"],
        &["serve", "--openapi"],
        &["serve", "--check", "--config", config],
        &["stage", "--dry-run", "a", "b"],
        &["stage", "--json", "a", "c"],
    ] {
        let output = unread(scene.ondeck(arguments));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("panicked"), "{arguments:?}: {said}");
        assert_eq!(output.status.signal(), Some(libc::SIGPIPE), "{arguments:?}: {output:?}");
    }
}

#[test]
fn a_full_standard_output_is_told_and_no_panic() {
    let scene = scene();
    for (arguments, code) in [
        (&["run", "--list"][..], 125),
        (&["stage", "--dry-run", "a", "b"], 3),
        (&["stage", "--json", "--dry-run", "a", "b"], 3),
        (&["serve", "--openapi"], 1),
        (&["doctor", "--json"], 1),
        // All is copied, and nobody hears of it.
        (&["stage", "a", "c"], 0),
        (&["stage", "--json", "a", "d"], 0),
        (&["stage", "--pack", "tar", "a", "a.tar"], 0),
        (&["stage", "--list", "a.tar"], 3),
        (&["stage", "--unpack", "a.tar", "e"], 0),
    ] {
        fs::set_permissions(scene.dir("state"), fs::Permissions::from_mode(0o700)).unwrap();
        scene.dir("state/run");
        let mut command = scene.ondeck(arguments);
        let output = command.stdout(File::options().write(true).open("/dev/full").unwrap()).output().unwrap();
        fs::remove_dir_all(scene.path("state")).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(
            said.contains("No space left on device") && !said.contains("panicked"),
            "{arguments:?}: {said}"
        );
    }
    for copy in ["c", "d", "e"] {
        assert_eq!(scene.list(copy), ["x"]);
    }
}

#[test]
fn a_run_goes_on_without_a_reader_and_its_results_come_home() {
    let scene = scene();
    scene.dir("out");
    let script = "cp a/x out/first; echo nobody reads this; cp a/x out/second";
    let output = unread(scene.ondeck(&["run", "--data-out", "out", "--", "sh", "-c", script]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("panicked"), "{said}");
    // The signal ended the program, as it would have without Ondeck.
    assert_eq!(output.status.code(), Some(128 + libc::SIGPIPE), "{said}");
    assert_eq!(scene.list("out"), ["first"]);
    scene.assert_clean();
}

#[test]
fn what_nobody_hears_changes_nothing_of_a_run_or_a_hook() {
    let scene = scene();
    scene.dir("out");
    let unheard = |arguments: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        scene.ondeck(arguments).stderr(writer).output().unwrap().status.code()
    };
    let options = ["run", "--data-out", "out", "--size", "100TiB", "--fallback", "disk", "--"];
    let ran = unheard(&[&options[..], &["cp", "a/x", "out/result"]].concat());
    assert_eq!((ran, scene.list("out")), (Some(0), vec!["result".to_owned()]));
    // It has no job, and says so.
    for hook in ["prolog", "epilog"] {
        assert_eq!(unheard(&[hook, "--config", "missing.toml"]), Some(0), "{hook}");
    }
}
