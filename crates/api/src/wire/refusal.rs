//! Why a request was refused.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was not done. The code is for programs, the message for people.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(examples(json!({ "code": "not_found", "message": "there is no RSA node r9" })))]
pub struct Refusal {
    /// The kind.
    pub code: RefusalCode,
    /// In words: what, where, and what to do.
    pub message: String,
}

impl Refusal {
    /// A refusal of a kind, in words.
    pub fn new(code: RefusalCode, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into() }
    }
}

/// The kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RefusalCode {
    /// The request can't be understood.
    Malformed,
    /// The caller has not proved who it is.
    Unauthenticated,
    /// The caller may not do this.
    Forbidden,
    /// There is no such thing here.
    NotFound,
    /// A later incarnation exists or existed.
    Fenced,
    /// Something else has this name or path.
    Conflict,
    /// Files are open; the message names whose.
    Busy,
    /// It may hold results of a job that are nowhere else.
    HoldsResults,
    /// The agent obeys the scheduler of another journal.
    ForeignJournal,
    /// The agent has seen a later state of the scheduler's journal.
    OlderJournal,
    /// The order is not of the scheduler that the agent obeys.
    NotInCharge,
    /// There is not enough of it.
    TooLarge,
    /// The step was tried and failed.
    Failed,
}

impl RefusalCode {
    /// The HTTP status that goes with it.
    pub fn status(self) -> u16 {
        match self {
            RefusalCode::Malformed => 400,
            RefusalCode::Unauthenticated => 401,
            RefusalCode::Forbidden => 403,
            RefusalCode::NotFound => 404,
            RefusalCode::Fenced
            | RefusalCode::Conflict
            | RefusalCode::HoldsResults
            | RefusalCode::ForeignJournal
            | RefusalCode::OlderJournal
            | RefusalCode::NotInCharge => 409,
            RefusalCode::Failed => 422,
            RefusalCode::Busy => 423,
            RefusalCode::TooLarge => 507,
        }
    }
}
