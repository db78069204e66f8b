//! What a process holds of directories that are about to be mounted over: it would go on with what is below.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use ondeck_ramdisk::mounts::{Mount, mounted_of, seen_at};
use ondeck_ramdisk::processes::{look_at, no_answer};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::groups::is_gone;

/// How long it may take to resolve the path of a socket, while the job is stopped.
const RESOLVING: Duration = Duration::from_millis(100);

/// A directory that is about to be mounted over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetDir {
    /// Its real path.
    pub real: PathBuf,
    /// The device of its files.
    pub device: (u32, u32),
    /// The device of its filesystem, by which mounts and watches are told: on btrfs, another one.
    pub filesystem: (u32, u32),
    /// Where it is in its filesystem, whatever is shown of that.
    pub inside: PathBuf,
}

impl TargetDir {
    /// A directory that is open, at its real path and on a mount.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(directory: impl AsFd, real: &Path, mount: &Mount) -> io::Result<TargetDir> {
        // By the descriptor: root can't reach every path.
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH;
        let stat = statx(directory, c"", flags, StatxFlags::TYPE)?;
        Ok(TargetDir {
            real: real.to_owned(),
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            filesystem: mount.device,
            inside: inside(real, mount),
        })
    }
}

/// Where a path is in the filesystem that a mount shows.
fn inside(path: &Path, mount: &Mount) -> PathBuf {
    path.strip_prefix(&mount.at).map_or_else(|_| path.to_owned(), |below| mount.root.join(below))
}

/// What is in the way, in words: the first thing that one of these processes holds of one of these directories. Nothing if
/// they hold nothing.
///
/// # Errors
/// If it can't be told.
pub fn held(pids: &BTreeSet<i32>, targets: &[TargetDir]) -> io::Result<Option<String>> {
    let targets = targets.to_vec();
    for (pid, found) in look_at(pids.iter().copied(), move |pid| held_by(pid, &targets))? {
        match found.unwrap_or_else(|| Err(no_answer(pid))) {
            Ok(None) => {}
            Ok(Some(what)) => {
                let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                return Ok(Some(format!("process {pid} ({}) {what}", command.trim_end())));
            }
            // It has ended since; of those that are stopped none does.
            Err(error) if is_gone(&error) && !Path::new(&format!("/proc/{pid}")).exists() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn held_by(pid: i32, targets: &[TargetDir]) -> io::Result<Option<String>> {
    let mounts = mounted_of(pid)?;
    let is_below = |path: &Path, device: Option<(u32, u32)>, mount: Option<&Mount>| {
        targets.iter().any(|target| {
            let same = device.is_none_or(|device| device == target.device);
            path.starts_with(&target.real)
                || match mount {
                    Some(mount) => same && inside(path, mount).starts_with(&target.inside),
                    // What is on a mount that the process does not see may be anywhere.
                    None => device.is_some_and(|device| device == target.device),
                }
        })
    };
    let base = PathBuf::from(format!("/proc/{pid}"));
    let mut sockets = BTreeSet::new();
    for task in fs::read_dir(base.join("task"))? {
        let task = task?.path();
        let mut links: Vec<(PathBuf, &str)> = vec![
            (task.join("cwd"), "has its working directory"),
            (task.join("root"), "has its root directory"),
        ];
        for open in fs::read_dir(task.join("fd"))? {
            links.push((open?.path(), "has a file open"));
        }
        // What is told of a descriptor beside what it leads to.
        let told_of = |link: &Path| {
            let number = link.file_name().unwrap_or_default();
            match fs::read_to_string(task.join("fdinfo").join(number)) {
                Err(error) if is_gone(&error) => Ok(String::new()),
                other => other,
            }
        };
        for (link, what) in links {
            let path = match fs::read_link(&link) {
                Ok(path) => path,
                Err(error) if is_gone(&error) => continue,
                Err(error) => return Err(error),
            };
            let text = path.to_string_lossy();
            if let Some(inode) = text.strip_prefix("socket:[") {
                if sockets.insert(inode.trim_end_matches(']').to_owned())
                    && has_descriptors_queued(&told_of(&link)?)
                {
                    return Ok(Some("has descriptors on their way through a socket".to_owned()));
                }
            } else if let "anon_inode:inotify" | "anon_inode:[inotify]" | "anon_inode:[fanotify]" = &*text {
                // What happens in RAM would never be told to it.
                if watches(&told_of(&link)?, &mounts, targets) {
                    return Ok(Some("waits for changes (inotify, fanotify) on that filesystem".to_owned()));
                }
            } else if text == "anon_inode:[io_uring]" {
                // The kernel does not tell which files it has.
                return Ok(Some("uses io_uring, whose open files nobody can see".to_owned()));
            } else if text.starts_with(['/', '(']) {
                // Without asking the filesystem's server, which may hang.
                let stat = match statx(
                    CWD,
                    &link,
                    AtFlags::STATX_DONT_SYNC,
                    StatxFlags::TYPE | StatxFlags::MNT_ID,
                ) {
                    Ok(stat) => stat,
                    Err(error) if is_gone(&error.into()) => continue,
                    Err(error) => return Err(error.into()),
                };
                let device = (stat.stx_dev_major, stat.stx_dev_minor);
                let mount = mounts.iter().find(|mount| mount.id == stat.stx_mnt_id);
                if is_below(&path, Some(device), mount) {
                    return Ok(Some(format!("{what} there: {text}")));
                }
            }
        }
    }
    for line in String::from_utf8_lossy(&fs::read(base.join("maps"))?).lines() {
        let Some(path) = line.find('/').map(|at| &line[at..]) else { continue };
        let permissions = line.split_whitespace().nth(1).unwrap_or_default();
        // A program or a library that is only read is the same in RAM, unless it was replaced.
        let only_read = permissions.starts_with("r-") && permissions.ends_with('p');
        if only_read && !path.ends_with(" (deleted)") {
            continue;
        }
        let path = Path::new(path);
        let mount = mounts.iter().rev().filter(|mount| path.starts_with(&mount.at));
        let mount = mount.max_by_key(|mount| mount.at.components().count());
        let device = mount.map(|mount| mount.device);
        if is_below(path, device, mount) {
            return Ok(Some(format!("has a file mapped there: {}", path.display())));
        }
    }
    bound(&base, &sockets, targets)
}

/// Whether a socket holds descriptors that nobody has taken yet, by what the kernel tells of it: they are no process's.
fn has_descriptors_queued(told: &str) -> bool {
    let mut numbers = told.lines().filter_map(|line| line.strip_prefix("scm_fds:"));
    numbers.any(|number| number.trim() != "0")
}

/// Whether inotify or fanotify watches anything of the filesystem of one of the directories, by what the kernel tells of
/// the descriptor. What can't be told may be there.
fn watches(told: &str, mounts: &[Mount], targets: &[TargetDir]) -> bool {
    told.lines().any(|line| {
        let mut fields = line.split_whitespace();
        if !matches!(fields.next(), Some("inotify" | "fanotify")) {
            return false;
        }
        let hex = |key: &str| {
            let text = line.split_whitespace().find_map(|field| field.strip_prefix(key))?;
            Some(u64::from_str_radix(text, 16))
        };
        let filesystem = match (hex("sdev:"), hex("mnt_id:")) {
            // As the kernel itself writes a device.
            (Some(Ok(device)), _) => Some(((device >> 20) as u32, (device & 0xf_ffff) as u32)),
            (None, Some(Ok(id))) => mounts.iter().find(|mount| mount.id == id).map(|mount| mount.device),
            // The first line of fanotify tells of no watch.
            (None, None) if line.starts_with("fanotify flags:") => return false,
            _ => None,
        };
        filesystem.is_none_or(|filesystem| targets.iter().any(|target| target.filesystem == filesystem))
    })
}

/// A Unix socket of the process that has its name below one of the directories.
fn bound(base: &Path, sockets: &BTreeSet<String>, targets: &[TargetDir]) -> io::Result<Option<String>> {
    if sockets.is_empty() {
        return Ok(None);
    }
    let text = fs::read(base.join("net/unix"))?;
    // Num RefCount Protocol Flags Type St Inode Path
    for line in String::from_utf8_lossy(&text).lines().skip(1) {
        let mut fields = line.split_whitespace().skip(6);
        let (Some(inode), Some(name)) = (fields.next(), fields.next()) else { continue };
        if name.starts_with('@') || !sockets.contains(inode) {
            continue;
        }
        let name = &line[line.find(name).unwrap_or_default()..];
        let path = Path::new(name);
        if !path.is_absolute() {
            return Ok(Some(format!("has bound a socket by a relative path, which may be there: {name}")));
        }
        let is_below = |path: &Path| targets.iter().any(|target| path.starts_with(&target.real));
        if is_below(path) {
            return Ok(Some(format!("has bound a socket there: {name}")));
        }
        match real_parent(path) {
            Ok(Some(real)) if is_below(&real) => {
                return Ok(Some(format!("has bound a socket there: {name}")));
            }
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Ok(Some(format!("has bound a socket where nobody answers: {name}")));
            }
        }
    }
    Ok(None)
}

/// The real path of the directory that a path is in, if it can be told. The user has chosen it: whoever serves a filesystem
/// on the way may never answer.
fn real_parent(path: &Path) -> Result<Option<PathBuf>, RecvTimeoutError> {
    let Some(parent) = path.parent().map(Path::to_owned) else { return Ok(None) };
    let (sender, receiver) = sync_channel(1);
    // It is left to itself if it hangs. A directory that is not there any more holds no socket.
    std::thread::spawn(move || sender.send(parent.canonicalize().ok()));
    receiver.recv_timeout(RESOLVING)
}

/// Refuses if one of these processes does not see the overmounts: where they are mounted, and of which device.
///
/// By the kernel's own table alone: on the way to a path, in the view of a process, there may be filesystems that its user
/// serves, and that never answer.
///
/// # Errors
/// If it does not, or that can't be told.
pub fn sees_all(pids: &BTreeSet<i32>, overmounts: &[PathBuf], device: (u32, u32)) -> io::Result<()> {
    let mut known: BTreeSet<(PathBuf, PathBuf)> = BTreeSet::new();
    let view_of = |pid: i32| -> io::Result<_> {
        let base = PathBuf::from(format!("/proc/{pid}"));
        Ok((fs::read_link(base.join("ns/mnt"))?, fs::read_link(base.join("root"))?))
    };
    for (pid, view) in look_at(pids.iter().copied(), view_of)? {
        let view = view.unwrap_or_else(|| Err(no_answer(pid)))?;
        if known.contains(&view) {
            continue;
        }
        let mounts = mounted_of(pid)?;
        for overmount in overmounts {
            let seen = seen_at(&mounts, overmount);
            if !seen.is_some_and(|mount| mount.at == *overmount && mount.device == device) {
                return Err(io::Error::other(format!(
                    "process {pid} does not see what is mounted over {}: it has mounts of its own (job_container/tmpfs, a \
                     container)",
                    overmount.display()
                )));
            }
        }
        known.insert(view);
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn mount(id: u64, parent: u64, at: &str, minor: u32) -> Mount {
        Mount {
            id,
            parent,
            device: (0, minor),
            root: "/".into(),
            at: at.into(),
            kind: "tmpfs".into(),
            source: "x".into(),
            user: None,
        }
    }

    #[test]
    fn descriptors_in_a_socket_and_watches_are_seen_in_a_real_process() {
        use rustix::fs::inotify;
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        use std::io::IoSlice;
        use std::os::fd::OwnedFd;
        use std::os::unix::net::UnixStream;
        use std::process::{Command, Stdio};

        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().canonicalize().unwrap();
        let mounts = mounted_of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let opened = fs::File::open(&real).unwrap();
        let id = statx(&opened, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).unwrap().stx_mnt_id;
        let mount = mounts.iter().find(|mount| mount.id == id).unwrap();
        let targets = [TargetDir::of(&opened, &real, mount).unwrap()];
        drop(opened);
        // Another process, as still as a frozen one: this one's other threads open and close files while it looks.
        let seen = |holds: OwnedFd| {
            let mut process = Command::new("sleep");
            // Where this one writes to may lie in the same filesystem.
            process.arg("60").stdin(holds).stdout(Stdio::null()).stderr(Stdio::null());
            let mut process = process.spawn().unwrap();
            let seen = held(&BTreeSet::from([i32::try_from(process.id()).unwrap()]), &targets);
            process.kill().unwrap();
            process.wait().unwrap();
            seen.unwrap().unwrap_or_default()
        };
        assert_eq!(seen(fs::File::open("/dev/null").unwrap().into()), "");

        let file = fs::File::create(real.join("results")).unwrap();
        let open = seen(file.try_clone().unwrap().into());
        assert!(open.contains("has a file open there"), "{open}");
        let (one, other) = UnixStream::pair().unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd()];
        assert!(message.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&one, &[IoSlice::new(b"x")], &mut message, SendFlags::empty()).unwrap();
        drop(file);
        let on_their_way = seen(other.into());
        assert!(on_their_way.contains("has descriptors on their way through a socket"), "{on_their_way}");

        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        // Of another filesystem, it is in nobody's way.
        inotify::add_watch(&watch, "/proc/self", inotify::WatchFlags::CREATE).unwrap();
        assert_eq!(seen(watch.try_clone().unwrap()), "");
        inotify::add_watch(&watch, &real, inotify::WatchFlags::CREATE).unwrap();
        let watched = seen(watch);
        assert!(watched.contains("waits for changes"), "{watched}");
    }

    #[test]
    fn what_the_kernel_tells_of_watches_is_understood() {
        let mounts = [mount(20, 1, "/", 1), mount(0x2c, 20, "/data", 2)];
        let target =
            TargetDir { real: "/data/out".into(), device: (0, 9), filesystem: (0, 2), inside: "/out".into() };
        let told = |line: &str| {
            watches(
                &format!("pos:\t0\nflags:\t02\nmnt_id:\t15\nino:\t8\n{line}\n"),
                &mounts,
                std::slice::from_ref(&target),
            )
        };
        for there in [
            "inotify wd:1 ino:5e3d sdev:2 mask:100 ignored_mask:0 fhandle-bytes:8 fhandle-type:1 f_handle:3d5e",
            "fanotify ino:68f71 sdev:2 mflags:0 mask:1b ignored_mask:0 fhandle-bytes:8",
            "fanotify sdev:2 mflags:0 mask:1b ignored_mask:0",
            "fanotify mnt_id:2c mflags:0 mask:1b ignored_mask:0",
            // On a mount that the process does not see, or in words that nobody knows.
            "fanotify mnt_id:77 mflags:0 mask:1b ignored_mask:0",
            "inotify wd:1 something:else",
        ] {
            assert!(told(there), "{there}");
        }
        for elsewhere in [
            "",
            "inotify wd:1 ino:5e3d sdev:800002 mask:100 ignored_mask:0",
            "fanotify flags:10 event-flags:8000",
            "fanotify mnt_id:14 mflags:0 mask:1b ignored_mask:0",
        ] {
            assert!(!told(elsewhere), "{elsewhere}");
        }
    }

    #[test]
    fn what_is_seen_at_a_path_is_what_is_mounted_last_on_the_way() {
        let mut mounts = vec![mount(20, 1, "/", 1), mount(30, 20, "/data", 2), mount(31, 30, "/data/out", 3)];
        assert_eq!(seen_at(&mounts, Path::new("/data/out")).unwrap().id, 31);
        assert_eq!(seen_at(&mounts, Path::new("/data/out/below")).unwrap().id, 31);
        assert_eq!(seen_at(&mounts, Path::new("/data/other")).unwrap().id, 30);
        // Over it.
        mounts.push(mount(32, 31, "/data/out", 4));
        assert_eq!(seen_at(&mounts, Path::new("/data/out")).unwrap().id, 32);
        // Over a directory above it.
        mounts.push(mount(33, 30, "/data", 5));
        assert_eq!(seen_at(&mounts, Path::new("/data/out")).unwrap().id, 33);
        assert_eq!(seen_at(&[], Path::new("/data")), None);
    }
}
