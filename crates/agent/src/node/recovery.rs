//! Start-up: what an earlier agent left is adopted or removed, and nothing is touched that can't be understood.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ondeck_api::host::HostError;
use ondeck_core::{Epoch, RamDiskId};
use ondeck_ramdisk::device::stray_images;
use ondeck_ramdisk::mark::Marks;
use ondeck_ramdisk::{EngineError, RuntimeDir, Secret, mounts, runtime_dir};

use super::Node;
use crate::ramdisk::{self, RamDisk};
use crate::record::{self, RamDiskRecord};
use crate::{story, task};

/// Why an agent can't start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum StartError {
    /// Its directory can't be used.
    #[error("can't use the agent's directory {}: {source}", .path.display())]
    State { path: PathBuf, source: std::io::Error },
    /// Another agent uses it.
    #[error("another agent is running in {}", .path.display())]
    Running { path: PathBuf },
    /// What is kept of a RAM disk is missing, can't be read, or not be understood. Its servers live on.
    #[error(
        "can't understand what is kept of the RAM disk in {}: {source}; it may hold results, so it is left as it is. Put \
         the file back, or start the agent of the version that built it; or, if its data is not needed, restart the node \
         and remove that directory",
        .path.display()
    )]
    Record { path: PathBuf, source: std::io::Error },
    /// A RAM disk is on this node of which nothing is kept. Its servers live on.
    #[error(
        "the RAM disk {id} is on this node ({use_of_it}), but {} is gone, where the agent keeps what it knows of it. It may \
         hold results, so it is left as it is. Put the directory back; or, if its data is not needed, end these processes \
         and unmount these paths, or restart the node",
        .path.display()
    )]
    Unrecorded {
        /// Which one, as `NAME@EPOCH`.
        id: String,
        /// Its processes and mounts.
        use_of_it: String,
        /// Where its runtime directory would be.
        path: PathBuf,
    },
    /// Whom the agent obeys can't be told.
    #[error(
        "can't tell whom this agent obeys: {}: {source}; mend that, or, if no scheduler runs that has used this node, remove \
         the file: the next scheduler that claims the agent is obeyed",
        .path.display()
    )]
    Authority { path: PathBuf, source: std::io::Error },
    /// It can't be told which RAM disks there are. Their servers live on.
    #[error(
        "can't tell which RAM disks are on this node: {}: {source}; put it right and start the agent again, or restart \
         the node if none of them is needed",
        .path.display()
    )]
    Unknown {
        /// What can't be read.
        path: PathBuf,
        source: std::io::Error,
    },
    /// What is kept of the epochs can't be read.
    #[error(
        "can't tell which RAM disks were destroyed on this node: {}: {source}; a late request could build one of them \
         again. Put the file right; or wait a day, and remove it: by then no such request is on its way",
        .path.display()
    )]
    Epochs { path: PathBuf, source: std::io::Error },
    /// This machine's name or address.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A device can't be used.
    #[error("{0}")]
    Device(std::io::Error),
}

impl Node {
    pub(super) fn recover(&self) -> Result<(), StartError> {
        self.known().epochs = self.load_epochs()?;
        // First of all: what begins later without a proof in its mark is nobody's.
        Marks::open(&self.state)
            .map_err(|source| StartError::Unknown { path: self.state.clone(), source })?;
        // All is read before anything is done: what can't be read, or is gone, may be somebody's results.
        let (mut kept, mut begun) = (Vec::new(), Vec::new());
        for dir in self.runtime_dirs()? {
            let unread = |source| StartError::Record { path: dir.clone(), source };
            match RamDiskRecord::load(&dir) {
                Ok(record) => kept.push((record, record::load_secret(&dir).map_err(unread)?)),
                Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
                    if let Some(use_of_it) = self.use_of(&dir)? {
                        return Err(unread(std::io::Error::other(format!("{source}, but {use_of_it}"))));
                    }
                    begun.push(dir);
                }
                Err(source) => return Err(unread(source)),
            }
        }
        let ids: Vec<RamDiskId> = kept.iter().map(|(record, _)| record.layout.id.clone()).collect();
        self.all_are_recorded(&ids)?;
        for dir in begun {
            self.remove_unknown(&dir);
        }
        for (record, secret) in kept {
            self.recover_one(record, secret)?;
        }
        let ids: Vec<RamDiskId> = self.ramdisks().iter().map(|known| known.id().clone()).collect();
        runtime_dir::end_stray_tasks(&self.state, &ids).map_err(no_processes)?;
        task::remove_left_over_groups(&self.state);
        for directory in self.rules().capacity.directories() {
            let images = stray_images(directory, &ids).unwrap_or_else(|error| {
                // They take bytes and nothing else; the device shows that it lacks them.
                tracing::error!(directory = %directory.display(), %error, "can't look for images that were left");
                Vec::new()
            });
            for image in images {
                tracing::warn!(image = %image.display(), "removing an image that belongs to no RAM disk");
                if let Err(error) = std::fs::remove_file(&image) {
                    tracing::error!(image = %image.display(), %error, "can't remove it");
                }
            }
        }
        Ok(())
    }

    /// The directories of the RAM disks that an earlier agent left. There is none before the first one.
    fn runtime_dirs(&self) -> Result<Vec<PathBuf>, StartError> {
        let path = self.state.join("ramdisks");
        let read = || -> std::io::Result<Vec<PathBuf>> {
            std::fs::read_dir(&path)?.map(|entry| Ok(entry?.path())).collect()
        };
        match read() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read.map_err(|source| StartError::Unknown { path, source }),
        }
    }

    fn recover_one(&self, record: RamDiskRecord, secret: Secret) -> Result<(), StartError> {
        let id = record.layout.id.clone();
        let _of_job = story::of(&id).entered();
        let complete = record.complete;
        let runtime_dir = RuntimeDir::open(&self.state, id.clone())
            .map_err(|source| StartError::State { path: self.state.clone(), source })?;
        let found = Arc::new(RamDisk::new(runtime_dir, record, secret));
        found.adopt().map_err(no_processes)?;
        {
            let mut known = self.known();
            known.ramdisks.insert(id.name.clone(), Arc::clone(&found));
            // Also if what was kept of the epochs was removed meanwhile.
            let newest = known.epochs.entry(id.name.clone()).or_insert(id.epoch);
            *newest = (*newest).max(id.epoch);
        }
        let guarded = found.record().guarded;
        let has_others = found.record().layout.servers.iter().any(|server| server.node != self.name);
        if guarded && !complete {
            tracing::error!(ramdisk = %id, "is not complete, and may hold results all the same; it is kept");
        } else if complete && (has_others || !found.is_in_doubt()) {
            if found.is_in_doubt() {
                // Its servers know whether it was completed or undone, and are asked at once.
                tracing::warn!(ramdisk = %id, "was complete here when the agent ended; asking its servers");
                if let Err(error) = found.note(|record| record.lease_until_ms = 0) {
                    tracing::error!(ramdisk = %id, %error, "can't note that its servers are to be asked");
                }
            }
            let report = found.report(&self.name);
            let processes = report.processes.len();
            tracing::info!(ramdisk = %id, processes, faults = ?report.faults, "adopted");
        } else {
            // Whoever was building it has been told that the agent is gone, and undoes it. So it is, too, with one that was complete
            // on its only server: nobody else knows more.
            tracing::warn!(ramdisk = %id, "was not complete when the agent ended; removing it");
            if let Err(error) = self.remove(&found) {
                tracing::error!(ramdisk = %id, error = error.message, "can't remove it");
            }
        }
        Ok(())
    }

    /// What shows that the RAM disk in a runtime directory was built, whatever is kept of it. A record is written before
    /// anything is mounted or started.
    fn use_of(&self, dir: &Path) -> Result<Option<String>, StartError> {
        let unknown = |source| StartError::Unknown { path: "/proc/self/mountinfo".into(), source };
        let name = dir.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        // Where it is shown, its own name is the mount's; users can give any name to what they mount by FUSE.
        let source = format!("ondeck:{name}@");
        let is_its = |mount: &mounts::Mount| {
            mount.at.starts_with(dir) || (mount.source.starts_with(&source) && !mount.is_a_users())
        };
        let mounted = mounts::mounted().map_err(unknown)?;
        if let Some(mount) = mounted.iter().find(|mount| is_its(mount)) {
            return Ok(Some(format!("{} is mounted", mount.at.display())));
        }
        let processes = runtime_dir::marked(&self.state).map_err(no_processes)?;
        let is_its = |found: &&runtime_dir::Marked| runtime_dir::name_of(&found.id) == name;
        Ok(processes.iter().find(is_its).map(|found| format!("its process {} is running", found.pid)))
    }

    /// Fails if a RAM disk beside `recorded` has processes or memory here. Its directory was there before them, so it was
    /// removed by somebody else.
    fn all_are_recorded(&self, recorded: &[RamDiskId]) -> Result<(), StartError> {
        let recorded: BTreeSet<String> = recorded.iter().map(ToString::to_string).collect();
        let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let processes = runtime_dir::marked(&self.state).map_err(no_processes)?;
        for process in processes.into_iter().filter(|process| !process.is_a_task()) {
            found
                .entry(process.id)
                .or_default()
                .push(format!("process {}, its {}", process.pid, process.role));
        }
        let unknown = |source| StartError::Unknown { path: "/proc/self/mountinfo".into(), source };
        for mount in mounts::mounted().map_err(unknown)? {
            // What a client shows is its servers'. Every other filesystem of this name was mounted by root.
            if let Some(id) = mount.source.strip_prefix("ondeck:").filter(|_| mount.kind == "tmpfs") {
                found.entry(id.to_owned()).or_default().push(format!("mounted at {}", mount.at.display()));
            }
        }
        match found.into_iter().find(|(id, _)| !recorded.contains(id)) {
            None => Ok(()),
            Some((id, uses)) => {
                let path = self.state.join("ramdisks").join(runtime_dir::name_of(&id));
                Err(StartError::Unrecorded { id, use_of_it: uses.join(", "), path })
            }
        }
    }

    /// A directory without a record, of which nothing is mounted or running: the agent ended before it wrote one, or after
    /// it had removed it.
    fn remove_unknown(&self, dir: &Path) {
        tracing::warn!(place = %dir.display(), "removing a place without a record");
        let Some(name) = dir.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok())
        else {
            return tracing::error!(place = %dir.display(), "not the name of a RAM disk; left alone");
        };
        let removed = RuntimeDir::open(&self.state, RamDiskId { name, epoch: Epoch(0) })
            .map_err(|error| EngineError::io("open", dir, error))
            .and_then(|runtime_dir| ramdisk::forget(&runtime_dir));
        if let Err(error) = removed {
            tracing::error!(place = %dir.display(), %error, "can't remove it");
        }
    }
}

fn no_processes(source: std::io::Error) -> StartError {
    StartError::Unknown { path: "/proc".into(), source }
}
