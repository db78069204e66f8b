//! Doing what was decided, by the agents. All of it may be done twice.
//!
//! # Layout
//!
//! - `build`: building a job's RAM disk, and destroying it
//! - `staging`: copying by the agents; `stage_in`: filling a RAM disk; `stage_out`: bringing results home
//! - `mount`: showing it on the job's nodes, and taking it away; `late`: laying it over the output of a job that runs
//! - `directories`: what agents are told of a job's directories; `outcome`: how work ended, in words

mod build;
mod directories;
mod late;
mod mount;
mod outcome;
mod stage_in;
mod stage_out;
mod staging;

use std::sync::Arc;
use std::time::Instant;

use ondeck_core::Incarnation;
use ondeck_core::schedule::{Event, Fault, Job, Outcome, Work, WorkOrder};

pub(crate) use self::mount::tell_of_cuts;
use self::outcome::failed;
use crate::clock::now;
use crate::context::Context;

/// Does the work that was ordered to its end.
pub(crate) async fn work(context: &Arc<Context>, job: &Job, order: WorkOrder) -> Outcome {
    let began = Instant::now();
    let outcome = work_untimed(context, job, order).await;
    context.metrics.phase(order.work, &outcome, began.elapsed());
    outcome
}

async fn work_untimed(context: &Arc<Context>, job: &Job, order: WorkOrder) -> Outcome {
    let (Some(allocation), Some(id)) = (&job.allocation, job.ramdisk()) else {
        return failed("it has no RSA nodes", Fault::Transient);
    };
    if let Some(pretended) = context.config().scheduler.simulate {
        tokio::time::sleep(pretended).await;
        return Outcome::Pretended;
    }
    let until = Instant::now() + order.until.since(now());
    // Who does not obey refuses what is ordered, and says why.
    context.take_charge(allocation.nodes.iter().chain(&job.io_nodes)).await;
    match order.work {
        Work::Construct => build::construct(context, job, &id, until).await,
        Work::StageIn => stage_in::fill(context, job, &id, &allocation.nodes, until).await,
        Work::StopStageIn => stage_in::stop(context, &allocation.nodes, &id).await,
        Work::Mount => mount::mount(context, job, &id, until).await,
        Work::Unmount { force } => mount::unmount(context, job, &id, force, until).await,
        Work::StageOut if job.salvage => stage_out::salvage(context, job, order, &id, until).await,
        Work::StageOut => stage_out::bring_home(context, job, order, &id, &allocation.nodes, until).await,
        Work::Destroy => build::destroy(context, job, order, &id, &allocation.nodes).await,
    }
}

/// Takes up work that an earlier daemon had begun.
pub(crate) fn resume(context: &Arc<Context>, id: Incarnation, order: WorkOrder) {
    let context = Arc::clone(context);
    tokio::spawn(async move {
        let Some(job) = context.job(id) else { return };
        let outcome = match order.work {
            // How far it had come is not known; it is removed, and built anew under another epoch.
            Work::Construct if context.config().scheduler.simulate.is_none() => {
                failed("the scheduler was started anew while it was being built", Fault::Transient)
            }
            _ => match work(&context, &job, order).await {
                // The former daemon may have come further than this one.
                Outcome::Refused { why, fault } => failed(why, fault),
                other => other,
            },
        };
        context.transfers().remove(&id);
        let _ = context.event(Event::Ended { job: id, number: order.number, outcome }).await;
    });
}
