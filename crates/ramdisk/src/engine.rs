//! What an engine is. To add one: implement [`Engine`] in a file of `engine/`, add it to [`engine`] and to
//! [`EngineKind`]. docs/engines.md walks through it.
//!
//! An engine says which processes a RAM disk needs, how to start them on the nodes, when they serve, and how a client
//! mounts it. It does not say how to take anything down: the agent kills what carries the RAM disk's mark, unmounts what
//! lies in its runtime directory, and removes the devices, in that order, whatever state things are in. So the way down
//! is the same for every engine and after every crash.
//!
//! On every client an engine mounts the whole filesystem where only root can reach it. The agent shows a directory of
//! it, [`DATA`], to the user. So what lies beside it stays hidden: an engine's own view into itself (Gluster's `.meta`
//! shows the passwords of a volume), and the agents' check files.

mod ceph;
mod gluster;
mod simulated;
mod tmpfs;

use std::path::Path;
use std::time::{Duration, Instant};

use ondeck_core::{Bytes, EngineKind, Layout, NodeName};
use serde::{Deserialize, Serialize};

use crate::{EngineError, RuntimeDir, Secret};

/// The directory of the filesystem that its owner sees.
pub const DATA: &str = "data";

/// The name of the device with the data in a runtime directory.
pub const DATA_DEVICE: &str = "device";

/// The name of the device with the metadata in a runtime directory, where that is another one.
pub const METADATA_DEVICE: &str = "metadata-device";

/// The directory in a runtime directory where a client mounts the whole filesystem.
pub const CLIENT: &str = "client";

/// Inodes that an engine takes for itself.
const OWN_INODES: u64 = 1000;

/// What an engine is given to work with on a node.
pub struct Build<'a> {
    /// The RAM disk.
    pub layout: &'a Layout,
    /// On servers the RAM disk's secret; on clients [`Secret::for_clients`].
    pub secret: &'a Secret,
    /// Its runtime directory on this node.
    pub runtime_dir: &'a RuntimeDir,
    /// The number of this node among the servers, if it is one.
    pub me: Option<usize>,
    /// When to give up.
    pub until: Instant,
}

impl Build<'_> {
    /// What clients know; a server can tell it from its own secret.
    pub fn client_secret(&self) -> Secret {
        if self.me.is_some() { self.secret.for_clients() } else { self.secret.clone() }
    }

    /// This server's entry, for steps that only servers take.
    ///
    /// # Errors
    /// [`EngineError::Refused`] on a node that is none.
    pub fn server(&self) -> Result<(usize, &ondeck_core::Server), EngineError> {
        let index = self.me.ok_or_else(|| EngineError::Refused("this node is not a server of it".into()))?;
        Ok((index, &self.layout.servers[index]))
    }
}

/// Which servers take part in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// All of them.
    Every,
    /// The first one.
    First,
}

/// A phase of starting the servers. A phase begins when the one before serves on all its nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// What is started, for messages and times: `bricks`.
    pub name: &'static str,
    /// The servers that take part.
    pub on: On,
}

/// What a client sees of the servers at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Servers whose data this client can't reach.
    pub lost: Vec<NodeName>,
    /// Servers that this client can't reach while a copy of their data is elsewhere.
    pub degraded: Vec<NodeName>,
    /// Two equal ones mean that no connection was lost in between.
    pub connections: String,
}

/// What builds a filesystem.
pub trait Engine: Send + Sync {
    /// Which one it is.
    fn kind(&self) -> EngineKind;

    /// The programs it needs on servers and clients, each with the Debian package that has it.
    fn programs(&self) -> &'static [(&'static str, &'static str)];

    /// Refuses what it can't build, in words for the user.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn accepts(&self, layout: &Layout) -> Result<(), EngineError>;

    /// The smallest share of a server with which it works.
    fn smallest_share(&self) -> Bytes;

    /// The size of the device that a server with this share is given.
    fn device_size(&self, share: Bytes) -> Bytes {
        share
    }

    /// The size of the metadata device, if the layout has one that holds files.
    fn metadata_size(&self, _layout: &Layout, _share: Bytes) -> Bytes {
        Bytes::ZERO
    }

    /// How many inodes of a device so many files take.
    fn inodes(&self, files: u64) -> u64 {
        files + OWN_INODES
    }

    /// Whether it holds its data in files on the devices, and not in its processes' memory.
    fn uses_device(&self, _layout: &Layout) -> bool {
        true
    }

    /// RAM that the processes of a server need beside the device. Where these numbers come from: docs/engines.md.
    fn process_memory(&self, layout: &Layout, server: usize, share: Bytes) -> Bytes;

    /// How many TCP ports a server needs.
    fn ports(&self, layout: &Layout, server: usize) -> usize;

    /// The phases of starting the servers.
    fn phases(&self) -> &'static [Phase];

    /// Starts what a phase starts on this server.
    ///
    /// # Errors
    /// Of the programs and the kernel.
    fn start(&self, phase: usize, build: &Build) -> Result<(), EngineError>;

    /// Whether what the phase started serves now.
    ///
    /// # Errors
    /// If it has ended.
    fn serves(&self, phase: usize, build: &Build) -> Result<bool, EngineError>;

    /// Mounts the whole filesystem at `at`, which exists and is empty. When it returns, the filesystem answers.
    ///
    /// # Errors
    /// Of the programs and the kernel.
    fn mount(&self, build: &Build, at: &Path) -> Result<(), EngineError>;

    /// How long a client may believe what it has seen, though another client has changed it since.
    fn out_of_date(&self) -> Duration {
        Duration::ZERO
    }

    /// What is to be done, once, to the new directory [`DATA`] by the first client.
    ///
    /// # Errors
    /// Of the programs and the kernel.
    fn init_root(&self, _build: &Build, _data: &Path) -> Result<(), EngineError> {
        Ok(())
    }

    /// What is wrong with this server, in words, although its processes run.
    fn server_fault(&self, _build: &Build) -> Option<String> {
        None
    }

    /// How many looks in a row must miss a server before it is called lost for good. A look that asks the kernel needs no
    /// more than two; one that asks the server over the network can miss it by a lost packet.
    fn looks_before_lost(&self) -> u32 {
        2
    }

    /// What this client sees of the servers. Must not hang: it is asked every half a second.
    ///
    /// # Errors
    /// If that can't be told. It says nothing of the servers then.
    fn view(&self, build: &Build) -> Result<View, EngineError>;
}

/// The engine of a kind.
pub fn engine(kind: EngineKind) -> &'static dyn Engine {
    match kind {
        EngineKind::Tmpfs => &tmpfs::Tmpfs,
        EngineKind::Gluster => &gluster::Gluster,
        EngineKind::Ceph => &ceph::Ceph,
        EngineKind::Simulated => &simulated::Simulated,
    }
}

/// The devices that a server is given, with their sizes.
pub fn device_sizes<'a>(engine: &dyn Engine, layout: &'a Layout, share: Bytes) -> Vec<(&'a str, Bytes)> {
    let mut sizes = Vec::new();
    if engine.uses_device(layout) {
        sizes.push((layout.device.as_str(), engine.device_size(share)));
    }
    if let Some(device) = &layout.metadata_device
        && engine.metadata_size(layout, share) > Bytes::ZERO
    {
        sizes.push((device.as_str(), engine.metadata_size(layout, share)));
    }
    sizes
}

/// Whether something listens at an address. Loopback and storage networks answer at once or not at all.
///
/// # Errors
/// If it can't be tried, for want of descriptors, memory or ports of this machine's.
pub(crate) fn listens(address: std::net::IpAddr, port: u16) -> Result<bool, EngineError> {
    use rustix::io::Errno;
    let patience = std::time::Duration::from_millis(250);
    let own = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL];
    match std::net::TcpStream::connect_timeout(&(address, port).into(), patience) {
        Ok(_) => Ok(true),
        Err(error) if Errno::from_io_error(&error).is_some_and(|error| own.contains(&error)) => {
            let at = format!("{address}:{port}");
            Err(EngineError::io("connect to", Path::new(&at), error))
        }
        Err(_) => Ok(false),
    }
}
