//! CephFS: the layout of a directory is the value of its extended attribute `ceph.dir.layout`.
//!
//! A file is cut into stripe units, which are dealt out to `stripe_count` objects; when those have `object_size` bytes each,
//! the next as many follow. Which OSD has an object is computed from its name. There is one component: what a progressive
//! layout has for small files is lost.

use std::fmt;
use std::str::FromStr;

use ondeck_core::Bytes;
use ondeck_core::text::plain;

use crate::model::{Layout, LayoutError, Placement, StripeCount, UNIT};

/// The attribute that has it all; one that is not there means that the directory has what a parent has.
pub const ATTRIBUTE: &str = "ceph.dir.layout";
/// What an object holds if nobody says otherwise.
pub const DEFAULT_OBJECT_SIZE: Bytes = Bytes(4 << 20);

/// OSDs take no larger ones unless their administrator wants that (`osd_max_object_size`): what a program writes beyond it fails,
/// though the layout could be set.
pub const LARGEST_OBJECT: Bytes = Bytes(128 << 20);

/// The layout of a directory in CephFS.
///
/// ```
/// use ondeck_layout::ceph::DirLayout;
/// let text = "stripe_unit=1048576 stripe_count=4 object_size=4194304 pool=cephfs_data";
/// let layout: DirLayout = text.parse().unwrap();
/// assert_eq!(layout.stripe_count, 4);
/// assert_eq!(layout.to_string(), text);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirLayout {
    /// The bytes that go to one object before the next one's turn comes.
    pub stripe_unit: Bytes,
    /// The number of objects that are filled beside each other.
    pub stripe_count: u32,
    /// The bytes of an object: a multiple of the stripe unit.
    pub object_size: Bytes,
    /// The data pool; nothing: the filesystem's own, and what an attribute leaves out stays as it is.
    pub pool: Option<String>,
}

/// Why something is no layout of CephFS.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CephError {
    /// The attribute's value is not understood.
    #[error("{ATTRIBUTE} is `{}`, which is not understood: {what}", plain(text, 200))]
    Malformed {
        /// The value.
        text: String,
        /// What is missing in it, or wrong.
        what: &'static str,
    },
    /// Sizes that do not fit together.
    #[error(
        "objects of {} bytes in units of {}: both must be multiples of {UNIT}, and the first of the second",
        object_size.0,
        stripe_unit.0
    )]
    Sizes {
        /// The bytes of an object.
        object_size: Bytes,
        /// The bytes of a unit.
        stripe_unit: Bytes,
    },
    /// Sizes that can be set, and with which writing fails.
    #[error(
        "stripes of {stripe_size}: Ceph writes no objects of more than {LARGEST_OBJECT} (osd_max_object_size)"
    )]
    TooLarge {
        /// The bytes of a stripe.
        stripe_size: Bytes,
    },
    /// CephFS has no such placement.
    #[error("CephFS keeps no data with the metadata: leave -L mdt out")]
    OnMetadata,
    /// What the value describes is no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl DirLayout {
    /// What CephFS can do of a layout: its last component, over at most `osds` objects beside each other.
    ///
    /// # Errors
    /// CephFS has nothing like it.
    pub fn of(layout: &Layout, osds: u32) -> Result<Self, CephError> {
        match &layout.last().placement {
            Placement::Metadata => Err(CephError::OnMetadata),
            Placement::Striped { stripe_size, .. } if *stripe_size > LARGEST_OBJECT => {
                Err(CephError::TooLarge { stripe_size: *stripe_size })
            }
            Placement::Striped { count, stripe_size, pool } => Ok(Self {
                stripe_unit: *stripe_size,
                stripe_count: count.among(osds).max(1),
                object_size: DEFAULT_OBJECT_SIZE.round_up_to(*stripe_size),
                pool: pool.as_ref().map(ToString::to_string),
            }),
        }
    }

    /// The layout that it is. Its object size has no place there.
    ///
    /// # Errors
    /// More stripes than a [`Layout`] can have, or a pool with a longer name.
    pub fn layout(&self) -> Result<Layout, CephError> {
        let count = u16::try_from(self.stripe_count)
            .map_err(|_| LayoutError::Count { count: self.stripe_count.into() })?;
        let pool = self.pool.as_deref().map(str::parse).transpose()?;
        Ok(Layout::of_one(StripeCount::Of(count), self.stripe_unit, pool)?)
    }

    fn check(&self) -> Result<(), CephError> {
        let (unit, object) = (self.stripe_unit.0, self.object_size.0);
        let fits = unit != 0
            && object != 0
            && unit.is_multiple_of(UNIT.0)
            && object.is_multiple_of(UNIT.0)
            && object.is_multiple_of(unit);
        if !fits {
            return Err(CephError::Sizes { object_size: self.object_size, stripe_unit: self.stripe_unit });
        }
        if self.stripe_count == 0 { Err(LayoutError::Count { count: 0 }.into()) } else { Ok(()) }
    }
}

impl fmt::Display for DirLayout {
    /// The value of the attribute.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, count, object) = (self.stripe_unit.0, self.stripe_count, self.object_size.0);
        write!(f, "stripe_unit={unit} stripe_count={count} object_size={object}")?;
        if let Some(pool) = &self.pool {
            write!(f, " pool={pool}")?;
        }
        Ok(())
    }
}

impl FromStr for DirLayout {
    type Err = CephError;

    fn from_str(text: &str) -> Result<Self, CephError> {
        let malformed = |what| CephError::Malformed { text: text.to_owned(), what };
        let (mut unit, mut count, mut object, mut pool) = (None, None, None, None);
        for word in text.split_ascii_whitespace() {
            let (key, value) = word.split_once('=').ok_or_else(|| malformed("a word is no key=value"))?;
            let number = || value.parse::<u64>().map_err(|_| malformed("a number is malformed"));
            match key {
                "stripe_unit" => unit = Some(Bytes(number()?)),
                "stripe_count" => {
                    count = Some(value.parse().map_err(|_| malformed("the stripe count is malformed"))?);
                }
                "object_size" => object = Some(Bytes(number()?)),
                "pool" => pool = Some(value.to_owned()),
                // A namespace within the pool; it stays as it is.
                "pool_namespace" => {}
                _ => return Err(malformed("there is a key that is not known")),
            }
        }
        let layout = Self {
            stripe_unit: unit.ok_or_else(|| malformed("there is no stripe_unit"))?,
            stripe_count: count.ok_or_else(|| malformed("there is no stripe_count"))?,
            object_size: object.ok_or_else(|| malformed("there is no object_size"))?,
            pool,
        };
        layout.check()?;
        Ok(layout)
    }
}
