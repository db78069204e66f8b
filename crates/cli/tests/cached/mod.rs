//! A cache for a test.

#![allow(dead_code, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scene::{Scene, Who, is_root};

/// A cache over the directory `backing` of a scene, mounted on `fast`.
pub struct Mounted {
    pub scene: Scene,
    pub backing: PathBuf,
    pub fast: PathBuf,
}

impl Mounted {
    /// `None` where it can't be.
    pub fn new() -> Option<Mounted> {
        Mounted::with(&[], |_| ())
    }

    /// With further options, over a directory that is prepared.
    pub fn with(options: &[&str], prepare: impl FnOnce(&Path)) -> Option<Mounted> {
        if !is_root() || !Path::new("/dev/fuse").exists() {
            ondeck_skip::skipped("it needs root and /dev/fuse");
            return None;
        }
        let scene = Scene::new(Who::Me);
        let (backing, fast) = (scene.dir("backing"), scene.dir("fast"));
        prepare(&backing);
        let mounted = Mounted { scene, backing, fast };
        mounted.ondeck(
            &[&["mount", "--backing", "backing", "--capacity", "32MiB"], options, &["fast"]].concat(),
        );
        Some(mounted)
    }

    pub fn ondeck(&self, arguments: &[&str]) -> String {
        let mut command = self.scene.ondeck(&["cache"]);
        let output = command.args(arguments).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "ondeck cache {arguments:?}: {} {told}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn status(&self) -> serde_json::Value {
        let told: serde_json::Value =
            serde_json::from_str(&self.ondeck(&["status", "fast", "--json"])).unwrap();
        told[0].clone()
    }

    /// Runs a shell script in the cache.
    pub fn run(&self, script: &str) -> String {
        sh(&self.fast, script)
    }
}

/// Runs a shell script in a directory.
pub fn sh(dir: &Path, script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).current_dir(dir).env("HOME", dir).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {} {told}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Whatever the test has left: the server, and its mounts.
        let lose = self.scene.ondeck(&["cache", "unmount", "--force-lose", "--yes", "fast"]).output();
        drop(lose);
    }
}
