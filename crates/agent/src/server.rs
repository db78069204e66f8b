//! The routes of an agent, behind the two sockets of [`ondeck_api::server`].
//!
//! Everything that touches the system runs on blocking threads.

use std::net::SocketAddr;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ondeck_api::Config;
use ondeck_api::auth::Administrators;
use ondeck_api::munge::Munge;
use ondeck_api::reload::{self, HangUps, ReadAgain, Reloaded};
use ondeck_api::server::{
    ListenError, Listening, Reply, Request, Server, Service, allow_many_files, blocking, stop_signal,
};
use ondeck_api::wire::{Refusal, RefusalCode, Release, StepRequest};
use ondeck_core::{NodeName, RamDiskId};

use crate::authority::Order;
use crate::doubt;
use crate::fleet::Fleet;
use crate::node::{Node, StartError, own_address};
use crate::watch;

/// Connections of root, and of others, that are served at the same time on each of the two sockets.
const CONNECTIONS: usize = 256;

/// Requests that are worked on at the same time; more wait. Each holds a thread, and most of them wait for a process.
const WORKERS: usize = 64;

/// The longest that a request waits for the end of a task.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

struct Agent {
    node: Arc<Node>,
}

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
    let agent = Arc::new(Agent { node });
    let stop = Arc::new(AtomicBool::new(false));
    {
        let (agent, stop) = (Arc::clone(&agent), Arc::clone(&stop));
        std::thread::spawn(move || watch::watch(&agent.node, &stop));
    }
    runtime.spawn(reload(Arc::clone(&agent.node), config.clone(), hang_ups, read_again));
    runtime.spawn(doubt::look_after(Arc::clone(&agent.node), Fleet::new(config)));
    let result = runtime.block_on(listen(config, agent));
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
    let open = || -> std::io::Result<std::fs::File> {
        crate::ramdisk::private_directory(&path)?;
        std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock"))
    };
    let file = open().map_err(|source| StartError::State { path: path.clone(), source })?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StartError::Running { path }.into()),
        Err(error) => Err(StartError::State { path, source: error.into() }.into()),
    }
}

async fn listen(config: &Config, agent: Arc<Agent>) -> Result<(), ServeError> {
    let node = agent.node.name().clone();
    let tcp = match config.agent.listen {
        None => None,
        Some(listen) => Some(SocketAddr::new(own_address(&node, Some(listen))?, config.port)),
    };
    let listening = Listening {
        socket: config.agent.socket.clone(),
        tcp,
        connections: CONNECTIONS,
        munge: Munge::new(config.munge_socket.clone()),
        administrators: Administrators::new(&config.agent.administrators),
    };
    let server = Server::bind(agent, listening).await?;
    let socket = config.agent.socket.display();
    match tcp {
        Some(address) => tracing::info!(%node, %address, %socket, "agent is listening"),
        None => tracing::info!(%node, %socket, "agent is listening on its socket only"),
    }
    let mut signals = Ok(());
    server.serve(async { signals = stop_signal().await }).await?;
    if signals.is_ok() {
        tracing::info!("agent ends; its RAM disks live on");
    }
    Ok(signals?)
}

impl Service for Agent {
    fn name(&self) -> &NodeName {
        self.node.name()
    }

    async fn route(self: Arc<Self>, request: Request) -> Result<Reply, Refusal> {
        let method = request.method.as_str();
        match request.segments()?.as_slice() {
            ["ramdisks", id, "tasks"] if method == "DELETE" => {
                request.caller.must_be_administrator()?;
                Arc::clone(&self).permit_task(&request, &parse_id(id)?).await?;
                // Without a beginning all of them are meant; one that is not understood must not mean that.
                let beginning = text_of(&request, "beginning")?;
                self.node.stop_tasks(&parse_id(id)?, &beginning).await?;
                Reply::json(&())
            }
            ["ramdisks", id, "tasks", name] if matches!(method, "GET" | "POST" | "DELETE") => {
                request.caller.must_be_administrator()?;
                let (id, name) = (parse_id(id)?, (*name).to_owned());
                if method != "GET" {
                    Arc::clone(&self).permit_task(&request, &id).await?;
                }
                let report = match method {
                    "POST" => {
                        let wanted = request.json("the task")?;
                        let started = move || self.node.start_task(&id, &name, wanted);
                        blocking(started).await??.report()
                    }
                    "GET" => self.node.task(&id, &name)?.wait(patience(&request)?).await,
                    _ => self.node.stop_task(&id, &name).await?,
                };
                Reply::json(&report)
            }
            _ => blocking(move || self.answer(request)).await?,
        }
    }
}

impl Agent {
    /// Refuses what is not of the scheduler in charge; that one's counter is written to disk.
    async fn permit_task(self: Arc<Self>, request: &Request, id: &RamDiskId) -> Result<(), Refusal> {
        let (authority, id) = (request.authority.clone(), id.clone());
        blocking(move || self.node.permit(&id, authority.as_ref(), Order::Other, None)).await?
    }

    fn answer(&self, request: Request) -> Result<Reply, Refusal> {
        let node = &self.node;
        let caller = request.caller;
        match (request.method.as_str(), request.segments()?.as_slice()) {
            ("GET", ["node"]) => Reply::json(&node.report()?),
            ("GET", ["ramdisks"]) => Reply::json(&node.reports(caller)),
            ("GET", ["ramdisks", id]) => Reply::json(&node.report_of(&parse_id(id)?, caller)?),
            ("GET", ["ramdisks", id, "has"]) => Reply::json(&node.has(&parse_id(id)?, caller)?),
            ("GET", ["ramdisks", id, "witness"]) => Reply::json(&node.witness(&parse_id(id)?, caller)?),
            ("GET", ["ramdisks", id, "names"]) => {
                caller.must_be_administrator()?;
                Reply::json(&node.names(&parse_id(id)?, &text_of(&request, "slots")?)?)
            }
            ("POST", ["ramdisks", id, "steps"]) => {
                caller.must_be_administrator()?;
                let step: StepRequest = request.json("the step")?;
                let id = parse_id(id)?;
                node.permit(&id, request.authority.as_ref(), Order::Other, Some(&step.layout))?;
                Reply::json(&node.step(&id, step, request.secret)?)
            }
            ("POST", ["ramdisks", id, "guard"]) => {
                caller.must_be_administrator()?;
                let id = parse_id(id)?;
                node.permit(&id, request.authority.as_ref(), Order::Other, None)?;
                Reply::json(&node.guard(&id)?)
            }
            ("POST", ["ramdisks", id, "release"]) => {
                caller.must_be_administrator()?;
                let (id, release): (_, Release) = (parse_id(id)?, request.json("the release")?);
                let order = match release {
                    Release::StagedOut { .. } => Order::Other,
                    Release::Abandoned { .. } => Order::End,
                };
                node.permit(&id, request.authority.as_ref(), order, None)?;
                Reply::json(&node.release(&id, &release, caller)?)
            }
            ("DELETE", ["ramdisks", id]) => {
                caller.must_be_administrator()?;
                let id = parse_id(id)?;
                node.permit(&id, request.authority.as_ref(), Order::End, None)?;
                Reply::json(&node.destroy(&id)?)
            }
            ("DELETE", ["ramdisks", id, "shown"]) => {
                caller.must_be_root_here()?;
                Reply::json(&node.hide_everywhere(&parse_id(id)?)?)
            }
            ("POST", ["ramdisks", id, "begins"]) => {
                caller.must_be_root_here()?;
                Reply::json(&node.begins(&parse_id(id)?)?)
            }
            ("POST", ["authority"]) => {
                caller.must_be_administrator()?;
                Reply::json(&node.claim(&request.json("the claim")?)?)
            }
            ("GET", ["views"]) => {
                let path = request.field("path").ok_or_else(|| {
                    Refusal::new(RefusalCode::Malformed, "a view is asked for with ?path=/ABSOLUTE/PATH")
                })?;
                Reply::json(&node.view(&PathBuf::from(std::ffi::OsString::from_vec(path)), caller)?)
            }
            _ => Err(request.no_such_path()),
        }
    }
}

/// A text of the request; empty if it has none of this name.
fn text_of(request: &Request, name: &str) -> Result<String, Refusal> {
    String::from_utf8(request.field(name).unwrap_or_default())
        .map_err(|_| Refusal::new(RefusalCode::Malformed, format!("?{name}= is not UTF-8")))
}

/// How long a caller is willing to wait: `?wait=MS`.
fn patience(request: &Request) -> Result<Duration, Refusal> {
    let Some(text) = request.field("wait") else { return Ok(Duration::ZERO) };
    let wait = String::from_utf8_lossy(&text)
        .parse()
        .map_err(|_| Refusal::new(RefusalCode::Malformed, "the time to wait is ?wait=MILLISECONDS"))?;
    Ok(Duration::from_millis(wait).min(LONGEST_WAIT))
}

fn parse_id(text: &str) -> Result<RamDiskId, Refusal> {
    text.parse().map_err(|error: ondeck_core::allocation::NameError| {
        Refusal::new(RefusalCode::Malformed, error.to_string())
    })
}
