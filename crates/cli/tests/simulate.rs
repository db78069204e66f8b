//! `ondeck simulate`: logs that are right and wrong, every form of the answer, and the blocks of docs/simulate.md.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use scene::{Ran, Scene, Who, wait_until};

/// Four jobs on a machine of eight nodes, all submitted at once: figure 2.1 of the thesis.
const FOUR: &str = "; MaxNodes: 8
1 0 -1 3000 8 -1 -1 8 3600 -1 1 1 1 -1 -1 -1 -1 -1
2 0 -1 3000 8 -1 -1 8 3600 -1 1 1 1 -1 -1 -1 -1 -1
3 0 -1 3000 8 -1 -1 8 3600 -1 1 1 1 -1 -1 -1 -1 -1
4 0 -1 3000 8 -1 -1 8 3600 -1 1 1 1 -1 -1 -1 -1 -1
";

fn with_log(text: &str) -> Scene {
    let scene = Scene::new(Who::Me);
    scene.file("jobs.swf", text);
    scene
}

#[test]
fn every_form_of_the_answer_has_the_same_numbers() {
    let scene = with_log(FOUR);
    let options =
        ["simulate", "jobs.swf", "--rsa-nodes", "4", "--wait", "hold", "--disk-bandwidth", "50MB/s"];
    let files = ["--csv", "out.csv", "--html", "out.html", "--gantt", "out.svg", "--gantt-time", "0s,3h"];
    let ran = scene.run(&[&options[..], &files].concat());
    ran.assert_code(0);
    assert!(
        ran.out.contains("4 RSA nodes come nearest: an hour of them saves 0.38 node-hours"),
        "{}",
        ran.out
    );
    let json = scene.run(&[&options[..], &["--json"]].concat());
    json.assert_code(0);
    let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    let net = json["results"][1]["saved"]["net"]["mean"].as_f64().unwrap();
    assert_eq!(json["results"][1]["point"]["nodes"], 4);
    assert!(ran.out.contains(&format!("{net:.0}")), "{net}: {}", ran.out);
    let csv = scene.read("out.csv");
    let row = csv.lines().find(|line| line.starts_with("accelerated,4,")).unwrap();
    assert!(row.contains(&format!(",{net:.6},")), "{net}: {row}");
    let columns: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
    assert!(columns.iter().all(|count| *count == columns[0]), "{csv}");
    // The page needs nothing but itself, and has a table beside its pictures.
    let html = scene.read("out.html");
    assert_eq!((html.matches("<svg").count(), html.matches("<table>").count()), (2, 2));
    for from_elsewhere in ["<script", "src=", "href=", "url(", "@import"] {
        assert!(!html.contains(from_elsewhere), "{from_elsewhere}");
    }
    let svg = scene.read("out.svg");
    assert!(svg.starts_with("<svg") && svg.contains("job 3: staging in"), "{svg}");
    // All of it as JSON, whatever is drawn.
    scene.run(&[&options[..], &["--gantt", "out.json", "--gantt-time", "0s,1m"]].concat()).assert_code(0);
    let chart: serde_json::Value = serde_json::from_str(&scene.read("out.json")).unwrap();
    assert_eq!((&chart["compute_nodes"], &chart["rsa_nodes"]), (&8.into(), &4.into()));
    let staged = chart["rsa"].as_array().unwrap().iter().filter(|span| span["phase"] == "staging_in");
    assert_eq!(staged.map(|span| span["job"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn the_number_of_threads_and_how_the_log_comes_make_no_difference() {
    let scene = with_log(FOUR);
    let options = ["--rsa-nodes", "2,4", "--io", "kopanski", "--seeds", "3", "--json"];
    let of = |more: &[&str]| {
        let ran = scene.run(&[&["simulate", "jobs.swf"], &options[..], more].concat());
        ran.assert_code(0);
        ran.out
    };
    let one = of(&["--threads", "1"]);
    assert_eq!(of(&["--threads", "2"]), one);
    assert_eq!(of(&["--threads", "7", "--from", "swf"]), one);
    let mut child = scene
        .ondeck(&[&["simulate", "-"], &options[..]].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(FOUR.as_bytes()).unwrap();
    let ran = Ran::of(child.wait_with_output().unwrap());
    ran.assert_code(0);
    assert_eq!(ran.out, one);
}

#[test]
fn what_sacct_prints_is_read() {
    let scene = Scene::new(Who::Me);
    scene.file(
        "log",
        "JobIDRaw|Submit|Start|End|NNodes|Timelimit|UID\n\
         1|2026-10-01T00:00:00|2026-10-01T00:00:05|2026-10-01T02:00:05|4|03:00:00|1000\n\
         1.batch|2026-10-01T00:00:05|2026-10-01T00:00:05|2026-10-01T02:00:05|1||\n\
         2|2026-10-01T00:10:00|2026-10-01T02:00:05|2026-10-01T03:00:05|4|03:00:00|1000\n",
    );
    let ran = scene.run(&["simulate", "log", "--rsa-nodes", "2"]);
    ran.assert_code(0);
    assert!(ran.out.starts_with("2 jobs in 0:10:00 on 4 nodes"), "{}", ran.out);
    assert!(ran.out.contains("1 parts of others"), "{}", ran.out);
}

#[test]
fn what_is_wrong_is_named() {
    let scene = with_log(&format!("{FOUR}5 0 -1 many 8 -1 -1 8 3600 -1 1 1 1 -1 -1 -1 -1 -1\n"));
    let refused = |arguments: &[&str], code, words: &[&str]| {
        let ran = scene.run(&[&["simulate"], arguments].concat());
        ran.assert_code(code);
        for word in words {
            assert!(ran.err.contains(word), "{arguments:?}: no {word} in {}", ran.err);
        }
        assert_eq!(ran.out, "");
    };
    refused(
        &["--from", "journal", "nowhere"],
        1,
        &["nowhere/journal.sqlite: No such file or directory (os error 2)\n"],
    );
    refused(
        &["jobs.swf"],
        1,
        &["jobs.swf, as --from swf", "line 6, field 4 (run time): 'many' is no number"],
    );
    refused(&["gone.swf"], 1, &["cannot open gone.swf", "No such file"]);
    refused(&["jobs.swf", "--from", "sacct"], 1, &["line 1", "there is no JobIDRaw or JobID; use: sacct"]);
    scene.file("jobs.swf", FOUR);
    refused(
        &["jobs.swf", "--nodes", "4"],
        1,
        &["job 1 has 8 nodes, and the machine has 4; use --nodes 8 or more"],
    );
    refused(&["jobs.swf", "--io", "guess"], 1, &["--io guess: no model of this name (none, bursts"]);
    scene.file("io.csv", "job,read,written\n1,1GB,2GB\n1,1GB,2GB\n");
    refused(&["jobs.swf", "--io", "io.csv"], 1, &["io.csv, line 3: job 1 stands there twice"]);
    scene.file("io.csv", "1,1GB,lots\n");
    refused(&["jobs.swf", "--io", "io.csv"], 1, &["io.csv, line 1, written", "lots"]);
    refused(&["jobs.swf", "--csv", "no/where.csv"], 1, &["cannot write no/where.csv"]);
    refused(&["jobs.swf", "--gantt-time", "noon"], 2, &["write from when, and how long"]);
    refused(&["jobs.swf", "--background", "1"], 2, &["a share is a number from 0 to less than 1"]);
    refused(&["jobs.swf", "--depth", "0"], 2, &["0 is not in 1.."]);
    refused(&["jobs.swf", "--horizon", "soon"], 2, &["`soon` is not a duration", "90s, 5m or 1h30m"]);
    refused(
        &["jobs.swf", "--rescale", "0.9"],
        1,
        &["all jobs are submitted at once, so nothing can be moved"],
    );
    // Neither the log nor another answer is written over.
    refused(&["jobs.swf", "--csv", "jobs.swf"], 1, &["jobs.swf would be written over jobs.swf"]);
    refused(&["jobs.swf", "--csv", "out", "--html", "out"], 1, &["out would be written over out"]);
    refused(&["jobs.swf", "--csv", "-"], 1, &["`-` is no file to write"]);
    // Nor anything else that is read.
    scene.file("ondeck.toml", "nodes = [\"r1\"]\n");
    let over = ["jobs.swf", "--config", "ondeck.toml", "--csv", "ondeck.toml"];
    refused(&over, 1, &["ondeck.toml would be written over ondeck.toml"]);
    scene.file("io.csv", "1,1GB,1GB\n");
    let over = ["jobs.swf", "--io", "io.csv", "--html", "io.csv"];
    refused(&over, 1, &["io.csv would be written over io.csv"]);
    let none = ["jobs.swf", "--rsa-nodes", "0", "--gantt", "out.json"];
    refused(&none, 2, &["--gantt draws RSA nodes, and --rsa-nodes names none"]);
    refused(&["jobs.swf", "--checkpoint", "1.1"], 2, &["a share is a number from 0 to 1"]);
    assert_eq!(scene.read("jobs.swf"), FOUR);
    // A log that can't be read leaves no empty file.
    refused(&["gone.swf", "--csv", "new.csv"], 1, &["cannot open gone.swf"]);
    assert!(!scene.path("new.csv").exists());
    scene.file("empty", "");
    refused(&["empty"], 1, &["empty, as --from swf: no job in it has run; it has no line of a job"]);
}

#[test]
fn what_can_not_be_drawn_costs_nobody_the_table() {
    let jobs: String = (1..8_000)
        .map(|number| format!("{number} {} -1 60 1 -1 -1 1 60 -1 1 1 1 -1 -1 -1 -1 -1\n", number * 20))
        .collect();
    let scene = with_log(&format!("; MaxNodes: 8\n{jobs}"));
    let ran = scene.run(&[
        "simulate",
        "jobs.swf",
        "--rsa-nodes",
        "2",
        "--gantt",
        "out.svg",
        "--gantt-time",
        "0s,900h",
    ]);
    ran.assert_code(1).assert_says("--gantt-time").assert_says("take a shorter time");
    assert!(ran.out.contains("2 RSA"), "{}", ran.out);
    // Jobs of a minute that write a tenth of a node's memory do more I/O than they have time for, and it is said.
    assert!(ran.out.contains("of 7999 jobs (100 %) does not fit into their run time"), "{}", ran.out);
}

#[test]
fn what_was_measured_says_how_much_of_the_log_it_is_of() {
    let scene = with_log(FOUR);
    scene.file("io.csv", "job,read,written\n1,1GB,2GB\n777,1TB,1TB\n");
    let ran = scene.run(&["simulate", "jobs.swf", "--io", "io.csv", "--rsa-nodes", "2"]);
    ran.assert_code(0);
    assert!(ran.out.contains("1 of the 4 jobs of the log are in it"), "{}", ran.out);
    let ran = scene.run(&["simulate", "jobs.swf", "--io", "."]);
    ran.assert_code(1)
        .assert_says("the journal of `ondeck serve`, .: can't use ./journal.sqlite: No such file");
}

#[test]
fn what_a_site_has_configured_is_what_decides() {
    let scene = with_log(FOUR);
    scene.file("ondeck.toml", "nodes = [\"r1\"]\n[scheduler]\nproportion = 16\n");
    let ran = scene.run(&["simulate", "jobs.swf", "--rsa-nodes", "4", "--config", "ondeck.toml"]);
    ran.assert_code(0);
    assert!(ran.out.contains("PROPORTION") && ran.out.contains("No size pays"), "{}", ran.out);
}

#[test]
fn an_interrupted_study_prints_what_is_finished() {
    // So many that it takes minutes; the first simulation is done in a moment.
    let jobs: String = (1..5_000)
        .map(|number| {
            format!(
                "{number} {} -1 {} 4 -1 -1 4 9000 -1 1 1 1 -1 -1 -1 -1 -1\n",
                number * 400,
                600 + number % 800
            )
        })
        .collect();
    let scene = with_log(&format!("; MaxNodes: 16\n{jobs}"));
    let options = ["--rsa-nodes", "2,3,4,5,6,7,8", "--threads", "1", "--csv", "out.csv"];
    let child = scene
        .ondeck(&[&["simulate", "jobs.swf", "--seeds", "1"], &options[..]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The handler is there once the first simulation goes on, which takes processor time.
    let stat = format!("/proc/{}/stat", child.id());
    wait_until("it simulates", || {
        let stat = fs::read_to_string(&stat).unwrap();
        let ticks: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        ticks[11].parse::<u64>().unwrap() > 100
    });
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let ran = Ran::of(child.wait_with_output().unwrap());
    ran.assert_code(130);
    assert!(ran.err.contains("interrupted; ") && ran.err.contains(" of 15 machines"), "{}", ran.err);
    let mut lines = ran.out.lines();
    let (first, second) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    assert!(first.starts_with("Interrupted: ") && second.starts_with("4999 jobs in "), "{}", ran.out);
    assert!(lines.last().is_some_and(|last| last == first), "{}", ran.out);
    let csv = scene.read("out.csv");
    assert!(csv.contains("\nalone,0,"), "what is finished is there: {csv}");
}

#[test]
fn the_document_says_what_is_said() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/simulate.md");
    let page = fs::read_to_string(page).unwrap();
    let blocks: Vec<&str> = page.split("```").skip(1).step_by(2).collect();
    let scene = Scene::new(Who::Me);
    let log = blocks.iter().find_map(|block| block.strip_prefix("swf\n")).unwrap();
    scene.file("four.swf", log);
    let mut typed = 0;
    for block in blocks.iter().filter_map(|block| block.strip_prefix("console\n")) {
        let (command, said) = block.strip_prefix("$ ondeck ").unwrap().split_once('\n').unwrap();
        let words: Vec<&str> = command.split_whitespace().collect();
        let ran = scene.run(&words);
        ran.assert_code(0);
        assert_eq!(ran.out + &ran.err, said, "{command}");
        typed += 1;
    }
    assert!(typed >= 2);
}
