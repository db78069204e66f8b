//! The options of `lfs setstripe`.
//!
//! [`Setstripe`] is what the tool makes of its options: what an option leaves out stays out, for the filesystem to fill in.
//! A [`Layout`] has everything. So what a person writes is read by the tool's rules first, and becomes a layout then.

use std::fmt::Write as _;

use ondeck_core::Bytes;
use ondeck_core::text::plain;

use crate::model::{
    Component, DEFAULT_STRIPE_SIZE, Layout, LayoutError, MOST_ON_METADATA, MOST_PER_TARGET, MOST_STRIPES,
    Placement, PoolName, StripeCount, UNIT, check_stripe_size, stripe_size_within,
};

/// The characters of a pool's name (Lustre's `LOV_MAXPOOLNAME`).
const MOST_POOL_NAME: usize = 15;

/// A component that extends itself does so by multiples of it.
const EXTENSION_UNIT: Bytes = Bytes(64 << 20);

/// Why `lfs setstripe` would refuse options, or we do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// The last option has no value.
    #[error("`{}` needs a value", plain(option, 40))]
    NoValue {
        /// The option.
        option: String,
    },
    /// An option that is not known here.
    #[error("`{}` is not understood: a layout has -E, -c, -C, -S, -p, -L and -i", plain(word, 80))]
    Unknown {
        /// The word.
        word: String,
    },
    /// A value that is none.
    #[error("`{} {}`: {what}", plain(option, 40), plain(value, 40))]
    Value {
        /// The option.
        option: String,
        /// Its value.
        value: String,
        /// What it should have been.
        what: &'static str,
    },
    /// What no layout may be.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A name that only other filesystems could have.
    #[error("pool {pool}: the name of a pool of Lustre has at most {MOST_POOL_NAME} characters")]
    PoolName {
        /// The pool.
        pool: PoolName,
    },
    /// There is no option at all.
    #[error("there are no options")]
    Empty,
    /// Options after the last `-E` belong to it; with data on the metadata server, none but the end may be there.
    #[error("component {component} lies with the metadata (-L mdt), and takes no option but -E")]
    OptionOfMetadata {
        /// Counted from 1.
        component: usize,
    },
    /// The whole file can't be with its metadata.
    #[error("-L mdt needs -E: only the beginning of a file can lie with the metadata")]
    MetadataWithoutEnd,
    /// A component without a count follows one that is over-striped.
    #[error(
        "component {component} needs -c or -C: what it takes over from -C before it depends on the version"
    )]
    AfterOverstriping {
        /// Counted from 1.
        component: usize,
    },
    /// A layout here has none of these.
    #[error("component {component}: {what}")]
    NotSupported {
        /// Counted from 1.
        component: usize,
        /// What, and what to do.
        what: &'static str,
    },
}

/// Which kind of stripes a component has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pattern {
    /// One on each of its targets.
    #[default]
    Raid0,
    /// Several on one target, perhaps.
    Overstriped,
    /// None: the data is with the metadata.
    Metadata,
}

/// What `lfs setstripe` sends for one component. What is 0 or -1 is left to the filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it begins.
    pub start: Bytes,
    /// Where it ends; nothing: at the end of the file.
    pub end: Option<Bytes>,
    /// It is the part by which the one before it extends itself.
    pub extension: bool,
    /// Which kind of stripes.
    pub pattern: Pattern,
    /// The bytes of a stripe; of an extension, the KiB by which it extends.
    pub stripe_size: u64,
    /// How many stripes: 0 as the filesystem does, -1 on every target, less as many on each.
    pub count: i64,
    /// The target that it begins with; nothing: any.
    pub first_target: Option<u32>,
    /// The pool of targets.
    pub pool: Option<PoolName>,
}

/// The components that options describe, as `lfs setstripe` takes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setstripe {
    entries: Vec<Entry>,
}

/// What stands between two `-E`.
#[derive(Clone, Debug, Default)]
struct Options {
    end: Option<Option<Bytes>>,
    count: Option<i64>,
    overstriped: bool,
    stripe_size: Option<Bytes>,
    pool: Option<PoolName>,
    on_metadata: bool,
    extension: Option<Bytes>,
    first_target: Option<u32>,
}

impl Setstripe {
    /// Reads options like `-E 16M -c 1 -E -1 -c 4`, without the directory.
    ///
    /// # Errors
    /// What `lfs setstripe` refuses, and a few things that versions of it take differently.
    pub fn parse(options: &str) -> Result<Self, OptionError> {
        let setstripe = Self::parse_of_any(options)?;
        let pools = setstripe.entries.iter().filter_map(|entry| entry.pool.as_ref());
        match pools.into_iter().find(|pool| pool.as_str().len() > MOST_POOL_NAME) {
            Some(pool) => Err(OptionError::PoolName { pool: pool.clone() }),
            None => Ok(setstripe),
        }
    }

    /// The same for any filesystem, whose pools may have longer names.
    ///
    /// # Errors
    /// As [`Setstripe::parse`].
    pub fn parse_of_any(options: &str) -> Result<Self, OptionError> {
        let mut components = Components::default();
        let mut words = options.split_ascii_whitespace();
        while let Some(word) = words.next() {
            let (option, attached) = split(word)?;
            let value = match attached {
                Some(value) => value,
                None => words.next().ok_or_else(|| OptionError::NoValue { option: word.to_owned() })?,
            };
            components.take(option, value)?;
        }
        components.finish()
    }

    /// What it sends, a component each.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The layout that a Lustre with its own defaults makes of it: one stripe of 1 MiB where nothing is said.
    ///
    /// # Errors
    /// What a [`Layout`] does not have: parts that extend themselves, a first target, an end before that of the file.
    pub fn layout(&self) -> Result<Layout, OptionError> {
        let component = |(index, entry): (usize, &Entry)| {
            let not_supported = |what| Err(OptionError::NotSupported { component: index + 1, what });
            if entry.extension {
                return not_supported(
                    "components that extend themselves (-z) can't be set here; leave -z out",
                );
            }
            if entry.first_target.is_some() {
                return not_supported(
                    "a first target (-i) would put all files of the directory on the same disks; leave -i out",
                );
            }
            let count = entry.count;
            let placement = match entry.pattern {
                Pattern::Metadata => Placement::Metadata,
                pattern => Placement::Striped {
                    count: match (pattern, count) {
                        (_, -1) => StripeCount::All,
                        (Pattern::Overstriped, ..-1) => StripeCount::PerTarget(-count as u8),
                        (Pattern::Overstriped, _) => StripeCount::Overstriped(count as u16),
                        (_, 0) => StripeCount::Of(1),
                        (_, _) => StripeCount::Of(count as u16),
                    },
                    stripe_size: match (entry.stripe_size, entry.end) {
                        (0, Some(end)) => stripe_size_within(end, DEFAULT_STRIPE_SIZE),
                        (0, None) => DEFAULT_STRIPE_SIZE,
                        (size, _) => Bytes(size),
                    },
                    pool: entry.pool.clone(),
                },
            };
            Ok(Component { end: entry.end, placement })
        };
        let components = self.entries.iter().enumerate().map(component).collect::<Result<_, _>>()?;
        Ok(Layout::new(components)?)
    }
}

#[derive(Default)]
struct Components {
    entries: Vec<Entry>,
    /// Those of the component that is being read.
    options: Options,
    /// Whether the one before it was over-striped.
    after_overstriping: bool,
}

impl Components {
    fn take(&mut self, option: char, value: &str) -> Result<(), OptionError> {
        let wrong = |what| OptionError::Value { option: format!("-{option}"), value: value.to_owned(), what };
        let size = || parse_size(value).ok_or_else(|| wrong("it is not a size, like 64K, 16M or 4G"));
        match option {
            'E' => {
                let end = match value {
                    "-1" | "EOF" | "eof" => None,
                    _ => Some(size()?),
                };
                if self.options.end.is_some() {
                    self.close()?;
                }
                self.options.end = Some(end);
            }
            'c' | 'C' => {
                let count: i64 = value
                    .parse()
                    .map_err(|_| wrong("it is not a number of stripes, like 4, or -1 for all"))?;
                let most: i64 = MOST_STRIPES.into();
                let least = if option == 'C' { -i64::from(MOST_PER_TARGET) } else { -1 };
                if count == 0 || count > most || count < least {
                    return Err(if count < -1 && option == 'C' {
                        LayoutError::PerTarget { count: -count }.into()
                    } else {
                        LayoutError::Count { count }.into()
                    });
                }
                self.options.count = Some(count);
                self.options.overstriped = option == 'C';
            }
            'S' => {
                let size = size()?;
                check_stripe_size(size)?;
                self.options.stripe_size = Some(size);
            }
            'p' => self.options.pool = Some(value.parse()?),
            'L' if value == "mdt" => self.options.on_metadata = true,
            'L' if value == "raid0" => self.options.on_metadata = false,
            'L' => return Err(wrong("only `mdt` and `raid0` are kinds of a layout here")),
            'z' => {
                let size = size()?;
                if size < EXTENSION_UNIT || !size.0.is_multiple_of(EXTENSION_UNIT.0) {
                    return Err(wrong("a component extends itself by a multiple of 64M"));
                }
                self.options.extension = Some(size);
            }
            'i' if value == "-1" => self.options.first_target = None,
            'i' => {
                let target = value.parse().map_err(|_| wrong("it is not the number of a target"))?;
                self.options.first_target = Some(target);
            }
            _ => return Err(OptionError::Unknown { word: format!("-{option}") }),
        }
        Ok(())
    }

    /// Ends the component that is being read; the next one takes over what it takes over in `lfs`.
    fn close(&mut self) -> Result<(), OptionError> {
        let options = std::mem::take(&mut self.options);
        let component = self.entries.iter().filter(|entry| !entry.extension).count() + 1;
        let start = match self.entries.last() {
            Some(Entry { end: None, .. }) => return Err(LayoutError::BehindTheEnd { component }.into()),
            Some(Entry { end: Some(end), .. }) => *end,
            None => Bytes::ZERO,
        };
        let end = options.end.flatten();
        if let Some(end) = end {
            if end <= start {
                return Err(LayoutError::NotRising { component, start, end }.into());
            }
            if !end.0.is_multiple_of(UNIT.0) {
                return Err(LayoutError::NotAligned { size: end }.into());
            }
        }
        if options.on_metadata {
            self.entries.push(on_metadata(&options, component, start)?);
            return Ok(());
        }
        if self.after_overstriping && options.count.is_none() {
            return Err(OptionError::AfterOverstriping { component });
        }
        if let (Some(end), Some(size)) = (end, options.stripe_size)
            && !end.0.is_multiple_of(size.0)
        {
            return Err(LayoutError::EndsWithinStripe { component, end, stripe_size: size }.into());
        }
        let mut entry = Entry {
            start,
            end,
            extension: false,
            pattern: if options.overstriped { Pattern::Overstriped } else { Pattern::Raid0 },
            stripe_size: options.stripe_size.unwrap_or_default().0,
            count: options.count.unwrap_or(0),
            first_target: options.first_target,
            pool: options.pool.clone(),
        };
        if let Some(size) = options.extension {
            // The first begins with as much as it extends itself by, and others with nothing.
            let begun = if start == Bytes::ZERO { size } else { start };
            let extension =
                Entry { start: begun, extension: true, stripe_size: size.0 >> 10, ..entry.clone() };
            entry.end = Some(begun);
            self.entries.extend([entry, extension]);
        } else {
            self.entries.push(entry);
        }
        self.after_overstriping = options.overstriped;
        self.options = Options {
            count: options.count.filter(|_| !options.overstriped),
            stripe_size: options.stripe_size,
            pool: options.pool,
            ..Options::default()
        };
        Ok(())
    }

    fn finish(mut self) -> Result<Setstripe, OptionError> {
        let options = &self.options;
        if options.end.is_none() {
            // Without -E there is one component, for the whole file.
            if options.on_metadata {
                return Err(OptionError::MetadataWithoutEnd);
            }
            let says_something =
                options.count.is_some() || options.stripe_size.is_some() || options.pool.is_some();
            if !says_something {
                return Err(OptionError::Empty);
            }
        }
        self.close()?;
        Ok(Setstripe { entries: self.entries })
    }
}

fn on_metadata(options: &Options, component: usize, start: Bytes) -> Result<Entry, OptionError> {
    if component != 1 {
        return Err(LayoutError::MetadataNotFirst { component }.into());
    }
    let end = options.end.flatten().filter(|end| *end <= MOST_ON_METADATA);
    let end = end.ok_or(LayoutError::MetadataTooLarge)?;
    let has_others = options.count.is_some()
        || options.stripe_size.is_some()
        || options.pool.is_some()
        || options.extension.is_some()
        || options.first_target.is_some();
    if has_others {
        return Err(OptionError::OptionOfMetadata { component });
    }
    Ok(Entry {
        start,
        end: Some(end),
        extension: false,
        pattern: Pattern::Metadata,
        stripe_size: end.0,
        count: 0,
        first_target: None,
        pool: None,
    })
}

/// An option's letter, and the value that is attached to it.
fn split(word: &str) -> Result<(char, Option<&str>), OptionError> {
    const LONG: [(&str, char); 13] = [
        ("component-end", 'E'),
        ("comp-end", 'E'),
        ("stripe-count", 'c'),
        ("overstripe-count", 'C'),
        ("stripe-size", 'S'),
        ("pool", 'p'),
        ("layout", 'L'),
        ("extension-size", 'z'),
        ("ext-size", 'z'),
        ("stripe-index", 'i'),
        ("index", 'i'),
        ("count", 'c'),
        ("size", 'S'),
    ];
    let unknown = || OptionError::Unknown { word: word.to_owned() };
    if let Some(long) = word.strip_prefix("--") {
        let (name, value) = match long.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (long, None),
        };
        let (_, option) = LONG.iter().find(|(other, _)| *other == name).ok_or_else(unknown)?;
        return Ok((*option, value));
    }
    let mut letters = word.strip_prefix('-').ok_or_else(unknown)?.chars();
    let option = letters.next().filter(char::is_ascii_alphabetic).ok_or_else(unknown)?;
    Ok((option, Some(letters.as_str()).filter(|value| !value.is_empty())))
}

/// A size as `lfs` writes it, in powers of 1024.
fn parse_size(text: &str) -> Option<Bytes> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return None,
    };
    // `parse` would take a sign.
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).map(Bytes)
}

/// The options of `lfs setstripe` for a layout, a word each. Every component says its count and the size of its stripes: what
/// is left out would be taken over from the one before.
pub fn options(layout: &Layout) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let is_plain = layout.components().len() == 1;
    for component in layout.components() {
        if !is_plain {
            words.push("-E".to_owned());
            words.push(component.end.map_or("-1".to_owned(), size));
        }
        match &component.placement {
            Placement::Metadata => words.extend(["-L".to_owned(), "mdt".to_owned()]),
            Placement::Striped { count, stripe_size, pool } => {
                let (option, count) = match count {
                    StripeCount::Of(count) => ("-c", count.to_string()),
                    StripeCount::All => ("-c", "-1".to_owned()),
                    StripeCount::Overstriped(count) => ("-C", count.to_string()),
                    StripeCount::PerTarget(count) => ("-C", format!("-{count}")),
                };
                words.extend([option.to_owned(), count, "-S".to_owned(), size(*stripe_size)]);
                if let Some(pool) = pool {
                    words.extend(["-p".to_owned(), pool.to_string()]);
                }
            }
        }
    }
    words
}

/// A size as `lfs` reads it.
fn size(size: Bytes) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let mut text = String::new();
    let (number, unit) = UNITS
        .into_iter()
        .find(|(shift, _)| size.0 != 0 && size.0.is_multiple_of(1 << shift))
        .map_or((size.0, ""), |(shift, unit)| (size.0 >> shift, unit));
    // A String takes every text.
    let _ = write!(text, "{number}{unit}");
    text
}
