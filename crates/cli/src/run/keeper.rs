//! The keeper: the process that holds the RAM disk and lives through the whole job.
//!
//! It stays outside of the namespaces that it makes, with descriptors of the RAM disk and of the directories on disk
//! that were opened before anything was mounted over them. So it copies between the two with the user's own identity
//! and all groups, whether or not the front or the program are still there.

use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use ondeck_core::fit::in_mib;
use ondeck_core::{Bytes, PackFormat, duration, exit};
use ondeck_ramdisk::mounts::{self, Overlay, Target};
use ondeck_ramdisk::namespace::{self, Namespaces};
use ondeck_transfer::merge::{MergePolicy, Side};
use ondeck_transfer::pack::{self, PackOptions};
use ondeck_transfer::survey::{Descend, survey};
use ondeck_transfer::{
    Event, Exclude, Gate, Monitor, Options, Ownership, Progress, Roots, StageError, Summary, TargetRoot,
    stage_roots,
};
use rustix::fs::{FileType, Mode, OFlags, Timespec};
use rustix::process::Pid;

use super::deadline::{Deadline, measure_rate};
use super::homecoming::{
    Baseline, Before, Homecoming, Loosened, Mechanism, is_whiteout, remove_marks, seen_through_overlay,
};
use super::journal::{self, Journal, OpenedUp};
use super::message::{Line, Message, Order};
use super::plan::{Directory, Job, Plan, is_empty};
use super::program::{self, Surroundings};
use super::report::{self, Report};
use super::switch::Switch;
use super::watchers::{TICK, Watchers};
use super::{RunArgs, held, slurm};

/// What processes that the program left behind get between the request to end and the end.
pub const GRACE: Duration = Duration::from_secs(5);

/// What `--list` says of results that are held.
const HOLDING: &str = "holds results that are not on disk; `ondeck run --resume` stages them out";

/// A job's life from outside.
pub struct Keeper {
    /// What the phases need.
    pub shared: Shared,
    /// Those who watch.
    pub watchers: Watchers,
    report: Report,
    report_path: Option<PathBuf>,
    base: PathBuf,
    /// Outputs whose results a killed keeper has left where they can't be found, and why.
    out_of_reach: Vec<(usize, String)>,
    /// Whether a process waits to go on if this one is killed.
    guarded: bool,
    /// What says that the run's directory is in use.
    claim: Option<fs::File>,
}

/// What the phases, and the threads that work beside them, need.
pub struct Shared {
    /// What was decided before the start.
    pub plan: Plan,
    /// The program and its arguments.
    pub command: Vec<OsString>,
    options: Options,
    /// When the program must end before its batch job does.
    pub margin: Margin,
    surroundings: Surroundings,
    /// Children that are not the run's.
    pub spare: Vec<Pid>,
    id: String,
    /// The run's directory.
    pub dir: PathBuf,
    /// The output directories that are in RAM, by index into the plan.
    pub outputs: Mutex<Vec<std::sync::Arc<Output>>>,
    /// What was done to names of files that have several, which may be in several output directories.
    loosened: Arc<Loosened>,
    /// Events of single entries, for the report.
    findings: Mutex<Findings>,
}

/// An output directory in RAM.
pub struct Output {
    /// The index of its directory in the plan.
    pub directory: usize,
    /// Its results: the directory in RAM that the program writes to, or the overlay's upper layer.
    pub ram: OwnedFd,
    /// The name of that directory on the RAM disk.
    pub slot: String,
    /// How its results come home.
    pub homecoming: Homecoming,
    /// Whether everything of it is on disk.
    pub home: AtomicBool,
    /// Whether our mount over it was taken away, for the user's script.
    pub detached: AtomicBool,
}

#[derive(Default)]
struct Findings {
    errors: Vec<String>,
    error_count: u64,
    put_beside: Vec<report::Beside>,
    kept: Vec<String>,
}

/// When the program must end before its batch job does.
pub enum Margin {
    Off,
    Computed,
    Fixed(Duration),
}

/// How a life ended.
enum Ending {
    /// Everything is where it belongs.
    Done(u8),
    /// Results are held in RAM.
    Held(String),
}

/// A poisoned lock guards plain data, which is still good.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Keeper {
    /// Before the fork, so that the command has a copy. `spare` are the children that it has already.
    pub fn new(
        plan: Plan,
        job: Job,
        args: &RunArgs,
        base: PathBuf,
        surroundings: Surroundings,
        spare: Vec<Pid>,
    ) -> Keeper {
        let id = new_id();
        let dir = base.join(&id);
        let command = job.command;
        let report = Report {
            id: id.clone(),
            command: command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            ..Report::default()
        };
        let options = Options {
            checksum: args.checksum.into(),
            threads: args.threads.map_or(0, usize::from),
            bandwidth: args.bandwidth,
            verify: args.verify,
            ..Options::default()
        };
        let margin = match args.end_margin.as_deref() {
            Some("off") => Margin::Off,
            Some(text) => duration::parse(text, 1).map_or(Margin::Computed, Margin::Fixed),
            None => Margin::Computed,
        };
        let watchers = Watchers { fronts: Vec::new(), listener: None, dir: dir.clone(), last: None };
        let report_path = args.report.as_ref().map(|path| std::path::absolute(path).unwrap_or(path.clone()));
        Keeper {
            shared: Shared {
                plan,
                command,
                options,
                margin,
                surroundings,
                spare,
                id,
                dir,
                outputs: Mutex::default(),
                loosened: Arc::default(),
                findings: Mutex::default(),
            },
            watchers,
            report,
            report_path,
            base,
            out_of_reach: Vec::new(),
            guarded: false,
            claim: None,
        }
    }

    /// Lives the whole life; returns the process's exit code. `handover` is where the command finds what it needs if this
    /// process is killed.
    pub fn keep(mut self, front: UnixStream, handover: &OwnedFd) -> u8 {
        become_keeper();
        // Those are the command's.
        self.shared.spare.clear();
        self.watchers.fronts.extend(Line::new(front));
        let (exit_code, summary) = match self.live(handover) {
            Ok(code) => (code, self.report.summary()),
            Err((code, error)) => (code, format!("{error:#}")),
        };
        self.leave(exit_code, summary)
    }

    /// The end of the process.
    fn leave(&mut self, exit_code: u8, summary: String) -> u8 {
        self.watchers.send(&Message::Ended { exit_code, summary: summary.clone() });
        // Nothing is left when the front ends: not even the pages of the RAM disk.
        self.clean_up();
        self.watchers.send(&Message::Finished { exit_code, summary });
        exit_code
    }

    /// From nothing to the end. An error means that the program was not started and nothing was changed.
    fn live(&mut self, handover: &OwnedFd) -> Result<u8, (u8, anyhow::Error)> {
        let not_started = |error: anyhow::Error| (exit::NOT_STARTED, error);
        let paths: Vec<&std::path::Path> =
            self.shared.plan.directories.iter().map(|directory| directory.path.as_path()).collect();
        let gate = crate::gate::for_paths(&paths).map_err(not_started)?;
        self.shared.options.gate = gate;
        let began = Instant::now();
        let namespaces = self.build().map_err(not_started)?;
        namespaces
            .hand_over(handover)
            .and_then(|()| {
                self.claim.as_ref().map_or(Ok(()), |claim| namespace::deposit(handover, claim.as_fd()))
            })
            .context("can't hand the RAM disk's descriptors over to the command")
            .map_err(not_started)?;
        self.report.phase("build", began.elapsed(), 0, 0);
        let began = Instant::now();
        self.stage_in(&namespaces)?;
        self.prepare_outputs(&namespaces).map_err(not_started)?;
        self.mount(&namespaces).map_err(not_started)?;
        self.report.waited_seconds = began.elapsed().as_secs_f64();
        for note in std::mem::take(&mut self.shared.plan.notes) {
            self.note(note);
        }
        let code = self.run_program(&namespaces);
        Ok(self.bring_results(&namespaces, code))
    }

    /// From the end of the program to the end of the run.
    fn bring_results(&mut self, namespaces: &Namespaces, code: u8) -> u8 {
        let began = Instant::now();
        let mut ending = self.bring_home(namespaces, code, false);
        self.report.waited_seconds += began.elapsed().as_secs_f64();
        loop {
            match ending {
                Ending::Done(code) => {
                    self.finish(code);
                    return code;
                }
                Ending::Held(why) => match self.hold(namespaces, &why) {
                    Order::Abandon => {
                        self.watchers.warning("the results were given up, as you said");
                        self.finish(exit::ABANDONED);
                        return exit::ABANDONED;
                    }
                    _ => ending = self.bring_home(namespaces, code, true),
                },
            }
        }
    }

    /// In the command, whose keeper was killed: learns what that one knew.
    pub fn inherit(&mut self, namespaces: &Namespaces) {
        rustix::process::umask(Mode::empty());
        let paths: Vec<PathBuf> =
            self.shared.plan.directories.iter().map(|directory| directory.path.clone()).collect();
        // If it does not open now, it is asked again with every try to bring the results home.
        let ask = move || -> Result<Option<Gate>> {
            crate::gate::for_paths(&paths.iter().map(PathBuf::as_path).collect::<Vec<_>>())
        };
        self.shared.options.gate = ask().unwrap_or_else(|_| {
            Some(Gate::new(move || match ask() {
                Ok(gate) => gate.map_or(Ok(()), |gate| gate.check()),
                Err(error) => Err(format!("{error:#}")),
            }))
        });
        lock(&self.shared.outputs).clear();
        self.out_of_reach.clear();
        for index in 0..self.shared.plan.directories.len() {
            if !self.shared.plan.directories[index].output {
                continue;
            }
            let recalled = self.shared.recall_output(namespaces, index).or_else(|error| {
                let path = self.shared.plan.directories[index].path.display();
                self.watchers.warning(&format!(
                    "{path}: what the keeper has written down of its results can't be read: {error}; what is on disk counts \
                     as somebody else's"
                ));
                self.shared.output_of_nothing(namespaces, index).map(Some)
            });
            match recalled {
                Ok(output) => {
                    lock(&self.shared.outputs).extend(output.map(std::sync::Arc::new));
                }
                Err(error) => {
                    self.out_of_reach.push((index, format!("its results can't be found in RAM: {error}")))
                }
            }
        }
        if self.report.directories.is_empty() {
            self.describe_directories();
            self.report.ram_disk = Some(report::RamDisk {
                size: self.shared.plan.size.0,
                huge_pages: namespaces.features.huge_pages,
                no_swap: namespaces.features.no_swap,
                ..report::RamDisk::default()
            });
            self.report.notes.push("the keeper process was killed; another one took its place".to_owned());
        }
        if self.shared.plan.delay.take().is_some() && lock(&self.shared.outputs).is_empty() {
            self.watchers
                .warning("the switch after the delay does not take place any more; the output goes to disk");
        }
    }

    /// In a thread of the command, whose keeper was killed: waits for the program. Returns its exit code.
    pub fn stand_in(&mut self, namespaces: &Namespaces, pid: u32) -> u8 {
        self.listen_again();
        self.watchers.phase("program", None);
        self.watchers.state("the program runs");
        let began = Instant::now();
        let code = self.attend(namespaces, pid);
        self.program_ended(namespaces, code, began);
        code
    }

    /// As a new keeper, after the program has ended: brings its results home.
    pub fn go_on(&mut self, namespaces: &Namespaces, code: u8, front: UnixStream) -> u8 {
        become_keeper();
        self.shared.spare.clear();
        self.guarded = false;
        // The program's input and output were its own.
        let _ = program::redirect(0..=1);
        self.watchers.fronts.extend(Line::new(front));
        self.listen_again();
        self.report.program.exit_code = code;
        let code = self.bring_results(namespaces, code);
        let summary = self.report.summary();
        self.leave(code, summary)
    }

    /// Takes the place of one who listened before. Without it the run goes on, unseen by `--list`.
    fn listen_again(&mut self) {
        let path = self.shared.dir.join("control");
        let _ = fs::remove_file(&path);
        self.watchers.listener = UnixListener::bind(path)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .ok();
    }

    fn build(&mut self) -> Result<Namespaces> {
        let dir = &self.shared.dir;
        let mount_point = dir.join("ramdisk");
        make_private(dir)?;
        self.claim = Some(held::claim(dir).with_context(|| format!("can't lock {}", dir.display()))?);
        make_private(&mount_point)?;
        let listener =
            UnixListener::bind(dir.join("control")).context("can't listen for `ondeck run --resume`")?;
        listener.set_nonblocking(true)?;
        self.watchers.listener = Some(listener);
        self.watchers.state("starting");
        let namespaces = Namespaces::build(&mount_point, self.shared.plan.size).map_err(|error| {
            let hint = if self.shared.plan.root {
                "mounting needs CAP_SYS_ADMIN, which a container may take away even from root"
            } else {
                "an ordinary user needs user namespaces (user.max_user_namespaces, \
                 kernel.apparmor_restrict_unprivileged_userns); `ondeck doctor` says what is missing"
            };
            anyhow!("can't build the RAM disk: {error}; {hint}; --fallback disk would run without one")
        })?;
        self.report.ram_disk = Some(report::RamDisk {
            size: self.shared.plan.size.0,
            huge_pages: namespaces.features.huge_pages,
            no_swap: namespaces.features.no_swap,
            ..report::RamDisk::default()
        });
        Ok(namespaces)
    }

    /// Fills the RAM disk: the inputs, and outputs whose content is mirrored.
    fn stage_in(&mut self, namespaces: &Namespaces) -> Result<(), (u8, anyhow::Error)> {
        let not_started = |error: anyhow::Error| (exit::NOT_STARTED, error);
        let staged: Vec<usize> = (0..self.shared.plan.directories.len())
            .filter(|index| {
                let directory = &self.shared.plan.directories[*index];
                directory.input || directory.mechanism == Mechanism::Mirror
            })
            .collect();
        let total = staged.iter().map(|index| self.shared.plan.directories[*index].content.bytes).sum();
        self.watchers.phase("stage_in", Some(total));
        for index in staged {
            let directory = &self.shared.plan.directories[index];
            let scripted = directory.input && self.shared.plan.stage_in.is_some();
            let began = Instant::now();
            let (bytes, files) = if scripted {
                let path = directory.path.clone();
                self.shared.make_slot(namespaces, index).map_err(not_started)?;
                self.stage_in_by_script(namespaces, index).map_err(not_started)?;
                let used = used_of(&namespaces.ram_disk).unwrap_or(Bytes::ZERO);
                self.note(format!("{}: filled by the stage-in script ({used})", path.display()));
                (used.0, 0)
            } else {
                let summary = self.copy_in(namespaces, index)?;
                (summary.bytes_written, summary.files)
            };
            self.report.phase("stage_in", began.elapsed(), bytes, files);
        }
        Ok(())
    }

    fn copy_in(&mut self, namespaces: &Namespaces, index: usize) -> Result<Summary, (u8, anyhow::Error)> {
        let not_started = |error: anyhow::Error| (exit::NOT_STARTED, error);
        let shared = &self.shared;
        let directory = &shared.plan.directories[index];
        if directory.content.entries == 0 && directory.nested.is_empty() {
            return shared.make_slot(namespaces, index).map(|_| Summary::default()).map_err(not_started);
        }
        let options = Options {
            // A user namespace has no name for the users of some ACLs; the copies in RAM are the caller's alone anyway.
            attributes_best_effort: !shared.plan.root,
            // RAM needs no sync. The manifest tells later what the program left as it was.
            sync: false,
            verify: false,
            manifest: directory.output.then(|| staged_path(&shared.dir, index)),
            tag: Some(shared.id.clone()),
            exclude: Exclude::exactly(directory.nested.iter().cloned()),
            ..shared.options.clone()
        };
        let roots = || -> Result<Roots> {
            Ok(Roots {
                source: rustix::io::fcntl_dupfd_cloexec(&directory.disk, 0)?,
                target: TargetRoot::New(
                    rustix::io::fcntl_dupfd_cloexec(&namespaces.ram_disk, 0)?,
                    CString::new(slot_name(index))?,
                ),
                source_path: directory.path.clone(),
                target_path: PathBuf::from("the RAM disk"),
            })
        };
        let roots = roots().map_err(not_started)?;
        let progress = Progress::new();
        let events = |event: Event<'_>| shared.record(directory, None, &event);
        let monitor = Monitor { progress: &progress, event: &events };
        let mut signalled = None;
        let summary = self.watchers.watch(
            &progress,
            |order| {
                if let Order::Signal { number } = order {
                    signalled = Some(number);
                    progress.cancel.store(true, Relaxed);
                }
            },
            || stage_roots(roots, &options, None, &monitor),
        );
        let path = directory.path.display();
        let summary = match summary {
            Ok(summary) => summary,
            Err(StageError::Interrupted) => {
                let code = signalled.map_or(exit::NOT_STARTED, |number| exit::SIGNAL_BASE + number as u8);
                let text =
                    "interrupted while staging in; the program was not started and nothing was changed";
                return Err((code, anyhow!(text)));
            }
            Err(error) => return Err(not_started(anyhow!("staging in {path}: {error}"))),
        };
        if summary.errors > 0 {
            let errors = lock(&shared.findings).errors.join("\n  ");
            return Err(not_started(anyhow!(
                "staging in {path}: {} could not be read:\n  {errors}\nMend them, or run with --fallback disk",
                crate::display::count(summary.errors, "entry").replace("entrys", "entries")
            )));
        }
        for nested in &directory.nested {
            open_slot(namespaces, &slot_name(index))
                .and_then(|copy| make_mount_point(&copy, nested))
                .map_err(|error| not_started(error.into()))?;
        }
        Ok(summary)
    }

    fn stage_in_by_script(&mut self, namespaces: &Namespaces, index: usize) -> Result<()> {
        let Some(script) = self.shared.plan.stage_in.clone() else { return Ok(()) };
        let directory = &self.shared.plan.directories[index];
        let ram = self.shared.dir.join("ramdisk").join(slot_name(index));
        let environment = self.shared.environment(&ram);
        let child = program::start_script(
            namespaces,
            &script,
            [&ram, &directory.path],
            &environment,
            self.shared.surroundings,
        )
        .with_context(|| format!("can't run the stage-in script {}", script.display()))?;
        let pid = child.id();
        let status = self.watchers.wait_for(pid, |order| {
            if let Order::Signal { number } = order {
                program::send_signal(pid, number);
            }
        });
        program::end_left_behind(GRACE, &self.shared.spare);
        if !status.success() {
            anyhow::bail!(
                "the stage-in script {} failed ({status}); the program was not started and nothing was changed",
                script.display()
            );
        }
        Ok(())
    }

    /// Makes the directories in RAM that the program will write to.
    fn prepare_outputs(&mut self, namespaces: &Namespaces) -> Result<()> {
        if self.shared.plan.switches() {
            return Ok(());
        }
        for index in 0..self.shared.plan.directories.len() {
            let directory = &self.shared.plan.directories[index];
            if directory.output {
                let before = directory.before.clone();
                let output = self.shared.prepare_output(
                    namespaces,
                    index,
                    directory.mechanism,
                    directory.since,
                    before,
                )?;
                lock(&self.shared.outputs).push(std::sync::Arc::new(output));
            }
        }
        Ok(())
    }

    /// Shows every directory at its path, parents before what lies in them.
    fn mount(&mut self, namespaces: &Namespaces) -> Result<()> {
        self.shared.anchor(namespaces).context("can't hold on to the directories on disk")?;
        let shared = &self.shared;
        let shown: Vec<(usize, Mechanism)> = shared
            .plan
            .directories
            .iter()
            .enumerate()
            .filter(|(_, directory)| directory.input || !shared.plan.switches())
            .map(|(index, directory)| {
                let plain = directory.input && !directory.output;
                (index, if plain { Mechanism::Bind } else { directory.mechanism })
            })
            .collect();
        // All in one child, because each costs a fork. If that fails, one by one, to name the culprit.
        if namespaces
            .inside(|| shown.iter().try_for_each(|(index, how)| shared.mount_here(*index, *how)))
            .is_err()
        {
            for (index, how) in &shown {
                let path = shared.plan.directories[*index].path.display();
                shared
                    .mount_one(namespaces, *index, *how)
                    .with_context(|| format!("can't show the RAM disk at {path}"))?;
            }
        }
        self.describe_directories();
        Ok(())
    }

    fn describe_directories(&mut self) {
        for directory in &self.shared.plan.directories {
            let mechanism = if directory.input && !directory.output {
                "input"
            } else if self.shared.plan.switches() && !directory.input {
                "disk"
            } else {
                directory.mechanism.word()
            };
            self.report.directories.push(report::Directory {
                path: directory.path.to_string_lossy().into_owned(),
                input: directory.input,
                output: directory.output,
                mechanism,
            });
        }
    }

    /// Runs the program to its end, with everything that goes on beside it. Returns the exit code.
    fn run_program(&mut self, namespaces: &Namespaces) -> u8 {
        self.watchers.phase("program", None);
        self.watchers.state("the program runs");
        let began = Instant::now();
        let child = program::start(namespaces, &self.shared.command, self.shared.surroundings);
        let code = match child {
            Err(error) => {
                let name = Path::new(&self.shared.command[0]).display().to_string();
                self.watchers.warning(&format!("can't run {name}: {error}"));
                let code = program::start_failure(&self.shared.command[0], &error);
                self.watchers.send(&Message::ProgramEnded { exit_code: code });
                code
            }
            Ok(child) => {
                self.watchers.send(&Message::ProgramStarted { pid: child.id() });
                // The program's input and output are its own from now on: a reader of its pipe must not wait for us.
                let _ = program::redirect(0..=1);
                self.attend(namespaces, child.id())
            }
        };
        self.program_ended(namespaces, code, began);
        code
    }

    fn attend(&mut self, namespaces: &Namespaces, pid: u32) -> u8 {
        let status = self.accompany(namespaces, pid);
        self.report.program.signal = status.signal();
        program::exit_code(status)
    }

    /// After the program: ends what it has left behind.
    fn program_ended(&mut self, namespaces: &Namespaces, code: u8, began: Instant) {
        self.report.program.exit_code = code;
        self.report.program.seconds = began.elapsed().as_secs_f64();
        self.report.phase("program", began.elapsed(), 0, 0);
        let left = program::end_left_behind(GRACE, &self.shared.spare);
        self.report.program.left_behind = left;
        if left > 0 {
            let processes = crate::display::count(left, "process").replace("processs", "processes");
            self.note(format!(
                "the program left {processes} behind, which {} ended",
                if left == 1 { "was" } else { "were" }
            ));
        }
        self.look_at_use(namespaces);
    }

    /// Waits for the program; copies out, switches, watches the RAM disk and the batch job's limit meanwhile.
    fn accompany(&mut self, namespaces: &Namespaces, pid: u32) -> std::process::ExitStatus {
        let ticker = Ticker::default();
        let interim = Progress::new();
        let mut switch = Switch::new(&self.shared.plan);
        let mut deadline = Deadline::new(&self.shared.margin);
        let mut peak = 0;
        let mut full = false;
        let mut switched_outputs = Vec::new();
        let shared = &self.shared;
        let watchers = &mut self.watchers;
        let (tell, told) = std::sync::mpsc::channel::<String>();
        let mut interim_notes = Vec::new();
        let status = std::thread::scope(|scope| {
            if let Some(interval) = shared.plan.copy_out_interval {
                let (ticker, interim) = (&ticker, &interim);
                scope.spawn(move || shared.copy_out_regularly(interval, ticker, interim, &tell));
            }
            if deadline.is_set() {
                scope.spawn(|| measure_rate(shared));
            }
            let handle = program::open_pid(pid);
            let status = loop {
                if watchers.wait(handle.as_ref().map(|fd| fd.as_fd()), TICK, &mut |order| {
                    if let Order::Signal { number } = order {
                        program::send_signal(pid, number);
                    }
                }) || handle.is_none()
                {
                    // Without a descriptor (Linux before 5.3) the pid is asked at every tick.
                    // Told before it is collected: whoever takes over finds the one or the other.
                    if let Some(status) = program::ended(pid) {
                        let exit_code = program::exit_code(status);
                        watchers.send(&Message::ProgramEnded { exit_code });
                        let _ = program::reap(pid, false);
                        break status;
                    }
                }
                program::reap_orphans(pid as i32);
                for text in told.try_iter() {
                    watchers.warning(&text);
                    interim_notes.push(text);
                }
                if let Ok(usage) = rustix::fs::fstatvfs(&namespaces.ram_disk) {
                    peak = peak.max((usage.f_blocks - usage.f_bfree) * usage.f_frsize);
                    full |= usage.f_bfree * usage.f_frsize < 64 << 10;
                }
                if let Some(outcome) = switch.advance(shared, namespaces) {
                    match outcome {
                        Ok(directories) => switched_outputs = directories,
                        Err(why) => watchers.warning(&why),
                    }
                }
                if let Some(reason) = deadline.check(shared, peak) {
                    watchers.warning(&reason);
                    program::send_signal(pid, if deadline.forced() { libc::SIGKILL } else { libc::SIGTERM });
                }
            };
            interim.cancel.store(true, Relaxed);
            ticker.stop();
            status
        });
        self.report.notes.extend(interim_notes);
        for (index, mechanism) in switched_outputs {
            let path = self.shared.plan.directories[index].path.to_string_lossy().into_owned();
            self.watchers.note(&format!(
                "{path}: from now on the program's output went to RAM (the switch after the delay)"
            ));
            for directory in &mut self.report.directories {
                if directory.path == path {
                    directory.mechanism = Mechanism::word(mechanism);
                }
            }
        }
        if let Some(ram_disk) = &mut self.report.ram_disk {
            ram_disk.peak_used = ram_disk.peak_used.max(peak);
            ram_disk.full |= full;
        }
        status
    }

    /// Was the RAM disk too small? Then say what probably did not fit, and what would.
    fn look_at_use(&mut self, namespaces: &Namespaces) {
        let Ok(usage) = rustix::fs::fstatvfs(&namespaces.ram_disk) else { return };
        let used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize;
        let left = usage.f_bfree * usage.f_frsize;
        let Some(ram_disk) = &mut self.report.ram_disk else { return };
        ram_disk.peak_used = ram_disk.peak_used.max(used);
        ram_disk.full |= left < 64 << 10;
        if !ram_disk.full {
            return;
        }
        let (size, free) = (Bytes(ram_disk.size), self.shared.plan.free);
        let latest = self.shared.latest_files();
        let remedy = if size.0.saturating_mul(2) <= free.0 {
            format!("run it again with --size {} or more", in_mib(Bytes(size.0 * 2)))
        } else {
            format!("this machine has {free} of RAM free in all; write part of the output elsewhere")
        };
        let files = if latest.is_empty() {
            String::new()
        } else {
            format!("; written last, and so probably incomplete: {}", latest.join(", "))
        };
        self.watchers.warning(&format!(
            "the RAM disk of {size} was full, so the program will have met \"No space left on device\"{files}; what it wrote \
             is saved; {remedy}"
        ));
    }

    /// Stages every output out. When it is done `again`, directories that are gone are opened anew by their paths.
    fn bring_home(&mut self, namespaces: &Namespaces, code: u8, again: bool) -> Ending {
        let mut problems = if again { self.open_targets_anew() } else { Vec::new() };
        for (index, why) in &self.out_of_reach {
            let path = self.shared.plan.directories[*index].path.display();
            problems.push((*index, format!("{path}: {why}")));
        }
        let outputs: Vec<_> = lock(&self.shared.outputs).clone();
        *lock(&self.shared.findings) = Findings::default();
        let total = outputs
            .iter()
            .filter(|output| !output.home.load(Relaxed))
            .filter_map(|output| used_below(&output.ram))
            .sum();
        self.watchers.phase("stage_out", Some(total));
        self.watchers.state("staging out");
        for output in &outputs {
            if output.home.load(Relaxed) || problems.iter().any(|(index, _)| *index == output.directory) {
                continue;
            }
            let began = Instant::now();
            let path = self.shared.plan.directories[output.directory].path.display().to_string();
            let result = if self.shared.plan.stage_out.is_some() {
                self.stage_out_by_script(namespaces, output)
            } else {
                self.copy_out(output)
            };
            match result {
                Ok((bytes, files)) => {
                    output.home.store(true, Relaxed);
                    if let Some(journal) = &output.homecoming.journal {
                        journal.home();
                    }
                    self.report.phase("stage_out", began.elapsed(), bytes, files);
                }
                Err(Abort::Abandoned) => return Ending::Done(exit::ABANDONED),
                Err(Abort::Failed(error)) => problems.push((output.directory, format!("{path}: {error:#}"))),
            }
        }
        self.take_findings();
        self.report.results_on_disk = problems.is_empty();
        if !problems.is_empty() {
            let problems: Vec<String> = problems.into_iter().map(|(_, problem)| problem).collect();
            return Ending::Held(problems.join("\n"));
        }
        Ending::Done(if self.report.moved.is_empty() { code } else { exit::RESULTS_ELSEWHERE })
    }

    /// Opens the directories that are gone anew, by their paths. Returns which can't be, and why.
    fn open_targets_anew(&mut self) -> Vec<(usize, String)> {
        let outputs: Vec<_> = lock(&self.shared.outputs).clone();
        let mut problems = Vec::new();
        for output in outputs.iter().filter(|output| !output.home.load(Relaxed)) {
            let path = self.shared.plan.directories[output.directory].path.display().to_string();
            match self.shared.open_target_anew(output) {
                Ok(false) => {}
                Ok(true) => self.note(format!(
                    "{path}: the directory was removed while the program ran; its results go to the one that is there now"
                )),
                Err(error) => problems.push((output.directory, format!("{path}: {error:#}"))),
            }
        }
        problems
    }

    /// Tells of a directory whose results are not under its path.
    fn tell_moved(&mut self, path: &str, now: &Path) {
        let now = now.display().to_string();
        self.watchers.warning(&format!(
            "{path}: the directory was renamed while the program ran; its results are in {now}"
        ));
        self.report.moved.push(report::Moved { path: path.to_owned(), now });
    }

    fn copy_out(&mut self, output: &Output) -> Result<(u64, u64), Abort> {
        let shared = &self.shared;
        let untouched =
            output.homecoming.mechanism == Mechanism::Bind && lock(&output.homecoming.ours).is_empty();
        if untouched
            && is_empty(&output.ram).is_ok_and(|empty| empty)
            && output.homecoming.is_top_as_shown(output.ram.as_fd()).is_ok_and(|same| same)
        {
            return Ok((0, 0));
        }
        let progress = Progress::new();
        let mut abandoned = false;
        let summary = self.watchers.watch(
            &progress,
            |order| {
                if matches!(order, Order::Abandon) {
                    abandoned = true;
                    progress.cancel.store(true, Relaxed);
                }
            },
            || match shared.plan.pack {
                Some(format) => shared.pack_out(output, format, &progress),
                None => shared.copy_out(output, &progress),
            },
        );
        if abandoned {
            return Err(Abort::Abandoned);
        }
        let summary = summary.map_err(Abort::Failed)?;
        let directory = &shared.plan.directories[output.directory];
        // Only now, because it may have happened while they were copied.
        let moved = directory.moved_to().map_err(Abort::Failed)?;
        let unverified = summary.verified.map_or(0, |verified| verified.failed);
        if summary.errors + unverified > 0 {
            let findings = lock(&shared.findings);
            return Err(Abort::Failed(anyhow!(
                "{} not on disk:\n  {}",
                crate::display::count(summary.errors.max(unverified), "entry").replace("entrys", "entries"),
                findings.errors.join("\n  ")
            )));
        }
        if let Some(now) = moved {
            let path = directory.path.display().to_string();
            self.tell_moved(&path, &now);
        }
        Ok((summary.bytes_written, summary.files))
    }

    fn stage_out_by_script(&mut self, namespaces: &Namespaces, output: &Output) -> Result<(u64, u64), Abort> {
        let failed = |error: anyhow::Error| Abort::Failed(error);
        let Some(script) = self.shared.plan.stage_out.clone() else { return Ok((0, 0)) };
        let directory = &self.shared.plan.directories[output.directory];
        // The script must see the directory on disk under its path.
        let path = directory.path.clone();
        // And it knows the directory by nothing else.
        if let Some(now) = directory.moved_to().map_err(failed)? {
            return Err(failed(anyhow!(
                "the directory was renamed while the program ran and is {} now; move it back, for the stage-out script",
                now.display()
            )));
        }
        // Once: a second time it would be the user's own mount.
        if !output.detached.swap(true, Relaxed) {
            namespaces.inside(|| mounts::detach(&path)).map_err(|error| failed(error.into()))?;
            if let Some(journal) = &output.homecoming.journal {
                journal.detached();
            }
        }
        let ram = self.shared.dir.join("ramdisk").join(&output.slot);
        let environment = self.shared.environment(&ram);
        let child =
            program::start_script(namespaces, &script, [&ram, &path], &environment, self.shared.surroundings)
                .with_context(|| format!("can't run the stage-out script {}", script.display()))
                .map_err(failed)?;
        let pid = child.id();
        let mut abandoned = false;
        let status = self.watchers.wait_for(pid, |order| match order {
            Order::Abandon => {
                abandoned = true;
                program::send_signal(pid, libc::SIGKILL);
            }
            Order::Signal { .. } | Order::Resume => {}
        });
        program::end_left_behind(GRACE, &self.shared.spare);
        if abandoned {
            return Err(Abort::Abandoned);
        }
        if !status.success() {
            return Err(failed(anyhow!("the stage-out script {} failed ({status})", script.display())));
        }
        rustix::fs::syncfs(&directory.disk)
            .context("the target filesystem failed to sync")
            .map_err(failed)?;
        Ok((used_below(&output.ram).unwrap_or(0), 0))
    }

    /// Waits with the results in RAM until someone says what to do.
    fn hold(&mut self, namespaces: &Namespaces, why: &str) -> Order {
        let id = &self.shared.id;
        let pid = std::process::id();
        let reach: Vec<String> = lock(&self.shared.outputs)
            .iter()
            .filter(|output| !output.home.load(Relaxed))
            .map(|output| format!("/proc/{pid}/fd/{}/{}", namespaces.ram_disk_number(), output.slot))
            .collect();
        let text = format!(
            "THE RESULTS ARE NOT ALL ON DISK.\n{why}\nThey are held in RAM and can be read at {}. Make room or mend the \
             target, then run:\n  ondeck run --resume {id}\nor give them up with: ondeck run --abandon {id}",
            reach.join(" and ")
        );
        self.report.exit_code = exit::RESULTS_NOT_STAGED;
        self.report.results_on_disk = false;
        self.write_report();
        self.watchers.state(HOLDING);
        let held = Message::Held { exit_code: exit::RESULTS_NOT_STAGED, text };
        self.watchers.send(&held);
        // Nobody who reads our output must wait for as long as this takes.
        let _ = program::redirect(0..=2);
        self.guard(namespaces, &held);
        let mut answer = None;
        while answer.is_none() {
            self.watchers.wait(None, Duration::from_secs(3600), &mut |order| {
                if matches!(order, Order::Resume | Order::Abandon) {
                    answer = Some(order);
                }
            });
        }
        answer.unwrap_or(Order::Resume)
    }

    /// Goes on in a child of this process, which does nothing more but to start another one if that is killed: nobody else
    /// is left who has the results, and they may be held for long.
    fn guard(&mut self, namespaces: &Namespaces, held: &Message) {
        if std::mem::replace(&mut self.guarded, true) {
            return;
        }
        let mut again = false;
        loop {
            // SAFETY: the keeper has one thread between its phases, so the child is a complete copy of it.
            match unsafe { libc::fork() } {
                // Without a guard, as if it had been killed.
                -1 => return,
                0 => {
                    // SAFETY: plain values. The child adopts what it starts, as its parent did.
                    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
                    if again {
                        // Whoever has asked for another try must not wait for its end.
                        self.watchers.state(HOLDING);
                        self.watchers.send(held);
                    }
                    return;
                }
                child => {
                    let status = program::reap(child as u32, true);
                    if let Some(code) = status.and_then(|status| status.code()) {
                        // SAFETY: it has done and removed everything.
                        unsafe { libc::_exit(code) }
                    }
                    // A script of the user's, of a stage-out that was tried again.
                    program::end_left_behind(GRACE, &[]);
                    self.inherit(namespaces);
                    again = true;
                }
            }
        }
    }

    /// Everything is on disk (or given up): the record.
    fn finish(&mut self, code: u8) {
        self.take_findings();
        self.report.exit_code = code;
        self.write_report();
    }

    fn write_report(&mut self) {
        // Without anybody in front, a record is kept where `--list` users look.
        let orphaned = self
            .watchers
            .fronts
            .is_empty()
            .then(|| self.base.join(format!("{}.report.json", self.shared.id)));
        for path in [self.report_path.clone(), orphaned].into_iter().flatten() {
            // Its mode is for the user's mask to decide.
            rustix::process::umask(self.shared.surroundings.umask);
            let written = self.report.write(&path);
            rustix::process::umask(Mode::empty());
            if let Err(error) = written {
                self.watchers.warning(&format!("{error:#}"));
            }
        }
    }

    fn take_findings(&mut self) {
        let findings = std::mem::take(&mut *lock(&self.shared.findings));
        for beside in &findings.put_beside {
            self.watchers.warning(&format!(
                "{}: someone else changed it on disk while the program ran; theirs is kept, the program's is beside it as {}",
                beside.path, beside.name
            ));
        }
        for kept in &findings.kept {
            self.watchers.warning(&format!(
                "{kept}: kept, because someone else changed it or put it there while the program ran; the program had deleted \
                 it or its directory"
            ));
        }
        self.report.errors = findings.errors;
        self.report.put_beside.extend(findings.put_beside);
        self.report.kept.extend(findings.kept);
    }

    fn note(&mut self, text: String) {
        self.watchers.note(&text);
        self.report.notes.push(text);
    }

    /// Removes what the run made outside of its namespaces; the namespaces and the RAM disk go with this process.
    pub fn clean_up(&mut self) {
        lock(&self.shared.outputs).clear();
        self.watchers.listener = None;
        let dir = &self.shared.dir;
        for name in ["control", "state", "log", held::LOCK] {
            let _ = fs::remove_file(dir.join(name));
        }
        for index in 0..self.shared.plan.directories.len() {
            let _ = fs::remove_file(manifest_path(dir, index));
            let _ = fs::remove_file(staged_path(dir, index));
            for kept in [baseline_path(dir, index), journal_path(dir, index)] {
                let _ = fs::remove_file(kept.with_extension("partial"));
                let _ = fs::remove_file(kept);
            }
        }
        let _ = fs::remove_dir(dir.join("ramdisk"));
        let _ = fs::remove_dir(dir);
    }
}

/// Why a stage-out did not end well.
enum Abort {
    Failed(anyhow::Error),
    Abandoned,
}

impl Shared {
    /// What the user's scripts find in their environment (the thesis, section 3.2.1 and appendix U).
    fn environment(&self, ram: &Path) -> Vec<(&'static str, OsString)> {
        let joined = |input: bool| -> OsString {
            let chosen = self.plan.directories.iter().filter(|d| if input { d.input } else { d.output });
            let paths: Vec<&std::ffi::OsStr> = chosen.map(|directory| directory.path.as_os_str()).collect();
            paths.join(std::ffi::OsStr::new(":"))
        };
        vec![
            ("RSA_RAMDISK", ram.as_os_str().to_owned()),
            ("RSA_DATA_IN", joined(true)),
            ("RSA_DATA_OUT", joined(false)),
            ("RSA_JOB_ID", slurm::job_id().unwrap_or_else(|| self.id.clone()).into()),
        ]
    }

    fn make_slot(&self, namespaces: &Namespaces, index: usize) -> Result<OwnedFd> {
        let name = slot_name(index);
        rustix::fs::mkdirat(&namespaces.ram_disk, &name, Mode::RWXU)?;
        let slot = open_slot(namespaces, &name)?;
        // The program sees the directory's own owner, mode and ACL; what the user may not give away stays theirs.
        let _ = ondeck_transfer::copy_directory_attributes(
            self.plan.directories[index].disk.as_fd(),
            slot.as_fd(),
        );
        Ok(slot)
    }

    /// Makes the directory in RAM that the program will write to.
    pub fn prepare_output(
        &self,
        namespaces: &Namespaces,
        index: usize,
        mechanism: Mechanism,
        since: (i64, i64),
        before: Arc<Before>,
    ) -> Result<Output> {
        let directory = &self.plan.directories[index];
        let slot = slot_name(index);
        let mut staged = None;
        let ram = match mechanism {
            Mechanism::Mirror => {
                let ram = open_slot(namespaces, &slot)?;
                staged = Some(staged_path(&self.dir, index)).filter(|path| path.exists());
                ram
            }
            Mechanism::Overlay => {
                rustix::fs::mkdirat(&namespaces.ram_disk, work_name(index), Mode::RWXU)?;
                let ram = self.make_slot(namespaces, index)?;
                remove_marks(ram.as_fd())?;
                ram
            }
            Mechanism::Bind | Mechanism::Disk => self.make_slot(namespaces, index)?,
        };
        let baseline = match (mechanism, &staged) {
            (Mechanism::Mirror, None) => Baseline::default(),
            _ => Baseline::of(ram.as_fd(), staged.as_deref(), before)?,
        };
        // For one who takes over, and so before the program can change anything.
        baseline.write(&baseline_path(&self.dir, index))?;
        let journal = Journal::begin(&journal_path(&self.dir, index), mechanism, since)?;
        Ok(Output {
            directory: index,
            ram,
            slot,
            homecoming: Homecoming {
                mechanism,
                since,
                baseline,
                id: self.id.clone(),
                nested: directory.nested.clone(),
                interim: AtomicBool::new(false),
                ours: Mutex::default(),
                made: Mutex::default(),
                salvage: false,
                loosened: self.loosened.clone(),
                entered: Mutex::default(),
                others: Mutex::default(),
                journal: Some(journal),
            },
            home: AtomicBool::new(false),
            detached: AtomicBool::new(false),
        })
    }

    /// An output as a keeper that was killed has left it; none if the program was never shown it.
    fn recall_output(&self, namespaces: &Namespaces, index: usize) -> io::Result<Option<Output>> {
        let path = journal_path(&self.dir, index);
        let Some(recalled) = journal::recall(&path)? else { return Ok(None) };
        let slot = slot_name(index);
        let ram = self.open_any_slot(namespaces, index)?;
        self.loosened.recall(recalled.loosened);
        // The other way round than they were opened: what is in a directory before the directory.
        for opened in recalled.opened_up.iter().rev() {
            let root = if opened.side == Side::Source { &ram } else { &self.plan.directories[index].disk };
            opened.shut(root.as_fd())?;
        }
        Ok(Some(Output {
            directory: index,
            ram,
            slot,
            homecoming: Homecoming {
                mechanism: recalled.mechanism,
                since: recalled.since,
                baseline: Baseline::read(&baseline_path(&self.dir, index))?,
                id: self.id.clone(),
                nested: self.plan.directories[index].nested.clone(),
                interim: AtomicBool::new(false),
                ours: Mutex::new(recalled.ours),
                made: Mutex::new(recalled.made),
                salvage: false,
                loosened: self.loosened.clone(),
                entered: Mutex::new(recalled.entered),
                others: Mutex::default(),
                journal: Some(Journal::go_on(&path)?),
            },
            home: AtomicBool::new(recalled.home),
            detached: AtomicBool::new(recalled.detached),
        }))
    }

    /// Opens an output's directory in RAM also if the program has given it a mode that shuts out its owner.
    fn open_any_slot(&self, namespaces: &Namespaces, index: usize) -> io::Result<OwnedFd> {
        let slot = slot_name(index);
        match open_slot(namespaces, &slot) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            other => return other,
        }
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        let stat = rustix::fs::statat(&namespaces.ram_disk, &slot, flags)?;
        let mode = stat.st_mode & 0o7777;
        Journal::go_on(&journal_path(&self.dir, index))?.opening_up(Side::Source, b"", stat.st_ino, mode);
        let chmod = |mode| {
            let mode = Mode::from_raw_mode(mode);
            rustix::fs::chmodat(&namespaces.ram_disk, &slot, mode, rustix::fs::AtFlags::empty())
        };
        // Only this process is left that could put anything else in its place.
        chmod(mode | 0o700)?;
        let opened = open_slot(namespaces, &slot);
        chmod(mode)?;
        opened
    }

    /// An output of which nothing is known but its results.
    fn output_of_nothing(&self, namespaces: &Namespaces, index: usize) -> io::Result<Output> {
        let (directory, slot) = (&self.plan.directories[index], slot_name(index));
        Ok(Output {
            directory: index,
            ram: self.open_any_slot(namespaces, index)?,
            slot,
            homecoming: Homecoming {
                mechanism: directory.mechanism,
                since: directory.since,
                baseline: Baseline::of_disk(directory.before.clone()),
                id: self.id.clone(),
                nested: directory.nested.clone(),
                interim: AtomicBool::new(false),
                ours: Mutex::default(),
                made: Mutex::default(),
                salvage: false,
                loosened: self.loosened.clone(),
                entered: Mutex::default(),
                others: Mutex::default(),
                journal: None,
            },
            home: AtomicBool::new(false),
            detached: AtomicBool::new(false),
        })
    }

    /// Before anything is mounted over: keeps every directory that will be overlaid reachable.
    fn anchor(&self, namespaces: &Namespaces) -> io::Result<()> {
        let overlaid: Vec<(usize, &Directory)> = self
            .plan
            .directories
            .iter()
            .enumerate()
            .filter(|(_, directory)| directory.output && directory.mechanism == Mechanism::Overlay)
            .collect();
        if overlaid.is_empty() {
            return Ok(());
        }
        for (index, _) in &overlaid {
            rustix::fs::mkdirat(&namespaces.ram_disk, anchor_name(*index), Mode::RWXU)?;
        }
        namespaces.inside(|| {
            for (index, directory) in &overlaid {
                // Bound from the path, then compared: what is behind the anchor is what will be overlaid.
                let anchor = self.dir.join("ramdisk").join(anchor_name(*index));
                mounts::bind(&directory.path, &Target::open(&anchor, None)?)?;
                Target::open(&anchor, Some(directory.disk.as_fd()))?;
            }
            Ok(())
        })
    }

    /// Shows one directory at its path.
    pub fn mount_one(&self, namespaces: &Namespaces, index: usize, mechanism: Mechanism) -> io::Result<()> {
        namespaces.inside(|| self.mount_here(index, mechanism))
    }

    /// The same in a process that has joined the namespaces.
    fn mount_here(&self, index: usize, mechanism: Mechanism) -> io::Result<()> {
        let directory = &self.plan.directories[index];
        let ram_disk = self.dir.join("ramdisk");
        let (slot, work) = (ram_disk.join(slot_name(index)), ram_disk.join(work_name(index)));
        // Below a directory that is in RAM already, the path names the mount point that we made there.
        let nested_in_ours = self
            .plan
            .directories
            .iter()
            .any(|other| directory.path != other.path && directory.path.starts_with(&other.path));
        let target = Target::open(&directory.path, (!nested_in_ours).then_some(directory.disk.as_fd()))?;
        if mechanism == Mechanism::Overlay {
            let lower = ram_disk.join(anchor_name(index));
            return Overlay { lower: &lower, upper: &slot, work: &work, root: self.plan.root }.mount(&target);
        }
        if directory.input && !directory.output {
            mounts::make_read_only(&slot)?;
        }
        mounts::bind(&slot, &target)
    }

    /// Copies one output's results to disk.
    fn copy_out(&self, output: &Output, progress: &Progress) -> Result<Summary> {
        let directory = &self.plan.directories[output.directory];
        directory.moved_to()?;
        let options = Options {
            // What the policy allows is removed, and nothing else.
            delete: true,
            recheck: !output.homecoming.interim.load(Relaxed),
            tag: Some(self.id.clone()),
            ownership: if self.plan.root { Ownership::Preserve } else { Ownership::Inherit },
            manifest: Some(manifest_path(&self.dir, output.directory)),
            ..self.options.clone()
        };
        let events = |event: Event<'_>| self.record(directory, Some(output), &event);
        let monitor = Monitor { progress, event: &events };
        let roots = Roots {
            source: rustix::io::fcntl_dupfd_cloexec(&output.ram, 0)?,
            target: TargetRoot::Existing(rustix::fs::openat(
                &directory.disk,
                c".",
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?),
            source_path: PathBuf::from("the RAM disk"),
            target_path: directory.path.clone(),
        };
        stage_roots(roots, &options, Some(&output.homecoming), &monitor).map_err(|error| anyhow!("{error}"))
    }

    /// Packs one output's results into an archive in the directory on disk: `results-ID.tar` or `results-ID.tar.zst`.
    fn pack_out(&self, output: &Output, format: PackFormat, progress: &Progress) -> Result<Summary> {
        let directory = &self.plan.directories[output.directory];
        directory.moved_to()?;
        let mut opened = Vec::new();
        let packed = self.pack_opened(output, format, progress, &mut opened);
        for entry in opened.iter().rev() {
            entry.shut(output.ram.as_fd()).context("giving the results their modes back")?;
        }
        packed
    }

    /// Notes an entry that shuts out the caller, its owner, as one that is made accessible now. Returns its mode then.
    fn open_up(output: &Output, path: &[u8], stat: &rustix::fs::Stat) -> Option<(OpenedUp, Mode)> {
        let needed = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => 0o700,
            FileType::RegularFile => 0o400,
            _ => return None,
        };
        let user = rustix::process::geteuid();
        let mode = stat.st_mode & 0o7777;
        if user.is_root() || user.as_raw() != stat.st_uid || mode & needed == needed {
            return None;
        }
        output.homecoming.opening_up(Side::Source, path, stat);
        let opened = OpenedUp { side: Side::Source, path: path.to_vec(), inode: stat.st_ino, mode };
        Some((opened, Mode::from_raw_mode(mode | 0o700)))
    }

    fn pack_opened(
        &self,
        output: &Output,
        format: PackFormat,
        progress: &Progress,
        opened: &mut Vec<OpenedUp>,
    ) -> Result<Summary> {
        let directory = &self.plan.directories[output.directory];
        if let Some((root, mode)) = Shared::open_up(output, b"", &rustix::fs::fstat(&output.ram)?) {
            rustix::fs::fchmod(&output.ram, mode)?;
            opened.push(root);
        }
        let overlay = output.homecoming.mechanism == Mechanism::Overlay;
        // An archive can't hold sockets, and nobody listens on them any more. An overlay's marks for deletions mean
        // nothing outside of it.
        survey(output.ram.as_fd(), &mut |visit| {
            if let Some((entry, mode)) = Shared::open_up(output, visit.path, visit.stat) {
                // Neither is a symlink, and nobody else is left who could put one there.
                rustix::fs::chmodat(visit.dir, visit.name, mode, rustix::fs::AtFlags::empty())?;
                opened.push(entry);
            }
            if FileType::from_raw_mode(visit.stat.st_mode) == FileType::Socket
                || overlay && is_whiteout(visit.stat)
            {
                rustix::fs::unlinkat(visit.dir, visit.name, rustix::fs::AtFlags::empty())?;
            }
            Ok(Descend::Yes)
        })
        .map_err(|(path, error)| anyhow!("{}: {error}", std::ffi::OsStr::from_bytes(&path).display()))?;
        let events = |event: Event<'_>| self.record(directory, Some(output), &event);
        let monitor = Monitor { progress, event: &events };
        let name = CString::new(format!("results-{}.{format}", self.id))?;
        let options = PackOptions {
            threads: self.options.threads,
            modes: opened.iter().map(|entry| (entry.inode, entry.mode)).collect(),
            xattr_name: overlay.then_some(seen_through_overlay),
            umask: self.surroundings.umask,
            // A user namespace has no name for most groups, so the RAM disk's files are of the user's own.
            group: Some(rustix::fs::fstat(&directory.disk)?.st_gid),
            ..PackOptions::default()
        };
        let packed =
            pack::pack(output.ram.as_fd(), directory.disk.as_fd(), &name, format, &options, &monitor)
                .map_err(|error| anyhow!("{error}"))?;
        Ok(Summary {
            files: packed.files,
            directories: packed.directories,
            others: packed.others,
            hard_links: packed.hard_links,
            bytes: packed.bytes,
            bytes_written: packed.archive_bytes,
            errors: packed.errors,
            copying: packed.packing,
            syncing: packed.syncing,
            ..Summary::default()
        })
    }

    /// Until the program ends: every `interval`, copies closed files to disk. A failure is no loss yet: the stage-out at
    /// the end meets it again. But whoever asked for these copies relies on them, so it is told when they begin to fail,
    /// and when they succeed again.
    fn copy_out_regularly(
        &self,
        interval: Duration,
        ticker: &Ticker,
        progress: &Progress,
        tell: &std::sync::mpsc::Sender<String>,
    ) {
        /// A file that changes while it is copied is copied by the next round.
        const ROUNDS: u32 = 2;
        let mut failed: std::collections::BTreeMap<usize, u32> = std::collections::BTreeMap::new();
        while ticker.wait(interval) {
            let outputs: Vec<_> = lock(&self.outputs).clone();
            for output in &outputs {
                let before = lock(&self.findings).error_count;
                // Of this round alone.
                progress.errors.store(0, Relaxed);
                output.homecoming.interim.store(true, Relaxed);
                let copied = self.copy_out(output, progress);
                output.homecoming.interim.store(false, Relaxed);
                let errors = {
                    let mut findings = lock(&self.findings);
                    findings.error_count = before;
                    std::mem::take(&mut findings.errors)
                };
                if progress.is_cancelled() {
                    return;
                }
                let why = match copied {
                    Ok(summary) if summary.errors == 0 => None,
                    Ok(_) => Some(errors.first().cloned().unwrap_or_else(|| "an entry failed".to_owned())),
                    Err(error) => Some(format!("{error:#}")),
                };
                let path = self.plan.directories[output.directory].path.display();
                let rounds = failed.entry(output.directory).or_default();
                let text = match why {
                    Some(why) => {
                        *rounds = rounds.saturating_add(1);
                        (*rounds == ROUNDS).then(|| {
                            format!(
                                "{path}: the copies of --copy-out-interval fail ({why}); what the program has written since \
                                 is in RAM alone until it can be copied"
                            )
                        })
                    }
                    None => {
                        let had_failed = std::mem::take(rounds) >= ROUNDS;
                        had_failed.then(|| format!("{path}: the copies of --copy-out-interval succeed again"))
                    }
                };
                if let Some(text) = text {
                    // Nobody hears it once the program has ended.
                    let _ = tell.send(text);
                }
            }
        }
    }

    fn record(&self, directory: &Directory, output: Option<&Output>, event: &Event<'_>) {
        /// A list that a person reads; the count is complete.
        const MOST: usize = 20;
        let full = |path: &[u8]| {
            directory.path.join(std::ffi::OsStr::from_bytes(path)).to_string_lossy().into_owned()
        };
        let mut findings = lock(&self.findings);
        match event {
            Event::Failed(error) => {
                findings.error_count += 1;
                if findings.errors.len() < MOST {
                    findings.errors.push(error.to_string());
                }
            }
            Event::PutBeside { path, name } => {
                let name = std::ffi::OsStr::from_bytes(name).to_string_lossy().into_owned();
                let beside = report::Beside { path: full(path), name };
                if !findings.put_beside.iter().any(|known| known.path == beside.path) {
                    findings.put_beside.push(beside);
                }
            }
            Event::Kept(path) if output.is_some_and(|output| output.homecoming.was_there(path)) => {
                findings.kept.push(full(path));
            }
            // Nothing is left behind here: what others own comes home as well, or the run says that it can't.
            Event::Kept(_) | Event::Deleted(_) | Event::Would(..) | Event::LeftBehind { .. } => {}
        }
    }

    /// The files that were written last, newest first.
    fn latest_files(&self) -> Vec<String> {
        let mut latest: Vec<((i64, i64), String)> = Vec::new();
        for output in lock(&self.outputs).iter() {
            let directory = &self.plan.directories[output.directory];
            let _ = survey(output.ram.as_fd(), &mut |visit| {
                if visit.stat.st_mode & 0o170_000 == 0o100_000 {
                    let path = directory.path.join(std::ffi::OsStr::from_bytes(visit.path));
                    let time = (visit.stat.st_mtime, visit.stat.st_mtime_nsec as i64);
                    latest.push((time, path.display().to_string()));
                    latest.sort_by(|a, b| b.cmp(a));
                    latest.truncate(3);
                }
                Ok(Descend::Yes)
            });
        }
        latest.into_iter().map(|(_, path)| path).collect()
    }
}

/// The name of a directory's copy on the RAM disk.
pub fn slot_name(index: usize) -> String {
    format!("data{index}")
}

fn work_name(index: usize) -> String {
    format!("work{index}")
}

/// Where an overlaid directory on disk can be reached although it is mounted over, also when a parent of it is.
fn anchor_name(index: usize) -> String {
    format!("disk{index}")
}

/// The manifest of the stage-in of a directory that is also an output.
fn staged_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("in{index}.manifest"))
}

/// The manifest of an output's stage-out.
pub fn manifest_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("out{index}.manifest"))
}

fn baseline_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("base{index}.baseline"))
}

/// What is known of an output's way home.
pub fn journal_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("out{index}.journal"))
}

fn open_slot(namespaces: &Namespaces, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(&namespaces.ram_disk, name, flags, Mode::empty())?)
}

/// Makes an empty directory in a staged copy, for another of the job's directories to be mounted on.
pub fn make_mount_point(copy: &OwnedFd, path: &[u8]) -> io::Result<()> {
    let mut dir = rustix::io::fcntl_dupfd_cloexec(copy, 0)?;
    for name in path.split(|b| *b == b'/') {
        let name = CString::new(name)?;
        let before = rustix::fs::fstat(&dir)?;
        let mode = before.st_mode & 0o7777;
        let made = match rustix::fs::mkdirat(&dir, &*name, Mode::RWXU) {
            // A copy of a directory that its owner may not write to.
            Err(rustix::io::Errno::ACCESS) => {
                rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode | 0o700))?;
                let made = rustix::fs::mkdirat(&dir, &*name, Mode::RWXU);
                rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode))?;
                made
            }
            other => other,
        };
        match made {
            Ok(()) => keep_times(&dir, &before)?,
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        dir = rustix::fs::openat(&dir, &*name, flags, Mode::empty())?;
    }
    Ok(())
}

/// Nothing was written to a directory as far as the program is concerned.
fn keep_times(dir: &OwnedFd, stat: &rustix::fs::Stat) -> io::Result<()> {
    let times = rustix::fs::Timestamps {
        last_access: Timespec { tv_sec: stat.st_atime as _, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: Timespec { tv_sec: stat.st_mtime as _, tv_nsec: stat.st_mtime_nsec as _ },
    };
    Ok(rustix::fs::futimens(dir, &times)?)
}

fn used_of(ram_disk: &OwnedFd) -> Option<Bytes> {
    let usage = rustix::fs::fstatvfs(ram_disk).ok()?;
    Some(Bytes((usage.f_blocks - usage.f_bfree) * usage.f_frsize))
}

/// Bytes of the regular files below a directory.
fn used_below(dir: &OwnedFd) -> Option<u64> {
    let mut bytes = 0;
    survey(dir.as_fd(), &mut |visit| {
        if visit.stat.st_mode & 0o170_000 == 0o100_000 {
            bytes += visit.stat.st_size as u64;
        }
        Ok(Descend::Yes)
    })
    .ok()?;
    Some(bytes)
}

fn make_private(path: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().mode(0o700).create(path);
    made.with_context(|| format!("can't make {}", path.display()))
}

/// A name that no other run of this machine has.
fn new_id() -> String {
    let mut bytes = [0_u8; 4];
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).is_err() {
        bytes = std::process::id().to_le_bytes();
    }
    format!("{:08x}", u32::from_le_bytes(bytes))
}

/// Leaves the front's process group, so that the terminal's signals don't reach it, adopts the program's orphans, and
/// survives what ends others.
fn become_keeper() {
    let _ = rustix::process::setpgid(None, None);
    rustix::process::umask(Mode::empty());
    // SAFETY: the handler does nothing; unlike SIG_IGN it is not inherited through exec. prctl takes plain values.
    unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, c"ondeck-keeper".as_ptr());
        for signal in [
            libc::SIGINT,
            libc::SIGTERM,
            libc::SIGHUP,
            libc::SIGQUIT,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGIO,
        ] {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            if action.sa_sigaction != libc::SIG_IGN {
                action.sa_sigaction = program::ignore as *const () as libc::sighandler_t;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
}

/// Lets a thread wait for the next round, and ends it.
#[derive(Default)]
struct Ticker {
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Ticker {
    /// `false` once it was stopped.
    fn wait(&self, interval: Duration) -> bool {
        let until = Instant::now() + interval;
        let mut stopped = lock(&self.stopped);
        while !*stopped {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            stopped =
                self.wake.wait_timeout(stopped, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        false
    }

    fn stop(&self) {
        *lock(&self.stopped) = true;
        self.wake.notify_all();
    }
}
