//! Looking for what a bed left behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ondeck_testbed::Host;

/// Processes that are in one of the namespaces, in whose mounts the text occurs, or that have it as an argument.
pub fn leftovers(namespaces: &[String], text: &str) -> Vec<PathBuf> {
    let is_left = |process: &Path| {
        let of_ours = ["ns/pid", "ns/pid_for_children", "ns/net", "ns/mnt", "ns/uts"].iter().any(|link| {
            fs::read_link(process.join(link))
                .is_ok_and(|found| namespaces.contains(&found.to_string_lossy().into_owned()))
        });
        let mentions = ["mountinfo", "cmdline"].iter().any(|file| {
            String::from_utf8_lossy(&fs::read(process.join(file)).unwrap_or_default()).contains(text)
        });
        of_ours || mentions
    };
    let entries = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.join("ns").exists() && is_left(path)).collect()
}

/// The interfaces of the machine's own network.
pub fn interfaces() -> String {
    let output = Command::new("ip").args(["-oneline", "-brief", "link"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The namespaces of a host, as links in /proc show them.
pub fn namespaces(host: &Host) -> Vec<String> {
    let links = host.ok(&["sh", "-c", "for kind in pid net mnt uts; do readlink /proc/self/ns/$kind; done"]);
    links.lines().map(str::to_owned).collect()
}
