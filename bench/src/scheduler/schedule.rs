//! `ondeck-bench schedule`: how long it takes to decide, and what the daemon takes beside a large queue.

use anyhow::Result;

use crate::interrupt;
use crate::page::{Table, paragraph};
use crate::scheduler::{Options, Part, daemon, pass};

/// Of one pass.
const PASS_MS: f64 = 50.0;

pub fn run(options: &Options) -> Result<()> {
    interrupt::install()?;
    let mut part = Part::new("schedule", "A pass of the scheduler, and the daemon beside a large queue");
    part.introduction = format!(
        "{} pending jobs and {} RSA nodes. The first round of each is dropped.",
        pass::PENDING,
        pass::NODES
    );
    passes(options, &mut part)?;
    daemon::measure(options, &mut part)?;
    part.publish(options)
}

fn passes(options: &Options, part: &mut Part) -> Result<()> {
    let rounds = options.rounds(20, 200);
    let mut table =
        Table::new(&["of the goal", "one look at the queue", "median ms", "p99", "worst", "jobs changed"]);
    for case in pass::Case::ALL {
        eprintln!("a pass: {}", case.title());
        let times = pass::measure(case, rounds)?;
        let p99 = times.p99();
        part.goal(
            &format!("a pass in less than {PASS_MS} ms"),
            &case.title(),
            format!("{:.1} ms in the median, p99 {p99:.1}", times.median()),
            p99 < PASS_MS,
        );
        table.add([
            format!("{:.2}", p99 / PASS_MS),
            times.case.title(),
            format!("{:.2}", times.median()),
            format!("{p99:.2}"),
            format!("{:.2}", times.worst()),
            times.changed.to_string(),
        ]);
    }
    paragraph(
        &mut part.text,
        &format!(
            "**A pass**: `Schedule::handle(Event::Queue)` of the pure core, {rounds} times from the same state; what \
             follows is neither written nor done here. Every job that runs has results that are not on disk yet, and \
             every job has directories of its own."
        ),
    );
    table.write(&mut part.text);
    Ok(())
}
