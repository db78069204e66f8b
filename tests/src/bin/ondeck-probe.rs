//! `ondeck-probe`: what the conformance suite runs inside a host, as the user whose view is wanted.
//!
//! `posix` tries on a directory what programs expect of a filesystem; `call` speaks to an agent, also as nobody should;
//! `cover`, `uncover` and `steps` drive agents as the scheduler does; `exchange` swaps directories as fast as it can;
//! `steal` takes what the user's processes have open; `mute` is a user's filesystem that never answers, and
//! `hide-environment` a process that lies in it.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use ondeck_api::envelope;
use ondeck_api::munge::Munge;
use ondeck_api::wire::{Authority, Overmount, Step, StepDone, StepRequest};
use ondeck_api::{Client, Config, Endpoint};
use ondeck_core::allocation::JobTag;
use ondeck_core::{Bytes, EngineKind, Layout, NodeName, Owner};
use ondeck_fleet::{Fleet, NodeFault, Plan, Size};
use ondeck_ramdisk::Secret;
use ondeck_testbed::mute;
use rustix::fs::{Advice, FallocateFlags, FlockOperation, XattrFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd};

/// Looks at a filesystem or an agent from inside a host, for the conformance suite.
#[derive(Parser)]
struct Arguments {
    /// The scheduler's authority that orders carry, as JSON.
    #[arg(long, global = true)]
    authority: Option<String>,
    #[command(subcommand)]
    action: ProbeCommand,
}

#[derive(Subcommand)]
enum ProbeCommand {
    /// Try on a directory what programs expect of a filesystem; prints what does not hold.
    Posix {
        /// An empty directory of the caller's.
        directory: PathBuf,
        /// The least size that statfs must show.
        #[arg(long)]
        size: u64,
        /// Checks that need not hold.
        #[arg(long)]
        without: Vec<String>,
    },
    /// Send a request to an agent; prints the status, then the body.
    Call {
        /// `ADDRESS:PORT`, or the path of a Unix socket.
        #[arg(long)]
        agent: String,
        /// The name of the agent's node.
        #[arg(long)]
        to: String,
        #[arg(long)]
        munge: PathBuf,
        #[arg(long, default_value = "GET")]
        method: String,
        #[arg(long)]
        path: String,
        /// A file with the body.
        #[arg(long)]
        body: Option<PathBuf>,
        /// The credential that goes along.
        #[arg(long, value_enum, default_value = "good")]
        credential: Kind,
    },
    /// Build a RAM disk for a job, as the scheduler does; prints its layout.
    Build {
        #[arg(long)]
        config: PathBuf,
        #[arg(long)]
        engine: String,
        #[arg(long, value_delimiter = ',')]
        nodes: Vec<NodeName>,
        /// The job, as JSON; its name is that of the RAM disk.
        job: String,
    },
    /// Cover directories of nodes with a RAM disk, as the scheduler does.
    Cover {
        #[arg(long)]
        config: PathBuf,
        /// A file with the RAM disk's layout.
        #[arg(long)]
        layout: PathBuf,
        /// A file with its secret.
        #[arg(long)]
        secret: PathBuf,
        #[arg(long, value_delimiter = ',')]
        nodes: Vec<NodeName>,
        /// The covers, as JSON.
        covers: String,
    },
    /// Take a RAM disk away from all that it covers on nodes.
    Uncover {
        #[arg(long)]
        config: PathBuf,
        #[arg(long)]
        layout: PathBuf,
        #[arg(long, value_delimiter = ',')]
        nodes: Vec<NodeName>,
        #[arg(long)]
        force: bool,
        /// Unmount it there as well.
        #[arg(long)]
        leave: bool,
    },
    /// Have one node take steps, written as JSON, one after the other until one fails.
    Steps {
        #[arg(long)]
        config: PathBuf,
        #[arg(long)]
        layout: PathBuf,
        #[arg(long)]
        secret: PathBuf,
        #[arg(long)]
        node: NodeName,
        /// Begin again and again for so long, whatever fails; prints how often the last step was done.
        #[arg(long, default_value = "0")]
        seconds: u64,
        /// After so long the node removes what is not complete.
        #[arg(long)]
        lease_ms: Option<u64>,
        steps: Vec<String>,
    },
    /// Exchange two names again and again, until it is killed.
    Exchange { one: PathBuf, other: PathBuf },
    /// Take every descriptor of every process that lets this one, again and again until it is killed. Prints what each
    /// leads to, once.
    Steal,
    /// Mount a filesystem of a user's that never answers, and serve it until it is killed.
    Mute {
        directory: PathBuf,
        /// What it says that it was mounted from.
        #[arg(long, default_value = "mute")]
        source: String,
        #[arg(long)]
        uid: u32,
        /// Everybody may come in, and hang.
        #[arg(long)]
        allow_other: bool,
        /// It has a file, which can be opened and not be read.
        #[arg(long)]
        names: bool,
    },
    /// Put pages of a file in the place of this process's environment, and wait to be killed.
    HideEnvironment { file: PathBuf },
    /// Open a file that the kernel closes in `execve`, and run `sleep`: with a filesystem that never answers, it never does.
    Stick { file: PathBuf },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Good,
    /// No header at all.
    None,
    /// Not a credential.
    Garbage,
    /// One that was used before.
    Replayed,
    /// One that was made for another node.
    Foreign,
    /// One that was made for another daemon of the node.
    OtherPort,
    /// One of a former client, which names no port.
    Former,
    /// One that was made for another body.
    Altered,
    /// One that was made for another path.
    Elsewhere,
    /// A good credential of MUNGE with something else in it.
    Other,
    /// A good one, from a port that anybody can use.
    Relayed,
}

fn main() -> ExitCode {
    let Arguments { authority, action } = Arguments::parse();
    let authority = authority.as_deref();
    let done = match action {
        ProbeCommand::Posix { directory, size, without } => posix(&directory, size, &without),
        ProbeCommand::Call { agent, to, munge, method, path, body, credential } => {
            call(&agent, &to, &munge, &method, &path, body.as_deref(), credential, authority)
        }
        ProbeCommand::Cover { config, layout, secret, nodes, covers } => {
            cover(&config, authority, &layout, &secret, &nodes, &covers)
        }
        ProbeCommand::Uncover { config, layout, nodes, force, leave } => {
            uncover(&config, authority, &layout, &nodes, force, leave)
        }
        ProbeCommand::Steps { config, layout, secret, node, seconds, lease_ms, steps } => {
            take_steps(&config, &layout, &secret, &node, Duration::from_secs(seconds), lease_ms, &steps)
        }
        ProbeCommand::Build { config, engine, nodes, job } => build(&config, authority, &engine, nodes, &job),
        ProbeCommand::Exchange { one, other } => exchange_names(&one, &other),
        ProbeCommand::Steal => steal(),
        ProbeCommand::Mute { directory, source, uid, allow_other, names } => {
            mute::serve(&directory, &source, uid, allow_other, names).map(|()| ExitCode::SUCCESS)
        }
        ProbeCommand::HideEnvironment { file } => mute::hide_environment(&file).map(|()| ExitCode::SUCCESS),
        ProbeCommand::Stick { file } => mute::stick(&file).map(|never| match never {}),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("ondeck-probe: {error:#}");
            ExitCode::FAILURE
        }
    }
}

// ---- covers ----------------------------------------------------------------------------------------------------

/// How long one of these may take.
const FLEET_DEADLINE: Duration = Duration::from_secs(30);

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

fn fleet(config: &Path, authority: Option<&str>) -> Result<Fleet> {
    let fleet = Fleet::new(&Config::load(Some(config))?);
    let Some(authority) = authority else { return Ok(fleet) };
    let authority: Authority = serde_json::from_str(authority)?;
    Ok(fleet.with_authority(Arc::new(move || authority.clone())))
}

fn build(
    config: &Path,
    authority: Option<&str>,
    engine: &str,
    nodes: Vec<NodeName>,
    job: &str,
) -> Result<ExitCode> {
    let job: JobTag = serde_json::from_str(job)?;
    let plan = Plan {
        name: job.job.ramdisk(),
        engine: EngineKind::from_word(engine).context("no such engine")?,
        size: Size::Bytes(Bytes(64 << 20)),
        nodes,
        mounts: Vec::new(),
        owner: Owner { uid: 20_001, gid: 20_001 },
        replicas: 1,
        device: "ram".into(),
        metadata_device: None,
        simulation: None,
        deadline: FLEET_DEADLINE,
        identity: None,
        job: Some(job),
    };
    let built =
        runtime()?.block_on(fleet(config, authority)?.create(&plan, |_| {}, std::future::pending()))?;
    println!("{}", serde_json::to_string(&built.layout)?);
    Ok(ExitCode::SUCCESS)
}

fn read_layout(path: &Path) -> Result<Layout> {
    Ok(serde_json::from_str(&fs::read_to_string(path)?)?)
}

fn read_secret(path: &Path) -> Result<Secret> {
    fs::read_to_string(path)?.trim().parse().map_err(|_| anyhow::anyhow!("{} has no secret", path.display()))
}

/// Prints the seconds it took, or one line for each fault: the node, the code, the message.
fn tell(began: Instant, faults: &[NodeFault]) -> ExitCode {
    println!("{:.3}", began.elapsed().as_secs_f64());
    for NodeFault { node, error } in faults {
        eprintln!("{node}: {:?}: {error}", error.code());
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn cover(
    config: &Path,
    authority: Option<&str>,
    layout: &Path,
    secret: &Path,
    nodes: &[NodeName],
    covers: &str,
) -> Result<ExitCode> {
    let (fleet, layout, secret) = (fleet(config, authority)?, read_layout(layout)?, read_secret(secret)?);
    let overmounts: Vec<Overmount> = serde_json::from_str(covers)?;
    let began = Instant::now();
    let done = runtime()?.block_on(fleet.overmount(
        &layout,
        &secret,
        &overmounts,
        nodes,
        began + FLEET_DEADLINE,
        || true,
    ));
    Ok(tell(began, &done.err().map(|not| not.faults).unwrap_or_default()))
}

fn uncover(
    config: &Path,
    authority: Option<&str>,
    layout: &Path,
    nodes: &[NodeName],
    force: bool,
    leave: bool,
) -> Result<ExitCode> {
    let (fleet, id) = (fleet(config, authority)?, read_layout(layout)?.id);
    let began = Instant::now();
    let until = began + FLEET_DEADLINE;
    let mut faults = runtime()?.block_on(fleet.remove_overmounts(&id, nodes, force, until));
    if faults.is_empty() && leave {
        faults = runtime()?.block_on(fleet.leave(&id, nodes, until));
    }
    Ok(tell(began, &faults))
}

fn take_steps(
    config: &Path,
    layout: &Path,
    secret: &Path,
    node: &NodeName,
    during: Duration,
    lease_ms: Option<u64>,
    steps: &[String],
) -> Result<ExitCode> {
    let (config, layout) = (Config::load(Some(config))?, read_layout(layout)?);
    let (client, secret) = (Client::new(&config.munge_socket), read_secret(secret)?);
    let secret = if layout.server_on(node).is_some() { secret } else { secret.for_clients() };
    let steps: Vec<Step> = steps.iter().map(|step| serde_json::from_str(step)).collect::<Result<_, _>>()?;
    let millis = FLEET_DEADLINE.as_millis() as u64;
    let path = format!("/v1/ramdisks/{}/steps", layout.id);
    let endpoint = Endpoint::Node { name: node.clone(), port: config.port };
    let (runtime, began) = (runtime()?, Instant::now());
    let (mut rounds, mut whole) = (0, 0);
    let faults = loop {
        let all = runtime.block_on(async {
            for step in &steps {
                let (step, layout) = (step.clone(), layout.clone());
                let lease_ms = lease_ms.unwrap_or(millis);
                let request = StepRequest { step, layout, deadline_ms: millis, lease_ms };
                let body = Some(&request);
                let call = client.call(&endpoint, "POST", &path, body, Some(&secret), FLEET_DEADLINE);
                let _: StepDone = call.await?;
            }
            Ok(())
        });
        rounds += 1;
        whole += i32::from(all.is_ok());
        if began.elapsed() >= during {
            break all.err().map(|error| NodeFault { node: node.clone(), error });
        }
    };
    if during > Duration::ZERO {
        println!("{whole} of {rounds}");
        return Ok(ExitCode::SUCCESS);
    }
    Ok(tell(began, &Vec::from_iter(faults)))
}

fn exchange_names(one: &Path, other: &Path) -> Result<ExitCode> {
    let (mut done, mut last) = (0_u64, Instant::now());
    loop {
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        match rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, flags) {
            Ok(()) => done += 1,
            // Something is mounted there right now.
            Err(Errno::BUSY) => {}
            Err(error) => bail!("{} and {}: {error}", one.display(), other.display()),
        }
        if last.elapsed() > Duration::from_millis(100) {
            last = Instant::now();
            println!("{done}");
        }
    }
}

// ---- processes -----------------------------------------------------------------------------------------------------

/// Numbers of descriptors that are tried.
const NUMBERS: std::ops::Range<i32> = 0..64;

fn steal() -> Result<ExitCode> {
    let (own, mut told) = (std::process::id() as i32, BTreeSet::new());
    loop {
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let Some(number) = rustix::process::Pid::from_raw(pid).filter(|_| pid != own) else { continue };
            let Ok(handle) = rustix::process::pidfd_open(number, PidfdFlags::empty()) else { continue };
            for number in NUMBERS {
                let stolen = match pidfd_getfd(&handle, number, PidfdGetfdFlags::empty()) {
                    Ok(stolen) => stolen,
                    Err(Errno::BADF) => continue,
                    // It does not let this process, or has ended.
                    Err(_) => break,
                };
                let target = fs::read_link(format!("/proc/self/fd/{}", stolen.as_raw_fd()))?;
                let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                let found = format!("{} {line}", target.display());
                if !told.contains(&found) {
                    println!("{found}");
                    told.insert(found);
                }
            }
        }
    }
}

// ---- an agent ------------------------------------------------------------------------------------------------------

#[allow(clippy::too_many_arguments)]
fn call(
    agent: &str,
    to: &str,
    munge: &Path,
    method: &str,
    path: &str,
    body: Option<&Path>,
    kind: Kind,
    authority: Option<&str>,
) -> Result<ExitCode> {
    let body = body.map(fs::read).transpose()?.unwrap_or_default();
    let mut covered = envelope::Request {
        to: to.parse()?,
        port: agent.parse().ok().map(|agent: SocketAddr| agent.port()),
        method: method.to_owned(),
        path: path.to_owned(),
        body: envelope::hash(&body),
        nonce: envelope::nonce()?,
        secret: None,
        authority: authority.map(serde_json::from_str).transpose()?,
    };
    match kind {
        Kind::Foreign => covered.to = "elsewhere".parse()?,
        Kind::OtherPort => covered.port = Some(1),
        Kind::Former => covered.port = None,
        Kind::Altered => covered.body = envelope::hash(b"something else"),
        Kind::Elsewhere => covered.path = "/v1/node?other".to_owned(),
        _ => {}
    }
    let payload = if kind == Kind::Other { b"hello".to_vec() } else { serde_json::to_vec(&covered)? };
    let header = match kind {
        // On the Unix socket nothing is sealed.
        Kind::None => authority
            .map(|authority| format!("{}: {authority}\r\n", envelope::AUTHORITY_HEADER))
            .unwrap_or_default(),
        Kind::Garbage => format!("{}: MUNGE:AwQFAAA:\r\n", envelope::REQUEST_HEADER),
        _ => {
            let credential = Munge::new(munge).encode(&payload, Some(0), envelope::TIME_TO_LIVE)?;
            format!("{}: {credential}\r\n", envelope::REQUEST_HEADER)
        }
    };
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nhost: ondeck\r\nconnection: close\r\ncontent-length: {}\r\n{header}\r\n",
        body.len()
    )
    .into_bytes();
    request.extend(&body);
    if kind == Kind::Replayed {
        exchange(agent, &request, true)?;
    }
    let answer = exchange(agent, &request, kind != Kind::Relayed)?;
    let (head, said) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    let status = head.split_whitespace().nth(1).context("no HTTP status")?;
    println!("{status}\n{said}");
    Ok(ExitCode::SUCCESS)
}

/// Root calls from a port below 1024, as agents ask of administrators, unless it is told otherwise.
fn connect(agent: &str, privileged: bool) -> Result<TcpStream> {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket, sockopt};
    if !privileged || !rustix::process::geteuid().is_root() {
        return Ok(TcpStream::connect(agent)?);
    }
    let agent: SocketAddr = agent.parse()?;
    for port in (600..1024).rev() {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        let own = SocketAddr::from(([0, 0, 0, 0], port));
        if bind(&socket, &own).is_ok() && connect(&socket, &agent).is_ok() {
            return Ok(TcpStream::from(socket));
        }
    }
    bail!("no port below 1024 leads to {agent}")
}

fn exchange(agent: &str, request: &[u8], privileged: bool) -> Result<String> {
    const PATIENCE: Option<Duration> = Some(Duration::from_secs(20));
    let mut answer = Vec::new();
    if agent.starts_with('/') {
        let mut stream = UnixStream::connect(agent)?;
        stream.set_read_timeout(PATIENCE)?;
        stream.write_all(request)?;
        stream.read_to_end(&mut answer)?;
    } else {
        let mut stream = connect(agent, privileged)?;
        stream.set_read_timeout(PATIENCE)?;
        stream.write_all(request)?;
        stream.read_to_end(&mut answer)?;
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

// ---- a filesystem --------------------------------------------------------------------------------------------------

type Check = fn(&Path) -> Result<()>;

/// Each name is the sentence that the check proves. A check gets an empty directory of its own.
const CHECKS: &[(&str, Check)] = &[
    ("what is written is read again", written_is_read),
    ("a file is appended to and truncated", append_and_truncate),
    ("two descriptors append whole records", append_from_two),
    ("a hole reads as zeros", hole),
    ("a hole takes no blocks", hole_is_free),
    ("O_EXCL makes a file once", exclusive),
    ("a rename replaces a file and keeps an open one readable", rename_over),
    ("a directory is renamed with its content", rename_directory),
    ("a hard link is the same file", hard_link),
    ("a symbolic link is followed and read", symbolic_link),
    ("a directory with something in it is not removed", directories),
    ("1000 names are listed, each once", thousand_names),
    ("names of 255 bytes work and of 256 do not", long_names),
    ("directories nest 60 deep", nested),
    ("user attributes are kept", attributes),
    ("modes are kept and obeyed", modes),
    ("times are kept to the nanosecond", times),
    ("a write moves the mtime of a file", file_mtime_moves),
    ("a new name moves the mtime of a directory", directory_mtime_moves),
    ("fsync, fdatasync and the fsync of a directory succeed", sync),
    ("a shared mapping is written and read", mapping),
    ("O_DIRECT is served", direct),
    ("fallocate gives zeros, with and without the size", allocate),
    ("an unlinked file lives while it is open", unlinked),
    ("flock keeps a second descriptor out", locks),
    ("record locks of another process are seen", record_locks),
    ("a FIFO and a Unix socket work", special_files),
    ("a program is executed from it", execute),
    ("copy_file_range and sendfile copy", copies),
    ("errors are the ones that programs expect", errors),
    ("a file without a name is made (O_TMPFILE)", nameless),
];

fn posix(directory: &Path, size: u64, without: &[String]) -> Result<ExitCode> {
    for name in without {
        ensure!(CHECKS.iter().any(|(known, _)| known == name), "there is no check `{name}`");
    }
    let mut failures = 0;
    let mut fail = |name: &str, error: &anyhow::Error| {
        println!("FAILED: {name}: {error:#}");
        failures += 1;
    };
    for (number, (name, check)) in CHECKS.iter().enumerate() {
        if without.iter().any(|without| without == name) {
            continue;
        }
        let own = directory.join(format!("check-{number}"));
        let done = fs::create_dir(&own).context("mkdir").and_then(|()| check(&own));
        if let Err(error) = done {
            fail(name, &error);
        }
    }
    let stat = rustix::fs::statvfs(directory)?;
    if stat.f_blocks * stat.f_frsize < size {
        let shown = stat.f_blocks * stat.f_frsize;
        fail("statfs shows the size", &anyhow::anyhow!("{shown} of {size} bytes"));
    }
    println!("{} checks, {failures} failed", CHECKS.len() + 1 - without.len());
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn expect_errno<T>(done: std::io::Result<T>, errno: i32, what: &str) -> Result<()> {
    match done {
        Ok(_) => bail!("{what} succeeded"),
        Err(error) if error.raw_os_error() == Some(errno) => Ok(()),
        Err(error) => {
            bail!("{what} gave `{error}`, not `{}`", std::io::Error::from_raw_os_error(errno))
        }
    }
}

fn open_all(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

fn pattern(length: usize, seed: u64) -> Vec<u8> {
    (0..length as u64)
        .map(|index| (index.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 7) as u8)
        .collect()
}

fn written_is_read(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    let content = pattern(3_000_001, 1);
    fs::write(&path, &content)?;
    ensure!(fs::read(&path)? == content, "other bytes were read");
    let file = open_all(&path)?;
    file.write_all_at(b"changed", 1_000_000)?;
    let mut part = [0; 9];
    file.read_exact_at(&mut part, 999_999)?;
    ensure!(&part[1..8] == b"changed" && part[0] == content[999_999], "{part:?}");
    ensure!(file.metadata()?.len() == content.len() as u64, "the size changed");
    Ok(())
}

fn append_and_truncate(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    for _ in 0..3 {
        OpenOptions::new().append(true).create(true).open(&path)?.write_all(b"0123456789")?;
    }
    ensure!(fs::read(&path)? == b"012345678901234567890123456789");
    let file = open_all(&path)?;
    file.set_len(4)?;
    ensure!(fs::read(&path)? == b"0123", "after shrinking");
    file.set_len(8)?;
    ensure!(fs::read(&path)? == b"0123\0\0\0\0", "after growing");
    File::create(&path)?;
    ensure!(fs::metadata(&path)?.len() == 0, "O_TRUNC");
    Ok(())
}

fn append_from_two(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    std::thread::scope(|scope| {
        let threads: Vec<_> = [b'a', b'b']
            .map(|letter| {
                let path = &path;
                scope.spawn(move || -> Result<()> {
                    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
                    for _ in 0..200 {
                        file.write_all(&[letter; 100])?;
                    }
                    Ok(())
                })
            })
            .into_iter()
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    let content = fs::read(&path)?;
    ensure!(content.len() == 40_000, "{} bytes of 40000", content.len());
    ensure!(
        content.chunks(100).all(|record| record.iter().all(|byte| *byte == record[0])),
        "records are mixed"
    );
    Ok(())
}

fn hole(dir: &Path) -> Result<()> {
    let file = open_all(&dir.join("file"))?;
    file.write_all_at(b"end", 20 << 20)?;
    file.sync_all()?;
    let meta = file.metadata()?;
    ensure!(meta.len() == (20 << 20) + 3, "size {}", meta.len());
    let mut zeros = vec![1; 1 << 20];
    file.read_exact_at(&mut zeros, 5 << 20)?;
    ensure!(zeros.iter().all(|byte| *byte == 0), "not zeros");
    Ok(())
}

fn hole_is_free(dir: &Path) -> Result<()> {
    let file = open_all(&dir.join("file"))?;
    file.write_all_at(b"end", 20 << 20)?;
    file.sync_all()?;
    let blocks = file.metadata()?.blocks();
    ensure!(blocks * 512 < 1 << 20, "it takes {} bytes", blocks * 512);
    Ok(())
}

fn exclusive(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    OpenOptions::new().write(true).create_new(true).open(&path)?;
    expect_errno(OpenOptions::new().write(true).create_new(true).open(&path), libc::EEXIST, "O_EXCL again")
}

fn rename_over(dir: &Path) -> Result<()> {
    let (old, new) = (dir.join("old"), dir.join("new"));
    fs::write(&old, "old")?;
    fs::write(&new, "new")?;
    let mut open = File::open(&new)?;
    fs::rename(&old, &new)?;
    ensure!(fs::read_to_string(&new)? == "old" && !old.exists(), "after the rename");
    let mut text = String::new();
    open.read_to_string(&mut text)?;
    ensure!(text == "new", "the open file has `{text}`");
    let flags = rustix::fs::RenameFlags::NOREPLACE;
    fs::write(&old, "again")?;
    match rustix::fs::renameat_with(rustix::fs::CWD, &old, rustix::fs::CWD, &new, flags) {
        Err(Errno::EXIST | Errno::INVAL) => Ok(()),
        other => bail!("RENAME_NOREPLACE: {other:?}"),
    }
}

fn rename_directory(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir.join("a/b"))?;
    fs::write(dir.join("a/b/file"), "x")?;
    fs::rename(dir.join("a"), dir.join("c"))?;
    ensure!(fs::read_to_string(dir.join("c/b/file"))? == "x" && !dir.join("a").exists());
    expect_errno(fs::rename(dir.join("c"), dir.join("c/b/c")), libc::EINVAL, "a directory into itself")
}

fn hard_link(dir: &Path) -> Result<()> {
    let (one, two) = (dir.join("one"), dir.join("two"));
    fs::write(&one, "x")?;
    fs::hard_link(&one, &two)?;
    let (a, b) = (fs::metadata(&one)?, fs::metadata(&two)?);
    ensure!(a.ino() == b.ino() && a.nlink() == 2, "inodes {} {}, {} links", a.ino(), b.ino(), a.nlink());
    fs::write(&two, "changed")?;
    ensure!(fs::read_to_string(&one)? == "changed");
    fs::remove_file(&one)?;
    ensure!(fs::metadata(&two)?.nlink() == 1);
    Ok(())
}

fn symbolic_link(dir: &Path) -> Result<()> {
    fs::write(dir.join("file"), "x")?;
    symlink("file", dir.join("link"))?;
    symlink("nowhere", dir.join("dangling"))?;
    ensure!(fs::read_to_string(dir.join("link"))? == "x");
    ensure!(fs::read_link(dir.join("link"))? == Path::new("file"));
    ensure!(fs::symlink_metadata(dir.join("link"))?.is_symlink());
    expect_errno(File::open(dir.join("dangling")), libc::ENOENT, "a dangling link")
}

fn directories(dir: &Path) -> Result<()> {
    let sub = dir.join("sub");
    fs::create_dir(&sub)?;
    expect_errno(fs::create_dir(&sub), libc::EEXIST, "mkdir again")?;
    fs::write(sub.join("file"), "")?;
    expect_errno(fs::remove_dir(&sub), libc::ENOTEMPTY, "rmdir of a full directory")?;
    fs::remove_file(sub.join("file"))?;
    fs::remove_dir(&sub)?;
    ensure!(!sub.exists());
    Ok(())
}

fn thousand_names(dir: &Path) -> Result<()> {
    for number in 0..1000 {
        File::create(dir.join(format!("name-{number}")))?;
    }
    let mut names: Vec<_> = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
    let listed = names.len();
    names.sort();
    names.dedup();
    ensure!(listed == 1000 && names.len() == 1000, "{listed} names, {} of them different", names.len());
    // What many programs do: remove while listing.
    for entry in fs::read_dir(dir)? {
        fs::remove_file(entry?.path())?;
    }
    ensure!(fs::read_dir(dir)?.next().is_none(), "names were passed over");
    Ok(())
}

fn long_names(dir: &Path) -> Result<()> {
    let name = "n".repeat(255);
    fs::write(dir.join(&name), "x")?;
    ensure!(fs::read_to_string(dir.join(&name))? == "x");
    ensure!(fs::read_dir(dir)?.next().context("no entry")??.file_name() == *name);
    expect_errno(File::create(dir.join("n".repeat(256))), libc::ENAMETOOLONG, "a name of 256 bytes")?;
    let odd = std::ffi::OsStr::from_bytes(b"\xff\n \t*'\"\\");
    fs::write(dir.join(odd), "odd")?;
    ensure!(fs::read_to_string(dir.join(odd))? == "odd");
    Ok(())
}

fn nested(dir: &Path) -> Result<()> {
    let deep = (0..60).fold(dir.to_owned(), |path, level| path.join(format!("level-{level}")));
    fs::create_dir_all(&deep)?;
    fs::write(deep.join("file"), "deep")?;
    ensure!(fs::read_to_string(deep.join("file"))? == "deep");
    fs::remove_dir_all(dir.join("level-0"))?;
    ensure!(fs::read_dir(dir)?.next().is_none());
    Ok(())
}

fn attributes(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    fs::write(&path, "")?;
    let value = pattern(2000, 5);
    rustix::fs::setxattr(&path, "user.ondeck", &value, XattrFlags::CREATE).context("setxattr")?;
    ensure!(rustix::fs::setxattr(&path, "user.ondeck", b"", XattrFlags::CREATE) == Err(Errno::EXIST));
    let mut buffer = vec![0; 4000];
    let length = rustix::fs::getxattr(&path, "user.ondeck", &mut buffer[..])?;
    ensure!(buffer[..length] == value[..], "another value");
    let length = rustix::fs::listxattr(&path, &mut buffer[..])?;
    let listed: Vec<&[u8]> = buffer[..length].split(|byte| *byte == 0).collect();
    ensure!(listed.contains(&&b"user.ondeck"[..]), "it is not listed");
    rustix::fs::removexattr(&path, "user.ondeck")?;
    ensure!(rustix::fs::getxattr(&path, "user.ondeck", &mut buffer[..]) == Err(Errno::NODATA));
    Ok(())
}

fn modes(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    fs::write(&path, "x")?;
    for mode in [0o640, 0o755, 0o400] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        ensure!(fs::metadata(&path)?.mode() & 0o7777 == mode, "mode {mode:o}");
    }
    let meta = fs::metadata(&path)?;
    ensure!(meta.uid() == rustix::process::geteuid().as_raw(), "the owner is {}", meta.uid());
    ensure!(meta.gid() == rustix::process::getegid().as_raw(), "the group is {}", meta.gid());
    if !rustix::process::geteuid().is_root() {
        expect_errno(
            OpenOptions::new().write(true).open(&path),
            libc::EACCES,
            "writing a file of mode 0400",
        )?;
        expect_errno(std::os::unix::fs::chown(&path, Some(0), None), libc::EPERM, "chown to root")?;
    }
    Ok(())
}

fn times(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    let file = File::create(&path)?;
    let moment = UNIX_EPOCH + Duration::new(1_234_567_890, 123_456_789);
    file.set_times(fs::FileTimes::new().set_accessed(moment).set_modified(moment))?;
    let meta = fs::metadata(&path)?;
    ensure!(
        (meta.mtime(), meta.mtime_nsec()) == (1_234_567_890, 123_456_789),
        "mtime {:?}",
        meta.modified()?
    );
    ensure!(meta.atime() == 1_234_567_890, "atime {:?}", meta.accessed()?);
    Ok(())
}

fn long_ago() -> SystemTime {
    SystemTime::now() - Duration::from_secs(1000)
}

fn set_back(file: &File) -> std::io::Result<()> {
    file.set_times(fs::FileTimes::new().set_modified(long_ago()))
}

fn is_recent(path: &Path) -> Result<()> {
    let modified = fs::metadata(path)?.modified()?;
    ensure!(modified > long_ago() + Duration::from_secs(900), "it is {modified:?}");
    Ok(())
}

fn file_mtime_moves(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    let file = File::create(&path)?;
    set_back(&file)?;
    file.write_all_at(b"x", 0)?;
    drop(file);
    is_recent(&path)
}

fn directory_mtime_moves(dir: &Path) -> Result<()> {
    set_back(&File::open(dir)?)?;
    File::create(dir.join("other"))?;
    is_recent(dir)
}

fn sync(dir: &Path) -> Result<()> {
    let mut file = File::create(dir.join("file"))?;
    file.write_all(b"x")?;
    file.sync_data()?;
    file.sync_all()?;
    File::open(dir)?.sync_all().context("of the directory")?;
    Ok(())
}

fn mapping(dir: &Path) -> Result<()> {
    const LENGTH: usize = 1 << 20;
    let path = dir.join("file");
    let file = open_all(&path)?;
    file.set_len(LENGTH as u64)?;
    let content = pattern(LENGTH, 9);
    // SAFETY: a new mapping of LENGTH bytes of a file of that length, unmapped at the end and used nowhere else.
    unsafe {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let at =
            rustix::mm::mmap(std::ptr::null_mut(), LENGTH, protection, flags, &file, 0).context("mmap")?;
        std::slice::from_raw_parts_mut(at.cast::<u8>(), LENGTH).copy_from_slice(&content);
        rustix::mm::msync(at, LENGTH, MsyncFlags::SYNC).context("msync")?;
        rustix::mm::munmap(at, LENGTH)?;
    }
    drop(file);
    ensure!(fs::read(&path)? == content, "read has other bytes than the mapping");
    Ok(())
}

#[repr(align(4096))]
struct Aligned([u8; 65536]);

fn direct(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    let mut block = Box::new(Aligned([0; 65536]));
    block.0.copy_from_slice(&pattern(65536, 3));
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
    let file = options.open(&path)?;
    for number in 0..8 {
        file.write_all_at(&block.0, number * 65536)?;
    }
    let mut back = Box::new(Aligned([0; 65536]));
    file.read_exact_at(&mut back.0, 3 * 65536)?;
    ensure!(back.0 == block.0, "read directly");
    ensure!(fs::read(&path)?.chunks(65536).all(|part| part == block.0), "read through the cache");
    Ok(())
}

fn allocate(dir: &Path) -> Result<()> {
    let file = open_all(&dir.join("file"))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 4 << 20).context("fallocate")?;
    ensure!(file.metadata()?.len() == 4 << 20, "the size");
    ensure!(file.metadata()?.blocks() * 512 >= 4 << 20, "{} blocks", file.metadata()?.blocks());
    let mut content = vec![1; 4 << 20];
    file.read_exact_at(&mut content, 0)?;
    ensure!(content.iter().all(|byte| *byte == 0), "not zeros");
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 4 << 20, 1 << 20).context("KEEP_SIZE")?;
    ensure!(file.metadata()?.len() == 4 << 20, "KEEP_SIZE changed the size");
    file.write_all_at(&[7; 8192], 0)?;
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 0, 4096).context("PUNCH_HOLE")?;
    let mut content = [1; 8192];
    file.read_exact_at(&mut content, 0)?;
    ensure!(content[..4096].iter().all(|byte| *byte == 0) && content[4096..] == [7; 4096], "the hole");
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    Ok(())
}

fn unlinked(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    let mut file = open_all(&path)?;
    file.write_all(b"still")?;
    fs::remove_file(&path)?;
    file.write_all(b" here")?;
    file.seek(SeekFrom::Start(0))?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    ensure!(text == "still here", "`{text}`");
    ensure!(file.metadata()?.nlink() == 0, "{} links", file.metadata()?.nlink());
    fs::write(&path, "new")?;
    ensure!(file.metadata()?.len() == 10, "a new file of the name changed the old one");
    Ok(())
}

fn locks(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    let (one, two) = (open_all(&path)?, open_all(&path)?);
    rustix::fs::flock(&one, FlockOperation::LockExclusive)?;
    let refused = rustix::fs::flock(&two, FlockOperation::NonBlockingLockExclusive);
    ensure!(refused == Err(Errno::AGAIN), "{refused:?}");
    rustix::fs::flock(&one, FlockOperation::Unlock)?;
    rustix::fs::flock(&two, FlockOperation::NonBlockingLockShared)?;
    rustix::fs::flock(&one, FlockOperation::NonBlockingLockShared)?;
    Ok(())
}

/// Runs `work` in a child and tells whether it was true. The child does nothing but system calls.
fn in_child(work: impl FnOnce() -> bool) -> Result<bool> {
    // SAFETY: this process has one thread here; the child leaves by _exit.
    let child = unsafe { libc::fork() };
    ensure!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        let code = i32::from(!work());
        // SAFETY: ends the child.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to a live integer.
    ensure!(unsafe { libc::waitpid(child, &mut status, 0) } == child, "waitpid");
    Ok(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0)
}

fn record_locks(dir: &Path) -> Result<()> {
    let path = dir.join("file");
    let file = open_all(&path)?;
    file.set_len(100)?;
    let exclusive = FlockOperation::NonBlockingLockExclusive;
    rustix::fs::fcntl_lock(&file, exclusive)?;
    let kept_out = in_child(|| {
        let Ok(other) = open_all(&path) else { return false };
        matches!(rustix::fs::fcntl_lock(&other, exclusive), Err(Errno::AGAIN | Errno::ACCESS))
    })?;
    ensure!(kept_out, "another process got the lock too");
    rustix::fs::fcntl_lock(&file, FlockOperation::Unlock)?;
    let got =
        in_child(|| open_all(&path).is_ok_and(|other| rustix::fs::fcntl_lock(&other, exclusive).is_ok()))?;
    ensure!(got, "the lock was not released");
    Ok(())
}

fn special_files(dir: &Path) -> Result<()> {
    let fifo = dir.join("fifo");
    let name = CString::new(fifo.as_os_str().as_bytes())?;
    // SAFETY: a string that ends with zero.
    let made = unsafe { libc::mkfifo(name.as_ptr(), 0o600) };
    ensure!(made == 0, "mkfifo: {}", std::io::Error::last_os_error());
    let mut both = OpenOptions::new().read(true).write(true).open(&fifo)?;
    both.write_all(b"through")?;
    let mut buffer = [0; 7];
    both.read_exact(&mut buffer)?;
    ensure!(&buffer == b"through");
    // A path of a socket has at most 107 bytes, hence a relative one.
    std::env::set_current_dir(dir)?;
    let listener = UnixListener::bind("socket").context("bind")?;
    let _connected = UnixStream::connect("socket").context("connect")?;
    listener.accept()?;
    std::env::set_current_dir("/")?;
    Ok(())
}

fn execute(dir: &Path) -> Result<()> {
    let program = dir.join("program");
    fs::copy("/bin/true", &program)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    ensure!(std::process::Command::new(&program).status().context("exec")?.success());
    let script = dir.join("script");
    fs::write(&script, "#!/bin/sh\nexit 7\n")?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    ensure!(std::process::Command::new(&script).status().context("exec of a script")?.code() == Some(7));
    Ok(())
}

fn copies(dir: &Path) -> Result<()> {
    let content = pattern(2 << 20, 11);
    let (from, ranged, sent) = (dir.join("from"), dir.join("ranged"), dir.join("sent"));
    fs::write(&from, &content)?;
    fs::copy(&from, &ranged)?;
    ensure!(fs::read(&ranged)? == content, "copy_file_range");
    let (input, output) = (File::open(&from)?, File::create(&sent)?);
    let mut left = content.len();
    while left > 0 {
        let moved = rustix::fs::sendfile(output.as_fd(), input.as_fd(), None, left).context("sendfile")?;
        ensure!(moved > 0, "sendfile stopped early");
        left -= moved;
    }
    ensure!(fs::read(&sent)? == content, "sendfile");
    Ok(())
}

fn errors(dir: &Path) -> Result<()> {
    let file = dir.join("file");
    fs::write(&file, "")?;
    expect_errno(File::open(dir.join("missing")), libc::ENOENT, "opening nothing")?;
    expect_errno(File::open(file.join("below")), libc::ENOTDIR, "a path through a file")?;
    expect_errno(OpenOptions::new().write(true).open(dir), libc::EISDIR, "writing a directory")?;
    expect_errno(fs::remove_dir(&file), libc::ENOTDIR, "rmdir of a file")?;
    expect_errno(fs::remove_file(dir.join("missing")), libc::ENOENT, "unlinking nothing")?;
    let closed = File::open(&file)?;
    // SAFETY: a system call on a descriptor that is open, with a buffer of one byte.
    let written = unsafe { libc::write(closed.as_raw_fd(), c"x".as_ptr().cast(), 1) };
    let errno = std::io::Error::last_os_error().raw_os_error();
    ensure!(written == -1 && errno == Some(libc::EBADF), "writing to a file that was opened for reading");
    Ok(())
}

fn nameless(dir: &Path) -> Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).open(dir)?;
    file.write_all(b"x")?;
    ensure!(file.metadata()?.nlink() == 0);
    Ok(())
}
