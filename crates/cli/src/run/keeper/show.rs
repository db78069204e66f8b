//! Showing the program its directories in RAM.

use anyhow::{Context, Result};
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_staging::merge_back::Mechanism;

use super::Keeper;
use crate::run::report;
use crate::run::shared::lock;

impl Keeper {
    /// Makes the directories in RAM that the program will write to.
    pub(super) fn prepare_outputs(&mut self, namespaces: &Namespaces) -> Result<()> {
        if self.shared.plan.switches() {
            return Ok(());
        }
        for index in 0..self.shared.plan.directories.len() {
            let directory = &self.shared.plan.directories[index];
            if directory.output {
                let before = directory.before.clone();
                let output = self.shared.prepare_output(
                    namespaces,
                    index,
                    directory.mechanism,
                    directory.since,
                    before,
                )?;
                lock(&self.shared.outputs).push(std::sync::Arc::new(output));
            }
        }
        Ok(())
    }

    /// Shows every directory at its path, parents before what lies in them.
    pub(super) fn mount(&mut self, namespaces: &Namespaces) -> Result<()> {
        self.shared.anchor(namespaces).context("can't hold on to the directories on disk")?;
        let shared = &self.shared;
        let shown: Vec<(usize, Mechanism)> = shared
            .plan
            .directories
            .iter()
            .enumerate()
            .filter(|(_, directory)| directory.input || !shared.plan.switches())
            .map(|(index, directory)| {
                let plain = directory.input && !directory.output;
                (index, if plain { Mechanism::Bind } else { directory.mechanism })
            })
            .collect();
        // All in one child, because each costs a fork. If that fails, one by one, to name the culprit.
        if namespaces
            .inside(|| shown.iter().try_for_each(|(index, how)| shared.mount_here(*index, *how)))
            .is_err()
        {
            for (index, how) in &shown {
                let path = shared.plan.directories[*index].path.display();
                shared
                    .mount_one(namespaces, *index, *how)
                    .with_context(|| format!("can't show the RAM disk at {path}"))?;
            }
        }
        self.describe_directories();
        Ok(())
    }

    pub(super) fn describe_directories(&mut self) {
        self.described = true;
        for directory in &self.shared.plan.directories {
            let mechanism = if directory.input && !directory.output {
                "input"
            } else if self.shared.plan.switches() && !directory.input {
                "disk"
            } else {
                directory.mechanism.word()
            };
            self.report.directories.push(report::DirectoryReport {
                path: directory.path.to_string_lossy().into_owned(),
                input: directory.input,
                output: directory.output,
                mechanism,
            });
        }
    }
}
