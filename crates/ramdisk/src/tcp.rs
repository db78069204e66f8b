//! What the kernel knows of the network: the TCP connections of a process, and the machine's own addresses.
//!
//! A connection's socket has an inode number of its own. As long as it is the same, the connection was never lost.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::processes::has_ended;

/// The established connections of a process: remote address to the socket's inode number. One that has ended has none.
///
/// # Errors
/// The kernel's: then it is not known which they are.
pub fn established(pid: i32) -> io::Result<BTreeMap<SocketAddr, u64>> {
    match established_of_sockets(pid) {
        // Before Linux 5.6, or where a security module lets nobody have another's descriptors.
        Err(error) if [Some(libc::EPERM), Some(libc::ENOSYS)].contains(&error.raw_os_error()) => {
            established_by_tables(pid)
        }
        told => told,
    }
}

/// The same by asking each of the process's sockets.
///
/// The tables of /proc tell it, too, but the kernel walks through all of its hash table for them, however few connections there
/// are: `time cat /proc/net/tcp` takes 7 ms on a machine of 24 GB, and more on larger ones.
fn established_of_sockets(pid: i32) -> io::Result<BTreeMap<SocketAddr, u64>> {
    let mut found = BTreeMap::new();
    let ended = |error: &Errno| has_ended(&io::Error::from(*error));
    let process = match Pid::from_raw(pid).map(|number| pidfd_open(number, PidfdFlags::empty())) {
        None => return Err(Errno::INVAL.into()),
        Some(Err(error)) if ended(&error) => return Ok(found),
        Some(process) => process?,
    };
    for (descriptor, _) in sockets(pid)? {
        let socket = match pidfd_getfd(&process, descriptor, PidfdGetfdFlags::empty()) {
            // It was closed meanwhile, or the process has ended.
            Err(error) if error == Errno::BADF || ended(&error) => continue,
            socket => socket?,
        };
        // The descriptor may be another file's by now.
        if is_established(&socket)
            && let Ok(Some(remote)) = rustix::net::getpeername(&socket)
            && let Ok(remote) = SocketAddr::try_from(remote)
        {
            let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
            found.insert(remote, rustix::fs::fstat(&socket)?.st_ino);
        }
    }
    Ok(found)
}

/// Whether it is a TCP connection that neither side has begun to close.
fn is_established(socket: &OwnedFd) -> bool {
    const ESTABLISHED: u8 = 1;
    // `tcpi_state`, the first of what TCP_INFO tells; as much is told as there is room for.
    let mut state = 0_u8;
    let mut length = 1;
    // SAFETY: the kernel writes no more than the one byte that it is told of, and its length.
    let told = unsafe {
        let state = (&raw mut state).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, state, &raw mut length)
    };
    told == 0 && length == 1 && state == ESTABLISHED
}

/// The same from the tables of the process's network namespace.
fn established_by_tables(pid: i32) -> io::Result<BTreeMap<SocketAddr, u64>> {
    let own: BTreeSet<u64> = sockets(pid)?.into_values().collect();
    let mut found = BTreeMap::new();
    for table in ["tcp", "tcp6"] {
        let text = match fs::read_to_string(format!("/proc/{pid}/net/{table}")) {
            Ok(text) => text,
            // Or the kernel has no IPv6.
            Err(error) if has_no_network(&error) => continue,
            Err(error) => return Err(error),
        };
        // The table is that of the whole network namespace: others may have connections to the same servers.
        found.extend(text.lines().skip(1).filter_map(parse).filter(|(_, inode)| own.contains(inode)));
    }
    Ok(found)
}

/// Whether the error is how /proc says that a process has no network namespace any more: it has ended.
fn has_no_network(error: &io::Error) -> bool {
    let ended = [Errno::NXIO, Errno::INVAL];
    has_ended(error) || Errno::from_io_error(error).is_some_and(|error| ended.contains(&error))
}

/// The sockets that a process has open: descriptor to inode number.
fn sockets(pid: i32) -> io::Result<BTreeMap<i32, u64>> {
    let mut found = BTreeMap::new();
    let entries = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Err(error) if has_ended(&error) => return Ok(found),
        entries => entries?,
    };
    for entry in entries {
        let (path, target) = match entry.and_then(|entry| Ok((entry.path(), fs::read_link(entry.path())?))) {
            // It was closed meanwhile, or the process has ended.
            Err(error) if has_ended(&error) => continue,
            read => read?,
        };
        let descriptor = path.file_name().and_then(|name| name.to_str()?.parse::<i32>().ok());
        let inode = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']'));
        found.extend(descriptor.zip(inode.and_then(|inode| inode.parse::<u64>().ok())));
    }
    Ok(found)
}

/// The addresses of the interfaces in this network namespace.
///
/// # Errors
/// The kernel's.
pub fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: it writes one pointer, which lives until it returns.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut found, mut next) = (Vec::new(), list);
    // SAFETY: getifaddrs made a list that ends in a null pointer, and nobody else has it. An address is as long as its
    // family says, and `read_unaligned` asks for no more than that.
    unsafe {
        while let Some(entry) = next.as_ref() {
            if let Some(address) = entry.ifa_addr.as_ref() {
                match i32::from(address.sa_family) {
                    libc::AF_INET => {
                        let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                        found.push(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into());
                    }
                    libc::AF_INET6 => {
                        let address = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                        found.push(Ipv6Addr::from(address.sin6_addr.s6_addr).into());
                    }
                    _ => {}
                }
            }
            next = entry.ifa_next;
        }
        libc::freeifaddrs(list);
    }
    Ok(found)
}

fn parse(line: &str) -> Option<(SocketAddr, u64)> {
    const ESTABLISHED: &str = "01";
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (remote, state, inode) = (fields.get(2)?, *fields.get(3)?, fields.get(9)?);
    if state != ESTABLISHED {
        return None;
    }
    let (address, port) = remote.split_once(':')?;
    Some(((parse_address(address)?, u16::from_str_radix(port, 16).ok()?).into(), inode.parse().ok()?))
}

/// The kernel prints an address as 32-bit words in the machine's byte order.
fn parse_address(hex: &str) -> Option<IpAddr> {
    let word = |index: usize| -> Option<[u8; 4]> {
        Some(u32::from_str_radix(hex.get(8 * index..8 * index + 8)?, 16).ok()?.to_ne_bytes())
    };
    match hex.len() {
        8 => Some(IpAddr::from(Ipv4Addr::from(word(0)?))),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let bytes: Vec<u8> = words.concat();
            let address = Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?);
            // A socket of both families shows an IPv4 peer this way.
            Some(address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::process::Command;

    use super::*;

    #[test]
    fn a_connection_is_listed_as_long_as_it_lasts_and_a_new_one_is_another() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let remote = listener.local_addr().unwrap();
            let own = std::process::id() as i32;
            let both = |pid| {
                let of_sockets = established_of_sockets(pid).unwrap();
                // The other tests have connections, too.
                let by_tables = established_by_tables(pid).unwrap();
                assert_eq!(of_sockets.get(&remote), by_tables.get(&remote));
                of_sockets
            };
            assert!(!established(own).unwrap().contains_key(&remote));
            let first = TcpStream::connect(remote).unwrap();
            let seen = both(own)[&remote];
            assert_eq!(established(own).unwrap()[&remote], seen);
            // Of another process, which has it as its standard input.
            let mut other = Command::new("sleep").arg("60").stdin(OwnedFd::from(first)).spawn().unwrap();
            let of_other = both(other.id() as i32);
            other.kill().unwrap();
            other.wait().unwrap();
            assert_eq!(of_other, [(remote, seen)].into());
            assert!(!both(own).contains_key(&remote));
            let (accepted, _) = listener.accept().unwrap();
            drop(accepted);
            let _second = TcpStream::connect(remote).unwrap();
            assert_ne!(established(own).unwrap()[&remote], seen);
        }
    }

    #[test]
    fn the_addresses_of_this_machine_are_known() {
        let own = own_addresses().unwrap();
        // An address can be bound to if it is this machine's.
        assert!(own.contains(&Ipv4Addr::LOCALHOST.into()), "{own:?}");
        for address in own.iter().filter(|address| address.is_ipv4()) {
            TcpListener::bind((*address, 0)).unwrap();
        }
        let table = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
        assert_eq!(own.iter().filter(|address| address.is_ipv6()).count(), table.lines().count(), "{own:?}");
    }

    #[test]
    fn connections_that_can_not_be_seen_are_no_lost_ones() {
        let seen = std::thread::spawn(|| {
            let nobody = rustix::process::Uid::from_raw(65534);
            if rustix::process::geteuid().is_root() {
                // Of this thread alone.
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            (established(1), established(i32::MAX))
        });
        let (first, of_none) = seen.join().unwrap();
        assert_eq!(first.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(of_none.unwrap().is_empty());
    }
}
