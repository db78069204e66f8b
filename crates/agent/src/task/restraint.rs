//! What keeps a task with a script from taking a node's processes and CPU: control groups where their controllers are
//! there and may be written, else a nice value. Its memory is the memory group's matter.
//!
//! With version 1 the runner itself joins a group of each controller, and whatever it starts is in it. With version 2 a
//! process has one group, so [`of_version_2`] limits that which limits a script's memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The most processes and threads of a task with a script. The limit for each user (RLIMIT_NPROC) is no substitute: it
/// counts what else the user has on the node.
pub const PROCESSES: u64 = 1024;

/// Half of what a group has by default, or with version 1 a single thread beside it: all of a script together gets less
/// than each thread of a RAM disk's server. Less would keep jobs waiting for their input where the CPU is busy.
const SHARES: &str = "512";
const WEIGHT: &str = "50";

/// Where there are no groups, for each process: a third of the usual weight.
const NICE: i32 = 5;

const NAME: &str = "ondeck-task-";

/// The groups of version 1 that this process has joined.
pub struct Restraint(Vec<PathBuf>);

impl Restraint {
    /// Restrains this process and all that it will start.
    pub fn begin() -> Restraint {
        let limit = PROCESSES.to_string();
        let joined: Vec<_> = [("pids", "pids.max", limit.as_str()), ("cpu", "cpu.shares", SHARES)]
            .map(|(controller, file, value)| join(controller, file, value).ok().flatten())
            .into();
        // With version 2 as well: whether its controller is in force is not known here.
        if joined[1].is_none() {
            // Raising it can't fail.
            let _ = rustix::process::setpriority_process(None, NICE);
        }
        Restraint(joined.into_iter().flatten().collect())
    }

    /// Removes the groups, once all but this process have left them.
    pub fn end(self) {
        const PATIENCE: Duration = Duration::from_secs(2);
        let until = Instant::now() + PATIENCE;
        for group in self.0 {
            let left = group.parent().map_or(Ok(()), |parent| fs::write(parent.join("cgroup.procs"), "0"));
            // The kernel counts a process out of its group a moment after it has ended.
            while left.is_ok() && fs::remove_dir(&group).is_err() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Joins a new group of a controller, below the agent's; nothing if there is no such controller of version 1.
fn join(controller: &str, file: &str, value: &str) -> io::Result<Option<PathBuf>> {
    let Some(parent) = own_group_of_version_1(controller) else { return Ok(None) };
    remove_left_over(&parent);
    let group = parent.join(format!("{NAME}{}", std::process::id()));
    fs::create_dir(&group)?;
    let joined = fs::write(group.join(file), value)
        .and_then(|()| fs::write(group.join("cgroup.procs"), std::process::id().to_string()));
    if joined.is_err() {
        let _ = fs::remove_dir(&group);
    }
    joined.map(|()| Some(group))
}

/// This process's group of a controller.
pub(super) fn own_group_of_version_1(controller: &str) -> Option<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        fields.next()?.split(',').any(|name| name == controller).then(|| fields.next())?
    })?;
    let group = Path::new("/sys/fs/cgroup").join(controller).join(own.trim_start_matches('/'));
    group.is_dir().then_some(group)
}

/// Removes groups whose runner was killed. One that has processes is not removed by the kernel; what can't be listed or
/// removed is empty, takes nothing, and is tried again by the next task.
fn remove_left_over(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let runner = name.to_str().and_then(|name| name.strip_prefix(NAME)?.parse::<u32>().ok());
        if runner.is_some_and(|runner| !Path::new("/proc").join(runner.to_string()).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Limits a script's group of version 2: its processes, and with all other scripts the CPU. What has no controller has no
/// limit.
pub fn of_version_2(group: &Path) {
    let Some(parent) = group.parent() else { return };
    let set = |file: PathBuf, value: &str| fs::write(file, value).is_ok();
    if set(parent.join("cgroup.subtree_control"), "+pids") {
        set(group.join("pids.max"), &PROCESSES.to_string());
    }
    // Of the parent: it stands beside the groups of everything else.
    set(parent.join("cpu.weight"), WEIGHT);
}

fn has_version_2(controller: &str) -> bool {
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    controllers.split_whitespace().any(|found| found == controller)
}

/// What of `pids` and `cpu` has no controller here, for the doctor.
pub fn missing() -> Vec<&'static str> {
    let is_there = |controller: &str| {
        let group = own_group_of_version_1(controller);
        let is_writable = group.is_some_and(|group| {
            let access = rustix::fs::Access::WRITE_OK;
            rustix::fs::access(group.join("cgroup.procs"), access).is_ok()
        });
        is_writable || has_version_2(controller)
    };
    ["pids", "cpu"].into_iter().filter(|controller| !is_there(controller)).collect()
}
