//! The client of many agents: building, showing, looking at and destroying a RAM disk on all of its nodes.
//!
//! Building is a table of named steps, each taken by several nodes at once; a step begins when the one before is done
//! on all of its nodes. What undoes a step stands in the table too. If one fails, or the builder is told to stop, every
//! node that took part is told to undo all of its steps in reverse order; a node that can't be told does so by itself
//! when its lease is over.
//!
//! Showing it over the directories of a job ([`Fleet::overmount`]) goes in rounds over all nodes of the job: what may fail
//! is done on all of them before anything changes on one.
//!
//! # Layout
//!
//! - [`build`]: the table of steps, and who takes them; [`sizing`](Size): what fits on the nodes
//! - [`overmount`]: showing a RAM disk over the directories of a job, and taking it away
//! - [`late`]: the same for a job that runs already
//! - [`look`]: what the agents know of RAM disks, and destroying them
//! - `authority`: whom the agents obey, and what they must keep
//! - `tasks`: staging and users' scripts on the nodes; `layouts`: those of jobs' directories on disk
//! - `here`: what this machine's own agent is asked

mod authority;
pub mod build;
mod here;
pub mod late;
mod layouts;
pub mod look;
pub mod overmount;
mod sizing;
mod tasks;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ondeck_api::client::{Observer, Provider};
use ondeck_api::wire::{Inventory, NodeReport, RefusalCode, Step, StepDone, StepRequest, VERSION};
use ondeck_api::{CallError, Client, Config, Endpoint, host_name};
use ondeck_core::{Layout, NodeName, RamDiskId};
use ondeck_ramdisk::Secret;
use tokio::task::JoinSet;

pub use build::{BuildError, BuildReport, MountAt, Plan, Size, StepTime};
pub use look::{Demolition, FleetSnapshot};
pub use overmount::NotOvermounted;

/// How long a look at a node may take. With it, a lost node is seen within five seconds.
const LOOK: Duration = Duration::from_secs(3);

/// How long destroying may take on a node; each of its steps has a shorter deadline there.
const DESTROY: Duration = Duration::from_secs(40);

/// How much longer than a step's own deadline its answer is waited for.
const ANSWER: Duration = Duration::from_secs(2);

/// How long it may take to list a node's part of a RAM disk: millions of files are looked at, in memory.
const INVENTORY: Duration = Duration::from_secs(30);

/// How long starting a task may take: its client may have to be mounted first.
const START_TASK: Duration = Duration::from_secs(35);

/// The longest that an agent waits for the end of a task before it answers.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// What a node did not do.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NodeFault {
    /// The node that was asked.
    pub node: NodeName,
    /// What it answered, or that it did not.
    pub error: CallError,
}

/// The client of all agents that a configuration names.
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

    /// The same fleet, which tells of every call to an agent when it has ended. What is told must not block.
    #[must_use]
    pub fn with_observer(self, observer: Observer) -> Fleet {
        Fleet { client: self.client.with_observer(observer), ..self }
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

    /// The files that a node has of some directories of a RAM disk.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn inventory(
        &self,
        node: &NodeName,
        id: &RamDiskId,
        slots: &[String],
    ) -> Result<Inventory, CallError> {
        let path = format!("/{VERSION}/ramdisks/{id}/names?slots={}", slots.join(","));
        self.client.call(&self.endpoint(node), "GET", &path, None::<&()>, None, INVENTORY).await
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
}

/// What each node said to something that all were asked at once.
type Answers<T> = Vec<(NodeName, Result<T, CallError>)>;

fn faults_of<T>(said: Answers<T>) -> Vec<NodeFault> {
    said.into_iter().filter_map(|(node, said)| said.err().map(|error| NodeFault { node, error })).collect()
}

/// Whether a node has nothing of a RAM disk (any more): it was started again, or a later incarnation is there.
fn has_nothing(error: &CallError) -> bool {
    matches!(error.code(), Some(RefusalCode::NotFound | RefusalCode::Fenced))
}

/// Does something for every node at once.
async fn on_all<A, T, W>(asked: impl Iterator<Item = (NodeName, A)>, work: impl Fn(A) -> W) -> Answers<T>
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
