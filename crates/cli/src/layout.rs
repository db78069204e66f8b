//! `ondeck layout`: over how many disks the files of a directory are spread, and over how many they should be. `history` has what
//! earlier runs have left.

mod history;

use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ondeck_core::text::plain;
use ondeck_core::{Bytes, exit};
use ondeck_layout::beegfs::{StripePattern, Version};
use ondeck_layout::census::{Census, Guess};
use ondeck_layout::ceph::{ATTRIBUTE, DirLayout};
use ondeck_layout::job::{JobSize, Known, Source, by_what_is_known};
use ondeck_layout::lfs::{Setstripe, setstripe};
use ondeck_layout::{
    Advice, Filesystem, Layout, Load, Pattern, Place, Placement, Rules, Site, StripeCount, Tool, Workload,
};
use ondeck_staging::layout::{Shown, Standing, StripedDirectory};
use ondeck_transfer::survey::{Descend, survey};
use rustix::fs::{FileType, Mode, OFlags};
use serde_json::json;

/// Choose, show and set how files are striped over the disks of a parallel filesystem
///
/// A layout belongs to a directory; files that are made there later have it, and those that are there keep theirs.
/// docs/layout.md explains striping in a page.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct LayoutArgs {
    #[command(subcommand)]
    command: LayoutCommand,
}

const EXAMPLES: &str = "Examples:
  ondeck layout advise --nodes 64 --tasks 2048 --pattern shared --size 200GiB
  ondeck layout auto --pattern shared /scratch/case    in a job, before a step
  ondeck layout advise --nodes 64 --tasks 2048 --like /scratch/case/run-1
  ondeck layout advise --nodes 64 --tasks 2048 --program solver --directory /scratch/case/run-2
  ondeck layout history /scratch/case/run-1            what your earlier jobs have left there
  ondeck layout show /scratch/case
  ondeck layout set /scratch/case \"-E 1G -c 1 -E 10G -c 8 -E -1 -c 72\"
  ondeck layout check \"-E 16M -c 1 -E -1 -c 4\"

Exit codes:
  0    done
  1    a layout or the history could not be read, or not be changed; nothing was changed, or the
       message says what the directory has now
  2    wrong usage, or no layout: nothing was changed";

#[derive(Subcommand)]
enum LayoutCommand {
    Advise(Box<AdviseArgs>),
    Auto(Box<AutoArgs>),
    Show(ShowArgs),
    Set(SetArgs),
    Check(CheckArgs),
    History(history::HistoryArgs),
    Forget(history::ForgetArgs),
}

/// Say which layout the files of a job should have, and why
#[derive(Args)]
struct AdviseArgs {
    #[command(flatten)]
    job: JobArgs,

    /// The directory that it writes to [default: the first filesystem of the site's file]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Give new files of a directory the layout that suits a job, or a step of it
///
/// Before a step, in the job's script. A layout that somebody has chosen for the directory stays, and so does everything if
/// something fails: the exit code is 0 then, too, so that the job goes on.
#[derive(Args)]
struct AutoArgs {
    #[command(flatten)]
    job: JobArgs,

    /// Set it also if somebody has chosen another layout for the directory
    #[arg(long)]
    replace: bool,

    /// The directory that the step writes to
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// What is known of a job's files, and by what to decide.
#[derive(Args)]
struct JobArgs {
    /// How many nodes use the files [default: in a job of Slurm all of its own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    nodes: Option<u32>,

    /// How many processes, on all nodes together [default: those of the job, else one on each node]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tasks: Option<u32>,

    /// How they use files: `shared`: all of them one file; `file-per-process`: each its own; `single`: one of them
    /// reads and writes; `unknown` [default: unknown, or what --like or --program says]
    #[arg(long, value_name = "PATTERN", value_parser = parse_pattern)]
    pattern: Option<Pattern>,

    /// A directory with the results of an earlier run of as many processes: the names and sizes there say what is not
    /// said here
    #[arg(long, value_name = "DIR")]
    like: Option<PathBuf>,

    /// The program: where --pattern and --like say nothing, your earlier jobs that have run it count, in a directory of this name if
    /// one is named; else what programs of this name do
    #[arg(long, value_name = "NAME")]
    program: Option<String>,

    /// The configuration, to ask for earlier jobs [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE", requires = "program")]
    config: Option<PathBuf>,

    /// The size of its large files, like 200GiB
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,

    /// How many files it has open at a time [default: one of each process with file-per-process, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    files: Option<u64>,

    /// The size of its median file: what is smaller stays on one disk
    #[arg(long, value_name = "SIZE")]
    median: Option<Bytes>,

    /// What it writes at a time, like 4MiB
    #[arg(long, value_name = "SIZE")]
    write_size: Option<Bytes>,

    /// How busy the disks are, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    load: u8,

    #[command(flatten)]
    site: SiteArgs,

    /// `tuned`, `thesis` (those of the report that this began with), or a file of rules
    #[arg(long, value_name = "RULES", default_value = "tuned")]
    rules: PathBuf,
}

/// Show the layout that new files of a directory get
#[derive(Args)]
struct ShowArgs {
    /// The directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    #[command(flatten)]
    site: SiteArgs,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Give new files of a directory a layout; those that are there keep theirs
#[derive(Args)]
struct SetArgs {
    /// The directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// The layout, as options of `lfs setstripe`, in one word: "-E 16M -c 1 -E -1 -c 4". CephFS and BeeGFS get its last
    /// component
    #[arg(value_name = "OPTIONS", allow_hyphen_values = true)]
    options: String,

    #[command(flatten)]
    site: SiteArgs,
}

/// Say whether options describe a layout, and what they mean
#[derive(Args)]
struct CheckArgs {
    /// Options of `lfs setstripe`, in one word: "-E 16M -c 1 -E -1 -c 4"
    #[arg(value_name = "OPTIONS", allow_hyphen_values = true)]
    options: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct SiteArgs {
    /// The file that says what the site's filesystems and nodes can do [default: /etc/ondeck/site.toml if it is there]
    #[arg(long = "site", value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Where the site's file is, unless somebody says otherwise.
const SITE: &str = "/etc/ondeck/site.toml";

fn parse_pattern(text: &str) -> Result<Pattern, String> {
    match text {
        "shared" => Ok(Pattern::Shared),
        "file-per-process" => Ok(Pattern::FilePerProcess),
        "single" => Ok(Pattern::Single),
        "unknown" => Ok(Pattern::Unknown),
        _ => Err("write shared, file-per-process, single or unknown".to_owned()),
    }
}

impl LayoutArgs {
    /// Whether it ends when it has told what it was asked for.
    pub fn only_shows(&self) -> bool {
        !matches!(self.command, LayoutCommand::Set(_) | LayoutCommand::Auto(_) | LayoutCommand::Forget(_))
    }
}

/// Runs the command.
pub fn layout(args: &LayoutArgs) -> ExitCode {
    let result = match &args.command {
        LayoutCommand::Advise(args) => advise(args),
        LayoutCommand::Auto(args) => auto(args),
        LayoutCommand::Show(args) => show(args),
        LayoutCommand::Set(args) => set(args),
        LayoutCommand::Check(args) => check(args),
        LayoutCommand::History(args) => history::history(args).map_err(failed),
        LayoutCommand::Forget(args) => history::forget(args).map_err(failed),
    };
    match result {
        Ok(()) => ExitCode::from(exit::OK),
        Err(Failure { code, error }) => {
            eprintln!("ondeck layout: {error:#}");
            ExitCode::from(code)
        }
    }
}

/// An error, with what it ends with.
struct Failure {
    code: u8,
    error: anyhow::Error,
}

/// What is wrong with what was asked for.
fn refused(error: impl Into<anyhow::Error>) -> Failure {
    Failure { code: exit::USAGE, error: error.into() }
}

fn failed(error: impl Into<anyhow::Error>) -> Failure {
    Failure { code: exit::FAILED, error: error.into() }
}

impl SiteArgs {
    /// The site's file; nothing if there is none, and none was named.
    fn read(&self) -> Result<Option<Site>> {
        match &self.file {
            None => Ok(Site::read(Path::new(SITE))?),
            Some(file) => {
                let site = Site::read(file)?;
                Ok(Some(
                    site.with_context(|| {
                        format!("can't read {}: No such file or directory", file.display())
                    })?,
                ))
            }
        }
    }
}

fn read_rules(name: &Path) -> Result<Rules> {
    match name.to_str() {
        Some("tuned") => Ok(Rules::tuned()),
        Some("thesis") => Ok(Rules::thesis()),
        _ => {
            let text = fs::read_to_string(name).with_context(|| {
                format!("{} is neither `tuned` nor `thesis`, and no file that can be read", name.display())
            })?;
            Rules::parse(&text).with_context(|| name.display().to_string())
        }
    }
}

/// What was decided, by which rules, for which filesystem.
struct Decision {
    advice: Advice,
    rules: Rules,
    filesystem: Filesystem,
    /// Where an earlier run was looked at, and what was seen.
    like: Option<(PathBuf, Guess)>,
    /// What was known by the name of the program, if that was asked for.
    known: Option<Source>,
}

/// What the files below a directory say of how `tasks` processes have used them.
fn look_at(directory: &Path, tasks: u32) -> Result<Guess> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(directory, flags, Mode::empty())
        .with_context(|| format!("can't open the directory {}", directory.display()))?;
    let mut census = Census::default();
    survey(root.as_fd(), &mut |visit| {
        if FileType::from_raw_mode(visit.stat.st_mode) == FileType::RegularFile {
            census.add(visit.path, Bytes(u64::try_from(visit.stat.st_size).unwrap_or(0)));
        }
        Ok(Descend::Yes)
    })
    .map_err(|(path, error)| {
        let path = directory.join(OsStr::from_bytes(&path));
        anyhow::Error::new(error).context(format!("can't look at {}", path.display()))
    })?;
    Ok(census.guess(tasks))
}

/// A number that Slurm tells a job.
fn of_the_job(variable: &str) -> Option<u32> {
    std::env::var(variable).ok()?.parse().ok().filter(|number| *number > 0)
}

impl JobArgs {
    fn decide(&self, directory: Option<&Path>) -> Result<Decision> {
        let nodes = self.nodes.or_else(|| of_the_job("SLURM_JOB_NUM_NODES"));
        let nodes = nodes.context("say by --nodes how many nodes use the files: this is no job of Slurm")?;
        // Those of the job are on all of its nodes.
        let tasks = self.tasks.or_else(|| of_the_job("SLURM_NTASKS").filter(|_| self.nodes.is_none()));
        let site = self.site.read()?.with_context(|| {
            format!(
                "there is no {SITE}, so nothing is known of the filesystems: name a site's file by --site"
            )
        })?;
        let rules = read_rules(&self.rules)?;
        let filesystem = filesystem_of(&site, directory)?;
        let guess = self.like.as_deref().map(|like| look_at(like, tasks.unwrap_or(nodes))).transpose()?;
        let seen = guess.as_ref();
        // What was said of the pattern, and what was seen of another one, would not fit together.
        let is_seen = seen.filter(|guess| self.pattern.is_none_or(|pattern| pattern == guess.pattern));
        let known = self.known_of_program(directory, &site);
        let known_job = known.as_ref().map(|source| source.workload(JobSize { nodes, tasks }));
        let of_known = known_job.as_ref();
        let pattern = seen.map(|guess| guess.pattern).or(of_known.map(|known| known.pattern));
        let workload = Workload {
            nodes,
            tasks,
            pattern: self.pattern.or(pattern).unwrap_or(Pattern::Unknown),
            size: self.size.or(seen.and_then(|guess| guess.size)).or(of_known.and_then(|known| known.size)),
            files: self
                .files
                .or(is_seen.and_then(|guess| guess.files))
                .or(of_known.and_then(|known| known.files)),
            write_size: self.write_size,
            median: self
                .median
                .or(seen.and_then(|guess| guess.median))
                .or(of_known.and_then(|known| known.median)),
        };
        let load = Load::new(f64::from(self.load) / 100.0);
        let advice = rules.advise(Place { filesystem, nodes: &site.nodes, load }, &workload)?;
        let like = self.like.clone().zip(guess);
        Ok(Decision { advice, filesystem: filesystem.clone(), rules, like, known })
    }

    /// What is known of the files of the program that was named, where nothing else says it. Without a scheduler that is only what
    /// programs of this name do.
    fn known_of_program(&self, directory: Option<&Path>, site: &Site) -> Option<Source> {
        let program = self.program.as_deref().filter(|_| self.pattern.is_none() && self.like.is_none())?;
        let history = history::recall_of(self.config.as_deref(), program, directory);
        let history = history.unwrap_or_else(|error| {
            eprintln!("ondeck layout: earlier jobs do not count, as the history can't be read: {error:#}");
            None
        });
        Some(by_what_is_known(
            Known { history: history.as_ref(), program: Some(program), ..Known::default() },
            Some(site),
        ))
    }
}

fn advise(args: &AdviseArgs) -> Result<(), Failure> {
    let Decision { advice, rules, filesystem, like, known } =
        args.job.decide(args.directory.as_deref()).map_err(refused)?;
    if args.json {
        println!("{}", advice_json(&advice, &filesystem, &rules, like.as_ref(), known.as_ref()));
        return Ok(());
    }
    let options = setstripe::options(&advice.layout).join(" ");
    println!("{options}");
    println!();
    print_components(&advice.layout);
    println!("  at most        {}, all processes together", advice.bandwidth);
    println!();
    println!("Why, by the rules `{}`, on {}:", plain(&rules.name, 40), filesystem.path.display());
    if let Some((directory, guess)) = &like {
        println!("  - {}: {}", directory.display(), guess.reason);
    }
    if let Some(known) = &known {
        println!("  - from {known}");
    }
    for reason in &advice.reasons {
        println!("  - {reason}");
    }
    println!();
    println!("To set it: ondeck layout set DIR \"{options}\"");
    Ok(())
}

fn auto(args: &AutoArgs) -> Result<(), Failure> {
    let path = args.directory.display();
    match choose_and_set(args) {
        Ok(Outcome::Set(decision)) => {
            let options = setstripe::options(&decision.advice.layout).join(" ");
            println!("{path}: {options}, for at most {}", decision.advice.bandwidth);
        }
        Ok(Outcome::Has(options)) => println!("{path}: has {options} already"),
        Ok(Outcome::Chosen(native)) => {
            println!(
                "{path}: keeps the layout that somebody has chosen for it ({native}); --replace sets another one"
            );
        }
        // The step works with what there is.
        Err(error) => eprintln!("ondeck layout: the layout of {path} stays as it is: {error:#}"),
    }
    Ok(())
}

/// What became of a directory.
enum Outcome {
    Set(Box<Decision>),
    Has(String),
    Chosen(String),
}

fn choose_and_set(args: &AutoArgs) -> Result<Outcome> {
    let decision = args.job.decide(Some(&args.directory))?;
    let layout = &decision.advice.layout;
    let site = args.job.site.read()?;
    let directory = open(&args.directory, site.as_ref())?;
    let targets = Some(decision.filesystem.targets);
    match directory.standing(layout, targets)? {
        Standing::Has => return Ok(Outcome::Has(setstripe::options(layout).join(" "))),
        Standing::Chosen if !args.replace => return Ok(Outcome::Chosen(directory.show()?.native)),
        Standing::Chosen | Standing::Free => {}
    }
    directory.set(layout, targets)?;
    if let Err(error) = directory.mark() {
        eprintln!("ondeck layout: a later step won't set another layout without --replace: {error}");
    }
    Ok(Outcome::Set(Box::new(decision)))
}

fn filesystem_of<'a>(site: &'a Site, directory: Option<&Path>) -> Result<&'a Filesystem> {
    match directory {
        Some(directory) => {
            let real = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
            site.filesystem_of(&real)
                .with_context(|| format!("{} is on none of the site's filesystems", directory.display()))
        }
        None => site.filesystems.first().context("the site's file names no filesystem"),
    }
}

fn advice_json(
    advice: &Advice,
    filesystem: &Filesystem,
    rules: &Rules,
    like: Option<&(PathBuf, Guess)>,
    known: Option<&Source>,
) -> serde_json::Value {
    json!({
        "from": known.map(ToString::to_string),
        "like": like.map(|(directory, guess)| json!({
            "directory": directory,
            "pattern": guess.pattern.to_string(),
            "files": guess.files,
            "size": guess.size,
            "median": guess.median,
            "reason": guess.reason.to_string(),
        })),
        "options": setstripe::options(&advice.layout),
        "components": components_json(&advice.layout),
        "bandwidth": advice.bandwidth.0,
        "rules": rules.name,
        "filesystem": filesystem.path,
        "reasons": advice.reasons.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn open(directory: &Path, site: Option<&Site>) -> Result<StripedDirectory> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened: OwnedFd = rustix::fs::open(directory, flags, Mode::empty())
        .with_context(|| format!("can't open the directory {}", directory.display()))?;
    let real = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    let tool = site.and_then(|site| site.filesystem_of(&real)).map(|filesystem| filesystem.kind);
    Ok(StripedDirectory::of(opened, directory, tool)?)
}

fn show(args: &ShowArgs) -> Result<(), Failure> {
    let site = args.site.read().map_err(refused)?;
    let directory = open(&args.directory, site.as_ref()).map_err(failed)?;
    let shown = directory.show().map_err(failed)?;
    if args.json {
        let layout = shown.layout.as_ref();
        println!(
            "{}",
            json!({
                "directory": args.directory,
                "filesystem": directory.tool().to_string(),
                "options": layout.map(setstripe::options),
                "components": layout.map(components_json),
                "native": shown.native,
            })
        );
    } else {
        print_shown(&args.directory, directory.tool(), &shown);
    }
    Ok(())
}

fn set(args: &SetArgs) -> Result<(), Failure> {
    let layout = parse(&args.options).map_err(refused)?;
    let site = args.site.read().map_err(refused)?;
    let directory = open(&args.directory, site.as_ref()).map_err(failed)?;
    let real = fs::canonicalize(&args.directory).unwrap_or_else(|_| args.directory.clone());
    let filesystem = site.as_ref().and_then(|site| site.filesystem_of(&real));
    let shown = directory.set(&layout, filesystem.map(|filesystem| filesystem.targets)).map_err(failed)?;
    print_shown(&args.directory, directory.tool(), &shown);
    Ok(())
}

fn check(args: &CheckArgs) -> Result<(), Failure> {
    let layout = parse(&args.options).map_err(refused)?;
    let options = setstripe::options(&layout);
    if args.json {
        println!("{}", json!({ "options": options, "components": components_json(&layout) }));
        return Ok(());
    }
    print_components(&layout);
    println!();
    match Setstripe::parse(&options.join(" ")) {
        Ok(_) => println!("Lustre    lfs setstripe {} DIR", options.join(" ")),
        Err(error) => println!("Lustre    {error}"),
    }
    let Placement::Striped { count, .. } = layout.last().placement else { return Ok(()) };
    if let StripeCount::Of(count) = count {
        match DirLayout::of(&layout, count.into()) {
            Ok(found) => println!("CephFS    setfattr -n {ATTRIBUTE} -v \"{found}\" DIR"),
            Err(error) => println!("CephFS    {error}"),
        }
        let pattern = StripePattern::of(&layout, count.into()).map_err(refused)?;
        match pattern.arguments(Version::Eight) {
            Ok(words) => println!("BeeGFS    beegfs {} DIR", words.join(" ")),
            Err(error) => println!("BeeGFS    {error}"),
        }
    } else {
        println!("CephFS and BeeGFS are told a number of targets, which the site's file has.");
    }
    Ok(())
}

fn parse(options: &str) -> Result<Layout> {
    let words = options.trim();
    if words.starts_with("lfs ") {
        bail!("write the options alone, without `lfs setstripe` and without the directory");
    }
    Ok(Setstripe::parse_of_any(words)?.layout()?)
}

fn print_shown(directory: &Path, tool: Tool, shown: &Shown) {
    println!("{} ({tool})", directory.display());
    match &shown.layout {
        Some(layout) => print_components(layout),
        None => println!("  nothing of its own: as the directory above it, or the filesystem"),
    }
    println!("  {}", plain(&shown.native, 400));
}

/// A line each.
fn print_components(layout: &Layout) {
    let is_one = layout.components().len() == 1;
    for component in layout.components() {
        let range = match component.end {
            Some(end) => format!("up to {end}"),
            None if is_one => "whole files".to_owned(),
            None => "the rest".to_owned(),
        };
        let what = match &component.placement {
            Placement::Metadata => "with the metadata".to_owned(),
            Placement::Striped { count, stripe_size, pool } => {
                let pool = pool.as_ref().map_or(String::new(), |pool| format!(", of pool {pool}"));
                format!("{count}, stripes of {stripe_size}{pool}")
            }
        };
        println!("  {range:<14} {what}");
    }
}

fn components_json(layout: &Layout) -> serde_json::Value {
    let component = |component: &ondeck_layout::Component| match &component.placement {
        Placement::Metadata => json!({ "end": component.end, "metadata": true }),
        Placement::Striped { count, stripe_size, pool } => {
            let (count, kind) = match count {
                StripeCount::Of(count) => (Some(u32::from(*count)), "targets"),
                StripeCount::All => (None, "all"),
                StripeCount::Overstriped(count) => (Some(u32::from(*count)), "overstriped"),
                StripeCount::PerTarget(count) => (Some(u32::from(*count)), "per-target"),
            };
            let pool = pool.as_ref().map(ToString::to_string);
            json!({ "end": component.end, "count": count, "over": kind, "stripe_size": stripe_size, "pool": pool })
        }
    };
    layout.components().iter().map(component).collect()
}
