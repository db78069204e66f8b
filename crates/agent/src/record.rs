//! What an agent keeps of a RAM disk in its runtime directory, so that it finds its way after a crash: written before a
//! step changes anything that the next agent would have to know of.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ondeck_api::wire::Overmount;
use ondeck_core::{Bytes, Incarnation, Layout};
use ondeck_ramdisk::{EngineError, RuntimeDir, Secret, View};
use serde::{Deserialize, Serialize};

const RECORD: &str = "record.json";
const SECRET: &str = "secret";

/// What is kept.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RamDiskRecord {
    /// The version of this format; another one is not read.
    pub version: u32,
    /// The RAM disk.
    pub layout: Layout,
    /// Whether this node is one of its servers.
    pub server: bool,
    /// What was promised of each device.
    pub promised: BTreeMap<String, Bytes>,
    /// The ports that were reserved.
    pub ports: Vec<u16>,
    /// Where it is shown.
    pub shown: Vec<Shown>,
    /// The directories that it is mounted over, the outer ones first.
    #[serde(default, rename = "covered")]
    pub overmounts: Vec<RecordedOvermount>,
    /// Whether all nodes of the job had the same overmounts before one of them was told so: a job that begins here keeps
    /// it.
    #[serde(default)]
    pub whole: bool,
    /// Whether all steps were done.
    pub complete: bool,
    /// Whether it is known to be complete on all of its nodes.
    #[serde(default = "settled")]
    pub settled: bool,
    /// Whether it may hold results that are nowhere else. Only a release changes that again.
    pub guarded: bool,
    /// Whether its filesystem, or its part of it here, was all but full at some moment.
    #[serde(default)]
    pub ran_full: bool,
    /// What the client here saw when it had just mounted.
    #[serde(default)]
    pub first_view: Option<View>,
    /// When it is removed if it is not complete by then: milliseconds since the machine was started.
    pub lease_until_ms: u64,
}

/// A former version told a node once that all was done.
fn settled() -> bool {
    true
}

/// A path where the RAM disk is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The directory that it is mounted on.
    pub path: PathBuf,
    /// Whether the directory was made for it.
    pub made: bool,
}

/// An overmount that is there, or was about to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedOvermount {
    /// As it was asked for.
    #[serde(rename = "cover")]
    pub overmount: Overmount,
    /// Where the directory really is.
    pub real: PathBuf,
}

/// The version of [`RamDiskRecord`].
pub const VERSION: u32 = 2;

/// The version before, which did not know which RAM disks may hold results.
const FORMER: u32 = 1;

impl RamDiskRecord {
    /// Writes it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn save(&self, runtime_dir: &RuntimeDir) -> Result<(), EngineError> {
        let text = serde_json::to_vec(self).map_err(|error| EngineError::Refused(error.to_string()))?;
        runtime_dir.write_private(RECORD, &text)?;
        Ok(())
    }

    /// Reads it from a runtime directory.
    ///
    /// # Errors
    /// If there is none, or it is not understood.
    pub fn load(runtime_dir: &Path) -> std::io::Result<RamDiskRecord> {
        let path = runtime_dir.join(RECORD);
        let told =
            |error: std::io::Error| std::io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let text = std::fs::read(&path).map_err(told)?;
        RamDiskRecord::parse(&text).map_err(told)
    }

    fn parse(text: &[u8]) -> std::io::Result<RamDiskRecord> {
        let mut value: serde_json::Value = serde_json::from_slice(text)?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => Ok(serde_json::from_value(value)?),
            Some(version) if version == u64::from(FORMER) => {
                value["version"] = VERSION.into();
                value["guarded"] = false.into();
                let mut record: RamDiskRecord = serde_json::from_value(value)?;
                // Only its name tells that it is a job's, and nobody can say whether the job has written to it.
                let is_a_jobs = Incarnation::of_ramdisk(&record.layout.id.name).is_some();
                record.guarded = record.server && record.complete && is_a_jobs;
                Ok(record)
            }
            version => {
                let version = version.map_or_else(|| "unknown".to_owned(), |version| version.to_string());
                Err(std::io::Error::other(format!("its format is {version}, not {VERSION}")))
            }
        }
    }
}

/// Keeps the secret.
///
/// # Errors
/// The kernel's.
pub fn save_secret(runtime_dir: &RuntimeDir, secret: &Secret) -> Result<(), EngineError> {
    runtime_dir.write_private(SECRET, secret.reveal().as_bytes())?;
    Ok(())
}

/// The secret that was kept. It was written before the record, so it is there wherever a record is.
///
/// # Errors
/// If it can't be read.
pub fn load_secret(runtime_dir: &Path) -> std::io::Result<Secret> {
    let path = runtime_dir.join(SECRET);
    let wrong =
        |kind, why: &dyn std::fmt::Display| std::io::Error::new(kind, format!("{}: {why}", path.display()));
    let text = std::fs::read_to_string(&path).map_err(|error| wrong(error.kind(), &error))?;
    text.trim().parse().map_err(|error| wrong(std::io::ErrorKind::InvalidData, &error))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_overmount_is_kept_as_former_agents_kept_it() {
        let former = r#"{"cover":{"path":"/data/out","from":"1","read_only":false},"real":"/real/out"}"#;
        let read: RecordedOvermount = serde_json::from_str(former).unwrap();
        assert_eq!(read.overmount.from, "1");
        assert_eq!(serde_json::to_string(&read).unwrap(), former);
    }
}
