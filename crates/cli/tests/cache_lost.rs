//! What the disk behind a cache has when the machine is lost, as by a power failure.
//!
//! The backing directory is on an ext4, which is on a loop device, whose image is a file of a btrfs. A clone of the image (FICLONE)
//! has what the device was given up to one moment: it is mounted, as after the failure, while programs go on. That ext4 does
//! nothing of its own accord to have data on the disk before a name shows it (`noauto_da_alloc`), and commits often. A file that grew and
//! was not synced may have zeros there, for it can commit a size before the data that comes with it has arrived: without a cache, too.

#![allow(clippy::unwrap_used)]

mod cached;
mod disk;
mod scene;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cached::{Mounted, Random, sh, wanted};
use disk::Disk;
use tempfile::TempDir;

/// Files that one program replaces, one after the other.
const REPLACED: u64 = 4;

/// Files that are made in a directory before it gets its name.
const TOGETHER: u64 = 5;

/// A log is renamed when it has so many words.
const LOG: usize = 200_000;

/// A disk that can be lost at any moment, and a cache over it. What is first here goes first.
struct Machine {
    mounted: Mounted,
    disk: Disk,
    host: Disk,
    dir: TempDir,
}

impl Machine {
    fn new(options: &[&str]) -> Option<Machine> {
        if !scene::is_root() {
            ondeck_skip::skipped("it needs root, to mount filesystems");
            return None;
        }
        // In RAM, so that it takes nobody's disk.
        let dir = scene::tempdir_in(Path::new("/dev/shm"));
        let at = dir.path().join("host");
        fs::create_dir_all(&at).unwrap();
        fs::create_dir(dir.path().join("after")).unwrap();
        let host = Disk::new("mkfs.btrfs -q", "1G", &dir.path().join("image"), &at, "");
        let mut disk = None;
        let image = at.join("image");
        let prepare = |backing: &Path| {
            let options = "noauto_da_alloc,commit=1";
            disk = Some(Disk::new("mkfs.ext4 -q -J size=8", "300M", &image, backing, options));
        };
        let mounted = Mounted::with(options, prepare)?;
        Some(Machine { mounted, disk: disk.unwrap(), host, dir })
    }

    /// Looks at the disk as it is after a failure at this moment.
    fn lose(&self, look: impl FnOnce(&Path)) {
        let clone = self.host.at.join("clone");
        let (from, to) = (self.disk.image.display(), clone.display());
        sh(Path::new("/"), &format!("cp --reflink=always {from} {to}"));
        let after = Disk::of(&clone, &self.dir.path().join("after"), "");
        look(&after.at);
        drop(after);
        fs::remove_file(clone).unwrap();
    }
}

/// Words of a file that tell which file it is, and which version of it; the version says how many they are.
fn words(tag: u64, version: u64) -> Vec<u64> {
    let first = tag << 40 | version;
    let count = 1 + (version * 7_919 + tag * 104_729) % 40_000;
    (0..count).map(|at| first ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The version of a file of which nothing may be missing.
#[track_caller]
fn version(path: &Path, tag: u64) -> u64 {
    let found = fs::read(path).unwrap();
    let shown = path.display();
    assert!(found.len() >= 8, "{shown} is there and has {} bytes", found.len());
    let first = u64::from_le_bytes(found[..8].try_into().unwrap());
    assert_eq!(first >> 40, tag, "{shown} begins with {first:#x}");
    let version = first & ((1 << 40) - 1);
    let expected = bytes(&words(tag, version));
    assert_eq!(found.len(), expected.len(), "the size of {shown}, version {version}");
    let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "the first byte of {shown}, version {version}, that differs");
    version
}

/// A program that goes on until it is told to end.
struct Program<'a> {
    dir: &'a Path,
    ends: &'a AtomicBool,
    /// Whether it syncs everything, also directories.
    syncs: bool,
    /// The version of all replaced files that is there for certain.
    done: &'a AtomicU64,
    /// The last of the created files that is complete.
    created: &'a AtomicU64,
}

impl Program<'_> {
    fn goes_on(&self) -> bool {
        !self.ends.load(Ordering::Relaxed)
    }

    fn write(&self, name: &str, tag: u64, version: u64) {
        let mut file = File::create(self.dir.join(name)).unwrap();
        file.write_all(&bytes(&words(tag, version))).unwrap();
        if self.syncs || version.is_multiple_of(3) {
            file.sync_all().unwrap();
        }
    }

    fn rename(&self, from: &str, to: &str) {
        fs::rename(self.dir.join(from), self.dir.join(to)).unwrap();
        if self.syncs {
            File::open(self.dir).unwrap().sync_all().unwrap();
        }
    }

    /// As editors and databases do: each version of a file under a name of its own, then renamed.
    fn replaces(&self) {
        for version in 1.. {
            for file in 0..REPLACED {
                self.write(&format!("new-{file}"), file, version);
                self.rename(&format!("new-{file}"), &format!("replaced-{file}"));
            }
            self.done.store(version, Ordering::SeqCst);
            if !self.goes_on() {
                break;
            }
        }
    }

    /// As installers do: a directory gets its name when everything is in it.
    fn makes_directories(&self) {
        for version in (1..).take_while(|_| self.goes_on()) {
            fs::create_dir(self.dir.join("made")).unwrap();
            for file in 0..TOGETHER {
                self.write(&format!("made/{file}"), 100 + file, version);
            }
            self.rename("made", &format!("done-{version}"));
            if version > 3 {
                self.rename(&format!("done-{}", version - 3), "old");
                fs::remove_dir_all(self.dir.join("old")).unwrap();
            }
        }
    }

    /// As git does: a file gets its name by a link when it is complete.
    fn links(&self) {
        for version in (1..).take_while(|_| self.goes_on()) {
            self.write("object", 200, version);
            fs::hard_link(self.dir.join("object"), self.dir.join(format!("object-{version}"))).unwrap();
            fs::remove_file(self.dir.join("object")).unwrap();
            if version > 10 {
                fs::remove_file(self.dir.join(format!("object-{}", version - 10))).unwrap();
            }
        }
    }

    /// A file is complete long after it was made, and then exchanged with the one that it replaces.
    fn exchanges(&self) {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        let (hidden, shown) = (self.dir.join("hidden"), self.dir.join("shown"));
        self.write("shown", 400, 1);
        for version in (2..).take_while(|_| self.goes_on()) {
            let data = bytes(&words(400, version));
            let mut file = File::create(&hidden).unwrap();
            for part in data.chunks(data.len() / 2 + 1) {
                file.write_all(part).unwrap();
                // It is written back meanwhile, or not.
                std::thread::sleep(Duration::from_millis(version * 379 % 1_500));
            }
            drop(file);
            renameat_with(CWD, &hidden, CWD, &shown, RenameFlags::EXCHANGE).unwrap();
            fs::remove_file(&hidden).unwrap();
        }
    }

    /// A file at once, under its own name.
    fn creates(&self) {
        for version in (1..).take_while(|_| self.goes_on()) {
            self.write(&format!("created-{version}"), 300, version);
            self.created.store(version, Ordering::SeqCst);
            if version > 10 {
                fs::remove_file(self.dir.join(format!("created-{}", version - 10))).unwrap();
            }
        }
    }

    /// As daemons do: a log grows, and is renamed when it is long.
    fn appends(&self) {
        for version in (1..).take_while(|_| self.goes_on()) {
            let mut log = File::options().append(true).create_new(true).open(self.dir.join("log")).unwrap();
            for part in log_words(version).chunks(1_000) {
                log.write_all(&bytes(part)).unwrap();
            }
            drop(log);
            self.rename("log", "log.1");
        }
    }
}

fn log_words(version: u64) -> Vec<u64> {
    (0..LOG as u64).map(|at| version << 32 | (at + 1)).collect()
}

/// That every file of these programs is one that they wrote, and complete if it was `created` up to this one; returns the versions of
/// what is replaced.
fn check(dir: &Path, created: u64) -> BTreeMap<String, u64> {
    let mut versions = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let path = entry.path();
        // What has no name of its own yet may be incomplete.
        if name.starts_with(".ondeck-cache-") {
            continue;
        }
        if name == "shown" {
            versions.insert(name, version(&path, 400));
            continue;
        }
        match name.split_once(['-', '.']) {
            Some(("replaced", file)) => {
                let found = version(&path, file.parse().unwrap());
                versions.insert(name, found);
            }
            Some(("done", number)) => {
                for file in 0..TOGETHER {
                    let found = version(&path.join(file.to_string()), 100 + file);
                    assert_eq!(found.to_string(), number, "{}/{file}", path.display());
                }
            }
            Some(("object", number)) => assert_eq!(version(&path, 200).to_string(), number),
            Some(("created", number)) => {
                let number = number.parse().unwrap();
                let (found, expected) = (fs::read(&path).unwrap(), bytes(&words(300, number)));
                let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
                let is_zero = differs.is_none_or(|at| found[at..].iter().all(|byte| *byte == 0));
                // It may have got its name and its size before the rest was written; what is there is right.
                let is_right = if number <= created {
                    found == expected
                } else {
                    found.len() <= expected.len() && is_zero
                };
                assert!(
                    is_right,
                    "{} of {} bytes has {}, which differ at {differs:?}; zeros from there: {is_zero}; complete up to {created}",
                    path.display(),
                    expected.len(),
                    found.len()
                );
            }
            Some(("log", "1")) => {
                let found = fs::read(&path).unwrap();
                let number = u64::from_le_bytes(found[..8].try_into().unwrap()) >> 32;
                assert!(found == bytes(&log_words(number)), "log.1, version {number}, is not what it was");
                versions.insert(name, number);
            }
            _ => {}
        }
    }
    // Each version of a file was there before the same one of the next.
    let replaced: Vec<u64> =
        (0..REPLACED).map_while(|file| versions.get(&format!("replaced-{file}")).copied()).collect();
    assert!(replaced.is_sorted_by(|a, b| a >= b), "{replaced:?}");
    if replaced.len() as u64 == REPLACED {
        assert!(replaced[0] - replaced[replaced.len() - 1] <= 1, "{replaced:?}");
    }
    versions
}

/// Loses the machine so many times while the programs work.
fn lose_machines(machine: &Machine, syncs: bool, times: usize) {
    let (ends, done, created) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let program = &Program { dir: &machine.mounted.fast, ends: &ends, syncs, done: &done, created: &created };
    let mut random = Random(0x10_57);
    std::thread::scope(|scope| {
        let workers = [
            scope.spawn(|| program.replaces()),
            scope.spawn(|| program.makes_directories()),
            scope.spawn(|| program.links()),
            scope.spawn(|| program.exchanges()),
            scope.spawn(|| program.creates()),
            scope.spawn(|| program.appends()),
        ];
        // The programs end also if a look at a disk fails.
        let ending = Ending(&ends);
        scene::wait_until("something is on the disk", || machine.mounted.backing.join("log.1").exists());
        let mut first = None;
        let mut last = BTreeMap::new();
        for _ in 0..times {
            std::thread::sleep(Duration::from_millis(50 + random.below(400) as u64));
            let certain = done.load(Ordering::SeqCst);
            let complete = if syncs { created.load(Ordering::SeqCst) } else { 0 };
            machine.lose(|after| last = check(after, complete));
            if syncs {
                let replaced = last.get(&format!("replaced-{}", REPLACED - 1)).copied().unwrap_or(0);
                assert!(replaced >= certain, "version {certain} was synced, and {replaced} is there");
            }
            first.get_or_insert_with(|| last.clone());
        }
        assert_ne!(Some(&last), first.as_ref(), "nothing was written back meanwhile");
        drop(ending);
        for worker in workers {
            worker.join().unwrap();
        }
    });
    machine.mounted.ondeck(&["unmount", "fast"]);
    let found = check(&machine.mounted.backing, u64::MAX);
    assert_eq!(found["replaced-0"], done.load(Ordering::SeqCst));
}

struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn after_a_lost_machine_a_file_is_the_old_one_or_the_new_one() {
    let marks = ["--age", "1s", "--dirty-high", "30", "--dirty-low", "10"];
    let Some(machine) = Machine::new(&marks) else { return };
    lose_machines(&machine, false, wanted("ONDECK_LOST_MACHINES", 8));
}

#[test]
fn what_was_synced_with_sync_fsync_is_there_after_a_lost_machine() {
    let Some(machine) = Machine::new(&["--sync", "fsync", "--age", "1s"]) else { return };
    lose_machines(&machine, true, wanted("ONDECK_LOST_MACHINES", 8) / 2);
}
