//! `ondeck`, the command.
//!
//! # Layout
//!
//! - `run`: `ondeck run`, the life of a job on this machine
//! - `stage`: `ondeck stage`, the staging engine by hand, and archives by its `--pack`, `--unpack` and `--list`
//! - `cache`: `ondeck cache`, the transparent cache of a directory
//! - `ramdisk`: `ondeck ramdisk`, RAM disks of many nodes; `agent`: `ondeck agent`, what runs on each of them
//! - `task`: what the agent runs as the user: staging, and users' scripts
//! - `layout`: `ondeck layout`, how files are striped over disks
//! - `simulate`: `ondeck simulate`, what an accelerator would do for a site
//! - `cluster`: the scheduler, `ondeck serve`, and the commands that ask it
//! - `doctor`: what works on this machine
//! - `gate`: is the RAM disk whole that is copied from?
//! - `display`: progress bars, plain lines and JSON events
//! - `inherited`: what a daemon was started with
//! - `state`: where manifests and the state of runs are kept

/// Says something on standard error. What nobody hears changes nothing: std's macro of this name would panic, and a run, a
/// hook or a daemon goes on.
macro_rules! eprintln {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

/// Says something on standard output. What can't be written there is told, and never panics.
macro_rules! println {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        crate::heard(writeln!(std::io::stdout(), $($words)*))
    }};
}

/// The same, without an end of the line.
macro_rules! print {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        crate::heard(write!(std::io::stdout(), $($words)*))
    }};
}

mod agent;
mod cache;
mod cluster;
mod display;
mod doctor;
mod gate;
mod inherited;
mod layout;
mod ramdisk;
mod run;
mod simulate;
mod stage;
mod state;
mod task;

use std::io;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Parser, Subcommand};
use ondeck_core::exit;

/// Lends a job RAM as a filesystem: fills it before the program starts, shows it at the paths the program already
/// uses, and brings the results back to disk, verified.
#[derive(Parser)]
#[command(version, max_term_width = 110, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "Examples:
  ondeck run --data-in in --data-out out -- ./solver   run a program with its data in RAM
  ondeck run job.sh                                    a batch script with #RSA_ lines
  ondeck stage /scratch/case /dev/shm/case             copy a tree, with checksums
  ondeck ramdisk create fast --nodes n1,n2 --size 8GiB --mount n3:/fast   a RAM disk of two nodes
  ondeck cache mount --backing /shared/case --capacity 8GiB /mnt/fast   a directory through a cache in RAM
  ondeck layout show /scratch/case                     over how many disks its files are spread
  ondeck simulate trace.swf --rsa-nodes 0,8,16         what an accelerator would do for the jobs of a log
  ondeck doctor                                        what works on this machine
  ondeck COMMAND --help                                all options of a command, with examples";

#[derive(Subcommand)]
enum Command {
    Run(Box<run::RunArgs>),
    Stage(Box<stage::StageArgs>),
    Ramdisk(Box<ramdisk::RamdiskArgs>),
    Cache(cache::CacheArgs),
    Layout(layout::LayoutArgs),
    Simulate(Box<simulate::SimulateArgs>),
    Agent(agent::AgentArgs),
    Serve(cluster::serve::ServeArgs),
    Status(cluster::status::StatusArgs),
    Job(cluster::job::JobArgs),
    Wait(cluster::job::WaitArgs),
    Node(cluster::node::NodeArgs),
    Pool(cluster::pool::PoolArgs),
    Prolog(cluster::hook::PrologArgs),
    Epilog(cluster::hook::EpilogArgs),
    #[command(name = "burst-buffer")]
    BurstBuffer(cluster::burst_buffer::BurstBufferArgs),
    Doctor(doctor::DoctorArgs),
    /// For the agent only
    #[command(hide = true)]
    TaskRunner,
    /// For the agent only
    #[command(hide = true)]
    JobHolder,
    /// For `ondeck cache mount` only
    #[command(hide = true)]
    CacheServer,
}

impl Command {
    /// Whether it does nothing but what its reader wants to see, and ends with it. What runs a job or serves others goes on.
    fn ends_with_its_reader(&self) -> bool {
        match self {
            Command::Run(args) => args.only_lists(),
            Command::Agent(args) => args.only_checks(),
            Command::Serve(args) => args.only_tells(),
            // Others of its commands change something, and say how that went.
            Command::Cache(args) => args.only_shows(),
            Command::Layout(args) => args.only_shows(),
            Command::Stage(_)
            | Command::Ramdisk(_)
            | Command::Status(_)
            | Command::Job(_)
            | Command::Wait(_)
            | Command::Node(_)
            | Command::Pool(_)
            | Command::Doctor(_)
            | Command::Simulate(_) => true,
            // Their exit code is 0 whoever reads them.
            Command::Prolog(_) | Command::Epilog(_) | Command::BurstBuffer(_) => false,
            Command::TaskRunner | Command::JobHolder | Command::CacheServer => false,
        }
    }
}

impl Command {
    /// The exit code if nothing failed but that what was to be printed could not be.
    fn unheard(&self) -> u8 {
        match self {
            Command::Run(args) if args.only_lists() => exit::NOT_STARTED,
            Command::Stage(args) if args.only_prints() => exit::STAGE_FAILED,
            // What they print says what they have done, and that is done.
            Command::Run(_) | Command::Stage(_) | Command::Prolog(_) | Command::Epilog(_) => exit::OK,
            _ => exit::FAILED,
        }
    }
}

/// Whether something could not be written to standard output.
static UNHEARD: AtomicBool = AtomicBool::new(false);

/// Tells, once, that standard output can't be written, as on a full disk. A reader that has closed it has seen enough.
fn heard(written: io::Result<()>) {
    if let Err(error) = written
        && error.kind() != io::ErrorKind::BrokenPipe
        && !UNHEARD.swap(true, Ordering::Relaxed)
    {
        eprintln!("ondeck: can't write to standard output: {error}");
    }
}

/// Has a signal end this process when what it prints to is closed, as head(1) does. Rust ignores that signal, and printing
/// would panic.
fn end_with_the_reader() {
    // SAFETY: no other thread exists yet, and the default action is no function of this program.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // --help and --version are "errors" too, of exit code 0 and on standard output.
            let code = if error.use_stderr() { exit::USAGE } else { exit::OK };
            // Nothing can be done about a closed standard error.
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    if cli.command.ends_with_its_reader() {
        end_with_the_reader();
    }
    if let Command::Agent(_)
    | Command::Serve(_)
    | Command::TaskRunner
    | Command::JobHolder
    | Command::CacheServer = cli.command
    {
        inherited::close_descriptors();
    }
    let unheard = cli.command.unheard();
    let code = match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Stage(args) => stage::stage(&args),
        Command::Ramdisk(args) => ramdisk::ramdisk(*args),
        Command::Cache(args) => cache::cache(&args),
        Command::Layout(args) => layout::layout(&args),
        Command::Simulate(args) => simulate::simulate(&args),
        Command::Agent(args) => agent::agent(&args),
        Command::Serve(args) => cluster::serve::serve(&args),
        Command::Status(args) => cluster::status::status(&args),
        Command::Job(args) => cluster::job::job(&args),
        Command::Wait(args) => cluster::job::wait(&args),
        Command::Node(args) => cluster::node::node(&args),
        Command::Pool(args) => cluster::pool::pool(&args),
        Command::Prolog(args) => cluster::hook::prolog(&args),
        Command::Epilog(args) => cluster::hook::epilog(&args),
        Command::BurstBuffer(args) => cluster::burst_buffer::burst_buffer(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::TaskRunner => task::run(),
        Command::JobHolder => ondeck_agent::freeze::holder::hold(),
        Command::CacheServer => cache::serve(),
    };
    if code == ExitCode::SUCCESS && UNHEARD.load(Ordering::Relaxed) { ExitCode::from(unheard) } else { code }
}
