//! Names that are forgotten, because they take more than they may: here, none may stay that need not.

#![allow(clippy::unwrap_used)]

mod client;

use std::ffi::OsString;
use std::fs;
use std::sync::{Arc, Mutex};

use client::Cache;
use ondeck_cachefs::message::{Client, Ino, Named, ROOT, Reply, Request, Service};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};
use ondeck_core::Bytes;

fn settings() -> Settings {
    Settings { idle: true, names: Bytes(0), ..Settings::new(LEAST_CAPACITY) }
}

/// Has everything be forgotten that can be: the hand comes by twice until it takes something, and directories go after what is
/// in them.
fn forget(cache: &Cache) {
    for _ in 0..3 {
        cache.forget_names();
    }
}

fn known(cache: &Cache) -> u64 {
    cache.owner().status().names
}

#[test]
fn what_was_forgotten_is_found_again_as_it_was() {
    let cache = Cache::new(settings());
    cache.make_directory("made", 0o750).unwrap();
    cache.create("made/file", 0o640).unwrap();
    cache.write("made/file", 5000, b"some data").unwrap();
    cache.set_xattr("made/file", "user.test", b"value").unwrap();
    cache.set_times("made/file", 1234, 5678).unwrap();
    cache.link("made/file", "made/other").unwrap();
    cache.symlink("made/link", "target").unwrap();
    let before = cache.contents();
    let tree = cache.tree();
    forget(&cache);
    assert_eq!(known(&cache), 4, "nothing that the backing directory lacks is forgotten");
    cache.flush();
    forget(&cache);
    assert_eq!(known(&cache), 1, "but all that it has");
    assert_eq!(cache.owner().status().resident, 0);
    assert_eq!(cache.contents(), before);
    for (path, found) in cache.tree() {
        let expected = &tree[&path];
        let what = path.display();
        // Also those that the cache has given.
        assert_eq!(found.ino, expected.ino, "the number of {what}");
        assert_eq!((found.mode, found.mtime), (expected.mode, expected.mtime), "{what}");
        assert_eq!((found.nlink, found.size), (expected.nlink, found.size), "{what}");
    }
}

#[test]
fn what_was_removed_here_stays_removed_though_its_directory_was_forgotten() {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::create_dir(backing.path().join("dir")).unwrap();
    for name in ["removed", "moved", "replaced", "stays"] {
        fs::write(backing.path().join("dir").join(name), name).unwrap();
    }
    let mut cache = Cache::over(settings(), backing);
    // It is known as a whole when they go.
    assert_eq!(cache.list("dir").unwrap().len(), 4);
    cache.unlink("dir/removed").unwrap();
    cache.rename("dir/moved", "moved", 0).unwrap();
    cache.unlink("dir/replaced").unwrap();
    cache.create("dir/replaced", 0o644).unwrap();
    cache.unlink("dir/replaced").unwrap();
    for _ in 0..2 {
        forget(&cache);
        for name in ["removed", "moved", "replaced"] {
            assert_eq!(cache.attributes(format!("dir/{name}")).map(drop), Err(libc::ENOENT), "{name}");
        }
        assert_eq!(cache.list("dir"), Ok(vec![OsString::from("stays")]));
        assert_eq!(cache.read("moved", 0, 100), Ok(b"moved".to_vec()));
        forget(&cache);
        assert_eq!(cache.list("dir"), Ok(vec![OsString::from("stays")]));
        cache.replace();
    }
    cache.flush();
    forget(&cache);
    assert_eq!(known(&cache), 1);
    assert_eq!(cache.list("dir"), Ok(vec![OsString::from("stays")]));
    assert_eq!(fs::read_dir(cache.backing().join("dir")).unwrap().count(), 1);
}

#[test]
fn a_file_that_others_have_changed_too_is_not_forgotten() {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::write(backing.path().join("file"), "before").unwrap();
    let cache = Cache::over(settings(), backing);
    assert_eq!(cache.list(""), Ok(vec![OsString::from("file")]));
    cache.write("file", 0, b"ours").unwrap();
    fs::write(cache.backing().join("file"), "theirs").unwrap();
    cache.flush();
    forget(&cache);
    assert_eq!(cache.read("file", 0, 100), Ok(b"oursre".to_vec()));
    assert_eq!(cache.list(""), Ok(vec![OsString::from("file")]));
}

/// A client that keeps references until it is asked.
struct Keeper {
    asked: Mutex<Vec<Named>>,
}

impl Client for Keeper {
    fn give_back(&self, names: Vec<Named>) {
        self.asked.lock().unwrap().extend(names);
    }
}

#[test]
fn a_client_is_asked_for_what_it_keeps_and_nothing_is_forgotten_before_it_gives_it_back() {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::create_dir(backing.path().join("dir")).unwrap();
    fs::write(backing.path().join("dir/file"), "").unwrap();
    let cache = Cache::over(settings(), backing);
    let keeper = Arc::new(Keeper { asked: Mutex::default() });
    let client: Arc<dyn Client> = keeper.clone();
    cache.owner().attach(Arc::downgrade(&client));
    let lookup = |parent: Ino, name: &str| match cache.ask(Request::Lookup { parent, name: name.into() }) {
        Ok(Reply::Entry(found)) => found.ino,
        other => panic!("{other:?}"),
    };
    let dir = lookup(ROOT, "dir");
    let file = lookup(dir, "file");
    forget(&cache);
    let asked = std::mem::take(&mut *keeper.asked.lock().unwrap());
    // Not for the directory: it leads to the file.
    let expected = Named { ino: file, parent: dir, name: "file".into(), is_dir: false };
    assert!(!asked.is_empty() && asked.iter().all(|named| *named == expected), "{asked:?}");
    assert_eq!(known(&cache), 3);
    assert!(matches!(cache.ask(Request::Attributes { ino: file }), Ok(Reply::Attributes(_))));
    cache.owner().forget(&[(file, 1)]);
    assert_eq!(known(&cache), 2, "at once");
    forget(&cache);
    assert!(keeper.asked.lock().unwrap().iter().all(|named| named.ino == dir && named.is_dir));
    cache.owner().forget(&[(dir, 1)]);
    assert_eq!(known(&cache), 1);
    assert_eq!((lookup(ROOT, "dir"), lookup(dir, "file")), (dir, file));
}

#[test]
fn a_name_of_the_caches_own_that_the_backing_directory_has_is_not_there() {
    let backing = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::write(backing.path().join(".ondeck-cache-0-1"), "of another cache").unwrap();
    let cache = Cache::over(Settings::new(LEAST_CAPACITY), backing);
    assert_eq!(cache.attributes(".ondeck-cache-0-1").unwrap_err(), libc::ENOENT);
    assert_eq!(cache.unlink(".ondeck-cache-0-1").unwrap_err(), libc::ENOENT);
}

#[test]
fn an_access_list_that_is_not_there_can_be_removed_and_no_other_attribute() {
    let cache = Cache::new(Settings::new(LEAST_CAPACITY));
    cache.create("file", 0o640).unwrap();
    let ino = cache.attributes("file").unwrap().ino;
    let remove = |name: &str| cache.ask(Request::RemoveXattr { ino, name: name.into() }).map(drop);
    assert_eq!(remove("system.posix_acl_access"), Ok(()));
    assert_eq!(remove("user.none"), Err(libc::ENODATA));
}
