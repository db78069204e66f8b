//! Copying for a job, by the agents of its RSA nodes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ondeck_api::scheduler::Transfer;
use ondeck_api::wire::{JobDirectory, RefusalCode, Share, TaskReport, TaskRequest, TaskState, TaskWork};
use ondeck_core::schedule::{Event, Fault, Job, Outcome};
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Bytes, NodeName, RamDiskId, Rate};
use tokio::task::JoinSet;

use super::outcome::{failed, said};
use crate::clock;
use crate::context::Context;

/// How long one question after a task waits for its end.
const TASK_WAIT: Duration = Duration::from_secs(1);

/// How long an agent that does not answer is asked again before a task of it is given up.
const AGENT_PATIENCE: Duration = Duration::from_secs(20);

/// How long is waited before an agent is asked again.
const AGENT_PAUSE: Duration = Duration::from_millis(300);

/// Less than this is not worth the starting of several tasks.
const WORTH_SHARING: (u64, u64) = (256 << 20, 5000);

/// Copying for a job, by one or more of its RSA nodes.
pub(super) struct Staging {
    context: Arc<Context>,
    job: Job,
    id: RamDiskId,
    pub(super) nodes: Vec<NodeName>,
    until: Instant,
    began: Instant,
    /// How many tasks run at the same time: they share the bandwidth.
    tasks: u64,
    seen: Mutex<BTreeMap<String, TaskReport>>,
    /// Whether it goes on when the work that it belongs to has ended, until there is other work for the job.
    pub(super) goes_on: bool,
}

impl Staging {
    /// Copying by one task, which ends with the work that it belongs to.
    pub(super) fn new(
        context: &Arc<Context>,
        job: &Job,
        id: &RamDiskId,
        nodes: Vec<NodeName>,
        until: Instant,
    ) -> Staging {
        Staging {
            context: Arc::clone(context),
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
    pub(super) async fn task(
        &self,
        node: &NodeName,
        name: &str,
        work: TaskWork,
        share: Option<Share>,
    ) -> Result<TaskReport, Outcome> {
        let (context, id, until) = (&self.context, &self.id, self.until);
        let home = matches!(work, TaskWork::BringHome { .. });
        let config = context.config();
        let site = &config.scheduler;
        let bandwidth = site.bandwidth.zip(site.staging).map(|(Rate(Bytes(all)), jobs)| {
            let tasks = if share.as_ref().is_some_and(|share| !share.all_but) { self.tasks } else { 1 };
            Rate(Bytes((all / u64::from(jobs.max(1)) / tasks).max(1)))
        });
        let slowed = context.loads.slowed(disk_of(&work), bandwidth);
        let bandwidth = slowed.as_ref().map(|(_, rate)| *rate).or(bandwidth);
        if let Some((filesystem, rate)) = slowed {
            let (job, filesystem) = (self.job.id, filesystem.display());
            tracing::info!(%job, task = name, %filesystem, %rate, "it goes slower, as the filesystem is busy");
        }
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
        let blamed =
            |why: String| Outcome::Failed { why, blame: vec![node.clone()], fault: Fault::Transient };
        let mut silent_since: Option<Instant> = None;
        let mut started = false;
        loop {
            let answer = if started {
                context.fleet.task(node, id, name, TASK_WAIT).await
            } else {
                context.fleet.start_task(node, id, name, &request).await
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
            let number = self.job.under_way.map(|order| order.number);
            let is_mine = |now: Option<u64>| now == number || (self.goes_on && now.is_none());
            if !context.job(self.job.id).is_some_and(|now| is_mine(now.under_way.map(|order| order.number))) {
                // Somebody has decided otherwise.
                return Err(failed("given up", Fault::Transient));
            }
        }
    }

    /// Keeps how far it is, for whoever looks.
    fn follow(&self, name: &str, report: &TaskReport) {
        let mut seen = self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        seen.insert(name.to_owned(), report.clone());
        let transfer = progress(seen.values(), self.began.elapsed());
        self.context.transfers().insert(self.job.id, transfer);
    }

    /// Tells the user which results stand beside the files of others: nobody would look for them.
    pub(super) async fn tell_of_conflicts(&self) {
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
        let _ = self.context.event(told).await;
    }

    /// Keeps how much was copied, for whoever asks later what the job read and wrote.
    pub(super) async fn note_moved(&self) {
        let Some(order) = self.job.under_way else { return };
        let moved = {
            let seen = self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            sum(seen.values())
        };
        let (context, job) = (Arc::clone(&self.context), self.job.id);
        let note =
            move || context.journal.write(|store| store.note_moved(job, order.work, clock::now(), moved));
        match tokio::task::spawn_blocking(note).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%job, %error, "how much was copied for it can't be kept"),
            Err(error) => tracing::error!(%job, %error, "how much was copied for it can't be kept"),
        }
    }

    /// What is said of a success.
    pub(super) fn done(&self, last: &TaskReport) -> Outcome {
        let Some(order) = self.job.under_way else { return failed("it has no task", Fault::Transient) };
        let seen = self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut text = format!("{}: {}", said(&self.job, order.work), copied(seen.values()));
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

/// Stages with all of a job's RSA nodes if that is worth while, and follows it to its end. What has several names, and
/// what belongs to a directory as a whole, is the last task's, on the first node.
pub(super) async fn stage(
    context: &Arc<Context>,
    job: &Job,
    nodes: Vec<NodeName>,
    id: &RamDiskId,
    name: &str,
    work: TaskWork,
    until: Instant,
) -> Outcome {
    let mut staging = Staging::new(context, job, id, nodes, until);
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
            Err(error) => failed = Some(self::failed(error.to_string(), Fault::Transient)),
        }
    }
    if let Some(outcome) = failed {
        return outcome;
    }
    match staging.task(&staging.nodes[0], name, work, rest).await {
        Ok(last) => {
            staging.tell_of_conflicts().await;
            staging.note_moved().await;
            staging.done(&last)
        }
        Err(outcome) => outcome,
    }
}

/// The directories on disk that a task copies from or to.
fn disk_of(work: &TaskWork) -> impl Iterator<Item = &Path> {
    let directories: &[JobDirectory] = match work {
        TaskWork::Fill { directories, .. } | TaskWork::BringHome { directories, .. } => directories,
        _ => &[],
    };
    directories.iter().map(|directory| directory.path.as_path())
}

/// How far tasks are that have run for so long.
fn progress<'a>(reports: impl Iterator<Item = &'a TaskReport>, time: Duration) -> Transfer {
    let mut all = Transfer::default();
    let mut written = 0;
    for report in reports {
        all.bytes += report.bytes_found;
        all.bytes_done += report.bytes_done;
        all.entries += report.entries_found;
        all.entries_done += report.entries_done;
        written += report.written();
    }
    let seconds = time.as_secs_f64().max(0.001);
    // A hole takes no time: it is no part of the rate. What is left may have holes as what is done had.
    all.rate = written as f64 / seconds;
    let left = all.bytes.saturating_sub(all.bytes_done) as f64;
    all.seconds_left = (all.bytes_done > 0).then(|| left * seconds / all.bytes_done as f64);
    all
}

/// What tasks have copied, in words: bytes that were written, without the holes of sparse files.
fn copied<'a>(reports: impl Iterator<Item = &'a TaskReport>) -> String {
    let (bytes, files) = sum(reports);
    format!("{bytes} in {files} files")
}

/// What tasks have written, and in how many files.
fn sum<'a>(reports: impl Iterator<Item = &'a TaskReport>) -> (Bytes, u64) {
    reports.fold((Bytes(0), 0), |(bytes, files), report| {
        (Bytes(bytes.0 + report.written()), files + report.entries_done)
    })
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
    failed(plain(&why, MESSAGE), if report.retryable { Fault::Transient } else { Fault::NeedsUser })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The report of a task that has done a sparse file of 1 GiB and as much again is left.
    fn report(bytes_written: Option<u64>) -> TaskReport {
        TaskReport {
            entries_found: 4,
            entries_done: 2,
            bytes_found: 2 << 30,
            bytes_done: 1 << 30,
            bytes_written,
            ..TaskReport::new("out")
        }
    }

    #[test]
    fn what_was_written_is_said_and_not_what_a_hole_could_hold() {
        assert_eq!(copied([report(Some(2048)), report(Some(1024))].iter()), "3 KiB in 4 files");
        assert_eq!(copied([report(None)].iter()), "1 GiB in 2 files", "a former agent says no more");
    }

    #[test]
    fn holes_are_part_of_what_is_done_and_not_of_the_rate() {
        let of = |written| progress([report(written)].iter(), Duration::from_secs(2));
        let now = of(Some(2048));
        assert_eq!((now.bytes, now.bytes_done, now.entries, now.entries_done), (2 << 30, 1 << 30, 4, 2));
        assert_eq!((now.rate, now.seconds_left), (1024.0, Some(2.0)));
        assert_eq!(of(None).rate, f64::from(1 << 29), "a former agent says no more");
    }
}
