//! Looking for what a bed left behind.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The kinds of namespace by which a process is known. Of the mount namespaces, their mounts tell.
const KINDS: [&str; 4] = ["ns/pid", "ns/pid_for_children", "ns/net", "ns/uts"];

/// What tells that a process is of a bed, also when that has gone.
pub struct Traces {
    dir: String,
    /// The links of /proc to the bed's namespaces. Held open: the numbers of those that have gone are soon given to
    /// another bed's.
    namespaces: Vec<(PathBuf, File)>,
}

impl Traces {
    /// Of the bed that has this directory, and whose processes have it among their mounts.
    pub fn of(dir: &Path) -> Traces {
        let dir = dir.to_str().unwrap().to_owned();
        // The processes that stand between are in the machine's process-id namespace.
        let own = KINDS.map(|kind| fs::read_link(Path::new("/proc/self").join(kind)).unwrap());
        let mut namespaces: Vec<(PathBuf, File)> = Vec::new();
        for process in processes().filter(|process| mentions(process, "mountinfo", &dir)) {
            for link in ["ns/pid", "ns/net", "ns/uts"].map(|kind| process.join(kind)) {
                if let (Ok(name), Ok(file)) = (fs::read_link(&link), File::open(&link))
                    && !namespaces.iter().any(|(known, _)| *known == name)
                    && !own.contains(&name)
                {
                    namespaces.push((name, file));
                }
            }
        }
        Traces { dir, namespaces }
    }

    /// The processes that are in one of the bed's namespaces, or that have its directory among their mounts or in
    /// their arguments.
    pub fn left(&self) -> Vec<PathBuf> {
        let is_inside = |process: &Path| {
            let mut links = KINDS.iter().filter_map(|kind| fs::read_link(process.join(kind)).ok());
            links.any(|link| self.namespaces.iter().any(|(name, _)| *name == link))
        };
        let is_left = |process: &PathBuf| {
            is_inside(process)
                || mentions(process, "mountinfo", &self.dir)
                || mentions(process, "cmdline", &self.dir)
        };
        processes().filter(is_left).collect()
    }
}

fn processes() -> impl Iterator<Item = PathBuf> {
    fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.join("ns").exists())
}

fn mentions(process: &Path, file: &str, text: &str) -> bool {
    String::from_utf8_lossy(&fs::read(process.join(file)).unwrap_or_default()).contains(text)
}

/// The interfaces of the machine's own network.
pub fn interfaces() -> String {
    let output = Command::new("ip").args(["-oneline", "-brief", "link"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}
