//! How files are striped: what `ondeck layout` sets on a real CephFS.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

use ondeck_testbed::Ran;
use serde_json::Value;

use crate::site::{Case, OWNER, STATE, Site, View, write_pattern};

const MIB: u64 = 1 << 20;

crate::for_engines! {
    ceph = CEPH: [
        a_layout_that_a_user_sets_says_where_objects_lie,
        each_step_gets_its_layout_and_one_that_a_user_set_stays,
        what_cephfs_has_no_layout_for_is_told,
    ]
}

fn layout(site: &Site, view: &View, arguments: &[&str]) -> Ran {
    let ondeck = site.ondeck.display().to_string();
    let mut line = vec!["timeout", "-s", "KILL", "60", &ondeck, "layout"];
    line.extend(arguments);
    view.host.as_user(OWNER, OWNER).run(&line)
}

/// What the cluster of the RAM disk answers its administrator.
fn ceph(site: &Site, name: &str, question: &[&str]) -> Value {
    let conf = format!("{STATE}-n1/ramdisks/{name}/ceph.conf");
    let mut line = vec![
        "timeout",
        "-s",
        "KILL",
        "60",
        "ceph",
        "-c",
        &conf,
        "--name",
        "client.admin",
        "--format",
        "json",
    ];
    line.extend(question);
    let said = site.host("n1").ok(&line);
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{question:?}: {error}: {said}"))
}

/// The bytes that each OSD was given to write, as it counts them.
fn written(site: &Site, name: &str) -> [u64; 2] {
    [0, 1].map(|osd| {
        let counters = ceph(site, name, &["tell", &format!("osd.{osd}"), "perf", "dump"]);
        counters["osd"]["op_w_in_bytes"].as_u64().unwrap()
    })
}

/// The OSD that an object of a file is on.
fn osd_of(site: &Site, name: &str, pool: &str, ino: u64, object: u32) -> u64 {
    let object = format!("{ino:x}.{object:08x}");
    ceph(site, name, &["osd", "map", pool, &object])["acting_primary"].as_u64().unwrap()
}

fn a_layout_that_a_user_sets_says_where_objects_lie(case: &Case) {
    let site = Site::new();
    let view = &site.build(case, "striped", "512MiB", 1)[0];
    let directory = view.text();
    // Nothing of its own yet.
    let ran = layout(&site, view, &["show", &directory]);
    ran.assert_success();
    assert!(ran.stdout.contains("(CephFS)\n  nothing of its own"), "{}", ran.stdout);
    let ran = layout(&site, view, &["set", &directory, "-E 16M -c 1 -E -1 -c 2 -S 1M"]);
    ran.assert_success();
    assert!(ran.stdout.contains("\n  whole files    2 targets, stripes of 1 MiB"), "{}", ran.stdout);
    let shown = layout(&site, view, &["show", &directory, "--json"]);
    let shown: Value = serde_json::from_str(&shown.assert_success().stdout).unwrap();
    let native = shown["native"].as_str().unwrap();
    let words: BTreeMap<&str, &str> =
        native.split_once('=').unwrap().1.split(' ').filter_map(|word| word.split_once('=')).collect();
    assert_eq!(
        (words["stripe_unit"], words["stripe_count"], words["object_size"]),
        ("1048576", "2", "4194304")
    );
    let pool = words["pool"];

    // A file of two objects, whose places name two OSDs: half of it is on each, as they count.
    let mut halved = false;
    let mut on_one = false;
    for number in 0..64 {
        let path = view.outside.join(format!("file-{number}"));
        fs::File::create(&path).unwrap();
        let ino = fs::metadata(&path).unwrap().ino();
        let osds = [0, 1].map(|object| osd_of(&site, "striped", pool, ino, object) as usize);
        let before = written(&site, "striped");
        write_pattern(&path, 8 * MIB, number);
        fs::File::open(&path).unwrap().sync_all().unwrap();
        let after = written(&site, "striped");
        let grown = [after[0] - before[0], after[1] - before[1]];
        let mut expected = [0; 2];
        for osd in osds {
            expected[osd] += 4 * MIB;
        }
        for osd in 0..2 {
            // The journal of the metadata server is written meanwhile.
            let (grown, expected) = (grown[osd], expected[osd]);
            assert!(
                grown >= expected && grown < expected + MIB,
                "file {number} on {osds:?}: {grown} of {expected}"
            );
        }
        halved |= osds[0] != osds[1];
        on_one |= osds[0] == osds[1];
        fs::remove_file(&path).unwrap();
        if halved && on_one {
            break;
        }
    }
    assert!(halved && on_one, "in 64 files there was none on two OSDs, or none on one");

    // Nobody sets the layout of somebody else's directory.
    fs::create_dir(view.outside.join("roots")).unwrap();
    let roots = format!("{directory}/roots");
    layout(&site, view, &["set", &roots, "-c 1"])
        .assert_code(1)
        .assert_says(&format!("ondeck layout: {roots}: Permission denied"));
    // One below may have another one.
    let below = format!("{directory}/below");
    view.host.as_user(OWNER, OWNER).ok(&["mkdir", &below]);
    let ran = layout(&site, view, &["set", &below, "-c 1 -S 4M"]);
    ran.assert_success();
    assert!(ran.stdout.contains("\n  whole files    1 target, stripes of 4 MiB"), "{}", ran.stdout);
    site.destroy("striped");
    site.assert_nothing_is_left();
}

fn each_step_gets_its_layout_and_one_that_a_user_set_stays(case: &Case) {
    let site = Site::new();
    let view = &site.build(case, "striped", "256MiB", 1)[0];
    let directory = view.text();
    let file = site.bed.dir().join("site.toml");
    let text = format!(
        "[nodes]\nlink = \"4GB/s\"\n[[filesystem]]\npath = \"{directory}\"\nkind = \"cephfs\"\ntargets = 2\n\
         servers = 2\ntarget = \"2GB/s\"\n"
    );
    fs::write(&file, text).unwrap();
    let file = file.display().to_string();
    let auto = |pattern: &str| {
        let line =
            ["auto", "--site", &file, "--nodes", "2", "--tasks", "2", "--pattern", pattern, &directory];
        layout(&site, view, &line).assert_success().stdout.clone()
    };
    let said = auto("shared");
    assert!(
        said.starts_with(&format!("{directory}: -E 16M -c 1 -S 1M -E -1 -c 2 -S 1M, for at most ")),
        "{said}"
    );
    // CephFS has its last component, and that is what it should have.
    assert!(auto("shared").contains("has -E 16M -c 1 -S 1M -E -1 -c 2 -S 1M already"));
    // The next step may have another one, which a person's choice ends.
    assert!(auto("file-per-process").starts_with(&format!("{directory}: -c 1 -S 1M, for at most ")));
    layout(&site, view, &["set", &directory, "-c 2 -S 4M"]).assert_success();
    assert!(
        auto("shared").contains(
            "keeps the layout that somebody has chosen for it (ceph.dir.layout=stripe_unit=4194304 "
        )
    );
    site.destroy("striped");
    site.assert_nothing_is_left();
}

fn what_cephfs_has_no_layout_for_is_told(case: &Case) {
    let site = Site::new();
    let view = &site.build(case, "striped", "256MiB", 1)[0];
    let directory = view.text();
    let ran = layout(&site, view, &["set", &directory, "-c -1"]);
    ran.assert_code(1).assert_says("a layout over all targets needs their number on this filesystem");
    // A pool that is none.
    let ran = layout(&site, view, &["set", &directory, "-c 2 -p nowhere"]);
    ran.assert_code(1);
    assert!(ran.stderr.starts_with(&format!("ondeck layout: {directory}: ")), "{}", ran.stderr);
    let ran = layout(&site, view, &["show", &directory]);
    assert!(ran.assert_success().stdout.contains("nothing of its own"), "{}", ran.stdout);
    site.destroy("striped");
    site.assert_nothing_is_left();
}
