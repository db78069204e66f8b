//! Directories that others remove, move or put something else in the place of, while what is in them is not written back.

#![allow(clippy::unwrap_used)]

mod client;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use client::Cache;
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};
use ondeck_cachefs::status::ConflictKind;

/// A cache that writes nothing back by itself, over a directory with `dir/deep`, and a file in each; all is known and resident.
fn cache() -> Cache {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::create_dir_all(backing.path().join("dir/deep")).unwrap();
    for file in ["dir/file", "dir/other", "dir/deep/file"] {
        fs::write(backing.path().join(file), "before").unwrap();
    }
    fs::set_permissions(backing.path().join("dir"), fs::Permissions::from_mode(0o750)).unwrap();
    let cache = Cache::over(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }, backing);
    for file in ["dir/file", "dir/other", "dir/deep/file"] {
        assert_eq!(cache.read(file, 0, 6).unwrap(), b"before");
    }
    assert!(cache.xattr("dir", "user.none").is_err(), "it has none");
    cache
}

/// What the backing directory has: paths and contents, those of directories empty; names of ours beside others' without the number.
fn there(cache: &Cache) -> BTreeMap<String, String> {
    fn add(at: &Path, shown: &str, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(at).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let name = name.split_once(".ondeck-").map_or(name.clone(), |(name, _)| format!("{name}.ondeck"));
            let path = format!("{shown}{name}");
            if entry.file_type().unwrap().is_dir() {
                add(&entry.path(), &format!("{path}/"), found);
                found.insert(path, String::new());
            } else {
                found.insert(path, fs::read_to_string(entry.path()).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    add(cache.backing(), "", &mut found);
    found
}

#[track_caller]
fn assert_there(cache: &Cache, expected: &[(&str, &str)]) {
    let expected =
        expected.iter().map(|(path, content)| ((*path).to_owned(), (*content).to_owned())).collect();
    assert_eq!(there(cache), expected, "{:#?}", cache.owner().status());
}

/// Each conflict's path, and what happened.
fn conflicts(cache: &Cache) -> Vec<(String, ConflictKind)> {
    let conflicts = cache.owner().status().conflicts;
    conflicts.into_iter().map(|conflict| (conflict.path, conflict.kind)).collect()
}

fn new_file(cache: &Cache, path: &str) {
    cache.create(path, 0o644).unwrap();
    cache.write(path, 0, b"new").unwrap();
}

/// Also where the server had just used them, and after a kill.
fn each_way(test: impl Fn(&mut Cache, bool)) {
    for (is_in_use, is_killed) in [(false, false), (true, false), (true, true), (false, true)] {
        let mut cache = cache();
        if is_in_use {
            new_file(&cache, "dir/first");
            new_file(&cache, "dir/deep/first");
            cache.flush();
            cache.unlink("dir/first").unwrap();
            cache.unlink("dir/deep/first").unwrap();
            cache.flush();
        }
        test(&mut cache, is_killed);
        let failing = cache.owner().status().failing;
        assert!(failing.is_empty(), "{failing:?}");
    }
}

#[test]
fn what_was_changed_in_a_directory_that_others_removed_is_there_again_and_nothing_else() {
    each_way(|cache, is_killed| {
        cache.write("dir/file", 0, b"ours!!").unwrap();
        new_file(cache, "dir/deep/new");
        cache.make_directory("dir/deep/made", 0o700).unwrap();
        cache.set_mode("dir/other", 0o600).unwrap();
        fs::remove_dir_all(cache.backing().join("dir")).unwrap();
        if is_killed {
            cache.replace();
        }
        cache.flush();
        let all = [
            ("dir", ""),
            ("dir/deep", ""),
            ("dir/deep/made", ""),
            ("dir/deep/new", "new"),
            ("dir/file", "ours!!"),
        ];
        assert_there(cache, &all);
        let mode = fs::metadata(cache.backing().join("dir")).unwrap().permissions().mode() & 0o777;
        assert!(mode == 0o750 || is_killed && mode == 0o700, "{mode:o}");
        let found = conflicts(cache);
        for path in ["dir", "dir/deep"] {
            assert!(found.contains(&(path.to_owned(), ConflictKind::Removed)), "{found:?}");
        }
        // It goes on as ever.
        new_file(cache, "dir/later");
        cache.rename("dir/deep/new", "dir/moved", 0).unwrap();
        cache.flush();
        let all = [
            ("dir", ""),
            ("dir/deep", ""),
            ("dir/deep/made", ""),
            ("dir/file", "ours!!"),
            ("dir/later", "new"),
            ("dir/moved", "new"),
        ];
        assert_there(cache, &all);
    });
}

#[test]
fn what_was_changed_in_a_directory_that_others_replaced_is_beside_theirs() {
    each_way(|cache, is_killed| {
        cache.write("dir/file", 0, b"ours!!").unwrap();
        new_file(cache, "dir/new");
        fs::remove_dir_all(cache.backing().join("dir")).unwrap();
        fs::create_dir(cache.backing().join("dir")).unwrap();
        fs::write(cache.backing().join("dir/file"), "theirs").unwrap();
        if is_killed {
            cache.replace();
        }
        cache.flush();
        let all = [
            ("dir", ""),
            ("dir/file", "theirs"),
            ("dir.ondeck", ""),
            ("dir.ondeck/file", "ours!!"),
            ("dir.ondeck/new", "new"),
        ];
        assert_there(cache, &all);
        assert!(conflicts(cache).contains(&("dir".to_owned(), ConflictKind::Both)));
        assert_eq!(cache.read("dir/file", 0, 6).unwrap(), b"ours!!", "programs go on to see their own");
    });
}

#[test]
fn a_directory_that_both_have_removed_is_not_made_again() {
    each_way(|cache, is_killed| {
        for file in ["dir/deep/file", "dir/file", "dir/other"] {
            cache.unlink(file).unwrap();
        }
        cache.remove_directory("dir/deep").unwrap();
        cache.remove_directory("dir").unwrap();
        fs::remove_dir_all(cache.backing().join("dir")).unwrap();
        if is_killed {
            cache.replace();
        }
        cache.flush();
        assert_there(cache, &[]);
        assert_eq!(conflicts(cache), []);
    });
}

#[test]
fn a_directory_that_others_removed_and_in_which_attributes_alone_were_changed_is_gone() {
    each_way(|cache, is_killed| {
        cache.set_mode("dir", 0o700).unwrap();
        cache.set_mode("dir/file", 0o600).unwrap();
        fs::remove_dir_all(cache.backing().join("dir")).unwrap();
        if is_killed {
            cache.replace();
        }
        cache.flush();
        assert_there(cache, &[]);
        let all = conflicts(cache);
        assert!(all.iter().all(|(_, kind)| *kind == ConflictKind::Attributes), "{all:?}");
        assert!(all.iter().any(|(path, _)| path == "dir"), "{all:?}");
    });
}

#[test]
fn a_directory_that_was_moved_here_and_removed_by_others_has_what_was_changed_in_it() {
    each_way(|cache, is_killed| {
        cache.write("dir/file", 0, b"ours!!").unwrap();
        cache.rename("dir", "moved", 0).unwrap();
        new_file(cache, "moved/deep/new");
        fs::remove_dir_all(cache.backing().join("dir")).unwrap();
        if is_killed {
            cache.replace();
        }
        cache.flush();
        let all = [("moved", ""), ("moved/deep", ""), ("moved/deep/new", "new"), ("moved/file", "ours!!")];
        assert_there(cache, &all);
    });
}
