//! The keeper: the process that holds the RAM disk and lives through the whole job.
//!
//! It stays outside of the namespaces that it makes, with descriptors of the RAM disk and of the directories on disk
//! that were opened before anything was mounted over them. So it copies between the two with the user's own identity
//! and all groups, whether or not the front or the program are still there.
//!
//! # Layout
//!
//! - this file: the life, from the start to the record, and taking over from a keeper that was killed
//! - `stage_in`, `show`, `accompany`, `bring_home`, `hold`: its phases, in this order; `cached`: what of them is different
//!   for directories with a cache

mod accompany;
mod bring_home;
mod cached;
mod hold;
mod show;
mod stage_in;

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use ondeck_core::{duration, exit};
use ondeck_ramdisk::namespace::{self, Namespaces};
use ondeck_transfer::{Gate, Options};
use rustix::fs::Mode;
use rustix::process::Pid;

use super::message::{Line, Message, RunOrder};
use super::places::{baseline_path, caches_path, journal_path, manifest_path, staged_path};
use super::plan::{Job, Plan};
use super::program::{self, Surroundings};
use super::report::{self, Report};
use super::shared::{Margin, Shared, lock};
use super::watchers::Watchers;
use super::{RunArgs, claim};
use crate::display;

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
    /// Whether the report says what directories and what RAM disk there are.
    described: bool,
    /// Whether a process waits to go on if this one is killed.
    guarded: bool,
    /// What says that the run's directory is in use.
    claim: Option<fs::File>,
}

/// How a life ended.
enum Ending {
    /// Everything is where it belongs.
    Done(u8),
    /// Results are held in RAM.
    Held(String),
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
            described: false,
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
        self.start_caches(&namespaces).map_err(not_started)?;
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
                    RunOrder::Abandon => {
                        self.watchers.warning("the results were given up, as you said");
                        self.give_up_caches();
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
        if !self.described {
            self.describe_directories();
            self.describe_ram_disk(namespaces);
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
        self.claim = Some(claim::claim(dir).with_context(|| format!("can't lock {}", dir.display()))?);
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
        self.describe_ram_disk(&namespaces);
        Ok(namespaces)
    }

    fn describe_ram_disk(&mut self, namespaces: &Namespaces) {
        // Without a directory in it, it is none that anybody could see.
        self.report.ram_disk = (!self.shared.plan.directories.is_empty()).then(|| report::RamDiskReport {
            size: self.shared.plan.size.0,
            huge_pages: namespaces.features.huge_pages,
            no_swap: namespaces.features.no_swap,
            ..report::RamDiskReport::default()
        });
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
                display::name(beside.path.as_ref()),
                display::name(beside.name.as_ref())
            ));
        }
        for kept in &findings.kept {
            let kept = display::name(kept.as_ref());
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
        let _ = fs::remove_file(caches_path(dir).with_extension("partial"));
        let _ = fs::remove_file(caches_path(dir));
        for name in ["control", "state", "log", claim::LOCK] {
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
