//! The layouts of jobs' directories on disk: chosen and set when a job starts, taken back when it has ended. What it has left is
//! counted after that.
//!
//! A job never waits for it longer than a moment, and whatever fails is told and costs it nothing. It is set by the agent of
//! the job's first node, where its script runs. Where a RAM disk is shown over a directory, the disk below it is meant: its
//! results come home in the layout, which is taken back after that.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ondeck_api::wire::{RefusalCode, RestoreOrder, StripingOrder, StripingOutcome};
use ondeck_core::schedule::Event;
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Incarnation, NodeName, QueuedJob, Standing, StripingChoice};
use ondeck_layout::job::{JobSize, Known, NotChosen, choose};
use ondeck_layout::{Load, Rules};

use crate::clock::now;
use crate::context::Context;
use crate::layout_history;
use crate::load_monitor;
use crate::site_file::KnownSite;
use crate::store::StoreError;
use crate::striping::{ActiveLayouts, JobLayouts, StripingAsked};

/// How long setting the layouts of a job may take; its Prolog waits for it.
const SETTING: Duration = Duration::from_secs(4);

/// How long a job's Prolog waits until the layouts of jobs that have ended are taken back, where it wants others.
const BEFORE: Duration = Duration::from_secs(3);

/// The longest that a Prolog waits for all of it, whatever hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// How long taking back may take.
const TAKING_BACK: Duration = Duration::from_secs(20);

/// How often it is looked for what is to be taken back if nothing happens.
const LOOK: Duration = Duration::from_secs(5);

/// How often taking back is tried where an agent answers and it fails.
const MOST_TRIES: u32 = 5;

/// Takes up what an earlier daemon has kept.
pub(crate) fn resume(context: &Context) {
    match context.journal.write(|store| store.open_layouts()) {
        Ok(kept) => context.layouts.resume(kept),
        Err(error) => {
            tracing::error!(%error, "can't read which layouts are to be taken back; they stay until the next start");
        }
    }
}

/// Sets what the lines of a job ask for, which starts on a node. Again, it goes on where it was interrupted. Returns once it
/// is done, or has failed, and that is told.
pub(crate) async fn begin(context: Arc<Context>, job: QueuedJob, asked: Arc<StripingAsked>) {
    // One of several components does it for all.
    let is_other_component = job.component_of.is_some_and(|first| first != job.id.job);
    if is_other_component || context.config().scheduler.simulate.is_some() {
        return;
    }
    let (active, turn) = match context.layouts.of(job.id) {
        Some(active) => (active, None),
        None => {
            let record = plan(&context, &job, &asked).await;
            if record.directories.is_empty() && record.notes.is_empty() {
                return;
            }
            take_back_before(&context, &record).await;
            context.layouts.add(record)
        }
    };
    let is_new = turn.is_some();
    let _alone = match turn {
        Some(turn) => turn,
        None => Arc::clone(&active.work).lock_owned().await,
    };
    if active.record().to_stripe().is_empty() && !is_new {
        // A Prolog has asked again.
        return;
    }
    wait_for_first(&context, &active).await;
    if is_new {
        layout_history::watch(&context, &active).await;
    }
    set(&context, &active, is_new).await;
}

/// Waits until the layouts are set that an element of an array has left to others of it. What they can't set, it sets itself.
async fn wait_for_first(context: &Arc<Context>, active: &ActiveLayouts) {
    let mut waited = BTreeSet::new();
    while let Some(first) = context.layouts.first_of(active, &waited) {
        let _alone = first.work.lock().await;
        context.layouts.take_over(active);
        let record = first.record().clone();
        waited.insert(record.id);
        // With its guests, and it is not closed as long as there are any.
        keep_and_log(context, Some(&record), &record, false);
    }
}

/// Sets once more what could not be set when a job started, before its results come home: they are made in the layout then. It
/// does not take long, whatever hangs.
pub(crate) async fn set_for_results(context: &Arc<Context>, id: Incarnation) {
    let Some(active) = context.layouts.of(id) else { return };
    let again = async {
        let _alone = active.work.lock().await;
        if context.layouts.order_again(&active) {
            set(context, &active, false).await;
        }
    };
    // What is under way then may have been done; that is asked when it is taken back.
    let _ = tokio::time::timeout(PATIENCE, again).await;
}

/// Has the layouts of a job set that are ordered, and tells what came of it. The caller holds its lock.
async fn set(context: &Arc<Context>, active: &ActiveLayouts, is_new: bool) {
    let record = active.record().clone();
    let directories = record.to_stripe();
    // What is ordered is kept before: whoever comes after a crash must know what to take back.
    if let Err(error) = keep(context, &record, false, &[]) {
        tracing::error!(job = %record.id, %error, "no layout is set: it can't be kept");
        active.record().end();
        return;
    }
    if let (false, Some(node)) = (directories.is_empty(), record.nodes.first()) {
        let order = StripingOrder {
            uid: record.owner.uid,
            gid: record.owner.gid,
            deadline_ms: SETTING.as_millis() as u64,
            directories,
            rivals: context.layouts.rivals(record.id),
        };
        context.take_charge([node]).await;
        match context.fleet.stripe(node, record.id, &order).await {
            Ok(report) => {
                active.record().take(&report);
                for result in &report.directories {
                    if let StripingOutcome::SetFor { job, path, inode } = &result.outcome {
                        context.layouts.found_set(record.owner, (*job, path, *inode));
                    }
                }
            }
            Err(error) => active.record().take_silence(&format!("the agent of {node}: {error}")),
        }
    }
    let now = active.record().clone();
    // If it can't be kept, the agent knows what was there before.
    keep_and_log(context, (!is_new).then_some(&record), &now, false);
    let is_news = is_new || now.told() != record.told();
    if is_news && tell(context, &now).await {
        // Of a job that has ended nobody can be told.
        context.told(now.id.job).await;
    }
}

/// What is to be done for a job.
async fn plan(context: &Arc<Context>, job: &QueuedJob, asked: &StripingAsked) -> JobLayouts {
    let KnownSite { site, fault } = load_monitor::look(context).await;
    let size = JobSize { nodes: job.node_count, tasks: asked.tasks };
    let (rules, now) = (Rules::tuned(), now());
    let (mut unread, mut needs_site) = (None, false);
    let mut record = JobLayouts::plan(job, asked, now, |choice, directory| {
        let history = match choice {
            StripingChoice::Auto => {
                layout_history::recall_of(context, job.owner.uid, &asked.program.key, directory, now)
            }
            _ => Ok(None),
        };
        let history = history.unwrap_or_else(|error| {
            unread = Some(error.to_string());
            None
        });
        let filesystem = site.as_deref().and_then(|site| site.filesystem_of(directory));
        let load = filesystem.map_or_else(Load::default, |filesystem| context.loads.of(&filesystem.path));
        let known = Known { history: history.as_ref(), program: Some(&asked.program.name), load };
        needs_site |= !matches!(choice, StripingChoice::None | StripingChoice::Options(_));
        choose(choice, size, directory, known, site.as_deref(), &rules).map_err(|error| {
            match (error, &fault) {
                (NotChosen::NoSite, Some(why)) => NotChosen::UnreadSite(why.clone()),
                (error, _) => error,
            }
        })
    });
    if let Some(why) = unread {
        tracing::error!(job = %job.id, why, "the history of its layouts can't be read");
        record.notes.push("the history can't be read; the layouts were chosen without it".to_owned());
    }
    // Whoever needs what was never read is told so of each directory.
    if let (Some(why), true) = (fault, site.is_some() && needs_site) {
        record.notes.push(format!("the site's file can't be read, and what it said before was used: {why}"));
    }
    record
}

/// Takes back the layouts of jobs that have ended where this one wants others: at once, but not for long.
async fn take_back_before(context: &Arc<Context>, record: &JobLayouts) {
    let take_back = async {
        for other in context.layouts.others(record) {
            if is_over(context, &other) && !holds_results(context, other.record().id) {
                take_back(context, &other, true).await;
            }
        }
    };
    // What is not done by then is told as another job's.
    let _ = tokio::time::timeout(BEFORE, take_back).await;
}

/// Looks for as long as the daemon lives what is to be taken back.
pub(crate) async fn look_after(context: Arc<Context>) {
    let (mut looks, mut changed) = (context.queue.watch(), context.watch());
    loop {
        tokio::select! {
            _ = looks.changed() => {}
            _ = changed.changed() => {}
            () = context.layouts.freed.notified() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
        for active in context.layouts.all() {
            let id = active.record().id;
            if !is_over(&context, &active) {
                continue;
            }
            note_end(&active);
            if active.is_due() && !holds_results(&context, id) {
                let context = Arc::clone(&context);
                tokio::spawn(async move { take_back(&context, &active, false).await });
            }
        }
    }
}

/// A job's Epilog has run on a node.
pub(crate) fn left(context: &Arc<Context>, job: Incarnation, node: &NodeName) {
    for active in context.layouts.left(job.job, job.restarts, node) {
        note_end(&active);
        let id = active.record().id;
        if !holds_results(context, id) {
            let context = Arc::clone(context);
            tokio::spawn(async move { take_back(&context, &active, false).await });
        }
    }
}

/// Whether a job has ended, by its Epilog or by the queue. What can't be seen has not.
fn is_over(context: &Context, active: &ActiveLayouts) -> bool {
    if active.is_over() {
        return true;
    }
    let (id, since) = {
        let record = active.record();
        (record.id, record.since)
    };
    let snapshot = context.queue.snapshot();
    let is_seen = context.queue.is_seen() && snapshot.fault.is_none() && snapshot.taken > since;
    let is_there = |job: &QueuedJob| job.id == id && job.standing != Standing::Ended;
    is_seen && !snapshot.jobs.iter().any(is_there)
}

/// Whether results of a job may still come to its directories on disk.
fn holds_results(context: &Context, id: Incarnation) -> bool {
    context.job(id).is_some_and(|job| job.results || job.rsa_state.is_shown())
}

/// Gives the directories of a job that has ended back what they had. If somebody else is doing so, that is waited for or
/// left to them.
async fn take_back(context: &Arc<Context>, active: &Arc<ActiveLayouts>, waits: bool) {
    let _alone = match active.work.try_lock() {
        Ok(alone) => alone,
        Err(_) if waits => active.work.lock().await,
        Err(_) => return,
    };
    // It is never closed.
    let turn = context.layouts.turns.acquire().await;
    let before = active.record().clone();
    if context.layouts.of(before.id).is_none_or(|known| !Arc::ptr_eq(&known, active)) {
        return;
    }
    note_end(active);
    if !context.layouts.close(active) {
        // Other elements of its array have left directories to it.
        let now = active.record().clone();
        if before != now {
            keep_and_log(context, Some(&before), &now, false);
        }
        return;
    }
    if before.is_to_restore() && !ask_to_restore(context, active, &before).await {
        return;
    }
    let now = active.record().clone();
    if now.is_to_restore() {
        // Some of them have failed.
        keep_and_log(context, Some(&before), &now, false);
        return;
    }
    active.record().end();
    let ended = active.record().clone();
    let counts = !ended.to_count().is_empty();
    if !keep_and_log(context, Some(&before), &ended, !counts) {
        return;
    }
    if ended.told() != before.told() {
        tell(context, &ended).await;
    }
    if counts {
        if waits {
            // A job waits for this one's directories, which are free now; counting can be done later.
            return;
        }
        drop(turn);
        let _turn = context.layouts.counts.acquire().await;
        layout_history::count(context, active).await;
        active.record().count_no_more(None);
        let counted = active.record().clone();
        if !keep_and_log(context, Some(&ended), &counted, true) {
            return;
        }
    } else if !ended.watched_on.is_empty() {
        layout_history::look_away(context, &ended).await;
    }
    context.layouts.remove(ended.id);
}

/// Notes when a job has ended, if that is news: what is written later is another job's.
fn note_end(active: &ActiveLayouts) {
    active.record().ended.get_or_insert_with(now);
}

/// Has an agent give the directories back what they had; whether it has answered.
async fn ask_to_restore(context: &Arc<Context>, active: &ActiveLayouts, record: &JobLayouts) -> bool {
    let tries = active.tries();
    // The first node's agent knows most. Without it another one can do what the journal knows.
    let place = if record.is_known() { tries as usize % record.nodes.len().max(1) } else { 0 };
    let Some(node) = record.nodes.get(place) else { return true };
    let order = RestoreOrder {
        uid: record.owner.uid,
        gid: record.owner.gid,
        deadline_ms: TAKING_BACK.as_millis() as u64,
        directories: record.to_restore(),
    };
    context.take_charge([node]).await;
    match context.fleet.restore_layouts(node, record.id, &order).await {
        Ok(report) => {
            let tries = active.failed();
            active.record().take_restored(&report, tries >= MOST_TRIES);
            true
        }
        Err(error) => {
            let tries = active.failed();
            if tries >= MOST_TRIES && error.code().is_some_and(is_lasting) {
                let why = format!("the agent of {node}: {error}");
                tracing::error!(job = %record.id, why, "its layouts are not taken back");
                active.record().give_up(&why);
                return true;
            }
            tracing::warn!(job = %record.id, %node, %error, tries, "its layouts are taken back later");
            active.record().not_taken_back = Some(format!("the agent of {node}: {error}"));
            let now = active.record().clone();
            if now != *record {
                keep_and_log(context, Some(record), &now, false);
            }
            false
        }
    }
}

/// Whether an agent that refuses so does not do it the next time either. Whom it obeys may change.
fn is_lasting(code: RefusalCode) -> bool {
    !matches!(
        code,
        RefusalCode::ForeignJournal
            | RefusalCode::OlderJournal
            | RefusalCode::NotInCharge
            | RefusalCode::Unauthenticated
            | RefusalCode::Forbidden
    )
}

/// What has come of directories since a moment, or at all.
fn lines(before: Option<&JobLayouts>, now: &JobLayouts) -> Vec<String> {
    let known = before.map(JobLayouts::view).unwrap_or_default();
    let views = now.view().into_iter().filter(|view| !known.contains(view));
    let told = views.map(|view| {
        let options = view.options.map(|options| format!("{options}, ")).unwrap_or_default();
        format!("layout of {}: {options}{}", view.directory.display(), view.text)
    });
    told.collect()
}

/// Keeps what is known now, with lines of the log for what has changed; whether that could be done.
fn keep_and_log(context: &Context, before: Option<&JobLayouts>, now: &JobLayouts, done: bool) -> bool {
    let lines = lines(before, now);
    for line in &lines {
        tracing::info!(job = %now.id, "{}", plain(line, MESSAGE));
    }
    match keep(context, now, done, &lines) {
        Ok(()) => true,
        Err(error) => {
            tracing::error!(job = %now.id, %error, "what came of its layouts can't be kept; it is looked at again");
            false
        }
    }
}

fn keep(context: &Context, record: &JobLayouts, done: bool, lines: &[String]) -> Result<(), StoreError> {
    context.journal.write(|store| store.keep_layouts(record, done, lines))
}

/// Tells the job's user what is not as the lines ask for; whether there is something.
async fn tell(context: &Arc<Context>, record: &JobLayouts) -> bool {
    let Some(text) = record.told() else { return false };
    let text = plain(&text, MESSAGE);
    if context.job(record.id).is_some() {
        let _ = context.event(Event::Noticed { job: record.id, text }).await;
    } else {
        context.say(record.id, text);
    }
    true
}
