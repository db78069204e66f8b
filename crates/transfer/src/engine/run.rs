//! One copy from its open ends to its summary: the workers, the flush, the manifest, reading back.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs;
use rustix::io::Errno;

use super::walk::Batch;
use super::{CopyItem, Counts, Engine, READING_SOURCE};
use crate::attributes::Privilege;
use crate::compare::Comparison;
use crate::dir::FdBudget;
use crate::error::StageError;
use crate::links::Links;
use crate::manifest::{Manifest, OpenError};
use crate::merge::MergePolicy;
use crate::progress::{Event, Monitor};
use crate::throttle::Throttle;
use crate::verify::{self, Verified};
use crate::work_stack::WorkStack;
use crate::{Options, Ownership};

/// What a copy did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// Regular files copied.
    pub files: u64,
    /// Directories made or merged.
    pub directories: u64,
    /// Symlinks, FIFOs, sockets and devices made.
    pub others: u64,
    /// Further names of files linked.
    pub hard_links: u64,
    /// Bytes of data in the copied files, holes included.
    pub bytes: u64,
    /// Bytes that were written: holes are not, and what was copied again counts again.
    pub bytes_written: u64,
    /// Files that were there already.
    pub unchanged: u64,
    /// Entries of the target removed.
    pub deleted: u64,
    /// Entries that failed; each was reported as an event.
    pub errors: u64,
    /// Those of them that were removed from the source before they could be copied.
    pub vanished: u64,
    /// Files that changed while they were copied and were copied again.
    pub retried: u64,
    /// Entries that kept the caller's owner or group, because only root can give files away.
    pub ownership_kept: u64,
    /// Entries that lost an attribute, with [`Options::attributes_best_effort`].
    pub attributes_lost: u64,
    /// Time spent copying.
    pub copying: Duration,
    /// Time the target filesystem took to confirm that it holds the data.
    pub syncing: Duration,
    /// What reading back found, if it was asked for.
    pub verified: Option<Verified>,
    /// Time spent reading back.
    pub verifying: Duration,
}

/// Where a copy goes.
pub enum TargetRoot {
    /// A directory that exists, open.
    Existing(OwnedFd),
    /// A directory to be made: its open parent and its name.
    New(OwnedFd, CString),
}

/// Both ends of a copy, open.
pub struct Roots {
    /// The source directory.
    pub source: OwnedFd,
    /// The target directory.
    pub target: TargetRoot,
    /// How messages and the manifest call the source.
    pub source_path: PathBuf,
    /// How messages and the manifest call the target.
    pub target_path: PathBuf,
}

pub(super) fn run(
    roots: Roots,
    single: Option<(CString, CString)>,
    options: &Options,
    policy: Option<&dyn MergePolicy>,
    monitor: &Monitor<'_>,
) -> Result<Summary, StageError> {
    let Roots { source, target, source_path, target_path } = roots;
    let began_at = SystemTime::now();
    let target_error = |error: Errno| StageError::Target { path: target_path.clone(), source: error.into() };
    let manifest = match &options.manifest {
        Some(path) if !options.dry_run => {
            Some(Manifest::open(path, &source_path, &target_path).map_err(|error| match error {
                OpenError::Busy => StageError::Busy { path: target_path.clone() },
                OpenError::Io(source) => StageError::Manifest { path: path.clone(), source },
            })?)
        }
        _ => None,
    };
    let (target_fd, new_name) = match target {
        TargetRoot::Existing(fd) => (fd, None),
        TargetRoot::New(parent, name) => (parent, Some(name)),
    };
    let sync_fd = rustix::io::fcntl_dupfd_cloexec(&target_fd, 0).map_err(target_error)?;
    let source_fs = rustix::io::fcntl_dupfd_cloexec(&source, 0)
        .map_err(|error| StageError::Source { path: source_path.clone(), source: error.into() })?;
    let (source_name, single) = single.unzip();
    let mut engine = Engine {
        options,
        policy,
        monitor,
        counts: Counts::default(),
        stack: WorkStack::new(),
        links: Links::default(),
        budget: FdBudget::of_this_process(),
        privilege: Privilege::of_this_process(),
        manifest,
        throttle: options.bandwidth.map(Throttle::new),
        single,
        root_parent: None,
    };
    let root = match new_name {
        Some(name) => engine.make_root(source, target_fd, name),
        None => engine.open_root(source, target_fd),
    };
    let root = root.map_err(|fault| match fault.source.raw_os_error() {
        Some(code) if code == Errno::WOULDBLOCK.raw_os_error() => {
            StageError::Busy { path: target_path.clone() }
        }
        _ if fault.action == READING_SOURCE => {
            StageError::Source { path: source_path.clone(), source: fault.source }
        }
        _ => StageError::Target { path: target_path.clone(), source: fault.source },
    })?;
    match &source_name {
        Some(name) => engine.stack.push([CopyItem::Copy(Batch::of_one(root.clone(), name))]),
        None => engine.begin(&root),
    }

    let began = Instant::now();
    let workers = options.worker_count_for(&source_fs, &sync_fd);
    std::thread::scope(|scope| {
        // Deleting a deep tree recurses; only the pages that are used cost anything.
        const STACK: usize = 32 << 20;
        let mut started = 0;
        for number in 0..workers {
            let engine = &engine;
            let thread = std::thread::Builder::new().name(format!("stage-{number}")).stack_size(STACK);
            started += usize::from(thread.spawn_scoped(scope, move || engine.work()).is_ok());
        }
        // Out of threads (a limit of the batch system): slower, but it goes on.
        if started == 0 {
            engine.work();
        }
    });
    let copying = began.elapsed();
    let cancelled = monitor.progress.is_cancelled();

    let began = Instant::now();
    // A copy that found nothing to do and nothing that an earlier one may have left unsynced need not wait.
    if options.sync && !options.dry_run && !engine.counts.idle() {
        fs::syncfs(&sync_fd)
            .map_err(|error| StageError::Sync { path: target_path.clone(), source: error.into() })?;
    }
    let syncing = began.elapsed();
    // After the flush, which a lost server of the target would not have made fail.
    let pass_gate = || options.gate.as_ref().map_or(Ok(()), |gate| gate.check().map_err(StageError::Gate));
    pass_gate()?;
    if let Some(manifest) = &engine.manifest
        && options.sync
    {
        // What a failed directory kept from being confirmed may be there still; but reading back needs a manifest in
        // which every path stands once.
        let partial = cancelled || (monitor.progress.errors.load(Ordering::Relaxed) > 0 && !options.verify);
        manifest.synced(partial).map_err(|source| StageError::Manifest {
            path: options.manifest.clone().unwrap_or_default(),
            source,
        })?;
    }
    if cancelled {
        return Err(StageError::Interrupted);
    }

    let began = Instant::now();
    let mut verified = None;
    if let Some(path) = &options.manifest
        && options.verify
        && !options.dry_run
    {
        let verify_error = |source| StageError::Manifest { path: path.clone(), source };
        let fds = root.fds(&engine.budget).map_err(|fault| verify_error(fault.source))?;
        let dir = fds.target().map_err(|fault| verify_error(fault.source))?;
        // What is found to be wrong must not be taken for done when the copy is run again.
        let event = |event: Event<'_>| {
            if let (Event::Failed(error), Some(manifest)) = (&event, &engine.manifest) {
                manifest.disown(&error.path);
            }
            (monitor.event)(event);
        };
        let monitor = Monitor { progress: monitor.progress, event: &event };
        let failed = monitor.progress.errors.load(Ordering::Relaxed) > 0;
        let mut found = verify::verify(dir, path, workers, &monitor).map_err(verify_error)?;
        // What a policy keeps or inherits is its own affair.
        if policy.is_none() && options.ownership == Ownership::Preserve {
            let comparison = Comparison::new(options, &monitor, began_at, failed);
            let compared = match (&source_name, &engine.single) {
                (Some(name), Some(target_name)) => {
                    comparison.single(fds.source.as_fd(), name, dir, target_name)
                }
                _ => comparison.trees(fds.source.as_fd(), dir, workers),
            };
            found.compared = compared.matching;
            found.changed = compared.changed;
            found.failed += compared.differing;
        }
        if monitor.progress.is_cancelled() {
            return Err(StageError::Interrupted);
        }
        verified = Some(found);
        pass_gate()?;
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counts = &engine.counts;
    Ok(Summary {
        files: count(&counts.files),
        directories: count(&counts.directories),
        others: count(&counts.others),
        hard_links: count(&counts.hard_links),
        bytes: count(&counts.bytes),
        bytes_written: count(&counts.bytes_written),
        unchanged: count(&counts.unchanged),
        deleted: count(&counts.deleted),
        errors: count(&monitor.progress.errors),
        vanished: count(&counts.vanished),
        retried: count(&counts.retried),
        ownership_kept: count(&engine.privilege.ownership_kept),
        attributes_lost: count(&counts.attributes_lost),
        copying,
        syncing,
        verified,
        verifying: began.elapsed(),
    })
}
