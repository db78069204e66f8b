//! All that is going on, the log, and who has used what.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::sync::Arc;

use ondeck_api::auth::Caller;
use ondeck_api::scheduler::{JobStatus, LogLine, NodeStatus, Status, Usage};
use ondeck_api::wire::{Refusal, RefusalCode};
use ondeck_core::Incarnation;
use ondeck_core::schedule::{JobState, RsaState, Time};
use ondeck_core::timeline::Timeline;

use super::{Api, may_see};
use crate::clock::{self, now};
use crate::thesis;

/// The most lines of a log that are given at once.
const LOG_LINES: u32 = 10_000;

impl Api {
    pub(super) fn status(&self, caller: Caller) -> Status {
        let (transfers, snapshot) = (self.context.transfers().clone(), self.context.queue.snapshot());
        let refusing = self.context.refusing().clone();
        let view = self.context.view();
        let at = now();
        let jobs = view.jobs().values().filter(|job| may_see(caller, job.owner));
        let jobs = jobs.map(|job| JobStatus {
            id: job.id,
            owner: job.owner,
            job_state: job.job_state,
            rsa_state: job.rsa_state,
            seconds: at.since(job.since).as_secs_f64(),
            rsa_nodes: job.allocation.as_ref().map(|found| found.nodes.clone()).unwrap_or_default(),
            transfer: transfers.get(&job.id).cloned(),
            message: if job.waits_for.is_empty() { job.message.clone() } else { job.waits_for.clone() },
        });
        // Of a job that works on disk nothing else is to be done.
        let delayed = self.context.delays.waiting().into_iter();
        let delayed = delayed.filter(|delay| may_see(caller, delay.owner)).map(|delay| JobStatus {
            id: delay.id,
            owner: delay.owner,
            job_state: JobState::Ondeck,
            rsa_state: RsaState::Initial,
            seconds: at.since(delay.since).as_secs_f64(),
            rsa_nodes: Vec::new(),
            transfer: None,
            message: delay.told(),
        });
        let mut filesystems = self.context.loads.known();
        if !caller.is_administrator() {
            filesystems.iter_mut().for_each(|filesystem| filesystem.fault.clear());
        }
        let nodes = view.nodes().iter().map(|(name, node)| NodeStatus {
            node: name.clone(),
            pool: node.pool.clone(),
            state: node.state(),
            why: match (node.leftover_on_rsa.first(), refusing.get(name)) {
                (_, Some(why)) => why.clone(),
                (Some(left), None) => format!("{left} is still there"),
                (None, None) => node.drained.clone(),
            },
            capacity: node.capacity,
            free: node.free(),
            // Whose job is where is nobody else's business.
            jobs: node
                .promised
                .keys()
                .filter(|id| view.jobs().get(id).is_some_and(|job| may_see(caller, job.owner)))
                .copied()
                .collect(),
        });
        Status {
            jobs: jobs.chain(delayed).collect(),
            nodes: nodes.collect(),
            workload_manager: snapshot.fault,
            simulated: self.context.config().scheduler.simulate.is_some(),
            journal: None,
            journal_name: self.context.charge.journal().journal.clone(),
            replaced_journals: self.context.charge.journal().replaced.clone(),
            warnings: if caller.is_administrator() {
                self.context.compute.warnings(view.leftover_on_compute())
            } else {
                Vec::new()
            },
            places_lost: if caller.is_administrator() { view.places_lost().places } else { 0 },
            site_file: self.context.loads.site_fault().filter(|_| caller.is_administrator()),
            filesystems,
        }
    }

    pub(super) async fn log(self: &Arc<Self>, job: Option<Incarnation>) -> Result<Vec<LogLine>, Refusal> {
        Ok(self.journal(job).await?.into_iter().map(|(line, _)| line).collect())
    }

    /// The log of all jobs in the form of the thesis.
    pub(super) async fn thesis_log(self: &Arc<Self>) -> Result<String, Refusal> {
        let lines = self.journal(None).await?;
        Ok(lines.iter().filter_map(|(line, noted)| thesis::line(line, noted.as_deref())).collect())
    }

    /// Who had which nodes in the last hours: of all jobs, or of the caller's.
    pub(super) async fn timeline(
        self: &Arc<Self>,
        hours: NonZeroU64,
        caller: Caller,
    ) -> Result<Timeline, Refusal> {
        let end = now();
        let begin = Time(end.0.saturating_sub(hours.get().saturating_mul(3_600_000)));
        let context = Arc::clone(&self.context);
        let (known, rsa): (BTreeMap<_, _>, Vec<_>) = {
            let view = self.context.view();
            let jobs = view.jobs().iter().map(|(id, job)| (*id, (job.owner, job.nodes.clone())));
            (jobs.collect(), view.nodes().keys().cloned().collect())
        };
        let read = tokio::task::spawn_blocking(move || {
            context.journal.read(|reader| {
                let mut lines = reader.noted_since(begin)?;
                let mut jobs = known;
                for id in lines.iter().map(|line| line.job).collect::<BTreeSet<_>>() {
                    if !jobs.contains_key(&id)
                        && let Some(job) = reader.past_job(id)?
                    {
                        jobs.insert(id, (job.owner, job.nodes));
                    }
                }
                // Whose job is where is nobody else's business; whose it was is not known of one without a row.
                lines.retain(|line| match jobs.get(&line.job) {
                    Some((owner, _)) => may_see(caller, *owner),
                    None => caller.is_administrator(),
                });
                let compute = jobs.into_iter().map(|(id, (_, nodes))| (id, nodes)).collect();
                Ok(Timeline::of_log(&lines, &compute, rsa, begin.0, end.0))
            })
        });
        let failed = |error: &dyn std::fmt::Display| Refusal::new(RefusalCode::Failed, error.to_string());
        let mut timeline = read.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        timeline.begin_ms = clock::shown(begin);
        Ok(timeline)
    }

    async fn journal(
        self: &Arc<Self>,
        job: Option<Incarnation>,
    ) -> Result<Vec<(LogLine, Option<String>)>, Refusal> {
        let context = Arc::clone(&self.context);
        let read = tokio::task::spawn_blocking(move || {
            context.journal.read(|reader| reader.log_with_thesis(job, LOG_LINES))
        });
        let failed = |error: &dyn std::fmt::Display| Refusal::new(RefusalCode::Failed, error.to_string());
        let mut lines = read.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        for (line, _) in &mut lines {
            line.at_ms = clock::shown(Time(line.at_ms));
        }
        Ok(lines)
    }

    pub(super) async fn usage(self: &Arc<Self>, days: u64, caller: Caller) -> Result<Vec<Usage>, Refusal> {
        let (context, since) = (Arc::clone(&self.context), (now().0 / 86_400_000).saturating_sub(days));
        let read = tokio::task::spawn_blocking(move || context.journal.read(|reader| reader.usage(since)));
        let failed = |error: &dyn std::fmt::Display| Refusal::new(RefusalCode::Failed, error.to_string());
        let mut usage = read.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        usage.retain(|used| caller.is_administrator() || caller.uid == used.uid);
        Ok(usage)
    }
}
