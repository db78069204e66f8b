//! The loads of filesystems: those that count for layouts, which were read last and were far enough from the ones before; and which
//! filesystems are so busy that staging goes slower there and jobs wait.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ondeck_api::scheduler::FilesystemStatus;
use ondeck_core::{Bytes, Rate};
use ondeck_layout::load::{Exceeded, Steady};
use ondeck_layout::{Filesystem, Load, Site};

use crate::site_file::{Alone, KnownSite, SiteFile};

/// A load that could not be read for so long, or for three times its interval, is not known any more.
const STALE: Duration = Duration::from_secs(300);

/// Where nobody has said what staging may take, this part of a busy filesystem's bandwidth is what it takes at most.
const UNSAID_PART: u64 = 10;

/// The loads, by the filesystems' paths.
#[derive(Default)]
pub(crate) struct Loads {
    readings: Mutex<HashMap<PathBuf, Reading>>,
    site: Mutex<SiteFile>,
    /// Held by whoever reads the site's file.
    pub(crate) reading: Alone,
}

#[derive(Default)]
struct Reading {
    counts: Steady,
    last: Load,
    heavy: Exceeded,
    slow: Exceeded,
    /// How often it was read, and when last.
    number: u64,
    read: Option<Instant>,
    /// When it was tried last.
    tried: Option<Instant>,
    /// Why it could not be read last.
    wrong: Option<String>,
}

/// Whether jobs that are I/O-heavy wait for a filesystem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pressure {
    /// No jobs wait for it, however busy it is.
    Unwatched,
    /// It is not so busy, by so many readings.
    Calm {
        /// How often its load was read.
        reading: u64,
    },
    /// It has this load.
    Busy {
        /// The load that was read last.
        load: Load,
    },
    /// Its load can't be read, or was not read yet.
    Unknown,
}

impl Loads {
    /// The load of a filesystem that counts for layouts; nothing where none is known.
    pub(crate) fn of(&self, filesystem: &Path) -> Load {
        self.lock().get(filesystem).and_then(|reading| reading.counts.load()).unwrap_or_default()
    }

    /// Whether it is time to read the load of a filesystem, which counts as done then.
    pub(crate) fn is_due(&self, filesystem: &Filesystem) -> bool {
        let mut readings = self.lock();
        let reading = readings.entry(filesystem.path.clone()).or_default();
        let is_due = reading.tried.is_none_or(|tried| tried.elapsed() >= filesystem.load_interval);
        if is_due {
            reading.tried = Some(Instant::now());
        }
        is_due
    }

    /// Takes a reading. One that could not be read changes nothing, and is told once.
    pub(crate) fn take(&self, filesystem: &Filesystem, read: Result<Load, String>) {
        let mut readings = self.lock();
        let path = filesystem.path.display();
        let reading = readings.entry(filesystem.path.clone()).or_default();
        match read {
            Ok(load) => {
                reading.counts.read(load);
                reading.last = load;
                let was = (reading.slow, reading.heavy);
                for (exceeded, threshold) in [
                    (&mut reading.slow, filesystem.slow_from()),
                    (&mut reading.heavy, filesystem.heavy_above),
                ] {
                    match threshold {
                        Some(threshold) => _ = exceeded.read(load, threshold),
                        None => *exceeded = Exceeded::default(),
                    }
                }
                if was != (reading.slow, reading.heavy) {
                    let (staging_slow, jobs_wait) = (reading.slow.is_so(), reading.heavy.is_so());
                    tracing::info!(filesystem = %path, %load, staging_slow, jobs_wait, "its load has passed a threshold");
                }
                reading.number += 1;
                reading.read = Some(Instant::now());
                reading.wrong = None;
            }
            Err(wrong) if reading.wrong.as_ref() != Some(&wrong) => {
                tracing::warn!(
                    filesystem = %path,
                    error = wrong,
                    "can't read how busy a filesystem is; layouts go by what was read last"
                );
                reading.wrong = Some(wrong);
            }
            Err(_) => {}
        }
    }

    /// Whether jobs wait for a filesystem.
    pub(crate) fn pressure(&self, filesystem: &Filesystem) -> Pressure {
        let readings = self.lock();
        let reading = readings.get(&filesystem.path);
        if filesystem.heavy_above.is_none() || filesystem.load.is_none() {
            return Pressure::Unwatched;
        }
        let fresh = reading.filter(|reading| reading.is_fresh(filesystem));
        match fresh {
            Some(reading) if reading.heavy.is_so() => Pressure::Busy { load: reading.last },
            Some(reading) => Pressure::Calm { reading: reading.number },
            None => Pressure::Unknown,
        }
    }

    /// What the site's file said last; nothing if there is none, or it was not read yet.
    pub(crate) fn site(&self) -> Option<Arc<Site>> {
        self.lock_site().known().site
    }

    /// Whether the site's file was read, or found not to be there.
    pub(crate) fn is_site_known(&self) -> bool {
        self.lock_site().is_known()
    }

    /// What is wrong with the site's file, if anything.
    pub(crate) fn site_fault(&self) -> Option<String> {
        self.lock_site().known().fault
    }

    /// Whether jobs wait for any filesystem.
    pub(crate) fn is_any_busy(&self) -> bool {
        let Some(site) = self.site() else { return false };
        let is_busy = |filesystem| matches!(self.pressure(filesystem), Pressure::Busy { .. });
        site.filesystems.iter().any(is_busy)
    }

    /// What staging may take of the busiest filesystem that holds one of these directories, if staging goes slower there: half of what
    /// is said that it may take, or a part of what the filesystem does. It is never nothing.
    pub(crate) fn slowed<'a>(
        &self,
        directories: impl IntoIterator<Item = &'a Path>,
        said: Option<Rate>,
    ) -> Option<(PathBuf, Rate)> {
        let site = self.site()?;
        let readings = self.lock();
        let of = directories.into_iter().filter_map(|directory| site.filesystem_of(directory));
        let slow = of.filter_map(|filesystem| {
            let reading = readings.get(&filesystem.path)?;
            (reading.slow.is_so() && reading.is_fresh(filesystem)).then_some((filesystem, reading.last))
        });
        let (filesystem, _) = slow.max_by(|a, b| a.1.part().total_cmp(&b.1.part()))?;
        let rate = said.map_or(filesystem.bandwidth().0.0 / UNSAID_PART, |said| said.0.0 / 2);
        Some((filesystem.path.clone(), Rate(Bytes(rate.max(1)))))
    }

    /// Takes what was found of the site's file, and forgets filesystems that it does not have any more; what is known of the site then.
    pub(crate) fn take_site(&self, path: &Path, read: Result<Option<Site>, String>) -> KnownSite {
        let mut file = self.lock_site();
        let is_new = file.take(path, read, Instant::now());
        let known = file.known();
        drop(file);
        if is_new {
            let has = |path: &Path| {
                known.site.iter().flat_map(|site| &site.filesystems).any(|known| known.path == *path)
            };
            self.lock().retain(|path, _| has(path));
        }
        known
    }

    /// What is known of each filesystem whose load is read: the load, whether staging goes slower there, and whether jobs wait.
    pub(crate) fn known(&self) -> Vec<FilesystemStatus> {
        let site = self.site();
        let readings = self.lock();
        let of = |filesystem: &Filesystem| {
            filesystem.load.as_ref()?;
            let reading = readings.get(&filesystem.path);
            let fresh = reading.filter(|reading| reading.is_fresh(filesystem));
            Some(FilesystemStatus {
                path: filesystem.path.clone(),
                load: fresh.map(|reading| reading.last.part()),
                staging_slow: fresh.is_some_and(|reading| reading.slow.is_so()),
                jobs_wait: fresh.is_some_and(|reading| reading.heavy.is_so()),
                fault: reading.and_then(|reading| reading.wrong.clone()).unwrap_or_default(),
            })
        };
        site.iter().flat_map(|site| &site.filesystems).filter_map(of).collect()
    }

    fn lock_site(&self) -> MutexGuard<'_, SiteFile> {
        self.site.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Reading>> {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    fn is_fresh(&self, filesystem: &Filesystem) -> bool {
        self.read.is_some_and(|read| read.elapsed() <= STALE.max(filesystem.load_interval * 3))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SITE: &str = "[nodes]\nlink = \"1GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"lustre\"\n\
        targets = 8\nservers = 4\ntarget = \"1GB/s\"\nload = [\"x\"]\n";

    fn keep(loads: &Loads, lines: &str) {
        let site = Site::parse(&format!("{SITE}{lines}")).unwrap();
        loads.take_site(Path::new("/site.toml"), Ok(Some(site)));
    }

    /// The loads of a site of one filesystem, with these lines more.
    fn of(lines: &str) -> (Loads, Filesystem) {
        let loads = Loads::default();
        keep(&loads, lines);
        let filesystem = loads.site().unwrap().filesystems[0].clone();
        (loads, filesystem)
    }

    #[test]
    fn what_can_not_be_read_changes_nothing_and_what_is_not_in_the_file_any_more_is_forgotten() {
        let (loads, filesystem) = of("");
        let path = &filesystem.path;
        assert_eq!(loads.of(path), Load::default());
        loads.take(&filesystem, Ok(Load::new(0.5)));
        loads.take(&filesystem, Err("no answer".into()));
        assert_eq!(loads.of(path), Load::new(0.5));
        loads.take(&filesystem, Ok(Load::new(0.55)));
        assert_eq!(loads.of(path), Load::new(0.5));
        keep(&loads, "");
        assert_eq!(loads.of(path), Load::new(0.5));
        let other = SITE.replace("/scratch", "/other");
        loads.take_site(Path::new("/site.toml"), Ok(Some(Site::parse(&other).unwrap())));
        assert_eq!(loads.of(path), Load::default());
    }

    #[test]
    fn a_load_is_read_when_its_time_has_come() {
        let (loads, filesystem) = of("load_interval = \"1h\"\n");
        assert!(loads.is_due(&filesystem) && !loads.is_due(&filesystem));
    }

    #[test]
    fn jobs_wait_from_the_threshold_on_until_the_load_is_clearly_below_it_and_what_was_not_read_is_not_known()
    {
        let (loads, filesystem) = of("heavy_above = \"80%\"\n");
        assert_eq!(loads.pressure(&filesystem), Pressure::Unknown);
        let after = |load: f64| {
            loads.take(&filesystem, Ok(Load::new(load)));
            loads.pressure(&filesystem)
        };
        assert_eq!(after(0.79), Pressure::Calm { reading: 1 });
        assert_eq!(after(0.8), Pressure::Busy { load: Load::new(0.8) });
        assert_eq!(after(0.7), Pressure::Busy { load: Load::new(0.7) });
        assert!(loads.is_any_busy());
        loads.take(&filesystem, Err("no answer".into()));
        assert_eq!(loads.pressure(&filesystem), Pressure::Busy { load: Load::new(0.7) });
        loads.take(&filesystem, Ok(Load::new(0.6)));
        assert_eq!(loads.pressure(&filesystem), Pressure::Calm { reading: 4 });
        assert!(!loads.is_any_busy());
        let (loads, filesystem) = of("");
        loads.take(&filesystem, Ok(Load::new(1.0)));
        assert_eq!(loads.pressure(&filesystem), Pressure::Unwatched);
        let known = loads.known();
        assert_eq!((known.len(), known[0].load, known[0].jobs_wait), (1, Some(1.0), false));
    }

    #[test]
    fn staging_goes_slower_before_jobs_wait_and_never_stops() {
        let (loads, filesystem) = of("heavy_above = \"80%\"\n");
        let slowed = |said: Option<u64>| {
            let directories = ["/home/a", "/scratch/a"].map(Path::new);
            loads.slowed(directories, said.map(|said| Rate(Bytes(said)))).map(|(_, rate)| rate.0.0)
        };
        loads.take(&filesystem, Ok(Load::new(0.65)));
        assert_eq!(slowed(None), None);
        loads.take(&filesystem, Ok(Load::new(0.72)));
        assert_eq!(loads.pressure(&filesystem), Pressure::Calm { reading: 2 });
        assert_eq!(
            (slowed(Some(1000)), slowed(Some(1)), slowed(None)),
            (Some(500), Some(1), Some(800_000_000))
        );
        assert_eq!(loads.slowed(["/home/a"].map(Path::new), None), None);
        loads.take(&filesystem, Ok(Load::new(0.3)));
        assert_eq!(slowed(Some(1000)), None);
    }
}
