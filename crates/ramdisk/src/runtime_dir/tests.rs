//! Processes that are found again by their marks, and nobody else's.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::ending::kill;
use super::{Marked, RuntimeDir, TASK, end_stray_tasks, marked};
use crate::EngineError;
use crate::mark::Marks;

fn runtime_dir(dir: &Path) -> RuntimeDir {
    RuntimeDir::open(dir, "test@1".parse().unwrap()).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[test]
fn a_process_and_what_it_started_are_found_by_their_mark_and_killed() {
    let dir = tempfile::tempdir().unwrap();
    let first = runtime_dir(dir.path());
    let mut command = Command::new("sh");
    command.args(["-c", "(sleep 300 &) ; exec sleep 300"]);
    let pid = first.start("brick", command).unwrap();
    // The shell that starts the second one in between is gone when both are what they shall be.
    let sleeps = |process: &Marked| {
        fs::read(format!("/proc/{}/cmdline", process.pid)).is_ok_and(|line| line.starts_with(b"sleep\0"))
    };
    first
        .wait(soon(), "two processes", || {
            let all = marked(dir.path()).unwrap();
            Ok((all.len() == 2 && all.iter().all(sleeps)).then_some(()))
        })
        .unwrap();
    assert_eq!(first.must_run("brick").unwrap(), pid);

    // An agent that starts again knows only the directory.
    let second = runtime_dir(dir.path());
    second.adopt().unwrap();
    assert_eq!(second.processes().len(), 2);
    assert_eq!(end_stray_tasks(dir.path(), &[]).unwrap(), 0);
    assert_eq!(marked(dir.path()).unwrap().len(), 2);
    second.kill_all(soon()).unwrap();
    assert!(marked(dir.path()).unwrap().is_empty());
    first.wait(soon(), "its end", || Ok(first.must_run("brick").err())).unwrap();
    second.wait(soon(), "its end", || Ok(second.running("brick").is_none().then_some(()))).unwrap();
}

#[test]
fn the_late_end_of_one_that_was_taken_away_is_nothing_to_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let runtime_dir = runtime_dir(dir.path());
    let sleep = || {
        let mut command = Command::new("sleep");
        command.arg("300");
        command
    };
    let first = runtime_dir.start("client", sleep()).unwrap();
    runtime_dir.end_role("client");
    // It may still be dying.
    let second = runtime_dir.start("client", sleep()).unwrap();
    let gone = PathBuf::from(format!("/proc/{first}"));
    runtime_dir.wait(soon(), "its end", || Ok((!gone.exists()).then_some(()))).unwrap();
    let known = || runtime_dir.processes().into_iter().map(|process| (process.pid, process.ended.is_some()));
    assert_eq!(known().collect::<Vec<_>>(), [(second, false)]);
    assert_eq!(runtime_dir.must_run("client").unwrap(), second);
    runtime_dir.kill_all(soon()).unwrap();
}

/// The environment of what is started in a runtime directory.
fn marks_of(runtime_dir: &RuntimeDir) -> Vec<(String, String)> {
    let mut command = Command::new("true");
    runtime_dir.mark("brick", &mut command);
    let text = |text: &std::ffi::OsStr| text.to_str().unwrap().to_owned();
    command.get_envs().map(|(name, value)| (text(name), text(value.unwrap()))).collect()
}

fn begin(command: &mut Command) -> std::process::Child {
    let child = command.arg("300").spawn().unwrap();
    let is_it = |line: Vec<u8>| line.ends_with(b"\x00300\0");
    while !fs::read(format!("/proc/{}/cmdline", child.id())).is_ok_and(is_it) {
        std::thread::yield_now();
    }
    child
}

#[test]
fn a_mark_that_all_can_know_or_in_a_users_set_uid_program_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let runtime_dir = runtime_dir(dir.path());
    let marks = marks_of(&runtime_dir);
    let public: Vec<_> = marks.iter().filter(|(name, _)| name != "ONDECK_PROOF").cloned().collect();
    assert_eq!((marks.len(), public.len()), (4, 3));
    let stolen: Vec<_> = marks
        .iter()
        .map(|(name, value)| (name.clone(), if name == "ONDECK_ROLE" { "client" } else { value }.to_owned()))
        .collect();
    // As a program that has become root for good.
    let mut forged: Vec<_> =
        [&public, &stolen].map(|marks| begin(Command::new("sleep").envs(marks.clone()))).into();
    if rustix::process::geteuid().is_root() {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = dir.path().join("set-uid");
        // Not by this process: a child that another test forks meanwhile would have it open for writing, and nobody could run it.
        let copied =
            Command::new("sh").args(["-c", "cp \"$(command -v sleep)\" \"$0\""]).arg(&program).status();
        assert!(copied.unwrap().success());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
        forged.push(begin(Command::new(&program).uid(20_002).gid(20_002).envs(marks.clone())));
        let owner = fs::metadata(format!("/proc/{}/stat", forged[2].id())).unwrap().uid();
        assert_eq!(owner, 0, "it is not set-uid here");
    }
    assert!(marked(dir.path()).unwrap().is_empty());
    runtime_dir.adopt().unwrap();
    assert!(runtime_dir.processes().is_empty());
    assert_eq!(end_stray_tasks(dir.path(), &[]).unwrap(), 0);
    runtime_dir.kill_all(soon()).unwrap();
    for mut child in forged {
        assert_eq!(child.try_wait().unwrap(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(fs::metadata(dir.path().join("marks.json")).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn processes_of_a_former_version_are_known_if_they_ran_when_the_key_was_made() {
    let dir = tempfile::tempdir().unwrap();
    let mut marks = marks_of(&runtime_dir(dir.path()));
    marks.retain(|(name, _)| name != "ONDECK_PROOF");
    fs::remove_file(dir.path().join("marks.json")).unwrap();
    let mut server = begin(Command::new("sleep").envs(marks.clone()));
    let runtime_dir = runtime_dir(dir.path());
    let mut forged = begin(Command::new("sleep").envs(marks));
    runtime_dir.adopt().unwrap();
    assert_eq!(runtime_dir.must_run("brick").unwrap(), server.id() as i32);
    assert_eq!(runtime_dir.processes().len(), 1);
    runtime_dir.kill_all(soon()).unwrap();
    assert_eq!(server.wait().unwrap().signal(), Some(9));
    assert_eq!(forged.try_wait().unwrap(), None);
    forged.kill().unwrap();
    forged.wait().unwrap();
}

#[test]
fn without_its_key_a_process_is_neither_known_nor_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let first = runtime_dir(dir.path());
    let mut command = Command::new("sleep");
    command.arg("300");
    let pid = first.start("brick", command).unwrap();
    let (key, kept) = (dir.path().join("marks.json"), dir.path().join("kept"));
    fs::rename(&key, &kept).unwrap();
    let error = Marks::open(dir.path()).map(|_| ()).unwrap_err().to_string();
    let id = first.id().to_string();
    for word in ["marks.json", &pid.to_string(), "brick", &id, "put the file back"] {
        assert!(error.contains(word), "no `{word}` in: {error}");
    }
    assert!(marked(dir.path()).is_err() && end_stray_tasks(dir.path(), &[]).is_err());
    assert!(first.kill_all(soon()).is_err() && first.running("brick").is_some());
    fs::rename(&kept, &key).unwrap();
    first.kill_all(soon()).unwrap();
}

#[test]
fn of_a_ram_disk_that_is_not_known_only_the_tasks_are_ended() {
    let dir = tempfile::tempdir().unwrap();
    let runtime_dir = runtime_dir(dir.path());
    let sleep = || {
        let mut command = Command::new("sleep");
        command.arg("300");
        command
    };
    let server = runtime_dir.start("brick", sleep()).unwrap();
    runtime_dir.start(&format!("{TASK}fill"), sleep()).unwrap();
    assert_eq!(end_stray_tasks(dir.path(), &["test@1".parse().unwrap()]).unwrap(), 0);
    assert_eq!(end_stray_tasks(dir.path(), &["test@2".parse().unwrap()]).unwrap(), 1);
    let left = || marked(dir.path()).unwrap();
    runtime_dir.wait(soon(), "the task's end", || Ok((left().len() == 1).then_some(()))).unwrap();
    assert_eq!(left()[0].pid, server);
    runtime_dir.kill_all(soon()).unwrap();
}

#[test]
fn another_agents_processes_are_left_alone() {
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut command = Command::new("sleep");
    command.arg("300");
    let other = runtime_dir(theirs.path());
    other.start("brick", command).unwrap();
    runtime_dir(ours.path()).kill_all(soon()).unwrap();
    assert!(other.running("brick").is_some());
    other.kill_all(soon()).unwrap();
}

#[test]
fn what_fails_says_what_it_printed() {
    let dir = tempfile::tempdir().unwrap();
    let runtime_dir = runtime_dir(dir.path());
    let mut command = Command::new("sh");
    command.args(["-c", "echo the port is taken >&2; exit 3"]);
    let text = runtime_dir.run("mkfs", command, soon()).unwrap_err().to_string();
    assert!(text.contains("code 3") && text.contains("the port is taken"), "{text}");

    let text = runtime_dir.start("brick", Command::new("no-such-program")).unwrap_err().to_string();
    assert!(text.contains("no-such-program"), "{text}");

    let mut command = Command::new("sleep");
    command.arg("300");
    let soon = Instant::now() + Duration::from_millis(30);
    assert!(matches!(runtime_dir.run("slow", command, soon), Err(EngineError::Deadline { .. })));
    assert!(marked(dir.path()).unwrap().is_empty());
}

#[test]
fn a_command_does_not_wait_for_a_server_that_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let runtime_dir = runtime_dir(dir.path());
    let command = |program: &str, of: &str| {
        let mut command = Command::new(program);
        command.arg(of);
        command
    };
    runtime_dir.start("server", command("sleep", "300")).unwrap();
    assert!(runtime_dir.run_beside(&["server"], "asks", command("sleep", "0.1"), soon()).is_ok());
    let server = runtime_dir.running("server").unwrap();
    kill(server);
    let began = Instant::now();
    let error = runtime_dir.run_beside(&["server"], "asks", command("sleep", "300"), soon()).unwrap_err();
    assert!(error.to_string().contains("signal 9"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(marked(dir.path()).unwrap().is_empty());
}
