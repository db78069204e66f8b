//! What must hold of every simulation with an accelerator, whatever the jobs.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ondeck_core::schedule::{LockIn, Site};
use ondeck_core::timeline::Span;
use ondeck_core::{Bytes, Rate, WaitPolicy};
use ondeck_sim::io::IoModel;
use ondeck_sim::machine::{Accelerated, Machine, Steps};
use ondeck_sim::random::{self, Purpose};
use ondeck_sim::record::Record;
use ondeck_sim::remedy::Estimates;
use ondeck_sim::simulation::{Scenario, simulate, simulate_with_timeline};
use ondeck_sim::study::{Point, Study};
use ondeck_sim::summary::Overtaken;
use ondeck_sim::trace::{Trace, TraceJob};
use ondeck_sim::workload_manager::Order;

fn megabytes(count: u64) -> Rate {
    Rate(Bytes(count * 1_000_000))
}

/// Jobs of minutes to hours on a machine of 32 nodes, that it can just serve.
fn workload(seed: u64, count: u64) -> Trace {
    let mut submitted = 0;
    let jobs = (0..count).map(|number| {
        let mut random = random::of_job(Purpose::Io, seed, number + 1_000_000);
        let mut below = |most: f64| random::unit(&mut random) * most;
        submitted += below(900.0) as u64;
        let nodes = 1 + below(5.0).exp2() as u32;
        TraceJob {
            number,
            submitted,
            run: 60 + below(3600.0 * 3.0) as u64,
            nodes: nodes.min(32),
            requested: None,
            user: Some(below(5.0) as u32),
        }
    });
    let mut trace = Trace { jobs: jobs.collect(), nodes: Some(32), ..Trace::default() };
    ondeck_sim::remedy::rescale(&mut trace, 32, 0.8);
    Estimates::Modal.fill_in(&mut trace, seed);
    trace
}

fn machine() -> Machine {
    Machine { nodes: 32, link: megabytes(1000), disk: megabytes(200), background: 0.0 }
}

fn accelerator(nodes: u32, wait: WaitPolicy) -> Accelerated {
    Accelerated {
        nodes,
        memory: Bytes(64 << 30),
        link: megabytes(2000),
        site: Site { proportion: 4, ..Site::default() },
        wait,
        depth: 4,
        interval: Duration::from_secs(1),
        steps: Steps::default(),
    }
}

fn of(trace: &Trace, machine: Machine, accelerator: Option<Accelerated>, io: &IoModel) -> Record {
    let scenario = Scenario { trace, machine, accelerator, io, order: Order::Fcfs, seed: 7, stop: None };
    simulate(&scenario).unwrap_or_else(|error| panic!("{error}"))
}

fn io_node_hours(record: &Record) -> f64 {
    record.jobs.iter().map(|job| f64::from(job.nodes) * job.io_ms() as f64 / 3.6e6).sum()
}

#[test]
fn without_io_nothing_is_staged_and_jobs_start_as_without_an_accelerator() {
    let trace = workload(1, 300);
    let alone = of(&trace, machine(), None, &IoModel::None);
    let with = of(&trace, machine(), Some(accelerator(8, WaitPolicy::Disk)), &IoModel::None);
    assert_eq!(alone.jobs, with.jobs);
    assert_eq!(with.totals.staged_in.0 + with.totals.staged_out.0 + with.totals.written_to_ram.0, 0);
    assert_eq!(io_node_hours(&with), 0.0);
}

#[test]
fn an_infinitely_fast_disk_leaves_nothing_to_save() {
    let trace = workload(2, 300);
    let fast = Machine { link: megabytes(1_000_000_000), disk: megabytes(1_000_000_000), ..machine() };
    let alone = of(&trace, fast, None, &IoModel::bursts());
    let with = of(&trace, fast, Some(accelerator(8, WaitPolicy::Disk)), &IoModel::bursts());
    let compute: f64 =
        alone.jobs.iter().map(|job| f64::from(job.nodes) * job.compute_ms as f64 / 3.6e6).sum();
    let saved = io_node_hours(&alone) - io_node_hours(&with);
    // A link of an RSA node is slower than that disk, and steps take their time.
    assert!((-0.01 * compute..=0.0005 * compute).contains(&saved), "{saved} of {compute} node-hours");
}

#[test]
fn all_that_jobs_write_to_ram_comes_home_or_is_overwritten_and_all_that_is_staged_is_read_or_counted() {
    for wait in [WaitPolicy::Disk, WaitPolicy::Hold] {
        for (seed, io) in [(3, IoModel::bursts()), (4, IoModel::kopanski()), (5, IoModel::slides())] {
            let trace = workload(seed, 200);
            let record = of(&trace, machine(), Some(accelerator(8, wait)), &io);
            let totals = record.totals;
            assert_eq!(totals.written_to_ram.0, totals.overwritten.0 + totals.staged_out.0, "{io:?}");
            assert_eq!(totals.staged_in.0, totals.read_from_ram.0 + totals.wasted.0, "{io:?}");
            assert!(totals.written_to_ram > Bytes(0), "{io:?}");
            // Every job has run, for as long as it computes at least.
            for (job, of_trace) in record.jobs.iter().zip(&trace.jobs) {
                assert!(
                    job.started_ms >= job.submitted_ms && job.ended_ms >= job.started_ms + job.compute_ms
                );
                assert!(job.compute_ms * 20 >= of_trace.run * 1000);
            }
            // The disk filesystem was never faster than it is.
            let most = machine().bandwidth() * totals.disk_busy_ms as f64 / 1000.0;
            assert!(totals.disk_bytes <= most + 1.0, "{} of {most}", totals.disk_bytes);
        }
    }
}

/// The workload manager tells of jobs that are not first when it expects them to start.
#[test]
fn expected_starts_bring_more_data_to_ram_before_jobs_start_than_those_who_are_first_do() {
    let mut trace = workload(9, 300);
    // As they ran: with the round times that people request, starts are expected far too late.
    trace.jobs.iter_mut().for_each(|job| job.requested = Some(job.run));
    let io = IoModel::bursts();
    let in_ram = |depth: usize, horizon: u64| {
        let mut accelerator = accelerator(16, WaitPolicy::Disk);
        accelerator.depth = depth;
        accelerator.site.horizon = Duration::from_secs(horizon);
        let record = of(&trace, machine(), Some(accelerator), &io);
        let totals = record.totals;
        assert_eq!(totals.written_to_ram.0, totals.overwritten.0 + totals.staged_out.0);
        assert_eq!(totals.staged_in.0, totals.read_from_ram.0 + totals.wasted.0);
        totals.read_from_ram.0
    };
    // Staging for hours ahead would keep RSA nodes from those who come before.
    let (first, near) = (in_ram(1, 0), in_ram(1, 600));
    assert!(first > 0 && near > first, "{first}, {near} bytes");
}

#[test]
fn no_node_is_used_by_two_jobs_at_a_time() {
    let trace = workload(6, 200);
    for wait in [WaitPolicy::Disk, WaitPolicy::Hold] {
        let io = IoModel::bursts();
        let accelerator = Some(accelerator(8, wait));
        let scenario = Scenario {
            trace: &trace,
            machine: machine(),
            accelerator,
            io: &io,
            order: Order::Size,
            seed: 7,
            stop: None,
        };
        let (_, timeline) = simulate_with_timeline(&scenario).unwrap_or_else(|error| panic!("{error}"));
        for (spans, count) in [(&timeline.compute, 32), (&timeline.rsa, 8)] {
            assert!(!spans.is_empty());
            if count == 32 {
                // Each has as many as it asked for.
                for span in spans {
                    let nodes: u32 = span.nodes.iter().map(|(first, last)| last - first + 1).sum();
                    assert_eq!(nodes, trace.jobs[span.job as usize].nodes, "{span:?}");
                }
            }
            let mut of_node: Vec<Vec<&Span>> = vec![Vec::new(); count];
            for span in spans {
                for (first, last) in &span.nodes {
                    (*first..=*last).for_each(|node| of_node[node as usize].push(span));
                }
            }
            for spans in of_node {
                for pair in spans.windows(2) {
                    assert!(pair[0].to_ms <= pair[1].from_ms, "{pair:?}");
                }
            }
        }
    }
}

#[test]
fn more_rsa_nodes_make_jobs_wait_no_longer_for_io() {
    let mut sums = [0.0; 4];
    for seed in 0..10 {
        let trace = workload(100 + seed, 150);
        for (sum, nodes) in sums.iter_mut().zip([0, 4, 8, 16]) {
            let with = (nodes > 0).then(|| accelerator(nodes, WaitPolicy::Disk));
            *sum += io_node_hours(&of(&trace, machine(), with, &IoModel::bursts()));
        }
    }
    for pair in sums.windows(2) {
        assert!(pair[1] <= pair[0] * 1.02, "{sums:?}");
    }
}

#[test]
fn who_is_kept_in_front_costs_others_what_is_said() {
    let trace = workload(8, 100);
    let study = |lock_in| {
        let mut accelerator = accelerator(0, WaitPolicy::Disk);
        accelerator.site.lock_in = lock_in;
        let study = Study {
            trace: &trace,
            estimates: Estimates::Exact,
            machine: machine(),
            accelerator,
            sizes: vec![2, 4],
            depths: vec![4],
            proportions: vec![4],
            io: IoModel::bursts(),
            order: Order::Fcfs,
            seeds: 1,
            seed: 1,
        };
        let starts = |index: usize| {
            let scenario = study.scenario(study.points()[index], &trace, 1);
            let record = simulate(&scenario).unwrap_or_else(|error| panic!("{error}"));
            record.jobs.iter().map(|job| job.started_ms).collect::<Vec<_>>()
        };
        let results = study.run(1, &AtomicBool::new(false), &()).unwrap_or_else(|error| panic!("{error}"));
        let overtaken: Vec<Overtaken> = results.iter().map(|of| of.summaries[0].overtaken).collect();
        (overtaken, (0..results.len()).map(starts).collect::<Vec<_>>())
    };
    let (none, without) = study(LockIn::Off);
    assert!(none.iter().all(|of| *of == Overtaken::default()));
    let (said, with) = study(LockIn::Priority);
    assert!(said.iter().any(|of| of.jobs > 0), "{said:?}");
    for ((said, with), without) in said.iter().zip(with).zip(without) {
        let late = with.iter().zip(&without).filter(|(with, without)| with > without);
        assert_eq!(said.jobs, late.count() as u64);
    }
}

#[test]
fn the_same_seed_gives_the_same_results_whatever_the_number_of_threads() {
    let trace = workload(8, 100);
    let study = Study {
        trace: &trace,
        estimates: Estimates::Exact,
        machine: machine(),
        accelerator: accelerator(0, WaitPolicy::Disk),
        sizes: vec![0, 4, 8],
        depths: vec![1, 4],
        proportions: vec![4],
        io: IoModel::kopanski(),
        order: Order::Fcfs,
        seeds: 2,
        seed: 1,
    };
    let run = |threads| {
        let results =
            study.run(threads, &AtomicBool::new(false), &()).unwrap_or_else(|error| panic!("{error}"));
        serde_json::to_string(&results).unwrap_or_default()
    };
    let first = run(1);
    assert!(first.len() > 1000);
    for round in 0..100 {
        assert_eq!(run(1 + round % 3), first);
    }
    assert_eq!(study.points().len(), 1 + 4 + 2);
    assert!(matches!(study.points()[1], Point::Accelerated { nodes: 4, depth: 1, proportion: 4 }));
    // What is stopped at once has nothing to say.
    assert_eq!(study.run(2, &AtomicBool::new(true), &()), Ok(Vec::new()));
}
