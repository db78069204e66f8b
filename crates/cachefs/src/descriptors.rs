//! How many files the server of a cache may have open.

use rustix::process::{Resource, getrlimit};

/// With fewer no cache works: its store's directories, and the files of one round of write-back, are open together.
pub const LEAST: u64 = 1024;

/// So many of them are for those.
const RESERVED: u64 = 700;

/// How many of `most` files may be kept open so that the next use need not open one: a part of what the process may have.
pub fn share(most: usize) -> usize {
    let spare = limit().saturating_sub(RESERVED) / 4;
    most.min(usize::try_from(spare).unwrap_or(usize::MAX)).max(8)
}

/// How many this process may have.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}
