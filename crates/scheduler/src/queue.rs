//! Looking at the queue: one query for all jobs, and one look at the script of each job that may get something.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ondeck_core::schedule::{Event, Job, JobState, ObservedJob, RsaState};
use ondeck_core::text::plain;
use ondeck_core::{Incarnation, JobId, NodeName, QueuedJob, Request, Standing};
use ondeck_directive::{PathError, check_path};
use ondeck_layout::programs::{JobProgram, started_by};
use ondeck_wlm::WlmError;
use tokio::task::JoinSet;

use crate::clock::{self, now};
use crate::context::Context;
use crate::delays::may_start_soon;
use crate::queue_snapshot::{QueueSnapshot, ScriptRequest};
use crate::striping::StripingAsked;

/// How many scripts are read at a time: each is a process and a request to the workload manager.
const SCRIPTS: usize = 4;

/// How long they are read before the queue is looked at again, which Prologs wait for. The others are read then.
const READING: Duration = Duration::from_secs(1);

/// So much lies between two looks in the mean, however many want to know now: each asks the workload manager for all jobs.
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// So many looks may follow one another without a pause, if there was none for a while: a job is asked for several times within a moment.
const LOOKS_IN_A_ROW: u32 = 3;

/// Looks at the queue for as long as the daemon lives.
pub(crate) async fn look(context: Arc<Context>) {
    let mut due = tokio::time::Instant::now();
    loop {
        context.queue.begin_a_look().await;
        let began = tokio::time::Instant::now();
        look_once(&context).await;
        due = next_look(due, began, began.elapsed());
        tokio::select! {
            () = tokio::time::sleep(context.config().slurm.interval) => {}
            () = context.queue.wanted.notified() => {}
        }
        tokio::time::sleep_until(due).await;
    }
}

/// When the next look may begin, after one that was due, began and took so long.
fn next_look(due: tokio::time::Instant, began: tokio::time::Instant, took: Duration) -> tokio::time::Instant {
    let earliest = began.checked_sub(LOOK_PAUSE * LOOKS_IN_A_ROW).unwrap_or(began);
    due.max(earliest) + LOOK_PAUSE + took
}

async fn look_once(context: &Arc<Context>) {
    let (taken, began) = (now(), Instant::now());
    let mut queue = match context.workload_manager.queue().await {
        Ok(mut queue) => {
            let waiting = queue.jobs.iter_mut().chain(&mut queue.whole_arrays);
            let starts = waiting.filter_map(|job| job.start.as_mut());
            for time in starts.chain(queue.begin_times.values_mut()) {
                *time = clock::of_wall_clock(*time);
            }
            queue
        }
        Err(error) => {
            let known = context.queue.snapshot();
            if known.fault.is_none() {
                tracing::warn!(%error, "the queue can't be seen; what is known of it stands");
            }
            let fault = Some(error.to_string());
            context.queue.snapshot.send_replace(QueueSnapshot { taken, fault, ..known });
            return;
        }
    };
    let took = began.elapsed();
    if context.cluster.get().is_none() {
        match context.workload_manager.cluster().await {
            // Nobody else sets it.
            Ok(name) => drop(context.cluster.set(name)),
            Err(error) => tracing::warn!(%error, "can't tell what the cluster is called"),
        }
    }
    let simulated = context.config().scheduler.simulate.is_some();
    queue.jobs = identified(context, queue.jobs);
    queue.dependent_rests = identified(context, queue.dependent_rests);
    queue.whole_arrays = identified(context, queue.whole_arrays);
    if !simulated {
        bring_out(context, &queue).await;
    }
    let (jobs, dependent_rests) = (Arc::new(queue.jobs), Arc::new(queue.dependent_rests));
    let whole_arrays = Arc::new(queue.whole_arrays);
    let snapshot = QueueSnapshot {
        taken,
        jobs: Arc::clone(&jobs),
        dependent_rests: Arc::clone(&dependent_rests),
        whole_arrays: Arc::clone(&whole_arrays),
        arrays: Arc::new(queue.elements.iter().map(|(job, element)| (*job, element.array)).collect()),
        begin_times: Arc::new(queue.begin_times),
        fault: None,
        took,
    };
    let known = context.queue.snapshot.send_replace(snapshot);
    if known.fault.is_some() {
        tracing::info!("the queue can be seen again");
    }
    let all: Vec<&QueuedJob> = jobs.iter().chain(&*dependent_rests).collect();
    let seen = see_all(context, &all).await;
    if simulated {
        // Nobody waits in a Prolog; it is pretended, too.
        for found in starting(context, &seen) {
            let _ = context.event(Event::Starting(Box::new(found))).await;
        }
    }
    if !simulated {
        read_delayable(context, &jobs, &whole_arrays).await;
    }
    let there = all.iter().copied().chain(&*whole_arrays).map(|job| first_life(job.id));
    let there: BTreeSet<Incarnation> = there.collect();
    context.queue.asked().retain(|id, _| there.contains(id));
    if context.event(Event::Queue { taken, jobs: seen }).await.is_err() {
        tracing::error!("a look at the queue was refused");
    }
    context.queue.told.store(true, Ordering::Release);
}

/// The jobs of a look by their own names: the workload manager gives numbers again.
fn identified(context: &Context, mut jobs: Vec<QueuedJob>) -> Vec<QueuedJob> {
    let schedule = context.schedule();
    for job in &mut jobs {
        job.id = schedule.identify(job);
    }
    jobs
}

/// What a job asks for is the same in all of its lives.
fn first_life(id: Incarnation) -> Incarnation {
    *id.lives().start()
}

/// The jobs that run, and of which the schedule does not know yet that their Prologs have begun.
fn starting(context: &Context, seen: &[ObservedJob]) -> Vec<ObservedJob> {
    let view = context.view();
    let is_new = |found: &&ObservedJob| {
        found.request.is_some()
            && found.job.standing == Standing::Running
            && view.jobs().get(&found.job.id).is_none_or(|job| match job.job_state {
                JobState::Ondeck => true,
                JobState::Running => job.prolog.is_expected(),
                _ => false,
            })
    };
    seen.iter().filter(is_new).cloned().collect()
}

/// Gives elements of held arrays numbers of their own, so that they can be staged and released. One at a time: the next
/// when the one before has its RSA nodes, or can't have any.
async fn bring_out(context: &Arc<Context>, queue: &ondeck_wlm::Queue) {
    for held in &queue.held_arrays {
        let waits = |job: &QueuedJob| {
            let of_array = queue.elements.get(&job.id.job).is_some_and(|known| known.array == held.array);
            let state = || context.job(job.id).map_or(RsaState::Initial, |known| known.rsa_state);
            let held = job.standing == Standing::Held && !job.dependent;
            of_array && held && state() == RsaState::Initial
        };
        if queue.jobs.iter().any(waits) {
            continue;
        }
        if let Err(error) = context.workload_manager.split(*held).await {
            tracing::warn!(array = %held.array, element = held.next, %error, "can't prepare it by itself");
        }
    }
}

/// The jobs that the schedule wants to know of, in the order of the queue.
async fn see_all(context: &Arc<Context>, jobs: &[&QueuedJob]) -> Vec<ObservedJob> {
    let has_command = !context.config().scheduler.io_nodes.is_empty();
    // One lock for all of them: most jobs of a queue of thousands only wait, or are known to ask for nothing. What runs
    // a program for a job is done for several at a time.
    let (known, new): (Vec<_>, Vec<_>) = {
        let (schedule, asked, at) = (context.schedule(), context.queue.asked(), now());
        let is_dependant = |job: &QueuedJob| job.standing.waits() && !job.depends_on.is_empty();
        let asks =
            |job: &&QueuedJob| asked.get(&first_life(job.id)).is_none_or(|asked| asked.request.is_some());
        let dependants = jobs.iter().copied().filter(|job| is_dependant(job)).filter(asks);
        let awaited: BTreeSet<JobId> = dependants.flat_map(|job| job.depends_on.iter().copied()).collect();
        let wanted = jobs.iter().copied().enumerate().filter_map(|(place, job)| {
            match asked.get(&first_life(job.id)) {
                // Of those that ask for nothing, the log tells while they wait.
                Some(ScriptRequest { request: None, .. }) => {
                    (job.standing != Standing::Running).then_some((place, job, true))
                }
                Some(asked) => Some((place, job, !(has_command && asked.is_to_map(job)))),
                // What depends on others is held before they end, if it needs their results.
                None => {
                    let matters = schedule.is_candidate(at, job)
                        || job.id.restarts > 0 && job.standing.waits()
                        || is_dependant(job)
                        || job.waits_for_results
                        || awaited.contains(&job.id.job);
                    matters.then_some((place, job, false))
                }
            }
        });
        wanted.partition(|(_, _, known)| *known)
    };
    let mut seen = Vec::new();
    for (place, job, _) in known {
        seen.push((place, job.clone(), see(context, job).await.map_err(Unread::from)));
    }
    let new = new.into_iter().map(|(place, job, _)| (place, job.clone())).collect();
    let read = read_several(new, READING, |job| {
        let context = Arc::clone(context);
        async move { see(&context, &job).await }
    });
    for (place, job, read) in read.await {
        if matches!(read, Err(Unread::Later)) {
            context.queue.hurry();
        }
        seen.push((place, job, read));
    }
    seen.sort_unstable_by_key(|(place, _, _)| *place);
    let view = context.view();
    let found = seen.into_iter().filter_map(|(_, job, read)| match read {
        Ok(found) => Some(found),
        Err(error) => {
            tracing::debug!(job = %job.id, %error, "its script can't be read");
            // A job that something is done for is there, whether its script can be read again or not. Of others the next
            // look finds what they ask for.
            let nothing =
                |job| ObservedJob { job, request: None, work_dir: "/".into(), io_nodes: Vec::new() };
            view.jobs().contains_key(&job.id).then(|| nothing(job))
        }
    });
    found.collect()
}

/// Reads the scripts of jobs that could be delayed while a filesystem is busy, and that nobody else wants to know of yet.
async fn read_delayable(context: &Arc<Context>, jobs: &[QueuedJob], whole_arrays: &[QueuedJob]) {
    if !context.loads.is_any_busy() {
        return;
    }
    let wanted: Vec<(usize, QueuedJob)> = {
        let (asked, at) = (context.queue.asked(), now());
        let all = jobs.iter().chain(whole_arrays);
        let new = all.filter(|job| may_start_soon(job, at) && !asked.contains_key(&first_life(job.id)));
        new.cloned().enumerate().collect()
    };
    let read = read_several(wanted, READING, |job| {
        let context = Arc::clone(context);
        async move { see(&context, &job).await }
    });
    for (_, job, read) in read.await {
        match read {
            Ok(_) => {}
            Err(Unread::Later) => context.queue.hurry(),
            Err(error) => tracing::debug!(job = %job.id, %error, "its script can't be read"),
        }
    }
}

/// Why a job was not read.
#[derive(Debug, thiserror::Error)]
enum Unread {
    /// There was no time for it.
    #[error("others were read first")]
    Later,
    /// It can't be.
    #[error(transparent)]
    Failed(#[from] WlmError),
}

/// Reads some jobs, several at a time, and those that can't be begun in time not at all. There is an answer for each of
/// them, whatever becomes of the reading of others: a job without one would count as one that has left the queue.
async fn read_several<T, F>(
    jobs: Vec<(usize, QueuedJob)>,
    time: Duration,
    read: impl Fn(QueuedJob) -> F,
) -> Vec<(usize, QueuedJob, Result<T, Unread>)>
where
    T: Send + 'static,
    F: Future<Output = Result<T, WlmError>> + Send + 'static,
{
    let (mut reading, begin) = (JoinSet::new(), Instant::now());
    let (mut under_way, mut done) = (BTreeMap::new(), Vec::new());
    let mut jobs = jobs.into_iter().peekable();
    loop {
        while reading.len() < SCRIPTS
            && let Some((place, job)) = jobs.next()
        {
            if begin.elapsed() > time {
                done.push((place, job, Err(Unread::Later)));
            } else {
                under_way.insert(reading.spawn(read(job.clone())).id(), (place, job));
            }
        }
        let (id, read) = match reading.join_next_with_id().await {
            None => return done,
            Some(Ok((id, read))) => (id, read.map_err(Unread::from)),
            Some(Err(error)) => {
                tracing::error!(%error, "reading a job's script ended by a defect");
                (error.id(), Err(WlmError::Malformed { what: error.to_string() }.into()))
            }
        };
        if let Some((place, job)) = under_way.remove(&id) {
            done.push((place, job, read));
        }
    }
}

/// A job with what its script asks for, which is read once.
pub(crate) async fn see(context: &Arc<Context>, job: &QueuedJob) -> Result<ObservedJob, WlmError> {
    let known = context.queue.asked().get(&first_life(job.id)).cloned();
    let mut asked = match known {
        Some(asked) => asked,
        None => {
            let asked = ask(context, job).await?;
            context.queue.asked().insert(first_life(job.id), asked.clone());
            asked
        }
    };
    let config = context.config();
    let io_nodes = match (&config.scheduler.io_nodes[..], asked.io_nodes.get(&job.nodes)) {
        ([], _) => job.nodes.clone(),
        (_, Some(known)) => known.clone(),
        (command, None) if asked.is_to_map(job) => {
            let found = map_nodes(command, job).await;
            match &found {
                Ok(found) => drop(asked.io_nodes.insert(job.nodes.clone(), found.clone())),
                Err(why) => asked.unmapped = Some((Instant::now(), why.clone())),
            }
            // A Prolog may have asked at the same time.
            let before = context.queue.asked().insert(first_life(job.id), asked.clone());
            let before = before.and_then(|before| before.unmapped).map(|(_, why)| why);
            if let Err(why) = &found
                && before.as_ref() != Some(why)
            {
                tracing::error!(job = %job.id, why, "the site's io_nodes command failed");
            }
            found.unwrap_or_default()
        }
        _ => Vec::new(),
    };
    Ok(ObservedJob { job: job.clone(), request: asked.request, work_dir: asked.work_dir, io_nodes })
}

/// A job that is known, as its workload manager says that it has ended: by what is known of it.
pub(crate) fn known(job: &Job) -> ObservedJob {
    let queued = QueuedJob {
        id: job.id,
        owner: job.owner,
        account: job.account.clone(),
        standing: Standing::Ended,
        reason: String::new(),
        node_count: job.compute_nodes,
        nodes: job.nodes.clone(),
        start: None,
        submitted: job.submitted,
        priority: job.priority,
        qos: job.qos.clone(),
        held_for_input: false,
        dependent: false,
        depends_on: Vec::new(),
        component_of: job.component_of,
        several: false,
        has_burst_buffer: true,
        waits_for_results: false,
        burst_buffer_lost: false,
    };
    let (request, work_dir) = (Some(job.request.clone()), job.work_dir.clone());
    ObservedJob { job: queued, request, work_dir, io_nodes: job.io_nodes.clone() }
}

/// What a job's script comes to.
enum Script {
    /// It asks for a RAM disk; with the directory that the job was submitted from, and what it asks of layouts.
    Asks(Box<Request>, PathBuf, Option<Arc<StripingAsked>>),
    /// It asks for no RAM disk.
    OnDisk(Arc<StripingAsked>),
    AsksForNothing,
    /// It can't be obeyed.
    Wrong(String),
}

async fn ask(context: &Arc<Context>, job: &QueuedJob) -> Result<ScriptRequest, WlmError> {
    /// Enough of a reason for the log.
    const LOGGED: usize = 500;
    let waits_for_us = job.held_for_input && job.standing == Standing::Held;
    let wrong = match read(context, job).await {
        Ok(Script::Asks(request, work_dir, striping)) => {
            return Ok(ScriptRequest { striping, ..ScriptRequest::new(Some(*request), work_dir) });
        }
        Ok(Script::OnDisk(striping)) if !waits_for_us => {
            let work_dir = striping.work_dir.clone();
            return Ok(ScriptRequest { striping: Some(striping), ..ScriptRequest::new(None, work_dir) });
        }
        Ok(Script::OnDisk(_)) => "its script names no data directory".to_owned(),
        Ok(Script::AsksForNothing) if !waits_for_us => return Ok(ScriptRequest::new(None, "/".into())),
        Ok(Script::AsksForNothing) => "its script names no data directory".to_owned(),
        Ok(Script::Wrong(why)) => why,
        Err(WlmError::Refused { message }) if waits_for_us => format!("its script can't be read: {message}"),
        Err(error) => return Err(error),
    };
    tracing::info!(job = %job.id, wrong = plain(&wrong, LOGGED), "its directives can't be obeyed");
    let manager = &context.workload_manager;
    if waits_for_us {
        // Nobody else releases it. Before its mark is overwritten: if this fails now, the next look finds it again.
        match manager.release(job.id.job).await {
            Ok(()) => {}
            Err(error @ WlmError::Unavailable { .. }) => return Err(error),
            Err(error) => tracing::warn!(job = %job.id, %error, "it can't be released"),
        }
    }
    let text = format!("no RAM disk: {wrong}; the job works on disk");
    if context.config().scheduler.simulate.is_none()
        && let Err(error) = manager.set_comment(job.id.job, &text).await
    {
        tracing::debug!(job = %job.id, %error, "can't tell its user");
    }
    Ok(ScriptRequest::new(None, "/".into()))
}

async fn read(context: &Arc<Context>, job: &QueuedJob) -> Result<Script, WlmError> {
    let aside = context.journal.read(|reader| reader.is_set_aside(job.id));
    // What can't be told is looked at again: a job that is set aside must not get a second RAM disk.
    if aside.map_err(|error| WlmError::Unavailable { message: error.to_string() })? {
        return Ok(Script::Wrong("what the scheduler's journal has of it is not understood".into()));
    }
    // Slurm keeps the script with the first component of a heterogeneous job; the others have the comments of their part.
    let script = match context.workload_manager.script(job.component_of.unwrap_or(job.id.job)).await {
        Ok(script) => script,
        Err(WlmError::NoScript(_)) => return Ok(Script::AsksForNothing),
        Err(error) => return Err(error),
    };
    // It may be of any length.
    let read = move || (ondeck_directive::parse_alone(&script), started_by(&script));
    let (parsed, started) = tokio::task::spawn_blocking(read)
        .await
        .map_err(|error| WlmError::Malformed { what: error.to_string() })?;
    let request = match parsed {
        Ok(parsed) if asks_for_no_ram_disk(&parsed.request) && !says_of_disk(&parsed.request) => {
            return Ok(Script::AsksForNothing);
        }
        Ok(parsed) => parsed.request,
        Err(errors) => {
            let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
            return Ok(Script::Wrong(errors.join("; ")));
        }
    };
    let details = context.workload_manager.details(job.id.job).await?;
    let work_dir = details.work_dir;
    Ok(match absolute(request, &work_dir) {
        Ok(request) => {
            let asked = || StripingAsked {
                request: request.striping.clone(),
                outputs: request.data_out.clone(),
                work_dir: work_dir.clone(),
                tasks: details.tasks,
                array: details.array,
                program: JobProgram::of(started.clone(), &details.name),
                io: request.io,
            };
            let striping = says_of_disk(&request).then(|| Arc::new(asked()));
            match striping {
                Some(striping) if asks_for_no_ram_disk(&request) => Script::OnDisk(striping),
                striping => Script::Asks(Box::new(request), work_dir, striping),
            }
        }
        Err(why) => Script::Wrong(why),
    })
}

fn asks_for_no_ram_disk(request: &Request) -> bool {
    request.data_in.is_empty() && request.data_out.is_empty()
}

/// Whether it says something of what the job does on disk.
fn says_of_disk(request: &Request) -> bool {
    !request.striping.is_empty() || request.io.is_some()
}

/// A request whose paths are absolute and plain.
fn absolute(mut request: Request, work_dir: &Path) -> Result<Request, String> {
    match check_path(work_dir) {
        // It matters to relative paths only.
        Ok(()) | Err(PathError::Parent) => {}
        Err(error) => return Err(format!("the directory that it starts in: {error}")),
    }
    let plain = |path: &mut PathBuf| -> Result<(), String> {
        let joined = work_dir.join(&path);
        check_path(&joined).map_err(|error| format!("{}: {error}", path.display()))?;
        *path = joined.components().collect();
        Ok(())
    };
    request.data_in.iter_mut().chain(&mut request.data_out).try_for_each(plain)?;
    request.stage_in.iter_mut().chain(&mut request.stage_out).try_for_each(plain)?;
    for directory in &mut request.striping.directories {
        // One that can't be costs the job its layout there, and nothing else: it stays as it was written, and is told.
        let _ = plain(&mut directory.path);
    }
    Ok(request)
}

/// Asks the site's command where a job's RAM disk is to be shown.
async fn map_nodes(command: &[String], job: &QueuedJob) -> Result<Vec<NodeName>, String> {
    const PATIENCE: Duration = Duration::from_secs(5);
    let [program, arguments @ ..] = command else { return Ok(job.nodes.clone()) };
    let nodes: Vec<&str> = job.nodes.iter().map(NodeName::as_str).collect();
    let mut process = tokio::process::Command::new(program);
    process.args(arguments).arg(job.id.job.to_string()).arg(nodes.join(",")).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, process.output())
        .await
        .map_err(|_| format!("{program} took longer than {} s", PATIENCE.as_secs()))?
        .map_err(|error| format!("can't run {program}: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "{program}: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.split_whitespace().map(|name| name.parse().map_err(|error| format!("{program}: {error}"))).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::samples::queued;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    fn of(path: &[u8], work_dir: &[u8]) -> Result<PathBuf, String> {
        let request = Request { data_in: vec![OsStr::from_bytes(path).into()], ..Request::default() };
        absolute(request, Path::new(OsStr::from_bytes(work_dir))).map(|mut request| request.data_in.remove(0))
    }

    #[tokio::test]
    async fn a_reading_that_panics_leaves_all_others_in_the_queue() {
        let jobs: Vec<(usize, QueuedJob)> = (0..20).map(|number| (number, job(number as u32))).collect();
        let read = read_several(jobs, Duration::from_secs(60), |job| async move {
            assert_ne!(job.id.job, JobId(1), "a defect");
            Ok(job.id.job)
        });
        let mut read = read.await;
        read.sort_unstable_by_key(|(place, ..)| *place);
        assert_eq!(read.len(), 20);
        for (place, job, read) in read {
            assert_eq!(place, job.id.job.0 as usize);
            assert_eq!(read.ok(), (place != 1).then_some(job.id.job));
        }
        let late =
            read_several(vec![(0, job(0))], Duration::ZERO, |_| std::future::pending::<Result<(), _>>());
        assert!(matches!(late.await[..], [(0, _, Err(Unread::Later))]));
    }

    #[test]
    fn looks_follow_one_another_thrice_at_most_and_every_200_ms_in_the_mean() {
        for took in [1, 30, 1000].map(Duration::from_millis) {
            let start = tokio::time::Instant::now() + Duration::from_secs(60);
            let (mut clock, mut due, mut begins) = (start, start - Duration::from_secs(60), Vec::new());
            for _ in 0..50 {
                clock = clock.max(due);
                begins.push(clock);
                due = next_look(due, clock, took);
                clock += took;
            }
            let waits: Vec<Duration> = begins.windows(2).map(|two| two[1] - two[0] - took).collect();
            assert!(
                waits[..2].iter().all(Duration::is_zero) && waits[4..].iter().all(|wait| *wait == LOOK_PAUSE)
            );
        }
    }

    fn job(number: u32) -> QueuedJob {
        queued(number.to_string().parse().unwrap())
    }

    #[test]
    fn paths_begin_where_the_job_was_submitted() {
        assert_eq!(of(b"./a//b/.", b"/home/me").unwrap().as_os_str(), "/home/me/a/b");
        assert_eq!(of(b"/a", b"/home/me").unwrap().as_os_str(), "/a");
        assert_eq!(of(b"/a", b"/home/../me").unwrap().as_os_str(), "/a");
    }

    #[test]
    fn a_path_that_can_not_be_kept_is_refused_wherever_it_comes_from() {
        let long = [&b"/"[..], &b"x/".repeat(2047)].concat();
        assert!(of(b"a", &long[..4000]).is_ok());
        for (path, work_dir, part) in [
            (&b"/a"[..], &b"/home/\xff"[..], "starts in: the path is not UTF-8"),
            (b"/a", b"/home/\x1b", "starts in: the path holds control characters"),
            (b"a", b"/home/../me", "holds `..`"),
            (b"../a", b"/home/me", "holds `..`"),
            (b"\xff", b"/home/me", "not UTF-8"),
            (b"abcdef", &long, "longer than 4095"),
        ] {
            let error = of(path, work_dir).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
