//! The routes of an agent: what each takes from its request, who may, and what of the node answers it.
//!
//! Everything that touches the system runs on blocking threads.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::{delete, get, post};
use ondeck_api::auth::Caller;
use ondeck_api::server::{
    Administrator, Brought, Json, Path, PathInQuery, Query, RootHere, blocking, from_text,
};
use ondeck_api::wire::{
    Authority, Claim, CountOrder, Destroyed, Inventory, KindsSeen, KindsToTell, LocalReport, NodeReport,
    Obeyed, PathView, Presence, Refusal, RefusalCode, Release, RestoreOrder, Step, StepDone, StepRequest,
    StripingOrder, StripingReport, TaskReport, TaskRequest, WatchOrder, Witness,
};
use ondeck_core::{Incarnation, RamDiskId};
use serde::Deserialize;

use crate::authority::OrderKind;
use crate::node::Node;
use crate::story;

/// The longest that a request waits for the end of a task.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// What [`ondeck_api::wire`] lists.
pub fn router(node: Arc<Node>) -> Router {
    Router::new()
        .route("/v1/node", get(report))
        .route("/v1/authority", post(claim))
        .route("/v1/views", get(view))
        .route("/v1/layouts/{job}", post(stripe))
        .route("/v1/layouts/{job}/restore", post(restore))
        .route("/v1/layouts/{job}/count", post(count))
        .route("/v1/layouts/{job}/watch", post(watch_writers))
        .route("/v1/layouts/{job}/seen", post(writers_seen))
        .route("/v1/ramdisks", get(ramdisks))
        .route("/v1/ramdisks/{id}", get(ramdisk).delete(destroy))
        .route("/v1/ramdisks/{id}/has", get(has))
        .route("/v1/ramdisks/{id}/witness", get(witness))
        .route("/v1/ramdisks/{id}/names", get(inventory))
        .route("/v1/ramdisks/{id}/steps", post(step))
        .route("/v1/ramdisks/{id}/guard", post(guard))
        .route("/v1/ramdisks/{id}/release", post(release))
        .route("/v1/ramdisks/{id}/shown", delete(hide_everywhere))
        .route("/v1/ramdisks/{id}/begins", post(begins))
        .route("/v1/ramdisks/{id}/tasks", delete(stop_tasks))
        .route("/v1/ramdisks/{id}/tasks/{task}", get(task).post(start_task).delete(stop_task))
        .with_state(node)
}

type OfNode = State<Arc<Node>>;

type Answer<T> = Result<Json<T>, Refusal>;

/// Which RAM disk a path is about.
#[derive(Deserialize)]
struct RamDiskPath {
    #[serde(deserialize_with = "from_text")]
    id: RamDiskId,
}

/// Which task of a RAM disk a path is about.
#[derive(Deserialize)]
struct TaskPath {
    #[serde(deserialize_with = "from_text")]
    id: RamDiskId,
    task: String,
}

/// Has something done for a RAM disk; lines of the log that come of it name its job.
async fn done<T: Send + 'static>(
    id: RamDiskId,
    work: impl FnOnce(&RamDiskId) -> Result<T, Refusal> + Send + 'static,
) -> Answer<T> {
    blocking(move || story::of(&id).in_scope(|| work(&id))).await?.map(Json)
}

async fn report(State(node): OfNode) -> Answer<NodeReport> {
    blocking(move || node.report()).await?.map(Json)
}

async fn claim(State(node): OfNode, _: Administrator, Json(claim): Json<Claim>) -> Answer<Obeyed> {
    blocking(move || node.claim(&claim)).await?.map(Json)
}

async fn view(State(node): OfNode, caller: Caller, PathInQuery(path): PathInQuery) -> Answer<PathView> {
    blocking(move || node.view(&path, caller)).await?.map(Json)
}

async fn ramdisks(State(node): OfNode, caller: Caller) -> Answer<Vec<LocalReport>> {
    blocking(move || node.reports(caller)).await.map(Json)
}

async fn ramdisk(
    State(node): OfNode,
    caller: Caller,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
) -> Answer<LocalReport> {
    done(id, move |id| node.report_of(id, caller)).await
}

async fn destroy(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
) -> Answer<Destroyed> {
    done(id, move |id| {
        node.permit(id, authority.as_ref(), OrderKind::End, None)?;
        node.destroy(id)
    })
    .await
}

async fn has(
    State(node): OfNode,
    caller: Caller,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
) -> Answer<Presence> {
    done(id, move |id| node.has(id, caller)).await
}

async fn witness(
    State(node): OfNode,
    caller: Caller,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
) -> Answer<Witness> {
    done(id, move |id| node.witness(id, caller)).await
}

#[derive(Deserialize)]
struct Slots {
    #[serde(default)]
    slots: String,
}

async fn inventory(
    State(node): OfNode,
    _: Administrator,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
    Query(Slots { slots }): Query<Slots>,
) -> Answer<Inventory> {
    done(id, move |id| node.inventory(id, &slots)).await
}

async fn step(
    State(node): OfNode,
    _: Administrator,
    Brought { secret, authority }: Brought,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
    Json(step): Json<StepRequest>,
) -> Answer<StepDone> {
    done(id, move |id| {
        node.permit(id, authority.as_ref(), OrderKind::Other, Some(&step.layout))?;
        let name = step.step.name();
        let taken = node.step(id, step, secret);
        log_step(id, name, &taken);
        taken
    })
    .await
}

fn log_step(id: &RamDiskId, step: &str, taken: &Result<StepDone, Refusal>) {
    match taken {
        // Asked again and again of a job that keeps a file open.
        Ok(_) if step == Step::Busy.name() => {}
        Err(busy) if busy.code == RefusalCode::Busy => {}
        Ok(done) => {
            let ms = (done.seconds * 1000.0) as u64;
            tracing::info!(ramdisk = %id, step, ms, "step taken");
        }
        Err(error) => tracing::warn!(ramdisk = %id, step, error = error.message, "step refused"),
    }
}

async fn guard(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
) -> Answer<()> {
    done(id, move |id| {
        node.permit(id, authority.as_ref(), OrderKind::Other, None)?;
        node.guard(id)
    })
    .await
}

async fn release(
    State(node): OfNode,
    Administrator(caller): Administrator,
    Brought { authority, .. }: Brought,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
    Json(release): Json<Release>,
) -> Answer<()> {
    done(id, move |id| {
        let order = match release {
            Release::StagedOut { .. } => OrderKind::Other,
            Release::Abandoned { .. } => OrderKind::End,
        };
        node.permit(id, authority.as_ref(), order, None)?;
        node.release(id, &release, caller)
    })
    .await
}

async fn hide_everywhere(
    State(node): OfNode,
    _: RootHere,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
) -> Answer<()> {
    done(id, move |id| node.hide_everywhere(id)).await
}

async fn begins(
    State(node): OfNode,
    _: RootHere,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
) -> Answer<bool> {
    done(id, move |id| node.begins(id)).await
}

/// Refuses an order about a task that is not of the scheduler in charge; that one's counter is written to disk.
async fn permit_task(node: &Arc<Node>, id: &RamDiskId, authority: Option<Authority>) -> Result<(), Refusal> {
    let (node, id) = (Arc::clone(node), id.clone());
    blocking(move || node.permit(&id, authority.as_ref(), OrderKind::Other, None)).await?
}

#[derive(Deserialize)]
struct Beginning {
    /// Without one all tasks are meant.
    #[serde(default)]
    beginning: String,
}

async fn stop_tasks(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(RamDiskPath { id }): Path<RamDiskPath>,
    Query(Beginning { beginning }): Query<Beginning>,
) -> Answer<()> {
    permit_task(&node, &id, authority).await?;
    node.stop_tasks(&id, &beginning).await.map(Json)
}

async fn start_task(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(TaskPath { id, task }): Path<TaskPath>,
    Json(wanted): Json<TaskRequest>,
) -> Answer<TaskReport> {
    permit_task(&node, &id, authority).await?;
    let started = move || story::of(&id).in_scope(|| node.start_task(&id, &task, wanted));
    Ok(Json(blocking(started).await??.report()))
}

/// Which job a path is about.
#[derive(Deserialize)]
struct JobPath {
    #[serde(deserialize_with = "from_text")]
    job: Incarnation,
}

async fn stripe(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(JobPath { job }): Path<JobPath>,
    Json(order): Json<StripingOrder>,
) -> Answer<StripingReport> {
    blocking(move || {
        story::of_job(job).in_scope(|| {
            node.permit_on_disk(authority.as_ref())?;
            node.stripe(job, &order)
        })
    })
    .await?
    .map(Json)
}

async fn restore(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(JobPath { job }): Path<JobPath>,
    Json(order): Json<RestoreOrder>,
) -> Answer<StripingReport> {
    blocking(move || {
        story::of_job(job).in_scope(|| {
            node.permit_on_disk(authority.as_ref())?;
            node.restore_layouts(job, &order)
        })
    })
    .await?
    .map(Json)
}

async fn count(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(JobPath { job }): Path<JobPath>,
    Json(order): Json<CountOrder>,
) -> Answer<StripingReport> {
    blocking(move || {
        story::of_job(job).in_scope(|| {
            node.permit_on_disk(authority.as_ref())?;
            node.count(job, &order)
        })
    })
    .await?
    .map(Json)
}

async fn watch_writers(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(JobPath { job }): Path<JobPath>,
    Json(order): Json<WatchOrder>,
) -> Answer<()> {
    blocking(move || {
        story::of_job(job).in_scope(|| {
            node.permit_on_disk(authority.as_ref())?;
            node.watch_writers(job, &order)
        })
    })
    .await?
    .map(Json)
}

async fn writers_seen(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(JobPath { job }): Path<JobPath>,
    Json(question): Json<KindsToTell>,
) -> Answer<KindsSeen> {
    blocking(move || {
        story::of_job(job).in_scope(|| {
            node.permit_on_disk(authority.as_ref())?;
            node.writers_seen(job, &question)
        })
    })
    .await?
    .map(Json)
}

#[derive(Deserialize)]
struct Patience {
    /// How long the caller is willing to wait, in milliseconds.
    #[serde(default)]
    wait: u64,
}

async fn task(
    State(node): OfNode,
    _: Administrator,
    Path(TaskPath { id, task }): Path<TaskPath>,
    patience: Result<Query<Patience>, Refusal>,
) -> Answer<TaskReport> {
    let found = node.task(&id, &task)?;
    // Of a task that is not there, that is what matters.
    let Query(Patience { wait }) = patience?;
    Ok(Json(found.wait(Duration::from_millis(wait).min(LONGEST_WAIT)).await))
}

async fn stop_task(
    State(node): OfNode,
    _: Administrator,
    Brought { authority, .. }: Brought,
    Path(TaskPath { id, task }): Path<TaskPath>,
) -> Answer<TaskReport> {
    permit_task(&node, &id, authority).await?;
    node.stop_task(&id, &task).await.map(Json)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use ondeck_api::auth::Administrators;
    use ondeck_api::munge::Munge;
    use ondeck_api::server::{Listening, Server};
    use ondeck_api::{CallError, Client, Config, Endpoint};

    use super::*;

    /// An agent that answers, for as long as the runtime runs.
    struct TestAgent {
        client: Client,
        endpoint: Endpoint,
        _directory: tempfile::TempDir,
    }

    impl TestAgent {
        async fn new() -> TestAgent {
            let directory = tempfile::tempdir().unwrap();
            let (socket, mut config) = (directory.path().join("socket"), Config::default());
            config.agent.state = directory.path().join("state");
            config.agent.storage_address = Some([127, 0, 0, 1].into());
            let node = Arc::new(Node::begin(&config).unwrap());
            let listening = Listening {
                name: node.name().clone(),
                socket: socket.clone(),
                tcp: None,
                connections: 8,
                munge: Munge::new("/nowhere"),
                administrators: Administrators::new(&[]),
            };
            let server = Server::bind(router(node), listening).await.unwrap();
            tokio::spawn(server.serve(std::future::pending()));
            let (client, endpoint) = (Client::new(Path::new("/nowhere")), Endpoint::Socket(socket));
            TestAgent { client, endpoint, _directory: directory }
        }

        /// What is answered; of a refusal its code and its words.
        async fn ask(&self, method: &str, path: &str) -> Result<String, (RefusalCode, String)> {
            match self.client.call_text(&self.endpoint, method, path, Duration::from_secs(20)).await {
                Ok(answer) => Ok(answer),
                Err(CallError::Refused { refusal, .. }) => Err((refusal.code, refusal.message)),
                Err(other) => panic!("{method} {path}: {other}"),
            }
        }
    }

    #[tokio::test]
    async fn every_route_that_is_listed_is_there() {
        let (asked, listed) = (TestAgent::new().await, include_str!("../../api/src/wire.rs"));
        let routes = listed.lines().filter_map(|line| line.strip_prefix("//! | `")?.split_once("` |"));
        let routes: Vec<_> = routes.filter_map(|(route, _)| route.split_once(' ')).collect();
        assert_eq!(routes.len(), 23, "{routes:?}");
        for (method, path) in routes {
            let path = path
                .replace("NAME@EPOCH", "a@1")
                .replace("TASK", "fill")
                .replace("=P", "=/")
                .replace("JOB", "42@7");
            let path = path.replace("=MS", "=0").replace("=N,N", "=in0").replace("=TEXT", "=x");
            if let Err((code, message)) = asked.ask(method, &path).await {
                assert!(!message.starts_with("there is nothing at"), "{method} {path}: {code:?} {message}");
            }
        }
    }

    #[tokio::test]
    async fn what_is_asked_for_wrongly_is_refused_with_the_reason() {
        let asked = TestAgent::new().await;
        for (method, path, wanted) in [
            ("GET", "/v1/ramdisks/a%401", RefusalCode::NotFound),
            ("GET", "/v1/ramdisks/a@x", RefusalCode::Malformed),
            ("GET", "/v1/ramdisks/..%2f..@1", RefusalCode::Malformed),
            ("PUT", "/v1/ramdisks/a@1", RefusalCode::NotFound),
            ("GET", "/v1/views?path=%zz", RefusalCode::Malformed),
            ("GET", "/v1/other", RefusalCode::NotFound),
            ("GET", "/v2/node", RefusalCode::NotFound),
        ] {
            let (code, message) = asked.ask(method, path).await.unwrap_err();
            assert_eq!(code, wanted, "{method} {path}: {message}");
        }
        assert!(asked.ask("GET", "/v1/ramdisks/a%401").await.unwrap_err().1.contains("no RAM disk a@1 on"));
        assert_eq!(asked.ask("GET", "/v1/ramdisks").await.unwrap(), "[]");
        if rustix::process::geteuid().is_root() {
            // That there is no such task counts for more than how long it would be waited for.
            let path = "/v1/ramdisks/a@1/tasks/none?wait=long";
            assert_eq!(asked.ask("GET", path).await.unwrap_err().0, RefusalCode::NotFound);
            let path = "/v1/ramdisks/a@1/names?slots=%ff";
            assert_eq!(asked.ask("GET", path).await.unwrap_err().0, RefusalCode::Malformed);
        }
    }
}
