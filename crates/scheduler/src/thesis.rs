//! The log in the form of the thesis (its appendix T): seconds since 1970 and a sentence, one event a line.
//!
//! The sentences are the schedule's ([`Notice::thesis`](ondeck_core::schedule::Notice::thesis)), and stand in the journal
//! beside its lines. Only lines of versions that kept none are understood from their words.

use ondeck_api::scheduler::LogLine;
use ondeck_core::schedule::{JobState, RsaState};

/// A line of the log as the thesis's scripts would have written it; nothing for what they did not log. Failures, which
/// they did not know, are there in our words. `noted` is the sentence that was kept with the line, if one was; empty for
/// what the thesis did not log.
pub fn line(entry: &LogLine, noted: Option<&str>) -> Option<String> {
    let seconds = entry.at_ms / 1000;
    let sentence = match noted {
        Some(sentence) => Some(sentence.to_owned()).filter(|sentence| !sentence.is_empty()),
        None => of_former_version(entry),
    };
    Some(format!("{seconds} {}\n", sentence?))
}

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

/// The sentence for a line that a former version has kept: by its words, as that version said them. Whatever is said now
/// leaves it as it is.
fn of_former_version(entry: &LogLine) -> Option<String> {
    let job = entry.job?;
    let (job_state, rsa_state) = entry.states?;
    let first = entry.text.lines().next().unwrap_or_default();
    let begins = |beginning: &str| first.starts_with(&beginning.replace('#', &job.to_string()));
    let too_small = format!("job {job} too small, marking ineligible");
    Some(match rsa_state {
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
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ondeck_core::schedule::notice::*;
    use ondeck_core::schedule::{Change, Notice, Purpose, Work};
    use ondeck_core::{Bytes, EngineKind, Incarnation, JobSelector, NodeName};
    use std::time::Duration;

    #[test]
    fn a_sentence_of_the_thesis_stands_without_what_we_add_and_what_it_did_not_log_is_left_out() {
        let said = |rsa_state, text: &str| {
            let job = Some("7".parse().unwrap());
            let states = Some((JobState::Ondeck, rsa_state));
            line(&LogLine { at_ms: 1_320_009_608_123, job, states, text: text.into() }, None)
        };
        let is = |text: &str| Some(format!("1320009608 {text}\n"));
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

    #[test]
    fn the_sentence_that_was_kept_stands_whatever_the_words_are() {
        let entry = LogLine { at_ms: 7_000, job: None, states: None, text: "done constructing".into() };
        assert_eq!(line(&entry, Some("a sentence")).unwrap(), "7 a sentence\n");
        assert_eq!(line(&entry, Some("")), None);
    }

    /// What the schedule says of job 7, with the state that the job is in then.
    fn all() -> Vec<(RsaState, Notice)> {
        use RsaState as S;
        let job: Incarnation = "7".parse().unwrap();
        let node = || "r1".parse::<NodeName>().unwrap();
        let minute = Duration::from_secs(60);
        let mut all: Vec<(RsaState, Notice)> = Vec::new();
        for state in S::ALL {
            // The others come with words.
            if !state.is_work() && *state != S::UnmountNeeded {
                all.push((*state, Notice::State));
            }
        }
        let of_work = [
            (Work::Construct, S::Booting, S::Booted),
            (Work::StageIn, S::StagingIn, S::Ready),
            (Work::StopStageIn, S::StoppingStagingIn, S::Aborted),
            (Work::Mount, S::Mounting, S::InuseBoth),
            (Work::Unmount { force: true }, S::Unmounting, S::Unmounted),
            (Work::StageOut, S::StagingOut, S::DoneStagingOut),
            (Work::Destroy, S::Teardown, S::Destroyed),
        ];
        for (work, during, after) in of_work {
            for purpose in [Purpose::Input, Purpose::Both, Purpose::Output] {
                all.push((during, AtWork::Begins { work, purpose }.into()));
                let sentence = match work {
                    Work::Construct => "done constructing RSA block for job 7",
                    Work::StageIn if purpose == Purpose::Output => "prepared the output directories of job 7",
                    Work::StageIn => "finished staging data in for job 7",
                    Work::StopStageIn => "stopped data staging process of job-7-1@5",
                    Work::Mount => "mounted the RAMDISK on 2 I/O nodes for job 7",
                    Work::Unmount { .. } => "unmounted the RAMDISK from the I/O nodes of job 7",
                    Work::StageOut => "finished staging data out for job 7",
                    Work::Destroy => "finished destroying RSA block for job 7",
                };
                for (pretended, more) in [
                    (false, ""),
                    (false, ": 5 GiB in 7 files; its script said: a: b"),
                    (true, " (simulated)"),
                ] {
                    let report = format!("{sentence}{more}");
                    if work != Work::StopStageIn || more.is_empty() {
                        all.push((after, AtWork::Done { work, purpose, pretended, report }.into()));
                    }
                }
            }
            for then in [Then::Again, Then::OnDisk, Then::Unsaid] {
                let why = "r1: no room: none\nat all".to_owned();
                all.push((during, AtWork::Failed { work, why, then }.into()));
            }
        }
        all.push((S::UnmountNeeded, AtWork::Switches.into()));
        let turns = [
            Turn::Runs,
            Turn::Ended,
            Turn::EndedOnItsNodes,
            Turn::NotEndedInTime,
            Turn::Ending,
            Turn::LeftQueue,
            Turn::BackInQueue,
            Turn::StartedAnew,
            Turn::Demoted,
            Turn::NotStarted(minute),
        ];
        for turn in turns {
            all.push((S::Ready, Life::Becomes(job, turn.clone()).into()));
            all.push((S::InuseOut, Life::Forgotten(turn).into()));
        }
        let unfit = [
            Unfit::NodeTooSmall { whole: Bytes(1), engine: EngineKind::Ceph },
            Unfit::TooSmall { job, compute_nodes: 1, proportion: 2 },
            Unfit::PartTooSmall { job, part: Bytes(1), engine: EngineKind::Ceph },
            Unfit::BeyondLimit { nodes: 3, whose: Whose::User, limit: 2 },
            Unfit::NoPool { pool: "a".into(), known: vec!["b".into()] },
        ];
        for unfit in unfit {
            let too_small = matches!(unfit, Unfit::TooSmall { .. } | Unfit::PartTooSmall { .. });
            let why = format!("no RAM disk: {unfit}");
            all.push((S::Initial, NoRamDisk::Unfit(unfit).into()));
            all.push((S::Initial, NoRamDisk::StaysHeld { why, too_small }.into()));
        }
        let name = JobSelector::from(job);
        let lost =
            LostParts::Files { parts: vec![LostPart { node: node(), inventory: None }], some_are_safe: true };
        let others: [Notice; 19] = [
            Life::OnDeck.into(),
            Life::NoVariables(job).into(),
            Life::Ending.into(),
            Life::EndedOn(node()).into(),
            Life::PrologOver.into(),
            Life::NoProlog(Unshown::Input).into(),
            Life::TooEarly { waited_for: "3 jobs are staging already".into() }.into(),
            Life::Released.into(),
            Life::Retried.into(),
            Life::Gone(job).into(),
            Waiting::Staging { jobs: 3 }.into(),
            Waiting::Lacks { why: Lack::TooFew { job, free: 1, needs: 2 }, held: Some(job.job) }.into(),
            Placed::Assigned { nodes: 2, job }.into(),
            Placed::Released(vec![node()]).into(),
            Results::NotHome { why: "r1: no: room".into(), next: NotHome::Kept(name) }.into(),
            Results::Home.into(),
            Results::Salvaged { saved: "7 files".into(), lost: Some(lost) }.into(),
            AtWork::Ready.into(),
            Notice::Words("words: of others\nand more".into()),
        ];
        all.extend(others.map(|notice| (S::Ready, notice)));
        all
    }

    #[test]
    fn the_log_has_for_each_notice_what_it_had_when_it_was_made_of_words() {
        for (rsa_state, notice) in all() {
            for job_state in JobState::ALL {
                let (job, states) = (Some("7".parse().unwrap()), Some((*job_state, rsa_state)));
                let entry = LogLine { at_ms: 0, job, states, text: notice.to_string() };
                let change = Change { job, states, notice: notice.clone() };
                assert_eq!(change.thesis(), of_former_version(&entry), "{job_state} {rsa_state}: {notice:?}");
            }
        }
    }
}
