//! Who had which nodes, when, and for what: what a Gantt chart shows, of what really happened and of a simulation.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::schedule::{JobState, RsaState};
use crate::{Incarnation, NodeName};

/// What nodes were used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Compute nodes wait for the job's Prologs.
    Prolog,
    /// The program reads its input.
    Reading,
    /// The program computes.
    Computing,
    /// The program writes a checkpoint.
    Checkpoint,
    /// The program writes its output.
    Writing,
    /// The job runs. What it does is not known.
    Running,
    /// Compute nodes wait for the job's Epilogs.
    Epilog,
    /// A RAM disk is built.
    Constructing,
    /// Its input is copied into it.
    StagingIn,
    /// It waits for the job's start.
    Ready,
    /// The job uses it.
    InUse,
    /// Results are copied to disk.
    StagingOut,
    /// It waits for somebody's decision.
    Held,
    /// It is removed.
    Removing,
}

impl Phase {
    /// Of a state of a RAM disk; nothing for states in which there is none.
    pub fn of_ram_disk(state: RsaState) -> Option<Phase> {
        use RsaState as S;
        match state {
            S::Initial | S::Ineligible | S::Assigned | S::Destroyed => None,
            S::Booting | S::Booted => Some(Phase::Constructing),
            S::StagingIn | S::StoppingStagingIn => Some(Phase::StagingIn),
            S::Ready => Some(Phase::Ready),
            S::Mounting | S::InuseIn | S::InuseBoth | S::InuseOut | S::UnmountNeeded | S::Unmounting => {
                Some(Phase::InUse)
            }
            S::Unmounted | S::StagingOut | S::DoneStagingOut => Some(Phase::StagingOut),
            S::Held | S::Lost => Some(Phase::Held),
            S::Aborted | S::Teardown => Some(Phase::Removing),
        }
    }
}

/// Nodes that one job had for one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The number of the job.
    pub job: u64,
    /// For what.
    pub phase: Phase,
    /// From when, in milliseconds since the beginning.
    pub from_ms: u64,
    /// Until when.
    pub to_ms: u64,
    /// The nodes: the first and the last of each run of neighbours, from 0.
    pub nodes: Vec<(u32, u32)>,
}

/// All that a Gantt chart shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// When the beginning was, in milliseconds since 1970; 0 of a simulation.
    #[serde(default)]
    pub begin_ms: u64,
    /// When it ends, in milliseconds since the beginning; 0 of a simulation, which ends with its last span.
    #[serde(default)]
    pub end_ms: u64,
    /// How many compute nodes there are.
    pub compute_nodes: u32,
    /// How many RSA nodes there are.
    pub rsa_nodes: u32,
    /// What compute nodes did, by the beginning.
    pub compute: Vec<Span>,
    /// What RSA nodes did, by the beginning.
    pub rsa: Vec<Span>,
    /// The names of the compute nodes, in their order; none of a simulation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compute_names: Vec<String>,
    /// The names of the RSA nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rsa_names: Vec<String>,
}

/// A line of a log: what a job was from then on.
#[derive(Clone, Debug)]
pub struct Noted {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// Which job.
    pub job: Incarnation,
    /// What the workload manager and Ondeck did with it.
    pub states: (JobState, RsaState),
    /// The RSA nodes that it was promised.
    pub rsa: Vec<NodeName>,
}

impl Timeline {
    /// What a log says of a time, in milliseconds since 1970. The lines come in their order; what was before that time counts as far
    /// as it lasted. `compute` are the nodes on which each job ran, `rsa` are RSA nodes that are there, whether any had a job or not.
    pub fn of_log(
        lines: &[Noted],
        compute: &BTreeMap<Incarnation, Vec<NodeName>>,
        rsa: impl IntoIterator<Item = NodeName>,
        begin_ms: u64,
        end_ms: u64,
    ) -> Timeline {
        let of_compute = |line: &Noted| compute.get(&line.job).map(Vec::as_slice).unwrap_or_default();
        let mut all_rsa: BTreeSet<NodeName> = rsa.into_iter().collect();
        all_rsa.extend(lines.iter().flat_map(|line| line.rsa.iter().cloned()));
        let all_compute: BTreeSet<NodeName> = lines.iter().flat_map(of_compute).cloned().collect();
        let mut rsa = Rows::new(all_rsa, begin_ms, end_ms);
        let mut compute = Rows::new(all_compute, begin_ms, end_ms);
        for line in lines {
            let (job_state, rsa_state) = line.states;
            let runs = (job_state == JobState::Running).then_some(Phase::Running);
            compute.change(line.at_ms, line.job, runs, of_compute(line));
            rsa.change(line.at_ms, line.job, Phase::of_ram_disk(rsa_state), &line.rsa);
        }
        let (compute_names, compute) = compute.finish();
        let (rsa_names, rsa) = rsa.finish();
        Timeline {
            begin_ms,
            end_ms: end_ms.saturating_sub(begin_ms),
            compute_nodes: compute_names.len() as u32,
            rsa_nodes: rsa_names.len() as u32,
            compute,
            rsa,
            compute_names,
            rsa_names,
        }
    }
}

/// Nodes of one kind, and what each job does with its own, by a log.
struct Rows<'a> {
    /// The row of each, and the names by rows.
    places: BTreeMap<NodeName, u32>,
    names: Vec<String>,
    begin_ms: u64,
    end_ms: u64,
    now: BTreeMap<Incarnation, (u64, Phase, &'a [NodeName])>,
    spans: Vec<Span>,
}

impl<'a> Rows<'a> {
    fn new(names: BTreeSet<NodeName>, begin_ms: u64, end_ms: u64) -> Rows<'a> {
        let mut sorted: Vec<NodeName> = names.into_iter().collect();
        sorted.sort_by_cached_key(|name| as_people_count(name.as_str()));
        let names = sorted.iter().map(ToString::to_string).collect();
        let places = sorted.into_iter().zip(0..).collect();
        Rows { places, names, begin_ms, end_ms, now: BTreeMap::new(), spans: Vec::new() }
    }

    fn change(&mut self, at_ms: u64, job: Incarnation, phase: Option<Phase>, nodes: &'a [NodeName]) {
        let next = phase.filter(|_| !nodes.is_empty()).map(|phase| (phase, nodes));
        match (self.now.get(&job), &next) {
            (None, None) => return,
            (Some((_, phase, nodes)), Some(next)) if (*phase, *nodes) == *next => return,
            _ => {}
        }
        self.end(job, at_ms);
        if let Some((phase, nodes)) = next {
            self.now.insert(job, (at_ms, phase, nodes));
        }
    }

    fn end(&mut self, job: Incarnation, at_ms: u64) {
        let Some((since, phase, nodes)) = self.now.remove(&job) else { return };
        let (from, to) = (since.max(self.begin_ms), at_ms.min(self.end_ms));
        if from >= to {
            return;
        }
        let mut places: Vec<u32> = nodes.iter().filter_map(|name| self.places.get(name)).copied().collect();
        places.sort_unstable();
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for place in places {
            match ranges.last_mut() {
                Some(last) if last.1 + 1 == place => last.1 = place,
                _ => ranges.push((place, place)),
            }
        }
        let (from_ms, to_ms) = (from - self.begin_ms, to - self.begin_ms);
        self.spans.push(Span { job: job.job.0.into(), phase, from_ms, to_ms, nodes: ranges });
    }

    fn finish(mut self) -> (Vec<String>, Vec<Span>) {
        let jobs: Vec<Incarnation> = self.now.keys().copied().collect();
        for job in jobs {
            self.end(job, self.end_ms);
        }
        self.spans.sort_by_key(|span| (span.from_ms, span.nodes.first().copied(), span.job));
        (self.names, self.spans)
    }
}

/// The pieces of a name, its numbers as numbers: `n9` comes before `n10`.
fn as_people_count(name: &str) -> Vec<(String, u64)> {
    let mut pieces: Vec<(String, u64)> = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let word = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, after) = rest.split_at(word);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (number, after) = after.split_at(digits);
        pieces.push((text.to_owned(), number.parse().unwrap_or(0)));
        rest = after;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::JobId;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn a_log_becomes_spans_of_the_time_that_is_asked_for() {
        let job = |number| Incarnation { job: JobId(number), submitted: 1, restarts: 0 };
        let noted = |at_ms, number, job_state, rsa_state, rsa: &[&str]| Noted {
            at_ms,
            job: job(number),
            states: (job_state, rsa_state),
            rsa: rsa.iter().map(|name| node(name)).collect(),
        };
        use JobState::{Finished, Ondeck, Running};
        use RsaState as S;
        let both = ["r1", "r10"];
        let lines = [
            noted(1000, 1, Ondeck, S::Assigned, &both),
            noted(2000, 1, Ondeck, S::Booting, &both),
            noted(4000, 1, Ondeck, S::StagingIn, &both),
            noted(4500, 1, Ondeck, S::StagingIn, &both),
            noted(6000, 1, Ondeck, S::Ready, &both),
            noted(7000, 1, Running, S::InuseIn, &both),
            noted(7500, 2, Ondeck, S::Booting, &["r9"]),
            noted(9000, 1, Finished, S::Unmounted, &both),
            noted(9500, 1, Finished, S::Destroyed, &[]),
        ];
        let compute = [(job(1), vec![node("c10"), node("c9"), node("c2")])].into();
        let found = Timeline::of_log(&lines, &compute, [node("r2")], 3000, 10_000);
        assert_eq!(found.rsa_names, ["r1", "r2", "r9", "r10"]);
        assert_eq!(found.compute_names, ["c2", "c9", "c10"]);
        assert_eq!((found.begin_ms, found.end_ms, found.rsa_nodes, found.compute_nodes), (3000, 7000, 4, 3));
        let span = |job, phase, from_ms, to_ms, nodes: &[(u32, u32)]| Span {
            job,
            phase,
            from_ms,
            to_ms,
            nodes: nodes.to_vec(),
        };
        let halves = [(0, 0), (3, 3)];
        let expected = [
            span(1, Phase::Constructing, 0, 1000, &halves),
            span(1, Phase::StagingIn, 1000, 3000, &halves),
            span(1, Phase::Ready, 3000, 4000, &halves),
            span(1, Phase::InUse, 4000, 6000, &halves),
            span(2, Phase::Constructing, 4500, 7000, &[(2, 2)]),
            span(1, Phase::StagingOut, 6000, 6500, &halves),
        ];
        assert_eq!(found.rsa, expected);
        assert_eq!(found.compute, [span(1, Phase::Running, 4000, 6000, &[(0, 2)])]);
        let json = serde_json::to_string(&found).unwrap_or_default();
        assert_eq!(serde_json::from_str::<Timeline>(&json).ok(), Some(found));
    }
}
