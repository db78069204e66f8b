//! What the backing directory refuses for a reason of its own is told, and holds up nothing else.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use client::{Cache, Small};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings, SyncWhen};
use rustix::fs::IFlags;

fn settings() -> Settings {
    Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }
}

fn over(backing: &Path) -> (Cache, tempfile::TempDir) {
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    (Cache::at(settings(), backing, store.path()), store)
}

/// One over a directory with a file, and a directory `locked` that takes no names.
fn over_a_locked_directory(backing: &Path) -> (Cache, tempfile::TempDir, PathBuf) {
    let locked = backing.join("locked");
    fs::create_dir(&locked).unwrap();
    fs::write(backing.join("file"), b"file").unwrap();
    let (cache, store) = over(backing);
    set_immutable(&locked, true);
    (cache, store, locked)
}

/// One that brings to the disk what is synced, with a file in a directory that the directory `locked` does not take.
fn over_what_is_not_taken(small: &Small) -> (Cache, tempfile::TempDir, PathBuf) {
    let locked = small.path().join("locked");
    fs::create_dir(&locked).unwrap();
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let settings = Settings { sync: SyncWhen::Fsync, ..settings() };
    let cache = Cache::at(settings, small.path(), store.path());
    set_immutable(&locked, true);
    cache.make_directory("locked/dir", 0o755).unwrap();
    cache.create("locked/dir/file", 0o644).unwrap();
    (cache, store, locked)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What a flush can't bring there.
#[track_caller]
fn flush_fails(cache: &Cache) -> String {
    let until = Instant::now() + Duration::from_secs(60);
    let told = cache.owner().flush(&mut |_| Instant::now() < until).unwrap_err();
    assert_ne!(told, "given up");
    told
}

fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 64 << 10];
    let length = rustix::fs::getxattr(path, name, value.as_mut_slice()).ok()?;
    value.truncate(length);
    Some(value)
}

/// Has the kernel refuse all changes of the names in a directory, or not any more.
fn set_immutable(dir: &Path, to: bool) {
    let dir = fs::File::open(dir).unwrap();
    let mut flags = rustix::fs::ioctl_getflags(&dir).unwrap();
    flags.set(IFlags::IMMUTABLE, to);
    rustix::fs::ioctl_setflags(&dir, flags).unwrap();
}

#[test]
fn an_attribute_that_the_backing_directory_has_no_room_for_is_refused_at_once() {
    let Some(small) = Small::new("nr_inodes=40") else { return };
    let (cache, _store) = over(small.path());
    cache.create("file", 0o644).unwrap();
    assert_eq!(cache.set_xattr("file", "user.large", &[7; 60_000]), Err(libc::ENOSPC));
    assert_eq!(cache.xattr("file", "user.large"), Err(libc::ENODATA));
    cache.set_xattr("file", "user.small", b"value").unwrap();
    cache.set_xattr("file", "user.middle", &[7; 3000]).unwrap();
    // Together with what it has.
    assert_eq!(cache.set_xattr("file", "user.more", &[7; 38_000]), Err(libc::ENOSPC));
    cache.set_xattr("file", "trusted.kind", b"value").unwrap();
    cache.flush();
    assert_eq!(names(small.path()), ["file"], "and nothing of the trial");
    let path = small.path().join("file");
    assert_eq!(xattr(&path, "user.small").as_deref(), Some(&b"value"[..]));
    assert_eq!(xattr(&path, "user.middle"), Some(vec![7; 3000]));
    assert_eq!(xattr(&path, "trusted.kind").as_deref(), Some(&b"value"[..]));
}

#[test]
fn an_attribute_that_is_refused_later_holds_up_nothing_else() {
    let Some(small) = Small::new("nr_inodes=100") else { return };
    let (mut cache, _store) = over(small.path());
    cache.create("file", 0o640).unwrap();
    cache.write("file", 0, b"data").unwrap();
    cache.set_xattr("file", "user.large", &[7; 40_000]).unwrap();
    cache.set_xattr("file", "user.small", b"value").unwrap();
    cache.rename("file", "renamed", 0).unwrap();
    cache.create("later", 0o600).unwrap();
    cache.write("later", 0, b"later").unwrap();
    small.change("nr_inodes=20");
    for _ in 0..2 {
        let told = flush_fails(&cache);
        assert_eq!(told, "renamed: No space left on device (os error 28)");
        assert_eq!(cache.owner().status().failing[0].path, "renamed");
        assert_eq!(cache.sync("renamed"), Err(libc::ENOSPC));
        assert_eq!(names(small.path()), ["later", "renamed"]);
        let path = small.path().join("renamed");
        assert_eq!(fs::read(&path).unwrap(), b"data");
        assert_eq!(xattr(&path, "user.small").as_deref(), Some(&b"value"[..]), "the others are there");
        assert_eq!(fs::read(small.path().join("later")).unwrap(), b"later");
        // Whoever goes on after a kill knows what is missing.
        cache.replace();
    }
    small.change("nr_inodes=100");
    cache.flush();
    assert_eq!(xattr(&small.path().join("renamed"), "user.large"), Some(vec![7; 40_000]));
    assert_eq!(cache.owner().status().failing, []);
}

/// Also if one trial ends and the next begins before the flush has looked: on a machine with too little time for all of these.
#[test]
fn a_flush_is_told_what_is_refused_however_often_that_is_tried() {
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                let Some(small) = Small::new("nr_inodes=100") else { return };
                let (cache, _store) = over(small.path());
                cache.create("file", 0o640).unwrap();
                cache.set_xattr("file", "user.large", &[7; 40_000]).unwrap();
                small.change("nr_inodes=20");
                for _ in 0..4 {
                    assert_eq!(flush_fails(&cache), "file: No space left on device (os error 28)");
                }
            });
        }
    });
}

#[test]
fn a_file_whose_access_list_is_refused_is_nobody_elses() {
    use std::os::unix::fs::PermissionsExt;
    let Some(small) = Small::new("nr_inodes=100") else { return };
    let (cache, _store) = over(small.path());
    cache.create("file", 0o600).unwrap();
    // The owner and 4000 users may read, the group may not: the mode says `r` for the group, which is the list's mask.
    let mut list = vec![2, 0, 0, 0];
    let mut entry = |kind: u16, rights: u16, id: u32| {
        list.extend(kind.to_le_bytes());
        list.extend(rights.to_le_bytes());
        list.extend(id.to_le_bytes());
    };
    entry(1, 6, u32::MAX);
    (1..4000).for_each(|user| entry(2, 4, user));
    [(4, 0), (16, 4), (32, 0)].into_iter().for_each(|(kind, rights)| entry(kind, rights, u32::MAX));
    cache.set_xattr("file", "system.posix_acl_access", &list).unwrap();
    assert_eq!(cache.attributes("file").unwrap().mode & 0o777, 0o640);
    cache.set_xattr("file", "user.large", &[7; 40_000]).unwrap();
    small.change("nr_inodes=20");
    flush_fails(&cache);
    let mode = || fs::metadata(small.path().join("file")).unwrap().permissions().mode() & 0o777;
    let held = xattr(&small.path().join("file"), "system.posix_acl_access");
    assert!(held.is_some() || mode() == 0o600, "{held:?} {:o}", mode());
    small.change("nr_inodes=100");
    cache.flush();
    assert_eq!(mode(), 0o640);
}

#[test]
fn names_that_the_backing_directory_refuses_hold_up_those_that_depend_on_them_alone() {
    let Some(small) = Small::new("size=64m") else { return };
    let locked = small.path().join("locked");
    fs::create_dir(&locked).unwrap();
    for name in ["gone", "moved", "target"] {
        fs::write(locked.join(name), name).unwrap();
    }
    let (mut cache, _store) = over(small.path());
    set_immutable(&locked, true);
    cache.unlink("locked/gone").unwrap();
    cache.rename("locked/moved", "outside", 0).unwrap();
    cache.make_directory("locked/dir", 0o755).unwrap();
    cache.create("locked/dir/file", 0o644).unwrap();
    cache.write("locked/dir/file", 0, b"in it").unwrap();
    cache.rename("locked/dir/file", "out", 0).unwrap();
    cache.link("locked/target", "locked/link").unwrap();
    cache.create("kept", 0o644).unwrap();
    // All of these have nothing to do with it.
    cache.make_directory("other", 0o755).unwrap();
    cache.create("other/new", 0o644).unwrap();
    cache.write("other/new", 0, b"new").unwrap();
    cache.rename("other/new", "other/last", 0).unwrap();
    for _ in 0..2 {
        let told = flush_fails(&cache);
        assert!(told.contains("Operation not permitted"), "{told}");
        assert_eq!(names(small.path()), ["kept", "locked", "other"]);
        assert_eq!(names(&small.path().join("other")), ["last"]);
        assert_eq!(fs::read(small.path().join("other/last")).unwrap(), b"new");
        assert_eq!(names(&locked), ["gone", "moved", "target"]);
        let seen: Vec<_> = cache.tree().into_keys().map(|path| path.to_str().unwrap().to_owned()).collect();
        let expected = [
            "kept",
            "locked",
            "locked/dir",
            "locked/link",
            "locked/target",
            "other",
            "other/last",
            "out",
            "outside",
        ];
        assert_eq!(seen, expected, "programs see all that was done");
        // A new process knows which operations are done, though others before them are not.
        cache.replace();
    }
    set_immutable(&locked, false);
    cache.flush();
    assert_eq!(names(small.path()), ["kept", "locked", "other", "out", "outside"]);
    assert_eq!(names(&locked), ["dir", "link", "target"]);
    assert_eq!(fs::read(small.path().join("out")).unwrap(), b"in it");
    assert_eq!(cache.owner().status().conflicts, []);
}

#[test]
fn who_takes_back_what_is_refused_is_free_of_it() {
    let Some(small) = Small::new("size=64m") else { return };
    let (cache, _store, locked) = over_a_locked_directory(small.path());
    cache.create("locked/new", 0o644).unwrap();
    cache.write("locked/new", 0, b"new").unwrap();
    cache.link("file", "locked/link").unwrap();
    flush_fails(&cache);
    cache.unlink("locked/new").unwrap();
    cache.unlink("locked/link").unwrap();
    // But for the directory's time, which programs have seen change.
    assert_eq!(flush_fails(&cache), "locked: Operation not permitted (os error 1)");
    assert_eq!(cache.owner().status().pending_operations, 0);
    assert_eq!(names(small.path()), ["file", "locked"]);
    set_immutable(&locked, false);
    cache.flush();
    assert_eq!(names(&locked), [""; 0]);
    assert_eq!(cache.owner().status().failing, []);
}

#[test]
fn a_link_that_is_taken_back_while_it_is_tried_is_not_tried_for_ever() {
    let Some(small) = Small::new("size=64m") else { return };
    let (cache, _store, locked) = over_a_locked_directory(small.path());
    let all_made = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !all_made.load(Ordering::Relaxed) {
                let _ = cache.owner().flush(&mut |_| false);
            }
        });
        for number in 0..300 {
            let name = format!("locked/{number}");
            cache.link("file", &name).unwrap();
            // Here and there in the attempt.
            for _ in 0..number % 20 {
                std::thread::yield_now();
            }
            cache.unlink(&name).unwrap();
        }
        all_made.store(true, Ordering::Relaxed);
    });
    assert_eq!(flush_fails(&cache), "locked: Operation not permitted (os error 1)");
    assert_eq!(cache.owner().status().pending_operations, 0);
    set_immutable(&locked, false);
    cache.flush();
    assert_eq!(names(&locked), [""; 0]);
    assert_eq!(cache.owner().status().conflicts, []);
}

/// A program, which is not written by this process: a child that another test forks meanwhile would have it open for writing, and
/// nobody could run it.
fn copy_of_sleep(program: &Path) {
    assert!(std::process::Command::new("cp").arg("/bin/sleep").arg(program).status().unwrap().success());
}

#[test]
fn a_flush_says_what_a_file_does_not_take_though_its_name_is_as_it_was() {
    let Some(small) = Small::new("size=64m") else { return };
    let program = small.path().join("program");
    copy_of_sleep(&program);
    let (cache, _store) = over(small.path());
    let mut running = std::process::Command::new(&program).arg("1000").spawn().unwrap();
    cache.write("program", 0, b"changed").unwrap();
    assert_eq!(flush_fails(&cache), "program: Text file busy (os error 26)");
    assert!(cache.owner().status().dirty > 0);
    running.kill().unwrap();
    running.wait().unwrap();
    cache.flush();
    assert_eq!(fs::read(&program).unwrap()[..7], b"changed"[..]);
}

#[test]
fn fsync_of_what_waits_for_a_refused_name_is_told_and_others_are_not() {
    let Some(small) = Small::new("size=64m") else { return };
    let (cache, _store, locked) = over_what_is_not_taken(&small);
    cache.create("other", 0o644).unwrap();
    cache.write("other", 0, b"other").unwrap();
    assert_eq!(cache.sync("locked/dir/file"), Err(libc::EPERM));
    assert_eq!(cache.sync("other"), Ok(()));
    assert_eq!(fs::read(small.path().join("other")).unwrap(), b"other");
    set_immutable(&locked, false);
    assert_eq!(cache.sync("locked/dir/file"), Ok(()));
    assert!(locked.join("dir/file").exists());
}

#[test]
fn fsync_of_a_directory_is_told_what_it_does_not_take() {
    let Some(small) = Small::new("size=64m") else { return };
    let (cache, _store, _locked) = over_what_is_not_taken(&small);
    cache.make_directory("other", 0o755).unwrap();
    cache.create("other/file", 0o644).unwrap();
    assert_eq!(cache.sync("locked"), Err(libc::EPERM));
    assert_eq!(cache.sync("locked/dir"), Err(libc::EPERM), "what depends on it, too");
    assert_eq!(cache.sync("other"), Ok(()));
    assert!(small.path().join("other/file").exists());
    // Who takes it back has nothing to wait for.
    cache.unlink("locked/dir/file").unwrap();
    cache.remove_directory("locked/dir").unwrap();
    assert_eq!(cache.sync("locked"), Ok(()));
}

#[test]
fn data_that_a_file_does_not_take_holds_up_its_names_alone() {
    let Some(small) = Small::new("size=64m") else { return };
    let program = small.path().join("program");
    copy_of_sleep(&program);
    let (cache, _store) = over(small.path());
    // The kernel lets nobody write to a program that runs.
    let mut running = std::process::Command::new(&program).arg("1000").spawn().unwrap();
    let before = cache.read("program", 0, 1 << 20).unwrap();
    cache.write("program", 0, b"changed").unwrap();
    cache.rename("program", "new-program", 0).unwrap();
    cache.create("other", 0o644).unwrap();
    cache.write("other", 0, b"other").unwrap();
    let told = flush_fails(&cache);
    assert!(told.contains("Text file busy"), "{told}");
    assert_eq!(names(small.path()), ["other", "program"], "no name without its data");
    assert_eq!(fs::read(small.path().join("other")).unwrap(), b"other");
    running.kill().unwrap();
    running.wait().unwrap();
    cache.flush();
    assert_eq!(names(small.path()), ["new-program", "other"]);
    let after = fs::read(small.path().join("new-program")).unwrap();
    assert_eq!((&after[..7], &after[7..]), (&b"changed"[..], &before[7..]));
}

#[test]
fn names_that_are_there_leave_room_for_others_though_one_before_them_is_refused() {
    let Some(small) = Small::new("size=64m,nr_inodes=0") else { return };
    let (cache, _store, locked) = over_a_locked_directory(small.path());
    cache.make_directory("locked/dir", 0o755).unwrap();
    cache.make_directory("other", 0o755).unwrap();
    // More than a small cache may have on their way.
    for number in 0..17_000 {
        if number % 8_000 == 7_999 {
            flush_fails(&cache);
        }
        cache.create(format!("other/{number}"), 0o644).unwrap();
    }
    flush_fails(&cache);
    assert_eq!(names(&small.path().join("other")).len(), 17_000);
    assert_eq!(cache.owner().status().pending_operations, 1);
    set_immutable(&locked, false);
    cache.flush();
    assert_eq!(names(&locked), ["dir"]);
}

/// On machines with SELinux or Smack they are never taken away, and what is new has one by itself.
#[test]
fn labels_that_belong_to_the_kernel_stay_as_the_backing_directory_has_them() {
    let Some(small) = Small::new("size=64m") else { return };
    let (cache, _store) = over(small.path());
    let labels = ["security.selinux", "security.SMACK64", "security.SMACK64TRANSMUTE"];
    cache.make_directory("dir", 0o755).unwrap();
    cache.set_xattr("dir", "user.first", b"1").unwrap();
    cache.flush();
    let dir = small.path().join("dir");
    for label in labels {
        // As the kernel does by itself.
        if rustix::fs::setxattr(&dir, label, b"label", rustix::fs::XattrFlags::empty()).is_err() {
            ondeck_skip::skipped("this kernel gives labels itself");
            return;
        }
    }
    cache.set_xattr("dir", "user.second", b"2").unwrap();
    cache.flush();
    for label in labels {
        assert_eq!(xattr(&dir, label).as_deref(), Some(&b"label"[..]), "{label}");
        assert_eq!(cache.set_xattr("dir", label, b"other"), Err(libc::EOPNOTSUPP));
    }
    assert_eq!(xattr(&dir, "user.second").as_deref(), Some(&b"2"[..]));
}
