//! What happens to RSA nodes.

use std::fmt;

use crate::{Bytes, Incarnation, NodeName, RamDiskId};

/// Why a node is drained that nobody has drained by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeFailure {
    /// How many times it has failed in a row.
    pub times: u32,
}

impl fmt::Display for NodeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it failed {} times in a row", self.times)
    }
}

/// What happens to an RSA node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum NodeNotice {
    /// It answers, after it did not or with another capacity than before.
    Lends {
        node: NodeName,
        /// How much in all.
        capacity: Bytes,
    },
    /// It was drained, and lends again.
    LendsAgain(NodeName),
    /// It does not answer, and what is on it is taken for lost.
    Lost(NodeName),
    /// It does not answer, and was given up by name.
    GivenUp(NodeName),
    /// It lends nothing new.
    Drained {
        node: NodeName,
        /// Why: in the words of whoever drained it, or a [`NodeFailure`].
        why: String,
    },
    /// What is promised of it to a job that is not known is free.
    Vacated {
        node: NodeName,
        /// Whose it was.
        job: Incarnation,
    },
    /// What was left on it is gone.
    Cleaned { node: NodeName, ramdisk: RamDiskId },
}

impl fmt::Display for NodeNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodeNotice::Lends { node, capacity } => write!(f, "RSA node {node} lends {capacity}"),
            NodeNotice::LendsAgain(node) => write!(f, "RSA node {node} lends again"),
            NodeNotice::Lost(node) => write!(f, "RSA node {node} is lost"),
            NodeNotice::GivenUp(node) => write!(f, "RSA node {node} is given up"),
            NodeNotice::Drained { node, why } => write!(f, "RSA node {node} is drained: {why}"),
            NodeNotice::Vacated { node, job } => {
                write!(f, "RSA node {node} has nothing of job {job} any more")
            }
            NodeNotice::Cleaned { node, ramdisk } => {
                write!(f, "what was left of {ramdisk} on {node} is gone")
            }
        }
    }
}
