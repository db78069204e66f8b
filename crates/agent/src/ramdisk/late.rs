//! Laying the RAM disk over the output of a job that runs: only while all of its processes are stopped.
//!
//! The directories are opened before. [`RamDisk::freeze`] stops the processes and looks what they hold,
//! [`RamDisk::overmount_frozen`] mounts and looks whether all of them see it, [`RamDisk::keep`] makes that outlive the
//! agent, and [`RamDisk::thaw`] lets them go on; without `keep` it takes everything away before.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ondeck_ramdisk::{Build, EngineError};

use super::overmount::OpenTarget;
use super::{CLIENT, RamDisk, lock, needs_mount};
use crate::freeze::groups::{JobGroups, State};
use crate::freeze::holder::Holder;
use crate::freeze::look::{self, TargetDir};
use crate::unmount::all_mounts;

/// A job that is stopped.
pub(super) struct Frozen {
    job: u32,
    holder: Holder,
    groups: JobGroups,
    processes: BTreeSet<i32>,
}

fn failed(error: io::Error) -> EngineError {
    EngineError::Refused(format!("the job's processes can't be stopped here: {error}"))
}

impl RamDisk {
    /// Refuses if the processes of a job could not be stopped here whatever they do: nothing needs to be copied then.
    pub(super) fn could_freeze(&self, build: &Build, job: u32) -> Result<(), EngineError> {
        let uid = build.layout.owner.uid;
        outside(&JobGroups::find(job, uid).map_err(failed)?, uid)
    }

    /// Stops all processes of a job of the RAM disk's owner, and refuses if one of them holds something of a target,
    /// or if the owner has other processes on this node. After an error they go on.
    pub(super) fn freeze(&self, build: &Build, job: u32) -> Result<(), EngineError> {
        // Whoever was stopped by an earlier attempt goes on first.
        *lock(&self.frozen) = None;
        let owner = build.layout.owner;
        if owner.uid == 0 {
            return Err(EngineError::Refused(
                "root's processes are everywhere on a node: what root writes can't be covered while it runs"
                    .into(),
            ));
        }
        let mounts = all_mounts()?;
        let targets: Vec<TargetDir> = {
            let open = lock(&self.targets);
            let open = open.as_ref().ok_or_else(|| {
                EngineError::Refused(format!("nothing is aimed at for {} on this node; aim first", self.id()))
            })?;
            let target = |target: &OpenTarget| {
                let mount = mounts.iter().find(|mount| mount.id == target.mount);
                let mount = mount.ok_or_else(|| failed(io::Error::other("it is on no mount any more")))?;
                TargetDir::of(&target.directory, &target.real, mount)
                    .map_err(|error| EngineError::io("look at", &target.real, error))
            };
            open.iter().map(target).collect::<Result<_, _>>()?
        };
        if !needs_mount(build.layout) {
            return Err(EngineError::Refused("a simulated RAM disk covers nothing".into()));
        }
        let groups = JobGroups::find(job, owner.uid).map_err(failed)?;
        outside(&groups, owner.uid)?;
        let mut holder = Holder::start(&groups.steps, owner).map_err(failed)?;
        holder.stop().map_err(failed)?;
        // A step may have begun since.
        let groups_now = JobGroups::find(job, owner.uid).map_err(failed)?;
        if groups_now != groups {
            return Err(EngineError::Refused("a step of the job began or ended just now".into()));
        }
        outside(&groups, owner.uid)?;
        let processes = groups.processes().map_err(failed)?;
        let everybody = groups.everybody().map_err(failed)?;
        if let Some(what) = look::held(&everybody, &targets).map_err(failed)? {
            return Err(EngineError::Busy(format!("{what}; close it, or start with #RSA_WAIT=hold")));
        }
        *lock(&self.frozen) = Some(Frozen { job, holder, groups, processes });
        Ok(())
    }

    /// Mounts the RAM disk over all targets, while the job is stopped, and refuses if not all of its processes
    /// see it, or there are new ones.
    pub(super) fn overmount_frozen(&self, build: &Build) -> Result<(), EngineError> {
        let mut frozen = lock(&self.frozen);
        let frozen = frozen.as_mut().ok_or_else(gone)?;
        let client = self.mounts_at(&self.runtime_dir.path(CLIENT))?;
        let client = client.first().map(|mount| mount.device).ok_or_else(gone)?;
        self.overmount_with(build, &mut |id| frozen.holder.mounts(id, client).map_err(failed))?;
        let overmounts: Vec<PathBuf> =
            self.record().overmounts.iter().map(|recorded| recorded.real.clone()).collect();
        let own = self.overmounts()?;
        let device = own.first().map(|mount| mount.device).ok_or_else(gone)?;
        look::sees_all(&frozen.processes, &overmounts, device)
            .map_err(|error| EngineError::Refused(error.to_string()))?;
        frozen.is_unchanged(build.layout.owner.uid)
    }

    /// Makes what was mounted stay, also if this agent ends. The job is still stopped.
    pub(super) fn keep(&self) -> Result<(), EngineError> {
        let mut frozen = lock(&self.frozen);
        frozen.as_mut().ok_or_else(gone)?.holder.keep().map_err(failed)
    }

    /// Lets the job go on; tells how long it was stopped. Unless it was to be kept, what was mounted is taken away before.
    pub(super) fn thaw(&self) -> Result<Duration, EngineError> {
        let frozen = lock(&self.frozen).take().ok_or_else(gone)?;
        let stopped = frozen.holder.go_on().map_err(failed)?;
        self.hold_overmounts();
        // Whether it was to be kept is seen by what is mounted.
        self.note(|record| record.whole = !record.overmounts.is_empty())
            .unwrap_or_else(|error| tracing::warn!(ramdisk = %self.id(), %error, "can't note that it stays"));
        Ok(stopped)
    }
}

fn gone() -> EngineError {
    EngineError::Refused("the job is not stopped here any more".into())
}

fn outside(groups: &JobGroups, uid: u32) -> Result<(), EngineError> {
    match groups.outside(uid).map_err(failed)? {
        None => Ok(()),
        Some(pid) => {
            let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            Err(EngineError::Refused(format!(
                "process {pid} ({}) is the job's user's, but not in the control groups of its steps, and can't be stopped: \
                 another job or a login of the same user, or a Slurm without proctrack/cgroup",
                command.trim_end()
            )))
        }
    }
}

impl Frozen {
    /// Refuses if somebody else has let them go on, or there are processes that were not stopped.
    fn is_unchanged(&self, uid: u32) -> Result<(), EngineError> {
        let groups = JobGroups::find(self.job, uid).map_err(failed)?;
        let processes = groups.processes().map_err(failed)?;
        if groups != self.groups || processes != self.processes {
            return Err(EngineError::Refused("processes of the job began or ended meanwhile".into()));
        }
        for group in &self.groups.steps {
            if group.state().map_err(failed)? != State::Stopped {
                return Err(EngineError::Refused("somebody else has let the job go on".into()));
            }
        }
        outside(&groups, uid)
    }
}
