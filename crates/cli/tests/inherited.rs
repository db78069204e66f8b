//! What a daemon was started with.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ONDECK: &str = env!("CARGO_BIN_EXE_ondeck");

/// Whether a process has this file open.
fn has(pid: u32, file: &Path) -> bool {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.iter().any(|path| std::fs::read_link(path).is_ok_and(|target| target == file))
}

#[test]
fn no_daemon_keeps_a_file_open_that_it_was_started_with() {
    let dir = tempfile::tempdir().unwrap();
    let (secret, fifo) = (dir.path().join("secret"), dir.path().join("fifo"));
    std::fs::write(&secret, "root's").unwrap();
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let fifo = fifo.to_str().unwrap();
    // They wait for the end of their configuration, or for their orders.
    for arguments in
        [&["agent", "--config", fifo][..], &["serve", "--config", fifo], &["task-runner"], &["job-holder"]]
    {
        let mut command = Command::new("bash");
        command.args(["-c", "exec 3< \"$1\" 47< \"$1\"; shift; exec \"$@\"", "bash"]).arg(&secret);
        let mut daemon = command.arg(ONDECK).args(arguments).stdin(Stdio::piped()).spawn().unwrap();
        let is_it = || std::fs::read_link(format!("/proc/{}/exe", daemon.id())).unwrap() == Path::new(ONDECK);
        let until = Instant::now() + Duration::from_secs(20);
        while !is_it() || has(daemon.id(), &secret) {
            assert!(Instant::now() < until, "{arguments:?} has it open");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(daemon.try_wait().unwrap(), None, "{arguments:?}");
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }
}
