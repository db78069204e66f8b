//! What a simulation says in a few numbers.

use serde::Serialize;

use crate::machine::Machine;
use crate::record::{JobRecord, Record, Served, Totals};
use crate::trace::Trace;

/// How numbers are spread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Their mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// All but a twentieth are no greater.
    pub p95: f64,
    /// All but a hundredth are no greater.
    pub p99: f64,
}

impl Spread {
    /// Of any numbers; zeros if there are none. Percentiles are by the nearest rank.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        Spread { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99) }
    }
}

/// What came of a simulation, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Node-hours for which compute nodes did not compute but waited for I/O, Prologs and Epilogs. Of all jobs.
    pub io_node_hours: f64,
    /// Node-hours for which they computed. Of all jobs.
    pub compute_node_hours: f64,
    /// From the first submission until the last job's nodes were free, in hours.
    pub makespan_hours: f64,
    /// From the first submission until the last result was on disk, in hours.
    pub home_hours: f64,
    /// The share of all node-hours of the machine until the last job's nodes were free for which nodes computed.
    pub useful_utilisation: f64,
    /// Seconds from submission to start, of the jobs after the warm-up.
    pub wait: Spread,
    /// Of the same jobs: from submission until their nodes were free, by the run time of the log, which is 10 seconds at
    /// least. The run time is the same without and with RSA nodes, so the numbers can be compared.
    pub slowdown: Spread,
    /// How many jobs there were after the warm-up.
    pub counted: u64,
    /// Where the data of all jobs was: their numbers, in the order of [`Served::ALL`].
    pub served: [u64; Served::ALL.len()],
    /// The share of the bytes staged in that were there before their jobs started, and were read.
    pub stage_in_used: f64,
    /// The share of the time until the last result was home for which RSA nodes were promised.
    pub rsa_occupancy: f64,
    /// The share of its time for which the disk filesystem moved anything.
    pub disk_occupancy: f64,
    /// Sums of the accelerator.
    pub totals: Totals,
    /// What staged jobs that are kept in front of the queue cost others; nothing if none are.
    pub overtaken: Overtaken,
}

/// The jobs that start later because staged ones are kept in front of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Overtaken {
    /// How many.
    pub jobs: u64,
    /// By how many seconds each, in the mean.
    pub delay_s: f64,
}

impl Overtaken {
    /// By comparison with the same machine, where nobody is kept in front.
    pub fn of(record: &Record, without: &Record) -> Overtaken {
        let late =
            |(with, without): (&JobRecord, &JobRecord)| with.started_ms.checked_sub(without.started_ms);
        let late = record.jobs.iter().zip(&without.jobs).filter_map(late).filter(|ms| *ms > 0);
        let (jobs, sum) = late.fold((0, 0), |(jobs, sum), ms| (jobs + 1, sum + ms));
        Overtaken { jobs, delay_s: sum as f64 / 1000.0 / jobs.max(1) as f64 }
    }
}

/// This share of the time of submissions is the warm-up: the machine is empty at first, and nobody waits.
pub const WARM_UP: f64 = 0.1;

const MS_PER_HOUR: f64 = 3_600_000.0;

impl Summary {
    /// Of what was recorded.
    pub fn of(trace: &Trace, machine: &Machine, rsa_nodes: u32, record: &Record) -> Summary {
        let node_hours = |ms: fn(&JobRecord) -> u64| {
            record.jobs.iter().map(|job| f64::from(job.nodes) * ms(job) as f64).sum::<f64>() / MS_PER_HOUR
        };
        let begins = trace.span() as f64 * 1000.0 * WARM_UP;
        let counted: Vec<(&JobRecord, u64)> = record
            .jobs
            .iter()
            .zip(trace.jobs.iter().map(|job| job.run))
            .filter(|(job, _)| job.submitted_ms as f64 >= begins)
            .collect();
        let waits = counted.iter().map(|(job, _)| job.wait_ms() as f64 / 1000.0).collect();
        let slowdowns = counted.iter().map(|(job, run)| {
            let all = (job.ended_ms - job.submitted_ms) as f64 / 1000.0;
            (all / (*run).max(10) as f64).max(1.0)
        });
        let mut served = [0; Served::ALL.len()];
        for job in &record.jobs {
            served[Served::ALL.iter().position(|of| *of == job.served).unwrap_or(0)] += 1;
        }
        let totals = record.totals;
        let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
        let makespan_hours = totals.makespan_ms as f64 / MS_PER_HOUR;
        let compute_node_hours = node_hours(|job| job.compute_ms);
        Summary {
            io_node_hours: node_hours(JobRecord::io_ms),
            compute_node_hours,
            makespan_hours,
            home_hours: totals.home_ms as f64 / MS_PER_HOUR,
            useful_utilisation: share(compute_node_hours, f64::from(machine.nodes) * makespan_hours),
            wait: Spread::of(waits),
            slowdown: Spread::of(slowdowns.collect()),
            counted: counted.len() as u64,
            served,
            stage_in_used: share(
                totals.staged_in.0.saturating_sub(totals.wasted.0) as f64,
                totals.staged_in.0 as f64,
            ),
            rsa_occupancy: share(totals.rsa_node_ms, f64::from(rsa_nodes) * totals.home_ms as f64),
            disk_occupancy: share(totals.disk_busy_ms as f64, totals.home_ms as f64),
            totals,
            overtaken: Overtaken::default(),
        }
    }

    /// How many jobs there were whose data was there.
    pub fn count(&self, served: Served) -> u64 {
        let place = Served::ALL.iter().position(|of| *of == served);
        place.map_or(0, |place| self.served[place])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_the_nearest_rank() {
        let spread = Spread::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(spread, Spread { mean: 50.5, p50: 50.0, p95: 95.0, p99: 99.0 });
        assert_eq!(Spread::of(vec![7.0]), Spread { mean: 7.0, p50: 7.0, p95: 7.0, p99: 7.0 });
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }
}
