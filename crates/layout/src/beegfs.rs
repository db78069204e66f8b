//! BeeGFS: the stripe pattern of a directory, by `beegfs-ctl` (version 7) or `beegfs` (version 8).
//!
//! Not run on a real BeeGFS: options and outputs are as its documentation shows them.

use ondeck_core::Bytes;
use ondeck_core::text::plain;

use crate::model::{Layout, LayoutError, Placement, PoolName, StripeCount, UNIT};

/// The stripe pattern of a directory in BeeGFS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripePattern {
    /// The number of storage targets for each file.
    pub targets: u32,
    /// The bytes of a chunk: a power of two, of at least 64 KiB.
    pub chunk_size: Bytes,
    /// The storage pool: a number, in version 8 perhaps a name; nothing: it stays as it is.
    pub pool: Option<PoolName>,
}

/// Which of the two tools there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// `beegfs-ctl`.
    Seven,
    /// `beegfs`.
    Eight,
}

/// Why something is no stripe pattern of BeeGFS.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BeegfsError {
    /// The output has no such line.
    #[error("the tool of BeeGFS shows no {what}, only `{}`", plain(text, 200))]
    Missing {
        /// What is missing.
        what: &'static str,
        /// What it shows.
        text: String,
    },
    /// The directory has a pattern that is not set here.
    #[error("the directory is striped as {}, and only RAID0 can be set here", plain(kind, 40))]
    Kind {
        /// The kind.
        kind: String,
    },
    /// A chunk must be a power of two.
    #[error("chunks of {size}: BeeGFS has powers of two from {UNIT} on")]
    ChunkSize {
        /// The bytes of the chunk.
        size: Bytes,
    },
    /// BeeGFS has no such placement.
    #[error("BeeGFS keeps no data with the metadata: leave -L mdt out")]
    OnMetadata,
    /// Version 7 takes a pool by its number.
    #[error("pool {pool}: beegfs-ctl takes the number of a pool; `beegfs-ctl --liststoragepools` shows it")]
    PoolNumber {
        /// The pool.
        pool: PoolName,
    },
    /// The pattern is no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl StripePattern {
    /// What BeeGFS can do of a layout: its last component, over at most `targets`, with the largest chunks that fit into its
    /// stripes.
    ///
    /// # Errors
    /// BeeGFS has nothing like it.
    pub fn of(layout: &Layout, targets: u32) -> Result<Self, BeegfsError> {
        match &layout.last().placement {
            Placement::Metadata => Err(BeegfsError::OnMetadata),
            Placement::Striped { count, stripe_size, pool } => Ok(Self {
                targets: count.among(targets).clamp(1, targets.max(1)),
                chunk_size: Bytes(1 << stripe_size.0.ilog2()),
                pool: pool.clone(),
            }),
        }
    }

    /// The layout that it is.
    ///
    /// # Errors
    /// More targets than a [`Layout`] can have.
    pub fn layout(&self) -> Result<Layout, BeegfsError> {
        let count =
            u16::try_from(self.targets).map_err(|_| LayoutError::Count { count: self.targets.into() })?;
        Ok(Layout::of_one(StripeCount::Of(count), self.chunk_size, self.pool.clone())?)
    }

    /// The arguments of the tool that sets it, without the directory.
    ///
    /// # Errors
    /// The tool of version 7 does not take the name of a pool.
    pub fn arguments(&self, version: Version) -> Result<Vec<String>, BeegfsError> {
        let Self { targets, chunk_size, pool } = self;
        let chunk = chunk_size.0;
        let mut words = match version {
            Version::Seven => vec![
                "--setpattern".to_owned(),
                format!("--numtargets={targets}"),
                format!("--chunksize={chunk}"),
            ],
            Version::Eight => vec![
                "entry".to_owned(),
                "set".to_owned(),
                format!("--num-targets={targets}"),
                format!("--chunk-size={chunk}"),
            ],
        };
        if let Some(pool) = pool {
            words.push(match version {
                Version::Seven if pool.as_str().bytes().all(|b| b.is_ascii_digit()) => {
                    format!("--storagepoolid={pool}")
                }
                Version::Seven => return Err(BeegfsError::PoolNumber { pool: pool.clone() }),
                Version::Eight => format!("--pool={pool}"),
            });
        }
        Ok(words)
    }

    /// The arguments of the tool that shows it, without the directory. Version 8 is asked for the form of version 7.
    pub fn question(version: Version) -> &'static [&'static str] {
        match version {
            Version::Seven => &["--getentryinfo"],
            Version::Eight => &["entry", "info", "--retro"],
        }
    }

    /// Reads what the tool shows.
    ///
    /// # Errors
    /// What is no such output, and mirrored directories.
    pub fn parse(text: &str) -> Result<Self, BeegfsError> {
        let missing = |what| BeegfsError::Missing { what, text: text.to_owned() };
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.trim().strip_prefix("+ ")?.strip_prefix(key));
            line.and_then(|rest| rest.strip_prefix(':')).map(str::trim)
        };
        let kind = value("Type").ok_or_else(|| missing("kind of striping"))?;
        if kind != "RAID0" {
            return Err(BeegfsError::Kind { kind: kind.to_owned() });
        }
        // "desired: 4", of a file "desired: 4; actual: 4".
        let targets = value("Number of storage targets").and_then(|text| {
            text.strip_prefix("desired:")?.split(';').next()?.trim().parse::<u32>().ok().filter(|n| *n > 0)
        });
        let chunk_size = value("Chunksize").and_then(|text| text.parse::<Bytes>().ok());
        let chunk_size = chunk_size.ok_or_else(|| missing("size of chunks"))?;
        if !chunk_size.0.is_power_of_two() || chunk_size < UNIT {
            return Err(BeegfsError::ChunkSize { size: chunk_size });
        }
        // "1 (Default)": the number is what both versions take.
        let pool = value("Storage Pool").and_then(|text| text.split_ascii_whitespace().next());
        Ok(Self {
            targets: targets.ok_or_else(|| missing("number of targets"))?,
            chunk_size,
            pool: pool.map(str::parse).transpose()?,
        })
    }
}
