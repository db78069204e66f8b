//! The commands around the scheduler: `ondeck serve` is one, the others ask it.
//!
//! - `serve`: the daemon
//! - `status`, `job`, `node`, `pool`: what people see and order
//! - `burst_buffer`: what Slurm's burst-buffer plugin calls
//! - `hook`: what Prolog and Epilog call; `here`: what they do without the scheduler

pub mod burst_buffer;
pub mod here;
pub mod hook;
pub mod job;
pub mod node;
pub mod pool;
pub mod serve;
pub mod status;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use ondeck_api::host_name;
use ondeck_api::wire::{RefusalCode, VERSION};
use ondeck_api::{CallError, Client, Config, Endpoint};
use ondeck_core::exit;
use ondeck_core::text::{MESSAGE, plain};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long the scheduler may take to answer a question.
const PATIENCE: Duration = Duration::from_secs(10);

/// The scheduler, as this machine reaches it.
pub struct Scheduler {
    client: Client,
    endpoint: Endpoint,
    runtime: tokio::runtime::Runtime,
}

impl Scheduler {
    /// Finds it by the configuration.
    pub fn find(config: &Config) -> Result<Scheduler> {
        let site = &config.scheduler;
        let here = match (&site.host, host_name()) {
            (None, _) => true,
            (Some(host), Ok(own)) => *host == own,
            (Some(_), Err(_)) => false,
        };
        let endpoint = match &site.host {
            Some(host) if !here => Endpoint::Node { name: host.clone(), port: site.port },
            _ => Endpoint::Socket(site.socket.clone()),
        };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
        Ok(Scheduler { client: Client::new(&config.munge_socket), endpoint, runtime })
    }

    /// Asks it something.
    pub fn ask<A: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
        patience: Option<Duration>,
    ) -> Result<A, CallError> {
        let path = format!("/{VERSION}/{path}");
        let limit = patience.unwrap_or(PATIENCE);
        self.runtime.block_on(self.client.call(&self.endpoint, method, &path, body, None, limit))
    }

    /// Asks it for text.
    pub fn ask_text(&self, path: &str) -> Result<String, CallError> {
        let path = format!("/{VERSION}/{path}");
        self.runtime.block_on(self.client.call_text(&self.endpoint, "GET", &path, PATIENCE))
    }
}

/// What tasks, jobs and nodes say, for a terminal.
pub fn shown(text: &str) -> String {
    plain(text, MESSAGE)
}

/// What is said when a call failed, for people.
pub fn explain(error: &CallError) -> String {
    match error {
        CallError::Unreachable { endpoint: Endpoint::Socket(path), why, .. } => format!(
            "no scheduler at {} ({why}); is `ondeck serve` running here, or should `host` in the part [scheduler] of the \
             configuration name another machine?",
            path.display()
        ),
        CallError::Unreachable { endpoint: Endpoint::Node { name, port }, why, .. } => {
            format!("no scheduler at {name} port {port} ({why}); is `ondeck serve` running there?")
        }
        CallError::Refused { refusal, .. } => shown(&refusal.message),
        other => shown(&other.to_string()),
    }
}

/// Ends a command with the right code.
pub fn end(command: &str, result: Result<u8>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let refused = error.downcast_ref::<CallError>().and_then(CallError::code);
            let text = match error.downcast_ref::<CallError>() {
                Some(error) => explain(error),
                None => format!("{error:#}"),
            };
            eprintln!("ondeck {command}: {text}");
            match refused {
                Some(RefusalCode::Conflict | RefusalCode::NotFound | RefusalCode::Forbidden) => {
                    ExitCode::from(exit::USAGE)
                }
                _ => ExitCode::from(exit::FAILED),
            }
        }
    }
}

pub fn load(path: Option<&Path>) -> Result<Config> {
    Ok(Config::load(path)?)
}
