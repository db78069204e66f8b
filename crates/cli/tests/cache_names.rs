//! A tree of more names than a cache keeps, through a mount.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cached::Mounted;

/// Files in a directory.
const EACH: usize = 1000;

/// Memory of a server beside what it counts for names: the log of what is not written back, lists of directories that are being
/// read, and what the allocator keeps.
const BESIDE: u64 = 56 << 20;

/// What was promised for a million files, all of the server.
const PROMISED: u64 = 256 << 20;

/// Nothing takes so long.
const PATIENCE: Duration = Duration::from_secs(600);

/// A tree of so many files, as numbers of files in directories.
fn make(root: &Path, files: usize) {
    for dir in 0..files.div_ceil(EACH) {
        let dir = root.join(format!("dir-{dir}"));
        fs::create_dir(&dir).unwrap();
        for file in 0..EACH {
            File::create_new(dir.join(format!("file-{file}"))).unwrap();
        }
    }
}

/// Looks at every file below a directory, as `ls -lR` does; returns how many there are.
fn walk(root: &Path) -> usize {
    let mut found = 0;
    let mut stack = vec![root.to_owned()];
    while let Some(dir) = stack.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            match fs::symlink_metadata(&path) {
                Ok(what) if what.is_dir() => stack.push(path),
                Ok(_) => found += 1,
                Err(error) => panic!("{}: {error}", path.display()),
            }
        }
    }
    found
}

/// The resident memory of a cache's server, and the most that it was.
fn memory(mounted: &Mounted) -> (u64, u64) {
    let server = mounted.status()["server"].as_u64().unwrap();
    let status = fs::read_to_string(format!("/proc/{server}/status")).unwrap();
    let of = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    (of("VmRSS:"), of("VmHWM:"))
}

fn status(mounted: &Mounted, key: &str) -> u64 {
    mounted.status()["status"][key].as_u64().unwrap_or_else(|| panic!("{key}: {:#}", mounted.status()))
}

/// Waits until names take no more than they may.
fn settle(mounted: &Mounted) {
    let until = Instant::now() + PATIENCE;
    while status(mounted, "name_bytes") > status(mounted, "most_name_bytes") {
        assert!(Instant::now() < until, "{:#}", mounted.status());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_tree_of_more_names_than_a_cache_keeps_is_all_there_in_little_memory() {
    let files: usize = std::env::var("ONDECK_NAMES").map_or(40_000, |files| files.parse().unwrap());
    let files = files.next_multiple_of(EACH);
    // A quarter is for names: a small part of the tree, or as many as there ever are.
    let is_large = files >= 500_000;
    let capacity = if is_large { "2GiB" } else { "16MiB" };
    let prepare = |backing: &Path| {
        make(backing, files);
        fs::hard_link(backing.join("dir-0/file-7"), backing.join("also")).unwrap();
    };
    let Some(mounted) = Mounted::with(&["--capacity", capacity, "--age", "1h"], prepare) else { return };
    let (fast, dirs) = (&mounted.fast, files / EACH);
    let at = |dir: usize, file: usize| -> PathBuf { fast.join(format!("dir-{dir}/file-{file}")) };
    let (rest, _) = memory(&mounted);
    // Somebody has them open, and works in one of them, all the time.
    let open = File::open(at(0, 7)).unwrap();
    let number = open.metadata().unwrap().ino();
    let within = File::open(fast.join("dir-1")).unwrap();
    let within_number = within.metadata().unwrap().ino();
    // Removed here, and not on the backing directory before the end.
    for dir in 0..dirs {
        fs::remove_file(at(dir, 1)).unwrap();
        fs::rename(at(dir, 2), at(dir, EACH)).unwrap();
    }
    let left = files - dirs + 1;
    assert_eq!(walk(fast), left);
    settle(&mounted);
    let (walked, most_walked) = memory(&mounted);
    assert_eq!(walk(fast), left, "walked again");
    for dir in 0..dirs {
        assert!(!at(dir, 1).exists() && !at(dir, 2).exists() && at(dir, EACH).exists());
    }
    for (path, of, number) in [(at(0, 7), &open, number), (fast.join("dir-1"), &within, within_number)] {
        let found = fs::symlink_metadata(path).unwrap().ino();
        assert_eq!((found, of.metadata().unwrap().ino()), (number, number));
    }
    assert_eq!(fs::symlink_metadata(fast.join("also")).unwrap().ino(), number);
    assert!(fast.join("dir-1").is_dir() && status(&mounted, "forgotten") > 0, "{:#}", mounted.status());

    // As many again that are made here.
    fs::create_dir(fast.join("new")).unwrap();
    make(&fast.join("new"), files);
    mounted.ondeck(&["flush", "fast"]);
    settle(&mounted);
    let (made, most) = memory(&mounted);
    assert_eq!(walk(fast), left + files);
    settle(&mounted);
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "{files} files: {} MiB at rest, {} ({}) walked, {} ({}) when as many were made; {} names known, {} forgotten",
        mib(rest),
        mib(walked),
        mib(most_walked),
        mib(made),
        mib(most),
        status(&mounted, "names"),
        status(&mounted, "forgotten"),
    );
    if is_large {
        assert!(most < PROMISED, "{} MiB", mib(most));
    } else {
        let may_grow = status(&mounted, "most_name_bytes") + BESIDE;
        assert!(most - rest < may_grow, "{} MiB more than at rest", mib(most - rest));
    }
    drop((open, within));
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(walk(&mounted.backing), left + files);
    assert!(!mounted.backing.join("dir-0/file-1").exists() && !mounted.backing.join("dir-0/file-2").exists());
}
