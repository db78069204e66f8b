//! A cache for a test.

#![allow(dead_code, clippy::unwrap_used)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mm::{MapFlags, ProtFlags};

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
        let capacity: &[&str] = if options.contains(&"--capacity") { &[] } else { &["--capacity", "32MiB"] };
        mounted.ondeck(&[&["mount", "--backing", "backing"], capacity, options, &["fast"]].concat());
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

/// Part of a file in memory.
pub struct Map {
    at: *mut u8,
    length: usize,
}

impl Map {
    pub fn new(file: &File, length: usize, writable: bool, how: MapFlags) -> Map {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new map where nothing is.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, how, file, 0).unwrap() };
        Map { at: at.cast(), length }
    }

    pub fn get(&self, at: usize) -> u8 {
        assert!(at < self.length);
        // SAFETY: within the map, which others change: so volatile.
        unsafe { self.at.add(at).read_volatile() }
    }

    /// Copies bytes out of it.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(at + into.len() <= self.length);
        // SAFETY: within the map, and `into` is elsewhere. Nobody else writes at this time.
        unsafe { self.at.add(at).copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes into it.
    pub fn write(&self, at: usize, from: &[u8]) {
        assert!(at + from.len() <= self.length);
        // SAFETY: as in `read`; callers have made it writable.
        unsafe { self.at.add(at).copy_from_nonoverlapping(from.as_ptr(), from.len()) }
    }

    pub fn set(&self, at: usize, to: u8) {
        assert!(at < self.length);
        // SAFETY: as in `get`; callers have made it writable.
        unsafe { self.at.add(at).write_volatile(to) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: it is this one's, and nobody has a reference into it.
        unsafe { rustix::mm::munmap(self.at.cast(), self.length).unwrap() }
    }
}
