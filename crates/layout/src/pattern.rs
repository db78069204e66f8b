//! How a job's processes use files, as far as a layout depends on it.

use std::fmt;

use serde::Deserialize;

/// How a job's processes use files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// All of them use one file.
    Shared,
    /// Each has files of its own.
    FilePerProcess,
    /// One of them reads and writes.
    Single,
    /// Nobody knows.
    Unknown,
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shared => "shared",
            Self::FilePerProcess => "file-per-process",
            Self::Single => "single",
            Self::Unknown => "unknown",
        })
    }
}
