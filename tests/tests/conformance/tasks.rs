//! Staging and users' scripts on an RSA node: done as the user, seen by nobody else, and nothing is left of them.

mod limits;
mod others;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ondeck_testbed::{Host, Process, wait_until};
use serde_json::{Value, json};

use crate::covers::{mute, unmute};
use crate::isolation::call;
use crate::site::{
    self, Case, DEADLINE, GLUSTER, OWNER, STRANGER, Setup, Site, TMPFS, View, difference, write_pattern,
};

crate::for_engines! {
    tmpfs = TMPFS: [
        a_fill_and_a_homecoming_lose_nothing_of_anybodys,
        a_script_unpacks_and_packs_and_what_it_leaves_behind_ends,
        a_task_that_is_stopped_leaves_no_process_and_can_be_started_again,
        a_task_sees_no_other_ramdisk,
        a_running_job_sees_what_it_wrote_before_and_keeps_it,
        a_directory_that_was_renamed_on_disk_is_another_one,
        what_another_user_puts_in_the_way_gets_no_results,
        what_a_job_made_of_names_and_directories_comes_home_by_several_nodes,
    ]
    gluster = GLUSTER: [
        a_fill_and_a_homecoming_lose_nothing_of_anybodys,
        a_script_unpacks_and_packs_and_what_it_leaves_behind_ends,
        a_task_that_is_stopped_leaves_no_process_and_can_be_started_again,
        a_task_sees_no_other_ramdisk,
        a_running_job_sees_what_it_wrote_before_and_keeps_it,
        a_directory_that_was_renamed_on_disk_is_another_one,
        what_a_job_made_of_names_and_directories_comes_home_by_several_nodes,
    ]
}

/// A group of the owner's beside the primary one.
const GROUP: u32 = 30_001;
/// How long a task of a test may take; each has a minute by its own request.
const TASK_DEADLINE: Duration = Duration::from_secs(90);

/// A job of the owner's, with a RAM disk.
struct Job<'a> {
    site: &'a Site,
    id: String,
    /// The job's files on disk.
    dir: PathBuf,
    /// Where a compute node sees the RAM disk.
    view: Option<View>,
}

/// A site whose nodes know the users of these tests.
fn site() -> Site {
    site_with("")
}

fn site_with(agent: &str) -> Site {
    let setup = Setup { fake_path: &site::NODES, agent: agent.to_owned(), ..Setup::default() };
    let site = Site::with(setup);
    for host in site::NODES {
        let program = |name: &str, text: &str| {
            let path = site.fake(host).join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        program("getent", "#!/bin/sh\necho \"user$2:x:$2:$2:somebody:/home/user$2:/bin/sh\"\n");
        program("id", &format!("#!/bin/sh\necho ${{2#user}} {GROUP}\n"));
    }
    site
}

fn give(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    chown(path, Some(OWNER), Some(OWNER)).unwrap();
}

/// A directory of the owner's.
fn make(path: &Path) {
    fs::create_dir(path).unwrap();
    give(path, 0o755);
}

fn put(path: &Path, content: &str) {
    fs::write(path, content).unwrap();
    give(path, 0o644);
}

impl<'a> Job<'a> {
    fn new(site: &'a Site, case: &Case, name: &str, size: &str, views: usize) -> Job<'a> {
        let built = site.build_with(case, name, size, views, &[]);
        let dir = site.bed.dir().join(format!("job-{name}"));
        make(&dir);
        let view = site.views(case, name, views).into_iter().next();
        Job { site, id: format!("{name}@{}", built["layout"]["id"]["epoch"]), dir, view }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A directory as requests name it.
    fn directory(&self, path: &str, name: &str, kind: &str) -> Value {
        let (input, output) = (kind.contains("in"), kind.contains("out"));
        json!({"path": self.path(path), "name": name, "input": input, "output": output})
    }

    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        put(&path, &format!("#!/bin/sh\n{text}\n"));
        give(&path, 0o755);
        path
    }

    fn request(&self, work: Value) -> Value {
        json!({
            "work": work, "uid": OWNER, "gid": OWNER, "job": "4711", "work_dir": self.dir,
            "deadline_ms": 60_000, "bandwidth": null,
        })
    }

    fn fill(&self, directories: &[Value]) -> Value {
        self.request(json!({"fill": {"directories": directories, "script": null}}))
    }

    fn home(&self, directories: &[Value]) -> Value {
        self.request(json!({"bring_home": {"directories": directories, "script": null, "pack": null}}))
    }

    fn ask(&self, node: &str, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let file = self.site.bed.dir().join("request.json");
        let mut more = Vec::new();
        let text = file.display().to_string();
        if let Some(body) = body {
            fs::write(&file, body.to_string()).unwrap();
            more = vec!["--body", &text];
        }
        let path = format!("/v1/ramdisks/{}/{path}", self.id);
        let (status, said) = call(self.site, self.site.host("ctl"), node, method, &path, &more);
        (status, serde_json::from_str(&said).unwrap_or(Value::String(said)))
    }

    #[track_caller]
    fn start(&self, node: &str, task: &str, request: &Value) -> Value {
        let (status, report) = self.ask(node, "POST", &format!("tasks/{task}"), Some(request));
        assert_eq!(status, 200, "{report}");
        report
    }

    #[track_caller]
    fn report(&self, node: &str, task: &str, wait: u64) -> Value {
        let (status, report) = self.ask(node, "GET", &format!("tasks/{task}?wait={wait}"), None);
        assert_eq!(status, 200, "{report}");
        report
    }

    /// Starts a task, waits until it has ended and lets it be forgotten.
    #[track_caller]
    fn run(&self, node: &str, request: &Value) -> Value {
        self.start(node, "work", request);
        // Asked anew each time: the agent answers before a caller's patience ends.
        let deadline = Instant::now() + TASK_DEADLINE;
        let report = loop {
            let report = self.report(node, "work", 10_000);
            if report["state"] != "running" {
                break report;
            }
            assert!(Instant::now() < deadline, "still running after {TASK_DEADLINE:?}: {report}");
        };
        let (status, last) = self.ask(node, "DELETE", "tasks/work", None);
        assert_eq!((status, &last), (200, &report));
        assert_eq!(runners(self.site, node), []);
        report
    }

    #[track_caller]
    fn succeeds(&self, node: &str, request: &Value) -> Value {
        let report = self.run(node, request);
        assert_eq!(report["state"]["done"]["ok"], true, "{report:#}");
        report
    }

    /// Runs a task that must fail, with these words.
    #[track_caller]
    fn fails(&self, node: &str, request: &Value, retryable: bool, words: &[&str]) -> Value {
        let report = self.run(node, request);
        assert_eq!(report["state"]["done"]["ok"], false, "{report:#}");
        assert_eq!(report["retryable"], retryable, "{report:#}");
        let message = report["state"]["done"]["message"].as_str().unwrap();
        for word in words {
            assert!(message.contains(word), "no `{word}` in: {message}");
        }
        report
    }

    /// What the job sees under a name.
    fn shown(&self, name: &str) -> PathBuf {
        self.view.as_ref().unwrap().outside.join(name)
    }

    /// Runs a script as the job would, in a directory of the RAM disk.
    #[track_caller]
    fn works(&self, name: &str, script: &str) {
        let view = self.view.as_ref().unwrap();
        let user = view.host.as_user(OWNER, OWNER);
        user.shell(&format!("cd {}/{name} && {script}", view.text())).assert_success();
    }
}

/// The processes of tasks on a node.
fn runners(site: &Site, node: &str) -> Vec<Process> {
    let mut found = site.host(node).processes();
    found.retain(|process| {
        let line = &process.command_line;
        line.get(1).is_some_and(|word| word == "task-runner")
            || line.get(1).is_some_and(|word| word == "4711")
    });
    found
}

/// What a tree holds: for each path its kind, mode, content or target, and with `identity` which file it is and when it
/// was changed.
fn tree(root: &Path, identity: bool) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let kind = meta.file_type();
            let mut text = format!("{:o} {}", meta.mode(), meta.uid());
            if kind.is_symlink() {
                text += &format!(" {}", fs::read_link(&path).unwrap().display());
            } else if kind.is_file() {
                text += &format!(" {} {}", meta.len(), meta.mtime());
                text += &format!(
                    " {}",
                    String::from_utf8_lossy(&fs::read(&path).unwrap()[..meta.len().min(64) as usize])
                );
            } else if kind.is_dir() {
                left.push(path.clone());
            }
            if identity && !kind.is_dir() {
                text += &format!(" {} {}.{}", meta.ino(), meta.ctime(), meta.ctime_nsec());
            }
            found.insert(path.strip_prefix(root).unwrap().to_owned(), text);
        }
    }
    found
}

fn names(root: &Path) -> Vec<String> {
    tree(root, false).into_keys().map(|path| path.display().to_string()).collect()
}

fn a_fill_and_a_homecoming_lose_nothing_of_anybodys(case: &Case) {
    let site = site();
    let job = Job::new(&site, case, "job", "192MiB", 1);
    let other_node = case.servers.last().unwrap();
    // An input with all kinds of entries, and an output that lies in it.
    make(&job.path("in"));
    make(&job.path("in/deep"));
    for (name, length) in [("empty", 0), ("small", 777), ("deep/large", 20 << 20)] {
        write_pattern(&job.path("in").join(name), length, length);
        give(&job.path("in").join(name), 0o640);
    }
    symlink("small", job.path("in/link")).unwrap();
    fs::hard_link(job.path("in/small"), job.path("in/small2")).unwrap();
    // Which the owner may read by a further group alone.
    fs::write(job.path("in/of-the-group"), "shared").unwrap();
    chown(job.path("in/of-the-group"), Some(0), Some(GROUP)).unwrap();
    fs::set_permissions(job.path("in/of-the-group"), fs::Permissions::from_mode(0o640)).unwrap();
    make(&job.path("in/inner"));
    put(&job.path("in/inner/before"), "of before");
    make(&job.path("out"));
    for name in ["kept", "changed", "deleted", "changed-by-both", "deleted-here-changed-there"] {
        put(&job.path("out").join(name), "of before");
    }
    let directories = [
        job.directory("in", "0", "in"),
        job.directory("out", "1", "out"),
        job.directory("in/inner", "2", "out"),
        // Not there yet.
        job.directory("new", "3", "out"),
    ];
    let report = job.succeeds("n1", &job.fill(&directories));
    let bytes = report["bytes_done"].as_u64().unwrap();
    assert!(bytes >= (20 << 20) + 777 && report["bytes_found"] == bytes, "{report:#}");
    assert_eq!((report["errors"].clone(), report["beside"].clone()), (json!([]), json!([])));

    assert_eq!(difference(&job.shown("0/deep/large"), 20 << 20, 20 << 20), None);
    assert_eq!(difference(&job.shown("0/small2"), 777, 777), None);
    assert_eq!(fs::read_to_string(job.shown("0/of-the-group")).unwrap(), "shared");
    assert_eq!(fs::read_link(job.shown("0/link")).unwrap(), Path::new("small"));
    assert_eq!(fs::read_dir(job.shown("0/inner")).unwrap().count(), 0);
    assert_eq!(names(&job.shown("2")), ["before"]);
    assert_eq!(names(&job.shown("3")), [""; 0]);
    let (small, small2) =
        (fs::metadata(job.shown("0/small")).unwrap(), fs::metadata(job.shown("0/small2")).unwrap());
    assert_eq!((small.ino(), small.mode() & 0o7777, small.uid()), (small2.ino(), 0o640, OWNER));
    assert_eq!(fs::metadata(job.shown("0")).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::metadata(job.path("new")).unwrap().uid(), OWNER);
    // A second time nothing has to be copied.
    let before = tree(&job.shown("0"), true);
    job.succeeds("n1", &job.fill(&directories));
    let mut after = tree(&job.shown("0"), true);
    // Links are cheap to make again.
    for link in ["link", "small", "small2"] {
        after.insert(link.into(), before[Path::new(link)].clone());
    }
    assert_eq!(after, before);

    job.works("1", "echo of the job > changed && rm deleted deleted-here-changed-there && mkdir dir");
    job.works(
        "1",
        "echo job > changed-by-both && echo new > dir/new && ln dir/new dir/again && ln -s x dir/sym",
    );
    job.works("1", "mkfifo dir/pipe; chmod 500 dir");
    job.works("2", "echo more > result");
    job.works("3", "seq 100000 > numbers");
    put(&job.path("out/changed-by-both"), "of somebody else");
    put(&job.path("out/deleted-here-changed-there"), "of somebody else");
    put(&job.path("out/new-there"), "of somebody else");

    let report = job.succeeds(other_node, &job.home(&directories));
    let out = tree(&job.path("out"), false);
    let read = |name: &str| fs::read_to_string(job.path(name)).unwrap();
    assert_eq!((read("out/kept"), read("out/changed")), ("of before".into(), "of the job\n".into()));
    assert_eq!(read("out/changed-by-both"), "of somebody else");
    assert_eq!(read("out/changed-by-both.ondeck-4711"), "job\n");
    assert_eq!(read("out/deleted-here-changed-there"), "of somebody else");
    assert!(!job.path("out/deleted").exists() && read("out/new-there") == "of somebody else");
    assert_eq!(fs::metadata(job.path("out/dir/again")).unwrap().nlink(), 2);
    assert_eq!((read("in/inner/before"), read("in/inner/result")), ("of before".into(), "more\n".into()));
    assert_eq!(read("new/numbers").lines().count(), 100_000);
    assert_eq!(report["beside"], json!([job.path("out/changed-by-both.ondeck-4711")]));
    let message = report["state"]["done"]["message"].as_str().unwrap();
    assert!(message.contains("beside it") && message.contains("had deleted"), "{message}");
    assert_eq!(out.len(), 11, "{out:#?}");

    // Once more, by another node: nothing is copied again, and nothing is put beside its own copy.
    let before = tree(&job.dir, true);
    job.succeeds("n1", &job.home(&directories));
    let mut after = tree(&job.dir, true);
    let beside = "out/changed-by-both.ondeck-4711";
    assert_eq!(read(beside), "job\n");
    after.insert(beside.into(), before[Path::new(beside)].clone());
    assert_eq!(after, before);
    site.destroy("job");
    site.host("ctl").ok(&["chmod", "-R", "u+w", &job.dir.display().to_string()]);
    site.assert_nothing_is_left();
}

fn a_running_job_sees_what_it_wrote_before_and_keeps_it(case: &Case) {
    let site = site();
    let job = Job::new(&site, case, "job", "64MiB", 1);
    make(&job.path("out"));
    make(&job.path("out/old"));
    for name in ["kept", "changed", "deleted", "gone", "old/kept"] {
        put(&job.path("out").join(name), "of before");
    }
    let directories = [job.directory("out", "0", "out")];
    let catch_up = job.request(json!({"catch_up": {"directories": directories}}));
    job.fails("n1", &catch_up, true, &["not filled"]);
    job.succeeds("n1", &job.fill(&directories));

    // On disk, before the RAM disk is mounted.
    let disk = |name: &str| job.path("out").join(name);
    make(&disk("new"));
    make(&disk("new/deep"));
    for name in ["log", "left", "removed", "both", "old/more", "new/file", "new/deep/file"] {
        put(&disk(name), "of the disk");
    }
    symlink("log", disk("link")).unwrap();
    fs::hard_link(disk("left"), disk("left-too")).unwrap();
    put(&disk("changed"), "changed on disk");
    fs::remove_file(disk("gone")).unwrap();
    // And since then, in it.
    job.works("0", "rm deleted; echo of the RAM > both");
    put(&disk("deleted"), "once more");

    let report = job.succeeds("n1", &catch_up);
    let message = report["state"]["done"]["message"].as_str().unwrap();
    assert!(message.starts_with("8 entries that the job had written"), "{message}");
    assert!(message.contains("2 entries changed on disk"), "{message}");
    for name in ["changed", "both"] {
        assert!(message.contains(&disk(name).display().to_string()), "{message}");
    }
    let ram = |name: &str| fs::read_to_string(job.shown("0").join(name)).unwrap();
    for name in ["log", "left", "left-too", "removed", "old/more", "new/file", "new/deep/file", "link"] {
        assert_eq!(ram(name), "of the disk", "{name}");
    }
    assert_eq!((ram("both"), ram("changed")), ("of the RAM\n".into(), "of before".into()));
    assert!(!job.shown("0/deleted").exists());
    // A second time there is nothing to do, nor with what an interrupted try has left.
    job.works("0", "echo rubbish > .log.ondeck-partial-4711; mkdir .new.ondeck-partial-4711");
    let before = tree(&job.shown("0"), true);
    let report = job.succeeds("n1", &catch_up);
    let message = report["state"]["done"]["message"].as_str().unwrap();
    assert!(message.starts_with("2 entries changed"), "{message}");
    assert_eq!(tree(&job.shown("0"), true), before);

    job.works("0", "echo and more >> log; rm removed; chmod 600 old/more; rm link; ln -s kept link");
    let other_node = case.servers.last().unwrap();
    let before = tree(&job.path("out"), true);
    let report = job.succeeds(other_node, &job.home(&directories));
    assert_eq!(report["beside"], json!([disk("both.ondeck-4711")]), "{report:#}");
    let after = tree(&job.path("out"), true);
    // What the job left alone is not copied again.
    for name in
        ["kept", "changed", "deleted", "both", "left", "left-too", "new/file", "new/deep/file", "old/kept"]
    {
        assert_eq!(after[Path::new(name)], before[Path::new(name)], "{name}");
    }
    let read = |name: &str| fs::read_to_string(disk(name)).unwrap();
    assert_eq!(read("log"), "of the diskand more\n");
    assert_eq!(read("both.ondeck-4711"), "of the RAM\n");
    assert_eq!(fs::read_link(disk("link")).unwrap(), Path::new("kept"));
    assert_eq!(fs::metadata(disk("old/more")).unwrap().mode() & 0o7777, 0o600);
    assert!(!disk("removed").exists() && !disk("gone").exists());
    assert!(!names(&job.path("out")).iter().any(|name| name.contains("partial")));
    site.destroy("job");
    site.assert_nothing_is_left();
}

fn a_directory_that_was_renamed_on_disk_is_another_one(case: &Case) {
    let site = site();
    let job = Job::new(&site, case, "job", "64MiB", 1);
    for name in ["out", "out/named", "out/swapped", "out/mine", "new", "new/deep", "theirs", "theirs/sub"] {
        make(&job.path(name));
    }
    for name in ["out/named/file", "out/swapped/file", "out/mine/file", "out/mine/removed"] {
        put(&job.path(name), "of before");
    }
    for name in ["new/file", "new/deep/file", "theirs/file", "theirs/removed", "theirs/sub/file"] {
        put(&job.path(name), "of another");
    }
    let directories = [job.directory("out", "0", "out")];
    job.succeeds("n1", &job.fill(&directories));

    // By the job itself, before the RAM disk is shown to it. No time of a file tells.
    let moved = |from: &str, to: &str| fs::rename(job.path(from), job.path(to)).unwrap();
    moved("out/named", "out/renamed");
    moved("out/swapped", "swapped");
    moved("new", "out/swapped");
    let report = job.succeeds("n1", &job.request(json!({"catch_up": {"directories": directories}})));
    let message = report["state"]["done"]["message"].as_str().unwrap();
    let ram = |name: &str| fs::read_to_string(job.shown("0").join(name)).unwrap();
    assert_eq!((ram("renamed/file"), ram("swapped/deep/file")), ("of before".into(), "of another".into()));
    assert!(message.contains("1 entry changed on disk"), "{message}");
    assert!(message.contains(&job.path("out/swapped/file").display().to_string()), "{message}");

    // By somebody else, while the job works in RAM.
    moved("out/mine", "mine");
    moved("theirs", "out/mine");
    job.works("0", "echo job >> renamed/file; echo job > mine/file; rm mine/removed; mkdir mine/sub");
    job.works("0", "echo job > mine/sub/file; echo job > swapped/deep/file");
    let report = job.succeeds(case.servers.last().unwrap(), &job.home(&directories));
    let read = |name: &str| fs::read_to_string(job.path(name)).unwrap();
    for name in ["out/mine/file", "out/mine/removed", "out/mine/sub/file"] {
        assert_eq!(read(name), "of another", "{name}: {report:#}");
    }
    assert_eq!((read("mine/file"), read("mine/removed")), ("of before".into(), "of before".into()));
    assert_eq!(
        (read("out/renamed/file"), read("out/swapped/deep/file")),
        ("of beforejob\n".into(), "job\n".into())
    );
    for name in ["out/mine/file.ondeck-4711", "out/mine/sub/file.ondeck-4711"] {
        assert_eq!(read(name), "job\n", "{name}");
    }
    assert_eq!(report["beside"].as_array().unwrap().len(), 2, "{report:#}");
    site.destroy("job");
    site.assert_nothing_is_left();
}

fn what_another_user_puts_in_the_way_gets_no_results(case: &Case) {
    let site = site();
    let job = Job::new(&site, case, "job", "64MiB", 1);
    for name in ["shared", "top"] {
        make(&job.path(name));
    }
    let directories = [job.directory("shared", "0", "out"), job.directory("top", "1", "out")];
    job.succeeds("n1", &job.fill(&directories));
    job.works("0", "mkdir -m 700 private run1 && echo secret > private/key && chmod 644 private/key");
    job.works("0", "echo result > run1/file");
    job.works("1", "echo secret > key");
    let theirs = |path: &Path| {
        fs::create_dir(path).unwrap();
        std::os::unix::fs::chown(path, Some(STRANGER), Some(STRANGER)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    };
    theirs(&job.path("shared/private"));
    std::os::unix::fs::symlink("nowhere", job.path("shared/run1")).unwrap();
    fs::rename(job.path("top"), job.path("top.old")).unwrap();
    theirs(&job.path("top"));

    let words = ["top", "another user", "ondeck job retry"];
    let server = case.servers.last().unwrap();
    job.fails(server, &job.home(&directories), false, &words);
    let packed = json!({"bring_home": {"directories": directories, "script": null, "pack": "tar"}});
    job.fails(server, &job.request(packed), false, &words);
    assert_eq!(names(&job.path("top")), Vec::<String>::new());
    fs::remove_dir(job.path("top")).unwrap();
    fs::rename(job.path("top.old"), job.path("top")).unwrap();
    // Also what a first try has put beside is no obstacle for the next.
    let report = job.succeeds(server, &job.home(&directories));
    let read = |name: &str| fs::read_to_string(job.path(name)).unwrap();
    assert_eq!(names(&job.path("shared/private")), Vec::<String>::new());
    assert_eq!(read("shared/private.ondeck-4711/key"), "secret\n");
    assert_eq!(read("shared/run1.ondeck-4711/file"), "result\n");
    assert_eq!(read("top/key"), "secret\n");
    assert_eq!(report["beside"].as_array().unwrap().len(), 2, "{report:#}");
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn an_archive_holds_what_its_mode_closes_to_its_owner() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "64MiB", 1);
    make(&job.path("out"));
    let directories = [job.directory("out", "0", "out")];
    job.succeeds("n1", &job.fill(&directories));
    let modes = [0o000, 0o200, 0o300, 0o600];
    for mode in modes {
        job.works(
            "0",
            &format!(
                "mkdir -p d{mode:o}/inner && echo f > d{mode:o}/inner/file && echo f > f{mode:o} && \
                 chmod {mode:o} f{mode:o} d{mode:o}/inner d{mode:o}"
            ),
        );
    }
    job.works("0", "echo precious > result && chmod 300 .");
    let packed = json!({"bring_home": {"directories": directories, "script": null, "pack": "tar"}});
    job.succeeds("n1", &job.request(packed));
    let unpacked = job.path("unpacked");
    fs::create_dir(&unpacked).unwrap();
    let archive = job.path("out/results-4711.tar");
    site.host("ctl")
        .shell(&format!("tar xpf {} -C {}", archive.display(), unpacked.display()))
        .assert_success();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(fs::read_to_string(unpacked.join("result")).unwrap(), "precious\n");
    for root in [&unpacked, &job.shown("0")] {
        for wanted in modes {
            for name in ["d", "f"] {
                assert_eq!(mode(&root.join(format!("{name}{wanted:o}"))), wanted, "{name}{wanted:o}");
            }
            let inner = root.join(format!("d{wanted:o}/inner"));
            assert_eq!(mode(&inner), wanted, "d{wanted:o}/inner");
            assert_eq!(fs::read_to_string(inner.join("file")).unwrap(), "f\n");
        }
    }
    site.destroy("job");
    site.assert_nothing_is_left();
}

/// The shares of a homecoming: each entry of a top level by itself, then everything else.
fn shares(home: &Value, entries: &[(&str, &str)]) -> Vec<Value> {
    let share = |index: usize, entries: &[(&str, &str)], all_but: bool| {
        let mut request = home.clone();
        request["share"] = json!({"index": index, "entries": entries, "all_but": all_but});
        request
    };
    let parts =
        entries.iter().enumerate().map(|(index, entry)| share(index, std::slice::from_ref(entry), false));
    parts.chain([share(entries.len(), entries, true)]).collect()
}

fn what_a_job_made_of_names_and_directories_comes_home_by_several_nodes(case: &Case) {
    const OLD: i64 = 981_173_106;
    let site = site();
    let job = Job::new(&site, case, "job", "64MiB", 1);
    for name in ["one", "two", "outside", "one/part", "two/part", "one/sub", "one/quiet", "two/late"] {
        make(&job.path(name));
    }
    // Names of one file: in two directories of the job, and in and outside of one.
    let linked = ["part/changed", "part/removed", "top", "last"];
    for name in linked {
        put(&job.path("one").join(name), "of before");
        fs::hard_link(job.path("one").join(name), job.path("two").join(name)).unwrap();
    }
    put(&job.path("one/part/outside"), "of before");
    fs::hard_link(job.path("one/part/outside"), job.path("outside/name")).unwrap();
    put(&job.path("one/quiet/file"), "of before");
    let ctl = site.host("ctl");
    let own = ctl.as_user(OWNER, OWNER);
    let text = |name: &str| job.path(name).display().to_string();
    own.ok(&["touch", "-d", "@1000000000", &text("one/quiet"), &text("one/sub")]);
    for xattr in ["user.kept", "user.removed", "user.theirs"] {
        own.ok(&["setfattr", "-n", xattr, "-v", "before", &text("one/sub")]);
    }
    let directories = [job.directory("one", "0", "out"), job.directory("two", "1", "out")];
    job.succeeds("n1", &job.fill(&directories));

    // Written before the RAM disk was shown, by a job that runs already.
    put(&job.path("one/late"), "late");
    fs::hard_link(job.path("one/late"), job.path("two/late/name")).unwrap();
    let catch_up = job.request(json!({"catch_up": {"directories": directories}}));
    job.succeeds("n1", &catch_up);

    for (slot, name) in [("0", "one"), ("1", "two")] {
        job.works(slot, &format!("for f in part/changed top last; do echo {name} > new && mv new $f; done"));
        job.works(slot, "rm part/removed");
    }
    job.works(
        "0",
        "rm late && echo more >> quiet/file && echo x > part/outside.new && mv part/outside.new part/outside",
    );
    job.works("1", "echo two > late/new && mv late/new late/name");
    job.works("0", "setfattr -n user.overlay.opaque -v y sub && setfattr -n user.added -v after sub");
    job.works(
        "0",
        "setfattr -x user.removed sub && echo x > sub/file && setfattr -n user.overlay.foo -v f sub/file",
    );
    job.works("0", &format!("chmod 750 sub && touch -d @{OLD} sub"));
    job.works("1", &format!("touch -d @{OLD} ."));
    own.ok(&["setfattr", "-n", "user.theirs", "-v", "after", &text("one/sub")]);
    fs::remove_file(job.path("outside/name")).unwrap();

    let entries = [
        ("0", "part"),
        ("1", "part"),
        ("0", "late"),
        ("1", "late"),
        ("0", "top"),
        ("1", "top"),
        ("0", "sub"),
    ];
    let other_node = case.servers.last().unwrap();
    for (index, share) in shares(&job.home(&directories), &entries).iter().enumerate() {
        let report = job.succeeds(if index % 2 == 0 { "n1" } else { other_node }, share);
        assert_eq!(report["beside"], json!([]), "{report:#}");
        assert_eq!(report["state"]["done"]["message"], Value::Null, "{report:#}");
    }

    let read = |name: &str| fs::read_to_string(job.path(name)).unwrap();
    for name in ["one", "two"] {
        for file in ["part/changed", "top", "last"] {
            assert_eq!(read(&format!("{name}/{file}")), format!("{name}\n"), "{name}/{file}");
        }
        assert!(!job.path(name).join("part/removed").exists());
    }
    assert_eq!(read("one/part/outside"), "x\n");
    assert!(!job.path("one/late").exists() && read("two/late/name") == "two\n");
    assert_eq!(read("one/quiet/file"), "of beforemore\n");

    let meta = |name: &str| fs::metadata(job.path(name)).unwrap();
    assert_eq!((meta("one/sub").mtime(), meta("two").mtime()), (OLD, OLD));
    assert_eq!(meta("one/quiet").mtime(), 1_000_000_000);
    assert_eq!(meta("one/sub").mode() & 0o7777, 0o750);
    let xattr = |name: &str, xattr: &str| {
        let ran = own.run(&["getfattr", "--absolute-names", "--only-values", "-n", xattr, &text(name)]);
        ran.status.success().then_some(ran.stdout)
    };
    for (name, value) in [
        ("user.kept", Some("before")),
        ("user.removed", None),
        ("user.theirs", Some("after")),
        ("user.added", Some("after")),
        ("user.overlay.opaque", Some("y")),
    ] {
        assert_eq!(xattr("one/sub", name).as_deref(), value, "{name}");
    }
    assert_eq!(xattr("one/sub/file", "user.overlay.foo").as_deref(), Some("f"));
    site.destroy("job");
    site.assert_nothing_is_left();
}

fn a_script_unpacks_and_packs_and_what_it_leaves_behind_ends(case: &Case) {
    let site = site();
    let job = Job::new(&site, case, "job", "64MiB", 1);
    make(&job.path("in"));
    make(&job.path("out"));
    job.site
        .host("ctl")
        .as_user(OWNER, OWNER)
        .shell(&format!(
            "cd {} && mkdir t && seq 5000 > t/numbers && tar cf in/input.tar -C t . && rm -r t",
            job.dir.display()
        ))
        .assert_success();
    let both = [job.directory("in", "0", "in"), job.directory("out", "1", "out")];
    let with = |kind: &str, text: &str| {
        let script = job.script("script", text);
        match kind {
            "fill" => job.request(json!({"fill": {"directories": both, "script": script}})),
            _ => job.request(json!({"bring_home": {"directories": both, "script": script, "pack": null}})),
        }
    };
    let unpack = "tar xf $2/input.tar -C $1; env | sort; id -u; pwd; umask; (setsid sleep 4711 > /dev/null 2>&1 &); \
                  exec 1>&2; echo told";
    let report = job.succeeds("n1", &with("fill", unpack));
    let log = report["log"].as_str().unwrap();
    let lines: Vec<&str> = log.lines().collect();
    let ram = "/run/ondeck/ramdisk/0";
    let (input, output) = (job.path("in").display().to_string(), job.path("out").display().to_string());
    let wanted = [
        format!("HOME=/home/user{OWNER}"),
        format!("LOGNAME=user{OWNER}"),
        "PATH=/usr/local/bin:/usr/bin:/bin".into(),
        format!("PWD={}", job.dir.display()),
        format!("RSA_DATA_IN={input}"),
        format!("RSA_DATA_OUT={output}"),
        "RSA_JOB_ID=4711".into(),
        format!("RSA_RAMDISK={ram}"),
        format!("USER=user{OWNER}"),
        OWNER.to_string(),
        job.dir.display().to_string(),
        "0022".into(),
        "told".into(),
    ];
    let found: Vec<&str> = lines
        .iter()
        .copied()
        .filter(|line| {
            !["SHLVL", "_="].iter().any(|own| line.starts_with(own)) && !line.starts_with("OLDPWD")
        })
        .collect();
    assert_eq!(found, wanted, "{log}");
    assert_eq!(fs::read_to_string(job.shown("0/numbers")).unwrap().lines().count(), 5000);
    assert!(!job.shown("0/input.tar").exists());

    job.works("1", "mkdir d && cp ../0/numbers d/result");
    job.succeeds("n1", &with("home", "tar cf $2/all.tar -C $1 d"));
    assert_eq!(names(&job.path("out")), ["all.tar"]);
    let listed = site.host("ctl").ok(&["tar", "tf", &job.path("out/all.tar").display().to_string()]);
    assert_eq!(listed, "d/\nd/result\n");
    // Without a script, packed.
    let packed = job.request(json!({"bring_home": {"directories": both, "script": null, "pack": "tar.zst"}}));
    job.succeeds("n1", &packed);
    assert_eq!(names(&job.path("out")), ["all.tar", "results-4711.tar.zst"]);
    // Nobody knows the user's umask here.
    let archive = fs::metadata(job.path("out/results-4711.tar.zst")).unwrap();
    assert_eq!((archive.mode() & 0o7777, archive.uid()), (0o600, OWNER));

    let name = job.path("script").display().to_string();
    let report = job.fails("n1", &with("fill", "echo before; exit 3"), false, &[&name, "exit code 3"]);
    assert_eq!(report["log"], "before\n");
    job.fails("n1", &with("fill", "kill -TERM $$"), false, &[&name, "signal 15"]);
    let mut late = with("fill", "sleep 4711 & sleep 4711");
    late["deadline_ms"] = json!(1500);
    let began = Instant::now();
    job.fails("n1", &late, true, &[&name, "did not end within 1.50 s"]);
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let closed = with("fill", "true");
    give(&job.path("script"), 0o644);
    job.fails("n1", &closed, false, &[&name, "chmod +x"]);
    // What it prints is not kept without end, and it can't take all memory.
    let report = job.succeeds("n1", &with("fill", "seq 1000000; tar xf $2/input.tar -C $1"));
    let log = report["log"].as_str().unwrap();
    assert!(log.len() <= 4096 && log.ends_with("999999\n1000000\n"), "{log}");
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn a_script_gets_no_more_memory_than_it_may_take() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = site_with("script_memory = \"64MiB\"");
    let job = Job::new(&site, &GLUSTER, "job", "64MiB", 0);
    make(&job.path("in"));
    let with = |text: &str| {
        let script = job.script("script", text);
        job.request(json!({"fill": {"directories": [job.directory("in", "0", "in")], "script": script}}))
    };
    job.succeeds("n1", &with("head -c 8000000 /dev/zero | tail -c 8000000 | wc -c"));
    let report =
        job.run("n1", &with("head -c 300000000 /dev/zero | tail -c 300000000 | wc -c | grep 300000000"));
    assert_eq!(report["state"]["done"]["ok"], false, "{report:#}");
    site.destroy("job");
    site.assert_nothing_is_left();
}

/// The memory groups of the scripts of a node's agent.
fn groups(site: &Site, node: &str) -> Vec<PathBuf> {
    let state = site.host(node).path_from_outside(format!("{}-{node}", site::STATE));
    let state = fs::metadata(state).unwrap();
    let beginning = format!("ondeck-task-{:x}-{:x}-", state.dev(), state.ino());
    let (mut found, mut left) = (Vec::new(), vec![PathBuf::from("/sys/fs/cgroup")]);
    while let Some(dir) = left.pop() {
        // One that has ended meanwhile has no entries.
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&beginning) {
                found.push(entry.path());
            } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(entry.path());
            }
        }
    }
    found
}

#[test]
fn a_user_gets_nothing_of_a_task_but_what_its_script_has() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "16MiB", 1);
    make(&job.path("in"));
    (0..50).for_each(|number| put(&job.path(&format!("in/{number}")), "content"));
    let loot = site.bed.dir().join("loot");
    let mut thief = site.host("n1").as_user(OWNER, OWNER).command(&site.probe);
    thief.arg("steal");
    let thief = site.host("n1").spawn_daemon(thief, &loot).unwrap();

    let script = job.script("script", "exec sleep 0.05");
    let directories = [job.directory("in", "0", "in out")];
    let scripted = job.request(json!({"fill": {"directories": directories, "script": script}}));
    for _ in 0..10 {
        job.succeeds("n1", &scripted);
        job.succeeds("n1", &job.fill(&directories));
        job.succeeds("n1", &job.home(&directories));
    }
    assert!(thief.is_running(), "{}", thief.log());
    drop(thief);
    let loot = fs::read_to_string(&loot).unwrap();
    assert!(loot.contains("sleep"), "nothing was tried: {loot}");
    // What a program opens while it is loaded included.
    let may_have = ["/dev/null ", "pipe:[", "/etc/ld.so.cache ", "/lib/", "/usr/lib/"];
    let script = format!("{} ", script.display());
    for line in loot.lines() {
        let is_its = may_have.iter().any(|may| line.starts_with(may)) || line.starts_with(&script);
        assert!(is_its && !line.contains("task-runner"), "stolen: {line}\n{loot}");
    }
    assert!(groups(&site, "n1").is_empty());
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn no_memory_group_is_left_of_a_task_that_was_killed() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "16MiB", 1);
    make(&job.path("in"));
    let script = job.script("script", "exec sleep 4711");
    let work = json!({"fill": {"directories": [job.directory("in", "0", "in")], "script": script}});
    let request = job.request(work);
    let begin = |task: &str| {
        job.start("n1", task, &request);
        wait_until(DEADLINE, "the script is in its group", || {
            let members =
                groups(&site, "n1").pop().map(|group| fs::read_to_string(group.join("cgroup.procs")));
            members.is_some_and(|members| members.is_ok_and(|members| !members.is_empty()))
        });
        // The runner is older than what it has started.
        runners(&site, "n1").into_iter().min_by_key(|process| process.pid.as_raw_nonzero()).unwrap()
    };
    let is_gone = || groups(&site, "n1").is_empty() && runners(&site, "n1").is_empty();

    site::signal(&begin("first"), ondeck_testbed::Signal::KILL);
    wait_until(DEADLINE, "the agent has removed the group", is_gone);

    let runner = begin("second");
    site::signal(&runner, ondeck_testbed::Signal::STOP);
    site.kill_agent("n1");
    wait_until(DEADLINE, "the script has ended with its agent", || runners(&site, "n1").len() == 1);
    site::signal(&runner, ondeck_testbed::Signal::KILL);
    wait_until(DEADLINE, "the runner has ended", || runners(&site, "n1").is_empty());
    assert_eq!(groups(&site, "n1").len(), 1);
    site.start_agent("n1");
    wait_until(DEADLINE, "the next agent has removed the group", is_gone);
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn no_script_has_what_the_agent_was_started_with() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    site.kill_agent("n1");
    let secret = site.bed.dir().join("secret");
    fs::write(&secret, "root's").unwrap();
    site.start_agent_after("n1", &format!("exec 3< {0} 7< {0}", secret.display()));
    let job = Job::new(&site, &TMPFS, "job", "16MiB", 1);
    make(&job.path("in"));
    let script = job.script("script", "ls -l /proc/$$/fd/");
    let work = json!({"fill": {"directories": [job.directory("in", "0", "in")], "script": script}});
    let report = job.succeeds("n1", &job.request(work));
    let log = report["log"].as_str().unwrap();
    assert!(log.contains(" 2 -> pipe:") && !log.contains("secret"), "{log}");
    let agent = fs::read_dir(format!("/proc/{}/fd", site.agent_pid("n1"))).unwrap();
    let has = |path: PathBuf| fs::read_link(path).is_ok_and(|target| target == secret);
    assert!(!agent.flatten().any(|entry| has(entry.path())));
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn results_come_home_though_the_client_there_died() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &GLUSTER, "job", "64MiB", 1);
    make(&job.path("out"));
    put(&job.path("out/before"), "of before");
    let directories = [job.directory("out", "0", "out")];
    job.succeeds("n1", &job.fill(&directories));
    job.works("0", "seq 10000 > result; rm before");
    let kill = |node: &str| {
        let clients = site.processes(node, "glusterfs");
        assert!(!clients.is_empty());
        clients.iter().for_each(|client| site::signal(client, ondeck_testbed::Signal::KILL));
        wait_until(DEADLINE, "the client is gone", || site.processes(node, "glusterfs").is_empty());
    };
    kill("n1");
    job.succeeds("n1", &job.home(&directories));
    assert_eq!(names(&job.path("out")), ["result"]);
    // Once its agent has seen it, and has cut it off.
    kill("n1");
    job.works("0", "seq 20000 > more");
    wait_until(DEADLINE, "the agent has cut it off", || {
        let (status, witness) = job.ask("n1", "GET", "witness", None);
        assert_eq!(status, 200, "{witness}");
        witness["faults"].to_string().contains("process ended")
    });
    job.succeeds("n1", &job.home(&directories));
    assert_eq!(fs::read_to_string(job.path("out/more")).unwrap().lines().count(), 20_000);
    let (_, witness) = job.ask("n1", "GET", "witness", None);
    assert_eq!(witness["faults"], json!([]));
    // With a server lost there is nothing to mount: the task fails, and may be tried again.
    for server in site.processes("n2", "glusterfsd") {
        site::signal(&server, ondeck_testbed::Signal::KILL);
    }
    kill("n1");
    job.fails("n1", &job.home(&directories), true, &["n1", "the server on n2 does not answer"]);
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn a_client_that_is_being_mounted_is_not_taken_for_one_that_has_lost_a_server() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &GLUSTER, "job", "64MiB", 1);
    make(&job.path("in"));
    put(&job.path("in/file"), "content");
    assert_eq!(site.processes("n1", "glusterfs"), [], "the task mounts it");
    site.host("n2").cut();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let n1 = site.host("n1");
            let mounted = || n1.mounts().iter().any(|mount| mount.target.ends_with("job/client"));
            wait_until(DEADLINE, "the client of n1 is mounted", mounted);
            // Three looks of the agent, two of which would make a server lost. Nothing is seen of them if all is well.
            let looked = Instant::now() + Duration::from_millis(1600);
            wait_until(DEADLINE, "the agent has looked", || Instant::now() > looked);
            site.host("n2").join();
        });
        job.succeeds("n1", &job.fill(&[job.directory("in", "0", "in")]));
    });
    job.works("0", "test \"$(cat file)\" = content");
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn a_script_can_not_speak_for_the_task() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "16MiB", 1);
    make(&job.path("in"));
    give(&job.path("in"), 0o750);
    // The worker is the first process after the init.
    let script = job.script(
        "script",
        "for what in fd environ mem; do ls /proc/2/$what/ > /dev/null 2>&1 || cat /proc/2/$what > /dev/null 2>&1 \
         || echo shut; done; cat /proc/self/oom_score_adj; tr '\\0' '\\n' < /proc/self/environ | grep -c ONDECK",
    );
    let work = json!({"fill": {"directories": [job.directory("in", "0", "in out")], "script": script}});
    let mut request = job.request(work);
    let report = job.run("n1", &request);
    assert_eq!(report["log"], "shut\nshut\nshut\n500\n0\n", "{report:#}");
    request["work"]["fill"]["script"] = json!(job.script("script", "true"));
    job.succeeds("n1", &request);
    assert_eq!(fs::metadata(job.shown("0")).unwrap().mode() & 0o7777, 0o750);
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn what_a_job_puts_in_the_place_of_our_notes_holds_nothing_up() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "16MiB", 1);
    make(&job.path("out"));
    put(&job.path("out/file"), "content");
    let work = [job.directory("out", "0", "out")];
    job.succeeds("n1", &job.fill(&work));
    let kept = job.view.as_ref().unwrap().outside.join(".ondeck");
    let (note, baseline, ours) = (kept.join("0.json"), kept.join("0.baseline"), kept.join("0.ours"));
    let home = job.home(&work);
    let began = std::time::Instant::now();
    let put_aside = |path: &Path| fs::rename(path, path.with_extension("aside")).unwrap();
    let put_back = |path: &Path| fs::rename(path.with_extension("aside"), path).unwrap();
    for (path, was_there) in [(&baseline, true), (&ours, ours.exists())] {
        if was_there {
            put_aside(path);
        }
        // Nobody writes into it.
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
        job.fails("n1", &home, true, &["no file of ours"]);
        fs::remove_file(path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path).unwrap();
        job.fails("n1", &home, true, &["symbolic links"]);
        fs::remove_file(path).unwrap();
        if was_there {
            put_back(path);
        }
    }
    put_aside(&note);
    fs::File::create(&note).unwrap().set_len(1 << 20).unwrap();
    job.fails("n1", &home, true, &["too long"]);
    put_back(&note);
    assert!(began.elapsed() < DEADLINE, "{:?}", began.elapsed());
    job.succeeds("n1", &home);
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn what_a_script_leaves_where_all_may_write_goes_with_it() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "16MiB", 1);
    make(&job.path("in"));
    put(&job.path("in/file"), "content");
    let places = ["/dev/shm", "/tmp", "/var/tmp"];
    let name = job.dir.parent().unwrap().file_name().unwrap().to_str().unwrap();
    let left = places.map(|place| format!("{place}/left-by-{name}"));
    let with = |path: &str, text: &str| {
        let script = job.script("script", text);
        job.request(json!({"fill": {"directories": [job.directory(path, "0", "in")], "script": script}}))
    };
    let text =
        format!("set -e; for f in {}; do echo rubbish > $f; cat $f; done; cp $2/file $1", left.join(" "));
    let report = job.succeeds("n1", &with("in", &text));
    assert_eq!(report["log"], "rubbish\n".repeat(3));
    for path in &left {
        assert!(!site.host("n1").run(&["test", "-e", path]).status.success(), "{path}");
    }
    // The job's own directory lies in one of them, and nothing else of that is seen.
    assert_eq!(names(&job.shown("0")), ["file"]);
    let report = job.succeeds("n1", &with("in", "ls -A /tmp; ls -A /dev/shm"));
    assert_eq!(report["log"], format!("{name}\n"));
    job.fails("n1", &with("/dev/shm/results", "true"), false, &["/dev/shm/results", "of their own"]);
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn what_the_user_may_not_do_is_refused_and_named() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "16MiB", 1);
    make(&job.path("in"));
    put(&job.path("in/file"), "content");
    let fill = |path: &str, kind: &str| job.fill(&[job.directory(path, "0", kind)]);
    job.fails("n1", &fill("nowhere", "in"), false, &["nowhere", "No such file", "#RSA_DATA_IN"]);
    fs::create_dir(job.path("closed")).unwrap();
    fs::set_permissions(job.path("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    job.fails("n1", &fill("closed", "in"), false, &["closed", "Permission denied", "user20001"]);
    fs::set_permissions(job.path("closed"), fs::Permissions::from_mode(0o755)).unwrap();
    job.fails("n1", &fill("closed", "out"), false, &["closed", "can't write there", "#RSA_DATA_OUT"]);
    job.fails("n1", &fill("closed/new", "out"), false, &["closed/new", "can't be made"]);
    fs::write(job.path("in/secret"), "of root").unwrap();
    fs::set_permissions(job.path("in/secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let report = job.fails("n1", &fill("in", "in"), false, &["in/secret", "Permission denied"]);
    assert_eq!(report["errors"].as_array().unwrap().len(), 1);
    fs::remove_file(job.path("in/secret")).unwrap();
    // What does not fit.
    write_pattern(&job.path("in/large"), 40 << 20, 1);
    give(&job.path("in/large"), 0o644);
    job.fails("n1", &fill("in", "in"), false, &["16 MiB is too small", "hold 40 MiB", "#RSA_CAPACITY"]);
    fs::remove_file(job.path("in/large")).unwrap();
    job.succeeds("n1", &fill("in", "in"));
    assert_eq!(names(&job.shown("0")), ["file"]);

    // Requests that no agent takes.
    let good = fill("in", "in");
    let change = |field: &str, value: Value| {
        let mut bad = good.clone();
        bad[field] = value;
        bad
    };
    for (bad, wanted) in [
        (change("uid", json!(STRANGER)), 403),
        (change("job", json!("../x")), 400),
        (
            change(
                "work",
                json!({"fill": {"directories": [job.directory("in", "../1", "in")], "script": null}}),
            ),
            400,
        ),
        (
            change(
                "work",
                json!({"fill": {"directories": [job.directory("in", ".ondeck", "in")], "script": null}}),
            ),
            400,
        ),
        (change("work", json!({"fill": {"directories": [], "script": "/bin/true"}})), 400),
        (change("work", json!("rest")), 400),
    ] {
        let (status, said) = job.ask("n1", "POST", "tasks/bad", Some(&bad));
        assert_eq!(status, wanted, "{bad}: {said}");
    }
    for (method, path, wanted) in [
        ("POST", "tasks/..", 400),
        ("GET", "tasks/none", 404),
        ("DELETE", "tasks/none", 404),
        ("GET", "tasks/none?wait=long", 404),
    ] {
        let (status, said) = job.ask("n1", method, path, Some(&good));
        assert_eq!(status, wanted, "{method} {path}: {said}");
    }
    // The owner may ask whether it is whole, and no more.
    let owner = site.host("ctl").as_user(OWNER, OWNER);
    let ask = |host: &Host, method: &str, path: &str| {
        call(&site, host, "n1", method, &format!("/v1/ramdisks/{}/{path}", job.id), &[])
    };
    let (status, witness) = ask(&owner, "GET", "witness");
    assert_eq!(status, 200, "{witness}");
    assert_eq!(serde_json::from_str::<Value>(&witness).unwrap()["faults"], json!([]));
    let stranger = site.host("ctl").as_user(STRANGER, STRANGER);
    assert_eq!(ask(&stranger, "GET", "witness").0, 404);
    for method in ["GET", "POST", "DELETE"] {
        assert_eq!(ask(&owner, method, "tasks/work").0, 403);
    }
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn a_full_disk_keeps_results_waiting_until_there_is_room() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &GLUSTER, "job", "96MiB", 1);
    make(&job.path("out"));
    let out = job.path("out").display().to_string();
    // A small disk that two nodes see.
    let image = site.bed.dir().join("small.img");
    fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
    site.host("ctl").ok(&["mkfs.ext4", "-q", "-m", "0", &image.display().to_string()]);
    site.host("n1").ok(&["mount", "-o", "loop", &image.display().to_string(), &out]);
    let disk = site.host("n1").path_from_outside(&out);
    fs::remove_dir(disk.join("lost+found")).unwrap();
    give(&disk, 0o755);
    write_pattern(&disk.join("ballast"), 8 << 20, 1);
    give(&disk.join("ballast"), 0o644);
    let directories = [job.directory("out", "0", "out")];
    job.succeeds("n1", &job.fill(&directories));
    job.works("0", "mkdir new && for i in $(seq 1 80); do head -c 250000 /dev/urandom > new/$i; done");
    job.works("0", "ln new/1 new/hard; ln -s 1 new/soft; cp new/2 top; rm ballast");
    let home = job.home(&directories);
    // The ballast is the job's to delete, but what is on disk goes last.
    write_pattern(&disk.join("foreign"), 6 << 20, 1);
    let words = [out.as_str(), "no room left", "ondeck job retry 4711"];
    let report = job.fails("n1", &home, true, &words);
    assert!(!report["errors"].as_array().unwrap().is_empty(), "{report:#}");
    job.fails("n1", &home, true, &words);
    fs::remove_file(disk.join("foreign")).unwrap();
    let _ = fs::remove_file(disk.join("ballast"));
    let report = job.succeeds("n1", &home);
    assert_eq!(report["beside"], json!([]));
    let (wanted, found) = (names(&job.shown("0")), names(&disk));
    assert_eq!(wanted, found);
    for name in wanted.iter().filter(|name| job.shown("0").join(name).is_file()) {
        let same = fs::read(job.shown("0").join(name)).unwrap() == fs::read(disk.join(name)).unwrap();
        assert!(same, "{name}");
    }
    let before = tree(&disk, true);
    job.succeeds("n1", &home);
    assert_eq!(tree(&disk, true), before);
    site.host("n1").ok(&["umount", &out]);
    site.destroy("job");
    site.assert_nothing_is_left();
}

fn a_task_that_is_stopped_leaves_no_process_and_can_be_started_again(case: &Case) {
    let site = site();
    let job = Job::new(&site, case, "job", "128MiB", 1);
    make(&job.path("in"));
    for name in ["a", "b", "c", "d"] {
        write_pattern(&job.path("in").join(name), 12 << 20, 9);
        give(&job.path("in").join(name), 0o644);
    }
    let quick = job.fill(&[job.directory("in", "0", "in out")]);
    let mut slow = quick.clone();
    slow["bandwidth"] = json!(4 << 20);
    let under_way = |name: &str| {
        job.start("n1", name, &slow);
        wait_until(DEADLINE, "some bytes were copied", || {
            let report = job.report("n1", name, 0);
            assert_eq!(report["state"], "running", "{report}");
            report["bytes_done"].as_u64().unwrap() > 1 << 20
        });
        assert_eq!(runners(&site, "n1").len(), 3);
    };
    // Stopped.
    under_way("first");
    // Once more the same: it is there.
    assert!(job.start("n1", "first", &quick)["bytes_done"].as_u64().unwrap() > 0);
    let (status, report) = job.ask("n1", "DELETE", "tasks/first", None);
    assert_eq!((status, report["state"]["done"]["ok"].clone()), (200, json!(false)), "{report}");
    assert_eq!(runners(&site, "n1"), []);
    assert_eq!(job.ask("n1", "GET", "tasks/first", None).0, 404);

    // The agent is killed.
    under_way("second");
    site.kill_agent("n1");
    wait_until(Duration::from_secs(3), "nothing is left of the task", || runners(&site, "n1").is_empty());
    site.start_agent("n1");
    assert_eq!(job.ask("n1", "GET", "tasks/second", None).0, 404);
    // So is the runner: its init does not outlive it.
    under_way("third");
    let oldest = runners(&site, "n1").into_iter().min_by_key(|process| process.pid.as_raw_nonzero()).unwrap();
    site::signal(&oldest, ondeck_testbed::Signal::KILL);
    let report = job.report("n1", "third", 10_000);
    assert_eq!(report["state"]["done"]["ok"], false, "{report}");
    wait_until(Duration::from_secs(3), "nothing is left of the task", || runners(&site, "n1").is_empty());

    job.succeeds("n1", &quick);
    assert_eq!(names(&job.shown("0")), ["a", "b", "c", "d"]);
    for name in ["a", "b", "c", "d"] {
        assert_eq!(difference(&job.shown("0").join(name), 12 << 20, 9), None);
    }
    // And on the way home, within a new directory and a large file.
    job.works("0", "mkdir -p x/y && for i in a b c d; do mv $i x/y/; done; echo e > x/e");
    let home = job.home(&[job.directory("in", "0", "in out")]);
    let mut slow = home.clone();
    slow["bandwidth"] = json!(4 << 20);
    for (name, limit) in [("home-1", 1 << 20), ("home-2", 5 << 20)] {
        job.start("n1", name, &slow);
        wait_until(DEADLINE, "some bytes were copied", || {
            job.report("n1", name, 0)["bytes_done"].as_u64().unwrap() > limit
        });
        assert_eq!(job.ask("n1", "DELETE", &format!("tasks/{name}"), None).0, 200);
    }
    let report = job.succeeds("n1", &home);
    assert_eq!(report["beside"], json!([]));
    assert_eq!(names(&job.path("in")), ["x", "x/e", "x/y", "x/y/a", "x/y/b", "x/y/c", "x/y/d"]);
    for name in ["a", "b", "c", "d"] {
        assert_eq!(difference(&job.path("in/x/y").join(name), 12 << 20, 9), None);
    }

    // Destroyed, with a task in it.
    let mut slow = job.fill(&[job.directory("in", "1", "in")]);
    slow["bandwidth"] = json!(4 << 20);
    job.start("n1", "last", &slow);
    assert_eq!(job.report("n1", "last", 300)["state"], "running");
    let began = Instant::now();
    site.destroy("job");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    site.assert_nothing_is_left();
}

#[test]
fn filesystems_of_another_user_that_never_answer_hold_up_no_task() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "32MiB", 1);
    make(&job.path("in"));
    let above = site.bed.dir().join("theirs");
    let inside = above.join("in");
    fs::create_dir_all(&inside).unwrap();
    // Named as a RAM disk's, below one that hangs whoever walks through it.
    let named = mute(&site, "n1", &inside, 20_777, &["--source", "ondeck:theirs@1"]);
    let hangs = mute(&site, "n1", &above, 20_777, &["--allow-other"]);
    let began = Instant::now();
    let work = json!({"fill": {"directories": [job.directory("in", "0", "in")], "script": null}});
    job.succeeds("n1", &job.request(work));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    unmute(&site, "n1", &above, hangs);
    unmute(&site, "n1", &inside, named);
    site.destroy("job");
    site.assert_nothing_is_left();
}

fn a_task_sees_no_other_ramdisk(case: &Case) {
    let site = site();
    let other = site.build(case, "other", "32MiB", case.views.len());
    let theirs = &other[0];
    theirs
        .host
        .as_user(OWNER, OWNER)
        .shell(&format!("echo treasure > {}/of-the-other", theirs.text()))
        .assert_success();
    let job = Job::new(&site, case, "job", "32MiB", 1);
    make(&job.path("in"));
    let places = site.runtime_dirs("n1").parent().unwrap().parent().unwrap().to_owned();
    assert!(places.exists());
    // Even where the same user owns both. Programs of the machine, half a million files on some, are left out.
    let shown: Vec<String> = other.iter().map(View::text).collect();
    let text = format!(
        "ls -A {}; ls -A {}-n1 2>&1; \
         find / -xdev \\( -path /usr -o -path /root \\) -prune -o -name of-the-other -print 2>/dev/null; \
         find /run -name of-the-other 2>/dev/null; \
         grep -c ondeck: /proc/self/mounts; ls /proc | grep -c '^[0-9]'; echo end",
        shown.join(" "),
        site::STATE
    );
    let script = job.script("script", &text);
    let work = json!({"fill": {"directories": [job.directory("in", "0", "in")], "script": script}});
    let report = job.succeeds("n1", &job.request(work));
    let log = report["log"].as_str().unwrap();
    assert!(log.contains("Permission denied") && log.contains("end"), "{log}");
    assert!(!log.contains("of-the-other\n"), "{log}");
    // The place of another RAM disk is not even mounted for root there; this is the only one.
    let numbers: Vec<u32> = log.lines().filter_map(|line| line.parse().ok()).collect();
    assert!(numbers[0] <= 1 && numbers[1] < 10, "{log}");
    site.destroy("job");
    site.destroy("other");
    site.assert_nothing_is_left();
}
