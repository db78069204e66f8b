//! Ending processes: those of a RAM disk, by their marks, and those that use a filesystem.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

use ondeck_core::RamDiskId;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::{FIRST_NAP, LONGEST_NAP, Marked, RuntimeDir};
use crate::EngineError;
use crate::mark::marks_of;
use crate::processes::{look_at, look_at_one, pids};

impl RuntimeDir {
    /// Ends the processes of a role, and forgets them at once: when they have ended is nothing to whoever comes after them in
    /// that role. [`RuntimeDir::kill_all`] finds one that does not end.
    pub fn end_role(&self, role: &str) {
        self.kill_role(role);
        self.table().retain(|_, process| process.role != role);
    }

    /// Kills every process of this RAM disk on this node, of whatever incarnation, and waits until they are gone.
    ///
    /// # Errors
    /// [`EngineError::Immortal`] if one is still there at `until`; the kernel's, if it can't be told whether one is.
    pub fn kill_all(&self, until: Instant) -> Result<(), EngineError> {
        // The known ones first, without a look at all of /proc; then whatever they started. A dying process can still
        // have started another one, so this is repeated until none is found.
        let mut killed: Vec<(i32, OwnedFd)> = Vec::new();
        for process in self.processes().iter().filter(|process| process.ended.is_none()) {
            killed.extend(kill_if_marked(process.pid, &self.scope, self.id.name.as_str()));
        }
        let mut nap = FIRST_NAP;
        loop {
            let left: Vec<Marked> = marked(&self.scope)
                .map_err(|error| EngineError::io("read", Path::new("/proc"), error))?
                .into_iter()
                .filter(|found| name_of(&found.id) == self.id.name.as_str())
                .collect();
            if left.is_empty() {
                break;
            }
            for found in &left {
                killed.extend(kill_if_marked(found.pid, &self.scope, self.id.name.as_str()));
            }
            if Instant::now() >= until {
                return Err(EngineError::Immortal { pids: left.iter().map(|found| found.pid).collect() });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
        }
        // The environment goes first when a process ends, its files and ports after that.
        let immortal: Vec<i32> =
            killed.iter().filter(|(_, handle)| !ends(handle, until)).map(|(pid, _)| *pid).collect();
        if immortal.is_empty() { Ok(()) } else { Err(EngineError::Immortal { pids: immortal }) }
    }

    /// Kills the processes of one role.
    pub fn kill_role(&self, role: &str) {
        for process in self.processes() {
            if process.role == role && process.ended.is_none() {
                kill_if_marked(process.pid, &self.scope, self.id.name.as_str());
            }
        }
    }

    /// Kills every process on this machine that has a file of the filesystem with this device number open, mapped, or as
    /// its directory.
    ///
    /// # Errors
    /// [`EngineError::Immortal`] if one is still there at `until`; the kernel's, if it can't be told whether one is.
    pub fn end_users_of(&self, device: u64, until: Instant) -> Result<(), EngineError> {
        let mut nap = FIRST_NAP;
        loop {
            let all = pids().and_then(|all| look_at(all, move |pid| uses(pid, device)));
            let all = all.map_err(|error| EngineError::io("read", Path::new("/proc"), error))?;
            let users: Vec<i32> =
                all.into_iter().filter(|(_, uses)| *uses == Some(true)).map(|(pid, _)| pid).collect();
            if users.is_empty() {
                return Ok(());
            }
            for pid in &users {
                tracing::warn!(ramdisk = %self.id, pid, "killing a process that still uses the RAM disk");
                if let Some(handle) =
                    Pid::from_raw(*pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
                    && matches!(look_at_one(*pid, move |pid| uses(pid, device)), Ok(Some(true)))
                {
                    // It may have ended by now.
                    let _ = rustix::process::pidfd_send_signal(&handle, Signal::KILL);
                }
            }
            if Instant::now() >= until {
                return Err(EngineError::Immortal { pids: users });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }
}

/// Every process on this machine that an agent with the directory `scope` has started and that has not ended.
///
/// # Errors
/// The kernel's: then it is not known which they are, or whether there is one.
pub fn marked(scope: &Path) -> io::Result<Vec<Marked>> {
    marks_of(pids()?, scope)
}

/// Whether a process has something of the filesystem with this device number. What can't be looked at has mostly ended
/// meanwhile; if it has not, the filesystem can't be unmounted, and that is told.
fn uses(pid: i32, device: u64) -> bool {
    // Without asking the filesystem's server, which may hang: it may be any filesystem of the machine.
    let on_device = |path: PathBuf| {
        let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
        rustix::fs::statx(rustix::fs::CWD, &path, flags, rustix::fs::StatxFlags::TYPE)
            .is_ok_and(|stat| rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor) == device)
    };
    let base = PathBuf::from(format!("/proc/{pid}"));
    ["cwd", "root", "exe"].iter().any(|name| on_device(base.join(name)))
        || fs::read_dir(base.join("fd")).into_iter().flatten().flatten().any(|entry| on_device(entry.path()))
        || maps(&base, device)
}

fn maps(base: &Path, device: u64) -> bool {
    let wanted = format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device));
    fs::read_to_string(base.join("maps"))
        .is_ok_and(|maps| maps.lines().any(|line| line.split_whitespace().nth(3) == Some(&wanted)))
}

/// The name of a RAM disk in `NAME@EPOCH`.
pub fn name_of(id: &str) -> &str {
    id.rsplit_once('@').map_or(id, |(name, _)| name)
}

/// Kills a process that has our mark, and returns a descriptor to wait for its end with. The descriptor keeps the process
/// id from being given away between look and kill.
pub(super) fn kill_if_marked(pid: i32, scope: &Path, name: &str) -> Option<(i32, OwnedFd)> {
    let handle = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())?;
    // What it is can't be told: then it is not killed, and whoever waits for its end is told that it has not come.
    marks_of([pid], scope).ok()?.pop().filter(|found| name_of(&found.id) == name)?;
    // It may have ended by now.
    let _ = rustix::process::pidfd_send_signal(&handle, Signal::KILL);
    Some((pid, handle))
}

/// Waits for the end of a process; false if it has not come by then.
pub(super) fn ends(handle: &OwnedFd, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = rustix::event::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Kills the tasks that an agent with this directory started for a RAM disk that is not in `known`. Nothing else of one
/// is killed: its servers may hold results.
///
/// # Errors
/// If it can't be told which they are; then none is killed.
pub fn end_stray_tasks(scope: &Path, known: &[RamDiskId]) -> io::Result<usize> {
    let strays: Vec<Marked> = marked(scope)?
        .into_iter()
        .filter(|found| found.is_a_task() && !known.iter().any(|id| found.id == id.to_string()))
        .collect();
    for stray in &strays {
        tracing::warn!(pid = stray.pid, ramdisk = stray.id, role = stray.role, "killing a stray task");
        kill_if_marked(stray.pid, scope, name_of(&stray.id));
    }
    Ok(strays.len())
}

pub(super) fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        // It may have ended by itself.
        let _ = kill_process(pid, Signal::KILL);
    }
}
