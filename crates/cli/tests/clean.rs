//! `make clean-testbed`: what a test leaves that was killed.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs;
use std::path::Path;
use std::process::Command;

use cached::{Mounted, succeeds};

#[test]
fn what_a_killed_test_left_is_removed_and_what_a_living_one_uses_stays() {
    let Some(living) = Mounted::new() else { return };
    // The number of a process that is gone.
    let mut gone = Command::new("true").spawn().unwrap();
    let pid = gone.id();
    gone.wait().unwrap();
    let dir = std::env::temp_dir().join(format!("ondeck-test.{pid}.left"));
    for name in ["backing", "fast", "other"] {
        fs::create_dir_all(dir.join(name)).unwrap();
    }
    let mut mount =
        living.scene.ondeck(&["cache", "mount", "--backing", "backing", "--capacity", "16MiB", "fast"]);
    mount.current_dir(&dir).env("ONDECK_STATE_DIR", dir.join("state"));
    succeeds(&mut mount);
    succeeds(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(dir.join("other")));
    let mut status = living.scene.ondeck(&["cache", "status", "--json"]);
    let told = succeeds(status.current_dir(&dir).env("ONDECK_STATE_DIR", dir.join("state")));
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let server = told[0]["server"].as_i64().unwrap();

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clean.sh");
    let said = succeeds(Command::new("sh").arg(script));
    assert!(said.contains(&format!("ended process {server}")), "{said}");
    assert!(!dir.exists(), "{said}");
    scene::wait_until("the server is gone", || !Path::new(&format!("/proc/{server}")).exists());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");

    fs::write(living.fast.join("file"), "here").unwrap();
    living.ondeck(&["flush", "fast"]);
    assert_eq!(fs::read_to_string(living.backing.join("file")).unwrap(), "here");
}
