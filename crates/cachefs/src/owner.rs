//! The owner of a cache.
//!
//! It answers the requests of [`message`](crate::message) from RAM, and brings what was changed to the backing directory.
//!
//! # Layout
//!
//! - `state`: what it knows; `inode`: of a file or directory; `blocks`: of the blocks of an extent
//! - `names`, `data`, `handles`, `holes`: what requests do with it; `xattrs`, `accepted`: extended attributes; `forget`: names that take
//!   too much
//! - `unasked`: files that the kernel writes to by itself
//! - `wait`: requests that can't be answered yet; `load`: what is read for them; `closed`: what a mode keeps the user out of
//! - `write_back`: data and attributes on their way to the backing directory; `narrow`: rights that are gone there before; `apply`:
//!   names, `turns`: in which order, `applied`: what is known after; `conflicts`: what others have done; `doubt`: what a killed process may have done of that
//! - `orders`: what people want of it
//! - `journal`, `notes`, `recover`: how a cache goes on after its process was killed
//!
//! # Why it can't stand still
//!
//! One lock guards the state; nobody touches the backing directory while holding it, and the store only to free memory or to cut
//! a file. A request that needs something is parked without anything held, so requests never wait for each other, but for those that read from
//! the store or write to it at that moment, who wait for nobody. Loaders,
//! writers and the applier are threads of their own: a loader needs nobody; a writer reads from the store and writes to the
//! backing directory; the applier needs writers' work, which it can do itself. Memory that requests wait for comes from clean
//! extents, which nobody has to be asked for, and dirty ones become clean by writers, which need no room: files without a name
//! are written back, too, and at most half of the capacity is pinned. The process is marked as one that others' memory depends on
//! (`PR_SET_IO_FLUSHER`), so it does not wait for memory that only its own write-back frees. If the backing directory itself
//! has no room, waiting writers are told so.

mod accepted;
mod applied;
mod apply;
mod blocks;
mod carry;
mod changes;
mod closed;
mod conflicts;
mod data;
mod doubt;
mod forget;
mod gains;
mod handles;
mod holes;
mod inode;
mod inodes;
mod journal;
mod load;
mod names;
mod narrow;
mod notes;
mod orders;
mod pass;
mod projects;
mod recover;
mod restore;
mod state;
mod synced;
mod turns;
mod unasked;
mod unfinished;
mod wait;
mod write_back;
mod xattrs;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ondeck_transfer::credentials::User;
use rustix::io::Errno;

use crate::backing::Backing;
use crate::message::{Answer, Caller, Client, Ino, Reply, Request, Service};
use crate::settings::{EXTENT, LEAST_CAPACITY, Settings, SyncWhen};
use crate::status::{Failing, MOST_FAILING, Status};
use crate::store::Store;
use gains::WriteBack;
use journal::{Journal, JournalError};
use state::{State, Stop};
use wait::{Need, Parked, Target};

/// How often it is looked whether those who wait were killed, and whether anything has become old.
const LOOK: Duration = Duration::from_millis(100);

/// The space of the backing directory is asked for again after so long.
const SPACE_IS_KNOWN: Duration = Duration::from_secs(1);

/// After a failure the log is tried again after so long.
const RETRY: Duration = Duration::from_secs(1);

/// A cache's names, data, journal and write-back.
pub struct Owner {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the threads of an owner share.
struct Core {
    state: Mutex<State>,
    store: Store,
    backing: Backing,
    /// There is something to be read.
    loads: Condvar,
    /// Something has changed that writers, the applier or a flush may wait for.
    work: Condvar,
    /// Names take too much, or it is the end.
    forgetting: Condvar,
    client: Mutex<Option<Weak<dyn Client>>>,
}

/// What a thread does until the end.
type Work = fn(&Core);

/// Why a cache can't be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum OpenError {
    /// A capacity with which nothing could pass.
    #[error("a cache needs a capacity of at least {LEAST_CAPACITY}")]
    TooSmall,
    /// The store's.
    #[error("can't open the cache's store: {0}")]
    Store(io::Error),
    /// The backing directory's.
    #[error("can't read the backing directory: {0}")]
    Backing(Errno),
    /// The user's identity can't be taken on, or there are no more threads.
    #[error("can't start the cache's threads: {0}")]
    Threads(io::Error),
    /// What an earlier process left can't be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// It can be read, and does not fit together.
    #[error("the cache's journal contradicts itself at record {0}: {1}")]
    Contradiction(usize, String),
    /// Data that the backing directory lacks was removed from the store.
    #[error(
        "the store lacks the data of {path} (inode {ino}), which was not written back: somebody has removed it. Nothing was \
         changed; `ondeck cache unmount --force-lose` gives up all that was not written back"
    )]
    Missing {
        /// Where it is in the cache.
        path: String,
        /// Its number, which its file in the store is named by, in hexadecimal digits.
        ino: Ino,
    },
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who has references, if anybody.
    fn client(&self) -> Option<Arc<dyn Client>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.upgrade()
    }

    fn wake_threads(&self) {
        self.loads.notify_all();
        self.work.notify_all();
        self.forgetting.notify_all();
    }

    /// Waits for a change, or a moment.
    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.work.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Tries everybody again whose need was fulfilled, and wakes the threads.
    fn wake_all(&self) {
        self.work.notify_all();
        loop {
            let (ready, failed) = {
                let mut state = self.lock();
                if !state.waits.has_ready() {
                    break;
                }
                state.waits.take()
            };
            for (parked, error) in failed {
                (parked.answer)(Err(error));
            }
            for parked in ready {
                self.attempt(parked.caller, parked.request, parked.answer, parked.since, parked.target, true);
            }
        }
    }

    /// Carries a request out, or parks it.
    fn attempt(
        &self,
        caller: Caller,
        request: Request<'_>,
        answer: Answer,
        since: Instant,
        mut target: Option<Target>,
        again: bool,
    ) {
        loop {
            let wakes = self.lock().waits.wakes();
            let need = match self.perform(caller, &request, &mut target, again) {
                Ok(reply) => return answer(Ok(reply)),
                Err(Stop::Error(error)) => return answer(Err(error)),
                Err(Stop::Wait(need)) => need,
            };
            let mut state = self.lock();
            if state.stopped {
                drop(state);
                return answer(Err(Errno::IO));
            }
            if need.is_loaded() {
                if state.waits.begin(&need) {
                    state.begin_loading(&need);
                    state.jobs.push_back(need.clone());
                }
            } else if state.waits.wakes()[need.kind()] != wakes[need.kind()] {
                // Fulfilled in between, maybe.
                continue;
            }
            if !again && matches!(need, Need::Space | Need::Log) {
                state.counters.delayed += 1;
            }
            let request = request.into_owned();
            state.waits.park(need, Parked { caller, request, answer, since, target });
            drop(state);
            self.loads.notify_all();
            self.work.notify_all();
            return;
        }
    }

    fn perform(
        &self,
        caller: Caller,
        request: &Request<'_>,
        target: &mut Option<Target>,
        again: bool,
    ) -> Result<Reply, Stop> {
        let store = &self.store;
        match request {
            Request::Read { ino, offset, size, .. } => return self.read(*ino, *offset, *size, again),
            Request::Write { ino, offset, data, .. } => {
                self.check_journal()?;
                let reply = self.write(caller, *ino, *offset, data)?;
                self.check_journal()?;
                return Ok(reply);
            }
            Request::CopyRange { from, from_offset, to, to_offset, length, .. } => {
                self.check_journal()?;
                let size = (*length).min(EXTENT) as u32;
                let Reply::Data(data) = self.read(*from, *from_offset, size, again)? else {
                    return Err(Errno::IO.into());
                };
                let reply = self.write(caller, *to, *to_offset, &data)?;
                self.check_journal()?;
                return Ok(reply);
            }
            Request::Allocate { ino, offset, length, mode, .. } => {
                return self.allocate(caller, *ino, *offset, *length, *mode);
            }
            Request::Seek { ino, offset, hole, .. } => return self.seek(*ino, *offset, *hole),
            _ => {}
        }
        let mut state = self.lock();
        let state = &mut *state;
        if changes(request) && state.journal.failed.is_some() {
            return Err(Errno::IO.into());
        }
        let entry = |state: &mut State, ino: Ino| -> Result<Reply, Stop> {
            state.inode_mut(ino)?.references += 1;
            state.look(store, ino);
            Ok(Reply::Entry(state.attributes(ino)?))
        };
        match request {
            Request::Lookup { parent, name } => {
                let ino = state.lookup(*parent, name)?;
                state.look(store, ino);
                Ok(Reply::Entry(state.attributes(ino)?))
            }
            Request::Attributes { ino } => {
                state.look(store, *ino);
                Ok(Reply::Attributes(state.attributes(*ino)?))
            }
            Request::Change { ino, change } => {
                if let Some(size) = change.size {
                    state.truncate(store, caller, *ino, size)?;
                }
                let rest = crate::message::Change { size: None, ..*change };
                if change.size.is_none() || rest != crate::message::Change::default() {
                    state.look(store, *ino);
                    state.change(caller, *ino, &rest)?;
                    state.tell_time(store, *ino);
                }
                Ok(Reply::Attributes(state.attributes(*ino)?))
            }
            Request::ReadLink { ino } => Ok(Reply::Data(state.read_link(*ino)?.into_encoded_bytes())),
            Request::Make { parent, name, new, mode, umask, open } => {
                let ino = state.make(caller, *parent, name, new, *mode, *umask)?;
                match open {
                    None => entry(state, ino),
                    Some(mode) => {
                        let opened = state.open(store, caller, ino, *mode)?;
                        state.inode_mut(ino)?.references += 1;
                        Ok(Reply::Created(state.attributes(ino)?, opened))
                    }
                }
            }
            Request::Link { ino, parent, name } => {
                state.link(*ino, *parent, name)?;
                entry(state, *ino)
            }
            Request::Unlink { parent, name } => {
                state.unlink(store, *parent, name, false).map(|()| Reply::Done)
            }
            Request::RemoveDirectory { parent, name } => {
                state.unlink(store, *parent, name, true).map(|()| Reply::Done)
            }
            Request::Rename { parent, name, to_parent, to_name, replace } => {
                state.rename(store, (*parent, name), (*to_parent, to_name), *replace).map(|()| Reply::Done)
            }
            Request::Open { ino, mode } => state.open(store, caller, *ino, *mode).map(Reply::Opened),
            Request::Release { handle, .. } => {
                state.release(store, *handle);
                Ok(Reply::Done)
            }
            Request::Close { ino, handle } => {
                let writes = state.handles.get(handle).is_some_and(|open| open.write);
                if writes {
                    state.error_of(*ino)?;
                }
                if writes && state.settings.sync == SyncWhen::Close {
                    state.synced(*ino, target)?;
                }
                Ok(Reply::Done)
            }
            Request::Sync { ino, .. } => {
                state.error_of(*ino)?;
                if state.settings.sync != SyncWhen::Later {
                    state.synced(*ino, target)?;
                }
                Ok(Reply::Done)
            }
            Request::List { ino } => Ok(Reply::Listed(Arc::new(state.list(*ino)?))),
            Request::Entries { ino, names } => state.lookups(*ino, names).map(Reply::Entries),
            Request::GetXattr { ino, name } => {
                if state.is_without(name) {
                    return Err(Errno::OPNOTSUPP.into());
                }
                let value = state.xattrs(*ino)?.get(name.as_os_str()).cloned();
                value.map(Reply::Data).ok_or(Stop::Error(Errno::NODATA))
            }
            Request::ListXattrs { ino } => state.list_xattrs(caller, *ino).map(Reply::Data),
            Request::SetXattr { ino, name, value, flags } => {
                state.set_xattr(caller, *ino, name, value, *flags).map(|()| Reply::Done)
            }
            Request::RemoveXattr { ino, name } => state.remove_xattr(*ino, name).map(|()| Reply::Done),
            Request::Space => match &state.space {
                Some((space, at)) if at.elapsed() < SPACE_IS_KNOWN => Ok(Reply::Space(*space)),
                _ => Err(Stop::Wait(Need::Statistics)),
            },
            Request::Read { .. }
            | Request::Write { .. }
            | Request::CopyRange { .. }
            | Request::Allocate { .. }
            | Request::Seek { .. } => Err(Errno::NOSYS.into()),
        }
    }

    fn check_journal(&self) -> Result<(), Stop> {
        if self.lock().journal.failed.is_some() { Err(Errno::IO.into()) } else { Ok(()) }
    }

    /// Reads what is asked for until the end.
    fn run_loader(&self) {
        loop {
            let need = {
                let mut state = self.lock();
                loop {
                    if state.stopped {
                        return;
                    }
                    if let Some(need) = state.jobs.pop_front() {
                        break need;
                    }
                    state = self.loads.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            self.load(&need);
            self.lock().end_loading(&need);
            self.wake_all();
        }
    }

    /// Writes back what has to be, until the end.
    fn run_writer(&self) {
        loop {
            let work = {
                let mut state = self.lock();
                loop {
                    if state.stopped {
                        return;
                    }
                    // At once: another thread would choose it, too, and write it again as soon as this has ended.
                    if let Some(work) = state.next_pass().and_then(|ino| state.begin_work(ino, &self.store)) {
                        break work;
                    }
                    state = self.wait(state);
                }
            };
            match work {
                // It is noted, and tried again.
                WriteBack::Pass(pass) => drop(self.bring(*pass)),
                WriteBack::Open(ino, below) => {
                    let brought = self.bring_below(ino, &below);
                    self.lock().end_opening(ino, brought);
                    self.wake_all();
                }
            }
        }
    }

    /// Carries out the log, until the end.
    fn run_applier(&self) {
        loop {
            let done = self.apply_some();
            self.sync_changes();
            match done {
                Ok(true) => {}
                Ok(false) => {
                    let state = self.lock();
                    if state.stopped {
                        return;
                    }
                    // What is stuck is due, and its time comes.
                    let is_due = state.due() >= state.first_pending && state.stuck.is_empty();
                    if !is_due && !state.changes.are_wanted() {
                        drop(self.wait(state));
                    }
                }
                Err((ino, error)) => {
                    let mut state = self.lock();
                    if state.stopped {
                        return;
                    }
                    if error != Errno::AGAIN {
                        state.failed(ino, error);
                        drop(state);
                        self.wake_all();
                        let until = Instant::now() + RETRY;
                        let mut state = self.lock();
                        while Instant::now() < until && !state.stopped {
                            state = self.wait(state);
                        }
                    }
                }
            }
        }
    }

    /// Looks after those who wait, and evicts before anybody has to wait for it, until the end.
    fn run_keeper(&self) {
        loop {
            let threads = {
                let mut state = self.lock();
                if state.stopped {
                    return;
                }
                let percent = |part: u8| state.settings.capacity.0 / 100 * u64::from(part);
                let (high, low) = (percent(state.settings.full.high), percent(state.settings.full.low));
                if state.resident + state.names_and_operations() > high {
                    let low = low.saturating_sub(state.names_and_operations());
                    state.evict_to(&self.store, low);
                }
                for ino in state.unasked.clone() {
                    state.look(&self.store, ino);
                }
                state.waits.threads()
            };
            let doomed: HashSet<u32> = wait::doomed(&threads);
            let mut state = self.lock();
            // First: who is tried again in this moment is not among those who wait.
            state.waits.killed(&doomed);
            // Requests that end make room, too, when they let go of what they used, and wake nobody.
            if state.waits.is_waited_for(&Need::Space) {
                state.waits.wake(&Need::Space);
            }
            state.waits.wake_for_releases();
            drop(state);
            self.wake_all();
            std::thread::sleep(LOOK);
        }
    }
}

impl State {
    fn is_without(&self, xattr: &OsStr) -> bool {
        let is_acl = xattr == crate::acl::ACCESS || xattr == crate::acl::DEFAULT;
        if is_acl { !self.keeps_acls } else { !self.keeps_xattrs }
    }
}

/// Whether a request changes anything.
fn changes(request: &Request<'_>) -> bool {
    matches!(
        request,
        Request::Change { .. }
            | Request::Make { .. }
            | Request::Link { .. }
            | Request::Unlink { .. }
            | Request::RemoveDirectory { .. }
            | Request::Rename { .. }
            | Request::SetXattr { .. }
            | Request::RemoveXattr { .. }
    )
}

/// Ends the process if there is a defect: a cache of which a part stands still would keep programs waiting for ever, and what
/// is in the store can be recovered.
fn or_end(work: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
        tracing::error!(
            "a defect in the cache; its server ends, and what it holds is recovered when it is mounted again"
        );
        std::process::abort();
    }
}

impl Owner {
    /// Opens a cache, and goes on with what an earlier process has left in its store.
    ///
    /// `backing` is the directory, opened before anything was mounted over it; `store` the root of the store's filesystem. `user`
    /// is by whose rights the backing directory is reached; `None`: by those of this process, and with `others` for all users: then
    /// their quotas count.
    ///
    /// # Errors
    /// Nothing was changed then, neither in the store nor in the backing directory.
    pub fn open(
        backing: OwnedFd,
        store: &Path,
        user: Option<User>,
        others: bool,
        settings: Settings,
    ) -> Result<Arc<Owner>, OpenError> {
        if settings.capacity < LEAST_CAPACITY {
            return Err(OpenError::TooSmall);
        }
        let ids = user.as_ref().map(|user| (user.uid, user.gid));
        let backing = Backing::new(backing, user, others);
        let store = Store::open(store, ids).map_err(OpenError::Store)?;
        let records = Journal::read(&store)?;
        // With the user's identity, as all that is to come.
        let looked = std::thread::scope(|scope| {
            let look = || -> Result<_, OpenError> {
                backing.assume().map_err(OpenError::Threads)?;
                let root =
                    crate::backing::stat(backing.root(), OsStr::new("")).map_err(OpenError::Backing)?;
                Ok((root, backing.keeps().map_err(OpenError::Backing)?))
            };
            scope.spawn(look).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        let (root, keeps) = looked?;
        let is_recovered = records.is_some();
        let state = recover::state(&store, &root, keeps, settings, records.unwrap_or_default())?;
        let core = Arc::new(Core {
            state: Mutex::new(state),
            store,
            backing,
            loads: Condvar::new(),
            work: Condvar::new(),
            forgetting: Condvar::new(),
            client: Mutex::new(None),
        });
        let owner = Arc::new(Owner { core, threads: Mutex::default() });
        if is_recovered {
            let settle = |core: &Core| {
                core.settle_doubt()?;
                core.remove_half_made();
                Ok(())
            };
            owner.as_the_user(settle).map_err(OpenError::Backing)?;
        }
        owner.start().inspect_err(|_| owner.stop()).map_err(OpenError::Threads)?;
        Ok(owner)
    }

    fn start(&self) -> io::Result<()> {
        let count = self.core.lock().settings.threads.max(1);
        let mut work: Vec<(String, Work)> = vec![("applier".into(), Core::run_applier)];
        for number in 0..count {
            work.push((format!("loader-{number}"), Core::run_loader));
            work.push((format!("writer-{number}"), Core::run_writer));
        }
        let (tell, told) = channel();
        for (name, run) in work {
            let (core, tell) = (Arc::clone(&self.core), tell.clone());
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                let assumed = core.backing.assume();
                let can = assumed.is_ok();
                // Whoever waits for it is there, or has failed already.
                let _ = tell.send(assumed);
                drop(tell);
                if can {
                    or_end(|| run(&core));
                }
            })?;
            self.threads().push(thread);
        }
        drop(tell);
        for assumed in told {
            assumed?;
        }
        let others: [(&str, Work); 2] = [("keeper", Core::run_keeper), ("forgetter", Core::run_forgetter)];
        for (name, run) in others {
            let core = Arc::clone(&self.core);
            let thread =
                std::thread::Builder::new().name(name.into()).spawn(move || or_end(|| run(&core)))?;
            self.threads().push(thread);
        }
        Ok(())
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all threads. Nothing is written back, and what waits is answered with an error; the store keeps everything.
    pub fn stop(&self) {
        self.core.lock().stopped = true;
        self.core.wake_threads();
        for thread in self.threads().drain(..) {
            // A thread that has panicked has said so.
            let _ = thread.join();
        }
        let mut state = self.core.lock();
        state.waits.fail_all(Errno::IO);
        drop(state);
        self.core.wake_all();
    }

    /// The same, for whoever gives up what the backing directory lacks, and does not wait for one that hangs: after `patience` the memory
    /// of all data is given back, and nothing of what is still under way reaches the backing directory any more, but for what is
    /// with the kernel already.
    pub fn abandon(&self, patience: Duration) {
        self.core.lock().stopped = true;
        self.core.wake_threads();
        let until = Instant::now() + patience;
        let all_ended = || self.threads().iter().all(JoinHandle::is_finished);
        while !all_ended() && Instant::now() < until {
            // Nothing tells the end of a thread to whoever does not want to wait for it for ever.
            std::thread::sleep(LOOK / 10);
        }
        if !all_ended() {
            tracing::warn!("the backing directory hangs; its memory is given back without waiting for that");
            self.threads().clear();
            if let Err(error) = self.core.store.discard() {
                tracing::error!(%error, "can't give back all memory of the store");
            }
        }
        self.stop();
    }

    /// What can be seen of the cache.
    pub fn status(&self) -> Status {
        let state = self.core.lock();
        let (delayed, waiting) = state.waits.count();
        let now = Instant::now();
        let oldest_data = state.dirty_by_age.front().map(|(_, dirty)| dirty.since);
        let oldest_name = state.log.front().map(|pending| pending.since);
        let oldest = oldest_data.into_iter().chain(oldest_name).min();
        let passes = state.passes.iter().map(|(ino, pass)| (*ino, pass.began));
        let under_way = passes.chain(state.applying).min_by_key(|(_, began)| *began);
        let under_way = under_way.map(|(ino, began)| (ino, now.duration_since(began)));
        let failing = |(ino, (error, _)): (&Ino, &(Errno, Instant))| Failing {
            path: state.shown(*ino),
            error: io::Error::from(*error).to_string(),
        };
        Status {
            capacity: state.settings.capacity.0,
            resident: state.resident,
            dirty: state.dirty_bytes,
            dirty_age_ms: oldest.map_or(0, |since| now.duration_since(since).as_millis() as u64),
            pending_operations: state.log.iter().filter(|pending| !pending.cancelled).count() as u64,
            dirty_attributes: state.dirty_by_age.len() as u64,
            pinned: state.pinned,
            names: state.inodes.len() as u64,
            name_bytes: state.name_bytes,
            most_name_bytes: state.settings.names.0,
            forgotten: state.counters.forgotten,
            open_files: state.handles.len() as u64,
            delayed: delayed as u64,
            waiting: waiting as u64,
            read_bytes: state.counters.read_bytes,
            written_bytes: state.counters.written_bytes,
            hit_bytes: state.counters.hit_bytes,
            miss_bytes: state.counters.miss_bytes,
            fetched_bytes: state.counters.fetched_bytes,
            written_back_bytes: state.counters.written_back_bytes,
            evictions: state.counters.evictions,
            delayed_total: state.counters.delayed,
            failures: state.counters.failures,
            failing: state.failing.iter().take(MOST_FAILING).map(failing).collect(),
            failing_count: state.failing.len() as u64,
            under_way_ms: under_way.map_or(0, |(_, lasts)| lasts.as_millis() as u64),
            under_way: under_way.map(|(ino, _)| state.shown(ino)).unwrap_or_default(),
            conflicts: state.conflicts.clone(),
        }
    }

    /// Does something with the user's identity, on a thread of its own.
    fn as_the_user<T: Send>(&self, act: impl FnOnce(&Core) -> Result<T, Errno> + Send) -> Result<T, Errno> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.core
                    .backing
                    .assume()
                    .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::PERM))?;
                act(&self.core)
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Tries again whom a request has made room or way for.
    fn wake_the_ready(&self) {
        if self.core.lock().waits.has_ready() {
            self.core.wake_all();
        }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// As the request's.
    pub fn call(&self, caller: Caller, request: Request<'_>) -> Result<Reply, Errno> {
        let (tell, told) = channel();
        // Whoever waits is there.
        self.ask(caller, request, Box::new(move |answer| drop(tell.send(answer))));
        told.recv().unwrap_or(Err(Errno::IO))
    }
}

/// Who asks for what nobody waits for.
const NOBODY: Caller = Caller { uid: 0, gid: 0, thread: 0, outsider: false };

impl Service for Owner {
    fn ask(&self, caller: Caller, request: Request<'_>, answer: Answer) {
        self.core.attempt(caller, request, answer, Instant::now(), None, false);
        self.wake_the_ready();
        let state = self.core.lock();
        if !state.jobs.is_empty() {
            drop(state);
            self.core.loads.notify_one();
        }
    }

    fn attach(&self, client: Weak<dyn Client>) {
        *self.core.client.lock().unwrap_or_else(PoisonError::into_inner) = Some(client);
    }

    fn forget(&self, references: &[(Ino, u64)]) {
        self.core.lock().forget(&self.core.store, references);
        self.wake_the_ready();
    }

    fn read_resident(&self, ino: Ino, offset: u64, into: &mut [u8]) -> Option<usize> {
        let read = self.core.read_resident(ino, offset, into);
        let (has_jobs, has_ready) = {
            let state = self.core.lock();
            (!state.jobs.is_empty(), state.waits.has_ready())
        };
        if has_jobs {
            self.core.loads.notify_one();
        }
        if has_ready {
            self.core.wake_all();
        }
        read
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.stop();
    }
}
