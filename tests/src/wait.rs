//! Waiting for a state, never for a time.

use std::time::{Duration, Instant};

/// How often a state is looked at if that costs next to nothing. Short beside what a test waits for.
pub(crate) const STEP: Duration = Duration::from_millis(5);

/// The longest time between two looks.
const LONGEST: Duration = Duration::from_millis(100);

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

/// Looks every 5 ms whether the state is reached, and gives what the condition gave. If looking takes long, as a command does,
/// it is done less often, or those who wait would keep those busy who are waited for.
///
/// # Panics
///
/// With `what` if the state is not reached within `deadline`.
#[track_caller]
pub fn wait_until<O: Outcome>(deadline: Duration, what: &str, mut condition: impl FnMut() -> O) -> O::Value {
    let start = Instant::now();
    loop {
        let looked = Instant::now();
        if let Some(value) = condition().reached() {
            return value;
        }
        assert!(start.elapsed() < deadline, "not reached in {deadline:?}: {what}");
        nap(looked);
    }
}

/// Sleeps until it is time for another look, after one that began at `looked`.
pub(crate) fn nap(looked: Instant) {
    std::thread::sleep((3 * looked.elapsed()).clamp(STEP, LONGEST));
}
