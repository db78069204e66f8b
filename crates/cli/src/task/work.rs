//! The worker: it has become the user, and does the work.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use ondeck_agent::fleet::Fleet;
use ondeck_agent::task::{Line, MOST_NAMED, Order};
use ondeck_api::Config;
use ondeck_api::wire::{Directory, Unit, Work};
use ondeck_core::Bytes;
use ondeck_transfer::credentials::User;
use ondeck_transfer::{EntryError, Event, Gate, Options, StageError};
use rustix::fs::{Mode, OFlags};

use super::confine;
use super::supervise::{Pipes, Shared, let_go_of_streams};
use super::{Failure, kept};
use crate::run::homecoming::Loosened;

/// Names in a report.
const MOST: u64 = MOST_NAMED as u64;

/// Entries left behind that are named: they are for the job's note, which is short.
const MOST_LEFT: usize = 5;

/// The worker.
pub struct Worker<'a> {
    /// What is to be done.
    pub order: &'a Order,
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
    lines: Mutex<OwnedFd>,
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
pub struct Opened<'a> {
    /// As it was asked for.
    pub wanted: &'a Directory,
    /// Its real path.
    pub path: PathBuf,
    /// It, on disk.
    pub disk: OwnedFd,
    /// Paths below it that are directories of the job themselves.
    pub nested: Vec<Vec<u8>>,
}

/// Becomes the user and does the work; gives the process's exit code.
pub fn work(order: &Order, user: &User, shared: &'static Shared, pipes: Pipes) -> i32 {
    let Pipes { lines, log, limits } = pipes;
    let lines = Mutex::new(lines);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let log = become_user(order, user, log)?;
        let ram = kept::open().map_err(|error| {
            Failure::passing(format!("{}: can't open the RAM disk {}: {error}", order.node, order.ramdisk))
        })?;
        let worker = Worker {
            order,
            user,
            shared,
            log,
            limits,
            ram,
            // What is salvaged is a part, which needs no witness.
            gate: if order.request.work.is_salvage() { Gate::new(|| Ok(())) } else { gate(order)? },
            lines: Mutex::new(rustix::io::fcntl_dupfd_cloexec(&*lock(&lines), 0).map_err(starting(order))?),
            findings: Findings::default(),
            loosened: Arc::default(),
        };
        match &order.request.work {
            Work::Survey { directories, home } => worker.survey(directories, *home),
            Work::Fill { directories, script, .. } => worker.fill(directories, script.as_deref()),
            Work::CatchUp { directories } => worker.catch_up(directories),
            Work::BringHome { directories, salvage: true, .. } => worker.salvage(directories),
            Work::BringHome { directories, script, pack, salvage: false } => {
                worker.bring_home(directories, script.as_deref(), *pack)
            }
        }
    }));
    let result = result.unwrap_or_else(|_| Err(Failure::lasting("the task has a defect; its log has more")));
    let done = match result {
        Ok(message) => Line::Done { ok: true, message, retryable: false },
        Err(Failure { message, retryable }) => Line::Done { ok: false, message: Some(message), retryable },
    };
    send(&lines, &done);
    0
}

fn starting(order: &Order) -> impl Fn(rustix::io::Errno) -> Failure {
    |error| Failure::passing(format!("{}: can't start the task: {error}", order.node))
}

fn become_user(order: &Order, user: &User, log: OwnedFd) -> Result<OwnedFd, Failure> {
    let_go_of_streams(log.as_fd())
        .map_err(|error| Failure::passing(format!("{}: can't start the task: {error}", order.node)))?;
    user.become_for_good().map_err(|error| Failure::passing(format!("{}: {error}", order.node)))?;
    confine::limit();
    // Modes come from the source; what has none gets one of its own, and a script a mask.
    rustix::process::umask(Mode::empty());
    if std::env::set_current_dir(&order.request.work_dir).is_err() {
        std::env::set_current_dir("/").map_err(|error| Failure::passing(error.to_string()))?;
    }
    Ok(log)
}

/// Asks this node's agent whether the RAM disk is whole: now, and later whether it was all the time.
fn gate(order: &Order) -> Result<Gate, Failure> {
    let mut config = Config::default();
    config.agent.socket.clone_from(&order.socket);
    let (fleet, id) = (Fleet::new(&config), order.ramdisk.clone());
    let ask = move || -> Result<String, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| format!("can't ask the agent: {error}"))?;
        let seen = runtime
            .block_on(fleet.witness(&id))
            .map_err(|error| format!("nobody can say whether the RAM disk {id} is whole: {error}"))?;
        if seen.faults.is_empty() {
            Ok(seen.witness)
        } else {
            Err(format!("the RAM disk {id} is not whole: {}", seen.faults.join("; ")))
        }
    };
    let first = ask().map_err(Failure::passing)?;
    Ok(Gate::new(move || {
        if ask()? == first {
            Ok(())
        } else {
            Err("the RAM disk lost a connection to one of its nodes while it was copied".to_owned())
        }
    }))
}

fn send(lines: &Mutex<OwnedFd>, line: &Line) {
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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
    pub fn open_all<'d>(&self, directories: &'d [Directory]) -> Result<Vec<Opened<'d>>, Failure> {
        self.open_chosen(directories, |_| true)
    }

    /// Opens some of the directories.
    pub fn open_chosen<'d>(
        &self,
        directories: &'d [Directory],
        chosen: impl Fn(&Directory) -> bool,
    ) -> Result<Vec<Opened<'d>>, Failure> {
        let chosen = directories.iter().filter(|wanted| chosen(wanted));
        let mut opened: Vec<Opened<'d>> = chosen.map(|wanted| self.open(wanted)).collect::<Result<_, _>>()?;
        let paths: Vec<PathBuf> = opened.iter().map(|directory| directory.path.clone()).collect();
        for directory in &mut opened {
            let below = paths.iter().filter(|path| **path != directory.path);
            let below = below.filter_map(|path| path.strip_prefix(&directory.path).ok());
            directory.nested = below.map(|path| path.as_os_str().as_bytes().to_vec()).collect();
        }
        Ok(opened)
    }

    fn open<'d>(&self, wanted: &'d Directory) -> Result<Opened<'d>, Failure> {
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
        let comes_home = matches!(self.order.request.work, Work::BringHome { .. }) && wanted.output;
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
        Ok(Opened { wanted, path: real, disk, nested: Vec::new() })
    }

    /// Tells what has been found.
    pub fn tell_units(&self, units: &[Unit]) {
        // One line must not grow without bound.
        for part in units.chunks(100) {
            send(&self.lines, &Line::Units(part.to_vec()));
        }
    }

    /// The path of a job's directory in the RAM disk.
    pub fn slot_path(&self, directory: &Directory) -> PathBuf {
        Path::new(confine::RAM_DISK).join(&directory.name)
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
