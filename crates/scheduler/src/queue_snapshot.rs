//! The queue as it was last seen, for all who want to know, and what the jobs in it have asked for.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_core::schedule::Time;
use ondeck_core::{Incarnation, JobId, NodeName, QueuedJob, Request, Standing};
use tokio::sync::{Notify, watch};

use crate::clock::now;
use crate::striping::StripingAsked;

/// Who asks for a number that may not exist has a new look at most that often; so nobody can keep the workload manager
/// busy with them.
const CALM: Duration = Duration::from_secs(1);

/// The site's command is not asked again for so long after it has failed for a job.
const UNMAPPED_PAUSE: Duration = Duration::from_secs(5);

/// What a job's script asks for, if anything.
#[derive(Clone, Debug)]
pub(crate) struct ScriptRequest {
    pub request: Option<Request>,
    /// What it asks of layouts, or how much it uses the disk, also if of nothing else.
    pub striping: Option<Arc<StripingAsked>>,
    pub work_dir: PathBuf,
    /// Where the site shows the RAM disk, if it is not the job's own nodes.
    pub io_nodes: BTreeMap<Vec<NodeName>, Vec<NodeName>>,
    /// When the site's command last failed, and why.
    pub unmapped: Option<(Instant, String)>,
}

impl ScriptRequest {
    pub fn new(request: Option<Request>, work_dir: PathBuf) -> ScriptRequest {
        ScriptRequest { request, striping: None, work_dir, io_nodes: BTreeMap::new(), unmapped: None }
    }

    /// What it asks of layouts, if that is more than to be delayed or not.
    fn striping_of_directories(&self) -> Option<&Arc<StripingAsked>> {
        self.striping.as_ref().filter(|asked| !asked.request.is_empty())
    }

    /// Whether the site's command, if there is one, is to be asked for the nodes that see the job's RAM disk.
    pub fn is_to_map(&self, job: &QueuedJob) -> bool {
        self.request.is_some()
            && matches!(job.standing, Standing::Running | Standing::Configuring)
            && !self.io_nodes.contains_key(&job.nodes)
            && self.unmapped.as_ref().is_none_or(|(at, _)| at.elapsed() >= UNMAPPED_PAUSE)
    }
}

/// The queue as it was last seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct QueueSnapshot {
    /// When the workload manager was asked.
    pub taken: Time,
    pub jobs: Arc<Vec<QueuedJob>>,
    /// What waits for other jobs and stands for several elements of an array.
    pub dependent_rests: Arc<Vec<QueuedJob>>,
    /// Arrays that wait and of which no element has a record of its own.
    pub whole_arrays: Arc<Vec<QueuedJob>>,
    /// The array of each job that is an element of one.
    pub arrays: Arc<BTreeMap<JobId, JobId>>,
    /// Before which time a pending job or whole array does not start, whoever has said so, in seconds since 1970.
    pub begin_times: Arc<BTreeMap<JobId, u64>>,
    /// What is wrong with the workload manager.
    pub fault: Option<String>,
    /// How long it took to answer.
    pub took: Duration,
}

/// The queue as all parts of the daemon know it.
pub(crate) struct ObservedQueue {
    /// By the first life of each job: a number may be used again.
    asked: Mutex<BTreeMap<Incarnation, ScriptRequest>>,
    /// Whether the schedule has been told of a look since the daemon began.
    pub told: AtomicBool,
    /// Somebody wants to know now.
    pub wanted: Notify,
    pub snapshot: watch::Sender<QueueSnapshot>,
}

impl ObservedQueue {
    pub fn new() -> ObservedQueue {
        ObservedQueue {
            asked: Mutex::default(),
            told: AtomicBool::new(false),
            wanted: Notify::new(),
            snapshot: watch::channel(QueueSnapshot::default()).0,
        }
    }

    pub fn asked(&self) -> MutexGuard<'_, BTreeMap<Incarnation, ScriptRequest>> {
        self.asked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether it is known that the job that has this number now asks for nothing.
    pub fn asks_for_nothing(&self, job: JobId) -> bool {
        self.is_known(job, |asked| asked.request.is_none())
    }

    /// Whether it is known that nothing is to be done when the job that has this number now starts.
    pub fn starts_by_itself(&self, job: JobId) -> bool {
        self.is_known(job, |asked| asked.request.is_none() && asked.striping_of_directories().is_none())
    }

    fn is_known(&self, job: JobId, is_so: impl Fn(&ScriptRequest) -> bool) -> bool {
        let asked = self.asked();
        let newest = asked.range(Incarnation::of_number(job)).next_back();
        newest.is_some_and(|(_, asked)| is_so(asked))
    }

    /// What a job whose script was read asks of layouts.
    pub fn striping_of(&self, id: Incarnation) -> Option<Arc<StripingAsked>> {
        // The same in all of its lives.
        self.asked().get(id.lives().start()).and_then(|asked| asked.striping_of_directories().cloned())
    }

    /// The job that has this number now, as it was last seen.
    pub fn of_number(&self, job: JobId) -> Option<QueuedJob> {
        self.snapshot.borrow().jobs.iter().find(|seen| seen.id.job == job).cloned()
    }

    /// Whether the schedule knows the queue as it has been since the daemon began.
    pub fn is_seen(&self) -> bool {
        self.told.load(Ordering::Acquire)
    }

    /// What changes with each look.
    pub fn watch(&self) -> watch::Receiver<QueueSnapshot> {
        self.snapshot.subscribe()
    }

    /// The queue by the last look.
    pub fn snapshot(&self) -> QueueSnapshot {
        self.snapshot.borrow().clone()
    }

    /// Has the queue looked at soon.
    pub fn hurry(&self) {
        self.wanted.notify_one();
    }

    /// Whoever has wanted a look until now is satisfied with the one that begins.
    pub async fn begin_a_look(&self) {
        tokio::select! {
            biased;
            () = self.wanted.notified() => {}
            () = std::future::ready(()) => {}
        }
    }

    /// The queue as it is now: a look that began after this call.
    pub async fn fresh(&self) -> QueueSnapshot {
        let (called, mut snapshots) = (now(), self.snapshot.subscribe());
        loop {
            self.hurry();
            if snapshots.changed().await.is_err() || snapshots.borrow().taken >= called {
                return self.snapshot();
            }
        }
    }

    /// The queue by a look that began after a time, for those who can wait until the last one is [`CALM`] old.
    pub async fn after(&self, time: Time) -> QueueSnapshot {
        let mut snapshots = self.snapshot.subscribe();
        loop {
            let known = snapshots.borrow_and_update().clone();
            if known.taken >= time {
                return known;
            }
            let age = now().since(known.taken);
            let changed = tokio::time::timeout(CALM.saturating_sub(age), snapshots.changed()).await;
            // Others may have hurried for the same look.
            if changed.is_err() && !snapshots.has_changed().unwrap_or(true) {
                self.hurry();
                // The look that was hurried for.
                if snapshots.changed().await.is_err() {
                    return self.snapshot();
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn many_who_ask_for_what_is_not_there_share_a_look_a_second() {
        let queue = Arc::new(ObservedQueue::new());
        let looks = Arc::new(Mutex::new(0));
        let (looked_at, counted) = (Arc::clone(&queue), Arc::clone(&looks));
        let looking = tokio::spawn(async move {
            loop {
                looked_at.wanted.notified().await;
                looked_at.begin_a_look().await;
                *counted.lock().unwrap() += 1;
                looked_at.snapshot.send_replace(QueueSnapshot { taken: now(), ..QueueSnapshot::default() });
            }
        });
        let begin = Instant::now();
        let mut asking = JoinSet::new();
        for _ in 0..20 {
            let queue = Arc::clone(&queue);
            asking.spawn(async move {
                while begin.elapsed() < Duration::from_millis(2500) {
                    let called = now();
                    assert!(queue.after(called).await.taken >= called);
                }
            });
        }
        asking.join_all().await;
        looking.abort();
        // The first at once; one more, when all have asked for the last time.
        let (looks, seconds) = (*looks.lock().unwrap(), begin.elapsed().as_secs());
        assert!((2..=seconds + 2).contains(&looks), "{looks} looks in {seconds} s");
    }
}
