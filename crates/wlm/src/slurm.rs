//! Slurm, by its own commands. What is said here of its behaviour was seen with 22.05.8 (Debian 12).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use ondeck_core::{JobId, NodeName};

use self::burst_buffers::Lacking;
use crate::{Controller, Element, HeldArray, JobDetails, Queue, WlmError, WorkloadManager};

mod burst_buffers;
mod command;
mod details;
mod queue;
mod record;

pub use burst_buffers::jobs_with_burst_buffers;
pub use queue::{HELD_FOR_INPUT, mark};

/// How to reach Slurm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmSettings {
    /// Where squeue and scontrol are; looked for in PATH if unset.
    pub bin_dir: Option<PathBuf>,
    /// The slurm.conf to use, as SLURM_CONF names it; the environment's or the default one if unset.
    pub conf: Option<PathBuf>,
    /// How long a command may take. Commands wait for about 10 s by themselves if the controller is down.
    pub timeout: Duration,
}

impl Default for SlurmSettings {
    fn default() -> Self {
        SlurmSettings { bin_dir: None, conf: None, timeout: Duration::from_secs(15) }
    }
}

/// Slurm. It must be asked as root or as SlurmUser: others neither read scripts nor see all jobs.
///
/// Every call runs one command, and ends it when it takes too long or the call is given up.
#[derive(Clone, Debug)]
pub struct Slurm {
    settings: SlurmSettings,
    /// What separates the fields of squeue's output. Users choose accounts, directories and file names, and must not
    /// be able to write a job of their own making into the list, so nobody can know it beforehand.
    separator: String,
    /// The elements of arrays, when the queue was last looked at.
    elements: Arc<Mutex<BTreeMap<JobId, Element>>>,
    /// Jobs that wait for their input without a burst buffer, when that was last looked at.
    lacking: Arc<Mutex<Lacking>>,
    observer: Option<Observer>,
}

/// What is told of each command that has ended: which, how long it took, and whether it answered.
type Observe = dyn Fn(&str, Duration, bool) + Send + Sync;

#[derive(Clone)]
struct Observer(Arc<Observe>);

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observer")
    }
}

impl Slurm {
    /// Slurm as `settings` say; nothing is asked of it yet.
    pub fn new(settings: SlurmSettings) -> Slurm {
        Slurm {
            settings,
            separator: record::separator(),
            elements: Arc::default(),
            lacking: Arc::default(),
            observer: None,
        }
    }

    /// The same, which tells of every command when it has ended: which, how long it took, and whether it answered. What is
    /// told must not block.
    #[must_use]
    pub fn with_observer(self, observer: impl Fn(&str, Duration, bool) + Send + Sync + 'static) -> Slurm {
        Slurm { observer: Some(Observer(Arc::new(observer))), ..self }
    }

    /// The nodes that Slurm has, whatever their state.
    ///
    /// # Errors
    /// [`WlmError`].
    pub async fn all_nodes(&self) -> Result<BTreeSet<NodeName>, WlmError> {
        let lines = self.sinfo(&["--all", "--format=%N"]).await?;
        // A name that no host can have is passed over: no agent answers to it.
        Ok(lines.lines().filter_map(|line| line.trim().parse().ok()).collect())
    }

    /// `sinfo`, one line a node and partition.
    async fn sinfo(&self, options: &[&str]) -> Result<String, WlmError> {
        let output = self.run("sinfo", &[&["--noheader", "--Node"], options].concat()).await?;
        if !output.success {
            return Err(output.failure(None));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `scontrol VERB… JOB`, which says nothing when it succeeds.
    async fn change(&self, job: JobId, words: &[&str]) -> Result<(), WlmError> {
        let output = self.run("scontrol", words).await?;
        if output.success { Ok(()) } else { Err(output.failure(Some(job))) }
    }

    /// `scontrol show config`, whose lines are `Key = value`.
    async fn configuration(&self) -> Result<Vec<(String, String)>, WlmError> {
        let output = self.run("scontrol", &["show", "config"]).await?;
        if !output.success {
            return Err(output.failure(None));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        Ok(pairs.map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned())).collect())
    }

    async fn update(&self, job: JobId, assignment: &str) -> Result<(), WlmError> {
        self.change(job, &["update", &format!("JobId={}", self.name(job)), assignment]).await
    }

    /// Writes the comment of a job that has ended into the accounting; whether that was done. Without accounting sacctmgr
    /// fails at once; with it, what it writes is in lower case.
    async fn comment_ended(&self, job: JobId, line: &str) -> bool {
        // It makes other quotes of quotes by itself; a backslash would be one to the database.
        let (job, comment) = (format!("jobid={job}"), format!("admincomment={}", line.replace('\\', "/")));
        let words = ["--immediate", "--quiet", "modify", "job", "where", &job, "set", &comment];
        self.run("sacctmgr", &words).await.is_ok_and(|output| output.success)
    }

    /// What a job is called in an order. The element of an array that was the last to get a number has that of the array,
    /// by which scontrol would reach all elements.
    fn name(&self, job: JobId) -> String {
        let elements = self.elements.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match elements.get(&job) {
            Some(Element { array, task }) => format!("{array}_{task}"),
            None => job.to_string(),
        }
    }
}

#[async_trait]
impl WorkloadManager for Slurm {
    /// One squeue, with a format: of all commands only its `-O` gives the scheduled nodes, the restart count and the
    /// submitter's numbers at once, in fields of any length (`squeue --json` lacks the scheduled nodes, `squeue -o`
    /// the restart count; `scontrol show job -o` can't be split where a job's name looks like a field).
    ///
    /// - Pending elements of an array that were not started yet share one record, whose number will be that of the
    ///   element that starts last. Such a record is left out; each element appears when it gets a record of its own: when
    ///   it starts, when it alone is changed, or when it is the last one. Without `--array-unique` squeue would show pending
    ///   elements in one line whether they have records of their own or not; with it every record has a line. (With
    ///   `--array` every element has one, and what a user has written once is repeated a thousand times.)
    /// - A requeue counts at once: while the old life still ends (COMPLETING, epilogs run) Slurm shows the count of the
    ///   new one. It is told apart here, and is shown as the end of the old life.
    /// - Each component of a heterogeneous job has a record and a number. What is ordered for the first one, whose number is
    ///   that of the job, Slurm does to all of them, AdminComment included; for another one, to that one alone.
    async fn queue(&self) -> Result<Queue, WlmError> {
        let arguments = ["--noheader", "--all", "--states=all", "--array-unique"];
        let output = self.squeue(&arguments, queue::FIELDS).await?;
        if !output.success {
            return Err(output.failure(None));
        }
        // Thousands of lines: off the thread that others wait on.
        let separator = self.separator.clone();
        let mut queue = tokio::task::spawn_blocking(move || queue::parse(&output.stdout, &separator))
            .await
            .map_err(|error| WlmError::Malformed { what: error.to_string() })??;
        self.mark_lost_burst_buffers(&mut queue.jobs, &queue.staging_in).await;
        let mut elements = self.elements.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        elements.clone_from(&queue.elements);
        drop(elements);
        Ok(queue)
    }

    /// Any change to one element gives it a record.
    async fn split(&self, held: HeldArray) -> Result<(), WlmError> {
        let HeldArray { array, next } = held;
        let comment = format!("AdminComment={HELD_FOR_INPUT}");
        self.change(array, &["update", &format!("JobId={array}_{next}"), &comment]).await
    }

    /// `scontrol write batch_script`. It exits with 0 even when it fails, so only a script is a success.
    async fn script(&self, job: JobId) -> Result<Vec<u8>, WlmError> {
        let output = self.run("scontrol", &["write", "batch_script", &job.to_string(), "-"]).await?;
        if output.success && !output.stdout.is_empty() {
            return Ok(output.stdout);
        }
        Err(output.failure(Some(job)))
    }

    async fn work_dir(&self, job: JobId) -> Result<PathBuf, WlmError> {
        Ok(self.details(job).await?.work_dir)
    }

    async fn details(&self, job: JobId) -> Result<JobDetails, WlmError> {
        let id = job.to_string();
        let arguments = ["--noheader", "--all", "--states=all", "--array-unique", "-j", &id];
        let output = self.squeue(&arguments, details::FIELDS).await?;
        if !output.success {
            return Err(output.failure(Some(job)));
        }
        details::parse(&output.stdout, &self.separator, job)
    }

    /// In AdminComment: Comment is the user's own, who may depend on it. Slurm takes any length, and no change once a job
    /// has ended; then its accounting does, if there is one.
    async fn set_comment(&self, job: JobId, text: &str) -> Result<(), WlmError> {
        let line = details::one_line(text);
        let done = self.update(job, &format!("AdminComment={line}")).await;
        match &done {
            Err(WlmError::Refused { message }) if message.contains("already finished") => {
                if self.comment_ended(job, &line).await { Ok(()) } else { done }
            }
            _ => done,
        }
    }

    /// Held by root it is JobHeldAdmin, which its user can't release.
    async fn hold(&self, job: JobId) -> Result<(), WlmError> {
        self.change(job, &["hold", &self.name(job)]).await
    }

    /// A priority of zero is what `scontrol hold` gives, and one update may change several things.
    async fn hold_saying(&self, job: JobId, text: &str) -> Result<(), WlmError> {
        let (id, line) = (self.name(job), details::one_line(text));
        let words = ["update", &format!("JobId={id}"), "Priority=0", &format!("AdminComment={line}")];
        self.change(job, &words).await
    }

    /// Where the priority is the order of submission (priority/basic) a released job goes to the end of the queue; to
    /// keep its place, set the priority that it had before.
    async fn release(&self, job: JobId) -> Result<(), WlmError> {
        self.change(job, &["release", &self.name(job)]).await
    }

    async fn set_priority(&self, job: JobId, priority: u32) -> Result<(), WlmError> {
        // The two greatest numbers mean `unset` and `infinite`, which scontrol does not take.
        if !(1..u32::MAX - 1).contains(&priority) {
            return Err(WlmError::Refused {
                message: format!("{priority} is not a priority; write 1 to {}", u32::MAX - 2),
            });
        }
        self.update(job, &format!("Priority={priority}")).await
    }

    /// The same as a release: Slurm computes the priority anew there, and has no other way back from one that was set.
    async fn reset_priority(&self, job: JobId) -> Result<(), WlmError> {
        self.release(job).await
    }

    /// By the clock of the machine that asks, which scontrol adds the time to. `now` is what `sbatch --begin` takes for no delay.
    async fn begin_after(&self, job: JobId, time: Duration, text: &str) -> Result<(), WlmError> {
        let begin = match time.as_secs() {
            0 => "StartTime=now".to_owned(),
            seconds => format!("StartTime=now+{seconds}"),
        };
        let (id, line) = (self.name(job), details::one_line(text));
        self.change(job, &["update", &format!("JobId={id}"), &begin, &format!("AdminComment={line}")]).await
    }

    /// Without an accounting database Slurm says yes to everything and changes nothing.
    async fn set_qos(&self, job: JobId, qos: &str) -> Result<(), WlmError> {
        self.update(job, &format!("QOS={qos}")).await
    }

    /// Its name and its state in short, with a sign behind it for what is not there.
    async fn nodes(&self) -> Result<Vec<NodeName>, WlmError> {
        Ok(there(&self.sinfo(&["--format=%N %t"]).await?))
    }

    /// `scancel --hurry`, as slurmctld knows no other way to skip what is left of a stage-out.
    async fn end_stage_out(&self, job: JobId) -> Result<(), WlmError> {
        let output = self.run("scancel", &["--hurry", &self.name(job)]).await?;
        if output.success { Ok(()) } else { Err(output.failure(Some(job))) }
    }

    async fn cluster(&self) -> Result<String, WlmError> {
        let config = self.configuration().await?;
        let malformed = || WlmError::Malformed { what: "scontrol show config: it has no ClusterName".into() };
        config.into_iter().find(|(key, _)| key == "ClusterName").map(|(_, name)| name).ok_or_else(malformed)
    }

    /// `SlurmUser = slurm(64030)`, `SlurmctldHost[0] = ctl(10.77.0.1)`.
    async fn controller(&self) -> Result<Controller, WlmError> {
        let config = self.configuration().await?;
        let malformed = || WlmError::Malformed { what: "scontrol show config: it has no SlurmUser".into() };
        let user = config.iter().find(|(key, _)| key == "SlurmUser").ok_or_else(malformed)?;
        let uid = user.1.rsplit_once('(').and_then(|(_, rest)| rest.trim_end_matches(')').parse().ok());
        let hosts = config.iter().filter(|(key, _)| key.starts_with("SlurmctldHost"));
        let hosts = hosts.flat_map(|(_, host)| {
            let (name, address) = host.split_once('(').unwrap_or((host, ""));
            let address = address.trim_end_matches(')');
            [name, address].into_iter().filter(|text| !text.is_empty()).map(str::to_owned).collect::<Vec<_>>()
        });
        let value = |of: &str| config.iter().find(|(key, _)| key == of).map_or("", |(_, value)| value);
        let started = if loses_places(value("SLURM_VERSION")) { digits(value("BOOT_TIME")) } else { 0 };
        Ok(Controller { uid: uid.ok_or_else(malformed)?, hosts: hosts.collect(), started })
    }

    /// `scontrol ping`: at once if the controller is down, after Slurm's MessageTimeout if it hangs. One controller of
    /// several is enough.
    async fn ping(&self) -> Result<(), WlmError> {
        let output = self.run("scontrol", &["ping"]).await?;
        let text = String::from_utf8_lossy(&output.stdout);
        if output.success && text.lines().any(|line| line.ends_with(" is UP")) {
            return Ok(());
        }
        let message = text.lines().find(|line| line.starts_with("Slurmctld")).unwrap_or_default();
        Err(WlmError::Unavailable { message: format!("{message}{}", output.stderr.trim()) })
    }
}

/// Whether this version of Slurm has places for jobs that wait for their burst buffers, and may lose them.
fn loses_places(version: &str) -> bool {
    const HAS_NONE: (u32, u32) = (24, 5);
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < HAS_NONE
}

/// The digits of a text as a number: 2026-11-25T22:47:12 is 20261125224712. 0 if it has none.
fn digits(text: &str) -> u64 {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

/// The nodes in the lines of sinfo that are there. A name that no host can have is passed over: no agent answers to it.
fn there(lines: &str) -> Vec<NodeName> {
    let gone = |state: &str| {
        ["down", "unk", "pow", "boot", "fut"].iter().any(|gone| state.starts_with(gone))
            || state.ends_with(['*', '~', '#', '%', '!', '^'])
    };
    let nodes = lines.lines().filter_map(|line| line.trim().split_once(' '));
    let nodes: BTreeSet<NodeName> =
        nodes.filter(|(_, state)| !gone(state)).filter_map(|(node, _)| node.parse().ok()).collect();
    nodes.into_iter().collect()
}

/// Bytes as a path.
fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::{digits, loses_places, there};

    #[test]
    fn the_start_of_slurmctld_is_told_from_another_where_that_matters() {
        assert_eq!(digits("2026-11-25T22:47:12"), 20_261_125_224_712);
        assert_eq!(digits(""), 0);
        for (version, loses) in
            [("22.05.8", true), ("23.11.1", true), ("24.05.0", false), ("25.11.0-0rc1", false)]
        {
            assert_eq!(loses_places(version), loses, "{version}");
        }
    }

    #[test]
    fn nodes_that_slurm_takes_for_gone_are_not_there() {
        let lines =
            "c1 idle\nc1 idle\nc2 down*\nc3 mix\nc4 idle~\nc5 drain\nc6 alloc*\nc7 down\nc8 unk*\nc9 comp\n";
        let nodes: Vec<String> = there(lines).iter().map(ToString::to_string).collect();
        assert_eq!(nodes, ["c1", "c3", "c5", "c9"]);
    }
}
