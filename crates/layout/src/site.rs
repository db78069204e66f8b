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

use std::fmt;
use std::path::{Component, Path, PathBuf};

use ondeck_core::Rate;
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use crate::load::LoadSource;
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

impl Site {
    /// Reads the file.
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
}
