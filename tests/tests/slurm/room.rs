//! Room that is missing: on disk, in the pool.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ondeck_testbed::{User, available, wait_until};

use crate::aids::{LONG, await_file, files, folder, give, make, noise, own_file, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};

/// An ext4 of so many MiB that all hosts have mounted at the same path, a directory of the user's.
pub fn own_disk(cluster: &Cluster, user: &User, mib: u32) -> PathBuf {
    let image = cluster.bed.dir().join("small-disk");
    fs::File::create(&image).unwrap().set_len(u64::from(mib) << 20).unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let output = std::process::Command::new(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    run("mkfs.ext4", &["-q", "-m", "0", "-O", "^has_journal", image.to_str().unwrap()]);
    let device = run("losetup", &["--find", "--show", image.to_str().unwrap()]);
    let at = folder(user, "small", &BTreeMap::new());
    for host in cluster.bed.hosts() {
        host.ok(&["mount", "-t", "ext4", &device, at.to_str().unwrap()]);
    }
    // It goes when the last host has unmounted it.
    run("losetup", &["--detach", &device]);
    let owner = format!("{0}:{0}", user.uid);
    cluster.host("ctl").ok(&["chown", &owner, at.to_str().unwrap()]);
    at
}

/// A small disk of its own that all hosts have mounted at the same path.
pub struct SmallDisk {
    pub at: PathBuf,
    ballast: PathBuf,
}

impl SmallDisk {
    /// Of so many MiB, of which so many KiB are left.
    pub fn new(cluster: &Cluster, user: &User, mib: u32, left_kib: u64) -> SmallDisk {
        let at = own_disk(cluster, user, mib);
        let host = cluster.host("ctl");
        let small = SmallDisk { ballast: at.join("ballast"), at };
        let found = host.ok(&["df", "--output=avail", small.at.to_str().unwrap()]);
        let free: u64 = found.lines().last().unwrap().trim().parse().unwrap();
        let ballast = format!("{}KiB", free - left_kib);
        host.ok(&["fallocate", "--length", &ballast, small.ballast.to_str().unwrap()]);
        small
    }

    pub fn free(&self, cluster: &Cluster) {
        cluster.host("ctl").ok(&["rm", "-f", self.ballast.to_str().unwrap()]);
    }

    /// Seen from a host: the test has not mounted it.
    pub fn tree(&self, cluster: &Cluster, below: &str) -> BTreeMap<String, Vec<u8>> {
        tree(&cluster.host("ctl").path_from_outside(self.at.join(below)))
    }
}

fn results_on(cluster: &Cluster, output: &Path, content: &BTreeMap<String, Vec<u8>>) -> u32 {
    let alice = cluster.user("alice");
    let source = folder(alice, "source", content);
    cluster.host("ctl").log_in(alice).ok(&["mkdir", output.to_str().unwrap()]);
    let body = format!("cp {}/* {}", source.display(), output.display());
    cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2)
}

#[test]
fn results_that_find_no_room_on_disk_are_kept_in_ram_until_their_owner_has_made_some() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "stage_out_attempts = 2".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let small = SmallDisk::new(&cluster, alice, 24, 3072);
    let (output, content) = (small.at.join("out"), files(6, 2 << 20));
    let job = results_on(&cluster, &output, &content);
    let number = job.to_string();
    cluster.wait_rsa(job, "HELD");
    // It was tried twice: then somebody has to look.
    cluster.wait_note(job, "until `ondeck job retry");
    let note = cluster.note(job);
    assert!(note.contains("no room") && note.contains(&output.display().to_string()), "{note}");
    assert!(cluster.show(job).contains("no room"), "{}", cluster.show(job));
    cluster.ondeck(&["wait", &number]).assert_code(1).assert_says("no room");
    assert_eq!(cluster.rsa_nodes(job).len(), 2, "the RAM disk is kept");
    small.free(&cluster);
    let user = cluster.host("ctl").log_in(alice);
    cluster.ondeck_on(&user, &["job", "retry", &number]).assert_success();
    cluster.ondeck_on(&user, &["wait", &number, "--timeout", "60s"]).assert_success();
    assert_eq!(small.tree(&cluster, "out"), content, "all of it, and nothing beside");
    assert!(cluster.note(job).contains("on disk"), "{}", cluster.note(job));
    cluster.assert_clean();
}

#[test]
fn results_that_found_no_room_on_disk_come_home_by_themselves_once_there_is_some() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let small = SmallDisk::new(&cluster, alice, 24, 3072);
    let (output, content) = (small.at.join("out"), files(6, 2 << 20));
    let job = results_on(&cluster, &output, &content);
    cluster.wait_note(job, "tried again in");
    small.free(&cluster);
    cluster.wait_done(job);
    assert_eq!(small.tree(&cluster, "out"), content);
    cluster.assert_clean();
}

#[test]
fn a_job_that_finds_no_rsa_node_free_waits_and_works_on_disk_when_it_starts() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 2, ..Setup::default() });
    let alice = cluster.user("alice");
    let content = files(3, 10_000);
    let input = folder(alice, "in", &content);
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("echo first > {}/first\ntell first\nawait go", output.display());
    let first = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 2);
    await_file(alice, "first");
    let blocker = cluster.block(2);
    let text = script(
        alice,
        &[format!("DATA_IN={}", input.display())],
        &format!(
            "findmnt -n -o SOURCE -T {input} > {scratch}/where\ncp -r {input} {scratch}/seen",
            input = input.display(),
            scratch = alice.scratch.display()
        ),
    );
    let second = cluster.submit(&text, 2);
    wait_until(LONG, "it waits for RSA nodes", || {
        let line = cluster.job(second).unwrap_or_default();
        line["message"].as_str().is_some_and(|text| text.contains("insufficient free RSA nodes"))
    });
    assert!(cluster.rsa_nodes(second).is_empty());
    cluster.slurm.cancel(blocker);
    cluster.wait_done(second);
    assert_eq!(tree(&alice.scratch.join("seen")), content);
    let place = fs::read_to_string(alice.scratch.join("where")).unwrap();
    assert!(!place.contains("ondeck") && !place.contains("job-"), "{place}");
    assert!(cluster.states(second).contains(&"INELIGIBLE".to_owned()), "{:?}", cluster.states(second));

    give(alice, "go");
    cluster.wait_done(first);
    assert_eq!(tree(&output)["first"], b"first\n");
    cluster.assert_clean();
}

#[test]
fn rsa_nodes_that_are_released_go_to_the_job_that_waits_for_them() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 2, ..Setup::default() });
    let alice = cluster.user("alice");
    let content = files(3, 10_000);
    let input = folder(alice, "in", &content);
    let first_script = script(alice, &[format!("DATA_IN={}", input.display())], "tell first\nawait go");
    let first = cluster.start_staged(&first_script, 2);
    await_file(alice, "first");
    let blocker = cluster.block(2);
    // All four compute nodes, two of which stay busy; it asks for both RSA nodes.
    let text = script(
        alice,
        &[format!("DATA_IN={}", input.display()), "NODES=2".into()],
        &format!("cp -r {} {}/seen", input.display(), alice.scratch.display()),
    );
    let second = cluster.submit(&text, 4);
    wait_until(LONG, "it waits for RSA nodes", || {
        let line = cluster.job(second).unwrap_or_default();
        line["message"].as_str().is_some_and(|text| text.contains("insufficient free RSA nodes"))
    });
    give(alice, "go");
    cluster.wait_done(first);
    cluster.wait_rsa(second, "READY");
    cluster.slurm.cancel(blocker);
    cluster.wait_done(second);
    assert_eq!(tree(&alice.scratch.join("seen")), content);
    cluster.assert_clean();
}

/// A job of one RSA node and no data that waits until it has its RAM disk.
fn held(cluster: &Cluster, further: &[&str], nodes: usize) -> u32 {
    let alice = cluster.user("alice");
    let name = format!("out-{}", fs::read_dir(&alice.scratch).unwrap().count());
    let output = folder(alice, &name, &BTreeMap::new());
    let mut directives = vec![format!("DATA_OUT={}", output.display()), "WAIT=hold".into()];
    directives.extend(further.iter().map(|line| (*line).to_owned()));
    cluster.submit(&script(alice, &directives, "true"), nodes)
}

#[test]
fn a_job_that_is_ready_and_can_not_start_keeps_no_idle_rsa_nodes_from_others() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 3, ..Setup::default() });
    let blocker = cluster.block(2);
    let stuck = held(&cluster, &["NODES=1"], 4);
    cluster.wait_rsa(stuck, "READY");
    for others in [held(&cluster, &[], 1), held(&cluster, &[], 1)] {
        // It starts then, and may have ended between two looks.
        wait_until(LONG, "it was READY", || {
            let is_known = cluster.ondeck(&["job", "show", &others.to_string()]).success();
            is_known && cluster.states(others).iter().any(|state| state == "READY")
        });
    }
    assert_eq!(cluster.job(stuck).unwrap()["rsa_state"], "READY");
    cluster.slurm.cancel(blocker);
    wait_until(LONG, "all have ended", || cluster.status()["jobs"].as_array().is_some_and(Vec::is_empty));
    cluster.assert_clean();
}

#[test]
fn a_job_that_has_waited_for_long_is_not_overtaken_and_gets_the_nodes_of_one_that_does_not_start() {
    if !available() {
        return;
    }
    let (scheduler, limits) = ("patience = \"3s\"".into(), "ready = \"6s\"".into());
    let cluster = Cluster::with(Setup { scheduler, limits, rsa_nodes: 2, ..Setup::default() });
    let blocker = cluster.block(4);
    let stuck = held(&cluster, &["NODES=1"], 4);
    cluster.wait_rsa(stuck, "READY");
    let large = held(&cluster, &["NODES=2"], 1);
    let waits = |job: u32, text: &str| {
        wait_until(LONG, text, || {
            let line = cluster.job(job).unwrap_or_default();
            line["message"].as_str().is_some_and(|message| message.contains(text))
        });
    };
    waits(large, "insufficient free RSA nodes");
    waits(large, &format!("`scontrol release {large}` starts it on disk"));
    cluster.wait_rsa(large, "READY");
    assert_eq!(cluster.rsa_nodes(large).len(), 2);
    // It is held again, and its turn comes again.
    waits(stuck, "insufficient free RSA nodes");
    cluster.wait_rsa(stuck, "READY");
    cluster.slurm.cancel(blocker);
    wait_until(LONG, "all have ended", || cluster.status()["jobs"].as_array().is_some_and(Vec::is_empty));
    cluster.assert_clean();
}

#[test]
fn jobs_that_are_too_small_or_ask_for_more_than_there_is_are_told_so_and_work_on_disk() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "proportion = 2".into(), ..Setup::default() });
    let alice = cluster.user("alice");
    let content = files(3, 10_000);
    let input = folder(alice, "in", &content);
    let asks: [(&[&str], usize, &str); 5] = [
        (&[], 1, "too small, marking ineligible"),
        (&["NODES=9"], 2, "it needs 9 RSA nodes"),
        (&["CAPACITY=1TiB"], 2, "RSA nodes, and the pool"),
        (&["CAPACITY=400MiB", "NODES=1"], 2, "on 1 RSA nodes (#RSA_NODES), and needs 4 for that"),
        (&["POOL=fast"], 2, "there is no pool `fast`"),
    ];
    for (number, (further, nodes, why)) in asks.into_iter().enumerate() {
        let blocker = cluster.block(4);
        let mut directives = vec![format!("DATA_IN={}", input.display())];
        directives.extend(further.iter().map(|line| (*line).to_owned()));
        let body = format!("cp -r {} {}/seen-{number}", input.display(), alice.scratch.display());
        let job = cluster.submit(&script(alice, &directives, &body), nodes);
        cluster.wait_rsa(job, "INELIGIBLE");
        let note = cluster.note(job);
        assert!(note.contains(why) && note.contains("works on disk"), "{note}");
        wait_until(DEADLINE, "Slurm's AdminComment says so", || {
            cluster.slurm.job(job).get("AdminComment").is_some_and(|comment| comment.contains(why))
        });
        cluster.slurm.cancel(blocker);
        cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
        assert_eq!(tree(&alice.scratch.join(format!("seen-{number}"))), content);
    }
    cluster.assert_clean();
}

#[test]
fn a_job_keeps_a_node_that_is_drained_and_nobody_else_gets_it_until_it_is_resumed() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 1, compute_nodes: 2, ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let body = format!("echo one > {0}/one\ntell first\nawait go\necho two > {0}/two", output.display());
    let first = cluster.start_staged(&script(alice, &[format!("DATA_OUT={}", output.display())], &body), 1);
    await_file(alice, "first");
    cluster.ondeck(&["node", "drain", "r1", "--reason", "new memory"]).assert_success();
    let listed = cluster.ondeck(&["node", "list"]).stdout;
    assert!(listed.contains("draining") && listed.contains("new memory"), "{listed}");
    give(alice, "go");
    cluster.wait_done(first);
    assert_eq!(
        tree(&output),
        BTreeMap::from([("one".into(), b"one\n".into()), ("two".into(), b"two\n".into())])
    );
    let blocker = cluster.block(2);
    make(alice, &alice.scratch.join("in"), &files(2, 1000));
    own_file(alice, &alice.scratch.join("in/more"), &noise(9, 10));
    let text = script(alice, &[format!("DATA_IN={}/in", alice.scratch.display())], "true");
    let second = cluster.submit(&text, 1);
    wait_until(LONG, "it waits for an RSA node", || {
        let line = cluster.job(second).unwrap_or_default();
        line["message"].as_str().is_some_and(|text| text.contains("insufficient free RSA nodes"))
    });
    assert_eq!(cluster.node("r1")["state"], "draining");
    cluster.ondeck(&["node", "resume", "r1"]).assert_success();
    cluster.wait_rsa(second, "READY");
    cluster.slurm.cancel(blocker);
    cluster.wait_done(second);
    cluster.assert_clean();
}

#[test]
fn small_jobs_share_a_node_as_far_as_their_user_may_and_are_counted_by_their_parts() {
    if !available() {
        return;
    }
    let scheduler = "proportion = 4\nfractions = true\nsharing = \"any\"\nuser_nodes = 2".into();
    let cluster = Cluster::with(Setup { scheduler, rsa_nodes: 2, lends: "1GiB", ..Setup::default() });
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let begin = Instant::now();
    let small = |user: &User, name: &str, further: &[&str]| {
        let input = folder(user, name, &files(2, 1000));
        let body = format!(
            "findmnt -n -o SOURCE -T {i} > {s}/{name}-where\ndf -m --output=size {i} | tail -1 > {s}/{name}-size\nawait go",
            i = input.display(),
            s = user.scratch.display()
        );
        let mut directives = vec![format!("DATA_IN={}", input.display()), "WAIT=hold".into()];
        directives.extend(further.iter().map(|line| (*line).to_owned()));
        let text = script(user, &directives, &body);
        cluster.slurm.submit(user, &text, &["--nodes=1", "--exclusive", "--output=/dev/null"])
    };
    let first = small(alice, "first", &[]);
    cluster.wait_rsa(first, "INUSE_IN");
    let second = small(alice, "second", &[]);
    cluster.wait_rsa(second, "INUSE_IN");
    assert_eq!(cluster.rsa_nodes(first), cluster.rsa_nodes(second));
    // Both together have half of a node, but something of a node twice.
    let third = small(alice, "third", &[]);
    wait_until(LONG, "its user has enough", || {
        let line = cluster.job(third).unwrap_or_default();
        line["message"].as_str().is_some_and(|text| text.contains("its user has 2 of at most 2 RSA nodes"))
    });
    let other = small(bob, "other", &["CAPACITY=300MiB"]);
    cluster.wait_rsa(other, "INUSE_IN");
    assert_eq!(cluster.rsa_nodes(other), cluster.rsa_nodes(first));
    give(bob, "go");
    cluster.wait_done(other);
    let size = fs::read_to_string(bob.scratch.join("other-size")).unwrap();
    let size: u64 = size.trim().parse().unwrap();
    assert!((300..400).contains(&size), "{size} MiB");
    give(alice, "go");
    for job in [first, second, third] {
        cluster.wait_done(job);
    }
    for name in ["first", "second", "third"] {
        let place = fs::read_to_string(alice.scratch.join(format!("{name}-where"))).unwrap();
        assert!(place.contains("ondeck:job-"), "{name}: {place}");
    }
    let usage = cluster.ondeck(&["status", "--usage", "1", "--json"]);
    usage.assert_success();
    let usage: Vec<serde_json::Value> = serde_json::from_str(&usage.stdout).unwrap();
    let of = |user: &User| usage.iter().find(|used| used["uid"] == user.uid).unwrap();
    assert_eq!((&of(alice)["allocations"], &of(bob)["allocations"]), (&3.into(), &1.into()), "{usage:?}");
    // A quarter of a node each, and never more than two of alice's at once.
    let seconds = of(alice)["node_seconds"].as_f64().unwrap();
    let most = begin.elapsed().as_secs_f64() / 2.0;
    assert!(seconds > 0.0 && seconds <= most, "{seconds} of {most}");
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn a_node_on_which_nothing_can_be_built_is_avoided_then_drained_and_told_of() {
    if !available() {
        return;
    }
    let cluster =
        Cluster::with(Setup { scheduler: "node_failures = 2".into(), rsa_nodes: 2, ..Setup::default() });
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &files(2, 1000));
    let r1 = cluster.host("r1");
    r1.run(&["sh", "-c", "mount --bind /bin/false $(command -v glusterfsd)"]).assert_success();
    let text = script(alice, &[format!("DATA_IN={}", input.display())], "true");
    for (round, state) in ["up", "draining"].into_iter().enumerate() {
        let blocker = cluster.block(4);
        let job = cluster.submit(&text, 1);
        cluster.wait_rsa(job, "READY");
        assert_eq!(cluster.rsa_nodes(job), ["r2"]);
        let told = cluster.log_of(job);
        assert!(told.contains("r1: `brick` failed") && told.contains("it is tried again"), "{told}");
        assert_eq!(cluster.node("r1")["state"], state, "{round}");
        cluster.slurm.cancel(blocker);
        cluster.wait_done(job);
    }
    let listed = cluster.ondeck(&["node", "list"]).stdout;
    assert!(listed.contains("it failed 2 times in a row"), "{listed}");
    r1.run(&["sh", "-c", "umount $(command -v glusterfsd)"]).assert_success();
    cluster.ondeck(&["node", "resume", "r1"]).assert_success();
    let blocker = cluster.block(4);
    let job = cluster.submit(&text, 1);
    cluster.wait_rsa(job, "READY");
    assert_eq!(cluster.rsa_nodes(job), ["r1"]);
    cluster.slurm.cancel(blocker);
    cluster.wait_done(job);
    cluster.assert_quiet();
    cluster.assert_clean();
}

/// Not every program looks whether it could write: then nothing but this tells that results are missing.
#[test]
fn a_job_whose_ram_disk_was_full_is_told_so_also_if_its_programs_look_at_nothing() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    // What it wrote would not fit on the disk of these tests.
    let body = format!(
        "head -c 400M /dev/zero > {0}/large 2> /dev/null || true\ntell full\nawait go\nrm {0}/large\necho x > {0}/last\nexit 0",
        output.display()
    );
    let directives = [format!("DATA_OUT={}", output.display()), "NODES=2".to_owned()];
    let job = cluster.start_staged(&script(alice, &directives, &body), 2);
    let number = job.to_string();
    let user = cluster.host("ctl").log_in(alice);
    await_file(alice, "full");
    // While it runs, and it stays so when there is room again.
    cluster.wait_note(job, "less than 1 % of it was left on");
    give(alice, "go");
    cluster
        .ondeck_on(&user, &["wait", &number, "--timeout", "60s"])
        .assert_success()
        .assert_says(&format!("the RAM disk of job {number} was full"));
    assert!(cluster.show(job).contains("less than 1 % of it was left on"), "{}", cluster.show(job));
    assert!(cluster.note(job).contains("RSA_CAPACITY"), "{}", cluster.note(job));
    assert_eq!(tree(&output)["last"], b"x\n");

    // One that has room enough is told nothing of it.
    let body = format!("head -c 10M /dev/zero > {}/small", output.display());
    let job = cluster.start_staged(&script(alice, &directives, &body), 2);
    let waited = cluster.ondeck_on(&user, &["wait", &job.to_string(), "--timeout", "60s"]);
    assert_eq!(waited.assert_success().stderr, "");
    assert!(!cluster.show(job).contains("was full"), "{}", cluster.show(job));
    cluster.assert_clean();
}
