//! What handlers take from a request, and answer: axum's extractors, whose refusals are a [`Refusal`] like all others.

use std::error::Error as _;
use std::path::PathBuf;
use std::str::FromStr;

use axum::body::{Bytes, to_bytes};
use axum::extract::path::ErrorKind;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use ondeck_ramdisk::Secret;
use percent_encoding::percent_decode_str;
use serde::de::{DeserializeOwned, Deserializer, Error};
use serde::{Deserialize, Serialize};

use crate::auth::Caller;
use crate::scheduler::{BurstBufferQuestion, Drain, Hook};
use crate::wire::{
    Authority, Claim, CountOrder, KindsToTell, MOST_BYTES, Refusal, RefusalCode, Release, RestoreOrder,
    StepRequest, StripingOrder, TaskRequest, WatchOrder,
};

pub(super) const JSON: &str = "application/json";

/// What came along with a request that proves itself by it.
#[derive(Clone, Debug)]
pub struct Brought {
    /// The secret of a RAM disk, where it came along.
    pub secret: Option<Secret>,
    /// The scheduler in whose name the request is made; nothing for a person's.
    pub authority: Option<Authority>,
}

/// What was put beside a request when its caller was recognized. A request without it reaches no handler.
fn recognized<T: Clone + Send + Sync + 'static>(parts: &Parts) -> Result<T, Refusal> {
    let missing = || Refusal::new(RefusalCode::Failed, "the daemon has a defect: nobody was recognized");
    parts.extensions.get().cloned().ok_or_else(missing)
}

impl<S: Sync> FromRequestParts<S> for Brought {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Brought, Refusal> {
        recognized(parts)
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, Refusal> {
        recognized(parts)
    }
}

/// A caller who may do everything; all others are refused before what they sent is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Administrator(pub Caller);

impl<S: Sync> FromRequestParts<S> for Administrator {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Administrator, Refusal> {
        let caller: Caller = recognized(parts)?;
        caller.must_be_administrator().map(|()| Administrator(caller))
    }
}

/// Root of this machine; all others are refused before what they sent is looked at.
#[derive(Clone, Copy, Debug)]
pub struct RootHere(pub Caller);

impl<S: Sync> FromRequestParts<S> for RootHere {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<RootHere, Refusal> {
        let caller: Caller = recognized(parts)?;
        caller.must_be_root_here().map(|()| RootHere(caller))
    }
}

/// The open parts of a route's path, by their names, `%XX` undone.
#[derive(Clone, Copy, Debug)]
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Path<T>, Refusal> {
        let found = axum::extract::Path::from_request_parts(parts, state).await;
        let malformed = |error: PathRejection| {
            let message = match error {
                PathRejection::FailedToDeserializePathParams(error) => match error.into_kind() {
                    // In the words of the type that could not be read.
                    ErrorKind::Message(message) | ErrorKind::DeserializeError { message, .. } => message,
                    ErrorKind::InvalidUtf8InPathParam { key } => {
                        format!("the {key} in the path is not UTF-8")
                    }
                    other => other.to_string(),
                },
                other => other.body_text(),
            };
            Refusal::new(RefusalCode::Malformed, message)
        };
        found.map(|axum::extract::Path(found)| Path(found)).map_err(malformed)
    }
}

/// Reads an open part of a path as a type reads text: for `#[serde(deserialize_with = "from_text")]`.
///
/// # Errors
/// The type's own.
pub fn from_text<'de, T, D>(text: D) -> Result<T, D::Error>
where
    T: FromStr<Err: std::fmt::Display>,
    D: Deserializer<'de>,
{
    String::deserialize(text)?.parse().map_err(D::Error::custom)
}

/// The fields of a query. Those that are not asked for are ignored; one that can't be understood is refused, as it must not
/// count as absent.
#[derive(Clone, Copy, Debug)]
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Query<T>, Refusal> {
        let malformed = |message: String| Refusal::new(RefusalCode::Malformed, message);
        // axum would put other characters where there is no UTF-8.
        if percent_decode_str(parts.uri.query().unwrap_or_default()).decode_utf8().is_err() {
            return Err(malformed("the query is not UTF-8".into()));
        }
        let found = axum::extract::Query::try_from_uri(&parts.uri);
        found.map(|axum::extract::Query(found)| Query(found)).map_err(|error| {
            let why = error.source().map_or_else(|| error.body_text(), ToString::to_string);
            malformed(format!("the query can't be understood: {why}"))
        })
    }
}

/// The absolute path that a query's field `path` names: bytes that need not be UTF-8, as [`Query`] would have it.
#[derive(Clone, Debug)]
pub struct PathInQuery(pub PathBuf);

impl<S: Sync> FromRequestParts<S> for PathInQuery {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<PathInQuery, Refusal> {
        use std::os::unix::ffi::OsStringExt;
        let mut fields = parts.uri.query().unwrap_or_default().split('&');
        let value = fields.find_map(|field| field.strip_prefix("path="));
        let bytes = value.map(|value| percent_decode_str(value).collect());
        let path = bytes.map(|bytes| PathBuf::from(std::ffi::OsString::from_vec(bytes)));
        path.filter(|path| path.is_absolute()).map(PathInQuery).ok_or_else(|| {
            Refusal::new(RefusalCode::Malformed, "a view is asked for with ?path=/ABSOLUTE/PATH")
        })
    }
}

/// A value in a body as JSON, whatever the request says that it is.
#[derive(Clone, Copy, Debug)]
pub struct Json<T>(pub T);

/// What requests bring in their body.
pub trait Content: DeserializeOwned {
    /// What a refusal calls it.
    const NAME: &'static str;
}

macro_rules! content {
    ($($type:ty: $name:literal),+ $(,)?) => { $(impl Content for $type { const NAME: &'static str = $name; })+ };
}

content! {
    Claim: "the claim",
    CountOrder: "the order",
    Drain: "the reason",
    Hook: "the hook",
    BurstBufferQuestion: "the question",
    KindsToTell: "the question",
    Release: "the release",
    RestoreOrder: "the order",
    StepRequest: "the step",
    StripingOrder: "the order",
    TaskRequest: "the task",
    WatchOrder: "the order",
}

impl<T: Content, S: Sync> FromRequest<S> for Json<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Json<T>, Refusal> {
        let malformed = |error: &dyn std::fmt::Display| {
            Refusal::new(RefusalCode::Malformed, format!("{}: {error}", T::NAME))
        };
        // All of it has come, is within the caller's bounds, and is what the credential covers.
        let body = to_bytes(request.into_body(), MOST_BYTES).await.map_err(|error| malformed(&error))?;
        serde_json::from_slice(&body).map(Json).map_err(|error| malformed(&error))
    }
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(body) => ([(CONTENT_TYPE, JSON)], body).into_response(),
            Err(error) => Refusal::new(RefusalCode::Failed, error.to_string()).into_response(),
        }
    }
}

/// The status of a refusal, and what its body says.
pub(super) fn told(refusal: &Refusal) -> (StatusCode, Bytes) {
    let status = StatusCode::from_u16(refusal.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, serde_json::to_string(refusal).unwrap_or_else(|error| error.to_string()).into())
}

/// The refusal also goes beside the response, for the log.
impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, body) = told(&self);
        let mut response = (status, [(CONTENT_TYPE, JSON)], body).into_response();
        response.extensions_mut().insert(self);
        response
    }
}
