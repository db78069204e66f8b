//! Compares the starts of all jobs of logs in SWF, without I/O and without an accelerator, with those of a simple EASY: `make study`
//! runs it on real logs. Exits with 1 if any job starts at another time.

#[path = "../tests/simple_easy/mod.rs"]
mod simple_easy;

use std::fs::File;
use std::process::ExitCode;

use ondeck_core::{Bytes, Rate};
use ondeck_sim::io::IoModel;
use ondeck_sim::machine::Machine;
use ondeck_sim::remedy::{Estimates, rescale};
use ondeck_sim::simulation::{Scenario, simulate};
use ondeck_sim::trace::{plain_or_gzip, swf};
use ondeck_sim::workload_manager::Order;

fn compare(path: &str, load: f64) -> Result<bool, Box<dyn std::error::Error>> {
    let mut trace = swf::read(plain_or_gzip(File::open(path)?)?, 1)?;
    let nodes = trace.machine();
    rescale(&mut trace, nodes, load);
    Estimates::Modal.fill_in(&mut trace, 1);
    let rate = Rate(Bytes(1_000_000_000));
    let machine = Machine { nodes, link: rate, disk: rate, background: 0.0 };
    let io = IoModel::None;
    let scenario = Scenario {
        trace: &trace,
        machine,
        accelerator: None,
        io: &io,
        order: Order::Fcfs,
        seed: 1,
        stop: None,
    };
    let record = simulate(&scenario)?;
    let simple = simple_easy::simple_easy(&trace, nodes);
    let other =
        record.jobs.iter().zip(&simple).filter(|(job, start)| job.started_ms != **start * 1000).count();
    println!(
        "{path} at a load of {load}: {} jobs, {other} start at another time than by a simple EASY",
        simple.len()
    );
    Ok(other == 0)
}

fn main() -> ExitCode {
    let mut all_same = true;
    for path in std::env::args().skip(1) {
        for load in [0.6, 0.9] {
            match compare(&path, load) {
                Ok(same) => all_same &= same,
                Err(error) => {
                    eprintln!("{path}: {error}");
                    all_same = false;
                }
            }
        }
    }
    if all_same { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
