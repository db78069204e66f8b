//! How a layout follows from a job, as data: `rules/thesis.toml` explains each line.

use ondeck_core::Bytes;
use serde::Deserialize;
use serde::de::{self, Deserializer};

/// A set of rules.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rules {
    /// What the answer calls them.
    pub name: String,
    /// What limits one stripe.
    pub stripe: StripeLimit,
    /// Whether targets that are busy count less.
    pub load: bool,
    /// What limits a node.
    pub node: NodeLimit,
    /// How a node's number of stripes is rounded.
    pub round: Rounding,
    /// What there are at least as many of as stripes.
    pub most: Most,
    /// Whether the stripes of a shared file become a factor of its writers.
    pub factor_of_writers: bool,
    /// The most stripes of a shared file on one target.
    pub overstripe: u8,
    /// How many stripes a file has that one process writes.
    pub file_per_process: FilePerProcess,
    /// Whether a file whose writers are not known is striped by its size.
    pub by_size: bool,
    /// Up to where the beginning of a file is on one target.
    #[serde(deserialize_with = "size")]
    pub head: Bytes,
    /// Whether that is up to the median file, if it is known.
    pub median: bool,
    /// A beginning that is not larger lies with the metadata.
    #[serde(deserialize_with = "size")]
    pub with_metadata: Bytes,
    /// The bytes of a stripe: from, and up to.
    #[serde(deserialize_with = "sizes")]
    pub stripe_size: [Bytes; 2],
}

/// What limits one stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StripeLimit {
    /// Its target.
    Target,
    /// Its target, and the target's part of its server's network.
    Share,
}

/// What limits a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeLimit {
    /// Its network.
    Link,
    /// Its network, and what its processes can do.
    Processes,
}

/// How a number of stripes is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rounding {
    /// No target has less to do than it could.
    Down,
    /// No node waits for a target.
    Up,
}

/// What there are at least as many of as stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Most {
    /// Storage servers.
    Servers,
    /// Storage targets.
    Targets,
}

/// How many stripes a file has that one process writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FilePerProcess {
    /// As many as a node can fill.
    Node,
    /// One, unless there are fewer files than targets.
    One,
}

/// Why a text is no set of rules.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// It is not TOML, or has not the lines that rules have.
    #[error("{0}")]
    Malformed(#[from] toml::de::Error),
    /// A line is against another, or against what a layout can be.
    #[error("{0}")]
    Impossible(&'static str),
}

impl Rules {
    /// The report's.
    pub fn thesis() -> Self {
        built_in(include_str!("../rules/thesis.toml"))
    }

    /// The default.
    pub fn tuned() -> Self {
        built_in(include_str!("../rules/tuned.toml"))
    }

    /// Reads a site's own.
    ///
    /// # Errors
    /// The line that is wrong.
    pub fn parse(text: &str) -> Result<Self, RulesError> {
        let rules: Self = toml::from_str(text)?;
        let [from, to] = rules.stripe_size;
        let is_stripe =
            |size: Bytes| crate::model::check_stripe_size(size).is_ok() && size.0.is_power_of_two();
        if !is_stripe(from) || !is_stripe(to) || from > to {
            return Err(RulesError::Impossible(
                "stripe_size must be two powers of two from 64KiB to 2GiB, the smaller one first",
            ));
        }
        if !(1..=crate::model::MOST_PER_TARGET).contains(&rules.overstripe) {
            return Err(RulesError::Impossible("overstripe must be 1 to 32"));
        }
        if rules.head == Bytes::ZERO || !rules.head.0.is_multiple_of(crate::model::UNIT.0) {
            return Err(RulesError::Impossible("head must be a multiple of 64KiB"));
        }
        if rules.with_metadata > crate::model::MOST_ON_METADATA {
            return Err(RulesError::Impossible("with_metadata must be at most 1GiB"));
        }
        Ok(rules)
    }
}

fn built_in(text: &str) -> Rules {
    match Rules::parse(text) {
        Ok(rules) => rules,
        // A test reads both.
        Err(error) => unreachable!("rules of this crate: {error}"),
    }
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

fn sizes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[Bytes; 2], D::Error> {
    let [from, to] = <[String; 2]>::deserialize(deserializer)?;
    let parse = |text: String| text.parse().map_err(de::Error::custom);
    Ok([parse(from)?, parse(to)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sets_are_read_and_differ() {
        assert_eq!(Rules::thesis().name, "thesis");
        assert_eq!(Rules::tuned().name, "tuned");
        assert_eq!(Rules::thesis().head, Bytes(16 << 20));
        assert_ne!(Rules::thesis().round, Rules::tuned().round);
    }

    #[test]
    fn a_wrong_line_is_told() {
        let wrong = |from: &str, to: &str| {
            let text = include_str!("../rules/tuned.toml");
            assert!(text.contains(from), "{from}");
            Rules::parse(&text.replace(from, to)).unwrap_err().to_string()
        };
        assert!(wrong("overstripe = 4", "overstripe = 33").contains("overstripe must be 1 to 32"));
        assert!(wrong("\"1MiB\", \"4MiB\"", "\"4MiB\", \"1MiB\"").contains("the smaller one first"));
        assert!(wrong("\"1MiB\", \"4MiB\"", "\"3MiB\", \"4MiB\"").contains("powers of two"));
        assert!(wrong("head = \"16MiB\"", "head = \"16\"").contains("head must be a multiple of 64KiB"));
        assert!(wrong("head = \"16MiB\"", "head = \"much\"").contains("`much` is not a size"));
        assert!(wrong("by_size", "by_weight").contains("by_weight"));
        assert!(wrong("round = \"up\"", "round = \"sideways\"").contains("sideways"));
    }
}
