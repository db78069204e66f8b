//! Whether a job is I/O-heavy: uses a filesystem so much that it is better delayed while that is busy.
//!
//! What the job's line says counts (`#RSA_IO`); without one, what its earlier runs have left in the directories that it names. That is
//! what they wrote in the mean over their whole time, so a job that computes for a day and writes a checkpoint is not heavy.

use std::fmt;

use ondeck_core::{Bytes, IoIntensity, Rate};

use crate::history::Recollection;
use crate::site::Filesystem;

/// A job that writes this part of a filesystem's bandwidth, over all of its time, is I/O-heavy: some twenty of them fill it.
pub const HEAVY_PART: f64 = 0.05;

/// Why a job is I/O-heavy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heavy {
    /// Its line says so.
    Line,
    /// Its earlier runs have written so much.
    History {
        /// What they write in a second, in the mean over their time.
        writes: Rate,
        /// What the filesystem writes in a second.
        bandwidth: Rate,
        /// How many of them there are; of several directories, the most.
        runs: usize,
    },
}

/// Why a job is I/O-heavy for a filesystem; nothing if it is not. `histories` are those of its directories there.
///
/// ```
/// use ondeck_core::IoIntensity;
/// use ondeck_layout::{Site, heavy::{Heavy, heavy}};
/// let site = Site::parse("[nodes]\nlink = \"1GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"lustre\"\n\
///     targets = 8\nservers = 4\ntarget = \"1GB/s\"\n").unwrap();
/// assert_eq!(heavy(Some(IoIntensity::Heavy), &[], &site.filesystems[0]), Some(Heavy::Line));
/// assert_eq!(heavy(None, &[], &site.filesystems[0]), None);
/// ```
pub fn heavy(
    line: Option<IoIntensity>,
    histories: &[Recollection],
    filesystem: &Filesystem,
) -> Option<Heavy> {
    match line {
        Some(IoIntensity::Heavy) => return Some(Heavy::Line),
        Some(IoIntensity::Normal) => return None,
        None => {}
    }
    let writes = histories.iter().fold(Bytes::ZERO, |sum, history| sum.saturating_add(history.writes.0));
    let bandwidth = filesystem.bandwidth();
    let runs = histories.iter().map(|history| history.runs).max()?;
    // Rates are far below 2^53 bytes a second.
    let is_heavy = writes.0 > 0 && writes.0 as f64 >= bandwidth.0.0 as f64 * HEAVY_PART;
    is_heavy.then_some(Heavy::History { writes: Rate(writes), bandwidth, runs })
}

impl fmt::Display for Heavy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line => f.write_str("its line #RSA_IO says that it is I/O-heavy"),
            Self::History { writes, bandwidth, runs } => {
                let runs = if *runs == 1 { "its last run".to_owned() } else { format!("{runs} runs") };
                write!(
                    f,
                    "by its history it is I/O-heavy: {runs} wrote {writes} there in the mean, of {bandwidth}"
                )
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::site::Site;

    fn wrote(mb: u64) -> Recollection {
        Recollection {
            used: None,
            agreement: 0,
            size: None,
            median: None,
            writes: Rate(Bytes(mb * 1_000_000)),
            runs: 3,
            before_change: 0,
        }
    }

    #[test]
    fn the_line_counts_and_without_one_what_earlier_runs_have_written_of_the_bandwidth() {
        let text = "[nodes]\nlink = \"1GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"lustre\"\n\
            targets = 8\nservers = 4\ntarget = \"1GB/s\"\n";
        let filesystem = &Site::parse(text).unwrap().filesystems[0];
        let of = |line, histories: &[Recollection]| heavy(line, histories, filesystem);
        // A twentieth of 8 GB/s.
        assert_eq!(of(None, &[wrote(399)]), None);
        let heavy = of(None, &[wrote(200), wrote(200)]).unwrap();
        assert_eq!(
            heavy.to_string(),
            "by its history it is I/O-heavy: 3 runs wrote 381.5 MiB/s there in the mean, of 7.5 GiB/s"
        );
        assert_eq!(of(Some(IoIntensity::Normal), &[wrote(8000)]), None);
        assert_eq!(of(Some(IoIntensity::Heavy), &[wrote(0)]), Some(Heavy::Line));
        assert_eq!(of(None, &[wrote(0)]), None);
    }
}
