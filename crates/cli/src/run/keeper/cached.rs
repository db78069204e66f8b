//! Directories that the program sees through a cache: showing them, and having them written back.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::Result;
use ondeck_cachefs::status::{ConflictKind, UNFINISHED};
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_transfer::Progress;

use super::Keeper;
use super::bring_home::Abort;
use crate::display;
use crate::run::copy_out::Ticker;
use crate::run::left::Kept;
use crate::run::message::RunOrder;
use crate::run::report::{CacheReport, ConflictReport};
use crate::run::shared::{Shared, lock};

/// How often servers are asked how they are while the program runs.
const LOOK: Duration = Duration::from_secs(1);

impl Keeper {
    /// Starts the servers of the run's caches. If one can't be, those before it are ended.
    pub(super) fn start_caches(&mut self, namespaces: &Namespaces) -> Result<()> {
        if self.shared.plan.caches.is_empty() {
            return Ok(());
        }
        // Whoever finds a cache of this run must find this, too.
        self.keep_code(None)?;
        let mut notes = Vec::new();
        for cache in &self.shared.plan.caches {
            match cache.start(&self.shared.id, namespaces) {
                Ok(said) => notes.extend(said),
                Err(error) => {
                    self.discard_caches();
                    return Err(error);
                }
            }
        }
        notes.into_iter().for_each(|note| self.note(note));
        Ok(())
    }

    /// Ends the caches of a program that was not started. They hold nothing.
    pub fn discard_caches(&mut self) {
        for cache in &self.shared.plan.caches {
            if let Err(error) = cache.discard(&self.shared.id) {
                self.watchers.warning(&format!("{error:#}"));
            }
        }
    }

    /// Remembers how the program has ended, for the time when there is no keeper.
    pub(super) fn keep_code(&self, code: Option<u8>) -> Result<()> {
        if self.shared.plan.caches.is_empty() {
            return Ok(());
        }
        let outputs = self.shared.plan.directories.iter().any(|directory| directory.output);
        let caches = self.shared.plan.caches.iter().map(|cache| cache.id().to_owned()).collect();
        Kept { caches, outputs, code }.keep(&self.shared.dir)
    }

    /// Writes everything back that is in the caches. Returns what is not, and why.
    pub(super) fn write_back(&mut self, namespaces: &Namespaces) -> Result<Vec<String>, Abort> {
        let mut problems = Vec::new();
        let left = |keeper: &Keeper| {
            let caches = keeper.shared.plan.caches.iter();
            caches.filter(|cache| !cache.home.load(Relaxed)).map(|cache| cache.dirty()).sum()
        };
        if self.shared.plan.caches.iter().all(|cache| cache.home.load(Relaxed)) {
            return Ok(problems);
        }
        let total = left(self);
        self.watchers.phase("write_back", Some(total));
        for index in 0..self.shared.plan.caches.len() {
            if self.shared.plan.caches[index].home.load(Relaxed) {
                continue;
            }
            let began = Instant::now();
            let (shared, watchers) = (&self.shared, &mut self.watchers);
            let cache = &shared.plan.caches[index];
            let before = cache.figures().written_back;
            let progress = Progress::new();
            let mut abandoned = false;
            let written = watchers.watch(
                &progress,
                |order| {
                    if matches!(order, RunOrder::Abandon) {
                        abandoned = true;
                        progress.cancel.store(true, Relaxed);
                    }
                },
                || cache.write_back(&shared.id, namespaces, &progress),
            );
            if abandoned {
                return Err(Abort::Abandoned);
            }
            let path = cache.path.display().to_string();
            match written {
                Ok(notes) => {
                    cache.home.store(true, Relaxed);
                    let bytes = cache.figures().written_back - before;
                    self.report.phase("write_back", began.elapsed(), bytes, 0);
                    for note in notes {
                        self.watchers.warning(&note);
                        self.report.notes.push(note);
                    }
                    self.take_conflicts(index);
                    if let Some(now) = self.shared.plan.caches[index].moved_to() {
                        self.tell_moved(&path, &now);
                    }
                }
                Err(error) => problems.push(format!("{path}: {error:#}")),
            }
        }
        self.describe_caches();
        Ok(problems)
    }

    /// What a cache and somebody else both had changed.
    fn take_conflicts(&mut self, index: usize) {
        let mut notes = Vec::new();
        let cache = &self.shared.plan.caches[index];
        let mut findings = lock(&self.shared.findings);
        for conflict in cache.conflicts() {
            let path = cache.path.join(&conflict.path).to_string_lossy().into_owned();
            match (conflict.kind, conflict.ours) {
                (ConflictKind::Attributes, _) => {
                    let path = display::name(path.as_ref());
                    notes.push(format!(
                        "{path}: someone else changed it on disk while the program ran; attributes that the program changed \
                         are not taken over"
                    ));
                }
                (ConflictKind::Removed, _) => {
                    let path = display::name(path.as_ref());
                    notes.push(format!(
                        "{path}: someone else removed it on disk while the program ran; the program's is there"
                    ));
                }
                (ConflictKind::Gone, _) => {
                    let path = display::name(path.as_ref());
                    notes.push(format!(
                        "{path}: the program has moved it here, and someone else had removed or replaced it: it is not on disk"
                    ));
                }
                (ConflictKind::Unfinished, _) => {
                    let path = display::name(path.as_ref());
                    notes.push(format!(
                        "{path}: the program has removed it, and it stays on disk: a cache that has died has left {UNFINISHED}* in it"
                    ));
                }
                (_, Some(ours)) => {
                    let name = ours.rsplit('/').next().unwrap_or_default().to_owned();
                    findings.put_beside.push(ConflictReport { path, name });
                }
                (_, None) => findings.kept.push(path),
            }
        }
        drop(findings);
        for note in notes {
            self.watchers.warning(&note);
            self.report.notes.push(note);
        }
    }

    fn describe_caches(&mut self) {
        self.report.caches = self.shared.plan.caches.iter().map(CacheReport::of).collect();
    }

    /// Gives up what the caches have not written back.
    pub(super) fn give_up_caches(&mut self) {
        for cache in &self.shared.plan.caches {
            if let Err(error) = cache.give_up(&self.shared.id) {
                let path = cache.path.display();
                self.watchers.warning(&format!("can't end the cache of {path}: {error:#}"));
            }
        }
        self.describe_caches();
    }
}

impl Shared {
    /// Looks after the caches while the program runs, until it is stopped.
    pub fn watch_caches(&self, ticker: &Ticker, tell: &std::sync::mpsc::Sender<String>) {
        let mut dead = vec![false; self.plan.caches.len()];
        while ticker.wait(LOOK) {
            for (cache, dead) in self.plan.caches.iter().zip(&mut dead) {
                if cache.look().is_ok() || *dead || !cache.is_dead() {
                    continue;
                }
                *dead = true;
                let _ = tell.send(format!(
                    "the server of the cache of {} was killed: the program gets errors there (ENOTCONN); what it wrote is \
                     kept, and written back when it has ended",
                    cache.path.display()
                ));
            }
        }
    }
}
