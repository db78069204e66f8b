//! What a site decides.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::request::keyword_enum;
use crate::{EngineKind, Rate};

keyword_enum! {
    /// How the RSA is shared between jobs that run and jobs that stage.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    Sharing {
        /// At most half of a pool is kept from jobs that have not started, while a job that runs waits for that much.
        Half = "half",
        /// Nothing is kept for anybody.
        Any = "any",
    }
}

keyword_enum! {
    /// How a staged job is kept in front of the queue.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    LockIn {
        /// Not at all.
        Off = "off",
        /// By its priority.
        Priority = "priority",
        /// By a quality of service (needs the accounting database).
        Qos = "qos",
    }
}

/// What the site decides.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// So many compute nodes get one RSA node.
    pub proportion: u32,
    /// When the RAM disk is switched from input to output, unless the job says.
    pub delay: Duration,
    /// Whether a job that is too small for a whole RSA node gets a part of one.
    pub fractions: bool,
    /// The engine of jobs that name none.
    pub engine: EngineKind,
    /// The pool of jobs that name none.
    pub pool: String,
    /// How the RSA is shared.
    pub sharing: Sharing,
    /// Who has waited for RSA nodes for so long comes before all who have not.
    pub patience: Duration,
    /// How a staged job is kept in front.
    pub lock_in: LockIn,
    /// How long the queue must say otherwise before a job is taken for next, or for demoted.
    pub debounce: Duration,
    /// A job that waits behind others but is expected to start within this time is next, too.
    pub horizon: Duration,
    /// How often building, filling and mounting is tried for a job.
    pub attempts: u32,
    /// How often staging out is tried before it waits for somebody to look.
    pub stage_outs: u32,
    /// How long is waited before something is tried again; doubled each time for staging out.
    pub backoff: Duration,
    /// A node that failed so many times in a row is drained.
    pub node_failures: u32,
    /// How long a Prolog that was not heard of is waited for.
    pub prolog: Duration,
    /// The longest that each kind of work may take.
    pub limits: Limits,
    /// The most RSA nodes that one user's jobs may have.
    pub user_nodes: Option<u32>,
    /// The most RSA nodes that one account's jobs may have.
    pub account_nodes: Option<u32>,
    /// What all staging together may take from the disk filesystem.
    pub bandwidth: Option<Rate>,
    /// How many jobs may stage at the same time by copying, and how many by scripts of their own, of which each user may have one.
    pub staging: Option<u32>,
    /// How many jobs with burst buffers the workload manager may keep waiting for their input; more are held. The places of those that
    /// are cancelled while they wait there count until it is started anew.
    pub kept_waiting: u32,
}

/// The longest that each kind of work may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Building a RAM disk.
    pub construct: Duration,
    /// Copying the input, or preparing the output directories.
    pub stage_in: Duration,
    /// Stopping the copy of the input.
    pub stop: Duration,
    /// Mounting it on all I/O nodes.
    pub mount: Duration,
    /// Unmounting it on all I/O nodes.
    pub unmount: Duration,
    /// Bringing results home.
    pub stage_out: Duration,
    /// Removing it from all RSA nodes.
    pub destroy: Duration,
    /// From the end of a job until its last process and its last Epilog.
    pub ending: Duration,
    /// Being held until there are RSA nodes.
    pub hold: Duration,
    /// Waiting, with a burst buffer that the workload manager has torn down, to be asked for again: it tears down all of them when
    /// it is started anew.
    pub again: Duration,
    /// Waiting for its start with all its input in RAM, while others wait for its RSA nodes.
    pub ready: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            construct: Duration::from_secs(60),
            stage_in: Duration::from_secs(4 * 3600),
            stop: Duration::from_secs(30),
            mount: Duration::from_secs(10),
            unmount: Duration::from_secs(20),
            stage_out: Duration::from_secs(24 * 3600),
            destroy: Duration::from_secs(60),
            ending: Duration::from_secs(300),
            hold: Duration::from_secs(24 * 3600),
            again: Duration::from_secs(180),
            ready: Duration::from_secs(3600),
        }
    }
}

impl Default for Site {
    fn default() -> Site {
        Site {
            proportion: 1,
            delay: Duration::from_secs(300),
            fractions: false,
            engine: EngineKind::Gluster,
            pool: "default".into(),
            sharing: Sharing::Half,
            patience: Duration::from_secs(600),
            lock_in: LockIn::Off,
            debounce: Duration::from_secs(1),
            horizon: Duration::ZERO,
            attempts: 3,
            stage_outs: 5,
            backoff: Duration::from_secs(5),
            node_failures: 3,
            prolog: Duration::from_secs(60),
            limits: Limits::default(),
            user_nodes: None,
            account_nodes: None,
            bandwidth: None,
            staging: None,
            kept_waiting: 64,
        }
    }
}
