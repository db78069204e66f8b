//! The history of the layouts: what a job has left in its directories is counted when it has ended, and remembered for the next
//! job of the same user and program in a directory of the same name.
//!
//! Only jobs that ask for layouts are looked at. Counting never keeps a layout from being taken back, nor another job
//! from its start; what can't be counted in time is missing in the history, and that is all.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ondeck_api::wire::{CountOrder, StripingOutcome};
use ondeck_core::schedule::Time;
use ondeck_layout::census::{Tally, pattern_of};
use ondeck_layout::classify::RunShape;
use ondeck_layout::history::{Recollection, Run, recall};

use crate::clock::shown;
use crate::context::Context;
use crate::store::{KeptRun, StoreError};
use crate::striping::{ActiveLayouts, JobLayouts};

/// How long counting may take: some million files, where the filesystem answers.
const COUNTING: Duration = Duration::from_secs(25);

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

/// Has what a job has left counted, and keeps it. It is tried once: an agent that does not answer now may do so when other jobs
/// have written there, too.
pub(crate) async fn count(context: &Arc<Context>, active: &ActiveLayouts) {
    let record = active.record().clone();
    let (Some(node), Some(ended)) = (record.nodes.first(), record.ended) else { return };
    let directories = record.to_count();
    if directories.is_empty() {
        return;
    }
    let clocks = CLOCKS.as_millis() as u64;
    let (from_ms, until_ms) = (shown(record.since), shown(ended));
    let order = CountOrder {
        uid: record.owner.uid,
        gid: record.owner.gid,
        deadline_ms: COUNTING.as_millis() as u64,
        from_ms: from_ms.saturating_sub(clocks),
        until_ms: until_ms.saturating_add(clocks),
        directories,
    };
    context.take_charge([node]).await;
    let report = match context.fleet.count_files(node, record.id, &order).await {
        Ok(report) => report,
        Err(error) => {
            tracing::warn!(job = %record.id, %node, %error, "what it has left is not counted, and missing in the history");
            return;
        }
    };
    for result in report.directories {
        match result.outcome {
            StripingOutcome::Counted { tally } => {
                keep(context, &record, &result.path, *tally, (from_ms, until_ms));
            }
            outcome => {
                let directory = result.path.display();
                tracing::info!(job = %record.id, %directory, ?outcome, "what it has left is not counted");
            }
        }
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
