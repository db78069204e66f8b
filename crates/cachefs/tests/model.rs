//! Random operations give the same results on a cache as on a plain directory, and the same trees after a flush; also if what
//! serves the cache is replaced in between, without having written anything back; and if names are forgotten all the time.

#![allow(clippy::unwrap_used)]

mod client;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use client::{Cache, same_trees};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings, Writes};
use ondeck_core::Bytes;
use proptest::prelude::*;
use rustix::fs::SeekFrom;

/// One step of a program, or of the cache.
#[derive(Clone, Debug)]
enum Step {
    Create(u8),
    MakeDirectory(u8),
    Symlink(u8, u8),
    Write(u8, u64, usize),
    Truncate(u8, u64),
    Punch(u8, u64, u64),
    Read(u8, u64, usize),
    Mode(u8, u32),
    Times(u8, i64),
    Xattr(u8, u8),
    Unlink(u8),
    RemoveDirectory(u8),
    Rename(u8, u8, u8),
    Link(u8, u8),
    Look(u8),
    List(u8),
    Keep(u8),
    ReadKept(u64, usize),
    WriteKept(u64, usize),
    CloseKept,
    Flush,
    Evict,
    Forget,
    Replace,
    /// The backing directory refuses changes of names in a directory, and of its attributes.
    Lock(u8),
    Unlock,
}

/// The paths that steps are about: some are below others, so that directories move with what is in them.
const PATHS: [&str; 12] = ["a", "b", "c", "d", "a/x", "a/y", "b/x", "b/y", "a/x/p", "b/x/p", "d/x", "d/y"];

fn path() -> impl Strategy<Value = u8> {
    0..PATHS.len() as u8
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..9000_u64,
        0..3_000_000_u64,
        (0..24_u64).prop_map(|mib| mib << 20),
        (0..700_u64).prop_map(|block| block * 4096)
    ]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![1..100_usize, 1..20_000_usize, Just(4096), Just(1 << 20), 1..3_000_000_usize]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => path().prop_map(Step::Create),
        2 => path().prop_map(Step::MakeDirectory),
        1 => (path(), any::<u8>()).prop_map(|(a, b)| Step::Symlink(a, b)),
        6 => (path(), offset(), length()).prop_map(|(a, b, c)| Step::Write(a, b, c)),
        2 => (path(), offset()).prop_map(|(a, b)| Step::Truncate(a, b)),
        1 => (path(), offset(), 1..2_000_000_u64).prop_map(|(a, b, c)| Step::Punch(a, b, c)),
        4 => (path(), offset(), length()).prop_map(|(a, b, c)| Step::Read(a, b, c)),
        1 => (path(), 0..0o1000_u32).prop_map(|(a, b)| Step::Mode(a, b | 0o700)),
        1 => (path(), 0..2_000_000_000_i64).prop_map(|(a, b)| Step::Times(a, b)),
        1 => (path(), any::<u8>()).prop_map(|(a, b)| Step::Xattr(a, b)),
        2 => path().prop_map(Step::Unlink),
        1 => path().prop_map(Step::RemoveDirectory),
        4 => (path(), path(), 0..4_u8).prop_map(|(a, b, c)| Step::Rename(a, b, c)),
        1 => (path(), path()).prop_map(|(a, b)| Step::Link(a, b)),
        2 => path().prop_map(Step::Look),
        1 => path().prop_map(Step::List),
        1 => path().prop_map(Step::Keep),
        1 => (offset(), length()).prop_map(|(a, b)| Step::ReadKept(a, b)),
        1 => (offset(), length()).prop_map(|(a, b)| Step::WriteKept(a, b)),
        1 => Just(Step::CloseKept),
        1 => Just(Step::Flush),
        1 => Just(Step::Evict),
        6 => Just(Step::Forget),
        1 => Just(Step::Replace),
    ]
}

/// As `step`, over a backing directory that refuses some of it for a while.
fn step_while_locked() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => step(),
        2 => path().prop_map(Step::Lock),
        1 => Just(Step::Flush),
        1 => Just(Step::Unlock),
    ]
}

fn content(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7) as u8 | 1)
        .collect()
}

fn errno(error: std::io::Error) -> i32 {
    error.raw_os_error().unwrap()
}

fn regular(path: &Path, write: bool) -> Result<fs::File, i32> {
    let found = fs::symlink_metadata(path).map_err(errno)?;
    if found.is_dir() {
        return Err(libc::EISDIR);
    }
    if !found.is_file() {
        return Err(libc::ELOOP);
    }
    fs::File::options().read(true).write(write).open(path).map_err(errno)
}

/// A plain directory, and the cache over another one.
struct Both {
    plain: tempfile::TempDir,
    cache: Cache,
    kept: Option<(fs::File, client::Open)>,
    locked: Vec<fs::File>,
    seed: u64,
}

fn rename_flags(replace: u8) -> u32 {
    match replace {
        0 => libc::RENAME_NOREPLACE,
        1 => libc::RENAME_EXCHANGE,
        _ => 0,
    }
}

impl Both {
    fn step(&mut self, step: &Step) {
        let plain = self.plain.path().to_owned();
        let at = |path: &u8| plain.join(PATHS[usize::from(*path)]);
        let of = |path: &u8| PATHS[usize::from(*path)];
        self.seed += 1;
        let seed = self.seed;
        let cache = &mut self.cache;
        match step {
            Step::Create(path) => {
                let expected = fs::File::create_new(at(path)).map(drop).map_err(errno);
                if expected.is_ok() {
                    fs::set_permissions(at(path), fs::Permissions::from_mode(0o644)).unwrap();
                }
                assert_eq!(cache.create(of(path), 0o644), expected);
            }
            Step::MakeDirectory(path) => {
                let expected = fs::create_dir(at(path)).map_err(errno);
                if expected.is_ok() {
                    fs::set_permissions(at(path), fs::Permissions::from_mode(0o755)).unwrap();
                }
                assert_eq!(cache.make_directory(of(path), 0o755), expected);
            }
            Step::Symlink(path, to) => {
                let expected = symlink(format!("to-{to}"), at(path)).map_err(errno);
                assert_eq!(cache.symlink(of(path), &format!("to-{to}")), expected);
            }
            Step::Write(path, offset, length) => {
                let data = content(seed, *length);
                let expected =
                    regular(&at(path), true).map(|file| file.write_all_at(&data, *offset).unwrap());
                assert_eq!(cache.write(of(path), *offset, &data), expected);
            }
            Step::Truncate(path, size) => {
                let expected = regular(&at(path), true).map(|file| file.set_len(*size).unwrap());
                assert_eq!(cache.truncate(of(path), *size), expected);
            }
            Step::Punch(path, offset, length) => {
                let expected = regular(&at(path), true).map(|file| punch(&file, *offset, *length));
                assert_eq!(cache.punch(of(path), *offset, *length), expected);
            }
            Step::Read(path, offset, length) => {
                let expected = regular(&at(path), false).map(|file| read(&file, *offset, *length));
                assert_data(&cache.read(of(path), *offset, *length), &expected);
            }
            Step::Mode(path, mode) => {
                if fs::symlink_metadata(at(path)).is_ok_and(|found| !found.is_symlink()) {
                    fs::set_permissions(at(path), fs::Permissions::from_mode(*mode)).unwrap();
                    cache.set_mode(of(path), *mode).unwrap();
                }
            }
            Step::Times(path, seconds) => {
                if fs::symlink_metadata(at(path)).is_ok() {
                    let time = rustix::fs::Timespec { tv_sec: *seconds, tv_nsec: 123_456_789 };
                    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
                    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
                    rustix::fs::utimensat(rustix::fs::CWD, at(path), &times, flags).unwrap();
                    cache.set_times(of(path), *seconds, 123_456_789).unwrap();
                }
            }
            Step::Xattr(path, value) => {
                if fs::symlink_metadata(at(path)).is_ok_and(|found| found.is_file() || found.is_dir()) {
                    rustix::fs::setxattr(at(path), "user.test", &[*value], rustix::fs::XattrFlags::empty())
                        .unwrap();
                    cache.set_xattr(of(path), "user.test", &[*value]).unwrap();
                }
            }
            Step::Unlink(path) => {
                let expected = match fs::symlink_metadata(at(path)) {
                    Ok(found) if found.is_dir() => Err(libc::EISDIR),
                    _ => fs::remove_file(at(path)).map_err(errno),
                };
                assert_eq!(cache.unlink(of(path)), expected);
            }
            Step::RemoveDirectory(path) => {
                assert_eq!(cache.remove_directory(of(path)), fs::remove_dir(at(path)).map_err(errno));
            }
            Step::Rename(from, to, replace) => {
                // What the kernel refuses before it asks the filesystem.
                let (a, b) = (of(from), of(to));
                if b.starts_with(&format!("{a}/")) || a.starts_with(&format!("{b}/")) {
                    return;
                }
                let flags = rustix::fs::RenameFlags::from_bits_retain(rename_flags(*replace));
                let expected =
                    rustix::fs::renameat_with(rustix::fs::CWD, at(from), rustix::fs::CWD, at(to), flags)
                        .map_err(rustix::io::Errno::raw_os_error);
                assert_eq!(cache.rename(a, b, rename_flags(*replace)), expected);
            }
            Step::Link(from, to) => {
                if fs::symlink_metadata(at(from)).is_ok_and(|found| !found.is_dir()) {
                    let expected = fs::hard_link(at(from), at(to)).map_err(errno);
                    assert_eq!(cache.link(of(from), of(to)), expected);
                }
            }
            Step::Look(path) => {
                match (fs::symlink_metadata(at(path)).map_err(errno), cache.attributes(of(path))) {
                    (Ok(expected), Ok(found)) => {
                        assert_eq!(found.mode, expected.mode(), "{path}");
                        if !expected.is_dir() {
                            assert_eq!(
                                (found.size, u64::from(found.nlink)),
                                (expected.size(), expected.nlink())
                            );
                        }
                    }
                    (expected, found) => assert_eq!(found.map(drop), expected.map(drop)),
                }
            }
            Step::List(path) => {
                if fs::symlink_metadata(at(path)).is_ok_and(|found| found.is_dir()) {
                    let names = fs::read_dir(at(path)).unwrap().map(|entry| entry.unwrap().file_name());
                    let mut expected: Vec<_> = names.collect();
                    expected.sort();
                    assert_eq!(cache.list(of(path)), Ok(expected));
                }
            }
            Step::Keep(path) => {
                self.close_kept();
                if let Ok(file) = regular(&at(path), true) {
                    let open = self.cache.open(of(path)).unwrap();
                    self.kept = Some((file, open));
                }
            }
            Step::ReadKept(offset, length) => {
                if let Some((file, open)) = &self.kept {
                    assert_data(&cache.read_open(open, *offset, *length), &Ok(read(file, *offset, *length)));
                }
            }
            Step::WriteKept(offset, length) => {
                if let Some((file, open)) = &self.kept {
                    let data = content(seed, *length);
                    file.write_all_at(&data, *offset).unwrap();
                    cache.write_open(open, *offset, &data).unwrap();
                }
            }
            Step::CloseKept => self.close_kept(),
            Step::Flush if !self.locked.is_empty() => {
                let until = Instant::now() + Duration::from_millis(300);
                // What is refused is tried again later.
                let _ = cache.owner().flush(&mut |_| Instant::now() < until);
            }
            Step::Flush => {
                cache.flush();
                same_trees(cache.backing(), &plain);
            }
            Step::Evict => cache.evict(),
            Step::Forget => cache.forget_names(),
            Step::Replace => {
                // Whoever has it open has lost it, and nobody closes it.
                self.kept = None;
                self.cache.replace();
            }
            Step::Lock(path) => {
                let path = self.cache.backing().join(of(path));
                if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
                    let dir = fs::File::open(path).unwrap();
                    set_immutable(&dir, true);
                    self.locked.push(dir);
                }
            }
            Step::Unlock => self.unlock(),
        }
    }

    fn unlock(&mut self) {
        self.locked.drain(..).for_each(|dir| set_immutable(&dir, false));
    }

    fn close_kept(&mut self) {
        if let Some((_, open)) = self.kept.take() {
            self.cache.close(open);
        }
    }
}

impl Drop for Both {
    fn drop(&mut self) {
        // What is immutable can't be removed.
        self.unlock();
    }
}

fn set_immutable(dir: &fs::File, to: bool) {
    let mut flags = rustix::fs::ioctl_getflags(dir).unwrap();
    flags.set(rustix::fs::IFlags::IMMUTABLE, to);
    rustix::fs::ioctl_setflags(dir, flags).unwrap();
}

fn read(file: &fs::File, offset: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    let mut done = 0;
    while done < length {
        match file.read_at(&mut data[done..], offset + done as u64).unwrap() {
            0 => break,
            count => done += count,
        }
    }
    data.truncate(done);
    data
}

fn punch(file: &fs::File, offset: u64, length: u64) {
    use rustix::fs::FallocateFlags;
    rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length)
        .unwrap();
}

fn assert_data(found: &Result<Vec<u8>, i32>, expected: &Result<Vec<u8>, i32>) {
    match (found, expected) {
        (Ok(found), Ok(expected)) => {
            assert_eq!(found.len(), expected.len());
            let differs = found.iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(differs, None, "the first byte that differs");
        }
        (found, expected) => assert_eq!(found, expected),
    }
}

fn settings() -> Settings {
    Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }
}

/// How many random programs: more by `ONDECK_CASES`.
fn cases() -> u32 {
    std::env::var("ONDECK_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 30, ..ProptestConfig::default() })]

    #[test]
    fn a_cache_does_what_a_plain_directory_does(
        before in proptest::collection::vec(step(), 0..12),
        steps in proptest::collection::vec(step(), 1..60),
        passthrough in any::<bool>(),
        unasked in any::<bool>(),
        // None at all, about three, or more than there are.
        names in prop_oneof![Just(0), Just(1000), Just(1 << 20)],
    ) {
        let plain = tempfile::tempdir_in("/dev/shm").unwrap();
        let writes = if unasked { Writes::Passthrough } else { Writes::Server };
        let settings = Settings { passthrough, writes, names: Bytes(names), ..settings() };
        let mut both = Both { plain, cache: Cache::new(settings), kept: None, locked: Vec::new(), seed: 0 };
        // What is there before the cache is.
        for step in &before {
            both.step(step);
        }
        both.close_kept();
        both.cache.flush();
        both.cache.forget_everything();
        for step in &steps {
            both.step(step);
        }
        both.close_kept();
        let shown = both.cache.tree();
        both.cache.flush();
        same_trees(both.cache.backing(), both.plain.path());
        // The times, too, are those that programs saw.
        both.cache.assert_backing_shows(&shown);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 30, ..ProptestConfig::default() })]

    #[test]
    fn what_the_backing_directory_refuses_for_a_while_comes_there_in_the_end(
        before in proptest::collection::vec(step(), 0..12),
        steps in proptest::collection::vec(step_while_locked(), 1..60),
    ) {
        if !rustix::process::geteuid().is_root() {
            ondeck_skip::skipped("it needs root, to make directories immutable");
            return Ok(());
        }
        let plain = tempfile::tempdir_in("/dev/shm").unwrap();
        let cache = Cache::new(settings());
        let mut both = Both { plain, cache, kept: None, locked: Vec::new(), seed: 0 };
        for step in before.iter().chain([&Step::Flush]).chain(&steps) {
            both.step(step);
        }
        both.close_kept();
        both.unlock();
        let shown = both.cache.tree();
        both.cache.flush();
        same_trees(both.cache.backing(), both.plain.path());
        both.cache.assert_backing_shows(&shown);
        prop_assert_eq!(both.cache.owner().status().conflicts, []);
    }
}

#[test]
fn a_file_takes_blocks_also_when_it_was_written_back_and_is_not_resident() {
    // tar takes a file of no blocks for one hole, and does not read it.
    let mut cache = Cache::new(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) });
    cache.create("file", 0o644).unwrap();
    cache.write("file", 0, &[1; 5000]).unwrap();
    cache.create("hole", 0o644).unwrap();
    cache.truncate("hole", 5000).unwrap();
    assert_eq!(cache.attributes("file").unwrap().blocks, 16);
    cache.flush();
    cache.evict();
    assert_eq!(cache.attributes("file").unwrap().blocks, 16);
    assert_eq!(cache.attributes("hole").unwrap().blocks, 0);
    cache.set_mode("file", 0o600).unwrap();
    cache.replace();
    assert_ne!(cache.attributes("file").unwrap().blocks, 0);
}

#[test]
fn a_hole_up_to_the_end_of_a_file_takes_its_last_block_too() {
    let cache = Cache::new(settings());
    cache.create("file", 0o600).unwrap();
    cache.write("file", 0, &[7; 10_000]).unwrap();
    cache.flush();
    cache.punch("file", 4096, 10_000).unwrap();
    assert_eq!(cache.attributes("file").unwrap().blocks, 8);
    assert_eq!(cache.owner().status().resident, 4096);
    cache.flush();
    let found = fs::metadata(cache.backing().join("file")).unwrap();
    assert_eq!((found.len(), found.blocks()), (10_000, 8));
    let store = fs::read_dir(cache.store()).unwrap().map(|entry| entry.unwrap().path());
    let files = store.filter(|path| path.is_dir()).flat_map(|dir| fs::read_dir(dir).unwrap());
    assert_eq!(files.map(|file| file.unwrap().metadata().unwrap().blocks()).sum::<u64>(), 8);
}

#[test]
fn who_looks_for_holes_has_nothing_read() {
    // Larger than the cache.
    const SIZE: u64 = 600 << 20;
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = fs::File::create_new(backing.path().join("file")).unwrap();
    for (at, length) in [(0, 5000), (3 << 20, 3 << 20), ((40 << 20) + 4096, 1), (500 << 20, 10_000)] {
        file.write_all_at(&content(1, length), at).unwrap();
    }
    file.set_len(SIZE).unwrap();
    let cache = Cache::over(settings(), backing);
    let both = |file: &fs::File| {
        let mut at = 0;
        let mut found = Vec::new();
        for hole in [true, false].into_iter().cycle() {
            let from = if hole { SeekFrom::Hole(at) } else { SeekFrom::Data(at) };
            let expected = rustix::fs::seek(file, from).map_err(rustix::io::Errno::raw_os_error);
            assert_eq!(cache.seek("file", at, hole), expected);
            match expected {
                Ok(next) if next < SIZE => at = next,
                _ => break,
            }
            found.push(at);
        }
        found
    };
    assert_eq!(both(&file).len(), 7);
    assert_eq!(cache.owner().status().fetched_bytes, 0);
    // What was changed here is where it was changed, and the rest is as it was.
    cache.write("file", 90 << 20, &[7; 4096]).unwrap();
    cache.punch("file", 4 << 20, 1 << 20).unwrap();
    file.write_all_at(&[7; 4096], 90 << 20).unwrap();
    punch(&file, 4 << 20, 1 << 20);
    assert_eq!(both(&file).len(), 11);
    for at in [0, 3 << 20, 40 << 20, 500 << 20] {
        let mut expected = vec![0; 1 << 20];
        file.read_exact_at(&mut expected, at).unwrap();
        assert_data(&cache.read("file", at, 1 << 20), &Ok(expected));
    }
}

#[test]
fn special_files_and_strange_names_come_to_the_backing_directory() {
    use std::os::unix::ffi::OsStrExt;
    let cache = Cache::new(settings());
    cache.special("pipe", libc::S_IFIFO).unwrap();
    let strange = OsStr::from_bytes(b"not \xff UTF-8\n");
    cache.create(Path::new(strange), 0o600).unwrap();
    let long = "n".repeat(255);
    cache.create(long.as_str(), 0o600).unwrap();
    assert_eq!(cache.create("n".repeat(256).as_str(), 0o600), Err(libc::ENAMETOOLONG));
    cache.flush();
    assert!(fs::symlink_metadata(cache.backing().join("pipe")).unwrap().file_type().is_fifo());
    assert!(cache.backing().join(strange).exists() && cache.backing().join(&long).exists());
}
