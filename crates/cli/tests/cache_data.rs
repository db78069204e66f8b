//! The data of files that are larger than the cache, or many, through a mount.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use rustix::mm::MapFlags;

use cached::{Map, Mounted, Random, wanted};

/// Three times the capacity, 32 MiB.
const LARGE: usize = 96 << 20;

/// Content that tells where in which file it belongs.
fn content(file: usize, length: usize) -> Vec<u8> {
    (0..length / 8).flat_map(|at| ((file as u64) << 48 | at as u64).to_le_bytes()).collect()
}

fn create(path: &Path) -> File {
    File::options().create(true).read(true).write(true).truncate(false).open(path).unwrap()
}

#[track_caller]
fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    // At once, without optimisation, too.
    if found == expected {
        return;
    }
    assert_eq!(found.len(), expected.len(), "the size of {what}");
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "the first byte of {what} that differs");
}

/// As fsx does: random operations on one file, each compared with what the file has to have.
fn exercise(mounted: &Mounted, seed: u64, operations: usize, largest: usize) {
    let mut random = Random(seed);
    let path = mounted.fast.join("exercised");
    let mut file = create(&path);
    let mut expected: Vec<u8> = Vec::new();
    for number in 0..operations {
        let what = format!("operation {number} of seed {seed}");
        // Some at the begin, where everything happens often.
        let span = if random.below(2) == 0 { largest } else { 1 << 20 };
        let at = random.below(span);
        let length = 1 + random.below(200_000).min(largest - at - 1);
        let part = |expected: &[u8]| {
            let begin = at.min(expected.len());
            begin..(at + length).min(expected.len())
        };
        match random.below(20) {
            0..4 => {
                let mut found = vec![0; length];
                let mut had = 0;
                while had < length {
                    match file.read_at(&mut found[had..], (at + had) as u64).unwrap() {
                        0 => break,
                        more => had += more,
                    }
                }
                assert_same(&found[..had], &expected[part(&expected)], &what);
            }
            4..9 => {
                let data = random.bytes(length);
                file.write_all_at(&data, at as u64).unwrap();
                if expected.len() < at + length {
                    expected.resize(at + length, 0);
                }
                expected[at..at + length].copy_from_slice(&data);
            }
            9..12 => {
                let part = part(&expected);
                if !part.is_empty() {
                    let map = Map::new(&file, expected.len(), false, MapFlags::SHARED);
                    let mut found = vec![0; part.len()];
                    map.read(part.start, &mut found);
                    assert_same(&found, &expected[part], &what);
                }
            }
            12..15 => {
                let part = part(&expected);
                if !part.is_empty() {
                    let map = Map::new(&file, expected.len(), true, MapFlags::SHARED);
                    let data = random.bytes(part.len());
                    map.write(part.start, &data);
                    expected[part].copy_from_slice(&data);
                }
            }
            15 => {
                let size = random.below(span);
                file.set_len(size as u64).unwrap();
                expected.resize(size, 0);
            }
            16 => {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, how, at as u64, length as u64).unwrap();
                let part = part(&expected);
                expected[part].fill(0);
            }
            17 => {
                rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, at as u64, length as u64).unwrap();
                if expected.len() < at + length {
                    expected.resize(at + length, 0);
                }
                expected[at..at + length].fill(0);
            }
            18 => file.sync_all().unwrap(),
            // Closed: the next one may be read by the kernel itself.
            _ => {
                drop(file);
                if random.below(4) == 0 {
                    assert_same(&fs::read(&path).unwrap(), &expected, &what);
                }
                file = create(&path);
            }
        }
        assert_eq!(file.metadata().unwrap().len(), expected.len() as u64, "{what}");
    }
    drop(file);
    assert_same(&fs::read(&path).unwrap(), &expected, "the file, read again");
    mounted.ondeck(&["flush", "fast"]);
    assert_same(&fs::read(mounted.backing.join("exercised")).unwrap(), &expected, "the file on disk");
}

#[test]
fn random_operations_on_a_file_larger_than_the_cache_give_what_they_should() {
    let operations = wanted("ONDECK_OPERATIONS", 1_000);
    for (seed, options) in [(0x0123_4567, &["--age", "60s"][..]), (0x89ab_cdef, &["--sync", "fsync"])] {
        // Eviction and write-back go on all the time.
        let marks = ["--dirty-high", "30", "--dirty-low", "10", "--full-high", "60", "--full-low", "40"];
        let Some(mounted) = Mounted::with(&[options, &marks].concat(), |_| ()) else { return };
        exercise(&mounted, seed, operations, LARGE);
    }
}

#[test]
fn random_operations_on_a_file_that_the_kernel_writes_to_give_what_they_should() {
    let operations = wanted("ONDECK_OPERATIONS", 1_000);
    // One that can always be written to so, and one of more than may be pinned, which often can't.
    for (seed, sync, largest) in [(0x0bad_cafe, "interval=1s", 12 << 20), (0x5eed_5eed, "fsync", 40 << 20)] {
        let options = ["--writes", "passthrough", "--sync", sync];
        let Some(mounted) = Mounted::with(&options, |_| ()) else { return };
        exercise(&mounted, seed, operations, largest);
        scene::wait_until("nothing is pinned", || mounted.status()["status"]["pinned"] == 0);
    }
}

#[test]
fn a_file_that_was_read_a_moment_ago_can_become_larger_than_the_cache() {
    let Some(mounted) = Mounted::new() else { return };
    let path = mounted.fast.join("grows");
    fs::write(&path, content(1, 1 << 20)).unwrap();
    let read_by_the_kernel = || {
        scene::wait_until("nothing is open", || mounted.status()["status"]["open_files"] == 0);
        let reader = File::open(&path).unwrap();
        assert_ne!(mounted.status()["status"]["pinned"], 0, "the kernel reads it by itself");
        reader
    };
    // The handle is released while the file is opened to be written, as after close(2) on a busy machine.
    let reader = read_by_the_kernel();
    let large = content(2, LARGE);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| create(&path).write_all_at(&large, 0));
        std::thread::sleep(Duration::from_millis(100));
        drop(reader);
        writer.join().unwrap().unwrap();
    });
    assert_same(&fs::read(&path).unwrap(), &large, "what was written");
    // Who goes on reading holds nobody up for long.
    fs::write(&path, content(3, 1 << 20)).unwrap();
    let reader = read_by_the_kernel();
    for round in 0..20 {
        create(&path).write_all_at(&content(round, 4096), 0).unwrap();
        let mut found = vec![0; 4096];
        reader.read_exact_at(&mut found, 0).unwrap();
        assert_same(&found, &content(round, 4096), "what a reader sees");
    }
}

#[test]
fn writers_of_more_than_fits_never_hear_of_no_room_and_all_of_it_arrives() {
    let Some(mounted) = Mounted::new() else { return };
    // One file, at once and through a map.
    let one = content(1, LARGE);
    fs::write(mounted.fast.join("one"), &one).unwrap();
    let mapped = create(&mounted.fast.join("mapped"));
    mapped.set_len(LARGE as u64).unwrap();
    let map = Map::new(&mapped, LARGE, true, MapFlags::SHARED);
    for (number, part) in one.chunks(1 << 20).enumerate() {
        map.write(number << 20, part);
    }
    drop((map, mapped));
    // Eight at a time.
    let eight = |name: usize| format!("eight-{name}");
    std::thread::scope(|scope| {
        for writer in 0..8 {
            let path = mounted.fast.join(eight(writer));
            scope.spawn(move || fs::write(path, content(10 + writer, LARGE / 8)).unwrap());
        }
    });
    // Many small ones.
    let small = wanted("ONDECK_FILES", 3_000);
    fs::create_dir(mounted.fast.join("many")).unwrap();
    for number in 0..small {
        fs::write(mounted.fast.join(format!("many/{number}")), content(number, 16_000)).unwrap();
    }
    for dir in [&mounted.fast, &mounted.backing] {
        if *dir == mounted.backing {
            mounted.ondeck(&["unmount", "fast"]);
        }
        assert_same(&fs::read(dir.join("one")).unwrap(), &one, "one");
        assert_same(&fs::read(dir.join("mapped")).unwrap(), &one, "mapped");
        for writer in 0..8 {
            let found = fs::read(dir.join(eight(writer))).unwrap();
            assert_same(&found, &content(10 + writer, LARGE / 8), &eight(writer));
        }
        for number in 0..small {
            let mut found = Vec::new();
            File::open(dir.join(format!("many/{number}"))).unwrap().read_to_end(&mut found).unwrap();
            assert_same(&found, &content(number, 16_000), &format!("many/{number}"));
        }
    }
}
