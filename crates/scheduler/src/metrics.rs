//! Figures for Prometheus: what there is, counted when somebody asks, and how long things took since the daemon began.
//!
//! [`FIGURES`] has all of them; docs/metrics.md is made from it.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use ondeck_api::CallError;
use ondeck_api::scheduler::WarningKind;
use ondeck_core::schedule::{Node, Outcome, RsaState, Work};
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::compute::ComputeNodes;
use crate::queue_snapshot::QueueSnapshot;
use crate::view::View;

/// What stands before each name.
const PREFIX: &str = "ondeck";

/// A figure, as the reference tells it, which a test makes.
#[cfg_attr(not(test), allow(dead_code))]
struct Figure {
    /// What follows [`PREFIX`] in its name.
    name: &'static str,
    kind: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Figure {
    Figure { name, kind: "gauge", labels, help }
}

const fn histogram(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Figure {
    Figure { name, kind: "histogram", labels, help }
}

const FIGURES: &[Figure] = &[
    gauge("journal_up", &[], "Whether the journal can be written; while it can't, nothing is decided"),
    gauge("jobs", &["state"], "Jobs that have asked for something, by RSA state"),
    gauge("node_up", &["node", "pool"], "Whether the agent of an RSA node answers"),
    gauge("node_drained", &["node", "pool"], "Whether an RSA node lends nothing new"),
    gauge("node_capacity_bytes", &["node", "pool"], "What an RSA node lends in all"),
    gauge("node_free_bytes", &["node", "pool"], "What of it nobody has"),
    gauge("node_failures", &["node", "pool"], "Failures of an RSA node in a row"),
    gauge("queue_jobs", &[], "Jobs in the workload manager's queue"),
    gauge("queue_seconds", &[], "How long the last look at the queue took"),
    gauge("queue_up", &[], "Whether the workload manager answers"),
    gauge(
        "places_lost",
        &[],
        "Places for jobs that wait for their input which Slurm has lost since slurmctld was started, of 128",
    ),
    gauge("compute_nodes", &["trouble"], "Compute nodes on which something is wrong, by what it is"),
    Figure {
        name: "jobs_without_prolog",
        kind: "counter",
        labels: &[],
        help: "Jobs that started without any Prolog that asked, since the scheduler began",
    },
    histogram(
        "phase_seconds",
        &["phase", "outcome"],
        "How long the phases of jobs took: done, put off, refused before anything was changed, or failed",
    ),
    histogram("hook_seconds", &["hook", "answer"], "How long Prologs and Epilogs waited for their answer"),
    histogram("command_seconds", &["command", "outcome"], "How long commands of the workload manager took"),
    histogram(
        "journal_write_seconds",
        &["outcome"],
        "How long it took to write what was decided to the journal",
    ),
    histogram("call_seconds", &["call", "outcome"], "How long agents took to answer what they were asked"),
];

type Labels = Vec<(&'static str, String)>;
type Times = Family<Labels, Histogram, fn() -> Histogram>;

/// From a millisecond to four minutes.
fn quick() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 4.0, 10))
}

/// From ten milliseconds to eleven hours.
fn slow() -> Histogram {
    Histogram::new(exponential_buckets(0.01, 4.0, 12))
}

/// What happened since the daemon began.
pub(crate) struct Metrics {
    registry: Registry,
    phases: Times,
    hooks: Times,
    commands: Times,
    journal_writes: Times,
    calls: Times,
}

impl Default for Metrics {
    fn default() -> Metrics {
        let mut registry = Registry::with_prefix(PREFIX);
        let mut times = |name: &'static str, make: fn() -> Histogram| {
            let family = Times::new_with_constructor(make);
            registry.register(name, help(name), family.clone());
            family
        };
        let phases = times("phase_seconds", slow);
        let hooks = times("hook_seconds", quick);
        let commands = times("command_seconds", quick);
        let journal_writes = times("journal_write_seconds", quick);
        let calls = times("call_seconds", quick);
        Metrics { registry, phases, hooks, commands, journal_writes, calls }
    }
}

fn help(name: &str) -> &'static str {
    FIGURES.iter().find(|figure| figure.name == name).map_or("", |figure| figure.help)
}

fn done_or_failed(done: bool) -> String {
    if done { "done" } else { "failed" }.to_owned()
}

impl Metrics {
    /// A phase of a job has ended.
    pub fn phase(&self, work: Work, outcome: &Outcome, took: Duration) {
        let outcome = match outcome {
            Outcome::Done(_) | Outcome::Pretended | Outcome::Tight(_) | Outcome::Salvaged { .. } => "done",
            Outcome::Later { .. } => "put_off",
            Outcome::Refused { .. } => "refused",
            Outcome::Failed { .. } => "failed",
        };
        let labels = vec![("phase", work.word().replace(' ', "_")), ("outcome", outcome.to_owned())];
        self.phases.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// A hook has its answer.
    pub fn hook(&self, hook: &'static str, answer: &'static str, took: Duration) {
        let labels = vec![("hook", hook.to_owned()), ("answer", answer.to_owned())];
        self.hooks.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// A command of the workload manager has ended.
    pub fn command(&self, command: &str, took: Duration, answered: bool) {
        let labels = vec![("command", command.to_owned()), ("outcome", done_or_failed(answered))];
        self.commands.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// The journal was written, or could not be.
    pub fn journal_write(&self, took: Duration, written: bool) {
        let labels = vec![("outcome", done_or_failed(written))];
        self.journal_writes.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// An agent has answered, or has not.
    pub fn call(&self, method: &str, path: &str, took: Duration, error: Option<&CallError>) {
        let outcome = match error {
            None => "done",
            Some(CallError::Refused { .. }) => "refused",
            Some(_) => "failed",
        };
        let labels = vec![("call", call_name(method, path)), ("outcome", outcome.to_owned())];
        self.calls.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// All that can be told while the journal can't be written.
    pub fn without_journal(&self) -> String {
        let mut states = Registry::with_prefix(PREFIX);
        number(&mut states, "journal_up", 0);
        self.encode(&states)
    }

    /// All figures as they are now, in the text format.
    pub fn text(&self, view: &View, snapshot: &QueueSnapshot, compute: &ComputeNodes) -> String {
        let mut states = Registry::with_prefix(PREFIX);
        number(&mut states, "journal_up", 1);
        let by_state = family(&mut states, "jobs");
        for state in RsaState::ALL {
            by_state.get_or_create(&vec![("state", state.to_string())]).set(0);
        }
        for job in view.jobs().values() {
            by_state.get_or_create(&vec![("state", job.rsa_state.to_string())]).inc();
        }
        type OfNode = fn(&Node) -> u64;
        let figures: [(&str, OfNode); 5] = [
            ("node_up", |node| u64::from(node.up)),
            ("node_drained", |node| u64::from(!node.drained.is_empty())),
            ("node_capacity_bytes", |node| node.capacity.0),
            ("node_free_bytes", |node| node.free().0),
            ("node_failures", |node| u64::from(node.failures)),
        ];
        for (name, figure) in figures {
            let nodes = family(&mut states, name);
            for (node, known) in view.nodes() {
                let labels = vec![("node", node.to_string()), ("pool", known.pool.clone())];
                nodes.get_or_create(&labels).set(i64::try_from(figure(known)).unwrap_or(i64::MAX));
            }
        }
        number(&mut states, "queue_jobs", i64::try_from(snapshot.jobs.len()).unwrap_or(i64::MAX));
        let took = Gauge::<f64, AtomicU64>::default();
        took.set(snapshot.took.as_secs_f64());
        states.register("queue_seconds", help("queue_seconds"), took);
        number(&mut states, "queue_up", i64::from(snapshot.fault.is_none()));
        number(&mut states, "places_lost", view.places_lost().places.into());
        let nodes = family(&mut states, "compute_nodes");
        let warnings = compute.warnings(view.leftover_on_compute());
        let kinds = [
            ("no_prolog", WarningKind::NoProlog),
            ("silent_agent", WarningKind::SilentAgent),
            ("left_over", WarningKind::LeftOver),
        ];
        for (trouble, kind) in kinds {
            let of_kind = warnings.iter().filter(|warning| warning.kind == kind);
            let count: usize = of_kind.map(|warning| warning.nodes.len()).sum();
            let labels = vec![("trouble", trouble.to_owned())];
            nodes.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let jobs = Counter::<u64>::default();
        jobs.inc_by(compute.jobs_without_prolog());
        states.register("jobs_without_prolog", help("jobs_without_prolog"), jobs);
        self.encode(&states)
    }

    fn encode(&self, states: &Registry) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = encode_registry(&mut text, states)
            .and_then(|()| encode_registry(&mut text, &self.registry))
            .and_then(|()| encode_eof(&mut text));
        text
    }
}

fn family(states: &mut Registry, name: &'static str) -> Family<Labels, Gauge> {
    let family = Family::<Labels, Gauge>::default();
    states.register(name, help(name), family.clone());
    family
}

fn number(states: &mut Registry, name: &'static str, value: i64) {
    let gauge = Gauge::<i64>::default();
    gauge.set(value);
    states.register(name, help(name), gauge);
}

/// What is asked of an agent, without names of RAM disks, tasks and paths.
fn call_name(method: &str, path: &str) -> String {
    let path = path.split('?').next().unwrap_or_default();
    let parts: Vec<&str> = path.split('/').skip(2).collect();
    let what = match parts.as_slice() {
        ["ramdisks", _] => "ramdisk",
        ["ramdisks", _, what, ..] | [what, ..] => what,
        [] => "",
    };
    format!("{method} {what}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fmt::Write as _;
    use std::path::Path;

    use ondeck_core::Epoch;
    use ondeck_core::schedule::{Fault, Schedule, Site, Time};

    use super::*;

    /// A daemon to which everything has happened once.
    fn everything() -> String {
        let metrics = Metrics::default();
        let took = Duration::from_millis(20);
        metrics.phase(Work::StageIn, &Outcome::Done(String::new()), took);
        let failed = Outcome::Failed { why: String::new(), blame: Vec::new(), fault: Fault::Transient };
        metrics.phase(Work::Unmount { force: true }, &failed, took);
        metrics.hook("prolog", "mounted", took);
        metrics.command("squeue", took, true);
        metrics.journal_write(took, false);
        metrics.call("POST", "/v1/ramdisks/job-1-0-0@7/tasks/fill?x=1", took, None);
        let nodes = BTreeMap::from([("r1".parse().unwrap(), Node::new("default"))]);
        let schedule = Schedule::new(Site::default(), Vec::new(), nodes, 0, Epoch(0));
        metrics.text(&View::of(&schedule), &QueueSnapshot::default(), &ComputeNodes::new(Time(0)))
    }

    #[test]
    fn every_figure_is_in_the_reference_with_its_kind_and_labels() {
        let text = everything();
        let mut told = BTreeSet::new();
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ondeck_")) {
            let (name, kind) = line.split_once(' ').unwrap();
            let figure = FIGURES.iter().find(|figure| figure.name == name).expect(name);
            assert_eq!(figure.kind, kind, "{name}");
            assert!(text.contains(&format!("# HELP ondeck_{name} {}.", figure.help)), "{name}");
            let sample = text.lines().find(|line| {
                line.strip_prefix(&format!("ondeck_{name}"))
                    .is_some_and(|rest| !rest.starts_with(char::is_alphabetic))
            });
            for label in figure.labels {
                assert!(sample.unwrap().contains(&format!("{label}=\"")), "{sample:?} has no {label}");
            }
            told.insert(name.to_owned());
        }
        assert_eq!(told, FIGURES.iter().map(|figure| figure.name.to_owned()).collect());
    }

    #[test]
    fn figures_have_the_values_of_what_happened() {
        let text = everything();
        for line in [
            "ondeck_journal_up 1",
            "ondeck_jobs{state=\"HELD\"} 0",
            "ondeck_node_up{node=\"r1\",pool=\"default\"} 0",
            "ondeck_queue_up 1",
            "ondeck_compute_nodes{trouble=\"no_prolog\"} 0",
            "ondeck_jobs_without_prolog_total 0",
            "ondeck_phase_seconds_count{phase=\"stage_in\",outcome=\"done\"} 1",
            "ondeck_phase_seconds_sum{phase=\"unmount\",outcome=\"failed\"} 0.02",
            "ondeck_hook_seconds_bucket{le=\"0.064\",hook=\"prolog\",answer=\"mounted\"} 1",
            "ondeck_command_seconds_count{command=\"squeue\",outcome=\"done\"} 1",
            "ondeck_journal_write_seconds_count{outcome=\"failed\"} 1",
            "ondeck_call_seconds_count{call=\"POST tasks\",outcome=\"done\"} 1",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "no `{line}` in\n{text}");
        }
        assert!(Metrics::default().without_journal().contains("\nondeck_journal_up 0\n"));
    }

    #[test]
    fn a_call_is_told_without_names() {
        for (method, path, told) in [
            ("GET", "/v1/node", "GET node"),
            ("GET", "/v1/ramdisks", "GET ramdisks"),
            ("DELETE", "/v1/ramdisks/fast@7", "DELETE ramdisk"),
            ("POST", "/v1/ramdisks/fast@7/steps", "POST steps"),
            ("DELETE", "/v1/ramdisks/fast@7/tasks?beginning=a", "DELETE tasks"),
            ("POST", "/v1/authority", "POST authority"),
        ] {
            assert_eq!(call_name(method, path), told);
        }
    }

    /// `ONDECK_WRITE_DOCS=1 cargo test -p ondeck-scheduler --lib metrics` writes it anew.
    #[test]
    fn the_reference_in_the_documents_is_this_one() {
        let mut page = String::from(
            "# Metrics\n\nWhat `ondeck status --metrics` tells, in the text format of OpenMetrics, which Prometheus reads. \
             Gauges are counted when\nthey are asked for; counters and histograms begin with the daemon, and have samples \
             once something has happened. Made from\n`crates/scheduler/src/metrics.rs`.\n\n\
             | figure | kind | labels | what it tells |\n|---|---|---|---|\n",
        );
        for Figure { name, kind, labels, help } in FIGURES {
            let total = if *kind == "counter" { "_total" } else { "" };
            let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
            writeln!(page, "| `ondeck_{name}{total}` | {kind} | {} | {help} |", labels.join(", ")).unwrap();
        }
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
        if std::env::var_os("ONDECK_WRITE_DOCS").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap_or_default(), page, "{}", path.display());
    }
}
