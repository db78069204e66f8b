//! Being in charge: agents obey the scheduler of one journal, and it is asked for before the first order.
//!
//! At its start the daemon asks all RSA nodes what they have and whom they obey, before it orders anything. If they have
//! seen a later state of this journal, or obey the scheduler of another one, it does not start: somebody must bring the
//! newest copy, or confirm that there is none (`ondeck serve --take-over`). A take-over asks the compute nodes as well; it
//! gives the journal a new name and notes which ones it replaces, and which ones those had replaced, as their agents know:
//! so agents that were out of reach then, or missed an earlier one, are claimed when they come back. What the journal said
//! of RAM disks counts no more: what the agents have does, and is found (`adopt`). Only if nobody knows better
//! than the journal, and some agents obey another one beside it, it stands as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_api::CallError;
use ondeck_api::wire::{Authority, Claim, LocalReport, NodeReport, Obeyed, RefusalCode};
use ondeck_core::schedule::{Job, JobState, Node, RsaState};
use ondeck_core::{Incarnation, JobSelector, NodeName};
use ondeck_fleet::Fleet;
use tokio::task::JoinSet;

use crate::clock::now;
use crate::store::{JournalIdentity, Store, StoreError};

/// How long all nodes are asked at the start. Whoever has not answered by then is asked in each look.
const ASKING: Duration = Duration::from_secs(5);

/// How long an agent that obeyed is believed to. One whose machine was started anew has forgotten whom it obeys.
const BELIEVED: Duration = Duration::from_secs(5);

/// How often it is looked whether another daemon has taken this one's place.
const WATCHING: Duration = Duration::from_millis(500);

/// What a node said: what it has, or why not.
pub(crate) type NodeAnswer = Result<(NodeReport, Vec<LocalReport>), String>;

/// Whom the agents obey, as far as this daemon has made them.
pub(crate) struct Charge {
    identity: JournalIdentity,
    session: u64,
    /// When each agent that obeys was last known to.
    claimed: Mutex<BTreeMap<NodeName, Instant>>,
    /// The agents that have said of an order that this daemon is not in charge.
    doubters: Mutex<BTreeSet<NodeName>>,
    /// An agent that obeyed this daemon, and was taken over by another one.
    displaced_by: Mutex<Option<NodeName>>,
}

impl Charge {
    pub fn new(identity: JournalIdentity) -> std::io::Result<Charge> {
        let secret = ondeck_ramdisk::Secret::new()?;
        let [a, b, c, d, e, f, g, h, ..] = secret.derive("session");
        let session = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
        Ok(Charge {
            identity,
            session,
            claimed: Mutex::default(),
            doubters: Mutex::default(),
            displaced_by: Mutex::default(),
        })
    }

    /// In whose name the next order is given.
    pub fn authority(&self) -> Authority {
        let counter = self.identity.commits.load(Ordering::SeqCst);
        Authority { journal: self.identity.journal.clone(), session: self.session, counter }
    }

    /// The journal that agents are to obey.
    pub fn journal(&self) -> &JournalIdentity {
        &self.identity
    }

    fn claimed(&self) -> MutexGuard<'_, BTreeMap<NodeName, Instant>> {
        self.claimed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn claim(&self, take_over: bool) -> Claim {
        let Authority { journal, session, counter } = self.authority();
        Claim { journal, session, counter, take_over, replaced: self.identity.replaced.clone() }
    }

    /// Has the agents of some nodes obey this daemon, unless they do. Returns those that do not: why, and what to do. What
    /// is ordered of them all the same is refused.
    pub async fn take(
        self: &Arc<Self>,
        fleet: &Fleet,
        nodes: impl IntoIterator<Item = &NodeName>,
    ) -> BTreeMap<NodeName, String> {
        let mut set = JoinSet::new();
        for node in nodes {
            if self.claimed().get(node).is_some_and(|known| known.elapsed() < BELIEVED) {
                continue;
            }
            let (charge, fleet, node) = (Arc::clone(self), fleet.clone(), node.clone());
            set.spawn(async move {
                let done = charge.take_one(&fleet, &node).await;
                (node, done)
            });
        }
        let mut refused = BTreeMap::new();
        while let Some(joined) = set.join_next().await {
            match joined {
                Ok((_, Ok(()))) => {}
                Ok((node, Err(why))) => drop(refused.insert(node, why)),
                // Its agent was not claimed, and refuses what is ordered.
                Err(error) => tracing::error!(%error, "claiming an agent ended by a defect"),
            }
        }
        refused
    }

    async fn take_one(&self, fleet: &Fleet, node: &NodeName) -> Result<(), String> {
        if self.claimed().contains_key(node) {
            // It is not claimed once more: that would take back what another daemon may have taken over meanwhile.
            let report = fleet.node(Some(node)).await.map_err(|error| error.to_string())?;
            self.note(node, report.authority.as_ref());
            if self.claimed().contains_key(node) {
                return Ok(());
            }
        }
        let done = match fleet.claim(node, &self.claim(false)).await {
            Err(error) if error.code() == Some(RefusalCode::ForeignJournal) => {
                self.take_over(fleet, node, error).await
            }
            other => other,
        };
        match done {
            Ok(_) => {}
            // It is of a former version, and obeys whoever proves to be an administrator.
            Err(error) if error.code() == Some(RefusalCode::NotFound) => {}
            Err(error) => return Err(error.to_string()),
        }
        self.claimed().insert(node.clone(), Instant::now());
        Ok(())
    }

    /// Claims an agent that obeys a journal which was replaced.
    async fn take_over(
        &self,
        fleet: &Fleet,
        node: &NodeName,
        refused: CallError,
    ) -> Result<Obeyed, CallError> {
        let obeys = fleet.node(Some(node)).await?.authority;
        if obeys.is_some_and(|obeyed| self.identity.replaced.contains(&obeyed.journal)) {
            return fleet.claim(node, &self.claim(true)).await;
        }
        Err(refused)
    }

    /// Notes whom an agent obeys, as it has just said. One that obeys nobody was started anew without what it kept, and is
    /// claimed again. One that obeyed this daemon and obeys another one was taken over.
    pub fn note(&self, node: &NodeName, obeyed: Option<&Obeyed>) {
        let mut claimed = self.claimed();
        let Some(obeyed) = obeyed else {
            claimed.remove(node);
            return;
        };
        let is_ours = obeyed.journal == self.identity.journal
            && (obeyed.session == 0 || obeyed.session == self.session);
        match claimed.get_mut(node) {
            Some(known) if is_ours => *known = Instant::now(),
            // What it said may be older than the claim.
            Some(known) if known.elapsed() < BELIEVED => {}
            Some(_) => {
                let mut displaced_by =
                    self.displaced_by.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                *displaced_by = Some(node.clone());
            }
            None => {}
        }
    }

    /// Notes that an agent did not obey. Which of two schedulers it is that should not be there, it says when it is asked.
    pub fn doubt(&self, node: &NodeName) {
        let mut doubters = self.doubters.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        doubters.insert(node.clone());
    }

    /// Looks whether somebody else has taken this daemon's place at an agent that obeyed it. Two must not command, nor order
    /// the workload manager about.
    pub async fn watch(self: Arc<Self>, fleet: Fleet) {
        loop {
            tokio::time::sleep(WATCHING).await;
            let doubters = {
                let mut doubters = self.doubters.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                std::mem::take(&mut *doubters)
            };
            for node in doubters {
                match fleet.node(Some(&node)).await {
                    Ok(report) => self.note(&node, report.authority.as_ref()),
                    Err(_) => self.doubt(&node),
                }
            }
            if let Some(node) = self.displaced() {
                tracing::error!(
                    %node,
                    "another scheduler has taken this one's place at an agent; this one ends. Do not start it again before \
                     the other one has been stopped"
                );
                std::process::exit(i32::from(ondeck_core::exit::DISPLACED));
            }
        }
    }

    /// An agent that obeyed this daemon, and obeys another one by now.
    fn displaced(&self) -> Option<NodeName> {
        self.displaced_by.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

/// Asks all nodes what they have and whom they obey.
pub(crate) async fn ask_all(
    fleet: &Fleet,
    nodes: impl IntoIterator<Item = &NodeName>,
) -> BTreeMap<NodeName, NodeAnswer> {
    let mut said = BTreeMap::new();
    let mut set = JoinSet::new();
    for node in nodes {
        said.insert(node.clone(), Err(format!("{node} has not answered within {} s", ASKING.as_secs())));
        let (fleet, node) = (fleet.clone(), node.clone());
        set.spawn(async move {
            let asked = async {
                let report = fleet.node(Some(&node)).await.map_err(|error| error.to_string())?;
                let ramdisks = fleet.ramdisks_of(&node).await.map_err(|error| error.to_string())?;
                Ok((report, ramdisks))
            };
            let answer: NodeAnswer = asked.await;
            (node, answer)
        });
    }
    let until = tokio::time::Instant::now() + ASKING;
    while let Ok(Some(joined)) = tokio::time::timeout_at(until, set.join_next()).await {
        match joined {
            Ok((node, answer)) => drop(said.insert(node, answer)),
            // Its node stands as one that has not answered.
            Err(error) => tracing::error!(%error, "asking a node ended by a defect"),
        }
    }
    said
}

/// Why a daemon can't command the agents.
#[derive(Clone, Debug, Default)]
pub struct Conflict {
    /// The agents that have seen a later state of this journal.
    later: Vec<NodeName>,
    /// The agents that obey other journals, and which.
    foreign: BTreeMap<NodeName, String>,
    /// The journals that were replaced, as the agents know.
    replaced: BTreeSet<String>,
    /// Whether an agent obeys this journal.
    ours: bool,
    /// Whether this journal was replaced by one of the others.
    superseded: bool,
    /// Nodes that have not answered.
    silent: Vec<NodeName>,
    /// RAM disks that may hold results, and on which nodes.
    guarded: BTreeMap<String, Vec<NodeName>>,
}

fn names(nodes: impl IntoIterator<Item = impl std::fmt::Display>) -> String {
    nodes.into_iter().map(|node| node.to_string()).collect::<Vec<_>>().join(", ")
}

impl Conflict {
    /// What the nodes have said that keeps this journal's daemon from commanding; nothing if all is well. Nodes of another
    /// scheduler beside nodes of this one are left to that one, unless somebody wants a take-over.
    pub(crate) fn of(
        identity: &JournalIdentity,
        said: &BTreeMap<NodeName, NodeAnswer>,
        is_wanted: bool,
    ) -> Option<Conflict> {
        let mut conflict = Conflict::default();
        let commits = identity.commits.load(Ordering::SeqCst);
        for (node, answer) in said {
            let Ok((report, ramdisks)) = answer else {
                conflict.silent.push(node.clone());
                continue;
            };
            for local in ramdisks.iter().filter(|local| local.guarded) {
                conflict.guarded.entry(local.layout.id.to_string()).or_default().push(node.clone());
            }
            conflict.replaced.extend(report.authority.iter().flat_map(|obeyed| &obeyed.replaced).cloned());
            match &report.authority {
                None => {}
                Some(obeyed) if obeyed.journal == identity.journal => {
                    conflict.ours = true;
                    if obeyed.counter > commits {
                        conflict.later.push(node.clone());
                    }
                }
                Some(obeyed) if identity.replaced.contains(&obeyed.journal) => {}
                Some(obeyed) => {
                    conflict.foreign.insert(node.clone(), obeyed.journal.clone());
                    conflict.superseded |= obeyed.replaced.contains(&identity.journal);
                }
            }
        }
        let is_lost = !conflict.foreign.is_empty() && (is_wanted || !conflict.is_beside());
        (!conflict.later.is_empty() || is_lost).then_some(conflict)
    }

    /// Whether nobody knows better than this journal: it is obeyed, in its latest state, and others are beside it.
    fn is_beside(&self) -> bool {
        self.ours && self.later.is_empty() && !self.superseded
    }

    /// What a take-over would mean, for whoever must confirm it.
    pub fn in_words(&self) -> String {
        let mut words = String::new();
        // Writing to a String does not fail.
        if !self.later.is_empty() {
            let _ = writeln!(words, "have seen a later state of this journal: {}", names(&self.later));
        }
        if !self.foreign.is_empty() {
            let _ = writeln!(words, "obey the scheduler of another journal: {}", names(self.foreign.keys()));
        }
        if !self.silent.is_empty() {
            let _ = writeln!(
                words,
                "do not answer, and will be claimed when they come back: {}",
                names(&self.silent)
            );
        }
        if self.guarded.is_empty() {
            let among = if self.silent.is_empty() { "" } else { " on those that answer" };
            let _ = writeln!(words, "no RAM disk that may hold results was found{among}");
        }
        for (ramdisk, nodes) in &self.guarded {
            let _ = writeln!(words, "may hold results: {ramdisk} on {}", names(nodes));
        }
        if !self.silent.is_empty() {
            let _ = writeln!(
                words,
                "not known, and kept if it may hold results: what {} has",
                names(&self.silent)
            );
        }
        words
    }
}

impl std::fmt::Display for Conflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.later.is_empty() {
            return write!(
                f,
                "the agents of {} obey the scheduler of another journal. If that scheduler runs, stop this one. If its journal \
                 is lost, `ondeck serve --take-over` takes its place: RAM disks with results are found, and kept",
                names(self.foreign.keys())
            );
        }
        write!(
            f,
            "this copy of the journal is older than what the agents of {} have seen. Put back the newest copy, or, if it is \
             lost, go on with this one by `ondeck serve --take-over`: RAM disks with results are found, and kept",
            names(&self.later)
        )
    }
}

/// Why nothing was taken over: no agent that answers obeys another journal, or has seen a later state of this one.
#[derive(Clone, Debug)]
pub struct NothingToTakeOver {
    /// Nodes that have not answered.
    silent: Vec<NodeName>,
}

impl NothingToTakeOver {
    pub(crate) fn of(said: &BTreeMap<NodeName, NodeAnswer>) -> NothingToTakeOver {
        let silent = said.iter().filter(|(_, answer)| answer.is_err()).map(|(node, _)| node.clone());
        NothingToTakeOver { silent: silent.collect() }
    }

    /// Whether all agents have answered, so that it is known.
    pub fn is_known(&self) -> bool {
        self.silent.is_empty()
    }
}

impl std::fmt::Display for NothingToTakeOver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_known() {
            return f.write_str(
                "there is nothing to take over: no agent obeys another scheduler, or has seen a later state of the journal. \
                 Start `ondeck serve` without --take-over",
            );
        }
        write!(
            f,
            "it can't be told whether there is anything to take over: the agents of {} do not answer. Start them, and try again. \
             If they are gone for good, start `ondeck serve` without --take-over",
            names(&self.silent)
        )
    }
}

/// Takes the place of other journals' daemons, or of a later state of this one. The jobs and nodes are changed to what still
/// counts.
///
/// # Errors
/// [`StoreError`]; then nothing has changed.
pub(crate) fn take_over(
    store: &mut Store,
    conflict: &Conflict,
    said: &BTreeMap<NodeName, NodeAnswer>,
    jobs: &mut Vec<Job>,
    nodes: &mut BTreeMap<NodeName, Node>,
) -> Result<(), StoreError> {
    let replaced = conflict.foreign.values().chain(&conflict.replaced).cloned().collect();
    if conflict.is_beside() {
        // What this journal says stands. It gets a new name, so that no other one has ever replaced it.
        return store.take_over(&replaced, None, &[], &[], &[]);
    }
    let answered = |node: &NodeName| said.get(node).is_some_and(Result::is_ok);
    let parts_of = |job: &Job| -> Vec<&LocalReport> {
        let id = job.ramdisk();
        let all = said.values().filter_map(|answer| answer.as_ref().ok()).flat_map(|(_, locals)| locals);
        all.filter(|local| Some(&local.layout.id) == id.as_ref()).collect()
    };
    let mut dropped: Vec<Job> = Vec::new();
    jobs.retain_mut(|job| {
        let Some(allocation) = &job.allocation else {
            // Nothing of it is anywhere; what it asks for is read anew.
            dropped.push(job.clone());
            return false;
        };
        let parts = parts_of(job);
        let is_described = parts.iter().any(|local| local.layout.job.is_some());
        let all_answered = allocation.nodes.iter().all(answered);
        if is_described || (parts.is_empty() && all_answered) {
            dropped.push(job.clone());
            return false;
        }
        // What was built by a former version does not say whose it is; and of what is on silent nodes nobody knows more.
        (job.job_state, job.rsa_state, job.under_way) = (JobState::Finished, RsaState::Held, None);
        (job.results, job.unsure, job.retry_now, job.not_before) = (true, true, false, None);
        job.message = format!(
            "staging out failed: the scheduler's journal was replaced by an older copy, and what its RAM disk holds is not \
             known; `ondeck job retry {0}` brings home what is there, `ondeck job abandon {0}` gives it up",
            JobSelector::from(job.id)
        );
        true
    });
    let known: BTreeSet<Incarnation> = jobs.iter().map(|job| job.id).collect();
    for node in nodes.values_mut() {
        node.promised.retain(|job, _| known.contains(job));
        // All that is there is found anew.
        (node.heard, node.given_up, node.up) = (false, false, false);
    }
    let rows: Vec<(NodeName, Node)> = nodes.iter().map(|(name, node)| (name.clone(), node.clone())).collect();
    store.take_over(&replaced, Some(now()), &dropped, jobs, &rows)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    fn said(obeys: &[(&str, Option<(&str, u64)>)]) -> BTreeMap<NodeName, NodeAnswer> {
        let answer = |node: &str, obeyed: Option<(&str, u64)>| -> (NodeReport, Vec<LocalReport>) {
            let authority = obeyed
                .map(|(journal, counter)| serde_json::json!({ "journal": journal, "counter": counter }));
            let report = serde_json::json!({
                "node": node, "version": "0", "storage_address": "10.0.0.1", "devices": {}, "missing": {}, "ramdisks": 0,
                "newest_epoch": 0, "memory": { "total": 0, "available": 0, "pressure": null }, "authority": authority,
            });
            (serde_json::from_value(report).unwrap(), Vec::new())
        };
        let all = obeys.iter().map(|(node, obeyed)| (node.parse().unwrap(), Ok(answer(node, *obeyed))));
        all.collect()
    }

    #[test]
    fn only_agents_that_know_better_keep_a_daemon_from_commanding() {
        let identity = JournalIdentity {
            journal: "mine".into(),
            began: ondeck_core::schedule::Time(0),
            replaced: ["former".to_owned()].into(),
            commits: Arc::new(AtomicU64::new(7)),
        };
        let judged = |obeys: &[(&str, Option<(&str, u64)>)]| {
            Conflict::of(&identity, &said(obeys), false).map(|conflict| conflict.to_string())
        };
        let mine = |counter| Some(("mine", counter));
        assert_eq!(judged(&[("r1", None), ("r2", mine(7)), ("r3", Some(("former", 90)))]), None);
        // One of its own is enough to leave strangers alone.
        assert_eq!(judged(&[("r1", mine(3)), ("r2", Some(("other", 1)))]), None);
        let older = judged(&[("r1", mine(8)), ("r2", mine(3))]).unwrap();
        assert!(older.contains("older than what the agents of r1 have"), "{older}");
        let lost = judged(&[("r1", Some(("other", 1))), ("r2", None)]).unwrap();
        assert!(lost.contains("r1 obey") && lost.contains("--take-over"), "{lost}");
        // Unless one of those has replaced it, or somebody wants to replace them.
        let mut successor = said(&[("r1", mine(3)), ("r2", Some(("other", 1)))]);
        let wanted = Conflict::of(&identity, &successor, true).unwrap();
        assert!(wanted.is_beside() && wanted.in_words().contains("another journal: r2"), "{wanted:?}");
        let Some(Ok((report, _))) = successor.get_mut(&"r2".parse().unwrap()) else { panic!("it answers") };
        report.authority.as_mut().unwrap().replaced = ["mine".to_owned(), "first".to_owned()].into();
        let conflict = Conflict::of(&identity, &successor, false).unwrap();
        assert!(!conflict.is_beside(), "{conflict:?}");
        assert_eq!(conflict.replaced, ["mine".to_owned(), "first".to_owned()].into());
    }

    #[test]
    fn that_there_is_nothing_to_take_over_is_said_only_if_all_agents_have_answered() {
        let mut all = said(&[("r1", None), ("r2", Some(("mine", 7)))]);
        let known = NothingToTakeOver::of(&all);
        assert!(known.is_known() && known.to_string().contains("nothing to take over"), "{known}");
        all.insert("r3".parse().unwrap(), Err("no route".into()));
        let unknown = NothingToTakeOver::of(&all);
        assert!(
            !unknown.is_known() && unknown.to_string().contains("agents of r3 do not answer"),
            "{unknown}"
        );
    }
}
