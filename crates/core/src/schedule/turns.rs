//! Whose turn it is: histories of jobs that want RSA nodes, with a clock.

use std::path::PathBuf;
use std::time::Duration;

use super::*;
use crate::{Bytes, EngineKind, Epoch, Incarnation, JobId, NodeName, Owner, QueuedJob, Request, Standing};

const BEGIN: Time = Time(1_000_000);

fn node(index: usize) -> NodeName {
    format!("r{index}").parse().unwrap()
}

fn id(index: usize) -> Incarnation {
    Incarnation { job: JobId(index as u32 + 1), submitted: index as u64 + 1, restarts: 0 }
}

fn site() -> Site {
    Site { debounce: Duration::ZERO, ..Site::default() }
}

/// The schedule of jobs with one directory each, which are told of by what they want and do.
struct Line {
    schedule: Schedule,
    now: Time,
    /// How many RSA nodes each wants, its priority, and what the workload manager does with it.
    jobs: Vec<(u32, u64, Standing)>,
    /// How many users there are, who submit in turn.
    users: usize,
    /// What those ask for that say no number of nodes.
    capacity: Option<Bytes>,
    /// Those that have their input made by a script.
    scripted: Vec<usize>,
}

impl Line {
    fn new(nodes: usize, site: Site) -> Line {
        let names = (0..nodes).map(|index| (node(index), Node::new("default"))).collect();
        let mut schedule = Schedule::new(site, Vec::new(), names, 0, Epoch(0));
        for index in 0..nodes {
            schedule.handle(BEGIN, Event::NodeUp { node: node(index), capacity: Bytes(1 << 40) }).unwrap();
        }
        Line { schedule, now: BEGIN, jobs: Vec::new(), users: 1, capacity: None, scripted: Vec::new() }
    }

    fn submit(&mut self, nodes: u32, priority: u64, does: Standing) -> usize {
        self.jobs.push((nodes, priority, does));
        self.jobs.len() - 1
    }

    /// The queue is seen after so many seconds; all work ends at once.
    fn look(&mut self, seconds: u64) {
        self.now = self.now.plus(Duration::from_secs(seconds));
        let jobs = (0..self.jobs.len()).filter_map(|index| self.seen(index)).collect();
        self.handle(Event::Queue { taken: self.now, jobs });
        self.end_all(|_, _| true);
    }

    /// The queue is seen, and RAM disks are built; what is staged goes on.
    fn build(&mut self) {
        let jobs = (0..self.jobs.len()).filter_map(|index| self.seen(index)).collect();
        self.handle(Event::Queue { taken: self.now, jobs });
        self.end_all(|_, work| work != Work::StageIn);
    }

    /// Work ends that is under way.
    fn end_all(&mut self, ends: impl Fn(Incarnation, Work) -> bool) {
        let next = |line: &Line| {
            let orders = line.schedule.jobs().values().filter_map(|job| Some((job.id, job.under_way?)));
            orders.filter(|(id, order)| ends(*id, order.work)).map(|(id, order)| (id, order.number)).next()
        };
        while let Some((job, number)) = next(self) {
            self.handle(Event::Ended { job, number, outcome: Outcome::Done(String::new()) });
        }
    }

    fn is_staging(&self, index: usize) -> bool {
        self.schedule.jobs().get(&id(index)).is_some_and(|job| job.rsa_state == RsaState::StagingIn)
    }

    fn seen(&self, index: usize) -> Option<ObservedJob> {
        let (nodes, priority, standing) = self.jobs[index];
        let job = QueuedJob {
            id: id(index),
            owner: Owner { uid: 1000 + (index % self.users) as u32, gid: 1000 },
            account: String::new(),
            standing,
            reason: String::new(),
            node_count: 1,
            nodes: Vec::new(),
            start: (standing == Standing::Running).then_some(0),
            submitted: index as u64 + 1,
            priority,
            qos: String::new(),
            held_for_input: false,
            dependent: false,
            depends_on: Vec::new(),
            component_of: None,
            several: false,
            has_burst_buffer: false,
            waits_for_results: false,
            burst_buffer_lost: false,
        };
        let data_out = vec![PathBuf::from(format!("/{index}"))];
        let nodes = Some(nodes).filter(|nodes| *nodes > 0);
        let capacity = self.capacity.filter(|_| nodes.is_none());
        // What it unpacks its input from.
        let is_scripted = self.scripted.contains(&index);
        let (stage_in, data_in) = if is_scripted {
            (Some("/unpack".into()), vec![PathBuf::from(format!("/in/{index}"))])
        } else {
            (None, Vec::new())
        };
        let request = Some(Request { nodes, capacity, data_in, data_out, stage_in, ..Request::default() });
        let io_nodes = vec!["c0".parse().unwrap()];
        (standing != Standing::Ended).then_some(ObservedJob { job, request, work_dir: "/".into(), io_nodes })
    }

    fn handle(&mut self, event: Event) {
        let before = self.schedule.clone();
        self.schedule.handle(self.now, event).unwrap();
        nobody_overtakes(&before, &self.schedule, self.now);
    }

    fn has(&self, index: usize) -> bool {
        self.schedule.jobs().get(&id(index)).is_some_and(|job| job.allocation.is_some())
    }

    fn waits_for(&self, index: usize) -> &str {
        &self.schedule.jobs()[&id(index)].waits_for
    }
}

/// Whoever has got nodes has not overtaken anybody of his pool who has waited beyond patience for nodes that will come.
pub(super) fn nobody_overtakes(before: &Schedule, after: &Schedule, now: Time) {
    let waited = |job: &Job| policy::turn(after.site(), &before.served, now, job);
    let got = after.jobs().values().filter(|job| {
        let before = before.jobs().get(&job.id);
        job.rsa_state == RsaState::Booting && before.is_none_or(|before| before.allocation.is_none())
    });
    for got in got {
        let since = before.jobs().get(&got.id).and_then(waited);
        for waits in after.jobs().values() {
            let Some(longer) = waited(waits).filter(|theirs| since.is_none_or(|mine| *theirs < mine)) else {
                continue;
            };
            let lend = after.nodes().values().filter(|node| {
                let stays = |of: &Incarnation| {
                    let state = after.jobs().get(of).map(|job| job.rsa_state);
                    matches!(state, None | Some(RsaState::Held | RsaState::Lost))
                };
                node.up
                    && node.drained.is_empty()
                    && node.leftover_on_rsa.is_empty()
                    && !node.promised.keys().any(stays)
            });
            let text = &waits.waits_for;
            let waits_for_nodes = text.contains("RSA nodes for") || text.contains("comes first");
            let proportional = waits.compute_nodes / after.site().proportion;
            let wants = waits.request.nodes.unwrap_or(proportional).max(1);
            assert!(
                !waits_for_nodes || !machine::wants_nodes(waits) || lend.count() < wants as usize,
                "{} has waited since {longer:?} and is overtaken by {}",
                waits.id,
                got.id
            );
        }
    }
}

#[test]
fn of_a_pool_half_is_kept_for_a_job_that_runs_until_it_has_waited_for_long() {
    // Two of four are in use by a job that runs; another one wants two.
    let mut line = Line::new(4, site());
    let first = line.submit(3, 10, Standing::Running);
    line.look(0);
    assert!(line.has(first));
    let runs = line.submit(2, 1, Standing::Running);
    line.look(1);
    let next = line.submit(1, 5, Standing::Next);
    line.look(1);
    assert!(!line.has(runs) && line.waits_for(runs).contains("have 1 need 2"), "{}", line.waits_for(runs));
    assert!(
        !line.has(next) && line.waits_for(next).contains("kept for job 2, which runs"),
        "{}",
        line.waits_for(next)
    );
    // It comes first now, and is not overtaken by the other one, which has waited for nearly as long.
    line.look(599);
    assert!(
        !line.has(next)
            && line.waits_for(next).contains("job 2 has waited for RSA nodes for more than 10 min")
    );
    line.jobs[first].2 = Standing::Ended;
    line.look(1);
    assert!(line.has(runs) && line.has(next));

    // Nothing is kept where nobody who runs waits, and for nobody who wants more than half.
    let mut line = Line::new(3, site());
    let staged: Vec<usize> = (0..3).map(|_| line.submit(1, 5, Standing::Next)).collect();
    line.look(0);
    assert!(staged.iter().all(|index| line.has(*index)));
    let mut line = Line::new(3, site());
    let (first, runs) = (line.submit(2, 9, Standing::Running), line.submit(2, 1, Standing::Running));
    let next = line.submit(1, 5, Standing::Next);
    line.look(0);
    assert!(line.has(first) && line.has(next) && !line.has(runs));
    // Nor where the site does not want it.
    let mut line = Line::new(4, Site { sharing: Sharing::Any, ..site() });
    let (first, runs) = (line.submit(3, 9, Standing::Running), line.submit(2, 1, Standing::Running));
    let next = line.submit(1, 5, Standing::Next);
    line.look(0);
    assert!(line.has(first) && line.has(next) && !line.has(runs));
}

#[test]
fn a_job_that_waits_for_nodes_that_do_not_come_back_is_overtaken() {
    let mut line = Line::new(3, site());
    line.handle(Event::Drain { node: node(0), why: "somebody".into() });
    let large = line.submit(3, 9, Standing::Next);
    line.look(0);
    line.look(601);
    let small = line.submit(1, 1, Standing::Next);
    line.look(1);
    assert!(!line.has(large) && line.has(small));
    // Once there are enough again, nobody else gets one.
    line.handle(Event::Resume(node(0)));
    let other = line.submit(1, 20, Standing::Next);
    line.look(1);
    assert!(!line.has(large) && !line.has(other), "{}", line.waits_for(other));
    line.jobs[small].2 = Standing::Ended;
    line.look(1);
    assert!(line.has(large) && !line.has(other));
}

#[test]
fn a_job_that_is_ready_and_does_not_start_yields_to_one_that_has_waited_for_long() {
    let mut line = Line::new(1, site());
    let ready = line.submit(1, 9, Standing::Next);
    line.look(0);
    line.look(4000);
    assert!(line.has(ready), "nobody wants its nodes");
    let waits = line.submit(1, 1, Standing::Next);
    line.look(1);
    line.look(599);
    assert!(line.has(ready) && !line.has(waits));
    line.look(1);
    line.look(0);
    assert!(!line.has(ready) && line.has(waits));
}

#[test]
fn who_has_many_jobs_that_do_not_start_does_not_keep_the_nodes_from_others() {
    let mut line = Line::new(1, site());
    line.users = 2;
    // Of the first user five, the first of which gets the node and keeps it for as long as it may; of the other one the last.
    let theirs: Vec<usize> = (0..5)
        .map(|_| {
            let job = line.submit(1, 9, Standing::Next);
            line.submit(1, 0, Standing::Ended);
            job
        })
        .collect();
    line.look(0);
    assert!(line.has(theirs[0]));
    line.submit(1, 0, Standing::Ended);
    line.look(60);
    let mine = line.submit(1, 1, Standing::Next);
    // The next of theirs has waited for longer; after that it is somebody else's turn.
    for (has, other) in [(theirs[1], mine), (mine, theirs[2])] {
        line.look(0);
        line.look(3600);
        line.look(0);
        assert!(line.has(has) && !line.has(other));
    }
    // And then theirs again, who have waited for longer than what came since.
    line.submit(1, 0, Standing::Ended);
    let new = line.submit(1, 9, Standing::Next);
    line.jobs[mine].2 = Standing::Ended;
    line.look(700);
    assert!(theirs.iter().any(|job| line.has(*job)) && !line.has(new));
}

#[test]
fn what_one_event_gives_back_goes_to_whose_turn_it_is() {
    // Three nodes, of which each of two users may have all.
    let mut line = Line::new(3, Site { user_nodes: Some(3), ..site() });
    line.users = 2;
    let mine = line.submit(2, 5, Standing::Next);
    let theirs = line.submit(3, 9, Standing::Next);
    line.look(0);
    assert!(line.has(theirs) && !line.has(mine));
    // Another one of mine comes before mine, so that I have too many for both.
    let my_other = line.submit(2, 9, Standing::Next);
    line.jobs[theirs].2 = Standing::Ended;
    line.look(300);
    assert!(line.has(my_other) && line.waits_for(mine).contains("its user has 2 of at most 3"));
    // Mine has waited beyond patience when that one ends. Who comes after it does not get its nodes.
    let new = line.submit(2, 1, Standing::Next);
    line.look(400);
    line.jobs[my_other].2 = Standing::Ended;
    line.look(1);
    assert!(line.has(mine) && !line.has(new));
}

#[test]
fn what_nobody_has_is_refused_whatever_is_asked_for() {
    for nodes in [2, 5, 1 << 31, u32::MAX] {
        for standing in [Standing::Running, Standing::Next] {
            let mut line = Line::new(1, Site { user_nodes: Some(1), ..site() });
            let has = line.submit(1, 1, Standing::Next);
            line.look(0);
            let job = line.submit(nodes, 9, standing);
            line.look(1);
            line.look(3600);
            assert!(line.has(has) && !line.has(job), "{nodes}");
        }
    }
    for capacity in [1 << 50, u64::MAX - 1, u64::MAX] {
        for engine in [EngineKind::Gluster, EngineKind::Ceph, EngineKind::Simulated] {
            let site = Site { fractions: true, engine, ..site() };
            let mut line = Line::new(2, site);
            let job = line.submit(0, 9, Standing::Running);
            line.capacity = Some(Bytes(capacity));
            line.look(0);
            line.look(3600);
            assert!(!line.has(job), "{capacity} {engine}");
        }
    }
}

/// The jobs of the first user come first, those of the second are submitted later: three of one, then one of the other.
fn two_users(scripted: &[usize]) -> (Line, [usize; 3], usize) {
    let mut line = Line::new(8, Site { staging: Some(2), ..site() });
    (line.users, line.scripted) = (2, scripted.to_vec());
    let theirs = [0, 2, 4].map(|_| {
        let job = line.submit(1, 9, Standing::Next);
        line.submit(1, 0, Standing::Ended);
        job
    });
    line.build();
    line.jobs[1] = (1, 1, Standing::Next);
    line.build();
    (line, theirs, 1)
}

#[test]
fn a_place_to_be_staged_goes_to_the_user_who_has_fewest() {
    let (mut line, theirs, mine) = two_users(&[]);
    assert_eq!(theirs.map(|job| line.is_staging(job)), [true, true, false]);
    assert!(!line.is_staging(mine) && line.waits_for(mine).contains("2 jobs are staging already"));
    // The third of theirs was there before, and goes first in the queue.
    line.end_all(|job, _| job == id(theirs[0]));
    assert!(line.is_staging(mine) && !line.is_staging(theirs[2]), "{}", line.waits_for(mine));
    line.end_all(|job, _| job == id(mine));
    assert!(line.is_staging(theirs[2]));
}

#[test]
fn scripts_that_do_not_end_keep_no_other_user_from_being_staged() {
    // Theirs all have scripts, and mine has none.
    let (line, theirs, mine) = two_users(&[0, 2, 4]);
    assert_eq!(theirs.map(|job| line.is_staging(job)), [true, true, false]);
    assert!(line.is_staging(mine), "{}", line.waits_for(mine));
    // And mine has one, too.
    let (line, theirs, mine) = two_users(&[0, 1, 2, 4]);
    assert_eq!(theirs.map(|job| line.is_staging(job)), [true, true, false]);
    assert!(line.is_staging(mine), "{}", line.waits_for(mine));
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(128))]

    /// New jobs of every priority come for ever; a job runs for at most an hour. Each gets its nodes within the time that
    /// those need who were there before it; of those who came when it had waited beyond patience, each other user has one
    /// before it, and one more for each job that its own user has before it.
    #[test]
    fn nobody_waits_for_ever(
        choices in proptest::collection::vec((1_u32..5, 0_u64..50, proptest::bool::ANY, 0_u64..40), 20..80),
        any in proptest::bool::ANY,
        users in 1_usize..4,
    ) {
        let sharing = if any { Sharing::Any } else { Sharing::Half };
        let mut line = Line::new(4, Site { sharing, ..site() });
        line.users = users;
        let mut since: Vec<Time> = Vec::new();
        let mut has_since: Vec<Option<Time>> = Vec::new();
        let (hour, mut longest) = (Duration::from_secs(3600), Duration::ZERO);
        for (nodes, priority, runs, pause) in choices {
            line.submit(nodes, priority, if runs { Standing::Running } else { Standing::Next });
            since.push(line.now);
            has_since.push(None);
            for _ in 0..=pause {
                line.look(60);
                for index in 0..line.jobs.len() {
                    let has = line.has(index);
                    match has_since[index] {
                        None if has => has_since[index] = Some(line.now),
                        Some(then) if line.now.since(then) > hour => line.jobs[index].2 = Standing::Ended,
                        _ => {}
                    }
                    if has_since[index].is_none() && line.jobs[index].2 != Standing::Ended {
                        longest = longest.max(line.now.since(since[index]));
                        // Who came while it had not waited beyond patience may come first; those are few.
                        let before = since.iter().filter(|at| **at <= since[index].plus(site().patience)).count();
                        let own = (0..index).filter(|other| other % users == index % users).count();
                        let before = before + (own + 1) * (users - 1);
                        let most = site().patience + (hour + Duration::from_secs(120)) * before as u32;
                        proptest::prop_assert!(line.now.since(since[index]) <= most, "job {} of {:?}", index + 1, line.jobs);
                    }
                }
            }
        }
    }
}
