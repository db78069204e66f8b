//! Many writers for long, and writers who have little memory.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cached::{Mounted, Random, sh, wanted};

const WRITERS: usize = 8;

/// Files of a writer: all files of all writers take three times the capacity, 32 MiB.
const FILES: usize = 3;
const SIZE: usize = (96 << 20) / WRITERS / FILES;

/// Anonymous memory that the server of such a cache takes at most. Measured: about a third of it.
const SERVER: u64 = 64 << 20;

fn content(seed: u64) -> Vec<u8> {
    Random(seed).bytes(SIZE - (seed % 5_000) as usize)
}

/// What a writer's files have.
struct Writer {
    dir: PathBuf,
    number: usize,
    seeds: [u64; FILES],
}

impl Writer {
    fn path(&self, dir: &Path, file: usize) -> PathBuf {
        dir.join(format!("{}-{file}", self.number))
    }

    /// Writes one file anew, in one of several ways, and reads another one.
    fn turn(&mut self, random: &mut Random) {
        let file = random.below(FILES);
        let seed = random.next() | 1;
        let data = content(seed);
        let path = self.path(&self.dir, file);
        match random.below(3) {
            0 => fs::write(&path, &data).unwrap(),
            1 => {
                let new = path.with_extension("new");
                let mut to = File::create(&new).unwrap();
                for part in data.chunks(1 + random.below(200_000)) {
                    to.write_all(part).unwrap();
                }
                to.sync_all().unwrap();
                fs::rename(&new, &path).unwrap();
            }
            _ => {
                // In pieces, from the end to the beginning.
                let to = File::options().create(true).write(true).truncate(false).open(&path).unwrap();
                to.set_len(data.len() as u64).unwrap();
                let piece = 1 + random.below(300_000);
                for (at, part) in data.chunks(piece).enumerate().rev() {
                    to.write_all_at(part, (at * piece) as u64).unwrap();
                }
            }
        }
        self.seeds[file] = seed;
        self.check(&self.dir, random.below(FILES));
    }

    fn check(&self, dir: &Path, file: usize) {
        if self.seeds[file] != 0 {
            let found = fs::read(self.path(dir, file)).unwrap();
            assert!(found == content(self.seeds[file]), "{}", self.path(dir, file).display());
        }
    }
}

/// Anonymous memory of a process, in bytes.
fn memory(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn eight_writers_for_long_find_what_they_wrote_and_the_server_takes_no_more_memory() {
    let marks = ["--age", "2s", "--full-high", "80", "--full-low", "60"];
    let Some(mounted) = Mounted::with(&marks, |_| ()) else { return };
    let until = Instant::now() + Duration::from_secs(wanted("ONDECK_WRITERS_SECONDS", 5) as u64);
    let server = mounted.server();
    let ends = AtomicBool::new(false);
    let (writers, most) = std::thread::scope(|scope| {
        let watched = scope.spawn(|| {
            let mut most = 0;
            while !ends.load(Ordering::Relaxed) {
                most = most.max(memory(server));
                std::thread::sleep(Duration::from_millis(20));
            }
            most
        });
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                let dir = mounted.fast.clone();
                scope.spawn(move || {
                    let mut writer = Writer { dir, number, seeds: [0; FILES] };
                    let mut random = Random(number as u64 * 7_919 + 1);
                    while Instant::now() < until {
                        writer.turn(&mut random);
                    }
                    writer
                })
            })
            .collect();
        let writers: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        ends.store(true, Ordering::Relaxed);
        let writers: Vec<_> = writers.into_iter().map(Result::unwrap).collect();
        (writers, watched.join().unwrap())
    });
    println!("the server took {} MiB at most", most >> 20);
    assert!(most < SERVER, "the server took {most} bytes");
    let status = mounted.status();
    assert!(status["status"]["written_back_bytes"].as_u64() > Some(32 << 20), "{status}");
    mounted.ondeck(&["unmount", "fast"]);
    for writer in &writers {
        for file in 0..FILES {
            writer.check(&mounted.backing, file);
        }
    }
}

/// A memory control group, of version 1 or 2.
struct Group(PathBuf);

impl Group {
    fn new(name: &str, bytes: u64) -> Group {
        let first = Path::new("/sys/fs/cgroup/memory");
        let (parent, limit) = match first.is_dir() {
            true => (first, "memory.limit_in_bytes"),
            false => (Path::new("/sys/fs/cgroup"), "memory.max"),
        };
        let group = parent.join(format!("ondeck-cache-{}-{name}", std::process::id()));
        fs::create_dir(&group).unwrap();
        let group = Group(group);
        fs::write(group.0.join(limit), bytes.to_string()).unwrap();
        group
    }

    /// What a shell script begins with that runs in it.
    fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs; ", self.0.display())
    }

    /// Processes that were killed for want of memory.
    fn killed(&self) -> u64 {
        let events = ["memory.oom_control", "memory.events"];
        let told = events.iter().find_map(|name| fs::read_to_string(self.0.join(name)).ok()).unwrap();
        told.lines().find_map(|line| line.strip_prefix("oom_kill ")).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Who is left there keeps it; the next test has another one.
        let _ = fs::remove_dir(&self.0);
    }
}

/// Writes 96 MiB each: at once, in small pieces to many files, and through a map.
const WRITES: [&str; 3] = [
    "head -c 100663296 /dev/zero | tr '\\0' x > one",
    "mkdir many; cd many; head -c 100663296 /dev/zero | tr '\\0' x | split -b 300k -a 4",
    "exec /usr/bin/python3 -c '
import mmap
with open(\"mapped\", \"w+b\") as f:
    f.truncate(100663296)
    m = mmap.mmap(f.fileno(), 0)
    for at in range(0, 100663296, 4096): m[at:at + 4096] = b\"x\" * 4096
    m.flush()'",
];

fn write_in(group: &Group, mounted: &Mounted, writes: &[&str]) {
    let writer = |script: &&str| {
        let mut command = Command::new("sh");
        command.args(["-ec", &format!("{}{script}", group.enter())]).current_dir(&mounted.fast);
        command.spawn().unwrap()
    };
    let writers: Vec<_> = writes.iter().map(writer).collect();
    for (mut writer, script) in writers.into_iter().zip(writes) {
        assert!(writer.wait().unwrap().success(), "{} were killed: {script}", group.killed());
    }
    assert_eq!(group.killed(), 0, "killed for want of memory");
    mounted.ondeck(&["unmount", "fast"]);
    let check = "cat many/* | tr -d x | wc -c; cat many/* | wc -c
        for f in one mapped; do [ ! -e $f ] || { tr -d x < $f | wc -c; stat -c %s $f; }; done";
    assert_eq!(sh(&mounted.backing, check), "0\n100663296\n".repeat(writes.len()));
}

#[test]
fn writers_in_a_small_memory_group_of_three_times_the_capacity_are_not_killed() {
    let Some(mounted) = Mounted::new() else { return };
    write_in(&Group::new("writers", 64 << 20), &mounted, &WRITES);
}

#[test]
fn nor_are_they_if_the_server_is_in_the_same_group() {
    // The store, 32 MiB; the server; what the writers need; and the pages of the disk's own cache.
    let group = Group::new("all", 128 << 20);
    let Some(mounted) = Mounted::not_yet(&[], |_| ()) else { return };
    let mut mounting = mounted.mounting();
    let procs = group.0.join("cgroup.procs");
    // SAFETY: the child opens a file and writes to it, and allocates nothing.
    unsafe { mounting.pre_exec(move || File::options().write(true).open(&procs)?.write_all(b"0")) };
    let told = mounting.output().unwrap();
    assert!(told.status.success(), "{told:?}");
    // Then a program that writes through a map may wait for a server that waits for its pages.
    let may_hang = String::from_utf8_lossy(&told.stderr).contains("CAP_SYS_RESOURCE");
    assert_eq!(may_hang, !can_say_that_it_writes_for_others() && is_version_1());
    write_in(&group, &mounted, if may_hang { &WRITES[..2] } else { &WRITES });
}

/// Whether a process of ours can have the kernel know that others' memory depends on it.
fn can_say_that_it_writes_for_others() -> bool {
    let told = fs::read_to_string("/proc/self/status").unwrap();
    let told = told.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    const CAP_SYS_RESOURCE: u64 = 24;
    u64::from_str_radix(told.trim(), 16).unwrap() & 1 << CAP_SYS_RESOURCE != 0
}

fn is_version_1() -> bool {
    Path::new("/sys/fs/cgroup/memory").is_dir()
}
