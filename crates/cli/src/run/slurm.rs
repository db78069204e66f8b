//! What changes inside a Slurm batch job: everything dies with it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The job that this process runs in, if any.
pub fn job_id() -> Option<String> {
    std::env::var("SLURM_JOB_ID").ok().filter(|id| !id.is_empty())
}

/// When the job's time limit ends it (`SLURM_JOB_END_TIME`, seconds since the epoch).
pub fn end_time() -> Option<SystemTime> {
    let seconds: u64 = std::env::var("SLURM_JOB_END_TIME").ok()?.parse().ok()?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}
