//! What is simulated: compute nodes, the disk filesystem, RSA nodes, and how long each step takes.

use std::time::Duration;

use ondeck_core::schedule::Site;
use ondeck_core::{Bytes, Rate, WaitPolicy};
use serde::Serialize;

/// The compute nodes, and the disk filesystem that all share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// How many compute nodes there are.
    pub nodes: u32,
    /// What one of them can read or write, from the disk filesystem or a RAM disk.
    pub link: Rate,
    /// What the disk filesystem can read and write together.
    pub disk: Rate,
    /// The share of that which others take all the time, from 0 to less than 1.
    pub background: f64,
}

impl Machine {
    /// What the disk filesystem has for the jobs, in bytes a second.
    pub fn bandwidth(&self) -> f64 {
        self.disk.0.0 as f64 * (1.0 - self.background)
    }

    /// What a job on so many nodes can read or write if it is alone.
    pub fn alone(&self, nodes: u32) -> Rate {
        let links = f64::from(nodes.max(1)) * self.link.0.0 as f64;
        Rate(Bytes(links.min(self.bandwidth()).max(1.0) as u64))
    }
}

/// The accelerator.
#[derive(Clone, Debug, PartialEq)]
pub struct Accelerated {
    /// How many RSA nodes there are.
    pub nodes: u32,
    /// What each of them lends.
    pub memory: Bytes,
    /// What one of them can send or receive: to and from the jobs, and to and from the disk filesystem.
    pub link: Rate,
    /// What the site decides.
    pub site: Site,
    /// What happens to a job that could start before its input is in RAM.
    pub wait: WaitPolicy,
    /// Of so many jobs of the queue the workload manager says that they wait for nodes: they are next. Where the site's `horizon`
    /// is not zero, so are those that it expects to start within that.
    pub depth: usize,
    /// How often the queue is looked at.
    pub interval: Duration,
    /// How long each step takes.
    pub steps: Steps,
}

impl Accelerated {
    /// What each of so many RSA nodes can copy from or to the disk filesystem for one job, in bytes a second: of what the site lets all
    /// staging take, each job that may stage has an equal part.
    pub fn staging(&self, nodes: u32) -> f64 {
        let link = self.link.0.0 as f64;
        let part = self
            .site
            .bandwidth
            .zip(self.site.staging)
            .map(|(Rate(all), jobs)| all.0 as f64 / f64::from(jobs.max(1)) / f64::from(nodes.max(1)));
        part.map_or(link, |part| part.min(link))
    }
}

/// How long each step takes beside the bytes that are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Steps {
    /// Building a RAM disk.
    pub construct: Duration,
    /// Preparing the output directories, or filling with nothing.
    pub prepare: Duration,
    /// Stopping that.
    pub stop: Duration,
    /// Mounting it on the job's nodes.
    pub mount: Duration,
    /// Covering the output of a job that runs, which is stopped for it.
    pub late_mount: Duration,
    /// Taking it away from them.
    pub unmount: Duration,
    /// Removing it from the RSA nodes.
    pub destroy: Duration,
}

impl Default for Steps {
    /// As `ondeck-bench hooks` and `ondeck-bench ramdisk` have measured on two cores: docs/scheduler-benchmarks.md, "What hooks
    /// add to a job", and docs/engine-benchmarks.md, "Create and destroy", engine gluster. Covering the output of a job that
    /// runs was not measured by a benchmark; it is taken for ten times of mounting.
    fn default() -> Steps {
        let ms = Duration::from_millis;
        Steps {
            construct: ms(130),
            prepare: ms(150),
            stop: ms(100),
            mount: ms(84),
            late_mount: ms(840),
            unmount: ms(88),
            destroy: ms(211),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_that_may_stage_has_its_part_of_what_the_site_gives() {
        let rate = |bytes: u64| Rate(Bytes(bytes));
        let staging = |bandwidth: Option<u64>, jobs: Option<u32>, nodes: u32| {
            let site = Site { bandwidth: bandwidth.map(rate), staging: jobs, ..Site::default() };
            let accelerated = Accelerated {
                nodes: 8,
                memory: Bytes(1 << 30),
                link: rate(1000),
                site,
                wait: WaitPolicy::Disk,
                depth: 1,
                interval: Duration::from_secs(1),
                steps: Steps::default(),
            };
            accelerated.staging(nodes)
        };
        // By the link alone, by its part, which its nodes share, and by the link where the part is more.
        assert_eq!(staging(None, Some(2), 1), 1000.0);
        assert_eq!(staging(Some(1000), Some(2), 1), 500.0);
        assert_eq!(staging(Some(1000), Some(2), 4), 125.0);
        assert_eq!(staging(Some(1_000_000), Some(2), 4), 1000.0);
    }
}
