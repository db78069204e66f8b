//! What Slurm's `sacct --allusers --parsable2` prints: a line of column names, then a line a job, both with `|` between columns.
//!
//! The columns may stand in any order and be more than are needed: `JobIDRaw` (or `JobID`), `Submit`, `Start`, `End`, `NNodes`
//! (or `AllocNodes`), and if they are there `Timelimit` (or `TimelimitRaw`), `UID` and `User`. Steps are passed over: the line
//! of their job has all of it. A job is told from others by all of its number (12_3, 12+1) and by its start: one that was started
//! anew ran twice. Source: sacct(1) of Slurm 22.05.

use std::collections::{BTreeMap, HashSet};
use std::io::BufRead;

use ondeck_core::text::plain;

use super::{LATEST, LineError, NothingButLeftOut, SHOWN, Trace, TraceError, TraceJob, for_each_line};

/// The columns that are used, by the names that sacct gives them.
const JOB: &[&str] = &["JobIDRaw", "JobID"];
const SUBMIT: &[&str] = &["Submit"];
const START: &[&str] = &["Start"];
const END: &[&str] = &["End"];
const NODES: &[&str] = &["NNodes", "AllocNodes"];
const LIMIT: &[&str] = &["TimelimitRaw", "Timelimit"];
const USER: &[&str] = &["UID", "User"];

/// What to type for all that is needed.
pub const COMMAND: &str =
    "sacct --allusers --allocations --parsable2 --format=JobIDRaw,Submit,Start,End,NNodes,Timelimit,UID";

/// Where the columns stand.
struct Columns {
    count: usize,
    job: (usize, &'static str),
    submit: (usize, &'static str),
    start: (usize, &'static str),
    end: (usize, &'static str),
    nodes: (usize, &'static str),
    limit: Option<(usize, &'static str)>,
    user: Option<(usize, &'static str)>,
}

/// Reads what sacct has printed.
///
/// # Errors
/// At the first line that can't be understood, and if no job in it has run.
pub fn read(source: impl BufRead) -> Result<Trace, TraceError> {
    let mut trace = Trace::default();
    let mut columns = None;
    let mut names = String::new();
    let (mut users, mut runs) = (BTreeMap::new(), HashSet::new());
    for_each_line(source, |number, line| {
        match &columns {
            _ if line.trim().is_empty() => {}
            None => {
                columns = Some(Columns::read(number, line)?);
                names = line.to_owned();
            }
            // Two answers of sacct, one after the other.
            Some(_) if line == names => {}
            Some(columns) => take(&mut trace, &mut users, &mut runs, columns, number, line)?,
        }
        Ok(())
    })?;
    if trace.jobs.is_empty() {
        return Err(TraceError::NoJobs(NothingButLeftOut(trace.left_out)));
    }
    Ok(trace.by_submission())
}

impl Columns {
    fn read(line: u64, text: &str) -> Result<Columns, LineError> {
        let names: Vec<&str> = text.split('|').map(str::trim).collect();
        let find = |wanted: &'static [&'static str]| {
            wanted.iter().find_map(|name| Some((names.iter().position(|found| found == name)?, *name)))
        };
        let needed = |wanted: &'static [&'static str]| {
            find(wanted).ok_or_else(|| LineError {
                line,
                field: "the names of the columns",
                what: format!("there is no {}; use: {COMMAND}", wanted.join(" or ")),
            })
        };
        Ok(Columns {
            count: names.len(),
            job: needed(JOB)?,
            submit: needed(SUBMIT)?,
            start: needed(START)?,
            end: needed(END)?,
            nodes: needed(NODES)?,
            limit: find(LIMIT),
            user: find(USER),
        })
    }
}

fn take(
    trace: &mut Trace,
    users: &mut BTreeMap<String, u32>,
    runs: &mut HashSet<(String, u64)>,
    columns: &Columns,
    number: u64,
    line: &str,
) -> Result<(), LineError> {
    let words: Vec<&str> = line.split('|').map(str::trim).collect();
    let error = |field, what: String| LineError { line: number, field, what };
    // A job's name may have the separator in it, and would move all after it.
    if words.len() != columns.count {
        let what = format!("it has {} columns, and the first line names {}", words.len(), columns.count);
        return Err(error("the number of columns", what));
    }
    let id = words[columns.job.0];
    if id.contains('.') {
        trace.left_out.parts += 1;
        return Ok(());
    }
    // 12_3 is an element of an array, 12+1 a component of a heterogeneous job.
    let digits: String = id.chars().take_while(char::is_ascii_digit).collect();
    let job: u64 = digits
        .parse()
        .map_err(|_| error(columns.job.1, format!("'{}' is no number of a job", plain(id, SHOWN))))?;
    let time = |(place, name): (usize, &'static str)| {
        read_time(words[place]).map_err(|()| {
            let what = format!("'{}' is no time such as 2026-01-31T12:00:00", plain(words[place], SHOWN));
            error(name, what)
        })
    };
    let (submitted, start, end) = (time(columns.submit)?, time(columns.start)?, time(columns.end)?);
    let text = words[columns.nodes.0];
    let nodes: u32 = text
        .parse()
        .map_err(|_| error(columns.nodes.1, format!("'{}' is no number of nodes", plain(text, SHOWN))))?;
    let requested = match columns.limit {
        None => None,
        Some((place, name)) => read_limit(words[place], name == "TimelimitRaw").map_err(|()| {
            let what = format!("'{}' is no time such as 1-12:00:00", plain(words[place], SHOWN));
            error(name, what)
        })?,
    };
    let Some(submitted) = submitted else {
        return Err(error(columns.submit.1, "it must be known".to_owned()));
    };
    let (Some(start), true) = (start, nodes > 0) else {
        trace.left_out.never_ran += 1;
        return Ok(());
    };
    let Some(end) = end else {
        trace.left_out.unfinished += 1;
        return Ok(());
    };
    let Some(run) = end.checked_sub(start) else {
        return Err(error(columns.end.1, "it is before the start; if clocks were changed in between, print times with SLURM_TIME_FORMAT=%s".to_owned()));
    };
    if run == 0 {
        trace.left_out.never_ran += 1;
        return Ok(());
    }
    if !runs.insert((id.to_owned(), start)) {
        trace.left_out.repeated += 1;
        return Ok(());
    }
    let user = columns.user.map(|(place, _)| words[place]).filter(|user| !user.is_empty()).map(|user| {
        let next = users.len() as u32;
        *users.entry(user.to_owned()).or_insert(next)
    });
    trace.jobs.push(TraceJob { number: job, submitted, run, nodes, requested, user });
    Ok(())
}

/// Seconds since 1970, as if the machine's time were universal: a summer time that begins or ends in between is an hour's error.
/// Nothing if sacct does not know.
fn read_time(text: &str) -> Result<Option<u64>, ()> {
    if matches!(text, "Unknown" | "None" | "" | "N/A") {
        return Ok(None);
    }
    // With SLURM_TIME_FORMAT=%s.
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok().filter(|seconds| *seconds <= LATEST).map(Some).ok_or(());
    }
    let (date, time) = text.split_once('T').ok_or(())?;
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = numbers(time, ':')?;
    let is_right = (1970..2200).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !is_right {
        return Err(());
    }
    Ok(Some(days_since_1970(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second))
}

/// Days from 1970 to a date of the Gregorian calendar, with years that begin in March, so that leap days come last.
fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = |year: u64| year / 4 - year / 100 + year / 400;
    let days_of_months = (153 * month + 2) / 5;
    let since_march_of_1969 =
        (year - 1969) * 365 + leap_days(year) - leap_days(1969) + days_of_months + day - 1;
    // From the first of March to the end of 1969.
    since_march_of_1969 - 306
}

/// Seconds; nothing if it is not told. `raw`: in minutes.
fn read_limit(text: &str, raw: bool) -> Result<Option<u64>, ()> {
    /// What Slurm's backfill takes no limit for.
    const A_YEAR: u64 = 365 * 86_400;
    match text {
        "UNLIMITED" => return Ok(Some(A_YEAR)),
        "Partition_Limit" | "" | "INVALID" => return Ok(None),
        _ => {}
    }
    let seconds = if raw {
        text.parse::<u64>().map_err(|_| ())?.checked_mul(60).ok_or(())?
    } else {
        let (days, time) = match text.split_once('-') {
            Some((days, time)) => (days.parse::<u64>().map_err(|_| ())?, time),
            None => (0, text),
        };
        let [hours, minutes, seconds] = numbers(time, ':')?;
        let of_days = days.checked_mul(86_400).ok_or(())?;
        hours.checked_mul(3600).and_then(|of_hours| of_days.checked_add(of_hours)).ok_or(())?
            + minutes.min(LATEST) * 60
            + seconds.min(LATEST)
    };
    if seconds > LATEST { Err(()) } else { Ok(Some(seconds).filter(|seconds| *seconds > 0)) }
}

/// Three numbers with something between them.
fn numbers(text: &str, between: char) -> Result<[u64; 3], ()> {
    let mut words = text.split(between).map(|word| {
        let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { word.parse::<u64>().map_err(|_| ()) } else { Err(()) }
    });
    let mut next = || words.next().ok_or(())?;
    let found = [next()?, next()?, next()?];
    if words.next().is_some() { Err(()) } else { Ok(found) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::trace::LeftOut;

    const NAMES: &str = "JobIDRaw|Submit|Start|End|NNodes|Timelimit|UID\n";

    #[test]
    fn jobs_are_read_and_steps_and_what_did_not_run_are_not() {
        let text = format!(
            "{NAMES}12|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:01:10|2|1-00:01:00|1000\n\
             12.batch|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:01:10|1||\n\
             13|2026-02-28T23:59:40|Unknown|2026-03-01T00:00:00|1|UNLIMITED|1001\n\
             14|2026-02-28T23:59:40|2026-03-01T00:00:00|Unknown|1|00:10:00|1001\n\
             15_2|2026-02-28T23:59:45|2026-03-01T00:00:00|2026-03-01T00:00:05|1|UNLIMITED|1001\n"
        );
        let trace = read(text.as_bytes()).unwrap();
        let expected = [
            TraceJob {
                number: 15,
                submitted: 0,
                run: 5,
                nodes: 1,
                requested: Some(365 * 86_400),
                user: Some(1),
            },
            TraceJob { number: 12, submitted: 5, run: 60, nodes: 2, requested: Some(86_460), user: Some(0) },
        ];
        assert_eq!(trace.jobs, expected);
        assert_eq!(trace.left_out, LeftOut { never_ran: 1, parts: 1, unfinished: 1, repeated: 0 });
    }

    #[test]
    fn what_overlaps_is_counted_once_and_names_may_come_again() {
        let line = "12|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:01:10|2|00:01:00|1000\n";
        let trace = read(format!("\u{feff}{NAMES}{line}{NAMES}{line}").as_bytes()).unwrap();
        assert_eq!((trace.jobs.len(), trace.left_out.repeated), (1, 1));
    }

    #[test]
    fn elements_components_and_runs_of_a_job_are_told_apart_and_overlaps_are_not_counted_twice() {
        let times = "2026-02-28T08:00:00|2026-02-28T08:00:00|2026-02-28T09:00:00|4|02:00:00|1";
        let again = "2026-02-28T08:00:00|2026-02-28T10:00:00|2026-02-28T11:00:00|4|02:00:00|1";
        let ids = ["100_1", "100_2", "12+0", "12+1", "7"];
        let mut text: String = ids.iter().map(|id| format!("{id}|{times}\n")).collect();
        text += &format!("7|{again}\n");
        let names = NAMES.replace("JobIDRaw", "JobID");
        let trace = read(format!("{names}{text}{text}").as_bytes()).unwrap();
        assert_eq!((trace.jobs.len(), trace.left_out.repeated), (6, 6));
        assert_eq!(trace.jobs.iter().filter(|job| job.number == 100).count(), 2);
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00", 0),
            ("1970-03-01T00:00:00", 59 * 86_400),
            ("2000-02-29T12:00:00", 951_825_600),
            ("2026-11-25T06:35:22", 1_795_588_522),
            ("1795588522", 1_795_588_522),
        ] {
            assert_eq!(read_time(text), Ok(Some(seconds)), "{text}");
        }
        for text in
            ["2026-13-01T00:00:00", "2026-11-25 06:35:22", "2026-11-25T24:00:00", "yesterday", "2026-1-1"]
        {
            assert_eq!(read_time(text), Err(()), "{text}");
        }
    }

    #[test]
    fn limits_have_days_or_are_minutes() {
        assert_eq!(read_limit("2-01:02:03", false), Ok(Some(2 * 86_400 + 3723)));
        assert_eq!(read_limit("00:30:00", false), Ok(Some(1800)));
        assert_eq!(read_limit("30", true), Ok(Some(1800)));
        assert_eq!(read_limit("Partition_Limit", true), Ok(None));
        assert_eq!(read_limit("99999999999999999999-00:00:00", false), Err(()));
        assert_eq!(read_limit("9999999999999-00:00:00", false), Err(()));
    }

    #[test]
    fn a_malformed_line_is_named_with_its_column() {
        let good = "12|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:01:10|2|00:01:00|1000\n";
        for (bad, field, what) in [
            ("x|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:01:10|2||", "JobIDRaw", "'x'"),
            ("1|yesterday|2026-03-01T00:00:10|2026-03-01T00:01:10|2||", "Submit", "'yesterday'"),
            ("1|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:00:00|2||", "End", "before the start"),
            ("1|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:01:10|n1||", "NNodes", "'n1'"),
            ("1|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:01:10|1|soon|", "Timelimit", "'soon'"),
            ("1|Unknown|2026-03-01T00:00:10|2026-03-01T00:01:10|1||", "Submit", "must be known"),
            (
                "1|a|b|2026-02-28T23:59:50|2026-03-01T00:00:10|2026-03-01T00:01:10|1||",
                "the number of columns",
                "9",
            ),
        ] {
            let text = format!("{NAMES}{good}{bad}\n");
            let TraceError::Line(error) = read(text.as_bytes()).unwrap_err() else { panic!() };
            assert_eq!((error.line, error.field), (3, field), "{bad}");
            assert!(error.what.contains(what), "{error}");
        }
        let error = read("JobID|Submit\n".as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("line 1") && error.contains("no Start; use: sacct"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[-0-9T:a-z|. \n\u{e9}]{0,300}") {
            let _ = read(text.as_bytes());
            let _ = read(format!("{NAMES}{text}").as_bytes());
        }
    }
}
