//! Control groups of the hosts, for Slurm's proctrack/cgroup: each host has a tree of its own in the machine's freezer.
//!
//! They are the one thing of a bed that the kernel does not take away with the processes. Init thaws everything before it
//! ends, as frozen processes can't be killed, and the supervisor removes the groups; `tests/clean.sh` does both for a bed
//! whose processes were all killed.

use std::ffi::CString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

/// Where the machine has its freezer, and each host its own.
const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// Whether this machine has a freezer of version 1 that is laid out as Slurm expects it.
pub(crate) fn available() -> bool {
    Path::new(FREEZER).join("cgroup.procs").exists()
}

fn bed(name: &str) -> PathBuf {
    Path::new(FREEZER).join(name)
}

/// Gives the host whose holder this process is its own tree. It is in its mount namespace already.
pub(crate) fn enter_own(bed_name: &str, host: &str) -> Result<()> {
    if !available() {
        return Ok(());
    }
    let group = bed(bed_name).join(host);
    fs::create_dir_all(&group).with_context(|| format!("cannot make {}", group.display()))?;
    join(&group)?;
    // SAFETY: a namespace of control groups concerns no memory and no descriptors.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP) }
        .context("cannot make a namespace of control groups")?;
    rustix::mount::unmount(FREEZER, UnmountFlags::DETACH).context("cannot unmount the machine's freezer")?;
    let options = CString::new("freezer").context("a name without zeros")?;
    rustix::mount::mount("none", FREEZER, "cgroup", MountFlags::empty(), Some(options.as_c_str()))
        .context("cannot mount the host's freezer")
}

/// Moves this process into the tree of the host that it has entered.
pub(crate) fn join_own() -> Result<()> {
    if available() { join(Path::new(FREEZER)) } else { Ok(()) }
}

fn join(group: &Path) -> Result<()> {
    let procs = group.join("cgroup.procs");
    fs::write(&procs, "0").with_context(|| format!("cannot write {}", procs.display()))
}

/// Lets everything go on in a bed's groups.
pub(crate) fn thaw(bed_name: &str) {
    let _ = each(&bed(bed_name), &mut |group| {
        // One that has gone meanwhile needs nothing.
        let _ = fs::write(group.join("freezer.state"), "THAWED");
    });
}

/// Removes a bed's groups, the innermost first. No process is in them any more.
pub(crate) fn remove(bed_name: &str) {
    remove_below(&bed(bed_name));
}

/// Removes a group and all below it.
pub(crate) fn remove_below(group: &Path) {
    let _ = each(group, &mut |group| {
        let _ = fs::remove_dir(group);
    });
}

/// Does something with a group and all below it, the innermost first.
fn each(group: &Path, work: &mut dyn FnMut(&Path)) -> io::Result<()> {
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            each(&entry.path(), work)?;
        }
    }
    work(group);
    Ok(())
}
