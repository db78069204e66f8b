//! `ondeck ramdisk`: a parallel RAM disk by hand.

use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ondeck_api::Config;
use ondeck_api::host_name;
use ondeck_api::wire::{LocalReport, Release};
use ondeck_core::allocation::Simulation;
use ondeck_core::{EngineKind, NodeName, Owner, RamDiskId, RamDiskName, duration, exit};
use ondeck_fleet::{BuildError, Fleet, FleetSnapshot, MountAt, NodeFault, Plan, Size};
use ondeck_ramdisk::device::RAM;
use ondeck_transfer::credentials::User;
use serde_json::json;

use crate::display::count;

/// Build, look at and destroy filesystems in the RAM of one or more nodes
///
/// Every node runs `ondeck agent`. Nodes are named as their host names say; without --nodes, the configuration's
/// `nodes` are asked, and without those this machine.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct RamdiskArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml if it is there]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: RamdiskCommand,
}

#[derive(Subcommand)]
enum RamdiskCommand {
    Create(CreateArgs),
    List(ListArgs),
    Status(StatusArgs),
    Destroy(DestroyArgs),
    /// Show what the nodes can lend
    #[command(about = "Show what the nodes can lend")]
    Nodes(ListArgs),
}

const EXAMPLES: &str = "Examples:
  ondeck ramdisk create fast --nodes n1,n2 --size 8GiB --engine gluster --mount n3,n4:/mnt/fast
  ondeck ramdisk create scratch --size max --mount :/mnt/scratch     the RAM of this machine, as tmpfs
  ondeck ramdisk list
  ondeck ramdisk status fast
  ondeck ramdisk destroy fast
  ondeck ramdisk nodes --nodes n1,n2                                 what the nodes can lend

Exit codes: 0 done, and whole; 1 it is not whole, or something is left; 2 wrong usage or refused, nothing was begun;
3 it failed and was undone.";

/// Build a RAM disk
///
/// When the command returns with 0, the filesystem is mounted and was tried by a write and a read. If a step fails, or
/// the command is interrupted, everything is undone. If the command is killed, the nodes undo it by themselves when
/// --deadline is over.
#[derive(Args)]
struct CreateArgs {
    /// Its name
    #[arg(value_name = "NAME")]
    name: RamDiskName,

    /// The nodes that lend their RAM in equal shares, like n1,n2 [default: this machine]
    #[arg(long, value_delimiter = ',', value_name = "NODES")]
    nodes: Vec<NodeName>,

    /// How much data it holds, or `max` for as much as the nodes can lend
    #[arg(long, value_parser = parse_size)]
    size: Size,

    /// What builds the filesystem: tmpfs, gluster, ceph or simulated [default: tmpfs on one node, else gluster]
    #[arg(long, value_parser = parse_engine)]
    engine: Option<EngineKind>,

    /// Where it is shown: nodes and a path; no node means this machine; `:ro` at the end makes it read-only (may be
    /// repeated)
    #[arg(long = "mount", value_name = "NODES:PATH[:ro]", value_parser = parse_mount)]
    mounts: Vec<Vec<MountAt>>,

    /// Whose it is: a user's name or number, or UID:GID [default: whoever calls]
    #[arg(long)]
    user: Option<String>,

    /// Keep so many copies of the data (gluster: 2), so that a lost node loses nothing
    #[arg(long, default_value_t = 1, value_name = "N")]
    replicas: u32,

    /// The device of the nodes that holds the data: `ram`, or a directory's from their configuration
    #[arg(long, default_value = RAM)]
    device: String,

    /// The device for the metadata, if it shall lie on another one (ceph)
    #[arg(long, value_name = "DEVICE")]
    metadata_device: Option<String>,

    /// How long building may take
    #[arg(long, default_value = "60s", value_parser = parse_deadline)]
    deadline: Duration,

    /// For --engine simulated: delays and failures as JSON, like {"delay_ms":5,"faults":[{"step":"mount","how":"hang"}]}
    #[arg(long, value_parser = parse_simulation, value_name = "JSON")]
    simulate: Option<Simulation>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// Print each step with its seconds
    #[arg(long, short)]
    verbose: bool,
}

/// List RAM disks
#[derive(Args)]
struct ListArgs {
    /// The nodes to ask
    #[arg(long, value_delimiter = ',', value_name = "NODES")]
    nodes: Vec<NodeName>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Say whether a RAM disk is whole, and what each node has of it; exits with 1 if it is not
#[derive(Args)]
struct StatusArgs {
    /// Its name
    name: RamDiskName,

    /// Nodes to ask; the others that it lies on are found through them
    #[arg(long, value_delimiter = ',', value_name = "NODES")]
    nodes: Vec<NodeName>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Destroy a RAM disk with all its data, whatever state it is in; none to destroy is fine
///
/// It is unmounted everywhere (lazily where it is busy), its processes are killed, its bytes are given back. Programs
/// that still use a tmpfs are killed; those on a gluster or ceph client get errors.
///
/// The RAM disk of a job that may hold results is not destroyed: they are brought home by `ondeck job retry` and given up
/// by `ondeck job abandon`. If no scheduler knows the job any more, --abandon-results gives them up.
#[derive(Args)]
struct DestroyArgs {
    /// Its name
    name: RamDiskName,

    /// Destroy it also if it may hold results of a job: they are lost
    #[arg(long)]
    abandon_results: bool,

    /// With --abandon-results: do not ask
    #[arg(long, requires = "abandon_results")]
    yes: bool,

    /// Nodes to ask; the others that it lies on are found through them
    #[arg(long, value_delimiter = ',', value_name = "NODES")]
    nodes: Vec<NodeName>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// Print each step with its seconds
    #[arg(long, short)]
    verbose: bool,
}

fn parse_size(text: &str) -> Result<Size, String> {
    match text {
        "max" => Ok(Size::Largest),
        _ => text.parse().map(Size::Bytes).map_err(|error: ondeck_core::size::ParseError| error.to_string()),
    }
}

fn parse_deadline(text: &str) -> Result<Duration, String> {
    match duration::parse(text, 1) {
        Ok(deadline) if deadline.is_zero() => Err("it leaves no time".into()),
        Ok(deadline) => Ok(deadline),
        Err(error) => Err(error.to_string()),
    }
}

fn parse_engine(text: &str) -> Result<EngineKind, String> {
    EngineKind::from_word(text)
        .ok_or_else(|| format!("there is no such engine; there are {}", EngineKind::WORDS.join(", ")))
}

fn parse_simulation(text: &str) -> Result<Simulation, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn parse_mount(text: &str) -> Result<Vec<MountAt>, String> {
    let (text, read_only) = match text.strip_suffix(":ro") {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let (nodes, path) =
        text.split_once(':').ok_or("write it like n3,n4:/path, or :/path for this machine")?;
    if !path.starts_with('/') {
        return Err(format!("`{path}` is not an absolute path"));
    }
    let nodes: Vec<Option<NodeName>> = if nodes.is_empty() {
        vec![None]
    } else {
        let parse = |node: &str| node.parse().map(Some).map_err(|error| format!("{error}"));
        nodes.split(',').map(parse).collect::<Result<_, String>>()?
    };
    Ok(nodes.into_iter().map(|node| MountAt { node, path: path.into(), read_only }).collect())
}

pub fn ramdisk(args: RamdiskArgs) -> ExitCode {
    let code = prepare(args).unwrap_or_else(|error| {
        eprintln!("ondeck ramdisk: {error:#}");
        exit::USAGE
    });
    ExitCode::from(code)
}

fn prepare(args: RamdiskArgs) -> Result<u8> {
    let config = Config::load(args.config.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("can't start the runtime")?;
    let fleet = Fleet::new(&config);
    let nodes = |named: Vec<NodeName>| if named.is_empty() { config.nodes.clone() } else { named };
    runtime.block_on(async {
        match args.command {
            RamdiskCommand::Create(args) => create(&fleet, args).await,
            RamdiskCommand::List(args) => list(&fleet, &nodes(args.nodes), args.json).await,
            RamdiskCommand::Status(args) => status(&fleet, &args.name, &nodes(args.nodes), args.json).await,
            RamdiskCommand::Destroy(args) => {
                let on = nodes(args.nodes.clone());
                destroy(&fleet, &args, &on).await
            }
            RamdiskCommand::Nodes(args) => report_nodes(&fleet, &nodes(args.nodes), args.json).await,
        }
    })
}

async fn create(fleet: &Fleet, args: CreateArgs) -> Result<u8> {
    let owner = match &args.user {
        Some(text) => match numeric_owner(text) {
            Some(owner) => owner,
            None => {
                let user = User::look_up(text)?;
                Owner { uid: user.uid, gid: user.gid }
            }
        },
        None => {
            let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
            Owner { uid: uid.as_raw(), gid: gid.as_raw() }
        }
    };
    let engine = args.engine.unwrap_or(match args.nodes.len() {
        0 | 1 => EngineKind::Tmpfs,
        _ => EngineKind::Gluster,
    });
    if args.simulate.is_some() && engine != EngineKind::Simulated {
        bail!("--simulate is for --engine simulated");
    }
    let plan = Plan {
        name: args.name,
        engine,
        size: args.size,
        nodes: args.nodes,
        mounts: args.mounts.into_iter().flatten().collect(),
        owner,
        replicas: args.replicas,
        device: args.device,
        metadata_device: args.metadata_device,
        simulation: args.simulate,
        deadline: args.deadline,
        identity: None,
        job: None,
    };
    let begins = |step: &str| {
        if args.verbose && !args.json {
            eprintln!("{step} ...");
        }
    };
    match fleet.create(&plan, begins, interrupted()).await {
        Ok(built) => {
            if args.json {
                println!("{}", serde_json::to_string_pretty(&built)?);
                return Ok(exit::OK);
            }
            if args.verbose {
                for step in &built.steps {
                    println!("{:>8.3} s  {} ({})", step.seconds, step.name, count(step.nodes as u64, "node"));
                }
            }
            println!(
                "{}: {} on {}, {}, built in {:.3} s",
                plan.name,
                built.capacity,
                count(built.layout.servers.len() as u64, "node"),
                engine,
                built.seconds
            );
            Ok(exit::OK)
        }
        Err(error @ BuildError::Plan(_)) => {
            eprintln!("ondeck ramdisk: {}: {error}", plan.name);
            Ok(exit::USAGE)
        }
        Err(error @ BuildError::Call(_)) => {
            eprintln!("ondeck ramdisk: {}: {error}; nothing was begun", plan.name);
            Ok(exit::STAGE_FAILED)
        }
        Err(error) => {
            eprintln!("ondeck ramdisk: {}: {error}", plan.name);
            Ok(exit::STAGE_FAILED)
        }
    }
}

/// `UID:GID`, for users that this machine does not know.
fn numeric_owner(text: &str) -> Option<Owner> {
    let (uid, gid) = text.split_once(':')?;
    Some(Owner { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
}

/// Ends when somebody wants the command to stop.
async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
    let [Ok(mut int), Ok(mut term), Ok(mut hup)] = signals else { return std::future::pending().await };
    tokio::select! {
        _ = int.recv() => {}
        _ = term.recv() => {}
        _ = hup.recv() => {}
    }
}

/// What all nodes together say of one RAM disk.
struct Whole<'a> {
    reports: Vec<&'a LocalReport>,
    faults: Vec<String>,
}

fn gather(snapshot: &FleetSnapshot) -> BTreeMap<RamDiskId, Whole<'_>> {
    let mut found: BTreeMap<RamDiskId, Whole> = BTreeMap::new();
    for report in &snapshot.reports {
        let whole = found
            .entry(report.layout.id.clone())
            .or_insert_with(|| Whole { reports: Vec::new(), faults: Vec::new() });
        whole.reports.push(report);
        whole.faults.extend(report.faults.iter().map(|fault| format!("{}: {fault}", report.node)));
        for path in &report.dead_mounts {
            whole.faults.push(format!(
                "{}: {} is a dead mount of it: every access there fails",
                report.node,
                path.display()
            ));
        }
        if !report.complete {
            whole.faults.push(format!("{}: it is being built, or its builder was killed", report.node));
        }
    }
    for whole in found.values_mut() {
        let layout = &whole.reports[0].layout;
        for server in &layout.servers {
            if whole.reports.iter().any(|report| report.node == server.node && report.server) {
                continue;
            }
            let silent = snapshot.unreachable.iter().find(|(node, _)| node.as_ref() == Some(&server.node));
            whole.faults.push(match silent {
                Some((_, error)) => error.to_string(),
                None => format!("{}: its agent does not know the RAM disk: its share is lost", server.node),
            });
        }
    }
    found
}

fn print_unreachable(snapshot: &FleetSnapshot) {
    for (_, error) in &snapshot.unreachable {
        eprintln!("ondeck ramdisk: {error}");
    }
}

async fn list(fleet: &Fleet, nodes: &[NodeName], as_json: bool) -> Result<u8> {
    let snapshot = fleet.look(nodes).await;
    let found = gather(&snapshot);
    if as_json {
        let rows: Vec<_> = found.iter().map(|(id, whole)| summary(id, whole)).collect();
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else if !found.is_empty() {
        println!("{:<20} {:<10} {:>10}  {:<7} NODES", "NAME", "ENGINE", "SIZE", "STATE");
        for (id, whole) in &found {
            let layout = &whole.reports[0].layout;
            let names: Vec<&str> = layout.servers.iter().map(|server| server.node.as_str()).collect();
            let state = if whole.faults.is_empty() { "whole" } else { "FAULTY" };
            let size = layout.capacity().to_string();
            println!("{:<20} {:<10} {size:>10}  {state:<7} {}", id.name, layout.engine, names.join(","));
        }
        for report in &snapshot.reports {
            for path in &report.dead_mounts {
                println!("dead mount of {} on {}: {}", report.layout.id.name, report.node, path.display());
            }
        }
    }
    print_unreachable(&snapshot);
    Ok(if snapshot.unreachable.is_empty() { exit::OK } else { exit::FAILED })
}

fn summary(id: &RamDiskId, whole: &Whole) -> serde_json::Value {
    let layout = &whole.reports[0].layout;
    json!({
        "name": id.name,
        "epoch": id.epoch,
        "engine": layout.engine,
        "owner": layout.owner,
        "replicas": layout.replicas,
        "capacity": layout.capacity(),
        "whole": whole.faults.is_empty(),
        "faults": whole.faults,
        "nodes": whole.reports,
    })
}

async fn status(fleet: &Fleet, name: &RamDiskName, nodes: &[NodeName], as_json: bool) -> Result<u8> {
    let snapshot = fleet.look(nodes).await;
    let found: Vec<_> = gather(&snapshot).into_iter().filter(|(id, _)| id.name == *name).collect();
    if found.is_empty() {
        print_unreachable(&snapshot);
        let asked: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
        let asked = if asked.is_empty() { "this machine".to_owned() } else { asked.join(", ") };
        eprintln!("ondeck ramdisk: there is no RAM disk {name} on {asked}");
        return Ok(exit::FAILED);
    }
    let whole = found.iter().all(|(_, whole)| whole.faults.is_empty());
    for (id, whole) in &found {
        if as_json {
            println!("{}", serde_json::to_string_pretty(&summary(id, whole))?);
        } else {
            print_status(id, whole);
        }
    }
    Ok(if whole { exit::OK } else { exit::FAILED })
}

fn print_status(id: &RamDiskId, whole: &Whole) {
    let layout = &whole.reports[0].layout;
    println!(
        "{}: {} on {}, {}, epoch {}, of user {}: {}",
        id.name,
        layout.capacity(),
        count(layout.servers.len() as u64, "node"),
        layout.engine,
        id.epoch,
        layout.owner.uid,
        if whole.faults.is_empty() { "whole" } else { "NOT WHOLE" }
    );
    for fault in &whole.faults {
        println!("  ! {fault}");
    }
    let mut reports = whole.reports.clone();
    reports.sort_by(|a, b| a.node.cmp(&b.node));
    for report in reports {
        let mut parts = Vec::new();
        if report.server {
            let share = layout.server_on(&report.node).map(|index| layout.servers[index].share);
            let share = share.unwrap_or_default();
            parts.push(match report.used {
                Some(used) => format!("lends {share} of {}, {used} in use", layout.device),
                None => format!("lends {share}"),
            });
            if report.guarded {
                parts.push("may hold results".to_owned());
            }
        }
        for path in &report.shown {
            let free = report.filesystem.map(|(_, free)| format!(" ({free} free)")).unwrap_or_default();
            parts.push(format!("shows it at {}{free}", path.display()));
        }
        for overmount in &report.overmounts {
            let how = if overmount.read_only { ", read-only" } else { "" };
            parts.push(format!("covers {} with {}{how}", overmount.path.display(), overmount.from));
        }
        for process in &report.processes {
            let state = if process.running { process.memory.to_string() } else { "ended".into() };
            parts.push(format!("{} {} ({state})", process.role, process.pid));
        }
        println!("  {}: {}", report.node, parts.join(", "));
    }
}

async fn destroy(fleet: &Fleet, args: &DestroyArgs, nodes: &[NodeName]) -> Result<u8> {
    let release = if args.abandon_results {
        if !args.yes && !confirmed(&args.name)? {
            bail!("nothing was changed");
        }
        Some(Release::Abandoned { by: caller() })
    } else {
        None
    };
    let done = fleet.destroy(&args.name, nodes, release.as_ref()).await;
    if args.json {
        let faults: Vec<String> = done.faults.iter().map(NodeFault::to_string).collect();
        let value = json!({
            "name": args.name, "found": done.found, "seconds": done.seconds, "nodes": done.nodes, "faults": faults,
        });
        println!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        if args.verbose {
            for (node, destroyed) in &done.nodes {
                for (step, seconds) in &destroyed.steps {
                    println!("{seconds:>8.3} s  {node}: {step}");
                }
            }
        }
        if !done.nodes.is_empty() {
            println!(
                "{}: destroyed on {} in {:.3} s",
                args.name,
                count(done.nodes.len() as u64, "node"),
                done.seconds
            );
        } else if !done.found && done.faults.is_empty() {
            println!("{}: there was none", args.name);
        }
    }
    for fault in &done.faults {
        eprintln!("ondeck ramdisk: {}: {fault}", args.name);
    }
    Ok(if done.faults.is_empty() { exit::OK } else { exit::FAILED })
}

fn confirmed(name: &RamDiskName) -> Result<bool> {
    const WHAT: &str = "loses the results that it may hold";
    if !std::io::stdin().is_terminal() {
        bail!("this destroys {name} and {WHAT}, for good; say so with --yes");
    }
    print!("This destroys {name} and {WHAT}, for good. Write its name to go on: ");
    std::io::stdout().flush()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim() == name.as_str())
}

/// Who gives results up, for the agents' logs.
fn caller() -> String {
    let uid = rustix::process::getuid().as_raw();
    let login = std::env::var("SUDO_USER").map(|user| format!(" ({user} by sudo)")).unwrap_or_default();
    let host = host_name().map_or_else(|_| "a host without a name".to_owned(), |host| host.to_string());
    format!("user {uid}{login} on {host}")
}

async fn report_nodes(fleet: &Fleet, nodes: &[NodeName], as_json: bool) -> Result<u8> {
    let asked: Vec<Option<NodeName>> =
        if nodes.is_empty() { vec![None] } else { nodes.iter().cloned().map(Some).collect() };
    let mut code = exit::OK;
    let mut reports = Vec::new();
    for node in &asked {
        match fleet.node(node.as_ref()).await {
            Ok(report) => reports.push(report),
            Err(error) => {
                eprintln!("ondeck ramdisk: {error}");
                code = exit::FAILED;
            }
        }
    }
    if as_json {
        println!("{}", serde_json::to_string_pretty(&reports)?);
        return Ok(code);
    }
    println!("{:<16} {:<10} {:>10} {:>10} {:>10}  ENGINES", "NODE", "DEVICE", "LENDS", "PROMISED", "FREE");
    for report in &reports {
        let engines: Vec<&str> = EngineKind::ALL
            .iter()
            .filter(|kind| !report.missing.contains_key(kind) && **kind != EngineKind::Simulated)
            .map(|kind| kind.word())
            .collect();
        for (name, device) in &report.devices {
            println!(
                "{:<16} {name:<10} {:>10} {:>10} {:>10}  {}",
                report.node.to_string(),
                device.capacity.to_string(),
                device.promised.to_string(),
                device.free.to_string(),
                engines.join(",")
            );
        }
        if let Some(pressure) = report.memory.pressure.filter(|pressure| *pressure >= 1.0) {
            println!(
                "{:<16} is short of memory: processes waited for it {pressure} % of the last 10 s",
                report.node
            );
        }
    }
    Ok(code)
}
