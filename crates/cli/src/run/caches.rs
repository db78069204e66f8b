//! The caches of a run: directories that the program sees through a write-back cache of its own.
//!
//! Each is a cache of `ondeck cache` ([`instance`]) with a server of its own, and is known by the path of its directory, so
//! that two runs can't have one of the same directory. The server is started by the keeper but outlives it, and it mounts the
//! cache in the run's namespace only. When the last process there has ended, the mount goes with the namespace, and the
//! server writes back and ends, whether or not somebody of the run is left. If it is killed itself, its store remains, with
//! the number of the run in its record: so `ondeck run --resume` finds it without a keeper.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use ondeck_cachefs::instance::control::{Answer, Order, ask};
use ondeck_cachefs::instance::{self, Attach, Caches, Instance, Record};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};
use ondeck_cachefs::status::{Conflict, Status};
use ondeck_core::Bytes;
use ondeck_ramdisk::mounts;
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_transfer::{Progress, Whereabouts, whereabouts};
use rustix::process::Pid;

use crate::{cache, state};

/// No cache is larger unless somebody asks for it: more helps few programs, and names take memory beside it.
const LARGEST_DEFAULT: Bytes = Bytes(64 << 30);

/// How long a server that has just stopped listening may take to remove what is left of its cache.
const PAUSE: Duration = Duration::from_millis(200);

/// So many servers in turn may be killed while one cache is written back, until its data is held.
const ATTEMPTS: u32 = 3;

/// A directory that the program sees through a cache.
pub struct RunCache {
    /// Its real path.
    pub path: PathBuf,
    /// It, on disk.
    pub disk: OwnedFd,
    /// Bytes of data and names that its cache may hold.
    pub capacity: Bytes,
    /// Whether everything of it is on disk.
    pub home: AtomicBool,
    instance: Instance,
    seen: Mutex<Seen>,
}

/// What its servers have told.
#[derive(Default)]
struct Seen {
    /// The figures of servers that were killed.
    former: Figures,
    now: Status,
    /// What others had changed, also as former servers told it.
    conflicts: Vec<Conflict>,
}

/// What a cache has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Bytes that were copied from the directory.
    pub fetched: u64,
    /// Bytes that were written back.
    pub written_back: u64,
    /// Bytes of reads that were resident.
    pub hits: u64,
    /// Bytes of reads that were not.
    pub misses: u64,
    /// Extents that were evicted.
    pub evictions: u64,
}

impl Figures {
    fn plus(self, status: &Status) -> Figures {
        Figures {
            fetched: self.fetched + status.fetched_bytes,
            written_back: self.written_back + status.written_back_bytes,
            hits: self.hits + status.hit_bytes,
            misses: self.misses + status.miss_bytes,
            evictions: self.evictions + status.evictions,
        }
    }
}

/// What the caches of these directories are to be. `left` is the RAM that they may take together.
///
/// # Errors
/// What `ondeck cache mount` refuses, and what does not fit.
pub fn plan(
    directories: Vec<(PathBuf, OwnedFd)>,
    capacity: Option<Bytes>,
    left: Bytes,
) -> Result<Vec<RunCache>> {
    if directories.is_empty() {
        return Ok(Vec::new());
    }
    let caches = Caches::new(state::caches()?);
    let count = directories.len();
    let capacity = capacity.unwrap_or_else(|| default_capacity(left, count));
    let wanted = Bytes(instance::promise(capacity).0.saturating_mul(count as u64));
    if wanted > left {
        bail!(
            "{} of {capacity} may take {wanted} of RAM, and {left} are free beside the RAM disk and what other caches were \
             promised; choose a smaller --cache-size or --size, or run with --fallback disk",
            crate::display::count(count as u64, "cache"),
        );
    }
    let planned: Vec<RunCache> = directories
        .into_iter()
        .map(|(path, disk)| RunCache {
            instance: caches.at(&path),
            path,
            disk,
            capacity,
            home: AtomicBool::new(false),
            seen: Mutex::default(),
        })
        .collect();
    for cache in &planned {
        instance::check(&cache.plan(None, Attach::Nowhere)).map_err(|error| anyhow!("--cache: {error}"))?;
    }
    Ok(planned)
}

/// Half of what is left, in equal parts.
fn default_capacity(left: Bytes, caches: usize) -> Bytes {
    const MIB: u64 = 1 << 20;
    let part = left.0 / 2 / caches.max(1) as u64 / MIB * MIB;
    Bytes(part).min(LARGEST_DEFAULT).max(LEAST_CAPACITY)
}

impl RunCache {
    fn plan(&self, run: Option<&str>, attach: Attach) -> instance::Plan {
        instance::Plan {
            base: self.instance.base().to_owned(),
            mount_point: self.path.clone(),
            backing: self.path.clone(),
            user: None,
            // Whoever is let in by the directory, as on disk; nobody outside of the run sees it.
            others: true,
            settings: Settings::new(self.capacity),
            run: run.map(str::to_owned),
            attach,
        }
    }

    /// Starts its server, which shows it in the namespaces. Returns what the user should know.
    pub fn start(&self, run: &str, namespaces: &Namespaces) -> Result<Vec<String>> {
        let namespace = format!("/proc/{}/fd/{}", std::process::id(), namespaces.mount_number());
        let plan = self.plan(Some(run), Attach::Inside(PathBuf::from(namespace)));
        cache::start(&plan).with_context(|| format!("can't show {} through a cache", self.path.display()))
    }

    /// The process that serves it, or served it last.
    pub fn server(&self, run: &str) -> Option<Pid> {
        let record = self.instance.record().ok().flatten()?;
        (record.run.as_deref() == Some(run)).then(|| Pid::from_raw(record.server as i32)).flatten()
    }

    /// The number by which its place is found.
    pub fn id(&self) -> &str {
        self.instance.id()
    }

    /// What was done so far, as far as it is known.
    pub fn figures(&self) -> Figures {
        let seen = self.seen();
        seen.former.plus(&seen.now)
    }

    /// Bytes that the directory lacks, as far as it is known.
    pub fn dirty(&self) -> u64 {
        self.seen().now.dirty
    }

    /// What others had changed.
    pub fn conflicts(&self) -> Vec<Conflict> {
        self.seen().conflicts.clone()
    }

    /// Where the directory is now, if its path does not lead to it any more.
    pub fn moved_to(&self) -> Option<PathBuf> {
        match whereabouts(&self.path, self.disk.as_fd()) {
            Ok(Whereabouts::Moved(now)) => Some(now),
            _ => None,
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        // Plain figures, which are good whoever has panicked.
        self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn see(&self, status: &Status) {
        let mut seen = self.seen();
        for conflict in &status.conflicts {
            if !seen.conflicts.contains(conflict) {
                seen.conflicts.push(conflict.clone());
            }
        }
        seen.now = status.clone();
    }

    /// Asks its server how it is.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn look(&self) -> io::Result<()> {
        if let Answer::Report(report) = ask(self.instance.socket(), &Order::Status, &mut |_| true)? {
            self.see(&report.status);
        }
        Ok(())
    }

    /// Whether nobody serves it any more.
    pub fn is_dead(&self) -> bool {
        cache::is_dead(&self.instance).unwrap_or(false)
    }

    /// What is left of it, if anything is.
    ///
    /// # Errors
    /// If that can't be told.
    fn left(&self, run: &str) -> Result<Option<Record>> {
        of_run(&self.instance, run).with_context(|| format!("the cache of {}", self.path.display()))
    }

    /// Removes it, if the program was not started: then it holds nothing. What its server has refused to touch stays.
    ///
    /// # Errors
    /// What is left of it.
    pub fn discard(&self, run: &str) -> Result<()> {
        match self.instance.record().with_context(|| unreadable(&self.instance))? {
            Some(record) if record.run.as_deref() == Some(run) => {
                give_up(&self.instance, &record.mount_point)
            }
            _ => clear(&self.instance, &self.path),
        }
    }

    /// After the program: writes everything back, and ends the server. Returns what the user should know.
    ///
    /// # Errors
    /// What is not written back, and why.
    pub fn write_back(&self, run: &str, namespaces: &Namespaces, progress: &Progress) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        let mut last = None;
        for _ in 0..ATTEMPTS {
            // It ends by itself if somebody else has had it written back.
            let Some(record) = self.left(run)? else {
                // Its server may have been killed when there was nothing left to do but this.
                clear(&self.instance, &self.path)?;
                return Ok(notes);
            };
            if !self.instance.has_store()? && last.is_some() {
                return without_store(&self.instance, &record).map(|()| notes);
            }
            if cache::is_dead(&self.instance)? {
                // What it shows are errors.
                self.take_away(namespaces)?;
                {
                    let mut seen = self.seen();
                    seen.former = seen.former.plus(&seen.now);
                    seen.now = Status::default();
                }
                cache::revive(&self.instance)?;
                notes.push(format!(
                    "the server of the cache of {} was killed; what it had was recovered, and is written back",
                    self.path.display()
                ));
            }
            match self.end(namespaces, progress) {
                Ok(()) => return Ok(notes),
                Err(Unfinished::Unwritten(why)) => bail!("{why}{}", self.removed()),
                Err(Unfinished::ServerLost(error)) => {
                    // It may be about to end in good order.
                    std::thread::sleep(PAUSE);
                    last = Some(error);
                }
            }
        }
        match (self.left(run)?, last) {
            (Some(_), Some(error)) => Err(error).context("the cache's server can't be asked"),
            _ => Ok(notes),
        }
    }

    /// That nothing can be written to the directory any more, if that is so.
    fn removed(&self) -> &'static str {
        match whereabouts(&self.path, self.disk.as_fd()) {
            Ok(Whereabouts::Removed) => {
                ". The directory was removed while the program ran: what was not written back before can only be given up"
            }
            _ => "",
        }
    }

    fn end(&self, namespaces: &Namespaces, progress: &Progress) -> Result<(), Unfinished> {
        let mut most = 0;
        let mut tell = |status: &Status| {
            self.see(status);
            most = status.dirty.max(most);
            progress.bytes_found.store(most, Relaxed);
            progress.bytes_done.store(most - status.dirty, Relaxed);
            !progress.is_cancelled()
        };
        // While the mount stands, so that the server is there to tell how that went.
        finished(ask(self.instance.socket(), &Order::Flush, &mut tell))?;
        self.look().map_err(Unfinished::ServerLost)?;
        self.take_away(namespaces)
            .map_err(|error| Unfinished::Unwritten(format!("can't unmount it: {error}")))?;
        finished(ask(self.instance.socket(), &Order::Unmount { lose: false }, &mut tell))
    }

    /// Takes the mount away. All that have used it have ended.
    fn take_away(&self, namespaces: &Namespaces) -> io::Result<()> {
        namespaces.inside(|| {
            // Not what the directory may have been mounted on.
            if Caches::containing(&self.path)?.is_some_and(|at| at == self.path) {
                mounts::detach(&self.path)?;
            }
            Ok(())
        })
    }

    /// Gives up what is not written back, also if nobody can say what it is.
    pub fn give_up(&self, run: &str) -> Result<()> {
        match self.left(run) {
            Ok(None) => Ok(()),
            _ => give_up(&self.instance, &self.path),
        }
    }
}

/// Why a cache has not ended.
enum Unfinished {
    /// It holds what nobody else has.
    Unwritten(String),
    /// Its server is gone, for better or worse.
    ServerLost(io::Error),
}

fn finished(answer: io::Result<Answer>) -> Result<(), Unfinished> {
    match answer {
        Ok(Answer::Failed { message, unwritten: true }) => Err(Unfinished::Unwritten(message)),
        Ok(Answer::GivenUp) => {
            Err(Unfinished::Unwritten("what was not written back was given up".to_owned()))
        }
        // Only that somebody goes on using it, for whom its server stays.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            Err(Unfinished::Unwritten("it was interrupted".to_owned()))
        }
        Err(error) => Err(Unfinished::ServerLost(error)),
    }
}

/// The record of a cache, if it is one of this run. No store is taken for nothing because its record is lost or damaged.
///
/// # Errors
/// If nobody can say what a store holds.
pub fn of_run(instance: &Instance, run: &str) -> Result<Option<Record>> {
    let record = instance.record().with_context(|| unreadable(instance))?;
    if record.is_none() && instance.may_hold_data().context("can't look into its store")? {
        bail!(
            "the record {} is missing: nobody can say which directory the data in its store belongs to. Put it back",
            instance.record_path().display()
        );
    }
    Ok(record.filter(|record| record.run.as_deref() == Some(run)))
}

fn unreadable(instance: &Instance) -> String {
    format!("can't read {}, which says what a cache is", instance.record_path().display())
}

/// Removes what is there of a cache that has a record and no store: its server was killed before it had made one, or when
/// everything was written back. Or somebody has unmounted it.
///
/// # Errors
/// If something was in it.
pub fn without_store(instance: &Instance, record: &Record) -> Result<()> {
    if let Some(lost) = record.lost() {
        bail!(lost);
    }
    Ok(instance.abandon(&record.mount_point)?)
}

/// Removes what is there of a cache without a record: its server was killed before it had put anything into its store, or
/// after it had written everything back. One that has a record stays, one that has lost it, and one whose server lives.
pub fn clear(instance: &Instance, at: &Path) -> Result<()> {
    let what = || format!("can't remove what is left of the cache of {}", at.display());
    if instance.record().with_context(what)?.is_some() || instance.may_hold_data().with_context(what)? {
        return Ok(());
    }
    match instance.abandon(at) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(()),
        other => other.with_context(what),
    }
}

/// Gives up what a cache has not written back, whether or not it has a server.
pub fn give_up(instance: &Instance, at: &Path) -> Result<()> {
    match ask(instance.socket(), &Order::Unmount { lose: true }, &mut |_| true) {
        Ok(Answer::Failed { message, .. }) => bail!(message),
        Ok(_) => Ok(()),
        // Its server is dead, or ends just now.
        Err(_) => Ok(instance.abandon(at)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_takes_half_of_what_is_left_within_bounds() {
        const MIB: u64 = 1 << 20;
        assert_eq!(default_capacity(Bytes(1000 * MIB + 5), 1), Bytes(500 * MIB));
        assert_eq!(default_capacity(Bytes(1000 * MIB), 3), Bytes(166 * MIB));
        assert_eq!(default_capacity(Bytes(MIB), 1), LEAST_CAPACITY);
        assert_eq!(default_capacity(Bytes(1 << 50), 2), LARGEST_DEFAULT);
    }
}
