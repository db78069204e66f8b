//! What is left of a run that has no keeper any more: its directory, and its caches, which need none.

use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use ondeck_cachefs::instance::control::{Answer, Order, ask, ask_status};
use ondeck_cachefs::instance::{Caches, Instance, Record};
use ondeck_core::exit;
use serde::{Deserialize, Serialize};

use super::caches::{clear, give_up, without_store};
use super::claim::LOCK;
use super::message::RunOrder;
use super::places::caches_path;
use crate::{cache, display, state};

/// What the files of a run that it keeps in its directory end in.
const OURS: [&str; 5] = ["manifest", "baseline", "journal", "record", "partial"];

/// Removes the directory of a run whose keeper is gone (killed with the whole machine or cgroup).
pub fn remove_dead(dir: &Path) {
    if let Some(kept) = Kept::of(dir) {
        clear_caches(&kept);
    }
    // Only what a run makes there: never anything recursive in a directory that something could be mounted in.
    for name in ["control", "state", "log", LOCK] {
        let _ = std::fs::remove_file(dir.join(name));
    }
    if let Ok(entries) = std::fs::read_dir(dir) {
        for entry in entries
            .flatten()
            .filter(|entry| entry.path().extension().is_some_and(|e| OURS.iter().any(|o| e == *o)))
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    let _ = std::fs::remove_dir(dir.join("ramdisk"));
    let _ = std::fs::remove_dir(dir);
}

/// Removes what killed servers have left of caches that hold nothing.
fn clear_caches(kept: &Kept) {
    let all = state::caches().and_then(|base| Ok(Caches::new(base).all()?)).unwrap_or_default();
    for instance in all.iter().filter(|instance| kept.caches.iter().any(|id| id == instance.id())) {
        // Without a record its mount point is not known, and there is no mount: that is made later.
        if let Err(error) = clear(instance, Path::new("/")) {
            eprintln!("ondeck: {error:#}");
        }
    }
}

/// What is remembered of a run with caches, for the time when it has no keeper.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Kept {
    /// The numbers of its caches.
    pub caches: Vec<String>,
    /// Whether it has results in RAM beside them.
    pub outputs: bool,
    /// The program's exit code, once it has ended.
    pub code: Option<u8>,
}

impl Kept {
    /// Writes it down.
    pub fn keep(&self, dir: &Path) -> Result<()> {
        let (path, partial) = (caches_path(dir), caches_path(dir).with_extension("partial"));
        std::fs::write(&partial, serde_json::to_vec(self)?)
            .and_then(|()| std::fs::rename(&partial, &path))
            .with_context(|| format!("can't write {}", path.display()))
    }

    fn of(dir: &Path) -> Option<Kept> {
        serde_json::from_slice(&std::fs::read(caches_path(dir)).ok()?).ok()
    }
}

/// The caches that are left of a run.
fn left_of(dir: &Path) -> Result<Vec<(Instance, Record)>> {
    let run = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let mut left = Vec::new();
    for instance in Caches::new(state::caches()?).all()? {
        // Those of others can't be read, and are not meant.
        if let Ok(Some(record)) = instance.record()
            && record.run.as_deref() == Some(run)
        {
            left.push((instance, record));
        }
    }
    Ok(left)
}

/// What `ondeck run --list` says of a run that has no keeper, if it had caches, and whether nothing is left of it.
pub fn told_of_caches(dir: &Path) -> Option<(String, bool)> {
    let kept = Kept::of(dir)?;
    const GONE: &str = "its keeper was killed, and no command was left to take its place";
    let left = left_of(dir).ok()?;
    let Some((instance, record)) = left.first() else {
        // Results in RAM are another story.
        let told = format!("{GONE}; what its program wrote through the cache is on disk");
        return (!kept.outputs).then_some((told, true));
    };
    let path = display::name(record.mount_point.as_os_str());
    let told = match ask_status(instance.socket()) {
        Ok(Answer::Report(report)) if report.mounted => format!(
            "{GONE}; its program goes on, and what it writes to {path} comes to disk when that has ended, at the latest"
        ),
        Ok(_) => format!(
            "{GONE}; the cache of {path} is being written back; `ondeck run --resume` waits for that, and says what hinders it"
        ),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            format!("{GONE}; the cache of {path}: {error}")
        }
        Err(_) => format!(
            "{GONE}, and the server of the cache of {path} was killed, too; `ondeck run --resume` writes back what it has"
        ),
    };
    Some((told, false))
}

/// Obeys an order for a run that has no keeper, only caches.
pub fn end_caches(id: &str, dir: &Path, order: RunOrder) -> Result<u8> {
    let kept = Kept::of(dir).unwrap_or_default();
    let gives_up = matches!(order, RunOrder::Abandon);
    let mut problems = Vec::new();
    for (instance, record) in left_of(dir)? {
        let path = display::name(record.mount_point.as_os_str());
        if gives_up {
            give_up(&instance, &record).with_context(|| format!("can't give up the cache of {path}"))?;
            continue;
        }
        if !instance.has_store()? {
            if let Err(error) = without_store(&instance, &record) {
                problems.push(format!("{path}: {error:#}"));
            }
            continue;
        }
        if cache::is_dead(&instance)? {
            cache::revive(&instance)?;
        }
        match ask(instance.socket(), &Order::Unmount { lose: false }, &mut |_| true) {
            Ok(Answer::Failed { message, .. }) => problems.push(format!("{path}: {message}")),
            Ok(_) => {}
            // It has ended by itself in this moment, or it has not.
            Err(_) if instance.record().is_ok_and(|record| record.is_none()) => {}
            Err(error) => problems.push(format!("{path}: the cache's server can't be asked: {error}")),
        }
    }
    if !problems.is_empty() {
        eprintln!(
            "ondeck: THE RESULTS ARE NOT ALL ON DISK.\n{}\nThey are held in RAM. Make room or mend the directory, then run \
             again:\n  ondeck run --resume {id}\nor give them up with: ondeck run --abandon {id}",
            display::lines(&problems.join("\n"))
        );
        return Ok(exit::RESULTS_NOT_STAGED);
    }
    remove_dead(dir);
    if kept.outputs && !gives_up {
        eprintln!(
            "ondeck: what went through the cache is on disk; the RAM disk of the run is gone with its keeper, and with it \
             what was not copied out"
        );
        return Ok(exit::RESULTS_NOT_STAGED);
    }
    // How the program has ended nobody knows if its keeper did not live to see it.
    Ok(if gives_up { exit::ABANDONED } else { kept.code.unwrap_or(exit::OK) })
}
