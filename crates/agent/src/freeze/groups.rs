//! The control groups in which Slurm (proctrack/cgroup) keeps the processes of a job's steps.
//!
//! ```text
//! version 1: FREEZER/slurm[_NODE]/uid_UID/job_JOB                       slurmstepd
//!                                         job_JOB/step_STEP[/task_N]    the step's processes
//! version 2: UNIFIED/system.slice/[NODE_]slurmstepd.scope/job_JOB/step_STEP/slurm    slurmstepd
//!                                                         job_JOB/step_STEP/user     the step's processes
//! ```
//!
//! slurmstepd is never stopped: it answers slurmd, and ends what is to end.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ondeck_ramdisk::mounts::{Mount, mounted};
use serde::{Deserialize, Serialize};

/// A group that can be stopped.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Group {
    /// Its directory in the control group filesystem.
    pub path: PathBuf,
    /// Whether it is one of version 2.
    pub unified: bool,
}

/// How a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its processes run.
    Runs,
    /// Somebody has ordered that they stop, and not all of them have.
    Stopping,
    /// All of them have stopped.
    Stopped,
}

impl Group {
    /// Orders that its processes stop, or go on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn order(&self, stop: bool) -> io::Result<()> {
        if self.unified {
            fs::write(self.path.join("cgroup.freeze"), if stop { "1" } else { "0" })
        } else {
            fs::write(self.path.join("freezer.state"), if stop { "FROZEN" } else { "THAWED" })
        }
    }

    /// How it is.
    ///
    /// # Errors
    /// The kernel's.
    pub fn state(&self) -> io::Result<State> {
        if self.unified {
            let ordered = fs::read_to_string(self.path.join("cgroup.freeze"))?;
            let events = fs::read_to_string(self.path.join("cgroup.events"))?;
            let done = events.lines().any(|line| line == "frozen 1");
            return Ok(match (ordered.trim() == "1", done) {
                (_, true) => State::Stopped,
                (true, false) => State::Stopping,
                (false, false) => State::Runs,
            });
        }
        match fs::read_to_string(self.path.join("freezer.state"))?.trim() {
            "THAWED" => Ok(State::Runs),
            "FROZEN" => Ok(State::Stopped),
            _ => Ok(State::Stopping),
        }
    }
}

/// The processes of a job on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobGroups {
    /// Those that can be stopped, one for each step.
    pub steps: Vec<Group>,
    /// The directories of the whole job.
    jobs: Vec<PathBuf>,
}

impl JobGroups {
    /// The groups of a job of this user. There are none where no step of it runs, or where Slurm does not track processes
    /// by control groups: then [`JobGroups::outside`] finds what runs.
    ///
    /// # Errors
    /// If they can't be read, or belong to another user.
    pub fn find(job: u32, uid: u32) -> io::Result<JobGroups> {
        let mut found = JobGroups::default();
        for mount in mounted()?.iter().filter(|mount| mount.kind == "cgroup" || mount.kind == "cgroup2") {
            found.add(mount, job, uid)?;
        }
        Ok(found)
    }

    fn add(&mut self, mount: &Mount, job: u32, uid: u32) -> io::Result<()> {
        let unified = mount.kind == "cgroup2";
        let name = mount.at.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !unified && !name.split(',').any(|part| part == "freezer") {
            return Ok(());
        }
        let tops: Vec<PathBuf> = if unified {
            let is_stepd = |name: &str| name.ends_with("slurmstepd.scope");
            subdirectories(&mount.at.join("system.slice"), is_stepd)?
        } else {
            let tops = subdirectories(&mount.at, |name| name == "slurm" || name.starts_with("slurm_"))?;
            // The path itself says whose the job is.
            tops.into_iter().map(|top| top.join(format!("uid_{uid}"))).collect()
        };
        for top in tops {
            let job = top.join(format!("job_{job}"));
            if !job.try_exists()? {
                continue;
            }
            for step in subdirectories(&job, |name| name.starts_with("step_"))? {
                let path = if unified { step.join("user") } else { step };
                let file = if unified { "cgroup.freeze" } else { "freezer.state" };
                if path.join(file).try_exists()? {
                    self.steps.push(Group { path, unified });
                }
            }
            self.jobs.push(job);
        }
        self.steps.sort_unstable();
        if unified {
            // Here only the processes say whose they are.
            for group in &self.steps {
                for pid in members(&group.path)? {
                    let of = user_of(pid)?;
                    if of.is_some_and(|of| !of.contains(&uid) && !of.contains(&0)) {
                        let text = format!("process {pid} in {} is another user's", group.path.display());
                        return Err(io::Error::other(text));
                    }
                }
            }
        }
        Ok(())
    }

    /// The processes of its steps: those that are stopped.
    ///
    /// # Errors
    /// The kernel's.
    pub fn processes(&self) -> io::Result<BTreeSet<i32>> {
        let mut found = BTreeSet::new();
        for group in &self.steps {
            found.extend(members(&group.path)?);
        }
        Ok(found)
    }

    /// All processes in its groups, slurmstepd included.
    ///
    /// # Errors
    /// The kernel's.
    pub fn everybody(&self) -> io::Result<BTreeSet<i32>> {
        let mut found = BTreeSet::new();
        for job in &self.jobs {
            found.extend(members(job)?);
        }
        Ok(found)
    }

    /// A process of the job's user that is not in these groups, if there is one: it would go on meanwhile.
    ///
    /// # Errors
    /// The kernel's.
    pub fn outside(&self, uid: u32) -> io::Result<Option<i32>> {
        let inside = self.everybody()?;
        for pid in ondeck_ramdisk::processes::pids()?.into_iter().filter(|pid| !inside.contains(pid)) {
            if user_of(pid)?.is_some_and(|of| of.contains(&uid)) && is_of_this_node(pid)? {
                // It may have been moved into a group since the first look.
                if self.everybody()?.contains(&pid) {
                    continue;
                }
                return Ok(Some(pid));
            }
        }
        Ok(None)
    }
}

/// Whether a process is in this node's part of the control groups: an agent in a namespace of its own sees the others'
/// groups above its root.
fn is_of_this_node(pid: i32) -> io::Result<bool> {
    let text = match fs::read_to_string(format!("/proc/{pid}/cgroup")) {
        Ok(text) => text,
        Err(error) if is_gone(&error) => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok(!text.lines().any(|line| line.splitn(3, ':').nth(2).is_some_and(|path| path.starts_with("/.."))))
}

/// Whether an error says that a process has ended.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(2 | 3))
}

/// The real, effective, saved and filesystem user of a process; nothing if it has ended, or is a zombie.
fn user_of(pid: i32) -> io::Result<Option<Vec<u32>>> {
    let text = match fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(text) => text,
        Err(error) if is_gone(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
    if field("State:").is_some_and(|state| state.trim_start().starts_with(['Z', 'X'])) {
        return Ok(None);
    }
    let users = field("Uid:").unwrap_or_default().split_whitespace().filter_map(|uid| uid.parse().ok());
    Ok(Some(users.collect()))
}

/// The processes of a group and of all below it.
fn members(group: &Path) -> io::Result<BTreeSet<i32>> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![group.to_owned()];
    while let Some(next) = waiting.pop() {
        let text = match fs::read_to_string(next.join("cgroup.procs")) {
            Ok(text) => text,
            // A step that has ended meanwhile.
            Err(error) if matches!(error.raw_os_error(), Some(2 | 19)) => continue,
            Err(error) => return Err(error),
        };
        found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
        waiting.extend(subdirectories(&next, |_| true)?);
    }
    Ok(found)
}

fn subdirectories(of: &Path, counts: impl Fn(&str) -> bool) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(of) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.file_name().to_str().is_some_and(&counts) {
            found.push(entry.path());
        }
    }
    Ok(found)
}
