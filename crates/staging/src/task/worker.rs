//! The worker, and what the kinds of its work have in common.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ondeck_api::wire::{JobDirectory, TaskWork, Unit};
use ondeck_core::Bytes;
use ondeck_transfer::credentials::User;
use ondeck_transfer::{EntryError, Event, Gate, Options, StageError};
use rustix::fs::{Mode, OFlags};

use super::order::{Line, MOST_NAMED, TaskOrder};
use super::pipes::Shared;
use super::{Failure, RAM_DISK};
use crate::merge_back::Loosened;
use crate::slot::Slot;

/// Names in a report.
const MOST: u64 = MOST_NAMED as u64;

/// Entries left behind that are named: they are for the job's note, which is short.
const MOST_LEFT: usize = 5;

/// Beyond the time for which a node believes what it has seen: the kernel counts in ticks.
pub const SETTLED: Duration = Duration::from_millis(20);

/// The process that does the work of a task, as the user, below the task's init.
pub struct Worker<'a> {
    /// What is to be done.
    pub order: &'a TaskOrder,
    /// Who it has become.
    pub user: &'a User,
    /// What the init sees.
    pub shared: &'static Shared,
    /// Where a script's output goes.
    pub log: OwnedFd,
    /// Where a script asks for its limits.
    pub limits: OwnedFd,
    /// The owner's part of the RAM disk.
    pub ram: OwnedFd,
    /// Whether the RAM disk is whole.
    pub gate: Gate,
    /// Where the init listens.
    pub(super) lines: Mutex<OwnedFd>,
    /// What happened to single entries.
    pub findings: Findings,
    /// What was done to names of files that have several, which may be in several directories.
    pub loosened: Arc<Loosened>,
}

/// What happened to single entries.
#[derive(Default)]
pub struct Findings {
    failed: AtomicU64,
    beside: AtomicU64,
    /// Entries that the job had deleted, and that others had changed.
    pub kept: AtomicU64,
    /// Entries that could not be read while what is left was salvaged.
    pub gone: AtomicU64,
    /// Entries of other users that can't be read, and whose the first ones are.
    left_behind: Mutex<(u64, Vec<String>)>,
    /// Whether a target had no room.
    pub full: AtomicBool,
    first: Mutex<Option<String>>,
}

/// One of the job's directories, open on disk.
pub struct OpenDirectory<'a> {
    /// As it was asked for.
    pub wanted: &'a JobDirectory,
    /// Its real path.
    pub path: PathBuf,
    /// It, on disk.
    pub disk: OwnedFd,
    /// Paths below it that are directories of the job themselves.
    pub nested: Vec<Vec<u8>>,
}

/// Tells the init.
pub fn send(lines: &Mutex<OwnedFd>, line: &Line) {
    let Ok(mut text) = serde_json::to_vec(line) else { return };
    text.push(b'\n');
    let pipe = lock(lines);
    let mut rest = &text[..];
    while !rest.is_empty() {
        match rustix::io::write(&*pipe, rest) {
            Ok(length) => rest = &rest[length..],
            Err(rustix::io::Errno::INTR) => {}
            // The init is gone, and with it this process in a moment.
            Err(_) => return,
        }
    }
}

/// A poisoned lock guards plain data, which is still good.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A number of entries in words.
pub fn entries(number: u64) -> String {
    if number == 1 { "1 entry".to_owned() } else { format!("{number} entries") }
}

/// Whether an error says that there is no room.
pub fn is_no_room(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}

/// Whether a file can't be read because its server does not have it any more.
fn is_gone(error: &EntryError) -> bool {
    matches!(error.action, "opening it" | "reading it" | "listing it")
        && matches!(
            error.source.raw_os_error(),
            Some(libc::ENOTCONN | libc::EIO | libc::ESTALE | libc::ENOENT)
        )
}

/// Whether a copy as a whole failed for want of room in what it writes to.
pub fn failed_for_room(error: &StageError) -> bool {
    match error {
        StageError::Target { source, .. }
        | StageError::Manifest { source, .. }
        | StageError::Sync { source, .. } => is_no_room(source),
        _ => false,
    }
}

impl Worker<'_> {
    /// How all copies of this task go.
    pub fn options(&self) -> Options {
        Options {
            bandwidth: self.order.request.bandwidth,
            // What an interrupted task of this job has left under temporary names is found by the next one.
            tag: Some(self.order.request.label().to_owned()),
            gate: Some(self.gate.clone()),
            ..Options::default()
        }
    }

    /// Notes what happened to an entry of a directory.
    pub fn note(&self, directory: &Path, event: &Event<'_>) {
        let within = |path: &[u8]| directory.join(OsStr::from_bytes(path)).display().to_string();
        match event {
            Event::Failed(error) if self.order.request.work.is_salvage() && is_gone(error) => {
                let text = format!("{}: {}: {}", within(&error.path), error.action, error.source);
                if self.findings.gone.fetch_add(1, Relaxed) < MOST {
                    send(&self.lines, &Line::Error(text));
                }
            }
            Event::Failed(error) => {
                if is_no_room(&error.source) {
                    self.findings.full.store(true, Relaxed);
                }
                let text = format!("{}: {}: {}", within(&error.path), error.action, error.source);
                lock(&self.findings.first).get_or_insert_with(|| text.clone());
                if self.findings.failed.fetch_add(1, Relaxed) < MOST {
                    send(&self.lines, &Line::Error(text));
                }
            }
            Event::LeftBehind { path, owner } => {
                let mut left = lock(&self.findings.left_behind);
                left.0 += 1;
                if left.1.len() < MOST_LEFT {
                    left.1.push(format!("{} (of uid {owner})", within(path)));
                }
            }
            Event::PutBeside { path, name } => {
                let number = self.findings.beside.fetch_add(1, Relaxed);
                let parent = path.iter().rposition(|byte| *byte == b'/').map_or(&[][..], |at| &path[..=at]);
                if number < MOST {
                    send(&self.lines, &Line::Beside(within(&[parent, name].concat())));
                }
            }
            _ => {}
        }
    }

    /// Tells of an entry that is not as its owner would expect.
    pub fn tell_error(&self, text: String) {
        send(&self.lines, &Line::Error(text));
    }

    /// The first entry that failed, and how many did.
    pub fn failures(&self) -> (u64, String) {
        (self.findings.failed.load(Relaxed), lock(&self.findings.first).clone().unwrap_or_default())
    }

    /// How many entries of other users were left behind, and the first of them.
    pub fn left_behind(&self) -> (u64, Vec<String>) {
        lock(&self.findings.left_behind).clone()
    }

    /// How many files were put beside others.
    pub fn put_beside(&self) -> u64 {
        self.findings.beside.load(Relaxed)
    }

    /// Opens directories on disk, as the user. One that is written only is made if it is missing.
    pub fn open_all<'d>(&self, directories: &'d [JobDirectory]) -> Result<Vec<OpenDirectory<'d>>, Failure> {
        self.open_chosen(directories, |_| true)
    }

    /// Opens some of the directories.
    pub fn open_chosen<'d>(
        &self,
        directories: &'d [JobDirectory],
        chosen: impl Fn(&JobDirectory) -> bool,
    ) -> Result<Vec<OpenDirectory<'d>>, Failure> {
        let chosen = directories.iter().filter(|wanted| chosen(wanted));
        let mut opened: Vec<OpenDirectory<'d>> =
            chosen.map(|wanted| self.open(wanted)).collect::<Result<_, _>>()?;
        let paths: Vec<PathBuf> = opened.iter().map(|directory| directory.path.clone()).collect();
        for directory in &mut opened {
            let below = paths.iter().filter(|path| **path != directory.path);
            let below = below.filter_map(|path| path.strip_prefix(&directory.path).ok());
            directory.nested = below.map(|path| path.as_os_str().as_bytes().to_vec()).collect();
        }
        Ok(opened)
    }

    fn open<'d>(&self, wanted: &'d JobDirectory) -> Result<OpenDirectory<'d>, Failure> {
        let path = wanted.path.display();
        let who = &self.user.name;
        let directive = if wanted.input { "#RSA_DATA_IN" } else { "#RSA_DATA_OUT" };
        let open = |path: &Path| -> io::Result<(PathBuf, OwnedFd)> {
            let real = path.canonicalize()?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let disk = rustix::fs::open(&real, flags, Mode::empty())?;
            Ok((real, disk))
        };
        let missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let mut found = open(&wanted.path);
        // Results come home also if somebody has removed the directory meanwhile.
        let comes_home = matches!(self.order.request.work, TaskWork::BringHome { .. }) && wanted.output;
        if (!wanted.input || comes_home) && found.as_ref().is_err_and(missing) {
            rustix::fs::mkdir(&wanted.path, Mode::from_raw_mode(0o755)).map_err(|error| {
                Failure::lasting(format!(
                    "{path}: can't be made by {who} on {}: {error}; make it, or correct {directive}",
                    self.order.node
                ))
            })?;
            found = open(&wanted.path);
        }
        let (real, disk) = found.map_err(|error| {
            let remedy = match error.kind() {
                io::ErrorKind::NotFound => {
                    format!("make it before the job is submitted, or correct {directive}")
                }
                io::ErrorKind::PermissionDenied => {
                    format!("{who} must be able to read it; change its mode, or correct {directive}")
                }
                _ => format!("{directive} must name a directory that this node sees, too"),
            };
            let transient = matches!(error.raw_os_error(), Some(libc::EIO | libc::ESTALE | libc::ETIMEDOUT));
            let message = format!("{path}: can't be read on {}: {error}; {remedy}", self.order.node);
            Failure { message, retryable: transient }
        })?;
        Ok(OpenDirectory { wanted, path: real, disk, nested: Vec::new() })
    }

    /// Tells what has been found.
    pub fn tell_units(&self, units: &[Unit]) {
        // One line must not grow without bound.
        for part in units.chunks(100) {
            send(&self.lines, &Line::Units(part.to_vec()));
        }
    }

    /// The path of a job's directory in the RAM disk.
    pub fn slot_path(&self, directory: &JobDirectory) -> PathBuf {
        Path::new(RAM_DISK).join(Slot::of_task(directory).name())
    }

    /// Says that the RAM disk was whole, or why this can't be claimed.
    pub fn check_gate(&self) -> Result<(), Failure> {
        self.gate.check().map_err(Failure::passing)
    }

    /// How much the RAM disk holds.
    pub fn capacity(&self) -> Bytes {
        rustix::fs::fstatvfs(&self.ram).map_or(Bytes::ZERO, |stat| Bytes(stat.f_blocks * stat.f_frsize))
    }
}
