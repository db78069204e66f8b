//! What Slurm's hooks on this node are: which program ran, with which configuration, called by which script.
//!
//! Only a hook itself knows that for certain: scripts choose the program, and variables the configuration. So each notes it
//! when Slurm runs it, and the agent passes it on to whoever compares nodes. The place of the notes is not configured: a hook
//! that reads another configuration than the agent must be found by its note. `/run` is empty after a start of the machine,
//! so what is noted has run since then. A note tells of the last run that changed it: what was mended afterwards is not seen
//! before the next job.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ondeck_api::Config;
use ondeck_api::config::ConfigError;
use ondeck_api::wire::{HookKind, HookNote, HookScheduler, HookSeen, HookSlurm};

use crate::slurm_conf;

/// The directory of the notes; for root alone.
pub const NOTED: &str = "/run/ondeck/hooks";

/// A note is no longer than this.
const LONGEST: u64 = 64 << 10;

/// So many processes are between Slurm's daemon and a hook, at most: scripts that call scripts, and `timeout`.
const ANCESTORS: usize = 16;

/// What is told of a configuration that can't be read is no longer than this.
const LONGEST_FAULT: usize = 512;

/// What the kernel adds to the name of a program that was replaced while it ran.
const REPLACED: &[u8] = b" (deleted)";

/// Notes what this process is, if Slurm runs it as a hook. Whoever tries a hook by hand, with a configuration of their own,
/// says nothing of the node's hooks.
///
/// # Errors
/// If it can't be written. The hook is none the worse for it.
pub fn note(kind: HookKind, path: Option<&Path>, config: &Result<Config, ConfigError>) -> io::Result<()> {
    let Some(script) = called_by_slurm() else { return Ok(()) };
    let scheduler = match config {
        Ok(config) => Ok(HookScheduler { host: config.scheduler.host.clone(), port: config.scheduler.port }),
        Err(error) => {
            let words = error.to_string();
            let words: Vec<&str> = words.split_whitespace().collect();
            Err(words.join(" ").chars().take(LONGEST_FAULT).collect())
        }
    };
    let note = HookNote {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        program: program()?,
        config: std::path::absolute(Config::path(path))?,
        script,
        scheduler,
        slurm: slurm(),
    };
    write(Path::new(NOTED), kind, &note)
}

/// What Slurm's daemon has read here, by the variable that it sets.
fn slurm() -> Option<Result<HookSlurm, String>> {
    let conf = PathBuf::from(std::env::var_os("SLURM_CONF")?);
    Some(slurm_conf::read(&conf).map_err(|error| format!("{}: {error}", conf.display())))
}

/// What all hooks have noted in a directory. What is not there has noted nothing; what can't be read is told as such.
pub fn seen(dir: &Path) -> BTreeMap<HookKind, HookSeen> {
    let seen = |kind| {
        let path = dir.join(file(kind));
        let text = match read(&path) {
            Ok(text) => text?,
            Err(error) => return Some(HookSeen::Unreadable(format!("{}: {error}", path.display()))),
        };
        Some(match serde_json::from_slice(&text) {
            Ok(note) => HookSeen::Noted(note),
            Err(error) => HookSeen::Unreadable(format!("{}: {error}", path.display())),
        })
    };
    HookKind::ALL.into_iter().filter_map(|kind| Some((kind, seen(kind)?))).collect()
}

fn file(kind: HookKind) -> &'static str {
    match kind {
        HookKind::Prolog => "prolog.json",
        HookKind::Epilog => "epilog.json",
    }
}

/// Writes a note, unless the same stands there.
fn write(dir: &Path, kind: HookKind, note: &HookNote) -> io::Result<()> {
    let text = serde_json::to_vec(note)?;
    let path = dir.join(file(kind));
    if read(&path).is_ok_and(|before| before.as_deref() == Some(&text[..])) {
        return Ok(());
    }
    if let Some(above) = dir.parent() {
        // Users' notes are below it, too.
        DirBuilder::new().recursive(true).mode(0o711).create(above)?;
    }
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    // Hooks of two jobs may run at the same time.
    let partial = dir.join(format!("{}.{}", file(kind), std::process::id()));
    let mut opened = OpenOptions::new();
    opened.write(true).create(true).truncate(true).mode(0o600).custom_flags(careful());
    let written = opened.open(&partial).and_then(|mut out| out.write_all(&text));
    let moved = written.and_then(|()| fs::rename(&partial, &path));
    if moved.is_err() {
        // There may be none.
        let _ = fs::remove_file(&partial);
    }
    moved
}

/// Flags that make an open end at once, and never at a symbolic link.
fn careful() -> i32 {
    use rustix::fs::OFlags;
    (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32
}

/// A short file; nothing if there is none.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let opened = OpenOptions::new().read(true).custom_flags(careful()).open(path);
    let found = match opened {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let about = found.metadata()?;
    if !about.is_file() || about.len() > LONGEST {
        return Err(io::Error::other("it is not a short file"));
    }
    let mut text = Vec::new();
    found.take(LONGEST).read_to_end(&mut text)?;
    Ok(Some(text))
}

/// The file that runs.
fn program() -> io::Result<PathBuf> {
    let path = fs::read_link("/proc/self/exe")?.into_os_string().into_vec();
    let path = path.strip_suffix(REPLACED).map(<[u8]>::to_vec).unwrap_or(path);
    Ok(PathBuf::from(std::ffi::OsString::from_vec(path)))
}

/// Whether one of Slurm's daemons on nodes is among this process's ancestors; and the script that is nearest, if one is seen.
/// An ancestor that can't be looked at has ended. Then nothing is noted, and the hooks here are unseen, which nobody takes for
/// right.
fn called_by_slurm() -> Option<Option<PathBuf>> {
    let mut process = rustix::process::getppid().map(|parent| parent.as_raw_nonzero().get())?;
    let mut script = None;
    for _ in 0..ANCESTORS {
        let about = PathBuf::from(format!("/proc/{process}"));
        let stat = fs::read_to_string(about.join("stat")).ok()?;
        let (name, parent) = name_and_parent(&stat)?;
        if name == "slurmd" || name == "slurmstepd" {
            return Some(script);
        }
        script = script.or_else(|| script_of(&fs::read(about.join("cmdline")).ok()?));
        process = parent;
    }
    None
}

/// Of `PID (NAME) STATE PARENT ...`; the name may hold anything. The parent of a container's first process is 0.
fn name_and_parent(stat: &str) -> Option<(&str, i32)> {
    let (head, tail) = stat.rsplit_once(')')?;
    let parent = tail.split_whitespace().nth(1)?.parse().ok()?;
    Some((head.split_once('(')?.1, parent))
}

/// The script that an interpreter runs: the kernel names it after the interpreter and the one argument of its first line.
fn script_of(command_line: &[u8]) -> Option<PathBuf> {
    let words = command_line.split(|byte| *byte == 0).skip(1).take(2);
    let paths = words.map(|word| PathBuf::from(std::ffi::OsString::from_vec(word.to_vec())));
    paths.filter(|path| path.is_absolute()).find(|path| is_script(path))
}

fn is_script(path: &Path) -> bool {
    let mut begin = [0; 2];
    let file = path.metadata().is_ok_and(|found| found.is_file());
    file && File::open(path).and_then(|mut file| file.read_exact(&mut begin)).is_ok() && begin == *b"#!"
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn some() -> HookNote {
        HookNote {
            version: "1".into(),
            program: "/usr/local/bin/ondeck".into(),
            config: "/etc/ondeck/ondeck.toml".into(),
            script: None,
            scheduler: Ok(HookScheduler { host: Some("ctl".parse().unwrap()), port: 7273 }),
            slurm: None,
        }
    }

    #[test]
    fn a_note_is_for_root_alone_is_written_once_and_read_as_it_was_written() {
        let above = tempfile::tempdir().unwrap();
        let dir = above.path().join("ondeck/hooks");
        assert_eq!(seen(&dir), BTreeMap::new(), "no hook has run");
        write(&dir, HookKind::Epilog, &some()).unwrap();
        assert_eq!(seen(&dir), BTreeMap::from([(HookKind::Epilog, HookSeen::Noted(Box::new(some())))]));
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        let path = dir.join("epilog.json");
        let before = fs::metadata(&path).unwrap();
        assert_eq!(before.permissions().mode() & 0o777, 0o600);
        write(&dir, HookKind::Epilog, &some()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), before.ino(), "the same is not written again");
        let other = HookNote { scheduler: Err("line 3: what is that?".into()), ..some() };
        write(&dir, HookKind::Epilog, &other).unwrap();
        assert_eq!(seen(&dir)[&HookKind::Epilog], HookSeen::Noted(Box::new(other)));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_a_hook_that_has_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let unreadable = || match seen(dir.path()).remove(&HookKind::Prolog) {
            Some(HookSeen::Unreadable(why)) => why,
            other => panic!("{other:?}"),
        };
        let path = dir.path().join("prolog.json");
        fs::write(&path, "{}").unwrap();
        assert!(unreadable().contains("prolog.json: missing field"), "{}", unreadable());
        fs::write(&path, vec![b' '; LONGEST as usize + 1]).unwrap();
        assert!(unreadable().contains("it is not a short file"));
        fs::remove_file(&path).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, serde_json::to_vec(&some()).unwrap()).unwrap();
        symlink(&other, &path).unwrap();
        unreadable();
        // A hook puts its own in the place of what it can't read, and writes through no link.
        let new = HookNote { version: "2".into(), ..some() };
        write(dir.path(), HookKind::Prolog, &new).unwrap();
        assert_eq!(seen(dir.path())[&HookKind::Prolog], HookSeen::Noted(Box::new(new)));
        assert_eq!(fs::read(&other).unwrap(), serde_json::to_vec(&some()).unwrap());
    }

    #[test]
    fn a_script_is_known_by_the_command_line_of_its_interpreter() {
        let dir = tempfile::tempdir().unwrap();
        let (script, program) = (dir.path().join("prolog"), dir.path().join("ondeck"));
        fs::write(&script, "#!/bin/sh\n").unwrap();
        fs::write(&program, "\u{7f}ELF").unwrap();
        let line = |words: &[&str]| words.join("\0").into_bytes();
        let (path, other) = (script.to_str().unwrap(), program.to_str().unwrap());
        assert_eq!(script_of(&line(&["/bin/sh", path, ""])), Some(script.clone()));
        assert_eq!(script_of(&line(&["/bin/sh", "-e", path, ""])), Some(script.clone()));
        assert_eq!(script_of(&line(&["timeout", "40", other, "prolog", ""])), None);
        assert_eq!(script_of(b""), None);
        assert_eq!(name_and_parent("7 (a) b) S 5 7 7"), Some(("a) b", 5)));
        assert_eq!(name_and_parent("1 (slurmd) S 0 1 1"), Some(("slurmd", 0)));
    }
}
