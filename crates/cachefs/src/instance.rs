//! A cache on this machine: its directory, its mount, the process that serves it, and how it is asked.
//!
//! # What there is of a cache
//!
//! In a directory of root's, usually `/run/ondeck/cache`, for a cache that is mounted at a directory with the number `ID`:
//!
//! - `ID/`, root's alone: `instance.json` (what the cache is), `store/` (a tmpfs with its data and its journal), `backing/`
//!   (the backing directory once more, mounted there), `lock` (held by the server), `log`
//! - `ID.sock`: where the server is asked
//!
//! The store and the backing directory are mounts of the machine, not of the server, so they outlive its death: the next
//! `mount` at the same place finds them, and recovers. The backing directory has a mount of its own because the cache may
//! cover the one by which everybody else reaches it: what covers it, or is mounted in it later, does not appear there.
//!
//! Both mounts are read-only, so that whoever removes the cache's directory with all that is in it removes nothing of the user's.
//! The server works through copies of them that are mounted nowhere, and may write.
//!
//! A cache is known by its mount point: the number follows from that path, so that any user finds it, who may read none of
//! this.
//!
//! # Layout
//!
//! - `record`: `instance.json`; `found`: what a dead server has left; `dead`: whether it is
//! - `start`: starting a server, and what must be right before
//! - `kept`: the mounts that outlive it
//! - `server`: the life of that process; `harden`: what it is protected from
//! - `control`: what it can be asked, and asking it

pub mod control;
mod dead;
mod found;
mod harden;
mod kept;
mod record;
mod server;
mod start;

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ondeck_core::Bytes;
use ondeck_ramdisk::mounts::{self, Mount};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::serve::SUBTYPE;
pub use record::{CacheUser, Record};
pub use server::serve;
pub use start::{Attach, Plan, Ready, StartError, check, promise, start};

/// Where the caches of a machine are, unless an administrator or a test says otherwise.
pub const USUAL_BASE: &str = "/run/ondeck/cache";

/// What the name begins with from which a cache and its store are mounted; the rest is its number. What begins with `ondeck:` is
/// an agent's RAM disk.
const SOURCE: &str = "ondeck-cache:";

/// All caches whose directories are in one place.
#[derive(Clone, Debug)]
pub struct Caches {
    base: PathBuf,
}

impl Caches {
    /// Those in this directory, which need not exist.
    pub fn new(base: impl Into<PathBuf>) -> Caches {
        Caches { base: base.into() }
    }

    /// Where they are.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// The cache at a mount point, which must be absolute and without symlinks; there need not be one.
    pub fn at(&self, mount_point: &Path) -> Instance {
        self.with(&format!("{:016x}", number(mount_point.as_os_str().as_bytes())))
    }

    /// The same, also if a directory above the mount point was renamed since it was mounted: its number is that of the path that
    /// it had then, and the table of mounts has both.
    ///
    /// # Errors
    /// If the table can't be read.
    pub fn find(&self, mount_point: &Path) -> io::Result<Instance> {
        let mounts = mounts::mounted()?;
        let here = mounts.iter().rev().find(|mount| is_cache(mount) && mount.at == mount_point);
        let id = here.and_then(|mount| mount.source.strip_prefix(SOURCE)).filter(|id| is_id(id));
        Ok(id.map_or_else(|| self.at(mount_point), |id| self.with(id)))
    }

    fn with(&self, id: &str) -> Instance {
        let [dir, socket] = [id.to_owned(), format!("{id}.sock")].map(|name| self.base.join(name));
        Instance { id: id.to_owned(), dir, socket }
    }

    /// All there are, or were before the machine started again; only root can tell.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn all(&self) -> io::Result<Vec<Instance>> {
        let entries = match fs::read_dir(&self.base) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            found.extend(name.to_str().filter(|name| is_id(name)).map(|id| self.with(id)));
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(found)
    }

    /// RAM that the caches, but for one, were promised and have not taken yet.
    ///
    /// # Errors
    /// If the directory or the table of mounts can't be read.
    pub fn promised(&self, but_for: Option<&Instance>) -> io::Result<Bytes> {
        let mut promised = 0_u64;
        for instance in self.all()? {
            if but_for.is_some_and(|one| one.id == instance.id) || !instance.has_store()? {
                continue;
            }
            let store = rustix::fs::statvfs(instance.store())?;
            let size = store.f_blocks.saturating_mul(store.f_frsize);
            let taken = size.saturating_sub(store.f_bfree.saturating_mul(store.f_frsize));
            let most = match instance.record() {
                Ok(Some(record)) => promise(record.settings.capacity).0,
                // Another release's, or damaged: it may fill its store, if that has not ended meanwhile.
                _ if instance.has_store()? => size,
                _ => continue,
            };
            promised = promised.saturating_add(most.saturating_sub(taken));
        }
        Ok(Bytes(promised))
    }

    /// The caches that are mounted, as the table of mounts has them: their mount points, in the order of mounting.
    ///
    /// # Errors
    /// If the table can't be read.
    pub fn mounted() -> io::Result<Vec<PathBuf>> {
        Ok(mounts::mounted()?.into_iter().filter(is_cache).map(|mount| mount.at).collect())
    }

    /// The mount point of the cache that an absolute path without symlinks leads into.
    ///
    /// # Errors
    /// If the table of mounts can't be read.
    pub fn containing(path: &Path) -> io::Result<Option<PathBuf>> {
        let mounts = mounts::mounted()?;
        Ok(mounts::seen_at(&mounts, path).filter(|mount| is_cache(mount)).map(|mount| mount.at.clone()))
    }
}

/// Whether this is a mount of a cache's.
pub(crate) fn is_cache(mount: &Mount) -> bool {
    mount.kind.strip_prefix("fuse.") == Some(SUBTYPE)
}

fn is_id(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// FNV-1a: the same for a path in every release. Two paths with one number are told apart by the record.
fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// One cache's place.
#[derive(Clone, Debug)]
pub struct Instance {
    id: String,
    dir: PathBuf,
    socket: PathBuf,
}

impl Instance {
    /// Its number.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Where the caches are that it is one of.
    pub fn base(&self) -> &Path {
        self.dir.parent().unwrap_or(Path::new("/"))
    }

    /// Where its server is asked.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Where its server writes what happens.
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// What it is; `None` if it is not there, or half made.
    ///
    /// # Errors
    /// If it can't be read or understood.
    pub fn record(&self) -> io::Result<Option<Record>> {
        record::read(&self.record_path())
    }

    /// Where that stands.
    pub fn record_path(&self) -> PathBuf {
        self.dir.join("instance.json")
    }

    /// Keeps what it is.
    fn keep(&self, record: &Record) -> io::Result<()> {
        record::write(&self.record_path(), record)
    }

    /// Where its data is: a tmpfs.
    pub fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    fn backing(&self) -> PathBuf {
        self.dir.join("backing")
    }

    /// What the cache and its store are mounted from.
    fn source(&self) -> String {
        format!("{SOURCE}{}", self.id)
    }

    /// Whether this is a mount of it, wherever that is by now.
    fn is_mount_of_it(&self, mount: &Mount) -> bool {
        is_cache(mount) && mount.source == self.source()
    }

    /// Whether a process serves it, also one that can't be asked, as its socket was removed.
    ///
    /// # Errors
    /// If that can't be seen.
    pub fn is_served(&self) -> io::Result<bool> {
        if self.has_store()? && kept::lock(&self.store())?.is_none() {
            return Ok(true);
        }
        for mount in mounts::mounted()?.iter().filter(|mount| self.is_mount_of_it(mount)) {
            if !dead::is_dead(mount)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether anything tells that it was there, though its store may be gone.
    ///
    /// # Errors
    /// If that can't be seen.
    pub fn has_remains(&self) -> io::Result<bool> {
        Ok(self.socket.try_exists()?
            || self.record_path().try_exists()?
            || mounts::mounted()?.iter().any(|mount| self.is_mount_of_it(mount)))
    }

    /// Whether its store is there.
    ///
    /// # Errors
    /// If the table of mounts can't be read.
    pub fn has_store(&self) -> io::Result<bool> {
        let (at, source) = (self.store(), self.source());
        Ok(mounts::mounted()?
            .iter()
            .any(|mount| mount.at == at && mount.kind == "tmpfs" && mount.source == source))
    }

    fn has_backing(&self) -> io::Result<bool> {
        let at = self.backing();
        Ok(mounts::mounted()?.iter().any(|mount| mount.at == at))
    }

    /// Makes its directory, and those above it.
    fn make_directory(&self) -> io::Result<()> {
        if let Some(base) = self.dir.parent() {
            // Users reach the usual one. Another is in a directory that is also for what only its owner may see.
            if base != Path::new(USUAL_BASE)
                && let Some(above) = base.parent()
            {
                DirBuilder::new().recursive(true).mode(0o700).create(above)?;
            }
            DirBuilder::new().recursive(true).mode(0o755).create(base)?;
        }
        make_private(&self.dir)
    }

    /// Makes the calling process the only one that may change it, as long as it lives. `None` if another one is.
    ///
    /// # Errors
    /// The kernel's.
    fn claim(&self) -> io::Result<Option<Claim>> {
        loop {
            self.make_directory()?;
            let path = self.dir.join("lock");
            let lock = match File::options().create(true).truncate(false).write(true).mode(0o600).open(&path)
            {
                // Its last user has removed it just now.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            };
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            // The one that is locked may have been removed before it was.
            match fs::metadata(&path) {
                Ok(there) if there.ino() == lock.metadata()?.ino() => return Ok(Some(Claim { _lock: lock })),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Removes all that there is of it, what its store holds included, but for the log of a new server, and the record: until another
    /// takes its place it may be all that tells what was lost.
    fn clear(&self, _: &Claim) -> io::Result<()> {
        mounts::detach_all(&self.backing())?;
        mounts::detach_all(&self.store())?;
        // Never anything recursive where something could be mounted.
        for directory in [self.backing(), self.store(), self.dir.join("fusectl")] {
            gone(fs::remove_dir(directory))?;
        }
        gone(fs::remove_file(&self.socket))?;
        gone(fs::remove_file(self.dir.join("instance.json.partial")))
    }

    /// The same, and its directory.
    fn remove(&self, claim: &Claim) -> io::Result<()> {
        self.clear(claim)?;
        for name in ["instance.json", "log", "lock"] {
            gone(fs::remove_file(self.dir.join(name)))?;
        }
        gone(fs::remove_dir(&self.dir))
    }

    /// Gives up a cache whose server is dead: its mount, and all that its store holds.
    ///
    /// # Errors
    /// The kernel's; [`Errno::BUSY`] if a server lives: that one is to be asked.
    pub fn abandon(&self, mount_point: &Path) -> io::Result<()> {
        let claim = self.claim()?.ok_or(Errno::BUSY)?;
        // The claim is free if somebody has removed the directory of one that lives.
        if self.is_served()? {
            return Err(Errno::BUSY.into());
        }
        let is_its =
            |mount: &&Mount| self.is_mount_of_it(mount) || (is_cache(mount) && mount.at == mount_point);
        for mount in mounts::mounted()?.iter().filter(is_its) {
            mounts::take_away(mount, true)?;
        }
        self.remove(&claim)
    }
}

/// The right to change a cache's directory.
struct Claim {
    _lock: File,
}

fn make_private(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        // A umask may have taken its owner's rights.
        Ok(()) => fs::set_permissions(directory, Permissions::from_mode(0o700)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The path of a directory that something is or will be mounted on: absolute, without symlinks on the way. The directory
/// itself is not looked at, since what is mounted there may be dead.
///
/// # Errors
/// The kernel's; `EINVAL` for the root, and for what ends with `..`.
pub fn mount_point(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let clean: PathBuf = absolute.components().collect();
    let name: &OsStr = clean.file_name().ok_or(Errno::INVAL)?;
    let parent = clean.parent().ok_or(Errno::INVAL)?;
    Ok(parent.canonicalize()?.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_has_the_same_number_however_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap().join("m");
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(dir.path(), dir.path().join("link")).unwrap();
        let caches = Caches::new("/nowhere");
        let expected = caches.at(&real).id().to_owned();
        for other in ["m", "m/", "./m", "link/m"] {
            let path = mount_point(&dir.path().join(other)).unwrap();
            assert_eq!(caches.at(&path).id(), expected, "{other}");
        }
        assert!(is_id(&expected));
    }

    #[test]
    fn only_one_process_can_claim_a_cache() {
        let dir = tempfile::tempdir().unwrap();
        let instance = Caches::new(dir.path().join("base")).at(Path::new("/mnt/fast"));
        let claim = instance.claim().unwrap().unwrap();
        assert!(instance.claim().unwrap().is_none());
        assert_eq!(Caches::new(dir.path().join("base")).all().unwrap().len(), 1);
        instance.remove(&claim).unwrap();
        drop(claim);
        assert!(Caches::new(dir.path().join("base")).all().unwrap().is_empty());
        assert!(instance.claim().unwrap().is_some());
    }
}
