//! What is known of one job.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::told::Told;
use super::{BurstBuffer, Hold, JobState, Prolog, QueuePlace, RsaState, Time};
use crate::allocation::Purpose;
use crate::{Bytes, Epoch, Incarnation, JobId, NodeName, Owner, RamDiskId, Request, WaitPolicy};

/// RSA nodes that are promised to a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Allocation {
    /// The nodes, in the order in which they were chosen.
    pub nodes: Vec<NodeName>,
    /// What each promises, the engine's own needs included.
    pub promise: Bytes,
    /// The RAM disk that is on them, or will be: every one that is built has a greater epoch.
    pub epoch: Epoch,
    /// Since when they are promised.
    #[serde(default)]
    pub since: Time,
}

/// The kinds of work that others do and report the end of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Build the RAM disk.
    Construct,
    /// Copy the input into it, and prepare the output directories.
    StageIn,
    /// Stop filling it.
    StopStageIn,
    /// Show it on all I/O nodes, or on none.
    Mount,
    /// Take it away from all of them.
    Unmount {
        /// Also if files are open.
        force: bool,
    },
    /// Bring the results home.
    StageOut,
    /// Remove it from all of its nodes, whatever state it is in.
    Destroy,
}

impl Work {
    /// A word for people.
    pub fn word(self) -> &'static str {
        match self {
            Work::Construct => "construct",
            Work::StageIn => "stage in",
            Work::StopStageIn => "stop staging in",
            Work::Mount => "mount",
            Work::Unmount { .. } => "unmount",
            Work::StageOut => "stage out",
            Work::Destroy => "destroy",
        }
    }
}

/// What was last seen of a job's output on one of its RSA nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InventorySummary {
    /// How many files.
    pub files: u64,
    /// The sum of their sizes.
    pub bytes: Bytes,
    /// When that was.
    pub seen: Time,
    /// The first names, as they are in the RAM disk: the number of the directory, then the path in it.
    pub first: Vec<String>,
}

/// Work that was ordered and is under way. Its number tells it from earlier work for the same job, whose late end is
/// ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkOrder {
    /// Its number: greater than that of every earlier one.
    pub number: u64,
    /// What is done.
    pub work: Work,
    /// When it is taken for failed.
    pub until: Time,
}

/// A job that has asked for something.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Job {
    /// Which life of which job.
    pub id: Incarnation,
    /// Whose it is.
    pub owner: Owner,
    /// The account it is charged to.
    pub account: String,
    /// What it asks for; paths are absolute.
    pub request: Request,
    /// The directory it was submitted from.
    pub work_dir: PathBuf,
    /// The heterogeneous job that it is a component of: it gets nothing.
    #[serde(default)]
    pub component_of: Option<JobId>,
    /// How many compute nodes it has or wants.
    pub compute_nodes: u32,
    /// Its compute nodes, since it runs.
    #[serde(default)]
    pub nodes: Vec<NodeName>,
    /// Those of them whose Epilogs have run: none of its processes is left there.
    #[serde(default)]
    pub ended_on: BTreeSet<NodeName>,
    /// It is ending; until when its processes and Epilogs are waited for.
    #[serde(default)]
    pub ending: Option<Time>,
    /// Whether the workload manager has forgotten that it started: what the queue shows of it since is of a later run.
    #[serde(default)]
    pub forgotten: bool,
    /// Its quality of service before anything was done about it.
    #[serde(default)]
    pub qos: String,
    /// Its priority in the queue.
    pub priority: u64,
    /// When it was submitted, in seconds since 1970, as it was first seen.
    pub submitted: u64,
    /// All times of submission that the queue has shown for this life: a requeue changes it.
    #[serde(default)]
    pub noted: BTreeSet<u64>,
    /// What the workload manager does with it.
    pub job_state: JobState,
    /// What Ondeck does for it.
    pub rsa_state: RsaState,
    /// Since when it is in that state.
    pub since: Time,
    /// What its RAM disk is for, or will be.
    pub purpose: Purpose,
    /// What is promised to it.
    pub allocation: Option<Allocation>,
    /// Where it is shown: the job's nodes, or what the site's mapping makes of them.
    pub io_nodes: Vec<NodeName>,
    /// Whether its RAM disk may hold results. Set before it is mounted to be written to; taken back when they are on
    /// disk, or were abandoned by name.
    pub results: bool,
    /// Whether somebody abandoned results of it.
    pub abandoned: bool,
    /// Whether its RAM disk was shown on some of its nodes only, for a moment: what is in it is merged with what is on
    /// disk, and nothing else is done with it.
    #[serde(default, rename = "torn")]
    pub partially_mounted: bool,
    /// Whether its RAM disk was all but full while the job could write to it.
    #[serde(default)]
    pub ran_full: bool,
    /// The work under way.
    #[serde(rename = "task")]
    pub under_way: Option<WorkOrder>,
    /// How often building, filling or mounting failed.
    pub failures: u32,
    /// Whether the allocation is the one that failed last.
    pub failed_here: bool,
    /// Whether there is no point in trying again.
    pub hopeless: bool,
    /// Nodes that failed it.
    pub avoid: Vec<NodeName>,
    /// Whether a server of its RAM disk is lost.
    pub broken: bool,
    /// Which, and how.
    #[serde(default)]
    pub broken_why: String,
    /// The RSA nodes whose part of it was lost.
    #[serde(default)]
    pub lost_on: BTreeSet<NodeName>,
    /// What its RSA nodes had of the results, when they were last asked.
    #[serde(default, rename = "parts")]
    pub inventories: BTreeMap<NodeName, InventorySummary>,
    /// Whether what is left of its results is to be saved, and the rest given up.
    #[serde(default)]
    pub salvage: bool,
    /// Whether mounting it failed, so that some nodes may show it.
    pub mount_failed: bool,
    /// How often its output could not be covered while it ran.
    #[serde(default)]
    pub late: u32,
    /// How often unmounting failed in a row.
    pub unmounts: u32,
    /// How often staging out failed in a row.
    pub stage_outs: u32,
    /// Until when nothing is tried.
    pub not_before: Option<Time>,
    /// Whether what was held is to be tried again.
    pub retry_now: bool,
    /// Whether its Prologs are expected, wait or are over.
    #[serde(flatten)]
    pub prolog: Prolog,
    /// When it was first seen running.
    pub started: Option<Time>,
    /// When the input is given up for the output.
    pub switch_at: Option<Time>,
    /// Whether that time has come.
    pub delay_over: bool,
    /// Since when the queue has said otherwise than the state here.
    pub doubted: Option<Time>,
    /// Its place in the queue.
    #[serde(flatten)]
    pub place: QueuePlace,
    /// Whether it is held at the workload manager until its input is there.
    #[serde(flatten)]
    pub hold: Hold,
    /// How far the workload manager has come with its burst buffer, if it has one.
    #[serde(default)]
    pub burst_buffer: BurstBuffer,
    /// Whether a process of the workload manager waits for what is answered about its input.
    #[serde(default)]
    pub is_asked_for: bool,
    /// Whether RSA nodes are not for it yet, or not any more: it has a burst buffer, so it is known before it is next.
    #[serde(default)]
    pub put_off: bool,
    /// Whether it had started before the journal began: an RSA node that has not answered yet may have its RAM disk.
    #[serde(default)]
    pub older: bool,
    /// Whether its RAM disk was found without the journal knowing of it, and may be shown somewhere still.
    #[serde(default)]
    pub unsure: bool,
    /// Whether the queue shows then that something of the job may run.
    #[serde(default)]
    pub still_runs: bool,
    /// When it was first staged again, because another job wrote where its input is.
    #[serde(default)]
    pub again_since: Option<Time>,
    /// Whether it is READY with input that another job writes anew: it is staged again once the queue shows that it is held. Until
    /// then the workload manager may start it, and it uses its RAM disk as it is.
    #[serde(default)]
    pub outdated: bool,
    /// Since when there have been too few free RSA nodes for it.
    #[serde(default)]
    pub lacking: Option<Time>,
    /// The latest that its user should know, in words; empty if nothing.
    pub message: String,
    /// What that was, as far as something depends on it.
    #[serde(default)]
    pub told: Told,
    /// Why it waits, in words, if it does; not a fault.
    pub waits_for: String,
}

impl Job {
    /// Whether it has input.
    pub fn wants_in(&self) -> bool {
        !self.request.data_in.is_empty()
    }

    /// Whether it has output.
    pub fn wants_out(&self) -> bool {
        !self.request.data_out.is_empty()
    }

    /// What its RAM disk is best for while it has not started.
    pub fn best_purpose(&self) -> Purpose {
        match (self.wants_in(), self.wants_out()) {
            (false, _) => Purpose::Output,
            (true, false) => Purpose::Input,
            // A delay asks for the switch; a directory that is both can't be switched.
            (true, true) if self.request.out_size.is_some() && self.request.delay.is_none() => Purpose::Both,
            (true, true) if has_a_directory_for_both(&self.request) => Purpose::Both,
            (true, true) => Purpose::Input,
        }
    }

    /// Whether another attempt is allowed.
    pub fn may_try(&self) -> bool {
        !self.hopeless && self.component_of.is_none()
    }

    /// Whether it may start without its input: the workload manager is told so, and what is prepared for it may go to others.
    pub fn may_start_on_disk(&self) -> bool {
        self.request.wait_policy() != WaitPolicy::Hold
    }

    /// Whether its start waits for its RAM disk to be shown: nothing of it runs.
    pub fn waits_to_start(&self) -> bool {
        self.prolog == Prolog::Waiting || self.burst_buffer == BurstBuffer::PreRun
    }

    /// What the workload manager does with it, as far as RSA nodes are concerned: to be put off is to be demoted, and known.
    pub(super) fn standing(&self) -> JobState {
        if self.put_off && self.job_state == JobState::Ondeck { JobState::Demoted } else { self.job_state }
    }

    /// Whether a time to wait has not passed.
    pub fn backing_off(&self) -> bool {
        self.not_before.is_some()
    }

    /// The RAM disk that is on its nodes, or will be.
    pub fn ramdisk(&self) -> Option<RamDiskId> {
        self.allocation.as_ref().map(|found| RamDiskId { name: self.id.ramdisk(), epoch: found.epoch })
    }

    /// Its directories for a purpose, each once: the path, whether it is input, whether it is output. The position is
    /// the name of the directory in the RAM disk.
    pub fn directories(&self, purpose: Purpose) -> Vec<(PathBuf, bool, bool)> {
        directories(&self.request, purpose)
    }

    /// The real paths of files of its RAM disk, by their names there.
    pub fn real_paths<'a>(&self, names: impl IntoIterator<Item = &'a String>) -> Vec<String> {
        let directories = self.directories(self.purpose);
        names.into_iter().filter_map(|name| real_path(&directories, name)).collect()
    }
}

/// The real path of a file of a RAM disk that has these directories.
///
/// ```
/// # use ondeck_core::schedule::real_path;
/// let directories = [("/data/in".into(), true, false), ("/data/out".into(), false, true)];
/// assert_eq!(real_path(&directories, "1/a/b").unwrap(), "/data/out/a/b");
/// assert_eq!(real_path(&directories, "2/a"), None);
/// ```
pub fn real_path(directories: &[(PathBuf, bool, bool)], name: &str) -> Option<String> {
    let (number, rest) = name.split_once('/')?;
    let (path, _, _) = directories.get(number.parse::<usize>().ok()?)?;
    Some(path.join(rest).display().to_string())
}

/// Whether a directory is input and output: such a one can't be switched.
pub(super) fn has_a_directory_for_both(request: &Request) -> bool {
    let outputs: BTreeSet<&PathBuf> = request.data_out.iter().collect();
    request.data_in.iter().any(|path| outputs.contains(path))
}

fn directories(request: &Request, purpose: Purpose) -> Vec<(PathBuf, bool, bool)> {
    let inputs: &[PathBuf] = if purpose == Purpose::Output { &[] } else { &request.data_in };
    let outputs: &[PathBuf] = if purpose == Purpose::Input { &[] } else { &request.data_out };
    let mut found: Vec<(PathBuf, bool, bool)> = Vec::new();
    let mut places: BTreeMap<&Path, usize> = BTreeMap::new();
    for (path, input) in
        inputs.iter().map(|path| (path, true)).chain(outputs.iter().map(|path| (path, false)))
    {
        let place = *places.entry(path).or_insert(found.len());
        match found.get_mut(place) {
            Some(known) => (known.1, known.2) = (known.1 || input, known.2 || !input),
            None => found.push((path.clone(), input, !input)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(data_in: &[&str], data_out: &[&str]) -> Request {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect();
        Request { data_in: paths(data_in), data_out: paths(data_out), ..Request::default() }
    }

    #[test]
    fn directories_keep_their_order_and_are_there_once() {
        let request = request(&["/z", "/a", "/z"], &["/m", "/a", "/m"]);
        let found = |purpose| {
            let found = directories(&request, purpose).into_iter();
            found.map(|(path, input, output)| (path.display().to_string(), input, output)).collect::<Vec<_>>()
        };
        let of = |path: &str, input, output| (path.to_owned(), input, output);
        assert_eq!(found(Purpose::Input), [of("/z", true, false), of("/a", true, false)]);
        assert_eq!(found(Purpose::Output), [of("/m", false, true), of("/a", false, true)]);
        assert_eq!(
            found(Purpose::Both),
            [of("/z", true, false), of("/a", true, true), of("/m", false, true)]
        );
        assert!(has_a_directory_for_both(&request));
    }

    #[test]
    fn many_directories_are_looked_at_once() {
        let names: Vec<String> = (0..50_000).map(|number| format!("/a/rather/long/path/{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let request = request(&names, &names[..49_999]);
        let begin = std::time::Instant::now();
        assert_eq!(directories(&request, Purpose::Both).len(), 50_000);
        assert!(has_a_directory_for_both(&request));
        assert!(begin.elapsed() < std::time::Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}
