//! What `stage` promises, each promise as a test on real filesystems: the disk that holds the temporary directory,
//! and tmpfs at /dev/shm.

#![allow(clippy::unwrap_used)]

mod trees;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ondeck_core::{Bytes, Rate};
use ondeck_transfer::{
    Checksum, Event, Exclude, Gate, Monitor, Options, Progress, StageError, Summary, manifest,
};
use proptest::prelude::*;
use tempfile::TempDir;

/// A copy with its failed paths.
fn stage_with(source: &Path, target: &Path, options: &Options) -> (Result<Summary, StageError>, Vec<String>) {
    let failures = Mutex::new(Vec::new());
    let event = |event: Event<'_>| {
        if let Event::Failed(error) = event {
            failures.lock().unwrap().push(error.to_string());
        }
    };
    let progress = Progress::new();
    let summary =
        ondeck_transfer::stage(source, target, options, &Monitor { progress: &progress, event: &event });
    (summary, failures.into_inner().unwrap())
}

fn stage(source: &Path, target: &Path, options: &Options) -> Summary {
    let (summary, failures) = stage_with(source, target, options);
    assert_eq!(failures, Vec::<String>::new());
    summary.unwrap()
}

fn ram() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn disk() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn options(manifest: &Path) -> Options {
    Options { manifest: Some(manifest.to_owned()), threads: 2, ..Options::default() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_random_tree_keeps_every_attribute_from_disk_to_ram_and_back(tree in trees::tree()) {
        if !trees::is_root() {
            ondeck_skip::skipped("making trees of all owners and modes needs root");
            return Ok(());
        }
        let (ram, disk) = (ram(), disk());
        let (first, second, third) = (disk.path().join("a"), ram.path().join("b"), disk.path().join("c"));
        trees::make(&first, &tree);
        let manifest = disk.path().join("manifest");
        let verify = Options { verify: true, ..options(&manifest) };
        let before = trees::look(&first).len();
        stage(&first, &second, &verify);
        trees::assert_same(&first, &second);
        fs::remove_file(&manifest).unwrap();
        stage(&second, &third, &Options { checksum: Checksum::Blake3, ..verify.clone() });
        trees::assert_same(&first, &third);
        // The manifest names every entry but the root and the directories.
        let directories = trees::look(&first).len() - manifest::read(&manifest).unwrap().count();
        prop_assert!(directories <= before);
        // Again: nothing is copied, nothing changes.
        let again = stage(&second, &third, &Options { checksum: Checksum::Blake3, ..verify });
        prop_assert_eq!(again.files, 0);
        trees::assert_same(&first, &third);
        // Without a checksum data goes another way: through the kernel alone.
        let (fourth, fifth) = (ram.path().join("d"), disk.path().join("e"));
        let unchecked = Options { checksum: Checksum::None, ..Options::default() };
        stage(&third, &fourth, &unchecked);
        stage(&fourth, &fifth, &unchecked);
        trees::assert_same(&first, &fifth);
    }

    #[test]
    fn a_copy_over_an_older_tree_with_delete_makes_it_equal(old in trees::tree(), new in trees::tree()) {
        if !trees::is_root() {
            ondeck_skip::skipped("making trees of all owners and modes needs root");
            return Ok(());
        }
        let ram = ram();
        let (source, target) = (ram.path().join("new"), ram.path().join("old"));
        trees::make(&source, &new);
        trees::make(&target, &old);
        stage(&source, &target, &Options { delete: true, ..Options::default() });
        trees::assert_same(&source, &target);
    }
}

#[test]
fn an_interrupted_copy_resumes_and_copies_only_what_is_missing() {
    let (ram, disk) = (ram(), disk());
    let (source, target, manifest) = (disk.path().join("s"), ram.path().join("t"), disk.path().join("m"));
    fs::create_dir(&source).unwrap();
    for number in 0..400 {
        fs::write(source.join(format!("f{number}")), vec![number as u8; 10_000]).unwrap();
    }
    let progress = Progress::new();
    let slow = Options { bandwidth: Some(Rate(Bytes(4 << 20))), ..options(&manifest) };
    let monitor = Monitor { progress: &progress, event: &|_| {} };
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| ondeck_transfer::stage(&source, &target, &slow, &monitor));
        wait_until(|| progress.entries_done.load(Ordering::Relaxed) >= 100);
        progress.cancel.store(true, Ordering::Relaxed);
        assert!(matches!(copy.join().unwrap(), Err(StageError::Interrupted)));
    });
    assert!(!target.exists(), "an incomplete directory has no name yet");
    let summary = stage(&source, &target, &options(&manifest));
    assert!(summary.unchanged >= 100 && summary.files + summary.unchanged == 400, "{summary:?}");
    trees::assert_same(&source, &target);
    assert_eq!(fs::read_dir(ram.path()).unwrap().count(), 1, "nothing else is left behind");
    assert_eq!(manifest::read(&manifest).unwrap().count(), 400);
    // A file that was changed in the target is not what the manifest promised.
    fs::write(target.join("f7"), "damaged").unwrap();
    assert_eq!(stage(&source, &target, &options(&manifest)).files, 1);
    trees::assert_same(&source, &target);
}

#[test]
fn a_file_of_several_gib_is_copied_in_chunks_with_its_holes() {
    let ram = ram();
    let (source, target, manifest) = (ram.path().join("s"), ram.path().join("t"), ram.path().join("m"));
    let file = fs::File::create(&source).unwrap();
    file.set_len((5 << 30) + 12_345).unwrap();
    for offset in [0, (16 << 20) - 1, 70 << 20, (4 << 30) - 3, 5 << 30] {
        file.write_all_at(&vec![offset as u8 | 1; 100_000], offset).unwrap();
    }
    file.set_len((5 << 30) + 12_345).unwrap();
    let summary = stage(&source, &target, &Options { verify: true, ..options(&manifest) });
    assert_eq!((summary.files, summary.verified.unwrap().matching), (1, 1));
    let (left, right) = (fs::metadata(&source).unwrap(), fs::metadata(&target).unwrap());
    assert_eq!(left.len(), right.len());
    assert!(right.blocks() <= left.blocks() + 64, "holes are kept: {} and {}", left.blocks(), right.blocks());
    let target = fs::File::open(&target).unwrap();
    for offset in [0, (16 << 20) - 1, 70 << 20, (4 << 30) - 3] {
        let (mut left, mut right) = (vec![0; 200_000], vec![0; 200_000]);
        file_read(&source, &mut left, offset);
        target.read_exact_at(&mut right, offset).unwrap();
        assert!(left == right, "at {offset}");
    }
    let record = manifest::read(&manifest).unwrap().next().unwrap().unwrap();
    let mut line = Vec::new();
    record.write_to(&mut line);
    assert!(line.starts_with(b"f\txxh3-128/16MiB:"));
}

fn file_read(path: &Path, buffer: &mut [u8], offset: u64) {
    fs::File::open(path).unwrap().read_exact_at(buffer, offset).unwrap();
}

#[test]
fn paths_longer_than_path_max_and_very_deep_trees_are_copied() {
    use rustix::fs::{AtFlags, CWD, Mode, OFlags};
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir(&source).unwrap();
    let open = |dir: &_, name: &str| rustix::fs::openat(dir, name, OFlags::DIRECTORY, Mode::empty()).unwrap();
    // 3000 levels of 50 bytes: 150 kB of path, and more descriptors than are kept open.
    let name = "d".repeat(50);
    // Deleting a tree needs a descriptor for each level, of which an ordinary user has about a thousand.
    let levels = if trees::is_root() { 3000 } else { 400 };
    let mut dir = open(&rustix::fs::openat(CWD, &source, OFlags::DIRECTORY, Mode::empty()).unwrap(), ".");
    for _ in 0_u64..levels {
        rustix::fs::mkdirat(&dir, &name, Mode::RWXU).unwrap();
        dir = open(&dir, &name);
        let flags = OFlags::CREATE | OFlags::WRONLY;
        drop(rustix::fs::openat(&dir, "file", flags, Mode::RUSR).unwrap());
    }
    let target = ram.path().join("t");
    let manifest = ram.path().join("m");
    let summary = stage(&source, &target, &Options { verify: true, ..options(&manifest) });
    assert_eq!((summary.files, summary.directories), (levels, levels + 1));
    let mut dir = rustix::fs::openat(CWD, &target, OFlags::DIRECTORY, Mode::empty()).unwrap();
    for _ in 0_u64..levels {
        dir = open(&dir, &name);
        rustix::fs::statat(&dir, "file", AtFlags::empty()).unwrap();
    }
    // The standard library removes by path; --delete can do it by descriptor.
    let empty = ram.path().join("empty");
    fs::create_dir(&empty).unwrap();
    for deep in [&source, &target] {
        stage(&empty, deep, &Options { delete: true, ..Options::default() });
    }
}

#[test]
fn a_symlink_in_either_tree_never_leads_out_of_it() {
    let ram = ram();
    let (source, target, outside) = (ram.path().join("s"), ram.path().join("t"), ram.path().join("outside"));
    for dir in [&source, &target, &outside] {
        fs::create_dir(dir).unwrap();
    }
    fs::write(outside.join("file"), "untouched").unwrap();
    fs::create_dir(source.join("dir")).unwrap();
    fs::write(source.join("dir/file"), "new").unwrap();
    fs::write(source.join("plain"), "new").unwrap();
    symlink(&outside, source.join("link")).unwrap();
    // In the target, a symlink stands where the source has a directory, and another where it has a file.
    symlink(&outside, target.join("dir")).unwrap();
    symlink(outside.join("file"), target.join("plain")).unwrap();
    stage(&source, &target, &Options::default());
    assert_eq!(fs::read_to_string(outside.join("file")).unwrap(), "untouched");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    trees::assert_same(&source, &target);
    assert!(fs::symlink_metadata(target.join("link")).unwrap().is_symlink());
}

#[test]
fn a_reader_of_the_target_never_sees_a_name_without_its_whole_content() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    let size = 3_000_000;
    fs::write(source.join("old"), vec![2; size]).unwrap();
    fs::create_dir(source.join("new")).unwrap();
    fs::write(source.join("new/file"), vec![2; size]).unwrap();
    fs::write(target.join("old"), vec![1; size]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut looks = 0;
            while !done.load(Ordering::Relaxed) {
                let old = fs::read(target.join("old")).unwrap();
                assert!(old == vec![1; size] || old == vec![2; size], "torn: {} bytes", old.len());
                if let Ok(new) = fs::read(target.join("new/file")) {
                    assert!(new == vec![2; size], "torn: {} bytes", new.len());
                }
                looks += 1;
            }
            looks
        });
        let slow = Options { bandwidth: Some(Rate(Bytes(12 << 20))), ..Options::default() };
        stage(&source, &target, &slow);
        done.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 3);
    });
    trees::assert_same(&source, &target);
}

#[test]
fn a_copy_is_never_more_readable_than_its_source_even_for_a_moment() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    for (name, mode) in [("secret", 0o600), ("group", 0o640), ("none", 0o000)] {
        if mode == 0 && !trees::is_root() {
            continue; // nobody but root can read it
        }
        fs::write(source.join(name), vec![1; 2_000_000]).unwrap();
        fs::set_permissions(source.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    if trees::is_root() {
        std::os::unix::fs::chown(source.join("group"), Some(12_345), Some(54_321)).unwrap();
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut looks = 0;
            while !done.load(Ordering::Relaxed) {
                for entry in fs::read_dir(&target).unwrap() {
                    let Ok(metadata) = entry.unwrap().metadata() else { continue };
                    assert_eq!(metadata.mode() & 0o007, 0);
                    // Readable by a group only once that group is the source's.
                    assert!(metadata.mode() & 0o070 == 0 || metadata.gid() == 54_321 || !trees::is_root());
                    looks += 1;
                }
            }
            looks
        });
        stage(&source, &target, &Options { bandwidth: Some(Rate(Bytes(12 << 20))), ..Options::default() });
        done.store(true, Ordering::Relaxed);
        assert!(watcher.join().unwrap() > 10);
    });
    if trees::is_root() {
        trees::assert_same(&source, &target);
    }
}

#[test]
fn a_copy_that_loses_its_acl_gives_the_group_no_more_than_the_source_does() {
    if !trees::is_root() {
        return ondeck_skip::skipped("mounting a filesystem without ACLs needs root");
    }
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    fs::write(source.join("x"), "x").unwrap();
    setfacl(&["-m", "u:12345:rwx,g::---,m::rwx,o::---"], &source.join("x"));
    assert_eq!(fs::metadata(source.join("x")).unwrap().mode() & 0o777, 0o670);
    let mounted = Mounted::of("ramfs", &target, "");
    let (summary, failures) = stage_with(&source, &target.join("copy"), &Options::default());
    assert_eq!(summary.unwrap().errors, 1);
    assert!(failures[0].contains("x: it was copied, but not its access control list"), "{failures:?}");
    assert_eq!(fs::metadata(target.join("copy/x")).unwrap().mode() & 0o777, 0o600);
    drop(mounted);
}

fn getfacl(root: &Path) -> Vec<String> {
    let out = std::process::Command::new("getfacl").args(["-n", "-R", "-P", "."]).current_dir(root).output();
    let text = String::from_utf8(out.unwrap().stdout).unwrap();
    let mut entries: Vec<String> = text.split("\n\n").map(ToOwned::to_owned).collect();
    entries.sort();
    entries
}

/// A directory with a default ACL, and files in it and below that have none.
fn tree_with_default_acl(root: &Path) {
    fs::create_dir_all(root.join("sub/inner")).unwrap();
    for name in ["sub/a", "sub/b", "sub/inner/c"] {
        fs::write(root.join(name), name).unwrap();
    }
    setfacl(&["-d", "-m", "u:12345:rwx,g::---,m::rwx,o::---"], &root.join("sub"));
    fs::set_permissions(root.join("sub"), fs::Permissions::from_mode(0o2755)).unwrap();
}

/// What a killed copy leaves: under a temporary name, a directory below that was complete already, and lost a file.
fn killed_copy(source: &Path, target: &Path, options: &Options) {
    let (result, _) = stage_with(source, target, options);
    result.unwrap();
    let name = format!(".{}.ondeck-partial", target.file_name().unwrap().to_str().unwrap());
    fs::rename(target, target.with_file_name(name)).unwrap();
}

#[test]
fn a_copy_that_is_killed_and_repeated_grants_no_acl_that_the_source_has_not() {
    let ram = ram();
    let (source, target, manifest) = (ram.path().join("s"), ram.path().join("t"), ram.path().join("m"));
    tree_with_default_acl(&source);
    let partial = ram.path().join(".t.ondeck-partial");
    for lost in [&["sub/a"][..], &["sub/a", "sub/inner"], &["sub/inner/c"], &[]] {
        killed_copy(&source, &target, &options(&manifest));
        for name in lost {
            let path = partial.join(name);
            if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
        }
        // The root was about to get its name, or had an ACL that the source lost since.
        setfacl(&["-m", "u:12345:rwx,g::---,m::rwx", "-d", "-m", "u:12345:rwx"], &partial);
        stage(&source, &target, &Options { verify: true, ..options(&manifest) });
        trees::assert_same(&source, &target);
        assert_eq!(getfacl(&source), getfacl(&target), "{lost:?}");
        fs::remove_dir_all(&target).unwrap();
    }
}

#[test]
fn a_copy_that_leaves_owners_to_the_target_has_the_acls_of_the_source_and_no_others() {
    let ram = ram();
    let source = ram.path().join("s");
    tree_with_default_acl(&source);
    let shared = ram.path().join("shared");
    fs::create_dir(&shared).unwrap();
    setfacl(&["-d", "-m", "u:23456:rwx,m::rwx,o::---"], &shared);
    let inherit = Options { ownership: ondeck_transfer::Ownership::Inherit, ..Options::default() };
    stage(&source, &shared.join("once"), &inherit);
    assert_eq!(getfacl(&source), getfacl(&shared.join("once")));
    // Also what a killed copy has left, and what is copied into a directory that was there.
    killed_copy(&source, &shared.join("again"), &inherit);
    fs::remove_file(shared.join(".again.ondeck-partial/sub/a")).unwrap();
    fs::remove_dir_all(shared.join(".again.ondeck-partial/sub/inner")).unwrap();
    stage(&source, &shared.join("again"), &inherit);
    assert_eq!(getfacl(&source), getfacl(&shared.join("again")));
    assert!(std::process::Command::new("mkfifo").arg(source.join("pipe")).status().unwrap().success());
    fs::write(source.join("file"), "x").unwrap();
    stage(&source, &shared, &inherit);
    for name in ["file", "pipe", "sub/a"] {
        let found = getfacl_of(&shared.join(name));
        assert_eq!(found, getfacl_of(&source.join(name)), "{name}");
        assert!(!found.contains("user:23456"), "{name}");
    }
}

fn getfacl_of(path: &Path) -> String {
    let out = std::process::Command::new("getfacl").args(["-c", "-n", "-p"]).arg(path).output();
    String::from_utf8(out.unwrap().stdout).unwrap()
}

fn setfacl(arguments: &[&str], path: &Path) {
    let status = std::process::Command::new("setfacl").args(arguments).arg(path).status();
    assert!(status.unwrap_or_else(|error| panic!("setfacl: {error}: apt-get install acl")).success());
}

#[test]
fn a_file_that_changes_while_it_is_copied_is_reported_and_not_left_half_done() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    fs::write(source.join("quiet"), "quiet").unwrap();
    for (name, size) in [("small", 2_000_000), ("large", 70 << 20)] {
        fs::write(source.join(name), vec![1; size]).unwrap();
    }
    let done = AtomicBool::new(false);
    let (summary, failures) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let files = ["small", "large"]
                .map(|name| fs::OpenOptions::new().write(true).open(source.join(name)).unwrap());
            let mut byte = 0_u8;
            while !done.load(Ordering::Relaxed) {
                byte = byte.wrapping_add(1);
                files.iter().for_each(|file| file.write_all_at(&[byte], 5).unwrap());
            }
        });
        let result = stage_with(
            &source,
            &target,
            &Options { bandwidth: Some(Rate(Bytes(200 << 20))), ..Options::default() },
        );
        done.store(true, Ordering::Relaxed);
        result
    });
    let summary = summary.unwrap();
    assert_eq!((summary.errors, summary.retried), (2, 4), "{failures:?}");
    assert!(failures.iter().all(|failure| failure.contains("kept changing")), "{failures:?}");
    let names: Vec<_> = fs::read_dir(&target).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["quiet"]);
}

/// Sizes around what one call of the kernel takes, and what one buffer holds.
#[test]
fn without_a_checksum_every_byte_of_small_files_arrives_too() {
    let (ram, disk) = (ram(), disk());
    let (source, there, back) = (disk.path().join("s"), ram.path().join("t"), disk.path().join("b"));
    fs::create_dir(&source).unwrap();
    let edges = [1_usize, 4095, 4096, 4097, 65_535, 65_536, 65_537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1];
    for (seed, size) in edges.into_iter().enumerate() {
        let data: Vec<u8> = (0..size).map(|at| (at * 31 + at / 251 + seed) as u8).collect();
        fs::write(source.join(size.to_string()), data).unwrap();
    }
    let unchecked = Options { checksum: Checksum::None, ..Options::default() };
    stage(&source, &there, &unchecked);
    stage(&there, &back, &unchecked);
    for size in edges.map(|size| size.to_string()) {
        assert!(fs::read(source.join(&size)).unwrap() == fs::read(back.join(&size)).unwrap(), "{size}");
    }
}

#[test]
fn with_modes_alone_a_copy_has_no_times_or_attributes_of_its_source() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    for (name, mode) in [("a", 0o640), ("b", 0o755), ("c", 0o4755)] {
        let file = source.join(name);
        fs::write(&file, name).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        let long_ago = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        fs::File::options().write(true).open(&file).unwrap().set_modified(long_ago).unwrap();
    }
    let bare = Options { checksum: Checksum::None, modes_only: true, ..Options::default() };
    stage(&source, &target, &bare);
    for (name, mode) in [("a", 0o640), ("b", 0o755), ("c", 0o755)] {
        let copy = fs::metadata(target.join(name)).unwrap();
        assert_eq!(
            copy.mode() & 0o7777,
            mode,
            "{name}: rights that a set-id bit lends are no permission bits"
        );
        assert!(copy.modified().unwrap().elapsed().unwrap() < Duration::from_secs(3600), "{name}");
        assert_eq!(fs::read_to_string(target.join(name)).unwrap(), name);
    }
}

#[test]
fn errors_do_not_stop_the_rest() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::create_dir_all(target.join("in-the-way/kept")).unwrap();
    for name in ["a", "in-the-way", ".x.ondeck-partial", "z"] {
        fs::write(source.join(name), name).unwrap();
    }
    let (summary, failures) = stage_with(&source, &target, &Options::default());
    assert_eq!(summary.unwrap().errors, 2);
    assert!(failures.iter().any(|failure| failure.contains("--delete would remove it")), "{failures:?}");
    assert!(failures.iter().any(|failure| failure.contains("incomplete copy")), "{failures:?}");
    assert!(
        target.join("a").exists() && target.join("z").exists() && target.join("in-the-way/kept").exists()
    );
}

#[test]
fn delete_exclude_and_update_do_what_they_say() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir_all(source.join("keep")).unwrap();
    fs::create_dir_all(target.join("gone/deep")).unwrap();
    for name in ["newer-here", "skip.tmp", "keep/x"] {
        fs::write(source.join(name), "source").unwrap();
    }
    for name in ["gone/deep/x", "other.tmp", "stale"] {
        fs::write(target.join(name), "target").unwrap();
    }
    fs::write(target.join("newer-here"), "target").unwrap();
    let exclude = Exclude::new(["*.tmp"]).unwrap();
    let dry =
        Options { dry_run: true, delete: true, update: true, exclude: exclude.clone(), ..Options::default() };
    let before = trees::look(&target);
    stage(&source, &target, &dry);
    assert!(trees::look(&target) == before, "a dry run changes nothing");
    let summary = stage(&source, &target, &Options { dry_run: false, ..dry });
    assert_eq!(fs::read_to_string(target.join("newer-here")).unwrap(), "target");
    assert!(target.join("keep/x").exists() && target.join("other.tmp").exists());
    assert!(
        !target.join("gone").exists() && !target.join("stale").exists() && !target.join("skip.tmp").exists()
    );
    assert_eq!((summary.deleted, summary.unchanged, summary.files), (4, 1, 1));
}

#[test]
fn what_is_removed_from_the_source_meanwhile_is_told_from_what_failed() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir_all(source.join("sub")).unwrap();
    for number in 0..100 {
        fs::write(source.join(format!("f{number}")), vec![1; 20_000]).unwrap();
    }
    let slow =
        Options { bandwidth: Some(Rate(Bytes(2 << 20))), threads: 1, ..options(&ram.path().join("m")) };
    let failures = Mutex::new(Vec::new());
    let event = |event: Event<'_>| {
        if let Event::Failed(error) = event {
            failures.lock().unwrap().push(error.to_string());
        }
    };
    let progress = Progress::new();
    let monitor = Monitor { progress: &progress, event: &event };
    let summary = std::thread::scope(|scope| {
        let copy = scope.spawn(|| ondeck_transfer::stage(&source, &target, &slow, &monitor));
        wait_until(|| progress.entries_done.load(Ordering::Relaxed) >= 5);
        // In the order of their inodes, this is the last one; directories come after files.
        fs::remove_file(source.join("f99")).unwrap();
        fs::remove_dir(source.join("sub")).unwrap();
        copy.join().unwrap().unwrap()
    });
    assert_eq!((summary.files, summary.errors, summary.vanished), (99, 2, 2));
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    assert!(failures[0].starts_with("f99: opening it: No such file"), "{failures:?}");
    assert!(failures[1].starts_with("sub: opening it: No such file"), "{failures:?}");
}

#[test]
fn a_pattern_with_a_slash_at_its_end_leaves_out_directories_only() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir_all(source.join("a/cache")).unwrap();
    fs::create_dir(source.join("b")).unwrap();
    fs::create_dir_all(target.join("c/cache")).unwrap();
    fs::create_dir_all(target.join("d/cache")).unwrap();
    fs::create_dir(source.join("c")).unwrap();
    for name in ["a/cache/x", "a/y", "b/cache", "c/cache"] {
        fs::write(source.join(name), "source").unwrap();
    }
    fs::write(target.join("c/cache/theirs"), "target").unwrap();
    let options = Options { delete: true, exclude: Exclude::new(["cache/"]).unwrap(), ..Options::default() };
    let (summary, failures) = stage_with(&source, &target, &options);
    assert_eq!(summary.unwrap().files, 2);
    assert_eq!(
        failures,
        ["c/cache: copying it: the target has a directory of that name, which is excluded and stays"]
    );
    assert!(!target.join("a/cache").exists());
    assert_eq!(fs::read_to_string(target.join("b/cache")).unwrap(), "source");
    assert!(target.join("c/cache/theirs").exists() && target.join("d/cache").exists());
}

#[test]
fn a_single_file_is_copied_to_the_name_that_was_given() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::write(&source, "content").unwrap();
    let target = ram.path().join("other-name");
    let manifest = ram.path().join("m");
    assert_eq!(stage(&source, &target, &options(&manifest)).files, 1);
    assert_eq!(fs::read_to_string(&target).unwrap(), "content");
    assert_eq!(stage(&source, &target, &options(&manifest)).unchanged, 1);
    let directory = ram.path().join("d");
    fs::create_dir(&directory).unwrap();
    let (result, _) = stage_with(&source, &directory, &Options::default());
    assert!(result.unwrap_err().to_string().contains("name the file to be made in it"));
    let (result, _) = stage_with(&directory, &target, &Options::default());
    assert!(result.unwrap_err().to_string().contains("is a directory but"));
    let (result, _) = stage_with(&directory, &directory.join("inside"), &Options::default());
    assert!(result.unwrap_err().to_string().contains("copied into itself"));
}

#[test]
fn a_second_copy_into_the_same_directory_is_refused_while_the_first_runs() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    fs::write(source.join("x"), vec![0; 2_000_000]).unwrap();
    let progress = Progress::new();
    let slow = Options { bandwidth: Some(Rate(Bytes(4 << 20))), ..Options::default() };
    let monitor = Monitor { progress: &progress, event: &|_| {} };
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| ondeck_transfer::stage(&source, &target, &slow, &monitor));
        wait_until(|| progress.entries_found.load(Ordering::Relaxed) > 0);
        let (second, _) = stage_with(&source, &target, &Options::default());
        assert!(matches!(second, Err(StageError::Busy { .. })), "{second:?}");
        copy.join().unwrap().unwrap();
    });
}

#[test]
fn a_target_that_is_full_is_told_by_path_and_nothing_half_done_is_left() {
    if !trees::is_root() {
        return ondeck_skip::skipped("mounting a small tmpfs needs root");
    }
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    for number in 0..8 {
        fs::write(source.join(format!("f{number}")), vec![1; 300_000]).unwrap();
    }
    fs::write(source.join("large"), vec![1; 70 << 20]).unwrap();
    for checksum in [Checksum::Xxh3, Checksum::None] {
        let mounted = Mounted::tmpfs(&target, "size=1m");
        let (summary, failures) = stage_with(&source, &target, &Options { checksum, ..Options::default() });
        let summary = summary.unwrap();
        assert!(summary.files >= 2 && summary.files + summary.errors == 9, "{summary:?}");
        assert!(failures.iter().all(|failure| failure.contains("No space left")), "{failures:?}");
        for entry in fs::read_dir(&target).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.metadata().unwrap().len(), 300_000, "{:?}", entry.file_name());
        }
        drop(mounted);
    }
}

/// A mount that goes with the test, whatever its end.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    fn tmpfs(path: &'a Path, options: &str) -> Self {
        Mounted::of("tmpfs", path, options)
    }

    fn of(kind: &str, path: &'a Path, options: &str) -> Self {
        let options = std::ffi::CString::new(options).unwrap();
        rustix::mount::mount("t", path, kind, rustix::mount::MountFlags::empty(), &*options).unwrap();
        Mounted(path)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn verify_finds_a_byte_that_is_not_what_was_written() {
    let ram = ram();
    let (source, target, manifest) = (ram.path().join("s"), ram.path().join("t"), ram.path().join("m"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("x"), vec![1; 100_000]).unwrap();
    fs::write(source.join("y"), vec![2; 100_000]).unwrap();
    stage(&source, &target, &options(&manifest));
    let times = fs::metadata(target.join("x")).unwrap().modified().unwrap();
    let file = fs::OpenOptions::new().write(true).open(target.join("x")).unwrap();
    file.write_all_at(&[9], 50_000).unwrap();
    // As silent corruption would be: size and times look right.
    file.set_modified(times).unwrap();
    let (summary, failures) = stage_with(&source, &target, &Options { verify: true, ..options(&manifest) });
    assert_eq!(summary.unwrap().verified.unwrap().failed, 1);
    assert!(failures[0].starts_with("x: comparing with the manifest: its checksum is"), "{failures:?}");
}

#[test]
fn verify_finds_every_attribute_that_is_not_the_sources_and_the_next_copy_mends_it() {
    let ram = ram();
    let (source, target, manifest) = (ram.path().join("s"), ram.path().join("t"), ram.path().join("m"));
    fs::create_dir_all(source.join("sub/deep")).unwrap();
    for name in
        ["mode", "owner", "time", "xattr", "acl", "gone", "sub/other", "sub/deep/extra", "fine", "left.tmp"]
    {
        fs::write(source.join(name), name).unwrap();
        fs::set_permissions(source.join(name), fs::Permissions::from_mode(0o640)).unwrap();
    }
    symlink("fine", source.join("link")).unwrap();
    let xattr = |path: &Path, value: &[u8]| {
        rustix::fs::setxattr(path, "user.test", value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    xattr(&source.join("xattr"), b"value");
    setfacl(&["-m", "u:12345:rw,m::rw"], &source.join("acl"));
    fs::set_permissions(source.join("acl"), fs::Permissions::from_mode(0o660)).unwrap();
    let exclude = Exclude::new(["*.tmp"]).unwrap();
    let verify = Options { verify: true, exclude, ..options(&manifest) };
    let first = stage(&source, &target, &verify);
    assert_eq!(first.verified.unwrap().compared, 13);
    fs::remove_file(target.join("link")).unwrap();

    let (result, _) = stage_with(&source, &target, &verify);
    assert_eq!(result.unwrap().verified.unwrap().failed, 0, "what is made again is right");
    // While a copy has nothing to do: what is recorded is not copied again, but looked at.
    fs::set_permissions(target.join("mode"), fs::Permissions::from_mode(0o666)).unwrap();
    if trees::is_root() {
        std::os::unix::fs::chown(target.join("owner"), Some(1), Some(2)).unwrap();
    }
    xattr(&target.join("xattr"), b"other");
    setfacl(&["-m", "u:12345:rwx"], &target.join("acl"));
    xattr(&target.join("sub/deep/extra"), b"extra");
    setfacl(&["-m", "u:23456:r"], &target.join("sub/other"));
    let (result, mut failures) = stage_with(&source, &target, &verify);
    failures.sort();
    let mut expected = vec![
        "acl: comparing it with its source: its mode is 0670, the source's 0660; its access control list is \
         user::rw-,user:12345:rwx:12345,group::r--,mask::rwx,other::---, the source's \
         user::rw-,user:12345:rw-:12345,group::r--,mask::rw-,other::---",
        "mode: comparing it with its source: its mode is 0666, the source's 0640",
        "owner: comparing it with its source: its owner is 1, the source's 0; its group is 2, the source's 0",
        "sub/deep/extra: comparing it with its source: it has the extended attribute user.test, which its source has not",
        "sub/other: comparing it with its source: its access control list is \
         user::rw-,user:23456:r--:23456,group::r--,mask::r--,other::---, the source's none",
        "xattr: comparing it with its source: its extended attribute user.test has another value",
    ];
    if !trees::is_root() {
        expected.retain(|failure| !failure.starts_with("owner"));
    }
    assert_eq!(failures, expected);
    let summary = result.unwrap();
    assert_eq!(
        (summary.verified.unwrap().failed, summary.errors),
        (expected.len() as u64, expected.len() as u64)
    );
    // The same again copies them, and nothing else.
    let summary = stage(&source, &target, &verify);
    assert_eq!((summary.files, summary.verified.unwrap().failed), (expected.len() as u64, 0));
    stage(&source, &target, &Options { exclude: Exclude::default(), ..verify });
    trees::assert_same(&source, &target);
}

#[test]
fn verify_passes_over_what_changes_in_the_source_and_says_so() {
    let ram = ram();
    let (source, target, manifest) = (ram.path().join("s"), ram.path().join("t"), ram.path().join("m"));
    fs::create_dir(&source).unwrap();
    for number in 0..100 {
        fs::write(source.join(format!("f{number}")), vec![1; 20_000]).unwrap();
    }
    let slow = Options { bandwidth: Some(Rate(Bytes(8 << 20))), verify: true, ..options(&manifest) };
    let progress = Progress::new();
    let monitor = Monitor { progress: &progress, event: &|_| {} };
    let summary = std::thread::scope(|scope| {
        let copy = scope.spawn(|| ondeck_transfer::stage(&source, &target, &slow, &monitor));
        wait_until(|| target.with_file_name(".t.ondeck-partial").join("f0").exists());
        wait_until(|| progress.entries_done.load(Ordering::Relaxed) >= 10);
        fs::write(source.join("new"), "new").unwrap();
        copy.join().unwrap().unwrap()
    });
    let verified = summary.verified.unwrap();
    assert_eq!(
        (verified.failed, verified.matching, verified.changed),
        (0, 100, 2),
        "the new file and its directory"
    );
}

#[test]
fn a_verification_that_is_interrupted_is_no_success() {
    let ram = ram();
    let (source, target, manifest) = (ram.path().join("s"), ram.path().join("t"), ram.path().join("m"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("x"), "x").unwrap();
    let progress = std::sync::Arc::new(Progress::new());
    // It is asked between the copy and its verification.
    let cancelling = progress.clone();
    let gate = Gate::new(move || {
        cancelling.cancel.store(true, Ordering::Relaxed);
        Ok(())
    });
    let options = Options { verify: true, gate: Some(gate), ..options(&manifest) };
    let monitor = Monitor { progress: &progress, event: &|_| {} };
    let result = ondeck_transfer::stage(&source, &target, &options, &monitor);
    assert!(matches!(result, Err(StageError::Interrupted)), "{result:?}");
}

/// Asks something in a process of the user 20001, who is become for good.
fn as_somebody(question: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls only this test's code and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let user = ondeck_transfer::credentials::User {
            name: "somebody".into(),
            uid: 20_001,
            gid: 20_001,
            groups: vec![20_001],
            home: "/".into(),
        };
        user.become_for_good().unwrap();
        let answer = question();
        // SAFETY: ends the child without running the test harness's exit handlers.
        unsafe { libc::_exit(i32::from(!answer)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &mut status, 0) };
    status == 0
}

#[test]
fn an_ordinary_user_gets_a_copy_of_their_own_and_is_told_so() {
    if !trees::is_root() {
        return ondeck_skip::skipped("becoming another user needs root");
    }
    let shared = ram();
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (source, target) = (shared.path().join("s"), shared.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("theirs"), "x").unwrap();
    fs::set_permissions(source.join("theirs"), fs::Permissions::from_mode(0o6755)).unwrap();
    let is_good = as_somebody(|| {
        // What only root could keep is no difference.
        let verify = Options { verify: true, ..options(&shared.path().join("m")) };
        let (summary, failures) = stage_with(&source, &target, &verify);
        failures.is_empty()
            && summary
                .is_ok_and(|summary| (summary.ownership_kept, summary.verified.unwrap().compared) == (2, 2))
    });
    assert!(is_good);
    let copy = fs::metadata(target.join("theirs")).unwrap();
    assert_eq!(
        (copy.uid(), copy.mode() & 0o7777),
        (20_001, 0o755),
        "a set-id bit is not passed to another owner"
    );
}

#[test]
fn a_copy_that_is_somebody_elses_lends_nobody_its_owner_or_group() {
    if !trees::is_root() {
        return ondeck_skip::skipped("files of other owners need root");
    }
    const THEIRS: u32 = 20_002;
    const TEAM: u32 = 4711;
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    let chown = |path: &Path, uid, gid| std::os::unix::fs::chown(path, Some(uid), Some(gid)).unwrap();
    let chmod = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    for (name, size, owner) in [
        ("theirs", 5, (THEIRS, THEIRS)),
        ("theirs-large", 70 << 20, (THEIRS, THEIRS)),
        ("of-our-group", 5, (THEIRS, 0)),
        ("ours", 5, (0, 0)),
        ("of-the-team", 5, (THEIRS, THEIRS)),
    ] {
        fs::File::create(source.join(name)).unwrap().set_len(size).unwrap();
        chown(&source.join(name), owner.0, owner.1);
        chmod(&source.join(name), 0o6755);
    }
    for (name, owner) in [("pipe", THEIRS), ("our-pipe", 0)] {
        assert!(std::process::Command::new("mkfifo").arg(source.join(name)).status().unwrap().success());
        chown(&source.join(name), owner, owner);
        chmod(&source.join(name), 0o6700);
    }
    // CAP_SETUID, permitted and effective.
    let capability = [1, 0, 0, 2, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let attribute = "security.capability";
    let flags = rustix::fs::XattrFlags::empty();
    for name in ["theirs", "ours"] {
        rustix::fs::setxattr(source.join(name), attribute, &capability, flags).unwrap();
    }
    // A new version stays with the group that shares it.
    fs::write(target.join("of-the-team"), "old").unwrap();
    chown(&target.join("of-the-team"), 0, TEAM);

    let inherit = Options { ownership: ondeck_transfer::Ownership::Inherit, ..Options::default() };
    stage(&source, &target, &inherit);
    for (name, wanted) in [
        ("theirs", 0o755),
        ("theirs-large", 0o755),
        ("of-our-group", 0o2755),
        ("ours", 0o6755),
        ("of-the-team", 0o755),
        ("pipe", 0o700),
        ("our-pipe", 0o6700),
    ] {
        assert_eq!(mode(&target.join(name)), wanted, "{name}");
    }
    assert_eq!(fs::metadata(target.join("of-the-team")).unwrap().gid(), TEAM);
    let has = |name: &str| rustix::fs::getxattr(target.join(name), attribute, &mut [0_u8; 64]).is_ok();
    assert!(has("ours") && !has("theirs"));

    // What is ours, in a directory that gives it to another group. And directories are set-gid as before.
    let shared = ram.path().join("shared");
    fs::create_dir(&shared).unwrap();
    chown(&shared, 0, TEAM);
    chmod(&shared, 0o2770);
    fs::create_dir(source.join("dir")).unwrap();
    fs::rename(source.join("theirs"), source.join("dir/theirs")).unwrap();
    stage(&source, &shared.join("new"), &inherit);
    assert_eq!((mode(&shared.join("new/ours")), mode(&shared.join("new/dir/theirs"))), (0o4755, 0o755));
    assert_eq!(mode(&shared.join("new/dir")), 0o2755);
    // Who keeps the owner keeps all of it.
    stage(&source, &ram.path().join("preserved"), &Options::default());
    assert_eq!(mode(&ram.path().join("preserved/dir/theirs")), 0o6755);
}

#[test]
fn what_others_have_closed_is_left_behind_and_named() {
    if !trees::is_root() {
        return ondeck_skip::skipped("becoming another user needs root");
    }
    const OURS: u32 = 20_001;
    const THEIRS: u32 = 20_002;
    let shared = ram();
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (source, target) = (shared.path().join("s"), shared.path().join("t"));
    for dir in ["s", "s/closed", "s/names-only", "s/open", "s/ours", "t"] {
        fs::create_dir(shared.path().join(dir)).unwrap();
    }
    for file in ["closed/x", "names-only/x", "open/x", "open/closed", "closed-file", "ours/none", "link-1"] {
        fs::write(source.join(file), file).unwrap();
    }
    fs::hard_link(source.join("link-1"), source.join("link-2")).unwrap();
    let give = |path: &str, owner, mode| {
        std::os::unix::fs::chown(shared.path().join(path), Some(owner), Some(owner)).unwrap();
        fs::set_permissions(shared.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    give("s", OURS, 0o755);
    give("t", OURS, 0o755);
    give("s/ours", OURS, 0o755);
    give("s/ours/none", OURS, 0o400);
    give("s/open", THEIRS, 0o755);
    give("s/open/x", THEIRS, 0o644);
    for (name, mode) in [
        ("closed", 0o700),
        ("names-only", 0o744),
        ("open/closed", 0o600),
        ("closed-file", 0),
        ("link-1", 0o600),
    ] {
        give(&format!("s/{name}"), THEIRS, mode);
    }
    let wanted = ["closed", "closed-file", "link-1", "link-2", "names-only", "open/closed"];
    let told = |run: &dyn Fn(&Monitor<'_>) -> u64| {
        let (left, progress) = (Mutex::new(Vec::new()), Progress::new());
        let event = |event: Event<'_>| match event {
            Event::LeftBehind { path, owner } => {
                left.lock().unwrap().push((String::from_utf8(path.to_vec()).unwrap(), owner));
            }
            Event::Failed(error) => left.lock().unwrap().push((error.to_string(), 0)),
            _ => {}
        };
        let errors = run(&Monitor { progress: &progress, event: &event });
        let mut left = left.into_inner().unwrap();
        left.sort();
        if errors != 0 || left != wanted.map(|path| (path.to_owned(), THEIRS)) {
            eprintln!("{errors} errors: {left:?}");
            return false;
        }
        true
    };
    let leaving = Options { leave_others: true, ..Options::default() };
    let copied =
        || told(&|monitor| ondeck_transfer::stage(&source, &target, &leaving, monitor).unwrap().errors);
    let packed = || {
        let options = ondeck_transfer::pack::PackOptions { leave_others: true, ..Default::default() };
        let (archive, format) = (shared.path().join("a.tar"), ondeck_core::PackFormat::Tar);
        told(&|monitor| {
            ondeck_transfer::pack::pack_path(&source, &archive, format, &options, monitor).unwrap().errors
        })
    };
    assert!(as_somebody(|| copied() && packed()));
    assert_eq!(fs::read_to_string(target.join("open/x")).unwrap(), "open/x");
    assert_eq!(fs::read_to_string(target.join("ours/none")).unwrap(), "ours/none");
    assert!(wanted.iter().all(|name| !target.join(name).exists()));
    // Without being asked for it is a failure.
    let plain = || stage_with(&source, &target, &Options::default()).1.len() >= wanted.len();
    assert!(as_somebody(plain));
}

/// Waits for a state, with a deadline.
fn wait_until(mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !reached() {
        assert!(Instant::now() < deadline, "the state was not reached in time");
        std::thread::yield_now();
    }
}

#[test]
fn a_source_that_is_not_whole_deletes_nothing_and_is_never_a_success() {
    let dir = disk();
    let (source, target) = (dir.path().join("source"), dir.path().join("target"));
    for (path, names) in [(&source, ["a", "b"]), (&target, ["b", "hidden"])] {
        fs::create_dir(path).unwrap();
        names.iter().for_each(|name| fs::write(path.join(name), name).unwrap());
    }
    let copy = |whole: bool| {
        let gate = Gate::new(move || if whole { Ok(()) } else { Err("node n2 is lost".into()) });
        stage_with(&source, &target, &Options { delete: true, gate: Some(gate), ..Options::default() })
    };
    let (result, failures) = copy(false);
    assert!(result.unwrap_err().to_string().contains("node n2 is lost"));
    assert!(failures.iter().any(|failure| failure.contains("deleting")), "{failures:?}");
    assert!(target.join("hidden").exists());
    assert_eq!(copy(true).0.unwrap().deleted, 1);
    assert!(!target.join("hidden").exists());
}

#[test]
fn directories_that_change_places_between_two_rounds_are_copied_again_though_no_time_tells() {
    let (ram, disk) = (ram(), disk());
    let (source, target, manifest) = (disk.path().join("s"), ram.path().join("t"), disk.path().join("m"));
    fs::create_dir(&target).unwrap();
    // As rsync -a, tar and cp -p leave them: of one size and with one time, though not one content.
    let write = |path: &str, content: &str| {
        let path = source.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = fs::File::create(path).unwrap();
        file.write_all_at(content.as_bytes(), 0).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)).unwrap();
    };
    let rename = |from: &str, to: &str| fs::rename(source.join(from), source.join(to)).unwrap();
    let swap = |one: &str, other: &str| {
        rename(one, "t");
        rename(other, one);
        rename("t", other);
    };
    for (path, content) in [
        ("a/deep/file", "of a"),
        ("b/deep/file", "of b"),
        ("a/linked", "la"),
        ("b/linked", "lb"),
        ("c/file", "of c"),
        ("d/file", "of d"),
        ("one", "1"),
        ("other", "2"),
    ] {
        write(path, content);
    }
    fs::create_dir(source.join("links")).unwrap();
    for name in ["a", "b"] {
        fs::hard_link(source.join(name).join("linked"), source.join("links").join(name)).unwrap();
    }
    let round = |again_from| {
        let options = Options { delete: true, unseen: true, sync: false, again_from, ..options(&manifest) };
        let summary = stage(&source, &target, &options);
        trees::assert_same(&source, &target);
        summary
    };
    // Nothing is copied again because of its time.
    let later = Some((i64::MAX, 0));
    round(None);
    let still = round(later);
    assert_eq!((still.files, still.unchanged), (0, 8), "{still:?}");

    swap("a", "b");
    assert_eq!(fs::read_to_string(source.join("a/deep/file")).unwrap(), "of b");
    round(later);
    assert_eq!(fs::read_to_string(target.join("a/deep/file")).unwrap(), "of b");
    assert_eq!(fs::read_to_string(target.join("b/linked")).unwrap(), "la");
    assert_eq!(round(later).files, 0);

    // One takes the place of another.
    rename("c", "former");
    rename("d", "c");
    round(later);
    assert_eq!(fs::read_to_string(target.join("c/file")).unwrap(), "of d");
    swap("one", "other");
    round(later);
    assert_eq!(fs::read_to_string(target.join("one")).unwrap(), "2");
    assert_eq!(round(later).files, 0);

    // A record of before says nothing of the inode.
    let text = fs::read_to_string(&manifest).unwrap();
    let former: Vec<&str> = text
        .lines()
        .map(|line| {
            line.rsplit_once('\t')
                .filter(|_| line.matches('\t').count() == 6)
                .map_or(line, |(former, _)| former)
        })
        .collect();
    fs::write(&manifest, former.join("\n") + "\n").unwrap();
    assert_eq!(round(later).unchanged, 0);
}

#[test]
fn an_update_leaves_what_is_there_as_it_is_symlinks_included() {
    let (ram, disk) = (ram(), disk());
    let (source, target) = (disk.path().join("a"), ram.path().join("b"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("file"), "content").unwrap();
    std::os::unix::fs::symlink("file", source.join("link")).unwrap();
    std::os::unix::fs::symlink("file", source.join("other")).unwrap();
    stage(&source, &target, &Options::default());
    let look = Options { dry_run: true, update: true, sync: false, ..Options::default() };
    let summary = stage(&source, &target, &look);
    assert_eq!((summary.files, summary.others, summary.unchanged), (0, 0, 3), "{summary:?}");
    // One that leads elsewhere is another one.
    fs::remove_file(source.join("other")).unwrap();
    std::os::unix::fs::symlink("elsewhere", source.join("other")).unwrap();
    let update = Options { dry_run: false, ..look };
    assert_eq!(stage(&source, &target, &update).others, 1);
    assert_eq!(fs::read_link(target.join("other")).unwrap().to_str(), Some("elsewhere"));
}
