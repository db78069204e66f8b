//! Filling a RAM disk with what the job shall see.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use ondeck_api::wire::{JobDirectory, TaskWork};
use ondeck_core::Bytes;
use ondeck_transfer::survey::{Descend, survey};
use ondeck_transfer::{Event, Exclude, Monitor, Options, Roots, StageError, TargetRoot, stage_roots};

use super::worker::{OpenDirectory, Worker, entries, failed_for_room, is_no_room};
use super::{Failure, kept};
use crate::merge_back::{Before, clock_of};
use crate::mount_point::make_mount_point;
use crate::slot::Slot;

/// Threads that copy what has changed since the last time.
const ROUND_THREADS: usize = 8;

impl Worker<'_> {
    /// Puts every directory's content into the RAM disk.
    pub fn fill(
        &self,
        directories: &[JobDirectory],
        script: Option<&Path>,
    ) -> Result<Option<String>, Failure> {
        let opened = self.open_all(directories)?;
        if self.has_a_part() {
            // What is output, too, needs notes of every file, and is filled by one task.
            for directory in opened.iter().filter(|directory| !directory.wanted.output) {
                self.copy_in(&opened, directory, None)?;
            }
            self.check_gate()?;
            return Ok(None);
        }
        let no_notes = |error: io::Error| self.ram_failure(&opened, "its notes", &error);
        kept::prepare().map_err(no_notes)?;
        let scripted = script.and_then(|_| opened.iter().position(|directory| directory.wanted.input));
        let (mut before, mut again) = (Vec::new(), Vec::new());
        for directory in &opened {
            // It may have been filled before: what changed at that very moment is not known to be copied.
            again.push(kept::since(&directory.wanted.name).map(a_tick_before));
            kept::forget(&directory.wanted.name).map_err(no_notes)?;
            before.push(if directory.wanted.output { Some(self.before(directory)?) } else { None });
        }
        for (index, directory) in opened.iter().enumerate() {
            if Some(index) != scripted {
                self.copy_in(&opened, directory, again[index])?;
            }
        }
        // Last, because its processes live until the end of the task.
        if let (Some(index), Some(script)) = (scripted, script) {
            self.fill_by_script(&opened, &opened[index], script)?;
        }
        for (index, directory) in opened.iter().enumerate() {
            let name = &directory.wanted.name;
            let slot = Slot::of_task(directory.wanted).open(&self.ram);
            let slot = slot.map_err(|error| self.ram_failure(&opened, name, &error))?;
            for nested in &directory.nested {
                make_mount_point(&slot, nested).map_err(|error| self.ram_failure(&opened, name, &error))?;
            }
            // The job sees the directory's own mode, times and ACL; what the user may not give away stays theirs.
            let _ = ondeck_transfer::copy_directory_attributes(directory.disk.as_fd(), slot.as_fd());
            if let Some((since, before)) = before[index].take() {
                let mirror = Some(index) != scripted;
                kept::remember(name, &slot, since, mirror, before).map_err(no_notes)?;
            }
        }
        self.check_gate()?;
        Ok(None)
    }

    /// The time by the clock of a directory's filesystem: what changes there later is somebody else's doing.
    fn clock(&self, directory: &OpenDirectory<'_>) -> Result<(i64, i64), Failure> {
        clock_of(directory.disk.as_fd()).map_err(|error| {
            let path = directory.path.display();
            if is_no_room(&error) {
                return Failure::passing(format!("{path}: there is no room left for results: {error}"));
            }
            Failure::lasting(format!(
                "{path}: {} can't write there: {error}; change its mode, or correct #RSA_DATA_OUT",
                self.user.name
            ))
        })
    }

    /// What has to be known of an output directory as it was before it is copied.
    fn before(&self, directory: &OpenDirectory<'_>) -> Result<((i64, i64), Before), Failure> {
        let since = self.clock(directory)?;
        if self.is_moving() {
            // Names come and go; it is looked at when they don't.
            return Ok((since, Before::default()));
        }
        let before =
            Before::in_short(directory.disk.as_fd(), &directory.nested).map_err(|(path, error)| {
                let path = directory.path.join(std::ffi::OsStr::from_bytes(&path));
                Failure::lasting(format!(
                    "{}: can't be read: {error}; {} must be able to read all of {}",
                    path.display(),
                    self.user.name,
                    directory.path.display()
                ))
            })?;
        Ok((since, before))
    }

    fn copy_in(
        &self,
        all: &[OpenDirectory<'_>],
        directory: &OpenDirectory<'_>,
        again_from: Option<(i64, i64)>,
    ) -> Result<(), Failure> {
        let name = &directory.wanted.name;
        let slot = Slot::of_task(directory.wanted);
        let slot = if self.has_a_part() { slot.open(&self.ram) } else { slot.make(&self.ram) };
        let slot = slot.map_err(|error| self.ram_failure(all, name, &error))?;
        let mut left_out = directory.nested.clone();
        left_out.extend(self.left_out(directory, &[&directory.disk])?);
        let options = Options {
            // It becomes a copy: what an earlier attempt has found, and is gone by now, goes. But what others are just
            // putting there stays.
            delete: !self.has_a_part(),
            // The job is shown it when it is done.
            unseen: true,
            again_from,
            // Small files over a network are waited for, not computed.
            threads: if again_from.is_some() { ROUND_THREADS } else { 0 },
            // The copies in RAM are the user's alone.
            attributes_best_effort: true,
            // RAM needs no sync. The manifest tells later what the job left as it was.
            sync: false,
            manifest: (!self.has_a_part()).then(|| kept::manifest_in(name)),
            exclude: Exclude::exactly(left_out),
            ..self.options()
        };
        let progress = &self.shared.progress;
        let event = |event: Event<'_>| {
            self.note(&directory.path, &event);
            if self.findings.full.load(Relaxed) {
                // The rest would not fit either.
                progress.cancel.store(true, Relaxed);
            }
        };
        let source = rustix::io::fcntl_dupfd_cloexec(&directory.disk, 0);
        let source =
            source.map_err(|error| Failure::passing(format!("{}: {error}", directory.path.display())))?;
        let roots = Roots {
            source,
            target: TargetRoot::Existing(slot),
            source_path: directory.path.clone(),
            target_path: self.slot_path(directory.wanted),
        };
        let copied = stage_roots(roots, &options, None, &Monitor { progress, event: &event });
        let full = self.findings.full.load(Relaxed) || copied.as_ref().is_err_and(failed_for_room);
        if full {
            return Err(self.too_small(all));
        }
        let path = directory.path.display();
        match copied {
            Ok(_) if self.failures().0 == 0 || self.is_moving() => Ok(()),
            Ok(_) => {
                // If it is the RAM disk that fails, nothing is wrong with the files.
                self.check_gate()?;
                let (number, first) = self.failures();
                Err(Failure::lasting(format!(
                    "{path}: {} could not be staged in: {first}; {} must be able to read all of it",
                    entries(number),
                    self.user.name
                )))
            }
            Err(error @ (StageError::Source { .. } | StageError::Mismatch(_))) => {
                Err(Failure::lasting(format!("staging in {path}: {error}")))
            }
            Err(error) => Err(Failure::passing(format!("staging in {path}: {error}"))),
        }
    }

    /// Whether the job changes the directories meanwhile: it is filled once more before it is shown.
    fn is_moving(&self) -> bool {
        matches!(self.order.request.work, TaskWork::Fill { moving: true, .. })
    }

    fn fill_by_script(
        &self,
        all: &[OpenDirectory<'_>],
        directory: &OpenDirectory<'_>,
        script: &Path,
    ) -> Result<(), Failure> {
        let name = &directory.wanted.name;
        let ram = self.slot_path(directory.wanted);
        // It begins with an empty directory each time.
        let emptied = Slot::of_task(directory.wanted).make(&self.ram).and_then(|_| empty(&ram));
        emptied.map_err(|error| self.ram_failure(all, name, &error))?;
        self.run_script("stage-in", script, &ram, &directory.path).map_err(|mut failure| {
            if let Ok(stat) = rustix::fs::fstatvfs(&self.ram)
                && stat.f_bavail * stat.f_frsize < 1 << 20
            {
                failure.message += &format!(
                    "; the RAM disk of {} is full: ask for more with #RSA_CAPACITY",
                    self.capacity()
                );
            }
            failure
        })
    }

    /// Words for the RAM disk's own failures.
    fn ram_failure(&self, all: &[OpenDirectory<'_>], what: &str, error: &io::Error) -> Failure {
        if is_no_room(error) {
            return self.too_small(all);
        }
        Failure::passing(format!(
            "{}: can't write `{what}` in the RAM disk {}: {error}",
            self.order.node, self.order.ramdisk
        ))
    }

    /// Words for a RAM disk that has no room for the directories.
    fn too_small(&self, all: &[OpenDirectory<'_>]) -> Failure {
        let mut needed = Bytes::ZERO;
        for directory in all {
            // As far as it can be read.
            let _ = survey(directory.disk.as_fd(), &mut |visit| {
                if directory.nested.iter().any(|nested| nested == visit.path) {
                    return Ok(Descend::No);
                }
                if visit.stat.st_mode & 0o170_000 == 0o100_000 {
                    needed = needed.saturating_add(Bytes(visit.stat.st_size as u64));
                }
                Ok(Descend::Yes)
            });
        }
        Failure::lasting(format!(
            "the RAM disk of {} is too small: the job's directories hold {needed}; {}",
            self.capacity(),
            remedy(needed, self.capacity())
        ))
    }
}

/// What helps where a RAM disk has no room for what directories hold.
fn remedy(needed: Bytes, capacity: Bytes) -> String {
    if needed >= capacity {
        format!("ask for more than {needed} with #RSA_CAPACITY, if the site has that much, or stage in less")
    } else {
        // Together they fit: a file lies on one RSA node, whose share is full.
        "one of its RSA nodes is full, as each file lies on one: ask for fewer nodes with #RSA_NODES, or for more with #RSA_CAPACITY"
            .to_owned()
    }
}

/// So much earlier that no tick of a filesystem's clock is in between. Where it counts seconds, so does the time.
fn a_tick_before((seconds, rest): (i64, i64)) -> (i64, i64) {
    const TICK: i64 = 20_000_000;
    if rest >= TICK { (seconds, rest - TICK) } else { (seconds - 1, rest + 1_000_000_000 - TICK) }
}

/// Removes what is in a directory of ours.
fn empty(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path: PathBuf = entry?.path();
        if !fs::symlink_metadata(&path)?.is_dir() {
            fs::remove_file(&path)?;
        } else if fs::remove_dir_all(&path).is_err() {
            open_up(&path)?;
            fs::remove_dir_all(&path)?;
        }
    }
    Ok(())
}

/// Makes all directories of a tree of ours writable.
fn open_up(directory: &Path) -> io::Result<()> {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700))?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_up(&entry.path())?;
        }
    }
    Ok(())
}
