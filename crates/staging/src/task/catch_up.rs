//! Catching up with the disk: a job that runs already has written to its output directories before the RAM disk was mounted
//! over them. What it wrote since the fill is hidden now, and is put where the job sees it.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard};

use ondeck_api::wire::JobDirectory;
use ondeck_transfer::checksum::{Checksum, Digest};
use ondeck_transfer::manifest;
use ondeck_transfer::merge::{DirectoryAction, EntryAction, EntryContext, MergePolicy};
use ondeck_transfer::{Event, Exclude, Monitor, Options, Roots, TargetRoot, stage_roots};
use rustix::fs::{AtFlags, FileType, Stat};

use super::worker::{OpenDirectory, SETTLED, Worker, entries, failed_for_room};
use super::{Failure, kept};
use crate::merge_back::{Linked, Moment, changed_at, key, parent_of};
use crate::slot::Slot;

/// Entries that a message names.
const NAMED: usize = 5;

/// What is said of all directories together.
#[derive(Default)]
struct CatchUpSummary {
    brought: u64,
    changed: u64,
    /// Some of those that had changed.
    names: Vec<String>,
}

impl CatchUpSummary {
    /// What the job's log is told; nothing if nothing was brought, has changed, or failed.
    fn in_words(&self, failed: u64, first: &str) -> Option<String> {
        let mut notes = Vec::new();
        if self.brought > 0 {
            notes.push(format!("{} that the job had written to disk brought", entries(self.brought)));
        }
        if self.changed > 0 {
            notes.push(format!(
                "{} changed on disk since they were copied into RAM, and are seen by the job as they were: {}",
                entries(self.changed),
                self.names.join(", ")
            ));
        }
        if failed > 0 {
            notes.push(format!("{} could not be brought, and stay on disk alone: {first}", entries(failed)));
        }
        (!notes.is_empty()).then(|| notes.join("; "))
    }
}

impl Worker<'_> {
    /// Copies what a running job has written to disk since the fill, and does not see any more.
    pub fn catch_up(&self, directories: &[JobDirectory]) -> Result<Option<String>, Failure> {
        // Nothing may be believed that this node saw of the RAM disk before the job could write to it.
        std::thread::sleep(self.order.out_of_date + SETTLED);
        // Inputs are opened too, as they may lie inside of outputs. What is not there has nothing to be copied.
        let opened = self.open_chosen(directories, |directory| directory.path.is_dir())?;
        let mut told = CatchUpSummary::default();
        for directory in &opened {
            if directory.wanted.output {
                self.catch_up_with(directory, &mut told)?;
            } else {
                self.look_at_input(directory, &mut told)?;
            }
        }
        self.check_gate()?;
        for name in told.names.iter().filter(|_| told.changed > 0) {
            self.tell_error(format!("{name}: the job sees it as it was before it changed on disk"));
        }
        let (failed, first) = self.failures();
        Ok(told.in_words(failed, &first))
    }

    /// Counts what is newer on disk than the copy that the job reads, or is not there. Input is not written to once the
    /// job has started.
    fn look_at_input(&self, directory: &OpenDirectory<'_>, told: &mut CatchUpSummary) -> Result<(), Failure> {
        let path = directory.path.display();
        let io = |error| Failure::passing(format!("the copy of {path} in the RAM disk: {error}"));
        let slot = Slot::of_task(directory.wanted).open(&self.ram).map_err(io)?;
        let options = Options {
            dry_run: true,
            update: true,
            sync: false,
            exclude: Exclude::exactly(directory.nested.clone()),
            ..self.options()
        };
        let roots = Roots {
            source: directory.disk.try_clone().map_err(io)?,
            target: TargetRoot::Existing(slot),
            source_path: directory.path.clone(),
            target_path: self.slot_path(directory.wanted),
        };
        let changed = Mutex::new((0_u64, Vec::new()));
        let event = |event: Event<'_>| {
            if let Event::Would(_, path) = event {
                let mut changed = changed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                changed.0 += 1;
                if changed.1.len() < NAMED {
                    changed.1.push(directory.path.join(OsStr::from_bytes(path)).display().to_string());
                }
            }
        };
        let monitor = Monitor { progress: &self.shared.progress, event: &event };
        stage_roots(roots, &options, None, &monitor)
            .map_err(|error| Failure::passing(format!("looking at {path}: {error}")))?;
        let (number, names) = changed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        told.changed += number;
        told.names.extend(names);
        told.names.truncate(NAMED);
        Ok(())
    }

    fn catch_up_with(&self, directory: &OpenDirectory<'_>, told: &mut CatchUpSummary) -> Result<(), Failure> {
        let path = directory.path.display();
        let name = &directory.wanted.name;
        let unreadable = |error| {
            Failure::passing(format!("what is kept of {path} in the RAM disk can't be read: {error}"))
        };
        let filled = kept::recall(name).map_err(unreadable)?;
        if filled.since.0 == i64::MIN {
            return Err(Failure::passing(format!("{path}: the RAM disk was not filled from it")));
        }
        let io = |error| Failure::passing(format!("the copy of {path} in the RAM disk: {error}"));
        let slot = Slot::of_task(directory.wanted).open(&self.ram).map_err(io)?;
        let target = slot.try_clone().map_err(io)?;
        let source = directory.disk.try_clone().map_err(io)?;
        let manifest = kept::manifest_later(name);
        let options = Options {
            exclude: Exclude::exactly(directory.nested.clone()),
            attributes_best_effort: true,
            // RAM needs no sync. The manifest tells what the job left as it was.
            sync: false,
            manifest: Some(manifest.clone()),
            ..self.options()
        };
        let roots = Roots {
            source,
            target: TargetRoot::Existing(target),
            source_path: directory.path.clone(),
            target_path: self.slot_path(directory.wanted),
        };
        let policy = CatchingUp { filled: &filled, nested: &directory.nested, met: Mutex::default() };
        self.findings.full.store(false, Relaxed);
        let progress = &self.shared.progress;
        let event = |event: Event<'_>| {
            self.note(&directory.path, &event);
            if self.findings.full.load(Relaxed) {
                // The rest would not fit either.
                progress.cancel.store(true, Relaxed);
            }
        };
        let copied = stage_roots(roots, &options, Some(&policy), &Monitor { progress, event: &event });
        let met = policy.met.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Also what was copied before something went wrong is the job's own.
        let brought = self.remember(directory, &slot, filled, met.copied)?;
        told.brought += brought;
        told.changed += met.changed;
        let within = |path: Vec<u8>| directory.path.join(OsStr::from_bytes(&path)).display().to_string();
        let room = NAMED.saturating_sub(told.names.len());
        told.names.extend(met.first.into_iter().take(room).map(within));
        if self.findings.full.load(Relaxed) || copied.as_ref().is_err_and(failed_for_room) {
            return Err(Failure::passing(format!(
                "{path}: the RAM disk of {} has no room for all that the job had written to disk; the rest stays there \
                 and is not seen by the job",
                self.capacity()
            )));
        }
        copied.map_err(|error| Failure::passing(format!("catching up with {path}: {error}")))?;
        Ok(())
    }

    /// Adds what was copied to what bringing home knows. Gives the number of entries that are no directories.
    fn remember(
        &self,
        directory: &OpenDirectory<'_>,
        slot: &OwnedFd,
        filled: kept::Filled,
        copied: HashMap<Vec<u8>, Copied>,
    ) -> Result<u64, Failure> {
        let name = &directory.wanted.name;
        let failed = |error: std::io::Error| {
            let path = directory.path.display();
            Failure::passing(format!("what was copied from {path} can't be remembered: {error}"))
        };
        if copied.values().all(|copied| copied.ram.is_none()) {
            return Ok(0);
        }
        let kept::Filled { mut baseline, mut ours, .. } = filled;
        let mut digests: HashMap<Vec<u8>, (Checksum, Digest)> = HashMap::new();
        for record in manifest::read(&kept::manifest_later(name)).map_err(failed)? {
            let record = record.map_err(failed)?;
            if let (Some(digest), true) = (record.checksum, copied.contains_key(&record.path)) {
                digests.insert(record.path, digest);
            }
        }
        // Further names of a file have no checksum of their own.
        let inode = |path: &Vec<u8>| Some(copied.get(path)?.ram.as_ref()?.st_ino);
        let by_inode: HashMap<u64, _> =
            digests.iter().filter_map(|(path, digest)| Some((inode(path)?, *digest))).collect();
        // The filesystem may have told a time that was not the last one.
        std::thread::sleep(self.order.out_of_date + SETTLED);
        let mut number = 0;
        for (path, entry) in copied {
            let Some(placed) = entry.ram else { continue };
            let Ok(text) = CString::new(path.as_slice()) else { continue };
            let now = rustix::fs::statat(slot, &*text, AtFlags::SYMLINK_NOFOLLOW);
            // What the job has changed since is no more as it was copied. Whether its content is the same, the checksum
            // tells.
            let same = |now: &Stat| {
                (now.st_ino, now.st_mode, now.st_uid, now.st_gid, now.st_size)
                    == (placed.st_ino, placed.st_mode, placed.st_uid, placed.st_gid, placed.st_size)
            };
            let is_file = FileType::from_raw_mode(placed.st_mode) == FileType::RegularFile;
            let stat = now.ok().filter(|now| same(now) && is_file).unwrap_or(placed);
            let digest = digests.get(&path).or_else(|| by_inode.get(&placed.st_ino)).copied();
            if FileType::from_raw_mode(placed.st_mode) == FileType::Directory {
                baseline.add_directory(&path, slot.as_fd(), &stat).map_err(failed)?;
            } else {
                baseline.add(&path, &stat, digest.filter(|_| is_file));
            }
            if let Some(linked) = entry.linked {
                baseline.add_linked(&path, linked);
            }
            if let Some(disk) = entry.disk {
                ours.insert(key(&path), disk);
                number += 1;
            }
        }
        kept::remember_more(name, &baseline, &ours).map_err(failed)?;
        Ok(number)
    }
}

/// An entry that was to be copied.
#[derive(Default)]
struct Copied {
    /// What is copied, on disk: its inode and when it was changed. Not of directories.
    disk: Option<(u64, Moment)>,
    /// If it has several names on disk.
    linked: Option<Linked>,
    /// The copy, once it is in place.
    ram: Option<Stat>,
}

/// What a copy has met.
#[derive(Default)]
struct CatchUpLog {
    copied: HashMap<Vec<u8>, Copied>,
    /// Entries that the RAM disk has, and that have changed on disk since the fill.
    changed: u64,
    first: Vec<Vec<u8>>,
    /// Directories on disk, by hash of the path, that are not those that the fill has copied.
    others: HashSet<u128>,
}

/// The policy of one directory: from the disk into the RAM disk, only what the job wrote to disk and does not see.
struct CatchingUp<'a> {
    filled: &'a kept::Filled,
    nested: &'a [Vec<u8>],
    met: Mutex<CatchUpLog>,
}

impl CatchingUp<'_> {
    fn met(&self) -> MutexGuard<'_, CatchUpLog> {
        self.met.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether what is on disk is the job's, and the RAM disk never had it. What it had, and has no more, the job has
    /// deleted.
    fn is_new(&self, path: &[u8], disk: &Stat) -> bool {
        !self.filled.baseline.contains(path) && self.is_later(path, disk)
    }

    /// Whether what is on disk came to its path after the fill: a directory that is renamed takes along what it holds,
    /// and no time of that tells.
    fn is_later(&self, path: &[u8], disk: &Stat) -> bool {
        changed_at(disk) > self.filled.since || self.met().others.contains(&key(parent_of(path)))
    }
}

impl MergePolicy for CatchingUp<'_> {
    fn entry(&self, entry: &EntryContext<'_>) -> EntryAction {
        let path = entry.path();
        let disk = (entry.source.st_ino, changed_at(entry.source));
        if self.nested.contains(&path) {
            return EntryAction::Skip;
        }
        if entry.target.is_some() {
            if self.is_later(&path, entry.source) && self.filled.ours.get(&key(&path)) != Some(&disk) {
                let mut met = self.met();
                met.changed += 1;
                if met.first.len() < NAMED {
                    met.first.push(path);
                }
            }
            return EntryAction::Skip;
        }
        if !self.is_new(&path, entry.source) {
            return EntryAction::Skip;
        }
        let linked = Linked::of(entry.source);
        self.met().copied.insert(path, Copied { disk: Some(disk), linked, ram: None });
        EntryAction::Copy
    }

    fn directory(&self, path: &[u8], source: BorrowedFd<'_>, target: Option<&Stat>) -> DirectoryAction {
        if self.nested.iter().any(|nested| nested == path) {
            return DirectoryAction::Skip;
        }
        let disk = rustix::fs::fstat(source).ok();
        let merged = match target {
            Some(target) => FileType::from_raw_mode(target.st_mode) == FileType::Directory,
            // One that can't be looked at is gone into, which tells why it can't be read.
            None => disk.is_none_or(|disk| self.is_new(path, &disk)),
        };
        if !merged {
            return DirectoryAction::Skip;
        }
        if disk.is_some_and(|disk| self.filled.baseline.before().is_another(path, &disk)) {
            self.met().others.insert(key(path));
        }
        if target.is_none() {
            self.met().copied.insert(path.to_vec(), Copied::default());
        }
        DirectoryAction::Merge { delete: false, attributes: false }
    }

    fn may_delete(&self, _: &[u8], _: &Stat) -> bool {
        false
    }

    fn xattr_name(&self, name: &CStr) -> Option<CString> {
        Some(name.to_owned())
    }

    fn placed(&self, path: &[u8], target: &Stat) {
        if let Some(copied) = self.met().copied.get_mut(path) {
            copied.ram = Some(*target);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_of_nothing_that_was_brought() {
        assert_eq!(CatchUpSummary::default().in_words(0, ""), None);
        let told = CatchUpSummary { brought: 2, ..CatchUpSummary::default() };
        let expected = "2 entries that the job had written to disk brought";
        assert_eq!(told.in_words(0, "").as_deref(), Some(expected));
        let failed = CatchUpSummary::default().in_words(1, "out/a: no space");
        assert!(failed.is_some_and(|words| words.ends_with("stay on disk alone: out/a: no space")));
    }
}
