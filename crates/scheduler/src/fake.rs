//! A workload manager whose queue a test writes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use ondeck_core::{Incarnation, JobId, NodeName, QueuedJob, Standing};
use ondeck_wlm::{Controller, HeldArray, JobDetails, Queue, WlmError, WorkloadManager};

use crate::samples::queued;

/// Jobs and their scripts, as a test has them; it says what becomes of each.
#[derive(Default)]
pub(crate) struct Fake {
    jobs: Mutex<BTreeMap<JobId, (QueuedJob, String)>>,
    silent: AtomicBool,
}

impl Fake {
    fn jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, (QueuedJob, String)>> {
        self.jobs.lock().unwrap()
    }

    /// A job with a script comes to the end of the queue.
    pub fn submit(&self, script: &str) -> Incarnation {
        let mut jobs = self.jobs();
        let number = jobs.len() as u32 + 1;
        let id = Incarnation { job: JobId(number), submitted: 1_700_000_000, restarts: 0 };
        let job = QueuedJob {
            standing: Standing::Waiting,
            submitted: id.submitted,
            priority: u64::from(u32::MAX - number),
            ..queued(id)
        };
        jobs.insert(id.job, (job, script.to_owned()));
        id
    }

    /// What becomes of a job.
    pub fn becomes(&self, id: Incarnation, standing: Standing) {
        let mut jobs = self.jobs();
        let (job, _) = jobs.get_mut(&id.job).unwrap();
        job.standing = standing;
        if standing == Standing::Running {
            (job.nodes, job.start) = (vec!["c1".parse().unwrap()], Some(id.submitted));
        }
    }

    /// Whether it answers from now on.
    pub fn answers(&self, answers: bool) {
        self.silent.store(!answers, Ordering::SeqCst);
    }

    fn said<T>(&self, answer: T) -> Result<T, WlmError> {
        if self.silent.load(Ordering::SeqCst) {
            return Err(WlmError::Unavailable { message: "it is switched off".into() });
        }
        Ok(answer)
    }

    fn of(&self, job: JobId) -> Result<(QueuedJob, String), WlmError> {
        let found = self.jobs().get(&job).cloned();
        self.said(())?;
        found.ok_or(WlmError::NoSuchJob(job))
    }
}

#[async_trait]
impl WorkloadManager for Fake {
    async fn nodes(&self) -> Result<Vec<NodeName>, WlmError> {
        self.said(vec!["c1".parse().unwrap()])
    }

    async fn queue(&self) -> Result<Queue, WlmError> {
        let jobs = self.jobs().values().map(|(job, _)| job.clone()).collect();
        self.said(Queue { jobs, ..Queue::default() })
    }

    async fn split(&self, _: HeldArray) -> Result<(), WlmError> {
        self.said(())
    }

    async fn script(&self, job: JobId) -> Result<Vec<u8>, WlmError> {
        Ok(self.of(job)?.1.into_bytes())
    }

    async fn work_dir(&self, job: JobId) -> Result<PathBuf, WlmError> {
        self.of(job).map(|_| "/".into())
    }

    async fn details(&self, job: JobId) -> Result<JobDetails, WlmError> {
        self.of(job)?;
        Ok(JobDetails {
            work_dir: "/".into(),
            std_out: None,
            std_err: None,
            comment: String::new(),
            admin_comment: String::new(),
            exit_code: None,
            state: String::new(),
            tasks: None,
            name: String::new(),
            array: None,
        })
    }

    async fn set_comment(&self, job: JobId, _: &str) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn hold(&self, job: JobId) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn hold_saying(&self, job: JobId, _: &str) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn release(&self, job: JobId) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn set_priority(&self, job: JobId, _: u32) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn reset_priority(&self, job: JobId) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn set_qos(&self, job: JobId, _: &str) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn begin_after(&self, job: JobId, _: Duration, _: &str) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn end_stage_out(&self, job: JobId) -> Result<(), WlmError> {
        self.of(job).map(drop)
    }

    async fn controller(&self) -> Result<Controller, WlmError> {
        self.said(Controller { uid: 64030, hosts: vec!["localhost".into()], started: 1 })
    }

    async fn cluster(&self) -> Result<String, WlmError> {
        self.said("test".into())
    }

    async fn ping(&self) -> Result<(), WlmError> {
        self.said(())
    }
}
