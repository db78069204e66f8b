//! The workload manager: who starts when, on whole nodes.
//!
//! Jobs start in their order, and where the first one has to wait, EASY backfill (Lifka, "The ANL/IBM SP scheduling system",
//! JSSPP 1995) lets others start before it that do not delay it: they end before it can start, as far as their requested times
//! are right, or need nodes that it will not need. A job that runs for longer than it requested is not ended; it may end at
//! any moment then.

use std::collections::{BTreeMap, BTreeSet};

use ondeck_core::schedule::Time;
use serde::Serialize;

use crate::waiting::{Asked, Room, Waiting};

/// In which order jobs start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// First come, first served.
    Fcfs,
    /// By age and size, as Slurm's multifactor plugin weighs them: a job on the whole machine comes before those that were
    /// submitted at most a day before it, and a smaller one before so much less.
    Size,
}

/// What a job on the whole machine gains over one on none of it.
const SIZE_IS_WORTH_MS: u64 = 24 * 3600 * 1000;

impl Order {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Order::Fcfs => "fcfs",
            Order::Size => "size",
        }
    }

    /// The place of each job: jobs are given by their submission in milliseconds and their nodes, in the order of submission.
    fn places(self, jobs: &[(u64, u32)], nodes: u32) -> Vec<u32> {
        let key = |index: &u32| {
            let (submitted, of_job) = jobs[*index as usize];
            match self {
                Order::Fcfs => (i128::from(submitted), *index),
                Order::Size => {
                    let gain = u128::from(SIZE_IS_WORTH_MS) * u128::from(of_job) / u128::from(nodes.max(1));
                    (i128::from(submitted) - gain as i128, *index)
                }
            }
        };
        let mut sorted: Vec<u32> = (0..jobs.len() as u32).collect();
        sorted.sort_by_key(key);
        sorted
    }
}

/// What is known of a job here.
#[derive(Clone, Copy, Debug)]
struct Known {
    asked: Asked,
    /// Its place in the order.
    place: u32,
    held: bool,
}

/// The workload manager with its queue and its machine. Jobs are numbers from 0, in the order of their submission.
#[derive(Clone, Debug)]
pub struct WorkloadManager {
    free: u32,
    jobs: Vec<Known>,
    /// The job at each place.
    at_place: Vec<u32>,
    waiting: Waiting,
    /// Those that were put before all others, in the order of their places.
    in_front: BTreeMap<u32, u32>,
    /// When each of those that run will have ended, if its requested time is right.
    running: BTreeSet<(Time, u32)>,
    ends: BTreeMap<u32, Time>,
    /// How often anything has changed.
    changes: u64,
}

impl WorkloadManager {
    /// A machine without jobs. Of each that will come: its submission in milliseconds, its nodes, its requested milliseconds.
    pub fn new(nodes: u32, order: Order, jobs: impl Iterator<Item = (u64, u32, u64)>) -> WorkloadManager {
        let jobs: Vec<(u64, u32, u64)> = jobs.collect();
        let submissions: Vec<(u64, u32)> =
            jobs.iter().map(|(submitted, nodes, _)| (*submitted, *nodes)).collect();
        let at_place = order.places(&submissions, nodes);
        let mut known: Vec<Known> = jobs
            .iter()
            .map(|(_, nodes, ms)| Known { asked: Asked { nodes: *nodes, ms: *ms }, place: 0, held: false })
            .collect();
        for (place, job) in at_place.iter().enumerate() {
            known[*job as usize].place = place as u32;
        }
        WorkloadManager {
            free: nodes,
            waiting: Waiting::new(known.len()),
            jobs: known,
            at_place,
            in_front: BTreeMap::new(),
            running: BTreeSet::new(),
            ends: BTreeMap::new(),
            changes: 0,
        }
    }

    /// Grows whenever the queue or what runs has changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The nodes that no job has.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// A job is submitted; a held one waits until it is released.
    pub fn submit(&mut self, job: u32, held: bool) {
        self.changes += 1;
        let known = &mut self.jobs[job as usize];
        known.held = held;
        if !held {
            let (place, asked) = (known.place as usize, known.asked);
            self.waiting.insert(place, asked);
        }
    }

    /// A job that waits is held, or a held one waits again. Nothing happens to one that runs.
    pub fn set_held(&mut self, job: u32, held: bool) {
        let known = self.jobs[job as usize];
        if known.held != held && !self.ends.contains_key(&job) {
            if held {
                self.waiting.remove(known.place as usize);
            }
            self.submit(job, held);
        }
    }

    /// The place of each job in the order.
    pub fn places(&self) -> Vec<u32> {
        self.jobs.iter().map(|job| job.place).collect()
    }

    /// Whether a job is held.
    pub fn is_held(&self, job: u32) -> bool {
        self.jobs[job as usize].held
    }

    /// A job is put before all that were not, or has its own place again.
    pub fn set_in_front(&mut self, job: u32, in_front: bool) {
        self.changes += 1;
        let place = self.jobs[job as usize].place;
        if in_front {
            self.in_front.insert(place, job)
        } else {
            self.in_front.remove(&place)
        };
    }

    /// A job has left its nodes.
    pub fn ended(&mut self, job: u32) {
        self.changes += 1;
        if let Some(end) = self.ends.remove(&job) {
            self.running.remove(&(end, job));
            self.free += self.jobs[job as usize].asked.nodes;
        }
    }

    /// The first `count` jobs that wait, as they stand in line.
    pub fn first(&self, count: usize) -> Vec<u32> {
        let mut found: Vec<u32> =
            self.in_front.values().copied().filter(|job| self.is_waiting(*job)).take(count).collect();
        let mut from = 0;
        while found.len() < count
            && let Some(place) = self.waiting.first_from(from)
        {
            let job = self.at_place[place];
            if !self.in_front.contains_key(&(place as u32)) {
                found.push(job);
            }
            from = place + 1;
        }
        found
    }

    /// When the first `count` jobs that wait are expected to start, as Slurm's backfill plans it: each at the first moment from
    /// which on its nodes are free for all of its requested time, and those after it go around it.
    pub fn expected(&self, now: Time, count: usize) -> Vec<(u32, Time)> {
        let mut plan = Plan::new(now, self.free);
        for (end, job) in &self.running {
            // Whoever has run for longer than it asked for may end at any moment.
            plan.gains((*end).max(now), self.jobs[*job as usize].asked.nodes);
        }
        let first = self.first(count).into_iter();
        first.filter_map(|job| Some((job, plan.take(self.jobs[job as usize].asked)?))).collect()
    }

    /// Whether a job waits and is not held.
    pub fn is_waiting(&self, job: u32) -> bool {
        self.waiting.at(self.jobs[job as usize].place as usize).is_some()
    }

    /// Starts all that may start now, and returns them in the order of their starts.
    pub fn pass(&mut self, now: Time) -> Vec<u32> {
        let mut started = Vec::new();
        let first = loop {
            if self.free == 0 {
                return started;
            }
            let Some(first) = self.first(1).first().copied() else { return started };
            if self.jobs[first as usize].asked.nodes > self.free {
                break first;
            }
            self.start(first, now);
            started.push(first);
        };
        let mut room = self.room_before(first, now);
        // Those that were put in front are tried before all others.
        let in_front: Vec<u32> =
            self.in_front.values().copied().filter(|job| self.is_waiting(*job)).collect();
        for job in in_front.into_iter().filter(|job| *job != first) {
            if room.fits(self.jobs[job as usize].asked) {
                self.start_within(job, now, &mut room);
                started.push(job);
            }
        }
        let mut from = 0;
        while room.free > 0
            && let Some(place) = self.waiting.first_that_fits(from, room)
        {
            from = place + 1;
            let job = self.at_place[place];
            if job != first {
                self.start_within(job, now, &mut room);
                started.push(job);
            }
        }
        started
    }

    /// Starts a job for which there is room, and takes that away.
    fn start_within(&mut self, job: u32, now: Time, room: &mut Room) {
        let asked = self.jobs[job as usize].asked;
        self.start(job, now);
        room.free -= asked.nodes;
        if asked.ms > room.ms {
            room.spare -= asked.nodes;
        }
        room.spare = room.spare.min(room.free);
    }

    /// What others may have without delaying the first.
    fn room_before(&self, first: u32, now: Time) -> Room {
        let needs = self.jobs[first as usize].asked.nodes;
        let mut free = self.free;
        for (end, job) in &self.running {
            free += self.jobs[*job as usize].asked.nodes;
            if free >= needs {
                // Those that end in the same moment give room to others, too; and whoever has run for longer than it asked for
                // may end at any moment.
                let at = (*end).max(now);
                let together = self.running.range((*end, job + 1)..=(at, u32::MAX));
                free += together.map(|(_, job)| self.jobs[*job as usize].asked.nodes).sum::<u32>();
                let ms = at.0 - now.0;
                return Room { free: self.free, spare: (free - needs).min(self.free), ms };
            }
        }
        // More than the machine has: such jobs are refused before.
        Room { free: self.free, spare: self.free, ms: u64::MAX }
    }

    fn start(&mut self, job: u32, now: Time) {
        self.changes += 1;
        let known = self.jobs[job as usize];
        let end = Time(now.0.saturating_add(known.asked.ms));
        self.waiting.remove(known.place as usize);
        self.in_front.remove(&known.place);
        self.running.insert((end, job));
        self.ends.insert(job, end);
        self.free -= known.asked.nodes;
    }
}

/// How many nodes are free from when on.
struct Plan {
    /// From the first moment on, in the order of time; the last one is for ever.
    free: Vec<(Time, u32)>,
}

impl Plan {
    fn new(now: Time, free: u32) -> Plan {
        Plan { free: vec![(now, free)] }
    }

    /// Nodes come back, not before any that came before.
    fn gains(&mut self, at: Time, nodes: u32) {
        let Some((last, free)) = self.free.last_mut() else { return };
        if *last == at {
            *free += nodes;
        } else {
            let free = *free + nodes;
            self.free.push((at, free));
        }
    }

    /// The first moment at which somebody gets what it asks for; it is taken. Nothing for more than there is.
    fn take(&mut self, asked: Asked) -> Option<Time> {
        let mut from = 0;
        let (start, end, to) = loop {
            let start = self.free[from..].iter().position(|(_, free)| *free >= asked.nodes)? + from;
            let end = Time(self.free[start].0.0.saturating_add(asked.ms.max(1)));
            // The first step that begins when it is over.
            let to = self.free[start..].iter().position(|(at, _)| *at >= end);
            let to = to.map_or(self.free.len(), |to| to + start);
            match self.free[start..to].iter().position(|(_, free)| *free < asked.nodes) {
                Some(too_few) => from = start + too_few,
                None => break (start, end, to),
            }
        };
        if self.free.get(to).is_none_or(|(at, _)| *at != end) {
            let free = self.free[to - 1].1;
            self.free.insert(to, (end, free));
        }
        self.free[start..to].iter_mut().for_each(|(_, free)| *free -= asked.nodes);
        Some(self.free[start].0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        /// Every moment is tried, second by second.
        #[test]
        fn a_plan_gives_everybody_the_first_moment_that_suits(
            ends in proptest::collection::vec((0u64..12, 1u32..4), 0..5),
            asked in proptest::collection::vec((1u32..9, 1u64..8), 0..12),
        ) {
            let mut ends = ends;
            ends.sort_unstable();
            let mut plan = Plan::new(Time(0), 2);
            ends.iter().for_each(|(at, nodes)| plan.gains(Time(*at), *nodes));
            let mut free: Vec<u32> = (0..200)
                .map(|at| 2 + ends.iter().filter(|(end, _)| *end <= at).map(|(_, nodes)| nodes).sum::<u32>())
                .collect();
            for (nodes, ms) in asked {
                let suits = |start: &usize| free[*start..start + ms as usize].iter().all(|free| *free >= nodes);
                let wanted = (0..190).find(suits);
                let found = plan.take(Asked { nodes, ms });
                proptest::prop_assert_eq!(found, wanted.map(|start| Time(start as u64)));
                if let Some(start) = wanted {
                    free[start..start + ms as usize].iter_mut().for_each(|free| *free -= nodes);
                }
            }
        }
    }

    #[test]
    fn who_is_first_is_expected_when_its_room_is_there_and_those_after_it_go_around_it() {
        // 0 runs on 6 of 10 for 100 s; 1 needs 8; 2 fits beside both, 3 beside neither; 4 fits before.
        let mut manager = manager(10, Order::Fcfs, &[(6, 100), (8, 10), (2, 500), (9, 10), (4, 90)]);
        manager.set_held(2, true);
        manager.set_held(4, true);
        assert_eq!(manager.pass(Time(0)), [0]);
        manager.set_held(2, false);
        manager.set_held(4, false);
        let at = |second: u64| Time(second * 1000);
        let now = at(1);
        let all = [(1, at(100)), (2, now), (3, at(501)), (4, at(110))];
        assert_eq!(manager.expected(now, 9), all);
        assert_eq!(manager.expected(now, 2), all[..2]);
        let room = manager.room_before(1, now);
        assert_eq!(now.0 + room.ms, 100_000);
    }

    /// Jobs that are all submitted at once, by their nodes and seconds.
    fn manager(nodes: u32, order: Order, jobs: &[(u32, u64)]) -> WorkloadManager {
        let jobs: Vec<(u64, u32, u64)> =
            jobs.iter().map(|(nodes, seconds)| (0, *nodes, seconds * 1000)).collect();
        let mut manager = WorkloadManager::new(nodes, order, jobs.iter().copied());
        (0..jobs.len() as u32).for_each(|job| manager.submit(job, false));
        manager
    }

    #[test]
    fn who_was_put_in_front_is_first_and_is_tried_first_where_others_may_go_before() {
        // 0 runs on 6 of 10; 1 needs 8, and waits for 100 s; 2 and 3 both fit beside 0 until then, but not together.
        let mut manager = manager(10, Order::Fcfs, &[(6, 100), (8, 10), (3, 50), (3, 50)]);
        let mut other = manager.clone();
        assert_eq!(manager.pass(Time(0)), [0, 2]);
        other.set_in_front(3, true);
        other.set_in_front(1, true);
        assert_eq!(other.first(4), [1, 3, 0, 2]);
        assert_eq!(other.pass(Time(0)), [1]);
        other.ended(1);
        assert_eq!(other.pass(Time(10_000)), [3, 0]);
    }

    #[test]
    fn by_size_the_whole_machine_comes_before_a_node_that_was_submitted_less_than_a_day_before() {
        let hour = 3_600_000;
        let jobs = [(0, 1, hour), (10 * hour, 10, hour), (23 * hour, 5, hour), (40 * hour, 10, hour)];
        let places = WorkloadManager::new(10, Order::Size, jobs.into_iter()).places();
        assert_eq!(places, [1, 0, 2, 3]);
    }

    #[test]
    fn a_held_job_waits_until_it_is_released() {
        let mut manager = manager(4, Order::Fcfs, &[(2, 10), (2, 10)]);
        manager.set_held(0, true);
        assert_eq!((manager.first(2), manager.is_held(0)), (vec![1], true));
        assert_eq!(manager.pass(Time(0)), [1]);
        manager.set_held(0, false);
        assert_eq!(manager.pass(Time(0)), [0]);
        // It runs: nothing is held of it any more.
        manager.set_held(0, true);
        assert!(!manager.is_held(0));
    }
}
