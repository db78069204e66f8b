//! `ondeck run --cache`: a program that sees a directory through a write-back cache of its own.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime};

use scene::{Mounted, Ran, Scene, Who, is_root, wait_until};

/// A scene with the directory `data`; `None` where there can be no cache.
fn scene() -> Option<Scene> {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        ondeck_skip::skipped("it needs root and /dev/fuse");
        return None;
    }
    let scene = Scene::new(Who::Me);
    scene.dir("data");
    Some(scene)
}

/// Small, so that a test machine has room for it.
const CACHE: [&str; 4] = ["--cache", "data", "--cache-size", "32MiB"];

const WAIT: &str = "touch started; while ! test -e go; do sleep 0.02; done";

fn start(scene: &Scene, options: &[&str], script: &str) -> Child {
    let run = scene
        .start(&[&["run", "--report", "report"], &CACHE[..], options, &["--", "sh", "-c", script]].concat());
    wait_until("the program", || scene.path("started").exists());
    run
}

fn end(scene: &Scene, run: Child) -> Ran {
    scene.file("go", "");
    Ran::of(run.wait_with_output().unwrap())
}

fn files(place: &Path) -> Vec<PathBuf> {
    fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Waits until nothing is left: no run, no cache, no mount, no process.
#[track_caller]
fn assert_clean(scene: &Scene) {
    scene.wait_for_end();
    let left = || -> Vec<PathBuf> {
        let places = fs::read_dir(scene.path("state/cache")).into_iter().flatten().flatten();
        places.flat_map(|place| [vec![place.path()], files(&place.path())].concat()).collect()
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !left().is_empty() {
        assert!(Instant::now() < deadline, "something is left of a cache: {:?}", left());
        std::thread::sleep(Duration::from_millis(5));
    }
    scene.assert_clean();
}

fn kill(pid: u32) {
    // SAFETY: a signal to a process of this test's own.
    unsafe { libc::kill(pid as i32, libc::SIGKILL) };
}

fn kill_command(mut run: Child) {
    run.kill().unwrap();
    run.wait().unwrap();
}

/// The process that serves the cache of `data`.
fn server(scene: &Scene) -> u32 {
    let told = scene.run(&["cache", "status", "data", "--json"]);
    told.assert_code(0);
    let told: serde_json::Value = serde_json::from_str(&told.out).unwrap();
    told[0]["server"].as_u64().unwrap() as u32
}

fn kill_server(scene: &Scene) {
    let server = server(scene);
    kill(server);
    wait_until("the server is gone", || {
        fs::read_to_string(format!("/proc/{server}/stat")).map_or(true, |stat| stat.contains(") Z"))
    });
}

/// The keeper of a command.
fn keeper(command: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{command}/task/{command}/children")).unwrap();
    let mut pids = children.split_whitespace().map(|pid| pid.parse().unwrap());
    pids.find(|pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "ondeck-keeper")
    })
    .unwrap()
}

/// The processes of a scene by the name that the kernel has for them.
fn processes(scene: &Scene, name: &str) -> Vec<u32> {
    let place = scene.dir.path();
    let is_one = |pid: &u32| {
        let base = PathBuf::from(format!("/proc/{pid}"));
        // A program has the working directory of the command, and so has its keeper.
        fs::read_to_string(base.join("comm")).is_ok_and(|comm| comm.trim() == name)
            && fs::read_link(base.join("cwd")).is_ok_and(|cwd| cwd == place)
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_one).collect()
}

/// The servers of a scene's caches, as their records have them.
fn servers(scene: &Scene) -> Vec<u32> {
    let records = fs::read_dir(scene.path("state/cache")).into_iter().flatten().flatten();
    records
        .filter_map(|entry| fs::read_to_string(entry.path().join("instance.json")).ok())
        .filter_map(|text| serde_json::from_str::<serde_json::Value>(&text).ok())
        .filter_map(|record| Some(record["server"].as_u64()? as u32))
        .collect()
}

fn run_id(scene: &Scene) -> String {
    let runs: Vec<_> = scene.state().into_iter().filter(|path| path.is_dir()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    runs[0].file_name().unwrap().to_string_lossy().into_owned()
}

#[test]
fn a_program_sees_its_directory_through_a_cache_and_what_it_wrote_is_on_disk_when_the_command_ends() {
    let Some(scene) = scene() else { return };
    scene.file("data/in", "input");
    let script = format!(
        "cd data; cat in; stat -f -c %T .; mkdir d; umask 027; echo result > d/out; rm in
         head -c 3000000 /dev/zero | tr '\\0' x > big; cat big > /dev/null; cd ..; {WAIT}; pwd; exit 7"
    );
    let run = start(&scene, &[], &script);
    assert_eq!(scene.list("data"), ["in"], "others go on seeing what is on disk");
    let shown = scene.run(&["cache", "status", "data"]);
    assert!(shown.out.contains(&format!("run {} alone", run_id(&scene))), "{shown:?}");
    assert!(scene.run(&["run", "--list"]).out.contains("the program runs"));
    let ran = end(&scene, run);
    ran.assert_code(7).assert_says("through a cache: ").assert_says("written back");
    assert!(!ran.err.contains("staged"), "nothing is: {ran:?}");
    let pwd = scene.dir.path().canonicalize().unwrap();
    assert_eq!(ran.out, format!("inputfuseblk\n{}\n", pwd.display()));
    assert_eq!(scene.list("data"), ["big", "d"]);
    assert_eq!(fs::metadata(scene.path("data/big")).unwrap().len(), 3_000_000);
    assert_eq!(
        (scene.read("data/d/out"), scene.mode("data/d/out")),
        ("result\n".to_owned(), "640".to_owned())
    );
    let report = scene.report("report");
    let cache = &report["caches"][0];
    assert_eq!(cache["path"], scene.path("data").canonicalize().unwrap().to_str().unwrap());
    assert!(cache["written_back"].as_u64().unwrap() >= 3_000_000, "{cache}");
    assert_eq!((&cache["on_disk"], &cache["capacity"]), (&true.into(), &(32_u64 << 20).into()));
    assert_eq!((&report["ram_disk"], &report["results_on_disk"]), (&().into(), &true.into()));
    assert!(report["phases"].as_array().unwrap().iter().any(|phase| phase["name"] == "write_back"));
    assert_clean(&scene);
}

#[test]
fn a_working_directory_in_it_and_programs_in_it_are_those_of_the_cache() {
    let Some(scene) = scene() else { return };
    scene.script("data/solver", "#!/bin/sh\necho \"$1\" \"$COLOUR\" > made; cat; pwd\n");
    let mut command =
        scene.ondeck(&["run", "--cache", ".", "--cache-size", "32MiB", "--", "./solver", "two words"]);
    command.current_dir(scene.path("data")).env("COLOUR", "green");
    command.stdin(fs::File::open(scene.file("input", "typed\n")).unwrap());
    let ran = Ran::of(command.output().unwrap());
    ran.assert_code(0);
    let data = scene.path("data").canonicalize().unwrap();
    assert_eq!(ran.out, format!("typed\n{}\n", data.display()));
    assert_eq!(scene.read("data/made"), "two words green\n");
    assert_clean(&scene);
}

#[test]
fn it_goes_beside_data_in_and_data_out_and_through_a_symlink() {
    let Some(scene) = scene() else { return };
    for name in ["in", "out", "more"] {
        scene.dir(name);
    }
    scene.file("in/a", "a");
    std::os::unix::fs::symlink("more", scene.path("link")).unwrap();
    let options =
        ["--data-in", "in", "--data-out", "out", "--size", "16MiB", "--cache", "link", "--report", "report"];
    let ran = scene.run_shell(
        &[&CACHE[..], &options].concat(),
        "cat in/a > out/b; cat out/b > data/c; cp data/c link/d; echo more >> out/b",
    );
    ran.assert_code(0).assert_says("staged out 6 B (1 file); ").assert_says("through a cache: ");
    assert_eq!(
        (scene.read("out/b"), scene.read("data/c"), scene.read("more/d")),
        ("amore\n".into(), "a".into(), "a".into())
    );
    assert_eq!(scene.report("report")["caches"].as_array().unwrap().len(), 2);
    assert_clean(&scene);
}

#[test]
fn a_run_or_a_copy_inside_a_run_may_use_its_cache_but_not_cache_it_again() {
    let Some(scene) = scene() else { return };
    scene.dir("more");
    let script = "ondeck=$PWD/ondeck; echo a > data/a; mkdir data/out
        $ondeck run --cache more --cache-size 32MiB -- cp data/a more/b
        $ondeck run --data-out data/out --size 16MiB -- cp more/b data/out/c
        $ondeck stage data/out data/d
        ! $ondeck run --cache data -- true";
    let ran = scene.run_shell(&CACHE, script);
    ran.assert_code(0).assert_says("in a cache already");
    for name in ["data/a", "more/b", "data/out/c", "data/d/c"] {
        assert_eq!(scene.read(name), "a\n");
    }
    fs::remove_dir_all(scene.path(".local")).unwrap();
    assert_clean(&scene);
}

#[test]
fn an_ordinary_user_is_refused_before_anything_is_begun() {
    let scene = Scene::new(Who::User);
    scene.dir("data");
    let ran = scene.run_shell(&CACHE, "echo started > data/x");
    ran.assert_code(125).assert_says("only root can show a directory through a cache");
    assert_eq!(scene.list("data"), Vec::<String>::new());
    let ran = scene.run_shell(&[&CACHE[..], &["--fallback", "disk"]].concat(), "echo started > data/x");
    ran.assert_code(0).assert_says("running on disk: only root");
    assert_eq!(scene.read("data/x"), "started\n");
    scene.assert_clean();
}

#[test]
fn what_makes_no_sense_or_does_not_fit_is_refused_before_anything_is_begun() {
    let Some(scene) = scene() else { return };
    scene.dir("data/sub");
    scene.dir("fast");
    scene.file("file", "");
    let refused = |options: &[&str], why: &str| {
        scene.run_shell(options, "echo started > started").assert_code(125).assert_says(why);
    };
    refused(&["--cache", "none"], "No such file");
    refused(&["--cache", "file"], "not a directory");
    refused(&["--cache", "/usr"], "belongs to the system");
    for (one, other) in [("data", "data/sub"), ("data/sub", "data"), ("data", "data")] {
        for option in ["--data-in", "--data-out"] {
            refused(&["--cache", one, option, other], "inside one another");
        }
    }
    refused(&["--cache", "data", "--cache", "data/sub"], "inside one another");
    refused(&["--cache", "data", "--cache-size", "1MiB"], "too small");
    refused(&["--cache", "data", "--cache-size", "1000TiB"], "choose a smaller --cache-size");
    refused(&["--cache", "data", "--size", "1GiB"], "of no use");
    refused(&["--data-in", "data", "--cache-size", "1GiB"], "makes no sense");
    let mounted = Mounted::tmpfs(&scene.path("data/sub"), "size=1m");
    refused(&["--cache", "data"], "another filesystem inside");
    drop(mounted);
    let mount = ["cache", "mount", "--backing", "data", "--capacity", "32MiB", "fast"];
    scene.run(&mount).assert_code(0);
    refused(&["--cache", "data"], "behind the cache at");
    refused(&["--cache", "fast"], "there is a cache at");
    refused(&["--cache", "fast/sub"], "in a cache already");
    scene.run(&["cache", "unmount", "fast"]).assert_code(0);
    assert!(!scene.path("started").exists());
    assert_clean(&scene);
}

#[test]
fn two_runs_at_once_of_the_same_directory_are_refused_by_name() {
    let Some(scene) = scene() else { return };
    scene.dir("data/sub");
    let run = start(&scene, &[], &format!("echo first > data/x; {WAIT}"));
    let id = run_id(&scene);
    let second = scene.run_shell(&CACHE, "echo second > data/x");
    second.assert_code(125).assert_says(&format!("shown through a cache to another run, {id}, already"));
    scene.run_shell(&["--cache", "data/sub"], "true").assert_code(125).assert_says("is behind the cache at");
    let mount = ["cache", "mount", "--backing", "data", "--capacity", "32MiB", "data"];
    scene.run(&mount).assert_code(2).assert_says("to another run");
    for lose in [&[][..], &["--force-lose", "--yes"]] {
        let unmount = [&["cache", "unmount", "data"], lose].concat();
        scene.run(&unmount).assert_code(2).assert_says(&format!("ondeck run --abandon {id}"));
    }
    end(&scene, run).assert_code(0);
    assert_eq!(scene.read("data/x"), "first\n");
    assert_clean(&scene);
}

#[test]
fn ram_that_another_cache_was_promised_is_not_promised_again() {
    let Some(scene) = scene() else { return };
    scene.dir("more");
    let run = scene.start(&["run", "--cache", "data", "--cache-size", "1GiB", "--", "sh", "-c", WAIT]);
    wait_until("the program", || scene.path("started").exists());
    let free: u64 = fs::read_to_string("/proc/meminfo")
        .unwrap()
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse().ok())
        .unwrap();
    // Nearly all of what is free, of which the other cache has taken nothing yet.
    let nearly = format!("{}KiB", free - (512 << 10));
    let ran = scene.run_shell(&["--cache", "more", "--cache-size", &nearly], "true");
    ran.assert_code(125).assert_says("what other caches were promised");
    end(&scene, run).assert_code(0);
    assert_clean(&scene);
}

#[test]
fn what_others_changed_meanwhile_is_kept_and_both_versions_are_reported() {
    let Some(scene) = scene() else { return };
    scene.file("data/x", "old");
    let run = start(&scene, &[], &format!("cat data/x; echo mine > data/x; {WAIT}; exit 4"));
    scene.file("data/x", "theirs, longer");
    end(&scene, run).assert_code(4).assert_says("someone else changed it on disk while the program ran");
    assert_eq!(scene.read("data/x"), "theirs, longer");
    let report = scene.report("report");
    let name = report["put_beside"][0]["name"].as_str().unwrap();
    assert_eq!(scene.read(&format!("data/{name}")), "mine\n");
    assert_clean(&scene);
}

#[test]
fn attributes_that_are_not_taken_over_and_files_that_others_removed_are_told_with_plain_names() {
    let Some(scene) = scene() else { return };
    let odd = "odd\u{1b}]0;title\u{7}\nname";
    for file in [odd, "removed"] {
        scene.file(&format!("data/{file}"), "old");
    }
    let run = start(&scene, &[], &format!("chmod 600 data/odd*; echo mine > data/removed; {WAIT}"));
    scene.file(&format!("data/{odd}"), "theirs, longer");
    fs::remove_file(scene.path("data/removed")).unwrap();
    end(&scene, run)
        .assert_code(0)
        .assert_says(
            "data/odd?]0;title? name: someone else changed it on disk while the program ran; attributes",
        )
        .assert_says("data/removed: someone else removed it on disk");
    assert_eq!(scene.read("data/removed"), "mine\n");
    assert_clean(&scene);
}

#[test]
fn a_directory_that_is_renamed_meanwhile_gets_what_was_written_where_it_is_now() {
    let Some(scene) = scene() else { return };
    let run = start(&scene, &[], &format!("echo mine > data/x; {WAIT}; exit 4"));
    fs::rename(scene.path("data"), scene.path("moved")).unwrap();
    end(&scene, run).assert_code(121).assert_says("was renamed while the program ran");
    assert_eq!(scene.read("moved/x"), "mine\n");
    assert!(scene.report("report")["moved"][0]["now"].as_str().unwrap().ends_with("/moved"));
    assert_clean(&scene);
}

#[test]
fn what_was_for_a_directory_that_is_removed_meanwhile_is_held_and_can_be_given_up() {
    let Some(scene) = scene() else { return };
    let run = start(&scene, &[], &format!("echo mine > data/x; {WAIT}"));
    fs::remove_dir(scene.path("data")).unwrap();
    end(&scene, run).assert_code(122).assert_says("was removed while the program ran");
    let id = run_id(&scene);
    scene.run(&["run", "--resume", &id]).assert_code(122);
    scene.run(&["run", "--abandon", &id, "--yes"]).assert_code(123);
    assert_clean(&scene);
}

#[test]
fn signals_reach_the_program_and_what_it_leaves_behind_is_ended() {
    let Some(scene) = scene() else { return };
    let script = format!(
        "(trap '' TERM; exec sleep 1000 > data/log) > /dev/null 2>&1 &
         until test -e data/log; do sleep 0.02; done; trap 'echo asked > data/asked; exit 9' TERM; {WAIT}"
    );
    let run = start(&scene, &[], &script);
    // SAFETY: a signal to our own child.
    unsafe { libc::kill(run.id() as i32, libc::SIGTERM) };
    let ran = Ran::of(run.wait_with_output().unwrap());
    ran.assert_code(9).assert_says("left 1 process behind");
    assert_eq!(scene.read("data/asked"), "asked\n");
    assert_eq!(scene.list("data"), ["asked", "log"]);
    scene.run_shell(&CACHE, "echo dying > data/last; kill -9 $$").assert_code(137);
    assert_eq!(scene.read("data/last"), "dying\n");
    assert_clean(&scene);
}

#[test]
fn a_batch_job_is_ended_in_time_to_write_back() {
    let Some(scene) = scene() else { return };
    let end = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap() + Duration::from_secs(3600);
    let script = "trap 'echo asked > data/asked; exit 1' TERM; while :; do sleep 0.05; done";
    let options = [&["run"], &CACHE[..], &["--end-margin", "59m58s", "--", "sh", "-c", script]].concat();
    let mut command = scene.ondeck(&options);
    command.env("SLURM_JOB_ID", "17").env("SLURM_JOB_END_TIME", end.as_secs().to_string());
    let ran = Ran::of(command.output().unwrap());
    ran.assert_code(1).assert_says("ending the program now").assert_says("inside Slurm job 17");
    assert_eq!(scene.read("data/asked"), "asked\n");
    assert_clean(&scene);
}

#[test]
fn a_killed_command_loses_nothing_and_its_keeper_writes_back() {
    let Some(scene) = scene() else { return };
    let run = start(&scene, &[], &format!("echo early > data/early; {WAIT}; echo late > data/late"));
    kill_command(run);
    scene.file("go", "");
    wait_until("what was written", || scene.path("data/late").exists());
    scene.wait_for_end();
    assert_eq!((scene.read("data/early"), scene.read("data/late")), ("early\n".into(), "late\n".into()));
    for report in scene.state().into_iter().filter(|path| path.extension().is_some()) {
        fs::remove_file(report).unwrap();
    }
    assert_clean(&scene);
}

#[test]
fn a_killed_keeper_is_replaced_and_the_program_goes_on_with_its_cache() {
    let Some(scene) = scene() else { return };
    let script = format!(
        "echo early > data/early; {WAIT}; sleep 1000 > /dev/null 2>&1 & cat data/early; echo late > data/late; exit 6"
    );
    let run = start(&scene, &[], &script);
    kill(keeper(run.id()));
    let ran = end(&scene, run);
    ran.assert_code(6).assert_says("this command takes its place").assert_says("left 1 process behind");
    assert_eq!(ran.out, "early\n");
    assert_eq!(scene.list("data"), ["early", "late"]);
    assert_eq!(scene.read("data/late"), "late\n");
    assert_clean(&scene);
}

#[test]
fn without_a_keeper_and_a_command_the_server_writes_back_when_the_program_has_ended() {
    let Some(scene) = scene() else { return };
    let run = start(&scene, &[], &format!("echo early > data/early; {WAIT}; echo late > data/late"));
    let keeper = keeper(run.id());
    kill_command(run);
    kill(keeper);
    wait_until("both are gone", || !Path::new(&format!("/proc/{keeper}")).exists());
    wait_until("it is told", || {
        let told = scene.run(&["run", "--list"]).out;
        told.contains("its program goes on")
    });
    scene.file("go", "");
    wait_until("what was written", || scene.path("data/late").exists());
    wait_until("the end", || {
        let told = scene.run(&["run", "--list"]).out;
        told.contains("wrote through the cache is on disk")
    });
    assert_eq!(scene.read("data/early"), "early\n");
    assert_clean(&scene);
}

#[test]
fn a_killed_server_loses_nothing_that_was_closed() {
    let Some(scene) = scene() else { return };
    let script = format!(
        "head -c 9000000 /dev/urandom > data/x; cp data/x x; {WAIT}; cat data/x 2> /dev/null || exit 5"
    );
    let run = start(&scene, &[], &script);
    assert_eq!(scene.list("data"), Vec::<String>::new(), "it is in the cache alone");
    kill_server(&scene);
    let ran = end(&scene, run);
    ran.assert_code(5).assert_says("was killed; what it had was recovered");
    assert!(fs::read(scene.path("data/x")).unwrap() == fs::read(scene.path("x")).unwrap());
    assert_eq!(scene.report("report")["results_on_disk"], true);
    assert_clean(&scene);
}

#[test]
fn if_all_of_a_run_are_killed_resume_writes_back_what_the_store_holds() {
    let Some(scene) = scene() else { return };
    for abandon in [false, true] {
        let id = kill_all(&scene);
        let advice = format!("`ondeck run --resume {id}` writes it back");
        scene.run(&["cache", "status", "data"]).assert_code(1).assert_says(&advice);
        let refused = scene.run_shell(&CACHE, "true");
        refused.assert_code(125).assert_says(&id);
        assert_eq!(scene.list("data"), Vec::<String>::new());
        if abandon {
            scene.run(&["run", "--abandon", &id]).assert_code(125).assert_says("must be confirmed");
            scene.run(&["run", "--abandon", &id, "--yes"]).assert_code(123);
            assert_eq!(scene.list("data"), Vec::<String>::new());
        } else {
            scene.run(&["run", "--resume", &id]).assert_code(0);
            assert_eq!(scene.read("data/x"), "kept\n");
            fs::remove_file(scene.path("data/x")).unwrap();
        }
        assert_clean(&scene);
        again(&scene);
    }
}

/// Starts a run that writes `kept` to `data/x`, and kills its command, its keeper and its server. Returns its name.
fn kill_all(scene: &Scene) -> String {
    let run = start(scene, &[], &format!("echo kept > data/x; {WAIT}"));
    let (id, keeper) = (run_id(scene), keeper(run.id()));
    kill_command(run);
    kill(keeper);
    kill_server(scene);
    scene.file("go", "");
    wait_until("the keeper is gone", || !Path::new(&format!("/proc/{keeper}")).exists());
    wait_until("it is told", || scene.run(&["run", "--list"]).out.contains("was killed, too"));
    id
}

/// Lets the next program of a scene wait again.
fn again(scene: &Scene) {
    fs::remove_file(scene.path("go")).unwrap();
    fs::remove_file(scene.path("started")).unwrap();
}

/// The only cache of a scene.
fn place(scene: &Scene) -> PathBuf {
    let places: Vec<_> = files(&scene.path("state/cache")).into_iter().filter(|path| path.is_dir()).collect();
    assert_eq!(places.len(), 1, "{places:?}");
    places[0].clone()
}

#[test]
fn what_a_cache_without_a_readable_record_holds_is_neither_thrown_away_nor_called_on_disk() {
    let Some(scene) = scene() else { return };
    for damaged in [None, Some("{")] {
        for abandon in [false, true] {
            let id = kill_all(&scene);
            let (record, aside) = (place(&scene).join("instance.json"), scene.path("aside"));
            fs::rename(&record, &aside).unwrap();
            if let Some(damaged) = damaged {
                fs::write(&record, damaged).unwrap();
            }
            for _ in 0..2 {
                let told = scene.run(&["run", "--list"]);
                assert!(told.out.contains(&id) && told.out.contains("instance.json"), "{}", told.out);
            }
            scene.run(&["cache", "status"]).assert_code(1).assert_says("instance.json");
            scene.run_shell(&CACHE, "true").assert_code(125).assert_says("data");
            let refused = scene.run(&["run", "--resume", &id]);
            refused.assert_code(122).assert_says("instance.json").assert_says(&format!("--abandon {id}"));
            if abandon {
                scene.run(&["run", "--abandon", &id, "--yes"]).assert_code(123);
                assert_eq!(scene.list("data"), Vec::<String>::new());
                fs::remove_file(&aside).unwrap();
            } else {
                fs::rename(&aside, &record).unwrap();
                scene.run(&["run", "--resume", &id]).assert_code(0);
                assert_eq!(scene.read("data/x"), "kept\n");
                fs::remove_file(scene.path("data/x")).unwrap();
            }
            assert_clean(&scene);
            again(&scene);
        }
    }
}

#[test]
fn what_is_remembered_of_a_run_and_cant_be_read_is_no_run_without_caches() {
    let Some(scene) = scene() else { return };
    let id = kill_all(&scene);
    let kept = scene.state().into_iter().find(|path| path.ends_with(&id)).unwrap().join("caches.record");
    let text = fs::read_to_string(&kept).unwrap();
    fs::write(&kept, &text[..text.len() / 2]).unwrap();
    let told = scene.run(&["run", "--list"]);
    assert!(told.out.contains("caches.record") && !told.out.contains("on disk"), "{}", told.out);
    scene.run(&["run", "--resume", &id]).assert_code(125).assert_says("caches.record");
    fs::write(&kept, text).unwrap();
    scene.run(&["run", "--resume", &id]).assert_code(0);
    assert_eq!(scene.read("data/x"), "kept\n");
    assert_clean(&scene);
}

#[test]
fn a_store_that_is_unmounted_with_its_server_dead_is_told_however_young_the_last_write_was() {
    let Some(scene) = scene() else { return };
    let id = kill_all(&scene);
    let store = place(&scene).join("store");
    assert!(Command::new("umount").arg(&store).status().unwrap().success());
    scene
        .run(&["run", "--resume", &id])
        .assert_code(122)
        .assert_says("is lost, because its store was unmounted");
    scene.run(&["run", "--abandon", &id, "--yes"]).assert_code(123);
    assert_clean(&scene);
}

#[test]
fn what_finds_no_room_on_disk_is_held_until_it_is_resumed_or_given_up() {
    let Some(scene) = scene() else { return };
    let mounted = Mounted::tmpfs(&scene.path("data"), "size=1m");
    let options = [&CACHE[..], &["--report", "report"]].concat();
    let script = "head -c 3000000 /dev/zero | tr '\\0' x > data/big; exit 3";
    let hold = || {
        let ran = scene.run_shell(&options, script);
        ran.assert_code(122).assert_says("NOT ALL ON DISK").assert_says("No space left on device");
        let report = scene.report("report");
        assert_eq!((&report["results_on_disk"], &report["program"]["exit_code"]), (&false.into(), &3.into()));
        assert!(scene.run(&["run", "--list"]).out.contains("holds results"));
        report["id"].as_str().unwrap().to_owned()
    };
    let id = hold();
    scene.run(&["run", "--resume", &id]).assert_code(122);
    // Neither a keeper nor a server that is killed changes that.
    kill_server(&scene);
    scene.run(&["run", "--resume", &id]).assert_code(122).assert_says("No space left");
    mounted.remount(false, "size=10m");
    scene.run(&["run", "--resume", &id]).assert_code(3).assert_says("written back");
    assert_eq!(fs::metadata(scene.path("data/big")).unwrap().len(), 3_000_000);
    fs::remove_file(scene.path("data/big")).unwrap();
    scene.wait_for_end();

    mounted.remount(false, "size=1m");
    let id = hold();
    scene.run(&["run", "--abandon", &id]).assert_code(125).assert_says("must be confirmed");
    scene.run(&["run", "--abandon", &id, "--yes"]).assert_code(123).assert_says("given up");
    scene.wait_for_end();
    drop(mounted);
    assert_clean(&scene);
}

#[test]
fn a_cache_that_is_full_makes_the_program_wait_and_nothing_else() {
    let Some(scene) = scene() else { return };
    scene.dir("data/d");
    let script = "head -c 100000000 /dev/urandom > data/x; cat data/x > data/d/y; md5sum < data/x > sum; cmp data/x data/d/y";
    let ran = scene.run_shell(&[&CACHE[..], &["--report", "report"]].concat(), script);
    ran.assert_code(0);
    let sum = Command::new("md5sum").stdin(fs::File::open(scene.path("data/d/y")).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8(sum.stdout).unwrap(), scene.read("sum"));
    let report = scene.report("report");
    assert!(report["caches"][0]["evictions"].as_u64().unwrap() > 0, "{report}");
    assert_clean(&scene);
}

#[test]
fn what_is_held_outlives_a_kill_of_whoever_holds_it_and_the_exit_code_is_still_the_programs() {
    let Some(scene) = scene() else { return };
    let mounted = Mounted::tmpfs(&scene.path("data"), "size=1m");
    let script = "head -c 3000000 /dev/zero | tr '\\0' x > data/big; exit 3";
    scene.run_shell(&CACHE, script).assert_code(122);
    let id = run_id(&scene);
    wait_until("no keeper is left", || {
        // The keeper, and the process that starts another one in its place.
        let keepers = processes(&scene, "ondeck-keeper");
        keepers.iter().copied().for_each(kill);
        keepers.is_empty()
    });
    wait_until("it is told", || scene.run(&["run", "--list"]).out.contains("is being written back"));
    scene.run(&["run", "--resume", &id]).assert_code(122).assert_says("No space left");
    mounted.remount(false, "size=10m");
    scene.run(&["run", "--resume", &id]).assert_code(3);
    assert_eq!(fs::metadata(scene.path("data/big")).unwrap().len(), 3_000_000);
    drop(mounted);
    assert_clean(&scene);
}

#[test]
fn kills_at_any_moment_lose_nothing_that_was_closed() {
    // ONDECK_ROUNDS takes more.
    let rounds = std::env::var("ONDECK_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(20);
    let Some(scene) = scene() else { return };
    scene.script(
        "program",
        "#!/bin/sh
         touch started
         for i in 1 2 3 4 5 6 7 8; do echo $i > data/f$i || exit 9; echo $i > closed; sleep 0.01; done
         exit 5",
    );
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    for round in 0..rounds {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        for name in ["started", "closed"] {
            let _ = fs::remove_file(scene.path(name));
        }
        let mut run = scene.start(&[&["run"], &CACHE[..], &["--", "./program"]].concat());
        // Not a wait for a state: the moment itself is what is tested.
        std::thread::sleep(Duration::from_millis(300).mul_f64((state % 10_000) as f64 / 10_000.0));
        let command = run.id();
        let victims = match round % 5 {
            0 => vec![command],
            1 => processes(&scene, "ondeck-keeper"),
            2 => servers(&scene),
            3 => [vec![command], processes(&scene, "ondeck-keeper")].concat(),
            _ => [vec![command], processes(&scene, "ondeck-keeper"), servers(&scene)].concat(),
        };
        victims.into_iter().for_each(kill);
        let code = run.wait().unwrap().code();
        // The program may go on.
        wait_until("the end of the program", || processes(&scene, "program").is_empty());
        // A run that was killed before it had its lock counts as starting for a minute.
        let deadline = Instant::now() + Duration::from_secs(120);
        let mut resumed = None;
        loop {
            let told = scene.run(&["run", "--list"]).out;
            if told == "no runs\n" {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "round {round}, {code:?}: {told} {resumed:?} {:?}",
                files(&scene.state()[0])
            );
            if told.contains("`ondeck run --resume`") {
                resumed = Some(scene.run(&["run", "--resume", &run_id(&scene)]));
            }
        }
        let closed = fs::read_to_string(scene.path("closed")).unwrap_or_default();
        for number in 1..=closed.trim().parse().unwrap_or(0) {
            let text = fs::read_to_string(scene.path(&format!("data/f{number}")));
            assert_eq!(text.ok(), Some(format!("{number}\n")), "round {round}, {code:?}");
        }
        if round % 5 == 1 {
            let expected = if scene.path("started").exists() { 5 } else { 125 };
            assert_eq!(code, Some(expected), "round {round}");
        }
        for name in scene.list("data") {
            fs::remove_file(scene.path("data").join(name)).unwrap();
        }
        for report in scene.state() {
            fs::remove_file(report).unwrap();
        }
        assert_clean(&scene);
    }
}
