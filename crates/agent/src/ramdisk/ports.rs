//! Ports of servers that did not start yet or have ended, and what else is left of these.

use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;

use ondeck_core::NodeName;

use super::{RamDisk, lock};

impl RamDisk {
    /// Keeps its ports from others until its servers start.
    pub fn hold_ports(&self, address: std::net::IpAddr) {
        let mut held = lock(&self.held_ports);
        for port in self.record().ports {
            // One that somebody has taken in this moment is missed by the server.
            held.extend(hold_port(address, port).ok().map(|socket| (port, socket)));
        }
    }

    /// Keeps what is left of ended servers out of harm's way: nobody else may listen on their ports, where clients that
    /// have not given up would tell them the password; and logs do not grow for ever.
    pub fn tidy(&self, node: &NodeName) {
        const LONGEST_LOG: u64 = 1 << 20;
        let record = self.record();
        let processes = self.runtime_dir.processes();
        for process in &processes {
            let log = self.runtime_dir.log(&process.role);
            if fs::metadata(&log).is_ok_and(|meta| meta.len() > LONGEST_LOG) {
                // Processes append to it, so they go on at its new end.
                let _ = OpenOptions::new().write(true).open(&log).and_then(|file| file.set_len(0));
            }
        }
        let lost_one = processes.iter().any(|process| process.role != "client" && process.ended.is_some());
        if !lost_one || !record.server || self.is_ending() {
            return;
        }
        let Some(me) = record.layout.server_on(node) else { return };
        let address = record.layout.servers[me].address;
        let mut held = lock(&self.held_ports);
        for port in &record.ports {
            // It fails for those on which another server of the RAM disk still listens.
            if !held.contains_key(port)
                && let Ok(socket) = hold_port(address, *port)
            {
                held.insert(*port, socket);
            }
        }
    }
}

/// Takes a port without listening on it: whoever connects is refused, and nobody else can listen there.
fn hold_port(address: std::net::IpAddr, port: u16) -> std::io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Connections of the ended server linger on the port.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &std::net::SocketAddr::new(address, port))?;
    sockopt::set_socket_reuseaddr(&socket, false)?;
    Ok(socket)
}
