//! The log in the form of the thesis (its appendix T): seconds since 1970 and a sentence, one event a line.

use ondeck_api::scheduler::LogLine;
use ondeck_core::schedule::{JobState, RsaState};

/// A line of the log as the thesis's scripts would have written it; nothing for what they did not log.
pub fn line(entry: &LogLine) -> Option<String> {
    let seconds = entry.at_ms / 1000;
    let job = entry.job?;
    let (job_state, rsa_state) = entry.states?;
    let text = match rsa_state {
        // These begin; the state before them tells nothing that the sentence does not.
        RsaState::Booting => format!("constructing RSA block for job {job}"),
        RsaState::StagingIn => format!("staging data for job {job}"),
        RsaState::StoppingStagingIn => format!("stop the data staging process for job {job}"),
        RsaState::StagingOut => format!("staging data out for job {job}"),
        RsaState::Teardown => format!("destroying RSA block for job {job}"),
        RsaState::UnmountNeeded if entry.text.is_empty() => {
            format!("switching from staging in to out for job {job}")
        }
        _ if entry.text.is_empty() => return None,
        // What was done, or is worth saying, stands there in words.
        _ if job_state == JobState::Demoted && entry.text.starts_with("removing state") => {
            format!("removing state files for job {job} due to demotion/destruction")
        }
        _ => entry.text.clone(),
    };
    let first = text.lines().next().unwrap_or_default();
    Some(format!("{seconds} {first}"))
}
