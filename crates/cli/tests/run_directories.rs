//! What `ondeck run` promises of files with names in several places, and of directories that were there before.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use scene::{Ran, Scene, Who, everyone, is_root, mode_of, wait_until};

/// The ways in which a directory that holds something can be shown.
const SHOWN: [&str; 2] = ["overlay", "copy"];

/// Names that were put beside others, anywhere in the scene's directories.
fn beside(scene: &Scene, directories: &[&str]) -> Vec<String> {
    let all = directories.iter().flat_map(|directory| scene.list(directory));
    all.filter(|name| name.contains(".ondeck-")).collect()
}

/// A command that must succeed; gives its standard output.
#[track_caller]
fn tool(name: &str, arguments: &[&str]) -> String {
    let ran = Command::new(name).args(arguments).output().unwrap();
    assert!(ran.status.success(), "{name} {arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

fn at(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_file_with_names_in_several_output_directories_becomes_what_the_program_made_of_each() {
    for who in everyone() {
        for how in SHOWN {
            let scene = Scene::new(who);
            for name in ["one", "two", "three", "outside"] {
                scene.dir(name);
            }
            for file in ["written", "removed", "mixed", "half", "chain"] {
                scene.file(&format!("one/{file}"), "before");
                fs::hard_link(scene.path(&format!("one/{file}")), scene.path(&format!("two/{file}")))
                    .unwrap();
            }
            fs::hard_link(scene.path("one/chain"), scene.path("three/chain")).unwrap();
            fs::hard_link(scene.path("one/chain"), scene.path("three/chain.2")).unwrap();
            scene.file("three/away", "before");
            scene.file("three/kept", "before");
            fs::hard_link(scene.path("three/away"), scene.path("outside/away")).unwrap();
            fs::hard_link(scene.path("three/kept"), scene.path("outside/kept")).unwrap();
            let script = "
                set -e
                for d in one two; do echo $d > $d/new; mv $d/new $d/written; done
                rm one/removed two/removed
                rm one/mixed; echo two > two/mixed
                echo one >> one/half
                for n in one/chain two/chain three/chain.2; do rm $n; done; echo three > three/chain
                rm outside/away; echo three > three/away; rm three/kept; echo out > outside/kept2
                ! ln one/written two/linked 2> err; grep -qi cross-device err
            ";
            let ran = scene.run_shell(
                &["--data-out", "one", "--data-out", "two", "--data-out", "three", "--existing", how],
                script,
            );
            ran.assert_code(0);
            assert!(!ran.err.contains("someone else"), "{who:?} {how}: {ran:?}");
            assert_eq!(
                beside(&scene, &["one", "two", "three"]),
                Vec::<String>::new(),
                "{who:?} {how}: {ran:?}"
            );
            assert_eq!(scene.list("one"), ["half", "written"], "{who:?} {how}");
            assert_eq!(scene.list("two"), ["half", "mixed", "written"], "{who:?} {how}");
            assert_eq!(scene.list("three"), ["away", "chain"], "{who:?} {how}");
            assert_eq!(
                (scene.read("one/written"), scene.read("two/written")),
                ("one\n".into(), "two\n".into())
            );
            assert_eq!(
                (scene.read("one/half"), scene.read("two/half")),
                ("beforeone\n".into(), "before".into())
            );
            assert_eq!(scene.read("two/mixed"), "two\n");
            assert_eq!(
                (scene.read("three/chain"), scene.read("three/away")),
                ("three\n".into(), "three\n".into())
            );
            assert_eq!(scene.read("outside/kept"), "before");
            scene.assert_clean();
        }
    }
}

#[test]
fn a_file_with_several_names_that_someone_else_changed_is_theirs_in_every_output_directory() {
    for who in everyone() {
        for how in SHOWN {
            let scene = Scene::new(who);
            for name in ["one", "two"] {
                scene.dir(name);
            }
            for file in ["content", "swapped"] {
                scene.file(&format!("one/{file}"), "before");
                fs::hard_link(scene.path(&format!("one/{file}")), scene.path(&format!("two/{file}")))
                    .unwrap();
            }
            scene.file("two/other", "other!");
            fs::hard_link(scene.path("two/other"), scene.path("one/other")).unwrap();
            let script = "for f in content swapped; do for d in one two; do echo mine > $d/new; mv $d/new $d/$f; done; done
                          touch started; while ! test -e go; do sleep 0.02; done";
            let run = scene.start(&[
                "run",
                "--data-out",
                "one",
                "--data-out",
                "two",
                "--existing",
                how,
                "--",
                "sh",
                "-c",
                script,
            ]);
            wait_until("the program", || scene.path("started").exists());
            fs::write(scene.path("one/content"), "theirs").unwrap();
            // Another file that had several names before, unchanged, takes the place of one of them.
            tool("ln", &["-f", at(&scene.path("two/other")), at(&scene.path("two/swapped"))]);
            scene.file("go", "");
            Ran::of(run.wait_with_output().unwrap()).assert_code(0).assert_says("someone else");
            for name in ["one/content", "two/content"] {
                assert_eq!(scene.read(name), "theirs", "{who:?} {how} {name}");
            }
            assert_eq!(scene.read("two/swapped"), "other!", "{who:?} {how}");
            assert_eq!(scene.read("one/swapped"), "mine\n", "{who:?} {how}");
            assert_eq!(beside(&scene, &["one", "two"]).len(), 3, "{who:?} {how}");
            scene.assert_clean();
        }
    }
}

#[test]
fn a_directory_that_someone_else_put_in_place_of_another_is_theirs() {
    for who in everyone() {
        for how in ["bind", "overlay", "copy"] {
            let scene = Scene::new(who);
            scene.dir("out");
            scene.dir("aside");
            for directory in ["theirs", "theirs/d", "theirs/gone", "theirs/new", "theirs/new/deep"] {
                scene.dir(directory);
            }
            for file in ["d/changed", "d/removed", "gone/file", "new/file", "new/deep/file"] {
                scene.file(&format!("theirs/{file}"), "theirs");
            }
            if how != "bind" {
                scene.dir("out/d");
                scene.dir("out/gone");
                for file in ["d/changed", "d/removed", "gone/file"] {
                    scene.file(&format!("out/{file}"), "before");
                }
            }
            let script = "
                if test -d out/d; then echo mine > out/d/changed; rm -r out/d/removed out/gone; fi
                mkdir -p out/new/deep; echo mine > out/new/file; echo mine > out/new/deep/file
                touch started; while ! test -e go; do sleep 0.02; done";
            let options =
                ["run", "--data-out", "out", "--existing", if how == "bind" { "auto" } else { how }];
            let run = scene.start(&[&options[..], &["--", "sh", "-c", script]].concat());
            wait_until("the program", || scene.path("started").exists());
            // Of what a directory holds no time tells that it was renamed.
            let moved = |from: &str, to: &str| fs::rename(scene.path(from), scene.path(to)).unwrap();
            for directory in ["d", "gone"].into_iter().filter(|_| how != "bind") {
                moved(&format!("out/{directory}"), &format!("aside/{directory}"));
                moved(&format!("theirs/{directory}"), &format!("out/{directory}"));
            }
            moved("theirs/new", "out/new");
            scene.file("go", "");
            let ran = Ran::of(run.wait_with_output().unwrap());
            let what = format!("{who:?} {how}: {ran:?}");
            ran.assert_code(0).assert_says("someone else");
            let mut changed = vec!["new/file", "new/deep/file"];
            if how != "bind" {
                changed.push("d/changed");
                assert_eq!(scene.read("out/d/removed"), "theirs", "{what}");
                assert_eq!(scene.read("out/gone/file"), "theirs", "{what}");
                assert_eq!(scene.read("aside/d/changed"), "before", "{what}");
            }
            for file in &changed {
                assert_eq!(scene.read(&format!("out/{file}")), "theirs", "{what}");
            }
            let mut beside =
                beside(&scene, &["out/d", "out/new", "out/new/deep"][usize::from(how == "bind")..]);
            beside.sort();
            assert_eq!(beside.len(), changed.len(), "{what} {beside:?}");
            scene.assert_clean();
        }
    }
}

#[test]
fn what_someone_else_puts_where_the_program_makes_a_directory_gets_nothing_of_it() {
    const OTHER: u32 = 20_003;
    if !is_root() {
        return ondeck_skip::skipped("becoming another user needs root");
    }
    for who in everyone() {
        for how in ["bind", "overlay", "copy"] {
            let scene = Scene::new(who);
            scene.dir("out");
            fs::set_permissions(scene.path("out"), fs::Permissions::from_mode(0o2777)).unwrap();
            let theirs = |name: &str| {
                let path = scene.path(name);
                fs::create_dir(&path).unwrap();
                std::os::unix::fs::chown(&path, Some(OTHER), Some(OTHER)).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
            };
            // An ordinary user's overlay has no place for them.
            let shared = how == "copy" || how == "overlay" && who == Who::Me;
            if shared {
                // What was another user's when the program began is merged into.
                theirs("out/shared");
            }
            if how != "bind" {
                scene.dir("out/swapped");
                scene.file("out/swapped/file", "before");
            }
            let script = "
                touch out/shared/file; mkdir -p out/swapped; echo mine > out/swapped/file
                mkdir -m 700 out/private out/private/deep; echo secret > out/private/key
                echo secret > out/private/deep/key; chmod 644 out/private/key
                mkdir out/symlink out/pipe out/mine; for d in symlink pipe mine; do echo mine > out/$d/file; done
                touch started; while ! test -e go; do sleep 0.02; done";
            let options =
                ["run", "--data-out", "out", "--existing", if how == "bind" { "auto" } else { how }];
            let run =
                scene.start(&[&options[..], &["--report", "report", "--", "sh", "-c", script]].concat());
            wait_until("the program", || scene.path("started").exists());
            theirs("out/private");
            theirs("out/private/deep");
            std::os::unix::fs::symlink("nowhere", scene.path("out/symlink")).unwrap();
            tool("mkfifo", &[at(&scene.path("out/pipe"))]);
            scene.dir("out/mine");
            let mut wanted = vec!["pipe", "private", "symlink"];
            if how != "bind" {
                fs::rename(scene.path("out/swapped"), scene.path("aside")).unwrap();
                theirs("out/swapped");
                wanted.push("swapped");
            }
            scene.file("go", "");
            let ran = Ran::of(run.wait_with_output().unwrap());
            ran.assert_code(0).assert_says("someone else");
            let what = format!("{who:?} {how}: {ran:?}");
            assert_eq!(scene.list("out/private"), ["deep"], "{what}");
            assert_eq!(scene.list("out/private/deep"), Vec::<String>::new(), "{what}");
            assert_eq!(fs::read_link(scene.path("out/symlink")).unwrap(), Path::new("nowhere"), "{what}");
            assert_eq!(scene.read("out/mine/file"), "mine\n", "{what}");
            let beside = beside(&scene, &["out"]);
            let of = |name: &str| {
                beside.iter().find(|beside| beside.starts_with(&format!("{name}.ondeck-"))).unwrap()
            };
            assert_eq!(beside.len(), wanted.len(), "{what} {beside:?}");
            let private = of("private");
            assert_eq!(mode_of(&scene.path("out").join(private)) & 0o777, 0o700, "{what}");
            for file in ["key", "deep/key"] {
                assert_eq!(scene.read(&format!("out/{private}/{file}")), "secret\n", "{what}");
            }
            for name in ["symlink", "pipe"] {
                assert_eq!(scene.read(&format!("out/{}/file", of(name))), "mine\n", "{what}");
            }
            if how != "bind" {
                assert_eq!(scene.list("out/swapped"), Vec::<String>::new(), "{what}");
                assert_eq!(scene.read(&format!("out/{}/file", of("swapped"))), "mine\n", "{what}");
            }
            if shared {
                assert_eq!(scene.list("out/shared"), ["file"], "{what}");
            }
            let report = scene.report("report").to_string();
            for name in &wanted {
                assert!(report.contains(of(name)), "{what} {report}");
            }
            scene.assert_clean();
        }
    }
}

#[test]
fn names_of_a_new_file_that_were_copied_out_early_can_change_afterwards() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("out");
        let run = scene.start(&[
            "run",
            "--data-out",
            "out",
            "--copy-out-interval",
            "1s",
            "--",
            "sh",
            "-c",
            "echo first > out/a; ln out/a out/b; ln out/a out/c
             while ! test -e seen; do sleep 0.05; done
             for n in a b c; do echo $n > out/new; mv out/new out/$n; done",
        ]);
        wait_until("the copies", || {
            ["a", "b", "c"].iter().all(|name| scene.path(&format!("out/{name}")).exists())
        });
        scene.file("seen", "");
        Ran::of(run.wait_with_output().unwrap()).assert_code(0);
        assert_eq!(scene.list("out"), ["a", "b", "c"], "{who:?}");
        assert_eq!(["a", "b", "c"].map(|name| scene.read(&format!("out/{name}"))), ["a\n", "b\n", "c\n"]);
        scene.assert_clean();
    }
}

#[test]
fn names_outside_of_an_output_directory_are_told_before_the_program_starts() {
    let scene = Scene::new(Who::User);
    scene.dir("out");
    scene.dir("outside");
    scene.file("out/a", "before");
    fs::hard_link(scene.path("out/a"), scene.path("outside/a")).unwrap();
    for how in SHOWN {
        let ran = scene.run_shell(&["--data-out", "out", "--existing", how], "true");
        ran.assert_code(0).assert_says("1 file in it has further names outside of it");
    }
    fs::remove_file(scene.path("outside/a")).unwrap();
    fs::hard_link(scene.path("out/a"), scene.path("out/b")).unwrap();
    let ran = scene.run_shell(&["--data-out", "out"], "true");
    assert!(!ran.err.contains("further names"), "{ran:?}");
}

fn modified(path: &Path) -> i64 {
    fs::metadata(path).unwrap().mtime()
}

/// The extended attributes of a directory, without those of security modules, and with its ACLs in words.
fn xattrs(path: &Path) -> Vec<String> {
    let text = tool("getfattr", &["--absolute-names", "-h", "-d", "-m", "^(user|trusted)\\.", at(path)]);
    let mut found: Vec<String> =
        text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect();
    found.sort();
    found
}

fn acl(path: &Path) -> Vec<String> {
    let text = tool("getfacl", &["-cpEn", at(path)]);
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

const OLD: &str = "2001-02-03T04:05:06Z";
const OLD_SECONDS: i64 = 981_173_106;
const OLDER: &str = "1999-01-01T00:00:00Z";
const OLDER_SECONDS: i64 = 915_148_800;

/// An output directory of each mechanism, with the options that lead to it.
fn shown(who: Who, how: &str) -> (Scene, Vec<&'static str>) {
    let scene = Scene::new(who);
    scene.dir("out");
    let options = if how == "bind" {
        vec!["--data-out", "out", "--report", "report"]
    } else {
        for name in ["sub", "sub/deep", "left", "quiet"] {
            scene.dir(&format!("out/{name}"));
            scene.file(&format!("out/{name}/file"), name);
        }
        match how {
            "overlay" => vec!["--data-out", "out", "--existing", "overlay", "--report", "report"],
            _ => vec!["--data-out", "out", "--existing", "copy", "--report", "report"],
        }
    };
    (scene, options)
}

fn each(mut test: impl FnMut(Scene, &[&str], &str, Who)) {
    for who in everyone() {
        for how in ["bind", "copy", "overlay"] {
            let (scene, options) = shown(who, how);
            test(scene, &options, how, who);
        }
    }
}

#[test]
fn times_that_the_program_sets_on_directories_that_were_there_come_home() {
    each(|scene, options, how, who| {
        let what = format!("{who:?} {how}");
        let script = format!("touch -d {OLD} out; test ! -d out/sub || touch -d {OLD} out/sub out/sub/deep");
        scene.run_shell(options, &script).assert_code(0);
        assert_eq!(modified(&scene.path("out")), OLD_SECONDS, "{what}");
        assert_eq!(fs::metadata(scene.path("out")).unwrap().atime(), OLD_SECONDS, "{what}");
        if how != "bind" {
            assert_eq!(modified(&scene.path("out/sub")), OLD_SECONDS, "{what}");
            assert_eq!(modified(&scene.path("out/sub/deep")), OLD_SECONDS, "{what}");
        }
        // With something written into them beforehand, as rsync -a does.
        let script = format!(
            "echo x > out/x; test ! -d out/sub || {{ echo x > out/sub/x; echo more >> out/sub/file; touch -d {OLDER} out/sub; }}
             touch -d {OLDER} out; sleep 0.05"
        );
        scene.run_shell(options, &script).assert_code(0);
        assert_eq!(modified(&scene.path("out")), OLDER_SECONDS, "{what}");
        if how != "bind" {
            assert_eq!(modified(&scene.path("out/sub")), OLDER_SECONDS, "{what}");
        }
        scene.assert_clean();
    });
}

#[test]
fn a_directory_that_the_program_wrote_into_has_the_time_of_that_and_others_keep_theirs() {
    each(|scene, options, how, who| {
        let what = format!("{who:?} {how}");
        for name in ["out/sub/deep", "out/sub", "out/left", "out/quiet", "out"] {
            if scene.path(name).exists() {
                tool("touch", &["-d", OLD, at(&scene.path(name))]);
            }
        }
        let began =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
        let script = "echo x > out/x
            if test -d out/sub; then echo more >> out/sub/file; echo x > out/sub/deep/x; chmod 700 out/left; fi
            stat -c %y out out/* > times";
        scene.run_shell(options, script).assert_code(0);
        assert!(modified(&scene.path("out")) >= began, "{what}");
        if how != "bind" {
            assert!(modified(&scene.path("out/sub/deep")) >= began, "{what}");
            // Nothing was made or removed in these.
            for name in ["out/sub", "out/left", "out/quiet"] {
                assert_eq!(modified(&scene.path(name)), OLD_SECONDS, "{what} {name}");
            }
            assert_eq!(mode_of(&scene.path("out/left")), 0o700, "{what}");
            assert_eq!(scene.read("out/sub/file"), "submore\n");
        }
        // What the program saw last is what is there.
        let script = "stat -c %y out out/* | cmp - times";
        let now = Command::new("sh").args(["-c", script]).current_dir(scene.dir.path()).output().unwrap();
        assert!(now.status.success() || how == "bind", "{what} {now:?}");
        scene.assert_clean();
    });
}

#[test]
fn what_the_program_did_not_change_of_a_directory_stays_as_someone_else_made_it() {
    each(|scene, options, how, who| {
        let what = format!("{who:?} {how}");
        let (target, inner) = ("out", if how == "bind" { "out" } else { "out/sub" });
        tool("setfattr", &["-n", "user.both", "-v", "1", at(&scene.path(inner))]);
        tool("setfattr", &["-n", "user.gone", "-v", "1", at(&scene.path(inner))]);
        let script = format!(
            "echo x > {inner}/x; setfattr -n user.mine -v mine {inner}; setfattr -x user.gone {inner}
             touch started; while ! test -e go; do sleep 0.02; done"
        );
        let arguments = [&["run"], options, &["--", "sh", "-c", &script]].concat();
        let run = scene.start(&arguments);
        wait_until("the program", || scene.path("started").exists());
        let theirs = scene.path(inner);
        fs::set_permissions(&theirs, fs::Permissions::from_mode(0o711)).unwrap();
        tool("setfattr", &["-n", "user.both", "-v", "theirs", at(&theirs)]);
        tool("setfattr", &["-n", "user.theirs", "-v", "theirs", at(&theirs)]);
        tool("setfacl", &["-m", "u:20003:rwx", at(&theirs)]);
        if how != "bind" {
            tool("touch", &["-d", OLD, at(&scene.path("out/quiet"))]);
        }
        scene.file("go", "");
        Ran::of(run.wait_with_output().unwrap()).assert_code(0);
        assert_eq!(
            xattrs(&theirs),
            ["user.both=\"theirs\"", "user.mine=\"mine\"", "user.theirs=\"theirs\""],
            "{what}"
        );
        assert!(acl(&theirs).contains(&"user:20003:rwx".to_owned()), "{what} {:?}", acl(&theirs));
        assert_eq!(mode_of(&theirs) & 0o707, 0o701, "{what}");
        if how != "bind" {
            assert_eq!(modified(&scene.path("out/quiet")), OLD_SECONDS, "{what}");
        }
        assert!(scene.path(target).join("x").exists() || how != "bind");
        scene.assert_clean();
    });
}

#[test]
fn extended_attributes_and_acls_of_directories_that_were_there_come_home() {
    each(|scene, options, how, who| {
        let what = format!("{who:?} {how}");
        let places: &[&str] = if how == "bind" { &["out"] } else { &["out", "out/sub"] };
        for place in places {
            let path = scene.path(place);
            for name in ["kept", "changed", "removed"] {
                tool("setfattr", &["-n", &format!("user.{name}"), "-v", "before", at(&path)]);
            }
        }
        let script = places
            .iter()
            .map(|place| {
                format!(
                    "setfattr -n user.changed -v after {place} && setfattr -x user.removed {place} &&
                     setfattr -n user.added -v after {place} && setfacl -m g::r-x,m::rwx {place} &&
                     setfacl -d -m u::rwx,g::r-x,o::---,m::rwx {place}"
                )
            })
            .collect::<Vec<_>>()
            .join(" && ");
        scene.run_shell(options, &script).assert_code(0);
        for place in places {
            let path = scene.path(place);
            assert_eq!(
                xattrs(&path),
                ["user.added=\"after\"", "user.changed=\"after\"", "user.kept=\"before\""],
                "{what} {place}"
            );
            let found = acl(&path);
            for entry in ["mask::rwx", "default:user::rwx", "default:mask::rwx", "default:other::---"] {
                assert!(found.contains(&entry.to_owned()), "{what} {place} {found:?}");
            }
        }
        // And gone again.
        let script = places
            .iter()
            .map(|place| format!("setfacl -b {place} && setfattr -x user.added {place} && chmod 750 {place}"))
            .collect::<Vec<_>>()
            .join(" && ");
        scene.run_shell(options, &script).assert_code(0);
        for place in places {
            let path = scene.path(place);
            assert_eq!(acl(&path), ["user::rwx", "group::r-x", "other::---"], "{what} {place}");
            assert_eq!(xattrs(&path), ["user.changed=\"after\"", "user.kept=\"before\""], "{what} {place}");
        }
        scene.assert_clean();
    });
}

#[test]
fn attributes_that_are_called_like_an_overlays_own_come_home_under_their_names() {
    each(|scene, options, how, who| {
        let what = format!("{who:?} {how}");
        let root = who == Who::Me && is_root();
        scene.file("out/theirs", "theirs");
        let options: Vec<&str> =
            if how == "bind" { [options, &["--existing", "copy"]].concat() } else { options.to_vec() };
        let mut script = "set -e; echo x > out/file; mkdir out/new; echo x > out/new/file\n".to_owned();
        let places: &[&str] = if how == "bind" {
            &["out", "out/file", "out/new"]
        } else {
            &["out", "out/file", "out/new", "out/sub", "out/sub/file"]
        };
        let mut names = vec!["user.overlay.foo", "user.overlay.opaque", "user.plain"];
        if root {
            names.extend(["trusted.overlay.foo", "trusted.overlay.opaque"]);
        }
        for place in places {
            for name in &names {
                script += &format!("setfattr -n {name} -v y {place}\n");
            }
        }
        scene.run_shell(&options, &script).assert_code(0);
        let mut wanted: Vec<String> = names.iter().map(|name| format!("{name}=\"y\"")).collect();
        wanted.sort();
        for place in places {
            assert_eq!(xattrs(&scene.path(place)), wanted, "{what} {place}");
        }
        // A mark of that name in a directory that was there must not make it lose what it holds.
        assert_eq!(scene.read("out/theirs"), "theirs", "{what}");
        if how != "bind" {
            assert_eq!(scene.list("out/sub"), ["deep", "file"], "{what}");
            assert_eq!(scene.list("out"), ["file", "left", "new", "quiet", "sub", "theirs"], "{what}");
        }
        // A directory that was replaced by a new one: the overlay's own marks stay behind.
        if how != "bind" {
            scene
                .run_shell(
                    &["--data-out", "out", "--existing", "overlay"],
                    "rm -r out/left; mkdir out/left; echo l > out/left/l",
                )
                .assert_code(0);
            assert_eq!(scene.list("out/left"), ["l"], "{what}");
            assert_eq!(xattrs(&scene.path("out/left")), Vec::<String>::new(), "{what}");
        }
        scene.assert_clean();
    });
}

#[test]
fn an_archive_of_results_holds_nothing_of_an_overlays_own() {
    for who in everyone() {
        let root = who == Who::Me && is_root();
        let scene = Scene::new(who);
        scene.dir("out");
        scene.dir("out/sub");
        for name in ["gone", "sub/file", "sub/gone"] {
            scene.file(&format!("out/{name}"), "before");
        }
        let own = if root { "trusted.overlay.foo" } else { "user.overlay.foo" };
        scene.script(
            "job.sh",
            &format!(
                "#!/bin/sh\n#RSA_DATA_OUT={}\n#RSA_PACK=tar\nset -e\nrm out/gone out/sub/gone; echo more >> out/sub/file\n\
                 setfattr -n {own} -v y out/sub; setfattr -n {own} -v y out/sub/file; setfattr -n user.plain -v y out/sub\n",
                scene.path("out").display()
            ),
        );
        scene.run(&["run", "--existing", "overlay", "--report", "report", "job.sh"]).assert_code(0);
        let archive = format!("out/results-{}.tar", scene.report("report")["id"].as_str().unwrap());
        let listed = tool("tar", &["-tf", at(&scene.path(&archive))]);
        assert!(!listed.contains("gone") && listed.contains("sub/file"), "{who:?} {listed}");
        // Root's are privileged.
        scene.run(&["stage", "--unpack", "--same-permissions", &archive, "unpacked"]).assert_code(0);
        let mut wanted = vec![format!("{own}=\"y\""), "user.plain=\"y\"".to_owned()];
        wanted.sort();
        assert_eq!(xattrs(&scene.path("unpacked/sub")), wanted, "{who:?}");
        assert_eq!(xattrs(&scene.path("unpacked/sub/file")), [format!("{own}=\"y\"")], "{who:?}");
        assert_eq!(xattrs(&scene.path("unpacked")), Vec::<String>::new(), "{who:?}");
        scene.assert_clean();
    }
}

#[test]
fn an_acl_that_names_others_is_no_obstacle_and_stays() {
    for who in everyone() {
        for how in ["auto", "copy"] {
            let scene = Scene::new(who);
            scene.dir("out");
            tool("setfacl", &["-m", "u:20003:rwx", at(&scene.path("out"))]);
            tool("setfacl", &["-d", "-m", "u:20003:rwx", at(&scene.path("out"))]);
            scene.file("out/file", "before");
            let ran = scene.run_shell(
                &["--data-out", "out", "--existing", how],
                "set -e; echo more >> out/file; echo new > out/new; mkdir out/dir; echo x > out/dir/x",
            );
            ran.assert_code(0);
            assert_eq!(scene.read("out/file"), "beforemore\n", "{who:?} {how}");
            let found = acl(&scene.path("out"));
            for entry in ["user:20003:rwx", "default:user:20003:rwx"] {
                assert!(found.contains(&entry.to_owned()), "{who:?} {how} {found:?}");
            }
            if who == Who::User && is_root() {
                let ran = scene.run_shell(&["--data-out", "out", "--existing", "overlay"], "true");
                ran.assert_code(125).assert_says("has an ACL that names others");
            }
            scene.assert_clean();
        }
    }
}

#[test]
fn an_acl_that_the_program_took_away_is_not_handed_down_again() {
    for who in everyone() {
        let scene = Scene::new(who);
        for name in ["in", "direct", "bind", "copy"] {
            scene.dir(name);
        }
        scene.file("in/f", "secret");
        for name in ["direct", "bind", "copy"] {
            tool("setfacl", &["-d", "-m", "u:20003:rwx", at(&scene.path(name))]);
        }
        scene.file("copy/before", "before");
        let script = |out: &str| {
            format!(
                "set -e; umask 027; chmod 640 in/f; cp -p in/f {out}/f; install -m 640 in/f {out}/installed
                 echo x > {out}/x; setfacl -b {out}/x; chmod 640 {out}/x; mkdir -m 750 {out}/d; setfacl -bk {out}/d
                 echo y > {out}/d/y; mkfifo -m 640 {out}/pipe; setfacl -b {out}/pipe; chmod 640 {out}/pipe"
            )
        };
        scene.run_shell(&["--data-out", "bind"], &script("bind")).assert_code(0);
        scene.run_shell(&["--data-out", "copy", "--existing", "copy"], &script("copy")).assert_code(0);
        let direct = Command::new("sh").args(["-c", &script("direct")]).current_dir(scene.path("")).status();
        assert!(direct.unwrap().success());
        for name in ["f", "installed", "x", "d", "d/y", "pipe"] {
            let wanted = acl(&scene.path("direct").join(name));
            for out in ["bind", "copy"] {
                assert_eq!(acl(&scene.path(out).join(name)), wanted, "{who:?} {out}/{name}");
            }
        }
        // Where the program could not be shown it, whom the default ACL keeps out gets in by no mode.
        scene.dir("closed");
        tool("setfacl", &["-d", "-m", "u:20003:rwx,g::---,o::---", at(&scene.path("closed"))]);
        let script = "umask 022; echo x > closed/x; mkdir closed/d; echo y > closed/d/y; mkfifo closed/pipe";
        scene.run_shell(&["--data-out", "closed"], script).assert_code(0);
        for name in ["x", "d", "d/y", "pipe"] {
            let found = acl(&scene.path("closed").join(name));
            assert!(found.contains(&"group::---".to_owned()), "{who:?} {name} {found:?}");
            assert!(found.contains(&"other::---".to_owned()), "{who:?} {name} {found:?}");
            let let_in = found.iter().any(|entry| entry.contains("user:20003"));
            assert_eq!(let_in, who == Who::Me, "{who:?} {name} {found:?}");
        }
        scene.assert_clean();
    }
}

#[test]
fn after_a_switch_the_attributes_of_directories_that_were_made_before_it_come_home() {
    for who in everyone() {
        let scene = Scene::new(who);
        scene.dir("in");
        scene.file("in/a", "input");
        scene.dir("out");
        scene.dir("out/old");
        let script = format!(
            "set -e
             mkdir out/early; echo x > out/early/x; setfattr -n user.gone -v y out/early
             while test $(stat -f -c %T out) != overlayfs; do sleep 0.05; done
             for d in out/early out/old; do echo y > $d/y; setfattr -n user.late -v y $d; touch -d {OLD} $d; done
             setfattr -x user.gone out/early"
        );
        scene.run_shell(&["--data-in", "in", "--data-out", "out", "--delay", "1"], &script).assert_code(0);
        for name in ["out/early", "out/old"] {
            let path = scene.path(name);
            assert_eq!(scene.read(&format!("{name}/y")), "y\n");
            assert_eq!(modified(&path), OLD_SECONDS, "{who:?} {name}");
            assert_eq!(xattrs(&path), ["user.late=\"y\""], "{who:?} {name}");
        }
        scene.assert_clean();
    }
}
