//! What a process that serves a cache leaves when it is killed at any moment: everything that was answered is there, and what was
//! not answered was done or not.

#![allow(clippy::unwrap_used)]

mod client;

use std::collections::BTreeMap;
use std::fs;
use std::io::{PipeReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use client::{Cache, same_trees};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};
use ondeck_cachefs::{OpenError, Owner};
use ondeck_core::Bytes;

/// Where the killed process finds its directories and the seed of what it does.
const CHILD: &str = "ONDECK_CRASH_CHILD";

const PATHS: [&str; 10] = ["a", "b", "c", "d", "a/x", "a/y", "b/x", "b/y", "a/x/p", "c/q"];

/// Numbers that follow from a seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn path(&mut self) -> &'static str {
        PATHS[self.below(PATHS.len() as u64) as usize]
    }
}

#[derive(Clone, Debug)]
enum Step {
    Create(&'static str),
    MakeDirectory(&'static str),
    Write(&'static str, u64, Vec<u8>),
    Truncate(&'static str, u64),
    Punch(&'static str, u64, u64),
    Unlink(&'static str),
    RemoveDirectory(&'static str),
    Rename(&'static str, &'static str),
    Link(&'static str, &'static str),
    Mode(&'static str, u32),
}

fn step(numbers: &mut Numbers) -> Step {
    match numbers.below(20) {
        0..4 => Step::Create(numbers.path()),
        4..6 => Step::MakeDirectory(numbers.path()),
        6..11 => {
            let path = numbers.path();
            let offset = if numbers.below(2) == 0 { numbers.below(20_000) } else { numbers.below(3 << 20) };
            let length =
                if numbers.below(4) == 0 { numbers.below(900_000) } else { numbers.below(9_000) } + 1;
            let seed = numbers.next();
            let data = (0..length).map(|at| (at.wrapping_mul(seed | 1) >> 9) as u8 | 1).collect();
            Step::Write(path, offset, data)
        }
        11 => Step::Truncate(numbers.path(), numbers.below(2 << 20)),
        12 => Step::Punch(numbers.path(), numbers.below(1 << 20), numbers.below(1 << 20) + 1),
        13..15 => Step::Unlink(numbers.path()),
        15 => Step::RemoveDirectory(numbers.path()),
        16..18 => Step::Rename(numbers.path(), numbers.path()),
        18 => Step::Link(numbers.path(), numbers.path()),
        _ => Step::Mode(numbers.path(), 0o600 | numbers.below(0o200) as u32),
    }
}

fn is_within(a: &str, b: &str) -> bool {
    b.starts_with(&format!("{a}/")) || a.starts_with(&format!("{b}/"))
}

/// Does a step to the cache; what is refused is refused.
fn to_cache(cache: &Cache, step: &Step) {
    let _refused = match step {
        Step::Create(path) => cache.create(path, 0o644),
        Step::MakeDirectory(path) => cache.make_directory(path, 0o755),
        Step::Write(path, offset, data) => cache.write(path, *offset, data),
        Step::Truncate(path, size) => cache.truncate(path, *size),
        Step::Punch(path, offset, length) => cache.punch(path, *offset, *length),
        Step::Unlink(path) => cache.unlink(path),
        Step::RemoveDirectory(path) => cache.remove_directory(path),
        Step::Rename(from, to) if is_within(from, to) => Ok(()),
        Step::Rename(from, to) => cache.rename(from, to, 0),
        Step::Link(from, to) => match cache.attributes(from) {
            Ok(found) if found.mode & libc::S_IFMT != libc::S_IFDIR => cache.link(from, to),
            _ => Ok(()),
        },
        Step::Mode(path, mode) => cache.set_mode(path, *mode | 0o700),
    };
}

/// Does a step to a plain directory.
fn to_plain(root: &Path, step: &Step) {
    use std::os::unix::fs::PermissionsExt;
    let regular = |path: &str| {
        let path = root.join(path);
        fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file)?;
        fs::File::options().read(true).write(true).open(path).ok()
    };
    let set_mode =
        |path: &str, mode| fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
    match step {
        Step::Create(path) => {
            if fs::File::create_new(root.join(path)).is_ok() {
                set_mode(path, 0o644);
            }
        }
        Step::MakeDirectory(path) => {
            if fs::create_dir(root.join(path)).is_ok() {
                set_mode(path, 0o755);
            }
        }
        Step::Write(path, offset, data) => {
            if let Some(file) = regular(path) {
                file.write_all_at(data, *offset).unwrap();
            }
        }
        Step::Truncate(path, size) => {
            if let Some(file) = regular(path) {
                file.set_len(*size).unwrap();
            }
        }
        Step::Punch(path, offset, length) => {
            if let Some(file) = regular(path) {
                use rustix::fs::FallocateFlags;
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(file, flags, *offset, *length).unwrap();
            }
        }
        Step::Unlink(path) => {
            if fs::symlink_metadata(root.join(path)).is_ok_and(|found| !found.is_dir()) {
                fs::remove_file(root.join(path)).unwrap();
            }
        }
        Step::RemoveDirectory(path) => drop(fs::remove_dir(root.join(path))),
        Step::Rename(from, to) if is_within(from, to) => {}
        Step::Rename(from, to) => drop(fs::rename(root.join(from), root.join(to))),
        Step::Link(from, to) => {
            if fs::symlink_metadata(root.join(from)).is_ok_and(|found| !found.is_dir()) {
                drop(fs::hard_link(root.join(from), root.join(to)));
            }
        }
        Step::Mode(path, mode) => {
            if root.join(path).exists() {
                set_mode(path, *mode | 0o700);
            }
        }
    }
}

/// Everything in a tree that a crash may not change: kinds, modes and contents by path.
fn tree(root: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut stack = vec![PathBuf::new()];
    while let Some(dir) = stack.pop() {
        for entry in fs::read_dir(root.join(&dir)).unwrap() {
            let path = dir.join(entry.unwrap().file_name());
            let metadata = fs::symlink_metadata(root.join(&path)).unwrap();
            if metadata.is_dir() {
                stack.push(path.clone());
            }
            let content = if metadata.is_file() { fs::read(root.join(&path)).unwrap() } else { Vec::new() };
            found.insert(path, (metadata.mode(), content));
        }
    }
    found
}

fn settings() -> Settings {
    // Writing back all the time, so that it is in the middle of it when it is killed.
    // No name may stay known that need not.
    let settings =
        Settings { age: Duration::from_millis(3), names: Bytes(0), ..Settings::new(LEAST_CAPACITY) };
    if std::env::var_os(SHORTENS).is_some() { Settings { journal: Bytes(0), ..settings } } else { settings }
}

/// Set for a process that makes its journal anew after each record.
const SHORTENS: &str = "ONDECK_CRASH_SHORTENS";

/// The process that is killed.
#[test]
fn the_process_that_is_killed() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let mut told = told.split(' ');
    let (backing, store, seed) = (told.next().unwrap(), told.next().unwrap(), told.next().unwrap());
    let cache = Cache::at(settings(), Path::new(backing), Path::new(store));
    let mut numbers = Numbers(seed.parse().unwrap());
    let mut out = fs::File::create("/proc/self/fd/9").unwrap();
    out.write_all(b"r").unwrap();
    loop {
        to_cache(&cache, &step(&mut numbers));
        cache.forget_names();
        out.write_all(b".").unwrap();
    }
}

/// Starts one of the processes that are killed; what it writes to its pipe can be read.
fn start(which: &str, backing: &Path, store: &Path, seed: u64, shortens: bool) -> (Child, PipeReader) {
    let (reader, writer) = std::io::pipe().unwrap();
    rustix::io::fcntl_setfd(&writer, rustix::io::FdFlags::empty()).unwrap();
    let command = format!("exec \"$0\" --exact {which} --nocapture 9>&{} >/dev/null", writer.as_raw_fd());
    let mut child = Command::new("bash");
    if shortens {
        child.env(SHORTENS, "");
    }
    let child = child
        .args(["-c", &command])
        .arg(std::env::current_exe().unwrap())
        .env(CHILD, format!("{} {} {seed}", backing.display(), store.display()))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    (child, reader)
}

/// Another one, which changes a file's data, and its mode while that is written back.
#[test]
fn the_process_that_changes_modes() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let mut told = told.split(' ');
    let (backing, store) = (told.next().unwrap(), told.next().unwrap());
    let cache = Cache::at(settings(), Path::new(backing), Path::new(store));
    let mut out = fs::File::create("/proc/self/fd/9").unwrap();
    let data = vec![1; 256 << 10];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                let _ = cache.owner().flush(&mut |_| true);
            }
        });
        loop {
            cache.write("file", 0, &data).unwrap();
            for mode in 0..64 {
                cache.set_mode("file", 0o700 | mode).unwrap();
            }
            out.write_all(b".").unwrap();
        }
    });
}

#[test]
fn a_file_that_was_changed_while_it_was_written_back_is_known_after_a_kill() {
    if std::env::var(CHILD).is_ok() {
        return;
    }
    // On a disk, where it takes a while.
    let (backing, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    fs::write(backing.path().join("file"), "").unwrap();
    let mut numbers = Numbers(1);
    for life in 0..40 {
        let (mut child, mut reader) =
            start("the_process_that_changes_modes", backing.path(), store.path(), 0, false);
        reader.read_exact(&mut [0; 2]).unwrap();
        std::thread::sleep(Duration::from_micros(numbers.below(5000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let cache = Cache::at(settings(), backing.path(), store.path());
        cache.flush();
        assert_eq!(cache.owner().status().conflicts, [], "life {life}");
    }
}

#[test]
fn a_further_name_that_was_found_after_its_file_was_changed_is_removed_by_the_next_process() {
    let [backing, store] = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    fs::write(backing.path().join("a"), "data").unwrap();
    fs::hard_link(backing.path().join("a"), backing.path().join("b")).unwrap();
    let settings = Settings { idle: true, ..settings() };
    let mut cache = Cache::at(settings, backing.path(), store.path());
    cache.write("a", 0, b"DATA").unwrap();
    cache.unlink("b").unwrap();
    cache.create("b", 0o644).unwrap();
    cache.replace();
    cache.flush();
    assert_eq!(cache.owner().status().conflicts, []);
    assert_eq!(tree(backing.path()).into_keys().collect::<Vec<_>>(), [Path::new("a"), Path::new("b")]);
    assert_eq!(fs::read(backing.path().join("a")).unwrap(), b"DATA");
    assert_eq!(fs::read(backing.path().join("b")).unwrap(), b"");
}

#[test]
fn a_journal_that_ends_anywhere_is_recovered() {
    let [backing, store] = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    let settings = || Settings { idle: true, ..settings() };
    let cache = Cache::at(settings(), backing.path(), store.path());
    let journal = store.path().join("journal");
    cache.create("a", 0o644).unwrap();
    cache.write("a", 0, b"data").unwrap();
    let begin = fs::metadata(&journal).unwrap().len();
    cache.make_directory("d", 0o755).unwrap();
    cache.create("d/new", 0o644).unwrap();
    cache.write("d/new", 0, b"new").unwrap();
    cache.link("a", "b").unwrap();
    cache.rename("d/new", "c", 0).unwrap();
    cache.symlink("link", "c").unwrap();
    cache.unlink("a").unwrap();
    cache.owner().stop();
    let whole = fs::read(&journal).unwrap();
    let end = whole.len();
    let mut seen = Vec::new();
    for length in (begin as usize..end).step_by(11).chain([end]) {
        let [backing, other] = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
        let copied = Command::new("cp").arg("-aT").args([store.path(), other.path()]).status();
        assert!(copied.unwrap().success());
        fs::write(other.path().join("journal"), &whole[..length]).unwrap();
        let cache = Cache::at(settings(), backing.path(), other.path());
        let shown = cache.contents();
        cache.flush();
        assert_eq!(tree(backing.path()), shown, "{length} bytes of {end}");
        seen.push(shown.len());
    }
    seen.dedup();
    assert_eq!(seen, [1, 2, 3, 4, 5, 4], "what is there after each of the operations");
}

#[test]
fn a_journal_that_is_made_anew_says_how_it_is_after_the_change_that_made_it_too_long() {
    let settings = Settings { idle: true, journal: Bytes(0), ..settings() };
    let mut cache = Cache::new(settings);
    let data: Vec<u8> = (0..40_000u32).map(|at| (at % 251) as u8 + 1).collect();
    for name in ["cut", "longer", "punched"] {
        cache.create(name, 0o644).unwrap();
        cache.write(name, 0, &data).unwrap();
    }
    cache.truncate("cut", 10).unwrap();
    cache.replace();
    cache.truncate("longer", 50_000).unwrap();
    cache.replace();
    cache.punch("punched", 4096, 8192).unwrap();
    cache.replace();
    let mut punched = data.clone();
    punched[4096..4096 + 8192].fill(0);
    let expected =
        [("cut", &data[..10]), ("longer", &[&data[..], &[0; 10_000]].concat()), ("punched", &punched)];
    for (name, content) in &expected {
        assert_eq!(cache.attributes(name).unwrap().size, content.len() as u64, "{name}");
        assert!(cache.read(name, 0, 60_000).unwrap() == *content, "{name}");
    }
    cache.flush();
    for (name, content) in &expected {
        assert!(fs::read(cache.backing().join(name)).unwrap() == *content, "{name}");
    }
    // What is done and was announced so is not done once more.
    cache.rename("cut", "moved", 0).unwrap();
    cache.unlink("longer").unwrap();
    cache.flush();
    fs::write(cache.backing().join("cut"), "of others").unwrap();
    fs::write(cache.backing().join("longer"), "of others").unwrap();
    cache.replace();
    cache.flush();
    assert_eq!(cache.owner().status().conflicts, []);
    let names: Vec<PathBuf> = tree(cache.backing()).into_keys().collect();
    assert_eq!(names, ["cut", "longer", "moved", "punched"].map(PathBuf::from));
}

#[test]
fn what_was_being_written_behind_the_end_does_not_come_back_when_the_file_grows() {
    let mut cache = Cache::new(Settings { idle: true, ..settings() });
    cache.create("file", 0o644).unwrap();
    cache.write("file", 0, &[1; 100]).unwrap();
    // As a process leaves it that is killed before it has noted what it has written.
    let files = tree(cache.store()).into_iter();
    let written =
        files.filter(|(_, (_, data))| data.starts_with(&[1; 100])).map(|(path, _)| cache.store().join(path));
    let [written] = &written.collect::<Vec<_>>()[..] else { panic!("where is it in the store?") };
    fs::OpenOptions::new().append(true).open(written).unwrap().write_all(&[2; 100]).unwrap();
    cache.replace();
    cache.truncate("file", 200).unwrap();
    let expected = [[1; 100], [0; 100]].concat();
    assert_eq!(cache.read("file", 0, 300).unwrap(), expected);
    cache.flush();
    assert_eq!(fs::read(cache.backing().join("file")).unwrap(), expected);
}

#[test]
fn what_was_half_made_and_is_not_needed_any_more_is_removed() {
    let [backing, store] = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    let settings = Settings { idle: true, ..settings() };
    let mut cache = Cache::at(settings, backing.path(), store.path());
    cache.create("a", 0o644).unwrap();
    cache.link("a", "b").unwrap();
    let id = fs::read_to_string(store.path().join("id")).unwrap();
    let open = cache.open("a").unwrap();
    fs::write(backing.path().join(format!(".ondeck-cache-{id}-{:x}", open.ino)), "").unwrap();
    cache.close(open);
    cache.unlink("a").unwrap();
    cache.unlink("b").unwrap();
    cache.replace();
    cache.flush();
    assert!(tree(backing.path()).is_empty());
}

/// Whether a tree is the one before a step, with the step done by halves: some bytes of a write are the former ones.
fn is_between(
    found: &BTreeMap<PathBuf, (u32, Vec<u8>)>,
    before: &BTreeMap<PathBuf, (u32, Vec<u8>)>,
    after: &BTreeMap<PathBuf, (u32, Vec<u8>)>,
) -> bool {
    found.keys().eq(after.keys())
        && found.iter().all(|(path, (mode, content))| {
            let (Some((mode_before, old)), Some((mode_after, new))) = (before.get(path), after.get(path))
            else {
                return false;
            };
            let byte = |content: &[u8], at: usize| content.get(at).copied().unwrap_or(0);
            (mode == mode_before || mode == mode_after)
                && (content.len() == old.len() || content.len() == new.len())
                && content
                    .iter()
                    .enumerate()
                    .all(|(at, found)| *found == byte(old, at) || *found == byte(new, at))
        })
}

fn round(seed: u64, shortens: bool) {
    let (backing, store) =
        (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let plain = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut numbers = Numbers(seed);
    let mut lives = Numbers(seed ^ 0x9e37_79b9);
    // It is killed more than once, over the same directories.
    for _ in 0..3 {
        let (mut child, mut reader) =
            start("the_process_that_is_killed", backing.path(), store.path(), numbers.0, shortens);
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        // A moment by a count of steps and some microseconds, so that it comes in the middle of one.
        let steps = lives.below(60) + 1;
        let mut done = vec![0; steps as usize];
        reader.read_exact(&mut done).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        std::thread::sleep(Duration::from_micros(lives.below(3000)));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        let answered = steps + rest.len() as u64;
        for _ in 0..answered {
            to_plain(plain.path(), &step(&mut numbers));
        }
        let before = tree(plain.path());
        let position = numbers.0;
        let next = step(&mut numbers);
        to_plain(plain.path(), &next);
        let after = tree(plain.path());
        let cache = Cache::at(settings(), backing.path(), store.path());
        let shown = cache.contents();
        let what = format!("seed {seed}, after {answered} steps, before {:.200}", format!("{next:?}"));
        if shown == before && shown != after {
            // The last one was not done: what follows does not know of it.
            fs::remove_dir_all(plain.path()).unwrap();
            fs::create_dir(plain.path()).unwrap();
            cache.copy_to(plain.path());
            numbers.0 = position;
        } else if shown != after {
            assert!(is_between(&shown, &before, &after), "{what}: {}", difference(&shown, &before, &after));
            fs::remove_dir_all(plain.path()).unwrap();
            fs::create_dir(plain.path()).unwrap();
            cache.copy_to(plain.path());
        }
        if lives.below(3) == 0 {
            cache.flush();
            assert_eq!(tree(backing.path()), shown, "{what}: what is on disk after a flush");
        }
        drop(cache);
    }
    let cache = Cache::at(settings(), backing.path(), store.path());
    cache.flush();
    assert_eq!(
        tree(backing.path()).keys().collect::<Vec<_>>(),
        tree(plain.path()).keys().collect::<Vec<_>>()
    );
    let _ = same_trees;
}

fn difference(
    shown: &BTreeMap<PathBuf, (u32, Vec<u8>)>,
    before: &BTreeMap<PathBuf, (u32, Vec<u8>)>,
    after: &BTreeMap<PathBuf, (u32, Vec<u8>)>,
) -> String {
    let names = |tree: &BTreeMap<PathBuf, (u32, Vec<u8>)>| {
        let of = |(path, (mode, content)): (&PathBuf, &(u32, Vec<u8>))| {
            format!("{} {mode:o} {}", path.display(), content.len())
        };
        tree.iter().map(of).collect::<Vec<_>>().join(", ")
    };
    let first = after.iter().find_map(|(path, (_, content))| {
        let (_, found) = shown.get(path)?;
        let (_, old) = before.get(path)?;
        let at = content.iter().zip(found).position(|(a, b)| a != b)?;
        Some(format!(
            "{} at {at}: {} instead of {} (before {:?})",
            path.display(),
            found[at],
            content[at],
            old.get(at)
        ))
    });
    format!("shown: {}; before: {}; after: {}; {first:?}", names(shown), names(before), names(after))
}

#[test]
fn what_was_answered_is_there_after_a_kill_at_any_moment() {
    if std::env::var(CHILD).is_ok() {
        return;
    }
    let rounds: u64 =
        std::env::var("ONDECK_CRASHES").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(20);
    let first: u64 = std::env::var("ONDECK_CRASH_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for seed in first..first + rounds {
        // In every second one the journal is made anew all the time.
        round(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, seed % 2 == 0);
    }
}

#[test]
fn data_that_somebody_has_removed_from_the_store_is_missed_and_never_written_back_as_zeros() {
    if std::env::var(CHILD).is_ok() {
        return;
    }
    let [backing, store] = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    fs::write(backing.path().join("file"), "what was there").unwrap();
    let settings = || Settings { idle: true, ..Settings::new(LEAST_CAPACITY) };
    let cache = Cache::at(settings(), backing.path(), store.path());
    cache.make_directory("d", 0o755).unwrap();
    cache.create("d/new", 0o644).unwrap();
    cache.write("d/new", 0, b"new").unwrap();
    cache.write("file", 0, b"WHAT").unwrap();
    cache.punch("file", 0, 2).unwrap();
    drop(cache);
    let mut files: Vec<PathBuf> = Vec::new();
    for directory in fs::read_dir(store.path()).unwrap().map(|entry| entry.unwrap().path()) {
        if directory.is_dir() {
            files.extend(fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    assert_eq!(files.len(), 2);
    let journal = fs::read(store.path().join("journal")).unwrap();
    let mut named = Vec::new();
    for file in files {
        let data = fs::read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        // Also when it is tried again.
        for _ in 0..2 {
            let root = rustix::fs::open(backing.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty());
            let opened = Owner::open(root.unwrap(), store.path(), None, false, settings());
            match opened.err().unwrap() {
                OpenError::Missing { path, ino } => {
                    assert_eq!(file.file_name().unwrap().to_str().unwrap(), format!("{ino:x}"));
                    named.push(path);
                }
                other => panic!("{other}"),
            }
            assert!(fs::read(store.path().join("journal")).unwrap() == journal, "the journal was changed");
            assert!(!file.exists());
        }
        fs::write(&file, data).unwrap();
    }
    named.sort();
    assert_eq!(named, ["d/new", "d/new", "file", "file"]);
    assert_eq!(fs::read(backing.path().join("file")).unwrap(), b"what was there");
    let cache = Cache::at(settings(), backing.path(), store.path());
    assert_eq!(cache.read("file", 0, 14).unwrap(), b"\0\0AT was there");
    assert_eq!(cache.read("d/new", 0, 3).unwrap(), b"new");
}

/// A lease of a file: whoever else opens it waits until it is given back, which nobody does here.
struct Lease(fs::File);

impl Lease {
    fn of(path: &Path) -> Lease {
        extern "C" fn hears_it(_: libc::c_int) {}
        // SAFETY: the handler does nothing; without one the kernel's word that a lease is to be given back would end this process.
        unsafe { libc::signal(libc::SIGIO, hears_it as extern "C" fn(libc::c_int) as libc::sighandler_t) };
        let lease = Lease(fs::OpenOptions::new().read(true).write(true).open(path).unwrap());
        assert_eq!(lease.does(libc::F_SETLEASE, libc::F_WRLCK), 0);
        lease
    }

    /// Whether somebody waits for it.
    fn is_wanted(&self) -> bool {
        self.does(libc::F_GETLEASE, 0) != libc::F_WRLCK
    }

    fn does(&self, command: libc::c_int, kind: libc::c_int) -> libc::c_int {
        // SAFETY: it changes nothing but a lease of a file that is open here.
        unsafe { libc::fcntl(self.0.as_raw_fd(), command, kind) }
    }
}

/// Another one, which puts a file beside others' work that it can't read yet, and changes its mode meanwhile.
#[test]
fn the_process_that_puts_a_file_aside() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let mut told = told.split(' ');
    let (backing, store) = (PathBuf::from(told.next().unwrap()), told.next().unwrap());
    let cache = Cache::at(Settings { idle: true, ..settings() }, &backing, Path::new(store));
    let mut out = fs::File::create("/proc/self/fd/9").unwrap();
    cache.write("file", 0, b"ours!!").unwrap();
    fs::write(backing.join("file"), "theirs").unwrap();
    let lease = Lease::of(&backing.join("file"));
    std::thread::scope(|scope| {
        scope.spawn(|| cache.flush());
        while !lease.is_wanted() {
            std::thread::sleep(Duration::from_millis(1));
        }
        cache.set_mode("file", 0o640).unwrap();
        out.write_all(b".").unwrap();
    });
}

#[test]
fn what_others_have_changed_is_theirs_after_a_kill_though_ours_was_changed_while_it_was_put_aside() {
    if std::env::var(CHILD).is_ok() {
        return;
    }
    for shortens in [false, true] {
        let [backing, store] = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
        fs::write(backing.path().join("file"), "before").unwrap();
        let which = "the_process_that_puts_a_file_aside";
        let (mut child, mut reader) = start(which, backing.path(), store.path(), 0, shortens);
        reader.read_exact(&mut [0; 1]).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let cache = Cache::at(settings(), backing.path(), store.path());
        cache.flush();
        assert_eq!(fs::read(backing.path().join("file")).unwrap(), b"theirs");
        let conflicts = cache.owner().status().conflicts;
        assert_eq!(conflicts.len(), 1, "{conflicts:?}");
        let ours = backing.path().join(conflicts[0].ours.as_ref().unwrap());
        assert_eq!(fs::read(ours).unwrap(), b"ours!!");
    }
}

/// A user who is nobody else.
const USER: u32 = 4711;

/// One of a user's own, which opens a file against its mode, and does not come to its end; with an odd seed only to read it.
#[test]
fn the_process_that_opens_what_is_closed() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let mut told = told.split(' ');
    let (backing, store) = (PathBuf::from(told.next().unwrap()), told.next().unwrap());
    let reads = told.next() == Some("1");
    let settings = Settings { idle: true, ..settings() };
    let cache = Cache::of_user_at(settings, USER, &backing, Path::new(store));
    let lease = Lease::of(&backing.join("file"));
    let mut out = fs::File::create("/proc/self/fd/9").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if reads {
                let _ = cache.read("file", 0, 6);
            } else {
                cache.write("file", 0, b"after!").unwrap();
                cache.flush();
            }
        });
        while !lease.is_wanted() {
            std::thread::sleep(Duration::from_millis(1));
        }
        out.write_all(b".").unwrap();
    });
}

/// Another one, which writes what is in a directory whose mode keeps even its owner out.
#[test]
fn the_process_that_writes_in_what_is_closed() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let mut told = told.split(' ');
    let (backing, store) = (told.next().unwrap(), told.next().unwrap());
    // Who has looked once may not look again.
    let settings = Settings { names: Settings::new(LEAST_CAPACITY).names, ..settings() };
    let cache = Cache::of_user_at(settings, USER, Path::new(backing), Path::new(store));
    let mut out = fs::File::create("/proc/self/fd/9").unwrap();
    cache.write("dir/file", 0, b"after!").unwrap();
    cache.set_mode("dir", 0o600).unwrap();
    cache.flush();
    loop {
        cache.write("dir/file", 0, b"again!").unwrap();
        cache.flush();
        out.write_all(b".").unwrap();
    }
}

/// A directory of the user's own.
fn of_user(files: &[&str]) -> tempfile::TempDir {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    let owned = |path: &Path| std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
    owned(backing.path());
    for file in files.iter().map(|file| backing.path().join(file)) {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "before").unwrap();
        owned(file.parent().unwrap());
        owned(&file);
    }
    backing
}

#[test]
fn what_is_opened_against_its_mode_has_that_mode_again_after_a_kill() {
    use std::os::unix::fs::PermissionsExt;
    if std::env::var(CHILD).is_ok() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        ondeck_skip::skipped("it needs root, to become another user");
        return;
    }
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    for reads in [false, true] {
        let (backing, store) = (of_user(&["file"]), tempfile::tempdir_in("/dev/shm").unwrap());
        let file = backing.path().join("file");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o044)).unwrap();
        let which = "the_process_that_opens_what_is_closed";
        let (mut child, mut reader) = start(which, backing.path(), store.path(), reads.into(), false);
        reader.read_exact(&mut [0; 1]).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(mode(&file), 0o644, "it is open now");
        let cache = Cache::of_user_at(settings(), USER, backing.path(), store.path());
        cache.flush();
        assert_eq!(mode(&file), 0o044);
        assert_eq!(fs::read(&file).unwrap(), if reads { b"before" } else { b"after!" });
        assert_eq!(cache.owner().status().conflicts, []);
    }

    let (backing, store) = (of_user(&["dir/file"]), tempfile::tempdir_in("/dev/shm").unwrap());
    let mut numbers = Numbers(7);
    for life in 0..40 {
        // So that it can be looked at once.
        fs::set_permissions(backing.path().join("dir"), fs::Permissions::from_mode(0o700)).unwrap();
        let which = "the_process_that_writes_in_what_is_closed";
        let (mut child, mut reader) = start(which, backing.path(), store.path(), 0, false);
        reader.read_exact(&mut [0; 2]).unwrap();
        std::thread::sleep(Duration::from_micros(numbers.below(3000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let cache = Cache::of_user_at(settings(), USER, backing.path(), store.path());
        cache.flush();
        assert_eq!(mode(&backing.path().join("dir")), 0o600, "life {life}");
    }
}
