//! Figures for Prometheus, in its text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ondeck_api::scheduler::WarningKind;
use ondeck_core::schedule::{RsaState, Schedule};

use crate::compute::ComputeNodes;
use crate::queue::Sight;

/// Whether the journal can be written. While it can't be, this is the only figure.
pub(crate) fn journal(up: bool) -> String {
    const NAME: &str = "ondeck_journal_up";
    let up = u8::from(up);
    format!("# HELP {NAME} Whether the journal can be written\n# TYPE {NAME} gauge\n{NAME} {up}\n")
}

/// All figures.
pub(crate) fn text(schedule: &Schedule, sight: &Sight, compute: &ComputeNodes) -> String {
    let mut out = journal(true);
    let mut head = |name: &str, help: &str| {
        // Writing to a String does not fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
        name.to_owned()
    };
    let jobs = head("ondeck_jobs", "Jobs that have asked for something, by RSA state");
    let mut by_state: BTreeMap<RsaState, u64> = RsaState::ALL.iter().map(|state| (*state, 0)).collect();
    for job in schedule.jobs().values() {
        *by_state.entry(job.rsa_state).or_default() += 1;
    }
    for (state, count) in by_state {
        let _ = writeln!(out, "{jobs}{{state=\"{state}\"}} {count}");
    }
    type Figure = fn(&ondeck_core::schedule::Node) -> u64;
    let figures: [(&str, &str, Figure); 5] = [
        ("ondeck_node_up", "Whether the agent of an RSA node answers", |node| u64::from(node.up)),
        ("ondeck_node_drained", "Whether an RSA node lends nothing new", |node| {
            u64::from(!node.drained.is_empty())
        }),
        ("ondeck_node_capacity_bytes", "What an RSA node lends in all", |node| node.capacity.0),
        ("ondeck_node_free_bytes", "What of it nobody has", |node| node.free().0),
        ("ondeck_node_failures", "Failures in a row", |node| u64::from(node.failures)),
    ];
    for (name, help, figure) in figures {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (node, known) in schedule.nodes() {
            let _ = writeln!(out, "{name}{{node=\"{node}\",pool=\"{}\"}} {}", known.pool, figure(known));
        }
    }
    let plain = [
        ("ondeck_queue_jobs", "Jobs in the workload manager's queue", sight.jobs.len() as f64),
        ("ondeck_queue_seconds", "How long the last look at the queue took", sight.took.as_secs_f64()),
        (
            "ondeck_queue_up",
            "Whether the workload manager answers",
            f64::from(u8::from(sight.fault.is_none())),
        ),
    ];
    for (name, help, value) in plain {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
    }
    let name = "ondeck_compute_nodes";
    let _ = writeln!(
        out,
        "# HELP {name} Compute nodes on which something is wrong, by what it is\n# TYPE {name} gauge"
    );
    let warnings = compute.warnings(schedule.strays());
    let kinds = [
        ("no_prolog", WarningKind::NoProlog),
        ("silent_agent", WarningKind::SilentAgent),
        ("left_over", WarningKind::LeftOver),
    ];
    for (word, kind) in kinds {
        let nodes: usize =
            warnings.iter().filter(|warning| warning.kind == kind).map(|warning| warning.nodes.len()).sum();
        let _ = writeln!(out, "{name}{{trouble=\"{word}\"}} {nodes}");
    }
    let (name, jobs) = ("ondeck_jobs_without_prolog_total", compute.jobs_without_prolog());
    let help = "Jobs that started without any Prolog that asked, since the scheduler began";
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {jobs}");
    out
}
