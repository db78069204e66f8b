//! The jobs of `ondeck serve`, by its journal, and what they read and wrote.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use ondeck_core::{Bytes, Rate};
use ondeck_scheduler::store::{PastJob, Reader, Workload};
use ondeck_sim::io::{IoModel, Measured};
use ondeck_sim::trace::{LeftOut, Trace, TraceJob};

/// Reads the journal in a directory.
///
/// # Errors
/// It is not there, not whole, or of a later version.
pub fn read(directory: &Path) -> Result<Workload> {
    let workload = Reader::open(directory).and_then(|reader| reader.workload());
    // Its words have those of its cause in them.
    let workload = workload.map_err(|error| anyhow::Error::msg(error.to_string()));
    workload.with_context(|| format!("as the journal of `ondeck serve`, {}", directory.display()))
}

/// The jobs as a log. When they might have run, it does not say.
pub fn trace(workload: &Workload) -> Trace {
    let jobs: Vec<TraceJob> = workload.jobs.iter().filter_map(job).collect();
    let left_out = LeftOut {
        never_ran: (workload.jobs.len() - jobs.len()) as u64,
        unfinished: workload.unfinished,
        ..LeftOut::default()
    };
    Trace::of(jobs, left_out)
}

fn job(past: &PastJob) -> Option<TraceJob> {
    let (began, ended) = past.ran?;
    Some(TraceJob {
        number: past.id.job.0.into(),
        submitted: past.id.submitted,
        // To the nearest second: logs have no parts of them.
        run: ((ended.since(began).as_millis() as u64 + 500) / 1000).max(1),
        nodes: past.nodes.max(1),
        requested: None,
        user: Some(past.uid),
    })
}

/// Whether it is known of any job what it read or wrote: a daemon that only simulates copies nothing.
pub fn has_io(workload: &Workload) -> bool {
    workload.jobs.iter().any(|job| job.staged_in.is_some() || job.staged_out.is_some())
}

/// What the jobs read and wrote. A job that was requeued has several lives of one number: each counts with the
/// most that one of them had.
pub fn io(workload: &Workload, link: Rate) -> IoModel {
    let mut jobs: BTreeMap<u64, Measured> = BTreeMap::new();
    for past in &workload.jobs {
        if past.staged_in.is_none() && past.staged_out.is_none() {
            continue;
        }
        let known = jobs.entry(past.id.job.0.into()).or_default();
        let add = |bytes: &mut Bytes, more: Option<Bytes>| bytes.0 = bytes.0.max(more.unwrap_or_default().0);
        add(&mut known.read, past.staged_in);
        add(&mut known.written, past.staged_out);
        known.in_ram |= past.in_ram;
    }
    IoModel::Measured { jobs, link }
}
