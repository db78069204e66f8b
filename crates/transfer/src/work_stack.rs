//! The work that is waiting: last in, first out, so that a tree is walked depth first and the stack stays small.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard};

/// A stack of pieces of work that knows when all of them, and all they led to, are done.
pub(crate) struct WorkStack<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    /// The workers that wait for an item, to be looked at without the lock.
    idle: AtomicUsize,
}

struct State<T> {
    items: Vec<T>,
    /// Workers that hold an item and may push more.
    active: usize,
    /// Workers asleep, so that a push without sleepers costs no system call.
    waiting: usize,
}

impl<T> WorkStack<T> {
    pub fn new() -> Self {
        WorkStack {
            state: Mutex::new(State { items: Vec::new(), active: 0, waiting: 0 }),
            changed: Condvar::new(),
            idle: AtomicUsize::new(0),
        }
    }

    /// A worker that panics takes the whole copy down, so a poisoned lock is only ever seen on the way out.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn push(&self, items: impl IntoIterator<Item = T>) {
        let mut state = self.lock();
        state.items.extend(items);
        match state.waiting {
            0 => {}
            1 => self.changed.notify_one(),
            _ => self.changed.notify_all(),
        }
    }

    /// The next item; `None` when none is left and none is being worked on. Every item that was handed out must
    /// end with one [`Done`].
    pub fn pop(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(item) = state.items.pop() {
                state.active += 1;
                return Some(item);
            }
            if state.active == 0 {
                return None;
            }
            state.waiting += 1;
            self.idle.store(state.waiting, Relaxed);
            state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            state.waiting -= 1;
            self.idle.store(state.waiting, Relaxed);
        }
    }

    /// Whether a worker has nothing to do, so that a large item should be shared.
    pub fn is_hungry(&self) -> bool {
        self.idle.load(Relaxed) > 0
    }

    fn done(&self) {
        let mut state = self.lock();
        state.active -= 1;
        if state.active == 0 && state.items.is_empty() {
            self.changed.notify_all();
        }
    }
}

/// An item that was handed out is over when this is dropped.
pub(crate) struct Done<'a, T>(pub &'a WorkStack<T>);

impl<T> Drop for Done<'_, T> {
    fn drop(&mut self) {
        self.0.done();
    }
}
