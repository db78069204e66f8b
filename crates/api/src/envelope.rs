//! What a MUNGE credential covers.
//!
//! A request over TCP carries a credential whose encrypted payload names the node it is meant for, the method, the path
//! and a hash of the body, and holds the RAM disk's secret where the step needs it and in whose name a scheduler orders: so
//! nothing of it can be changed,
//! sent to another node, or read on the way, and munged accepts it once. The answer carries one too, which names the
//! request's random number and a hash of its own body, can be decoded by the caller's user alone, and must have been
//! made by root: so a process of a user that listens on the agent's port is found out.

use ondeck_core::NodeName;
use ondeck_ramdisk::Secret;
use serde::{Deserialize, Serialize};

use crate::wire::Authority;

/// The header with the credential of a request.
pub const REQUEST_HEADER: &str = "x-ondeck-credential";

/// The header with the credential of an answer.
pub const ANSWER_HEADER: &str = "x-ondeck-answer";

/// The header with the secret on the Unix socket, which never leaves the machine.
pub const SECRET_HEADER: &str = "x-ondeck-secret";

/// The header with a scheduler's [`Authority`] as JSON on the Unix socket.
pub const AUTHORITY_HEADER: &str = "x-ondeck-authority";

/// How long a credential is accepted. Clocks of a cluster agree to within this, or MUNGE itself would not work.
pub const TIME_TO_LIVE: std::time::Duration = std::time::Duration::from_secs(60);

/// The payload of a request's credential.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// The node it is meant for.
    pub to: NodeName,
    /// The HTTP method.
    pub method: String,
    /// The path with its query.
    pub path: String,
    /// The BLAKE3 hash of the body.
    pub body: String,
    /// A random number.
    pub nonce: String,
    /// The RAM disk's secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// The scheduler in whose name the order is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<Authority>,
}

/// The payload of an answer's credential.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The request's random number.
    pub nonce: String,
    /// The HTTP status.
    pub status: u16,
    /// The BLAKE3 hash of the body.
    pub body: String,
}

/// The hash of a body.
pub fn hash(body: &[u8]) -> String {
    blake3::hash(body).to_hex().to_string()
}

/// A new random number.
///
/// # Errors
/// The kernel's.
pub fn nonce() -> std::io::Result<String> {
    Ok(Secret::new()?.password("nonce")[..32].to_owned())
}
