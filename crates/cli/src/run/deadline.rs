//! Ending the program in time: a batch job's results die with it, so they must be on disk before its time limit.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use ondeck_core::fit::end_margin;
use ondeck_core::{Bytes, Rate, duration};
use rustix::fs::{Mode, OFlags};

use super::shared::{Margin, Shared};
use super::slurm;

/// The batch job's end, and when the program must end before it.
pub struct Deadline {
    /// By the time that passes: the workload manager tells it by the wall clock, which may be set meanwhile.
    end: Option<Instant>,
    margin: Option<Duration>,
    computed: bool,
    asked: Option<Instant>,
    forced: bool,
}

impl Deadline {
    /// Armed inside a Slurm job that has a time limit.
    pub fn new(margin: &Margin) -> Deadline {
        let (margin, computed, off) = match margin {
            Margin::Off => (None, false, true),
            Margin::Computed => (None, true, false),
            Margin::Fixed(margin) => (Some(*margin), false, false),
        };
        let end = if off || slurm::job_id().is_none() { None } else { slurm::end_time() };
        // A time limit that is over by now leaves nothing.
        let end = end.map(|end| Instant::now() + end.duration_since(SystemTime::now()).unwrap_or_default());
        Deadline { end, margin, computed, asked: None, forced: false }
    }

    /// Whether there is a limit at all.
    pub fn is_set(&self) -> bool {
        self.end.is_some()
    }

    /// Whether asking did not help.
    pub fn forced(&self) -> bool {
        self.forced
    }

    /// Whether a signal is due now, and why.
    pub fn check(&mut self, shared: &Shared, peak: u64) -> Option<String> {
        let end = self.end?;
        if let Some(asked) = self.asked {
            if !self.forced && asked.elapsed() >= Duration::from_secs(10) {
                self.forced = true;
                return Some("the program did not end within 10 s of being asked to; killing it".into());
            }
            return None;
        }
        let staged: u64 = shared.plan.directories.iter().filter(|d| d.input).map(|d| d.content.bytes).sum();
        let cached: u64 = shared.plan.caches.iter().map(|cache| cache.dirty()).sum();
        let bytes = Bytes(peak.saturating_sub(staged).saturating_add(cached));
        let rate = Rate(Bytes(MEASURED_RATE.load(Relaxed)));
        let margin = match self.margin {
            Some(margin) if !self.computed => margin,
            _ => end_margin(bytes, rate),
        };
        let left = end.saturating_duration_since(Instant::now());
        if left > margin {
            return None;
        }
        self.asked = Some(Instant::now());
        Some(format!(
            "ending the program now: the job's time limit is in {}, and staging out {bytes} at {rate} (measured) is given {}; \
             --end-margin changes that",
            duration::display(left),
            duration::display(margin)
        ))
    }
}

/// Bytes in a second that the target took in a trial; a cautious figure until it is measured.
static MEASURED_RATE: AtomicU64 = AtomicU64::new(50 << 20);

/// Writes a trial file, unnamed, to the filesystem of the first output or cache and waits until it is on disk.
pub fn measure_rate(shared: &Shared) {
    const TRIAL: usize = 16 << 20;
    let outputs = shared.plan.directories.iter().filter(|directory| directory.output);
    let mut targets =
        outputs.map(|output| &output.disk).chain(shared.plan.caches.iter().map(|cache| &cache.disk));
    let Some(disk) = targets.next() else { return };
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(disk, c".", flags, Mode::RUSR) else { return };
    // Not zeros: some filesystems don't store those.
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let began = Instant::now();
    for _ in 0..TRIAL / block.len() {
        if rustix::io::write(&file, &block).is_err() {
            return;
        }
    }
    if rustix::fs::fdatasync(&file).is_ok() {
        let rate = TRIAL as f64 / began.elapsed().as_secs_f64();
        MEASURED_RATE.store((rate as u64).max(1), Relaxed);
    }
}
