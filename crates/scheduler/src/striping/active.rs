//! The layouts of all jobs that have not ended, or of which something is still to be taken back: who has set which directory's.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_core::{Incarnation, JobId, NodeName};

use super::JobLayouts;

/// The layouts of a job that has not ended, or of which something is still to be taken back.
pub(crate) struct ActiveLayouts {
    record: Mutex<JobLayouts>,
    /// Held by whoever orders something for it.
    pub work: tokio::sync::Mutex<()>,
    /// Whether its Epilog has run where its script ran.
    over: AtomicBool,
    /// How often taking back has failed, and until when it is not tried again.
    tries: Mutex<(u32, Option<Instant>)>,
}

/// The pause after taking back has failed; doubled each time, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these protect is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl ActiveLayouts {
    fn new(record: JobLayouts) -> Arc<ActiveLayouts> {
        Arc::new(ActiveLayouts {
            record: Mutex::new(record),
            work: tokio::sync::Mutex::default(),
            over: AtomicBool::new(false),
            tries: Mutex::default(),
        })
    }

    /// What is known.
    pub fn record(&self) -> MutexGuard<'_, JobLayouts> {
        lock(&self.record)
    }

    /// Whether its Epilog has run where its script ran.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// How often taking back has failed.
    pub fn tries(&self) -> u32 {
        lock(&self.tries).0
    }

    /// Whether it is time to try taking back.
    pub fn is_due(&self) -> bool {
        lock(&self.tries).1.is_none_or(|until| until <= Instant::now())
    }

    /// Taking back has failed; how often by now.
    pub fn failed(&self) -> u32 {
        let mut tries = lock(&self.tries);
        let pause = FIRST_PAUSE.saturating_mul(1 << tries.0.min(10)).min(LONGEST_PAUSE);
        *tries = (tries.0 + 1, Some(Instant::now() + pause));
        tries.0
    }
}

/// So many are taken back at a time: each is a request to an agent, and a task there.
const AT_A_TIME: usize = 16;

/// The layouts of all such jobs.
pub(crate) struct Layouts {
    known: Mutex<BTreeMap<Incarnation, Arc<ActiveLayouts>>>,
    /// Who takes some back has a turn.
    pub turns: tokio::sync::Semaphore,
}

impl Default for Layouts {
    fn default() -> Layouts {
        Layouts { known: Mutex::default(), turns: tokio::sync::Semaphore::new(AT_A_TIME) }
    }
}

impl Layouts {
    /// Goes on with what an earlier daemon has kept.
    pub fn resume(&self, kept: Vec<JobLayouts>) {
        let mut known = lock(&self.known);
        for record in kept {
            known.entry(record.id).or_insert_with(|| ActiveLayouts::new(record));
        }
    }

    /// Those of a job.
    pub fn of(&self, id: Incarnation) -> Option<Arc<ActiveLayouts>> {
        lock(&self.known).get(&id).cloned()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<ActiveLayouts>> {
        lock(&self.known).values().cloned().collect()
    }

    /// Other jobs whose layouts these directories have, or may have.
    pub fn others(&self, record: &JobLayouts) -> Vec<Arc<ActiveLayouts>> {
        let wanted = record.to_stripe();
        let uses = |other: &&Arc<ActiveLayouts>| {
            let other = other.record();
            other.id != record.id && wanted.iter().any(|directory| other.uses(&directory.path))
        };
        lock(&self.known).values().filter(uses).cloned().collect()
    }

    /// Adds those of a job, unless they are there already. Whoever came first keeps a directory.
    pub fn add(&self, mut record: JobLayouts) -> Arc<ActiveLayouts> {
        let mut known = lock(&self.known);
        if let Some(there) = known.get(&record.id) {
            return Arc::clone(there);
        }
        for directory in record.to_stripe() {
            let first = known.values().find(|other| other.record().uses(&directory.path));
            if let Some(first) = first {
                let id = first.record().id;
                first.record().count_no_more(Some(&directory.path));
                let why = format!("job {id} has set its layout, and that is not taken back yet");
                record.leave_alone(&directory.path, why);
            }
        }
        let added = ActiveLayouts::new(record);
        let id = added.record().id;
        known.insert(id, Arc::clone(&added));
        added
    }

    /// Orders once more what failed for a job; whether there is something. What another job has set meanwhile is its own.
    pub fn order_again(&self, active: &ActiveLayouts) -> bool {
        let known = lock(&self.known);
        let id = active.record().id;
        let failed = active.record().failed();
        let is_free = |path: &&PathBuf| {
            let others = known.iter().filter(|(other, _)| **other != id);
            !others.map(|(_, other)| other).any(|other| other.record().uses(path))
        };
        let free: Vec<&PathBuf> = failed.iter().filter(is_free).collect();
        let mut record = active.record();
        free.into_iter().for_each(|path| record.order_again(path));
        !record.to_stripe().is_empty()
    }

    /// Forgets those of a job: nothing is to be done any more.
    pub fn remove(&self, id: Incarnation) {
        lock(&self.known).remove(&id);
    }

    /// Nothing of a job runs any more on a node, as its Epilog says; that matters where its script ran. Returns those of
    /// which that is news.
    pub fn left(&self, job: JobId, restarts: u32, node: &NodeName) -> Vec<Arc<ActiveLayouts>> {
        let known = lock(&self.known);
        let of_number = known.range(Incarnation::of_number(job)).map(|(_, active)| active);
        let left = of_number.filter(|active| {
            let record = active.record();
            record.id.restarts <= restarts && record.nodes.first() == Some(node)
        });
        left.filter(|active| !active.over.swap(true, Ordering::AcqRel)).cloned().collect()
    }
}
