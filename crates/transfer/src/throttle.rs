//! A limit on the bytes that all workers together move in a second.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use ondeck_core::Rate;

/// Hands out slots of time: whoever takes `n` bytes books the next `n / rate` seconds and waits until they begin.
pub(crate) struct Throttle {
    bytes_per_second: f64,
    next_free: Mutex<Instant>,
}

impl Throttle {
    pub fn new(rate: Rate) -> Self {
        Throttle { bytes_per_second: rate.0.0 as f64, next_free: Mutex::new(Instant::now()) }
    }

    /// The most bytes to take at once, so that one piece stands for a tenth of a second at most and a slow copy can
    /// still be interrupted promptly.
    pub fn piece(&self) -> usize {
        (self.bytes_per_second / 10.0).clamp(4096.0, 1e9) as usize
    }

    /// Waits until `bytes` more may pass.
    pub fn take(&self, bytes: usize) {
        let start = {
            // A panic while holding this lock leaves a valid instant behind, so poisoning can be ignored.
            let mut next = self.next_free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let start = (*next).max(Instant::now());
            *next = start + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
            start
        };
        std::thread::sleep(start.saturating_duration_since(Instant::now()));
    }
}
