//! The workers: how directories are walked and entries are brought over.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, RawDir, RenameFlags, Stat, XattrFlags};
use rustix::io::Errno;

use crate::acl::closed;
use crate::attributes::{self, ACL_ACCESS, ACL_DEFAULT, Privilege, is_directory};
use crate::checksum::{Checksum, Digest};
use crate::compare::Comparison;
use crate::dir::{
    self, DirFds, DirNode, FdBudget, Kind, NewDir, OPEN_DIRECTORY, is_partial_name, tagged_name,
};
use crate::error::{During, Fault, StageError};
use crate::file::{LargeFile, TRIES, kept_changing};
use crate::links::{Links, Role, Waiting};
use crate::manifest::{Lines, Manifest, OpenError, Previous, Record};
use crate::merge::{Action, DirectoryAction, MergePolicy, Merged, Place, Side};
use crate::progress::{Event, Monitor};
use crate::queue::{Done, Queue};
use crate::throttle::Throttle;
use crate::verify::{self, Verified};
use crate::whereabouts::{Whereabouts, whereabouts};
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

/// Counters of the workers; those that a watcher needs live are in [`crate::Progress`].
#[derive(Default)]
pub(crate) struct Counts {
    files: AtomicU64,
    directories: AtomicU64,
    made_directories: AtomicU64,
    others: AtomicU64,
    hard_links: AtomicU64,
    bytes: AtomicU64,
    bytes_written: AtomicU64,
    unchanged: AtomicU64,
    deleted: AtomicU64,
    pub retried: AtomicU64,
    attributes_lost: AtomicU64,
    vanished: AtomicU64,
}

impl Counts {
    /// Whether the target has nothing of this copy's or of an earlier one's.
    fn idle(&self) -> bool {
        [&self.files, &self.made_directories, &self.others, &self.hard_links, &self.deleted, &self.unchanged]
            .iter()
            .all(|counter| counter.load(Ordering::Relaxed) == 0)
    }

    /// Bytes were written into a file of the target.
    pub fn written(&self, monitor: &Monitor<'_>, bytes: u64) {
        self.bytes_written.fetch_add(bytes, Ordering::Relaxed);
        monitor.progress.bytes_written.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn deleted(&self) {
        self.deleted.fetch_add(1, Ordering::Relaxed);
    }
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

/// Some entries of one directory, all of one block of it.
pub(crate) struct Batch {
    node: Arc<DirNode>,
    /// Names, each with its NUL.
    names: Vec<u8>,
    entries: Vec<(u32, FileType)>,
}

pub(crate) enum Task {
    /// Enter a directory found in its parent.
    Enter { parent: Arc<DirNode>, name: CString },
    /// Read the next block of a directory.
    Read { node: Arc<DirNode>, listing: OwnedFd },
    /// Copy some entries.
    Copy(Batch),
    /// Help with the chunks of a large file.
    Chunks(Arc<LargeFile>),
}

/// What all workers share.
pub(crate) struct Engine<'a> {
    pub options: &'a Options,
    pub policy: Option<&'a dyn MergePolicy>,
    pub monitor: &'a Monitor<'a>,
    pub counts: Counts,
    pub queue: Queue<Task>,
    pub links: Links,
    pub budget: FdBudget,
    pub privilege: Privilege,
    pub manifest: Option<Manifest>,
    pub throttle: Option<Throttle>,
    /// The name the root's single file gets in the target, when the source is a file.
    pub single: Option<CString>,
    /// The directory in which a new root is renamed when it is complete.
    root_parent: Option<OwnedFd>,
}

/// A worker's own state.
pub(crate) struct Worker {
    /// The data buffer.
    pub buffer: Vec<u8>,
    pub lines: Lines,
}

const READING_SOURCE: &str = "reading the source";
const RESTORING: &str = "giving it its mode back";

/// Bytes of directory entries read at a time: about a thousand names.
const LISTING: usize = 32 << 10;
/// Entries handed out together. A directory of usual size is one worker's, because two that make files in the same
/// directory wait for each other's lock; it is shared when a worker has nothing else to do.
const BATCH: usize = 512;

/// Makes `target` a copy of `source`, a directory or a file. A target directory that exists is merged into.
///
/// Symlinks among the two arguments are followed; within the tree none is. Entries that fail are events and are
/// counted, the rest goes on.
///
/// # Errors
/// [`StageError`] if the copy as a whole could not begin or go on. It can be run again and then resumes.
pub fn stage(
    source: &Path,
    target: &Path,
    options: &Options,
    monitor: &Monitor<'_>,
) -> Result<Summary, StageError> {
    let source_error = |error: Errno| StageError::Source { path: source.to_owned(), source: error.into() };
    let target_error = |error: Errno| StageError::Target { path: target.to_owned(), source: error.into() };
    let opened = fs::open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(source_error)?;
    let stat = fs::fstat(&opened).map_err(source_error)?;
    let existing = match fs::open(target, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(fd) => Some((fs::fstat(&fd).map_err(target_error)?, fd)),
        Err(Errno::NOENT) if fs::lstat(&*trim_slashes(target)).is_ok() => {
            return Err(StageError::Mismatch(format!(
                "{} is a symlink to nothing; remove it",
                target.display()
            )));
        }
        Err(Errno::NOENT) => None,
        Err(error) => return Err(target_error(error)),
    };
    // The absolute paths name the pair in the manifest, whatever directory the next run is started from.
    let source_path = source.canonicalize().unwrap_or_else(|_| source.to_owned());
    let open_parent = |path: &Path| -> Result<(OwnedFd, CString), Errno> {
        let trimmed = trim_slashes(path);
        let name = trimmed.file_name().ok_or(Errno::ISDIR)?;
        let parent =
            trimmed.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let fd = fs::open(parent, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok((fd, CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)?))
    };
    let absolute =
        |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or(path.into());
    let target_path = absolute(&trim_slashes(target));
    if is_directory(&stat) {
        let source = fs::openat(&opened, c".", OPEN_DIRECTORY, Mode::empty()).map_err(source_error)?;
        let target = match existing {
            Some((stat, fd)) if is_directory(&stat) => TargetRoot::Existing(
                fs::openat(&fd, c".", OPEN_DIRECTORY, Mode::empty()).map_err(target_error)?,
            ),
            Some(_) => {
                let why = format!("{} is a directory but {} is not", source_path.display(), target.display());
                return Err(StageError::Mismatch(why));
            }
            None => {
                let (parent, name) = open_parent(target).map_err(target_error)?;
                TargetRoot::New(parent, name)
            }
        };
        if let TargetRoot::Existing(target) = &target {
            let target = fs::fstat(target).map_err(target_error)?;
            if (target.st_dev, target.st_ino) == (stat.st_dev, stat.st_ino) {
                refuse_nesting(&source_path, &source_path)?;
            }
        }
        refuse_nesting(&source_path, &target_path)?;
        let place = match &target {
            TargetRoot::Existing(target) => InPlace::of(target, &target_path),
            TargetRoot::New(parent, _) => InPlace::of_parent(parent, &target_path),
        };
        let place = place.map_err(target_error)?;
        let summary =
            stage_roots(Roots { source, target, source_path, target_path }, options, None, monitor)?;
        return place.confirm().map(|()| summary);
    }
    if existing.as_ref().is_some_and(|(stat, _)| is_directory(stat)) {
        return Err(StageError::Mismatch(format!(
            "{} is a directory but {} is not; name the file to be made in it",
            target.display(),
            source.display()
        )));
    }
    // A single file: a walk over its parent directory that has this one entry. A symlink on the command line is
    // followed, on either side.
    let (source_dir, name) = open_parent(&source_path).map_err(source_error)?;
    let (target_dir, target_name) =
        open_parent(if existing.is_some() { &target_path } else { target }).map_err(target_error)?;
    let place = InPlace::of_parent(&target_dir, &target_path).map_err(target_error)?;
    let roots =
        Roots { source: source_dir, target: TargetRoot::Existing(target_dir), source_path, target_path };
    let summary = run(roots, Some((name, target_name)), options, None, monitor)?;
    place.confirm().map(|()| summary)
}

/// A directory that is written to, and the path that must lead to it when success is claimed.
struct InPlace {
    directory: OwnedFd,
    path: PathBuf,
}

impl InPlace {
    fn of(directory: &OwnedFd, path: &Path) -> Result<InPlace, Errno> {
        Ok(InPlace { directory: rustix::io::fcntl_dupfd_cloexec(directory, 0)?, path: path.to_owned() })
    }

    /// The same of the directory that a new target is made in.
    fn of_parent(parent: &OwnedFd, path: &Path) -> Result<InPlace, Errno> {
        InPlace::of(parent, path.parent().unwrap_or(Path::new("/")))
    }

    fn confirm(self) -> Result<(), StageError> {
        match whereabouts(&self.path, self.directory.as_fd()) {
            Ok(Whereabouts::InPlace) => Ok(()),
            Ok(now) => Err(StageError::Moved { path: self.path, now }),
            Err(source) => Err(StageError::Target { path: self.path, source }),
        }
    }
}

/// The same between open directories, steered by a policy.
///
/// # Errors
/// As [`stage`].
pub fn stage_roots(
    roots: Roots,
    options: &Options,
    policy: Option<&dyn MergePolicy>,
    monitor: &Monitor<'_>,
) -> Result<Summary, StageError> {
    run(roots, None, options, policy, monitor)
}

fn trim_slashes(path: &Path) -> PathBuf {
    // `components` drops trailing slashes and single dots, and keeps everything that has a meaning.
    path.components().collect()
}

fn refuse_nesting(source: &Path, target: &Path) -> Result<(), StageError> {
    let why = if source == target {
        "source and target are the same directory"
    } else if target.starts_with(source) {
        "the target lies inside the source and would be copied into itself"
    } else if source.starts_with(target) {
        "the source lies inside the target"
    } else {
        return Ok(());
    };
    Err(StageError::Mismatch(format!("{} and {}: {why}", source.display(), target.display())))
}

fn run(
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
        queue: Queue::new(),
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
        Some(name) => engine.queue.push([Task::Copy(Batch::of_one(root.clone(), name))]),
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

impl Batch {
    fn new(node: &Arc<DirNode>) -> Self {
        Batch { node: node.clone(), names: Vec::new(), entries: Vec::new() }
    }

    fn of_one(node: Arc<DirNode>, name: &CStr) -> Self {
        Batch { node, names: name.to_bytes_with_nul().to_vec(), entries: vec![(0, FileType::Unknown)] }
    }

    /// Some of its entries as a batch of their own.
    fn part(&self, entries: &[(u32, FileType)]) -> Self {
        let mut part = Batch::new(&self.node);
        for (offset, file_type) in entries {
            if let Ok(name) = CStr::from_bytes_until_nul(&self.names[*offset as usize..]) {
                part.add(name, *file_type);
            }
        }
        part
    }

    fn add(&mut self, name: &CStr, file_type: FileType) {
        self.entries.push((self.names.len() as u32, file_type));
        self.names.extend_from_slice(name.to_bytes_with_nul());
    }
}

/// What is known of a target directory when it is entered.
struct Entered {
    target: Option<OwnedFd>,
    kind: Kind,
    partial: Option<CString>,
    restore_mode: Option<u32>,
    restore_source: Option<u32>,
}

impl Entered {
    /// A directory that a dry run would make.
    fn imagined() -> Self {
        Entered {
            target: None,
            kind: Kind::Imagined,
            partial: None,
            restore_mode: None,
            restore_source: None,
        }
    }
}

impl Engine<'_> {
    /// The root when the target directory exists.
    fn open_root(&self, source: OwnedFd, target: OwnedFd) -> Result<Arc<DirNode>, Fault> {
        let source_stat = fs::fstat(&source).during(READING_SOURCE)?;
        self.lock_root(&target)?;
        let target_stat = fs::fstat(&target).during("reading the target")?;
        let action = match (&self.single, self.policy) {
            (Some(_), _) => DirectoryAction::Merge { delete: false, attributes: false },
            (None, Some(policy)) => policy.directory(b"", source.as_fd(), Some(&target_stat)),
            (None, None) => self.default_directory_action(),
        };
        // Afterwards, because the policy looks at its mode.
        let restore_source = self.open_up_root(Side::Source, &source, &source_stat)?;
        let restore_mode = self.open_up_root(Side::Target, &target, &target_stat)?;
        let entered = Entered {
            target: Some(target),
            kind: Kind::Existing,
            partial: None,
            restore_mode,
            restore_source,
        };
        self.node(None, CString::default(), source, source_stat, entered, action)
    }

    /// Makes a root that shuts out its owner accessible. Returns the mode that it is to get back.
    fn open_up_root(&self, side: Side, root: &OwnedFd, stat: &Stat) -> Result<Option<u32>, Fault> {
        let single = self.single.is_some() || self.options.dry_run;
        let is_ours = side == Side::Target || self.policy.is_some_and(|policy| policy.may_open_up());
        if single || !is_ours || !self.is_closed_own(stat) {
            return Ok(None);
        }
        if let Some(policy) = self.policy {
            policy.opening_up(side, b"", stat);
        }
        fs::fchmod(root, Mode::from_raw_mode(stat.st_mode & 0o7777 | 0o700)).during("opening it")?;
        Ok(Some(stat.st_mode & 0o7777))
    }

    /// The root when the target directory is new.
    fn make_root(&mut self, source: OwnedFd, parent: OwnedFd, name: CString) -> Result<Arc<DirNode>, Fault> {
        let source_stat = fs::fstat(&source).during(READING_SOURCE)?;
        let entered = if self.options.dry_run {
            (self.monitor.event)(Event::Would("make directory", b""));
            Entered::imagined()
        } else {
            self.make_directory(parent.as_fd(), &name, true)?
        };
        if let Some(target) = &entered.target {
            self.lock_root(target)?;
        }
        self.root_parent = Some(parent);
        let action = match self.policy {
            Some(policy) => policy.directory(b"", source.as_fd(), None),
            None => self.default_directory_action(),
        };
        self.node(None, name, source, source_stat, entered, action)
    }

    fn default_directory_action(&self) -> DirectoryAction {
        DirectoryAction::Merge { delete: self.options.delete, attributes: true }
    }

    /// Keeps a second copy out of the same target. Filesystems without locks are used without.
    fn lock_root(&self, target: &OwnedFd) -> Result<(), Fault> {
        if self.options.dry_run || self.single.is_some() || self.options.tag.is_some() {
            return Ok(());
        }
        match fs::flock(target, fs::FlockOperation::NonBlockingLockExclusive) {
            Err(error @ Errno::WOULDBLOCK) => Err(Fault::new("locking the target", error)),
            _ => Ok(()),
        }
    }

    fn begin(&self, root: &Arc<DirNode>) {
        match self.listing(root) {
            Ok(listing) => self.queue.push([Task::Read { node: root.clone(), listing }]),
            Err(fault) => {
                self.failed(Vec::new(), fault);
                self.finished_one(root);
            }
        }
    }

    /// One worker's life: take a task, do it, until none is left.
    fn work(&self) {
        let mut worker = Worker { buffer: vec![0; self.options.buffer.max(1)], lines: Lines::new() };
        while let Some(task) = self.queue.pop() {
            // Also if it panics: the others must not wait for this one for ever.
            let _done = Done(&self.queue);
            match task {
                Task::Enter { parent, name } => self.enter(&parent, &name),
                Task::Read { node, listing } => self.read_block(node, listing),
                Task::Copy(batch) => self.copy_batch(&batch, &mut worker),
                Task::Chunks(file) => self.copy_chunk(file, &mut worker),
            }
            worker.lines.flush_if_old(self.manifest.as_ref());
        }
        if let Some(manifest) = &self.manifest {
            worker.lines.flush(manifest);
        }
    }

    /// Takes a source directory's next block of entries, and puts the rest of it below the work they make.
    fn read_block(&self, node: Arc<DirNode>, listing: OwnedFd) {
        if self.monitor.progress.is_cancelled() {
            return self.finished_one(&node);
        }
        let path = if self.options.exclude.is_empty() { Vec::new() } else { node.path() };
        let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING];
        let mut entries = RawDir::new(&listing, &mut buffer);
        let mut directories = Vec::new();
        let mut batches = vec![Batch::new(&node)];
        let mut block: Vec<(u64, u32, FileType)> = Vec::new();
        let mut names: Vec<u8> = Vec::new();
        let mut ended = false;
        loop {
            match entries.next() {
                None => {
                    ended = true;
                    break;
                }
                Some(Err(error)) => {
                    node.incomplete.store(true, Ordering::Relaxed);
                    self.failed(node.path(), Fault::new("listing it", error));
                    ended = true;
                    break;
                }
                Some(Ok(entry)) => {
                    let name = entry.file_name();
                    let bytes = name.to_bytes();
                    let excluded = || self.options.exclude.matches_listed(&path, &listing, &entry);
                    if !matches!(bytes, b"." | b"..") && !excluded() {
                        block.push((entry.ino(), names.len() as u32, entry.file_type()));
                        names.extend_from_slice(name.to_bytes_with_nul());
                    }
                }
            }
            // The kernel's block is used up: what follows would be the next one. A small directory is read to its end,
            // so that its descriptor does not wait in the queue until all below it is done.
            if entries.is_buffer_empty() && block.len() >= BATCH {
                break;
            }
        }
        // In the order of inode numbers, which on most disk filesystems is the order of the data.
        block.sort_unstable_by_key(|(inode, offset, _)| (*inode, *offset));
        for (_, offset, file_type) in block {
            let Ok(name) = CStr::from_bytes_until_nul(&names[offset as usize..]) else { continue };
            if self.options.tag.is_none() && is_partial_name(name.to_bytes()) {
                let path = dir::join(&node.path(), name.to_bytes());
                let why = "the name is that of an incomplete copy of Ondeck; rename it if you need it copied";
                self.failed(path, Fault::message("copying it", why));
            } else if file_type == FileType::Directory {
                directories.push(Task::Enter { parent: node.clone(), name: name.to_owned() });
            } else {
                if batches[batches.len() - 1].entries.len() == BATCH {
                    batches.push(Batch::new(&node));
                }
                let last = batches.len() - 1;
                batches[last].add(name, file_type);
            }
        }
        batches.retain(|batch| !batch.entries.is_empty());
        let found: usize = batches.iter().map(|batch| batch.entries.len()).sum();
        self.monitor.progress.entries_found.fetch_add(found as u64, Ordering::Relaxed);
        node.pending.fetch_add(directories.len() + batches.len(), Ordering::AcqRel);
        // Last in, first out: files first, then subdirectories, then the rest of this directory.
        let rest = (!ended).then(|| Task::Read { node: node.clone(), listing });
        self.queue.push(rest.into_iter().chain(directories).chain(batches.into_iter().map(Task::Copy)));
        if ended {
            self.finished_one(&node);
        }
    }

    /// Enters a directory on both sides.
    fn enter(&self, parent: &Arc<DirNode>, name: &CStr) {
        if self.monitor.progress.is_cancelled() {
            return self.finished_one(parent);
        }
        match self.try_enter(parent, name) {
            Ok(Some((node, listing))) => {
                // The parent's count is passed on: the child counts as one until it is complete.
                self.queue.push([Task::Read { node, listing }]);
            }
            Ok(None) => self.finished_one(parent),
            Err(fault) => {
                self.entry_failed(parent, name, fault);
                self.finished_one(parent);
            }
        }
    }

    fn try_enter(
        &self,
        parent: &Arc<DirNode>,
        name: &CStr,
    ) -> Result<Option<(Arc<DirNode>, OwnedFd)>, Fault> {
        let fds = parent.fds(&self.budget)?;
        let path = || dir::join(&parent.path(), name.to_bytes());
        let Some((source, source_stat, restore_source)) =
            self.open_source_directory(fds.source.as_fd(), name, &path)?
        else {
            return Ok(None);
        };
        let entered = self.enter_both(parent, name, &fds, &source, restore_source);
        match entered {
            Ok(Some((entered, action))) => {
                let listing = open_listing(&source)?;
                let node =
                    self.node(Some(parent.clone()), name.to_owned(), source, source_stat, entered, action)?;
                Ok(Some((node, listing)))
            }
            left_out => {
                // Nothing else will.
                if let Some(mode) = restore_source {
                    fs::fchmod(&source, Mode::from_raw_mode(mode)).during(RESTORING)?;
                }
                left_out.map(|_| None)
            }
        }
    }

    /// The target's side of a directory whose source is open, and what is to be done with it.
    fn enter_both(
        &self,
        parent: &Arc<DirNode>,
        name: &CStr,
        fds: &DirFds,
        source: &OwnedFd,
        restore_source: Option<u32>,
    ) -> Result<Option<(Entered, DirectoryAction)>, Fault> {
        let found = match (&fds.target, parent.kind) {
            (Some(target), Kind::Existing | Kind::Resumed) => stat_if_there(target.as_fd(), name)?,
            _ => None,
        };
        let action = match self.policy {
            Some(policy) => {
                policy.directory(&dir::join(&parent.path(), name.to_bytes()), source.as_fd(), found.as_ref())
            }
            None => self.default_directory_action(),
        };
        match action {
            DirectoryAction::Skip => return Ok(None),
            DirectoryAction::Refuse(why) => return Err(Fault::message("copying it", why)),
            DirectoryAction::Merge { .. } => {}
        }
        let mut entered = self.enter_target(parent, fds, name, found.as_ref())?;
        entered.restore_source = restore_source;
        Ok(Some((entered, action)))
    }

    /// Opens or makes the target's directory for a source directory.
    fn enter_target(
        &self,
        parent: &DirNode,
        fds: &DirFds,
        name: &CStr,
        found: Option<&Stat>,
    ) -> Result<Entered, Fault> {
        let Some(target) = &fds.target else {
            (self.monitor.event)(Event::Would("make directory", &dir::join(&parent.path(), name.to_bytes())));
            return Ok(Entered::imagined());
        };
        let target = target.as_fd();
        match found {
            Some(stat) if is_directory(stat) => {
                let kind = if parent.kind == Kind::Resumed { Kind::Resumed } else { Kind::Existing };
                if let Some(policy) = self.policy
                    && self.is_closed_own(stat)
                {
                    policy.opening_up(Side::Target, &dir::join(&parent.path(), name.to_bytes()), stat);
                }
                let (opened, restore_mode) = self.open_existing(target, name, stat)?;
                Ok(Entered { target: Some(opened), kind, partial: None, restore_mode, restore_source: None })
            }
            _ if self.options.dry_run => {
                (self.monitor.event)(Event::Would(
                    "make directory",
                    &dir::join(&parent.path(), name.to_bytes()),
                ));
                Ok(Entered::imagined())
            }
            Some(_) if parent.kind == Kind::Resumed => {
                fs::unlinkat(target, name, AtFlags::empty()).during("replacing it by a directory")?;
                self.make_directory(target, name, false)
            }
            _ => {
                let seen = parent.kind == Kind::Existing && !self.options.unseen;
                self.make_directory(target, name, seen)
            }
        }
    }

    /// Makes a target directory, under a temporary name if others look into its parent.
    fn make_directory(&self, parent: BorrowedFd<'_>, name: &CStr, partial: bool) -> Result<Entered, Fault> {
        const ACTION: &str = "making the directory";
        let temporary = partial.then(|| self.partial_name(name));
        let name = temporary.as_deref().unwrap_or(name);
        let kind = match fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => Kind::Fresh,
            Err(Errno::EXIST) => Kind::Resumed,
            Err(error) => return Err(Fault::new(ACTION, error)),
        };
        let target = match kind {
            Kind::Fresh => fs::openat(parent, name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?,
            _ => {
                let stat = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).during(ACTION)?;
                self.open_existing(parent, name, &stat)?.0
            }
        };
        Ok(Entered {
            target: Some(target),
            kind,
            partial: temporary,
            restore_mode: None,
            restore_source: None,
        })
    }

    /// Opens a target directory that exists. One of ours that we may not write to (a finished copy of a read-only
    /// directory) is made writable until it is completed again.
    fn open_existing(
        &self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        stat: &Stat,
    ) -> Result<(OwnedFd, Option<u32>), Fault> {
        const ACTION: &str = "opening it in the target";
        let closed = self.is_closed_own(stat) && !self.options.dry_run;
        if closed {
            attributes::chmod_at(parent, name, stat, stat.st_mode & 0o7777 | 0o700).during(ACTION)?;
        }
        let opened = fs::openat(parent, name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
        Ok((opened, closed.then_some(stat.st_mode & 0o7777)))
    }

    /// Whether this is a directory of ours that we have shut ourselves out of; root never is.
    pub fn is_closed_own(&self, stat: &Stat) -> bool {
        is_directory(stat)
            && stat.st_mode & 0o700 != 0o700
            && !self.privilege.root
            && rustix::process::geteuid().as_raw() == stat.st_uid
    }

    /// Opens a file of the source. In a run the source is a RAM disk whose entries are the caller's own: one whose mode
    /// shuts out even its owner is opened for a moment, in which its extended attributes are read too, and gets its mode
    /// back.
    pub fn open_in_source(
        &self,
        at: &At<'_>,
        flags: OFlags,
    ) -> Result<(OwnedFd, Option<Vec<attributes::Xattr>>), Fault> {
        const ACTION: &str = "opening it";
        let (dir, name) = (at.fds.source.as_fd(), at.name);
        let policy = match (fs::openat(dir, name, flags, Mode::empty()), self.policy) {
            (Err(Errno::ACCESS), Some(policy)) if !self.privilege.root => policy,
            (opened, _) => return Ok((opened.during(ACTION)?, None)),
        };
        let stat = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).during(ACTION)?;
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(Fault::new(ACTION, Errno::ACCESS));
        }
        policy.opening_up(Side::Source, &at.path(), &stat);
        attributes::chmod_at(dir, name, &stat, stat.st_mode & 0o7777 | 0o700).during(ACTION)?;
        let opened = fs::openat(dir, name, flags, Mode::empty()).during(ACTION).and_then(|file| {
            let xattrs = attributes::read_xattrs(file.as_fd(), self.policy)?;
            Ok((file, Some(xattrs)))
        });
        attributes::chmod_at(dir, name, &stat, stat.st_mode & 0o7777).during(RESTORING)?;
        opened
    }

    /// Whether a file of the source shuts out its owner, and may not be opened now.
    pub fn is_shut(&self, at: &At<'_>) -> Result<bool, Fault> {
        if self.privilege.root || self.policy.is_none_or(|policy| policy.may_open_up()) {
            return Ok(false);
        }
        let stat = fs::statat(&at.fds.source, at.name, AtFlags::SYMLINK_NOFOLLOW)
            .during("reading its attributes")?;
        Ok(stat.st_mode & 0o400 == 0 && rustix::process::geteuid().as_raw() == stat.st_uid)
    }

    /// The same for a directory, which stays open to us until it is complete. `None` if it may not be opened now.
    fn open_source_directory(
        &self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        path: &dyn Fn() -> Vec<u8>,
    ) -> Result<Option<(OwnedFd, Stat, Option<u32>)>, Fault> {
        const ACTION: &str = "opening it";
        let mut closed = None;
        if let Some(policy) = self.policy
            && !self.privilege.root
        {
            let stat = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).during(ACTION)?;
            if self.is_closed_own(&stat) {
                if !policy.may_open_up() {
                    return Ok(None);
                }
                policy.opening_up(Side::Source, &path(), &stat);
                attributes::chmod_at(dir, name, &stat, stat.st_mode & 0o7777 | 0o700).during(ACTION)?;
                closed = Some(stat.st_mode);
            }
        }
        let source = fs::openat(dir, name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
        if self.options.leave_others && !attributes::is_searchable(source.as_fd()) {
            // Names alone are no results.
            return Err(Fault::new(ACTION, Errno::ACCESS));
        }
        let mut stat = fs::fstat(&source).during(ACTION)?;
        if let Some(mode) = closed {
            stat.st_mode = mode;
        }
        Ok(Some((source, stat, closed.map(|mode| mode & 0o7777))))
    }

    /// What setting an entry's attributes came to, as far as it is a failure.
    pub fn judge(&self, applied: Result<(), Fault>) -> Result<(), Fault> {
        if applied.is_err() && self.options.attributes_best_effort {
            self.counts.attributes_lost.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        applied
    }

    /// The temporary name of an entry.
    fn partial_name(&self, name: &CStr) -> CString {
        tagged_name(name, self.options.tag.as_deref())
    }

    /// The name under which an entry is made: a temporary one where others could see it unfinished.
    pub fn working_name(&self, node: &DirNode, placement: &Placement) -> CString {
        if node.kind == Kind::Existing { self.partial_name(&placement.name) } else { placement.name.clone() }
    }

    fn node(
        &self,
        parent: Option<Arc<DirNode>>,
        name: CString,
        source: OwnedFd,
        source_stat: Stat,
        entered: Entered,
        action: DirectoryAction,
    ) -> Result<Arc<DirNode>, Fault> {
        let (delete, attributes) = match action {
            DirectoryAction::Merge { delete, attributes } => (delete, attributes),
            DirectoryAction::Skip | DirectoryAction::Refuse(_) => (false, false),
        };
        let new = entered.kind != Kind::Existing;
        let mut hands_down_acl = false;
        let mut target_stat = None;
        if let Some(target) = &entered.target {
            let mut stat = fs::fstat(target).during("opening it in the target")?;
            if let Some(mode) = entered.restore_mode {
                stat.st_mode = stat.st_mode & libc::S_IFMT | mode;
            }
            target_stat = Some(stat);
            if entered.kind == Kind::Resumed {
                self.make_as_new(parent.as_ref(), target.as_fd(), &stat)?;
            } else if self.options.ownership == Ownership::Preserve {
                match entered.kind {
                    Kind::Existing => hands_down_acl = has_xattr(target.as_fd(), ACL_DEFAULT),
                    // What it inherited from its parent is not the source's; drop it before it is handed down.
                    _ if parent.as_ref().is_none_or(|parent| parent.hands_down_acl) => {
                        let _ = fs::fremovexattr(target, ACL_DEFAULT);
                        let _ = fs::fremovexattr(target, ACL_ACCESS);
                    }
                    _ => {}
                }
            }
        }
        Ok(DirNode::new(
            NewDir {
                parent,
                name,
                kind: entered.kind,
                partial: entered.partial,
                restore_mode: entered.restore_mode,
                restore_source: entered.restore_source,
                attributes: attributes || (new && self.single.is_none()),
                delete: delete || entered.kind == Kind::Resumed,
                hands_down_acl,
                source: source_stat,
                target: target_stat,
                fds: DirFds { source, target: entered.target },
            },
            &self.budget,
        ))
    }

    /// Makes a directory that an interrupted copy left what it was when that one made it. It may have got its mode and its
    /// ACLs already, and would hand them down.
    fn make_as_new(
        &self,
        parent: Option<&Arc<DirNode>>,
        target: BorrowedFd<'_>,
        stat: &Stat,
    ) -> Result<(), Fault> {
        const ACTION: &str = "taking back what an interrupted copy gave it";
        let parent_fds = parent.map(|parent| parent.fds(&self.budget)).transpose()?;
        let above = match &parent_fds {
            Some(fds) => Some(fds.target()?),
            None => self.root_parent.as_ref().map(AsFd::as_fd),
        };
        let inherits = self.options.ownership == Ownership::Inherit;
        let default = match above {
            Some(above) if inherits => attributes::acl_of(above, ACL_DEFAULT).during(ACTION)?,
            _ => None,
        };
        let group =
            above.map(fs::fstat).transpose().during(ACTION)?.map_or(0, |above| above.st_mode & 0o2000);
        let mode = 0o700 | group;
        if stat.st_mode & 0o7777 != mode {
            fs::fchmod(target, Mode::from_raw_mode(mode)).during(ACTION)?;
        }
        for (name, acl) in [(ACL_DEFAULT, default.clone()), (ACL_ACCESS, default.as_deref().and_then(closed))]
        {
            let done = match acl {
                Some(acl) => fs::fsetxattr(target, name, &acl, XattrFlags::empty()),
                None => fs::fremovexattr(target, name),
            };
            match done {
                Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(error) => return Err(Fault::new(ACTION, error)),
            }
        }
        Ok(())
    }

    /// A descriptor to read the root's entries from: with an offset of its own, because the caller's descriptor may
    /// have been read from before.
    fn listing(&self, root: &Arc<DirNode>) -> Result<OwnedFd, Fault> {
        let fds = root.fds(&self.budget)?;
        match fs::openat(&fds.source, c".", OPEN_DIRECTORY, Mode::empty()) {
            // A directory of a mode that shuts out its owner; it is open already.
            Err(Errno::ACCESS) => {
                let listing = open_listing(&fds.source)?;
                fs::seek(&listing, fs::SeekFrom::Start(0)).during("listing it")?;
                Ok(listing)
            }
            other => other.during("listing it"),
        }
    }

    /// One of a directory's tasks is done. The last one completes the directory, which is one of its parent's tasks.
    pub fn finished_one(&self, node: &Arc<DirNode>) {
        let mut node = node.clone();
        while node.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            let complete = self.complete(&node);
            // Also if it could not be completed, and before the directory above is shut again.
            for result in [complete, self.shut_source(&node)] {
                if let Err(fault) = result {
                    self.failed(node.path(), fault);
                }
            }
            node.close();
            match &node.parent {
                Some(parent) => node = parent.clone(),
                None => return,
            }
        }
    }

    /// All entries of a directory are in place: remove what is not the source's, set its attributes, show it.
    fn complete(&self, node: &Arc<DirNode>) -> Result<(), Fault> {
        // The mode of a directory that was opened up, until it has it again or has got another one.
        let mut opened_up = node.restore_mode;
        let done = if self.monitor.progress.is_cancelled() {
            Ok(())
        } else {
            self.complete_target(node, &mut opened_up)
        };
        if let Some(mode) = opened_up
            && let Some(target) = &node.fds(&self.budget)?.target
        {
            fs::fchmod(target, Mode::from_raw_mode(mode)).during(RESTORING)?;
        }
        done
    }

    fn complete_target(&self, node: &Arc<DirNode>, opened_up: &mut Option<u32>) -> Result<(), Fault> {
        if self.single.is_some() {
            return Ok(());
        }
        let fds = node.fds(&self.budget)?;
        let path = node.path();
        let Some(target) = &fds.target else { return Ok(()) };
        if node.delete && !node.incomplete.load(Ordering::Relaxed) {
            self.delete_extraneous(&path, fds.source.as_fd(), target.as_fd(), node.kind == Kind::Resumed)?;
        }
        if self.options.dry_run {
            return Ok(());
        }
        let mut lost = Ok(());
        if node.attributes {
            let have = fs::fstat(target).during("reading its attributes")?;
            let xattrs = attributes::read_xattrs(fds.source.as_fd(), self.policy)?;
            let ownership = self.options.ownership;
            if matches!(node.kind, Kind::Existing | Kind::Resumed) {
                // What one that is made inherits stays; one that was there becomes the source's.
                let inherited = node.kind == Kind::Resumed && ownership == Ownership::Inherit;
                attributes::remove_others(target.as_fd(), &xattrs, inherited)?;
            }
            lost =
                attributes::apply(target.as_fd(), &have, &node.source, &xattrs, ownership, &self.privilege);
            *opened_up = None;
        }
        let mut changed = false;
        if let (Kind::Existing, false, Some(policy), Some(entered)) =
            (node.kind, node.attributes, self.policy, &node.entered)
        {
            let have = fs::fstat(target).during("reading its attributes")?;
            let changes = policy.changes(&Merged {
                path: &path,
                source_dir: fds.source.as_fd(),
                source: &node.source,
                target_dir: target.as_fd(),
                entered,
                target: &have,
            });
            let mut changes =
                changes.map_err(|source| Fault { action: "reading its extended attributes", source })?;
            changed = !changes.is_empty();
            changes.mode = changes.mode.or(opened_up.take());
            lost = attributes::change(target.as_fd(), &have, &changes, &self.privilege);
        } else if let Some(mode) = opened_up.take() {
            fs::fchmod(target, Mode::from_raw_mode(mode)).during(RESTORING)?;
        }
        if let Some(temporary) = &node.partial {
            self.show_directory(node, temporary)?;
        }
        self.counts.directories.fetch_add(1, Ordering::Relaxed);
        if node.kind != Kind::Existing || node.attributes || changed {
            self.counts.made_directories.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(policy) = self.policy {
            policy.placed(&path, &fs::fstat(target).during("reading its attributes")?);
        }
        self.judge(lost)
    }

    /// Gives a directory of the source the mode back that shuts out its owner.
    fn shut_source(&self, node: &Arc<DirNode>) -> Result<(), Fault> {
        let Some(mode) = node.restore_source else { return Ok(()) };
        let fds = node.fds(&self.budget)?;
        fs::fchmod(&fds.source, Mode::from_raw_mode(mode)).during(RESTORING)
    }

    /// Gives a complete new directory its name.
    fn show_directory(&self, node: &Arc<DirNode>, temporary: &CStr) -> Result<(), Fault> {
        const ACTION: &str = "giving the finished directory its name";
        let parent_fds;
        let parent = match (&node.parent, &self.root_parent) {
            (Some(parent), _) => {
                parent_fds = parent.fds(&self.budget)?;
                parent_fds.target()?
            }
            (None, Some(fd)) => fd.as_fd(),
            (None, None) => return Err(Fault::message(ACTION, "it has no parent")),
        };
        let renamed = match fs::renameat_with(parent, temporary, parent, &*node.name, RenameFlags::NOREPLACE)
        {
            // Some filesystems can't promise not to replace; a plain rename replaces an empty directory only.
            Err(Errno::INVAL | Errno::NOSYS) => fs::renameat(parent, temporary, parent, &*node.name),
            Err(Errno::EXIST) => {
                // A file, symlink or the like that was there before: the source's directory takes its place. It may also
                // have come meanwhile.
                if let Some(policy) = self.policy
                    && let Some(found) = stat_if_there(parent, &node.name)?
                    && let DirectoryAction::Refuse(why) =
                        policy.directory(&node.path(), node.fds(&self.budget)?.source.as_fd(), Some(&found))
                {
                    return Err(Fault::message(ACTION, why));
                }
                match fs::unlinkat(parent, &*node.name, AtFlags::empty()) {
                    Ok(()) => fs::renameat(parent, temporary, parent, &*node.name),
                    // A directory that someone made meanwhile and that may hold their files.
                    Err(_) => Err(Errno::EXIST),
                }
            }
            other => other,
        };
        renamed.during(ACTION)?;
        node.mark_renamed();
        Ok(())
    }

    fn copy_batch(&self, batch: &Batch, worker: &mut Worker) {
        let node = &batch.node;
        let fds = match node.fds(&self.budget) {
            Ok(fds) => fds,
            Err(fault) => {
                self.failed(node.path(), fault);
                return self.finished_one(node);
            }
        };
        let parent = node.path();
        let mut entries = &batch.entries[..];
        while let [(offset, file_type), rest @ ..] = entries {
            if self.monitor.progress.is_cancelled() {
                break;
            }
            entries = rest;
            if rest.len() >= 2 && self.queue.is_hungry() {
                let (mine, theirs) = rest.split_at(rest.len() / 2);
                entries = mine;
                node.pending.fetch_add(1, Ordering::AcqRel);
                self.queue.push([Task::Copy(batch.part(theirs))]);
            }
            let Ok(name) = CStr::from_bytes_until_nul(&batch.names[*offset as usize..]) else { continue };
            let at = At { node, fds: &fds, parent: &parent, name };
            if let Err(fault) = self.entry(&at, *file_type, worker) {
                self.entry_failed(node, name, fault);
                if let Err(fault) = self.remove_leftover(&at) {
                    self.failed(at.path(), fault);
                }
            }
        }
        self.finished_one(node);
    }

    /// Tells of an entry that failed, or is left behind.
    pub fn entry_failed(&self, node: &Arc<DirNode>, name: &CStr, fault: Fault) {
        let path = dir::join(&node.path(), name.to_bytes());
        if let Ok(fds) = node.fds(&self.budget) {
            if self.options.leave_others
                && fault.source.kind() == std::io::ErrorKind::PermissionDenied
                && let Some(owner) = attributes::closed_by_another(fds.source.as_fd(), name)
            {
                (self.monitor.event)(Event::LeftBehind { path: &path, owner });
                let at = At { node, fds: &fds, parent: &node.path(), name };
                return self.remove_leftover(&at).unwrap_or_else(|fault| self.failed(path, fault));
            }
            self.note_vanished(fds.source.as_fd(), name, &fault);
        }
        self.failed(path, fault);
    }

    /// Counts an entry that failed because it is not in the source any more.
    fn note_vanished(&self, source: BorrowedFd<'_>, name: &CStr, fault: &Fault) {
        if fault.source.kind() == std::io::ErrorKind::NotFound
            && matches!(fs::statat(source, name, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT))
        {
            self.counts.vanished.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Copies one entry that is not known to be a directory.
    fn entry(&self, at: &At<'_>, file_type: FileType, worker: &mut Worker) -> Result<(), Fault> {
        match file_type {
            FileType::RegularFile => self.regular_file(at, worker, 0),
            FileType::Unknown => {
                let stat =
                    fs::statat(&at.fds.source, at.name, AtFlags::SYMLINK_NOFOLLOW).during("reading it")?;
                match FileType::from_raw_mode(stat.st_mode) {
                    FileType::RegularFile => self.regular_file(at, worker, 0),
                    FileType::Directory => {
                        at.node.pending.fetch_add(1, Ordering::AcqRel);
                        self.queue.push([Task::Enter { parent: at.node.clone(), name: at.name.to_owned() }]);
                        Ok(())
                    }
                    _ => self.other(at, worker, 0),
                }
            }
            _ => self.other(at, worker, 0),
        }
    }

    /// Copies a symlink, FIFO, socket or device.
    fn other(&self, at: &At<'_>, worker: &mut Worker, attempt: u32) -> Result<(), Fault> {
        let source = at.fds.source.as_fd();
        let stat = fs::statat(source, at.name, AtFlags::SYMLINK_NOFOLLOW).during("reading it")?;
        let file_type = FileType::from_raw_mode(stat.st_mode);
        if matches!(file_type, FileType::RegularFile | FileType::Directory) {
            return Err(Fault::message("copying it", "it was replaced by another kind of entry meanwhile"));
        }
        let found = self.found_in_target(at)?;
        let Some(placement) = self.placement(at, &stat, found.as_ref())? else { return Ok(()) };
        if placement.beside && found.as_ref().is_some_and(|found| is_same_other(at, &stat, found)) {
            if stat.st_nlink > 1 {
                self.meet_unchanged(at, &stat);
            }
            self.unchanged(at, &stat, false);
            return Ok(());
        }
        if stat.st_nlink > 1 && attempt == 0 && self.join_links(at, &stat, &placement, worker)? {
            return Ok(());
        }
        let kind = match file_type {
            FileType::Symlink => b'l',
            FileType::Fifo => b'p',
            FileType::Socket => b's',
            FileType::CharacterDevice => b'c',
            _ => b'b',
        };
        let made = self.make_other(at, &stat, file_type, &placement);
        if matches!(made, Ok(false)) && attempt + 1 < TRIES {
            return self.other(at, worker, attempt + 1);
        }
        let made = made.and_then(|named| if named { Ok(()) } else { Err(kept_changing()) });
        if stat.st_nlink > 1 {
            self.settle_links(at, &stat, made.is_ok().then_some(&*placement.name));
        }
        made?;
        self.counts.others.fetch_add(1, Ordering::Relaxed);
        self.placed(at, &placement, kind, Digest::default(), &stat, true, worker)
    }

    /// Gives an entry that is complete its name, and says whether it could: not if somebody has put something else
    /// there since the policy was asked.
    pub fn give_name(
        &self,
        target: BorrowedFd<'_>,
        working: &CStr,
        placement: &Placement,
    ) -> Result<bool, Fault> {
        const ACTION: &str = "giving it its name";
        let name = &*placement.name;
        if *working == *name {
            return Ok(true);
        }
        let is_free = match placement.over {
            Over::Anything => false,
            Over::Nothing => true,
            Over::This(seen) => match stat_if_there(target, name)? {
                Some(now) if Version::of(&now) != seen => return Ok(false),
                now => now.is_none(),
            },
        };
        if is_free {
            match fs::renameat_with(target, working, target, name, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(true),
                Err(Errno::EXIST) => return Ok(false),
                // Some filesystems can't promise not to replace. But a second name is never given over another entry.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    match fs::linkat(target, working, target, name, AtFlags::empty()) {
                        Ok(()) => {
                            fs::unlinkat(target, working, AtFlags::empty()).during(ACTION)?;
                            return Ok(true);
                        }
                        Err(Errno::EXIST) => return Ok(false),
                        // Directories have one name, and some filesystems give no second ones.
                        Err(_) if stat_if_there(target, name)?.is_some() => return Ok(false),
                        Err(_) => {}
                    }
                }
                Err(error) => return Err(Fault::new(ACTION, error)),
            }
        }
        fs::renameat(target, working, target, name).during(ACTION)?;
        Ok(true)
    }

    /// Returns whether it has its name.
    fn make_other(
        &self,
        at: &At<'_>,
        stat: &Stat,
        file_type: FileType,
        to: &Placement,
    ) -> Result<bool, Fault> {
        let (source, target) = (at.fds.source.as_fd(), at.fds.target()?);
        let name = self.working_name(at.node, to);
        let make = || match file_type {
            FileType::Symlink => {
                let content = fs::readlinkat(source, at.name, Vec::new())?;
                fs::symlinkat(&*content, target, &*name)
            }
            _ => fs::mknodat(
                target,
                &*name,
                file_type,
                Mode::from_raw_mode(stat.st_mode & 0o700),
                stat.st_rdev,
            ),
        };
        self.replacing_leftover(target, &name, make).during(match file_type {
            FileType::Symlink => "making the symlink",
            FileType::CharacterDevice | FileType::BlockDevice => "making the device",
            _ => "making it",
        })?;
        let xattrs = attributes::read_xattrs_at(source, at.name, self.policy)?;
        if at.node.hands_down_acl && file_type != FileType::Symlink {
            attributes::drop_acl_at(target, &name);
        }
        let applied =
            attributes::apply_at(target, &name, stat, &xattrs, self.options.ownership, &self.privilege);
        if !self.give_name(target, &name, to)? {
            let _ = fs::unlinkat(target, &*name, AtFlags::empty());
            return Ok(false);
        }
        self.judge(applied).map(|()| true)
    }

    /// Makes an entry; whatever an interrupted copy left under its temporary name goes first.
    pub fn replacing_leftover<T>(
        &self,
        target: BorrowedFd<'_>,
        name: &CStr,
        make: impl Fn() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match make() {
            Err(Errno::EXIST) => {
                fs::unlinkat(target, name, AtFlags::empty())?;
                make()
            }
            other => other,
        }
    }

    /// What the target has under an entry's name; nothing can be there in a directory that we just made.
    pub fn found_in_target(&self, at: &At<'_>) -> Result<Option<Stat>, Fault> {
        match (&at.fds.target, at.node.kind) {
            (Some(target), Kind::Existing | Kind::Resumed) => {
                stat_if_there(target.as_fd(), self.target_name(at.name))
            }
            _ => Ok(None),
        }
    }

    pub fn target_name<'n>(&'n self, name: &'n CStr) -> &'n CStr {
        self.single.as_deref().unwrap_or(name)
    }

    /// Decides whether and under which name an entry is copied; `None`: it is done with.
    pub fn placement(
        &self,
        at: &At<'_>,
        stat: &Stat,
        found: Option<&Stat>,
    ) -> Result<Option<Placement>, Fault> {
        let name = self.target_name(at.name).to_owned();
        let action = match self.policy {
            None => Action::Copy,
            Some(policy) => policy.entry(&Place {
                parent: at.parent,
                name: at.name,
                source_dir: at.fds.source.as_fd(),
                source: stat,
                // Nobody else knows of a directory that an interrupted copy left under its temporary name.
                target: found.filter(|_| at.node.kind != Kind::Resumed),
            }),
        };
        if found.is_some_and(is_directory) && action == Action::Copy {
            if self.options.exclude.matches(at.parent, name.to_bytes(), true) {
                let why = "the target has a directory of that name, which is excluded and stays";
                return Err(Fault::message("copying it", why));
            }
            // In a directory of ours that an interrupted copy left, anything may be removed.
            if !(self.options.delete || at.node.kind == Kind::Resumed) {
                let why =
                    "the target has a directory of that name; --delete would remove it with all it holds";
                return Err(Fault::message("copying it", why));
            }
            if !self.remove(at.parent, at.fds.target()?, &name, at.node.kind == Kind::Resumed)? {
                let why = "the target has a directory of that name, and something in it must be kept";
                return Err(Fault::message("copying it", why));
            }
        }
        let over = match found.filter(|found| !is_directory(found)) {
            _ if self.policy.is_none() => Over::Anything,
            Some(found) => Over::This(Version::of(found)),
            None => Over::Nothing,
        };
        if self.options.dry_run {
            (self.monitor.event)(Event::Would("copy", &at.path()));
            self.count_done(stat);
            return Ok(None);
        }
        match action {
            Action::Copy => Ok(Some(Placement { name, beside: false, over })),
            Action::Beside(name) => Ok(Some(Placement { name, beside: true, over: Over::Anything })),
            Action::Skip => {
                self.remove_leftover(at)?;
                self.counts.unchanged.fetch_add(1, Ordering::Relaxed);
                self.count_done(stat);
                Ok(None)
            }
            Action::Delete => {
                self.remove(at.parent, at.fds.target()?, &name, at.node.kind == Kind::Resumed)?;
                self.count_done(stat);
                Ok(None)
            }
        }
    }

    /// In a directory that an interrupted copy left under its temporary name, entries have their own names before they
    /// are complete. One that is not copied this time must not be shown with the directory.
    fn remove_leftover(&self, at: &At<'_>) -> Result<(), Fault> {
        if at.node.kind == Kind::Resumed && !self.options.dry_run {
            self.remove(at.parent, at.fds.target()?, self.target_name(at.name), true)?;
        }
        Ok(())
    }

    fn count_done(&self, stat: &Stat) {
        let progress = self.monitor.progress;
        progress.entries_done.fetch_add(1, Ordering::Relaxed);
        if attributes::is_regular(stat) {
            progress.bytes_done.fetch_add(stat.st_size as u64, Ordering::Relaxed);
        }
    }

    /// The manifest's record of a file that need not be copied again, if the target still matches it.
    pub fn already_there(
        &self,
        at: &At<'_>,
        file: BorrowedFd<'_>,
        source: &Stat,
        found: &Stat,
        worker: &mut Worker,
    ) -> Option<Record> {
        let previous = self.previous()?;
        let record = previous.find(&self.recorded_path(at))?;
        let as_wanted = match (record.kind, &record.checksum, self.options.checksum) {
            // The checksum stands with the name that was met first, which may be another one this time.
            (b'h', _, _) | (b'f', None, Checksum::None) => true,
            (b'f', Some((checksum, _)), wanted) => *checksum == wanted,
            _ => false,
        };
        (as_wanted
            && record.describes(source)
            && self.options.again_from.is_none_or(|from| {
                // A directory that is renamed takes its files to other paths, and changes no time of theirs.
                ({ source.st_ctime }, source.st_ctime_nsec as i64) < from
                    && record.inode == Some(crate::manifest::inode(source))
            })
            && attributes::is_regular(found)
            && found.st_size == source.st_size
            && crate::manifest::mtime(found) == record.mtime
            && (!self.options.recheck || self.still_has(file, source, &record, worker)))
        .then_some(record)
    }

    /// Whether a source file still has the content that was recorded.
    fn still_has(&self, file: BorrowedFd<'_>, source: &Stat, record: &Record, worker: &mut Worker) -> bool {
        record.checksum.is_some_and(|(checksum, recorded)| {
            verify::digest_of(file, source.st_size as u64, checksum, &mut worker.buffer)
                .is_ok_and(|digest| digest == recorded)
        })
    }

    /// The path under which the manifest knows an entry: the target's.
    fn recorded_path(&self, at: &At<'_>) -> Vec<u8> {
        dir::join(at.parent, self.target_name(at.name).to_bytes())
    }

    fn previous(&self) -> Option<&Previous> {
        self.manifest.as_ref()?.previous()
    }

    /// A file that was there already.
    pub fn unchanged(&self, at: &At<'_>, stat: &Stat, recorded: bool) {
        if recorded && let Some(previous) = self.previous() {
            previous.confirm(&self.recorded_path(at));
        }
        self.counts.unchanged.fetch_add(1, Ordering::Relaxed);
        self.count_done(stat);
        if stat.st_nlink > 1 {
            self.settle_links(at, stat, Some(self.target_name(at.name)));
        }
    }

    /// The name that further names of an unchanged file's inode are linked to: this one, if it is the first.
    pub fn meet_unchanged(&self, at: &At<'_>, stat: &Stat) {
        if let Role::Parked = self.links.meet(stat, at.node, at.name) {
            // It comes back when the first name is in place, and is found unchanged again.
            at.node.pending.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// For a name of an inode with several: `true` if it is dealt with (linked, or left to the worker that copies
    /// the first name), `false` if it is the first and must be copied.
    pub fn join_links(
        &self,
        at: &At<'_>,
        stat: &Stat,
        to: &Placement,
        worker: &mut Worker,
    ) -> Result<bool, Fault> {
        match self.links.meet(stat, at.node, at.name) {
            Role::First => Ok(false),
            Role::Parked => {
                // Its directory isn't complete before this name is linked.
                at.node.pending.fetch_add(1, Ordering::AcqRel);
                Ok(true)
            }
            Role::LinkTo { node, name } => {
                let from = node.fds(&self.budget)?;
                let target = at.fds.target()?;
                let working = self.working_name(at.node, to);
                let link = || {
                    fs::linkat(
                        from.target.as_ref().ok_or(Errno::BADF)?,
                        &*name,
                        target,
                        &*working,
                        AtFlags::empty(),
                    )
                };
                self.replacing_leftover(target, &working, link).during("making the hard link")?;
                let named = self.give_name(target, &working, to)?;
                if *working != *to.name {
                    // Renaming a name over another of the same inode does nothing at all, by POSIX.
                    let _ = fs::unlinkat(target, &*working, AtFlags::empty());
                }
                if !named {
                    // It is copied like any other, and the policy is asked again.
                    return Ok(false);
                }
                self.counts.hard_links.fetch_add(1, Ordering::Relaxed);
                self.placed(at, to, b'h', Digest::default(), stat, true, worker)?;
                Ok(true)
            }
        }
    }

    /// The first name of an inode is in place (or failed): the names that wait for it become work.
    pub fn settle_links(&self, at: &At<'_>, stat: &Stat, target_name: Option<&CStr>) {
        let waiting = match target_name {
            Some(name) => self.links.placed(stat, at.node, name),
            None => self.links.failed(stat),
        };
        // Each parked name already counts as a task of its directory.
        self.queue
            .push(waiting.into_iter().map(|Waiting { node, name }| Task::Copy(Batch::of_one(node, &name))));
    }

    /// An entry is in place: count it, record it, tell the policy.
    // One flat list of what a record needs; a struct would be made and taken apart at the same places.
    #[allow(clippy::too_many_arguments)]
    pub fn placed(
        &self,
        at: &At<'_>,
        placement: &Placement,
        kind: u8,
        digest: Digest,
        source: &Stat,
        recorded: bool,
        worker: &mut Worker,
    ) -> Result<(), Fault> {
        self.count_done(source);
        if kind == b'f' {
            self.counts.files.fetch_add(1, Ordering::Relaxed);
            self.counts.bytes.fetch_add(source.st_size as u64, Ordering::Relaxed);
        }
        if self.manifest.is_none() && self.policy.is_none() {
            return Ok(());
        }
        let path = dir::join(at.parent, placement.name.to_bytes());
        if placement.beside {
            (self.monitor.event)(Event::PutBeside { path: &at.path(), name: placement.name.to_bytes() });
        }
        if let Some(policy) = self.policy {
            let stat = fs::statat(at.fds.target()?, &*placement.name, AtFlags::SYMLINK_NOFOLLOW)
                .during("reading its attributes")?;
            policy.placed(&path, &stat);
        }
        // What lost an attribute is not on record, so that a second run tries, and tells, again.
        if self.manifest.is_some() && recorded {
            let record = Record::new(kind, self.options.checksum, digest, source, path);
            worker.lines.push(self.manifest.as_ref(), &record);
        }
        Ok(())
    }
}

/// An entry: its directory, opened, and its name.
pub(crate) struct At<'a> {
    pub node: &'a Arc<DirNode>,
    pub fds: &'a DirFds,
    /// The directory's path.
    pub parent: &'a [u8],
    pub name: &'a CStr,
}

impl At<'_> {
    pub fn path(&self) -> Vec<u8> {
        dir::join(self.parent, self.name.to_bytes())
    }
}

/// Under which name an entry appears.
#[derive(Clone)]
pub(crate) struct Placement {
    pub name: CString,
    /// Not its own name, because the target's own entry is kept.
    pub beside: bool,
    /// What it may replace.
    pub over: Over,
}

/// What an entry that is given its name may replace. Copying takes time, in which others may write to the target.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Over {
    /// Whatever is there.
    Anything,
    /// What was there when the policy was asked.
    This(Version),
    /// There was nothing.
    Nothing,
}

/// By what a changed entry is told from the one that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    inode: u64,
    size: i64,
    written: (i64, u64),
    /// Not for what has several names: giving one of them away changes it for all.
    changed: Option<(i64, u64)>,
}

impl Version {
    fn of(stat: &Stat) -> Version {
        Version {
            inode: stat.st_ino,
            size: stat.st_size,
            written: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_nlink == 1).then_some((stat.st_ctime, stat.st_ctime_nsec)),
        }
    }
}

/// Whether the target has the same symlink, FIFO, socket or device.
fn is_same_other(at: &At<'_>, stat: &Stat, found: &Stat) -> bool {
    let file_type = FileType::from_raw_mode(stat.st_mode);
    if file_type != FileType::from_raw_mode(found.st_mode) {
        return false;
    }
    match file_type {
        FileType::Symlink => {
            let theirs = at.fds.target().ok().and_then(|dir| fs::readlinkat(dir, at.name, Vec::new()).ok());
            theirs.is_some() && theirs == fs::readlinkat(&at.fds.source, at.name, Vec::new()).ok()
        }
        FileType::CharacterDevice | FileType::BlockDevice => stat.st_rdev == found.st_rdev,
        _ => true,
    }
}

/// A descriptor to read the entries of a directory that was just opened. It shares its offset with the node's own,
/// which is never read from.
fn open_listing(source: &OwnedFd) -> Result<OwnedFd, Fault> {
    rustix::io::fcntl_dupfd_cloexec(source, 0).during("listing it")
}

fn has_xattr(fd: BorrowedFd<'_>, name: &CStr) -> bool {
    fs::fgetxattr(fd, name, &mut [0_u8; 0]).is_ok()
}

fn stat_if_there(dir: BorrowedFd<'_>, name: &CStr) -> Result<Option<Stat>, Fault> {
    match fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(Fault::new("looking for it in the target", error)),
    }
}
