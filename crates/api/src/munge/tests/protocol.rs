//! The messages, without munged.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::{assert_code, encode_body};
use crate::munge::protocol::{
    ENCODE_REQUEST, decode_request, encode_request, message, parse_address, parse_decode_response,
    parse_encode_response, parse_header, ttl_seconds,
};
use crate::munge::{Credential, MAX_MESSAGE, Munge, MungeCode, MungeError};

/// What the `munge` program writes for `munge -s hello -u 1000 -t 77` (taken with strace).
const ENCODE_WIRE: &[u8] = b"\x00\x60\x6d\x4b\x04\x02\x00\x00\x00\x00\x19\
    \x01\x01\x01\x00\x00\x00\x00\x4d\x00\x00\x03\xe8\xff\xff\xff\xff\x00\x00\x00\x05hello";

/// What munged answers `unmunge` for a good credential with the payload `hello` (taken with strace).
const DECODE_BODY: &[u8] = b"\x00\x00\x04\x05\x00\x00\x00\x00\x01\x2c\x04\x7f\x00\x00\x01\
    \x6b\x02\x36\x34\x6b\x02\x36\x35\x00\x00\x00\x07\x00\x00\x00\x08\xff\xff\xff\xff\xff\xff\xff\xff\
    \x00\x00\x00\x05hello";

#[test]
fn an_encode_request_is_what_the_munge_program_sends() {
    let body = encode_request(b"hello", Some(1000), Duration::from_secs(77)).unwrap();
    assert_eq!(message(ENCODE_REQUEST, 0, &body), ENCODE_WIRE);
}

#[test]
fn a_decode_request_counts_its_nul_and_no_white_space() {
    assert_eq!(decode_request(" MUNGE:AwQ=:\n").unwrap(), b"\0\0\0\x0cMUNGE:AwQ=:\0");
    assert_eq!(decode_request("").unwrap(), b"\0\0\0\x01\0");
}

#[test]
fn a_decode_response_is_understood() {
    let credential = parse_decode_response(DECODE_BODY).unwrap();
    let want = Credential {
        uid: 7,
        gid: 8,
        only_for: None,
        address: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        encoded_at: 0x6b02_3634,
        decoded_at: 0x6b02_3635,
        payload: b"hello".to_vec(),
    };
    assert_eq!(credential, want);
}

#[test]
fn addresses_may_be_missing_or_of_either_family() {
    assert_eq!(parse_address(&[]).unwrap(), None);
    assert_eq!(parse_address(&[0; 4]).unwrap(), None);
    assert_eq!(parse_address(&[10, 0, 0, 1]).unwrap(), Some("10.0.0.1".parse().unwrap()));
    let v6: Ipv6Addr = "2001:db8::1".parse().unwrap();
    assert_eq!(parse_address(&v6.octets()).unwrap(), Some(v6.into()));
    assert!(matches!(parse_address(&[1; 5]), Err(MungeError::Protocol(_))));
}

#[test]
fn a_response_cut_short_or_too_long_is_a_violation() {
    for n in 0..DECODE_BODY.len() {
        let result = parse_decode_response(&DECODE_BODY[..n]);
        assert!(matches!(result, Err(MungeError::Protocol(_))), "{n}: {result:?}");
    }
    let longer = [DECODE_BODY, b"\0"].concat();
    assert!(matches!(parse_decode_response(&longer), Err(MungeError::Protocol(_))));

    let body = encode_body(0, b"", b"MUNGE:x:\0");
    assert_eq!(parse_encode_response(&body).unwrap(), "MUNGE:x:");
    for n in 0..body.len() {
        assert!(matches!(parse_encode_response(&body[..n]), Err(MungeError::Protocol(_))), "{n}");
    }
    for bad in [&b""[..], b"\0", b"MUNGE:x:", b"MUNGE\0:x:\0", b"MUNGE:\xff:\0", b"two words\0"] {
        let result = parse_encode_response(&encode_body(0, b"", bad));
        assert!(matches!(result, Err(MungeError::Protocol(_))), "{bad:?}: {result:?}");
    }
}

#[test]
fn lengths_that_lie_are_a_violation() {
    // A message and a credential of 4 GiB, in a body of a few bytes.
    assert!(matches!(parse_encode_response(b"\0\0\xff\xff\xff\xff"), Err(MungeError::Protocol(_))));
    assert!(matches!(parse_encode_response(b"\0\xff\0\0\0\0"), Err(MungeError::Protocol(_))));
}

#[test]
fn headers_are_checked() {
    let good = *b"\x00\x60\x6d\x4b\x04\x03\x00\x00\x00\x00\x19";
    assert_eq!(parse_header(&good, 3).unwrap(), 25);
    for (at, value) in [(0, 1), (3, 0), (4, 3), (4, 5), (5, 5), (5, 6)] {
        let mut bad = good;
        bad[at] = value;
        assert!(matches!(parse_header(&bad, 3), Err(MungeError::Protocol(_))), "{at} {value}");
    }
    let mut long = good;
    long[7..].copy_from_slice(&(MAX_MESSAGE as u32).to_be_bytes());
    assert_eq!(parse_header(&long, 3).unwrap(), MAX_MESSAGE);
    long[7..].copy_from_slice(&(MAX_MESSAGE as u32 + 1).to_be_bytes());
    assert!(matches!(parse_header(&long, 3), Err(MungeError::TooLong { length: 1_048_577 })));
}

#[test]
fn every_error_number_has_a_code() {
    assert_eq!(MungeCode::from_number(0), None);
    let mut seen = std::collections::HashSet::new();
    for n in 1..=u8::MAX {
        let code = MungeCode::from_number(n).unwrap();
        assert!(seen.insert(code), "{code:?} twice");
        assert_eq!(code == MungeCode::Other(n), n > 18);
    }
    let error = parse_encode_response(&encode_body(16, b"Rewound credential\0", b"")).unwrap_err();
    assert_eq!(error.code(), Some(MungeCode::Rewound));
    assert_eq!(error.to_string(), "munged refused: Rewound credential");
    assert!(MungeCode::Rewound.is_about_the_credential());
    assert!(!MungeCode::Socket.is_about_the_credential());
    assert_code(parse_encode_response(&encode_body(200, b"", b"")), MungeCode::Other(200));
    // A message can't play tricks on a terminal.
    let error = parse_encode_response(&encode_body(1, b"a\x1b[2J\xff\0", b"")).unwrap_err();
    assert_eq!(error.to_string(), "munged refused: a\\u{1b}[2J\u{fffd}");
}

#[test]
fn the_time_to_live_is_rounded_up_and_saturates() {
    assert_eq!(ttl_seconds(Duration::ZERO), 0);
    assert_eq!(ttl_seconds(Duration::from_nanos(1)), 1);
    assert_eq!(ttl_seconds(Duration::from_millis(1001)), 2);
    assert_eq!(ttl_seconds(Duration::MAX), u32::MAX);
}

#[test]
fn what_is_too_long_or_restricted_to_nobody_is_not_sent() {
    let munge = Munge::new("/nonexistent");
    let large = "x".repeat(MAX_MESSAGE);
    assert!(matches!(munge.encode(large.as_bytes(), None, Duration::ZERO), Err(MungeError::TooLong { .. })));
    assert!(matches!(munge.decode(&large), Err(MungeError::TooLong { .. })));
    assert_code(munge.encode(b"", Some(u32::MAX), Duration::ZERO), MungeCode::BadArgument);
}
