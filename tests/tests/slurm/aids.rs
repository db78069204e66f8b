//! What the scenarios of failure have in common.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ondeck_testbed::{Host, Signal, User, wait_until};

use crate::cluster::{Cluster, DEADLINE};

/// So slow that something can happen while a few megabytes are copied.
pub const SLOW: &str = "bandwidth = \"4MiB/s\"\nstaging = 1";

/// For one job that goes through several waits of the daemon's own, on a machine that is out of breath.
pub const LONG: Duration = Duration::from_secs(100);

/// Bytes that are never the same in two files.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Some files, by name.
pub fn files(count: u64, length: usize) -> BTreeMap<String, Vec<u8>> {
    (0..count).map(|number| (format!("part-{number}"), noise(number + 1, length))).collect()
}

/// A directory of a user's in `scratch` with these files.
pub fn folder(user: &User, name: &str, files: &BTreeMap<String, Vec<u8>>) -> PathBuf {
    let dir = user.scratch.join(name);
    make(user, &dir, files);
    dir
}

/// A directory of a user's with these files.
pub fn make(user: &User, dir: &Path, files: &BTreeMap<String, Vec<u8>>) {
    fs::create_dir(dir).unwrap();
    chown(dir, Some(user.uid), Some(user.gid)).unwrap();
    for (name, bytes) in files {
        own_file(user, &dir.join(name), bytes);
    }
}

/// A file of a user's.
pub fn own_file(user: &User, path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    chown(path, Some(user.uid), Some(user.gid)).unwrap();
}

/// An executable of a user's in the home directory.
pub fn program(user: &User, name: &str, text: &str) -> PathBuf {
    let path = user.home.join(name);
    own_file(user, &path, text.as_bytes());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A batch script with directives (without `#RSA_`) and a body. In the body `await NAME` waits for a file of that name
/// in the user's scratch directory, and `tell NAME` makes one.
pub fn script(user: &User, directives: &[String], body: &str) -> String {
    let directives: String = directives.iter().map(|line| format!("#RSA_{line}\n")).collect();
    format!(
        "#!/bin/sh\n{directives}\
         await() {{ until [ -e {scratch}/$1 ]; do sleep 0.05; done; }}\n\
         tell() {{ : > {scratch}/$1; }}\n{body}\n",
        scratch = user.scratch.display()
    )
}

/// The file that a script awaits.
pub fn give(user: &User, name: &str) {
    own_file(user, &user.scratch.join(name), b"");
}

/// Waits until a script has told.
#[track_caller]
pub fn await_file(user: &User, name: &str) {
    let path = user.scratch.join(name);
    wait_until(LONG, &format!("a job makes {name}"), || path.exists());
}

impl Cluster {
    /// Submits alice's job. It is not started again when a node of it is lost.
    #[track_caller]
    pub fn submit(&self, script: &str, nodes: usize) -> u32 {
        let options = [&format!("--nodes={nodes}"), "--exclusive", "--no-requeue", "--output=/dev/null"];
        self.slurm.submit(self.user("alice"), script, &options)
    }

    /// Submits alice's job while all nodes are busy, and lets it start once its RAM disk is ready.
    #[track_caller]
    pub fn start_staged(&self, script: &str, nodes: usize) -> u32 {
        let blocker = self.block(self.slurm.compute().len());
        let job = self.submit(script, nodes);
        self.wait_rsa(job, "READY");
        self.slurm.cancel(blocker);
        // It may have ended between two looks.
        wait_until(DEADLINE, &format!("job {job} has started"), || {
            !matches!(self.slurm.job(job)["JobState"].as_str(), "PENDING" | "CONFIGURING")
        });
        job
    }

    /// The processes on all hosts whose command line has this text.
    pub fn processes(&self, text: &str) -> Vec<String> {
        let all = self.bed.hosts().iter().flat_map(Host::processes);
        all.map(|process| process.command_line.join(" ")).filter(|line| line.contains(text)).collect()
    }

    /// No Prolog or Epilog has failed: Slurm would have drained the node.
    #[track_caller]
    pub fn assert_no_hook_failed(&self) {
        let states = self.slurm.client(&["sinfo", "--noheader", "--Node", "--format=%N %T"]).stdout;
        assert!(!states.contains("drain"), "{states}");
    }

    /// What the job's user is told.
    pub fn note(&self, job: u32) -> String {
        self.story(job)["job"]["message"].as_str().unwrap_or_default().to_owned()
    }

    /// All that was noted of a job.
    pub fn log_of(&self, job: u32) -> String {
        let story = self.story(job);
        let lines =
            story["log"].as_array().unwrap().iter().map(|line| line["text"].as_str().unwrap_or_default());
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Waits until the job's user is told something with this text.
    #[track_caller]
    pub fn wait_note(&self, job: u32, text: &str) {
        let mut last = String::new();
        let start = std::time::Instant::now();
        loop {
            let note = self.note(job);
            if note.contains(text) {
                return;
            }
            if note != last {
                last = note;
            }
            assert!(start.elapsed() < LONG, "job {job} is told `{last}`, not `{text}`: {}", self.show(job));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn show(&self, job: u32) -> String {
        self.ondeck(&["job", "show", &job.to_string()]).stdout
    }

    /// The RSA nodes of a job.
    pub fn rsa_nodes(&self, job: u32) -> Vec<String> {
        let line = self.job(job).unwrap_or_default();
        let nodes = line["rsa_nodes"].as_array().cloned().unwrap_or_default();
        nodes.iter().filter_map(|node| node.as_str().map(str::to_owned)).collect()
    }

    /// An RSA node's line of the status.
    pub fn node(&self, name: &str) -> serde_json::Value {
        let status = self.status();
        status["nodes"].as_array().unwrap().iter().find(|node| node["node"] == name).cloned().unwrap()
    }

    /// Kills everything on a host, its agent included.
    pub fn crash(&self, name: &str) {
        self.host(name).crash();
        self.forget(name);
    }

    /// Has a host that crashed start again, without what was in its memory, and its agent with it.
    pub fn boot(&self, name: &str) {
        self.host(name).reboot();
        self.start_agent(name);
    }

    /// Waits until an RSA node lends everything.
    #[track_caller]
    pub fn wait_lends_all(&self, name: &str) {
        wait_until(LONG, &format!("{name} lends all that it has"), || {
            let node = self.node(name);
            node["state"] == "up" && node["free"] == node["capacity"] && node["free"] != 0
        });
    }

    /// The mounts over a directory, on all hosts.
    pub fn covers_of(&self, path: &Path) -> Vec<String> {
        let hosts = self.bed.hosts().iter();
        hosts
            .flat_map(|host| host.new_mounts().into_iter().map(move |mount| (host.name().to_owned(), mount)))
            .filter(|(_, mount)| mount.target == path)
            .map(|(host, mount)| format!("{host}: {} ({})", mount.source, mount.kind))
            .collect()
    }
}

/// Changes a file of the configuration. Gives what it was.
pub fn change(cluster: &Cluster, file: &str, old: &str, new: &str) -> (PathBuf, String) {
    let path = cluster.bed.dir().join(file);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(old), "no `{old}` in {text}");
    fs::write(&path, text.replace(old, new)).unwrap();
    (path, text)
}

/// Has a daemon read its configuration again, and waits until it has said something new of it: a line with `says`.
#[track_caller]
pub fn reload(cluster: &Cluster, daemon: &str, log: &str, says: &str) {
    let before = cluster.log_text(log).len();
    cluster.signal(daemon, Signal::HUP);
    wait_until(DEADLINE, &format!("{daemon} says `{says}`"), || {
        assert!(cluster.is_running(daemon), "SIGHUP ended {daemon}");
        cluster.log_text(log)[before..].contains(says)
    });
}
