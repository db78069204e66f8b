//! What ties the lines of a job's story together: all that concern its RAM disk name the job as the scheduler's lines do
//! (`job=42`), whoever began what they tell of.

use ondeck_core::{Incarnation, RamDiskId};
use tracing::Span;

/// What lines are written in that concern a RAM disk; nothing if it is no job's.
pub fn of(id: &RamDiskId) -> Span {
    match Incarnation::of_ramdisk(&id.name) {
        Some(job) => of_job(job),
        None => Span::none(),
    }
}

/// What lines are written in that concern a job.
pub fn of_job(job: Incarnation) -> Span {
    tracing::info_span!("of", %job)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_of_a_jobs_ram_disk_name_the_job_and_others_name_none() {
        let lines = Lines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(log, || {
            for id in ["job-42-1795381275-0@7", "job-42-1795381275-1@8", "fast@9"] {
                let id: RamDiskId = id.parse().unwrap();
                of(&id).in_scope(|| tracing::info!(ramdisk = %id, "complete"));
            }
        });
        let said = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let jobs: Vec<_> = said
            .lines()
            .map(|line| line.split("job=").nth(1).and_then(|rest| rest.split('}').next()))
            .collect();
        assert_eq!(jobs, [Some("42"), Some("42.1"), None], "{said}");
    }
}
