//! Figure 2.1 of the thesis: jobs on the whole machine, one after the other, and RSA nodes in two halves. While one half is in use,
//! the other one brings the results of the job before home and has the input of the job after it staged in.

use std::time::Duration;

use ondeck_core::schedule::Site;
use ondeck_core::timeline::{Phase, Span, Timeline};
use ondeck_core::{Bytes, Rate, WaitPolicy};
use ondeck_sim::io::IoModel;
use ondeck_sim::machine::{Accelerated, Machine, Steps};
use ondeck_sim::picture::gantt;
use ondeck_sim::simulation::{Scenario, simulate_with_timeline};
use ondeck_sim::trace::{Trace, TraceJob};
use ondeck_sim::workload_manager::Order;

fn four_jobs() -> (Trace, Timeline) {
    let job =
        |number| TraceJob { number, submitted: 0, run: 3000, nodes: 8, requested: Some(3600), user: Some(1) };
    let trace = Trace { jobs: (1..=4).map(job).collect(), nodes: Some(8), ..Trace::default() };
    let megabytes = |count: u64| Rate(Bytes(count * 1_000_000));
    let machine = Machine { nodes: 8, link: megabytes(1000), disk: megabytes(50), background: 0.0 };
    let accelerator = Accelerated {
        nodes: 4,
        memory: Bytes(64 << 30),
        link: megabytes(1000),
        site: Site { proportion: 4, ..Site::default() },
        wait: WaitPolicy::Hold,
        depth: 2,
        interval: Duration::from_secs(1),
        steps: Steps::default(),
    };
    let io = IoModel::bursts();
    let scenario = Scenario {
        trace: &trace,
        machine,
        accelerator: Some(accelerator),
        io: &io,
        order: Order::Fcfs,
        seed: 0,
        stop: None,
    };
    let (_, timeline) = simulate_with_timeline(&scenario).unwrap_or_else(|error| panic!("{error}"));
    (trace, timeline)
}

#[test]
fn each_half_stages_for_the_next_job_while_the_other_is_in_use() {
    let (_, timeline) = four_jobs();
    let phase_of = |job: u64, phase: Phase| -> &Span {
        let found = timeline.rsa.iter().find(|span| span.job == job && span.phase == phase);
        found.unwrap_or_else(|| panic!("job {job} is never {phase:?}: {:#?}", timeline.rsa))
    };
    // The phases of every job come in the order of the figure.
    for job in 1..=4 {
        let of_job: Vec<Phase> =
            timeline.rsa.iter().filter(|span| span.job == job).map(|span| span.phase).collect();
        use Phase::{Constructing, InUse, Ready, Removing, StagingIn, StagingOut};
        let expected = [Constructing, StagingIn, Ready, InUse, StagingOut, Removing];
        let without_ready: Vec<Phase> = expected.into_iter().filter(|phase| *phase != Ready).collect();
        assert!(of_job == expected || of_job == without_ready, "job {job}: {of_job:?}");
    }
    // Jobs 1 and 3 have the first half, 2 and 4 the second.
    for job in 1..=4 {
        let half = if job % 2 == 1 { (0, 1) } else { (2, 3) };
        assert_eq!(phase_of(job, Phase::InUse).nodes, [half], "job {job}");
    }
    for job in 1..4 {
        let (used, next) = (phase_of(job, Phase::InUse), phase_of(job + 1, Phase::StagingIn));
        assert!(next.from_ms < used.to_ms, "the input of job {} comes while job {job} runs", job + 1);
        // The machine goes on to the next job, and the results come home meanwhile.
        let (home, runs) = (phase_of(job, Phase::StagingOut), phase_of(job + 1, Phase::InUse));
        assert!(runs.from_ms < home.to_ms, "job {} runs while the results of job {job} come home", job + 1);
    }
}

#[test]
fn its_picture_is_the_one_that_was_looked_at() {
    let (_, timeline) = four_jobs();
    let last = timeline.rsa.iter().map(|span| span.to_ms).max().unwrap_or(0);
    let svg = gantt("Four jobs on the whole machine, and RSA nodes in two halves", &timeline, 0, last);
    let svg = svg.unwrap_or_else(|error| panic!("{error}"));
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/simulate-figure.svg");
    if std::env::var_os("ONDECK_WRITE_GOLDEN").is_some() {
        std::fs::write(golden, &svg).unwrap_or_else(|error| panic!("{error}"));
    }
    let kept = std::fs::read_to_string(golden).unwrap_or_else(|error| panic!("{golden}: {error}"));
    assert_eq!(svg, kept, "if the new picture is right, run this test with ONDECK_WRITE_GOLDEN=1");
}
