//! Killing the keeper, the process that holds a run's results.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::io::BufRead;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant, SystemTime};

use scene::{Ran, Scene, Who, everyone, mode_of, wait_until};

/// The processes that a run's command has started and that are Ondeck's own.
fn keeper_of(command: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{command}/task/{command}/children")).ok()?;
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| stat.contains("(ondeck") && !stat.contains(") Z"))
    })
}

fn kill(pid: u32) {
    // SAFETY: a signal to a process of this test's own.
    unsafe { libc::kill(pid as i32, libc::SIGKILL) };
}

fn wait_for_keeper(command: u32) -> u32 {
    let mut found = None;
    wait_until("the keeper", || {
        found = keeper_of(command);
        found.is_some()
    });
    found.unwrap()
}

fn start(scene: &Scene, options: &[&str], script: &str) -> Child {
    let run = scene.start(&[&["run", "--report", "report"], options, &["--", "sh", "-c", script]].concat());
    wait_until("the program", || scene.path("started").exists());
    run
}

/// Attaches to the one run that there is.
fn watch(scene: &Scene) -> (Child, std::io::Lines<impl BufRead>) {
    let id = scene.state()[0].file_name().unwrap().to_string_lossy().into_owned();
    let mut watching = scene.start(&["run", "--resume", &id, "--json"]);
    let events = std::io::BufReader::new(watching.stderr.take().unwrap()).lines();
    (watching, events)
}

fn end(scene: &Scene, run: Child) -> Ran {
    scene.file("go", "");
    let ran = Ran::of(run.wait_with_output().unwrap());
    scene.wait_for_end();
    ran
}

const WAIT: &str = "touch started; while ! test -e go; do sleep 0.02; done";

#[test]
fn a_keeper_killed_while_the_program_runs_is_replaced_and_the_program_does_not_notice() {
    for who in everyone() {
        for how in ["overlay", "copy"] {
            let scene = Scene::new(who);
            scene.dir("out");
            for name in ["changed", "gone", "same", "theirs"] {
                scene.file(&format!("out/{name}"), name);
            }
            let script = format!(
                "echo early > out/early; rm out/gone; echo mine > out/theirs; cat > /dev/null; {WAIT}
                 echo more >> out/changed; sleep 1000 > /dev/null 2>&1 & echo late > out/late; exit 6"
            );
            let run = start(&scene, &["--data-out", "out", "--existing", how], &script);
            kill(wait_for_keeper(run.id()));
            scene.file("out/theirs", "theirs, later");
            let ran = end(&scene, run);
            ran.assert_code(6).assert_says("this command takes its place").assert_says("1 process behind");
            let names = scene.list("out");
            assert_eq!(names.len(), 6, "{names:?}");
            for (name, text) in [
                ("early", "early\n"),
                ("late", "late\n"),
                ("changed", "changedmore\n"),
                ("theirs", "theirs, later"),
                ("same", "same"),
            ] {
                assert_eq!(scene.read(&format!("out/{name}")), text);
            }
            assert!(names.iter().any(|name| name.starts_with("theirs.ondeck-")));
            let report = scene.report("report");
            assert_eq!(
                (&report["results_on_disk"], &report["program"]["exit_code"]),
                (&true.into(), &6.into())
            );
            scene.assert_clean();
        }
    }
}

#[test]
fn what_a_killed_keeper_has_copied_already_is_known_to_the_next_one() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let script = format!(
        "echo 1 > out/changed; echo 1 > out/deleted; mkdir out/dir; echo 1 > out/dir/x; {WAIT}
         echo 2 > out/changed; rm -r out/deleted out/dir"
    );
    let run = start(&scene, &["--data-out", "out", "--copy-out-interval", "1s"], &script);
    wait_until("the copies", || {
        ["changed", "deleted", "dir/x"].iter().all(|name| scene.path(&format!("out/{name}")).exists())
    });
    kill(wait_for_keeper(run.id()));
    end(&scene, run).assert_code(0);
    assert_eq!(scene.list("out"), ["changed"]);
    assert_eq!(scene.read("out/changed"), "2\n");
    scene.assert_clean();
}

#[test]
fn signals_and_orders_reach_the_one_who_took_the_place_of_a_keeper() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let script = format!("trap 'echo asked > out/asked; exit 9' TERM; {WAIT}");
    let run = start(&scene, &["--data-out", "out", "--size", "16MiB"], &script);
    let (mut watching, mut events) = watch(&scene);
    // Each keeper greets with the phase.
    let mut greeted = || events.by_ref().any(|line| line.unwrap().contains("\"phase\""));
    assert!(greeted());
    kill(wait_for_keeper(run.id()));
    assert!(greeted());
    assert!(scene.run(&["run", "--list"]).out.contains("the program runs"));
    // SAFETY: a signal to our own child.
    unsafe { libc::kill(run.id() as i32, libc::SIGTERM) };
    Ran::of(run.wait_with_output().unwrap()).assert_code(9);
    assert!(events.last().unwrap().unwrap().contains("finished"));
    assert_eq!(watching.wait().unwrap().code(), Some(9));
    assert_eq!(scene.read("out/asked"), "asked\n");
    scene.wait_for_end();
    scene.assert_clean();
}

#[test]
fn one_who_watches_hears_the_end_from_a_new_keeper_however_late_he_reads() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let run = start(&scene, &["--data-out", "out", "--size", "16MiB"], WAIT);
    let (mut watching, mut events) = watch(&scene);
    let mut greeted = || events.by_ref().any(|line| line.unwrap().contains("\"phase\""));
    assert!(greeted());
    kill(wait_for_keeper(run.id()));
    assert!(greeted(), "by the command, which stands in");
    // SAFETY: a signal to our own child.
    unsafe { libc::kill(watching.id() as i32, libc::SIGSTOP) };
    scene.file("go", "");
    Ran::of(run.wait_with_output().unwrap()).assert_code(0);
    wait_until("the end", || scene.state().iter().all(|path| !path.is_dir()));
    // SAFETY: as above.
    unsafe { libc::kill(watching.id() as i32, libc::SIGCONT) };
    assert!(events.last().unwrap().unwrap().contains("finished"));
    assert_eq!(watching.wait().unwrap().code(), Some(0));
    scene.wait_for_end();
    scene.assert_clean();
}

#[test]
fn a_keeper_killed_in_the_stage_out_is_replaced_as_often_as_need_be() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        let script = format!("head -c 6000000 /dev/urandom > out/big; cp out/big big; {WAIT}; exit 3");
        let options = ["--data-out", "out", "--bandwidth", "3MiB/s"];
        let run = start(&scene, &options, &script);
        scene.file("go", "");
        for _ in 0..3 {
            wait_until("the stage-out", || {
                scene.state().iter().any(|dir| {
                    fs::read_to_string(dir.join("state")).is_ok_and(|state| state.contains("staging out"))
                        && scene.list("out").iter().any(|name| name.contains("partial"))
                })
            });
            kill(wait_for_keeper(run.id()));
        }
        end(&scene, run).assert_code(3);
        assert_eq!(scene.list("out"), ["big"]);
        assert!(fs::read(scene.path("out/big")).unwrap() == fs::read(scene.path("big")).unwrap());
        scene.assert_clean();
    }
}

#[test]
fn results_that_are_held_outlive_a_kill_of_whoever_holds_them() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        scene.script("save.sh", "#!/bin/sh\ntest -e allowed || exit 5\ncp -r $1/. $2\n");
        let options = ["--data-out", "out", "--stage-out", "save.sh", "--report", "report"];
        let ran = scene.run_shell(&options, "echo x > out/x; exit 2");
        ran.assert_code(122);
        let reach = ran.err.split("read at ").nth(1).unwrap().split_whitespace().next().unwrap();
        let reach = reach.trim_end_matches('.').to_owned();
        let guard: u32 = reach.split('/').nth(2).unwrap().parse().unwrap();
        let id = scene.report("report")["id"].as_str().unwrap().to_owned();
        let holds = || scene.run(&["run", "--list"]).out.contains("holds results");
        for _ in 0..3 {
            let holder = wait_for_keeper(guard);
            kill(holder);
            wait_until("another holder", || keeper_of(guard).is_some_and(|now| now != holder));
            wait_until("its answer", holds);
            assert_eq!(fs::read_to_string(format!("{reach}/x")).unwrap(), "x\n");
            scene.run(&["run", "--resume", &id]).assert_code(122);
        }
        // The one that only waits for the other.
        kill(guard);
        assert!(holds());
        scene.file("allowed", "");
        scene.run(&["run", "--resume", &id]).assert_code(2);
        assert_eq!(scene.read("out/x"), "x\n");
        scene.wait_for_end();
        scene.assert_clean();
    }
}

#[test]
fn where_the_results_are_is_told_when_the_command_and_its_keeper_were_both_killed() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        let script = format!("echo $$ > out/pid; echo x > out/x; echo $$ > pid; {WAIT}");
        let mut run = start(&scene, &["--data-out", "out"], &script);
        let keeper = wait_for_keeper(run.id());
        run.kill().unwrap();
        run.wait().unwrap();
        kill(keeper);
        let mut listed = String::new();
        wait_until("the end of the keeper", || {
            listed = scene.run(&["run", "--list"]).out;
            listed.contains("its keeper was killed")
        });
        let place = listed.split("copied from ").nth(1).unwrap().trim();
        assert_eq!(fs::read_to_string(format!("{place}/data0/x")).unwrap(), "x\n");
        let id = scene.state()[0].file_name().unwrap().to_string_lossy().into_owned();
        scene.run(&["run", "--resume", &id]).assert_code(125).assert_says("the keeper of run");
        scene.file("go", "");
        wait_until("the end of the program", || {
            scene.run(&["run", "--list"]).out.contains("its RAM disk is gone")
        });
        assert_eq!(scene.run(&["run", "--list"]).out, "no runs\n");
        scene.assert_clean();
    }
}

#[test]
fn a_keeper_killed_before_the_program_was_started_has_changed_nothing() {
    let scene = Scene::new(Who::User);
    scene.dir("in");
    scene.file("in/big", vec![1; 20 << 20]);
    scene.dir("out");
    let run = scene.start(&[
        "run",
        "--data-in",
        "in",
        "--data-out",
        "out",
        "--bandwidth",
        "2MiB/s",
        "--",
        "touch",
        "ran",
    ]);
    wait_until("the stage-in", || scene.state().iter().any(|path| path.join("state").exists()));
    kill(wait_for_keeper(run.id()));
    end(&scene, run).assert_code(125).assert_says("before the program was started");
    assert!(!scene.path("ran").exists());
    scene.assert_clean();
}

#[test]
fn children_that_the_command_had_before_are_not_its_own_to_end() {
    let scene = Scene::new(Who::Me);
    scene.dir("out");
    let command = format!(
        "(sleep 1; echo alive > alive) & exec $0 run --data-out out -- sh -c '{WAIT}; echo x > out/x'"
    );
    let ondeck = scene.path("ondeck");
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &command]).arg(ondeck).current_dir(scene.dir.path());
    shell.env("ONDECK_STATE_DIR", scene.path("state")).env_remove("SLURM_JOB_ID");
    let run = shell.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the program", || scene.path("started").exists());
    kill(wait_for_keeper(run.id()));
    fs::write(scene.path("go"), "").unwrap();
    Ran::of(run.wait_with_output().unwrap()).assert_code(0);
    assert_eq!(scene.read("out/x"), "x\n");
    wait_until("the other child's end", || scene.path("alive").exists());
}

/// Moments spread over `0..most` without a pattern, the same in every run of the test.
fn moments(most: Duration) -> impl Iterator<Item = Duration> {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        most.mul_f64((state % 10_000) as f64 / 10_000.0)
    })
}

#[test]
fn a_keeper_killed_at_100_moments_loses_no_result_of_a_program_that_was_started() {
    const KILLS: usize = 100;
    let (mut started, mut not_started, mut replaced) = (0, 0, 0);
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("in");
        scene.file("in/a", vec![1; 1_000_000]);
        scene.dir("out");
        scene.script(
            "program",
            "#!/bin/sh\ntouch started\nfor i in 1 2 3 4 5 6 7 8; do echo $i > out/f$i; sleep 0.003; done\nrm out/old\nexit 5\n",
        );
        for (number, moment) in moments(Duration::from_millis(90)).take(KILLS / everyone().len()).enumerate()
        {
            let _ = fs::remove_file(scene.path("started"));
            for number in 1..=8 {
                let _ = fs::remove_file(scene.path(&format!("out/f{number}")));
            }
            scene.file("out/old", "old");
            let how = ["overlay", "copy"][number % 2];
            let began = Instant::now();
            let run = scene.start(&[
                "run",
                "--data-in",
                "in",
                "--data-out",
                "out",
                "--existing",
                how,
                "--size",
                "64MiB",
                "--",
                "./program",
            ]);
            // Not a wait for a state: the moment itself is what is tested.
            std::thread::sleep(moment.saturating_sub(began.elapsed()));
            if let Some(keeper) = keeper_of(run.id()) {
                kill(keeper);
            }
            let ran = Ran::of(run.wait_with_output().unwrap());
            scene.wait_for_end();
            replaced += u32::from(ran.err.contains("takes its place"));
            if scene.path("started").exists() {
                started += 1;
                ran.assert_code(5);
                let names = scene.list("out");
                assert_eq!(
                    names,
                    ["f1", "f2", "f3", "f4", "f5", "f6", "f7", "f8"],
                    "killed after {moment:?}: {ran:?}"
                );
                for number in 1..=8 {
                    assert_eq!(scene.read(&format!("out/f{number}")), format!("{number}\n"));
                }
            } else {
                not_started += 1;
                ran.assert_code(125).assert_says("nothing was changed");
                assert_eq!(scene.list("out"), ["old"], "a run that did not begin changes nothing");
            }
            scene.assert_clean();
        }
    }
    assert!(
        replaced >= 10,
        "{replaced} keepers were replaced; {started} programs started, {not_started} not"
    );
}

/// When a directory was written last.
fn written_at(scene: &Scene, name: &str) -> i64 {
    fs::metadata(scene.path(name)).unwrap().mtime()
}

fn set_written_at(scene: &Scene, name: &str, seconds: u64) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    fs::File::open(scene.path(name)).unwrap().set_modified(time).unwrap();
}

#[test]
fn a_new_keeper_knows_the_names_and_the_directories_that_the_program_was_shown() {
    for who in everyone() {
        for how in ["overlay", "copy"] {
            let scene = Scene::new(who);
            for name in ["one", "two", "one/touched", "one/written", "one/closed", "one/theirs"] {
                scene.dir(name);
            }
            for name in ["replaced", "removed"] {
                scene.file(&format!("one/{name}"), "before");
                fs::hard_link(scene.path(&format!("one/{name}")), scene.path(&format!("two/{name}")))
                    .unwrap();
            }
            scene.file("one/written/file", "before");
            for name in ["one/touched", "one/written", "one/closed", "one/theirs", "one", "two"] {
                set_written_at(&scene, name, 1_000_000_000);
            }
            let script = format!(
                "echo 1 > one/first; ln one/first one/second; echo 1 > two/first; {WAIT}; set -e
                 echo 2 > one/first; rm one/removed two/removed
                 for d in one two; do echo $d > $d/new; mv $d/new $d/replaced; done
                 touch -d @1100000000 one/touched; echo after > one/written/file; chmod 700 one/closed
                 touch -d @1100000000 two"
            );
            let options = ["--data-out", "one", "--data-out", "two", "--existing", how];
            let options = [&options[..], &["--copy-out-interval", "1s"]].concat();
            let run = start(&scene, &options, &script);
            wait_until("all copies of the other one", || scene.path("two/first").exists());
            kill(wait_for_keeper(run.id()));
            fs::set_permissions(scene.path("one/theirs"), fs::Permissions::from_mode(0o711)).unwrap();
            let ran = end(&scene, run);
            ran.assert_code(0).assert_says("this command takes its place");
            assert!(!ran.err.contains("someone else"), "{who:?} {how}: {ran:?}");
            let names = ["closed", "first", "replaced", "second", "theirs", "touched", "written"];
            assert_eq!(scene.list("one"), names, "{who:?} {how}");
            assert_eq!(scene.list("two"), ["first", "replaced"], "{who:?} {how}");
            for (name, text) in [
                ("one/first", "2\n"),
                ("one/second", "2\n"),
                ("one/replaced", "one\n"),
                ("two/replaced", "two\n"),
                ("one/written/file", "after\n"),
            ] {
                assert_eq!(scene.read(name), text, "{who:?} {how}: {name}");
            }
            let times = ["one/touched", "one/written", "two"].map(|name| written_at(&scene, name));
            assert_eq!(times, [1_100_000_000, 1_000_000_000, 1_100_000_000], "{who:?} {how}");
            let modes = ["one/closed", "one/theirs"].map(|name| mode_of(&scene.path(name)));
            assert_eq!(modes, [0o700, 0o711], "{who:?} {how}");
            scene.assert_clean();
        }
    }
}

#[test]
fn a_keeper_killed_in_the_stage_out_leaves_no_directory_as_only_its_own_copying_made_it() {
    for who in everyone() {
        for how in ["overlay", "copy"] {
            let scene = Scene::new(who);
            scene.dir("out");
            scene.dir("out/dir");
            scene.file("out/dir/big", "before");
            set_written_at(&scene, "out/dir", 1_000_000_000);
            fs::set_permissions(scene.path("out/dir"), fs::Permissions::from_mode(0o500)).unwrap();
            let script = format!(
                "{WAIT}; chmod 700 out/dir; head -c 6000000 /dev/urandom > out/dir/big; cp out/dir/big big
                 chmod 500 out/dir"
            );
            let run = start(
                &scene,
                &["--data-out", "out", "--existing", how, "--bandwidth", "3MiB/s", "--size", "64MiB"],
                &script,
            );
            scene.file("go", "");
            for _ in 0..2 {
                wait_until("the stage-out", || {
                    scene.state().iter().any(|dir| {
                        fs::read_to_string(dir.join("state")).is_ok_and(|state| state.contains("staging out"))
                            && scene.list("out/dir").iter().any(|name| name.contains("partial"))
                    })
                });
                kill(wait_for_keeper(run.id()));
            }
            let ran = end(&scene, run);
            ran.assert_code(0);
            assert_eq!(scene.list("out/dir"), ["big"], "{who:?} {how}: {ran:?}");
            assert!(fs::read(scene.path("out/dir/big")).unwrap() == fs::read(scene.path("big")).unwrap());
            let left = (mode_of(&scene.path("out/dir")), written_at(&scene, "out/dir"));
            assert_eq!(left, (0o500, 1_000_000_000), "{who:?} {how}: {ran:?}");
            scene.assert_clean();
        }
    }
}

#[test]
fn a_run_that_can_not_be_asked_is_listed_and_nothing_of_it_is_removed() {
    let scene = Scene::new(Who::Me);
    scene.dir("state");
    for id in ["gone", "odd"] {
        scene.dir(&format!("state/{id}"));
        scene.file(&format!("state/{id}/lock"), "");
        scene.file(&format!("state/{id}/out0.journal"), "");
    }
    fs::set_permissions(scene.path("state"), fs::Permissions::from_mode(0o700)).unwrap();
    // Not what a keeper listens with: so nothing says that nobody is there.
    let _socket = UnixDatagram::bind(scene.path("state/odd/control")).unwrap();
    let listed = scene.run(&["run", "--list"]).assert_code(0).out.clone();
    let of = |id: &str| listed.lines().find(|line| line.starts_with(id)).unwrap().to_owned();
    assert!(of("odd").contains("can't be asked"), "{listed}");
    assert!(of("gone").contains("its keeper was killed"), "{listed}");
    assert_eq!(scene.list("state"), ["odd"]);
    assert_eq!(scene.list("state/odd"), ["control", "lock", "out0.journal"]);
}
