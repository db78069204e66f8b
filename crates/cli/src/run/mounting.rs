//! Showing the directories of the RAM disk at their paths.

use std::io;
use std::os::fd::AsFd;

use ondeck_ramdisk::mounts::{self, Overlay, Target};
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_staging::Slot;
use ondeck_staging::merge_back::Mechanism;
use rustix::fs::Mode;

use super::places::{anchor_name, work_name};
use super::plan::RunDirectory;
use super::shared::Shared;

impl Shared {
    /// Before anything is mounted over: keeps every directory that will be overlaid reachable.
    pub fn anchor(&self, namespaces: &Namespaces) -> io::Result<()> {
        let overlaid: Vec<(usize, &RunDirectory)> = self
            .plan
            .directories
            .iter()
            .enumerate()
            .filter(|(_, directory)| directory.output && directory.mechanism == Mechanism::Overlay)
            .collect();
        if overlaid.is_empty() {
            return Ok(());
        }
        for (index, _) in &overlaid {
            rustix::fs::mkdirat(&namespaces.ram_disk, anchor_name(*index), Mode::RWXU)?;
        }
        namespaces.inside(|| {
            for (index, directory) in &overlaid {
                // Bound from the path, then compared: what is behind the anchor is what will be overlaid.
                let anchor = self.dir.join("ramdisk").join(anchor_name(*index));
                mounts::bind(&directory.path, &Target::open(&anchor, None)?)?;
                Target::open(&anchor, Some(directory.disk.as_fd()))?;
            }
            Ok(())
        })
    }

    /// Shows one directory at its path.
    pub fn mount_one(&self, namespaces: &Namespaces, index: usize, mechanism: Mechanism) -> io::Result<()> {
        namespaces.inside(|| self.mount_here(index, mechanism))
    }

    /// The same in a process that has joined the namespaces.
    pub fn mount_here(&self, index: usize, mechanism: Mechanism) -> io::Result<()> {
        let directory = &self.plan.directories[index];
        let ram_disk = self.dir.join("ramdisk");
        let (slot, work) = (ram_disk.join(Slot::of_run(index).name()), ram_disk.join(work_name(index)));
        // Below a directory that is in RAM already, the path names the mount point that we made there.
        let nested_in_ours = self
            .plan
            .directories
            .iter()
            .any(|other| directory.path != other.path && directory.path.starts_with(&other.path));
        let target = Target::open(&directory.path, (!nested_in_ours).then_some(directory.disk.as_fd()))?;
        if mechanism == Mechanism::Overlay {
            let lower = ram_disk.join(anchor_name(index));
            return Overlay { lower: &lower, upper: &slot, work: &work, root: self.plan.root }.mount(&target);
        }
        if directory.input && !directory.output {
            mounts::make_read_only(&slot)?;
        }
        mounts::bind(&slot, &target)
    }
}
