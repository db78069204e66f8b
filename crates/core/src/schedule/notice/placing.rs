//! Who gets RSA nodes, and why somebody gets none.

use std::fmt;
use std::time::Duration;

use super::list;
use crate::schedule::told::Told;
use crate::{Bytes, EngineKind, Incarnation, JobId, NodeName, duration};

/// RSA nodes are given, or given back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Placed {
    /// They are promised to a job.
    Assigned {
        nodes: usize,
        /// Whose they are.
        job: Incarnation,
    },
    /// They are for others.
    Released(Vec<NodeName>),
}

impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placed::Assigned { nodes, job } => write!(f, "assigning {nodes} rsa-nodes to job {job}"),
            Placed::Released(nodes) => write!(f, "released {}", list(nodes)),
        }
    }
}

/// Of whose nodes there is a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Whose {
    /// The nodes of all jobs of its user.
    User,
    /// The nodes of all jobs of its account.
    Account,
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Whose::User => "user",
            Whose::Account => "account",
        })
    }
}

/// Why a job never gets RSA nodes, and what it could ask for instead.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Unfit {
    /// The engine needs more than a whole node lends.
    NodeTooSmall {
        /// What it lends.
        whole: Bytes,
        engine: EngineKind,
    },
    /// Its capacity does not fit on as many nodes as it asks for.
    TooMuchForItsNodes {
        /// What it asks for.
        capacity: Bytes,
        /// On how many.
        nodes: u32,
        /// How many would do.
        needed: u64,
    },
    /// It has too few compute nodes for one RSA node.
    TooSmall {
        job: Incarnation,
        /// How many it has.
        compute_nodes: u32,
        /// How many get one RSA node.
        proportion: u32,
    },
    /// It has so few compute nodes that its part of an RSA node is too little.
    PartTooSmall {
        job: Incarnation,
        part: Bytes,
        /// For which engine.
        engine: EngineKind,
    },
    /// Its user or account may not have so many.
    BeyondLimit {
        /// How many it needs.
        nodes: u32,
        /// Who may not.
        whose: Whose,
        /// How many they may have.
        limit: u32,
    },
    /// Its engine has no RSA nodes.
    OneMachineOnly,
    /// It names a pool that there is not.
    NoPool {
        /// What it names.
        pool: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The pool has not so many.
    PoolTooSmall {
        /// How many it needs.
        nodes: u32,
        /// Of which pool.
        pool: String,
        /// How many that has.
        has: u32,
    },
}

impl Unfit {
    fn is_too_small(&self) -> bool {
        matches!(self, Unfit::TooSmall { .. } | Unfit::PartTooSmall { .. })
    }
}

/// What the thesis says of such a job.
pub(super) fn too_small(job: Incarnation) -> String {
    format!("job {job} too small, marking ineligible")
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unfit::NodeTooSmall { whole, engine } => {
                write!(f, "{whole} of a node are too little for the engine {engine} (#RSA_ENGINE)")
            }
            Unfit::TooMuchForItsNodes { capacity, nodes, needed } => write!(
                f,
                "it asks for {capacity} (#RSA_CAPACITY) on {nodes} RSA nodes (#RSA_NODES), and needs {needed} for that"
            ),
            Unfit::TooSmall { job, compute_nodes, proportion } => write!(
                f,
                "{}: it has {compute_nodes} compute nodes, and {proportion} get one RSA node",
                too_small(*job)
            ),
            Unfit::PartTooSmall { job, part, engine } => write!(
                f,
                "{}: its part of an RSA node, {part}, is too little for the engine {engine} (#RSA_CAPACITY)",
                too_small(*job)
            ),
            Unfit::BeyondLimit { nodes, whose, limit } => {
                write!(f, "it needs {nodes} RSA nodes, and its {whose} may have {limit}")
            }
            Unfit::OneMachineOnly => f.write_str(
                "the engine tmpfs reaches one machine only; ask for gluster or ceph (#RSA_ENGINE)",
            ),
            Unfit::NoPool { pool, known } => {
                write!(f, "there is no pool `{pool}`, but {} (#RSA_POOL)", list(known))
            }
            Unfit::PoolTooSmall { nodes, pool, has } => {
                write!(
                    f,
                    "it needs {nodes} RSA nodes, and the pool `{pool}` has {has} (#RSA_NODES, #RSA_CAPACITY)"
                )
            }
        }
    }
}

/// What a held job has waited for beyond the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overdue {
    /// The results of another job.
    Results,
    /// That others no longer write where its input is.
    Input,
    /// That enough RSA nodes are free.
    Nodes,
}

/// Why a job gets no RAM disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum NoRamDisk {
    /// It never fits.
    Unfit(Unfit),
    /// It was held for as long as may be.
    Overdue {
        what: Overdue,
        limit: Duration,
        /// Whether it starts without.
        starts: bool,
    },
    /// It is a component of a heterogeneous job.
    Component {
        whole: JobId,
        /// Whether it has a stage-in script.
        has_script: bool,
    },
    /// It stays held, because it needs what its stage-in script makes.
    StaysHeld {
        /// Why it gets none, as it was said before.
        why: String,
        /// Whether that is because it is too small.
        too_small: bool,
    },
}

/// How a sentence ends for a job that starts nevertheless.
pub(super) const ON_DISK: &str = "; the job works on disk";

impl NoRamDisk {
    pub(super) fn is_too_small(&self) -> bool {
        match self {
            NoRamDisk::Unfit(unfit) => unfit.is_too_small(),
            NoRamDisk::StaysHeld { too_small, .. } => *too_small,
            NoRamDisk::Overdue { .. } | NoRamDisk::Component { .. } => false,
        }
    }

    /// The sentence without what follows for the job.
    fn reason(&self) -> String {
        match self {
            NoRamDisk::Unfit(unfit) => format!("no RAM disk: {unfit}"),
            NoRamDisk::Overdue { what, limit, .. } => {
                let why = match what {
                    Overdue::Results => "the results of the job that it depends on were not on disk within",
                    Overdue::Input => "other jobs have written where its input is for",
                    Overdue::Nodes => "there were no RSA nodes for it within",
                };
                format!("no RAM disk: {why} {}", duration::limit(*limit))
            }
            NoRamDisk::Component { whole, has_script } => {
                let script = if *has_script { ", and its stage-in script is not run" } else { "" };
                format!(
                    "no RAM disk: it is a component of the heterogeneous job {whole}, whose components can't share one yet; \
                     all of them work on disk{script}. To have one, submit it as one job, without `:` and `#SBATCH hetjob`"
                )
            }
            NoRamDisk::StaysHeld { why, .. } => why.clone(),
        }
    }

    pub(super) fn told(&self) -> Told {
        match self {
            NoRamDisk::Unfit(unfit) if unfit.is_too_small() => Told::TooSmall(self.reason()),
            NoRamDisk::Unfit(_) | NoRamDisk::Overdue { starts: true, .. } => Told::WorksOnDisk(self.reason()),
            NoRamDisk::Overdue { .. } | NoRamDisk::Component { .. } | NoRamDisk::StaysHeld { .. } => {
                Told::Other
            }
        }
    }
}

impl fmt::Display for NoRamDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason())?;
        f.write_str(match self {
            NoRamDisk::Unfit(_) | NoRamDisk::Overdue { starts: true, .. } => ON_DISK,
            NoRamDisk::Overdue { .. } | NoRamDisk::Component { .. } => "",
            NoRamDisk::StaysHeld { .. } => {
                "; the job stays held, because it may need what its stage-in script makes"
            }
        })
    }
}
