//! Showing the RAM disk over the directories that a job uses, and taking it away again.
//!
//! Root mounts here over a path that a user names, in directories that the user can change at any moment. So:
//!
//! - The path is opened as the user, who must be able to reach it, also where root can't (root-squashed filesystems).
//!   Symlinks are followed as the job would follow them.
//! - What was opened is judged, by where it really is: below a prefix of the administrator's, of the user's own, and not
//!   above or on anybody's mount. The path is never looked up again.
//! - What was opened is mounted over, by its descriptor. The user can rename the directory, but can't have another one
//!   mounted over. Where the new mount is in the kernel's table is compared with what was judged; if that is another
//!   place, it is taken away at once.
//! - What is shown is opened below the root of the RAM disk without following any symlink: that the user may write there
//!   is the point of it.
//!
//! The mount is there for all users of the node. It lets in whom the directory that it covers lets in, and nobody else.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ondeck_api::config::AgentConfig;
use ondeck_api::wire::Cover;
use ondeck_core::{Layout, Owner, RamDiskId};
use ondeck_ramdisk::mounts::{self, Above, Mount, TakenAway, Tree};
use ondeck_ramdisk::{Build, EngineError, holders::holders};
use ondeck_transfer::credentials::{self, User};
use rustix::fs::Access;
use rustix::io::Errno;

use super::{
    CLIENT, DATA, ORDERLY, RamDisk, all_mounts, as_root_or_owner, check_path, lock, needs_mount, own_mounts,
    take_away, within,
};
use crate::fleet::late::NOT_MOUNTED;
use crate::record::Covered;
use crate::started;

/// How many of those who hold files are named.
const NAMED_HOLDERS: usize = 10;

/// The most directories that a job may have covered on a node. Each takes part in every look at the table of mounts.
const MOST_COVERS: usize = 64;

/// What a site lets jobs cover.
#[derive(Clone, Debug, Default)]
pub struct CoverPolicy {
    prefixes: Vec<PathBuf>,
    writable: bool,
    readable: bool,
    /// Where it is noted which jobs have begun on disk.
    started: PathBuf,
}

impl CoverPolicy {
    /// As the configuration says.
    pub fn new(config: &AgentConfig) -> CoverPolicy {
        CoverPolicy {
            prefixes: config.mount_prefixes.clone(),
            writable: config.cover_writable,
            readable: config.cover_readable,
            started: started::directory(config),
        }
    }

    /// Refuses to cover anything for a job that has begun on disk on this node.
    pub(super) fn allows_job(&self, layout: &Layout) -> Result<(), EngineError> {
        match started::job_of(layout) {
            Some(job) if started::is_noted(&self.started, job) => Err(EngineError::Refused(format!(
                "job {job} has begun on this node without its RAM disk, and must not see it come"
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses a directory that is not below a prefix.
    fn allows_place(&self, cover: &Cover, real: &Path) -> Result<(), EngineError> {
        if self.prefixes.is_empty() {
            return Err(EngineError::Refused(format!(
                "{} can't be covered: this node's configuration allows nothing to be; see mount_prefixes in its part \
                 [agent]",
                cover.path.display()
            )));
        }
        let below = |prefix: &PathBuf| {
            // The administrator may write a prefix with a symlink in it.
            let prefix = prefix.canonicalize().unwrap_or_else(|_| prefix.clone());
            real != prefix && real.starts_with(&prefix) && prefix != Path::new("/")
        };
        if self.prefixes.iter().any(below) {
            return Ok(());
        }
        let allowed: Vec<String> = self.prefixes.iter().map(|prefix| prefix.display().to_string()).collect();
        Err(EngineError::Refused(format!(
            "{} can't be covered: it is not below {} (mount_prefixes in this node's configuration)",
            name_of(cover, real),
            allowed.join(" or ")
        )))
    }

    /// Refuses a directory that is not the user's, unless the site allows it. Called with the user's identity.
    fn allows_directory(
        &self,
        cover: &Cover,
        real: &Path,
        directory: &OwnedFd,
        user: &User,
    ) -> Result<(), EngineError> {
        let io = |source: std::io::Error| EngineError::io("look at", real, source);
        let owner = rustix::fs::fstat(directory).map_err(|error| io(error.into()))?.st_uid;
        if owner == user.uid {
            return Ok(());
        }
        let may = |access| credentials::may(directory.as_fd(), access).map_err(io);
        let search = Access::EXEC_OK;
        if self.writable && may(Access::WRITE_OK | search)? {
            return Ok(());
        }
        if self.readable && cover.read_only && may(Access::READ_OK | search)? {
            return Ok(());
        }
        Err(EngineError::Refused(format!(
            "{} can't be covered: it belongs to user {owner} and not to user {} (cover_writable and cover_readable in \
             this node's configuration can allow more)",
            name_of(cover, real),
            user.uid
        )))
    }
}

/// A directory as the job knows it, and where it really is if that is elsewhere.
fn name_of(cover: &Cover, real: &Path) -> String {
    if cover.path == real {
        real.display().to_string()
    } else {
        format!("{} (which is {})", cover.path.display(), real.display())
    }
}

/// A directory that was opened to be covered.
pub(super) struct Aimed {
    cover: Cover,
    pub(super) real: PathBuf,
    pub(super) directory: Arc<OwnedFd>,
    /// The mount that it is on.
    pub(super) mount: u64,
}

/// The way to a cover, opened when nothing was on it yet: its user can mount something there, and serve that without ever
/// answering.
pub(super) struct Held {
    /// The cover's number and device, by which the kernel's table tells it.
    mount: (u64, (u32, u32)),
    above: Arc<Above>,
}

impl Held {
    fn is(&self, mount: &Mount) -> bool {
        self.mount == (mount.id, mount.device)
    }

    /// Of a mount that its path leads to.
    fn open(mount: &Mount, owner: Owner) -> Result<Option<Held>, EngineError> {
        if mounts::seen_at(&all_mounts()?, &mount.at).is_none_or(|seen| seen.id != mount.id) {
            return Ok(None);
        }
        let one = mount.clone();
        let above = within(Instant::now() + ORDERLY, "opening the way to a cover", move || {
            let open = || -> std::io::Result<Option<Above>> {
                let above = Above::of(&one)?;
                Ok(above.leads_to(&one)?.then_some(above))
            };
            as_root_or_owner(owner, open).map_err(|error| EngineError::io("look at", &one.at, error))
        })?;
        Ok(above.map(|above| Held { mount: (mount.id, mount.device), above: Arc::new(above) }))
    }

    /// Takes the cover away, which the kernel's table has as `mount`.
    fn take_away(
        &self,
        mount: &Mount,
        owner: Owner,
        lazily: bool,
        until: Instant,
    ) -> Result<TakenAway, EngineError> {
        let (above, mount) = (Arc::clone(&self.above), mount.clone());
        within(until, "unmounting", move || {
            as_root_or_owner(owner, || above.take_away(&mount, lazily))
                .map_err(|error| EngineError::io("unmount", &mount.at, error))
        })
    }
}

/// A user with all groups. One that the name service does not know has no further groups.
pub(super) fn user_of(owner: Owner) -> User {
    let mut user = User::look_up(&owner.uid.to_string()).unwrap_or_else(|error| {
        tracing::warn!(%error, "goes on without the user's groups");
        User {
            name: owner.uid.to_string(),
            uid: owner.uid,
            gid: owner.gid,
            groups: Vec::new(),
            home: PathBuf::from("/"),
        }
    });
    (user.uid, user.gid) = (owner.uid, owner.gid);
    if !user.groups.contains(&owner.gid) {
        user.groups.push(owner.gid);
    }
    user
}

fn as_user<T: Send>(
    user: &User,
    work: impl FnOnce() -> Result<T, EngineError> + Send,
) -> Result<T, EngineError> {
    user.on_a_thread(work).map_err(|error| EngineError::Refused(error.to_string()))?
}

/// Opens and judges one directory. Called with the user's identity.
fn aim_one(cover: Cover, policy: &CoverPolicy, user: &User) -> Result<Aimed, EngineError> {
    let path = &cover.path;
    let io = |what, source: std::io::Error| EngineError::io(what, path, source);
    let directory = mounts::open_directory(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotADirectory => {
            EngineError::Refused(format!("{} is not a directory", path.display()))
        }
        _ => io("open, as its user,", error),
    })?;
    let real = mounts::path_of(directory.as_fd()).map_err(|error| io("tell the real path of", error))?;
    let mount = mounts::mount_of(directory.as_fd()).map_err(|error| io("tell the mount of", error))?;
    let aimed = Aimed { real, directory: Arc::new(directory), mount, cover };
    policy.allows_place(&aimed.cover, &aimed.real)?;
    policy.allows_directory(&aimed.cover, &aimed.real, &aimed.directory, user)?;
    aimed.is_in_place()?;
    Ok(aimed)
}

impl Aimed {
    /// Refuses a directory that is no longer where it was judged. Called with the user's identity.
    fn is_in_place(&self) -> Result<(), EngineError> {
        let same = || -> std::io::Result<bool> {
            if mounts::path_of(self.directory.as_fd())? != self.real {
                return Ok(false);
            }
            let there = mounts::open_plainly(&self.real)?;
            let (found, held) = (rustix::fs::fstat(&there)?, rustix::fs::fstat(&self.directory)?);
            let same = (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino);
            Ok(same && mounts::mount_of(there.as_fd())? == self.mount)
        };
        match same() {
            Ok(true) => Ok(()),
            Ok(false) => Err(moved(&self.cover, &self.real)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(moved(&self.cover, &self.real)),
            Err(error) => Err(EngineError::io("look again at", &self.real, error)),
        }
    }
}

fn moved(cover: &Cover, real: &Path) -> EngineError {
    EngineError::Refused(format!(
        "{} was moved, removed or mounted over meanwhile; nothing was mounted",
        name_of(cover, real)
    ))
}

/// Whose RAM disk a mount is of, if of any.
fn ramdisk_of(mount: &Mount) -> Option<&str> {
    let name = mount.source.strip_prefix("ondeck").filter(|_| !mount.is_a_users())?;
    Some(name.strip_prefix(':').unwrap_or("of `ondeck run`"))
}

/// Refuses a directory where a mount would hide or be hidden by another one. `own` are mounts of this very RAM disk that
/// cover something; `inside` says whether the directory is meant to be in one of them.
fn check_table(cover: &Cover, real: &Path, mount: u64, own: &[u64], inside: bool) -> Result<(), EngineError> {
    let refused = |why: String| {
        let name = name_of(cover, real);
        Err(EngineError::Refused(format!("{name} can't be covered: {why}")))
    };
    let all = all_mounts()?;
    if let Some(id) = all.iter().find(|found| found.id == mount && !inside).and_then(ramdisk_of) {
        return refused(format!("it is on the RAM disk {id} already"));
    }
    for other in all.iter().filter(|found| found.id != mount && !own.contains(&found.id)) {
        if !other.at.starts_with(real) {
            continue;
        }
        return match (ramdisk_of(other), other.at == real) {
            (Some(id), true) => refused(format!("the RAM disk {id} covers it already")),
            (Some(id), false) => {
                refused(format!("the RAM disk {id} is shown in it, at {}", other.at.display()))
            }
            (None, true) => refused("something is mounted over it".into()),
            (None, false) => refused(format!("something is mounted in it, at {}", other.at.display())),
        };
    }
    Ok(())
}

/// Takes permissions of the group and of others from a directory of the RAM disk that the directory that it is shown
/// over does not give them. Between there and the staged copy the path protects nothing any more.
fn keep_out(shown: &OwnedFd, over: &OwnedFd) -> std::io::Result<()> {
    let (shown_now, over) = (rustix::fs::fstat(shown)?, rustix::fs::fstat(over)?);
    let others = over.st_mode & 0o007;
    // Another group is others.
    let group = if shown_now.st_gid == over.st_gid { over.st_mode & 0o070 } else { others << 3 };
    let mode = shown_now.st_mode & 0o7777;
    let less = mode & (0o7700 | group | others);
    if less == mode {
        return Ok(());
    }
    // A descriptor that only names a file can't be used for fchmod(2).
    let path = format!("/proc/self/fd/{}", shown.as_raw_fd());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(less))
}

fn check_covers(covers: &[Cover]) -> Result<(), EngineError> {
    if covers.is_empty() {
        return Err(EngineError::Refused("there is nothing to cover; name at least one directory".into()));
    }
    if covers.len() > MOST_COVERS {
        return Err(EngineError::Refused(format!(
            "{} directories are more than the {MOST_COVERS} that can be covered on a node",
            covers.len()
        )));
    }
    for cover in covers {
        check_path(&cover.path)?;
        let mut parts = Path::new(&cover.from).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == cover.from.as_str());
        if !plain {
            return Err(EngineError::Refused(format!(
                "`{}` is no plain name of a directory of the RAM disk",
                cover.from
            )));
        }
    }
    Ok(())
}

impl RamDisk {
    /// Opens and holds the directories that [`RamDisk::cover`] will mount over.
    pub(super) fn aim(
        &self,
        build: &Build,
        covers: &[Cover],
        policy: &CoverPolicy,
    ) -> Result<(), EngineError> {
        check_covers(covers)?;
        let record = self.record();
        if !record.covered.is_empty() {
            let mut now: Vec<&Cover> = record.covered.iter().map(|covered| &covered.cover).collect();
            let mut wanted: Vec<&Cover> = covers.iter().collect();
            now.sort_by_key(|cover| &cover.path);
            wanted.sort_by_key(|cover| &cover.path);
            if now == wanted {
                return self.must_cover_all();
            }
            return Err(EngineError::Refused(format!(
                "{} covers other directories on this node already; uncover them first",
                self.id()
            )));
        }
        *lock(&self.aimed) = None;
        let mut aimed = self.aim_all(build, covers, policy)?;
        aimed.sort_by_key(|aimed| aimed.real.components().count());
        for (index, one) in aimed.iter().enumerate() {
            if let Some(other) = aimed[..index].iter().find(|other| other.real == one.real) {
                return Err(EngineError::Refused(format!(
                    "{} and {} are the same directory",
                    other.cover.path.display(),
                    one.cover.path.display()
                )));
            }
            check_table(&one.cover, &one.real, one.mount, &[], false)?;
        }
        *lock(&self.aimed) = Some(aimed);
        Ok(())
    }

    fn aim_all(
        &self,
        build: &Build,
        covers: &[Cover],
        policy: &CoverPolicy,
    ) -> Result<Vec<Aimed>, EngineError> {
        let (owner, covers, policy) = (build.layout.owner, covers.to_vec(), policy.clone());
        within(build.until, "the directories to cover", move || {
            let user = user_of(owner);
            as_user(&user, || covers.into_iter().map(|cover| aim_one(cover, &policy, &user)).collect())
        })
    }

    /// Mounts the RAM disk over all that was aimed at, or over nothing.
    pub(super) fn cover(&self, build: &Build) -> Result<(), EngineError> {
        self.cover_with(build, &mut |_| Ok(()))?;
        self.hold_covers();
        Ok(())
    }

    /// The same; `before` is told the number of each mount that is about to be there, and may refuse it.
    pub(super) fn cover_with(
        &self,
        build: &Build,
        before: &mut dyn FnMut(u64) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let aimed = lock(&self.aimed).take();
        let record = self.record();
        if !record.covered.is_empty() {
            return self.must_cover_all();
        }
        let aimed = aimed.ok_or_else(|| {
            EngineError::Refused(format!(
                "nothing is aimed at for {} on this node (its agent may have been started again since); aim again",
                self.id()
            ))
        })?;
        let aimed: Vec<Arc<Aimed>> = aimed.into_iter().map(Arc::new).collect();
        let covered: Vec<Covered> = aimed
            .iter()
            .map(|aimed| Covered { cover: aimed.cover.clone(), real: aimed.real.clone() })
            .collect();
        if !self.is_mounted()? {
            if needs_mount(build.layout) {
                let text = format!("the client of {} is not mounted on this node; mount it first", self.id());
                return Err(EngineError::Refused(text));
            }
            // The simulated engine shows nothing.
            return self.note(|record| (record.covered, record.whole) = (covered, false));
        }
        self.is_whole(build)?;
        for one in &aimed {
            check_table(&one.cover, &one.real, one.mount, &[], false)?;
        }
        let (owner, looked_at) = (build.layout.owner, aimed.clone());
        within(build.until, "the directories to cover", move || {
            as_user(&user_of(owner), || looked_at.iter().try_for_each(|aimed| aimed.is_in_place()))
        })?;
        let mut trees: Vec<(Arc<Aimed>, Tree)> = Vec::new();
        for one in &aimed {
            trees.push((Arc::clone(one), self.tree(build, &one.cover, Some(&one.directory))?));
        }
        // Noted before the mounts: who comes after a crash must know what to take away.
        self.note(|record| (record.covered, record.whole) = (covered, false))?;
        let mut own = Vec::new();
        for (index, (one, tree)) in trees.iter().enumerate() {
            let number = tree.id().map_err(|error| EngineError::io("mount on", &one.real, error));
            let told = number.and_then(&mut *before);
            let mounted = told.and_then(|()| self.attach(build, one, tree, &own));
            match mounted {
                Ok(id) => own.push(id),
                Err(error) => {
                    for (one, tree) in trees[..=index].iter().rev() {
                        if let Err(failed) = tree.detach() {
                            let left = one.real.display();
                            let text = format!("{error}; and {left} can't be uncovered: {failed}");
                            return Err(EngineError::Refused(text));
                        }
                    }
                    self.note(|record| record.covered.clear())?;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The directory of the RAM disk that is to be shown, as a mount that is nowhere yet. It lets nobody in whom the
    /// directory that it will be shown over keeps out.
    fn tree(&self, build: &Build, cover: &Cover, over: Option<&Arc<OwnedFd>>) -> Result<Tree, EngineError> {
        let writable = self.place.path(CLIENT);
        let over = over.cloned();
        let mut root = self.place.path(CLIENT);
        // Otherwise what is mounted in a cover would appear in the whole filesystem, too.
        mounts::make_private(&root).map_err(|error| EngineError::io("make private", &root, error))?;
        if cover.read_only {
            root = self.read_only_view(&root)?;
            mounts::make_private(&root).map_err(|error| EngineError::io("make private", &root, error))?;
        }
        let below = Path::new(DATA).join(&cover.from);
        within(build.until, "the RAM disk's directory", move || {
            let io = |error: std::io::Error| {
                let text = match Errno::from_io_error(&error) {
                    Some(Errno::NOENT) => "it does not exist",
                    Some(Errno::LOOP | Errno::NOTDIR) => "it is a symlink or no directory",
                    _ => return EngineError::io("open", &root.join(&below), error),
                };
                EngineError::Refused(format!("{} of the RAM disk can't be shown: {text}", below.display()))
            };
            let whole = mounts::open_plainly(&root).map_err(io)?;
            let shown = mounts::open_beneath(whole.as_fd(), &below).map_err(io)?;
            if let Some(over) = over {
                let whole = mounts::open_plainly(&writable).map_err(io)?;
                let shown = mounts::open_beneath(whole.as_fd(), &below).map_err(io)?;
                keep_out(&shown, &over)
                    .map_err(|error| EngineError::io("change the mode of", &writable.join(&below), error))?;
            }
            Tree::of(shown.as_fd()).map_err(io)
        })
    }

    /// Mounts one tree where it belongs, and makes sure that it is there. On failure it may still be mounted.
    fn attach(&self, build: &Build, aimed: &Aimed, tree: &Tree, own: &[u64]) -> Result<u64, EngineError> {
        let io = |error: std::io::Error| EngineError::io("mount on", &aimed.real, error);
        let all = all_mounts()?;
        let outer = all
            .into_iter()
            .filter(|mount| own.contains(&mount.id))
            .filter(|mount| aimed.real != mount.at && aimed.real.starts_with(&mount.at))
            .max_by_key(|mount| mount.at.components().count());
        let (parent, directory) = match outer {
            None => (aimed.mount, Arc::clone(&aimed.directory)),
            Some(outer) => (outer.id, Arc::new(self.mount_point_in(build, &outer, aimed)?)),
        };
        tree.attach(directory.as_fd()).map_err(io)?;
        let id = tree.id().map_err(io)?;
        let all = all_mounts()?;
        let place = all.iter().find(|mount| mount.id == id);
        if place.is_none_or(|place| place.at != aimed.real || place.parent != parent) {
            return Err(moved(&aimed.cover, &aimed.real));
        }
        let mut all_own = own.to_vec();
        all_own.push(id);
        check_table(&aimed.cover, &aimed.real, parent, &all_own, parent != aimed.mount)?;
        Ok(id)
    }

    /// The directory that an inner cover is mounted on: one of the RAM disk itself, seen through the outer cover.
    fn mount_point_in(&self, build: &Build, outer: &Mount, aimed: &Aimed) -> Result<OwnedFd, EngineError> {
        let (outer, real, owner) = (outer.clone(), aimed.real.clone(), build.layout.owner);
        within(build.until, "the directory to mount on", move || {
            let open = || -> std::io::Result<OwnedFd> {
                let root = mounts::open_plainly(&outer.at)?;
                if mounts::mount_of(root.as_fd())? != outer.id {
                    return Err(Errno::STALE.into());
                }
                let below = real.strip_prefix(&outer.at).map_err(std::io::Error::other)?;
                let found = mounts::open_beneath(root.as_fd(), below)?;
                if rustix::fs::fstat(&found)?.st_uid == owner.uid {
                    Ok(found)
                } else {
                    Err(Errno::ACCESS.into())
                }
            };
            as_root_or_owner(owner, open).map_err(|error| {
                EngineError::Refused(format!(
                    "{} lies in {}, which is covered too, and the RAM disk has no such directory of its user's there \
                     ({error}); stage it in with the outer one",
                    real.display(),
                    outer.at.display()
                ))
            })
        })
    }

    /// The mounts that cover something, the innermost first.
    pub(super) fn cover_mounts(&self) -> Result<Vec<Mount>, EngineError> {
        let shown = self.record().shown;
        let mut own = own_mounts(&self.place)?;
        own.retain(|mount| !shown.iter().any(|shown| shown.path == mount.at));
        Ok(own)
    }

    /// Refuses if files are open in what is covered.
    pub(super) fn must_not_be_busy(&self) -> Result<(), EngineError> {
        if self.record().covered.is_empty() {
            return Ok(());
        }
        let own = self.cover_mounts()?;
        let Some(device) = own.first().map(|mount| mount.device) else { return Ok(()) };
        // Processes in other mount namespaces have it at paths of their own; what root does with the whole, and what is
        // shown elsewhere, stays.
        let shown = self.record().shown;
        let counts = |path: &Path| {
            !path.starts_with(self.place.dir()) && !shown.iter().any(|shown| path.starts_with(&shown.path))
        };
        let owner = self.record().layout.owner.uid;
        let held = holders(device, owner, NAMED_HOLDERS, counts)
            .map_err(|error| EngineError::io("read", Path::new("/proc"), error))?;
        let mut named: Vec<String> = held.iter().map(ToString::to_string).collect();
        let ids: Vec<u64> = own.iter().map(|mount| mount.id).collect();
        let inner = all_mounts()?.into_iter().filter(|mount| ids.contains(&mount.parent));
        named.extend(
            inner
                .filter(|mount| !ids.contains(&mount.id))
                .map(|mount| format!("something is mounted at {}", mount.at.display())),
        );
        if named.is_empty() { Ok(()) } else { Err(self.busy(&named.join(", "))) }
    }

    fn busy(&self, why: &str) -> EngineError {
        EngineError::Busy(format!("what {} covers is in use: {why}", self.id()))
    }

    /// Takes the RAM disk away from all that it covers; without `force` only if nothing of it is in use.
    pub(super) fn uncover(
        &self,
        build: &Build,
        force: bool,
        policy: &CoverPolicy,
    ) -> Result<(), EngineError> {
        *lock(&self.aimed) = None;
        if self.record().covered.is_empty() {
            return Ok(());
        }
        if force {
            self.detach_covers(build.layout.owner)?;
        } else {
            self.must_not_be_busy()?;
            self.unmount_covers(build, policy)?;
        }
        // Somebody else may have unmounted one.
        lock(&self.held_covers).clear();
        *lock(&self.uncovered) = Some(Instant::now());
        self.note(|record| record.covered.clear())
    }

    /// Opens the way to each cover that can be reached. Without it a cover is looked for by its path.
    pub(super) fn hold_covers(&self) {
        let owner = self.record().layout.owner;
        let covers = self.cover_mounts().unwrap_or_else(|error| {
            tracing::warn!(ramdisk = %self.id(), %error, "can't tell what it covers");
            Vec::new()
        });
        for mount in &covers {
            if lock(&self.held_covers).iter().any(|held| held.is(mount)) {
                continue;
            }
            match Held::open(mount, owner) {
                Ok(held) => lock(&self.held_covers).extend(held),
                Err(error) => {
                    // The others lie on the same filesystem, mostly.
                    return tracing::warn!(ramdisk = %self.id(), %error, "can't open the way to a cover");
                }
            }
        }
    }

    /// Takes away at once what can be reached by an open way, whatever is mounted over it by now. The rest is looked for by
    /// its path.
    pub(super) fn detach_held(&self, owner: Owner) {
        let covers = match self.cover_mounts() {
            Ok(covers) => covers,
            // Whoever looks by path reads the same table, and says what is wrong. The open ways are for the next try.
            Err(error) => return tracing::warn!(ramdisk = %self.id(), %error, "can't tell what it covers"),
        };
        let held = std::mem::take(&mut *lock(&self.held_covers));
        for mount in &covers {
            let Some(held) = held.iter().find(|held| held.is(mount)) else { continue };
            if let Err(error) = held.take_away(mount, owner, true, Instant::now() + ORDERLY) {
                tracing::warn!(ramdisk = %self.id(), %error, "looks for it by its path");
            }
        }
    }

    fn detach_covers(&self, owner: Owner) -> Result<(), EngineError> {
        self.detach_held(owner);
        let mut result = Ok(());
        for mount in self.cover_mounts()? {
            if let Err(error) = take_away(&mount, owner) {
                result = Err(error);
            }
        }
        // An inner one that could not be reached went with its outer one.
        if self.cover_mounts()?.is_empty() { Ok(()) } else { result }
    }

    /// Unmounts all covers. If one is busy, those that were unmounted are mounted again.
    fn unmount_covers(&self, build: &Build, policy: &CoverPolicy) -> Result<(), EngineError> {
        let (mut taken, covers) = (Vec::new(), self.cover_mounts()?);
        // The way to an inner one, which somebody else has unmounted, would keep the outer one busy.
        lock(&self.held_covers).retain(|held| covers.iter().any(|mount| held.is(mount)));
        for mount in covers {
            let reason = match self.unmount_cover(build, &mount) {
                Ok(TakenAway::Yes) => {
                    taken.push(mount);
                    continue;
                }
                // A copy of a mount goes with it where mounts are shared between namespaces.
                Ok(TakenAway::Elsewhere) if !all_mounts()?.iter().any(|other| other.id == mount.id) => continue,
                Ok(TakenAway::Elsewhere) => EngineError::Refused(format!(
                    "{} can't be taken away: a directory above it was moved, or something is mounted over it",
                    mount.at.display()
                )),
                Ok(TakenAway::Busy) => match self.must_not_be_busy() {
                    Err(busy) => busy,
                    Ok(()) => self.busy(&format!(
                        "the kernel holds {} (a loop device, swap space, an exported directory, or a process that has \
                         ended since)",
                        mount.at.display()
                    )),
                },
                Err(error) => error,
            };
            let back = self.put_back(build, &taken, policy);
            self.hold_covers();
            back.map_err(|failed| {
                EngineError::Busy(format!(
                    "{reason}; and what had been taken away can't be mounted again: {failed}"
                ))
            })?;
            return Err(reason);
        }
        Ok(())
    }

    /// Unmounts one cover if it is not in use.
    fn unmount_cover(&self, build: &Build, mount: &Mount) -> Result<TakenAway, EngineError> {
        let (until, owner) = (build.until.min(Instant::now() + ORDERLY), build.layout.owner);
        let held = {
            let mut held = lock(&self.held_covers);
            held.iter().position(|held| held.is(mount)).map(|at| held.swap_remove(at))
        };
        if let Some(held) = held {
            let done = held.take_away(mount, owner, false, until);
            if !matches!(done, Ok(TakenAway::Elsewhere)) {
                return done;
            }
        }
        // Its directory was moved from another namespace, where nothing is mounted on it.
        match Held::open(mount, owner)? {
            Some(held) => held.take_away(mount, owner, false, until),
            None => Ok(TakenAway::Elsewhere),
        }
    }

    /// Covers again what was uncovered a moment ago, as carefully as the first time.
    fn put_back(&self, build: &Build, taken: &[Mount], policy: &CoverPolicy) -> Result<(), EngineError> {
        let record = self.record();
        let mut own: Vec<u64> = self.cover_mounts()?.iter().map(|mount| mount.id).collect();
        // The outer ones first, as they are noted.
        for covered in &record.covered {
            if !taken.iter().any(|mount| mount.at == covered.real) {
                continue;
            }
            let tree = self.tree(build, &covered.cover, None)?;
            let in_another = self.cover_mounts()?.iter().any(|mount| covered.real.starts_with(&mount.at));
            let aimed = if in_another {
                self.aim_inside(covered)?
            } else {
                let cover = Cover { path: covered.real.clone(), ..covered.cover.clone() };
                let mut aimed = self.aim_all(build, &[cover], policy)?;
                aimed.pop().ok_or_else(|| moved(&covered.cover, &covered.real))?
            };
            match self.attach(build, &aimed, &tree, &own) {
                Ok(id) => own.push(id),
                Err(error) => {
                    tree.detach().map_err(|undo| EngineError::io("unmount", &covered.real, undo))?;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// What [`RamDisk::attach`] needs of a directory that is seen through an outer cover only; the descriptor is not
    /// mounted on.
    fn aim_inside(&self, covered: &Covered) -> Result<Aimed, EngineError> {
        let directory = mounts::open_plainly(self.place.dir())
            .map_err(|error| EngineError::io("open", self.place.dir(), error))?;
        Ok(Aimed {
            cover: covered.cover.clone(),
            real: covered.real.clone(),
            directory: Arc::new(directory),
            // No mount has this number.
            mount: u64::MAX,
        })
    }

    /// What is wrong with the covers: somebody took one away.
    pub(super) fn cover_faults(&self) -> Vec<String> {
        let covered = self.record().covered;
        if covered.is_empty() {
            return Vec::new();
        }
        let own = match self.cover_mounts() {
            Ok(own) => own,
            Err(error) => return vec![format!("it can't be told whether its covers are mounted: {error}")],
        };
        let gone = covered.iter().filter(|covered| !own.iter().any(|mount| mount.at == covered.real));
        gone.map(|covered| format!("{NOT_MOUNTED}{} any more", covered.real.display())).collect()
    }

    /// Refuses if a cover that was noted is not there: the agent was killed while it mounted them, or somebody took one
    /// away.
    pub(super) fn must_cover_all(&self) -> Result<(), EngineError> {
        match self.cover_faults().first() {
            Some(fault) if needs_mount(&self.record().layout) => {
                Err(EngineError::Refused(format!("{}: {fault}; uncover it first", self.id())))
            }
            _ => Ok(()),
        }
    }

    /// Whether a path is one that it covers.
    pub(crate) fn covers_path(&self, at: &Path) -> bool {
        self.record().covered.iter().any(|covered| covered.real == at)
    }

    /// Refuses while something is covered.
    pub(super) fn must_cover_nothing(&self) -> Result<(), EngineError> {
        match self.record().covered.first() {
            None => Ok(()),
            Some(covered) => {
                let id: &RamDiskId = self.id();
                let at = covered.real.display();
                Err(EngineError::Refused(format!("{id} covers {at} on this node; uncover it first")))
            }
        }
    }
}
