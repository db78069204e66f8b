//! A share of a processor that a process of a bed has at most, by the machine's control groups.
//!
//! The groups lie in one of the bed's, which goes with it, as those of [`control`](crate::control) do.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;

use crate::control;

/// Where the controller `cpu` is, in the two versions of control groups.
const VERSION_1: &str = "/sys/fs/cgroup/cpu";
const VERSION_2: &str = "/sys/fs/cgroup";

/// A process that has used up its share waits for the next period. It is short, so that what is measured takes many of them.
const PERIOD_US: u64 = 10_000;

/// Holds a process to a share of a processor until it is dropped.
#[derive(Debug)]
pub struct CpuLimit {
    process: Pid,
    group: PathBuf,
    /// The group that the process was in before.
    origin: PathBuf,
}

impl CpuLimit {
    pub(crate) fn new(bed_name: &str, process: Pid, percent: u64) -> Result<CpuLimit> {
        let quota_us = PERIOD_US * percent / 100;
        let id = process.as_raw_nonzero();
        let groups =
            fs::read_to_string(format!("/proc/{id}/cgroup")).context("cannot tell its control groups")?;
        let (root, version) = root().context("there is no controller of processor time")?;
        let origin = root.join(own_group(&groups, version).context("its control group is not told")?);
        let bed = root.join(bed_name);
        let group = bed.join(format!("processor-{id}"));
        fs::create_dir_all(&group).with_context(|| format!("cannot make {}", group.display()))?;
        let limit = CpuLimit { process, group, origin };
        match version {
            1 => {
                limit.write("cpu.cfs_period_us", PERIOD_US)?;
                limit.write("cpu.cfs_quota_us", quota_us)?;
            }
            _ => {
                for above in [root, &bed] {
                    let control = above.join("cgroup.subtree_control");
                    fs::write(&control, "+cpu")
                        .with_context(|| format!("cannot write {}", control.display()))?;
                }
                limit.write("cpu.max", format_args!("{quota_us} {PERIOD_US}"))?;
            }
        }
        limit.write("cgroup.procs", id)?;
        Ok(limit)
    }

    fn write(&self, file: &str, value: impl std::fmt::Display) -> Result<()> {
        let path = self.group.join(file);
        fs::write(&path, value.to_string()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// In how many periods of a hundredth of a second the process was kept waiting so far.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell.
    pub fn periods_waited(&self) -> Result<u64> {
        let path = self.group.join("cpu.stat");
        let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let found = stat.lines().find_map(|line| line.strip_prefix("nr_throttled ")?.trim().parse().ok());
        found.with_context(|| format!("{} has no nr_throttled", path.display()))
    }
}

impl Drop for CpuLimit {
    fn drop(&mut self) {
        // If it has ended, it is in no group. What stays goes with the bed.
        let _ = fs::write(self.origin.join("cgroup.procs"), self.process.as_raw_nonzero().to_string());
        let _ = fs::remove_dir(&self.group);
    }
}

/// Removes a bed's groups. No process is in them any more.
pub(crate) fn remove(bed_name: &str) {
    if let Some((root, _)) = root() {
        control::remove_below(&root.join(bed_name));
    }
}

/// Whether a process can be held to a share of a processor here.
///
/// # Errors
///
/// If this machine's control groups have no controller of processor time.
pub fn check() -> Result<()> {
    ensure!(root().is_some(), "this machine's control groups have no controller of processor time (cpu)");
    Ok(())
}

/// The controller's outermost group, and the version of control groups.
fn root() -> Option<(&'static Path, u32)> {
    let (old, new) = (Path::new(VERSION_1), Path::new(VERSION_2));
    if old.join("cgroup.procs").exists() {
        return Some((old, 1));
    }
    let controllers = fs::read_to_string(new.join("cgroup.controllers")).ok()?;
    controllers.split_whitespace().any(|controller| controller == "cpu").then_some((new, 2))
}

/// The group of a process, without the slash at its beginning, as /proc/PID/cgroup tells it (cgroups(7)).
fn own_group(groups: &str, version: u32) -> Option<&str> {
    groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        let is_it = match version {
            1 => controllers.split(',').any(|controller| controller == "cpu"),
            _ => controllers.is_empty(),
        };
        is_it.then(|| group.trim_start_matches('/'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_a_process_is_found_by_its_controller() {
        let groups = "9:name=systemd:/a\n2:cpuset:/b\n1:cpu,cpuacct:/c/d:e\n0::/f\n";
        assert_eq!(own_group(groups, 1), Some("c/d:e"));
        assert_eq!(own_group(groups, 2), Some("f"));
        assert_eq!(own_group("0::/\n", 2), Some(""));
        assert_eq!(own_group("2:cpuset:/b\n", 1), None);
    }
}
