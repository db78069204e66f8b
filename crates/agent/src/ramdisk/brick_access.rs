//! Access to the brick, which is what this node's own server has of a RAM disk, whatever became of the others: its files
//! by name, and saving them.
//!
//! It is read from the server's device and not through a client, which would show a part of the files, or fail, once
//! another server is lost. That takes an engine that has each file whole on one server.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use ondeck_api::wire::Inventory;
use ondeck_core::text::plain;
use ondeck_core::{Bytes, EngineKind};
use ondeck_ramdisk::EngineError;
use ondeck_ramdisk::engine::{DATA, DATA_DEVICE};
use ondeck_transfer::survey::{Descend, survey};
use rustix::fs::{FileType, Mode, OFlags};

use super::RamDisk;
use crate::task::{Task, TaskOrder};

/// The most names that are told.
const MOST_NAMES: usize = 10_000;

/// The most bytes of names that are told: an answer has a limit, and a journal keeps them.
const MOST_TEXT: usize = 512 << 10;

/// The longest name of a file, with its path, that is told in full.
const LONGEST: usize = 4096;

/// Gluster's mark that a file is on another server: a name, mode 1000, no byte.
const LINK_TO: u32 = 0o1000;

impl RamDisk {
    /// The owner's directory on this node's brick.
    fn brick_data(&self) -> Result<PathBuf, EngineError> {
        let record = self.record();
        let (id, engine) = (self.id(), record.layout.engine);
        if !matches!(engine, EngineKind::Gluster | EngineKind::Tmpfs) {
            let text =
                format!("a node has parts of all files of {id}, whose engine is {engine}, and no whole ones");
            return Err(EngineError::Refused(text));
        }
        let device = self.runtime_dir.path(DATA_DEVICE);
        if !record.server || self.mounts_at(&device)?.is_empty() {
            return Err(EngineError::Refused(format!("nothing of {id} is stored on this node")));
        }
        Ok(device.join(DATA))
    }

    /// The files that this node's own server has of some directories: the first names, and how many there are.
    ///
    /// # Errors
    /// If it stores nothing of it, or it can't be read.
    pub fn inventory(&self, slots: &[&str]) -> Result<Inventory, EngineError> {
        let data = self.brick_data()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (mut found, mut room) = (Inventory::default(), MOST_TEXT);
        for slot in slots {
            let path = data.join(slot);
            let root = match rustix::fs::open(&path, flags, Mode::empty()) {
                Ok(root) => root,
                Err(rustix::io::Errno::NOENT) => continue,
                Err(error) => return Err(EngineError::io("open", &path, error)),
            };
            let seen = survey(root.as_fd(), &mut |visit| {
                if self.runtime_dir.is_given_up() {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
                let stat = visit.stat;
                let kind = FileType::from_raw_mode(stat.st_mode);
                let elsewhere =
                    kind == FileType::RegularFile && stat.st_size == 0 && stat.st_mode & 0o7777 == LINK_TO;
                if kind == FileType::Directory || elsewhere {
                    return Ok(Descend::Yes);
                }
                found.files += 1;
                found.bytes = found.bytes.saturating_add(Bytes(stat.st_size as u64));
                let name = format!("{slot}/{}", plain(&String::from_utf8_lossy(visit.path), LONGEST));
                if found.names.len() < MOST_NAMES && name.len() <= room {
                    room -= name.len();
                    found.names.push(name);
                }
                Ok(Descend::Yes)
            });
            seen.map_err(|(_, error)| EngineError::io("read", &path, error))?;
        }
        found.names.sort_unstable();
        Ok(found)
    }

    /// Starts a task that sees what this node's own server has, and no client.
    ///
    /// # Errors
    /// If it stores nothing of it, or the task can't be started.
    pub fn start_salvage(
        &self,
        name: &str,
        order: impl FnOnce(PathBuf) -> TaskOrder,
    ) -> Result<Arc<Task>, EngineError> {
        let data = self.brick_data()?;
        self.tasks
            .find_or_start(name, &self.runtime_dir, || Task::start(name, &self.runtime_dir, &order(data)))
    }
}
