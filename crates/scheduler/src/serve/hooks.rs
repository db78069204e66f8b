//! Prologs and Epilogs: a hook is believed only about the node that it comes from.

use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::auth::Caller;
use ondeck_api::scheduler::{Hook, HookAnswer};
use ondeck_api::wire::{Refusal, RefusalCode};
use ondeck_core::schedule::{Event, Job, JobState, ObservedJob, Prolog, RsaState};
use ondeck_core::{Incarnation, NodeName, Standing};

use super::{Api, refused};
use crate::{execute, layouts, queue};

/// How long a Prolog that has waited in vain waits for the end of a mount that is under way: it has some time more.
const MOUNT_ENDS: Duration = Duration::from_secs(1);

impl Api {
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
            return if hook.node == self.context.name { Ok(()) } else { Err(stranger()) };
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

    pub(super) async fn prolog(self: &Arc<Self>, hook: Hook, caller: Caller) -> Result<HookAnswer, Refusal> {
        self.believe(&hook, caller).await?;
        self.context.compute.prolog_asked(&hook.node);
        let longest = self.context.config().scheduler.limits.prolog;
        let until = Instant::now() + Duration::from_millis(hook.patience_ms).min(longest);
        let on_disk =
            |message: &str| HookAnswer { mounted: false, message: message.to_owned(), undecided: true };
        if self.context.queue.starts_by_itself(hook.job.job) {
            return Ok(on_disk(""));
        }
        // What the hook says of the job is not believed: the workload manager is asked.
        let snapshot = tokio::time::timeout_at(until.into(), self.context.queue.fresh()).await;
        let Ok(snapshot) = snapshot else { return Ok(on_disk("the workload manager does not answer")) };
        if let Some(fault) = snapshot.fault {
            return Ok(on_disk(&fault));
        }
        // Nor which life of the job it is: Slurm has a job in the queue once, and its hooks don't always count right.
        let Some(job) = snapshot.jobs.iter().find(|job| job.id.job == hook.job.job) else {
            return Ok(on_disk(""));
        };
        let id = job.id;
        let starts = matches!(job.standing, Standing::Running | Standing::Configuring);
        if !starts || !job.nodes.contains(&hook.node) {
            return Ok(on_disk(""));
        }
        let seen = match queue::see(&self.context, job).await {
            Ok(seen) => seen,
            Err(error) => return Ok(on_disk(&error.to_string())),
        };
        // Its script begins on its first node.
        let asked = self.context.queue.striping_of(id).filter(|_| job.nodes.first() == Some(&hook.node));
        let striping =
            asked.map(|asked| tokio::spawn(layouts::begin(Arc::clone(&self.context), job.clone(), asked)));
        let answer =
            if seen.request.is_some() { self.show(seen, &hook, until).await } else { Ok(on_disk("")) };
        if let Some(striping) = striping {
            // It goes on, whoever waits for it, and tells by itself what came of it.
            let longest = until.min(Instant::now() + layouts::PATIENCE);
            let _ = tokio::time::timeout_at(longest.into(), striping).await;
        }
        answer
    }

    /// Has a job that starts see its RAM disk, on all of its nodes or on none, and waits for that.
    async fn show(
        self: &Arc<Self>,
        seen: ObservedJob,
        hook: &Hook,
        until: Instant,
    ) -> Result<HookAnswer, Refusal> {
        let on_disk =
            |message: &str| HookAnswer { mounted: false, message: message.to_owned(), undecided: true };
        let id = seen.job.id;
        let mut changed = self.context.watch();
        self.context.event(Event::Starting(Box::new(seen))).await.map_err(refused)?;
        let (mut until, mut waited) = (until, false);
        loop {
            let Some(job) = self.context.job(id) else { return Ok(on_disk("")) };
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
                    self.context.event(Event::PrologOver(id)).await.map_err(refused)?;
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

    pub(super) async fn epilog(self: &Arc<Self>, hook: Hook, caller: Caller) -> Result<HookAnswer, Refusal> {
        self.believe(&hook, caller).await?;
        let longest = self.context.config().scheduler.limits.epilog;
        let until = Instant::now() + Duration::from_millis(hook.patience_ms).min(longest);
        let unmounted = |message: String| HookAnswer { mounted: false, message, undecided: false };
        layouts::left(&self.context, hook.job, &hook.node);
        // An earlier job of the same number may have left results.
        let queued = self.context.queue.of_number(hook.job.job);
        // A requeue counts before the Epilogs of the former life run, and they are told the new count.
        let former = {
            let view = self.context.view();
            let of_number = view.jobs().range(Incarnation::of_number(hook.job.job));
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
        let mut changed = self.context.watch();
        self.context.event(Event::Ending { job: id, node: node.clone() }).await.map_err(refused)?;
        self.context.queue.hurry();
        loop {
            let Some(job) = self.context.job(id) else { return Ok(unmounted(String::new())) };
            if !job.rsa_state.is_shown() || !job.io_nodes.contains(node) {
                return Ok(unmounted(job.message));
            }
            let left = until.saturating_duration_since(Instant::now());
            let still =
                HookAnswer { mounted: true, message: "it is still being unmounted".into(), undecided: false };
            // The job goes on, or is ending, elsewhere; here the next job may come.
            if job.job_state == JobState::Running && job.rsa_state != RsaState::Mounting {
                let lock = self.context.unmounts_of(id);
                let _one_of_them = lock.read().await;
                let is_so = |now: &Job| now.job_state == job.job_state && now.rsa_state == job.rsa_state;
                if !self.context.job(id).is_some_and(|now| is_so(&now)) {
                    continue;
                }
                let Some(ramdisk) = job.ramdisk() else { return Ok(unmounted(job.message)) };
                let here = std::slice::from_ref(node);
                self.context.take_charge(here).await;
                execute::tell_of_cuts(&self.context, &job, &ramdisk, here).await;
                let mut faults = self.context.fleet.remove_overmounts(&ramdisk, here, true, until).await;
                faults.extend(self.context.fleet.leave(&ramdisk, here, until).await);
                return Ok(if faults.is_empty() { unmounted(job.message) } else { still });
            }
            if left.is_zero() || tokio::time::timeout(left, changed.changed()).await.is_err() {
                return Ok(still);
            }
        }
    }
}
