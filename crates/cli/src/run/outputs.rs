//! The outputs of a run in the RAM disk: making them, and finding those that a killed keeper has left.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use anyhow::Result;
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_staging::Slot;
use ondeck_staging::merge_back::journal::{self, Journal};
use ondeck_staging::merge_back::{Baseline, Before, Mechanism, MergeBack, remove_marks};
use ondeck_transfer::merge::Side;
use ondeck_transfer::survey::{Descend, survey};
use rustix::fs::Mode;

use super::places::{baseline_path, journal_path, staged_path, work_name};
use super::shared::{Output, Shared, lock};

impl Shared {
    pub fn make_slot(&self, namespaces: &Namespaces, index: usize) -> Result<OwnedFd> {
        let slot = Slot::of_run(index);
        rustix::fs::mkdirat(&namespaces.ram_disk, slot.name(), Mode::RWXU)?;
        let slot = slot.open(&namespaces.ram_disk)?;
        // The program sees the directory's own owner, mode and ACL; what the user may not give away stays theirs.
        let _ = ondeck_transfer::copy_directory_attributes(
            self.plan.directories[index].disk.as_fd(),
            slot.as_fd(),
        );
        Ok(slot)
    }

    /// Makes the directory in RAM that the program will write to.
    pub fn prepare_output(
        &self,
        namespaces: &Namespaces,
        index: usize,
        mechanism: Mechanism,
        since: (i64, i64),
        before: Arc<Before>,
    ) -> Result<Output> {
        let directory = &self.plan.directories[index];
        let slot = Slot::of_run(index);
        let mut staged = None;
        let ram = match mechanism {
            Mechanism::Mirror => {
                let ram = slot.open(&namespaces.ram_disk)?;
                staged = Some(staged_path(&self.dir, index)).filter(|path| path.exists());
                ram
            }
            Mechanism::Overlay => {
                rustix::fs::mkdirat(&namespaces.ram_disk, work_name(index), Mode::RWXU)?;
                let ram = self.make_slot(namespaces, index)?;
                remove_marks(ram.as_fd())?;
                ram
            }
            Mechanism::Bind | Mechanism::Disk => self.make_slot(namespaces, index)?,
        };
        let baseline = match (mechanism, &staged) {
            (Mechanism::Mirror, None) => Baseline::default(),
            _ => Baseline::of(ram.as_fd(), staged.as_deref(), before)?,
        };
        // For one who takes over, and so before the program can change anything.
        baseline.write(&baseline_path(&self.dir, index))?;
        let journal = Journal::begin(&journal_path(&self.dir, index), mechanism, since)?;
        let mut merge_back =
            MergeBack::new(mechanism, since, baseline, self.id.clone(), directory.nested.clone());
        merge_back.loosened = self.loosened.clone();
        merge_back.journal = Some(journal);
        Ok(Output {
            directory: index,
            ram,
            slot,
            merge_back,
            home: AtomicBool::new(false),
            detached: AtomicBool::new(false),
        })
    }

    /// An output as a keeper that was killed has left it; none if the program was never shown it.
    pub fn recall_output(&self, namespaces: &Namespaces, index: usize) -> io::Result<Option<Output>> {
        let path = journal_path(&self.dir, index);
        let Some(recalled) = journal::recall(&path)? else { return Ok(None) };
        let slot = Slot::of_run(index);
        let ram = self.open_any_slot(namespaces, index)?;
        self.loosened.recall(recalled.loosened);
        // The other way round than they were opened: what is in a directory before the directory.
        for opened in recalled.opened_up.iter().rev() {
            let root = if opened.side == Side::Source { &ram } else { &self.plan.directories[index].disk };
            opened.shut(root.as_fd())?;
        }
        let baseline = Baseline::read(&baseline_path(&self.dir, index))?;
        let nested = self.plan.directories[index].nested.clone();
        let mut merge_back =
            MergeBack::new(recalled.mechanism, recalled.since, baseline, self.id.clone(), nested);
        merge_back.ours = Mutex::new(recalled.ours);
        merge_back.made = Mutex::new(recalled.made);
        merge_back.loosened = self.loosened.clone();
        merge_back.entered = Mutex::new(recalled.entered);
        merge_back.journal = Some(Journal::go_on(&path)?);
        Ok(Some(Output {
            directory: index,
            ram,
            slot,
            merge_back,
            home: AtomicBool::new(recalled.home),
            detached: AtomicBool::new(recalled.detached),
        }))
    }

    /// Opens an output's directory in RAM also if the program has given it a mode that shuts out its owner.
    fn open_any_slot(&self, namespaces: &Namespaces, index: usize) -> io::Result<OwnedFd> {
        let slot = Slot::of_run(index);
        match slot.open(&namespaces.ram_disk) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            other => return other,
        }
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        let stat = rustix::fs::statat(&namespaces.ram_disk, slot.name(), flags)?;
        let mode = stat.st_mode & 0o7777;
        Journal::go_on(&journal_path(&self.dir, index))?.opening_up(Side::Source, b"", stat.st_ino, mode);
        let chmod = |mode| {
            let mode = Mode::from_raw_mode(mode);
            rustix::fs::chmodat(&namespaces.ram_disk, slot.name(), mode, rustix::fs::AtFlags::empty())
        };
        // Only this process is left that could put anything else in its place.
        chmod(mode | 0o700)?;
        let opened = slot.open(&namespaces.ram_disk);
        chmod(mode)?;
        opened
    }

    /// An output of which nothing is known but its results.
    pub fn output_of_nothing(&self, namespaces: &Namespaces, index: usize) -> io::Result<Output> {
        let (directory, slot) = (&self.plan.directories[index], Slot::of_run(index));
        let baseline = Baseline::of_disk(directory.before.clone());
        let (mechanism, nested) = (directory.mechanism, directory.nested.clone());
        let mut merge_back = MergeBack::new(mechanism, directory.since, baseline, self.id.clone(), nested);
        merge_back.loosened = self.loosened.clone();
        Ok(Output {
            directory: index,
            ram: self.open_any_slot(namespaces, index)?,
            slot,
            merge_back,
            home: AtomicBool::new(false),
            detached: AtomicBool::new(false),
        })
    }

    /// The files that were written last, newest first.
    pub fn latest_files(&self) -> Vec<String> {
        let mut latest: Vec<((i64, i64), String)> = Vec::new();
        for output in lock(&self.outputs).iter() {
            let directory = &self.plan.directories[output.directory];
            let _ = survey(output.ram.as_fd(), &mut |visit| {
                if visit.stat.st_mode & 0o170_000 == 0o100_000 {
                    let path = directory.path.join(std::ffi::OsStr::from_bytes(visit.path));
                    let time = (visit.stat.st_mtime, visit.stat.st_mtime_nsec as i64);
                    latest.push((time, path.display().to_string()));
                    latest.sort_by(|a, b| b.cmp(a));
                    latest.truncate(3);
                }
                Ok(Descend::Yes)
            });
        }
        latest.into_iter().map(|(_, path)| path).collect()
    }
}

/// Bytes of the regular files below a directory.
pub fn used_below(dir: &OwnedFd) -> Option<u64> {
    let mut bytes = 0;
    survey(dir.as_fd(), &mut |visit| {
        if visit.stat.st_mode & 0o170_000 == 0o100_000 {
            bytes += visit.stat.st_size as u64;
        }
        Ok(Descend::Yes)
    })
    .ok()?;
    Some(bytes)
}
