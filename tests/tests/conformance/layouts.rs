//! How files are striped: what `ondeck layout` sets on a real CephFS.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ondeck_testbed::{CephServers, Ran, processor};
use rustix::fs::XattrFlags;
use serde_json::Value;

use crate::site::{Case, DEADLINE, OWNER, STATE, Site, View, pattern, write_pattern};

const MIB: u64 = 1 << 20;

crate::for_engines! {
    ceph = CEPH: [
        a_layout_that_a_user_sets_says_where_objects_lie,
        each_step_gets_its_layout_and_one_that_a_user_set_stays,
        a_file_on_two_slow_osds_takes_at_most_seven_tenths_of_the_time_of_one_on_one,
        what_cephfs_has_no_layout_for_is_told,
    ]
}

fn layout(site: &Site, view: &View, arguments: &[&str]) -> Ran {
    let ondeck = site.ondeck.display().to_string();
    let mut line = vec!["timeout", "-s", "KILL", "60", &ondeck, "layout"];
    line.extend(arguments);
    view.host.as_user(OWNER, OWNER).run(&line)
}

/// The servers of a RAM disk.
fn servers(site: &Site, name: &str) -> CephServers {
    CephServers::new(site.host("n1"), format!("{STATE}-n1/ramdisks/{name}"))
}

/// The bytes that each OSD was given to write, as it counts them.
fn written(servers: &CephServers) -> [u64; 2] {
    [0, 1].map(|osd| {
        let counters = servers.ask(&["tell", &format!("osd.{osd}"), "perf", "dump"]).unwrap();
        counters["osd"]["op_w_in_bytes"].as_u64().unwrap()
    })
}

fn a_layout_that_a_user_sets_says_where_objects_lie(case: &Case) {
    let site = Site::new();
    let view = &site.build(case, "striped", "512MiB", 1)[0];
    let servers = servers(&site, "striped");
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
        let osds = [0, 1].map(|object| servers.osd_of(pool, ino, object).unwrap() as usize);
        let before = written(&servers);
        write_pattern(&path, 8 * MIB, number);
        fs::File::open(&path).unwrap().sync_all().unwrap();
        let after = written(&servers);
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

/// What a slow OSD has of a processor, in percent.
const SLOW: u64 = 10;
/// Enough that what a client does beside it does not matter.
const BYTES: u64 = 64 * MIB;
/// What counts is the median of so many.
const ROUNDS: usize = 9;
/// How often it is measured again if something else keeps the machine busy.
const PATIENCE: Duration = Duration::from_secs(180);

/// The seconds that it takes to write a file over in place, until it is on its OSDs.
fn write_over(file: &File, bytes: &[u8]) -> f64 {
    let began = Instant::now();
    file.write_all_at(bytes, 0).unwrap();
    file.sync_all().unwrap();
    began.elapsed().as_secs_f64()
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn a_file_on_two_slow_osds_takes_at_most_seven_tenths_of_the_time_of_one_on_one(case: &Case) {
    if let Err(error) = processor::check() {
        ondeck_skip::skipped(error);
        return;
    }
    let site = Site::new();
    site.build(case, "striped", "1GiB", 0);
    let servers = servers(&site, "striped");
    // As a site's own: with the cache of a client, without which it would write to one OSD at a time.
    let (host, at) = (site.host("ctl"), site.bed.dir().join("mnt/site"));
    host.ok(&["mkdir", &at.to_string_lossy()]);
    let client = servers.mount(&[host], site.bed.dir(), &at).unwrap();
    let outside = host.path_from_outside(&at);
    let directory = |name: &str, stripes: u64| -> PathBuf {
        let path = outside.join(name);
        fs::create_dir(&path).unwrap();
        let object = BYTES / stripes;
        let layout = format!("stripe_unit={MIB} stripe_count={stripes} object_size={object}");
        rustix::fs::setxattr(&path, "ceph.dir.layout", layout.as_bytes(), XattrFlags::empty()).unwrap();
        path
    };
    let osds_of = |path: &Path| {
        let file = File::create(path).unwrap();
        let pool = attribute(path, "ceph.file.layout.pool");
        let ino = file.metadata().unwrap().ino();
        (file, [0, 1].map(|object| servers.osd_of(&pool, ino, object).unwrap()))
    };
    let (one, two) = (directory("one", 1), directory("two", 2));
    let (on_one, _) = osds_of(&one.join("file"));
    let mut made = (0..64).map(|number| osds_of(&two.join(format!("file-{number}"))));
    let (on_two, _) =
        made.find(|(_, osds)| osds[0] != osds[1]).expect("in 64 files there was none on two OSDs");

    let bytes = pattern(0, BYTES as usize, 1);
    let osds = [site.process("n1", "ceph-osd"), site.process("n2", "ceph-osd")];
    let limits = osds.map(|osd| site.bed.limit_cpu(osd.pid, SLOW).unwrap());
    let began = Instant::now();
    let (mut tries, mut ratio) = (Vec::new(), f64::INFINITY);
    while ratio > 0.7 {
        assert!(began.elapsed() < PATIENCE, "of two in one: {tries:.3?}");
        let before = limits.each_ref().map(|limit| limit.periods_waited().unwrap());
        // The first round begins with what nobody has touched.
        write_over(&on_one, &bytes);
        write_over(&on_two, &bytes);
        let rounds: Vec<_> =
            (0..ROUNDS).map(|_| (write_over(&on_one, &bytes), write_over(&on_two, &bytes))).collect();
        let (ones, twos): (Vec<f64>, Vec<f64>) = rounds.into_iter().unzip();
        ratio = median(twos) / median(ones.clone());
        tries.push((ratio, median(ones)));
        for (limit, before) in limits.iter().zip(before) {
            assert!(limit.periods_waited().unwrap() > before, "an OSD had all the time that it wanted");
        }
    }
    eprintln!("of two in one, and the seconds of one: {tries:.3?}");
    drop((limits, on_one, on_two));
    host.ok(&["umount", &at.to_string_lossy()]);
    for mut client in client {
        client.wait(DEADLINE).expect("a client that has nothing mounted ends");
    }
    host.ok(&["rmdir", &at.to_string_lossy()]);
    site.destroy("striped");
    site.assert_nothing_is_left();
}

/// An attribute of CephFS.
fn attribute(path: &Path, name: &str) -> String {
    let mut value = [0; 256];
    let length = rustix::fs::getxattr(path, name, &mut value[..]).unwrap();
    String::from_utf8(value[..length].to_vec()).unwrap()
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
