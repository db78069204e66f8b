//! How much each job reads and writes: models, because a log of jobs does not say.
//!
//! A job reads its input, computes, writes a checkpoint each time that it has computed for an interval, and writes its output. All of
//! that lies within the run time of the log, as it would be if the job were alone on the disk filesystem: it computes for the
//! rest of the time, and for a twentieth of it at least.

use std::collections::BTreeMap;
use std::time::Duration;

use ondeck_core::{Bytes, Rate};
use rand_distr::{Distribution, LogNormal};
use serde::Serialize;

use crate::machine::Machine;
use crate::random::{self, Purpose};
use crate::trace::{Trace, TraceJob};

/// What a job does: it reads, computes with checkpoints in between, and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobIo {
    /// What it reads at its start.
    pub input: Bytes,
    /// What each checkpoint writes.
    pub checkpoint: Bytes,
    /// How many of them there are, at equal distances.
    pub checkpoints: u32,
    /// What it writes at its end.
    pub output: Bytes,
    /// How long it computes in all, in milliseconds.
    pub compute_ms: u64,
}

impl JobIo {
    /// All that it writes.
    pub fn written(&self) -> Bytes {
        Bytes(self.checkpoint.0.saturating_mul(u64::from(self.checkpoints)).saturating_add(self.output.0))
    }

    /// What is in its RAM disk at most: the last two checkpoints, one of them being written, or the output beside the last.
    pub fn results_in_ram(&self) -> Bytes {
        let last = if self.checkpoints > 0 { self.checkpoint.0 } else { 0 };
        let before = if self.checkpoints > 1 { self.checkpoint.0 } else { 0 };
        Bytes((last + before).max(last + self.output.0))
    }

    /// What of it is brought home: the last checkpoint, which is the only one that is kept, and the output.
    pub fn results_at_the_end(&self) -> Bytes {
        let last = if self.checkpoints > 0 { self.checkpoint.0 } else { 0 };
        Bytes(last.saturating_add(self.output.0))
    }
}

/// A model of I/O, with all its constants.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "model", rename_all = "lowercase")]
pub enum IoModel {
    /// Jobs do no I/O.
    None,
    /// Checkpoints of a share of the nodes' memory at a fixed interval; input and output are one checkpoint each.
    Bursts {
        /// The memory of a compute node.
        memory: Bytes,
        /// The share of it that a checkpoint writes.
        share: f64,
        /// After how much computing there is a checkpoint.
        interval: Duration,
    },
    /// The job of the slides: a share of the time for I/O, as it takes on the disk filesystem.
    Slides {
        /// How long the input is read.
        input: Duration,
        /// How long a checkpoint is written.
        checkpoint: Duration,
        /// After how much computing there is one.
        interval: Duration,
        /// How long the output is written.
        output: Duration,
    },
    /// Bytes for each processor from a lognormal distribution, fitted to requests for memory; input and output are all of it,
    /// checkpoints a half. Source: Kopanski and Rzadca, "Plan-based job scheduling for supercomputers with shared burst
    /// buffers", Euro-Par 2021.
    Kopanski {
        /// The standard deviation of the logarithm.
        sigma: f64,
        /// The median before the location is added.
        scale: Bytes,
        /// What is taken away from every number.
        less: Bytes,
        /// The least.
        least: Bytes,
        /// The most phases of computing; there is a checkpoint between two of them.
        phases: u32,
        /// How many processors a node has.
        processors: u32,
    },
    /// Checkpoints of a share of the nodes' memory at the interval that Young and Daly found best: sqrt(2 C M), with C the time
    /// of a checkpoint on the disk filesystem and M the mean time between failures of the job's nodes.
    Daly {
        /// The memory of a compute node.
        memory: Bytes,
        /// The share of it that a checkpoint writes.
        share: f64,
        /// The mean time between failures of one node.
        mtbf: Duration,
    },
    /// What was measured, by the number of the job in its log; jobs that are not there do none.
    Measured {
        /// What each job did.
        #[serde(skip)]
        jobs: BTreeMap<u64, Measured>,
        /// What a node reads from a RAM disk or writes to it, for those that had one.
        link: Rate,
    },
}

/// What one job did, as it was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// What it read at its start.
    pub read: Bytes,
    /// What it wrote at its end.
    pub written: Bytes,
    /// Whether it did so from and to a RAM disk: the run time in its log has no waiting for the disk filesystem then.
    pub in_ram: bool,
}

/// A kibibyte.
const KIB: u64 = 1024;

impl IoModel {
    /// Hourly checkpoints of 10 % of 16 GB a node.
    pub fn bursts() -> IoModel {
        IoModel::Bursts { memory: NODE_MEMORY, share: 0.1, interval: HOUR }
    }

    /// 15 minutes of input, 10 of an hourly checkpoint, 10 of output.
    pub fn slides() -> IoModel {
        let minutes = |count: u64| Duration::from_secs(60 * count);
        IoModel::Slides { input: minutes(15), checkpoint: minutes(10), interval: HOUR, output: minutes(10) }
    }

    /// The constants of the paper, and one processor a node.
    pub fn kopanski() -> IoModel {
        IoModel::Kopanski {
            sigma: 1.097,
            scale: Bytes(2_714_116 * KIB),
            less: Bytes(150_362 * KIB),
            least: Bytes(100_000_000),
            phases: 10,
            processors: 1,
        }
    }

    /// 10 % of 16 GB a node, of which each fails once in five years.
    pub fn daly() -> IoModel {
        IoModel::Daly { memory: NODE_MEMORY, share: 0.1, mtbf: 5 * 365 * 24 * HOUR }
    }

    /// Its word.
    pub fn word(&self) -> &'static str {
        match self {
            IoModel::None => "none",
            IoModel::Bursts { .. } => "bursts",
            IoModel::Slides { .. } => "slides",
            IoModel::Kopanski { .. } => "kopanski",
            IoModel::Daly { .. } => "daly",
            IoModel::Measured { .. } => "measured",
        }
    }

    /// Whether its numbers depend on the seed.
    pub fn is_random(&self) -> bool {
        matches!(self, IoModel::Kopanski { .. })
    }

    /// At which rate a job read and wrote in RAM when its log was written, if it did.
    fn ram_of(&self, job: &TraceJob) -> Option<Rate> {
        let IoModel::Measured { jobs, link } = self else { return None };
        let in_ram = jobs.get(&job.number).is_some_and(|measured| measured.in_ram);
        in_ram.then(|| Rate(Bytes(link.0.0.saturating_mul(u64::from(job.nodes.max(1))).max(1))))
    }

    /// What a job does. `alone` is the rate at which it would read and write if it were alone on the disk filesystem.
    pub fn of_job(&self, job: &TraceJob, alone: Rate, seed: u64) -> JobIo {
        let run = job.run as f64;
        let seconds = |bytes: Bytes| bytes.0 as f64 / alone.0.0 as f64;
        let bytes_in = |time: Duration| Bytes((time.as_secs_f64() * alone.0.0 as f64) as u64);
        let memory =
            |of_node: Bytes, share: f64| Bytes((of_node.0 as f64 * share * f64::from(job.nodes)) as u64);
        let io = match self {
            IoModel::None => JobIo::default(),
            IoModel::Bursts { memory: of_node, share, interval } => {
                let burst = memory(*of_node, *share);
                JobIo {
                    input: burst,
                    checkpoint: burst,
                    checkpoints: checkpoints(
                        run - 2.0 * seconds(burst),
                        interval.as_secs_f64(),
                        seconds(burst),
                    ),
                    output: burst,
                    compute_ms: 0,
                }
            }
            IoModel::Slides { input, checkpoint, interval, output } => {
                let rest = run - input.as_secs_f64() - output.as_secs_f64();
                JobIo {
                    input: bytes_in(*input),
                    checkpoint: bytes_in(*checkpoint),
                    checkpoints: checkpoints(rest, interval.as_secs_f64(), checkpoint.as_secs_f64()),
                    output: bytes_in(*output),
                    compute_ms: 0,
                }
            }
            IoModel::Kopanski { sigma, scale, less, least, phases, processors } => {
                let mut random = random::of_job(Purpose::Io, seed, job.number);
                let drawn = match LogNormal::new((scale.0 as f64).ln(), *sigma) {
                    Ok(distribution) => distribution.sample(&mut random),
                    // A deviation that is no number is refused where it is read.
                    Err(_) => scale.0 as f64,
                };
                let each = (drawn - less.0 as f64).max(least.0 as f64);
                let all = each * f64::from(*processors) * f64::from(job.nodes);
                let phase = 1 + (random::unit(&mut random) * f64::from(*phases)) as u32;
                let allocation = Bytes(all as u64);
                JobIo {
                    input: allocation,
                    checkpoint: Bytes(allocation.0 / 2),
                    checkpoints: phase.clamp(1, (*phases).max(1)) - 1,
                    output: allocation,
                    compute_ms: 0,
                }
            }
            IoModel::Daly { memory: of_node, share, mtbf } => {
                let burst = memory(*of_node, *share);
                let failures = mtbf.as_secs_f64() / f64::from(job.nodes);
                let interval = (2.0 * seconds(burst) * failures).sqrt();
                JobIo {
                    input: burst,
                    checkpoint: burst,
                    checkpoints: checkpoints(run - 2.0 * seconds(burst), interval, seconds(burst)),
                    output: burst,
                    compute_ms: 0,
                }
            }
            IoModel::Measured { jobs, .. } => {
                let Measured { read, written, .. } = jobs.get(&job.number).copied().unwrap_or_default();
                JobIo { input: read, output: written, ..JobIo::default() }
            }
        };
        let all = Bytes(io.input.0.saturating_add(io.written().0));
        let waited = match self.ram_of(job) {
            Some(ram) => all.0 as f64 / ram.0.0 as f64,
            None => seconds(all),
        };
        let compute = (run - waited).max(run / LEAST_COMPUTE);
        JobIo { compute_ms: (compute * 1000.0).round() as u64, ..io }
    }
}

/// How much I/O there is beside what the log says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Overrun {
    /// Jobs whose I/O, alone on the disk filesystem, leaves less than a twentieth of their run time for computing: they run for
    /// longer.
    pub jobs: u64,
    /// The share of the machine that all jobs ask for while they are submitted, each alone on the disk filesystem.
    pub load: f64,
}

impl Overrun {
    /// Of all jobs of a log.
    pub fn of(trace: &Trace, machine: &Machine, model: &IoModel, seed: u64) -> Overrun {
        let (mut jobs, mut area) = (0, 0.0);
        for job in &trace.jobs {
            let alone = machine.alone(job.nodes);
            let io = model.of_job(job, alone, seed);
            let bytes = io.input.0 as f64 + io.written().0 as f64;
            let seconds = io.compute_ms as f64 / 1000.0 + bytes / alone.0.0 as f64;
            // The log of one that was in RAM has no time for the disk filesystem, and need not have.
            jobs += u64::from(seconds > job.run as f64 + 1.0 && model.ram_of(job).is_none());
            area += f64::from(job.nodes) * seconds;
        }
        let load = area / (f64::from(machine.nodes) * trace.span() as f64);
        Overrun { jobs, load }
    }
}

/// A job computes for one part in so many of its run time, at least.
const LEAST_COMPUTE: f64 = 20.0;

/// The memory of a compute node, unless somebody says otherwise.
const NODE_MEMORY: Bytes = Bytes(16_000_000_000);

const HOUR: Duration = Duration::from_secs(3600);

/// How many checkpoints there are in a time, if each comes after so much computing and takes so long: none at the very end,
/// where the output is written.
fn checkpoints(time: f64, interval: f64, each: f64) -> u32 {
    let most = f64::from(u32::MAX);
    if interval.is_nan() || interval <= 0.0 {
        return 0;
    }
    ((time / (interval + each)).ceil() - 1.0).clamp(0.0, most) as u32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn job(number: u64, run: u64, nodes: u32) -> TraceJob {
        TraceJob { number, submitted: 0, run, nodes, requested: None, user: None }
    }

    fn rate(text: &str) -> Rate {
        text.parse().unwrap()
    }

    #[test]
    fn a_day_of_the_slides_has_twenty_checkpoints_and_225_minutes_of_io() {
        let io = IoModel::slides().of_job(&job(1, 24 * 3600, 64), rate("100MB"), 0);
        assert_eq!(io.checkpoints, 20);
        let minutes = (io.input.0 + io.written().0) as f64 / 100e6 / 60.0;
        assert_eq!(minutes.round(), 225.0);
        // A checkpoint after each hour of computing, and none at the end: 20 hours and a quarter.
        assert_eq!(io.compute_ms, (24 * 60 - 225) * 60_000);
    }

    #[test]
    fn bursts_lie_within_the_run_time_and_leave_a_twentieth_for_computing() {
        let bursts = IoModel::bursts();
        let io = bursts.of_job(&job(1, 4 * 3600, 10), rate("160MB"), 0);
        // 16 GB in 100 s: 14,200 s for hours of 3,700 s each.
        assert_eq!(
            (io.input, io.checkpoint, io.checkpoints),
            (Bytes(16_000_000_000), Bytes(16_000_000_000), 3)
        );
        assert_eq!(io.compute_ms, (4 * 3600 - 500) * 1000);
        let short = bursts.of_job(&job(1, 60, 10), rate("160MB"), 0);
        assert_eq!((short.checkpoints, short.compute_ms), (0, 3000));
        let hour = bursts.of_job(&job(1, 3600 + 200, 10), rate("160MB"), 0);
        assert_eq!(hour.checkpoints, 0, "an hour of computing ends with the output");
    }

    #[test]
    fn the_bytes_of_kopanski_have_the_median_of_the_paper_and_depend_on_the_seed_alone() {
        let model = IoModel::kopanski();
        let of = |number, seed| model.of_job(&job(number, 3600, 4), rate("1GB"), seed);
        assert_eq!(of(3, 1), of(3, 1));
        assert_ne!(of(3, 1).input, of(3, 2).input);
        let mut inputs: Vec<u64> = (0..10_001).map(|number| of(number, 1).input.0 / 4).collect();
        inputs.sort_unstable();
        let median = (2_714_116.0 - 150_362.0) * 1024.0;
        let found = inputs[inputs.len() / 2] as f64;
        assert!((found / median - 1.0).abs() < 0.05, "{found} is not about {median}");
        assert!(inputs[0] >= 100_000_000);
        let checkpoints: Vec<u32> = (0..1000).map(|number| of(number, 1).checkpoints).collect();
        assert_eq!((checkpoints.iter().min(), checkpoints.iter().max()), (Some(&0), Some(&9)));
    }

    #[test]
    fn daly_takes_the_best_interval() {
        // 16 GB in 100 s, ten nodes that fail every 500 hours: sqrt(2 * 100 s * 180,000 s) = 6,000 s.
        let model = IoModel::Daly { memory: NODE_MEMORY, share: 0.1, mtbf: Duration::from_secs(500 * 3600) };
        let io = model.of_job(&job(1, 2 * 6100 + 200 + 1, 10), rate("160MB"), 0);
        assert_eq!(io.checkpoints, 2);
    }

    #[test]
    fn what_was_measured_is_done_by_the_job_it_was_measured_of() {
        let did = |in_ram| Measured { read: Bytes(100), written: Bytes(50), in_ram };
        let model = IoModel::Measured { jobs: [(7, did(false)), (9, did(true))].into(), link: rate("50B") };
        let io = model.of_job(&job(7, 10, 1), rate("10B"), 0);
        assert_eq!((io.input, io.written(), io.compute_ms), (Bytes(100), Bytes(50), 500));
        assert_eq!(model.of_job(&job(8, 10, 1), rate("10B"), 0).compute_ms, 10_000);
        let io = model.of_job(&job(9, 10, 1), rate("10B"), 0);
        assert_eq!((io.input, io.written(), io.compute_ms), (Bytes(100), Bytes(50), 7000));
    }

    proptest::proptest! {
        #[test]
        fn no_job_does_more_io_alone_than_its_run_time_leaves_or_it_computes_for_a_twentieth(
            run in 1u64..1_000_000, nodes in 1u32..100_000, seed in 0u64..5, megabytes in 1u64..100_000,
        ) {
            for model in [IoModel::bursts(), IoModel::slides(), IoModel::kopanski(), IoModel::daly()] {
                let io = model.of_job(&job(1, run, nodes), rate(&format!("{megabytes}MB")), seed);
                let on_disk = (io.input.0 as f64 + io.written().0 as f64) / (megabytes as f64 * 1e6);
                let all = on_disk + io.compute_ms as f64 / 1000.0;
                let least = run as f64 / 20.0;
                proptest::prop_assert!(io.compute_ms as f64 / 1000.0 >= least - 0.001);
                proptest::prop_assert!((all - run as f64).abs() < 0.01 || io.compute_ms as f64 / 1000.0 < least + 0.001);
            }
        }
    }
}
