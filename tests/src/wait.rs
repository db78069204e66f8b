//! Waiting for a state, never for a time.

use std::time::{Duration, Instant};

/// How often a state is looked at. Short beside what a test waits for, long beside what looking costs.
pub(crate) const STEP: Duration = Duration::from_millis(5);

/// What a condition of [`wait_until`] answers: `bool`, or an `Option` whose content is wanted.
pub trait Outcome {
    /// What is had when the state is reached.
    type Value;

    /// The value if the state is reached.
    fn reached(self) -> Option<Self::Value>;
}

impl Outcome for bool {
    type Value = ();

    fn reached(self) -> Option<()> {
        self.then_some(())
    }
}

impl<T> Outcome for Option<T> {
    type Value = T;

    fn reached(self) -> Option<T> {
        self
    }
}

/// Looks every 5 ms whether the state is reached, and gives what the condition gave.
///
/// # Panics
///
/// With `what` if the state is not reached within `deadline`.
#[track_caller]
pub fn wait_until<O: Outcome>(deadline: Duration, what: &str, mut condition: impl FnMut() -> O) -> O::Value {
    let start = Instant::now();
    loop {
        if let Some(value) = condition().reached() {
            return value;
        }
        assert!(start.elapsed() < deadline, "not reached in {deadline:?}: {what}");
        std::thread::sleep(STEP);
    }
}
