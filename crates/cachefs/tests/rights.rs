//! Who reaches the backing directory itself finds nothing there by rights that were taken away in the cache before.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use client::{Cache, Small};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings, SyncWhen};

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

/// A user who is nobody else, and nobody's owner.
const STRANGER: u32 = 4242;

/// A cache that writes back what it is asked for alone, over a directory that is prepared.
fn cache(prepare: impl FnOnce(&Path)) -> Cache {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    prepare(backing.path());
    let settings = Settings { idle: true, sync: SyncWhen::Fsync, ..Settings::new(LEAST_CAPACITY) };
    Cache::over(settings, backing)
}

/// The owner, the group and the stranger may do anything, and nobody else.
fn for_a_stranger() -> Vec<u8> {
    let mut list = vec![2, 0, 0, 0];
    for (kind, rights, id) in
        [(1, 7, u32::MAX), (2, 7, STRANGER), (4, 7, u32::MAX), (16, 7, u32::MAX), (32, 0, u32::MAX)]
    {
        list.extend(u16::to_le_bytes(kind));
        list.extend(u16::to_le_bytes(rights));
        list.extend(u32::to_le_bytes(id));
    }
    list
}

fn give(path: &Path, name: &str, list: &[u8]) {
    rustix::fs::setxattr(path, name, list, rustix::fs::XattrFlags::empty()).unwrap();
}

fn has(path: &Path, name: &str) -> bool {
    rustix::fs::getxattr(path, name, vec![0; 1024].as_mut_slice()).is_ok()
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn what_is_made_inherits_nothing_from_a_default_acl_that_was_removed_before() {
    let mut cache = cache(|backing| {
        for dir in ["dir", "above", "above/here"] {
            fs::create_dir(backing.join(dir)).unwrap();
            give(&backing.join(dir), DEFAULT, &for_a_stranger());
        }
    });
    cache.remove_xattr("dir", DEFAULT).unwrap();
    cache.make_directory("dir/sub", 0o775).unwrap();
    for file in ["dir/file", "dir/killed", "dir/sub/file"] {
        cache.create(file, 0o664).unwrap();
    }
    // It inherits the list that the one above it keeps, and gives it up.
    cache.make_directory("above/sub", 0o775).unwrap();
    cache.remove_xattr("above/sub", DEFAULT).unwrap();
    cache.create("above/sub/file", 0o664).unwrap();
    for file in ["dir/file", "dir/sub/file", "above/sub/file"] {
        cache.sync(file).unwrap();
        assert!(!has(&cache.backing().join(file), ACCESS), "{file}");
        assert_eq!(mode(&cache.backing().join(file)), 0o664, "{file}");
    }
    cache.replace();
    cache.flush();
    for file in ["dir/file", "dir/killed", "dir/sub", "dir/sub/file", "above/sub/file"] {
        assert!(!has(&cache.backing().join(file), ACCESS), "{file}");
    }
    for dir in ["dir", "dir/sub", "above/sub"] {
        assert!(!has(&cache.backing().join(dir), DEFAULT), "{dir}");
    }
    // What is still there is inherited.
    cache.create("above/file", 0o664).unwrap();
    cache.flush();
    assert!(has(&cache.backing().join("above/file"), ACCESS));
}

#[test]
fn what_is_kept_beside_others_work_has_the_list_of_the_file_and_none_of_the_directory() {
    let cache = cache(|backing| {
        for file in ["plain", "listed"] {
            fs::write(backing.join(file), "before").unwrap();
            set_mode(&backing.join(file), 0o660);
        }
        give(&backing.join("listed"), ACCESS, &for_a_stranger());
        give(backing, DEFAULT, &for_a_stranger());
    });
    for file in ["plain", "listed"] {
        cache.write(file, 0, b"ours").unwrap();
        fs::write(cache.backing().join(file), "theirs").unwrap();
    }
    cache.flush();
    let beside = |of: &str| {
        let names = fs::read_dir(cache.backing()).unwrap().map(|entry| entry.unwrap().path());
        let mut beside =
            names.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{of}.")));
        beside.next().unwrap()
    };
    assert!(!has(&beside("plain"), ACCESS));
    assert!(has(&beside("listed"), ACCESS));
}

#[test]
fn a_directory_that_loses_rights_has_lost_them_before_anything_new_appears_below_it() {
    let cache = cache(|backing| {
        for dir in [
            "made",
            "moved",
            "far",
            "far/away",
            "data",
            "data/below",
            "acl",
            "widened",
            "private",
            "private/in",
        ] {
            fs::create_dir(backing.join(dir)).unwrap();
            set_mode(&backing.join(dir), if dir == "widened" { 0o2750 } else { 0o2755 });
        }
        set_mode(&backing.join("private"), 0o700);
        give(&backing.join("acl"), ACCESS, &for_a_stranger());
        for file in ["here", "data/below/file"] {
            fs::write(backing.join(file), "before").unwrap();
        }
    });
    let there = |dir: &str| mode(&cache.backing().join(dir));
    for dir in ["made", "moved", "far", "data"] {
        cache.set_mode(dir, 0o2700).unwrap();
    }
    cache.create("made/file", 0o644).unwrap();
    cache.sync("made/file").unwrap();
    assert_eq!(there("made"), 0o2700);
    cache.rename("here", "moved/file", 0).unwrap();
    cache.sync("moved/file").unwrap();
    assert_eq!(there("moved"), 0o2700);
    cache.make_directory("far/away/new", 0o755).unwrap();
    cache.create("far/away/new/file", 0o644).unwrap();
    cache.sync("far/away/new/file").unwrap();
    assert_eq!((there("far"), there("far/away")), (0o2700, 0o2755));
    cache.write("data/below/file", 0, b"after").unwrap();
    cache.sync("data/below/file").unwrap();
    assert_eq!(there("data"), 0o2700);
    // It comes to where all may look for it.
    cache.set_mode("private/in", 0o2700).unwrap();
    cache.rename("private/in", "out", 0).unwrap();
    cache.sync("out").unwrap();
    assert_eq!(there("out"), 0o2700);
    // Whom the list had named is not among those who may enter.
    cache.remove_xattr("acl", ACCESS).unwrap();
    cache.set_mode("acl", 0o2750).unwrap();
    cache.create("acl/file", 0o644).unwrap();
    cache.sync("acl/file").unwrap();
    assert!(there("acl") == 0o2700 || !has(&cache.backing().join("acl"), ACCESS), "{:o}", there("acl"));
    // What it gains comes with its own attributes.
    cache.set_mode("widened", 0o2705).unwrap();
    cache.create("widened/file", 0o644).unwrap();
    cache.sync("widened/file").unwrap();
    assert_eq!(there("widened") & 0o070, 0);
    cache.flush();
    for (dir, expected) in [("made", 0o2700), ("far", 0o2700), ("acl", 0o2750), ("widened", 0o2705)] {
        assert_eq!(there(dir), expected, "{dir}");
    }
    assert!(!has(&cache.backing().join("acl"), ACCESS));
}

#[test]
fn a_directory_that_lost_rights_before_a_kill_has_lost_them_before_anything_new_appears_in_it() {
    let mut cache = cache(|backing| {
        fs::create_dir(backing.join("dir")).unwrap();
        set_mode(&backing.join("dir"), 0o755);
    });
    cache.set_mode("dir", 0o500).unwrap();
    cache.replace();
    cache.create("dir/file", 0o644).unwrap();
    cache.sync("dir/file").unwrap();
    assert_eq!(mode(&cache.backing().join("dir")) & 0o077, 0);
    cache.flush();
    assert_eq!(mode(&cache.backing().join("dir")), 0o500);
}

/// Has the kernel refuse all changes of a directory, or not any more.
fn set_immutable(dir: &Path, to: bool) {
    let dir = fs::File::open(dir).unwrap();
    let mut flags = rustix::fs::ioctl_getflags(&dir).unwrap();
    flags.set(rustix::fs::IFlags::IMMUTABLE, to);
    rustix::fs::ioctl_setflags(&dir, flags).unwrap();
}

#[test]
fn a_directory_whose_list_was_refused_has_lost_its_rights_before_anything_new_appears_in_it() {
    let Some(small) = Small::new("size=64m") else { return };
    for is_killed in [false, true] {
        let name = if is_killed { "killed" } else { "dir" };
        let dir = small.path().join(name);
        fs::create_dir(&dir).unwrap();
        set_mode(&dir, 0o755);
        let store = tempfile::tempdir_in("/dev/shm").unwrap();
        let settings = Settings { idle: true, sync: SyncWhen::Fsync, ..Settings::new(LEAST_CAPACITY) };
        let mut cache = Cache::at(settings, small.path(), store.path());
        cache.set_xattr(name, ACCESS, &for_a_stranger()).unwrap();
        cache.set_mode(name, 0o700).unwrap();
        set_immutable(&dir, true);
        cache.owner().flush(&mut |_| true).unwrap_err();
        set_immutable(&dir, false);
        assert_eq!(mode(&dir), 0o755);
        if is_killed {
            cache.replace();
        }
        cache.create(format!("{name}/secret"), 0o644).unwrap();
        cache.sync(&format!("{name}/secret")).unwrap();
        assert_eq!(mode(&dir), 0o700);
        cache.flush();
        assert_eq!(mode(&dir), 0o700);
        assert!(has(&dir, ACCESS));
    }
}

#[test]
fn what_is_written_while_a_file_is_written_back_is_not_there_by_rights_that_were_lost_before() {
    extern "C" fn hears_it(_: libc::c_int) {}
    // SAFETY: the handler does nothing; without one the kernel's word that a lease is to be given back would end this process.
    unsafe { libc::signal(libc::SIGIO, hears_it as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    let cache = cache(|backing| {
        fs::create_dir(backing.join("dir")).unwrap();
        set_mode(&backing.join("dir"), 0o755);
        for file in ["file", "dir/file"] {
            fs::write(backing.join(file), "before").unwrap();
            set_mode(&backing.join(file), 0o644);
        }
    });
    for (path, loses, to) in [("file", "file", 0o600), ("dir/file", "dir", 0o700)] {
        cache.write(path, 0, b"public").unwrap();
        // Its pass waits for this to be given back, before it reads what it is to write.
        let holder = fs::File::options().read(true).write(true).open(cache.backing().join(path)).unwrap();
        // SAFETY: it changes nothing but a lease of a file that is open here.
        let lease = |command: libc::c_int, kind: libc::c_int| unsafe {
            libc::fcntl(holder.as_raw_fd(), command, kind)
        };
        assert_eq!(lease(libc::F_SETLEASE, libc::F_WRLCK), 0);
        std::thread::scope(|scope| {
            let syncs = scope.spawn(|| cache.sync(path));
            let until = Instant::now() + Duration::from_secs(30);
            while lease(libc::F_GETLEASE, 0) == libc::F_WRLCK {
                assert!(Instant::now() < until, "nobody has asked for it");
                std::thread::sleep(Duration::from_millis(1));
            }
            cache.set_mode(loses, to).unwrap();
            cache.write(path, 0, b"secret").unwrap();
            assert_eq!(lease(libc::F_SETLEASE, libc::F_UNLCK), 0);
            syncs.join().unwrap().unwrap();
        });
        assert_eq!(fs::read(cache.backing().join(path)).unwrap(), b"secret");
        assert_eq!(mode(&cache.backing().join(loses)), to, "{loses}");
    }
    cache.flush();
    assert_eq!(mode(&cache.backing().join("file")), 0o600);
}

/// One whose mode keeps even its owner out is opened for a moment, by whoever writes something back below it.
#[test]
fn a_directory_of_the_users_own_has_its_mode_whatever_is_written_back_below_it() {
    const USER: u32 = 4711;
    const FILES: usize = 24;
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    let settings = Settings { idle: true, ..Settings::new(LEAST_CAPACITY) };
    let file = |number: usize| format!("dir/{number}");
    fs::create_dir(backing.path().join("dir")).unwrap();
    (0..FILES).for_each(|number| fs::write(backing.path().join(file(number)), [0; 8]).unwrap());
    for path in (0..FILES).map(file).chain(["dir".to_owned()]) {
        std::os::unix::fs::chown(backing.path().join(path), Some(USER), Some(USER)).unwrap();
    }
    let Some(cache) = Cache::of_user(settings, USER, backing) else { return };
    for round in 0..250_u8 {
        let to = [0o600, 0o200, 0o444, 0o044][usize::from(round) % 4];
        (0..FILES / 2).for_each(|number| cache.write(&file(number), 0, &[round; 8]).unwrap());
        cache.set_mode("dir", to).unwrap();
        (FILES / 2..FILES).for_each(|number| cache.write(&file(number), 0, &[round; 8]).unwrap());
        cache.flush();
        assert_eq!(mode(&cache.backing().join("dir")), to, "round {round}");
    }
    let status = cache.owner().status();
    assert_eq!((status.failures, status.conflicts), (0, vec![]));
}

#[test]
fn what_is_below_a_directory_that_is_moved_has_lost_its_rights_before() {
    for is_killed in [false, true] {
        let mut cache = cache(|backing| {
            for dir in ["private", "private/a", "private/a/b", "private/stays", "public"] {
                fs::create_dir(backing.join(dir)).unwrap();
                set_mode(&backing.join(dir), if dir == "private" { 0o700 } else { 0o755 });
            }
            for file in ["private/a/b/old", "private/a/file"] {
                fs::write(backing.join(file), "before").unwrap();
                set_mode(&backing.join(file), 0o644);
            }
            fs::hard_link(backing.join("private/a/file"), backing.join("private/a/b/link")).unwrap();
        });
        for (path, to) in [("private/a/b", 0o700), ("private/stays", 0o700), ("private/a/file", 0o600)] {
            cache.set_mode(path, to).unwrap();
        }
        if is_killed {
            cache.replace();
        }
        cache.rename("private/a", "public/a", 0).unwrap();
        cache.sync("public").unwrap();
        let there = |path: &str| mode(&cache.backing().join(path));
        assert_eq!((there("public/a/b"), there("public/a/file")), (0o700, 0o600));
        if !is_killed {
            assert_eq!(there("private/stays"), 0o755, "nobody needs that before its time");
        }
        cache.flush();
        assert_eq!(there("private/stays"), 0o700);
    }
}

#[test]
fn a_directory_in_which_each_may_remove_their_own_alone_is_so_before_anything_new_appears_in_it() {
    let cache = cache(|backing| {
        for (dir, mode) in [("all", 0o777), ("narrower", 0o777), ("still", 0o1777)] {
            fs::create_dir(backing.join(dir)).unwrap();
            set_mode(&backing.join(dir), mode);
        }
    });
    // The last one is wider by that, which comes with its attributes.
    for (dir, to, before) in [("all", 0o1777, 0o1777), ("narrower", 0o1770, 0o1770), ("still", 0o770, 0o1770)]
    {
        cache.set_mode(dir, to).unwrap();
        cache.create(format!("{dir}/file"), 0o644).unwrap();
        cache.sync(&format!("{dir}/file")).unwrap();
        assert_eq!(mode(&cache.backing().join(dir)), before, "{dir}");
        cache.flush();
        assert_eq!(mode(&cache.backing().join(dir)), to, "{dir}");
    }
}

#[test]
fn a_directory_that_may_have_lost_too_much_before_a_kill_has_its_rights_soon_after_it() {
    let mut cache = cache(|backing| {
        fs::create_dir(backing.join("dir")).unwrap();
        set_mode(&backing.join("dir"), 0o775);
        give(&backing.join("dir"), ACCESS, &for_a_stranger());
        fs::create_dir(backing.join("other")).unwrap();
        set_mode(&backing.join("other"), 0o750);
    });
    cache.remove_xattr("dir", ACCESS).unwrap();
    cache.set_mode("dir", 0o750).unwrap();
    cache.set_mode("other", 0o755).unwrap();
    cache.replace();
    let dir = cache.backing().join("dir");
    let until = Instant::now() + Duration::from_secs(30);
    while mode(&dir) != 0o750 || has(&dir, ACCESS) {
        assert!(Instant::now() < until, "{:o}", mode(&dir));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(mode(&cache.backing().join("other")), 0o750, "that has time");
}

/// What is taken out of a private directory before that is opened to others.
#[test]
fn a_directory_gains_rights_when_what_was_taken_out_of_it_before_is_gone() {
    const DIRECTORIES: usize = 100;
    let cache = cache(|dir| {
        for number in 0..DIRECTORIES {
            let private = dir.join(format!("private{number}"));
            fs::create_dir(&private).unwrap();
            fs::create_dir(dir.join(format!("other{number}"))).unwrap();
            for name in ["removed", "moved", "replaced"] {
                fs::write(private.join(name), "secret").unwrap();
            }
            set_mode(&private, 0o700);
            set_mode(&dir.join(format!("other{number}")), 0o700);
        }
    });
    for number in 0..DIRECTORIES {
        let private = format!("private{number}");
        cache.unlink(&format!("{private}/removed")).unwrap();
        cache.rename(&format!("{private}/moved"), &format!("other{number}/moved"), 0).unwrap();
        cache.create(format!("{private}/new"), 0o644).unwrap();
        cache.write(&format!("{private}/new"), 0, b"public").unwrap();
        cache.rename(&format!("{private}/new"), &format!("{private}/replaced"), 0).unwrap();
        if number % 2 == 0 {
            cache.set_mode(&private, 0o755).unwrap();
        } else {
            cache.set_xattr(&private, ACCESS, &for_a_stranger()).unwrap();
        }
    }
    let is_found = |number: usize| {
        let private = cache.backing().join(format!("private{number}"));
        let is_open = || mode(&private) & 0o070 != 0;
        let secret = |name: &str| fs::read(private.join(name)).is_ok_and(|content| content == b"secret");
        // Looked at before: what is opened after that may be without it by then.
        is_open() && ["removed", "moved", "replaced"].into_iter().find(|name| secret(name)).is_some()
    };
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| cache.flush());
        while !flush.is_finished() {
            let found = (0..DIRECTORIES).find(|number| is_found(*number));
            assert_eq!(found, None, "a secret is in an open directory");
        }
    });
    for number in 0..DIRECTORIES {
        let private = cache.backing().join(format!("private{number}"));
        assert_eq!(mode(&private), if number % 2 == 0 { 0o755 } else { 0o770 }, "{private:?}");
        assert_eq!(fs::read(private.join("replaced")).unwrap(), b"public");
    }
}

/// Watches the backing directory while all is written back to it: nothing may ever be found there.
fn never_found_while_flushing(cache: &Cache, find: impl Fn() -> Option<String>) {
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| cache.flush());
        while !flush.is_finished() {
            assert_eq!(find(), None, "it is found on the backing directory");
        }
    });
}

#[test]
fn a_directory_gains_rights_when_what_was_overwritten_or_closed_below_it_before_is_so_there() {
    const DIRECTORIES: usize = 60;
    const LARGE: usize = 3 << 20;
    let cache = cache(|dir| {
        for number in 0..DIRECTORIES {
            let private = dir.join(format!("private{number}"));
            fs::create_dir_all(private.join("deep/closed")).unwrap();
            for name in ["overwritten", "cut", "deep/overwritten", "deep/closed/file", "closed"] {
                fs::write(private.join(name), "secret").unwrap();
            }
            set_mode(&private, 0o700);
        }
        fs::write(dir.join("private0/overwritten"), vec![b's'; LARGE]).unwrap();
    });
    for number in 0..DIRECTORIES {
        let private = format!("private{number}");
        for name in ["overwritten", "deep/overwritten"] {
            cache.write(&format!("{private}/{name}"), 0, b"public").unwrap();
        }
        cache.truncate(&format!("{private}/cut"), 0).unwrap();
        cache.set_mode(&format!("{private}/closed"), 0o600).unwrap();
        cache.set_mode(&format!("{private}/deep/closed"), 0o700).unwrap();
        cache.set_mode(&private, 0o755).unwrap();
    }
    never_found_while_flushing(&cache, || {
        (0..DIRECTORIES).map(|number| cache.backing().join(format!("private{number}"))).find_map(|private| {
            if mode(&private) & 0o077 == 0 {
                return None;
            }
            let holds = |name: &str| fs::read(private.join(name)).unwrap().starts_with(b"s");
            let secret = ["overwritten", "cut", "deep/overwritten"].into_iter().find(|name| holds(name));
            let open =
                ["closed", "deep/closed"].into_iter().find(|name| mode(&private.join(name)) & 0o077 != 0);
            secret.or(open).map(|name| private.join(name).display().to_string())
        })
    });
    for number in 0..DIRECTORIES {
        assert_eq!(mode(&cache.backing().join(format!("private{number}"))), 0o755);
    }
    let status = cache.owner().status();
    assert_eq!((status.failures, status.conflicts), (0, vec![]));
}

#[test]
fn what_was_overwritten_below_a_directory_is_so_there_before_the_directory_is_moved() {
    const DIRECTORIES: usize = 60;
    let cache = cache(|dir| {
        fs::create_dir(dir.join("private")).unwrap();
        fs::create_dir(dir.join("public")).unwrap();
        set_mode(&dir.join("private"), 0o700);
        for number in 0..DIRECTORIES {
            let deep = dir.join(format!("private/{number}/deep"));
            fs::create_dir_all(&deep).unwrap();
            fs::write(deep.join("file"), "secret").unwrap();
            fs::write(deep.join("../cut"), "secret").unwrap();
        }
    });
    for number in 0..DIRECTORIES {
        cache.write(&format!("private/{number}/deep/file"), 0, b"public").unwrap();
        cache.truncate(&format!("private/{number}/cut"), 1).unwrap();
        cache.rename(&format!("private/{number}"), &format!("public/{number}"), 0).unwrap();
    }
    never_found_while_flushing(&cache, || {
        (0..DIRECTORIES).find_map(|number| {
            let moved = cache.backing().join(format!("public/{number}"));
            let holds = |name: &&str| fs::read(moved.join(name)).is_ok_and(|content| content == b"secret");
            ["deep/file", "cut"].into_iter().find(holds).map(|name| moved.join(name).display().to_string())
        })
    });
    for number in 0..DIRECTORIES {
        let moved = cache.backing().join(format!("public/{number}"));
        assert_eq!(fs::read(moved.join("deep/file")).unwrap(), b"public");
        assert_eq!(fs::read(moved.join("cut")).unwrap(), b"s");
    }
}

/// A file that can't be overwritten keeps closed what it is in, and nothing else.
#[test]
fn a_directory_stays_closed_while_what_is_below_it_can_not_be_overwritten() {
    let cache = cache(|dir| {
        for name in ["private", "other"] {
            fs::create_dir(dir.join(name)).unwrap();
            // As long as it runs, the kernel lets nobody write to it.
            fs::copy("/bin/sleep", dir.join(name).join("program")).unwrap();
            set_mode(&dir.join(name), 0o700);
        }
    });
    let program = cache.backing().join("private/program");
    let mut runs = std::process::Command::new(&program).arg("1000").spawn().unwrap();
    for name in ["private", "other"] {
        cache.write(&format!("{name}/program"), 0, b"public").unwrap();
        cache.set_mode(name, 0o755).unwrap();
    }
    let told = cache.owner().flush(&mut |_| true);
    let there = |name: &str| mode(&cache.backing().join(name));
    let found = (there("private"), there("other"));
    runs.kill().unwrap();
    runs.wait().unwrap();
    assert!(told.unwrap_err().contains("private"));
    assert_eq!(found, (0o700, 0o755));
    cache.flush();
    assert_eq!(there("private"), 0o755);
    assert!(fs::read(program).unwrap().starts_with(b"public"));
}
