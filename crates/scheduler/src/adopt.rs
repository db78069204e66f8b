//! RAM disks that the journal does not know: it was lost, or an older copy of it came back.
//!
//! The agents guard what may hold results, and every RAM disk of a job says whose it is and what for. So what is there can
//! be found. It is told to the schedule once the queue was seen, so that a job that runs is known before its RAM disk is
//! found; and before its nodes count as heard of, so that nobody gives the job another one. A RAM disk some of whose
//! nodes are silent is waited for, for as long as a node may be silent before it is taken for lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use ondeck_api::wire::LocalReport;
use ondeck_core::allocation::promise_for;
use ondeck_core::schedule::{Event, FoundRamDisk, Time};
use ondeck_core::{Bytes, NodeName, RamDiskId, Standing};

use crate::context::Context;
use crate::store::job_of;

/// What each RSA node that answered has of RAM disks, with the time at which it was asked.
pub(crate) type LocalReports = BTreeMap<NodeName, (Time, Vec<LocalReport>)>;

/// The RAM disks that are seen to here, so that nobody removes them.
#[derive(Default)]
pub(crate) struct Adoption {
    told: BTreeSet<RamDiskId>,
    /// The RAM disks that the schedule has, and those that it had when nodes were asked whose answers are still looked at.
    had: BTreeMap<RamDiskId, Time>,
}

/// What is to be done about a RAM disk that the journal does not know.
enum Judgement {
    /// It may become known, or be judged otherwise, later.
    Wait,
    /// It does not say whose it is, as one of a former version: a person must look.
    Unknown,
    /// The schedule is told.
    Tell(Box<FoundRamDisk>),
    /// It holds nothing, and nobody uses it.
    Remove,
}

impl Adoption {
    /// Notes what the schedule has before nodes are asked at this time. What they answer may be older than the end of a job,
    /// whose RAM disk it would find anew.
    pub fn before(&mut self, context: &Context, latest: &LocalReports, asked: Time) {
        let view = context.view();
        let now = view.jobs().values().filter_map(|job| Some((job.ramdisk()?, asked)));
        let oldest = latest.values().map(|(asked, _)| *asked).min().unwrap_or(asked);
        self.had.retain(|_, had| *had >= oldest);
        self.had.extend(now);
    }

    /// Tells the schedule of what was found. Returns what can be removed, and on which nodes; and the nodes that have
    /// something of which the schedule is yet to be told.
    pub async fn look(
        &mut self,
        context: &Arc<Context>,
        latest: &LocalReports,
        began: Instant,
    ) -> (Vec<(RamDiskId, Vec<NodeName>)>, BTreeSet<NodeName>) {
        let mut parts: BTreeMap<RamDiskId, Vec<(&NodeName, &LocalReport)>> = BTreeMap::new();
        for (node, (asked, locals)) in latest {
            for local in locals.iter().filter(|local| local.server && job_of(&local.layout.id).is_some()) {
                if self.had.get(&local.layout.id).is_none_or(|had| had < asked) {
                    parts.entry(local.layout.id.clone()).or_default().push((node, local));
                }
            }
        }
        let (mut remove, mut untold) = (Vec::new(), BTreeSet::new());
        for (id, parts) in parts {
            let on: Vec<NodeName> = parts.iter().map(|(node, _)| (*node).clone()).collect();
            if is_known(context, &id, &on) {
                continue;
            }
            match judge(context, &id, &parts, latest, began) {
                Judgement::Wait => untold.extend(on),
                Judgement::Unknown => {
                    if self.told.insert(id.clone()) {
                        tracing::warn!(
                            ramdisk = %id,
                            "a job's RAM disk that the journal does not know, and that does not say whose it is; it is left \
                             alone, and its nodes may lend nothing: look, then `ondeck ramdisk destroy {}`",
                            id.name
                        );
                    }
                    untold.extend(on);
                }
                Judgement::Remove => remove.push((id, on)),
                Judgement::Tell(found) => {
                    if self.told.insert(id.clone()) {
                        tracing::warn!(
                            ramdisk = %id, job = found.job.key(), may_hold_results = found.guarded, fault = found.fault,
                            "a job's RAM disk that the journal does not know"
                        );
                    }
                    let _ = context.event(Event::Found(found)).await;
                    if !is_known(context, &id, &on) {
                        // The job has another one, or it may be of use to nobody: the next look judges it anew.
                        untold.extend(on);
                    }
                }
            }
        }
        (remove, untold)
    }
}

/// Whether the schedule has it: as a job's own, as one that is being built or removed, or as something that was left.
fn is_known(context: &Context, id: &RamDiskId, on: &[NodeName]) -> bool {
    let Some(job) = job_of(id) else { return true };
    let view = context.view();
    let nodes = view.nodes();
    let is_left = on.iter().all(|node| {
        nodes.get(node).is_some_and(|known| known.leftover_on_rsa.contains(id))
            || view.leftover_on_compute().get(node).is_some_and(|left| left.contains(id))
    });
    let own = view.jobs().get(&job).and_then(|job| job.ramdisk());
    is_left || own.is_some_and(|own| own.epoch == id.epoch)
}

fn judge(
    context: &Context,
    id: &RamDiskId,
    parts: &[(&NodeName, &LocalReport)],
    latest: &LocalReports,
    began: Instant,
) -> Judgement {
    let (Some(job), Some((_, first))) = (job_of(id), parts.first()) else { return Judgement::Wait };
    let guarded = parts.iter().any(|(_, local)| local.guarded);
    let snapshot = context.queue.snapshot();
    if !context.queue.is_seen() || snapshot.fault.is_some() {
        return Judgement::Wait;
    }
    let queued = snapshot.jobs.iter().find(|queued| queued.id.job == job.job);
    let may_run =
        |standing: Standing| matches!(standing, Standing::Running | Standing::Ending | Standing::Configuring);
    let runs = queued.is_some_and(|queued| may_run(queued.standing));
    let (own, knows) = {
        let own = context.view().jobs().get(&job).and_then(|job| job.ramdisk());
        (own, context.journal.read(|reader| reader.knows(id)))
    };
    let knows = match knows {
        Ok(knows) => knows,
        Err(error) => {
            tracing::error!(ramdisk = %id, %error, "can't tell whether the journal knows it");
            return Judgement::Wait;
        }
    };
    // Its script may not have been read yet; then it is not known that it asks for anything.
    let silent = began.elapsed() < context.config().scheduler.node_timeout;
    if runs && silent && !context.view().jobs().contains_key(&job) {
        return Judgement::Wait;
    }
    // An earlier one of a job that has a later one, or one of a job that is done: if it held anything, the agents keep it.
    if !guarded && (own.as_ref().is_some_and(|own| own.epoch > id.epoch) || (own.is_none() && knows && !runs))
    {
        return Judgement::Remove;
    }
    // One that is being built is not noted before it is there.
    if own.is_some() {
        return Judgement::Wait;
    }
    let Some(tag) = &first.layout.job else {
        return Judgement::Unknown;
    };
    let missing: Vec<&NodeName> = first
        .layout
        .servers
        .iter()
        .map(|server| &server.node)
        .filter(|node| !parts.iter().any(|(part, _)| part == node))
        .collect();
    if silent && missing.iter().any(|node| !latest.contains_key(*node)) {
        return Judgement::Wait;
    }
    let differs = |(_, local): &&(&NodeName, &LocalReport)| {
        local.layout.number != first.layout.number || local.layout.job != first.layout.job || !local.complete
    };
    let fault = if let Some(node) = missing.first() {
        Some(format!("{node} has nothing of it, or does not answer"))
    } else if context.cluster.get().is_some_and(|own| !tag.cluster.is_empty() && *own != tag.cluster) {
        Some(format!("it is of a job of the cluster {}", tag.cluster))
    } else {
        parts.iter().find(differs).map(|(node, _)| format!("{node} has another one of this name"))
    };
    if !guarded && !runs {
        return Judgement::Remove;
    }
    let nodes = first.layout.servers.iter().map(|server| server.node.clone()).collect();
    let share = first.layout.servers.iter().map(|server| server.share).max().unwrap_or(Bytes::ZERO);
    Judgement::Tell(Box::new(FoundRamDisk {
        ramdisk: id.clone(),
        job: tag.job,
        owner: first.layout.owner,
        account: tag.account.clone(),
        request: tag.request.clone(),
        work_dir: tag.work_dir.clone(),
        purpose: tag.purpose,
        nodes,
        promise: promise_for(first.layout.engine, share),
        guarded,
        runs,
        fault,
    }))
}
