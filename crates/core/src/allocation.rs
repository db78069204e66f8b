//! What a RAM disk is made of: its nodes, and how its bytes are shared out.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::request::keyword_enum;
use crate::{Bytes, EngineKind, Incarnation, NodeName, RamDiskId, Request};

/// What a RAM disk is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// The input; the output comes after the switch, if there is one.
    Input,
    /// Input and output from the start: both fit.
    Both,
    /// The output alone.
    Output,
}

/// Whose a RAM disk is: its root has this owner and mode 0700.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Owner {
    /// The user, by number: names may differ from node to node.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
}

/// One server of a RAM disk: an RSA node with its share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    /// The RSA node.
    pub node: NodeName,
    /// Its address on the storage network.
    pub address: IpAddr,
    /// The TCP ports that its agent has reserved for this RAM disk.
    pub ports: Vec<u16>,
    /// The bytes of data it holds.
    pub share: Bytes,
}

/// Everything that describes a RAM disk. It is the same on all its nodes and holds no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Name and incarnation.
    pub id: RamDiskId,
    /// What builds the filesystem.
    pub engine: EngineKind,
    /// Whose it is.
    pub owner: Owner,
    /// How many copies of the data there are; 1 means that a lost node loses its share.
    pub replicas: u32,
    /// The device that holds the data on every server: `ram`, or the name of a directory's device.
    pub device: String,
    /// The device that holds the metadata where that is another one.
    pub metadata_device: Option<String>,
    /// The servers, in the order that the engine counts them.
    pub servers: Vec<Server>,
    /// The nodes that mounted it when it was created.
    #[serde(default)]
    pub clients: Vec<NodeName>,
    /// What the simulated engine pretends.
    pub simulation: Option<Simulation>,
    /// A random number that tells this RAM disk from every other one, also from one that was given the same name and
    /// epoch by somebody who did not know of it; 0 for one of a version that made none.
    #[serde(default)]
    pub number: u64,
    /// The job that it is built for; nothing if somebody built it by hand.
    #[serde(default)]
    pub job: Option<JobTag>,
}

/// Whose results a RAM disk may hold, and where they belong: what a scheduler must know of a job that its journal does
/// not have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobTag {
    /// The cluster whose workload manager has numbered the job; empty if it has no name.
    pub cluster: String,
    /// Which life of which job.
    pub job: Incarnation,
    /// What the RAM disk is for.
    pub purpose: Purpose,
    /// The account that the job is charged to.
    pub account: String,
    /// What the job asks for; paths are absolute.
    pub request: Request,
    /// The directory it was submitted from.
    pub work_dir: PathBuf,
}

impl Layout {
    /// The number of the server that runs on `node`.
    pub fn server_on(&self, node: &NodeName) -> Option<usize> {
        self.servers.iter().position(|server| server.node == *node)
    }

    /// The bytes that the filesystem holds.
    pub fn capacity(&self) -> Bytes {
        let raw: u64 = self.servers.iter().map(|server| server.share.0).sum();
        Bytes(raw / u64::from(self.replicas.max(1)))
    }
}

keyword_enum! {
    /// What the simulated engine can be told to fail in.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    Misbehaviour {
        /// The step fails.
        Fail = "fail",
        /// The step never ends.
        Hang = "hang",
    }
}

/// Delays and failures of the simulated engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Simulation {
    /// How long each step takes, in milliseconds.
    pub delay_ms: u64,
    /// What goes wrong: the step's name, where (a node, or everywhere), and how.
    pub faults: Vec<SimulatedFault>,
}

/// One thing that goes wrong on purpose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimulatedFault {
    /// The name of the step.
    pub step: String,
    /// The node where it happens; everywhere if none is named.
    #[serde(default)]
    pub node: Option<NodeName>,
    /// What the step does instead.
    pub how: Misbehaviour,
}

/// Shares are whole multiples of this: large enough for every page size, small enough that nobody counts it.
pub const SHARE_UNIT: Bytes = Bytes(1 << 20);

/// The share of each of `nodes` servers, so that the filesystem holds at least `size` bytes in `replicas` copies. All
/// shares are equal: the slowest server sets the pace, and an unequal one would be full first.
///
/// At least `smallest` bytes, which is what the engine needs to work at all.
///
/// # Panics
/// If `nodes` is zero; who asks has named at least one.
///
/// ```
/// use ondeck_core::{Bytes, allocation::equal_share};
/// assert_eq!(equal_share(Bytes(3 << 30), 2, 1, Bytes(0)), Bytes(1536 << 20));
/// assert_eq!(equal_share(Bytes(1), 4, 1, Bytes(16 << 20)), Bytes(16 << 20));
/// ```
pub fn equal_share(size: Bytes, nodes: usize, replicas: u32, smallest: Bytes) -> Bytes {
    assert!(nodes > 0, "a RAM disk has at least one node");
    // In 128 bits: nobody has this much RAM, but anybody can ask for it.
    let raw = u128::from(size.0) * u128::from(replicas.max(1));
    let share = raw.div_ceil(nodes as u128).min(u128::from(u64::MAX / 2)) as u64;
    Bytes(share).max(smallest).round_up_to(SHARE_UNIT)
}

/// The largest share for which `need(share)` is at most `free`, in whole units; zero if not even one unit fits.
/// `need` must not fall when the share grows.
pub fn largest_share(free: Bytes, need: impl Fn(Bytes) -> Bytes) -> Bytes {
    let (mut fits, mut too_much) = (0, free.0 / SHARE_UNIT.0 + 1);
    while too_much - fits > 1 {
        let middle = fits + (too_much - fits) / 2;
        if need(Bytes(middle * SHARE_UNIT.0)) <= free {
            fits = middle;
        } else {
            too_much = middle;
        }
    }
    Bytes(fits * SHARE_UNIT.0)
}

/// What an engine takes of a device at most: percent of the share, bytes of its own, and the smallest share. A test of
/// the agent's holds it to what the engines ask for. Only Ceph on a directory takes more, for shares below 1000 MiB.
fn needs(engine: EngineKind) -> (u64, Bytes, Bytes) {
    match engine {
        EngineKind::Gluster => (125, Bytes(128 << 20), Bytes(16 << 20)),
        EngineKind::Ceph => (250, Bytes(640 << 20), Bytes(128 << 20)),
        EngineKind::Tmpfs => (125, Bytes(32 << 20), SHARE_UNIT),
        EngineKind::Simulated => (100, Bytes::ZERO, SHARE_UNIT),
    }
}

/// What must be promised of a device for a share of so many bytes, at most; whole [`SHARE_UNIT`]s.
pub fn promise_for(engine: EngineKind, share: Bytes) -> Bytes {
    let (percent, fixed, smallest) = needs(engine);
    let needed =
        (u128::from(share.max(smallest).0) * u128::from(percent)).div_ceil(100) + u128::from(fixed.0);
    Bytes(u64::try_from(needed).unwrap_or(u64::MAX)).round_up_to(SHARE_UNIT)
}

/// A share that fits into a promise; zero if it is too little for the engine.
pub fn share_within(engine: EngineKind, promise: Bytes) -> Bytes {
    let (percent, fixed, smallest) = needs(engine);
    let share = u128::from(promise.0.saturating_sub(fixed.0)) * 100 / u128::from(percent);
    let share = Bytes(u64::try_from(share).unwrap_or(u64::MAX));
    if share < smallest { Bytes::ZERO } else { share }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_share_within_a_promise_needs_no_more_than_that(mib in 0_u64..1 << 34) {
            for engine in [EngineKind::Gluster, EngineKind::Ceph, EngineKind::Tmpfs, EngineKind::Simulated] {
                let promise = Bytes(mib << 20);
                let share = share_within(engine, promise);
                prop_assert!(share == Bytes::ZERO || promise_for(engine, share) <= promise, "{engine} {promise} {share}");
            }
        }
    }

    proptest! {
        #[test]
        fn equal_shares_hold_what_was_asked_for_and_waste_less_than_a_unit_each(
            size in 1u64..1 << 50, nodes in 1usize..200, replicas in 1u32..3,
        ) {
            let share = equal_share(Bytes(size), nodes, replicas, Bytes::ZERO);
            let raw = u128::from(share.0) * nodes as u128;
            let needed = u128::from(size) * u128::from(replicas);
            prop_assert!(raw >= needed);
            prop_assert!(raw - needed < (u128::from(SHARE_UNIT.0) + 1) * nodes as u128);
        }

        #[test]
        fn the_largest_share_fits_and_one_unit_more_does_not(free in 0u64..1 << 45, fixed in 0u64..1 << 31, part in 0u64..50) {
            let need = |share: Bytes| Bytes(share.0 + share.0 / 100 * part + fixed);
            let share = largest_share(Bytes(free), need);
            prop_assert!(share == Bytes::ZERO || need(share) <= Bytes(free));
            prop_assert!(need(share.saturating_add(SHARE_UNIT)) > Bytes(free));
        }
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        assert!(equal_share(Bytes(u64::MAX), 1, 2, Bytes::ZERO) > Bytes(1 << 60));
    }
}
