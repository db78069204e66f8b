//! What `ondeck run` adds to a program that does nothing, with nothing to stage.
//!
//! Both commands are started the same way and alternate, so the difference of the medians is the
//! price of the RAM disk itself: making it, mounting it, and taking it away.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::copies::median;
use crate::interrupt::Interrupted;
use crate::machine::{find_program, is_root};
use crate::scratch::Scratch;
use crate::timed;
use crate::tools::Programs;

pub const RUNS: usize = 200;

/// Runs before those that count: the first of them read the programs from disk.
const WARM_UP: usize = 5;

/// An ordinary user; needs no entry in the password file.
const ORDINARY: u32 = 20001;

#[derive(Debug)]
pub struct Overhead {
    pub user: &'static str,
    /// Median milliseconds of `true` and of `ondeck run ... -- true`, or why there are none.
    pub medians_ms: Result<(f64, f64), String>,
}

impl Overhead {
    pub fn added_ms(&self) -> Option<f64> {
        let (bare, run) = self.medians_ms.as_ref().ok()?;
        Some(run - bare)
    }
}

pub fn measure(scratch: &Scratch, programs: &Programs) -> Result<Vec<Overhead>> {
    let users: &[User] = if is_root() { &[User::Root, User::Ordinary] } else { &[User::Own] };
    let mut overheads = Vec::new();
    for &user in users {
        let medians_ms = match programs.ondeck() {
            None => Err("not built".to_owned()),
            Some(ondeck) => {
                eprintln!("ondeck run -- true, as {}", user.name());
                Pair::prepare(user, ondeck, scratch)?.medians_ms(scratch)?
            }
        };
        overheads.push(Overhead { user: user.name(), medians_ms });
    }
    Ok(overheads)
}

#[derive(Clone, Copy)]
enum User {
    Root,
    Ordinary,
    /// Whoever runs the bench, when that is not root.
    Own,
}

impl User {
    fn name(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Ordinary | Self::Own => "an ordinary user",
        }
    }
}

/// The two commands that are compared.
struct Pair {
    user: User,
    setpriv: Option<PathBuf>,
    ondeck: PathBuf,
    program: PathBuf,
    home: PathBuf,
    input: PathBuf,
    output: PathBuf,
}

impl Pair {
    fn prepare(user: User, ondeck: &Path, scratch: &Scratch) -> Result<Self> {
        let home = scratch.disk.join(match user {
            User::Ordinary => "home-of-user",
            User::Root | User::Own => "home",
        });
        let pair = Self {
            user,
            setpriv: find_program("setpriv", &[]),
            ondeck: ondeck.to_owned(),
            program: find_program("true", &[]).context("there is no program named true")?,
            input: home.join("input"),
            output: home.join("output"),
            home,
        };
        for directory in [&pair.home, &pair.input, &pair.output] {
            fs::create_dir(directory).with_context(|| format!("cannot make {}", directory.display()))?;
            if matches!(user, User::Ordinary) {
                chown(directory, Some(ORDINARY), Some(ORDINARY))
                    .with_context(|| format!("cannot give {} away", directory.display()))?;
            }
        }
        Ok(pair)
    }

    /// The command, under the user it is measured for.
    fn command(&self, program: &Path) -> Command {
        let mut command = match (self.user, &self.setpriv) {
            (User::Ordinary, Some(setpriv)) => {
                let mut command = Command::new(setpriv);
                let id = ORDINARY.to_string();
                command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]);
                command.arg(program);
                command
            }
            _ => Command::new(program),
        };
        command.env("HOME", &self.home).current_dir(&self.home);
        if matches!(self.user, User::Ordinary) {
            // They point to directories of root's.
            command.env_remove("XDG_RUNTIME_DIR").env_remove("XDG_CACHE_HOME");
        }
        command
    }

    fn bare(&self) -> Command {
        self.command(&self.program)
    }

    fn under_ondeck(&self) -> Command {
        let mut command = self.command(&self.ondeck);
        command.arg("run").arg("--data-in").arg(&self.input);
        command.arg("--data-out").arg(&self.output);
        command.arg("--").arg(&self.program);
        command
    }

    fn medians_ms(&self, scratch: &Scratch) -> Result<Result<(f64, f64), String>> {
        if matches!(self.user, User::Ordinary) && self.setpriv.is_none() {
            return Ok(Err("setpriv is not installed".into()));
        }
        let errors = scratch.disk.join("errors.txt");
        let mut elapsed_ms = [Vec::new(), Vec::new()];
        for run in 0..WARM_UP + RUNS {
            for position in 0..2 {
                let which = (run + position) % 2;
                let mut command = match which {
                    0 => self.bare(),
                    _ => self.under_ondeck(),
                };
                let finished = match timed::run(&mut command, &errors) {
                    Ok(finished) => finished,
                    Err(error) if error.is::<Interrupted>() => return Err(error),
                    Err(error) => return Ok(Err(format!("{error:#}"))),
                };
                if !finished.status.success() {
                    let complaint = timed::complaint(finished.status, &errors);
                    return Ok(Err(format!("failed, {complaint}")));
                }
                if run >= WARM_UP {
                    elapsed_ms[which].push(finished.elapsed.as_secs_f64() * 1e3);
                }
            }
        }
        let [bare, run] = elapsed_ms.map(|mut ms| {
            ms.sort_by(f64::total_cmp);
            median(&ms)
        });
        Ok(Ok((bare, run)))
    }
}
