//! What is promised can be filled, and nothing else is promised.

use std::fs;
use std::path::Path;
use std::time::Duration;

use ondeck_testbed::wait_until;

use crate::isolation::fill;
use crate::site::{self, Case, DEADLINE, Setup, Site, TMPFS};

crate::for_engines! {
    tmpfs = TMPFS: [
        no_bytes_are_refused_and_one_byte_works,
        the_largest_one_can_be_filled_and_nothing_larger_is_promised,
        what_one_was_promised_another_does_not_get,
        the_memory_of_the_data_is_free_after_destroy,
    ]
    gluster = GLUSTER: [
        no_bytes_are_refused_and_one_byte_works,
        the_largest_one_can_be_filled_and_nothing_larger_is_promised,
        what_one_was_promised_another_does_not_get,
        the_memory_of_the_data_is_free_after_destroy,
    ]
    ceph = CEPH: [
        no_bytes_are_refused_and_one_byte_works,
        the_largest_one_can_be_filled_and_nothing_larger_is_promised,
        what_one_was_promised_another_does_not_get,
        the_memory_of_the_data_is_free_after_destroy,
    ]
}

fn no_bytes_are_refused_and_one_byte_works(case: &Case) {
    let site = Site::new();
    let create = |size: &str| {
        let arguments = site.arguments(case, "small", size, 1);
        site.ramdisk(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    create("0").assert_code(2).assert_says("0 bytes");
    create("-1").assert_code(2);
    create("much").assert_code(2);
    // More than any machine has, and more than a number holds.
    create("1000000T").assert_code(2);
    create("99999999999999999999G").assert_code(2);
    site.assert_nothing_is_left();
    create("1").assert_success();
    let view = &site.views(case, "small", 1)[0];
    fs::write(view.outside.join("byte"), "x").unwrap();
    assert_eq!(fs::read_to_string(view.outside.join("byte")).unwrap(), "x");
    site.destroy("small");
    site.assert_nothing_is_left();
}

fn lends(case: &Case) -> &'static str {
    if case.engine == "ceph" { "2GiB" } else { "300MiB" }
}

fn the_largest_one_can_be_filled_and_nothing_larger_is_promised(case: &Case) {
    let site = Site::with(Setup { lends: lends(case), ..Setup::default() });
    let built = site.build_with(case, "full", "max", 1, &[]);
    let promised = built["capacity"].as_u64().unwrap();
    let view = &site.views(case, "full", 1)[0];
    let stat = rustix::fs::statvfs(&view.outside).unwrap();
    assert!(stat.f_blocks * stat.f_frsize >= promised, "df shows less than the promised {promised}");
    // Everything is lent now.
    let node = case.servers[0];
    let free = site.devices(node)["ram"]["free"].as_u64().unwrap();
    assert!(free < 4 << 20, "{free} bytes are still free on {node}");
    let written = fill(view, 1);
    let percent = written * 100 / promised;
    eprintln!("{}: {written} of {promised} bytes written, {percent} %", case.engine);
    assert!(percent >= 97, "only {written} of {promised} bytes could be written");
    site.destroy("full");
    site.assert_nothing_is_left();

    let more = (promised + (1 << 20)).to_string();
    let arguments = site.arguments(case, "full", &more, 1);
    let ran = site.ramdisk(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    ran.assert_code(2).assert_says(node).assert_says("at most").assert_says("--size max");
    site.assert_nothing_is_left();
    // What it says would fit does.
    let said = ran.stderr.split("--size ").nth(1).unwrap().split(',').next().unwrap().to_owned();
    site.build(case, "fits", &said, 1);
    site.destroy("fits");
    site.assert_nothing_is_left();
}

fn what_one_was_promised_another_does_not_get(case: &Case) {
    let site = Site::with(Setup { lends: lends(case), ..Setup::default() });
    let built = site.build_with(case, "probe", "max", 1, &[]);
    let all = built["capacity"].as_u64().unwrap();
    site.destroy("probe");
    let part = (all * 6 / 10).to_string();
    site.build(case, "first", &part, 1);
    // The first has written nothing: its bytes look free to the kernel.
    let arguments = site.arguments(case, "second", &part, 1);
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    site.ramdisk(&words).assert_code(2).assert_says(case.servers[0]);
    // Nor do two that are asked for at the same time both get it.
    site.destroy("first");
    let names = ["left", "right"];
    let mut both: Vec<_> = names
        .iter()
        .map(|name| {
            let arguments = site.arguments(case, name, &part, 1);
            site.begin_ramdisk(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
        })
        .collect();
    let built = both.iter_mut().filter_map(|child| child.wait().unwrap().success().then_some(())).count();
    assert!(built <= 1, "both were built");
    for name in names {
        site.destroy(name);
    }
    site.assert_nothing_is_left();
}

/// A memory cgroup (version 1) that is removed at the end.
struct Cgroup(std::path::PathBuf);

impl Cgroup {
    fn new(name: &str, limit: u64) -> Option<Cgroup> {
        let name = format!("ondeck-conformance-{}-{name}", std::process::id());
        let path = Path::new("/sys/fs/cgroup/memory").join(name);
        let made = fs::create_dir(&path).and_then(|()| {
            let cgroup = Cgroup(path);
            fs::write(cgroup.0.join("memory.limit_in_bytes"), limit.to_string())?;
            Ok(cgroup)
        });
        made.inspect_err(|error| {
            ondeck_skip::skipped(format_args!("no memory cgroup of version 1 can be made here: {error}"))
        })
        .ok()
    }

    fn add(&self, process: i32) {
        fs::write(self.0.join("cgroup.procs"), process.to_string()).unwrap();
    }

    /// Bytes of tmpfs pages that its processes wrote and that still are there.
    fn shared_memory(&self) -> u64 {
        let stat = fs::read_to_string(self.0.join("memory.stat")).unwrap();
        let line = stat.lines().find_map(|line| line.strip_prefix("total_shmem "));
        line.expect("the kernel counts it").trim().parse().unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let removed = || fs::remove_dir(&self.0).is_ok();
        let began = std::time::Instant::now();
        while !removed() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn an_agent_in_a_memory_cgroup_promises_what_the_cgroup_has() {
    if !site::ready(&TMPFS) {
        return;
    }
    let Some(cgroup) = Cgroup::new("agent", 2 << 30) else { return };
    let site = Site::with(Setup { lends: "8GiB", agent: "reserve = \"256MiB\"".into(), ..Setup::default() });
    let free = |site: &Site| site.devices("n1")["ram"]["free"].as_u64().unwrap();
    let before = free(&site);
    assert!(before > 4 << 30, "the machine itself must have more than the group, and {before} are free");
    cgroup.add(site.agent_pid("n1"));
    wait_until(DEADLINE, "the agent promises less", || free(&site) <= 2 << 30);
    assert!(free(&site) > 1 << 30, "{} of 2 GiB are free", free(&site));
    let arguments = site.arguments(&TMPFS, "big", "3GiB", 1);
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    site.ramdisk(&words).assert_code(2).assert_says("n1");
    site.assert_nothing_is_left();
    drop(site);
}

fn the_memory_of_the_data_is_free_after_destroy(case: &Case) {
    let Some(cgroup) = Cgroup::new(case.engine, 8 << 30) else { return };
    let site = Site::new();
    let view = site.build(case, "pages", "256MiB", 1).remove(0);
    // Whoever writes a page is charged for it: the servers, or the user's program itself.
    for process in site.bed.processes() {
        cgroup.add(process.pid.as_raw_nonzero().get());
    }
    let procs = cgroup.0.join("cgroup.procs");
    let script = format!(
        "echo $$ > {} && cd {} && for n in 1 2 3 4 5 6 7 8 9 10; do head -c 8M /dev/zero | tr '\\0' x > file-$n; done; \
         exec 3<file-1; exec sleep 1000",
        procs.display(),
        view.text()
    );
    // It keeps a file open.
    let mut user = view.host.command("sh").args(["-c", &script]).spawn().unwrap();
    wait_until(DEADLINE, "the pages are there", || {
        view.outside.join("file-10").metadata().is_ok_and(|meta| meta.len() == 8 << 20)
    });
    if case.engine != "ceph" {
        assert!(cgroup.shared_memory() >= 80 << 20, "{} bytes are counted", cgroup.shared_memory());
    }
    site.destroy("pages");
    let left = cgroup.shared_memory();
    // The kernel counts in batches.
    assert!(left < 2 << 20, "{left} bytes are still held");
    let _ = user.kill();
    user.wait().unwrap();
    site.assert_nothing_is_left();
    drop(site);
}
