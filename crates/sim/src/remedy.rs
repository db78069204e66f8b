//! What a log lacks, made up on request, and said so: how long jobs might have run, and when they were submitted.

use serde::Serialize;

use crate::random::{self, Purpose};
use crate::trace::Trace;

/// What jobs that do not say how long they might run are taken to have requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Estimates {
    /// Just as long as they ran: the workload manager knows the future.
    Exact,
    /// One of the round times that people write, and most often far more than needed. After Tsafrir, Etsion and Feitelson,
    /// "Modeling user runtime estimates", JSSPP 2005: estimates are modal, and how much of them is used is spread evenly. The
    /// frequencies of single values, which the authors fit to each log, are not modelled.
    Modal,
}

/// The times that people write, in minutes; whoever needs more writes whole days.
const ROUND: [u64; 20] =
    [5, 10, 15, 20, 30, 60, 120, 180, 240, 300, 360, 480, 600, 720, 900, 1080, 1440, 2160, 2880, 4320];

const DAY: u64 = 24 * 3600;

impl Estimates {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Estimates::Exact => "exact",
            Estimates::Modal => "modal",
        }
    }

    /// Gives a time to every job that has requested none. Returns how many there were.
    pub fn fill_in(self, trace: &mut Trace, seed: u64) -> usize {
        let mut count = 0;
        for job in trace.jobs.iter_mut().filter(|job| job.requested.is_none()) {
            count += 1;
            job.requested = Some(match self {
                Estimates::Exact => job.run,
                Estimates::Modal => {
                    let mut random = random::of_job(Purpose::Estimates, seed, job.number);
                    // The part that is used of what is asked for; a job that needs all of it is as likely as one that needs a half.
                    let used = random::unit(&mut random).max(LEAST_USED);
                    let asked = (job.run as f64 / used).ceil() as u64;
                    let round = ROUND.iter().map(|minutes| minutes * 60).find(|round| *round >= asked);
                    round.unwrap_or_else(|| asked.div_ceil(DAY) * DAY)
                }
            });
        }
        count
    }
}

/// Nobody asks for more than so many times what is needed.
const LEAST_USED: f64 = 0.02;

/// Moves the submissions closer together, or farther apart, so that the jobs ask for this share of a machine of `nodes`.
/// Returns what they asked for before; nothing is changed if all were submitted at once.
pub fn rescale(trace: &mut Trace, nodes: u32, load: f64) -> f64 {
    let before = trace.load(nodes);
    if before.is_finite() && before > 0.0 {
        for job in &mut trace.jobs {
            job.submitted = (job.submitted as f64 * before / load).round() as u64;
        }
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::TraceJob;

    fn trace() -> Trace {
        let job = |number, run| TraceJob {
            number,
            submitted: number * 100,
            run,
            nodes: 1,
            requested: None,
            user: None,
        };
        let runs = (0..2000).map(|number| job(number, 30 + number * 31 % 40_000));
        Trace { jobs: runs.collect(), ..Trace::default() }
    }

    #[test]
    fn modal_estimates_are_round_never_too_short_and_twenty_values_are_most_of_them() {
        let mut modal = trace();
        assert_eq!(Estimates::Modal.fill_in(&mut modal, 3), 2000);
        assert_eq!(Estimates::Modal.fill_in(&mut modal, 4), 0, "what was requested stays");
        let mut of_head = 0;
        for job in &modal.jobs {
            let requested = job.requested.unwrap_or_default();
            assert!(requested >= job.run);
            of_head += u32::from(ROUND.contains(&(requested / 60)));
        }
        assert!(of_head > 1600, "{of_head} of 2000");
        let mut again = trace();
        Estimates::Modal.fill_in(&mut again, 3);
        assert_eq!(again, modal);
    }

    #[test]
    fn a_log_is_rescaled_to_a_load() {
        let mut trace = trace();
        let before = rescale(&mut trace, 300, 0.8);
        assert!(before > 0.0);
        assert!((trace.load(300) - 0.8).abs() < 0.001, "{}", trace.load(300));
    }
}
