//! The process that stops a job's processes, and lets them go on.
//!
//! It is started before anything is stopped, and is the only one that knows the clock: after [`LONGEST`] they go on,
//! whatever the agent does or has become. Until it is told to keep them, it takes away what the agent has mounted
//! meanwhile, *before* they go on: so the job sees the RAM disk from one moment on, or never.
//!
//! One line of JSON each way: [`Assignment`], then [`HolderOrder`] and [`HolderAnswer`] in turn.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ondeck_core::{Owner, exit};
use ondeck_ramdisk::mounts;
use serde::{Deserialize, Serialize};

use super::groups::{Group, State};

/// The argument that makes the agent's program a holder.
pub const HOLDER: &str = "job-holder";

/// How long a job's processes are stopped at most, in all.
pub const LONGEST: Duration = Duration::from_secs(1);

/// When what was mounted is taken away again, so that this is done in time.
const UNDO: Duration = Duration::from_millis(850);

/// After this nothing is mounted any more.
const MOUNT: Duration = Duration::from_millis(650);

/// How long it may take until all processes have stopped. One that waits in the kernel stops when it comes back.
const STOPPING: Duration = Duration::from_millis(250);

/// What a holder is told at first.
#[derive(Debug, Serialize, Deserialize)]
struct Assignment {
    groups: Vec<Group>,
    owner: Owner,
}

/// What a holder is told then.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HolderOrder {
    /// Stop all processes of the groups.
    Stop,
    /// A mount of this number and device is about to be there, or is. The number alone may be another's by now.
    Mounts(u64, (u32, u32)),
    /// From now on what was mounted stays, also if nothing more is heard.
    Keep,
    /// Let them go on; what was mounted is taken away before, unless it was to be kept.
    GoOn,
}

/// What a holder answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HolderAnswer {
    /// It is done.
    Done,
    /// They go on, and were stopped for so many milliseconds.
    GoOn(u64),
    /// It could not be done; they go on.
    Failed(String),
}

/// The agent's end.
#[derive(Debug)]
pub struct Holder {
    child: Child,
    say: Option<ChildStdin>,
    heard: BufReader<ChildStdout>,
    stopped: Option<Instant>,
}

impl Holder {
    /// Starts it; nothing is stopped yet.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(groups: &[Group], owner: Owner) -> io::Result<Holder> {
        // This very program, also if another version has been installed since.
        let mut command = Command::new("/proc/self/exe");
        command.arg(HOLDER).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).env_clear();
        Holder::start_as(command, groups, owner)
    }

    /// The same by a given program.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_as(mut command: Command, groups: &[Group], owner: Owner) -> io::Result<Holder> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // Signals for the agent are not for it.
                rustix::process::setsid()?;
                Ok(())
            });
        }
        let mut child = command.spawn()?;
        let (Some(say), Some(heard)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("it has no pipes"));
        };
        let mut holder = Holder { child, say: Some(say), heard: BufReader::new(heard), stopped: None };
        holder.send(&Assignment { groups: groups.to_vec(), owner })?;
        // It is ready, before anything depends on it.
        holder.hear().map(|_| holder)
    }

    fn send(&mut self, what: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(what)?;
        text.push(b'\n');
        self.say.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write_all(&text)
    }

    fn hear(&mut self) -> io::Result<HolderAnswer> {
        let mut text = String::new();
        if self.heard.read_line(&mut text)? == 0 {
            return Err(io::Error::other("the job was stopped for too long, and goes on"));
        }
        match serde_json::from_str(&text)? {
            HolderAnswer::Failed(why) => Err(io::Error::other(why)),
            other => Ok(other),
        }
    }

    fn ask(&mut self, what: &HolderOrder) -> io::Result<HolderAnswer> {
        self.send(what)?;
        self.hear()
    }

    /// Stops all processes of the groups; returns when they have stopped.
    ///
    /// # Errors
    /// If they have not; then they go on.
    pub fn stop(&mut self) -> io::Result<()> {
        self.stopped = Some(Instant::now());
        self.ask(&HolderOrder::Stop).map(drop)
    }

    /// Says that a mount of this number and device is about to be there.
    ///
    /// # Errors
    /// If it is too late for it.
    pub fn mounts(&mut self, id: u64, device: (u32, u32)) -> io::Result<()> {
        if self.stopped.is_none_or(|stopped| stopped.elapsed() > MOUNT) {
            return Err(io::Error::other("the job has been stopped for too long to go on with it"));
        }
        self.ask(&HolderOrder::Mounts(id, device)).map(drop)
    }

    /// Has what was mounted stay.
    ///
    /// # Errors
    /// If the job goes on already.
    pub fn keep(&mut self) -> io::Result<()> {
        self.ask(&HolderOrder::Keep).map(drop)
    }

    /// Lets the job go on; tells how long it was stopped. What was mounted is gone, unless it was to be kept.
    ///
    /// # Errors
    /// If it went on by itself before, or something could not be taken away.
    pub fn go_on(mut self) -> io::Result<Duration> {
        match self.ask(&HolderOrder::GoOn)? {
            HolderAnswer::GoOn(milliseconds) => Ok(Duration::from_millis(milliseconds)),
            _ => Err(io::Error::other("it answers what was not asked")),
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It lets the job go on when nobody speaks any more.
        drop(self.say.take());
        let _ = self.child.wait();
    }
}

/// The holder's own end: does what its standard input says.
pub fn hold() -> ExitCode {
    let mut input = BufReader::new(io::stdin());
    let mut text = String::new();
    let order: Assignment = match input
        .read_line(&mut text)
        .map_err(serde_json::Error::io)
        .and_then(|_| serde_json::from_str(&text))
    {
        Ok(order) => order,
        Err(error) => {
            eprintln!("ondeck {HOLDER}: only an agent starts this: {error}");
            return ExitCode::from(exit::USAGE);
        }
    };
    answer(&HolderAnswer::Done);
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in input.lines() {
            let said = line.ok().and_then(|line| serde_json::from_str(&line).ok());
            // What is not understood ends it, as silence does.
            let Some(said) = said else { return };
            if sender.send(said).is_err() {
                return;
            }
        }
    });
    Holding { order, receiver, stopped: None, mounts: Vec::new(), keep: false }.run();
    ExitCode::from(exit::OK)
}

fn answer(what: &HolderAnswer) {
    if let Ok(mut text) = serde_json::to_vec(what) {
        text.push(b'\n');
        // Nobody may be listening any more.
        let mut out = io::stdout().lock();
        let _ = out.write_all(&text).and_then(|()| out.flush());
    }
}

struct Holding {
    order: Assignment,
    receiver: Receiver<HolderOrder>,
    stopped: Option<Instant>,
    mounts: Vec<(u64, (u32, u32))>,
    keep: bool,
}

impl Holding {
    fn run(&mut self) {
        loop {
            let limit = if self.keep { LONGEST } else { UNDO };
            let said = match self.stopped {
                None => self.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(since) => self.receiver.recv_timeout(limit.saturating_sub(since.elapsed())),
            };
            match said {
                Ok(HolderOrder::Stop) => match self.stop() {
                    Ok(()) => answer(&HolderAnswer::Done),
                    Err(why) => {
                        // What could not be done is said already.
                        let _ = self.go_on();
                        return answer(&HolderAnswer::Failed(why));
                    }
                },
                Ok(HolderOrder::Mounts(id, device)) => {
                    self.mounts.push((id, device));
                    answer(&HolderAnswer::Done);
                }
                Ok(HolderOrder::Keep) => {
                    self.keep = true;
                    answer(&HolderAnswer::Done);
                }
                Ok(HolderOrder::GoOn) => {
                    let undone = self.go_on();
                    let for_how_long = self.stopped.map_or(0, |since| since.elapsed().as_millis() as u64);
                    return answer(&match undone {
                        Ok(()) => HolderAnswer::GoOn(for_how_long),
                        Err(why) => HolderAnswer::Failed(why),
                    });
                }
                Err(_) => {
                    // Nobody is told: what is asked next finds that nobody answers.
                    let _ = self.go_on();
                    return;
                }
            }
        }
    }

    fn stop(&mut self) -> Result<(), String> {
        let groups = &self.order.groups;
        let failed = |group: &Group, error: io::Error| format!("{}: {error}", group.path.display());
        for group in groups {
            if group.state().map_err(|error| failed(group, error))? != State::Runs {
                // Slurm has suspended it; going on is for Slurm to say.
                self.order.groups.clear();
                return Err("its processes are stopped already: the job is suspended".to_owned());
            }
        }
        let began = Instant::now();
        self.stopped = Some(began);
        for group in groups {
            group.order(true).map_err(|error| failed(group, error))?;
        }
        for group in groups {
            while group.state().map_err(|error| failed(group, error))? != State::Stopped {
                if began.elapsed() > STOPPING {
                    return Err(format!(
                        "its processes in {} did not stop within {} ms",
                        group.path.display(),
                        STOPPING.as_millis()
                    ));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Lets them go on, with what was mounted taken away before, unless it is to be kept.
    fn go_on(&mut self) -> Result<(), String> {
        let mut undone = Ok(());
        if !self.keep && !self.mounts.is_empty() {
            let (mounts, owner) = (std::mem::take(&mut self.mounts), self.order.owner);
            let (sender, receiver) = channel();
            // It may hang in a path of the user's; the job does not wait for that.
            std::thread::spawn(move || sender.send(undo(&mounts, owner)));
            let rest = self.stopped.map_or(Duration::ZERO, |since| LONGEST.saturating_sub(since.elapsed()));
            undone =
                receiver.recv_timeout(rest).unwrap_or_else(|_| Err("it took too long to unmount".to_owned()));
        }
        for group in &self.order.groups {
            match group.order(false) {
                Err(error) if !super::groups::is_gone(&error) && error.raw_os_error() != Some(19) => {
                    undone = Err(format!("{}: {error}", group.path.display()));
                }
                _ => {}
            }
        }
        undone
    }
}

fn undo(ids: &[(u64, (u32, u32))], owner: Owner) -> Result<(), String> {
    // Inner ones were mounted last.
    for id in ids.iter().rev() {
        let all = mounts::mounted().map_err(|error| error.to_string())?;
        let is_it = |mount: &mounts::Mount| (mount.id, mount.device) == *id;
        let Some(mount) = all.into_iter().find(is_it) else { continue };
        crate::unmount::take_away(&mount, owner).map_err(|error| error.to_string())?;
    }
    Ok(())
}
