//! What is left of a cache when somebody removes parts of what the machine keeps of it.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cached::{Mounted, sh, succeeds};
use ondeck_cachefs::instance::control::{Answer, Order, ask};
use ondeck_cachefs::instance::{self, Caches, Plan};
use scene::wait_until;

/// The directory of the only cache of a scene.
fn state(mounted: &Mounted) -> PathBuf {
    let command = mounted.scene.ondeck(&["cache", "status"]);
    let base = command.get_envs().find(|(name, _)| *name == "ONDECK_STATE_DIR").unwrap().1.unwrap();
    let entries = fs::read_dir(Path::new(base).join("cache")).unwrap();
    let found: Vec<PathBuf> =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

/// What the mounting says that succeeds.
fn told(mounted: &Mounted) -> String {
    let output = mounted.mounting().output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    told
}

/// What the mounting says that is refused.
fn refused(mounted: &Mounted) -> String {
    let output = mounted.mounting().output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it has succeeded: {told}");
    told
}

#[test]
fn who_removes_the_state_directory_removes_nothing_of_the_user_and_nothing_of_the_store() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |backing| {
        fs::create_dir(backing.join("d")).unwrap();
        fs::write(backing.join("d/old"), "old").unwrap();
    }) else {
        return;
    };
    mounted.run("echo new > d/new");
    let state = state(&mounted);
    assert_eq!(fs::metadata(&state).unwrap().permissions().mode() & 0o7777, 0o700);
    let record = fs::read(state.join("instance.json")).unwrap();
    let removed = Command::new("rm").arg("-rf").arg(&state).output().unwrap();
    let told = String::from_utf8_lossy(&removed.stderr);
    assert!(!removed.status.success() && told.contains("Read-only file system"), "{told}");
    assert_eq!(fs::read_to_string(mounted.backing.join("d/old")).unwrap(), "old");
    assert!(state.join("store/journal").exists());
    // No second server comes to the same store, though the lock is gone, too.
    fs::write(state.join("instance.json"), record).unwrap();
    let message = refused(&mounted);
    assert!(message.contains("there is a cache at"), "{message}");
    assert_eq!(mounted.run("cat d/old d/new; echo more > d/more; rm d/old"), "oldnew\n");

    assert_eq!(sh(&mounted.fast, "cat d/more"), "more\n");
}

#[test]
fn the_directory_that_a_mount_makes_for_its_state_is_roots_alone_and_a_run_can_use_it() {
    let Some(mounted) = Mounted::not_yet(&[], |_| ()) else { return };
    let base = mounted.scene.path("state");
    let _ = fs::remove_dir_all(&base);
    let mount = mounted.mounting();
    let mut loose = Command::new("sh");
    loose.args(["-c", "umask 0 && exec \"$@\"", "sh"]).arg(mount.get_program()).args(mount.get_args());
    loose.envs(mount.get_envs().filter_map(|(name, value)| Some((name, value?))));
    succeeds(loose.current_dir(mount.get_current_dir().unwrap()));
    assert_eq!(fs::metadata(&base).unwrap().permissions().mode() & 0o7777, 0o700);
    assert_eq!(fs::metadata(state(&mounted)).unwrap().permissions().mode() & 0o7777, 0o700);
    succeeds(&mut mounted.scene.ondeck(&["run", "--list"]));
}

#[test]
fn the_next_server_keeps_the_mounts_read_only_and_writes_through_them() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    mounted.run("echo first > file");
    let state = state(&mounted);
    mounted.kill();
    assert!(told(&mounted).contains("recovered"));
    for place in ["store/journal", "backing/file"] {
        let written = fs::File::options().append(true).create(true).open(state.join(place));
        assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EROFS), "{place}");
    }
    mounted.run("echo second >> file");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(fs::read_to_string(mounted.backing.join("file")).unwrap(), "first\nsecond\n");
}

#[test]
fn a_backing_directory_that_is_mounted_read_only_is_never_written_to() {
    let bind = |backing: &Path| {
        fs::write(backing.join("file"), "old").unwrap();
        let script = "mount --bind . . && cd \"$PWD\" && mount -o remount,bind,ro,nosuid .";
        sh(backing, script);
    };
    let Some(mounted) = Mounted::not_yet(&["--age", "1h"], bind) else { return };
    mounted.mount();
    for _ in 0..2 {
        let written = fs::write(mounted.fast.join("file"), "new");
        assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EROFS));
        mounted.kill();
        mounted.mount();
    }
    mounted.ondeck(&["unmount", "fast"]);
    succeeds(Command::new("umount").arg(&mounted.backing));
    assert_eq!(fs::read_to_string(mounted.backing.join("file")).unwrap(), "old");
}

#[test]
fn a_store_without_its_record_or_its_journal_is_not_thrown_away() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    mounted.run("echo kept > file");
    let state = state(&mounted);
    let (record, aside) = (state.join("instance.json"), state.join("aside"));
    // From then on the server does not write it again.
    wait_until("the record says that something is unwritten", || {
        let text = fs::read(&record).unwrap();
        serde_json::from_slice::<serde_json::Value>(&text).unwrap()["unwritten"] != 0
    });
    fs::rename(&record, &aside).unwrap();
    mounted.kill();
    let message = refused(&mounted);
    assert!(message.contains("instance.json is missing") && message.contains("--force-lose"), "{message}");
    fs::rename(&aside, &record).unwrap();
    // As root, who is told that the mount is read-only, can still do.
    let store = state.join("store");
    sh(&store, "mount -o remount,bind,rw . && mv journal aside");
    let message = refused(&mounted);
    assert!(message.contains("journal is missing") && message.contains("--force-lose"), "{message}");
    sh(&store, "mv aside journal");
    assert!(told(&mounted).contains("recovered"));
    assert_eq!(mounted.run("cat file"), "kept\n");
    fs::remove_file(&record).unwrap();
    mounted.kill();
    refused(&mounted);
    let lose = ["cache", "unmount", "--force-lose", "--yes", "fast"];
    assert_eq!(mounted.scene.ondeck(&lose).status().unwrap().code(), Some(123));
    assert!(!told(&mounted).contains("recovered"));
}

/// A server is killed whose store somebody has unmounted.
fn lose(mounted: &Mounted, state: &Path) {
    succeeds(Command::new("umount").arg("-l").arg(state.join("store")));
    mounted.kill();
}

/// That the next mount tells what was lost, and the one after it does not.
fn is_told_once(mounted: &Mounted) {
    let message = told(mounted);
    assert!(message.contains("is lost, because its store was unmounted"), "{message}");
    mounted.ondeck(&["unmount", "fast"]);
    let message = told(mounted);
    assert!(!message.contains("lost"), "{message}");
}

#[test]
fn a_store_that_was_unmounted_is_told_however_young_the_last_write_was() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    let state = state(&mounted);
    mounted.run("echo young > file");
    lose(&mounted, &state);
    is_told_once(&mounted);
}

#[test]
fn what_was_lost_is_told_also_if_a_mount_was_refused_or_failed_in_between() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    let state = state(&mounted);
    mounted.run("echo lost > file");
    lose(&mounted, &state);
    let mount =
        |capacity: &str| mounted.refused(&["mount", "--backing", "backing", "--capacity", capacity, "fast"]);
    assert_eq!(mount("8MiB").0, 2);
    assert_eq!(mount("1EiB").0, 2);
    // The mount point is a symlink for a while.
    sh(&mounted.scene.path("."), "mv fast aside && ln -s aside fast");
    assert_eq!(mount("32MiB").0, 2);
    sh(&mounted.scene.path("."), "rm fast && mv aside fast");
    // What is in the way of its socket lets it fail when all else is made.
    let socket = state.with_extension("sock");
    let _ = fs::remove_file(&socket);
    fs::create_dir(&socket).unwrap();
    fs::write(socket.join("file"), "").unwrap();
    assert_eq!(mount("32MiB").0, 1);
    fs::remove_dir_all(&socket).unwrap();
    is_told_once(&mounted);
}

#[test]
fn what_was_lost_is_told_also_if_the_server_that_found_it_was_killed_before_it_could_tell() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    let state = state(&mounted);
    let record = state.join("instance.json");
    mounted.run("echo lost > file");
    lose(&mounted, &state);
    let lost = fs::read(&record).unwrap();
    assert!(told(&mounted).contains("is lost"));
    mounted.kill();
    // As it is until the new one's record has taken the place of the former.
    succeeds(Command::new("umount").arg("-l").arg(state.join("store")));
    fs::write(&record, lost).unwrap();
    assert!(told(&mounted).contains("is lost, because its store was unmounted"));
    let read = || serde_json::from_slice::<serde_json::Value>(&fs::read(&record).unwrap()).unwrap();
    let await_noted = || {
        let until = Instant::now() + Duration::from_secs(10);
        while !read()["lost_before"].is_null() {
            assert!(Instant::now() < until, "it was told");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // And as it is from then on until somebody was told: with a store, and also without.
    for has_store in [true, false] {
        await_noted();
        mounted.kill();
        let mut read = read();
        read["lost_before"] = "the one before is lost".into();
        fs::write(&record, read.to_string()).unwrap();
        if !has_store {
            succeeds(Command::new("umount").arg("-l").arg(state.join("store")));
        }
        let message = told(&mounted);
        assert!(message.contains("the one before is lost"), "{message}");
        assert_eq!(message.contains("recovered"), has_store, "{message}");
    }
    await_noted();
    mounted.kill();
    let message = told(&mounted);
    assert!(!message.contains("lost"), "{message}");
}

#[test]
fn a_user_whose_groups_have_changed_since_a_kill_goes_on_and_another_user_does_not() {
    let own = |backing: &Path| sh(backing, "chown nobody .").truncate(0);
    let Some(mounted) = Mounted::with(&["--age", "1h", "--user", "nobody"], own) else { return };
    let record = state(&mounted).join("instance.json");
    let change = |of: &str, to: serde_json::Value| {
        mounted.kill();
        let mut read: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        let former = std::mem::replace(&mut read["user"][of], to);
        fs::write(&record, read.to_string()).unwrap();
        former
    };
    let groups = change("groups", serde_json::json!([20_007]));
    assert!(told(&mounted).contains("recovered"));
    let now: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    assert_eq!(now["user"]["groups"], groups, "those of now count from now on");
    let uid = change("uid", serde_json::json!(20_006));
    let message = refused(&mounted);
    assert!(message.contains("belongs to nobody"), "{message}");
    let mut read = now;
    read["user"]["uid"] = uid;
    fs::write(&record, read.to_string()).unwrap();
    assert!(told(&mounted).contains("recovered"));
    // Nor does one that is served let another be mounted in its place.
    let message = refused(&mounted);
    assert!(message.contains("there is a cache at"), "{message}");
    mounted.kill();
    mounted.ondeck(&["unmount", "fast"]);
    assert!(fs::read_dir(&mounted.fast).is_ok(), "the dead mount is gone");
}

#[test]
fn a_server_that_only_writes_back_is_there_for_who_has_started_it_and_asks_a_little_later() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    mounted.run("echo kept > file");
    let state = state(&mounted);
    mounted.kill();
    // As `unmount` does.
    let instance = Caches::new(state.parent().unwrap()).at(&mounted.fast);
    let record = instance.record().unwrap().unwrap();
    let plan = Plan::to_write_back(&instance, record);
    let scene = mounted.scene.ondeck(&[]);
    let mut command = Command::new(scene.get_program());
    command.arg("cache-server").envs(scene.get_envs().filter_map(|(name, value)| Some((name, value?))));
    instance::start(command, &plan).unwrap();
    let server = instance.record().unwrap().unwrap().server;
    wait_until("it is written back", || {
        fs::read_to_string(mounted.backing.join("file")).is_ok_and(|text| text == "kept\n")
    });
    // Whoever asks is slow, and the server has nothing left to do.
    let (late, alive) = (Instant::now() + Duration::from_millis(500), format!("/proc/{server}/exe"));
    while Instant::now() < late && fs::read_link(&alive).is_ok() {
        std::thread::yield_now();
    }
    let answer = ask(instance.socket(), &Order::Unmount { lose: false }, &mut |_| true);
    assert_eq!(answer.unwrap(), Answer::Done);
    assert!(!state.exists());
}
