//! Requests and answers of an agent, version 1.
//!
//! | method and path | does | who |
//! |---|---|---|
//! | `GET /v1/node` | capacity, memory, engines: [`NodeReport`] | anybody |
//! | `GET /v1/ramdisks` | the RAM disks of this node: [`LocalReport`] | administrators; owners see their own |
//! | `GET /v1/ramdisks/NAME@EPOCH` | one of them | the same |
//! | `POST /v1/ramdisks/NAME@EPOCH/steps` | one [`Step`] of building it | administrators |
//! | `POST /v1/ramdisks/NAME@EPOCH/guard` | from now on it may hold results: it is not destroyed before they are released | administrators |
//! | `POST /v1/ramdisks/NAME@EPOCH/release` | its results are on disk, or given up: [`Release`] | administrators |
//! | `DELETE /v1/ramdisks/NAME@EPOCH` | destroys what this node has of it: [`Destroyed`]; refused while it may hold results | administrators |
//! | `POST /v1/ramdisks/NAME@EPOCH/begins` | its job begins here untold: whether it keeps what is shown; what not all nodes show is taken away | root of this machine |
//! | `DELETE /v1/ramdisks/NAME@EPOCH/shown` | takes it away from all directories of this node; its data stays | root of this machine |
//! | `POST /v1/authority` | a scheduler's [`Claim`] to be obeyed: [`Obeyed`] | administrators |
//! | `GET /v1/ramdisks/NAME@EPOCH/witness` | whether it is whole here: [`Witness`] | administrators, the owner |
//! | `GET /v1/ramdisks/NAME@EPOCH/names?slots=N,N` | the files that this node has of these directories of it: [`Names`] | administrators |
//! | `POST /v1/ramdisks/NAME@EPOCH/tasks/TASK` | starts a task: [`TaskRequest`] to [`TaskReport`] | administrators |
//! | `GET /v1/ramdisks/NAME@EPOCH/tasks/TASK?wait=MS` | how it is, when it has ended or after MS | administrators |
//! | `DELETE /v1/ramdisks/NAME@EPOCH/tasks/TASK` | ends it: [`TaskReport`] | administrators |
//! | `GET /v1/views?path=P` | the RAM disk that is shown at a path, and whether it is whole: [`PathView`] | owners |
//!
//! An agent obeys one scheduler. Once a scheduler's claim was accepted, orders about the RAM disks of jobs are obeyed only
//! with its [`Authority`]. An order without one is a person's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use ondeck_core::{Bytes, EngineKind, Layout, NodeName, PackFormat, RamDiskId, Rate};
use ondeck_ramdisk::View;
use serde::{Deserialize, Serialize};

use crate::Config;

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
    /// The journal whose scheduler this node's agent obeys; nothing if none has claimed it.
    #[serde(default)]
    pub authority: Option<Obeyed>,
    /// What its configuration says that must be the same everywhere; nothing from an agent of a former version.
    #[serde(default)]
    pub settings: Option<NodeSettings>,
    /// What the hooks of Slurm have noted of themselves here since the node started; nothing from an agent of a former
    /// version.
    #[serde(default)]
    pub hooks: Option<BTreeMap<HookKind, HookSeen>>,
}

/// Which hook of Slurm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookKind {
    /// `ondeck prolog`.
    Prolog,
    /// `ondeck epilog`.
    Epilog,
}

impl HookKind {
    /// All of them.
    pub const ALL: [HookKind; 2] = [HookKind::Prolog, HookKind::Epilog];

    /// As Slurm's setting is called.
    pub fn setting(self) -> &'static str {
        match self {
            HookKind::Prolog => "Prolog",
            HookKind::Epilog => "Epilog",
        }
    }
}

/// What an agent knows of a hook of its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookSeen {
    /// What it was when Slurm ran it for the last time.
    Noted(HookNote),
    /// Its note can't be read, and why.
    Unreadable(String),
}

/// What a hook has noted of itself when Slurm ran it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookNote {
    /// The version of `ondeck`.
    pub version: String,
    /// The file that ran.
    pub program: PathBuf,
    /// The configuration that it reads.
    pub config: PathBuf,
    /// The script that called it, where that is known: a script that replaces itself by `ondeck` is not.
    #[serde(default)]
    pub script: Option<PathBuf>,
    /// Where it looks for the scheduler, or why it can't read its configuration.
    pub scheduler: Result<HookScheduler, String>,
}

/// Where a hook looks for the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookScheduler {
    /// Its host; the node itself if the configuration names none.
    pub host: Option<NodeName>,
    /// Its TCP port.
    pub port: u16,
}

/// What of a node's configuration must be the same on all nodes, as its agent has read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSettings {
    /// The directories below which a RAM disk may be shown.
    pub mount_prefixes: Vec<PathBuf>,
    /// Where its hooks look for the scheduler: on the node itself without a host.
    pub scheduler: Option<NodeName>,
    /// The scheduler's TCP port.
    pub scheduler_port: u16,
}

impl NodeSettings {
    /// As a configuration says.
    pub fn new(config: &Config) -> NodeSettings {
        NodeSettings {
            mount_prefixes: config.agent.mount_prefixes.clone(),
            scheduler: config.scheduler.host.clone(),
            scheduler_port: config.scheduler.port,
        }
    }
}

/// In whose name a scheduler gives an order. It comes with the order, where the credential covers it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// The random name of the scheduler's journal.
    pub journal: String,
    /// A random number of each start of the scheduler, so that two that have copies of one journal are told apart.
    pub session: u64,
    /// How many times the journal was written: an older copy of it has a smaller one.
    pub counter: u64,
}

/// A scheduler asks an agent to obey it. The agent does if it obeys nobody yet, if it obeys this journal already and has
/// seen no greater counter of it, or if this is a take-over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The random name of the scheduler's journal.
    pub journal: String,
    /// A random number of this start of the scheduler. Orders of the session before are refused from now on.
    pub session: u64,
    /// How many times the journal was written.
    pub counter: u64,
    /// Whether a person has confirmed that it replaces whomever the agent obeys.
    #[serde(default)]
    pub take_over: bool,
    /// The journals that this one has replaced. The agent keeps them, so that a later take-over, whose journal knows of
    /// none, can claim agents that have missed this one.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub replaced: BTreeSet<String>,
}

/// Whom an agent obeys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obeyed {
    /// The random name of the scheduler's journal.
    pub journal: String,
    /// The greatest counter of it that the agent has seen.
    pub counter: u64,
    /// Which start of its scheduler; zero from an agent that does not say it.
    #[serde(default)]
    pub session: u64,
    /// The journals that this one has replaced, as far as the agent knows.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub replaced: BTreeSet<String>,
}

/// Why the results that a RAM disk may hold need no guard any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Release {
    /// All of them are on disk, verified, or there were none.
    StagedOut {
        /// The number of the scheduler's task that brought them home, or that removes a RAM disk without any.
        task: u64,
    },
    /// Somebody has given them up.
    Abandoned {
        /// Who.
        by: String,
    },
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
    /// Refuse if the processes of a job could not be stopped on this node, whatever they do.
    CouldFreeze {
        /// The job's number.
        job: u32,
    },
    /// Stop all processes of a job of the RAM disk's owner on this node, for at most a second; refused if one of them holds
    /// something of what is aimed at, or if not all can be stopped. They go on if nothing more is said.
    Freeze {
        /// The job's number.
        job: u32,
    },
    /// Mount the RAM disk over all that is aimed at, while the job is stopped; refused if not all of its processes see it.
    /// It is taken away when the job goes on, unless it was said to be kept.
    CoverFrozen,
    /// From now on what was mounted stays when the job goes on.
    Keep,
    /// Let the job go on.
    Thaw,
    /// Ask whether files are open in what is covered: then it is refused with [`RefusalCode::Busy`]. Nothing changes.
    Busy,
    /// Take the RAM disk away from all directories that it covers, the innermost first: all or none.
    Uncover {
        /// Also while files are open, whose programs keep them. Otherwise that is refused with [`RefusalCode::Busy`].
        force: bool,
    },
    /// Unmount the whole filesystem again. A node that is no server forgets the RAM disk, and may mount it again.
    Unmount,
    /// All is done here; from now on it lives until it is destroyed. Said again: on all of its nodes. A node that is not
    /// told so, because its builder was killed in between, asks the others when the lease is over.
    Commit,
}

/// What a node has of a RAM disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Has {
    /// Nothing: it was never there, or was removed.
    Nothing,
    /// Something that is removed when its lease is over.
    Unfinished,
    /// All that it shall have.
    All,
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
    /// After `Thaw`: for how many milliseconds the job was stopped here.
    #[serde(default)]
    pub stopped_ms: Option<u64>,
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
    /// Whether it may hold results: then it is destroyed only once these are released.
    #[serde(default)]
    pub guarded: bool,
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
    /// Where it is still shown though its client here has ended for good: every access to these paths fails.
    #[serde(default)]
    pub dead_mounts: Vec<PathBuf>,
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

/// Whether a RAM disk is whole on one node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Witness {
    /// What is wrong with it, in words; empty if it is whole.
    pub faults: Vec<String>,
    /// Two equal ones mean that it was whole all the time in between.
    pub witness: String,
}

/// Work on a RAM disk, done on one of its nodes as its owner. Asked for again under the same name, nothing new is
/// started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRequest {
    /// What.
    pub work: Work,
    /// The RAM disk's owner, who does it, with all groups that the node knows of.
    pub uid: u32,
    /// Their group.
    pub gid: u32,
    /// The job, as the workload manager calls it: letters, digits and `._-`.
    pub job: String,
    /// What tells the job's files from those of other jobs, also of one that had its number: letters, digits and `._-`.
    /// Files that are put beside others are called `NAME.ondeck-LABEL`. The job's number if it is empty, as in an order
    /// of a former version.
    #[serde(default)]
    pub label: String,
    /// Where a script runs, if the user can enter it.
    pub work_dir: PathBuf,
    /// How long it may take.
    pub deadline_ms: u64,
    /// The most that is copied in a second.
    pub bandwidth: Option<Rate>,
    /// What of the directories is this task's, where several nodes work on them.
    #[serde(default)]
    pub share: Option<Share>,
    /// For at least so long nobody has changed what is in the RAM disk. What a node has seen of it since is true.
    #[serde(default)]
    pub unchanged_ms: u64,
}

/// What of a job's directories is one task's. Entries of their top levels are shared out, each with all that it holds, so
/// that no two tasks meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Tells the shares of one job apart.
    pub index: u32,
    /// The entries: the name of the directory in the RAM disk, and the entry's own name.
    pub entries: Vec<(String, String)>,
    /// Whether the task is to do everything but these. It comes last, when all others are done: what belongs to a
    /// directory as a whole is its own.
    pub all_but: bool,
}

/// An entry of the top level of a job's directory, with all that it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// The name of the directory in the RAM disk.
    pub directory: String,
    /// The entry's name.
    pub entry: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// How many files.
    pub files: u64,
}

/// What a task does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Looks at what there is to copy, so that it can be shared out: [`TaskReport::units`]. There are none if files have
    /// several names, which must stay together.
    Survey {
        /// Which directories.
        directories: Vec<Directory>,
        /// Whether results are looked at, in the RAM disk; otherwise the input, on disk.
        home: bool,
    },
    /// Puts into the RAM disk what the job shall see: of every directory what is in it on disk. What an interrupted one
    /// has copied already is not copied again.
    Fill {
        /// Which directories.
        directories: Vec<Directory>,
        /// The user's script that fills the first input directory instead: `SCRIPT RAM_DISK_DIRECTORY DISK_DIRECTORY`.
        script: Option<PathBuf>,
        /// The job runs and goes on to change them: what can't be copied now is left to the next time.
        #[serde(default)]
        moving: bool,
    },
    /// Puts into the RAM disk what a job that runs already has written to its output directories on disk since the fill,
    /// and what the RAM disk hides since it was mounted over them. Only what the RAM disk does not have is copied, nothing
    /// is replaced, and what the job has deleted stays away. Bringing home knows afterwards that these entries are the
    /// job's own.
    CatchUp {
        /// Which directories; those of the fill.
        directories: Vec<Directory>,
    },
    /// Merges what the job made of the output directories into those on disk, flushed. It may be done again, from any
    /// node; what is on disk already is not copied again.
    BringHome {
        /// Which directories; those of the fill.
        directories: Vec<Directory>,
        /// The user's script that saves the first output directory instead: `SCRIPT RAM_DISK_DIRECTORY DISK_DIRECTORY`.
        script: Option<PathBuf>,
        /// Makes one archive of each output directory instead: `results-JOB.FORMAT` in the directory on disk.
        pack: Option<PackFormat>,
        /// Takes what this node's own server has, whatever became of the others: nothing on disk is replaced or deleted.
        /// For engines that have each file whole on one server.
        #[serde(default)]
        salvage: bool,
    },
}

/// The files that one node has of a RAM disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// How many.
    pub files: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// The first of them: `DIRECTORY/PATH`, with the name of the directory in the RAM disk.
    pub names: Vec<String>,
}

/// A directory of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    /// Its path on disk: absolute.
    pub path: PathBuf,
    /// Its directory in the owner's part of the RAM disk: letters, digits, `-` and `_`.
    pub name: String,
    /// Whether the job reads it.
    pub input: bool,
    /// Whether the job writes it.
    pub output: bool,
}

/// How a task is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// Its name.
    pub name: String,
    /// Whether it has ended, and how.
    pub state: TaskState,
    /// Entries found so far that are no directories.
    pub entries_found: u64,
    /// Those of them that are done.
    pub entries_done: u64,
    /// Bytes of the files found so far.
    pub bytes_found: u64,
    /// Those of them that are done.
    pub bytes_done: u64,
    /// The first entries that failed, with the reason.
    pub errors: Vec<String>,
    /// The first files that were put beside others, because those had changed on disk.
    pub beside: Vec<String>,
    /// What a survey has found: the largest entries.
    #[serde(default)]
    pub units: Vec<Unit>,
    /// How long it has run.
    pub seconds: f64,
    /// The end of what a script has printed.
    pub log: String,
    /// Whether the same again may succeed without a change to the job: there was no room, or it was interrupted.
    pub retryable: bool,
}

/// Whether a task has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// Not yet.
    Running,
    /// It has, and nothing of it is left.
    Done {
        /// Whether all of it was done.
        ok: bool,
        /// What the user should know: if it was not, what, where and what to do.
        message: Option<String>,
    },
}

impl TaskReport {
    /// A task that begins.
    pub fn new(name: &str) -> TaskReport {
        TaskReport {
            name: name.to_owned(),
            state: TaskState::Running,
            entries_found: 0,
            entries_done: 0,
            bytes_found: 0,
            bytes_done: 0,
            errors: Vec::new(),
            beside: Vec::new(),
            units: Vec::new(),
            seconds: 0.0,
            log: String::new(),
            retryable: false,
        }
    }
}

impl Work {
    /// The directories.
    pub fn directories(&self) -> &[Directory] {
        match self {
            Work::Survey { directories, .. }
            | Work::Fill { directories, .. }
            | Work::CatchUp { directories }
            | Work::BringHome { directories, .. } => directories,
        }
    }

    /// Whether it takes what this node's own server has.
    pub fn is_salvage(&self) -> bool {
        matches!(self, Work::BringHome { salvage: true, .. })
    }

    /// The user's script.
    pub fn script(&self) -> Option<&std::path::Path> {
        match self {
            Work::Survey { .. } | Work::CatchUp { .. } => None,
            Work::Fill { script, .. } | Work::BringHome { script, .. } => script.as_deref(),
        }
    }
}

/// Whether a text is the name of a directory's entry.
fn is_entry(text: &str) -> bool {
    !text.is_empty() && text != "." && text != ".." && !text.contains(['/', '\0'])
}

impl TaskRequest {
    /// What tells the job's files from those of other jobs.
    pub fn label(&self) -> &str {
        if self.label.is_empty() { &self.job } else { &self.label }
    }

    /// What orders of people call the job, so that no other one is meant.
    pub fn name(&self) -> String {
        self.label().replacen('-', "@", 1)
    }

    /// Refuses what makes no sense, or would become a file name that leads elsewhere.
    ///
    /// # Errors
    /// [`RefusalCode::Malformed`].
    pub fn check(&self) -> Result<(), Refusal> {
        let malformed = |message: String| Err(Refusal::new(RefusalCode::Malformed, message));
        if !is_plain(self.label()) {
            return malformed(format!(
                "`{}` is no label of a job: use letters, digits and `._-`",
                self.label
            ));
        }
        if !is_plain(&self.job) {
            return malformed(format!("`{}` is no name of a job: use letters, digits and `._-`", self.job));
        }
        let directories = self.work.directories();
        for (index, directory) in directories.iter().enumerate() {
            if !is_plain(&directory.name) || directory.name.contains('.') {
                return malformed(format!("`{}` is no name of a directory in a RAM disk", directory.name));
            }
            let path = directory.path.display();
            if !directory.path.is_absolute() {
                return malformed(format!("the directory {path} is not absolute"));
            }
            let before = &directories[..index];
            if before.iter().any(|other| other.name == directory.name || other.path == directory.path) {
                return malformed(format!("the directory {path} (`{}`) is there twice", directory.name));
            }
        }
        if let Some(share) = &self.share {
            if matches!(self.work, Work::CatchUp { .. }) {
                return malformed("catching up can't be shared out".into());
            }
            if let Some((_, entry)) = share.entries.iter().find(|(_, entry)| !is_entry(entry)) {
                return malformed(format!("`{entry}` is no entry of a directory"));
            }
            if let Some(script) = self.work.script() {
                return malformed(format!("the work of the script {} can't be shared out", script.display()));
            }
        }
        if let (Work::Fill { script: Some(script), .. }, false) =
            (&self.work, directories.iter().any(|directory| directory.input))
        {
            return malformed(format!("the script {} has no input directory to fill", script.display()));
        }
        if matches!(&self.work, Work::BringHome { salvage: true, script, pack, .. } if script.is_some() || pack.is_some())
        {
            return malformed(
                "what is salvaged is a part of the results, which is neither packed nor left to a script"
                    .into(),
            );
        }
        if let Work::BringHome { script: Some(script), pack, .. } = &self.work {
            if pack.is_some() {
                return malformed("a script and packing exclude each other; let the script pack".into());
            }
            if !directories.iter().any(|directory| directory.output) {
                return malformed(format!("the script {} has no output directory to save", script.display()));
            }
        }
        Ok(())
    }
}

/// Whether a text can be a part of a file name: 1 to 64 letters, digits and `._-`, none of the two signs in front.
pub fn is_plain(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c))
        && !text.starts_with(['.', '-'])
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
    /// It may hold results of a job that are nowhere else.
    HoldsResults,
    /// The agent obeys the scheduler of another journal.
    ForeignJournal,
    /// The agent has seen a later state of the scheduler's journal.
    OlderJournal,
    /// The order is not of the scheduler that the agent obeys.
    NotInCharge,
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
            RefusalCode::Fenced
            | RefusalCode::Conflict
            | RefusalCode::HoldsResults
            | RefusalCode::ForeignJournal
            | RefusalCode::OlderJournal
            | RefusalCode::NotInCharge => 409,
            RefusalCode::Failed => 422,
            RefusalCode::Busy => 423,
            RefusalCode::TooLarge => 507,
        }
    }
}
