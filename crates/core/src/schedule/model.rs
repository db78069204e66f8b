//! The model check: every order of every event and failure, for two jobs and three nodes.
//!
//! Every state of a small [`World`] that can be reached is visited. After every event the [`invariants`] are asserted; and
//! from every state everything can come to an end: jobs leave, and the nodes are free.

mod histories;
mod invariants;

use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use super::world::*;
use super::*;
use crate::{Epoch, Request, WaitPolicy};

impl World {
    /// A number for everything that matters to what comes next. Nodes are alike, so their names don't matter.
    fn key(&self) -> u128 {
        let part = |salt: u8| {
            let mut hasher = std::collections::hash_map::DefaultHasher::new();
            salt.hash(&mut hasher);
            (&self.slurm, &self.physical, self.faults, self.losses, self.swaps).hash(&mut hasher);
            (self.older_states, &self.runs, &self.left).hash(&mut hasher);
            (self.depends, &self.held, &self.released, self.held_in_time).hash(&mut hasher);
            (&self.buffers, self.buffer_losses, &self.lost).hash(&mut hasher);
            (self.journals, self.queue_seen, &self.found, &self.schedule.identities).hash(&mut hasher);
            for job in self.schedule.jobs().values() {
                let mut job = job.clone();
                job.message.clear();
                // It decides what is said next, and nothing else.
                job.told = Told::Nothing;
                job.waits_for.clear();
                job.avoid.clear();
                job.lost_on.clear();
                job.since = NOW;
                if let Some(order) = &mut job.under_way {
                    order.number = 0;
                }
                if let Some(allocation) = &mut job.allocation {
                    (allocation.epoch, allocation.nodes, allocation.since) = (Epoch(0), Vec::new(), NOW);
                }
                job.hash(&mut hasher);
            }
            let nodes = self.schedule.nodes().values();
            let mut nodes: Vec<_> = nodes
                .map(|node| {
                    (
                        node.up,
                        node.heard,
                        node.promised.keys().collect::<Vec<_>>(),
                        node.leftover_on_rsa.len(),
                    )
                })
                .collect();
            nodes.sort();
            nodes.hash(&mut hasher);
            hasher.finish()
        };
        u128::from(part(0)) << 64 | u128::from(part(1))
    }
}

/// Visits every state that can be reached; returns how many there are, and which pairs of states.
fn explore(requests: &[Request], compute_nodes: u8, faults: u8) -> (usize, HashSet<(JobState, RsaState)>) {
    explore_from(World::new(requests.len(), compute_nodes, 3, site(), faults), requests)
}

fn explore_from(start: World, requests: &[Request]) -> (usize, HashSet<(JobState, RsaState)>) {
    let mut known = HashSet::from([start.key()]);
    let mut pairs = HashSet::new();
    let mut waiting = vec![start];
    while let Some(world) = waiting.pop() {
        for happening in world.happenings() {
            let mut next = world.clone();
            let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                next.happen(&happening, requests);
                if known.insert(next.key()) {
                    next.ends(requests);
                    for index in 0..requests.len() {
                        if next.held[index] && matches!(next.slurm[index], Slurm::Waiting | Slurm::Next) {
                            next.lets_go(index, requests);
                        }
                        if next.lost[index] && matches!(next.slurm[index], Slurm::Waiting | Slurm::Next) {
                            next.gives_back(index, requests);
                        }
                    }
                    pairs.extend(next.schedule.jobs().values().map(|job| (job.job_state, job.rsa_state)));
                    waiting.push(next.clone());
                }
            }));
            if let Err(panic) = tried {
                eprintln!(
                    "before: {:#?}\n{:?} {:?}\nthen: {happening:?}",
                    world.schedule.jobs(),
                    world.slurm,
                    world.physical
                );
                std::panic::resume_unwind(panic);
            }
        }
    }
    (known.len(), pairs)
}

#[test]
fn one_job_keeps_the_invariants_in_every_order_of_events_and_failures() {
    let requests = [
        request(Some("/a"), Some("/b"), false),
        request(Some("/a"), Some("/b"), true),
        request(Some("/a"), None, false),
        request(None, Some("/b"), false),
    ];
    let mut all = HashSet::new();
    for first in requests {
        let began = std::time::Instant::now();
        // A job on several nodes ends on one after the other.
        for (compute_nodes, faults) in [(0, 4), (1, 3), (2, 2)] {
            let (states, pairs) = explore(std::slice::from_ref(&first), compute_nodes, faults);
            println!("one job: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
            all.extend(pairs);
        }
    }
    // Every state is reached. These last no longer than the event that leads to them.
    use RsaState as S;
    let reached: HashSet<S> = all.iter().map(|(_, state)| *state).collect();
    let passing: Vec<S> = S::ALL.iter().filter(|state| !reached.contains(state)).copied().collect();
    let expected = [S::Assigned, S::Booted, S::Aborted, S::Unmounted, S::DoneStagingOut, S::Destroyed];
    assert_eq!(passing, expected);
}

#[test]
fn a_lost_journal_loses_no_results_in_any_order_of_events() {
    let began = std::time::Instant::now();
    let requests = [
        request(Some("/a"), Some("/b"), false),
        request(Some("/a"), Some("/b"), true),
        request(None, Some("/b"), false),
    ];
    for first in requests {
        for (compute_nodes, faults) in [(0, 1), (1, 1)] {
            let requests = std::slice::from_ref(&first);
            let world = World { journals: 1, ..World::new(1, compute_nodes, 2, site(), faults) };
            let (states, pairs) = explore_from(world, requests);
            println!("a lost journal: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
        }
    }
}

#[test]
fn a_run_that_the_workload_manager_has_forgotten_keeps_its_ram_disk_in_any_order_of_events() {
    let began = std::time::Instant::now();
    let requests = [
        request(Some("/a"), Some("/b"), false),
        request(Some("/a"), Some("/b"), true),
        request(None, Some("/b"), false),
    ];
    for first in requests {
        for (compute_nodes, faults) in [(1, 1), (2, 0)] {
            let requests = std::slice::from_ref(&first);
            let world = World { older_states: 1, ..World::new(1, compute_nodes, 2, site(), faults) };
            let (states, pairs) = explore_from(world, requests);
            println!("an older state: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
        }
    }
}

#[test]
fn jobs_that_have_one_number_are_kept_apart_in_any_order_of_events() {
    let began = std::time::Instant::now();
    let requests = [request(Some("/a"), Some("/b"), false), request(None, Some("/c"), false)];
    let mut world = World { one_number: true, ..World::new(2, 0, 3, site(), 1) };
    world.slurm[1] = Slurm::Absent;
    let (states, pairs) = explore_from(world, &requests);
    println!("one number: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
}

#[test]
fn two_jobs_keep_the_invariants_in_every_order_of_events() {
    let began = std::time::Instant::now();
    let both = request(Some("/a"), Some("/b"), false);
    let (states, pairs) = explore(&[both, request(None, Some("/c"), false)], 0, 1);
    println!("two jobs: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
    // One reads what the other writes, and must not start without it.
    let reads = Request { wait: Some(WaitPolicy::Hold), ..request(Some("/c/d"), None, false) };
    let (states, pairs) = explore(&[reads, request(None, Some("/c"), false)], 0, 1);
    println!(
        "one that reads what the other writes: {states} states, {} pairs, {:?}",
        pairs.len(),
        began.elapsed()
    );
}

#[test]
fn jobs_with_burst_buffers_keep_the_invariants_in_every_order_of_calls() {
    let began = std::time::Instant::now();
    let hold = |request: Request| Request { wait: Some(WaitPolicy::Hold), ..request };
    let one = [
        request(Some("/a"), Some("/b"), false),
        request(None, Some("/b"), false),
        hold(request(Some("/a"), Some("/b"), true)),
        hold(request(Some("/a"), None, false)),
    ];
    for first in one {
        for (compute_nodes, faults) in [(0, 1), (1, 1)] {
            let requests = std::slice::from_ref(&first);
            let world = World::new(1, compute_nodes, 2, site(), faults).with_burst_buffers();
            let (states, pairs) = explore_from(world, requests);
            println!("a burst buffer: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
        }
    }
    // Two that can't both have their nodes.
    let requests = [hold(request(Some("/a"), None, false)), hold(request(Some("/c"), None, false))];
    let world = World::new(2, 0, 2, site(), 0).with_burst_buffers();
    let (states, pairs) = explore_from(world, &requests);
    println!("two burst buffers: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
    // One reads what the other writes, and must not start without it.
    let requests = [hold(request(Some("/c/d"), None, false)), request(None, Some("/c"), false)];
    let world = World::new(2, 0, 4, site(), 0).with_burst_buffers();
    let (states, pairs) = explore_from(world, &requests);
    println!(
        "a burst buffer that reads what another one writes: {states} states, {} pairs, {:?}",
        pairs.len(),
        began.elapsed()
    );
    // The workload manager has a place for one that waits: the other is held meanwhile.
    let site = Site { kept_waiting: 1, ..site() };
    let world = World::new(2, 0, 2, site, 0).with_burst_buffers();
    let (states, pairs) = explore_from(world, &requests);
    println!(
        "two burst buffers and one place: {states} states, {} pairs, {:?}",
        pairs.len(),
        began.elapsed()
    );
}

#[test]
fn a_job_whose_burst_buffer_is_lost_keeps_no_rsa_nodes_in_any_order_of_calls() {
    let began = std::time::Instant::now();
    let hold = |request: Request| Request { wait: Some(WaitPolicy::Hold), ..request };
    let one = [
        request(Some("/a"), Some("/b"), false),
        request(None, Some("/b"), false),
        hold(request(Some("/a"), Some("/b"), true)),
    ];
    for first in one {
        let requests = std::slice::from_ref(&first);
        let world = World { buffer_losses: 1, ..World::new(1, 0, 2, site(), 1).with_burst_buffers() };
        let (states, pairs) = explore_from(world, requests);
        println!("a lost burst buffer: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
    }
}

#[test]
fn a_job_that_depends_on_results_is_held_until_they_are_home_in_any_order_of_events() {
    let began = std::time::Instant::now();
    let writes = request(None, Some("/c"), false);
    let hold = Request { wait: Some(WaitPolicy::Hold), ..request(Some("/c/d"), None, false) };
    for (depends, compute_nodes, faults) in [
        (request(Some("/c/d"), None, false), 0, 1),
        (request(Some("/c/d"), None, false), 1, 0),
        (request(None, Some("/c"), false), 0, 1),
        (hold, 0, 0),
    ] {
        let requests = [depends, writes.clone()];
        let limits = Limits { hold: Duration::from_secs(100), ..site().limits };
        let site = Site { limits, ..site() };
        let world = World { depends: true, ..World::new(2, compute_nodes, 3, site, faults) };
        let (states, pairs) = explore_from(world, &requests);
        println!("one that depends: {states} states, {} pairs, {:?}", pairs.len(), began.elapsed());
    }
}
