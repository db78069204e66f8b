//! The Standard Workload Format of the Parallel Workloads Archive: a line a job, of 18 numbers, where -1 says that nothing is
//! known; and comments after a semicolon, some of which say what the machine was.
//!
//! Source: <https://www.cs.huji.ac.il/labs/parallel/workload/swf.html>, version 2.2. What of it is used here: fields 1 (number),
//! 2 (submit time), 4 (run time), 5 (allocated processors), 8 (requested processors), 9 (requested time), 11 (status) and 12
//! (user), and the header's `MaxNodes` and `MaxProcs`.

use std::io::BufRead;

use ondeck_core::text::plain;

use super::{LATEST, LineError, NothingButLeftOut, SHOWN, Trace, TraceError, TraceJob, for_each_line};

/// The fields, by the names of the format's definition.
const FIELDS: [&str; 18] = [
    "field 1 (job number)",
    "field 2 (submit time)",
    "field 3 (wait time)",
    "field 4 (run time)",
    "field 5 (allocated processors)",
    "field 6 (average CPU time)",
    "field 7 (used memory)",
    "field 8 (requested processors)",
    "field 9 (requested time)",
    "field 10 (requested memory)",
    "field 11 (status)",
    "field 12 (user)",
    "field 13 (group)",
    "field 14 (executable)",
    "field 15 (queue)",
    "field 16 (partition)",
    "field 17 (preceding job)",
    "field 18 (think time)",
];

/// More processors than any machine has.
const MOST_PROCESSORS: u64 = 1_000_000_000;

/// Reads a trace.
///
/// A node is so many processors as `processors_per_node` says; a job has whole nodes.
///
/// # Errors
/// At the first line that can't be understood, and if no job in it has run.
pub fn read(source: impl BufRead, processors_per_node: u32) -> Result<Trace, TraceError> {
    let per_node = processors_per_node.max(1);
    let mut trace = Trace::default();
    let (mut max_nodes, mut max_processors) = (None, None);
    for_each_line(source, |number, line| {
        let line = line.trim();
        if let Some(comment) = line.strip_prefix(';') {
            let value = |key: &str| {
                let rest = comment.trim_start().strip_prefix(key)?.trim_start().strip_prefix(':')?;
                rest.split_whitespace().next()?.parse::<u32>().ok().filter(|count| *count > 0)
            };
            max_nodes = value("MaxNodes").or(max_nodes);
            max_processors = value("MaxProcs").or(max_processors);
        } else if !line.is_empty() {
            take(&mut trace, number, line, per_node)?;
        }
        Ok(())
    })?;
    if trace.jobs.is_empty() {
        return Err(TraceError::NoJobs(NothingButLeftOut(trace.left_out)));
    }
    let by_processors = max_processors.map(|count| count.div_ceil(per_node));
    trace.nodes = by_processors.or(max_nodes.filter(|_| per_node == 1));
    Ok(trace.in_order())
}

/// Takes the line of a job.
fn take(trace: &mut Trace, number: u64, line: &str, per_node: u32) -> Result<(), LineError> {
    let mut fields: [Option<f64>; FIELDS.len()] = [None; FIELDS.len()];
    let mut words = line.split_ascii_whitespace();
    for (field, name) in fields.iter_mut().zip(FIELDS) {
        let wrong = |what| LineError { line: number, field: name, what };
        let Some(word) = words.next() else {
            let what = "it is missing; a job has 18 fields, -1 for what is not known".to_owned();
            return Err(wrong(what));
        };
        let value: f64 = match word.parse() {
            Ok(value) if f64::is_finite(value) => value,
            _ => return Err(wrong(format!("'{}' is no number", plain(word, SHOWN)))),
        };
        *field = (value >= 0.0).then_some(value);
    }
    if let Some(more) = words.next() {
        let what = format!("'{}' stands after the last of 18 fields", plain(more, SHOWN));
        return Err(LineError { line: number, field: "the end of the line", what });
    }
    let whole = |index: usize, most: u64| -> Result<Option<u64>, LineError> {
        let Some(value) = fields[index] else { return Ok(None) };
        if value > most as f64 {
            let what = format!("{value} is more than {most}");
            return Err(LineError { line: number, field: FIELDS[index], what });
        }
        // Some logs have parts of seconds.
        Ok(Some(value.ceil() as u64))
    };
    let job = whole(0, u64::from(u32::MAX))?;
    let submitted = whole(1, LATEST)?;
    let run = whole(3, LATEST)?.unwrap_or(0);
    let allocated = whole(4, MOST_PROCESSORS)?.filter(|count| *count > 0);
    let asked = whole(7, MOST_PROCESSORS)?.filter(|count| *count > 0);
    let requested = whole(8, LATEST)?.filter(|seconds| *seconds > 0);
    let status = whole(10, 9)?;
    let user = whole(11, u64::from(u32::MAX))?;
    let missing = |index: usize| LineError {
        line: number,
        field: FIELDS[index],
        what: "it is -1, and must be known".to_owned(),
    };
    let job = job.ok_or(missing(0))?;
    let submitted = submitted.ok_or(missing(1))?;
    // 2 to 4: parts of a job that was swapped out or checkpointed; its own line is of status 0 or 1.
    if matches!(status, Some(2..=4)) {
        trace.left_out.parts += 1;
        return Ok(());
    }
    match allocated.or(asked).and_then(|count| u32::try_from(count).ok()) {
        Some(processors) if run > 0 => {
            let nodes = processors.div_ceil(per_node);
            let user = user.and_then(|user| u32::try_from(user).ok());
            trace.jobs.push(TraceJob { number: job, submitted, run, nodes, requested, user });
        }
        _ => trace.left_out.never_ran += 1,
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::trace::LeftOut;

    const HEADER: &str = "; Computer: a machine\n;  MaxNodes: 64\n; MaxProcs:  128\n\n";

    fn of(lines: &str) -> Result<Trace, TraceError> {
        read(format!("{HEADER}{lines}").as_bytes(), 1)
    }

    #[test]
    fn a_trace_has_its_jobs_in_order_and_its_machine() {
        let trace = of("2 110 5 20 4 -1 -1 8 60 -1 1 7 1 -1 -1 -1 -1 -1\r\n\
                        1 100.5 -1 10.2 -1 -1 -1 2 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1\n")
        .unwrap();
        let expected = [
            TraceJob { number: 1, submitted: 0, run: 11, nodes: 2, requested: None, user: None },
            TraceJob { number: 2, submitted: 9, run: 20, nodes: 4, requested: Some(60), user: Some(7) },
        ];
        assert_eq!(trace.jobs, expected);
        assert_eq!(trace.nodes, Some(128));
        let trace = read("1 0 0 9 5 0 0 5 9 0 1 1 1 1 1 1 -1 -1".as_bytes(), 4).unwrap();
        assert_eq!((trace.jobs[0].nodes, trace.nodes), (2, None));
    }

    #[test]
    fn what_did_not_run_is_counted_and_left_out() {
        let trace = of("1 0 -1 0 4 -1 -1 4 -1 -1 5 1 1 -1 -1 -1 -1 -1\n\
                        2 0 -1 9 4 -1 -1 4 -1 -1 2 1 1 -1 -1 -1 -1 -1\n\
                        3 0 -1 9 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1\n")
        .unwrap();
        assert_eq!(trace.jobs.len(), 1);
        assert_eq!(trace.left_out, LeftOut { never_ran: 1, parts: 1, ..LeftOut::default() });
        let none = of("1 0 -1 -1 4 -1 -1 4 -1 -1 5 1 1 -1 -1 -1 -1 -1").unwrap_err();
        assert!(none.to_string().contains("1 never ran"), "{none}");
        assert!(of("").unwrap_err().to_string().contains("no line of a job"));
    }

    #[test]
    fn a_malformed_line_is_named_with_its_field() {
        let good = "1 0 -1 9 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1\n";
        for (bad, field, what) in [
            ("1 0 -1 x 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1", "field 4 (run time)", "'x' is no number"),
            ("1 0 -1 9", "field 5 (allocated processors)", "missing"),
            ("1 0 -1 9 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1 7", "the end of the line", "'7'"),
            ("-1 0 -1 9 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1", "field 1 (job number)", "must be known"),
            ("1 -1 -1 9 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1", "field 2 (submit time)", "must be known"),
            ("1 0 -1 9 4 -1 -1 4 -1 -1 77 1 1 -1 -1 -1 -1 -1", "field 11 (status)", "more than 9"),
            ("1 0 -1 nan 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1", "field 4 (run time)", "no number"),
            ("1 1e30 -1 9 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1", "field 2 (submit time)", "more than"),
        ] {
            let TraceError::Line(error) = of(&format!("{good}{bad}\n{good}")).unwrap_err() else { panic!() };
            assert_eq!((error.line, error.field), (6, field), "{bad}");
            assert!(error.what.contains(what), "{error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[-0-9a-z.; \n\t\u{e9}]{0,400}") {
            let _ = read(text.as_bytes(), 1);
        }

        #[test]
        fn lines_of_numbers_are_read_or_named(numbers in proptest::collection::vec(-2i64..200, 18 * 5)) {
            let lines: Vec<String> =
                numbers.chunks(18).map(|line| line.iter().map(i64::to_string).collect::<Vec<_>>().join(" ")).collect();
            match read(lines.join("\n").as_bytes(), 1) {
                Ok(trace) => proptest::prop_assert!(trace.jobs.iter().all(|job| job.run > 0 && job.nodes > 0)),
                Err(TraceError::Line(error)) => proptest::prop_assert!((1..=5).contains(&error.line)),
                Err(TraceError::NoJobs(_)) => {}
                Err(other) => proptest::prop_assert!(false, "{other}"),
            }
        }
    }
}
