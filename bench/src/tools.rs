//! Who copies: the command line of every tool, as its own documentation recommends for a whole
//! copy with metadata.
//!
//! Every command gets the same task: make `target`, which does not exist, a copy of `source`. Tools
//! that only fill a directory get it made for them within their time.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::machine::{find_program, first_line, is_executable};
use crate::scratch::remove;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    None,
    Xxh3,
    Blake3,
}

impl Checksum {
    fn argument(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Xxh3 => "xxh3",
            Self::Blake3 => "blake3",
        }
    }
}

/// How `ondeck stage` is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    pub checksum: Checksum,
    /// Whether it syncs the target before it returns, as it does unless told not to.
    pub sync: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    Cp,
    Rsync,
    TarPipe,
    Rclone,
    Fpsync,
    Fcp,
    Cpz,
    Xcp,
    Lms,
    Ondeck(Stage),
    /// The engine of `ondeck stage` with no more than most peers do: neither checksum nor manifest nor sync, and of a file
    /// no metadata but its permission bits. Nothing that a user can call, so it stands for itself, not for a command.
    Bare,
}

/// What a tool is asked to copy.
#[derive(Clone, Copy, Debug)]
pub struct Copy<'a> {
    pub source: &'a Path,
    pub target: &'a Path,
    /// A tree; otherwise one file.
    pub is_directory: bool,
    /// Where a tool may keep its own files: on disk, emptied before each run.
    pub notes: &'a Path,
}

/// Where bench/setup.sh puts what it installs by itself.
pub fn installed() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")));
    Some(cache?.join("ondeck-bench"))
}

/// Where the programs are.
#[derive(Debug)]
pub struct Programs {
    /// Directory that setup.sh installs into, searched after PATH.
    extra: Vec<PathBuf>,
    ondeck: Option<PathBuf>,
}

impl Programs {
    /// `ONDECK` names the binary under test; otherwise the newest release build of the workspace.
    pub fn find() -> Result<Self> {
        let extra = installed().map(|at| at.join("bin"));
        let ondeck = match std::env::var_os("ONDECK").filter(|value| !value.is_empty()) {
            Some(named) => {
                let named = std::path::absolute(named)?;
                if !is_executable(&named) {
                    bail!("ONDECK is {}, which is no program", named.display());
                }
                Some(named)
            }
            None => newest_build(),
        };
        Ok(Self { extra: extra.into_iter().collect(), ondeck })
    }

    /// Puts a copy of the binary under test in its place: a build that goes on beside the benchmark
    /// would otherwise replace it halfway, and it may lie where an ordinary user cannot look.
    pub fn copy_ondeck_to(&mut self, directory: &Path) -> Result<()> {
        if let Some(ondeck) = &mut self.ondeck {
            let copy = directory.join("ondeck");
            fs::copy(&*ondeck, &copy).with_context(|| format!("cannot copy {}", ondeck.display()))?;
            *ondeck = copy;
        }
        Ok(())
    }

    pub fn ondeck(&self) -> Option<&Path> {
        self.ondeck.as_deref()
    }

    fn named(&self, name: &str) -> Option<PathBuf> {
        find_program(name, &self.extra)
    }
}

/// A release build, with or without the directory that `--target` adds.
fn newest_build() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let below = fs::read_dir(&target).into_iter().flatten();
    below
        .filter_map(|entry| Some(entry.ok()?.path()))
        .chain([target.clone()])
        .map(|directory| directory.join("release/ondeck"))
        .filter(|path| is_executable(path))
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .max()
        .and_then(|(_, path)| path.canonicalize().ok())
}

impl Tool {
    pub const PEERS: [Self; 9] = [
        Self::Cp,
        Self::Rsync,
        Self::TarPipe,
        Self::Rclone,
        Self::Fpsync,
        Self::Fcp,
        Self::Cpz,
        Self::Xcp,
        Self::Lms,
    ];

    pub const fn ondeck(checksum: Checksum, sync: bool) -> Self {
        Self::Ondeck(Stage { checksum, sync })
    }

    pub fn is_ondeck(self) -> bool {
        matches!(self, Self::Ondeck(_) | Self::Bare)
    }

    /// The command as a reader would type it.
    pub fn name(self) -> String {
        match self {
            Self::Cp => "cp -a".into(),
            Self::Rsync => "rsync -a".into(),
            Self::TarPipe => "tar pipe".into(),
            Self::Rclone => "rclone copy".into(),
            Self::Fpsync => "fpsync -n 2".into(),
            Self::Fcp => "fcp".into(),
            Self::Cpz => "cpz".into(),
            Self::Xcp => "xcp -r".into(),
            Self::Lms => "lms cp".into(),
            Self::Ondeck(stage) => {
                let checksum = match stage.checksum {
                    Checksum::None => " --checksum none",
                    Checksum::Xxh3 => "",
                    Checksum::Blake3 => " --checksum blake3",
                };
                let sync = if stage.sync { "" } else { " --no-sync" };
                format!("ondeck stage{checksum}{sync}")
            }
            Self::Bare => "ondeck's engine, modes only".into(),
        }
    }

    /// The program that must be there, and for the page its version.
    fn program_name(self) -> &'static str {
        match self {
            Self::Cp => "cp",
            Self::Rsync => "rsync",
            Self::TarPipe => "tar",
            Self::Rclone => "rclone",
            Self::Fpsync => "fpsync",
            Self::Fcp => "fcp",
            Self::Cpz => "cpz",
            Self::Xcp => "xcp",
            Self::Lms => "lms",
            Self::Ondeck(_) | Self::Bare => "ondeck",
        }
    }

    pub fn program(self, programs: &Programs) -> Option<PathBuf> {
        match self {
            Self::Ondeck(_) => programs.ondeck.clone(),
            Self::Bare => std::env::current_exe().ok(),
            _ => programs.named(self.program_name()),
        }
    }

    pub fn version(self, programs: &Programs) -> Option<String> {
        let program = self.program(programs)?;
        let text = match self {
            // Its only option that prints the version and does nothing else.
            Self::Fpsync => first_line(program, &["-h"]),
            _ => first_line(program, &["--version"]),
        };
        let text = text.split(" - ").next().unwrap_or(&text);
        let named = self.program_name();
        Some(if text.to_lowercase().contains(named) { text.to_owned() } else { format!("{named} {text}") })
    }

    /// Whether the tool copies directories only.
    pub fn needs_directory(self) -> bool {
        matches!(self, Self::Fpsync | Self::Lms)
    }

    /// Makes the tool start from nothing, outside its time: a manifest or a job log of the last
    /// run would let it resume and copy less.
    pub fn forget_last_run(self, copy: Copy) -> Result<()> {
        remove(copy.target)?;
        remove(copy.notes)?;
        fs::create_dir(copy.notes)?;
        Ok(())
    }

    /// The command, or nothing when the tool is not there.
    pub fn command(self, programs: &Programs, copy: Copy) -> Option<Command> {
        let mut command = Command::new(self.program(programs)?);
        let (source, target) = (copy.source, copy.target);
        match self {
            Self::Cp => command.arg("-a").args([source, target]),
            Self::Rsync if copy.is_directory => {
                command.arg("-a").args([with_slash(source), with_slash(target)])
            }
            Self::Rsync => command.arg("-a").args([source, target]),
            Self::TarPipe => {
                command = tar_pipe(copy);
                &mut command
            }
            Self::Rclone => command
                .arg(if copy.is_directory { "copy" } else { "copyto" })
                .args(["--config=/dev/null", "--transfers=2", "--links"])
                .args([source, target]),
            Self::Fpsync => command
                .args(["-n", "2", "-t"])
                .arg(copy.notes)
                .arg("-d")
                .arg(copy.notes)
                .args([with_slash(source), with_slash(target)]),
            Self::Fcp | Self::Cpz => command.args([source, target]),
            Self::Xcp => command.args(["-r", "--no-progress"]).args([source, target]),
            Self::Lms => command.arg("cp").args([source, target]),
            Self::Bare => command.arg("bare-copy").args([source, target]),
            Self::Ondeck(stage) => {
                command.args(["stage", "--checksum", stage.checksum.argument()]);
                if !stage.sync {
                    command.arg("--no-sync");
                }
                command.arg("--manifest").arg(copy.notes.join("manifest")).args([source, target])
            }
        };
        Some(command)
    }
}

/// What [`Tool::Bare`] runs.
pub fn bare_copy(source: &Path, target: &Path) -> Result<()> {
    // As `ondeck stage` does: the modes are the source's, whatever the umask.
    rustix::process::umask(rustix::fs::Mode::empty());
    let options = ondeck_transfer::Options {
        checksum: ondeck_transfer::Checksum::None,
        modes_only: true,
        sync: false,
        ..ondeck_transfer::Options::default()
    };
    let progress = ondeck_transfer::Progress::new();
    let monitor = ondeck_transfer::Monitor { progress: &progress, event: &|_| {} };
    let summary = ondeck_transfer::stage(source, target, &options, &monitor)?;
    if summary.errors > 0 {
        bail!("{} entries could not be copied", summary.errors);
    }
    Ok(())
}

/// rsync and fpsync copy what is *in* a directory when it ends in a slash.
fn with_slash(path: &Path) -> OsString {
    let mut text = path.as_os_str().to_owned();
    text.push("/");
    text
}

/// The paths are arguments of the script, never part of it.
fn tar_pipe(copy: Copy) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c");
    if copy.is_directory {
        command
            .arg(r#"mkdir "$2" && tar -C "$1" -cf - . | tar -C "$2" -xpf -"#)
            .arg("sh")
            .args([copy.source, copy.target]);
    } else {
        command.arg(r#"tar -C "$1" -cf - "$3" | tar -C "$2" -xpf -"#).arg("sh");
        for path in [copy.source, copy.target] {
            command.arg(path.parent().unwrap_or(Path::new("/")));
        }
        command.args(copy.source.file_name());
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ondeck_gets_a_manifest_and_is_told_whether_to_sync() {
        let programs = Programs { extra: Vec::new(), ondeck: Some("/opt/ondeck".into()) };
        let copy = Copy {
            source: Path::new("/a"),
            target: Path::new("/b"),
            is_directory: true,
            notes: Path::new("/notes"),
        };
        let arguments = |sync| -> Vec<String> {
            Tool::ondeck(Checksum::Blake3, sync)
                .command(&programs, copy)
                .unwrap()
                .get_args()
                .map(|argument| argument.to_string_lossy().into_owned())
                .collect()
        };
        let always = ["stage", "--checksum", "blake3", "--manifest", "/notes/manifest", "/a", "/b"];
        assert_eq!(arguments(true), always);
        let mut without = always.map(String::from).to_vec();
        without.insert(3, "--no-sync".into());
        assert_eq!(arguments(false), without);
    }

    #[test]
    fn an_absent_tool_has_no_command() {
        let programs = Programs { extra: Vec::new(), ondeck: None };
        assert!(Tool::ondeck(Checksum::None, true).program(&programs).is_none());
    }
}
