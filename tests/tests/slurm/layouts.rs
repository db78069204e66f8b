//! Layouts that jobs ask for, on a CephFS that is the cluster's disk.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ondeck_testbed::{CephServers, Daemon, Host, Signal, User, available, wait_until};
use rustix::process::kill_process;
use serde_json::Value;

use crate::aids::{LONG, change, own_file, reload};
use crate::cluster::{Cluster, DEADLINE, Setup};
use crate::jobs::{Blocker, Gate, directives, wait_file};

/// A CephFS at the same path on all hosts that need it. Its servers are those of a RAM disk that was built by hand, on
/// the first two RSA nodes; to the agents of the cluster it is the site's own.
pub struct Lake {
    pub at: PathBuf,
    servers: CephServers,
    clients: Vec<(Host, Daemon)>,
}

/// The hosts that have mounted it: where jobs are submitted, where they run, and where their results are staged out.
const CLIENTS: [&str; 4] = ["ctl", "c1", "c2", "r3"];

impl Lake {
    pub fn cluster() -> (Cluster, Lake) {
        let cluster =
            Cluster::with(Setup { rsa_nodes: 3, compute_nodes: 2, lends: "3GiB", ..Setup::default() });
        let lake = Lake::new(&cluster);
        (cluster, lake)
    }

    fn new(cluster: &Cluster) -> Lake {
        let arguments =
            ["ramdisk", "create", "lake", "--engine", "ceph", "--size", "256MiB", "--nodes", "r1,r2"];
        cluster.ondeck(&arguments).assert_success();
        for node in ["r1", "r2"] {
            cluster.ondeck(&["node", "drain", node, "--reason", "a disk"]).assert_success();
        }
        let dir = cluster.bed.dir();
        let servers = CephServers::new(cluster.host("r1"), "/run/ondeck/agent-r1/ramdisks/lake");
        let at = dir.join("scratch/lake");
        fs::create_dir(&at).unwrap();
        let hosts = CLIENTS.map(|name| cluster.host(name));
        let clients = servers.mount(&hosts, dir, &at).unwrap();
        let clients: Vec<(Host, Daemon)> = hosts.into_iter().cloned().zip(clients).collect();
        // That of a RAM disk is root's alone.
        clients[0].0.ok(&["chmod", "755", &at.to_string_lossy()]);
        // Figures for `#RSA_LAYOUT_DIR=DIR:PATTERN`.
        let site = format!(
            "[nodes]\nlink = \"4GB/s\"\n[[filesystem]]\npath = \"{}\"\nkind = \"cephfs\"\ntargets = 2\nservers = 2\n\
             target = \"2GB/s\"\n",
            at.display()
        );
        let site_file = dir.join("site.toml");
        fs::write(&site_file, site).unwrap();
        let line = format!("site_file = \"{}\"\n[scheduler.limits]", site_file.display());
        change(cluster, "ondeck.toml", "[scheduler.limits]", &line);
        reload(cluster, "scheduler", "scheduler", "taken over: scheduler.site_file");
        Lake { at, servers, clients }
    }

    /// A path on it, for the test process.
    pub fn outside(&self, path: &Path) -> PathBuf {
        self.clients[0].0.path_from_outside(path)
    }

    /// A directory of a user's on it.
    pub fn folder(&self, user: &User, name: &str) -> PathBuf {
        let path = self.at.join(name);
        let outside = self.outside(&path);
        fs::create_dir(&outside).unwrap();
        chown(&outside, Some(user.uid), Some(user.gid)).unwrap();
        path
    }

    /// The attribute of CephFS that a file or a directory has, if it has it.
    fn attribute(&self, path: &Path, name: &str) -> Option<String> {
        let mut value = [0; 1024];
        match rustix::fs::getxattr(self.outside(path), name, &mut value[..]) {
            Ok(length) => Some(String::from_utf8(value[..length].to_vec()).unwrap()),
            Err(rustix::io::Errno::NODATA) => None,
            Err(error) => panic!("{}: {name}: {error}", path.display()),
        }
    }

    /// The stripes and the bytes of each that new files of a directory get by its own layout, if it has one.
    pub fn layout(&self, directory: &Path) -> Option<String> {
        self.attribute(directory, "ceph.dir.layout").map(|text| stripes(&text))
    }

    pub fn layout_of_file(&self, file: &Path) -> String {
        stripes(&self.attribute(file, "ceph.file.layout").unwrap())
    }

    /// The bytes that are in an object of a file.
    fn object_bytes(&self, file: &Path, object: u32) -> u64 {
        let pool = self.attribute(file, "ceph.file.layout.pool").unwrap();
        let ino = fs::metadata(self.outside(file)).unwrap().ino();
        self.servers.object_bytes(&pool, ino, object).unwrap()
    }

    /// Unmounts it and ends its servers.
    pub fn end(self, cluster: &Cluster) {
        for (host, mut client) in self.clients {
            host.ok(&["umount", &self.at.to_string_lossy()]);
            if client.wait(DEADLINE).is_none() {
                client.kill(Signal::KILL);
            }
        }
        cluster.ondeck(&["ramdisk", "destroy", "lake", "--nodes", "r1,r2"]).assert_success();
        for node in ["r1", "r2"] {
            cluster.ondeck(&["node", "resume", node]).assert_success();
            cluster.wait_lends_all(node);
        }
        cluster.assert_no_hook_failed();
        cluster.assert_clean();
    }
}

/// `COUNT x UNIT` of a layout of CephFS.
fn stripes(text: &str) -> String {
    let word = |key: &str| {
        let found = text.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {key} in {text}")).to_owned()
    };
    format!("{} x {}", word("stripe_count"), word("stripe_unit"))
}

/// Two stripes of 1 MiB.
pub const TWO: &str = "2 x 1048576";

impl Cluster {
    /// What is shown of the layout of one of a job's directories; null as long as nothing is known.
    pub fn layout(&self, job: u32, directory: &Path) -> Value {
        let ran = self.ondeck(&["job", "show", &job.to_string(), "--json"]);
        if !ran.success() {
            return Value::Null;
        }
        let story: Value = serde_json::from_str(&ran.stdout).unwrap();
        let layouts = story["layouts"].as_array().unwrap();
        let directory = directory.to_str().unwrap();
        layouts.iter().find(|layout| layout["directory"] == directory).cloned().unwrap_or_default()
    }

    #[track_caller]
    pub fn wait_layout(&self, job: u32, directory: &Path, state: &str) -> Value {
        let mut seen = Value::Null;
        let start = Instant::now();
        while seen["state"] != state {
            assert!(start.elapsed() < LONG, "not {state}: {seen:#}\n{}", self.show(job));
            seen = self.layout(job, directory);
        }
        seen
    }

    /// Submits alice's job, which works on disk.
    #[track_caller]
    fn submit_on_disk(&self, script: &str) -> u32 {
        self.slurm.submit(
            self.user("alice"),
            script,
            &["--nodes=1", "--exclusive", "--no-requeue", "--output=/dev/null"],
        )
    }

    #[track_caller]
    pub fn wait_completed(&self, job: u32) {
        let ended = self.slurm.wait_state(job, "COMPLETED", LONG);
        assert_eq!(ended["ExitCode"], "0:0");
    }
}

#[test]
fn a_job_on_disk_has_its_layouts_from_its_start_and_its_directories_what_they_had_before_afterwards() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let alice = cluster.user("alice");
    // No shell ever reads it.
    let named = lake.folder(alice, "$(touch x)");
    let (pattern, kept) = (lake.folder(alice, "pattern"), lake.folder(alice, "kept"));
    let gate = Gate::of(alice, "first");
    let script = format!(
        "#!/bin/sh\n#RSA_LAYOUT=-c 2 -S 1M\n#RSA_LAYOUT_DIR={}\n#RSA_LAYOUT_DIR={}:shared\n#RSA_LAYOUT_DIR={}:keep\n\
         for dir in '{}' '{}' '{}'; do echo a > \"$dir/file\" || exit 9; done\n: > {}\n{}",
        named.display(),
        pattern.display(),
        kept.display(),
        named.display(),
        pattern.display(),
        kept.display(),
        alice.scratch.join("made").display(),
        gate.line()
    );
    let first = cluster.submit_on_disk(&script);
    wait_file(&alice.scratch.join("made"));
    for directory in [&named, &pattern, &kept] {
        assert_eq!(lake.layout(directory).as_deref(), Some(TWO), "{}", directory.display());
        assert_eq!(lake.layout_of_file(&directory.join("file")), TWO);
        assert_eq!(cluster.layout(first, directory)["state"], "set");
    }
    let by_line = cluster.layout(first, &named);
    assert_eq!((&by_line["options"], &by_line["from"]), (&"-c 2 -S 1M".into(), &"the job's line".into()));
    let by_pattern = cluster.layout(first, &pattern);
    assert_eq!(by_pattern["options"], "-E 16M -c 1 -S 1M -E -1 -c 2 -S 1M");
    assert!(by_pattern["from"].as_str().unwrap().contains("(shared)"), "{by_pattern}");
    assert!(!by_pattern["reasons"].as_array().unwrap().is_empty() && by_pattern["bandwidth"].is_u64());
    let shown = cluster.show(first);
    assert!(
        shown.contains(&format!("layout  {}: -c 2 -S 1M; set (ceph.dir.layout=", named.display())),
        "{shown}"
    );
    assert!(shown.contains(": RUNNING, "), "{shown}");

    // Another job wants one of them otherwise, and one that is free.
    let free = lake.folder(alice, "free");
    let second = cluster.submit_on_disk(&format!(
        "#!/bin/sh\n#RSA_LAYOUT_DIR={}:-c 1 -S 2M\n#RSA_LAYOUT_DIR={}:-c 1 -S 2M\necho b > {}/file\n",
        pattern.display(),
        free.display(),
        free.display()
    ));
    cluster.wait_completed(second);
    assert_eq!(lake.layout_of_file(&free.join("file")), "1 x 2097152");
    let alone = cluster.layout(second, &pattern);
    assert_eq!(alone["state"], "alone");
    assert!(alone["text"].as_str().unwrap().contains(&format!("job {first} has set its layout")), "{alone}");
    let told =
        format!("ondeck: layouts: {} stays as it is: job {first} has set its layout", pattern.display());
    assert!(cluster.slurm.job(second)["AdminComment"].starts_with(&told), "{:?}", cluster.slurm.job(second));
    cluster.wait_layout(second, &free, "restored");
    assert_eq!((lake.layout(&free), lake.layout(&pattern).as_deref()), (None, Some(TWO)));

    gate.open();
    cluster.wait_completed(first);
    for directory in [&named, &pattern] {
        cluster.wait_layout(first, directory, "restored");
        assert_eq!(lake.layout(directory), None);
        assert_eq!(lake.attribute(directory, "user.ondeck.layout"), None);
    }
    cluster.wait_layout(first, &kept, "kept");
    assert_eq!(lake.layout(&kept).as_deref(), Some(TWO));
    // Nothing was told of what went as it was asked.
    assert!(!cluster.slurm.job(first).get("AdminComment").is_some_and(|text| text.contains("layout")));
    assert!(cluster.show(first).contains(": FINISHED, INITIAL, all done"), "{}", cluster.show(first));
    cluster.ondeck(&["wait", &first.to_string(), "--timeout", "20s"]).assert_success();
    let strays = fs::read_dir(lake.outside(&lake.at)).unwrap().map(|entry| entry.unwrap().file_name());
    let strays: Vec<_> = strays.filter(|name| name == "x").collect();
    assert!(strays.is_empty() && !alice.home.join("x").exists() && !cluster.bed.dir().join("x").exists());
    // Others see nothing of it.
    let bob = cluster.host("ctl").log_in(cluster.user("bob"));
    cluster.ondeck_on(&bob, &["job", "show", &first.to_string()]).assert_code(2);
    lake.end(&cluster);
}

#[test]
fn what_can_not_be_set_costs_the_job_nothing_and_is_told() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let of_bob = lake.folder(bob, "of-bob");
    let (real, chosen, replaced) =
        (lake.folder(alice, "real"), lake.folder(alice, "chosen"), lake.folder(alice, "replaced"));
    let link = lake.at.join("link");
    symlink(&real, lake.outside(&link)).unwrap();
    let log_in = cluster.host("ctl").log_in(alice);
    let ondeck = cluster.ondeck.to_str().unwrap();
    for directory in [&chosen, &replaced] {
        log_in.ok(&[ondeck, "layout", "set", &directory.to_string_lossy(), "-c 1 -S 2M"]);
    }
    let unstriped = alice.scratch.join("unstriped");
    fs::create_dir(&unstriped).unwrap();
    chown(&unstriped, Some(alice.uid), Some(alice.gid)).unwrap();
    let wanted = [
        (of_bob.clone(), "-c 2 -S 1M", "failed", "Permission denied"),
        (alice.home.clone(), "-c 2 -S 1M", "failed", "it is not below"),
        (link.clone(), "-c 2 -S 1M", "failed", "a symbolic link is on the way there"),
        (unstriped.clone(), "-c 2 -S 1M", "alone", "its filesystem stripes no files"),
        (lake.at.join("missing"), "-c 2 -S 1M", "failed", "No such file or directory"),
        (chosen.clone(), "shared", "alone", "somebody has chosen a layout for it"),
        (unstriped.join("x"), "shared", "failed", "is on none of the filesystems of the site file"),
        (real.clone(), "-c 0 -E", "failed", "the options of its line"),
        (replaced.clone(), "-c 2 -S 1M", "set", "until the job has ended"),
    ];
    let lines: String = wanted
        .iter()
        .map(|(path, pattern, _, _)| format!("#RSA_LAYOUT_DIR={}:{pattern}\n", path.display()))
        .collect();
    let gate = Gate::of(alice, "told");
    let made = alice.scratch.join("made");
    let job = cluster.submit_on_disk(&format!("#!/bin/sh\n{lines}: > {}\n{}", made.display(), gate.line()));
    wait_file(&made);
    for (path, _, state, part) in &wanted {
        let seen = cluster.layout(job, path);
        assert_eq!(seen["state"], *state, "{seen:#}");
        assert!(seen["text"].as_str().unwrap().contains(part), "{seen:#}");
    }
    wait_until(DEADLINE, "the user is told", || {
        let comment = cluster.slurm.job(job).remove("AdminComment").unwrap_or_default();
        comment
            .starts_with(&format!("ondeck: layouts: {} stays as it is: Permission denied", of_bob.display()))
    });
    assert_eq!((lake.layout(&of_bob), lake.layout(&real)), (None, None));
    assert_eq!(lake.layout(&chosen).as_deref(), Some("1 x 2097152"));
    // Options mean what they say; and what somebody changes meanwhile stays.
    assert_eq!(lake.layout(&replaced).as_deref(), Some(TWO));
    log_in.ok(&[ondeck, "layout", "set", &replaced.to_string_lossy(), "-c 1 -S 4M"]);
    gate.open();
    cluster.wait_completed(job);
    cluster.wait_layout(job, &replaced, "changed");
    assert_eq!(lake.layout(&replaced).as_deref(), Some("1 x 4194304"));

    // What somebody had chosen is there again.
    let once_more = cluster.submit_on_disk(&format!(
        "#!/bin/sh\n#RSA_LAYOUT_DIR={}:-c 2 -S 1M\necho a > {}/file\n",
        chosen.display(),
        chosen.display()
    ));
    cluster.wait_completed(once_more);
    cluster.wait_layout(once_more, &chosen, "restored");
    assert_eq!(lake.layout_of_file(&chosen.join("file")), TWO);
    assert_eq!(lake.layout(&chosen).as_deref(), Some("1 x 2097152"));
    // A job that has no directory is told so; a malformed line is refused.
    let without = cluster.submit_on_disk("#!/bin/sh\n#RSA_LAYOUT=shared\n");
    cluster.wait_completed(without);
    assert!(cluster.slurm.job(without)["AdminComment"].contains("#RSA_LAYOUT is about no directory"));
    let refused = cluster.slurm.try_submit(alice, "#!/bin/sh\n#RSA_LAYOUT_DIR=/a:sharde\n", &[]);
    assert!(!refused.success() && refused.stderr.contains("line 2: RSA_LAYOUT_DIR"), "{}", refused.stderr);
    // A disk that does not answer is waited for a few seconds.
    let clients = cluster.host("c1").processes();
    let client = clients.iter().find(|process| process.command_line.iter().any(|word| word == "ceph-fuse"));
    let client = client.unwrap().pid;
    kill_process(client, Signal::STOP).unwrap();
    let began = Instant::now();
    let hung = cluster.slurm.submit(
        alice,
        &format!("#!/bin/sh\n#RSA_LAYOUT_DIR={}:-c 2 -S 1M\n", real.display()),
        &["--nodes=1", "--nodelist=c1", "--exclusive", "--no-requeue", "--output=/dev/null"],
    );
    cluster.wait_completed(hung);
    let took = began.elapsed();
    kill_process(client, Signal::CONT).unwrap();
    assert!(took < Duration::from_secs(30), "{took:?}");
    let comment = cluster.slurm.job(hung)["AdminComment"].clone();
    assert!(comment.contains("c1: the filesystem did not answer within 4.00 s"), "{comment}");
    assert_eq!(lake.layout(&real), None);
    // Without an agent a job starts all the same.
    for node in ["c1", "c2"] {
        cluster.kill(node);
    }
    let alone =
        cluster.submit_on_disk(&format!("#!/bin/sh\n#RSA_LAYOUT_DIR={}:-c 2 -S 1M\n", real.display()));
    cluster.wait_completed(alone);
    assert!(cluster.slurm.job(alone)["AdminComment"].contains("the agent of c"));
    for node in ["c1", "c2"] {
        cluster.start_agent(node);
    }
    let never = cluster.wait_layout(alone, &real, "failed");
    assert!(never["text"].as_str().unwrap().contains("the agent of c"), "{never:#}");
    assert_eq!(lake.layout(&real), None);
    lake.end(&cluster);
}

#[test]
fn layouts_are_taken_back_after_kills_and_when_results_are_at_home() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let alice = cluster.user("alice");
    let directory = lake.folder(alice, "out");
    let gate = Gate::of(alice, "killed");
    let made = alice.scratch.join("made");
    let line = format!("#RSA_LAYOUT_DIR={}:-c 2 -S 1M\n", directory.display());
    let job = cluster.submit_on_disk(&format!("#!/bin/sh\n{line}: > {}\n{}", made.display(), gate.line()));
    wait_file(&made);
    assert_eq!(lake.layout(&directory).as_deref(), Some(TWO));
    let node = cluster.slurm.job(job)["NodeList"].clone();
    // The agent alone, and it comes back after the end of the job.
    cluster.kill(&node);
    gate.open();
    cluster.wait_completed(job);
    assert_eq!(lake.layout(&directory).as_deref(), Some(TWO));
    wait_until(LONG, "it is told that it can't be taken back yet", || {
        let text = cluster.layout(job, &directory)["text"].to_string();
        text.contains("to be taken back; the last try failed: the agent of ") && text.contains(&node)
    });
    cluster.start_agent(&node);
    cluster.wait_layout(job, &directory, "restored");
    assert_eq!(lake.layout(&directory), None);

    // The scheduler, too, which comes back first.
    fs::remove_file(&made).unwrap();
    let gate = Gate::of(alice, "killed-too");
    let job = cluster.submit_on_disk(&format!("#!/bin/sh\n{line}: > {}\n{}", made.display(), gate.line()));
    wait_file(&made);
    assert_eq!(lake.layout(&directory).as_deref(), Some(TWO));
    let node = cluster.slurm.job(job)["NodeList"].clone();
    cluster.kill("scheduler");
    cluster.kill(&node);
    gate.open();
    cluster.wait_completed(job);
    cluster.start_scheduler();
    cluster.start_agent(&node);
    cluster.wait_layout(job, &directory, "restored");
    assert_eq!(lake.layout(&directory), None);

    // Results are staged out into the layout.
    let results = lake.folder(alice, "results");
    own_file(alice, &lake.outside(&results.join("before")), b"before");
    let body = format!(
        "findmnt -n -o SOURCE -T {0} > {0}/where\nhead -c 3M /dev/zero > {0}/three || exit 9\n",
        results.display()
    );
    let script = format!(
        "#!/bin/sh\n#RSA_LAYOUT=-c 2 -S 1M\n#RSA_OUT_SIZE=10MiB\n#RSA_WAIT=hold\n{}{body}",
        directives(&[], &[&results])
    );
    let job = cluster.submit(&script, 1);
    cluster.wait_done(job);
    let seen = fs::read_to_string(lake.outside(&results.join("where"))).unwrap();
    assert!(seen.contains("ondeck:job-"), "its output was in a RAM disk: {seen}");
    assert_eq!(lake.layout_of_file(&results.join("where")), TWO);
    assert_ne!(lake.layout_of_file(&results.join("before")), TWO, "what was there is not rewritten");
    // The first and the third MiB are in one object, the second in another.
    assert_eq!(lake.object_bytes(&results.join("three"), 0), 2 << 20);
    assert_eq!(lake.object_bytes(&results.join("three"), 1), 1 << 20);
    cluster.wait_layout(job, &results, "restored");
    assert_eq!(lake.layout(&results), None);

    // Also if it could not be set when the job started.
    let later = lake.folder(alice, "later");
    let mode = |mode: u32| {
        fs::set_permissions(lake.outside(&later), PermissionsExt::from_mode(mode)).unwrap();
    };
    fs::remove_file(&made).unwrap();
    let gate = Gate::of(alice, "later");
    let script = format!(
        "#!/bin/sh\n#RSA_LAYOUT=-c 2 -S 1M\n#RSA_OUT_SIZE=10MiB\n#RSA_WAIT=hold\n{}: > {}\n{}echo a > {}/file\n",
        directives(&[], &[&later]),
        made.display(),
        gate.line(),
        later.display()
    );
    let blocker = Blocker::new(&cluster, 2);
    let job = cluster.submit(&script, 1);
    cluster.wait_rsa(job, "READY");
    mode(0o555);
    blocker.release();
    wait_file(&made);
    let failed = cluster.wait_layout(job, &later, "failed");
    assert!(failed["text"].as_str().unwrap().contains("Permission denied"), "{failed:#}");
    mode(0o755);
    gate.open();
    cluster.wait_done(job);
    assert_eq!(lake.layout_of_file(&later.join("file")), TWO);
    cluster.wait_layout(job, &later, "restored");
    assert_eq!(lake.layout(&later), None);
    lake.end(&cluster);
}

/// Where it is and what has its name by then, a job may decide as it likes.
#[test]
fn a_directory_that_its_job_renames_has_again_what_it_had_and_one_that_is_not_found_is_told() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let alice = cluster.user("alice");
    let names = ["renamed", "anew", "linked", "gone", "away"];
    let [renamed, anew, linked, gone, away] = names.map(|name| lake.folder(alice, name));
    let other = lake.folder(alice, "other");
    let lines: String = names
        .iter()
        .map(|name| format!("#RSA_LAYOUT_DIR={}:-c 2 -S 1M\n", lake.at.join(name).display()))
        .collect();
    let folder = lake.at.display();
    fs::set_permissions(lake.outside(&lake.at), PermissionsExt::from_mode(0o777)).unwrap();
    let script = format!(
        "#!/bin/sh -e\n{lines}cd {folder}\nmv renamed renamed.1\nmv anew anew.1; mkdir anew\n\
         mv linked linked.1; ln -s linked.1 linked\nrmdir gone\nmv away other/; mkdir away\n: > {}/made\n",
        alice.scratch.display()
    );
    let job = cluster.submit_on_disk(&script);
    cluster.wait_completed(job);
    assert!(alice.scratch.join("made").exists());
    for (directory, now) in [(&renamed, "renamed.1"), (&anew, "anew.1"), (&linked, "linked.1")] {
        let layout = cluster.wait_layout(job, directory, "restored");
        let now = lake.at.join(now);
        let text = layout["text"].as_str().unwrap();
        assert!(text.contains(&format!("it is {} now", now.display())), "{layout:#}");
        assert_eq!(lake.layout(&now), None, "{}", now.display());
        assert_eq!(lake.attribute(&now, "user.ondeck.layout.job"), None);
    }
    // What was moved elsewhere is not looked for.
    let layout = cluster.wait_layout(job, &away, "not_restored");
    assert!(layout["text"].as_str().unwrap().contains("another directory has its name now"), "{layout:#}");
    assert_eq!((lake.layout(&away), lake.layout(&other.join("away")).as_deref()), (None, Some(TWO)));
    let layout = cluster.wait_layout(job, &gone, "not_restored");
    let text = layout["text"].as_str().unwrap();
    assert!(text.contains("if the directory was moved, its new files get -c 2 -S 1M"), "{layout:#}");
    lake.end(&cluster);
}

#[test]
fn a_directory_by_two_names_is_the_first_job_s_and_has_again_what_it_had() {
    if !available() {
        return;
    }
    let (cluster, lake) = Lake::cluster();
    let alice = cluster.user("alice");
    let directory = lake.folder(alice, "twice");
    // As a site that has mounted it twice.
    let pool = cluster.bed.dir().join("scratch/pool");
    fs::create_dir(&pool).unwrap();
    let (from, to) = (lake.at.display().to_string(), pool.display().to_string());
    let hosts = ["c1", "c2"].map(|name| cluster.host(name));
    for host in hosts {
        host.ok(&["mount", "--bind", &from, &to]);
    }
    let otherwise = pool.join("twice");
    let gate = Gate::of(alice, "twice");
    let made = alice.scratch.join("made");
    let first = cluster.submit_on_disk(&format!(
        "#!/bin/sh\n#RSA_LAYOUT_DIR={}:-c 2 -S 1M\n: > {}\n{}",
        directory.display(),
        made.display(),
        gate.line()
    ));
    wait_file(&made);
    // Another layout, and the same.
    for options in ["-c 1 -S 2M", "-c 2 -S 1M"] {
        let line = format!("#!/bin/sh\n#RSA_LAYOUT_DIR={}:{options}\n", otherwise.display());
        let second = cluster.submit_on_disk(&line);
        cluster.wait_completed(second);
        let alone = cluster.layout(second, &otherwise);
        assert_eq!(alone["state"], "alone", "{alone:#}");
        let why = format!("job {first} has set its layout, by the name of {}", directory.display());
        assert!(alone["text"].as_str().unwrap().contains(&why), "{alone:#}");
        assert!(cluster.slurm.job(second)["AdminComment"].contains(&why));
        assert_eq!(lake.layout(&directory).as_deref(), Some(TWO));
    }
    gate.open();
    cluster.wait_completed(first);
    cluster.wait_layout(first, &directory, "restored");
    assert_eq!(lake.layout(&directory), None);
    assert_eq!(lake.attribute(&directory, "user.ondeck.layout.job"), None);
    // Two jobs have written there, so nobody learns from it.
    assert!(cluster.history(alice).is_empty());
    // It is free for the other name now. A note that is out of date keeps nobody from it.
    let line = format!(
        "#!/bin/sh\n#RSA_LAYOUT_DIR={}:-c 2 -S 1M\necho a > {}/file\n",
        otherwise.display(),
        directory.display()
    );
    let log_in = cluster.host("ctl").log_in(alice);
    let (note, path) = (format!("{} /somewhere", cluster.key(first)), directory.display().to_string());
    log_in.ok(&["setfattr", "-n", "user.ondeck.layout.job", "-v", &note, &path]);
    let third = cluster.submit_on_disk(&line);
    cluster.wait_completed(third);
    cluster.wait_layout(third, &otherwise, "restored");
    assert_eq!(lake.layout_of_file(&directory.join("file")), TWO);
    assert_eq!(lake.layout(&directory), None);
    for host in hosts {
        host.ok(&["umount", &to]);
    }
    lake.end(&cluster);
}
