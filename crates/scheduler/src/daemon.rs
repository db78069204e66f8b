//! The daemon as a whole: what it begins with, and which parts run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use ondeck_api::Config;
use ondeck_api::auth::Administrators;
use ondeck_api::host::{HostError, host_name, own_address};
use ondeck_api::munge::Munge;
use ondeck_api::reload::{HangUps, ReadAgain};
use ondeck_api::server::{ListenError, Listening, Server};
use ondeck_core::schedule::{Action, Identity, Node, Nodes, Schedule};
use ondeck_core::{Epoch, Incarnation, NodeName};
use ondeck_fleet::Fleet;
use ondeck_wlm::{Slurm, SlurmSettings};

use crate::charge::{self, Charge, Conflict, NothingToTakeOver};
use crate::clock::{self, KeptClock};
use crate::context::{Beginning, Context, Events};
use crate::dispatch::Dispatcher;
use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::serve::router;
use crate::store::{Store, StoreError};
use crate::{compute, heavy_jobs, inventory, layouts, load_monitor, node_monitor, queue, reload, upkeep};

/// Connections that are held at the same time on each socket; a Prolog holds one while its job's RAM disk is mounted.
const CONNECTIONS: usize = 8192;

/// Why a node that only old jobs use lends nothing.
const NOT_CONFIGURED: &str = "it is no longer in the configuration";

/// Why the daemon ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The configuration makes no sense.
    #[error("the configuration: {0}")]
    Config(String),
    /// The journal can't be used.
    #[error("{}{}", .0, .0.remedy())]
    Store(#[from] StoreError),
    /// It can't be told what this host is called.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The agents obey somebody else, or have seen a later state of the journal.
    #[error("{0}")]
    NotInCharge(Box<Conflict>),
    /// There is nobody whose place could be taken.
    #[error("{0}")]
    NothingToTakeOver(NothingToTakeOver),
    /// Nobody has confirmed the take-over.
    #[error("nothing was changed")]
    NotConfirmed,
    /// One of its sockets can't be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Its runtime can't be started.
    #[error("{0}")]
    Runtime(#[from] std::io::Error),
}

/// Runs the daemon until SIGTERM or SIGINT. What it has begun goes on; the next daemon takes it up. At SIGHUP it takes over
/// what it can of the configuration that `read_again` gives.
///
/// If the agents obey another journal's scheduler, or have seen a later state of this journal, `take_over` is asked whether
/// that is replaced; if neither is so, the daemon does not run.
///
/// # Errors
/// [`ServeError`].
pub fn serve(
    config: &Config,
    read_again: ReadAgain,
    take_over: Option<&dyn Fn(&Conflict) -> bool>,
) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // From the beginning: a signal that comes while the agents are asked must not end it.
    let hang_ups = runtime.block_on(async { HangUps::new() })?;
    let site = config.scheduler.site(&config.nodes).map_err(ServeError::Config)?;
    let name = host_name().map_err(HostError::from)?;
    let mut store = Store::open(&config.scheduler.state)?;
    let (kept_clock, last) = store.clock()?;
    let clock = clock::begin(kept_clock, last);
    store.keep_clock(clock)?;
    let mut kept = store.load()?;
    let mut nodes = known_nodes(config, std::mem::take(&mut kept.nodes));
    let mut identity = store.identity()?;
    let workload_manager = Slurm::new(SlurmSettings {
        bin_dir: config.slurm.bin_dir.clone(),
        conf: config.slurm.conf.clone(),
        timeout: config.slurm.timeout,
    });
    let said = if config.scheduler.simulate.is_some() {
        BTreeMap::new()
    } else {
        let mut asked: BTreeSet<NodeName> = nodes.keys().cloned().collect();
        if take_over.is_some() {
            // One that has had no work for long may obey a journal of which no RSA node knows.
            match runtime.block_on(workload_manager.all_nodes()) {
                Ok(compute) => asked.extend(compute),
                Err(error) => {
                    tracing::warn!(%error, "the agents of compute nodes are not asked whom they obey")
                }
            }
        }
        runtime.block_on(charge::ask_all(&Fleet::new(config), &asked))
    };
    if let Some(conflict) = Conflict::of(&identity, &said, take_over.is_some()) {
        match take_over {
            None => return Err(ServeError::NotInCharge(Box::new(conflict))),
            Some(confirm) if !confirm(&conflict) => return Err(ServeError::NotConfirmed),
            Some(_) => {
                charge::take_over(&mut store, &conflict, &said, &mut kept.jobs, &mut nodes)?;
                identity = store.identity()?;
                tracing::warn!("took over; what the agents have counts");
            }
        }
    } else if take_over.is_some() {
        return Err(ServeError::NothingToTakeOver(NothingToTakeOver::of(&said)));
    }
    let reports = || said.values().filter_map(|answer| answer.as_ref().ok());
    // Of a requeued job the queue shows another time of submission than its RAM disk.
    let tagged = reports().flat_map(|(_, ramdisks)| ramdisks).filter_map(|local| {
        let tag = local.layout.job.as_ref()?;
        let noted = [tag.job.submitted].into();
        Some((tag.job, Identity { uid: local.layout.owner.uid, noted, restarts: tag.job.restarts }))
    });
    let tagged: Vec<(Incarnation, Identity)> = tagged.collect();
    let newest = reports().map(|(report, _)| Epoch(report.newest_epoch)).max().unwrap_or(Epoch(0));
    let (jobs, held) = (kept.jobs.len(), kept.jobs.iter().filter(|job| job.results).count());
    tracing::info!(jobs, with_results = held, nodes = nodes.len(), "the journal was read");
    let schedule = Schedule::new(site, kept.jobs, nodes, kept.last_order, kept.last_epoch);
    let schedule = schedule
        .with_leftover_on_compute(kept.leftover_on_compute)
        .with_places_lost(kept.places_lost)
        .with_former(kept.former)
        .with_former(tagged);
    let schedule = schedule.with_beginning(identity.began).after_epoch(newest);
    let resume = schedule.resume();
    let charge = Arc::new(Charge::new(identity)?);
    let tcp = match config.scheduler.listen {
        None => None,
        listen => Some((own_address(&name, listen)?, config.scheduler.port).into()),
    };
    let (provider, doubter) = (Arc::clone(&charge), Arc::clone(&charge));
    let fleet = Fleet::new(config)
        .with_authority(Arc::new(move || provider.authority()))
        .with_doubts(move |node| doubter.doubt(node));
    let metrics: Arc<Metrics> = Arc::default();
    let (calls, commands) = (Arc::clone(&metrics), Arc::clone(&metrics));
    let fleet =
        fleet.with_observer(Arc::new(move |method, path, took, error| calls.call(method, path, took, error)));
    let workload_manager = workload_manager
        .with_observer(move |command, took, answered| commands.command(command, took, answered));
    let journal = Journal::new(store)?;
    let workload_manager = Arc::new(workload_manager);
    let begin = Beginning { name, fleet, charge, workload_manager, metrics, schedule, journal };
    let dispatcher = Arc::new(Dispatcher::new()?);
    let context = Arc::new(Context::new(begin, config, Arc::clone(&dispatcher) as Arc<dyn Events>));
    let listening = Listening {
        name: context.name.clone(),
        socket: config.scheduler.socket.clone(),
        tcp,
        connections: CONNECTIONS,
        munge: Munge::new(config.munge_socket.clone()),
        administrators: Administrators::new(&config.scheduler.administrators),
    };
    runtime.spawn(reload::watch(Arc::clone(&context), hang_ups, read_again));
    let result = runtime.block_on(run(context, &dispatcher, listening, resume, clock));
    runtime.shutdown_background();
    result
}

/// The RSA nodes that lend, and those that something is left of.
fn known_nodes(config: &Config, kept: Vec<(NodeName, Node)>) -> Nodes {
    let mut nodes: Nodes = kept.into_iter().collect();
    let mut configured: BTreeSet<NodeName> = BTreeSet::new();
    for (pool, members) in config.scheduler.pools(&config.nodes) {
        for node in members.nodes {
            let known = nodes.entry(node.clone()).or_insert_with(|| Node::new(&pool));
            known.pool.clone_from(&pool);
            // Its agent has not answered this daemon yet; until it is taken for lost, what is on it counts as there.
            if config.scheduler.simulate.is_some() {
                (known.up, known.capacity) = (true, ondeck_core::Bytes(1 << 40));
            }
            configured.insert(node);
        }
    }
    // A node that the configuration no longer has lends nothing new, but what is on it is not forgotten.
    nodes.retain(|name, node| {
        configured.contains(name) || !node.promised.is_empty() || !node.leftover_on_rsa.is_empty()
    });
    for (name, node) in &mut nodes {
        if !configured.contains(name) && node.drained.is_empty() {
            node.drained = NOT_CONFIGURED.into();
        } else if configured.contains(name) && node.drained == NOT_CONFIGURED {
            node.drained.clear();
        }
    }
    nodes
}

/// Begins all that goes on by itself.
pub(crate) fn begin_parts(context: &Arc<Context>, dispatcher: &Dispatcher, resume: Vec<Action>) {
    dispatcher.resume(context, resume);
    tokio::spawn(upkeep::keep_time(Arc::clone(context)));
    tokio::spawn(upkeep::forget(Arc::clone(context)));
    tokio::spawn(queue::look(Arc::clone(context)));
    if context.config().scheduler.simulate.is_none() {
        tokio::spawn(Arc::clone(&context.charge).watch(context.fleet.clone()));
        tokio::spawn(node_monitor::look(Arc::clone(context)));
        tokio::spawn(inventory::look(Arc::clone(context)));
        layouts::resume(context);
        tokio::spawn(layouts::look_after(Arc::clone(context)));
        tokio::spawn(load_monitor::watch(Arc::clone(context)));
        tokio::spawn(heavy_jobs::look_after(Arc::clone(context)));
        let (manager, fleet) = (Arc::clone(&context.workload_manager), context.fleet.clone());
        tokio::spawn(compute::look(manager, fleet, Arc::clone(&context.compute)));
    }
}

/// Runs all parts until the daemon is to end.
async fn run(
    context: Arc<Context>,
    dispatcher: &Dispatcher,
    listening: Listening,
    resume: Vec<Action>,
    clock: KeptClock,
) -> Result<(), ServeError> {
    let server = Server::bind(router(Arc::clone(&context)), listening).await?;
    begin_parts(&context, dispatcher, resume);
    let keeper = Arc::clone(&context);
    tokio::spawn(clock::watch(clock, move |clock| keeper.journal.write(|store| store.keep_clock(clock))));
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    };
    let began = Instant::now();
    let closing = Arc::clone(&context);
    server.serve(stop).await?;
    // One file is left, which can be copied. What is still under way writes nothing into it.
    tokio::select! {
        closed = tokio::task::spawn_blocking(move || closing.journal.close()) => {
            if let Ok(Err(error)) = closed {
                tracing::warn!(%error, "the files beside the journal belong to it");
            }
        }
        fault = upkeep::is_without_journal(&context) => {
            tracing::error!(
                fault,
                "ends, though the journal can't be written: what was decided last is not kept and was not done, and is \
                 decided again at the next start"
            );
            // A thread still tries to write it, and would be waited for.
            std::process::exit(i32::from(ondeck_core::exit::FAILED));
        }
    }
    tracing::info!(seconds = began.elapsed().as_secs(), "ends; RAM disks and transfers go on");
    Ok(())
}
