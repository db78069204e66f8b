//! Filling the RAM disk.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use ondeck_core::{Bytes, exit};
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_staging::merge_back::Mechanism;
use ondeck_staging::{Slot, make_mount_point};
use ondeck_transfer::{
    Event, Exclude, Monitor, Options, Progress, Roots, StageError, Summary, TargetRoot, stage_roots,
};

use super::Keeper;
use crate::run::message::RunOrder;
use crate::run::places::staged_path;
use crate::run::program::{self, GRACE};
use crate::run::shared::lock;

impl Keeper {
    /// Fills the RAM disk: the inputs, and outputs whose content is mirrored.
    pub(super) fn stage_in(&mut self, namespaces: &Namespaces) -> Result<(), (u8, anyhow::Error)> {
        let not_started = |error: anyhow::Error| (exit::NOT_STARTED, error);
        let staged: Vec<usize> = (0..self.shared.plan.directories.len())
            .filter(|index| {
                let directory = &self.shared.plan.directories[*index];
                directory.input || directory.mechanism == Mechanism::Mirror
            })
            .collect();
        let total = staged.iter().map(|index| self.shared.plan.directories[*index].content.bytes).sum();
        self.watchers.phase("stage_in", Some(total));
        for index in staged {
            let directory = &self.shared.plan.directories[index];
            let scripted = directory.input && self.shared.plan.stage_in.is_some();
            let began = Instant::now();
            let (bytes, files) = if scripted {
                let path = directory.path.clone();
                self.shared.make_slot(namespaces, index).map_err(not_started)?;
                self.stage_in_by_script(namespaces, index).map_err(not_started)?;
                let used = used_of(&namespaces.ram_disk).unwrap_or(Bytes::ZERO);
                self.note(format!("{}: filled by the stage-in script ({used})", path.display()));
                (used.0, 0)
            } else {
                let summary = self.copy_in(namespaces, index)?;
                (summary.bytes_written, summary.files)
            };
            self.report.phase("stage_in", began.elapsed(), bytes, files);
        }
        Ok(())
    }

    fn copy_in(&mut self, namespaces: &Namespaces, index: usize) -> Result<Summary, (u8, anyhow::Error)> {
        let not_started = |error: anyhow::Error| (exit::NOT_STARTED, error);
        let shared = &self.shared;
        let directory = &shared.plan.directories[index];
        if directory.content.entries == 0 && directory.nested.is_empty() {
            return shared.make_slot(namespaces, index).map(|_| Summary::default()).map_err(not_started);
        }
        let options = Options {
            // A user namespace has no name for the users of some ACLs; the copies in RAM are the caller's alone anyway.
            attributes_best_effort: !shared.plan.root,
            // RAM needs no sync. The manifest tells later what the program left as it was.
            sync: false,
            verify: false,
            manifest: directory.output.then(|| staged_path(&shared.dir, index)),
            tag: Some(shared.id.clone()),
            exclude: Exclude::exactly(directory.nested.iter().cloned()),
            ..shared.options.clone()
        };
        let roots = || -> Result<Roots> {
            Ok(Roots {
                source: rustix::io::fcntl_dupfd_cloexec(&directory.disk, 0)?,
                target: TargetRoot::New(
                    rustix::io::fcntl_dupfd_cloexec(&namespaces.ram_disk, 0)?,
                    CString::new(Slot::of_run(index).name())?,
                ),
                source_path: directory.path.clone(),
                target_path: PathBuf::from("the RAM disk"),
            })
        };
        let roots = roots().map_err(not_started)?;
        let progress = Progress::new();
        let events = |event: Event<'_>| shared.record(directory, None, &event);
        let monitor = Monitor { progress: &progress, event: &events };
        let mut signalled = None;
        let summary = self.watchers.watch(
            &progress,
            |order| {
                if let RunOrder::Signal { number } = order {
                    signalled = Some(number);
                    progress.cancel.store(true, Relaxed);
                }
            },
            || stage_roots(roots, &options, None, &monitor),
        );
        let path = directory.path.display();
        let summary = match summary {
            Ok(summary) => summary,
            Err(StageError::Interrupted) => {
                let code = signalled.map_or(exit::NOT_STARTED, |number| exit::SIGNAL_BASE + number as u8);
                let text =
                    "interrupted while staging in; the program was not started and nothing was changed";
                return Err((code, anyhow!(text)));
            }
            Err(error) => return Err(not_started(anyhow!("staging in {path}: {error}"))),
        };
        if summary.errors > 0 {
            let errors = lock(&shared.findings).errors.join("\n  ");
            return Err(not_started(anyhow!(
                "staging in {path}: {} could not be read:\n  {errors}\nMend them, or run with --fallback disk",
                crate::display::count(summary.errors, "entry").replace("entrys", "entries")
            )));
        }
        for nested in &directory.nested {
            Slot::of_run(index)
                .open(&namespaces.ram_disk)
                .and_then(|copy| make_mount_point(&copy, nested))
                .map_err(|error| not_started(error.into()))?;
        }
        Ok(summary)
    }

    fn stage_in_by_script(&mut self, namespaces: &Namespaces, index: usize) -> Result<()> {
        let Some(script) = self.shared.plan.stage_in.clone() else { return Ok(()) };
        let directory = &self.shared.plan.directories[index];
        let ram = self.shared.dir.join("ramdisk").join(Slot::of_run(index).name());
        let environment = self.shared.environment(&ram);
        let child = program::start_script(
            namespaces,
            &script,
            [&ram, &directory.path],
            &environment,
            self.shared.surroundings,
        )
        .with_context(|| format!("can't run the stage-in script {}", script.display()))?;
        let pid = child.id();
        let status = self.watchers.wait_for(pid, |order| {
            if let RunOrder::Signal { number } = order {
                program::send_signal(pid, number);
            }
        });
        program::end_left_behind(GRACE, &self.shared.spared());
        if !status.success() {
            anyhow::bail!(
                "the stage-in script {} failed ({status}); the program was not started and nothing was changed",
                script.display()
            );
        }
        Ok(())
    }
}

fn used_of(ram_disk: &OwnedFd) -> Option<Bytes> {
    let usage = rustix::fs::fstatvfs(ram_disk).ok()?;
    Some(Bytes((usage.f_blocks - usage.f_bfree) * usage.f_frsize))
}
