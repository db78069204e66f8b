//! Writing down who had which nodes while a simulation goes on.

use std::collections::BTreeMap;

use ondeck_core::schedule::RsaState;
use ondeck_core::timeline::{Phase, Span, Timeline};

/// What a job does with its nodes.
#[derive(Clone, Debug)]
struct Use {
    nodes: Vec<(u32, u32)>,
    /// Nothing while they are promised only.
    phase: Option<Phase>,
    /// Since when, in milliseconds.
    since: u64,
}

/// Nodes of one kind, and what each job does with its own.
#[derive(Clone, Debug, Default)]
struct Lanes {
    free: Vec<bool>,
    used: BTreeMap<u32, Use>,
    spans: Vec<Span>,
}

impl Lanes {
    fn new(count: u32) -> Lanes {
        Lanes { free: vec![true; count as usize], ..Lanes::default() }
    }

    /// A job does something else with so many nodes; nothing, and it gives them back.
    fn change(&mut self, now: u64, job: u32, number: u64, nodes: Option<u32>, phase: Option<Phase>) {
        let Some(before) = self.used.remove(&job) else {
            if let Some(nodes) = nodes {
                let nodes = self.take(nodes);
                self.used.insert(job, Use { nodes, phase, since: now });
            }
            return;
        };
        if before.phase == phase && nodes.is_some() {
            self.used.insert(job, before);
            return;
        }
        if let Some(phase) = before.phase.filter(|_| now > before.since) {
            let nodes = before.nodes.clone();
            self.spans.push(Span { job: number, phase, from_ms: before.since, to_ms: now, nodes });
        }
        if nodes.is_some() {
            self.used.insert(job, Use { nodes: before.nodes, phase, since: now });
        } else {
            for (first, last) in before.nodes {
                self.free[first as usize..=last as usize].fill(true);
            }
        }
    }

    /// The first that are free.
    fn take(&mut self, nodes: u32) -> Vec<(u32, u32)> {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        let mut left = nodes;
        for (index, free) in self.free.iter_mut().enumerate() {
            if left == 0 {
                break;
            }
            if std::mem::replace(free, false) {
                left -= 1;
                match ranges.last_mut() {
                    Some(last) if last.1 + 1 == index as u32 => last.1 += 1,
                    _ => ranges.push((index as u32, index as u32)),
                }
            }
        }
        ranges
    }

    fn finish(mut self) -> Vec<Span> {
        self.spans.sort_by_key(|span| (span.from_ms, span.nodes.first().copied(), span.job));
        self.spans
    }
}

/// What writes a [`Timeline`] while a simulation goes on.
#[derive(Clone, Debug)]
pub struct TimelineRecorder {
    compute: Lanes,
    rsa: Lanes,
}

impl TimelineRecorder {
    /// Nothing has happened.
    pub fn new(compute_nodes: u32, rsa_nodes: u32) -> TimelineRecorder {
        TimelineRecorder { compute: Lanes::new(compute_nodes), rsa: Lanes::new(rsa_nodes) }
    }

    /// A job does something else on its compute nodes; nothing, and it leaves them.
    pub fn compute(&mut self, now: u64, job: u32, number: u64, nodes: u32, phase: Option<Phase>) {
        self.compute.change(now, job, number, phase.map(|_| nodes), phase);
    }

    /// A job's RAM disk on so many nodes is in another state; nothing, and they are given back.
    pub fn ram_disk(&mut self, now: u64, job: u32, number: u64, allocation: Option<(u32, RsaState)>) {
        let phase = allocation.and_then(|(_, state)| Phase::of_ram_disk(state));
        self.rsa.change(now, job, number, allocation.map(|(nodes, _)| nodes), phase);
    }

    /// All that was shown.
    pub fn finish(self) -> Timeline {
        Timeline {
            compute_nodes: self.compute.free.len() as u32,
            rsa_nodes: self.rsa.free.len() as u32,
            compute: self.compute.finish(),
            rsa: self.rsa.finish(),
            ..Timeline::default()
        }
    }
}
