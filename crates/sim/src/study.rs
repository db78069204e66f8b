//! Many simulations of one log: without an accelerator, with each of several sizes of it, and with its nodes as further compute
//! nodes; each with several seeds.
//!
//! Simulations do not depend on each other, so they are made several at a time; what comes of it is the same whatever the number
//! of threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ondeck_core::schedule::LockIn;
use serde::Serialize;

use crate::io::IoModel;
use crate::machine::{Accelerated, Machine};
use crate::remedy::Estimates;
use crate::simulation::{Impossible, Scenario, simulate};
use crate::summary::{Overtaken, Summary};
use crate::trace::Trace;
use crate::workload_manager::Order;

/// What is studied.
#[derive(Clone, Debug)]
pub struct Study<'a> {
    /// The jobs, as their log has them.
    pub trace: &'a Trace,
    /// What jobs are taken to have requested that do not say so.
    pub estimates: Estimates,
    /// The machine, without RSA nodes.
    pub machine: Machine,
    /// The accelerator; how many nodes it has is given by `sizes`, how many jobs are next by `depths`, and so on.
    pub accelerator: Accelerated,
    /// How many RSA nodes there are. Without any, what `depths` and `proportions` say makes no difference.
    pub sizes: Vec<u32>,
    /// How many jobs of the queue are next.
    pub depths: Vec<usize>,
    /// How many compute nodes get one RSA node.
    pub proportions: Vec<u32>,
    /// What jobs read and write.
    pub io: IoModel,
    /// In which order they start.
    pub order: Order,
    /// How many seeds there are, from `seed`.
    pub seeds: u64,
    /// The first of them.
    pub seed: u64,
}

/// One machine of a study.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case", tag = "machine")]
pub enum Point {
    /// The machine alone.
    Alone,
    /// With so many further compute nodes.
    MoreComputeNodes {
        /// How many.
        nodes: u32,
    },
    /// With RSA nodes.
    Accelerated {
        /// How many.
        nodes: u32,
        /// How many jobs of the queue are next.
        depth: usize,
        /// How many compute nodes get one of them.
        proportion: u32,
    },
}

impl Point {
    /// How many nodes it has beside those of the machine.
    pub fn added(self) -> u32 {
        match self {
            Point::Alone => 0,
            Point::MoreComputeNodes { nodes } | Point::Accelerated { nodes, .. } => nodes,
        }
    }
}

/// What came of one machine: a summary for each seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PointResult {
    /// Which machine.
    pub point: Point,
    /// In the order of the seeds.
    pub summaries: Vec<Summary>,
}

/// A number over all seeds: the mean, and how far from it the true one may be, 19 times of 20.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Interval {
    /// The mean of all seeds.
    pub mean: f64,
    /// Half of the interval; nothing with one seed.
    pub half: Option<f64>,
}

impl Interval {
    /// Of one number a seed.
    pub fn of(values: &[f64]) -> Interval {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count.max(1) as f64;
        if count < 2 {
            return Interval { mean, half: None };
        }
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
        let t = STUDENT.get(count - 2).copied().unwrap_or(1.96);
        Interval { mean, half: Some(t * (variance / count as f64).sqrt()) }
    }
}

/// Student's t for 95 %, by the degrees of freedom from 1.
const STUDENT: [f64; 29] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
];

impl PointResult {
    /// A number over all seeds.
    pub fn over_seeds(&self, number: impl Fn(&Summary) -> f64) -> Interval {
        let values: Vec<f64> = self.summaries.iter().map(number).collect();
        Interval::of(&values)
    }
}

/// What a size of the accelerator is worth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Saved {
    /// Node-hours for which compute nodes do not wait for I/O any more.
    pub gross: Interval,
    /// What of that is left when the RSA nodes are counted until the last result is home.
    pub net: Interval,
    /// Node-hours of the RSA nodes.
    pub cost: Interval,
}

impl Saved {
    /// By two results with the same seeds: seed by seed, so that what is random in both does not count.
    pub fn of(alone: &PointResult, with: &PointResult) -> Saved {
        let added = f64::from(with.point.added());
        let each = |number: fn(f64, f64) -> f64| {
            let pairs = alone.summaries.iter().zip(&with.summaries);
            let values: Vec<f64> = pairs
                .map(|(alone, with)| {
                    number(alone.io_node_hours - with.io_node_hours, added * with.home_hours)
                })
                .collect();
            Interval::of(&values)
        };
        Saved {
            gross: each(|saved, _| saved),
            net: each(|saved, cost| saved - cost),
            cost: each(|_, cost| cost),
        }
    }
}

/// How far a study has come.
pub trait Progress: Sync {
    /// So many of all simulations are done.
    fn done(&self, done: usize, all: usize);
}

impl Progress for () {
    fn done(&self, _: usize, _: usize) {}
}

impl Study<'_> {
    /// All machines, in the order of reports.
    pub fn points(&self) -> Vec<Point> {
        let sizes = || self.sizes.iter().copied().filter(|nodes| *nodes > 0);
        let mut points = vec![Point::Alone];
        for nodes in sizes() {
            for proportion in &self.proportions {
                for depth in &self.depths {
                    points.push(Point::Accelerated { nodes, depth: *depth, proportion: *proportion });
                }
            }
        }
        points.extend(sizes().map(|nodes| Point::MoreComputeNodes { nodes }));
        points
    }

    /// Makes all simulations, so many at a time. When `stop` is set, all end at once, and only machines come back of
    /// which all seeds are done.
    ///
    /// # Errors
    /// [`Impossible`], before anything is simulated.
    pub fn run(
        &self,
        threads: usize,
        stop: &AtomicBool,
        progress: &impl Progress,
    ) -> Result<Vec<PointResult>, Impossible> {
        let points = self.points();
        let seeds = usize::try_from(self.seeds.max(1)).unwrap_or(usize::MAX);
        // What the estimates are drawn from is the seed; all machines of one seed have the same jobs.
        let traces: Vec<Trace> = (0..seeds)
            .map(|index| {
                let mut trace = self.trace.clone();
                self.estimates.fill_in(&mut trace, self.seed.wrapping_add(index as u64));
                trace
            })
            .collect();
        let all = points.len() * seeds;
        let results: Mutex<Vec<Option<Summary>>> = Mutex::new(vec![None; all]);
        let failed: Mutex<Option<Impossible>> = Mutex::new(None);
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..threads.clamp(1, all) {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= all || stop.load(Ordering::Relaxed) {
                            return;
                        }
                        // One seed after the other, so that what is done first is whole machines.
                        let (point, seed) = (points[index / seeds], index % seeds);
                        match self.one(point, &traces[seed], self.seed.wrapping_add(seed as u64), stop) {
                            Ok(summary) => {
                                if let Ok(mut results) = results.lock() {
                                    results[index] = Some(summary);
                                }
                                progress.done(done.fetch_add(1, Ordering::Relaxed) + 1, all);
                            }
                            Err(Impossible::Stopped) => return,
                            Err(why) => {
                                if let Ok(mut failed) = failed.lock() {
                                    failed.get_or_insert(why);
                                }
                                stop.store(true, Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
        });
        if let Some(why) = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            return Err(why);
        }
        let results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        let whole = points.iter().zip(results.chunks(seeds)).filter_map(|(point, summaries)| {
            let summaries = summaries.iter().cloned().collect::<Option<Vec<Summary>>>()?;
            Some(PointResult { point: *point, summaries })
        });
        Ok(whole.collect())
    }

    /// One machine and one seed.
    fn one(&self, point: Point, trace: &Trace, seed: u64, stop: &AtomicBool) -> Result<Summary, Impossible> {
        let scenario = Scenario { stop: Some(stop), ..self.scenario(point, trace, seed) };
        let rsa_nodes = scenario.accelerator.as_ref().map_or(0, |accelerator| accelerator.nodes);
        let record = simulate(&scenario)?;
        let mut summary = Summary::of(trace, &scenario.machine, rsa_nodes, &record);
        // Who is kept in front overtakes others: what that costs them is seen by its absence.
        let mut without = scenario;
        if let Some(accelerator) = &mut without.accelerator
            && accelerator.nodes > 0
            && std::mem::replace(&mut accelerator.site.lock_in, LockIn::Off) != LockIn::Off
        {
            summary.overtaken = Overtaken::of(&record, &simulate(&without)?);
        }
        Ok(summary)
    }

    /// What is simulated for one machine and one seed; `trace` says how long each job might run.
    pub fn scenario<'a>(&'a self, point: Point, trace: &'a Trace, seed: u64) -> Scenario<'a> {
        let mut machine = self.machine;
        let mut accelerator = None;
        match point {
            Point::Alone => {}
            Point::MoreComputeNodes { nodes } => machine.nodes = machine.nodes.saturating_add(nodes),
            Point::Accelerated { nodes, depth, proportion } => {
                let mut with = Accelerated { nodes, depth, ..self.accelerator.clone() };
                with.site.proportion = proportion;
                accelerator = Some(with);
            }
        }
        Scenario { trace, machine, accelerator, io: &self.io, order: self.order, seed, stop: None }
    }
}

/// How many RSA nodes pay, and why.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Knee {
    /// The size that saves most after its own nodes are counted; zero if none saves more than it costs.
    pub nodes: u32,
    /// Node-hours that the last of its nodes save, for each hour of them.
    pub last_gain: Option<f64>,
    /// The same of the next size, if there is one.
    pub next_gain: Option<f64>,
    /// The next size.
    pub next: Option<u32>,
}

/// The knee of several sizes, each with what it saves; the smallest first.
pub fn knee(sizes: &[(u32, Saved)]) -> Knee {
    // Nothing costs nothing, and saves nothing.
    let at = |index: usize| match index {
        0 => (0, 0.0, 0.0),
        index => (sizes[index - 1].0, sizes[index - 1].1.gross.mean, sizes[index - 1].1.cost.mean),
    };
    let gain = |index: usize| {
        let ((_, gross, cost), (_, before, cost_before)) = (at(index), at(index - 1));
        (cost > cost_before).then(|| (gross - before) / (cost - cost_before))
    };
    let net = |index: usize| at(index).1 - at(index).2;
    let best = (0..=sizes.len()).reduce(|best, index| if net(index) > net(best) { index } else { best });
    let best = best.unwrap_or(0);
    let next = (best < sizes.len()).then_some(best + 1);
    Knee {
        nodes: at(best).0,
        last_gain: if best > 0 { gain(best) } else { None },
        next_gain: next.and_then(gain),
        next: next.map(|next| at(next).0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(gross: f64, cost: f64) -> Saved {
        let exact = |mean| Interval { mean, half: None };
        Saved { gross: exact(gross), net: exact(gross - cost), cost: exact(cost) }
    }

    #[test]
    fn the_knee_is_where_most_is_left_and_says_what_the_last_and_the_next_nodes_gain() {
        let sizes = [(4, saved(100.0, 40.0)), (8, saved(160.0, 80.0)), (16, saved(200.0, 160.0))];
        let found = knee(&sizes);
        assert_eq!((found.nodes, found.next), (8, Some(16)));
        assert_eq!((found.last_gain, found.next_gain), (Some(1.5), Some(0.5)));
        let none = knee(&[(4, saved(10.0, 40.0))]);
        assert_eq!((none.nodes, none.last_gain, none.next_gain), (0, None, Some(0.25)));
        assert_eq!(knee(&[]).nodes, 0);
    }

    #[test]
    fn an_interval_is_by_students_t() {
        let interval = Interval::of(&[9.0, 10.0, 11.0]);
        assert_eq!(interval.mean, 10.0);
        assert!((interval.half.unwrap_or(0.0) - 4.303 / 3f64.sqrt()).abs() < 1e-9);
        assert_eq!(Interval::of(&[5.0]), Interval { mean: 5.0, half: None });
    }
}
