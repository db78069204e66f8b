//! Why a credential could not be encoded or decoded, by MUNGE's own codes.

use std::io;
use std::path::PathBuf;

use super::MAX_MESSAGE;

/// The error codes that MUNGE documents (`munge_err_t` in `munge.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MungeCode {
    /// 1: something went wrong inside munged.
    Internal,
    /// 2: an invalid argument, such as an empty credential.
    BadArgument,
    /// 3: a message longer than munged allows.
    TooLong,
    /// 4: a buffer overflow.
    Overflow,
    /// 5: munged is out of memory.
    OutOfMemory,
    /// 6: trouble on the socket, or too many retries.
    Socket,
    /// 7: a time-out (MUNGE documents it as unused).
    Timeout,
    /// 8: not a credential: the format is wrong.
    BadCredential,
    /// 9: a credential of an unknown version.
    BadVersion,
    /// 10: an unknown or disabled cipher.
    BadCipher,
    /// 11: an unknown or disabled message authentication code.
    BadMac,
    /// 12: an unknown or disabled compression.
    BadZip,
    /// 13: an unknown security realm.
    BadRealm,
    /// 14: the seal is broken: the credential was changed, or made with another key.
    Invalid,
    /// 15: the credential is too old.
    Expired,
    /// 16: the credential comes from the future: the clocks of the two hosts differ.
    Rewound,
    /// 17: the credential was already decoded on this host.
    Replayed,
    /// 18: the credential is meant for another user.
    Unauthorized,
    /// A code this client does not know.
    Other(u8),
}

impl MungeCode {
    /// The code for the number munged sends. There is none for 0, which means success.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => return None,
            1 => Self::Internal,
            2 => Self::BadArgument,
            3 => Self::TooLong,
            4 => Self::Overflow,
            5 => Self::OutOfMemory,
            6 => Self::Socket,
            7 => Self::Timeout,
            8 => Self::BadCredential,
            9 => Self::BadVersion,
            10 => Self::BadCipher,
            11 => Self::BadMac,
            12 => Self::BadZip,
            13 => Self::BadRealm,
            14 => Self::Invalid,
            15 => Self::Expired,
            16 => Self::Rewound,
            17 => Self::Replayed,
            18 => Self::Unauthorized,
            other => Self::Other(other),
        })
    }

    /// Whether the credential is at fault, rather than munged or this program: what a server answers with
    /// "not authenticated" (HTTP 401) and not with "try again later" (503).
    #[must_use]
    pub fn is_about_the_credential(self) -> bool {
        match self {
            Self::BadArgument
            | Self::BadCredential
            | Self::BadVersion
            | Self::BadCipher
            | Self::BadMac
            | Self::BadZip
            | Self::BadRealm
            | Self::Invalid
            | Self::Expired
            | Self::Rewound
            | Self::Replayed
            | Self::Unauthorized => true,
            Self::Internal
            | Self::TooLong
            | Self::Overflow
            | Self::OutOfMemory
            | Self::Socket
            | Self::Timeout
            | Self::Other(_) => false,
        }
    }
}

/// Why a credential could not be encoded or decoded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum MungeError {
    /// There is no munged at the socket, or this user may not connect to it.
    #[error("can't reach munged at {}: {source}; is munged running?", .path.display())]
    Unreachable {
        path: PathBuf,
        /// Why the connect failed.
        source: io::Error,
    },
    /// munged took the connection but did not answer: it dropped the connection each time, or timed out.
    /// Dropping it is also what a munged does that speaks another version of the protocol.
    #[error(
        "munged at {} did not answer ({attempts} {}): {source}",
        .path.display(), if *.attempts == 1 { "attempt" } else { "attempts" }
    )]
    NoAnswer {
        path: PathBuf,
        /// How often the request was made.
        attempts: u8,
        /// What became of the last one.
        source: io::Error,
    },
    /// What answered does not speak version 4 of MUNGE's protocol.
    #[error("munged broke its protocol: {0}")]
    Protocol(String),
    /// The message would be, or is, longer than munged allows ([`MAX_MESSAGE`]).
    #[error("a MUNGE message of {length} bytes is over the limit of {MAX_MESSAGE}")]
    TooLong {
        /// The length of its body.
        length: usize,
    },
    /// munged answered no.
    #[error("munged refused: {message}")]
    Refused {
        /// Which of the documented errors it is.
        code: MungeCode,
        /// munged's own words.
        message: String,
    },
}

impl MungeError {
    /// The code munged gave, if it was munged that refused.
    #[must_use]
    pub fn code(&self) -> Option<MungeCode> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }
}
