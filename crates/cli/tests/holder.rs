//! Stopping the processes of a real control group, and that they go on whatever becomes of whoever stopped them.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ondeck_agent::freeze::groups::{Group, State};
use ondeck_agent::freeze::holder::{Holder, LONGEST};
use ondeck_core::Owner;
use ondeck_ramdisk::mounts;

const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// A process that counts in a file, in a group of its own.
struct Counting {
    group: Group,
    count: PathBuf,
    child: Child,
    _dir: tempfile::TempDir,
}

impl Counting {
    /// Nothing where this machine has no freezer, or lets nobody use it.
    fn start(name: &str) -> Option<Counting> {
        if !rustix::process::geteuid().is_root() || !Path::new(FREEZER).join("cgroup.procs").exists() {
            ondeck_skip::skipped(format_args!("it needs root and the freezer of version 1 at {FREEZER}"));
            return None;
        }
        let path = Path::new(FREEZER).join(format!("ondeck-testbed.{}.{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count");
        let script = format!(
            "echo $$ > {}/cgroup.procs; i=0; while :; do i=$((i+1)); echo $i > {}; done",
            path.display(),
            count.display()
        );
        let child = Command::new("sh").arg("-c").arg(script).spawn().unwrap();
        let counting = Counting { group: Group { path, unified: false }, count, child, _dir: dir };
        counting.must_go_on();
        Some(counting)
    }

    fn holder(&self) -> Holder {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ondeck"));
        command.arg(ondeck_agent::freeze::holder::HOLDER);
        Holder::start_as(command, std::slice::from_ref(&self.group), Owner { uid: 0, gid: 0 }).unwrap()
    }

    fn counted(&self) -> String {
        fs::read_to_string(&self.count).unwrap_or_default()
    }

    #[track_caller]
    fn must_go_on(&self) {
        let (first, begin) = (self.counted(), Instant::now());
        while self.counted() == first || self.counted().is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(20), "it does not go on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[track_caller]
    fn must_stand_still(&self) {
        assert_eq!(self.group.state().unwrap(), State::Stopped);
        let first = self.counted();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(self.counted(), first);
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let _ = self.group.order(false);
        let _ = self.child.kill();
        let _ = self.child.wait();
        let begin = Instant::now();
        // The kernel lets go of the group a moment after its last process.
        while fs::remove_dir(&self.group.path).is_err() && begin.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn processes_that_are_stopped_go_on_when_it_is_said() {
    let Some(counting) = Counting::start("said") else { return };
    let mut holder = counting.holder();
    counting.must_go_on();
    holder.stop().unwrap();
    counting.must_stand_still();
    let stopped = holder.go_on().unwrap();
    assert!(stopped >= Duration::from_millis(100) && stopped <= LONGEST, "{stopped:?}");
    counting.must_go_on();
}

#[test]
fn they_go_on_after_a_second_though_nobody_says_so() {
    let Some(counting) = Counting::start("second") else { return };
    for keep in [false, true] {
        let mut holder = counting.holder();
        let begin = Instant::now();
        holder.stop().unwrap();
        if keep {
            holder.keep().unwrap();
        }
        while counting.group.state().unwrap() != State::Runs {
            assert!(begin.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
        // A machine that is out of breath may be late by some milliseconds.
        assert!(begin.elapsed() < LONGEST + Duration::from_millis(500), "{:?}", begin.elapsed());
        counting.must_go_on();
        // It is too late for everything.
        assert!(holder.mounts(1, (0, 1)).is_err());
        assert!(holder.go_on().is_err());
    }
}

#[test]
fn they_go_on_at_once_when_whoever_stopped_them_has_gone() {
    let Some(counting) = Counting::start("gone") else { return };
    let mut holder = counting.holder();
    holder.stop().unwrap();
    let begin = Instant::now();
    // As the kernel does with the pipe of an agent that was killed.
    drop(holder);
    assert_eq!(counting.group.state().unwrap(), State::Runs);
    assert!(begin.elapsed() < Duration::from_millis(700), "{:?}", begin.elapsed());
    counting.must_go_on();
}

#[test]
fn what_slurm_has_suspended_stays_so() {
    let Some(counting) = Counting::start("suspended") else { return };
    counting.group.order(true).unwrap();
    let mut holder = counting.holder();
    let error = holder.stop().unwrap_err();
    assert!(error.to_string().contains("suspended"), "{error}");
    drop(holder);
    counting.must_stand_still();
}

/// A mount that is gone at the end, also of a test that fails: an agent on this machine would take it for a RAM disk of its own.
struct Others(PathBuf);

impl Drop for Others {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_mount_that_has_the_number_of_one_that_is_gone_is_not_taken_away() {
    let Some(counting) = Counting::start("number") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mount =
        |arguments: &[&str]| Command::new(arguments[0]).args(&arguments[1..]).status().unwrap().success();
    let at = dir.path().to_str().unwrap();
    assert!(mount(&["mount", "-t", "tmpfs", "ondeck:others", at]));
    let _others = Others(dir.path().to_owned());
    let find = || mounts::mounted().unwrap().into_iter().find(|mount| mount.at == dir.path());
    let others = find().unwrap();
    for (device, stays) in [((others.device.0, others.device.1 + 1), true), (others.device, false)] {
        let mut holder = counting.holder();
        holder.stop().unwrap();
        holder.mounts(others.id, device).unwrap();
        holder.go_on().unwrap();
        assert_eq!(find().is_some(), stays, "{device:?}");
    }
}
