//! The command in front: what the user sees, and the signals they send.
//!
//! It holds nothing that can't be lost as long as the keeper lives, and takes its [place](super::heir) otherwise. A signal
//! that the terminal sent went to the whole process group, so the program has it already; one that was sent to this process
//! alone is passed on.

use std::io::{self, BufRead, IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use ondeck_core::exit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::claim::is_claimed;
use super::left;
use super::message::{Line, Message, RunOrder};
use super::slurm;
use crate::display;
use crate::state;

/// The directory of a run of this user.
pub fn directory_of(id: &str) -> Result<PathBuf> {
    if id.is_empty() || id.contains('/') || id.starts_with('.') {
        bail!("`{id}` is not the name of a run; `ondeck run --list` shows them");
    }
    let mut dirs = state::all_runs()?.into_iter().map(|base| base.join(id));
    match dirs.find(|dir| dir.is_dir()) {
        Some(dir) => Ok(dir),
        None => bail!("there is no run {id} of yours on this machine; `ondeck run --list` shows them"),
    }
}

/// Attaches to a run whose keeper is alive, with an order.
pub fn attach(id: &str, order: RunOrder, json: bool, quiet: bool) -> Result<u8> {
    let dir = directory_of(id)?;
    let socket = dir.join("control");
    let line = match connect(&socket, order) {
        // A new keeper is on its way.
        Err(_) if is_claimed(&dir).unwrap_or(false) => reconnect(&socket, order),
        Err(_) if left::told_of_caches(&dir)?.is_some() => return left::end_caches(id, &dir, order),
        connected => connected,
    };
    let line = line.with_context(|| {
        format!("the keeper of run {id} is gone; `ondeck run --list` shows what is left of it")
    })?;
    let signals = Signals::block().context("can't receive signals")?;
    let mut front = Front::new(line, signals, json, quiet);
    loop {
        match front.watch()? {
            Outcome::Finished(code) => return Ok(code),
            Outcome::NotStarted(code, text) => {
                eprintln!("ondeck run: {text}");
                return Ok(code);
            }
            Outcome::KeeperLost => {
                let Ok(line) = reconnect(&socket, order) else {
                    eprintln!(
                        "ondeck run: the run's keeper was killed, and no other one has taken its place; `ondeck run --list` \
                         says what is left of the run"
                    );
                    return Ok(exit::RESULTS_NOT_STAGED);
                };
                front.line = line;
            }
        }
    }
}

/// Attaches to a run's keeper: it takes one for a watcher who has said something.
fn connect(socket: &Path, order: RunOrder) -> io::Result<Line> {
    let mut line = Line::new(UnixStream::connect(socket)?)?;
    line.send(&order)?;
    Ok(line)
}

/// Waits for a new keeper to take the place of one that was killed. A dying one may still take the connection, and nothing
/// more.
fn reconnect(socket: &Path, order: RunOrder) -> io::Result<Line> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let until = Instant::now() + PATIENCE;
    loop {
        match connect(socket, order) {
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(50)),
            connected => return connected,
        }
    }
}

/// How watching a run ended.
pub enum Outcome {
    /// The run is over, with this exit code.
    Finished(u8),
    /// Nothing was changed.
    NotStarted(u8, String),
    /// The other end of the line is closed, or has said all that it will.
    KeeperLost,
}

/// What the run is doing, as far as a signal is concerned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Staging in: a signal ends the run, nothing is lost.
    Before,
    /// The program runs: signals are its.
    Program,
    /// Staging out: results must not be lost to a careless key.
    After,
}

/// What a user sees of a run.
pub struct Front {
    /// The line to the keeper.
    pub line: Line,
    /// The signals that are passed on.
    pub signals: Signals,
    json: bool,
    quiet: bool,
    /// How far the run is.
    pub stage: Stage,
    /// The program's process, once it was started.
    pub program: Option<u32>,
    /// The program's exit code, once it has ended.
    pub code: Option<u8>,
    /// The exit code and the last line for people, once nothing is left to do.
    pub ended: Option<(u8, String)>,
    interrupts: u32,
    bar: Option<ProgressBar>,
    bar_label: String,
    phase_began: Instant,
    total: Option<u64>,
}

impl Front {
    /// With this line to the keeper.
    pub fn new(line: Line, signals: Signals, json: bool, quiet: bool) -> Front {
        Front {
            line,
            signals,
            json,
            quiet,
            stage: Stage::Before,
            program: None,
            code: None,
            ended: None,
            interrupts: 0,
            bar: None,
            bar_label: String::new(),
            phase_began: Instant::now(),
            total: None,
        }
    }

    /// Shows what happens, and passes on what the user sends, until the run is over or the line is lost.
    pub fn watch(&mut self) -> Result<Outcome> {
        /// Inside a Slurm job held results die with the job, so the stage-out is tried again until then.
        const RETRY: Duration = Duration::from_secs(30);
        let mut retry_at: Option<Instant> = None;
        loop {
            let timeout = retry_at.map(|at| {
                let left = at.saturating_duration_since(Instant::now());
                Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() }
            });
            let mut fds = [
                PollFd::new(self.line.stream(), PollFlags::IN),
                PollFd::new(&self.signals.fd, PollFlags::IN),
            ];
            match poll(&mut fds, timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other.map(|_| ()).context("waiting for the keeper")?,
            }
            let (message, signal) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
            if signal {
                self.on_signal()?;
            }
            if retry_at.is_some_and(|at| Instant::now() >= at) {
                retry_at = None;
                self.say("trying the stage-out again");
                let _ = self.line.send(&RunOrder::Resume);
            }
            if !message {
                continue;
            }
            let Some(messages) = self.line.receive::<Message>() else {
                self.clear_bar();
                return Ok(Outcome::KeeperLost);
            };
            for message in messages {
                match message {
                    Message::Ended { exit_code, summary } => {
                        self.ended = Some((exit_code, summary));
                        continue;
                    }
                    _ if self.json => eprintln!("{}", serde_json::to_string(&message)?),
                    _ => {}
                }
                match message {
                    Message::Finished { exit_code, summary } => {
                        self.clear_bar();
                        if self.stage == Stage::Before && exit_code >= exit::NOT_STARTED {
                            return Ok(Outcome::NotStarted(exit_code, summary));
                        }
                        self.say(&summary);
                        return Ok(Outcome::Finished(exit_code));
                    }
                    Message::Held { exit_code, text } => {
                        self.clear_bar();
                        self.warn(&text);
                        if slurm::job_id().is_none() {
                            return Ok(Outcome::Finished(exit_code));
                        }
                        self.warn("inside a Slurm job the results die with the job: staying, to try again every 30 s");
                        retry_at = Some(Instant::now() + RETRY);
                    }
                    other => self.show(other),
                }
            }
        }
    }

    fn show(&mut self, message: Message) {
        match message {
            Message::Phase { name, total_bytes } => {
                self.clear_bar();
                self.bar_label = name.replace('_', " ");
                self.phase_began = Instant::now();
                self.total = total_bytes;
                self.stage = match name.as_str() {
                    "program" => Stage::Program,
                    "stage_out" | "write_back" => Stage::After,
                    _ => self.stage,
                };
            }
            Message::Progress { files, files_found, bytes, bytes_found } => {
                const PATIENCE: Duration = Duration::from_millis(400);
                let visible = !self.json && !self.quiet && io::stderr().is_terminal();
                // While the program runs, the terminal is its.
                if visible && self.stage != Stage::Program && self.phase_began.elapsed() >= PATIENCE {
                    let label = self.bar_label.clone();
                    let bar = self.bar.get_or_insert_with(|| display::new_bar(label));
                    bar.set_length(self.total.unwrap_or(bytes_found).max(bytes));
                    bar.set_position(bytes);
                    bar.set_message(format!("{files}/{files_found} files"));
                }
            }
            Message::Note { text } => self.say(&text),
            Message::Warning { text } => self.warn(&text),
            Message::ProgramStarted { pid } => self.program = Some(pid),
            Message::ProgramEnded { exit_code } => {
                self.stage = Stage::After;
                self.code = Some(exit_code);
            }
            Message::Finished { .. } | Message::Held { .. } | Message::Ended { .. } => {}
        }
    }

    fn clear_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Something worth knowing.
    pub fn say(&mut self, text: &str) {
        if !self.quiet && !self.json {
            self.warn(text);
        }
    }

    /// Something that went wrong.
    pub fn warn(&mut self, text: &str) {
        if self.json {
            return; // the event says it
        }
        // It may name what programs made.
        let text = display::lines(text);
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("ondeck: {text}")),
            None => eprintln!("ondeck: {text}"),
        }
    }

    fn on_signal(&mut self) -> Result<()> {
        let Some((number, from_terminal)) = self.signals.next() else { return Ok(()) };
        match self.stage {
            Stage::Program if from_terminal => {
                self.interrupts += u32::from(number == libc::SIGINT);
            }
            Stage::Before | Stage::Program => {
                self.interrupts += u32::from(number == libc::SIGINT);
                let _ = self.line.send(&RunOrder::Signal { number });
            }
            Stage::After if number == libc::SIGINT => {
                self.interrupts += 1;
                if self.interrupts < 2 {
                    self.warn("the results are being staged out; press Ctrl-C again to be asked about giving them up");
                } else if !io::stdin().is_terminal() {
                    self.warn(
                        "the stage-out goes on; to give the results up: ondeck run --list and --abandon ID",
                    );
                } else {
                    self.clear_bar();
                    let question =
                        "Give up the results that are not on disk yet? Type `abandon`, or Enter to go on: ";
                    // While the question stands, a further Ctrl-C is an answer too: no.
                    if confirmed(question).unwrap_or(false) {
                        let _ = self.line.send(&RunOrder::Abandon);
                    }
                }
            }
            Stage::After => {
                self.warn("the results are being staged out; this command ends when they are on disk")
            }
        }
        Ok(())
    }
}

/// Asks on the terminal.
pub fn confirmed(question: &str) -> Result<bool> {
    let terminal = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/tty")
        .context("there is no terminal to ask on")?;
    write!(&terminal, "{question}")?;
    let mut answer = String::new();
    std::io::BufReader::new(&terminal).read_line(&mut answer)?;
    Ok(answer.trim() == "abandon")
}

/// The signals that are passed on, as a descriptor to wait on.
pub struct Signals {
    fd: OwnedFd,
    before: libc::sigset_t,
}

/// Signals that a user or a batch system sends to end or to inform a program.
const PASSED_ON: [libc::c_int; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

impl Signals {
    /// Those that are ignored (nohup, background jobs of a script) stay so, for the program as well.
    pub fn block() -> io::Result<Signals> {
        // SAFETY: the sets are zeroed and then filled by the libc functions for that; the descriptor is ours alone.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for signal in PASSED_ON {
                let mut action: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &mut action);
                if action.sa_sigaction != libc::SIG_IGN {
                    libc::sigaddset(&mut set, signal);
                }
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
            match libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Signals { fd: OwnedFd::from_raw_fd(fd), before }),
            }
        }
    }

    /// Receives them as before.
    pub fn unblock(&self) {
        // SAFETY: restores the mask that was read at the start.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }

    /// The next signal, and whether the terminal (the kernel) sent it.
    fn next(&self) -> Option<(libc::c_int, bool)> {
        let mut buffer = [0_u8; size_of::<libc::signalfd_siginfo>()];
        let read = rustix::io::read(self.fd.as_fd(), &mut buffer).ok()?;
        if read != buffer.len() {
            return None;
        }
        // SAFETY: the kernel filled the whole structure, which is plain data; it may be unaligned in the buffer.
        let info: libc::signalfd_siginfo = unsafe { std::ptr::read_unaligned(buffer.as_ptr().cast()) };
        Some((info.ssi_signo as libc::c_int, info.ssi_code > 0))
    }
}

impl std::fmt::Debug for Signals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signals({})", self.fd.as_raw_fd())
    }
}
