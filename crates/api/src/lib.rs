//! The one HTTP API of Ondeck: its types, its client, who may call it, and the site's configuration.
//!
//! An agent answers on a Unix socket, where the kernel says who calls, and on TCP, where MUNGE does. Over TCP both ends
//! prove themselves for every request: see [`envelope`].
//!
//! # Layout
//!
//! - [`wire`]: requests and answers, as JSON
//! - [`client`]: calling an agent
//! - [`envelope`]: what a MUNGE credential covers
//! - [`munge`]: speaking to munged
//! - [`config`]: the file `/etc/ondeck/ondeck.toml`

pub mod client;
pub mod config;
pub mod envelope;
pub mod munge;
pub mod wire;

pub use client::{CallError, Client, Endpoint};
pub use config::Config;
