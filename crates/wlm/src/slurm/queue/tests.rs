use std::collections::BTreeMap;
use std::time::Instant;

use super::*;

/// What squeue of Slurm 22.05.8 printed for [`FIELDS`], with `|` in place of the separator. The lines of jobs 18, 19, 22,
/// 27, 32, 47, 51, 52, 61 and 62 were put together from outputs with fewer fields, and HetJobID, EligibleTime and the names were added
/// to all; 53, a requeued job that ran for no second and is
/// ending for good, was made up.
const SAMPLE: &str = include_str!("../../samples/squeue-22.05.8.txt");

fn sample() -> BTreeMap<u32, QueuedJob> {
    parse(SAMPLE.as_bytes(), "|").unwrap().jobs.into_iter().map(|job| (job.id.job.0, job)).collect()
}

fn names(job: &QueuedJob) -> Vec<&str> {
    job.nodes.iter().map(NodeName::as_str).collect()
}

#[test]
fn every_state_has_its_standing() {
    let jobs = sample();
    for (standing, numbers) in [
        (Standing::Next, vec![41, 27]),
        (Standing::Waiting, vec![48, 38, 43, 47]),
        (Standing::Held, vec![32, 45, 44, 22]),
        (Standing::Configuring, vec![39]),
        (Standing::Running, vec![40, 49, 51, 61, 62]),
        (Standing::Ending, vec![18, 19, 52, 37, 53]),
        (Standing::Ended, vec![31, 33, 36, 34]),
    ] {
        for number in numbers {
            assert_eq!(jobs[&number].standing, standing, "{number}");
        }
    }
    // As after any change of a job.
    assert_eq!(super::standing("PENDING", "None", 1), Standing::Unjudged);
    assert_eq!(super::standing("PENDING", "BurstBufferStageIn", 1), Standing::StagingIn);
    assert_eq!(super::standing("PENDING", "BurstBufferResources", 1), Standing::Waiting);
    assert_eq!(super::standing("PENDING", "BurstBufferStageIn", 0), Standing::Held);
    assert_eq!(super::standing("STAGE_OUT", "None", 1), Standing::Ended);
    assert_eq!(super::standing("PENDING", "None", 0), Standing::Held);
}

#[test]
fn all_fields_of_a_job_are_read() {
    let job = &sample()[&47];
    assert_eq!(job.owner, Owner { uid: 5, gid: 60 });
    assert_eq!((job.reason.as_str(), job.node_count, job.nodes.len()), ("Dependency", 1, 0));
    assert_eq!((job.start, job.submitted, job.priority), (None, 1_795_320_395, 4_294_901_716));
    assert_eq!((job.account.as_str(), job.qos.as_str()), ("", ""));
    let job = &sample()[&43];
    assert_eq!((job.start, names(job)), (Some(1_795_320_576), vec!["n1", "n2"]));
    assert_eq!(sample()[&38].account, "acc");
}

#[test]
fn a_job_has_a_burst_buffer_of_ours_if_slurm_has_found_our_lines() {
    // Whether it has one, whether Slurm waits for its results, and whether for its input.
    let has_now = |state: &str, asked: &str, directives: &str| {
        let line = format!(
            "7|N/A|0|5|60|{state}|None|1||(null)|N/A|N/A|0:00|9|1|q|c|7|(null)|N/A|{directives}|{asked}|N/A|a|j|\n"
        );
        let mut queue = parse(line.as_bytes(), "|").unwrap();
        let job = queue.jobs.remove(0);
        (job.has_burst_buffer, job.waits_for_results, queue.staging_in.contains(&job.id.job))
    };
    let has = |state: &str, directives: &str| {
        let (has, waits, _) = has_now(state, "staging-out", directives);
        (has, waits)
    };
    let ours = "#RSA_DATA_IN=/a\n#RSA_DATA_OUT=/b";
    assert_eq!([has("PENDING", ours), has("STAGE_OUT", ours)], [(true, false), (true, true)]);
    for others in ["(null)", "#DW jobdw capacity=1GiB # #RSA_DATA_IN"] {
        assert_eq!(has("STAGE_OUT", others), (false, false), "{others}");
        assert!(!has_now("PENDING", "staging-in", others).2, "{others}");
    }
    for (state, asked, waits) in [
        ("PENDING", "staging-in", true),
        ("PENDING", "staged-in", false),
        ("PENDING", "pending", false),
        ("CANCELLED", "staging-in", false),
    ] {
        assert_eq!(has_now(state, asked, ours).2, waits, "{state} {asked}");
    }
}

#[test]
fn only_our_own_hold_is_marked_as_ours() {
    let jobs = sample();
    assert!(jobs[&45].held_for_input && jobs[&22].held_for_input);
    assert!(!jobs[&44].held_for_input && !jobs[&32].held_for_input);
}

#[test]
fn a_job_depends_on_what_is_still_in_the_queue() {
    let line = |number: u32, state: &str, priority: u32, dependency: &str| {
        format!(
            "{number}|N/A|0|5|60|{state}|None|1||(null)|N/A|N/A|0:00|1795320395|{priority}|(null)|(null)|{number}|{dependency}|N/A|(null)|(null)|N/A|(null)|j|\n"
        )
    };
    let on = |dependency: &str, state: &str| {
        let text = line(7, "PENDING", 0, dependency) + &line(5, state, 1, "(null)");
        parse(text.as_bytes(), "|").unwrap().jobs[0].dependent
    };
    for waits in ["PENDING", "RUNNING", "COMPLETING"] {
        assert!(on("afterok:5(unfulfilled)", waits), "{waits}");
        assert!(on("afterok:4(unfulfilled),afterany:5(unfulfilled)", waits), "{waits}");
        assert!(on("afterok:4(unfulfilled)?afterok:5_*(unfulfilled)", waits), "{waits}");
        assert_eq!(on("after:5(unfulfilled)", waits), waits == "PENDING", "{waits}");
    }
    assert!(on("afterburstbuffer:5(unfulfilled)", "RUNNING") && on("odd(unfulfilled)", "RUNNING"));
    for settled in ["(null)", "singleton", "afterok:4(failed)", "afterok:", ":", "afterok:99999999999"] {
        assert!(!on(settled, "RUNNING"), "{settled}");
    }
    assert!(!on("afterok:5(unfulfilled)", "COMPLETED"));
    let others = |dependency: &str, state: &str| {
        let text =
            line(7, "PENDING", 0, dependency) + &line(5, state, 1, "(null)") + &line(6, state, 1, "(null)");
        let numbers = parse(text.as_bytes(), "|").unwrap().jobs[0].depends_on.clone();
        numbers.iter().map(|number| number.0).collect::<Vec<_>>()
    };
    assert_eq!(others("afterok:5(unfulfilled),afterany:6_*(unfulfilled)", "RUNNING"), [5, 6]);
    assert_eq!(others("after:5(unfulfilled),afternotok:6(unfulfilled),afterok:4", "RUNNING"), [6]);
    assert!(others("afterok:5(unfulfilled)", "COMPLETED").is_empty());
}

#[test]
fn a_singleton_waits_for_its_namesakes() {
    let line = |job: u32, tasks: &str, uid: u32, state: &str, reason: &str, dependency: &str, name: &str| {
        format!(
            "{job}|{tasks}|0|{uid}|60|{state}|{reason}|1||(null)|N/A|N/A|0:00|9|1|q|c|{job}|{dependency}|N/A|(null)|(null)|N/A|a|{name}|\n"
        )
    };
    let singleton = |reason: &str| line(7, "N/A", 5, "PENDING", reason, "singleton(unfulfilled)", "one");
    let waits = |other: String, reason: &str| {
        parse((singleton(reason) + &other).as_bytes(), "|").unwrap().jobs[0].dependent
    };
    let on = |job: u32, uid: u32, state: &str, name: &str| {
        waits(line(job, "N/A", uid, state, "None", "(null)", name), "JobHeldAdmin")
    };
    assert!(on(6, 5, "PENDING", "one") && on(6, 5, "RUNNING", "one") && on(8, 5, "RUNNING", "one"));
    assert!(waits(line(6, "3-9", 5, "PENDING", "Priority", "(null)", "one"), "JobHeldAdmin"));
    assert!(!on(8, 5, "PENDING", "one") && !on(6, 5, "COMPLETED", "one") && !on(6, 5, "COMPLETING", "one"));
    assert!(!on(6, 6, "RUNNING", "one") && !on(6, 5, "RUNNING", "other"));
    // Of a job that is not held Slurm itself says whether it waits.
    let other = || line(6, "N/A", 6, "RUNNING", "None", "(null)", "one");
    assert!(waits(other(), "Dependency") && waits(other(), "DependencyNeverSatisfied"));
    assert!(!waits(other(), "Priority"));
}

#[test]
fn the_rest_of_an_array_is_waited_for_as_a_whole_and_a_list_that_is_cut_off_waits() {
    let depends = |dependency: &str| {
        let text = format!(
            "7|N/A|0|5|60|PENDING|JobHeldAdmin|1||(null)|N/A|N/A|0:00|9|0|q|c|7|{dependency}|N/A|(null)|(null)|N/A|a|j|\n\
             6|2-9|0|5|60|PENDING|Priority|1||(null)|N/A|N/A|0:00|9|1|q|c|6|(null)|N/A|(null)|(null)|N/A|a|j|\n"
        );
        let jobs = parse(text.as_bytes(), "|").unwrap().jobs;
        (jobs[0].dependent, jobs[0].depends_on.iter().map(|job| job.0).collect::<Vec<_>>())
    };
    assert_eq!(depends("afterok:6_*(unfulfilled)"), (true, vec![6]));
    assert_eq!(depends("afterok:6_1(unfulfilled)"), (false, vec![]));
    let clause = "afterok:1234567(unfulfilled),";
    let long = clause.repeat(MOST_DEPENDENCIES / clause.len() - 1);
    assert_eq!(depends(&long), (false, vec![]));
    // What is left of the last number is another one.
    let cut = format!("{long}{},afterok:6", "x".repeat(MOST_DEPENDENCIES - long.len() - 10));
    assert_eq!((cut.len(), depends(&cut)), (MOST_DEPENDENCIES, (true, vec![])));
}

#[test]
fn a_mark_is_that_of_one_life() {
    let marked = |restarts: u32, comment: &str| {
        let text = format!(
            "7|N/A|{restarts}|5|60|PENDING|JobHeldAdmin|1||(null)|N/A|N/A|0:00|1795320395|0|(null)|{comment}|7|(null)|N/A|(null)|(null)|N/A|(null)|j|\n"
        );
        parse(text.as_bytes(), "|").unwrap().jobs[0].held_for_input
    };
    assert!(marked(0, "ondeck:hold") && marked(2, "ondeck:hold:2 ondeck: waits"));
    assert!(!marked(1, "ondeck:hold") && !marked(0, "ondeck:hold:1") && !marked(1, "ondeck:hold:2"));
}

#[test]
fn a_requeued_job_is_a_new_life_once_the_old_one_has_ended() {
    let jobs = sample();
    for (number, restarts) in [(18, 0), (19, 0), (52, 0), (37, 0), (53, 1), (38, 1), (31, 1), (32, 1)] {
        assert_eq!(jobs[&number].id.restarts, restarts, "{number}");
    }
    assert_eq!((jobs[&19].start, names(&jobs[&19])), (None, vec!["n1"]));
}

#[test]
fn the_rest_of_an_array_is_left_out_and_a_single_element_is_not() {
    let jobs = sample();
    assert!(!jobs.contains_key(&46));
    assert!(jobs.contains_key(&49) && jobs.contains_key(&27));
    for (tasks, several) in
        [("7", false), ("7%1", false), ("1-2", true), ("1,5", true), ("0-8:2%3", true), ("N/A", false)]
    {
        let line = SAMPLE.lines().nth(8).unwrap().replacen("|N/A|", &format!("|{tasks}|"), 1);
        assert_eq!(parse(format!("{line}\n").as_bytes(), "|").unwrap().jobs.is_empty(), several, "{tasks}");
    }
}

#[test]
fn a_held_rest_of_an_array_is_told_with_its_next_element() {
    let rest = |tasks: &str, reason: &str, mark: &str| {
        let line = format!(
            "46|{tasks}|0|7|7|PENDING|{reason}|2||N/A|9|9|0:00|9|9|q|{mark}|46|(null)|N/A|(null)|(null)|N/A|a|j|\n"
        );
        parse(line.as_bytes(), "|").unwrap().held_arrays
    };
    for (tasks, next) in [("3-9", 3), ("0,5%2", 0), ("12-20:4", 12), ("7,9,11,...", 7)] {
        assert_eq!(
            rest(tasks, "JobHeldAdmin", "ondeck:hold"),
            [HeldArray { array: JobId(46), next }],
            "{tasks}"
        );
    }
    // As `squeue --array` prints it: a line for each element, with the number of their record.
    let line = |job: u32, task: u32| {
        format!(
            "{job}|{task}|0|7|7|PENDING|JobHeldAdmin|2||N/A|9|9|0:00|9|0|q|ondeck:hold|46|(null)|N/A|(null)|(null)|N/A|a|j|\n"
        )
    };
    let queue = parse((line(46, 4) + &line(46, 3) + &line(48, 2)).as_bytes(), "|").unwrap();
    assert_eq!(queue.held_arrays, [HeldArray { array: JobId(46), next: 3 }]);
    assert_eq!(queue.jobs.iter().map(|job| job.id.job.0).collect::<Vec<_>>(), [48]);
    assert_eq!(queue.elements[&JobId(48)], Element { array: JobId(46), task: 2 });
    // Another's hold, and none.
    assert_eq!(rest("3-9", "JobHeldAdmin", "(null)"), []);
    assert_eq!(rest("3-9", "Priority", "ondeck:hold"), []);
}

#[test]
fn a_rest_of_an_array_that_waits_for_another_job_is_told_apart_from_jobs() {
    let rests = |reason: &str, priority: u32, mark: &str, dependency: &str| {
        let text = format!(
            "46|3-9|0|7|7|PENDING|{reason}|2||N/A|9|9|0:00|9|{priority}|q|{mark}|46|{dependency}|N/A|(null)|(null)|N/A|a|j|\n\
             6|N/A|0|5|60|RUNNING|None|1|n1|(null)|9|9|0:01|9|1|q|c|6|(null)|N/A|(null)|(null)|N/A|a|j|\n"
        );
        let queue = parse(text.as_bytes(), "|").unwrap();
        assert_eq!(queue.jobs.iter().map(|job| job.id.job.0).collect::<Vec<_>>(), [6]);
        let told = |job: &QueuedJob| (job.id.job.0, job.depends_on.iter().map(|job| job.0).collect());
        queue
            .dependent_rests
            .iter()
            .inspect(|job| assert!(job.several))
            .map(told)
            .collect::<Vec<(u32, Vec<u32>)>>()
    };
    let open = "afterok:6(unfulfilled)";
    assert_eq!(rests("Dependency", 9, "(null)", open), [(46, vec![6])]);
    // Held already, by anybody; and of those who depend on nobody that is there.
    assert_eq!(rests("JobHeldAdmin", 0, "ondeck:hold", open), []);
    assert_eq!(rests("JobHeldUser", 0, "(null)", open), []);
    assert_eq!(rests("Priority", 9, "(null)", "(null)"), []);
    assert_eq!(rests("Dependency", 9, "(null)", "afterok:5(unfulfilled)"), []);
}

#[test]
fn an_array_of_which_no_element_has_a_record_of_its_own_is_one_job_and_pending_jobs_have_begin_times() {
    let line = |job: u32, tasks: &str, state: &str, begin: &str| {
        format!(
            "{job}|{tasks}|0|7|7|{state}|BeginTime|1||(null)|N/A|N/A|0:00|9|9|q|(null)|46|(null)|N/A|(null)|(null)|{begin}|a|j|\n"
        )
    };
    let queue = |text: String| parse(text.as_bytes(), "|").unwrap();
    let whole = queue(line(46, "0-9", "PENDING", "1795320999"));
    assert!(whole.jobs.is_empty() && whole.dependent_rests.is_empty());
    assert!(whole.whole_arrays.len() == 1 && whole.whole_arrays[0].several);
    assert_eq!(whole.begin_times.into_iter().collect::<Vec<_>>(), [(JobId(46), 1_795_320_999)]);
    let begun = queue(line(46, "1-9", "PENDING", "1795320999") + &line(47, "0", "RUNNING", "1795320000"));
    assert!(begun.whole_arrays.is_empty() && begun.begin_times.is_empty());
    let alone = line(5, "N/A", "PENDING", "1795320998").replace("|46|", "|5|");
    let later = queue(alone + &line(6, "N/A", "PENDING", "N/A").replace("|46|", "|6|"));
    assert_eq!(later.begin_times.into_iter().collect::<Vec<_>>(), [(JobId(5), 1_795_320_998)]);
}

#[test]
fn an_element_is_told_with_its_array() {
    let elements = parse(SAMPLE.as_bytes(), "|").unwrap().elements;
    let known: Vec<_> =
        elements.into_iter().map(|(job, Element { array, task })| (job.0, array.0, task)).collect();
    assert_eq!(known, [(27, 27, 3), (49, 46, 1)]);
}

#[test]
fn a_component_of_a_heterogeneous_job_is_told_with_its_job() {
    let jobs = sample();
    let components = jobs.values().filter_map(|job| Some((job.id.job.0, job.component_of?.0)));
    assert_eq!(components.collect::<Vec<_>>(), [(61, 61), (62, 61)]);
}

#[test]
fn a_job_that_is_not_understood_is_never_left_out() {
    let line =
        "43|N/A|0|7|7|PENDING|Priority|2||n[1-2]|9|9|0:00|9|9|q|c|43|(null)|N/A|(null)|(null)|N/A|a|j|\n";
    assert_eq!(parse(line.as_bytes(), "|").unwrap().jobs.len(), 1);
    for (part, wrong) in [
        ("43|N/A", "x|N/A"),
        ("|0|7", "|-1|7"),
        ("n[1-2]", "n[1-"),
        ("n[1-2]", "a/b"),
        ("|N/A|(null)|(null)|N/A|a|j|", "|x|(null)|(null)|N/A|a|j|"),
        ("|q|", "|"),
    ] {
        let result = parse(line.replace(part, wrong).as_bytes(), "|");
        assert!(matches!(result, Err(WlmError::Malformed { .. })), "{wrong}: {result:?}");
    }
}

#[test]
fn a_long_queue_is_read() {
    let line = SAMPLE.lines().nth(8).unwrap();
    let text: String = (0..10_000).map(|n| format!("{n}{}\n", &line[2..])).collect();
    let begin = Instant::now();
    assert_eq!(parse(text.as_bytes(), "|").unwrap().jobs.len(), 10_000);
    println!("10000 jobs, {} bytes: {:?}", text.len(), begin.elapsed());
}
