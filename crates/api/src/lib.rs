//! The one HTTP API of Ondeck: its types, its client, its server, who may call it, and the site's configuration.
//!
//! A daemon answers on a Unix socket, where the kernel says who calls, and on TCP, where MUNGE does. Over TCP both ends
//! prove themselves for every request: see [`envelope`].
//!
//! # Layout
//!
//! - [`wire`]: requests and answers, as JSON
//! - [`client`]: calling a daemon
//! - [`server`]: being one: two sockets before axum's router, and what its handlers take; [`auth`]: who calls, and what they
//!   may
//! - [`envelope`]: what a MUNGE credential covers
//! - [`munge`]: speaking to munged
//! - [`scheduler`]: what the scheduler is asked; [`schema`]: how its description tells of `ondeck-core`'s types
//! - [`config`]: the file `/etc/ondeck/ondeck.toml`; [`host`]: this machine, as a daemon on it needs to know it

pub mod auth;
pub mod client;
pub mod config;
pub mod envelope;
pub mod host;
pub mod munge;
pub mod reload;
pub mod scheduler;
pub mod schema;
pub mod server;
pub mod wire;

pub use client::{CallError, Client, Endpoint, in_query};
pub use config::Config;
pub use host::host_name;
