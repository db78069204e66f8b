//! Laying a RAM disk over the output of a job that runs already.
//!
//! What is on disk is copied in rounds while the job goes on, until a round takes no time. Then all of its processes are
//! stopped on all of its nodes, the last round is copied, the RAM disk is mounted on all nodes, and they go on: for the job
//! it was always there. Each node by itself lets the job go on after a second, and takes away before what was mounted,
//! unless it has been told to keep it. It is told so only when all nodes have mounted; so none or all of them keep it.
//!
//! What remains is a node whose agent is killed between obeying that order and saying so: then it is not known what is
//! mounted there, all others take theirs away, and what the job wrote to RAM on that node is brought home.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::{RefusalCode, Step, TaskWork};
use ondeck_core::schedule::{Event, Fault, Job, JobState, Outcome, Purpose, Work};
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Layout, NodeName, RamDiskId, WaitPolicy};
use ondeck_fleet::NodeFault;
use ondeck_fleet::late::{OvermountExtent, has_refused, is_held};
use ondeck_ramdisk::Secret;
use ondeck_wlm::JobDetails;

use super::directories::{directories, overmounts};
use super::outcome::{self, failed, words};
use super::staging::Staging;
use crate::context::Context;

/// A round that takes no longer is the last one before the job is stopped.
const SHORT: Duration = Duration::from_millis(300);

/// How often it is looked whether the job still runs.
const LOOK: Duration = Duration::from_millis(200);

/// The most rounds of one attempt.
const ROUNDS: usize = 12;

/// How often it is tried to stop the job in one attempt, when what was in the way is over at once.
const TRIES: usize = 4;

/// Before it is.
const PAUSE: Duration = Duration::from_millis(500);

/// From the order to stop: when the last round must be done, when all must have mounted, and when all must have been told
/// to keep it. A node takes everything away 850 ms after it has stopped.
const COPIED: Duration = Duration::from_millis(500);
const MOUNTED: Duration = Duration::from_millis(650);
const KEPT: Duration = Duration::from_millis(800);

/// So much time must be left for it.
const NEEDED: Duration = Duration::from_secs(3);

/// How the names of the tasks begin that copy.
const ROUND: &str = "round-";

/// Why it was not covered.
enum LateFailure {
    /// It is as before, and worth another try at once.
    AtOnce(String),
    /// It is as before.
    Later(String),
    /// It is as before, and so is what the user has to change.
    NeedsUser(String),
    /// It is as before, and this RAM disk will never be shown: a node has forgotten it.
    Forgotten(String),
    /// It is not known what some nodes show.
    Doubtful(String),
}

/// Covers the output of a job that runs, on all of its nodes or on none.
pub(super) async fn mount(
    context: &Arc<Context>,
    job: &Job,
    id: &RamDiskId,
    layout: &Layout,
    secret: &Secret,
    until: Instant,
) -> Outcome {
    let late = Late { context, job, id, layout, secret, until };
    let later = |why: String| Outcome::Later { why: plain(&why, MESSAGE) };
    if job.purpose != Purpose::Output {
        return late.begun().await;
    }
    match context.fleet.overmounted(id, &job.io_nodes, until).await {
        Ok(OvermountExtent::Nowhere) => {}
        // A former scheduler has done it.
        Ok(OvermountExtent::Everywhere) => return Outcome::Done(outcome::said(job, Work::Mount)),
        Ok(OvermountExtent::Partly) => {
            return failed("it was mounted on some of the job's nodes only", Fault::Transient);
        }
        Err(faults) => return later(words(&faults)),
    }
    let mut tries = 0;
    loop {
        tries += 1;
        let done = match late.prepare().await {
            Ok(()) => late.once(tries).await,
            Err(not) => Err(not),
        };
        match done {
            Ok(text) => return Outcome::Done(text),
            Err(LateFailure::AtOnce(why)) if tries < TRIES && Instant::now() + NEEDED < until => {
                tracing::info!(job = %job.id, why, "its output was not covered; it is tried again at once");
                tokio::time::sleep(PAUSE).await;
            }
            Err(LateFailure::AtOnce(why) | LateFailure::Later(why)) => {
                let running = late.stop_rounds().await;
                return later(if running.is_empty() { why } else { format!("{why}; {}", words(&running)) });
            }
            Err(LateFailure::NeedsUser(why)) => return Outcome::Refused { why, fault: Fault::NeedsUser },
            Err(LateFailure::Forgotten(why)) => return Outcome::Refused { why, fault: Fault::Transient },
            Err(LateFailure::Doubtful(why)) => return failed(why, Fault::Transient),
        }
    }
}

struct Late<'a> {
    context: &'a Arc<Context>,
    job: &'a Job,
    id: &'a RamDiskId,
    layout: &'a Layout,
    secret: &'a Secret,
    until: Instant,
}

impl Late<'_> {
    fn shown_on(&self) -> &[NodeName] {
        &self.job.io_nodes
    }

    /// The job's Prologs have given up, and its input can't be shown any more. But all of its nodes may show it since
    /// before they did: then the job has worked in it from the beginning, and keeps it.
    async fn begun(&self) -> Outcome {
        let fleet = &self.context.fleet;
        loop {
            let shown = fleet.overmounted(self.id, self.shown_on(), self.until).await;
            return match shown {
                Ok(OvermountExtent::Nowhere) => {
                    let why = "the job has started before its RAM disk was mounted".to_owned();
                    Outcome::Refused { why, fault: Fault::Transient }
                }
                Ok(OvermountExtent::Everywhere) => {
                    // Where the job has begun on disk, this is refused.
                    let faults =
                        fleet.each_must(self.layout, self.shown_on(), &Step::Commit, self.until).await;
                    if !faults.is_empty() {
                        return failed(words(&faults), Fault::Transient);
                    }
                    Outcome::Done(outcome::said(self.job, Work::Mount))
                }
                Ok(OvermountExtent::Partly) => {
                    failed("it was mounted on some of the job's nodes only", Fault::Transient)
                }
                // What is taken away from a job that has it costs more than to wait.
                Err(_) if Instant::now() + NEEDED < self.until => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(faults) => failed(words(&faults), Fault::Transient),
            };
        }
    }

    /// All that can be done before anything is copied.
    async fn prepare(&self) -> Result<(), LateFailure> {
        let faults = self.context.fleet.take_away(self.layout, self.shown_on(), self.until).await;
        if !faults.is_empty() {
            return Err(LateFailure::AtOnce(words(&faults)));
        }
        let running = self.stop_rounds().await;
        if !running.is_empty() {
            return Err(LateFailure::AtOnce(words(&running)));
        }
        let faults =
            self.context.fleet.mount_clients(self.layout, self.secret, self.shown_on(), self.until).await;
        if !faults.is_empty() {
            let forgotten = |fault: &NodeFault| fault.error.code() == Some(RefusalCode::Fenced);
            let why = words(&faults);
            return Err(if faults.iter().any(forgotten) {
                LateFailure::Forgotten(why)
            } else {
                LateFailure::AtOnce(why)
            });
        }
        let could = Step::CouldFreeze { job: self.job.id.job.0 };
        let faults = self.context.fleet.each_must(self.layout, self.shown_on(), &could, self.until).await;
        if !faults.is_empty() {
            // Its first step may not have begun.
            return Err(LateFailure::AtOnce(words(&faults)));
        }
        self.open_targets().await
    }

    /// Has all nodes open what will be covered.
    async fn open_targets(&self) -> Result<(), LateFailure> {
        let open = Step::OpenTargets { overmounts: overmounts(self.job) };
        let faults = self.context.fleet.each_must(self.layout, self.shown_on(), &open, self.until).await;
        if faults.is_empty() {
            return Ok(());
        }
        let why = words(&faults);
        if faults.iter().any(|fault| is_held(&fault.error)) {
            Err(LateFailure::NeedsUser(why))
        } else {
            Err(LateFailure::AtOnce(why))
        }
    }

    /// Copies what has changed on disk since it was last copied, removals included; tells how long it took.
    async fn round(&self, name: &str, moving: bool) -> Result<Duration, String> {
        let nodes: Vec<NodeName> = self.job.allocation.iter().flat_map(|found| found.nodes.clone()).collect();
        let node = nodes.first().cloned().ok_or("it has no RSA nodes")?;
        let staging = Staging::new(self.context, self.job, self.id, nodes, self.until);
        let work = TaskWork::Fill { directories: directories(self.job), script: None, moving };
        let began = Instant::now();
        let mut task = std::pin::pin!(staging.task(&node, name, work, None));
        loop {
            match tokio::time::timeout(LOOK, &mut task).await {
                Ok(Ok(_)) => return Ok(began.elapsed()),
                Ok(Err(Outcome::Failed { why, .. })) => return Err(why),
                Ok(Err(_)) => return Err("it could not be copied".to_owned()),
                // Its Epilogs wait for this to end.
                Err(_) if !self.is_running() => return Err("the job has ended".to_owned()),
                Err(_) => {}
            }
        }
    }

    fn is_running(&self) -> bool {
        let job = self.context.job(self.job.id);
        job.is_some_and(|job| job.job_state == JobState::Running && job.ending.is_none())
    }

    /// Ends what still copies.
    async fn stop_rounds(&self) -> Vec<NodeFault> {
        let servers: Vec<NodeName> =
            self.job.allocation.iter().flat_map(|found| found.nodes.clone()).collect();
        self.context.fleet.stop_tasks(&servers, self.id, ROUND).await
    }

    async fn once(&self, attempt: usize) -> Result<String, LateFailure> {
        let number = self.job.under_way.map_or(0, |order| order.number);
        let name = |round: usize| format!("{ROUND}{number}-{attempt}-{round}");
        let long = |took: Duration| {
            LateFailure::Later(format!(
                "to copy what changes there takes {:.1} s, and must not take longer than {:.1} s",
                took.as_secs_f64(),
                SHORT.as_secs_f64()
            ))
        };
        let (mut last, mut rounds) = (Duration::ZERO, 0);
        loop {
            let began = Instant::now();
            // It must not be taken for a mount that failed because this takes long.
            let end = self.until.checked_sub(NEEDED).unwrap_or(began);
            if rounds == ROUNDS || began + last > end {
                return Err(long(last));
            }
            last = match tokio::time::timeout_at(end.into(), self.round(&name(rounds), true)).await {
                Ok(took) => took.map_err(LateFailure::Later)?,
                Err(_) => return Err(long(began.elapsed())),
            };
            rounds += 1;
            if last <= SHORT {
                break;
            }
        }
        self.open_targets().await?;
        match self.context.workload_manager.details(self.job.id.job).await {
            Ok(details) if details.state == "RUNNING" => {}
            Ok(details) => return Err(LateFailure::Later(format!("the job is {}", details.state))),
            Err(error) => return Err(LateFailure::Later(error.to_string())),
        }
        let began = Instant::now();
        let overmounted = self.while_stopped(began, &name(ROUNDS)).await;
        if overmounted.is_err() {
            self.undo(began).await;
        }
        overmounted
    }

    /// From the order to stop to the order to go on.
    async fn while_stopped(&self, began: Instant, last_round: &str) -> Result<String, LateFailure> {
        let fleet = &self.context.fleet;
        let job = self.job.id.job.0;
        self.must(&Step::Freeze { job }, began + COPIED).await?;
        let stopped = began.elapsed();
        let copied = tokio::time::timeout_at((began + COPIED).into(), self.round(last_round, false)).await;
        let copied = match copied {
            Ok(Ok(took)) => took,
            Ok(Err(why)) => return Err(LateFailure::Later(why)),
            Err(_) => {
                return Err(LateFailure::AtOnce(
                    "the last of it was not copied while the job could be stopped".into(),
                ));
            }
        };
        self.must(&Step::OvermountFrozen, began + MOUNTED).await?;
        let mounted = began.elapsed();
        let kept = fleet.each_must(self.layout, self.shown_on(), &Step::Keep, began + KEPT).await;
        if !kept.is_empty() {
            // Those who keep it don't, while nothing of the job runs.
            let deadline = began + KEPT + Duration::from_millis(100);
            let left = fleet.take_away(self.layout, self.shown_on(), deadline).await;
            let why = words(&kept);
            // One that has refused to keep it takes it away by itself.
            let refused =
                |node: &NodeName| kept.iter().any(|fault| fault.node == *node && has_refused(&fault.error));
            let doubtful = left.iter().any(|fault| !refused(&fault.node));
            return Err(if doubtful { LateFailure::Doubtful(why) } else { LateFailure::AtOnce(why) });
        }
        let said = fleet.each(self.layout, self.shown_on(), &Step::Thaw, Instant::now() + NEEDED).await;
        let longest = said.iter().filter_map(|(_, said)| said.as_ref().ok()?.stopped_ms).max();
        tracing::info!(
            job = %self.job.id,
            stopping_ms = stopped.as_millis() as u64,
            copying_ms = copied.as_millis() as u64,
            mounted_ms = mounted.as_millis() as u64,
            stopped_ms = longest,
            "its output was covered while it was stopped"
        );
        let text = outcome::said(self.job, Work::Mount);
        let longest = longest.map_or_else(|| "for a moment".to_owned(), |ms| format!("for {ms} ms"));
        Ok(format!("{text} (output), while its processes were stopped {longest}"))
    }

    async fn must(&self, step: &Step, deadline: Instant) -> Result<(), LateFailure> {
        let faults = self.context.fleet.each_must(self.layout, self.shown_on(), step, deadline).await;
        if faults.is_empty() {
            return Ok(());
        }
        let why = words(&faults);
        Err(if faults.iter().any(|fault| is_held(&fault.error)) {
            LateFailure::Later(why)
        } else {
            LateFailure::AtOnce(why)
        })
    }

    /// Lets the job go on; nothing stays that was not to be kept. Where nobody answers, it goes on by itself.
    async fn undo(&self, began: Instant) {
        let fleet = &self.context.fleet;
        // A node where the job is not stopped any more has nothing to undo.
        let _ = fleet.each(self.layout, self.shown_on(), &Step::Thaw, began + NEEDED).await;
        let running = self.stop_rounds().await;
        let left = fleet.take_away(self.layout, self.shown_on(), Instant::now() + NEEDED).await;
        if !running.is_empty() || !left.is_empty() {
            // The next attempt begins with the same.
            tracing::warn!(job = %self.job.id, "{}; {}", words(&running), words(&left));
        }
    }
}

/// What the workload manager knows of a job. One that is out of breath is asked again, but the RAM disk does not wait for it
/// for ever.
async fn details(context: &Arc<Context>, job: &Job) -> Option<JobDetails> {
    const ATTEMPTS: u32 = 3;
    for attempt in 1..=ATTEMPTS {
        match context.workload_manager.details(job.id.job).await {
            Ok(details) => return Some(details),
            Err(error) => tracing::warn!(job = %job.id, attempt, %error, "can't ask where it writes"),
        }
    }
    None
}

/// Tells a job's user, before anything is built, why its output can't be covered once it runs: its working directory or its
/// standard output is in it, and stays open.
pub(super) async fn warn(context: &Arc<Context>, job: &Job) {
    if job.request.wait == Some(WaitPolicy::Hold) || !job.wants_out() {
        return;
    }
    let Some(details) = details(context, job).await else { return };
    let outputs = &job.request.data_out;
    let within = |path: &std::path::Path| outputs.iter().any(|output| path.starts_with(output));
    let mut words = Vec::new();
    if within(&details.work_dir) {
        words.push(format!("its working directory {}", details.work_dir.display()));
    }
    // Without a file of their own, errors go to the same.
    let std_err = details.std_err.filter(|path| details.std_out.as_ref() != Some(path));
    if let Some(path) = details.std_out.filter(|path| within(path)) {
        words.push(format!("its standard output {}", path.display()));
    }
    if let Some(path) = std_err.filter(|path| within(path)) {
        words.push(format!("its standard error {}", path.display()));
    }
    if words.is_empty() {
        return;
    }
    let text = format!(
        "{} lies in its output: if it starts before its RAM disk is ready, it works on disk; #RSA_WAIT=hold makes it wait",
        words.join(" and ")
    );
    let _ = context.event(Event::Noticed { job: job.id, text: plain(&text, MESSAGE) }).await;
}
