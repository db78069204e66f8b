//! The names of what is not complete yet on the backing directory.

use std::ffi::OsString;

use crate::message::Ino;
use crate::store::Store;

/// They begin so. Programs don't see them, and can't make them.
pub const UNFINISHED: &str = ".ondeck-cache-";

/// The name of what is not complete yet, in the cache with this store.
pub fn unfinished(store: &Store, ino: Ino) -> OsString {
    format!("{UNFINISHED}{}-{ino:x}", store.id()).into()
}
