//! What is done as time passes: ticks of the schedule, forgetting old jobs, and giving up a journal that can't be written.

use std::sync::Arc;
use std::time::Duration;

use ondeck_core::schedule::{Event, Time};

use crate::clock::now;
use crate::context::Context;
use crate::store::StoreError;

/// How long a daemon that is to end goes on trying.
const LAST_TRIES: Duration = Duration::from_secs(3);

/// Wakes the schedule when a time has come.
pub(crate) async fn keep_time(context: Arc<Context>) {
    loop {
        let next = context.schedule().next_tick();
        let pause = next.map_or(Duration::from_secs(60), |next| next.since(now()));
        if pause.is_zero() {
            let _ = context.event(Event::Tick).await;
            continue;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = context.time_changed() => {}
        }
    }
}

/// Forgets the jobs that ended before a time; returns how many.
fn forget_before(context: &Context, before: Time) -> Result<usize, StoreError> {
    let forgotten = context.journal.write(|store| store.forget_before(before))?;
    for id in &forgotten {
        let lives = context.journal.read(|reader| reader.past_lives(id.job))?;
        if !lives.iter().any(|life| life.is_same_job(*id)) {
            context.schedule().forget(*id);
        }
    }
    Ok(forgotten.len())
}

/// Forgets the logs of jobs that ended long ago.
pub(crate) async fn forget(context: Arc<Context>) {
    loop {
        let before = Time(now().0.saturating_sub(context.config().scheduler.keep.as_millis() as u64));
        let of = Arc::clone(&context);
        let done = tokio::task::spawn_blocking(move || forget_before(&of, before)).await;
        match done {
            Ok(Ok(0)) | Err(_) => {}
            Ok(Ok(jobs)) => tracing::info!(jobs, "forgot jobs that ended long ago"),
            Ok(Err(error)) => tracing::warn!(%error, "can't forget old jobs"),
        }
        tokio::time::sleep(Duration::from_secs(3600)).await;
    }
}

/// Waits until the journal can't be written for a while, and says why.
pub(crate) async fn is_without_journal(context: &Context) -> String {
    loop {
        tokio::time::sleep(LAST_TRIES).await;
        if let Some(fault) = context.journal.fault() {
            return fault;
        }
    }
}
