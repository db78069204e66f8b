//! Burst buffers that slurmctld has lost.
//!
//! slurmctld saves what it has of burst buffers every 30 s, and how far each job is with its own within 5 s. One that ends in
//! between by SIGKILL or with its machine begins anew with jobs of which it says that it stages in for them, and has no burst
//! buffer. It asks for nothing again, and nothing but the job's end changes that (22.05.8: `_purge_vestigial_bufs` sees burst
//! buffers that were saved only, `_try_alloc_job_bb` passes over a job that is `staging-in`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ondeck_core::{Incarnation, JobId, QueuedJob};

use super::Slurm;
use crate::WlmError;

/// The time between two looks at Slurm's burst buffers, as long as anybody waits for his input; while one lacks, each look at the queue is
/// one at them. So long a burst buffer lacks before it is lost: what Slurm tells of jobs and of burst buffers it tells one after the other.
const PAUSE: Duration = Duration::from_secs(15);

/// Jobs that wait for their input without a burst buffer.
#[derive(Debug, Default)]
pub(super) struct Lacking {
    looked: Option<Instant>,
    /// Since when, of each life of a job: the next one begins anew.
    since: BTreeMap<Incarnation, Instant>,
}

impl Lacking {
    fn is_to_look(&self) -> bool {
        !self.since.is_empty() || self.looked.is_none_or(|looked| looked.elapsed() >= PAUSE)
    }

    fn note(&mut self, waiting: &[Incarnation], have: &BTreeSet<JobId>, now: Instant) {
        self.looked = Some(now);
        let lack = waiting.iter().filter(|id| !have.contains(&id.job));
        self.since = lack.map(|id| (*id, self.since.get(id).copied().unwrap_or(now))).collect();
    }

    fn is_lost(&self, id: Incarnation, now: Instant) -> bool {
        self.since.get(&id).is_some_and(|since| now.saturating_duration_since(*since) >= PAUSE)
    }
}

/// The jobs of which `scontrol show burstbuffer` shows a burst buffer: `JobID=7`, or of an element of an array `JobID=7_1(8)`.
///
/// # Errors
/// [`WlmError::Malformed`] if one can't be understood: its job would seem to have none.
///
/// ```
/// let shown = "JobID=2 CreateTime=0\nJobID=7_1(9) CreateTime=0";
/// let jobs = ondeck_wlm::jobs_with_burst_buffers(shown).unwrap();
/// assert_eq!(jobs.into_iter().map(|job| job.0).collect::<Vec<_>>(), [2, 9]);
/// ```
pub fn jobs_with_burst_buffers(shown: &str) -> Result<BTreeSet<JobId>, WlmError> {
    let jobs = shown.split_whitespace().filter_map(|word| word.strip_prefix("JobID="));
    let job = |job: &str| {
        let number = job.split_once('(').map_or(job, |(_, number)| number.trim_end_matches(')'));
        number
            .parse()
            .map(JobId)
            .map_err(|_| WlmError::Malformed { what: format!("a burst buffer of job `{job}`") })
    };
    jobs.map(job).collect()
}

impl Slurm {
    /// Marks the jobs whose burst buffers slurmctld has lost, of those that it says to stage in for. If it can't tell, none is marked
    /// that was not before.
    pub(super) async fn mark_lost_burst_buffers(&self, jobs: &mut [QueuedJob], staging_in: &BTreeSet<JobId>) {
        let waiting: Vec<Incarnation> =
            jobs.iter().map(|job| job.id).filter(|id| staging_in.contains(&id.job)).collect();
        if waiting.is_empty() {
            *self.lacking() = Lacking::default();
            return;
        }
        let is_to_look = self.lacking().is_to_look();
        // What can't be seen is not missing for that.
        if is_to_look && let Ok(have) = self.burst_buffers().await {
            self.lacking().note(&waiting, &have, Instant::now());
        }
        let (lacking, now) = (self.lacking(), Instant::now());
        for job in jobs.iter_mut().filter(|job| staging_in.contains(&job.id.job)) {
            job.burst_buffer_lost = lacking.is_lost(job.id, now);
        }
    }

    async fn burst_buffers(&self) -> Result<BTreeSet<JobId>, WlmError> {
        let output = self.run("scontrol", &["show", "burstbuffer"]).await?;
        let shown = String::from_utf8_lossy(&output.stdout);
        // Without its plugin it prints nothing, and knows of no burst buffer.
        if !output.success || !shown.contains("Name=") {
            return Err(output.failure(None));
        }
        jobs_with_burst_buffers(&shown)
    }

    fn lacking(&self) -> std::sync::MutexGuard<'_, Lacking> {
        self.lacking.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(numbers: &[u32]) -> BTreeSet<JobId> {
        numbers.iter().copied().map(JobId).collect()
    }

    #[test]
    fn burst_buffers_are_those_of_jobs_and_of_elements_of_arrays() {
        let shown = "Name=lua DefaultPool=(null) Granularity=1\n  Allocated Buffers:\n    JobID=2 CreateTime=2026-11-25T03:10:06 \
                     Pool=(null)\n    JobID=7_1(9) CreateTime=2026-11-25T03:10:06\n    Name=own CreateTime=0\n";
        assert_eq!(jobs_with_burst_buffers(shown), Ok(jobs(&[2, 9])));
        let strange = shown.replace("7_1(9)", "7_[1-3]");
        assert!(matches!(jobs_with_burst_buffers(&strange), Err(WlmError::Malformed { .. })));
    }

    #[test]
    fn a_burst_buffer_is_lost_if_it_lacks_for_a_while_in_one_life_of_its_job() {
        let life = |job: u32, restarts: u32| Incarnation { job: JobId(job), submitted: 1, restarts };
        let (mut lacking, began) = (Lacking::default(), Instant::now());
        let later = began + PAUSE;
        assert!(lacking.is_to_look());
        lacking.note(&[life(1, 0), life(2, 0)], &jobs(&[1]), began);
        assert!(!lacking.is_lost(life(2, 0), began), "it may just have been torn down");
        assert!(lacking.is_to_look(), "one lacks");
        lacking.note(&[life(1, 0), life(2, 0), life(3, 0)], &jobs(&[1]), later);
        assert!(lacking.is_lost(life(2, 0), later));
        assert!(!lacking.is_lost(life(1, 0), later) && !lacking.is_lost(life(3, 0), later));
        // Requeued, it is asked for anew.
        assert!(!lacking.is_lost(life(2, 1), later));
        lacking.note(&[life(1, 0), life(2, 0), life(3, 0)], &jobs(&[1, 2]), later);
        assert!(!lacking.is_lost(life(2, 0), later), "it was set up again");
        lacking.note(&[life(1, 0)], &jobs(&[1]), Instant::now());
        assert!(!lacking.is_to_look());
    }
}
