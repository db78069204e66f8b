//! The API of the scheduler. Who may do what: users see and touch their own jobs; administrators all; a hook is believed
//! only about the node that it comes from, and whether a job starts there is asked of the workload manager.
//!
//! # Layout
//!
//! - `routes`: a handler for each route; what they answer is found by `hooks`, `burst_buffer`, `jobs`, `history` and `status`
//! - [`openapi`]: the description that is made of the handlers; `page`: the same for people

mod burst_buffer;
mod history;
mod hooks;
mod jobs;
pub mod openapi;
mod page;
mod routes;
mod status;
#[cfg(test)]
mod tests;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use ondeck_api::auth::Caller;
use ondeck_api::scheduler::Status;
use ondeck_api::server::Json;
use ondeck_api::wire::{Refusal, RefusalCode};
use ondeck_core::Owner;
use ondeck_core::schedule::Refused;
use ondeck_wlm::Controller;

use crate::context::Context;

/// What answers requests.
struct Api {
    context: Arc<Context>,
    /// Who the workload manager's daemon is, or why that can't be told, and since when.
    controller: tokio::sync::Mutex<Option<(Instant, Result<Controller, String>)>>,
    /// When the start of the workload manager's daemon was last asked for.
    start_asked: tokio::sync::Mutex<Option<Instant>>,
    /// For whom Slurm is to look at its queue.
    waking: Mutex<burst_buffer::Waking>,
    /// How many stage-outs Slurm waits for.
    stage_outs: AtomicUsize,
    /// The description of the API, for programs.
    document: serde_json::Value,
    /// The same for people.
    page: String,
}

/// Answers for the daemon whose parts share this.
pub(crate) fn router(context: Arc<Context>) -> Router {
    let document = openapi::value();
    let (stage_outs, controller, start_asked, waking) = Default::default();
    let api = Arc::new(Api {
        context,
        controller,
        start_asked,
        waking,
        stage_outs,
        page: page::page(&document),
        document,
    });
    // Around all routes, and around what there is no route for.
    let without_journal = from_fn_with_state(Arc::clone(&api), unless_there_is_no_journal);
    let (router, _) = routes::routes().split_for_parts();
    router.layer(without_journal).with_state(api)
}

/// While the journal can't be written nothing is decided, and who asks would wait.
async fn unless_there_is_no_journal(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    match api.context.journal.fault() {
        None => next.run(request).await,
        Some(fault) => api.without_journal(request.method(), request.uri().path(), fault),
    }
}

impl Api {
    /// What can be said while the journal can't be written: that it can't.
    fn without_journal(&self, method: &Method, path: &str, fault: String) -> Response {
        match path {
            "/v1/jobs" if method == Method::GET => Json(Status {
                jobs: Vec::new(),
                nodes: Vec::new(),
                workload_manager: self.context.queue.snapshot().fault,
                simulated: self.context.config().scheduler.simulate.is_some(),
                journal: Some(fault),
                journal_name: self.context.charge.journal().journal.clone(),
                replaced_journals: self.context.charge.journal().replaced.clone(),
                warnings: Vec::new(),
                places_lost: 0,
                site_file: None,
                filesystems: Vec::new(),
            })
            .into_response(),
            "/v1/metrics" => self.context.metrics.without_journal().into_response(),
            _ => Refusal::new(
                RefusalCode::Failed,
                format!(
                    "the scheduler's journal in {} can't be written ({fault}); nothing is decided until it can be",
                    self.context.config().scheduler.state.display()
                ),
            )
            .into_response(),
        }
    }
}

fn refused(refused: Refused) -> Refusal {
    let code = match refused {
        Refused::NoJob(_) | Refused::NoNode(_) => RefusalCode::NotFound,
        Refused::NotNow(_) => RefusalCode::Conflict,
    };
    Refusal::new(code, refused.to_string())
}

fn may_see(caller: Caller, owner: Owner) -> bool {
    caller.is_administrator() || caller.uid == owner.uid
}
