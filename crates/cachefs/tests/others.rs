//! What others change in the backing directory meanwhile is kept, and ours goes beside it: the table of docs/cache.md.
//! And losses that other caches are known for.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use client::Cache;
use ondeck_cachefs::message::{OpenMode, ROOT, Request};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};
use ondeck_cachefs::status::ConflictKind;
use ondeck_core::Bytes;

/// A cache that writes nothing back by itself, over a directory that is prepared.
fn cache(prepare: impl FnOnce(&std::path::Path)) -> Cache {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    prepare(backing.path());
    Cache::over(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }, backing)
}

/// What the backing directory has: names and contents, sorted; names of ours beside others' without the number.
fn there(cache: &Cache) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = fs::read_dir(cache.backing())
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let shown = match name.split_once(".ondeck-") {
                Some((name, _)) => format!("{name}.ondeck"),
                None => name,
            };
            (shown, fs::read_to_string(entry.path()).unwrap_or_else(|_| "no file".to_owned()))
        })
        .collect();
    found.sort();
    found
}

#[track_caller]
fn assert_there(cache: &Cache, expected: &[(&str, &str)]) {
    let expected: Vec<(String, String)> =
        expected.iter().map(|(name, content)| ((*name).to_owned(), (*content).to_owned())).collect();
    assert_eq!(there(cache), expected, "{:#?}", cache.owner().status());
}

/// Each conflict's path, and what happened.
fn conflicts(cache: &Cache) -> Vec<(String, ConflictKind)> {
    let conflicts = cache.owner().status().conflicts;
    conflicts.into_iter().map(|conflict| (conflict.path, conflict.kind)).collect()
}

#[test]
fn a_file_that_both_have_changed_is_theirs_and_ours_is_beside_it() {
    let cache = cache(|dir| fs::write(dir.join("file"), "before").unwrap());
    cache.write("file", 0, b"ours!!").unwrap();
    fs::write(cache.backing().join("file"), "theirs").unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "theirs"), ("file.ondeck", "ours!!")]);
    assert_eq!(conflicts(&cache), [("file".to_owned(), ConflictKind::Both)]);
    assert_eq!(cache.read("file", 0, 6).unwrap(), b"ours!!", "programs go on to see their own");
    // A second change of ours goes to where ours is.
    cache.write("file", 0, b"again!").unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "theirs"), ("file.ondeck", "again!")]);
}

#[test]
fn a_file_that_others_replaced_while_it_was_changed_here_is_theirs() {
    let cache = cache(|dir| fs::write(dir.join("file"), "before").unwrap());
    cache.write("file", 0, b"ours!!").unwrap();
    fs::write(cache.backing().join("other"), "theirs").unwrap();
    fs::rename(cache.backing().join("other"), cache.backing().join("file")).unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "theirs"), ("file.ondeck", "ours!!")]);
}

#[test]
fn a_file_that_was_changed_here_and_removed_by_others_is_ours() {
    let cache = cache(|dir| fs::write(dir.join("file"), "before").unwrap());
    cache.write("file", 0, b"ours!!").unwrap();
    fs::remove_file(cache.backing().join("file")).unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "ours!!")]);
    assert_eq!(conflicts(&cache), [("file".to_owned(), ConflictKind::Removed)]);
}

#[test]
fn what_both_have_made_is_theirs_under_its_name() {
    let cache = cache(|_| ());
    cache.create("file", 0o644).unwrap();
    cache.write("file", 0, b"ours").unwrap();
    fs::write(cache.backing().join("file"), "theirs").unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "theirs"), ("file.ondeck", "ours")]);
    // It was given that name by us: what is written now is no second conflict.
    cache.write("file", 0, b"more").unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "theirs"), ("file.ondeck", "more")]);
    assert_eq!(conflicts(&cache), [("file".to_owned(), ConflictKind::Both)]);
}

#[test]
fn what_was_removed_here_and_changed_by_others_stays() {
    let cache = cache(|dir| fs::write(dir.join("file"), "before").unwrap());
    cache.unlink("file").unwrap();
    fs::write(cache.backing().join("file"), "theirs").unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "theirs")]);
    assert_eq!(conflicts(&cache), [("file".to_owned(), ConflictKind::NotRemoved)]);
}

#[test]
fn after_a_kill_nothing_of_others_is_taken_for_what_the_cache_had_begun() {
    let theirs = |cache: &Cache| fs::write(cache.backing().join("file"), "theirs").unwrap();
    type Change = fn(&Cache);
    let changes: [Change; 3] = [
        |cache| cache.unlink("file").unwrap(),
        |cache| {
            cache.unlink("file").unwrap();
            cache.create("file", 0o644).unwrap();
            cache.write("file", 0, b"ours").unwrap();
        },
        |cache| {
            cache.rename("file", "other", 0).unwrap();
            cache.create("file", 0o644).unwrap();
            cache.unlink("other").unwrap();
        },
    ];
    for change in changes {
        for before in [true, false] {
            let mut cache = cache(|dir| fs::write(dir.join("file"), "before").unwrap());
            cache.read("file", 0, 6).unwrap();
            change(&cache);
            if before {
                theirs(&cache);
            }
            cache.replace();
            if !before {
                theirs(&cache);
            }
            cache.flush();
            let found = there(&cache);
            assert!(found.iter().any(|(_, content)| content == "theirs"), "{found:?}");
            assert!(!conflicts(&cache).is_empty(), "{found:?}");
        }
    }
}

#[test]
fn what_others_changed_stays_also_if_it_was_moved_here_before_it_was_removed() {
    let cache = cache(|dir| {
        fs::write(dir.join("file"), "before").unwrap();
        fs::write(dir.join("old"), "old").unwrap();
    });
    cache.rename("file", "other", 0).unwrap();
    cache.unlink("other").unwrap();
    fs::write(cache.backing().join("file"), "theirs").unwrap();
    cache.flush();
    assert!(there(&cache).iter().any(|(_, content)| content == "theirs"), "{:?}", there(&cache));
    // The same if another one takes its new name.
    let moved = there(&cache).into_iter().find(|(_, content)| content == "theirs").unwrap().0;
    assert_eq!(conflicts(&cache), [(moved, ConflictKind::NotRemoved)]);
}

#[test]
fn a_file_that_was_moved_here_and_taken_away_by_others_holds_nothing_up() {
    for (replaced, resident) in [(false, true), (true, true), (true, false)] {
        let cache = cache(|dir| fs::write(dir.join("file"), "before").unwrap());
        if resident {
            cache.read("file", 0, 6).unwrap();
        } else {
            cache.attributes("file").unwrap();
        }
        cache.rename("file", "other", 0).unwrap();
        if replaced {
            fs::write(cache.backing().join("new"), "theirs").unwrap();
            fs::rename(cache.backing().join("new"), cache.backing().join("file")).unwrap();
        } else {
            fs::remove_file(cache.backing().join("file")).unwrap();
        }
        cache.flush();
        let theirs = replaced.then_some(("file", "theirs"));
        let ours = resident.then_some(("other", "before"));
        let expected: Vec<(&str, &str)> = theirs.into_iter().chain(ours).collect();
        assert_there(&cache, &expected);
        let kind = if resident { ConflictKind::Removed } else { ConflictKind::Gone };
        assert_eq!(conflicts(&cache), [("other".to_owned(), kind)]);
    }
}

#[test]
fn what_others_have_put_in_the_place_of_a_file_gets_no_link_and_is_not_copied() {
    let cache = cache(|dir| fs::write(dir.join("file"), "before").unwrap());
    cache.link("file", "second").unwrap();
    let dir = cache.backing().to_owned();
    fs::rename(dir.join("file"), dir.join("away")).unwrap();
    fs::write(dir.join("file"), "theirs").unwrap();
    assert!(cache.owner().flush(&mut |_| true).is_err(), "it can't be made");
    assert_there(&cache, &[("away", "before"), ("file", "theirs")]);
    // Once it is there again, it can.
    fs::rename(dir.join("away"), dir.join("file")).unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "before"), ("second", "before")]);
}

#[test]
fn a_directory_that_stays_because_of_what_a_dead_cache_has_left_is_not_blamed_on_others() {
    let cache = cache(|dir| {
        for name in ["left", "theirs"] {
            fs::create_dir(dir.join(name)).unwrap();
        }
        fs::write(dir.join("left/.ondeck-cache-0123-45"), "half").unwrap();
    });
    cache.remove_directory("left").unwrap();
    cache.remove_directory("theirs").unwrap();
    fs::write(cache.backing().join("theirs/file"), "theirs").unwrap();
    cache.flush();
    assert_eq!(
        conflicts(&cache),
        [("left".to_owned(), ConflictKind::Unfinished), ("theirs".to_owned(), ConflictKind::NotRemoved)]
    );
}

/// A cache of a user's, which writes nothing back by itself, with a file of that user's.
fn of_user(mode: u32) -> Option<Cache> {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = backing.path().join("file");
    fs::write(&file, vec![b'-'; 10_000]).unwrap();
    std::os::unix::fs::chown(&file, Some(USER), Some(USER)).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    // What is changed from now on has another time.
    let (clock, until) = (backing.path().join("clock"), Instant::now() + Duration::from_secs(60));
    let changed = |path: &Path| fs::metadata(path).map(|found| (found.ctime(), found.ctime_nsec())).unwrap();
    fs::write(&clock, "").unwrap();
    while changed(&clock) == changed(&file) {
        assert!(Instant::now() < until);
        fs::write(&clock, "").unwrap();
    }
    fs::remove_file(&clock).unwrap();
    let settings = Settings { idle: true, ..Settings::new(LEAST_CAPACITY) };
    Cache::of_user(settings, USER, backing)
}

/// Nobody whose files are on this machine.
const USER: u32 = 20_005;

#[test]
fn a_file_whose_mode_keeps_its_owner_out_is_not_taken_for_others_work_when_it_was_opened() {
    for is_killed in [false, true] {
        // Its owner may write to it, and the cache has to read the rest of the block.
        let Some(mut cache) = of_user(0o200) else { return };
        cache.write("file", 0, b"ours").unwrap();
        if is_killed {
            cache.replace();
        }
        cache.flush();
        assert_eq!(conflicts(&cache), []);
        // It is open already.
        cache.write("file", 9_990, b"ours").unwrap();
        cache.flush();
        assert_eq!(conflicts(&cache), []);
        let found = fs::read(cache.backing().join("file")).unwrap();
        assert_eq!((&found[..5], &found[9_989..]), (&b"ours-"[..], &b"-ours------"[..]));
        assert_eq!(fs::metadata(cache.backing().join("file")).unwrap().mode() & 0o7777, 0o200);
    }
}

#[test]
fn a_file_whose_mode_keeps_its_owner_out_is_others_work_if_they_have_changed_it() {
    let Some(cache) = of_user(0o200) else { return };
    cache.attributes("file").unwrap();
    fs::write(cache.backing().join("file"), "theirs").unwrap();
    cache.write("file", 0, b"ours").unwrap();
    cache.flush();
    assert_eq!(conflicts(&cache), [("file".to_owned(), ConflictKind::Both)]);
    assert_eq!(fs::read(cache.backing().join("file")).unwrap(), b"theirs");
}

#[test]
fn what_others_have_changed_is_theirs_also_if_it_could_not_be_read_at_first() {
    for is_killed in [false, true] {
        let Some(mut cache) = of_user(0o600) else { return };
        cache.write("file", 0, b"ours").unwrap();
        // Others have changed it, and let nobody read it for a while: what is not in the cache can't be put beside it.
        let file = cache.backing().join("file");
        fs::write(&file, "theirs").unwrap();
        std::os::unix::fs::chown(&file, Some(0), Some(0)).unwrap();
        for _ in 0..2 {
            let until = Instant::now() + Duration::from_secs(60);
            let told = cache.owner().flush(&mut |_| Instant::now() < until).unwrap_err();
            assert!(told.contains("Permission denied"), "{told}");
        }
        if is_killed {
            cache.replace();
        }
        std::os::unix::fs::chown(&file, Some(USER), Some(USER)).unwrap();
        cache.flush();
        assert_eq!(conflicts(&cache), [("file".to_owned(), ConflictKind::Both)]);
        let names: Vec<String> = there(&cache).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["file", "file.ondeck"]);
        assert_eq!(fs::read(&file).unwrap(), b"theirs");
        assert_eq!(there(&cache)[1].1.as_bytes()[..6], *b"ours--");
    }
}

#[test]
fn attributes_alone_do_not_touch_what_others_have_changed() {
    let cache = cache(|dir| {
        fs::write(dir.join("file"), "before").unwrap();
        fs::set_permissions(dir.join("file"), fs::Permissions::from_mode(0o644)).unwrap();
    });
    cache.set_mode("file", 0o600).unwrap();
    fs::write(cache.backing().join("file"), "theirs").unwrap();
    cache.flush();
    assert_there(&cache, &[("file", "theirs")]);
    let mode = fs::metadata(cache.backing().join("file")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    assert_eq!(conflicts(&cache), [("file".to_owned(), ConflictKind::Attributes)]);
}

#[test]
fn a_file_that_others_removed_is_not_made_again_without_its_data() {
    let data = vec![7; 3 << 20];
    let cache = cache(|root| {
        for name in ["mode", "part", "open"] {
            fs::write(root.join(name), &data).unwrap();
        }
    });
    cache.set_mode("mode", 0o600).unwrap();
    // Nothing of the first one was read, and of the third one a part, so that it is open.
    cache.write("part", 4096, b"ours").unwrap();
    cache.evict();
    assert_eq!(cache.read("open", 2 << 20, 10).unwrap(), [7; 10]);
    cache.write("open", 4096, b"ours").unwrap();
    for name in ["mode", "part", "open"] {
        fs::remove_file(cache.backing().join(name)).unwrap();
    }
    cache.flush();
    let mut kinds = conflicts(&cache);
    kinds.sort_unstable_by_key(|(path, _)| path.clone());
    let kind = |path: &str, kind| (path.to_owned(), kind);
    let expected = [
        kind("mode", ConflictKind::Attributes),
        kind("open", ConflictKind::Removed),
        kind("part", ConflictKind::Removed),
    ];
    assert_eq!(kinds, expected);
    let names: Vec<String> = there(&cache).into_iter().map(|(name, _)| name).collect();
    // Of a part alone that is here there may be more: it has its own name then.
    assert!(names == ["open", "part"] || names == ["open", "part.ondeck"], "{names:?}");
    let mut whole = data.clone();
    whole[4096..4100].copy_from_slice(b"ours");
    assert!(fs::read(cache.backing().join("open")).unwrap() == whole);
    if names[1] == "part" {
        assert!(fs::read(cache.backing().join("part")).unwrap() == whole);
    }
}

#[test]
fn what_is_kept_beside_replaces_nothing_that_was_kept_before() {
    let cache = cache(|dir| fs::write(dir.join("file"), "before").unwrap());
    for ours in [b"first!", b"second"] {
        cache.write("file", 0, ours).unwrap();
        fs::write(cache.backing().join("file"), "theirs").unwrap();
        cache.flush();
    }
    // The second one is of the same file of ours.
    assert_there(&cache, &[("file", "theirs"), ("file.ondeck", "second")]);
    drop(cache);

    let mut cache = self::cache(|dir| fs::write(dir.join("file"), "before").unwrap());
    for ours in [b"first!", b"second"] {
        cache.write("file", 0, ours).unwrap();
        fs::write(cache.backing().join("file"), "theirs").unwrap();
        cache.flush();
        // Another store's files have other names.
        cache.forget_everything();
    }
    assert_there(&cache, &[("file", "theirs"), ("file.ondeck", "first!"), ("file.ondeck", "second")]);
}

/// rclone has lost these: a file that is cut while an earlier version is on its way, and renamed over another one.
#[test]
fn a_file_that_is_cut_and_then_renamed_over_another_is_the_new_one() {
    let cache = cache(|dir| fs::write(dir.join("data"), "an old version of some length").unwrap());
    cache.write("data", 0, b"changed, and not on disk yet").unwrap();
    cache.create("data.new", 0o644).unwrap();
    cache.write("data.new", 0, b"a first version of it").unwrap();
    let open =
        cache.open_as("data.new", OpenMode { write: true, truncate: true, ..OpenMode::default() }).unwrap();
    cache.write_open(&open, 0, b"new").unwrap();
    cache.close(open);
    cache.rename("data.new", "data", 0).unwrap();
    cache.flush();
    assert_there(&cache, &[("data", "new")]);
    assert_eq!(cache.read("data", 0, 100).unwrap(), b"new");
}

/// What a watcher of a name sees while a cache is flushed: how long the file is, once each time that it changes.
fn watched(cache: &Cache, name: &str, meanwhile: impl Fn() + Sync) -> Vec<Option<u64>> {
    let path = cache.backing().join(name);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                seen.push(fs::metadata(&path).ok().map(|found| found.len()));
                seen.dedup();
            }
            seen
        });
        let other = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                meanwhile();
            }
        });
        cache.flush();
        is_over.store(true, Ordering::Relaxed);
        other.join().unwrap();
        watcher.join().unwrap()
    })
}

#[test]
fn a_name_shows_no_part_of_a_file_that_is_cut_while_it_is_written_back() {
    const LARGE: u64 = 32 << 20;
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::write(backing.path().join("current"), "before").unwrap();
    let settings = Settings { idle: true, ..Settings::new(Bytes(128 << 20)) };
    let cache = Cache::over(settings, backing);
    cache.create("new", 0o644).unwrap();
    cache.write("new", 0, &vec![7; LARGE as usize]).unwrap();
    cache.rename("new", "current", 0).unwrap();
    let size = std::sync::atomic::AtomicU64::new(LARGE);
    let seen = watched(&cache, "current", || {
        let size = size.fetch_sub(4096, Ordering::Relaxed) - 4096;
        cache.truncate("current", size).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    });
    let least = size.load(Ordering::Relaxed);
    let is_right = |seen: &Option<u64>| seen.is_some_and(|seen| seen == 6 || seen >= least);
    assert!(seen.iter().all(is_right), "{seen:?}, and never less than {least}");
}

#[test]
fn of_files_that_take_each_others_place_one_is_always_there() {
    const VERSIONS: usize = 20;
    let cache = cache(|root| fs::write(root.join("state-0"), "").unwrap());
    for version in 1..=VERSIONS {
        cache.create(format!("state-{version}"), 0o644).unwrap();
        cache.unlink(&format!("state-{}", version - 1)).unwrap();
        for number in 0..100 {
            cache.create(format!("{version}-{number}"), 0o644).unwrap();
        }
    }
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let missed = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let there = |version: usize| cache.backing().join(format!("state-{version}")).exists();
            let (mut at, mut missed) = (0, 0);
            while !is_over.load(Ordering::Relaxed) {
                // The one that was seen last, or one after it; looked at in the order in which they come.
                match (at..=VERSIONS).find(|version| there(*version)) {
                    Some(version) => at = version,
                    None => missed += 1,
                }
            }
            missed
        });
        cache.flush();
        is_over.store(true, Ordering::Relaxed);
        watcher.join().unwrap()
    });
    assert_eq!(missed, 0, "there was a moment without any");
    assert!(cache.backing().join("state-20").exists() && !cache.backing().join("state-19").exists());
}

#[test]
fn a_file_that_is_removed_while_it_is_opened_is_not_one_of_zeros() {
    let cache = cache(|root| fs::write(root.join("old"), "data").unwrap());
    cache.create("new", 0o644).unwrap();
    cache.write("new", 0, b"data").unwrap();
    for name in ["new", "old"] {
        let found = cache.attributes(name).unwrap();
        let name = std::ffi::OsString::from(name);
        cache.ask(Request::Unlink { parent: ROOT, name }).unwrap();
        cache.owner().flush(&mut |_| true).unwrap();
        let opened = cache.ask(Request::Open { ino: found.ino, mode: OpenMode::default() });
        assert_eq!(opened.map(drop), Err(libc::ESTALE));
    }
}

#[test]
fn a_file_that_is_renamed_and_removed_before_it_was_written_back_leaves_nothing() {
    let mut cache = cache(|dir| fs::write(dir.join("stays"), "stays").unwrap());
    cache.create("one", 0o644).unwrap();
    cache.write("one", 0, b"content").unwrap();
    cache.rename("one", "two", 0).unwrap();
    cache.unlink("two").unwrap();
    // A name that is used again is another file's.
    cache.create("two", 0o644).unwrap();
    cache.write("two", 0, b"another").unwrap();
    cache.replace();
    cache.flush();
    assert_there(&cache, &[("stays", "stays"), ("two", "another")]);
    assert_eq!(conflicts(&cache), []);
}

#[test]
fn what_others_put_where_something_is_made_holds_up_nothing() {
    let cache = Cache::new(Settings::new(LEAST_CAPACITY));
    // The name has the store's, which nobody but the cache chooses.
    cache.create("first", 0o644).unwrap();
    let id = fs::read_to_string(cache.store().join("id")).unwrap();
    for next in 1..6 {
        let name = format!(".ondeck-cache-{id}-{:x}", (1_u64 << 62) + next);
        fs::create_dir(cache.backing().join(&name)).unwrap();
        fs::write(cache.backing().join(&name).join("theirs"), "").unwrap();
    }
    cache.make_directory("second", 0o755).unwrap();
    cache.create("second/third", 0o644).unwrap();
    cache.write("second/third", 0, b"ours").unwrap();
    cache.flush();
    assert_eq!(fs::read(cache.backing().join("second/third")).unwrap(), b"ours");
    assert!(cache.backing().join("first").exists());
}

#[test]
fn what_is_fetched_never_takes_the_place_of_what_is_just_written() {
    const FILES: usize = 600;
    const LENGTH: usize = 256 << 10;
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    for number in 0..FILES {
        fs::write(backing.path().join(number.to_string()), vec![1; LENGTH]).unwrap();
    }
    let cache = Cache::over(Settings::new(Bytes(256 << 20)), backing);
    let files: Vec<_> = (0..FILES).map(|number| cache.open(&number.to_string()).unwrap()).collect();
    let written = vec![2; LENGTH - 4096];
    let (begun, read) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Without a pause: the other one begins in the middle of what this one does.
    let await_beyond = |count: &AtomicUsize, number: usize| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while count.load(Ordering::SeqCst) <= number {
            assert!(Instant::now() < deadline, "the other one does not come to file {number}");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (number, file) in files.iter().enumerate() {
                await_beyond(&begun, number);
                // At any moment of the write.
                (0..number % 60 * 20).for_each(|_| std::hint::spin_loop());
                assert_eq!(cache.read_open(file, 0, 4096).unwrap(), [1; 4096]);
                read.store(number + 1, Ordering::SeqCst);
            }
        });
        for (number, file) in files.iter().enumerate() {
            begun.store(number + 1, Ordering::SeqCst);
            cache.write_open(file, 4096, &written).unwrap();
            await_beyond(&read, number);
        }
    });
    for (number, file) in files.iter().enumerate() {
        assert!(cache.read_open(file, 4096, LENGTH).unwrap() == written, "file {number}");
    }
    files.into_iter().for_each(|file| cache.close(file));
}

#[test]
fn a_file_that_somebody_has_a_lease_of_is_read_and_written_once_they_have_given_it_back() {
    extern "C" fn hears_it(_: libc::c_int) {}
    // SAFETY: the handler does nothing; without one the kernel's word that a lease is to be given back would end this process.
    unsafe { libc::signal(libc::SIGIO, hears_it as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    let (read, written) = (backing.path().join("read"), backing.path().join("written"));
    fs::write(&read, vec![1; 4096]).unwrap();
    fs::write(&written, vec![1; 4096]).unwrap();
    let cache = Cache::over(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }, backing);
    let leased = |path: &Path, act: &dyn Fn()| {
        let holder = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        // SAFETY: it changes nothing but a lease of a file that is open here.
        let lease = |command: libc::c_int, kind: libc::c_int| unsafe {
            libc::fcntl(holder.as_raw_fd(), command, kind)
        };
        assert_eq!(lease(libc::F_SETLEASE, libc::F_WRLCK), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let until = Instant::now() + Duration::from_secs(30);
                while lease(libc::F_GETLEASE, 0) == libc::F_WRLCK && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert_ne!(lease(libc::F_GETLEASE, 0), libc::F_WRLCK, "nobody has asked for it");
                // Who holds one has work to do first.
                std::thread::sleep(Duration::from_millis(100));
                assert_eq!(lease(libc::F_SETLEASE, libc::F_UNLCK), 0);
            });
            act();
        });
    };
    leased(&read, &|| assert_eq!(cache.read("read", 0, 4096).unwrap(), [1; 4096]));
    cache.write("written", 0, &[2; 4096]).unwrap();
    leased(&written, &|| cache.flush());
    assert_eq!(fs::read(&written).unwrap(), [2; 4096]);
    let status = cache.owner().status();
    assert_eq!((status.failures, status.conflicts), (0, vec![]));
}
