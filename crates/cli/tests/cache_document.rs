//! The blocks of docs/cache.md, typed as they stand there; what is said there is compared with what is said.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use cached::sh;
use scene::{Scene, Who, is_root, wait_until};

/// A command of the document, and what it says there.
type Typed = (String, String);

/// The block that has this line.
fn block(line: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cache.md");
    let page = fs::read_to_string(page).unwrap();
    let mut blocks = page.split("```").skip(1).step_by(2);
    let found = blocks.find(|block| block.lines().any(|of| of.starts_with(line)));
    found.unwrap_or_else(|| panic!("no block of docs/cache.md has {line}")).to_owned()
}

fn commands(block: &str) -> Vec<Typed> {
    let mut commands: Vec<Typed> = Vec::new();
    for line in block.trim().lines() {
        match (line.strip_prefix("# "), commands.last_mut()) {
            (Some(command), _) => {
                // What is said beside it.
                let command = command.split("   #").next().unwrap().trim_end();
                commands.push((command.to_owned(), String::new()));
            }
            (None, Some((_, told))) => *told += &format!("{line}\n"),
            (None, None) => panic!("a block begins with {line}"),
        }
    }
    commands
}

/// A text without what differs from one time to the next: numbers with their units, and how lines are broken.
fn plain(text: &str) -> String {
    let mut out: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let shown: String = word.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        let is_number = shown.trim_matches(|c: char| "0.,(".contains(c)).is_empty() && shown.contains('0');
        let unit = ["B", "KiB", "MiB", "GiB"].contains(&word.trim_end_matches([',', ';']));
        match out.last_mut() {
            Some(last) if unit && last.ends_with('N') => {
                *last += &word[word.trim_end_matches([',', ';']).len()..];
            }
            _ if is_number => out.push("N".to_owned()),
            // The name of a cache's directory.
            _ => out.push(
                shown
                    .split('/')
                    .map(|part| if is_name(part) { "ID" } else { part })
                    .collect::<Vec<_>>()
                    .join("/"),
            ),
        }
    }
    out.join(" ")
}

fn is_name(part: &str) -> bool {
    part.len() == 16 && part.chars().all(|c| c.is_ascii_hexdigit())
}

/// A scene in which the document's paths are.
struct Site(Scene);

impl Site {
    fn new() -> Option<Site> {
        if !is_root() || !Path::new("/dev/fuse").exists() {
            ondeck_skip::skipped("it needs root and /dev/fuse");
            return None;
        }
        let scene = Scene::new(Who::Me);
        for name in ["project", "fast", "case"] {
            scene.dir(name);
        }
        Some(Site(scene))
    }

    /// The document's words, for this place.
    fn here(&self, text: &str) -> String {
        let dir = self.0.dir.path().to_str().unwrap();
        text.replace("/shared/project", &format!("{dir}/project"))
            .replace("/mnt/fast", &format!("{dir}/fast"))
            .replace("~alice/case", &format!("{dir}/case"))
            .replace("--user alice", "--user nobody")
            .replace("8GiB", "64MiB")
            .replace("/run/ondeck/cache", &format!("{dir}/state/cache"))
    }

    /// Types a block, and compares.
    fn types(&self, line: &str) {
        let commands = commands(&block(line));
        let mut script = String::new();
        for (command, _) in &commands {
            script += &format!("{command}\nstatus=$?; printf '\\001'; (exit $status)\n");
        }
        let output = self.shell(&self.here(&script));
        let told: Vec<&str> = output.split('\u{1}').collect();
        assert_eq!(told.len(), commands.len() + 1, "{output}");
        for ((command, expected), told) in commands.iter().zip(told) {
            // What make says is make's.
            if !command.starts_with("make ") {
                assert_eq!(plain(told), plain(&self.here(expected)), "# {command}\n{told}");
            }
        }
    }

    fn shell(&self, script: &str) -> String {
        let dir = self.0.dir.path();
        let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec 2>&1\n{script}")]).current_dir(dir).stdin(Stdio::null());
        shell.env("PATH", path).env("ONDECK_STATE_DIR", self.0.path("state")).env("LC_ALL", "C");
        String::from_utf8(shell.output().unwrap().stdout).unwrap()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for at in ["fast", "case"] {
            let lose = self.0.ondeck(&["cache", "unmount", "--force-lose", "--yes", at]).output();
            drop(lose);
        }
    }
}

#[test]
fn the_quick_start_does_what_it_says() {
    let Some(site) = Site::new() else { return };
    site.0.file("project/Makefile", "all:\n\thead -c 589824 /dev/zero > all\n");
    site.types("# ondeck cache mount --backing /shared/project");
    assert_eq!(fs::metadata(site.0.path("project/all")).unwrap().len(), 589_824);
    site.types("# ondeck cache mount --backing ~alice/case");
}

#[test]
fn a_dead_server_and_a_cache_in_use_say_what_the_document_says() {
    let Some(site) = Site::new() else { return };
    site.shell(&site.here(
        "ondeck cache mount --backing /shared/project --capacity 8GiB /mnt/fast; echo 1 > /mnt/fast/file",
    ));
    // It is the metrics' dirty file, too.
    let metrics = site.shell(&site.here("ondeck cache status --metrics /mnt/fast"));
    for line in block("# HELP ondeck_cache_dirty_bytes").trim().lines() {
        let line = plain(&site.here(line));
        assert!(metrics.lines().any(|told| plain(told) == line), "{line} is not in {metrics}");
    }
    // The document has two blocks that begin with this command.
    let in_use = commands(&block("  process 16461"));
    let script = format!("sleep 60 > /dev/null 2>&1 < /mnt/fast/file & cd /; {}; kill $!; wait", in_use[0].0);
    // A file is held here, and a directory there.
    let told = plain(&site.shell(&site.here(&script)));
    let expected = plain(&site.here(&in_use[0].1));
    let (first, _) = expected.split_once(" process ").unwrap();
    assert!(told.starts_with(first) && told.contains("(sleep) holds"), "{told}\n{expected}");

    let status = site.0.ondeck(&["cache", "status", "--json", "fast"]).output().unwrap().stdout;
    let status: serde_json::Value = serde_json::from_slice(&status).unwrap();
    let server = status[0]["server"].as_i64().unwrap();
    let pid = rustix::process::Pid::from_raw(server as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    wait_until("the server is gone", || !Path::new(&format!("/proc/{server}")).exists());
    site.types("# ls /mnt/fast");
    let told = site
        .shell(&site.here("ondeck cache mount --backing /shared/project --capacity 8GiB /mnt/fast; echo $?"));
    assert_eq!(told, site.here("ondeck cache: recovered the cache that was at /mnt/fast\n0\n"));
}

#[test]
fn a_full_disk_says_what_the_document_says() {
    let Some(site) = Site::new() else { return };
    let small = scene::Mounted::tmpfs(&site.0.path("project"), "size=1m");
    fs::create_dir(site.0.path("project/results")).unwrap();
    site.shell(&site.here(
        "ondeck cache mount --backing /shared/project --capacity 8GiB /mnt/fast
         head -c 3000000 /dev/zero > /mnt/fast/results/big",
    ));
    site.types("# echo $?");
    small.remount(false, "size=10m");
    let told = site.shell(&site.here("ondeck cache unmount /mnt/fast; echo $?"));
    assert_eq!(told, "0\n");
    assert_eq!(sh(&site.0.path("project"), "stat -c %s results/big"), "3000000\n");
}
