//! What a host looks like from outside: read from the machine's `/proc`, so that no process in the host is needed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::process::{Pid, PidfdFlags, Signal};

/// A process in a host, as it was when it was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id for the test process.
    pub pid: Pid,
    /// Its id for the processes in the hosts.
    pub pid_inside: Pid,
    /// The program and its arguments. Empty while it ends, and for the moment in which it becomes another program.
    pub command_line: Vec<String>,
}

impl Process {
    /// The environment that it was started with; empty if it has ended.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let path = of(self.pid, "environ");
        strings(&fs::read(path).unwrap_or_default())
            .into_iter()
            .filter_map(|line| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())))
            .collect()
    }

    /// The file or directory `name` of this process in the machine's `/proc`, as `fd` or `status`.
    pub fn proc(&self, name: &str) -> PathBuf {
        of(self.pid, name)
    }
}

/// A line of mountinfo, proc_pid_mountinfo(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The mount's id.
    pub id: u64,
    /// The id of the mount that it is mounted in.
    pub parent: u64,
    /// The directory of the filesystem that is shown, `/` for all of it.
    pub root: PathBuf,
    /// Where it is mounted.
    pub target: PathBuf,
    /// Options of the mount.
    pub options: String,
    /// The filesystem's type.
    pub kind: String,
    /// The device, or what was given as such.
    pub source: String,
    /// Options of the filesystem.
    pub filesystem_options: String,
}

/// A kind of namespace, as its link in `/proc/<pid>/ns` is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Namespace {
    Network,
    ProcessId,
    /// The one that children are put in.
    ProcessIdOfChildren,
}

impl Namespace {
    fn link(self) -> &'static str {
        match self {
            Namespace::Network => "ns/net",
            Namespace::ProcessId => "ns/pid",
            Namespace::ProcessIdOfChildren => "ns/pid_for_children",
        }
    }

    /// What identifies the namespace of a process.
    pub(crate) fn of(self, pid: Pid) -> io::Result<PathBuf> {
        fs::read_link(of(pid, self.link()))
    }
}

fn of(pid: Pid, name: &str) -> PathBuf {
    Path::new("/proc").join(pid.as_raw_nonzero().to_string()).join(name)
}

/// The processes whose namespace of this kind is `identity`. Zombies are in none.
pub(crate) fn processes_in(kind: Namespace, identity: &Path) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().and_then(Pid::from_raw))
        .filter(|&pid| kind.of(pid).is_ok_and(|found| found == identity))
        .filter_map(look_at)
        .collect()
}

/// `None` if it has ended, or if it is not in a process-id namespace of a bed: an `enter` that stands between the
/// test and its program.
fn look_at(pid: Pid) -> Option<Process> {
    let status = fs::read_to_string(of(pid, "status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    let ids: Vec<i32> = ids.split_whitespace().filter_map(|id| id.parse().ok()).collect();
    // The first is the id in /proc's own namespace, the second that in the bed's. A program may have made others.
    let pid_inside = Pid::from_raw(*ids.get(1)?)?;
    let command_line = strings(&fs::read(of(pid, "cmdline")).ok()?);
    Some(Process { pid, pid_inside, command_line })
}

/// Sends a signal to the process if it still is the one that was looked at.
pub(crate) fn signal(process: &Process, kind: Namespace, identity: &Path, signal: Signal) {
    // The descriptor is opened first: then the id can't pass to another process between the look and the signal.
    if let Ok(descriptor) = rustix::process::pidfd_open(process.pid, PidfdFlags::empty())
        && kind.of(process.pid).is_ok_and(|found| found == identity)
    {
        // It may have ended, which is as good.
        let _ = rustix::process::pidfd_send_signal(&descriptor, signal);
    }
}

fn strings(bytes: &[u8]) -> Vec<String> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    bytes.split(|&byte| byte == 0).map(|part| String::from_utf8_lossy(part).into_owned()).collect()
}

pub(crate) fn mounts_of(pid: Pid) -> io::Result<Vec<Mount>> {
    let table = fs::read(of(pid, "mountinfo"))?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse_mount).collect())
}

fn parse_mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let text = |field: Option<&[u8]>| field.map(|field| unescape(field).to_string_lossy().into_owned());
    let id = text(fields.next())?.parse().ok()?;
    let parent = text(fields.next())?.parse().ok()?;
    let _device = fields.next()?;
    let root = PathBuf::from(unescape(fields.next()?));
    let target = PathBuf::from(unescape(fields.next()?));
    let options = text(fields.next())?;
    // Optional fields, then a lone hyphen.
    fields.find(|field| *field == b"-")?;
    let kind = text(fields.next())?;
    let source = text(fields.next())?;
    let filesystem_options = text(fields.next())?;
    Some(Mount { id, parent, root, target, options, kind, source, filesystem_options })
}

/// Blanks, newlines and backslashes are written as octal numbers.
fn unescape(field: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let escaped = after
            .get(..3)
            .filter(|_| byte == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match escaped {
            Some(value) => {
                plain.push(value);
                rest = &after[3..];
            }
            None => {
                plain.push(byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(plain)
}

pub(crate) fn listening_in_network_of(pid: Pid) -> io::Result<Vec<SocketAddr>> {
    let mut sockets = Vec::new();
    for table in ["net/tcp", "net/tcp6"] {
        let table = match fs::read_to_string(of(pid, table)) {
            Ok(table) => table,
            // A machine without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        sockets.extend(table.lines().skip(1).filter_map(parse_listening));
    }
    sockets.sort();
    Ok(sockets)
}

/// A line of /proc/net/tcp if the socket is in the state 0A, TCP_LISTEN.
fn parse_listening(line: &str) -> Option<SocketAddr> {
    let mut fields = line.split_whitespace().skip(1);
    let (address, port) = fields.next()?.split_once(':')?;
    let _remote = fields.next()?;
    (fields.next()? == "0A").then_some(())?;
    Some(SocketAddr::new(parse_address(address)?, u16::from_str_radix(port, 16).ok()?))
}

/// Words of 32 bits in hexadecimal, each in the machine's byte order.
fn parse_address(text: &str) -> Option<IpAddr> {
    let mut bytes = Vec::with_capacity(16);
    for word in text.as_bytes().chunks(8) {
        bytes.extend(u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?.to_ne_bytes());
    }
    match bytes.len() {
        4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        16 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_with_blanks_and_optional_fields_is_parsed() {
        let line = br"36 35 98:0 /mnt1 /mnt\0402\134 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue";
        let mount = parse_mount(line).unwrap();
        assert_eq!(mount.id, 36);
        assert_eq!(mount.parent, 35);
        assert_eq!(mount.root, Path::new("/mnt1"));
        assert_eq!(mount.target, Path::new(r"/mnt 2\"));
        assert_eq!(mount.kind, "ext3");
        assert_eq!(mount.source, "/dev/root");
        assert_eq!(mount.filesystem_options, "rw,errors=continue");
        assert_eq!(parse_mount(b""), None);
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn only_listening_sockets_are_taken() {
        let listening =
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1";
        assert_eq!(parse_listening(listening), Some("127.0.0.1:8080".parse().unwrap()));
        assert_eq!(parse_listening(&listening.replace(" 0A ", " 01 ")), None);
        let six = "   0: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A";
        assert_eq!(parse_listening(six), Some("[::1]:22".parse().unwrap()));
    }
}
