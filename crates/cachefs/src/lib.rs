//! The transparent cache: a write-back cache in RAM over any directory.
//!
//! # Layout
//!
//! - `message`: what a client asks of the owner of a cache, and is answered
//! - `settings`, `status`: what can be chosen, and what can be seen
//! - `owner`: the owner, which has the names, the data, the journal and the write-back
//! - `backing`: the backing directory, reached as the cache's user
//! - `store`: the RAM that the data lies in, and the journal
//! - `serve`: a client: the FUSE server of a mount
//! - `instance`: a cache on this machine: its directory, its mount, the process that serves it, and how it is asked

mod acl;
mod backing;
mod descriptors;
pub mod instance;
pub mod message;
mod owner;
pub mod serve;
pub mod settings;
pub mod status;
mod store;

pub use owner::{OpenError, Owner};
