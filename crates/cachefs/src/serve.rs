//! A client of the owner: the FUSE server of a mount.
//!
//! The kernel's requests are turned into [`Request`](crate::message::Request)s, and the answers, which may come on any thread and much later, into
//! the kernel's replies: a worker hands a request over and takes the next one, so that those that are delayed occupy none.
//!
//! # What the kernel is told
//!
//! The cache is the only user of its backing directory, and this mount the only client of the cache. So the kernel keeps
//! names and attributes for [`KEPT`], the absence of names included, and asks again only for what it knows itself to have
//! changed. What changes without its knowledge, it is told: of a file that programs map for writing, times; of one with
//! set-uid or set-gid bits that somebody writes to, those.
//!
//! Data is not kept by the kernel, but lies in the store alone: every file is opened with `FOPEN_DIRECT_IO`, or by
//! passthrough, where the kernel reads from the store itself, and writes to it if the owner says so. Which of the two is the owner's choice, since all open handles
//! of a file must agree: [`Opened::passthrough`](crate::message::Opened::passthrough). Maps of the former go through the kernel's page cache, which writes through
//! to here.
//!
//! `security.capability` is asked for by the kernel whenever a file is truncated or executed. It gets the owner's answer: to
//! refuse it for good with `ENOSYS` would spare that, but hide the capabilities that programs of the backing directory have.
//!
//! # Layout
//!
//! - `connection`: making the mount, and showing it somewhere
//! - `filesystem`: from requests to replies; `replies`: those that several have
//! - `set_id`: files whose set-uid bits the kernel has to be told of
//! - `passthrough`: files that the kernel reads by itself
//! - `directories`: directories that are being read
//! - `processor`: where requests are served
//! - `give_back`: names that the kernel keeps and the owner wants to forget
//! - `convert`: the kernel's words for ours

mod connection;
mod convert;
mod directories;
mod filesystem;
mod give_back;
mod passthrough;
mod processor;
mod replies;
mod set_id;
mod shared;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use fuser::{BackingId, Config, Session, SessionACL};

use crate::message::{Client, Service};
use crate::settings::Writes;
pub use connection::{MountOptions, SUBTYPE};
use filesystem::Filesystem;
use give_back::GivesBack;
pub use shared::Kernel;
use shared::Shared;

/// How long the kernel keeps names and attributes, unless it is told otherwise.
pub const KEPT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The most that one request reads or writes.
const LARGEST: u32 = 1 << 20;

/// A mount that is connected to this process, and shown nowhere yet.
pub struct Server {
    session: Session<Filesystem>,
    shared: Arc<Shared>,
    mount: OwnedFd,
}

impl Server {
    /// Makes a mount and agrees with the kernel on what each can do. Nobody sees it before [`Server::attach`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect(options: &MountOptions, threads: usize, writes: Writes) -> io::Result<Server> {
        let (device, mount) = connection::make(options)?;
        let shared = Arc::new(Shared::new(writes));
        let mut config = Config::default();
        config.n_threads = Some(threads);
        // Each thread reads requests from a queue of its own.
        config.clone_fd = true;
        // The kernel lets nobody in who may not: user_id and allow_other.
        let session =
            Session::from_fd(Filesystem::new(Arc::clone(&shared)), device, SessionACL::All, config)?;
        Ok(Server { session, shared, mount })
    }

    /// Whether the kernel can read the files of a filesystem by itself, tried with one of its files: otherwise
    /// [`Settings::passthrough`](crate::settings::Settings::passthrough) must be off.
    ///
    /// # Errors
    /// What the kernel says: `EOPNOTSUPP` before Linux 6.9, `EPERM` without `CAP_SYS_ADMIN`, `ELOOP` if the filesystem is
    /// stacked on others.
    pub fn try_passthrough(&self, file: &File) -> io::Result<()> {
        if !self.shared.kernel().passthrough {
            return Err(rustix::io::Errno::OPNOTSUPP.into());
        }
        let id = BackingId::create_raw(&self.session, file)?;
        passthrough::close_backing(self.session.as_fd(), id)
    }

    /// What the kernel can do, as far as it makes a difference here.
    pub fn kernel(&self) -> Kernel {
        self.shared.kernel()
    }

    /// Shows the mount at an open directory. Returns its number in the table of mounts.
    ///
    /// # Errors
    /// The kernel's.
    pub fn attach(&self, at: BorrowedFd<'_>) -> io::Result<u64> {
        connection::attach(self.mount.as_fd(), at)
    }

    /// Serves until the mount is gone everywhere.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn serve(self, service: Arc<dyn Service>) -> io::Result<JoinHandle<io::Result<()>>> {
        let Server { session, shared, mount } = self;
        shared.gives_back(GivesBack::begin(session.as_fd(), session.notifier())?);
        let client: Weak<dyn Client> = Arc::downgrade(&shared) as Weak<dyn Client>;
        service.attach(client);
        shared.begin(service, session.notifier());
        shared.processors.follow()?;
        // A descriptor of the mount would keep it busy.
        drop(mount);
        std::thread::Builder::new().name("serve".to_owned()).spawn(move || session.run())
    }
}

/// What caches can do on this machine.
#[derive(Debug)]
pub struct Abilities {
    /// What the kernel can do.
    pub kernel: Kernel,
    /// Whether it reads files of a store by itself, tried with one; see [`Server::try_passthrough`].
    pub passthrough: io::Result<()>,
}

/// Finds out what caches can do on this machine, by a mount that nobody sees and that is gone on return. Needs root.
///
/// # Errors
/// The kernel's: there can be no caches here.
pub fn probe() -> io::Result<Abilities> {
    let options = MountOptions {
        source: "ondeck-probe".to_owned(),
        uid: 0,
        gid: 0,
        others: false,
        like: rustix::fs::StatVfsMountFlags::empty(),
    };
    let server = Server::connect(&options, 1, Writes::Server)?;
    // As the files of a store, it is in RAM.
    let file = rustix::fs::memfd_create("ondeck-probe", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(Abilities { kernel: server.kernel(), passthrough: server.try_passthrough(&File::from(file)) })
}

/// The descriptor as a number, for a mount option.
fn number(fd: &OwnedFd) -> String {
    fd.as_raw_fd().to_string()
}
