//! Doing what was decided, by the agents and the workload manager. All of it may be done twice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_agent::fleet::{BuildError, NodeFault, Plan, Size};
use ondeck_api::CallError;
use ondeck_api::scheduler::Transfer;
use ondeck_api::wire::{Cover, Directory, RefusalCode, TaskReport, TaskRequest, TaskState, Work as TaskWork};
use ondeck_core::schedule::{Action, Event, Fault, Job, LockIn, Outcome, Purpose, Task, Work};
use ondeck_core::{Bytes, EngineKind, Incarnation, Layout, NodeName, RamDiskId, Rate};
use ondeck_ramdisk::Secret;
use ondeck_wlm::{WlmError, WorkloadManager};

use crate::daemon::{Daemon, now};

/// How long one question after a task waits for its end.
const TASK_WAIT: Duration = Duration::from_secs(1);

/// How long an agent that does not answer is asked again before a task of it is given up.
const AGENT_PATIENCE: Duration = Duration::from_secs(20);

/// How long is waited before an agent is asked again.
const AGENT_PAUSE: Duration = Duration::from_millis(300);

/// The name of the task that fills a RAM disk.
const FILL: &str = "fill";

fn failed(why: impl Into<String>, fault: Fault) -> Outcome {
    Outcome::Failed { why: why.into(), blame: Vec::new(), fault }
}

/// Does the work of a task to its end.
pub(crate) async fn work(daemon: &Arc<Daemon>, job: &Job, task: Task) -> Outcome {
    let (Some(allocation), Some(id)) = (&job.allocation, job.ramdisk()) else {
        return failed("it has no RSA nodes", Fault::Again);
    };
    if let Some(pretended) = daemon.config.scheduler.simulate {
        tokio::time::sleep(pretended).await;
        return Outcome::Done(format!("{} (simulated)", said(job, task.work)));
    }
    let until = Instant::now() + task.until.since(now());
    match task.work {
        Work::Construct => construct(daemon, job, &id, until).await,
        Work::StageIn => {
            let script = job.request.stage_in.clone();
            let work = TaskWork::Fill { directories: directories(job), script };
            run_task(daemon, job, &allocation.nodes, &id, FILL, work, until).await
        }
        Work::StopStageIn => stop(daemon, &allocation.nodes[0], &id).await,
        Work::Mount => mount(daemon, job, &id, until).await,
        Work::Unmount { force } => unmount(daemon, job, &id, force, until).await,
        Work::StageOut => {
            let script = job.request.stage_out.clone();
            let work = TaskWork::BringHome { directories: directories(job), script, pack: job.request.pack };
            // Each attempt is a task of its own, on the next of its nodes.
            let name = format!("home-{}", task.number);
            let mut nodes = allocation.nodes.clone();
            let next = job.stage_outs as usize % nodes.len();
            nodes.rotate_left(next);
            run_task(daemon, job, &nodes, &id, &name, work, until).await
        }
        Work::Destroy => destroy(daemon, job, &id, &allocation.nodes).await,
    }
}

/// Takes up a task that an earlier daemon had begun.
pub(crate) fn resume(daemon: &Arc<Daemon>, id: Incarnation, task: Task) {
    let daemon = Arc::clone(daemon);
    tokio::spawn(async move {
        let Some(job) = daemon.job(id) else { return };
        let outcome = match task.work {
            // How far it had come is not known, and nobody else may use its secret's ports meanwhile.
            Work::Construct if daemon.config.scheduler.simulate.is_none() => {
                failed("the scheduler was started anew while it was being built", Fault::Again)
            }
            _ => work(&daemon, &job, task).await,
        };
        daemon.transfers().remove(&id);
        let _ = daemon.event(Event::Ended { job: id, number: task.number, outcome }).await;
    });
}

/// What the log says when work is done, in the words of the thesis where it has some.
fn said(job: &Job, work: Work) -> String {
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

fn directories(job: &Job) -> Vec<Directory> {
    let found = job.directories(job.purpose).into_iter().enumerate();
    found
        .map(|(index, (path, input, output))| Directory { path, name: index.to_string(), input, output })
        .collect()
}

fn covers(job: &Job) -> Vec<Cover> {
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
    let secret = match Secret::new() {
        Ok(secret) => secret,
        Err(error) => return failed(format!("random numbers: {error}"), Fault::Again),
    };
    if let Err(error) = keep_ramdisk(daemon, job.id, id, &secret, None).await {
        return failed(error, Fault::Again);
    }
    let pools = daemon.config.scheduler.pools(&daemon.config.nodes);
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

fn engine(daemon: &Daemon, job: &Job) -> EngineKind {
    job.request.engine.unwrap_or(daemon.config.scheduler.engine)
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

/// Runs a task on the first of its nodes that has an agent, and follows it to its end.
async fn run_task(
    daemon: &Arc<Daemon>,
    job: &Job,
    nodes: &[NodeName],
    id: &RamDiskId,
    name: &str,
    work: TaskWork,
    until: Instant,
) -> Outcome {
    let site = &daemon.config.scheduler;
    let bandwidth = site.bandwidth.zip(site.staging);
    let request = TaskRequest {
        work,
        uid: job.owner.uid,
        gid: job.owner.gid,
        job: job.id.to_string(),
        work_dir: job.work_dir.clone(),
        deadline_ms: until.saturating_duration_since(Instant::now()).as_millis() as u64,
        bandwidth: bandwidth
            .map(|(Rate(Bytes(all)), jobs)| Rate(Bytes((all / u64::from(jobs.max(1))).max(1)))),
    };
    let node = &nodes[0];
    let mut silent_since: Option<Instant> = None;
    let mut started = false;
    let began = Instant::now();
    loop {
        let answer = if started {
            daemon.fleet.task(node, id, name, TASK_WAIT).await
        } else {
            daemon.fleet.start_task(node, id, name, &request).await
        };
        match answer {
            Ok(report) => {
                (silent_since, started) = (None, true);
                match &report.state {
                    TaskState::Running => follow(daemon, job.id, &report, began),
                    TaskState::Done { ok, message } => {
                        return ended(job, &report, *ok, message.as_deref());
                    }
                }
            }
            // The agent was started anew, and has ended what the former one had begun.
            Err(error) if started && error.code() == Some(RefusalCode::NotFound) => started = false,
            Err(error) if error.code().is_some() => {
                return Outcome::Failed {
                    why: error.to_string(),
                    blame: vec![node.clone()],
                    fault: Fault::Again,
                };
            }
            Err(error) => {
                let since = *silent_since.get_or_insert_with(Instant::now);
                if since.elapsed() > AGENT_PATIENCE || Instant::now() > until {
                    let why = error.to_string();
                    return Outcome::Failed { why, blame: vec![node.clone()], fault: Fault::Again };
                }
                tokio::time::sleep(AGENT_PAUSE).await;
            }
        }
        if daemon
            .job(job.id)
            .is_none_or(|now| now.task.map(|task| task.number) != job.task.map(|task| task.number))
        {
            // Somebody has decided otherwise.
            return failed("given up", Fault::Again);
        }
    }
}

fn follow(daemon: &Daemon, job: Incarnation, report: &TaskReport, began: Instant) {
    let seconds = began.elapsed().as_secs_f64().max(0.001);
    let rate = report.bytes_done as f64 / seconds;
    let left = report.bytes_found.saturating_sub(report.bytes_done) as f64;
    let transfer = Transfer {
        bytes: report.bytes_found,
        bytes_done: report.bytes_done,
        entries: report.entries_found,
        entries_done: report.entries_done,
        rate,
        seconds_left: (rate > 0.0).then(|| left / rate),
    };
    daemon.transfers().insert(job, transfer);
}

fn ended(job: &Job, report: &TaskReport, ok: bool, message: Option<&str>) -> Outcome {
    let Some(task) = job.task else { return failed("it has no task", Fault::Again) };
    if ok {
        let mut text = format!(
            "{}: {} in {} files",
            said(job, task.work),
            Bytes(report.bytes_done),
            report.entries_done
        );
        if !report.beside.is_empty() {
            text += &format!(
                "; changed on disk meanwhile, so the job's version was put beside: {}",
                report.beside.join(", ")
            );
        }
        if !report.log.trim().is_empty() {
            text += &format!("; its script said: {}", report.log.trim());
        }
        return Outcome::Done(text);
    }
    let mut why = message.unwrap_or("it failed").to_owned();
    if let Some(first) = report.errors.first().filter(|first| !why.contains(first.as_str())) {
        why += &format!(" ({first})");
    }
    failed(why, if report.retryable { Fault::Again } else { Fault::User })
}

async fn stop(daemon: &Arc<Daemon>, node: &NodeName, id: &RamDiskId) -> Outcome {
    match daemon.fleet.stop_task(node, id, FILL).await {
        Ok(_) => Outcome::Done(format!("stopped data staging process of {id}")),
        // Whatever is left of it ends with the RAM disk.
        Err(error) => failed(error.to_string(), Fault::Again),
    }
}

async fn mount(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId, until: Instant) -> Outcome {
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
    match daemon.fleet.cover(&layout, &secret, &covers(job), &job.io_nodes, until).await {
        Ok(()) => {
            let what = match job.purpose {
                Purpose::Input => "input",
                Purpose::Both => "input and output",
                Purpose::Output => "output",
            };
            Outcome::Done(format!("{} ({what})", said(job, Work::Mount)))
        }
        Err(faults) => {
            // What the user has to change does not get better by itself.
            let refused = |fault: &NodeFault| {
                matches!(fault.error.code(), Some(RefusalCode::Forbidden | RefusalCode::Conflict))
            };
            let fault = if faults.iter().any(refused) { Fault::User } else { Fault::Again };
            failed(words(&faults), fault)
        }
    }
}

async fn unmount(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId, force: bool, until: Instant) -> Outcome {
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

async fn destroy(daemon: &Arc<Daemon>, job: &Job, id: &RamDiskId, servers: &[NodeName]) -> Outcome {
    let mut nodes = servers.to_vec();
    nodes.extend(job.io_nodes.iter().filter(|node| !servers.contains(node)).cloned());
    let faults = daemon.fleet.demolish(id, &nodes).await;
    let blame: Vec<NodeName> =
        faults.iter().map(|fault| fault.node.clone()).filter(|node| servers.contains(node)).collect();
    if blame.is_empty() {
        let mut text = said(job, Work::Destroy);
        if !faults.is_empty() {
            // A client without servers holds nothing.
            text += &format!("; not removed: {}", words(&faults));
        }
        return Outcome::Done(text);
    }
    Outcome::Failed { why: words(&faults), blame, fault: Fault::Again }
}

/// Has the workload manager do something with a job, or tell its user. It is tried until it answers.
pub(crate) async fn tell_workload_manager(daemon: &Arc<Daemon>, id: Incarnation, action: Action) {
    const TRIES: u32 = 20;
    let manager = &daemon.workload_manager;
    let job = id.job;
    for _ in 0..TRIES {
        let done = match &action {
            Action::Tell(_, text) => manager.set_comment(job, &format!("ondeck: {text}")).await,
            Action::Hold(_) => manager.hold(job).await,
            Action::LetGo(_) => manager.release(job).await,
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

async fn lock_in(daemon: &Arc<Daemon>, id: Incarnation) -> Result<(), WlmError> {
    let site = &daemon.config.scheduler;
    match (site.lock_in, &site.lock_in_qos) {
        (LockIn::Qos, Some(qos)) => daemon.workload_manager.set_qos(id.job, qos).await,
        (LockIn::Priority, _) => {
            // Before all that wait now.
            let greatest = daemon.queue.sight().jobs.iter().map(|job| job.priority).max().unwrap_or(0);
            let priority =
                u32::try_from(greatest.saturating_add(1)).unwrap_or(u32::MAX - 2).min(u32::MAX - 2);
            daemon.workload_manager.set_priority(id.job, priority).await
        }
        _ => Ok(()),
    }
}

async fn undo_lock_in(daemon: &Arc<Daemon>, id: Incarnation) -> Result<(), WlmError> {
    match daemon.config.scheduler.lock_in {
        LockIn::Priority => daemon.workload_manager.reset_priority(id.job).await,
        LockIn::Qos => {
            // The one it had is in the queue's first sight of it, which is gone; Slurm's word for the default is empty.
            daemon.workload_manager.set_qos(id.job, "normal").await
        }
        LockIn::Off => Ok(()),
    }
}
