//! What the parts of the daemon share: the configuration, the schedule and its journal, the agents, the workload manager,
//! and what was last seen of each; and [`Context::event`], by which they let something happen.
//!
//! The parts depend on this file, and it on none of them: whoever decides stands behind [`Events`].

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard};

use ondeck_api::Config;
use ondeck_api::scheduler::Transfer;
use ondeck_core::schedule::{Event, Job, Refused, Schedule};
use ondeck_core::{EngineKind, Incarnation, JobId, NodeName};
use ondeck_fleet::Fleet;
use ondeck_wlm::WorkloadManager;
use tokio::sync::{Notify, watch};

use crate::charge::Charge;
use crate::clock::now;
use crate::compute::ComputeNodes;
use crate::delays::Delays;
use crate::journal::Journal;
use crate::loads::Loads;
use crate::metrics::Metrics;
use crate::queue_snapshot::ObservedQueue;
use crate::store::Entry;
use crate::striping::Layouts;
use crate::view::View;

/// What an event comes to, when it is over.
pub(crate) type EventFuture<'a> = Pin<Box<dyn Future<Output = Result<(), Refused>> + Send + 'a>>;

/// Is over when something has been done.
pub(crate) type DoneFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Whoever decides on events, one after the other.
pub(crate) trait Events: Send + Sync {
    /// Lets something happen: decided, kept, begun.
    fn happen(&self, context: Arc<Context>, event: Event) -> EventFuture<'_>;

    /// The workload manager is told everything that it is to be told of a job.
    fn told(&self, job: JobId) -> DoneFuture<'_>;

    /// Tells a job's user something, after everything that was to be told of it before.
    fn say(&self, context: &Arc<Context>, id: Incarnation, text: String);
}

/// What the parts of the daemon share.
pub(crate) struct Context {
    /// Exchanged as a whole when the configuration is read again.
    config: RwLock<Arc<Config>>,
    pub name: NodeName,
    pub fleet: Fleet,
    pub charge: Arc<Charge>,
    /// The RSA nodes whose agents do not obey, and why.
    refusing: Mutex<BTreeMap<NodeName, String>>,
    /// The cluster whose jobs these are, as the workload manager calls it, once it has said so.
    pub cluster: OnceLock<String>,
    pub workload_manager: Arc<dyn WorkloadManager>,
    pub queue: ObservedQueue,
    transfers: Mutex<BTreeMap<Incarnation, Transfer>>,
    /// Who takes a RAM disk away: from one node each, or from all nodes alone.
    unmounts: Mutex<BTreeMap<Incarnation, Arc<tokio::sync::RwLock<()>>>>,
    pub compute: Arc<ComputeNodes>,
    /// The layouts of directories that jobs have, or have left.
    pub layouts: Layouts,
    /// How busy the filesystems are.
    pub loads: Loads,
    /// The jobs that wait because of that.
    pub delays: Delays,
    pub metrics: Arc<Metrics>,
    /// What is decided on. It may be ahead of the journal: who looks, looks at the view.
    schedule: Mutex<Schedule>,
    view: RwLock<View>,
    pub journal: Journal,
    /// Counts events, so that whoever waits for a state looks again.
    changed: watch::Sender<u64>,
    /// A time to wait for may have come nearer.
    earlier: Notify,
    events: Arc<dyn Events>,
}

/// What a daemon begins with, beside its configuration.
pub(crate) struct Beginning {
    pub name: NodeName,
    pub fleet: Fleet,
    pub charge: Arc<Charge>,
    pub workload_manager: Arc<dyn WorkloadManager>,
    pub metrics: Arc<Metrics>,
    pub schedule: Schedule,
    pub journal: Journal,
}

impl Context {
    /// What is shared at the start of a daemon. `events` is whoever decides.
    pub fn new(begin: Beginning, config: &Config, events: Arc<dyn Events>) -> Context {
        Context {
            config: RwLock::new(Arc::new(config.clone())),
            name: begin.name,
            fleet: begin.fleet,
            charge: begin.charge,
            refusing: Mutex::default(),
            cluster: OnceLock::new(),
            workload_manager: begin.workload_manager,
            queue: ObservedQueue::new(),
            transfers: Mutex::default(),
            unmounts: Mutex::default(),
            // What runs already may have started while no scheduler could be asked.
            compute: Arc::new(ComputeNodes::new(now().plus(config.scheduler.limits.prolog))),
            layouts: Layouts::default(),
            loads: Loads::default(),
            delays: Delays::default(),
            metrics: begin.metrics,
            view: RwLock::new(View::of(&begin.schedule)),
            schedule: Mutex::new(begin.schedule),
            journal: begin.journal,
            changed: watch::channel(0).0,
            earlier: Notify::new(),
            events,
        }
    }

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

    /// Puts a configuration into force.
    pub fn set_config(&self, new: Config) {
        *self.config.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = Arc::new(new);
    }

    /// The engine of a job's RAM disk.
    pub fn engine(&self, job: &Job) -> EngineKind {
        job.request.engine.unwrap_or(self.config().scheduler.engine)
    }

    /// The RSA nodes whose agents do not obey, and why.
    pub fn refusing(&self) -> MutexGuard<'_, BTreeMap<NodeName, String>> {
        self.refusing.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What is decided on, for whoever decides or asks it something. It is held for moments only, and never while the disk
    /// is waited for.
    pub fn schedule(&self) -> MutexGuard<'_, Schedule> {
        // An event that panicked half-way must not be followed by others.
        #[allow(clippy::expect_used)]
        self.schedule.lock().expect("no event has panicked")
    }

    /// Jobs and nodes as they were last kept. It is held for moments only.
    pub fn view(&self) -> RwLockReadGuard<'_, View> {
        self.view.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Shows what was kept to all who look.
    pub fn show(&self, entry: Entry) {
        self.view.write().unwrap_or_else(|poisoned| poisoned.into_inner()).show(entry);
    }

    /// A job as it was last kept.
    pub fn job(&self, id: Incarnation) -> Option<Job> {
        self.view().jobs().get(&id).map(|job| Job::clone(job))
    }

    /// Tells of events.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Lets something happen: decided, kept, begun.
    pub async fn event(self: &Arc<Self>, event: Event) -> Result<(), Refused> {
        self.events.happen(Arc::clone(self), event).await
    }

    /// Returns once the workload manager has been told everything that was decided to be told of a job until now.
    pub async fn told(self: &Arc<Self>, job: JobId) {
        // What was decided before is begun before this is answered, and a tick is never refused.
        let _ = self.event(Event::Tick).await;
        self.events.told(job).await;
    }

    /// Tells a job's user something that is not kept.
    pub fn say(self: &Arc<Self>, id: Incarnation, text: String) {
        self.events.say(self, id, text);
    }

    /// Wakes whoever waits for a state, or for a time that may have come nearer.
    pub fn tell_of_news(&self) {
        self.changed.send_modify(|count| *count += 1);
        self.earlier.notify_one();
    }

    /// The time of the next tick may have come nearer.
    pub fn look_at_the_time(&self) {
        self.earlier.notify_one();
    }

    /// Waits until the time of the next tick may have come nearer.
    pub async fn time_changed(&self) {
        self.earlier.notified().await;
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
}
