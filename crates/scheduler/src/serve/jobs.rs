//! Which job is meant, what became of it, and waiting for its end.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::auth::Caller;
use ondeck_api::scheduler::{AllocationView, JobStory, JobView, LogLine, OtherLife, PartView, Waited};
use ondeck_api::wire::{Refusal, RefusalCode};
use ondeck_core::allocation::Purpose;
use ondeck_core::schedule::notice::Life;
use ondeck_core::schedule::{Job, JobState, RsaState, Time};
use ondeck_core::{Incarnation, JobId, JobSelector, NodeName, Owner, QueuedJob, Request, Standing};

use super::{Api, may_see};
use crate::clock::{self, now};
use crate::delays::JobDelay;
use crate::inventory;
use crate::store::StoreError;
use crate::striping::JobLayouts;

/// How long a look at the queue is waited for.
const LOOK: Duration = Duration::from_secs(5);

fn unknown(selector: JobSelector) -> Refusal {
    let message = format!("job {selector} is not known here: it has asked for nothing, or all of it is done");
    Refusal::new(RefusalCode::NotFound, message)
}

/// What of a job is told; its points in time as they are [`clock::shown`].
fn view(job: &Job) -> JobView {
    let parts = job.inventories.iter().map(|(node, inventory)| {
        let seen_ms = clock::shown(inventory.seen);
        (node.clone(), PartView { files: inventory.files, bytes: inventory.bytes, seen_ms })
    });
    JobView {
        id: job.id,
        owner: job.owner,
        account: job.account.clone(),
        request: job.request.clone(),
        work_dir: job.work_dir.clone(),
        component_of: job.component_of,
        compute_nodes: job.compute_nodes,
        nodes: job.nodes.clone(),
        priority: job.priority,
        submitted: job.submitted,
        started_ms: job.started.map(clock::shown),
        job_state: job.job_state,
        rsa_state: job.rsa_state,
        since_ms: clock::shown(job.since),
        purpose: job.purpose,
        allocation: job
            .allocation
            .as_ref()
            .map(|found| AllocationView { nodes: found.nodes.clone(), promise: found.promise }),
        io_nodes: job.io_nodes.clone(),
        results: job.results,
        abandoned: job.abandoned,
        held: job.hold.is_held(),
        failures: job.failures,
        parts: parts.collect(),
        lost_on: job.lost_on.clone(),
        message: job.message.clone(),
        waits_for: job.waits_for.clone(),
    }
}

/// A job that works on disk, and of which nothing is known but its layouts or its delay.
struct OnDisk {
    id: Incarnation,
    owner: Owner,
    account: String,
    request: Request,
    work_dir: PathBuf,
    nodes: Vec<NodeName>,
    compute_nodes: u32,
    submitted: u64,
    started: Option<Time>,
    since: Time,
    message: String,
}

impl OnDisk {
    fn of_layouts(layouts: &JobLayouts) -> OnDisk {
        OnDisk {
            id: layouts.id,
            owner: layouts.owner,
            account: layouts.account.clone(),
            request: Request { striping: layouts.request.clone(), ..Request::default() },
            work_dir: layouts.work_dir.clone(),
            nodes: layouts.nodes.clone(),
            compute_nodes: u32::try_from(layouts.nodes.len()).unwrap_or(u32::MAX),
            submitted: layouts.submitted,
            started: Some(layouts.since),
            since: layouts.since,
            message: layouts.told().unwrap_or_default(),
        }
    }

    fn of_delay(delay: &JobDelay) -> OnDisk {
        OnDisk {
            id: delay.id,
            owner: delay.owner,
            account: delay.account.clone(),
            request: delay.request.clone(),
            work_dir: delay.work_dir.clone(),
            nodes: Vec::new(),
            compute_nodes: delay.compute_nodes,
            submitted: delay.submitted,
            started: None,
            since: delay.since,
            message: String::new(),
        }
    }

    /// What of it is told. What of it is still in the queue is `queued`.
    fn view(self, done: bool, queued: Option<&QueuedJob>) -> JobView {
        let waits = |job: &QueuedJob| job.standing.waits() || job.standing == Standing::Held;
        // The queue may not have been looked at since its Epilog.
        let job_state = match queued {
            Some(job) if !done && waits(job) => JobState::Ondeck,
            Some(job) if !done && job.standing != Standing::Ended => JobState::Running,
            _ => JobState::Finished,
        };
        JobView {
            id: self.id,
            owner: self.owner,
            account: self.account,
            request: self.request,
            work_dir: self.work_dir,
            component_of: None,
            compute_nodes: self.compute_nodes,
            nodes: self.nodes,
            priority: queued.map_or(0, |job| job.priority),
            submitted: self.submitted,
            started_ms: self.started.map(clock::shown),
            job_state,
            rsa_state: RsaState::Initial,
            since_ms: clock::shown(self.since),
            purpose: Purpose::Output,
            allocation: None,
            io_nodes: Vec::new(),
            results: false,
            abandoned: false,
            held: false,
            failures: 0,
            parts: BTreeMap::new(),
            lost_on: BTreeSet::new(),
            message: self.message,
            waits_for: String::new(),
        }
    }
}

impl Api {
    /// The life that an order is about: the only one that is named and active, or the only one of them that waits for
    /// somebody to decide.
    pub(super) fn meant(&self, selector: JobSelector, caller: Caller) -> Result<Incarnation, Refusal> {
        let view = self.context.view();
        let of_number = view.jobs().range(Incarnation::of_number(selector.job)).map(|(_, job)| &**job);
        let named: Vec<&Job> =
            of_number.filter(|job| selector.takes(job.id) && may_see(caller, job.owner)).collect();
        let waits: Vec<&&Job> =
            named.iter().filter(|job| matches!(job.rsa_state, RsaState::Held | RsaState::Lost)).collect();
        match (named.as_slice(), waits.as_slice()) {
            ([], _) => Err(unknown(selector)),
            ([one], _) => Ok(one.id),
            (_, [one]) => Ok(one.id),
            _ => {
                let name =
                    |job: &&Job| format!("{} ({})", self.context.schedule().selector(job.id), job.rsa_state);
                let names: Vec<String> = named.iter().map(name).collect();
                let message = format!(
                    "{selector} may be several jobs: {}; name the one that you mean",
                    names.join(", ")
                );
                Err(Refusal::new(RefusalCode::Conflict, message))
            }
        }
    }

    /// The lives of all jobs that had a number, as far as the caller may see them, with whether all of each is done.
    fn of_number(
        &self,
        number: JobId,
        caller: Caller,
    ) -> Result<BTreeMap<Incarnation, (Job, bool)>, StoreError> {
        // First what is known now: what is gone meanwhile is among the past ones then.
        let now = self
            .context
            .view()
            .jobs()
            .range(Incarnation::of_number(number))
            .map(|(id, job)| (*id, (Job::clone(job), false)))
            .collect();
        let mut found: BTreeMap<Incarnation, (Job, bool)> = now;
        self.context.journal.read(|reader| {
            for id in reader.past_lives(number)? {
                if !found.contains_key(&id)
                    && let Some(job) = reader.past_job(id)?
                {
                    found.insert(id, (job, true));
                }
            }
            Ok(())
        })?;
        found.retain(|_, (job, _)| may_see(caller, job.owner));
        Ok(found)
    }

    /// The story of the newest life that is named.
    pub(super) async fn story(
        self: &Arc<Self>,
        selector: JobSelector,
        caller: Caller,
    ) -> Result<JobStory, Refusal> {
        let of_number = self
            .of_number(selector.job, caller)
            .map_err(|error| Refusal::new(RefusalCode::Failed, error.to_string()))?;
        let mut layouts = self
            .context
            .journal
            .read(|reader| reader.layouts_of(selector.job))
            .map_err(|error| Refusal::new(RefusalCode::Failed, error.to_string()))?;
        layouts.retain(|(layouts, _)| may_see(caller, layouts.owner));
        let mut delays = self
            .context
            .journal
            .read(|reader| reader.delays_of(selector.job))
            .map_err(|error| Refusal::new(RefusalCode::Failed, error.to_string()))?;
        delays.retain(|(delay, _)| may_see(caller, delay.owner));
        let of_layouts = layouts.iter().map(|(layouts, _)| layouts.id);
        let of_delays = delays.iter().map(|(delay, _)| delay.id);
        let known = of_number.keys().copied().chain(of_layouts).chain(of_delays);
        let newest = known.filter(|id| selector.takes(*id)).max();
        let id =
            newest.ok_or_else(|| self.held_back(selector, caller).unwrap_or_else(|| unknown(selector)))?;
        let layouts = layouts.into_iter().find(|(layouts, _)| layouts.id == id);
        let delay = delays.into_iter().find(|(delay, _)| delay.id == id);
        let others = of_number.iter().filter(|(other, _)| **other != id);
        let others: Vec<OtherLife> = others
            .map(|(other, (job, done))| OtherLife {
                id: *other,
                job_state: job.job_state,
                rsa_state: job.rsa_state,
                done: *done,
            })
            .collect();
        let log = self.log(Some(id)).await?;
        let on_disk = match (&layouts, &delay) {
            (Some((layouts, done)), _) => Some((OnDisk::of_layouts(layouts), *done)),
            (None, Some((delay, done))) => Some((OnDisk::of_delay(delay), *done)),
            (None, None) => None,
        };
        let delay = delay.map(|(delay, _)| delay.view());
        let (job, done) = match (of_number.get(&id).cloned(), on_disk) {
            (Some(known), _) => known,
            (None, Some((on_disk, done))) => {
                let snapshot = self.context.queue.snapshot();
                let mut all = snapshot.jobs.iter().chain(&*snapshot.whole_arrays);
                return Ok(JobStory {
                    job: on_disk.view(done, all.find(|job| job.id == id)),
                    done,
                    transfer: None,
                    log,
                    phases: Vec::new(),
                    layouts: layouts.map(|(layouts, _)| layouts.view()).unwrap_or_default(),
                    delay,
                    lost: Vec::new(),
                    others,
                });
            }
            // It is one of them.
            (None, None) => return Err(unknown(selector)),
        };
        let phases = phases(&log, if done { None } else { Some(clock::shown(now())) });
        let transfer = self.context.transfers().get(&id).cloned();
        let (context, of) = (Arc::clone(&self.context), job.clone());
        let failed = |error: &dyn std::fmt::Display| Refusal::new(RefusalCode::Failed, error.to_string());
        let lost = tokio::task::spawn_blocking(move || inventory::lost(&context, &of));
        let lost = lost.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        let layouts = layouts.map(|(layouts, _)| layouts.view()).unwrap_or_default();
        Ok(JobStory { job: view(&job), done, transfer, log, phases, layouts, delay, lost, others })
    }

    /// What to say of a job of which nothing is known yet, because it is held until another one has ended, or its time has
    /// come.
    fn held_back(&self, selector: JobSelector, caller: Caller) -> Option<Refusal> {
        let queued = self.context.queue.of_number(selector.job)?;
        let is_held = queued.held_for_input && queued.standing == Standing::Held;
        let message = format!(
            "job {selector} is held, and nothing is done for it yet: `squeue --jobs={} --Format=admin_comment:500` says why",
            selector.job
        );
        (is_held && selector.takes(queued.id) && may_see(caller, queued.owner))
            .then(|| Refusal::new(RefusalCode::NotFound, message))
    }

    /// Waits until nothing of a job is to be done any more, or somebody must decide, or the time is over.
    pub(super) async fn wait(
        self: &Arc<Self>,
        selector: JobSelector,
        caller: Caller,
        wait: Duration,
    ) -> Result<Waited, Refusal> {
        let (called, until) = (now(), Instant::now() + wait);
        // A job of which nothing is known any more has yet to leave the queue.
        let (mut changed, mut looks) = (self.context.watch(), self.context.queue.watch());
        loop {
            let waited = self.waited(selector, caller, called).await?;
            let left = until.saturating_duration_since(Instant::now());
            if waited.done || waited.stuck || left.is_zero() {
                return Ok(waited);
            }
            tokio::select! {
                _ = tokio::time::timeout(left, changed.changed()) => {}
                _ = looks.changed() => {}
            }
        }
    }

    /// How the newest job that is named is, with all of its lives that are.
    async fn waited(
        self: &Arc<Self>,
        selector: JobSelector,
        caller: Caller,
        called: Time,
    ) -> Result<Waited, Refusal> {
        let of = |job: &Job, done: bool| {
            // Also one that stays held for an input that its script did not make, by us or by Slurm itself.
            let is_told = job.job_state == JobState::Ondeck && job.is_told_to_fail();
            let decided_by_people = matches!(job.rsa_state, RsaState::Held | RsaState::Lost)
                || (job.rsa_state == RsaState::Ineligible && (job.hold.is_held() || is_told));
            Waited {
                done,
                abandoned: job.abandoned,
                stuck: decided_by_people && job.not_before.is_none() && !job.retry_now,
                state: format!("{}, {}", job.job_state, job.rsa_state),
                message: job.message.clone(),
                ran_full: job.ran_full,
            }
        };
        let named = |id: Incarnation, owner: Owner| selector.takes(id) && may_see(caller, owner);
        let known = || -> Vec<Job> {
            let view = self.context.view();
            let of_number = view.jobs().range(Incarnation::of_number(selector.job));
            let named = of_number.map(|(_, job)| &**job).filter(|job| named(job.id, job.owner));
            named.cloned().collect()
        };
        // If what is known has ended, the number may be another job's by now, submitted a moment ago; and one on which somebody must
        // decide may just have been cancelled.
        let goes_on = |job: &Job| job.job_state != JobState::Finished && !of(job, false).stuck;
        let snapshot = if known().iter().any(goes_on) {
            self.context.queue.snapshot()
        } else {
            match tokio::time::timeout(LOOK, self.context.queue.after(called)).await {
                Ok(snapshot) => snapshot,
                Err(_) if !known().is_empty() => self.context.queue.snapshot(),
                Err(_) if self.context.queue.snapshot().jobs.iter().any(|job| named(job.id, job.owner)) => {
                    self.context.queue.snapshot()
                }
                Err(_) => self.context.queue.after(called).await,
            }
        };
        let mut known = known();
        let queued: Vec<&QueuedJob> = snapshot.jobs.iter().filter(|job| named(job.id, job.owner)).collect();
        let newest =
            known.iter().map(|job| job.id.submitted).chain(queued.iter().map(|job| job.id.submitted)).max();
        known.retain(|job| Some(job.id.submitted) == newest);
        let queued = queued.into_iter().find(|job| Some(job.id.submitted) == newest);
        // Whichever of its lives somebody must decide on; else the one that began first.
        let known: Vec<Waited> = known.iter().map(|job| of(job, false)).collect();
        let stuck = known.iter().position(|waited| waited.stuck);
        if let Some(waited) = known.into_iter().nth(stuck.unwrap_or(0)) {
            return Ok(waited);
        }
        // Nothing is done for it now. If it has not ended, something may be yet, unless Slurm never starts it.
        let asks = !self.context.queue.asks_for_nothing(selector.job);
        if let Some(job) = queued.filter(|job| job.burst_buffer_lost) {
            return Ok(Waited {
                done: false,
                abandoned: false,
                stuck: true,
                state: format!("in the queue ({})", job.reason),
                message: Life::BurstBufferLost.to_string(),
                ran_full: false,
            });
        }
        if let Some(job) = queued.filter(|job| job.standing != Standing::Ended && asks) {
            return Ok(Waited {
                done: false,
                abandoned: false,
                stuck: false,
                state: format!("in the queue ({})", job.reason),
                message: String::new(),
                ran_full: false,
            });
        }
        let past = self
            .of_number(selector.job, caller)
            .map_err(|error| Refusal::new(RefusalCode::Failed, error.to_string()))?;
        let last = past.values().rev().map(|(job, _)| job).find(|job| selector.takes(job.id));
        if last.is_none()
            && let Some(message) = self.may_be_elsewhere(queued)
        {
            return Ok(Waited {
                done: false,
                abandoned: false,
                stuck: true,
                state: "not known to the journal".into(),
                message,
                ran_full: false,
            });
        }
        match (last, queued) {
            (Some(job), None) => Ok(of(job, true)),
            (Some(job), Some(queued)) if job.id.is_same_job(queued.id) => Ok(of(job, true)),
            (_, Some(_)) => Ok(Waited {
                done: true,
                abandoned: false,
                stuck: false,
                state: "nothing is done for it".into(),
                message: String::new(),
                ran_full: false,
            }),
            (None, None) if self.has_layouts(selector, caller)? => Ok(Waited {
                done: true,
                abandoned: false,
                stuck: false,
                state: "it has ended, and had no RAM disk".into(),
                message: String::new(),
                ran_full: false,
            }),
            (None, None) => Err(unknown(selector)),
        }
    }

    /// Whether a job that is named had layouts set, or asked for that.
    fn has_layouts(&self, selector: JobSelector, caller: Caller) -> Result<bool, Refusal> {
        let known = self.context.journal.read(|reader| reader.layouts_of(selector.job));
        let known = known.map_err(|error| Refusal::new(RefusalCode::Failed, error.to_string()))?;
        Ok(known.iter().any(|(layouts, _)| selector.takes(layouts.id) && may_see(caller, layouts.owner)))
    }

    /// Why nobody can say that a job has no results: it may have had a RAM disk before the journal began, on nodes that have
    /// not answered since.
    pub(super) fn may_be_elsewhere(&self, queued: Option<&QueuedJob>) -> Option<String> {
        let view = self.context.view();
        let began = view.began();
        if queued.is_some_and(|queued| Time(queued.submitted.saturating_mul(1000)) > began) {
            return None;
        }
        let nodes = view.nodes().iter();
        let silent: Vec<&str> =
            nodes.filter_map(|(name, node)| (!node.heard).then_some(name.as_str())).collect();
        (!silent.is_empty()).then(|| {
            format!(
                "nothing is known of it, and results that it had before the scheduler's journal began may be on {}, whose agents \
                 have not answered since",
                silent.join(", ")
            )
        })
    }
}

/// The seconds that a job spent in each state. The last one lasts until now, if it is not over.
fn phases(log: &[LogLine], now_ms: Option<u64>) -> Vec<(RsaState, f64)> {
    let mut phases: Vec<(RsaState, u64)> = Vec::new();
    let mut current: Option<(RsaState, u64)> = None;
    let mut spend = |state: RsaState, ms: u64| match phases.iter_mut().find(|(known, _)| *known == state) {
        Some((_, spent)) => *spent += ms,
        None => phases.push((state, ms)),
    };
    for line in log {
        let Some((_, state)) = line.states else { continue };
        match current {
            Some((known, _)) if known == state => {}
            Some((known, since)) => {
                spend(known, line.at_ms.saturating_sub(since));
                current = Some((state, line.at_ms));
            }
            None => current = Some((state, line.at_ms)),
        }
    }
    if let Some((state, since)) = current {
        let end = now_ms.or(log.last().map(|line| line.at_ms)).unwrap_or(since);
        spend(state, end.saturating_sub(since));
    }
    phases.into_iter().map(|(state, ms)| (state, ms as f64 / 1000.0)).collect()
}
