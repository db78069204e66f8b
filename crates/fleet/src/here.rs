//! What this machine's own agent is asked.

use std::time::Duration;

use ondeck_api::wire::{PathView, VERSION, Witness};
use ondeck_api::{CallError, Endpoint};
use ondeck_core::RamDiskId;

use crate::{Fleet, LOOK, has_nothing};

impl Fleet {
    /// Takes a RAM disk away from all directories of this machine where it is shown; what it holds stays. Only root of the
    /// machine may do this, without a scheduler. A node that has nothing of it is fine.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn hide_here(&self, id: &RamDiskId, limit: Duration) -> Result<(), CallError> {
        let (endpoint, path) =
            (Endpoint::Socket(self.socket.clone()), format!("/{VERSION}/ramdisks/{id}/shown"));
        match self.client.call(&endpoint, "DELETE", &path, None::<&()>, None, limit).await {
            Err(error) if has_nothing(&error) => Ok(()),
            done => done,
        }
    }

    /// The job of a RAM disk begins on this machine without having been told what it sees: it keeps what all of its nodes
    /// show, which is told, and anything else is taken away here. Only root of the machine may do this.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn begins_here(&self, id: &RamDiskId, limit: Duration) -> Result<bool, CallError> {
        let (endpoint, path) =
            (Endpoint::Socket(self.socket.clone()), format!("/{VERSION}/ramdisks/{id}/begins"));
        self.client.call(&endpoint, "POST", &path, None::<&()>, None, limit).await
    }

    /// What is wrong with the RAM disk at a path of this machine, if there is one: asked of this machine's agent.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn view(&self, path: &std::path::Path) -> Result<PathView, CallError> {
        use std::os::unix::ffi::OsStrExt;
        let path: String = path.as_os_str().as_bytes().iter().map(|byte| format!("%{byte:02x}")).collect();
        let endpoint = Endpoint::Socket(self.socket.clone());
        self.client
            .call(&endpoint, "GET", &format!("/{VERSION}/views?path={path}"), None::<&()>, None, LOOK)
            .await
    }

    /// Whether a RAM disk is whole on this machine.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn witness(&self, id: &RamDiskId) -> Result<Witness, CallError> {
        let endpoint = Endpoint::Socket(self.socket.clone());
        let path = format!("/{VERSION}/ramdisks/{id}/witness");
        self.client.call(&endpoint, "GET", &path, None::<&()>, None, LOOK).await
    }
}
