//! Bringing results home from a RAM disk: the directories on disk become what the job made of them, without losing what
//! others wrote there.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;

use ondeck_api::wire::JobDirectory;
use ondeck_core::PackFormat;
use ondeck_transfer::merge::Side;
use ondeck_transfer::pack::{self, PackError, PackOptions};
use ondeck_transfer::survey::{Descend, survey};
use ondeck_transfer::{
    Event, Exclude, Monitor, Options, Ownership, Roots, TargetRoot, Whereabouts, closed_by_another,
    stage_roots, whereabouts,
};
use rustix::fs::{AtFlags, FileType, Mode, Stat};
use rustix::io::Errno;

use super::worker::{OpenDirectory, SETTLED, Worker, entries, failed_for_room, is_no_room};
use super::{Failure, kept};
use crate::merge_back::journal::{self, Journal, OpenedUp};
use crate::merge_back::{Baseline, Before, Mechanism, MergeBack};
use crate::slot::Slot;

/// The umask for an archive of results. Nobody knows the user's here, and an archive shows what is in it to all who can
/// read it, whatever modes the files have: it is its owner's alone.
const ARCHIVE_UMASK: Mode = Mode::RWXG.union(Mode::RWXO);

impl Worker<'_> {
    /// Merges every output directory into the one on disk. A failure of one does not keep the others from it.
    pub fn bring_home(
        &self,
        directories: &[JobDirectory],
        script: Option<&Path>,
        pack: Option<PackFormat>,
    ) -> Result<Option<String>, Failure> {
        // This node may have filled the RAM disk a moment ago. A file that looks as it was then is not brought home, so
        // nothing that was seen then may be believed now.
        std::thread::sleep(self.order.out_of_date + SETTLED);
        // Inputs are opened too, as they may lie inside of outputs; but they may have gone since.
        let opened =
            self.open_chosen(directories, |directory| directory.output || directory.path.is_dir())?;
        let scripted = script.and_then(|_| directories.iter().find(|directory| directory.output));
        let is_scripted = |directory: &OpenDirectory<'_>| {
            scripted.is_some_and(|scripted| scripted.name == directory.wanted.name)
        };
        let mut failures: Vec<Failure> = Vec::new();
        for directory in opened.iter().filter(|directory| directory.wanted.output && !is_scripted(directory))
        {
            failures.extend(self.one_home(directory, pack).err());
        }
        // Last, because its processes live until the end of the task, and once the others are safe.
        if let (true, Some(script)) = (failures.is_empty(), script)
            && let Some(directory) = opened.iter().find(|directory| is_scripted(directory))
        {
            failures.extend(self.home_by_script(directory, script).err());
        }
        none_of(failures)?;
        self.check_gate()?;
        Ok(self.summary())
    }

    /// Merges what this node's own server has into the directories on disk, where nothing is replaced or deleted.
    pub fn salvage(&self, directories: &[JobDirectory]) -> Result<Option<String>, Failure> {
        let opened =
            self.open_chosen(directories, |directory| directory.output || directory.path.is_dir())?;
        let outputs = opened.iter().filter(|directory| directory.wanted.output);
        none_of(outputs.filter_map(|directory| self.one_home(directory, None).err()).collect())?;
        Ok(self.summary())
    }

    /// What the user should know of a success.
    fn summary(&self) -> Option<String> {
        let (beside, kept) = (self.put_beside(), self.findings.kept.load(Relaxed));
        let mut notes = Vec::new();
        if beside > 0 {
            notes.push(format!(
                "{} had been changed on disk by somebody else; theirs is kept, the job's is beside it as NAME.ondeck-{}",
                entries(beside),
                self.order.request.label()
            ));
        }
        if kept > 0 {
            notes.push(format!(
                "{} that the job had deleted is kept, because somebody else had changed it on disk",
                entries(kept)
            ));
        }
        let gone = self.findings.gone.load(Relaxed);
        if gone > 0 {
            notes.push(format!("{} can't be read any more", entries(gone)));
        }
        let (left, first) = self.left_behind();
        if left > 0 {
            let more = if left > first.len() as u64 { ", ..." } else { "" };
            notes.push(format!(
                "{} of other users, which {} can't read, left behind: {}{more}",
                entries(left),
                self.user.name,
                first.join(", ")
            ));
        }
        (!notes.is_empty()).then(|| notes.join("; "))
    }

    fn one_home(&self, directory: &OpenDirectory<'_>, pack: Option<PackFormat>) -> Result<(), Failure> {
        let path = directory.path.display();
        let slot = match Slot::of_task(directory.wanted).open(&self.ram) {
            Ok(slot) => slot,
            // Nothing was ever shown to the job.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // A job may have shut itself out.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let slot = Slot::of_task(directory.wanted).make(&self.ram);
                slot.map_err(|error| Failure::passing(format!("the results of {path}: {error}")))?
            }
            Err(error) => return Err(Failure::passing(format!("the results of {path}: {error}"))),
        };
        let done = match pack {
            Some(format) => self.pack_home(directory, &slot, format),
            None => self.copy_home(directory, slot),
        };
        self.confirm_place(directory).and(done)
    }

    /// Whether the path still leads to the directory that was written to. If not, the next try opens what is there then.
    fn confirm_place(&self, directory: &OpenDirectory<'_>) -> Result<(), Failure> {
        match whereabouts(&directory.path, directory.disk.as_fd()) {
            Ok(Whereabouts::InPlace) => Ok(()),
            Ok(now) => Err(Failure::passing(format!(
                "{}: {now}, while the results were brought home; they are brought to what is at this path",
                directory.path.display()
            ))),
            Err(error) => Err(Failure::passing(format!(
                "{}: can't see whether this is still the directory that the results went to: {error}",
                directory.path.display()
            ))),
        }
    }

    /// What is known of a directory from when it was filled, and that no other user has put one of theirs in its place: they
    /// would read and replace whatever comes into it.
    fn recall(&self, directory: &OpenDirectory<'_>) -> Result<kept::Filled, Failure> {
        let path = directory.path.display();
        let salvage = self.order.request.work.is_salvage();
        // The notes are on one of the servers; without them everything on disk counts as somebody else's.
        let filled = if salvage { salvaged(directory) } else { kept::recall(&directory.wanted.name) };
        let filled = filled.map_err(|error| {
            Failure::passing(format!("what is kept of {path} in the RAM disk can't be read: {error}"))
        })?;
        let disk = rustix::fs::fstat(&directory.disk);
        let disk = disk.map_err(|error| Failure::passing(format!("{path}: {error}")))?;
        if filled.baseline.is_anothers_top(&disk) {
            return Err(Failure::lasting(format!(
                "{path}: another user (uid {}) has put a directory of theirs in place of the one that the job had; have it \
                 moved away and the job's put back, or make one, then `ondeck job retry {}{}`",
                disk.st_uid,
                if salvage { "--salvage " } else { "" },
                self.order.request.name()
            )));
        }
        Ok(filled)
    }

    fn copy_home(&self, directory: &OpenDirectory<'_>, slot: OwnedFd) -> Result<(), Failure> {
        let path = directory.path.display();
        let name = &directory.wanted.name;
        let salvage = self.order.request.work.is_salvage();
        let filled = self.recall(directory)?;
        if filled.mechanism == Mechanism::Bind
            && filled.ours.is_empty()
            && is_empty(&slot)
            && filled.baseline.is_top_as_shown(slot.as_fd()).is_ok_and(|same| same)
        {
            return Ok(());
        }
        let (id, nested) = (self.order.request.label().to_owned(), directory.nested.clone());
        let mut merge_back = MergeBack::new(filled.mechanism, filled.since, filled.baseline, id, nested);
        merge_back.ours = Mutex::new(filled.ours);
        merge_back.salvage = salvage;
        merge_back.loosened = self.loosened.clone();
        let left_out = self.left_out(directory, &[&slot, &directory.disk])?;
        let manifest = match &self.order.request.share {
            _ if salvage => kept::manifest_aside(name),
            Some(share) if !share.all_but => kept::manifest_out(&format!("{name}-{}", share.index)),
            _ => kept::manifest_out(name),
        };
        let options = Options {
            exclude: Exclude::exactly(left_out),
            // What the policy allows is removed, and nothing else.
            delete: true,
            recheck: true,
            // Nobody but root could bring it, and no results are brought by root.
            leave_others: true,
            ownership: if rustix::process::geteuid().is_root() {
                Ownership::Preserve
            } else {
                Ownership::Inherit
            },
            manifest: Some(manifest),
            ..self.options()
        };
        let failed_before = self.failures().0;
        let event = |event: Event<'_>| {
            if let Event::Kept(path) = &event
                && merge_back.was_there(path)
            {
                self.findings.kept.fetch_add(1, Relaxed);
            }
            self.note(&directory.path, &event);
        };
        let target = rustix::io::fcntl_dupfd_cloexec(&directory.disk, 0);
        let target = target.map_err(|error| Failure::passing(format!("{path}: {error}")))?;
        let roots = Roots {
            source: slot,
            target: TargetRoot::Existing(target),
            source_path: self.slot_path(directory.wanted),
            target_path: directory.path.clone(),
        };
        self.findings.full.store(false, Relaxed);
        let monitor = Monitor { progress: &self.shared.progress, event: &event };
        let copied = stage_roots(roots, &options, Some(&merge_back), &monitor);
        let failed = self.failures().0 - failed_before;
        if self.findings.full.load(Relaxed) || copied.as_ref().is_err_and(failed_for_room) {
            return Err(self.no_room(directory, failed));
        }
        match copied {
            Ok(_) if failed == 0 => Ok(()),
            Ok(_) => {
                // If it is the RAM disk that fails, nothing has to be mended on disk.
                self.check_gate()?;
                Err(Failure::lasting(format!(
                    "{path}: {} of the results could not be written: {}; mend it, then `ondeck job retry {}`",
                    entries(failed),
                    self.failures().1,
                    self.order.request.name()
                )))
            }
            Err(error) => Err(Failure::passing(format!("bringing home {path}: {error}"))),
        }
    }

    /// Words for a disk that is full.
    fn no_room(&self, directory: &OpenDirectory<'_>, failed: u64) -> Failure {
        let how_many = if failed > 0 {
            format!("; {} of the results wait in RAM", entries(failed))
        } else {
            String::new()
        };
        Failure::passing(format!(
            "{}: there is no room left on disk{how_many}; make room, then `ondeck job retry {}` goes on",
            directory.path.display(),
            self.order.request.name()
        ))
    }

    /// Packs a directory's results into an archive in the directory on disk: `results-JOB.tar` or `results-JOB.tar.zst`.
    fn pack_home(
        &self,
        directory: &OpenDirectory<'_>,
        slot: &OwnedFd,
        format: PackFormat,
    ) -> Result<(), Failure> {
        let path = directory.path.display();
        if is_empty(slot) {
            return Ok(());
        }
        self.recall(directory)?;
        let opened = RefCell::new(Vec::new());
        let packed = self.open_up(directory, slot, &opened).and_then(|()| {
            let modes = opened.borrow().iter().map(|entry: &OpenedUp| (entry.inode, entry.mode)).collect();
            self.pack_opened(directory, slot, format, modes)
        });
        let shut = opened.borrow().iter().rev().try_for_each(|entry| entry.shut(slot.as_fd()));
        let shut = shut.and_then(|()| forget_opened(&kept::opened(&directory.wanted.name)));
        let shut = shut.map_err(|error| {
            Failure::passing(format!(
                "giving the results of {path} their modes back in the RAM disk: {error}"
            ))
        });
        packed.and(shut)
    }

    /// Makes what its mode shuts its owner out of readable for the packing, and removes what no archive can hold.
    fn open_up(
        &self,
        directory: &OpenDirectory<'_>,
        slot: &OwnedFd,
        opened: &RefCell<Vec<OpenedUp>>,
    ) -> Result<(), Failure> {
        let failed = |error: io::Error, within: &[u8]| {
            let path = directory.path.join(OsStr::from_bytes(within));
            Failure::passing(format!("the results of {}: {error}", path.display()))
        };
        let note = kept::opened(&directory.wanted.name);
        // What a task that was killed has left open.
        let is_note = std::fs::symlink_metadata(&note).is_ok_and(|note| note.is_file());
        // The job could have put anything in its place, which says nothing.
        let left = if is_note { journal::recall(&note).ok().flatten() } else { None };
        let _ = forget_opened(&note).and_then(|()| forget_opened(&note.with_extension("partial")));
        for entry in left.iter().flat_map(|left| left.opened_up.iter().rev()) {
            entry.shut(slot.as_fd()).map_err(|error| failed(error, &entry.path))?;
        }
        let mut journal = None;
        let mut open = |path: &[u8], stat: &Stat| -> io::Result<Option<Mode>> {
            let Some(entry) = OpenedUp::needed(path, stat) else { return Ok(None) };
            if journal.is_none() {
                journal = Some(Journal::begin(&note, Mechanism::Bind, (0, 0))?);
            }
            if let Some(journal) = &journal {
                journal.opening_up(Side::Source, path, entry.inode, entry.mode);
            }
            let mode = entry.open_mode();
            opened.borrow_mut().push(entry);
            Ok(Some(mode))
        };
        let top = rustix::fs::fstat(slot).map_err(|error| failed(error.into(), b""))?;
        if let Some(mode) = open(b"", &top).map_err(|error| failed(error, b""))? {
            rustix::fs::fchmod(slot, mode).map_err(|error| failed(error.into(), b""))?;
        }
        // An archive can't hold sockets, and nobody listens on them any more.
        let us = rustix::process::geteuid().as_raw();
        let seen = survey(slot.as_fd(), &mut |visit| {
            if let Some(mode) = open(visit.path, visit.stat)? {
                // Neither is a symlink, and the job has ended, so that nobody can put one there.
                rustix::fs::chmodat(visit.dir, visit.name, mode, AtFlags::empty())?;
            }
            if FileType::from_raw_mode(visit.stat.st_mode) == FileType::Socket {
                match rustix::fs::unlinkat(visit.dir, visit.name, AtFlags::empty()) {
                    // The packer leaves it behind.
                    Err(Errno::ACCESS | Errno::PERM) if visit.stat.st_uid != us => {}
                    removed => removed?,
                }
            }
            // And what others have closed.
            let is_theirs = FileType::from_raw_mode(visit.stat.st_mode) == FileType::Directory
                && visit.stat.st_uid != us
                && closed_by_another(visit.dir, visit.name).is_some();
            Ok(if is_theirs { Descend::No } else { Descend::Yes })
        });
        seen.map_err(|(path, error)| failed(error, &path))
    }

    fn pack_opened(
        &self,
        directory: &OpenDirectory<'_>,
        slot: &OwnedFd,
        format: PackFormat,
        modes: HashMap<u64, u32>,
    ) -> Result<(), Failure> {
        let path = directory.path.display();
        let name = CString::new(format!("results-{}.{format}", self.order.request.label()));
        let name = name.map_err(|error| Failure::lasting(error.to_string()))?;
        let failed_before = self.failures().0;
        let event = |event: Event<'_>| self.note(&directory.path, &event);
        let monitor = Monitor { progress: &self.shared.progress, event: &event };
        let options =
            PackOptions { umask: ARCHIVE_UMASK, leave_others: true, modes, ..PackOptions::default() };
        let packed = pack::pack(slot.as_fd(), directory.disk.as_fd(), &name, format, &options, &monitor);
        let failed = self.failures().0 - failed_before;
        match packed {
            Ok(_) if failed == 0 => self.check_gate(),
            Ok(_) => {
                self.check_gate()?;
                Err(Failure::lasting(format!(
                    "{path}: {} of the results could not be packed: {}; mend it, then `ondeck job retry {}`",
                    entries(failed),
                    self.failures().1,
                    self.order.request.name()
                )))
            }
            Err(PackError::Write { source, .. } | PackError::Sync { source, .. }) if is_no_room(&source) => {
                Err(self.no_room(directory, 0))
            }
            Err(error) => Err(Failure::passing(format!("packing the results of {path}: {error}"))),
        }
    }

    fn home_by_script(&self, directory: &OpenDirectory<'_>, script: &Path) -> Result<(), Failure> {
        self.recall(directory)?;
        let ram = self.slot_path(directory.wanted);
        self.run_script("stage-out", script, &ram, &directory.path)?;
        rustix::fs::syncfs(&directory.disk).map_err(|error| {
            let error: io::Error = error.into();
            if is_no_room(&error) {
                return self.no_room(directory, 0);
            }
            Failure::passing(format!("{}: the disk failed to sync: {error}", directory.path.display()))
        })?;
        self.confirm_place(directory)
    }
}

/// What is known of a directory on one server alone. Where nothing is, no directory counts as the one that the job had: another
/// user's gets nothing then, and the job's user's own gets all.
fn salvaged(directory: &OpenDirectory<'_>) -> io::Result<kept::Filled> {
    match kept::recall_top(&directory.wanted.name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let before = Before::of_top(0);
            Ok(kept::Filled { baseline: Baseline::of_disk(before.into()), ..kept::nothing() })
        }
        filled => filled,
    }
}

fn forget_opened(note: &Path) -> io::Result<()> {
    match std::fs::remove_file(note) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// All failures as one.
fn none_of(failures: Vec<Failure>) -> Result<(), Failure> {
    if failures.is_empty() {
        return Ok(());
    }
    Err(Failure {
        // Only if nothing stands in the way that does not pass by itself.
        retryable: failures.iter().all(|failure| failure.retryable),
        message: failures.into_iter().map(|failure| failure.message).collect::<Vec<_>>().join("\n"),
    })
}

fn is_empty(directory: &OwnedFd) -> bool {
    let mut is_empty = true;
    let seen = survey(directory.as_fd(), &mut |_| {
        is_empty = false;
        Err(io::ErrorKind::Interrupted.into())
    });
    seen.is_ok() && is_empty
}
