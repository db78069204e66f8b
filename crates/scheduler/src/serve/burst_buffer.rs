//! Slurm's burst-buffer plugin: what it asks for a job, and what it is answered. Nothing is decided here.
//!
//! A question may come again: after the time that it waits, after a restart of either side, or because Slurm asks twice.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_api::auth::Caller;
use ondeck_api::config::Hurry;
use ondeck_api::scheduler::{BurstBufferAnswer, BurstBufferQuestion, BurstBufferVerdict as Verdict};
use ondeck_api::wire::{Refusal, RefusalCode};
use ondeck_core::schedule::{BurstBuffer, BurstBufferCall as Call, Event, Job, JobState, RsaState};
use ondeck_core::{Incarnation, JobId};
use ondeck_wlm::Controller;

use super::routes::LONGEST_WAIT;
use super::{Api, refused};
use crate::context::Context;
use crate::queue;

/// How long it is believed who the workload manager's daemon is; and that it can't be told.
const BELIEVED: Duration = Duration::from_secs(60);
const BELIEVED_UNKNOWN: Duration = Duration::from_secs(1);

/// How long it is believed that the workload manager's daemon is the one that it was.
const START_BELIEVED: Duration = Duration::from_secs(5);

/// How long it is waited for a look at the queue, before results are given up.
const WAITING_FOR_A_LOOK: Duration = Duration::from_secs(20);

/// How many stage-outs are waited for at a time: up to 23.11 Slurm has 128 places for post_run and data_out together, and another
/// job's end would wait for one.
const WAITING_STAGE_OUTS: usize = 96;

fn answer(verdict: Verdict, message: impl Into<String>) -> BurstBufferAnswer {
    BurstBufferAnswer { verdict, message: message.into() }
}

/// Somebody who waits for a stage-out, for as long as it is waited for.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Api {
    /// Whether a question comes from the workload manager's own daemon.
    async fn is_the_controller(&self, caller: Caller) -> Result<(), Refusal> {
        if caller.is_administrator() {
            return Ok(());
        }
        let stranger = |why: &str| {
            let message = format!(
                "user {} may not ask this{why}: only the user that slurmctld runs as may",
                caller.uid
            );
            Refusal::new(RefusalCode::Forbidden, message)
        };
        let controller = self.controller().await?;
        if controller.uid != caller.uid {
            return Err(stranger(""));
        }
        // A user of that number is root's to make on each machine: only where the controller runs it is the controller's.
        let hosts = controller.hosts;
        let Some(address) = caller.address else {
            let is_here = hosts.iter().any(|host| *host == self.context.name.as_str());
            return if is_here { Ok(()) } else { Err(stranger(" from there")) };
        };
        let known = tokio::task::spawn_blocking(move || {
            use std::net::ToSocketAddrs;
            // Who can't be found now may be the one who asks: that is no refusal for good.
            let mut unknown = None;
            for host in &hosts {
                match (host.as_str(), 0).to_socket_addrs() {
                    Ok(mut found) => {
                        if found.any(|found| found.ip().to_canonical() == address.to_canonical()) {
                            return Ok(true);
                        }
                    }
                    Err(error) => unknown = Some(format!("the address of {host} can't be found: {error}")),
                }
            }
            unknown.map_or(Ok(false), Err)
        });
        match known.await.map_err(|error| error.to_string()).flatten() {
            Ok(true) => Ok(()),
            Ok(false) => Err(stranger(" from there")),
            Err(error) => Err(Refusal::new(RefusalCode::Failed, error)),
        }
    }

    /// What is asked for jobs ends with the workload manager's daemon, and with it what it has lost of its places for them. It is asked
    /// every now and then, by one at a time; if it does not answer, the next one asks.
    pub(super) async fn note_start_of_the_controller(&self) {
        let Ok(mut asked) = self.start_asked.try_lock() else { return };
        if asked.is_some_and(|at| at.elapsed() < START_BELIEVED) {
            return;
        }
        let found = self.context.workload_manager.controller().await;
        *asked = Some(Instant::now());
        let Ok(Controller { started, .. }) = found else { return };
        if started != self.context.view().places_lost().since
            && let Err(refused) = self.context.event(Event::ControllerStarted(started)).await
        {
            tracing::debug!(%refused, "the start of the workload manager's daemon is not noted");
        }
    }

    /// Who the workload manager's daemon is. Whoever asks, the workload manager is asked once a minute at most.
    async fn controller(&self) -> Result<Controller, Refusal> {
        let mut known = self.controller.lock().await;
        if let Some((_, controller)) = known.as_ref().filter(|(at, controller)| {
            at.elapsed() < if controller.is_ok() { BELIEVED } else { BELIEVED_UNKNOWN }
        }) {
            return controller.clone().map_err(|error| Refusal::new(RefusalCode::Failed, error));
        }
        let controller = self.context.workload_manager.controller().await.map_err(|error| error.to_string());
        *known = Some((Instant::now(), controller.clone()));
        controller.map_err(|error| Refusal::new(RefusalCode::Failed, error))
    }

    pub(super) async fn burst_buffer(
        self: &Arc<Self>,
        call: Call,
        question: BurstBufferQuestion,
        caller: Caller,
    ) -> Result<BurstBufferAnswer, Refusal> {
        self.is_the_controller(caller).await?;
        if matches!(call, Call::DataIn | Call::Teardown) {
            self.note_start_of_the_controller().await;
        }
        let until = Instant::now() + Duration::from_millis(question.patience_ms).min(LONGEST_WAIT);
        let id = match call {
            Call::Setup | Call::DataIn | Call::PreRun => {
                match self.begins(call, question.job, until).await? {
                    Ok(id) => id,
                    Err(answer) => return Ok(answer),
                }
            }
            Call::PostRun | Call::DataOut | Call::Teardown => {
                let Some(job) = self.with_burst_buffer(call, question.job) else {
                    // After a lost journal, results may be on nodes that have not answered: they are not home for that.
                    let queued = self.context.queue.of_number(question.job);
                    let elsewhere = self.may_be_elsewhere(queued.as_ref()).filter(|_| call == Call::DataOut);
                    return Ok(elsewhere
                        .map_or_else(|| answer(Verdict::Done, ""), |why| answer(Verdict::Later, why)));
                };
                if call == Call::Teardown && question.hurry {
                    self.is_in_a_hurry(&job).await;
                }
                if call != Call::DataOut {
                    self.tell(call, &job).await?;
                }
                job.id
            }
        };
        let must_not_last = call == Call::DataOut
            && (self.stage_outs.fetch_add(1, Ordering::Relaxed) >= WAITING_STAGE_OUTS || question.in_the_way);
        let _counted = (call == Call::DataOut).then(|| Counted(&self.stage_outs));
        // Slurm would never start a job whose call ends without an answer.
        if call == Call::DataIn && (question.in_the_way || question.last) {
            self.context.event(Event::MustNotWait(id)).await.map_err(refused)?;
        }
        let (mut changed, mut is_over, mut starts_anew) = (self.context.watch(), false, None);
        loop {
            let job = self.context.job(id);
            let goes_on = || {
                let is_known = (must_not_last || is_over) && job.is_some();
                is_known
                    .then(|| answer(Verdict::Kept, "staging out goes on, and Slurm is told when it is over"))
            };
            let mut found = decided(call, job.as_ref()).or_else(goes_on);
            if call == Call::DataOut && found.as_ref().is_some_and(|found| found.verdict == Verdict::Kept) {
                // A job that is started anew has to wait for its former results, whatever becomes of them: of such a job Slurm
                // ends no stage-out that has failed, and would never start it.
                let starts_anew = match starts_anew {
                    Some(known) => known,
                    None => *starts_anew.insert(self.starts_anew(id, until).await),
                };
                found = found.filter(|_| !starts_anew || is_over);
            }
            if let Some(found) = found {
                if found.verdict == Verdict::Kept
                    && let Some(job) = job.filter(|_| call == Call::DataOut)
                {
                    // Before it is answered: who is told that it is kept is told of its end.
                    self.tell(call, &job).await?;
                }
                if matches!(found.verdict, Verdict::Failed | Verdict::Kept) {
                    self.has_told(id.job, until).await;
                }
                if call == Call::DataIn && matches!(found.verdict, Verdict::Done | Verdict::OnDisk) {
                    self.wake_the_queue_for(id);
                }
                return Ok(found);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || tokio::time::timeout(left, changed.changed()).await.is_err() {
                if call == Call::DataOut && question.last && !is_over {
                    is_over = true;
                    continue;
                }
                let message =
                    job.map(|job| if job.waits_for.is_empty() { job.message } else { job.waits_for });
                return Ok(answer(Verdict::Later, message.unwrap_or_default()));
            }
        }
    }

    /// What is asked for a job that has not started: what the queue shows of it is told. Returns which life of the job it is,
    /// or what to answer at once.
    async fn begins(
        self: &Arc<Self>,
        call: Call,
        number: JobId,
        until: Instant,
    ) -> Result<Result<Incarnation, BurstBufferAnswer>, Refusal> {
        let snapshot = tokio::time::timeout_at(until.into(), self.context.queue.fresh()).await;
        let Ok(snapshot) = snapshot else {
            return Ok(Err(answer(Verdict::Later, "the queue can't be seen")));
        };
        if let Some(fault) = snapshot.fault {
            return Ok(Err(answer(Verdict::Later, fault)));
        }
        let Some(job) = snapshot.jobs.iter().find(|job| job.id.job == number) else {
            return Ok(Err(answer(Verdict::OnDisk, "")));
        };
        let seen = match queue::see(&self.context, job).await {
            Ok(seen) if seen.request.is_some() => seen,
            Ok(_) => return Ok(Err(answer(Verdict::OnDisk, ""))),
            Err(error) => return Ok(Err(answer(Verdict::Later, error.to_string()))),
        };
        let id = seen.job.id;
        let is_of_before = |job: Job| matches!(job.job_state, JobState::Demoted | JobState::Finished);
        let mut changed = self.context.watch();
        while self.context.job(id).is_some_and(is_of_before) {
            // What was made for it before is being removed.
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || tokio::time::timeout(left, changed.changed()).await.is_err() {
                return Ok(Err(answer(Verdict::Later, "what was made for it before is being removed")));
            }
        }
        self.context.event(Event::BurstBuffer { call, seen: Box::new(seen) }).await.map_err(refused)?;
        Ok(Ok(id))
    }

    /// The life of a job whose burst buffer the workload manager is about to end: the oldest that has one, as a later life
    /// begins after its end. Results are waited for also if nobody knows any more that the job has one.
    fn with_burst_buffer(&self, call: Call, number: JobId) -> Option<Job> {
        let view = self.context.view();
        let lives = view.jobs().range(Incarnation::of_number(number)).map(|(_, job)| job);
        let is_it = |job: &&Arc<Job>| job.burst_buffer.is_live() || call == Call::DataOut && job.results;
        lives.filter(is_it).min_by_key(|job| job.id).map(|job| Job::clone(job))
    }

    /// Whether a later life of a job is in the queue; yes if that can't be seen in time.
    async fn starts_anew(&self, id: Incarnation, until: Instant) -> bool {
        let fresh = tokio::time::timeout_at(until.into(), self.context.queue.fresh()).await;
        let Ok(snapshot) = fresh else { return true };
        if snapshot.fault.is_some() {
            return true;
        }
        snapshot.jobs.iter().any(|queued| queued.id.is_same_job(id) && queued.id.restarts > id.restarts)
    }

    /// Slurm takes the message of this answer for the reason why the job waits, and every later change of the job, also of its
    /// comment, takes that reason away. So what the job's user is told stands in the comment before.
    async fn has_told(&self, job: JobId, until: Instant) {
        if tokio::time::timeout_at(until.into(), self.context.told(job)).await.is_err() {
            tracing::debug!(%job, "Slurm is answered, though it was not told yet what its user should know");
        }
    }

    /// Slurm does not wait for a job's results any more. It says the same for jobs that have not started, and of a job that was to be
    /// started anew, whose former life's results are still on their way, when that is cancelled.
    async fn is_in_a_hurry(self: &Arc<Self>, job: &Job) {
        let waits_for_results = matches!(job.burst_buffer, BurstBuffer::PostRun | BurstBuffer::Kept);
        if self.context.config().scheduler.hurry == Hurry::Keep || !job.results || !waits_for_results {
            return;
        }
        let fresh = tokio::time::timeout(WAITING_FOR_A_LOOK, self.context.queue.fresh()).await;
        let is_this_life = fresh.is_ok_and(|snapshot| {
            snapshot.fault.is_none() && snapshot.jobs.iter().any(|queued| queued.id == job.id)
        });
        if !is_this_life {
            return;
        }
        let abandon = Event::Abandon { job: job.id, by: "scancel --hurry".to_owned() };
        if let Err(refused) = self.context.event(abandon).await {
            tracing::warn!(job = job.id.key(), %refused, "its results are not given up, though it was ended by `scancel --hurry`");
        }
    }

    /// Has Slurm look at its queue once it knows that a job's input is there. It does so by itself only for jobs whose burst buffers
    /// have a size (slurmctld 22.05, `_start_stage_in`); others wait for its next look, which may be a minute away, or for a change of
    /// any job. One such change serves all who are answered until then.
    fn wake_the_queue_for(self: &Arc<Self>, id: Incarnation) {
        /// So long it takes from the answer until slurmctld has noted it; and, if a call of another job keeps it from noticing the end,
        /// until that one has ended as well.
        const NOTED: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(3)];
        {
            let mut waking = self.waking();
            waking.answered.push(id);
            if std::mem::replace(&mut waking.is_under_way, true) {
                return;
            }
        }
        let awake = Awake(Arc::clone(self));
        tokio::spawn(async move {
            loop {
                let answered = {
                    let mut waking = awake.0.waking();
                    if waking.answered.is_empty() {
                        waking.is_under_way = false;
                        return;
                    }
                    std::mem::take(&mut waking.answered)
                };
                for pause in NOTED {
                    tokio::time::sleep(pause).await;
                    wake_the_queue(&awake.0.context, &answered).await;
                }
            }
        });
    }

    fn waking(&self) -> MutexGuard<'_, Waking> {
        self.waking.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    async fn tell(&self, call: Call, job: &Job) -> Result<(), Refusal> {
        let seen = queue::known(job);
        self.context.event(Event::BurstBuffer { call, seen: Box::new(seen) }).await.map_err(refused)
    }
}

/// Whose `data_in` was answered, for whom Slurm is to look at its queue.
#[derive(Default)]
pub(super) struct Waking {
    answered: Vec<Incarnation>,
    /// Whether somebody sees to it.
    is_under_way: bool,
}

/// Who sees to it, as long as that goes on.
struct Awake(Arc<Api>);

impl Drop for Awake {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.waking().is_under_way = false;
        }
    }
}

/// Changes one of those that wait for nodes still in nothing but the line that is ours.
async fn wake_the_queue(context: &Arc<Context>, answered: &[Incarnation]) {
    /// So many are looked at: where the site writes lines of its own, none is ours.
    const MOST: usize = 3;
    if context.config().scheduler.simulate.is_some() {
        return;
    }
    let waiting = answered.iter().rev().filter_map(|id| {
        let job = context.job(*id)?;
        (job.job_state == JobState::Ondeck && !job.hold.is_held()).then_some(job)
    });
    for job in waiting.take(MOST) {
        let details = match context.workload_manager.details(job.id.job).await {
            Ok(details) => details,
            // It may be gone; another one may wait still.
            Err(error) => {
                tracing::debug!(job = job.id.key(), %error, "Slurm is not woken for it");
                continue;
            }
        };
        let line = details.admin_comment;
        // Somebody else's is not touched; nor is a job that has been started, or cancelled, since.
        if details.state == "PENDING" && (line.is_empty() || line.starts_with("ondeck: ")) {
            let text = if job.message.is_empty() { "Slurm may start it".to_owned() } else { job.message };
            context.say(job.id, text);
            return context.told(job.id.job).await;
        }
    }
}

/// Whether a job must not run without its RAM disk: what its stage-in script has made is nowhere else, and its user has not given
/// that up. Others find on disk what they read.
fn must_not_run_on_disk(job: &Job) -> bool {
    job.fails_without_its_input() && !job.hold.is_released_by_others()
}

/// What is to be answered by the state of a job; nothing while it is to be waited for.
fn decided(call: Call, job: Option<&Job>) -> Option<BurstBufferAnswer> {
    let done = |message: &str| Some(answer(Verdict::Done, message));
    let Some(job) = job else { return done("") };
    let is_kept =
        job.results && matches!(job.rsa_state, RsaState::Held | RsaState::Lost) && !job.backing_off();
    match call {
        Call::Setup | Call::PostRun => done(""),
        Call::DataIn if job.burst_buffer < BurstBuffer::Answered => None,
        Call::DataIn if job.rsa_state == RsaState::Ready || job.hold.is_held() => done(&job.message),
        Call::DataIn if job.fails_without_its_input() => Some(answer(Verdict::Failed, job.message.clone())),
        Call::DataIn => Some(answer(Verdict::OnDisk, job.message.clone())),
        Call::PreRun if job.burst_buffer < BurstBuffer::Started => None,
        Call::PreRun if job.rsa_state.is_shown() => done(""),
        Call::PreRun if must_not_run_on_disk(job) => Some(answer(Verdict::Failed, job.message.clone())),
        Call::PreRun => Some(answer(Verdict::OnDisk, job.message.clone())),
        Call::DataOut if is_kept => Some(answer(Verdict::Kept, job.message.clone())),
        Call::DataOut if job.results || job.job_state != JobState::Finished => None,
        Call::DataOut => done(&job.message),
        // Also while they are staged out: nobody gives them up by ending a job in a hurry.
        Call::Teardown if job.results => Some(answer(Verdict::Kept, job.message.clone())),
        // It may be set up again in a minute.
        Call::Teardown if job.job_state == JobState::Ondeck => done(""),
        Call::Teardown if job.allocation.is_some() => None,
        Call::Teardown => done(""),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::PathBuf;

    use ondeck_core::schedule::{Hold, ObservedJob, Schedule, Site, Time};
    use ondeck_core::{Epoch, Request, WaitPolicy};

    use super::*;
    use crate::samples::queued;

    /// A job with its nodes, and no RAM disk.
    fn started(wait: WaitPolicy, stage_in: Option<PathBuf>) -> Job {
        let id = Incarnation { job: JobId(7), submitted: 1, restarts: 0 };
        let data_in = vec!["/in".into()];
        let request = Request { data_in, wait: Some(wait), stage_in, ..Request::default() };
        let job = queued(id);
        let seen = ObservedJob { job, request: Some(request), work_dir: "/".into(), io_nodes: Vec::new() };
        let mut schedule = Schedule::new(Site::default(), Vec::new(), Default::default(), 0, Epoch(0));
        for call in [Call::Setup, Call::DataIn, Call::PreRun] {
            let event = Event::BurstBuffer { call, seen: Box::new(seen.clone()) };
            schedule.handle(Time(1000), event).unwrap();
        }
        schedule.jobs().values().next().unwrap().clone()
    }

    #[test]
    fn a_job_that_must_have_what_its_script_makes_does_not_run_without_it_unless_that_was_given_up() {
        let verdict = |job: &Job| decided(Call::PreRun, Some(job)).unwrap().verdict;
        let script = Some(PathBuf::from("/unpack"));
        // What these read is on disk.
        assert_eq!(verdict(&started(WaitPolicy::Disk, None)), Verdict::OnDisk);
        assert_eq!(verdict(&started(WaitPolicy::Hold, None)), Verdict::OnDisk);
        assert_eq!(verdict(&started(WaitPolicy::Disk, script.clone())), Verdict::OnDisk);
        let needs = started(WaitPolicy::Hold, script);
        for hopeless in [false, true] {
            assert_eq!(verdict(&Job { hopeless, ..needs.clone() }), Verdict::Failed);
        }
        assert_eq!(verdict(&Job { hold: Hold::ReleasedByHand, ..needs }), Verdict::OnDisk);
    }
}
