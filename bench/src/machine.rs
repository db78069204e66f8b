//! What a run was made on, read from /proc and /sys.
//!
//! The page is meant to be published, so nothing that names the machine or its users is read.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ondeck_bench::size::{KIB, MIB, show};

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A field of /proc/meminfo in bytes; 0 when there is none.
pub fn memory(field: &str) -> u64 {
    kib_field("/proc/meminfo", field)
}

/// The most memory that this process has held, in bytes.
pub fn own_peak_memory() -> u64 {
    kib_field("/proc/self/status", "VmHWM")
}

/// A field of a process's status in bytes; 0 when there is none.
pub fn process_memory(pid: i32, field: &str) -> u64 {
    kib_field(&format!("/proc/{pid}/status"), field)
}

fn kib_field(file: &str, field: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .map_or(0, |kib| kib * KIB)
}

/// Type and options of the filesystem that holds `path`, as in `tmpfs (rw,huge=within_size)`.
pub fn filesystem(path: impl AsRef<Path>) -> String {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The longest mount point wins, and of equal ones the last, which was mounted over the others.
    table
        .lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let mount_point = before.split(' ').nth(4)?;
            let mut after = after.split(' ');
            let (kind, _source, options) = (after.next()?, after.next()?, after.next()?);
            path.as_ref().starts_with(mount_point).then(|| (mount_point.len(), format!("{kind} ({options})")))
        })
        .max_by_key(|(length, _)| *length)
        .map_or_else(|| "unknown".to_owned(), |(_, text)| text)
}

/// The largest cache of the first processor; where /sys does not tell, a size that few exceed.
pub fn largest_cache() -> u64 {
    let sizes = fs::read_dir("/sys/devices/system/cpu/cpu0/cache")
        .into_iter()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("size")).ok())
        .filter_map(|text| ondeck_bench::size::parse(&text).ok());
    sizes.max().unwrap_or(64 * MIB)
}

/// The facts of the page's table, as name and value.
pub fn facts(disk: &str, ram: &str) -> Vec<(&'static str, String)> {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown", |(_, model)| model);
    let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
    let system = rustix::system::uname();
    vec![
        ("date", first_line("date", &["-u", "+%Y-%m-%d"])),
        ("kernel", format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy())),
        ("processor", format!("{model}, {cores} cores")),
        ("largest cache", show(largest_cache())),
        ("memory", show(memory("MemTotal"))),
        ("disk", disk.to_owned()),
        ("RAM", ram.to_owned()),
        ("user", (if is_root() { "root" } else { "an ordinary user" }).to_owned()),
    ]
}

/// When and on what something was measured, in one line.
pub fn summary() -> String {
    let facts = facts("", "").into_iter();
    let wanted = facts.filter(|(name, _)| ["date", "kernel", "processor", "memory"].contains(name));
    wanted.map(|(_, value)| value).collect::<Vec<_>>().join("; ")
}

/// The first line a program prints, or what went wrong; for versions and the date.
pub fn first_line(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> String {
    match Command::new(program).args(arguments).output() {
        Ok(output) => {
            // fpsync tells its version only in its complaint about a wrong option.
            let text = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&text);
            let line = text.lines().find(|line| !line.trim().is_empty());
            let words: Vec<&str> = line.unwrap_or("tells no version").split_whitespace().collect();
            words.join(" ")
        }
        Err(error) => error.to_string(),
    }
}

/// Looks a program up like a shell, in the directories of PATH and then in `more`.
pub fn find_program(name: &str, more: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(more.iter().cloned())
        .map(|directory| directory.join(name))
        .find(|candidate| is_executable(candidate))
}

pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}
