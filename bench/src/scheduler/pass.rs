//! A pass of the pure core: [`Schedule::handle`] of one look at a queue of 10,000 pending jobs, with
//! 1,000 RSA nodes. Nothing is written or begun here: it is the decision alone.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ondeck_core::schedule::{
    Action, Effects, Event, Node, Nodes, ObservedJob, Outcome, RsaState, Schedule, Sharing, Site, Time,
};
use ondeck_core::{Bytes, Epoch, Incarnation, JobId, NodeName, Owner, QueuedJob, Request, Standing};

use crate::interrupt;

/// Jobs that wait.
pub const PENDING: u32 = 10_000;
pub const NODES: u32 = 1_000;
/// Jobs that are next, where the queue is as usual.
pub const NEXT: u32 = 50;
/// Jobs that run with a RAM disk there.
pub const RUNNING: u32 = 400;
/// RSA nodes that are free, where hardly any is.
const FREE: u32 = 3;
/// What a waiting job asks for where they are hardly free.
const WANTED: u32 = 8;

const BEGIN: Time = Time(1_000_000_000);
/// From one look to the next.
const LATER: Time = Time(1_000_001_000);

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// Some jobs are next for the first time, and get nodes.
    Typical,
    /// The next look after that.
    TypicalUnchanged,
    /// All are next for the first time, and hardly a node is free.
    AllOnDeck,
    /// The same where jobs share nodes.
    AllOnDeckShared,
    /// The look after a job has ended.
    AllOnDeckOneEnds,
    /// A look when nothing has changed.
    AllOnDeckUnchanged,
}

impl Case {
    pub const ALL: [Case; 6] = [
        Case::Typical,
        Case::TypicalUnchanged,
        Case::AllOnDeck,
        Case::AllOnDeckShared,
        Case::AllOnDeckOneEnds,
        Case::AllOnDeckUnchanged,
    ];

    pub fn title(self) -> String {
        match self {
            Case::Typical => {
                format!("{NEXT} jobs are new on deck and get nodes, {RUNNING} run, the rest waits")
            }
            Case::TypicalUnchanged => "the same, nothing has changed since the last look".into(),
            Case::AllOnDeck => format!(
                "all are new on deck and want {WANTED} nodes each, {FREE} are free, {} run",
                NODES - FREE
            ),
            Case::AllOnDeckShared => "the same, but all want a part of a node, and nodes are shared".into(),
            Case::AllOnDeckOneEnds => "all on deck and waiting, one that runs has ended".into(),
            Case::AllOnDeckUnchanged => {
                "all on deck and waiting, nothing has changed since the last look".into()
            }
        }
    }

    /// The schedule before the look, and the look.
    fn prepare(self) -> Result<(Schedule, Vec<ObservedJob>)> {
        let shared = self == Case::AllOnDeckShared;
        let site = Site {
            debounce: Duration::ZERO,
            sharing: Sharing::Any,
            proportion: if shared { 64 } else { 1 },
            fractions: shared,
            ..Site::default()
        };
        let names =
            (0..NODES).map(|n| format!("r{n}").parse().map(|name: NodeName| (name, Node::new("default"))));
        let nodes: Nodes = names.collect::<Result<_, _>>()?;
        let mut schedule = Schedule::new(site, Vec::new(), nodes.clone(), 0, Epoch(0));
        for node in nodes.into_keys() {
            handle(&mut schedule, BEGIN, Event::NodeUp { node, capacity: Bytes(64 << 30) })?;
        }
        let typical = matches!(self, Case::Typical | Case::TypicalUnchanged);
        // Jobs that run, each on a node of its own and with results.
        let running = if typical { RUNNING } else { NODES - FREE };
        let width = if shared { 64 } else { 1 };
        let mut ahead: Vec<ObservedJob> = (0..running).map(|n| seen(n, Standing::Next, width)).collect();
        look(&mut schedule, &ahead)?;
        ahead.iter_mut().for_each(|seen| seen.job.standing = Standing::Running);
        look(&mut schedule, &ahead)?;
        let used = schedule.jobs().values().filter(|job| job.results).count();
        ensure!(used == running as usize, "{used} of {running} jobs have their RAM disks");

        let pending = (0..PENDING).map(|n| {
            let next = !typical || n < NEXT;
            let standing = if next { Standing::Next } else { Standing::Waiting };
            let nodes = match (typical, shared) {
                (true, _) => 1,
                (false, false) => WANTED,
                (false, true) => 48,
            };
            seen(running + n, standing, nodes)
        });
        let mut queue = [ahead, pending.collect()].concat();
        if shared {
            // The few free nodes are in use too, by jobs that leave too little for another.
            let few: Vec<ObservedJob> =
                (0..FREE).map(|n| seen(running + PENDING + n, Standing::Next, 40)).collect();
            look(&mut schedule, &[&queue[..running as usize], &few].concat())?;
            queue.extend(few);
        }
        match self {
            Case::Typical | Case::AllOnDeck | Case::AllOnDeckShared => {}
            // At rest: the look after nodes were given still tells those who got none how many are free now.
            Case::TypicalUnchanged | Case::AllOnDeckUnchanged => {
                look(&mut schedule, &queue)?;
                look(&mut schedule, &queue)?;
            }
            Case::AllOnDeckOneEnds => {
                look(&mut schedule, &queue)?;
                look(&mut schedule, &queue)?;
                queue[0].job.standing = Standing::Ended;
            }
        }
        Ok((schedule, queue))
    }
}

/// A job as the queue shows it; every one has directories of its own.
fn seen(number: u32, standing: Standing, node_count: u32) -> ObservedJob {
    let home = format!("/gpfs/scratch/user{}/project-{}", number % 200, number % 7);
    let request = Request {
        data_in: if number.is_multiple_of(2) {
            vec![format!("{home}/run-{number}/in").into()]
        } else {
            vec![]
        },
        data_out: vec![PathBuf::from(format!("{home}/run-{number}/out"))],
        out_size: Some(Bytes(1 << 30)),
        ..Request::default()
    };
    let job = QueuedJob {
        id: Incarnation { job: JobId(number + 1), submitted: 900_000 + u64::from(number), restarts: 0 },
        owner: Owner { uid: 1000 + number % 200, gid: 100 },
        account: format!("account{}", number % 20),
        standing,
        reason: if standing == Standing::Next { "Resources" } else { "Priority" }.into(),
        node_count,
        nodes: Vec::new(),
        start: None,
        submitted: 900_000 + u64::from(number),
        priority: 4_000_000_000 - u64::from(number),
        qos: "normal".into(),
        held_for_input: false,
        dependent: false,
        depends_on: Vec::new(),
        component_of: None,
        several: false,
        has_burst_buffer: false,
        waits_for_results: false,
        burst_buffer_lost: false,
    };
    let io_nodes = vec!["c1".parse()].into_iter().flatten().collect();
    ObservedJob { job, request: Some(request), work_dir: home.into(), io_nodes }
}

fn handle(schedule: &mut Schedule, now: Time, event: Event) -> Result<Effects> {
    schedule.handle(now, event).map_err(|error| anyhow::anyhow!("{error}"))
}

/// One look, with all work that follows done at once.
fn look(schedule: &mut Schedule, jobs: &[ObservedJob]) -> Result<()> {
    let begun = handle(schedule, BEGIN, Event::Queue { taken: BEGIN, jobs: jobs.to_vec() })?;
    let mut actions = begun.actions;
    while let Some(action) = actions.pop() {
        if let Action::Begin(job, order) = action {
            let outcome = Outcome::Done(String::new());
            let ended = Event::Ended { job, number: order.number, outcome };
            actions.extend(handle(schedule, BEGIN, ended)?.actions);
        }
    }
    // A job that reads waits for its Prolog.
    for seen in jobs.iter().filter(|seen| seen.job.standing == Standing::Running) {
        let ready = schedule.jobs().get(&seen.job.id).is_some_and(|job| job.rsa_state == RsaState::Ready);
        if ready {
            let begun = handle(schedule, BEGIN, Event::Starting(Box::new(seen.clone())))?;
            for action in begun.actions {
                if let Action::Begin(job, order) = action {
                    let outcome = Outcome::Done(String::new());
                    handle(schedule, BEGIN, Event::Ended { job, number: order.number, outcome })?;
                }
            }
        }
    }
    Ok(())
}

/// The times of one case, in milliseconds, sorted.
pub struct Times {
    pub case: Case,
    pub ms: Vec<f64>,
    /// Jobs that a pass changed.
    pub changed: usize,
}

impl Times {
    pub fn median(&self) -> f64 {
        crate::copies::median(&self.ms)
    }

    /// The time that 99 of 100 passes do not exceed.
    pub fn p99(&self) -> f64 {
        let at = (self.ms.len() * 99).div_ceil(100);
        self.ms.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    pub fn worst(&self) -> f64 {
        self.ms.last().copied().unwrap_or(f64::NAN)
    }
}

pub fn measure(case: Case, rounds: usize) -> Result<Times> {
    let (schedule, queue) = case.prepare().with_context(|| format!("{case:?} can't be prepared"))?;
    let mut times = Times { case, ms: Vec::new(), changed: 0 };
    for round in 0..=rounds {
        interrupt::check()?;
        let mut schedule = schedule.clone();
        let event = Event::Queue { taken: LATER, jobs: queue.clone() };
        let began = Instant::now();
        let effects = handle(&mut schedule, LATER, event)?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        times.changed = effects.jobs.len();
        let unchanged = matches!(case, Case::TypicalUnchanged | Case::AllOnDeckUnchanged);
        ensure!(
            !unchanged || (effects.jobs.is_empty() && effects.nodes.is_empty()),
            "a pass without news touched {} jobs",
            effects.jobs.len()
        );
        if round > 0 {
            times.ms.push(ms);
        }
    }
    times.ms.sort_by(f64::total_cmp);
    Ok(times)
}
