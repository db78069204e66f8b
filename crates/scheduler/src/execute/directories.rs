//! A job's directories, as agents are told of them.

use ondeck_api::wire::{JobDirectory, Overmount};
use ondeck_core::schedule::Job;

pub(super) fn directories(job: &Job) -> Vec<JobDirectory> {
    let found = job.directories(job.purpose).into_iter().enumerate();
    found
        .map(|(index, (path, input, output))| JobDirectory { path, name: index.to_string(), input, output })
        .collect()
}

pub(super) fn overmounts(job: &Job) -> Vec<Overmount> {
    let found = job.directories(job.purpose).into_iter().enumerate();
    found
        .map(|(index, (path, _, output))| Overmount { path, from: index.to_string(), read_only: !output })
        .collect()
}
