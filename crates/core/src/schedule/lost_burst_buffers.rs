//! Histories of jobs whose burst buffers the workload manager has lost: its daemon was killed before it had saved them.

use std::time::Duration;

use super::notice::Life;
use super::*;
use crate::{Bytes, Epoch, Incarnation, JobId, NodeName, Owner, QueuedJob, Request, Standing};

const BEGIN: Time = Time(1_000_000);
const ID: Incarnation = Incarnation { job: JobId(1), submitted: 1, restarts: 0 };

/// One job, which must not start without its input, and one RSA node.
struct OneJob {
    schedule: Schedule,
    now: Time,
    effects: Vec<Effects>,
}

impl OneJob {
    fn new() -> OneJob {
        let node: NodeName = "r1".parse().unwrap();
        let site = Site { debounce: Duration::ZERO, ..Site::default() };
        let nodes = [(node.clone(), Node::new("default"))].into();
        let mut schedule = Schedule::new(site, Vec::new(), nodes, 0, Epoch(0));
        schedule.handle(BEGIN, Event::NodeUp { node, capacity: Bytes(1 << 40) }).unwrap();
        OneJob { schedule, now: BEGIN, effects: Vec::new() }
    }

    fn handle(&mut self, event: Event) {
        let effects = self.schedule.handle(self.now, event).unwrap();
        self.effects.push(effects);
    }

    fn asks(&mut self, call: BurstBufferCall) {
        let seen = Box::new(seen(Standing::StagingIn, false));
        self.handle(Event::BurstBuffer { call, seen });
        while let Some(order) = self.job().and_then(|job| job.under_way) {
            let outcome = Outcome::Done(String::new());
            self.handle(Event::Ended { job: ID, number: order.number, outcome });
        }
    }

    /// The queue is seen after so many seconds.
    fn look(&mut self, seconds: u64, job: ObservedJob) {
        self.now = self.now.plus(Duration::from_secs(seconds));
        self.handle(Event::Queue { taken: self.now, jobs: vec![job] });
        while let Some(order) = self.job().and_then(|job| job.under_way) {
            let outcome = Outcome::Done(String::new());
            self.handle(Event::Ended { job: ID, number: order.number, outcome });
        }
    }

    fn job(&self) -> Option<&Job> {
        self.schedule.jobs().get(&ID)
    }

    /// How often the workload manager was told to keep the job no longer.
    fn times_told(&self) -> usize {
        let actions = self.effects.iter().flat_map(|effects| &effects.actions);
        actions.filter(|action| matches!(action, Action::EndStageOut(_))).count()
    }
}

fn seen(standing: Standing, lost: bool) -> ObservedJob {
    let job = QueuedJob {
        id: ID,
        owner: Owner { uid: 1000, gid: 1000 },
        account: String::new(),
        standing,
        reason: String::new(),
        node_count: 1,
        nodes: Vec::new(),
        start: None,
        submitted: 1,
        priority: 1,
        qos: String::new(),
        held_for_input: false,
        dependent: false,
        depends_on: Vec::new(),
        component_of: None,
        several: false,
        has_burst_buffer: true,
        waits_for_results: standing == Standing::Ended,
        burst_buffer_lost: lost,
    };
    let (data_in, data_out) = (vec!["/in".into()], vec!["/out".into()]);
    let wait = Some(crate::WaitPolicy::Hold);
    let request = Some(Request { data_in, data_out, wait, ..Request::default() });
    ObservedJob { job, request, work_dir: "/".into(), io_nodes: vec!["c1".parse().unwrap()] }
}

#[test]
fn a_job_that_will_never_start_gives_its_nodes_back_and_its_user_is_told() {
    let mut site = OneJob::new();
    site.asks(BurstBufferCall::Setup);
    site.asks(BurstBufferCall::DataIn);
    site.look(1, seen(Standing::StagingIn, false));
    assert_eq!(site.job().unwrap().rsa_state, RsaState::Ready);
    site.look(1, seen(Standing::StagingIn, true));
    let job = site.job().unwrap();
    assert_eq!(
        (job.burst_buffer, &*job.message),
        (BurstBuffer::TornDown, &*Life::BurstBufferLost.to_string())
    );
    // It may be set up again all the same.
    site.asks(BurstBufferCall::Setup);
    site.asks(BurstBufferCall::DataIn);
    assert_eq!(site.job().unwrap().burst_buffer, BurstBuffer::Answered);
    site.look(1, seen(Standing::StagingIn, true));
    let again = site.schedule.site().limits.again.as_secs();
    site.look(again - 1, seen(Standing::Waiting, true));
    assert_eq!(site.job().unwrap().rsa_state, RsaState::Ready);
    site.look(1, seen(Standing::Next, true));
    assert!(site.job().is_none() && site.schedule.nodes().values().all(|node| node.promised.is_empty()));
    // Whatever the queue gives as its reason.
    for standing in [Standing::Next, Standing::StagingIn, Standing::Waiting] {
        site.look(10, seen(standing, true));
        assert!(site.job().is_none(), "{standing:?}");
    }
    assert_eq!(site.schedule.places_lost().places, 0);
}

#[test]
fn a_job_that_is_kept_for_results_that_are_home_is_forgotten_and_that_is_said_ever_more_seldom() {
    let mut site = OneJob::new();
    for call in [BurstBufferCall::Setup, BurstBufferCall::DataIn, BurstBufferCall::PreRun] {
        site.asks(call);
    }
    site.look(1, seen(Standing::Running, false));
    let ended = || seen(Standing::Ended, false);
    site.handle(Event::BurstBuffer { call: BurstBufferCall::DataOut, seen: Box::new(ended()) });
    site.look(1, ended());
    assert!(site.job().is_some_and(|job| !job.results && job.burst_buffer == BurstBuffer::Kept));
    for _ in 0..40 {
        site.look(1, ended());
    }
    assert!(site.job().is_none(), "nothing is left to be done for it");
    let told = site.times_told();
    assert!((3..10).contains(&told), "{told}");
    // For an hour.
    for _ in 0..3600 {
        site.look(1, ended());
    }
    assert!((told + 5..told + 12).contains(&site.times_told()), "{}", site.times_told() - told);
}
