//! The messages of MUNGE's protocol, as the [module above](super) describes them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::error::{MungeCode, MungeError};
use super::{Credential, MAX_MESSAGE};

const MAGIC: u32 = 0x0060_6D4B;
const VERSION: u8 = 4;
pub(super) const HEADER_LEN: usize = 11;

pub(super) const ENCODE_REQUEST: u8 = 2;
pub(super) const ENCODE_RESPONSE: u8 = 3;
pub(super) const DECODE_REQUEST: u8 = 4;
pub(super) const DECODE_RESPONSE: u8 = 5;

/// For cipher, mac and zip: as munged is configured.
const DEFAULT: u8 = 1;
/// For a uid or gid: no restriction.
pub(super) const ANYONE: u32 = u32::MAX;

/// A header and a body that was checked to be short enough.
pub(super) fn message(kind: u8, retry: u8, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LEN + body.len());
    out.extend_from_slice(&MAGIC.to_be_bytes());
    out.extend_from_slice(&[VERSION, kind, retry]);
    put_length(&mut out, body.len());
    out.extend_from_slice(body);
    out
}

/// The length of the body that follows this header.
pub(super) fn parse_header(header: &[u8; HEADER_LEN], wanted: u8) -> Result<usize, MungeError> {
    let mut reader = Reader(header);
    let magic = reader.u32()?;
    if magic != MAGIC {
        return Err(violation(format!("a message starts with {magic:#010x} and not {MAGIC:#010x}")));
    }
    let version = reader.u8()?;
    if version != VERSION {
        return Err(violation(format!("it speaks version {version} and not {VERSION}")));
    }
    let kind = reader.u8()?;
    if kind != wanted {
        return Err(violation(format!("a message of type {kind} came where type {wanted} is due")));
    }
    reader.u8()?; // the retry byte means nothing in a response
    let length = reader.u32()? as usize;
    if length > MAX_MESSAGE { Err(MungeError::TooLong { length }) } else { Ok(length) }
}

pub(super) fn encode_request(
    payload: &[u8],
    only_for: Option<u32>,
    ttl: Duration,
) -> Result<Vec<u8>, MungeError> {
    const FIXED: usize = 4 + 4 * 4; // cipher, mac, zip, no realm; ttl, uid, gid, length
    check_length(FIXED.saturating_add(payload.len()))?;
    let mut out = Vec::with_capacity(FIXED + payload.len());
    out.extend_from_slice(&[DEFAULT, DEFAULT, DEFAULT, 0]);
    out.extend_from_slice(&ttl_seconds(ttl).to_be_bytes());
    out.extend_from_slice(&only_for.unwrap_or(ANYONE).to_be_bytes());
    out.extend_from_slice(&ANYONE.to_be_bytes());
    put_length(&mut out, payload.len());
    out.extend_from_slice(payload);
    Ok(out)
}

pub(super) fn decode_request(credential: &str) -> Result<Vec<u8>, MungeError> {
    let text = credential.trim_ascii().as_bytes();
    check_length(text.len().saturating_add(4 + 1))?;
    let mut out = Vec::with_capacity(4 + text.len() + 1);
    put_length(&mut out, text.len() + 1); // with the NUL
    out.extend_from_slice(text);
    out.push(0);
    Ok(out)
}

pub(super) fn parse_encode_response(body: &[u8]) -> Result<String, MungeError> {
    let mut reader = Reader(body);
    let refusal = reader.refusal()?;
    let credential = reader.long_bytes()?;
    reader.end()?;
    if let Some(refusal) = refusal {
        return Err(refusal);
    }
    let text = credential
        .strip_suffix(&[0])
        .filter(|text| !text.is_empty() && text.iter().all(u8::is_ascii_graphic))
        .ok_or_else(|| violation("the credential is not a text ending in NUL"))?;
    Ok(String::from_utf8_lossy(text).into_owned())
}

pub(super) fn parse_decode_response(body: &[u8]) -> Result<Credential, MungeError> {
    let mut reader = Reader(body);
    let refusal = reader.refusal()?;
    reader.take(3)?; // cipher, mac, zip
    reader.short_bytes()?; // realm
    reader.u32()?; // ttl
    let address = parse_address(reader.short_bytes()?)?;
    let encoded_at = reader.u32()?;
    let decoded_at = reader.u32()?;
    let uid = reader.u32()?;
    let gid = reader.u32()?;
    let auth_uid = reader.u32()?;
    reader.u32()?; // auth gid
    let payload = reader.long_bytes()?;
    reader.end()?;
    // A refusal has all these fields too, and for an expired, rewound or replayed credential they are even
    // filled in. They are not handed on, so that nobody trusts them by accident.
    if let Some(refusal) = refusal {
        return Err(refusal);
    }
    Ok(Credential {
        uid,
        gid,
        only_for: Some(auth_uid).filter(|uid| *uid != ANYONE),
        address,
        encoded_at: encoded_at.into(),
        decoded_at: decoded_at.into(),
        payload: payload.to_vec(),
    })
}

pub(super) fn parse_address(bytes: &[u8]) -> Result<Option<IpAddr>, MungeError> {
    let address = if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        IpAddr::V4(Ipv4Addr::from(v4))
    } else if let Ok(v6) = <[u8; 16]>::try_from(bytes) {
        IpAddr::V6(Ipv6Addr::from(v6))
    } else if bytes.is_empty() {
        return Ok(None);
    } else {
        return Err(violation(format!("an IP address of {} bytes", bytes.len())));
    };
    Ok(Some(address).filter(|address| !address.is_unspecified()))
}

/// Whole seconds, rounded up. munged reads 0 as its default and 0xFFFFFFFF as its maximum.
pub(super) fn ttl_seconds(ttl: Duration) -> u32 {
    let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

/// Appends a length, which was checked to be within [`MAX_MESSAGE`].
pub(super) fn put_length(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&(length as u32).to_be_bytes());
}

fn check_length(length: usize) -> Result<(), MungeError> {
    if length > MAX_MESSAGE { Err(MungeError::TooLong { length }) } else { Ok(()) }
}

fn violation(what: impl Into<String>) -> MungeError {
    MungeError::Protocol(what.into())
}

/// Takes a message apart from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], MungeError> {
        let (head, tail) = self
            .0
            .split_at_checked(n)
            .ok_or_else(|| violation(format!("a field of {n} bytes, but {} are left", self.0.len())))?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MungeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u8(&mut self) -> Result<u8, MungeError> {
        self.array().map(u8::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, MungeError> {
        self.array().map(u32::from_be_bytes)
    }

    /// A length of one byte, and so many bytes.
    fn short_bytes(&mut self) -> Result<&'a [u8], MungeError> {
        let n = self.u8()?;
        self.take(n.into())
    }

    /// A length of four bytes, and so many bytes.
    fn long_bytes(&mut self) -> Result<&'a [u8], MungeError> {
        let n = self.u32()?;
        self.take(n as usize)
    }

    /// The error number and message that a response begins with; `None` for success.
    fn refusal(&mut self) -> Result<Option<MungeError>, MungeError> {
        let number = self.u8()?;
        let message = self.short_bytes()?;
        let Some(code) = MungeCode::from_number(number) else { return Ok(None) };
        let message = String::from_utf8_lossy(message.strip_suffix(&[0]).unwrap_or(message));
        let message =
            if message.is_empty() { format!("error {number}") } else { message.escape_debug().to_string() };
        Ok(Some(MungeError::Refused { code, message }))
    }

    fn end(self) -> Result<(), MungeError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(violation(format!("{} bytes after the end of a response", self.0.len())))
        }
    }
}
