//! Layouts of jobs' directories on disk, by the agent of one of the job's nodes.

use std::time::Duration;

use ondeck_api::CallError;
use ondeck_api::wire::{
    CountOrder, KindsSeen, KindsToTell, RestoreOrder, StripingOrder, StripingReport, VERSION, WatchOrder,
};
use ondeck_core::{Incarnation, NodeName};

use crate::{ANSWER, Fleet};

impl Fleet {
    /// Has directories of a job given layouts; it may be ordered again.
    ///
    /// # Errors
    /// [`CallError`]. After one that leaves open what was done, [`Fleet::restore_layouts`] finds it.
    pub async fn stripe(
        &self,
        node: &NodeName,
        job: Incarnation,
        order: &StripingOrder,
    ) -> Result<StripingReport, CallError> {
        let path = format!("/{VERSION}/layouts/{}", job.key());
        let limit = Duration::from_millis(order.deadline_ms) + ANSWER;
        self.client.call(&self.endpoint(node), "POST", &path, Some(order), None, limit).await
    }

    /// Has directories of a job given back what they had before; it may be ordered again.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn restore_layouts(
        &self,
        node: &NodeName,
        job: Incarnation,
        order: &RestoreOrder,
    ) -> Result<StripingReport, CallError> {
        let path = format!("/{VERSION}/layouts/{}/restore", job.key());
        let limit = Duration::from_millis(order.deadline_ms) + ANSWER;
        self.client.call(&self.endpoint(node), "POST", &path, Some(order), None, limit).await
    }

    /// Has what a job has left in directories counted.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn count_files(
        &self,
        node: &NodeName,
        job: Incarnation,
        order: &CountOrder,
    ) -> Result<StripingReport, CallError> {
        let path = format!("/{VERSION}/layouts/{}/count", job.key());
        let limit = Duration::from_millis(order.deadline_ms) + ANSWER;
        self.client.call(&self.endpoint(node), "POST", &path, Some(order), None, limit).await
    }

    /// Has a node watch who writes to a job's directories.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn watch_writers(
        &self,
        node: &NodeName,
        job: Incarnation,
        order: &WatchOrder,
    ) -> Result<(), CallError> {
        let path = format!("/{VERSION}/layouts/{}/watch", job.key());
        let limit = Duration::from_millis(order.deadline_ms) + ANSWER;
        self.client.call(&self.endpoint(node), "POST", &path, Some(order), None, limit).await
    }

    /// Has a node end that, and tell what it has seen.
    ///
    /// # Errors
    /// [`CallError`]; also if it has not watched, or not all of the time.
    pub async fn writers_seen(
        &self,
        node: &NodeName,
        job: Incarnation,
        question: &KindsToTell,
    ) -> Result<KindsSeen, CallError> {
        let path = format!("/{VERSION}/layouts/{}/seen", job.key());
        self.client.call(&self.endpoint(node), "POST", &path, Some(question), None, ANSWER).await
    }
}
