//! The RSA nodes and what is promised of them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::request::keyword_enum;
use crate::{Bytes, Incarnation, NodeName, RamDiskId};

keyword_enum! {
    /// What can be done with an RSA node.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    NodeState {
        /// It lends.
        Up = "up",
        /// Its agent does not answer.
        Lost = "lost",
        /// It lends nothing new. By hand, or because it failed again and again.
        Draining = "draining",
    }
}

/// An RSA node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Node {
    /// The pool it belongs to.
    pub pool: String,
    /// What it lends in all; zero until its agent has said so.
    pub capacity: Bytes,
    /// Whether its agent answers.
    pub up: bool,
    /// Whether it lends nothing new, and why; empty if it does.
    pub drained: String,
    /// What is promised to whom.
    pub promised: BTreeMap<Incarnation, Bytes>,
    /// What could not be removed when it was lost. Until this is gone, nothing new is promised.
    #[serde(rename = "residue")]
    pub leftover_on_rsa: BTreeSet<RamDiskId>,
    /// Failures in a row.
    pub failures: u32,
    /// Whether its agent has answered since the journal began, or was given up by name: until then it may have the RAM
    /// disk of a job that was there before.
    #[serde(default = "heard")]
    pub heard: bool,
    /// Whether it was given up by name, and has not answered since.
    #[serde(default)]
    pub given_up: bool,
}

/// A journal of a former version knows all that its nodes have.
fn heard() -> bool {
    true
}

impl Node {
    /// A node that has not been heard of.
    pub fn new(pool: &str) -> Node {
        Node {
            pool: pool.to_owned(),
            capacity: Bytes::ZERO,
            up: false,
            drained: String::new(),
            promised: BTreeMap::new(),
            leftover_on_rsa: BTreeSet::new(),
            failures: 0,
            heard: false,
            given_up: false,
        }
    }

    /// Its state in a word.
    pub fn state(&self) -> NodeState {
        match (self.up, self.drained.is_empty()) {
            (false, _) => NodeState::Lost,
            (true, false) => NodeState::Draining,
            (true, true) => NodeState::Up,
        }
    }

    /// Whether it promises anything at all.
    pub fn lends(&self) -> bool {
        self.up && self.drained.is_empty() && self.leftover_on_rsa.is_empty()
    }

    /// What can be promised.
    pub fn free(&self) -> Bytes {
        let promised: u64 = self.promised.values().map(|bytes| bytes.0).sum();
        if self.lends() { Bytes(self.capacity.0.saturating_sub(promised)) } else { Bytes::ZERO }
    }

    /// Whether nobody has anything of it.
    pub fn is_free(&self) -> bool {
        self.promised.is_empty() && self.free() > Bytes::ZERO
    }
}

/// All RSA nodes, by name.
pub type Nodes = BTreeMap<NodeName, Node>;
