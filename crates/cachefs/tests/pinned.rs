//! Files that the kernel reads by itself, and that others change meanwhile.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::time::Duration;

use client::Cache;
use ondeck_cachefs::message::OpenMode;
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};

const MIB: u64 = 1 << 20;

fn to_write(truncate: bool) -> OpenMode {
    OpenMode { write: true, truncate, ..OpenMode::default() }
}

#[test]
fn a_file_that_the_kernel_reads_grows_only_as_far_as_leaves_room_for_others() {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    let content: Vec<u8> = (0..8 * MIB).map(|at| (at / 4099) as u8).collect();
    fs::write(backing.path().join("other"), &content).unwrap();
    let cache = Cache::over(Settings::new(LEAST_CAPACITY), backing);
    cache.create("grows", 0o644).unwrap();
    let block = vec![7; MIB as usize];
    cache.write("grows", 0, &block).unwrap();
    let reader = cache.open_as("grows", OpenMode::default()).unwrap();
    let writer = cache.open_as("grows", to_write(false)).unwrap();
    let full = (1..20).find_map(|at| Some((at, cache.write_open(&writer, at * MIB, &block).err()?)));
    assert_eq!(full, Some((LEAST_CAPACITY.0 / MIB / 4 * 3, libc::ENOSPC)));
    // What needs two pieces of a file at a time finds room for both.
    for _ in 0..3 {
        for piece in 1..8 {
            let at = (piece * MIB - 2048) as usize;
            let found = cache.read("other", at as u64, 4096).unwrap();
            assert_eq!(found, content[at..at + 4096], "around {piece} MiB");
        }
    }
    cache.close(reader);
    cache.write_open(&writer, 12 * MIB, &block).unwrap_err();
    cache.close(writer);
    cache.write("grows", 30 * MIB, &block).unwrap();
    assert_eq!(cache.read("grows", 11 * MIB, 10).unwrap(), [7; 10]);
}

#[test]
fn a_file_that_the_kernel_reads_can_be_cut_by_whoever_opens_it() {
    let cache = Cache::new(Settings::new(LEAST_CAPACITY));
    cache.create("file", 0o644).unwrap();
    cache.write("file", 0, b"before").unwrap();
    let reader = cache.open_as("file", OpenMode::default()).unwrap();
    let writer = cache.open_as("file", to_write(true)).unwrap();
    cache.write_open(&writer, 0, b"now").unwrap();
    assert_eq!(cache.read_open(&reader, 0, 100).unwrap(), b"now");
    cache.close(writer);
    cache.close(reader);
    cache.flush();
    assert_eq!(fs::read(cache.backing().join("file")).unwrap(), b"now");
}

#[test]
fn who_cuts_a_file_while_it_is_fetched_never_waits_for_longer_than_that() {
    const FILES: usize = 2_000;
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    for number in 0..FILES {
        fs::write(backing.path().join(number.to_string()), vec![1; 8192]).unwrap();
    }
    let (done, is_done) = channel();
    // One that waits for ever can't be joined.
    std::thread::spawn(move || {
        let cache = Cache::over(Settings::new(LEAST_CAPACITY), backing);
        let files: Vec<_> = (0..FILES).map(|number| cache.open(&number.to_string()).unwrap()).collect();
        let together = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for file in &files {
                    together.wait();
                    cache.read_open(file, 0, 8192).unwrap();
                }
            });
            for number in 0..FILES {
                together.wait();
                // At any moment of it.
                (0..number % 200).for_each(|_| std::hint::spin_loop());
                cache.truncate(&number.to_string(), 1).unwrap();
            }
        });
        files.into_iter().for_each(|file| cache.close(file));
        done.send(()).unwrap();
    });
    assert_eq!(is_done.recv_timeout(Duration::from_secs(60)), Ok(()), "somebody waits for ever");
}
