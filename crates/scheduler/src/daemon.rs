//! The middle of the daemon: one event after the other, kept before anything is done about it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, TryLockError};
use std::time::{Duration, Instant};

use ondeck_agent::fleet::Fleet;
use ondeck_agent::node::{StartError, host_name, own_address};
use ondeck_api::Config;
use ondeck_api::auth::Administrators;
use ondeck_api::munge::Munge;
use ondeck_api::reload::{self, HangUps, ReadAgain, Reloaded};
use ondeck_api::scheduler::Transfer;
use ondeck_api::server::{ListenError, Listening, Server};
use ondeck_core::schedule::{Action, Effects, Event, Identity, Job, Node, Nodes, Refused, Schedule, Time};
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Epoch, Incarnation, JobId, NodeName};
use ondeck_wlm::{Slurm, SlurmSettings};
use tokio::sync::{Notify, watch};

use crate::charge::{self, Charge, Conflict, NothingToTakeOver};
pub(crate) use crate::clock::now;
use crate::clock::{self, KeptClock};
use crate::compute::{self, ComputeNodes};
use crate::queue::Queue;
use crate::store::{Store, StoreError};
use crate::{execute, fleet, parts, queue};

/// Connections that are held at the same time on each socket; a Prolog holds one while its job's RAM disk is mounted.
const CONNECTIONS: usize = 8192;

/// How long is waited before the journal is tried again after it could not be written.
const JOURNAL_PAUSE: Duration = Duration::from_secs(1);

/// How long a daemon that is to end goes on trying.
const LAST_TRIES: Duration = Duration::from_secs(3);

/// Why a node that only old jobs use lends nothing.
const NOT_CONFIGURED: &str = "it is no longer in the configuration";

/// Why the daemon ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The configuration makes no sense.
    #[error("the configuration: {0}")]
    Config(String),
    /// The journal.
    #[error("{}{}", .0, .0.remedy())]
    Store(#[from] StoreError),
    /// This host.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The agents obey somebody else, or have seen a later state of the journal.
    #[error("{0}")]
    NotInCharge(Box<Conflict>),
    /// There is nobody whose place could be taken.
    #[error("{0}")]
    NothingToTakeOver(NothingToTakeOver),
    /// Nobody has confirmed the take-over.
    #[error("nothing was changed")]
    NotConfirmed,
    /// A socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The runtime.
    #[error("{0}")]
    Runtime(#[from] std::io::Error),
}

/// What is decided on, and where it is kept.
pub(crate) struct Brain {
    pub schedule: Schedule,
    pub store: Store,
}

/// The daemon.
pub(crate) struct Daemon {
    /// Exchanged as a whole when the configuration is read again.
    config: RwLock<Arc<Config>>,
    pub name: NodeName,
    pub fleet: Fleet,
    pub charge: Arc<Charge>,
    /// The RSA nodes whose agents do not obey, and why.
    refusing: Mutex<BTreeMap<NodeName, String>>,
    /// The cluster whose jobs these are, as the workload manager calls it, once it has said so.
    pub cluster: OnceLock<String>,
    pub workload_manager: Slurm,
    pub queue: Queue,
    pub transfers: Mutex<BTreeMap<Incarnation, Transfer>>,
    /// What the workload manager is to be told of each job, in order.
    orders: Mutex<BTreeMap<JobId, VecDeque<(Incarnation, Action)>>>,
    /// Who takes a RAM disk away: from one node each, or from all nodes alone.
    unmounts: Mutex<BTreeMap<Incarnation, Arc<tokio::sync::RwLock<()>>>>,
    pub compute: ComputeNodes,
    brain: Mutex<Brain>,
    /// Why the journal can't be written, while it can't. Whoever asks meanwhile must not wait for the brain.
    journal_fault: Mutex<Option<String>>,
    /// Counts events, so that whoever waits for a state looks again.
    changed: watch::Sender<u64>,
    /// A time to wait for may have come nearer.
    earlier: Notify,
}

impl Daemon {
    /// Has the agents of some nodes obey, unless they do; nothing may be ordered before. Returns those that do not.
    pub async fn take_charge(
        &self,
        nodes: impl IntoIterator<Item = &NodeName>,
    ) -> BTreeMap<NodeName, String> {
        if self.config().scheduler.simulate.is_some() {
            return BTreeMap::new();
        }
        let refused = self.charge.take(&self.fleet, nodes).await;
        for (node, why) in &refused {
            tracing::debug!(%node, why, "its agent does not obey");
        }
        refused
    }

    /// The configuration that is in force now.
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.read().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Takes over what it can of a configuration. What is under way goes on as it has begun.
    fn take_over(&self, new: &Config) -> Result<Reloaded, String> {
        let reloaded = self.config().reload_scheduler(new)?;
        let site = reloaded.config.scheduler.site(&reloaded.config.nodes)?;
        let mut brain = self.brain();
        brain.schedule.set_site(site);
        *self.config.write().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            Arc::new(reloaded.config.clone());
        Ok(reloaded)
    }

    /// Takes over what it can of a changed configuration, at each SIGHUP.
    async fn reload(self: Arc<Self>, mut hang_ups: HangUps, read_again: ReadAgain) {
        while hang_ups.next().await {
            let (daemon, read_again) = (Arc::clone(&self), Arc::clone(&read_again));
            let reload = tokio::task::spawn_blocking(move || {
                read_again().map_err(|error| error.to_string()).and_then(|new| daemon.take_over(&new))
            });
            match reload.await {
                Ok(Ok(reloaded)) => {
                    reloaded.log("ondeck serve");
                    // Who waits may have what is waited for, and another time may be the next.
                    let _ = self.event(Event::Tick).await;
                    self.earlier.notify_one();
                }
                Ok(Err(why)) => reload::log_refused(&why),
                Err(error) => reload::log_refused(&error.to_string()),
            }
        }
    }

    /// The RSA nodes whose agents do not obey, and why.
    pub fn refusing(&self) -> MutexGuard<'_, BTreeMap<NodeName, String>> {
        self.refusing.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The schedule and the journal. Held for moments only.
    pub fn brain(&self) -> MutexGuard<'_, Brain> {
        let locked = match self.brain.try_lock() {
            Err(TryLockError::WouldBlock) => aside(|| self.brain.lock()),
            Err(TryLockError::Poisoned(poisoned)) => Err(poisoned),
            Ok(brain) => Ok(brain),
        };
        // An event that panicked half-way must not be followed by others.
        #[allow(clippy::expect_used)]
        locked.expect("no event has panicked")
    }

    /// Why the journal can't be written, if it can't.
    pub fn journal_fault(&self) -> Option<String> {
        self.journal_fault.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// Waits until the journal can't be written for a while, and says why.
    async fn is_without_journal(&self) -> String {
        loop {
            tokio::time::sleep(LAST_TRIES).await;
            if let Some(fault) = self.journal_fault() {
                return fault;
            }
        }
    }

    fn set_journal_fault(&self, fault: Option<String>) {
        *self.journal_fault.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = fault;
    }

    /// A job as it is now.
    pub fn job(&self, id: Incarnation) -> Option<Job> {
        self.brain().schedule.jobs().get(&id).cloned()
    }

    /// Tells of events.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Lets something happen: decided, kept, begun.
    pub async fn event(self: &Arc<Self>, event: Event) -> Result<(), Refused> {
        let daemon = Arc::clone(self);
        let handle = tokio::runtime::Handle::current();
        // It waits for the disk.
        let done = tokio::task::spawn_blocking(move || {
            let mut brain = daemon.brain();
            let at = now();
            let effects = brain.schedule.handle(at, event)?;
            let news = daemon.keep(&mut brain, at, &effects);
            for unasked in &effects.unasked {
                daemon.compute.unasked(unasked);
            }
            // Begun in the order in which they were decided.
            let _runtime = handle.enter();
            for action in effects.actions {
                daemon.act(&brain, action);
            }
            drop(brain);
            Ok(news)
        });
        // Thousands of Prologs may wait: they are woken for news only.
        let news = match done.await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, "a defect in the daemon; it ends, and goes on when it is started again");
                std::process::exit(i32::from(ondeck_core::exit::FAILED));
            }
        };
        if news? {
            self.changed.send_modify(|count| *count += 1);
            self.earlier.notify_one();
        }
        Ok(())
    }

    /// Writes to the journal, for as long as it takes: nothing may be done that is not kept. Returns whether there was
    /// anything.
    fn keep(&self, brain: &mut Brain, at: Time, effects: &Effects) -> bool {
        if effects.jobs.is_empty() && effects.nodes.is_empty() && effects.changes.is_empty() {
            return false;
        }
        for change in effects.changes.iter().filter(|change| !change.text.is_empty()) {
            let job = change.job.map(|job| job.to_string()).unwrap_or_default();
            let states = change.states.map(|(job, rsa)| format!("{job}/{rsa}")).unwrap_or_default();
            tracing::info!(job, states, "{}", plain(&change.text, MESSAGE));
        }
        let Brain { schedule, store } = brain;
        let mut failed = false;
        while let Err(error) = store.keep(at, schedule, effects) {
            tracing::error!(%error, "the journal can't be written; nothing is done until it can");
            self.set_journal_fault(Some(error.to_string()));
            failed = true;
            std::thread::sleep(JOURNAL_PAUSE);
        }
        if failed {
            self.set_journal_fault(None);
            tracing::info!("the journal can be written again");
        }
        true
    }

    fn act(self: &Arc<Self>, brain: &Brain, action: Action) {
        let daemon = Arc::clone(self);
        match action {
            Action::Begin(id, task) => {
                let Some(job) = brain.schedule.jobs().get(&id).cloned() else { return };
                tokio::spawn(async move {
                    let outcome = execute::work(&daemon, &job, task).await;
                    daemon.transfers().remove(&id);
                    let ended = Event::Ended { job: id, number: task.number, outcome };
                    // Only orders of people are refused.
                    let _ = daemon.event(ended).await;
                });
            }
            Action::CleanUp(node, ramdisk) => {
                // The look at the nodes does it, for as long as it takes.
                tracing::warn!(%node, %ramdisk, "something is left on a node; it is removed when the node answers");
            }
            Action::LockIn(id)
            | Action::UndoLockIn(id)
            | Action::Hold(id)
            | Action::HoldBack(id, _)
            | Action::LetGo(id)
            | Action::Unmark(id)
            | Action::Tell(id, _) => self.order(id, action),
        }
    }

    /// Has the workload manager told something of a job, after everything that it was to be told before.
    fn order(self: &Arc<Self>, id: Incarnation, action: Action) {
        let mut orders = self.orders.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let waiting = orders.entry(id.job).or_default();
        if matches!(action, Action::Tell(..)) {
            // The last word counts. The first of the queue may be on its way already.
            let mut place = 0;
            waiting.retain(|(_, earlier)| {
                place += 1;
                place == 1 || !matches!(earlier, Action::Tell(..))
            });
        }
        waiting.push_back((id, action));
        if waiting.len() > 1 {
            return;
        }
        let daemon = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                let next = {
                    let orders = daemon.orders.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    orders.get(&id.job).and_then(|waiting| waiting.front().cloned())
                };
                let Some((of, action)) = next else { return };
                let unlocks = matches!(action, Action::UndoLockIn(_));
                execute::tell_workload_manager(&daemon, of, action).await;
                if unlocks {
                    let _ = daemon.event(Event::Unlocked(of)).await;
                }
                let mut orders = daemon.orders.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if let Some(waiting) = orders.get_mut(&id.job) {
                    waiting.pop_front();
                    if waiting.is_empty() {
                        orders.remove(&id.job);
                        return;
                    }
                }
            }
        });
    }

    /// The lock of whoever takes a job's RAM disk away.
    pub fn unmounts_of(&self, id: Incarnation) -> Arc<tokio::sync::RwLock<()>> {
        let mut locks = self.unmounts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        locks.retain(|known, lock| *known == id || Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(id).or_default())
    }

    pub fn transfers(&self) -> MutexGuard<'_, BTreeMap<Incarnation, Transfer>> {
        self.transfers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Wakes the schedule when a time has come.
    async fn keep_time(self: Arc<Self>) {
        loop {
            let next = self.brain().schedule.next_tick();
            let pause = next.map_or(Duration::from_secs(60), |next| next.since(now()));
            if pause.is_zero() {
                let _ = self.event(Event::Tick).await;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.earlier.notified() => {}
            }
        }
    }

    /// Forgets the jobs that ended before a time; returns how many.
    fn forget_before(&self, before: Time) -> Result<usize, StoreError> {
        let mut brain = self.brain();
        let forgotten = brain.store.forget_before(before)?;
        for id in &forgotten {
            if !brain.store.past_lives(id.job)?.iter().any(|life| life.is_same_job(*id)) {
                brain.schedule.forget(*id);
            }
        }
        Ok(forgotten.len())
    }

    /// Forgets the logs of jobs that ended long ago.
    async fn forget(self: Arc<Self>) {
        loop {
            let before = Time(now().0.saturating_sub(self.config().scheduler.keep.as_millis() as u64));
            let daemon = Arc::clone(&self);
            let done = tokio::task::spawn_blocking(move || daemon.forget_before(before)).await;
            match done {
                Ok(Ok(0)) | Err(_) => {}
                Ok(Ok(jobs)) => tracing::info!(jobs, "forgot jobs that ended long ago"),
                Ok(Err(error)) => tracing::warn!(%error, "can't forget old jobs"),
            }
            tokio::time::sleep(Duration::from_secs(3600)).await;
        }
    }
}

/// Waits for a lock without keeping the runtime's other tasks: while the journal can't be written it may take for ever.
fn aside<T>(wait: impl FnOnce() -> T) -> T {
    match tokio::runtime::Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(tokio::runtime::RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        _ => wait(),
    }
}

/// Runs the daemon until SIGTERM or SIGINT. What it has begun goes on; the next daemon takes it up. At SIGHUP it takes over
/// what it can of the configuration that `read_again` gives.
///
/// If the agents obey another journal's scheduler, or have seen a later state of this journal, `take_over` is asked whether
/// that is replaced; if neither is so, the daemon does not run.
///
/// # Errors
/// [`ServeError`].
pub fn serve(
    config: &Config,
    read_again: ReadAgain,
    take_over: Option<&dyn Fn(&Conflict) -> bool>,
) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // From the beginning: a signal that comes while the agents are asked must not end it.
    let hang_ups = runtime.block_on(async { HangUps::new() })?;
    let site = config.scheduler.site(&config.nodes).map_err(ServeError::Config)?;
    let name = host_name().map_err(StartError::from)?;
    let mut store = Store::open(&config.scheduler.state)?;
    let (kept_clock, last) = store.clock()?;
    let clock = clock::begin(kept_clock, last);
    store.keep_clock(clock)?;
    let mut kept = store.load()?;
    let mut nodes: Nodes = std::mem::take(&mut kept.nodes).into_iter().collect();
    let mut configured: BTreeSet<NodeName> = BTreeSet::new();
    for (pool, members) in config.scheduler.pools(&config.nodes) {
        for node in members.nodes {
            let known = nodes.entry(node.clone()).or_insert_with(|| Node::new(&pool));
            known.pool.clone_from(&pool);
            // Its agent has not answered this daemon yet; until it is taken for lost, what is on it counts as there.
            if config.scheduler.simulate.is_some() {
                (known.up, known.capacity) = (true, ondeck_core::Bytes(1 << 40));
            }
            configured.insert(node);
        }
    }
    // A node that the configuration no longer has lends nothing new, but what is on it is not forgotten.
    nodes.retain(|name, node| {
        configured.contains(name) || !node.promised.is_empty() || !node.residue.is_empty()
    });
    for (name, node) in &mut nodes {
        if !configured.contains(name) && node.drained.is_empty() {
            node.drained = NOT_CONFIGURED.into();
        } else if configured.contains(name) && node.drained == NOT_CONFIGURED {
            node.drained.clear();
        }
    }
    let mut identity = store.identity()?;
    let workload_manager = Slurm::new(SlurmSettings {
        bin_dir: config.slurm.bin_dir.clone(),
        conf: config.slurm.conf.clone(),
        timeout: config.slurm.timeout,
    });
    let said = if config.scheduler.simulate.is_some() {
        BTreeMap::new()
    } else {
        let mut asked: BTreeSet<NodeName> = nodes.keys().cloned().collect();
        if take_over.is_some() {
            // One that has had no work for long may obey a journal of which no RSA node knows.
            match runtime.block_on(workload_manager.all_nodes()) {
                Ok(compute) => asked.extend(compute),
                Err(error) => {
                    tracing::warn!(%error, "the agents of compute nodes are not asked whom they obey")
                }
            }
        }
        runtime.block_on(charge::ask_all(&Fleet::new(config), &asked))
    };
    if let Some(conflict) = Conflict::of(&identity, &said, take_over.is_some()) {
        match take_over {
            None => return Err(ServeError::NotInCharge(Box::new(conflict))),
            Some(confirm) if !confirm(&conflict) => return Err(ServeError::NotConfirmed),
            Some(_) => {
                charge::take_over(&mut store, &conflict, &said, &mut kept.jobs, &mut nodes)?;
                identity = store.identity()?;
                tracing::warn!("took over; what the agents have counts");
            }
        }
    } else if take_over.is_some() {
        return Err(ServeError::NothingToTakeOver(NothingToTakeOver::of(&said)));
    }
    let reports = || said.values().filter_map(|answer| answer.as_ref().ok());
    // Of a requeued job the queue shows another time of submission than its RAM disk.
    let tagged = reports().flat_map(|(_, ramdisks)| ramdisks).filter_map(|local| {
        let tag = local.layout.job.as_ref()?;
        let noted = [tag.job.submitted].into();
        Some((tag.job, Identity { uid: local.layout.owner.uid, noted, restarts: tag.job.restarts }))
    });
    let tagged: Vec<(Incarnation, Identity)> = tagged.collect();
    let newest = reports().map(|(report, _)| Epoch(report.newest_epoch)).max().unwrap_or(Epoch(0));
    let (jobs, held) = (kept.jobs.len(), kept.jobs.iter().filter(|job| job.results).count());
    tracing::info!(jobs, with_results = held, nodes = nodes.len(), "the journal was read");
    let schedule = Schedule::new(site, kept.jobs, nodes, kept.last_task, kept.last_epoch);
    let schedule = schedule.with_strays(kept.strays).with_former(kept.former).with_former(tagged);
    let schedule = schedule.with_beginning(identity.began).after_epoch(newest);
    let resume = schedule.resume();
    let charge = Arc::new(Charge::new(identity)?);
    let tcp = match config.scheduler.listen {
        None => None,
        listen => Some((own_address(&name, listen)?, config.scheduler.port).into()),
    };
    let (provider, doubter) = (Arc::clone(&charge), Arc::clone(&charge));
    let fleet = Fleet::new(config)
        .with_authority(Arc::new(move || provider.authority()))
        .with_doubts(move |node| doubter.doubt(node));
    let daemon = Arc::new(Daemon {
        config: RwLock::new(Arc::new(config.clone())),
        name,
        fleet,
        charge,
        refusing: Mutex::default(),
        cluster: OnceLock::new(),
        workload_manager,
        queue: Queue::new(),
        transfers: Mutex::default(),
        orders: Mutex::default(),
        unmounts: Mutex::default(),
        // What runs already may have started while no scheduler could be asked.
        compute: ComputeNodes::new(now().plus(config.scheduler.limits.prolog)),
        brain: Mutex::new(Brain { schedule, store }),
        changed: watch::channel(0).0,
        journal_fault: Mutex::default(),
        earlier: Notify::new(),
    });
    let listening = Listening {
        socket: config.scheduler.socket.clone(),
        tcp,
        connections: CONNECTIONS,
        munge: Munge::new(config.munge_socket.clone()),
        administrators: Administrators::new(&config.scheduler.administrators),
    };
    runtime.spawn(Arc::clone(&daemon).reload(hang_ups, read_again));
    let result = runtime.block_on(run(daemon, listening, resume, clock));
    runtime.shutdown_background();
    result
}

async fn run(
    daemon: Arc<Daemon>,
    listening: Listening,
    resume: Vec<Action>,
    clock: KeptClock,
) -> Result<(), ServeError> {
    let server = Server::bind(Arc::clone(&daemon), listening).await?;
    for action in resume {
        match action {
            Action::Begin(id, task) => execute::resume(&daemon, id, task),
            other => {
                let brain = daemon.brain();
                daemon.act(&brain, other);
            }
        }
    }
    tokio::spawn(Arc::clone(&daemon).keep_time());
    tokio::spawn(clock::watch(Arc::clone(&daemon), clock));
    tokio::spawn(Arc::clone(&daemon).forget());
    tokio::spawn(queue::look(Arc::clone(&daemon)));
    if daemon.config().scheduler.simulate.is_none() {
        tokio::spawn(Charge::watch(Arc::clone(&daemon)));
        tokio::spawn(fleet::look(Arc::clone(&daemon)));
        tokio::spawn(parts::look(Arc::clone(&daemon)));
        tokio::spawn(compute::look(Arc::clone(&daemon)));
    }
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    };
    let began = Instant::now();
    let closing = Arc::clone(&daemon);
    server.serve(stop).await?;
    // One file is left, which can be copied. What is still under way writes nothing into it.
    tokio::select! {
        closed = tokio::task::spawn_blocking(move || closing.brain().store.close()) => {
            if let Ok(Err(error)) = closed {
                tracing::warn!(%error, "the files beside the journal belong to it");
            }
        }
        fault = daemon.is_without_journal() => {
            tracing::error!(
                fault,
                "ends, though the journal can't be written: what was decided last is not kept and was not done, and is \
                 decided again at the next start"
            );
            // A thread still tries to write it, and would be waited for.
            std::process::exit(i32::from(ondeck_core::exit::FAILED));
        }
    }
    tracing::info!(seconds = began.elapsed().as_secs(), "ends; RAM disks and transfers go on");
    Ok(())
}
