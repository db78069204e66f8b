//! Modes that shut out even the owner, and what an ordinary user's run makes of them.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use scene::{Ran, Scene, Who, everyone, is_root, mode_of, wait_until};

/// Modes of directories that their owner can't read, or can't search, or neither, or can't write to.
const MODES: [u32; 11] = [0, 0o111, 0o222, 0o300, 0o333, 0o400, 0o444, 0o500, 0o555, 0o600, 0o666];

const WAYS: [(&str, bool); 4] = [("auto", false), ("auto", true), ("overlay", true), ("copy", true)];

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn xattr(path: &Path) -> String {
    let output = std::process::Command::new("getfattr")
        .args(["--absolute-names", "--only-values", "-n", "user.note"])
        .arg(path)
        .output()
        .expect("install the package attr");
    String::from_utf8(output.stdout).unwrap()
}

/// A directory `NAME` of a mode, with a file, and a directory of the same mode with a file in it.
fn script(name: &str, mode: u32) -> String {
    format!(
        "mkdir -p {name}/inner; echo f > {name}/file; echo g > {name}/inner/file; setfattr -n user.note -v d {name}
         chmod {mode:o} {name}/inner; chmod {mode:o} {name}"
    )
}

fn check(scene: &Scene, name: &str, mode: u32) {
    let path = scene.path(name);
    assert_eq!(mode_of(&path), mode, "{name}");
    assert_eq!(mode_of(&path.join("inner")), mode, "{name}/inner");
    assert_eq!(fs::read_to_string(path.join("file")).unwrap(), "f\n");
    assert_eq!(fs::read_to_string(path.join("inner/file")).unwrap(), "g\n");
    assert_eq!(xattr(&path), "d", "{name}");
}

/// As root, or there would be nobody who can look into the directories.
fn may_look() -> bool {
    if !is_root() {
        ondeck_skip::skipped("an ordinary user can't look into such directories afterwards");
    }
    is_root()
}

#[test]
fn directories_of_any_mode_that_the_program_makes_come_home_with_it() {
    if !may_look() {
        return;
    }
    for who in everyone() {
        for (how, held) in WAYS {
            let scene = Scene::new(who);
            scene.dir("out");
            if held {
                scene.file("out/old", "old");
            }
            let made: Vec<String> =
                MODES.iter().map(|mode| script(&format!("out/m{mode:o}"), *mode)).collect();
            let files = "for m in 000 200 222 400 444; do echo $m > out/f$m; setfattr -n user.note -v n out/f$m; chmod $m out/f$m; done";
            scene
                .run_shell(
                    &["--data-out", "out", "--existing", how],
                    &format!("set -e; {}\n{files}", made.join("\n")),
                )
                .assert_code(0);
            for mode in MODES {
                check(&scene, &format!("out/m{mode:o}"), mode);
            }
            for mode in [0, 0o200, 0o222, 0o400, 0o444] {
                let path = scene.path(&format!("out/f{mode:03o}"));
                assert_eq!(fs::read_to_string(&path).unwrap(), format!("{mode:03o}\n"));
                assert_eq!((mode_of(&path), xattr(&path)), (mode, "n".into()), "{who:?} {how} {mode:o}");
            }
            scene.assert_clean();
        }
    }
}

#[test]
fn an_output_directory_itself_may_get_any_mode() {
    if !may_look() {
        return;
    }
    for who in everyone() {
        for (how, held) in WAYS {
            for mode in MODES {
                let scene = Scene::new(who);
                scene.dir("out");
                if held {
                    scene.file("out/old", "old");
                }
                scene
                    .run_shell(
                        &["--data-out", "out", "--existing", how],
                        &format!("echo new > out/new; mkdir out/d; echo x > out/d/x; chmod {mode:o} out"),
                    )
                    .assert_code(0);
                assert_eq!(mode_of(&scene.path("out")), mode, "{who:?} {how}");
                assert_eq!((scene.read("out/new"), scene.read("out/d/x")), ("new\n".into(), "x\n".into()));
                scene.assert_clean();
            }
        }
    }
}

#[test]
fn directories_of_any_mode_that_were_there_stay_as_they_are() {
    if !may_look() {
        return;
    }
    for mode in MODES {
        for how in ["auto", "overlay", "copy"] {
            let scene = Scene::new(Who::User);
            scene.dir("out");
            scene.file("out/old", "old");
            for dir in ["out/d", "out/d/inner"] {
                scene.dir(dir);
                scene.file(&format!("{dir}/file"), if dir == "out/d" { "f\n" } else { "g\n" });
            }
            let status = std::process::Command::new("setfattr")
                .args(["-n", "user.note", "-v", "d"])
                .arg(scene.path("out/d"))
                .status();
            assert!(status.unwrap().success());
            set_mode(&scene.path("out/d/inner"), mode);
            set_mode(&scene.path("out/d"), mode);
            for dir in ["out/e", "out/gone"] {
                scene.dir(dir);
                scene.file(&format!("{dir}/file"), "f\n");
                set_mode(&scene.path(dir), mode);
            }
            let ran = scene.run_shell(
                &["--data-out", "out", "--existing", how],
                "echo new > out/new; chmod 700 out/e; echo more >> out/e/file; rm -r out/gone || { chmod 700 out/gone; rm -r out/gone; }",
            );
            if how == "copy" && mode & 0o500 != 0o500 {
                ran.assert_code(125).assert_says("which shuts out its owner").assert_says("chmod u+rwX");
                assert_eq!(scene.list("out"), ["d", "e", "gone", "old"]);
            } else {
                ran.assert_code(0);
                assert_eq!(scene.list("out"), ["d", "e", "new", "old"], "{how} {mode:o}");
                assert_eq!(scene.read("out/e/file"), "f\nmore\n");
                assert_eq!(mode_of(&scene.path("out/e")), 0o700);
            }
            check(&scene, "out/d", mode);
            scene.assert_clean();
        }
    }
}

#[test]
fn an_input_that_can_not_be_read_is_refused_before_the_start() {
    if !may_look() {
        return;
    }
    for mode in MODES {
        let scene = Scene::new(Who::User);
        scene.dir("in");
        scene.dir("in/d");
        scene.file("in/d/file", "f");
        set_mode(&scene.path("in/d"), mode);
        let ran = scene.run_shell(&["--data-in", "in"], "cat in/d/file");
        if mode & 0o500 == 0o500 {
            ran.assert_code(0);
        } else {
            ran.assert_code(125).assert_says("`d` in it has the mode").assert_says("chmod u+rwX");
        }
        assert_eq!(mode_of(&scene.path("in/d")), mode);
        scene.assert_clean();
    }
}

#[test]
fn modes_that_shut_out_the_owner_survive_copies_while_the_program_runs_and_kills_of_the_keeper() {
    if !may_look() {
        return;
    }
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let made: Vec<String> = MODES.iter().map(|mode| script(&format!("out/m{mode:o}"), *mode)).collect();
    let made = made.join("\n");
    let run = scene.start(&[
        "run",
        "--data-out",
        "out",
        "--copy-out-interval",
        "1s",
        "--bandwidth",
        "3MiB/s",
        "--",
        "sh",
        "-c",
        &format!(
            "set -e; {made}\necho x > out/copied; while ! test -e go; do sleep 0.02; done
             head -c 6000000 /dev/zero > out/zero; chmod 000 out/zero; touch started; exit 2"
        ),
    ]);
    wait_until("a copy", || scene.path("out/copied").exists());
    let program = || {
        let children = format!("/proc/{0}/task/{0}/children", run.id());
        fs::read_to_string(children).unwrap().split_whitespace().next().map(|pid| pid.parse::<i32>().unwrap())
    };
    let keeper = program().unwrap();
    // Through the program's own eyes: nobody else sees the RAM disk.
    let inside = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap();
    let inside = inside.split_whitespace().next().unwrap().to_owned();
    let root = format!("/proc/{inside}/root{}", fs::canonicalize(scene.path("out")).unwrap().display());
    for mode in MODES {
        assert_eq!(mode_of(Path::new(&format!("{root}/m{mode:o}"))), mode, "while the program runs");
    }
    scene.file("go", "");
    wait_until("the end of the program", || scene.path("started").exists());
    for _ in 0..3 {
        wait_until("the stage-out", || {
            fs::read_dir(scene.path("out"))
                .unwrap()
                .any(|entry| entry.unwrap().file_name().to_string_lossy().contains("partial"))
        });
        let keeper = program().unwrap();
        // SAFETY: a signal to a process of this test's own.
        unsafe { libc::kill(keeper, libc::SIGKILL) };
        wait_until("another keeper", || program().is_some_and(|now| now != keeper));
    }
    Ran::of(run.wait_with_output().unwrap()).assert_code(2);
    for mode in MODES {
        check(&scene, &format!("out/m{mode:o}"), mode);
    }
    assert_eq!(mode_of(&scene.path("out/zero")), 0);
    scene.wait_for_end();
    scene.assert_clean();
}

#[test]
fn an_archive_of_results_has_their_modes_whatever_these_are() {
    if !may_look() {
        return;
    }
    let mut scene = Scene::new(Who::User);
    scene.dir("out");
    let made: Vec<String> = MODES.iter().map(|mode| script(&format!("out/m{mode:o}"), *mode)).collect();
    scene
        .run_shell(
            &["--data-out", "out", "--pack", "tar", "--report", "report"],
            &format!("set -e; {}\necho f > out/f; chmod 200 out/f; chmod 300 out", made.join("\n")),
        )
        .assert_code(0);
    let archive = format!("out/results-{}.tar", scene.report("report")["id"].as_str().unwrap());
    scene.who = Who::Me;
    scene.run(&["stage", "--unpack", "-p", &archive, "unpacked"]).assert_code(0);
    for mode in MODES {
        check(&scene, &format!("unpacked/m{mode:o}"), mode);
    }
    assert_eq!((scene.read("unpacked/f"), mode_of(&scene.path("unpacked/f"))), ("f\n".into(), 0o200));
}

#[test]
fn a_file_that_its_owner_may_not_write_to_is_staged_with_its_attributes() {
    let scene = Scene::new(Who::User);
    scene.dir("source");
    scene.dir("source/d");
    for name in ["source/d/file", "source/d"] {
        if name != "source/d" {
            scene.file(name, "f");
        }
        let status = std::process::Command::new("setfattr")
            .args(["-n", "user.note", "-v", "n"])
            .arg(scene.path(name))
            .status();
        assert!(status.unwrap().success());
        set_mode(&scene.path(name), if name == "source/d" { 0o555 } else { 0o444 });
    }
    scene.run(&["stage", "source", "target"]).assert_code(0);
    for (name, mode) in [("target/d", 0o555), ("target/d/file", 0o444)] {
        assert_eq!((mode_of(&scene.path(name)), xattr(&scene.path(name))), (mode, "n".into()));
    }
}

#[test]
fn a_directory_that_was_to_go_and_stays_for_what_somebody_put_into_it_keeps_its_mode() {
    if !may_look() {
        return;
    }
    for who in everyone() {
        for how in ["overlay", "copy"] {
            let scene = Scene::new(who);
            for name in ["out", "out/dir", "out/dir/inner"] {
                scene.dir(name);
            }
            scene.file("out/dir/inner/old", "old");
            for name in ["out/dir/inner", "out/dir"] {
                set_mode(&scene.path(name), 0o500);
            }
            let script =
                "chmod -R u+w out/dir; rm -r out/dir; touch started; while ! test -e go; do sleep 0.02; done";
            let run = scene.start(&["run", "--data-out", "out", "--existing", how, "--", "sh", "-c", script]);
            wait_until("the program", || scene.path("started").exists());
            scene.file("out/dir/inner/theirs", "theirs");
            scene.file("go", "");
            Ran::of(run.wait_with_output().unwrap()).assert_code(0);
            assert_eq!(scene.list("out/dir/inner"), ["theirs"], "{who:?} {how}");
            let modes = ["out/dir", "out/dir/inner"].map(|name| mode_of(&scene.path(name)));
            assert_eq!(modes, [0o500, 0o500], "{who:?} {how}");
            scene.assert_clean();
        }
    }
}
