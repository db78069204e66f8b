//! How work ended, in words.

/// What the log says when work is done.
pub(super) use ondeck_core::schedule::notice::done as said;
use ondeck_core::schedule::{Fault, Outcome};
use ondeck_fleet::NodeFault;

pub(super) fn failed(why: impl Into<String>, fault: Fault) -> Outcome {
    Outcome::Failed { why: why.into(), blame: Vec::new(), fault }
}

pub(super) fn words(faults: &[NodeFault]) -> String {
    let words: Vec<String> = faults.iter().map(ToString::to_string).collect();
    words.join("; ")
}
