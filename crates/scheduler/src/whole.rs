//! The whole daemon without Slurm and without agents: a queue that the test writes, RAM disks that are pretended, its own
//! journal and its own socket.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::Config;
use ondeck_api::auth::Administrators;
use ondeck_api::client::{Client, Endpoint};
use ondeck_api::munge::Munge;
use ondeck_api::scheduler::{JobStory, Status};
use ondeck_api::server::{Listening, Server};
use ondeck_core::schedule::{Event, JobState, Node, Nodes, RsaState, Schedule, Site};
use ondeck_core::{Bytes, Epoch, Incarnation, Standing};
use ondeck_fleet::Fleet;

use crate::charge::Charge;
use crate::context::{Beginning, Context, Events};
use crate::daemon::begin_parts;
use crate::dispatch::Dispatcher;
use crate::fake::Fake;
use crate::journal::Journal;
use crate::serve::router;
use crate::store::Store;

/// How long anything may take.
const DEADLINE: Duration = Duration::from_secs(120);

struct Daemon {
    context: Arc<Context>,
    queue: Arc<Fake>,
    client: Client,
    socket: Endpoint,
}

impl Daemon {
    /// A daemon with so many RSA nodes.
    async fn begin(directory: &Path, nodes: usize) -> Daemon {
        let mut config = Config::default();
        config.scheduler.simulate = Some(Duration::ZERO);
        config.scheduler.state = directory.join("state");
        config.slurm.interval = Duration::from_millis(20);
        let store = Store::open(&config.scheduler.state).unwrap();
        let charge = Arc::new(Charge::new(store.identity().unwrap()).unwrap());
        let lends = |number| {
            let node = Node { up: true, capacity: Bytes(1 << 40), ..Node::new("default") };
            (format!("r{number}").parse().unwrap(), node)
        };
        let nodes: Nodes = (1..=nodes).map(lends).collect();
        let kept = store.reader().log(None, 1).unwrap();
        assert!(kept.is_empty(), "a journal of its own");
        let site = Site { debounce: Duration::ZERO, delay: Duration::ZERO, ..Site::default() };
        let queue = Arc::new(Fake::default());
        let begin = Beginning {
            name: "here".parse().unwrap(),
            fleet: Fleet::new(&config),
            charge,
            workload_manager: Arc::clone(&queue) as _,
            metrics: Arc::default(),
            schedule: Schedule::new(site, Vec::new(), nodes, 0, Epoch(0)),
            journal: Journal::new(store).unwrap(),
        };
        let dispatcher = Arc::new(Dispatcher::new().unwrap());
        let context = Arc::new(Context::new(begin, &config, Arc::clone(&dispatcher) as Arc<dyn Events>));
        let socket = directory.join("socket");
        let listening = Listening {
            name: context.name.clone(),
            socket: socket.clone(),
            tcp: None,
            connections: 64,
            munge: Munge::new("/nowhere"),
            administrators: Administrators::new(&[]),
        };
        let server = Server::bind(router(Arc::clone(&context)), listening).await.unwrap();
        tokio::spawn(server.serve(std::future::pending()));
        begin_parts(&context, &dispatcher, Vec::new());
        Daemon {
            context,
            queue,
            client: Client::new(Path::new("/nowhere")),
            socket: Endpoint::Socket(socket),
        }
    }

    async fn ask<A: serde::de::DeserializeOwned>(&self, path: &str, limit: Duration) -> A {
        self.client.call(&self.socket, "GET", path, None::<&()>, None, limit).await.unwrap()
    }

    async fn status(&self) -> Status {
        self.ask("/v1/jobs", DEADLINE).await
    }

    /// Waits until the daemon shows something.
    async fn until(&self, what: &str, is_so: impl Fn(&Status) -> bool) -> Status {
        let (begin, mut changed) = (Instant::now(), self.context.watch());
        loop {
            let status = self.status().await;
            if is_so(&status) {
                return status;
            }
            assert!(begin.elapsed() < DEADLINE, "waited in vain for {what}: {status:?}");
            // A look that shows nothing new is no event.
            let _ = tokio::time::timeout(Duration::from_millis(100), changed.changed()).await;
        }
    }
}

fn script(number: usize) -> String {
    format!("#!/bin/sh\n#RSA_DATA_IN=/in/{number}\n#RSA_DATA_OUT=/out/{number}\n#RSA_OUT_SIZE=1G\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_jobs_come_and_go_and_nothing_of_them_is_left() {
    const JOBS: usize = 3000;
    const ON_DECK: usize = 60;
    const RUN_THROUGH: usize = 300;
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::begin(directory.path(), 40).await;
    let jobs: Vec<Incarnation> = (0..JOBS).map(|number| daemon.queue.submit(&script(number))).collect();
    let (mut next, mut ended) = (jobs.iter(), BTreeSet::new());
    for id in next.by_ref().take(ON_DECK) {
        daemon.queue.becomes(*id, Standing::Next);
    }
    // What is ready starts, what has its output in RAM ends, and others take its place.
    while ended.len() < RUN_THROUGH {
        let status = daemon.until("a job to go on", |status| {
            status.jobs.iter().any(|job| {
                let starts = (job.job_state, job.rsa_state) == (JobState::Ondeck, RsaState::Ready);
                starts || job.rsa_state == RsaState::InuseBoth && !ended.contains(&job.id)
            })
        });
        let status = status.await;
        assert!(status.workload_manager.is_none() && status.journal.is_none());
        for job in status.jobs {
            match (job.job_state, job.rsa_state) {
                (JobState::Ondeck, RsaState::Ready) => daemon.queue.becomes(job.id, Standing::Running),
                (_, RsaState::InuseBoth) if ended.insert(job.id) => {
                    daemon.queue.becomes(job.id, Standing::Ended);
                    if let Some(id) = next.next() {
                        daemon.queue.becomes(*id, Standing::Next);
                    }
                }
                _ => {}
            }
        }
    }
    for id in &jobs {
        daemon.queue.becomes(*id, Standing::Ended);
    }
    let status = daemon.until("all to be gone", |status| status.jobs.is_empty()).await;
    assert!(status.nodes.iter().all(|node| node.free == node.capacity && node.jobs.is_empty()));
    // Each has its story, from the queue to the end.
    let last = ended.iter().next_back().unwrap();
    let story: JobStory = daemon.ask(&format!("/v1/jobs/{}", last.job), DEADLINE).await;
    let said = |text: &str| story.log.iter().any(|line| line.text.contains(text));
    assert!(said("finished staging data in") && said("finished staging data out"), "{:?}", story.log);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workload_manager_that_does_not_answer_is_told_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::begin(directory.path(), 1).await;
    let id = daemon.queue.submit(&script(1));
    daemon.queue.becomes(id, Standing::Next);
    let is_ready = |status: &Status| status.jobs.iter().any(|job| job.rsa_state == RsaState::Ready);
    daemon.until("its RAM disk", is_ready).await;
    daemon.queue.answers(false);
    let status = daemon.until("the fault", |status| status.workload_manager.is_some()).await;
    assert!(is_ready(&status) && status.workload_manager.unwrap().contains("it is switched off"));
    daemon.queue.answers(true);
    let status = daemon.until("the end of the fault", |status| status.workload_manager.is_none()).await;
    assert!(is_ready(&status));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_looks_does_not_wait_for_the_journal() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::begin(directory.path(), 1).await;
    let id = daemon.queue.submit(&script(1));
    daemon.queue.becomes(id, Standing::Next);
    let is_ready = |status: &Status| status.jobs.iter().any(|job| job.rsa_state == RsaState::Ready);
    daemon.until("its RAM disk", is_ready).await;
    // Somebody writes for as long as this test wants, and an event waits for that.
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (busy, is_busy) = std::sync::mpsc::channel::<()>();
    let context = Arc::clone(&daemon.context);
    let writes = tokio::task::spawn_blocking(move || {
        context.journal.write(|_| {
            busy.send(()).unwrap();
            let _ = released.recv();
            Ok(())
        })
    });
    tokio::task::spawn_blocking(move || is_busy.recv()).await.unwrap().unwrap();
    let context = Arc::clone(&daemon.context);
    let drain = Event::Drain { node: "r1".parse().unwrap(), why: "repair".into() };
    let decided = tokio::spawn(async move { context.event(drain).await });
    let soon = Duration::from_secs(10);
    let status: Status = daemon.ask("/v1/jobs", soon).await;
    // What is not kept is not shown.
    assert!(is_ready(&status) && status.nodes[0].why.is_empty() && !decided.is_finished());
    let story: JobStory = daemon.ask(&format!("/v1/jobs/{}", id.job), soon).await;
    assert!(!story.log.is_empty());
    let metrics = daemon.client.call_text(&daemon.socket, "GET", "/v1/metrics", soon).await.unwrap();
    assert!(metrics.contains("ondeck_jobs{state=\"READY\"} 1"), "{metrics}");
    drop(release);
    writes.await.unwrap().unwrap();
    decided.await.unwrap().unwrap();
    daemon.until("the drain", |status| status.nodes[0].why == "repair").await;
}
