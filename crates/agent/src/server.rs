//! The agent as a whole: what it begins with, which parts run, and its routes behind the two sockets of
//! [`ondeck_api::server`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ondeck_api::Config;
use ondeck_api::auth::Administrators;
use ondeck_api::host::{claim_directory, own_address, private_directory};
use ondeck_api::munge::Munge;
use ondeck_api::reload::{self, HangUps, ReadAgain, Reloaded};
use ondeck_api::server::{ListenError, Listening, Server, allow_many_files, stop_signal};
use ondeck_fleet::Fleet;

use crate::node::{Node, StartError};
use crate::{doubt, routes, watch};

/// Connections of root, and of others, that are served at the same time on each of the two sockets.
const CONNECTIONS: usize = 256;

/// Requests that are worked on at the same time; more wait. Each holds a thread, and most of them wait for a process.
const WORKERS: usize = 64;

/// Why an agent ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It could not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A socket can't be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Its runtime failed.
    #[error("{0}")]
    Runtime(#[from] std::io::Error),
}

/// Runs an agent until SIGTERM or SIGINT. RAM disks live on; the next agent finds them. At SIGHUP it takes over what it can
/// of the configuration that `read_again` gives.
///
/// # Errors
/// [`ServeError`].
pub fn serve(config: &Config, read_again: ReadAgain) -> Result<(), ServeError> {
    let _only = only_one(config)?;
    allow_many_files();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(WORKERS)
        .enable_all()
        .build()?;
    // From the beginning: a signal that comes while the agent looks at what an earlier one left must not end it.
    let hang_ups = runtime.block_on(async { HangUps::new() })?;
    let node = Arc::new(Node::start(config)?);
    let stop = Arc::new(AtomicBool::new(false));
    {
        let (node, stop) = (Arc::clone(&node), Arc::clone(&stop));
        std::thread::spawn(move || watch::watch(&node, &stop));
    }
    runtime.spawn(reload(Arc::clone(&node), config.clone(), hang_ups, read_again));
    runtime.spawn(doubt::look_after(Arc::clone(&node), Fleet::new(config)));
    let result = runtime.block_on(listen(config, node));
    stop.store(true, Ordering::Relaxed);
    // A step that is under way is not waited for: the next agent removes what is not complete.
    runtime.shutdown_background();
    // Nor is the watch: it may be looking at something that hangs.
    result
}

/// Takes over what it can of a changed configuration, at each SIGHUP.
async fn reload(node: Arc<Node>, config: Config, mut hang_ups: HangUps, read_again: ReadAgain) {
    let mut config = Arc::new(config);
    while hang_ups.next().await {
        let (node, read_again, known) = (Arc::clone(&node), Arc::clone(&read_again), Arc::clone(&config));
        let reload = tokio::task::spawn_blocking(move || -> Result<Reloaded, String> {
            let new = read_again().map_err(|error| error.to_string())?;
            let reloaded = known.reload_agent(&new);
            node.take_over(&reloaded.config).map_err(|error| error.to_string())?;
            Ok(reloaded)
        });
        match reload.await {
            Ok(Ok(reloaded)) => {
                reloaded.log("ondeck agent");
                config = Arc::new(reloaded.config);
            }
            Ok(Err(why)) => reload::log_refused(&why),
            Err(error) => reload::log_refused(&error.to_string()),
        }
    }
}

/// Keeps a second agent out of the same directory.
fn only_one(config: &Config) -> Result<std::fs::File, ServeError> {
    let path = config.agent.state.clone();
    match private_directory(&path).and_then(|()| claim_directory(&path)) {
        Ok(Some(lock)) => Ok(lock),
        Ok(None) => Err(StartError::Running { path }.into()),
        Err(source) => Err(StartError::State { path, source }.into()),
    }
}

async fn listen(config: &Config, node: Arc<Node>) -> Result<(), ServeError> {
    let name = node.name().clone();
    let tcp = match config.agent.listen {
        None => None,
        Some(listen) => {
            Some(SocketAddr::new(own_address(&name, Some(listen)).map_err(StartError::from)?, config.port))
        }
    };
    let listening = Listening {
        name: name.clone(),
        socket: config.agent.socket.clone(),
        tcp,
        connections: CONNECTIONS,
        munge: Munge::new(config.munge_socket.clone()),
        administrators: Administrators::new(&config.agent.administrators),
    };
    let server = Server::bind(routes::router(node), listening).await?;
    let socket = config.agent.socket.display();
    match tcp {
        Some(address) => tracing::info!(node = %name, %address, %socket, "agent is listening"),
        None => tracing::info!(node = %name, %socket, "agent is listening on its socket only"),
    }
    let mut signals = Ok(());
    server.serve(async { signals = stop_signal().await }).await?;
    if signals.is_ok() {
        tracing::info!("agent ends; its RAM disks live on");
    }
    Ok(signals?)
}
