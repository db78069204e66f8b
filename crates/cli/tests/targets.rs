//! Directories that somebody renames or removes while results are on their way to them.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Child;

use scene::{Ran, Scene, Who, everyone, is_root, mode_of, wait_until};

/// Writes, and waits until the test has done its part.
const PROGRAM: &str = "echo new > out/new; mkdir out/d; echo deep > out/d/deep; touch started
    while ! test -e go; do sleep 0.02; done; exit 4";

/// Starts the program with an output directory, and returns once it has written.
fn begin(scene: &Scene, options: &[&str]) -> Child {
    let run = scene.start(
        &[&["run", "--data-out", "out", "--report", "report"], options, &["--", "sh", "-c", PROGRAM]]
            .concat(),
    );
    wait_until("the program", || scene.path("started").exists());
    run
}

fn end(scene: &Scene, run: Child) -> Ran {
    scene.file("go", "");
    Ran::of(run.wait_with_output().unwrap())
}

fn resume(scene: &Scene) -> Ran {
    let id = scene.report("report")["id"].as_str().unwrap().to_owned();
    scene.run(&["run", "--resume", &id])
}

/// An output directory that holds something, or nothing.
fn output(scene: &Scene, held: bool) {
    scene.dir("out");
    if held {
        scene.file("out/old", "old");
    }
}

fn expected(held: bool) -> Vec<&'static str> {
    if held { vec!["d", "new", "old"] } else { vec!["d", "new"] }
}

const WAYS: [(&str, bool); 3] = [("auto", false), ("overlay", true), ("copy", true)];

#[test]
fn a_target_renamed_while_the_program_runs_gets_its_results_where_it_is_and_the_run_says_so() {
    for who in everyone() {
        for (how, held) in WAYS {
            for put_in_its_place in ["nothing", "a directory", "a symlink", "a file"] {
                let scene = Scene::new(who);
                output(&scene, held);
                let run = begin(&scene, &["--existing", how]);
                fs::rename(scene.path("out"), scene.path("out.old")).unwrap();
                match put_in_its_place {
                    "a directory" => drop(scene.dir("out")),
                    "a symlink" => symlink("/etc", scene.path("out")).unwrap(),
                    "a file" => drop(scene.file("out", "theirs")),
                    _ => {}
                }
                let ran = end(&scene, run);
                let now = fs::canonicalize(scene.path("out.old")).unwrap();
                ran.assert_code(121).assert_says(&format!("its results are in {}", now.display()));
                assert_eq!(scene.list("out.old"), expected(held), "{how}, {put_in_its_place}");
                assert_eq!(scene.read("out.old/d/deep"), "deep\n");
                if put_in_its_place == "a directory" {
                    assert_eq!(scene.list("out"), Vec::<String>::new());
                }
                let report = scene.report("report");
                assert_eq!(report["moved"][0]["now"], now.to_str().unwrap());
                assert_eq!((&report["results_on_disk"], &report["exit_code"]), (&true.into(), &121.into()));
                assert_eq!(report["program"]["exit_code"], 4);
                scene.assert_clean();
            }
        }
    }
}

#[test]
fn a_target_whose_parent_is_renamed_gets_its_results_and_a_symlink_to_it_is_its_path() {
    let scene = Scene::new(Who::User);
    scene.dir("parent");
    scene.dir("parent/out");
    let script = PROGRAM.replace("out/", "parent/out/");
    let arguments = ["run", "--data-out", "parent/out", "--", "sh", "-c", &script];
    let run = scene.start(&arguments);
    wait_until("the program", || scene.path("started").exists());
    fs::rename(scene.path("parent"), scene.path("other")).unwrap();
    end(&scene, run).assert_code(121).assert_says("other/out");
    assert_eq!(scene.list("other/out"), ["d", "new"]);
    scene.assert_clean();

    for name in ["started", "go"] {
        fs::remove_file(scene.path(name)).unwrap();
    }
    scene.dir("out");
    let run = begin(&scene, &[]);
    fs::rename(scene.path("out"), scene.path("elsewhere")).unwrap();
    symlink("elsewhere", scene.path("out")).unwrap();
    end(&scene, run).assert_code(4);
    assert_eq!(scene.list("elsewhere"), ["d", "new"]);
    scene.assert_clean();
}

#[test]
fn results_of_a_target_that_was_removed_are_held_and_resume_brings_them_to_a_new_one() {
    for who in everyone() {
        for (how, held) in WAYS {
            for made_anew in [false, true] {
                let scene = Scene::new(who);
                output(&scene, held);
                fs::set_permissions(scene.path("out"), std::os::unix::fs::PermissionsExt::from_mode(0o750))
                    .unwrap();
                let run = begin(&scene, &["--existing", how]);
                fs::remove_dir_all(scene.path("out")).unwrap();
                if made_anew {
                    scene.dir("out");
                    scene.file("out/new", "theirs");
                }
                end(&scene, run)
                    .assert_code(122)
                    .assert_says("the directory was removed while the program ran");
                assert_eq!(scene.path("out").exists(), made_anew, "nothing is made unasked");
                resume(&scene).assert_code(4).assert_says("go to the one that is there now");
                assert_eq!(scene.read("out/d/deep"), "deep\n", "{how} {made_anew}");
                // An overlay shows what is on disk; the others have all of it in RAM.
                assert_eq!(scene.path("out/old").exists(), how == "copy");
                if made_anew {
                    assert_eq!(scene.read("out/new"), "theirs");
                    assert!(scene.list("out").iter().any(|name| name.starts_with("new.ondeck-")));
                } else {
                    assert_eq!(scene.read("out/new"), "new\n");
                    assert_eq!(mode_of(&scene.path("out")), 0o750);
                }
                scene.wait_for_end();
                scene.assert_clean();
            }
        }
    }
}

#[test]
fn a_directory_of_somebody_else_or_a_symlink_does_not_get_the_results_of_a_removed_target() {
    let scene = Scene::new(Who::User);
    output(&scene, false);
    let run = begin(&scene, &[]);
    fs::remove_dir_all(scene.path("out")).unwrap();
    scene.dir("other");
    symlink("other", scene.path("out")).unwrap();
    end(&scene, run).assert_code(122);
    resume(&scene).assert_code(122).assert_says("a symlink in its path");
    fs::remove_file(scene.path("out")).unwrap();
    scene.file("out", "");
    resume(&scene).assert_code(122).assert_says("there is no directory at its path");
    fs::remove_file(scene.path("out")).unwrap();
    if is_root() {
        fs::create_dir(scene.path("out")).unwrap();
        fs::set_permissions(scene.path("out"), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        resume(&scene).assert_code(122).assert_says("belongs to another user (uid 0)");
        assert_eq!(scene.list("out"), Vec::<String>::new());
        fs::remove_dir(scene.path("out")).unwrap();
    }
    assert_eq!(scene.list("other"), Vec::<String>::new());
    resume(&scene).assert_code(4);
    assert_eq!(scene.list("out"), ["d", "new"]);
    scene.wait_for_end();
    scene.assert_clean();
}

#[test]
fn results_of_a_target_that_is_unmounted_or_mounted_over_are_held_until_it_is_back() {
    if !is_root() {
        return ondeck_skip::skipped("mounting needs root");
    }
    let mount = |arguments: &[&Path]| {
        let status = std::process::Command::new("mount").args(arguments).status();
        assert!(status.unwrap().success());
    };
    let unmount = |path: &Path| {
        let status = std::process::Command::new("umount").arg("-l").arg(path).status();
        assert!(status.unwrap().success());
    };
    for covered in [false, true] {
        let scene = Scene::new(Who::Me);
        let (disk, out) = (scene.dir("disk"), scene.dir("out"));
        mount(&[Path::new("--bind"), &disk, &out]);
        let run = begin(&scene, &[]);
        if covered {
            mount(&[Path::new("--bind"), &scene.dir("cover"), &out]);
        } else {
            unmount(&out);
        }
        let ran = end(&scene, run);
        let resumed = resume(&scene);
        if covered {
            unmount(&out);
        } else {
            mount(&[Path::new("--bind"), &disk, &out]);
        }
        let back = resume(&scene);
        unmount(&out);
        ran.assert_code(122).assert_says("no path leads to it any more");
        resumed.assert_code(122);
        back.assert_code(4);
        assert_eq!(scene.list("disk"), ["d", "new"]);
        assert_eq!(scene.list("out"), Vec::<String>::new());
        scene.wait_for_end();
        scene.assert_clean();
    }
}

#[test]
fn a_stage_out_script_is_not_sent_to_another_directory() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    scene.script("save.sh", "#!/bin/sh\ncp -r $1/. $2\n");
    let run = begin(&scene, &["--stage-out", "save.sh"]);
    fs::rename(scene.path("out"), scene.path("out.old")).unwrap();
    scene.dir("out");
    end(&scene, run).assert_code(122).assert_says("move it back, for the stage-out script");
    assert_eq!((scene.list("out").len(), scene.list("out.old").len()), (0, 0));
    fs::remove_dir(scene.path("out")).unwrap();
    fs::rename(scene.path("out.old"), scene.path("out")).unwrap();
    resume(&scene).assert_code(4);
    assert_eq!(scene.list("out"), ["d", "new"]);
    scene.wait_for_end();
    scene.assert_clean();
}

#[test]
fn files_copied_while_the_program_runs_don_t_hide_that_their_directory_was_renamed() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    let run = begin(&scene, &["--copy-out-interval", "1s"]);
    fs::rename(scene.path("out"), scene.path("out.old")).unwrap();
    scene.dir("out");
    wait_until("the copies", || scene.path("out.old/d/deep").exists());
    end(&scene, run).assert_code(121).assert_says("out.old");
    assert_eq!((scene.list("out").len(), scene.list("out.old")), (0, vec!["d".into(), "new".into()]));
    scene.assert_clean();
}

#[test]
fn a_copy_whose_target_is_renamed_meanwhile_does_not_claim_success() {
    for existing in [true, false] {
        let scene = Scene::new(Who::User);
        scene.dir("source");
        scene.file("source/big", vec![1; 6 << 20]);
        scene.dir("parent");
        if existing {
            scene.dir("parent/target");
        }
        let run = scene.start(&["stage", "--bandwidth", "4MiB/s", "source", "parent/target"]);
        wait_until("the copy", || scene.list("parent").len() + usize::from(existing) > usize::from(existing));
        wait_until("the copy's first file", || {
            let names = scene.list("parent");
            names.iter().any(|name| !scene.list(&format!("parent/{name}")).is_empty())
        });
        fs::rename(scene.path("parent"), scene.path("other")).unwrap();
        let ran = Ran::of(run.wait_with_output().unwrap());
        ran.assert_code(3).assert_says("it was renamed meanwhile").assert_says("other");
        assert_eq!(scene.list("other/target"), ["big"]);
    }
}
