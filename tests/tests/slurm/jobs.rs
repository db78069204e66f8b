//! What the scenarios have in common: jobs that wait for a word, and what they leave behind.

use std::fs;
use std::path::{Path, PathBuf};

use ondeck_testbed::{User, wait_until};

use crate::cluster::{Cluster, DEADLINE};

/// A file that jobs wait for: the test decides how long they run.
pub struct Gate(PathBuf);

impl Gate {
    /// One in a user's scratch directory.
    pub fn of(user: &User, name: &str) -> Gate {
        Gate(user.scratch.join(format!("gate-{name}")))
    }

    /// The line of a script that waits for it.
    pub fn line(&self) -> String {
        format!("while [ ! -e {} ]; do sleep 0.05; done\n", self.0.display())
    }

    pub fn open(&self) {
        fs::write(&self.0, "").unwrap();
    }
}

/// A job that has compute nodes to itself until it is told to end.
pub struct Blocker {
    pub job: u32,
    gate: Gate,
}

impl Blocker {
    /// Occupies so many nodes with a job of bob's.
    #[track_caller]
    pub fn new(cluster: &Cluster, nodes: usize) -> Blocker {
        Blocker::with(cluster, &format!("--nodes={nodes}"))
    }

    /// Occupies certain nodes.
    #[track_caller]
    pub fn on(cluster: &Cluster, nodes: &str) -> Blocker {
        Blocker::with(cluster, &format!("--nodelist={nodes}"))
    }

    #[track_caller]
    fn with(cluster: &Cluster, nodes: &str) -> Blocker {
        let bob = cluster.user("bob");
        let gate = Gate::of(bob, &format!("blocker-{}", number()));
        let script = format!("#!/bin/sh\n{}", gate.line());
        let job = cluster.slurm.submit(bob, &script, &[nodes, "--exclusive", "--output=/dev/null"]);
        cluster.slurm.wait_state(job, "RUNNING", DEADLINE);
        Blocker { job, gate }
    }

    /// Has it end.
    pub fn release(self) {
        self.gate.open();
    }
}

/// A number that no other caller gets.
fn number() -> u32 {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Waits until a file is there that a job makes when it has come so far.
#[track_caller]
pub fn wait_file(path: &Path) {
    wait_until(DEADLINE, &format!("{} is there", path.display()), || path.exists());
}

/// What a file says, without the end of its line.
#[track_caller]
pub fn says(path: &Path) -> String {
    let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    String::from_utf8_lossy(&text).trim_end().to_owned()
}

/// The line of a script that notes what is mounted at a path.
pub fn note_source(of: &Path, to: &Path) -> String {
    format!("findmnt -n -o SOURCE -T {} > {}\n", of.display(), to.display())
}

/// Whether what [`note_source`] has noted is a RAM disk.
#[track_caller]
pub fn was_ram(note: &Path) -> bool {
    says(note).contains("ondeck:job-")
}

/// Whether these states were passed in this order, with others between them.
#[track_caller]
pub fn assert_passed(states: &[String], wanted: &[&str]) {
    let mut left = states.iter();
    for state in wanted {
        assert!(left.any(|found| found == state), "no {state} in its place in {states:?}");
    }
}

/// The `#RSA_` lines for directories.
pub fn directives(inputs: &[&Path], outputs: &[&Path]) -> String {
    let line = |key: &str, path: &&Path| format!("#RSA_{key}={}\n", path.display());
    let inputs = inputs.iter().map(|path| line("DATA_IN", path));
    inputs.chain(outputs.iter().map(|path| line("DATA_OUT", path))).collect()
}
