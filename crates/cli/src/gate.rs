//! Is the RAM disk whole that is copied from, or to?
//!
//! A parallel RAM disk that has lost a node may show a part of its files and report no error. So a copy from or to one
//! asks this machine's agent: before it begins, before it deletes anything, and before it claims success.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use ondeck_api::Config;
use ondeck_cachefs::serve::SUBTYPE;
use ondeck_fleet::Fleet;
use ondeck_ramdisk::mounts::{self, Mount};
use ondeck_transfer::Gate;

/// What an agent's mounts are called in /proc/mounts.
const SOURCE: &str = "ondeck:";

/// The gate of a copy between these paths; none if neither is on a RAM disk of an agent.
///
/// # Errors
/// If one is, and is not whole now, or nobody can say.
pub fn for_copy(source: &Path, target: &Path) -> Result<Option<Gate>> {
    for_paths(&[source, target])
}

/// The gate of work on these paths; none if no RAM disk of an agent is at, above or below any of them.
///
/// # Errors
/// If one is, and is not whole now, or nobody can say.
pub fn for_paths(paths: &[&Path]) -> Result<Option<Gate>> {
    let mut guarded = Vec::new();
    for path in paths {
        guarded.extend(on_ramdisk(path)?);
    }
    guarded.sort();
    guarded.dedup();
    if guarded.is_empty() {
        return Ok(None);
    }
    let config = Config::load(None)?;
    let fleet = Fleet::new(&config);
    let first = ask(&fleet, &guarded).map_err(anyhow::Error::msg)?;
    let witness = Mutex::new(first);
    Ok(Some(Gate::new(move || {
        let now = ask(&fleet, &guarded)?;
        let before = witness.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if *before != now {
            return Err("the RAM disk lost a connection to one of its nodes while it was copied".to_owned());
        }
        Ok(())
    })))
}

/// The real path if an agent has mounted the filesystem there, and every such mount below it: copies go into those.
fn on_ramdisk(path: &Path) -> Result<Vec<PathBuf>> {
    let mounted = mounts::mounted().context("can't read /proc/self/mountinfo")?;
    if !mounted.iter().any(is_an_agents) {
        return Ok(Vec::new());
    }
    // What does not exist yet will lie where its parent does.
    let real = path.canonicalize().or_else(|_| {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        parent.canonicalize()
    });
    let real = match real {
        Ok(real) => real,
        // A client that was cut off: the name is all there is.
        Err(_) => {
            std::path::absolute(path).with_context(|| format!("can't tell where {} lies", path.display()))?
        }
    };
    // The latest mount at the longest path is what one sees there.
    let over = mounted
        .iter()
        .filter(|mount| real.starts_with(&mount.at))
        .max_by_key(|mount| mount.at.components().count());
    let at = over.is_some_and(is_an_agents).then(|| real.clone());
    let below = mounted
        .iter()
        .filter(|mount| is_an_agents(mount) && mount.at.starts_with(&real) && mount.at != real)
        .map(|mount| mount.at.clone());
    Ok(at.into_iter().chain(below).collect())
}

/// A cache, which is this machine's alone, begins its source with the same word.
fn is_an_agents(mount: &Mount) -> bool {
    mount.source.starts_with(SOURCE) && mount.kind.strip_prefix("fuse.") != Some(SUBTYPE)
}

/// Asks the agent about every path; returns the witnesses.
fn ask(fleet: &Fleet, paths: &[PathBuf]) -> Result<Vec<String>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("can't ask the agent: {error}"))?;
    paths
        .iter()
        .map(|path| {
            let view = runtime.block_on(fleet.view(path)).map_err(|error| {
                format!("nobody can say whether the RAM disk at {} is whole: {error}", path.display())
            })?;
            let Some(id) = view.ramdisk else {
                return Err(format!("this machine's agent does not know the RAM disk at {}", path.display()));
            };
            if view.faults.is_empty() {
                Ok(view.witness)
            } else {
                Err(format!(
                    "the RAM disk {id} at {} is not whole: {}",
                    path.display(),
                    view.faults.join("; ")
                ))
            }
        })
        .collect()
}

/// Refuses unless every path is whole: for copies that ask only before and after.
///
/// # Errors
/// In words.
pub fn check(gate: Option<&Gate>) -> Result<()> {
    if let Some(gate) = gate
        && let Err(why) = gate.check()
    {
        bail!("{why}; nothing says that this copy is complete");
    }
    Ok(())
}
