//! What a client of munged must do, against stand-ins and the real one.

mod exchange;
mod protocol;
pub(crate) mod real_munged;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::munge::protocol::put_length;
use crate::munge::{MungeCode, MungeError};

fn encode_body(error: u8, text: &[u8], credential: &[u8]) -> Vec<u8> {
    let mut body = vec![error, text.len() as u8];
    body.extend_from_slice(text);
    put_length(&mut body, credential.len());
    body.extend_from_slice(credential);
    body
}

#[track_caller]
fn assert_code<T: std::fmt::Debug>(result: Result<T, MungeError>, code: MungeCode) {
    match result {
        Err(MungeError::Refused { code: got, message }) if got == code => {
            assert!(!message.is_empty() && !message.contains('\0'), "{message:?}");
        }
        other => panic!("wanted {code:?}, got {other:?}"),
    }
}

/// A directory that goes away with the guard.
struct TempDir(PathBuf);

impl TempDir {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("munge-test-{}-{n}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
