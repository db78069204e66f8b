//! Killing things for real, at random moments: nothing that was promised is missing afterwards.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use scene::{Ran, Scene, Who, everyone};

const KILLS: u32 = 100;

/// Moments spread over `0..most` without a pattern, the same in every run of the test.
fn moments(most: Duration) -> impl Iterator<Item = Duration> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        most.mul_f64((state % 10_000) as f64 / 10_000.0)
    })
}

fn sleep_until(moment: Instant) {
    // Not a wait for a state: the moment itself is what is tested.
    std::thread::sleep(moment.saturating_duration_since(Instant::now()));
}

#[test]
fn a_stage_killed_at_100_moments_leaves_only_whole_files_and_resumes_each_time() {
    let scene = Scene::new(Who::Me);
    let source = scene.dir("source");
    let mut total = 0;
    for dir in 0..10 {
        fs::create_dir(source.join(format!("d{dir}"))).unwrap();
        for file in 0..20_usize {
            let content = vec![(dir * 20 + file) as u8 | 1; file * 3_000];
            total += content.len();
            fs::write(source.join(format!("d{dir}/f{file}")), content).unwrap();
        }
    }
    // Whose files have no ACL, although the directory would hand one down.
    for dir in ["d0/sub", "d3/sub", "d7/sub"] {
        let dir = source.join(dir);
        fs::create_dir(&dir).unwrap();
        for file in 0..5 {
            fs::write(dir.join(format!("f{file}")), vec![1; 1_000]).unwrap();
            total += 1_000;
        }
        let made = Command::new("setfacl").args(["-d", "-m", "u:12345:rwx,m::rwx"]).arg(&dir).status();
        assert!(made.unwrap().success(), "setfacl: apt-get install acl");
    }
    fs::write(source.join("large"), vec![7; 2_000_000]).unwrap();
    total += 2_000_000;
    // Some files are there already in an older version, so that both ways of making a name are met.
    let prepare = |target: &Path| {
        let _ = fs::remove_dir_all(target);
        fs::create_dir_all(target.join("d3")).unwrap();
        fs::write(target.join("d3/f5"), "older").unwrap();
        fs::write(target.join("large"), "older").unwrap();
    };
    let target = scene.path("target");
    let arguments =
        ["stage", "--threads", "2", "--bandwidth", "40MiB/s", "--manifest", "m", "source", "target"];
    prepare(&target);
    let (mut killed, mut finished) = (0, 0);
    for moment in moments(Duration::from_millis(130)) {
        if killed == KILLS {
            break;
        }
        let began = Instant::now();
        let mut child = scene.ondeck(&arguments).stdout(Stdio::null()).spawn().unwrap();
        sleep_until(began + moment);
        child.kill().unwrap();
        let status = child.wait().unwrap();
        killed += u32::from(status.code().is_none());
        check_whole(&source, &target);
        if status.success() {
            // The resumed copies have added up to a whole one: begin anew.
            finished += 1;
            assert_eq!(count(&target), count(&source));
            fs::remove_file(scene.path("m")).unwrap();
            prepare(&target);
        }
    }
    assert!(
        finished >= 3,
        "resuming makes progress: {finished} copies came to their end between {killed} kills"
    );
    Ran::of(scene.ondeck(&["stage", "--manifest", "m", "--verify", "source", "target"]).output().unwrap())
        .assert_code(0);
    check_whole(&source, &target);
    assert_eq!(count(&target), count(&source), "nothing is left over, of {total} bytes");
}

fn count(dir: &Path) -> usize {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            1 + if entry.file_type().unwrap().is_dir() { count(&entry.path()) } else { 0 }
        })
        .sum()
}

/// Every file under its own name is the source's or the older one, whole, and without an ACL.
fn check_whole(source: &Path, target: &Path) {
    let Ok(entries) = fs::read_dir(target) else { return };
    for entry in entries {
        let entry = entry.unwrap();
        let name = entry.file_name();
        if name.to_string_lossy().ends_with(".ondeck-partial") {
            continue;
        }
        let from = source.join(&name);
        if entry.file_type().unwrap().is_dir() {
            check_whole(&from, &entry.path());
        } else {
            let content = fs::read(entry.path()).unwrap();
            assert!(content == b"older" || content == fs::read(&from).unwrap(), "{} is torn", from.display());
            let acl = rustix::fs::getxattr(entry.path(), "system.posix_acl_access", &mut [0_u8; 0][..]);
            assert!(acl.is_err(), "{} has got an ACL", from.display());
        }
    }
}

#[test]
fn a_run_killed_at_100_moments_loses_no_result_of_a_program_that_was_started() {
    let (mut started, mut not_started) = (0, 0);
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("in");
        scene.file("in/a", vec![1; 1_000_000]);
        scene.dir("out");
        scene.file("out/old", "old");
        scene.script(
            "program",
            "#!/bin/sh\ntouch started\nfor i in 1 2 3 4 5 6 7 8; do echo $i > out/f$i; sleep 0.003; done\nrm out/old\n",
        );
        for moment in moments(Duration::from_millis(70)).take(KILLS as usize / everyone().len()) {
            let _ = fs::remove_file(scene.path("started"));
            for number in 1..=8 {
                let _ = fs::remove_file(scene.path(&format!("out/f{number}")));
            }
            scene.file("out/old", "old");
            let began = Instant::now();
            let mut child = scene
                .ondeck(&[
                    "run",
                    "--data-in",
                    "in",
                    "--data-out",
                    "out",
                    "--size",
                    "64MiB",
                    "--",
                    "./program",
                ])
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            sleep_until(began + moment);
            child.kill().unwrap();
            child.wait().unwrap();
            scene.wait_for_end();
            let results: Vec<String> =
                scene.list("out").into_iter().filter(|name| name.starts_with('f')).collect();
            if scene.path("started").exists() {
                started += 1;
                assert_eq!(results.len(), 8, "killed after {moment:?}: {results:?}");
                assert_eq!(
                    scene.list("out").len(),
                    8,
                    "what the program deleted is gone, and nothing else is there: {:?} killed after {moment:?}",
                    scene.list("out")
                );
                for number in 1..=8 {
                    assert_eq!(scene.read(&format!("out/f{number}")), format!("{number}\n"));
                }
            } else {
                not_started += 1;
                assert_eq!(scene.list("out"), ["old"], "a run that did not begin changes nothing");
            }
        }
        for report in scene.state() {
            fs::remove_file(report).unwrap();
        }
    }
    assert!(started >= 10, "{started} programs were started, {not_started} were not");
}
