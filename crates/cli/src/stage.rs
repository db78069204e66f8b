//! `ondeck stage`: the staging engine by hand. Its archives are in `archive`.

mod archive;

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use ondeck_core::{Bytes, PackFormat, Rate, duration, exit};
use ondeck_transfer::credentials::User;
use ondeck_transfer::{
    Checksum, Event, Exclude, Monitor, Options, Progress, StageError, Summary, stage as run_stage,
};
use serde_json::json;

use crate::display::{self, Watch};
use crate::{gate, state};

/// Copy a directory or a file: fast, verified, resumable, with everything a filesystem can hold
///
/// DST becomes a copy of SRC. A DST directory that exists is merged into; a trailing slash changes nothing. A name
/// appears in DST only when its content is complete, and DST's filesystem is synced before success is claimed. If the
/// copy is interrupted, the same command resumes it: what the manifest records and what still matches is not copied
/// again.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct StageArgs {
    /// The directory or file to copy
    #[arg(value_name = "SRC")]
    source: PathBuf,

    /// What becomes a copy of it
    #[arg(value_name = "DST", required_unless_present = "list")]
    target: Option<PathBuf>,

    /// The checksum that is taken of every file as it passes
    #[arg(long, value_enum, default_value = "xxh3", value_name = "KIND")]
    checksum: ChecksumArg,

    /// Read DST back once it is synced and compare every checksum, and all attributes with SRC's
    #[arg(long)]
    verify: bool,

    /// Where the manifest is kept [default: ~/.local/state/ondeck/manifests/NAME-HASH.manifest]
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,

    /// Keep no manifest; an interrupted copy then begins anew
    #[arg(long, conflicts_with_all = ["manifest", "verify"])]
    no_manifest: bool,

    /// Remove what DST has and SRC has not
    #[arg(long)]
    delete: bool,

    /// Leave a file of DST alone if it is as new as SRC's or newer
    #[arg(long)]
    update: bool,

    /// Leave out what matches the glob: a name at any depth, or with a slash a path from SRC; with one at its end,
    /// directories only; with a `!` before it, what it does not match (may be repeated)
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<OsString>,

    /// Copy at most this much in a second, like 500MB/s
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<Rate>,

    /// How many threads copy [default: one for each processor, at most 16; at least 8 with a network filesystem]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Only print what would be copied and deleted
    #[arg(long)]
    dry_run: bool,

    /// Do not wait until DST's filesystem confirms that it holds the data
    #[arg(long, conflicts_with = "verify")]
    no_sync: bool,

    /// Become this user, with all their groups, before anything is opened (root only)
    #[arg(long, value_name = "USER")]
    as_user: Option<String>,

    /// Make DST one archive of the tree SRC, readable by any tar: tar or tar.zst
    #[arg(long, value_name = "FORMAT", value_parser = parse_pack, conflicts_with_all = NOT_FOR_ARCHIVES)]
    pack: Option<PackFormat>,

    /// Unpack the archive SRC into the directory DST; checksums are verified if Ondeck packed it
    #[arg(long, conflicts_with = "pack", conflicts_with_all = NOT_FOR_ARCHIVES)]
    unpack: bool,

    /// With --unpack: only this path of the archive, with what it holds (may be repeated)
    #[arg(long, value_name = "PATH", requires = "unpack")]
    only: Vec<PathBuf>,

    /// With --unpack: owners, modes with set-id bits, ACLs, privileged attributes and devices as the archive has them.
    /// For archives that you trust; without it, also for root, all is yours and gets what your umask leaves
    #[arg(short = 'p', long, requires = "unpack")]
    same_permissions: bool,

    /// List what the archive SRC holds: type, mode, size, checksum, path
    #[arg(long, conflicts_with_all = ["pack", "unpack", "target"], conflicts_with_all = NOT_FOR_ARCHIVES)]
    list: bool,

    /// Print one JSON object with the result instead of a line
    #[arg(long)]
    json: bool,

    /// Print errors only
    #[arg(short, long)]
    quiet: bool,
}

/// What has no meaning for archives.
const NOT_FOR_ARCHIVES: [&str; 9] =
    ["checksum", "verify", "manifest", "no_manifest", "delete", "update", "exclude", "bandwidth", "dry_run"];

const EXAMPLES: &str = "Examples:
  ondeck stage /scratch/case/input /dev/shm/input            into RAM
  ondeck stage --verify /dev/shm/results /scratch/results    back to disk, and read it back
  ondeck stage --bandwidth 500MB/s --exclude '*.tmp' A B     politely, without some files
  ondeck stage --dry-run --delete A B                        what would make B equal to A
  ondeck stage --pack tar.zst results results.tar.zst        one archive of many small files
  ondeck stage --unpack --only run7/log results.tar.zst out  one file of it
  ondeck stage --unpack -p results.tar.zst out               with owners, modes and ACLs as they were packed

Exit codes:
   0  all copied
   1  some entries failed and were named; the rest is complete
   2  wrong usage
   3  the copy could not begin or go on (run it again to resume)
  24  some entries were removed from SRC before they could be copied and
      were named; the rest is complete";

/// An archive format, as options name it.
pub fn parse_pack(text: &str) -> Result<PackFormat, String> {
    PackFormat::from_word(text).ok_or_else(|| format!("write one of {}", PackFormat::WORDS.join(", ")))
}

impl StageArgs {
    pub fn source(&self) -> &Path {
        &self.source
    }

    pub fn target(&self) -> Result<&Path> {
        self.target.as_deref().context("DST is missing")
    }

    pub fn threads(&self) -> usize {
        self.threads.map_or(0, usize::from)
    }

    pub fn only(&self) -> Option<Vec<PathBuf>> {
        (!self.only.is_empty()).then(|| self.only.clone())
    }

    pub fn same_permissions(&self) -> bool {
        self.same_permissions
    }

    pub fn no_sync(&self) -> bool {
        self.no_sync
    }

    pub fn json(&self) -> bool {
        self.json
    }

    pub fn quiet(&self) -> bool {
        self.quiet
    }

    /// Whether what it prints is all that it does.
    pub fn only_prints(&self) -> bool {
        self.dry_run || self.list
    }

    /// Runs `work` with a progress bar, if anyone would see it.
    pub fn watched<T>(&self, what: &'static str, work: impl FnOnce() -> T) -> T {
        let watch = Watch::new();
        std::thread::scope(|scope| {
            if !self.quiet && !self.json && !self.dry_run && Watch::is_useful() {
                scope.spawn(|| watch.draw(what, &PROGRESS, None));
            }
            let result = work();
            watch.end();
            result
        })
    }
}

/// Checksums as options name them.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ChecksumArg {
    /// XXH3 with 128 bits: guards against accidents at the speed of memory
    Xxh3,
    /// BLAKE3: cryptographic, costs more time
    Blake3,
    /// None: sizes alone are compared
    None,
}

impl From<ChecksumArg> for Checksum {
    fn from(arg: ChecksumArg) -> Self {
        match arg {
            ChecksumArg::Xxh3 => Checksum::Xxh3,
            ChecksumArg::Blake3 => Checksum::Blake3,
            ChecksumArg::None => Checksum::None,
        }
    }
}

/// Static, so that a signal handler can reach its `cancel`.
static PROGRESS: Progress = Progress::new();

extern "C" fn cancel_the_copy(_signal: libc::c_int) {
    PROGRESS.cancel.store(true, Relaxed);
}

/// The first signal ends the copy in an orderly way; the next one of its kind ends the process, as usual.
fn cancel_on_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe; the struct is valid when zeroed.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            // nohup(1) and background jobs of a script ignore some on purpose.
            if action.sa_sigaction != libc::SIG_IGN {
                action = std::mem::zeroed();
                action.sa_sigaction = cancel_the_copy as *const () as libc::sighandler_t;
                action.sa_flags = libc::SA_RESETHAND | libc::SA_RESTART;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
}

/// Runs the command.
pub fn stage(args: &StageArgs) -> ExitCode {
    match try_stage(args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("ondeck stage: {error:#}");
            ExitCode::from(exit::STAGE_FAILED)
        }
    }
}

fn try_stage(args: &StageArgs) -> Result<u8> {
    let exclude = match Exclude::new(args.exclude.iter().map(|pattern| pattern.as_bytes())) {
        Ok(exclude) => exclude,
        Err(error) => {
            eprintln!("ondeck stage: --exclude: {error}");
            return Ok(exit::USAGE);
        }
    };
    let mut home = None;
    if let Some(name) = &args.as_user {
        let user = User::look_up(name).map_err(|error| anyhow::anyhow!("{error}"))?;
        user.become_for_good().map_err(|error| anyhow::anyhow!("{error}"))?;
        home = Some(user.home);
    }
    // A list changes nothing that would have to be put in order: a signal ends it at once.
    if !args.list {
        cancel_on_signals();
    }
    // Modes come from the source; a mask would only have to be undone for every file. What has no source gets the
    // user's, and what may have a stranger's.
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    let event = |event: Event<'_>| report_event(&event);
    let monitor = Monitor { progress: &PROGRESS, event: &event };
    if let Some(format) = args.pack {
        return archive::pack(args, format, umask, &monitor);
    }
    if args.unpack {
        return archive::unpack(args, umask, &monitor);
    }
    if args.list {
        return archive::list(args);
    }
    let target = args.target()?;
    let manifest = match (&args.manifest, args.no_manifest || args.dry_run) {
        (Some(path), _) => {
            let inside = path
                .parent()
                .and_then(|parent| {
                    if parent.as_os_str().is_empty() { Path::new(".") } else { parent }.canonicalize().ok()
                })
                .zip(target.canonicalize().ok())
                .is_some_and(|(parent, target)| target.is_dir() && parent.starts_with(target));
            if inside {
                anyhow::bail!("the manifest {} lies inside DST; keep it outside", path.display());
            }
            Some(path.clone())
        }
        (None, true) => None,
        (None, false) => Some(state::manifest_for(target, home.as_deref())?),
    };
    let options = Options {
        checksum: args.checksum.into(),
        threads: args.threads(),
        bandwidth: args.bandwidth,
        dry_run: args.dry_run,
        delete: args.delete,
        update: args.update,
        exclude,
        sync: !args.no_sync,
        verify: args.verify,
        manifest: manifest.clone(),
        gate: gate::for_copy(&args.source, target)?,
        ..Options::default()
    };
    let summary = args.watched("staging", || run_stage(&args.source, target, &options, &monitor));
    let summary = match summary {
        Ok(summary) => summary,
        Err(StageError::Interrupted) => {
            let done =
                display::count(PROGRESS.entries_done.load(Relaxed), "entry").replace("entrys", "entries");
            anyhow::bail!(
                "interrupted, with {done} done; run the same command again to go on where it stopped"
            );
        }
        // Its message names its cause already.
        Err(error) => anyhow::bail!("{error}"),
    };
    let unverified = summary.verified.is_some_and(|verified| verified.failed > 0);
    let failed = summary.errors > 0 || unverified;
    if args.json {
        print_json(args, &summary, manifest.as_deref())?;
    } else if !args.quiet {
        // What was done is done, whether anybody hears of it or not.
        crate::heard(print_summary(args, &summary));
    }
    if failed && summary.errors == summary.vanished {
        let gone = display::count(summary.vanished, "entry").replace("entrys", "entries");
        eprintln!(
            "ondeck stage: {gone} removed from {} while it was copied (named above); the rest is complete",
            args.source.display()
        );
        return Ok(exit::SOME_VANISHED);
    }
    if failed {
        eprintln!(
            "ondeck stage: {} failed (named above); the rest is complete. Mend them and run the same command again: \
             only they are copied.",
            display::count(summary.errors, "entry").replace("entrys", "entries")
        );
        return Ok(exit::SOME_FAILED);
    }
    Ok(exit::OK)
}

fn report_event(event: &Event<'_>) {
    let text = |path: &[u8]| display::name(std::ffi::OsStr::from_bytes(path));
    match event {
        Event::Failed(error) => eprintln!("ondeck stage: {error}"),
        Event::Would(action, path) => println!("would {action} {}", text(path)),
        Event::Deleted(_) => {}
        // Nobody asks for that here.
        Event::LeftBehind { path, owner } => {
            eprintln!("ondeck stage: {}: left behind: it is of uid {owner}", text(path));
        }
        Event::PutBeside { path, name } => {
            eprintln!("ondeck stage: {}: put beside as {}", text(path), text(name))
        }
        Event::Kept(path) => eprintln!("ondeck stage: {}: kept", text(path)),
    }
}

fn print_summary(args: &StageArgs, summary: &Summary) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.dry_run {
        writeln!(out, "dry run: nothing was changed")?;
        return Ok(());
    }
    let time = duration::display(summary.copying);
    let rate = display::rate(summary.bytes_written, summary.copying);
    write!(
        out,
        "{} ({}) copied in {time}{rate}",
        display::count(summary.files, "file"),
        Bytes(summary.bytes_written)
    )?;
    for (number, noun) in [
        (summary.hard_links, "hard link"),
        (summary.others, "symlink or special file"),
        (summary.directories, "directory"),
    ] {
        if number > 0 {
            let text = display::count(number, noun)
                .replace("directorys", "directories")
                .replace("symlink or special files", "symlinks and special files");
            write!(out, ", {text}")?;
        }
    }
    for (number, what) in [
        (summary.unchanged, "unchanged"),
        (summary.deleted, "deleted"),
        (summary.retried, "copied again because they changed"),
    ] {
        if number > 0 {
            write!(out, ", {number} {what}")?;
        }
    }
    if args.no_sync {
        write!(out, "; not synced")?;
    } else {
        write!(out, "; synced in {}", duration::display(summary.syncing))?;
    }
    if let Some(verified) = &summary.verified {
        let time = duration::display(summary.verifying);
        write!(out, "; {} read back and matching in {time}", display::count(verified.matching, "file"))?;
        if verified.changed > 0 {
            let changed = display::count(verified.changed, "entry").replace("entrys", "entries");
            write!(out, "; {changed} changed in SRC meanwhile, with attributes not compared")?;
        }
    }
    writeln!(out)?;
    if summary.ownership_kept > 0 {
        writeln!(
            out,
            "{} belong to you instead of their owner or group: only root can give files away",
            display::count(summary.ownership_kept, "entry").replace("entrys", "entries")
        )?;
    }
    Ok(())
}

fn print_json(args: &StageArgs, summary: &Summary, manifest: Option<&std::path::Path>) -> Result<()> {
    let object = json!({
        "source": args.source.to_string_lossy(),
        "target": args.target()?.to_string_lossy(),
        "manifest": manifest.map(|path| path.to_string_lossy()),
        "checksum": Checksum::from(args.checksum).name(),
        "files": summary.files,
        "directories": summary.directories,
        "others": summary.others,
        "hard_links": summary.hard_links,
        "bytes": summary.bytes,
        "bytes_written": summary.bytes_written,
        "unchanged": summary.unchanged,
        "deleted": summary.deleted,
        "retried": summary.retried,
        "errors": summary.errors,
        "vanished": summary.vanished,
        "ownership_kept": summary.ownership_kept,
        "synced": !args.no_sync && !args.dry_run,
        "copy_seconds": summary.copying.as_secs_f64(),
        "sync_seconds": summary.syncing.as_secs_f64(),
        "verify_seconds": summary.verified.map(|_| summary.verifying.as_secs_f64()),
        "verified_files": summary.verified.map(|verified| verified.matching),
        "verify_failures": summary.verified.map(|verified| verified.failed),
        "compared_entries": summary.verified.map(|verified| verified.compared),
        "changed_meanwhile": summary.verified.map(|verified| verified.changed),
    });
    println!("{object}");
    Ok(())
}
