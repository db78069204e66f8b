//! Files with several names of which only some were ever asked for: what is written to them is found under all, wherever names
//! are removed.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use client::Cache;
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};

/// A cache that writes nothing back by itself; the file `known` of its directory is `unknown/d/other`, too.
fn cache() -> Cache {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::create_dir_all(backing.path().join("unknown/d")).unwrap();
    fs::create_dir_all(backing.path().join("unknown/e")).unwrap();
    fs::write(backing.path().join("known"), "before").unwrap();
    fs::hard_link(backing.path().join("known"), backing.path().join(OTHER)).unwrap();
    Cache::over(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }, backing)
}

const OTHER: &str = "unknown/d/other";

/// That the other name, which is the only one now, has this on the backing directory.
#[track_caller]
fn assert_there(cache: &Cache, expected: &str) {
    let other = cache.backing().join(OTHER);
    assert_eq!(fs::read_to_string(&other).unwrap(), expected);
    assert_eq!(fs::metadata(&other).unwrap().nlink(), 1);
    let status = cache.owner().status();
    assert_eq!((status.conflicts, status.failing, status.dirty), (vec![], vec![], 0));
}

#[test]
fn what_was_written_before_its_name_was_removed_is_under_the_other() {
    let cache = cache();
    cache.write("known", 0, b"AFTER").unwrap();
    cache.unlink("known").unwrap();
    cache.flush();
    assert_there(&cache, "AFTERe");
    assert_eq!(cache.read(OTHER, 0, 10).unwrap(), b"AFTERe");
}

#[test]
fn the_other_name_shows_what_was_written_before_any_of_it_is_written_back() {
    let mut cache = cache();
    cache.write("known", 0, b"AFTER").unwrap();
    cache.unlink("known").unwrap();
    cache.replace();
    assert_eq!(cache.read(OTHER, 0, 10).unwrap(), b"AFTERe");
    assert_eq!(cache.attributes(OTHER).unwrap().nlink, 1);
    cache.flush();
    assert_there(&cache, "AFTERe");
}

#[test]
fn what_was_replaced_is_under_its_other_name() {
    let cache = cache();
    cache.create("new", 0o644).unwrap();
    cache.write("known", 0, b"AFTER").unwrap();
    cache.rename("new", "known", 0).unwrap();
    cache.flush();
    assert_there(&cache, "AFTERe");
    assert_eq!(fs::read(cache.backing().join("known")).unwrap(), b"");
}

#[test]
fn who_has_it_open_reads_and_writes_on_when_its_known_name_is_gone() {
    let cache = cache();
    let open = cache.open("known").unwrap();
    cache.unlink("known").unwrap();
    cache.flush();
    assert_eq!(cache.read_open(&open, 0, 10).unwrap(), b"before");
    cache.write_open(&open, 0, b"AFTER").unwrap();
    cache.flush();
    assert_there(&cache, "AFTERe");
    // Who finds the name now has the same file.
    cache.write_open(&open, 0, b"again").unwrap();
    assert_eq!(cache.read(OTHER, 0, 10).unwrap(), b"againe");
    cache.close(open);
    cache.set_mode(OTHER, 0o600).unwrap();
    cache.flush();
    assert_there(&cache, "againe");
    assert_eq!(fs::metadata(cache.backing().join(OTHER)).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn the_next_process_finds_where_to_write_it_or_shows_it() {
    for is_asked_for in [false, true] {
        let mut cache = cache();
        let open = cache.open("known").unwrap();
        cache.unlink("known").unwrap();
        cache.flush();
        cache.write_open(&open, 0, b"AFTER").unwrap();
        cache.replace();
        if is_asked_for {
            assert_eq!(cache.read(OTHER, 0, 10).unwrap(), b"AFTERe");
        }
        cache.flush();
        assert_there(&cache, "AFTERe");
        assert_eq!(cache.read(OTHER, 0, 10).unwrap(), b"AFTERe");
    }
}

/// As programs switch from one version to the next: a new link takes the place of the one before, whose file is removed then.
#[test]
fn a_link_that_is_switched_to_another_file_never_dangles_on_the_backing_directory() {
    const VERSIONS: usize = 20;
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    let cache = Cache::over(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }, backing);
    for version in 0..VERSIONS {
        let name = format!("version-{version}");
        cache.create(&name, 0o644).unwrap();
        cache.symlink("new", &name).unwrap();
        cache.rename("new", "current", 0).unwrap();
        if let Some(before) = version.checked_sub(1) {
            cache.unlink(&format!("version-{before}")).unwrap();
        }
        // What takes its time.
        for number in 0..200 {
            cache.create(format!("{version}-{number}"), 0o644).unwrap();
        }
    }
    let current = cache.backing().join("current");
    let dangling = || {
        let to = fs::read_link(&current).ok()?;
        let is_there = fs::symlink_metadata(cache.backing().join(&to)).is_ok();
        // It may have been switched between both looks.
        (!is_there && fs::read_link(&current).ok()? == to).then_some(to)
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                seen.extend(dangling());
            }
            seen.dedup();
            seen
        });
        cache.flush();
        is_over.store(true, Ordering::Relaxed);
        let seen: Vec<PathBuf> = watcher.join().unwrap();
        assert!(seen.is_empty(), "{seen:?}");
    });
    assert_eq!(fs::read_link(&current).unwrap(), Path::new("version-19"));
    assert!(!cache.backing().join("version-18").exists());
}
