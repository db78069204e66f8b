//! Without an accelerator and without I/O the simulation is EASY backfill: a simple one, written for this test alone, starts every
//! job at the same time.

mod simple_easy;

use ondeck_core::Rate;
use ondeck_sim::io::IoModel;
use ondeck_sim::machine::Machine;
use ondeck_sim::simulation::{Scenario, simulate};
use ondeck_sim::trace::{Trace, TraceJob};
use ondeck_sim::workload_manager::Order;
use proptest::prelude::*;
use simple_easy::simple_easy;

fn machine(nodes: u32) -> Machine {
    let rate = Rate(ondeck_core::Bytes(1_000_000_000));
    Machine { nodes, link: rate, disk: rate, background: 0.0 }
}

fn starts(trace: &Trace, nodes: u32) -> Vec<u64> {
    let scenario = Scenario {
        trace,
        machine: machine(nodes),
        accelerator: None,
        io: &IoModel::None,
        order: Order::Fcfs,
        seed: 0,
        stop: None,
    };
    let record = simulate(&scenario).unwrap_or_else(|error| panic!("{error}"));
    record.jobs.iter().map(|job| job.started_ms / 1000).collect()
}

fn job(number: u64, submitted: u64, run: u64, nodes: u32, requested: u64) -> TraceJob {
    TraceJob { number, submitted, run, nodes, requested: Some(requested), user: None }
}

#[test]
fn five_jobs_start_as_computed_by_hand() {
    // Ten nodes. 2 waits for 1 and 3, until 100. 3 fits beside 1. 4 would end after 100 and needs 4 of the 2 that 2 leaves free: it
    // waits; 5 ends in time, at 90. 4 needs 4 nodes when 2 has 8: it starts after it.
    //                    submitted, runs, nodes, requested   starts
    let table = [
        (job(1, 0, 100, 6, 100), 0),
        (job(2, 10, 50, 8, 60), 100),
        (job(3, 20, 30, 2, 70), 20),
        (job(4, 30, 40, 4, 90), 150),
        (job(5, 60, 30, 2, 30), 60),
    ];
    let trace = Trace { jobs: table.iter().map(|(job, _)| job.clone()).collect(), ..Trace::default() };
    let expected: Vec<u64> = table.iter().map(|(_, start)| *start).collect();
    assert_eq!(starts(&trace, 10), expected);
    assert_eq!(simple_easy(&trace, 10), expected);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_job_starts_when_a_simple_easy_starts_it(
        nodes in 1u32..24,
        jobs in proptest::collection::vec((0u64..200, 1u64..60, 1u32..24, 0u64..80), 1..60),
    ) {
        let jobs = jobs.into_iter().enumerate().map(|(number, (submitted, run, of_job, more))| {
            // Some run for longer than they requested.
            job(number as u64, submitted, run, of_job.min(nodes), (run + more).saturating_sub(20).max(1))
        });
        let mut trace = Trace { jobs: jobs.collect(), ..Trace::default() };
        trace.jobs.sort_by_key(|job| (job.submitted, job.number));
        prop_assert_eq!(starts(&trace, nodes), simple_easy(&trace, nodes));
    }
}
