//! A layout, and what every layout must keep.
//!
//! The limits are those of Lustre, which has the widest notion of a layout; a filesystem that can do less says so where its
//! text is made.

use std::fmt;
use std::str::FromStr;

use ondeck_core::Bytes;
use ondeck_core::text::plain;

/// Ends of components and sizes of stripes are multiples of it (Lustre's `LOV_MIN_STRIPE_SIZE`, Ceph's smallest stripe unit
/// and BeeGFS's smallest chunk).
pub const UNIT: Bytes = Bytes(64 << 10);
/// What Lustre gives a stripe if nobody says otherwise.
pub const DEFAULT_STRIPE_SIZE: Bytes = Bytes(1 << 20);
/// A file has at most this many stripes (Lustre's `LOV_MAX_STRIPE_COUNT`).
pub const MOST_STRIPES: u16 = 2000;
/// A target has at most this many stripes of one file.
pub const MOST_PER_TARGET: u8 = 32;
/// The part of a file that can be kept with its metadata is at most this large.
pub const MOST_ON_METADATA: Bytes = Bytes(1 << 30);
/// A stripe is smaller than this: its size is a number of 32 bits.
const STRIPE_SIZES_END: Bytes = Bytes(4 << 30);

/// How the files of a directory are spread over storage targets: one component or more, each for a range of the file.
///
/// The ranges join, the first begins at 0 and the last goes on to the end of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    components: Vec<Component>,
}

/// How a range of a file is spread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// Where the range ends; nothing: at the end of the file.
    pub end: Option<Bytes>,
    /// Where its data is.
    pub placement: Placement,
}

/// Where the data of a range is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// With the file's metadata (Lustre's data on MDT): a small file costs one server less.
    Metadata,
    /// On storage targets.
    Striped {
        /// Over how many.
        count: StripeCount,
        /// The bytes of one stripe, after which the next target follows.
        stripe_size: Bytes,
        /// The pool that the targets are taken from; nothing: any target.
        pool: Option<PoolName>,
    },
}

/// How many stripes lie beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StripeCount {
    /// As many, each on a target of its own.
    Of(u16),
    /// One on every target.
    All,
    /// As many, several on a target where there are fewer targets (Lustre's over-striping).
    Overstriped(u16),
    /// As many on each of all targets.
    PerTarget(u8),
}

/// The name of a pool of targets: at most 64 characters of `A-Za-z0-9_.-`. Lustre's have 15 at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolName(String);

/// Why something is no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// There is no component.
    #[error("a layout needs a component")]
    Empty,
    /// A component does not end behind the one before it.
    #[error("component {component} ends at {end}, and must end behind {start}, where it begins")]
    NotRising {
        /// Counted from 1.
        component: usize,
        /// Where it begins.
        start: Bytes,
        /// Where it ends.
        end: Bytes,
    },
    /// Something follows a component that goes on to the end of the file.
    #[error("component {component} begins at the end of the file: only the last may end there (`-E -1`)")]
    BehindTheEnd {
        /// Counted from 1.
        component: usize,
    },
    /// The last component ends before the file does.
    #[error(
        "the last component ends at {end}, and what is written behind it would fail; end it with `-E -1`"
    )]
    Unfinished {
        /// Where it ends.
        end: Bytes,
    },
    /// An end, or the size of a stripe, is no multiple of [`UNIT`].
    #[error("{} bytes are not a multiple of {UNIT}", size.0)]
    NotAligned {
        /// What is not.
        size: Bytes,
    },
    /// A component ends within a stripe.
    #[error("component {component} ends at {end}, which is not a multiple of its stripes of {stripe_size}")]
    EndsWithinStripe {
        /// Counted from 1.
        component: usize,
        /// Where it ends.
        end: Bytes,
        /// The bytes of its stripes.
        stripe_size: Bytes,
    },
    /// A stripe of no bytes, or of too many.
    #[error("a stripe of {size}: it must have at least {UNIT} and less than {STRIPE_SIZES_END}")]
    StripeSize {
        /// The bytes of the stripe.
        size: Bytes,
    },
    /// No stripes, or too many.
    #[error("{count} stripes: there must be 1 to {MOST_STRIPES}, or -1 for one on every target")]
    Count {
        /// How many.
        count: i64,
    },
    /// No stripes on a target, or too many.
    #[error("{count} stripes on each target: there must be 2 to {MOST_PER_TARGET}")]
    PerTarget {
        /// How many.
        count: i64,
    },
    /// Data lies with the metadata in another component than the first.
    #[error("component {component} lies with the metadata, and only the first can")]
    MetadataNotFirst {
        /// Counted from 1.
        component: usize,
    },
    /// Too much lies with the metadata.
    #[error(
        "a file can have at most {MOST_ON_METADATA} with its metadata; end the first component there or before"
    )]
    MetadataTooLarge,
    /// A component takes the pool of the one before it over, and there is no option that all versions of `lfs` know to say
    /// that it has none.
    #[error("component {component} has no pool, and the one before it has: name one, too")]
    PoolEnds {
        /// Counted from 1.
        component: usize,
    },
    /// No name of a pool.
    #[error("`{}` is no name of a pool: it has 1 to 64 letters, digits, `_`, `-` or `.`", plain(name, 40))]
    Pool {
        /// What it was.
        name: String,
    },
}

impl Layout {
    /// The layout of these components, in the order of their ranges.
    ///
    /// # Errors
    /// The first thing that no filesystem would accept.
    pub fn new(components: Vec<Component>) -> Result<Self, LayoutError> {
        if components.is_empty() {
            return Err(LayoutError::Empty);
        }
        let mut start = Some(Bytes::ZERO);
        for (index, component) in components.iter().enumerate() {
            start = component.check(index + 1, start)?;
        }
        if let Some(end) = start {
            return Err(LayoutError::Unfinished { end });
        }
        let has_pool =
            |component: &Component| matches!(component.placement, Placement::Striped { pool: Some(_), .. });
        let ends = components.windows(2).position(|pair| has_pool(&pair[0]) && !has_pool(&pair[1]));
        match ends {
            Some(index) => Err(LayoutError::PoolEnds { component: index + 2 }),
            None => Ok(Self { components }),
        }
    }

    /// One component for whole files.
    ///
    /// # Errors
    /// What [`Layout::new`] refuses.
    pub fn of_one(
        count: StripeCount,
        stripe_size: Bytes,
        pool: Option<PoolName>,
    ) -> Result<Self, LayoutError> {
        Self::new(vec![Component { end: None, placement: Placement::Striped { count, stripe_size, pool } }])
    }

    /// Its components; there is at least one.
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// How the rest of a large file is spread.
    pub fn last(&self) -> &Component {
        &self.components[self.components.len() - 1]
    }
}

impl Component {
    /// Where the next one begins; nothing behind the end of the file.
    fn check(&self, component: usize, start: Option<Bytes>) -> Result<Option<Bytes>, LayoutError> {
        let start = start.ok_or(LayoutError::BehindTheEnd { component })?;
        if let Some(end) = self.end {
            if end <= start {
                return Err(LayoutError::NotRising { component, start, end });
            }
            aligned(end)?;
        }
        match &self.placement {
            Placement::Metadata if component != 1 => Err(LayoutError::MetadataNotFirst { component }),
            Placement::Metadata if self.end.is_none_or(|end| end > MOST_ON_METADATA) => {
                Err(LayoutError::MetadataTooLarge)
            }
            Placement::Metadata => Ok(self.end),
            Placement::Striped { count, stripe_size, .. } => {
                count.check()?;
                check_stripe_size(*stripe_size)?;
                match self.end {
                    Some(end) if !end.0.is_multiple_of(stripe_size.0) => {
                        Err(LayoutError::EndsWithinStripe { component, end, stripe_size: *stripe_size })
                    }
                    end => Ok(end),
                }
            }
        }
    }
}

impl StripeCount {
    fn check(self) -> Result<(), LayoutError> {
        match self {
            Self::Of(count) | Self::Overstriped(count) if !(1..=MOST_STRIPES).contains(&count) => {
                Err(LayoutError::Count { count: count.into() })
            }
            Self::PerTarget(count) if !(2..=MOST_PER_TARGET).contains(&count) => {
                Err(LayoutError::PerTarget { count: count.into() })
            }
            _ => Ok(()),
        }
    }

    /// How many stripes that is where there are `targets`.
    pub fn among(self, targets: u32) -> u32 {
        match self {
            Self::Of(count) => u32::from(count).min(targets),
            Self::Overstriped(count) => count.into(),
            Self::All => targets,
            Self::PerTarget(count) => targets.saturating_mul(count.into()),
        }
    }
}

impl fmt::Display for StripeCount {
    /// As in a sentence: "4 targets".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Of(1) => f.write_str("1 target"),
            Self::Of(count) => write!(f, "{count} targets"),
            Self::All => f.write_str("all targets"),
            Self::Overstriped(count) => write!(f, "{count} stripes over all targets"),
            Self::PerTarget(count) => write!(f, "all targets, {count} stripes on each"),
        }
    }
}

impl PoolName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for PoolName {
    type Err = LayoutError;

    fn from_str(name: &str) -> Result<Self, LayoutError> {
        let is_legal = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        // One that begins with a dash would be an option to a tool.
        if (1..=64).contains(&name.len()) && name.chars().all(is_legal) && !name.starts_with('-') {
            Ok(Self(name.to_owned()))
        } else {
            Err(LayoutError::Pool { name: name.to_owned() })
        }
    }
}

/// Whether a stripe can be as large.
pub(crate) fn check_stripe_size(size: Bytes) -> Result<(), LayoutError> {
    aligned(size)?;
    if size < UNIT || size >= STRIPE_SIZES_END { Err(LayoutError::StripeSize { size }) } else { Ok(()) }
}

fn aligned(size: Bytes) -> Result<(), LayoutError> {
    if size.0.is_multiple_of(UNIT.0) { Ok(()) } else { Err(LayoutError::NotAligned { size }) }
}

/// The largest size of stripes up to `most` that divides `end` and is a power of two.
pub fn stripe_size_within(end: Bytes, most: Bytes) -> Bytes {
    let mut size = UNIT;
    while size.0 * 2 <= most.0 && end.0.is_multiple_of(size.0 * 2) {
        size = Bytes(size.0 * 2);
    }
    size
}
