//! A backing directory without room.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use client::{Cache, Small};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};
use ondeck_core::Bytes;

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_has_no_room_on_disk_stays_and_comes_home_when_there_is_room() {
    let Some(small) = Small::new("size=4m") else { return };
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let settings = Settings { idle: true, ..Settings::new(Bytes(2 * LEAST_CAPACITY.0)) };
    let mut cache = Cache::at(settings, small.path(), store.path());
    let data: Vec<u8> = (0..9_000_000_u32).map(|at| (at >> 3) as u8).collect();
    cache.create("large", 0o644).unwrap();
    cache.write("large", 0, &data).unwrap();
    cache.create("little", 0o644).unwrap();
    cache.write("little", 0, b"little").unwrap();
    for _ in 0..2 {
        let until = Instant::now() + Duration::from_secs(60);
        let told = cache.owner().flush(&mut |_| Instant::now() < until).unwrap_err();
        assert!(told.contains("large") && told.contains("No space left"), "{told}");
        let status = cache.owner().status();
        assert_eq!(status.failing[0].path, "large");
        assert!(status.dirty >= 9_000_000 && status.conflicts.is_empty(), "{status:?}");
        assert_eq!(cache.read("large", 0, data.len()).unwrap(), data);
        // Whoever goes on after a kill has it, too.
        cache.replace();
    }
    small.change("size=64m");
    cache.flush();
    assert_eq!(names(small.path()), ["large", "little"], "and nothing beside them");
    assert_eq!(fs::read(small.path().join("large")).unwrap(), data);
    assert_eq!(cache.owner().status().conflicts, []);
}

#[test]
fn a_writer_of_more_than_fits_is_told_what_the_disk_says_and_others_are_not_kept() {
    let Some(small) = Small::new("size=4m") else { return };
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let cache = Cache::at(Settings::new(LEAST_CAPACITY), small.path(), store.path());
    cache.create("large", 0o644).unwrap();
    let open = cache.open("large").unwrap();
    let data = vec![7; 1 << 20];
    let refused = (0..64).find_map(|mib| cache.write_open(&open, mib << 20, &data).err());
    assert_eq!(refused, Some(libc::ENOSPC));
    let told = cache.ask(ondeck_cachefs::message::Request::Close { ino: open.ino, handle: open.handle });
    assert_eq!(told.err(), Some(libc::ENOSPC), "close(2) tells it, too");
    cache.close(open);
    cache.unlink("large").unwrap();
    cache.create("little", 0o644).unwrap();
    cache.write("little", 0, b"little").unwrap();
    cache.flush();
    assert_eq!(names(small.path()), ["little"]);
}

#[test]
fn a_writer_is_told_that_the_disk_is_full_whatever_the_kernel_reads() {
    let Some(small) = Small::new("size=4m") else { return };
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let cache = Cache::at(Settings::new(LEAST_CAPACITY), small.path(), store.path());
    cache.create("read", 0o644).unwrap();
    cache.write("read", 0, b"read").unwrap();
    cache.flush();
    assert_eq!(cache.read("read", 0, 4).unwrap(), b"read");
    let reader = cache.open_as("read", ondeck_cachefs::message::OpenMode::default()).unwrap();
    assert!(cache.owner().status().pinned > 0);
    cache.create("large", 0o644).unwrap();
    let open = cache.open("large").unwrap();
    let data = vec![7; 1 << 20];
    let refused = (0..64).find_map(|mib| cache.write_open(&open, mib << 20, &data).err());
    assert_eq!(refused, Some(libc::ENOSPC));
    cache.close(reader);
    cache.ask(ondeck_cachefs::message::Request::Close { ino: open.ino, handle: open.handle }).unwrap_err();
    cache.close(open);
    cache.unlink("large").unwrap();
    cache.flush();
}

#[test]
fn an_exchange_shows_a_file_when_its_data_is_on_disk_and_not_before() {
    let Some(small) = Small::new("size=4m") else { return };
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let settings = Settings { idle: true, ..Settings::new(Bytes(2 * LEAST_CAPACITY.0)) };
    let cache = Cache::at(settings, small.path(), store.path());
    for name in ["shown", "hidden"] {
        cache.create(name, 0o644).unwrap();
        cache.write(name, 0, b"old").unwrap();
    }
    cache.flush();
    let data = vec![7; 9_000_000];
    cache.write("hidden", 0, &data).unwrap();
    cache.rename("hidden", "shown", libc::RENAME_EXCHANGE).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    cache.owner().flush(&mut |_| Instant::now() < until).unwrap_err();
    assert_eq!(fs::read(small.path().join("shown")).unwrap(), b"old");
    small.change("size=64m");
    cache.flush();
    assert!(fs::read(small.path().join("shown")).unwrap() == data);
    assert_eq!(fs::read(small.path().join("hidden")).unwrap(), b"old");
}

#[test]
fn a_file_keeps_its_capabilities_and_set_ids_however_often_it_is_written_to() {
    // Version 2, effective, CAP_NET_RAW.
    const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    if !rustix::process::geteuid().is_root() {
        ondeck_skip::skipped("it needs root, to give a file capabilities");
        return;
    }
    let backing = tempfile::tempdir().unwrap();
    let cache = Cache::over(Settings::new(Bytes(64 << 20)), backing);
    cache.create("program", 0o755).unwrap();
    cache.write("program", 0, &vec![1; 40 << 20]).unwrap();
    cache.set_mode("program", 0o4755).unwrap();
    cache.set_xattr("program", "security.capability", &CAPABILITY).unwrap();
    cache.flush();
    let program = cache.backing().join("program");
    let mut found = [0; 64];
    let length = rustix::fs::getxattr(&program, "security.capability", &mut found[..]).unwrap();
    assert_eq!(found[..length], CAPABILITY);
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(&program).unwrap().permissions().mode() & 0o7777, 0o4755);
}

#[test]
fn a_hole_stays_a_hole_when_a_part_of_it_is_punched() {
    use std::os::unix::fs::MetadataExt;
    let cache = Cache::new(Settings::new(LEAST_CAPACITY));
    cache.create("holes", 0o644).unwrap();
    cache.truncate("holes", 3 << 20).unwrap();
    cache.punch("holes", 8446, 60719).unwrap();
    cache.punch("holes", 100, 50).unwrap();
    cache.write("holes", 200_000, b"data").unwrap();
    cache.punch("holes", 200_001, 2).unwrap();
    cache.flush();
    let holes = cache.backing().join("holes");
    assert_eq!(&fs::read(&holes).unwrap()[200_000..200_004], b"d\0\0a");
    assert_eq!(fs::metadata(&holes).unwrap().blocks(), 8);
}

#[test]
fn a_file_that_loses_rights_has_lost_them_before_its_data_comes() {
    use std::os::unix::fs::PermissionsExt;
    let Some(small) = Small::new("size=4m") else { return };
    let mode = |name: &str| fs::metadata(small.path().join(name)).unwrap().permissions().mode() & 0o7777;
    for (name, of) in
        [("narrowed", 0o644), ("widened", 0o600), ("acl", 0o664), ("same", 0o640), ("xattr", 0o644)]
    {
        fs::write(small.path().join(name), b"before").unwrap();
        fs::set_permissions(small.path().join(name), fs::Permissions::from_mode(of)).unwrap();
    }
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let settings = Settings { idle: true, ..Settings::new(Bytes(8 * LEAST_CAPACITY.0)) };
    let cache = Cache::at(settings, small.path(), store.path());
    cache.set_mode("narrowed", 0o600).unwrap();
    cache.set_mode("widened", 0o664).unwrap();
    // The owner may read and write, user 4242 may read, and nobody else.
    let mut acl = vec![2, 0, 0, 0];
    for (kind, rights, id) in
        [(1, 6, u32::MAX), (2, 4, 4242), (4, 0, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)]
    {
        acl.extend(u16::to_le_bytes(kind));
        acl.extend(u16::to_le_bytes(rights));
        acl.extend(u32::to_le_bytes(id));
    }
    cache.set_xattr("acl", "system.posix_acl_access", &acl).unwrap();
    cache.set_xattr("xattr", "user.kind", b"kind").unwrap();
    let names = ["narrowed", "widened", "acl", "same", "xattr"];
    // What comes to none of them as a whole.
    names.iter().for_each(|name| cache.write(name, 0, &vec![7; 5 << 20]).unwrap());
    let until = Instant::now() + Duration::from_secs(60);
    cache.owner().flush(&mut |_| Instant::now() < until).unwrap_err();
    assert_eq!(names.map(mode), [0o600, 0o600, 0o600, 0o640, 0o644]);
    small.change("size=64m");
    cache.flush();
    assert_eq!(names.map(mode), [0o600, 0o664, 0o640, 0o640, 0o644]);
}

/// So that the disk counts for them what they have no quota for, and refuses it.
#[test]
fn a_new_file_is_its_owners_before_its_data_comes() {
    use std::os::unix::fs::MetadataExt;
    const USER: u32 = 4711;
    let Some(small) = Small::new("size=4m") else { return };
    fs::write(small.path().join("changed"), b"before").unwrap();
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let settings = Settings { idle: true, ..Settings::new(Bytes(8 * LEAST_CAPACITY.0)) };
    let cache = Cache::at(settings, small.path(), store.path());
    for name in ["new", "changed"] {
        if name == "new" {
            cache.create(name, 0o664).unwrap();
        }
        cache.set_owner(name, USER, USER).unwrap();
        cache.write(name, 0, &vec![7; 5 << 20]).unwrap();
    }
    // What others have made under its name comes beside it.
    fs::write(small.path().join("changed"), b"theirs").unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    cache.owner().flush(&mut |_| Instant::now() < until).unwrap_err();
    let made: Vec<_> = (names(small.path()).into_iter())
        .filter(|name| name != "changed")
        .map(|name| fs::metadata(small.path().join(name)).unwrap())
        .map(|found| (found.uid(), found.gid(), found.mode() & 0o7777))
        .collect();
    assert_eq!(made, [(USER, USER, 0o600); 2]);
    small.change("size=64m");
    cache.flush();
    let found = fs::metadata(small.path().join("new")).unwrap();
    assert_eq!((found.uid(), found.mode() & 0o7777, found.len()), (USER, 0o664, 5 << 20));
}
