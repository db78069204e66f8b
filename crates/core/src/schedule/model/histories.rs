//! Long histories of many jobs and nodes: who wins the nodes, whose results others wait for, who is demoted.
//!
//! The histories are the same in every run. `ONDECK_HISTORIES=N` tries N others. What fails is told as the events that
//! are needed for it, the others left out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::SystemTime;

use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};

use super::*;

/// How many histories are tried, and how long the longest of them is.
const HISTORIES: u64 = 1024;
const LONGEST: u64 = 600;

/// Seven jobs that meet in their paths, in a world with one of sixteen policies in which anything may fail at any time.
fn world(policies: u8) -> (World, Vec<Request>) {
    let paths = ["/a", "/a/b", "/c", "/d"];
    let requests: Vec<Request> = (0..7)
        .map(|index| {
            let (one, other) = (paths[index % 4], paths[(index / 2 + 1) % 4]);
            let wait = (index % 2 == 1).then_some(WaitPolicy::Hold);
            let request =
                request((index % 3 != 0).then_some(one), (index % 3 != 1).then_some(other), index % 2 == 0);
            Request { wait, ..request }
        })
        .collect();
    let site = Site {
        sharing: if policies & 1 == 0 { Sharing::Half } else { Sharing::Any },
        fractions: policies & 2 == 0,
        proportion: if policies & 2 == 0 { 4 } else { 1 },
        staging: (policies & 4 == 0).then_some(1),
        user_nodes: (policies & 8 == 0).then_some(4),
        ..site()
    };
    let world = World { drains: true, older_states: 1, ..World::new(requests.len(), 2, 5, site, u8::MAX) };
    (world, requests)
}

/// Lets something happen; what fails is the error.
fn step(world: &mut World, happening: &Happening, requests: &[Request]) -> Result<(), String> {
    let tried = catch_unwind(AssertUnwindSafe(|| world.happen(happening, requests)));
    (world.faults, world.losses, world.swaps, world.older_states) = (u8::MAX, 0, 0, 1);
    tried.map_err(words)
}

fn ends(world: &World, requests: &[Request]) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| world.ends(requests))).map_err(words)
}

fn words(panic: Box<dyn std::any::Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().copied().unwrap_or_default().to_owned(),
    }
}

/// What fails in a history; nothing also if it can't have happened so.
fn fails(policies: u8, history: &[Happening]) -> Option<String> {
    let (mut world, requests) = world(policies);
    for happening in history {
        let text = format!("{happening:?}");
        let possible = world.happenings().iter().any(|other| format!("{other:?}") == text);
        if !possible {
            return None;
        }
        if let Err(why) = step(&mut world, happening, &requests) {
            return Some(why);
        }
    }
    ends(&world, &requests).err()
}

/// The same failure with as few events as can be: ever smaller pieces are left out.
fn smallest(policies: u8, mut history: Vec<Happening>, why: &str) -> Vec<Happening> {
    let kind = |why: &str| -> String { why.chars().filter(|letter| !letter.is_numeric()).take(40).collect() };
    let mut size = history.len().div_ceil(2);
    while size > 0 {
        let (mut at, mut any) = (0, false);
        while at < history.len() {
            let mut fewer = history.clone();
            fewer.drain(at..history.len().min(at + size));
            if fails(policies, &fewer).is_some_and(|other| kind(&other) == kind(why)) {
                (history, any) = (fewer, true);
            } else {
                at += size;
            }
        }
        if !any || size > 1 {
            size /= 2;
        }
    }
    history
}

#[test]
fn long_random_histories_keep_the_invariants() {
    let more = std::env::var("ONDECK_HISTORIES").ok();
    let number = more.as_ref().map_or(HISTORIES, |number| number.parse().unwrap());
    let mut seed = [7; 32];
    if more.is_some() {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        seed[..16].copy_from_slice(&now.to_le_bytes());
    }
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    for _ in 0..number {
        let policies = (random.next_u64() % 16) as u8;
        let (mut world, requests) = world(policies);
        let mut history = Vec::new();
        let length = random.next_u64() % LONGEST;
        let result = (0..length).try_for_each(|_| {
            let mut all = world.happenings();
            let chosen = all.swap_remove(random.next_u64() as usize % all.len());
            history.push(chosen.clone());
            step(&mut world, &chosen, &requests)
        });
        if let Err(why) = result.and_then(|()| ends(&world, &requests)) {
            let history = smallest(policies, history, &why);
            let why = fails(policies, &history).unwrap_or(why);
            let events: String = history.iter().map(|happening| format!("  {happening:?}\n")).collect();
            panic!("with the policies {policies}, after\n{events}{why}");
        }
    }
}
