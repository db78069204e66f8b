//! The jobs of a workload, as a log has them, in whichever form.
//!
//! A log is read line by line and kept as [`Trace`]: the jobs that ran, in the order of their submission, and remarks about
//! what the log does not say. What it lacks is not made up here; [`crate::remedy`] does that, on request.

pub mod sacct;
pub mod swf;

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use serde::Serialize;

/// A job that ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceJob {
    /// Its number in the log.
    pub number: u64,
    /// When it was submitted, in seconds since the log begins.
    pub submitted: u64,
    /// How long it ran, in seconds; at least one.
    pub run: u64,
    /// How many nodes it had; at least one.
    pub nodes: u32,
    /// How long it might have run, in seconds, if the log says so.
    pub requested: Option<u64>,
    /// Whose it was: a number that tells users apart, if the log says so.
    pub user: Option<u32>,
}

/// What a log says, and what it does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The jobs, by their submission.
    pub jobs: Vec<TraceJob>,
    /// How many nodes the machine had, if the log says so.
    pub nodes: Option<u32>,
    /// What was left out, and why.
    pub left_out: LeftOut,
}

/// Lines of a log that are no job that ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Jobs that never started, or ran for no time, or on no node.
    pub never_ran: u64,
    /// Parts of jobs that have a line of their own as a whole.
    pub parts: u64,
    /// Jobs that had not ended when the log was written.
    pub unfinished: u64,
    /// Lines that say the same of a job as another one, as where two extracts of a log overlap.
    pub repeated: u64,
}

/// What the log lacks for a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lacks {
    /// No job says how long it might have run.
    pub requested_times: bool,
    /// How many jobs don't say it, where others do.
    pub jobs_without_time: u64,
    /// Started when they were submitted, all jobs would have found room: these are probably the times of their starts.
    pub waits: bool,
}

impl Trace {
    /// A log of jobs whose submissions are counted from any time. What was left out is counted already.
    pub fn of(jobs: Vec<TraceJob>, left_out: LeftOut) -> Trace {
        Trace { jobs, nodes: None, left_out }.in_order()
    }

    /// Sorts the jobs by their submission, each once, and counts time from the first.
    pub(crate) fn in_order(self) -> Trace {
        let mut sorted = self.by_submission();
        let all = sorted.jobs.len();
        sorted.jobs.dedup();
        sorted.left_out.repeated += (all - sorted.jobs.len()) as u64;
        sorted
    }

    /// Sorts the jobs by their submission, and counts time from the first. Several may have one number.
    pub(crate) fn by_submission(mut self) -> Trace {
        self.jobs.sort_by_key(|job| (job.submitted, job.number));
        let first = self.jobs.first().map_or(0, |job| job.submitted);
        for job in &mut self.jobs {
            job.submitted -= first;
        }
        self
    }

    /// The nodes of the machine: what the log says, or the most that one job had.
    pub fn machine(&self) -> u32 {
        let largest = self.jobs.iter().map(|job| job.nodes).max().unwrap_or(0);
        self.nodes.unwrap_or(0).max(largest)
    }

    /// The time from the first submission to the last, in seconds.
    pub fn span(&self) -> u64 {
        self.jobs.last().map_or(0, |job| job.submitted)
    }

    /// The share of a machine that the jobs ask for while they arrive; more than 1 can't be served.
    pub fn load(&self, nodes: u32) -> f64 {
        let area: f64 = self.jobs.iter().map(|job| f64::from(job.nodes) * job.run as f64).sum();
        match self.span() {
            0 => f64::INFINITY,
            span => area / (f64::from(nodes) * span as f64),
        }
    }

    /// What the log lacks.
    pub fn lacks(&self) -> Lacks {
        let silent = self.jobs.iter().filter(|job| job.requested.is_none()).count();
        Lacks {
            requested_times: !self.jobs.is_empty() && silent == self.jobs.len(),
            jobs_without_time: if silent < self.jobs.len() { silent as u64 } else { 0 },
            waits: self.jobs.len() > 1 && self.peak() <= u64::from(self.machine()),
        }
    }

    /// The most nodes that would be in use at a time if each job started when it was submitted.
    fn peak(&self) -> u64 {
        let mut changes: Vec<(u64, i64)> = self
            .jobs
            .iter()
            .flat_map(|job| {
                let nodes = i64::from(job.nodes);
                [(job.submitted, nodes), (job.submitted + job.run, -nodes)]
            })
            .collect();
        // What ends makes room for what begins in the same second.
        changes.sort_unstable();
        let (mut used, mut peak) = (0, 0);
        for (_, change) in changes {
            used += change;
            peak = peak.max(used);
        }
        u64::try_from(peak).unwrap_or(0)
    }
}

/// A line that can't be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, {field}: {what}")]
pub struct LineError {
    /// Its number, from 1.
    pub line: u64,
    /// The field, by its name.
    pub field: &'static str,
    /// What is wrong with it, and what would be right.
    pub what: String,
}

/// Why a log could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line can't be understood.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The file could not be read.
    #[error("line {line}: {why}")]
    Read {
        /// The line that was being read, from 1.
        line: u64,
        /// What the system says, which stands in the words above already.
        why: io::Error,
    },
    /// There is no job in it that ran.
    #[error("no job in it has run{0}")]
    NoJobs(NothingButLeftOut),
}

/// What there was instead of jobs that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NothingButLeftOut(pub LeftOut);

impl fmt::Display for NothingButLeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LeftOut { never_ran, parts, unfinished, repeated: _ } = self.0;
        if self.0 == LeftOut::default() {
            return f.write_str("; it has no line of a job");
        }
        write!(f, ": {never_ran} never ran, {parts} are parts of others, {unfinished} have not ended")
    }
}

/// Reads what may be compressed by gzip, as its first bytes say.
///
/// # Errors
/// If the first bytes can't be read.
pub fn plain_or_gzip<'a>(source: impl Read + 'a) -> io::Result<Box<dyn BufRead + 'a>> {
    let mut source = BufReader::with_capacity(1 << 16, source);
    Ok(match source.fill_buf()? {
        [0x1f, 0x8b, ..] => Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(source))),
        _ => Box::new(source),
    })
}

/// The latest second, and the longest time: 300 years, so that sums stay far from any limit.
pub(crate) const LATEST: u64 = 10_000_000_000;

/// So many bytes of a word that is not understood are shown.
pub(crate) const SHOWN: usize = 40;

/// The longest line that is read: what is no log at all must not fill the memory.
const LONGEST_LINE: u64 = 1 << 20;

/// Calls `take` with every line and its number; what is no UTF-8 in it is replaced.
pub(crate) fn for_each_line(
    mut source: impl BufRead,
    mut take: impl FnMut(u64, &str) -> Result<(), LineError>,
) -> Result<(), TraceError> {
    let (mut number, mut bytes) = (0, Vec::new());
    loop {
        number += 1;
        bytes.clear();
        let read = (&mut source).take(LONGEST_LINE).read_until(b'\n', &mut bytes);
        match read.map_err(|why| TraceError::Read { line: number, why })? {
            0 => return Ok(()),
            length if length as u64 == LONGEST_LINE => {
                let what = format!("it has more than {LONGEST_LINE} bytes; this is no log of jobs");
                return Err(LineError { line: number, field: "the whole line", what }.into());
            }
            // Some editors put a mark of the encoding before everything.
            _ => take(
                number,
                String::from_utf8_lossy(&bytes).trim_start_matches('\u{feff}').trim_end_matches(['\n', '\r']),
            )?,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn job(number: u64, submitted: u64, run: u64, nodes: u32) -> TraceJob {
        TraceJob { number, submitted, run, nodes, requested: None, user: None }
    }

    #[test]
    fn times_that_fit_the_machine_without_any_wait_are_taken_for_starts() {
        let jobs = vec![job(1, 0, 10, 3), job(2, 5, 10, 1), job(3, 10, 10, 3)];
        let trace = Trace { jobs, nodes: Some(4), ..Trace::default() };
        assert_eq!(trace.lacks(), Lacks { requested_times: true, jobs_without_time: 0, waits: true });
        let jobs = vec![job(1, 0, 10, 3), job(2, 5, 10, 2)];
        assert!(!Trace { jobs, nodes: Some(4), ..Trace::default() }.lacks().waits);
    }

    #[test]
    fn what_is_compressed_is_read_as_what_is_not() {
        use std::io::Write;
        let text = "one\ntwo\r\nthree";
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(text.as_bytes()).unwrap();
        for bytes in [text.as_bytes().to_vec(), packed.finish().unwrap()] {
            let mut lines = Vec::new();
            let source = plain_or_gzip(bytes.as_slice()).unwrap();
            for_each_line(source, |number, line| {
                lines.push((number, line.to_owned()));
                Ok(())
            })
            .unwrap();
            let expected = [(1, "one"), (2, "two"), (3, "three")];
            assert_eq!(lines, expected.map(|(number, line)| (number, line.to_owned())));
        }
    }

    #[test]
    fn a_broken_archive_and_an_endless_line_are_errors() {
        let broken = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3];
        let read = for_each_line(plain_or_gzip(broken.as_slice()).unwrap(), |_, _| Ok(()));
        assert!(matches!(read, Err(TraceError::Read { line: 1, .. })), "{read:?}");
        let read = for_each_line(BufReader::new(io::repeat(b'x')), |_, _| Ok(()));
        assert!(matches!(read, Err(TraceError::Line(LineError { line: 1, .. }))), "{read:?}");
    }
}
