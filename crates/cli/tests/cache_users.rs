//! Several processes of several users do the same on a cache and on a plain directory, and are told the same: with owners, modes,
//! ACLs, and files that stay open. What is told includes who is refused what.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use cached::{Mounted, Random, sh, wanted};
use rustix::fs::{Access, CWD, FallocateFlags, Gid, RenameFlags, Uid, XattrFlags};

/// Where a process that does what it is told finds its directory.
const CHILD: &str = "ONDECK_USERS_CHILD";

/// All but root are in this group, too.
const SHARED_GROUP: u32 = 20_002;

const USERS: [u32; 3] = [0, 20_001, 20_003];

const PATHS: [&str; 14] =
    ["", "a", "b", "c", "d", "a/x", "a/y", "b/x", "b/y", "c/x", "a/x/p", "b/x/p", "a/x/q", "d/x"];

const ACCESS_ACL: &str = "system.posix_acl_access";
const DEFAULT_ACL: &str = "system.posix_acl_default";

/// A process that does steps in a directory.
struct Actor {
    root: PathBuf,
    kept: Option<File>,
}

/// The bytes of an ACL for one user and one group beside the owner's (acl(5), linux/posix_acl_xattr.h).
fn acl(random: &mut Random) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    let ids = [0, USERS[1 + random.below(2)], 0, SHARED_GROUP, 0, 0];
    for (tag, id) in [1_u16, 2, 4, 8, 16, 32].into_iter().zip(ids) {
        bytes.extend(tag.to_le_bytes());
        bytes.extend((random.below(8) as u16).to_le_bytes());
        bytes.extend(if matches!(tag, 2 | 8) { id } else { u32::MAX }.to_le_bytes());
    }
    bytes
}

fn xattr(path: &Path, name: &str) -> Result<Vec<u8>, rustix::io::Errno> {
    let mut value = vec![0; 4096];
    let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice())?;
    value.truncate(length);
    Ok(value)
}

/// A short word for much data.
fn digest(bytes: &[u8]) -> String {
    let sum = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    format!("{} bytes {sum:x}", bytes.len())
}

impl Actor {
    /// One step that follows from a number; says what it was, and what came of it.
    fn step(&mut self, random: &mut Random) -> String {
        let name = PATHS[random.below(PATHS.len())];
        let path = self.root.join(name);
        let other_name = PATHS[1 + random.below(PATHS.len() - 1)];
        let other = self.root.join(other_name);
        let mode = random.below(0o1000) as u32 | if random.below(3) == 0 { 0o700 } else { 0 };
        let at = if random.below(3) == 0 { random.below(3 << 20) } else { random.below(20_000) } as u64;
        let length = 1 + if random.below(4) == 0 { random.below(300_000) } else { random.below(9_000) };
        let open = |write: bool| File::options().read(!write).write(write).open(&path);
        let kind = random.below(30);
        // The root of the cache is a mount point, which is busy.
        let kind = if name.is_empty() && (14..17).contains(&kind) { 26 } else { kind };
        let (what, done) = match kind {
            0..3 => {
                let mut options = File::options();
                options.write(true).create_new(true).mode(mode);
                (format!("create {name} {mode:o}"), options.open(&path).map(|_| String::new()))
            }
            3..5 => (
                format!("mkdir {name} {mode:o}"),
                rustix::fs::mkdir(&path, rustix::fs::Mode::from_raw_mode(mode))
                    .map(|()| String::new())
                    .map_err(Into::into),
            ),
            5..9 => {
                let data = random.bytes(length);
                let done = open(true).and_then(|file| file.write_all_at(&data, at));
                (format!("write {name} {at} {length}"), done.map(|()| String::new()))
            }
            9..11 => {
                let mut data = Vec::new();
                let done = open(false).and_then(|mut file| file.read_to_end(&mut data));
                (format!("read {name}"), done.map(|_| digest(&data)))
            }
            11 => {
                let done = open(true).and_then(|file| file.set_len(at));
                (format!("truncate {name} {at}"), done.map(|()| String::new()))
            }
            12 => {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let done =
                    open(true).and_then(|file| Ok(rustix::fs::fallocate(file, how, at, length as u64)?));
                (format!("punch {name} {at} {length}"), done.map(|()| String::new()))
            }
            13 => (format!("unlink {name}"), fs::remove_file(&path).map(|()| String::new())),
            14 => (format!("rmdir {name}"), fs::remove_dir(&path).map(|()| String::new())),
            15..17 => {
                let flags = [
                    RenameFlags::empty(),
                    RenameFlags::empty(),
                    RenameFlags::NOREPLACE,
                    RenameFlags::EXCHANGE,
                ];
                let flags = flags[random.below(4)];
                let done = rustix::fs::renameat_with(CWD, &path, CWD, &other, flags);
                (
                    format!("rename {name} {other_name} {flags:?}"),
                    done.map(|()| String::new()).map_err(Into::into),
                )
            }
            17 => (format!("link {name} {other_name}"), fs::hard_link(&path, &other).map(|()| String::new())),
            18 => (format!("symlink {name}"), symlink("a/x", &path).map(|()| String::new())),
            19..21 => {
                // Now and then with set-id bits, or sticky.
                let mode = mode | [0, 0, 0, 0o1000, 0o2000, 0o4000, 0o6000][random.below(7)];
                let done = fs::set_permissions(&path, Permissions::from_mode(mode));
                (format!("chmod {name} {mode:o}"), done.map(|()| String::new()))
            }
            21 => {
                let uid = [None, None, Some(USERS[1]), Some(USERS[2])][random.below(4)];
                let gid = [None, Some(SHARED_GROUP), Some(USERS[1]), Some(USERS[2])][random.below(4)];
                // To nobody else by somebody else is not refused on a cache: see docs/semantics.md.
                let is_root = rustix::process::geteuid().is_root();
                let gid = if uid.is_none() && gid.is_none() && !is_root { Some(SHARED_GROUP) } else { gid };
                let done = rustix::fs::chownat(
                    CWD,
                    &path,
                    uid.map(Uid::from_raw),
                    gid.map(Gid::from_raw),
                    rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
                );
                (format!("chown {name} {uid:?} {gid:?}"), done.map(|()| String::new()).map_err(Into::into))
            }
            22 => {
                let value = random.bytes(length % 500);
                let done = rustix::fs::setxattr(&path, "user.test", &value, XattrFlags::empty());
                (format!("setxattr {name}"), done.map(|()| String::new()).map_err(Into::into))
            }
            23 => {
                let which = [ACCESS_ACL, ACCESS_ACL, DEFAULT_ACL][random.below(3)];
                let value = acl(random);
                let done = rustix::fs::setxattr(&path, which, &value, XattrFlags::empty());
                (format!("{which} {name} {value:?}"), done.map(|()| String::new()).map_err(Into::into))
            }
            24 => {
                let which = [ACCESS_ACL, DEFAULT_ACL, "user.test"][random.below(3)];
                (
                    format!("{which} {name}?"),
                    xattr(&path, which).map(|value| digest(&value)).map_err(Into::into),
                )
            }
            25 => {
                let wanted = [Access::READ_OK, Access::WRITE_OK, Access::EXEC_OK][random.below(3)];
                let done = rustix::fs::access(&path, wanted);
                (format!("access {name} {wanted:?}"), done.map(|()| String::new()).map_err(Into::into))
            }
            26 => (format!("stat {name}"), fs::symlink_metadata(&path).map(|found| shown(&found))),
            27 => {
                let listed = fs::read_dir(&path).map(|entries| {
                    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
                    names.sort();
                    format!("{names:?}")
                });
                (format!("list {name}"), listed)
            }
            28 => {
                let opened = File::options().read(true).write(true).open(&path);
                let done = opened.map(|file| {
                    self.kept = Some(file);
                    String::new()
                });
                (format!("keep {name}"), done)
            }
            _ => match &self.kept {
                Some(file) => {
                    let data = random.bytes(length);
                    let mut found = vec![0; 1000];
                    let done = file.write_all_at(&data, at).and_then(|()| file.read_at(&mut found, at / 2));
                    let done = done.and_then(|count| Ok((digest(&found[..count]), file.metadata()?)));
                    (format!("write kept {at} {length}"), done.map(|(read, of)| read + " " + &shown(&of)))
                }
                None => ("nothing kept".to_owned(), Ok(String::new())),
            },
        };
        match done {
            Ok(done) => format!("{what}: {done}"),
            Err(error) => format!("{what}: {error}"),
        }
    }
}

/// What does not depend on the filesystem.
fn shown(of: &fs::Metadata) -> String {
    let size =
        if of.is_dir() { String::new() } else { format!("{} bytes, {} links, ", of.size(), of.nlink()) };
    format!("{size}{:o} {}:{}", of.mode(), of.uid(), of.gid())
}

/// The process of a user: it takes numbers of steps from its standard input, or how many steps follow from one.
#[test]
fn the_process_of_a_user() {
    let Ok(root) = std::env::var(CHILD) else { return };
    let mut actor = Actor { root: PathBuf::from(&root), kept: None };
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // The harness says things on the standard output.
    // SAFETY: the shell that has started this opened it for us, and nobody else here knows of it.
    let mut out = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(9) };
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let mut random = Random(words[0].parse().unwrap());
        let told = match words.get(1..) {
            Some([count, below]) => {
                let mut alone = Actor { root: Path::new(&root).join(below), kept: None };
                let steps: Vec<_> =
                    (0..count.parse::<usize>().unwrap()).map(|_| alone.step(&mut random)).collect();
                steps.join("; ")
            }
            _ => actor.step(&mut random),
        };
        writeln!(out, "{told}").unwrap();
    }
}

/// A process of a user.
struct Process {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Process {
    fn start(program: &Path, user: u32, root: &Path) -> Process {
        let mut command = Command::new("bash");
        command.args(["-c", "exec \"$0\" --exact the_process_of_a_user --nocapture 9>&1 >/dev/null"]);
        command.arg(program).env(CHILD, root).current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: system calls only, in the child before exec.
        unsafe {
            command.pre_exec(move || {
                let groups = [SHARED_GROUP];
                let count = usize::from(user != 0);
                if libc::setgroups(count, groups.as_ptr()) != 0
                    || libc::setgid(user) != 0
                    || libc::setuid(user) != 0
                {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        let (orders, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Process { child, orders, answers }
    }

    fn order(&mut self, order: &str) {
        writeln!(self.orders.as_ref().unwrap(), "{order}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.orders = None;
        if std::thread::panicking() {
            // It may wait for somebody who reads its answer.
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// Everything in a tree that programs see, but times.
fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut stack = vec![PathBuf::new()];
    while let Some(path) = stack.pop() {
        let at = root.join(&path);
        let metadata = fs::symlink_metadata(&at).unwrap();
        let mut what = shown(&metadata);
        if metadata.is_dir() {
            stack.extend(fs::read_dir(&at).unwrap().map(|entry| path.join(entry.unwrap().file_name())));
        }
        if metadata.is_file() {
            what += &digest(&fs::read(&at).unwrap());
        }
        for name in [ACCESS_ACL, DEFAULT_ACL, "user.test"] {
            what += &format!(" {:?}", xattr(&at, name).ok());
        }
        found.insert(path, what);
    }
    found
}

#[track_caller]
fn same_trees(cache: &Path, plain: &Path, what: &str) {
    let (found, expected) = (tree(cache), tree(plain));
    for path in found.keys().chain(expected.keys()) {
        assert_eq!(found.get(path), expected.get(path), "{what}: {}", path.display());
    }
}

fn users_do_the_same(seed: u64, steps: usize) {
    let marks = ["--allow-other", "--age", "1s", "--dirty-high", "20", "--dirty-low", "5"];
    let own = |backing: &Path| fs::set_permissions(backing, Permissions::from_mode(0o777)).unwrap();
    let Some(mounted) = Mounted::with(&marks, own) else { return };
    let plain = mounted.scene.dir("plain");
    own(&plain);
    let program = mounted.scene.path("program");
    // Not by this process: a child that another test forks meanwhile would have it open for writing, and nobody could run it.
    sh(Path::new("/"), &format!("cp {} {}", std::env::current_exe().unwrap().display(), program.display()));
    let both = [&mounted.fast, &plain];
    let mut processes: Vec<_> =
        USERS.iter().map(|user| both.map(|root| Process::start(&program, *user, root))).collect();

    // One after the other, on the same files.
    let mut random = Random(seed);
    let mut history = Vec::new();
    for number in 0..steps {
        let user = random.below(USERS.len());
        let order = (random.next() | 1).to_string();
        let [found, expected] = processes[user].each_mut().map(|process| {
            process.order(&order);
            process.answer()
        });
        history.push(format!("{}: {expected}", USERS[user]));
        assert_eq!(
            found,
            expected,
            "step {number} of seed {seed}, user {}; {}",
            USERS[user],
            history.concat()
        );
        if number % 500 == 499 {
            mounted.ondeck(&["flush", "fast"]);
            same_trees(&mounted.backing, &plain, &format!("after {number} steps of seed {seed}"));
        }
    }
    // All at once, each in a directory of its own.
    for root in both {
        for user in USERS {
            let own = root.join(format!("of-{user}"));
            fs::create_dir(&own).unwrap();
            std::os::unix::fs::chown(own, Some(user), Some(SHARED_GROUP)).unwrap();
        }
    }
    let order = |user: u32| format!("{} {steps} of-{user}", seed.wrapping_add(u64::from(user)));
    for (process, user) in processes.iter_mut().flatten().zip(USERS.iter().flat_map(|user| [user; 2])) {
        process.order(&order(*user));
    }
    for (pair, user) in processes.iter_mut().zip(USERS) {
        let [found, expected] = pair.each_mut().map(Process::answer);
        let differs = found.split("; ").zip(expected.split("; ")).position(|(a, b)| a != b);
        let upto = expected.split("; ").take(differs.map_or(0, |at| at + 1)).collect::<Vec<_>>().join("\n");
        let told = found.split("; ").nth(differs.unwrap_or(0)).unwrap();
        assert_eq!(differs, None, "user {user} of seed {seed} was told {told}, at the end of {upto}");
    }
    drop(processes);
    same_trees(&mounted.fast, &plain, "in the cache");
    mounted.ondeck(&["unmount", "fast"]);
    same_trees(&mounted.backing, &plain, "on the disk");
}

#[test]
fn processes_of_several_users_are_told_what_a_plain_directory_tells() {
    if std::env::var(CHILD).is_ok() {
        return;
    }
    for seed in 1..=wanted("ONDECK_USERS_SEEDS", 4) as u64 {
        users_do_the_same(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), wanted("ONDECK_USERS_STEPS", 3_000));
    }
}

#[test]
fn who_is_not_the_owner_takes_nothing_away_by_an_empty_chown() {
    let own = |backing: &Path| fs::set_permissions(backing, Permissions::from_mode(0o777)).unwrap();
    let Some(mounted) = Mounted::with(&["--allow-other"], own) else { return };
    let path = mounted.fast.join("program");
    fs::write(&path, "program").unwrap();
    let set_id = 0o106_755;
    fs::set_permissions(&path, Permissions::from_mode(set_id)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let user = USERS[1];
            // SAFETY: a system call with numbers; it concerns this thread alone, which ends with this.
            let became = unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) };
            assert_eq!(became, 0);
            std::os::unix::fs::chown(&path, None, None).unwrap();
        });
    });
    assert_eq!(fs::metadata(&path).unwrap().mode(), set_id);
    std::os::unix::fs::chown(&path, None, None).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode(), 0o100_755);
}
