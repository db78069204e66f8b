//! What `ondeck run` promises, with real programs: as root and as an ordinary user.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use scene::{Mounted, Ran, SECOND_GROUP, Scene, UID, Who, everyone, is_root, mode_of, wait_until};

#[test]
fn a_program_finds_its_data_in_ram_at_their_own_paths_and_its_results_are_on_disk_afterwards() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("in");
        scene.file("in/a", "input");
        let out = scene.dir("out");
        let ran = scene.run_shell(
            &["--data-in", "in", "--data-out", "out", "--report", "report"],
            "cat in/a; stat -f -c %T in out; mkdir out/d; echo result > out/d/r; id -u; id -g; exit 7",
        );
        ran.assert_code(7);
        let (uid, gid) = if who == Who::Me { (0, 0) } else { ids() };
        assert_eq!(ran.out, format!("inputtmpfs\ntmpfs\n{uid}\n{gid}\n"));
        assert_eq!(scene.read("out/d/r"), "result\n");
        let report = scene.report("report");
        assert_eq!(report["program"]["exit_code"], 7);
        assert_eq!(report["results_on_disk"], true);
        assert_eq!(mode_of(&scene.path("report")), 0o644);
        assert_eq!(fs::metadata(out.join("d/r")).unwrap().uid(), uid);
        scene.assert_clean();
    }
}

fn ids() -> (u32, u32) {
    if is_root() {
        (UID, UID)
    } else {
        (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
    }
}

#[test]
fn the_input_is_read_only_and_untouched() {
    let scene = Scene::new(Who::User);
    scene.dir("in");
    scene.file("in/a", "input");
    scene
        .run_shell(&["--data-in", "in"], "echo x > in/a")
        .assert_code(2)
        .assert_says("Read-only file system");
    assert_eq!(scene.read("in/a"), "input");
    scene.assert_clean();
}

/// What a program does to a directory that holds something, and what must be on disk afterwards.
const CHANGES: &str = "
    set -e
    test \"$(cat out/old)\" = old; test \"$(cat out/sub/deep)\" = deep
    rm out/gone; rm -r out/gonedir
    echo more >> out/old; echo new > out/new
    mkdir out/newdir; echo x > out/newdir/x; ln out/newdir/x out/newdir/y; ln -s x out/newdir/s
    rm out/replaced; mkdir out/replaced; echo d > out/replaced/d
    rm -r out/emptied; mkdir out/emptied; echo e > out/emptied/e
    chmod 600 out/chmod
";

fn existing(scene: &Scene) {
    scene.dir("out");
    for name in ["old", "gone", "same", "replaced", "chmod"] {
        scene.file(&format!("out/{name}"), name);
    }
    for name in ["sub", "gonedir", "emptied"] {
        scene.dir(&format!("out/{name}"));
    }
    for name in ["sub/deep", "gonedir/x", "emptied/before"] {
        scene.file(&format!("out/{name}"), name.rsplit('/').next().unwrap());
    }
}

#[test]
fn what_is_in_an_output_directory_stays_visible_and_becomes_what_the_program_made_of_it() {
    for who in everyone() {
        for how in ["overlay", "copy", "auto"] {
            let scene = Scene::new(who);
            existing(&scene);
            let same = fs::metadata(scene.path("out/same")).unwrap();
            let ran = scene.run_shell(&["--data-out", "out", "--existing", how], CHANGES);
            ran.assert_code(0);
            assert_eq!(
                scene.list("out"),
                ["chmod", "emptied", "new", "newdir", "old", "replaced", "same", "sub"],
                "{who:?} {how}: {ran:?}"
            );
            assert_eq!(scene.read("out/old"), "oldmore\n");
            assert_eq!(scene.list("out/emptied"), ["e"]);
            assert_eq!(scene.list("out/replaced"), ["d"]);
            assert_eq!(scene.list("out/newdir"), ["s", "x", "y"]);
            assert_eq!(mode_of(&scene.path("out/chmod")), 0o600);
            let (x, y) = (
                fs::metadata(scene.path("out/newdir/x")).unwrap(),
                fs::metadata(scene.path("out/newdir/y")).unwrap(),
            );
            assert_eq!(x.ino(), y.ino(), "hard links among new files are kept");
            let after = fs::metadata(scene.path("out/same")).unwrap();
            assert_eq!(
                (same.ino(), same.ctime_nsec()),
                (after.ino(), after.ctime_nsec()),
                "it was not touched"
            );
            scene.assert_clean();
        }
    }
}

#[test]
fn directories_that_were_there_can_be_renamed_where_their_content_is_copied() {
    for (who, how) in [(Who::Me, "auto"), (Who::Me, "copy"), (Who::User, "copy")] {
        if who == Who::Me && !is_root() {
            continue;
        }
        let scene = Scene::new(who);
        existing(&scene);
        scene.dir("out/sub/inner");
        scene.file("out/sub/inner/file", "inner");
        let script = "
            set -e
            mv out/sub out/moved; echo added > out/moved/added; mv out/moved/inner out/inner
            mv out/gonedir out/gonedir.1; mkdir out/gonedir; echo fresh > out/gonedir/fresh
            mv out/old out/old.1; rm -r out/emptied; mv out/gonedir.1 out/emptied";
        // mv falls back to copying; rename(2) must do it.
        let script = format!(
            "{}\n{script}",
            "mv() { perl -e 'rename($ARGV[0], $ARGV[1]) or die \"rename: $!\\n\"' \"$1\" \"$2\"; }"
        );
        scene.run_shell(&["--data-out", "out", "--existing", how], &script).assert_code(0);
        assert_eq!(
            scene.list("out"),
            ["chmod", "emptied", "gone", "gonedir", "inner", "moved", "old.1", "replaced", "same"]
        );
        assert_eq!(scene.list("out/moved"), ["added", "deep"]);
        assert_eq!(scene.list("out/inner"), ["file"]);
        assert_eq!(scene.list("out/gonedir"), ["fresh"]);
        assert_eq!(scene.list("out/emptied"), ["x"]);
        assert_eq!(scene.read("out/old.1"), "old");
        scene.assert_clean();
    }
}

#[test]
fn files_that_were_there_can_be_rotated_and_swapped() {
    for who in everyone() {
        for how in ["overlay", "copy", "auto"] {
            let scene = Scene::new(who);
            scene.dir("out");
            for (name, text) in
                [("log", "0"), ("log.1", "1"), ("log.2", "2"), ("f1", "A"), ("f2", "B"), ("old", "P")]
            {
                scene.file(&format!("out/{name}"), text);
            }
            scene
                .run_shell(
                    &["--data-out", "out", "--existing", how],
                    "cd out; rm log.2; mv log.1 log.2; mv log log.1; printf N > log
                     mv f1 t; mv f2 f1; mv t f2; chmod 600 f1; ln old g; ln old h; mv old old.1",
                )
                .assert_code(0);
            let read = |name: &str| scene.read(&format!("out/{name}"));
            assert_eq!([read("log"), read("log.1"), read("log.2")], ["N", "0", "1"], "{who:?} {how}");
            assert_eq!([read("f1"), read("f2")], ["B", "A"], "{who:?} {how}");
            assert_eq!(mode_of(&scene.path("out/f1")), 0o600);
            assert_eq!([read("g"), read("h"), read("old.1")], ["P", "P", "P"]);
            assert_eq!(scene.list("out").len(), 8);
            scene.assert_clean();
        }
    }
}

/// Not a test of its own: the program of the next one, when it is called by that.
#[test]
fn writes_through_a_mapping_when_asked_to() {
    let Some(path) = std::env::var_os("ONDECK_TEST_MAP") else { return };
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    // SAFETY: a mapping of an open file of at least 8 bytes, which nobody truncates meanwhile.
    unsafe {
        let (protection, flags) =
            (rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE, rustix::mm::MapFlags::SHARED);
        let map: *mut u8 =
            rustix::mm::mmap(std::ptr::null_mut(), 8, protection, flags, &file, 0).unwrap().cast();
        // Read first: on tmpfs the page is then writable without a fault, and the write changes no time.
        std::hint::black_box(map.read_volatile());
        map.copy_from(b"CHANGED!".as_ptr(), 8);
    }
}

#[test]
fn what_is_written_through_a_mapping_comes_home_although_it_changes_no_time() {
    let scene = Scene::new(Who::Me);
    scene.dir("both");
    scene.file("both/db", vec![b'.'; 100_000]);
    scene.dir("out");
    let exe = std::env::current_exe().unwrap();
    let write = format!("{} --exact writes_through_a_mapping_when_asked_to > /dev/null", exe.display());
    scene
        .run_shell(
            &["--data-in", "both", "--data-out", "both", "--data-out", "out", "--copy-out-interval", "1s"],
            &format!(
                "head -c 100000 /dev/zero > out/db; touch started; while ! test -e go; do sleep 0.02; done
                 ONDECK_TEST_MAP=both/db {write}; ONDECK_TEST_MAP=out/db {write}"
            )
            .replace("while ! test -e go; do sleep 0.02; done", "sleep 2"),
        )
        .assert_code(0);
    for name in ["both/db", "out/db"] {
        assert!(fs::read(scene.path(name)).unwrap().starts_with(b"CHANGED!"), "{name}");
    }
    scene.assert_clean();
}

#[test]
fn modes_that_shut_out_even_the_owner_are_no_obstacle() {
    for who in everyone() {
        for how in ["copy", "overlay"] {
            let scene = Scene::new(who);
            scene.dir("out");
            for name in ["ro", "gone"] {
                scene.dir(&format!("out/{name}"));
                scene.file(&format!("out/{name}/x"), "x");
                fs::set_permissions(scene.path(&format!("out/{name}")), fs::Permissions::from_mode(0o555))
                    .unwrap();
            }
            scene
                .run_shell(
                    &["--data-out", "out", "--existing", how],
                    "cd out; chmod 755 gone; rm -rf gone; echo s > secret; chmod 000 secret
                     mkdir blind; echo b > blind/b; chmod 300 blind; echo n > new",
                )
                .assert_code(0);
            assert_eq!(scene.list("out"), ["blind", "new", "ro", "secret"], "{who:?} {how}");
            assert_eq!(mode_of(&scene.path("out/secret")), 0);
            assert_eq!(mode_of(&scene.path("out/blind")), 0o300);
            assert_eq!(
                mode_of(&scene.path("out/ro")),
                0o555,
                "a directory that was not touched keeps its mode"
            );
            scene.assert_clean();
        }
        let scene = Scene::new(who);
        scene.dir("p");
        scene.dir("p/out");
        fs::set_permissions(scene.path("p"), fs::Permissions::from_mode(0o555)).unwrap();
        scene.run_shell(&["--data-in", "p", "--data-out", "p/out"], "echo x > p/out/x").assert_code(0);
        assert_eq!(scene.read("p/out/x"), "x\n");
    }
}

#[test]
fn a_directory_may_be_input_and_output_and_directories_may_lie_in_each_other() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("case");
        scene.file("case/input", "input");
        scene.dir("case/results");
        scene.file("case/results/before", "before");
        scene.dir("both");
        scene.file("both/state", "1");
        scene.run_shell(
            &["--data-in", "case", "--data-out", "case/results", "--data-in", "both", "--data-out", "both"],
            "cat case/input case/results/before > case/results/new && echo 2 > both/state && ! touch case/x",
        )
        .assert_code(0);
        assert_eq!(scene.read("case/results/new"), "inputbefore");
        assert_eq!(scene.read("both/state"), "2\n");
        assert_eq!(scene.list("case"), ["input", "results"]);

        scene.dir("whole");
        scene.dir("whole/in");
        scene.file("whole/in/x", "x");
        scene
            .run_shell(
                &["--data-out", "whole", "--data-in", "whole/in"],
                "cp whole/in/x whole/y && ! touch whole/in/z",
            )
            .assert_code(0);
        assert_eq!(
            (scene.list("whole"), scene.list("whole/in")),
            (vec!["in".into(), "y".into()], vec!["x".into()])
        );
        scene.assert_clean();
    }
}

#[test]
fn names_of_one_file_are_given_to_others_without_being_taken_for_somebody_elses_doing() {
    for who in everyone() {
        for how in ["overlay", "copy"] {
            let scene = Scene::new(who);
            scene.dir("out");
            for (one, other) in [("out/a", "out/b"), ("out/c", "out/d"), ("out/e", "out/f")] {
                scene.file(one, "before");
                fs::hard_link(scene.path(one), scene.path(other)).unwrap();
            }
            let script = "for n in a b d; do echo $n > out/new; mv out/new out/$n; done; rm out/c
                          touch started; while ! test -e go; do sleep 0.02; done; rm out/f; echo e > out/new; mv out/new out/e";
            let mut run =
                scene.start(&["run", "--data-out", "out", "--existing", how, "--", "sh", "-c", script]);
            wait_until("the program", || scene.path("started").exists());
            // Somebody else changes the file that has two names.
            fs::write(scene.path("out/f"), "theirs").unwrap();
            scene.file("go", "");
            assert!(run.wait().unwrap().success());
            let beside: Vec<String> =
                scene.list("out").into_iter().filter(|name| name.contains(".ondeck-")).collect();
            assert!(beside.len() == 1 && beside[0].starts_with("e."), "{beside:?}");
            let names = ["a", "b", "d", "e", "f"];
            let texts = names.map(|name| scene.read(&format!("out/{name}")));
            assert_eq!(texts, ["a\n", "b\n", "d\n", "theirs", "theirs"], "{how}");
            assert!(!scene.path("out/c").exists());
            scene.assert_clean();
        }
    }
}

#[test]
fn a_file_that_someone_else_changed_meanwhile_is_kept_and_the_programs_version_goes_beside_it() {
    for who in everyone() {
        for how in ["overlay", "copy"] {
            let scene = Scene::new(who);
            existing(&scene);
            let mut run = scene.start(&[
                "run", "--data-out", "out", "--existing", how, "--report", "report", "--", "sh", "-c",
                "echo mine > out/old; rm out/gone; echo mine > out/created; echo equal > out/equal; touch started
                 while ! test -e go; do sleep 0.02; done",
            ]);
            wait_until("the program", || scene.path("started").exists());
            for (name, text) in [
                ("old", "theirs"),
                ("gone", "theirs"),
                ("created", "theirs"),
                ("equal", "equal\n"),
                ("other", "o"),
            ] {
                scene.file(&format!("out/{name}"), text);
            }
            scene.file("go", "");
            let status = run.wait().unwrap();
            let ran = Ran::of(run.wait_with_output().unwrap());
            assert!(status.success(), "{ran:?}");
            let beside: Vec<String> =
                scene.list("out").into_iter().filter(|name| name.contains(".ondeck-")).collect();
            assert_eq!(beside.len(), 2, "{beside:?} {ran:?}");
            assert!(beside[0].starts_with("created.ondeck-") && beside[1].starts_with("old.ondeck-"));
            assert_eq!(scene.read(&format!("out/{}", beside[1])), "mine\n");
            for name in ["old", "gone", "created"] {
                assert_eq!(scene.read(&format!("out/{name}")), "theirs");
            }
            assert_eq!(scene.read("out/other"), "o");
            let report = scene.report("report");
            assert_eq!(report["put_beside"].as_array().unwrap().len(), 2);
            assert_eq!(report["kept"].as_array().unwrap().len(), 1);
            ran.assert_says("someone else changed it on disk")
                .assert_says("kept, because someone else changed it or put it there");
            scene.assert_clean();
        }
    }
}

#[test]
fn further_names_of_a_file_respect_what_someone_else_wrote() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let run = scene.start(&[
        "run",
        "--data-out",
        "out",
        "--",
        "sh",
        "-c",
        "echo P > out/f; ln out/f out/g; touch started; while ! test -e go; do sleep 0.02; done",
    ]);
    wait_until("the program", || scene.path("started").exists());
    scene.file("out/f", "theirs");
    scene.file("out/g", "theirs");
    scene.file("go", "");
    Ran::of(run.wait_with_output().unwrap()).assert_code(0);
    assert_eq!((scene.read("out/f"), scene.read("out/g")), ("theirs".into(), "theirs".into()));
    assert_eq!(scene.list("out").len(), 4, "{:?}", scene.list("out"));
    scene.assert_clean();
}

#[test]
fn an_input_with_access_control_lists_can_be_staged_by_an_ordinary_user() {
    let scene = Scene::new(Who::User);
    scene.dir("in");
    scene.file("in/shared", "shared");
    let acl = std::process::Command::new("setfacl")
        .args(["-m", "u:daemon:r"])
        .arg(scene.path("in/shared"))
        .status();
    assert!(acl.expect("install the package acl").success());
    let ran = scene.run_shell(&["--data-in", "in"], "cat in/shared");
    ran.assert_code(0);
    assert_eq!(ran.out, "shared");
}

#[test]
fn a_filesystem_mounted_inside_an_output_directory_is_refused() {
    if !is_root() {
        return ondeck_skip::skipped("mounting needs root");
    }
    let scene = Scene::new(Who::Me);
    scene.dir("out");
    let inner = scene.dir("out/inner");
    let mounted = Mounted::tmpfs(&inner, "size=1m");
    scene
        .run_shell(&["--data-out", "out"], "true")
        .assert_code(125)
        .assert_says("another filesystem is mounted inside it");
    scene.run_shell(&["--data-out", "out/inner"], "echo x > out/inner/x").assert_code(0);
    assert_eq!(scene.read("out/inner/x"), "x\n");
    drop(mounted);
}

#[test]
fn a_lock_that_the_caller_holds_on_the_output_directory_does_not_matter() {
    let scene = Scene::new(Who::User);
    let out = scene.dir("out");
    let lock = fs::File::open(&out).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    scene.run_shell(&["--data-out", "out"], "echo x > out/x").assert_code(0);
    assert_eq!(scene.read("out/x"), "x\n");
}

#[test]
fn two_runs_at_once_may_write_into_the_same_directory() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let script = "for i in 1 2 3 4 5 6 7 8 9; do echo $0 > out/$0.$i; echo $0 > out/same.$i; done; sleep 0.2";
    let runs = ["a", "b", "c"]
        .map(|name| scene.start(&["run", "--data-out", "out", "--", "sh", "-c", script, name]));
    for run in runs {
        Ran::of(run.wait_with_output().unwrap()).assert_code(0);
    }
    let names = scene.list("out");
    assert_eq!(names.iter().filter(|name| !name.starts_with("same")).count(), 27, "{names:?}");
    assert!(names.iter().all(|name| !name.contains("partial")), "{names:?}");
    scene.assert_clean();
}

#[test]
fn a_second_command_may_watch_a_run_beside_the_first() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let first = scene.start(&[
        "run",
        "--data-out",
        "out",
        "--",
        "sh",
        "-c",
        "touch started; while ! test -e go; do sleep 0.02; done; echo x > out/x; exit 4",
    ]);
    wait_until("the program", || scene.path("started").exists());
    let id = scene.state()[0].file_name().unwrap().to_string_lossy().into_owned();
    let second = scene.start(&["run", "--resume", &id]);
    assert!(scene.run(&["run", "--list"]).out.contains("the program runs"));
    scene.file("go", "");
    Ran::of(first.wait_with_output().unwrap()).assert_code(4);
    Ran::of(second.wait_with_output().unwrap()).assert_code(4);
    scene.assert_clean();
}

#[test]
fn group_directories_come_out_right_for_an_ordinary_user() {
    if !is_root() {
        return ondeck_skip::skipped("making a directory of another group needs root");
    }
    let scene = Scene::new(Who::User);
    for (name, held) in [("empty", false), ("full", true)] {
        let dir = scene.dir(name);
        if held {
            scene.file(&format!("{name}/old"), "old");
            std::os::unix::fs::chown(dir.join("old"), Some(UID), Some(SECOND_GROUP)).unwrap();
        }
        std::os::unix::fs::chown(&dir, Some(0), Some(SECOND_GROUP)).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o2775)).unwrap();
        let ran = scene.run_shell(
            &["--data-out", name],
            &format!("set -e; echo x > {name}/new; mkdir {name}/d; echo y > {name}/d/y; test ! -e {name}/old || echo changed > {name}/old"),
        );
        ran.assert_code(0);
        if held {
            ran.assert_says("copied into RAM rather than overlaid, because it belongs to group 20002");
            assert_eq!(scene.read("full/old"), "changed\n");
            assert_eq!(fs::metadata(dir.join("old")).unwrap().gid(), SECOND_GROUP);
        }
        for path in ["new", "d", "d/y"] {
            let metadata = fs::metadata(dir.join(path)).unwrap();
            assert_eq!((metadata.uid(), metadata.gid()), (UID, SECOND_GROUP), "{name}/{path}");
        }
        assert_eq!(mode_of(&dir.join("d")) & 0o2000, 0o2000, "new directories stay set-gid");
        let owner = fs::metadata(&dir).unwrap();
        assert_eq!((owner.uid(), owner.gid(), owner.mode() & 0o7777), (0, SECOND_GROUP, 0o2775));
    }
    // An archive is the group's where the directory is.
    let dir = scene.dir("packed");
    std::os::unix::fs::chown(&dir, Some(0), Some(SECOND_GROUP)).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o2770)).unwrap();
    let pack = ["run", "--data-out", "packed", "--pack", "tar", "--", "sh", "-c", "echo x > packed/x"];
    scene.run_with_umask(0o007, &pack).assert_code(0);
    let archive = fs::metadata(dir.join(&scene.list("packed")[0])).unwrap();
    assert_eq!((archive.gid(), archive.mode() & 0o7777), (SECOND_GROUP, 0o660));
    scene
        .run_shell(&["--data-out", "full", "--existing", "overlay"], "true")
        .assert_code(125)
        .assert_says("EOVERFLOW");
    scene.assert_clean();
}

#[test]
fn the_programs_surroundings_are_untouched() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        let script = "cat; umask; pwd -P; echo $MINE; echo here > rel";
        let mut command = scene.ondeck(&["run", "--data-out", ".", "--", "sh", "-c", script]);
        command
            .current_dir(scene.path("out"))
            .env("MINE", "kept")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        use std::io::Write;
        child.stdin.take().unwrap().write_all(b"through\n").unwrap();
        let ran = Ran::of(child.wait_with_output().unwrap());
        let out = fs::canonicalize(scene.path("out")).unwrap();
        assert_eq!(ran.out, format!("through\n0022\n{}\nkept\n", out.display()), "{ran:?}");
        assert_eq!(scene.read("out/rel"), "here\n", "a working directory inside the data is the one in RAM");
        scene.assert_clean();
    }
}

#[test]
fn exit_codes_are_the_programs_own_or_reserved_ones() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    scene.run_shell(&["--data-out", "out"], "exit 0").assert_code(0);
    scene.run_shell(&["--data-out", "out"], "exit 42").assert_code(42);
    scene.run_shell(&["--data-out", "out"], "echo x > out/x; kill -9 $$").assert_code(137);
    assert_eq!(scene.read("out/x"), "x\n", "the results of a program that died are saved");
    scene
        .run(&["run", "--data-out", "out", "--", "no-such-program"])
        .assert_code(127)
        .assert_says("can't run no-such-program");
    scene.file("plain", "");
    scene.run(&["run", "--data-out", "out", "--", "./plain"]).assert_code(126);
    scene.run(&["run"]).assert_code(125).assert_says("nothing to run");
    scene.run(&["run", "--sizze", "1G"]).assert_code(2);
    scene.run(&["run", "--", "true"]).assert_code(125).assert_says("no data directory");
    scene.assert_clean();
}

#[test]
fn what_does_not_fit_is_refused_with_figures_and_remedy_before_anything_is_changed() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("in");
        scene.file("in/big", vec![1; 3 << 20]);
        scene.dir("out");
        let refused = |options: &[&str], says: &str| {
            let ran = scene.run_shell(options, "echo ran");
            ran.assert_code(125).assert_says(says);
            assert_eq!(ran.out, "");
        };
        refused(&["--data-in", "in", "--size", "2MiB"], "the input needs 3 MiB; use --size 3MiB or more");
        refused(&["--data-out", "out", "--size", "100TiB"], "of RAM are free here");
        refused(
            &["--data-in", "in", "--size", "4MiB", "--out-size", "2MiB"],
            "and the output 2 MiB; use --size 5MiB",
        );
        refused(&["--data-out", "missing"], "make it with: mkdir -p missing");
        let ran = scene.run_shell(&["--data-in", "missing"], "echo ran");
        ran.assert_code(125).assert_says("the input directory missing can't be used");
        assert!(!ran.err.contains("mkdir"), "{ran:?}");
        refused(&["--data-in", "in/big"], "is not a directory");
        refused(&["--data-out", "/tmp"], "belongs to the system");
        refused(&["--data-out", "/dev/shm"], "is where RAM disks and the state of runs are kept");
        refused(&["--data-in", "state"], "is where RAM disks and the state of runs are kept");
        refused(
            &["--data-out", "out", "--report", "no/report"],
            "can't write the report no/report; name another file: No such file",
        );
        refused(
            &["--data-out", "out", "--report", "in"],
            "can't write the report in; name another file: Is a directory",
        );
        refused(
            &["--data-out", "out", "--report", "r.json/"],
            "can't write the report r.json/; name another file: Is a directory",
        );
        let pipe = scene.path("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        refused(
            &["--data-out", "out", "--report", "pipe"],
            "can't write the report pipe; name another file: File exists",
        );
        assert!(!pipe.symlink_metadata().unwrap().is_file());
        fs::remove_file(&pipe).unwrap();
        if who == Who::User && is_root() {
            refused(
                &["--data-out", "out", "--report", "/report"],
                "can't write the report /report; name another file: Permission denied",
            );
        }
        let ran = scene
            .run_shell(&["--data-out", "out", "--report", "no/report", "--fallback", "disk"], "echo ran");
        ran.assert_code(0).assert_says("can't write the report no/report");
        assert_eq!(ran.out, "ran\n");
        let ran = scene.run_shell(
            &["--data-out", "out", "--size", "100TiB", "--fallback", "disk"],
            "stat -f -c %T out >&2; echo ran",
        );
        ran.assert_code(0).assert_says("running on disk").assert_says("ext");
        assert_eq!(ran.out, "ran\n");
        assert!(!ran.err.contains("--fallback"), "what is done is no advice: {ran:?}");
        if who == Who::User && is_root() {
            scene.file("in/secret", "x");
            std::os::unix::fs::chown(scene.path("in/secret"), Some(0), Some(0)).unwrap();
            fs::set_permissions(scene.path("in/secret"), fs::Permissions::from_mode(0o600)).unwrap();
            refused(&["--data-in", "in"], "secret: opening it: Permission denied");
            std::os::unix::fs::chown(scene.path("out"), Some(0), Some(0)).unwrap();
            refused(&["--data-out", "out"], "results could not be written there");
        }
        scene.assert_clean();
    }
}

#[test]
fn a_program_that_fills_the_ram_disk_sees_enospc_and_what_it_wrote_is_saved() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let ran = scene.run_shell(
        &["--data-out", "out", "--size", "4MiB", "--report", "report"],
        "head -c 1000000 /dev/zero | tr '\\0' x > out/first; head -c 9000000 /dev/zero > out/second",
    );
    assert_ne!(ran.code, Some(0));
    ran.assert_says("No space left on device")
        .assert_says("the RAM disk of 4 MiB was full")
        .assert_says("out/second");
    ran.assert_says("--size 8MiB");
    assert_eq!(fs::metadata(scene.path("out/first")).unwrap().len(), 1_000_000);
    assert_eq!(scene.report("report")["ram_disk"]["full"], true);
    assert_eq!(scene.report("report")["results_on_disk"], true);
    scene.assert_clean();
}

#[test]
fn a_target_that_is_full_or_read_only_loses_nothing_and_resume_finishes() {
    if !is_root() {
        return ondeck_skip::skipped("mounting a small tmpfs needs root");
    }
    for who in everyone() {
        let scene = Scene::new(who);
        let out = scene.dir("out");
        let options = if who == Who::User { "size=1m,uid=20001,gid=20001" } else { "size=1m" };
        let mounted = Mounted::tmpfs(&out, options);
        let ran = scene.run_shell(
            &["--data-out", "out", "--report", "report"],
            "head -c 3000000 /dev/zero | tr '\\0' x > out/big; echo small > out/small; exit 3",
        );
        ran.assert_code(122).assert_says("NOT ALL ON DISK").assert_says("No space left on device");
        let report = scene.report("report");
        assert_eq!((&report["program"]["exit_code"], &report["results_on_disk"]), (&3.into(), &false.into()));
        assert_eq!(scene.list("out"), ["small"], "what fits is there, and nothing half done");
        let id = report["id"].as_str().unwrap();
        // The message names a place where they can be read meanwhile.
        let reach = ran
            .err
            .split("read at ")
            .nth(1)
            .unwrap()
            .split_whitespace()
            .next()
            .unwrap()
            .trim_end_matches('.');
        assert_eq!(fs::metadata(format!("{reach}/big")).unwrap().len(), 3_000_000);
        assert!(scene.run(&["run", "--list"]).out.contains("holds results"));
        scene.run(&["run", "--resume", id]).assert_code(122);
        mounted.remount(true, "size=1m");
        scene.run(&["run", "--resume", id]).assert_code(122).assert_says("Read-only");
        mounted.remount(false, "size=10m");
        scene.run(&["run", "--resume", id]).assert_code(3).assert_says("staged out");
        assert_eq!(fs::metadata(scene.path("out/big")).unwrap().len(), 3_000_000);
        scene.wait_for_end();
        drop(mounted);
        scene.assert_clean();
    }
}

#[test]
fn results_are_given_up_only_by_name_and_with_confirmation() {
    if !is_root() {
        return ondeck_skip::skipped("mounting a small tmpfs needs root");
    }
    let scene = Scene::new(Who::User);
    let out = scene.dir("out");
    let mounted = Mounted::tmpfs(&out, "size=1m,uid=20001,gid=20001");
    scene
        .run_shell(&["--data-out", "out", "--report", "report"], "head -c 3000000 /dev/zero > out/big")
        .assert_code(122);
    let id = scene.report("report")["id"].as_str().unwrap().to_owned();
    scene.run(&["run", "--abandon", &id]).assert_code(125).assert_says("must be confirmed; add --yes");
    for unknown in [&["run", "--abandon", "nonsense"][..], &["run", "--abandon", "nonsense", "--yes"]] {
        scene.run(unknown).assert_code(125).assert_says("there is no run nonsense");
    }
    scene.run(&["run", "--abandon", &id, "--yes"]).assert_code(123).assert_says("given up");
    scene.wait_for_end();
    drop(mounted);
    scene.assert_clean();
}

#[test]
fn a_killed_command_loses_no_results() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        let mut run = scene.start(&[
            "run", "--data-out", "out", "--", "sh", "-c",
            "echo early > out/early; touch started; while ! test -e go; do sleep 0.02; done; echo late > out/late",
        ]);
        wait_until("the program", || scene.path("started").exists());
        run.kill().unwrap();
        run.wait().unwrap();
        scene.file("go", "");
        scene.wait_for_end();
        assert_eq!((scene.read("out/early"), scene.read("out/late")), ("early\n".into(), "late\n".into()));
        let reports = scene.state();
        assert_eq!(reports.len(), 1, "a record is kept for whoever looks");
        let report: serde_json::Value = serde_json::from_slice(&fs::read(&reports[0]).unwrap()).unwrap();
        assert_eq!(report["results_on_disk"], true);
    }
}

#[test]
fn signals_to_the_command_reach_the_program_and_its_results_are_staged_out() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1] {
        let scene = Scene::new(Who::User);
        scene.dir("out");
        let run = scene.start(&[
            "run",
            "--data-out",
            "out",
            "--",
            "sh",
            "-c",
            "trap 'echo INT > out/got; exit 9' INT; trap 'echo TERM > out/got; exit 9' TERM
             trap 'echo HUP > out/got; exit 9' HUP; trap 'echo USR1 > out/got; exit 9' USR1
             touch started; while :; do sleep 0.02; done",
        ]);
        wait_until("the program", || scene.path("started").exists());
        // SAFETY: a signal to our own child.
        unsafe { libc::kill(run.id() as i32, signal) };
        Ran::of(run.wait_with_output().unwrap()).assert_code(9);
        let expected = match signal {
            libc::SIGINT => "INT\n",
            libc::SIGTERM => "TERM\n",
            libc::SIGHUP => "HUP\n",
            _ => "USR1\n",
        };
        assert_eq!(scene.read("out/got"), expected);
        scene.assert_clean();
    }
}

#[test]
fn a_signal_while_staging_in_ends_the_run_and_changes_nothing() {
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
    // SAFETY: a signal to our own child.
    unsafe { libc::kill(run.id() as i32, libc::SIGTERM) };
    Ran::of(run.wait_with_output().unwrap()).assert_code(143).assert_says("nothing was changed");
    assert!(!scene.path("ran").exists());
    scene.wait_for_end();
    scene.assert_clean();
}

#[test]
fn processes_that_the_program_leaves_behind_are_ended_before_the_stage_out() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        let ran = scene.run_shell(
            &["--data-out", "out", "--report", "report"],
            "(trap '' TERM; while :; do date +%N > out/beat; sleep 0.01; done) > /dev/null 2>&1 & setsid sleep 1000 > /dev/null 2>&1 & \
             while ! test -e out/beat; do sleep 0.01; done; echo done > out/done",
        );
        ran.assert_code(0).assert_says("processes behind, which were ended");
        assert_eq!(scene.read("out/done"), "done\n");
        scene.assert_clean();
    }
}

#[test]
fn a_job_script_of_the_thesis_runs_with_its_stage_scripts() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("input");
        scene.dir("results");
        scene.dir("pre");
        scene.file("pre/data", "unpacked");
        let tar = std::process::Command::new("tar")
            .args([
                "-C",
                scene.path("pre").to_str().unwrap(),
                "-cf",
                scene.path("input/input.tar").to_str().unwrap(),
                "data",
            ])
            .status();
        assert!(tar.unwrap().success());
        scene.script("stage-in.sh", "#!/bin/sh\nset -e\ntar xf $2/input.tar -C $1\ntest $RSA_DATA_IN = $2\n");
        scene.script(
            "stage-out.sh",
            "#!/bin/sh\nset -e\ntest $RSA_RAMDISK = $1\ntar cf $2/result.tar -C $1 .\necho $RSA_JOB_ID > $2/id\n",
        );
        let at = |name: &str| scene.path(name).display().to_string();
        let script = format!(
            "#!/bin/bash\n#RSA_DATA_IN={}\n#RSA_STAGE_IN={}\n#RSA_DATA_OUT={}\n#RSA_STAGE_OUT={}\n#RSA_CAPACITY=16MiB\n\
             test ! -e input/input.tar && cp input/data results/$1\n",
            at("input"),
            at("stage-in.sh"),
            at("results"),
            at("stage-out.sh")
        );
        // Not executable: its first line says what runs it.
        scene.file("job.sh", script);
        let ran = scene.run(&["run", "--report", "report", "job.sh", "copied"]);
        ran.assert_code(0).assert_says("filled by the stage-in script");
        assert_eq!(scene.list("results"), ["id", "result.tar"]);
        assert_eq!(scene.read("results/id").trim(), scene.report("report")["id"].as_str().unwrap());
        let list =
            std::process::Command::new("tar").args(["tf", &at("results/result.tar")]).output().unwrap();
        assert!(String::from_utf8_lossy(&list.stdout).contains("./copied"));
        scene.script("stage-in.sh", "#!/bin/sh\nexit 4\n");
        scene.run(&["run", "job.sh", "x"]).assert_code(125).assert_says("the stage-in script");
        scene.script("stage-in.sh", "#!/bin/sh\ntrue\n");
        scene.file("bad.sh", "#!/bin/sh\n#RSA_DATAOUT=/x\n#RSA_DELAY=soon\n");
        let ran = scene.run(&["run", "bad.sh"]);
        ran.assert_code(125)
            .assert_says("line 2: RSA_DATAOUT")
            .assert_says("did you mean RSA_DATA_OUT?")
            .assert_says("line 3");
        scene.assert_clean();
    }
}

#[test]
fn a_failing_stage_out_script_holds_the_results() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    scene.script("save.sh", "#!/bin/sh\ntest -e ../allowed || test -e allowed || exit 5\ncp -r $1/. $2\n");
    let ran = scene
        .run_shell(&["--data-out", "out", "--stage-out", "save.sh", "--report", "report"], "echo x > out/x");
    ran.assert_code(122).assert_says("the stage-out script").assert_says("failed (exit status: 5)");
    scene.file("allowed", "");
    let id = scene.report("report")["id"].as_str().unwrap().to_owned();
    scene.run(&["run", "--resume", &id]).assert_code(0);
    assert_eq!(scene.read("out/x"), "x\n");
    scene.wait_for_end();
    scene.assert_clean();
}

#[test]
fn after_the_delay_the_input_makes_way_for_the_output() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("in");
        scene.file("in/a", "input");
        scene.dir("out");
        let ran = scene.run_shell(
            &["--data-in", "in", "--data-out", "out", "--delay", "1", "--report", "report"],
            "set -e
             stat -f -c %T in out; echo early > out/early; exec 3< in/a
             sleep 2; stat -f -c %T in; exec 3<&-
             while test $(stat -f -c %T out) != overlayfs; do sleep 0.05; done
             stat -f -c %T in; cat in/a out/early; echo late > out/late; echo more >> out/early",
        );
        ran.assert_code(0).assert_says("the switch after the delay");
        let words: Vec<&str> = ran.out.split_whitespace().collect();
        // While a file of the input is open, the switch waits.
        assert_eq!((words[0], words[2]), ("tmpfs", "tmpfs"), "{ran:?}");
        assert!(words[1].starts_with("ext") && words[3].starts_with("ext"), "{ran:?}");
        assert_eq!(&words[4..], ["inputearly"]);
        assert_eq!(
            (scene.read("out/early"), scene.read("out/late")),
            ("early\nmore\n".into(), "late\n".into())
        );
        assert_eq!(scene.report("report")["directories"][1]["mechanism"], "overlay");
        scene.assert_clean();
    }
}

#[test]
fn closed_files_are_copied_out_while_the_program_runs() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        scene.file("out/kept", "kept");
        let run = scene.start(&[
            "run", "--data-out", "out", "--copy-out-interval", "1s", "--", "sh", "-c",
            "exec 3> out/open; echo begun >&3; echo closed > out/closed; mkdir out/d; echo deep > out/d/deep; echo short > out/short
             mkdir -p out/deep/er; echo 1 > out/deep/er/x
             while ! test -e seen; do sleep 0.05; done; echo done >&3; rm out/short out/deep/er/x; echo changed > out/closed
             mv out/kept out/kept.old; echo new > out/kept",
        ]);
        wait_until("the copies", || {
            ["closed", "d/deep", "deep/er/x"].iter().all(|name| scene.path(&format!("out/{name}")).exists())
        });
        assert_eq!(scene.read("out/closed"), "closed\n");
        assert!(!scene.path("out/open").exists(), "a file that is being written is not copied");
        scene.file("seen", "");
        Ran::of(run.wait_with_output().unwrap()).assert_code(0);
        assert_eq!(scene.list("out"), ["closed", "d", "deep", "kept", "kept.old", "open"]);
        assert_eq!(
            scene.list("out/deep/er"),
            Vec::<String>::new(),
            "what was deleted since does not come back"
        );
        assert_eq!((scene.read("out/kept"), scene.read("out/kept.old")), ("new\n".into(), "kept".into()));
        assert_eq!(
            (scene.read("out/open"), scene.read("out/closed")),
            ("begun\ndone\n".into(), "changed\n".into())
        );
        scene.assert_clean();
    }
}

#[test]
fn regular_copies_that_fail_are_told_while_the_program_runs() {
    if !is_root() {
        return ondeck_skip::skipped("mounting a small tmpfs needs root");
    }
    for who in everyone() {
        let scene = Scene::new(who);
        let out = scene.dir("out");
        let options = if who == Who::User { "size=1m,uid=20001,gid=20001" } else { "size=1m" };
        let mounted = Mounted::tmpfs(&out, options);
        let mut run = scene.start(&[
            "run",
            "--data-out",
            "out",
            "--copy-out-interval",
            "1s",
            "--report",
            "report",
            "--",
            "sh",
            "-c",
            "head -c 3000000 /dev/zero | tr '\\0' x > out/big; while ! test -e seen; do sleep 0.05; done",
        ]);
        let (said, stderr) = (Arc::new(Mutex::new(String::new())), run.stderr.take().unwrap());
        let heard = Arc::clone(&said);
        let listening = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines() {
                *heard.lock().unwrap() += &line.unwrap();
            }
        });
        wait_until("the failure", || said.lock().unwrap().contains("No space left on device"));
        assert!(said.lock().unwrap().contains("is in RAM alone"), "{}", said.lock().unwrap());
        mounted.remount(false, "size=10m");
        wait_until("the success", || said.lock().unwrap().contains("succeed again"));
        assert_eq!(fs::metadata(scene.path("out/big")).unwrap().len(), 3_000_000);
        scene.file("seen", "");
        assert_eq!(run.wait().unwrap().code(), Some(0));
        listening.join().unwrap();
        let report = scene.report("report");
        assert_eq!((&report["results_on_disk"], &report["errors"]), (&true.into(), &serde_json::json!([])));
        assert_eq!(
            report["notes"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|note| { note.as_str().unwrap().contains("--copy-out-interval") })
                .count(),
            2,
            "{report:#}"
        );
        scene.wait_for_end();
        drop(mounted);
        scene.assert_clean();
    }
}

#[test]
fn results_can_come_home_as_one_archive() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        scene.file("out/before", "before");
        scene.script(
            "job.sh",
            &format!(
                "#!/bin/sh\n#RSA_DATA_OUT={}\n#RSA_PACK=tar.zst\nmkdir out/d; echo x > out/d/x\n",
                scene.path("out").display()
            ),
        );
        scene.run_with_umask(0o027, &["run", "--report", "report", "job.sh"]).assert_code(0);
        let archive = format!("results-{}.tar.zst", scene.report("report")["id"].as_str().unwrap());
        assert_eq!(scene.list("out"), ["before", archive.as_str()]);
        assert_eq!(scene.mode(&format!("out/{archive}")), "640");
        scene.run(&["stage", "--unpack", &format!("out/{archive}"), "unpacked"]).assert_code(0);
        assert_eq!(scene.read("unpacked/d/x"), "x\n");
        scene.assert_clean();
    }
}

#[test]
fn inside_a_slurm_job_the_program_is_ended_in_time_to_stage_out() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let end = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + Duration::from_secs(3600);
    let mut command = scene.ondeck(&[
        "run",
        "--data-out",
        "out",
        "--end-margin",
        "59m58s",
        "--",
        "sh",
        "-c",
        "trap 'echo asked > out/asked; exit 1' TERM; while :; do sleep 0.05; done",
    ]);
    command.env("SLURM_JOB_ID", "17").env("SLURM_JOB_END_TIME", end.as_secs().to_string());
    let ran = Ran::of(command.output().unwrap());
    ran.assert_code(1).assert_says("ending the program now").assert_says("inside Slurm job 17");
    assert_eq!(scene.read("out/asked"), "asked\n");
    scene.assert_clean();
}

#[test]
fn events_are_json_lines_and_quiet_is_quiet() {
    let scene = Scene::new(Who::User);
    scene.dir("in");
    scene.file("in/a", "x");
    let ran = scene.run_shell(&["--data-in", "in", "--json"], "echo to-stdout");
    assert_eq!(ran.out, "to-stdout\n");
    let events: Vec<serde_json::Value> =
        ran.err.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.last().unwrap()["event"], "finished");
    assert!(events.iter().any(|event| event["event"] == "phase" && event["name"] == "stage_in"));
    assert_eq!(scene.run_shell(&["--data-in", "in", "-q"], "true").err, "");
}
