//! What a job asks for, whether it came from `#RSA_` lines of its script or from options.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Bytes;
use crate::striping::StripingRequest;

/// What a job asks of the accelerator. Paths are as the user wrote them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Request {
    /// Directories to stage in and show, read-only, at the same path.
    pub data_in: Vec<PathBuf>,
    /// Directories whose new content is written to RAM and staged out.
    pub data_out: Vec<PathBuf>,
    /// A script of the user that fills the RAM disk instead of the plain copy.
    pub stage_in: Option<PathBuf>,
    /// A script of the user that saves the results instead of the plain copy.
    pub stage_out: Option<PathBuf>,
    /// After this much run time the input is given up and the RAM disk becomes the output's.
    pub delay: Option<Duration>,
    /// The size of the RAM disk.
    pub capacity: Option<Bytes>,
    /// How many RSA nodes to use.
    pub nodes: Option<u32>,
    /// The pool to take them from.
    pub pool: Option<String>,
    /// What builds the filesystem.
    pub engine: Option<EngineKind>,
    /// Stage out as one archive instead of files.
    pub pack: Option<PackFormat>,
    /// What to do when the job could start before its input is there.
    pub wait: Option<WaitPolicy>,
    /// What the output needs beside the input.
    pub out_size: Option<Bytes>,
    /// How often closed output files are copied out while the program runs.
    pub copy_out_interval: Option<Duration>,
    /// How new files of its directories are to be striped.
    #[serde(skip_serializing_if = "StripingRequest::is_empty")]
    pub striping: StripingRequest,
    /// How much it uses the disk, if its user says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io: Option<IoIntensity>,
}

/// What can't be asked for together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Contradiction {
    /// There is nothing that the script could read from.
    #[error("a stage-in script needs an input directory to read from; name one")]
    StageInWithoutInput,
    /// There is nothing that the script could write to.
    #[error("a stage-out script needs an output directory to write to; name one")]
    StageOutWithoutOutput,
    /// Both would save the results.
    #[error("a stage-out script and packing exclude each other; let the script pack")]
    StageOutAndPack,
    /// The job would wait for nothing.
    #[error("there is no data directory to wait for; name one")]
    HoldWithoutData,
}

impl Request {
    /// What happens to the job if it could start before its input is there.
    pub fn wait_policy(&self) -> WaitPolicy {
        let default = if self.stage_in.is_some() { WaitPolicy::Hold } else { WaitPolicy::Disk };
        self.wait.unwrap_or(default)
    }

    /// What of it can't be asked for together, if anything.
    pub fn contradiction(&self) -> Option<Contradiction> {
        let (no_input, no_output) = (self.data_in.is_empty(), self.data_out.is_empty());
        if self.stage_in.is_some() && no_input {
            Some(Contradiction::StageInWithoutInput)
        } else if self.stage_out.is_some() && no_output {
            Some(Contradiction::StageOutWithoutOutput)
        } else if self.stage_out.is_some() && self.pack.is_some() {
            Some(Contradiction::StageOutAndPack)
        } else if self.wait == Some(WaitPolicy::Hold) && no_input && no_output {
            Some(Contradiction::HoldWithoutData)
        } else {
            None
        }
    }
}

macro_rules! keyword_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $(#[$meta])*
        pub enum $name { $($(#[$variant_meta])* $variant),+ }

        impl $name {
            /// Every value, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Every value's word, in the order of the documentation.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The value that `word` names.
            pub fn from_word(word: &str) -> Option<Self> {
                match word { $($word => Some(Self::$variant),)+ _ => None }
            }

            /// The word for it.
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    };
}
pub(crate) use keyword_enum;

keyword_enum! {
    /// What builds the filesystem on an allocation.
    #[derive(PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    EngineKind {
        /// The RAM of one machine.
        Tmpfs = "tmpfs",
        /// Gluster bricks on many nodes.
        Gluster = "gluster",
        /// CephFS on many nodes.
        Ceph = "ceph",
        /// Nothing at all, with delays and failures on demand: for tests, and to watch decisions without lending a byte.
        Simulated = "simulated",
    }
}

keyword_enum! {
    /// An archive format for results of many small files.
    #[derive(Hash, Serialize, Deserialize)]
    PackFormat {
        /// POSIX (pax) tar.
        #[serde(rename = "tar")]
        Tar = "tar",
        /// The same, compressed with Zstandard.
        #[serde(rename = "tar.zst")]
        TarZst = "tar.zst",
    }
}

keyword_enum! {
    /// How much a job uses the disk filesystem while it runs.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    IoIntensity {
        /// So much that it is better delayed while the filesystem is busy.
        Heavy = "heavy",
        /// Not so much, whatever its earlier runs say.
        Normal = "normal",
    }
}

keyword_enum! {
    /// What happens when a job could start before its input is in the RAM disk.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    WaitPolicy {
        /// Run on the disk filesystem.
        Disk = "disk",
        /// Hold the job until the input is there.
        Hold = "hold",
        /// Start at once and read through to disk what is not there yet.
        Union = "union",
    }
}

impl EngineKind {
    /// The engines that a job can ask for; the simulated one would lose its data.
    pub const FOR_JOBS: &'static [&'static str] = &["tmpfs", "gluster", "ceph"];

    /// The engine that a job can ask for by `word`.
    pub fn for_job(word: &str) -> Option<EngineKind> {
        EngineKind::from_word(word).filter(|engine| *engine != EngineKind::Simulated)
    }
}
