//! How an agent knows its processes again.
//!
//! Every process that is started for a RAM disk carries a mark in its environment: whose it is, and what it is to it. That is
//! what an agent goes by after a crash, not a file with process ids: it is set before the process runs, it is inherited by
//! whatever the process starts, and a process id that was given to somebody else does not have it.
//!
//! Users can set variables, too, also for programs that run as root (set-uid ones such as `su`). So the mark has a proof
//! that follows from a key which only root can read, and counts only in a process that is wholly the agent's own user.
//! The proof is never on a command line, and a user's program gets an environment of its own.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::Secret;
use crate::processes::{environment_of, has_ended, look_at, no_answer, pids, users_of};

/// How the role of a task's processes begins. A task does not outlive its agent.
pub const TASK: &str = "task-";

/// The environment variable with the RAM disk's name and epoch.
const MARK: &str = "ONDECK_RAMDISK";
/// The environment variable with the host name and the directory of the agent that started the process. The host name,
/// because hosts that are containers or namespaces of one machine may see each other's processes.
const SCOPE: &str = "ONDECK_SCOPE";
/// The environment variable with what the process is to the RAM disk.
const ROLE: &str = "ONDECK_ROLE";
/// The environment variable with what only an agent with the same directory can know.
const PROOF: &str = "ONDECK_PROOF";

/// The file with the key, in the agent's directory.
const FILE: &str = "marks.json";

/// A process with our mark.
#[derive(Clone, Debug)]
pub struct Marked {
    /// Its process id.
    pub pid: i32,
    /// The RAM disk, as `NAME@EPOCH`.
    pub id: String,
    /// What it is to it.
    pub role: String,
}

impl Marked {
    /// Whether it is a task, which holds no data and does not outlive its agent.
    pub fn is_a_task(&self) -> bool {
        self.role.starts_with(TASK)
    }
}

/// What is kept in the agent's directory, and nowhere else.
#[derive(Serialize, Deserialize)]
struct KeyFile {
    /// From which every proof follows.
    key: String,
    /// The processes that were running when the key was made, with the marks of a version that had no proofs.
    former: Vec<Former>,
}

/// A process of a former version's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Former {
    pid: i32,
    /// When it began, in the kernel's ticks: no other process with this id has begun then.
    began: u64,
}

/// The marks of an agent.
pub struct Marks {
    scope: PathBuf,
    key: Secret,
    former: Vec<Former>,
}

impl Marks {
    /// Those of the agent with this directory. The first time the key is made, and the processes of a former version that
    /// are running are noted: from then on a mark without a proof counts for none but them.
    ///
    /// # Errors
    /// If what is kept can't be read or written, or it can't be told which processes there are.
    pub fn open(scope: &Path) -> io::Result<Marks> {
        let path = scope.join(FILE);
        let told = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make(scope, &path)?;
                fs::read(&path).map_err(told)?
            }
            read => read.map_err(told)?,
        };
        let kept: KeyFile = serde_json::from_slice(&text).map_err(|error| told(error.into()))?;
        let key =
            kept.key.parse().map_err(|error| told(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        Ok(Marks { scope: scope.to_owned(), key, former: kept.former })
    }

    /// Marks a process that is to be started for the RAM disk `id`.
    pub fn put(&self, id: &str, role: &str, command: &mut Command) {
        command.env(MARK, id).env(SCOPE, scope_mark(&self.scope)).env(ROLE, role);
        command.env(PROOF, self.proof(id, role));
    }

    fn proof(&self, id: &str, role: &str) -> String {
        self.key.password(&format!("mark of {id} {role}"))
    }
}

/// The marks of those of these processes that an agent with the directory `scope` has started.
///
/// # Errors
/// The kernel's: then it is not known.
pub(crate) fn marks_of(pids: impl IntoIterator<Item = i32>, scope: &Path) -> io::Result<Vec<Marked>> {
    let scope = scope.to_owned();
    let found = look_at(own(pids)?, move |pid| mark_of(pid, &scope))?;
    let mut all = Vec::new();
    for (pid, found) in found {
        all.extend(found.unwrap_or_else(|| Err(no_answer(pid)))?);
    }
    Ok(all)
}

fn mark_of(pid: i32, scope: &Path) -> io::Result<Option<Marked>> {
    let Some((marked, proof)) = claim_of(pid, scope)? else { return Ok(None) };
    let marks = Marks::open(scope)?;
    let is_ours = match proof {
        Some(proof) => proof == marks.proof(&marked.id, &marked.role),
        None => former(pid)?.is_some_and(|found| marks.former.contains(&found)),
    };
    Ok(is_ours.then_some(marked))
}

/// What the environment of one of our [own processes](own) says, and the proof, if it has one.
fn claim_of(pid: i32, scope: &Path) -> io::Result<Option<(Marked, Option<String>)>> {
    // An ended process that nobody has reaped has no environment any more, so it does not appear.
    match environment_of(pid) {
        Ok(environment) => Ok(claim_in(&environment, pid, scope)),
        Err(error) if has_ended(&error) => Ok(None),
        // Hidden from its own user is a process that may not be dumped: none that is started here.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(error) => Err(error),
    }
}

/// Those of these processes that are wholly our own user's: the real, the effective and the saved one. A set-uid program that
/// a user has started has that user as one of them, unless it has become the other one for good. That of its files may be
/// anybody, which servers change all the time.
///
/// # Errors
/// The kernel's: then it is not known.
pub(crate) fn own(pids: impl IntoIterator<Item = i32>) -> io::Result<Vec<i32>> {
    let user = rustix::process::geteuid().as_raw();
    let mut own = Vec::new();
    for pid in pids {
        match users_of(pid) {
            Ok(users) if users[..3].iter().all(|other| *other == user) => own.push(pid),
            Ok(_) => {}
            Err(error) if has_ended(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(own)
}

fn claim_in(environment: &[u8], pid: i32, scope: &Path) -> Option<(Marked, Option<String>)> {
    let own_scope = scope_mark(scope);
    let value = |name: &str| -> Option<&[u8]> {
        environment
            .split(|byte| *byte == 0)
            .find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    };
    if value(SCOPE)? != own_scope.as_encoded_bytes() {
        return None;
    }
    let text = |name: &str| value(name).map(|value| String::from_utf8_lossy(value).into_owned());
    Some((Marked { pid, id: text(MARK)?, role: text(ROLE).unwrap_or_default() }, text(PROOF)))
}

fn scope_mark(scope: &Path) -> OsString {
    let mut mark = OsString::from(rustix::system::uname().nodename().to_string_lossy().into_owned());
    mark.push(":");
    mark.push(scope);
    mark
}

/// What a process would be noted as; nothing if it has ended, or if its program is a set-uid one, which a user may have
/// started.
fn former(pid: i32) -> io::Result<Option<Former>> {
    let read = || -> io::Result<(u32, String)> {
        Ok((
            fs::metadata(format!("/proc/{pid}/exe"))?.mode(),
            fs::read_to_string(format!("/proc/{pid}/stat"))?,
        ))
    };
    let (mode, stat) = match read() {
        Err(error) if has_ended(&error) => return Ok(None),
        read => read?,
    };
    if mode & 0o6000 != 0 {
        return Ok(None);
    }
    // The name, in parentheses, can be anything.
    let began = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse().ok());
    let began = began.ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat tells no start time")))?;
    Ok(Some(Former { pid, began }))
}

/// Makes what is kept. It is complete as soon as it is there; if another thread was faster, that one's counts.
fn make(scope: &Path, path: &Path) -> io::Result<()> {
    let mut noted = Vec::new();
    let its = scope.to_owned();
    let look = move |pid| -> io::Result<_> {
        let Some(claim) = claim_of(pid, &its)? else { return Ok(None) };
        Ok(former(pid)?.map(|former| (claim, former)))
    };
    for (pid, found) in look_at(own(pids()?)?, look)? {
        let Some(((found, proof), former)) = found.unwrap_or_else(|| Err(no_answer(pid)))? else { continue };
        if proof.is_some() {
            // It may hold results, so nothing is decided without the key.
            return Err(io::Error::other(format!(
                "{} is lost, by which processes of RAM disks are known, and process {pid} says that it is the {} of {}; \
                 put the file back, or end the process",
                path.display(),
                found.role,
                found.id,
            )));
        }
        noted.push(former);
    }
    let kept = KeyFile { key: Secret::new()?.reveal(), former: noted };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(scope)?;
    let partial = scope.join(format!("{FILE}.{}", Secret::new()?.reveal()));
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
        file.write_all(&serde_json::to_vec(&kept)?)?;
        file.sync_all()?;
        match fs::hard_link(&partial, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => fs::File::open(scope)?.sync_all(),
        }
    };
    let written = write();
    let removed = fs::remove_file(&partial);
    written.and(removed).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}
