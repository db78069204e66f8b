//! `ondeck stage --pack`, `--unpack` and `--list`: one archive of many small files.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Result;
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{Bytes, PackFormat, duration, exit};
use ondeck_transfer::Monitor;
use ondeck_transfer::pack::{self, IndexState, PackError, PackOptions, UnpackOptions};
use rustix::fs::Mode;
use serde_json::json;

use super::StageArgs;
use crate::{display, gate};

/// Packs the tree `SRC` into the archive `DST`.
pub fn pack(args: &StageArgs, format: PackFormat, umask: Mode, monitor: &Monitor<'_>) -> Result<u8> {
    let gate = gate::for_copy(args.source(), args.target()?)?;
    let options =
        PackOptions { threads: args.threads(), sync: !args.no_sync(), umask, ..PackOptions::default() };
    let summary = args.watched("packing", || {
        pack::pack_path(args.source(), args.target()?, format, &options, monitor).map_err(told)
    })?;
    gate::check(gate.as_ref())?;
    if args.json() {
        println!(
            "{}",
            json!({
                "archive": args.target()?.to_string_lossy(),
                "files": summary.files,
                "directories": summary.directories,
                "others": summary.others,
                "hard_links": summary.hard_links,
                "bytes": summary.bytes,
                "bytes_read": summary.bytes_read,
                "archive_bytes": summary.archive_bytes,
                "errors": summary.errors,
                "vanished": summary.vanished,
                "pack_seconds": summary.packing.as_secs_f64(),
                "sync_seconds": summary.syncing.as_secs_f64(),
            })
        );
    } else if !args.quiet() && has_done_something(summary.files, summary.errors) {
        println!(
            "{} ({}) packed into {} in {}{}",
            display::count(summary.files, "file"),
            Bytes(summary.bytes_read),
            Bytes(summary.archive_bytes),
            duration::display(summary.packing),
            display::rate(summary.bytes_read, summary.packing),
        );
    }
    if summary.errors > 0 && summary.errors == summary.vanished {
        let gone = display::count(summary.vanished, "entry").replace("entrys", "entries");
        eprintln!(
            "ondeck stage: {gone} removed from {} while it was packed (named above); the rest is complete",
            args.source().display()
        );
        return Ok(exit::SOME_VANISHED);
    }
    Ok(outcome(summary.errors))
}

/// Unpacks the archive `SRC`, or some of its paths, into the directory `DST`.
pub fn unpack(args: &StageArgs, umask: Mode, monitor: &Monitor<'_>) -> Result<u8> {
    let gate = gate::for_copy(args.source(), args.target()?)?;
    let options = UnpackOptions {
        threads: args.threads(),
        only: args.only(),
        sync: !args.no_sync(),
        umask,
        same_permissions: args.same_permissions(),
    };
    let summary = args.watched("unpacking", || {
        pack::unpack_path(args.source(), args.target()?, &options, monitor).map_err(told)
    })?;
    gate::check(gate.as_ref())?;
    // The summary's bytes are the files' sizes: their holes took no time.
    let written = monitor.progress.bytes_written.load(Relaxed);
    let checked = match summary.index {
        IndexState::Used => format!("{} verified", display::count(summary.verified, "checksum")),
        IndexState::None => "not verified: the archive has no index of Ondeck's".to_owned(),
        IndexState::Damaged => "not verified: the archive's index is damaged".to_owned(),
    };
    if args.json() {
        println!(
            "{}",
            json!({
                "target": args.target()?.to_string_lossy(),
                "files": summary.files,
                "directories": summary.directories,
                "others": summary.others,
                "hard_links": summary.hard_links,
                "bytes": summary.bytes,
                "bytes_read": summary.bytes_read,
                "bytes_written": written,
                "verified": summary.verified,
                "index_used": summary.index == IndexState::Used,
                "errors": summary.errors,
                "unpack_seconds": summary.unpacking.as_secs_f64(),
                "sync_seconds": summary.syncing.as_secs_f64(),
            })
        );
    } else if !args.quiet() && has_done_something(summary.files, summary.errors) {
        println!(
            "{} ({}) unpacked in {}{}; {checked}",
            display::count(summary.files, "file"),
            Bytes(written),
            duration::display(summary.unpacking),
            display::rate(written, summary.unpacking),
        );
    }
    Ok(outcome(summary.errors))
}

/// Lists the members of the archive `SRC`: type, size, checksum and path.
pub fn list(args: &StageArgs) -> Result<u8> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for member in pack::list_path(args.source()).map_err(told)? {
        let member = member.map_err(told)?;
        let path = OsStr::from_bytes(&member.path);
        let written = if args.json() {
            let object = json!({
                "path": path.to_string_lossy(),
                "type": char::from(member.kind).to_string(),
                "mode": format!("{:04o}", member.mode),
                "size": member.size,
                "checksum": member.checksum.map(|digest| digest.to_string()),
            });
            writeln!(out, "{object}")
        } else {
            let checksum = member.checksum.map_or_else(|| "-".to_owned(), |digest| digest.to_string());
            // One line for each member, whatever it is called; `--json` has the name itself.
            let path = if member.path.is_empty() { ".".into() } else { display::name(path) };
            writeln!(
                out,
                "{} {:04o} {:>12} {checksum:<32} {path}",
                char::from(member.kind),
                member.mode,
                member.size
            )
        };
        match written {
            Ok(()) => {}
            // `| head` has seen enough.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(exit::OK),
            Err(error) => return Err(error.into()),
        }
    }
    match out.flush() {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(exit::OK),
    }
}

/// After a failure, what was not done is not counted.
fn has_done_something(files: u64, errors: u64) -> bool {
    files > 0 || errors == 0
}

/// What a stranger's archive makes an error say stays on its line.
fn told(error: PackError) -> anyhow::Error {
    anyhow::anyhow!("{}", plain(&error.to_string(), 2 * MESSAGE))
}

fn outcome(errors: u64) -> u8 {
    if errors == 0 {
        return exit::OK;
    }
    eprintln!(
        "ondeck stage: {} failed (named above); the rest is complete",
        display::count(errors, "entry").replace("entrys", "entries")
    );
    exit::SOME_FAILED
}
