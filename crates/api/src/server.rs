//! The two sockets of a daemon: who calls is found out, the daemon's router is asked, and its answer is sealed.
//!
//! On the Unix socket the kernel names the caller. Over TCP a request is only looked at once its credential has been
//! checked; then the answer is sealed for its caller. Speaking to munged blocks, so it happens on blocking threads; the
//! handlers of a router are asynchronous, so that a request that waits costs a connection and no thread.
//!
//! A handler is given a request once it is known who calls, all of the body has come, and the body is the one that the
//! credential covers. What it returns for the wire is [`Json`], a text, a page or a [`Refusal`].
//!
//! # Layout
//!
//! - `doors`: who may have how many connections; `connection`: one of them
//! - `answer`: from the headers of a request to its sealed answer
//! - `extract`: what handlers take from a request, and answer
//! - `refusals`: what the log has of refused requests

mod answer;
mod connection;
mod doors;
mod extract;
mod refusals;
#[cfg(test)]
mod tests;

pub use extract::{Administrator, Brought, Content, Json, Path, PathInQuery, Query, RootHere, from_text};

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::Router;
use hyper_util::service::TowerToHyperService;
use ondeck_core::NodeName;
use tokio::net::{TcpListener, UnixListener};

use crate::auth::Administrators;
use crate::host::PREDECESSOR;
use crate::munge::Munge;
use crate::wire::{Refusal, RefusalCode};
use doors::Doors;
use refusals::Refusals;

/// How long the body of a request may take to come, and how long nothing of an answer may be taken.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a socket can't be listened on.
#[derive(Debug, thiserror::Error)]
#[error("can't listen on {on}: {source}")]
pub struct ListenError {
    /// The address or path.
    pub on: String,
    /// What the kernel says.
    pub source: std::io::Error,
}

/// Where a daemon listens, and whom it believes.
pub struct Listening {
    /// The node whose requests are answered: a credential that was made for another one is refused.
    pub name: NodeName,
    /// The Unix socket. All users of the machine can reach it; no living daemon may have it.
    pub socket: PathBuf,
    /// The TCP address; without one it can be reached from its own machine alone.
    pub tcp: Option<SocketAddr>,
    /// Connections that are served at the same time on each of the two sockets: so many of root's, by the uid or by a
    /// port below 1024, and so many of others. As many again wait; more are closed. Of the others, those of one user, of
    /// one host, or of one IPv6 network (/64) are at most a quarter; this machine is one host, whatever address is used.
    pub connections: usize,
    /// Checks and makes credentials.
    pub munge: Munge,
    /// Who is one over TCP.
    pub administrators: Administrators,
}

/// A daemon that listens.
pub struct Server {
    unix: UnixListener,
    tcp: Option<TcpListener>,
    socket: PathBuf,
    connections: usize,
    daemon: Arc<Daemon>,
}

struct Daemon {
    name: NodeName,
    router: TowerToHyperService<Router>,
    /// Where it listens over TCP.
    port: Option<u16>,
    munge: Munge,
    administrators: Administrators,
    refusals: Refusals,
}

impl Server {
    /// Takes the sockets. The router has its routes below `/v1`, and what no route is for is refused. Its handlers must not
    /// block; if the caller hangs up, they are dropped where they wait.
    ///
    /// # Errors
    /// [`ListenError`].
    pub async fn bind(router: Router, listening: Listening) -> Result<Server, ListenError> {
        allow_many_files();
        let socket = listening.socket;
        let on_socket = |source| ListenError { on: socket.display().to_string(), source };
        if let Some(parent) = socket.parent() {
            std::fs::create_dir_all(parent).map_err(on_socket)?;
        }
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(on_socket(error)),
            _ => {}
        }
        let unix = UnixListener::bind(&socket).map_err(on_socket)?;
        // Users may ask for what is theirs; what they may see is decided for each request.
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).map_err(on_socket)?;
        let tcp = match listening.tcp {
            None => None,
            Some(address) => {
                let on_address = |source| ListenError { on: address.to_string(), source };
                Some(listen(address).await.map_err(on_address)?)
            }
        };
        let daemon = Daemon {
            name: listening.name,
            router: TowerToHyperService::new(router),
            port: tcp.as_ref().and_then(|tcp| tcp.local_addr().ok()).map(|address| address.port()),
            munge: listening.munge,
            administrators: listening.administrators,
            refusals: Refusals::default(),
        };
        Ok(Server { unix, tcp, socket, connections: listening.connections, daemon: Arc::new(daemon) })
    }

    /// Answers until `stop` comes. What is under way then is not waited for.
    ///
    /// # Errors
    /// If a socket can't be listened on any more.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> std::io::Result<()> {
        let (unix, daemon, doors) = (self.unix, Arc::clone(&self.daemon), Doors::new(self.connections));
        let local = async move {
            loop {
                match unix.accept().await {
                    Ok((stream, _)) => {
                        let uid = stream.peer_cred().ok().map(|peer| peer.uid());
                        doors.let_in(&daemon, Peer::Local(uid), stream);
                    }
                    Err(error) => rest_after(&error).await,
                }
            }
        };
        let (tcp, daemon, doors) = (self.tcp, self.daemon, Doors::new(self.connections));
        let remote = async move {
            let Some(tcp) = tcp else { return std::future::pending().await };
            loop {
                match tcp.accept().await {
                    Ok((stream, address)) => doors.let_in(&daemon, Peer::Remote(address), stream),
                    Err(error) => rest_after(&error).await,
                }
            }
        };
        tokio::select! {
            () = local => {}
            () = remote => {}
            () = stop => {}
        }
        // So that the next caller is told at once that there is no daemon.
        let _ = std::fs::remove_file(&self.socket);
        Ok(())
    }
}

/// As many open files as the system allows: a full table would make a daemon deaf and blind.
pub fn allow_many_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "can't raise the limit of open files");
    }
}

/// Takes an address, which a predecessor that was killed may hold for a moment.
async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let began = Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && began.elapsed() < PREDECESSOR => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            other => return other,
        }
    }
}

/// A connection that was closed before it was accepted is no reason to wait; a full table of files is.
async fn rest_after(error: &std::io::Error) {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if !matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        tracing::error!(%error, "can't accept a connection");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
enum Peer {
    /// A process of this machine, of this user; nothing if the kernel does not say.
    Local(Option<u32>),
    Remote(SocketAddr),
}

impl Peer {
    /// Whether only root can have made the connection.
    fn is_root(self) -> bool {
        match self {
            Peer::Local(uid) => uid == Some(0),
            Peer::Remote(address) => address.port() < 1024,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What it protects is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Does work that blocks, where that may be done. The runtime bounds how many do so at a time; more wait.
///
/// # Errors
/// [`RefusalCode::Failed`] if it panicked.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Refusal::new(RefusalCode::Failed, format!("the daemon has a defect: {error}")))
}

/// Waits for SIGTERM or SIGINT.
///
/// # Errors
/// If signals can't be waited for.
pub async fn stop_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}
