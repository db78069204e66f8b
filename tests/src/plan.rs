//! What the test process and init tell each other: one line of JSON each way, over init's stdin and stdout.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Where Slurm's programs look for their configuration on Debian.
pub(crate) const SLURM_DIRECTORY: &str = "/etc/slurm";
/// The name of init's own host, which only has the bridge; munged runs there.
pub const SWITCH: &str = "switch";
/// The bridge's own address.
pub const SWITCH_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 254);
/// The bits of an address that name the network.
pub const PREFIX: u8 = 24;
/// The address of the first host.
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// The last number of the second host's address; the others count on from there.
const SECOND: usize = 11;
/// More hosts don't fit between the second host's address and the bridge's.
pub const MAX_HOSTS: usize = 254 - SECOND + 1;

/// What init is to build.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The hosts, in the order of their addresses.
    pub hosts: Vec<HostPlan>,
    /// What all hosts see in place of the machine's own.
    pub replaced: Vec<Replaced>,
    /// The name of the bed's control group.
    pub control_group: String,
}

/// A file or a directory in the place of one of the machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct Replaced {
    /// Where the hosts find it.
    pub path: PathBuf,
    /// What they find.
    pub by: PathBuf,
}

/// What one holder is to build.
#[derive(Debug, Serialize, Deserialize)]
pub struct HostPlan {
    /// The hostname, unique in the bed.
    pub name: String,
    /// The address of `eth0`.
    pub address: Ipv4Addr,
    /// Directories that become an empty tmpfs of this host.
    pub private_directories: Vec<PathBuf>,
}

/// Init's answer when all hosts are there.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ready {
    /// The holders' process ids in the bed's process-id namespace, in the order of the plan's hosts.
    pub holders: Vec<i32>,
}

/// The directory that the hosts of the bed in `dir` find at [`SLURM_DIRECTORY`].
pub(crate) fn slurm_directory_in(dir: &Path) -> PathBuf {
    dir.join("etc/slurm")
}

/// The address of the host at `index`: 10.77.0.1, then 10.77.0.11, 10.77.0.12 and so on.
///
/// # Panics
///
/// If `index` is [`MAX_HOSTS`] or more.
pub fn address_of(index: usize) -> Ipv4Addr {
    assert!(index < MAX_HOSTS, "a bed has at most {MAX_HOSTS} hosts");
    match index {
        0 => FIRST,
        _ => Ipv4Addr::new(10, 77, 0, (SECOND + index - 1) as u8),
    }
}

/// The bridge's port to the host at `index`. Not named after the host: names of interfaces end after 15 bytes.
pub fn port_of(index: usize) -> String {
    format!("port{index}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_distinct_and_never_the_bridge() {
        let addresses: std::collections::BTreeSet<Ipv4Addr> = (0..MAX_HOSTS).map(address_of).collect();
        assert_eq!(addresses.len(), MAX_HOSTS);
        assert!(!addresses.contains(&SWITCH_ADDRESS));
        assert_eq!(address_of(1), Ipv4Addr::new(10, 77, 0, 11));
    }
}
