//! What is synced is on the backing directory when fsync(2) has returned, and it returns.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;
use std::sync::Barrier;

use client::{Cache, Small};
use ondeck_cachefs::message::Request;
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings, SyncWhen};

#[test]
fn a_file_is_synced_whatever_others_have_done_since_it_was_made() {
    let cache = Cache::new(Settings { sync: SyncWhen::Fsync, idle: true, ..Settings::new(LEAST_CAPACITY) });
    cache.create("first", 0o644).unwrap();
    cache.write("first", 0, b"first").unwrap();
    cache.make_directory("d", 0o755).unwrap();
    cache.create("d/second", 0o644).unwrap();
    let open = cache.open("first").unwrap();
    cache.ask(Request::Sync { ino: open.ino, data_only: false }).unwrap();
    assert_eq!(fs::read(cache.backing().join("first")).unwrap(), b"first");
    cache.close(open);
}

#[test]
fn who_syncs_a_file_that_loses_its_last_name_never_waits_for_longer_than_that() {
    let cache = Cache::new(Settings { sync: SyncWhen::Fsync, idle: true, ..Settings::new(LEAST_CAPACITY) });
    let together = Barrier::new(2);
    const ROUNDS: usize = 2_000;
    for number in 0..ROUNDS {
        fs::write(cache.backing().join(number.to_string()), b"old").unwrap();
    }
    let files: Vec<_> = (0..ROUNDS).map(|number| cache.open(&number.to_string()).unwrap()).collect();
    files.iter().for_each(|file| cache.write_open(file, 0, b"new").unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for file in &files {
                together.wait();
                cache.ask(Request::Sync { ino: file.ino, data_only: false }).unwrap();
            }
        });
        for number in 0..ROUNDS {
            together.wait();
            // At any moment of it.
            (0..number % 200).for_each(|_| std::hint::spin_loop());
            cache.unlink(&number.to_string()).unwrap();
        }
    });
    files.into_iter().for_each(|file| cache.close(file));
}

#[test]
fn who_syncs_is_told_that_the_backing_directory_takes_nothing() {
    let Some(small) = Small::new("size=16m") else { return };
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let settings = Settings { sync: SyncWhen::Fsync, idle: true, ..Settings::new(LEAST_CAPACITY) };
    let cache = Cache::at(settings, small.path(), store.path());
    cache.make_directory("first", 0o755).unwrap();
    cache.make_directory("second", 0o755).unwrap();
    small.set_read_only(true);
    // Not the one that fails first.
    assert_eq!(cache.sync("second"), Err(libc::EROFS));
    assert_eq!(cache.sync("first"), Err(libc::EROFS));
    small.set_read_only(false);
    assert_eq!(cache.sync("second"), Ok(()));
    assert!(small.path().join("second").exists());
}
