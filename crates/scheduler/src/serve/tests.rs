//! The routes as they are asked by a socket.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ondeck_api::auth::Administrators;
use ondeck_api::munge::Munge;
use ondeck_api::scheduler::Status;
use ondeck_api::server::{Listening, Server};
use ondeck_api::wire::RefusalCode;
use ondeck_api::{CallError, Client, Config, Endpoint};
use ondeck_core::schedule::{Node, Schedule, Site};
use ondeck_core::{Epoch, NodeName};
use ondeck_fleet::Fleet;
use ondeck_wlm::{Slurm, SlurmSettings};
use serde_json::Value;

use super::router;
use crate::charge::Charge;
use crate::context::{Beginning, Context};
use crate::dispatch::Dispatcher;
use crate::journal::Journal;
use crate::store::Store;

const LIMIT: Duration = Duration::from_secs(20);

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

/// A daemon's parts with one RSA node; nothing is done to jobs.
fn simulated(directory: &Path) -> Arc<Context> {
    let mut config = Config::default();
    config.scheduler.simulate = Some(Duration::ZERO);
    let store = Store::open(directory).unwrap();
    let charge = Arc::new(Charge::new(store.identity().unwrap()).unwrap());
    let nodes = [(node("r1"), Node::new("default"))].into();
    let schedule = Schedule::new(Site::default(), Vec::new(), nodes, 0, Epoch(0));
    // No command of Slurm's is run.
    let settings = SlurmSettings { bin_dir: Some(directory.into()), conf: None, timeout: Duration::ZERO };
    let begin = Beginning {
        name: node("here"),
        fleet: Fleet::new(&config),
        charge,
        workload_manager: Arc::new(Slurm::new(settings)),
        metrics: Arc::default(),
        schedule,
        journal: Journal::new(store).unwrap(),
    };
    Arc::new(Context::new(begin, &config, Arc::new(Dispatcher::new().unwrap())))
}

/// A scheduler that answers, for as long as the runtime runs.
struct TestScheduler {
    context: Arc<Context>,
    client: Client,
    endpoint: Endpoint,
    _directory: tempfile::TempDir,
}

impl TestScheduler {
    async fn new() -> TestScheduler {
        let directory = tempfile::tempdir().unwrap();
        let context = simulated(directory.path());
        let socket = directory.path().join("socket");
        let listening = Listening {
            name: node("here"),
            socket: socket.clone(),
            tcp: None,
            connections: 8,
            munge: Munge::new("/nowhere"),
            administrators: Administrators::new(&[]),
        };
        let server = Server::bind(router(Arc::clone(&context)), listening).await.unwrap();
        tokio::spawn(server.serve(std::future::pending()));
        let client = Client::new(Path::new("/nowhere"));
        TestScheduler { context, client, endpoint: Endpoint::Socket(socket), _directory: directory }
    }

    async fn ask(&self, method: &str, path: &str) -> Result<String, CallError> {
        self.client.call_text(&self.endpoint, method, path, LIMIT).await
    }

    /// The code of a refusal, with its words.
    async fn refused(&self, method: &str, path: &str) -> (RefusalCode, String) {
        match self.ask(method, path).await.unwrap_err() {
            CallError::Refused { refusal, .. } => (refusal.code, refusal.message),
            other => panic!("{other}"),
        }
    }
}

#[tokio::test]
async fn what_is_asked_for_wrongly_is_refused_with_the_reason() {
    let asked = TestScheduler::new().await;
    for (method, path, wanted) in [
        ("GET", "/v1/jobs/none", RefusalCode::Malformed),
        ("GET", "/v1/jobs/7%2f8", RefusalCode::Malformed),
        ("GET", "/v1/jobs/7/wait?ms=long", RefusalCode::Malformed),
        ("POST", "/v1/jobs/7/retry?salvage=perhaps", RefusalCode::Malformed),
        ("GET", "/v1/usage?days=-1", RefusalCode::Malformed),
        ("GET", "/v1/timeline?hours=0", RefusalCode::Malformed),
        ("GET", "/v1/jobs/7", RefusalCode::NotFound),
        ("POST", "/v1/jobs/7/retry?salvage=true", RefusalCode::NotFound),
        ("DELETE", "/v1/jobs", RefusalCode::NotFound),
        ("GET", "/v1/layouts/history?uid=me", RefusalCode::Malformed),
        ("GET", "/v1/other", RefusalCode::NotFound),
        ("GET", "/v2/jobs", RefusalCode::NotFound),
        ("POST", "/v1/hooks/prolog", RefusalCode::Malformed),
    ] {
        let (code, message) = asked.refused(method, path).await;
        assert_eq!(code, wanted, "{method} {path}: {message}");
    }
    let (_, message) = asked.refused("POST", "/v1/hooks/epilog").await;
    assert!(message.starts_with("the hook: "), "{message}");
    assert!(asked.ask("GET", "/v1/usage?days=7").await.unwrap().starts_with('['));
    assert!(asked.ask("GET", "/v1/metrics").await.unwrap().contains("ondeck_journal_up 1"));
    assert_eq!(asked.ask("GET", "/v1/layouts/history?program=a%20b%26&directory=%2Fa").await.unwrap(), "[]");
    assert_eq!(asked.ask("DELETE", "/v1/layouts/history?uid=7").await.unwrap(), "{\"runs\":0}");
    let hours = u64::MAX;
    let timeline = asked.ask("GET", &format!("/v1/timeline?hours={hours}")).await.unwrap();
    let timeline: ondeck_core::timeline::Timeline = serde_json::from_str(&timeline).unwrap();
    assert_eq!((timeline.begin_ms, timeline.rsa_names), (0, vec!["r1".to_owned()]));
}

#[tokio::test]
async fn without_a_journal_it_is_told_that_there_is_none_and_nothing_else() {
    let asked = TestScheduler::new().await;
    asked.context.journal.set_fault(Some("no room".into()));
    let status: Status = serde_json::from_str(&asked.ask("GET", "/v1/jobs").await.unwrap()).unwrap();
    assert_eq!((status.journal.as_deref(), status.nodes.len()), (Some("no room"), 0));
    assert!(asked.ask("GET", "/v1/metrics").await.unwrap().contains("ondeck_journal_up 0"));
    for (method, path) in [
        ("GET", "/v1/jobs/7"),
        ("GET", "/v1/log"),
        ("GET", "/v1/timeline"),
        ("POST", "/v1/jobs"),
        ("GET", "/v1/openapi.json"),
        ("GET", "/v1/other"),
    ] {
        let (code, message) = asked.refused(method, path).await;
        assert_eq!(code, RefusalCode::Failed, "{method} {path}");
        assert!(message.contains("can't be written (no room)"), "{message}");
    }
    assert_eq!(asked.refused("GET", "/v2/jobs").await.0, RefusalCode::NotFound);
    asked.context.journal.set_fault(None);
    let status: Status = serde_json::from_str(&asked.ask("GET", "/v1/jobs").await.unwrap()).unwrap();
    assert_eq!((status.journal, status.nodes.len()), (None, 1));
}

#[tokio::test]
async fn every_route_that_is_described_is_there() {
    let asked = TestScheduler::new().await;
    let document: Value = serde_json::from_str(&asked.ask("GET", "/v1/openapi.json").await.unwrap()).unwrap();
    for (path, methods) in document["paths"].as_object().unwrap() {
        // Nobody waits for a time that is none.
        let path = path.replace("{job}", "7").replace("{node}", "r1") + "?ms=none";
        for method in methods.as_object().unwrap().keys() {
            match asked.ask(&method.to_uppercase(), &path).await {
                Err(CallError::Refused { refusal, .. }) => {
                    assert!(
                        !refusal.message.starts_with("there is nothing at"),
                        "{method} {path}: {refusal:?}"
                    );
                }
                answered => assert!(answered.is_ok(), "{method} {path}: {answered:?}"),
            }
        }
    }
    let page = asked.ask("GET", "/v1/").await.unwrap();
    assert_eq!(page, asked.ask("GET", "/v1").await.unwrap());
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("GET /v1/jobs/{job}/wait"));
}
