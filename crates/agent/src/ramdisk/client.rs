//! This node's client of the RAM disk: mounted, watched, taken away, mounted anew for a task.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ondeck_api::wire::Step;
use ondeck_core::NodeName;
use ondeck_ramdisk::engine::{CLIENT, DATA};
use ondeck_ramdisk::{Build, EngineError, RuntimeDir, engine, mounts};

use super::overmount_policy::OvermountPolicy;
use super::{RamDisk, lock, needs_mount, needs_processes};
use crate::capacity::Capacity;
use crate::hang::within;
use crate::task::{Task, TaskOrder};
use crate::unmount::ORDERLY;

/// A second mount of the filesystem, read-only.
pub(super) const READ_ONLY: &str = "client-read-only";

impl RamDisk {
    /// Starts a task, with the client mounted here if it is not yet. One of this name that is there already is as good.
    ///
    /// # Errors
    /// If it can't be mounted, or the task can't be started.
    pub fn start_task(
        &self,
        name: &str,
        node: &NodeName,
        capacity: &Capacity,
        until: Instant,
        order: impl FnOnce(PathBuf) -> TaskOrder,
    ) -> Result<Arc<Task>, EngineError> {
        if let Some(found) = self.tasks.find(name) {
            return Ok(found);
        }
        let mount = || self.step(&Step::Mount, node, capacity, &OvermountPolicy::default(), until);
        // Mounting the client mounts it over nothing.
        if let Some(reason) = self.take_lost_client_away(node, until)? {
            if let Err(error) = mount() {
                // That is no fault of this node's: more than its client was lost.
                *lock(&self.cut) = Some(reason.clone());
                let message = format!("{node}: {reason}, and can't be mounted anew: {error}");
                let fail = || Ok(Task::failed(name, &message));
                return self.tasks.find_or_start(name, &self.runtime_dir, fail);
            }
            tracing::warn!(ramdisk = %self.id(), reason, "the client was mounted anew");
        } else if !self.is_mounted()? {
            mount()?;
        }
        let has_filesystem = needs_mount(&self.record().layout);
        let quiet = self.quiet_for();
        self.tasks.find_or_start(name, &self.runtime_dir, || {
            if has_filesystem {
                let mut order = order(self.runtime_dir.path(CLIENT).join(DATA));
                let unchanged = Duration::from_millis(order.request.unchanged_ms);
                order.out_of_date = order.out_of_date.saturating_sub(quiet.max(unchanged));
                Task::start(name, &self.runtime_dir, &order)
            } else {
                Ok(Task::pretended(name))
            }
        })
    }

    /// For how long nobody has looked at the data through this node's client, so that it remembers nothing of it.
    fn quiet_for(&self) -> Duration {
        let record = self.record();
        if !record.overmounts.is_empty() || !record.shown.is_empty() || self.tasks.is_any_running() {
            return Duration::ZERO;
        }
        let last = self.tasks.quiet_since().max(Some(self.began)).max(*lock(&self.overmounts_removed));
        last.map_or(Duration::ZERO, |last| last.elapsed())
    }

    pub(super) fn mount(&self, build: &Build) -> Result<(), EngineError> {
        let at = self.runtime_dir.subdirectory(CLIENT)?;
        if !self.mounts_at(&at)?.is_empty() {
            return Ok(());
        }
        let engine = engine(build.layout.engine);
        // The end of an earlier client is no fault of the next one.
        self.runtime_dir.forget_ended("client");
        // Without a view of its servers nobody could tell later whether the client has lost a connection.
        let view = match engine.mount(build, &at).and_then(|()| engine.view(build)) {
            Ok(view) => view,
            Err(error) => {
                // It may be mounted all the same, and show a part of the files.
                if let Err(left) = take_client_away(&self.runtime_dir) {
                    tracing::error!(ramdisk = %self.id(), error = %left, "can't take away a client that is not whole");
                }
                return Err(error);
            }
        };
        self.note(|record| record.first_view = Some(view))?;
        // What befell an earlier client is nothing to this one.
        self.missed.store(0, Ordering::Relaxed);
        *lock(&self.cut) = None;
        Ok(())
    }

    pub(super) fn is_mounted(&self) -> Result<bool, EngineError> {
        Ok(!self.mounts_at(&self.runtime_dir.path(CLIENT))?.is_empty())
    }

    /// Takes this node's client away if it has died, was cut off, or no longer has the connections that it began with:
    /// nothing can be copied from such a one any more, and the data may be intact. Gives the reason if it did. A client
    /// that anybody looks at stays: they must not see other files than before, and be told nothing.
    fn take_lost_client_away(&self, node: &NodeName, until: Instant) -> Result<Option<String>, EngineError> {
        let _work = self.lock_work(until)?;
        let record = self.record();
        let in_use = !record.overmounts.is_empty() || !record.shown.is_empty() || self.tasks.is_any_running();
        if in_use || !needs_mount(&record.layout) || self.is_ending() {
            return Ok(None);
        }
        let cut = lock(&self.cut).clone();
        let reason = match (cut, self.is_mounted()?) {
            (Some(reason), _) => reason,
            (None, false) => return Ok(None),
            (None, true)
                if needs_processes(&record.layout) && self.runtime_dir.running("client").is_none() =>
            {
                "its client's process ended".to_owned()
            }
            (None, true) => {
                let me = if record.server { record.layout.server_on(node) } else { None };
                let now = engine(record.layout.engine).view(&self.build(&record.layout, me))?;
                if record.first_view.is_none_or(|first| first.connections == now.connections) {
                    return Ok(None);
                }
                "its client lost a connection to a server for a while".to_owned()
            }
        };
        take_client_away(&self.runtime_dir)?;
        self.note(|record| record.first_view = None)?;
        Ok(Some(reason))
    }

    pub(super) fn unmount(&self) -> Result<(), EngineError> {
        self.must_overmount_nothing()?;
        *lock(&self.targets) = None;
        for shown in self.record().shown {
            self.hide(&shown.path)?;
        }
        if self.runtime_dir.running("client").is_some() {
            // An orderly end: what is in its buffers reaches the servers, and it ends by itself.
            let views = [READ_ONLY, CLIENT].map(|name| self.runtime_dir.path(name));
            let until = Instant::now() + ORDERLY;
            let unmounted = within(until, "unmounting", move || {
                for view in &views {
                    match mounts::unmount_unless_busy(view) {
                        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                            return Err(EngineError::io("unmount", view, error));
                        }
                        _ => {}
                    }
                }
                Ok(())
            });
            let ended = unmounted.and_then(|()| {
                self.runtime_dir.wait(until, "the client to end", || {
                    Ok(self.runtime_dir.running("client").is_none().then_some(()))
                })
            });
            if let Err(error) = ended {
                tracing::warn!(ramdisk = %self.id(), %error, "the client is busy; it is cut off");
            }
        }
        take_client_away(&self.runtime_dir)?;
        self.note(|record| record.first_view = None)
    }
}

/// Ends the connection of the client's FUSE filesystem, so that whoever hangs in it gets an error, and kills the client.
pub(super) fn cut_off(runtime_dir: &RuntimeDir) -> Result<(), EngineError> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    runtime_dir.kill_role("client");
    let client = runtime_dir.path(CLIENT);
    let mounts = mounts::mounted_below(&client)
        .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
    for mount in mounts.iter().filter(|mount| mount.kind.starts_with("fuse")) {
        // A name of its own: several may cut off at the same time.
        let scratch = runtime_dir.path(&format!("fuse-control-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        if let Err(error) = mounts::abort_fuse(mount.device, &scratch) {
            // The client is dead, which does it too in all but rare cases.
            tracing::warn!(ramdisk = %runtime_dir.id(), %error, "can't abort its FUSE connection");
        }
    }
    Ok(())
}

pub(super) fn take_client_away(runtime_dir: &RuntimeDir) -> Result<(), EngineError> {
    cut_off(runtime_dir)?;
    // A machine that is out of breath takes a while to end it; the next client is mounted before that.
    runtime_dir.end_role("client");
    for name in [READ_ONLY, CLIENT] {
        let path = runtime_dir.path(name);
        mounts::detach_all(&path).map_err(|error| EngineError::io("unmount", &path, error))?;
    }
    Ok(())
}
