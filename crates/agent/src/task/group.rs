//! The memory cgroup of a user's script.
//!
//! The kernel judges a write to a group by who opened the file, not by who writes. So these files are opened only where no
//! user can reach the descriptor: by processes that are root's, never by one that becomes the user later.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ondeck_core::Bytes;

use super::restraint::{self, own_group_of_version_1};

/// How long the removal of a group waits for its last members: the kernel counts a process out of its group a moment after
/// it has ended.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where the groups of version 1 that limit memory are.
const VERSION_1: &str = "/sys/fs/cgroup/memory";

/// Where the groups of version 2 are.
const VERSION_2: &str = "/sys/fs/cgroup";

/// A memory cgroup for the script of one runner.
pub struct MemoryGroup {
    dir: PathBuf,
}

impl MemoryGroup {
    /// The group of this runner, with a limit; nothing where none can be made. `state` is the agent's directory.
    pub fn make(state: &Path, limit: Bytes) -> Option<MemoryGroup> {
        let name = name(state, std::process::id()).ok()?;
        let (dir, file) = match parent_of_version_2() {
            Some(parent) => (parent.join(name), "memory.max"),
            None => (parent_of_version_1()?.join(name), "memory.limit_in_bytes"),
        };
        fs::create_dir(&dir).ok()?;
        let group = MemoryGroup { dir };
        match fs::write(group.dir.join(file), limit.0.to_string()) {
            Ok(()) => {
                if group.dir.starts_with(Path::new(VERSION_2).join(OWN)) {
                    restraint::of_version_2(&group.dir);
                }
                Some(group)
            }
            Err(_) => {
                group.remove();
                None
            }
        }
    }

    /// Moves a process into it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn admit(&self, pid: i32) -> io::Result<()> {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string())
    }

    /// Removes it, once its members have ended.
    pub fn remove(self) {
        // Whatever is left is removed by the agent.
        let _ = remove(&self.dir, Instant::now() + PATIENCE);
    }
}

/// Removes the group of a runner that has ended before it could.
///
/// # Errors
/// If it is still there.
pub fn remove_of(state: &Path, runner: u32) -> io::Result<()> {
    let (name, until) = (name(state, runner)?, Instant::now() + PATIENCE);
    let parents = [parent_of_version_1(), Some(Path::new(VERSION_2).join(OWN))];
    parents.into_iter().flatten().try_for_each(|parent| remove(&parent.join(&name), until))
}

/// Removes the groups that earlier agents with this directory have left, in whatever group those were themselves.
pub fn remove_left_over(state: &Path) {
    // There was no earlier one.
    let Ok(prefix) = prefix(state) else { return };
    let mut found = Vec::new();
    for root in [PathBuf::from(VERSION_1), Path::new(VERSION_2).join(OWN)] {
        find(&root, &prefix, &mut found);
    }
    let until = Instant::now() + PATIENCE;
    for dir in found {
        match remove(&dir, until) {
            Ok(()) => tracing::warn!(group = %dir.display(), "removed a memory group that was left"),
            Err(error) => tracing::error!(group = %dir.display(), %error, "can't remove a memory group"),
        }
    }
}

/// The group on version 2 in which those of the scripts are.
const OWN: &str = "ondeck";

/// How the names of an agent's groups begin. Hosts that are containers of one machine may see one tree of groups, and have
/// equal names and process ids; no two agents have one directory.
fn prefix(state: &Path) -> io::Result<String> {
    let meta = fs::metadata(state)?;
    Ok(format!("ondeck-task-{:x}-{:x}-", meta.dev(), meta.ino()))
}

fn name(state: &Path, runner: u32) -> io::Result<String> {
    Ok(format!("{}{runner}", prefix(state)?))
}

/// Directories below `root` whose names begin so. What can't be listed has ended, or holds none of ours.
fn find(root: &Path, prefix: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(entry.path());
        } else {
            find(&entry.path(), prefix, found);
        }
    }
}

/// Removes a group once it is empty. One that is not there is no error.
fn remove(dir: &Path, until: Instant) -> io::Result<()> {
    loop {
        match fs::remove_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            done => return done,
        }
    }
}

/// Below the agent's own group.
fn parent_of_version_1() -> Option<PathBuf> {
    own_group_of_version_1("memory")
}

/// Of its own below the root: a group that has processes, as the agent's, can't limit the groups in it.
fn parent_of_version_2() -> Option<PathBuf> {
    let root = Path::new(VERSION_2);
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).ok()?;
    if !controllers.split_whitespace().any(|controller| controller == "memory") {
        return None;
    }
    let parent = root.join(OWN);
    match fs::create_dir(&parent) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return None,
        _ => {}
    }
    fs::write(parent.join("cgroup.subtree_control"), "+memory").ok()?;
    (fs::metadata(&parent).ok()?.uid() == 0).then_some(parent)
}
