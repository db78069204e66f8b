//! Calling a daemon: an agent, or the scheduler.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes as Body;
use hyper_util::rt::TokioIo;
use ondeck_core::NodeName;
use ondeck_ramdisk::Secret;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{TcpSocket, TcpStream, UnixStream};

use crate::envelope::{self, Answer};
use crate::munge::{Munge, MungeError};
use crate::wire::{Authority, MOST_BYTES, Refusal, RefusalCode};

/// How long a connection may take to come about. A node that does not answer within this is called unreachable; a lost
/// node must be seen within five seconds in all.
const CONNECT: Duration = Duration::from_secs(2);

/// Where a daemon answers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Endpoint {
    /// The agent of this machine.
    Socket(PathBuf),
    /// The daemon of a node: its agent, or whatever listens on this port.
    Node {
        /// Its name, which it must be known by itself.
        name: NodeName,
        port: u16,
    },
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Endpoint::Socket(path) => write!(f, "this machine's agent ({})", path.display()),
            Endpoint::Node { name, .. } => name.fmt(f),
        }
    }
}

/// Why a call brought no answer, or not the wanted one.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum CallError {
    /// There is no connection, or it was lost before the answer.
    #[error("{endpoint} can't be reached: {why}{}", unreachable_hint(.endpoint))]
    Unreachable {
        endpoint: Endpoint,
        why: String,
        /// Whether there was one, which was lost before the answer.
        cut_off: bool,
    },
    /// It did not answer in time.
    #[error("{endpoint} did not answer within {:.1} s", .waited.as_secs_f64())]
    Silent {
        endpoint: Endpoint,
        /// How long was waited.
        waited: Duration,
    },
    /// MUNGE did not make or accept a credential.
    #[error("{0}")]
    Munge(#[from] MungeError),
    /// The answer was not proved to be the agent's.
    #[error("{endpoint} did not prove that it is the agent: {why}")]
    Impostor {
        endpoint: Endpoint,
        /// What was missing.
        why: String,
    },
    /// The answer can't be understood.
    #[error("{endpoint} gave an answer that can't be understood ({why}); are the versions the same?")]
    Gibberish {
        endpoint: Endpoint,
        /// What was wrong.
        why: String,
    },
    /// The agent refused.
    #[error("{endpoint}: {}", .refusal.message)]
    Refused { endpoint: Endpoint, refusal: Refusal },
}

impl CallError {
    /// The kind of refusal, if it is one.
    pub fn code(&self) -> Option<RefusalCode> {
        match self {
            CallError::Refused { refusal, .. } => Some(refusal.code),
            _ => None,
        }
    }
}

fn unreachable_hint(endpoint: &Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Socket(_) => "; start it with `ondeck agent` (as root)",
        Endpoint::Node { .. } => "; is `ondeck agent` running there, with `listen` in its configuration?",
    }
}

/// In whose name a scheduler gives its next order. It is asked before each of them.
pub type Provider = Arc<dyn Fn() -> Authority + Send + Sync>;

/// Is told of each agent that does not obey an order, because it is not of the scheduler that it obeys.
pub type Doubted = Arc<dyn Fn(&Endpoint) + Send + Sync>;

/// Is told of each call that has ended: method and path, how long it took, and why it failed if it did.
pub type Observer = Arc<dyn Fn(&str, &str, Duration, Option<&CallError>) + Send + Sync>;

/// Makes calls. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    munge: Munge,
    authority: Option<Provider>,
    not_in_charge: Option<Doubted>,
    observer: Option<Observer>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Client { munge, authority, .. } = self;
        f.debug_struct("Client").field("munge", munge).field("orders", &authority.is_some()).finish()
    }
}

impl Client {
    /// A client that proves itself by the munged at this socket.
    pub fn new(munge_socket: &Path) -> Client {
        Client { munge: Munge::new(munge_socket), authority: None, not_in_charge: None, observer: None }
    }

    /// A client whose orders, which is all but `GET`, are given in a scheduler's name. The provider must not block.
    #[must_use]
    pub fn with_authority(mut self, provider: Provider) -> Client {
        self.authority = Some(provider);
        self
    }

    /// A client that tells of orders which are not obeyed. What is told must not block.
    #[must_use]
    pub fn with_doubts(mut self, doubted: Doubted) -> Client {
        self.not_in_charge = Some(doubted);
        self
    }

    /// A client that tells of every call when it has ended. What is told must not block.
    #[must_use]
    pub fn with_observer(mut self, observer: Observer) -> Client {
        self.observer = Some(observer);
        self
    }

    /// Sends a request and returns the answer. `limit` is for the whole call.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call<A: DeserializeOwned>(
        &self,
        endpoint: &Endpoint,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
        secret: Option<&Secret>,
        limit: Duration,
    ) -> Result<A, CallError> {
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|error| gibberish(endpoint, &error))?,
            None => Vec::new(),
        };
        let began = Instant::now();
        let call = self.exchange(endpoint, method, path, body, secret);
        let call = tokio::time::timeout(limit, call).await;
        let result = call
            .unwrap_or_else(|_| Err(CallError::Silent { endpoint: endpoint.clone(), waited: limit }))
            .and_then(|(status, answer)| self.understood(endpoint, status, &answer));
        if let Some(observer) = &self.observer {
            observer(method, path, began.elapsed(), result.as_ref().err());
        }
        result
    }

    /// What an answer means.
    fn understood<A: DeserializeOwned>(
        &self,
        endpoint: &Endpoint,
        status: u16,
        answer: &[u8],
    ) -> Result<A, CallError> {
        if (200..300).contains(&status) {
            return serde_json::from_slice(answer).map_err(|error| gibberish(endpoint, &error));
        }
        let refusal: Refusal = serde_json::from_slice(answer).map_err(|error| gibberish(endpoint, &error))?;
        if refusal.code == RefusalCode::NotInCharge
            && let Some(doubted) = &self.not_in_charge
        {
            doubted(endpoint);
        }
        Err(CallError::Refused { endpoint: endpoint.clone(), refusal })
    }

    /// Sends a request whose answer is plain text.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call_text(
        &self,
        endpoint: &Endpoint,
        method: &str,
        path: &str,
        limit: Duration,
    ) -> Result<String, CallError> {
        let call = self.exchange(endpoint, method, path, Vec::new(), None);
        let (status, answer) = tokio::time::timeout(limit, call)
            .await
            .map_err(|_| CallError::Silent { endpoint: endpoint.clone(), waited: limit })??;
        if (200..300).contains(&status) {
            return String::from_utf8(answer).map_err(|error| gibberish(endpoint, &error));
        }
        let refusal: Refusal =
            serde_json::from_slice(&answer).map_err(|error| gibberish(endpoint, &error))?;
        Err(CallError::Refused { endpoint: endpoint.clone(), refusal })
    }

    async fn exchange(
        &self,
        endpoint: &Endpoint,
        method: &str,
        path: &str,
        body: Vec<u8>,
        secret: Option<&Secret>,
    ) -> Result<(u16, Vec<u8>), CallError> {
        let authority = self.authority.as_ref().filter(|_| method != "GET").map(|provider| provider());
        let request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "ondeck")
            .header("content-type", "application/json");
        match endpoint {
            Endpoint::Socket(socket) => {
                let stream =
                    UnixStream::connect(socket).await.map_err(|error| unreachable(endpoint, &error))?;
                let request = match secret {
                    Some(secret) => request.header(envelope::SECRET_HEADER, secret.reveal()),
                    None => request,
                };
                let request = match &authority {
                    Some(authority) => {
                        let text =
                            serde_json::to_string(authority).map_err(|error| gibberish(endpoint, &error))?;
                        request.header(envelope::AUTHORITY_HEADER, text)
                    }
                    None => request,
                };
                let request =
                    request.body(Full::new(Body::from(body))).map_err(|error| gibberish(endpoint, &error))?;
                let (parts, answer) = send(endpoint, TokioIo::new(stream), request).await?;
                Ok((parts.status.as_u16(), answer))
            }
            Endpoint::Node { name, port } => {
                let stream = connect(endpoint, name, *port).await?;
                let nonce = envelope::nonce().map_err(|error| unreachable(endpoint, &error))?;
                let to = host_name(name);
                let payload = envelope::Request {
                    to: to.clone(),
                    port: Some(*port),
                    method: method.to_owned(),
                    path: path.to_owned(),
                    body: envelope::hash(&body),
                    nonce: nonce.clone(),
                    secret: secret.map(Secret::reveal),
                    authority,
                };
                let payload = serde_json::to_vec(&payload).map_err(|error| gibberish(endpoint, &error))?;
                let munge = self.munge.clone();
                let credential =
                    blocking(endpoint, move || munge.encode(&payload, Some(0), envelope::TIME_TO_LIVE))
                        .await??;
                let request = request
                    .header(envelope::REQUEST_HEADER, credential)
                    .body(Full::new(Body::from(body)))
                    .map_err(|error| gibberish(endpoint, &error))?;
                let (parts, answer) = send(endpoint, TokioIo::new(stream), request).await?;
                let status = parts.status.as_u16();
                let impostor =
                    |why: &str| CallError::Impostor { endpoint: endpoint.clone(), why: why.to_owned() };
                let Some(credential) =
                    parts.headers.get(envelope::ANSWER_HEADER).and_then(|value| value.to_str().ok())
                else {
                    // Before a request is authenticated, the agent can't know for whom to seal its answer.
                    let said = serde_json::from_slice::<Refusal>(&answer).map(|refusal| refusal.message);
                    return Err(impostor(&format!(
                        "its answer has no credential{}",
                        said.map(|said| format!("; it says: {said}")).unwrap_or_default()
                    )));
                };
                let (munge, credential) = (self.munge.clone(), credential.to_owned());
                let decoded = blocking(endpoint, move || munge.decode(&credential)).await??;
                let sealed: Answer =
                    serde_json::from_slice(&decoded.payload).map_err(|error| gibberish(endpoint, &error))?;
                if decoded.uid != 0 {
                    return Err(impostor(&format!("its answer was made by user {}, not root", decoded.uid)));
                }
                if let Some(fault) = sealed.fault(&to, &nonce, status, &answer) {
                    return Err(impostor(&fault));
                }
                Ok((status, answer))
            }
        }
    }
}

/// A text as it stands in a query, behind `NAME=`.
pub fn in_query(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

/// A node calls itself by its host name, without a domain.
fn host_name(name: &NodeName) -> NodeName {
    let is_address = name.as_str().parse::<IpAddr>().is_ok();
    let first = name.as_str().split('.').next().filter(|_| !is_address);
    first.and_then(|first| first.parse().ok()).unwrap_or_else(|| name.clone())
}

fn unreachable(endpoint: &Endpoint, why: &dyn std::fmt::Display) -> CallError {
    CallError::Unreachable { endpoint: endpoint.clone(), why: why.to_string(), cut_off: false }
}

fn gibberish(endpoint: &Endpoint, why: &dyn std::fmt::Display) -> CallError {
    CallError::Gibberish { endpoint: endpoint.clone(), why: why.to_string() }
}

/// Speaking to munged blocks, for a fraction of a millisecond if all is well.
async fn blocking<T: Send + 'static>(
    endpoint: &Endpoint,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, CallError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| unreachable(endpoint, &error))
}

async fn connect(endpoint: &Endpoint, name: &NodeName, port: u16) -> Result<TcpStream, CallError> {
    let attempt = async {
        let addresses: Vec<_> = match name.as_str().parse::<IpAddr>() {
            Ok(address) => vec![(address, port).into()],
            Err(_) => tokio::net::lookup_host((name.as_str(), port)).await?.collect(),
        };
        let mut last = None;
        for address in addresses {
            match connect_to(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| std::io::Error::other("the name has no address")))
    };
    let stream = tokio::time::timeout(CONNECT, attempt)
        .await
        .map_err(|_| unreachable(endpoint, &"no connection within 2 s"))?
        .map_err(|error| unreachable(endpoint, &error))?;
    // Requests are single small packets; waiting for more to send would only delay them.
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

/// Root calls from a port that only root can use, which is how the agent knows that it is root of this very host.
async fn connect_to(address: SocketAddr) -> std::io::Result<TcpStream> {
    const PRIVILEGED: std::ops::Range<u16> = 600..1024;
    if !rustix::process::geteuid().is_root() {
        return TcpStream::connect(address).await;
    }
    let random = envelope::nonce()?;
    let start = u16::from_str_radix(&random[..4], 16).unwrap_or(0);
    let any = if address.is_ipv6() { IpAddr::from([0u16; 8]) } else { IpAddr::from([0u8; 4]) };
    let mut last = None;
    for step in 0..PRIVILEGED.len() as u16 {
        let port = PRIVILEGED.start + start.wrapping_add(step) % PRIVILEGED.len() as u16;
        let socket = if address.is_ipv6() { TcpSocket::new_v6()? } else { TcpSocket::new_v4()? };
        // The same port may serve several connections, to different agents.
        socket.set_reuseaddr(true)?;
        if let Err(error) = socket.bind((any, port).into()) {
            last = Some(error);
            continue;
        }
        match socket.connect(address).await {
            // The same port is in use for the same agent.
            Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => last = Some(error),
            connected => return connected,
        }
    }
    Err(last.unwrap_or_else(|| std::io::Error::other("no port below 1024 is free")))
}

async fn send<S>(
    endpoint: &Endpoint,
    stream: S,
    request: hyper::Request<Full<Body>>,
) -> Result<(hyper::http::response::Parts, Vec<u8>), CallError>
where
    S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(stream).await.map_err(|error| unreachable(endpoint, &error))?;
    let driver = tokio::spawn(connection);
    let response = sender.send_request(request).await.map_err(|error| CallError::Unreachable {
        endpoint: endpoint.clone(),
        why: error.to_string(),
        cut_off: true,
    })?;
    let (parts, body) = response.into_parts();
    let body = Limited::new(body, MOST_BYTES).collect().await;
    driver.abort();
    let body = body.map_err(|error| gibberish(endpoint, &error))?;
    Ok((parts, body.to_bytes().to_vec()))
}
