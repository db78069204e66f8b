//! The routes: what each takes from its request, who may, and what answers it.
//!
//! The attribute of a handler says where it is, and is its description: both the router and the document are made of it.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::Html;
use ondeck_api::auth::Caller;
use ondeck_api::scheduler::{
    BurstBufferAnswer, BurstBufferQuestion, Drain, Forgotten, Hook, HookAnswer, JobStory, LayoutRun, Status,
    Usage, Waited,
};
use ondeck_api::server::{Administrator, Json, Path, Query, from_text};
use ondeck_api::wire::Refusal;
use ondeck_core::schedule::{BurstBufferCall, Event};
use ondeck_core::timeline::Timeline;
use ondeck_core::{JobSelector, NodeName};
use serde::Deserialize;
use utoipa::{IntoParams, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Api, refused};

/// The longest that a request for a state may wait for it.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(30);

type OfApi = State<Arc<Api>>;

type Answer<T> = Result<Json<T>, Refusal>;

/// What the document has beside the handlers.
#[derive(OpenApi)]
#[openapi(components(schemas(Refusal)))]
struct ApiDocument;

/// The routes with their document.
pub(super) fn routes() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::with_openapi(ApiDocument::openapi())
        .routes(routes!(status))
        .routes(routes!(job))
        .routes(routes!(wait))
        .routes(routes!(retry))
        .routes(routes!(abandon))
        .routes(routes!(drain))
        .routes(routes!(give_up))
        .routes(routes!(resume))
        .routes(routes!(usage))
        .routes(routes!(layout_history, forget_layout_history))
        .routes(routes!(timeline))
        .routes(routes!(log))
        .routes(routes!(metrics))
        .routes(routes!(prolog))
        .routes(routes!(epilog))
        .routes(routes!(burst_buffer))
        .routes(routes!(page))
        .routes(routes!(openapi))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct OfJob {
    /// The job's number; 42.1 is its life after the first requeue, 42@1750000000 the job that was submitted then.
    #[serde(deserialize_with = "from_text")]
    #[param(value_type = String, example = "42")]
    job: JobSelector,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct OfNode {
    /// The RSA node's name.
    #[param(value_type = String, example = "r3")]
    node: NodeName,
}

/// A job starts on a node: answers when its RAM disk is mounted on all of its nodes, or will not be.
///
/// Who: root of that node, from a port below 1024.
#[utoipa::path(
    post,
    path = "/v1/hooks/prolog",
    request_body = Hook,
    responses((status = 200, description = "What became of it", body = HookAnswer))
)]
async fn prolog(State(api): OfApi, caller: Caller, Json(hook): Json<Hook>) -> Answer<HookAnswer> {
    let began = Instant::now();
    let answer = api.prolog(hook, caller).await;
    api.context.metrics.hook("prolog", told(&answer), began.elapsed());
    answer.map(Json)
}

/// A job has ended on a node: answers when its RAM disk is unmounted.
///
/// Who: root of that node, from a port below 1024.
#[utoipa::path(
    post,
    path = "/v1/hooks/epilog",
    request_body = Hook,
    responses((status = 200, description = "What became of it", body = HookAnswer))
)]
async fn epilog(State(api): OfApi, caller: Caller, Json(hook): Json<Hook>) -> Answer<HookAnswer> {
    let began = Instant::now();
    let answer = api.epilog(hook, caller).await;
    api.context.metrics.hook("epilog", told(&answer), began.elapsed());
    answer.map(Json)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct OfCall {
    /// `setup`, `data_in`, `pre_run`, `post_run`, `data_out` or `teardown`.
    #[param(value_type = String, example = "data_in")]
    call: BurstBufferCall,
}

/// Slurm's burst-buffer plugin asks something for a job: answers when it is done, or when there is nothing to wait for, or
/// when the time is over.
///
/// Who: the user that Slurm's controller runs as, from its host; administrators.
#[utoipa::path(
    post,
    path = "/v1/burst-buffer/{call}",
    params(OfCall),
    request_body = BurstBufferQuestion,
    responses((status = 200, description = "What came of it", body = BurstBufferAnswer))
)]
async fn burst_buffer(
    State(api): OfApi,
    caller: Caller,
    Path(OfCall { call }): Path<OfCall>,
    Json(question): Json<BurstBufferQuestion>,
) -> Answer<BurstBufferAnswer> {
    api.burst_buffer(call, question, caller).await.map(Json)
}

/// What a hook is answered, for the figures.
fn told(answer: &Result<HookAnswer, Refusal>) -> &'static str {
    match answer {
        Ok(answer) if answer.mounted => "mounted",
        Ok(_) => "not_mounted",
        Err(_) => "refused",
    }
}

/// What is done for each job, and the RSA nodes.
///
/// Who: everybody; users see their own jobs, administrators all.
#[utoipa::path(
    get,
    path = "/v1/jobs",
    responses((status = 200, description = "Now", body = Status))
)]
async fn status(State(api): OfApi, caller: Caller) -> Json<Status> {
    if caller.is_administrator() && api.context.view().places_lost().places > 0 {
        // They may have come back since, which the next look shows: who looks does not wait for the workload manager.
        let api = Arc::clone(&api);
        tokio::spawn(async move { api.note_start_of_the_controller().await });
    }
    Json(api.status(caller))
}

/// All that is known of a job, also after its end.
///
/// Who: its user, administrators.
#[utoipa::path(
    get,
    path = "/v1/jobs/{job}",
    params(OfJob),
    responses((status = 200, description = "The job", body = JobStory))
)]
async fn job(State(api): OfApi, caller: Caller, Path(OfJob { job }): Path<OfJob>) -> Answer<JobStory> {
    api.story(job, caller).await.map(Json)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct WaitQuery {
    /// How long to wait, in milliseconds; 30000 at most.
    #[serde(default)]
    #[param(default = 0)]
    ms: u64,
}

/// Answers once nothing of a job is to be done any more, or somebody must decide, or the time is over.
///
/// A number alone stands for all lives of the newest job that has it.
///
/// Who: its user, administrators.
#[utoipa::path(
    get,
    path = "/v1/jobs/{job}/wait",
    params(OfJob, WaitQuery),
    responses((status = 200, description = "Where it stands", body = Waited))
)]
async fn wait(
    State(api): OfApi,
    caller: Caller,
    Path(OfJob { job }): Path<OfJob>,
    Query(WaitQuery { ms }): Query<WaitQuery>,
) -> Answer<Waited> {
    api.wait(job, caller, Duration::from_millis(ms).min(LONGEST_WAIT)).await.map(Json)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct RetryQuery {
    /// For a job that is LOST: save what the RSA nodes that are left have, and give up the rest.
    #[serde(default)]
    #[param(default = false)]
    salvage: bool,
}

/// Stages out results once more that are held or lost; builds once more for a job that has not started.
///
/// Who: its user, administrators.
#[utoipa::path(
    post,
    path = "/v1/jobs/{job}/retry",
    params(OfJob, RetryQuery),
    responses((status = 200, description = "The job afterwards", body = JobStory))
)]
async fn retry(
    State(api): OfApi,
    caller: Caller,
    Path(OfJob { job }): Path<OfJob>,
    Query(RetryQuery { salvage }): Query<RetryQuery>,
) -> Answer<JobStory> {
    let job = api.meant(job, caller)?;
    api.context.event(Event::Retry { job, salvage }).await.map_err(refused)?;
    api.story(job.into(), caller).await.map(Json)
}

/// Gives up results that are being staged out, held or lost: they are gone for good.
///
/// Who: its user, administrators.
#[utoipa::path(
    post,
    path = "/v1/jobs/{job}/abandon",
    params(OfJob),
    responses((status = 200, description = "The job afterwards", body = JobStory))
)]
async fn abandon(State(api): OfApi, caller: Caller, Path(OfJob { job }): Path<OfJob>) -> Answer<JobStory> {
    let job = api.meant(job, caller)?;
    let by = match caller.address {
        None => format!("user {}", caller.uid),
        Some(address) => format!("user {} at {address}", caller.uid),
    };
    api.context.event(Event::Abandon { job, by }).await.map_err(refused)?;
    api.story(job.into(), caller).await.map(Json)
}

/// Lends nothing new of an RSA node; jobs that have it keep it.
///
/// Who: administrators.
#[utoipa::path(
    post,
    path = "/v1/nodes/{node}/drain",
    params(OfNode),
    request_body = Drain,
    responses((status = 200, description = "Afterwards", body = Status))
)]
async fn drain(
    State(api): OfApi,
    Administrator(caller): Administrator,
    Path(OfNode { node }): Path<OfNode>,
    Json(Drain { why }): Json<Drain>,
) -> Answer<Status> {
    let why = if why.trim().is_empty() { "by hand".to_owned() } else { why };
    api.context.event(Event::Drain { node, why }).await.map_err(refused)?;
    Ok(Json(api.status(caller)))
}

/// Waits no longer for a node that has not answered since the journal began.
///
/// Jobs that had started before may get RAM disks then.
///
/// Who: administrators.
#[utoipa::path(
    post,
    path = "/v1/nodes/{node}/give-up",
    params(OfNode),
    responses((status = 200, description = "Afterwards", body = Status))
)]
async fn give_up(
    State(api): OfApi,
    Administrator(caller): Administrator,
    Path(OfNode { node }): Path<OfNode>,
) -> Answer<Status> {
    api.context.event(Event::GiveUp(node)).await.map_err(refused)?;
    Ok(Json(api.status(caller)))
}

/// Lets a drained RSA node lend again.
///
/// Who: administrators.
#[utoipa::path(
    post,
    path = "/v1/nodes/{node}/resume",
    params(OfNode),
    responses((status = 200, description = "Afterwards", body = Status))
)]
async fn resume(
    State(api): OfApi,
    Administrator(caller): Administrator,
    Path(OfNode { node }): Path<OfNode>,
) -> Answer<Status> {
    api.context.event(Event::Resume(node)).await.map_err(refused)?;
    Ok(Json(api.status(caller)))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct UsageQuery {
    /// How many days back.
    #[serde(default = "a_month")]
    #[param(default = 30)]
    days: u64,
}

fn a_month() -> u64 {
    30
}

/// What each user and account had of the RSA.
///
/// Who: everybody; users see their own.
#[utoipa::path(
    get,
    path = "/v1/usage",
    params(UsageQuery),
    responses((status = 200, description = "In the last days", body = [Usage]))
)]
async fn usage(
    State(api): OfApi,
    caller: Caller,
    Query(UsageQuery { days }): Query<UsageQuery>,
) -> Answer<Vec<Usage>> {
    api.usage(days, caller).await.map(Json)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct HistoryQuery {
    /// Of this program alone.
    program: Option<String>,
    /// In directories of this name alone: absolute, and its numbers may be any.
    directory: Option<String>,
    /// Of this user alone; administrators only.
    uid: Option<u32>,
}

/// What runs of jobs have left in the directories whose layouts they asked for: the newest first, at most 500, and no more than 3 MiB of them.
///
/// Who: everybody; users see their own, administrators all.
#[utoipa::path(
    get,
    path = "/v1/layouts/history",
    params(HistoryQuery),
    responses((status = 200, description = "The runs", body = [LayoutRun]))
)]
async fn layout_history(
    State(api): OfApi,
    caller: Caller,
    Query(asked): Query<HistoryQuery>,
) -> Answer<Vec<LayoutRun>> {
    let HistoryQuery { program, directory, uid } = asked;
    api.layout_history(caller, uid, program.as_deref(), directory.as_deref()).await.map(Json)
}

/// Forgets what runs of jobs have left: layouts are not chosen by it any more.
///
/// Who: everybody; users theirs, administrators theirs or a user's that they name.
#[utoipa::path(
    delete,
    path = "/v1/layouts/history",
    params(HistoryQuery),
    responses((status = 200, description = "How many runs", body = Forgotten))
)]
async fn forget_layout_history(
    State(api): OfApi,
    caller: Caller,
    Query(asked): Query<HistoryQuery>,
) -> Answer<Forgotten> {
    let HistoryQuery { program, directory, uid } = asked;
    api.forget_layout_history(caller, uid, program.as_deref(), directory.as_deref()).await.map(Json)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct TimelineQuery {
    /// How many hours back.
    #[serde(default = "a_day")]
    #[param(default = 24, value_type = u64)]
    hours: NonZeroU64,
}

fn a_day() -> NonZeroU64 {
    NonZeroU64::MIN.saturating_add(23)
}

/// Which job had which nodes, when and for what: what a picture of it shows.
///
/// Who: everybody; users see their own jobs.
#[utoipa::path(
    get,
    path = "/v1/timeline",
    params(TimelineQuery),
    responses((status = 200, description = "As `ondeck simulate` has it, with the nodes' names", body = Object))
)]
async fn timeline(
    State(api): OfApi,
    caller: Caller,
    Query(TimelineQuery { hours }): Query<TimelineQuery>,
) -> Answer<Timeline> {
    api.timeline(hours, caller).await.map(Json)
}

/// The log of all jobs, one event a line: seconds since 1970 and a sentence.
///
/// Who: administrators.
#[utoipa::path(
    get,
    path = "/v1/log",
    responses((status = 200, description = "The last 10000 lines, oldest first", body = String))
)]
async fn log(State(api): OfApi, _: Administrator) -> Result<String, Refusal> {
    api.thesis_log().await
}

/// Figures for Prometheus.
///
/// Who: everybody.
#[utoipa::path(
    get,
    path = "/v1/metrics",
    responses((status = 200, description = "In its text format", body = String))
)]
async fn metrics(State(api): OfApi) -> String {
    let (context, snapshot) = (&api.context, api.context.queue.snapshot());
    context.metrics.text(&context.view(), &snapshot, &context.compute)
}

/// The description of this API as a page.
///
/// Who: everybody.
#[utoipa::path(
    get,
    path = "/v1",
    responses((status = 200, description = "HTML", body = String, content_type = "text/html"))
)]
async fn page(State(api): OfApi) -> Html<String> {
    Html(api.page.clone())
}

/// The description of this API for programs.
///
/// Who: everybody.
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    responses((status = 200, description = "OpenAPI 3.1", body = Object))
)]
async fn openapi(State(api): OfApi) -> Json<serde_json::Value> {
    Json(api.document.clone())
}
