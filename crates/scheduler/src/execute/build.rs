//! Building a job's RAM disk and destroying it, and what the journal keeps of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use ondeck_api::CallError;
use ondeck_api::wire::{LocalReport, Release};
use ondeck_core::allocation::JobTag;
use ondeck_core::schedule::{Fault, Job, Outcome, Work, WorkOrder};
use ondeck_core::{Incarnation, Layout, NodeName, RamDiskId};
use ondeck_fleet::{BuildError, Plan, Size};
use ondeck_ramdisk::Secret;

use super::late;
use super::outcome::{failed, said, words};
use crate::context::Context;

pub(super) async fn construct(context: &Arc<Context>, job: &Job, id: &RamDiskId, until: Instant) -> Outcome {
    let Some(allocation) = &job.allocation else { return failed("it has no RSA nodes", Fault::Transient) };
    if job.older
        && let Err(outcome) = uses_no_other(context, job, id).await
    {
        return outcome;
    }
    late::warn(context, job).await;
    let secret = match Secret::new() {
        Ok(secret) => secret,
        Err(error) => return failed(format!("random numbers: {error}"), Fault::Transient),
    };
    if let Err(error) = keep_ramdisk(context, job.id, id, &secret, None).await {
        return failed(error, Fault::Transient);
    }
    // Once, for a reload between two looks would mix two configurations.
    let config = context.config();
    let pools = config.scheduler.pools(&config.nodes);
    let pool = pools.values().find(|pool| pool.nodes.contains(&allocation.nodes[0]));
    let plan = Plan {
        name: id.name.clone(),
        engine: context.engine(job),
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
            cluster: context.cluster.get().cloned().unwrap_or_default(),
            job: job.id,
            purpose: job.purpose,
            account: job.account.clone(),
            request: job.request.clone(),
            work_dir: job.work_dir.clone(),
        }),
    };
    match context.fleet.create(&plan, |_| {}, std::future::pending()).await {
        Ok(built) => {
            if let Err(error) = keep_ramdisk(context, job.id, id, &secret, Some(built.layout)).await {
                return failed(error, Fault::Transient);
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
            Outcome::Failed { why: error.to_string(), blame, fault: Fault::Transient }
        }
    }
}

/// Whether a job that started before the journal began uses a RAM disk which the journal does not know: its servers may not
/// have answered since, but the job's own nodes show it.
async fn uses_no_other(context: &Arc<Context>, job: &Job, id: &RamDiskId) -> Result<(), Outcome> {
    let of_job: BTreeSet<&NodeName> = job.io_nodes.iter().chain(&job.nodes).collect();
    for node in of_job {
        let known = context.fleet.ramdisks_of(node).await.map_err(|error| {
            let why = format!("{node} does not say whether the job uses an earlier RAM disk there: {error}");
            failed(why, Fault::Transient)
        })?;
        let is_used = |local: &&LocalReport| {
            local.layout.id.name == id.name
                && local.layout.id.epoch != id.epoch
                && !(local.shown.is_empty() && local.overmounts.is_empty())
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

pub(super) async fn keep_ramdisk(
    context: &Arc<Context>,
    job: Incarnation,
    id: &RamDiskId,
    secret: &Secret,
    layout: Option<Layout>,
) -> Result<(), String> {
    let (context, id, secret) = (Arc::clone(context), id.clone(), secret.clone());
    tokio::task::spawn_blocking(move || {
        context.journal.write(|store| store.keep_ramdisk(job, &id, &secret, layout.as_ref()))
    })
    .await
    .map_err(|error| error.to_string())?
    .map_err(|error| error.to_string())
}

pub(super) async fn kept_ramdisk(context: &Arc<Context>, id: &RamDiskId) -> Result<(Secret, Layout), String> {
    let (context, id) = (Arc::clone(context), id.clone());
    let found = tokio::task::spawn_blocking(move || {
        let found = context.journal.read(|reader| reader.ramdisk(&id));
        found.map(|found| (id, found))
    });
    match found.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())? {
        (_, Some((secret, Some(layout)))) => Ok((secret, layout)),
        (id, _) => Err(format!("the layout of {id} is not known")),
    }
}

pub(super) async fn destroy(
    context: &Arc<Context>,
    job: &Job,
    order: WorkOrder,
    id: &RamDiskId,
    servers: &[NodeName],
) -> Outcome {
    // A job that still has results is never destroyed; if it were, the agents would refuse.
    if !job.results {
        let release = if job.abandoned {
            Release::Abandoned { by: format!("`ondeck job abandon {}`", job.id.key()) }
        } else {
            Release::StagedOut { task: order.number }
        };
        for fault in context.fleet.release(id, servers, &release).await {
            // The node does not destroy it then, which is said below.
            tracing::warn!(ramdisk = %id, %fault, "its results can't be released");
        }
    }
    let mut nodes = servers.to_vec();
    nodes.extend(job.io_nodes.iter().filter(|node| !servers.contains(node)).cloned());
    let faults = context.fleet.demolish(id, &nodes).await;
    let blame: Vec<NodeName> = faults.iter().map(|fault| fault.node.clone()).collect();
    if blame.is_empty() {
        return Outcome::Done(said(job, Work::Destroy));
    }
    Outcome::Failed { why: words(&faults), blame, fault: Fault::Transient }
}
