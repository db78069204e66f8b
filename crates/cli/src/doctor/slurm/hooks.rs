//! What the hooks of compute nodes are, as they have noted themselves when Slurm ran them: a node whose hook runs another
//! program, or reads another configuration, may have its jobs work on disk while everything else is right.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use ondeck_api::Config;
use ondeck_api::wire::{HookKind, HookNote, HookScheduler, HookSeen, HookSlurm};
use ondeck_core::NodeName;

use super::super::{Finding, State, finding};
use super::{list, one_line};

/// What a node's agent tells of its hooks.
pub type NodeHooks<'a> = (&'a NodeName, &'a BTreeMap<HookKind, HookSeen>);

/// Notes change when hooks run, and not before.
const SEEN_LATER: &str = "seen here when the next job there has started and ended";

/// What is right on this machine.
pub struct ThisMachine {
    /// This program, which is preferred where as many nodes have one as another.
    pub program: PathBuf,
    /// The configuration; the same.
    pub config: PathBuf,
    /// The version that all should have.
    pub version: &'static str,
    /// Where hooks should look for the scheduler; nothing if that is not known here.
    pub scheduler: Option<HookScheduler>,
    /// `ProctrackType` of Slurm's controller; empty if that is not known.
    pub proctrack_type: String,
    /// `JobContainerType`; the same.
    pub job_container_type: String,
    /// `Prolog`, several with commas between; empty if none is set.
    pub prolog: String,
    /// `Epilog`; the same.
    pub epilog: String,
}

impl ThisMachine {
    /// `settings` are those of Slurm's controller, by their names in small letters.
    pub fn new(config: &Config, path: PathBuf, settings: &BTreeMap<String, String>) -> ThisMachine {
        let set = |name: &str| settings.get(name).cloned().unwrap_or_default();
        let site = &config.scheduler;
        ThisMachine {
            // It only breaks a tie.
            program: std::env::current_exe().unwrap_or_default(),
            config: std::path::absolute(&path).unwrap_or(path),
            version: env!("CARGO_PKG_VERSION"),
            scheduler: site.host.clone().map(|host| HookScheduler { host: Some(host), port: site.port }),
            proctrack_type: set("proctracktype"),
            job_container_type: set("jobcontainertype"),
            prolog: set("prolog"),
            epilog: set("epilog"),
        }
    }
}

/// A hook of a node that is not as it should be.
struct Other<'a> {
    node: &'a NodeName,
    kind: HookKind,
    note: &'a HookNote,
    /// What it has.
    has: String,
}

/// Compares the hooks of nodes whose agents tell of them.
pub fn compare(here: &ThisMachine, nodes: &[NodeHooks]) -> Vec<Finding> {
    let notes: Vec<(&NodeName, HookKind, &HookNote)> = nodes
        .iter()
        .flat_map(|(node, hooks)| {
            hooks.iter().filter_map(move |(kind, seen)| match seen {
                HookSeen::Noted(note) => Some((*node, *kind, &**note)),
                HookSeen::Unreadable(_) => None,
            })
        })
        .collect();
    let mut findings: Vec<Finding> = unreadable(nodes).into_iter().collect();
    let has = |told: &dyn Fn(&HookNote) -> Option<String>, most: &str| -> Vec<Other> {
        let others = notes.iter().filter_map(|(node, kind, note)| {
            let has = told(note)?;
            (has != most).then_some(Other { node, kind: *kind, note, has })
        });
        others.collect()
    };

    let program = |note: &HookNote| note.program.display().to_string();
    let most = usual(notes.iter().map(|(_, _, note)| program(note)), &here.program.display().to_string());
    let others = has(&|note| Some(program(note)), &most);
    let remedy = format!(
        "have the hooks there run {most}: ONDECK in ondeck.env beside their scripts, or what these call; {SEEN_LATER}"
    );
    findings.extend(told("hooks' program", State::Limited, &others, &most, &remedy));

    let config = |note: &HookNote| note.config.display().to_string();
    let most = usual(notes.iter().map(|(_, _, note)| config(note)), &here.config.display().to_string());
    let others = has(&|note| Some(config(note)), &most);
    let remedy = format!(
        "have the hooks there read {most}: ONDECK_CONFIG in ondeck.env beside their scripts, or --config; {SEEN_LATER}"
    );
    findings.extend(told("hooks' configuration", State::Limited, &others, &most, &remedy));

    let others = has(&|note| Some(note.version.clone()), here.version);
    let remedy = format!("install the same on all nodes, where their hooks find it; {SEEN_LATER}");
    findings.extend(told("hooks' version", State::Limited, &others, here.version, &remedy));

    findings.extend(broken(&notes));
    if let Some(scheduler) = &here.scheduler {
        let most = place(scheduler);
        let others = has(&|note| note.scheduler.as_ref().ok().map(place), &most);
        let read = others.first().map(|other| other.note.config.display().to_string()).unwrap_or_default();
        let remedy = format!(
            "they ask elsewhere, and jobs there work on disk: mend the configuration that they read, like {read}; {SEEN_LATER}"
        );
        findings.extend(told("hooks' scheduler", State::Missing, &others, &most, &remedy));
    }
    findings.extend(tracking(here, &notes));
    findings.extend(other_hooks(here, &notes));
    findings.extend(without_prolog(nodes));
    if findings.is_empty() {
        findings.extend(alike(nodes, &notes));
    }
    findings.extend(silent(nodes));
    findings
}

/// Nodes whose slurm.conf tracks or contains the processes of jobs in another way than the controller's, or can't be read.
fn tracking(here: &ThisMachine, notes: &[(&NodeName, HookKind, &HookNote)]) -> Vec<Finding> {
    const REMEDY: &str = "give all nodes the same slurm.conf, and start slurmd there again: output of jobs that run already may \
                          not be covered there";
    let compare = |what, most: &str, of: &dyn Fn(&HookSlurm) -> Option<String>| {
        let others = notes.iter().filter_map(|(node, kind, note)| {
            let has = of(note.slurm.as_ref()?.as_ref().ok()?)?;
            (!most.is_empty() && has != most).then_some(Other { node, kind: *kind, note, has })
        });
        told(what, State::Limited, &others.collect::<Vec<_>>(), most, &format!("{REMEDY}; {SEEN_LATER}"))
    };
    // Which one is Slurm's own depends on its version.
    let proctrack =
        compare("nodes' ProctrackType", &here.proctrack_type, &|slurm| slurm.proctrack_type.clone());
    let container = |value: &str| match value {
        "" | "(null)" | "job_container/none" => "none".to_owned(),
        other => other.to_owned(),
    };
    let most =
        if here.proctrack_type.is_empty() { String::new() } else { container(&here.job_container_type) };
    let contained = compare("nodes' JobContainerType", &most, &|slurm| {
        Some(container(slurm.job_container_type.as_deref().unwrap_or_default()))
    });
    let unread = notes
        .iter()
        .filter_map(|(node, kind, note)| Some((*node, *kind, note.slurm.as_ref()?.as_ref().err()?)))
        .next()
        .map(|(node, kind, why)| {
            let detail = format!("the {} of {node} can't read it: {why}", kind.setting());
            let remedy = format!("see that root can read it there; {SEEN_LATER}");
            finding("nodes' slurm.conf", State::Limited, one_line(&detail), Some(&remedy))
        });
    proctrack.into_iter().chain(contained).chain(unread).collect()
}

/// Nodes whose slurm.conf has another Prolog or Epilog than the controller's: what runs there may not call `ondeck`.
fn other_hooks(here: &ThisMachine, notes: &[(&NodeName, HookKind, &HookNote)]) -> Vec<Finding> {
    // Nothing is known of the controller.
    if here.proctrack_type.is_empty() {
        return Vec::new();
    }
    let compare = |what, most: &str, of: &dyn Fn(&HookSlurm) -> Option<&Vec<String>>| {
        let most = if most.is_empty() { "none" } else { most };
        let others = notes.iter().filter_map(|(node, kind, note)| {
            let set = of(note.slurm.as_ref()?.as_ref().ok()?)?;
            let all = if set.is_empty() { "none".to_owned() } else { set.join(",") };
            // Former versions of Slurm take the last only.
            let same = all == most || set.last().is_some_and(|last| last == most);
            (!same).then_some(Other { node, kind: *kind, note, has: all })
        });
        let remedy = format!(
            "give all nodes the same slurm.conf, and start slurmd there again: jobs work on disk where Slurm runs a hook that \
             does not call `ondeck`; {SEEN_LATER}"
        );
        told(what, State::Limited, &others.collect::<Vec<_>>(), most, &remedy)
    };
    let prolog = compare("nodes' Prolog", &here.prolog, &|slurm| slurm.prolog.as_ref());
    let epilog = compare("nodes' Epilog", &here.epilog, &|slurm| slurm.epilog.as_ref());
    prolog.into_iter().chain(epilog).collect()
}

/// What most have; of two that as many have, what is here.
fn usual(all: impl Iterator<Item = String>, here: &str) -> String {
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for one in all {
        *count.entry(one).or_default() += 1;
    }
    let most = count.into_iter().max_by_key(|(what, count)| (*count, what == here));
    most.map(|(what, _)| what).unwrap_or_default()
}

fn place(scheduler: &HookScheduler) -> String {
    match &scheduler.host {
        Some(host) => format!("{host} port {}", scheduler.port),
        None => "none, which is the node itself".to_owned(),
    }
}

/// Who has another, and one of them as an example.
fn told(what: &'static str, state: State, others: &[Other], most: &str, remedy: &str) -> Option<Finding> {
    let first = others.first()?;
    let nodes: BTreeSet<&NodeName> = others.iter().map(|other| other.node).collect();
    let nodes: Vec<&NodeName> = nodes.into_iter().collect();
    let script = match &first.note.script {
        Some(script) => format!(", called by {}", script.display()),
        None => String::new(),
    };
    let detail = format!(
        "{} have another than {most}: {}, like {} ({} of {}{script})",
        nodes.len(),
        list(&nodes),
        first.has,
        first.kind.setting(),
        first.node
    );
    Some(finding(what, state, one_line(&detail), Some(remedy)))
}

fn unreadable(nodes: &[NodeHooks]) -> Option<Finding> {
    let unread: Vec<(&NodeName, &String)> = nodes
        .iter()
        .flat_map(|(node, hooks)| {
            hooks.values().filter_map(move |seen| match seen {
                HookSeen::Unreadable(why) => Some((*node, why)),
                HookSeen::Noted(_) => None,
            })
        })
        .collect();
    let (_, why) = unread.first()?;
    let nodes: BTreeSet<&NodeName> = unread.iter().map(|(node, _)| *node).collect();
    let nodes: Vec<&NodeName> = nodes.into_iter().collect();
    let detail = format!("what they are is not known of {}: {why}", list(&nodes));
    let remedy = "remove the file there: the hook of the next job writes it again";
    Some(finding("nodes' hooks", State::Missing, one_line(&detail), Some(remedy)))
}

/// Hooks that can't read their configuration.
fn broken(notes: &[(&NodeName, HookKind, &HookNote)]) -> Option<Finding> {
    let broken: Vec<_> = notes
        .iter()
        .filter_map(|(node, kind, note)| Some((*node, *kind, note.scheduler.as_ref().err()?)))
        .collect();
    let (node, kind, why) = broken.first()?;
    let nodes: BTreeSet<&NodeName> = broken.iter().map(|(node, ..)| *node).collect();
    let nodes: Vec<&NodeName> = nodes.into_iter().collect();
    let detail = format!(
        "{} can't read their configuration: {}, like the {} of {node}: {why}",
        nodes.len(),
        list(&nodes),
        kind.setting()
    );
    let remedy = format!("put it there, or mend it: until then jobs there work on disk; {SEEN_LATER}");
    Some(finding("nodes' hooks", State::Missing, one_line(&detail), Some(&remedy)))
}

/// An Epilog follows a Prolog, unless the node or this version was started while the job ran.
fn without_prolog(nodes: &[NodeHooks]) -> Option<Finding> {
    let without = nodes
        .iter()
        .filter(|(_, hooks)| hooks.contains_key(&HookKind::Epilog) && !hooks.contains_key(&HookKind::Prolog));
    let without: Vec<&NodeName> = without.map(|(node, _)| *node).collect();
    if without.is_empty() {
        return None;
    }
    let detail = format!(
        "{} have run `ondeck epilog` since they started, and not `ondeck prolog`: {}",
        without.len(),
        list(&without)
    );
    let remedy = "if the next job there changes nothing, see that Slurm's Prolog is there and calls `ondeck prolog`, as its \
                  Epilog does: without it jobs there work on disk";
    Some(finding("nodes' hooks", State::Limited, detail, Some(remedy)))
}

fn alike(nodes: &[NodeHooks], notes: &[(&NodeName, HookKind, &HookNote)]) -> Option<Finding> {
    let (_, _, note) = notes.first()?;
    let seen = nodes.iter().filter(|(_, hooks)| !hooks.is_empty()).count();
    let detail = format!(
        "{} with {} on {seen} of {} nodes",
        note.program.display(),
        note.config.display(),
        nodes.len()
    );
    Some(finding("nodes' hooks", State::Ok, detail, None))
}

/// Nodes of which nothing is known: that may be as it should, and nothing here says that it is.
fn silent(nodes: &[NodeHooks]) -> Option<Finding> {
    let silent = nodes.iter().filter(|(_, hooks)| hooks.is_empty());
    let silent: Vec<&NodeName> = silent.map(|(node, _)| *node).collect();
    if silent.is_empty() {
        return None;
    }
    let detail = format!(
        "none has noted itself since the node started on {} of {}: no job yet, or no hook that runs: {}",
        silent.len(),
        nodes.len(),
        list(&silent)
    );
    Some(finding("unseen hooks", State::Ok, detail, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> ThisMachine {
        ThisMachine {
            program: "/bin/ondeck".into(),
            config: "/etc/ondeck.toml".into(),
            version: "1.0",
            scheduler: Some(at("ctl")),
            proctrack_type: "proctrack/cgroup".into(),
            job_container_type: "(null)".into(),
            prolog: "/etc/slurm/prolog".into(),
            epilog: "/etc/slurm/epilog".into(),
        }
    }

    fn at(host: &str) -> HookScheduler {
        HookScheduler { host: Some(host.parse().unwrap()), port: 7273 }
    }

    fn good() -> HookNote {
        HookNote {
            version: "1.0".into(),
            program: "/bin/ondeck".into(),
            config: "/etc/ondeck.toml".into(),
            script: None,
            scheduler: Ok(at("ctl")),
            slurm: Some(Ok(slurm(Some("proctrack/cgroup"), None))),
        }
    }

    fn slurm(proctrack: Option<&str>, container: Option<&str>) -> HookSlurm {
        let [proctrack_type, job_container_type] =
            [proctrack, container].map(|value| value.map(str::to_owned));
        HookSlurm {
            conf: "/etc/slurm/slurm.conf".into(),
            proctrack_type,
            job_container_type,
            prolog: Some(vec!["/etc/slurm/prolog".into()]),
            epilog: Some(vec!["/etc/slurm/epilog".into()]),
        }
    }

    /// The findings as they are printed: what, state, detail and remedy.
    fn said(hooks: &[&[(HookKind, HookNote)]]) -> Vec<(State, String)> {
        let seen = |notes: &[(HookKind, HookNote)]| {
            notes.iter().map(|(kind, note)| (*kind, HookSeen::Noted(Box::new(note.clone())))).collect()
        };
        of(&hooks.iter().map(|notes| seen(notes)).collect::<Vec<_>>())
    }

    fn of(hooks: &[BTreeMap<HookKind, HookSeen>]) -> Vec<(State, String)> {
        let names: Vec<NodeName> = (1..=hooks.len()).map(|n| format!("c{n}").parse().unwrap()).collect();
        let nodes: Vec<NodeHooks> = names.iter().zip(hooks).collect();
        let line = |found: Finding| {
            let remedy = found.remedy.map(|remedy| format!(" -> {remedy}")).unwrap_or_default();
            (found.state, format!("{}: {}{remedy}", found.what, found.detail))
        };
        compare(&here(), &nodes).into_iter().map(line).collect()
    }

    const P: HookKind = HookKind::Prolog;
    const E: HookKind = HookKind::Epilog;

    #[test]
    fn nodes_that_agree_are_no_complaint_and_neither_are_nodes_without_a_job() {
        assert!(said(&[]).is_empty());
        let none = said(&[&[], &[]]);
        let [(State::Ok, text)] = &none[..] else { panic!("{}", none[0].1) };
        assert_eq!(
            text,
            "unseen hooks: none has noted itself since the node started on 2 of 2: no job yet, or no hook that runs: c1, c2"
        );
        let some = said(&[&[(P, good()), (E, good())], &[], &[(P, good())]]);
        let [(State::Ok, alike), (State::Ok, silent)] = &some[..] else { panic!("{}", some[0].1) };
        assert_eq!(alike, "nodes' hooks: /bin/ondeck with /etc/ondeck.toml on 2 of 3 nodes");
        assert!(silent.contains("on 1 of 3: no job yet, or no hook that runs: c2"), "{silent}");
    }

    #[test]
    fn the_node_that_is_unlike_most_is_named_with_what_it_has_and_the_script_that_calls_it() {
        let other = HookNote {
            program: "/opt/ondeck".into(),
            config: "/opt/ondeck.toml".into(),
            script: Some("/etc/slurm/prolog".into()),
            ..good()
        };
        // Most, also where this machine has what the fewer have; and this machine's where as many have one as another.
        let alike = [(P, good())];
        let unlike = [(P, other.clone())];
        for nodes in [[&alike[..], &unlike].to_vec(), [&alike[..], &unlike, &alike].to_vec()] {
            let found = said(&nodes);
            assert_eq!(found.len(), 2);
            assert!(found.iter().all(|(state, _)| *state == State::Limited));
            assert!(found[0].1.starts_with(
                "hooks' program: 1 have another than /bin/ondeck: c2, like /opt/ondeck (Prolog of c2, called by \
                 /etc/slurm/prolog) -> have the hooks there run /bin/ondeck: ONDECK in ondeck.env"
            ));
            assert!(found[1].1.starts_with(
                "hooks' configuration: 1 have another than /etc/ondeck.toml: c2, like /opt/ondeck.toml"
            ));
            assert!(found[1].1.contains("ONDECK_CONFIG in ondeck.env"));
        }
        let found = said(&[&unlike, &unlike, &alike]);
        assert!(
            found[0].1.contains("1 have another than /opt/ondeck: c3, like /bin/ondeck (Prolog of c3)"),
            "{}",
            found[0].1
        );
        // One hook of a node may be unlike the other one.
        let found = said(&[&[(P, good()), (E, other)]]);
        assert!(found[0].1.contains("c1, like /opt/ondeck (Epilog of c1"), "{}", found[0].1);
    }

    #[test]
    fn another_version_another_scheduler_and_a_broken_configuration_each_have_their_own_complaint() {
        let old = HookNote { version: "0.9".into(), ..good() };
        let found = said(&[&[(P, old.clone())], &[(P, old)]]);
        assert_eq!(found.len(), 1);
        assert!(found[0].1.starts_with("hooks' version: 2 have another than 1.0: c1, c2, like 0.9"));
        let elsewhere = HookNote { scheduler: Ok(at("c9")), ..good() };
        let found = said(&[&[(P, good())], &[(P, elsewhere)]]);
        assert!(found.len() == 1 && found[0].0 == State::Missing);
        assert!(found[0].1.contains("another than ctl port 7273: c2, like c9 port 7273"), "{}", found[0].1);
        assert!(found[0].1.contains("that they read, like /etc/ondeck.toml; seen here"), "{}", found[0].1);
        let itself = HookNote { scheduler: Ok(HookScheduler { host: None, port: 7273 }), ..good() };
        assert!(said(&[&[(P, itself)]])[0].1.contains("like none, which is the node itself"));
        let broken = HookNote { scheduler: Err("line 3:\n what?".into()), ..good() };
        let found = said(&[&[(P, good())], &[(P, broken)]]);
        assert!(found.len() == 1 && found[0].0 == State::Missing);
        assert!(
            found[0].1.contains("can't read their configuration: c2, like the Prolog of c2: line 3: what?")
        );
    }

    #[test]
    fn a_node_whose_slurm_conf_tracks_or_contains_processes_in_another_way_is_named() {
        let with = |slurm| HookNote { slurm: Some(Ok(slurm)), ..good() };
        // Whatever Slurm's own is, it is not known to be another.
        let same = with(slurm(None, Some("job_container/none")));
        let former = HookNote { slurm: None, ..good() };
        assert_eq!(said(&[&[(P, good())], &[(P, same)], &[(P, former)]]).len(), 1);
        let other = with(slurm(Some("proctrack/linuxproc"), Some("job_container/tmpfs")));
        let found = said(&[&[(P, good())], &[(P, other)]]);
        assert_eq!(found.len(), 2);
        let begins =
            "nodes' ProctrackType: 1 have another than proctrack/cgroup: c2, like proctrack/linuxproc";
        assert!(found[0].1.starts_with(begins), "{}", found[0].1);
        let begins = "nodes' JobContainerType: 1 have another than none: c2, like job_container/tmpfs";
        assert!(found[1].1.starts_with(begins), "{}", found[1].1);
        let unread = HookNote { slurm: Some(Err("/etc/slurm/slurm.conf: denied".into())), ..good() };
        let found = said(&[&[(P, unread)]]);
        assert!(found.len() == 1 && found[0].0 == State::Limited);
        assert!(found[0].1.contains("the Prolog of c1 can't read it: /etc/slurm/slurm.conf: denied"));
    }

    #[test]
    fn a_node_whose_slurm_conf_has_another_prolog_or_epilog_is_named() {
        let hooks = |prolog: &[&str], epilog: &[&str]| {
            let [prolog, epilog] =
                [prolog, epilog].map(|paths| Some(paths.iter().map(|path| (*path).to_owned()).collect()));
            let slurm = HookSlurm { prolog, epilog, ..slurm(Some("proctrack/cgroup"), None) };
            HookNote { slurm: Some(Ok(slurm)), ..good() }
        };
        let (prolog, epilog) = ("/etc/slurm/prolog", "/etc/slurm/epilog");
        // The last counts, and an agent of a former version says nothing of it.
        let last = hooks(&["/site/prolog", prolog], &[epilog, epilog]);
        let former = HookSlurm { prolog: None, epilog: None, ..slurm(Some("proctrack/cgroup"), None) };
        let former = HookNote { slurm: Some(Ok(former)), ..good() };
        let found = said(&[&[(P, last)], &[(P, former)]]);
        assert!(found.len() == 1 && found[0].0 == State::Ok, "{}", found[0].1);
        // The Prolog that differs may be one that notes nothing, and the Epilog tells of it.
        let other = hooks(&[prolog, "/site/prolog"], &[]);
        let found = said(&[&[(P, good())], &[(P, good()), (E, other)]]);
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|(state, _)| *state == State::Limited));
        let begins = "nodes' Prolog: 1 have another than /etc/slurm/prolog: c2, like /etc/slurm/prolog,/site/prolog (Epilog of c2) \
                      -> give all nodes the same slurm.conf";
        assert!(found[0].1.starts_with(begins), "{}", found[0].1);
        let begins = "nodes' Epilog: 1 have another than /etc/slurm/epilog: c2, like none";
        assert!(found[1].1.starts_with(begins), "{}", found[1].1);
        // Slurm takes several where it shows several.
        let several = ThisMachine { prolog: "/a,/b".into(), epilog: String::new(), ..here() };
        let count = |note: HookNote| other_hooks(&several, &[(&"c1".parse().unwrap(), P, &note)]).len();
        assert_eq!(count(hooks(&["/a", "/b"], &[])), 0);
        assert_eq!(count(hooks(&["/b"], &[])), 1);
        assert_eq!(count(hooks(&["/a", "/b"], &[epilog])), 1);
        let unknown = ThisMachine { proctrack_type: String::new(), prolog: String::new(), ..here() };
        assert!(other_hooks(&unknown, &[(&"c1".parse().unwrap(), P, &good())]).is_empty());
    }

    #[test]
    fn a_note_that_cannot_be_read_and_an_epilog_without_a_prolog_are_told() {
        let unread = BTreeMap::from([(P, HookSeen::Unreadable("prolog.json: EOF".into()))]);
        let found = of(&[unread]);
        assert!(found.len() == 1 && found[0].0 == State::Missing);
        assert!(found[0].1.contains("not known of c1: prolog.json: EOF -> remove the file there"));
        let found = said(&[&[(P, good()), (E, good())], &[(E, good())]]);
        assert!(found.len() == 1 && found[0].0 == State::Limited);
        assert!(found[0].1.contains("and not `ondeck prolog`: c2 -> if the next job there changes nothing"));
    }
}
