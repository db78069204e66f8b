//! Copying an output's results to disk, or packing them: after the program, and in between.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use ondeck_core::PackFormat;
use ondeck_staging::merge_back::journal::OpenedUp;
use ondeck_staging::merge_back::{Mechanism, is_whiteout, seen_through_overlay};
use ondeck_transfer::merge::{MergePolicy, Side};
use ondeck_transfer::pack::{self, PackOptions};
use ondeck_transfer::survey::{Descend, survey};
use ondeck_transfer::{
    Event, Monitor, Options, Ownership, Progress, Roots, Summary, TargetRoot, stage_roots,
};
use rustix::fs::{FileType, Mode, OFlags};

use super::places::manifest_path;
use super::shared::{Output, Shared, lock};

impl Shared {
    /// Copies one output's results to disk.
    pub fn copy_out(&self, output: &Output, progress: &Progress) -> Result<Summary> {
        let directory = &self.plan.directories[output.directory];
        directory.moved_to()?;
        let options = Options {
            // What the policy allows is removed, and nothing else.
            delete: true,
            recheck: !output.merge_back.interim.load(Relaxed),
            tag: Some(self.id.clone()),
            ownership: if self.plan.root { Ownership::Preserve } else { Ownership::Inherit },
            manifest: Some(manifest_path(&self.dir, output.directory)),
            ..self.options.clone()
        };
        let events = |event: Event<'_>| self.record(directory, Some(output), &event);
        let monitor = Monitor { progress, event: &events };
        let roots = Roots {
            source: rustix::io::fcntl_dupfd_cloexec(&output.ram, 0)?,
            target: TargetRoot::Existing(rustix::fs::openat(
                &directory.disk,
                c".",
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?),
            source_path: PathBuf::from("the RAM disk"),
            target_path: directory.path.clone(),
        };
        stage_roots(roots, &options, Some(&output.merge_back), &monitor).map_err(|error| anyhow!("{error}"))
    }

    /// Packs one output's results into an archive in the directory on disk: `results-ID.tar` or `results-ID.tar.zst`.
    pub fn pack_out(&self, output: &Output, format: PackFormat, progress: &Progress) -> Result<Summary> {
        let directory = &self.plan.directories[output.directory];
        directory.moved_to()?;
        let mut opened = Vec::new();
        let packed = self.pack_opened(output, format, progress, &mut opened);
        for entry in opened.iter().rev() {
            entry.shut(output.ram.as_fd()).context("giving the results their modes back")?;
        }
        packed
    }

    /// Notes an entry that shuts out the caller, its owner, as one that is made accessible now. Returns its mode then.
    fn open_up(output: &Output, path: &[u8], stat: &rustix::fs::Stat) -> Option<(OpenedUp, Mode)> {
        let opened = OpenedUp::needed(path, stat)?;
        output.merge_back.opening_up(Side::Source, path, stat);
        let mode = opened.open_mode();
        Some((opened, mode))
    }

    fn pack_opened(
        &self,
        output: &Output,
        format: PackFormat,
        progress: &Progress,
        opened: &mut Vec<OpenedUp>,
    ) -> Result<Summary> {
        let directory = &self.plan.directories[output.directory];
        if let Some((root, mode)) = Shared::open_up(output, b"", &rustix::fs::fstat(&output.ram)?) {
            rustix::fs::fchmod(&output.ram, mode)?;
            opened.push(root);
        }
        let overlay = output.merge_back.mechanism == Mechanism::Overlay;
        // An archive can't hold sockets, and nobody listens on them any more. An overlay's marks for deletions mean
        // nothing outside of it.
        survey(output.ram.as_fd(), &mut |visit| {
            if let Some((entry, mode)) = Shared::open_up(output, visit.path, visit.stat) {
                // Neither is a symlink, and nobody else is left who could put one there.
                rustix::fs::chmodat(visit.dir, visit.name, mode, rustix::fs::AtFlags::empty())?;
                opened.push(entry);
            }
            if FileType::from_raw_mode(visit.stat.st_mode) == FileType::Socket
                || overlay && is_whiteout(visit.stat)
            {
                rustix::fs::unlinkat(visit.dir, visit.name, rustix::fs::AtFlags::empty())?;
            }
            Ok(Descend::Yes)
        })
        .map_err(|(path, error)| anyhow!("{}: {error}", std::ffi::OsStr::from_bytes(&path).display()))?;
        let events = |event: Event<'_>| self.record(directory, Some(output), &event);
        let monitor = Monitor { progress, event: &events };
        let name = CString::new(format!("results-{}.{format}", self.id))?;
        let options = PackOptions {
            threads: self.options.threads,
            modes: opened.iter().map(|entry| (entry.inode, entry.mode)).collect(),
            xattr_name: overlay.then_some(seen_through_overlay),
            umask: self.surroundings.umask,
            // A user namespace has no name for most groups, so the RAM disk's files are of the user's own.
            group: Some(rustix::fs::fstat(&directory.disk)?.st_gid),
            ..PackOptions::default()
        };
        let packed =
            pack::pack(output.ram.as_fd(), directory.disk.as_fd(), &name, format, &options, &monitor)
                .map_err(|error| anyhow!("{error}"))?;
        Ok(Summary {
            files: packed.files,
            directories: packed.directories,
            others: packed.others,
            hard_links: packed.hard_links,
            bytes: packed.bytes,
            bytes_written: packed.archive_bytes,
            errors: packed.errors,
            copying: packed.packing,
            syncing: packed.syncing,
            ..Summary::default()
        })
    }

    /// Until the program ends: every `interval`, copies closed files to disk. A failure is no loss yet: the stage-out at
    /// the end meets it again. But whoever asked for these copies relies on them, so it is told when they begin to fail,
    /// and when they succeed again.
    pub fn copy_out_regularly(
        &self,
        interval: Duration,
        ticker: &Ticker,
        progress: &Progress,
        tell: &std::sync::mpsc::Sender<String>,
    ) {
        /// A file that changes while it is copied is copied by the next round.
        const ROUNDS: u32 = 2;
        let mut failed: std::collections::BTreeMap<usize, u32> = std::collections::BTreeMap::new();
        while ticker.wait(interval) {
            let outputs: Vec<_> = lock(&self.outputs).clone();
            for output in &outputs {
                let before = lock(&self.findings).error_count;
                // Of this round alone.
                progress.errors.store(0, Relaxed);
                output.merge_back.interim.store(true, Relaxed);
                let copied = self.copy_out(output, progress);
                output.merge_back.interim.store(false, Relaxed);
                let errors = {
                    let mut findings = lock(&self.findings);
                    findings.error_count = before;
                    std::mem::take(&mut findings.errors)
                };
                if progress.is_cancelled() {
                    return;
                }
                let why = match copied {
                    Ok(summary) if summary.errors == 0 => None,
                    Ok(_) => Some(errors.first().cloned().unwrap_or_else(|| "an entry failed".to_owned())),
                    Err(error) => Some(format!("{error:#}")),
                };
                let path = self.plan.directories[output.directory].path.display();
                let rounds = failed.entry(output.directory).or_default();
                let text = match why {
                    Some(why) => {
                        *rounds = rounds.saturating_add(1);
                        (*rounds == ROUNDS).then(|| {
                            format!(
                                "{path}: the copies of --copy-out-interval fail ({why}); what the program has written since \
                                 is in RAM alone until it can be copied"
                            )
                        })
                    }
                    None => {
                        let had_failed = std::mem::take(rounds) >= ROUNDS;
                        had_failed.then(|| format!("{path}: the copies of --copy-out-interval succeed again"))
                    }
                };
                if let Some(text) = text {
                    // Nobody hears it once the program has ended.
                    let _ = tell.send(text);
                }
            }
        }
    }
}

/// Lets a thread wait for the next round, and ends it.
#[derive(Default)]
pub struct Ticker {
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Ticker {
    /// `false` once it was stopped.
    pub fn wait(&self, interval: Duration) -> bool {
        let until = Instant::now() + interval;
        let mut stopped = lock(&self.stopped);
        while !*stopped {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            stopped =
                self.wake.wait_timeout(stopped, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        false
    }

    /// Ends every wait, also those to come.
    pub fn stop(&self) {
        *lock(&self.stopped) = true;
        self.wake.notify_all();
    }
}
