//! A cache for a test.

#![allow(dead_code, clippy::unwrap_used)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mm::{MapFlags, ProtFlags};

use crate::scene::{Scene, Who, is_root, wait_until};

/// A cache over the directory `backing` of a scene, mounted on `fast`.
pub struct Mounted {
    pub scene: Scene,
    pub backing: PathBuf,
    pub fast: PathBuf,
    /// What it is mounted with.
    options: Vec<String>,
}

impl Mounted {
    /// `None` where it can't be.
    pub fn new() -> Option<Mounted> {
        Mounted::with(&[], |_| ())
    }

    /// With further options, over a directory that is prepared.
    pub fn with(options: &[&str], prepare: impl FnOnce(&Path)) -> Option<Mounted> {
        let mounted = Mounted::not_yet(options, prepare)?;
        mounted.mount();
        Some(mounted)
    }

    /// One that is to be mounted.
    pub fn not_yet(options: &[&str], prepare: impl FnOnce(&Path)) -> Option<Mounted> {
        if !is_root() || !Path::new("/dev/fuse").exists() {
            ondeck_skip::skipped("it needs root and /dev/fuse");
            return None;
        }
        let scene = Scene::new(Who::Me);
        let (backing, fast) = (scene.dir("backing"), scene.dir("fast"));
        prepare(&backing);
        let options = options.iter().map(ToString::to_string).collect();
        Some(Mounted { scene, backing, fast, options })
    }

    /// Mounts it, or mounts it again.
    pub fn mount(&self) {
        succeeds(&mut self.mounting());
    }

    /// The command that mounts it.
    pub fn mounting(&self) -> Command {
        let mut command = self.scene.ondeck(&["cache", "mount", "--backing", "backing"]);
        if !self.options.iter().any(|option| option == "--capacity") {
            command.args(["--capacity", "32MiB"]);
        }
        command.args(&self.options).arg("fast");
        command
    }

    /// Kills its server, and waits until that is gone.
    pub fn kill(&self) {
        let server = self.server();
        let pid = rustix::process::Pid::from_raw(server).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        wait_until("the server is gone", || !Path::new(&format!("/proc/{server}")).exists());
    }

    /// The process that serves it.
    pub fn server(&self) -> i32 {
        self.status()["server"].as_i64().unwrap() as i32
    }

    /// What the command says that fails, and its exit code.
    pub fn refused(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.scene.ondeck(&["cache"]).args(arguments).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "ondeck cache {arguments:?} has succeeded: {told}");
        (output.status.code().unwrap(), told)
    }

    pub fn ondeck(&self, arguments: &[&str]) -> String {
        succeeds(self.scene.ondeck(&["cache"]).args(arguments))
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

/// Runs a command, and returns what it says.
pub fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {} {told}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a shell script in a directory.
pub fn sh(dir: &Path, script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).current_dir(dir).env("HOME", dir).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{script}: {} {told}{out}", output.status);
    out
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Whatever the test has left: the server, and its mounts.
        let lose = self.scene.ondeck(&["cache", "unmount", "--force-lose", "--yes", "fast"]).output();
        drop(lose);
    }
}

/// Numbers without an order, the same for the same seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..length.div_ceil(8)).flat_map(|_| self.next().to_ne_bytes()).collect();
        bytes.truncate(length);
        bytes
    }
}

/// A number from the environment.
pub fn wanted(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |value| value.parse().unwrap())
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
