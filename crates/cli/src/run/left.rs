//! What is left of a run that has no keeper any more: its directory, and its caches, which need none.

use std::io;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ondeck_cachefs::instance::control::{Answer, Order, ask, ask_status};
use ondeck_cachefs::instance::{Caches, Instance, Record};
use ondeck_core::exit;
use serde::{Deserialize, Serialize};

use super::caches::{clear, give_up, of_run, without_store};
use super::claim::LOCK;
use super::message::RunOrder;
use super::places::caches_path;
use crate::{cache, display, state};

/// What the files of a run that it keeps in its directory end in.
const OURS: [&str; 5] = ["manifest", "baseline", "journal", "record", "partial"];

/// Removes the directory of a run whose keeper is gone (killed with the whole machine or cgroup).
///
/// # Errors
/// If its caches can't be told or removed: then the directory stays, so that somebody sees them.
pub fn remove_dead(dir: &Path) -> Result<()> {
    if let Some(kept) = Kept::of(dir)? {
        // What killed servers have left of caches that hold nothing.
        for instance in kept.instances()? {
            // Without a record its mount point is not known, and there is no mount: that is made later.
            clear(&instance, Path::new("/"))?;
        }
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
    Ok(())
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

    /// That of a run which had caches.
    ///
    /// # Errors
    /// If it can't be read or understood.
    fn of(dir: &Path) -> Result<Option<Kept>> {
        let path = caches_path(dir);
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other,
        };
        let kept = text.map_err(anyhow::Error::from).and_then(|text| Ok(serde_json::from_slice(&text)?));
        kept.map(Some)
            .with_context(|| format!("can't read {}, which says what caches the run has", path.display()))
    }

    /// The places of its caches that are there.
    fn instances(&self) -> Result<Vec<Instance>> {
        let base = state::caches()?;
        let all = Caches::new(&base).all().with_context(|| format!("can't read {}", base.display()))?;
        Ok(all.into_iter().filter(|one| self.caches.iter().any(|id| id == one.id())).collect())
    }

    /// The caches that are left of it, the run of a directory. For one that nobody can say anything of: why.
    fn left(&self, dir: &Path) -> Result<Vec<(Instance, Result<Record>)>> {
        let run = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let left = self.instances()?.into_iter().filter_map(|instance| {
            let record = of_run(&instance, run).transpose()?;
            Some((instance, record))
        });
        Ok(left.collect())
    }
}

/// What `ondeck run --list` says of a run that has no keeper, if it had caches, and whether nothing is left of it.
///
/// # Errors
/// If that can't be told.
pub fn told_of_caches(dir: &Path) -> Result<Option<(String, bool)>> {
    const GONE: &str = "its keeper was killed, and no command was left to take its place";
    let Some(kept) = Kept::of(dir)? else { return Ok(None) };
    let left = kept.left(dir)?;
    if let Some(error) = left.iter().find_map(|(_, record)| record.as_ref().err()) {
        return Ok(Some((
            format!("{GONE}; what its program wrote through the cache may not be on disk: {error:#}"),
            false,
        )));
    }
    let Some((instance, Ok(record))) = left.first() else {
        // Results in RAM are another story.
        let told = format!("{GONE}; what its program wrote through the cache is on disk");
        return Ok((!kept.outputs).then_some((told, true)));
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
    Ok(Some((told, false)))
}

/// Obeys an order for a run that has no keeper, only caches.
pub fn end_caches(id: &str, dir: &Path, order: RunOrder) -> Result<u8> {
    let kept = Kept::of(dir)?.unwrap_or_default();
    let gives_up = matches!(order, RunOrder::Abandon);
    let mut problems = Vec::new();
    for (instance, record) in kept.left(dir)? {
        let path = record.as_ref().ok().map(|record| display::name(record.mount_point.as_os_str()));
        if gives_up {
            // Where nobody can say any more where the cache was, no mount is left either: that went with the run's namespace.
            let at = record.as_ref().map_or(Path::new("/"), |record| &record.mount_point);
            let what = || format!("can't give up the cache {}", path.as_deref().unwrap_or(instance.id()));
            give_up(&instance, at).with_context(what)?;
            continue;
        }
        if let Err(error) = record.and_then(|record| end_cache(&instance, &record)) {
            problems.push(path.map_or(format!("{error:#}"), |path| format!("{path}: {error:#}")));
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
    remove_dead(dir)?;
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

/// Has a cache written back, and ended.
fn end_cache(instance: &Instance, record: &Record) -> Result<()> {
    if !instance.has_store()? {
        return without_store(instance, record);
    }
    if cache::is_dead(instance)? {
        cache::revive(instance)?;
    }
    match ask(instance.socket(), &Order::Unmount { lose: false }, &mut |_| true) {
        Ok(Answer::Failed { message, .. }) => bail!(message),
        Ok(Answer::GivenUp) => bail!("what was not written back was given up meanwhile"),
        Ok(_) => Ok(()),
        // It has ended by itself in this moment, or it has not.
        Err(_) if instance.record().is_ok_and(|record| record.is_none()) && !instance.may_hold_data()? => {
            Ok(())
        }
        Err(error) => Err(error).context("the cache's server can't be asked"),
    }
}
