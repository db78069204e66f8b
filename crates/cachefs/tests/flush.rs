//! A flush, and fsync(2), end whatever others do meanwhile.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use client::{Cache, Small};
use ondeck_cachefs::message::{Change, Request};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings, SyncWhen, Watermarks, Writes};
use ondeck_core::Bytes;

const MIB: usize = 1 << 20;

/// No flush here takes so long, unless it waits for what never comes.
const LONG: Duration = Duration::from_secs(20);

/// What works as long as it is told to.
type Other<'a> = dyn Fn(&dyn Fn() -> bool) + Sync + 'a;

/// Does something while others work on until it is done.
fn beside<T>(others: &[&Other<'_>], act: impl FnOnce() -> T) -> T {
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for other in others {
            let goes_on = || !is_done.load(Ordering::Relaxed);
            scope.spawn(move || other(&goes_on));
        }
        let _done = Done(&is_done);
        act()
    })
}

/// Over a directory on a disk, which takes its time.
fn over_a_disk(settings: Settings) -> Cache {
    Cache::over(settings, tempfile::tempdir().unwrap())
}

#[track_caller]
fn flush(cache: &Cache) {
    let begun = Instant::now();
    let done = cache.owner().flush(&mut |_| begun.elapsed() < LONG);
    assert_eq!(done, Ok(()), "after {:?}: {:#?}", begun.elapsed(), cache.owner().status());
}

#[test]
fn a_flush_ends_while_names_change_in_a_directory() {
    for mode in [None, Some(0o750)] {
        let settings = Settings { idle: true, ..Settings::new(Bytes(1 << 30)) };
        let cache = Cache::new(settings);
        cache.make_directory("dir", 0o755).unwrap();
        cache.create("dir/before", 0o644).unwrap();
        if let Some(mode) = mode {
            cache.flush();
            cache.set_mode("dir", mode).unwrap();
        }
        let make = |goes_on: &dyn Fn() -> bool| {
            for number in 0.. {
                if !goes_on() {
                    break;
                }
                cache.create(format!("dir/{number}"), 0o644).unwrap();
            }
        };
        beside(&[&make], || flush(&cache));
        let dir = cache.backing().join("dir");
        assert!(dir.join("before").exists());
        if let Some(mode) = mode {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, mode);
        }
    }
}

#[test]
fn a_flush_ends_while_all_writers_are_busy() {
    let settings = Settings {
        dirty: Watermarks { high: 5, low: 1 },
        threads: 2,
        ..Settings::new(Bytes(LEAST_CAPACITY.0 * 4))
    };
    let cache = over_a_disk(settings);
    cache.create("before", 0o644).unwrap();
    cache.write("before", 0, b"before").unwrap();
    let files = ["a", "b", "c", "d"].map(|name| {
        cache.create(name, 0o644).unwrap();
        cache.open(name).unwrap()
    });
    let data = vec![7; MIB];
    let rewrite = |number: usize, goes_on: &dyn Fn() -> bool| {
        while goes_on() {
            for at in 0..4 {
                cache.write_open(&files[number], (at * MIB) as u64, &data).unwrap();
            }
        }
    };
    let (a, b) = (|go: &dyn Fn() -> bool| rewrite(0, go), |go: &dyn Fn() -> bool| rewrite(1, go));
    let (c, d) = (|go: &dyn Fn() -> bool| rewrite(2, go), |go: &dyn Fn() -> bool| rewrite(3, go));
    beside(&[&a, &b, &c, &d], || {
        for _ in 0..5 {
            flush(&cache);
        }
    });
    files.into_iter().for_each(|file| cache.close(file));
    assert_eq!(fs::read(cache.backing().join("before")).unwrap(), b"before");
}

#[test]
fn a_flush_ends_while_a_file_is_cut_again_and_again() {
    let cache = over_a_disk(Settings { idle: true, ..Settings::new(Bytes(LEAST_CAPACITY.0 * 4)) });
    cache.create("log", 0o644).unwrap();
    cache.write("log", 0, &vec![1; 8 * MIB]).unwrap();
    let cut = |goes_on: &dyn Fn() -> bool| {
        let mut size = 8 * MIB as u64;
        while goes_on() {
            size = if size > 4096 { size - 4096 } else { 8 * MIB as u64 };
            cache.truncate("log", size).unwrap();
        }
    };
    beside(&[&cut], || flush(&cache));
    cache.flush();
    let size = cache.attributes("log").unwrap().size;
    let found = fs::read(cache.backing().join("log")).unwrap();
    assert!(found == cache.read("log", 0, size as usize).unwrap());
}

#[test]
fn what_fails_is_told_while_others_go_on() {
    let backing = tempfile::tempdir().unwrap();
    let program = backing.path().join("program");
    // A child that another test forks meanwhile would have it open for writing, if this process wrote it.
    assert!(std::process::Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap().success());
    let cache = Cache::over(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }, backing);
    let mut running = std::process::Command::new(&program).arg("1000").spawn().unwrap();
    cache.write("program", 0, b"changed").unwrap();
    cache.create("other", 0o644).unwrap();
    let open = cache.open("other").unwrap();
    let work = |goes_on: &dyn Fn() -> bool| {
        while goes_on() {
            cache.write_open(&open, 0, b"other").unwrap();
            let _ = cache.owner().flush(&mut |_| false);
        }
    };
    let begun = Instant::now();
    let told = beside(&[&work], || cache.owner().flush(&mut |_| begun.elapsed() < LONG));
    running.kill().unwrap();
    running.wait().unwrap();
    cache.close(open);
    assert_eq!(told, Err("program: Text file busy (os error 26)".into()), "after {:?}", begun.elapsed());
}

#[test]
fn the_end_of_a_file_is_synced_while_its_beginning_is_written_to() {
    let settings =
        Settings { sync: SyncWhen::Fsync, idle: true, ..Settings::new(Bytes(LEAST_CAPACITY.0 * 8)) };
    let cache = over_a_disk(settings);
    cache.create("large", 0o644).unwrap();
    let size = 64 * MIB as u64;
    cache.write("large", size - 4, b"last").unwrap();
    let open = cache.open("large").unwrap();
    let data = vec![7; MIB];
    let write = |goes_on: &dyn Fn() -> bool| {
        for number in 0.. {
            if !goes_on() {
                break;
            }
            cache.write_open(&open, (number % 20 * MIB) as u64, &data).unwrap();
        }
    };
    beside(&[&write, &write], || cache.sync("large").unwrap());
    assert!(fs::read(cache.backing().join("large")).unwrap().ends_with(b"last"));
    cache.close(open);
}

#[test]
fn what_the_kernel_writes_to_without_asking_is_written_back_once_for_a_flush() {
    let settings = Settings { writes: Writes::Passthrough, idle: true, ..Settings::new(LEAST_CAPACITY) };
    let cache = Cache::new(settings);
    cache.create("file", 0o644).unwrap();
    let open = cache.open("file").unwrap();
    cache.write_open(&open, 0, &vec![7; MIB]).unwrap();
    flush(&cache);
    let written = || cache.owner().status().written_back_bytes;
    let before = written();
    // Nothing tells that nothing will come; a pass takes a hundredth of this.
    std::thread::sleep(Duration::from_millis(500));
    assert!(written() <= before + MIB as u64, "{} MiB since the flush", (written() - before) >> 20);
    cache.close(open);
    cache.flush();
    assert_eq!(fs::read(cache.backing().join("file")).unwrap(), vec![7; MIB]);
}

#[test]
fn a_flush_says_what_fails_though_what_it_waits_for_is_another_file() {
    let Some(small) = Small::new("size=16m") else { return };
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let cache =
        Cache::at(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }, small.path(), store.path());
    // The first one is replaced before it ever was there.
    for content in [b"x", b"y"] {
        cache.create("new", 0o644).unwrap();
        cache.write("new", 0, content).unwrap();
        cache.rename("new", "name", 0).unwrap();
    }
    small.set_read_only(true);
    let begun = Instant::now();
    let told = cache.owner().flush(&mut |_| begun.elapsed() < LONG).unwrap_err();
    assert!(told.contains("Read-only file system") && begun.elapsed() < LONG, "{told} {:?}", begun.elapsed());
    small.set_read_only(false);
    flush(&cache);
    assert_eq!(fs::read(small.path().join("name")).unwrap(), b"y");
}

#[test]
fn what_is_cut_and_written_anew_all_the_while_is_as_it_once_was_after_a_flush() {
    let cache = over_a_disk(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) });
    cache.create("status", 0o644).unwrap();
    let open = cache.open("status").unwrap();
    let data = vec![7; 500_000];
    let rewrite = |goes_on: &dyn Fn() -> bool| {
        while goes_on() {
            let cut = Change { size: Some(0), ..Change::default() };
            cache.ask(Request::Change { ino: open.ino, change: cut }).unwrap();
            cache.write_open(&open, 0, &data).unwrap();
        }
    };
    beside(&[&rewrite], || {
        for round in 0..150 {
            flush(&cache);
            let found = fs::read(cache.backing().join("status")).unwrap();
            assert!(found.iter().all(|byte| *byte == 7), "round {round}: {} bytes of zeros", found.len());
        }
    });
    cache.close(open);
}

#[test]
fn a_file_that_is_cut_and_written_anew_is_never_zeros_there() {
    let cache = over_a_disk(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) });
    cache.create("status", 0o644).unwrap();
    let open = cache.open("status").unwrap();
    let data = vec![7; 500_000];
    let rewrite = |goes_on: &dyn Fn() -> bool| {
        for round in (0..20).cycle() {
            if !goes_on() {
                break;
            }
            let cut = Change { size: Some(0), ..Change::default() };
            cache.ask(Request::Change { ino: open.ino, change: cut }).unwrap();
            cache.write_open(&open, 0, &data).unwrap();
            // It is whole for a while, so that write-back begins with all of it, at different distances from the next cut.
            std::thread::sleep(Duration::from_micros(100 * round));
        }
    };
    cache.write_open(&open, 0, &data).unwrap();
    flush(&cache);
    let there = fs::File::open(cache.backing().join("status")).unwrap();
    let look = |goes_on: &dyn Fn() -> bool| {
        let mut looks = 0;
        while goes_on() {
            // No more than a byte: what is wrong is so for less than a millisecond.
            let mut byte = [7];
            there.read_at(&mut byte, 250_000).unwrap();
            looks += 1;
            assert_eq!(byte, [7], "at look {looks}");
        }
    };
    beside(&[&rewrite, &look], || (0..500).for_each(|_| flush(&cache)));
    cache.close(open);
}
