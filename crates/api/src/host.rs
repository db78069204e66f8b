//! This machine, as a daemon on it needs to know it.

use std::fs;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use ondeck_core::NodeName;
use ondeck_core::names::NameError;

use crate::config::Listen;

/// What is wrong with the machine's name.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum HostError {
    /// It is none.
    #[error("this machine's host name can't be used: {0}")]
    Name(#[from] NameError),
    /// It has no address.
    #[error("the host name {name} has no address ({why}); set storage_address in the configuration")]
    Address { name: NodeName, why: String },
}

/// This machine's name, without its domain: as Slurm has it.
///
/// # Errors
/// If it can't be a name.
pub fn host_name() -> Result<NodeName, NameError> {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy().into_owned();
    name.split('.').next().unwrap_or(&name).parse()
}

/// The address that other nodes reach this one by.
///
/// # Errors
/// [`HostError::Address`].
pub fn own_address(name: &NodeName, listen: Option<Listen>) -> Result<IpAddr, HostError> {
    if let Some(Listen::Address(address)) = listen {
        return Ok(address);
    }
    let why = match (name.as_str(), 0).to_socket_addrs() {
        Ok(mut found) => match found.next() {
            Some(address) => return Ok(address.ip()),
            None => "the name service knows it without one".to_owned(),
        },
        Err(error) => error.to_string(),
    };
    match listen {
        // Nobody else will ask.
        None => Ok(IpAddr::from([127, 0, 0, 1])),
        Some(_) => Err(HostError::Address { name: name.clone(), why }),
    }
}

/// Milliseconds since the machine was started: a clock that nobody sets.
pub fn since_boot_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Makes a daemon's own directory, for root alone.
///
/// # Errors
/// The kernel's, or if it is not root's alone.
pub fn private_directory(path: &Path) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        // The socket lies there, too, and users must reach it.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let meta = fs::symlink_metadata(path)?;
    if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(std::io::Error::other("it is not a directory of root's"));
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
}

/// How long a daemon waits for the one before it. One that was killed while it waited for its disk is not gone at once, and
/// whoever starts the next one may not know that.
pub const PREDECESSOR: Duration = Duration::from_secs(10);

/// Makes the calling process the only one that uses a daemon's directory, as long as the file is open. `None` if another one
/// still does after [`PREDECESSOR`].
///
/// # Errors
/// Those of opening and locking the file.
pub fn claim_directory(path: &Path) -> std::io::Result<Option<fs::File>> {
    let lock = fs::OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock"))?;
    let began = Instant::now();
    loop {
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(lock)),
            Err(rustix::io::Errno::WOULDBLOCK) if began.elapsed() >= PREDECESSOR => return Ok(None),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error.into()),
        }
    }
}
