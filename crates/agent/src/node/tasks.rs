//! The tasks of a RAM disk, from their request to their end.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::wire::{Refusal, RefusalCode, TaskReport, TaskRequest, is_plain};
use ondeck_core::{Bytes, EngineKind, RamDiskId};

use super::{Node, failed, refusal};
use crate::task::{Task, TaskOrder};

/// How long mounting may take for a task.
const MOUNTING: Duration = Duration::from_secs(30);

/// How long a task may take to end once it is killed; what does not end then hangs in the kernel.
const ENDING: Duration = Duration::from_secs(20);

impl Node {
    /// Starts a task of a RAM disk; one of this name that is there already is as good.
    ///
    /// # Errors
    /// [`Refusal`]: the request is malformed, the RAM disk is not here, not complete or another user's, or it can't be
    /// mounted.
    pub fn start_task(&self, id: &RamDiskId, name: &str, request: TaskRequest) -> Result<Arc<Task>, Refusal> {
        if !is_plain(name) {
            let message = format!("`{name}` is no name of a task: use letters, digits and `._-`");
            return Err(refusal(RefusalCode::Malformed, message));
        }
        request.check()?;
        let found = self.find(id)?;
        let layout = found.record().layout;
        if !found.record().complete {
            return Err(refusal(RefusalCode::Conflict, format!("{id} is not complete yet on {}", self.name)));
        }
        if layout.owner.uid != request.uid {
            let message = format!(
                "{id} is of user {}, and the task would run as user {}",
                layout.owner.uid, request.uid
            );
            return Err(refusal(RefusalCode::Forbidden, message));
        }
        let until = Instant::now() + Duration::from_millis(request.deadline_ms).min(MOUNTING);
        let salvage = request.work.is_salvage();
        // A script's pages of a RAM disk that is this machine's memory count as its own.
        let own_pages = if layout.engine == EngineKind::Tmpfs { layout.capacity() } else { Bytes::ZERO };
        let rules = self.rules();
        let order = |data: PathBuf| TaskOrder {
            ramdisk: id.clone(),
            node: self.name.clone(),
            request,
            data: Some(data),
            state: self.state.clone(),
            socket: self.socket.clone(),
            script_memory: rules.script_memory.saturating_add(own_pages),
            require_memory_group: rules.require_memory_group,
            out_of_date: ondeck_ramdisk::engine(layout.engine).out_of_date(),
        };
        if salvage {
            return found.start_salvage(name, order).map_err(|error| failed(&error));
        }
        found.start_task(name, &self.name, &rules.capacity, until, order).map_err(|error| failed(&error))
    }

    /// A task that was started.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] if it is not here.
    pub fn task(&self, id: &RamDiskId, name: &str) -> Result<Arc<Task>, Refusal> {
        self.find(id)?.tasks().find(name).ok_or_else(|| {
            refusal(RefusalCode::NotFound, format!("{id} has no task `{name}` on {}", self.name))
        })
    }

    /// Ends a task and forgets it. Returns once nothing of it is left.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] if it is not here; [`RefusalCode::Failed`] if it does not end.
    pub async fn stop_task(&self, id: &RamDiskId, name: &str) -> Result<TaskReport, Refusal> {
        let task = self.task(id, name)?;
        task.let_go();
        let report = task.wait(ENDING).await;
        if !task.has_ended() {
            let message = format!(
                "the task `{name}` of {id} on {} does not end: a process of it hangs in the kernel, probably in a \
                 filesystem that does not answer",
                self.name
            );
            return Err(refusal(RefusalCode::Failed, message));
        }
        if let Ok(found) = self.find(id) {
            found.tasks().forget(name, &task);
        }
        Ok(report)
    }

    /// Ends all tasks whose names begin so, and forgets them. Returns once nothing of them is left.
    ///
    /// # Errors
    /// [`RefusalCode::NotFound`] if the RAM disk is not here; [`RefusalCode::Failed`] if one does not end.
    pub async fn stop_tasks(&self, id: &RamDiskId, beginning: &str) -> Result<(), Refusal> {
        for name in self.find(id)?.tasks().beginning_with(beginning) {
            match self.stop_task(id, &name).await {
                Err(error) if error.code != RefusalCode::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}
