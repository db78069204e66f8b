//! What a site's filesystems and nodes can do: the administrator's file.
//!
//! ```
//! use ondeck_layout::Site;
//! let site = Site::parse(r#"
//! [nodes]
//! link = "12.5GB/s"
//! process = "2GB/s"
//!
//! [[filesystem]]
//! path = "/scratch"
//! kind = "lustre"
//! targets = 120
//! servers = 30
//! target = "4GB/s"
//! server = "12.5GB/s"
//! "#).unwrap();
//! assert_eq!(site.filesystem_of("/scratch/project".as_ref()).unwrap().targets, 120);
//! ```

use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use std::{fmt, fs};

use ondeck_core::{Bytes, Rate, duration};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use crate::load::{Load, LoadSource};
use crate::programs::ProgramLine;

/// A site's filesystems and nodes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// The compute nodes.
    pub nodes: Nodes,
    /// The parallel filesystems.
    #[serde(rename = "filesystem")]
    pub filesystems: Vec<Filesystem>,
    /// How programs of some names use files, before those of [`crate::Programs::built_in`].
    #[serde(rename = "program", default)]
    pub programs: Vec<ProgramLine>,
}

/// What a compute node can do.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nodes {
    /// What one node reads or writes at most: its network to the storage.
    #[serde(deserialize_with = "rate")]
    pub link: Rate,
    /// What one process reads or writes at most; nothing: as much as its node.
    #[serde(default, deserialize_with = "some_rate")]
    pub process: Option<Rate>,
}

/// A parallel filesystem.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filesystem {
    /// Where it is mounted.
    pub path: PathBuf,
    /// What it is.
    pub kind: Tool,
    /// The number of its storage targets: OSTs, OSDs.
    pub targets: u32,
    /// The number of servers that have them.
    pub servers: u32,
    /// What one target reads or writes.
    #[serde(deserialize_with = "rate")]
    pub target: Rate,
    /// What one server's network carries; nothing: as much as its targets.
    #[serde(default, deserialize_with = "some_rate")]
    pub server: Option<Rate>,
    /// The most stripes of a file; nothing: as many as there are targets.
    #[serde(default)]
    pub most_stripes: Option<u32>,
    /// What tells how busy it is; nothing: it counts as idle.
    #[serde(default)]
    pub load: Option<LoadSource>,
    /// How often that is read.
    #[serde(default = "half_a_minute", deserialize_with = "time")]
    pub load_interval: Duration,
    /// From which load on staging there goes slower; nothing: 10 percentage points below [`Filesystem::heavy_above`].
    #[serde(default, deserialize_with = "some_load")]
    pub slow_above: Option<Load>,
    /// From which load on jobs that are I/O-heavy wait; nothing: none does.
    #[serde(default, deserialize_with = "some_load")]
    pub heavy_above: Option<Load>,
    /// How long each of them waits at most.
    #[serde(default = "half_an_hour", deserialize_with = "time")]
    pub heavy_wait: Duration,
}

/// Jobs wait from this much more load on than staging goes slower, where the site's file does not say from which.
const SLOW_BEFORE: f64 = 0.1;

/// A load is not read more often: its command may take as long.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

impl Filesystem {
    /// What all of it reads or writes in a second: its targets, or its servers' network if that is less.
    pub fn bandwidth(&self) -> Rate {
        let all = |rate: Rate, number: u32| rate.0.0.saturating_mul(number.into());
        let targets = all(self.target, self.targets);
        Rate(Bytes(self.server.map_or(targets, |server| targets.min(all(server, self.servers)))))
    }

    /// From which load on staging there goes slower, if ever.
    pub fn slow_from(&self) -> Option<Load> {
        let before = |heavy: Load| Load::new((heavy.part() - SLOW_BEFORE).max(heavy.part() / 2.0));
        self.slow_above.or_else(|| self.heavy_above.map(before))
    }

    /// Settings that do nothing, or not what they seem to, each with what to do.
    pub fn doubts(&self) -> Vec<(&'static str, &'static str)> {
        let mut doubts = Vec::new();
        let has_threshold = self.heavy_above.is_some() || self.slow_above.is_some();
        if has_threshold && self.load.is_none() {
            doubts.push((
                "heavy_above and slow_above do nothing without `load`: nobody knows how busy it is",
                "say in `load` what tells it",
            ));
        }
        if self.heavy_above.is_some() && self.heavy_wait.is_zero() {
            doubts.push((
                "heavy_above does nothing with heavy_wait = \"0s\"",
                "leave both out, or let jobs wait",
            ));
        }
        if let (Some(heavy), Some(slow)) = (self.heavy_above, self.slow_above)
            && slow > heavy
        {
            doubts.push((
                "jobs wait (heavy_above) before staging goes slower (slow_above)",
                "write a slow_above that is not above heavy_above",
            ));
        }
        if has_threshold && self.heavy_wait > Duration::ZERO && self.load_interval > self.heavy_wait {
            doubts.push((
                "its load is read more seldom (load_interval) than a job waits (heavy_wait)",
                "write a shorter load_interval",
            ));
        }
        doubts
    }
}

/// How a filesystem is told its layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tool {
    /// Lustre, by `lfs`.
    Lustre,
    /// CephFS, by an extended attribute.
    Cephfs,
    /// BeeGFS 7, by `beegfs-ctl`.
    Beegfs7,
    /// BeeGFS 8, by `beegfs`.
    Beegfs8,
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tool::Lustre => "Lustre",
            Tool::Cephfs => "CephFS",
            Tool::Beegfs7 => "BeeGFS 7",
            Tool::Beegfs8 => "BeeGFS 8",
        })
    }
}

/// Why a text describes no site.
#[derive(Debug, thiserror::Error)]
pub enum SiteError {
    /// It is not TOML, or has not the lines that it should.
    #[error("{0}")]
    Malformed(#[from] toml::de::Error),
    /// A filesystem has a number that can't be.
    #[error("filesystem {}: {what}", path.display())]
    Filesystem {
        /// Where it is mounted.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// Two filesystems have one path.
    #[error("filesystem {} is there twice", path.display())]
    Twice {
        /// The path.
        path: PathBuf,
    },
}

/// Why a file describes no site.
#[derive(Debug, thiserror::Error)]
pub enum SiteFileError {
    /// It can't be read.
    #[error("can't read {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// It is something else than a file, or more than anybody writes.
    #[error("{}: {what}", path.display())]
    NoSuchFile {
        /// What was named.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// What it says is wrong.
    #[error("{}: {error}", path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: SiteError,
    },
}

/// A site's file is not larger than this.
const MOST_BYTES: u64 = 1 << 20;

/// And no line of it longer than this.
const LONGEST_LINE: usize = 4096;

impl Site {
    /// Reads a site's file; nothing if there is none.
    ///
    /// # Errors
    /// [`SiteFileError`]. A pipe, which would be waited for without end, is none.
    pub fn read(path: &Path) -> Result<Option<Self>, SiteFileError> {
        let unreadable = |error| SiteFileError::Unreadable { path: path.to_owned(), error };
        let no_such_file = |what| Err(SiteFileError::NoSuchFile { path: path.to_owned(), what });
        match fs::metadata(path) {
            Ok(seen) if !seen.is_file() => return no_such_file("it is not a regular file"),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(error)),
        }
        let file = match File::open(path) {
            Ok(file) => file,
            // It was taken away between the two.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(error)),
        };
        let mut text = String::new();
        file.take(MOST_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > MOST_BYTES {
            return no_such_file("it is larger than 1 MiB, which no site's file is");
        }
        // What is wrong is told with its line.
        if text.lines().any(|line| line.len() > LONGEST_LINE) {
            return no_such_file("it has a line of more than 4096 bytes, which no site's file has");
        }
        let site = Self::parse(&text).map_err(|error| SiteFileError::Wrong { path: path.to_owned(), error });
        site.map(Some)
    }

    /// Reads the text of a site's file.
    ///
    /// # Errors
    /// The line that is wrong, or the filesystem that can't be.
    pub fn parse(text: &str) -> Result<Self, SiteError> {
        let site: Self = toml::from_str(text)?;
        for (index, filesystem) in site.filesystems.iter().enumerate() {
            let path = &filesystem.path;
            let wrong = |what| Err(SiteError::Filesystem { path: path.clone(), what });
            let is_plain = path.is_absolute() && !path.components().any(|part| part == Component::ParentDir);
            if !is_plain {
                return wrong("its path must be absolute, without `..`");
            }
            if filesystem.servers == 0 || filesystem.targets < filesystem.servers {
                return wrong("it needs a server, and at least as many targets as servers");
            }
            if filesystem.load == Some(LoadSource::Command(Vec::new())) {
                return wrong("its load needs a command");
            }
            if filesystem.load_interval < SHORTEST_INTERVAL {
                return wrong("load_interval must be at least 1s");
            }
            if filesystem.most_stripes == Some(0) {
                return wrong("most_stripes must be at least 1");
            }
            if site.filesystems[..index].iter().any(|other| other.path == *path) {
                return Err(SiteError::Twice { path: path.clone() });
            }
        }
        Ok(site)
    }

    /// The filesystem that holds `path`: the one with the longest path above it.
    pub fn filesystem_of(&self, path: &Path) -> Option<&Filesystem> {
        let above = self.filesystems.iter().filter(|filesystem| path.starts_with(&filesystem.path));
        above.max_by_key(|filesystem| filesystem.path.components().count())
    }
}

fn rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Rate, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

fn some_rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Rate>, D::Error> {
    rate(deserializer).map(Some)
}

fn some_load<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Load>, D::Error> {
    Load::percentage(&String::deserialize(deserializer)?).map(Some).map_err(de::Error::custom)
}

fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    duration::parse(&String::deserialize(deserializer)?, 1).map_err(de::Error::custom)
}

fn half_a_minute() -> Duration {
    Duration::from_secs(30)
}

fn half_an_hour() -> Duration {
    Duration::from_secs(1800)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SITE: &str = "[nodes]\nlink = \"1GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"lustre\"\n\
        targets = 8\nservers = 4\ntarget = \"1GB/s\"\n";

    #[test]
    fn the_filesystem_of_a_path_is_the_nearest_above_it() {
        let more = SITE.to_owned() + &SITE[SITE.find("[[").unwrap()..].replace("/scratch", "/scratch/fast");
        let site = Site::parse(&more).unwrap();
        let path = |of: &str| site.filesystem_of(Path::new(of)).map(|found| found.path.to_str().unwrap());
        assert_eq!(path("/scratch/a"), Some("/scratch"));
        assert_eq!(path("/scratch/fast/a"), Some("/scratch/fast"));
        assert_eq!(path("/scratch/faster"), Some("/scratch"));
        assert_eq!(path("/home"), None);
    }

    #[test]
    fn what_can_not_be_is_told() {
        let wrong = |from: &str, to: &str| {
            assert!(SITE.contains(from), "{from}");
            Site::parse(&SITE.replace(from, to)).unwrap_err().to_string()
        };
        assert!(wrong("targets = 8", "targets = 3").contains("filesystem /scratch: it needs a server"));
        assert!(wrong("/scratch", "scratch").contains("its path must be absolute"));
        assert!(wrong("/scratch", "/a/../scratch").contains("without `..`"));
        assert!(wrong("\"1GB/s\"", "\"fast\"").contains("`fast` is not a rate"));
        assert!(wrong("lustre", "nfs").contains("nfs"));
        let pattern = "[[program]]\nname = \"solver\"\npattern = \"sharde\"\n[nodes]";
        assert!(wrong("[nodes]", pattern).contains("sharde"));
        let twice = SITE.to_owned() + &SITE[SITE.find("[[").unwrap()..];
        assert_eq!(Site::parse(&twice).unwrap_err().to_string(), "filesystem /scratch is there twice");
    }

    #[test]
    fn thresholds_are_read_and_those_that_do_nothing_are_doubted() {
        let one =
            |lines: &str| Site::parse(&format!("{SITE}{lines}")).map(|mut site| site.filesystems.remove(0));
        let doubts = |lines: &str| {
            let doubts = one(lines).unwrap().doubts();
            doubts.into_iter().map(|(what, _)| what).collect::<Vec<_>>().join("; ")
        };
        let plain = one("").unwrap();
        assert_eq!((plain.heavy_above, plain.slow_from(), doubts("").as_str()), (None, None, ""));
        assert_eq!(plain.bandwidth(), Rate(Bytes(8_000_000_000)));
        assert_eq!(one("server = \"1GB/s\"\n").unwrap().bandwidth(), Rate(Bytes(4_000_000_000)));
        let heavy = "load = [\"x\"]\nload_interval = \"5s\"\nheavy_above = \"80%\"\nheavy_wait = \"10m\"\n";
        let read = one(heavy).unwrap();
        assert_eq!((read.heavy_above, read.heavy_wait), (Some(Load::new(0.8)), Duration::from_secs(600)));
        assert_eq!(read.load_interval, Duration::from_secs(5));
        assert!((read.slow_from().unwrap().part() - 0.7).abs() < 1e-9);
        assert_eq!(doubts(heavy), "");
        assert!(doubts("heavy_above = \"80%\"\n").contains("do nothing without `load`"));
        let load = "load = [\"x\"]\nheavy_above = \"80%\"\n";
        assert!(doubts(&format!("{load}slow_above = \"90%\"\n")).starts_with("jobs wait"));
        assert!(doubts(&format!("{load}heavy_wait = \"0s\"\n")).contains("heavy_wait"));
        assert!(doubts(&format!("{load}heavy_wait = \"10s\"\n")).contains("more seldom"));
        assert!(one("heavy_above = \"80\"\n").unwrap_err().to_string().contains("like 80%"));
        assert!(one("load_interval = \"0s\"\n").unwrap_err().to_string().contains("at least 1s"));
    }
}
