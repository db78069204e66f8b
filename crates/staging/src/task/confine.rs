//! The isolation of a task: its namespaces, what can be seen in them, and its limits.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ondeck_ramdisk::mounts::{self, Target, Tree};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::order::TaskOrder;
use super::{Failure, RAM_DISK, SCRATCH};

/// More processes and threads than a user's staging needs.
const PROCESSES: u64 = 4096;

/// Namespaces for what this process will start, and in them the RAM disk at [`RAM_DISK`] and no other one anywhere. The
/// next child is the init of the process-id namespace.
pub fn enter(order: &TaskOrder) -> Result<(), Failure> {
    let failed = |what: &str, error: io::Error| {
        Failure::passing(format!("{}: can't {what} for the task: {error}", order.node))
    };
    // The agent is spared when memory runs out; what it starts for a user is not.
    let _ = fs::write("/proc/self/oom_score_adj", "0");
    // SAFETY: this process has one thread and shares nothing that is unshared with another one.
    let unshared =
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWPID | UnshareFlags::NEWIPC) };
    unshared.map_err(|error| failed("make namespaces", error.into()))?;
    // Disks that the machine mounts on demand still come in; ours never go out.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .map_err(|error| failed("make namespaces", error.into()))?;
    let Some(data) = &order.data else {
        return hide_ram_disks(order).map_err(|error| failed("hide RAM disks", error));
    };
    let show = || -> io::Result<()> {
        for path in [RAM_DISK, SCRATCH] {
            match fs::DirBuilder::new().recursive(true).mode(0o755).create(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        mounts::bind(data, &Target::open(Path::new(RAM_DISK), None)?)
    };
    show().map_err(|error| failed(&format!("show {} at {RAM_DISK}", order.ramdisk), error))?;
    hide_ram_disks(order).map_err(|error| failed("hide the other RAM disks", error))?;
    if order.request.work.script().is_some() {
        for place in OPEN_TO_ALL {
            own(place, order)?;
        }
    }
    let options = CString::new(format!(
        "mode=700,uid={},gid={},size={}",
        order.request.uid, order.request.gid, order.script_memory.0
    ));
    let options = options.map_err(|error| failed("make room", error.into()))?;
    mount("ondeck-scratch", SCRATCH, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, &*options)
        .map_err(|error| failed("make room for notes", error.into()))?;
    Ok(())
}

/// Directories of the node in which every user can leave something, of which two may hold a job's own. What a script left
/// there would take the node's RAM or disk for ever, so it gets others, which end with it.
const OPEN_TO_ALL: [(&str, bool); 3] = [("/dev/shm", false), ("/tmp", true), ("/var/tmp", true)];

/// Mounts memory over a directory that is open to all. Of what is in it only that is still seen in which something lies
/// that the task needs: whole entries of its top level, so that their own modes go on keeping users out.
fn own((place, may_hold): (&str, bool), order: &TaskOrder) -> Result<(), Failure> {
    let Ok(real) = fs::canonicalize(place) else { return Ok(()) };
    let failed = |error: io::Error| {
        Failure::passing(format!("{}: can't give the task a {place}: {error}", order.node))
    };
    let open = |path: &Path| -> io::Result<OwnedFd> {
        Ok(rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
    };
    let below = |path: &Path| {
        let inner = path.strip_prefix(place).or_else(|_| path.strip_prefix(&real)).ok()?;
        Some(inner.components().next().map(|first| PathBuf::from(first.as_os_str())))
    };
    let request = &order.request;
    for directory in request.work.directories() {
        let there =
            |first: Option<PathBuf>| first.is_some_and(|first| real.join(first).symlink_metadata().is_ok());
        if below(&directory.path).is_some_and(|first| !may_hold || !there(first)) {
            return Err(Failure::lasting(format!(
                "{}: scripts have a {place} of their own, which ends with them; name a directory elsewhere",
                directory.path.display()
            )));
        }
    }
    let script = request.work.script().map(|script| request.work_dir.join(script));
    let needed = request.work.directories().iter().map(|directory| directory.path.as_path());
    let needed = needed.chain([request.work_dir.as_path(), order.socket.as_path()]).chain(script.as_deref());
    let names: BTreeSet<PathBuf> = needed.filter_map(below).flatten().filter(|_| may_hold).collect();
    let seen: io::Result<Vec<_>> = names
        .into_iter()
        // What is not there is missed by whoever needs it.
        .filter_map(|name| Some((open(&real.join(&name)).ok()?, name)))
        .map(|(entry, name)| {
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&entry)?.st_mode);
            Ok(match kind {
                FileType::Symlink => {
                    (name, kind, EntryBelow::Link(rustix::fs::readlinkat(&entry, c"", Vec::new())?))
                }
                _ => (name, kind, EntryBelow::Tree(Tree::of_all(entry.as_fd())?)),
            })
        })
        .collect();
    let seen = seen.map_err(failed)?;
    let size = CString::new(format!("mode=1777,size={}", order.script_memory.0));
    let size = size.map_err(|error| failed(error.into()))?;
    mount("ondeck-scratch", &real, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, &*size)
        .map_err(|error| failed(error.into()))?;
    for (name, kind, entry) in seen {
        let at = real.join(name);
        let show = || -> io::Result<()> {
            let tree = match &entry {
                EntryBelow::Link(target) => return Ok(rustix::fs::symlink(target, &at)?),
                EntryBelow::Tree(tree) => tree,
            };
            match kind {
                FileType::Directory => fs::create_dir(&at)?,
                _ => drop(fs::File::create_new(&at)?),
            }
            tree.attach(open(&at)?.as_fd())
        };
        show().map_err(failed)?;
    }
    Ok(())
}

/// An entry that is seen through what was mounted over its directory.
enum EntryBelow {
    Link(CString),
    Tree(Tree),
}

/// Takes every RAM disk of the agent's out of this mount namespace: also this one where it is shown over the disk, as what
/// is copied from and to is the disk. It also keeps a RAM disk that is destroyed meanwhile from being held by this task.
fn hide_ram_disks(order: &TaskOrder) -> io::Result<()> {
    let all = mounts::mounted()?;
    let inside: Vec<_> = all.iter().filter(|mount| mount.at.starts_with(&order.state)).collect();
    let is_ours = |mount: &mounts::Mount| {
        mount.at != Path::new(RAM_DISK)
            && (mount.at.starts_with(&order.state)
                // Users can give any name to what they mount by FUSE.
                || (mount.source.starts_with("ondeck:") && !mount.is_a_users())
                || inside.iter().any(|own| own.device == mount.device))
    };
    // The latest first: they may lie on one another.
    all.iter().rev().filter(|mount| is_ours(mount)).try_for_each(|mount| {
        // What somebody has mounted above it hides it already, and may never answer.
        if mounts::seen_at(&mounts::mounted()?, &mount.at).is_none_or(|seen| seen.id != mount.id) {
            return Ok(());
        }
        match mounts::detach(&mount.at) {
            // Below one that has gone already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    })
}

/// Shows the processes of this namespace alone. Where that is not allowed, the names of others can be seen; then this says
/// no, and the numbers in /proc are not those of this namespace.
pub fn mount_own_proc() -> bool {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", flags, None).is_ok()
}

/// The limits of whatever runs as the user.
pub fn limit() {
    let core = Rlimit { current: Some(0), maximum: Some(0) };
    // Lowering can't fail.
    let _ = setrlimit(Resource::Core, core);
    let most =
        rustix::process::getrlimit(Resource::Nproc).maximum.map_or(PROCESSES, |old| old.min(PROCESSES));
    let _ = setrlimit(Resource::Nproc, Rlimit { current: Some(most), maximum: Some(most) });
}
