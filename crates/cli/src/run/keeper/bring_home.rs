//! Bringing the results home.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use ondeck_core::exit;
use ondeck_ramdisk::mounts;
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_staging::merge_back::Mechanism;
use ondeck_transfer::Progress;

use super::{Ending, Keeper};
use crate::run::findings::Findings;
use crate::run::message::RunOrder;
use crate::run::outputs::used_below;
use crate::run::plan::is_empty;
use crate::run::program::{self, GRACE};
use crate::run::report;
use crate::run::shared::{Output, lock};

/// Why a stage-out did not end well.
pub(super) enum Abort {
    Failed(anyhow::Error),
    Abandoned,
}

impl Keeper {
    /// Stages every output out. When it is done `again`, directories that are gone are opened anew by their paths.
    pub(super) fn bring_home(&mut self, namespaces: &Namespaces, code: u8, again: bool) -> Ending {
        let mut problems = if again { self.open_targets_anew() } else { Vec::new() };
        for (index, why) in &self.out_of_reach {
            let path = self.shared.plan.directories[*index].path.display();
            problems.push((*index, format!("{path}: {why}")));
        }
        let outputs: Vec<_> = lock(&self.shared.outputs).clone();
        *lock(&self.shared.findings) = Findings::default();
        let total = outputs
            .iter()
            .filter(|output| !output.home.load(Relaxed))
            .filter_map(|output| used_below(&output.ram))
            .sum();
        self.watchers.phase("stage_out", Some(total));
        self.watchers.state("staging out");
        for output in &outputs {
            if output.home.load(Relaxed) || problems.iter().any(|(index, _)| *index == output.directory) {
                continue;
            }
            let began = Instant::now();
            let path = self.shared.plan.directories[output.directory].path.display().to_string();
            let result = if self.shared.plan.stage_out.is_some() {
                self.stage_out_by_script(namespaces, output)
            } else {
                self.copy_out(output)
            };
            match result {
                Ok((bytes, files)) => {
                    output.home.store(true, Relaxed);
                    if let Some(journal) = &output.merge_back.journal {
                        journal.home();
                    }
                    self.report.phase("stage_out", began.elapsed(), bytes, files);
                }
                Err(Abort::Abandoned) => return self.given_up(),
                Err(Abort::Failed(error)) => problems.push((output.directory, format!("{path}: {error:#}"))),
            }
        }
        let mut problems: Vec<String> = problems.into_iter().map(|(_, problem)| problem).collect();
        match self.write_back(namespaces) {
            Ok(more) => problems.extend(more),
            Err(Abort::Abandoned) => return self.given_up(),
            Err(Abort::Failed(error)) => problems.push(format!("{error:#}")),
        }
        self.take_findings();
        self.report.results_on_disk = problems.is_empty();
        if !problems.is_empty() {
            return Ending::Held(problems.join("\n"));
        }
        Ending::Done(if self.report.moved.is_empty() { code } else { exit::RESULTS_ELSEWHERE })
    }

    fn given_up(&mut self) -> Ending {
        self.give_up_caches();
        Ending::Done(exit::ABANDONED)
    }

    /// Opens the directories that are gone anew, by their paths. Returns which can't be, and why.
    fn open_targets_anew(&mut self) -> Vec<(usize, String)> {
        let outputs: Vec<_> = lock(&self.shared.outputs).clone();
        let mut problems = Vec::new();
        for output in outputs.iter().filter(|output| !output.home.load(Relaxed)) {
            let path = self.shared.plan.directories[output.directory].path.display().to_string();
            match self.shared.open_target_anew(output) {
                Ok(false) => {}
                Ok(true) => self.note(format!(
                    "{path}: the directory was removed while the program ran; its results go to the one that is there now"
                )),
                Err(error) => problems.push((output.directory, format!("{path}: {error:#}"))),
            }
        }
        problems
    }

    /// Tells of a directory whose results are not under its path.
    pub(super) fn tell_moved(&mut self, path: &str, now: &Path) {
        let now = now.display().to_string();
        self.watchers.warning(&format!(
            "{path}: the directory was renamed while the program ran; its results are in {now}"
        ));
        self.report.moved.push(report::Moved { path: path.to_owned(), now });
    }

    fn copy_out(&mut self, output: &Output) -> Result<(u64, u64), Abort> {
        let shared = &self.shared;
        let untouched =
            output.merge_back.mechanism == Mechanism::Bind && lock(&output.merge_back.ours).is_empty();
        if untouched
            && is_empty(&output.ram).is_ok_and(|empty| empty)
            && output.merge_back.is_top_as_shown(output.ram.as_fd()).is_ok_and(|same| same)
        {
            return Ok((0, 0));
        }
        let progress = Progress::new();
        let mut abandoned = false;
        let summary = self.watchers.watch(
            &progress,
            |order| {
                if matches!(order, RunOrder::Abandon) {
                    abandoned = true;
                    progress.cancel.store(true, Relaxed);
                }
            },
            || match shared.plan.pack {
                Some(format) => shared.pack_out(output, format, &progress),
                None => shared.copy_out(output, &progress),
            },
        );
        if abandoned {
            return Err(Abort::Abandoned);
        }
        let summary = summary.map_err(Abort::Failed)?;
        let directory = &shared.plan.directories[output.directory];
        // Only now, because it may have happened while they were copied.
        let moved = directory.moved_to().map_err(Abort::Failed)?;
        let unverified = summary.verified.map_or(0, |verified| verified.failed);
        if summary.errors + unverified > 0 {
            let findings = lock(&shared.findings);
            return Err(Abort::Failed(anyhow!(
                "{} not on disk:\n  {}",
                crate::display::count(summary.errors.max(unverified), "entry").replace("entrys", "entries"),
                findings.errors.join("\n  ")
            )));
        }
        if let Some(now) = moved {
            let path = directory.path.display().to_string();
            self.tell_moved(&path, &now);
        }
        Ok((summary.bytes_written, summary.files))
    }

    fn stage_out_by_script(&mut self, namespaces: &Namespaces, output: &Output) -> Result<(u64, u64), Abort> {
        let failed = |error: anyhow::Error| Abort::Failed(error);
        let Some(script) = self.shared.plan.stage_out.clone() else { return Ok((0, 0)) };
        let directory = &self.shared.plan.directories[output.directory];
        // The script must see the directory on disk under its path.
        let path = directory.path.clone();
        // And it knows the directory by nothing else.
        if let Some(now) = directory.moved_to().map_err(failed)? {
            return Err(failed(anyhow!(
                "the directory was renamed while the program ran and is {} now; move it back, for the stage-out script",
                now.display()
            )));
        }
        // Once: a second time it would be the user's own mount.
        if !output.detached.swap(true, Relaxed) {
            namespaces.inside(|| mounts::detach(&path)).map_err(|error| failed(error.into()))?;
            if let Some(journal) = &output.merge_back.journal {
                journal.detached();
            }
        }
        let ram = self.shared.dir.join("ramdisk").join(output.slot.name());
        let environment = self.shared.environment(&ram);
        let child =
            program::start_script(namespaces, &script, [&ram, &path], &environment, self.shared.surroundings)
                .with_context(|| format!("can't run the stage-out script {}", script.display()))
                .map_err(failed)?;
        let pid = child.id();
        let mut abandoned = false;
        let status = self.watchers.wait_for(pid, |order| match order {
            RunOrder::Abandon => {
                abandoned = true;
                program::send_signal(pid, libc::SIGKILL);
            }
            RunOrder::Signal { .. } | RunOrder::Resume => {}
        });
        program::end_left_behind(GRACE, &self.shared.spared());
        if abandoned {
            return Err(Abort::Abandoned);
        }
        if !status.success() {
            return Err(failed(anyhow!("the stage-out script {} failed ({status})", script.display())));
        }
        rustix::fs::syncfs(&directory.disk)
            .context("the target filesystem failed to sync")
            .map_err(failed)?;
        Ok((used_below(&output.ram).unwrap_or(0), 0))
    }
}
