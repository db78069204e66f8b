//! What `lfs getstripe` shows.
//!
//! Every line is `key: value`, also in the form without `--yaml`, which differs in what separates the components. So the lines
//! are read by their keys: a document's structure would say nothing more, and older versions leave values empty.

use ondeck_core::Bytes;
use ondeck_core::text::plain;

use crate::model::{
    Component, DEFAULT_STRIPE_SIZE, Layout, LayoutError, Placement, StripeCount, stripe_size_within,
};

/// Why a text is not what `lfs getstripe` shows of a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GetstripeError {
    /// A value that is none.
    #[error("lfs getstripe shows `{}`, and {what} was expected", plain(line, 120))]
    Value {
        /// The line.
        line: String,
        /// What should have been there.
        what: &'static str,
    },
    /// There is no stripe count in it.
    #[error("lfs getstripe shows no layout, only `{}`", plain(text, 120))]
    Nothing {
        /// What it shows.
        text: String,
    },
    /// Something that a [`Layout`] does not have.
    #[error("the directory has {what}")]
    NotSupported {
        /// What it is.
        what: &'static str,
    },
    /// The components are no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// What stands in the lines of one component.
#[derive(Default)]
struct Lines {
    has_begun: bool,
    end: Option<Option<Bytes>>,
    count: Option<i64>,
    stripe_size: Option<u64>,
    overstriped: bool,
    on_metadata: bool,
    first_target: Option<i64>,
    pool: Option<String>,
}

/// Reads the output of `lfs getstripe --yaml -d DIR` (and of `lfs getstripe FILE`).
///
/// # Errors
/// What is not such an output, and what a [`Layout`] does not have: mirrors, parts that extend themselves.
pub fn parse(text: &str) -> Result<Layout, GetstripeError> {
    let mut components: Vec<Lines> = Vec::new();
    let mut current = Lines::default();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        let wrong = |what| GetstripeError::Value { line: line.trim().to_owned(), what };
        let number = || value.parse::<i64>().map_err(|_| wrong("a number"));
        match key.trim() {
            "lcm_mirror_count" if value != "1" => {
                return Err(GetstripeError::NotSupported { what: "mirrored files" });
            }
            // What begins a component differs; where it begins is what all have.
            "lcme_extent.e_start" => {
                if current.has_begun {
                    components.push(std::mem::take(&mut current));
                }
                current.has_begun = true;
            }
            "lcme_extent.e_end" => {
                let end = match value {
                    "EOF" => None,
                    _ => Some(Bytes(value.parse().map_err(|_| wrong("an end"))?)),
                };
                current.end = Some(end);
            }
            "stripe_count" | "lmm_stripe_count" => current.count = Some(number()?),
            "stripe_size" | "lmm_stripe_size" => {
                current.stripe_size = Some(value.parse().map_err(|_| wrong("a size"))?);
            }
            "extension_size" | "lmm_extension_size" => {
                return Err(GetstripeError::NotSupported { what: "components that extend themselves" });
            }
            "pattern" | "lmm_pattern" => match value {
                // Of a directory without a layout of its own it is not said how its files are striped: as ever.
                "raid0" | "1" | "0" => {}
                "raid0,overstriped" => current.overstriped = true,
                "mdt" => current.on_metadata = true,
                _ => return Err(wrong("raid0 or mdt")),
            },
            // Of a file it is where it began, of a directory where all would begin.
            "stripe_offset" => current.first_target = Some(number()?),
            "pool" | "lmm_pool" => current.pool = Some(value.to_owned()),
            _ => {}
        }
    }
    components.push(current);
    if components.iter().any(|lines| lines.count.is_none()) {
        return Err(GetstripeError::Nothing { text: text.to_owned() });
    }
    let components = components.into_iter().map(Lines::component).collect::<Result<_, _>>()?;
    Ok(Layout::new(components)?)
}

impl Lines {
    fn component(self) -> Result<Component, GetstripeError> {
        let end = self.end.flatten();
        if self.on_metadata {
            return Ok(Component { end, placement: Placement::Metadata });
        }
        if self.first_target.is_some_and(|target| target != -1) {
            return Err(GetstripeError::NotSupported { what: "a first target for all files (-i)" });
        }
        let count = self.count.unwrap_or(0);
        let number = || u16::try_from(count).map_err(|_| LayoutError::Count { count });
        let count = match (self.overstriped, count) {
            (_, -1) => StripeCount::All,
            (true, ..-1) => StripeCount::PerTarget(
                u8::try_from(-count).map_err(|_| LayoutError::PerTarget { count: -count })?,
            ),
            (true, _) => StripeCount::Overstriped(number()?),
            // The filesystem's own: one.
            (false, 0) => StripeCount::Of(1),
            (false, _) => StripeCount::Of(number()?),
        };
        let stripe_size = match (self.stripe_size.unwrap_or(0), end) {
            (0, Some(end)) => stripe_size_within(end, DEFAULT_STRIPE_SIZE),
            (0, None) => DEFAULT_STRIPE_SIZE,
            (size, _) => Bytes(size),
        };
        let pool = self.pool.map(|pool| pool.parse()).transpose()?;
        Ok(Component { end, placement: Placement::Striped { count, stripe_size, pool } })
    }
}
