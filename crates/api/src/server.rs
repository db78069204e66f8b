//! The two sockets of a daemon: who calls is found out, the daemon's [`Service`] is asked, and its answer is sealed.
//!
//! On the Unix socket the kernel names the caller. Over TCP a request is only looked at once its credential has been
//! checked; then the answer is sealed for its caller. Speaking to munged blocks, so it happens on blocking threads; a
//! service is asynchronous, so that a request that waits costs a connection and no thread.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use ondeck_core::NodeName;
use ondeck_core::text::plain;
use ondeck_ramdisk::Secret;
use ondeck_ramdisk::tcp::own_addresses;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use crate::auth::{Administrators, Caller};
use crate::envelope::{self, Answer};
use crate::munge::Munge;
use crate::wire::{Authority, MOST_BYTES, Refusal, RefusalCode, VERSION};

/// How long the body of a request may take to come, and how long nothing of an answer may be taken.
const PATIENCE: Duration = Duration::from_secs(10);

/// Enough of a request, and of what was wrong with it, for the log.
const LOGGED: usize = 200;

/// In each such time the log has so many of the refused requests of a user, and how many more there were.
const REFUSALS_PER: Duration = Duration::from_secs(60);
const MOST_REFUSALS: u32 = 20;

/// How long the headers of a request may take to come, from the beginning of a connection or the end of the last answer.
const SILENCE: Duration = Duration::from_secs(5);

/// The most that is read ahead of one connection. A credential with its request has a few kilobytes.
const MOST_BUFFERED: usize = 64 << 10;

/// The most bytes of a request that comes from no administrator: with all connections in use, 64 MiB of an agent.
const MOST_OF_OTHERS: usize = 256 << 10;

/// How long this machine's addresses are believed. Only root changes them.
const BELIEVED: Duration = Duration::from_secs(10);

/// What a daemon answers.
pub trait Service: Send + Sync + 'static {
    /// The node whose requests these are: a credential that was made for another one is refused.
    fn name(&self) -> &NodeName;

    /// Answers a request whose caller is known. It must not block; if the caller hangs up, it is dropped where it waits.
    fn route(self: Arc<Self>, request: Request) -> impl Future<Output = Result<Reply, Refusal>> + Send;
}

/// A request whose caller is known.
#[derive(Debug)]
pub struct Request {
    /// `GET`, `POST` and so on.
    pub method: Method,
    /// The path without its query.
    pub path: String,
    /// What follows the path's `?`.
    pub query: String,
    /// The body: all of it, and what the credential covers.
    pub body: Bytes,
    /// Who calls.
    pub caller: Caller,
    /// The secret of a RAM disk, where it came along.
    pub secret: Option<Secret>,
    /// The scheduler in whose name it is made; nothing for a person's.
    pub authority: Option<Authority>,
}

impl Request {
    /// The parts of the path after the version.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] for another version than [`VERSION`].
    pub fn segments(&self) -> Result<Vec<&str>, Refusal> {
        let mut parts = self.path.trim_matches('/').split('/');
        match parts.next() {
            Some(VERSION) => Ok(parts.collect()),
            other => {
                let other = other.unwrap_or_default();
                let message = format!("this daemon speaks {VERSION}, and the request is for `{other}`");
                Err(Refusal::new(RefusalCode::NotFound, message))
            }
        }
    }

    /// The body, understood; `what` names it in a message.
    ///
    /// # Errors
    /// [`RefusalCode::Malformed`].
    pub fn json<T: DeserializeOwned>(&self, what: &str) -> Result<T, Refusal> {
        serde_json::from_slice(&self.body)
            .map_err(|error| Refusal::new(RefusalCode::Malformed, format!("{what}: {error}")))
    }

    /// The bytes of the query's field of this name, its `%XX` undone; nothing if there is none, or it is malformed.
    pub fn field(&self, name: &str) -> Option<Vec<u8>> {
        let value = self.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
        decode_percent(value)
    }

    /// That there is nothing here.
    pub fn no_such_path(&self) -> Refusal {
        Refusal::new(RefusalCode::NotFound, format!("there is nothing at {}", self.path))
    }
}

fn decode_percent(text: &str) -> Option<Vec<u8>> {
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
    Some(bytes)
}

/// What a request brought.
#[derive(Clone, Debug)]
pub enum Reply {
    /// For programs.
    Json(serde_json::Value),
    /// Plain text.
    Text(String),
    /// A page.
    Html(String),
}

impl Reply {
    /// A value as JSON.
    ///
    /// # Errors
    /// [`RefusalCode::Failed`] if it has no JSON.
    pub fn json(value: &impl Serialize) -> Result<Reply, Refusal> {
        let value = serde_json::to_value(value)
            .map_err(|error| Refusal::new(RefusalCode::Failed, error.to_string()))?;
        Ok(Reply::Json(value))
    }

    fn content(self) -> (&'static str, String) {
        match self {
            Reply::Json(value) => ("application/json", value.to_string()),
            Reply::Text(text) => ("text/plain; charset=utf-8", text),
            Reply::Html(page) => ("text/html; charset=utf-8", page),
        }
    }
}

/// Why a socket can't be listened on.
#[derive(Debug, thiserror::Error)]
#[error("can't listen on {on}: {source}")]
pub struct ListenError {
    /// The address or path.
    pub on: String,
    /// Why.
    pub source: std::io::Error,
}

/// Where a daemon listens, and whom it believes.
pub struct Listening {
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
pub struct Server<S> {
    unix: UnixListener,
    tcp: Option<TcpListener>,
    socket: PathBuf,
    connections: usize,
    daemon: Arc<Daemon<S>>,
}

struct Daemon<S> {
    service: Arc<S>,
    /// Where it listens over TCP.
    port: Option<u16>,
    munge: Munge,
    administrators: Administrators,
    refusals: Refusals,
}

impl<S: Service> Server<S> {
    /// Takes the sockets.
    ///
    /// # Errors
    /// [`ListenError`].
    pub async fn bind(service: Arc<S>, listening: Listening) -> Result<Server<S>, ListenError> {
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
                Some(TcpListener::bind(address).await.map_err(on_address)?)
            }
        };
        let daemon = Daemon {
            service,
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

/// Of whom there may be so many connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Origin {
    /// By the Unix socket.
    User(Option<u32>),
    /// Over TCP, by whichever of its addresses: a user can call from all of 127.0.0.0/8.
    ThisMachine,
    Host(Ipv4Addr),
    /// The first half of an IPv6 address: a host has as many of the rest as it wants.
    Network([u16; 4]),
}

impl Origin {
    fn of(address: IpAddr, is_own: impl FnOnce(IpAddr) -> bool) -> Origin {
        let address = address.to_canonical();
        if address.is_loopback() || is_own(address) {
            return Origin::ThisMachine;
        }
        match address {
            IpAddr::V4(address) => Origin::Host(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Origin::Network([a, b, c, d])
            }
        }
    }
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

/// The ways in by one socket. Root has one of its own, so that ordinary users can't keep it out; of the other one, nobody
/// has more than a quarter.
struct Doors {
    root: Door,
    others: Door,
    /// How many connections of the others there are from where.
    origins: Arc<Mutex<HashMap<Origin, usize>>>,
    own: Mutex<OwnAddresses>,
    /// The most of one origin.
    each: usize,
}

struct Door {
    /// Connections that may be there, served or waiting for that; more are closed.
    held: Arc<Semaphore>,
    /// Connections that may be served.
    served: Arc<Semaphore>,
}

impl Door {
    fn new(connections: usize) -> Door {
        Door {
            held: Arc::new(Semaphore::new(connections * 2)),
            served: Arc::new(Semaphore::new(connections)),
        }
    }
}

impl Doors {
    fn new(connections: usize) -> Doors {
        Doors {
            root: Door::new(connections),
            others: Door::new(connections),
            origins: Arc::default(),
            own: Mutex::default(),
            each: (connections / 4).max(1),
        }
    }

    /// Serves a connection when its turn comes. One too many is closed at once: accepting never waits.
    fn let_in<S: Service, I>(&self, daemon: &Arc<Daemon<S>>, peer: Peer, stream: I)
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let door = if peer.is_root() { &self.root } else { &self.others };
        let Ok(held) = Arc::clone(&door.held).try_acquire_owned() else { return };
        let mut counted = None;
        if !peer.is_root() {
            let Some(one) = self.count(self.origin(peer)) else { return };
            counted = Some(one);
        }
        let (served, daemon) = (Arc::clone(&door.served), Arc::clone(daemon));
        tokio::spawn(async move {
            let _held = (held, counted);
            // The semaphore is never closed.
            let _served = served.acquire_owned().await;
            converse(daemon, peer, stream).await;
        });
    }

    fn origin(&self, peer: Peer) -> Origin {
        match peer {
            Peer::Local(uid) => Origin::User(uid),
            Peer::Remote(from) => Origin::of(from.ip(), |address| lock(&self.own).contains(address)),
        }
    }

    fn count(&self, origin: Origin) -> Option<Counted> {
        let mut origins = lock(&self.origins);
        let number = origins.entry(origin).or_default();
        if *number >= self.each {
            return None;
        }
        *number += 1;
        Some(Counted { origin, origins: Arc::clone(&self.origins) })
    }
}

/// The addresses of this machine's interfaces.
#[derive(Default)]
struct OwnAddresses {
    known: Vec<IpAddr>,
    until: Option<Instant>,
}

impl OwnAddresses {
    fn contains(&mut self, address: IpAddr) -> bool {
        let now = Instant::now();
        if self.until.is_none_or(|until| now >= until) {
            self.until = Some(now + BELIEVED);
            match own_addresses() {
                Ok(known) => self.known = known,
                // Those of before are still the best guess.
                Err(error) => tracing::error!(%error, "can't read the addresses of this machine"),
            }
        }
        self.known.contains(&address)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What it protects is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A connection that counts for where it comes from.
struct Counted {
    origin: Origin,
    origins: Arc<Mutex<HashMap<Origin, usize>>>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut origins = lock(&self.origins);
        if let Some(number) = origins.get_mut(&self.origin) {
            *number -= 1;
            if *number == 0 {
                origins.remove(&self.origin);
            }
        }
    }
}

/// Answers what comes by a connection, until it is closed or says nothing for a while.
async fn converse<S: Service, I>(daemon: Arc<Daemon<S>>, peer: Peer, stream: I)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let daemon = Arc::clone(&daemon);
        async move { Ok::<_, Infallible>(handle(daemon, peer, request.map(Body::new)).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // Also for the next request by the same connection.
        .header_read_timeout(SILENCE)
        .max_buf_size(MOST_BUFFERED)
        .serve_connection(TokioIo::new(Impatient { stream, full: None }), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, ?peer, "a connection broke");
    }
}

/// A connection that is given up if the other end does not take what it is told.
struct Impatient<I> {
    stream: I,
    /// Until when there must be room, since there is none.
    full: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl<I> Impatient<I> {
    fn bounded<T>(
        &mut self,
        context: &mut Context<'_>,
        done: Poll<std::io::Result<T>>,
    ) -> Poll<std::io::Result<T>> {
        if done.is_ready() {
            self.full = None;
            return done;
        }
        let full = self.full.get_or_insert_with(|| Box::pin(tokio::time::sleep(PATIENCE)));
        full.as_mut().poll(context).map(|()| Err(std::io::ErrorKind::TimedOut.into()))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Impatient<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Impatient<I> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.bounded(context, done)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_flush(context);
        this.bounded(context, done)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_shutdown(context);
        this.bounded(context, done)
    }
}

/// What is known before the body is read.
struct Known {
    caller: Caller,
    secret: Option<Secret>,
    authority: Option<Authority>,
    /// The hash that the body must have.
    body: Option<String>,
    /// For whom the answer is sealed, and to which request: over TCP.
    seal: Option<(u32, String)>,
}

async fn handle<S: Service>(daemon: Arc<Daemon<S>>, peer: Peer, request: hyper::Request<Body>) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or_else(String::new, ToString::to_string);
    // Nothing is read for strangers but their headers.
    let (recognizing, headers) = (Arc::clone(&daemon), parts.headers);
    let (method, asked) = (parts.method.clone(), path.clone());
    let recognize = move || recognizing.recognize(peer, &method, &asked, &headers);
    let recognized = match peer {
        // The kernel has said who it is. So others, who keep munged busy, don't keep root waiting.
        Peer::Local(_) => recognize(),
        Peer::Remote(_) => blocking(recognize).await.and_then(|known| known),
    };
    let known = match recognized {
        Ok(known) => known,
        Err(refusal) => return Answering::new(Err(refusal)).respond(None),
    };
    let most = if known.caller.is_administrator() { MOST_BYTES } else { MOST_OF_OTHERS };
    let body = match tokio::time::timeout(PATIENCE, to_bytes(body, most)).await {
        Ok(Ok(body)) => body,
        _ => {
            let message = "the request is too long, was cut off, or did not come to an end";
            return Answering::new(Err(Refusal::new(RefusalCode::Malformed, message))).respond(None);
        }
    };
    if known.body.as_ref().is_some_and(|hash| *hash != envelope::hash(&body)) {
        let message = "the request is not the one that its credential covers";
        return Answering::new(Err(Refusal::new(RefusalCode::Unauthenticated, message))).respond(None);
    }
    let (path, query) = path.split_once('?').unwrap_or((&path, ""));
    let request = Request {
        method: parts.method.clone(),
        path: path.to_owned(),
        query: query.to_owned(),
        body,
        caller: known.caller,
        secret: known.secret,
        authority: known.authority,
    };
    let uid = known.caller.uid;
    let done = Arc::clone(&daemon.service).route(request).await;
    if let Err(refusal) = &done {
        // Both are the caller's words, or repeat them.
        let (path, message) = (plain(path, LOGGED), plain(&refusal.message, LOGGED));
        let method = plain(parts.method.as_str(), LOGGED);
        if daemon.refusals.is_to_be_told(uid) {
            tracing::info!(method, path, code = ?refusal.code, uid, message, "refused");
        }
    }
    let answering = Answering::new(done);
    let Some((uid, nonce)) = known.seal else { return answering.respond(None) };
    let sealed = answering.sealed(daemon.service.name().clone(), nonce);
    let munge = daemon.munge.clone();
    match blocking(move || munge.encode(&sealed, Some(uid), envelope::TIME_TO_LIVE)).await {
        Ok(Ok(credential)) => answering.respond(Some(credential)),
        // Without it the caller does not believe the answer, and says so.
        Ok(Err(error)) => {
            tracing::error!(%error, "can't seal an answer");
            answering.respond(None)
        }
        Err(refusal) => Answering::new(Err(refusal)).respond(None),
    }
}

/// Who was refused of late, and how often: nobody shall fill the disk that the log is on.
#[derive(Clone, Default)]
struct Refusals {
    users: Arc<Mutex<HashMap<u32, Refused>>>,
}

#[derive(Default)]
struct Refused {
    told: u32,
    more: u64,
}

impl Refusals {
    /// Whether the log is to have another refused request of a user. Root's are all told.
    fn is_to_be_told(&self, uid: u32) -> bool {
        if uid == 0 {
            return true;
        }
        let mut users = lock(&self.users);
        let refused = users.entry(uid).or_insert_with(|| {
            let this = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(REFUSALS_PER).await;
                this.begin_anew(uid);
            });
            Refused::default()
        });
        let is_told = refused.told < MOST_REFUSALS;
        if is_told {
            refused.told += 1
        } else {
            refused.more += 1
        }
        is_told
    }

    fn begin_anew(&self, uid: u32) {
        if let Some(Refused { more: more @ 1.., .. }) = lock(&self.users).remove(&uid) {
            tracing::info!(uid, more, "more requests of a user were refused");
        }
    }
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

impl<S: Service> Daemon<S> {
    fn recognize(
        &self,
        peer: Peer,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Known, Refusal> {
        let malformed_secret = |_| Refusal::new(RefusalCode::Malformed, "the secret is malformed");
        match peer {
            Peer::Local(None) => {
                Err(Refusal::new(RefusalCode::Unauthenticated, "the kernel does not say who calls"))
            }
            Peer::Local(Some(uid)) => {
                let secret = headers
                    .get(envelope::SECRET_HEADER)
                    .map(|text| text.to_str().unwrap_or_default().parse().map_err(malformed_secret))
                    .transpose()?;
                let malformed =
                    |_| Refusal::new(RefusalCode::Malformed, "the scheduler's authority is malformed");
                let authority = headers
                    .get(envelope::AUTHORITY_HEADER)
                    .map(|text| serde_json::from_slice(text.as_bytes()).map_err(malformed))
                    .transpose()?;
                Ok(Known { caller: Caller::local(uid), secret, authority, seal: None, body: None })
            }
            Peer::Remote(address) => {
                let stranger = |message: String| Refusal::new(RefusalCode::Unauthenticated, message);
                let credential =
                    headers.get(envelope::REQUEST_HEADER).and_then(|value| value.to_str().ok()).ok_or_else(
                        || stranger(format!("the request has no {} header", envelope::REQUEST_HEADER)),
                    )?;
                let decoded = self.munge.decode(credential).map_err(|error| stranger(error.to_string()))?;
                let request: envelope::Request = serde_json::from_slice(&decoded.payload)
                    .map_err(|error| stranger(format!("the credential holds something else: {error}")))?;
                let own_name = self.service.name();
                if request.to != *own_name {
                    return Err(stranger(format!(
                        "the request was meant for {}, and this is {own_name}",
                        request.to
                    )));
                }
                if let (Some(meant), Some(own)) = (request.port, self.port)
                    && meant != own
                {
                    return Err(stranger(format!(
                        "the request was meant for port {meant}, and this is port {own} of {own_name}"
                    )));
                }
                if request.method != method.as_str() || request.path != path {
                    return Err(stranger("the request is not the one that its credential covers".into()));
                }
                let secret = request
                    .secret
                    .as_deref()
                    .map(|text| text.parse().map_err(malformed_secret))
                    .transpose()?;
                let caller = self.administrators.caller(decoded.uid, address);
                let seal = Some((decoded.uid, request.nonce));
                let authority = request.authority;
                Ok(Known { caller, secret, authority, seal, body: Some(request.body) })
            }
        }
    }
}

/// An answer on its way.
struct Answering {
    status: u16,
    kind: &'static str,
    body: String,
}

impl Answering {
    fn new(done: Result<Reply, Refusal>) -> Answering {
        match done {
            Ok(reply) => {
                let (kind, body) = reply.content();
                Answering { status: 200, kind, body }
            }
            Err(refusal) => Answering {
                status: refusal.code.status(),
                kind: "application/json",
                body: serde_json::to_string(&refusal).unwrap_or_else(|error| error.to_string()),
            },
        }
    }

    /// What a credential for it covers.
    fn sealed(&self, from: NodeName, nonce: String) -> Vec<u8> {
        let sealed = Answer {
            from: Some(from),
            nonce,
            status: self.status,
            body: envelope::hash(self.body.as_bytes()),
        };
        serde_json::to_vec(&sealed).unwrap_or_default()
    }

    fn respond(self, credential: Option<String>) -> Response {
        let mut response = Response::builder()
            .status(StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR))
            .header("content-type", self.kind);
        if let Some(credential) = credential {
            response = response.header(envelope::ANSWER_HEADER, credential);
        }
        response.body(Body::from(self.body)).unwrap_or_default()
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn request(path: &str, query: &str) -> Request {
        Request {
            method: Method::GET,
            path: path.into(),
            query: query.into(),
            body: Bytes::from_static(b"[1"),
            caller: Caller::local(0),
            secret: None,
            authority: None,
        }
    }

    #[test]
    fn the_parts_of_a_request_are_told_apart() {
        let asked = request("/v1/ramdisks/a@1/", "wait=20&path=%2Fa%20b");
        assert_eq!(asked.segments().unwrap(), ["ramdisks", "a@1"]);
        assert_eq!(asked.field("path").as_deref(), Some(&b"/a b"[..]));
        assert_eq!(asked.field("wait").as_deref(), Some(&b"20"[..]));
        assert_eq!((asked.field("pat"), request("/", "a=%4").field("a")), (None, None));
        assert_eq!(request("/v9/node", "").segments().unwrap_err().code, RefusalCode::NotFound);
        assert!(asked.json::<Vec<u8>>("the list").unwrap_err().message.starts_with("the list: "));
    }

    /// Waits for one second, if it is let.
    struct Slow(NodeName);

    impl Service for Slow {
        fn name(&self) -> &NodeName {
            &self.0
        }

        async fn route(self: Arc<Self>, request: Request) -> Result<Reply, Refusal> {
            match request.segments()?.as_slice() {
                ["slow"] => tokio::time::sleep(Duration::from_secs(1)).await,
                ["page"] => return Ok(Reply::Html("<p>".into())),
                _ => return Err(request.no_such_path()),
            }
            Reply::json(&request.caller.uid)
        }
    }

    #[test]
    fn requests_that_wait_hold_no_thread() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listening = Listening {
            socket: socket.clone(),
            tcp: None,
            connections: 200,
            munge: Munge::new("/nowhere"),
            administrators: Administrators::new(&[]),
        };
        let began = Instant::now();
        runtime.block_on(async {
            let server = Server::bind(Arc::new(Slow("n1".parse().unwrap())), listening).await.unwrap();
            tokio::spawn(server.serve(std::future::pending()));
            let client = crate::Client::new(std::path::Path::new("/nowhere"));
            let endpoint = crate::Endpoint::Socket(socket);
            let call = async |path: &str| {
                client.call::<u32>(&endpoint, "GET", path, None::<&()>, None, Duration::from_secs(20)).await
            };
            let mut waiting = tokio::task::JoinSet::new();
            for _ in 0..50 {
                let (client, endpoint) = (client.clone(), endpoint.clone());
                waiting.spawn(async move {
                    let limit = Duration::from_secs(20);
                    client.call::<u32>(&endpoint, "GET", "/v1/slow", None::<&()>, None, limit).await
                });
            }
            let uid = rustix::process::geteuid().as_raw();
            while let Some(answer) = waiting.join_next().await {
                assert_eq!(answer.unwrap().unwrap(), uid);
            }
            assert_eq!(call("/v1/other").await.unwrap_err().code(), Some(RefusalCode::NotFound));
            assert!(matches!(call("/v1/page").await, Err(crate::CallError::Gibberish { .. })));
        });
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }

    /// What was logged.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn however_often_a_user_is_refused_the_log_stays_short() {
        const USER: u32 = 20_001;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let daemon = Arc::new(Daemon {
            service: Arc::new(Slow("n1".parse().unwrap())),
            port: None,
            munge: Munge::new("/nowhere"),
            administrators: Administrators::new(&[]),
            refusals: Refusals::default(),
        });
        let log = Log::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let path = format!("/v1/{}", "x".repeat(5000));
        let ask = async |uid: u32, path: &str| {
            let request = hyper::Request::builder().uri(path).body(Body::empty()).unwrap();
            assert_eq!(handle(Arc::clone(&daemon), Peer::Local(Some(uid)), request).await.status(), 404);
        };
        let said = || String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        runtime.block_on(async {
            for _ in 0..1000 {
                ask(USER, &path).await;
            }
            assert_eq!(said().lines().count(), MOST_REFUSALS as usize);
            assert!(said().len() < 1000 * MOST_REFUSALS as usize, "{}", said());
            ask(USER + 1, "/v1/of-another").await;
            assert!(said().contains("of-another"));
            for _ in 0..100 {
                ask(0, "/v1/of-root").await;
            }
            assert_eq!(said().matches("refused").count(), MOST_REFUSALS as usize + 101);
            daemon.refusals.begin_anew(USER);
            let more = format!("more={}", 1000 - MOST_REFUSALS);
            assert!(said().lines().last().unwrap().contains(&more), "{}", said());
            ask(USER, "/v1/again").await;
            assert!(said().contains("/v1/again"));
        });
    }

    #[test]
    fn a_machine_is_one_origin_whatever_address_it_uses() {
        let of = |address: &str| {
            let own: [IpAddr; 2] = ["10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap()];
            Origin::of(address.parse().unwrap(), |address| own.contains(&address))
        };
        for own in
            ["127.0.0.1", "127.9.8.7", "::1", "::ffff:127.0.0.2", "10.0.0.5", "::ffff:10.0.0.5", "fd00::5"]
        {
            assert_eq!(of(own), Origin::ThisMachine, "{own}");
        }
        assert_eq!(of("10.0.0.6"), of("::ffff:10.0.0.6"));
        assert_ne!(of("10.0.0.6"), of("10.0.0.7"));
        assert_eq!(of("fd00::6"), of("fd00::dead:beef"));
        assert_ne!(of("fd00::6"), of("fd00:0:0:1::6"));
    }

    #[test]
    fn connections_from_many_addresses_of_this_machine_are_of_one_origin() {
        const EACH: usize = 8;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let listening = Listening {
            socket: dir.path().join("socket"),
            tcp: Some("127.0.0.1:0".parse().unwrap()),
            connections: EACH * 4,
            munge: Munge::new("/nowhere"),
            administrators: Administrators::new(&[]),
        };
        let open = runtime.block_on(async {
            let server = Server::bind(Arc::new(Slow("n1".parse().unwrap())), listening).await.unwrap();
            let daemon = server.tcp.as_ref().unwrap().local_addr().unwrap();
            tokio::spawn(server.serve(std::future::pending()));
            let mut all = Vec::new();
            for last in 2..=4 {
                for _ in 0..EACH {
                    let socket = tokio::net::TcpSocket::new_v4().unwrap();
                    socket.bind(([127, 0, 0, last], 0).into()).unwrap();
                    all.push(socket.connect(daemon).await.unwrap());
                }
            }
            // Those that are let in are answered, and the others are closed.
            let mut open = 0;
            for stream in &mut all {
                use tokio::io::{AsyncReadExt, AsyncWriteExt};
                let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
                open += usize::from(matches!(stream.read(&mut [0]).await, Ok(1)));
            }
            open
        });
        assert_eq!(open, EACH);
    }

    #[test]
    fn what_is_too_long_or_comes_to_no_end_is_refused_or_cut_off() {
        use std::io::{Read, Write};
        const USER: u32 = 20_001;
        if !rustix::process::geteuid().is_root() {
            eprintln!("not run: it needs root");
            return;
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let socket = dir.path().join("socket");
        let listening = Listening {
            socket: socket.clone(),
            tcp: None,
            connections: 32,
            munge: Munge::new("/nowhere"),
            administrators: Administrators::new(&[]),
        };
        runtime.block_on(async {
            let server = Server::bind(Arc::new(Slow("n1".parse().unwrap())), listening).await.unwrap();
            tokio::spawn(server.serve(std::future::pending()));
        });
        let said = |uid: u32, head: &str, length: usize, sent: usize| {
            let mut stream = idle(&socket, uid, 1).pop().unwrap();
            let head = format!("POST /v1/page HTTP/1.1\r\nhost: x\r\n{head}content-length: {length}\r\n\r\n");
            // What is not read any more can't be written.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b' '; sent]));
            let mut answer = vec![0; 4096];
            stream.set_read_timeout(Some(PATIENCE * 2)).unwrap();
            let length = stream.read(&mut answer).unwrap_or(0);
            String::from_utf8_lossy(&answer[..length]).into_owned()
        };
        let (limit, more) = (MOST_OF_OTHERS, MOST_OF_OTHERS + 1);
        assert!(said(USER, "", limit, limit).contains(" 200 "));
        assert!(said(0, "", more, more).contains(" 200 "));
        for (uid, length, sent) in [(USER, more, more), (0, MOST_BYTES + 1, MOST_BYTES + 1), (USER, limit, 1)]
        {
            let answer = said(uid, "", length, sent);
            assert!(answer.contains(" 400 ") && answer.contains("too long"), "{uid}: {answer}");
        }
        let header = format!("x: {}\r\n", "x".repeat(MOST_BUFFERED * 2));
        let answer = said(USER, &header, 0, 0);
        assert!(!answer.contains(" 200 "), "{answer}");
    }

    /// Connections of this user that say nothing.
    fn idle(socket: &std::path::Path, uid: u32, number: usize) -> Vec<std::os::unix::net::UnixStream> {
        let socket = socket.to_owned();
        let connect = move || {
            // The kernel's call changes this thread alone.
            let uid = rustix::process::Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            (0..number).map(|_| std::os::unix::net::UnixStream::connect(&socket).unwrap()).collect()
        };
        std::thread::spawn(connect).join().unwrap()
    }

    #[test]
    fn idle_connections_of_users_keep_neither_root_nor_other_users_out() {
        const USERS: [u32; 2] = [20_001, 20_002];
        if !rustix::process::geteuid().is_root() {
            eprintln!("not run: it needs root");
            return;
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let socket = dir.path().join("socket");
        let listening = Listening {
            socket: socket.clone(),
            tcp: None,
            connections: 32,
            munge: Munge::new("/nowhere"),
            administrators: Administrators::new(&[]),
        };
        runtime.block_on(async {
            let server = Server::bind(Arc::new(Slow("n1".parse().unwrap())), listening).await.unwrap();
            tokio::spawn(server.serve(std::future::pending()));
        });
        let mut held = idle(&socket, USERS[0], 300);
        let ask = |uid: u32| {
            let (limit, began) = (Duration::from_secs(3), Instant::now());
            let mut stream = idle(&socket, uid, 1).pop().unwrap();
            stream.set_read_timeout(Some(limit)).unwrap();
            let mut answer = String::new();
            use std::io::{Read, Write};
            stream.write_all(b"GET /v1/page HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.ends_with("<p>"), "{answer}");
            assert!(began.elapsed() < limit, "{:?}", began.elapsed());
        };
        ask(0);
        ask(USERS[1]);
        held.extend(idle(&socket, USERS[1], 300));
        ask(0);
        // Whoever says nothing is not listened to for ever.
        held[0].set_read_timeout(Some(SILENCE * 2)).unwrap();
        assert_eq!(std::io::Read::read(&mut held[0], &mut [0]).unwrap(), 0);
        ask(USERS[0]);
        drop(held);
    }
}
