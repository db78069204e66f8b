//! The state of all jobs and nodes as it was last kept, for whoever looks: hooks, users, metrics, and the parts of the daemon.
//!
//! It is what the journal has, and is changed in moments once an event is on disk. So nobody who looks waits for the disk,
//! for a decision, or for another one who looks; and what has begun somewhere is always known here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ondeck_core::schedule::{Job, Nodes, PlacesLost, Schedule, Time};
use ondeck_core::{Incarnation, NodeName, RamDiskId};

use crate::store::Entry;

/// Jobs and nodes as they were last kept.
pub(crate) struct View {
    jobs: BTreeMap<Incarnation, Arc<Job>>,
    nodes: Nodes,
    leftover_on_compute: BTreeMap<NodeName, BTreeSet<RamDiskId>>,
    places_lost: PlacesLost,
    began: Time,
}

impl View {
    /// What a schedule begins with.
    pub fn of(schedule: &Schedule) -> View {
        View {
            jobs: schedule.jobs().iter().map(|(id, job)| (*id, Arc::new(job.clone()))).collect(),
            nodes: schedule.nodes().clone(),
            leftover_on_compute: schedule.leftover_on_compute().clone(),
            places_lost: schedule.places_lost(),
            began: schedule.began(),
        }
    }

    /// The jobs of which something is to be done.
    pub fn jobs(&self) -> &BTreeMap<Incarnation, Arc<Job>> {
        &self.jobs
    }

    /// The RSA nodes, and what is promised of each.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// What is left on nodes that lend nothing.
    pub fn leftover_on_compute(&self) -> &BTreeMap<NodeName, BTreeSet<RamDiskId>> {
        &self.leftover_on_compute
    }

    /// The places for jobs that wait which the workload manager has lost.
    pub fn places_lost(&self) -> PlacesLost {
        self.places_lost
    }

    /// When the journal began: of what was there before, it may not know.
    pub fn began(&self) -> Time {
        self.began
    }

    /// Shows what was kept.
    pub fn show(&mut self, entry: Entry) {
        self.places_lost = entry.places_lost;
        for (id, job) in entry.jobs {
            match job {
                Some(job) => self.jobs.insert(id, job),
                None => self.jobs.remove(&id),
            };
        }
        for (name, kept) in entry.nodes {
            match kept.leftover_on_compute {
                Some(left) => self.leftover_on_compute.insert(name.clone(), left),
                None => self.leftover_on_compute.remove(&name),
            };
            if let Some(node) = kept.node {
                self.nodes.insert(name, node);
            }
        }
    }
}
