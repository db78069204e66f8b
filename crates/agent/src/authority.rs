//! Whom an agent obeys.
//!
//! Two schedulers that command the same RAM disks would destroy each other's: one that lost its journal knows of no
//! results, and one with an older copy of it takes what is new for what is over. So an agent obeys the scheduler of one
//! journal, in its latest state, and in its latest start. The scheduler claims the agent, and every order carries the
//! [`Authority`] that was claimed. Only a take-over, which a person has confirmed, replaces another scheduler.
//!
//! Which journals were replaced is kept and told: whoever takes over from a scheduler, and has none of what it knew, can so
//! claim the agents that have missed it.
//!
//! What is obeyed is on disk before the answer is sent: an agent that is started anew obeys the same. A file that can't be
//! read never means that nobody is obeyed.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use ondeck_api::wire::{Authority, Claim, Obeyed, Refusal, RefusalCode};
use ondeck_core::{Layout, NodeName};
use serde::{Deserialize, Serialize};

/// The file in the agent's directory.
const FILE: &str = "authority.json";

/// The version of [`ObeyedJournal`].
const FORMAT: u32 = 1;

/// The longest name of a journal. It stands in a file and in messages.
const LONGEST_NAME: usize = 128;

/// What is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ObeyedJournal {
    format: u32,
    journal: String,
    session: u64,
    counter: u64,
    /// The journals that this one has replaced.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    replaced: BTreeSet<String>,
}

impl ObeyedJournal {
    fn told(&self) -> Obeyed {
        Obeyed {
            journal: self.journal.clone(),
            counter: self.counter,
            session: self.session,
            replaced: self.replaced.clone(),
        }
    }
}

/// Whom the agent of this node obeys.
pub struct Commander {
    directory: PathBuf,
    kept: Mutex<Option<ObeyedJournal>>,
}

/// What a person may do about the RAM disk of a job, beside the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderKind {
    /// Destroy it, or give its results up. The guard of its results decides.
    End,
    /// Anything else: of the RAM disk of a job, only the scheduler in charge may order it.
    Other,
}

impl Commander {
    /// As an earlier agent has kept it.
    ///
    /// # Errors
    /// If there is something that can't be read or understood.
    pub fn load(directory: &Path) -> std::io::Result<Commander> {
        let kept = match std::fs::read(directory.join(FILE)) {
            Ok(text) => {
                let kept: ObeyedJournal = serde_json::from_slice(&text)?;
                if kept.format != FORMAT {
                    return Err(std::io::Error::other(format!(
                        "its format is {}, not {FORMAT}",
                        kept.format
                    )));
                }
                Some(kept)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(Commander { directory: directory.to_owned(), kept: Mutex::new(kept) })
    }

    /// The file that [`Commander::load`] reads.
    pub fn file(directory: &Path) -> PathBuf {
        directory.join(FILE)
    }

    fn kept(&self) -> MutexGuard<'_, Option<ObeyedJournal>> {
        // What it protects is whole after every statement.
        self.kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whose scheduler is obeyed; nothing if none has claimed this agent.
    pub fn obeyed(&self) -> Option<Obeyed> {
        self.kept().as_ref().map(ObeyedJournal::told)
    }

    fn keep(&self, kept: &ObeyedJournal) -> Result<(), Refusal> {
        let path = self.directory.join(FILE);
        let partial = self.directory.join(format!("{FILE}.partial"));
        let write = || -> std::io::Result<()> {
            let mut options = std::fs::OpenOptions::new();
            let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
            file.write_all(&serde_json::to_vec(kept)?)?;
            file.sync_all()?;
            std::fs::rename(&partial, &path)?;
            std::fs::File::open(&self.directory)?.sync_all()
        };
        write().map_err(|error| {
            let message = format!("can't keep whom this agent obeys in {}: {error}", path.display());
            Refusal::new(RefusalCode::Failed, message)
        })
    }

    /// A scheduler asks to be obeyed.
    ///
    /// # Errors
    /// [`RefusalCode::ForeignJournal`], [`RefusalCode::OlderJournal`]; [`RefusalCode::Failed`] if it can't be kept.
    pub fn claim(&self, node: &NodeName, claim: &Claim) -> Result<Obeyed, Refusal> {
        let plain = |name: &String| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(plain)
        };
        if !std::iter::once(&claim.journal).chain(&claim.replaced).all(plain) {
            let message =
                format!("the name of a journal has 1 to {LONGEST_NAME} letters, digits and hyphens");
            return Err(Refusal::new(RefusalCode::Malformed, message));
        }
        let mut now = self.kept();
        let mut counter = claim.counter;
        if let Some(kept) = now.as_ref().filter(|_| !claim.take_over) {
            if kept.journal != claim.journal && kept.replaced.contains(&claim.journal) {
                let message = format!(
                    "the agent of {node} obeys the scheduler of another journal ({0}), which has taken over from this one \
                     ({1}): go on with that one; if it is lost, `ondeck serve --take-over` replaces it",
                    kept.journal, claim.journal
                );
                return Err(Refusal::new(RefusalCode::ForeignJournal, message));
            }
            if kept.journal != claim.journal {
                let message = format!(
                    "the agent of {node} obeys the scheduler of another journal ({}, not {}): if that journal is lost, \
                     `ondeck serve --take-over` replaces it",
                    kept.journal, claim.journal
                );
                return Err(Refusal::new(RefusalCode::ForeignJournal, message));
            }
            if kept.session == claim.session {
                // An order may have overtaken the claim.
                counter = counter.max(kept.counter);
            } else if kept.counter > claim.counter {
                let message = format!(
                    "the agent of {node} has seen journal {} after {} commits, and this copy of it has {}: start the \
                     scheduler with the newest copy; if that is lost, `ondeck serve --take-over` goes on with this one",
                    kept.journal, kept.counter, claim.counter
                );
                return Err(Refusal::new(RefusalCode::OlderJournal, message));
            }
        }
        let mut replaced = claim.replaced.clone();
        if let Some(kept) = now.as_ref() {
            // What was replaced stays replaced, also if a scheduler of a former version does not say it.
            replaced.extend(kept.replaced.iter().cloned());
            replaced.insert(kept.journal.clone());
        }
        replaced.remove(&claim.journal);
        let (journal, session) = (claim.journal.clone(), claim.session);
        let next = ObeyedJournal { format: FORMAT, journal, session, counter, replaced };
        if now.as_ref() != Some(&next) {
            self.keep(&next)?;
            let before = now.as_ref().map(|kept| kept.journal.as_str());
            if before != Some(&next.journal) || claim.take_over {
                let take_over = claim.take_over;
                tracing::warn!(
                    journal = next.journal,
                    counter,
                    take_over,
                    before,
                    "obeys this scheduler now"
                );
            } else {
                tracing::info!(journal = next.journal, counter, "its scheduler was started again");
            }
        }
        let told = next.told();
        *now = Some(next);
        Ok(told)
    }

    /// Refuses an order that is not of the scheduler in charge. An order without authority is a person's: it may be about
    /// any RAM disk that is no job's. `layout` is that of the RAM disk, as far as it is known.
    ///
    /// # Errors
    /// [`RefusalCode::NotInCharge`]; [`RefusalCode::Failed`] if the journal's counter can't be kept.
    pub fn permit(
        &self,
        node: &NodeName,
        authority: Option<&Authority>,
        order: OrderKind,
        layouts: &[&Layout],
    ) -> Result<(), Refusal> {
        let not_in_charge = |message: String| Err(Refusal::new(RefusalCode::NotInCharge, message));
        let mut now = self.kept();
        let Some(authority) = authority else {
            let Some(kept) = now.as_ref().filter(|_| order == OrderKind::Other) else { return Ok(()) };
            let version = env!("CARGO_PKG_VERSION");
            let in_charge = format!(
                "the agent of {node} obeys the scheduler of journal {}, and the order names none: a scheduler needs the \
                 version of this agent ({version})",
                kept.journal
            );
            if let Some((layout, tag)) =
                layouts.iter().find_map(|layout| Some((layout, layout.job.as_ref()?)))
            {
                return not_in_charge(format!(
                    "{} is the RAM disk of job {}; {in_charge}, and a person may only destroy it",
                    layout.id, tag.job
                ));
            }
            // Whoever knows of schedulers in charge gives every RAM disk a number.
            return match layouts.iter().find(|layout| layout.number == 0) {
                Some(layout) => not_in_charge(format!("{}: {in_charge}", layout.id)),
                None => Ok(()),
            };
        };
        let Some(kept) = now.as_ref() else {
            return not_in_charge(format!(
                "the agent of {node} obeys no scheduler yet, or has lost what it kept; the scheduler must claim it first"
            ));
        };
        if kept.journal != authority.journal {
            let (own, other) = (&authority.journal, &kept.journal);
            return not_in_charge(if kept.replaced.contains(own) {
                format!(
                    "the scheduler of journal {other} has taken over the agent of {node} from the one of journal {own}"
                )
            } else {
                format!(
                    "the agent of {node} obeys the scheduler of journal {other}, not the one of journal {own}: if journal \
                     {other} is lost, `ondeck serve --take-over` replaces it"
                )
            });
        }
        if kept.session != authority.session {
            return not_in_charge(format!(
                "another scheduler with journal {} has been started since, and has taken over the agent of {node}",
                kept.journal
            ));
        }
        if authority.counter > kept.counter {
            let next = ObeyedJournal { counter: authority.counter, ..kept.clone() };
            self.keep(&next)?;
            *now = Some(next);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn claim(journal: &str, session: u64, counter: u64) -> Claim {
        Claim { journal: journal.into(), session, counter, take_over: false, replaced: BTreeSet::new() }
    }

    fn order(journal: &str, session: u64, counter: u64) -> Authority {
        Authority { journal: journal.into(), session, counter }
    }

    #[test]
    fn one_journal_is_obeyed_in_its_latest_state_and_start() {
        let directory = tempfile::tempdir().unwrap();
        let node: NodeName = "n1".parse().unwrap();
        let load = || Commander::load(directory.path()).unwrap();
        let commander = load();
        let obeys = |commander: &Commander, authority: &Authority| {
            commander.permit(&node, Some(authority), OrderKind::Other, &[]).map_err(|refusal| refusal.code)
        };
        assert_eq!(commander.obeyed(), None);
        assert_eq!(obeys(&commander, &order("a", 1, 1)), Err(RefusalCode::NotInCharge));
        commander.claim(&node, &claim("a", 1, 5)).unwrap();
        for _ in 0..2 {
            let commander = load();
            assert_eq!(obeys(&commander, &order("a", 1, 7)), Ok(()));
            // Orders overtake each other.
            assert_eq!(obeys(&commander, &order("a", 1, 6)), Ok(()));
            assert_eq!(obeys(&commander, &order("a", 2, 9)), Err(RefusalCode::NotInCharge));
            assert_eq!(obeys(&commander, &order("b", 1, 9)), Err(RefusalCode::NotInCharge));
        }
        let known = Obeyed { journal: "a".into(), counter: 7, session: 1, replaced: BTreeSet::new() };
        assert_eq!(load().obeyed(), Some(known));
        let commander = load();
        let refused = |claim: &Claim| commander.claim(&node, claim).unwrap_err().code;
        assert_eq!(refused(&claim("b", 3, 100)), RefusalCode::ForeignJournal);
        assert_eq!(refused(&claim("a", 3, 6)), RefusalCode::OlderJournal);
        assert_eq!(refused(&claim("", 3, 6)), RefusalCode::Malformed);
        // The same claim again, which an order has overtaken.
        assert_eq!(commander.claim(&node, &claim("a", 1, 5)).unwrap().counter, 7);
        commander.claim(&node, &claim("a", 3, 7)).unwrap();
        assert_eq!(obeys(&commander, &order("a", 1, 8)), Err(RefusalCode::NotInCharge));
        assert_eq!(obeys(&commander, &order("a", 3, 8)), Ok(()));
        let older = Claim { take_over: true, ..claim("a", 4, 2) };
        assert_eq!(commander.claim(&node, &older).unwrap().counter, 2);
        commander.claim(&node, &Claim { take_over: true, ..claim("b", 5, 1) }).unwrap();
        assert_eq!(obeys(&load(), &order("a", 4, 8)), Err(RefusalCode::NotInCharge));
        assert_eq!(obeys(&load(), &order("b", 5, 1)), Ok(()));
    }

    #[test]
    fn what_was_replaced_is_kept_and_who_has_taken_over_from_whom_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let node: NodeName = "n1".parse().unwrap();
        let load = || Commander::load(directory.path()).unwrap();
        let take_over = |journal: &str, replaced: &[&str]| Claim {
            take_over: true,
            replaced: replaced.iter().map(ToString::to_string).collect(),
            ..claim(journal, 1, 1)
        };
        let said = |journal: &str| {
            let order = order(journal, 1, 1);
            load().permit(&node, Some(&order), OrderKind::Other, &[]).unwrap_err().message
        };
        load().claim(&node, &claim("b", 1, 1)).unwrap();
        // Nobody has taken over: it obeys another one, and was not there.
        assert!(
            said("c").contains("of journal b, not the one of journal c") && said("c").contains("--take-over")
        );
        load().claim(&node, &take_over("c", &["a"])).unwrap();
        let replaced = || load().obeyed().unwrap().replaced.into_iter().collect::<Vec<_>>();
        assert_eq!(replaced(), ["a", "b"]);
        assert!(said("b").contains("journal c has taken over the agent of n1 from the one of journal b"));
        // A scheduler of a former version does not say what it has replaced.
        load().claim(&node, &claim("c", 2, 2)).unwrap();
        assert_eq!(replaced(), ["a", "b"]);
        let refused = load().claim(&node, &claim("a", 3, 90)).unwrap_err();
        assert_eq!(refused.code, RefusalCode::ForeignJournal);
        assert!(refused.message.contains("has taken over from this one (a)"), "{}", refused.message);
        let malformed = load().claim(&node, &take_over("d", &["no/name"])).unwrap_err();
        assert_eq!(malformed.code, RefusalCode::Malformed);
    }

    #[test]
    fn what_can_not_be_read_is_not_nobody() {
        let directory = tempfile::tempdir().unwrap();
        for text in ["", "{}", r#"{"format":2,"journal":"a","session":1,"counter":1}"#] {
            std::fs::write(Commander::file(directory.path()), text).unwrap();
            assert!(Commander::load(directory.path()).is_err(), "{text}");
        }
        std::fs::remove_file(Commander::file(directory.path())).unwrap();
        std::fs::create_dir(Commander::file(directory.path())).unwrap();
        assert!(Commander::load(directory.path()).is_err());
    }
}
