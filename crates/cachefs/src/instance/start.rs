//! Starting the server of a cache, and what must be right before.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ondeck_core::Bytes;
use ondeck_ramdisk::{memory, mounts};
use ondeck_transfer::credentials::User;
use serde::{Deserialize, Serialize};

use super::control::{read_line, write_line};
use super::harden;
use super::record::{Place, path};
use super::{CacheUser, Caches, Instance, Record, is_cache};
use crate::backing;
use crate::descriptors;
use crate::settings::{LEAST_CAPACITY, Settings};

/// RAM that the journal may take, beside the data.
const JOURNAL: u64 = 64 << 20;

/// What a server is told, as a line of JSON on its standard input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Where the caches of this machine are.
    #[serde(with = "path")]
    pub base: PathBuf,
    /// Where to mount: as [`mount_point`](super::mount_point) gives it.
    #[serde(with = "path")]
    pub mount_point: PathBuf,
    /// The directory behind it: absolute, without symlinks.
    #[serde(with = "path")]
    pub backing: PathBuf,
    /// Whose it is; nobody: root's.
    pub user: Option<CacheUser>,
    /// Whether all users may use it.
    pub others: bool,
    /// How it works.
    pub settings: Settings,
    /// The run of `ondeck run` whose cache it is, if it is one's.
    pub run: Option<String>,
    /// Who is to see it.
    pub attach: Attach,
}

impl Plan {
    /// For a server that only writes back what a dead one has left.
    pub fn to_write_back(instance: &Instance, record: Record) -> Plan {
        Plan {
            base: instance.base().to_owned(),
            mount_point: record.mount_point,
            backing: record.backing,
            user: record.user,
            others: record.others,
            settings: record.settings,
            run: record.run,
            attach: Attach::Nowhere,
        }
    }
}

/// Who sees a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attach {
    /// Nobody: what a dead server left is only written back.
    Nowhere,
    /// Whoever sees the mounts of the server.
    Here,
    /// Whoever is in this mount namespace. The cache ends when the last of its mounts has gone, with the namespace at the
    /// latest; an order to unmount it waits for that.
    Inside(#[serde(with = "path")] PathBuf),
}

/// What a server says, as a line of JSON on its standard output, once it is clear whether it serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "ready")]
pub enum Ready {
    /// It serves.
    Serving {
        /// What its user should know.
        notes: Vec<String>,
    },
    /// It makes no sense so.
    Refused {
        /// Why, and what to do.
        message: String,
    },
    /// Something failed.
    Failed {
        /// What, and what to do.
        message: String,
    },
}

/// Why a cache is not served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It makes no sense so, or does not fit. Nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// Something failed. What was made for it was removed again; what an earlier server left is still there.
    #[error("{0}")]
    Failed(String),
}

impl StartError {
    /// With what could not be done, and to which path.
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StartError {
        let path = path.to_owned();
        move |error| StartError::Failed(format!("can't {what} {}: {error}", path.display()))
    }
}

/// Looks whether a new cache by this plan would be refused, and makes nothing for it.
///
/// # Errors
/// Why it would be.
pub fn check(plan: &Plan) -> Result<(), StartError> {
    let caches = Caches::new(&plan.base);
    let own = caches.at(&plan.mount_point);
    let look = || StartError::io("look for an earlier cache at", &plan.mount_point);
    check_settings(&plan.settings)?;
    if own.has_store().map_err(look())? {
        let record = own.record().map_err(look())?;
        return Err(StartError::Refused(there_is_one(&plan.mount_point, record.as_ref())));
    }
    let backing = open_backing(plan)?;
    check_backing(plan, backing.as_fd(), &caches, &own)?;
    check_acls(plan, backing.as_fd())?;
    check_ram(plan.settings.capacity, &caches, &own)
}

/// That a cache is there already, and what to do.
pub(super) fn there_is_one(at: &Path, record: Option<&Record>) -> String {
    let at = at.display();
    match record.and_then(|record| record.run.as_ref()) {
        Some(run) => format!(
            "{at} is shown through a cache to another run, {run}, already: wait for its end, or see `ondeck run --list`"
        ),
        None => format!("there is a cache at {at} already; `ondeck cache status {at}` shows it"),
    }
}

/// Starts a server by this command, which runs [`serve`](super::serve). Returns once the mount stands, with what the user
/// should know. The server outlives this process and its session.
///
/// # Errors
/// Why it does not serve.
pub fn start(mut command: Command, plan: &Plan) -> Result<Vec<String>, StartError> {
    let instance = Caches::new(&plan.base).at(&plan.mount_point);
    instance.make_directory().map_err(StartError::io("make a directory in", &plan.base))?;
    let (log, path) = (open_log(&instance), instance.log());
    let mut log = log.map_err(StartError::io("open", &path))?;
    let begun = log.seek(SeekFrom::End(0)).map_err(StartError::io("read", &path))?;
    let errors = log.try_clone().map_err(StartError::io("open", &path))?;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors).current_dir("/");
    // SAFETY: a system call only, between fork and exec.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        });
    }
    let failed = |error: io::Error| StartError::Failed(format!("can't start the cache's server: {error}"));
    let mut server = command.spawn().map_err(failed)?;
    let told = server.stdin.take().map(|mut to| write_line(&mut to, plan));
    told.unwrap_or(Ok(())).map_err(failed)?;
    let answer = server.stdout.take().map(|from| read_line(&mut BufReader::new(from)));
    match answer.unwrap_or(Ok(None)).map_err(failed)? {
        Some(Ready::Serving { notes }) => Ok(notes),
        Some(Ready::Refused { message }) => Err(StartError::Refused(message)),
        Some(Ready::Failed { message }) => Err(StartError::Failed(message)),
        None => {
            let _ = server.wait();
            let mut said = String::new();
            let _ = log.seek(SeekFrom::Start(begun)).and_then(|_| log.read_to_string(&mut said));
            let said = if said.is_empty() { "it said nothing" } else { said.trim() };
            Err(StartError::Failed(format!("the cache's server died while it started: {said}")))
        }
    }
}

fn open_log(instance: &Instance) -> io::Result<File> {
    OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(instance.log())
}

/// Whether these settings can be meant.
pub(super) fn check_settings(settings: &Settings) -> Result<(), StartError> {
    let refused = |text: String| Err(StartError::Refused(text));
    if descriptors::limit() < descriptors::LEAST {
        return refused(format!(
            "a cache's server needs {} open files, and may have {} here: raise the limit of open files (`ulimit -Hn`)",
            descriptors::LEAST,
            descriptors::limit()
        ));
    }
    if let Some(limit) = harden::limit_that_stays() {
        return refused(format!(
            "the limit {limit} of this shell would be that of the cache's server, and end it: mount the cache from one without"
        ));
    }
    if settings.capacity < LEAST_CAPACITY {
        return refused(format!(
            "a cache of {} is too small: the least is {LEAST_CAPACITY}",
            settings.capacity
        ));
    }
    for (what, marks) in [("full", settings.full), ("dirty", settings.dirty)] {
        if marks.low >= marks.high || marks.high > 100 {
            return refused(format!(
                "--{what}-low {} and --{what}-high {} make no sense: low must be below high, and high at most 100",
                marks.low, marks.high
            ));
        }
    }
    if settings.age.is_zero() {
        return refused("an age of 0 would write every change back at once: use --sync close".to_owned());
    }
    Ok(())
}

/// What the RAM of a store can hold.
pub(super) fn store_size(capacity: Bytes) -> Bytes {
    // tmpfs counts whole pages, and pieces of the last extent of each file: an eighth more than the data is room enough.
    Bytes(capacity.0.saturating_add(capacity.0 / 8).saturating_add(JOURNAL))
}

/// RAM that a cache may come to take: what it is promised.
pub fn promise(capacity: Bytes) -> Bytes {
    Bytes(capacity.0.saturating_add(JOURNAL))
}

/// Whether there is RAM for it that no other cache was promised.
pub(super) fn check_ram(capacity: Bytes, caches: &Caches, own: &Instance) -> Result<(), StartError> {
    let failed = |error| StartError::Failed(format!("can't tell how much RAM is free: {error}"));
    let free = memory::free_ram().map_err(failed)?;
    let promised = caches.promised(Some(own)).map_err(failed)?;
    let wanted = promise(capacity);
    let usable = free.usable().saturating_sub(promised);
    if usable >= wanted {
        return Ok(());
    }
    let others = if promised == Bytes::ZERO {
        String::new()
    } else {
        format!(" beside the {promised} that other caches may still take")
    };
    let limit =
        free.cgroup.as_ref().filter(|(left, _)| *left < free.machine).map_or(String::new(), |(_, group)| {
            format!(", because of the memory cgroup {}", group.display())
        });
    Err(StartError::Refused(format!(
        "a cache of {capacity} takes up to {wanted} of RAM, and {usable} are usable{others}{limit}: choose a smaller one"
    )))
}

/// Opens the backing directory as the user reaches it, so that the permissions of everything above it count.
pub(super) fn open_backing(plan: &Plan) -> Result<OwnedFd, StartError> {
    let path = &plan.backing;
    let open = || mounts::open_plainly(path);
    let opened = match &plan.user {
        Some(user) => User::from(user.clone())
            .on_a_thread(open)
            .map_err(|error| StartError::Failed(error.to_string()))?,
        None => open(),
    };
    opened.map_err(|error| {
        let who = plan.user.as_ref().map_or("root", |user| &user.name);
        let text = match error.kind() {
            io::ErrorKind::NotADirectory => format!("{} is not a directory", path.display()),
            io::ErrorKind::NotFound => format!("there is no directory {}", path.display()),
            io::ErrorKind::PermissionDenied => format!(
                "{who} can't reach {}: {error}; the backing directory is reached with the rights of the cache's user",
                path.display()
            ),
            _ => format!("can't open {}: {error}", path.display()),
        };
        StartError::Refused(text)
    })
}

/// What statfs(2) calls an overlayfs.
const OVERLAYFS: u64 = 0x794c_7630;

/// Where a directory that a mount shows is in the filesystem of that mount.
fn place_in(table: &[mounts::Mount], mount: u64, path: &Path) -> Option<Place> {
    let shown = table.iter().find(|known| known.id == mount)?;
    let below = path.strip_prefix(&shown.at).ok()?;
    Some(Place { device: shown.device, path: shown.root.join(below) })
}

/// Where the backing directory of a plan is in its filesystem, if it is shown by a mount that is seen here.
///
/// # Errors
/// The kernel's, if that can't be seen.
pub(super) fn place_of(plan: &Plan, backing: BorrowedFd<'_>) -> io::Result<Option<Place>> {
    Ok(place_in(&mounts::mounted()?, mounts::mount_of(backing)?, &plan.backing))
}

/// Whether a cache of this directory, at this mount point, can work beside what is there.
pub(super) fn check_backing(
    plan: &Plan,
    backing: BorrowedFd<'_>,
    caches: &Caches,
    own: &Instance,
) -> Result<(u64, u64), StartError> {
    let (path, at) = (&plan.backing, &plan.mount_point);
    let refused = |text: String| Err(StartError::Refused(text));
    let look = || StartError::io("look at", path);
    let stat = rustix::fs::fstat(backing).map_err(io::Error::from).map_err(look())?;
    let id = (stat.st_dev, stat.st_ino);
    let table = mounts::mounted().map_err(StartError::io("read", Path::new("/proc/self/mountinfo")))?;
    let mount = mounts::mount_of(backing).map_err(look())?;
    let place = place_in(&table, mount, path);
    let kind = rustix::fs::fstatfs(backing).map_err(io::Error::from).map_err(look())?.f_type as u64;
    if kind == OVERLAYFS {
        return refused(format!(
            "{} is on an overlayfs, as the files of a container are: it breaks hard links when one of them is written to, and refuses \
             to rename directories, which a cache would find out too late. Choose a directory of a volume or of the disk itself",
            path.display()
        ));
    }
    if table.iter().any(|known| known.id == mount && is_cache(known)) {
        return refused(format!("{} is in a cache already", path.display()));
    }
    if caches.base().starts_with(at) {
        return refused(format!(
            "the mount point {} would hide {}, where the records of caches are",
            at.display(),
            caches.base().display()
        ));
    }
    if at != path && at.starts_with(path) {
        return refused(format!(
            "the mount point {} is inside the backing directory {}, which would then contain itself: mount over the \
             backing directory, or outside of it",
            at.display(),
            path.display()
        ));
    }
    if let Some(inner) = table.iter().find(|mount| mount.at != *path && mount.at.starts_with(path)) {
        return refused(format!(
            "{} is another filesystem inside the backing directory: a cache is of one filesystem; take it away, or make a \
             cache of a directory beside it",
            inner.at.display()
        ));
    }
    for other in caches.all().map_err(StartError::io("read", caches.base()))? {
        if other.id() == own.id() {
            continue;
        }
        // One that can't be read is none that is being served by this release; it has its own directory in any case.
        let Ok(Some(record)) = other.record() else { continue };
        // By their paths, or by those in their filesystem, if they are named through several mounts.
        let here = place.as_ref().zip(record.place.as_ref());
        let overlaps = record.backing_id == id
            || record.backing.starts_with(path)
            || path.starts_with(&record.backing)
            || here.is_some_and(|(one, other)| one.overlaps(other));
        if overlaps && other.has_store().map_err(StartError::io("look at", &record.mount_point))? {
            return refused(format!(
                "{} is behind the cache at {} already: two caches of the same files would not see each other's changes",
                record.backing.display(),
                record.mount_point.display()
            ));
        }
    }
    Ok(id)
}

/// Whether what the kernel checks for the users of a cache is all that keeps them from files.
pub(super) fn check_acls(plan: &Plan, backing: BorrowedFd<'_>) -> Result<(), StartError> {
    // A cache of one user's is refused by the other side what that user is refused.
    if !plan.others {
        return Ok(());
    }
    let found = backing::has_nfs4_acls(backing).map_err(io::Error::from);
    if !found.map_err(StartError::io("look for ACLs at", &plan.backing))? {
        return Ok(());
    }
    Err(StartError::Refused(format!(
        "{} has ACLs of NFSv4, which nobody would check for the users of a cache that all may use: they could read and \
         change what these ACLs keep from them. Make a cache of one user's, by `ondeck cache mount --user NAME`",
        plan.backing.display()
    )))
}

/// Opens the directory to mount on.
pub(super) fn open_mount_point(path: &Path) -> Result<OwnedFd, StartError> {
    mounts::open_plainly(path).map_err(|error| {
        let text = match error.kind() {
            io::ErrorKind::NotADirectory => format!("the mount point {} is not a directory", path.display()),
            io::ErrorKind::NotFound => {
                format!("the mount point {} does not exist: make it first", path.display())
            }
            _ if error.raw_os_error() == Some(libc::ELOOP) => {
                format!("the mount point {} is a symlink: name the directory itself", path.display())
            }
            _ => format!("can't open the mount point {}: {error}", path.display()),
        };
        StartError::Refused(text)
    })
}

/// Says what became of a start to whoever waits for it, and lets go of the streams. Returns whether somebody does.
pub(super) fn say(ready: &Ready) -> bool {
    let said = write_line(&mut io::stdout(), ready).and_then(|()| io::stdout().flush());
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        for stream in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
            // SAFETY: the standard streams are nobody's own, and what they lead to now is open.
            unsafe { libc::dup2(null.as_raw_fd(), stream) };
        }
    }
    said.is_ok()
}
