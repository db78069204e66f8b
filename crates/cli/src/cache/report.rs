//! What `ondeck cache status` shows.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ondeck_cachefs::instance::Record;
use ondeck_cachefs::instance::control::Report;
use ondeck_cachefs::settings::{SyncWhen, Writes};
use ondeck_cachefs::status::{Conflict, ConflictKind, Status, UNFINISHED};
use ondeck_core::text::plain;
use ondeck_core::{Bytes, duration};
use serde::Serialize;

use crate::display;

/// A cache that was found.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Found {
    /// Its server has answered.
    Serving {
        #[serde(flatten)]
        report: Box<Report>,
        /// Never.
        dead: bool,
    },
    /// It has not.
    Unanswered {
        mount_point: String,
        /// This and what follows are not known if its record can't be read.
        backing: Option<String>,
        user: Option<String>,
        run: Option<String>,
        /// Its process, if it lives.
        server: Option<u32>,
        /// Whether that is gone.
        dead: bool,
    },
}

impl Found {
    /// One whose server is dead, or says nothing.
    pub fn without_report(at: &Path, record: Option<Record>, server: Option<u32>, dead: bool) -> Found {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let (backing, user, run) = match record {
            Some(record) => {
                let user = record.user.map_or_else(|| "root".to_owned(), |user| user.name);
                (Some(text(&record.backing)), Some(user), record.run)
            }
            None => (None, None, None),
        };
        Found::Unanswered { mount_point: text(at), backing, user, run, server, dead }
    }

    /// What its server has said.
    pub fn report(&self) -> Option<&Report> {
        match self {
            Found::Serving { report, .. } => Some(report),
            Found::Unanswered { .. } => None,
        }
    }

    fn mount_point(&self) -> PathBuf {
        match self {
            Found::Serving { report, .. } => report.mount_point.clone(),
            Found::Unanswered { mount_point, .. } => PathBuf::from(mount_point),
        }
    }
}

/// A cache for people.
pub fn text(report: &Report) -> String {
    let Report { status, settings, .. } = report;
    let mut out = String::new();
    let mut line = |what: &str, text: String| {
        // Writing to a string can't fail.
        let _ = writeln!(out, "  {what:<12} {text}");
    };
    let state = if report.mounted { "" } else { ", unmounted: what is left goes to disk" };
    let whose = match &report.run {
        Some(run) => format!("run {run} alone"),
        None if report.others => "everybody's".to_owned(),
        None => report.user.clone(),
    };
    line("backing", display::name(report.backing.as_os_str()));
    line("user", format!("{whose}; server: process {}{state}", report.server));
    let full = percent(status.resident, status.capacity);
    line("holds", format!("{} of {} ({full} %)", Bytes(status.resident), Bytes(status.capacity)));
    line("dirty", dirty(status));
    line("hits", hits(status));
    let forgotten = status.forgotten;
    line("names", format!("{}, {} of memory; {forgotten} forgotten", status.names, Bytes(status.name_bytes)));
    line(
        "open",
        format!(
            "{}; {} read by the kernel itself",
            display::count(status.open_files, "file"),
            Bytes(status.pinned)
        ),
    );
    if status.delayed + status.waiting > 0 {
        line(
            "waiting",
            format!(
                "{} for room, {} for the backing directory",
                display::count(status.delayed, "request"),
                status.waiting
            ),
        );
    }
    line(
        "so far",
        format!(
            "{} fetched, {} written back, {} evictions, {} requests delayed",
            Bytes(status.fetched_bytes),
            Bytes(status.written_back_bytes),
            status.evictions,
            status.delayed_total
        ),
    );
    let sync = match settings.sync {
        SyncWhen::Later => format!("after {}", duration::limit(settings.age)),
        SyncWhen::Close => "at close and fsync".to_owned(),
        SyncWhen::Fsync => format!("at fsync, else after {}", duration::limit(settings.age)),
    };
    let passthrough = if settings.passthrough { "by the kernel" } else { "by the server" };
    let is_unasked = settings.passthrough && settings.writes == Writes::Passthrough;
    let passthrough = if is_unasked { "and written by the kernel" } else { passthrough };
    line("settings", format!("written back {sync}; resident files are read {passthrough}"));
    if let Some(hangs) = hanging(status) {
        line("HANGING", hangs);
    }
    for failing in &status.failing {
        line(
            "FAILING",
            format!("{}: {}", plain(&failing.path, usize::MAX), plain(&failing.error, usize::MAX)),
        );
    }
    let others = status.all_failing() - status.failing.len() as u64;
    if others > 0 {
        line("FAILING", format!("and {}", display::count(others, "other")));
    }
    for conflict in &status.conflicts {
        line("CONFLICT", told(conflict));
    }
    format!("{}\n{out}", display::name(report.mount_point.as_os_str()))
}

/// What happened to something that others have changed, too.
pub fn told(conflict: &Conflict) -> String {
    let path = plain(&conflict.path, usize::MAX);
    let ours = plain(conflict.ours.as_deref().unwrap_or_default(), usize::MAX);
    match conflict.kind {
        ConflictKind::Both => format!("{path} was changed by others: ours is {ours}"),
        ConflictKind::Removed => format!("{path} was removed by others: ours is {ours}"),
        ConflictKind::NotRemoved => format!("{path} was changed by others: it was to be removed, and stays"),
        ConflictKind::Unfinished => {
            format!("{path} was to be removed, and stays: a cache that has died has left {UNFINISHED}* in it")
        }
        ConflictKind::Gone => {
            format!(
                "{path} was moved here, and others had removed or replaced it: it is not on the backing directory"
            )
        }
        ConflictKind::Attributes => {
            format!("{path} was changed by others: attributes that were changed here are not taken over")
        }
    }
}

fn dirty(status: &Status) -> String {
    let changes = status.pending_operations + status.dirty_attributes;
    if status.dirty + changes == 0 {
        return "nothing: everything is on the backing directory".to_owned();
    }
    let age = duration::display(Duration::from_millis(status.dirty_age_ms));
    format!("{} and {}, the oldest {age} old", Bytes(status.dirty), display::count(changes, "change"))
}

fn hits(status: &Status) -> String {
    match status.hit_bytes + status.miss_bytes {
        0 => "nothing was read".to_owned(),
        all => format!("{} % of {} read", percent(status.hit_bytes, all), Bytes(all)),
    }
}

/// Rounded down, so that 100 % is all.
fn percent(part: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(part) * 100 / u128::from(whole.max(1))).unwrap_or(u64::MAX)
}

/// One figure, as Prometheus knows it.
struct Metric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&Status) -> f64,
}

const METRICS: &[Metric] = &[
    gauge("capacity_bytes", "Bytes that the cache may hold.", |s| s.capacity as f64),
    gauge("resident_bytes", "Bytes that it holds.", |s| s.resident as f64),
    gauge("dirty_bytes", "Bytes that the backing directory lacks.", |s| s.dirty as f64),
    gauge("dirty_age_seconds", "Age of the oldest change that the backing directory lacks.", |s| {
        s.dirty_age_ms as f64 / 1000.0
    }),
    gauge("pending_operations", "Changes of names that the backing directory lacks.", |s| {
        s.pending_operations as f64
    }),
    gauge("dirty_attributes", "Files whose attributes the backing directory lacks.", |s| {
        s.dirty_attributes as f64
    }),
    gauge("pinned_bytes", "Bytes of files that the kernel reads by itself.", |s| s.pinned as f64),
    gauge("names", "Files and directories that are known.", |s| s.names as f64),
    gauge("name_bytes", "Memory for them.", |s| s.name_bytes as f64),
    gauge("most_name_bytes", "Memory for them beyond which those that nobody uses are forgotten.", |s| {
        s.most_name_bytes as f64
    }),
    gauge("open_files", "Open files.", |s| s.open_files as f64),
    gauge("delayed_requests", "Requests that wait for room.", |s| s.delayed as f64),
    gauge("waiting_requests", "Requests that wait for the backing directory.", |s| s.waiting as f64),
    gauge(
        "under_way_seconds",
        "How long the oldest write-back of one file that is under way has lasted.",
        |s| s.under_way_ms as f64 / 1000.0,
    ),
    gauge("failing", "Files that can't be written back, and are tried again.", |s| s.all_failing() as f64),
    gauge("conflicts", "Names that others changed while they were dirty here.", |s| s.conflicts.len() as f64),
    counter("read_bytes_total", "Bytes read from the store through the server.", |s| s.read_bytes as f64),
    counter("written_bytes_total", "Bytes written to the store.", |s| s.written_bytes as f64),
    counter("hit_bytes_total", "Bytes of reads that were resident.", |s| s.hit_bytes as f64),
    counter("miss_bytes_total", "Bytes of reads that were not.", |s| s.miss_bytes as f64),
    counter("fetched_bytes_total", "Bytes copied from the backing directory.", |s| s.fetched_bytes as f64),
    counter("written_back_bytes_total", "Bytes written to the backing directory.", |s| {
        s.written_back_bytes as f64
    }),
    counter("evictions_total", "Extents evicted.", |s| s.evictions as f64),
    counter("forgotten_names_total", "Files and directories forgotten.", |s| s.forgotten as f64),
    counter("delayed_requests_total", "Requests that had to wait for room.", |s| s.delayed_total as f64),
    counter("failures_total", "Operations on the backing directory that failed.", |s| s.failures as f64),
];

const fn gauge(name: &'static str, help: &'static str, value: fn(&Status) -> f64) -> Metric {
    Metric { name, kind: "gauge", help, value }
}

const fn counter(name: &'static str, help: &'static str, value: fn(&Status) -> f64) -> Metric {
    Metric { name, kind: "counter", help, value }
}

/// All caches for Prometheus, in its text form.
pub fn metrics(found: &[Found]) -> String {
    let mut out = String::new();
    // Writing to a string can't fail.
    let _ = writeln!(out, "# HELP ondeck_cache_up Whether its server answers.\n# TYPE ondeck_cache_up gauge");
    for cache in found {
        let at = label(&cache.mount_point().to_string_lossy());
        let up = u8::from(cache.report().is_some());
        let _ = writeln!(out, "ondeck_cache_up{{mount_point=\"{at}\"}} {up}");
    }
    for Metric { name, kind, help, value } in METRICS {
        let _ = writeln!(out, "# HELP ondeck_cache_{name} {help}\n# TYPE ondeck_cache_{name} {kind}");
        for report in found.iter().filter_map(Found::report) {
            let at = label(&report.mount_point.to_string_lossy());
            let _ = writeln!(out, "ondeck_cache_{name}{{mount_point=\"{at}\"}} {}", value(&report.status));
        }
    }
    out
}

/// A write-back that lasts longer than any should.
const HANGS: Duration = Duration::from_secs(10);

/// What the backing directory does not take, nor refuse, if there is anything.
pub fn hanging(status: &Status) -> Option<String> {
    let lasts = Duration::from_millis(status.under_way_ms);
    let path = plain(&status.under_way, usize::MAX);
    (lasts >= HANGS).then(|| {
        format!(
            "{path} has been on its way for {} s: the backing directory hangs, or is slow",
            lasts.as_secs()
        )
    })
}

fn label(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| plain(line, usize::MAX)).collect();
    lines.join("\n").replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ondeck_cachefs::settings::Settings;
    use ondeck_cachefs::status::{Conflict, Failing};

    fn conflict(path: &str, ours: Option<&str>, kind: ConflictKind) -> Conflict {
        Conflict { path: path.to_owned(), ours: ours.map(str::to_owned), kind }
    }

    fn report() -> Report {
        let status = Status {
            capacity: 8 << 30,
            resident: 4 << 30,
            dirty: 1 << 20,
            dirty_age_ms: 12_000,
            under_way_ms: 35_000,
            under_way: "g".into(),
            pending_operations: 1,
            hit_bytes: 3,
            miss_bytes: 1,
            failing: vec![Failing { path: "a/b".into(), error: "No space left on device".into() }],
            failing_count: 16_001,
            conflicts: vec![
                conflict("c", Some("c.ondeck"), ConflictKind::Both),
                conflict("d", Some("d"), ConflictKind::Removed),
                conflict("e\u{1b}[2J\n", None, ConflictKind::NotRemoved),
                conflict("h", None, ConflictKind::Unfinished),
                conflict("f", None, ConflictKind::Attributes),
            ],
            ..Status::default()
        };
        Report {
            mount_point: "/mnt/a\"b".into(),
            backing: "/shared".into(),
            user: "alice".into(),
            others: false,
            run: None,
            server: 42,
            mounted: true,
            settings: Settings::new(Bytes(8 << 30)),
            status,
        }
    }

    #[test]
    fn what_hinders_write_back_is_told() {
        let text = text(&report());
        for part in [
            "4 GiB of 8 GiB (50 %)",
            "1 MiB and 1 change, the oldest 12.0 s old",
            "75 % of 4 B",
            "a/b: No space left",
            "and 16000 others\n",
            "g has been on its way for 35 s: the backing directory hangs, or is slow",
            "c was changed by others: ours is c.ondeck",
            "d was removed by others: ours is d\n",
            "h was to be removed, and stays: a cache that has died has left .ondeck-cache-* in it",
            "e?[2J  was changed by others: it was to be removed, and stays",
            "f was changed by others: attributes that were changed here are not taken over",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn metrics_have_a_kind_and_escaped_labels() {
        let text = metrics(&[Found::Serving { report: Box::new(report()), dead: false }]);
        assert!(text.contains("# TYPE ondeck_cache_dirty_bytes gauge\n"));
        assert!(text.contains("ondeck_cache_dirty_bytes{mount_point=\"/mnt/a\\\"b\"} 1048576\n"));
        assert!(text.contains("ondeck_cache_evictions_total{mount_point=\"/mnt/a\\\"b\"} 0\n"));
    }
}
