//! The names of what is not complete yet on the backing directory.

use std::ffi::OsString;

use rustix::io::Errno;

use crate::message::Ino;
use crate::store::Store;

pub use crate::status::UNFINISHED;

/// The name of what is not complete yet, in the cache with this store.
pub fn unfinished(store: &Store, ino: Ino) -> OsString {
    format!("{UNFINISHED}{}-{ino:x}", store.id()).into()
}

/// Another such name, which nobody can have taken on purpose.
///
/// # Errors
/// The kernel's, if it has no random number.
pub fn unforeseen(store: &Store, ino: Ino) -> Result<OsString, Errno> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let mut name = unfinished(store, ino);
    name.push(format!("-{:x}", u64::from_ne_bytes(random)));
    Ok(name)
}
