//! A RAM disk over the directories of a job: who may have what covered, on all nodes or on none, and away again.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use ondeck_testbed::{Host, Ran, wait_until};
use serde_json::{Value, json};

use crate::site::{self, Case, DEADLINE, GLUSTER, OWNER, STRANGER, Setup, Site, TMPFS};

crate::for_engines! {
    tmpfs = TMPFS: [
        a_job_reads_and_writes_ram_where_it_always_did,
        read_only_refuses_writes,
        nested_covers_come_and_go_in_order,
        destroying_takes_covers_away,
        force_takes_away_what_is_busy,
    ]
    gluster = GLUSTER: [
        a_job_reads_and_writes_ram_where_it_always_did,
        read_only_refuses_writes,
        nested_covers_come_and_go_in_order,
        destroying_takes_covers_away,
        force_takes_away_what_is_busy,
    ]
}

/// Within this every answer comes, whatever users have mounted.
const SOON: std::time::Duration = std::time::Duration::from_secs(12);

/// A site with a filesystem that all hosts share, `scratch`, and with one RAM disk of [`OWNER`]'s.
struct Cluster {
    site: Site,
    /// The nodes of the job.
    nodes: &'static [&'static str],
    /// The owner's directory on disk: `BED/scratch/owner`.
    home: PathBuf,
}

fn directory(path: &Path, owner: u32, mode: u32) {
    fs::create_dir_all(path).unwrap();
    chown(path, Some(owner), Some(owner)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// A cover as it is sent.
fn over(path: impl AsRef<Path>, from: &str, read_only: bool) -> Value {
    json!({ "path": path.as_ref().display().to_string(), "from": from, "read_only": read_only })
}

impl Cluster {
    fn new(case: &Case) -> Cluster {
        Cluster::with(case, "mount_prefixes = [\"BED/scratch\"]")
    }

    fn with(case: &Case, agent: &str) -> Cluster {
        let site = Site::with(Setup { agent: agent.to_owned(), ..Setup::default() });
        let home = site.bed.dir().join("scratch/owner");
        directory(home.parent().unwrap(), 0, 0o755);
        directory(&home, OWNER, 0o755);
        let nodes: &[&str] = if case.engine == "tmpfs" { &["n1"] } else { &["n3", "n4"] };
        let cluster = Cluster { site, nodes, home };
        cluster.build(case, "job", "20001:20001");
        cluster
    }

    /// Builds a RAM disk, and keeps its layout and secret for those who drive it.
    fn build(&self, case: &Case, name: &str, user: &str) {
        let mut arguments = self.site.arguments(case, name, "64MiB", 0);
        arguments.push("--json".into());
        for word in arguments.iter_mut().filter(|word| *word == "20001:20001") {
            *word = user.to_owned();
        }
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let ran = self.site.ramdisk(&words);
        let built: Value = serde_json::from_str(&ran.assert_success().stdout).unwrap();
        fs::write(self.file(name, "layout"), built["layout"].to_string()).unwrap();
        fs::copy(self.site.runtime_dir("n1", name).join("secret"), self.file(name, "secret")).unwrap();
    }

    fn file(&self, name: &str, kind: &str) -> PathBuf {
        self.site.bed.dir().join(format!("{name}.{kind}"))
    }

    fn probe(&self, name: &str, action: &str, arguments: &[&str]) -> Ran {
        let (probe, config) = (self.site.probe.to_string_lossy(), self.site.config.to_string_lossy());
        let layout = self.file(name, "layout").display().to_string();
        let mut line = vec![&*probe, action, "--config", &config, "--layout", &layout];
        line.extend(arguments);
        self.site.host("ctl").run(&line)
    }

    fn cover(&self, name: &str, covers: &[Value], nodes: &[&str]) -> Ran {
        let secret = self.file(name, "secret").display().to_string();
        let covers = Value::from(covers).to_string();
        self.probe(name, "cover", &["--secret", &secret, "--nodes", &nodes.join(","), &covers])
    }

    fn uncover(&self, name: &str, nodes: &[&str], more: &[&str]) -> Ran {
        let nodes = nodes.join(",");
        let mut arguments = vec!["--nodes", &nodes];
        arguments.extend(more);
        self.probe(name, "uncover", &arguments)
    }

    fn steps(&self, name: &str, node: &str, steps: &[Value]) -> Ran {
        self.steps_for(name, node, 0, steps)
    }

    fn steps_for(&self, name: &str, node: &str, seconds: u64, steps: &[Value]) -> Ran {
        let (secret, seconds) = (self.file(name, "secret").display().to_string(), seconds.to_string());
        let steps: Vec<String> = steps.iter().map(Value::to_string).collect();
        let mut arguments = vec!["--secret", &secret, "--node", node, "--seconds", &seconds];
        arguments.extend(steps.iter().map(String::as_str));
        self.probe(name, "steps", &arguments)
    }

    /// Does something with the owner's directory of a RAM disk, as staging does, through a client on n1.
    fn in_data<T>(&self, name: &str, action: impl FnOnce(&Path) -> T) -> T {
        self.steps(name, "n1", &[json!("mount")]).assert_success();
        action(&self.site.runtime_dir("n1", name).join("client/data"))
    }

    /// Makes a directory of the RAM disk with a file in it.
    fn stage(&self, name: &str, directory_name: &str, owner: u32, content: &str) {
        self.in_data(name, |data| {
            let path = data.join(directory_name);
            directory(&path, owner, 0o755);
            fs::write(path.join("file"), content).unwrap();
            chown(path.join("file"), Some(owner), Some(owner)).unwrap();
        });
    }

    /// A directory of the owner's on disk with a file in it.
    fn on_disk(&self, name: &str) -> PathBuf {
        let path = self.home.join(name);
        directory(&path, OWNER, 0o755);
        fs::write(path.join("file"), "disk").unwrap();
        path
    }

    fn owner(&self, node: &str) -> Host {
        self.site.host(node).as_user(OWNER, OWNER)
    }

    /// What the job reads on a node.
    #[track_caller]
    fn reads(&self, node: &str, path: &Path) -> String {
        self.owner(node).ok(&["cat", &path.display().to_string()])
    }

    /// Where something of Ondeck's is shown on a node, outside of its agent's directory.
    fn shown(&self, node: &str) -> Vec<PathBuf> {
        let host = self.site.host(node);
        let agents = PathBuf::from(format!("{}-{node}", site::STATE));
        let mounts = host.new_mounts().into_iter().map(|mount| mount.target);
        mounts.filter(|at| !at.starts_with(&agents) && *at != self.site.ssd()).collect()
    }

    /// A program of the owner's that stands in a directory and has a file open there, until it is killed.
    fn hold(&self, node: &str, path: &Path) -> Child {
        let mut command = self.owner(node).command("sh");
        let script = format!("cd {} && exec 3<file && echo held && exec sleep 300", path.display());
        let mut child = command.arg("-c").arg(script).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = [0; 5];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        child
    }

    #[track_caller]
    fn end(self) {
        self.site.destroy("job");
        self.site.assert_nothing_is_left();
    }
}

fn release(mut holder: Child) {
    holder.kill().unwrap();
    holder.wait().unwrap();
}

fn a_job_reads_and_writes_ram_where_it_always_did(case: &Case) {
    let cluster = Cluster::new(case);
    let path = cluster.on_disk("in");
    cluster.stage("job", "0", OWNER, "ram");
    let ran = cluster.cover("job", &[over(&path, "0", false)], cluster.nodes);
    eprintln!(
        "{}: covered {} nodes in {} s",
        case.engine,
        cluster.nodes.len(),
        ran.assert_success().stdout.trim()
    );
    for node in cluster.nodes {
        assert_eq!(cluster.reads(node, &path.join("file")), "ram");
        cluster.owner(node).shell(&format!("echo {node} > {}/{node}", path.display())).assert_success();
        for mount in cluster.site.host(node).new_mounts().iter().filter(|mount| mount.target == path) {
            assert!(mount.options.contains("nosuid") && mount.options.contains("nodev"), "{mount:?}");
        }
        assert_eq!(cluster.shown(node), std::slice::from_ref(&path));
    }
    // Other nodes, and the disk itself, have no part in it.
    assert_eq!(cluster.reads("n2", &path.join("file")), "disk");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
    for node in cluster.nodes {
        wait_until(DEADLINE, "all nodes see what each wrote", || {
            cluster.nodes.iter().all(|other| {
                let file = path.join(other).display().to_string();
                cluster.owner(node).run(&["cat", &file]).stdout.trim() == *other
            })
        });
    }
    // Asked for again, it is done already; other directories are another matter.
    cluster.cover("job", &[over(&path, "0", false)], cluster.nodes).assert_success();
    let ran = cluster.uncover("job", cluster.nodes, &[]);
    eprintln!("{}: uncovered in {} s", case.engine, ran.assert_success().stdout.trim());
    cluster.uncover("job", cluster.nodes, &["--leave"]).assert_success();
    for node in cluster.nodes {
        assert_eq!(cluster.reads(node, &path.join("file")), "disk");
        assert!(cluster.shown(node).is_empty());
        if case.engine != "tmpfs" {
            assert!(!cluster.site.runtime_dir(node, "job").exists());
        }
    }
    // What the job wrote is in the RAM disk.
    cluster.in_data("job", |data| {
        for node in cluster.nodes {
            assert_eq!(fs::read_to_string(data.join("0").join(node)).unwrap(), format!("{node}\n"));
        }
    });
    // It may come back.
    cluster.cover("job", &[over(&path, "0", false)], cluster.nodes).assert_success();
    assert_eq!(cluster.reads(cluster.nodes[0], &path.join("file")), "ram");
    cluster.uncover("job", cluster.nodes, &[]).assert_success();
    cluster.end();
}

fn read_only_refuses_writes(case: &Case) {
    let cluster = Cluster::new(case);
    let (input, output) = (cluster.on_disk("in"), cluster.on_disk("out"));
    cluster.stage("job", "0", OWNER, "ram");
    cluster.stage("job", "1", OWNER, "ram");
    let covers = [over(&input, "0", true), over(&output, "1", false)];
    cluster.cover("job", &covers, cluster.nodes).assert_success();
    for node in cluster.nodes {
        assert_eq!(cluster.reads(node, &input.join("file")), "ram");
        for script in ["echo x > file", "touch new", "rm file", "mkdir new"] {
            let script = format!("cd {} && {script}", input.display());
            cluster.owner(node).shell(&script).assert_says("Read-only file system");
        }
        cluster.owner(node).shell(&format!("echo x > {}/{node}", output.display())).assert_success();
        // Nor root by taking the flag away from the outside; what is shown below is one filesystem.
        for mount in cluster.site.host(node).new_mounts().iter().filter(|mount| mount.target == input) {
            let options: Vec<&str> = mount.options.split(',').collect();
            assert!(["ro", "nosuid", "nodev"].iter().all(|option| options.contains(option)), "{mount:?}");
        }
    }
    cluster.uncover("job", cluster.nodes, &[]).assert_success();
    cluster.end();
}

fn nested_covers_come_and_go_in_order(case: &Case) {
    let cluster = Cluster::new(case);
    let outer = cluster.on_disk("outer");
    let inner = cluster.on_disk("outer/inner");
    cluster.stage("job", "0", OWNER, "outer ram");
    cluster.stage("job", "1", OWNER, "inner ram");
    // In any order.
    let covers = [over(&inner, "1", false), over(&outer, "0", false)];
    // The RAM disk has no directory for the inner one.
    cluster.cover("job", &covers, cluster.nodes).assert_code(1).assert_says("stage it in with the outer one");
    for node in cluster.nodes {
        assert!(cluster.shown(node).is_empty());
    }
    // A symlink is none.
    cluster.in_data("job", |data| symlink("/etc", data.join("0/inner")).unwrap());
    cluster.cover("job", &covers, cluster.nodes).assert_code(1).assert_says("stage it in with the outer one");
    cluster.in_data("job", |data| {
        fs::remove_file(data.join("0/inner")).unwrap();
        directory(&data.join("0/inner"), OWNER, 0o755);
    });
    cluster.cover("job", &covers, cluster.nodes).assert_success();
    for node in cluster.nodes {
        assert_eq!(cluster.shown(node), [outer.clone(), inner.clone()]);
        assert_eq!(cluster.reads(node, &outer.join("file")), "outer ram");
        assert_eq!(cluster.reads(node, &inner.join("file")), "inner ram");
        cluster.owner(node).shell(&format!("echo x > {}/{node}", inner.display())).assert_success();
    }
    // The inner mount is nowhere in the RAM disk itself.
    cluster.in_data("job", |data| {
        assert_eq!(fs::read_dir(data.join("0/inner")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(data.join("1")).unwrap().count(), 1 + cluster.nodes.len());
    });
    // The outer one busy keeps both.
    let holder = cluster.hold(cluster.nodes[0], &outer);
    cluster.uncover("job", cluster.nodes, &[]).assert_code(1).assert_says("sleep");
    for node in cluster.nodes {
        assert_eq!(cluster.reads(node, &inner.join("file")), "inner ram");
    }
    release(holder);
    cluster.uncover("job", cluster.nodes, &[]).assert_success();
    for node in cluster.nodes {
        assert!(cluster.shown(node).is_empty());
        assert_eq!(cluster.reads(node, &inner.join("file")), "disk");
    }
    cluster.end();
}

fn destroying_takes_covers_away(case: &Case) {
    let cluster = Cluster::new(case);
    let (outer, other) = (cluster.on_disk("outer"), cluster.on_disk("other"));
    let inner = cluster.on_disk("outer/inner");
    for name in ["0", "1", "2"] {
        cluster.stage("job", name, OWNER, "ram");
    }
    cluster.in_data("job", |data| directory(&data.join("0/inner"), OWNER, 0o755));
    let covers = [over(&outer, "0", false), over(&inner, "1", true), over(&other, "2", true)];
    cluster.cover("job", &covers, cluster.nodes).assert_success();
    let mut holder = cluster.hold(cluster.nodes[0], &inner);
    cluster.site.destroy("job");
    for node in cluster.nodes {
        assert!(cluster.shown(node).is_empty());
        for path in [&outer, &inner, &other] {
            assert_eq!(cluster.reads(node, &path.join("file")), "disk");
        }
    }
    holder.kill().unwrap();
    holder.wait().unwrap();
    cluster.site.assert_nothing_is_left();
}

fn force_takes_away_what_is_busy(case: &Case) {
    let cluster = Cluster::new(case);
    let path = cluster.on_disk("in");
    cluster.stage("job", "0", OWNER, "ram");
    cluster.cover("job", &[over(&path, "0", false)], cluster.nodes).assert_success();
    let last = *cluster.nodes.last().unwrap();
    let holder = cluster.hold(last, &path);
    let ran = cluster.uncover("job", cluster.nodes, &[]);
    ran.assert_code(1).assert_says("Busy").assert_says("(sleep)").assert_says(&path.display().to_string());
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    for node in cluster.nodes {
        assert_eq!(cluster.reads(node, &path.join("file")), "ram");
    }
    cluster.uncover("job", cluster.nodes, &["--force"]).assert_success();
    for node in cluster.nodes {
        assert_eq!(cluster.reads(node, &path.join("file")), "disk");
        assert!(cluster.shown(node).is_empty());
    }
    release(holder);
    cluster.end();
}

#[test]
fn only_what_the_site_and_its_user_allow_is_covered() {
    if !site::ready(&TMPFS) {
        return;
    }
    let cluster = Cluster::new(&TMPFS);
    let bed = cluster.site.bed.dir().to_owned();
    let path = cluster.on_disk("in");
    cluster.stage("job", "0", OWNER, "ram");
    // What the user may do in directories of their own.
    let outside = bed.join("home/owner");
    directory(&outside.join("plain"), OWNER, 0o755);
    directory(&outside, OWNER, 0o755);
    symlink(&cluster.home, outside.join("scratch")).unwrap();
    symlink(outside.join("plain"), cluster.home.join("out")).unwrap();
    symlink("/proc/self/root", cluster.home.join("magic")).unwrap();
    fs::write(cluster.home.join("plain-file"), "x").unwrap();
    directory(&bed.join("scratch/stranger"), STRANGER, 0o777);
    directory(&bed.join("scratch/closed"), STRANGER, 0o700);
    directory(&bed.join("scratch/closed/in"), OWNER, 0o755);
    directory(&bed.join("scratch/roots"), 0, 0o777);
    directory(&bed.join("scratch2/own"), OWNER, 0o755);
    cluster.in_data("job", |data| {
        symlink("/etc", data.join("link")).unwrap();
        symlink("0", data.join("inside")).unwrap();
        fs::write(data.join("file"), "x").unwrap();
    });
    let bed_of = |name: &str| bed.join(name);
    let refused = [
        (over(bed_of("home/owner/plain"), "0", false), "not below"),
        (over(bed_of("scratch2/own"), "0", false), "not below"),
        (over(bed_of("scratch"), "0", false), "not below"),
        (over("/", "0", false), "no place"),
        (over("/etc", "0", false), "not below"),
        (over("scratch/owner/in", "0", false), "no place"),
        (over(bed_of("scratch/owner/../owner/in"), "0", false), "no place"),
        (over(bed_of("scratch/owner/out"), "0", false), "not below"),
        (over(cluster.home.join("magic"), "0", false), "Too many levels"),
        (over(cluster.home.join("plain-file"), "0", false), "is not a directory"),
        (over(cluster.home.join("missing"), "0", false), "No such file"),
        (over(bed_of("scratch/stranger"), "0", false), "belongs to user 20002"),
        (over(bed_of("scratch/stranger"), "0", true), "belongs to user 20002"),
        (over(bed_of("scratch/closed/in"), "0", false), "Permission denied"),
        (over(bed_of("scratch/roots"), "0", false), "belongs to user 0"),
        (over(&path, "link", false), "symlink"),
        (over(&path, "inside", false), "symlink"),
        (over(&path, "file", false), "no directory"),
        (over(&path, "missing", false), "does not exist"),
        (over(&path, "..", false), "no plain name"),
        (over(&path, "0/../..", false), "no plain name"),
        (over(&path, "", false), "no plain name"),
        (over(&path, "/etc", false), "no plain name"),
    ];
    for (cover, why) in refused {
        let ran = cluster.cover("job", std::slice::from_ref(&cover), &["n1"]);
        assert!(ran.code() == Some(1) && ran.stderr.contains(why), "{cover}: no `{why}` in {ran:?}");
        assert!(cluster.shown("n1").is_empty(), "{cover}: {:?}", cluster.shown("n1"));
        // With a good one it is no better.
        let ran = cluster.cover("job", &[over(&path, "0", false), cover.clone()], &["n1"]);
        assert!(ran.code() == Some(1) && cluster.shown("n1").is_empty(), "{cover}: {ran:?}");
    }
    let twice = [over(&path, "0", false), over(outside.join("scratch/in"), "0", false)];
    cluster.cover("job", &twice, &["n1"]).assert_code(1).assert_says("are the same directory");

    // A symlink inside the prefix is followed: the real directory is covered.
    cluster.cover("job", &[over(outside.join("scratch/in"), "0", false)], &["n1"]).assert_success();
    assert_eq!(cluster.shown("n1"), std::slice::from_ref(&path));
    assert_eq!(cluster.reads("n1", &outside.join("scratch/in/file")), "ram");

    // Another RAM disk of the same user finds it covered; nor can it be put inside or around.
    cluster.build(&TMPFS, "next", "20001:20001");
    cluster.stage("next", "0", OWNER, "next");
    cluster.stage("job", "0/deep", OWNER, "x");
    for (cover, why) in [
        (over(&path, "0", false), "on the RAM disk job@"),
        (over(path.join("deep"), "0", false), "on the RAM disk job@"),
        (over(&cluster.home, "0", false), "the RAM disk job@"),
    ] {
        cluster.cover("next", std::slice::from_ref(&cover), &["n1"]).assert_code(1).assert_says(why);
    }
    assert_eq!(cluster.shown("n1"), std::slice::from_ref(&path));
    cluster.steps("job", "n1", &[json!("unmount")]).assert_code(1).assert_says("uncover it first");
    cluster.uncover("job", &["n1"], &[]).assert_success();

    // Nor is a directory covered in which something else is mounted.
    let inner = cluster.on_disk("in/mounted");
    let host = cluster.site.host("n1");
    host.ok(&["mount", "-t", "tmpfs", "none", &inner.display().to_string()]);
    cluster.cover("job", &[over(&path, "0", false)], &["n1"]).assert_code(1).assert_says("mounted in it");
    host.ok(&["umount", &inner.display().to_string()]);
    cluster.site.destroy("next");

    // A site that names no prefix allows nothing.
    let config = bed.join("n1.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("mount_prefixes", "# ")).unwrap();
    cluster.site.kill_agent("n1");
    cluster.site.start_agent("n1");
    cluster.cover("job", &[over(&path, "0", false)], &["n1"]).assert_code(1).assert_says("mount_prefixes");
    cluster.end();
}

#[test]
fn directories_of_others_are_covered_where_the_site_allows_it() {
    if !site::ready(&TMPFS) {
        return;
    }
    let agent = "mount_prefixes = [\"BED/scratch\"]\ncover_writable = true\ncover_readable = true";
    let cluster = Cluster::with(&TMPFS, agent);
    cluster.stage("job", "0", OWNER, "ram");
    let scratch = cluster.home.parent().unwrap().to_owned();
    let others = |name: &str, group: u32, mode: u32| {
        let path = scratch.join(name);
        directory(&path, 0, mode);
        chown(&path, Some(0), Some(group)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let group = others("group", OWNER, 0o2770);
    let readable = others("readable", 0, 0o755);
    let foreign = others("foreign", 4711, 0o770);
    for (path, read_only, allowed) in [
        (&group, false, true),
        (&group, true, true),
        (&readable, false, false),
        (&readable, true, true),
        (&foreign, false, false),
        (&foreign, true, false),
    ] {
        let ran = cluster.cover("job", &[over(path, "0", read_only)], &["n1"]);
        assert_eq!(ran.success(), allowed, "{path:?} {read_only}: {ran:?}");
        assert_eq!(cluster.shown("n1").len(), usize::from(allowed));
        cluster.uncover("job", &["n1"], &[]).assert_success();
    }
    cluster.end();
}

#[test]
fn what_is_swapped_meanwhile_never_has_something_else_mounted_over() {
    if !site::ready(&TMPFS) {
        return;
    }
    let cluster = Cluster::new(&TMPFS);
    cluster.stage("job", "0", OWNER, "ram");
    let bed = cluster.site.bed.dir().to_owned();
    // What the user would like to have covered: outside of the prefix, and somebody else's in it.
    let (outside, stranger) = (bed.join("victim"), bed.join("scratch/stranger"));
    directory(&outside.join("in"), OWNER, 0o777);
    directory(&stranger.join("in"), STRANGER, 0o777);
    let link = |name: &str, to: &Path| {
        let path = cluster.home.join(name);
        symlink(to, &path).unwrap();
        path
    };
    let own = cluster.on_disk("own");
    cluster.on_disk("parent/in");
    cluster.on_disk("other/in");
    directory(&cluster.home.join("parent"), OWNER, 0o755);
    directory(&cluster.home.join("other"), OWNER, 0o755);
    let swaps = [
        // The directory itself, then one above it, with a symlink that leads outside, to a stranger, to another own.
        (own.clone(), link("own-outside", &outside.join("in")), own.clone()),
        (own.clone(), link("own-stranger", &stranger.join("in")), own.clone()),
        (own.clone(), cluster.on_disk("own-other"), own),
        (cluster.home.join("parent"), link("parent-outside", &outside), cluster.home.join("parent/in")),
        (cluster.home.join("parent"), link("parent-stranger", &stranger), cluster.home.join("parent/in")),
        (cluster.home.join("parent"), cluster.home.join("other"), cluster.home.join("parent/in")),
    ];
    for (one, other, path) in swaps {
        let mut command = cluster.owner("n1").command(&cluster.site.probe);
        command.arg("exchange").arg(&one).arg(&other).stdout(Stdio::null());
        let mut swapper = command.spawn().unwrap();
        let done = AtomicBool::new(false);
        let (ran, seen) = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut seen = std::collections::BTreeSet::new();
                while !done.load(Ordering::Relaxed) {
                    seen.extend(cluster.shown("n1"));
                }
                seen
            });
            let steps = [
                json!({ "aim": { "covers": [over(&path, "0", false)] } }),
                json!("cover"),
                json!({ "uncover": { "force": true } }),
            ];
            let ran = cluster.steps_for("job", "n1", 3, &steps);
            done.store(true, Ordering::Relaxed);
            (ran, watcher.join().unwrap())
        });
        cluster.steps("job", "n1", &[json!({ "uncover": { "force": true } })]).assert_success();
        let ended = swapper.try_wait().unwrap();
        swapper.kill().unwrap();
        swapper.wait().unwrap();
        assert_eq!(ended, None, "the swapper ended by itself");
        eprintln!("{}: covered {}; seen {seen:?}", other.display(), ran.assert_success().stdout.trim());
        // Only ever a directory of the user's in the prefix.
        let strange: Vec<&PathBuf> = seen.iter().filter(|at| !at.starts_with(&cluster.home)).collect();
        assert!(strange.is_empty(), "{}: mounted at {strange:?}", other.display());
        assert!(cluster.shown("n1").is_empty(), "{:?}", cluster.shown("n1"));
        // Put it as it was.
        if fs::symlink_metadata(&one).unwrap().is_symlink() {
            fs::rename(&other, cluster.home.join("aside")).unwrap();
            fs::rename(&one, &other).unwrap();
            fs::rename(cluster.home.join("aside"), &one).unwrap();
        }
    }

    // Aimed at, then moved away: refused, and so is what came into its place.
    let path = cluster.on_disk("moved");
    let aim = json!({ "aim": { "covers": [over(&path, "0", false)] } });
    for replacement in ["a symlink", "a directory", "nothing"] {
        cluster.steps("job", "n1", &[json!("mount"), aim.clone()]).assert_success();
        let away = cluster.home.join("moved-away");
        fs::rename(&path, &away).unwrap();
        match replacement {
            "a symlink" => symlink(outside.join("in"), &path).unwrap(),
            "a directory" => directory(&path, OWNER, 0o755),
            _ => {}
        }
        cluster.steps("job", "n1", &[json!("cover")]).assert_code(1).assert_says("meanwhile");
        assert!(cluster.shown("n1").is_empty(), "{replacement}");
        match replacement {
            "a symlink" => fs::remove_file(&path).unwrap(),
            "a directory" => fs::remove_dir(&path).unwrap(),
            _ => {}
        }
        fs::rename(&away, &path).unwrap();
    }
    cluster.end();
}

#[test]
fn a_path_that_is_swapped_while_it_is_uncovered_has_nothing_else_taken_away() {
    if !site::ready(&TMPFS) {
        return;
    }
    let cluster = Cluster::new(&TMPFS);
    cluster.stage("job", "0", OWNER, "ram");
    cluster.on_disk("parent/in");
    let parent = cluster.home.join("parent");
    directory(&parent, OWNER, 0o755);
    // A mount of the administrator's, with the same last name.
    let precious = cluster.site.bed.dir().join("precious");
    directory(&precious.join("in"), 0, 0o755);
    let host = cluster.site.host("n1");
    host.ok(&["mount", "-t", "tmpfs", "precious", &precious.join("in").display().to_string()]);
    symlink(&precious, cluster.home.join("link")).unwrap();
    let path = parent.join("in");
    for _ in 0..10 {
        cluster.cover("job", &[over(&path, "0", false)], &["n1"]).assert_success();
        let mut command = cluster.owner("n1").command(&cluster.site.probe);
        command.arg("exchange").arg(&parent).arg(cluster.home.join("link")).stdout(Stdio::null());
        let mut swapper = command.spawn().unwrap();
        // It may say that the path changes all the time; it must not take away anything else.
        for _ in 0..5 {
            cluster.uncover("job", &["n1"], &[]);
        }
        cluster.uncover("job", &["n1"], &["--force"]);
        swapper.kill().unwrap();
        swapper.wait().unwrap();
        cluster.uncover("job", &["n1"], &["--force"]).assert_success();
        assert_eq!(cluster.shown("n1"), [precious.join("in")]);
        if fs::symlink_metadata(&parent).unwrap().is_symlink() {
            fs::rename(cluster.home.join("link"), cluster.home.join("aside")).unwrap();
            fs::rename(&parent, cluster.home.join("link")).unwrap();
            fs::rename(cluster.home.join("aside"), &parent).unwrap();
        }
    }
    host.ok(&["umount", &precious.join("in").display().to_string()]);
    cluster.end();
}

#[test]
fn a_covered_directory_that_is_renamed_or_removed_from_another_namespace_takes_nothing_along() {
    if !site::ready(&TMPFS) {
        return;
    }
    let cluster = Cluster::new(&TMPFS);
    cluster.stage("job", "0", OWNER, "ram");
    let path = cluster.home.join("in");
    let home = cluster.home.display();
    for change in ["mv in moved && ln -s /proc in", "rmdir in", "mv in moved && mkdir in"] {
        directory(&path, OWNER, 0o755);
        // A namespace from before the cover does not have it, so there the directory is no mount point.
        let script = format!("cd {home} && echo ready && until [ -e go ]; do sleep 0.01; done; {change}");
        let mut command = cluster.owner("n1").command("unshare");
        command.args(["--user", "--map-root-user", "--mount", "--propagation", "private", "sh", "-c"]);
        let mut child = command.arg(script).stdout(Stdio::piped()).spawn().unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 5]).unwrap();
        cluster.cover("job", &[over(&path, "0", false)], &["n1"]).assert_success();
        let before = cluster.site.host("n1").mounts().len();
        fs::write(cluster.home.join("go"), "").unwrap();
        assert!(child.wait().unwrap().success(), "{change}");
        cluster.uncover("job", &["n1"], &[]).assert_success();
        assert!(cluster.shown("n1").is_empty(), "{change}: {:?}", cluster.shown("n1"));
        assert_eq!(cluster.site.host("n1").mounts().len(), before - 1, "{change}");
        for entry in fs::read_dir(&cluster.home).unwrap().flatten() {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) }
                .unwrap();
        }
    }
    cluster.end();
}

#[test]
fn all_nodes_are_covered_or_none() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let cluster = Cluster::new(&GLUSTER);
    let path = cluster.on_disk("in");
    cluster.stage("job", "0", OWNER, "ram");
    cluster.steps("job", "n1", &[json!("unmount")]).assert_success();
    let covers = [over(&path, "0", false)];
    let nobody = |nodes: &[&str]| {
        for node in nodes {
            assert!(cluster.shown(node).is_empty(), "{node}");
            assert!(cluster.site.processes(node, "glusterfs").is_empty(), "{node}");
            assert!(!cluster.site.runtime_dir(node, "job").exists(), "{node}");
            assert_eq!(cluster.reads(node, &path.join("file")), "disk");
        }
    };
    // One node does not allow it.
    let config = cluster.site.bed.dir().join("n4.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("/scratch\"", "/elsewhere\"")).unwrap();
    cluster.site.kill_agent("n4");
    cluster.site.start_agent("n4");
    let ran = cluster.cover("job", &covers, &["n3", "n4"]);
    ran.assert_code(1).assert_says("n4: Some(Conflict)").assert_says("not below");
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    nobody(&["n3", "n4"]);
    // The agent of one node is dead.
    fs::write(&config, text).unwrap();
    cluster.site.kill_agent("n4");
    cluster.cover("job", &covers, &["n3", "n4"]).assert_code(1).assert_says("n4 can't be reached");
    nobody(&["n3", "n4"]);
    // On one node it is on a mount of its own, in which something is mounted.
    cluster.site.start_agent("n4");
    let inner = cluster.on_disk("in/mounted").display().to_string();
    cluster.site.host("n4").ok(&["mount", "-t", "tmpfs", "none", &inner]);
    cluster.cover("job", &covers, &["n3", "n4"]).assert_code(1).assert_says("something is mounted in it");
    cluster.site.host("n4").ok(&["umount", &inner]);
    nobody(&["n3", "n4"]);
    // The same incarnation can be tried again.
    cluster.cover("job", &covers, &["n3", "n4"]).assert_success();
    assert_eq!(cluster.reads("n4", &path.join("file")), "ram");
    // A node that was started again counts as uncovered.
    cluster.site.forget_agent("n4");
    cluster.site.host("n4").reboot();
    cluster.site.mount_ssd("n4");
    cluster.site.start_agent("n4");
    cluster.uncover("job", &["n3", "n4"], &["--leave"]).assert_success();
    nobody(&["n3", "n4"]);
    cluster.end();
}

#[test]
fn what_is_busy_on_one_node_stays_on_all() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let cluster = Cluster::new(&GLUSTER);
    let (path, other) = (cluster.on_disk("in"), cluster.on_disk("other"));
    cluster.stage("job", "0", OWNER, "ram");
    cluster.stage("job", "1", OWNER, "ram");
    let covers = [over(&path, "0", false), over(&other, "1", false)];
    cluster.cover("job", &covers, &["n3", "n4"]).assert_success();
    let all_show_it = || {
        for node in ["n3", "n4"] {
            assert_eq!(cluster.shown(node).len(), 2, "{node}: {:?}", cluster.shown(node));
            for path in [&path, &other] {
                assert_eq!(cluster.reads(node, &path.join("file")), "ram", "{node}");
            }
        }
    };
    // An open file, a working directory, a program that runs from there, one in a mount namespace of its own.
    let inner = path.display();
    let copy = format!("cp /bin/sleep {inner}/sleeper");
    cluster.owner("n3").shell(&copy).assert_success();
    for script in [
        format!("exec 3<{inner}/file; echo held; exec sleep 300"),
        format!("cd {inner}; echo held; exec sleep 300"),
        format!("echo held; exec {inner}/sleeper 300"),
    ] {
        let mut command = cluster.owner("n4").command("sh");
        let mut child = command.arg("-c").arg(&script).stdout(Stdio::piped()).spawn().unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 5]).unwrap();
        wait_until(DEADLINE, "the program runs", || {
            !cluster.site.processes("n4", "sleep").is_empty()
                || !cluster.site.processes("n4", "sleeper").is_empty()
        });
        let ran = cluster.uncover("job", &["n3", "n4"], &[]);
        ran.assert_code(1).assert_says("n4: Some(Busy)").assert_says("sleep").assert_says(&inner.to_string());
        all_show_it();
        release(child);
    }
    let mut command = cluster.site.host("n4").command("unshare");
    let script = format!("exec 3<{inner}/file; echo held; exec sleep 300");
    command.args(["--mount", "--propagation", "private", "sh", "-c"]).arg(&script);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 5]).unwrap();
    cluster.uncover("job", &["n3", "n4"], &[]).assert_code(1).assert_says("(s");
    all_show_it();
    release(child);
    // What only the kernel holds is not seen before: what was taken away comes back, on this node and on the others.
    let image = path.join("image").display().to_string();
    cluster.owner("n4").ok(&["truncate", "-s", "1M", &image]);
    let host = cluster.site.host("n4");
    let ran = host.run(&["losetup", "--show", "--find", &image]);
    let device = ran.assert_success().stdout.trim().to_owned();
    cluster.uncover("job", &["n3", "n4"], &[]).assert_code(1).assert_says("the kernel holds");
    all_show_it();
    host.ok(&["losetup", "--detach", &device]);
    // A node that can't be asked: nothing is taken away from the others.
    cluster.site.kill_agent("n4");
    cluster.uncover("job", &["n3", "n4"], &[]).assert_code(1).assert_says("n4 can't be reached");
    all_show_it();
    cluster.site.start_agent("n4");
    wait_until(DEADLINE, "it is uncovered", || cluster.uncover("job", &["n3", "n4"], &[]).success());
    cluster.end();
}

#[test]
fn what_an_agent_covered_the_next_one_uncovers() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let cluster = Cluster::new(&GLUSTER);
    let path = cluster.on_disk("in");
    cluster.stage("job", "0", OWNER, "ram");
    let covers = [over(&path, "0", false)];
    cluster.cover("job", &covers, &["n3", "n4"]).assert_success();
    cluster.site.kill_agent("n3");
    assert_eq!(cluster.reads("n3", &path.join("file")), "ram");
    cluster.site.start_agent("n3");
    assert_eq!(cluster.reads("n3", &path.join("file")), "ram");
    cluster.uncover("job", &["n3", "n4"], &[]).assert_success();
    for node in ["n3", "n4"] {
        assert!(cluster.shown(node).is_empty());
        assert_eq!(cluster.reads(node, &path.join("file")), "disk");
    }
    // Covered, but not committed: whoever ordered it was told that the agent is gone, so the next one takes it away.
    cluster.uncover("job", &["n4"], &["--leave"]).assert_success();
    let aim = json!({ "aim": { "covers": covers } });
    cluster.steps("job", "n4", &[json!("mount"), aim.clone(), json!("cover")]).assert_success();
    assert_eq!(cluster.reads("n4", &path.join("file")), "ram");
    cluster.site.kill_agent("n4");
    cluster.site.start_agent("n4");
    assert!(cluster.shown("n4").is_empty());
    assert_eq!(cluster.reads("n4", &path.join("file")), "disk");
    // Between aiming and covering: what was aimed at is forgotten, and nothing is mounted.
    cluster.steps("job", "n3", std::slice::from_ref(&aim)).assert_success();
    cluster.site.kill_agent("n3");
    cluster.site.start_agent("n3");
    cluster.steps("job", "n3", &[json!("cover")]).assert_code(1).assert_says("aim again");
    cluster.steps("job", "n3", &[aim.clone(), json!("cover")]).assert_success();
    // Nothing is taken for covered that is not: somebody took the mount away behind the agent's back.
    cluster.site.host("n3").ok(&["umount", &path.display().to_string()]);
    let again = [aim.clone(), json!("cover")];
    cluster.steps("job", "n3", &again).assert_code(1).assert_says("not mounted over");
    let uncover = json!({ "uncover": { "force": true } });
    cluster.steps("job", "n3", &[uncover, aim, json!("cover")]).assert_success();
    assert_eq!(cluster.reads("n3", &path.join("file")), "ram");
    // A renamed directory above is no hiding place.
    fs::rename(&cluster.home, cluster.home.with_file_name("renamed")).unwrap();
    cluster.site.kill_agent("n3");
    cluster.site.start_agent("n3");
    cluster.uncover("job", &["n3"], &[]).assert_success();
    assert!(cluster.shown("n3").is_empty());
    cluster.end();
}

#[test]
fn two_users_on_one_node_see_their_own() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let cluster = Cluster::new(&GLUSTER);
    let path = cluster.on_disk("in");
    cluster.build(&GLUSTER, "theirs", "20002:20002");
    let theirs = cluster.home.with_file_name("stranger");
    directory(&theirs, STRANGER, 0o700);
    directory(&path, OWNER, 0o750);
    for (name, owner) in [("job", OWNER), ("theirs", STRANGER)] {
        // Readable for all, other than the directories on disk.
        cluster.stage(name, "0", owner, name);
    }
    let nodes = ["n3", "n4"];
    // A job can't cover what is the other one's.
    cluster.cover("job", &[over(&theirs, "0", false)], &nodes).assert_code(1).assert_says("belongs to");
    cluster.cover("job", &[over(&path, "0", false)], &nodes).assert_success();
    cluster.cover("theirs", &[over(&theirs, "0", false)], &nodes).assert_success();
    for node in nodes {
        let stranger = cluster.site.host(node).as_user(STRANGER, STRANGER);
        assert_eq!(cluster.reads(node, &path.join("file")), "job");
        assert_eq!(stranger.ok(&["cat", &theirs.join("file").display().to_string()]), "theirs");
        for script in ["cat file", "ls .", "echo x > new"] {
            let at = |path: &Path| format!("cd {} && {script}", path.display());
            let (a, b) = (stranger.shell(&at(&path)), cluster.owner(node).shell(&at(&theirs)));
            assert!(!a.success() && !b.success(), "{script}: {a:?} {b:?}");
        }
    }
    cluster.uncover("job", &nodes, &[]).assert_success();
    assert_eq!(cluster.shown("n3"), std::slice::from_ref(&theirs));
    cluster.site.destroy("theirs");
    assert!(cluster.shown("n3").is_empty());
    cluster.end();
}

#[test]
fn dead_mounts_of_ended_jobs_are_shown_and_removed_by_the_hooks() {
    // Users of their own: whoever else has processes on this machine counts as the job's.
    const USER: u32 = 20_777;
    if !site::ready(&GLUSTER) {
        return;
    }
    let cluster = Cluster::new(&GLUSTER);
    let site = &cluster.site;
    cluster.build(&GLUSTER, "dead", &format!("{USER}:{USER}"));
    let mut layout: Value =
        serde_json::from_str(&fs::read_to_string(cluster.file("dead", "layout")).unwrap()).unwrap();
    layout["job"] = json!({
        "cluster": "", "job": "4242", "purpose": "both", "account": "", "request": {}, "work_dir": "/",
    });
    fs::write(cluster.file("dead", "layout"), layout.to_string()).unwrap();
    let path = cluster.home.join("dead");
    directory(&path, USER, 0o755);
    fs::write(path.join("file"), "disk").unwrap();
    cluster.stage("dead", "0", USER, "ram");
    cluster.cover("dead", &[over(&path, "0", false)], &["n3", "n4"]).assert_success();
    let read = |host: &str| site.host(host).run(&["cat", &path.join("file").display().to_string()]);
    let hook = |host: &str, hook: &str, job: &str, uid: u32| {
        let config = site.bed.dir().join(format!("{host}.toml")).display().to_string();
        let ondeck = site.ondeck.display();
        let line = format!(
            "SLURM_JOB_ID={job} SLURM_JOB_UID={uid} exec timeout 30 {ondeck} {hook} --config {config}"
        );
        let ran = site.host(host).shell(&line);
        ran.assert_code(0);
        ran
    };
    // A mount that lives is none of a Prolog's business, nor is a dead one of a job that is still here.
    hook("n3", "prolog", "5000", STRANGER);
    assert_eq!(read("n3").assert_success().stdout, "ram");
    let user = site.host("n3").as_user(USER, USER);
    let mut sleep = user.command("sleep");
    sleep.arg("300").env("SLURM_JOB_ID", "4242");
    let mut sleep = user.spawn_daemon(sleep, &site.bed.dir().join("sleep.log")).unwrap();
    crate::site::signal(&site.process("n3", "glusterfs"), ondeck_testbed::Signal::KILL);
    site.status_tells("dead", &format!("{} is a dead mount", path.display()), std::time::Instant::now());
    let listed = site.ramdisk(&["list"]).assert_success().stdout.clone();
    assert!(listed.contains(&format!("dead mount of dead on n3: {}", path.display())), "{listed}");
    assert!(!read("n3").success());
    hook("n3", "prolog", "5000", STRANGER);
    assert!(!read("n3").success(), "the job is still there");
    sleep.kill(ondeck_testbed::Signal::KILL);
    sleep.wait(DEADLINE);
    hook("n3", "prolog", "4242", USER);
    assert!(!read("n3").success(), "that is its scheduler's to mend");
    hook("n3", "prolog", "5000", STRANGER).assert_says("took dead@");
    assert_eq!(read("n3").assert_success().stdout, "disk");
    // The others go on, until the job's Epilog comes, also if no scheduler answers.
    for (job, uid) in [("5000", USER), ("4242", STRANGER)] {
        hook("n4", "epilog", job, uid);
        assert_eq!(read("n4").assert_success().stdout, "ram", "another's");
    }
    hook("n4", "epilog", "4242", USER);
    assert_eq!(read("n4").assert_success().stdout, "disk");
    // Of what it holds nothing is lost.
    cluster.in_data("dead", |data| assert_eq!(fs::read_to_string(data.join("0/file")).unwrap(), "ram"));
    site.destroy("dead");
    cluster.end();
}

/// A filesystem of a user's on a host's directory that never answers; its server.
pub fn mute(site: &Site, host: &str, at: &Path, uid: u32, more: &[&str]) -> ondeck_testbed::Daemon {
    let mut command = site.host(host).command(&site.probe);
    // Its server is of another job than any here.
    command.arg("mute").arg(at).args(["--uid", &uid.to_string()]).args(more).env("SLURM_JOB_ID", "7");
    let log = site.bed.dir().join(format!("mute-{host}.log"));
    let server = site.host(host).spawn_daemon(command, &log).unwrap();
    wait_until(DEADLINE, "it is mounted", || server.log().contains("mounted"));
    server
}

/// What a user's filesystem was mounted on is free again.
pub fn unmute(site: &Site, host: &str, at: &Path, mut server: ondeck_testbed::Daemon) {
    server.kill(ondeck_testbed::Signal::KILL);
    server.wait(DEADLINE).expect("SIGKILL ends it");
    site.host(host).run(&["umount", "--lazy", &at.display().to_string()]);
}

#[test]
fn a_filesystem_that_never_answers_above_a_cover_holds_nothing_up() {
    if !site::ready(&GLUSTER) {
        return;
    }
    for case in [&TMPFS, &GLUSTER] {
        let cluster = Cluster::new(case);
        let site = &cluster.site;
        let node = *cluster.nodes.last().unwrap();
        cluster.stage("job", "0", OWNER, "ram");
        cluster.on_disk("above");
        cluster.on_disk("above/in");
        let (above, path) = (cluster.home.join("above"), cluster.home.join("above/in"));
        let quickly = |what: &str, ran: &dyn Fn() -> Ran| {
            let began = std::time::Instant::now();
            let ran = ran();
            assert!(began.elapsed() < SOON, "{what} took {:?}: {ran:?}", began.elapsed());
            ran
        };
        let is_gone = |what: &str| {
            let all = site.host(node).new_mounts();
            let left: Vec<_> =
                all.iter().filter(|mount| mount.target == path || mount.source == "mute").collect();
            assert!(left.len() == 1 && left[0].source == "mute", "{what}: {left:?}");
        };
        for (others, restarted, force) in [
            (&[][..], false, &["--force"][..]),
            (&["--allow-other"], false, &["--force"]),
            (&["--allow-other"], true, &["--force"]),
            (&["--allow-other"], false, &[]),
        ] {
            let what = format!("{} {others:?} {force:?}, restarted: {restarted}", case.engine);
            cluster.cover("job", &[over(&path, "0", false)], cluster.nodes).assert_success();
            if restarted {
                site.kill_agent(node);
                site.start_agent(node);
            }
            let server = mute(site, node, &above, OWNER, others);
            quickly(&what, &|| site.ramdisk(&["list"])).assert_success();
            quickly(&what, &|| cluster.uncover("job", cluster.nodes, force)).assert_success();
            is_gone(&what);
            unmute(site, node, &above, server);
            assert_eq!(cluster.reads(node, &path.join("file")), "disk");
        }
        // One that came while no agent ran hides the mount until it goes.
        cluster.cover("job", &[over(&path, "0", false)], cluster.nodes).assert_success();
        site.kill_agent(node);
        let server = mute(site, node, &above, OWNER, &["--allow-other"]);
        quickly("the agent", &|| {
            site.start_agent(node);
            site.ramdisk(&["list"])
        })
        .assert_success();
        let refused = quickly("hidden", &|| cluster.uncover("job", &[node], &["--force"]));
        refused.assert_code(1).assert_says(&above.display().to_string()).assert_says("unmount that first");
        unmute(site, node, &above, server);
        cluster.uncover("job", cluster.nodes, &["--force"]).assert_success();
        // Destroying takes it away as well.
        cluster.cover("job", &[over(&path, "0", false)], cluster.nodes).assert_success();
        let server = mute(site, node, &above, OWNER, &["--allow-other"]);
        quickly("destroying", &|| site.ramdisk(&["destroy", "job"])).assert_success();
        is_gone("destroying");
        unmute(site, node, &above, server);
        cluster.end();
    }
}

#[test]
fn a_prolog_believes_no_process_of_another_user_and_is_held_up_by_none() {
    // Users of their own: whoever else has processes on this machine counts as the job's.
    const USER: u32 = 20_778;
    if !site::ready(&GLUSTER) {
        return;
    }
    let cluster = Cluster::new(&GLUSTER);
    let site = &cluster.site;
    cluster.build(&GLUSTER, "dead", &format!("{USER}:{USER}"));
    let mut layout: Value =
        serde_json::from_str(&fs::read_to_string(cluster.file("dead", "layout")).unwrap()).unwrap();
    layout["job"] = json!({
        "cluster": "", "job": "4243", "purpose": "both", "account": "", "request": {}, "work_dir": "/",
    });
    fs::write(cluster.file("dead", "layout"), layout.to_string()).unwrap();
    let (path, odd) = (cluster.home.join("dead"), cluster.home.join("odd"));
    for directory_of in [&path, &odd] {
        directory(directory_of, USER, 0o755);
    }
    fs::write(path.join("file"), "disk").unwrap();
    cluster.stage("dead", "0", USER, "ram");
    cluster.cover("dead", &[over(&path, "0", false)], &["n3"]).assert_success();
    crate::site::signal(&site.process("n3", "glusterfs"), ondeck_testbed::Signal::KILL);
    site.status_tells("dead", &format!("{} is a dead mount", path.display()), std::time::Instant::now());
    let shown = || site.host("n3").new_mounts().iter().any(|mount| mount.target == path);
    let prolog = || {
        let config = site.bed.dir().join("n3.toml").display().to_string();
        let ondeck = site.ondeck.display();
        let line = format!(
            "SLURM_JOB_ID=5000 SLURM_JOB_UID={STRANGER} exec timeout -k 1 15 {ondeck} prolog --config {config}"
        );
        site.host("n3").shell(&line).assert_code(0).stderr.clone()
    };
    // A process of the job's user that does not tell whose it is: its environment is in a file that nobody gives.
    let server = mute(site, "n3", &odd, USER, &["--names"]);
    let mut hidden = site.host("n3").as_user(USER, USER).command(&site.probe);
    hidden.arg("hide-environment").arg(odd.join("file")).env("PADDING", "x".repeat(4 * 4096));
    // Behind the padding, where it can't be read.
    hidden.env("SLURM_JOB_ID", "8");
    let log = site.bed.dir().join("hidden.log");
    let mut hidden = site.host("n3").as_user(USER, USER).spawn_daemon(hidden, &log).unwrap();
    wait_until(DEADLINE, "its environment is hidden", || hidden.log().contains("hidden"));
    let began = std::time::Instant::now();
    let said = prolog();
    assert!(began.elapsed() < SOON, "{:?}: {said}", began.elapsed());
    assert!(shown(), "it may be the job's: {said}");
    hidden.kill(ondeck_testbed::Signal::KILL);
    unmute(site, "n3", &odd, server);
    hidden.wait(DEADLINE).expect("SIGKILL ends it");
    // Anybody can call a process like one that watches a step.
    let stranger = site.host("n3").as_user(STRANGER, STRANGER);
    let mut fake = stranger.command("bash");
    fake.args(["-c", "exec -a 'slurmstepd: [4243.0]' sleep 300"]);
    let mut fake = stranger.spawn_daemon(fake, &site.bed.dir().join("fake.log")).unwrap();
    let called = |line: &[String]| line.first().is_some_and(|name| name.starts_with("slurmstepd"));
    let is_fake = || site.host("n3").processes().iter().any(|found| called(&found.command_line));
    wait_until(DEADLINE, "it is called so", is_fake);
    let said = prolog();
    assert!(said.contains("took dead@") && !shown(), "{said}");
    fake.kill(ondeck_testbed::Signal::KILL);
    fake.wait(DEADLINE).expect("SIGKILL ends it");
    site.destroy("dead");
    cluster.end();
}

#[test]
fn a_job_that_begins_without_having_been_told_keeps_what_all_nodes_show_and_has_nothing_appear_later() {
    const USER: u32 = 20_779;
    if !site::ready(&GLUSTER) {
        return;
    }
    let cluster = Cluster::new(&GLUSTER);
    let site = &cluster.site;
    cluster.build(&GLUSTER, "untold", &format!("{USER}:{USER}"));
    let mut layout: Value =
        serde_json::from_str(&fs::read_to_string(cluster.file("untold", "layout")).unwrap()).unwrap();
    layout["job"] = json!({
        "cluster": "", "job": "4244", "purpose": "both", "account": "", "request": {}, "work_dir": "/",
    });
    fs::write(cluster.file("untold", "layout"), layout.to_string()).unwrap();
    let path = cluster.home.join("untold");
    directory(&path, USER, 0o755);
    cluster.stage("untold", "0", USER, "ram");
    let shown = || site.host("n3").new_mounts().iter().any(|mount| mount.target == path);
    // No scheduler answers.
    let hook = |name: &str| {
        let config = site.bed.dir().join("n3.toml").display().to_string();
        let ondeck = site.ondeck.display();
        let line = format!(
            "SLURM_JOB_ID=4244 SLURM_JOB_UID={USER} timeout -k 1 25 {ondeck} {name} --config {config}; code=$?; \
             cat /run/ondeck/notes/4244 2> /dev/null; exit $code"
        );
        site.host("n3").shell(&line).assert_code(0).stdout.clone()
    };
    cluster.cover("untold", &[over(&path, "0", false)], &["n3"]).assert_success();
    let told = hook("prolog");
    assert!(shown() && told.contains("its data is in a RAM disk"), "{told}");
    hook("epilog");
    assert!(!shown());
    let told = hook("prolog");
    assert!(told.contains("works on disk"), "{told}");
    let late = cluster.cover("untold", &[over(&path, "0", false)], &["n3"]);
    late.assert_code(1).assert_says("job 4244 has begun on this node without its RAM disk");
    assert!(!shown());
    // It has ended there, and another run of it may have one.
    hook("epilog");
    cluster.cover("untold", &[over(&path, "0", false)], &["n3"]).assert_success();
    assert!(shown());
    hook("epilog");
    assert!(!shown());
}
