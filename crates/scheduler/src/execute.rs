//! Doing what was decided, by the agents and the workload manager. All of it may be done twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ondeck_agent::fleet::{BuildError, NodeFault, NotCovered, Plan, Size};
use ondeck_api::CallError;
use ondeck_api::scheduler::Transfer;
use ondeck_api::wire::{
    Cover, Directory, LocalReport, RefusalCode, Release, Share, TaskReport, TaskRequest, TaskState,
    Work as TaskWork,
};
use ondeck_core::allocation::JobTag;
use ondeck_core::schedule::{
    Action, Event, Fault, Job, JobState, LockIn, Outcome, Prolog, Purpose, Task, Work,
};
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Bytes, EngineKind, Incarnation, Layout, NodeName, QueuedJob, RamDiskId, Rate, Standing};
use ondeck_ramdisk::Secret;
use ondeck_wlm::{WlmError, WorkloadManager};
use tokio::task::JoinSet;

use crate::daemon::{Daemon, now};
use crate::parts;
use crate::queue::Sight;

/// How long one question after a task waits for its end.
const TASK_WAIT: Duration = Duration::from_secs(1);

/// How long an agent that does not answer is asked again before a task of it is given up.
const AGENT_PATIENCE: Duration = Duration::from_secs(20);

/// How long is waited before an agent is asked again.
const AGENT_PAUSE: Duration = Duration::from_millis(300);

/// How long a stage-out waits for the names of what it brings home: they are of use only if a node is lost meanwhile.
const COUNTING: Duration = Duration::from_secs(10);

/// The name of the task that fills a RAM disk.
const FILL: &str = "fill";

/// The name of the task that fills it when the job has started meanwhile.
const FILL_AGAIN: &str = "fill-again";

/// How long a job that has started is compared with the disk.
const LATE_LOOK: Duration = Duration::from_secs(600);

/// A catch-up ends so long before the mount that it belongs to counts as failed.
const CATCH_UP_MARGIN: Duration = Duration::from_secs(2);

/// The name of the task that adds what was written until the RAM disk was shown.
const CATCH_UP: &str = "catch-up";

/// The time between two looks at a job that is being requeued.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// How often it is asked again how much of a RAM disk is free.
const ROOM_LOOKS: u32 = 3;

/// How the names of tasks begin that bring results home.
const HOME: &str = "home-";

pub(crate) fn failed(why: impl Into<String>, fault: Fault) -> Outcome {
    Outcome::Failed { why: why.into(), blame: Vec::new(), fault }
}

/// Does the work of a task to its end.
pub(crate) async fn work(daemon: &Arc<Daemon>, job: &Job, task: Task) -> Outcome {
    let (Some(allocation), Some(id)) = (&job.allocation, job.ramdisk()) else {
        return failed("it has no RSA nodes", Fault::Again);
    };
    if let Some(pretended) = daemon.config().scheduler.simulate {
        tokio::time::sleep(pretended).await;
        return Outcome::Done(format!("{} (simulated)", said(job, task.work)));
    }
    let until = Instant::now() + task.until.since(now());
    // Who does not obey refuses what is ordered, and says why.
    daemon.take_charge(allocation.nodes.iter().chain(&job.io_nodes)).await;
    match task.work {
        Work::Construct => construct(daemon, job, &id, until).await,
        Work::StageIn => {
            // It makes input; without any there is nothing to make.
            let script = job.request.stage_in.clone().filter(|_| job.purpose != Purpose::Output);
            let work =
                |moving| TaskWork::Fill { directories: directories(job), script: script.clone(), moving };
            let nodes = allocation.nodes.clone();
            // A program that runs changes its output while it is copied. It is looked at once more before it is covered.
            let moving = |job: &Job| {
                let runs = job.job_state == JobState::Running && job.prolog == Prolog::Over;
                runs && job.purpose == Purpose::Output
            };
            let filled = stage(daemon, job, nodes.clone(), &id, FILL, work(moving(job)), until).await;
            let now = daemon.job(job.id);
            match (filled, job.job_state) {
                (Outcome::Failed { .. }, _) if !moving(job) && now.as_ref().is_some_and(moving) => {
                    stage(daemon, job, nodes, &id, FILL_AGAIN, work(true), until).await
                }
                (Outcome::Failed { why, blame, .. }, _)
                    if job.purpose == Purpose::Output
                        && now.is_some_and(|now| now.job_state == JobState::Running) =>
                {
                    // It may be the job itself that was in the way.
                    Outcome::Failed { why, blame, fault: Fault::Again }
                }
                (Outcome::Done(text), JobState::Running) => Outcome::Done(text),
                (Outcome::Done(text), _) => match too_tight(daemon, job, &id).await {
                    Ok(Some(why)) => Outcome::Tight(why),
                    Ok(None) => Outcome::Done(text),
                    Err(why) => failed(why, Fault::Again),
                },
                (other, _) => other,
            }
        }
        Work::StopStageIn => stop(daemon, &allocation.nodes, &id).await,
        Work::Mount => mount(daemon, job, &id, until).await,
        Work::Unmount { force } => unmount(daemon, job, &id, force, until).await,
        Work::StageOut if job.salvage => salvage(daemon, job, task, &id, until).await,
        Work::StageOut => {
            let (asks, of) = (Arc::clone(daemon), job.clone());
            let counted = tokio::spawn(async move { parts::count(&asks, &of).await });
            // An attempt that was given up because nothing was heard of it may go on, and would write to the same files.
            let ended = end_earlier(daemon, &allocation.nodes, &id);
            let (ended, _) = tokio::join!(ended, tokio::time::timeout(COUNTING, counted));
            if let Err(why) = ended {
                return failed(why, Fault::Again);
            }
            // What was shown for a moment only is no more than a part of the job's output.
            let script = job.request.stage_out.clone().filter(|_| !job.torn);
            let pack = job.request.pack.filter(|_| !job.torn && script.is_none());
            let work = TaskWork::BringHome { directories: directories(job), script, pack, salvage: false };
            // Each attempt is a task of its own, on the next of its nodes.
            let name = format!("{HOME}{}", task.number);
            let mut nodes = allocation.nodes.clone();
            let next = job.stage_outs as usize % nodes.len();
            nodes.rotate_left(next);
            stage(daemon, job, nodes, &id, &name, work, until).await
        }
        Work::Destroy => destroy(daemon, job, task, &id, &allocation.nodes).await,
    }
}

/// Takes up a task that an earlier daemon had begun.
pub(crate) fn resume(daemon: &Arc<Daemon>, id: Incarnation, task: Task) {
    let daemon = Arc::clone(daemon);
    tokio::spawn(async move {
        let Some(job) = daemon.job(id) else { return };
        let outcome = match task.work {
            // How far it had come is not known; it is removed, and built anew under another epoch.
            Work::Construct if daemon.config().scheduler.simulate.is_none() => {
                failed("the scheduler was started anew while it was being built", Fault::Again)
            }
            _ => match work(&daemon, &job, task).await {
                // The former daemon may have come further than this one.
                Outcome::Refused { why, fault } => failed(why, fault),
                other => other,
            },
        };
        daemon.transfers().remove(&id);
        let _ = daemon.event(Event::Ended { job: id, number: task.number, outcome }).await;
    });
}

/// What the log says when work is done, in the words of the thesis where it has some.
pub(crate) fn said(job: &Job, work: Work) -> String {
    let id = job.id;
    match work {
        Work::Construct => format!("done constructing RSA block for job {id}"),
        Work::StageIn if job.purpose == Purpose::Output => {
            format!("prepared the output directories of job {id}")
        }
        Work::StageIn => format!("finished staging data in for job {id}"),
        Work::StopStageIn => format!("stopped data staging process for job {id}"),
        Work::Mount => format!("mounted the RAMDISK on {} I/O nodes for job {id}", job.io_nodes.len()),
        Work::Unmount { .. } => format!("unmounted the RAMDISK from the I/O nodes of job {id}"),
        Work::StageOut => format!("finished staging data out for job {id}"),
        Work::Destroy => format!("finished destroying RSA block for job {id}"),
    }
}

pub(crate) fn directories(job: &Job) -> Vec<Directory> {
    let found = job.directories(job.purpose).into_iter().enumerate();
    found
        .map(|(index, (path, input, output))| Directory { path, name: index.to_string(), input, output })
        .collect()
}

pub(crate) fn covers(job: &Job) -> Vec<Cover> {
    let found = job.directories(job.purpose).into_iter().enumerate();
    found
        .map(|(index, (path, _, output))| Cover { path, from: index.to_string(), read_only: !output })
        .collect()
}

fn words(faults: &[NodeFault]) -> String {
    let words: Vec<String> = faults.iter().map(ToString::to_string).collect();
    words.join("; ")
}

async fn construct(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId, until: Instant) -> Outcome {
    let Some(allocation) = &job.allocation else { return failed("it has no RSA nodes", Fault::Again) };
    if job.older
        && let Err(outcome) = uses_no_other(daemon, job, id).await
    {
        return outcome;
    }
    crate::late::warn(daemon, job).await;
    let secret = match Secret::new() {
        Ok(secret) => secret,
        Err(error) => return failed(format!("random numbers: {error}"), Fault::Again),
    };
    if let Err(error) = keep_ramdisk(daemon, job.id, id, &secret, None).await {
        return failed(error, Fault::Again);
    }
    // Once, for a reload between two looks would mix two configurations.
    let config = daemon.config();
    let pools = config.scheduler.pools(&config.nodes);
    let pool = pools.values().find(|pool| pool.nodes.contains(&allocation.nodes[0]));
    let plan = Plan {
        name: id.name.clone(),
        engine: engine(daemon, job),
        size: Size::Within(allocation.promise),
        nodes: allocation.nodes.clone(),
        mounts: Vec::new(),
        owner: job.owner,
        replicas: 1,
        device: pool.map_or_else(|| "ram".to_owned(), |pool| pool.device.clone()),
        metadata_device: None,
        simulation: None,
        deadline: until.saturating_duration_since(Instant::now()),
        identity: Some((id.epoch, secret.clone())),
        job: Some(JobTag {
            cluster: daemon.cluster.get().cloned().unwrap_or_default(),
            job: job.id,
            purpose: job.purpose,
            account: job.account.clone(),
            request: job.request.clone(),
            work_dir: job.work_dir.clone(),
        }),
    };
    match daemon.fleet.create(&plan, |_| {}, std::future::pending()).await {
        Ok(built) => {
            if let Err(error) = keep_ramdisk(daemon, job.id, id, &secret, Some(built.layout)).await {
                return failed(error, Fault::Again);
            }
            let text = said(job, Work::Construct);
            Outcome::Done(format!("{text}: {} on {} RSA nodes", built.capacity, allocation.nodes.len()))
        }
        Err(error) => {
            let blame = match &error {
                BuildError::Step { faults, .. } => faults.iter().map(|fault| fault.node.clone()).collect(),
                BuildError::Call(
                    CallError::Unreachable { endpoint, .. } | CallError::Silent { endpoint, .. },
                ) => {
                    let name = endpoint.to_string();
                    allocation.nodes.iter().filter(|node| node.as_str() == name).cloned().collect()
                }
                _ => Vec::new(),
            };
            Outcome::Failed { why: error.to_string(), blame, fault: Fault::Again }
        }
    }
}

/// Whether a job that started before the journal began uses a RAM disk which the journal does not know: its servers may not
/// have answered since, but the job's own nodes show it.
async fn uses_no_other(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId) -> Result<(), Outcome> {
    let of_job: BTreeSet<&NodeName> = job.io_nodes.iter().chain(&job.nodes).collect();
    for node in of_job {
        let known = daemon.fleet.ramdisks_of(node).await.map_err(|error| {
            let why = format!("{node} does not say whether the job uses an earlier RAM disk there: {error}");
            failed(why, Fault::Again)
        })?;
        let is_used = |local: &&LocalReport| {
            local.layout.id.name == id.name
                && local.layout.id.epoch != id.epoch
                && !(local.shown.is_empty() && local.covers.is_empty())
        };
        let Some(used) = known.iter().find(is_used) else { continue };
        let servers: Vec<&str> = used.layout.servers.iter().map(|server| server.node.as_str()).collect();
        let why = format!(
            "it uses its RAM disk of before the scheduler's journal began, as {node} shows, which is on {}: it gets no other \
             one, and goes on with that one, or its results are HELD, when the agents there answer",
            servers.join(", ")
        );
        return Err(failed(why, Fault::Elsewhere));
    }
    Ok(())
}

pub(crate) fn engine(daemon: &Daemon, job: &Job) -> EngineKind {
    job.request.engine.unwrap_or(daemon.config().scheduler.engine)
}

async fn keep_ramdisk(
    daemon: &Arc<Daemon>,
    job: Incarnation,
    id: &RamDiskId,
    secret: &Secret,
    layout: Option<Layout>,
) -> Result<(), String> {
    let (daemon, id, secret) = (Arc::clone(daemon), id.clone(), secret.clone());
    tokio::task::spawn_blocking(move || daemon.brain().store.keep_ramdisk(job, &id, &secret, layout.as_ref()))
        .await
        .map_err(|error| error.to_string())?
        .map_err(|error| error.to_string())
}

async fn kept_ramdisk(daemon: &Arc<Daemon>, id: &RamDiskId) -> Result<(Secret, Layout), String> {
    let (daemon, id) = (Arc::clone(daemon), id.clone());
    let found = tokio::task::spawn_blocking(move || {
        let found = daemon.brain().store.ramdisk(&id);
        found.map(|found| (id, found))
    });
    match found.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())? {
        (_, Some((secret, Some(layout)))) => Ok((secret, layout)),
        (id, _) => Err(format!("the layout of {id} is not known")),
    }
}

/// Less than this is not worth the starting of several tasks.
const WORTH_SHARING: (u64, u64) = (256 << 20, 5000);

/// Copying for a job, by one or more of its RSA nodes.
pub(crate) struct Staging {
    daemon: Arc<Daemon>,
    job: Job,
    id: RamDiskId,
    nodes: Vec<NodeName>,
    until: Instant,
    began: Instant,
    /// How many tasks run at the same time: they share the bandwidth.
    tasks: u64,
    seen: Mutex<BTreeMap<String, TaskReport>>,
    /// Whether it goes on when the work that it belongs to has ended, until there is other work for the job.
    goes_on: bool,
}

/// Stages with all of a job's RSA nodes if that is worth while, and follows it to its end. What has several names, and
/// what belongs to a directory as a whole, is the last task's, on the first node.
async fn stage(
    daemon: &Arc<Daemon>,
    job: &Job,
    nodes: Vec<NodeName>,
    id: &RamDiskId,
    name: &str,
    work: TaskWork,
    until: Instant,
) -> Outcome {
    let mut staging = Staging::new(daemon, job, id, nodes, until);
    let shares = match staging.shares(name, &work).await {
        Ok(shares) => shares,
        Err(outcome) => return outcome,
    };
    let all: Vec<(String, String)> = shares.iter().flatten().cloned().collect();
    let rest = (!all.is_empty()).then_some(Share { index: u32::MAX, entries: all, all_but: true });
    if rest.is_some() {
        staging.tasks = staging.nodes.len() as u64;
    }
    let staging = Arc::new(staging);
    let mut set = JoinSet::new();
    for (index, entries) in shares.into_iter().enumerate().filter(|(_, entries)| !entries.is_empty()) {
        let (staging, name, work) = (Arc::clone(&staging), format!("{name}-{index}"), work.clone());
        let share = Share { index: index as u32, entries, all_but: false };
        set.spawn(async move {
            let node = staging.nodes[index].clone();
            staging.task(&node, &name, work, Some(share)).await
        });
    }
    let mut failed = None;
    while let Some(joined) = set.join_next().await {
        match joined {
            Ok(Ok(_)) => {}
            Ok(Err(outcome)) => failed = Some(outcome),
            Err(error) => failed = Some(self::failed(error.to_string(), Fault::Again)),
        }
    }
    if let Some(outcome) = failed {
        return outcome;
    }
    match staging.task(&staging.nodes[0], name, work, rest).await {
        Ok(last) => {
            staging.tell_of_conflicts().await;
            staging.done(&last)
        }
        Err(outcome) => outcome,
    }
}

/// Saves what is left of a job's results, from one node after the other: each has whole files of its own.
async fn salvage(daemon: &Arc<Daemon>, job: &Job, task: Task, id: &RamDiskId, until: Instant) -> Outcome {
    let nodes = match parts::survivors(daemon, job, id).await {
        Ok(nodes) => nodes,
        Err(why) => return failed(why, Fault::Again),
    };
    if let Err(why) = end_earlier(daemon, &nodes, id).await {
        return failed(why, Fault::Again);
    }
    let staging = Staging::new(daemon, job, id, nodes, until);
    let mut saved: Vec<String> = Vec::new();
    let mut last = None;
    for (index, node) in staging.nodes.iter().enumerate() {
        let work =
            TaskWork::BringHome { directories: directories(job), script: None, pack: None, salvage: true };
        match staging.task(node, &format!("{HOME}{}-{index}", task.number), work, None).await {
            Ok(report) => {
                saved.push(format!("{} files of {node}", report.entries_done));
                last = Some(report);
            }
            Err(outcome) => return outcome,
        }
    }
    let Some(last) = last else { return failed("nothing is left of it", Fault::Again) };
    staging.tell_of_conflicts().await;
    match staging.done(&last) {
        Outcome::Done(text) => Outcome::Salvaged {
            text: format!("{} were saved; {text}", saved.join(", ")),
            from: staging.nodes.clone(),
        },
        other => other,
    }
}

impl Staging {
    /// Copying by one task, which ends with the work that it belongs to.
    pub(crate) fn new(
        daemon: &Arc<Daemon>,
        job: &Job,
        id: &RamDiskId,
        nodes: Vec<NodeName>,
        until: Instant,
    ) -> Staging {
        Staging {
            daemon: Arc::clone(daemon),
            job: job.clone(),
            id: id.clone(),
            nodes,
            until,
            began: Instant::now(),
            tasks: 1,
            seen: Mutex::default(),
            goes_on: false,
        }
    }

    /// What of the copy is whose; nothing if one task is to do it all.
    async fn shares(&self, name: &str, work: &TaskWork) -> Result<Vec<Vec<(String, String)>>, Outcome> {
        let (directories, home) = match work {
            TaskWork::Fill { directories, script: None, .. } => (directories.clone(), false),
            TaskWork::BringHome { directories, script: None, pack: None, .. } => (directories.clone(), true),
            _ => return Ok(Vec::new()),
        };
        if self.nodes.len() < 2 || (!home && directories.iter().all(|directory| directory.output)) {
            return Ok(Vec::new());
        }
        let survey = TaskWork::Survey { directories, home };
        let found = self.task(&self.nodes[0], &format!("{name}-survey"), survey, None).await?.units;
        let (bytes, files) = found.iter().fold((0, 0), |sum, unit| (sum.0 + unit.bytes, sum.1 + unit.files));
        if found.len() < 2 || (bytes < WORTH_SHARING.0 && files < WORTH_SHARING.1) {
            return Ok(Vec::new());
        }
        // The largest first, each to whoever has least. A file costs about as much as this many bytes.
        const FILE: u64 = 64 << 10;
        let mut shares = vec![(0_u64, Vec::new()); self.nodes.len()];
        for unit in found {
            if let Some(least) = shares.iter_mut().min_by_key(|(load, _)| *load) {
                least.0 += unit.bytes + unit.files * FILE;
                least.1.push((unit.directory, unit.entry));
            }
        }
        Ok(shares.into_iter().map(|(_, entries)| entries).collect())
    }

    /// Runs one task on a node, and follows it to its end.
    pub(crate) async fn task(
        &self,
        node: &NodeName,
        name: &str,
        work: TaskWork,
        share: Option<Share>,
    ) -> Result<TaskReport, Outcome> {
        let (daemon, id, until) = (&self.daemon, &self.id, self.until);
        let home = matches!(work, TaskWork::BringHome { .. });
        let config = daemon.config();
        let site = &config.scheduler;
        let bandwidth = site.bandwidth.zip(site.staging).map(|(Rate(Bytes(all)), jobs)| {
            let tasks = if share.as_ref().is_some_and(|share| !share.all_but) { self.tasks } else { 1 };
            Rate(Bytes((all / u64::from(jobs.max(1)) / tasks).max(1)))
        });
        let request = TaskRequest {
            work,
            uid: self.job.owner.uid,
            gid: self.job.owner.gid,
            job: self.job.id.to_string(),
            label: self.job.id.label(),
            work_dir: self.job.work_dir.clone(),
            deadline_ms: until.saturating_duration_since(Instant::now()).as_millis() as u64,
            bandwidth,
            share,
            // Results are brought home when the job has no RAM disk any more.
            unchanged_ms: if home { self.began.elapsed().as_millis() as u64 } else { 0 },
        };
        let blamed = |why: String| Outcome::Failed { why, blame: vec![node.clone()], fault: Fault::Again };
        let mut silent_since: Option<Instant> = None;
        let mut started = false;
        loop {
            let answer = if started {
                daemon.fleet.task(node, id, name, TASK_WAIT).await
            } else {
                daemon.fleet.start_task(node, id, name, &request).await
            };
            match answer {
                Ok(report) => {
                    (silent_since, started) = (None, true);
                    self.follow(name, &report);
                    match &report.state {
                        TaskState::Running => {}
                        TaskState::Done { ok: true, .. } => return Ok(report),
                        TaskState::Done { ok: false, message } => {
                            return Err(task_failed(&report, message.as_deref()));
                        }
                    }
                }
                // The agent was started anew, and has ended what the former one had begun.
                Err(error) if started && error.code() == Some(RefusalCode::NotFound) => started = false,
                Err(error) if error.code().is_some() => return Err(blamed(error.to_string())),
                Err(error) => {
                    let since = *silent_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > AGENT_PATIENCE || Instant::now() > until {
                        return Err(blamed(error.to_string()));
                    }
                    tokio::time::sleep(AGENT_PAUSE).await;
                }
            }
            let number = self.job.task.map(|task| task.number);
            let is_mine = |now: Option<u64>| now == number || (self.goes_on && now.is_none());
            if !daemon.job(self.job.id).is_some_and(|now| is_mine(now.task.map(|task| task.number))) {
                // Somebody has decided otherwise.
                return Err(failed("given up", Fault::Again));
            }
        }
    }

    /// Keeps how far it is, for whoever looks.
    fn follow(&self, name: &str, report: &TaskReport) {
        let mut seen = self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        seen.insert(name.to_owned(), report.clone());
        let sum = |figure: fn(&TaskReport) -> u64| seen.values().map(figure).sum::<u64>();
        let (bytes, bytes_done) = (sum(|report| report.bytes_found), sum(|report| report.bytes_done));
        let rate = bytes_done as f64 / self.began.elapsed().as_secs_f64().max(0.001);
        let left = bytes.saturating_sub(bytes_done) as f64;
        let transfer = Transfer {
            bytes,
            bytes_done,
            entries: sum(|report| report.entries_found),
            entries_done: sum(|report| report.entries_done),
            rate,
            seconds_left: (rate > 0.0).then(|| left / rate),
        };
        self.daemon.transfers().insert(self.job.id, transfer);
    }

    /// Tells the user which results stand beside the files of others: nobody would look for them.
    async fn tell_of_conflicts(&self) {
        let text = {
            let seen = self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let beside: Vec<&str> =
                seen.values().flat_map(|report| report.beside.iter().map(String::as_str)).collect();
            if beside.is_empty() {
                return;
            }
            format!("files changed by somebody else were kept; the job's own are {}", beside.join(", "))
        };
        let told = Event::Noticed { job: self.job.id, text: plain(&text, MESSAGE) };
        let _ = self.daemon.event(told).await;
    }

    /// What is said of a success.
    fn done(&self, last: &TaskReport) -> Outcome {
        let Some(task) = self.job.task else { return failed("it has no task", Fault::Again) };
        let seen = self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let bytes = seen.values().map(|report| report.bytes_done).sum();
        let files: u64 = seen.values().map(|report| report.entries_done).sum();
        let mut text = format!("{}: {} in {files} files", said(&self.job, task.work), Bytes(bytes));
        if self.tasks > 1 {
            text += &format!(", by {} RSA nodes", self.tasks);
        }
        // What the user should know of it: versions that were put beside others, deletions that were not made.
        for report in seen.values() {
            if let TaskState::Done { message: Some(message), .. } = &report.state {
                text += &format!("; {message}");
            }
        }
        let beside: Vec<&str> =
            seen.values().flat_map(|report| report.beside.iter().map(String::as_str)).collect();
        if !beside.is_empty() {
            text += &format!(" ({})", beside.join(", "));
        }
        if !last.log.trim().is_empty() {
            text += &format!("; its script said: {}", last.log.trim());
        }
        // Names of files and words of scripts: they go to terminals and logs of others.
        Outcome::Done(plain(&text, MESSAGE))
    }
}

fn task_failed(report: &TaskReport, message: Option<&str>) -> Outcome {
    let mut why = message.unwrap_or("it failed").to_owned();
    if let Some(first) = report.errors.first().filter(|first| !why.contains(first.as_str())) {
        why += &format!(" ({first})");
    }
    // The reason is mostly in a script's last words.
    if let Some(last) = report.log.lines().rev().map(str::trim).find(|line| !line.is_empty()) {
        why += &format!("; it said at last: {last}");
    }
    failed(plain(&why, MESSAGE), if report.retryable { Fault::Again } else { Fault::User })
}

/// Ends what earlier attempts to bring results home have left running.
async fn end_earlier(daemon: &Arc<Daemon>, nodes: &[NodeName], id: &RamDiskId) -> Result<(), String> {
    for name in [CATCH_UP, HOME] {
        let faults = daemon.fleet.stop_tasks(nodes, id, name).await;
        if !faults.is_empty() {
            return Err(format!("an earlier task may still run: {}", words(&faults)));
        }
    }
    Ok(())
}

/// Whether what a job is going to write does not fit beside its input, in words.
///
/// # Errors
/// If that can't be told: then it is not taken to fit.
async fn too_tight(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId) -> Result<Option<String>, String> {
    let wanted = job.request.out_size.filter(|_| job.purpose == Purpose::Both);
    // The node that has filled it sees all of it.
    let node = job.allocation.as_ref().and_then(|found| found.nodes.first());
    let (Some(wanted), Some(node)) = (wanted, node) else { return Ok(None) };
    for attempt in 0.. {
        let answer = match daemon.fleet.ramdisks_of(node).await {
            Ok(reports) => is_tight(wanted, node, id, &reports),
            Err(error) => Err(format!("whether RSA_OUT_SIZE fits beside the input: {error}")),
        };
        // A filesystem that has just been filled may be slow to say how full it is.
        if answer.is_ok() || attempt == ROOM_LOOKS {
            return answer;
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
    Ok(None)
}

fn is_tight(
    wanted: Bytes,
    node: &NodeName,
    id: &RamDiskId,
    reports: &[LocalReport],
) -> Result<Option<String>, String> {
    let report = reports.iter().find(|report| report.layout.id == *id);
    let report = report.ok_or_else(|| format!("{node} has nothing of {id} any more"))?;
    if report.layout.engine == EngineKind::Simulated {
        return Ok(None);
    }
    let (size, free) = report.filesystem.ok_or_else(|| {
        format!("{node} can't tell how much of {id} is free for RSA_OUT_SIZE: {}", report.faults.join("; "))
    })?;
    Ok((free < wanted).then(|| {
        format!(
            "RSA_OUT_SIZE asks for {wanted} beside the input, but of {size} only {free} are left; ask for more with \
             RSA_CAPACITY"
        )
    }))
}

/// Stops filling: on all nodes, whatever part each of them has. What is left of it ends with the RAM disk.
async fn stop(daemon: &Arc<Daemon>, nodes: &[NodeName], id: &RamDiskId) -> Outcome {
    let faults = daemon.fleet.stop_tasks(nodes, id, FILL).await;
    if faults.is_empty() {
        Outcome::Done(format!("stopped data staging process of {id}"))
    } else {
        failed(words(&faults), Fault::Again)
    }
}

/// Another job that runs on one of the job's nodes, and where. The RAM disk would be shown to it, too.
fn neighbour(daemon: &Daemon, job: &Job) -> Option<(Incarnation, NodeName)> {
    let sight = daemon.queue.sight();
    let here = |other: &&QueuedJob| {
        other.id.job != job.id.job && matches!(other.standing, Standing::Running | Standing::Configuring)
    };
    sight.jobs.iter().filter(here).find_map(|other| {
        let shared = other.nodes.iter().find(|node| job.io_nodes.contains(node))?;
        Some((other.id, shared.clone()))
    })
}

async fn mount(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId, until: Instant) -> Outcome {
    if let Some((other, node)) = neighbour(daemon, job).filter(|_| !daemon.config().scheduler.shared_nodes) {
        let why =
            format!("job {other} runs on {node}, too; ask for nodes of your own with #SBATCH --exclusive");
        return Outcome::Refused { why, fault: Fault::User };
    }
    let (secret, mut layout) = match kept_ramdisk(daemon, id).await {
        Ok(found) => found,
        Err(why) => return failed(why, Fault::Again),
    };
    for node in &job.io_nodes {
        if !layout.clients.contains(node) {
            layout.clients.push(node.clone());
        }
    }
    if let Err(why) = keep_ramdisk(daemon, job.id, id, &secret, Some(layout.clone())).await {
        return failed(why, Fault::Again);
    }
    let covers = covers(job);
    if covers.iter().any(|cover| !cover.read_only) {
        // From the first byte that the job can write: no journal that is lost or older may have it destroyed.
        let servers: Vec<NodeName> = layout.servers.iter().map(|server| server.node.clone()).collect();
        let faults = daemon.fleet.guard(id, &servers, until).await;
        if !faults.is_empty() {
            return Outcome::Refused { why: words(&faults), fault: Fault::Again };
        }
    }
    let prolog = || daemon.job(job.id).map(|now| now.prolog);
    let waits = || prolog() == Some(Prolog::Waiting);
    let mut changed = daemon.watch();
    // It waited for the former scheduler, and asks this one again, unless it has been given up.
    while prolog() == Some(Prolog::Expected) {
        if tokio::time::timeout_at(until.into(), changed.changed()).await.is_err() {
            break;
        }
    }
    if !waits() {
        return crate::late::mount(daemon, job, id, &layout, &secret, until).await;
    }
    match daemon.fleet.cover(&layout, &secret, &covers, &job.io_nodes, until, waits).await {
        // Also if its Prologs give up now: a node that shows it, and knows that all do, lets the job keep it.
        Ok(()) => {
            let what = match job.purpose {
                Purpose::Input => "input",
                Purpose::Both => "input and output",
                Purpose::Output => "output",
            };
            let text = format!("{} ({what})", said(job, Work::Mount));
            {
                // The job is to start now; nothing of its own is hidden from it.
                let (daemon, job, id) = (Arc::clone(daemon), job.clone(), id.clone());
                tokio::spawn(async move {
                    if let Err(why) = catch_up(&daemon, &job, &id, Instant::now() + LATE_LOOK, true).await {
                        tracing::debug!(job = %job.id, why, "it was not compared with the disk");
                    }
                });
            }
            Outcome::Done(text)
        }
        Err(NotCovered { faults, .. }) if faults.is_empty() => {
            failed("its Prolog gave up waiting while it was mounted", Fault::Again)
        }
        Err(NotCovered { faults, untouched }) => {
            // What the user has to change does not get better by itself.
            let refused = |fault: &NodeFault| {
                matches!(fault.error.code(), Some(RefusalCode::Forbidden | RefusalCode::Conflict))
            };
            let fault = if faults.iter().any(refused) { Fault::User } else { Fault::Again };
            if untouched {
                Outcome::Refused { why: words(&faults), fault }
            } else {
                failed(words(&faults), fault)
            }
        }
    }
}

/// A job that ran already when the RAM disk came has written to disk until then, and does not see it any more: what is new
/// is put where it looks. What was changed since it was copied is told. Returns what was done.
async fn catch_up(
    daemon: &Arc<Daemon>,
    job: &Job,
    id: &RamDiskId,
    until: Instant,
    goes_on: bool,
) -> Result<String, String> {
    let mut nodes = job.allocation.iter().flat_map(|found| &found.nodes);
    let node = nodes.next().cloned().ok_or("it has no RSA nodes")?;
    let staging = Staging { goes_on, ..Staging::new(daemon, job, id, vec![node.clone()], until) };
    let mut directories = directories(job);
    if job.request.stage_in.is_some()
        && let Some(scripted) = directories.iter().position(|directory| directory.input)
        && !directories[scripted].output
    {
        // What a script has made of it is not comparable.
        directories.remove(scripted);
    }
    let work = TaskWork::CatchUp { directories };
    let end = until + CATCH_UP_MARGIN / 2;
    let done = tokio::time::timeout_at(end.into(), staging.task(&node, CATCH_UP, work, None));
    let done = done.await.map_err(|_| "it took too long".to_owned())?;
    let report = done.map_err(|outcome| match outcome {
        Outcome::Failed { why, .. } => why,
        _ => String::new(),
    })?;
    let TaskState::Done { message, .. } = report.state else { return Err("it did not end".to_owned()) };
    let text = plain(&message.unwrap_or_default(), MESSAGE);
    if !report.errors.is_empty() {
        // Something is not as the job would expect.
        let _ = daemon.event(Event::Noticed { job: job.id, text: text.clone() }).await;
    }
    Ok(text)
}

/// Tells a job's user of nodes where the RAM disk was lost while the job ran: what failed there is in no server's books.
pub(crate) async fn tell_of_cuts(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId, nodes: &[NodeName]) {
    let mut set = JoinSet::new();
    for node in nodes {
        let (daemon, id, node) = (Arc::clone(daemon), id.clone(), node.clone());
        set.spawn(async move {
            let reports = daemon.fleet.ramdisks_of(&node).await.unwrap_or_else(|error| {
                // Taking the RAM disk away asks the same node next, and fails in words if it still says nothing.
                tracing::warn!(ramdisk = %id, %node, %error, "can't tell whether the job lost it there");
                Vec::new()
            });
            let report = reports.into_iter().find(|report| report.layout.id == id)?;
            (!report.faults.is_empty()).then(|| format!("on {node} {}", report.faults.join(", ")))
        });
    }
    let mut found: Vec<String> = Vec::new();
    while let Some(joined) = set.join_next().await {
        match joined {
            Ok(cut) => found.extend(cut),
            Err(error) => tracing::error!(ramdisk = %id, %error, "a look at a node ended by a defect"),
        }
    }
    if found.is_empty() {
        return;
    }
    found.sort_unstable();
    let paths: Vec<String> =
        job.directories(job.purpose).iter().map(|(path, _, _)| path.display().to_string()).collect();
    let text = format!(
        "the RAM disk was lost while the job ran: {}; it may have got I/O errors in {}, and what it could not write there is \
         not among its results",
        found.join("; "),
        paths.join(", ")
    );
    let _ = daemon.event(Event::Noticed { job: job.id, text }).await;
}

async fn unmount(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId, force: bool, until: Instant) -> Outcome {
    // Epilogs may be doing it on their own nodes.
    let lock = daemon.unmounts_of(job.id);
    let _alone = lock.write().await;
    if job.unmounts == 0 && !job.broken && job.job_state == JobState::Finished {
        tell_of_cuts(daemon, job, id, &job.io_nodes).await;
    }
    let mut faults = daemon.fleet.uncover(id, &job.io_nodes, force, until).await;
    if faults.is_empty() {
        faults = daemon.fleet.leave(id, &job.io_nodes, until).await;
    }
    if faults.is_empty() {
        return Outcome::Done(said(job, Work::Unmount { force }));
    }
    let busy = faults.iter().any(|fault| fault.error.code() == Some(RefusalCode::Busy));
    let blame = faults.iter().map(|fault| fault.node.clone()).collect();
    let fault = if busy && !force { Fault::Busy } else { Fault::Again };
    Outcome::Failed { why: words(&faults), blame, fault }
}

async fn destroy(
    daemon: &Arc<Daemon>,
    job: &Job,
    task: Task,
    id: &RamDiskId,
    servers: &[NodeName],
) -> Outcome {
    // A job that still has results is never destroyed; if it were, the agents would refuse.
    if !job.results {
        let release = if job.abandoned {
            Release::Abandoned { by: format!("`ondeck job abandon {}`", job.id.key()) }
        } else {
            Release::StagedOut { task: task.number }
        };
        for fault in daemon.fleet.release(id, servers, &release).await {
            // The node does not destroy it then, which is said below.
            tracing::warn!(ramdisk = %id, %fault, "its results can't be released");
        }
    }
    let mut nodes = servers.to_vec();
    nodes.extend(job.io_nodes.iter().filter(|node| !servers.contains(node)).cloned());
    let faults = daemon.fleet.demolish(id, &nodes).await;
    let blame: Vec<NodeName> = faults.iter().map(|fault| fault.node.clone()).collect();
    if blame.is_empty() {
        return Outcome::Done(said(job, Work::Destroy));
    }
    Outcome::Failed { why: words(&faults), blame, fault: Fault::Again }
}

/// Has the workload manager do something with a job, or tell its user. It is tried until it answers.
pub(crate) async fn tell_workload_manager(daemon: &Arc<Daemon>, id: Incarnation, action: Action) {
    let manager = &daemon.workload_manager;
    let job = id.job;
    if daemon.config().scheduler.simulate.is_some() && !lets_go_in_earnest(daemon, id, &action) {
        return tracing::info!(%id, ?action, "would be ordered");
    }
    loop {
        if daemon.queue.of_number(job).is_some_and(|queued| !queued.id.is_same_job(id)) {
            tracing::info!(job = id.key(), ?action, "its number is another job's now, which is not touched");
            break;
        }
        let done = match &action {
            Action::Tell(..) | Action::Unmark(_) => say(daemon, id, &action).await,
            // It may have been decided otherwise since.
            Action::Hold(_) if !daemon.job(id).is_some_and(|job| job.held) => Ok(()),
            Action::LetGo(_) if daemon.job(id).is_some_and(|job| job.held) => Ok(()),
            Action::Hold(_) => match manager.hold(job).await {
                Ok(()) => say(daemon, id, &action).await,
                other => other,
            },
            Action::HoldBack(_, text) => hold_back(daemon, id, text).await,
            Action::LetGo(_) => match manager.release(job).await {
                Ok(()) => say(daemon, id, &action).await,
                other => other,
            },
            Action::LockIn(_) => lock_in(daemon, id).await,
            Action::UndoLockIn(_) => undo_lock_in(daemon, id).await,
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
        daemon.queue.hurry();
    }
}

/// In a simulation nothing is done to jobs, except that those that `job_submit.lua` holds are let go.
fn lets_go_in_earnest(daemon: &Daemon, id: Incarnation, action: &Action) -> bool {
    let held = |job: &QueuedJob| job.id == id && job.held_for_input && job.standing == Standing::Held;
    matches!(action, Action::LetGo(_)) && daemon.queue.sight().jobs.iter().any(held)
}

/// Writes what a job's user should know last, with the mark as long as the job is held.
async fn say(daemon: &Arc<Daemon>, id: Incarnation, action: &Action) -> Result<(), WlmError> {
    let (mut held, known) = daemon.job(id).map_or((false, String::new()), |job| (job.held, job.message));
    let text = match action {
        Action::Tell(_, text) => text,
        _ => &known,
    };
    let mut mark = ondeck_wlm::mark(id.restarts);
    if let Some(queued) = daemon.queue.of_number(id.job)
        && queued.id != id
    {
        // A later life of the job has the line by now, and may be held by the mark in it.
        held = queued.held_for_input;
        mark = ondeck_wlm::mark(queued.id.restarts);
    }
    daemon.workload_manager.set_comment(id.job, &comment(held.then_some(mark), text)).await
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
async fn hold_back(daemon: &Arc<Daemon>, id: Incarnation, text: &str) -> Result<(), WlmError> {
    let waits = |job: &QueuedJob| job.id == id && job.standing.waits() && !job.held_for_input;
    if !daemon.queue.sight().jobs.iter().any(waits) {
        return Ok(());
    }
    let line = comment(Some(ondeck_wlm::mark(id.restarts)), text);
    daemon.workload_manager.hold_saying(id.job, &line).await
}

async fn lock_in(daemon: &Arc<Daemon>, id: Incarnation) -> Result<(), WlmError> {
    let config = daemon.config();
    let site = &config.scheduler;
    // To a job that somebody holds, a new priority would be a release.
    let sight = seen(daemon).await?;
    let waits = |job: &&QueuedJob| job.id == id && job.standing.waits();
    let Some(job) = sight.jobs.iter().find(waits) else { return Ok(()) };
    match (site.lock_in, &site.lock_in_qos) {
        (LockIn::Qos, Some(qos)) => daemon.workload_manager.set_qos(id.job, qos).await,
        (LockIn::Priority, _) => {
            // Before all that wait now.
            let others = sight.jobs.iter().filter(|job| job.id.job != id.job);
            let greatest = others.map(|job| job.priority).max().unwrap_or(0);
            if job.priority > greatest {
                return Ok(());
            }
            let priority =
                u32::try_from(greatest.saturating_add(1)).unwrap_or(u32::MAX - 2).min(u32::MAX - 2);
            daemon.workload_manager.set_priority(id.job, priority).await
        }
        _ => Ok(()),
    }
}

/// The queue as it is now.
async fn seen(daemon: &Arc<Daemon>) -> Result<Sight, WlmError> {
    let sight = daemon.queue.fresh().await;
    match sight.fault {
        Some(message) => Err(WlmError::Unavailable { message }),
        None => Ok(sight),
    }
}

async fn undo_lock_in(daemon: &Arc<Daemon>, id: Incarnation) -> Result<(), WlmError> {
    // The job may be another life of it by now. To one that is held, a new priority would be a release; and Slurm holds
    // what is requeued to be held only after everything else, so one look is not enough.
    const LOOKS: u32 = 2;
    let (mut looks, mut job) = (0, None);
    while looks < LOOKS {
        let sight = seen(daemon).await?;
        job = sight.jobs.iter().find(|job| job.id.is_same_job(id)).cloned();
        match job.as_ref().map(|job| job.standing) {
            Some(standing) if standing.waits() || standing == Standing::Held => looks += 1,
            Some(Standing::Ending) => looks = 0,
            _ => return Ok(()),
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
    let Some(job) = job else { return Ok(()) };
    match daemon.config().scheduler.lock_in {
        LockIn::Priority if job.standing == Standing::Held => Ok(()),
        LockIn::Priority => daemon.workload_manager.reset_priority(id.job).await,
        LockIn::Qos => {
            let known = daemon.job(id).map(|job| job.qos).filter(|qos| !qos.is_empty());
            daemon.workload_manager.set_qos(id.job, known.as_deref().unwrap_or("normal")).await?;
            // Once the job is forgotten, its quality of service is what the queue shows.
            seen(daemon).await.map(drop)
        }
        LockIn::Off => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn room_that_can_not_be_told_is_not_taken_for_enough() {
        let (node, id) = ("r1".parse().unwrap(), "job-1-0@1".parse().unwrap());
        let report = |engine: &str, filesystem: serde_json::Value| -> LocalReport {
            serde_json::from_value(serde_json::json!({
                "node": "r1", "complete": true, "server": true, "shown": [], "processes": [], "used": null, "view": null,
                "faults": ["waited 1.0 s in vain for the filesystem to answer"], "filesystem": filesystem,
                "layout": {
                    "id": { "name": "job-1-0", "epoch": 1 }, "engine": engine, "owner": { "uid": 1000, "gid": 1000 }, "replicas": 1,
                    "device": "ram", "servers": []
                },
            }))
            .unwrap()
        };
        let judge = |reports: &[LocalReport]| is_tight(Bytes(100), &node, &id, reports);
        let size = |free: u64| serde_json::json!([1000, free]);
        assert_eq!(judge(&[report("gluster", size(100))]), Ok(None));
        assert!(
            judge(&[report("gluster", size(99))]).unwrap().is_some_and(|why| why.contains("RSA_CAPACITY"))
        );
        assert_eq!(judge(&[report("simulated", serde_json::Value::Null)]), Ok(None));
        let silent = judge(&[report("gluster", serde_json::Value::Null)]).unwrap_err();
        assert!(silent.contains("in vain for the filesystem"), "{silent}");
        assert!(judge(&[]).unwrap_err().contains("r1 has nothing of job-1-0@1"));
    }
}
