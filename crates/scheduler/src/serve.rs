//! The API of the scheduler. Who may do what: users see and touch their own jobs; administrators all; a hook is believed
//! only about the node that it comes from, and whether a job starts there is asked of the workload manager.

use std::collections::BTreeMap;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::auth::Caller;
use ondeck_api::scheduler::{
    Drain, Hook, HookAnswer, JobStatus, JobStory, LogLine, NodeStatus, OtherLife, Status, Usage, Waited,
};
use ondeck_api::server::{Reply, Request, Service};
use ondeck_api::wire::{Refusal, RefusalCode};
use ondeck_core::schedule::{Event, Job, JobState, Prolog, Refused, RsaState, Time};
use ondeck_core::{Incarnation, JobId, JobSelector, NodeName, Owner, QueuedJob, Standing};

use crate::clock;
use crate::daemon::{Daemon, now};
use crate::store::StoreError;
use crate::{execute, metrics, openapi, parts, queue, thesis};

/// The longest that a request for a state may wait for it.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// How long a look at the queue is waited for.
const LOOK: Duration = Duration::from_secs(5);

/// How long a Prolog that has waited in vain waits for the end of a mount that is under way: it has some time more.
const MOUNT_ENDS: Duration = Duration::from_secs(1);

/// The most lines of a log that are given at once.
const LOG_LINES: u32 = 10_000;

impl Service for Daemon {
    fn name(&self) -> &NodeName {
        &self.name
    }

    async fn route(self: Arc<Self>, request: Request) -> Result<Reply, Refusal> {
        let caller = request.caller;
        let segments = request.segments()?;
        if let Some(fault) = self.journal_fault() {
            return self.without_journal(request.method.as_str(), &segments, fault);
        }
        match (request.method.as_str(), segments.as_slice()) {
            ("POST", ["hooks", "prolog"]) => {
                let hook: Hook = request.json("the hook")?;
                Reply::json(&self.prolog(hook, caller).await?)
            }
            ("POST", ["hooks", "epilog"]) => {
                let hook: Hook = request.json("the hook")?;
                Reply::json(&self.epilog(hook, caller).await?)
            }
            ("GET", ["jobs"]) => Reply::json(&self.status(caller)),
            ("GET", ["jobs", id]) => Reply::json(&self.story(parse(id)?, caller).await?),
            ("GET", ["jobs", id, "wait"]) => {
                let ms = request.field("ms").and_then(|text| String::from_utf8(text).ok()?.parse().ok());
                let wait = Duration::from_millis(ms.unwrap_or(0)).min(LONGEST_WAIT);
                Reply::json(&self.wait(parse(id)?, caller, wait).await?)
            }
            ("POST", ["jobs", id, order @ ("retry" | "abandon")]) => {
                let id = self.meant(parse(id)?, caller)?;
                let by = match caller.address {
                    None => format!("user {}", caller.uid),
                    Some(address) => format!("user {} at {address}", caller.uid),
                };
                let event = if *order == "retry" {
                    let salvage = request.field("salvage").is_some_and(|text| text == b"true");
                    Event::Retry { job: id, salvage }
                } else {
                    Event::Abandon { job: id, by }
                };
                self.event(event).await.map_err(refused)?;
                Reply::json(&self.story(id.into(), caller).await?)
            }
            ("POST", ["nodes", node, "drain"]) => {
                caller.must_be_administrator()?;
                let Drain { why } = request.json("the reason")?;
                let why = if why.trim().is_empty() { "by hand".to_owned() } else { why };
                self.event(Event::Drain { node: parse_node(node)?, why }).await.map_err(refused)?;
                Reply::json(&self.status(caller))
            }
            ("POST", ["nodes", node, "give-up"]) => {
                caller.must_be_administrator()?;
                self.event(Event::GiveUp(parse_node(node)?)).await.map_err(refused)?;
                Reply::json(&self.status(caller))
            }
            ("POST", ["nodes", node, "resume"]) => {
                caller.must_be_administrator()?;
                self.event(Event::Resume(parse_node(node)?)).await.map_err(refused)?;
                Reply::json(&self.status(caller))
            }
            ("GET", ["usage"]) => {
                let days = request.field("days").and_then(|text| String::from_utf8(text).ok()?.parse().ok());
                Reply::json(&self.usage(days.unwrap_or(30), caller).await?)
            }
            ("GET", ["log"]) => {
                caller.must_be_administrator()?;
                let lines = self.log(None).await?;
                Ok(Reply::Text(lines.iter().filter_map(thesis::line).map(|line| line + "\n").collect()))
            }
            ("GET", ["metrics"]) => {
                Ok(Reply::Text(metrics::text(&self.brain().schedule, &self.queue.sight(), &self.compute)))
            }
            ("GET", ["openapi.json"]) => {
                let document: serde_json::Value = serde_json::from_str(openapi::DOCUMENT)
                    .map_err(|error| Refusal::new(RefusalCode::Failed, error.to_string()))?;
                Ok(Reply::Json(document))
            }
            _ => Err(request.no_such_path()),
        }
    }
}

fn parse(text: &str) -> Result<JobSelector, Refusal> {
    text.parse().map_err(|error: ondeck_core::queue::JobNameError| {
        Refusal::new(RefusalCode::Malformed, error.to_string())
    })
}

fn parse_node(text: &str) -> Result<NodeName, Refusal> {
    text.parse().map_err(|error: ondeck_core::allocation::NameError| {
        Refusal::new(RefusalCode::Malformed, error.to_string())
    })
}

fn refused(refused: Refused) -> Refusal {
    let code = match refused {
        Refused::NoJob(_) | Refused::NoNode(_) => RefusalCode::NotFound,
        Refused::NotNow(_) => RefusalCode::Conflict,
    };
    Refusal::new(code, refused.to_string())
}

fn unknown(selector: JobSelector) -> Refusal {
    let message = format!("job {selector} is not known here: it has asked for nothing, or all of it is done");
    Refusal::new(RefusalCode::NotFound, message)
}

impl Daemon {
    /// What can be said while the journal can't be written: that it can't.
    fn without_journal(&self, method: &str, segments: &[&str], fault: String) -> Result<Reply, Refusal> {
        match segments {
            ["jobs"] if method == "GET" => Reply::json(&Status {
                jobs: Vec::new(),
                nodes: Vec::new(),
                workload_manager: self.queue.sight().fault,
                simulated: self.config().scheduler.simulate.is_some(),
                journal: Some(fault),
                journal_name: self.charge.journal().journal.clone(),
                replaced_journals: self.charge.journal().replaced.clone(),
                warnings: Vec::new(),
            }),
            ["metrics"] => Ok(Reply::Text(metrics::journal(false))),
            _ => Err(Refusal::new(
                RefusalCode::Failed,
                format!(
                    "the scheduler's journal in {} can't be written ({fault}); nothing is decided until it can be",
                    self.config().scheduler.state.display()
                ),
            )),
        }
    }

    /// The life that an order is about: the only one that is named and active, or the only one of them that waits for
    /// somebody to decide.
    fn meant(&self, selector: JobSelector, caller: Caller) -> Result<Incarnation, Refusal> {
        let brain = self.brain();
        let of_number = brain.schedule.jobs().range(Incarnation::of_number(selector.job)).map(|(_, job)| job);
        let named: Vec<&Job> =
            of_number.filter(|job| selector.takes(job.id) && may_see(caller, job.owner)).collect();
        let waits: Vec<&&Job> =
            named.iter().filter(|job| matches!(job.rsa_state, RsaState::Held | RsaState::Lost)).collect();
        match (named.as_slice(), waits.as_slice()) {
            ([], _) => Err(unknown(selector)),
            ([one], _) => Ok(one.id),
            (_, [one]) => Ok(one.id),
            _ => {
                let name = |job: &&Job| format!("{} ({})", brain.schedule.selector(job.id), job.rsa_state);
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
        let brain = self.brain();
        let mut found = BTreeMap::new();
        for id in brain.store.past_lives(number)? {
            if let Some(job) = brain.store.past_job(id)? {
                found.insert(id, (job, true));
            }
        }
        for (id, job) in brain.schedule.jobs().range(Incarnation::of_number(number)) {
            found.insert(*id, (job.clone(), false));
        }
        found.retain(|_, (job, _)| may_see(caller, job.owner));
        Ok(found)
    }

    fn status(&self, caller: Caller) -> Status {
        let (transfers, sight) = (self.transfers().clone(), self.queue.sight());
        let refusing = self.refusing().clone();
        let brain = self.brain();
        let at = now();
        let jobs = brain.schedule.jobs().values().filter(|job| may_see(caller, job.owner));
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
        let nodes = brain.schedule.nodes().iter().map(|(name, node)| NodeStatus {
            node: name.clone(),
            pool: node.pool.clone(),
            state: node.state(),
            why: match (node.residue.first(), refusing.get(name)) {
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
                .filter(|id| brain.schedule.jobs().get(id).is_some_and(|job| may_see(caller, job.owner)))
                .copied()
                .collect(),
        });
        Status {
            jobs: jobs.collect(),
            nodes: nodes.collect(),
            workload_manager: sight.fault,
            simulated: self.config().scheduler.simulate.is_some(),
            journal: None,
            journal_name: self.charge.journal().journal.clone(),
            replaced_journals: self.charge.journal().replaced.clone(),
            warnings: if caller.is_administrator() {
                self.compute.warnings(brain.schedule.strays())
            } else {
                Vec::new()
            },
        }
    }

    async fn log(self: &Arc<Self>, job: Option<Incarnation>) -> Result<Vec<LogLine>, Refusal> {
        let daemon = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || daemon.brain().store.log(job, LOG_LINES));
        let failed = |error: &dyn std::fmt::Display| Refusal::new(RefusalCode::Failed, error.to_string());
        let mut lines = read.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        for line in &mut lines {
            line.at_ms = clock::shown(Time(line.at_ms));
        }
        Ok(lines)
    }

    async fn usage(self: &Arc<Self>, days: u64, caller: Caller) -> Result<Vec<Usage>, Refusal> {
        let (daemon, since) = (Arc::clone(self), (now().0 / 86_400_000).saturating_sub(days));
        let read = tokio::task::spawn_blocking(move || daemon.brain().store.usage(since));
        let failed = |error: &dyn std::fmt::Display| Refusal::new(RefusalCode::Failed, error.to_string());
        let mut usage = read.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        usage.retain(|used| caller.is_administrator() || caller.uid == used.uid);
        Ok(usage)
    }

    /// The story of the newest life that is named.
    async fn story(self: &Arc<Self>, selector: JobSelector, caller: Caller) -> Result<JobStory, Refusal> {
        let of_number = self
            .of_number(selector.job, caller)
            .map_err(|error| Refusal::new(RefusalCode::Failed, error.to_string()))?;
        let newest = of_number.keys().rev().copied().find(|id| selector.takes(*id));
        let id =
            newest.ok_or_else(|| self.held_back(selector, caller).unwrap_or_else(|| unknown(selector)))?;
        let others = of_number.iter().filter(|(other, _)| **other != id);
        let others: Vec<OtherLife> = others
            .map(|(other, (job, done))| OtherLife {
                id: *other,
                job_state: job.job_state,
                rsa_state: job.rsa_state,
                done: *done,
            })
            .collect();
        let (job, done) = of_number[&id].clone();
        let log = self.log(Some(id)).await?;
        let phases = phases(&log, if done { None } else { Some(clock::shown(now())) });
        let transfer = self.transfers().get(&id).cloned();
        let (daemon, of) = (Arc::clone(self), job.clone());
        let failed = |error: &dyn std::fmt::Display| Refusal::new(RefusalCode::Failed, error.to_string());
        let lost = tokio::task::spawn_blocking(move || parts::lost(&daemon, &of));
        let lost = lost.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        Ok(JobStory { job: clock::shown_job(job), done, transfer, log, phases, lost, others })
    }

    /// What to say of a job of which nothing is known yet, because it is held until another one has ended, or its time has
    /// come.
    fn held_back(&self, selector: JobSelector, caller: Caller) -> Option<Refusal> {
        let queued = self.queue.of_number(selector.job)?;
        let is_held = queued.held_for_input && queued.standing == Standing::Held;
        let message = format!(
            "job {selector} is held, and nothing is done for it yet: `squeue --jobs={} --Format=admin_comment:500` says why",
            selector.job
        );
        (is_held && selector.takes(queued.id) && may_see(caller, queued.owner))
            .then(|| Refusal::new(RefusalCode::NotFound, message))
    }

    /// Waits until nothing of a job is to be done any more, or somebody must decide, or the time is over.
    async fn wait(
        self: &Arc<Self>,
        selector: JobSelector,
        caller: Caller,
        wait: Duration,
    ) -> Result<Waited, Refusal> {
        let (called, until) = (now(), Instant::now() + wait);
        // A job of which nothing is known any more has yet to leave the queue.
        let (mut changed, mut looks) = (self.watch(), self.queue.watch());
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
            // Also one that stays held for an input that its script did not make.
            let decided_by_people = matches!(job.rsa_state, RsaState::Held | RsaState::Lost)
                || (job.rsa_state == RsaState::Ineligible && job.held);
            Waited {
                done,
                abandoned: job.abandoned,
                stuck: decided_by_people && job.not_before.is_none() && !job.retry_now,
                state: format!("{}, {}", job.job_state, job.rsa_state),
                message: job.message.clone(),
            }
        };
        let named = |id: Incarnation, owner: Owner| selector.takes(id) && may_see(caller, owner);
        let known = || -> Vec<Job> {
            let brain = self.brain();
            let of_number = brain.schedule.jobs().range(Incarnation::of_number(selector.job));
            of_number.map(|(_, job)| job).filter(|job| named(job.id, job.owner)).cloned().collect()
        };
        // If what is known has ended, the number may be another job's by now, submitted a moment ago.
        let sight = if known().iter().any(|job| job.job_state != JobState::Finished) {
            self.queue.sight()
        } else {
            match tokio::time::timeout(LOOK, self.queue.after(called)).await {
                Ok(sight) => sight,
                Err(_) if !known().is_empty() => self.queue.sight(),
                Err(_) if self.queue.sight().jobs.iter().any(|job| named(job.id, job.owner)) => {
                    self.queue.sight()
                }
                Err(_) => self.queue.after(called).await,
            }
        };
        let mut known = known();
        let queued: Vec<&QueuedJob> = sight.jobs.iter().filter(|job| named(job.id, job.owner)).collect();
        let newest =
            known.iter().map(|job| job.id.submitted).chain(queued.iter().map(|job| job.id.submitted)).max();
        known.retain(|job| Some(job.id.submitted) == newest);
        // Whichever of its lives somebody must decide on; else the one that began first.
        let known: Vec<Waited> = known.iter().map(|job| of(job, false)).collect();
        let stuck = known.iter().position(|waited| waited.stuck);
        if let Some(waited) = known.into_iter().nth(stuck.unwrap_or(0)) {
            return Ok(waited);
        }
        // Nothing is done for it now. If it has not ended, something may be yet.
        let asks = !self.queue.asks_for_nothing(selector.job);
        let queued = queued.into_iter().find(|job| Some(job.id.submitted) == newest);
        if let Some(job) = queued.filter(|job| job.standing != Standing::Ended && asks) {
            return Ok(Waited {
                done: false,
                abandoned: false,
                stuck: false,
                state: format!("in the queue ({})", job.reason),
                message: String::new(),
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
            }),
            (None, None) => Err(unknown(selector)),
        }
    }

    /// Why nobody can say that a job has no results: it may have had a RAM disk before the journal began, on nodes that have
    /// not answered since.
    fn may_be_elsewhere(&self, queued: Option<&QueuedJob>) -> Option<String> {
        let brain = self.brain();
        let began = brain.schedule.began();
        if queued.is_some_and(|queued| Time(queued.submitted.saturating_mul(1000)) > began) {
            return None;
        }
        let nodes = brain.schedule.nodes().iter();
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

    /// Whether a hook comes from root of the node that it speaks of.
    async fn believe(&self, hook: &Hook, caller: Caller) -> Result<(), Refusal> {
        let stranger = || {
            let message =
                format!("only root of {} may say what happens there, from a port below 1024", hook.node);
            Refusal::new(RefusalCode::Forbidden, message)
        };
        if caller.uid != 0 {
            return Err(stranger());
        }
        let Some(address) = caller.address else {
            // Root of this machine.
            return if hook.node == self.name { Ok(()) } else { Err(stranger()) };
        };
        let name = hook.node.clone();
        let known = tokio::task::spawn_blocking(move || -> Vec<IpAddr> {
            let found = (name.as_str(), 0).to_socket_addrs();
            found.into_iter().flatten().map(|found| found.ip().to_canonical()).collect()
        });
        let known = known.await.unwrap_or_default();
        if caller.privileged_port && known.contains(&address.to_canonical()) {
            Ok(())
        } else {
            Err(stranger())
        }
    }

    async fn prolog(self: &Arc<Self>, hook: Hook, caller: Caller) -> Result<HookAnswer, Refusal> {
        self.believe(&hook, caller).await?;
        self.compute.prolog_asked(&hook.node);
        let longest = self.config().scheduler.limits.prolog;
        let until = Instant::now() + Duration::from_millis(hook.patience_ms).min(longest);
        let on_disk =
            |message: &str| HookAnswer { mounted: false, message: message.to_owned(), undecided: true };
        if self.queue.asks_for_nothing(hook.job.job) {
            return Ok(on_disk(""));
        }
        // What the hook says of the job is not believed: the workload manager is asked.
        let sight = tokio::time::timeout_at(until.into(), self.queue.fresh()).await;
        let Ok(sight) = sight else { return Ok(on_disk("the workload manager does not answer")) };
        if let Some(fault) = sight.fault {
            return Ok(on_disk(&fault));
        }
        // Nor which life of the job it is: Slurm has a job in the queue once, and its hooks don't always count right.
        let Some(job) = sight.jobs.iter().find(|job| job.id.job == hook.job.job) else {
            return Ok(on_disk(""));
        };
        let id = job.id;
        let starts = matches!(job.standing, Standing::Running | Standing::Configuring);
        if !starts || !job.nodes.contains(&hook.node) {
            return Ok(on_disk(""));
        }
        let seen = match queue::see(self, job).await {
            Ok(seen) if seen.request.is_some() => seen,
            Ok(_) => return Ok(on_disk("")),
            Err(error) => return Ok(on_disk(&error.to_string())),
        };
        let mut changed = self.watch();
        self.event(Event::Starting(Box::new(seen))).await.map_err(refused)?;
        let (mut until, mut waited) = (until, false);
        loop {
            let Some(job) = self.job(id) else { return Ok(on_disk("")) };
            if job.forgotten || job.job_state == JobState::Finished {
                // A node does not start a job while an earlier run of it lives there. What that one saw must not be seen by
                // this one.
                self.leave(id, &hook.node, until).await?;
                let message =
                    "what an earlier run of it wrote is brought home first; it works on disk".into();
                return Ok(HookAnswer { mounted: false, message, undecided: false });
            }
            waited |= job.prolog == Prolog::Waiting;
            let ends = waited && job.prolog == Prolog::Over && job.rsa_state == RsaState::Mounting;
            if job.prolog != Prolog::Waiting && !(ends && Instant::now() < until) {
                let mounted =
                    matches!(job.rsa_state, RsaState::InuseIn | RsaState::InuseBoth | RsaState::InuseOut);
                let undecided = job.rsa_state == RsaState::Mounting;
                return Ok(HookAnswer { mounted, message: job.message, undecided });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || tokio::time::timeout(left, changed.changed()).await.is_err() {
                if job.prolog == Prolog::Waiting {
                    self.event(Event::PrologOver(id)).await.map_err(refused)?;
                    // The mount is given up, or was complete.
                    until = Instant::now() + MOUNT_ENDS;
                    continue;
                }
                return Ok(on_disk(
                    "its RAM disk is not mounted yet; it will be on all of its nodes or on none",
                ));
            }
        }
    }

    async fn epilog(self: &Arc<Self>, hook: Hook, caller: Caller) -> Result<HookAnswer, Refusal> {
        self.believe(&hook, caller).await?;
        let longest = self.config().scheduler.limits.epilog;
        let until = Instant::now() + Duration::from_millis(hook.patience_ms).min(longest);
        let unmounted = |message: String| HookAnswer { mounted: false, message, undecided: false };
        // An earlier job of the same number may have left results.
        let queued = self.queue.of_number(hook.job.job);
        // A requeue counts before the Epilogs of the former life run, and they are told the new count.
        let former = {
            let brain = self.brain();
            let of_number = brain.schedule.jobs().range(Incarnation::of_number(hook.job.job));
            let lives = of_number.map(|(_, job)| job).filter(|job| {
                let of_node = job.io_nodes.contains(&hook.node) || job.nodes.contains(&hook.node);
                let is_over = matches!(job.job_state, JobState::Running | JobState::Finished);
                let is_it = queued.as_ref().is_none_or(|queued| queued.id.is_same_job(job.id));
                is_it && job.id.restarts <= hook.job.restarts && of_node && is_over
            });
            lives.max_by_key(|job| job.id).map(|job| job.id)
        };
        let Some(id) = former else { return Ok(unmounted(String::new())) };
        self.leave(id, &hook.node, until).await
    }

    /// Nothing of a job runs on a node any more: its RAM disk is taken away there.
    async fn leave(
        self: &Arc<Self>,
        id: Incarnation,
        node: &NodeName,
        until: Instant,
    ) -> Result<HookAnswer, Refusal> {
        let unmounted = |message: String| HookAnswer { mounted: false, message, undecided: false };
        let mut changed = self.watch();
        self.event(Event::Ending { job: id, node: node.clone() }).await.map_err(refused)?;
        self.queue.hurry();
        loop {
            let Some(job) = self.job(id) else { return Ok(unmounted(String::new())) };
            if !job.rsa_state.is_shown() || !job.io_nodes.contains(node) {
                return Ok(unmounted(job.message));
            }
            let left = until.saturating_duration_since(Instant::now());
            let still =
                HookAnswer { mounted: true, message: "it is still being unmounted".into(), undecided: false };
            // The job goes on, or is ending, elsewhere; here the next job may come.
            if job.job_state == JobState::Running && job.rsa_state != RsaState::Mounting {
                let lock = self.unmounts_of(id);
                let _one_of_them = lock.read().await;
                let is_so = |now: &Job| now.job_state == job.job_state && now.rsa_state == job.rsa_state;
                if !self.job(id).is_some_and(|now| is_so(&now)) {
                    continue;
                }
                let Some(ramdisk) = job.ramdisk() else { return Ok(unmounted(job.message)) };
                let here = std::slice::from_ref(node);
                self.take_charge(here).await;
                execute::tell_of_cuts(self, &job, &ramdisk, here).await;
                let mut faults = self.fleet.uncover(&ramdisk, here, true, until).await;
                faults.extend(self.fleet.leave(&ramdisk, here, until).await);
                return Ok(if faults.is_empty() { unmounted(job.message) } else { still });
            }
            if left.is_zero() || tokio::time::timeout(left, changed.changed()).await.is_err() {
                return Ok(still);
            }
        }
    }
}

fn may_see(caller: Caller, owner: Owner) -> bool {
    caller.is_administrator() || caller.uid == owner.uid
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
