//! Requests and answers of an agent, version 1.
//!
//! | method and path | does | who |
//! |---|---|---|
//! | `GET /v1/node` | capacity, memory, engines: [`NodeReport`] | anybody |
//! | `GET /v1/ramdisks` | the RAM disks of this node: [`LocalReport`] | administrators; owners see their own |
//! | `GET /v1/ramdisks/NAME@EPOCH` | one of them | the same |
//! | `POST /v1/ramdisks/NAME@EPOCH/steps` | one [`Step`] of building it | administrators |
//! | `POST /v1/ramdisks/NAME@EPOCH/guard` | from now on it may hold results: it is not destroyed before they are released | administrators |
//! | `POST /v1/ramdisks/NAME@EPOCH/release` | its results are on disk, or given up: [`Release`] | administrators |
//! | `DELETE /v1/ramdisks/NAME@EPOCH` | destroys what this node has of it: [`Destroyed`]; refused while it may hold results | administrators |
//! | `POST /v1/ramdisks/NAME@EPOCH/begins` | its job begins here untold: whether it keeps what is shown; what not all nodes show is taken away | root of this machine |
//! | `DELETE /v1/ramdisks/NAME@EPOCH/shown` | takes it away from all directories of this node; its data stays | root of this machine |
//! | `POST /v1/authority` | a scheduler's [`Claim`] to be obeyed: [`Obeyed`] | administrators |
//! | `GET /v1/ramdisks/NAME@EPOCH/has` | whether this node has anything of it: [`Presence`] | root of any node, administrators |
//! | `GET /v1/ramdisks/NAME@EPOCH/witness` | whether it is whole here: [`Witness`] | administrators, the owner |
//! | `GET /v1/ramdisks/NAME@EPOCH/names?slots=N,N` | the files that this node has of these directories of it: [`Inventory`] | administrators |
//! | `POST /v1/ramdisks/NAME@EPOCH/tasks/TASK` | starts a task: [`TaskRequest`] to [`TaskReport`] | administrators |
//! | `GET /v1/ramdisks/NAME@EPOCH/tasks/TASK?wait=MS` | how it is, when it has ended or after MS | administrators |
//! | `DELETE /v1/ramdisks/NAME@EPOCH/tasks/TASK` | ends it: [`TaskReport`] | administrators |
//! | `DELETE /v1/ramdisks/NAME@EPOCH/tasks?beginning=TEXT` | ends all tasks whose names begin so | administrators |
//! | `POST /v1/layouts/JOB` | gives directories of a job their layouts, as its user: [`StripingOrder`] to [`StripingReport`] | administrators |
//! | `POST /v1/layouts/JOB/restore` | gives them back what they had before: [`RestoreOrder`] to [`StripingReport`] | administrators |
//! | `POST /v1/layouts/JOB/count` | counts what the job has left there, as its user: [`CountOrder`] to [`StripingReport`] | administrators |
//! | `POST /v1/layouts/JOB/watch` | watches who writes there: [`WatchOrder`] | administrators |
//! | `POST /v1/layouts/JOB/seen` | ends that, and tells what was seen: [`KindsToTell`] to [`KindsSeen`] | administrators |
//! | `GET /v1/views?path=P` | the RAM disk that is shown at a path, and whether it is whole: [`PathView`] | owners |
//!
//! An agent obeys one scheduler. Once a scheduler's claim was accepted, orders about the RAM disks of jobs are obeyed only
//! with its [`Authority`]. An order without one is a person's.

mod authority;
mod node;
mod refusal;
mod report;
mod step;
mod striping;
mod task;

pub use authority::{Authority, Claim, Obeyed, Release};
pub use node::{
    DeviceReport, HookKind, HookNote, HookScheduler, HookSeen, HookSlurm, MemoryReport, NodeReport,
    NodeSettings,
};
pub use refusal::{Refusal, RefusalCode};
pub use report::{LocalReport, NOT_MOUNTED, PathView, Presence, ProcessReport, Witness};
pub use step::{Allocated, Destroyed, Overmount, Step, StepDone, StepRequest};
pub use striping::{
    CountOrder, DirectoryToRestore, DirectoryToStripe, FormerLayout, FormerValue, KindToTell, KindsSeen,
    KindsToTell, RestoreOrder, StripingOrder, StripingOutcome, StripingReport, StripingResult, StripingWork,
    WatchOrder,
};
pub use task::{
    Inventory, JobDirectory, Share, TaskReport, TaskRequest, TaskState, TaskWork, Unit, is_plain,
};

/// The version in every path.
pub const VERSION: &str = "v1";

/// The most bytes that a request or an answer may have.
pub const MOST_BYTES: usize = 4 << 20;
