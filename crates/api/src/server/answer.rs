//! From the headers of a request to its sealed answer.

use std::sync::Arc;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use hyper::service::Service;
use ondeck_core::NodeName;
use ondeck_core::text::plain;
use ondeck_ramdisk::Secret;

use super::extract::{Brought, JSON, told};
use super::{Daemon, PATIENCE, Peer, blocking};
use crate::auth::Caller;
use crate::envelope::{self, Answer};
use crate::wire::{Authority, MOST_BYTES, Refusal, RefusalCode, VERSION};

/// Enough of a request, and of what was wrong with it, for the log.
const LOGGED: usize = 200;

/// The most bytes of a request that comes from no administrator: with all connections in use, 64 MiB of an agent.
pub(super) const MOST_OF_OTHERS: usize = 256 << 10;

/// What is known before the body is read.
pub(super) struct RequestHead {
    pub(super) caller: Caller,
    pub(super) secret: Option<Secret>,
    pub(super) authority: Option<Authority>,
    /// The hash that the body must have.
    pub(super) body: Option<String>,
    /// For whom the answer is sealed, and to which request: over TCP.
    pub(super) seal: Option<(u32, String)>,
}

pub(super) async fn handle(daemon: Arc<Daemon>, peer: Peer, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or_else(String::new, ToString::to_string);
    // Nothing is read for strangers but their headers.
    let (recognizing, headers) = (Arc::clone(&daemon), std::mem::take(&mut parts.headers));
    let method = parts.method.clone();
    let recognize = move || recognizing.recognize(peer, &method, &path, &headers);
    let recognized = match peer {
        // The kernel has said who it is. So others, who keep munged busy, don't keep root waiting.
        Peer::Local(_) => recognize(),
        Peer::Remote(_) => blocking(recognize).await.and_then(|known| known),
    };
    match recognized {
        Ok(known) => daemon.answer(known, parts, body).await,
        Err(refusal) => refusal.into_response(),
    }
}

impl Daemon {
    /// Reads the body within the caller's bounds, and has the route's handler answer if it is what the credential covers.
    pub(super) async fn answer(&self, known: RequestHead, parts: Parts, body: Body) -> Response {
        let most = if known.caller.is_administrator() { MOST_BYTES } else { MOST_OF_OTHERS };
        let body = match tokio::time::timeout(PATIENCE, to_bytes(body, most)).await {
            Ok(Ok(body)) => body,
            _ => {
                let message = "the request is too long, was cut off, or did not come to an end";
                return Refusal::new(RefusalCode::Malformed, message).into_response();
            }
        };
        if known.body.as_ref().is_some_and(|hash| *hash != envelope::hash(&body)) {
            let message = "the request is not the one that its credential covers";
            return Refusal::new(RefusalCode::Unauthenticated, message).into_response();
        }
        let seal = known.seal.clone();
        let answering = self.ask(known, parts, body).await;
        let Some((uid, nonce)) = seal else { return answering.respond(None) };
        let sealed = answering.sealed(self.name.clone(), nonce);
        let munge = self.munge.clone();
        match blocking(move || munge.encode(&sealed, Some(uid), envelope::TIME_TO_LIVE)).await {
            Ok(Ok(credential)) => answering.respond(Some(credential)),
            // Without it the caller does not believe the answer, and says so.
            Ok(Err(error)) => {
                tracing::error!(%error, "can't seal an answer");
                answering.respond(None)
            }
            Err(refusal) => refusal.into_response(),
        }
    }

    /// What the router says, which is told who asks. It is dropped where it waits if the caller hangs up.
    async fn ask(&self, known: RequestHead, mut parts: Parts, body: Bytes) -> Answering {
        let RequestHead { caller, secret, authority, .. } = known;
        let (method, path) = (parts.method.clone(), parts.uri.path().to_owned());
        let response = match routed(&parts.uri) {
            Err(refusal) => refusal.into_response(),
            Ok(uri) => {
                parts.uri = uri;
                parts.extensions.insert(caller);
                parts.extensions.insert(Brought { secret, authority });
                match self.router.call(Request::from_parts(parts, Body::from(body))).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                }
            }
        };
        let done = Answering::of(response, &path).await;
        if let Err(refusal) = &done {
            // Both are the caller's words, or repeat them.
            let (path, message) = (plain(&path, LOGGED), plain(&refusal.message, LOGGED));
            let (method, uid) = (plain(method.as_str(), LOGGED), caller.uid);
            if self.refusals.is_to_be_told(uid) {
                tracing::info!(method, path, code = ?refusal.code, uid, message, "refused");
            }
        }
        done.unwrap_or_else(|refusal| Answering::refused(&refusal))
    }

    fn recognize(
        &self,
        peer: Peer,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<RequestHead, Refusal> {
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
                Ok(RequestHead { caller: Caller::local(uid), secret, authority, seal: None, body: None })
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
                let own_name = &self.name;
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
                Ok(RequestHead { caller, secret, authority, seal, body: Some(request.body) })
            }
        }
    }
}

/// Where a request goes: slashes at either end of its path mean nothing.
///
/// # Errors
/// [`RefusalCode::NotFound`] for another version than [`VERSION`].
fn routed(uri: &Uri) -> Result<Uri, Refusal> {
    let path = uri.path().trim_matches('/');
    let version = path.split('/').next().unwrap_or_default();
    if version != VERSION {
        let message = format!("this daemon speaks {VERSION}, and the request is for `{version}`");
        return Err(Refusal::new(RefusalCode::NotFound, message));
    }
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let malformed =
        |error: axum::http::uri::InvalidUri| Refusal::new(RefusalCode::Malformed, error.to_string());
    format!("/{path}{query}").parse().map_err(malformed)
}

/// An answer on its way.
struct Answering {
    status: StatusCode,
    kind: HeaderValue,
    body: Bytes,
}

impl Answering {
    /// All of a response.
    ///
    /// # Errors
    /// What was refused, also by axum itself: where there is no route, or it has no such method.
    async fn of(mut response: Response, path: &str) -> Result<Answering, Refusal> {
        let status = response.status();
        if !status.is_success() {
            return Err(match (response.extensions_mut().remove(), status) {
                (Some(refusal), _) => refusal,
                (None, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED) => {
                    Refusal::new(RefusalCode::NotFound, format!("there is nothing at {path}"))
                }
                (None, _) => {
                    Refusal::new(RefusalCode::Failed, format!("the daemon has a defect: it answers {status}"))
                }
            });
        }
        let kind = response.headers_mut().remove(CONTENT_TYPE).unwrap_or(HeaderValue::from_static(JSON));
        let body = to_bytes(response.into_body(), usize::MAX).await;
        let failed = |error: axum::Error| Refusal::new(RefusalCode::Failed, error.to_string());
        Ok(Answering { status, kind, body: body.map_err(failed)? })
    }

    fn refused(refusal: &Refusal) -> Answering {
        let (status, body) = told(refusal);
        Answering { status, kind: HeaderValue::from_static(JSON), body }
    }

    /// What a credential for it covers.
    fn sealed(&self, from: NodeName, nonce: String) -> Vec<u8> {
        let (status, body) = (self.status.as_u16(), envelope::hash(&self.body));
        serde_json::to_vec(&Answer { from: Some(from), nonce, status, body }).unwrap_or_default()
    }

    fn respond(self, credential: Option<String>) -> Response {
        let mut response = Response::builder().status(self.status).header(CONTENT_TYPE, self.kind);
        if let Some(credential) = credential {
            response = response.header(envelope::ANSWER_HEADER, credential);
        }
        response.body(Body::from(self.body)).unwrap_or_default()
    }
}
