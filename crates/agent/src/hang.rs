//! Work on paths that may hang in the kernel, or that root may not be allowed to reach.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Instant;

use ondeck_core::Owner;
use ondeck_ramdisk::EngineError;
use ondeck_transfer::credentials::User;

/// Does work that may hang in the kernel on a thread of its own, and waits no longer than `until`. If it is not done by
/// then the thread is left to itself: it ends when the mount that it hangs in is cut off.
pub(crate) fn within<T: Send + 'static>(
    until: Instant,
    what: &str,
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let began = Instant::now();
    let (sender, receiver) = sync_channel(1);
    let thread = std::thread::Builder::new().spawn(move || {
        // Nobody may be waiting any more.
        let _ = sender.send(work());
    });
    if let Err(error) = thread {
        return Err(EngineError::Check(format!("{what}: no thread for it: {error}")));
    }
    match receiver.recv_timeout(until.saturating_duration_since(began)) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => {
            Err(EngineError::Deadline { what: what.to_owned(), waited: began.elapsed() })
        }
        Err(RecvTimeoutError::Disconnected) => {
            Err(EngineError::Check(format!("{what}: the thread that did it panicked")))
        }
    }
}

/// Does something with a path that root may not be able to reach: root-squashed filesystems take it for nobody.
pub(crate) fn as_root_or_owner<T: Send>(
    owner: Owner,
    work: impl Fn() -> std::io::Result<T> + Sync,
) -> std::io::Result<T> {
    match work() {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            user_of(owner).on_a_thread(&work).map_err(std::io::Error::other)?
        }
        done => done,
    }
}

/// A user with all groups. One that the name service does not know has no further groups.
pub(crate) fn user_of(owner: Owner) -> User {
    let mut user = User::look_up(&owner.uid.to_string()).unwrap_or_else(|error| {
        tracing::warn!(%error, "goes on without the user's groups");
        User {
            name: owner.uid.to_string(),
            uid: owner.uid,
            gid: owner.gid,
            groups: Vec::new(),
            home: PathBuf::from("/"),
        }
    });
    (user.uid, user.gid) = (owner.uid, owner.gid);
    if !user.groups.contains(&owner.gid) {
        user.groups.push(owner.gid);
    }
    user
}
