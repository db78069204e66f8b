//! The two sockets of an agent, and the routes of `/v1`.
//!
//! On the Unix socket the kernel names the caller. Over TCP a request is only looked at once its credential has been
//! checked; then the answer is sealed for its caller. Everything that touches the system runs on blocking threads.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use axum::serve::{IncomingStream, Listener};
use ondeck_api::Config;
use ondeck_api::envelope::{self, Answer};
use ondeck_api::munge::Munge;
use ondeck_api::wire::{MOST_BYTES, Refusal, RefusalCode, VERSION};
use ondeck_core::RamDiskId;
use ondeck_ramdisk::Secret;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::auth::{Administrators, Caller};
use crate::node::{Node, StartError, own_address};
use crate::watch;

/// Connections that are held at the same time on each of the two sockets; more wait. Whoever keeps them all busy keeps
/// others of the same socket out, but neither root on the other one nor the agent's own watch.
const CONNECTIONS: usize = 256;

/// Requests that are worked on at the same time; more wait. Each holds a thread, and most of them wait for a process.
const WORKERS: usize = 64;

/// How long the body of a request may take to come.
const PATIENCE: Duration = Duration::from_secs(10);

struct Agent {
    node: Node,
    munge: Munge,
    administrators: Administrators,
}

/// Why an agent ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It could not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A socket can't be listened on.
    #[error("can't listen on {on}: {source}")]
    Listen {
        /// The address or path.
        on: String,
        /// Why.
        source: std::io::Error,
    },
    /// Its runtime failed.
    #[error("{0}")]
    Runtime(#[from] std::io::Error),
}

/// Runs an agent until SIGTERM or SIGINT. RAM disks live on; the next agent finds them.
///
/// # Errors
/// [`ServeError`].
pub fn serve(config: &Config) -> Result<(), ServeError> {
    let _only = only_one(config)?;
    allow_many_files();
    let node = Node::start(config)?;
    let agent = Arc::new(Agent {
        munge: Munge::new(config.munge_socket.clone()),
        administrators: Administrators::new(&config.agent.administrators),
        node,
    });
    let stop = Arc::new(AtomicBool::new(false));
    {
        let (agent, stop) = (Arc::clone(&agent), Arc::clone(&stop));
        std::thread::spawn(move || watch::watch(&agent.node, &stop));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(WORKERS)
        .enable_all()
        .build()?;
    let result = runtime.block_on(listen(config, agent));
    stop.store(true, Ordering::Relaxed);
    // A step that is under way is not waited for: the next agent removes what is not complete.
    runtime.shutdown_background();
    // Nor is the watch: it may be looking at something that hangs.
    result
}

/// As many open files as the system allows: a full table would make the agent blind.
fn allow_many_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "can't raise the limit of open files");
    }
}

/// Keeps a second agent out of the same directory.
fn only_one(config: &Config) -> Result<std::fs::File, ServeError> {
    let path = config.agent.state.clone();
    let open = || -> std::io::Result<std::fs::File> {
        crate::ramdisk::private_directory(&path)?;
        std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock"))
    };
    let file = open().map_err(|source| StartError::State { path: path.clone(), source })?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StartError::Running { path }.into()),
        Err(error) => Err(StartError::State { path, source: error.into() }.into()),
    }
}

async fn listen(config: &Config, agent: Arc<Agent>) -> Result<(), ServeError> {
    let socket = config.agent.socket.clone();
    let on_socket = |source| ServeError::Listen { on: socket.display().to_string(), source };
    if let Some(parent) = socket.parent() {
        std::fs::create_dir_all(parent).map_err(on_socket)?;
    }
    // The lock says that no living agent has it.
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(on_socket(error)),
        _ => {}
    }
    let unix = UnixListener::bind(&socket).map_err(on_socket)?;
    // Users may ask for what is theirs; what they may see is decided for each request.
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).map_err(on_socket)?;

    let app = Router::new().fallback(handle).with_state(Arc::clone(&agent));
    let local = axum::serve(Limited::new(unix), app.clone().into_make_service_with_connect_info::<Peer>());
    let tcp = match config.agent.listen {
        None => None,
        Some(listen) => {
            let address = SocketAddr::new(own_address(agent.node.name(), Some(listen))?, config.port);
            let on_address = |source| ServeError::Listen { on: address.to_string(), source };
            Some((address, TcpListener::bind(address).await.map_err(on_address)?))
        }
    };
    let node = agent.node.name();
    match &tcp {
        Some((address, _)) => {
            tracing::info!(%node, %address, socket = %socket.display(), "agent is listening")
        }
        None => tracing::info!(%node, socket = %socket.display(), "agent is listening on its socket only"),
    }
    let remote = async move {
        match tcp {
            Some((_, listener)) => {
                axum::serve(Limited::new(listener), app.into_make_service_with_connect_info::<Peer>()).await
            }
            None => std::future::pending().await,
        }
    };
    let stopped = tokio::select! {
        ended = local => ended,
        ended = remote => ended,
        signal = stop_signal() => signal,
    };
    // So that the next caller is told at once that there is no agent.
    let _ = std::fs::remove_file(&socket);
    Ok(stopped?)
}

async fn stop_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    tracing::info!("agent ends; its RAM disks live on");
    Ok(())
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
enum Peer {
    /// A process of this machine, of this user; nothing if the kernel does not say.
    Local(Option<u32>),
    Remote(SocketAddr),
}

/// A listener that accepts no more than [`CONNECTIONS`] at a time.
struct Limited<L> {
    listener: L,
    free: Arc<Semaphore>,
}

impl<L> Limited<L> {
    fn new(listener: L) -> Self {
        Limited { listener, free: Arc::new(Semaphore::new(CONNECTIONS)) }
    }
}

/// A connection that counts.
struct Counted<S> {
    stream: S,
    _permit: Option<OwnedSemaphorePermit>,
}

impl<L: Listener> Listener for Limited<L> {
    type Io = Counted<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        let (stream, address) = self.listener.accept().await;
        (Counted { stream, _permit: permit }, address)
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

impl Connected<IncomingStream<'_, Limited<UnixListener>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Limited<UnixListener>>) -> Self {
        Peer::Local(stream.io().stream.peer_cred().ok().map(|peer| peer.uid()))
    }
}

impl Connected<IncomingStream<'_, Limited<TcpListener>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Limited<TcpListener>>) -> Self {
        Peer::Remote(*stream.remote_addr())
    }
}

/// A request whose caller is known.
struct Known {
    caller: Caller,
    secret: Option<Secret>,
    /// The hash that the body must have.
    body: Option<String>,
    /// For whom the answer is sealed, and to which request: over TCP.
    seal: Option<(u32, String)>,
}

fn refusal(code: RefusalCode, message: impl Into<String>) -> Refusal {
    Refusal { code, message: message.into() }
}

async fn handle(
    State(agent): State<Arc<Agent>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or_else(String::new, ToString::to_string);
    let defect = |error: tokio::task::JoinError| {
        answer(Err(refusal(RefusalCode::Failed, format!("the agent has a defect: {error}"))), None)
    };
    // Nothing is read for strangers but their headers.
    let (recognizing, headers) = (Arc::clone(&agent), parts.headers);
    let (method, asked) = (parts.method.clone(), path.clone());
    let known = tokio::task::spawn_blocking(move || recognize(&recognizing, peer, &method, &asked, &headers));
    let known = match known.await {
        Ok(Ok(known)) => known,
        Ok(Err(refusal)) => return answer(Err(refusal), None),
        Err(error) => return defect(error),
    };
    let body = match tokio::time::timeout(PATIENCE, to_bytes(body, MOST_BYTES)).await {
        Ok(Ok(body)) => body,
        _ => {
            let message = "the request is too long, was cut off, or did not come to an end";
            return answer(Err(refusal(RefusalCode::Malformed, message)), None);
        }
    };
    if known.body.as_ref().is_some_and(|hash| *hash != envelope::hash(&body)) {
        let message = "the request is not the one that its credential covers";
        return answer(Err(refusal(RefusalCode::Unauthenticated, message)), None);
    }
    let work = move || {
        let seal = known.seal.clone();
        let done = route(&agent, &parts.method, &path, &body, known);
        if let Err(refusal) = &done {
            tracing::info!(method = %parts.method, path, code = ?refusal.code, message = refusal.message, "refused");
        }
        answer(done, seal.map(|(uid, nonce)| (&agent.munge, uid, nonce)))
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(response) => response,
        Err(error) => defect(error),
    }
}

fn recognize(
    agent: &Agent,
    peer: Peer,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Result<Known, Refusal> {
    let malformed_secret = |_| refusal(RefusalCode::Malformed, "the secret is malformed");
    match peer {
        Peer::Local(None) => Err(refusal(RefusalCode::Unauthenticated, "the kernel does not say who calls")),
        Peer::Local(Some(uid)) => {
            let caller = if uid == 0 { Caller::Administrator } else { Caller::User(uid) };
            let secret = headers
                .get(envelope::SECRET_HEADER)
                .map(|text| text.to_str().unwrap_or_default().parse().map_err(malformed_secret))
                .transpose()?;
            Ok(Known { caller, secret, seal: None, body: None })
        }
        Peer::Remote(address) => {
            let stranger = |message: String| refusal(RefusalCode::Unauthenticated, message);
            let credential = headers
                .get(envelope::REQUEST_HEADER)
                .and_then(|value| value.to_str().ok())
                .ok_or_else(|| stranger(format!("the request has no {} header", envelope::REQUEST_HEADER)))?;
            let decoded = agent.munge.decode(credential).map_err(|error| stranger(error.to_string()))?;
            let request: envelope::Request = serde_json::from_slice(&decoded.payload)
                .map_err(|error| stranger(format!("the credential holds something else: {error}")))?;
            if request.to != *agent.node.name() {
                return Err(stranger(format!(
                    "the request was meant for {}, and this is {}",
                    request.to,
                    agent.node.name()
                )));
            }
            if request.method != method.as_str() || request.path != path {
                return Err(stranger("the request is not the one that its credential covers".into()));
            }
            let secret =
                request.secret.as_deref().map(|text| text.parse().map_err(malformed_secret)).transpose()?;
            let caller = agent.administrators.caller(decoded.uid, address);
            let seal = Some((decoded.uid, request.nonce));
            Ok(Known { caller, secret, seal, body: Some(request.body) })
        }
    }
}

fn route(
    agent: &Agent,
    method: &Method,
    path: &str,
    body: &[u8],
    known: Known,
) -> Result<serde_json::Value, Refusal> {
    let node = &agent.node;
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let [version, rest @ ..] = parts.as_slice() else { return Err(no_such_path(path)) };
    if *version != VERSION {
        let message = format!("this agent speaks {VERSION}, and the request is for `{version}`");
        return Err(refusal(RefusalCode::NotFound, message));
    }
    match (method.as_str(), rest) {
        ("GET", ["node"]) => json(&node.report()?),
        ("GET", ["ramdisks"]) => json(&node.reports(known.caller)),
        ("GET", ["ramdisks", id]) => json(&node.report_of(&parse_id(id)?, known.caller)?),
        ("POST", ["ramdisks", id, "steps"]) => {
            known.caller.must_be_administrator()?;
            let request = serde_json::from_slice(body)
                .map_err(|error| refusal(RefusalCode::Malformed, format!("the step: {error}")))?;
            json(&node.step(&parse_id(id)?, request, known.secret)?)
        }
        ("DELETE", ["ramdisks", id]) => {
            known.caller.must_be_administrator()?;
            json(&node.destroy(&parse_id(id)?)?)
        }
        ("GET", ["views"]) => {
            let path = query.strip_prefix("path=").and_then(decode_percent).ok_or_else(|| {
                refusal(RefusalCode::Malformed, "a view is asked for with ?path=/ABSOLUTE/PATH")
            })?;
            json(&node.view(&path, known.caller)?)
        }
        _ => Err(no_such_path(path)),
    }
}

fn no_such_path(path: &str) -> Refusal {
    refusal(RefusalCode::NotFound, format!("there is nothing at {path}"))
}

fn parse_id(text: &str) -> Result<RamDiskId, Refusal> {
    text.parse().map_err(|error: ondeck_core::allocation::NameError| {
        refusal(RefusalCode::Malformed, error.to_string())
    })
}

fn decode_percent(text: &str) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        if *first == b'%' {
            let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &tail[2..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    Some(PathBuf::from(std::ffi::OsString::from_vec(bytes)))
}

fn json(value: &impl Serialize) -> Result<serde_json::Value, Refusal> {
    serde_json::to_value(value).map_err(|error| refusal(RefusalCode::Failed, error.to_string()))
}

fn answer(done: Result<serde_json::Value, Refusal>, seal: Option<(&Munge, u32, String)>) -> Response {
    let (status, body) = match &done {
        Ok(value) => (200, value.to_string()),
        Err(refusal) => {
            (refusal.code.status(), serde_json::to_string(refusal).unwrap_or_else(|error| error.to_string()))
        }
    };
    let mut response = Response::builder()
        .status(StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR))
        .header("content-type", "application/json");
    if let Some((munge, uid, nonce)) = seal {
        let sealed = Answer { nonce, status, body: envelope::hash(body.as_bytes()) };
        let payload = serde_json::to_vec(&sealed).unwrap_or_default();
        match munge.encode(&payload, Some(uid), envelope::TIME_TO_LIVE) {
            Ok(credential) => response = response.header(envelope::ANSWER_HEADER, credential),
            // Without it the caller does not believe the answer, and says so.
            Err(error) => tracing::error!(%error, "can't seal an answer"),
        }
    }
    response.body(Body::from(body)).unwrap_or_default()
}
