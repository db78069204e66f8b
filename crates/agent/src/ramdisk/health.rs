//! How the RAM disk is here: its report, what is in use, and cutting off a client that does not see all files.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ondeck_api::wire::{LocalReport, ProcessReport};
use ondeck_core::{Bytes, NodeName};
use ondeck_ramdisk::device::RAM;
use ondeck_ramdisk::engine::{CLIENT, DATA, DATA_DEVICE};
use ondeck_ramdisk::{EngineError, engine};

use super::client::cut_off;
use super::devices::{DeviceUse, device_use, is_all_but_full};
use super::show::own_mounts;
use super::{LOOK, RamDisk, lock, needs_mount, needs_processes};
use crate::capacity::Promise;
use crate::hang::within;
use crate::record::RamDiskRecord;

impl RamDisk {
    /// What it was promised and what of that is in use.
    pub fn promise(&self) -> Promise {
        let record = self.record();
        // What can't be told counts as not used yet: then all of the promise is still kept for it.
        let device =
            self.mounts_at(&self.runtime_dir.path(DATA_DEVICE)).is_ok_and(|mounts| !mounts.is_empty());
        let mut ram_used = Bytes::ZERO;
        if record.layout.device == RAM && device {
            let device = device_use(&self.runtime_dir.path(DATA_DEVICE));
            ram_used = device.ok().flatten().map(|device| device.used).unwrap_or_default();
        }
        if record.server {
            let processes = self.runtime_dir.processes();
            // A client was promised nothing.
            for process in
                processes.iter().filter(|process| process.ended.is_none() && process.role != "client")
            {
                ram_used = ram_used.saturating_add(resident(process.pid));
            }
        }
        // What is beyond the promise is no use of it.
        let promised_ram = record.promised.get(RAM).copied().unwrap_or_default();
        Promise { promised: record.promised, ram_used: ram_used.min(promised_ram), devices_made: device }
    }

    /// How it is here. It looks at processes and at the mounted filesystem, and takes at most [`LOOK`] for that.
    pub fn report(&self, node: &NodeName) -> LocalReport {
        let record = self.record();
        let mut faults = Vec::new();
        let processes: Vec<ProcessReport> = self
            .runtime_dir
            .processes()
            .into_iter()
            .map(|process| ProcessReport {
                running: process.ended.is_none(),
                memory: resident(process.pid),
                role: process.role,
                pid: process.pid,
            })
            .collect();
        for process in &processes {
            if !process.running {
                faults.push(format!("its {} (process {}) has ended", process.role, process.pid));
            } else if is_stopped(process.pid) {
                faults.push(format!("its {} (process {}) is stopped", process.role, process.pid));
            }
        }
        if record.complete && record.server && processes.is_empty() && needs_processes(&record.layout) {
            faults.push("its server is not running".into());
        }
        let me = if record.server { record.layout.server_on(node) } else { None };
        let build = self.build(&record.layout, me);
        if record.complete
            && me.is_some()
            && faults.is_empty()
            && let Some(fault) = engine(record.layout.engine).server_fault(&build)
        {
            faults.push(fault);
        }
        let (mut view, mut filesystem) = (None, None);
        let is_mounted = self.is_mounted();
        if let Err(error) = &is_mounted {
            faults.push(error.to_string());
        } else if matches!(is_mounted, Ok(true)) {
            match engine(record.layout.engine).view(&build) {
                Ok(seen) => {
                    let lost = seen.lost.iter();
                    faults.extend(lost.map(|lost| format!("its client can't reach the server on {lost}")));
                    let degraded = seen.degraded.iter();
                    faults.extend(degraded.map(|lost| format!("its client has lost the copy on {lost}")));
                    view = Some(seen);
                }
                Err(error) => faults.push(error.to_string()),
            }
            match self.filesystem() {
                Ok(found) => filesystem = found,
                Err(error) => faults.push(error.to_string()),
            }
        } else if record.complete
            && !(record.shown.is_empty() && record.overmounts.is_empty())
            && needs_mount(&record.layout)
        {
            faults.push("its client is not mounted any more".into());
        }
        if record.complete && needs_mount(&record.layout) {
            faults.extend(self.overmount_faults());
        }
        if let Some(cut) = lock(&self.cut).clone() {
            faults.push(cut);
        }
        let device = device_use(&self.runtime_dir.path(DATA_DEVICE)).unwrap_or_else(|error| {
            // Results may be there: whoever looks for them must not go on without this node.
            faults.push(error.to_string());
            Some(DeviceUse::default())
        });
        let device = device.filter(|_| record.server);
        let used = device.map(|device| device.used);
        let is_full = device.is_some_and(|device| device.is_all_but_full)
            || filesystem.is_some_and(|(size, free)| is_all_but_full(size.0, free.0));
        let ran_full = record.ran_full || (record.complete && is_full);
        if ran_full && !record.ran_full {
            // Whoever asks later, and after this agent, must learn of it.
            self.note(|record| record.ran_full = true).unwrap_or_else(
                |error| tracing::warn!(ramdisk = %self.id(), %error, "can't note that it was full"),
            );
            tracing::warn!(ramdisk = %self.id(), "it is full, or all but full");
        }
        let dead_mounts = self.dead_mounts(&record).unwrap_or_else(|error| {
            faults.push(format!("where it is still shown is not known: {error}"));
            Vec::new()
        });
        LocalReport {
            node: node.clone(),
            layout: record.layout,
            complete: record.complete,
            server: record.server,
            guarded: record.guarded,
            shown: record.shown.into_iter().map(|shown| shown.path).collect(),
            overmounts: record.overmounts.into_iter().map(|recorded| recorded.overmount).collect(),
            processes,
            faults,
            used,
            view,
            filesystem,
            dead_mounts,
            ran_full,
        }
    }

    /// Where it is still shown though its client here has ended, or was cut off, for good. By the kernel's own table: an
    /// access to such a path fails, and may hang.
    fn dead_mounts(&self, record: &RamDiskRecord) -> Result<Vec<PathBuf>, EngineError> {
        let lives = self.runtime_dir.running("client").is_some() && lock(&self.cut).is_none();
        if lives || !record.complete || !needs_processes(&record.layout) {
            return Ok(Vec::new());
        }
        Ok(own_mounts(&self.runtime_dir)?.into_iter().map(|mount| mount.at).collect())
    }

    /// Size and free bytes of the mounted filesystem; nothing for an engine that mounts none.
    pub(super) fn filesystem(&self) -> Result<Option<(Bytes, Bytes)>, EngineError> {
        if !self.is_mounted()? {
            return Ok(None);
        }
        let data = self.runtime_dir.path(CLIENT).join(DATA);
        let root = self.runtime_dir.path(CLIENT);
        // One thread that hangs is enough; one that only looks right now is waited for.
        let until = Instant::now() + LOOK;
        while self.looking.swap(true, Ordering::AcqRel) {
            if Instant::now() >= until {
                let what = "the filesystem to answer".to_owned();
                return Err(EngineError::Deadline { what, waited: LOOK });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let looking = Arc::clone(&self.looking);
        let look = within(Instant::now() + LOOK, "the filesystem to answer", move || {
            let _done = Finally(|| looking.store(false, Ordering::Release));
            // Of the owner's directory if there is one already: an engine may keep a quota there.
            let stat = rustix::fs::statvfs(&data)
                .or_else(|_| rustix::fs::statvfs(&root))
                .map_err(|error| EngineError::io("look at", &root, error))?;
            Ok((Bytes(stat.f_blocks * stat.f_frsize), Bytes(stat.f_bavail * stat.f_frsize)))
        });
        look.map(Some)
    }

    /// Cuts this node's client off if it no longer sees all servers, or did not for a while: from then on it would show
    /// a part of the files and say nothing.
    pub fn guard(&self, node: &NodeName) {
        let record = self.record();
        if !record.complete || self.is_ending() || lock(&self.cut).is_some() {
            return;
        }
        match self.is_mounted() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return tracing::error!(ramdisk = %self.id(), %error, "can't look after the client"),
        }
        // Whoever mounts it waits for its connections, and takes it away again if they don't come.
        if record.first_view.is_none() && self.is_at_work() {
            return;
        }
        let me = if record.server { record.layout.server_on(node) } else { None };
        let engine = engine(record.layout.engine);
        let reason = if needs_processes(&record.layout) && self.runtime_dir.running("client").is_none() {
            // Its mount gives errors by itself.
            "its client's process ended".to_owned()
        } else {
            let now = match engine.view(&self.build(&record.layout, me)) {
                Ok(now) => now,
                // Cutting off can't be undone: it takes a lost server, and not a look that failed.
                Err(error) => {
                    return tracing::error!(ramdisk = %self.id(), %error, "can't look after the client");
                }
            };
            if now.lost.is_empty() {
                self.missed.store(0, Ordering::Relaxed);
                if record.first_view.is_none_or(|first| first.connections == now.connections) {
                    return;
                }
                "its client was cut off: a connection to a server was lost for a while, in which it hid files"
                    .to_owned()
            } else {
                // Cutting off can't be undone: a server that was only slow to answer is asked again.
                if self.missed.fetch_add(1, Ordering::Relaxed) + 1 < engine.looks_before_lost() {
                    return;
                }
                let lost: Vec<&str> = now.lost.iter().map(NodeName::as_str).collect();
                format!(
                    "its client was cut off: the server on {} was lost, and with it files",
                    lost.join(", ")
                )
            }
        };
        tracing::error!(ramdisk = %self.id(), reason, "RAM disk lost on this node");
        *lock(&self.cut) = Some(reason);
        if let Err(error) = cut_off(&self.runtime_dir) {
            tracing::error!(ramdisk = %self.id(), %error, "can't cut the client off");
        }
    }

    /// Words for whoever is about to copy from here: what is wrong, and a witness of the connections so far. A lost copy
    /// is no fault while the other one is there.
    pub fn witness(&self, node: &NodeName) -> (Vec<String>, String) {
        let record = self.record();
        let report = self.report(node);
        let connections = report.view.as_ref().map(|view| view.connections.clone()).unwrap_or_default();
        let mut faults = report.faults;
        if record.layout.replicas > 1 && lock(&self.cut).is_none() {
            faults = match &report.view {
                None if faults.is_empty() => vec!["its client is not mounted any more".into()],
                // Whether it is can't be told.
                None => faults,
                Some(view) => view
                    .lost
                    .iter()
                    .map(|lost| format!("its client can't reach {lost} nor its copy"))
                    .collect(),
            };
        }
        if record.first_view.is_some_and(|first| first.connections != connections) {
            faults.push("its client lost a connection to a server for a while, in which it hid files".into());
        }
        (faults, format!("{} {connections}", self.id()))
    }
}

/// Does something at the end of a scope, however it ends.
struct Finally<F: FnMut()>(F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// The resident memory of a process.
fn resident(pid: i32) -> Bytes {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: u64 = text.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    Bytes(pages * rustix::param::page_size() as u64)
}

/// Whether a process is stopped by a signal or a debugger.
fn is_stopped(pid: i32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold anything.
    let state = text.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}
