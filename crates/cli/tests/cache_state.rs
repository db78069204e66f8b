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

/// What is said of a cache whose server is dead and whose store is gone must lead somewhere.
#[test]
fn what_is_left_of_a_cache_whose_store_is_gone_is_taken_away_by_the_command_that_the_message_names() {
    for lose in [false, true] {
        let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
        let state = state(&mounted);
        mounted.run("echo young > file");
        self::lose(&mounted, &state);
        let (code, message) = mounted.refused(&["status", "fast"]);
        assert!(code == 1 && message.contains("its store is gone"), "{message}");
        assert!(message.contains("`ondeck cache unmount ") && message.contains("is lost"), "{message}");
        let unmount: &[&str] =
            if lose { &["unmount", "--force-lose", "--yes", "fast"] } else { &["unmount", "fast"] };
        let (code, message) = mounted.refused(unmount);
        assert!(code == if lose { 123 } else { 1 } && message.contains("is lost"), "{code} {message}");
        assert!(!state.exists(), "{} is left", state.display());
        assert_eq!(fs::read_dir(&mounted.fast).unwrap().count(), 0, "nothing dead is mounted there");
        assert!(!told(&mounted).contains("lost"), "it is told once");
    }
}

#[test]
fn a_cache_is_found_by_where_its_mount_is_after_a_directory_above_it_was_renamed() {
    let Some(mounted) = Mounted::not_yet(&["--age", "1h"], |_| ()) else { return };
    let (above, moved) = (mounted.scene.dir("above"), mounted.scene.path("moved"));
    let mount = ["cache", "mount", "--backing", "backing", "--capacity", "32MiB", "--age", "1h"];
    for kill in [false, true] {
        fs::create_dir_all(above.join("fast")).unwrap();
        succeeds(mounted.scene.ondeck(&mount).arg("above/fast"));
        fs::rename(&above, &moved).unwrap();
        sh(&moved, &format!("echo {kill} > fast/file"));
        let at = moved.join("fast");
        let told: serde_json::Value = serde_json::from_str(&mounted.ondeck(&["status", "--json"])).unwrap();
        assert_eq!(told.as_array().unwrap().len(), 1, "{told}");
        assert_eq!(told[0]["mount_point"], at.to_str().unwrap(), "{told}");
        mounted.ondeck(&["evict", "moved/fast/file"]);
        mounted.ondeck(&["flush", "moved/fast"]);
        sh(&moved, "echo more >> fast/file");
        if kill {
            let server = told[0]["server"].as_i64().unwrap() as i32;
            let pid = rustix::process::Pid::from_raw(server).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            wait_until("the server is gone", || !Path::new(&format!("/proc/{server}")).exists());
        }
        mounted.ondeck(&["unmount", "moved/fast"]);
        assert_eq!(fs::read_dir(&at).unwrap().count(), 0, "nothing is mounted there");
        assert_eq!(fs::read_to_string(mounted.backing.join("file")).unwrap(), format!("{kill}\nmore\n"));
        assert_eq!(mounted.ondeck(&["status"]), "no caches\n");
        fs::rename(&moved, &above).unwrap();
    }
}

/// umount(8) reaches the server through the kernel, and loses nothing; giving up data would.
#[test]
fn a_cache_whose_state_was_removed_while_it_is_served_is_ended_by_umount_and_never_given_up() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    mounted.run("echo kept > file");
    let state = state(&mounted);
    let server = mounted.server();
    let _ = Command::new("rm").arg("-rf").arg(state.parent().unwrap()).output().unwrap();
    assert!(!state.with_extension("sock").exists());
    for arguments in [&["status", "fast"][..], &["flush", "fast"], &["unmount", "fast"]] {
        let (_, message) = mounted.refused(arguments);
        assert!(message.contains("`umount ") && message.contains("it is served"), "{message}");
        assert!(!message.contains("force-lose"), "{message}");
    }
    let (_, message) = mounted.refused(&["unmount", "--force-lose", "--yes", "fast"]);
    assert!(message.contains("`umount "), "{message}");
    let message = refused(&mounted);
    assert!(message.contains("`umount ") && !message.contains("force-lose"), "{message}");
    assert_eq!(mounted.run("cat file"), "kept\n");
    succeeds(Command::new("umount").arg(&mounted.fast));
    wait_until("the server has ended", || !Path::new(&format!("/proc/{server}")).exists());
    assert_eq!(fs::read_to_string(mounted.backing.join("file")).unwrap(), "kept\n");
}

#[test]
fn a_damaged_journal_or_record_is_told_with_what_can_be_done() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    mounted.run("echo kept > file; echo more > other");
    let state = state(&mounted);
    mounted.kill();
    let (record, store) = (state.join("instance.json"), state.join("store"));
    let written = fs::read(&record).unwrap();
    let leads_on = |message: &str| {
        assert!(message.contains(store.to_str().unwrap()), "{message}");
        assert!(message.contains("copy") && message.contains("unmount --force-lose"), "{message}");
    };
    for damaged in ["", "{", "{}"] {
        fs::write(&record, damaged).unwrap();
        leads_on(&refused(&mounted));
        leads_on(&mounted.refused(&["unmount", "fast"]).1);
        leads_on(&mounted.refused(&["status"]).1);
    }
    fs::write(&record, written).unwrap();
    sh(
        &store,
        "mount -o remount,bind,rw . && cp journal aside && printf x | dd of=journal bs=1 seek=60 conv=notrunc status=none",
    );
    let message = refused(&mounted);
    assert!(message.contains("damaged"), "{message}");
    leads_on(&message);
    sh(&store, "mount -o remount,bind,rw . && cat aside > journal && rm aside");
    assert!(told(&mounted).contains("recovered"));
    assert_eq!(mounted.run("cat file other"), "kept\nmore\n");
}

/// Whoever has ended the command has not been told that there is a cache.
#[test]
fn a_mount_that_is_ended_by_a_signal_while_it_starts_leaves_nothing() {
    let Some(mounted) = Mounted::not_yet(&[], |_| ()) else { return };
    let mut ended = 0;
    for _ in 0..40 {
        let mut command = mounted.mounting().spawn().unwrap();
        let children = format!("/proc/{0}/task/{0}/children", command.id());
        let server = loop {
            let found = fs::read_to_string(&children).unwrap_or_default();
            if let Some(server) = found.split_whitespace().next() {
                break Some(server.to_owned());
            }
            if command.try_wait().unwrap().is_some() {
                break None;
            }
        };
        let pid = rustix::process::Pid::from_raw(command.id() as i32).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        if command.wait().unwrap().success() {
            mounted.ondeck(&["unmount", "fast"]);
            continue;
        }
        ended += 1;
        let server = server.unwrap();
        wait_until("the server has ended", || !Path::new(&format!("/proc/{server}")).exists());
        assert_eq!(mounted.ondeck(&["status"]), "no caches\n");
        // But for the log of one that was not even told what to do.
        let base = mounted.scene.path("state/cache");
        let left = sh(&base, "find . -mindepth 1 ! -name log ! -regex './[0-9a-f]*'");
        assert_eq!(left, "");
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!table.contains(mounted.fast.to_str().unwrap()), "{table}");
    }
    assert!(ended > 0, "the signal was too late each time");
}

#[test]
fn the_server_has_neither_the_nice_value_nor_the_processors_of_the_shell_that_mounts_it() {
    let Some(mounted) = Mounted::not_yet(&[], |_| ()) else { return };
    let mount = mounted.mounting();
    let mut slow = Command::new("nice");
    slow.args(["-n", "15", "taskset", "1", "chrt", "--batch", "0"]).arg(mount.get_program());
    slow.args(mount.get_args()).envs(mount.get_envs().filter_map(|(name, value)| Some((name, value?))));
    succeeds(slow.current_dir(mount.get_current_dir().unwrap()));
    let of = |process: &str| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let allowed = status.lines().find(|line| line.starts_with("Cpus_allowed:")).unwrap().to_owned();
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        // proc_pid_stat(5): nice is field 19, the policy field 41, the state field 3.
        (allowed, fields[16].to_owned(), fields[38].to_owned())
    };
    let (allowed, nice, policy) = of(&mounted.server().to_string());
    assert_eq!((nice.as_str(), policy.as_str()), ("0", "0"));
    assert_eq!(allowed, of("1").0, "all processors, as the first process has them");
    mounted.ondeck(&["unmount", "fast"]);
}

/// Where a record of a journal ends, it looks whole.
#[test]
fn a_journal_that_was_cut_between_two_records_is_told_and_nothing_of_the_store_is_thrown_away() {
    let Some(mounted) = Mounted::with(&["--age", "1h"], |_| ()) else { return };
    let state = state(&mounted);
    let (record, store) = (state.join("instance.json"), state.join("store"));
    let journal = store.join("journal");
    let noted = || {
        let text = fs::read(&record).unwrap();
        serde_json::from_slice::<serde_json::Value>(&text).unwrap()["journal"][1].as_u64()
    };
    let wait_noted = || {
        wait_until("the record has the journal", || {
            noted().is_some_and(|noted| noted == fs::metadata(&journal).unwrap().len())
        })
    };
    mounted.run("echo first > first");
    wait_noted();
    let whole = noted().unwrap();
    mounted.run("echo second > second");
    wait_noted();
    assert!(noted().unwrap() > whole, "the journal was made anew");
    mounted.kill();
    sh(&store, &format!("mount -o remount,bind,rw . && cp journal aside && truncate -s {whole} journal"));
    for message in [refused(&mounted), mounted.refused(&["unmount", "fast"]).1] {
        assert!(message.contains("bytes of its journal are missing"), "{message}");
        assert!(message.contains(store.to_str().unwrap()) && message.contains("null"), "{message}");
    }
    // Put back, it is all there; or it is recovered as far as it goes, when somebody has said so.
    sh(&store, "cat aside > journal && rm aside");
    assert!(told(&mounted).contains("recovered"));
    assert_eq!(mounted.run("cat first second"), "first\nsecond\n");
    wait_noted();
    mounted.kill();
    sh(&store, "mount -o remount,bind,rw . && truncate -s -1 journal");
    assert!(refused(&mounted).contains("journal are missing"));
    let text = fs::read_to_string(&record).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["journal"] = serde_json::Value::Null;
    fs::write(&record, value.to_string()).unwrap();
    assert!(told(&mounted).contains("recovered"));
    assert_eq!(mounted.run("cat first"), "first\n");
}
