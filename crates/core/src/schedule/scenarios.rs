//! Single histories, told event by event. What must always hold is checked after each, as by the model check.

use std::path::PathBuf;
use std::time::Duration;

use super::world::*;
use super::*;
use crate::{Bytes, Epoch, Incarnation, JobId, Request, Standing, WaitPolicy};

/// A job of two nodes that writes, and that the workload manager shows as if it had not started.
fn one_that_is_back_in_the_queue(requests: &[Request]) -> World {
    let mut world = World { older_states: 1, ..World::new(1, 2, 2, site(), 0) };
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, requests);
    for _ in [Work::Construct, Work::StageIn] {
        world.happen(&Happening::Ends(0, Outcome::Done(String::new())), requests);
    }
    world.happen(&Happening::Becomes(0, Slurm::Running { prolog_ran: false, nodes: 2 }), requests);
    world.happen(&Happening::Prolog(0), requests);
    world.happen(&Happening::Ends(0, Outcome::Done(String::new())), requests);
    world.happen(&Happening::OlderState(0), requests);
    world.happen(&Happening::Queue, requests);
    world
}

#[test]
fn a_job_that_is_back_in_the_queue_keeps_its_ram_disk_until_its_nodes_have_ended_what_ran() {
    let requests = [request(None, Some("/a"), false)];
    let states = |world: &World| {
        let job = &world.schedule.jobs()[&id(0)];
        (job.job_state, job.rsa_state)
    };
    let shown = (JobState::Running, RsaState::InuseOut);
    let taken = (JobState::Finished, RsaState::Unmounting);
    let mut world = one_that_is_back_in_the_queue(&requests);
    assert_eq!(states(&world), shown);
    // It is started anew elsewhere, which is no business of the RAM disk's; and that run ends.
    world.happen(&Happening::Becomes(0, Slurm::Running { prolog_ran: false, nodes: 2 }), &requests);
    world.happen(&Happening::Prolog(0), &requests);
    world.happen(&Happening::Queue, &requests);
    assert_eq!(states(&world), shown);
    for state in [Slurm::Ending { nodes: 2 }, Slurm::Gone] {
        world.happen(&Happening::Becomes(0, state), &requests);
        world.happen(&Happening::Queue, &requests);
        assert_eq!(states(&world), shown);
    }
    world.happen(&Happening::LateEpilog(0), &requests);
    assert_eq!(states(&world), shown);
    world.happen(&Happening::LateEpilog(0), &requests);
    assert_eq!(states(&world), taken);

    // A node may never say so.
    let mut world = one_that_is_back_in_the_queue(&requests);
    let limit = NOW.plus(site().limits.ending);
    assert_eq!(world.schedule.next_tick(), Some(limit));
    world.schedule.handle(limit, Event::Tick).unwrap();
    assert_eq!(states(&world), taken);

    // The newest state comes back, and the job has run all the time.
    let mut world = one_that_is_back_in_the_queue(&requests);
    (world.slurm[0], world.runs[0]) = (Slurm::Running { prolog_ran: true, nodes: 2 }, 0);
    world.happen(&Happening::Queue, &requests);
    world.schedule.handle(limit, Event::Tick).unwrap();
    assert_eq!(states(&world), shown);
}

#[test]
fn an_order_names_a_job_by_as_much_as_tells_it_from_others() {
    let requests = [request(None, Some("/a"), false)];
    let mut world = World::new(1, 0, 1, site(), 0);
    let first = world.seen(0, &requests);
    let mut queue = |seen: &ObservedJob, submitted: u64, restarts: u32| {
        let mut seen = seen.clone();
        (seen.job.standing, seen.job.submitted) = (Standing::Next, submitted);
        (seen.job.id.submitted, seen.job.id.restarts) = (submitted, restarts);
        let id = world.schedule.identify(&seen.job);
        world.schedule.handle(NOW, Event::Queue { taken: Time(0), jobs: vec![seen] }).unwrap();
        let lives: Vec<Incarnation> = world.schedule.jobs().keys().copied().collect();
        assert!(lives.contains(&id));
        lives.iter().map(|id| world.schedule.selector(*id).to_string()).collect::<Vec<_>>()
    };
    assert_eq!(queue(&first, 5, 0), ["1"]);
    assert_eq!(queue(&first, 6, 1), ["1.0", "1.1"]);
    assert_eq!(queue(&first, 9, 0), ["1@5.0", "1@5.1", "1@9"]);
}

/// Whatever a former version did for it: one of several on the same directories must not be mounted, and a hold must end.
#[test]
fn a_component_of_a_heterogeneous_job_gets_nothing_and_is_let_go() {
    let stage_in = Some(PathBuf::from("/script"));
    for (held_for_input, standing) in
        [(true, Standing::Held), (false, Standing::Next), (false, Standing::Running)]
    {
        for stage_in in [None, stage_in.clone()] {
            let both = request(Some("/a"), Some("/b"), false);
            let requests = [Request { stage_in, wait: Some(WaitPolicy::Hold), ..both }];
            let mut world = World::new(1, 1, 2, site(), 0);
            let mut seen = world.seen(0, &requests);
            (seen.job.standing, seen.job.held_for_input) = (standing, held_for_input);
            (seen.job.component_of, seen.job.nodes) = (Some(JobId(7)), vec![node(9)]);
            let id = world.schedule.identify(&seen.job);
            let effects =
                world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen.clone()] }).unwrap();
            let told = |action: &&Action| matches!(action, Action::Tell(_, said) if said.to_string().contains("heterogeneous job 7"));
            let let_go = |action: &&Action| matches!(action, Action::LetGo(_));
            assert_eq!(effects.actions.iter().filter(told).count(), 1, "{:?}", effects.actions);
            assert_eq!(effects.actions.iter().any(|action| let_go(&action)), held_for_input);
            assert_eq!(effects.actions.len(), 1 + usize::from(held_for_input), "{:?}", effects.actions);
            let job = &world.schedule.jobs()[&id];
            assert_eq!((job.rsa_state, job.hold.is_held()), (RsaState::Ineligible, false));
            let retry = Event::Retry { job: id, salvage: false };
            let refused = world.schedule.handle(NOW, retry).unwrap_err().to_string();
            assert!(refused.contains("heterogeneous"), "{refused}");
        }
    }
    // A former version has it held, because its script has failed.
    let requests = [Request { stage_in, ..request(Some("/a"), None, false) }];
    let mut world = World::new(1, 1, 2, site(), 0);
    let mut seen = world.seen(0, &requests);
    (seen.job.standing, seen.job.held_for_input) = (Standing::Held, true);
    let id = world.schedule.identify(&seen.job);
    world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen.clone()] }).unwrap();
    while let Some(number) = world.schedule.jobs()[&id].under_way.map(|order| order.number) {
        let fills = world.schedule.jobs()[&id].rsa_state == RsaState::StagingIn;
        let failed =
            Outcome::Failed { why: "exit code 3".into(), blame: Vec::new(), fault: Fault::NeedsUser };
        let outcome = if fills { failed } else { Outcome::Done(String::new()) };
        world.schedule.handle(NOW, Event::Ended { job: id, number, outcome }).unwrap();
    }
    let job = &world.schedule.jobs()[&id];
    assert_eq!((job.rsa_state, job.hold.is_held()), (RsaState::Ineligible, true), "{}", job.message);
    seen.job.component_of = Some(JobId(7));
    let effects = world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen] }).unwrap();
    assert!(effects.actions.contains(&Action::LetGo(id)), "{:?}", effects.actions);
    assert!(world.schedule.jobs()[&id].message.contains("heterogeneous job 7"));
    // A former version has prepared one for it.
    let requests = [request(Some("/a"), Some("/b"), true)];
    let mut world = World::new(1, 1, 2, site(), 0);
    let mut seen = world.seen(0, &requests);
    (seen.job.standing, seen.job.nodes) = (Standing::Next, vec![node(9)]);
    let id = world.schedule.identify(&seen.job);
    world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen.clone()] }).unwrap();
    let done = |schedule: &mut Schedule| {
        while let Some(number) = schedule.jobs().get(&id).and_then(|job| Some(job.under_way?.number)) {
            let outcome = Outcome::Done(String::new());
            schedule.handle(NOW, Event::Ended { job: id, number, outcome }).unwrap();
        }
    };
    done(&mut world.schedule);
    assert_eq!(world.schedule.jobs()[&id].rsa_state, RsaState::Ready);
    (seen.job.standing, seen.job.component_of) = (Standing::Running, Some(JobId(7)));
    world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen.clone()] }).unwrap();
    world.schedule.handle(NOW, Event::Starting(Box::new(seen))).unwrap();
    done(&mut world.schedule);
    let job = &world.schedule.jobs()[&id];
    assert!(job.message.contains("heterogeneous job 7"), "{}", job.message);
    assert_eq!((job.rsa_state, job.allocation.is_none()), (RsaState::Ineligible, true));
}

#[test]
fn a_node_is_given_up_once_and_told_why_not_again() {
    let names = [0, 1].map(|index| (node(index), Node::new("default"))).into();
    let mut schedule = Schedule::new(site(), Vec::new(), names, 0, Epoch(0));
    schedule.handle(NOW, Event::NodeUp { node: node(0), capacity: CAPACITY }).unwrap();
    let refused = |schedule: &mut Schedule, index| {
        schedule.handle(NOW, Event::GiveUp(node(index))).unwrap_err().to_string()
    };
    assert!(refused(&mut schedule, 0).contains("has answered since"));
    schedule.handle(NOW, Event::GiveUp(node(1))).unwrap();
    assert!(refused(&mut schedule, 1).contains("was given up already"));
    schedule.handle(NOW, Event::NodeUp { node: node(1), capacity: CAPACITY }).unwrap();
    assert!(refused(&mut schedule, 1).contains("has answered since"));
}

/// A daemon that does not understand what its journal has of a job leaves the job's RSA nodes alone.
#[test]
fn what_is_promised_to_a_job_that_nobody_knows_is_free_once_its_ram_disk_is_gone() {
    let mut promised = Node::new("default");
    promised.promised.insert(id(0), CAPACITY);
    let nodes = [(node(0), promised)].into();
    let mut schedule = Schedule::new(site(), Vec::new(), nodes, 0, Epoch(0));
    schedule.handle(NOW, Event::NodeUp { node: node(0), capacity: CAPACITY }).unwrap();
    assert_eq!(schedule.nodes()[&node(0)].free(), Bytes::ZERO);
    let effects = schedule.handle(NOW, Event::Vacated { node: node(0), job: id(0) }).unwrap();
    assert!(schedule.nodes()[&node(0)].is_free() && effects.nodes == [node(0)]);
}

#[test]
fn a_job_that_was_next_keeps_its_ram_disk_until_it_is_judged_anew() {
    let requests = [request(Some("/a"), None, false)];
    let site = Site { debounce: Duration::from_secs(1), ..site() };
    let queue = |world: &mut World, standing, seconds| {
        let mut seen = world.seen(0, &requests);
        seen.job.standing = standing;
        let at = NOW.plus(Duration::from_secs(seconds));
        world.schedule.handle(at, Event::Queue { taken: at, jobs: vec![seen] }).unwrap();
        world.schedule.jobs().get(&id(0)).map(|job| job.job_state)
    };
    let ready = || {
        let mut world = World::new(1, 0, 1, site.clone(), 0);
        assert_eq!(queue(&mut world, Standing::Unjudged, 0), None);
        queue(&mut world, Standing::Next, 1);
        assert_eq!(queue(&mut world, Standing::Next, 2), Some(JobState::Ondeck));
        for _ in [Work::Construct, Work::StageIn] {
            world.happen(&Happening::Ends(0, Outcome::Done(String::new())), &requests);
        }
        assert_eq!(world.schedule.jobs()[&id(0)].rsa_state, RsaState::Ready);
        world
    };
    let mut world = ready();
    for second in [3, 10, 100] {
        assert_eq!(queue(&mut world, Standing::Unjudged, second), Some(JobState::Ondeck));
    }
    queue(&mut world, Standing::Next, 110);
    assert_eq!(queue(&mut world, Standing::Unjudged, 150), Some(JobState::Ondeck));
    assert_eq!(queue(&mut world, Standing::Unjudged, 271), Some(JobState::Demoted));
    // Behind others it is by Slurm's own word.
    let mut world = ready();
    queue(&mut world, Standing::Unjudged, 3);
    assert_eq!(queue(&mut world, Standing::Waiting, 5), Some(JobState::Demoted));
}

/// Two jobs of which the first wants two of four nodes and the second one; both are next.
fn two_that_want_three_of_four(site: Site) -> (World, [Request; 2]) {
    let requests = [("/a", "/b", 2), ("/c", "/d", 1)]
        .map(|(from, to, nodes)| Request { nodes: Some(nodes), ..request(Some(from), Some(to), true) });
    let mut world = World::new(2, 1, 4, site, 0);
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, &requests);
    (world, requests)
}

fn waits_for(world: &World, index: usize) -> &str {
    let job = &world.schedule.jobs()[&id(index)];
    assert_eq!(job.allocation.is_some(), job.waits_for.is_empty(), "{job:?}");
    &job.waits_for
}

#[test]
fn users_and_accounts_have_no_more_nodes_than_they_may() {
    let any = Site { sharing: Sharing::Any, ..site() };
    let limits = [
        (Site { user_nodes: Some(2), ..any.clone() }, "its user has 2 of at most 2 RSA nodes"),
        (Site { account_nodes: Some(2), ..any.clone() }, "its account has 2 of at most 2 RSA nodes"),
    ];
    for (site, why) in limits {
        let (mut world, requests) = two_that_want_three_of_four(site);
        assert_eq!((waits_for(&world, 0), waits_for(&world, 1)), ("", why));
        world.happen(&Happening::Becomes(0, Slurm::Gone), &requests);
        world.happen(&Happening::Queue, &requests);
        while world.schedule.jobs().get(&id(0)).is_some_and(|job| job.under_way.is_some()) {
            world.happen(&Happening::Ends(0, Outcome::Done(String::new())), &requests);
        }
        assert_eq!(waits_for(&world, 1), "");
    }
    let (world, _) = two_that_want_three_of_four(Site { account_nodes: Some(1), ..any });
    let told = &world.schedule.jobs()[&id(0)].message;
    assert!(told.contains("it needs 2 RSA nodes, and its account may have 1"), "{told}");
}

/// One that reads what the other writes, and must not start without it: it is ready, and held again when the other runs.
fn one_that_is_staged_again() -> (World, [Request; 2]) {
    let reads =
        Request { nodes: Some(1), wait: Some(WaitPolicy::Hold), ..request(Some("/c/d"), None, false) };
    let writes = Request { nodes: Some(1), ..request(None, Some("/c"), false) };
    let requests = [reads, writes];
    let mut world = World::new(2, 1, 2, Site { sharing: Sharing::Any, ..site() }, 0);
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, &requests);
    for index in [0, 1] {
        for _ in [Work::Construct, Work::StageIn] {
            world.happen(&Happening::Ends(index, Outcome::Done(String::new())), &requests);
        }
    }
    (world, requests)
}

#[test]
fn a_job_whose_input_another_one_writes_is_held_again_for_no_longer_than_the_limit() {
    let (mut world, requests) = one_that_is_staged_again();
    let reader = |world: &World| world.schedule.jobs()[&id(0)].clone();
    assert!(reader(&world).hold.was_let_go() && reader(&world).rsa_state == RsaState::Ready);
    world.slurm[1] = Slurm::Running { prolog_ran: false, nodes: 1 };
    let effects = world.schedule.handle(NOW, Event::Starting(Box::new(world.seen(1, &requests)))).unwrap();
    assert!(effects.actions.contains(&Action::Hold(id(0))), "{:?}", effects.actions);
    assert!(reader(&world).hold.is_held() && reader(&world).message.contains("job 2 writes to /c/d"));
    world.held[0] = true;
    world.happen(&Happening::Queue, &requests);
    let order = reader(&world).under_way.unwrap();
    assert_eq!(order.work, Work::Destroy);
    let done = Event::Ended { job: id(0), number: order.number, outcome: Outcome::Done(String::new()) };
    world.schedule.handle(NOW, done).unwrap();
    assert!(reader(&world).allocation.is_none() && reader(&world).waits_for.contains("results of job 2"));
    // Others may go on writing there.
    let limit = NOW.plus(site().limits.hold);
    assert!(world.schedule.next_tick().is_some_and(|next| next <= limit));
    let effects = world.schedule.handle(limit, Event::Tick).unwrap();
    assert!(effects.actions.contains(&Action::LetGo(id(0))), "{:?}", effects.actions);
    assert!(reader(&world).message.contains("other jobs have written where its input is for 24 h"));
}

/// What is ordered and what Slurm does may cross: it was told that the input is there, and may start the job in the same moment.
#[test]
fn a_job_whose_input_another_one_writes_keeps_it_until_it_is_seen_to_be_held() {
    for starts_first in [true, false] {
        let reads = Request { wait: Some(WaitPolicy::Hold), ..request(Some("/c/d"), None, false) };
        let requests = [reads, request(None, Some("/c"), false)];
        let mut world = World::new(2, 1, 4, site(), 0).with_burst_buffers();
        world.slurm.fill(Slurm::Next);
        let job = |world: &World, index| world.schedule.jobs()[&id(index)].clone();
        let done = |index| Happening::Ends(index, Outcome::Done(String::new()));
        for index in [0, 1] {
            world.happen(&Happening::Asks(index, BurstBufferCall::Setup), &requests);
            world.happen(&Happening::Asks(index, BurstBufferCall::DataIn), &requests);
            world.happen(&Happening::Queue, &requests);
            world.happen(&done(index), &requests);
            world.happen(&done(index), &requests);
            world.happen(&Happening::Answered(index), &requests);
        }
        assert_eq!((job(&world, 0).hold, job(&world, 0).burst_buffer), (Hold::No, BurstBuffer::Answered));
        world.happen(&Happening::Asks(1, BurstBufferCall::PreRun), &requests);
        assert!(world.held[0] && job(&world, 0).message.contains("job 2 writes to /c/d"));
        assert_eq!((job(&world, 0).hold, job(&world, 0).rsa_state), (Hold::Ordered, RsaState::Ready));
        if starts_first {
            world.held[0] = false;
            world.happen(&Happening::Asks(0, BurstBufferCall::PreRun), &requests);
            assert_eq!((job(&world, 0).hold, job(&world, 0).rsa_state), (Hold::No, RsaState::Mounting));
            assert!(job(&world, 0).message.contains("started before it could be held"));
            continue;
        }
        // The results are home before the hold is seen, and in another daemon's life.
        world.happen(&done(1), &requests);
        world.happen(&Happening::Answered(1), &requests);
        world.happen(&Happening::Epilog(1), &requests);
        world.happen(&done(1), &requests);
        world.happen(&done(1), &requests);
        assert!(!job(&world, 1).results);
        let kept = serde_json::to_string(&job(&world, 0)).unwrap();
        assert_eq!(serde_json::from_str::<Job>(&kept).unwrap(), job(&world, 0));
        world.restart();
        assert_eq!((job(&world, 0).hold, job(&world, 0).rsa_state), (Hold::Ordered, RsaState::Ready));
        world.happen(&Happening::Queue, &requests);
        assert_eq!((job(&world, 0).hold, job(&world, 0).rsa_state), (Hold::Stands, RsaState::Teardown));
        for _ in [Work::Destroy, Work::Construct, Work::StageIn] {
            world.happen(&done(0), &requests);
        }
        assert_eq!((job(&world, 0).hold, job(&world, 0).rsa_state), (Hold::LetGo, RsaState::Ready));
    }
}

#[test]
fn a_job_that_was_released_by_hand_is_not_held_again() {
    let (mut world, requests) = one_that_is_staged_again();
    world.schedule.jobs.get_mut(&id(0)).unwrap().hold = Hold::ReleasedByHand;
    world.happen(&Happening::Becomes(1, Slurm::Running { prolog_ran: false, nodes: 1 }), &requests);
    world.schedule.handle(NOW, Event::Starting(Box::new(world.seen(1, &requests)))).unwrap();
    let job = &world.schedule.jobs()[&id(0)];
    assert_eq!((job.hold.is_held(), job.rsa_state), (false, RsaState::Ready));
}

#[test]
fn output_that_can_not_be_covered_while_its_job_runs_is_tried_a_few_times_and_then_the_nodes_are_for_others()
{
    let requests = [request(None, Some("/a"), false)];
    let mut world = World::new(1, 1, 2, site(), u8::MAX);
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, &requests);
    let job = |world: &World| world.schedule.jobs()[&id(0)].clone();
    world.happen(&Happening::Becomes(0, Slurm::Running { prolog_ran: false, nodes: 1 }), &requests);
    for _ in [Work::Construct, Work::StageIn] {
        world.happen(&Happening::Queue, &requests);
        world.happen(&Happening::Ends(0, Outcome::Done(String::new())), &requests);
    }
    // Its Prolog may still come: nothing is laid over anything before that is known.
    assert!(job(&world).rsa_state == RsaState::Ready && job(&world).prolog.is_expected());
    world.happen(&Happening::PrologGivenUp(0), &requests);
    let mut now = NOW;
    for seconds in [10, 60, 300] {
        let order = job(&world).under_way.unwrap();
        assert_eq!((order.work, job(&world).results), (Work::Mount, true));
        let later = Outcome::Later { why: "a file is open".into() };
        let ended = Event::Ended { job: id(0), number: order.number, outcome: later };
        world.schedule.handle(now, ended).unwrap();
        assert_eq!(
            (job(&world).rsa_state, job(&world).results, job(&world).under_way),
            (RsaState::Ready, false, None)
        );
        assert!(job(&world).message.contains(&format!("a file is open; it is tried again in {seconds} s")));
        let again = now.plus(Duration::from_secs(seconds));
        assert_eq!(job(&world).not_before, Some(again));
        now = again;
        world.schedule.handle(now, Event::Tick).unwrap();
    }
    let number = job(&world).under_way.unwrap().number;
    let later = Outcome::Later { why: "a file is open".into() };
    world.schedule.handle(now, Event::Ended { job: id(0), number, outcome: later }).unwrap();
    assert!(job(&world).message.contains("RSA_WAIT=hold"), "{}", job(&world).message);
    let order = job(&world).under_way.unwrap();
    assert_eq!(order.work, Work::Destroy);
    let done = Event::Ended { job: id(0), number: order.number, outcome: Outcome::Done(String::new()) };
    world.schedule.handle(now, done).unwrap();
    assert_eq!((job(&world).rsa_state, job(&world).allocation), (RsaState::Ineligible, None));
}

#[test]
fn a_retry_that_is_refused_changes_nothing_of_a_salvage() {
    let requests = [request(None, Some("/a"), false)];
    let mut world = World::new(1, 1, 2, site(), u8::MAX);
    world.slurm.fill(Slurm::Next);
    world.happen(&Happening::Queue, &requests);
    let done = || Happening::Ends(0, Outcome::Done(String::new()));
    let job = |world: &World| world.schedule.jobs()[&id(0)].clone();
    for _ in [Work::Construct, Work::StageIn] {
        world.happen(&done(), &requests);
    }
    world.happen(&Happening::Becomes(0, Slurm::Running { prolog_ran: false, nodes: 1 }), &requests);
    for happening in [Happening::Prolog(0), done(), Happening::Broken(0), Happening::Epilog(0), done()] {
        world.happen(&happening, &requests);
    }
    assert_eq!(job(&world).rsa_state, RsaState::Lost);
    world.happen(&Happening::Salvage(0), &requests);
    let before = job(&world);
    assert!(before.rsa_state == RsaState::StagingOut && before.salvage);
    let refused = world.schedule.handle(NOW, Event::Retry { job: id(0), salvage: false });
    assert!(refused.is_err() && job(&world) == before);
    let saved = Outcome::Salvaged { text: "2 files of r2 were saved".into(), from: Vec::new() };
    let number = before.under_way.unwrap().number;
    world.schedule.handle(NOW, Event::Ended { job: id(0), number, outcome: saved }).unwrap();
    assert!(job(&world).abandoned && job(&world).message.ends_with("; the rest is lost"));
}

#[test]
fn a_capacity_takes_nodes_that_have_it() {
    let nodes = [(node(0), 10), (node(1), 100), (node(2), 10)];
    let placed = |request: Request| {
        let all = nodes.iter().map(|(name, _)| (name.clone(), Node::new("default"))).collect();
        let mut schedule = Schedule::new(site(), Vec::new(), all, 0, Epoch(0));
        for (name, gib) in &nodes {
            schedule.handle(NOW, Event::NodeUp { node: name.clone(), capacity: Bytes(gib << 30) }).unwrap();
        }
        let mut seen = World::new(1, 0, 0, site(), 0).seen(0, std::slice::from_ref(&request));
        seen.job.standing = Standing::Next;
        schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen] }).unwrap();
        let job = &schedule.jobs()[&id(0)];
        let nodes = job.allocation.as_ref().map(|found| found.nodes.clone()).unwrap_or_default();
        (nodes, format!("{}{}", job.message, job.waits_for))
    };
    let asks = |gib: u64, nodes| Request {
        capacity: Some(Bytes(gib << 30)),
        nodes,
        ..request(Some("/a"), None, false)
    };
    assert_eq!(placed(asks(5, None)).0, [node(0)]);
    assert_eq!(placed(asks(60, None)).0, [node(1)]);
    assert_eq!(placed(asks(12, Some(2))).0, [node(0), node(2)]);
    let (none, why) = placed(asks(100, Some(1)));
    assert!(none.is_empty() && why.contains("needs 2 for that"), "{why}");
    let (none, why) = placed(asks(60, Some(2)));
    assert!(none.is_empty() && why.contains("have 1 need 2"), "{why}");
}

#[test]
fn a_job_that_is_expected_to_start_soon_is_next_as_far_as_the_site_looks_ahead() {
    let requests = [request(Some("/a"), None, false)];
    let after = |start: Option<u64>, horizon: u64| {
        let site = Site { horizon: Duration::from_secs(horizon), ..site() };
        let mut world = World::new(1, 0, 1, site, 0);
        let mut seen = world.seen(0, &requests);
        seen.job.start = start.map(|seconds| NOW.0 / 1000 + seconds);
        world.schedule.handle(NOW, Event::Queue { taken: NOW, jobs: vec![seen] }).unwrap();
        !world.schedule.jobs().is_empty()
    };
    assert!(after(Some(60), 60) && !after(Some(61), 60));
    assert!(!after(None, 60) && !after(Some(0), 0), "Slurm's word counts, and only where the site wants it");
}

/// Slurm starts a job that depends on another one as soon as that has ended: what it reads may be in RAM still.
#[test]
fn a_job_with_a_burst_buffer_waits_for_results_that_are_on_their_way_where_it_reads() {
    let requests = [request(Some("/c/d"), None, false), request(None, Some("/c"), false)];
    let mut world = World::new(2, 1, 3, site(), 0).with_burst_buffers();
    let stage = |world: &World| world.schedule.jobs()[&id(0)].burst_buffer;
    let done = Happening::Ends(1, Outcome::Done(String::new()));
    world.slurm[1] = Slurm::Next;
    world.happen(&Happening::Asks(1, BurstBufferCall::Setup), &requests);
    world.happen(&Happening::Asks(1, BurstBufferCall::DataIn), &requests);
    world.happen(&Happening::Answered(1), &requests);
    world.happen(&Happening::Queue, &requests);
    for _ in [Work::Construct, Work::StageIn] {
        world.happen(&done, &requests);
    }
    world.happen(&Happening::Asks(1, BurstBufferCall::PreRun), &requests);
    world.happen(&done, &requests);
    world.happen(&Happening::Answered(1), &requests);
    world.happen(&Happening::Asks(0, BurstBufferCall::Setup), &requests);
    world.happen(&Happening::Epilog(1), &requests);
    world.happen(&Happening::Asks(0, BurstBufferCall::DataIn), &requests);
    assert_eq!(stage(&world), BurstBuffer::DataIn);
    // Unmounted, and home.
    world.happen(&done, &requests);
    assert_eq!(stage(&world), BurstBuffer::DataIn);
    world.happen(&done, &requests);
    assert_eq!(stage(&world), BurstBuffer::Answered);
}

/// slurmctld was started anew, tears down what it has, and asks again a minute later; its first call is lost.
#[test]
fn a_job_whose_setup_was_lost_waits_for_its_input_as_before() {
    let requests = [Request { wait: Some(WaitPolicy::Hold), ..request(Some("/a"), None, false) }];
    let mut world = World::new(1, 0, 1, site(), 0).with_burst_buffers();
    let stage = |world: &World| world.schedule.jobs()[&id(0)].burst_buffer;
    let done = Happening::Ends(0, Outcome::Done(String::new()));
    world.slurm[0] = Slurm::Next;
    for call in [BurstBufferCall::Setup, BurstBufferCall::DataIn] {
        world.happen(&Happening::Asks(0, call), &requests);
    }
    world.happen(&Happening::Queue, &requests);
    world.happen(&done, &requests);
    world.happen(&Happening::Asks(0, BurstBufferCall::Teardown), &requests);
    assert_eq!(stage(&world), BurstBuffer::TornDown);
    world.happen(&Happening::Asks(0, BurstBufferCall::DataIn), &requests);
    assert_eq!(stage(&world), BurstBuffer::DataIn, "it is not told that it may start");
    world.happen(&done, &requests);
    let job = &world.schedule.jobs()[&id(0)];
    assert_eq!((job.burst_buffer, job.rsa_state), (BurstBuffer::Answered, RsaState::Ready));
}

/// The daemon is killed while a RAM disk is being mounted before the start, for which Slurm waits for minutes.
#[test]
fn what_was_being_mounted_before_the_start_may_be_mounted_after_a_restart() {
    let requests = [request(None, Some("/a"), false)];
    let mut world = World::new(1, 1, 1, site(), 0).with_burst_buffers();
    world.slurm[0] = Slurm::Next;
    for call in [BurstBufferCall::Setup, BurstBufferCall::DataIn] {
        world.happen(&Happening::Asks(0, call), &requests);
    }
    world.happen(&Happening::Answered(0), &requests);
    world.happen(&Happening::Queue, &requests);
    for _ in [Work::Construct, Work::StageIn] {
        world.happen(&Happening::Ends(0, Outcome::Done(String::new())), &requests);
    }
    world.happen(&Happening::Asks(0, BurstBufferCall::PreRun), &requests);
    let is_mounting = |world: &World| world.schedule.jobs()[&id(0)].rsa_state == RsaState::Mounting;
    assert!(is_mounting(&world), "{:?}", world.schedule.jobs());
    world.restart();
    let limit = world.schedule.site().limits.mount;
    world.schedule.handle(NOW.plus(limit * 2), Event::Tick).unwrap();
    assert!(is_mounting(&world), "Slurm waits still");
    world.schedule.handle(NOW.plus(Duration::from_secs(301) + limit), Event::Tick).unwrap();
    assert!(!is_mounting(&world));
}

/// The call in which Slurm waited for its results was killed, and so was never answered.
#[test]
fn a_job_of_which_nothing_is_left_is_not_kept_in_the_queue() {
    let requests = [request(None, Some("/a"), false)];
    let mut world = World::new(1, 0, 1, site(), 0).with_burst_buffers();
    (world.slurm[0], world.buffers[0]) = (Slurm::Gone, Buffer::StagingOut);
    let mut ordered = |seconds: u64| {
        let taken = NOW.plus(Duration::from_secs(seconds));
        let look = Event::Queue { taken, jobs: vec![world.seen(0, &requests)] };
        let effects = world.schedule.handle(taken, look).unwrap();
        effects.actions.contains(&Action::EndStageOut(id(0)))
    };
    // It is told after a while, and again.
    assert_eq!([0, 19, 20, 30, 40].map(&mut ordered), [false, false, true, false, true]);
}

/// Slurm notices no end of a call whose pipe another call's process has inherited, and that one waits until others have started.
#[test]
fn a_job_whose_call_is_in_the_way_of_others_is_held_instead_until_its_input_is_there() {
    let hold = Request { wait: Some(WaitPolicy::Hold), ..request(Some("/a"), None, false) };
    let requests = [hold, request(Some("/b"), None, false)];
    let mut world = World::new(2, 0, 3, site(), 0).with_burst_buffers();
    world.slurm.fill(Slurm::Next);
    for index in [0, 1] {
        world.happen(&Happening::Asks(index, BurstBufferCall::Setup), &requests);
        world.happen(&Happening::Asks(index, BurstBufferCall::DataIn), &requests);
        // Twice, as Slurm asks twice.
        world.happen(&Happening::MustNotWait(index), &requests);
        world.happen(&Happening::MustNotWait(index), &requests);
    }
    // One that may start on disk was answered at once.
    let job = |world: &World, index| world.schedule.jobs()[&id(index)].clone();
    assert_eq!([job(&world, 0).hold, job(&world, 1).hold], [Hold::Ordered, Hold::No]);
    assert_eq!(job(&world, 0).burst_buffer, BurstBuffer::DataIn, "Slurm might start it before it is held");
    world.happen(&Happening::Queue, &requests);
    assert_eq!((job(&world, 0).hold, job(&world, 0).burst_buffer), (Hold::Stands, BurstBuffer::Answered));
    while job(&world, 0).hold.is_held() {
        let order = job(&world, 0).under_way.expect("it is staged");
        let done = Event::Ended { job: id(0), number: order.number, outcome: Outcome::Done(String::new()) };
        world.schedule.handle(NOW, done).unwrap();
    }
    assert_eq!((job(&world, 0).hold, job(&world, 0).rsa_state), (Hold::LetGo, RsaState::Ready));
}

/// Slurm was told that its input is there, and may start it at any moment.
#[test]
fn a_job_that_loses_its_input_before_it_has_started_is_held_until_it_is_there_again() {
    for must_have_it in [true, false] {
        let wait = must_have_it.then_some(WaitPolicy::Hold);
        let requests = [Request { wait, ..request(Some("/a"), None, false) }];
        let mut world = World::new(1, 0, 2, site(), 2).with_burst_buffers();
        world.slurm.fill(Slurm::Next);
        let job = |world: &World| world.schedule.jobs()[&id(0)].clone();
        let is_ready = |world: &mut World| {
            while job(world).rsa_state != RsaState::Ready {
                let order = job(world).under_way.expect("something is done for it");
                let outcome = Outcome::Done(String::new());
                let done = Event::Ended { job: id(0), number: order.number, outcome };
                world.schedule.handle(NOW, done).unwrap();
            }
        };
        world.happen(&Happening::Asks(0, BurstBufferCall::Setup), &requests);
        world.happen(&Happening::Asks(0, BurstBufferCall::DataIn), &requests);
        world.happen(&Happening::Queue, &requests);
        is_ready(&mut world);
        assert_eq!((job(&world).hold, job(&world).burst_buffer), (Hold::No, BurstBuffer::Answered));
        world.happen(&Happening::Broken(0), &requests);
        let wanted = if must_have_it { Hold::Ordered } else { Hold::No };
        assert_eq!((job(&world).hold, job(&world).rsa_state), (wanted, RsaState::Teardown));
        if must_have_it {
            world.happen(&Happening::Queue, &requests);
            assert_eq!(job(&world).hold, Hold::Stands);
            is_ready(&mut world);
            // Released, it may be started at any moment, too.
            assert_eq!(job(&world).hold, Hold::LetGo);
            world.happen(&Happening::Broken(0), &requests);
            assert_eq!(job(&world).hold, Hold::Ordered);
        }
    }
}

/// Slurm has so many places for jobs that wait, and loses that of one which is cancelled then.
#[test]
fn of_jobs_that_wait_for_their_input_the_furthest_are_held_when_no_place_is_left() {
    let hold = |path: &str| Request { wait: Some(WaitPolicy::Hold), ..request(Some(path), None, false) };
    let requests = [hold("/a"), hold("/b"), hold("/c")];
    let mut world = World::new(3, 0, 3, Site { kept_waiting: 1, ..site() }, 0).with_burst_buffers();
    world.slurm.fill(Slurm::Next);
    world.schedule.handle(NOW, Event::ControllerStarted(1)).unwrap();
    // The one that is asked for last comes first.
    for index in [2, 1, 0] {
        world.happen(&Happening::Asks(index, BurstBufferCall::Setup), &requests);
        world.happen(&Happening::Asks(index, BurstBufferCall::DataIn), &requests);
    }
    let holds = |world: &World| world.schedule.jobs().values().map(|job| job.hold).collect::<Vec<_>>();
    assert_eq!(holds(&world), [Hold::No, Hold::Ordered, Hold::Ordered]);
    world.happen(&Happening::Queue, &requests);
    assert_eq!(holds(&world), [Hold::No, Hold::Stands, Hold::Stands]);
    for index in [1, 2] {
        let job = &world.schedule.jobs()[&id(index)];
        assert!(job.burst_buffer == BurstBuffer::Answered && !job.is_promised(), "{job:?}");
    }
    // It is held again if Slurm has forgotten the hold, and not if somebody has released it, which leaves the mark.
    world.held[1] = false;
    world.happen(&Happening::Released(2), &requests);
    world.happen(&Happening::Queue, &requests);
    assert_eq!(holds(&world), [Hold::No, Hold::Ordered, Hold::ReleasedByHand]);
    assert!(world.held[1] && !world.held[2]);
    // That of one which is held is not lost: nobody waits for an answer about it.
    for (index, lost) in [(1, 0), (0, 1)] {
        world.happen(&Happening::Becomes(index, Slurm::Gone), &requests);
        world.happen(&Happening::Queue, &requests);
        assert_eq!(world.schedule.places_lost().places, lost);
    }
    world.schedule.handle(NOW, Event::ControllerStarted(2)).unwrap();
    assert_eq!(world.schedule.places_lost(), PlacesLost { since: 2, places: 0 });
}
