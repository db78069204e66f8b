//! `ondeck cache`: unchanged programs over a cache, and what is left of it when its server is killed.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cached::{Mounted, sh};
use scene::wait_until;

#[test]
fn what_programs_wrote_is_on_disk_after_an_unmount_and_nothing_is_left_of_the_cache() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.run(
        "umask 027; mkdir -p a/b; echo one > a/b/file; ln a/b/file hard; ln -s a/b soft; mkfifo pipe
         head -c 50000000 /dev/zero | tr '\\0' x > large; truncate -s 1G sparse; echo end >> sparse
         setfattr -n user.colour -v green a/b/file; chmod 2750 a; touch -d '2001-02-03 04:05:06.789' a/b",
    );
    let shown = mounted.run("find . -printf '%P %y %m %s %T@ %l\\n' | grep -v '^ d' | sort; md5sum large");
    mounted.ondeck(&["unmount", "fast"]);
    let found =
        sh(&mounted.backing, "find . -printf '%P %y %m %s %T@ %l\\n' | grep -v '^ d' | sort; md5sum large");
    assert_eq!(found, shown);
    assert_eq!(
        sh(&mounted.backing, "cat soft/file; getfattr -n user.colour --only-values hard"),
        "one\ngreen"
    );
    assert!(sh(&mounted.backing, "stat -c %b sparse").trim().parse::<u64>().unwrap() < 100, "it is sparse");
    assert_eq!(sh(&mounted.backing, "stat -c %h hard"), "2\n");
    assert_eq!(fs::read_dir(&mounted.fast).unwrap().count(), 0);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(mounted.scene.dir.path().to_str().unwrap()), "{mounts}");
}

#[test]
fn what_a_killed_server_had_is_there_when_the_cache_is_mounted_again() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.run(
        "mkdir d; echo kept > d/file; head -c 9000000 /dev/urandom > large; md5sum large > sum; rm -f none",
    );
    assert!(!mounted.backing.join("large").exists(), "it is in the cache alone");
    mounted.kill();
    assert_eq!(fs::read_dir(&mounted.fast).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
    mounted.mount();
    assert_eq!(mounted.run("cat d/file; md5sum -c --quiet sum"), "kept\n");
    mounted.ondeck(&["flush", "fast"]);
    assert_eq!(sh(&mounted.backing, "cat d/file; md5sum -c --quiet sum"), "kept\n");
}

#[test]
fn who_writes_back_is_told_what_others_have_changed() {
    let Some(mounted) = Mounted::with(&[], |backing| {
        for name in ["a", "b", "c"] {
            fs::write(backing.join(name), "before").unwrap();
        }
    }) else {
        return;
    };
    let told = |order: &str| {
        let output = mounted.scene.ondeck(&["cache", order, "fast"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let change = |name: &str| {
        mounted.run(&format!("echo ours > {name}"));
        fs::write(mounted.backing.join(name), "theirs").unwrap();
    };
    change("a");
    assert!(told("flush").contains("a was changed by others: ours is a.ondeck-"));
    change("b");
    let second = told("flush");
    assert!(second.contains("b was changed by others") && !second.contains("a was"), "{second}");
    assert_eq!(told("flush"), "");
    change("c");
    let all = told("unmount");
    for name in ["a", "b", "c"] {
        assert!(all.contains(&format!("{name} was changed by others: ours is {name}.ondeck-")), "{all}");
    }
}

#[test]
fn a_cache_is_not_taken_for_a_ram_disk_of_an_agent() {
    let Some(mounted) = Mounted::new() else { return };
    let source = mounted.scene.dir("source");
    fs::write(source.join("file"), "data").unwrap();
    // Of an agent's RAM disk the agent would be asked whether it is whole, and none runs here.
    let copied = mounted.scene.ondeck(&["stage", "source", "fast/copy"]).output().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    assert_eq!(mounted.run("cat copy/file"), "data");
}

#[test]
fn a_list_goes_on_behind_many_names_that_were_removed_meanwhile() {
    const FILES: usize = 2000;
    let Some(mounted) = Mounted::with(&[], |backing| {
        for number in 0..FILES {
            fs::write(backing.join(format!("{number:04}")), "").unwrap();
        }
    }) else {
        return;
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(&mounted.fast).unwrap() {
        let entry = entry.unwrap();
        // So the kernel asks for attributes with the names.
        entry.metadata().unwrap();
        found.push(entry.file_name().into_string().unwrap().parse::<usize>().unwrap());
        if found.len() == 1 {
            for number in 1000..1900 {
                fs::remove_file(mounted.fast.join(format!("{number:04}"))).unwrap();
            }
        }
    }
    found.retain(|number| !(1000..1900).contains(number));
    let expected: Vec<usize> = (0..1000).chain(1900..FILES).collect();
    assert_eq!(found, expected);
    assert_eq!(fs::read_dir(&mounted.fast).unwrap().count(), FILES - 900);
}

#[test]
fn files_that_are_closed_by_execve_are_closed() {
    let Some(mounted) = Mounted::new() else { return };
    // It is closed in each program that is started, while the kernel tells nobody of that one.
    let open = fs::File::create(mounted.fast.join("open")).unwrap();
    let (ended, all_ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let started = (0..500).all(|_| Command::new("true").status().unwrap().success());
        ended.send(started).unwrap();
    });
    assert_eq!(all_ended.recv_timeout(Duration::from_secs(120)), Ok(true));
    drop(open);
}

#[test]
fn git_and_make_find_what_they_left_before_and_after_a_flush() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.run(
        "git init -q repository; cd repository; git config user.email a@b; git config user.name n
         for i in $(seq 60); do mkdir -p d$((i % 7)); echo $i > d$((i % 7))/f$i; done
         git add .; git commit -qm one; for i in $(seq 60); do echo more >> d$((i % 7))/f$i; done
         git commit -qam two; git gc -q",
    );
    mounted.run(
        "mkdir build; cd build; printf 'all: a.o b.o\\n\\tcat a.o b.o > all\\n%%.o: %%.c\\n\\tcp $< $@\\n' > Makefile
         echo 1 > a.c; echo 2 > b.c; make -s",
    );
    let nothing = "cd build; make -q; cd ../repository; git fsck --full >/dev/null; git status --short";
    assert_eq!(mounted.run(nothing), "");
    mounted.ondeck(&["flush", "fast"]);
    assert_eq!(mounted.run(nothing), "");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(sh(&mounted.backing, nothing), "");
}

/// Runs a shell script in a directory as somebody.
fn as_user(uid: u32, dir: &Path, script: &str) -> Result<String, String> {
    with_group(uid, uid, dir, script)
}

fn with_group(uid: u32, gid: u32, dir: &Path, script: &str) -> Result<String, String> {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new("sh");
    let output = command.args(["-ec", script]).arg(dir).uid(uid).gid(gid).output().unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(String::from_utf8(output.stderr).unwrap()),
    }
}

#[test]
fn only_its_user_reaches_a_cache_and_only_what_that_user_may() {
    const NOBODY: u32 = 65534;
    let own = |backing: &Path| {
        std::os::unix::fs::chown(backing, Some(NOBODY), Some(NOBODY)).unwrap();
        fs::create_dir(backing.join("closed")).unwrap();
        fs::write(backing.join("closed/secret"), "secret").unwrap();
        sh(backing, "chmod 700 closed; chmod 755 .");
    };
    let Some(mounted) = Mounted::with(&["--user", "nobody"], own) else { return };
    as_user(NOBODY, &mounted.fast, "cd $0; echo mine > file; mkdir d; chmod 500 d; cat file").unwrap();
    let told = as_user(NOBODY, &mounted.fast, "cat $0/closed/secret").unwrap_err();
    assert!(told.contains("Permission denied"), "{told}");
    for other in [0, 20_001] {
        let told = as_user(other, &mounted.fast, "cat $0/file").unwrap_err();
        assert!(told.contains("Permission denied"), "{other}: {told}");
    }
    let told = with_group(NOBODY, 20_001, &mounted.fast, "cat $0/file").unwrap_err();
    assert!(
        told.contains("Permission denied"),
        "the kernel lets in who is that user in every respect: {told}"
    );
    let mut command = mounted.scene.ondeck(&["cache", "unmount", "fast"]);
    {
        use std::os::unix::process::CommandExt;
        command.uid(20_001).gid(20_001);
    }
    assert!(!command.output().unwrap().status.success(), "others can't unmount it");
    // A list is of one's own, where users can ask at all.
    sh(&mounted.backing, "chmod 755 ../state ../state/cache");
    let list = |uid: u32| {
        use std::os::unix::process::CommandExt;
        let output = mounted.scene.ondeck(&["cache", "status"]).uid(uid).gid(uid).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(list(NOBODY).contains("fast") && list(20_001) == "no caches\n");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(sh(&mounted.backing, "stat -c '%U %a' file d"), "nobody 644\nnobody 500\n");
}

#[test]
fn a_file_that_is_removed_while_it_is_written_back_is_gone_and_a_new_one_has_its_name() {
    let Some(mounted) = Mounted::with(&["--capacity", "16MiB"], |_| ()) else { return };
    for round in 0..6 {
        mounted.run(&format!(
            "head -c 30000000 /dev/zero > big; rm big; echo {round} > big
             mkdir d; head -c 12000000 /dev/zero > d/a; head -c 12000000 /dev/zero > d/b; rm -r d; mkdir d; echo {round} > d/new"
        ));
        if round == 5 {
            mounted.run("rm big; rm -r d");
        } else {
            mounted.run("rm -r d");
        }
    }
    mounted.ondeck(&["flush", "fast"]);
    let told = mounted.ondeck(&["status", "fast"]);
    assert!(!told.contains("CONFLICT"), "{told}");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(sh(&mounted.backing, "ls -A"), "");
}

#[test]
fn a_users_cache_reads_and_changes_what_was_there_already_and_what_others_let_it_change() {
    const NOBODY: u32 = 65534;
    let prepare = |backing: &Path| {
        sh(
            backing,
            "echo own > own; chown nobody own; mkdir shared; chmod 1777 shared . ; echo foreign > foreign
             chmod 666 foreign; head -c 3000000 /dev/urandom > large; chown nobody large; md5sum large > sum",
        );
    };
    let Some(mounted) = Mounted::with(&["--user", "nobody"], prepare) else { return };
    let run = |script: &str| as_user(NOBODY, &mounted.fast, script).unwrap();
    assert_eq!(run("cd $0; cat own; md5sum -c --quiet sum"), "own\n");
    run(
        "cd $0; echo more >> own; echo new > shared/new; echo more >> foreign; echo x > new; printf y | dd of=large \
         conv=notrunc bs=1 seek=1500000 status=none; md5sum large > shared/sum",
    );
    mounted.ondeck(&["flush", "fast"]);
    let status = mounted.status()["status"].clone();
    assert_eq!(
        (&status["dirty_attributes"], &status["failing"]),
        (&0.into(), &serde_json::json!([])),
        "{status}"
    );
    assert_eq!(
        sh(
            &mounted.backing,
            "cat own foreign shared/new; md5sum -c --quiet shared/sum; stat -c %U shared new"
        ),
        "own\nmore\nforeign\nmore\nnew\nroot\nnobody\n"
    );
    mounted.ondeck(&["evict", "fast"]);
    assert_eq!(
        run("cd $0; cat own foreign shared/new new; md5sum -c --quiet shared/sum"),
        "own\nmore\nforeign\nmore\nnew\nx\n"
    );
    mounted.ondeck(&["unmount", "fast"]);
}

#[test]
fn who_is_refused_is_told_why_each_time() {
    use std::os::unix::process::CommandExt;
    let Some(mounted) = Mounted::new() else { return };
    mounted.run("chmod 755 .; echo text > file");
    // Others reach the usual state directory, and not one that is named.
    sh(mounted.scene.dir.path(), "chmod 711 state");
    // The server has often answered and closed before the command has sent its order.
    for _ in 0..25 {
        for order in ["status", "flush"] {
            let mut command = mounted.scene.ondeck(&["cache", order, "fast"]);
            let output = command.uid(20_001).gid(20_001).output().unwrap();
            let told = String::from_utf8(output.stderr).unwrap();
            assert!(told.contains("this cache is another user's"), "{order}: {told:?} {}", output.status);
            assert_eq!(output.status.code(), Some(1));
        }
    }
}

/// A process that is stopped until this goes.
struct Stopped(rustix::process::Pid);

impl Stopped {
    fn new(process: i32) -> Stopped {
        let process = rustix::process::Pid::from_raw(process).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
        Stopped(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        rustix::process::kill_process(self.0, rustix::process::Signal::CONT).unwrap();
    }
}

#[test]
fn a_server_that_does_not_answer_is_told_and_keeps_no_other_cache_from_being_shown() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.scene.dir("backing2");
    mounted.scene.dir("fast2");
    let ondeck = |arguments: &[&str]| mounted.scene.ondeck(&["cache"]).args(arguments).output().unwrap();
    let other = ondeck(&["mount", "--backing", "backing2", "--capacity", "16MiB", "fast2"]);
    assert!(other.status.success(), "{other:?}");
    let server = mounted.server();
    let stopped = Stopped::new(server);
    let at = mounted.fast.display().to_string();
    let began = std::time::Instant::now();
    for form in ["--json", "--metrics"] {
        let output = ondeck(&["status", form]);
        let (shown, told) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(&format!("{at}: the server (process {server}) does not answer")), "{told}");
        assert!(shown.contains(&format!("{at}2\"")), "{shown}");
        match form {
            "--json" => {
                let all: Vec<serde_json::Value> = serde_json::from_str(&shown).unwrap();
                let this = all.iter().find(|cache| cache["mount_point"] == at.as_str()).unwrap();
                assert_eq!(this["server"], server);
                assert_eq!(this["dead"], false);
                assert!(this["status"].is_null(), "{this}");
            }
            _ => assert!(shown.contains(&format!("ondeck_cache_up{{mount_point=\"{at}\"}} 0\n")), "{shown}"),
        }
    }
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    let mut waiting = ["flush", "preload", "evict"].map(|order| {
        let mut waits = mounted.scene.ondeck(&["cache", order, "fast"]);
        waits.stderr(std::process::Stdio::piped()).spawn().unwrap()
    });
    for waits in &mut waiting {
        let mut told = String::new();
        let mut stderr = std::io::BufReader::new(waits.stderr.take().unwrap());
        std::io::BufRead::read_line(&mut stderr, &mut told).unwrap();
        assert!(told.contains(&format!("the server (process {server}) does not answer")), "{told}");
        assert!(told.contains("still waiting"), "{told}");
    }
    drop(stopped);
    for mut waits in waiting {
        assert!(waits.wait().unwrap().success());
    }
    let other = ondeck(&["unmount", "fast2"]);
    assert!(other.status.success(), "{other:?}");
}

#[test]
fn dead_caches_and_damaged_records_are_told_beside_the_others() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.scene.dir("backing2");
    mounted.scene.dir("fast2");
    let ondeck = |arguments: &[&str]| mounted.scene.ondeck(&["cache"]).args(arguments).output().unwrap();
    let other = ondeck(&["mount", "--backing", "backing2", "--capacity", "16MiB", "fast2"]);
    assert!(other.status.success(), "{other:?}");
    mounted.kill();
    let at = mounted.fast.display().to_string();
    let output = ondeck(&["status", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let all: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let of = |at: &str| all.iter().find(|cache| cache["mount_point"] == at).unwrap();
    assert_eq!(of(&at)["dead"], true);
    assert!(of(&at)["server"].is_null());
    assert_eq!(of(&at)["backing"], mounted.backing.to_str().unwrap());
    assert_eq!(of(&format!("{at}2"))["dead"], false);
    let metrics = String::from_utf8(ondeck(&["status", "--metrics"]).stdout).unwrap();
    for (cache, up) in [(at.clone(), 0), (format!("{at}2"), 1)] {
        assert!(metrics.contains(&format!("ondeck_cache_up{{mount_point=\"{cache}\"}} {up}\n")), "{metrics}");
    }

    let told = String::from_utf8(ondeck(&["status", "fast"]).stderr).unwrap();
    let log = told.split_whitespace().last().unwrap();
    let record = Path::new(log).with_file_name("instance.json");
    let whole = fs::read(&record).unwrap();
    for damaged in [&b""[..], &whole[..whole.len() / 2], &b"\x00\xff garbage"[..]] {
        fs::write(&record, damaged).unwrap();
        let output = ondeck(&["status"]);
        let (shown, told) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(record.to_str().unwrap()), "{told}");
        assert!(shown.contains(&format!("{at}2\n")), "{shown}");
    }
    fs::write(&record, whole).unwrap();
    let other = ondeck(&["unmount", "fast2"]);
    assert!(other.status.success(), "{other:?}");
}

#[test]
fn what_users_named_does_not_reach_a_terminal_raw() {
    let Some(mounted) = Mounted::new() else { return };
    let name = "a\u{1b}]0;title\u{7}\nb";
    fs::create_dir(mounted.fast.join(name)).unwrap();
    let mut holder = Command::new("sleep");
    let mut holder = holder.arg("1000").current_dir(mounted.fast.join(name)).spawn().unwrap();
    let (_, told) = mounted.refused(&["unmount", "fast"]);
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(told.contains(&format!("process {} (sleep) holds", holder.id())), "{told:?}");
    let (_, missing) = mounted.refused(&["evict", &format!("fast/{name}/none")]);
    for told in [told, missing] {
        assert!(told.contains("a?]0;title? b"), "{told:?}");
        assert!(told.chars().all(|c| c == '\n' || !c.is_control()), "{told:?}");
    }
}

/// Mounts a disk of its own.
fn mount_a_disk(backing: &Path) {
    let (image, at) = (backing.with_extension("image"), backing.display());
    let image = image.display();
    sh(
        Path::new("/"),
        &format!("truncate -s 200M {image}; mkfs.ext4 -q {image}; mount -o loop {image} {at}"),
    );
}

/// A filesystem on a loop device that is frozen, and thawed at the end.
struct Frozen(PathBuf);

impl Drop for Frozen {
    fn drop(&mut self) {
        sh(Path::new("/"), &format!("fsfreeze -u {0} 2>/dev/null || true; umount -l {0}", self.0.display()));
    }
}

#[test]
fn writers_that_wait_for_a_disk_that_hangs_can_be_killed() {
    let Some(mounted) = Mounted::with(&[], mount_a_disk) else { return };
    let frozen = Frozen(mounted.backing.clone());
    sh(Path::new("/"), &format!("fsfreeze -f {}", mounted.backing.display()));
    let write = |name: u32| {
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("exec head -c 100000000 /dev/zero > {name}")])
            .current_dir(&mounted.fast);
        command.spawn().unwrap()
    };
    let mut writers: Vec<_> = (0..5).map(write).collect();
    wait_until("all writers wait for room", || mounted.status()["status"]["delayed"].as_u64() == Some(5));
    let killed = std::time::Instant::now();
    for writer in &mut writers {
        writer.kill().unwrap();
    }
    for writer in &mut writers {
        writer.wait().unwrap();
    }
    let took = killed.elapsed();
    drop(frozen);
    // Half a second is promised; a loaded machine is given more.
    assert!(took.as_millis() < 2000, "it took {took:?} to kill those who wait");
}

/// Where a server has its data.
fn store_of(server: i32) -> File {
    let open = |entry: std::io::Result<fs::DirEntry>| File::open(entry.unwrap().path()).ok();
    let mut files = fs::read_dir(format!("/proc/{server}/fd")).unwrap().filter_map(open);
    let is_store = |file: &File| {
        let at = format!("/proc/self/fd/{}", file.as_raw_fd());
        ["00", "ff"].iter().all(|name| Path::new(&at).join(name).is_dir())
    };
    files.find(is_store).unwrap()
}

/// Whether a thread of a process is in a call that nothing can interrupt.
fn hangs(process: i32, thread: &str) -> bool {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok()).any(|stat| {
        let (name, rest) = stat.rsplit_once(')').unwrap();
        name.contains(thread) && rest.trim_start().starts_with('D')
    })
}

#[test]
fn what_a_disk_that_hangs_lacks_can_be_given_up() {
    let Some(mounted) = Mounted::with(&[], mount_a_disk) else { return };
    let frozen = Frozen(mounted.backing.clone());
    fs::write(mounted.fast.join("old"), vec![1; 8 << 20]).unwrap();
    mounted.ondeck(&["flush", "fast"]);
    let server = mounted.server();
    let store = store_of(server);
    let used = || {
        let found = rustix::fs::fstatvfs(&store).unwrap();
        (found.f_blocks - found.f_bfree) * found.f_frsize
    };
    sh(Path::new("/"), &format!("fsfreeze -f {}", mounted.backing.display()));
    fs::write(mounted.fast.join("old"), vec![2; 20 << 20]).unwrap();
    assert!(used() >= 20 << 20);
    let mut flush = mounted.scene.ondeck(&["cache", "flush", "fast"]);
    let flush = flush.stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_until("it is written back", || hangs(server, "writer-"));
    wait_until("it is seen", || mounted.ondeck(&["status", "fast"]).contains("old has been on its way for "));
    let begun = std::time::Instant::now();
    let (code, told) = mounted.refused(&["unmount", "--force-lose", "--yes", "fast"]);
    let took = begun.elapsed();
    assert_eq!((code, &*told), (123, ""));
    let flush = flush.wait_with_output().unwrap();
    let told = String::from_utf8(flush.stderr).unwrap();
    assert!(told.contains("old has been on its way for 10 s: the backing directory hangs"), "{told}");
    assert!(told.contains("what was not written back was given up meanwhile"), "{told}");
    assert_eq!(flush.status.code(), Some(123), "{told}");
    let left = used();
    drop(store);
    drop(frozen);
    assert!(left < 1 << 20, "{left} bytes of memory are not given back");
    assert!(took.as_secs() < 20, "{took:?}");
    wait_until("the server is gone", || !Path::new(&format!("/proc/{server}")).exists());
}

#[test]
fn a_mount_whose_connection_was_aborted_is_taken_away_and_nothing_is_lost() {
    let Some(mounted) = Mounted::new() else { return };
    fs::write(mounted.fast.join("file"), b"data").unwrap();
    let (server, control) = (mounted.server(), mounted.scene.dir("control"));
    let number = rustix::fs::minor(rustix::fs::stat(&mounted.fast).unwrap().st_dev);
    let at = control.display();
    sh(Path::new("/"), &format!("mount -t fusectl none {at}; echo 1 > {at}/{number}/abort; umount -l {at}"));
    wait_until("the server is gone", || !Path::new(&format!("/proc/{server}")).exists());
    assert_eq!(fs::read_dir(&mounted.fast).unwrap().count(), 0, "the mount is gone");
    assert_eq!(fs::read(mounted.backing.join("file")).unwrap(), b"data");
    let (_, told) = mounted.refused(&["unmount", "fast"]);
    assert!(told.contains("there is no cache at"), "{told}");
}

/// Runs `ondeck cache` in a shell with a limit, as `ulimit` has it.
fn with_limit(mounted: &Mounted, limit: &str, arguments: &[&str]) -> std::process::Output {
    let command = mounted.scene.ondeck(&["cache"]);
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "sh"]).arg(command.get_program());
    limited.args(command.get_args()).args(arguments);
    if let Some(dir) = command.get_current_dir() {
        limited.current_dir(dir);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited.output().unwrap()
}

#[test]
fn a_server_that_may_open_few_files_works_and_one_that_may_open_too_few_is_refused() {
    let Some(mounted) = Mounted::not_yet(&[], |_| ()) else { return };
    let mount = ["mount", "--backing", "backing", "--capacity", "64MiB", "fast"];
    let refused = with_limit(&mounted, "-n 400", &mount);
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && told.contains("needs 1024 open files"), "{refused:?}");
    let done = with_limit(&mounted, "-n 1024", &mount);
    assert!(done.status.success(), "{done:?}");
    mounted.run(
        "for n in $(seq 1500); do echo $n > $n; done; mkdir d; for n in $(seq 300); do mkdir d/$n; done",
    );
    mounted.ondeck(&["flush", "fast"]);
    mounted.run("cat * 2> /dev/null | md5sum; rm -r d");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(sh(&mounted.backing, "ls | wc -l; cat 1500"), "1500\n1500\n");
}

#[test]
fn a_cache_that_was_unmounted_lazily_says_who_uses_it() {
    let Some(mounted) = Mounted::new() else { return };
    let mut file = File::create(mounted.fast.join("file")).unwrap();
    sh(Path::new("/"), &format!("umount -l {}", mounted.fast.display()));
    let (code, told) = mounted.refused(&["unmount", "fast"]);
    let process = std::process::id().to_string();
    assert!(code == 1 && told.contains("is in use") && told.contains(&process), "{told}");
    std::io::Write::write_all(&mut file, b"data").unwrap();
    let server = mounted.server();
    drop(file);
    wait_until("the server is gone", || !Path::new(&format!("/proc/{server}")).exists());
    assert_eq!(fs::read(mounted.backing.join("file")).unwrap(), b"data");
}

#[test]
fn a_backing_directory_that_another_has_taken_the_place_of_is_told_at_the_next_mount() {
    let Some(mounted) = Mounted::new() else { return };
    fs::write(mounted.fast.join("file"), b"data").unwrap();
    mounted.kill();
    let former = mounted.backing.with_file_name("former");
    fs::rename(&mounted.backing, &former).unwrap();
    fs::create_dir(&mounted.backing).unwrap();
    let refused = mounted.mounting().output().unwrap();
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && told.contains("is another directory by now"), "{refused:?}");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(fs::read(former.join("file")).unwrap(), b"data");
    assert_eq!(fs::read_dir(&mounted.backing).unwrap().count(), 0);
}

#[test]
fn a_mount_point_that_would_hide_the_records_of_caches_is_refused() {
    let Some(mounted) = Mounted::not_yet(&[], |_| ()) else { return };
    let state = mounted.scene.dir("state");
    let (code, told) =
        mounted.refused(&["mount", "--backing", "backing", "--capacity", "32MiB", state.to_str().unwrap()]);
    assert!(code == 2 && told.contains("would hide"), "{told}");
}

#[test]
fn no_limit_of_the_shell_that_mounts_it_ends_a_server() {
    let Some(mounted) = Mounted::not_yet(&[], |_| ()) else { return };
    let mount = ["mount", "--backing", "backing", "--capacity", "64MiB", "fast"];
    // In blocks of 512 bytes, as of sh: a soft limit can be raised by anybody.
    let done = with_limit(&mounted, "-S -f 1000", &mount);
    assert!(done.status.success(), "{done:?}");
    mounted.run("head -c 3000000 /dev/zero > large");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(fs::metadata(mounted.backing.join("large")).unwrap().len(), 3_000_000);
    for (limit, named) in [("-f 1000", "ulimit -Hf"), ("-t 1000", "ulimit -Ht")] {
        let tried = with_limit(&mounted, limit, &mount);
        let told = String::from_utf8_lossy(&tried.stderr);
        if tried.status.success() {
            // Root may, but for containers.
            mounted.run("head -c 3000000 /dev/zero > large");
            mounted.ondeck(&["unmount", "fast"]);
        } else {
            assert!(tried.status.code() == Some(2) && told.contains(named), "{tried:?}");
        }
    }
}

#[test]
fn a_file_that_is_cut_to_nothing_has_another_time_also_if_it_was_empty() {
    let Some(mounted) = Mounted::new() else { return };
    let times = "touch -d 2001-02-03 empty full; echo x > full; touch -d 2001-02-03 full; : > empty; : > full; \
                 python3 -c 'import os; os.utime(\"full\", (1, 1)); os.truncate(\"full\", 0)'; stat -c %Y empty full";
    let times = mounted.run(times);
    assert!(times.lines().all(|time| time.parse::<u64>().unwrap() > 1_500_000_000), "{times}");
    mounted.run("printf 'stamp: src\\n\\t: > stamp\\n' > Makefile; for n in 1 2 3; do echo $n > src; make -s; make -q; done");
}

/// A mount for a test, which goes with it.
struct Also(PathBuf);

impl Also {
    fn new(arguments: &[&str], at: &Path) -> Also {
        fs::create_dir_all(at).unwrap();
        let done = Command::new("mount").args(arguments).arg(at).output().unwrap();
        assert!(done.status.success(), "{done:?}");
        Also(at.to_owned())
    }
}

impl Drop for Also {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[test]
fn a_second_cache_of_the_same_files_is_refused_by_whatever_mount_they_are_named() {
    let Some(mounted) = Mounted::with(&[], |backing| fs::create_dir_all(backing.join("in/deep")).unwrap())
    else {
        return;
    };
    let dir = mounted.scene.dir.path().to_owned();
    let of = |name: &str| mounted.backing.join(name).to_str().unwrap().to_owned();
    let _whole = Also::new(&["--bind", &of("")], &dir.join("whole"));
    let _part = Also::new(&["--bind", &of("in/deep")], &dir.join("part"));
    let _above = Also::new(&["--bind", dir.to_str().unwrap()], &dir.join("above"));
    fs::create_dir(dir.join("second")).unwrap();
    for backing in ["whole", "whole/in", "part"] {
        let (code, told) = mounted.refused(&["mount", "--backing", backing, "--capacity", "32MiB", "second"]);
        assert!(code == 2 && told.contains("would not see each other's changes"), "{backing}: {told}");
    }
    mounted.ondeck(&["mount", "--backing", "above/second", "--capacity", "32MiB", "second"]);
    mounted.ondeck(&["unmount", "second"]);
}

#[test]
fn what_is_on_an_overlayfs_is_refused() {
    let Some(mounted) = Mounted::not_yet(&[], |backing| {
        for name in ["lower", "upper", "work"] {
            fs::create_dir(backing.join(name)).unwrap();
        }
    }) else {
        return;
    };
    let of = |name: &str| mounted.backing.join(name).display().to_string();
    let options = format!("lowerdir={},upperdir={},workdir={}", of("lower"), of("upper"), of("work"));
    let shown = mounted.scene.dir.path().join("shown");
    let _overlay = Also::new(&["-t", "overlay", "-o", &options, "overlay"], &shown);
    let (code, told) = mounted.refused(&["mount", "--backing", "shown", "--capacity", "32MiB", "fast"]);
    assert!(code == 2 && told.contains("on an overlayfs"), "{told}");
}

#[test]
fn a_disk_that_hangs_is_told_while_names_are_on_their_way_to_it() {
    let Some(mounted) = Mounted::with(&[], mount_a_disk) else { return };
    let frozen = Frozen(mounted.backing.clone());
    sh(Path::new("/"), &format!("fsfreeze -f {}", mounted.backing.display()));
    mounted.run("echo new > file");
    let mut flush = mounted.scene.ondeck(&["cache", "flush", "-q", "fast"]).spawn().unwrap();
    wait_until("it is told", || {
        let status = mounted.status()["status"].clone();
        status["under_way_ms"].as_u64() > Some(1000) && status["under_way"] == "file"
    });
    drop(frozen);
    assert!(flush.wait().unwrap().success());
    assert_eq!(mounted.status()["status"]["under_way_ms"], 0);
}

#[test]
fn a_preload_ends_with_who_wants_it() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.run("truncate -s 1000T hole");
    let mut preload = mounted.scene.ondeck(&["cache", "preload", "fast/hole"]).spawn().unwrap();
    let server = mounted.server();
    let orders = || {
        let threads = fs::read_dir(format!("/proc/{server}/task")).unwrap();
        let is_order = |name: String| name.trim() == "order";
        let names = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        names.filter(|name| is_order(name.clone())).count()
    };
    wait_until("it is under way", || orders() == 1);
    preload.kill().unwrap();
    preload.wait().unwrap();
    wait_until("nobody wants it, and it ends", || orders() == 0);
}

#[test]
fn a_number_that_is_used_again_is_not_what_had_it_before() {
    const ALICE: u32 = 20_001;
    let Some(mounted) = Mounted::with(&["--allow-other"], |backing| {
        mount_a_disk(backing);
        sh(backing, "mkdir tmp; chmod 1777 tmp");
    }) else {
        return;
    };
    let _disk = Frozen(mounted.backing.clone());
    sh(mounted.scene.dir.path(), "chmod 755 .");
    let disk = mounted.backing.join("tmp");
    let shown = mounted.fast.join("tmp");
    as_user(ALICE, &disk, "cd $0; mkdir results; echo mine > key").unwrap();
    as_user(ALICE, &shown, "ls -la $0").unwrap();
    // Root has something private under the same names, with the same numbers.
    let numbers = |script: &str| sh(&disk, &format!("umask 077; {script}; stat -c %i results key"));
    let before = numbers("true");
    let after = numbers(
        "rmdir results; mkdir results; echo secret > results/s; chmod 644 results/s; rm key; echo secret > key",
    );
    assert_eq!(before, after, "ext4 gives the numbers of what was removed again");
    for path in ["key", "results/s"] {
        let told = as_user(ALICE, &shown, &format!("cat $0/{path}"));
        assert!(told.is_err(), "{path}: {told:?}");
    }
    let listed = as_user(ALICE, &shown, "ls $0/results");
    assert!(listed.is_err(), "{listed:?}");
    // What she does with what she had is not done to what is there now.
    let _ =
        as_user(ALICE, &shown, "chmod 777 $0/results; echo planted > $0/results/planted; chmod 666 $0/key");
    let _ = mounted.scene.ondeck(&["cache", "flush", "fast"]).output().unwrap();
    assert_eq!(sh(&disk, "stat -c '%a %u' results key; ls results"), "700 0\n600 0\ns\n");
}

#[test]
fn attributes_that_only_root_may_know_are_listed_to_root_alone() {
    let Some(mounted) = Mounted::with(&["--allow-other"], |backing| {
        mount_a_disk(backing);
        sh(backing, "echo x > file; setfattr -n trusted.own -v 1 file; setfattr -n user.own -v 1 file");
    }) else {
        return;
    };
    let _disk = Frozen(mounted.backing.clone());
    sh(mounted.scene.dir.path(), "chmod 755 .");
    let list = "getfattr -m - $0/file | grep own";
    assert_eq!(as_user(20_001, &mounted.fast, list).unwrap(), "user.own\n");
    assert_eq!(as_user(0, &mounted.fast, list).unwrap(), "trusted.own\nuser.own\n");
}
