//! Building, showing, looking at and destroying a RAM disk over many agents.
//!
//! Building is a table of named steps, each taken by several nodes at once; a step begins when the one before is done
//! on all of its nodes. What undoes a step stands in the table too. If one fails, or the builder is told to stop, every
//! node that took part is told to undo all of its steps in reverse order; a node that can't be told does so by itself
//! when its lease is over.
//!
//! Showing it over the directories of a job ([`Fleet::cover`]) goes in rounds over all nodes of the job: what may fail
//! is done on all of them before anything changes on one.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ondeck_api::client::Provider;
use ondeck_api::wire::{
    Allocated, Claim, Cover, Destroyed, Has, LocalReport, Names, NodeReport, Obeyed, RefusalCode, Release,
    Step, StepDone, StepRequest, TaskReport, TaskRequest, VERSION, Witness,
};
use ondeck_api::{CallError, Client, Config, Endpoint};
use ondeck_core::allocation::{JobTag, Simulation, equal_share, largest_share};
use ondeck_core::{Bytes, EngineKind, Epoch, Layout, NodeName, Owner, RamDiskId, RamDiskName, Server};
use ondeck_ramdisk::device::RAM;
use ondeck_ramdisk::{EngineError, On, Secret, engine};
use serde::Serialize;
use tokio::task::JoinSet;

pub mod late;

use crate::capacity::device_sizes;
use crate::node::host_name;
use crate::ramdisk::check_path;

/// How long a look at a node may take. With it, a lost node is seen within five seconds.
const LOOK: Duration = Duration::from_secs(3);

/// How long destroying may take on a node; each of its steps has a shorter deadline there.
const DESTROY: Duration = Duration::from_secs(40);

/// How much longer than a step's own deadline its answer is waited for.
const ANSWER: Duration = Duration::from_secs(2);

/// How long it may take to list a node's part of a RAM disk: millions of files are looked at, in memory.
const NAMES: Duration = Duration::from_secs(30);

/// How long starting a task may take: its client may have to be mounted first.
const START_TASK: Duration = Duration::from_secs(35);

/// The longest that an agent waits for the end of a task before it answers.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

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
    /// The path.
    pub path: PathBuf,
    /// Whether it can't be written there.
    pub read_only: bool,
}

/// What to build.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its name.
    pub name: RamDiskName,
    /// What builds the filesystem.
    pub engine: EngineKind,
    /// How large.
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
    /// Its name.
    pub name: String,
    /// How many nodes took it.
    pub nodes: usize,
    /// From the first request to the last answer.
    pub seconds: f64,
}

/// What was built.
#[derive(Clone, Debug, Serialize)]
pub struct Built {
    /// The RAM disk.
    pub layout: Layout,
    /// How large it is.
    pub capacity: Bytes,
    /// The steps.
    pub steps: Vec<StepTime>,
    /// All of them.
    pub seconds: f64,
}

/// What a node did not do.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NodeFault {
    /// Which node.
    pub node: NodeName,
    /// Why.
    pub error: CallError,
}

/// Why nothing was built.
#[derive(Debug, thiserror::Error)]
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
        /// Which.
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
        /// Which.
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

fn task_path(id: &RamDiskId, name: &str) -> String {
    format!("/{VERSION}/ramdisks/{id}/tasks/{name}")
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

/// Drives agents.
#[derive(Clone)]
pub struct Fleet {
    client: Client,
    port: u16,
    socket: PathBuf,
    own_name: Option<NodeName>,
}

impl Fleet {
    /// Reaches agents as the configuration says.
    pub fn new(config: &Config) -> Fleet {
        Fleet {
            client: Client::new(&config.munge_socket),
            port: config.port,
            socket: config.agent.socket.clone(),
            own_name: host_name().ok(),
        }
    }

    /// The same fleet, with every order in a scheduler's name. The provider is asked before each order, and must not block.
    #[must_use]
    pub fn with_authority(self, provider: Provider) -> Fleet {
        Fleet { client: self.client.with_authority(provider), ..self }
    }

    /// The same fleet, which tells of each agent that does not obey an order because it is not of the scheduler that it
    /// obeys. What is told must not block.
    #[must_use]
    pub fn with_doubts(self, doubted: impl Fn(&NodeName) + Send + Sync + 'static) -> Fleet {
        let own_name = self.own_name.clone();
        let doubted = move |endpoint: &Endpoint| match endpoint {
            Endpoint::Node { name, .. } => doubted(name),
            Endpoint::Socket(_) => own_name.iter().for_each(&doubted),
        };
        Fleet { client: self.client.with_doubts(std::sync::Arc::new(doubted)), ..self }
    }

    /// Asks the agent of a node to obey a scheduler.
    ///
    /// # Errors
    /// [`CallError`]; [`RefusalCode::ForeignJournal`] if it obeys the scheduler of another journal, and
    /// [`RefusalCode::OlderJournal`] if it has seen a later state of this one.
    pub async fn claim(&self, node: &NodeName, claim: &Claim) -> Result<Obeyed, CallError> {
        let path = format!("/{VERSION}/authority");
        self.client.call(&self.endpoint(node), "POST", &path, Some(claim), None, LOOK).await
    }

    /// From now on a RAM disk may hold results: its RSA nodes do not destroy it before they are released. May be ordered
    /// again. A node that does not have the RAM disk is a fault.
    pub async fn guard(&self, id: &RamDiskId, nodes: &[NodeName], until: Instant) -> Vec<NodeFault> {
        let left = until.saturating_duration_since(Instant::now());
        self.order_all(nodes, format!("/{VERSION}/ramdisks/{id}/guard"), &(), left).await
    }

    /// The results that a RAM disk may hold are on disk, or given up: its RSA nodes destroy it when they are told to. May
    /// be ordered again. A node that has nothing of it is fine.
    pub async fn release(&self, id: &RamDiskId, nodes: &[NodeName], release: &Release) -> Vec<NodeFault> {
        let path = format!("/{VERSION}/ramdisks/{id}/release");
        let mut faults = self.order_all(nodes, path, release, LOOK).await;
        faults.retain(|fault| !has_nothing(&fault.error));
        faults
    }

    /// Posts the same to all nodes at once.
    async fn order_all<B: Serialize + Clone + Send + Sync + 'static>(
        &self,
        nodes: &[NodeName],
        path: String,
        body: &B,
        limit: Duration,
    ) -> Vec<NodeFault> {
        let said = on_all(nodes.iter().map(|node| (node.clone(), node.clone())), |node| {
            let (fleet, path, body) = (self.clone(), path.clone(), body.clone());
            async move {
                let endpoint = fleet.endpoint(&node);
                fleet.client.call::<()>(&endpoint, "POST", &path, Some(&body), None, limit).await
            }
        });
        faults_of(said.await)
    }

    /// What a node has of a RAM disk.
    ///
    /// # Errors
    /// [`CallError`]
    pub async fn has(&self, id: &RamDiskId, node: &NodeName) -> Result<Has, CallError> {
        let path = format!("/{VERSION}/ramdisks/{id}/has");
        self.client.call(&self.endpoint(node), "GET", &path, None::<&()>, None, LOOK).await
    }

    /// Takes a RAM disk away from all directories of this machine where it is shown; what it holds stays. Only root of the
    /// machine may do this, without a scheduler. A node that has nothing of it is fine.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn hide_here(&self, id: &RamDiskId, limit: Duration) -> Result<(), CallError> {
        let (endpoint, path) =
            (Endpoint::Socket(self.socket.clone()), format!("/{VERSION}/ramdisks/{id}/shown"));
        match self.client.call(&endpoint, "DELETE", &path, None::<&()>, None, limit).await {
            Err(error) if has_nothing(&error) => Ok(()),
            done => done,
        }
    }

    /// The job of a RAM disk begins on this machine without having been told what it sees: it keeps what all of its nodes
    /// show, which is told, and anything else is taken away here. Only root of the machine may do this.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn begins_here(&self, id: &RamDiskId, limit: Duration) -> Result<bool, CallError> {
        let (endpoint, path) =
            (Endpoint::Socket(self.socket.clone()), format!("/{VERSION}/ramdisks/{id}/begins"));
        self.client.call(&endpoint, "POST", &path, None::<&()>, None, limit).await
    }

    /// Where the agent of a node is reached: this machine's by its socket.
    pub fn endpoint(&self, node: &NodeName) -> Endpoint {
        if self.own_name.as_ref() == Some(node) && self.socket.exists() {
            Endpoint::Socket(self.socket.clone())
        } else {
            Endpoint::Node { name: node.clone(), port: self.port }
        }
    }

    /// What a node has; `None` is this machine.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn node(&self, node: Option<&NodeName>) -> Result<NodeReport, CallError> {
        let endpoint = node.map_or_else(|| Endpoint::Socket(self.socket.clone()), |node| self.endpoint(node));
        self.client.call(&endpoint, "GET", &format!("/{VERSION}/node"), None::<&()>, None, LOOK).await
    }

    /// What is wrong with the RAM disk at a path of this machine, if there is one: asked of this machine's agent.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn view(&self, path: &std::path::Path) -> Result<ondeck_api::wire::PathView, CallError> {
        use std::os::unix::ffi::OsStrExt;
        let path: String = path.as_os_str().as_bytes().iter().map(|byte| format!("%{byte:02x}")).collect();
        let endpoint = Endpoint::Socket(self.socket.clone());
        self.client
            .call(&endpoint, "GET", &format!("/{VERSION}/views?path={path}"), None::<&()>, None, LOOK)
            .await
    }

    /// Whether a RAM disk is whole on this machine.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn witness(&self, id: &RamDiskId) -> Result<Witness, CallError> {
        let endpoint = Endpoint::Socket(self.socket.clone());
        let path = format!("/{VERSION}/ramdisks/{id}/witness");
        self.client.call(&endpoint, "GET", &path, None::<&()>, None, LOOK).await
    }

    /// The files that a node has of some directories of a RAM disk.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn names(&self, node: &NodeName, id: &RamDiskId, slots: &[String]) -> Result<Names, CallError> {
        let path = format!("/{VERSION}/ramdisks/{id}/names?slots={}", slots.join(","));
        self.client.call(&self.endpoint(node), "GET", &path, None::<&()>, None, NAMES).await
    }

    /// Starts a task of a RAM disk on a node; one of this name that is there already is as good.
    ///
    /// # Errors
    /// [`CallError`]. After one that leaves open whether it was started, this can be called again.
    pub async fn start_task(
        &self,
        node: &NodeName,
        id: &RamDiskId,
        name: &str,
        request: &TaskRequest,
    ) -> Result<TaskReport, CallError> {
        let endpoint = self.endpoint(node);
        self.client.call(&endpoint, "POST", &task_path(id, name), Some(request), None, START_TASK).await
    }

    /// How a task is: when it has ended, or after `wait`, which is at most 30 seconds.
    ///
    /// # Errors
    /// [`CallError`]; [`RefusalCode::NotFound`] if the node does not know it, as after a restart of its agent: then
    /// nothing of it is left, and it can be started again.
    pub async fn task(
        &self,
        node: &NodeName,
        id: &RamDiskId,
        name: &str,
        wait: Duration,
    ) -> Result<TaskReport, CallError> {
        let wait = wait.min(LONGEST_WAIT);
        let path = format!("{}?wait={}", task_path(id, name), wait.as_millis());
        self.client.call(&self.endpoint(node), "GET", &path, None::<&()>, None, wait + LOOK).await
    }

    /// Ends a task, which is then forgotten; returns once nothing of it is left.
    ///
    /// # Errors
    /// [`CallError`]; [`RefusalCode::NotFound`] if the node does not know it: then nothing of it is left either.
    pub async fn stop_task(
        &self,
        node: &NodeName,
        id: &RamDiskId,
        name: &str,
    ) -> Result<TaskReport, CallError> {
        let endpoint = self.endpoint(node);
        self.client.call(&endpoint, "DELETE", &task_path(id, name), None::<&()>, None, DESTROY).await
    }

    /// Ends all tasks of a RAM disk on these nodes whose names begin so; returns once nothing of them is left. A node
    /// that has nothing of the RAM disk is fine.
    pub async fn stop_tasks(&self, nodes: &[NodeName], id: &RamDiskId, beginning: &str) -> Vec<NodeFault> {
        let said = on_all(nodes.iter().map(|node| (node.clone(), node.clone())), |node| {
            let fleet = self.clone();
            let path = format!("/{VERSION}/ramdisks/{id}/tasks?beginning={beginning}");
            async move {
                let endpoint = fleet.endpoint(&node);
                fleet.client.call::<()>(&endpoint, "DELETE", &path, None::<&()>, None, DESTROY).await
            }
        });
        faults_of(said.await).into_iter().filter(|fault| !has_nothing(&fault.error)).collect()
    }

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
    ) -> Result<Built, BuildError> {
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
        Ok(Built { capacity: layout.capacity(), layout, steps, seconds: began.elapsed().as_secs_f64() })
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

    async fn step(
        &self,
        node: &NodeName,
        step: Step,
        layout: &Layout,
        secret: Option<&Secret>,
        until: Instant,
    ) -> Result<StepDone, CallError> {
        let left = until.saturating_duration_since(Instant::now());
        let request = StepRequest {
            step,
            layout: layout.clone(),
            deadline_ms: left.as_millis() as u64,
            lease_ms: (left + ANSWER).as_millis() as u64,
        };
        let path = format!("/{VERSION}/ramdisks/{}/steps", layout.id);
        let endpoint = self.endpoint(node);
        // Only the steps that begin something on a node need the secret; the node keeps it.
        let secret = secret.filter(|_| matches!(request.step, Step::Allocate | Step::Mount));
        self.client.call(&endpoint, "POST", &path, Some(&request), secret, left + ANSWER).await
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

    async fn destroy_on(
        &self,
        id: &RamDiskId,
        nodes: &[NodeName],
    ) -> (BTreeMap<NodeName, Destroyed>, Vec<NodeFault>) {
        let mut set = JoinSet::new();
        for node in nodes {
            let (fleet, node, path) = (self.clone(), node.clone(), format!("/{VERSION}/ramdisks/{id}"));
            set.spawn(async move {
                let endpoint = fleet.endpoint(&node);
                let done = fleet.client.call(&endpoint, "DELETE", &path, None::<&()>, None, DESTROY).await;
                (node, done)
            });
        }
        let (mut destroyed, mut faults) = (BTreeMap::new(), Vec::new());
        while let Some(joined) = set.join_next().await {
            match joined {
                Ok((node, Ok(done))) => {
                    destroyed.insert(node, done);
                }
                Ok((node, Err(error))) => faults.push(NodeFault { node, error }),
                // A node of which nothing is known must not pass for one where all is removed.
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(error) => tracing::error!(%error, "a task was cancelled"),
            }
        }
        (destroyed, faults)
    }

    /// The RAM disks that a node has something of.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn ramdisks_of(&self, node: &NodeName) -> Result<Vec<LocalReport>, CallError> {
        let path = format!("/{VERSION}/ramdisks");
        self.client.call(&self.endpoint(node), "GET", &path, None::<&()>, None, LOOK).await
    }

    /// Removes one incarnation of a RAM disk from these nodes; returns what could not be. A node that has nothing of it
    /// is fine, and so is one that has a later incarnation.
    pub async fn demolish(&self, id: &RamDiskId, nodes: &[NodeName]) -> Vec<NodeFault> {
        let (_, faults) = self.destroy_on(id, nodes).await;
        faults.into_iter().filter(|fault| !has_nothing(&fault.error)).collect()
    }

    /// What the agents of these nodes know; no nodes means this machine.
    pub async fn look(&self, nodes: &[NodeName]) -> Sight {
        let mut sight = Sight::default();
        let mut asked: Vec<NodeName> = Vec::new();
        let mut wanted: Vec<Option<NodeName>> =
            if nodes.is_empty() { vec![None] } else { nodes.iter().cloned().map(Some).collect() };
        // What is found names further nodes.
        while !wanted.is_empty() {
            let mut set = JoinSet::new();
            for node in wanted.drain(..) {
                asked.extend(node.clone());
                let fleet = self.clone();
                set.spawn(async move {
                    let endpoint = node
                        .as_ref()
                        .map_or_else(|| Endpoint::Socket(fleet.socket.clone()), |node| fleet.endpoint(node));
                    let path = format!("/{VERSION}/ramdisks");
                    let call = fleet.client.call(&endpoint, "GET", &path, None::<&()>, None, LOOK);
                    (node, call.await)
                });
            }
            while let Some(joined) = set.join_next().await {
                let (node, found) = match joined {
                    Ok(looked) => looked,
                    // A node of which nothing is known must not pass for one that has nothing.
                    Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                    Err(_) => continue,
                };
                match found {
                    Ok(found) => {
                        let found: Vec<LocalReport> = found;
                        asked.extend(node.or_else(|| self.own_name.clone()));
                        sight.reports.extend(found);
                    }
                    Err(error) => sight.unreachable.push((node, error)),
                }
            }
            for report in &sight.reports {
                asked.push(report.node.clone());
                let servers = report.layout.servers.iter().map(|server| &server.node);
                for node in servers.chain(&report.layout.clients) {
                    if !asked.contains(node) && !wanted.contains(&Some(node.clone())) {
                        wanted.push(Some(node.clone()));
                    }
                }
            }
            wanted.retain(|node| node.as_ref().is_none_or(|node| !asked.contains(node)));
        }
        sight
    }

    /// Destroys every incarnation of a RAM disk that the agents of these nodes know of. Nothing to destroy is fine. One that
    /// may hold results is left as it is on all nodes, unless `release` says what became of them.
    pub async fn destroy(
        &self,
        name: &RamDiskName,
        nodes: &[NodeName],
        release: Option<&Release>,
    ) -> Demolition {
        let began = Instant::now();
        let sight = self.look(nodes).await;
        let mut on: BTreeMap<RamDiskId, Vec<NodeName>> = BTreeMap::new();
        for report in sight.reports.iter().filter(|report| report.layout.id.name == *name) {
            let on = on.entry(report.layout.id.clone()).or_default();
            let servers = report.layout.servers.iter().map(|server| &server.node);
            for node in servers.chain(&report.layout.clients).chain([&report.node]) {
                if !on.contains(node) {
                    on.push(node.clone());
                }
            }
        }
        let mut demolition = Demolition { found: !on.is_empty(), ..Demolition::default() };
        for (id, nodes) in on {
            let holds = |node: &NodeName| {
                let mut reports = sight.reports.iter();
                reports.any(|report| report.guarded && report.layout.id == id && report.node == *node)
            };
            let guarded: Vec<NodeName> = nodes.iter().filter(|node| holds(node)).cloned().collect();
            let nodes = match release {
                Some(release) => {
                    demolition.faults.extend(self.release(&id, &guarded, release).await);
                    nodes
                }
                // Whoever uses it on another node goes on: those who keep it say why.
                None if !guarded.is_empty() => guarded,
                None => nodes,
            };
            let (destroyed, faults) = self.destroy_on(&id, &nodes).await;
            demolition.nodes.extend(destroyed);
            demolition.faults.extend(faults);
        }
        for (node, error) in sight.unreachable {
            // Named once, with the reason why it could not be destroyed there if it was tried.
            let known = node.as_ref().is_some_and(|node| demolition.faults.iter().any(|f| f.node == *node));
            if let (Some(node), false) = (node.clone().or_else(|| self.own_name.clone()), known) {
                demolition.faults.push(NodeFault { node, error });
            }
        }
        demolition.seconds = began.elapsed().as_secs_f64();
        demolition
    }
}

/// What each node said to something that all were asked at once.
type Said<T> = Vec<(NodeName, Result<T, CallError>)>;

fn faults_of<T>(said: Said<T>) -> Vec<NodeFault> {
    said.into_iter().filter_map(|(node, said)| said.err().map(|error| NodeFault { node, error })).collect()
}

/// Whether a node has nothing of a RAM disk (any more): it was started again, or a later incarnation is there.
fn has_nothing(error: &CallError) -> bool {
    matches!(error.code(), Some(RefusalCode::NotFound | RefusalCode::Fenced))
}

/// A RAM disk is shown nowhere.
#[derive(Debug)]
pub struct NotCovered {
    /// What each node did not do.
    pub faults: Vec<NodeFault>,
    /// Whether it was refused before it was shown anywhere, so that nobody can have written to it.
    pub untouched: bool,
}

/// Showing a RAM disk over the directories of a job, on all of its nodes or on none. These run to their end; whoever
/// drops one of them half-way must call [`Fleet::uncover`].
impl Fleet {
    /// Shows a RAM disk over directories of all `nodes`, which become its clients. The directories are opened and judged
    /// on all nodes first; only when all agree is anything mounted over them. The last round tells all that all have done
    /// so: `goes_on` is asked before it, as a job that begins without having been told keeps what was.
    ///
    /// # Errors
    /// What each node did not do. Then nothing is covered on any node, unless a fault says so, and nodes that are no
    /// servers have nothing of the RAM disk.
    pub async fn cover(
        &self,
        layout: &Layout,
        secret: &Secret,
        covers: &[Cover],
        nodes: &[NodeName],
        deadline: Instant,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), NotCovered> {
        let mut layout = layout.clone();
        for node in nodes {
            if !layout.clients.contains(node) {
                layout.clients.push(node.clone());
            }
        }
        let aim = Step::Aim { covers: covers.to_vec() };
        let rounds: [(&[NodeName], Vec<Step>); 3] = [
            (nodes, vec![Step::Mount, aim]),
            (nodes, vec![Step::Cover]),
            // Servers are complete already, but all must know that all cover it.
            (nodes, vec![Step::Commit, Step::Commit]),
        ];
        let last = rounds.len() - 1;
        for (round, (on, steps)) in rounds.into_iter().enumerate() {
            let given_up = round == last && !goes_on();
            let mut faults = Vec::new();
            if !given_up {
                let asked = on.iter().map(|node| (node.clone(), layout.clone(), steps.clone())).collect();
                faults = faults_of(self.ask(asked, Some(secret), deadline).await);
            }
            if given_up || !faults.is_empty() {
                let back = vec![Step::Uncover { force: true }, Step::Unmount];
                let asked = nodes.iter().map(|node| (node.clone(), layout.clone(), back.clone())).collect();
                let undone = faults_of(self.ask(asked, None, Instant::now() + DESTROY).await);
                let dead: Vec<NodeName> = faults
                    .iter()
                    .filter(|fault| matches!(fault.error, CallError::Unreachable { .. }))
                    .map(|fault| fault.node.clone())
                    .collect();
                // Once is enough.
                let more = undone.into_iter().filter(|fault| !dead.contains(&fault.node));
                faults.extend(more.filter(|fault| !has_nothing(&fault.error)));
                return Err(NotCovered { faults, untouched: round == 0 });
            }
        }
        Ok(())
    }

    /// Takes a RAM disk away from all directories that it covers on these nodes. Without `force` it is taken away from
    /// all of them or from none: if files are open on one node, that one's fault is [`RefusalCode::Busy`], and if a node
    /// can't be asked, nothing is done either. A node that has nothing of it is fine.
    ///
    /// The client stays mounted; see [`Fleet::leave`].
    pub async fn uncover(
        &self,
        id: &RamDiskId,
        nodes: &[NodeName],
        force: bool,
        deadline: Instant,
    ) -> Vec<NodeFault> {
        let (reports, faults) = self.reports_of(id, nodes, deadline).await;
        if !faults.is_empty() && !force {
            return faults;
        }
        let of = |steps: &[Step]| -> Vec<(NodeName, Layout, Vec<Step>)> {
            let one = |(node, report): (&NodeName, &LocalReport)| {
                (node.clone(), report.layout.clone(), steps.to_vec())
            };
            reports.iter().map(one).collect()
        };
        if force {
            let said = self.ask(of(&[Step::Uncover { force }]), None, deadline).await;
            let left = faults_of(said).into_iter().filter(|fault| !has_nothing(&fault.error));
            return faults.into_iter().chain(left).collect();
        }
        for steps in [[Step::Busy], [Step::Uncover { force }]] {
            let said = self.ask(of(&steps), None, deadline).await;
            let uncovered: Vec<NodeName> = said
                .iter()
                .filter(|(_, said)| said.is_ok() && steps != [Step::Busy])
                .map(|(node, _)| node.clone())
                .collect();
            let mut faults = faults_of(said);
            faults.retain(|fault| !has_nothing(&fault.error));
            if faults.is_empty() {
                continue;
            }
            // Somebody opened a file in between: nodes of one job never see different trees.
            let again = reports
                .iter()
                .filter(|(node, report)| uncovered.contains(node) && !report.covers.is_empty())
                .map(|(node, report)| {
                    let aim = Step::Aim { covers: report.covers.clone() };
                    (node.clone(), report.layout.clone(), vec![aim, Step::Cover])
                })
                .collect();
            faults.extend(faults_of(self.ask(again, None, Instant::now() + DESTROY).await));
            return faults;
        }
        Vec::new()
    }

    /// Unmounts a RAM disk that covers nothing any more from these nodes. Those that are no servers have nothing of it
    /// afterwards, and may be covered again. A node that has nothing of it is fine.
    pub async fn leave(&self, id: &RamDiskId, nodes: &[NodeName], deadline: Instant) -> Vec<NodeFault> {
        let (reports, mut faults) = self.reports_of(id, nodes, deadline).await;
        let asked =
            reports.into_iter().map(|(node, report)| (node, report.layout, vec![Step::Unmount])).collect();
        let said = self.ask(asked, None, deadline).await;
        faults.extend(faults_of(said).into_iter().filter(|fault| !has_nothing(&fault.error)));
        faults
    }

    /// What nodes know of one RAM disk; those that have nothing of it are left out.
    async fn reports_of(
        &self,
        id: &RamDiskId,
        nodes: &[NodeName],
        deadline: Instant,
    ) -> (BTreeMap<NodeName, LocalReport>, Vec<NodeFault>) {
        let left = deadline.saturating_duration_since(Instant::now()).min(LOOK);
        let said =
            on_all(nodes.iter().map(|node| (node.clone(), node.clone())), |node| {
                let (fleet, path) = (self.clone(), format!("/{VERSION}/ramdisks/{id}"));
                async move {
                    fleet.client.call(&fleet.endpoint(&node), "GET", &path, None::<&()>, None, left).await
                }
            })
            .await;
        let (mut reports, mut faults) = (BTreeMap::new(), Vec::new());
        for (node, said) in said {
            match said {
                Ok(report) => drop(reports.insert(node, report)),
                Err(error) if has_nothing(&error) => {}
                Err(error) => faults.push(NodeFault { node, error }),
            }
        }
        (reports, faults)
    }

    /// Has every node take its steps, all nodes at once.
    async fn ask(
        &self,
        asked: Vec<(NodeName, Layout, Vec<Step>)>,
        secret: Option<&Secret>,
        until: Instant,
    ) -> Said<()> {
        let asked = asked.into_iter().map(|(node, layout, steps)| (node.clone(), (node, layout, steps)));
        on_all(asked, |(node, layout, steps)| {
            // Servers know everything; clients what they need to mount.
            let secret = secret.map(|secret| {
                if layout.server_on(&node).is_some() { secret.clone() } else { secret.for_clients() }
            });
            let fleet = self.clone();
            async move {
                for step in steps {
                    fleet.step(&node, step, &layout, secret.as_ref(), until).await?;
                }
                Ok(())
            }
        })
        .await
    }
}

/// Does something for every node at once.
async fn on_all<A, T, W>(asked: impl Iterator<Item = (NodeName, A)>, work: impl Fn(A) -> W) -> Said<T>
where
    T: Send + 'static,
    W: Future<Output = Result<T, CallError>> + Send + 'static,
{
    let mut set = JoinSet::new();
    for (node, task) in asked {
        let work = work(task);
        set.spawn(async move { (node, work.await) });
    }
    let mut said = Vec::new();
    while let Some(joined) = set.join_next().await {
        match joined {
            Ok(one) => said.push(one),
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(error) => tracing::error!(%error, "a task was cancelled"),
        }
    }
    said
}

/// What was seen on the nodes that were asked.
#[derive(Default)]
pub struct Sight {
    /// What the agents say.
    pub reports: Vec<LocalReport>,
    /// Who did not answer; `None` is this machine.
    pub unreachable: Vec<(Option<NodeName>, CallError)>,
}

/// What destroying did.
#[derive(Default)]
pub struct Demolition {
    /// Whether anybody knew of it.
    pub found: bool,
    /// What each node did.
    pub nodes: BTreeMap<NodeName, Destroyed>,
    /// Who could not.
    pub faults: Vec<NodeFault>,
    /// All of it.
    pub seconds: f64,
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

/// What a server of this layout needs of a device, as its node counts it.
fn need(layout: &Layout, report: &NodeReport, index: usize, device: &str, share: Bytes) -> Bytes {
    let engine = engine(layout.engine);
    let mut need = Bytes::ZERO;
    if device == RAM {
        need = need.saturating_add(engine.process_memory(layout, index, share));
    }
    for (name, size) in device_sizes(engine, layout, share) {
        let kind = report.devices.get(name).map(|device| device.kind.as_str());
        match kind {
            Some("ram") if device == RAM => {
                let ram = ondeck_ramdisk::Device::Ram { preallocate: false };
                need = need.saturating_add(ram.ram(size));
            }
            Some("dir") if device == name => {
                need = need.saturating_add(ondeck_ramdisk::device::image_bytes(size));
            }
            _ => {}
        }
    }
    need
}

/// The devices that a layout uses.
fn used_devices(layout: &Layout) -> Vec<&str> {
    let mut used = vec![RAM, layout.device.as_str()];
    used.extend(layout.metadata_device.as_deref());
    used.sort_unstable();
    used.dedup();
    used
}

/// The largest share that every node can give, each out of no more than `promise`.
fn largest(layout: &Layout, reports: &[NodeReport], promise: Bytes) -> Result<Bytes, BuildError> {
    let mut least = Bytes(u64::MAX);
    for (index, report) in reports.iter().enumerate() {
        for device in used_devices(layout) {
            let free = report.devices.get(device).map(|device| device.free).unwrap_or_default().min(promise);
            // A device that takes none of the data does not limit the share.
            let limit = Bytes(1 << 62);
            let share = if need(layout, report, index, device, limit) <= free {
                limit
            } else {
                largest_share_of(layout, report, index, device, free)
            };
            least = least.min(share);
        }
    }
    if least < engine(layout.engine).smallest_share().max(Bytes(1)) {
        let within =
            if promise < Bytes(u64::MAX) { format!(" in {promise} of each node") } else { String::new() };
        return Err(BuildError::Plan(format!(
            "nothing fits{within}: {}",
            reports.iter().map(|report| free_text(report, layout)).collect::<Vec<_>>().join(", ")
        )));
    }
    Ok(least)
}

fn largest_share_of(layout: &Layout, report: &NodeReport, index: usize, device: &str, free: Bytes) -> Bytes {
    // The search is bounded by `free`; a need that grows slower than the share would allow more, which is no loss.
    largest_share(free, |share| need(layout, report, index, device, share))
}

fn free_text(report: &NodeReport, layout: &Layout) -> String {
    let devices: Vec<String> = used_devices(layout)
        .iter()
        .filter_map(|name| Some(format!("{} of {name}", report.devices.get(*name)?.free)))
        .collect();
    format!("{} has {} free", report.node, devices.join(" and "))
}

/// Refuses what does not fit, before anything is begun, and says what would.
fn fits(layout: &Layout, reports: &[NodeReport], share: Bytes) -> Result<(), BuildError> {
    for (index, report) in reports.iter().enumerate() {
        for device in used_devices(layout) {
            let Some(found) = report.devices.get(device) else {
                let known: Vec<&str> = report.devices.keys().map(String::as_str).collect();
                return Err(BuildError::Plan(format!(
                    "{} has no device `{device}`; it has: {}",
                    report.node,
                    known.join(", ")
                )));
            };
            let needed = need(layout, report, index, device, share);
            if needed > found.free {
                let most = largest(layout, reports, Bytes(u64::MAX)).map(|share| {
                    let raw = u128::from(share.0) * layout.servers.len() as u128
                        / u128::from(layout.replicas.max(1));
                    format!(
                        "; at most {} fit on these nodes: --size {}MiB, or --size max",
                        Bytes(raw as u64),
                        raw >> 20
                    )
                });
                return Err(BuildError::Plan(format!(
                    "{} has {} of {device} free, and its share of {share} needs {needed} with what the engine takes{}",
                    report.node,
                    found.free,
                    most.unwrap_or_default()
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ondeck_core::allocation::{promise_for, share_within};

    /// The scheduler counts with this, and knows no engine.
    #[test]
    fn what_is_promised_for_a_share_is_enough_for_the_engine() {
        let report = serde_json::json!({
            "node": "r1", "version": "", "storage_address": "10.0.0.1", "missing": {}, "ramdisks": 0, "newest_epoch": 0,
            "memory": { "total": 0, "available": 0 },
            "devices": {
                "ram": { "kind": "ram", "capacity": 0, "promised": 0, "free": 0 },
                "ssd": { "kind": "dir", "capacity": 0, "promised": 0, "free": 0 },
            },
        });
        let report: NodeReport = serde_json::from_value(report).unwrap();
        for kind in [EngineKind::Gluster, EngineKind::Ceph, EngineKind::Tmpfs, EngineKind::Simulated] {
            let least = share_within(kind, promise_for(kind, Bytes::ZERO));
            assert!(least >= engine(kind).smallest_share(), "{kind}: {least}");
            for (device, servers) in [("ram", 1), ("ram", 3), ("ssd", 2)] {
                for mib in [1, 16, 100, 1000, 10_000, 100_000, 10_000_000] {
                    // Its stores on a directory keep a GiB for themselves.
                    if kind == EngineKind::Ceph && device == "ssd" && mib < 1000 {
                        continue;
                    }
                    let share = Bytes(mib << 20).max(engine(kind).smallest_share());
                    let server = Server {
                        node: report.node.clone(),
                        address: report.storage_address,
                        ports: Vec::new(),
                        share,
                    };
                    let layout = Layout {
                        id: "a@1".parse().unwrap(),
                        engine: kind,
                        owner: Owner { uid: 1, gid: 1 },
                        replicas: 1,
                        device: device.into(),
                        metadata_device: None,
                        servers: vec![server; servers],
                        clients: Vec::new(),
                        simulation: None,
                        number: 1,
                        job: None,
                    };
                    for index in 0..servers {
                        let needed = need(&layout, &report, index, device, share);
                        let promised = promise_for(kind, share);
                        assert!(needed <= promised, "{kind} on {device}, {share}: {needed} of {promised}");
                    }
                }
            }
        }
    }
}
