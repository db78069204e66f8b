//! Filling a RAM disk, and adding what came to the disk since.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::{LocalReport, TaskState, TaskWork};
use ondeck_core::schedule::{Event, Fault, Job, JobState, Outcome, Prolog, Purpose};
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Bytes, EngineKind, NodeName, RamDiskId};

use super::directories::directories;
use super::outcome::{failed, words};
use super::staging::{Staging, stage};
use crate::context::Context;

/// The name of the task that fills a RAM disk.
const FILL: &str = "fill";

/// The name of the task that fills it when the job has started meanwhile.
const FILL_AGAIN: &str = "fill-again";

/// The name of the task that adds what was written until the RAM disk was shown.
pub(super) const CATCH_UP: &str = "catch-up";

/// A catch-up ends so long before the mount that it belongs to counts as failed.
const CATCH_UP_MARGIN: Duration = Duration::from_secs(2);

/// How often it is asked again how much of a RAM disk is free.
const ROOM_LOOKS: u32 = 3;

/// The time between two looks at how much of a RAM disk is free.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// Fills a job's RAM disk, on its RSA nodes.
pub(super) async fn fill(
    context: &Arc<Context>,
    job: &Job,
    id: &RamDiskId,
    servers: &[NodeName],
    until: Instant,
) -> Outcome {
    // It makes input; without any there is nothing to make.
    let script = job.request.stage_in.clone().filter(|_| job.purpose != Purpose::Output);
    let work = |moving| TaskWork::Fill { directories: directories(job), script: script.clone(), moving };
    let nodes = servers.to_vec();
    // A program that runs changes its output while it is copied. It is looked at once more before it is covered.
    let moving = |job: &Job| {
        let runs = job.job_state == JobState::Running && job.prolog == Prolog::Over;
        runs && job.purpose == Purpose::Output
    };
    let filled = stage(context, job, nodes.clone(), id, FILL, work(moving(job)), until).await;
    let now = context.job(job.id);
    match (filled, job.job_state) {
        (Outcome::Failed { .. }, _) if !moving(job) && now.as_ref().is_some_and(moving) => {
            stage(context, job, nodes, id, FILL_AGAIN, work(true), until).await
        }
        (Outcome::Failed { why, blame, .. }, _)
            if job.purpose == Purpose::Output
                && now.is_some_and(|now| now.job_state == JobState::Running) =>
        {
            // It may be the job itself that was in the way.
            Outcome::Failed { why, blame, fault: Fault::Transient }
        }
        (Outcome::Done(text), JobState::Running) => Outcome::Done(text),
        (Outcome::Done(text), _) => match too_tight(context, job, id).await {
            Ok(Some(why)) => Outcome::Tight(why),
            Ok(None) => Outcome::Done(text),
            Err(why) => failed(why, Fault::Transient),
        },
        (other, _) => other,
    }
}

/// Stops filling: on all nodes, whatever part each of them has. What is left of it ends with the RAM disk.
pub(super) async fn stop(context: &Arc<Context>, nodes: &[NodeName], id: &RamDiskId) -> Outcome {
    let faults = context.fleet.stop_tasks(nodes, id, FILL).await;
    if faults.is_empty() {
        Outcome::Done(format!("stopped data staging process of {id}"))
    } else {
        failed(words(&faults), Fault::Transient)
    }
}

/// Whether what a job is going to write does not fit beside its input, in words.
///
/// # Errors
/// If that can't be told: then it is not taken to fit.
async fn too_tight(context: &Arc<Context>, job: &Job, id: &RamDiskId) -> Result<Option<String>, String> {
    let wanted = job.request.out_size.filter(|_| job.purpose == Purpose::Both);
    // The node that has filled it sees all of it.
    let node = job.allocation.as_ref().and_then(|found| found.nodes.first());
    let (Some(wanted), Some(node)) = (wanted, node) else { return Ok(None) };
    for attempt in 0.. {
        let answer = match context.fleet.ramdisks_of(node).await {
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
            "RSA_OUT_SIZE asks for {wanted} beside the input, but of {size} only {free} are left; ask for {} or more with \
             RSA_CAPACITY, or lower RSA_OUT_SIZE",
            Bytes(size.0.saturating_sub(free.0).saturating_add(wanted.0))
        )
    }))
}

/// A job that ran already when the RAM disk came has written to disk until then, and does not see it any more: what is new
/// is put where it looks. What was changed since it was copied is told. Returns what was done.
pub(super) async fn catch_up(
    context: &Arc<Context>,
    job: &Job,
    id: &RamDiskId,
    until: Instant,
    goes_on: bool,
) -> Result<String, String> {
    let mut nodes = job.allocation.iter().flat_map(|found| &found.nodes);
    let node = nodes.next().cloned().ok_or("it has no RSA nodes")?;
    let mut staging = Staging::new(context, job, id, vec![node.clone()], until);
    staging.goes_on = goes_on;
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
        let _ = context.event(Event::Noticed { job: job.id, text: text.clone() }).await;
    }
    Ok(text)
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
