//! From options and directives to directories, mechanisms and sizes. Nothing is changed here.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ondeck_cachefs::instance::Caches;
use ondeck_core::fit::{Sizes, ram_disk_size};
use ondeck_core::{Bytes, EngineKind, PackFormat, Request, WaitPolicy};
use ondeck_ramdisk::memory;
use ondeck_staging::merge_back::{Before, Mechanism, clock_of};
use ondeck_transfer::survey::{Descend, survey};
use rustix::fs::{FileType, Mode, OFlags};

use super::caches::{self, RunCache};
use super::{Existing, RunArgs, slurm};

/// What is to be run, and what was asked for.
pub struct Job {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// Whether it is a batch script whose directives were read.
    pub is_script: bool,
    /// Directives and options together; options win.
    pub request: Request,
    /// What the user should know about them.
    pub warnings: Vec<String>,
}

impl Job {
    /// Reads the script, if there is one, and merges its directives with the options.
    pub fn from_args(args: &RunArgs) -> Result<Job> {
        let mut warnings = Vec::new();
        let mut request = Request::default();
        let (command, is_script) = match (args.script.split_first(), args.command.is_empty()) {
            (None, true) => {
                bail!("nothing to run; write `ondeck run [OPTIONS] -- CMD` or `ondeck run JOB.sh`")
            }
            (None, false) => (args.command.clone(), false),
            (Some((script, arguments)), _) => {
                let path = Path::new(script);
                let mut text = Vec::new();
                std::fs::File::open(path)
                    .and_then(|file| file.take(SCRIPT_LIMIT).read_to_end(&mut text))
                    .map_err(|error| {
                        anyhow::anyhow!(
                            "can't read the job script {}: {error}; a program goes after `--`",
                            path.display()
                        )
                    })?;
                if text.starts_with(b"#!") || text.starts_with(b"#RSA_") {
                    let parsed = ondeck_directive::parse(&text).map_err(|errors| {
                        let lines: Vec<String> = errors.iter().map(|error| format!("  {error}")).collect();
                        anyhow::anyhow!("{}: malformed directives:\n{}", path.display(), lines.join("\n"))
                    })?;
                    warnings.extend(
                        parsed.warnings.iter().map(|warning| format!("{}: {warning}", path.display())),
                    );
                    request = parsed.request;
                }
                let mut command = interpreter(path, &text)?;
                command.extend(arguments.iter().cloned());
                command.extend(args.command.iter().cloned());
                (command, true)
            }
        };
        request.data_in.extend(args.data_in.iter().cloned());
        request.data_out.extend(args.data_out.iter().cloned());
        request.capacity = args.size.or(request.capacity);
        request.out_size = args.out_size.or(request.out_size);
        request.delay = args.delay.or(request.delay);
        request.copy_out_interval = args.copy_out_interval.or(request.copy_out_interval);
        request.stage_in = args.stage_in.clone().or(request.stage_in);
        request.stage_out = args.stage_out.clone().or(request.stage_out);
        request.pack = args.pack.or(request.pack);
        for (present, directive) in [
            (request.nodes.is_some(), "RSA_NODES"),
            (request.pool.is_some(), "RSA_POOL"),
            (request.engine.is_some_and(|engine| engine != EngineKind::Tmpfs), "RSA_ENGINE"),
            (request.wait.is_some_and(|wait| wait != WaitPolicy::Hold), "RSA_WAIT"),
        ] {
            if present {
                warnings.push(format!("#{directive} has no meaning on one machine and is passed over"));
            }
        }
        if request.data_in.is_empty() && request.data_out.is_empty() && args.cache.is_empty() {
            bail!(
                "no data directory was named; use --data-in DIR and --data-out DIR, or --cache DIR{}",
                if is_script {
                    ", or #RSA_DATA_IN= and #RSA_DATA_OUT= lines at the head of the script"
                } else {
                    ""
                }
            );
        }
        if let Some(contradiction) = request.contradiction() {
            bail!("{contradiction}");
        }
        Ok(Job { command, is_script, request, warnings })
    }
}

/// More of a job script than any scheduler accepts.
const SCRIPT_LIMIT: u64 = 16 << 20;

/// How to run a script: by itself if it may be executed, else by the interpreter of its first line, as sbatch does.
fn interpreter(path: &Path, text: &[u8]) -> Result<Vec<OsString>> {
    let executable = rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    // Without a slash a name would be looked for in PATH.
    let named =
        if path.as_os_str().as_bytes().contains(&b'/') { path.to_owned() } else { Path::new(".").join(path) };
    if executable {
        return Ok(vec![named.into_os_string()]);
    }
    let first = text.split(|b| *b == b'\n').next().unwrap_or_default();
    let Some(line) = first.strip_prefix(b"#!") else {
        bail!("{} is not executable and has no #! line; make it executable with chmod +x", path.display());
    };
    let line = line.trim_ascii();
    let (program, argument) = match line.iter().position(|b| b.is_ascii_whitespace()) {
        Some(end) => (&line[..end], line[end..].trim_ascii()),
        None => (line, &b""[..]),
    };
    let mut command = vec![OsString::from_vec(program.to_vec())];
    if !argument.is_empty() {
        command.push(OsString::from_vec(argument.to_vec()));
    }
    command.push(named.into_os_string());
    Ok(command)
}

/// What a directory holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Content {
    /// Entries of any kind.
    pub entries: u64,
    /// Bytes that the regular files take in RAM: whole pages, holes not counted.
    pub bytes: u64,
    /// Whether it has subdirectories.
    pub directories: bool,
}

/// One directory of the job.
pub struct RunDirectory {
    /// Its real path.
    pub path: PathBuf,
    /// It, on disk, opened before anything was mounted over it.
    pub disk: OwnedFd,
    /// Its inode number, to know it again when it has to be opened anew.
    pub inode: u64,
    /// The user id of its owner on disk.
    pub owner: u32,
    /// Whether it is staged in.
    pub input: bool,
    /// Whether it is staged out.
    pub output: bool,
    /// How an output is shown to the program.
    pub mechanism: Mechanism,
    /// What it held when it was looked at.
    pub content: Content,
    /// Paths below it that are directories of the job themselves.
    pub nested: Vec<Vec<u8>>,
    /// The clock of its filesystem at the start, for outputs.
    pub since: (i64, i64),
    /// What is remembered of it, for outputs.
    pub before: Arc<Before>,
}

/// Everything that was decided before the start.
pub struct Plan {
    /// The directories, parents before what lies in them.
    pub directories: Vec<RunDirectory>,
    /// Directories that are shown through a cache.
    pub caches: Vec<RunCache>,
    /// The RAM disk's size.
    pub size: Bytes,
    /// RAM that was free.
    pub free: Bytes,
    /// Whether root runs it: then there is no user namespace.
    pub root: bool,
    /// After this time the input makes way for the output.
    pub delay: Option<Duration>,
    /// How often closed files are copied out.
    pub copy_out_interval: Option<Duration>,
    /// The user's scripts.
    pub stage_in: Option<PathBuf>,
    /// The user's scripts.
    pub stage_out: Option<PathBuf>,
    /// Archive format, if one is wanted.
    pub pack: Option<PackFormat>,
    /// What the user should know.
    pub notes: Vec<String>,
}

impl Plan {
    /// Looks at the directories and the machine and decides.
    pub fn make(args: &RunArgs, job: &Job) -> Result<Plan> {
        let request = &job.request;
        let root = rustix::process::geteuid().is_root();
        let mut notes = Vec::new();
        if let Some(job) = slurm::job_id() {
            let (what, how) = if request.data_in.is_empty() && request.data_out.is_empty() {
                ("the server of the cache", "write back")
            } else {
                ("the RAM disk", "stage out")
            };
            notes.push(if slurm::end_time().is_some() {
                format!(
                    "inside Slurm job {job}: {what} dies with the job, so the program will be ended in time to {how}"
                )
            } else {
                format!(
                    "inside Slurm job {job}: {what} dies with the job, and its time limit is not known \
                     (SLURM_JOB_END_TIME is not set); use --copy-out-interval to lose little if the job runs into it"
                )
            });
        }
        if !root && let Some(program) = set_uid_program(&job.command[0]) {
            notes.push(format!(
                "{} is a set-uid program: it does not get its privileges inside a user namespace; run as root, or \
                 without `ondeck run`",
                program.display()
            ));
        }
        let mut directories = open_directories(request)?;
        let mut free = memory::free_ram().context("can't read how much RAM is free")?.usable();
        if root {
            // Only root can have made some, and look into them.
            let promised = Caches::new(crate::state::caches()?).promised(None);
            free = free.saturating_sub(promised.context("can't tell what caches were promised")?);
        }
        let script = |path: &Option<PathBuf>| -> Result<Option<PathBuf>> {
            path.as_deref().map(runnable_script).transpose()
        };
        let (stage_in, stage_out) = (script(&request.stage_in)?, script(&request.stage_out)?);
        refuse_mounts_below(&directories)?;
        for directory in &mut directories {
            decide(directory, args.existing, request, root, free, &mut notes)
                .with_context(|| format!("{}", directory.path.display()))?;
        }
        let staged = |directory: &&RunDirectory| directory.input || directory.mechanism == Mechanism::Mirror;
        // A stage-in script decides itself what it puts into RAM.
        let input = if stage_in.is_some() {
            0
        } else {
            directories.iter().filter(staged).map(|directory| directory.content.bytes).sum()
        };
        let size = if directories.is_empty() {
            if let Some(size) = request.capacity {
                bail!(
                    "a RAM disk of {size} is of no use without --data-in or --data-out; leave its size out"
                );
            }
            NO_RAM_DISK
        } else {
            ram_disk_size(Sizes {
                requested: request.capacity,
                input: Bytes(input),
                output: request.out_size.unwrap_or(Bytes::ZERO),
                free,
            })?
        };
        let cached = open_cached(args, &directories, root)?;
        let caches = caches::plan(cached, args.cache_size, free.saturating_sub(size))?;
        Ok(Plan {
            directories,
            caches,
            size,
            free,
            root,
            delay: request.delay,
            copy_out_interval: request.copy_out_interval,
            stage_in,
            stage_out,
            pack: request.pack,
            notes,
        })
    }

    /// Whether the outputs wait for the switch.
    pub fn switches(&self) -> bool {
        self.delay.is_some() && self.directories.iter().any(|directory| directory.output && !directory.input)
    }
}

/// The size of a RAM disk that nothing is put into: a run has one in any case.
const NO_RAM_DISK: Bytes = Bytes(1 << 20);

/// The file that a command names, if it is set-uid.
fn set_uid_program(name: &OsStr) -> Option<PathBuf> {
    let found = if name.as_bytes().contains(&b'/') {
        PathBuf::from(name)
    } else {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|dir| dir.join(name)).find(|candidate| candidate.is_file())?
    };
    (rustix::fs::stat(&found).ok()?.st_mode & 0o4000 != 0).then_some(found)
}

/// A filesystem mounted inside an output directory would be hidden by what is mounted over that, or synced by nobody.
fn refuse_mounts_below(directories: &[RunDirectory]) -> Result<()> {
    let mounts = std::fs::read("/proc/self/mountinfo").context("can't read /proc/self/mountinfo")?;
    for line in mounts.split(|b| *b == b'\n') {
        let Some(point) = line.split(|b| *b == b' ').nth(4) else { continue };
        let point = PathBuf::from(OsString::from_vec(unescape_octal(point)));
        let inside = directories.iter().find(|directory| {
            directory.output && point.starts_with(&directory.path) && point != directory.path
        });
        if let Some(directory) = inside
            && !directories.iter().any(|other| other.path == point)
        {
            bail!(
                "{}: another filesystem is mounted inside it, at {}; name that directory as a --data-in or --data-out of \
                 its own, or an output directory without it",
                directory.path.display(),
                point.display()
            );
        }
    }
    Ok(())
}

/// mountinfo writes blanks, newlines and backslashes as `\\ooo`.
fn unescape_octal(text: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        let code = match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..]) => {
                Some((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'))
            }
            _ => None,
        };
        path.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    path
}

fn runnable_script(path: &Path) -> Result<PathBuf> {
    let real = path.canonicalize().with_context(|| format!("can't find the script {}", path.display()))?;
    if rustix::fs::access(&real, rustix::fs::Access::EXEC_OK).is_err() || !real.is_file() {
        bail!("the script {} can't be executed; make it executable with chmod +x", path.display());
    }
    Ok(real)
}

/// Opens the directories that get a cache. None may be inside another one of the run's.
fn open_cached(args: &RunArgs, others: &[RunDirectory], root: bool) -> Result<Vec<(PathBuf, OwnedFd)>> {
    if args.cache.is_empty() {
        if args.cache_size.is_some() {
            bail!("--cache-size makes no sense without --cache");
        }
        return Ok(Vec::new());
    }
    if !root {
        bail!(
            "only root can show a directory through a cache for now; use --data-in and --data-out instead of --cache, or run \
             with --fallback disk"
        );
    }
    let mut opened: Vec<(PathBuf, OwnedFd)> = Vec::new();
    for path in &args.cache {
        let real = path
            .canonicalize()
            .with_context(|| format!("the directory {} can't be shown through a cache", path.display()))?;
        if opened.iter().any(|(known, _)| *known == real) {
            continue;
        }
        if !real.is_dir() {
            bail!("{} is not a directory; name the directory that holds it", path.display());
        }
        check_place(&real)?;
        let mut paths = opened.iter().map(|(path, _)| path).chain(others.iter().map(|other| &other.path));
        if let Some(other) = paths.find(|other| real.starts_with(other) || other.starts_with(&real)) {
            bail!(
                "{} and {} are inside one another or the same: a directory with a cache must be apart from all others of \
                 the run",
                real.display(),
                other.display()
            );
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let disk = rustix::fs::open(&real, flags, Mode::empty())
            .with_context(|| format!("the directory {} can't be read", path.display()))?;
        opened.push((real, disk));
    }
    Ok(opened)
}

/// Refuses a directory, by its real path, that is no job's.
fn check_place(real: &Path) -> Result<()> {
    const KEPT: [&str; 10] =
        ["/", "/dev", "/run", "/tmp", "/etc", "/usr", "/home", "/root", "/var", "/var/tmp"];
    let is_the_kernels = ["/proc", "/sys"].into_iter().any(|kept| real.starts_with(kept));
    if is_the_kernels || KEPT.into_iter().any(|kept| leads_to(Path::new(kept), real)) {
        bail!("{} belongs to the system; name a directory of the job's own", real.display());
    }
    // Covered, they would hide the runs' own state from everybody inside.
    let state = crate::state::runs().and_then(|path| Ok(path.canonicalize()?)).ok();
    if leads_to(Path::new("/dev/shm"), real) || state.is_some_and(|state| real.starts_with(state)) {
        bail!(
            "{} is where RAM disks and the state of runs are kept; name a directory of the job's own",
            real.display()
        );
    }
    Ok(())
}

/// Whether a path is this real one, also by symlinks: `/home` is one at many sites, and `/dev/shm` is on some.
fn leads_to(path: &Path, real: &Path) -> bool {
    real == path || path.canonicalize().is_ok_and(|path| path == real)
}

/// Opens every named directory once, by its real path, parents before what lies in them.
fn open_directories(request: &Request) -> Result<Vec<RunDirectory>> {
    let mut directories: Vec<RunDirectory> = Vec::new();
    let named = request
        .data_in
        .iter()
        .map(|path| (path, true))
        .chain(request.data_out.iter().map(|path| (path, false)));
    for (path, input) in named {
        let what = if input { "input" } else { "output" };
        let real = path.canonicalize().map_err(|error| {
            let remedy = match error.kind() {
                std::io::ErrorKind::NotFound if input => "; name the directory that has the input".to_owned(),
                std::io::ErrorKind::NotFound => format!("; make it with: mkdir -p {}", path.display()),
                _ => String::new(),
            };
            anyhow::anyhow!("the {what} directory {} can't be used: {error}{remedy}", path.display())
        })?;
        if let Some(known) = directories.iter_mut().find(|directory| directory.path == real) {
            known.input |= input;
            known.output |= !input;
            continue;
        }
        if !real.is_dir() {
            bail!("the {what} {} is not a directory; name the directory that holds it", path.display());
        }
        check_place(&real)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let disk = rustix::fs::open(&real, flags, Mode::empty())
            .with_context(|| format!("the {what} directory {} can't be read", path.display()))?;
        let stat = rustix::fs::fstat(&disk)?;
        directories.push(RunDirectory {
            path: real,
            disk,
            inode: stat.st_ino,
            owner: stat.st_uid,
            input,
            output: !input,
            mechanism: Mechanism::Disk,
            content: Content::default(),
            nested: Vec::new(),
            since: (0, 0),
            before: Arc::default(),
        });
    }
    directories.sort_by(|a, b| a.path.cmp(&b.path));
    let paths: Vec<PathBuf> = directories.iter().map(|directory| directory.path.clone()).collect();
    for directory in &mut directories {
        let below = paths.iter().filter(|path| **path != directory.path);
        directory.nested = below
            .filter_map(|path| path.strip_prefix(&directory.path).ok())
            .map(|relative| relative.as_os_str().as_bytes().to_vec())
            .collect();
    }
    Ok(directories)
}

/// Existing content up to this part of the free RAM is copied rather than overlaid where both would work but the
/// overlay has limits.
const SMALL_PART: u64 = 16;

/// Looks into a directory and decides how it is shown.
fn decide(
    directory: &mut RunDirectory,
    existing: Existing,
    request: &Request,
    root: bool,
    free: Bytes,
    notes: &mut Vec<String>,
) -> Result<()> {
    if directory.output {
        directory.since = clock_of(directory.disk.as_fd()).context(
            "results could not be written there; mend its permissions, free some space, or name another --data-out",
        )?;
    }
    if directory.output && !root {
        tell_of_other_owner(directory, notes)?;
    }
    if directory.input {
        let mut seen = look(directory, None)?;
        if let Some(shut) = seen.shut.take() {
            bail!("{shut}, so it can't be staged in; chmod u+rwX it, or run with --fallback disk");
        }
        directory.content = seen.content;
        if directory.output {
            seen.remember(directory, notes);
        }
        directory.mechanism = if directory.output { Mechanism::Mirror } else { Mechanism::Disk };
        forget_directories(directory);
        return Ok(());
    }
    let empty = is_empty(&directory.disk)?;
    // With a switch the program writes to disk first, so the directory must show through whatever it holds now.
    let must_overlay = request.delay.is_some();
    if empty && directory.nested.is_empty() && !must_overlay {
        let mut before = Before::default();
        before.note_top(directory.disk.as_fd())?;
        directory.before = Arc::new(before);
        directory.mechanism = Mechanism::Bind;
        return Ok(());
    }
    let mut seen = look(directory, (!root).then(OwnIds::of_this_process))?;
    let (content, foreign, shut) = (seen.content, seen.foreign.take(), seen.shut.take());
    // An overlay shows it as it is. A copy would have to read it.
    if let Some(shut) = &shut
        && (foreign.is_some() || existing == Existing::Copy && !must_overlay)
    {
        bail!(
            "{shut}, so it can't be copied into RAM; chmod u+rwX it{}, or run with --fallback disk",
            if foreign.is_none() { ", leave out --existing copy" } else { "" }
        );
    }
    seen.remember(directory, notes);
    directory.content = content;
    let path = directory.path.display();
    directory.mechanism = match (existing, foreign) {
        (Existing::Copy, _) if !must_overlay => Mechanism::Mirror,
        (Existing::Overlay, Some(foreign)) => bail!(
            "an overlay can't be used without root, because {foreign}: the program would get EOVERFLOW there; leave out \
             --existing overlay"
        ),
        (_, Some(foreign)) if must_overlay => bail!(
            "the switch after a delay needs an overlay, which can't be used without root because {foreign}; leave out \
             the delay"
        ),
        (_, Some(foreign)) => {
            if content.bytes > free.0 {
                bail!(
                    "what it holds ({}) does not fit into the free RAM ({free}), and it can't be overlaid without root \
                     because {foreign}; run with --fallback disk, or write to an empty directory",
                    Bytes(content.bytes)
                );
            }
            notes.push(format!("{path}: copied into RAM rather than overlaid, because {foreign}"));
            Mechanism::Mirror
        }
        (Existing::Auto, None)
            if !must_overlay
                && shut.is_none()
                && content.directories
                && content.bytes <= free.0 / SMALL_PART =>
        {
            Mechanism::Mirror
        }
        (_, None) => {
            if content.directories {
                notes.push(format!(
                    "{path}: the program can't rename the directories that are there already (EXDEV), and changing the mode \
                     or times of a file that is there copies it into RAM; --existing copy would copy all of it into RAM \
                     beforehand instead"
                ));
            }
            if directory.before.has_marks {
                notes.push(format!(
                    "{path}: something in it has the form of an overlay's own marks ({} attributes, or a device 0:0), which \
                     the program does not see and which stay on disk as they are; --existing copy shows them",
                    if root { "trusted.overlay.*" } else { "user.overlay.*" }
                ));
            }
            Mechanism::Overlay
        }
    };
    if directory.mechanism == Mechanism::Mirror {
        forget_directories(directory);
    }
    Ok(())
}

fn forget_directories(directory: &mut RunDirectory) {
    let before = std::mem::take(&mut directory.before);
    directory.before = Arc::new(Arc::unwrap_or_clone(before).without_directories());
}

/// An output directory of somebody else is the caller's own in RAM: the program can do to it what it can't on disk.
fn tell_of_other_owner(directory: &RunDirectory, notes: &mut Vec<String>) -> Result<()> {
    let owner = rustix::fs::fstat(&directory.disk)?.st_uid;
    if owner != OwnIds::of_this_process().uid {
        notes.push(format!(
            "{}: it belongs to user {owner}: if the program changes its mode, times or ACL, that does not come home",
            directory.path.display()
        ));
    }
    Ok(())
}

/// Whether a directory holds nothing.
pub fn is_empty(directory: &OwnedFd) -> Result<bool> {
    let mut buffer = [std::mem::MaybeUninit::<u8>::uninit(); 1024];
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // Looking should not change when it was read last; only its owner (or root) may ask for that.
    let listing = match rustix::fs::openat(directory, c".", flags | OFlags::NOATIME, Mode::empty()) {
        Err(rustix::io::Errno::PERM) => rustix::fs::openat(directory, c".", flags, Mode::empty())?,
        listing => listing?,
    };
    let mut entries = rustix::fs::RawDir::new(&listing, &mut buffer);
    while let Some(entry) = entries.next() {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The identity that a user namespace can represent.
#[derive(Clone, Copy)]
struct OwnIds {
    uid: u32,
    gid: u32,
}

impl OwnIds {
    fn of_this_process() -> OwnIds {
        OwnIds { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
    }
}

/// What a look into a directory has shown.
struct DirectoryScan {
    content: Content,
    /// An entry whose owner or group a user namespace has no name for.
    foreign: Option<String>,
    /// One whose mode shuts out the caller, its owner.
    shut: Option<String>,
    before: Before,
    /// Files with names outside of the directory.
    outside: usize,
}

impl DirectoryScan {
    /// Remembers what an output directory was like.
    fn remember(self, directory: &mut RunDirectory, notes: &mut Vec<String>) {
        if self.outside > 0 {
            notes.push(format!(
                "{}: {} in it {} further names outside of it (hard links), which keep the old content when the program writes \
                 to {}",
                directory.path.display(),
                crate::display::count(self.outside as u64, "file"),
                if self.outside == 1 { "has" } else { "have" },
                if self.outside == 1 { "it" } else { "them" },
            ));
        }
        directory.before = Arc::new(self.before);
    }
}

/// Sums up a directory without what is nested in it.
fn look(directory: &RunDirectory, own: Option<OwnIds>) -> Result<DirectoryScan> {
    const PAGE: u64 = 4096;
    let mut content = Content::default();
    let mut before = Before::default();
    before.note_top(directory.disk.as_fd())?;
    // Names that were not met yet of the files with several.
    let mut missing: HashMap<(u64, u64), u64> = HashMap::new();
    let mut foreign = None;
    let mut shut = None;
    let user = OwnIds::of_this_process().uid;
    let mut judge = |path: &[u8], uid: u32, gid: u32| {
        let Some(own) = own else { return };
        if foreign.is_none() && (uid != own.uid || gid != own.gid) {
            let what = if gid != own.gid { format!("group {gid}") } else { format!("user {uid}") };
            let name = OsStr::from_bytes(path).display().to_string();
            let name = if name.is_empty() { "it".to_owned() } else { format!("`{name}` in it") };
            foreign = Some(format!("{name} belongs to {what}"));
        }
    };
    let root = rustix::fs::fstat(&directory.disk)?;
    judge(b"", root.st_uid, root.st_gid);
    survey(directory.disk.as_fd(), &mut |visit| {
        if directory.nested.iter().any(|nested| nested == visit.path) {
            return Ok(Descend::No);
        }
        judge(visit.path, visit.stat.st_uid, visit.stat.st_gid);
        content.entries += 1;
        if directory.output {
            before.note(visit)?;
            if visit.stat.st_nlink > 1 && FileType::from_raw_mode(visit.stat.st_mode) != FileType::Directory {
                let inode = (visit.stat.st_dev, visit.stat.st_ino);
                *missing.entry(inode).or_insert(visit.stat.st_nlink) -= 1;
            }
        }
        let needed = match FileType::from_raw_mode(visit.stat.st_mode) {
            FileType::Directory => 0o500,
            FileType::RegularFile => 0o400,
            _ => 0,
        };
        if user != 0 && visit.stat.st_uid == user && visit.stat.st_mode & needed != needed {
            let name = OsStr::from_bytes(visit.path).display();
            let mode = visit.stat.st_mode & 0o7777;
            shut.get_or_insert_with(|| {
                format!("`{name}` in it has the mode {mode:04o}, which shuts out its owner")
            });
            if needed == 0o500 {
                content.directories = true;
                return Ok(Descend::No);
            }
        }
        match FileType::from_raw_mode(visit.stat.st_mode) {
            FileType::RegularFile => {
                let size = visit.stat.st_size as u64;
                // Holes stay holes; what a compressing filesystem saves does not.
                let data = size.min((visit.stat.st_blocks as u64 * 512).max(size / 2));
                content.bytes += data.div_ceil(PAGE) * PAGE;
            }
            FileType::Directory => content.directories = true,
            _ => {}
        }
        Ok(Descend::Yes)
    })
    .map_err(|(path, error)| {
        anyhow::anyhow!("{} in it can't be read: {error}", OsStr::from_bytes(&path).display())
    })?;
    // Changing anything that has one copies it into RAM with its ACL, for which a user namespace has no names.
    if own.is_some() && foreign.is_none() {
        before.note_acls_of_top(directory.disk.as_fd())?;
        foreign =
            before.acl_of_others.as_deref().map(|path| match OsStr::from_bytes(path).display().to_string() {
                name if name.is_empty() => "it has an ACL that names others".to_owned(),
                name => format!("`{name}` in it has an ACL that names others"),
            });
    }
    let outside = missing.values().filter(|missing| **missing > 0).count();
    Ok(DirectoryScan { content, foreign, shut, before, outside })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_the_system_is_known_by_what_its_symlink_leads_to() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap().join("real");
        let link = dir.path().join("link");
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(leads_to(&real, &real) && leads_to(&link, &real));
        assert!(!leads_to(&link, &real.join("job")) && !leads_to(Path::new("/no/such"), &real));
    }
}
