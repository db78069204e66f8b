//! Runs of this user: listing them, and giving up what one still holds.

use std::io::{ErrorKind, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ondeck_core::exit;

use super::claim::is_claimed;
use super::front;
use super::left::{self, remove_dead};
use super::message::RunOrder;
use crate::state;

/// `ondeck run --list`.
pub fn list() -> Result<u8> {
    let mut any = false;
    let mut entries = Vec::new();
    for base in state::all_runs()? {
        entries.extend(std::fs::read_dir(&base)?);
    }
    for entry in entries {
        let entry = entry?;
        let id = entry.file_name().to_string_lossy().into_owned();
        // The caches of the machine may be kept beside them.
        if !entry.path().is_dir() || state::caches()? == entry.path() {
            continue;
        }
        any = true;
        let text = std::fs::read_to_string(entry.path().join("state")).unwrap_or_default();
        // Its results may be held: nothing of it is removed because it can't be asked.
        let state = state_of(&entry.path(), text.trim())
            .unwrap_or_else(|error| format!("it can't be told what it does: {error:#}"));
        println!("{id}  {state}");
    }
    if !any {
        println!("no runs");
    }
    Ok(exit::OK)
}

/// What a run does, of which `last` is the last that it wrote down. What is left of one that is gone is removed.
fn state_of(dir: &Path, last: &str) -> Result<String> {
    match UnixStream::connect(dir.join("control")) {
        Ok(_) => return Ok(last.to_owned()),
        Err(error) if is_nobody(&error) => {}
        Err(error) => return Err(error).context("its keeper can't be asked"),
    }
    // The command that started it lives, and takes the keeper's place.
    if is_claimed(dir)? {
        return Ok("starting, ending, or getting a new keeper".to_owned());
    }
    if let Some((told, is_over)) = left::told_of_caches(dir)? {
        if is_over {
            remove_dead(dir)?;
        }
        return Ok(told);
    }
    let ram_disk = dir.join("ramdisk");
    Ok(match who_sees(&ram_disk)? {
        Some(pid) => format!(
            "its keeper was killed, and no command was left to take its place; its program goes on, and until that ends \
             the results can be copied from /proc/{pid}/root{}",
            ram_disk.display()
        ),
        None => {
            remove_dead(dir)?;
            "its keeper was killed, and its RAM disk is gone; what was copied out before is on disk"
                .to_owned()
        }
    })
}

/// Whether nobody listens on a run's socket any more, or not yet.
fn is_nobody(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
}

/// A process that has the RAM disk mounted.
fn who_sees(ram_disk: &Path) -> std::io::Result<Option<u32>> {
    let ram_disk = ram_disk.canonicalize().unwrap_or_else(|_| ram_disk.to_owned());
    for entry in std::fs::read_dir("/proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse() else { continue };
        // Of another user, or gone: neither is the run's program.
        let Ok(mounts) = std::fs::read(format!("/proc/{pid}/mountinfo")) else { continue };
        let mut points =
            mounts.split(|byte| *byte == b'\n').filter_map(|line| line.split(|b| *b == b' ').nth(4));
        if points.any(|point| point == ram_disk.as_os_str().as_bytes()) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// `ondeck run --abandon ID`.
pub fn abandon(id: &str, yes: bool, json: bool, quiet: bool) -> Result<u8> {
    // Nobody is asked about what is not there.
    front::directory_of(id)?;
    if !yes {
        if !std::io::stdin().is_terminal() {
            bail!("giving up the results of run {id} must be confirmed; add --yes");
        }
        if !front::confirmed(&format!(
            "Give up the results of run {id} that are not on disk? Type `abandon`: "
        ))? {
            // Whoever has answered knows it anyhow.
            let _ = writeln!(std::io::stdout(), "nothing was given up");
            return Ok(exit::OK);
        }
    }
    front::attach(id, RunOrder::Abandon, json, quiet)
}
