//! The history of the layouts: what a job has left in its directories is counted when it has ended, and remembered for the next
//! job of the same user and program in a directory of the same name.
//!
//! Only jobs that ask for layouts are looked at. Counting never keeps a layout from being taken back, nor another job
//! from its start; what can't be counted in time is missing in the history, and that is all.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ondeck_api::wire::{CountOrder, KindToTell, KindsSeen, KindsToTell, StripingOutcome, WatchOrder};
use ondeck_core::NodeName;
use ondeck_core::schedule::Time;
use ondeck_layout::census::{Tally, pattern_of};
use ondeck_layout::classify::RunShape;
use ondeck_layout::history::{Recollection, Run, recall};
use ondeck_layout::watched::{KindSeen, join};
use tokio::task::JoinSet;

use crate::clock::shown;
use crate::context::Context;
use crate::store::{KeptRun, StoreError};
use crate::striping::{ActiveLayouts, JobLayouts};

/// How long counting may take: some million files, where the filesystem answers.
const COUNTING: Duration = Duration::from_secs(25);

/// How long it may take until nodes watch: a job's start waits for it.
const BEGINNING_TO_WATCH: Duration = Duration::from_secs(2);

/// Longer runs are not watched to their end; whatever a scheduler that is gone has begun ends then.
const LONGEST_WATCH: Duration = Duration::from_secs(8 * 24 * 3600);

/// So much may the clock of a filesystem differ from this one's.
const CLOCKS: Duration = Duration::from_secs(2);

/// What earlier runs of a user's program in a directory say; nothing if there are none.
///
/// # Errors
/// The history can't be read, which is not the same as that there is none.
pub(crate) fn recall_of(
    context: &Context,
    uid: u32,
    program: &str,
    directory: &Path,
    now: Time,
) -> Result<Option<Recollection>, StoreError> {
    let directory = pattern_of(directory);
    let runs = context.journal.read(|reader| reader.runs_of(uid, program, &directory))?;
    Ok(recall(&runs, shown(now)))
}

/// Has some of a job's nodes watch who writes to its directories, where the site wants that, and notes which do. What comes from a RAM
/// disk is written by the staging engine, and not watched.
pub(crate) async fn watch(context: &Arc<Context>, active: &ActiveLayouts) {
    let record = active.record().clone();
    let most = context.config().scheduler.watch_nodes as usize;
    let directories = record.to_count();
    if most == 0 || directories.is_empty() || context.job(record.id).is_some() {
        return;
    }
    let uid = Some(active.record().owner.uid);
    let order = WatchOrder {
        uid,
        deadline_ms: BEGINNING_TO_WATCH.as_millis() as u64,
        longest_ms: LONGEST_WATCH.as_millis() as u64,
        directories,
    };
    let nodes: Vec<NodeName> = record.nodes.iter().take(most).cloned().collect();
    // Who does not answer may watch all the same, and is told to end it.
    active.record().watched_on.clone_from(&nodes);
    let asked = ask_to_watch(context, active, order, nodes);
    if tokio::time::timeout(BEGINNING_TO_WATCH, asked).await.is_err() {
        tracing::info!(job = %record.id, "not all nodes have said that they watch who writes its files");
    }
}

async fn ask_to_watch(
    context: &Arc<Context>,
    active: &ActiveLayouts,
    order: WatchOrder,
    nodes: Vec<NodeName>,
) {
    let (order, job) = (Arc::new(order), active.record().id);
    let mut asked = JoinSet::new();
    for node in nodes {
        let (context, order) = (Arc::clone(context), Arc::clone(&order));
        asked.spawn(async move {
            context.take_charge([&node]).await;
            let begun = context.fleet.watch_writers(&node, job, &order).await;
            (node, begun)
        });
    }
    while let Some(answered) = asked.join_next().await {
        let Ok((node, Err(error))) = answered else { continue };
        tracing::info!(%job, %node, %error, "who writes its files is not watched there");
        if error.code().is_some() {
            active.record().watched_on.retain(|watching| *watching != node);
        }
    }
}

/// Ends that, and tells what was seen of kinds of files, node by node. What a node does not know is missing.
async fn seen_by_nodes(context: &Arc<Context>, record: &JobLayouts, question: KindsToTell) -> Vec<KindsSeen> {
    let question = Arc::new(question);
    let mut asked = JoinSet::new();
    for node in record.watched_on.clone() {
        let (context, question, job) = (Arc::clone(context), Arc::clone(&question), record.id);
        asked.spawn(async move {
            context.take_charge([&node]).await;
            let seen = context.fleet.writers_seen(&node, job, &question).await;
            (node, seen)
        });
    }
    let mut told = Vec::new();
    while let Some(answered) = asked.join_next().await {
        match answered {
            Ok((_, Ok(seen))) => told.push(seen),
            Ok((node, Err(error))) => {
                tracing::info!(job = %record.id, %node, %error, "who has written its files is not known from there");
            }
            Err(error) => {
                tracing::error!(job = %record.id, %error, "a node was not asked who wrote its files")
            }
        }
    }
    told
}

/// Ends watching a job that is not counted.
pub(crate) async fn look_away(context: &Arc<Context>, record: &JobLayouts) {
    seen_by_nodes(context, record, KindsToTell::default()).await;
}

/// Has what a job has left counted, and keeps it. It is tried once: an agent that does not answer now may do so when other jobs
/// have written there, too.
pub(crate) async fn count(context: &Arc<Context>, active: &ActiveLayouts) {
    let record = active.record().clone();
    let (Some(node), Some(ended)) = (record.nodes.first(), record.ended) else { return };
    let directories = record.to_count();
    if directories.is_empty() {
        return;
    }
    let is_watched = !record.watched_on.is_empty();
    let clocks = CLOCKS.as_millis() as u64;
    let (from_ms, until_ms) = (shown(record.since), shown(ended));
    let order = CountOrder {
        uid: record.owner.uid,
        gid: record.owner.gid,
        deadline_ms: COUNTING.as_millis() as u64,
        from_ms: from_ms.saturating_sub(clocks),
        until_ms: until_ms.saturating_add(clocks),
        directories,
        samples: is_watched,
    };
    context.take_charge([node]).await;
    let report = match context.fleet.count_files(node, record.id, &order).await {
        Ok(report) => report,
        Err(error) => {
            tracing::warn!(job = %record.id, %node, %error, "what it has left is not counted, and missing in the history");
            look_away(context, &record).await;
            return;
        }
    };
    let mut counted = Vec::new();
    for result in report.directories {
        match result.outcome {
            StripingOutcome::Counted { tally, samples } => counted.push((result.path, *tally, samples)),
            outcome => {
                let directory = result.path.display();
                tracing::info!(job = %record.id, %directory, ?outcome, "what it has left is not counted");
            }
        }
    }
    if is_watched {
        add_writers(context, &record, &mut counted).await;
    }
    for (directory, tally, _) in counted {
        keep(context, &record, &directory, tally, (from_ms, until_ms));
    }
}

/// A directory, what is left there, and samples of its files by kind.
type Counted = (PathBuf, Tally, Vec<Vec<String>>);

/// Adds to what was counted who has written it.
async fn add_writers(context: &Arc<Context>, record: &JobLayouts, counted: &mut [Counted]) {
    let of_directory = |(directory, _, samples): &Counted| {
        let kind = |files: &Vec<String>| KindToTell { directory: directory.clone(), files: files.clone() };
        samples.iter().map(kind).collect::<Vec<_>>()
    };
    let question = KindsToTell { kinds: counted.iter().flat_map(of_directory).collect() };
    let told = seen_by_nodes(context, record, question).await;
    if told.is_empty() {
        return;
    }
    let kinds = counted.iter_mut().flat_map(|(_, tally, samples)| tally.kinds.iter_mut().zip(samples.iter()));
    for (place, (kind, sample)) in kinds.enumerate() {
        let of_nodes: Vec<KindSeen> = told.iter().filter_map(|seen| seen.kinds.get(place).cloned()).collect();
        kind.watched = Some(join(sample.len(), &of_nodes));
    }
}

/// Keeps what a job has left in a directory.
fn keep(
    context: &Context,
    record: &JobLayouts,
    directory: &Path,
    tally: Tally,
    (from_ms, ended_ms): (u64, u64),
) {
    let (nodes, tasks) = record.size_in(directory);
    let shape = RunShape { nodes, tasks, lasted_ms: ended_ms.saturating_sub(from_ms) };
    let kept = KeptRun {
        uid: record.owner.uid,
        job: record.id,
        program: record.program.clone(),
        directory: pattern_of(directory),
        run: Run { ended_ms, shape, tally },
    };
    if let Err(error) = context.journal.write(|store| store.keep_run(&kept)) {
        tracing::error!(job = %record.id, %error, "what it has left can't be kept, and is missing in the history");
    }
}
