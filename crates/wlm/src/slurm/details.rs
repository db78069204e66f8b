//! One job's details.

use ondeck_core::JobId;

use super::path;
use super::record::{records, text};
use crate::{JobDetails, WlmError};

/// What is asked of squeue, in the order of [`parse`].
pub const FIELDS: &[&str; 12] = &[
    "JobID",
    "State",
    "exit_code",
    "WorkDir",
    "stdout",
    "Comment",
    "admin_comment",
    "stderr",
    "NumTasks",
    "ArrayTaskID",
    "ArrayJobID",
    "Name",
];

/// States of a job that has ended (squeue(1), job state codes).
const ENDED: &[&str] = &[
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
];

/// Takes the details of `job` out of squeue's output, which for an array has all its elements.
pub fn parse(output: &[u8], separator: &str, job: JobId) -> Result<JobDetails, WlmError> {
    let id = job.to_string();
    let records = records::<{ FIELDS.len() }>(output, separator)?;
    let [
        _,
        state,
        exit_code,
        work_dir,
        std_out,
        comment,
        admin_comment,
        std_err,
        tasks,
        array_task,
        array,
        name,
    ] = records.into_iter().find(|record| record[0] == id.as_bytes()).ok_or(WlmError::NoSuchJob(job))?;
    let state = text(state);
    let exit_code = match text(exit_code).parse() {
        _ if !ENDED.contains(&state.as_str()) => None,
        Ok(status) => Some(exit_code_of(status)),
        Err(_) => return Err(WlmError::Malformed { what: format!("the exit code of job {job}") }),
    };
    let array = match array_task {
        b"N/A" => None,
        _ => {
            let number = text(array).parse().map(JobId);
            Some(number.map_err(|_| WlmError::Malformed { what: format!("the array of job {job}") })?)
        }
    };
    Ok(JobDetails {
        work_dir: path(work_dir),
        std_out: Some(path(std_out)).filter(|path| path.is_absolute()),
        std_err: Some(path(std_err)).filter(|path| path.is_absolute()),
        comment: text(comment),
        admin_comment: text(admin_comment),
        exit_code,
        state,
        tasks: text(tasks).parse().ok().filter(|tasks| *tasks > 0),
        name: text(name),
        array,
    })
}

/// squeue gives a wait status.
fn exit_code_of(status: u32) -> u32 {
    match status & 0x7f {
        0 => status >> 8 & 0xff,
        signal => 128 + signal,
    }
}

/// Text without control characters, and no longer than a few lines: Slurm keeps it in the controller's memory.
pub fn one_line(text: &str) -> String {
    const MOST: usize = 500;
    text.chars().take(MOST).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slurm 22.05.8, with `|` in place of the separator.
    const SAMPLE: &str = "34|FAILED|4021|/home/a b|/home/a b/out 34|x|(null)|/e|256|N/A|34|a b|\n\
        35|FAILED|9|/home||(null)|ondeck:hold|(null)|1|N/A|35||\n\
        36|RUNNING|0|/|/home/slurm-36.out|(null)|(null)|/home/e|4|3|30|x|\n\
        37|FAILED|768|/|/o|(null)|(null)|/o|N/A|0|37|x|\n38|RUNNING|0|/|/o|(null)|(null)|/o|1|2|what|x|\n";

    #[test]
    fn details_are_read() {
        let read = |job| parse(SAMPLE.as_bytes(), "|", JobId(job));
        let details = read(34).unwrap();
        assert_eq!(details.work_dir.to_str(), Some("/home/a b"));
        assert_eq!(details.std_out.unwrap().to_str(), Some("/home/a b/out 34"));
        assert_eq!(details.std_err.unwrap().to_str(), Some("/e"));
        assert_eq!((details.comment.as_str(), details.admin_comment.as_str()), ("x", ""));
        assert_eq!((details.exit_code, details.tasks), (Some(128 + 53), Some(256)));
        assert_eq!(details.name, "a b");
        let details = read(35).unwrap();
        assert_eq!((details.std_out, details.exit_code), (None, Some(137)));
        assert_eq!(read(36).unwrap().exit_code, None);
        assert_eq!((read(37).unwrap().exit_code, read(37).unwrap().tasks), (Some(3), None));
        // The last element of an array has its number.
        let arrays = [34, 36, 37].map(|job| read(job).unwrap().array);
        assert_eq!(arrays, [None, Some(JobId(30)), Some(JobId(37))]);
        assert!(matches!(read(38), Err(WlmError::Malformed { .. })), "{:?}", read(38));
        assert_eq!(read(39), Err(WlmError::NoSuchJob(JobId(39))));
    }
}
