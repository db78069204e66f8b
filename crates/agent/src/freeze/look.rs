//! What a process holds of directories that are about to be covered: it would go on with what is below.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use ondeck_ramdisk::mounts::{Mount, mounted_of};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::groups::is_gone;

/// A directory that is about to be covered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its real path.
    pub real: PathBuf,
    /// The device of its files.
    pub device: (u32, u32),
    /// Where it is in its filesystem, whatever is shown of that.
    pub inside: PathBuf,
}

impl Place {
    /// A directory that is open, at its real path and on a mount.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(directory: impl AsFd, real: &Path, mount: &Mount) -> io::Result<Place> {
        // By the descriptor: root can't reach every path.
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH;
        let stat = statx(directory, c"", flags, StatxFlags::TYPE)?;
        Ok(Place {
            real: real.to_owned(),
            device: (stat.stx_dev_major, stat.stx_dev_minor),
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
pub fn held(pids: &BTreeSet<i32>, places: &[Place]) -> io::Result<Option<String>> {
    for pid in pids {
        match held_by(*pid, places) {
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

fn held_by(pid: i32, places: &[Place]) -> io::Result<Option<String>> {
    let mounts = mounted_of(pid)?;
    let is_below = |path: &Path, device: Option<(u32, u32)>, mount: Option<&Mount>| {
        places.iter().any(|place| {
            let same = device.is_none_or(|device| device == place.device);
            path.starts_with(&place.real)
                || match mount {
                    Some(mount) => same && inside(path, mount).starts_with(&place.inside),
                    // What is on a mount that the process does not see may be anywhere.
                    None => device.is_some_and(|device| device == place.device),
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
        for (link, what) in links {
            let path = match fs::read_link(&link) {
                Ok(path) => path,
                Err(error) if is_gone(&error) => continue,
                Err(error) => return Err(error),
            };
            let text = path.to_string_lossy();
            if let Some(inode) = text.strip_prefix("socket:[") {
                sockets.insert(inode.trim_end_matches(']').to_owned());
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
    bound(&base, &sockets, places)
}

/// A Unix socket of the process that has its name below one of the directories.
fn bound(base: &Path, sockets: &BTreeSet<String>, places: &[Place]) -> io::Result<Option<String>> {
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
        let real = path.parent().and_then(|parent| parent.canonicalize().ok());
        let is_below = |path: &Path| places.iter().any(|place| path.starts_with(&place.real));
        if is_below(path) || real.is_some_and(|real| is_below(&real)) {
            return Ok(Some(format!("has bound a socket there: {name}")));
        }
    }
    Ok(None)
}

/// Refuses if one of these processes does not see the covers: where they are mounted, and of which device.
///
/// # Errors
/// If it does not, or that can't be told.
pub fn sees_all(pids: &BTreeSet<i32>, covers: &[PathBuf], device: (u32, u32)) -> io::Result<()> {
    let mut known: BTreeMap<(PathBuf, PathBuf), ()> = BTreeMap::new();
    for pid in pids {
        let base = PathBuf::from(format!("/proc/{pid}"));
        let view = (fs::read_link(base.join("ns/mnt"))?, fs::read_link(base.join("root"))?);
        if known.contains_key(&view) {
            continue;
        }
        let mounts = mounted_of(*pid)?;
        for cover in covers {
            let top = mounts.iter().rev().find(|mount| mount.at == *cover);
            let path = base.join("root").join(cover.strip_prefix("/").unwrap_or(cover));
            // What is mounted above it would hide it.
            let seen = match statx(CWD, &path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE) {
                Ok(stat) => Some((stat.stx_dev_major, stat.stx_dev_minor)),
                // Root is not let in everywhere; the table above counts.
                Err(rustix::io::Errno::ACCESS) => Some(device),
                Err(error) => return Err(error.into()),
            };
            if top.is_none_or(|mount| mount.device != device) || seen != Some(device) {
                return Err(io::Error::other(format!(
                    "process {pid} does not see what is mounted over {}: it has mounts of its own (job_container/tmpfs, a \
                     container)",
                    cover.display()
                )));
            }
        }
        known.insert(view, ());
    }
    Ok(())
}
