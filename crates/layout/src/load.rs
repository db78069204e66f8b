//! How busy and how full the targets of a filesystem are, as its own tools tell, and when a new reading is taken over.
//!
//! - Lustre: `lfs df DIR` tells how full each OST is. One counts as idle up to 80 %, and as wholly busy when it is full: what is
//!   written there has little room, and the servers avoid it.
//! - CephFS: `ceph osd perf` tells how long each OSD takes to commit a write: idle up to 10 ms, wholly busy from 200 ms on.
//! - A command of the site's: a line for each target, or one for all, that ends with a percentage.
//!
//! A load wavers. A layout that follows it would be another one each time, so that a reading counts only if it is far from the one
//! that was taken over before ([`Steady`]); and what is done from a threshold on goes on until the load is clearly below it
//! ([`Exceeded`]).

use std::fmt;
use std::path::Path;

use ondeck_core::{Bytes, Rate};
use serde::Deserialize;

/// What is full to this part is as good as empty.
const EMPTY: f64 = 0.8;

/// Milliseconds within which an idle OSD commits a write.
const IDLE_MS: f64 = 10.0;

/// Milliseconds that a wholly busy OSD takes for that.
const BUSY_MS: f64 = 200.0;

/// A reading that differs by less changes nothing.
const BAND: f64 = 0.15;

/// How busy the targets are, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Load(f64);

impl Load {
    /// A load between 0 (idle) and 1; what is outside becomes the nearest, what is no number 0.
    pub fn new(load: f64) -> Self {
        Self(if load.is_nan() { 0.0 } else { load.clamp(0.0, 1.0) })
    }

    /// The load, from 0 to 1.
    pub fn part(self) -> f64 {
        self.0
    }

    /// Reads a percentage above 0, as `80%`.
    ///
    /// # Errors
    /// What would be one.
    pub fn percentage(text: &str) -> Result<Self, String> {
        let number = text.trim().strip_suffix('%').and_then(|number| number.trim_end().parse::<f64>().ok());
        number
            .filter(|number| *number > 0.0 && *number <= 100.0)
            .map(|number| Self(number / 100.0))
            .ok_or_else(|| format!("`{text}` is not a load; write one above 0 and up to 100, like 80%"))
    }

    /// The rest of a rate that others leave: at least a hundredth.
    pub(crate) fn leaves(self, rate: Rate) -> Rate {
        // Rates are far below 2^53 bytes a second.
        let left = (rate.0.0 as f64 * (1.0 - self.0)) as u64;
        Rate(Bytes(left.max(rate.0.0 / 100).max(1)))
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} %", self.0 * 100.0)
    }
}

/// What tells the load of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum LoadSource {
    /// One of the filesystem's own tools.
    Tool(LoadTool),
    /// A command of the site's, with its arguments; no shell reads it.
    Command(Vec<String>),
}

/// A filesystem's tool that tells the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum LoadTool {
    /// `lfs df`.
    #[serde(rename = "lfs df")]
    LfsDf,
    /// `ceph osd perf`.
    #[serde(rename = "ceph osd perf")]
    CephOsdPerf,
}

/// Why a text tells no load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No target is in it.
    #[error("no target in what it said")]
    Nothing,
    /// A line has no percentage.
    #[error("`{0}` does not end with a percentage between 0 and 100")]
    Line(String),
    /// It is not the JSON of `ceph osd perf`.
    #[error("not what `ceph osd perf` says: {0}")]
    Json(#[from] serde_json::Error),
}

impl LoadSource {
    /// The command that tells the load of the filesystem that is mounted at a path, word by word.
    pub fn command(&self, at: &Path) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect();
        match self {
            LoadSource::Tool(LoadTool::LfsDf) => words(&["lfs", "df", &at.to_string_lossy()]),
            LoadSource::Tool(LoadTool::CephOsdPerf) => words(&["ceph", "osd", "perf", "--format", "json"]),
            LoadSource::Command(command) => command.clone(),
        }
    }

    /// The load that the command tells: the mean of all targets.
    ///
    /// # Errors
    /// It tells none.
    pub fn read(&self, said: &str) -> Result<Load, LoadError> {
        let loads = match self {
            LoadSource::Tool(LoadTool::LfsDf) => of_lfs_df(said),
            LoadSource::Tool(LoadTool::CephOsdPerf) => of_ceph_osd_perf(said)?,
            LoadSource::Command(_) => of_lines(said)?,
        };
        if loads.is_empty() {
            return Err(LoadError::Nothing);
        }
        Ok(Load::new(loads.iter().sum::<f64>() / loads.len() as f64))
    }
}

/// The lines of OSTs alone: an MDT that is full takes no new files, wherever their stripes are.
fn of_lfs_df(said: &str) -> Vec<f64> {
    let full = |line: &str| {
        let mut words = line.split_whitespace();
        let is_ost = words.next()?.contains("-OST");
        let used: f64 = words.nth(3)?.strip_suffix('%')?.parse().ok()?;
        is_ost.then_some(((used / 100.0 - EMPTY) / (1.0 - EMPTY)).clamp(0.0, 1.0))
    };
    said.lines().filter_map(full).collect()
}

fn of_ceph_osd_perf(said: &str) -> Result<Vec<f64>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Perf {
        osdstats: OsdStats,
    }
    #[derive(Deserialize)]
    struct OsdStats {
        osd_perf_infos: Vec<Osd>,
    }
    #[derive(Deserialize)]
    struct Osd {
        perf_stats: PerfStats,
    }
    #[derive(Deserialize)]
    struct PerfStats {
        commit_latency_ms: f64,
    }
    let perf: Perf = serde_json::from_str(said)?;
    let load =
        |osd: &Osd| ((osd.perf_stats.commit_latency_ms - IDLE_MS) / (BUSY_MS - IDLE_MS)).clamp(0.0, 1.0);
    Ok(perf.osdstats.osd_perf_infos.iter().map(load).collect())
}

fn of_lines(said: &str) -> Result<Vec<f64>, LoadError> {
    let percentage = |line: &str| {
        let word = line.split_whitespace().next_back()?;
        let number: f64 = word.strip_suffix('%').unwrap_or(word).parse().ok()?;
        (0.0..=100.0).contains(&number).then_some(number / 100.0)
    };
    let lines = said.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| percentage(line).ok_or_else(|| LoadError::Line(line.chars().take(80).collect())))
        .collect()
}

/// The load that counts: the last reading that was far enough from the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Steady(Option<Load>);

impl Steady {
    /// Takes a reading, and returns the load that counts.
    pub fn read(&mut self, new: Load) -> Load {
        let counts = self.0.filter(|counts| (counts.part() - new.part()).abs() < BAND).unwrap_or(new);
        self.0 = Some(counts);
        counts
    }

    /// The load that counts; nothing before the first reading.
    pub fn load(&self) -> Option<Load> {
        self.0
    }
}

/// Whether a load has come to a threshold, and has not fallen clearly below it since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exceeded(bool);

impl Exceeded {
    /// Takes a reading, and returns whether the threshold counts as exceeded: from the threshold on, and until the load is 15 percentage
    /// points below it, or at half of it.
    pub fn read(&mut self, load: Load, threshold: Load) -> bool {
        let end = (threshold.part() - BAND).max(threshold.part() / 2.0);
        self.0 = load >= threshold || self.0 && load.part() > end;
        self.0
    }

    /// Whether it is exceeded, by the last reading.
    pub fn is_so(self) -> bool {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn command() -> LoadSource {
        LoadSource::Command(vec!["load".into()])
    }

    #[test]
    fn full_targets_count_as_busy() {
        let said = "UUID                   1K-blocks        Used   Available Use% Mounted on\n\
            fs-MDT0000_UUID        100000000    99000000     1000000  99% /scratch[MDT:0]\n\
            fs-OST0000_UUID        100000000    50000000    50000000  50% /scratch[OST:0]\n\
            fs-OST0001_UUID        100000000    90000000    10000000  90% /scratch[OST:1]\n\n\
            filesystem_summary:    200000000   140000000    60000000  70% /scratch\n";
        let load = LoadSource::Tool(LoadTool::LfsDf).read(said).unwrap();
        assert!((load.part() - 0.25).abs() < 1e-9, "{load:?}");
        assert!(matches!(LoadSource::Tool(LoadTool::LfsDf).read("no such"), Err(LoadError::Nothing)));
    }

    #[test]
    fn slow_targets_count_as_busy() {
        let osd = |latency: u32| {
            format!("{{\"id\":0,\"perf_stats\":{{\"commit_latency_ms\":{latency},\"apply_latency_ms\":0}}}}")
        };
        let said = format!(
            "{{\"pg_ready\":true,\"osdstats\":{{\"osd_perf_infos\":[{},{},{}]}}}}",
            osd(0),
            osd(105),
            osd(900)
        );
        let load = LoadSource::Tool(LoadTool::CephOsdPerf).read(&said).unwrap();
        assert!((load.part() - 0.5).abs() < 1e-9, "{load:?}");
        assert!(matches!(LoadSource::Tool(LoadTool::CephOsdPerf).read("{}"), Err(LoadError::Json(_))));
    }

    #[test]
    fn a_command_of_the_site_s_tells_a_percentage_a_line() {
        let load = command().read("ost1 10\n\nost2 30%\n").unwrap();
        assert!((load.part() - 0.2).abs() < 1e-9, "{load:?}");
        for wrong in ["ost1 busy", "140", "-1", "nan"] {
            assert!(matches!(command().read(wrong), Err(LoadError::Line(_))), "{wrong}");
        }
        assert!(matches!(command().read("\n"), Err(LoadError::Nothing)));
    }

    #[test]
    fn a_percentage_is_read_and_what_is_none_is_told() {
        assert_eq!(Load::percentage("80%"), Ok(Load::new(0.8)));
        assert_eq!(Load::percentage("12.5 %").unwrap().to_string(), "12 %");
        for wrong in ["80", "0%", "-5%", "101%", "nan%", "busy", ""] {
            assert!(Load::percentage(wrong).unwrap_err().contains("like 80%"), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn a_load_that_wavers_changes_nothing_more_than_once(
            around in 0.05..0.95_f64, wavers in proptest::collection::vec(-0.05..0.05_f64, 100)
        ) {
            let mut steady = Steady::default();
            let mut counted: Vec<f64> =
                wavers.iter().map(|by| steady.read(Load::new(around + by)).part()).collect();
            counted.dedup();
            prop_assert_eq!(counted.len(), 1);
        }

        #[test]
        fn a_load_that_wavers_around_a_threshold_is_over_it_once_and_one_that_has_fallen_is_not(
            threshold in 0.12..1.0_f64, wavers in proptest::collection::vec(-0.05..0.05_f64, 100)
        ) {
            let mut exceeded = Exceeded::default();
            let threshold = Load::new(threshold);
            let mut told: Vec<bool> = wavers
                .iter()
                .map(|by| exceeded.read(Load::new(threshold.part() + by), threshold))
                .collect();
            told.dedup();
            prop_assert!(told.len() <= 2 && told != [true, false], "{:?}", told);
            prop_assert!(exceeded.read(threshold, threshold));
            prop_assert!(!exceeded.read(Load::new(threshold.part() / 2.0 - 0.16), threshold));
        }

        #[test]
        fn a_load_that_has_changed_counts(from in 0.0..1.0_f64, to in 0.0..1.0_f64) {
            let mut steady = Steady::default();
            steady.read(Load::new(from));
            let counts = steady.read(Load::new(to)).part();
            prop_assert!((counts - to).abs() < 0.15);
        }
    }
}
