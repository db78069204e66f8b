//! The exchange, with a stand-in for munged.

use std::io::Write as _;
use std::io::{self, Read as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketType};

use super::{TempDir, encode_body};
use crate::munge::protocol::{ENCODE_RESPONSE, HEADER_LEN, message};
use crate::munge::{ATTEMPTS, MAX_MESSAGE, Munge, MungeError};

/// Reads a request; its retry byte and body.
pub(super) fn read_request(stream: &mut UnixStream) -> (u8, Vec<u8>) {
    let mut header = [0; HEADER_LEN];
    stream.read_exact(&mut header).unwrap();
    let mut body = vec![0; u32::from_be_bytes(header[7..].try_into().unwrap()) as usize];
    stream.read_exact(&mut body).unwrap();
    (header[6], body)
}

/// A client with a short time limit, of a listener that handles its connections in turn, one by each
/// function; then the listener goes away. Joining the thread gives the functions' results.
fn stand_in<T: Send + 'static>(
    connections: Vec<fn(UnixStream) -> T>,
) -> (Munge, thread::JoinHandle<Vec<T>>, TempDir) {
    let dir = TempDir::new();
    let path = dir.0.join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let handle = thread::spawn(move || {
        connections.into_iter().map(|handle| handle(listener.accept().unwrap().0)).collect()
    });
    (Munge { socket: path, timeout: Duration::from_secs(1) }, handle, dir)
}

fn answer(mut stream: UnixStream) -> u8 {
    let (retry, _) = read_request(&mut stream);
    let body = encode_body(0, b"", b"MUNGE:x:\0");
    stream.write_all(&message(ENCODE_RESPONSE, 0, &body)).unwrap();
    retry
}

fn drop_after_reading(mut stream: UnixStream) -> u8 {
    read_request(&mut stream).0
}

fn drop_within_the_response(mut stream: UnixStream) -> u8 {
    let (retry, _) = read_request(&mut stream);
    stream.write_all(&message(ENCODE_RESPONSE, 0, b"\0\0")[..9]).unwrap();
    retry
}

fn drop_at_once(_: UnixStream) -> u8 {
    99
}

#[test]
fn a_dropped_request_is_repeated_and_says_so() {
    let (munge, thread, _dir) = stand_in(vec![drop_after_reading, drop_within_the_response, answer]);
    assert_eq!(munge.encode(b"", None, Duration::ZERO).unwrap(), "MUNGE:x:");
    assert_eq!(thread.join().unwrap(), [0, 1, 2]);
}

#[test]
fn a_request_that_was_never_read_is_no_retry() {
    // More than the socket buffers, so that the client can't have written it all.
    let large = vec![7; MAX_MESSAGE - 100];
    let (munge, thread, _dir) = stand_in(vec![drop_at_once, drop_at_once, answer]);
    assert_eq!(munge.encode(&large, None, Duration::ZERO).unwrap(), "MUNGE:x:");
    assert_eq!(thread.join().unwrap(), [99, 99, 0]);
}

#[test]
fn retries_are_bounded() {
    let (munge, thread, _dir) = stand_in(vec![drop_after_reading; 5]);
    let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
    assert!(matches!(error, MungeError::NoAnswer { attempts: ATTEMPTS, .. }), "{error:?}");
    assert!(error.to_string().ends_with("did not answer (5 attempts): it hung up"), "{error}");
    assert_eq!(thread.join().unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn a_munged_that_dies_in_between_is_unreachable() {
    let (munge, thread, _dir) = stand_in(vec![drop_after_reading]);
    let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
    assert!(matches!(error, MungeError::Unreachable { .. } | MungeError::NoAnswer { .. }), "{error:?}");
    thread.join().unwrap();
}

fn trickle(mut stream: UnixStream) -> u8 {
    let (retry, _) = read_request(&mut stream);
    for byte in message(ENCODE_RESPONSE, 0, &[0; 100]) {
        thread::sleep(Duration::from_millis(50));
        if net::send(&stream, &[byte], SendFlags::NOSIGNAL).is_err() {
            break;
        }
    }
    retry
}

fn say_nothing(mut stream: UnixStream) -> u8 {
    let (retry, _) = read_request(&mut stream);
    let _ = stream.read(&mut [0]); // until the client hangs up
    retry
}

#[test]
fn silence_and_trickles_time_out_and_are_not_repeated() {
    for handle in [trickle as fn(UnixStream) -> u8, say_nothing] {
        let (munge, thread, _dir) = stand_in(vec![handle]);
        let begin = Instant::now();
        let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
        let MungeError::NoAnswer { attempts: 1, source, .. } = &error else { panic!("{error:?}") };
        assert_eq!(source.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
        thread.join().unwrap();
    }
}

#[test]
fn a_stopped_munged_with_a_full_queue_times_out() {
    let dir = TempDir::new();
    let path = dir.0.join("s");
    let listener = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    net::listen(&listener, 0).unwrap();
    let _fills_the_queue = UnixStream::connect(&path).unwrap();
    let munge = Munge { socket: path, timeout: Duration::from_millis(300) };
    let begin = Instant::now();
    let error = munge.decode("MUNGE:x:").unwrap_err();
    let MungeError::Unreachable { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.kind(), io::ErrorKind::TimedOut, "{error}");
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}

fn answer_nonsense(mut stream: UnixStream) -> u8 {
    let (retry, _) = read_request(&mut stream);
    stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    retry
}

fn answer_at_length(mut stream: UnixStream) -> u8 {
    let (retry, _) = read_request(&mut stream);
    stream.write_all(b"\x00\x60\x6d\x4b\x04\x03\x00\xff\xff\xff\xff").unwrap();
    retry
}

#[test]
fn nonsense_is_not_repeated() {
    let (munge, thread, _dir) = stand_in(vec![answer_nonsense]);
    let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
    assert!(matches!(error, MungeError::Protocol(_)), "{error:?}");
    assert_eq!(thread.join().unwrap(), [0]);

    let (munge, thread, _dir) = stand_in(vec![answer_at_length]);
    let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
    assert!(matches!(error, MungeError::TooLong { length: 0xffff_ffff }), "{error:?}");
    thread.join().unwrap();
}

#[test]
fn no_munged_is_unreachable_and_the_error_asks_whether_it_runs() {
    let dir = TempDir::new();
    let error = Munge::new(dir.0.join("none")).decode("MUNGE:x:").unwrap_err();
    assert!(matches!(error, MungeError::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().ends_with("is munged running?"), "{error}");
    assert!(error.to_string().contains("/none: "), "{error}");

    let file = dir.0.join("file");
    std::fs::write(&file, "").unwrap();
    let long = dir.0.join("x".repeat(200));
    for path in [dir.0.clone(), file, long, PathBuf::new()] {
        let error = Munge::new(&path).decode("MUNGE:x:").unwrap_err();
        assert!(matches!(error, MungeError::Unreachable { .. }), "{path:?}: {error:?}");
    }
}
