//! Delaying jobs that use the disk much while their filesystem is busy: by their begin time, which `squeue` shows.
//!
//! Jobs with a RAM disk are not delayed: what they write while they run does not reach the filesystem, and their RSA nodes would
//! wait with them. Neither are held jobs, jobs that wait for others, components of heterogeneous jobs, those whose user wants them
//! later anyway, and those that Slurm starts before it is seen how busy the filesystem is. An array is delayed as one job until its
//! first element has started; its elements are not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ondeck_core::schedule::Time;
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{QueuedJob, Request, Standing};
use ondeck_layout::heavy::{Heavy, heavy};
use ondeck_layout::{Filesystem, Site};
use ondeck_wlm::WlmError;

use crate::clock::now;
use crate::context::Context;
use crate::delays::{DelayEnd, EndReason, JobDelay, STEP, SeenJob, Step, begins_later, may_start_soon};
use crate::layout_history;
use crate::loads::Pressure;
use crate::queue_snapshot::QueueSnapshot;
use crate::store::StoreError;
use crate::striping::StripingAsked;

/// How often it is looked what is to be done if nothing happens.
const LOOK: Duration = Duration::from_secs(5);

/// So many jobs are newly delayed after a look at the queue: each is a command and a write to the journal.
const MOST_NEW: usize = 50;

/// Delays jobs and lets them go, for as long as the daemon lives.
pub(crate) async fn look_after(context: Arc<Context>) {
    // Whoever is not known to have waited would wait for a second time.
    loop {
        match context.journal.write(|store| store.open_delays()) {
            Ok(kept) => break context.delays.resume(kept),
            Err(error) => {
                tracing::error!(%error, "can't read which jobs are delayed; they start within a minute, and none is delayed until that can be read");
            }
        }
        tokio::time::sleep(STEP).await;
    }
    let mut looks = context.queue.watch();
    loop {
        tokio::select! {
            _ = looks.changed() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
        let snapshot = context.queue.snapshot();
        // What can't be seen is neither delayed nor let go: it starts by itself within a minute.
        if snapshot.fault.is_some() || !context.queue.is_seen() {
            continue;
        }
        let done = match go_on(&context, &snapshot).await {
            Ok(()) => delay_new(&context, &snapshot).await,
            other => other,
        };
        match done {
            Ok(()) => {}
            Err(Interrupted::Unanswered(error)) => {
                tracing::debug!(%error, "the workload manager is told later of jobs that are delayed");
            }
            Err(Interrupted::Unkept(error)) => {
                tracing::error!(%error, "what came of jobs that are delayed can't be kept; it is looked at again");
            }
        }
    }
}

/// Why a look was not done to its end.
enum Interrupted {
    /// The workload manager does not answer.
    Unanswered(WlmError),
    /// The journal can't be written or read.
    Unkept(StoreError),
}

impl From<StoreError> for Interrupted {
    fn from(error: StoreError) -> Self {
        Interrupted::Unkept(error)
    }
}

/// The job of a delay, as the queue shows it.
fn seen_in(
    snapshot: &QueueSnapshot,
    by_number: &BTreeMap<u32, &QueuedJob>,
    delay: &JobDelay,
) -> Option<SeenJob> {
    let job = by_number.get(&delay.id.job.0).filter(|job| delay.is_of(job.id, job.owner))?;
    let begin = snapshot.begin_times.get(&job.id.job).copied();
    Some(SeenJob { standing: job.standing, begin, start: job.start })
}

/// All jobs of the queue, and arrays that are one job as yet, by their numbers.
fn by_number(snapshot: &QueueSnapshot) -> BTreeMap<u32, &QueuedJob> {
    snapshot.jobs.iter().chain(&*snapshot.whole_arrays).map(|job| (job.id.job.0, job)).collect()
}

/// Does what is to be done for jobs that are delayed.
async fn go_on(context: &Arc<Context>, snapshot: &QueueSnapshot) -> Result<(), Interrupted> {
    if context.delays.is_empty() {
        return Ok(());
    }
    let (jobs, site) = (by_number(snapshot), context.loads.site());
    let pressure = |path: &Path| match site.as_deref().and_then(|site| filesystem_at(site, path)) {
        Some(filesystem) => context.loads.pressure(filesystem),
        None if context.loads.is_site_known() => Pressure::Unwatched,
        None => Pressure::Unknown,
    };
    let arrays: BTreeSet<u32> = snapshot.arrays.values().map(|array| array.0).collect();
    // An array whose elements have records of their own has begun.
    let begun = SeenJob { standing: Standing::Running, begin: None, start: None };
    let seen = |delay: &JobDelay| {
        let of_array = || arrays.contains(&delay.id.job.0).then_some(begun);
        seen_in(snapshot, &jobs, delay).or_else(of_array)
    };
    for (delay, step) in context.delays.steps(snapshot.taken, now(), seen, pressure) {
        do_step(context, delay, step).await?;
    }
    // As long as a job or an element of its array is there, it is not delayed again.
    for delay in context.delays.over() {
        if seen(&delay).is_none() {
            context.journal.write(|store| store.keep_delay(&delay, true, None))?;
            context.delays.forget(delay.id);
        }
    }
    Ok(())
}

fn filesystem_at<'a>(site: &'a Site, path: &Path) -> Option<&'a Filesystem> {
    site.filesystems.iter().find(|filesystem| filesystem.path == path)
}

async fn do_step(context: &Arc<Context>, mut delay: JobDelay, step: Step) -> Result<(), Interrupted> {
    let ordered = now();
    let end = |delay: &mut JobDelay, at, why| delay.ended = Some(DelayEnd { at, why });
    match step {
        Step::Wait => {}
        Step::Renew(time) => {
            if order(context, &delay, time).await? {
                context.delays.put(delay, now());
            }
        }
        Step::LetGo(why, time) => {
            let mut ended = delay.clone();
            end(&mut ended, ordered, why);
            if order(context, &ended, time).await? {
                keep_end(context, ended)?;
            }
        }
        Step::End(why, at) => {
            end(&mut delay, at, why);
            if why != EndReason::Gone {
                context.say(delay.id, plain(&delay.told(), MESSAGE));
            }
            keep_end(context, delay)?;
        }
    }
    Ok(())
}

fn keep_end(context: &Context, delay: JobDelay) -> Result<(), Interrupted> {
    let text = plain(&delay.told(), MESSAGE);
    tracing::info!(job = %delay.id, "{text}");
    context.delays.put(delay.clone(), now());
    context.journal.write(|store| store.keep_delay(&delay, false, Some(&text)))?;
    Ok(())
}

/// Has the workload manager keep a job from starting for so long, and tell its user; whether it has done so.
async fn order(context: &Context, delay: &JobDelay, time: Duration) -> Result<bool, Interrupted> {
    // A path may have any name, also that of the mark.
    let told = delay.told().replace(ondeck_wlm::HELD_FOR_INPUT, "ondeck hold");
    // A part of a second is one more: Slurm counts whole ones.
    let time = Duration::from_secs(time.as_millis().div_ceil(1000) as u64);
    match context.workload_manager.begin_after(delay.id.job, time, &format!("ondeck: {told}")).await {
        Ok(()) => Ok(true),
        Err(error @ WlmError::Unavailable { .. }) => Err(Interrupted::Unanswered(error)),
        // It may have started, or ended: the next look tells.
        Err(error) => {
            tracing::debug!(job = %delay.id, %error, "its begin time can't be changed");
            context.delays.failed(delay.id);
            Ok(false)
        }
    }
}

/// Delays jobs that were not delayed before.
async fn delay_new(context: &Arc<Context>, snapshot: &QueueSnapshot) -> Result<(), Interrupted> {
    let Some(site) = context.loads.site().filter(|_| context.loads.is_any_busy()) else { return Ok(()) };
    for (job, asked) in candidates(context, snapshot).into_iter().take(MOST_NEW) {
        let Some((filesystem, reason)) = wait_for(context, &site, job, &asked)? else { continue };
        let since = now();
        let begin = snapshot.begin_times.get(&job.id.job).copied();
        let delay = JobDelay {
            id: job.id,
            owner: job.owner,
            account: job.account.clone(),
            work_dir: asked.work_dir.clone(),
            submitted: job.submitted,
            compute_nodes: job.node_count,
            request: Request { striping: asked.request.clone(), io: asked.io, ..Request::default() },
            filesystem: filesystem.path.clone(),
            reason,
            since,
            until: since.plus(filesystem.heavy_wait),
            begin: begin.filter(|begin| Time(begin.saturating_mul(1000)) > since),
            ended: None,
        };
        let text = plain(&delay.told(), MESSAGE);
        // Before it is ordered: whoever comes after a crash must know since when it waits.
        context.journal.write(|store| store.keep_delay(&delay, false, Some(&text)))?;
        tracing::info!(job = %delay.id, "{text}");
        context.delays.put(delay.clone(), now());
        if order(context, &delay, delay.next_step(since)).await? {
            context.delays.put(delay, now());
        }
    }
    Ok(())
}

/// Jobs that work on disk, could start soon, and have lines that say something of it, those that are next first.
fn candidates<'a>(
    context: &Context,
    snapshot: &'a QueueSnapshot,
) -> Vec<(&'a QueuedJob, Arc<StripingAsked>)> {
    let (asked, at) = (context.queue.asked(), now());
    let all = snapshot.jobs.iter().chain(&*snapshot.whole_arrays);
    let mut found: Vec<(&QueuedJob, Arc<StripingAsked>)> = all
        .filter(|job| {
            let is_element = snapshot.arrays.get(&job.id.job).is_some_and(|array| *array != job.id.job);
            may_start_soon(job, at)
                && !is_element
                && job.component_of.is_none()
                && !begins_later(snapshot.begin_times.get(&job.id.job).copied(), at)
        })
        .filter_map(|job| {
            let asked = asked.get(job.id.lives().start())?;
            let on_disk = asked.request.is_none().then_some(asked.striping.as_ref()?)?;
            Some((job, Arc::clone(on_disk)))
        })
        .collect();
    drop(asked);
    found.retain(|(job, _)| !context.delays.knows(job.id, job.owner) && !context.delays.is_light(job.id));
    found.sort_by_key(|(job, _)| (std::cmp::Reverse(job.priority), job.id));
    found
}

/// The busy filesystem that a job has to wait for, and why; nothing if it has not.
fn wait_for<'a>(
    context: &Context,
    site: &'a Site,
    job: &QueuedJob,
    asked: &StripingAsked,
) -> Result<Option<(&'a Filesystem, String)>, StoreError> {
    let mut is_light = true;
    for (filesystem, directories) in directories_of(site, asked) {
        let Pressure::Busy { load } = context.loads.pressure(filesystem) else {
            is_light = false;
            continue;
        };
        if filesystem.heavy_wait.is_zero() {
            continue;
        }
        if let Some(heavy) = is_heavy(context, job, asked, filesystem, &directories)? {
            return Ok(Some((filesystem, format!("its load is {load}, and {heavy}"))));
        }
    }
    // Of a filesystem that is not busy now nothing was asked.
    if is_light {
        context.delays.set_light(job.id);
    }
    Ok(None)
}

fn is_heavy(
    context: &Context,
    job: &QueuedJob,
    asked: &StripingAsked,
    filesystem: &Filesystem,
    directories: &[PathBuf],
) -> Result<Option<Heavy>, StoreError> {
    let mut histories = Vec::new();
    if asked.io.is_none() {
        for directory in directories {
            let found =
                layout_history::recall_of(context, job.owner.uid, &asked.program.key, directory, now());
            histories.extend(found?);
        }
    }
    Ok(heavy(asked.io, &histories, filesystem))
}

/// The filesystems that a job uses, each with its directories there: those of its lines, else the one that it starts in.
fn directories_of<'a>(site: &'a Site, asked: &StripingAsked) -> Vec<(&'a Filesystem, Vec<PathBuf>)> {
    let (meant, _) = asked.request.meant(&asked.outputs);
    let named: Vec<PathBuf> = match meant.is_empty() {
        true => vec![asked.work_dir.clone()],
        // What is nobody's business has no history, but is written to.
        false => meant.into_iter().map(|directory| directory.path).collect(),
    };
    let mut found: Vec<(&Filesystem, Vec<PathBuf>)> = Vec::new();
    for path in named {
        let Some(filesystem) = site.filesystem_of(&path) else { continue };
        match found.iter_mut().find(|(known, _)| known.path == filesystem.path) {
            Some((_, paths)) => paths.push(path),
            None => found.push((filesystem, vec![path])),
        }
    }
    found
}
