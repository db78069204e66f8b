//! RAM that may be used: the least of what the machine has free and what every memory cgroup above us has left.
//!
//! The pages of a tmpfs are charged to the memory cgroup of the process that writes them, so a batch job's limit
//! counts as much as the machine's RAM. Clean page cache counts as free: the kernel gives it up first.

use std::fs;
use std::path::{Path, PathBuf};

use ondeck_core::Bytes;

use crate::mounts::{self, Mount};

/// What limits a RAM disk here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeRam {
    /// The machine's available RAM (`MemAvailable` of /proc/meminfo).
    pub machine: Bytes,
    /// The tightest memory cgroup above this process: what it has left, and where it is.
    pub cgroup: Option<(Bytes, PathBuf)>,
}

impl FreeRam {
    /// The least of all.
    pub fn usable(&self) -> Bytes {
        self.cgroup.as_ref().map_or(self.machine, |(left, _)| self.machine.min(*left))
    }
}

/// Asks the kernel.
///
/// # Errors
/// If /proc/meminfo can't be read, or /proc/self/cgroup though there are cgroups. Groups whose files can't be read don't
/// limit: in a container those outside of it can't.
pub fn free_ram() -> std::io::Result<FreeRam> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let machine =
        field(&meminfo, "MemAvailable:").map(|kib| Bytes(kib.saturating_mul(1024))).ok_or_else(|| {
            std::io::Error::new(std::io::ErrorKind::InvalidData, "/proc/meminfo has no MemAvailable")
        })?;
    let own = match fs::read_to_string("/proc/self/cgroup") {
        // A kernel without cgroups.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        own => own?,
    };
    let mounts = mounts::mounted()?;
    // The last one that was mounted there is the one that is seen.
    let root_of = |base: &Path| {
        let at_base = |mount: &&Mount| mount.at == base && mount.kind.starts_with("cgroup");
        mounts.iter().rev().find(at_base).map(|mount| mount.root.clone())
    };
    Ok(FreeRam { machine, cgroup: tightest(&own, Path::new("/sys/fs/cgroup"), root_of) })
}

/// All RAM of the machine.
///
/// # Errors
/// If /proc/meminfo can't be read.
pub fn total_ram() -> std::io::Result<Bytes> {
    field(&fs::read_to_string("/proc/meminfo")?, "MemTotal:")
        .map(|kib| Bytes(kib.saturating_mul(1024)))
        .ok_or_else(|| std::io::Error::new(std::io::ErrorKind::InvalidData, "/proc/meminfo has no MemTotal"))
}

/// The number behind `key` in a file of `key number` lines.
fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next()?.parse().ok())
}

/// `root_of` tells which group is mounted at a path. It and the process's own group are named alike: from the root of the
/// process's namespace of groups, which need not be the kernel's.
fn tightest(own: &str, root: &Path, root_of: impl Fn(&Path) -> Option<PathBuf>) -> Option<(Bytes, PathBuf)> {
    let mut least: Option<(Bytes, PathBuf)> = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (base, left): (PathBuf, fn(&Path) -> Option<u64>) = if controllers.is_empty() {
            (if root.join("unified").is_dir() { root.join("unified") } else { root.to_owned() }, left_v2)
        } else if controllers.split(',').any(|name| name == "memory") {
            (root.join("memory"), left_v1)
        } else {
            continue;
        };
        // In a container the path may lie outside of what is mounted; the levels that exist are looked at.
        let below =
            root_of(&base).and_then(|root| Path::new(path).strip_prefix(root).ok().map(Path::to_owned));
        let mut group = match below {
            Some(below) => base.join(below),
            None => base.join(path.trim_start_matches('/')),
        };
        while group.starts_with(&base) {
            if let Some(bytes) = left(&group)
                && least.as_ref().is_none_or(|(known, _)| Bytes(bytes) < *known)
            {
                least = Some((Bytes(bytes), group.clone()));
            }
            if !group.pop() {
                break;
            }
        }
    }
    least
}

fn number(path: PathBuf) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// What a group has left: its limit less what it uses, not counting the page cache that can be dropped.
fn left_v2(group: &Path) -> Option<u64> {
    let limit = number(group.join("memory.max"))?; // "max" is no number: no limit
    let used = number(group.join("memory.current"))?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = field(&stat, "inactive_file ").unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

fn left_v1(group: &Path) -> Option<u64> {
    let limit = number(group.join("memory.limit_in_bytes"))?;
    // Without a limit the file holds the largest multiple of the page size.
    if limit >= i64::MAX as u64 / 4096 * 4096 {
        return None;
    }
    let used = number(group.join("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = field(&stat, "total_inactive_file ").unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_some_ram_free() {
        let free = free_ram().unwrap();
        assert!(free.usable() > Bytes(16 << 20) && free.usable() <= free.machine);
    }

    #[test]
    fn the_tightest_cgroup_on_the_way_up_counts_whatever_its_version() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("memory/job/step");
        fs::create_dir_all(&inner).unwrap();
        let write = |path: &str, text: &str| fs::write(dir.path().join("memory").join(path), text).unwrap();
        write("memory.limit_in_bytes", "9223372036854771712\n");
        write("job/memory.limit_in_bytes", "1000000\n");
        write("job/memory.usage_in_bytes", "300000\n");
        write("job/memory.stat", "cache 5\ntotal_inactive_file 100000\n");
        write("job/step/memory.limit_in_bytes", "2000000\n");
        write("job/step/memory.usage_in_bytes", "0\n");
        let found = tightest("4:memory:/job/step\n0::/\n", dir.path(), |_| None);
        assert_eq!(found, Some((Bytes(800_000), dir.path().join("memory/job"))));
        // Seen from a namespace of groups whose root is elsewhere, and where a part of them is mounted.
        for (own, mounted) in [("/../../job/step", "/../.."), ("/pod/job/step", "/pod")] {
            let root_of = |_: &Path| Some(PathBuf::from(mounted));
            let found = tightest(&format!("4:memory:{own}\n"), dir.path(), root_of);
            assert_eq!(found, Some((Bytes(800_000), dir.path().join("memory/job"))), "{own}");
        }

        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("job")).unwrap();
        for (name, text) in
            [("memory.max", "5000\n"), ("memory.current", "1000\n"), ("memory.stat", "inactive_file 400\n")]
        {
            fs::write(dir.path().join("job").join(name), text).unwrap();
        }
        assert_eq!(tightest("0::/job\n", dir.path(), |_| None).unwrap().0, Bytes(4400));
        fs::write(dir.path().join("job/memory.max"), "max\n").unwrap();
        assert_eq!(tightest("0::/job\n", dir.path(), |_| None), None);
    }
}
