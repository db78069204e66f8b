//! What can't be built is refused before anything is begun, and what was ordered is what is built.

use std::fs;

use serde_json::Value;

use crate::site::{self, GLUSTER, OWNER, STRANGER, Site, TMPFS};

#[test]
fn what_cannot_be_built_is_refused_before_anything_is_begun() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let mut wrong = Vec::new();
    // The arguments after `create NAME --size 64MiB`, and what the message must have.
    for (arguments, says) in [
        ("--engine tmpfs --nodes n1,n2", "one node"),
        ("--engine tmpfs --nodes n1 --replicas 2", "one copy"),
        ("--engine tmpfs --nodes n1 --mount n3:/mnt/x", "n1"),
        ("--engine gluster --nodes n1,n2 --replicas 3", "1 or 2"),
        ("--engine gluster --nodes n1,n2,n3 --replicas 2", "even"),
        ("--engine gluster --nodes n1,n1", "n1"),
        ("--engine gluster --nodes n1,n2 --device tape", "tape"),
        ("--engine gluster --nodes n1,n2 --metadata-device ram", "metadata"),
        ("--engine zfs --nodes n1", "no such engine"),
        ("--engine gluster --nodes n1,n2 --mount n3:relative", "absolute"),
        ("--engine gluster --nodes n1,n2 --mount n3:/", "no place"),
        ("--engine gluster --nodes n1,n2 --mount n3:/mnt/../etc", "`..`"),
        ("--engine gluster --nodes n1,n2 --mount nowhere:/mnt/x", "nowhere"),
        ("--engine gluster --nodes n1,nowhere", "nowhere"),
        ("--engine gluster --nodes n1,n2 --user no-such-user", "no-such-user"),
        ("--engine tmpfs --nodes n1 --simulate {}", "simulated"),
        ("--engine tmpfs --nodes n1 --deadline 0s", "time"),
    ] {
        let mut words = vec!["create", "odd", "--size", "64MiB"];
        words.extend(arguments.split(' '));
        let ran = site.ramdisk(&words);
        // A node that can't be reached is a failure, not a wrong order.
        let code_is_right =
            matches!(ran.code(), Some(2)) || arguments.contains("nowhere") && ran.code() == Some(3);
        if !code_is_right || !ran.stderr.contains(says) {
            wrong.push(format!("{arguments}: code {:?}, says: {}", ran.code(), ran.stderr.trim()));
        }
        if ran.success() {
            site.destroy("odd");
        }
        let left = site.leftovers();
        if !left.is_empty() {
            wrong.push(format!("{arguments}: left: {left:?}"));
            site.ramdisk(&["destroy", "odd"]);
        }
    }
    for name in ["", "..", "-x", "a/b", "a@1", "a b", &"n".repeat(49)] {
        let ran =
            site.ramdisk(&["create", "--size", "1MiB", "--nodes", "n1", "--engine", "tmpfs", "--", name]);
        if ran.code() != Some(2) {
            wrong.push(format!("the name `{name}`: {ran:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    site.assert_nothing_is_left();
}

#[test]
fn a_name_is_given_once_and_a_second_create_harms_nothing() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    for case in [&TMPFS, &GLUSTER] {
        let views = site.build(case, "taken", "64MiB", 2);
        fs::write(views[0].outside.join("file"), "kept").unwrap();
        for engine in ["tmpfs", "gluster"] {
            let ran =
                site.ramdisk(&["create", "taken", "--size", "64MiB", "--nodes", "n1", "--engine", engine]);
            assert!(!ran.success() && ran.stderr.contains("already"), "{ran:#?}");
            // Also from a node that has no part in it.
            let ran = site
                .ramdisk(&["create", "taken", "--size", "64MiB", "--nodes", "n4,n1", "--engine", "gluster"]);
            assert!(!ran.success() && ran.stderr.contains("already"), "{ran:#?}");
        }
        site.status("taken").assert_success();
        assert_eq!(fs::read_to_string(views[1].outside.join("file")).unwrap(), "kept");
        site.destroy("taken");
        site.assert_nothing_is_left();
    }
}

#[test]
fn a_read_only_mount_is_read_only_and_the_others_are_not() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    for case in [&TMPFS, &GLUSTER] {
        // On the same host, and for Gluster on another one.
        let (host, path) = (case.views[0].0, site.view("n1", "look").text());
        let mount = format!("{host}:{path}:ro");
        site.build_with(case, "look", "64MiB", 2, &["--mount", &mount]);
        let writable = &site.views(case, "look", 2)[0];
        let owner = writable.host.as_user(OWNER, OWNER);
        owner.shell(&format!("cd {} && mkdir dir && echo x > dir/file", writable.text())).assert_success();
        owner.shell(&format!("cat {path}/dir/file")).assert_success();
        for script in ["echo y > dir/file", "touch new", "rm dir/file", "mkdir sub", "chmod 755 .", "touch ."]
        {
            for user in [&owner, &writable.host] {
                let ran = user.shell(&format!("cd {path} && {script}"));
                assert!(!ran.success() && ran.stderr.contains("Read-only"), "{script}: {ran:#?}");
            }
        }
        owner.shell(&format!("echo y > {}/dir/file", writable.text())).assert_success();
        site.destroy("look");
        site.assert_nothing_is_left();
    }
}

#[test]
fn several_ramdisks_live_side_by_side() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let one = site.build(&TMPFS, "one", "32MiB", 1).remove(0);
    let two = site.build(&GLUSTER, "two", "64MiB", 2).remove(0);
    let arguments: Vec<String> = site
        .arguments(&GLUSTER, "three", "64MiB", 2)
        .into_iter()
        .map(|word| if word == "20001:20001" { "20002:20002".to_owned() } else { word })
        .collect();
    site.ramdisk(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).assert_success();
    let three = site.view("n3", "three-a");
    for (view, text) in [(&one, "one"), (&two, "two"), (&three, "three")] {
        fs::write(view.outside.join("name"), text).unwrap();
    }
    let list: Value =
        serde_json::from_str(&site.ramdisk(&["list", "--json"]).assert_success().stdout).unwrap();
    let mut names: Vec<_> =
        list.as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["one", "three", "two"]);
    // Each user gets at their own.
    let stranger = three.host.as_user(STRANGER, STRANGER);
    assert_eq!(stranger.shell(&format!("ls {}", three.text())).assert_success().stdout, "name\n");
    assert!(!stranger.shell(&format!("ls {}", two.text())).success());
    site.destroy("two");
    for (view, text) in [(&one, "one"), (&three, "three")] {
        assert_eq!(fs::read_to_string(view.outside.join("name")).unwrap(), text);
    }
    site.status("three").assert_success();
    site.status("one").assert_success();
    site.destroy("three");
    site.destroy("one");
    site.assert_nothing_is_left();
}
