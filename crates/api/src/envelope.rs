//! What a MUNGE credential covers.
//!
//! A request over TCP carries a credential whose encrypted payload names the node and the port it is meant for, the
//! method, the path and a hash of the body, and holds the RAM disk's secret where the step needs it and in whose name a
//! scheduler orders: so nothing of it can be changed, sent to another daemon, or read on the way, and munged accepts it
//! once. The answer carries one too, which names the node that made it, the request's random number and a hash of its own
//! body, can be decoded by the caller's user alone, and must have been made by root: so a process of a user that listens
//! on the agent's port is found out, also if it passes on what another daemon answers.
//!
//! Daemons of version 0.1.0 before these names say and look for neither the port nor the answer's node. What they leave
//! out is not missed: whoever could make an answer without a name could write any name into it, so the name guards against
//! nothing but the true answers of other daemons.

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
    /// The port it is meant for: a node may have an agent and a scheduler. Former clients do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
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
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The node that made it. Former daemons do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<NodeName>,
    /// The request's random number.
    pub nonce: String,
    /// The HTTP status.
    pub status: u16,
    /// The BLAKE3 hash of the body.
    pub body: String,
}

impl Answer {
    /// Why this is not the answer that a node gave to a request; nothing if it is.
    pub fn fault(&self, node: &NodeName, nonce: &str, status: u16, body: &[u8]) -> Option<String> {
        if let Some(other) = self.from.as_ref().filter(|from| *from != node) {
            return Some(format!("its answer was made by {other}"));
        }
        let belongs = self.nonce == nonce && self.status == status && self.body == hash(body);
        (!belongs).then(|| "its answer belongs to another request or was changed".to_owned())
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_of_one_node_one_request_and_one_body() {
        let node = |name: &str| name.parse::<NodeName>().unwrap();
        let answer = |from: Option<&str>| Answer {
            from: from.map(node),
            nonce: "7".into(),
            status: 200,
            body: hash(b"yes"),
        };
        let fault = |answer: &Answer| answer.fault(&node("n1"), "7", 200, b"yes");
        assert_eq!(fault(&answer(Some("n1"))), None);
        assert_eq!(fault(&answer(Some("n2"))).unwrap(), "its answer was made by n2");
        // A former daemon's, whose payload has no such field.
        let former = serde_json::to_string(&answer(None)).unwrap();
        assert!(!former.contains("from"), "{former}");
        assert_eq!(fault(&serde_json::from_str(&former).unwrap()), None);
        for (nonce, status, body) in [("8", 200, &b"yes"[..]), ("7", 404, b"yes"), ("7", 200, b"no")] {
            assert!(answer(Some("n1")).fault(&node("n1"), nonce, status, body).is_some());
        }
    }
}
