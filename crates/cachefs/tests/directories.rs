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

#[test]
fn a_directory_is_moved_into_one_that_others_have_moved_into_it() {
    each_way(|cache, is_killed| {
        cache.make_directory("place", 0o755).unwrap();
        new_file(cache, "place/new");
        cache.flush();
        fs::rename(cache.backing().join("place"), cache.backing().join("dir/place")).unwrap();
        cache.rename("dir", "place/dir", 0).unwrap();
        if is_killed {
            cache.replace();
        }
        cache.flush();
        let found = there(cache);
        assert!(
            found.contains_key("place/dir/deep/file") && found.contains_key("place/dir/place/new"),
            "{found:?}"
        );
    });
}

/// Numbers that look random, from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    /// A path of up to three names, of which there are few, so that the two often mean the same.
    fn path(&mut self) -> String {
        let mut path = String::new();
        for _ in 0..self.below(3) {
            path.push_str(["a/", "b/"][self.below(2)]);
        }
        path + ["a", "b", "c", "d"][self.below(4)]
    }
}

/// What each of the files on the backing directory has.
fn contents_there(at: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(at).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => contents_there(&entry.path(), found),
            false => found.push(fs::read_to_string(entry.path()).unwrap()),
        }
    }
}

/// One who uses the cache, and others who use the backing directory, for some steps.
struct Both {
    cache: Cache,
    dice: Dice,
    written: usize,
    /// Contents of theirs that were seen here, and then replaced or removed.
    consumed: Vec<String>,
    steps: Vec<String>,
}

impl Both {
    fn content(&mut self, whose: &str) -> String {
        self.written += 1;
        format!("{whose} {:06}", self.written)
    }

    fn consume(&mut self, path: &str) {
        let mut paths = vec![path.to_owned()];
        while let Some(path) = paths.pop() {
            if let Ok(content) = self.cache.read(&path, 0, 100) {
                self.consumed.push(String::from_utf8(content).unwrap());
            } else if let Ok(names) = self.cache.list(&path) {
                paths.extend(names.iter().map(|name| format!("{path}/{}", name.to_str().unwrap())));
            }
        }
    }

    fn ours(&mut self) {
        let (path, to) = (self.dice.path(), self.dice.path());
        let content = self.content("ours__");
        let (step, done) = match self.dice.below(10) {
            0..4 => {
                let made = self.cache.create(&path, 0o644);
                self.consume(&path);
                let is_there = made.is_ok() || made == Err(libc::EEXIST);
                let write = || self.cache.write(&path, 0, content.as_bytes());
                (format!("write {content} to {path}"), if is_there { write() } else { made })
            }
            4 => (format!("mkdir {path}"), self.cache.make_directory(&path, 0o755)),
            5 => {
                self.consume(&path);
                (format!("rm {path}"), self.cache.unlink(&path))
            }
            6 => (format!("rmdir {path}"), self.cache.remove_directory(&path)),
            7 => (format!("chmod {path}"), self.cache.set_mode(&path, 0o700)),
            _ => {
                // The kernel lets nobody move a directory into itself, nor onto one that it is in.
                let is_within =
                    |a: &str, b: &str| a.strip_prefix(b).is_some_and(|rest| rest.starts_with('/'));
                if is_within(&to, &path) || is_within(&path, &to) {
                    return;
                }
                self.consume(&to);
                (format!("mv {path} {to}"), self.cache.rename(&path, &to, 0))
            }
        };
        self.steps.push(format!("ours: {step}: {done:?}"));
    }

    fn theirs(&mut self) {
        let (path, to) = (self.dice.path(), self.dice.path());
        let content = self.content("theirs");
        let at = |path: &str| self.cache.backing().join(path);
        let (step, done) = match self.dice.below(10) {
            0..3 => (format!("write {content} to {path}"), fs::write(at(&path), &content)),
            3 => {
                let new = at("new");
                fs::write(&new, &content).unwrap();
                let moved = fs::rename(&new, at(&path)).inspect_err(|_| fs::remove_file(&new).unwrap());
                (format!("replace {path} by {content}"), moved)
            }
            4 => (format!("mkdir {path}"), fs::create_dir(at(&path))),
            5 => (format!("rm {path}"), fs::remove_file(at(&path))),
            6 | 7 => (format!("rm -r {path}"), fs::remove_dir_all(at(&path))),
            _ => (format!("mv {path} {to}"), fs::rename(at(&path), at(&to))),
        };
        let done = done.map_err(|error| error.raw_os_error());
        self.steps.push(format!("theirs: {step}: {done:?}"));
    }

    /// Nothing that either has written since the last time is lost, and nothing is held up.
    fn check(&mut self, since: usize) {
        let is_new = |content: &String| {
            content
                .rsplit(' ')
                .next()
                .and_then(|number| number.parse::<usize>().ok())
                .is_some_and(|it| it > since)
        };
        let mut wanted = Vec::new();
        contents_there(self.cache.backing(), &mut wanted);
        wanted.retain(|content| content.starts_with("theirs") && !self.consumed.contains(content));
        let mut paths: Vec<String> = vec![String::new()];
        while let Some(dir) = paths.pop() {
            // What others have removed can't be read any more.
            let Ok(names) = self.cache.list(&dir) else { continue };
            for name in names {
                let path =
                    if dir.is_empty() { String::new() } else { format!("{dir}/") } + name.to_str().unwrap();
                match self.cache.read(&path, 0, 100) {
                    // Beside theirs it is seen by two names, and may be replaced by the other one.
                    Ok(content) if content.starts_with(b"ours") && !path.contains(".ondeck-") => {
                        wanted.push(String::from_utf8(content).unwrap())
                    }
                    Ok(_) => {}
                    Err(libc::EISDIR) => paths.push(path),
                    Err(_) => {}
                }
            }
        }
        let told = self.cache.owner().flush(&mut |_| true);
        let mut found = Vec::new();
        contents_there(self.cache.backing(), &mut found);
        let lost: Vec<&String> = wanted.iter().filter(|it| is_new(it) && !found.contains(it)).collect();
        let steps = self.steps.join("\n");
        assert!(told.is_ok(), "{told:?}\n{steps}\n{:#?}", self.cache.owner().status());
        assert!(lost.is_empty(), "{lost:?} is lost\n{steps}\n{:#?}", self.cache.owner().status());
    }
}

/// 60 orders of steps, or as many as ONDECK_OTHERS says, from seed ONDECK_OTHERS_FROM on.
#[test]
fn whatever_others_do_nothing_that_either_has_written_is_lost_and_nothing_is_held_up() {
    let seeds = std::env::var("ONDECK_OTHERS").map_or(60, |seeds| seeds.parse().unwrap());
    let first = std::env::var("ONDECK_OTHERS_FROM").map_or(0, |seed| seed.parse().unwrap());
    for seed in first..first + seeds {
        let backing = tempfile::tempdir_in("/dev/shm").unwrap();
        if seed % 3 > 0 {
            for dir in ["a/a", "a/b", "b/a", "b/b"] {
                fs::create_dir_all(backing.path().join(dir)).unwrap();
                fs::write(backing.path().join(dir).join("c"), "before").unwrap();
            }
        }
        let cache = Cache::over(Settings { idle: true, ..Settings::new(LEAST_CAPACITY) }, backing);
        let mut dice = Dice(seed);
        dice.below(2);
        let steps = vec![format!("seed {seed}")];
        let mut both = Both { cache, dice, written: 0, consumed: Vec::new(), steps };
        for _ in 0..6 {
            let since = both.written;
            for _ in 0..both.dice.below(20) {
                match both.dice.below(2) {
                    0 => both.ours(),
                    _ => both.theirs(),
                }
            }
            if both.dice.below(4) == 0 {
                both.steps.push("killed".to_owned());
                both.cache.replace();
            }
            both.check(since);
            both.steps.push("flushed".to_owned());
        }
    }
}
