//! `ondeck cache`: the transparent cache of a directory.
//!
//! - `report`: what `status` shows

mod report;

use std::io::{self, BufRead, IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use ondeck_cachefs::instance::control::{
    ANOTHER_USERS, Answer, News, Order, Silent, ask_and_wait, ask_status,
};
use ondeck_cachefs::instance::{self, Attach, CacheUser, Caches, Instance, Plan, Record, StartError};
use ondeck_cachefs::settings::{Settings, SyncWhen, Writes};
use ondeck_cachefs::status::Status;
use ondeck_core::text::plain;
use ondeck_core::{Bytes, duration, exit};
use ondeck_transfer::credentials::User;

use crate::{display, state};
use report::Found;

/// Show a directory through a write-back cache in RAM
///
/// Programs read and write at the speed of RAM, and need not be changed; what they wrote goes to the directory behind it
/// in the background. docs/cache.md says what is promised and what is not.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct CacheArgs {
    #[command(subcommand)]
    command: CacheCommand,
}

const EXAMPLES: &str = "Examples:
  ondeck cache mount --backing /shared/project --capacity 8GiB /mnt/fast
  ondeck cache mount --backing ~alice/case --user alice --capacity 8GiB ~alice/case
                                     over the directory itself, as a user's
  ondeck cache status                what there is, and how it does
  ondeck cache preload /mnt/fast/input
  ondeck cache flush /mnt/fast       write everything back, and go on
  ondeck cache unmount /mnt/fast     write everything back, and end

Exit codes:
  0    done
  1    it failed, or the cache is in use; nothing is lost
  2    wrong usage, or refused: nothing was changed
  122  some data is in the cache alone: it could not be written back; the
       message says why, and what to do
  123  the data was given up: unmount --force-lose";

#[derive(Subcommand)]
enum CacheCommand {
    Mount(Box<MountArgs>),
    Status(StatusArgs),
    Preload(PathArgs),
    Flush(FlushArgs),
    Evict(PathArgs),
    Unmount(UnmountArgs),
}

/// Mount a cache (root)
///
/// If the server of a cache was killed, the same command recovers all that was closed or synced, and goes on.
#[derive(Args)]
struct MountArgs {
    /// The directory behind the cache, which must be the directory's only user as long as it is mounted
    #[arg(long, value_name = "DIR")]
    backing: PathBuf,

    /// RAM for data and names, like 8GiB
    #[arg(long, value_name = "SIZE")]
    capacity: Bytes,

    /// Where to mount: a directory, which may be the backing directory itself
    #[arg(value_name = "MOUNTPOINT")]
    mount_point: PathBuf,

    /// Whose cache it is: the directory is reached with this user's rights, and nobody else may use the cache [default:
    /// root's]
    #[arg(long, value_name = "NAME", conflicts_with = "allow_other")]
    user: Option<String>,

    /// Let all users use a cache of root's; their permissions are checked as on the directory
    #[arg(long)]
    allow_other: bool,

    /// When a write is on the backing directory at the latest: `close`: before close and fsync return; `fsync`: before
    /// fsync returns; `interval=30s`: after that time [default: interval=30s]
    #[arg(long, value_name = "WHEN", value_parser = parse_sync)]
    sync: Option<Sync>,

    /// The longest that a change stays in the cache alone, like 30s; with `--sync interval` the same
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    age: Option<Duration>,

    /// Refuse to let a file grow beyond this (EFBIG)
    #[arg(long, value_name = "SIZE")]
    max_file_size: Option<Bytes>,

    /// Who carries out writes: `server`: the server, which finds room for them first; `passthrough`: the kernel, straight to
    /// the cache's RAM, at its speed. Then nobody is asked for room: programs that write more than there is get ENOSPC, or
    /// SIGBUS through maps, and what they write counts as their memory, so limits of memory groups end them
    #[arg(long, value_name = "WHO", value_parser = parse_writes, default_value = "server")]
    writes: Writes,

    /// Write back when so much of the capacity is dirty, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = percent())]
    dirty_high: u8,

    /// Stop writing back, unless it is old, when no more than this is dirty
    #[arg(long, value_name = "PERCENT", default_value_t = 40, value_parser = percent())]
    dirty_low: u8,

    /// Evict clean data when so much of the capacity is full, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 95, value_parser = percent())]
    full_high: u8,

    /// Stop evicting when no more than this is full
    #[arg(long, value_name = "PERCENT", default_value_t = 90, value_parser = percent())]
    full_low: u8,
}

/// Show caches: how much they hold, what is not written back, and what hinders it
#[derive(Args)]
struct StatusArgs {
    /// Where it is mounted [default: all]
    #[arg(value_name = "MOUNTPOINT")]
    mount_point: Option<PathBuf>,

    /// Print a JSON array
    #[arg(long, conflicts_with = "metrics")]
    json: bool,

    /// Print metrics in the text form of Prometheus
    #[arg(long)]
    metrics: bool,
}

/// Read files into the cache, or give up what is resident of them
///
/// preload: read them, and all below, into the cache. evict: give up what is resident of them and written back.
#[derive(Args)]
struct PathArgs {
    /// Files or directories in mounted caches
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

/// Write everything back that was changed before, synced; the cache stays mounted
#[derive(Args)]
struct FlushArgs {
    /// Where it is mounted
    #[arg(value_name = "MOUNTPOINT")]
    mount_point: PathBuf,

    /// Print no progress
    #[arg(short, long)]
    quiet: bool,
}

/// Write everything back, take the mount away, and give the RAM back
///
/// If a server was killed, what it left is recovered and written back.
#[derive(Args)]
struct UnmountArgs {
    /// Where it is mounted
    #[arg(value_name = "MOUNTPOINT")]
    mount_point: PathBuf,

    /// Give up what is not written back, and take the mount away from whoever uses it
    #[arg(long)]
    force_lose: bool,

    /// With --force-lose: do not ask
    #[arg(long, requires = "force_lose")]
    yes: bool,

    /// Print no progress
    #[arg(short, long)]
    quiet: bool,
}

fn percent() -> clap::builder::RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(0..=100)
}

fn parse_time(text: &str) -> Result<Duration, String> {
    duration::parse(text, 1).map_err(|error| error.to_string())
}

#[derive(Clone, Copy)]
enum Sync {
    When(SyncWhen),
    Interval(Duration),
}

fn parse_sync(text: &str) -> Result<Sync, String> {
    match text.split_once('=') {
        None if text == "close" => Ok(Sync::When(SyncWhen::Close)),
        None if text == "fsync" => Ok(Sync::When(SyncWhen::Fsync)),
        Some(("interval", time)) => parse_time(time).map(Sync::Interval),
        _ => Err("write close, fsync or interval=30s".to_owned()),
    }
}

fn parse_writes(text: &str) -> Result<Writes, String> {
    match text {
        "server" => Ok(Writes::Server),
        "passthrough" => Ok(Writes::Passthrough),
        _ => Err("write server or passthrough".to_owned()),
    }
}

impl CacheArgs {
    /// Whether it ends when it has told what it was asked for.
    pub fn only_shows(&self) -> bool {
        matches!(self.command, CacheCommand::Status(_))
    }
}

/// Runs the command.
pub fn cache(args: &CacheArgs) -> ExitCode {
    let result = match &args.command {
        CacheCommand::Mount(args) => mount(args),
        CacheCommand::Status(args) => status(args),
        CacheCommand::Preload(args) => each(args, |path| Order::Preload { path }),
        CacheCommand::Evict(args) => each(args, |path| Order::Evict { path }),
        CacheCommand::Flush(args) => flush(args),
        CacheCommand::Unmount(args) => unmount(args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("ondeck cache: {}", display::lines(&format!("{error:#}")));
            let refused = matches!(error.downcast_ref(), Some(StartError::Refused(_)));
            ExitCode::from(if refused { exit::USAGE } else { exit::FAILED })
        }
    }
}

/// The server of a cache: for `ondeck cache mount` only.
pub fn serve() -> ExitCode {
    crate::agent::log_to_stderr(crate::agent::LogFormat::Human);
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line);
    let plan: Plan = match read.and_then(|_| Ok(serde_json::from_str(&line)?)) {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("ondeck cache-server: only `ondeck cache mount` starts this: {error}");
            return ExitCode::from(exit::USAGE);
        }
    };
    ExitCode::from(if instance::serve(&plan) { exit::OK } else { exit::FAILED })
}

fn caches() -> Result<Caches> {
    Ok(Caches::new(state::caches()?))
}

/// The cache at a mount point, by the path that it has now.
fn cache_at(caches: &Caches, at: &Path) -> Result<Instance> {
    caches.find(at).context("can't read the table of mounts")
}

fn must_be_root(what: &str) -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(StartError::Refused(format!("only root can {what}")).into())
}

fn mount_point(path: &Path) -> Result<PathBuf> {
    instance::mount_point(path).with_context(|| format!("can't find the mount point {}", path.display()))
}

fn mount(args: &MountArgs) -> Result<u8> {
    must_be_root("mount a cache; with --user NAME it becomes a user's")?;
    let user = args.user.as_deref().map(User::look_up).transpose();
    let user = user.map_err(|error| StartError::Refused(error.to_string()))?.map(CacheUser::from);
    let mut settings = Settings::new(args.capacity);
    (settings.full.high, settings.full.low) = (args.full_high, args.full_low);
    (settings.dirty.high, settings.dirty.low) = (args.dirty_high, args.dirty_low);
    settings.largest_file = args.max_file_size;
    settings.writes = args.writes;
    match args.sync {
        Some(Sync::When(when)) => settings.sync = when,
        Some(Sync::Interval(_)) if args.age.is_some() => {
            return Err(
                StartError::Refused("--sync interval and --age say the same: leave one out".into()).into()
            );
        }
        Some(Sync::Interval(age)) => settings.age = age,
        None => {}
    }
    if let Some(age) = args.age {
        settings.age = age;
    }
    let at = mount_point(&args.mount_point)?;
    // Over a mount whose server is dead, the directory can't be looked at.
    let backing = args.backing.canonicalize().or_else(|_| instance::mount_point(&args.backing));
    let backing = backing.with_context(|| format!("can't find the directory {}", args.backing.display()))?;
    let plan = Plan {
        base: caches()?.base().to_owned(),
        mount_point: at,
        backing,
        user,
        others: args.allow_other,
        settings,
        run: None,
        attach: Attach::Here,
    };
    for note in start(&plan)? {
        eprintln!("ondeck cache: {note}");
    }
    Ok(exit::OK)
}

/// Starts the server of a cache. Returns what its user should know.
pub fn start(plan: &Plan) -> Result<Vec<String>, StartError> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ondeck").arg("cache-server");
    instance::start(command, plan)
}

/// What a server that does not answer is called.
fn unanswered(instance: &Instance, at: &Path, error: io::Error) -> anyhow::Error {
    let at = display::name(at.as_os_str());
    let silent = error.get_ref().and_then(|error| error.downcast_ref::<Silent>());
    if let Some(silent) = silent {
        return anyhow::anyhow!("the cache at {at}: {silent}; see {}", instance.log().display());
    }
    match error.kind() {
        io::ErrorKind::NotFound if instance.is_served().unwrap_or(false) => anyhow::anyhow!(
            "the cache at {at} can't be asked, because {} was removed, but it is served: `umount {at}` ends it, and writes back \
             all that it holds",
            instance.socket().display()
        ),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused if is_lost(instance).unwrap_or(false) => {
            anyhow::anyhow!(
                "the server of the cache at {at} is dead, and its store is gone: {}. `ondeck cache unmount {at}` takes away what \
                 is left, as root; the same `ondeck cache mount` begins anew",
                what_is_lost(instance)
            )
        }
        io::ErrorKind::NotFound => {
            anyhow::anyhow!("there is no cache at {at}; `ondeck cache status` lists them")
        }
        io::ErrorKind::ConnectionRefused => {
            let what = match instance.record() {
                Ok(Some(Record { run: Some(run), .. })) => {
                    format!("`ondeck run --resume {run}` writes it back")
                }
                Err(error) if error.kind() != io::ErrorKind::PermissionDenied => damaged(instance, &error),
                _ => format!(
                    "mount it again with the same command, or write it back by `ondeck cache unmount {at}`, as root"
                ),
            };
            anyhow::anyhow!(
                "the server of the cache at {at} is dead, and the cache may hold data that nobody else has: {what}; why it died \
                 stands in {}",
                instance.log().display()
            )
        }
        io::ErrorKind::UnexpectedEof => anyhow::anyhow!("the server of the cache at {at} died meanwhile"),
        io::ErrorKind::Interrupted => anyhow::anyhow!("interrupted"),
        _ => anyhow::anyhow!("can't ask the server of the cache at {at}: {error}"),
    }
}

/// What can be done about a record that can't be understood.
fn damaged(instance: &Instance, error: &io::Error) -> String {
    format!(
        "can't read {}, which says what the cache is: {error}. Put it back, from a copy if there is one; or copy away what you need \
         of the store, {}, and give it up by `ondeck cache unmount --force-lose` where it was mounted",
        instance.record_path().display(),
        instance.store().display()
    )
}

/// The exit code of an answer that is the last one, and what it says on standard error.
fn conclude(answer: Answer) -> u8 {
    match answer {
        Answer::Failed { message, unwritten } => {
            eprintln!("ondeck cache: {}", display::lines(&message));
            if unwritten { exit::RESULTS_NOT_STAGED } else { exit::FAILED }
        }
        Answer::GivenUp => {
            eprintln!(
                "ondeck cache: what was not written back was given up meanwhile, by `unmount --force-lose`"
            );
            exit::ABANDONED
        }
        _ => exit::OK,
    }
}

fn each(args: &PathArgs, order: impl Fn(PathBuf) -> Order) -> Result<u8> {
    let caches = caches()?;
    let mut code = exit::OK;
    for path in &args.paths {
        let shown = display::name(path.as_os_str());
        let real = path.canonicalize().map_err(|error| {
            let what = if error.kind() == io::ErrorKind::NotFound { "find" } else { "read" };
            anyhow::Error::new(error).context(format!("can't {what} {shown}"))
        })?;
        let at = Caches::containing(&real).context("can't read the table of mounts")?;
        let at = at.with_context(|| format!("{shown} is in no cache"))?;
        let instance = cache_at(&caches, &at)?;
        let inside = real.strip_prefix(&at).unwrap_or(Path::new("")).to_owned();
        let mut told = false;
        let answer = ask_and_wait(instance.socket(), &order(inside), &mut |news| {
            // While it works it says nothing; but it would say how it is.
            if let News::Silence(server) = news
                && !told
                && ask_status(instance.socket()).is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
            {
                told = true;
                still_waits(&at, server);
            }
            true
        });
        let answer = answer.map_err(|error| unanswered(&instance, &at, error))?;
        code = code.max(conclude(answer));
    }
    Ok(code)
}

/// Draws how much is still to be written back.
struct Draining {
    bar: Option<ProgressBar>,
    most: u64,
}

impl Draining {
    fn new(quiet: bool) -> Draining {
        let bar = (!quiet && io::stderr().is_terminal()).then(|| display::new_bar("write back"));
        Draining { bar, most: 0 }
    }

    fn update(&mut self, status: &Status) {
        let Some(bar) = &self.bar else { return };
        // More may be written meanwhile.
        self.most = self.most.max(status.dirty);
        bar.set_length(self.most);
        bar.set_position(self.most - status.dirty);
        let changes = status.pending_operations + status.dirty_attributes;
        bar.set_message(match status.failing.first() {
            Some(failing) => plain(&format!("{}: {}", failing.path, failing.error), usize::MAX),
            None => report::hanging(status).unwrap_or_else(|| display::count(changes, "change")),
        });
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Says that a server does not answer, for which somebody waits.
fn still_waits(at: &Path, server: Option<u32>) {
    let at = display::name(at.as_os_str());
    eprintln!("ondeck cache: the cache at {at}: {}; still waiting", Silent { server });
}

fn ask_with_progress(instance: &Instance, at: &Path, order: &Order, quiet: bool) -> Result<Answer> {
    let mut draining = Draining::new(quiet);
    let (mut told, mut told_hanging) = (false, false);
    let mut conflicts = Vec::new();
    let answer = ask_and_wait(instance.socket(), order, &mut |news| {
        match news {
            News::Progress(status) => {
                draining.update(status);
                if let Some(hanging) = report::hanging(status).filter(|_| !told_hanging) {
                    told_hanging = true;
                    eprintln!("ondeck cache: {hanging}; still waiting");
                }
                conflicts.clone_from(&status.conflicts);
            }
            // Once: whoever reads it need not read it every ten seconds.
            News::Silence(server) if !told => {
                told = true;
                still_waits(at, server);
            }
            News::Silence(_) => {}
        }
        true
    });
    draining.end();
    if matches!(answer, Ok(Answer::Done)) && !conflicts.is_empty() {
        let lines: Vec<_> =
            conflicts.iter().map(|conflict| format!("\n  {}", report::told(conflict))).collect();
        let at = display::name(at.as_os_str());
        eprintln!(
            "ondeck cache: others have changed the directory behind {at} meanwhile; nothing of theirs is lost:{}",
            lines.concat()
        );
    }
    answer.map_err(|error| unanswered(instance, at, error))
}

fn flush(args: &FlushArgs) -> Result<u8> {
    let at = mount_point(&args.mount_point)?;
    let instance = cache_at(&caches()?, &at)?;
    Ok(conclude(ask_with_progress(&instance, &at, &Order::Flush, args.quiet)?))
}

fn unmount(args: &UnmountArgs) -> Result<u8> {
    let at = mount_point(&args.mount_point)?;
    let instance = cache_at(&caches()?, &at)?;
    // Who can't read it is told by the server that the cache is another user's.
    if let Ok(Some(Record { run: Some(run), .. })) = instance.record() {
        return Err(StartError::Refused(format!(
            "the cache at {} is run {run}'s: it ends with the run, or by `ondeck run --resume {run}`; `ondeck run --abandon \
             {run}` gives up what is not written back",
            at.display()
        ))
        .into());
    }
    let order = Order::Unmount { lose: args.force_lose };
    if args.force_lose {
        // Nobody is asked about what is not there.
        ask_or_find(&instance, &at)?;
        if !args.yes && !confirmed(&at)? {
            bail!("nothing was given up");
        }
    }
    let answer = match ask_with_progress(&instance, &at, &order, args.quiet) {
        Err(_) if is_lost(&instance)? => {
            must_be_root(&format!("unmount the cache at {}, because its server is dead", at.display()))?;
            let lost = what_is_lost(&instance);
            instance.abandon(&at).with_context(|| format!("can't unmount {}", at.display()))?;
            eprintln!(
                "ondeck cache: the store of the cache at {} was gone: {lost}",
                display::name(at.as_os_str())
            );
            return Ok(if args.force_lose { exit::ABANDONED } else { exit::FAILED });
        }
        Err(_) if is_dead(&instance)? => {
            must_be_root(&format!("unmount the cache at {}, because its server is dead", at.display()))?;
            if args.force_lose {
                instance.abandon(&at).with_context(|| format!("can't unmount {}", at.display()))?;
                Answer::Done
            } else {
                match revive(&instance) {
                    // Somebody else has begun one meanwhile, which can be asked.
                    Err(_) if !is_dead(&instance)? => {}
                    revived => drop(revived?),
                }
                match ask_with_progress(&instance, &at, &order, args.quiet) {
                    // It has ended by itself in this moment: a server that still had something would not have.
                    Err(_)
                        if instance.record().is_ok_and(|record| record.is_none())
                            && !instance.may_hold_data()? =>
                    {
                        Answer::Done
                    }
                    other => other?,
                }
            }
        }
        other => other?,
    };
    let code = conclude(answer);
    Ok(if code == exit::OK && args.force_lose { exit::ABANDONED } else { code })
}

/// Whether nobody answers for a cache, and nobody serves it.
fn is_unserved(instance: &Instance) -> Result<bool> {
    let refused = match std::os::unix::net::UnixStream::connect(instance.socket()) {
        Ok(_) => false,
        Err(error) => matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound),
    };
    Ok(refused && !instance.is_served().context("can't see whether the cache is served")?)
}

/// Whether a cache is there that nobody serves.
pub fn is_dead(instance: &Instance) -> Result<bool> {
    Ok(instance.has_store().context("can't read the table of mounts")? && is_unserved(instance)?)
}

/// Whether nobody serves a cache, its store is gone, and something still tells of it.
fn is_lost(instance: &Instance) -> Result<bool> {
    let look = "can't see what is left of the cache";
    Ok(!instance.has_store().context(look)?
        && instance.has_remains().context(look)?
        && is_unserved(instance)?)
}

/// What went with a store that is gone.
fn what_is_lost(instance: &Instance) -> String {
    match instance.record() {
        Ok(Some(record)) => {
            record.lost().unwrap_or_else(|| "it had nothing that was not written back".into())
        }
        Ok(None) | Err(_) => "what it had not written back is lost, and nothing tells what that was".into(),
    }
}

/// Starts a server that only writes back what a dead one has left.
pub fn revive(instance: &Instance) -> Result<()> {
    let record: Record = instance
        .record()
        .map_err(anyhow::Error::new)
        .and_then(|record| record.context("it is missing"))
        .with_context(|| {
            format!(
                "the record {} does not say to which directory what {} holds belongs: put it back, from a copy if there is one; \
                 or copy away what you need of the store, and give it up by `ondeck cache unmount --force-lose`",
                instance.record_path().display(),
                instance.store().display()
            )
        })?;
    start(&Plan::to_write_back(instance, record))?;
    Ok(())
}

fn ask_or_find(instance: &Instance, at: &Path) -> Result<()> {
    match ask_status(instance.socket()) {
        Ok(Answer::Failed { message, .. }) => bail!("{message}"),
        Ok(_) => Ok(()),
        Err(_) if is_dead(instance)? || is_lost(instance)? => Ok(()),
        Err(error) => Err(unanswered(instance, at, error)),
    }
}

fn confirmed(at: &Path) -> Result<bool> {
    let at = display::name(at.as_os_str());
    if !io::stdin().is_terminal() {
        bail!("this loses what the cache at {at} has not written back; say so with --yes");
    }
    print!("This loses what the cache at {at} has not written back. Write its mount point to go on: ");
    io::stdout().flush()?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim_end_matches('\n') == at)
}

fn status(args: &StatusArgs) -> Result<u8> {
    let caches = caches()?;
    let mut code = exit::OK;
    let mut problem = |text: String| {
        eprintln!("ondeck cache: {}", display::lines(&text));
        code = exit::FAILED;
    };
    let wanted = match &args.mount_point {
        Some(path) => vec![mount_point(path)?],
        None => all(&caches, &mut problem)?,
    };
    let mut found: Vec<Found> = Vec::new();
    for at in wanted {
        let instance = cache_at(&caches, &at)?;
        match ask_status(instance.socket()) {
            Ok(Answer::Report(report)) => found.push(Found::Serving { report, dead: false }),
            // Those of others are none of a user's own.
            Ok(Answer::Failed { message, .. }) if args.mount_point.is_none() && message == ANOTHER_USERS => {}
            Ok(Answer::Failed { message, .. }) => problem(format!("{}: {message}", at.display())),
            Ok(_) => problem(format!("the server of the cache at {} answers something else", at.display())),
            // Unmounted in this moment, or kept in another state directory.
            Err(error) if args.mount_point.is_none() && error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let record = instance.record().ok().flatten();
                match error.get_ref().and_then(|error| error.downcast_ref::<Silent>()) {
                    Some(silent) => found.push(Found::without_report(&at, record, silent.server, false)),
                    None if error.kind() == io::ErrorKind::ConnectionRefused => {
                        found.push(Found::without_report(&at, record, None, true));
                    }
                    None => {}
                }
                problem(format!("{:#}", unanswered(&instance, &at, error)));
            }
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&found)?);
    } else if args.metrics {
        print!("{}", report::metrics(&found));
    } else if found.is_empty() && code == exit::OK {
        println!("no caches");
    } else {
        for report in found.iter().filter_map(Found::report) {
            print!("{}", report::text(report));
        }
    }
    Ok(code)
}

/// The mount points of all caches: those that are mounted, and, for root, those that are only left. Of which can't be told
/// where it is, that is a problem.
fn all(caches: &Caches, problem: &mut dyn FnMut(String)) -> Result<Vec<PathBuf>> {
    let mut all = Caches::mounted().context("can't read the table of mounts")?;
    let mounted: Vec<String> = all
        .iter()
        .map(|at| cache_at(caches, at).map(|instance| instance.id().to_owned()))
        .collect::<Result<_>>()?;
    if rustix::process::geteuid().is_root() {
        for instance in caches.all().with_context(|| format!("can't read {}", caches.base().display()))? {
            let is_mounted = mounted.iter().any(|id| id == instance.id());
            if is_mounted || !instance.has_store().context("can't read the table of mounts")? {
                continue;
            }
            match instance.record() {
                Ok(Some(record)) => all.push(record.mount_point),
                Ok(None) if instance.may_hold_data().context("can't look into a store")? => problem(format!(
                    "the record {} is missing: nobody can say where the cache was, whose store {} may hold data that nobody else \
                     has. Put the record back; or copy away what you need of the store, and `umount` it",
                    instance.record_path().display(),
                    instance.store().display()
                )),
                Ok(None) => {}
                Err(error) => problem(damaged(&instance, &error)),
            }
        }
    }
    all.sort();
    all.dedup();
    Ok(all)
}
