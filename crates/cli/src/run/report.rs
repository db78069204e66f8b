//! The record of a run.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context, Result};
use ondeck_core::{Bytes, duration};
use serde::Serialize;

use super::caches::RunCache;

/// What `--report` writes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The run's name.
    pub id: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// What `ondeck run` exited with.
    pub exit_code: u8,
    /// The program's end.
    pub program: Program,
    /// Whether the program ran on disk, and why.
    pub fallback: Option<String>,
    /// The RAM disk.
    pub ram_disk: Option<RamDiskReport>,
    /// The job's directories.
    pub directories: Vec<DirectoryReport>,
    /// Directories that were shown through a cache.
    pub caches: Vec<CacheReport>,
    /// Every phase in order.
    pub phases: Vec<Phase>,
    /// Whether all results are on disk: every checksum is in a manifest, sizes agree, the target is synced.
    pub results_on_disk: bool,
    /// Directories that were renamed while the program ran: their results are where they are now.
    pub moved: Vec<Moved>,
    /// Files that someone else changed on disk meanwhile, and the name that the program's version has beside them.
    pub put_beside: Vec<ConflictReport>,
    /// Files that the program deleted and that someone else had changed: they are still there.
    pub kept: Vec<String>,
    /// Entries that could not be staged.
    pub errors: Vec<String>,
    /// What the user was told.
    pub notes: Vec<String>,
    /// Seconds the program waited for staging, before and after it ran.
    pub waited_seconds: f64,
}

/// The program's end.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Program {
    /// Its exit code; 128 + n for signal n.
    pub exit_code: u8,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// How long it ran.
    pub seconds: f64,
    /// Processes that it left behind and that were ended.
    pub left_behind: u64,
}

/// The RAM disk.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RamDiskReport {
    /// What it lends at most, in bytes.
    pub size: u64,
    /// The most that was seen in use.
    pub peak_used: u64,
    /// Whether the program filled it.
    pub full: bool,
    /// Large files use huge pages.
    pub huge_pages: bool,
    /// Whether it is kept out of swap.
    pub no_swap: bool,
}

/// A directory of the job.
#[derive(Clone, Debug, Serialize)]
pub struct DirectoryReport {
    pub path: String,
    /// Whether it was copied in before the program.
    pub input: bool,
    /// Whether it was brought home after it.
    pub output: bool,
    /// `bind`, `mirror`, `overlay` or `disk`.
    pub mechanism: &'static str,
}

/// A directory that was shown through a cache, and what that did.
#[derive(Clone, Debug, Serialize)]
pub struct CacheReport {
    pub path: String,
    /// Bytes of data and names that it might hold.
    pub capacity: u64,
    /// Bytes that were read from the directory.
    pub fetched: u64,
    /// Bytes that were written back to it.
    pub written_back: u64,
    /// Of the bytes that were read through the server, the part that was resident, from 0 to 1; `None` if nothing was read
    /// so. What the kernel reads by itself is not counted.
    pub hit_ratio: Option<f64>,
    /// Pieces of 1 MiB that were evicted.
    pub evictions: u64,
    /// Whether everything is on disk.
    pub on_disk: bool,
}

impl CacheReport {
    /// As it is now.
    pub fn of(cache: &RunCache) -> CacheReport {
        let figures = cache.figures();
        let read = figures.hits + figures.misses;
        CacheReport {
            path: cache.path.to_string_lossy().into_owned(),
            capacity: cache.capacity.0,
            fetched: figures.fetched,
            written_back: figures.written_back,
            hit_ratio: (read > 0).then(|| figures.hits as f64 / read as f64),
            evictions: figures.evictions,
            on_disk: cache.home.load(Relaxed),
        }
    }

    /// For people.
    fn text(&self) -> String {
        // Rounded down, so that 100 % is all.
        let hits =
            self.hit_ratio.map_or(String::new(), |ratio| format!(", {} % hits", (ratio * 100.0) as u64));
        format!(
            "{} through a cache: {} read, {} written back{hits}, {}",
            self.path,
            Bytes(self.fetched),
            Bytes(self.written_back),
            crate::display::count(self.evictions, "eviction"),
        )
    }
}

/// A phase of the run, and what it moved.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Phase {
    /// `build`, `stage_in`, `program`, `stage_out`, `write_back`, …
    pub name: &'static str,
    /// How long it took.
    pub seconds: f64,
    /// Bytes it wrote, into files or an archive: holes are none.
    pub bytes: u64,
    /// Files it moved.
    pub files: u64,
    /// Bytes in a second.
    pub rate: f64,
}

/// A directory that is not where it was.
#[derive(Clone, Debug, Serialize)]
pub struct Moved {
    /// The path that was named.
    pub path: String,
    /// Where the directory is, with its results.
    pub now: String,
}

/// A file that somebody else has changed on disk meanwhile: both versions are there.
#[derive(Clone, Debug, Serialize)]
pub struct ConflictReport {
    /// The path that the program wrote.
    pub path: String,
    /// The name of the program's version.
    pub name: String,
}

impl Report {
    /// Adds a phase.
    pub fn phase(&mut self, name: &'static str, time: Duration, bytes: u64, files: u64) {
        let seconds = time.as_secs_f64();
        let rate = if seconds > 0.0 { bytes as f64 / seconds } else { 0.0 };
        self.phases.push(Phase { name, seconds, bytes, files, rate });
    }

    fn total(&self, name: &str) -> (f64, u64, u64) {
        self.phases.iter().filter(|phase| phase.name == name).fold(
            (0.0, 0, 0),
            |(seconds, bytes, files), phase| {
                (seconds + phase.seconds, bytes + phase.bytes, files + phase.files)
            },
        )
    }

    /// The last line for people.
    pub fn summary(&self) -> String {
        let (_, read_bytes, read_files) = self.total("stage_in");
        let (_, written_bytes, written_files) = self.total("stage_out");
        let files = |number| crate::display::count(number, "file");
        let staged = (!self.directories.is_empty()).then(|| {
            format!(
                "staged in {} ({}), staged out {} ({})",
                Bytes(read_bytes),
                files(read_files),
                Bytes(written_bytes),
                files(written_files),
            )
        });
        let moved: Vec<String> =
            staged.into_iter().chain(self.caches.iter().map(CacheReport::text)).collect();
        format!(
            "{}; the program ran {} and waited {} for staging",
            moved.join("; "),
            duration::display(Duration::from_secs_f64(self.program.seconds)),
            duration::display(Duration::from_secs_f64(self.waited_seconds)),
        )
    }

    /// Whether it can be written there, asked before the program is started: then it is not too late for another path.
    ///
    /// # Errors
    /// Why not.
    pub fn check(path: &Path) -> Result<()> {
        let check = || {
            if path.is_dir() || path.as_os_str().as_bytes().ends_with(b"/") {
                return Err(rustix::io::Errno::ISDIR);
            }
            // It is put in the place of what is there: not of a device's, which root could.
            if path.symlink_metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_symlink()) {
                return Err(rustix::io::Errno::EXIST);
            }
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let (parent, access) = (parent.unwrap_or(Path::new(".")), rustix::fs::Access::WRITE_OK);
            rustix::fs::access(parent.join("."), access | rustix::fs::Access::EXEC_OK)
        };
        check().with_context(|| format!("can't write the report {}; name another file", path.display()))
    }

    /// Writes it, under its name only when it is complete.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".ondeck-{}", std::process::id()));
        let text = serde_json::to_string_pretty(self)? + "\n";
        // Never through a symlink that someone put there.
        let write = || {
            let _ = std::fs::remove_file(&temporary);
            let mut file = std::fs::OpenOptions::new().write(true).create_new(true).open(&temporary)?;
            file.write_all(text.as_bytes())?;
            std::fs::rename(&temporary, path)
        };
        write().with_context(|| format!("can't write the report {}", path.display()))
    }
}
