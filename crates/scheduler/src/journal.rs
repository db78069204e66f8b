//! The journal while the daemon runs: one writes it, others read it meanwhile, and all know whether it can be written.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::metrics::Metrics;
use crate::store::{Entry, Reader, Store, StoreError};

/// How long is waited before the journal is tried again after it could not be written.
const PAUSE: Duration = Duration::from_secs(1);

/// A disk that takes so long to write a few pages hangs, as far as those who ask are concerned.
const HANGS: Duration = Duration::from_secs(10);

/// The journal of a daemon that runs.
pub(crate) struct Journal {
    writer: Mutex<Store>,
    /// Nothing once it is closed.
    reader: Mutex<Option<Reader>>,
    /// Why it can't be written, while it can't.
    fault: Mutex<Option<String>>,
    /// Since when what was decided waits to be on disk, be it behind whoever else writes.
    writing: Mutex<Option<Instant>>,
}

impl Journal {
    /// Takes an open journal.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn new(store: Store) -> Result<Journal, StoreError> {
        let reader = store.another_reader()?;
        Ok(Journal {
            writer: Mutex::new(store),
            reader: Mutex::new(Some(reader)),
            fault: Mutex::default(),
            writing: Mutex::default(),
        })
    }

    /// Why it can't be written, if it can't.
    pub fn fault(&self) -> Option<String> {
        let hangs = || {
            let since = lock(&self.writing).map(|since| since.elapsed()).filter(|took| *took >= HANGS)?;
            Some(format!("the disk of the journal has not answered for {} s", since.as_secs()))
        };
        lock(&self.fault).clone().or_else(hangs)
    }

    /// Notes whether it can be written, and if not, why.
    pub fn set_fault(&self, fault: Option<String>) {
        *lock(&self.fault) = fault;
    }

    /// Writes what events have changed, for as long as it takes: nothing may be done that is not kept.
    pub fn keep(&self, entry: &Entry, metrics: &Metrics) {
        let mut failed = false;
        *lock(&self.writing) = Some(Instant::now());
        // Whoever else wants to write, or to close it, waits for this.
        let mut store = lock(&self.writer);
        loop {
            let began = Instant::now();
            *lock(&self.writing) = Some(began);
            let kept = store.keep(entry);
            *lock(&self.writing) = None;
            metrics.journal_write(began.elapsed(), kept.is_ok());
            let Err(error) = kept else { break };
            tracing::error!(%error, "the journal can't be written; nothing is done until it can");
            self.set_fault(Some(error.to_string()));
            failed = true;
            std::thread::sleep(PAUSE);
        }
        if failed {
            self.set_fault(None);
            tracing::info!("the journal can be written again");
        }
    }

    /// Writes something else. It may take long.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn write<T>(&self, write: impl FnOnce(&mut Store) -> Result<T, StoreError>) -> Result<T, StoreError> {
        aside(|| write(&mut lock(&self.writer)))
    }

    /// Reads, beside whoever writes.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn read<T>(&self, read: impl FnOnce(&Reader) -> Result<T, StoreError>) -> Result<T, StoreError> {
        aside(|| match &*lock(&self.reader) {
            Some(reader) => read(reader),
            None => read(lock(&self.writer).reader()),
        })
    }

    /// Leaves one file, which can be copied: nothing is written after this.
    ///
    /// # Errors
    /// [`StoreError`]; what was kept is kept, and the files beside the journal belong to it.
    pub fn close(&self) -> Result<(), StoreError> {
        let mut writer = lock(&self.writer);
        *lock(&self.reader) = None;
        let closed = writer.close();
        // It is not unlocked any more: what is still under way writes nothing into it.
        std::mem::forget(writer);
        closed
    }
}

/// Waits for the disk without keeping the runtime's other tasks.
fn aside<T>(wait: impl FnOnce() -> T) -> T {
    match tokio::runtime::Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(tokio::runtime::RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        _ => wait(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a lock protects here is whole after every statement; of a write that panicked, SQLite keeps nothing.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_hangs_is_told_also_while_somebody_else_waits_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::new(Store::open(directory.path()).unwrap()).unwrap();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (busy, is_busy) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let journal = &journal;
            scope.spawn(move || {
                journal.write(|_| {
                    busy.send(()).unwrap();
                    released.recv().unwrap();
                    Ok(())
                })
            });
            is_busy.recv().unwrap();
            let keeps = scope.spawn(|| journal.keep(&Entry::default(), &Metrics::default()));
            let deadline = Instant::now() + Duration::from_secs(60);
            while lock(&journal.writing).is_none() {
                assert!(Instant::now() < deadline && !keeps.is_finished());
                std::thread::yield_now();
            }
            assert_eq!(journal.fault(), None);
            // Time passes.
            *lock(&journal.writing) = Instant::now().checked_sub(HANGS);
            assert!(journal.fault().unwrap().contains("has not answered for 10 s"));
            release.send(()).unwrap();
            keeps.join().unwrap();
            assert_eq!(journal.fault(), None);
        });
    }
}
