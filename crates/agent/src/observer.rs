//! Watching which processes write a job's files, for the history of its layouts. It is off unless the site wants it.
//!
//! - `fanotify`: what the kernel tells
//! - `writers`: what follows from it
//!
//! Nothing is kept on disk: an agent that starts again has not seen all, and says of the jobs before that it has not watched. What was seen
//! is told of files only of which the job's own user knows the handles.

mod fanotify;
mod writers;

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ondeck_api::wire::KindToTell;
use ondeck_core::{Incarnation, JobId, NodeName};
use ondeck_layout::watched::{FileSeen, KindSeen};
use ondeck_ramdisk::mounts::{Mount, mounted, seen_at};
use ondeck_transfer::identity::FileHandle;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::process::{Pid, test_kill_process};

use self::fanotify::Listener;
use self::writers::{FileKey, Processes, Rank, Who, Writers};

/// So many jobs are watched at a time; the kernel tells each of them everything.
const MOST_JOBS: usize = 16;

/// The jobs that are watched on this node.
#[derive(Default)]
pub struct Observer(Mutex<BTreeMap<Incarnation, Arc<Watched>>>);

/// A job that is watched.
struct Watched {
    /// The filesystems of its directories.
    filesystems: BTreeMap<PathBuf, u64>,
    /// Tells the thread to come to its end.
    stop: OwnedFd,
    thread: Listening,
    until: Instant,
}

/// The thread that listens, until somebody waits for its end.
type Listening = Mutex<Option<JoinHandle<io::Result<Writers>>>>;

/// Why a job is not watched.
#[derive(Debug, thiserror::Error)]
pub enum NotWatched {
    /// There are too many.
    #[error("{MOST_JOBS} jobs are watched there already")]
    Many,
    /// The kernel can't.
    #[error("the kernel can't tell who opens files: {0}")]
    Kernel(io::Error),
    /// It can't tell it of this filesystem.
    #[error("{}: the kernel can't tell who opens files of its filesystem ({kind}): {error}", path.display())]
    Filesystem {
        /// The directory.
        path: PathBuf,
        /// The filesystem's type.
        kind: String,
        /// The kernel's.
        error: io::Error,
    },
    /// It is not known which filesystem it is on.
    #[error("{}: it can't be seen which filesystem it is on", .0.display())]
    Mounts(PathBuf),
    /// It was not watched, or not from its start.
    #[error("it was not watched there from its start")]
    Never,
    /// The filesystem has answered too late.
    #[error("its filesystem has answered too late")]
    Late,
    /// The time that was given is over.
    #[error("it was watched no longer than it was asked for")]
    Over,
    /// What was seen is not all.
    #[error("{0}")]
    Lacking(&'static str),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these protect is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Observer {
    /// Watches which processes of a job, of its user's if it is said who that is, write to the filesystems of its directories, for so long
    /// at most. One that is watched already goes on.
    ///
    /// It may hang with a filesystem. What has not begun by then is not begun any more: nobody would end it.
    ///
    /// # Errors
    /// [`NotWatched`]; then nothing is watched.
    pub fn begin(
        &self,
        (job, uid): (Incarnation, Option<u32>),
        node: &NodeName,
        directories: &[PathBuf],
        (by, longest): (Instant, Duration),
    ) -> Result<(), NotWatched> {
        self.forget_old();
        if lock(&self.0).contains_key(&job) {
            return Ok(());
        }
        let listener = Listener::new().map_err(NotWatched::Kernel)?;
        let mounts = mounted().map_err(NotWatched::Kernel)?;
        let mut filesystems = BTreeMap::new();
        for path in directories {
            filesystems.insert(path.clone(), add(&listener, &mounts, path)?);
        }
        let mut known = lock(&self.0);
        if known.len() >= MOST_JOBS {
            return Err(NotWatched::Many);
        }
        if by <= Instant::now() {
            return Err(NotWatched::Late);
        }
        let (until, processes) = (Instant::now() + longest, OfThisNode::new(job.job, uid, node));
        let kernel = |error: io::Error| NotWatched::Kernel(error);
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| kernel(error.into()))?;
        let stopped = stop.try_clone().map_err(kernel)?;
        let thread = std::thread::Builder::new().name("observer".into());
        let thread = thread.spawn(move || listen(listener, &processes, &stopped, until)).map_err(kernel)?;
        let watched = Watched { filesystems, stop, thread: Mutex::new(Some(thread)), until };
        known.insert(job, Arc::new(watched));
        Ok(())
    }

    /// Watches a job no longer, and tells what was seen of these files.
    ///
    /// # Errors
    /// [`NotWatched`]: nothing can be told.
    pub fn end(&self, job: Incarnation, kinds: &[KindToTell]) -> Result<Vec<KindSeen>, NotWatched> {
        let watched = lock(&self.0).remove(&job).ok_or(NotWatched::Never)?;
        let writers = watched.end()?;
        if let Some(lack) = writers.lack() {
            return Err(NotWatched::Lacking(lack));
        }
        let seen = |kind: &KindToTell| {
            let Some(filesystem) = watched.filesystems.get(&kind.directory) else {
                return KindSeen::default();
            };
            let key = |text: &String| {
                let handle = text.parse::<FileHandle>().ok()?;
                Some(FileKey { filesystem: *filesystem, handle })
            };
            // What is no handle keeps its place, as a file of which nothing is known.
            let keys: Vec<Option<FileKey>> = kind.files.iter().map(key).collect();
            let known: Vec<FileKey> = keys.iter().flatten().cloned().collect();
            let KindSeen { files, at_once } = writers.seen(&known);
            let mut files = files.into_iter();
            let nothing = FileSeen { writers: 0, is_exact: false };
            let of_key = |key: &Option<FileKey>| key.as_ref().and_then(|_| files.next()).unwrap_or(nothing);
            KindSeen { files: keys.iter().map(of_key).collect(), at_once }
        };
        Ok(kinds.iter().map(seen).collect())
    }

    /// Whoever wanted to know it has not asked.
    fn forget_old(&self) {
        lock(&self.0).retain(|_, watched| watched.until > Instant::now());
    }
}

impl Watched {
    fn end(&self) -> Result<Writers, NotWatched> {
        // The thread waits for nothing else: untold, it would be waited for until its time is over.
        let told = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        told.map_err(|error| NotWatched::Kernel(error.into()))?;
        let thread = lock(&self.thread).take().ok_or(NotWatched::Never)?;
        let ended = thread.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")));
        if self.until <= Instant::now() {
            return Err(NotWatched::Over);
        }
        ended.map_err(NotWatched::Kernel)
    }
}

/// More reads than this than the kernel keeps events for: what came before somebody asked is in them.
const READS_AT_THE_END: usize = 64;

/// Its thread's nice value: it does little, and that soon.
const PRIORITY: i32 = -10;

/// Listens until it is told to stop, or its time is over. What the kernel has told until then is taken.
fn listen(
    mut listener: Listener,
    processes: &OfThisNode,
    stop: &OwnedFd,
    until: Instant,
) -> io::Result<Writers> {
    let mut writers = Writers::default();
    // Who is gone before it is asked who that was is not known. What can't be had is done without.
    let _ = rustix::process::setpriority_process(None, PRIORITY);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let is_over = wait(&listener, stop, left)? || left.is_zero();
        for _ in 0..if is_over { READS_AT_THE_END } else { 1 } {
            let Some(batch) = listener.read()? else { break };
            if batch.has_lost {
                writers.lose();
            }
            writers.take(batch.events, processes);
        }
        if is_over {
            return Ok(writers);
        }
    }
}

/// Waits until there is something to read, or it is told to stop, which it says; no longer than this.
fn wait(listener: &Listener, stop: &OwnedFd, longest: Duration) -> io::Result<bool> {
    let mut waited = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
    let longest =
        Timespec { tv_sec: longest.as_secs().cast_signed(), tv_nsec: longest.subsec_nanos().into() };
    match rustix::event::poll(&mut waited, Some(&longest)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!waited[1].revents().is_empty()),
        Err(error) => Err(error.into()),
    }
}

/// Those of a job on this node, by what Slurm puts in their environments.
struct OfThisNode {
    /// Variables of which one of the first must be there, and the second if it is set at all.
    jobs: [Vec<u8>; 2],
    node: Vec<u8>,
    /// Whose they are: others may say in their environment what they like.
    uid: Option<u32>,
}

const NODE: &[u8] = b"SLURMD_NODENAME=";

/// What tells a process's step, and what its rank in it. What a launcher says counts beside what Slurm says: its processes are all of one
/// task of Slurm's.
const STEP: &[u8] = b"SLURM_STEP_ID=";
const RANK: [&[u8]; 4] = [b"SLURM_PROCID=", b"PMI_RANK=", b"PMIX_RANK=", b"OMPI_COMM_WORLD_RANK="];

/// The most that is read of a process's environment.
const MOST_ENVIRONMENT: u64 = 256 << 10;

impl OfThisNode {
    fn new(job: JobId, uid: Option<u32>, node: &NodeName) -> OfThisNode {
        let of_job = |name: &str| format!("{name}={job}").into_bytes();
        OfThisNode {
            jobs: [of_job("SLURM_JOB_ID"), of_job("SLURM_HET_JOB_ID")],
            node: [NODE, node.as_str().as_bytes()].concat(),
            uid,
        }
    }

    /// Who has such an environment.
    fn who_has(&self, environment: &[u8]) -> Who {
        let (mut step, mut rank) = (DefaultHasher::new(), DefaultHasher::new());
        let (mut is_of_job, mut says_rank) = (false, false);
        for variable in environment.split(|byte| *byte == 0) {
            if variable.starts_with(NODE) && variable != self.node {
                return Who::Stranger;
            }
            is_of_job |= self.jobs.iter().any(|of_job| variable == of_job);
            if variable.starts_with(STEP) {
                variable.hash(&mut step);
            } else if RANK.iter().any(|name| variable.starts_with(name)) {
                says_rank = true;
                variable.hash(&mut rank);
            }
        }
        match is_of_job {
            true => Who::OfJob(says_rank.then(|| Rank { step: step.finish(), rank: rank.finish() })),
            false => Who::Stranger,
        }
    }
}

impl Processes for OfThisNode {
    fn is_there(&self, process: u32) -> bool {
        let process = i32::try_from(process).ok().and_then(Pid::from_raw);
        // One of which it can't be told is there.
        process.is_some_and(|process| test_kill_process(process) != Err(rustix::io::Errno::SRCH))
    }

    fn who(&self, process: u32) -> Who {
        let mut environment = Vec::new();
        let file = File::open(format!("/proc/{process}/environ"));
        let read = file.and_then(|file| {
            let owner = file.metadata()?.uid();
            Ok((owner, file.take(MOST_ENVIRONMENT).read_to_end(&mut environment)?))
        });
        match read {
            // Who is ending has none any more.
            Err(_) | Ok((_, 0)) => Who::Gone,
            // To root belong also those that nobody may look into.
            Ok((owner, _)) if owner != 0 && self.uid.is_some_and(|uid| uid != owner) => Who::Stranger,
            Ok(_) => self.who_has(&environment),
        }
    }
}

/// Listens to the filesystem of a directory, whose number it tells. It may hang with it.
fn add(listener: &Listener, mounts: &[Mount], directory: &Path) -> Result<u64, NotWatched> {
    let mount = seen_at(mounts, directory).ok_or_else(|| NotWatched::Mounts(directory.to_owned()))?;
    listener.add(&mount.at).map_err(|error| NotWatched::Filesystem {
        path: directory.to_owned(),
        kind: mount.kind.clone(),
        error,
    })
}

/// Whether the kernel can tell who writes to the filesystem of a directory. It may hang with it.
///
/// # Errors
/// [`NotWatched`]: why it can't.
pub fn can_watch(directory: &Path) -> Result<(), NotWatched> {
    let listener = Listener::new().map_err(NotWatched::Kernel)?;
    let mounts = mounted().map_err(NotWatched::Kernel)?;
    add(&listener, &mounts, directory).map(drop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    const OF_JOB: [(&str, &str); 2] = [("SLURM_JOB_ID", "42"), ("SLURMD_NODENAME", "n1")];

    /// Long enough for all of it.
    const LONG: Duration = Duration::from_secs(60);

    fn can() -> bool {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            ondeck_skip::skipped("it needs root, to watch a filesystem");
        }
        is_root
    }

    fn soon() -> Instant {
        Instant::now() + LONG
    }

    fn node() -> NodeName {
        "n1".parse().unwrap()
    }

    fn handle(directory: &Path, name: &str) -> String {
        let name = CString::new(name).unwrap();
        FileHandle::of(File::open(directory).unwrap().as_fd(), &name).unwrap().to_string()
    }

    #[test]
    fn what_another_user_says_of_itself_counts_for_nothing() {
        if !can() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let of = |uid| OfThisNode::new(JobId(42), Some(uid), &node());
        let mut child = Command::new("sleep");
        let mut child =
            child.arg("60").env_clear().envs(OF_JOB).uid(12345).current_dir(folder.path()).spawn().unwrap();
        assert!(matches!(of(12345).who(child.id()), Who::OfJob(_)));
        assert!(matches!(of(12346).who(child.id()), Who::Stranger));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// A shell that does a line when it is told to, and stays until it is told again.
    fn shell(directory: &Path, line: &str) -> Child {
        let script = format!("read go; {line}; read end");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).current_dir(directory).stdin(Stdio::piped()).env_clear();
        command.envs(OF_JOB);
        command.spawn().unwrap()
    }

    fn go(shell: &mut Child) {
        shell.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    #[test]
    fn it_is_seen_how_many_processes_write_a_file_at_a_time() {
        if !can() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let (observer, job) = (Observer::default(), "42@7".parse().unwrap());
        observer.begin((job, None), &node(), std::slice::from_ref(&root), (soon(), LONG)).unwrap();
        // A second order changes nothing.
        observer.begin((job, None), &node(), std::slice::from_ref(&root), (soon(), LONG)).unwrap();
        let mut ranks: Vec<Child> = (0..4)
            .map(|rank| shell(&root, &format!("echo {rank} >> shared; echo {rank} > own.{rank}; : < shared")))
            .collect();
        ranks.iter_mut().for_each(go);
        let mut later = Command::new("sh");
        // Each of them is a process of its own, and gone before the next one comes.
        later.args([
            "-c",
            "for step in 1 2 3; do sh -c 'echo $0 >> log; : > moved' $step; done; mv moved kept",
        ]);
        assert!(later.current_dir(&root).env_clear().envs(OF_JOB).status().unwrap().success());
        let written = || {
            let is_there =
                |rank| root.join(format!("own.{rank}")).metadata().is_ok_and(|file| file.len() > 0);
            (0..4).all(is_there)
        };
        let until = soon();
        while !written() {
            assert!(Instant::now() < until, "the ranks have not written");
            std::thread::yield_now();
        }
        fs::write(root.join("read-only"), "").unwrap();
        let files = ["shared", "own.0", "own.3", "log", "kept"].map(|name| handle(&root, name));
        let kind = |files: &[String]| KindToTell { directory: root.clone(), files: files.to_vec() };
        let none = ["no handle".to_owned(), "1:00".to_owned()];
        let question = [kind(&files[..3]), kind(&files[3..]), kind(&none)];
        // They are there until all is told: who is gone before somebody has asked who that was is not known.
        let seen = observer.end(job, &question).unwrap();
        ranks.iter_mut().for_each(go);
        assert!(ranks.into_iter().all(|mut rank| rank.wait().unwrap().success()));
        let exactly = |writers| FileSeen { writers, is_exact: true };
        assert_eq!(seen[0], KindSeen { files: [4, 1, 1].map(exactly).to_vec(), at_once: 4 });
        // On a machine that is out of breath the three may have come and gone before anybody looked.
        assert!(seen[1].files.iter().all(|file| file.writers <= 1), "{seen:?}");
        assert!(seen[1].at_once <= 1);
        let none = FileSeen { writers: 0, is_exact: false };
        assert_eq!(seen[2], KindSeen { files: vec![none, exactly(0)], at_once: 0 });
        assert!(matches!(observer.end(job, &[]), Err(NotWatched::Never)));
    }

    #[test]
    fn whoever_is_watched_longer_than_asked_for_is_forgotten_and_what_can_not_be_watched_is_told() {
        if !can() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let (observer, job) = (Observer::default(), "42@7".parse().unwrap());
        observer.begin((job, None), &node(), std::slice::from_ref(&root), (soon(), Duration::ZERO)).unwrap();
        assert!(matches!(observer.end(job, &[]), Err(NotWatched::Over)));
        for number in 0..MOST_JOBS {
            let job = format!("{number}@7").parse().unwrap();
            observer.begin((job, None), &node(), std::slice::from_ref(&root), (soon(), LONG)).unwrap();
        }
        assert!(matches!(
            observer.begin((job, None), &node(), std::slice::from_ref(&root), (soon(), LONG)),
            Err(NotWatched::Many)
        ));
        let refused = can_watch(Path::new("/proc/self")).unwrap_err().to_string();
        assert!(
            refused.starts_with("/proc/self: the kernel can't tell who opens files of its filesystem (proc)"),
            "{refused}"
        );
        can_watch(&root).unwrap();
    }

    #[test]
    fn the_environment_says_whose_a_process_is_and_which_rank() {
        let job = OfThisNode::new(JobId(5), None, &node());
        let who = |text: &str| job.who_has(text.replace(' ', "\0").as_bytes());
        let rank = |text: &str| match who(text) {
            Who::OfJob(Some(rank)) => rank,
            who => panic!("{text}: {who:?}"),
        };
        let first = rank("A=1 SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURMD_NODENAME=n1");
        let second = rank("SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=1 B=2");
        assert_eq!(first.step, second.step);
        assert_ne!(first.rank, second.rank);
        // Those of a launcher are all of one task of Slurm's.
        let launched = |rank_of: u32| rank(&format!("SLURM_JOB_ID=5 SLURM_PROCID=0 PMI_RANK={rank_of}"));
        assert_ne!(launched(0).rank, launched(1).rank);
        assert_ne!(rank("SLURM_JOB_ID=5 SLURM_STEP_ID=1 SLURM_PROCID=0").step, first.step);
        assert_eq!(who("SLURM_JOB_ID=7 SLURM_HET_JOB_ID=5 HOME=/"), Who::OfJob(None));
        for stranger in ["", "HOME=/", "SLURM_JOB_ID=55", "SLURM_JOB_ID=5 SLURMD_NODENAME=n11"] {
            assert_eq!(who(stranger), Who::Stranger, "{stranger}");
        }
    }
}
