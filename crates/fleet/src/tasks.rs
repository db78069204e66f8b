//! Staging and users' scripts on the nodes of a RAM disk.

use std::time::Duration;

use ondeck_api::CallError;
use ondeck_api::wire::{TaskReport, TaskRequest, VERSION};
use ondeck_core::{NodeName, RamDiskId};

use crate::{DESTROY, Fleet, LONGEST_WAIT, LOOK, NodeFault, START_TASK, faults_of, has_nothing, on_all};

fn task_path(id: &RamDiskId, name: &str) -> String {
    format!("/{VERSION}/ramdisks/{id}/tasks/{name}")
}

impl Fleet {
    /// Starts a task of a RAM disk on a node; one of this name that is there already is as good.
    ///
    /// # Errors
    /// [`CallError`]. After one that leaves open whether it was started, this can be called again.
    pub async fn start_task(
        &self,
        node: &NodeName,
        id: &RamDiskId,
        name: &str,
        request: &TaskRequest,
    ) -> Result<TaskReport, CallError> {
        let endpoint = self.endpoint(node);
        self.client.call(&endpoint, "POST", &task_path(id, name), Some(request), None, START_TASK).await
    }

    /// How a task is: when it has ended, or after `wait`, which is at most 30 seconds.
    ///
    /// # Errors
    /// [`CallError`]; [`RefusalCode::NotFound`] if the node does not know it, as after a restart of its agent: then
    /// nothing of it is left, and it can be started again.
    pub async fn task(
        &self,
        node: &NodeName,
        id: &RamDiskId,
        name: &str,
        wait: Duration,
    ) -> Result<TaskReport, CallError> {
        let wait = wait.min(LONGEST_WAIT);
        let path = format!("{}?wait={}", task_path(id, name), wait.as_millis());
        self.client.call(&self.endpoint(node), "GET", &path, None::<&()>, None, wait + LOOK).await
    }

    /// Ends a task, which is then forgotten; returns once nothing of it is left.
    ///
    /// # Errors
    /// [`CallError`]; [`RefusalCode::NotFound`] if the node does not know it: then nothing of it is left either.
    pub async fn stop_task(
        &self,
        node: &NodeName,
        id: &RamDiskId,
        name: &str,
    ) -> Result<TaskReport, CallError> {
        let endpoint = self.endpoint(node);
        self.client.call(&endpoint, "DELETE", &task_path(id, name), None::<&()>, None, DESTROY).await
    }

    /// Ends all tasks of a RAM disk on these nodes whose names begin so; returns once nothing of them is left. A node
    /// that has nothing of the RAM disk is fine.
    pub async fn stop_tasks(&self, nodes: &[NodeName], id: &RamDiskId, beginning: &str) -> Vec<NodeFault> {
        let said = on_all(nodes.iter().map(|node| (node.clone(), node.clone())), |node| {
            let fleet = self.clone();
            let path = format!("/{VERSION}/ramdisks/{id}/tasks?beginning={beginning}");
            async move {
                let endpoint = fleet.endpoint(&node);
                fleet.client.call::<()>(&endpoint, "DELETE", &path, None::<&()>, None, DESTROY).await
            }
        });
        faults_of(said.await).into_iter().filter(|fault| !has_nothing(&fault.error)).collect()
    }
}
