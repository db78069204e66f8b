//! Files that the kernel writes to by itself: `ondeck cache mount --writes=passthrough`.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::mm::MapFlags;

use cached::{Map, Mounted};
use scene::wait_until;

fn mounted(options: &[&str], prepare: impl FnOnce(&Path)) -> Option<Mounted> {
    Mounted::with(&[&["--writes", "passthrough"], options].concat(), prepare)
}

fn create(path: &Path) -> File {
    File::options().create(true).read(true).write(true).truncate(false).open(path).unwrap()
}

/// A file that the server writes to, because each write is to be synced.
fn by_the_server(path: &Path) -> File {
    File::options()
        .create(true)
        .read(true)
        .write(true)
        .truncate(false)
        .custom_flags(libc::O_SYNC)
        .open(path)
        .unwrap()
}

fn figure(mounted: &Mounted, name: &str) -> u64 {
    mounted.status()["status"][name].as_u64().unwrap()
}

/// Waits until nothing is open: the kernel says so some time after a close.
fn wait_closed(mounted: &Mounted) {
    wait_until("nothing is open", || figure(mounted, "open_files") == 0);
}

/// What the server was given to write: nothing, if the kernel writes.
fn written(mounted: &Mounted) -> u64 {
    figure(mounted, "written_bytes")
}

#[test]
fn what_the_kernel_writes_is_seen_at_once_and_comes_to_the_backing_directory() {
    let Some(mounted) = mounted(&[], |backing| fs::write(backing.join("old"), vec![1; 3 << 20]).unwrap())
    else {
        return;
    };
    for name in ["old", "new"] {
        let path = mounted.fast.join(name);
        let before = if name == "old" { 3 << 20 } else { 0 };
        let file = create(&path);
        let about = || fs::metadata(&path).unwrap();
        assert_eq!(about().len(), before);
        file.write_all_at(&[7; 5000], 4 << 20).unwrap();
        let first = about();
        assert_eq!((first.len(), file.metadata().unwrap().len()), ((4 << 20) + 5000, (4 << 20) + 5000));
        file.write_all_at(b"x", 9).unwrap();
        let second = about();
        assert!((second.mtime(), second.mtime_nsec()) > (first.mtime(), first.mtime_nsec()), "{name}");
        // By its path, by another descriptor, by a map.
        let other = File::open(&path).unwrap();
        let mut one = [0];
        other.read_exact_at(&mut one, 9).unwrap();
        assert_eq!(&one, b"x");
        let time = |about: fs::Metadata| (about.mtime(), about.mtime_nsec());
        let map = Map::new(&file, 4096, true, MapFlags::SHARED);
        map.set(10, b'y');
        other.read_exact_at(&mut one, 10).unwrap();
        assert_eq!(&one, b"y");
        drop((map, other, file));
        wait_closed(&mounted);
        assert!(time(about()) > time(second), "{name}");
    }
    assert_eq!(written(&mounted), 0, "nothing was written by the server");
    mounted.ondeck(&["flush", "fast"]);
    for name in ["old", "new"] {
        let mut expected = vec![0; (4 << 20) + 5000];
        if name == "old" {
            expected[..3 << 20].fill(1);
        }
        expected[4 << 20..].fill(7);
        expected[9..11].copy_from_slice(b"xy");
        assert!(fs::read(mounted.backing.join(name)).unwrap() == expected, "{name}");
        let time = |dir: &Path| {
            let about = fs::metadata(dir.join(name)).unwrap();
            (about.mtime(), about.mtime_nsec())
        };
        assert_eq!(time(&mounted.backing), time(&mounted.fast));
    }
    assert!(fs::metadata(mounted.backing.join("new")).unwrap().blocks() < 1000, "holes stay holes");
}

#[test]
fn a_file_that_is_open_when_the_server_is_killed_has_all_that_was_written() {
    let Some(mounted) = mounted(&[], |backing| fs::write(backing.join("old"), vec![1; 2 << 20]).unwrap())
    else {
        return;
    };
    let [old, new, cut] = ["old", "new", "cut"].map(|name| create(&mounted.fast.join(name)));
    old.write_all_at(b"changed", (1 << 20) + 5).unwrap();
    old.write_all_at(b"longer", (3 << 20) + 1).unwrap();
    new.write_all_at(&[9; 100_000], 0).unwrap();
    cut.write_all_at(&[9; 100_000], 0).unwrap();
    cut.set_len(10).unwrap();
    fs::rename(mounted.fast.join("new"), mounted.fast.join("renamed")).unwrap();
    new.write_all_at(b"end", 100_000).unwrap();
    let time = new.metadata().unwrap();
    let server = mounted.status()["server"].as_i64().unwrap();
    let pid = rustix::process::Pid::from_raw(server as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    wait_until("the server is gone", || !Path::new(&format!("/proc/{server}")).exists());
    // The kernel needs no server for this: it is lost to nobody.
    new.write_all_at(b"later", 100_003).unwrap();
    drop((old, new, cut));
    mounted.ondeck(&["mount", "--backing", "backing", "--capacity", "32MiB", "fast"]);
    for dir in [&mounted.fast, &mounted.backing] {
        if *dir == mounted.backing {
            mounted.ondeck(&["unmount", "fast"]);
        }
        let mut old = vec![1; 2 << 20];
        old[(1 << 20) + 5..][..7].copy_from_slice(b"changed");
        old.resize((3 << 20) + 1, 0);
        old.extend(b"longer");
        assert!(fs::read(dir.join("old")).unwrap() == old);
        let mut new = vec![9; 100_000];
        new.extend(b"endlater");
        assert!(fs::read(dir.join("renamed")).unwrap() == new);
        assert_eq!(fs::read(dir.join("cut")).unwrap(), [9; 10]);
        assert!(!dir.join("new").exists());
        let found = fs::metadata(dir.join("renamed")).unwrap();
        assert!((found.mtime(), found.mtime_nsec()) >= (time.mtime(), time.mtime_nsec()));
    }
}

#[test]
fn what_was_written_beyond_the_capacity_is_counted_and_others_wait_for_it() {
    let Some(mounted) = mounted(&[], |_| ()) else { return };
    // 32 MiB are the capacity; the store has room for 100 MiB.
    let large = create(&mounted.fast.join("large"));
    for mib in 0..60 {
        large.write_all_at(&[mib as u8; 1 << 20], mib << 20).unwrap();
    }
    // While it is open nothing of it is given up, and others go on with little.
    wait_until("it is counted", || figure(&mounted, "resident") >= 60 << 20);
    let little = by_the_server(&mounted.fast.join("little"));
    for part in 0..96 {
        little.write_all_at(&[3; 64 << 10], part * (64 << 10)).unwrap();
    }
    drop(large);
    let after = by_the_server(&mounted.fast.join("after"));
    for mib in 0..20 {
        after.write_all_at(&[4; 1 << 20], mib << 20).unwrap();
    }
    drop((little, after));
    wait_closed(&mounted);
    wait_until("no more is held than there is capacity for", || figure(&mounted, "resident") <= 32 << 20);
    mounted.ondeck(&["unmount", "fast"]);
    let found = fs::read(mounted.backing.join("large")).unwrap();
    assert!(found.chunks(1 << 20).enumerate().all(|(mib, part)| part.iter().all(|byte| *byte == mib as u8)));
    assert_eq!(found.len(), 60 << 20);
    assert!(fs::read(mounted.backing.join("little")).unwrap() == vec![3; 6 << 20]);
    assert!(fs::read(mounted.backing.join("after")).unwrap() == vec![4; 20 << 20]);
}

#[test]
fn a_full_store_is_told_to_who_filled_it_and_the_cache_goes_on() {
    let Some(mounted) = mounted(&[], |_| ()) else { return };
    let large = create(&mounted.fast.join("large"));
    let refused = (0..200_u64).find_map(|mib| large.write_all_at(&[mib as u8; 1 << 20], mib << 20).err());
    assert_eq!(refused.unwrap().raw_os_error(), Some(libc::ENOSPC));
    // Names need no room but in the journal, which has its own.
    for number in 0..2_000 {
        fs::create_dir(mounted.fast.join(format!("dir-{number}"))).unwrap();
    }
    drop(large);
    let after = by_the_server(&mounted.fast.join("after"));
    for mib in 0..20 {
        after.write_all_at(&[4; 1 << 20], mib << 20).unwrap();
    }
    drop(after);
    let length = fs::metadata(mounted.fast.join("large")).unwrap().len();
    mounted.ondeck(&["unmount", "fast"]);
    let found = fs::read(mounted.backing.join("large")).unwrap();
    assert_eq!(found.len() as u64, length);
    assert!(length > 60 << 20);
    assert!(found.chunks(1 << 20).enumerate().all(|(mib, part)| part.iter().all(|byte| *byte == mib as u8)));
    assert!(fs::read(mounted.backing.join("after")).unwrap() == vec![4; 20 << 20]);
    assert!(mounted.backing.join("dir-1999").is_dir());
}

#[test]
fn opens_of_one_file_agree_however_they_are_mixed() {
    let Some(mounted) = mounted(&[], |backing| {
        fs::write(backing.join("file"), vec![1; 1 << 20]).unwrap();
        fs::write(backing.join("too-large"), vec![1; 20 << 20]).unwrap();
    }) else {
        return;
    };
    let path = mounted.fast.join("file");
    let check = |file: &File, at: u64, expected: &[u8]| {
        let mut found = vec![0; expected.len()];
        file.read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, expected);
    };
    // Readers that the server serves come first, so all are its own.
    let reader = File::open(&path).unwrap();
    let writer = create(&path);
    writer.write_all_at(b"by the server", 0).unwrap();
    check(&reader, 0, b"by the server");
    assert_eq!(written(&mounted), 13);
    drop((reader, writer));
    wait_closed(&mounted);
    // Readers that the kernel serves, then two writers, one of whom wants each write to be synced.
    let reader = File::open(&path).unwrap();
    let writer = create(&path);
    writer.write_all_at(b"by the kernel", 0).unwrap();
    assert_eq!(written(&mounted), 13);
    check(&reader, 0, b"by the kernel");
    let synced = by_the_server(&path);
    synced.write_all_at(b"synced", (1 << 20) + 7).unwrap();
    check(&reader, (1 << 20) + 7, b"synced");
    writer.write_all_at(b"longer", (2 << 20) + 7).unwrap();
    check(&synced, (2 << 20) + 7, b"longer");
    assert_eq!(fs::metadata(&path).unwrap().len(), (2 << 20) + 13);
    // Cut by its name, and unlinked, and replaced.
    File::options().write(true).open(&path).unwrap().set_len(20).unwrap();
    assert_eq!(writer.metadata().unwrap().len(), 20);
    fs::write(mounted.fast.join("other"), b"other").unwrap();
    fs::rename(mounted.fast.join("other"), &path).unwrap();
    writer.write_all_at(b"nameless", 20).unwrap();
    check(&reader, 20, b"nameless");
    assert_eq!((writer.metadata().unwrap().len(), writer.metadata().unwrap().nlink()), (28, 0));
    assert_eq!(fs::read(&path).unwrap(), b"other");
    drop((reader, writer, synced));
    wait_closed(&mounted);
    // More than half of the capacity is not pinned.
    let before = written(&mounted);
    create(&mounted.fast.join("too-large")).write_all_at(b"large", 5).unwrap();
    assert_eq!(written(&mounted) - before, 5);
    wait_closed(&mounted);
    assert_eq!(figure(&mounted, "pinned"), 0);
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(fs::read(mounted.backing.join("file")).unwrap(), b"other");
    assert_eq!(fs::read(mounted.backing.join("too-large")).unwrap()[..11], *b"\x01\x01\x01\x01\x01large\x01");
}

#[test]
fn fsync_brings_an_open_file_to_the_backing_directory_and_so_does_a_flush() {
    let Some(mounted) = mounted(&["--sync", "fsync"], |_| ()) else { return };
    let path = mounted.backing.join("file");
    let file = create(&mounted.fast.join("file"));
    for round in 1..4_u8 {
        file.write_all_at(&vec![round; 20 << 20], 0).unwrap();
        file.sync_all().unwrap();
        assert!(fs::read(&path).unwrap() == vec![round; 20 << 20]);
    }
    file.write_all_at(b"again", 5).unwrap();
    mounted.ondeck(&["flush", "fast"]);
    assert_eq!(fs::read(&path).unwrap()[..11], *b"\x03\x03\x03\x03\x03again\x03");
    file.write_all_at(b"last", 0).unwrap();
    drop(file);
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(fs::read(&path).unwrap()[..11], *b"last\x03again\x03");
}

#[test]
fn a_write_takes_set_id_bits_away_and_times_that_are_set_stay() {
    let Some(mounted) = mounted(&[], |_| ()) else { return };
    let path = mounted.fast.join("file");
    let set_mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
    // As `install` does it: nothing is written afterwards.
    let file = create(&path);
    file.write_all_at(b"content", 0).unwrap();
    set_mode(0o4755);
    let time = rustix::fs::Timespec { tv_sec: 1_000_000_000, tv_nsec: 5 };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::futimens(&file, &times).unwrap();
    drop(file);
    wait_closed(&mounted);
    assert_eq!((mode(), fs::metadata(&path).unwrap().mtime()), (0o4755, 1_000_000_000));
    // A file that has them is written to by the server; one that gets them meanwhile loses them with a write.
    let before = written(&mounted);
    create(&path).write_all_at(b"x", 0).unwrap();
    assert_eq!(written(&mounted) - before, 1);
    wait_closed(&mounted);
    set_mode(0o755);
    let file = create(&path);
    set_mode(0o4755);
    file.write_all_at(b"y", 0).unwrap();
    assert_eq!(mode(), 0o755);
    drop(file);
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(fs::read(mounted.backing.join("file")).unwrap(), b"yontent");
    assert_eq!(fs::metadata(mounted.backing.join("file")).unwrap().permissions().mode() & 0o7777, 0o755);
}

/// What `make` goes by: whatever is done later has no earlier time, whoever has done it.
#[test]
fn the_times_of_what_the_kernel_writes_and_of_what_the_server_does_are_in_order() {
    let Some(mounted) = mounted(&[], |_| ()) else { return };
    let written = create(&mounted.fast.join("written"));
    let time = |path: &Path| {
        let about = fs::metadata(path).unwrap();
        (about.mtime(), about.mtime_nsec())
    };
    let mut before = time(&mounted.fast);
    for round in 0..500 {
        written.write_all_at(b"x", round).unwrap();
        let by_the_kernel = time(&mounted.fast.join("written"));
        let made = mounted.fast.join(format!("made{round}"));
        fs::create_dir(&made).unwrap();
        let by_the_server = time(&made);
        assert!(before <= by_the_kernel, "round {round}: {before:?}, then {by_the_kernel:?}");
        assert!(by_the_kernel <= by_the_server, "round {round}: {by_the_kernel:?}, then {by_the_server:?}");
        before = by_the_server;
    }
}
