//! Requests and answers of an agent, version 1.
//!
//! | method and path | does | who |
//! |---|---|---|
//! | `GET /v1/node` | capacity, memory, engines: [`NodeReport`] | anybody |
//! | `GET /v1/ramdisks` | the RAM disks of this node: [`LocalReport`] | administrators; owners see their own |
//! | `GET /v1/ramdisks/NAME@EPOCH` | one of them | the same |
//! | `POST /v1/ramdisks/NAME@EPOCH/steps` | one [`Step`] of building it | administrators |
//! | `DELETE /v1/ramdisks/NAME@EPOCH` | destroys what this node has of it: [`Destroyed`] | administrators |
//! | `GET /v1/views?path=P` | the RAM disk that is shown at a path, and whether it is whole: [`PathView`] | owners |

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use ondeck_core::{Bytes, EngineKind, Layout, NodeName, RamDiskId};
use ondeck_ramdisk::View;
use serde::{Deserialize, Serialize};

/// The version in every path.
pub const VERSION: &str = "v1";

/// The most bytes that a request or an answer may have.
pub const MOST_BYTES: usize = 4 << 20;

/// What a node has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeReport {
    /// Its name.
    pub node: NodeName,
    /// The version of its agent.
    pub version: String,
    /// Where its servers listen.
    pub storage_address: IpAddr,
    /// What it lends.
    pub devices: BTreeMap<String, DeviceReport>,
    /// The machine's memory.
    pub memory: MemoryReport,
    /// Programs that are missing for each engine that can't work here.
    pub missing: BTreeMap<EngineKind, Vec<String>>,
    /// How many RAM disks have something here.
    pub ramdisks: usize,
    /// The greatest epoch that this node has seen.
    pub newest_epoch: u64,
}

/// A device of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceReport {
    /// `ram` or `dir`.
    pub kind: String,
    /// What may be promised in all.
    pub capacity: Bytes,
    /// What has been promised, the engines' own needs included.
    pub promised: Bytes,
    /// What can be promised now.
    pub free: Bytes,
}

/// The memory of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryReport {
    /// The machine's RAM.
    pub total: Bytes,
    /// What the kernel could give, memory cgroups counted.
    pub available: Bytes,
    /// The share of the last ten seconds in which some process waited for memory, in percent (Linux PSI); nothing where
    /// the kernel does not count it.
    pub pressure: Option<f64>,
}

/// A step of building a RAM disk on one node. A step that was done can be asked for again; one that failed is undone with
/// the whole RAM disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Reserve the share of this server, and ports.
    Allocate,
    /// Make the devices.
    Prepare,
    /// Start what a phase of the engine starts.
    Start(usize),
    /// Wait until it serves.
    Serve(usize),
    /// Mount the whole filesystem where only root can reach it.
    Mount,
    /// Make the owner's directory, and write the check file.
    Check,
    /// Read the check file, and show the owner's directory at a path.
    Show {
        /// Where.
        path: PathBuf,
        /// Whether it can't be written there.
        read_only: bool,
    },
    /// Take it away from a path.
    Hide {
        /// Where.
        path: PathBuf,
    },
    /// Open, as the RAM disk's owner, the directories that will be covered, and hold them. Nothing changes for anybody.
    Aim {
        /// All that this node will show the RAM disk over.
        covers: Vec<Cover>,
    },
    /// Mount the RAM disk over all directories that were aimed at, by the descriptors that are held: all or none.
    Cover,
    /// Ask whether files are open in what is covered: then it is refused with [`RefusalCode::Busy`]. Nothing changes.
    Busy,
    /// Take the RAM disk away from all directories that it covers, the innermost first: all or none.
    Uncover {
        /// Also while files are open, whose programs keep them. Otherwise that is refused with [`RefusalCode::Busy`].
        force: bool,
    },
    /// Unmount the whole filesystem again. A node that is no server forgets the RAM disk, and may mount it again.
    Unmount,
    /// The RAM disk is complete; from now on it lives until it is destroyed.
    Commit,
}

/// A directory that a job uses, and what is shown there instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cover {
    /// The directory as the job knows it; there may be symlinks on the way.
    pub path: PathBuf,
    /// The directory of the RAM disk, below the owner's: a plain name.
    pub from: String,
    /// Whether it can't be written there.
    pub read_only: bool,
}

/// One step, to be done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepRequest {
    /// What.
    pub step: Step,
    /// The RAM disk. Addresses and ports are known after `Allocate`.
    pub layout: Layout,
    /// How long the step may take.
    pub deadline_ms: u64,
    /// If the RAM disk is not complete after this time, the node removes what it has of it by itself.
    pub lease_ms: u64,
}

/// A step that was done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepDone {
    /// How long it took on the node.
    pub seconds: f64,
    /// After `Allocate`: where the server will listen.
    pub allocated: Option<Allocated>,
}

/// What was reserved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Allocated {
    /// The node's address on the storage network.
    pub address: IpAddr,
    /// Its ports.
    pub ports: Vec<u16>,
}

/// What destroying took.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Destroyed {
    /// The steps with their seconds, in order. None if there was nothing.
    pub steps: Vec<(String, f64)>,
}

/// How a RAM disk is on one node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LocalReport {
    /// The node.
    pub node: NodeName,
    /// The RAM disk.
    pub layout: Layout,
    /// Whether all steps of its creation were done.
    pub complete: bool,
    /// Whether this node is one of its servers.
    pub server: bool,
    /// Where it is shown here.
    pub shown: Vec<PathBuf>,
    /// What it covers here.
    #[serde(default)]
    pub covers: Vec<Cover>,
    /// Its processes here.
    pub processes: Vec<ProcessReport>,
    /// What is wrong here, in words; empty if nothing is.
    pub faults: Vec<String>,
    /// Bytes of data on this server's device.
    pub used: Option<Bytes>,
    /// What the client here sees, if there is one.
    pub view: Option<View>,
    /// The filesystem as the client here sees it: size and free bytes.
    pub filesystem: Option<(Bytes, Bytes)>,
}

/// A process of a RAM disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessReport {
    /// What it is.
    pub role: String,
    /// Its process id.
    pub pid: i32,
    /// Whether it runs.
    pub running: bool,
    /// Its resident memory.
    pub memory: Bytes,
}

/// The RAM disk at a path, for whoever is about to copy from there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PathView {
    /// The RAM disk; nothing if the path is on none.
    pub ramdisk: Option<RamDiskId>,
    /// What is wrong with it, in words; empty if it is whole.
    pub faults: Vec<String>,
    /// Two equal ones mean that it was whole all the time in between.
    pub witness: String,
}

/// Why a request was not done. The code is for programs, the message for people.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Refusal {
    /// The kind.
    pub code: RefusalCode,
    /// In words: what, where, and what to do.
    pub message: String,
}

impl Refusal {
    /// A refusal of a kind, in words.
    pub fn new(code: RefusalCode, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into() }
    }
}

/// The kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalCode {
    /// The request can't be understood.
    Malformed,
    /// The caller has not proved who it is.
    Unauthenticated,
    /// The caller may not do this.
    Forbidden,
    /// There is no such thing here.
    NotFound,
    /// A later incarnation exists or existed.
    Fenced,
    /// Something else has this name or path.
    Conflict,
    /// Files are open; the message names whose.
    Busy,
    /// There is not enough of it.
    TooLarge,
    /// The step was tried and failed.
    Failed,
}

impl RefusalCode {
    /// The HTTP status that goes with it.
    pub fn status(self) -> u16 {
        match self {
            RefusalCode::Malformed => 400,
            RefusalCode::Unauthenticated => 401,
            RefusalCode::Forbidden => 403,
            RefusalCode::NotFound => 404,
            RefusalCode::Fenced | RefusalCode::Conflict => 409,
            RefusalCode::Failed => 422,
            RefusalCode::Busy => 423,
            RefusalCode::TooLarge => 507,
        }
    }
}
