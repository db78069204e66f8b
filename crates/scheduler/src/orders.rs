//! What the workload manager is told of jobs, for each of them in order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ondeck_core::schedule::{Action, Event, LockIn};
use ondeck_core::{Incarnation, JobId, QueuedJob, Standing};
use ondeck_wlm::WlmError;
use tokio::sync::Notify;

use crate::context::Context;
use crate::queue_snapshot::QueueSnapshot;

/// The time between two looks at a job that is being requeued.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// What the workload manager is to be told of one job, in order.
type Line = VecDeque<(Incarnation, Action)>;

/// What the workload manager is to be told of each job, in order.
#[derive(Default)]
pub(crate) struct Orders {
    lines: Mutex<BTreeMap<JobId, Line>>,
    /// Wakes whoever waits until everything was told of a job.
    told: Notify,
}

impl Orders {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<JobId, Line>> {
        self.lines.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns once the workload manager has been told everything that it is to be told of a job.
    pub async fn told(&self, job: JobId) {
        loop {
            let told = self.told.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if !self.waiting().contains_key(&job) {
                return;
            }
            told.await;
        }
    }

    /// Has the workload manager told something of a job, after everything that it was to be told before.
    pub fn give(self: &Arc<Self>, context: &Arc<Context>, id: Incarnation, action: Action) {
        let mut orders = self.waiting();
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
        let (all, context) = (Arc::clone(self), Arc::clone(context));
        tokio::spawn(async move {
            loop {
                let next = {
                    let orders = all.waiting();
                    orders.get(&id.job).and_then(|waiting| waiting.front().cloned())
                };
                let Some((of, action)) = next else { return };
                let unlocks = matches!(action, Action::UndoLockIn(_));
                tell_workload_manager(&context, of, action).await;
                if unlocks {
                    let _ = context.event(Event::Unlocked(of)).await;
                }
                let mut orders = all.waiting();
                if let Some(waiting) = orders.get_mut(&id.job) {
                    waiting.pop_front();
                    if waiting.is_empty() {
                        orders.remove(&id.job);
                        all.told.notify_waiters();
                        return;
                    }
                }
            }
        });
    }
}

/// Has the workload manager do something with a job, or tell its user. It is tried until it answers.
async fn tell_workload_manager(context: &Arc<Context>, id: Incarnation, action: Action) {
    let manager = &context.workload_manager;
    let job = id.job;
    if context.config().scheduler.simulate.is_some() && !lets_go_in_earnest(context, id, &action) {
        return tracing::info!(%id, ?action, "would be ordered");
    }
    loop {
        if context.queue.of_number(job).is_some_and(|queued| !queued.id.is_same_job(id)) {
            tracing::info!(job = id.key(), ?action, "its number is another job's now, which is not touched");
            break;
        }
        let done = match &action {
            Action::Tell(..) | Action::Unmark(_) => say(context, id, &action).await,
            // It may have been decided otherwise since.
            Action::Hold(_) if !context.job(id).is_some_and(|job| job.hold.is_held()) => Ok(()),
            Action::LetGo(_) if context.job(id).is_some_and(|job| job.hold.is_held()) => Ok(()),
            Action::Hold(_) => match manager.hold(job).await {
                Ok(()) => say(context, id, &action).await,
                other => other,
            },
            Action::HoldBack(_, why) => hold_back(context, id, &why.to_string()).await,
            Action::LetGo(_) => match manager.release(job).await {
                Ok(()) => say(context, id, &action).await,
                other => other,
            },
            Action::EndStageOut(_) => end_stage_out(context, id).await,
            Action::LockIn(_) => lock_in(context, id).await,
            Action::UndoLockIn(_) => undo_lock_in(context, id).await,
            Action::Begin(..) | Action::CleanUp(..) => Ok(()),
        };
        match done {
            Ok(()) => break,
            Err(error @ WlmError::Unavailable { .. }) => {
                tracing::debug!(%id, %error, "the workload manager is told again later");
                tokio::time::sleep(Duration::from_secs(3)).await;
            }
            Err(error) if matches!(action, Action::LockIn(_) | Action::UndoLockIn(_)) => {
                tracing::warn!(%id, ?action, %error, "its place in the queue can't be changed");
                break;
            }
            // An ended job can't be commented without an accounting database; `ondeck job show` has it all.
            Err(error) => {
                tracing::debug!(%id, %error, "the workload manager did not do it");
                break;
            }
        }
    }
    if matches!(action, Action::LetGo(_)) {
        context.queue.hurry();
    }
}

/// Has the workload manager not keep a job any more. The same would cancel a later life of it, which waits for its start.
async fn end_stage_out(context: &Arc<Context>, id: Incarnation) -> Result<(), WlmError> {
    let snapshot = context.queue.fresh().await;
    if let Some(message) = snapshot.fault {
        return Err(WlmError::Unavailable { message });
    }
    let goes_on =
        |queued: &QueuedJob| queued.id.job == id.job && (queued.id != id || queued.standing.waits());
    if snapshot.jobs.iter().any(goes_on) {
        tracing::warn!(
            job = id.key(),
            "it has been started anew: its former life is not ended, as that would cancel it"
        );
        return Ok(());
    }
    context.workload_manager.end_stage_out(id.job).await
}

/// In a simulation nothing is done to jobs, except that those that `job_submit.lua` holds are let go.
fn lets_go_in_earnest(context: &Context, id: Incarnation, action: &Action) -> bool {
    let held = |job: &QueuedJob| job.id == id && job.held_for_input && job.standing == Standing::Held;
    matches!(action, Action::LetGo(_)) && context.queue.snapshot().jobs.iter().any(held)
}

/// Writes what a job's user should know last, with the mark as long as the job is held.
async fn say(context: &Arc<Context>, id: Incarnation, action: &Action) -> Result<(), WlmError> {
    let (mut held, known) =
        context.job(id).map_or((false, String::new()), |job| (job.hold.is_held(), job.message));
    let text = match action {
        Action::Tell(_, notice) => notice.to_string(),
        _ => known,
    };
    let mut mark = ondeck_wlm::mark(id.restarts);
    if let Some(queued) = context.queue.of_number(id.job)
        && queued.id != id
    {
        // A later life of the job has the line by now, and may be held by the mark in it.
        held = queued.held_for_input;
        mark = ondeck_wlm::mark(queued.id.restarts);
    }
    context.workload_manager.set_comment(id.job, &comment(held.then_some(mark), &text)).await
}

/// The line of a job: the mark, if it is held by us, and what its user should know.
fn comment(mark: Option<String>, text: &str) -> String {
    let held = mark.is_some();
    let mut line = mark.unwrap_or_default();
    if !text.is_empty() {
        line += if held { " ondeck: " } else { "ondeck: " };
        // A path may have any name, also that of the mark.
        line += &text.replace(ondeck_wlm::HELD_FOR_INPUT, "ondeck hold");
    }
    line
}

/// Holds a job that depends on others, if it still waits for them, and nobody else holds it.
async fn hold_back(context: &Arc<Context>, id: Incarnation, text: &str) -> Result<(), WlmError> {
    let waits = |job: &QueuedJob| job.id == id && job.standing.waits() && !job.held_for_input;
    let snapshot = context.queue.snapshot();
    if !snapshot.jobs.iter().chain(&*snapshot.dependent_rests).any(waits) {
        return Ok(());
    }
    let line = comment(Some(ondeck_wlm::mark(id.restarts)), text);
    context.workload_manager.hold_saying(id.job, &line).await
}

async fn lock_in(context: &Arc<Context>, id: Incarnation) -> Result<(), WlmError> {
    let config = context.config();
    let site = &config.scheduler;
    // To a job that somebody holds, a new priority would be a release.
    let snapshot = seen(context).await?;
    let waits = |job: &&QueuedJob| job.id == id && job.standing.waits();
    let Some(job) = snapshot.jobs.iter().find(waits) else { return Ok(()) };
    match (site.lock_in, &site.lock_in_qos) {
        (LockIn::Qos, Some(qos)) => context.workload_manager.set_qos(id.job, qos).await,
        (LockIn::Priority, _) => {
            // Before all that wait now.
            let others = snapshot.jobs.iter().filter(|job| job.id.job != id.job);
            let greatest = others.map(|job| job.priority).max().unwrap_or(0);
            if job.priority > greatest {
                return Ok(());
            }
            let priority =
                u32::try_from(greatest.saturating_add(1)).unwrap_or(u32::MAX - 2).min(u32::MAX - 2);
            context.workload_manager.set_priority(id.job, priority).await
        }
        _ => Ok(()),
    }
}

/// The queue as it is now.
async fn seen(context: &Arc<Context>) -> Result<QueueSnapshot, WlmError> {
    let snapshot = context.queue.fresh().await;
    match snapshot.fault {
        Some(message) => Err(WlmError::Unavailable { message }),
        None => Ok(snapshot),
    }
}

async fn undo_lock_in(context: &Arc<Context>, id: Incarnation) -> Result<(), WlmError> {
    // The job may be another life of it by now. To one that is held, a new priority would be a release; and Slurm holds
    // what is requeued to be held only after everything else, so one look is not enough.
    const LOOKS: u32 = 2;
    let (mut looks, mut job) = (0, None);
    while looks < LOOKS {
        let snapshot = seen(context).await?;
        job = snapshot.jobs.iter().find(|job| job.id.is_same_job(id)).cloned();
        match job.as_ref().map(|job| job.standing) {
            Some(standing) if standing.waits() || standing == Standing::Held => looks += 1,
            Some(Standing::Ending) => looks = 0,
            _ => return Ok(()),
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
    let Some(job) = job else { return Ok(()) };
    match context.config().scheduler.lock_in {
        LockIn::Priority if job.standing == Standing::Held => Ok(()),
        LockIn::Priority => context.workload_manager.reset_priority(id.job).await,
        LockIn::Qos => {
            let known = context.job(id).map(|job| job.qos).filter(|qos| !qos.is_empty());
            context.workload_manager.set_qos(id.job, known.as_deref().unwrap_or("normal")).await?;
            // Once the job is forgotten, its quality of service is what the queue shows.
            seen(context).await.map(drop)
        }
        LockIn::Off => Ok(()),
    }
}
