//! Building a RAM disk: a table of named steps, each with its undo.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ondeck_api::CallError;
use ondeck_api::wire::{Allocated, NodeReport, RefusalCode, Step};
use ondeck_core::allocation::{JobTag, Simulation, equal_share};
use ondeck_core::{Bytes, EngineKind, Epoch, Layout, NodeName, Owner, RamDiskId, RamDiskName, Server};
use ondeck_ramdisk::mounts::check_path;
use ondeck_ramdisk::{EngineError, On, Secret, engine};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::sizing::{NoFit, fits, largest};
use crate::{Fleet, NodeFault};

/// How large a RAM disk shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// At least so many bytes.
    Bytes(Bytes),
    /// As large as it gets when every server is promised this much, its processes included.
    Within(Bytes),
    /// As large as the nodes can make it.
    Largest,
}

/// A path on a node where a RAM disk is to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountAt {
    /// The node; `None` is this machine.
    pub node: Option<NodeName>,
    /// Absolute; the directory is made if it is missing.
    pub path: PathBuf,
    /// Whether it can't be written there.
    pub read_only: bool,
}

/// What to build.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The name of the RAM disk; the epoch tells it from earlier ones.
    pub name: RamDiskName,
    /// What builds the filesystem.
    pub engine: EngineKind,
    /// How large it is to be.
    pub size: Size,
    /// The RSA nodes; none means this machine.
    pub nodes: Vec<NodeName>,
    /// Where it is shown.
    pub mounts: Vec<MountAt>,
    /// Whose it is.
    pub owner: Owner,
    /// How many copies of the data.
    pub replicas: u32,
    /// The device with the data.
    pub device: String,
    /// The device with the metadata, where that is another one.
    pub metadata_device: Option<String>,
    /// What the simulated engine pretends.
    pub simulation: Option<Simulation>,
    /// How long building may take in all.
    pub deadline: Duration,
    /// Its epoch and secret, of a builder that keeps them; otherwise both are made up.
    pub identity: Option<(Epoch, Secret)>,
    /// The job that it is for.
    pub job: Option<JobTag>,
}

/// A step that was taken.
#[derive(Clone, Debug, Serialize)]
pub struct StepTime {
    /// The name of the row in the table of steps.
    pub name: String,
    /// How many nodes took it.
    pub nodes: usize,
    /// From the first request to the last answer.
    pub seconds: f64,
}

/// What was built.
#[derive(Clone, Debug, Serialize)]
pub struct BuildReport {
    /// The RAM disk.
    pub layout: Layout,
    /// How large it is.
    pub capacity: Bytes,
    /// The steps in the order in which they were taken.
    pub steps: Vec<StepTime>,
    /// All of them.
    pub seconds: f64,
}

/// Why nothing was built.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum BuildError {
    /// The plan can't be carried out; nothing was begun.
    #[error("{0}")]
    Plan(String),
    /// A node can't be asked; nothing was begun.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A step failed.
    #[error(
        "the step `{step}` failed: {}{}",
        faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "), leftovers_text(.leftovers)
    )]
    Step {
        step: String,
        /// On which nodes, and why.
        faults: Vec<NodeFault>,
        /// Nodes that could not be told to undo.
        leftovers: Vec<String>,
    },
    /// Something else has what nodes were to reserve, such as their TCP ports. Nothing is wrong with these nodes: any user
    /// of theirs may do that.
    #[error(
        "the step `{step}` was refused: {}{}",
        faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "), leftovers_text(.leftovers)
    )]
    Taken {
        step: String,
        /// On which nodes, and why.
        faults: Vec<NodeFault>,
        /// Nodes that could not be told to undo.
        leftovers: Vec<String>,
    },
    /// The builder was told to stop.
    #[error("interrupted during the step `{step}`{}", leftovers_text(.leftovers))]
    Interrupted {
        /// During which step.
        step: String,
        /// Nodes that could not be told to undo.
        leftovers: Vec<String>,
    },
}

impl From<NoFit> for BuildError {
    fn from(error: NoFit) -> BuildError {
        BuildError::Plan(error.to_string())
    }
}

fn leftovers_text(leftovers: &[String]) -> String {
    if leftovers.is_empty() {
        "; everything was undone".into()
    } else {
        format!("; undone except for: {}", leftovers.join("; "))
    }
}

/// One row of the table.
struct Row {
    name: String,
    /// What undoes it. The agents do it for whatever they find.
    undo: Option<&'static str>,
    on: Vec<NodeName>,
    step: RowStep,
}

enum RowStep {
    /// The same step on all nodes.
    Same(Step),
    /// The paths of each node.
    Show,
}

impl Fleet {
    /// Builds a RAM disk. `begins` is called with the name of each step, and of what
    /// undoes it if that is needed; `stop` ends the building and undoes it.
    ///
    /// # Errors
    /// [`BuildError`]; then nothing is left, or it says where.
    pub async fn create(
        &self,
        plan: &Plan,
        begins: impl Fn(&str),
        stop: impl Future<Output = ()>,
    ) -> Result<BuildReport, BuildError> {
        let began = Instant::now();
        let (mut layout, mounts) = tokio::time::timeout(plan.deadline, self.lay_out(plan))
            .await
            .map_err(|_| BuildError::Plan("the nodes did not answer in time".into()))??;
        let secret = match &plan.identity {
            Some((_, secret)) => secret.clone(),
            None => Secret::new().map_err(|error| BuildError::Plan(format!("random numbers: {error}")))?,
        };
        let mut steps = vec![StepTime {
            name: "ask nodes".into(),
            nodes: layout.servers.len(),
            seconds: began.elapsed().as_secs_f64(),
        }];
        let table = table(&layout, &mounts);
        let until = began + plan.deadline;
        let mut stop = std::pin::pin!(stop);
        let mut touched: Vec<NodeName> = Vec::new();
        for (number, row) in table.iter().enumerate() {
            begins(&row.name);
            let undoing = || {
                let begun = table[..=number].iter().rev();
                begun.filter_map(|row| row.undo).for_each(|undo| begins(&format!("undo: {undo}")));
            };
            let step_began = Instant::now();
            touched.extend(row.on.iter().filter(|node| !touched.contains(node)).cloned().collect::<Vec<_>>());
            let done = tokio::select! {
                done = self.take(row, &layout, &mounts, &secret, until) => done,
                () = &mut stop => {
                    undoing();
                    let leftovers = self.undo(&layout.id, &touched).await;
                    return Err(BuildError::Interrupted { step: row.name.clone(), leftovers });
                }
            };
            match done {
                Ok(allocated) => {
                    for (node, allocated) in allocated {
                        if let Some(server) = layout.servers.iter_mut().find(|server| server.node == node) {
                            (server.address, server.ports) = (allocated.address, allocated.ports);
                        }
                    }
                }
                // All nodes have said that it is complete, and this only lets them know that of each other. One that can't be heard
                // may have settled it: to undo it elsewhere would leave its part for ever. One that has not asks a server, so one
                // that was heard must be there.
                Err(faults) if number + 1 == table.len() && are_unheard_beside_a_server(&faults, &layout) => {
                    for fault in &faults {
                        tracing::warn!(ramdisk = %layout.id, %fault, "complete, but a node was lost in this moment");
                    }
                }
                Err(faults) => {
                    undoing();
                    let leftovers = self.undo(&layout.id, &touched).await;
                    let step = row.name.clone();
                    let taken = |fault: &NodeFault| fault.error.code() == Some(RefusalCode::Conflict);
                    if matches!(row.step, RowStep::Same(Step::Allocate)) && faults.iter().all(taken) {
                        return Err(BuildError::Taken { step, faults, leftovers });
                    }
                    return Err(BuildError::Step { step, faults, leftovers });
                }
            }
            steps.push(StepTime {
                name: row.name.clone(),
                nodes: row.on.len(),
                seconds: step_began.elapsed().as_secs_f64(),
            });
        }
        Ok(BuildReport { capacity: layout.capacity(), layout, steps, seconds: began.elapsed().as_secs_f64() })
    }

    /// Asks all nodes what they have, and shares out the bytes.
    async fn lay_out(&self, plan: &Plan) -> Result<(Layout, Vec<MountAt>), BuildError> {
        for (index, node) in plan.nodes.iter().enumerate() {
            if plan.nodes[..index].contains(node) {
                return Err(BuildError::Plan(format!("the node {node} is named twice")));
            }
        }
        for mount in &plan.mounts {
            check_path(&mount.path).map_err(plan_error)?;
        }
        let asked: Vec<Option<NodeName>> =
            if plan.nodes.is_empty() { vec![None] } else { plan.nodes.iter().cloned().map(Some).collect() };
        if let Some(node) = plan.nodes.iter().find(|node| node.as_str().parse::<IpAddr>().is_ok()) {
            return Err(BuildError::Plan(format!("{node} is an address; name the node by its host name")));
        }
        let mut set = JoinSet::new();
        for (index, node) in asked.iter().cloned().enumerate() {
            let fleet = self.clone();
            set.spawn(async move { (index, fleet.node(node.as_ref()).await) });
        }
        let mut reports = BTreeMap::new();
        while let Some(joined) = set.join_next().await {
            let (index, report) = joined.map_err(|error| BuildError::Plan(error.to_string()))?;
            reports.insert(index, report?);
        }
        let reports: Vec<NodeReport> = reports.into_values().collect();
        for report in &reports {
            if let Some(missing) = report.missing.get(&plan.engine) {
                return Err(BuildError::Plan(format!(
                    "{}: the engine {} can't work there, these programs are missing: {}",
                    report.node,
                    plan.engine,
                    missing.join(", ")
                )));
            }
        }
        let here = reports.first().map(|report| report.node.clone());
        let mut mounts = plan.mounts.clone();
        for mount in mounts.iter_mut().filter(|mount| mount.node.is_none()) {
            // "This machine" is the one whose agent was asked, or this host by its name.
            mount.node = if plan.nodes.is_empty() { here.clone() } else { self.own_name.clone() };
        }
        let newest = reports.iter().map(|report| report.newest_epoch).max().unwrap_or(0);
        let mut layout = Layout {
            id: RamDiskId {
                name: plan.name.clone(),
                epoch: plan.identity.as_ref().map_or_else(|| next_epoch(newest), |(epoch, _)| *epoch),
            },
            engine: plan.engine,
            owner: plan.owner,
            replicas: plan.replicas,
            device: plan.device.clone(),
            metadata_device: plan.metadata_device.clone(),
            servers: reports
                .iter()
                .map(|report| Server {
                    node: report.node.clone(),
                    address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                    ports: Vec::new(),
                    share: Bytes(1),
                })
                .collect(),
            clients: Vec::new(),
            simulation: plan.simulation.clone(),
            number: random_number().map_err(|error| BuildError::Plan(format!("random numbers: {error}")))?,
            job: plan.job.clone(),
        };
        for node in mounts.iter().filter_map(|mount| mount.node.clone()) {
            if !layout.clients.contains(&node) {
                layout.clients.push(node);
            }
        }
        let engine = engine(plan.engine);
        engine.accepts(&layout).map_err(plan_error)?;
        let share = match plan.size {
            Size::Bytes(Bytes::ZERO) => {
                return Err(BuildError::Plan("a RAM disk of 0 bytes holds nothing; give it a size".into()));
            }
            Size::Bytes(size) => equal_share(size, reports.len(), plan.replicas, engine.smallest_share()),
            Size::Within(promise) => largest(&layout, &reports, promise)?,
            Size::Largest => largest(&layout, &reports, Bytes(u64::MAX))?,
        };
        for server in &mut layout.servers {
            server.share = share;
        }
        fits(&layout, &reports, share)?;
        Ok((layout, mounts))
    }

    /// Takes one step on all of its nodes.
    async fn take(
        &self,
        row: &Row,
        layout: &Layout,
        mounts: &[MountAt],
        secret: &Secret,
        until: Instant,
    ) -> Result<Vec<(NodeName, Allocated)>, Vec<NodeFault>> {
        let mut set = JoinSet::new();
        for node in &row.on {
            let steps: Vec<Step> = match &row.step {
                RowStep::Same(step) => vec![step.clone()],
                RowStep::Show => mounts
                    .iter()
                    .filter(|mount| mount.node.as_ref() == Some(node))
                    .map(|mount| Step::Show { path: mount.path.clone(), read_only: mount.read_only })
                    .collect(),
            };
            // Servers know everything; clients what they need to mount.
            let secret = if layout.server_on(node).is_some() { secret.clone() } else { secret.for_clients() };
            let (fleet, node, layout) = (self.clone(), node.clone(), layout.clone());
            set.spawn(async move {
                let mut allocated = None;
                for step in steps {
                    match fleet.step(&node, step, &layout, Some(&secret), until).await {
                        Ok(done) => allocated = done.allocated,
                        Err(error) => return Err(NodeFault { node, error }),
                    }
                }
                Ok((node, allocated))
            });
        }
        let (mut allocated, mut faults) = (Vec::new(), Vec::new());
        while let Some(joined) = set.join_next().await {
            match joined {
                Ok(Ok((node, Some(found)))) => allocated.push((node, found)),
                Ok(Ok((_, None))) => {}
                Ok(Err(fault)) => faults.push(fault),
                // A node of which nothing is known must not pass for one where the step was done.
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(error) => tracing::error!(%error, "a task of the builder was cancelled"),
            }
        }
        if faults.is_empty() { Ok(allocated) } else { Err(faults) }
    }

    async fn undo(&self, id: &RamDiskId, nodes: &[NodeName]) -> Vec<String> {
        let (_, faults) = self.destroy_on(id, nodes).await;
        faults
            .into_iter()
            // What is there belongs to another incarnation, or we were let do nothing.
            .filter(|fault| {
                use RefusalCode::{Conflict, Fenced, Forbidden, Unauthenticated};
                !matches!(fault.error.code(), Some(Conflict | Fenced | Forbidden | Unauthenticated))
            })
            .map(|fault| match fault.error {
                CallError::Refused { .. } => fault.to_string(),
                _ => format!("{fault} ({} removes its part by itself when its lease is over)", fault.node),
            })
            .collect()
    }
}

/// Whether these nodes have not answered, so that it is not known what they have done, while one of the servers has.
fn are_unheard_beside_a_server(faults: &[NodeFault], layout: &Layout) -> bool {
    let is_unheard = |fault: &NodeFault| !matches!(fault.error, CallError::Refused { .. });
    let is_heard = |server: &Server| faults.iter().all(|fault| fault.node != server.node);
    faults.iter().all(is_unheard) && layout.servers.iter().any(is_heard)
}

/// The steps of building, in order.
fn table(layout: &Layout, mounts: &[MountAt]) -> Vec<Row> {
    let servers: Vec<NodeName> = layout.servers.iter().map(|server| server.node.clone()).collect();
    let first = vec![servers[0].clone()];
    let row = |name: &str, undo, on: &[NodeName], step| Row {
        name: name.to_owned(),
        undo,
        on: on.to_vec(),
        step: RowStep::Same(step),
    };
    let mut rows = vec![
        row("allocate", Some("release bytes and ports"), &servers, Step::Allocate),
        row("prepare devices", Some("unmount and free them"), &servers, Step::Prepare),
    ];
    for (index, phase) in engine(layout.engine).phases().iter().enumerate() {
        let on = if phase.on == On::First { &first } else { &servers };
        rows.push(row(&format!("start {}", phase.name), Some("kill them"), on, Step::Start(index)));
        rows.push(row(&format!("wait for {}", phase.name), None, on, Step::Serve(index)));
    }
    // Somebody must make the owner's directory and try whether it works. If nobody mounts it yet, the first server does.
    let clients = if layout.clients.is_empty() { first } else { layout.clients.clone() };
    rows.push(row("mount", Some("unmount, end the client"), &clients, Step::Mount));
    rows.push(row("check by write and read", None, &clients[..1], Step::Check));
    if mounts.is_empty() {
        rows.push(row("unmount", None, &clients, Step::Unmount));
    } else {
        let name = "show".to_owned();
        rows.push(Row { name, undo: Some("hide"), on: clients.clone(), step: RowStep::Show });
    }
    let mut all = servers;
    all.extend(clients.into_iter().filter(|node| layout.server_on(node).is_none()));
    rows.push(row("commit", None, &all, Step::Commit));
    rows.push(row("commit on all", None, &all, Step::Commit));
    rows
}

fn next_epoch(newest: u64) -> Epoch {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // Also greater than what a node saw from a machine whose clock is ahead.
    Epoch(now.map_or(0, |since| since.as_micros() as u64).max(newest + 1))
}

/// A number that no other RAM disk has; never 0.
fn random_number() -> std::io::Result<u64> {
    let [a, b, c, d, e, f, g, h, ..] = Secret::new()?.derive("number");
    Ok(u64::from_ne_bytes([a, b, c, d, e, f, g, h]).max(1))
}

fn plan_error(error: EngineError) -> BuildError {
    BuildError::Plan(error.to_string())
}
