//! The log in the form of the thesis (its appendix T): seconds since 1970 and a sentence, one event a line.

use ondeck_api::scheduler::LogLine;
use ondeck_core::schedule::{JobState, RsaState};

/// How our words for what the thesis did not log begin, with `#` for the job.
const OURS: [&str; 11] = [
    "on deck",
    "job # runs",
    "job # ended",
    "job # left",
    "job # is back",
    "mounted the RAMDISK",
    "unmounted the RAMDISK",
    "prepar",
    "released ",
    "removing state of job #",
    "its results are on disk",
];

/// How the thesis's sentences begin to which ours add something after a colon.
const THEIRS: [&str; 4] = [
    "done constructing RSA block for job #",
    "finished staging data in for job #",
    "finished staging data out for job #",
    "finished destroying RSA block for job #",
];

/// A line of the log as the thesis's scripts would have written it; nothing for what they did not log. Failures, which
/// they did not know, are there in our words.
pub fn line(entry: &LogLine) -> Option<String> {
    let seconds = entry.at_ms / 1000;
    let job = entry.job?;
    let (job_state, rsa_state) = entry.states?;
    let first = entry.text.lines().next().unwrap_or_default();
    let begins = |beginning: &str| first.starts_with(&beginning.replace('#', &job.to_string()));
    let too_small = format!("job {job} too small, marking ineligible");
    let text = match rsa_state {
        // Work that begins; the states say it.
        RsaState::Booting if first.is_empty() => format!("constructing RSA block for job {job}"),
        RsaState::StagingIn if first.is_empty() => format!("staging data for job {job}"),
        RsaState::StoppingStagingIn if first.is_empty() => {
            format!("stop the data staging process for job {job}")
        }
        RsaState::StagingOut if first.is_empty() => format!("staging data out for job {job}"),
        RsaState::Teardown if first.is_empty() => format!("destroying RSA block for job {job}"),
        RsaState::UnmountNeeded if first.is_empty() => {
            format!("switching from staging in to out for job {job}")
        }
        _ if first.is_empty() => return None,
        _ if job_state == JobState::Demoted && begins("removing state of job #") => {
            format!("removing state files for job {job} due to demotion/destruction")
        }
        _ if first.contains(&too_small) => too_small,
        _ if OURS.iter().any(|ours| begins(ours)) => return None,
        _ if THEIRS.iter().any(|theirs| begins(theirs)) => {
            first.split(": ").next().unwrap_or(first).to_owned()
        }
        _ => first.strip_prefix("waits: ").unwrap_or(first).to_owned(),
    };
    Some(format!("{seconds} {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_of_the_thesis_stands_without_what_we_add_and_what_it_did_not_log_is_left_out() {
        let said = |rsa_state, text: &str| {
            let job = Some("7".parse().unwrap());
            let states = Some((JobState::Ondeck, rsa_state));
            line(&LogLine { at_ms: 1_320_009_608_123, job, states, text: text.into() })
        };
        let is = |text: &str| Some(format!("1320009608 {text}"));
        assert_eq!(said(RsaState::Booting, ""), is("constructing RSA block for job 7"));
        assert_eq!(
            said(RsaState::Booted, "done constructing RSA block for job 7: 4.0 GiB on 2 RSA nodes"),
            is("done constructing RSA block for job 7")
        );
        // A note in the middle of work does not begin it again.
        assert_eq!(said(RsaState::Booting, "job 7 runs"), None);
        assert_eq!(said(RsaState::Booting, "job 7 has been demoted"), is("job 7 has been demoted"));
        assert_eq!(
            said(
                RsaState::Initial,
                "no RAM disk: job 7 too small, marking ineligible: it has 1 compute nodes"
            ),
            is("job 7 too small, marking ineligible")
        );
        assert_eq!(said(RsaState::Ready, ""), None);
        assert_eq!(said(RsaState::Initial, "released r1, r2"), None);
    }
}
