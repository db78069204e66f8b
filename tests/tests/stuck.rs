//! A user's process that never leaves `execve`: whoever asks what it has waits with it.
//!
//! A test of its own program, beside no other: all that look at the machine's processes would wait.

#![allow(clippy::unwrap_used)]

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ondeck_core::RamDiskId;
use ondeck_ramdisk::RuntimeDir;
use ondeck_ramdisk::holders::holders;
use ondeck_ramdisk::processes::look_at_one;
use ondeck_ramdisk::runtime_dir::marked;

/// Whose process it is.
const USER: u32 = 20_777;

/// How many more processes stick.
const CROWD: usize = 30;

/// How long anything here may take: nothing waits for that process but for the first answer.
const SOON: Duration = Duration::from_secs(10);

/// What is ended, and taken away again.
#[derive(Default)]
struct Made<'a> {
    processes: Vec<Child>,
    mounts: Vec<&'a Path>,
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
        }
        for at in &self.mounts {
            let _ = rustix::mount::unmount(*at, rustix::mount::UnmountFlags::DETACH);
        }
        for process in &mut self.processes {
            let _ = process.wait();
        }
    }
}

fn says(child: &mut Child, word: &str) {
    use std::io::BufRead;
    let mut line = String::new();
    std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim_end(), word);
}

/// How many threads this process has.
fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_process_that_never_leaves_execve_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let [mute, disk, scope] = ["mute", "disk", "scope"].map(|name| dir.path().join(name));
    for at in [&mute, &disk, &scope] {
        fs::create_dir(at).unwrap();
    }
    let mut made = Made::default();
    rustix::mount::mount("test", &disk, "tmpfs", rustix::mount::MountFlags::empty(), c"size=1m").unwrap();
    made.mounts.push(&disk);

    let probe = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ondeck-probe"));
        command.stdout(Stdio::piped());
        command
    };
    let server =
        probe().arg("mute").arg(&mute).args(["--uid", &USER.to_string(), "--names"]).spawn().unwrap();
    made.mounts.push(&mute);
    // The server is ended first, and with it all that wait for it.
    made.processes.push(server);
    says(&mut made.processes[0], "mounted");
    let sleeper = Command::new("sleep").arg("300").current_dir(&disk).spawn().unwrap();
    let sleeping = sleeper.id() as i32;
    made.processes.push(sleeper);
    let stuck = probe().arg("stick").arg(mute.join("file")).uid(USER).gid(USER).spawn().unwrap();
    let sticking = stuck.id() as i32;
    made.processes.push(stuck);
    says(&mut made.processes[2], "opened");
    let until = Instant::now() + SOON;
    while look_at_one(sticking, |pid| fs::read(format!("/proc/{pid}/environ")).is_ok()).unwrap().is_some() {
        assert!(Instant::now() < until, "it never sticks");
    }

    let began = Instant::now();
    let device = fs::metadata(&disk).unwrap().dev();
    let numbers = (rustix::fs::major(device), rustix::fs::minor(device));
    let found = |owner: u32| {
        let mut found = holders(numbers, owner, 10, |_| true).unwrap();
        found.sort_by_key(|holder| holder.path.is_none());
        found.into_iter().map(|holder| (holder.pid, holder.path)).collect::<Vec<_>>()
    };
    // It may hold something that its user could open, and nothing of anybody else's.
    assert_eq!(found(USER), [(sleeping, Some(disk.clone())), (sticking, None)]);
    assert_eq!(found(USER + 1), [(sleeping, Some(disk.clone()))]);
    // However many there are, a few are asked, and the others are taken for such.
    let (first, threads) = (made.processes.len(), threads());
    for _ in 0..CROWD {
        made.processes.push(probe().arg("stick").arg(mute.join("file")).uid(USER).gid(USER).spawn().unwrap());
    }
    for process in &mut made.processes[first..] {
        says(process, "opened");
    }
    for _ in 0..2 {
        assert_eq!(found(USER).len(), 10);
        assert_eq!(found(USER + 1), [(sleeping, Some(disk.clone()))]);
    }
    assert!(self::threads() < threads + CROWD / 2, "{} threads", self::threads());
    assert!(marked(&scope).unwrap().is_empty());
    let runtime_dir =
        RuntimeDir::open(&scope, RamDiskId { name: "test".parse().unwrap(), epoch: ondeck_core::Epoch(1) })
            .unwrap();
    runtime_dir.adopt().unwrap();
    runtime_dir.kill_all(Instant::now() + SOON).unwrap();
    // The kernel's parent reaps who was killed.
    runtime_dir.end_users_of(device, Instant::now() + SOON).unwrap();
    assert!(made.processes[1].wait().unwrap().code().is_none());
    assert_eq!(found(USER + 1), []);
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    assert!(made.processes[2].try_wait().unwrap().is_none(), "it did not stick all the time");
}
