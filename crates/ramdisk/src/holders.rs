//! Who has files open on a filesystem, as /proc tells it for all processes of the machine, also for those in other mount
//! namespaces.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use crate::processes::{has_ended, look_at, pids, users_of};

/// A process that holds something of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process id.
    pub pid: i32,
    /// The name of its program.
    pub command: String,
    /// What it holds, as the process knows it; nothing if that can't be told.
    pub path: Option<PathBuf>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({}) ", self.pid, self.command)?;
        match &self.path {
            Some(path) => write!(f, "holds {}", path.display()),
            None => {
                f.write_str(
                    "may hold something: it, or others of its user's, wait in execve for a filesystem that does not \
                     answer",
                )
            }
        }
    }
}

/// The first `most` processes that hold an open file, a mapped file, a working directory or a root directory on the
/// filesystem with this device number, at a path that `counts`; one path for each. Of whom the kernel can't tell in time,
/// those of `owner` and root's may hold something. Another user's process has nothing open there unless they were let in;
/// one of theirs that never answers must not keep it.
///
/// # Errors
/// The kernel's, if it can't be told which processes there are, or what one of them holds.
pub fn holders(
    device: (u32, u32),
    owner: u32,
    most: usize,
    counts: impl Fn(&Path) -> bool,
) -> io::Result<Vec<Holder>> {
    let mut found = Vec::new();
    for (pid, held) in look_at(pids()?, move |pid| held_by(pid, device))? {
        if found.len() == most {
            break;
        }
        let path = match held {
            Some(Ok(paths)) => paths.into_iter().find(|path| counts(path)).map(Some),
            None => match users_of(pid) {
                // Of a set-uid program that another user has started only the real user is that one.
                Ok(users) => (users.contains(&owner) || users[0] == 0).then_some(None),
                Err(error) if has_ended(&error) => None,
                Err(error) => return Err(error),
            },
            Some(Err(error)) if has_ended(&error) => None,
            // Others' processes are not for an ordinary user to look at; root sees all of them.
            Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => None,
            Some(Err(error)) => return Err(error),
        };
        if let Some(path) = path {
            let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            found.push(Holder { pid, command: command.trim_end().to_owned(), path });
        }
    }
    Ok(found)
}

fn held_by(pid: i32, device: (u32, u32)) -> io::Result<Vec<PathBuf>> {
    let base = PathBuf::from(format!("/proc/{pid}"));
    let on_device = |link: PathBuf| {
        // Without asking the filesystem's server, which may hang: it may be any filesystem of the machine. What can't be
        // looked at was closed meanwhile, or its filesystem is dead.
        let stat = statx(CWD, &link, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok()?;
        if (stat.stx_dev_major, stat.stx_dev_minor) != device {
            return None;
        }
        fs::read_link(&link).ok()
    };
    let mut paths: Vec<PathBuf> =
        ["cwd", "root", "exe"].into_iter().filter_map(|name| on_device(base.join(name))).collect();
    for open in fs::read_dir(base.join("fd"))? {
        paths.extend(on_device(open?.path()));
    }
    paths.extend(mapped(&base, device)?);
    Ok(paths)
}

fn mapped(base: &Path, device: (u32, u32)) -> io::Result<Vec<PathBuf>> {
    let wanted = format!("{:02x}:{:02x}", device.0, device.1);
    let maps = fs::read(base.join("maps"))?;
    // address, permissions, offset, device, inode, path
    Ok(String::from_utf8_lossy(&maps)
        .lines()
        .filter(|line| line.split_whitespace().nth(3) == Some(&wanted))
        .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

    #[test]
    fn a_process_that_stands_in_a_directory_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        let number = fs::metadata(&real).unwrap().dev();
        let device = (rustix::fs::major(number), rustix::fs::minor(number));
        let mut child = Command::new("sleep").arg("300").current_dir(&real).spawn().unwrap();
        let found = holders(device, 0, 10, |path| path.starts_with(&real)).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.iter().any(|holder| holder.pid == child.id() as i32), "{found:?}");
        assert!(holders(device, 0, 10, |path| path.starts_with(&real)).unwrap().is_empty());
    }
}
