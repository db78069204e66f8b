//! Building a RAM disk step by step, and destroying it.

use std::net::IpAddr;
use std::path::PathBuf;

use ondeck_core::Layout;
use serde::{Deserialize, Serialize};

/// A step of building a RAM disk on one node. A step that was done can be asked for again; one that failed is undone with
/// the whole RAM disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Step {
    /// Reserve the share of this server, and ports.
    Allocate,
    /// Make the devices.
    Prepare,
    /// Start what a phase of the engine starts.
    Start(usize),
    /// Wait until it serves.
    Serve(usize),
    /// Mount the whole filesystem where only root can reach it.
    Mount,
    /// Make the owner's directory, and write the check file.
    Check,
    /// Read the check file, and show the owner's directory at a path.
    Show {
        path: PathBuf,
        /// Whether it can't be written there.
        read_only: bool,
    },
    /// Take it away from a path.
    Hide { path: PathBuf },
    /// Open, as the RAM disk's owner, the directories that will be mounted over, and hold them. Nothing changes for
    /// anybody.
    #[serde(rename = "aim")]
    OpenTargets {
        /// All that this node will show the RAM disk over.
        #[serde(rename = "covers")]
        overmounts: Vec<Overmount>,
    },
    /// Mount the RAM disk over all targets, by the descriptors that are held: all or none.
    #[serde(rename = "cover")]
    Overmount,
    /// Refuse if the processes of a job could not be stopped on this node, whatever they do.
    CouldFreeze {
        /// The job's number.
        job: u32,
    },
    /// Stop all processes of a job of the RAM disk's owner on this node, for at most a second; refused if one of them holds
    /// something of a target, or if not all can be stopped. They go on if nothing more is said.
    Freeze {
        /// The job's number.
        job: u32,
    },
    /// Mount the RAM disk over all targets, while the job is stopped; refused if not all of its processes see it.
    /// It is taken away when the job goes on, unless it was said to be kept.
    #[serde(rename = "cover_frozen")]
    OvermountFrozen,
    /// From now on what was mounted stays when the job goes on.
    Keep,
    /// Let the job go on.
    Thaw,
    /// Ask whether files are open in an overmount: then it is refused with
    /// [`RefusalCode::Busy`](super::RefusalCode::Busy). Nothing changes.
    Busy,
    /// Take the RAM disk away from all directories that it is mounted over, the innermost first: all or none.
    #[serde(rename = "uncover")]
    RemoveOvermounts {
        /// Also while files are open, whose programs keep them. Otherwise that is refused with
        /// [`RefusalCode::Busy`](super::RefusalCode::Busy).
        force: bool,
    },
    /// Unmount the whole filesystem again. A node that is no server forgets the RAM disk, and may mount it again.
    Unmount,
    /// All is done here; from now on it lives until it is destroyed. Said again: on all of its nodes. A node that is not
    /// told so, because its builder was killed in between, asks the others when the lease is over.
    Commit,
}

impl Step {
    /// Its name, as on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Step::Allocate => "allocate",
            Step::Prepare => "prepare",
            Step::Start(_) => "start",
            Step::Serve(_) => "serve",
            Step::Mount => "mount",
            Step::Check => "check",
            Step::Show { .. } => "show",
            Step::Hide { .. } => "hide",
            Step::OpenTargets { .. } => "aim",
            Step::Overmount => "cover",
            Step::CouldFreeze { .. } => "could_freeze",
            Step::Freeze { .. } => "freeze",
            Step::OvermountFrozen => "cover_frozen",
            Step::Keep => "keep",
            Step::Thaw => "thaw",
            Step::Busy => "busy",
            Step::RemoveOvermounts { .. } => "uncover",
            Step::Unmount => "unmount",
            Step::Commit => "commit",
        }
    }
}

/// A directory that a job uses, and what is shown there instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overmount {
    /// The directory as the job knows it; there may be symlinks on the way.
    pub path: PathBuf,
    /// The directory of the RAM disk, below the owner's: a plain name.
    pub from: String,
    /// Whether it can't be written there.
    pub read_only: bool,
}

/// One step, to be done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepRequest {
    /// The step that is to be taken.
    pub step: Step,
    /// The RAM disk. Addresses and ports are known after `Allocate`.
    pub layout: Layout,
    /// How long the step may take.
    pub deadline_ms: u64,
    /// If the RAM disk is not complete after this time, the node removes what it has of it by itself.
    pub lease_ms: u64,
}

/// A step that was done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepDone {
    /// How long it took on the node.
    pub seconds: f64,
    /// After `Allocate`: where the server will listen.
    pub allocated: Option<Allocated>,
    /// After `Thaw`: for how many milliseconds the job was stopped here.
    #[serde(default)]
    pub stopped_ms: Option<u64>,
}

/// What was reserved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Allocated {
    /// The node's address on the storage network.
    pub address: IpAddr,
    /// The TCP ports that are reserved for its server, as many as the engine asks for.
    pub ports: Vec<u16>,
}

/// What destroying took.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Destroyed {
    /// The steps with their seconds, in order. None if there was nothing.
    pub steps: Vec<(String, f64)>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_called_on_the_wire_as_its_name_says() {
        let overmounts = vec![Overmount { path: "/data/in".into(), from: "0".to_owned(), read_only: true }];
        let (path, job) = (PathBuf::from("/mnt"), 42);
        for step in [
            Step::Allocate,
            Step::Prepare,
            Step::Start(0),
            Step::Serve(0),
            Step::Mount,
            Step::Check,
            Step::Show { path: path.clone(), read_only: false },
            Step::Hide { path },
            Step::OpenTargets { overmounts },
            Step::Overmount,
            Step::CouldFreeze { job },
            Step::Freeze { job },
            Step::OvermountFrozen,
            Step::Keep,
            Step::Thaw,
            Step::Busy,
            Step::RemoveOvermounts { force: true },
            Step::Unmount,
            Step::Commit,
        ] {
            let wire = serde_json::to_value(&step).unwrap();
            let name = match &wire {
                serde_json::Value::Object(fields) => fields.keys().next().unwrap().as_str(),
                wire => wire.as_str().unwrap(),
            };
            assert_eq!(name, step.name());
            assert!(name != "aim" || wire["aim"]["covers"][0]["from"] == "0", "{wire}");
        }
    }
}
