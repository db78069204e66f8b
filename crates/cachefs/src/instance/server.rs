//! The life of the process that serves a cache.
//!
//! It is started for one cache, tells whether it serves, and then:
//!
//! 1. *mounted*: it serves programs, and answers orders;
//! 2. *writing back*: the mount is gone, and what the backing directory lacks goes there. It comes to this by an order, or
//!    because somebody took the mount away;
//! 3. *stuck*: that does not work. It is tried again, by itself or by the next order;
//! 4. *ended*: the store is gone, too.
//!
//! Killed in whichever of them, it leaves the store, the mount of the backing directory and the record; the next one begins
//! where it was.

mod orders;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_ramdisk::mounts::{self, Mount};
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::control::Answer;
use super::dead::is_dead;
use super::found::{Found, find};
use super::harden::{EndSignals, forget_the_shell, harden, share_memory};
use super::record::boot;
use super::start::{
    Attach, Plan, Ready, StartError, check_acls, check_backing, check_ram, check_settings, open_backing,
    open_mount_point, place_of, say, store_size, there_is_one,
};
use super::{CacheUser, Caches, Claim, Instance, Record, is_cache, kept, make_private};
use crate::message::Service;
use crate::serve::{MountOptions, Server};
use crate::{OpenError, Owner, settings::Settings};

/// How often progress is told.
const PROGRESS: Duration = Duration::from_millis(100);

/// After how long a write-back that failed is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// How often the record of what is unwritten is looked after.
const RECORD: Duration = Duration::from_secs(1);

/// How long what is under way is waited for when what was not written back is given up.
const PATIENCE: Duration = Duration::from_secs(3);

/// How soon whoever starts a server that only writes back asks it.
const ASKED: Duration = Duration::from_secs(2);

/// Runs a server by a plan, until its cache is gone. Returns whether it ever served.
pub fn serve(plan: &Plan) -> bool {
    let signals = EndSignals::block();
    let hardened = harden();
    // A run's belongs to its program, and stays where that was put.
    if !matches!(plan.attach, Attach::Inside(_)) {
        forget_the_shell();
    }
    share_memory();
    match begin(plan) {
        Ok((cache, mut notes)) => {
            notes.extend(hardened);
            if say(&Ready::Serving { notes }) {
                cache.note_told();
            } else {
                cache.end_unasked();
            }
            cache.live(signals);
            true
        }
        Err(error) => {
            tracing::error!("{error}");
            say(&match error {
                StartError::Refused(message) => Ready::Refused { message },
                StartError::Failed(message) => Ready::Failed { message },
            });
            false
        }
    }
}

fn begin(plan: &Plan) -> Result<(Arc<Cache>, Vec<String>), StartError> {
    let caches = Caches::new(&plan.base);
    let instance = caches.at(&plan.mount_point);
    let at = plan.mount_point.display();
    let claim = instance.claim().map_err(StartError::io("make a directory in", &plan.base))?;
    let Some(claim) = claim else {
        let record = instance.record().ok().flatten();
        return Err(StartError::Refused(there_is_one(&plan.mount_point, record.as_ref())));
    };
    // The claim is free if somebody has removed the directory of one that lives.
    if instance.is_served().map_err(StartError::io("look for an earlier cache at", &plan.mount_point))? {
        let is_reached = instance.socket().try_exists().unwrap_or(true);
        return Err(StartError::Refused(if is_reached {
            there_is_one(&plan.mount_point, instance.record().ok().flatten().as_ref())
        } else {
            format!(
                "there is a cache at {at}, which can't be asked, because {} was removed: `umount {at}` ends it, and writes back \
                 all that it holds",
                instance.socket().display()
            )
        }));
    }
    let mut notes = Vec::new();
    match find(&instance, plan)? {
        Found::Store(record) => {
            notes.push(format!("recovered the cache that was at {at}"));
            notes.extend(record.lost_before.clone());
            resume(plan, &instance, &record)?;
            let cache = assemble(plan, instance, claim, *record);
            cache.map(|cache| (cache, notes))
        }
        found => {
            let lost = match found {
                Found::Lost(record) => Some(*record),
                _ => None,
            };
            let untold = lost.as_ref().and_then(Record::lost);
            notes.extend(untold.clone());
            take_away_dead(&instance, &plan.mount_point)?;
            // Before anything is removed: what was lost is told by the record, and by nobody else.
            let backing = look(plan, &caches, &instance)?;
            // Also what a start that was killed has made.
            instance.clear(&claim).map_err(StartError::io("remove what is left in", &plan.base))?;
            let made = prepare(plan, &instance, backing, untold).and_then(|record| {
                // It is given up if the rest fails.
                let place = instance.clone();
                assemble(plan, place, claim, record)
            });
            match made {
                Ok(cache) => Ok((cache, notes)),
                Err(error) => {
                    discard(&instance, lost.as_ref());
                    Err(error)
                }
            }
        }
    }
}

/// Removes what a start has made that failed. If a cache was lost before, the next one tells it.
fn discard(instance: &Instance, lost: Option<&Record>) {
    let keep = |claim| match lost.filter(|record| record.lost().is_some()) {
        Some(record) => instance.clear(&claim).and_then(|()| instance.keep(record)),
        None => instance.remove(&claim),
    };
    let removed = instance.claim().and_then(|claim| claim.map_or(Ok(()), keep));
    if let Err(error) = removed {
        tracing::warn!(%error, "something is left of a start that failed");
    }
}

/// Looks whether there can be a new cache by this plan. Returns its backing directory, with device and inode.
fn look(plan: &Plan, caches: &Caches, instance: &Instance) -> Result<(OwnedFd, (u64, u64)), StartError> {
    check_settings(&plan.settings)?;
    drop(open_mount_point(&plan.mount_point)?);
    let backing = open_backing(plan)?;
    let id = check_backing(plan, backing.as_fd(), caches, instance)?;
    check_acls(plan, backing.as_fd())?;
    check_ram(plan.settings.capacity, caches, instance)?;
    Ok((backing, id))
}

/// Makes the places of a new cache, and its record, which keeps what was lost before and is not told yet.
fn prepare(
    plan: &Plan,
    instance: &Instance,
    (backing, id): (OwnedFd, (u64, u64)),
    untold: Option<String>,
) -> Result<Record, StartError> {
    let (user, settings, run) = (plan.user.clone(), plan.settings.clone(), plan.run.clone());
    let record = Record::new(&plan.mount_point, &plan.backing, id, user, plan.others, settings, run);
    let keep = || StartError::io("write the record of the cache at", &plan.mount_point);
    let mut record = record.map_err(keep())?;
    let like = rustix::fs::fstatvfs(&backing).map_err(io::Error::from);
    let like = like.map_err(StartError::io("look at", &plan.backing))?.f_flag;
    record.lost_before = untold;
    record.place = place_of(plan, backing.as_fd()).map_err(StartError::io("look at", &plan.backing))?;
    record.read_only = like.contains(StatVfsMountFlags::RDONLY);
    kept::show(backing.as_fd(), &instance.backing()).map_err(StartError::io("mount again", &plan.backing))?;
    // From here on there is something to recover.
    instance.keep(&record).map_err(keep())?;
    let store = instance.store();
    make_private(&store)
        .and_then(|()| mount_store(instance, &store, plan))
        .map_err(StartError::io("mount a tmpfs for", &plan.mount_point))?;
    Ok(record)
}

/// Takes away what dead servers have left mounted here.
fn take_away_dead(instance: &Instance, at: &Path) -> Result<(), StartError> {
    let look = || StartError::io("look at what is mounted at", at);
    // A directory above it may have been renamed since.
    let is_its = |mount: &&Mount| (is_cache(mount) && mount.at == at) || instance.is_mount_of_it(mount);
    for mount in mounts::mounted().map_err(look())?.iter().rev().filter(is_its) {
        if !is_dead(mount).map_err(look())? {
            return Err(StartError::Refused(format!("there is a cache at {} already", mount.at.display())));
        }
        mounts::take_away(mount, true).map_err(look())?;
    }
    Ok(())
}

fn mount_store(instance: &Instance, at: &Path, plan: &Plan) -> io::Result<()> {
    // Without huge pages, whose bytes would be others than those that the cache counts. `noswap` needs Linux 6.4.
    let options = format!("size={},nr_inodes=0,mode=0700,huge=never", store_size(plan.settings.capacity).0);
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let mut last = Errno::INVAL;
    for options in [format!("{options},noswap"), options] {
        let options = std::ffi::CString::new(options)?;
        match rustix::mount::mount(instance.source(), at, "tmpfs", flags, &*options) {
            Ok(()) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(last.into())
}

/// Whether what an earlier server left is what this one shall serve.
fn resume(plan: &Plan, instance: &Instance, record: &Record) -> Result<(), StartError> {
    let at = plan.mount_point.display();
    let holds = || format!("the cache at {at} was not unmounted, and may hold data that nobody else has");
    let differs = |what: &str, was: String| {
        Err(StartError::Refused(format!(
            "{}. It {what} {was}: mount it so again, or write back what it holds by `ondeck cache unmount {at}`",
            holds()
        )))
    };
    if record.run != plan.run {
        return Err(StartError::Refused(match &record.run {
            Some(run) => {
                format!("{}. It is run {run}'s: write it back by `ondeck run --resume {run}`", holds())
            }
            None => format!("{}. Write it back by `ondeck cache unmount {at}`", holds()),
        }));
    }
    if record.backing != plan.backing {
        return differs("is a cache of", record.backing.display().to_string());
    }
    // The groups of a user may have changed since.
    let who = |user: &Option<CacheUser>| user.as_ref().map(|user| (user.name.clone(), user.uid));
    if who(&record.user) != who(&plan.user) {
        let name = record.user.as_ref().map_or("root", |user| &user.name);
        return differs("belongs to", name.to_owned());
    }
    if plan.settings.capacity != record.settings.capacity {
        return differs("has a capacity of", record.settings.capacity.to_string());
    }
    check_settings(&plan.settings)?;
    // What can't be looked at has not been taken the place of: the kept mount still leads there.
    if let Ok(found) = rustix::fs::stat(&plan.backing)
        && (found.st_dev, found.st_ino) != record.backing_id
        && plan.backing != plan.mount_point
        && !matches!(plan.attach, Attach::Nowhere)
    {
        return Err(StartError::Refused(format!(
            "{}. {} is another directory by now: put the former one there again, or write back what it holds, to where the \
             former one is now, by `ondeck cache unmount {at}`",
            holds(),
            plan.backing.display()
        )));
    }
    if !instance.has_backing().map_err(StartError::io("look for", &instance.backing()))? {
        // Only the path is left to find it by.
        let backing = open_backing(plan)?;
        let stat = rustix::fs::fstat(&backing).map_err(io::Error::from);
        let stat = stat.map_err(StartError::io("look at", &plan.backing))?;
        if (stat.st_dev, stat.st_ino) != record.backing_id {
            return Err(StartError::Refused(format!(
                "{}. {} is another directory by now: put the former one there again",
                holds(),
                plan.backing.display()
            )));
        }
        kept::show(backing.as_fd(), &instance.backing())
            .map_err(StartError::io("mount again", &plan.backing))?;
    }
    Ok(())
}

/// Serves what is prepared.
fn assemble(
    plan: &Plan,
    instance: Instance,
    claim: Claim,
    mut record: Record,
) -> Result<Arc<Cache>, StartError> {
    let open = || StartError::io("open", &plan.backing);
    let backing = kept::work_through(&instance.backing(), record.read_only).map_err(open())?;
    // One that only writes back lets nobody in.
    if plan.attach != Attach::Nowhere {
        check_acls(plan, backing.as_fd())?;
    }
    let locked = kept::lock(&instance.store()).map_err(open())?;
    let Some(lock) = locked else {
        return Err(StartError::Refused(there_is_one(&plan.mount_point, Some(&record))));
    };
    let store = kept::work_through(&instance.store(), false);
    let store = store.map_err(StartError::io("open the store of the cache at", &plan.mount_point))?;
    let like = rustix::fs::fstatvfs(&backing).map_err(io::Error::from).map_err(open())?.f_flag;
    let options = MountOptions {
        source: instance.source(),
        uid: plan.user.as_ref().map_or(0, |user| user.uid),
        gid: plan.user.as_ref().map_or(0, |user| user.gid),
        others: plan.others,
        like,
    };
    let server = Server::connect(&options, threads(), plan.settings.writes).map_err(|error| {
        let remedy = if error.kind() == io::ErrorKind::NotFound { ": load the module fuse" } else { "" };
        StartError::Failed(format!("can't make a FUSE mount: {error}{remedy}"))
    })?;
    let mut settings = plan.settings.clone();
    if settings.passthrough {
        match try_passthrough(&server, &kept::path_through(&store)) {
            Ok(()) => {}
            Err(error) => {
                tracing::info!(%error, "the kernel can't read resident files by itself");
                settings.passthrough = false;
            }
        }
    }
    let user = plan.user.clone().map(Into::into);
    let owner = Owner::open(backing, &kept::path_through(&store), user, plan.others, settings.clone())
        .map_err(|error| {
            let at = plan.mount_point.display();
            let remedy = match error {
                // What is in the store is there still, and nobody else can say which file it belongs to.
                OpenError::Journal(_) | OpenError::Contradiction(..) => format!(
                    ". Nothing was changed: what {} has is still there, a file by the number of each; copy away what you need, or \
                     the whole of it for whoever can mend it. `ondeck cache unmount --force-lose {at}` gives up all that was \
                     not written back",
                    instance.store().display()
                ),
                _ => String::new(),
            };
            StartError::Failed(format!("can't open the cache at {at}: {error}{remedy}"))
        })?;
    let listener = listen(&instance).map_err(StartError::io("listen at", instance.socket()))?;
    record.settings = settings.clone();
    record.others = plan.others;
    record.user.clone_from(&plan.user);
    record.server = std::process::id();
    record.boot = boot().unwrap_or_default();
    record.journal = None;
    // Before anybody can use it.
    record.open = true;
    instance.keep(&record).map_err(StartError::io("write the record of the cache at", &plan.mount_point))?;
    let mount = match &plan.attach {
        Attach::Nowhere => None,
        Attach::Here => Some(attach(plan, &instance, &server)?),
        Attach::Inside(namespace) => Some(attach_inside(namespace, plan, &server)?),
    };
    let phase = if mount.is_some() { Phase::Mounted } else { Phase::WritingBack };
    Ok(Arc::new(Cache {
        plan: plan.clone(),
        instance,
        settings,
        owner,
        store: (store, lock),
        mount,
        serving: Mutex::new(Some((server, listener, claim))),
        record: Mutex::new(record),
        phase: Mutex::new(phase),
        changed: Condvar::new(),
        given_up: AtomicBool::new(false),
        orders: AtomicUsize::new(0),
        was_asked: AtomicBool::new(false),
    }))
}

/// As many as there are processors, within what was measured to help: requests wait for nothing but memory.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4)
}

fn try_passthrough(server: &Server, store: &Path) -> io::Result<()> {
    let path = store.join(".passthrough");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    fs::remove_file(&path)?;
    server.try_passthrough(&file)
}

fn listen(instance: &Instance) -> io::Result<UnixListener> {
    super::gone(fs::remove_file(instance.socket()))?;
    let listener = UnixListener::bind(instance.socket())?;
    // Who asks is looked at when they do.
    fs::set_permissions(instance.socket(), fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Shows the mount, in the place of one whose server is dead.
fn attach(plan: &Plan, instance: &Instance, server: &Server) -> Result<Mount, StartError> {
    let failed = || StartError::io("mount at", &plan.mount_point);
    take_away_dead(instance, &plan.mount_point)?;
    let at = open_mount_point(&plan.mount_point)?;
    let id = server.attach(at.as_fd()).map_err(failed())?;
    let mounted = mounts::mounted().map_err(failed())?;
    let mount = mounted.into_iter().find(|mount| mount.id == id);
    mount.ok_or_else(|| StartError::Failed(format!("{} was unmounted at once", plan.mount_point.display())))
}

/// Shows the mount to those who are in a mount namespace.
fn attach_inside(namespace: &Path, plan: &Plan, server: &Server) -> Result<Mount, StartError> {
    let at = &plan.mount_point;
    let failed = || StartError::io("mount for a run at", at);
    let work = || -> io::Result<Option<Mount>> {
        let namespace = File::open(namespace)?;
        // SAFETY: this thread alone gets a root and a working directory of its own, which it needs to join, and it uses
        // neither of the former ones any more.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
        let place = mounts::open_plainly(at)?;
        let id = server.attach(place.as_fd())?;
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        Ok(mounts::mounted_of(thread)?.into_iter().find(|mount| mount.id == id))
    };
    // A thread for that alone, because the others stay where they are. It keeps nothing of the namespace, which goes with its
    // last process.
    let mount = std::thread::scope(|scope| scope.spawn(work).join());
    let mount = mount.unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))).map_err(failed())?;
    mount.ok_or_else(|| StartError::Failed(format!("{} was unmounted at once", at.display())))
}

/// Where its life is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Mounted,
    WritingBack,
    /// Why.
    Stuck(String),
    Ended,
}

/// A cache, while its server lives.
struct Cache {
    plan: Plan,
    instance: Instance,
    /// As they are in force.
    settings: Settings,
    owner: Arc<Owner>,
    /// What the owner works through, and what keeps others from it.
    store: (OwnedFd, File),
    /// Where it is, or was, mounted.
    mount: Option<Mount>,
    /// What the life begins with.
    serving: Mutex<Option<(Server, UnixListener, Claim)>>,
    record: Mutex<Record>,
    phase: Mutex<Phase>,
    changed: Condvar,
    /// Its user has given up what is not written back.
    given_up: AtomicBool,
    /// Orders that are being carried out.
    orders: AtomicUsize,
    /// Somebody has ordered its end.
    was_asked: AtomicBool,
}

impl Cache {
    fn live(self: Arc<Self>, signals: EndSignals) {
        let Some((server, listener, claim)) = lock(&self.serving).take() else { return };
        for (name, work) in [
            (
                "orders",
                Box::new(move |cache: Arc<Cache>| cache.listen(&listener)) as Box<dyn FnOnce(_) + Send>,
            ),
            ("record", Box::new(|cache: Arc<Cache>| cache.keep_record())),
            ("signals", Box::new(move |cache: Arc<Cache>| cache.obey_signals(signals))),
        ] {
            let cache = Arc::clone(&self);
            if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(move || work(cache)) {
                tracing::error!(%error, "no thread for {name}");
            }
        }
        if self.mount.is_some() {
            let service: Arc<dyn Service> = Arc::clone(&self.owner) as _;
            let served = server.serve(service).and_then(|thread| {
                thread.join().unwrap_or_else(|_| Err(io::Error::other("a worker panicked")))
            });
            match served {
                Ok(()) => tracing::info!("unmounted"),
                Err(error) => tracing::error!(%error, "can't serve any more"),
            }
            // It still is there if its connection was aborted, and shows nothing but errors.
            self.take_away_lazily();
        }
        self.write_back();
        if self.mount.is_none() {
            self.wait_until_asked();
        }
        if self.is_given_up() {
            self.owner.abandon(PATIENCE);
        } else {
            self.owner.stop();
        }
        if self.mount.is_none()
            && let Err(error) = take_away_dead(&self.instance, &self.plan.mount_point)
        {
            // What it shows instead, errors, were right until everything was written back.
            tracing::warn!("{error}");
        }
        self.note_end();
        // What an earlier one has lost, and nobody was told, is for the next one to tell.
        let is_told = lock(&self.record).lost_before.is_none();
        let removed = if is_told { self.instance.remove(&claim) } else { self.instance.clear(&claim) };
        if let Err(error) = removed {
            tracing::error!(%error, "something is left of the cache");
        }
        self.enter(Phase::Ended);
        // Who has asked for this is told.
        let until = Instant::now() + Duration::from_secs(2);
        while self.orders.load(Ordering::Acquire) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits a moment for whoever has started this server only to write back, and asks for its end next: they are told what came of it.
    fn wait_until_asked(&self) {
        let until = Instant::now() + ASKED;
        let mut phase = lock(&self.phase);
        while !self.was_asked.load(Ordering::Acquire) && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            phase = self.changed.wait_timeout(phase, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Writes back until nothing is left, or it is given up.
    fn write_back(&self) {
        loop {
            self.enter(Phase::WritingBack);
            let flushed = self.owner.flush(&mut |_| !self.is_given_up());
            let why = match flushed {
                Ok(()) => return,
                Err(_) if self.is_given_up() => {
                    tracing::warn!("what was not written back is given up");
                    return;
                }
                Err(why) => why,
            };
            tracing::error!("not everything can be written back: {why}");
            let mut phase = lock(&self.phase);
            *phase = Phase::Stuck(why);
            self.changed.notify_all();
            // An order to try again, or to give up, changes the phase.
            let until = Instant::now() + RETRY;
            while matches!(*phase, Phase::Stuck(_)) && Instant::now() < until {
                let left = until.saturating_duration_since(Instant::now());
                phase =
                    self.changed.wait_timeout(phase, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            }
        }
    }

    fn enter(&self, phase: Phase) {
        *lock(&self.phase) = phase;
        self.changed.notify_all();
    }

    fn phase(&self) -> Phase {
        lock(&self.phase).clone()
    }

    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    fn uid(&self) -> u32 {
        self.plan.user.as_ref().map_or(0, |user| user.uid)
    }

    fn take_away_lazily(&self) {
        if let Some(mount) = self.mount_now()
            && let Err(error) = mounts::take_away(&mount, true)
        {
            tracing::error!(%error, "can't unmount {}", mount.at.display());
        }
    }

    /// Notes that whoever has started this was told what was lost before.
    fn note_told(&self) {
        let mut record = lock(&self.record);
        if record.lost_before.take().is_some()
            && let Err(error) = self.instance.keep(&record)
        {
            tracing::warn!(%error, "what was lost before is told once more by the next mount");
        }
    }

    /// Notes that nothing is lost from now on, whatever becomes of the rest.
    fn note_end(&self) {
        let mut record = lock(&self.record);
        (record.open, record.unwritten) = (false, 0);
        if let Err(error) = self.instance.keep(&record) {
            tracing::warn!(%error, "can't keep the record of the cache");
        }
    }

    /// Keeps in the record whether the cache holds what nobody else has.
    fn keep_record(&self) {
        while self.phase() != Phase::Ended {
            let status = self.owner.status();
            let unwritten = status.dirty + status.pending_operations + status.dirty_attributes;
            {
                let mut record = lock(&self.record);
                let journal = self.journal();
                let has_grown = unwritten != 0 && record.journal != journal;
                if record.open && ((record.unwritten == 0) != (unwritten == 0) || has_grown) {
                    (record.unwritten, record.journal) = (unwritten, journal);
                    if let Err(error) = self.instance.keep(&record) {
                        tracing::warn!(%error, "can't keep the record of the cache");
                    }
                }
            }
            let phase = lock(&self.phase);
            if *phase != Phase::Ended {
                drop(self.changed.wait_timeout(phase, RECORD));
            }
        }
    }

    /// Whoever has started this was ended meanwhile, by a signal, and has told nobody that there is a cache: there is none then. What
    /// an earlier server has left is written back, as ever.
    fn end_unasked(self: &Arc<Self>) {
        let cache = Arc::clone(self);
        let ended = std::thread::Builder::new().name("end".to_owned()).spawn(move || {
            tracing::info!("unmounting, because whoever mounted it does not wait any more");
            if let Answer::Failed { message, .. } = cache.unmount(false, &mut |_| true) {
                tracing::warn!("{message}");
            }
        });
        if let Err(error) = ended {
            tracing::error!(%error, "no thread to unmount the cache");
        }
    }

    /// Its mount, by the path that it has now: a directory above it may have been renamed.
    fn mount_now(&self) -> Option<Mount> {
        let mount = self.mount.as_ref()?;
        let all = mounts::mounted().unwrap_or_default();
        Some(all.into_iter().find(|found| found.id == mount.id).unwrap_or_else(|| mount.clone()))
    }

    /// The machine is shut down, or somebody wants this process to end: what is dirty is written back.
    fn obey_signals(self: Arc<Self>, signals: EndSignals) {
        loop {
            let signal = signals.wait();
            tracing::info!(signal, "unmounting, because of a signal");
            let outcome = self.unmount(false, &mut |_| true);
            if let Answer::Failed { message, .. } = outcome {
                tracing::warn!("{message}");
            }
        }
    }

    /// The inode and the length of its journal, if that can be seen.
    fn journal(&self) -> Option<(u64, u64)> {
        let found =
            rustix::fs::statat(&self.store.0, c"journal", rustix::fs::AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some((found.st_ino, found.st_size as u64))
    }

    fn scratch(&self) -> PathBuf {
        self.instance.dir.join("fusectl")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each is whole after every single statement that changes it.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
