//! `ondeck status`: the thesis's rsa-status, and more.

use std::fmt::Write as _;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::Args;
use ondeck_api::scheduler::{JobStatus, Status, Transfer, Usage};
use ondeck_core::timeline::Timeline;
use ondeck_core::{Bytes, NodeName, exit};
use ondeck_sim::picture::gantt;

use super::{Scheduler, end, load, shown};

/// Show what is done for each job, and the RSA nodes
///
/// Users see their own jobs, administrators all.
#[derive(Args)]
pub struct StatusArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Show it again every so many seconds
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    watch: Option<u64>,

    /// Show instead what each user and account had of the RSA in the last so many days
    #[arg(long, value_name = "DAYS", num_args = 0..=1, default_missing_value = "30", conflicts_with = "watch")]
    usage: Option<u64>,

    /// Print figures for Prometheus, as its textfile collector reads them
    #[arg(long, conflicts_with_all = ["watch", "usage", "json"])]
    metrics: bool,

    /// Draw who had which nodes in the last hours, as a picture (SVG) or, if FILE ends with .json, as JSON; `-` is standard output, for
    /// JSON
    #[arg(long, value_name = "FILE", conflicts_with_all = ["watch", "usage", "metrics", "json"])]
    timeline: Option<PathBuf>,

    /// How many hours of it
    #[arg(long, value_name = "HOURS", default_value = "24", requires = "timeline")]
    hours: NonZeroU64,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn status(args: &StatusArgs) -> ExitCode {
    end("status", try_status(args))
}

fn try_status(args: &StatusArgs) -> Result<u8> {
    let scheduler = Scheduler::find(&load(args.config.as_deref())?)?;
    if args.metrics {
        print!("{}", scheduler.ask_text("metrics")?);
        return Ok(exit::OK);
    }
    if let Some(file) = &args.timeline {
        let timeline: Timeline =
            scheduler.ask("GET", &format!("timeline?hours={}", args.hours), None::<&()>, None)?;
        return keep_timeline(&timeline, file, args.hours).map(|()| exit::OK);
    }
    if let Some(days) = args.usage {
        let usage: Vec<Usage> = scheduler.ask("GET", &format!("usage?days={days}"), None::<&()>, None)?;
        if args.json {
            println!("{}", serde_json::to_string_pretty(&usage)?);
        } else {
            print!("{}", used(&usage));
        }
        return Ok(exit::OK);
    }
    loop {
        let status: Status = scheduler.ask("GET", "jobs", None::<&()>, None)?;
        let text = if args.json {
            serde_json::to_string_pretty(&status)? + "\n"
        } else {
            jobs(&status) + "\n" + &nodes(&status) + &filesystems(&status)
        };
        let Some(seconds) = args.watch else {
            print!("{text}");
            return Ok(exit::OK);
        };
        // Home, and clear what was there.
        print!("\x1b[H\x1b[2J{text}");
        use std::io::Write as _;
        std::io::stdout().flush()?;
        std::thread::sleep(Duration::from_secs(seconds.max(1)));
    }
}

/// Writes what is to be seen of the last hours.
fn keep_timeline(timeline: &Timeline, file: &Path, hours: NonZeroU64) -> Result<()> {
    let is_stdout = file == Path::new("-");
    let text = if is_stdout || file.extension().is_some_and(|extension| extension == "json") {
        serde_json::to_string_pretty(timeline)? + "\n"
    } else {
        let begin = UNIX_EPOCH + Duration::from_millis(timeline.begin_ms);
        let title = format!("Jobs and their nodes in {hours} h from {}", httpdate::fmt_http_date(begin));
        gantt(&title, timeline, 0, timeline.end_ms)
            .context("there is no picture of so much; take fewer --hours, or JSON")?
    };
    if is_stdout {
        print!("{text}");
        return Ok(());
    }
    std::fs::write(file, text).with_context(|| format!("can't write {}", file.display()))?;
    if timeline.compute.is_empty() && timeline.rsa.is_empty() {
        eprintln!("ondeck status: no job that you may see had nodes in the last {hours} h");
    }
    Ok(())
}

/// One line a user and account.
fn used(usage: &[Usage]) -> String {
    let mut out = format!("{:>10} {:<20} {:>14} {:>12}\n", "USER", "ACCOUNT", "NODE_HOURS", "ALLOCATIONS");
    for used in usage {
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "{:>10} {:<20} {:>14.3} {:>12}",
            used.uid,
            shown(&used.account),
            used.node_seconds / 3600.0,
            used.allocations
        );
    }
    out
}

/// So many lost places are no matter for `ondeck doctor` alone: half of those that Slurm has.
const MANY_PLACES: u32 = 64;

/// That Slurm has lost places for jobs with burst buffers, and what to do.
pub fn places_lost(places: u32) -> String {
    format!(
        "slurmctld has lost {places} of its 128 places for jobs whose burst buffers are being filled, one with each job that was \
         cancelled meanwhile; with all of them it would start no such job any more: start it anew when that suits you"
    )
}

/// One line a job.
pub fn jobs(status: &Status) -> String {
    let mut out = String::new();
    // Writing to a String does not fail.
    if status.simulated {
        let _ = writeln!(out, "simulated: nothing is lent");
    }
    if let Some(fault) = &status.workload_manager {
        let _ = writeln!(out, "! {}", shown(fault));
    }
    if let Some(fault) = &status.journal {
        let _ = writeln!(
            out,
            "! the scheduler's journal can't be written ({}): nothing is decided, and nothing of jobs is told, until it can be",
            shown(fault)
        );
        return out;
    }
    for warning in &status.warnings {
        let _ = writeln!(out, "! {}", shown(&warning.text));
    }
    if status.places_lost >= MANY_PLACES {
        let _ = writeln!(out, "! {}", places_lost(status.places_lost));
    }
    if let Some(fault) = &status.site_file {
        let _ = writeln!(out, "! the site's file, of which counts what it said before: {}", shown(fault));
    }
    let _ = writeln!(
        out,
        "{:>9} {:>10} {:>20} {:>9}  {:<20} MESSAGE",
        "JOB", "JOB_STATE", "RSA_STATE", "TIME", "RSA_NODES"
    );
    for job in &status.jobs {
        // As it is called in the queue, unless that may be another one.
        let is_newest =
            |other: &JobStatus| other.id.job != job.id.job || other.id.submitted <= job.id.submitted;
        let name = if status.jobs.iter().all(is_newest) { job.id.to_string() } else { job.id.key() };
        let nodes = list(&job.rsa_nodes);
        let transfer = job.transfer.as_ref().map(transfer).unwrap_or_default();
        let message = if transfer.is_empty() { shown(&job.message) } else { transfer };
        let _ = writeln!(
            out,
            "{:>9} {:>10} {:>20} {:>9}  {:<20} {message}",
            name,
            job.job_state,
            job.rsa_state,
            time(job.seconds),
            nodes
        );
    }
    if status.jobs.is_empty() {
        out.push_str("no jobs with #RSA_ lines are waiting, running or staging\n");
    }
    out
}

/// One line a node.
pub fn nodes(status: &Status) -> String {
    let mut out = String::new();
    if status.journal.is_some() {
        return out;
    }
    let width = status.nodes.iter().map(|node| node.node.as_str().len()).max().unwrap_or(4).max(8);
    let _ = writeln!(
        out,
        "{:<width$} {:<10} {:<9} {:>10} {:>10}  JOBS",
        "RSA_NODE", "POOL", "STATE", "CAPACITY", "FREE"
    );
    for node in &status.nodes {
        let jobs: Vec<String> = node.jobs.iter().map(ToString::to_string).collect();
        let why = if node.why.is_empty() { String::new() } else { format!("  ({})", shown(&node.why)) };
        let _ = writeln!(
            out,
            "{:<width$} {:<10} {:<9} {:>10} {:>10}  {}{why}",
            node.node,
            node.pool,
            node.state,
            node.capacity.to_string(),
            node.free.to_string(),
            jobs.join(",")
        );
    }
    out
}

/// One line a filesystem whose load is read.
pub fn filesystems(status: &Status) -> String {
    let mut out = String::new();
    for filesystem in &status.filesystems {
        let load = match filesystem.load {
            Some(load) => format!("load {:.0} %", load * 100.0),
            None => "load not known".to_owned(),
        };
        let _ = write!(out, "{}: {load}", shown(&filesystem.path.to_string_lossy()));
        if filesystem.staging_slow {
            out.push_str(", staging goes slower");
        }
        if filesystem.jobs_wait {
            out.push_str(", I/O-heavy jobs wait");
        }
        if !filesystem.fault.is_empty() {
            let _ = write!(out, " (can't be read: {})", shown(&filesystem.fault));
        }
        out.push('\n');
    }
    if out.is_empty() { out } else { format!("\n{out}") }
}

/// A transfer in a few words; none while nothing has been counted, so that what is known of the job is shown.
pub fn transfer(transfer: &Transfer) -> String {
    if transfer.bytes == 0 && transfer.entries == 0 {
        return String::new();
    }
    let percent = (transfer.bytes_done * 100).checked_div(transfer.bytes).unwrap_or(0);
    let mut text = format!(
        "{} of {} ({percent} %), {} of {} files, {}/s",
        Bytes(transfer.bytes_done),
        Bytes(transfer.bytes),
        transfer.entries_done,
        transfer.entries,
        Bytes(transfer.rate as u64)
    );
    if let Some(left) = transfer.seconds_left {
        let _ = write!(text, ", {} left", time(left));
    }
    text
}

/// `7s`, `2m05s`, `3h07m`.
pub fn time(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0 if seconds > 0.0 => format!("{seconds:.1}s"),
        0..60 => format!("{whole}s"),
        60..3600 => format!("{}m{:02}s", whole / 60, whole % 60),
        _ => format!("{}h{:02}m", whole / 3600, whole / 60 % 60),
    }
}

fn list(nodes: &[NodeName]) -> String {
    const SHOWN: usize = 3;
    let names: Vec<&str> = nodes.iter().take(SHOWN).map(NodeName::as_str).collect();
    let more = nodes.len().saturating_sub(SHOWN);
    if more > 0 { format!("{},+{more}", names.join(",")) } else { names.join(",") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_has_counted_nothing_hides_no_message() {
        let mut counted =
            Transfer { bytes_done: 0, bytes: 0, entries_done: 0, entries: 0, rate: 0.0, seconds_left: None };
        assert_eq!(transfer(&counted), "");
        (counted.bytes, counted.bytes_done, counted.entries) = (2 << 20, 1 << 20, 4);
        assert_eq!(transfer(&counted), "1 MiB of 2 MiB (50 %), 0 of 4 files, 0 B/s");
    }

    #[test]
    fn no_text_of_a_job_or_a_node_moves_the_cursor() {
        let status = serde_json::json!({
            "jobs": [{
                "id": "7", "owner": {"uid": 1, "gid": 1}, "job_state": "ONDECK", "rsa_state": "HELD", "seconds": 1.0,
                "rsa_nodes": [], "transfer": null, "message": "no\u{1b}[2J\nroom\u{9b}1m"
            }],
            "nodes": [{
                "node": "r1", "pool": "default", "state": "up", "why": "\u{7}by\rhand", "capacity": 1, "free": 1,
                "jobs": []
            }],
            "workload_manager": "down\u{1b}c", "simulated": false
        });
        let status: Status = serde_json::from_value(status).unwrap();
        let text = jobs(&status) + &nodes(&status);
        assert!(
            text.contains("no?[2J room?1m") && text.contains("?by hand") && text.contains("down?c"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 5, "{text}");
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }
}
