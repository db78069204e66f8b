//! What a job asks for, whether it came from `#RSA_` lines of its script or from options.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::Bytes;

/// What a job asks of the accelerator. Paths are as the user wrote them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
}

macro_rules! keyword_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$variant_meta])* $variant),+ }

        impl $name {
            /// Every value's word, in the order of the documentation.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The value that `word` names.
            pub fn from_word(word: &str) -> Option<Self> {
                match word { $($word => Some(Self::$variant),)+ _ => None }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $word),+ })
            }
        }
    };
}

keyword_enum! {
    /// What builds the filesystem on an allocation.
    EngineKind {
        /// The RAM of one machine.
        Tmpfs = "tmpfs",
        /// Gluster bricks on many nodes.
        Gluster = "gluster",
        /// CephFS on many nodes.
        Ceph = "ceph",
    }
}

keyword_enum! {
    /// An archive format for results of many small files.
    PackFormat {
        /// POSIX (pax) tar.
        Tar = "tar",
        /// The same, compressed with Zstandard.
        TarZst = "tar.zst",
    }
}

keyword_enum! {
    /// What happens when a job could start before its input is in the RAM disk.
    WaitPolicy {
        /// Run on the disk filesystem.
        Disk = "disk",
        /// Hold the job until the input is there.
        Hold = "hold",
        /// Start at once and read through to disk what is not there yet.
        Union = "union",
    }
}
