//! The middle of the daemon: one event after the other, kept before anything is done about it.
//!
//! A thread of its own decides and writes the journal. Events that come while it writes are decided together and kept in
//! one transaction; what they lead to is begun in the order in which it was decided.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ondeck_core::schedule::{Action, Effects, Event, Job, Notice, Refused};
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Incarnation, JobId};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::clock::now;
use crate::context::{Context, DoneFuture, EventFuture, Events};
use crate::execute;
use crate::orders::Orders;
use crate::store::Entry;

/// Events that are kept together at most.
const MOST: usize = 256;

/// An event that is to be decided on.
struct Incoming {
    context: Arc<Context>,
    event: Event,
    runtime: Handle,
    answer: oneshot::Sender<Result<(), Refused>>,
}

/// Decides on events, and has done what follows.
pub(crate) struct Dispatcher {
    inbox: Sender<Incoming>,
    orders: Arc<Orders>,
}

impl Events for Dispatcher {
    fn happen(&self, context: Arc<Context>, event: Event) -> EventFuture<'_> {
        let (answer, answered) = oneshot::channel();
        let runtime = Handle::current();
        // Its end is the daemon's.
        let sent = self.inbox.send(Incoming { context, event, runtime, answer });
        Box::pin(async move {
            match (sent, answered.await) {
                (Ok(()), Ok(result)) => result,
                _ => std::future::pending().await,
            }
        })
    }

    fn told(&self, job: JobId) -> DoneFuture<'_> {
        Box::pin(self.orders.told(job))
    }

    fn say(&self, context: &Arc<Context>, id: Incarnation, text: String) {
        self.orders.give(context, id, Action::Tell(id, Notice::Words(text)));
    }
}

impl Dispatcher {
    /// Begins to decide.
    ///
    /// # Errors
    /// If there can't be another thread.
    pub fn new() -> std::io::Result<Dispatcher> {
        let (inbox, events) = channel();
        let orders = Arc::<Orders>::default();
        let of = Arc::clone(&orders);
        let run = move || {
            let decide = std::panic::AssertUnwindSafe(|| decide_all(&events, &of));
            if std::panic::catch_unwind(decide).is_err() {
                tracing::error!("a defect in the daemon; it ends, and goes on when it is started again");
                std::process::exit(i32::from(ondeck_core::exit::FAILED));
            }
        };
        std::thread::Builder::new().name("journal".into()).spawn(run)?;
        Ok(Dispatcher { inbox, orders })
    }

    /// Takes up what an earlier daemon had begun.
    pub fn resume(&self, context: &Arc<Context>, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Begin(id, order) => execute::resume(context, id, order),
                other => act(context, &self.orders, other, None),
            }
        }
    }
}

/// Decides for as long as there is anybody to ask it.
fn decide_all(events: &Receiver<Incoming>, orders: &Arc<Orders>) {
    while let Ok(first) = events.recv() {
        let (context, runtime) = (Arc::clone(&first.context), first.runtime.clone());
        let batch: Vec<Incoming> = std::iter::once(first).chain(events.try_iter().take(MOST - 1)).collect();
        let (mut entry, mut actions, mut answers) = (Entry::default(), Vec::new(), Vec::new());
        for incoming in batch {
            let result = decide(&context, incoming.event, &mut entry, &mut actions);
            answers.push((incoming.answer, result));
        }
        // Thousands of Prologs may wait: they are woken for news only.
        let news = !entry.is_empty();
        if news {
            context.journal.keep(&entry, &context.metrics);
            context.show(entry);
        }
        let _runtime = runtime.enter();
        for (action, job) in actions {
            act(&context, orders, action, job);
        }
        // Before the answers: whoever is answered finds that those who wait for news have been told.
        if news {
            context.tell_of_news();
        }
        for (answer, result) in answers {
            // Whoever asked may have gone.
            let _ = answer.send(result);
        }
    }
}

/// Decides on an event. Nothing of it is kept or begun yet.
fn decide(
    context: &Context,
    event: Event,
    entry: &mut Entry,
    actions: &mut Vec<(Action, Option<Job>)>,
) -> Result<(), Refused> {
    let mut schedule = context.schedule();
    let at = now();
    let effects = schedule.handle(at, event)?;
    tell(&effects);
    entry.add(at, &schedule, &effects);
    for unasked in &effects.unasked {
        context.compute.unasked(unasked);
    }
    for action in effects.actions {
        // Work is for the job as it is now; a later event that is kept with this one may change it.
        let job = match action {
            Action::Begin(id, _) => schedule.jobs().get(&id).cloned(),
            _ => None,
        };
        actions.push((action, job));
    }
    Ok(())
}

/// Has the daemon's log tell what was decided.
fn tell(effects: &Effects) {
    for change in &effects.changes {
        let text = change.notice.to_string();
        if text.is_empty() {
            continue;
        }
        let job = change.job.map(|job| job.to_string()).unwrap_or_default();
        let states = change.states.map(|(job, rsa)| format!("{job}/{rsa}")).unwrap_or_default();
        tracing::info!(%job, %states, "{}", plain(&text, MESSAGE));
    }
}

/// Begins what was decided. What takes time ends later, by an event of its own.
fn act(context: &Arc<Context>, orders: &Arc<Orders>, action: Action, job: Option<Job>) {
    let context = Arc::clone(context);
    match action {
        Action::Begin(id, order) => {
            let Some(job) = job else { return };
            tokio::spawn(async move {
                let outcome = execute::work(&context, &job, order).await;
                context.transfers().remove(&id);
                let ended = Event::Ended { job: id, number: order.number, outcome };
                // Only orders of people are refused.
                let _ = context.event(ended).await;
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
        | Action::EndStageOut(id)
        | Action::Unmark(id)
        | Action::Tell(id, _) => orders.give(&context, id, action),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::charge::Charge;
    use crate::context::Beginning;
    use crate::journal::Journal;
    use crate::samples::queued;
    use crate::store::Store;
    use ondeck_api::Config;
    use ondeck_core::schedule::{Node, ObservedJob, RsaState, Schedule, Site};
    use ondeck_core::{Bytes, Epoch, NodeName, Request};
    use ondeck_fleet::Fleet;
    use ondeck_wlm::{Slurm, SlurmSettings};

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    /// A daemon's parts with one RSA node; work takes no time, and nothing is done to jobs.
    fn simulated(directory: &std::path::Path) -> Arc<Context> {
        let mut config = Config::default();
        config.scheduler.simulate = Some(Duration::ZERO);
        let store = Store::open(directory).unwrap();
        let charge = Arc::new(Charge::new(store.identity().unwrap()).unwrap());
        let site = Site { debounce: Duration::ZERO, ..Site::default() };
        let nodes = [(node("r1"), Node::new("default"))].into();
        let schedule = Schedule::new(site, Vec::new(), nodes, 0, Epoch(0));
        // No command of Slurm's is run.
        let settings = SlurmSettings { bin_dir: Some(directory.into()), conf: None, timeout: Duration::ZERO };
        let begin = Beginning {
            name: node("here"),
            fleet: Fleet::new(&config),
            charge,
            workload_manager: Arc::new(Slurm::new(settings)),
            metrics: Arc::default(),
            schedule,
            journal: Journal::new(store).unwrap(),
        };
        Arc::new(Context::new(begin, &config, Arc::new(Dispatcher::new().unwrap())))
    }

    fn next(number: u32) -> ObservedJob {
        let job = queued(number.to_string().parse().unwrap());
        let request = Some(Request { data_in: vec!["/a".into()], ..Request::default() });
        ObservedJob { job, request, work_dir: "/".into(), io_nodes: Vec::new() }
    }

    #[tokio::test]
    async fn an_event_is_in_the_journal_when_it_is_told_of_and_what_is_refused_is_no_news() {
        let dir = tempfile::tempdir().unwrap();
        let context = simulated(dir.path());
        let mut changed = context.watch();
        context.event(Event::Drain { node: node("r1"), why: "repair".into() }).await.unwrap();
        assert!(changed.has_changed().unwrap());
        let last = context.journal.read(|reader| reader.log(None, 1)).unwrap();
        assert_eq!(last[0].text, "RSA node r1 is drained: repair");
        changed.mark_unchanged();
        let refused = context.event(Event::Resume(node("r2"))).await;
        assert_eq!(refused, Err(Refused::NoNode(node("r2"))));
        context.event(Event::Tick).await.unwrap();
        assert!(!changed.has_changed().unwrap());
    }

    #[tokio::test]
    async fn what_was_decided_is_begun_and_its_end_is_an_event() {
        let dir = tempfile::tempdir().unwrap();
        let context = simulated(dir.path());
        let mut changed = context.watch();
        let up = Event::NodeUp { node: node("r1"), capacity: Bytes(1 << 30) };
        for event in [up, Event::Queue { taken: now(), jobs: vec![next(1)] }] {
            context.event(event).await.unwrap();
        }
        let id = next(1).job.id;
        let is_ready = || context.job(id).is_some_and(|job| job.rsa_state == RsaState::Ready);
        while !is_ready() {
            tokio::time::timeout(Duration::from_secs(60), changed.changed()).await.unwrap().unwrap();
        }
        let log = context.journal.read(|reader| reader.log(Some(id), 100)).unwrap();
        let said = |text: &str| log.iter().any(|line| line.text.contains(text));
        assert!(said("done constructing RSA block") && said("finished staging data in"), "{log:?}");
    }
}
